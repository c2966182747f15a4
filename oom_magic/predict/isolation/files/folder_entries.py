"""What ``os.scandir`` gives for a folder of the run's layer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from oom_magic.predict.isolation.files.file_tree import FileTree, Node, NodeKind
from oom_magic.predict.isolation.run_threads import Scope


class FolderEntry:
    """What ``os.scandir`` yields (``os.DirEntry``) for a folder of the layer."""

    def __init__(self, tree: FileTree, scope: Scope, above: Any, name: str, node: Node) -> None:
        self.name: Any = like(above, name)
        self.path: Any = os.path.join(above, self.name) if above else self.name
        self._tree, self._scope, self._node = tree, scope, node

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a folder, or leads to one."""
        return self._is(NodeKind.DIRECTORY, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a file, or leads to one."""
        return self._is(NodeKind.FILE, follow_symlinks)

    def is_symlink(self) -> bool:
        """Whether it is a link."""
        return self._node.kind is NodeKind.LINK

    def is_junction(self) -> bool:
        """False: the layer makes none."""
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """As ``os.stat``."""
        with self._scope.outside():
            return state_of(self._followed() if follow_symlinks else self._node)

    def inode(self) -> int:
        """As ``os.DirEntry.inode``."""
        return self.stat(follow_symlinks=False).st_ino

    def _is(self, kind: NodeKind, follow: bool) -> bool:
        if not follow or self._node.kind is not NodeKind.LINK:
            return self._node.kind is kind
        try:
            with self._scope.outside():
                return self._followed().kind is kind
        except OSError:
            return False

    def _followed(self) -> Node:
        assert self._node.parent is not None
        return self._tree.node(self._node.name, True, self._node.parent)


class Entries:
    """The iterator that ``os.scandir`` returns."""

    def __init__(self, entries: list[FolderEntry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[FolderEntry]:
        return self._entries

    def __next__(self) -> FolderEntry:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """No more entries."""
        self._entries = iter(())


def state_of(node: Node) -> os.stat_result:
    """What the file behind it tells (``os.stat``); of a link, the link itself."""
    return os.lstat(node.backing) if node.kind is NodeKind.LINK else os.stat(node.backing)


def like(path: Any, name: str) -> Any:
    """A name as the type (str or bytes) of the given path."""
    return os.fsencode(name) if isinstance(path, bytes) else name
