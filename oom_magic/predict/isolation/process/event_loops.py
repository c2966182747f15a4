"""Event loops of asyncio that are there before a dry run, such as a notebook's: the run leaves nothing on them."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from oom_magic.language import _
from oom_magic.predict.isolation.patching import Journal
from oom_magic.predict.isolation.restorations import restoration_of
from oom_magic.predict.isolation.run_threads import is_of_run
from oom_magic.predict.isolation.snapshot import fill

_SCHEDULING = ("call_soon", "call_soon_threadsafe", "call_at")
_SETTINGS = ("_exception_handler", "_task_factory", "_debug", "slow_callback_duration", "_default_executor")


def keep_event_loops(journal: Journal, loops: Sequence[asyncio.BaseEventLoop], assume: Callable[[str], None]) -> None:
    """Record how to restore each. The run can use a loop, but not close it; ``assume`` is told what it leaves on
    one."""
    for loop in loops:
        if not loop.is_closed():
            kept = _KeptLoop(loop, assume)
            journal.record(kept.restore)
            kept.replace()


class _KeptLoop:
    """What a loop waits for and how it is set; and what the run schedules on it."""

    def __init__(self, loop: Any, assume: Callable[[str], None]) -> None:
        self._loop = loop
        self._assume = assume
        self._own = dict(vars(loop))
        self._handles: list[asyncio.Handle] = []
        self._tasks = asyncio.all_tasks(loop)
        selector = getattr(loop, "_selector", None)
        tables = [getattr(loop, "_signal_handlers", None), getattr(selector, "_fd_to_key", None)]
        if not loop.is_running():  # else other threads add to them
            tables += [loop._ready, loop._scheduled]
        self._tables = [(table, table.copy()) for table in tables if table is not None]
        self._polled = restoration_of(getattr(selector, "_selector", None), 0)

    def replace(self) -> None:
        """Record the run's calls, and keep the loop open."""
        for name in _SCHEDULING:
            setattr(self._loop, name, functools.partial(self._scheduled, getattr(self._loop, name)))
        self._loop.close = functools.partial(self._closed, self._loop.close)

    def restore(self) -> None:
        """Put everything back; what other threads scheduled meanwhile stays."""
        own = vars(self._loop)
        for name in (*_SCHEDULING, "close", *_SETTINGS):
            if name in self._own:
                own[name] = self._own[name]
            else:
                own.pop(name, None)
        for task in asyncio.all_tasks(self._loop) - self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            if inspect.getcoroutinestate(task.get_coro()) == inspect.CORO_CREATED:  # type: ignore[arg-type]
                task.get_coro().close()
        waiting = set(map(id, (*self._loop._ready, *self._loop._scheduled)))
        left = [one for one in self._handles if id(one) in waiting and not one.cancelled()]
        for handle in left:
            handle.cancel()
        if left:
            self._assume(_("asyncio: what the dry run left to an event loop of yours is not run"))
        for table, before in self._tables:
            fill(table, before)
        if self._polled is not None:
            self._polled.undo()

    def _scheduled(self, usual: Callable[..., asyncio.Handle], *args: Any, **kwargs: Any) -> asyncio.Handle:
        handle = usual(*args, **kwargs)
        if is_of_run():
            self._handles.append(handle)
        return handle

    def _closed(self, usual: Callable[[], None]) -> None:
        if not is_of_run():
            usual()
