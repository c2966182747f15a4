"""Which names hold memory, with CPU tensors in the place of CUDA ones."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from oom_magic.explain.remedies.room import find_in_the_way
from oom_magic.measure.history import attribution as ownership
from oom_magic.measure.history.attribution import Owners, find_owners, gradient_owners, storage_of
from oom_magic.measure.holders.inventory import holders_in
from oom_magic.measure.holders.reach import reach
from oom_magic.memory.categories import Category


@pytest.fixture(autouse=True)
def _cpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(tensor: torch.Tensor) -> int:
        # Such as a compiler, or the table of cases of a test, keeps alive.
        has_none = tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided
        return 0 if has_none else tensor.untyped_storage().data_ptr()

    monkeypatch.setattr(ownership, "storage_address", address)


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
        "_own": torch.zeros(5),
        "_": torch.zeros(9999),
        "_i3": torch.zeros(9999),
        "Out": {4: torch.zeros(20)},
    }
    found = {holder.name: holder.num_bytes for holder in holders_in(names, storage_of)}
    assert found == {"tensor": 4000, "view": 4000, "nested": 2000, "Out[4]": 80, "loop": 40, "_own": 20}


def test_modules_and_optimizers_are_reached() -> None:
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    reached = reach([model], storage_of)
    assert [sum(part.values()) for part in (reached.own, reached.gradients)] == [400, 400]
    assert sum(reach([optimizer], storage_of).everything().values()) == 4 * 400 + 4


def test_the_notebooks_own_objects_hold_nothing(shell: InteractiveShell) -> None:
    shell.user_ns["mine"] = torch.zeros(10)
    assert [holder.name for holder in holders_in(shell.user_ns, storage_of)] == ["mine"]


def test_only_what_is_asked_for() -> None:
    first, second = torch.zeros(10), torch.zeros(20)
    among = {first.untyped_storage().data_ptr()}
    assert holders_in({"both": [first, second]}, storage_of, among=among)[0].num_bytes == 40


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
    asked: list[object] = []

    class Proxy:
        @property
        def __class__(self) -> Any:
            asked.append(self)
            return Proxy

    proxy = Proxy()
    find_owners()
    assert not asked
    del proxy


def test_nodes_that_a_backward_has_emptied_are_passed_over():
    weight = torch.ones(4, 4, requires_grad=True)
    rows = weight[torch.tensor([0, 2])].exp()
    rows.sum().backward()
    found = reach([rows], lambda tensor: (tensor.data_ptr(), tensor.nbytes)).everything()
    assert {rows.data_ptr(), weight.data_ptr()} <= set(found)


def test_a_small_model_goes_with_the_optimizer_that_holds_more() -> None:
    """Deleting the larger name alone would leave the weights."""
    small, net = nn.Linear(64, 64), nn.Linear(8, 8)
    optimizer = torch.optim.Adam(small.parameters())
    small(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    names = {"small": small, "optimizer": optimizer, "net": net, "x": torch.ones(4)}
    held = 4 * (64 * 64 + 64)
    found = find_in_the_way(names, {"net"}, storage_of, room_bytes=30 * held)  # its states are 1/15, its weights 1/30
    assert found is not None and found.names == ("optimizer", "small")
    assert 3 * held <= found.num_bytes < 3 * held + 64
    assert find_in_the_way(names, {"net"}, storage_of, room_bytes=60 * held).names == ("optimizer", "small")  # type: ignore[union-attr]
    assert find_in_the_way(names, {"net", "small"}, storage_of, room_bytes=30 * held).names == ("optimizer",)  # type: ignore[union-attr]
