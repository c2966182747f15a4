"""Runs whose printed output, logs, warnings and displays are discarded, such as repeated runs of a cell."""

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
_DISPLAY_CLASSES = (
    ("IPython.core.displaypub", "DisplayPublisher", ("publish", "clear_output")),
    ("comm.base_comm", "BaseComm", ("publish_msg",)),
)
_PYPLOT_FIGURES = "matplotlib._pylab_helpers"  # pyplot's open figures are shown when the cell ends


@contextmanager
def silenced() -> Iterator[None]:
    """Discard all output of the run's threads in the block; figures opened in it are closed."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stdout(_DiscardingStream(sys.stdout)))
        stack.enter_context(contextlib.redirect_stderr(_DiscardingStream(sys.stderr)))
        stack.enter_context(patched(logging.Logger, {"handle": _discard}))
        stack.enter_context(_figures_restored())
        for module, name, functions in _DISPLAY_CLASSES:
            for kind in _class_and_subclasses(getattr(sys.modules.get(module), name, None)):
                own = [function for function in functions if function in vars(kind)]
                stack.enter_context(patched(kind, dict.fromkeys(own, _discard)))
        yield


class _DiscardingStream(io.TextIOBase):
    """A stream that discards what the run's threads write, and passes on what other threads write."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def write(self, text: str) -> int:
        """As a stream's."""
        return len(text) if is_of_run() else int(self._original.write(text))

    def flush(self) -> None:
        """As a stream's."""
        if not is_of_run():
            self._original.flush()


def _discard(*_: Any, **__: Any) -> None:
    """Replaces a function that displays or logs something."""


def _class_and_subclasses(root: type | None) -> Iterator[type]:
    """A class, if it is loaded, and all of its subclasses."""
    if root is not None:
        yield root
        derived: list[type] = root.__subclasses__()
        for kind in derived:
            yield from _class_and_subclasses(kind)


@contextmanager
def _figures_restored() -> Iterator[None]:
    helpers = sys.modules.get(_PYPLOT_FIGURES)
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
