"""``%oom_explain`` after a cell that ran out on a CUDA device, real or stub, without ``%%gpumem``."""

from __future__ import annotations

import gc

import pytest
import torch

from oom_magic.explain.evidence.causes import Cause

pytestmark = pytest.mark.gpu
_SIZED = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > 13 * 2**30,
    reason="its cells are to fail on a card of 12 GiB; of larger ones tests/data/record_device_advice.py has some",
)

FAILING = """
import torch
net = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096)] * 512).cuda()
loss = net(torch.zeros(2**16, 4096, device="cuda")).sum()
"""


def test_what_the_failed_call_holds_is_no_leak(shell, monkeypatch) -> None:
    monkeypatch.setenv("OOM_MAGIC_LANG", "en")
    error = shell.run_cell(FAILING, store_history=True).error_in_exec
    assert isinstance(error, torch.OutOfMemoryError)
    message, traceback = str(error), error.__traceback__
    before = torch.cuda.memory_stats()
    diagnosis = shell.run_cell("%oom_explain --fast").result
    assert diagnosis.cause == Cause.ACTIVATIONS
    assert {one.kind for one in diagnosis.holders} >= {"own_frames", "name"}
    assert sum(row.num_bytes for row in diagnosis.budget.rows) == diagnosis.budget.capacity_bytes
    assert (str(error), error.__traceback__) == (message, traceback)  # %debug still works
    assert torch.cuda.memory_stats() == before


@_SIZED
def test_an_explanation_computes_nothing_on_the_card(shell, monkeypatch) -> None:
    monkeypatch.setenv("OOM_MAGIC_LANG", "en")
    shell.run_cell("%oom_free\n" + _TRAINED, store_history=True)
    assert shell.run_cell("loss = train(2**16)", store_history=True).error_in_exec is not None
    before = torch.cuda.memory_stats(), torch.cuda.get_rng_state().tolist()
    assert shell.run_cell("%oom_explain", store_history=True).success
    assert (torch.cuda.memory_stats(), torch.cuda.get_rng_state().tolist()) == before


_TRAINED = """
import torch
net = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(16)]).cuda()
optimizer = torch.optim.AdamW(net.parameters())
def train(batch_size):
    net(torch.randn(batch_size, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
train(2)
"""


_CAUGHT = """
try:
    loss = train(2**16)
except torch.OutOfMemoryError as caught:
    error = caught
"""


@_SIZED
def test_an_exception_that_the_code_caught_is_explained_as_if_it_had_not(shell, monkeypatch) -> None:
    monkeypatch.setenv("OOM_MAGIC_LANG", "en")
    shell.run_cell("%oom_free\n" + _TRAINED, store_history=True)
    assert shell.run_cell("train(2**16)", store_history=True).error_in_exec is not None
    true = shell.run_cell("%oom_explain", store_history=True).result
    shell.run_cell("%oom_free", store_history=True)
    assert shell.run_cell(_CAUGHT, store_history=True).success
    said = shell.run_cell("%oom_explain error", store_history=True).result
    assert said.cause == true.cause
    assert said.as_is.needed_bytes == true.as_is.needed_bytes
    assert [(one.key, one.needed_bytes) for one in said.remedies if one.fits] == [
        (one.key, one.needed_bytes) for one in true.remedies if one.fits
    ]


def test_what_earlier_failures_hold_is_named_and_the_cause(shell, monkeypatch) -> None:
    monkeypatch.setenv("OOM_MAGIC_LANG", "en")
    shell.run_cell("%oom_free\nimport torch\nmost = torch.cuda.mem_get_info()[0] * 6 // 10", store_history=True)
    taken = "torch.empty(most, dtype=torch.uint8, device='cuda')"
    shell.run_cell(f"def work():\n    held = {taken}\n    return {taken}\nwork()", store_history=True)
    shell.run_cell(taken, store_history=True)
    gc.collect()  # the first error is garbage since the second came
    assert torch.cuda.memory_allocated() == 0
    diagnosis = shell.run_cell("%oom_explain --fast", store_history=True).result
    assert [one.num_bytes for one in diagnosis.holders if one.kind == "frames"] == [shell.user_ns["most"]]
    assert diagnosis.cause == Cause.LEAK_OR_RETAINED_REFERENCE
    assert diagnosis.evidence[0].values == {"held_bytes": shell.user_ns["most"]}
    assert "oom_magic" not in "".join(one.name for one in diagnosis.holders)


