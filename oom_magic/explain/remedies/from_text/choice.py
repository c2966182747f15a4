"""Which remedies are for a failure known by its text only: settings of programs, other devices, the host, the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from oom_magic.explain.evidence.causes import HOST_CAUSES, INPUT_CAUSES, Cause
from oom_magic.explain.evidence.clues.programs import PROGRAMS_BY_KEY, Program
from oom_magic.explain.evidence.rules.numbers import unlisted_bytes
from oom_magic.explain.evidence.tensors import NO_LANGUAGE_MODEL
from oom_magic.explain.remedies.from_text.kind_of_run import (
    has_ranks,
    is_evaluation,
    is_of_tokens,
    names_tokens,
    trains,
)
from oom_magic.units import GIB

if TYPE_CHECKING:
    from oom_magic.explain.diagnosis import Diagnosis

# Remedies by the kind of message, whatever the cause.
_BY_FORMAT: Mapping[str, tuple[str, ...]] = {
    "cuda_absurd_size": ("find_tensor",),
    "windows_paging_file": ("page_file", "fewer_processes"),
    "slurm_oom_kill": ("scheduler_memory", "fewer_workers", "stream_data"),
    "scheduler_oom_kill": ("scheduler_memory", "fewer_workers", "stream_data"),
    "pod_oom_kill": ("pod_memory", "fewer_workers", "stream_data"),
    "pod_evicted": ("pod_request", "fewer_workers", "stream_data"),
    "pinned_memory": ("unpin",),
    "dataloader": ("shared_memory", "fewer_waiting"),
    "sigbus": ("shared_memory", "fewer_waiting"),
    "shared_memory_full": ("shared_memory", "fewer_waiting"),
    "vllm": ("larger_share", "vllm_max_num_seqs", "lighter_weights"),
    "vllm_context": ("shorter_context", "larger_share", "lighter_weights"),
    "vllm_startup": ("server_share", "close_processes_any"),
    "sglang": ("larger_share", "lighter_weights"),
    "sglang_retracts": ("sglang_requests",),
    "hf_offload": ("quantized_model", "smaller_model"),
    "ipex_4gb": ("smaller_arrays",),
    "opencl_buffer_limit": ("smaller_arrays",),
    "tensorflow_host": ("smaller_input", "more_ram"),
    "java_heap": ("java_heap",),
    "dask_worker": ("larger_workers",),
    "ray_oom_kill": ("fewer_tasks",),
    "nccl": ("nccl_buffers", "smaller_batch_any"),
    "no_kernel_image": (),
    "tensorflow_goes_on": (),
    "device_lost": (),
}
# Remedies by evidence; the first match counts.
_BY_EVIDENCE: Mapping[str, tuple[str, ...]] = {
    "request_absurd": ("find_tensor",),
    "request_above_any_device": ("find_tensor",),
    "replay_buffer": ("smaller_buffer",),
    "grows_in_evaluation": ("no_grad", "collect_on_host", "gather_on_host"),
    "gathers_predictions": ("gather_on_host", "smaller_evaluation_any"),
    "told_gathers": ("gather_on_host", "smaller_evaluation_any"),
    "code_carries_state": ("detach_state", "no_grad"),
    "told_graph_kept": ("detach",),
    "told_kv_cache": ("shorter_context_any",),
    "held_within": ("other_library",),
    "told_no_grad": ("no_grad", "smaller_input"),
    "code_retains_graph": ("no_retain_graph", "detach"),
    "code_infers_with_gradients": ("no_grad", "smaller_evaluation_any"),
    "code_collects_tensors": ("collect_on_host",),
    "checkpoint_kept": ("map_location_cpu",),
    "late_at_round_step": ("rarer_work",),
    "told_between_epochs": ("rarer_work",),
    "told_trains_whole": ("zero_offload", "fsdp_any"),
    "optimizer_set_up": ("zero_offload", "fsdp_any", "lora"),
    "one_device_holds_more": ("own_device",),
    "one_device_gathers": ("own_device",),
    "ranks_load_to_one": ("map_location_cpu",),
    "checkpoint_to_gpu": ("map_location_cpu", "half_weights"),
    "told_checkpoint_to_gpu": ("map_location_cpu",),
    "pinned_under_wsl": ("unpin",),
    "pinned_memory_used": ("unpin",),
    "wsl_pins_little": ("unpin", "close_processes_any"),
    "offloaded_pinned": ("unpin_weights",),
    "told_unpinned": ("unpin_weights",),
    "data_on_device": ("data_on_host", "smaller_input"),
    "told_page_file": ("page_file",),
    "told_mines": ("page_file",),
    "told_collects": ("collect_on_host", "no_grad"),
    "told_metrics": ("reset_metrics",),
    "told_models_beside": ("unload_models",),
    "told_copies": ("fewer_instances",),
    "driver_buffer_limit": ("llama_batch",),
    "told_merging": ("merge_on_host",),
    "told_runs_without": ("leave_off",),
    "code_copies_weights": ("copy_on_host",),
    "weights_fill_one_card": ("use_all_devices",),
    "told_idle_devices": ("use_all_devices",),
    "told_split": ("smaller_first_share",),
    "paddle_share": ("paddle_more",),
    "marian_workspace": ("marian_workspace", "close_processes_any"),
    "physx_buffers": ("physx_smaller",),
    "addresses_reserved": ("restart_after_loads",),
    "builds_engine": ("build_in_parts",),
    "compiles": ("fewer_jobs",),
    "smaller_share_helps": ("smaller_share",),
    "boxes_vary": ("fewer_boxes", "smaller_input"),
    "scores_of_picture": ("smaller_image",),
    "parallel_slots": ("one_at_a_time",),
    "above_block_limit": ("relaxed_limits", "smaller_arrays"),
    "mps_refused_all": ("use_cpu",),
    "mps_watermark": ("mps_watermark", "smaller_input"),
    "mps_others": ("smaller_input", "mps_watermark"),
    "mps_own_fill": ("smaller_input", "quantized_model", "mps_watermark"),
    "small_carve_out": ("bios_memory",),
    "address_space_in_pieces": ("expandable_segments",),
}
# Statements about a run that does not necessarily train: advice for training may be wrong there.
_OF_ANY_RUN = {
    "computing_told", "inference_told", "precedents", "told_conversation", "input_named", "larger_input_fails",
    "smaller_input_works", "told_whole", "large_request",
}  # fmt: skip
# Evidence that determines the first change in any program.
_IN_ANY_PROGRAM = {
    "mps_others", "above_block_limit", "offloaded_pinned", "parallel_slots", "told_models_beside", "paddle_share",
    "told_copies", "driver_buffer_limit", "told_kv_cache", "held_within",
    "told_merging", "told_collects", "replay_buffer", "weights_fill_one_card", "told_runs_without",
    "told_idle_devices", "told_split", "smaller_share_helps", "marian_workspace", "physx_buffers", "addresses_reserved",
}  # fmt: skip
# What helps against each cause, the first step first. Keys of the catalogue (``remedy_<key>``).
AGAINST: Mapping[Cause, tuple[str, ...]] = {
    Cause.ACTIVATIONS: (
        "smaller_batch_any",
        "mixed_precision",
        "sdpa",
        "checkpointing",
        "shorter_sequences_any",
        "lora",
    ),
    Cause.LOGITS_OR_LOSS: ("chunked_loss", "smaller_batch_any", "shorter_sequences_any", "checkpointing"),
    Cause.ATTENTION_SCORES: ("sdpa", "smaller_batch_any", "shorter_sequences_any", "checkpointing"),
    Cause.OPTIMIZER_STATE: ("optimizer_8bit", "foreach", "adafactor", "lora", "half_weights"),
    Cause.WEIGHTS_TOO_BIG: ("half_weights", "swap_blocks", "qlora", "fewer_bits", "offload", "fsdp_any"),
    Cause.FRAGMENTATION: ("expandable_segments", "smaller_batch_any", "checkpointing"),
    Cause.OTHER_PROCESS: ("close_processes_any", "smaller_batch_any"),
    Cause.LEAK_OR_RETAINED_REFERENCE: ("detach", "no_grad", "free_held_any"),
    Cause.MEMORY_FRACTION_LIMIT: ("raise_limit", "smaller_batch_any"),
    Cause.REQUEST_ALONE_TOO_BIG: ("find_tensor", "sdpa", "chunked_loss", "smaller_batch_any"),
    Cause.SYSMEM_FALLBACK: ("smaller_batch_any", "half_weights", "qlora"),
    Cause.HOST_RAM: ("fewer_workers", "stream_data"),
    Cause.SHARED_MEMORY: ("shared_memory", "fewer_waiting"),
    Cause.DRIVER_LEVEL: ("smaller_batch_any",),
    Cause.UNKNOWN: ("smaller_batch_any", "mixed_precision", "checkpointing"),
}
# Remedies for any run, used where a text does not mention training.
AGAINST_IN_ANY_RUN: Mapping[Cause, tuple[str, ...]] = {
    Cause.ACTIVATIONS: ("smaller_input",),
    Cause.ATTENTION_SCORES: ("sdpa", "smaller_input"),
    Cause.WEIGHTS_TOO_BIG: ("quantized_model", "offload"),
    Cause.FRAGMENTATION: ("expandable_segments", "smaller_input"),
    Cause.OTHER_PROCESS: ("close_processes_any",),
    Cause.MEMORY_FRACTION_LIMIT: ("raise_limit", "smaller_input"),
    Cause.REQUEST_ALONE_TOO_BIG: ("find_tensor", "smaller_input"),
    Cause.SYSMEM_FALLBACK: ("smaller_input", "quantized_model"),
    Cause.DRIVER_LEVEL: ("smaller_input",),
    Cause.LEAK_OR_RETAINED_REFERENCE: ("free_held_any", "newer_version", "keep_less"),
    Cause.UNKNOWN: ("smaller_input",),
}
_LARGE_ARRAY = 64 * GIB  # in one piece, so more RAM does not help
_NOTABLE_ARRAY = 8 * GIB
_HOST_OFFLOAD = ("less_offload", "more_ram")
_OF_LANGUAGE_MODELS = ("sdpa", "shorter_sequences_any", "lora", "qlora", "chunked_loss")
_AT_EVALUATION = ("no_grad", "smaller_evaluation_any")
# Remedies that apply to training only.
_OF_TRAINING = {
    "half_weights", "mixed_precision", "checkpointing", "smaller_batch_any", "optimizer_8bit", "foreach", "adafactor",
    "lora", "fsdp_any",
}  # fmt: skip
_BEFORE_SEGMENTS = ("cuda_reserved_1.4-2.0",)  # messages of versions that have no expandable segments
_SIZE_IS_WRONG = {"request_absurd", "request_overflowed", "request_above_any_device"}
_NO_OTHERS = ("free_above_request", "mps_refused_all")  # there was room, whoever uses the device
_OF_PLACE = {"code_copies_weights", "told_idle_devices", "weights_fill_one_card"}  # what lies where it need not
_OF_RANKS = ("one_device_holds_more", "one_device_gathers", "ranks_load_to_one")
_OF_COPIES = {"told_saving", "told_merging", "told_without"}
_LARGE_INPUT = {"input_named", "larger_input_fails"}
_LARGE_AT_ONCE = _LARGE_INPUT | {"large_request"}
_KEEPS = {"told_no_grad", "memory_grows", "grows_in_evaluation", "code_infers_with_gradients"}  # graphs or results
_HUGE_BYTES = 24 * GIB  # of one tensor: more than most cards have
# What each setting of a program acts on; the others are not proposed against a cause.
_INPUTS = (*INPUT_CAUSES, Cause.REQUEST_ALONE_TOO_BIG)
_WORK = (Cause.ACTIVATIONS, Cause.LOGITS_OR_LOSS, Cause.MEMORY_FRACTION_LIMIT, Cause.UNKNOWN)
_WEIGHTS = (Cause.WEIGHTS_TOO_BIG, Cause.SYSMEM_FALLBACK)
_OUTSIDE = (Cause.FRAGMENTATION, Cause.DRIVER_LEVEL)  # whatever takes less leaves more there
_OF_SHARES = (Cause.MEMORY_FRACTION_LIMIT, Cause.OTHER_PROCESS)
_ACTS_ON: Mapping[str, tuple[Cause, ...]] = {
    "server_share": (*_WORK, *_OUTSIDE, Cause.OTHER_PROCESS),
    "vllm_max_num_seqs": _WORK,
    "vllm_eager": (Cause.MEMORY_FRACTION_LIMIT,),
    "vllm_pixels": (Cause.ACTIVATIONS,),
    "sglang_prefill": _WORK,
    "sglang_no_compile": _WORK,
    "shorter_context": (Cause.ACTIVATIONS, Cause.MEMORY_FRACTION_LIMIT, Cause.UNKNOWN),
    "tgi_tokens": _WORK,
    "tgi_shards": _WEIGHTS,
    "quantized_model": (*_WEIGHTS, Cause.HOST_RAM, Cause.MEMORY_FRACTION_LIMIT),
    "tensor_parallel": (*_WEIGHTS, Cause.MEMORY_FRACTION_LIMIT),
    "smaller_image": (*_INPUTS, *_OUTSIDE, Cause.MEMORY_FRACTION_LIMIT),
    "comfy_tiled": (Cause.ACTIVATIONS,),
    "comfy_cache_none": (Cause.HOST_RAM, Cause.LEAK_OR_RETAINED_REFERENCE),
    "comfy_fp8": (*_WEIGHTS, Cause.HOST_RAM),
    "lmdeploy_cache": (Cause.ACTIVATIONS, Cause.MEMORY_FRACTION_LIMIT, Cause.UNKNOWN),
    "exllama_context": (Cause.ACTIVATIONS, Cause.WEIGHTS_TOO_BIG, Cause.UNKNOWN),
    "comfy_lowvram": (*_WEIGHTS, Cause.ACTIVATIONS, Cause.UNKNOWN),
    "webui_tiled": (Cause.ACTIVATIONS,),
    "webui_attention": (Cause.ATTENTION_SCORES,),
    "webui_medvram": (*_WEIGHTS, Cause.ACTIVATIONS, Cause.UNKNOWN),
    "diffusers_vae": (Cause.ACTIVATIONS,),
    "attention_slices": (Cause.ATTENTION_SCORES,),
    "comfy_attention": (Cause.ATTENTION_SCORES,),
    "diffusers_offload": (*_WEIGHTS, Cause.ACTIVATIONS, Cause.UNKNOWN),
    "pictures_offload": (*_WEIGHTS, Cause.ACTIVATIONS, Cause.UNKNOWN),
    "llama_context": (Cause.ACTIVATIONS, Cause.HOST_RAM),
    "llama_cache_type": (Cause.ACTIVATIONS,),
    "llama_batch": (Cause.ACTIVATIONS,),
    "llama_layers": (*_WEIGHTS, *_OUTSIDE, Cause.ACTIVATIONS, Cause.UNKNOWN),
    "ollama_context": (Cause.ACTIVATIONS, Cause.HOST_RAM, Cause.UNKNOWN),
    "ollama_parallel": (Cause.ACTIVATIONS,),
    "ollama_layers": (*_WEIGHTS, *_OUTSIDE),
    "smaller_model": (*_WEIGHTS, Cause.HOST_RAM, Cause.OPTIMIZER_STATE),
    "fewer_calibration_samples": _INPUTS,
    "layerwise_quantizing": (*_WEIGHTS, Cause.UNKNOWN),
    "smaller_input": (*_INPUTS, *_OUTSIDE),
    "ort_arena": (Cause.ACTIVATIONS, Cause.LEAK_OR_RETAINED_REFERENCE, Cause.FRAGMENTATION),
    "trt_shapes": _INPUTS,
    "trt_workspace": _INPUTS,
    "jax_init": (Cause.WEIGHTS_TOO_BIG,),
    "smaller_batch_plain": (*_INPUTS, *_OUTSIDE),
    "jax_preallocate": _OF_SHARES,
    "tf_growth": _OF_SHARES,
    "tf_own_process": (Cause.LEAK_OR_RETAINED_REFERENCE,),
    "tf_call": (Cause.LEAK_OR_RETAINED_REFERENCE,),
    "rapids_pool": (Cause.MEMORY_FRACTION_LIMIT,),
    "rapids_chunks": (*_INPUTS, *_OUTSIDE, Cause.WEIGHTS_TOO_BIG, Cause.MEMORY_FRACTION_LIMIT),
    "rapids_managed": (*_INPUTS, *_OUTSIDE, Cause.WEIGHTS_TOO_BIG),
    "smaller_arrays": (*_INPUTS, *_OUTSIDE, Cause.WEIGHTS_TOO_BIG, Cause.MEMORY_FRACTION_LIMIT),
    "cupy_limit": (Cause.MEMORY_FRACTION_LIMIT,),
    "cupy_free": (Cause.FRAGMENTATION, Cause.LEAK_OR_RETAINED_REFERENCE, Cause.OTHER_PROCESS),
    "paddle_fraction": _OF_SHARES,
    "fewer_bins": (*_INPUTS, *_OUTSIDE),
    "ctranslate2_less": (*_INPUTS, *_WEIGHTS, *_OUTSIDE),
}
# Where a program has no setting of its own against it.
_IN_ANY: Mapping[Cause, tuple[str, ...]] = {
    Cause.OTHER_PROCESS: ("close_processes_any",),
    Cause.LEAK_OR_RETAINED_REFERENCE: ("newer_version",),
    Cause.HOST_RAM: (),
}


def text_remedies(diagnosis: Diagnosis) -> tuple[str, ...] | None:
    """The changes (keys ``remedy_<key>``) for a failure of another program, device or the host; None where it trains.

    The first is the headline.
    """
    failure = diagnosis.main_failure
    if failure is not None and failure.format in _BY_FORMAT:
        return _BY_FORMAT[failure.format]
    keys = {one.key for one in diagnosis.evidence}
    if diagnosis.cause is Cause.REQUEST_ALONE_TOO_BIG and keys & _SIZE_IS_WRONG:
        return ("find_tensor",)  # the size is a mistake; a smaller input would not help
    if "device_misreported" in keys:
        return ("matching_versions",)
    if diagnosis.cause is Cause.DRIVER_LEVEL and "free_above_request" in keys:
        return ("driver_limit",)
    program = PROGRAMS_BY_KEY.get(diagnosis.program)
    on_board = diagnosis.has_one_memory and diagnosis.cause is Cause.HOST_RAM  # which is the GPU's, too
    own = () if program is None else _acting(program, Cause.ACTIVATIONS if on_board else diagnosis.cause)
    if diagnosis.cause is Cause.HOST_RAM and not diagnosis.is_loading:
        own = tuple(key for key in own if key != "quantized_model")  # the weights are on the device by then
    if own and diagnosis.cause is Cause.HOST_RAM and program is not None and not program.trains:
        usual = () if on_board else ("more_ram",)
        return (*(_by_evidence(keys, diagnosis) or _own_limit(diagnosis)), *own, *usual)
    is_device = diagnosis.cause not in HOST_CAUSES and (failure is None or failure.backend != "cpu")
    is_device = is_device or diagnosis.program in ("llama_cpp", "ollama")
    stages = () if program is None else program.stages
    of_stage = next((one.remedies for one in stages if one.remedies and f"stage_{one.key}" in keys), ())
    if of_stage and is_device:
        return (*_by_evidence(keys & {"told_runs_without"}, diagnosis), *of_stage)
    if program is not None and is_device and diagnosis.cause is not Cause.NOT_OOM:
        first = _by_evidence(keys & _IN_ANY_PROGRAM, diagnosis)
        return tuple(dict.fromkeys((*first, *own)))
    if diagnosis.cause is Cause.HOST_RAM:
        return _BY_EVIDENCE["compiles"] if "compiles" in keys else _against_host(diagnosis, keys)
    return _of_run(diagnosis, keys, is_device)


def _of_run(diagnosis: Diagnosis, keys: set[str], is_device: bool) -> tuple[str, ...] | None:
    """The changes for a run that is not in a program with settings of its own; None where it trains."""
    failure, cause = diagnosis.main_failure, diagnosis.cause
    is_windows = bool({"Windows", "WSL"} & set(diagnosis.systems))
    is_old = failure is not None and failure.format in _BEFORE_SEGMENTS
    if cause is Cause.FRAGMENTATION and (is_windows or is_old or diagnosis.expandable_segments):
        smaller = ("smaller_batch_any", "checkpointing") if trains(diagnosis) else ("smaller_input",)
        first = ("max_split_size",) if is_windows else ("segments_after_update",) if is_old else ()
        return (*first, *smaller)
    if cause is Cause.WEIGHTS_TOO_BIG and keys & _OF_PLACE:
        return (*_by_evidence(keys & _OF_PLACE, diagnosis), "quantized_model")
    is_inference = (
        ("infers" in diagnosis.told or (failure is not None and failure.format == "ctranslate2"))
        and "trains" not in diagnosis.told
        and is_device
    )
    if cause is Cause.WEIGHTS_TOO_BIG and "told_loading" in keys and "attends" not in diagnosis.told and is_device:
        # a second copy or one GPU that holds all ranks': the model itself fits
        others = () if keys & {*_OF_RANKS, *_OF_COPIES} else ("quantized_model", "offload")
        return ("map_location_cpu", *others)
    if cause is Cause.WEIGHTS_TOO_BIG and (is_inference or {"training_fits", "infers"} <= diagnosis.told):
        return ("quantized_model", "offload", "close_processes_any")
    if is_inference and cause in (Cause.ACTIVATIONS, Cause.UNKNOWN):
        keeps = ("no_grad",) if "told_no_grad" in keys else ()
        return (*keeps, "smaller_input", "close_processes_any")  # fewer bits leave what a pass computes as it is
    if cause is Cause.WEIGHTS_TOO_BIG and (
        diagnosis.phase == "saving" or _OF_COPIES & keys or "merges" in diagnosis.told
    ):
        return ("merge_on_host",) if "merges" in diagnosis.told else ("state_on_host",)
    if of_ranks := [one for one in _OF_RANKS if one in keys]:
        return _BY_EVIDENCE[of_ranks[0]]
    if is_device and not trains(diagnosis):
        if cause in (Cause.ACTIVATIONS, Cause.UNKNOWN) and keys & _OF_ANY_RUN:
            return ("smaller_input", "close_processes_any")
        if cause is Cause.WEIGHTS_TOO_BIG and {"weights_fill_card", "weights_fill_mac"} & {*keys}:
            return ("quantized_model", "offload", "close_processes_any")
    if diagnosis.backend == "mps" and trains(diagnosis):
        return None
    return _by_evidence(keys, diagnosis) or None


def printed_by_message(diagnosis: Diagnosis) -> tuple[str, ...]:
    """The changes that the message itself proposes, whatever the cause."""
    failure = diagnosis.main_failure
    is_marked = failure is not None and failure.backend == "mps" and failure.limit_bytes is not None
    return ("mps_watermark",) if is_marked and diagnosis.cause is not Cause.DRIVER_LEVEL else ()


def _acting(program: Program, cause: Cause) -> tuple[str, ...]:
    """The settings of a program that act on a cause, else what helps against it in any program."""
    own = tuple(key for key in program.remedies if cause in _ACTS_ON.get(key, ()))
    if cause is Cause.OTHER_PROCESS:
        return (*_IN_ANY[cause], *own)
    if cause is Cause.LEAK_OR_RETAINED_REFERENCE and not program.trains:
        return (*own, *_IN_ANY[cause])
    return own or _IN_ANY.get(cause, AGAINST_IN_ANY_RUN.get(cause, ()))


def _by_evidence(keys: set[str], diagnosis: Diagnosis) -> tuple[str, ...]:
    told = [one.key for one in diagnosis.evidence if one.key in keys and one.key in _BY_EVIDENCE]
    return tuple(dict.fromkeys(key for name in told for key in _BY_EVIDENCE[name]))


def _own_limit(diagnosis: Diagnosis) -> tuple[str, ...]:
    """What helps against a lack of RAM in WSL and in containers, which have limits of their own."""
    if "WSL" in diagnosis.systems:
        return ("wsl_memory",)
    return ("pod_memory",) if {"in_container", "in_pod"} & diagnosis.told and diagnosis.main_failure is not None else ()


def _against_host(diagnosis: Diagnosis, keys: set[str]) -> tuple[str, ...]:
    """Remedies when the host's memory ran out: while loading, with offloading, with pinned memory."""
    found = ["buffer_on_disk" if one == "smaller_buffer" else one for one in _by_evidence(keys, diagnosis)]
    found = found or list(_own_limit(diagnosis))
    if "SLURM" in diagnosis.systems and {"job_gib", "cpu_gib"} & diagnosis.limits.keys():
        found.append("scheduler_memory")
    if diagnosis.is_loading:
        found += ["load_low_ram", "swap"]
    if "gathers_state" in diagnosis.told:
        found.append("sharded_state")
    if diagnosis.offloads_to_host:
        found += _HOST_OFFLOAD
    if "free_above_request" in keys:
        found += ["page_file", "more_ram"]
    failure = diagnosis.main_failure
    is_of_pairs = "dense_pairs" in diagnosis.told and (failure is None or (failure.requested_bytes or 0) >= GIB)
    if failure is not None and "ram_is_free" in diagnosis.told:
        return tuple(dict.fromkeys((*found, "host_limit")))
    if failure is not None and failure.requested_bytes and (is_of_pairs or failure.requested_bytes >= _LARGE_ARRAY):
        return tuple(dict.fromkeys((*found, "smaller_array", "stream_data")))
    if failure is not None and (failure.requested_bytes or 0) >= _NOTABLE_ARRAY:
        found += ["smaller_array", "more_ram"]
    if "swaps_blocks" in diagnosis.told:
        found += ["fewer_swapped", "more_ram"]
    if "keeps_predictions" in diagnosis.told:
        found.append("keep_needed")
    elif "counts_metrics" in diagnosis.told:
        found.append("reset_metrics")
    if {"grows", "repeated_use"} & diagnosis.told and not {"trains", "uses_torch"} & diagnosis.told:
        found.append("newer_version")
    if "loads_data" in diagnosis.told:
        found.append("stream_data")
    elif {"repeated_use", "evaluates"} <= diagnosis.told:
        found.append("drop_each")
    elif "grows" in diagnosis.told and {"workers", "learns", "trains", "of_graphs"} & diagnosis.told:
        found += ["fewer_workers", "drop_each", "arrays_for_lists"]
    usual = ("fewer_workers", "stream_data", "more_ram")
    if found in (["pod_memory"], ["scheduler_memory"]):
        found += usual[:2]
    return tuple(dict.fromkeys((*found, *(() if found else usual))))


