"""Small programs for "cuda" with what users seldom write: layers, functions, hooks and checkpoints within others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

CUDA = "cuda"


def network(*widths: int) -> nn.Sequential:
    """Linear layers of these widths with activations between them."""
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).to(CUDA)


def three_steps(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    """Three steps of a plain loop."""
    for _ in range(3):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def attention_with_keys_of_its_own() -> None:
    """Keys and values of other widths, with a bias and zeros added to them."""
    attention = nn.MultiheadAttention(
        256, 8, kdim=128, vdim=192, add_bias_kv=True, add_zero_attn=True, dropout=0.1, batch_first=True
    ).to(CUDA)

    def loss() -> torch.Tensor:
        query, key, value = (torch.randn(8, *shape, device=CUDA) for shape in ((64, 256), (100, 128), (100, 192)))
        mask = torch.zeros(8, 100, dtype=torch.bool, device=CUDA)
        mask[:, 80:] = True
        made, weights = attention(query, key, value, key_padding_mask=mask, average_attn_weights=False)
        return made.square().mean() + weights.square().mean()

    three_steps(torch.optim.NAdam(attention.parameters(), foreach=True), loss)


def folded() -> None:
    first, second = nn.Conv2d(3, 32, 3, padding=1).to(CUDA), nn.Linear(288, 288).to(CUDA)

    def loss() -> torch.Tensor:
        columns = F.unfold(first(torch.randn(8, 3, 64, 64, device=CUDA)), 3, padding=1, stride=2)
        made = second(columns.transpose(1, 2)).transpose(1, 2)
        return F.fold(made, (64, 64), 3, padding=1, stride=2).square().mean()

    parameters = [*first.parameters(), *second.parameters()]
    three_steps(torch.optim.RMSprop(parameters, momentum=0.9, centered=True), loss)


def pooled() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.FractionalMaxPool2d(3, output_ratio=0.6), nn.ELU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.LPPool2d(2, 3, 2), nn.CELU(),
        nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(1024, 10),
    ).to(CUDA)  # fmt: skip

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(torch.randn(16, 3, 64, 64, device=CUDA)), torch.zeros(16, dtype=torch.long).cuda())

    three_steps(torch.optim.ASGD(model.parameters()), loss)


def unpooled() -> None:
    first, last = nn.Conv2d(3, 32, 3, padding=1).to(CUDA), nn.ConvTranspose2d(32, 3, 3, padding=1).to(CUDA)
    pool, unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def loss() -> torch.Tensor:
        images = torch.randn(8, 3, 128, 128, device=CUDA)
        return F.l1_loss(last(unpool(*pool(F.leaky_relu(first(images))))), images)

    three_steps(torch.optim.Adam([*first.parameters(), *last.parameters()]), loss)


class _Gated(torch.autograd.Function):
    """Three results: one that is differentiated, one that is not, and a sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        value, gate = (x @ weight).chunk(2, -1)
        opened = torch.sigmoid(gate)
        ctx.save_for_backward(x, weight, value, opened)
        ctx.mark_non_differentiable(opened)
        return value * opened, opened, value.sum()

    @staticmethod
    def backward(ctx: Any, of_product: torch.Tensor, _unused: Any, of_sum: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight, value, opened = ctx.saved_tensors
        made = torch.cat([of_product * opened + of_sum, of_product * value * opened * (1 - opened)], -1)
        return made @ weight.t(), x.flatten(0, 1).t() @ made.flatten(0, 1)


def function_of_three_results() -> None:
    first = nn.Linear(128, 256).to(CUDA)
    weight = nn.Parameter(torch.randn(256, 512, device=CUDA))

    def loss() -> torch.Tensor:
        product, _unused, total = _Gated.apply(first(torch.randn(16, 64, 128, device=CUDA)), weight)
        return product.square().mean() + 1e-4 * total

    three_steps(torch.optim.Adamax([*first.parameters(), weight]), loss)


def gradients_kept_by_hooks() -> None:
    model = network(256, 1024, 1024, 64)
    kept: list[Any] = []
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.register_full_backward_hook(lambda _module, _inputs, outputs: kept.append(outputs[0].detach()))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: kept.append(one.grad.norm()))

    def loss() -> torch.Tensor:
        if len(kept) > 20:
            kept.clear()
        made = model(torch.randn(512, 256, device=CUDA, requires_grad=True))
        made.register_hook(kept.append)
        return made.square().mean()  # type: ignore[no-any-return]

    three_steps(torch.optim.AdamW(model.parameters()), loss)


def jacobians_and_hessians() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3)).to(CUDA)
    parameters = dict(model.named_parameters())
    x = torch.randn(64, 8, device=CUDA)

    def made(row: torch.Tensor) -> Any:
        return functional_call(model, parameters, (row,))

    jacobian, second = vmap(jacrev(made))(x), vmap(hessian(lambda row: made(row).sum()))(x)
    (jacobian.square().mean() + second.square().mean()).backward()
    each = grad(lambda weights, row: functional_call(model, weights, (row,)).square().sum())
    vmap(each, (None, 0))({name: one.detach() for name, one in parameters.items()}, x)


def checkpoints_within_checkpoints() -> None:
    blocks = nn.ModuleList([network(256, 1024, 256) for _ in range(6)])
    last = network(256, 512, 512, 512, 512, 256)

    def two(x: torch.Tensor, i: int) -> Any:
        inner = checkpoint(lambda y: blocks[i + 1](y) + y, x, use_reentrant=False)
        return checkpoint(lambda y: blocks[i](y) + y, inner, use_reentrant=False)

    def loss() -> torch.Tensor:
        x = torch.randn(512, 256, device=CUDA, requires_grad=True)
        x = checkpoint(two, x, 0, use_reentrant=True)
        for i in (2, 4):
            x = checkpoint(two, x, i, use_reentrant=False, early_stop=False)
        return checkpoint_sequential(last, 3, x, use_reentrant=False).square().mean()  # type: ignore[no-any-return]

    three_steps(torch.optim.AdamW([*blocks.parameters(), *last.parameters()]), loss)


def rows_of_several_lengths() -> None:
    """A nested tensor through linear layers, padded for the loss."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(CUDA)

    def loss() -> torch.Tensor:
        rows = [torch.randn(length, 64) for length in (10, 30, 50, 25)]
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged, device=CUDA)
        return torch.nested.to_padded_tensor(model(nested), 0.0).square().mean()

    three_steps(torch.optim.Adam(model.parameters()), loss)


def last_states() -> None:
    """A recurrent layer of whose outputs only the last state is used, twice, from its own last state on."""
    layer, last = nn.GRU(96, 256, batch_first=True).to(CUDA), nn.Linear(256, 24).to(CUDA)

    def loss() -> torch.Tensor:
        _, state = layer(torch.randn(224, 6, 96, device=CUDA))
        _, state = layer(torch.randn(224, 4, 96, device=CUDA), state)
        return last(state).square().mean()  # type: ignore[no-any-return]

    three_steps(torch.optim.Adam([*layer.parameters(), *last.parameters()]), loss)


SELDOM: dict[str, Callable[[], None]] = {
    program.__name__: program
    for program in (attention_with_keys_of_its_own, folded, pooled, unpooled, function_of_three_results,
                    gradients_kept_by_hooks, jacobians_and_hessians, checkpoints_within_checkpoints,
                    rows_of_several_lengths, last_states)
}  # fmt: skip
