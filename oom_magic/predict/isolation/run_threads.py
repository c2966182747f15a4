"""Which threads and calls belong to the dry run: the thread that began it, and those that its code starts.

PyTorch's modes belong to a thread, what is patched to the process. A patch therefore acts on threads of the run only;
others find PyTorch as it is. A thread of the run enters the modes when it begins.
"""

from __future__ import annotations

import _thread
import ctypes
import gc
import queue
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from concurrent.futures.thread import _worker  # type: ignore[attr-defined]
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from multiprocessing.pool import Pool, ThreadPool, worker  # type: ignore[attr-defined]
from multiprocessing.queues import Queue
from typing import Any

from oom_magic.language import _
from oom_magic.user_code import is_users_file

_own: set[int] = set()
_SERVING = (_worker, worker, Pool._handle_workers, Pool._handle_tasks, Pool._handle_results)  # type: ignore[attr-defined]
# What an executor calls on each of its threads, and with each of its tasks (since 3.14).
_ON_A_THREAD = {"_initializer", "_initargs", "_create_worker_context", "_resolve_work_item_task", "_thread_name_prefix"}
PATIENCE_SECONDS = 5.0  # seconds for threads that the run started and did not wait for
_ENDING_SECONDS = 0.2  # and for what they do when they are ended
_GRACE_SECONDS = 0.01


def is_of_run() -> bool:
    """Whether the calling thread belongs to a dry run, or none lasts."""
    return not _own or threading.get_ident() in _own


def threads_of_run() -> frozenset[int]:
    """The threads' identities."""
    return frozenset(_own)


@contextmanager
def of_run() -> Iterator[None]:
    """The calling thread belongs to the dry run."""
    ident = threading.get_ident()
    _own.add(ident)
    try:
        yield
    finally:
        _own.discard(ident)


