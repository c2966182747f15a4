"""Interrupts during a dry run or a measurement: they reach the user's code, and nothing else.

Python runs a signal's handler between any two bytecodes of the main thread. While a dry run sets up, tears down or is
inside an operator (which C++ may have called where it can take no exception), handlers wait. Whether they may run is
read off the stack that was interrupted, so there is no moment between a check and what it protects.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, TypeVar

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], Any]


class _Signals:
    """The process's signals, received here; whether their handlers wait is read off the stack that was interrupted."""

    def __init__(self, *closed: Callable[..., Any]) -> None:
        self._closed = {function.__code__ for function in closed}
        self._handlers: dict[int, Handler] = {}
        self._pending: dict[int, FrameType | None] = {}
        self._is_over = False

    def deliver(self) -> None:
        """Run the handlers that had to wait; that of interrupts, which raises, is the last."""
        for number in sorted(self._pending, key=signal.SIGINT.__eq__) if self._pending else ():
            self._handlers[number](number, self._pending.pop(number))

    def _replace(self, usual: dict[int, Any]) -> None:
        for number, handler in usual.items():
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._is_over or not self._waits(frame):
            self._handlers[number](number, frame)
        else:
            self._pending[number] = frame

    def _waits(self, frame: FrameType | None) -> bool:
        """Whether a handler may not run where this frame is."""
        raise NotImplementedError


class Interrupts(_Signals):
    """The signals of a dry run; ``closed`` are functions that the user's code calls in which handlers wait, too."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the dry run. Signals that waited until its end are delivered there."""
        if threading.current_thread() is not threading.main_thread():
            yield  # no signals here
            return
        self._is_over = False
        self._pending.clear()
        usual = _handlers_now()
        had_alarm = _HAS_ALARM and any(signal.getitimer(signal.ITIMER_REAL))
        try:
            self._replace(usual)
            yield
        finally:
            if _HAS_ALARM and not had_alarm:
                signal.setitimer(signal.ITIMER_REAL, 0)  # the run's own does not ring after it
            for number, handler in reversed(usual.items()):
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)
            self._is_over = True
            self.deliver()

    def users_code(self, function: Callable[[], T]) -> T:
        """Call a function that may be interrupted."""
        self.deliver()
        return function()

    def _waits(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code in self._closed:
                return True
            if frame.f_code is _USERS_CODE:
                return False
            frame = frame.f_back
        return True


class InterruptsAround(_Signals):
    """The signals while the user's code runs in a with statement: handlers wait in its owner's ``closed`` methods only.

    Python may run a handler before the first instruction of a function, so no function can protect itself.
    """

    def __init__(self, owner: object, *closed: Callable[..., Any]) -> None:
        super().__init__(*closed)
        self._owner = id(owner)

    def begin(self) -> None:
        """From now on handlers wait in the closed functions; on other threads than the main one there are none."""
        if threading.current_thread() is threading.main_thread():
            self._replace(_handlers_now())

    def end(self) -> None:
        """Put back what the user's code did not replace meanwhile, and run the handlers that had to wait."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in reversed(self._handlers.items()):
                if signal.getsignal(number) == self._receive:
                    signal.signal(number, handler)
        self._is_over = True
        self.deliver()

    def _waits(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code in self._closed and id(frame.f_locals["self"]) == self._owner:
                return True
            frame = frame.f_back
        return False


def _handlers_now() -> dict[int, Any]:
    """Each signal's handler: that of interrupts, which raises, is replaced first and put back last."""
    numbers = sorted(map(int, signal.valid_signals()), key=signal.SIGINT.__ne__)
    return {number: signal.getsignal(number) for number in numbers}


def collect_garbage() -> None:
    """A full collection. An interrupt waits for its end: raised in a finalizer that it calls, it would be lost."""
    with Interrupts().waiting():
        gc.collect()


def wakeup_number() -> int | None:
    """The number that handlers of signals write to, -1 for none; None on other threads, which cannot ask."""
    try:
        number = signal.set_wakeup_fd(-1)
    except ValueError:
        return None
    if number != -1:
        signal.set_wakeup_fd(number)
    return number


_HAS_ALARM = hasattr(signal, "setitimer")
_USERS_CODE: CodeType = Interrupts.users_code.__code__