def remedies_of_run(diagnosis: Diagnosis, elsewhere: tuple[str, ...] | None, *, is_text: bool) -> tuple[str, ...]:
    """The remedies for a run in PyTorch, the first step first; ``elsewhere`` are those that its text determines."""
    keys = _against(diagnosis, is_text=is_text) if elsewhere is None else elsewhere
    if "find_tensor" in keys and any(one.key == "input_named" for one in diagnosis.evidence):
        keys = ("smaller_input",)  # it is meant so large
    if "retains_graph" in diagnosis.told:
        keys = tuple("no_retain_graph" if key == "detach" else key for key in keys)
    if is_evaluation(diagnosis):
        is_trainer = "evaluates_by_trainer" in diagnosis.told
        keys = ("loss_only", *_AT_EVALUATION[1:]) if is_trainer else _AT_EVALUATION
        known = {one.key for one in diagnosis.evidence}
        # of 17 stored reports that no_grad headed, 9 had larger inputs in the evaluation, 4 kept graphs and 2 results
        may_be_larger = known & _LARGE_AT_ONCE or ("told_evaluation" in known and not (is_trainer or known & _KEEPS))
        if is_text and trains(diagnosis) and may_be_larger:
            keys = ("evaluation_inputs", *keys)
        if is_text and "infers" in diagnosis.told and not {"evaluates", "trains", "training_fits"} & diagnosis.told:
            keys = ("no_grad", "smaller_input")  # a program that predicts, in batches or not
    if elsewhere and is_text and not trains(diagnosis):
        keys = tuple(key for key in keys if key not in _OF_TRAINING) or keys
    if _may_be_shared(diagnosis):
        keys = (*keys, "check_processes")
    is_another = not (is_of_tokens(diagnosis) if is_text else names_tokens(diagnosis))
    if NO_LANGUAGE_MODEL.search(diagnosis.code) or is_another:
        adapts = "of_latents" in diagnosis.told and diagnosis.cause is Cause.OPTIMIZER_STATE
        others = tuple(key for key in keys if key not in _OF_LANGUAGE_MODELS or (adapts and key == "lora"))
        keys = (*others, "smaller_input") if diagnosis.cause in INPUT_CAUSES else others or keys
    if "lacks_checkpointing" in diagnosis.told and diagnosis.cause in INPUT_CAUSES and is_text:
        keys = ("checkpointing_on", *(key for key in keys if key != "checkpointing"))
    if "fsdp_any" in keys and has_ranks(diagnosis):
        keys = ("fsdp_any", *keys)  # which is theirs
    growth = diagnosis.growth
    if growth is not None and diagnosis.cause is Cause.LEAK_OR_RETAINED_REFERENCE and not growth.fixed:
        keys = ("keep_grown", *(key for key in keys if key not in ("detach", "free_held_any")))
    elif growth is not None and growth.fixed and growth.remedy != "detach":
        keys = (growth.remedy, *(key for key in keys if key not in ("detach", "no_grad")))
    return keys