class RunThreads:
    """The threads that a dry run starts. ``entered`` makes the pretend GPU on a thread.

    An exception among ``quiet`` ends a thread silently, and is then in ``ended_by``. ``assume`` is told of threads of
    the user's that the run wakes.
    """

    def __init__(
        self,
        entered: Callable[[], AbstractContextManager[Any]],
        quiet: tuple[type[BaseException], ...],
        assume: Callable[[str], None],
    ) -> None:
        self._entered = entered
        self._quiet = quiet
        self._assume = assume
        self.ended_by: list[BaseException] = []
        self._started: list[threading.Thread] = []
        self._at_work: dict[int, Callable[..., Any]] = {}  # by the identity of the thread that calls it
        self._futures: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self._pools: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # the run's, by the user's
        self.is_over = False

    def patches(self) -> list[tuple[Any, dict[str, Callable[..., Any]]]]:
        """What to replace while the run lasts: owners with attributes."""
        start = threading.Thread.start

        def started(thread: threading.Thread) -> None:
            if getattr(thread, "_target", None) not in _SERVING:  # a pool's serves others after the run
                thread.run = self._followed(thread.run)  # type: ignore[method-assign]
            self._started.append(thread)
            start(thread)

        from oom_magic.predict.isolation.reach import waiting_threads  # loads PyTorch

        notify = threading.Condition.notify

        def notified(condition: threading.Condition, n: int = 1) -> None:
            if condition._waiters:  # type: ignore[attr-defined]
                self._say_who_waited(waiting_threads(condition, _own))
            notify(condition, n)

        cancel = threading.Timer.cancel

        def cancelled(timer: threading.Timer) -> None:
            if timer in self._started or not timer.is_alive():
                cancel(timer)
            else:
                self._assume(_("{name}: a timer that was started before the dry run goes on", name="Timer.cancel"))

        return [
            (threading.Timer, {"cancel": cancelled}),
            (threading.Thread, {"start": started}),
            (ThreadPoolExecutor, self._of_executors()),
            (ThreadPool, self._of_thread_pools()),
            (threading.Condition, {"notify": notified}),
            (Queue, self._of_queues()),
        ]

    def _of_queues(self) -> dict[str, Callable[..., Any]]:
        """Queues between processes: a thread that was there before would send what the run puts into one."""
        put, get = Queue.put, Queue.get
        kept: defaultdict[int, deque[Any]] = defaultdict(deque)

        def putting(one: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
            if one._thread is None or one._thread.ident in _own:
                put(one, obj, *args, **kwargs)
            else:
                self._assume(_("{name}: nothing of it reaches another process", name="multiprocessing.Queue.put"))
                kept[id(one)].append(obj)

        def getting(one: Any, *args: Any, **kwargs: Any) -> Any:
            return kept[id(one)].popleft() if kept[id(one)] else get(one, *args, **kwargs)

        return {"put": putting, "get": getting}

    def _of_executors(self) -> dict[str, Callable[..., Any]]:
        """What pools of threads do: the run has one of its own in place of each that was there before.

        The threads of another one are real, may be at work for others, and would be gone after ``shutdown``.
        """
        made: weakref.WeakSet[ThreadPoolExecutor] = weakref.WeakSet()
        begin, submit, shut = ThreadPoolExecutor.__init__, ThreadPoolExecutor.submit, ThreadPoolExecutor.shutdown

        def begun(pool: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> None:
            made.add(pool)
            begin(pool, *args, **kwargs)

        def of_run(pool: Any) -> Any:
            if pool not in made and pool not in self._pools:
                self._pools[pool] = ThreadPoolExecutor(pool._max_workers)
                vars(self._pools[pool]).update({name: vars(pool)[name] for name in _ON_A_THREAD & vars(pool).keys()})
            return self._pools.get(pool, pool)

        def submitted(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            future = submit(of_run(pool), self._followed(function, is_task=True), *args, **kwargs)
            self._futures.add(future)
            return future

        def shut_down(pool: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> None:
            shut(of_run(pool), *args, **kwargs)

        return {"__init__": begun, "submit": submitted, "shutdown": shut_down}

    def _of_thread_pools(self) -> dict[str, Callable[..., Any]]:
        """The same for pools of ``multiprocessing``; an error in a callback ends one."""
        made: weakref.WeakSet[ThreadPool] = weakref.WeakSet()
        begin = ThreadPool.__init__

        def begun(pool: ThreadPool, *args: Any, **kwargs: Any) -> None:
            made.add(pool)
            begin(pool, *args, **kwargs)

        def of_run(pool: Any) -> Any:
            if pool not in made and pool not in self._pools:
                initializer = pool._initializer and self._followed(pool._initializer)
                self._pools[pool] = ThreadPool(pool._processes, initializer, pool._initargs)
            return self._pools.get(pool, pool)

        def given(usual: Callable[..., Any]) -> Callable[..., Any]:
            def give(pool: ThreadPool, *args: Any, **kwargs: Any) -> Any:
                called = [self._followed(one, is_task=True) if callable(one) else one for one in args]
                named = {key: self._followed(one, True) if callable(one) else one for key, one in kwargs.items()}
                return usual(of_run(pool), *called, **named)

            return give

        def ended(usual: Callable[..., None]) -> Callable[..., None]:
            return lambda pool: usual(of_run(pool))

        giving, ending = ("apply_async", "_map_async", "imap", "imap_unordered"), ("close", "terminate", "join")
        given_to = {name: given(getattr(ThreadPool, name)) for name in giving}
        return {"__init__": begun, **given_to, **{name: ended(getattr(ThreadPool, name)) for name in ending}}

    @contextmanager
    def queues_watched(self) -> Iterator[None]:
        """Tell of threads of the user's that take what the run puts into a ``SimpleQueue``.

        Its class is C's and has no attribute that can be set, so its table of methods is changed.
        """
        from oom_magic.predict.isolation.reach import threads_with  # loads PyTorch

        kind, table = queue.SimpleQueue, gc.get_referents(vars(queue.SimpleQueue))[0]
        usual, seen = dict(table), set()

        def watching(put: Callable[..., None]) -> Callable[..., None]:
            def watched(one: Any, *args: Any, **kwargs: Any) -> None:
                if is_of_run() and id(one) not in seen:
                    seen.add(id(one))
                    self._say_who_waited(threads_with(one, _own))
                put(one, *args, **kwargs)

            return watched

        try:
            table.update({name: watching(usual[name]) for name in ("put", "put_nowait")})
            ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))
            yield
        finally:
            table.update(usual)
            ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))

    def _say_who_waited(self, names: list[str]) -> None:
        for name in names:
            self._assume(
                _("thread `{name}` of yours was waiting: what the dry run passes to it takes real effect", name=name)
            )

    def wait(self) -> None:
        """Wait for threads and tasks, for some seconds."""
        patient = [thread for thread in self._started if not thread.daemon and thread is not threading.current_thread()]
        due = time.monotonic() + PATIENCE_SECONDS
        for thread in patient:
            if getattr(thread, "_target", None) not in _SERVING:
                thread.join(max(due - time.monotonic(), 0))
        wait(self._futures, max(due - time.monotonic(), 0))
        self.is_over = True
        for pool in self._pools.values():
            if isinstance(pool, ThreadPool):
                pool.terminate()
            else:
                pool.shutdown(wait=False, cancel_futures=True)

    def end(self) -> None:
        """End what still goes on of the user's code, as it would be real now; those that use the GPU end there.

        A library's threads stay, as it may need them after the run.
        """
        due = time.monotonic() + _ENDING_SECONDS
        while left := {ident for ident, function in list(self._at_work.items()) if _is_users(function)}:
            time.sleep(_GRACE_SECONDS)
            for ident in left & self._at_work.keys():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
            if time.monotonic() > due:
                break

    def _followed(self, function: Callable[..., Any], is_task: bool = False) -> Callable[..., Any]:
        def followed(*args: Any, **kwargs: Any) -> Any:
            ident = threading.get_ident()
            if ident in _own:
                return function(*args, **kwargs)
            if self.is_over:  # what the run ordered would be real now
                return _ended(is_task)
            self._at_work[ident] = function
            try:
                with of_run(), self._entered():
                    return function(*args, **kwargs)
            except self._quiet as error:
                if is_task:
                    raise  # to the waiter for the result
                self.ended_by.append(error)
                return None
            except SystemExit:
                if not self.is_over:
                    raise
                return _ended(is_task)
            finally:
                del self._at_work[ident]

        return followed


