"""Programs with a loop in which something grows, or only seems to; each runs out of memory on a small card."""

from __future__ import annotations

import collections
import copy
import random

import torch
from torch import nn


def network(width=1024, depth=4):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))).cuda()


def keeps_losses():
    model, losses = network(), []
    while True:
        losses.append(model(torch.zeros(2048, 1024, device="cuda")).sum())


def collects_and_joins():
    model, kept = network().eval(), []
    with torch.no_grad():
        for _ in range(40):
            kept.append(model(torch.zeros(2048, 1024, device="cuda")))  # noqa: PERF401
    return torch.cat(kept).softmax(-1)


def joins_two_and_compares_them():
    model, guessed, known = network().eval(), [], []
    with torch.no_grad():
        for _ in range(32):
            targets = torch.zeros(2048, 1024, dtype=torch.int16, device="cuda")
            guessed.append(model(targets.float()))
            known.append(targets)
    guessed = torch.cat(guessed)
    return (guessed == torch.cat(known)).float().mean()


def joins_what_a_hook_kept():
    model, kept = network().eval(), {}

    def keep(module, args, output):
        kept.setdefault("out", []).append(output)

    model.register_forward_hook(keep)
    with torch.no_grad():
        for _ in range(40):
            model(torch.zeros(2048, 1024, device="cuda"))
    return {name: torch.cat(parts) for name, parts in kept.items()}


def collects_at_once():
    model = network().eval()
    with torch.no_grad():
        return torch.cat([model(torch.zeros(2048, 1024, device="cuda")).relu() for _ in range(40)])


def averages_losses_of_parts():
    model = network()
    loss = sum([model(torch.zeros(2048, 1024, device="cuda")).mean() for _ in range(40)])
    loss.backward()


def collects_numbers():
    model = network()
    return [model(torch.zeros(16384, 1024, device="cuda")).mean().item() for _ in range(40)]


def compares_what_it_joined():
    model, kept = network().eval(), []
    with torch.no_grad():
        for _ in range(20):
            kept.append(model(torch.zeros(256, 1024, device="cuda")))  # noqa: PERF401
        joined = torch.cat(kept)
        return torch.cdist(joined[:, None].expand(-1, 8, -1).reshape(-1, 1024), joined)


def stacks_losses():
    model, losses = network().eval(), []
    for _ in range(1000):
        loss = model(torch.zeros(2048, 1024, device="cuda")).sum()
        losses.append(loss)
    return torch.exp(torch.stack(losses).mean())


def asks_its_sum():
    model, total = network().eval(), 0
    for _ in range(1000):
        total += model(torch.zeros(2048, 1024, device="cuda")).sum()
    return total.item() / 1000


def asks_each_loss():
    model, losses = network().eval(), []
    for _ in range(1000):
        losses.append(model(torch.zeros(2048, 1024, device="cuda")).sum())  # noqa: PERF401
    return max(loss.item() for loss in losses)


def validate(batch_size=2048):
    model, losses = network().eval(), []
    while True:
        losses.append(model(torch.zeros(batch_size, 1024, device="cuda")).sum())


def validates_too_much_at_once():
    validate(batch_size=8192)


def keeps_outputs_over_steps():
    model, kept = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        outputs = model(torch.zeros(8192, 1024, device="cuda"))
        kept.append(outputs.detach())
        outputs.sum().backward()
        optimizer.step()


def accumulates():
    model = network()
    for _ in range(8):
        model(torch.zeros(2048, 1024, device="cuda")).sum().backward()
    model(torch.zeros(16384, 1024, device="cuda")).sum().backward()


def only_weights():
    return network(depth=40)


def adam():
    model = network(depth=20)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(8, 1024, device="cuda")).sum().backward()
    optimizer.step()


def sums_losses():
    model, total = network(), 0
    while True:
        total += model(torch.zeros(2048, 1024, device="cuda")).sum()


def sums_before_a_backward():
    model, total = network(), 0
    for step in range(100):
        loss = model(torch.zeros(2048, 1024, device="cuda")).sum()
        total = total + loss
        if step == 64:
            total.backward()


def keeps_tensors():
    history = {}
    for step in range(1000):
        history[step] = torch.empty(16, 1024, 1024, device="cuda")


