"""Every private name of PyTorch that oom_magic depends on, its purpose, and the versions that have it.

They change without notice. So each table is looked up once, before a dry run (or a compilation, or a process group)
replaces anything, and one sentence names what a new PyTorch lacks. Tried with PyTorch 2.6, 2.13 and 2.15: they have all
that ``OPTIONAL`` and the comments do not except. ``tests/dry_run/test_torch_private.py`` keeps the tables complete.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch

from oom_magic.language import _
from oom_magic.one_line_errors import PyTorchMissingError

Names = Mapping[str, tuple[str, ...]]  # what for: the names


def _in(owner: str, names: str) -> tuple[str, ...]:
    return tuple(f"{owner}.{name}" for name in names.split())


EVERY_RUN: Names = {
    "operators are seen, and left alone for a moment": (
        *_in("torch._C", "DisableTorchFunction _DisableTorchDispatch _EnableTorchFunction"),
        *_in("torch._C", "_are_functorch_transforms_active _disabled_torch_function_impl"),
        "torch.overrides._get_current_function_mode_stack",
        *_in("torch.utils._python_dispatch", "TorchDispatchMode _disable_current_modes"),
        *_in("torch._ops.OpOverload", "_op_dk _overloadname _schema"),
        "torch.library._defs",
    ),
    "CUDA's operators take the place of the CPU's": (
        *_in("torch._C", "DispatchKey _ForceDispatchKeyGuard _dispatch_get_all_op_names"),
        *_in("torch._C", "_dispatch_has_kernel_for_dispatch_key _get_accelerator _jit_get_schemas_for_operator"),
        *_in("torch._C", "_dispatch_tls_local_exclude_set _dispatch_tls_local_include_set"),
        *_in("torch._C._functorch", "get_unwrapped is_functorch_wrapped_tensor is_legacy_batchedtensor"),
        "torch._VF",
        "torch._decomp.decomposition_table",
        "torch._library.fake_impl.set_ctx_getter",
        "torch._library.simple_registry.singleton",
        "torch._nested_tensor_from_mask_left_aligned",
        "torch._remove_batch_dim",
        "torch._tensor",
        *_in("torch._prims_common", "compute_elementwise_output_strides make_contiguous_strides_for"),
        "torch._prims_common.suggest_memory_format",
        "torch._use_cudnn_rnn_flatten_weight",
        *_in("torch.utils._pytree", "tree_leaves tree_map"),
    ),
    "their names": (
        *_in("torch.ops", "_c10d_functional _c10d_functional_autograd _dtensor _native _quantized"),
        *_in("torch.ops.aten", "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"),
        *_in("torch.ops.aten", "_addmm_activation _cdist_backward _trilinear _upsample_bicubic2d_aa"),
        "torch.ops.aten._upsample_bilinear2d_aa",
        *_in("torch.ops.aten", "_adaptive_avg_pool3d _upsample_nearest_exact2d _upsample_nearest_exact3d"),
        *_in("torch.ops.aten", "_amp_foreach_non_finite_check_and_unscale_ _coalesce _ctc_loss _ctc_loss_backward"),
        *_in("torch.ops.aten", "_cudnn_rnn _cudnn_rnn_backward _cudnn_rnn_flatten_weight _dirichlet_grad"),
        *_in(
            "torch.ops.aten", "_fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_tensor_affine"
        ),
        *_in("torch.ops.aten", "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"),
        "torch.ops.aten._fused_moving_avg_obs_fq_helper",
        *_in("torch.ops.aten", "_fft_c2c _fft_c2r _fft_r2c _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex"),
        *_in("torch.ops.aten", "_linalg_svd _unsafe_index _unsafe_index_put"),
        *_in("torch.ops.aten", "_efficientzerotensor _embedding_bag _embedding_bag_backward _euclidean_dist"),
        *_in("torch.ops.aten", "_embedding_bag_dense_backward _embedding_bag_forward_only"),
        *_in("torch.ops.aten", "_embedding_bag_sparse_backward _foreach_norm _fused_rms_norm"),
        *_in("torch.ops.aten", "_fused_rms_norm_backward _grouped_mm _index_put_impl_ _is_all_true"),
        *_in("torch.ops.aten", "_local_scalar_dense _log_softmax _log_softmax_backward_data"),
        *_in("torch.ops.aten", "_native_multi_head_attention _pack_padded_sequence _pdist_backward _reshape_copy"),
        *_in("torch.ops.aten", "_safe_softmax _sample_dirichlet _scaled_dot_product_attention_math"),
        *_in("torch.ops.aten", "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward"),
        *_in("torch.ops.aten", "_scaled_dot_product_efficient_attention"),
        *_in("torch.ops.aten", "_scaled_dot_product_efficient_attention_backward"),
        *_in("torch.ops.aten", "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward"),
        *_in("torch.ops.aten", "_softmax _softmax_backward_data _sparse_coo_tensor_with_dims_and_tensors"),
        *_in(
            "torch.ops.aten", "_standard_gamma _standard_gamma_grad _thnn_fused_gru_cell _thnn_fused_gru_cell_backward"
        ),
        *_in("torch.ops.aten", "_thnn_fused_lstm_cell _to_copy _to_dense _transformer_encoder_layer_fwd"),
        *_in("torch.ops.aten", "_unique2 _unsafe_view _upsample_bicubic2d_aa_backward"),
        *_in("torch.ops.aten", "_upsample_bilinear2d_aa_backward _upsample_nearest_exact1d"),
        *_in("torch.ops.aten", "_upsample_nearest_exact1d_backward"),
        *_in("torch.ops.aten", "_upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward"),
        *_in("torch.ops.aten", "_weight_norm_interface_backward"),
    ),
    "tensors say that they are on a GPU, and are exchanged": (
        *_in("torch.Tensor", "_backward_hooks _base _cdata _is_view _post_accumulate_grad_hooks _version"),
        *_in("torch._C", "_WeakTensorRef _from_dlpack _set_grad_enabled _swap_tensor_impl"),
        *_in("torch._C", "_to_dlpack _to_dlpack_versioned"),
        "torch._C._nn._parse_to",
        "torch.jit.ScriptModule._apply",
        "torch._has_compatible_shallow_copy_type",
        *_in("torch._tensor_str", "PRINT_OPTS _str"),
        *_in("torch.nn.Module", "_backward_hooks _buffers _parameters"),
        "torch._C._group_tensors_by_device_and_dtype",
    ),
    "torch.cuda answers for the pretend card": (
        *_in("torch._C", "_cuda_clearCublasWorkspaces _cuda_getCurrentRawStream _host_emptyCache"),
        *_in("torch.cuda", "_DeviceGuard _exchange_device _lazy_init _maybe_exchange_device _sleep"),
        *_in("torch.cuda.memory", "_get_memory_metadata _record_memory_history _save_memory_usage"),
        *_in("torch.cuda.memory", "_save_segment_usage _set_allocator_settings _set_memory_metadata _snapshot"),
        "torch.cuda.nvtx._nvtx",
    ),
    "what autograd does is followed": (
        *_in("torch._C", "_current_autograd_node _current_graph_task_id _storage_Use_Count"),
        *_in("torch._C._autograd", "_push_saved_tensors_default_hooks"),
        "torch.Tensor._use_count",
        *_in("torch.autograd", "_engine_run_backward _get_sequence_nr"),
        *_in("torch._C._FunctionBase", "_input_metadata _sequence_nr _set_sequence_nr"),
        *_in("torch.utils.checkpoint", "_DEFAULT_DETERMINISM_MODE _allowed_determinism_checks_to_fns"),
        *_in("torch.utils.checkpoint", "_checkpoint_debug_enabled _checkpoint_without_reentrant_generator"),
        *_in("torch.utils.checkpoint", "_enable_checkpoint_early_stop"),
        "torch.utils.checkpoint.DefaultDeviceType._default_device_type",
    ),
    "kernels that attend to nested tensors": (
        *_in("torch.nested._internal.sdpa", "_autocast _is_computing_meta_flops _select_sdp_backend"),
        *_in("torch.nested._internal.sdpa", "_can_use_flash_sdpa_jagged _can_use_efficient_sdpa_jagged"),
        *_in("torch.nested._internal.nested_tensor.NestedTensor", "__torch_dispatch__ __torch_function__"),
        *_in("torch.ops.aten", "_efficient_attention_backward _efficient_attention_forward"),
        *_in("torch.ops.aten", "_flash_attention_backward _flash_attention_forward _padded_dense_to_jagged_forward"),
    ),
    "tensors are saved and loaded without data": (
        "torch.Tensor._reduce_ex_internal",
        "torch._utils._rebuild_tensor",
    ),
    "batches are loaded in this process": (
        "torch.utils.data._utils.pin_memory",
        "torch.utils.data._utils.worker._worker_info",
        *_in("torch.utils.data.dataloader", "_DatasetKind _SingleProcessDataLoaderIter"),
        "torch.utils.data.dataloader.DataLoader._get_iterator",
        *_in("torch.utils.data.dataloader._BaseDataLoaderIter", "_dataset_kind _num_yielded _sampler_iter"),
    ),
    "settings are put back": (
        *_in("torch._C", "_jit_can_fuse_on_cpu _jit_can_fuse_on_gpu _jit_override_can_fuse_on_cpu"),
        *_in("torch._C", "_jit_override_can_fuse_on_gpu _jit_set_fusion_strategy _jit_set_profiling_executor"),
        "torch._C._jit_set_profiling_mode",
        "torch._logging._internal.log_state",
        "torch.nn.utils.parametrize._cache",
        "torch.distributions.distribution.Distribution._validate_args",
        "torch.hub._hub_dir",
        "torch.jit._state._enabled",
        *_in("torch.nn.modules.module", "_EXTRA_STATE_KEY_SUFFIX _global_backward_hooks _global_backward_pre_hooks"),
        *_in("torch.nn.modules.module", "_global_buffer_registration_hooks _global_forward_hooks"),
        *_in("torch.nn.modules.module", "_global_forward_hooks_always_called _global_forward_pre_hooks"),
        *_in("torch.nn.modules.module", "_global_is_full_backward_hook _global_module_registration_hooks"),
        "torch.nn.modules.module._global_parameter_registration_hooks",
        "torch.optim.lbfgs._strong_wolfe",
        *_in("torch.optim.optimizer", "_global_optimizer_post_hooks _global_optimizer_pre_hooks"),
        "torch.serialization._package_registry",
    ),
    "operators that code registers are taken back": (
        *_in("torch._C", "FunctionSchema parse_schema"),
        *_in("torch._library.custom_ops", "OPDEFS OPDEF_TO_LIB"),
        "torch.library._impls",
        *_in("torch.library.Library", "_destroy _impl_with_aoti_compile _op_defs _register_effectful_op"),
        *_in("torch.library.Library", "_register_fake _register_torch_dispatch_rule"),
    ),
    "modes and hooks that code left open are taken away": (
        "torch._GLOBAL_DEVICE_CONTEXT",
        *_in("torch._C", "_len_torch_dispatch_stack _len_torch_function_stack _pop_torch_dispatch_stack"),
        *_in("torch._C", "_dispatch_tls_set_dispatch_key_excluded _dispatch_tls_set_dispatch_key_included"),
        *_in("torch._C", "_pop_torch_function_stack _push_on_torch_dispatch_stack _push_on_torch_function_stack"),
        *_in("torch._C._autograd", "_pop_saved_tensors_default_hooks _saved_tensors_hooks_disable"),
        *_in("torch._C._autograd", "_saved_tensors_hooks_enable _saved_tensors_hooks_get_disabled_error_message"),
        "torch._C._autograd._top_saved_tensors_default_hooks",
        *_in("torch._C._functorch", "get_dynamic_layer_stack_depth pop_dynamic_layer_stack"),
        *_in("torch.autograd", "_disable_profiler _profiler_enabled"),
        "torch.autograd.forward_ad._current_level",
        "torch.autograd.profiler._run_on_profiler_stop",
        "torch.inference_mode._inference_mode_context",
        "torch.utils._device.CURRENT_DEVICE",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    ),
    "nn.DataParallel": _in("torch.nn.parallel._functions", "Broadcast _get_stream"),
    "torch.compile is noticed": (
        "torch._jit_internal.createResolutionCallbackFromFrame",
        "torch.nn.Module._compiled_call_impl",
    ),
}
COMPILED: Names = {  # 2.6 lacks some; there compiled code is followed as if it were not
    "Dynamo compiles for the pretend card, and is as before afterwards": (
        *_in("torch._C._dynamo.eval_frame", "_debug_get_cache_entry_list reset_code"),
        "torch._C._dynamo.guards._empty_strided_cuda",
        *_in("torch._dynamo.cache_size", "CacheSizeRelevantForFrame compute_cache_size"),
        *_in("torch._dynamo.convert_frame", "CatchErrorsWrapper FRAME_COMPILE_COUNTER"),
        "torch._dynamo.device_interface.DeviceInterface",
        *_in("torch._dynamo.device_interface", "device_interfaces init_device_reg"),
        "torch._dynamo.OptimizedModule._orig_mod",
        "torch._dynamo.backends.registry",
        "torch._dynamo.compiled_autograd.in_compiled_autograd_region",
        "torch._dynamo.config",
        "torch._dynamo.eval_frame._stance",
        *_in("torch._dynamo.exc", "Unsupported UserError"),
        *_in("torch._dynamo.guards", "CheckFunctionManager DeletedGuardManagerWrapper"),
        "torch._dynamo.mutation_guard.GenerationTracker.generation",
        *_in("torch._dynamo.pgo", "_CODE_STATE _INIT_CODE_STATE"),
        "torch._dynamo.trace_rules.check",
        *_in("torch._dynamo.types", "ConvertFrameReturn FrameAction FrameExecStrategy"),
        "torch._dynamo.utils.CleanupManager.instance._remove_id",
        "torch._dynamo.variables.optimizer.OptimizerVariable",
        "torch._dynamo.variables.torch.constant_fold_functions",
        "torch._C._DisableAutocast",
        "torch._guards.CompileContext",
        "torch.optim.SGD._init_group",
    ),
    "what Inductor generates runs on it": (
        "torch._functorch.aot_autograd.make_boxed_func",
        "torch._C._cuda_cudaCachingAllocator_is_enabled",
        "torch._inductor.async_compile",
        "torch._inductor.codecache.FxGraphCache",
        "torch._inductor.config",
        "torch._inductor.cpu_vec_isa",
        *_in("torch._inductor.compile_fx", "_compile_fx_inner fx_codegen_and_compile"),
        "torch._inductor.constant_folding.ConstantFolder",
        *_in(
            "torch._inductor.cudagraph_trees", "CUDAGraphTreeManager.format_dealloc_msg MarkStepBox.mark_step_counter"
        ),
        "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder._add_peephole_patterns",
        "torch._inductor.fx_passes.joint_graph.lazy_init",
        "torch._inductor.fx_passes.pad_mm",
        *_in("torch._inductor.graph", "GraphLowering"),
        "torch._inductor.graph.GraphLowering._compile_to_module_lines",
        "torch._inductor.runtime.benchmarking.InductorBenchmarker",
        "torch._inductor.runtime.hints.DeviceProperties",
        "torch._inductor.runtime.triton_helpers",
        "torch._inductor.runtime.triton_heuristics.unique_configs",
        *_in(
            "torch._inductor.select_algorithm",
            "AlgorithmSelectorCache.__call__ AlgorithmSelectorCache._is_extern create_inputs_key",
        ),
        "torch._prims.rng_prims.graphsafe_run_with_rng_state",
        "torch.utils._triton",
    ),
    "the compiler's own fake tensors": (
        *_in("torch._ops", "get_cached_ops resolve_key"),
        "torch.Tensor._make_subclass",
        "torch._C._conv_determine_backend_memory_format",
        "torch._dynamo.utils.run_node",
        "torch._from_functional_tensor",
        "torch._functorch.config",
        "torch._guards.TracingContext",
        *_in("torch._subclasses", "FakeTensor FakeTensorMode"),
        "torch._subclasses.fake_tensor.unset_fake_temporarily",
        *_in("torch._subclasses.functional_tensor", "FunctionalTensor FunctionalTensorMode"),
        "torch.utils._python_dispatch.autograd_would_have_decomposed",
        "torch._subclasses.functional_tensor.autograd_would_have_decomposed",
        "torch.fx.experimental.proxy_tensor.autograd_would_have_decomposed",
        "torch._subclasses.meta_utils.MetaTensorDescriber",
        "torch.utils._pytree.tree_map_only",
    ),
}
FLEX_ATTENTION: Names = {
    "flex_attention runs uncompiled": (
        *_in("torch._higher_order_ops.flex_attention", "create_fw_bw_graph flex_attention flex_attention_backward"),
        *_in("torch._higher_order_ops.flex_attention", "sdpa_dense sdpa_dense_backward"),
        "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",
        *_in("torch", "_guards.TracingContext _subclasses.FakeTensor"),
    ),
}
FUNCTION_TRANSFORMS: Names = {
    "when torch.func frees what it kept is said": ("torch._functorch.eager_transforms._autograd_grad",),
}
DISTRIBUTED: Names = {
    "a process of a job is followed": (
        *_in("torch._C._distributed_c10d", "HashStore Work _create_work_from_future"),
        *_in("torch._C._distributed_c10d", "_register_process_group _unregister_process_group"),
        "torch._C._distributed_c10d._verify_params_across_processes",
        "torch.distributed._functional_collectives.AsyncCollectiveTensor",
        *_in("torch.distributed.distributed_c10d", "_check_p2p_op_list _new_process_group_helper _pg_backend_config"),
        *_in("torch.distributed.distributed_c10d", "_pg_group_ranks _pg_map _pg_names _pg_to_tag _tags_to_pg"),
        *_in("torch.distributed.distributed_c10d", "_update_default_pg _world"),
        "torch.distributed.distributed_c10d.ProcessGroup._set_default_backend",
        "torch.nn.parallel.distributed.DistributedDataParallel._check_comm_hook",
        *_in("torch.ops._c10d_functional", "_wrap_tensor_autograd wait_tensor"),
        "torch.testing._internal.distributed.fake_pg",
    ),
    "a stage of a pipeline stands alone": (
        *_in("torch.distributed.pipelining._utils", "_StageBackwardMeta _StageForwardMeta _derive_grad_metas"),
        *_in("torch.distributed.pipelining.stage.PipelineStage", "_stage_meta _user_meta"),
        *_in("torch.distributed.pipelining.stage.PipelineStage", "_recv_meta _warmup_backward_result"),
        "torch.distributed.pipelining.stage.PipelineStage._warmup_forward_vote",
    ),
}
SHARDED: Names = {
    "parameters are sharded": (
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
        "torch.distributed.fsdp._fully_shard._fsdp_collectives",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._reshard_after_forward",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group",
        "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
    ),
}
MEASURED: Names = {  # used without a dry run, each where it is there
    "what a real GPU did": (
        *_in("torch._C", "DisableTorchFunctionSubclass _cuda_clearCublasWorkspaces _cuda_isHistoryEnabled"),
        "torch._C._cuda_memoryStats",
        *_in("torch.Tensor", "_indices _values"),
        "torch.cuda._initialized",
    ),
}
# Names that oom_magic does without where they are missing, by the versions that have them.
OPTIONAL: Names = {
    "2.13 and 2.15, not 2.6": (
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "torch._C._to_dlpack_versioned",
        *_in("torch.cuda.memory", "_get_memory_metadata _set_memory_metadata"),
        *_in("torch.distributed.pipelining._utils", "_StageBackwardMeta _StageForwardMeta _derive_grad_metas"),
        *_in("torch.distributed.pipelining.stage.PipelineStage", "_recv_meta _stage_meta _user_meta"),
        "torch.library.Library._register_effectful_op",
        "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",
        "torch.ops._c10d_functional._wrap_tensor_autograd",
        *_in("torch.ops.aten", "_fused_rms_norm _fused_rms_norm_backward _grouped_mm"),
    ),
    "2.13 alone": _in(
        "torch.distributed.pipelining.stage.PipelineStage", "_warmup_backward_result _warmup_forward_vote"
    ),
    "builds with CUDA": (
        *_in("torch._C", "_cuda_clearCublasWorkspaces _cuda_getCurrentRawStream _cuda_isHistoryEnabled"),
        *_in("torch._C", "_cuda_cudaCachingAllocator_is_enabled _cuda_memoryStats _host_emptyCache"),
    ),
}
_OPTIONAL = frozenset(name for group in OPTIONAL.values() for name in group)
_checked: set[int] = set()  # the tables, by identity


def missing(names: Names = EVERY_RUN) -> dict[str, str]:
    """The names that this PyTorch should have and does not, and what each is for."""
    needed = {name: purpose for purpose, group in names.items() for name in group if name not in _OPTIONAL}
    return {name: purpose for name, purpose in needed.items() if not is_there(name)}


def check(names: Names = EVERY_RUN) -> None:
    """Raises PyTorchMissingError, which names the missing names; each table is checked once."""
    if id(names) in _checked:
        return
    lost = missing(names)
    if lost:
        listed = ", ".join(f"{name} ({purpose})" for name, purpose in lost.items())
        text = _(
            "PyTorch {version} no longer has {names}, which a dry run relies on; use a version that oom_magic"
            " supports.",
            version=torch.__version__,
            names=listed,
        )
        raise PyTorchMissingError(text)
    _checked.add(id(names))


def is_there(name: str) -> bool:
    """Whether a dotted name leads to something; modules on its way are imported.

    Also true of attributes that objects of a class get later: methods of the class name them.
    """
    path, *rest = name.split(".")
    found: Any = importlib.import_module(path)
    for part in rest:
        path = f"{path}.{part}"
        if path in sys.modules:  # a package may have a function of the same name
            found = sys.modules[path]
        elif hasattr(found, part):
            found = getattr(found, part)
        elif isinstance(found, type):
            return any(_names(kind, part) for kind in found.__mro__)
        else:
            try:
                found = importlib.import_module(path)
            except ImportError:
                return False
    return True


def _names(kind: type, attribute: str) -> bool:
    methods = (one for one in vars(kind).values() if isinstance(one, FunctionType))
    return attribute in vars(kind).get("__annotations__", ()) or any(
        attribute in one.__code__.co_names for one in methods
    )