@_SIZED
def test_what_an_earlier_failure_held_is_free_in_the_price_of_releasing_it(shell, monkeypatch) -> None:
    monkeypatch.setenv("OOM_MAGIC_LANG", "en")
    shell.run_cell("%oom_free\nmost = 6 * 2**30", store_history=True)
    taken = "torch.empty(most, dtype=torch.uint8, device='cuda')"
    shell.run_cell(f"import torch\ndef work():\n    held = {taken}\n    return {taken}\nwork()", store_history=True)
    shell.run_cell(taken, store_history=True)
    diagnosis = shell.run_cell("%oom_explain", store_history=True).result
    first = diagnosis.remedies[0]
    assert (first.key, first.saving_bytes, first.verdict) == ("free_held", 6 * 2**30, "safe")
    assert first.needed_bytes == 6 * 2**30 and diagnosis.as_is.needed_bytes == 12 * 2**30
    del diagnosis
    shell.run_cell(first.code, store_history=True)
    assert torch.is_tensor(shell.run_cell(taken, store_history=True).result)


@_SIZED
def test_a_cell_that_fails_twice_has_the_cause_of_the_first_time(shell, monkeypatch) -> None:
    monkeypatch.setenv("OOM_MAGIC_LANG", "en")
    shell.run_cell("%oom_free")
    shell.run_cell(
        "import torch\nnet = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096), torch.nn.GELU()] * 8).cuda()\n"
        "def step(): net(torch.zeros(batch, 4096, device='cuda')).sum().backward()",
        store_history=True,
    )
    for _ in range(2):
        shell.run_cell("batch = 2**17\nfor _ in range(2): step()", store_history=True)
        gc.collect()
    diagnosis = shell.run_cell("%oom_explain", store_history=True).result
    assert diagnosis.cause == Cause.ACTIVATIONS
    keys = [one.key for one in diagnosis.evidence]
    assert {"earlier_failures", "held_is_not_it"} <= set(keys)
    first = diagnosis.remedies[0]
    assert first.fits and diagnosis.as_is.needed_bytes - first.needed_bytes == first.saving_bytes
    assert "free_held" not in {one.key for one in diagnosis.remedies}


_STEPS = """import torch
net = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096), torch.nn.GELU()] * 8).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def steps(batch):
    for _ in range(2):
        loss = net(torch.zeros(batch, 4096, device='cuda')).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@_SIZED
def test_what_an_error_in_a_variable_holds_is_released_and_the_price_is_without_it(shell, monkeypatch) -> None:
    monkeypatch.setenv("OOM_MAGIC_LANG", "en")
    shell.run_cell("%oom_free\n" + _STEPS, store_history=True)
    shell.run_cell("try:\n    steps(2**17)\nexcept Exception as e:\n    error = e", store_history=True)
    shell.run_cell("steps(2**15)", store_history=True)
    diagnosis = shell.run_cell("%oom_explain", store_history=True).result
    assert diagnosis.cause == Cause.LEAK_OR_RETAINED_REFERENCE
    first = diagnosis.remedies[0]
    assert (first.key, first.code, first.verdict) == ("free_held", "%oom_free", "safe")
    assert first.needed_bytes < 10 * 2**30 <= first.saving_bytes
    del diagnosis
    assert shell.run_cell("%oom_free\nsteps(2**15)", store_history=True).success


@_SIZED
def test_advised_code_runs_in_the_kernel_of_the_failed_cell(shell, monkeypatch) -> None:
    monkeypatch.setenv("OOM_MAGIC_LANG", "en")
    shell.run_cell("%oom_free\n" + _STEPS, store_history=True)
    shell.run_cell("batch = 65536\nsteps(batch)", store_history=True)
    first = shell.run_cell("%oom_explain", store_history=True).result.remedies[0]
    assert first.code.startswith("%oom_free\n")
    smaller = next(line for line in first.code.splitlines() if line.startswith("batch = "))
    assert shell.run_cell(f"%oom_free\n{smaller}\nsteps(batch)", store_history=True).success


HOLDING = """
rows = 196608
for step in range(4):
    out = net(torch.zeros(rows, 4096, device="cuda"))
    loss = out.square().sum()
    loss.backward()
