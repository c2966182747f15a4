"""Long work of a panel, in slices: a thread thinks, and each of its dry runs goes to the kernel's thread one by one.

A dry run puts other things in the place of PyTorch's, for the whole process, so no code of the user's may run beside
it. Between two of them the kernel answers: cells run, sliders move.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from IPython import get_ipython

_LOOK_SECONDS = 1.0  # between two looks whether the kernel still lives
_worker = ThreadPoolExecutor(1, thread_name_prefix="oom_sliders")
_present = threading.local()  # whose work the thread does
_T = TypeVar("_T")


def in_slices(dry_run: Callable[[], _T]) -> _T:
    """What a dry run returns: made here, or where the slices of this thread have theirs made."""
    slices: Slices | None = getattr(_present, "slices", None)
    return dry_run() if slices is None else slices.made(dry_run)


def count_in_slices() -> None:
    """Tell whoever waits for the slices of this thread that one more dry run was made, wherever that was."""
    slices: Slices | None = getattr(_present, "slices", None)
    if slices is not None:
        slices.count()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop of the kernel; None in a program, where nothing can be done later."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def is_attended() -> bool:
    """Whether somebody sits before the kernel: a front end that could be asked, unlike nbconvert's or papermill's."""
    return bool(getattr(getattr(get_ipython(), "kernel", None), "_allow_stdin", False))


class Slices:
    """The work for one setting. ``told`` is called with the number of dry runs after each of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, told: Callable[[int], None]) -> None:
        self._loop = loop
        self._told = told
        self._num_runs = 0
        self._is_stopped = False

    async def run(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """What ``work`` returns, called in the thread."""

        def work_here() -> _T:
            _present.slices = self
            try:
                return work(*arguments)
            finally:
                _present.slices = None

        return await self._loop.run_in_executor(_worker, work_here)

    def made(self, dry_run: Callable[[], _T]) -> _T:
        """What a dry run returns that the thread asks for. Raises CancelledError once stopped."""
        if self._is_stopped:
            raise asyncio.CancelledError
        made: Future[_T] = Future()
        self._loop.call_soon_threadsafe(self._make, dry_run, made)
        while not wait((made,), _LOOK_SECONDS).done:
            if self._is_stopped or not self._loop.is_running():
                raise asyncio.CancelledError
        return made.result()

    def count(self) -> None:
        """One more dry run was made."""
        self._num_runs += 1
        self._loop.call_soon_threadsafe(self._told, self._num_runs)

    def stop(self) -> None:
        """Let the work end before its next dry run."""
        self._is_stopped = True

    def _make(self, dry_run: Callable[[], _T], made: Future[_T]) -> None:
        if self._is_stopped:
            made.set_exception(asyncio.CancelledError())
            return
        try:
            found = dry_run()
        except BaseException as error:  # an interrupt, too, is for whoever waits for the work
            made.set_exception(error)
        else:
            made.set_result(found)
