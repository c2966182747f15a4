"""A dry run by default: like steps are left out, and what follows them is seen, as PyTorch's own counters saw it."""

from __future__ import annotations

import json
import linecache
import sys
from collections.abc import Callable, Iterable
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch

import oom_magic as om
from oom_magic.predict.instrumentation import loop_code
from oom_magic.predict.instrumentation.loop_code import with_loops
from oom_magic.predict.session import DrySession
from oom_magic.units import MIB
from tests.programs.loop_cases import EVALUATIONS, LOOPS, network
from tests.support.folders import DATA, TESTS
from tests.support.put_back import observed

TRUTH = json.loads((DATA / "programs_truth.json").read_text())
VERSION = torch.__version__.partition("+")[0]


@pytest.mark.sampled(4)
@pytest.mark.skipif(
    TRUTH["torch"] != VERSION, reason=f"the truth was recorded with torch {TRUTH['torch']}, this is {VERSION}"
)
@pytest.mark.parametrize("name", LOOPS)
def test_what_follows_like_steps_is_seen(name: str) -> None:
    function = LOOPS[name]
    code = function.__code__
    report = om.dry_run(function, gpu="RTX 3060")
    assert [report.peak_allocated_bytes, report.peak_reserved_bytes] == TRUTH["peaks"][name]
    left = [assumption.line for assumption in report.assumptions if "rest of this loop" in assumption.text]
    assert all(line is not None and line.text.startswith(("for ", "while ")) for line in left)
    assert (len(report.steps) <= 12) is bool(left) is (name != "steps_that_differ")
    assert function.__code__ is code and not report.timeline.was_left


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", EVALUATIONS)
@pytest.mark.parametrize("num_steps", ["alike", 2])
def test_like_turns_of_an_evaluation_are_left_out_and_what_they_keep_is_not(function: Any, num_steps: Any) -> None:
    whole = om.dry_run(function, gpu="RTX 3060", stop_after_steps=None)
    report = DrySession("RTX 3060", is_lasting=False, has_bar=False, stop_after_steps=num_steps).run(function)
    if not report.timeline.was_left:
        assert report.peak_allocated_bytes == whole.peak_allocated_bytes
        # A later turn that is like the others may find its small blocks elsewhere, which can take one more segment.
        assert whole.peak_reserved_bytes - report.peak_reserved_bytes in (0, 2 * MIB)
    left = [one for one in report.assumptions if "rest of this loop" in one.text]
    assert len(left) == EVALUATIONS[function] - (function.__name__ == "outputs_kept" and num_steps == 2)
    assert len(report.timeline.order) < len(whole.timeline.order) or not left


def test_an_error_behind_the_steps_hides_nothing() -> None:
    def program() -> None:
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        for _step in range(10):
            model(torch.randn(32, 256, device="cuda")).sum().backward()
            optimizer.step()
        raise LookupError("of values that nobody knows")

    report = om.dry_run(program)
    assert report.peak_allocated_bytes and any("LookupError" in one.text for one in report.assumptions)
    with pytest.raises(LookupError):
        om.dry_run(program, stop_after_steps=None)


def test_what_lasts_too_long_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from oom_magic.predict.instrumentation import stop_rule

    monkeypatch.setattr(stop_rule, "FOLLOWING_SECONDS", 0)

    def program() -> None:
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        for _step in range(10):
            model(torch.randn(32, 256, device="cuda")).sum().backward()
            optimizer.step()
        while True:
            torch.ones(10, device="cuda")

    report = om.dry_run(program)
    assert report.timeline.was_left and any("then skipped" in one.text for one in report.assumptions)


@pytest.mark.parametrize(("turns", "is_known"), [(lambda: range(20_000), True), (lambda: repeat(0), False)])
def test_what_grows_behind_the_steps_and_is_left_takes_at_least_so_much(
    monkeypatch: pytest.MonkeyPatch, turns: Callable[[], Iterable[int]], is_known: bool
) -> None:
    """The price of an evaluation that collects was what 10 s of it took, and called safe."""
    collected: list[torch.Tensor] = []
    clock = "oom_magic.predict.instrumentation.training.computing_seconds"
    monkeypatch.setattr(clock, lambda: 100.0 if len(collected) > 40 else 0.0)

    def program() -> None:
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        for _step in range(10):
            model(torch.randn(32, 256, device="cuda")).sum().backward()
            optimizer.step()
        with torch.no_grad():
            for _turn in turns():
                collected.append(model(torch.randn(32, 256, device="cuda")))  # noqa: PERF401

    report = om.dry_run(program)
    collected.clear()
    assert report.timeline.was_left and report.is_lower_bound
    assert (report.peak_allocated_bytes > 20_000 * 32 * 256 * 4) == is_known


