"""Methods of training as papers describe them, by PyTorch alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.programs.device_programs.architectures import Block
from tests.programs.device_programs.table import CUDA, OnStep, mlp, program, train

# Learning by comparing


@program
def contrastive(on_step: OnStep) -> None:
    """SimCLR's loss over two views of 2048 examples."""
    net = mlp(1024, 2048, 2048, 128)

    def loss() -> torch.Tensor:
        x = torch.randn(2048, 1024, device=CUDA)
        views = F.normalize(torch.cat([net(x + 0.1 * torch.randn_like(x)), net(x)]), dim=-1)
        scores = views @ views.T / 0.1
        scores = scores.masked_fill(torch.eye(4096, dtype=torch.bool, device=CUDA), float("-inf"))
        return F.cross_entropy(scores, torch.arange(4096, device=CUDA).roll(2048))

    train(net, on_step, loss)


@program
def triplets(on_step: OnStep) -> None:
    """The hardest positive and negative by all distances in a batch."""
    net = mlp(512, 1024, 128)

    def loss() -> torch.Tensor:
        points = F.normalize(net(torch.randn(1024, 512, device=CUDA)), dim=-1)
        labels = torch.randint(64, (1024,), device=CUDA)
        distances = torch.cdist(points, points)
        same = labels[:, None] == labels
        farthest = (distances * same).amax(1)
        nearest = (distances + 1e3 * same).amin(1)
        return F.relu(farthest - nearest + 0.2).mean()

    train(net, on_step, loss)


@program
def teacher(on_step: OnStep) -> None:
    """DINO: eight crops, an average of the student as the teacher, a centre that moves."""
    student = nn.Sequential(mlp(768, 2048, 2048, 256, activation=nn.GELU), nn.Linear(256, 8192, bias=False)).to(CUDA)
    elder, centre = copy.deepcopy(student).requires_grad_(False), torch.zeros(8192, device=CUDA)
    optimizer = torch.optim.AdamW(student.parameters())
    for _ in range(4):
        crops = [torch.randn(128, 768, device=CUDA) for _ in range(8)]
        with torch.no_grad():
            told = [elder(crop) for crop in crops[:2]]
            targets = [((one - centre) / 0.04).softmax(-1) for one in told]
        made = [F.log_softmax(student(crop) / 0.1, -1) for crop in crops]
        loss = torch.stack(
            [-(t * m).sum(-1).mean() for i, t in enumerate(targets) for j, m in enumerate(made) if i != j]
        )
        loss.mean().backward()
        nn.utils.clip_grad_norm_(student.parameters(), 3.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for old, new in zip(elder.parameters(), student.parameters(), strict=True):
                old.mul_(0.996).add_(new, alpha=0.004)
            centre.mul_(0.9).add_(torch.cat(told).mean(0), alpha=0.1)
        on_step()


# Reinforcement learning


@program
def deep_q(on_step: OnStep) -> None:
    """A replay buffer on the GPU, double Q-learning and a target network."""
    net = mlp(128, 1024, 1024, 18)
    target = copy.deepcopy(net)
    states = torch.randn(100_000, 128, device=CUDA)
    actions, rewards = torch.randint(18, (100_000,), device=CUDA), torch.randn(100_000, device=CUDA)

    def loss() -> torch.Tensor:
        chosen = torch.randint(99_999, (4096,), device=CUDA)
        with torch.no_grad():
            best = net(states[chosen + 1]).argmax(-1, keepdim=True)
            told = rewards[chosen] + 0.99 * target(states[chosen + 1]).gather(1, best).squeeze(1)
        return F.smooth_l1_loss(net(states[chosen]).gather(1, actions[chosen, None]).squeeze(1), told)

    train(net, on_step, loss)
    target.load_state_dict(net.state_dict())
    on_step()


@program
def proximal_policy(on_step: OnStep) -> None:
    """PPO: a rollout of 128 steps, advantages backwards in time, clipped updates in shuffled parts."""
    policy, value = mlp(64, 512, 512, 6, activation=nn.Tanh), mlp(64, 512, 512, 1, activation=nn.Tanh)
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], eps=1e-5)
    seen, did, logs, worth = [], [], [], []
    with torch.no_grad():
        for _ in range(128):
            state = torch.randn(64, 64, device=CUDA)
            choice = torch.distributions.Categorical(logits=policy(state))
            action = choice.sample()
            (
                seen.append(state),
                did.append(action),
                logs.append(choice.log_prob(action)),
                worth.append(value(state)[:, 0]),
            )
    rewards, running = torch.randn(128, 64, device=CUDA), torch.zeros(64, device=CUDA)
    gains = torch.zeros_like(rewards)
    for step in reversed(range(127)):
        running = rewards[step] + 0.99 * worth[step + 1] - worth[step] + 0.95 * 0.99 * running
        gains[step] = running
    state, action, log, gain = torch.cat(seen), torch.cat(did), torch.cat(logs), gains.flatten()
    for _ in range(2):
        for part in torch.randperm(8192, device=CUDA).chunk(4):
            choice = torch.distributions.Categorical(logits=policy(state[part]))
            ratio = (choice.log_prob(action[part]) - log[part]).exp()
            clipped = torch.min(ratio * gain[part], ratio.clamp(0.8, 1.2) * gain[part])
            loss = -clipped.mean() + value(state[part]).pow(2).mean() - 0.01 * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
        on_step()


# Derivatives and optimizers


