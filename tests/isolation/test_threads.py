"""Threads: those of the user go on unharmed while a dry run lasts; those that it starts see the pretend GPU."""

from __future__ import annotations

import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oom_magic as om
from oom_magic.predict.isolation.reach import others_at_work, used_by_other_threads
from oom_magic.predict.session import DrySession


def beside(work: Callable[[], object], during: Callable[[], None]) -> tuple[int, list[BaseException]]:
    """Repeat ``work`` on another thread for as long as ``during`` lasts: how often it ran, and what it raised."""
    errors: list[BaseException] = []
    counts = [0]
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.is_set() and not errors:
            try:
                work()
                counts[0] += 1
            except BaseException as error:  # noqa: PERF203
                errors.append(error)

    thread = threading.Thread(target=repeat, name="users")
    thread.start()
    try:
        while not counts[0] and not errors:
            time.sleep(0.001)
        counts[0] = 0
        during()
    finally:
        is_over.set()
        thread.join()
    return counts[0], errors


def train() -> None:
    model = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.randn(4, 512).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_code_on_other_threads_goes_on_with_its_own_tensors() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters())

    def work() -> None:
        loss = model(torch.randn(4, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.device.type == "cpu" and not torch.cuda.is_available() and loss.isfinite()

    def during() -> None:
        for _ in range(4):
            report = om.dry_run(train)
            assert len(report.steps) == 3 and report.breakdown["parameter"] >= 4 * 512 * 512
        with pytest.raises(RuntimeError, match=r"thread users uses it: a dry run can neither follow nor change it"):
            om.dry_run(lambda: model.cuda())

    if torch.cuda.is_available():
        pytest.skip("the threads' answers about a GPU are those of this machine")
    count, errors = beside(work, during)
    assert not errors and count > 0
    assert all(state["step"] >= count for state in optimizer.state.values())
    assert om.dry_run(lambda: model.cuda()).peak_allocated_bytes  # once the thread has ended


def test_classes_that_the_run_has_others_of_are_pytorchs_own_on_other_threads() -> None:
    made: list[Any] = []
    generator, event = torch.Generator, torch.Event

    def make() -> None:
        one = torch.Generator()
        made.append(type(one))
        assert isinstance(one, torch.Generator) and isinstance(event(), torch.Event)

    _count, errors = beside(make, lambda: om.dry_run(train))
    assert not errors and set(made) == {generator}


def test_threads_of_the_compiler_are_no_users() -> None:
    """Inductor's pool of processes has one that waits for their answers as long as Python runs."""
    is_over = threading.Event()
    file = f"{Path(torch.__file__).parent}/_inductor/compile_worker/subproc_pool.py"
    names: dict[str, Any] = {"wait": is_over.wait}
    exec(compile("def read():\n    wait()", file, "exec"), names)
    thread = threading.Thread(target=names["read"])
    thread.start()
    try:
        assert not others_at_work([threading.get_ident()]) and used_by_other_threads([threading.get_ident()]) is None
    finally:
        is_over.set()
        thread.join()


def test_threads_of_the_run_end_with_it() -> None:
    begun = threading.Event()

    def loop() -> None:
        begun.set()
        while True:
            torch.ones(2, device="cuda")

    def start() -> None:
        threading.Thread(target=loop, daemon=True, name="endless").start()
        begun.wait()

    om.dry_run(start)
    deadline = time.monotonic() + 10
    while any(thread.name == "endless" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_thread_would_do_after_the_run_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that looks in now and then, a timer, a class of the user's, and a task that does not end."""

    def watch() -> None:
        while True:
            with (tmp_path / "watched").open("a") as file:
                file.write("x")
            time.sleep(0.05)

    class Saver(threading.Thread):
        def run(self) -> None:
            watch()

    def train() -> None:
        torch.ones(3, device="cuda")
        for thread in (threading.Thread(target=watch), threading.Timer(0.1, watch), Saver()):
            thread.daemon = True
            thread.start()
        time.sleep(0.2)
        ThreadPoolExecutor(1).submit(watch)

    monkeypatch.setattr("oom_magic.predict.isolation.run_threads.PATIENCE_SECONDS", 0.1)
    om.dry_run(train)
    time.sleep(0.2)
    assert not [frame for frame in sys._current_frames().values() if frame.f_code is watch.__code__]
    assert not list(tmp_path.iterdir())


def test_a_prefetcher_and_a_pool_see_the_pretend_gpu() -> None:
    import queue
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.cuda.is_available).result() == torch.cuda.is_available()

        def prefetched() -> None:
            batches: queue.Queue[torch.Tensor | None] = queue.Queue(2)

            def load() -> None:
                with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                    for _ in range(4):
                        batches.put(torch.randn(64, 512).cuda(non_blocking=True))
                batches.put(None)

            threading.Thread(target=load).start()
            model = nn.Linear(512, 512).cuda()
            while (batch := batches.get()) is not None:
                assert batch.is_cuda
                model(batch).sum().backward()
            assert pool.submit(torch.cuda.is_available).result()
            assert pool.submit(lambda: torch.ones(3, device="cuda").device).result() == torch.device("cuda", 0)

        assert om.dry_run(prefetched).breakdown["parameter"] >= 4 * 512 * 512
        assert pool.submit(torch.cuda.is_available).result() == torch.cuda.is_available()


def test_a_thread_that_runs_out_of_memory_ends_the_run_so() -> None:
    def start() -> None:
        thread = threading.Thread(target=lambda: torch.empty(1 << 40, dtype=torch.uint8, device="cuda"))
        thread.start()
        thread.join()

    assert om.dry_run(start).out_of_memory is not None


def test_gradients_of_other_threads_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward writes them without Python's lock: reading one meanwhile ended the process."""
    model = nn.Linear(8, 8)
    theirs = {id(parameter) for parameter in model.parameters()}
    asked: list[int] = []

    def work() -> None:
        model.zero_grad()
        model(torch.randn(4, 8)).sum().backward()

    own = threading.current_thread()
    usual = torch._C.TensorBase.grad  # type: ignore[attr-defined]

    def read(tensor: torch.Tensor) -> Any:
        if threading.current_thread() is own and id(tensor) in theirs:
            asked.append(id(tensor))
        return usual.__get__(tensor)

    monkeypatch.setattr(torch.Tensor, "grad", property(read, usual.__set__), raising=False)
    _, errors = beside(work, lambda: om.dry_run(lambda: (train(), model)))
    assert not errors and not asked


@pytest.mark.slow
def test_what_other_threads_make_is_not_held() -> None:
    """A tuple that somebody else holds cannot grow."""

    def during() -> None:
        for _ in range(4):
            om.dry_run(lambda: None)

    count, errors = beside(lambda: [tuple(number for number in range(50)) for _ in range(1000)], during)
    assert count and not errors


def test_variables_of_other_threads_die_when_they_are_done_with() -> None:
    go, done = threading.Event(), threading.Event()
    seen: list[Any] = []

    def work() -> None:
        batch = nn.Linear(2, 2)
        seen.append(weakref.ref(batch))
        done.set()
        go.wait()
        del batch
        seen.append(seen[0]())

    thread = threading.Thread(target=work)
    thread.start()
    done.wait()
    om.dry_run(lambda: None)
    go.set()
    thread.join()
    assert seen[1] is None


def test_names_that_other_threads_look_up_are_never_missing() -> None:
    seen: list[bool] = []

    class Dies:
        pass

    def run() -> None:
        names["made"] = Dies()
        watches.append(weakref.ref(names["made"], lambda _: seen.append("kept" in names)))

    names: dict[str, Any] = {"first": 0, "kept": 1}
    watches: list[weakref.ref[Any]] = []
    DrySession(has_bar=False, is_lasting=False).run(run, [names])
    assert seen == [True] and list(names) == ["first", "kept"]


def test_threads_that_the_run_wakes_are_said_and_what_a_thread_holds_is_as_before() -> None:
    jobs: queue.Queue[int | None] = queue.Queue()
    simple: queue.SimpleQueue[int] = queue.SimpleQueue()
    local = threading.local()
    local.seen = [1]
    worker = threading.Thread(target=lambda: iter(jobs.get, None).__next__(), name="prefetching", daemon=True)
    taking = threading.Thread(target=lambda: simple.get(), name="taking", daemon=True)
    for thread in (worker, taking):
        thread.start()

    def run() -> None:
        local.seen.append(2)
        local.other = 3
        jobs.put(1)
        simple.put(1)
        queue.SimpleQueue[int]().put(1)
        worker.name = "renamed"
        own = threading.Event()
        threading.Thread(target=own.wait).start()
        own.set()

    report = DrySession(has_bar=False, is_lasting=False).run(run, [{"local": local, "worker": worker}])
    assert vars(local) == {"seen": [1]} and worker.name == "prefetching"
    said = [one.text.split("`")[1] for one in report.assumptions if "was waiting" in one.text]
    assert said == ["prefetching", "taking"] and type(queue.SimpleQueue.put) is type(queue.SimpleQueue.get)


def test_the_bar_of_a_run_starts_no_thread() -> None:
    before = threading.active_count()
    DrySession().run(lambda: torch.ones(1, device="cuda").sum())
    assert threading.active_count() == before


def test_pools_that_were_there_before_are_the_runs_own_in_it(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor
    from multiprocessing.pool import ThreadPool

    def work(name: str) -> torch.Size:
        (tmp_path / name).write_text("x")
        return torch.ones(2, 3, device="cuda").shape

    with ThreadPoolExecutor(2) as executor, ThreadPool(2) as pool:
        workers = {
            *executor.map(lambda _: threading.get_ident(), range(2)),
            *pool.map(lambda _: threading.get_ident(), range(2)),
        }
        alive = {thread.name for thread in threading.enumerate()}

        def run() -> None:
            called: list[torch.Size] = []
            assert [*executor.map(work, "abc"), *pool.map(work, "de"), *pool.imap(work, "f")] == [(2, 3)] * 6
            pool.apply_async(work, ("g",), callback=called.append).get()
            executor.submit(lambda: workers.add(threading.get_ident()))
            with ThreadPool(1) as own:
                assert own.apply(work, ("h",)) == (2, 3)
            executor.shutdown()
            pool.terminate()

        om.dry_run(run)
        assert not list(tmp_path.iterdir()) and {thread.name for thread in threading.enumerate()} == alive
        assert [*executor.map(abs, [-1]), *pool.map(abs, [-2])] == [1, 2]


def test_timers_from_before_are_not_cancelled() -> None:
    started, waiting = threading.Timer(1000, print), threading.Timer(1000, print)
    started.start()

    def run() -> None:
        started.cancel(), waiting.cancel()
        own = threading.Timer(9, print)
        own.start(), own.cancel(), own.join()

    (said,) = [one.text for one in om.dry_run(run).assumptions]
    assert "Timer.cancel" in said and started.is_alive()
    assert not started.finished.is_set() and not waiting.finished.is_set()
    started.cancel()


def test_what_a_run_ordered_of_a_pool_is_not_done_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from oom_magic.predict.isolation import run_threads

    monkeypatch.setattr(run_threads, "PATIENCE_SECONDS", 0.1)
    go = threading.Event()
    pools = []

    def run() -> None:
        pools.append(ThreadPoolExecutor(1))
        pools[0].submit(go.wait, 5)
        pools[0].submit((tmp_path / "late").write_text, "x")

    om.dry_run(run)
    go.set()
    time.sleep(0.3)
    assert not list(tmp_path.iterdir())
