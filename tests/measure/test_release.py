"""What release lets go and whom it names, with CPU tensors in the place of CUDA ones; objects that misbehave."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from IPython.core.interactiveshell import InteractiveShell
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import oom_magic as om
from oom_magic.measure.device.accelerators import Levels, Memory
from oom_magic.measure.history.attribution import Storage, storage_of
from oom_magic.measure.holders.failed_frames import find_error_frames, separate_error
from oom_magic.measure.holders.inventory import MemoryHolder
from oom_magic.measure.holders.release import DeviceChange, FreedItem, Released, find_all_holders, release_from
from tests.support.versions import TELLS_WHAT_GRAPHS_SAVED

LARGE = 100_003  # elements: tensors of this size are this file's


class HostMemory:
    """Stands for a GPU: the large tensors of this process."""

    is_fake = False

    def allocated(self) -> dict[str, int]:
        return {"host": sum(self._storages().values())}

    def levels(self) -> dict[str, Levels]:
        return {device: Levels(num_bytes, num_bytes) for device, num_bytes in self.allocated().items()}

    def storage(self, tensor: torch.Tensor) -> Storage | None:
        found = storage_of(tensor)
        return found if found is not None and found[1] >= LARGE else None

    def return_cached(self, allocated_before: Mapping[str, int]) -> None:
        pass

    def _storages(self) -> dict[int, int]:
        gc.collect()
        tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            return dict(filter(None, map(self.storage, tensors)))


MEMORY: list[Memory] = [HostMemory()]


def large(count: int = 1) -> torch.Tensor:
    return torch.zeros(count * LARGE, dtype=torch.uint8)


def release(namespace: dict[str, Any], **options: Any) -> Released:
    return release_from(MEMORY, namespace, **options)


def fails(*_: Any) -> Any:
    raise AssertionError("the user's code was run")


def fail_with_locals(ghosts: list[Any]) -> None:
    held = large()
    ghosts.append(weakref.ref(held))
    raise ValueError(f"{held.shape}")


def kept_error(run: Callable[[], Any]) -> BaseException:
    try:
        run()
    except BaseException as error:
        return error
    raise AssertionError("nothing failed")


@pytest.fixture(autouse=True, scope="module")
def _what_other_files_left_need_not_be_looked_at() -> Iterator[None]:
    release({})
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_failures_of_other_tests() -> None:
    """What errors of other tests still hold goes first: what is counted here is the test's own."""
    release({})


def test_frames_are_emptied_wherever_their_error_is_kept() -> None:
    ghosts: list[Any] = []

    def handle() -> None:
        try:
            fail_with_locals(ghosts)
        except ValueError as error:
            raise KeyError("second") from error

    def give_up() -> None:
        try:
            fail_with_locals(ghosts)
        except ValueError:
            raise KeyError("third") from None  # __context__ keeps it all the same

    def shortened() -> None:
        try:
            fail_with_locals(ghosts)
        except ValueError as error:
            last = error.__traceback__
            while last is not None and last.tb_next is not None:
                last = last.tb_next
            raise error.with_traceback(last) from None

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(fail_with_locals, ghosts)
        future.exception()
    errors = [kept_error(run) for run in (handle, give_up, shortened)]
    for error in errors:
        assert error.__traceback__ is not None
        assert error.__traceback__.tb_frame.f_locals is not None  # as IPython does to show values
    names: dict[str, Any] = {"errors": errors, "future": future, "mine": large(3)}
    released = release(names)
    assert len(ghosts) == 4
    assert [ghost() for ghost in ghosts] == [None] * 4
    assert released.freed_allocated_bytes == 4 * LARGE == sum(gone.num_bytes for gone in released.freed)
    assert all("fail_with_locals" in gone.what for gone in released.freed)
    assert released.holders == (MemoryHolder("mine", "Tensor", 3 * LARGE),)
    assert str(errors[0]) == "'second'"
    json.dumps(released.to_dict())


