"""The results that IPython keeps: ``Out``, ``_``, ``__``, ``___``, ``_3``; and deleting a variable from them, too."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, MutableMapping
from typing import Any


def running_shell() -> Any:
    """The ``InteractiveShell`` of this process, or None outside of IPython."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def users_names(depth: int) -> MutableMapping[str, Any]:
    """The notebook's variables or, outside of one, the globals of the function ``depth`` calls above."""
    shell = running_shell()
    names: MutableMapping[str, Any] = sys._getframe(depth + 1).f_globals if shell is None else shell.user_ns
    return names


_LAST = ("_", "__", "___")
_NUMBERED = re.compile(r"_\d+")


def drop_name(name: str, namespace: MutableMapping[str, Any], shell: Any) -> None:
    """Delete one variable, and the results kept that are this very object."""
    value = namespace[name]
    del namespace[name]
    _drop(namespace, shell, lambda result: result is value)


def drop_results(namespace: MutableMapping[str, Any], shell: Any) -> None:
    """Forget all results."""
    _drop(namespace, shell, lambda _: True)


def _drop(namespace: MutableMapping[str, Any], shell: Any, is_meant: Callable[[Any], bool]) -> None:
    results = namespace.get("Out")
    if type(results) is dict:
        for number in [number for number, result in results.items() if is_meant(result)]:
            del results[number]
    for names in (namespace, getattr(shell, "user_ns_hidden", {})):
        _drop_names(names, is_meant)
    display = getattr(shell, "displayhook", None)
    for name in _LAST:
        if hasattr(display, name) and is_meant(getattr(display, name)):
            setattr(display, name, "")
    last = getattr(shell, "last_execution_result", None)
    if last is not None and is_meant(last.result):
        last.result = None


def _drop_names(names: MutableMapping[str, Any], is_meant: Callable[[Any], bool]) -> None:
    for name in list(names):
        if name in _LAST and is_meant(names[name]):
            names[name] = ""
        elif isinstance(name, str) and _NUMBERED.fullmatch(name) and is_meant(names[name]):
            del names[name]
