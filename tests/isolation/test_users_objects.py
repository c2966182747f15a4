"""The user's own objects hold after a dry run what they held before it: attributes, classes, defaults, arrays."""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import gc
import io
import json
import mmap
import operator
import os
import random
import select
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

from oom_magic.predict.dry_run import dry_run
from oom_magic.predict.session import DrySession


class Meter:
    total: ClassVar[list[int]] = [1]
    count = 0

    def __init__(self) -> None:
        self.values = {"loss": [0.5]}
        self.best = 1.0


@dataclass
class Config:
    device: str = "cpu"
    layers: list[int] = field(default_factory=lambda: [1, 2])


def noted(value: int = 0, kept: list[int] = [7]) -> list[int]:  # noqa: B006
    kept.append(value)
    noted.calls = getattr(noted, "calls", 0) + 1  # type: ignore[attr-defined]
    return kept


def test_what_the_user_holds_is_as_before() -> None:
    names: dict[str, Any] = {
        "meter": Meter(),
        "Meter": Meter,
        "config": Config(),
        "args": argparse.Namespace(device="cpu", seen=[1]),
        "noted": noted,
        "small": np.arange(6.0).reshape(2, 3),
        "strided": np.arange(20.0)[::2],
        "window": collections.deque([1, 2], maxlen=2),
        "counts": collections.Counter(a=1),
        "default": collections.defaultdict(list, a=[1]),
        "nested": {"history": {"loss": [1.0]}},
        "loader": torch.utils.data.DataLoader([1, 2, 3]),
        "nan": np.array([np.nan, 1.0]),
    }

    def values() -> str:
        parts = [vars(Meter)["total"], Meter.count, vars(noted), noted.__defaults__, vars(names["loader"]).keys()]
        return str(
            {key: vars(value) if hasattr(value, "__dict__") else value for key, value in names.items()}
            | {"parts": parts}
        )

    def run() -> None:
        meter, config, args = names["meter"], names["config"], names["args"]
        meter.values["loss"].append(0.1)
        meter.best, meter.new = 0.1, 1
        Meter.total.append(2)
        Meter.count, Meter.added = 5, 1  # type: ignore[attr-defined]
        config.device = "cuda"
        config.layers.clear()
        args.device, args.more = "cuda", True
        args.seen.append(2)
        noted(3)
        names["small"] *= 2
        names["strided"][:] = -1
        names["window"].append(9)
        names["counts"]["a"] += 1
        names["default"]["b"].append(2)
        names["nested"]["history"]["loss"].append(2.0)
        names["loader"].more = 1
        names["nan"][0] = 3
        names["made"] = 1

    before = values()
    DrySession(has_bar=False, is_lasting=False).run(run, [names])
    assert values() == before and not hasattr(Meter, "added") and not hasattr(noted, "calls")


def test_a_large_array_is_not_written_to() -> None:
    names = {"large": np.zeros(1 << 22)}

    def run() -> None:
        assert torch.from_numpy(names["large"]).cuda().is_cuda
        try:
            names["large"][0] = 1
        except ValueError as error:
            said.append(str(error))

    said: list[str] = []
    DrySession(has_bar=False, is_lasting=False).run(run, [names])
    assert not names["large"].any() and said and names["large"].flags.writeable


def test_arrays_over_other_memory_are_as_before(tmp_path: Path) -> None:
    """NumPy makes none writeable that lies over a tensor, or over an array that is not writeable yet."""
    file = tmp_path / "bytes"
    file.write_bytes(b"\1\1")
    owner = np.zeros(1 << 22)
    names = {
        "of a tensor": torch.ones(3).numpy(),
        "large": torch.zeros(1 << 23).numpy(),
        "owner": owner,
        "view": owner[3:],
        "constant": np.ones(2),
        "copied on write": np.memmap(file, mode="c"),
    }
    names["constant"].setflags(write=False)

    def run() -> None:
        names["of a tensor"][0] = names["copied on write"][0] = 5
        names["constant"].setflags(write=True)
        assert not any(names[name].flags.writeable for name in ("large", "owner", "view"))

    for _ in range(2):
        DrySession(has_bar=False, is_lasting=False).run(run, [names])
        writeable = {name: array.flags.writeable for name, array in names.items()}
        assert writeable == {name: name != "constant" for name in names} and names["of a tensor"].sum() == 3
        assert names["copied on write"].tolist() == [1, 1]
        names = dict(reversed(names.items()))


