"""Copies of this process that make dry runs on other cores: they save time and change nothing."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from oom_magic.predict.forks import Forks
from oom_magic.predict.session import DrySession
from oom_magic.predict.sizing import runs
from oom_magic.predict.sizing.sizes import Sizes, size

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or len(os.sched_getaffinity(0)) < 2, reason="needs forks and two cores"
)


def call(at_rest: Callable[[], None]) -> None:
    at_rest()


def children() -> set[int]:
    """Processes that this one began and has not waited for; other tests may have left some."""
    return {child.pid for child in psutil.Process().children()}


def squared(here: int, number: int) -> tuple[int, bool]:
    """What a job comes to, and whether it was made elsewhere; 3 fails, 5 ends the process and 7 hangs, elsewhere."""
    is_elsewhere = os.getpid() != here
    if is_elsewhere and number == 3:
        raise ValueError
    if is_elsewhere and number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    if is_elsewhere and number == 7:
        time.sleep(3600)
    return number**2, is_elsewhere


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize("bad", [(), (3,), (5,), (5, 6), (7,)])
def test_each_job_is_made_whatever_becomes_of_the_copies(
    works: bool, bad: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if 7 in bad:
        monkeypatch.setattr("oom_magic.predict.forks.MOST_POLLS", 2)
    work = partial(squared, os.getpid())
    before = children()
    copies = Forks(work, call, 3, works)
    jobs = [1, 2, *bad, 8, 9]
    copies.submit(jobs)
    made = [copies.result(job, work) for job in jobs]
    copies.close()
    assert [number for number, _ in made] == [job**2 for job in jobs]
    assert bad or works or all(is_elsewhere for _, is_elsewhere in made)
    assert not children() - before


def test_what_fails_here_too_is_raised_where_it_is_asked_for() -> None:
    def fail(number: int) -> int:
        if number == 2:
            raise ZeroDivisionError(number)
        return number

    copies = Forks(fail, call, 3, True)
    copies.submit([1, 2, 3])
    assert copies.result(3, fail) == 3
    with pytest.raises(ZeroDivisionError):
        copies.result(2, fail)
    copies.close()


def test_copies_write_nothing_that_is_shared(tmp_path: Path) -> None:
    mapped, anonymous = np.memmap(tmp_path / "map", mode="w+", shape=8), mmap.mmap(-1, 8)
    lock, tensor = multiprocessing.Lock(), torch.zeros(3).share_memory_()

    def write(number: int) -> int:
        mapped[:], anonymous[:2] = number, b"xx"
        tensor.fill_(number)
        lock.acquire()
        return os.getpid() if mapped[0] == tensor[0] == number else 0

    copies = Forks(write, call, 3, False)
    copies.submit([1, 2])
    assert copies.result(1, write) != os.getpid()
    copies.close()
    assert not mapped.any() and not tensor.any() and anonymous[:2] == bytes(2)
    assert np.fromfile(tmp_path / "map", np.uint8).sum() == 0
    assert lock.acquire(block=False)


def test_a_copy_that_is_ended_puts_back_what_it_did(tmp_path: Path) -> None:
    def stay(number: int) -> int:
        folder = tmp_path / f"{number}"
        try:
            folder.mkdir()
            time.sleep(60)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return number

    copies = Forks(stay, call, 3, False)
    copies.submit([1, 2])
    while not list(tmp_path.iterdir()):
        time.sleep(0.01)
    copies.close()
    assert not list(tmp_path.iterdir())


def train(batch_size: int, width: int) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.ReLU(), torch.nn.Linear(4 * width, 1)).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(3):
        net(torch.randn(batch_size, width, device="cuda")).sum().backward()
        optimizer.step()


def peaks(sizes: Sizes) -> list[int]:
    points = [(1, 8), (3, 9), (64, 128), (17, 77)]
    return [sizes.report(batch_size=batch, width=width).peak_reserved_bytes for batch, width in points]


@pytest.mark.slow
def test_sizes_are_the_same_with_copies_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = {"batch_size": (1, 64), "width": (8, 128)}
    alone = size(train, gpu="T4", **ranges)
    here: list[object] = []
    before = children()
    run = DrySession.run
    monkeypatch.setattr(DrySession, "run", lambda self, *given: (here.append(given), run(self, *given))[1])
    monkeypatch.setattr(runs, "most_copies", 3)
    shared = size(train, gpu="T4", **ranges)
    assert peaks(shared) == peaks(alone) and shared.borders == alone.borders
    assert len(here) < shared.num_traces
    assert not children() - before
