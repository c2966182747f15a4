"""What CUDA's kernels refuse because of their arguments' types ends a dry run, in CUDA's words.

The sentences are those of the CUDA build of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import oom_magic as om

HALF, BRAIN, INT = torch.half, torch.bfloat16, torch.int32


def of(*shape: int, dtype: Any = None) -> torch.Tensor:
    return torch.ones(shape, device="cuda", dtype=dtype)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "group_norm": (
        lambda: F.group_norm(of(2, 8, 4, dtype=BRAIN), 2, of(8), of(8)),
        "expected scalar type BFloat16 but found Float",
    ),
    "group_norm_half": (
        lambda: F.group_norm(of(2, 8, 4), 2, of(8, dtype=HALF)),
        "mixed dtype (CPU): expect parameter to have scalar type of Float",
    ),
    "layer_norm": (
        lambda: F.layer_norm(of(2, 8, dtype=HALF), (8,), of(8)), "expected scalar type Half but found Float"
    ),
    "grid_sample": (
        lambda: F.grid_sample(of(2, 8, 4, 4, dtype=HALF), of(2, 3, 3, 2)),
        "expected scalar type Half but found Float",
    ),
    "convolution": (
        lambda: F.conv2d(of(2, 8, 4, 4, dtype=HALF), of(8, 8, 3, 3)),
        "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same",
    ),
    "linear": (
        lambda: F.linear(of(2, 8, dtype=HALF), of(8, 8, dtype=HALF), of(8)),
        "self and mat2 must have the same dtype, but got Float and Half",
    ),
    "attention": (
        lambda: F.scaled_dot_product_attention(of(2, 2, 8, 8, dtype=HALF), of(2, 2, 8, 8), of(2, 2, 8, 8)),
        "Expected query, key, and value to have the same dtype, but got query.dtype: c10::Half key.dtype: float and"
        " value.dtype: float instead.",
    ),
    "attention_mask": (
        lambda: F.scaled_dot_product_attention(*[of(2, 2, 8, 8, dtype=HALF)] * 3, attn_mask=of(8, 8)),
        "invalid dtype for bias - should match query's dtype",
    ),
    "binary_cross_entropy": (
        lambda: F.binary_cross_entropy(of(2, 8, dtype=HALF), of(2, 8)), "Found dtype Float but expected Half"
    ),
    "targets": (
        lambda: F.cross_entropy(of(5, 4), of(5, dtype=INT)), "expected target dtype to be Long or Byte, but got Int"
    ),
    "targets_of_images": (
        lambda: F.cross_entropy(of(5, 4, 2, 2), of(5, 2, 2, dtype=INT)), "expected scalar type Long but found Int"
    ),
    "index_add": (
        lambda: of(5, 3).index_add_(0, of(2, dtype=torch.long), of(2, 3, dtype=HALF)),
        "index_add_(): self (Float) and source (Half) must have the same scalar type",
    ),
    "index_put": (
        lambda: of(5, 3).index_put_((of(2, dtype=torch.long),), of(2, 3, dtype=HALF)),
        "Index put requires the source and destination dtypes match, got Float for the destination and Half for the"
        " source.",
    ),
    "index_select": (
        lambda: of(5, 3).index_select(0, of(2)), "\"index_select_out_cuda_impl\" not implemented for 'Float'"
    ),
    "bernoulli": (
        lambda: torch.bernoulli(of(5, dtype=INT)), "expected probabilities tensor to have floating type, got Int"
    ),
    "cdist": (lambda: torch.cdist(of(2, 3, dtype=HALF), of(2, 3, dtype=HALF)), "\"cdist_cuda\" not implemented for 'Half'"),
    "mm": (lambda: of(4, 4, dtype=INT) @ of(4, 4, dtype=INT), "\"addmm_cuda\" not implemented for 'Int'"),
    "softmax": (lambda: of(4, dtype=INT).softmax(0), "\"host_softmax\" not implemented for 'Int'"),
    "max_pool": (
        lambda: F.max_pool2d(of(1, 1, 4, 4, dtype=INT), 2),
        "\"max_pool2d_with_indices_out_cuda_frame\" not implemented for 'Int'",
    ),
    "convolution_of_booleans": (
        lambda: F.conv2d(of(1, 1, 4, 4, dtype=torch.bool), of(1, 1, 2, 2, dtype=torch.bool)),
        "getCudnnDataTypeFromScalarType() not supported for Bool",
    ),
    "histogram": (lambda: torch.histc(of(4, dtype=HALF)), "HalfTensor is not supported"),
    "deviation": (lambda: of(4, dtype=INT).std(), "std and var only support floating point and complex dtypes"),
    "silu": (lambda: F.silu(of(4, dtype=INT)), "\"silu_cuda\" not implemented for 'Int'"),
    "bits": (lambda: of(4) & of(4), "\"bitwise_and_cuda\" not implemented for 'Float'"),
    "spectrogram": (
        lambda: torch.stft(of(64, dtype=HALF), 12, window=of(12, dtype=HALF), return_complex=True),
        "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but got a"
        " signal size of[12]",
    ),
}  # fmt: skip


def test_halves_are_transformed_back_where_the_real_numbers_are_a_power_of_two() -> None:
    def program() -> None:
        back = torch.fft.irfft(torch.fft.rfft(of(64, dtype=HALF)))
        assert (back.shape, back.dtype, back.is_cuda) == ((64,), HALF, True)

    assert om.dry_run(program).peak_allocated_bytes >= 2 * 64 * 2


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", REFUSED)
def test_mixed_types_are_refused_as_on_cuda(name: str) -> None:
    function, words = REFUSED[name]
    with pytest.raises(RuntimeError) as caught:
        om.dry_run(function)
    assert str(caught.value) == words


QUANTIZED: dict[str, Callable[[], Any]] = {
    "quantize_per_tensor": lambda: torch.quantize_per_tensor(of(64, 64), 0.1, 0, torch.qint8),
    "quantize_per_channel": lambda: torch.quantize_per_channel(
        of(8, 64), of(8), of(8, dtype=torch.long), 0, torch.qint8
    ),
    "Tensor.to": lambda: torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8).to("cuda"),
    "_empty_affine_quantized": lambda: torch._empty_affine_quantized(
        [8], scale=1, zero_point=0, dtype=torch.qint8, device="cuda"
    ),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tensors_on_the_gpu_are_refused_by_name(name: str) -> None:
    """Without data they were tensors of ordinary types, four times as large."""
    with pytest.raises(NotImplementedError, match=rf"^torch\.{name} cannot be dry-run: tensors of quantized types"):
        om.dry_run(QUANTIZED[name])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_that_was_trained_is_quantized_on_the_host() -> None:
    def program() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda()
        model(of(4, 64)).sum().backward()
        made = torch.ao.quantization.quantize_dynamic(model.cpu().eval(), {torch.nn.Linear}, dtype=torch.qint8)
        assert made(torch.randn(4, 64)).shape == (4, 64)

    om.dry_run(program)
