"""What ``%load_ext oom_magic`` adds to a shell and ``%unload_ext oom_magic`` takes away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from oom_magic.language import set_language
from oom_magic.notebook.magics import OOMMagics
from oom_magic.one_line_errors import OneLineErrors

_REPORT = ("oom_magic.memory.report", "MemoryReport")

_loaded: dict[int, OOMMagics] = {}  # by identity of the shell: a shell may be embedded in another


def load(shell: InteractiveShell) -> None:
    """Add the magics, the hint under out-of-memory errors, and the picture to displayed reports."""
    unload(shell)
    magics = OOMMagics(shell)
    shell.register_magics(magics)
    for event, callback in _callbacks(magics):
        shell.events.register(event, callback)
    if shell.display_formatter is not None:
        shell.display_formatter.mimebundle_formatter.for_type_by_name(*_REPORT, _report_bundle)
    _loaded[id(shell)] = magics


def unload(shell: InteractiveShell) -> None:
    """Take away what ``load`` added; nothing if it was not loaded."""
    magics = _loaded.pop(id(shell), None)
    if magics is None:
        return
    magics.stop_watching()
    set_language(None)
    for event, callback in _callbacks(magics):
        shell.events.unregister(event, callback)
    if shell.display_formatter is not None:
        shell.display_formatter.mimebundle_formatter.pop(".".join(_REPORT), None)
    for kind, names in OOMMagics.magics.items():
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)
    shell.magics_manager.registry.pop(OOMMagics.__name__, None)
    # It references the dry session. By identity: traitlets' configurables may define their own equality.
    shell.configurables[:] = [one for one in shell.configurables if id(one) != id(magics)]


def _callbacks(magics: OOMMagics) -> list[tuple[str, Callable[..., None]]]:
    return [
        ("pre_run_cell", magics.levels.before_cell),
        ("pre_run_cell", magics.failures.before_cell),
        ("post_run_cell", magics.levels.after_cell),
        ("post_run_cell", magics.failures.after_cell),
    ]


def _report_bundle(report: Any, **_: Any) -> dict[str, str]:
    from oom_magic.notebook.cells.gpumem import describe_with_picture

    with OneLineErrors("other"):
        return describe_with_picture(report)._repr_mimebundle_()
