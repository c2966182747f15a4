"""A dry run beside real CUDA tensors: whatever ends it, they are where they were, and the device's state is as before."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import manual_seed, set_per_process_memory_fraction

from oom_magic.predict.isolation import exchanged_pair, snapshot, tensor_exchange
from oom_magic.predict.isolation.patching import Journal
from oom_magic.predict.isolation.process.process_state import other_random_numbers
from oom_magic.predict.session import DrySession
from oom_magic.units import MIB
from tests.support.faults import InjectedError, inject

pytestmark = pytest.mark.gpu


class Users:
    """A model that is being trained on the real device."""

    graph: Any
    outputs: Any
    stream: Any
    other: Any
    event: Any
    others_event: Any

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32)).cuda().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.inputs = torch.randn(8, 64, device="cuda")
        self.model(self.inputs).sum().backward()
        self.optimizer.step()
        self.names = {"users": self}

    def state(self) -> dict[str, Any]:
        """Where each tensor is, what host copies hold, the allocator and the generator."""
        held = [*self.model.parameters(), *self.model.buffers(), self.inputs]
        held += [one.grad for one in self.model.parameters() if one.grad is not None]
        held += [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            "tensors": [(id(one), one.data_ptr(), one.device, one.dtype, tuple(one.shape)) for one in held],
            "values": [one.detach().cpu().tolist() for one in held],
            "modes": [one.training for one in self.model.modules()],
            "allocated": torch.cuda.memory_allocated(),
            "random": torch.cuda.get_rng_state().tolist(),
            "device": (torch.cuda.current_device(), torch.cuda.is_initialized(), torch.cuda.device_count()),
            "group": {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"},
        }

    def train(self) -> None:
        """Changes all of it."""
        self.model.eval().cpu().cuda()
        self.optimizer.param_groups[0]["lr"] = 1.0
        torch.manual_seed(5)
        for _ in range(3):
            self.model(self.inputs).sum().backward()
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.inputs = None  # type: ignore[assignment]


def run(users: Users) -> None:
    DrySession(has_bar=False, is_lasting=False).run(users.train, [users.names])


def test_what_a_run_does_with_the_card_reaches_the_pretend_one() -> None:
    """Streams, events and graphs from before, those of any accelerator, and settings of the device."""
    users, memory, accelerator = Users(), torch.cuda.memory, torch.accelerator
    users.graph, users.outputs = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    users.stream, users.other = torch.cuda.Stream(), torch.Stream(device="cuda")
    users.event, users.others_event = torch.cuda.Event(), torch.Event(device="cuda")
    users.event.record(users.stream), users.others_event.record()
    with torch.cuda.graph(users.graph):
        users.outputs += 1

    def device() -> Any:
        return memory.memory_stats(), users.state(), users.graph.pool(), torch.cuda.current_stream(), _settings()

    def work() -> None:
        users.graph.replay(), users.graph.reset(), users.graph.enable_debug_mode()
        for stream in (users.stream, users.other, torch.Stream(device="cuda")):
            assert isinstance(stream, torch.Stream) and isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
            stream.wait_stream(torch.cuda.current_stream()), stream.wait_event(users.others_event)
            with stream:
                assert torch.cuda.current_stream().stream_id == stream.stream_id
            accelerator.set_stream(stream)
        users.others_event.record(users.stream), users.event.record(users.other), torch.Event(device="cuda").record()
        torch.cuda._set_stream_by_id(users.stream.stream_id, 0, 1)
        set_per_process_memory_fraction(0.25), manual_seed(3), memory._record_memory_history()
        memory.reset_accumulated_memory_stats(), accelerator.reset_accumulated_memory_stats()
        (
            memory.empty_cache(),
            getattr(accelerator, "empty_host_cache", int)(),
            torch.cuda.set_per_process_memory_fraction(0.5),
        )

    gc.collect()
    before = device()
    DrySession(has_bar=False, is_lasting=False).run(work, [users.names])
    assert device() == before
    users.graph.replay()


def test_the_pool_of_a_graph_from_before_is_counted() -> None:
    """What is free in it is reserved for the graph alone; its workspaces are allocated."""
    gc.collect()  # a graph that is gone takes the workspaces of its stream along
    net = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    inputs, graph = torch.randn(2048, 1024, device="cuda"), torch.cuda.CUDAGraph()

    def train() -> None:
        for _ in range(3):
            net(inputs).sum().backward()
            net.zero_grad()

    train()
    with torch.cuda.graph(graph):
        net(inputs).sum().backward()
    net.zero_grad()
    session = DrySession(torch.cuda.get_device_name(), has_bar=False)
    for _ in range(2):  # the second starts from what is there already
        report = session.run(train, [{"net": net, "inputs": inputs}])
        assert any("private pools" in one.text for one in report.assumptions)
    torch.cuda.empty_cache(), torch.cuda.reset_peak_memory_stats()
    train()
    assert report.peak_allocated_bytes == pytest.approx(torch.cuda.max_memory_allocated(), abs=4096)
    assert 0 <= report.peak_reserved_bytes - torch.cuda.max_memory_reserved() <= 20 * MIB
    del graph


@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_from_before_are_free_once_they_are_dropped(keeps: bool) -> None:
    """A cell that sets them to zero first begins with those of the cell before it."""
    net, inputs = nn.Sequential(nn.Linear(2048, 4096), nn.Linear(4096, 2048)).cuda(), torch.randn(64, 2048).cuda()
    net(inputs).sum().backward()
    kept = [weight.grad for weight in net.parameters()] if keeps else []

    def train() -> None:
        for _ in range(3):
            loss = net(inputs).sum()
            net.zero_grad()
            loss.backward()

    report = DrySession(torch.cuda.get_device_name(), has_bar=False).run(
        train, [{"net": net, "inputs": inputs, "kept": kept}]
    )
    torch.cuda.reset_peak_memory_stats()
    train()
    assert report.peak_allocated_bytes == torch.cuda.max_memory_allocated()


def _settings() -> Any:
    return torch.cuda.get_per_process_memory_fraction(), torch._C._cuda_isHistoryEnabled(), torch.cuda.current_device()


def test_a_stream_that_python_does_not_know_is_left_for_the_users() -> None:
    before = torch.cuda.current_stream()
    hidden = torch.Stream(device="cuda").__enter__
    DrySession(has_bar=False).run(hidden)
    assert torch.cuda.current_stream() == before


def test_random_numbers_for_sizes_are_not_the_cards() -> None:
    before = torch.cuda.get_rng_state()
    with other_random_numbers():
        pass
    assert torch.equal(torch.cuda.get_rng_state(), before)


_STEPS: list[tuple[Any, str]] = [
    (torch._C, "_swap_tensor_impl"),
    (Journal, "record"),
    (snapshot.Snapshot, "restore"),
    (tensor_exchange.FakeCopies, "make"),
    (exchanged_pair.ExchangedPair, "swap_back"),
    (torch.cuda, "synchronize"),
]


def test_a_dry_run_leaves_the_device_as_it_was() -> None:
    users = Users()
    run(users)
    before = users.state()
    run(users)
    assert users.state() == before
    users.model(users.inputs).sum().backward()
    users.optimizer.step()


@pytest.mark.parametrize("error", [InjectedError, KeyboardInterrupt])
@pytest.mark.parametrize(("owner", "name"), _STEPS, ids=lambda step: step if isinstance(step, str) else "")
def test_a_fault_at_any_step_leaves_it_so_too(
    owner: Any, name: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    users = Users()
    run(users)
    before = users.state()
    faults = inject(monkeypatch, owner, name, error)
    run(users)
    total = faults.calls
    for call in sorted({1, total // 2, total} - {0}):
        faults.begin(call)
        with contextlib.suppress(error):
            run(users)
        assert users.state() == before


def test_an_error_of_the_users_code_leaves_it_so_too() -> None:
    users = Users()
    before = users.state()

    def fails() -> None:
        users.train()
        raise InjectedError

    with pytest.raises(InjectedError):
        DrySession(has_bar=False, is_lasting=False, stop_after_steps=None).run(fails, [users.names])
    assert users.state() == before


def test_real_weights_that_pytorch_watches_are_refused_by_name() -> None:
    users = Users()
    watches = torch._C._WeakTensorRef(users.model[0].weight)  # type: ignore[attr-defined]
    before = users.state()
    inputs = torch.randn(8, 64)
    with pytest.raises(
        RuntimeError, match=r"model\.0\.weight is the real tensor, because PyTorch holds a weak reference"
    ):
        DrySession(has_bar=False).run(lambda: users.model(inputs.cuda()), [{"model": users.model, **users.names}])
    assert users.state() == before and not watches.expired()