def test_names_of_code_that_is_no_function_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a loop looks for later turns, the variables are a namespace itself: a cell's, a class's."""
    code = (
        "model = network()\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "for step in range(50):\n"
        "    model(torch.randn(32, 256, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    if step % 20 == 19:\n"
        "        large = model(torch.randn(20000, 256, device='cuda'))\n"
    )
    lines = (len(code), None, code.splitlines(keepends=True), "<cell of a test>")
    monkeypatch.setitem(linecache.cache, "<cell of a test>", lines)
    names: dict[str, object] = {}
    compiled = with_loops(compile(code, "<cell of a test>", "exec"))
    observed(lambda: exec(compiled, {"torch": torch, "network": network}, names))
    assert {"model", "optimizer", "step", "large"} <= names.keys()


def test_of_two_functions_on_a_line_each_stays_itself() -> None:
    """Both ran as the first: their bytecode is the same, but for a number."""
    first, second = (lambda: torch.zeros(2**20, device="cuda")), (lambda: torch.zeros(2**22, device="cuda"))
    report = om.dry_run(lambda: [first(), second()])
    assert report.peak_allocated_bytes == 5 * 4 * MIB


def test_what_was_never_met_is_named() -> None:
    def program() -> None:
        model, number = network(), 0
        optimizer = torch.optim.Adam(model.parameters())
        while number < 100:
            model(torch.randn(32, 256, device="cuda")).sum().backward()
            optimizer.step()
            number += 1
            if number % 50 == 0:
                model(torch.randn(20000, 256, device="cuda"))
            if number > 3:
                continue

    report = om.dry_run(program)
    lines = [one.line.text for one in report.assumptions if one.line is not None and "true in none" in one.text]
    assert lines == ["if number % 50 == 0:"]


def test_steps_that_differ_for_long_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from oom_magic.predict.instrumentation import loops

    monkeypatch.setattr(loops, "UNLIKE_SECONDS", 0.1)

    def program() -> None:
        model, kept = network(), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(10**6):
            kept.append(model(torch.randn(32, 256, device="cuda")))
            kept[-1].sum().backward()
            optimizer.step()

    report = om.dry_run(program)
    assert any("keeps more memory than the one before, the last 32.00 KiB" in one.text for one in report.assumptions)


def test_a_loop_that_waits_for_a_value_ends() -> None:
    def program() -> None:
        model = network()
        x = torch.randn(32, 256, device="cuda")
        while True:
            y = model(x)
            if (y - x).norm().item() < 1e-6:
                break
            x = y
        torch.zeros(5000, 1000, device="cuda")

    report = om.dry_run(program)
    assert report.peak_allocated_bytes > 4 * 5000 * 1000
    assert any("until a value" in one.text for one in report.assumptions)


def test_code_outside_a_dry_run_is_as_it_was() -> None:
    names: dict[str, object] = {}
    source = TESTS / "programs" / "loop_cases.py"
    exec(with_loops(compile(source.read_text(), str(source), "exec")), names)
    seen = [len(item[0]) for item in names["data"](6, 2)]  # type: ignore[operator]
    assert seen == [2, 2, 2]


_TRAINER = """import torch
class Trainer:
    def __init__(self, model): self.model = model
    def train(self):
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        for step in range(20):
            self.model(torch.ones(8, 512, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize("home", ["project", "site-packages"])
def test_loops_of_a_module_that_the_run_imports_first_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    """As a module of the user's, or transformers' Trainer, that a cell imports: the run ended with the third step."""
    (tmp_path / home).mkdir()
    (tmp_path / home / "first_met_trainer.py").write_text(_TRAINER)
    monkeypatch.syspath_prepend(tmp_path / home)
    monkeypatch.setattr(loop_code, "TRAINERS", (("first_met_trainer", "Trainer"),))

    def program() -> None:
        from first_met_trainer import Trainer

        model = torch.nn.Linear(512, 512).cuda()
        Trainer(model).train()
        with torch.no_grad():
            model(torch.ones(65536, 512, device="cuda"))

    report = om.dry_run(program, gpu="A100 80GB")
    sys.modules.pop("first_met_trainer", None)
    assert len(report.steps) == 3 and report.peak_allocated_bytes > 1 << 28


def test_loops_of_a_notebook(shell: Any) -> None:
    """In functions of earlier cells, and in the cell itself, whose last expression is compiled apart."""
    shell.run_cell(
        "import torch\n"
        "def train(steps):\n"
        "    weight = torch.ones(1000, 1000, device='cuda', requires_grad=True)\n"
        "    optimizer = torch.optim.Adam([weight])\n"
        "    for _ in range(steps):\n"
        "        torch.sin(weight).sum().backward()\n"
        "        optimizer.step()\n",
        store_history=True,
    )
    shell.run_cell(
        "%%gpumem --dry-run --no-plot -o report\n"
        "train(30)\n"
        "for size in range(10):\n"
        "    train(4)\n"
        "last = torch.ones(30_000_000, device='cuda')\n"
        "last.shape\n",
        store_history=True,
    )
    report = shell.user_ns["report"]
    assert report.peak_allocated_bytes >= 120_000_000 and not report.timeline.was_left
    lines = [one.line.text for one in report.assumptions if one.line is not None and "rest of this loop" in one.text]
    assert lines == ["for _ in range(steps):"]


def test_lightning_is_left_after_like_steps_and_validates(tmp_path: Path) -> None:
    """Its own loops are ``while`` statements: an epoch's rest is left out, its validation and the next epoch are not."""
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
    data = [
        torch.utils.data.DataLoader([torch.zeros(1000) for _ in range(count)], batch_size=size)
        for count, size in ((320, 16), (2048, 1024))
    ]

    class Small(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(1000, 1000)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            return self.model(batch).mean()

        def validation_step(self, batch: torch.Tensor, number: int) -> None:
            self.log("loss", self.model(batch).mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    def fit() -> None:
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(max_epochs=4, accelerator="gpu", devices=1, default_root_dir=tmp_path, **quiet)
        trainer.fit(Small(), *data)
        torch.zeros(100, 100, 100, device="cuda")

    report, whole = om.dry_run(fit, gpu="RTX 3060"), om.dry_run(fit, gpu="RTX 3060", stop_after_steps=None)
    assert (len(report.steps), len(whole.steps)) == (6, 80)
    assert report.peak_allocated_bytes == whole.peak_allocated_bytes
    assert report.peak_reserved_bytes == whole.peak_reserved_bytes
    assert not report.timeline.was_left
