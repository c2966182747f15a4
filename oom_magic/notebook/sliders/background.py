"""Work of the sliders in the background: in a worker thread, whose dry runs are called in the kernel's thread.

A dry run replaces attributes of PyTorch for the whole process, so none of the user's code may run beside it. Between
two dry runs the kernel is free: cells run, sliders move.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from IPython import get_ipython

_POLL_SECONDS = 1.0  # between two checks whether the kernel is still running
_executor = ThreadPoolExecutor(1, thread_name_prefix="oom_sliders")
_current = threading.local()  # ``work``: the BackgroundWork that this thread does
_T = TypeVar("_T")


def run_in_kernel_thread(dry_run: Callable[[], _T]) -> _T:
    """What ``dry_run`` returns, called in the kernel's thread if this thread does background work, else here."""
    work: BackgroundWork | None = getattr(_current, "work", None)
    return dry_run() if work is None else work.call(dry_run)


def count_run() -> None:
    """Report that one more dry run of this thread's background work was made, in this process or another."""
    work: BackgroundWork | None = getattr(_current, "work", None)
    if work is not None:
        work.count()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of the kernel; None in a program, where nothing can be done later."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def has_frontend() -> bool:
    """Whether somebody uses the kernel interactively, unlike under nbconvert or papermill."""
    return bool(getattr(getattr(get_ipython(), "kernel", None), "_allow_stdin", False))


class BackgroundWork:
    """The work for one setting of the sliders. ``on_run`` is called with the number of dry runs after each of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_run: Callable[[int], None]) -> None:
        self._loop = loop
        self._on_run = on_run
        self._num_runs = 0
        self._is_stopped = False

    async def run(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """What ``function`` returns, called in the worker thread."""

        def run_here() -> _T:
            _current.work = self
            try:
                return function(*arguments)
            finally:
                _current.work = None

        return await self._loop.run_in_executor(_executor, run_here)

    def call(self, dry_run: Callable[[], _T]) -> _T:
        """What ``dry_run`` returns, called in the kernel's thread. Raises CancelledError once stopped."""
        if self._is_stopped:
            raise asyncio.CancelledError
        future: Future[_T] = Future()
        self._loop.call_soon_threadsafe(self._complete, dry_run, future)
        while not wait((future,), _POLL_SECONDS).done:
            if self._is_stopped or not self._loop.is_running():
                raise asyncio.CancelledError
        return future.result()

    def count(self) -> None:
        """One more dry run was made."""
        self._num_runs += 1
        self._loop.call_soon_threadsafe(self._on_run, self._num_runs)

    def stop(self) -> None:
        """End the work before its next dry run."""
        self._is_stopped = True

    def _complete(self, dry_run: Callable[[], _T], future: Future[_T]) -> None:
        if self._is_stopped:
            future.set_exception(asyncio.CancelledError())
            return
        try:
            result = dry_run()
        except BaseException as error:  # an interrupt, too, is for whoever waits for the work
            future.set_exception(error)
        else:
            future.set_result(result)
