"""Compiled training in a dry run equals what PyTorch's CUDA build counted, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import oom_magic as om
from oom_magic.__main__ import exit_code
from oom_magic.predict.compiled import calls
from oom_magic.predict.isolation.patching import patched, resumed, suspended
from oom_magic.predict.operators.calls import TORCH
from oom_magic.predict.session import DrySession
from oom_magic.predict.sizing import store
from oom_magic.predict.what_if.change import Change, InapplicableError
from oom_magic.predict.what_if.compile_changes import (
    ActivationBudget,
    Compiled,
    CompiledInBlocks,
    WithoutCudaGraphs,
)
from tests.programs.compiled_cases import MODELS, Transformer, train
from tests.programs.compiled_models import PROGRAMS
from tests.programs.compiled_programs import train_body
from tests.support.folders import DATA, SHARED
from tests.support.stub_estimates import answer_as_the_stub, stub_of_cudnn  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("stub_of_cudnn")
SHARED_FILE = SHARED / "compile"
CASES = {case["name"]: case for case in json.loads((DATA / "compiled_cases.json").read_text())}
TRUTH = json.loads((DATA / "compiled_truth.json").read_text())
SHARED_TRUTH = json.loads((SHARED_FILE / "truth.json").read_text()) if SHARED_FILE.exists() else []
STAYING = {"gpt2-fp32"}  # CPython began no full collection after the first step, whose logits cycles of Dynamo's held
# Peaks of the program "autotuned" in each step, and what stays, on the CUDA build with gc.collect() after each step.
AUTOTUNED = (222_570_496, 109_332_480, 109_332_480, 29_639_680)
# Peaks of the program "listed_numbers" in each step there, its four lists of numbers among them.
LISTED = (90_970_112, 41_954_304, 41_954_304)
needs_triton = pytest.mark.skipif(
    TORCH < (2, 13) or importlib.util.find_spec("triton") is None, reason="needs torch 2.13 and triton"
)


def steps_and_report_of(program: Any, case: dict[str, Any]) -> tuple[list[list[int]], om.MemoryReport]:
    """Peak allocated, peak reserved and allocated bytes after each step of a dry run, and its report."""
    sys.modules["compiled_steps"] = found = SimpleNamespace(steps=[])  # type: ignore[assignment] # survives the run

    def on_step(_: int) -> None:
        cuda = torch.cuda
        after = [cuda.max_memory_allocated(), cuda.max_memory_reserved(), cuda.memory_allocated()]
        sys.modules["compiled_steps"].steps.append(after)
        cuda.reset_peak_memory_stats()

    options = {"gpu": "A100 80GB", "num_processes": case.get("processes"), "stop_after_steps": None}
    report = om.dry_run(lambda: program(case, on_step), **options)
    return found.steps, report


def program_of(case: dict[str, Any]) -> Any:
    return (lambda _, on_step: PROGRAMS[case["name"]](on_step)) if case.get("program") else train


def steps_of(name: str) -> list[list[int]]:
    """To be called in a process of its own, as the truth was recorded: what earlier programs left to Dynamo and to the
    collector of garbage has a say in what a later step holds (8 KiB once)."""
    with pytest.MonkeyPatch.context() as patch:
        answer_as_the_stub(patch)
        return steps_and_report_of(program_of(CASES[name]), CASES[name])[0]


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(TORCH[:2] != (2, 13), reason="recorded with torch 2.13")
@pytest.mark.parametrize("name", TRUTH["steps"])
def test_compiled_training_equals_cuda(name: str) -> None:
    case = CASES[name]
    if case.get("model") in MODELS or name in ("trainer", "trainer_lora", "llama_lora", "t5"):
        pytest.importorskip("transformers")
    if name in ("trainer_lora", "llama_lora"):
        pytest.importorskip("peft")
    if not case.get("stays"):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            assert alone.submit(steps_of, name).result() == TRUTH["steps"][name]
        return
    _, report = steps_and_report_of(program_of(case), case)
    peaks = tuple(max(step[column] for step in TRUTH["steps"][name]) for column in (0, 1))
    assert report.peak_allocated_bytes < report.most_bytes[0] and report.most_bytes == peaks
    assert type(report).from_dict(report.to_dict()).most_bytes == peaks
    assert "Call gc.collect() after the first step" in " ".join(str(report).split())


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(TORCH[:2] != (2, 13), reason="recorded with torch 2.13")
def test_what_autotuning_may_hold_is_in_the_most_that_a_run_takes() -> None:
    """The first step is between two figures: examples that kernels were timed on are freed at once, or all stay."""
    steps, report = steps_and_report_of(lambda _, on_step: PROGRAMS["autotuned"](on_step), {})
    assert (steps[1][0], steps[2][0], steps[2][2]) == tuple(AUTOTUNED[number] for number in (1, 2, 3))
    assert steps[0][0] < AUTOTUNED[0] < report.most_bytes[0] < 1.06 * AUTOTUNED[0]


@needs_triton  # which comes with PyTorch's newest in CI: so not slow
def test_graphs_that_are_whole_on_cuda_are_whole() -> None:
    """What a dry run puts in PyTorch's place is in nobody's graph: the card's answers, torch.func, the call of modules."""
    model = nn.Linear(8, 8)

    def answers(x: torch.Tensor) -> torch.Tensor:
        return model(x) + torch.cuda.current_device() if torch.cuda.is_available() else x.cpu()

    def data(x: torch.Tensor) -> torch.Tensor:
        return model(x) + torch.as_tensor(3.0, device="cuda")

    def transformed(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(torch.func.grad(lambda row: model(row).square().sum()))(x)

    def clipped(x: torch.Tensor) -> torch.Tensor:
        return model(x) + nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def chosen(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return y + y[[]].sum() + y[:, list(range(8)) * 2].sum() + y[[[0, 1], [2, 3]]].sum()

    def multiplied(x: torch.Tensor) -> torch.Tensor:
        return model(x) @ torch.tensor([[1.0] * 8] * 8, device=x.device)

    def run() -> None:
        model.cuda()
        for function in (answers, data, transformed, clipped, chosen, multiplied):
            compiled = torch.compile(function, fullgraph=True)
            for _ in range(2):
                result = compiled(torch.ones(4, 8, device="cuda"))
                assert result.is_cuda and result.shape == (4, 8)
                result.sum().backward()

    with torch._dynamo.config.patch(error_on_recompile=True):
        assert not any("could not be" in one.text for one in om.dry_run(run).assumptions)


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(TORCH[:2] != (2, 13), reason="recorded with torch 2.13")
def test_lists_of_numbers_that_choose_rows_are_compiled() -> None:
    """Inductor keeps such a list on the GPU for as long as the graph lives, where a dry run makes it in each step."""
    steps, report = steps_and_report_of(lambda _, on_step: PROGRAMS["listed_numbers"](on_step), {})
    assert not any("could not be compiled" in one.text for one in report.assumptions)
    for (allocated, *_rest), truth in zip(steps, LISTED, strict=True):
        assert 0 <= truth - allocated <= 4 * 512


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(TORCH[:2] != (2, 13), reason="recorded with torch 2.13")
@pytest.mark.skipif(not SHARED_TRUTH, reason="../shared/compile is not here")
@pytest.mark.parametrize("truth", SHARED_TRUTH, ids=lambda truth: truth["name"])
def test_shared_programs_are_near(truth: dict[str, Any]) -> None:
    spec = importlib.util.spec_from_file_location("shared_programs", SHARED_FILE / "programs.py")
    assert spec is not None and spec.loader is not None
    programs = importlib.util.module_from_spec(spec)
    sys.modules["shared_programs"] = programs
    spec.loader.exec_module(programs)
    steps, report = steps_and_report_of(programs.train, truth["case"])
    allocated, reserved = report.most_bytes if truth["name"] in STAYING else steps[-1][:2]
    assert allocated == pytest.approx(truth["peak_allocated"], rel=0.005)
    assert reserved == pytest.approx(truth["peak_reserved"], rel=0.03)


@pytest.mark.parametrize(("spares_peak", "num_copies"), [(True, 0), (False, 1)])
def test_timing_a_kernel_raises_the_peak_in_a_forward_only(spares_peak: bool, num_copies: int) -> None:
    """``CachingAutotuner.copy_args_to_cpu_if_needed``: Inductor writes ``optimize_mem`` for backwards and inference."""
    from oom_magic.predict.compiled.generated import Kernel

    meta = {"mutated_arg_names": ["in_out_ptr0"], "optimize_mem": spares_peak}

    def launch() -> None:
        Kernel(lambda in_out_ptr0, xnumel: None, 2, meta).run(torch.empty(2**28, dtype=torch.int8, device="cuda"), 1)

    level_2_cache = 40 * 2**20
    assert om.dry_run(launch, gpu="A100 80GB").peak_allocated_bytes == 2**28 * (1 + num_copies) + level_2_cache


@needs_triton
@pytest.mark.slow
def test_nothing_of_the_compiler_is_left() -> None:
    import torch._dynamo
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    def loss_of(weight: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(data @ weight)
        torch._dynamo.graph_break()
        return (hidden @ weight).sum()

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    data = torch.randn(2, 8)
    before = compiled(data).detach()
    names, configs = set(globals()), (config.get_config_copy(), functorch_config.get_config_copy())

    def step() -> None:
        model.cuda()
        weight = torch.randn(8, 8, device="cuda", requires_grad=True)
        (torch.compile(loss_of)(weight, torch.randn(2, 8, device="cuda")) + compiled(data.cuda()).sum()).backward()

    report = om.dry_run(step)
    assert report.peak_allocated_bytes > 0
    assert not report.is_upper_bound, report.assumptions
    assert not any("gc.collect()" in assumption.text for assumption in report.assumptions)  # no results in cycles
    assert not _debug_get_cache_entry_list(loss_of.__code__)
    assert set(globals()) == names
    assert (config.get_config_copy(), functorch_config.get_config_copy()) == configs
    assert torch.equal(compiled(data), before)
    assert report.breakdown.total_bytes == report.peak_allocated_bytes


class Broken(nn.Linear):
    """Captured in two parts."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice itself."""
        x = super().forward(x).relu()
        torch._dynamo.graph_break()
        return super().forward(x)


def _training_step() -> None:
    model = torch.compile(nn.Linear(8, 8).cuda())
    model(torch.randn(2, 8, device="cuda")).sum().backward()


@needs_triton
@pytest.mark.slow
def test_each_line_and_module_has_what_compiled_code_took_for_it() -> None:
    def step() -> None:
        model = Transformer().cuda()
        tokens = torch.randint(0, 1000, (4, 256), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            torch.compile(model)(tokens, tokens).backward()

    report = om.dry_run(step, gpu="A100 80GB")
    taken = {line.line.text: line.rise_bytes for line in report.lines}
    assert taken["return x + self.mlp(self.norm_mlp(x))"] > 1024**2
    assert any(module.startswith("Transformer.blocks.") for module in report.modules)
    assert not any("_orig_mod" in module or "OptimizedModule" in module for module in report.modules)
    assert not any("what the dry run writes" in assumption.text for assumption in report.assumptions)


@needs_triton
@pytest.mark.slow
def test_what_remedies_rehearse_is_what_their_code_takes_on_cuda() -> None:
    def changed(change: Change, compile_: str) -> int:
        session = DrySession("A100 80GB", changes=(change,), stop_after_steps=2, is_lasting=False)
        return session.run(lambda: train_body(lambda number: None, compile_)).peak_allocated_bytes

    blocks, saved = (max(step[0] for step in TRUTH["steps"][name]) for name in ("blocks_one_by_one", "half_budget"))
    assert changed(Compiled(), "") == changed(CompiledInBlocks(), "whole") == blocks
    assert changed(ActivationBudget(), "whole") == saved
    for change, compile_ in ((Compiled(), "blocks"), (CompiledInBlocks(), "blocks"), (ActivationBudget(), "")):
        with pytest.raises(InapplicableError):
            changed(change, compile_)


@needs_triton
@pytest.mark.slow
def test_without_cuda_graphs_is_rehearsed_as_it_is_written() -> None:
    def train(mode: str) -> None:
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
        run = torch.compile(model, mode=mode)
        for _ in range(3):
            run(torch.randn(4096, 256, device="cuda")).sum().backward()
            model.zero_grad()

    def changed(mode: str) -> om.MemoryReport:
        session = DrySession("A100 80GB", changes=(WithoutCudaGraphs(),), stop_after_steps=3, is_lasting=False)
        return session.run(lambda: train(mode))

    graphs, default = (om.dry_run(train, mode, gpu="A100 80GB") for mode in ("reduce-overhead", "default"))
    assert changed("reduce-overhead").minimum_device_bytes == default.minimum_device_bytes
    assert graphs.minimum_device_bytes > default.minimum_device_bytes
    with pytest.raises(InapplicableError):
        changed("default")


def _train_whole() -> None:
    train_body(lambda number: None, "whole")


@needs_triton
@pytest.mark.slow
def test_a_graph_is_compiled_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    def run() -> om.MemoryReport:
        return om.dry_run(_train_whole, gpu="A100 80GB")

    first = run()
    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", None)
    again = run()
    assert not again.is_upper_bound
    assert (again.steps, again.lines, again.modules) == (first.steps, first.lines, first.modules)
    assert om.dry_run(_train_whole, gpu="T4").is_upper_bound  # compiled anew for another card


@needs_triton
@pytest.mark.slow
def test_what_another_process_compiled_is_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor import compile_fx

    from oom_magic.predict.compiled import known_graphs

    code = "def net(x):\n    x = x @ x\n    return x.cos().sum()\ndef step():\n"
    code += "    torch.compile(net)(torch.ones(512, 512, device='cuda', requires_grad=True)).backward()"

    def run(number: int) -> om.MemoryReport:
        """As in a notebook, whose cells are other files in each process."""
        file, names = tmp_path / f"{number}.py", {"torch": torch}
        file.write_text(code)
        exec(compile(code, str(file), "exec"), names)
        return om.dry_run(names["step"], gpu="A100 80GB")

    monkeypatch.setattr(store, "is_on", True)
    monkeypatch.setattr(store, "folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(known_graphs, "in_memory", {})
    first = run(1)
    monkeypatch.setattr(known_graphs, "in_memory", {})
    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", None)
    again = run(2)
    assert not again.is_upper_bound and again.steps == first.steps
    taken = [[(one.line.text, one.rise_bytes) for one in report.lines] for report in (first, again)]
    assert taken[0] == taken[1]
    assert {one.line.file for one in again.lines if one.line.file} == {str(tmp_path / "2.py")}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        lambda mask, x: torch.where(mask, x, -1.0).sum() + torch.where(mask, 0.0, x).sum(),
        lambda mask, x: x.where(mask, -1.0).sum() + x.exp().where(condition=mask, other=0).sum(),
    ],
    ids=["function", "method"],
)
def test_a_number_beside_a_tensor_keeps_its_gradient(loss: Any) -> None:
    def step() -> None:
        mask = torch.ones(4, dtype=torch.bool, device="cuda")
        weights = torch.ones(4, device="cuda", requires_grad=True)
        torch.compile(loss)(mask, weights).backward()
        assert weights.grad is not None

    assert not om.dry_run(step).is_upper_bound


@needs_triton
@pytest.mark.slow
def test_a_line_says_what_is_compiled_and_goes(capsys: pytest.CaptureFixture[str]) -> None:
    def step(fails: bool) -> None:
        model = Broken().cuda()
        loss = torch.compile(model)(torch.randn(2, 8, device="cuda")).sum()
        if fails:
            raise KeyboardInterrupt
        loss.backward()

    om.dry_run(step, False)
    said = capsys.readouterr().err
    assert "compiling Broken.forward]" in said and "compiling the backward of Broken.forward]" in said
    assert re.search(r"compiling Broken.forward:\d+\]", said)  # after the graph break
    assert not said.rpartition("\r")[2].strip() and not said.rstrip("\r").rpartition("\r")[2].strip()
    with pytest.raises(KeyboardInterrupt):
        om.dry_run(step, True)
    assert not capsys.readouterr().err.rstrip("\r").rpartition("\r")[2].strip()


@needs_triton
@pytest.mark.slow
def test_what_cannot_be_run_as_compiled_is_run_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from oom_magic.predict.compiled import generated

    usual = generated.called_by_code
    monkeypatch.setattr(generated, "called_by_code", lambda gpu: {**usual(gpu), "empty_strided_cuda": None})
    report = om.dry_run(_training_step)
    assert report.is_upper_bound and report.peak_allocated_bytes > 0
    assert any("could not be run here" in assumption.text for assumption in report.assumptions)

    def wrong() -> None:
        _training_step()
        raise ValueError("mine")

    monkeypatch.undo()
    with pytest.raises(ValueError, match="mine"):
        om.dry_run(wrong)


@needs_triton
@pytest.mark.slow
def test_recompiling_has_the_limits_of_a_new_process_and_leaves_the_users_as_they_were() -> None:
    captured: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        captured.append("graph")
        return graph.forward

    @torch.compile(backend=backend)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def step() -> None:
        before = len(captured)
        double(torch.ones(2, device="cuda"))
        assert len(captured) == before + 1

    double(torch.ones(2))
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        om.dry_run(step)
    before = len(captured)
    double(torch.ones(2, dtype=torch.float64))
    assert len(captured) == before + 1


@pytest.mark.slow
@needs_triton
def test_what_a_cuda_graph_has_overwritten_cannot_be_read() -> None:
    """As on CUDA: gradients of the first microbatch lie in the pool that the second takes."""

    def train() -> None:
        net = torch.compile(torch.nn.Linear(64, 64).cuda(), mode="reduce-overhead")
        for _ in range(2):
            net(torch.randn(8, 64, device="cuda")).sum().backward()

    with pytest.raises(RuntimeError, match="gradient tensor output of CUDAGraphs that has been overwritten"):
        om.dry_run(train)


def test_without_compiling_the_figures_are_marked_as_upper_bounds() -> None:
    report = om.dry_run(_training_step, follow_compile=False)
    assert report.is_upper_bound and "more can be reserved" not in str(report)
    assert calls.why_not_followed(False) in {assumption.text for assumption in report.assumptions}
    assert "at most" in str(report) and "upper bounds" in str(report)
    assert not re.search(r"peak (allocated|reserved)(?!, at most)", str(report).partition("At the peak")[0])
    assert type(report).from_dict(report.to_dict()).is_upper_bound


def test_upper_bounds_are_marked_beside_other_runs_and_in_pictures() -> None:
    bound = om.dry_run(_training_step, follow_compile=False)
    runs = str(om.compare({"eager": om.dry_run(lambda: nn.Linear(8, 8).cuda()), "compiled": bound}))
    assert "upper bounds: compiled." in " ".join(runs.split())
    pytest.importorskip("matplotlib")
    assert "at most" in repr(om.plot(bound))


def test_eager_code_is_no_bound_of_cuda_graphs() -> None:
    def step() -> None:
        torch.compile(nn.Linear(8, 8).cuda(), mode="reduce-overhead")(torch.randn(8, 8, device="cuda"))

    assert "more can be reserved" in " ".join(str(om.dry_run(step, follow_compile=False)).split())


def test_an_upper_bound_that_does_not_fit_is_no_answer() -> None:
    def step() -> None:
        torch.compile(nn.Linear(8, 8).cuda())(torch.randn(2**24, 8, device="cuda"))

    report = om.dry_run(step, gpu="T4", memory="400MiB", follow_compile=False)
    assert report.out_of_memory is not None and exit_code(report) == 2


def test_without_triton_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    monkeypatch.setattr(calls, "TORCH", (2, 13))
    assert "pip install" in calls.why_not_followed(True)
    monkeypatch.setattr(calls, "TORCH", (2, 11))
    assert "2.13" in calls.why_not_followed(True)


def test_replacements_are_suspended_and_resumed() -> None:
    place = SimpleNamespace(name="original")
    with patched(place, {"name": "replaced", "other": 1}):
        with suspended([place]):
            assert place.name == "original" and not hasattr(place, "other")
            with resumed():
                assert place.name == "replaced" and place.other == 1
            assert place.name == "original"
        assert place.name == "replaced"
    assert vars(place) == {"name": "original"}
