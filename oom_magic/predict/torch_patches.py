"""The attributes that a dry run replaces in PyTorch, by owner, with their replacements.

What a library needs replaced is in the tables of ``libraries`` and ``distributed``, what a compiler does in
``compiled``; files, threads and the user's tensors are kept safe in ``isolation``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.backends.cudnn.rnn
import torch.cuda.nccl
import torch.utils.dlpack
from torch.autograd.profiler import record_function

from oom_magic.language import _
from oom_magic.predict.compiled.torchscript import torchscript_as_written
from oom_magic.predict.distributed.data_parallel import data_parallel_followed
from oom_magic.predict.fake_cuda.device_view import (
    DeviceView,
    saved_tensor_hooks_followed,
    shown_without_values,
)
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.graphs import graphs_followed
from oom_magic.predict.fake_cuda.legacy_types import legacy_types
from oom_magic.predict.fake_cuda.not_followed import refused_by_name, without_effect
from oom_magic.predict.fake_cuda.places import Place
from oom_magic.predict.fake_cuda.torch_cuda import Cards, torch_cuda_answers
from oom_magic.predict.fake_cuda.transfers import shared_by_dlpack, storages_followed
from oom_magic.predict.instrumentation.autograd_order import AutogradOrder
from oom_magic.predict.isolation.context import python_functions_followed
from oom_magic.predict.isolation.patching import Patches, StandIn
from oom_magic.predict.isolation.process.process_state import environment_kept
from oom_magic.predict.isolation.scripted_modules import moved_in_script
from oom_magic.predict.kernels import recurrent
from oom_magic.predict.operators.attention import attention_in_transforms
from oom_magic.predict.operators.nested_attention import nested_attention_followed

with environment_kept():  # the compiler writes the folder of its caches there
    import_module("torch._dynamo.device_interface")  # its classes copy torch.cuda's functions: before they are replaced


def torch_patches(cards: Cards, view: DeviceView, assume: Callable[[str], None]) -> Patches:
    """The patches for these cards. They wrap the attributes that PyTorch has at the time of the call."""
    gpu, autocast, dlpack = cards.gpu, cards.gpu.autocast, shared_by_dlpack()
    original: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    run_backward = autocast.counting_apart(gpu.noting_watchers(AutogradOrder().around(original)))
    return [
        *torch_cuda_answers(cards),
        *legacy_types(),
        *refused_by_name(),
        *without_effect(assume),
        *graphs_followed(gpu),
        *cuda_build(gpu),
        *fast_paths(assume),
        *grouped_by_place(gpu),
        *marked_when_recorded(),
        *data_parallel_followed(gpu),
        *python_functions_followed(),
        (
            torch,
            {
                "autocast_decrement_nesting": autocast.decrement,
                "clear_autocast_cache": autocast.clear,
                "set_autocast_enabled": autocast.set_enabled,
            },
        ),
        (torch.autograd, {"_engine_run_backward": run_backward}),
        (torch.nn.functional, attention_in_transforms(gpu.is_on_gpu, gpu.card.capability)),
        *nested_attention_followed(gpu.card.capability, autocast),
        *torchscript_as_written(assume),
        (torch.jit.ScriptModule, {"_apply": moved_in_script(torch.jit.ScriptModule._apply)}),
        (torch.UntypedStorage, storages_followed(gpu)),
        (torch._tensor_str, shown_without_values(view)),
        (torch._C._autograd, saved_tensor_hooks_followed(view)),
        (torch._C, dlpack),
        (torch.utils.dlpack, {"to_dlpack": dlpack["_to_dlpack"]}),
    ]


def grouped_by_place(gpu: FakeGPU) -> Patches:
    """Grouping of tensors by device, for ``clip_grad_norm_`` and optimizers, with the devices of fake tensors."""
    group: Callable[..., Any] = torch._C._group_tensors_by_device_and_dtype

    def grouped(lists: list[list[Any]], with_indices: bool = False) -> dict[tuple[Any, Any], Any]:
        found: dict[tuple[Any, Any], Any] = {}
        for (device, dtype), (columns, indices) in group(lists, with_indices).items():
            locations = [None if tensor is None else gpu.location(tensor) for tensor in columns[0]]
            for location in dict.fromkeys(locations):
                chosen = [position for position, other in enumerate(locations) if other == location]
                where = device if location is None or location.place is not Place.GPU else location.device
                there = [[column[position] for position in chosen] if column else column for column in columns]
                found[where, dtype] = (there, [indices[position] for position in chosen] if indices else indices)
        return found

    return [(torch._C, {"_group_tensors_by_device_and_dtype": grouped})]


_NCCL_VERSION = (2, 29, 7)  # that of PyTorch 2.13


def cuda_build(gpu: FakeGPU) -> Patches:
    """PyTorch answers as a build with CUDA and cuDNN does."""
    cudnn = {
        "is_acceptable": lambda tensor: recurrent.is_acceptable(gpu, tensor),
        "is_available": lambda: True,
        "version": lambda: 91000,
    }
    return [
        (torch, {"Generator": _Generator, "_use_cudnn_rnn_flatten_weight": lambda: True}),
        (torch._C, {"_get_accelerator": lambda *_unused: torch.device("cuda")}),
        (torch.backends.cudnn, cudnn),
        (torch.backends.cudnn.rnn, {"get_cudnn_mode": recurrent.MODES.__getitem__}),
        (torch.cuda, {"default_generators": tuple(_DeviceGenerator() for _unused in gpu.recorders)}),
        (torch.cuda.nccl, {"version": lambda: _NCCL_VERSION}),
        # not in the device view: a fake stream would be rejected earlier
        (torch.Tensor, {"record_stream": lambda tensor, stream: None}),
    ]


def marked_when_recorded() -> Patches:
    """``record_function`` marks the code for a profiler that is on; FSDP marks a hundred places in each step."""
    begin, end = record_function.__enter__, record_function.__exit__

    def __enter__(self: record_function) -> record_function:  # noqa: N807
        return begin(self) if torch.autograd._profiler_enabled() else self  # type: ignore[attr-defined]

    def __exit__(self: record_function, *error: Any) -> None:  # noqa: N807
        if self.record is not None:
            end(self, *error)

    return [(record_function, {"__enter__": __enter__, "__exit__": __exit__})]


def fast_paths(assume: Callable[[str], None]) -> Patches:
    """In evaluation ``nn.TransformerEncoder`` and its parts run fused, unless a mode such as ours watches them."""

    def has_torch_function(tensors: Sequence[Any]) -> bool:
        plain = torch._C._disabled_torch_function_impl, torch.Tensor.__torch_function__
        return any(getattr(type(tensor), "__torch_function__", plain[0]) not in plain for tensor in tensors)

    def _nested_tensor_from_mask_left_aligned(*_unused: Any) -> bool:
        assume(_("nn.TransformerEncoder: padding is computed too; PyTorch skips it in evaluation (nested tensors)"))
        return False

    return [
        (torch, {"_nested_tensor_from_mask_left_aligned": _nested_tensor_from_mask_left_aligned}),
        (torch.overrides, {"has_torch_function": has_torch_function}),
    ]


class _Generator(torch.Generator, metaclass=StandIn):
    """A host generator for any device: the pretend GPU draws no random numbers."""

    original = torch.Generator

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


class _DeviceGenerator(_Generator):
    """A card's generator: compiled code exchanges its state to repeat the forward's random numbers."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of the generator."""
        return torch.device("cuda", 0)

    def clone_state(self) -> _DeviceGenerator:
        """Another generator."""
        return _DeviceGenerator()

    def graphsafe_get_state(self) -> _DeviceGenerator:
        """Its state."""
        return self

    def graphsafe_set_state(self, state: torch.Generator) -> None:  # type: ignore[override]
        """Does nothing: no number is drawn."""