def test_a_deep_recursion_and_errors_that_came_from_each_other_are_walked_once() -> None:
    ghosts: list[Any] = []

    def recurse(depth: int) -> None:
        if depth:
            recurse(depth - 1)
        fail_with_locals(ghosts)

    def circle() -> None:
        try:
            recurse(10)
        except ValueError as error:
            error.__context__ = other = KeyError()
            other.__context__ = error
            raise

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        errors = [kept_error(lambda: recurse(3000)), kept_error(circle)]
        kept = separate_error(find_error_frames(), errors[1])
    finally:
        sys.setrecursionlimit(limit)
    assert sorted(len(one.frames) > 3000 for one in kept if "fail_with_locals" in one.title) == [False, True]
    assert [one.is_of_error for one in kept if "fail_with_locals" in one.title] == [False, True]
    del kept
    release({"errors": errors})
    assert [ghost() for ghost in ghosts] == [None] * 2


def test_what_can_go_on_is_not_ended_and_locals_that_the_user_has_stay() -> None:
    kept: dict[str, Any] = {}

    def steps() -> Iterator[Any]:
        state = large()
        try:
            raise ValueError
        except ValueError as error:
            mine = error
        yield mine
        yield len(state)

    def fail() -> None:
        mine = large()
        kept["locals"] = locals()
        raise ValueError(mine.shape)

    generator = steps()
    kept["error"] = next(generator)
    kept["second"] = kept_error(fail)
    released = release({"generator": generator, "kept": kept})
    assert next(generator) == LARGE
    assert "mine" in kept["locals"]
    assert {one.name: one.num_bytes for one in released.holders} == {"generator": LARGE, "kept": LARGE}


def test_each_byte_once_and_all_who_hold_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(LARGE, 1)
            self.head = nn.Linear(1, LARGE, bias=False)
            self.head.weight = self.embedding.weight
            self.cycle = [self]

    model = Tied()
    shared = large()
    names = {
        "everything": {"views": [shared[:10], shared[10:]], "model": model},
        "model": model,
        "shared": shared,
        "input": shared.view(-1, 1),  # a name that shadows a builtin
        "Out": {4: shared},
    }
    released = release(names)
    model_row, shared_row = released.holders
    assert model_row == MemoryHolder("model", "module Tied", 4 * LARGE, ("everything",))
    assert shared_row == MemoryHolder("shared", "Tensor", LARGE, ("input", "everything", "Out[4]"))
    assert released.unnamed_bytes == 0


def test_graphs_caches_closures_and_class_variables_are_looked_into(shell: InteractiveShell) -> None:
    weight = torch.ones(LARGE, requires_grad=True)
    hidden = large(5)

    @functools.lru_cache(maxsize=2)
    def cached(count: int) -> torch.Tensor:
        return large(count)

    cached(4)
    shell.run_cell("class Registry: pass")
    registry = shell.user_ns["Registry"]
    registry.cache = [hidden]
    del hidden
    names = {
        "loss": weight.exp().sum(),
        "cached": cached,
        "Registry": registry,
        "function": (lambda held: lambda: held)(large(6)),
    }
    del weight
    found = {(one.name, one.what): one.num_bytes for one in release(names).holders}
    del registry.cache
    assert found == {
        ("loss", "autograd graph"): 8 * LARGE if TELLS_WHAT_GRAPHS_SAVED else 4 * LARGE,  # else the weight alone
        ("cached", "functools cache"): 4 * LARGE,
        ("Registry", "type"): 5 * LARGE,
        ("function", "function"): 6 * LARGE,
    }


