"""What a dry run replaces in PyTorch: one table of owners, and their attributes with what stands for them.

What a library needs replaced is in the tables of ``libraries`` and ``distributed``, what a compiler does in
``compiled``; files, threads and the user's tensors are kept safe in ``isolation``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.utils.dlpack

from oom_magic.predict.compiled.calls import scripted_as_written
from oom_magic.predict.distributed.data_parallel import data_parallel_followed
from oom_magic.predict.fake_cuda.cuda_build import cuda_build, fast_paths, grouped_by_place, triton_kernels_skipped
from oom_magic.predict.fake_cuda.device_view import (
    DeviceView,
    saved_tensor_hooks_followed,
    shared_by_dlpack,
    shown_without_values,
)
from oom_magic.predict.fake_cuda.graphs import graphs_followed
from oom_magic.predict.fake_cuda.legacy_types import legacy_types
from oom_magic.predict.fake_cuda.torch_cuda import Cards, torch_cuda_answers
from oom_magic.predict.fake_cuda.transfers import storages_followed
from oom_magic.predict.instrumentation.autograd_order import AutogradOrder
from oom_magic.predict.isolation.context import python_functions_followed
from oom_magic.predict.isolation.patching import Patches


def torch_patches(cards: Cards, view: DeviceView, assume: Callable[[str], None]) -> Patches:
    """The table for these cards. The originals are those at the time of the call."""
    gpu, autocast, dlpack = cards.gpu, cards.gpu.autocast, shared_by_dlpack()
    run_backward = AutogradOrder().around(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
    return [
        *torch_cuda_answers(cards),
        *legacy_types(),
        *graphs_followed(gpu),
        *cuda_build(gpu),
        *fast_paths(assume),
        *grouped_by_place(gpu),
        *triton_kernels_skipped(assume),
        *data_parallel_followed(gpu),
        *python_functions_followed(),
        (torch, {"clear_autocast_cache": autocast.clear, "set_autocast_enabled": autocast.set_enabled}),
        (torch.autograd, {"_engine_run_backward": run_backward}),
        (torch.jit, {"script": scripted_as_written(torch.jit.script)}),
        (torch.UntypedStorage, storages_followed(gpu)),
        (torch._tensor_str, shown_without_values(view)),
        (torch._C._autograd, saved_tensor_hooks_followed(view)),
        (torch._C, dlpack),
        (torch.utils.dlpack, {"to_dlpack": dlpack["_to_dlpack"]}),
    ]