def keeps_weights():
    model, best = network(), []
    while True:
        best.append({key: value.clone() for key, value in model.state_dict().items()})


def keeps_copies_of_weights():
    model, best = network(), []
    while True:
        best.append(copy.deepcopy(model.state_dict()))


def keeps_a_replay_buffer():
    model, buffer = network(), []
    while True:
        states = torch.rand(2048, 1024, device="cuda")
        values = model(states)
        buffer.append((states, values, 0.5))


class Probe:
    """What a module holds, as its hook does, that is none of its weights."""

    def __init__(self, model):
        self.kept = []
        model.register_forward_hook(self.keep)

    def keep(self, module, inputs, output):
        self.kept.append(output.detach())


def keeps_by_a_hook():
    model = network()
    Probe(model)
    while True:
        model(torch.zeros(8192, 1024, device="cuda"))


def keeps_until_its_hook_is_removed():
    model, kept = network(), []

    def keep(_module, _inputs, output):
        kept.append(output)

    handle = model.register_forward_hook(keep)
    try:
        while True:
            model(torch.zeros(8192, 1024, device="cuda"))
    finally:
        handle.remove()


def samples_with_its_graph():
    model, x = network(), torch.zeros(8192, 1024, device="cuda")
    for _ in range(100):
        x = x - 0.1 * model(x)


