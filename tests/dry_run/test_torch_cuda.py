"""The pretend ``torch.cuda`` answers as a whole: statistics, snapshots, markers, types from before dtypes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oom_magic as om
from oom_magic.memory.workspaces import Workspaces
from oom_magic.units import MIB
from tests.support.folders import DATA
from tests.support.put_back import observed
from tests.support.versions import recorded_with

TRUTH = json.loads((DATA / "torch_cuda_truth.json").read_text())


def statistics() -> dict[str, Any]:
    """Run on a CUDA build by ``python tests/dry_run/test_torch_cuda.py``, which prints the truth."""
    first = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
    small = [torch.empty(1000, device="cuda") for _ in range(3)]
    second = torch.empty(7 * MIB + 1, dtype=torch.uint8, device="cuda")
    del first, small[0]
    torch.cuda.reset_peak_memory_stats()
    third = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    found = dict(torch.cuda.memory_stats())
    snapshot = [
        {key: segment[key] for key in ("total_size", "allocated_size", "requested_size", "segment_type")}
        | {"blocks": [[block["size"], block["state"]] for block in segment["blocks"]]}
        for segment in torch.cuda.memory_snapshot()
    ]
    del second, third
    return {"stats": found, "snapshot": sorted(snapshot, key=str)}


def test_statistics_and_snapshot_are_pytorchs() -> None:
    seen: list[dict[str, Any]] = []
    observed(lambda: seen.append(statistics()))
    assert seen[0]["snapshot"] == TRUTH["snapshot"]
    known = {key: value for key, value in TRUTH["stats"].items() if not key.startswith(NOW_ONLY) or "current" in key}
    assert {key: seen[0]["stats"].get(key) for key in known} == known


NOW_ONLY = ("segment", "inactive_split", "reserved_bytes", "oversize")  # these are counted as they are now


def test_every_module_of_torch_cuda_answers_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def ask() -> None:
        cuda = torch.cuda
        held = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
        assert cuda.memory.memory_allocated() == cuda.memory_allocated() == 50 * MIB == held.nbytes
        assert cuda.memory.max_memory_reserved("cuda:0") == cuda.memory_reserved(0)
        nested = cuda.memory_stats_as_nested_dict()
        assert nested["allocated_bytes"]["all"]["current"] == cuda.memory_stats()["allocated_bytes.all.current"]
        assert "GPU reserved memory" in cuda.memory_summary() and cuda.memory.mem_get_info() == cuda.mem_get_info()
        cuda.memory._record_memory_history(max_entries=100)
        cuda.memory._dump_snapshot("snapshot.pickle")
        assert Path("snapshot.pickle").stat().st_size
        cuda.memory._record_memory_history(enabled=None)
        with cuda.nvtx.range("forward"), cuda.profiler.profile():
            cuda.nvtx.mark("here")
        cuda.set_per_process_memory_fraction(0.5)
        assert cuda.random.get_rng_state().dtype is torch.uint8 and cuda.memory.get_allocator_backend() == "native"

    om.dry_run(ask)
    assert not list(tmp_path.iterdir())


PRIVATE = ("torch._C", "dummy base class", "Storage device not recognized", "INTERNAL ASSERT")


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    cuda: Any = torch.cuda
    modules = (cuda, cuda.memory, cuda.nvtx, cuda.random, cuda.nccl, cuda.profiler, cuda.tunable, torch.accelerator)
    for module in modules:
        for name, function in vars(module).items():
            home = getattr(function, "__module__", None) or ""
            if callable(function) and name[0] != "_" and home.startswith(("torch", "oom_magic")):
                yield f"{module.__name__}.{name}", function


def asked(function: Callable[..., Any]) -> str:
    """The words of the error that it raises, if any; a ValueError or TypeError is about the missing arguments."""
    try:
        function()
    except (AttributeError, RuntimeError, AssertionError, OSError) as error:
        return str(error)
    except (ValueError, TypeError):
        pass
    return ""


def test_every_public_name_answers_or_is_refused_in_words() -> None:
    def ask() -> None:
        for name, function in public_functions():
            with contextlib.suppress(NotImplementedError):
                said = asked(function)
                wrong.extend([f"{name}: {said}"] if any(word in said for word in PRIVATE) else [])

    wrong: list[str] = []
    om.dry_run(ask)
    assert not wrong


def test_what_is_set_of_a_card_is_told_again_and_reaches_no_real_one() -> None:
    def ask() -> None:
        cuda: Any = torch.cuda
        cuda.set_sync_debug_mode("warn"), cuda.tunable.enable(), cuda.tunable.set_filename("found.csv")
        assert cuda.get_sync_debug_mode() == 1 and cuda.tunable.is_enabled()
        assert cuda.tunable.get_filename() == "found.csv"
        assert cuda.device_memory_used() == cuda.mem_get_info()[1] - cuda.mem_get_info()[0] > 0
        if hasattr(torch.accelerator, "memory_stats"):  # not in 2.6
            assert torch.accelerator.memory_stats() == cuda.memory_stats()
        assert cuda.get_device_properties(0).shared_memory_per_block_optin == 99 * 1024
        assert cuda.FloatStorage([1.0, 2.0]).nbytes() == 8
        assert torch.UntypedStorage(2 * MIB, device="cuda").nbytes() == 2 * MIB and torch.backends.cuda.is_built()
        getattr(cuda.memory, "_set_allocator_settings")("expandable_segments:True")  # noqa: B009
        for refused in (cuda.MemPool, cuda.caching_allocator_enable, cuda.current_blas_handle):
            with pytest.raises(NotImplementedError, match=r"torch\.cuda.* cannot be dry-run"):
                refused()
        with pytest.raises(RuntimeError, match="the pretend machine has one GPU"):
            cuda.get_device_name(3)

    report = om.dry_run(ask, gpu="RTX 3060")
    assert report.peak_allocated_bytes == 2 * MIB
    assert any("_set_allocator_settings('expandable_segments:True'): ignored" in one.text for one in report.assumptions)


def test_names_that_were_imported_before_are_the_pretend_cards(tmp_path: Path) -> None:
    cell = """
