"""Small training programs for "cuda", one for each optimizer and habit of training loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from tests.programs.operator_cases import Case

Loss = torch.Tensor


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 700), nn.LayerNorm(700), nn.ReLU(), nn.Linear(700, 10)).to("cuda")


def loss_of(net: nn.Module) -> Loss:
    inputs = torch.randn(32, 256, device="cuda")
    return F.cross_entropy(net(inputs), torch.zeros(32, dtype=torch.long, device="cuda"))


def training(
    make: Callable[[Any], Any],
    *,
    steps: int = 3,
    dtype: torch.dtype | None = None,
    set_to_none: bool = True,
    accumulate: int = 1,
    clip: Callable[[Any], Any] | None = None,
) -> Case:
    """Some steps of an optimizer."""

    def case() -> None:
        net = network().to(dtype)
        optimizer = make(net.parameters())
        for _ in range(steps):
            for _ in range(accumulate):
                inputs = torch.randn(32, 256, device="cuda", dtype=dtype)
                loss = F.cross_entropy(net(inputs), torch.zeros(32, dtype=torch.long, device="cuda"))
                loss.backward()
            if clip is not None:
                clip(net.parameters())
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    return case


def optimizer(name: str, **options: Any) -> Case:
    """Three steps of ``torch.optim``'s optimizer of this name."""
    return training(lambda parameters: getattr(torch.optim, name)(parameters, **{"lr": 0.01, **options}))


def muon() -> None:
    net = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 64, bias=False)).to("cuda")
    minimizer = torch.optim.Muon(net.parameters())
    for _ in range(2):
        net(torch.randn(32, 256, device="cuda")).sum().backward()
        minimizer.step()
        minimizer.zero_grad()


def sparse_adam() -> None:
    net = nn.Embedding(1000, 64, sparse=True).to("cuda")
    minimizer = torch.optim.SparseAdam(net.parameters())
    for _ in range(2):
        net(torch.zeros(32, dtype=torch.long, device="cuda")).sum().backward()
        minimizer.step()
        minimizer.zero_grad()


def groups() -> None:
    net = network()
    weights = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() <= 1]
    minimizer = torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0, "lr": 1e-4}])
    scheduler = lr_scheduler.CosineAnnealingLR(minimizer, 10)
    for _ in range(3):
        loss_of(net).backward()
        minimizer.step()
        scheduler.step()
        minimizer.zero_grad()


def frozen() -> None:
    net = network()
    net[0].requires_grad_(False)
    minimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        loss_of(net).backward()
        minimizer.step()
        minimizer.zero_grad()
    net[0].requires_grad_(True)
    loss_of(net).backward()
    minimizer.step()


