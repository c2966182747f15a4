"""Copies between the host and the pretend GPU, below autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.memory.categories import Category
from oom_magic.predict.pretend.pretend_gpu import META, Handler, Place, PretendGPU, is_large

aten = torch.ops.aten


def _to_copy(gpu: PretendGPU, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """``Tensor.to`` that copies: to the place that ``creating`` names, else to where the source is."""
    source = args[0]
    origin = gpu.place(source)
    device = kwargs.get("device")
    # C++ code takes the device from another tensor, "meta" where nobody named a place: that tensor is on the GPU.
    place = gpu.creating or Place.GPU if device is not None and device.type == "meta" else origin
    if device is not None and device.type == "cpu" and gpu.creating is None:
        place = Place.HOST
    if origin is None and place in (None, Place.HOST):
        return func(*args, **kwargs)
    if place is Place.GPU and origin is Place.GPU:
        return gpu.run(func, args, {**kwargs, "device": META})
    out = func(*args, **{**kwargs, "device": META, "non_blocking": False})
    if place is Place.HOST and not is_large(out):
        values = gpu.values.read(source)
        return torch.empty_strided(out.size(), out.stride(), dtype=out.dtype, device="cpu").copy_(values)
    gpu.adopt(out, place or Place.GPU, func.name())
    gpu.values.copy(source, out)
    if place is Place.GPU:
        gpu.assign(out, Category.INPUT)
    return out


def _copy(gpu: PretendGPU, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """``Tensor.copy_`` within and between host and GPU."""
    target, source = args[0], args[1]
    if gpu.place(target) is not None or gpu.place(source) is not None:
        gpu.values.copy(source.expand(target.shape), target)
        return target
    return func(*args, **kwargs)


HANDLERS: dict[OpOverload, Handler] = {
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
}