from torch import Generator
from torch.cuda import CUDAGraph, Event, Stream, current_stream, get_device_properties, graph, set_rng_state
from torch.cuda import MemPool, manual_seed, memory_snapshot, set_per_process_memory_fraction, synchronize, use_mem_pool
from functools import partial

class Timer:
    event = Event

    def stop(self, wait=synchronize):
        wait()

    def __init__(self):
        self.wait = synchronize

def closing(wait):
    return lambda: wait()

HELD = {"listed": [synchronize], "pair": (synchronize, 1), "partial": partial(synchronize, 0), "own": Timer(),
        "closed": closing(synchronize), "nested": partial(map, synchronize, [0])}
def wait_all(*, by_name=synchronize):
    HELD["listed"][0](), HELD["pair"][0](), HELD["partial"](), HELD["own"].wait(), HELD["closed"](), by_name()
    list(HELD["nested"]())

def work(wait=synchronize):
    card = get_device_properties(0)
    set_per_process_memory_fraction(0.5), manual_seed(1), set_rng_state(torch.cuda.get_rng_state()), wait()
    x = torch.randn(1000, generator=Generator("cuda"), device="cuda")
    Timer().stop(), Timer.event().record(Stream()), Stream().wait_stream(current_stream())
    with graph(CUDAGraph()):
        x += 1
    wait_all()
    assert card.name == torch.cuda.get_device_name() and memory_snapshot() == torch.cuda.memory_snapshot()
    assert isinstance(Event(), torch.cuda.Event) and isinstance(Stream(), Stream)
    globals()["synchronize"] = None

def pool():
    with use_mem_pool(MemPool()):
        pass
