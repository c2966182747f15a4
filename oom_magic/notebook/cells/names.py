"""The variables that dry-run cells assign: a layer above the notebook's own, which stay as they are."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from oom_magic.language import _

_ABSENT = object()


class DryNamespace:
    """Variables that dry cells assigned, for later dry cells; the user's own assignment since then takes precedence.

    ``names`` is one dictionary for all cells, so that functions of a dry cell see what later ones assign. Between cells
    it holds its own variables only, and so keeps none of the user's objects alive.
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self._hidden: dict[str, int] = {}  # for each own name: identity of the user's object at that time
        self._deleted: dict[str, int] = {}  # names of the user's that cells deleted: the object's identity
        self._deleted_last: dict[str, int] = {}  # by the last cell, too
        self._unassigned: set[str] = set()  # names that a cell would have assigned, had it not been left early

    @property
    def own(self) -> frozenset[str]:
        """The names that dry cells before this one assigned."""
        return frozenset(self._hidden)

    @contextmanager
    def entered(self, shell: InteractiveShell) -> Iterator[dict[str, Any]]:
        """The variables for one dry cell, the user's among them; in the block they are the shell's, too."""
        users = shell.user_ns
        for name in list(self.names):
            if id(users.get(name, _ABSENT)) != self._hidden[name]:
                self.forget(name)
        self._deleted = {name: key for name, key in self._deleted.items() if id(users.get(name, _ABSENT)) == key}
        left_out = self._deleted.keys() | self.names.keys()
        self.names.update({name: value for name, value in users.items() if name not in left_out})
        shell.user_ns = self.names
        try:
            yield self.names
        finally:
            shell.user_ns = users
            self._deleted_last = {name: id(value) for name, value in users.items() if name not in self.names}
            self._keep_own(users)

    def keep_deleted(self) -> None:
        """Leave out what the last cell deleted for later ones, too; where it failed, it may be tried again."""
        self._deleted = self._deleted_last

    def note_unassigned(self, names: frozenset[str]) -> None:
        """Note the ``names`` that a cell would have assigned, had its dry run not ended after some optimizer steps."""
        self._unassigned |= names

    def hint(self, name: str, users: Mapping[str, Any]) -> str:
        """Why a cell does not find ``name``, if dry runs are the reason; else an empty string. ``users`` are the
        notebook's own."""
        if name in self.names:
            return _("{name} was assigned in a dry run; only %%gpumem cells can use it.", name=name)
        if name in self._deleted and id(users.get(name, _ABSENT)) == self._deleted[name]:
            return _("{name} was deleted in a dry run; assign it again in this cell.", name=name)
        if name in self._unassigned:
            return _(
                "{name} is assigned after the point where the dry run of its cell stopped; %%gpumem --steps all"
                " follows that cell to its end.",
                name=name,
            )
        return ""

    def forget(self, name: str) -> None:
        """Drop the variable of a dry cell."""
        del self.names[name], self._hidden[name]

    def _keep_own(self, users: dict[str, Any]) -> None:
        for name, value in list(self.names.items()):
            if value is users.get(name, _ABSENT):
                del self.names[name]
                self._hidden.pop(name, None)
            elif name not in users and _is_import(value):
                users[name] = self.names.pop(name)
                self._hidden.pop(name, None)
            else:
                self._hidden[name] = id(users.get(name, _ABSENT))


def _is_import(value: Any) -> bool:
    """Whether the value was imported: nothing about it is fake, so the notebook gets it, too."""
    if isinstance(value, ModuleType):
        return sys.modules.get(value.__name__) is value  # not one that the cell wrote, or made, itself
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return False
    module = sys.modules.get(value.__module__ or "")
    return module is not None and module.__name__ != "__main__" and vars(module).get(value.__name__) is value
