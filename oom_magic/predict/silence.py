"""Silent runs: output, logs, warnings and displays of a repeated run are dropped."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from oom_magic.predict.isolation.patching import patched
from oom_magic.predict.isolation.run_threads import is_of_run

# Classes that display something in a notebook, by module: IPython's and those of the widget protocol.
_SHOWN_BY = (
    ("IPython.core.displaypub", "DisplayPublisher", ("publish", "clear_output")),
    ("comm.base_comm", "BaseComm", ("publish_msg",)),
)
_FIGURES = "matplotlib._pylab_helpers"  # pyplot's open figures are shown when the cell ends


@contextmanager
def in_silence() -> Iterator[None]:
    """Drop all output on the run's threads; figures opened inside are closed."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stdout(_Unseen(sys.stdout)))
        stack.enter_context(contextlib.redirect_stderr(_Unseen(sys.stderr)))
        stack.enter_context(patched(logging.Logger, {"handle": _show_nothing}))
        stack.enter_context(_figures_restored())
        for module, name, functions in _SHOWN_BY:
            for kind in _kinds(getattr(sys.modules.get(module), name, None)):
                own = [function for function in functions if function in vars(kind)]
                stack.enter_context(patched(kind, dict.fromkeys(own, _show_nothing)))
        yield


class _Unseen(io.TextIOBase):
    """Stands in for a stream: only other threads' output passes."""

    def __init__(self, usual: Any) -> None:
        self._usual = usual

    def write(self, text: str) -> int:
        """As a stream's."""
        return len(text) if is_of_run() else int(self._usual.write(text))

    def flush(self) -> None:
        """As a stream's."""
        if not is_of_run():
            self._usual.flush()


def _show_nothing(*_: Any, **__: Any) -> None:
    """Stands in for a display function."""


def _kinds(root: type | None) -> Iterator[type]:
    """A class, if it is loaded, and all of its subclasses."""
    if root is not None:
        yield root
        derived: list[type] = root.__subclasses__()
        for kind in derived:
            yield from _kinds(kind)


@contextmanager
def _figures_restored() -> Iterator[None]:
    helpers = sys.modules.get(_FIGURES)
    if helpers is None:
        yield
        return
    figures = helpers.Gcf.figs
    before = dict(figures)
    try:
        yield
    finally:
        figures.clear()
        figures.update(before)