def scaled() -> None:
    net = network()
    minimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_of(net)
        scaler.scale(loss).backward()
        scaler.unscale_(minimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(minimizer)
        scaler.update()
        minimizer.zero_grad()


def scaled_fused() -> None:
    net = network()
    minimizer = torch.optim.Adam(net.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_of(net)
        scaler.scale(loss).backward()
        scaler.step(minimizer)
        scaler.update()
        minimizer.zero_grad()


def averaged(**options: Any) -> Case:
    def case() -> None:
        net = network()
        minimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        average = swa_utils.AveragedModel(net, **options)
        for _ in range(3):
            loss_of(net).backward()
            minimizer.step()
            minimizer.zero_grad()
            average.update_parameters(net)
        swa_utils.SWALR(minimizer, swa_lr=0.05).step()

    return case


def manual_average() -> None:
    net, average = network(), network()
    minimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        loss_of(net).backward()
        minimizer.step()
        minimizer.zero_grad()
        with torch.no_grad():
            for kept, parameter in zip(average.parameters(), net.parameters(), strict=True):
                kept.mul_(0.9).add_(parameter, alpha=0.1)


def reloaded() -> None:
    net = network()
    minimizer = torch.optim.AdamW(net.parameters())
    loss_of(net).backward()
    minimizer.step()
    state, weights = minimizer.state_dict(), net.state_dict()
    fresh = network()
    fresh.load_state_dict(weights)
    again = torch.optim.AdamW(fresh.parameters())
    again.load_state_dict(state)
    loss_of(fresh).backward()
    again.step()


def in_backward() -> None:
    net = network()
    for parameter in net.parameters():
        minimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(p: torch.Tensor, minimizer: torch.optim.Optimizer = minimizer) -> None:
            minimizer.step()
            minimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        loss_of(net).backward()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


OPTIMIZERS: dict[str, Case] = {
    "adam": optimizer("Adam"),
    "adam_amsgrad": optimizer("Adam", amsgrad=True, weight_decay=0.1),
    "adam_capturable": optimizer("Adam", capturable=True),
    "adam_fused": optimizer("Adam", fused=True),
    "adam_fused_amsgrad": optimizer("Adam", fused=True, amsgrad=True),
    "adam_loop": optimizer("Adam", foreach=False, weight_decay=0.1),
    "adam_loop_amsgrad": optimizer("Adam", foreach=False, amsgrad=True),
    "adam_maximize": optimizer("Adam", maximize=True),
    "adam_bf16": training(adam, dtype=torch.bfloat16),
    "adamw": optimizer("AdamW"),
    "adamw_loop": optimizer("AdamW", foreach=False),
    "adamw_tensor_lr": optimizer("AdamW", lr=torch.tensor(0.01), capturable=True),
    "sgd": optimizer("SGD"),
    "sgd_momentum": optimizer("SGD", momentum=0.9, weight_decay=0.1),
    "sgd_nesterov": optimizer("SGD", momentum=0.9, nesterov=True),
    "sgd_fused": optimizer("SGD", momentum=0.9, fused=True),
    "sgd_loop": optimizer("SGD", momentum=0.9, weight_decay=0.1, foreach=False),
    "rmsprop": optimizer("RMSprop"),
    "rmsprop_centered": optimizer("RMSprop", centered=True, momentum=0.9),
    "rmsprop_loop": optimizer("RMSprop", foreach=False),
    "adagrad": optimizer("Adagrad"),
    "adagrad_loop": optimizer("Adagrad", foreach=False),
    "adadelta": optimizer("Adadelta"),
    "adadelta_loop": optimizer("Adadelta", foreach=False),
    "adamax": optimizer("Adamax"),
    "nadam": optimizer("NAdam"),
    "radam": optimizer("RAdam"),
    "radam_decoupled": optimizer("RAdam", weight_decay=0.1, decoupled_weight_decay=True),
    "asgd": optimizer("ASGD"),
    "rprop": optimizer("Rprop"),
    "adafactor": optimizer("Adafactor"),
    "adafactor_loop": optimizer("Adafactor", foreach=False),
    "muon": muon,
    "sparse_adam": sparse_adam,
    "groups": groups,
    "frozen": frozen,
    "zero_grad_to_zero": training(adam, set_to_none=False),
    "accumulated": training(sgd, accumulate=3),
    "clip_norm": training(sgd, clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0)),
    "clip_norm_loop": training(sgd, clip=lambda p: nn.utils.clip_grad_norm_(p, 1.0, foreach=False)),
    "clip_norm_infinity": training(sgd, clip=lambda p: nn.utils.clip_grad_norm_(p, 1.0, norm_type=float("inf"))),
    "clip_value": training(sgd, clip=lambda parameters: nn.utils.clip_grad_value_(parameters, 1.0)),
    "scaled": scaled,
    "scaled_fused": scaled_fused,
    "swa": averaged(),
    "ema": averaged(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.99)),
    "ema_buffers": averaged(avg_fn=swa_utils.get_ema_avg_fn(0.99), use_buffers=True),
    "manual_average": manual_average,
    "reloaded": reloaded,
    "in_backward": in_backward,
}