def test_checkpoints_are_not_recomputed_to_be_counted() -> None:
    calls = []

    def part(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.exp()

    x = torch.ones(LARGE, requires_grad=True)
    loss = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False).sum()
    names = {"loss": loss}
    del x
    assert sum(one.num_bytes for one in release(names).holders) == 4 * LARGE
    assert calls == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_objects_that_misbehave_do_no_harm() -> None:
    class Hostile:
        __repr__ = __eq__ = __bool__ = __len__ = __iter__ = __getattr__ = fails  # type: ignore[assignment]
        __class__ = property(fails)  # type: ignore[assignment]
        __hash__ = None  # type: ignore[assignment]

        def __init__(self) -> None:
            self.held = large()

    class Dying:
        def __del__(self) -> None:
            late.append(large())
            raise RuntimeError("in __del__")

    class Subclassed(torch.Tensor):
        __torch_function__ = classmethod(fails)  # type: ignore[assignment]

    late: list[Any] = []
    deep: list[Any] = [large()]
    for _ in range(50_000):
        deep = [deep]
    names: dict[Any, Any] = {"hostile": Hostile(), "deep": deep, "late": late, "dying": Dying(), 1: None}
    names["sub"] = torch.Tensor._make_subclass(Subclassed, large())
    released = release(names, names=["dying"])
    assert {one.name for one in released.holders} == {"hostile", "deep", "sub", ""}  # "": came while releasing
    assert {one.num_bytes for one in released.holders} == {LARGE}
    assert "dying" not in names