def test_a_memory_map_holds_what_it_held(tmp_path: Path) -> None:
    file = tmp_path / "map"
    file.write_bytes(b"12345678")
    with file.open("r+b") as opened:
        mapped, shared = mmap.mmap(opened.fileno(), 0), mmap.mmap(-1, 8)
    mapped.seek(2)
    names = {"mapped": mapped, "shared": shared, "over": np.frombuffer(mapped, np.int32)}

    def run() -> None:
        mapped.write(b"xx")
        names["over"][1] = 0
        shared[:4] = b"good"
        for forbidden in (mapped.close, functools.partial(mapped.resize, 4)):
            with pytest.raises(BufferError):
                forbidden()

    DrySession(has_bar=False, is_lasting=False).run(run, [names])
    assert mapped[:] == file.read_bytes() == b"12345678" and mapped.tell() == 2 and not any(shared[:])
    del names["over"]
    mapped.close()
    large = mmap.mmap(-1, 1 << 25)
    with pytest.raises(TypeError, match="32\\.00 MiB"):
        DrySession(has_bar=False, is_lasting=False).run(run, [{"large": large}])
    large.close()


class Registry(dict):  # type: ignore[type-arg]
    """A container with a class of its own, as configurations often have."""


class Augmented(list):  # type: ignore[type-arg]
    """Gives other items than it holds."""

    def __iter__(self) -> Any:
        raise NotImplementedError

    __len__ = __getitem__ = __iter__


class Slotted:
    __slots__ = ("later", "value")

    def __init__(self) -> None:
        self.value = 1


class Hidden(Slotted):
    """Reads its slot by a property that cannot be set, as mpmath's constants do."""

    @property
    def value(self) -> int:
        return Slotted.value.__get__(self)  # type: ignore[attr-defined,no-any-return]

    def __init__(self) -> None:
        self.set(1)

    def set(self, value: int) -> None:
        Slotted.value.__set__(self, value)  # type: ignore[attr-defined]


@functools.lru_cache
def looked_up(key: int) -> torch.Tensor:
    return torch.ones(key, device="cuda")


def counting() -> Callable[[], int]:
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1
        return count

    return counted


