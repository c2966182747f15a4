"""Python's ways to the file system, answered from the run's layer (``FileTree``): ``open`` and the functions of ``os``.

Everything above them (``pathlib``, ``shutil``, ``tempfile``, ``zipfile``, ``csv``, NumPy, ...) is made of these.
"""

from __future__ import annotations

import errno
import functools
import io
import os
from collections.abc import Callable
from typing import Any

from oom_magic.language import _
from oom_magic.predict.isolation.files.descriptors import Descriptors
from oom_magic.predict.isolation.files.file_tree import FileTree, FoundNode, Node, NodeKind
from oom_magic.predict.isolation.files.folder_entries import Entries, FolderEntry, like, state_of
from oom_magic.predict.isolation.run_threads import Scope

try:
    import _posixshmem as shared_memory  # type: ignore[import-not-found]
except ImportError:  # not POSIX
    shared_memory = None

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_UNNAMED = getattr(os, "O_TMPFILE", 0)
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_STATE = "chmod chown lchown utime setxattr removexattr chflags lchflags lchmod"  # changes of a file's state
_QUESTIONS = "getxattr listxattr statvfs pathconf"


def _in_memory(path: str) -> str:
    """The file of a named piece of shared memory, shm_overview(7)."""
    return "/dev/shm/" + path.lstrip("/")