def _against(diagnosis: Diagnosis, *, is_text: bool) -> tuple[str, ...]:
    """The first remedies for the cause; for a text that mentions no training, those for any run."""
    if is_text and diagnosis.cause is Cause.MEMORY_FRACTION_LIMIT and "generates_beside" in diagnosis.told:
        return ("generation_share",)
    any_run = AGAINST_IN_ANY_RUN.get(diagnosis.cause)
    is_open = diagnosis.cause is Cause.OTHER_PROCESS or not trains(diagnosis)
    if diagnosis.cause is Cause.LEAK_OR_RETAINED_REFERENCE and any_run is not None:
        any_run = any_run if "uses_torch" not in diagnosis.told else any_run[::-1]
        is_own = bool(diagnosis.place) and bool({"pasted_code", "shows_code"} & diagnosis.told)
        is_open = is_open and not is_own and not any(one.key.startswith("code_") for one in diagnosis.evidence)
    if any_run is not None and is_text and is_open:
        return any_run
    keys = AGAINST.get(diagnosis.cause, ())
    if diagnosis.cause is not Cause.ACTIVATIONS or not is_text:
        return keys
    keys = ("fewer_pixels", *keys)
    # LoRA leaves most activations as they are, and sdpa has been the default of transformers since 4.36.
    keys = tuple(key for key in keys if key not in ("lora", "sdpa"))
    failure = diagnosis.main_failure
    if failure is not None and (failure.requested_bytes or 0) >= _HUGE_BYTES:
        return ("find_tensor", *keys)
    if any(one.key == "told_contrast" for one in diagnosis.evidence):
        return ("smaller_input", *keys)  # of which size it is, is said
    if not any(one.key in _LARGE_INPUT for one in diagnosis.evidence):
        return keys
    is_sequence = names_tokens(diagnosis) and "sees_pictures" not in diagnosis.told
    return tuple(dict.fromkeys(("shorter_sequences_any" if is_sequence else "smaller_input", *keys)))


def _may_be_shared(diagnosis: Diagnosis) -> bool:
    """Whether numbers that do not add up, or that the driver does not give, leave room for other programs."""
    if diagnosis.cause is Cause.DRIVER_LEVEL:
        return not any(one.key in _NO_OTHERS for one in diagnosis.evidence)
    failure = diagnosis.main_failure
    return diagnosis.cause is Cause.UNKNOWN and failure is not None and unlisted_bytes(failure) > 0