"""
    names: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec(compile(cell, str(tmp_path / "work.py"), "exec"), names)
    before = dict(names), vars(names["Timer"]).copy(), names["work"].__defaults__
    om.dry_run(names["work"], gpu="A100 80GB")
    with pytest.raises(NotImplementedError, match=r"torch\.cuda\.MemPool cannot be dry-run"):
        om.dry_run(names["pool"])
    assert (names, vars(names["Timer"]), names["work"].__defaults__) == before
    assert names["synchronize"] is torch.cuda.synchronize and names["Stream"] is torch.cuda.Stream


def test_code_that_is_executed_from_text_has_the_card() -> None:
    """What ``exec(open("train.py").read())`` runs is no library that is being imported."""
    code = "import torch\nassert torch.ones(3, device='cuda' if torch.cuda.is_available() else 'cpu').is_cuda"
    om.dry_run(lambda: exec(code, {}))


def of_sizes() -> None:
    ones = torch.cuda.FloatTensor(2, 3).fill_(1.0)
    assert isinstance(ones, torch.cuda.FloatTensor) and not isinstance(ones.cpu(), torch.cuda.FloatTensor)
    assert ones.type() == "torch.cuda.FloatTensor" and ones.cpu().type() == "torch.FloatTensor"
    torch.cuda.FloatTensor(np.zeros((4, 4)))


def by_name() -> None:
    assert torch.zeros(4).type("torch.cuda.FloatTensor").is_cuda
    assert torch.zeros(4).type(torch.cuda.LongTensor).dtype is torch.int64


def as_default() -> None:
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    try:
        assert torch.zeros(1000).is_cuda
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")


def pinned() -> None:
    torch.empty(1000, pin_memory=True).cuda(non_blocking=True)


def pinned_activations() -> None:
    model = torch.nn.Linear(4, 4).cuda()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        out = model(torch.randn(2, 4, device="cuda")).sin()
    out.sum().backward()


@pytest.mark.sampled(2)
@recorded_with("2.13")
@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
@pytest.mark.parametrize("claim", [of_sizes, by_name, as_default, pinned, pinned_activations], ids=lambda f: f.__name__)
def test_what_only_a_cuda_build_has_works(claim: Callable[[], None]) -> None:
    report = om.dry_run(claim)
    assert [report.peak_allocated_bytes, report.peak_reserved_bytes] == TRUTH[claim.__name__]


def test_a_module_goes_to_where_a_tensor_is() -> None:
    def move() -> None:
        for size in (4, 1024):  # real, and too large to be real
            there, here = torch.zeros(size, size, device="cuda"), torch.zeros(size, size)
            assert torch.nn.Linear(4, 4).to(there).weight.is_cuda and torch.nn.Linear(size, size).to(there).bias.is_cuda
            assert torch.nn.Linear(4, 4).to(here).weight.device.type == "cpu"

    om.dry_run(move)


@pytest.mark.skipif(torch.version.cuda is not None, reason="streams of a CUDA build are made with a card only")
def test_streams_and_events_from_before_the_run_are_used_as_its_own() -> None:
    stream, event, other = map(object.__new__, (torch.cuda.streams.Stream, *[torch.cuda.streams.Event] * 2))
    vars(stream).update(device_index=0, stream_id=7)
    before = [dict(vars(kind)) for kind in (torch.cuda.streams.Stream, torch.cuda.streams.Event)]

    def run() -> None:
        event.record()
        other.record(stream)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), stream:  # type: ignore[attr-defined]
            assert torch.cuda.current_stream().stream_id == 7
            torch.ones(8, device="cuda").record_stream(stream)
        assert torch.cuda.current_stream().stream_id == 0 and event.elapsed_time(other) == 1.0

    om.dry_run(run)
    assert [dict(vars(kind)) for kind in (torch.cuda.streams.Stream, torch.cuda.streams.Event)] == before


MADE_ON_THE_HOST: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: partial(getattr(torch, name), device="cpu") for name in ("empty_like", "zeros_like", "randn_like")},
    "full_like": lambda x: torch.full_like(x, 3.0, device="cpu"),
    "pinned": lambda x: torch.empty_like(x.sin(), device="cpu", pin_memory=True),
    "of another type": lambda x: torch.empty_like(x, dtype=torch.half, device=torch.device("cpu")),
    "new_empty": lambda x: x.new_empty(x.shape, device="cpu"),
    "new_full": lambda x: x.new_full(x.shape, 1.0, device="cpu"),
}


@pytest.mark.parametrize("make", MADE_ON_THE_HOST.values(), ids=MADE_ON_THE_HOST)
def test_what_is_made_on_the_host_like_a_tensor_of_the_gpu_takes_nothing_there(make: Any) -> None:
    def program() -> None:
        x = torch.zeros(1 << 20, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        made = make(x)
        assert not made.is_cuda and torch.cuda.memory_allocated() == before
        made.copy_(x.detach())
        assert made.to("cuda").is_cuda

    om.dry_run(program)


def test_data_are_made_on_the_default_device() -> None:
    """Factories went there, data stayed on the host: two places for one model, and what they take was missing."""

    def program() -> None:
        torch.set_default_device("cuda")
        try:
            made = [torch.tensor([1.0]), torch.as_tensor(np.ones(3)), torch.asarray([1]), torch.zeros(3)]
            assert all(one.is_cuda for one in made) and not torch.tensor([1.0], device="cpu").is_cuda
        finally:
            torch.set_default_device(None)
        assert not torch.tensor([1.0]).is_cuda

    om.dry_run(program)


def test_a_model_that_was_shared_goes_to_the_gpu() -> None:
    report = om.dry_run(lambda: torch.nn.Linear(1024, 1024).share_memory().cuda())
    assert report.peak_allocated_bytes == 1024 * 1024 * 4 + 1024 * 4


def test_a_gradient_can_be_given_to_a_weight_from_before_that_stays_on_the_host() -> None:
    """It was "attempting to assign a gradient with device type 'cpu' to a tensor with device type 'meta'"."""
    weight, given = torch.nn.Parameter(torch.zeros(2)), torch.ones(2)
    optimizer = torch.optim.SGD([weight], 0.1)

    def run() -> None:
        for gradient in (given, torch.ones(2), torch.ones(2, device="cuda").cpu(), torch.zeros_like(weight), None):
            weight.grad = gradient
            assert (weight.grad is None) == (gradient is None) and not weight.is_cuda
            optimizer.step()

    om.dry_run(run)
    assert weight.grad is None and weight.tolist() == [0.0, 0.0] and given.tolist() == [1.0, 1.0]


def test_a_tensor_in_a_file_is_read_and_what_is_written_to_it_stays_in_the_run(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    np.ones(100, np.float32).tofile(file)

    def run() -> None:
        for is_shared in (True, False):
            made = torch.from_file(str(file), shared=is_shared, size=100, dtype=torch.float32)
            made *= 3
            assert made.sum() == (300 if is_shared else 900)
            assert made.cuda().is_cuda

    om.dry_run(run)
    assert np.fromfile(file, np.float32).sum() == 100


if __name__ == "__main__":
    truth: dict[str, Any] = {"torch": torch.__version__, **statistics()}
    for claim in (of_sizes, by_name, as_default, pinned, pinned_activations):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        claim()
        truth[claim.__name__] = [torch.cuda.max_memory_allocated() - base, torch.cuda.max_memory_reserved()]
    print(json.dumps(truth, indent=1))


def test_workspaces_that_the_code_clears_are_those_of_the_pretend_gpu() -> None:
    kept = sum(Workspaces(torch.__version__, {}).lasting_bytes((8, 6)).values())

    def run() -> None:
        torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
        assert (torch.cuda.memory_allocated() > 0) is (kept > 0)
        torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
        assert torch.cuda.memory_allocated() == 0

    om.dry_run(run)


def test_a_tensor_taken_as_a_tensor_keeps_its_gradient() -> None:
    """``torch.as_tensor``, which distributions begin with, cut the graph: what came before was free too early."""
    found = []

    def program() -> None:
        x = torch.ones(4, device="cuda", requires_grad=True) * 1
        taken = [torch.as_tensor(x), torch.asarray(x), torch.as_tensor(x, dtype=x.dtype, device="cuda")]
        others = [torch.as_tensor(x, dtype=torch.half), torch.asarray(x, copy=True), torch.as_tensor(x, device="cpu")]
        found.append([one is x for one in taken] + [one is not x and one.requires_grad for one in others])
        copied = torch.tensor(x)
        found.append([copied is not x, not copied.requires_grad, copied.data_ptr() != x.data_ptr()])

    observed(program)
    assert found == [[True] * 6, [True] * 3]
