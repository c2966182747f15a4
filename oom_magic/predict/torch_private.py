"""Every private name of PyTorch that a dry run depends on, and its purpose.

They change without notice. So they are looked up once, before the first dry run or compilation replaces anything, and
one sentence names those that a new PyTorch lacks. Those of every run are there in 2.6, 2.13 and 2.15.
``tests/test_torch_private.py`` keeps the tables complete.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from oom_magic.language import _

Names = Mapping[str, tuple[str, ...]]  # what for: the names

EVERY_RUN: Names = {
    "operators are seen, and left alone for a moment": (
        "torch._C.DisableTorchFunction", "torch._C._DisableTorchDispatch", "torch._C._disabled_torch_function_impl",
        "torch._C._EnableTorchFunction", "torch._C._are_functorch_transforms_active",
        "torch._C._len_torch_dispatch_stack",
        "torch.overrides._get_current_function_mode_stack", "torch.utils._python_dispatch.TorchDispatchMode",
        "torch._C._len_torch_dispatch_stack",
        "torch._ops.OpOverload",
    ),
    "CUDA's operators take the place of the CPU's": (
        "torch._C.DispatchKey", "torch._C._dispatch_has_kernel_for_dispatch_key", "torch._decomp.decomposition_table",
        "torch._C._functorch", "torch._library.custom_ops", "torch._C._jit_get_schemas_for_operator",
        "torch._library.fake_impl.set_ctx_getter", "torch._library.simple_registry.singleton",
        "torch._prims_common", "torch.utils._pytree.tree_leaves", "torch.utils._pytree.tree_map",
        "torch._C._dispatch_get_all_op_names", "torch._C._dispatch_tls_local_exclude_set",
        "torch._C._dispatch_tls_local_include_set", "torch._C._ForceDispatchKeyGuard",
        "torch.ops.aten._ctc_loss", "torch.ops.aten._ctc_loss_backward", "torch.ops.aten._efficientzerotensor",
        "torch.ops.aten._pack_padded_sequence",
    ),
    "tensors say that they are on a GPU, and are exchanged": (
        "torch._C._from_dlpack", "torch._C._nn._parse_to", "torch._C._swap_tensor_impl",
        "torch._has_compatible_shallow_copy_type",
        "torch._tensor_str._str", "torch._tensor", "torch._C._autograd._push_saved_tensors_default_hooks",
        "torch._GLOBAL_DEVICE_CONTEXT", "torch.utils._foreach_utils", "torch._C._set_grad_enabled",
    ),
    "what autograd does is followed": (
        "torch._C._autograd", "torch._C._current_autograd_node", "torch._C._current_graph_task_id",
        "torch._C._storage_Use_Count", "torch.autograd._engine_run_backward", "torch.autograd._get_sequence_nr",
        "torch.utils.checkpoint._DEFAULT_DETERMINISM_MODE",
        "torch.utils.checkpoint._allowed_determinism_checks_to_fns",
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
    ),
    "tensors are saved and loaded without data": (
        "torch.Tensor._reduce_ex_internal", "torch._utils", "torch._utils._rebuild_tensor",
    ),
    "batches are loaded in this process": (
        "torch.utils.data._utils", "torch.utils.data.dataloader._SingleProcessDataLoaderIter",
        "torch.utils.data.dataloader._DatasetKind",
    ),
    "settings are put back": (
        "torch.serialization._package_registry", "torch._C._jit_can_fuse_on_cpu", "torch._C._jit_can_fuse_on_gpu",
        "torch._C._jit_override_can_fuse_on_cpu", "torch._C._jit_override_can_fuse_on_gpu",
        "torch._logging._internal", "torch.jit._state._enabled",
    ),
    "modes and hooks that code left open are taken away": (
        "torch._C._len_torch_function_stack", "torch._C._pop_torch_function_stack",
        "torch._C._push_on_torch_function_stack", "torch._C._pop_torch_dispatch_stack",
        "torch._C._push_on_torch_dispatch_stack", "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "torch.utils._device", "torch.utils._python_dispatch",
        "torch.autograd.forward_ad._current_level", "torch.autograd._disable_profiler",
        "torch.autograd._profiler_enabled", "torch.autograd.profiler._run_on_profiler_stop",
    ),
    "nn.DataParallel": ("torch.nn.parallel._functions.Broadcast",),
    "torch.compile is noticed": ("torch._jit_internal.createResolutionCallbackFromFrame",),
}  # fmt: skip
COMPILED: Names = {
    "Dynamo compiles for the pretend card, and is as before afterwards": (
        "torch._C._dynamo.eval_frame._debug_get_cache_entry_list",
        "torch._C._dynamo.eval_frame.reset_code",
        "torch._dynamo.convert_frame",
        "torch._dynamo.device_interface.DeviceInterface",
        "torch._dynamo.exc.Unsupported",
        "torch._dynamo.exc.UserError",
        "torch._dynamo.guards",
        "torch._dynamo.pgo",
        "torch._dynamo.trace_rules",
        "torch._dynamo.types.ConvertFrameReturn",
        "torch._dynamo.types.FrameAction",
        "torch._dynamo.types.FrameExecStrategy",
        "torch._dynamo.utils.CleanupManager.instance._remove_id",
        "torch._dynamo.variables.optimizer.OptimizerVariable",
        "torch._guards.CompileContext",
    ),
    "what Inductor generates runs on it": (
        "torch._inductor.async_compile",
        "torch._inductor.codecache.FxGraphCache",
        "torch._inductor.cpu_vec_isa",
        "torch._inductor.compile_fx._compile_fx_inner",
        "torch._inductor.constant_folding.ConstantFolder",
        "torch._inductor.fx_passes.joint_graph",
        "torch._inductor.fx_passes.pad_mm",
        "torch._inductor.graph",
        "torch._inductor.runtime.triton_helpers",
        "torch._inductor.runtime.triton_heuristics",
        "torch._prims.rng_prims.graphsafe_run_with_rng_state",
    ),
    "the compiler's own fake tensors": (
        "torch.Tensor._make_subclass",
        "torch._C._conv_determine_backend_memory_format",
        "torch._C._len_torch_function_stack",
        "torch._C._pop_torch_function_stack",
        "torch._C._push_on_torch_function_stack",
        "torch._from_functional_tensor",
        "torch._functorch",
        "torch._guards.TracingContext",
        "torch._subclasses.FakeTensor",
        "torch._subclasses.FakeTensorMode",
        "torch._subclasses.fake_tensor.unset_fake_temporarily",
        "torch._subclasses.functional_tensor.FunctionalTensor",
        "torch._subclasses.functional_tensor.FunctionalTensorMode",
        "torch._subclasses.meta_utils.MetaTensorDescriber",
        "torch.ops.aten._to_copy",
        "torch.utils._python_dispatch._disable_current_modes",
        "torch.utils._pytree.tree_map_only",
    ),
}
DISTRIBUTED: Names = {
    "a process of a job is followed": (
        "torch._C._distributed_c10d.Work",
        "torch._C._distributed_c10d._create_work_from_future",
        "torch.distributed._functional_collectives.AsyncCollectiveTensor",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
        "torch.ops._c10d_functional",
        "torch.testing._internal.distributed.fake_pg",
        "torch.utils._python_dispatch._disable_current_modes",
    ),
}
_checked: set[int] = set()  # the tables, by identity


def missing(names: Names = EVERY_RUN) -> dict[str, str]:
    """The names that this PyTorch should have and does not, and what each is for."""
    return {name: purpose for purpose, group in names.items() for name in group if not _is_there(name)}


def check(names: Names = EVERY_RUN) -> None:
    """Raises RuntimeError, which names the missing names, before anything changes; each table is checked once."""
    if id(names) in _checked:
        return
    lost = missing(names)
    if lost:
        listed = ", ".join(f"{name} ({purpose})" for name, purpose in lost.items())
        text = _(
            "PyTorch {version} no longer has {names}, on which a dry run rests; use a version that oom_magic knows.",
            version=torch.__version__,
            names=listed,
        )
        raise RuntimeError(text)
    _checked.add(id(names))


def _is_there(name: str) -> bool:
    """Whether a dotted name leads to something; modules on its way are imported."""
    module, *rest = name.split(".")
    found: Any = importlib.import_module(module)
    path = module
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            try:
                importlib.import_module(path)
            except ImportError:
                return False
        found = getattr(found, part, None)
    return found is not None or name == "torch._GLOBAL_DEVICE_CONTEXT"
