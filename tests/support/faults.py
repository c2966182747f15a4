"""Errors that are raised at a chosen call of a function, for tests of what then stays as it was."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import oom_magic


class InjectedError(Exception):
    pass


@dataclass
class Faults:
    """How often a function was called, and at which call it fails (0: never)."""

    calls: int = 0
    at: int = 0

    def begin(self, at: int) -> None:
        """Counts anew; the call number ``at`` fails."""
        self.calls, self.at = 0, at


def inject(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: type[BaseException]) -> Faults:
    """Lets ``owner.name`` count its calls and raise ``error`` at one of them."""
    usual, faults = getattr(owner, name), Faults()

    def faulty(*args: Any, **kwargs: Any) -> Any:
        faults.calls += 1
        if faults.calls == faults.at:
            raise error("injected")
        return usual(*args, **kwargs)

    monkeypatch.setattr(owner, name, faulty)
    return faults


def interrupted_at_each_function(run: Callable[[], object]) -> Iterator[str]:
    """Calls ``run`` again and again, interrupted where the first and the last call of each function of ours begins.

    That is before its first instruction, where Python runs the handlers of signals. Yields the function's name after
    each run that KeyboardInterrupt may have ended.
    """
    package = str(Path(oom_magic.__file__).parent)
    calls: list[CodeType] = []

    def each_call(begins: Callable[[CodeType], None]) -> None:
        def profile(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(package):
                begins(frame.f_code)

        sys.setprofile(profile)
        try:
            run()
        finally:
            sys.setprofile(None)

    each_call(calls.append)
    last = {code: at for at, code in enumerate(calls)}
    first = {code: at for at, code in reversed([*enumerate(calls)])}
    for at in sorted({*first.values(), *last.values()}):
        left = at

        def interrupt(_: CodeType) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

        with contextlib.suppress(KeyboardInterrupt):
            each_call(interrupt)
        yield calls[at].co_qualname if hasattr(calls[at], "co_qualname") else calls[at].co_name
