"""What matrix products take: copies of factors, and a workspace; ``memory.workspaces`` says how large.

Source: aten/src/ATen/native/cuda/Blas.cpp (``addmm_out_cuda_impl``, ``prepare_matrix_for_cublas``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.memory.categories import Category
from oom_magic.predict.fake_cuda.operator_table import Rule
from oom_magic.predict.instrumentation.recorder import SizeFunction
from oom_magic.predict.kernels.copies import then_copied
from oom_magic.predict.kernels.scratch import HERE, cublas_bytes, cublas_lt_bytes
from oom_magic.predict.operators.calls import Call, Kernel, existing
from oom_magic.predict.setups.gpus import GPU

aten = torch.ops.aten
_POINTER = 8  # bytes, of strides and addresses


def _product(call: Call) -> None:
    """A product by cuBLAS."""
    _copy_factors(call)
    work_by_cublas(call)


def _biased_product(call: Call) -> None:
    """``addmm``: a bias for each column is added inside cublasLt."""
    bias = call.args[0]
    has_epilogue = bias.dim() == 1 and bias.is_contiguous()
    if not has_epilogue or HERE.is_unified:
        _product(call)
        return
    _copy_factors(call)
    if HERE.lt_takes_both:
        work_by_cublas(call)
    _work(call, "cublasLt", cublas_lt_bytes, stays=HERE.lt_stays)


def work_by_cublas(call: Call) -> None:
    """Take the workspace of cuBLAS, of which each thread has one on each card and stream."""
    _work(call, "cublas", cublas_bytes, stays=HERE.stays)


def _work(call: Call, library: str, size: SizeFunction, *, stays: bool) -> None:
    if not stays:
        call.allocate_scratch(size)
        return
    owner = (library, call.gpu.streams.at_work(), call.gpu.threads.handle(call.gpu.current))
    if owner not in call.gpu.workspaces:
        call.gpu.workspaces[owner] = call.keep_by(size, operator=library, category=Category.WORKSPACE)


def product_rules(gpu: GPU) -> dict[OpOverload, Rule]:
    """The rules of the products, in one process on this card."""
    products = (aten.mm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot, aten.vdot, aten.addbmm)
    rules: dict[OpOverload, Rule] = {packet.default: _product for packet in products}
    rules |= {
        aten.addmm.default: _biased_product,
        aten.dot.out: then_copied(_product),
        aten.vdot.out: then_copied(_product),
    }
    in_another: dict[str, Rule] = dict.fromkeys(map("{}.dtype".format, _IN_ANOTHER_TYPE), _product)
    return {**rules, **existing(in_another | {"_grouped_mm": partial(_grouped_product, gpu)})}


def _in_another_type(plain: OpOverload) -> Kernel:
    """A product in a type of its own (``out_dtype``), of which PyTorch's kernels for ``meta`` tensors of 2.11 and 2.13
    take the type for a factor (torch/_decomp/decompositions.py, ``addmm``; torch/_meta_registrations.py)."""

    def run(*args: Any, out: torch.Tensor | None = None, **_factors: Any) -> torch.Tensor:
        product: torch.Tensor = plain(*args[-3:-1])
        return product.to(args[-1]) if out is None else out.resize_(product.shape)

    return run


_IN_ANOTHER_TYPE = {"mm": aten.mm, "bmm": aten.bmm, "addmm": aten.mm, "baddbmm": aten.bmm}
KERNELS: dict[OpOverload, Kernel] = existing(
    {
        f"{name}.{overload}": _in_another_type(plain.default)
        for name, plain in _IN_ANOTHER_TYPE.items()
        for overload in ("dtype", "dtype_out")
    }
)


def _grouped_product(gpu: GPU, call: Call) -> None:
    """aten/src/ATen/native/cuda/GroupMM.cu: pointers and sizes of each group, and the workspace of CUTLASS.

    It runs on 9.0 and 10.x with bfloat16; elsewhere the groups are multiplied one by one into the output. The bytes of
    the workspace per multiprocessor were observed with the CUDA build of PyTorch 2.13.
    """
    first, second = call.args[:2]
    if gpu.capability[0] not in (9, 10) or first.dtype is not torch.bfloat16:
        return
    call.output(0)
    num_groups = next(tensor.shape[0] for tensor in (second, *call.args[2:3], first) if tensor.dim() != 2)
    num_aligned = num_groups + num_groups % 2  # to 128 bits
    call.take((3 * _POINTER) * num_aligned + (3 * _POINTER + 3 * torch.int32.itemsize) * num_groups)
    is_backward = first.dim() == second.dim() == 2
    each = 512 if gpu.capability[0] == 9 else 5888 if is_backward else 5376
    call.take(each * gpu.num_multiprocessors)


def _copy_factors(call: Call) -> None:
    tensors = [tensor for tensor in call.args[:3] if isinstance(tensor, torch.Tensor)]
    _check_types(*tensors[-2:])
    for position in range(len(call.outputs)):
        call.output(position)
    for tensor in (*tensors[:-2], *tensors[:-3:-1]):  # results lie in rows: the second factor is cuBLAS's first
        if not _is_readable(tensor):
            call.take_like(tensor)


def _check_types(first: torch.Tensor, second: torch.Tensor) -> None:
    """Raise CUDA's error, because tensors without data are multiplied whatever their types."""
    if first.dtype is not second.dtype:
        names = (_C_NAMES.get(tensor.dtype, str(tensor.dtype)) for tensor in (first, second))
        raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got: {' != '.join(names)}")


_C_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}


def _is_readable(matrix: torch.Tensor) -> bool:
    """Whether cuBLAS can read a matrix, or a batch, in its layout (cuda/Blas.cpp, ``prepare_matrix_for_cublas``): it
    conjugates what it turns around."""
    if matrix.dim() < 2:
        return not matrix.is_conj() and (matrix.numel() < 2 or matrix.stride(0) != 0)
    (rows, columns), (down, along) = matrix.shape[-2:], matrix.stride()[-2:]
    if along == 1 and down >= max(columns, 1):
        return not matrix.is_conj()
    return down == 1 and along >= max(rows, 1)
