"""The copies of sharded training between shards and whole parameters, and the memory that CUDA's kernels take for them.

Sources: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (FSDP2's own operators) and
aten/src/ATen/native/cuda/TensorShape.cu (the kernels under them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import Handler
from oom_magic.predict.isolation.patching import Patches
from oom_magic.predict.operators.calls import Call
from oom_magic.predict.operators.gradients import is_dense
from oom_magic.predict.operators.known_values.values import is_random
from oom_magic.predict.setups.gpus import GPU

_BLOCK_THREADS = 128  # BLOCK_SIZE
_BLOCK_BYTES = 16 * _BLOCK_THREADS  # BYTES_PER_BLOCK
_LONG_BYTES = 8


def _split(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``split_with_sizes_copy_out_cuda``: what was gathered, into the whole parameters."""
    source, sizes, dim = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("dim", 0)
    out = kwargs["out"]
    if _are_dense([source, *out]) and all(tensor.dtype is source.dtype for tensor in out):
        row_bytes = source.stride(dim) * source.element_size()
        chunks = math.prod(source.shape[:dim])
        _take_table(gpu, func, args, kwargs, _split_table_bytes, chunks, *(size * row_bytes for size in sizes))
    _forget(gpu, out)


def _chunk_cat(gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``_chunk_cat_out_cuda``: gradients, padded, into the input of a reduce-scatter."""
    tensors = args[0]
    dim, num_chunks, out = args[1], args[2], kwargs["out"]
    dtype = tensors[0].dtype
    is_cast = dtype is torch.bfloat16 and out.dtype is torch.float32
    if _are_dense([*tensors, out]) and (dtype is out.dtype or is_cast):
        padded = [_padded_numel(tensor, dim, num_chunks) * out.element_size() // num_chunks for tensor in tensors]
        _take_table(gpu, func, args, kwargs, _chunk_table_bytes, *padded)
    else:  # composed of other operators: tensors that must be padded are copied
        call = Call(gpu, args, kwargs, None, func.name(), gpu.attribution.phase(False))
        for tensor in tensors:
            if tensor.shape[dim] % num_chunks:
                call.take(_padded_numel(tensor, dim, num_chunks) * tensor.element_size())
        call.end()
    _forget(gpu, [out])


def _take_table(
    gpu: FakeGPU, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], size_function: Any, *numbers: int
) -> None:
    """Addresses and sizes, which the kernel reads from the GPU (``pack_vecs``)."""
    call = Call(gpu, args, kwargs, None, func.name(), gpu.attribution.phase(False))
    call.allocate_scratch(size_function, *numbers)
    call.end()


def _split_table_bytes(card: GPU, num_chunks: int, *chunk_bytes: int) -> int:
    """``split_with_sizes_copy_out_cuda_contiguous_no_cast``: the table that the blocks of its grid read."""
    num_blocks = sum(-(-size // _BLOCK_BYTES) for size in chunk_bytes)
    most_blocks = card.num_multiprocessors * card.threads_per_multiprocessor // _BLOCK_THREADS * 2
    iterations = -(-num_blocks * num_chunks // most_blocks)
    chunks_per_block = min(math.ceil(math.sqrt(iterations)), num_chunks)
    bytes_per_block = _BLOCK_BYTES * -(-iterations // chunks_per_block)
    return _LONG_BYTES * (4 * len(chunk_bytes) + 1 + sum(-(-size // bytes_per_block) for size in chunk_bytes))


def _chunk_table_bytes(_: GPU, *chunk_bytes: int) -> int:
    """``get_chunk_cat_metadata``: likewise."""
    return _LONG_BYTES * (6 * len(chunk_bytes) + 2 + sum(-(-size // _BLOCK_BYTES) for size in chunk_bytes))


def _padded_numel(tensor: torch.Tensor, dim: int, num_chunks: int) -> int:
    rows = -(-tensor.shape[dim] // num_chunks) * num_chunks
    return rows * math.prod(tensor.shape[dim + 1 :]) * math.prod(tensor.shape[:dim])


def _are_dense(tensors: Sequence[torch.Tensor]) -> bool:
    return all(map(is_dense, tensors))


def _forget(gpu: FakeGPU, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        gpu.values.forget(tensor.untyped_storage()._cdata)


def sharding_handlers() -> dict[OpOverload, Handler]:
    """What runs in place of FSDP2's own operators, where they are loaded."""
    named = {"split_with_sizes_copy": _split, "chunk_cat": _chunk_cat}
    fsdp = torch.ops.fsdp
    return {getattr(fsdp, name).default: run for name, run in named.items() if hasattr(fsdp, name)}


def shapes_found_aside(propagator: type) -> Patches:
    """DTensor infers the shapes of results with fake tensors, which take no memory.

    Random numbers written into a tensor leave its shape: fake ones are copied, and ``Tensor.copy_`` asks for CUDA.
    """
    names = [name for name in ("_propagate_tensor_meta_non_cached",) if hasattr(propagator, name)]

    def aside(original: Any) -> Any:
        def propagate(self: Any, op_schema: Any) -> Any:
            if is_random(op_schema.op) and op_schema.is_inplace_op():
                return op_schema.args_schema[0].tensor_meta
            with _disable_current_modes():
                return original(self, op_schema)

        return propagate

    return [(propagator, {name: aside(getattr(propagator, name)) for name in names})]
