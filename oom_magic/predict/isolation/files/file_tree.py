"""A private layer over the file system: what is written there is read back from there, and the disk stays as it is.

Names are looked up as a kernel does it, one part after another, in a tree whose nodes say which real file stands
behind a name: one of the user's, as long as nobody writes to it, else one in a private folder. A node is made when
something is changed at or below it; everything else is looked up on the disk. Renaming moves a node, removing leaves
None in its place.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from threading import RLock
from typing import Any

from oom_magic.language import _

COPIED_BYTES = 1 << 30  # a larger file of the user's is not copied to be written to
_MOST_LINKS = 40  # as Linux follows, path_resolution(7)
_LONGEST_ENDING = 50


class NodeKind(Enum):
    """What a name stands for; devices, pipes and sockets are left to the real system."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"
    OTHER = "other"


@dataclass(eq=False, slots=True)
class Node:
    """A file, folder or link as the run sees it.

    ``backing`` is the real thing that holds its contents and its state; in a folder, ``lower`` is the user's folder
    whose names are seen through it (None: it is the run's own), and ``entries`` what the run changed in it.
    """

    kind: NodeKind
    backing: str
    parent: Node | None = None
    name: str = ""
    lower: str | None = None
    is_private: bool = False
    is_promised: bool = False  # a library of C will make the file, perhaps
    entries: dict[str, Node | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FoundNode:
    """What a path resolves to: the folder, the name in it, and the node there (None: nothing)."""

    parent: Node
    name: str
    node: Node | None


class FileTree:
    """The layer. Its functions raise OSError as the system would; all real calls are its own.

    ``note`` is told what the user's files would have lost.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note
        self.lock = RLock()
        self.is_untouched = True
        self._working: Node | None = None  # the folder that the run went to; None: where the process is
        self.folders_open: dict[int, Node] = {}  # by file descriptor
        self._roots: dict[str, Node] = {}
        self._private = ""
        self._above = _temporary_folder()  # the run may be asking just now, and hold the lock
        self._num_made = 0

    # -- looking up -----------------------------------------------------------

    def find(self, path: str, follow: bool = True, folder: Node | None = None) -> FoundNode:
        """Where ``path`` leads; a link at its end is followed if ``follow``. Relative paths begin at ``folder``."""
        if not path:
            raise _error(errno.ENOENT, path)
        if "\0" in path:
            raise ValueError("embedded null byte")
        if self.is_private(path):  # a library was told where the file really is
            kind = _kind(os.lstat(path).st_mode)
            node = Node(kind, path, None, path, is_private=True)
            return FoundNode(node, path, node)
        if folder is None and self._working is not None:
            folder = self._working
            if not os.path.isabs(path) and not self._is_there(folder):
                raise _error(errno.ENOENT, path)
        if os.path.isabs(path) or folder is None:
            folder, path = self._root(path if os.path.isabs(path) else os.path.join(os.getcwd(), path))
        return self._walk(folder, path, follow)

    def node(self, path: str, follow: bool = True, folder: Node | None = None) -> Node:
        """What is at ``path``. Raises FileNotFoundError."""
        node = self.find(path, follow, folder).node
        if node is None:
            raise _error(errno.ENOENT, path)
        return node

    def names(self, folder: Node) -> list[str]:
        """The names in a folder: those on the disk that are left, then the run's own."""
        if folder.kind is not NodeKind.DIRECTORY:
            raise _error(errno.ENOTDIR, folder.name)
        lower = os.listdir(folder.lower) if folder.lower is not None else []
        there = [name for name in lower if name not in folder.entries or self.child(folder, name)]
        return there + [name for name in folder.entries if name not in lower and self.child(folder, name)]

    def child(self, folder: Node, name: str) -> Node | None:
        """What a folder has under a name."""
        if name in folder.entries:
            node = folder.entries[name]
            return None if node is None or (node.is_promised and not os.path.lexists(node.backing)) else node
        if folder.lower is None:
            return None
        path = os.path.join(folder.lower, name)
        try:
            kind = _kind(os.lstat(path).st_mode)
            if kind is NodeKind.LINK and path.startswith("/proc/"):  # these lead to what has no path
                kind = _kind(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Node(kind, path, folder, name, lower=path if kind is NodeKind.DIRECTORY else None)

    def path(self, node: Node) -> str:
        """The path of a node as the run sees it."""
        if node.parent is None:
            return node.backing
        return os.path.join(self.path(node.parent), node.name)

    def enter(self, folder: Node) -> None:
        """Make ``folder`` the run's working directory."""
        if folder.kind is not NodeKind.DIRECTORY:
            raise _error(errno.ENOTDIR, folder.name)
        self._working, self.is_untouched = self.adopt(folder), False

    def current_directory(self) -> str:
        """The run's working directory."""
        if self._working is None:
            return os.getcwd()
        if not self._is_there(self._working):
            raise _error(errno.ENOENT, "")
        return self.path(self._working)

    def _is_there(self, node: Node) -> bool:
        """Whether a node that was kept is still in the tree."""
        while node.parent is not None:
            if node.parent.entries.get(node.name) is not node:
                return False
            node = node.parent
        return True

    def _root(self, path: str) -> tuple[Node, str]:
        drive, rest = os.path.splitdrive(path)
        top = drive + os.sep
        if top not in self._roots:
            self._roots[top] = Node(NodeKind.DIRECTORY, top, lower=top)
        return self._roots[top], rest

    def _walk(self, folder: Node, path: str, follow: bool) -> FoundNode:
        parts = _parts(path)
        here, num_links = folder, 0
        while parts:
            part = parts.pop()
            if here.kind is not NodeKind.DIRECTORY:
                raise _error(errno.ENOTDIR, path)
            if part in ("", os.curdir):
                continue
            if part == os.pardir:
                here = here.parent or here
                continue
            child = self.child(here, part)
            if child is None:
                if any(rest not in ("", os.curdir) for rest in parts):
                    raise _error(errno.ENOENT, path)
                return FoundNode(here, part, None)
            if child.kind is NodeKind.LINK and (follow or parts):
                num_links += 1
                if num_links > _MOST_LINKS:
                    raise _error(errno.ELOOP, path)
                target = os.readlink(child.backing)
                if os.path.isabs(target):
                    here, target = self._root(target)
                parts += _parts(target)
                continue
            here = child
        return FoundNode(here.parent or here, here.name, here)

    # -- changing -------------------------------------------------------------

    def put(self, parent: Node, name: str, node: Node | None) -> None:
        """Set the entry of a folder for a name: a node, or None for a removed one."""
        folder = self.adopt(parent)
        self.writable(folder)
        os.utime(folder.backing)
        if node is not None:
            folder.entries[name] = node
            node.parent, node.name = folder, name
        elif self.is_users(folder, name):
            folder.entries[name] = None
        else:
            folder.entries.pop(name, None)

    def is_users(self, folder: Node, name: str) -> bool:
        """Whether the user has something under that name."""
        return folder.lower is not None and os.path.lexists(os.path.join(folder.lower, name))

    def remove(self, parent: Node, name: str, node: Node) -> None:
        """Remove ``node`` from a folder; of a user's file only the name is removed."""
        self.put(parent, name, None)
        if node.is_private and node.kind is not NodeKind.DIRECTORY:
            os.unlink(node.backing)

    def check_changeable(self, folder: Node) -> None:
        """Raise PermissionError if the user may not create or remove entries in the real folder."""
        if not os.access(folder.lower or folder.backing, os.W_OK):
            raise _error(errno.EACCES, folder.backing)

    def writable(self, node: Node, truncates: bool = False) -> str:
        """The real file to write to in place of ``node``: a private one, with what it held unless ``truncates``."""
        if node.is_private or node.kind is NodeKind.OTHER:
            return node.backing
        if node.kind is NodeKind.FILE and not os.access(node.backing, os.W_OK):
            raise _error(errno.EACCES, node.backing)
        made = self.new_name(node.name)
        if node.kind is NodeKind.DIRECTORY:
            os.mkdir(made)
        elif node.kind is NodeKind.LINK:
            os.symlink(os.readlink(node.backing), made)
        else:
            self._copy(node, made, truncates)
        if node.kind is not NodeKind.LINK:
            shutil.copystat(node.backing, made)
        node.backing, node.is_private = made, True
        self.adopt(node)
        return made

    def make(self, parent: Node, name: str, kind: NodeKind, create: Callable[[str], Any]) -> Any:
        """A new file, folder or link; what ``create``, which gets the real path, returns."""
        self.check_changeable(parent)
        backing = self.new_name(name)
        created = create(backing)
        self.put(parent, name, Node(kind, backing, is_private=True))
        return created

    def promise(self, path: str) -> str:
        """A private real path for a library that itself opens ``path`` for reading, writing or creating."""
        with self.lock:
            self.begin()
            found = self.find(path)
            if found.node is not None:
                return self.writable(found.node)
            node = Node(NodeKind.FILE, self.new_name(found.name), is_private=True, is_promised=True)
            self.put(found.parent, found.name, node)
            return node.backing

    def real_path(self, path: str) -> str:
        """The real file behind ``path``, to be read only; ``path`` itself where there is none."""
        with self.lock:
            node = None if self.is_untouched else self.find(path).node
            return path if node is None else node.backing

    def begin(self) -> None:
        """Make the private folder, which the run does not see; called before the run changes anything."""
        if not self._private:
            self._private = tempfile.mkdtemp(prefix="oom_magic_", dir=self._above)
            self.is_untouched = False
            hidden = self.find(self._private)
            self.put(hidden.parent, hidden.name, None)
            self.note(_("files: what the dry run writes can be read back, and is discarded when it ends"))

    def new_name(self, name: str) -> str:
        """An unused real path with the suffix of the name, which some libraries check."""
        self._num_made += 1
        return os.path.join(self._private, f"{self._num_made}_{name[-_LONGEST_ENDING:]}")

    def is_private(self, path: str) -> bool:
        """Whether a real path is the layer's own."""
        return bool(self._private) and path.startswith(self._private)

    def discard(self) -> None:
        """Delete the layer and everything that was written to it."""
        if self._private:
            shutil.rmtree(self._private, ignore_errors=True)

    def _copy(self, node: Node, target: str, truncates: bool) -> None:
        num_bytes = os.stat(node.backing).st_size
        if truncates:
            num_bytes = 0
            open(target, "wb").close()
        elif num_bytes > COPIED_BYTES:
            raise OSError(
                errno.EFBIG,
                _("a dry run writes to a copy, and copies no file larger than {size_bytes}", size_bytes=COPIED_BYTES),
                node.backing,
            )
        else:
            shutil.copyfile(node.backing, target)

    def adopt(self, node: Node) -> Node:
        """The node of the tree for one that was found: itself from now on, if there was none."""
        if node.parent is None:
            return node
        folder = self.adopt(node.parent)
        there = folder.entries.get(node.name)
        if there is not None:
            return there
        folder.entries[node.name] = node
        node.parent = folder
        return node


def _temporary_folder() -> str:
    """Where the private folder is made."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return os.curdir  # what is wrong with that one is said when something is written


def _kind(mode: int) -> NodeKind:
    if stat.S_ISDIR(mode):
        return NodeKind.DIRECTORY
    if stat.S_ISLNK(mode):
        return NodeKind.LINK
    return NodeKind.FILE if stat.S_ISREG(mode) else NodeKind.OTHER


def _parts(path: str) -> list[str]:
    """The parts of a path, the first at the end."""
    return (path.replace(os.altsep, os.sep) if os.altsep else path).split(os.sep)[::-1]


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
