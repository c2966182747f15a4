"""One process of a distributed run in a dry run: PyTorch's own reducer and its buckets, and no group left behind."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from oom_magic.predict.dry_run import dry_run
from oom_magic.predict.session import DrySession
from tests.support.versions import recorded_with

# Measured with torch 2.13.0's CUDA build and a group of one process, steps less than 0.1 s apart: ProcessGroupNCCL's
# watchdog, which lets go of tensors that were sent, looks as often.
PEAKS = {False: (604_815_872, 641_728_512), True: (520_847_872, 557_842_432)}


def train(gradient_as_bucket_view: bool) -> None:
    dist.init_process_group("nccl")
    layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(20))).cuda()
    model = DistributedDataParallel(layers, device_ids=[0], gradient_as_bucket_view=gradient_as_bucket_view)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = model(torch.randn(64, 1024, device="cuda")).square().mean()
        loss.backward()
        dist.all_reduce(loss.detach())
        optimizer.step()
        optimizer.zero_grad()


def test_nothing_is_said_beside_the_report(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dry_run(train, False)
    assert "Warning" not in capfd.readouterr().err  # of C++


@recorded_with("2.13")
@pytest.mark.parametrize("is_view", PEAKS)
def test_buckets_are_counted(is_view: bool) -> None:
    report = dry_run(train, is_view)
    assert (report.peak_allocated_bytes, report.peak_reserved_bytes) == PEAKS[is_view]
    note, *others = report.assumptions
    assert not [other for other in others if "watchdog" not in other.text]
    assert note.text.startswith("process 0 of 1 was followed; NCCL's own memory is not counted")
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_group_lasts_as_long_as_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = []
    session = DrySession()
    session.run(lambda: dist.init_process_group("nccl"))
    for run in (session, DrySession(origin=session), DrySession()):
        run.run(lambda: found.append(dist.is_initialized() and (dist.get_rank(), dist.get_world_size())))
    session.run(lambda: dist.init_process_group())  # rehearsed: again
    session.run(lambda: dist.destroy_process_group())
    session.run(lambda: found.append(dist.is_initialized()))
    assert found == [(1, 4), (1, 4), False, False]
    assert not dist.is_initialized()
