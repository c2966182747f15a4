"""Small programs for "cuda", one for each operator: record_truth.py runs them on CUDA, the tests dry-run them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Case = Callable[..., Any]


def measure(cases: dict[str, Case], **how: bool) -> dict[str, list[int]]:
    """For each case, in one process: peak allocated and reserved bytes, and how many allocations were made."""
    (torch.rand(4, 4, device="cuda", requires_grad=True) @ torch.rand(4, 4, device="cuda")).sum().backward()  # cuBLAS
    found = {}
    gc.collect()
    gc.freeze()  # what is there already need not be looked at before each case
    for name, case in cases.items():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        try:
            case(**how)
        except Exception as error:  # of this case only
            found[name] = [type(error).__name__]
            continue
        stats = torch.cuda.memory_stats()
        num_allocations = stats["allocation.all.allocated"] - before
        found[name] = [stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"], num_allocations]
    gc.unfreeze()
    return found


def outputs_of(result: Any) -> list[torch.Tensor]:
    """The tensors in a result that a gradient flows through."""
    if isinstance(result, torch.Tensor):
        return [result] if result.requires_grad else []
    return [tensor for item in result for tensor in outputs_of(item)] if isinstance(result, (tuple, list)) else []


def pointwise(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Case:
    """Apply ``function`` to inputs of these shapes, twice forward and backward, with expanded and dense gradients.

    ``turned``: the inputs are views of tensors whose dimensions are in the opposite order, and so are dense gradients.
    """

    def case(turned: bool = False) -> None:
        make = turned_around if turned else torch.rand
        inputs = [make(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]
        results = outputs_of(function(*inputs))
        if results:
            sum(result.abs().sum() if result.is_complex() else result.sum() for result in results).backward()
        results = outputs_of(function(*inputs))
        if results:
            gradients = [
                turned_around(result.shape, device="cuda", dtype=result.dtype) if turned else torch.ones_like(result)
                for result in results
            ]
            torch.autograd.backward(results, gradients)

    return case


def turned_around(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    """A tensor of this shape whose first dimension varies fastest in memory."""
    return torch.rand(tuple(reversed(shape)), **options).permute(*reversed(range(len(shape))))


def module(make: Callable[[], nn.Module], *shapes: tuple[int, ...], dtype: torch.dtype | None = None,
           amp: torch.dtype | None = None, channels_last: bool = False, train: bool = True) -> Case:  # fmt: skip
    """Two steps of a module with SGD, its input differentiated too, then one evaluation."""

    def case() -> None:
        net = make().to("cuda", dtype)
        inputs = [torch.rand(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
        if channels_last:
            net = net.to(memory_format=torch.channels_last)
            inputs = [x.detach().to(memory_format=torch.channels_last).requires_grad_() for x in inputs]
        optimizer = torch.optim.SGD([*net.parameters(), *inputs], lr=0.1)
        for _ in range(2 if train else 0):
            with torch.autocast("cuda", dtype=amp or torch.float16, enabled=amp is not None):
                loss = sum(out.float().mean() for out in outputs_of(net(*inputs)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        net.eval()
        with torch.no_grad(), torch.autocast("cuda", dtype=amp or torch.float16, enabled=amp is not None):
            net(*inputs)

    return case


def indices(*shape: int, high: int = 10) -> torch.Tensor:
    """Integers below ``high`` on the GPU."""
    return torch.randint(0, high, shape, device="cuda")


X, V, S = (64, 1000), (1000,), (32, 32)
OPERATORS: dict[str, Case] = {
    # arithmetic, type promotion, in place, out=
    "add": pointwise(lambda x, y: x + y, X, V),
    "mul": pointwise(lambda x, y: x * y, X, V),
    "div": pointwise(lambda x, y: x / y, X, (64, 1)),
    "pow": pointwise(lambda x: x**3, X),
    "pow_tensor": pointwise(lambda x, y: x**y, X, X),
    "sqrt": pointwise(torch.sqrt, X),
    "exp_log": pointwise(lambda x: torch.log(torch.exp(x)), X),
    "abs_sign": pointwise(lambda x: x.abs() * x.sign(), X),
    "clamp": pointwise(lambda x: x.clamp(0, 0.5), X),
    "clamp_tensor": pointwise(lambda x, y: torch.clamp(x, min=y), X, V),
    "maximum": pointwise(torch.maximum, X, V),
    "where": pointwise(lambda x, y: torch.where(x > 0.5, x, y), X, X),
    "where_scalar": pointwise(lambda x: torch.where(x > 0.5, x, 0.0), X),
    "masked_fill": pointwise(lambda x: x.masked_fill(x > 0.5, -1), X),
    "lerp": pointwise(lambda x, y: torch.lerp(x, y, 0.3), X, X),
    "addcmul": pointwise(torch.addcmul, X, X, X),
    "addcdiv": pointwise(torch.addcdiv, X, X, X),
    "atan2": pointwise(torch.atan2, X, X),
    "remainder": pointwise(lambda x: x % 0.3, X),
    "floor_divide": pointwise(lambda x: x.detach() // 0.3, X),
    "mixed_half": pointwise(lambda x, y: x.half() * y, X, X),
    "mixed_double": pointwise(lambda x: x.double() + x, X),
    "bfloat16_sum": pointwise(lambda x: x.sum(0), X, dtype=torch.bfloat16),
    "int_sum": pointwise(lambda x: (x > 0.5).sum(1), X),
    "in_place": pointwise(lambda x: (x * 2).add_(1).mul_(3).relu_(), X),
    "iadd_view": pointwise(lambda x: _assign_row(x * 1), X),
    "out": pointwise(lambda x: torch.mul(x.detach(), 2, out=torch.empty_like(x)), X),
    "out_resized": pointwise(lambda x: torch.mul(x.detach(), 2, out=torch.empty(0, device="cuda")), X),
    "resize": pointwise(lambda x: torch.empty(10, device="cuda").resize_(100, 100).zero_(), X),
    "complex": pointwise(lambda x, y: torch.complex(x, y) * (1 + 2j), X, X),
    "view_as_real": pointwise(lambda x: torch.view_as_real(torch.complex(x, x) ** 2), X),
    "polar": pointwise(torch.polar, X, X),
    "conj": pointwise(lambda x: torch.complex(x, x).conj() @ torch.complex(x, x).mT, X),
    "angle": pointwise(lambda x: torch.complex(x, x).angle(), X),
    "erf_lgamma": pointwise(lambda x: torch.erf(x) + torch.lgamma(x) + torch.digamma(x), X),
    "nan_to_num": pointwise(torch.nan_to_num, X),
    "logaddexp": pointwise(torch.logaddexp, X, X),
    "isclose": pointwise(lambda x, y: torch.isclose(x, y), X, X),
    "bitwise": pointwise(lambda x: ((x * 100).long() & 7) ^ 3, X),
    # reductions
    "sum_all": pointwise(lambda x: x.sum(), X),
    "sum_large": pointwise(lambda x: x.sum(), (2048, 4096)),
    "sum_rows": pointwise(lambda x: x.sum(1), (8, 1 << 20)),
    "sum_columns": pointwise(lambda x: x.sum(0), (1 << 18, 8)),
    "sum_columns_wide": pointwise(lambda x: x.sum(0), (8192, 768)),
    "sum_half": pointwise(lambda x: x.sum(), (2048, 4096), dtype=torch.float16),
    "sum_to_float": pointwise(lambda x: x.sum(-1, dtype=torch.float32), (64, 4096), dtype=torch.float16),
    "mean": pointwise(lambda x: x.mean(0), X),
    "mean_large": pointwise(lambda x: x.mean(), (2048, 2048)),
    "var": pointwise(lambda x: x.var(1), X),
    "std": pointwise(lambda x: x.std(), X),
    "var_mean": pointwise(lambda x: torch.var_mean(x, 1), X),
    "norm": pointwise(lambda x: x.norm(), X),
    "norm_dim": pointwise(lambda x: x.norm(dim=1), X),
    "vector_norm_one": pointwise(lambda x: torch.linalg.vector_norm(x, 1, dim=1), X),
    "matrix_norm": pointwise(torch.linalg.matrix_norm, X),
    "normalize": pointwise(lambda x: F.normalize(x, dim=1), X),
    "max_all": pointwise(lambda x: x.max(), X),
    "max_dim": pointwise(lambda x: x.max(1), X),
    "min_dim": pointwise(lambda x: x.min(0), X),
    "amax": pointwise(lambda x: x.amax(1), X),
    "aminmax": pointwise(lambda x: torch.aminmax(x), X),
    "argmax": pointwise(lambda x: x.argmax(1), X),
    "prod": pointwise(lambda x: x.prod(1), X),
    "logsumexp": pointwise(lambda x: x.logsumexp(1), X),
    "any_all": pointwise(lambda x: (x > 0).any(1) & (x > 0).all(1), X),
    "count_nonzero": pointwise(lambda x: torch.count_nonzero(x, 1), X),
    "median": pointwise(lambda x: x.median(1), X),
    "median_all": pointwise(lambda x: x.median(), X),
    "mode": pointwise(lambda x: x.mode(1), X),
    "kthvalue": pointwise(lambda x: x.kthvalue(3, 1), X),
    "quantile": pointwise(lambda x: x.quantile(0.3, 1), X),
    "histc": pointwise(lambda x: torch.histc(x.detach(), 10), X),
    "bincount": pointwise(lambda x: torch.bincount(indices(1000)), X),
    # cumulative, sorting, searching
    "cumsum": pointwise(lambda x: x.cumsum(1), X),
    "cumsum_flat": pointwise(lambda x: x.view(-1).cumsum(0), (512, 1000)),
    "cumsum_long": pointwise(lambda x: (x > 0.5).cumsum(1), X),
    "cumprod": pointwise(lambda x: x.cumprod(1), X),
    "cummax": pointwise(lambda x: x.cummax(1), X),
    "logcumsumexp": pointwise(lambda x: x.logcumsumexp(1), X),
    "sort": pointwise(lambda x: x.sort(1), X),
    "sort_long_rows": pointwise(lambda x: x.sort(1), (16, 50000)),
    "sort_flat": pointwise(lambda x: x.sort(), (100000,)),
    "sort_small": pointwise(lambda x: x.sort(1), (64, 20)),
    "sort_half": pointwise(lambda x: x.sort(1), X, dtype=torch.float16),
    "sort_stable": pointwise(lambda x: torch.sort(x, dim=0, stable=True), X),
    "sort_many_rows": pointwise(lambda x: x.sort(1), (200, 5000)),
    "sort_columns": pointwise(lambda x: x.sort(0), (5000, 200)),
    "sort_half_flat": pointwise(lambda x: x.sort(), (50000,), dtype=torch.float16),
    "argsort": pointwise(lambda x: x.argsort(1), X),
    "sort_long": pointwise(lambda x: indices(10000).sort(), X),
    "topk": pointwise(lambda x: x.topk(5), X),
    "topk_large": pointwise(lambda x: x.topk(50), (8, 100000)),
    "topk_rows": pointwise(lambda x: x.topk(50), (1000, 5000)),
    "topk_sorted": pointwise(lambda x: x.topk(5000), (4, 20000)),
    "topk_flat": pointwise(lambda x: x.topk(1000), (200000,)),
    "multinomial": pointwise(lambda x: torch.multinomial(x.detach(), 1), X),
    "multinomial_many": pointwise(lambda x: torch.multinomial(x.detach(), 5), X),
    "multinomial_replacement": pointwise(lambda x: torch.multinomial(x.detach(), 5, True), X),
    "searchsorted": pointwise(lambda x, y: torch.searchsorted(x.detach(), y.detach()), V, X),
    "bucketize": pointwise(lambda x, y: torch.bucketize(x.detach(), y.detach()), X, V),
    "flip_roll": pointwise(lambda x: x.flip(1).roll(3, 0), X),
    "unique": pointwise(lambda x: torch.unique(indices(1000)), X),
    "randperm": pointwise(lambda x: torch.randperm(1000, device="cuda"), X),
    "randperm_large": pointwise(lambda x: torch.randperm(100000, device="cuda"), X),
    "isin": pointwise(lambda x: torch.isin(indices(1000), indices(5)), X),
    # indexing
    "index": pointwise(lambda x: x[indices(100)], X),
    "index_two": pointwise(lambda x: x[indices(100), indices(100)], X),
    "index_host": pointwise(lambda x: x[[0, 2, 5]], X),
    "index_put": pointwise(lambda x: _index_put(x * 1, False), X),
    "index_put_accumulate": pointwise(lambda x: _index_put(x * 1, True), X),
    "index_select": pointwise(lambda x: x.index_select(0, indices(100)), X),
    "index_select_columns": pointwise(lambda x: x.index_select(1, indices(100)), X),
    "index_add": pointwise(lambda x: torch.zeros(10, 1000, device="cuda").index_add(0, indices(64), x), X),
    "index_copy": pointwise(lambda x, y: x.index_copy(0, indices(5), y), X, (5, 1000)),
    "index_fill": pointwise(lambda x: x.index_fill(0, indices(5), 2.0), X),
    "gather": pointwise(lambda x: x.gather(1, indices(64, 10)), X),
    "take_along_dim": pointwise(lambda x: x.take_along_dim(indices(64, 10), 1), X),
    "take": pointwise(lambda x: x.take(indices(100)), X),
    "scatter": pointwise(lambda x, y: x.scatter(1, indices(64, 10), y), X, (64, 10)),
    "scatter_value": pointwise(lambda x: torch.zeros_like(x).scatter_(1, indices(64, 1), 1.0), X),
    "scatter_add": pointwise(lambda x: torch.zeros(64, 10, device="cuda").scatter_add(1, indices(*X), x), X),
    "scatter_reduce": pointwise(lambda x, y: x.scatter_reduce(1, indices(64, 10), y, "amax"), X, (64, 10)),
    "scatter_reduce_mean": pointwise(lambda x, y: x.scatter_reduce(1, indices(64, 10), y, "mean"), X, (64, 10)),
    "masked_scatter": pointwise(lambda x, y: x.masked_scatter(x > 2, y), X, X),
    "put": pointwise(lambda x, y: x.put(indices(10), y), X, (10,)),
    "one_hot": pointwise(lambda x: F.one_hot(indices(64), 10), X),
    "tril": pointwise(lambda x: x.tril() + x.triu(), S),
    "diagonal": pointwise(lambda x: x.diagonal() + x.diag(), S),
    "diag_embed": pointwise(torch.diag_embed, S),
    "repeat_interleave": pointwise(lambda x: x.repeat_interleave(3, 0), X),
    "slice_select": pointwise(lambda x: x[3:10] * 2 + x[1], X),
    "unfold": pointwise(lambda x: x.unfold(1, 4, 2) * 1, X),
    # shapes
    "cat": pointwise(lambda x, y: torch.cat([x, y]), X, X),
    "stack": pointwise(lambda x, y: torch.stack([x, y], 1), X, X),
    "split": pointwise(lambda x: [part * 1 for part in x.split(100, 1)], X),
    "chunk_unused": pointwise(lambda x: x.chunk(4)[0] * 1, X),
    "unbind": pointwise(lambda x: [part * 1 for part in x.unbind(0)[:3]], X),
    "repeat": pointwise(lambda x: x.repeat(2, 3), X),
    "expand": pointwise(lambda x: x.expand(64, 1000) * 1, (1, 1000)),
    "permute": pointwise(lambda x: x.permute(2, 0, 1).contiguous(), (8, 16, 32)),
    "reshape": pointwise(lambda x: x.transpose(0, 1).reshape(-1), X),
    "meshgrid": pointwise(lambda x: torch.meshgrid(x, x, indexing="ij")[0] * 1, V),
    "cartesian_prod": pointwise(lambda x: torch.cartesian_prod(x, x), (50,)),
    "combinations": pointwise(lambda x: torch.combinations(x), (50,)),
    "block_diag": pointwise(lambda x: torch.block_diag(x, x), S),
    "rot90": pointwise(lambda x: x.rot90(), X),
    "tensor_split": pointwise(lambda x: [p * 1 for p in x.tensor_split(3, 1)], X),
    "as_strided": pointwise(lambda x: x.as_strided((10, 10), (1, 2)) * 1, X),
    "pad_constant": pointwise(lambda x: F.pad(x, (1, 2)), X),
    "pad_reflect": pointwise(lambda x: F.pad(x, (3, 3), mode="reflect"), (4, 8, 100)),
    "pad_replicate": pointwise(lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), (4, 8, 10, 10)),
    "pad_circular": pointwise(lambda x: F.pad(x, (3, 3), mode="circular"), (4, 8, 100)),
    # matrix products
    "mm": pointwise(torch.mm, X, (1000, 32)),
    "mm_transposed": pointwise(lambda x: x @ x.T, X),
    "mm_double": pointwise(torch.mm, X, (1000, 32), dtype=torch.float64),
    "mv": pointwise(torch.mv, X, V),
    "dot": pointwise(torch.dot, V, V),
    "outer": pointwise(torch.outer, V, V),
    "addmm": pointwise(torch.addmm, (32,), X, (1000, 32)),
    "addmm_matrix": pointwise(torch.addmm, (64, 32), X, (1000, 32)),
    "bmm": pointwise(torch.bmm, (8, 32, 64), (8, 64, 16)),
    "baddbmm": pointwise(torch.baddbmm, (8, 32, 16), (8, 32, 64), (8, 64, 16)),
    "matmul_broadcast": pointwise(torch.matmul, (8, 32, 64), (64, 16)),
    "matmul_expand": pointwise(torch.matmul, (4, 8, 32, 64), (8, 64, 16)),
    "matmul_vector": pointwise(torch.matmul, (8, 32, 64), (64,)),
    "linear": pointwise(F.linear, (8, 32, 64), (16, 64), (16,)),
    "linear_half": pointwise(F.linear, (8, 32, 64), (16, 64), (16,), dtype=torch.float16),
    "linear_images": pointwise(lambda x, w, b: F.linear(x, w, b).relu_(), (2, 3, 8, 64), (16, 64), (16,)),
    "linear_vector": pointwise(F.linear, (64,), (16, 64), (16,)),
    "bilinear": pointwise(F.bilinear, (64, 10), (64, 12), (5, 10, 12), (5,)),
    "einsum": pointwise(lambda x, y: torch.einsum("bij,bjk->bik", x, y), (8, 32, 64), (8, 64, 16)),
    "einsum_sum": pointwise(lambda x, y: torch.einsum("bhid,bhjd->bhij", x, y), (2, 4, 32, 16), (2, 4, 24, 16)),
    "einsum_outer": pointwise(lambda x, y: torch.einsum("i,j->ij", x, y), V, V),
    "einsum_three": pointwise(lambda *factors: _product_of_three(*factors), S, S, S),
    "tensordot": pointwise(lambda x, y: torch.tensordot(x, y, 2), (8, 16, 32), (16, 32, 4)),
    "multi_dot": pointwise(lambda x: torch.linalg.multi_dot([x, x, x]), S),
    "matrix_power": pointwise(lambda x: torch.linalg.matrix_power(x, 3), S),
    "kron": pointwise(torch.kron, S, (4, 4)),
    "cdist": pointwise(torch.cdist, (64, 16), (100, 16)),
    "cdist_large": pointwise(torch.cdist, (200, 16), (100, 16)),
    "cdist_one": pointwise(lambda x, y: torch.cdist(x, y, p=1), (64, 16), (100, 16)),
    "pdist": pointwise(F.pdist, (64, 16)),
    "cosine_similarity": pointwise(lambda x, y: F.cosine_similarity(x, y), X, X),
    "pairwise_distance": pointwise(F.pairwise_distance, X, X),
    "cross": pointwise(lambda x, y: torch.linalg.cross(x, y), (100, 3), (100, 3)),
    "cov": pointwise(torch.cov, S),
    "trace": pointwise(torch.trace, S),
    # activations
    **{
        name: pointwise(getattr(F, name), X)
        for name in (
            "relu", "relu6", "elu", "selu", "celu", "gelu", "silu", "mish", "leaky_relu", "hardswish", "hardsigmoid",
            "hardtanh", "logsigmoid", "softplus", "softsign", "tanhshrink", "hardshrink", "softshrink", "sigmoid",
            "tanh", "threshold", "rrelu", "glu",
        ) if name != "threshold"
    },
    "gelu_tanh": pointwise(lambda x: F.gelu(x, approximate="tanh"), X),
    "rrelu_train": pointwise(lambda x: F.rrelu(x, training=True), X),
    "prelu": pointwise(F.prelu, X, (1000,)),
    "softmax": pointwise(lambda x: x.softmax(-1), X),
    "softmax_float": pointwise(lambda x: F.softmax(x, -1, dtype=torch.float32), X, dtype=torch.bfloat16),
    "softmax_half_float": pointwise(lambda x: F.softmax(x, -1, dtype=torch.float32), X, dtype=torch.float16),
    "log_softmax": pointwise(lambda x: x.log_softmax(-1), X),
    "softmin": pointwise(lambda x: F.softmin(x, -1), X),
    "gumbel_softmax": pointwise(lambda x: F.gumbel_softmax(x, hard=True), X),
    "dropout": pointwise(lambda x: F.dropout(x, 0.3), X),
    "dropout_in_place": pointwise(lambda x: F.dropout(x * 1, 0.3, inplace=True), X),
    "dropout2d": pointwise(lambda x: F.dropout2d(x, 0.3), (4, 8, 16, 16)),
    "alpha_dropout": pointwise(lambda x: F.alpha_dropout(x, 0.3, True), X),
    "feature_alpha_dropout": pointwise(lambda x: F.feature_alpha_dropout(x, 0.3, True), (4, 8, 16, 16)),
    "bernoulli": pointwise(lambda x: torch.bernoulli(x.detach()), X),
    "normal": pointwise(lambda x: torch.normal(0.0, 1.0, X, device="cuda"), X),
    "random_like": pointwise(lambda x: torch.rand_like(x) + torch.randn_like(x), X),
    # losses
    "mse_loss": pointwise(F.mse_loss, X, X),
    "mse_loss_none": pointwise(lambda x, y: F.mse_loss(x, y, reduction="none"), X, X),
    "l1_loss": pointwise(F.l1_loss, X, X),
    "smooth_l1_loss": pointwise(F.smooth_l1_loss, X, X),
    "huber_loss": pointwise(F.huber_loss, X, X),
    "cross_entropy": pointwise(lambda x: F.cross_entropy(x, indices(64)), X),
    "cross_entropy_smoothing": pointwise(lambda x: F.cross_entropy(x, indices(64), label_smoothing=0.1), X),
    "cross_entropy_weight": pointwise(lambda x, w: F.cross_entropy(x, indices(64), weight=w.detach()), X, V),
    "cross_entropy_probabilities": pointwise(F.cross_entropy, X, X),
    "cross_entropy_2d": pointwise(lambda x: F.cross_entropy(x, indices(4, 16, 16)), (4, 10, 16, 16)),
    "cross_entropy_none": pointwise(lambda x: F.cross_entropy(x, indices(64), reduction="none"), X),
    "nll_loss": pointwise(lambda x: F.nll_loss(x.log_softmax(1), indices(64)), X),
    "nll_loss_2d": pointwise(lambda x: F.nll_loss(x, indices(4, 16, 16)), (4, 10, 16, 16)),
    "binary_cross_entropy": pointwise(lambda x, y: F.binary_cross_entropy(x, y.detach()), X, X),
    "bce_with_logits": pointwise(lambda x, y: F.binary_cross_entropy_with_logits(x, y.detach()), X, X),
    "bce_pos_weight": pointwise(
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y.detach(), pos_weight=w.detach()), X, X, V),
    "kl_div": pointwise(lambda x, y: F.kl_div(x, y.detach(), reduction="batchmean"), X, X),
    "kl_div_log": pointwise(lambda x, y: F.kl_div(x, y, log_target=True), X, X),
    "poisson_nll_loss": pointwise(lambda x, y: F.poisson_nll_loss(x, y.detach()), X, X),
    "gaussian_nll_loss": pointwise(lambda x, y, v: F.gaussian_nll_loss(x, y, v), X, X, X),
    "hinge_embedding_loss": pointwise(lambda x: F.hinge_embedding_loss(x, torch.ones_like(x)), X),
    "cosine_embedding_loss": pointwise(
        lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(64, device="cuda")), X, X),
    "margin_ranking_loss": pointwise(lambda x, y: F.margin_ranking_loss(x, y, torch.ones_like(x)), V, V),
    "triplet_margin_loss": pointwise(F.triplet_margin_loss, X, X, X),
    "multi_margin_loss": pointwise(lambda x: F.multi_margin_loss(x, indices(64)), X),
    "multilabel_margin_loss": pointwise(lambda x: F.multilabel_margin_loss(x, indices(*X)), X),
    "multilabel_soft_margin_loss": pointwise(lambda x, y: F.multilabel_soft_margin_loss(x, y.detach()), X, X),
    "soft_margin_loss": pointwise(lambda x: F.soft_margin_loss(x, torch.ones_like(x)), X),
    "ctc_loss": pointwise(lambda x: F.ctc_loss(
        x.log_softmax(2), indices(8, 10), torch.full((8,), 50), torch.full((8,), 10)), (50, 8, 20)),
    "ctc_loss_sum": pointwise(lambda x: F.ctc_loss(x.log_softmax(2), indices(8, 10), [50] * 8, [5, 10] * 4,
                                                   reduction="sum", zero_infinity=True), (50, 8, 20)),
    "mse_loss_transposed": pointwise(lambda x, y: F.mse_loss(x.t(), y.t()), X, X),
    # vision
    "max_pool1d": pointwise(lambda x: F.max_pool1d(x, 2), (4, 8, 100)),
    "max_pool2d": pointwise(lambda x: F.max_pool2d(x, 3, 2, 1), (4, 8, 32, 32)),
    "max_pool3d": pointwise(lambda x: F.max_pool3d(x, 2), (2, 4, 8, 8, 8)),
    "avg_pool1d": pointwise(lambda x: F.avg_pool1d(x, 2), (4, 8, 100)),
    "avg_pool2d": pointwise(lambda x: F.avg_pool2d(x, 2), (4, 8, 32, 32)),
    "avg_pool3d": pointwise(lambda x: F.avg_pool3d(x, 2), (2, 4, 8, 8, 8)),
    "adaptive_avg_pool1d": pointwise(lambda x: F.adaptive_avg_pool1d(x, 5), (4, 8, 100)),
    "adaptive_avg_pool2d": pointwise(lambda x: F.adaptive_avg_pool2d(x, 7), (4, 8, 32, 32)),
    "adaptive_avg_pool2d_one": pointwise(lambda x: F.adaptive_avg_pool2d(x, 1), (4, 8, 32, 32)),
    "adaptive_max_pool2d": pointwise(lambda x: F.adaptive_max_pool2d(x, 7), (4, 8, 32, 32)),
    "lp_pool2d": pointwise(lambda x: F.lp_pool2d(x, 2, 2), (4, 8, 32, 32)),
    "fractional_max_pool2d": pointwise(lambda x: F.fractional_max_pool2d(x, 2, output_size=10), (4, 8, 32, 32)),
    "max_unpool2d": pointwise(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (4, 8, 32, 32)),
    **{
        f"interpolate_{mode}": pointwise(lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode), shape)
        for mode, shape in {
            "nearest": (4, 8, 16, 16), "bilinear": (4, 8, 16, 16), "bicubic": (4, 8, 16, 16), "linear": (4, 8, 16),
            "area": (4, 8, 16, 16), "nearest-exact": (4, 8, 16, 16), "trilinear": (2, 4, 8, 8, 8),
        }.items()
    },
    "interpolate_antialias": pointwise(
        lambda x: F.interpolate(x, size=(10, 10), mode="bilinear", antialias=True), (4, 8, 16, 16)),
    "grid_sample": pointwise(lambda x, g: F.grid_sample(x, g, align_corners=False), (4, 8, 16, 16), (4, 10, 10, 2)),
    "affine_grid": pointwise(lambda t: F.affine_grid(t, [4, 3, 10, 10], align_corners=False), (4, 2, 3)),
    "pixel_shuffle": pointwise(lambda x: F.pixel_shuffle(x, 2), (4, 8, 16, 16)),
    "pixel_unshuffle": pointwise(lambda x: F.pixel_unshuffle(x, 2), (4, 8, 16, 16)),
    "channel_shuffle": pointwise(lambda x: F.channel_shuffle(x, 2), (4, 8, 16, 16)),
    "fold": pointwise(lambda x: F.fold(x, (8, 8), 2, stride=2), (4, 32, 16)),
    "unfold_images": pointwise(lambda x: F.unfold(x, 3), (4, 8, 16, 16)),
    # attention
    "attention": pointwise(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), *[(2, 4, 64, 32)] * 3),
    "attention_causal": pointwise(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                                  *[(2, 4, 64, 32)] * 3, dtype=torch.bfloat16),
    # embeddings
    "embedding": pointwise(lambda w: F.embedding(indices(8, 16), w), (*V, 32)),
    "embedding_padding": pointwise(lambda w: F.embedding(indices(8, 16), w, padding_idx=0), (*V, 32)),
    "embedding_many": pointwise(lambda w: F.embedding(indices(64, 128), w), (*V, 32)),
    "embedding_max_norm": pointwise(lambda w: F.embedding(indices(8, 16), w.detach() * 1, max_norm=1.0), (*V, 32)),
    "embedding_bag": pointwise(lambda w: F.embedding_bag(indices(8, 16), w), (*V, 32)),
    "embedding_bag_sum": pointwise(lambda w: F.embedding_bag(indices(8, 16), w, mode="sum"), (*V, 32)),
    "embedding_bag_max": pointwise(lambda w: F.embedding_bag(indices(8, 16), w, mode="max"), (*V, 32)),
    "embedding_bag_offsets": pointwise(
        lambda w: F.embedding_bag(indices(100), w, torch.arange(0, 100, 10, device="cuda")), (*V, 32)),
    # signals
    "rfft": pointwise(lambda x: torch.fft.rfft(x), X),
    "fft": pointwise(lambda x: torch.fft.fft(x), X),
    "fft2": pointwise(lambda x: torch.fft.fft2(x).abs(), (4, 16, 16)),
    "irfft": pointwise(lambda x: torch.fft.irfft(torch.fft.rfft(x)), X),
    "stft": pointwise(
        lambda x: torch.stft(x, 64, return_complex=True, window=torch.hann_window(64, device="cuda")), (4, 1000)),
}  # fmt: skip


def _product_of_three(*factors: torch.Tensor) -> torch.Tensor:
    """From left to right, as without opt_einsum, which some library may have brought."""
    with torch.backends.opt_einsum.flags(enabled=False):
        return torch.einsum("ab,bc,cd->ad", *factors)


def _assign_row(x: torch.Tensor) -> torch.Tensor:
    x[0] = 1.0
    x[1:3] += 2
    x[:, 5] *= 3
    return x


def _index_put(x: torch.Tensor, accumulate: bool) -> torch.Tensor:
    return x.index_put_((indices(100),), torch.ones(1000, device="cuda"), accumulate)