class FileCalls:
    """The replacements: ``replacements()`` by the real function. Each acts for the run's threads only."""

    def __init__(self, tree: FileTree, scope: Scope, numbers: Descriptors) -> None:
        self._tree = tree
        self._scope = scope
        self._numbers = numbers

    def replacements(self) -> dict[str, Any]:
        """The functions to stand in for those of ``os`` of the same name, for ``os.open``, and for those of shared
        memory: what is unlinked there is gone for other processes, too."""
        calls: dict[str, Callable[..., Any]] = {
            name: getattr(self, f"_{name}")
            for name in (
                "stat lstat access readlink listdir scandir mkdir rmdir unlink rename replace link symlink "
                "truncate chdir getcwd getcwdb close mkfifo mknod"
            ).split()
        }
        calls["remove"] = self._unlink
        calls.update({name: functools.partial(self._change_state, name) for name in _STATE.split()})
        calls.update({name: functools.partial(self._ask, name) for name in _QUESTIONS.split()})
        made = {name: self._answering(getattr(os, name), call) for name, call in calls.items() if hasattr(os, name)}
        made["os_open"] = self._answering(os.open, self._os_open)
        if shared_memory is not None:
            made["shm_open"] = self._answering(shared_memory.shm_open, self._shm_open)
            made["shm_unlink"] = self._answering(shared_memory.shm_unlink, lambda path: self._unlink(_in_memory(path)))
        return made

    def substitutes(self, made: dict[str, Any]) -> list[tuple[Any, Any]]:
        """Functions of Python's, each with what stands in for it among the ``replacements``, and for ``open``."""
        of_memory = [(shared_memory, "shm_open"), (shared_memory, "shm_unlink")] if shared_memory is not None else []
        named = [(os, name) for name in made if hasattr(os, name)] + of_memory
        pairs = [(getattr(owner, name), made[name]) for owner, name in named]
        opening = [
            (os.open, made["os_open"]),
            (io.open, self.open(io.open)),
            (io.open_code, self.open_code(io.open_code)),
        ]
        return [*pairs, *opening]

    def open(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in for the builtin ``open``, which is ``usual``."""
        tree, scope, numbers = self._tree, self._scope, self._numbers

        @functools.wraps(usual)
        def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: A001
            if isinstance(file, int) and scope.applies():
                with scope.outside():
                    own = numbers.lent(file) if kwargs.get("closefd", True) else numbers.own(file)
                    return usual(own, mode, *args, **kwargs)
            if not scope.applies() or (tree.is_untouched and _only_reads(mode)):
                return usual(file, mode, *args, **kwargs)
            positional = dict(
                zip(("buffering", "encoding", "errors", "newline", "closefd", "opener"), args, strict=False)
            )
            options = {**positional, **kwargs}
            given = options.get("opener")

            def opener(path: Any, flags: int) -> int:
                if given is None:
                    number = self._os_open(path, flags, 0o666)
                    tree.folders_open.pop(number, None)  # C refuses a folder, and closes it by itself
                    return number
                with scope.inside():
                    return int(given(path, flags))

            path = os.fspath(file)
            with scope.outside(), tree.lock:
                try:
                    return usual(path, mode, **{**options, "opener": opener})
                except OSError as error:
                    raise _renamed(error, (path,)) from None

        return open

    def open_code(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in for ``io.open_code``, with which modules are imported."""

        @functools.wraps(usual)
        def open_code(path: str) -> Any:
            if not self._scope.applies():
                return usual(path)
            with self._scope.outside():
                return usual(self._tree.real_path(path))

        return open_code

    def _answering(self, usual: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
        scope, lock = self._scope, self._tree.lock
        has_two = usual in (os.rename, os.replace, os.link, os.symlink)

        @functools.wraps(usual)
        def answer(*args: Any, **kwargs: Any) -> Any:
            if not scope.applies():
                return usual(*args, **kwargs)
            with scope.outside(), lock:
                try:
                    return call(*args, **kwargs)
                except OSError as error:
                    raise _renamed(error, args, has_two) from None

        return answer

    # -- looking --------------------------------------------------------------

    def _stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        if isinstance(path, int) or (self._tree.is_untouched and dir_fd is None):
            return os.stat(self._numbers.own(path), dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        return state_of(self._node(path, dir_fd, follow_symlinks))

    def _lstat(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        return self._stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def _access(
        self,
        path: Any,
        mode: int,
        *,
        dir_fd: int | None = None,
        effective_ids: bool = False,
        follow_symlinks: bool = True,
    ) -> bool:
        if isinstance(path, int):
            return os.access(path, mode)
        try:
            node = self._node(path, dir_fd, follow_symlinks)
        except OSError:
            return False
        return node.kind is NodeKind.LINK or os.access(node.backing, mode, effective_ids=effective_ids)

    def _readlink(self, path: Any, *, dir_fd: int | None = None) -> Any:
        node = self._node(path, dir_fd, False)
        if node.kind is not NodeKind.LINK:
            return os.readlink(node.backing if not os.path.islink(node.backing) else path)
        return like(path, os.readlink(node.backing))

    def _listdir(self, path: Any = ".") -> list[Any]:
        folder = self._folder_to_list(path)
        if folder is None:
            return os.listdir(path)
        return [like(path, name) for name in self._tree.names(folder)]

    def _scandir(self, path: Any = ".") -> Any:
        folder = self._folder_to_list(path)
        if folder is None:
            return os.scandir(path)
        above = "" if isinstance(path, int) else path
        named = ((name, self._tree.child(folder, name)) for name in self._tree.names(folder))
        return Entries(
            [FolderEntry(self._tree, self._scope, above, name, node) for name, node in named if node is not None]
        )

    def _folder_to_list(self, path: Any) -> Node | None:
        """The folder, or None where the real one shows the same."""
        if isinstance(path, int):
            return self._tree.folders_open.get(path)
        if path is None:
            path = "."
        return None if self._tree.is_untouched else self._node(path)

    def _getcwd(self) -> str:
        return self._tree.current_directory()

    def _getcwdb(self) -> bytes:
        return os.fsencode(self._tree.current_directory())

    def _ask(self, name: str, path: Any, *args: Any, follow_symlinks: bool = True) -> Any:
        """Read what a file's state is."""
        function = getattr(os, name)
        options = {} if follow_symlinks else {"follow_symlinks": False}
        if isinstance(path, int) or self._tree.is_untouched:
            return function(self._numbers.own(path), *args, **options)
        return function(self._node(path, None, follow_symlinks).backing, *args, **options)

    # -- opening --------------------------------------------------------------

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        tree = self._tree
        if _UNNAMED and flags & _UNNAMED == _UNNAMED:
            tree.begin()
            return os.open(os.path.dirname(tree.new_name("")), flags, mode)
        is_written = bool(flags & _WRITING)
        if is_written:
            tree.begin()
        must_be_new = bool(flags & os.O_CREAT and flags & os.O_EXCL)
        found = self._find(path, dir_fd, follow=not flags & _NO_LINKS and not must_be_new)
        node = found.node
        if node is None:
            if not flags & os.O_CREAT:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if _names_folder(path):
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            return int(tree.make(found.parent, found.name, NodeKind.FILE, lambda made: os.open(made, flags, mode)))
        if must_be_new:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if node.kind is NodeKind.DIRECTORY:
            opened = os.open(node.backing, flags)
            tree.folders_open[opened] = tree.adopt(node)
            return opened
        if is_written:
            tree.writable(node, truncates=bool(flags & os.O_TRUNC))
        return os.open(node.backing, flags & ~os.O_CREAT)

    def _close(self, number: int) -> None:
        self._tree.folders_open.pop(number, None)
        self._numbers.close(number)

    # -- changing -------------------------------------------------------------

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._make(path, dir_fd, NodeKind.DIRECTORY, lambda made: os.mkdir(made, mode))

    def _symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        self._make(dst, dir_fd, NodeKind.LINK, lambda made: os.symlink(src, made, target_is_directory))

    def _mkfifo(self, path: Any, *_unused: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, _("a dry run creates no pipes or devices"), path)

    _mknod = _mkfifo

    def _link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        self._tree.begin()
        node = self._node(src, src_dir_fd, False)
        is_free = self._find(dst, dst_dir_fd, follow=False).node is None
        if node.kind is NodeKind.DIRECTORY and is_free and not _names_folder(dst):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), src)
        source = self._tree.writable(node)
        self._make(dst, dst_dir_fd, node.kind, lambda made: os.link(source, made, follow_symlinks=False))

    def _make(self, path: Any, dir_fd: int | None, kind: NodeKind, create: Callable[[str], Any]) -> None:
        self._tree.begin()
        found = self._find(path, dir_fd, follow=False)
        if found.node is not None:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if kind is not NodeKind.DIRECTORY and _names_folder(path):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._tree.make(found.parent, found.name, kind, create)

    def _shm_open(self, path: str, flags: int, mode: int = 0o777) -> int:
        return self._os_open(_in_memory(path), flags | os.O_CLOEXEC, mode)

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._tree.begin()
        found = self._find(path, dir_fd, follow=False)
        node = self._there(found, path)
        if node.kind is NodeKind.DIRECTORY:
            number = errno.EISDIR if os.name == "posix" else errno.EACCES
            raise OSError(number, os.strerror(number), path)
        self._take_away(found, node)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._tree.begin()
        found = self._find(path, dir_fd, follow=False)
        node = self._there(found, path)
        if self._tree.names(node):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._take_away(found, node)

    def _take_away(self, found: FoundNode, node: Node) -> None:
        self._tree.check_changeable(found.parent)
        if self._tree.is_users(found.parent, found.name):
            self._tree.note(_("{path}: removed for the dry run only", path=self._tree.path(node)))
        self._tree.remove(found.parent, found.name, node)

    def _rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        tree = self._tree
        tree.begin()
        if {os.path.basename(os.fsdecode(path)) for path in (src, dst)} & {os.curdir, os.pardir}:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), src)
        source, target = self._find(src, src_dir_fd, follow=False), self._find(dst, dst_dir_fd, follow=False)
        node, there = self._there(source, src), target.node
        if there is not None and _is_same(node, there):
            return
        _check_rename(tree, node, target, os.fsdecode(dst))
        for folder in (source.parent, target.parent):
            tree.check_changeable(folder)
        if tree.is_users(source.parent, source.name):
            tree.note(_("{path}: renamed for the dry run only", path=tree.path(node)))
        if there is not None:
            tree.remove(target.parent, target.name, there)
        tree.put(source.parent, source.name, None)
        tree.put(target.parent, target.name, node)

    _replace = _rename

    def _truncate(self, path: Any, length: int) -> None:
        if isinstance(path, int):
            os.truncate(self._numbers.own(path), length)
            return
        self._tree.begin()
        os.truncate(self._tree.writable(self._node(path)), length)

    def _change_state(self, name: str, path: Any, *args: Any, **kwargs: Any) -> None:
        """``chmod`` and its like."""
        function = getattr(os, name)
        if isinstance(path, int):
            function(self._numbers.own(path), *args, **kwargs)
            return
        self._tree.begin()
        follow = kwargs.get("follow_symlinks", True) and not name.startswith("l")
        node = self._node(path, kwargs.pop("dir_fd", None), follow)
        if node.kind is NodeKind.OTHER:
            self._tree.note(_("os.{name}({path!r}): skipped", name=name, path=path))
            return
        function(self._tree.writable(node), *args, **kwargs)

    def _chdir(self, path: Any) -> None:
        node = self._tree.folders_open.get(path) if isinstance(path, int) else self._node(path)
        if node is None:
            node = self._node(os.readlink(f"/proc/self/fd/{path}"))
        self._tree.enter(node)

    # -- looking up -----------------------------------------------------------

    def _find(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> FoundNode:
        folder = None
        if dir_fd is not None:
            folder = self._tree.folders_open.get(dir_fd) or self._tree.node(os.readlink(f"/proc/self/fd/{dir_fd}"))
        return self._tree.find(os.fsdecode(path), follow, folder)

    def _node(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> Node:
        return self._there(self._find(path, dir_fd, follow), path)

    @staticmethod
    def _there(found: FoundNode, path: Any) -> Node:
        if found.node is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found.node


def _only_reads(mode: str) -> bool:
    return not set(mode) & set("wax+")


def _is_same(first: Node, second: Node) -> bool:
    return first is second or os.path.samestat(os.lstat(first.backing), os.lstat(second.backing))


def _check_rename(tree: FileTree, node: Node, target: FoundNode, target_path: str) -> None:
    """Raise what rename(2) raises for a target that is there, or that lies in the source."""
    there, is_folder = target.node, node.kind is NodeKind.DIRECTORY
    number = 0
    if there is not None:
        if is_folder and there.kind is not NodeKind.DIRECTORY:
            number = errno.ENOTDIR
        elif not is_folder and there.kind is NodeKind.DIRECTORY:
            number = errno.EISDIR
        elif is_folder and tree.names(there):
            number = errno.ENOTEMPTY
    within = os.path.join(tree.path(node), "")
    if is_folder and os.path.join(tree.path(target.parent), target.name).startswith(within):
        number = errno.EINVAL
    if not is_folder and there is None and _names_folder(target_path):
        number = errno.ENOTDIR
    if there is not None and os.path.join(tree.path(node), "").startswith(os.path.join(tree.path(there), "")):
        number = errno.ENOTEMPTY
    if number:
        raise OSError(number, os.strerror(number), node.name)


def _names_folder(path: Any) -> bool:
    """Whether a path ends as only a folder's may."""
    return os.fsdecode(path).endswith(os.sep)


def _renamed(error: OSError, args: tuple[Any, ...], has_two: bool = False) -> OSError:
    """The error with the names that the caller used."""
    if error.filename is not None and args:
        error.filename = args[0]
        if has_two and len(args) > 1:
            error.filename2 = args[1]
    return error