def _ended(is_task: bool) -> None:
    if is_task:
        raise CancelledError


def _is_users(function: Callable[..., Any]) -> bool:
    """Whether a function is the user's, or that of a thread: as its target, a timer's, or in a class of theirs."""
    one = getattr(function, "__self__", None)
    functions = [function]
    if isinstance(one, threading.Thread):
        functions += [getattr(one, "_target", None), getattr(one, "function", None)]  # type: ignore[list-item]
    found = (one.func if isinstance(one, partial) else one for one in functions)
    codes = (getattr(one, "__code__", None) for one in found)
    return any(code is not None and is_users_file(code.co_filename) for code in codes)


_scope: ContextVar[Scope | None] = ContextVar("scope", default=None)


class _Here(threading.local):
    is_run = False  # this thread belongs to the run
    is_own = False  # calls are oom_magic's own now, not the run's


class Scope:
    """Tells the run's calls from those of other threads, and from our own that serve them."""

    def __init__(self) -> None:
        self._here = _Here()

    def applies(self) -> bool:
        """Whether the running code is the dry run's. What it hands to an event loop of another thread is, too: asyncio
        runs that, and what follows from it, in a copy of the context."""
        return (self._here.is_run or _scope.get() is self) and not self._here.is_own

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread is the run's meanwhile."""
        self._here.is_run = True
        before = _scope.set(self)
        try:
            yield
        finally:
            _scope.reset(before)
            self._here.is_run = False

    def patches(self) -> list[tuple[Any, dict[str, Callable[..., Any]]]]:
        """Threads that the run's threads start are the run's."""
        scope, start = self, threading.Thread.start

        def started(thread: threading.Thread) -> None:
            if scope._here.is_run:
                run = thread.run

                def run_inside() -> Any:
                    scope._here.is_run = True
                    return run()

                thread.run = run_inside  # type: ignore[method-assign]
            start(thread)

        begin = _thread.start_new_thread

        def begun(function: Callable[..., Any], *args: Any) -> int:
            if not scope._here.is_run:
                return begin(function, *args)

            def run_inside(*args: Any, **kwargs: Any) -> Any:
                scope._here.is_run = True
                return function(*args, **kwargs)

            return begin(run_inside, *args)

        return [(threading.Thread, {"start": started}), (_thread, {"start_new_thread": begun})]

    def join(self) -> None:
        """The calling thread is the run's."""
        self._here.is_run = True

    def outside(self) -> AbstractContextManager[None]:
        """Calls inside are oom_magic's own: they reach the disk and the real functions."""
        return self._owned(True)

    def inside(self) -> AbstractContextManager[None]:
        """Calls inside are the run's again, as in a callback that the user gave."""
        return self._owned(False)

    @contextmanager
    def _owned(self, is_own: bool) -> Iterator[None]:
        before, self._here.is_own = self._here.is_own, is_own
        try:
            yield
        finally:
            self._here.is_own = before