@program
def physics(on_step: OnStep) -> None:
    """A physics-informed network: its Laplacian in the loss, LBFGS."""
    net = mlp(2, 128, 128, 128, 1, activation=nn.Tanh)
    points = torch.rand(20_000, 2, device=CUDA, requires_grad=True)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4, history_size=5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        (slope,) = torch.autograd.grad(net(points).sum(), points, create_graph=True)
        curves = [torch.autograd.grad(slope[:, i].sum(), points, create_graph=True)[0][:, i] for i in range(2)]
        loss = (curves[0] + curves[1] + 1).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        on_step()


@program
def per_example(on_step: OnStep) -> None:
    """Gradients of each example by torch.func, clipped and noised (DP-SGD)."""
    net = mlp(256, 512, 10)
    weights = {name: one.detach() for name, one in net.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(net, weights, (x[None],)), y[None])

    every = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    for _ in range(3):
        found = every(weights, torch.randn(256, 256, device=CUDA), torch.randint(10, (256,), device=CUDA))
        norms = torch.stack([one.flatten(1).norm(dim=1) for one in found.values()]).norm(dim=0)
        scale = (1 / (norms + 1e-6)).clamp(max=1)
        for name, one in found.items():
            mean = torch.einsum("b...,b->...", one, scale) / 256
            weights[name] = weights[name] - 0.1 * (mean + 0.01 * torch.randn_like(mean))
        on_step()


@program
def conflicting_tasks(on_step: OnStep) -> None:
    """PCGrad: the gradient of each task is projected away from the others'."""
    trunk, heads = mlp(1024, 2048, 1024), [nn.Linear(1024, 10).to(CUDA) for _ in range(3)]
    shared, optimizer = list(trunk.parameters()), torch.optim.SGD(trunk.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        features = trunk(torch.randn(2048, 1024, device=CUDA))
        losses = [F.cross_entropy(head(features), torch.randint(10, (2048,), device=CUDA)) for head in heads]
        slopes = [
            torch.cat([g.flatten() for g in torch.autograd.grad(one, shared, retain_graph=True)]) for one in losses
        ]
        mixed = [one.clone() for one in slopes]
        for one in mixed:
            for other in slopes:
                product = torch.dot(one, other)
                one.sub_(torch.clamp(product, max=0) / other.dot(other) * other)
        total, start = torch.stack(mixed).mean(0), 0
        for one in shared:
            one.grad = total[start : start + one.numel()].view_as(one).clone()
            start += one.numel()
        optimizer.step()
        on_step()


@program
def orthogonal_updates(on_step: OnStep) -> None:
    """Muon: momentum made orthogonal by Newton-Schulz iterations in bfloat16."""
    net = nn.Sequential(*(Block(512, 8) for _ in range(4))).to(CUDA)
    matrices = [one for one in net.parameters() if one.ndim == 2]
    momenta = [torch.zeros_like(one) for one in matrices]
    rest = torch.optim.AdamW([one for one in net.parameters() if one.ndim < 2])
    for _ in range(3):
        net(torch.randn(8, 512, 512, device=CUDA)).pow(2).mean().backward()
        with torch.no_grad():
            for one, momentum in zip(matrices, momenta, strict=True):
                assert one.grad is not None
                momentum.mul_(0.95).add_(one.grad)
                x = momentum.bfloat16() / (momentum.norm() + 1e-7)
                x = x.T if one.size(0) > one.size(1) else x
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
                one.add_(x.T if one.size(0) > one.size(1) else x, alpha=-0.02)
        rest.step()
        net.zero_grad()
        on_step()


@program
def optimizers(on_step: OnStep) -> None:
    """Optimizers of torch with their options, one after another."""
    options: dict[str, dict[str, Any]] = {
        "Adam": {"amsgrad": True, "foreach": False},
        "AdamW": {"capturable": True},
        "NAdam": {},
        "RAdam": {},
        "Adagrad": {},
        "Adadelta": {},
        "RMSprop": {"momentum": 0.9, "centered": True},
        "Rprop": {},
        "ASGD": {},
        "Adafactor": {},
    }
    for name, how in options.items():
        net = mlp(1024, 4096, 1024)
        optimizer = getattr(torch.optim, name)(net.parameters(), lr=1e-3, **how)
        for _ in range(2):
            net(torch.randn(512, 1024, device=CUDA)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        on_step()


@program
def equilibrium(on_step: OnStep) -> None:
    """A deep equilibrium model: its fixed point has no graph, its gradient is solved for in a hook."""
    cell, embed = mlp(1024, 2048, 512, activation=nn.Tanh), nn.Linear(512, 512).to(CUDA)

    def loss() -> torch.Tensor:
        x = embed(torch.randn(4096, 512, device=CUDA))
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(12):
                z = cell(torch.cat([z, x], -1))
        z = cell(torch.cat([z, x], -1))
        start = z.detach().clone().requires_grad_()
        again = cell(torch.cat([start, x], -1))

        def solve(grad: torch.Tensor) -> torch.Tensor:
            found = grad
            for _ in range(6):
                found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + grad
            return found

        z.register_hook(solve)
        return z.pow(2).mean()

    train(nn.ModuleList([cell, embed]), on_step, loss)


@program
def ordered_losses(on_step: OnStep) -> None:
    """Quantiles, medians and sorted differences of what a network made."""
    net = mlp(256, 1024, 64)

    def loss() -> torch.Tensor:
        made = net(torch.randn(16_384, 256, device=CUDA))
        sliced = (made.sort(0).values - torch.randn(16_384, 64, device=CUDA).sort(0).values).abs().mean()
        spread = torch.quantile(made[:4096], torch.tensor([0.1, 0.9], device=CUDA), dim=0).sum()
        return (
            sliced + spread + made.median(0).values.sum() + made.kthvalue(100, 0).values.sum() + made.logsumexp(0).sum()
        )

    train(net, on_step, loss)
