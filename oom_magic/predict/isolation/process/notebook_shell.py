"""IPython's shell: its hooks, transformers, magics, formatters and settings, as they were before the run.

What a library registers for itself stays where the library is new, and so does matplotlib's, which remembers it: pyplot
would no longer show figures. Extensions that the run loads (``%load_ext``) leave nothing: they are not loaded then.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from oom_magic.predict.isolation.process.standard_library import Staying, home_of, restore_one
from oom_magic.predict.isolation.snapshot import Alike, is_unchanged

_TABLES = (dict, list, set)
_NOT_LOOKED_INTO = ("IPython.core.history", "IPython.core.displaypub")  # what was run, and what is shown
_REMEMBERING = ("IPython.core.pylabtools", "matplotlib")


def shell_noted() -> Callable[[], None]:
    """Put back, when called, what is now."""
    shell = _shell()
    if shell is None:
        return lambda: None
    by_kind: dict[type, list[Any]] = defaultdict(list)
    for table in _tables(shell):
        by_kind[type(table)].append(table)
    noted = [Alike.of(kind, tables) for kind, tables in by_kind.items()]
    loaded = shell.extension_manager.loaded
    return functools.partial(_restore, noted, frozenset(sys.modules), loaded, set(loaded))


def history_connections() -> list[Any]:
    """The databases in which IPython keeps what was run."""
    manager = getattr(_shell(), "history_manager", None)
    databases = (getattr(keeper, "db", None) for keeper in (manager, getattr(manager, "save_thread", None)))
    return [one for one in databases if one is not None]


def _shell() -> Any:
    kind: Any = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    return getattr(kind, "_instance", None)


def _tables(shell: Any) -> Iterator[Any]:
    """The attributes of the shell and of IPython's objects that it leads to, and the tables in them."""
    seen = {id(shell.user_ns), id(shell.user_global_ns)}
    waiting: list[Any] = [shell, getattr(shell.display_pub, "_hooks", [])]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        home = str(type(one).__module__)
        if type(one) in _TABLES or home == "IPython.utils.ipstruct":
            yield one
            waiting += one.values() if isinstance(one, dict) else one
        elif one is shell or (home.startswith("IPython.") and home not in _NOT_LOOKED_INTO):
            waiting.append(getattr(one, "__dict__", None))


def _restore(noted: list[Alike], known: frozenset[str], loaded: set[str], before: set[str]) -> None:
    staying, extensions = Staying(known), tuple(loaded - before)

    def stays(_name: Any, value: Any) -> bool:
        home = str(home_of(value))
        return home.startswith(_REMEMBERING) or (staying.is_importeds(value) and not home.startswith(extensions))

    for some in noted:
        for now, before in [] if some.are_unchanged() else some.pairs():
            if not is_unchanged(before, now):
                restore_one(now, before, None, stays)