def test_objects_with_values_of_their_own_are_as_before() -> None:
    pandas = pytest.importorskip("pandas")
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots()
    deep: dict[str, Any] = {"a": {"b": {"c": {"d": {"e": {"f": [1]}}}}}}
    table, column = pandas.DataFrame({"a": [1, 2], "b": ["x", "y"]}), pandas.Series([1.0, 2.0])
    objects, buffer, text = np.array([[1], 2], dtype=object), io.BytesIO(b"ab"), io.StringIO("ab")
    generators: list[Any] = [np.random.default_rng(0), np.random.RandomState(0), random.Random(0), torch.Generator()]
    registry, slotted, hidden, counted = Registry(a=1), Slotted(), Hidden(), counting()
    augmented, tagged = Augmented([1]), np.ones(1).view(type("Tagged", (np.ndarray,), {}))
    tagged.tags = [1]
    ways: dict[str, tuple[Any, Callable[[], Any], Callable[[], Any]]] = {
        "augmented": (augmented, lambda: list.__repr__(augmented), lambda: augmented.append(2)),
        "registry": (registry, lambda: dict(registry), lambda: registry.update(b=2)),
        "slots": (slotted, lambda: slotted.value, lambda: setattr(slotted, "value", 2)),
        "an empty slot": (slotted, lambda: hasattr(slotted, "later"), lambda: setattr(slotted, "later", 2)),
        "tagged": (tagged, lambda: str(vars(tagged)), lambda: tagged.tags.append(2)),  # type: ignore[attr-defined]
        "hidden slot": (hidden, lambda: hidden.value, lambda: hidden.set(2)),
        "closure": (counted, lambda: counted.__closure__[0].cell_contents, counted),  # type: ignore[index]
        "cache": (looked_up, lambda: looked_up.cache_info().currsize, lambda: looked_up(3)),
        "table": (table, table.to_csv, lambda: (table.insert(0, "c", 1), table.drop(index=1, inplace=True))),
        "values": (column, column.tolist, lambda: column.__setitem__(0, 9.0)),
        "objects": (objects, lambda: str(objects), lambda: (objects[0].append(2), objects.__setitem__(1, 3))),
        "buffer": (buffer, lambda: (buffer.getvalue(), buffer.tell()), lambda: buffer.write(b"c")),
        "text": (text, lambda: (text.getvalue(), text.tell()), lambda: text.write("c")),
        "deep": (deep, lambda: str(deep), lambda: deep["a"]["b"]["c"]["d"]["e"]["f"].append(2)),
        "figure": (figure, lambda: (len(axes.lines), axes.get_title()), lambda: (axes.plot([1]), axes.set_title("x"))),
        "library": (json, lambda: json.dumps.__module__, lambda: setattr(json, "dumps", counting)),
        "generators": (
            generators,
            lambda: [one.random() for one in map(copy.deepcopy, generators[:3])] + generators[3].get_state().tolist(),
            lambda: [one.random() for one in generators[:3]] + [torch.rand(2, generator=generators[3])],
        ),
    }
    before = {name: read() for name, (_, read, _) in ways.items()}

    def run() -> None:
        for _, read, change in ways.values():
            was = read()
            change()
            assert read() != was

    DrySession(has_bar=False, is_lasting=False).run(run, [{name: one for name, (one, _, _) in ways.items()}])
    assert {name: read() for name, (_, read, _) in ways.items()} == before
    assert table.equals(pandas.DataFrame({"a": [1, 2], "b": ["x", "y"]}))


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="Linux")
def test_what_the_system_keeps_for_the_user_is_as_before() -> None:
    readline = pytest.importorskip("readline")
    polled, ends, normed = select.epoll(), os.pipe(), weight_norm(torch.nn.Linear(2, 2))
    polled.register(ends[0], select.EPOLLIN)
    names = {"polled": polled, "normed": normed}
    before = readline.get_current_history_length(), readline.get_completer(), normed.weight.tolist()

    def run() -> None:
        polled.modify(ends[0], select.EPOLLOUT)
        polled.register(ends[1], select.EPOLLOUT)
        readline.add_history("mine")
        readline.set_completer(lambda *_: None)
        torch.utils.rename_privateuse1_backend("users_backend")
        remove_parametrizations(normed, "weight")

    report = DrySession(has_bar=False, is_lasting=False).run(run, [names])
    os.write(ends[1], b"x")
    assert polled.poll(0) == [(ends[0], select.EPOLLIN)]
    assert (readline.get_current_history_length(), readline.get_completer(), normed.weight.tolist()) == before
    assert any("rename_privateuse1_backend" in one.text and one.line is not None for one in report.assumptions)
    polled.close(), os.close(ends[0]), os.close(ends[1])


def test_what_names_lead_to_is_put_back_however_much_modules_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A project's tables do not use up the number of objects that are looked at."""
    monkeypatch.setattr(sys.modules[__name__], "large", [[[] for _ in range(500)] for _ in range(100)], raising=False)
    deep: dict[str, Any] = {"a": {"b": {"c": {"d": {"e": {"f": [1]}}}}}}
    run = deep["a"]["b"]["c"]["d"]["e"]["f"].append
    DrySession(has_bar=False, is_lasting=False).run(lambda: run(2), [{"deep": deep}])
    assert deep == {"a": {"b": {"c": {"d": {"e": {"f": [1]}}}}}}


