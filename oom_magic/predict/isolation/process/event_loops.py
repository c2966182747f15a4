"""Event loops of asyncio that are there before a dry run, such as a notebook's: the run leaves nothing on them."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from oom_magic.language import _
from oom_magic.predict.isolation.objects.restorations import restoration_of
from oom_magic.predict.isolation.patching import Journal
from oom_magic.predict.isolation.run_threads import PATIENCE_SECONDS, is_of_run
from oom_magic.predict.isolation.snapshot import fill

_SCHEDULING = ("call_soon", "call_soon_threadsafe", "call_at")
_SETTINGS = (
    "_exception_handler", "_task_factory", "_debug", "slow_callback_duration", "_default_executor",
    "_timer_cancelled_count",
)  # fmt: skip
_ASKING = ("_", "is_", "get_", "time", "default_exception_handler")
_OF_HANDLES = ("_callback", "_args", "_cancelled", "_scheduled")
_OF_OTHER_LOOP = "attached to a different loop"  # asyncio/tasks.py, Task.__step


def keep_event_loops(
    journal: Journal, loops: Sequence[asyncio.AbstractEventLoop], assume: Callable[[str], None]
) -> None:
    """Record how to restore each. The run can use a loop, but not close it; ``assume`` is told what it leaves on
    one. A loop that is not written in Python, such as uvloop's, can only be asked."""
    for loop in loops:
        if isinstance(loop, asyncio.BaseEventLoop):
            if not loop.is_closed():
                kept = _KeptLoop(loop, assume)
                journal.record(kept.restore)
                kept.replace()
        elif hasattr(loop, "__dict__"):
            journal.record(functools.partial(fill, vars(loop), dict(vars(loop))))
            for name in vars(asyncio.AbstractEventLoop):
                if not name.startswith(_ASKING):
                    setattr(loop, name, functools.partial(_refuse, loop, name, getattr(loop, name)))


def awaited(value: Any) -> Any:
    """``value`` itself; of a coroutine what it returns, run to its end as by ``asyncio.run``.

    Also where a loop runs in this thread, as a notebook's does: it is as if there were none meanwhile.
    """
    if not inspect.iscoroutine(value):
        return value
    loop = asyncio._get_running_loop()
    task = None if loop is None else asyncio.current_task(loop)
    try:
        if loop is not None:
            _swap_task(loop, None)
            asyncio._set_running_loop(None)
        return asyncio.run(value)
    except RuntimeError as error:
        if _OF_OTHER_LOOP in str(error):
            why = _(
                "A dry run has an event loop of its own, on which it cannot await what was scheduled before it: let it"
                " make its own."
            )
            error.args = (f"{error}. {why}",)
        raise
    finally:
        if loop is not None:
            asyncio._set_running_loop(loop)
            _swap_task(loop, task)


def _swap_task(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any] | None) -> None:
    """Set the current task, of which there is one in a thread since Python 3.14."""
    swap = getattr(asyncio.tasks, "_swap_current_task", None)  # since 3.12
    if swap is not None:
        swap(loop, task)


async def others_ended() -> None:
    """Wait for tasks that a cell leaves on its loop, for as long as for its threads; raises their errors."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    done = (await asyncio.wait(others, timeout=PATIENCE_SECONDS))[0] if others else ()
    for task in done:
        task.result()


def _refuse(loop: asyncio.AbstractEventLoop, name: str, usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not is_of_run():
        return usual(*args, **kwargs)
    if name == "close":
        return None
    kind = type(loop).__module__.partition(".")[0]
    raise RuntimeError(
        _(
            "{name}: an event loop of {kind} that existed before the dry run cannot be restored, so the run"
            " cannot use it. Let the code use one of its own, with asyncio.run.",
            name=name,
            kind=kind,
        )
    )


def _is_pair(waiting: Any) -> bool:
    """Whether it is what a loop notes of a descriptor: the handles for reading and for writing, or None."""
    return type(waiting) is tuple


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
        keys = [] if tables[1] is None else [key.data for key in tables[1].values()]
        self._waiting = [
            (one, name, getattr(one, name))
            for one in chain(loop._ready, loop._scheduled, (tables[0] or {}).values(), *filter(_is_pair, keys))
            for name in _OF_HANDLES
            if hasattr(one, name)
        ]
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
        for handle, name, value in self._waiting:  # a cancelled one would never be called
            setattr(handle, name, value)
        if left:
            self._assume(_("asyncio: what the dry run scheduled on an event loop of yours is not run"))
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