class Residual(nn.Module):
    """Blocks in a loop of its forward, each added to what the forward was given."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(40))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def adds_blocks_to_its_argument():
    model = Residual().cuda()
    while True:
        model(torch.rand(2048, 1024, device="cuda")).sum().backward()


Transition = collections.namedtuple("Transition", "state next_state")


def keeps_transitions():
    buffer, state = collections.deque(maxlen=10_000), torch.zeros(2048, 1024, device="cuda")
    while True:
        following = state + 1
        buffer.append(Transition(state, following))
        state = following


def keeps_metrics():
    model, metrics = network(), {"loss": [], "last": None, "outputs": []}
    while True:
        output = model(torch.zeros(2048, 1024, device="cuda"))
        metrics["loss"].append(0.5)
        metrics["last"] = output
        metrics["outputs"].append(output)


def keeps_maps():
    maps = []
    while True:
        both = tuple(torch.empty(16, 1024, 1024, device="cuda") for _ in range(2))
        maps.append(both)


def keeps_results():
    model, results = network(), []
    while True:
        result = {"output": model(torch.zeros(2048, 1024, device="cuda")), "number": 1}
        results.append(result)


def keeps_rows():
    model, rows = network(), []
    while True:
        rows.append({"output": model(torch.zeros(2048, 1024, device="cuda")), "number": 1})


def extends():
    model, kept = network(), []
    while True:
        kept.extend(model(torch.zeros(2048, 1024, device="cuda")).chunk(2))


def sums_by_name():
    model, totals = network(), {"number": 0, "loss": 0}
    while True:
        totals["number"] += 1
        totals["loss"] = totals["loss"] + model(torch.zeros(2048, 1024, device="cuda")).sum()


def trial():
    return network(depth=40), 0.5


def keeps_optimizers():
    results = {}
    for rate in range(1000):
        model = network(depth=40)
        optimizer = torch.optim.Adam(model.parameters())
        results[rate] = {"model": model, "optimizer": optimizer}


def keeps_trials():
    results = {}
    for rate in range(1000):
        model = network(depth=40)
        optimizer = torch.optim.Adam(model.parameters())
        loss = model(torch.zeros(512, 1024, device="cuda")).sum()
        results[rate] = (model, optimizer, loss)


def draws_from_a_queue():
    queue = collections.deque(maxlen=1000)
    while True:
        queue.append((torch.empty(16, 1024, 1024, device="cuda"), 0.5))
        torch.stack([one[0] for one in random.sample(queue, 1)])


def keeps_models():
    results = {}
    for rate in range(1000):
        results[rate] = trial()


def keeps_models_of_folds():
    """The second fold, with its optimizer, does not fit beside the first model and its gradients."""
    models = []
    for _ in range(5):
        model = network(depth=26)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.zeros(64, 1024, device="cuda")).sum().backward()
        optimizer.step()
        models.append(model)


def keeps_runs():
    runs = []
    for _ in range(1000):
        runs.append(run_of_a_dictionary())  # noqa: PERF401


def run_of_a_dictionary():
    model = network(depth=10)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
    return {"rate": 0.1, "model": model, "opt": optimizer}


def joins():
    cache = torch.empty(1, 1024, 1024, device="cuda")
    while True:
        cache = torch.cat([cache, torch.empty(8, 1024, 1024, device="cuda")])


def generates():
    cache = torch.empty(8, 1024, 1024, device="cuda")
    while True:
        following = torch.relu(cache[-8:])
        cache = torch.cat([cache, following])


def queues():
    """A queue that each step compares with, whose similarities take most: 4.5 of its own bytes in all."""
    net, queue = torch.nn.Linear(64, 64).cuda(), torch.zeros(1024, 64, device="cuda")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    while True:
        keys = net(torch.rand(1024, 64, device="cuda"))
        (keys @ queue.t()).logsumexp(1).mean().backward()
        optimizer.step()
        queue = torch.cat([queue, keys.detach()])


def keeps_numbers_and_host_tensors():
    model, losses, outputs = network(), [], []
    while len(losses) < 1000:
        output = model(torch.zeros(128 << len(losses), 1024, device="cuda"))
        outputs.append(output.detach().cpu())
        loss = output.sum()
        loss.backward()
        losses.append(loss)


def carries_a_state():
    model, state = nn.GRU(256, 1024).cuda(), None
    while True:
        out, state = model(torch.zeros(64, 64, 256, device="cuda"), state)
        out.sum().backward(retain_graph=True)


def carries_two():
    model, state = nn.LSTM(256, 1024).cuda(), None
    while True:
        out, state = model(torch.zeros(64, 64, 256, device="cuda"), state)
        out.sum().backward(retain_graph=True)


def repackage_hidden(hidden):
    return hidden.detach() if isinstance(hidden, torch.Tensor) else tuple(repackage_hidden(one) for one in hidden)


def goes_on_from_a_state():
    model, state = nn.GRU(256, 1024).cuda(), torch.zeros(1, 512, 1024, device="cuda")
    for turn in range(10):
        state = repackage_hidden(state)
        out, state = model(torch.zeros(8 * 2**turn, 512, 256, device="cuda"), state)
        torch.relu(out).sum().backward()


def recurs_within_a_turn():
    cell = nn.GRUCell(256, 1024).cuda()
    for turn in range(10):
        state = torch.zeros(2048, 1024, device="cuda")
        for _ in range(10 * 2**turn):
            state = cell(torch.zeros(2048, 256, device="cuda"), state)
        state.sum().backward()


def compares_all_states():
    cell = nn.GRUCell(256, 1024).cuda()
    for turn in range(10):
        state, states = torch.zeros(2048, 1024, device="cuda"), []
        for _ in range(10 * 2**turn):
            state = cell(torch.zeros(2048, 256, device="cuda"), state)
            states.append(state)
        loss = torch.stack(states).sum()
        loss.backward()


def sums_losses_of_a_recurrence():
    cell = nn.GRUCell(256, 1024).cuda()
    for turn in range(10):
        state, total = torch.zeros(2048, 1024, device="cuda"), 0
        for _ in range(10 * 2**turn):
            state = cell(torch.zeros(2048, 256, device="cuda"), state)
            total = total + state.sum()
        total = total / 10
        total.backward()


def loss_of_parts(model, num_parts):
    total = 0
    for _ in range(num_parts):
        total += model(torch.zeros(2048, 1024, device="cuda")).sum()
    return total


def sums_losses_of_parts():
    model = network()
    for turn in range(10):
        loss = loss_of_parts(model, 2**turn)
        (loss / 4).backward()


def collects_losses_of_a_step():
    model = network()
    losses = []
    for _ in range(1000):
        losses.append(model(torch.zeros(2048, 1024, device="cuda")).sum())  # noqa: PERF401
    torch.stack(losses).mean().backward()


def makes_losses_of_a_step():
    model = network()
    losses = [model(torch.zeros(2048, 1024, device="cuda")).sum() for _ in range(1000)]
    torch.stack(losses).mean().backward()