def test_hooks_of_tensors_are_called_and_stay() -> None:
    """C++ keeps them with a tensor's data, Python with the object: one without the other never fires again."""
    called: list[str] = []
    ours, bare = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    ours.register_hook(lambda _: called.append("gradient"))
    handle = ours.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))

    def run() -> None:
        (ours * 2).sum().backward()
        (bare * 2).sum().backward()
        handle.remove()
        for tensor in (ours, bare):
            tensor.register_hook(lambda _: called.append("the run's"))
            tensor.register_post_accumulate_grad_hook(lambda _: called.append("the run's"))

    DrySession(has_bar=False, is_lasting=False).run(run, [{"ours": ours, "bare": bare}])
    assert called == ["gradient", "accumulated"]
    bare.register_hook(lambda _: called.append("later"))
    bare.register_post_accumulate_grad_hook(lambda _: called.append("later too"))
    (ours * bare).sum().backward()
    assert sorted(called[2:]) == ["accumulated", "gradient", "later", "later too"]


def test_what_the_run_would_call_at_the_end_of_an_object_is_not_called(tmp_path: Path) -> None:
    held: dict[str, Any] = {"one": Meter()}
    (tmp_path / "mine").write_text("mine")
    kept: list[int] = noted.__defaults__[1]  # type: ignore[index]
    weakref.finalize(held["one"], noted, 1)

    def run() -> None:
        weakref.finalize(held["one"], os.remove, tmp_path / "mine")
        for function in (noted, functools.partial(noted), kept.append):
            weakref.finalize(held["one"], function, 2)

    DrySession(has_bar=False, is_lasting=False).run(run, [held])
    held.clear()
    gc.collect()
    assert kept.pop() == 1 and kept == [7] and (tmp_path / "mine").exists()


@pytest.mark.parametrize("beside", [False, True])
def test_lazy_modules_stay_lazy(beside: bool) -> None:
    """Also beside a tensor that stays real, with which what is written to is compared."""
    kept = torch.ones(2, requires_grad=True) * 2
    if beside:
        kept.retain_grad()
    model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d())
    weight = model[0].weight

    def run() -> None:
        model.cuda()(torch.ones(2, 3, device="cuda")).sum().backward()
        assert type(model[0]) is torch.nn.Linear and model[0].weight.is_cuda

    DrySession(has_bar=False, is_lasting=False).run(run, [{"model": model, "kept": kept}])
    assert type(model[0]) is torch.nn.LazyLinear and model[0].weight is weight
    assert model(torch.ones(2, 5)).shape == (2, 4) and model[0].weight.shape == (4, 5)


@functools.cache
def the_model() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def test_classes_that_name_no_module_do_no_harm() -> None:
    """Cython's function type has an attribute of its objects in place of a module's name."""
    kind = type("Cythons", (), {"__module__": property(str)})
    names = {"held": [kind(), 1]}
    DrySession(has_bar=False, is_lasting=False).run(lambda: names["held"].append(2), [names])
    assert names["held"][1:] == [1]


