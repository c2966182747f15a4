"""Programs that take derivatives of many at once, or forwards: torch.func, and batches of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

CUDA = "cuda"


def each_gradient() -> None:
    """One gradient for each example, by ``vmap`` of ``grad`` over convolutions."""
    model = nn.Sequential(nn.Conv2d(32, 64, 3), nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(1, 32, 26, 26))
    model.to(CUDA)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    x, labels = torch.randn(64, 32, 26, 26, device=CUDA), torch.zeros(64, dtype=torch.long, device=CUDA)

    def loss(weights: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, weights, (image[None],)), label[None])

    vmap(grad(loss), (None, 0, 0))(weights, x, labels)


def each_gradient_of_attention() -> None:
    """``torch.func`` takes attention apart by the kernel that the card would choose."""
    layer = nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True).to(CUDA)
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = functional_call(layer, weights, (x[None],)).square().mean()
        return out

    vmap(grad(loss), in_dims=(None, 0), randomness="different")(weights, torch.randn(16, 40, 128, device=CUDA))


def forward_mode() -> None:
    """Derivatives forwards, and forwards over backwards."""
    weight = torch.randn(512, 512, device=CUDA)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight).pow(2).sum()

    x = torch.randn(64, 512, device=CUDA)
    torch.func.jvp(function, (x,), (torch.ones_like(x),))
    torch.func.hessian(lambda x: function(x[None]))(torch.randn(512, device=CUDA))


def batch_of_gradients() -> None:
    """``is_grads_batched`` over modules whose gradients a hook looks at."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(CUDA)
    norms: list[torch.Tensor] = []
    model[0].register_full_backward_hook(lambda module, inputs, outputs: norms.append(outputs[0].norm()))
    x = torch.randn(32, 64, device=CUDA, requires_grad=True)
    each = torch.eye(8, device=CUDA)[:, None].expand(8, 32, 8)
    (jacobian,) = torch.autograd.grad(model(x), x, each, is_grads_batched=True)
    assert jacobian.shape == (8, 32, 64) and len(norms) == 1


DERIVATIVES: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (each_gradient, each_gradient_of_attention, forward_mode, batch_of_gradients)
}