"""


@_SIZED
def test_code_to_paste_releases_what_the_failed_cell_has_bound(shell, monkeypatch) -> None:
    """The graph that a failed backward leaves behind ``loss`` is in the way of the next run's first forward."""
    monkeypatch.setenv("OOM_MAGIC_LANG", "en")
    shell.run_cell("%oom_free\nimport torch\nnet = torch.nn.Linear(4096, 4096).cuda()", store_history=True)
    shell.run_cell(HOLDING, store_history=True)
    first = shell.run_cell("%oom_explain", store_history=True).result.remedies[0]
    release, *changes = first.code.splitlines()
    assert release == "%oom_free --names loss out" and "rows = 98304" in changes
    shell.run_cell(release, store_history=True)
    assert "loss" not in shell.user_ns
    assert shell.run_cell(HOLDING.replace("rows = 196608", "rows = 98304"), store_history=True).success


_BUILDING = """
net = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range({layers})]).cuda()
optimizer = torch.optim.Adam(net.parameters())
loss = net(torch.zeros(8, 4096, device="cuda")).sum()
loss.backward()
optimizer.step()
"""


@_SIZED
def test_what_the_cell_builds_anew_is_released_first(shell, monkeypatch) -> None:
    """The changed cell would build its model beside the one that the code to paste reads."""
    monkeypatch.setenv("OOM_MAGIC_LANG", "en")
    cell = _BUILDING.format(layers=80)
    assert not shell.run_cell("%oom_free\nimport torch" + cell, store_history=True).success
    remedies = shell.run_cell("%oom_explain", store_history=True).result.remedies
    first = next(one for one in remedies if one.key == "sgd")
    release, code = first.code.split("\n\n# in the cell that failed:\n")
    assert release == "%oom_free --names loss net optimizer"
    assert shell.run_cell(release, store_history=True).success
    torch.cuda.reset_peak_memory_stats()
    changed = cell.replace("optimizer = torch.optim.Adam(net.parameters())", code)
    assert shell.run_cell(changed, store_history=True).success
    assert torch.cuda.max_memory_allocated() == pytest.approx(first.peak_allocated_bytes, rel=0.01)


@_SIZED
@pytest.mark.parametrize("doubling", ["rows *= 2", "rows = rows * 2"])
def test_what_the_cell_computes_from_what_it_was_is_taken_back(shell, monkeypatch, doubling) -> None:
    """When it is run again, it would compute it once more."""
    monkeypatch.setenv("OOM_MAGIC_LANG", "en")
    shell.run_cell(
        "%oom_free\nimport torch\nnet = torch.nn.Linear(4096, 4096).cuda()\nrows = 98304", store_history=True
    )
    shell.run_cell(HOLDING.replace("rows = 196608", doubling), store_history=True)
    first = shell.run_cell("%oom_explain", store_history=True).result.remedies[0]
    assert first.code.startswith("rows = 98304\n%oom_free --names loss out\n")


@_SIZED
def test_under_a_limit_what_it_leaves_room_for_counts(shell, monkeypatch) -> None:
    """What is little of a card may be much of what a process may have of it."""
    monkeypatch.setenv("OOM_MAGIC_LANG", "en")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2**30 / total)
    try:
        shell.run_cell("%oom_free\nimport torch\nolder = torch.zeros(2**25, device='cuda')", store_history=True)
        shell.run_cell("net = torch.nn.Linear(1024, 1024).cuda()", store_history=True)
        shell.run_cell(HOLDING.replace("196608", "65536").replace("4096", "1024"), store_history=True)
        first, *_ = (
            one for one in shell.run_cell("%oom_explain", store_history=True).result.remedies if one.key == "drop_copy"
        )
        assert first.code.splitlines()[0] == "del older"
        assert first.code.splitlines()[1] == "%oom_free --names loss out"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