class Unbuilt(torch.nn.Module):
    """Assigns a module before ``Module.__init__``, and keeps itself; its lookup of what is missing never ends."""

    def __init__(self, kept: list[Any]) -> None:
        kept.append(self)
        self.__dict__["name"] = "unbuilt"
        self.layer = torch.nn.Linear(2, 2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class UnbuiltOptimizer(torch.optim.SGD):
    def __init__(self, kept: list[Any]) -> None:
        kept.append(self)
        raise ValueError


def test_modules_and_optimizers_that_were_never_built_do_no_harm() -> None:
    """A traceback, or a name, holds what a constructor that failed has left."""
    kept: list[Any] = []
    for kind in (Unbuilt, UnbuiltOptimizer):
        with pytest.raises((AttributeError, ValueError)):
            kind(kept)
    module, optimizer = kept
    names: dict[str, Any] = {"module": module, "optimizer": optimizer, "kept": kept, "torch": torch}

    def run() -> None:
        model = torch.nn.Linear(8, 8).cuda()
        own = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.ones(2, 8, device="cuda")).sum().backward()
            own.step()

    run_as_in_a_cell = types.FunctionType(run.__code__, names)
    assert dry_run(run_as_in_a_cell).timeline.num_steps() >= 2
    assert names["kept"] == [module, optimizer] and vars(module) == {"name": "unbuilt"}


def test_what_the_users_caches_hold_stays() -> None:
    """A model that only a cache holds would be gone with it."""
    limited, full, cleared = (functools.lru_cache(2)(lambda key, **_options: [key]) for _unused in range(3))
    typed = functools.lru_cache(3, typed=True)(lambda key, other=0, **_options: {1: {key: other}})
    whole = functools.lru_cache(None)(lambda key: [key])
    mine, first, kept = the_model(), limited(1), whole(1)
    cleared(1)
    held = [full(1), full(2, a=1), typed(1), typed(1.0, 2), typed(1, other=2, a=3)]

    def run() -> None:
        the_model().cuda()
        limited(1).append("inside")
        limited(2), full(2), full(3), full(4), [typed(key) for key in "abcd"]
        cleared.cache_clear(), whole.cache_clear(), whole(2)

    names = {"the_model": the_model, "held": [limited, full, cleared, whole, typed]}
    for _unused in range(2):
        DrySession(has_bar=False, is_lasting=False).run(run, [names])
    assert the_model() is mine and not mine.weight.is_meta
    assert limited(1) is first == [1] and limited.cache_info().currsize == 1
    assert whole(1) is kept and whole.cache_info().currsize == 1
    again = [full(1), full(2, a=1), typed(1), typed(1.0, 2), typed(1, other=2, a=3)]
    assert all(map(operator.is_, held, again)) and typed.cache_info().currsize == 3
    counted = [(one.cache_info().hits, one.cache_info().misses) for one in (limited, full, whole, typed)]
    assert counted == [(1, 1), (2, 2), (1, 1), (3, 3)]
    assert [one(key) for one in (full, cleared) for key in (1, 2, 3, 4, 1)] == [[1], [2], [3], [4], [1]] * 2


def test_the_farthest_of_very_many_objects_are_said_to_stay_changed() -> None:
    history: Any = {"loss": [[number] for number in range(6_000)]}
    nested: list[Any] = []
    for _unused in range(100):
        nested = [nested]
    names = {"history": history, "nested": nested, "near": {"a": {"b": {"c": [1]}}}}

    def run() -> None:
        history["loss"][-1].append(1)
        names["near"]["a"]["b"]["c"].append(2)
        inner = nested
        while inner:
            inner = inner[0]
        inner.append(1)

    report = DrySession(has_bar=False, is_lasting=False).run(run, [names])
    assert history["loss"][-1] == [5_999] and "[1]" not in str(nested) and names["near"]["a"]["b"]["c"] == [1]
    assert not any("more objects" in one.text for one in report.assumptions)
    history["loss"] = [[number] for number in range(150_000)]
    report = DrySession(has_bar=False, is_lasting=False).run(run, [names])
    assert names["near"]["a"]["b"]["c"] == [1] and any("more objects" in one.text for one in report.assumptions)


class _Unready:
    """As pydantic's stand-ins for validators that are not made yet: any attribute raises."""

    __slots__ = ("held",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name}: not ready")


def test_attributes_that_an_object_computes_are_not_asked_for() -> None:
    report = DrySession("T4", has_bar=False).run(lambda: torch.ones(1, device="cuda"), [{"unready": _Unready()}])
    assert report.peak_allocated_bytes == 512