def test_tensors_of_all_kinds() -> None:
    indices = torch.arange(LARGE // 8 + 1)
    sparse = torch.sparse_coo_tensor(indices[None], torch.ones(len(indices), dtype=torch.uint8), check_invariants=False)
    rows = torch.sparse_csr_tensor(torch.tensor([0, LARGE]), torch.arange(LARGE), torch.ones(LARGE))
    names = {
        "sparse": sparse,
        "rows": rows,
        "quantized": torch._empty_affine_quantized([LARGE], scale=1.0, zero_point=0, dtype=torch.quint8),
        "nested": torch.nested.nested_tensor([torch.ones(LARGE), torch.ones(2)], layout=torch.jagged),
        "fake": torch.empty(LARGE, device="meta"),
        "two": TwoTensor(torch.ones(LARGE), torch.zeros(LARGE)),
    }
    sizes = {one.name: one.num_bytes for one in release(names).holders}
    assert sizes == {
        "sparse": 8 * len(indices),
        "rows": 12 * LARGE,
        "quantized": LARGE,
        "nested": 4 * (LARGE + 2),
        "two": 8 * LARGE,
    }


def test_a_distributed_tensor(tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        names = {"tensor": distribute_tensor(large(), mesh)}
        assert release(names).holders == (MemoryHolder("tensor", "DTensor", LARGE),)
        names.clear()
    finally:
        torch.distributed.destroy_process_group()


def test_many_small_tensors() -> None:
    class NotCounted(HostMemory):
        def allocated(self) -> dict[str, int]:
            return {"host": 400_000}

        def storage(self, tensor: torch.Tensor) -> Storage | None:
            return storage_of(tensor) if tensor.shape == (1, 1) else None

    names = {"many": [torch.zeros(1, 1) for _ in range(100_000)]}
    names["again"] = names["many"][:10]
    assert release_from([NotCounted()], names).holders == (MemoryHolder("many", "list", 400_000, ("again",)),)


def test_named_variables_go_with_the_results_that_are_the_same(shell: InteractiveShell) -> None:
    value = large()
    names = {"model": value, "again": [value], "Out": {1: value, 2: 5}, "_1": value, "_": value, "other": large()}
    shell.user_ns_hidden["_1"] = shell.displayhook.__ = value
    del value
    names["small"] = [large(), torch.ones(LARGE, requires_grad=True).exp()]
    told = release(names, names=["small"], dry_run=True)
    assert told.freed == (FreedItem("small", 9 * LARGE),)  # one row a name, its graphs included
    told = release(names, names=["small", "model", "other"], dry_run=True)
    assert [(gone.what, gone.num_bytes) for gone in told.freed] == [("small", 9 * LARGE), ("other", LARGE)]
    del names["small"]
    told = release(names, names=["model", "other"], dry_run=True)
    assert set(names) == {"model", "again", "Out", "_1", "_", "other"}
    assert [(gone.what, gone.num_bytes) for gone in told.freed] == [("other", LARGE)]
    assert release(names, names=["model", "other"]).freed == told.freed
    assert names.pop("again")[0] is not None
    assert names == {"Out": {2: 5}, "_": ""}
    assert release(names).allocated_bytes == 0


def test_results_go_if_wished() -> None:
    value = large()
    names = {"Out": {1: value, 2: 5}, "_1": value, "_2": 5, "_": 5, "__": value}
    del value
    assert release(names).holders == (MemoryHolder("Out[1]", "shown result", LARGE),)
    assert release(names, out=True).freed_allocated_bytes == LARGE
    assert names == {"Out": {}, "_": "", "__": ""}


def test_an_unknown_name_is_refused_before_anything_goes() -> None:
    names = {"model": 1, "mine": 2}
    with pytest.raises(ValueError, match="no variable 'modle'; did you mean 'model'"):
        release(names, names=["mine", "modle"])
    assert "mine" in names


def test_without_an_accelerator_there_is_nothing_to_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    ghosts: list[Any] = []
    error = kept_error(lambda: fail_with_locals(ghosts))
    released = om.release({"error": error})
    assert str(released).splitlines()[2].startswith("torch finds no GPU here, so there is nothing to release")
    assert ghosts[0]() is not None


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_other_accelerators(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    calls: list[str] = []
    backend = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 1,
        memory_allocated=lambda _: 5,
        memory_reserved=lambda _: 7,
        current_allocated_memory=lambda: 5,
        driver_allocated_memory=lambda: 7,
        empty_cache=lambda: calls.append("emptied"),
    )
    monkeypatch.setattr(torch, kind, backend)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    released = om.release({})
    (change,) = released.devices
    assert (change.device, change.after) == (f"{kind}:0", Levels(5, 7))
    assert calls == ["emptied"]
    assert released.unnamed_bytes == 5


def test_both_encodings_show_the_same_rows() -> None:
    held = MemoryHolder("<model>", "module GPT2LMHeadModel", 3 * 2**30, ("optimizer", "trainer", "Out[12]"))
    hidden = MemoryHolder("", "a.very.long.module.Name, list, module helpers_of_somebody", 2**20)
    device = DeviceChange("cuda:0", Levels(9 * 2**30, 10 * 2**30, 11 * 2**30), Levels(3 * 2**30, 4 * 2**30, 5 * 2**30))
    gone = (FreedItem("OutOfMemoryError in train_one_epoch, Cell In[12]:345", 6 * 2**30),)
    released = Released((device,), gone, (held, hidden))
    bundle = released._repr_mimebundle_()
    assert max(map(len, bundle["text/plain"].splitlines())) <= 80
    for shown in ("9.00 GiB", "6.00 GiB", "5.00 GiB", "trainer", "helpers_of_somebody", "--names"):
        assert shown in bundle["text/plain"] and shown in bundle["text/html"]
    assert "<model>" not in bundle["text/html"]


def test_what_an_error_itself_holds_is_told_from_what_earlier_ones_do() -> None:
    def wrapped() -> None:
        try:
            fail_with_locals([])
        except ValueError as error:
            raise KeyError("wrapped") from error

    earlier, error = kept_error(lambda: fail_with_locals([])), kept_error(wrapped)
    gone = find_all_holders(MEMORY, {}, error).freed
    assert [(one.is_of_error, one.num_bytes) for one in gone] == [(False, LARGE), (True, LARGE)]
    assert not any(one.is_of_error for one in find_all_holders(MEMORY, {}).freed)
    del earlier
