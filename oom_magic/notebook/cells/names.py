"""Where the cells of dry runs keep their names: a layer above the user's, which stays as it is."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from oom_magic.language import _

_ABSENT = object()


class DryNamespace:
    """Names that dry cells assigned, seen by later dry cells; one that the user has assigned since then wins.

    It is one dictionary, so that functions of a dry cell see what later dry cells assign. Between cells it
    holds its own names only, and so keeps none of the user's objects alive.
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self._hidden: dict[str, int] = {}  # for each own name: identity of the user's object at that time
        self._unassigned: set[str] = set()  # names that a cell would have assigned, had it not been left early

    @property
    def own(self) -> frozenset[str]:
        """The names that dry cells before this one assigned."""
        return frozenset(self._hidden)

    @contextmanager
    def entered(self, shell: InteractiveShell) -> Iterator[dict[str, Any]]:
        """The names for one dry cell: the user's with the own ones above them. Nested magics see them too."""
        users = shell.user_ns
        for name in list(self.names):
            if id(users.get(name, _ABSENT)) != self._hidden[name]:
                self.forget(name)
        self.names.update({name: value for name, value in users.items() if name not in self.names})
        shell.user_ns = self.names
        try:
            yield self.names
        finally:
            shell.user_ns = users
            self._keep_own(users)

    def leave_out(self, names: frozenset[str]) -> None:
        """Remember which ``names`` a cell that was left after its optimizer steps would have assigned."""
        self._unassigned |= names

    def hint(self, name: str) -> str:
        """Why a cell does not find ``name``, if that is because of dry runs; else an empty text."""
        if name in self.names:
            return _("{name} was assigned in a dry run; it can be used in %%gpumem cells only.", name=name)
        if name in self._unassigned:
            return _(
                "{name} would be assigned in a cell whose dry run ended before, with the last optimizer step it was to"
                " follow; %%gpumem --steps all follows that cell to its end.",
                name=name,
            )
        return ""

    def forget(self, name: str) -> None:
        """Drop one own name."""
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
    """Whether the name came from an import: nothing about it is fake, so it is the user's as well."""
    if isinstance(value, ModuleType):
        return True
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return False
    module = sys.modules.get(value.__module__ or "")
    return module is not None and module.__name__ != "__main__" and vars(module).get(value.__name__) is value
