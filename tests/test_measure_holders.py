"""Which names hold memory, and what release lets go, with CPU tensors in the place of CUDA ones."""

from __future__ import annotations

import gc
import sys
import traceback
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

import oom_magic as om
from oom_magic.measure import holders, ownership
from oom_magic.measure import release as releasing
from oom_magic.measure.holders import holders_in, storages_in
from oom_magic.measure.ownership import Owners, find_owners, gradient_owners, workspace_sizes
from oom_magic.memory.categories import Category

HERE: Any = None  # the device index of CPU tensors


@pytest.fixture(autouse=True)
def _cpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(tensor: torch.Tensor) -> int:
        return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()

    for module in (holders, ownership):
        monkeypatch.setattr(module, "storage_address", address)


@dataclass
class Thing:
    inside: Any


def test_names_hold_what_they_reach() -> None:
    tensor = torch.zeros(1000)
    loop: list[Any] = [torch.zeros(10)]
    loop.append(loop)
    names = {
        "tensor": tensor,
        "view": tensor[:10],
        "nested": {"a": [(Thing(torch.zeros(500)),)]},
        "loop": loop,
        "number": 3,
        "_hidden": torch.zeros(9999),
        "Out": {4: torch.zeros(20)},
    }
    found = {holder.name: holder.num_bytes for holder in holders_in(names, HERE)}
    assert found == {"tensor": 4000, "view": 4000, "nested": 2000, "Out[4]": 80, "loop": 40}


def test_modules_and_optimizers_are_reached() -> None:
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert sum(storages_in(model, HERE).values()) == 800
    assert sum(storages_in(optimizer, HERE).values()) == 4 * 400 + 4


def test_the_notebooks_own_objects_hold_nothing(shell: InteractiveShell) -> None:
    shell.user_ns["mine"] = torch.zeros(10)
    assert [holder.name for holder in holders_in(shell.user_ns, HERE)] == ["mine"]


def test_only_what_is_asked_for() -> None:
    first, second = torch.zeros(10), torch.zeros(20)
    among = {first.untyped_storage().data_ptr()}
    assert holders_in({"both": [first, second]}, HERE, among=among)[0].num_bytes == 40


def test_owners_by_identity() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.ones(4, 10)
    output = model(batch)
    output.sum().backward()
    optimizer.step()

    def owner(tensor: torch.Tensor) -> tuple[Category, str] | None:
        return owners.by_address.get(tensor.untyped_storage().data_ptr())

    owners = find_owners()
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    assert weight.grad is not None
    assert owner(weight) == (Category.PARAMETER, "0")
    assert owner(weight.grad) == (Category.GRADIENT, "0")
    assert owner(optimizer.state[weight]["exp_avg"]) == (Category.OPTIMIZER_STATE, "0")
    assert owner(model[1].running_mean) == (Category.PARAMETER, "1")  # type: ignore[arg-type]
    assert owner(batch) == (Category.INPUT, "")
    assert owner(output) == (Category.ACTIVATION, "")
    assert owners.has_graph
    assert gradient_owners(optimizer, owners).by_address.items() <= owners.by_address.items()
    assert gradient_owners(optimizer, Owners()).by_address


def test_looking_keeps_nothing_alive() -> None:
    model = nn.Linear(4, 4)
    ghost = weakref.ref(model.weight)
    find_owners()
    del model
    gc.collect()
    assert ghost() is None


def test_a_proxy_is_not_asked() -> None:
    class Proxy:
        @property
        def __class__(self) -> Any:
            raise AssertionError("asked")

    proxy = Proxy()
    find_owners()
    del proxy


@pytest.mark.parametrize(
    ("capability", "setting", "expected"),
    [
        ((8, 6), "", {8320 * 1024}),
        ((9, 0), "", {2**25}),
        ((8, 6), ":4096:8", {8320 * 1024, 2**25}),
        ((8, 6), ":16:8:4096:2", {8320 * 1024}),
        ((8, 6), "nonsense", {8320 * 1024}),
    ],
)
def test_workspaces(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], setting: str, expected: set[int]
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", setting)
    assert workspace_sizes(capability) == expected


def test_release_empties_failed_frames_and_cached_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releasing, "storages_in", lambda value, _: storages_in(value, HERE))
    monkeypatch.setattr(releasing, "holders_in", lambda names, _: holders_in(names, HERE))
    shown = torch.zeros(30)
    names: dict[str, Any] = {"mine": torch.zeros(10), "Out": {1: "text", 2: shown}, "_2": shown, "_": shown}
    ghosts = [weakref.ref(shown)]
    del shown

    def fail() -> None:
        held = torch.zeros(100)
        ghosts.append(weakref.ref(held))
        raise ValueError(f"{held.shape}")

    def handle() -> None:
        try:
            fail()
        except ValueError as error:
            raise KeyError("second") from error

    try:
        handle()
    except KeyError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        monkeypatch.setattr(sys, "last_exc", error, raising=False)
        monkeypatch.setattr(sys, "last_traceback", error.__traceback__, raising=False)
        for frame, _ in traceback.walk_tb(error.__cause__.__traceback__):
            assert frame.f_locals is not None  # as IPython does to show values
    released = om.release(names)
    assert [ghost() for ghost in ghosts] == [None, None]
    assert names["Out"] == {1: "text"}
    assert "_2" not in names
    assert names["mine"].sum() == 0
    assert [holder.name for holder in released.holders] == ["mine"]
    assert "Out[2]" in released.actions[1]
    assert "mine" in str(released)
    assert released.to_dict()["freed_allocated_bytes"] == 0


def test_release_with_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("last_value", "last_exc", "last_traceback"):
        monkeypatch.delattr(sys, name, raising=False)
    released = om.release({})
    assert released.holders == released.actions == ()
