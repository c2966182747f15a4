"""A rank of a job: as torchrun starts it, and to the byte what PyTorch's CUDA build took in the same process.

The truth was recorded with torch 2.13.0, transformers 5.23.0 and deepspeed 0.19.8; DeepSpeed's own checks of finite
gradients, which find zeros on the stub driver, were answered "finite". The watchdog of NCCL's process group looks every
0.1 s. Here are runs in which it did not look between the first step and the second's peak, and one, with a pause after
each step, in which it did; not those in which it looked in the middle of a step.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from oom_magic.predict.distributed import collectives
from oom_magic.predict.dry_run import dry_run
from oom_magic.predict.session import DrySession
from oom_magic.predict.what_if.change import Change, InapplicableError
from oom_magic.predict.what_if.placement_changes import FullySharded, GradientsInBuckets, Resharded, ShardsOnHost
from tests.programs.rank_cases import Case, train
from tests.support.folders import DATA
from tests.support.put_back import observed
from tests.support.versions import needs_fsdp2

TRUTH = json.loads((DATA / "ranks_truth_2.13.0.json").read_text())
QUICK = {"zero1-gpt2-x4", "fsdp1-gradop-opt-x6", "fsdp2-llama-noreshard-x2", "tp2-fsdp2-x4", "cp-x2", "ep-x8"}


def _cases() -> list[Any]:
    marks = {name: [] if name in QUICK else [pytest.mark.slow] for name in (row["case"]["name"] for row in TRUTH)}
    return [
        pytest.param(row["case"], tuple(row["peaks"]), id=row["case"]["name"], marks=marks[row["case"]["name"]])
        for row in TRUTH
    ]


@pytest.mark.sampled(2)
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="recorded with torch 2.13")
@pytest.mark.parametrize(("case", "peaks"), _cases())
def test_peaks_are_true(case: Case, peaks: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    if case["kind"] == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    monkeypatch.setenv("DS_BUILD_OPS", "0")
    found: list[tuple[int, int]] = []
    session = DrySession("A100 80GB", stop_after_steps=None, has_bar=False, num_processes=case["processes"])
    report = session.run(lambda: found.append(train(case)))
    assert found == [peaks]
    assert len(report.cards) == 1
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="recorded with torch 2.13")
def test_slow_steps_let_go_of_what_ddp_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other bound, recorded with a pause of 0.4 s after each step, in which the watchdog looks."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(
        collectives.Sent, "work", lambda _sent, outputs, _held: collectives.finished_work(outputs).boxed()
    )
    case = next(row["case"] for row in TRUTH if row["case"]["name"] == "ddp-view-accumulate-amp-x2")
    found: list[tuple[int, int]] = []
    session = DrySession("A100 80GB", stop_after_steps=None, has_bar=False, num_processes=2)
    session.run(lambda: found.append(train(case)))
    assert found == [(1515456512, 1629487104)]


@pytest.mark.slow
def test_a_stage_of_a_pipeline() -> None:
    case: Case = {"kind": "pipeline", "width": 256, "batch": 64}
    parameters = 4 * (256 * 256 + 256) * 4
    for rank, told in ((0, False), (1, True), (3, True)):
        report = dry_run(train, {**case, "told": told}, gpu="T4", num_processes=4, rank=rank)
        assert report.breakdown["parameter"] == parameters and len(report.steps) == 3
    with pytest.raises(
        RuntimeError, match=r"pipeline stage 1: .* pass input_args and output_args|what another process sends"
    ):
        dry_run(train, case, gpu="T4", num_processes=4, rank=1)


def test_hooks_of_ddp_in_bfloat16() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    def code() -> None:
        dist.init_process_group("nccl")
        model = torch.nn.parallel.DistributedDataParallel(_blocks().cuda())
        model.register_comm_hook(None, bf16_compress_hook)
        _steps(model)

    report = dry_run(code, gpu="T4", num_processes=2)
    assert any("NCCL's watchdog" in one.text for one in report.assumptions)


def test_a_rank_finds_what_torchrun_sets() -> None:
    before = dict(os.environ)
    found: list[Any] = []

    def code() -> None:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        found.extend([dist.get_rank(), dist.get_world_size(), dist.get_backend(), torch.cuda.device_count()])
        x = torch.zeros(1 << 20, device="cuda")
        dist.all_gather([torch.empty_like(x) for _ in range(8)], x)
        found.append(x.device)

    report = observed(code, gpu="H100", num_processes=8, rank=3)
    assert found == [3, 8, "nccl", 8, torch.device("cuda", 3)]
    assert report.peak_allocated_bytes == (1 + 8 + 8) * (4 << 20)  # its own, the list, and the list in one
    assert "rank 3 of 8)" in str(report).partition("\n")[0] and "outside PyTorch, NCCL not included" in _flat(report)
    assert dict(os.environ) == before
    assert not dist.is_initialized()


def _flat(report: Any) -> str:
    return " ".join(str(report).split())


def test_numbers_that_no_job_has() -> None:
    with pytest.raises(ValueError, match="num_processes 0 is not a positive whole number"):
        dry_run(print, num_processes=0)
    with pytest.raises(ValueError, match="1000000 GPUs: at most"):
        dry_run(print, num_processes=10**6)
    with pytest.raises(ValueError, match="rank 8 is not one of the job's processes: give 0 to 7"):
        dry_run(print, num_processes=8, rank=8)


def test_an_argument_of_that_name_is_the_functions_own() -> None:
    report = dry_run(lambda rank: torch.ones(rank, 1024, device="cuda"), rank=16)
    assert report.peak_allocated_bytes == 16 * 4096


def test_streams_have_pools_of_their_own() -> None:
    def code() -> None:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = torch.zeros(1 << 20, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        x.record_stream(torch.cuda.current_stream())
        del x
        torch.zeros(1 << 20, device="cuda")  # the first stream cannot have what the second gave back

    report = dry_run(code)
    assert (report.peak_allocated_bytes, report.peak_reserved_bytes) == (4 << 20, 40 << 20)


def _blocks() -> torch.nn.Sequential:
    return torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(4)])


def _steps(model: torch.nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _replicated(**options: Any) -> None:
    dist.init_process_group("nccl")
    _steps(torch.nn.parallel.DistributedDataParallel(_blocks().cuda(), **options))


def _sharded(is_offloaded: bool = False, **options: Any) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("nccl")
    model = _blocks().cuda()
    policy = {"offload_policy": CPUOffloadPolicy()} if is_offloaded else {}
    options |= policy
    for block in model:
        fully_shard(block, **options)
    _steps(fully_shard(model, **policy))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        pytest.param(FullySharded, _replicated, _sharded, marks=needs_fsdp2),
        (GradientsInBuckets, _replicated, partial(_replicated, gradient_as_bucket_view=True)),
        pytest.param(
            Resharded,
            partial(_sharded, reshard_after_forward=False),
            partial(_sharded, reshard_after_forward=True),
            marks=needs_fsdp2,
        ),
        pytest.param(ShardsOnHost, _sharded, partial(_sharded, is_offloaded=True), marks=needs_fsdp2),
    ],
)
def test_a_change_takes_what_the_code_written_so_takes(change: type[Change], before: Any, after: Any) -> None:
    session = DrySession("T4", num_processes=4, has_bar=False, changes=[change()])
    changed, written = session.run(before), dry_run(after, gpu="T4", num_processes=4)
    assert changed.steps == written.steps
    assert changed.peak_reserved_bytes == written.peak_reserved_bytes
    assert changed.peak_allocated_bytes < dry_run(before, gpu="T4", num_processes=4).peak_allocated_bytes
    with pytest.raises(InapplicableError):  # there is nothing left of it to change
        DrySession("T4", num_processes=4, has_bar=False, changes=[change()]).run(after)


def _rank_of_two(rank: int, num_processes: int, wide: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29501")
    dist.init_process_group("nccl", rank=rank, world_size=num_processes)
    torch.cuda.set_device(rank)
    _steps(torch.nn.parallel.DistributedDataParallel(_blocks().cuda(), device_ids=[rank]))
    dist.destroy_process_group()


def _accelerated() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    assert accelerator.num_processes == 2
    model = _blocks()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        accelerator.backward(model(torch.randn(64, 512, device=accelerator.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def _launched() -> None:
    from accelerate import notebook_launcher

    notebook_launcher(_accelerated, (), num_processes=2)


@pytest.mark.parametrize(
    "start", [partial(torch.multiprocessing.spawn, _rank_of_two, args=(2, 512), nprocs=2), _launched]
)
@pytest.mark.usefixtures("fresh_accelerate")
def test_processes_that_a_notebook_starts(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("torch._dynamo")  # which sets a variable of the environment when it is first imported
    monkeypatch.setitem(sys.modules, "bitsandbytes", sys)  # as pricing QLoRA imports it: accelerate starts nothing then
    before = dict(os.environ)
    report = dry_run(start, gpu="T4", num_gpus=2)
    assert [card.device.index for card in report.cards] == [0]  # the other card is another process's
    assert report.breakdown["parameter"] == 4 * (512 * 512 + 512) * 4
    assert any("process 0 of 2 was followed" in one.text for one in report.assumptions)
    assert dict(os.environ) == before
    assert not dist.is_initialized()


def test_lightning_starts_processes_from_a_notebook(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = _blocks()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.blocks(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    def fit() -> None:
        trainer = lightning.Trainer(max_steps=3, accelerator="gpu", devices=2, strategy="ddp_notebook", logger=False,
                                    default_root_dir=tmp_path, enable_progress_bar=False)  # fmt: skip
        trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(256, 512), batch_size=64))

    report = dry_run(fit, gpu="T4", num_gpus=2)
    assert report.breakdown["parameter"] == 4 * (512 * 512 + 512) * 4
    assert any("process 0 of 2 was followed" in one.text for one in report.assumptions)
    assert not dist.is_initialized()


def test_what_works_hold() -> None:
    """What WorkNCCL holds while there is it: after somebody waited, and before; in tensors, as the CUDA build counted."""
    count, held = 4, {}

    def ones(times: int = 1) -> torch.Tensor:
        return torch.ones(times << 20, device="cuda")

    def several() -> list[torch.Tensor]:
        return [ones() for _ in range(count)]

    def code() -> None:
        dist.init_process_group("nccl")
        for name, start in starts.items():
            found = []
            for is_waited in (True, False):
                before = torch.cuda.memory_allocated()
                works = start()
                if is_waited:
                    assert all(work.wait() for work in works)
                found.append((torch.cuda.memory_allocated() - before) / (4 << 20))
                del works
            held[name] = tuple(found)

    def batch() -> Any:
        return dist.batch_isend_irecv([dist.P2POp(dist.isend, ones(), 1), dist.P2POp(dist.irecv, ones(), 1)])

    starts: dict[str, Any] = {
        "isend": lambda: [dist.isend(ones(), 1)],
        "irecv": lambda: [dist.irecv(ones(), 1)],
        "batch": batch,
        "reduce": lambda: [dist.reduce(ones(), 0, async_op=True)],
        "all_reduce": lambda: [dist.all_reduce(ones(), async_op=True)],
        "all_gather": lambda: [dist.all_gather(several(), ones(), async_op=True)],
        "all_gather_into_tensor": lambda: [dist.all_gather_into_tensor(ones(count), ones(), async_op=True)],
        "reduce_scatter": lambda: [dist.reduce_scatter(ones(), several(), async_op=True)],
        "gather": lambda: [dist.gather(ones(), several(), async_op=True)],
        "scatter": lambda: [dist.scatter(ones(), several(), async_op=True)],
        "all_to_all": lambda: [dist.all_to_all(several(), several(), async_op=True)],
    }
    observed(code, gpu="A100 80GB", num_processes=count)
    assert held == {
        "isend": (1, 1), "irecv": (1, 1), "batch": (0, 0), "reduce": (1, 1), "all_reduce": (1, 1),
        "all_gather": (4, 9), "all_gather_into_tensor": (4, 5), "reduce_scatter": (1, 9), "gather": (4, 5),
        "scatter": (4, 5), "all_to_all": (4, 8),
    }  # fmt: skip
