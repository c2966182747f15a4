"""Remedies for failures known by text only: settings of programs, other devices, the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from oom_magic.explain.evidence.causes import HOST_CAUSES, Cause
from oom_magic.explain.evidence.clues.programs import PROGRAMS_BY_KEY
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
    "pinned_memory": ("unpin",),
    "dataloader": ("shared_memory", "fewer_waiting"),
    "sigbus": ("shared_memory", "fewer_waiting"),
    "shared_memory_full": ("shared_memory", "fewer_waiting"),
    "vllm_context": ("shorter_context", "larger_share", "quantized_model", "tensor_parallel"),
    "vllm_startup": ("vllm_utilization", "close_processes_any"),
    "hf_offload": ("quantized_model", "smaller_model"),
    "ipex_4gb": ("smaller_arrays",),
    "java_heap": ("java_heap",),
    "nccl": ("nccl_buffers", "smaller_batch_any"),
    "no_kernel_image": (),
}
# Remedies by evidence; the first match counts.
_BY_EVIDENCE: Mapping[str, tuple[str, ...]] = {
    "request_absurd": ("find_tensor",),
    "request_above_any_device": ("find_tensor",),
    "replay_buffer": ("smaller_array",),
    "grows_in_evaluation": ("no_grad", "collect_on_host", "gather_on_host"),
    "gathers_predictions": ("gather_on_host", "smaller_evaluation_any"),
    "code_carries_state": ("detach_state", "no_grad"),
    "told_graph_kept": ("detach",),
    "told_no_grad": ("no_grad", "smaller_input"),
    "code_retains_graph": ("no_retain_graph", "detach"),
    "code_infers_with_gradients": ("no_grad", "smaller_evaluation_any"),
    "code_collects_tensors": ("collect_on_host",),
    "checkpoint_kept": ("map_location_cpu",),
    "optimizer_set_up": ("zero_offload", "fsdp_any", "lora"),
    "ranks_load_to_one": ("map_location_cpu",),
    "checkpoint_to_gpu": ("map_location_cpu", "half_weights"),
    "pinned_under_wsl": ("unpin",),
    "pinned_memory_used": ("unpin",),
    "wsl_pins_little": ("unpin", "close_processes_any"),
    "offloaded_pinned": ("unpin_weights",),
    "data_on_device": ("data_on_host", "smaller_input"),
    "told_page_file": ("page_file",),
    "parallel_slots": ("one_at_a_time",),
    "above_block_limit": ("relaxed_limits", "smaller_arrays"),
    "mps_refused_all": ("use_cpu",),
    "mps_watermark": ("mps_watermark", "smaller_input"),
    "mps_others": ("smaller_input", "mps_watermark", "close_apps"),
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
_IN_ANY_PROGRAM = {"mps_others", "above_block_limit", "offloaded_pinned", "parallel_slots"}
# Remedies for any run, used where a text does not mention training.
AGAINST_IN_ANY_RUN: Mapping[Cause, tuple[str, ...]] = {
    Cause.ACTIVATIONS: ("smaller_input",),
    Cause.ATTENTION_SCORES: ("sdpa", "smaller_input"),
    Cause.WEIGHTS_TOO_BIG: ("quantized_model", "offload"),
    Cause.FRAGMENTATION: ("expandable_segments", "smaller_input"),
    Cause.OTHER_PROCESS: ("close_processes_any", "smaller_input"),
    Cause.MEMORY_FRACTION_LIMIT: ("raise_limit", "smaller_input"),
    Cause.REQUEST_ALONE_TOO_BIG: ("find_tensor", "smaller_input"),
    Cause.SYSMEM_FALLBACK: ("fallback_policy", "smaller_input", "quantized_model"),
    Cause.DRIVER_LEVEL: ("smaller_input",),
    Cause.LEAK_OR_RETAINED_REFERENCE: ("restart_program", "keep_less"),
    Cause.UNKNOWN: ("smaller_input",),
}
# Statements by authors about runs that train.
_TOLD_OF_TRAINING = {"trains", "training_fits", "adam_costs"}
_TRAINERS = {"transformers Trainer", "deepspeed", "FSDP", "Lightning"}
_LARGE_ARRAY = 64 * GIB  # in one piece, so more RAM does not help
_HOST_OFFLOAD = ("less_offload", "more_ram")
# Lines for one program only; limits of servers are scaled from the value in the text, else from a usual value.
_OF_PROGRAMS: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "vllm_utilization": "vllm serve MODEL --gpu-memory-utilization {less:.2g}",
        "server_share": "vllm serve MODEL --gpu-memory-utilization {less:.2g}",
        "vllm_pictures": "vllm serve MODEL --limit-mm-per-prompt '{{\"image\": 1}}'",
        "larger_share": "vllm serve MODEL --gpu-memory-utilization {more:.2g}",
        "shorter_context": "vllm serve MODEL --max-model-len {length:.0f}",
        "vllm_max_num_seqs": "vllm serve MODEL --max-num-seqs {requests:.0f}",
        "vllm_eager": "vllm serve MODEL --enforce-eager",
        "tensor_parallel": "vllm serve MODEL --tensor-parallel-size {devices:.0f}",
    },
    "sglang": {
        "sglang_fraction": "python -m sglang.launch_server --model-path MODEL --mem-fraction-static {less:.2g}",
        "server_share": "python -m sglang.launch_server --model-path MODEL --mem-fraction-static {less:.2g}",
        "sglang_prefill":
            "python -m sglang.launch_server --model-path MODEL --chunked-prefill-size 2048 --cuda-graph-max-bs 16",
        "shorter_context": "python -m sglang.launch_server --model-path MODEL --context-length {length:.0f}",
        "tensor_parallel": "python -m sglang.launch_server --model-path MODEL --tp {devices:.0f}",
    },
    "diffusers": {"diffusers_vae": "pipe.vae.enable_tiling()\npipe.vae.enable_slicing()"},
}  # fmt: skip
_LANGUAGES = {"diffusers": "python"}
_USUAL_LIMITS = {"share": 0.9, "length": 16384.0, "requests": 128.0, "devices": 1.0}
_LARGEST_SHARE = 0.97
_CODE: Mapping[str, tuple[str, str]] = {
    "tgi_tokens": ("text-generation-launcher --max-batch-prefill-tokens 2048 --max-batch-total-tokens 8192", "bash"),
    "tgi_shards": ("text-generation-launcher --num-shard 2", "bash"),
    "webui_medvram": ("COMMANDLINE_ARGS=--medvram   # in webui-user.sh or webui-user.bat; then --lowvram", "bash"),
    "rapids_pool": ("rmm.reinitialize(pool_allocator=True, maximum_pool_size=30 * 2**30)", "python"),
    "comfy_cache_none": ("python main.py --cache-none", "bash"),
    "unpin_weights": ("python main.py --disable-pinned-memory   # ComfyUI", "bash"),
    "one_at_a_time": ("OLLAMA_NUM_PARALLEL=1 ollama serve   # llama-server: -np 1", "bash"),
    "data_on_host": ('images = images.cpu()            # all of them\nbatch = images[chosen].to("cuda")', "python"),
    "tf_call": ("y = model(x, training=False)      # not model.predict(x)\ntf.keras.backend.clear_session()", "python"),
    "comfy_lowvram": ("python main.py --lowvram   # then --novram", "bash"),
    "comfy_fp8": ("python main.py --fp8_e4m3fn-unet", "bash"),
    "diffusers_offload": ("pipe.enable_model_cpu_offload()   # instead of pipe.to(...)", "python"),
    "llama_layers": ("llama-server -m MODEL.gguf -ngl 20", "bash"),
    "llama_context": ("llama-server -m MODEL.gguf -c 8192", "bash"),
    "llama_cache_type": ("llama-server -m MODEL.gguf -fa on --cache-type-k q8_0 --cache-type-v q8_0", "bash"),
    "llama_batch": ("llama-server -m MODEL.gguf -ub 256 -b 512", "bash"),
    "ollama_layers": ("PARAMETER num_gpu 20   # in the Modelfile", "bash"),
    "zero_offload": ('"zero_optimization": {"offload_optimizer": {"device": "cpu"}}', "json"),
    "diffusers_sequential": ("pipe.enable_sequential_cpu_offload()   # instead of pipe.to(...)", "python"),
    "ollama_context": ("OLLAMA_CONTEXT_LENGTH=4096 ollama serve", "bash"),
    "ollama_parallel": ("OLLAMA_NUM_PARALLEL=1 OLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE=q8_0 ollama serve",
    "bash"),
    "no_cache": ("model.config.use_cache = False", "python"),
    "ort_arena": (
        'options = {"arena_extend_strategy": "kSameAsRequested", "cudnn_conv_use_max_workspace": "0"}\n'
        'session = onnxruntime.InferenceSession("model.onnx", providers=[("CUDAExecutionProvider", options)])',
            "python",
    ),
    "trt_workspace": ("config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 1 << 30)", "python"),
    "jax_preallocate": ("export XLA_PYTHON_CLIENT_PREALLOCATE=false   # or XLA_PYTHON_CLIENT_MEM_FRACTION=0.9", "bash"),
    "jax_remat": ("loss_fn = jax.checkpoint(loss_fn)", "python"),
    "tf_growth": ("export TF_FORCE_GPU_ALLOW_GROWTH=true", "bash"),
    "state_on_host": (
        "options = StateDictOptions(full_state_dict=True, cpu_offload=True)\n"
        "state = get_model_state_dict(model, options=options)  # torch.distributed.checkpoint.state_dict", "python",
    ),
    "rapids_managed": ("rmm.reinitialize(managed_memory=True)", "python"),
    "cupy_free": ("cupy.get_default_memory_pool().free_all_blocks()", "python"),
    "paddle_fraction": ("export FLAGS_fraction_of_gpu_memory_to_use=0.5", "bash"),
    "scheduler_memory": ("#SBATCH --mem=64G", "bash"),
    "pod_memory": ("resources:\n  limits:\n    memory: MORE", "yaml"),
    "unpin": ("loader = DataLoader(dataset, batch_size=batch_size, pin_memory=False)", "python"),
    "gather_on_host": (
        "TrainingArguments(..., eval_accumulation_steps=1)\n"
        "Trainer(..., preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1))", "python",
    ),
    "collect_on_host": ("predictions.append(output.cpu())", "python"),
    "detach_state": ("hidden = hidden.detach()   # at the start of each turn", "python"),
    "no_retain_graph": ("loss.backward()   # without retain_graph=True; sum losses of one graph first", "python"),
    "map_location_cpu": (
        'checkpoint = torch.load(path, map_location="cpu")\nmodel.load_state_dict(checkpoint["model"])\ndel '
        'checkpoint', "python",
    ),
    "relaxed_limits": ("export UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1", "bash"),
    "mps_watermark": ("export PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0   # the Mac may then swap or stall", "bash"),
    "max_split_size": ("set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128", "batch"),
    "load_low_ram": ("model = AutoModel.from_pretrained(name, dtype=torch.bfloat16, low_cpu_mem_usage=True)", "python"),
}  # fmt: skip


def text_remedies(diagnosis: Diagnosis) -> tuple[str, ...] | None:
    """The changes (keys ``remedy_<key>``) for a failure of another program, device or the host; None where it trains.

    The first is the headline.
    """
    failure = diagnosis.main_failure
    if failure is not None and failure.format in _BY_FORMAT:
        return _BY_FORMAT[failure.format]
    keys = {one.key for one in diagnosis.evidence}
    if diagnosis.cause is Cause.REQUEST_ALONE_TOO_BIG and keys & {"request_absurd", "request_overflowed"}:
        return ("find_tensor",)  # the size is a mistake; a smaller input would not help
    if diagnosis.cause is Cause.DRIVER_LEVEL and "free_above_request" in keys:
        return ("driver_limit",)
    program = PROGRAMS_BY_KEY.get(diagnosis.program)
    own = () if program is None else dict(program.by_cause).get(diagnosis.cause, ())
    if own and diagnosis.cause in (Cause.HOST_RAM, Cause.LEAK_OR_RETAINED_REFERENCE):
        return (*_by_evidence(keys, diagnosis), *own)  # its other settings are about what fits at once
    is_device = diagnosis.cause not in HOST_CAUSES and (failure is None or failure.backend != "cpu")
    is_device = is_device or diagnosis.program in ("llama_cpp", "ollama")
    stages = () if program is None else program.stages
    of_stage = next((one.remedies for one in stages if one.remedies and f"stage_{one.key}" in keys), ())
    if of_stage and is_device:
        return of_stage
    if program is not None and is_device and diagnosis.cause is not Cause.NOT_OOM:
        first = _by_evidence(keys & _IN_ANY_PROGRAM, diagnosis)
        return tuple(dict.fromkeys((*first, *program.remedies_against(diagnosis.cause))))
    if diagnosis.cause is Cause.HOST_RAM:
        return _against_host(diagnosis, keys)
    return _of_run(diagnosis, keys, is_device)


def _of_run(diagnosis: Diagnosis, keys: set[str], is_device: bool) -> tuple[str, ...] | None:
    """The changes for a run that is not in a program with settings of its own; None where it trains."""
    failure, cause = diagnosis.main_failure, diagnosis.cause
    is_windows = bool({"Windows", "WSL"} & set(diagnosis.systems))
    if cause is Cause.FRAGMENTATION and (is_windows or diagnosis.expandable_segments):
        smaller = ("smaller_batch_any", "checkpointing") if trains(diagnosis) else ("smaller_input",)
        return ("max_split_size", *smaller) if is_windows else smaller
    is_inference = (
        ("infers" in diagnosis.told or (failure is not None and failure.format == "ctranslate2"))
        and "trains" not in diagnosis.told
        and is_device
    )
    if is_inference and cause is Cause.WEIGHTS_TOO_BIG:
        return ("quantized_model", "offload", "close_processes_any")
    if is_inference and cause in (Cause.ACTIVATIONS, Cause.UNKNOWN):
        return ("smaller_input", "quantized_model", "close_processes_any")
    if diagnosis.phase == "saving" and cause is Cause.WEIGHTS_TOO_BIG:
        return ("state_on_host",)
    if cause is Cause.WEIGHTS_TOO_BIG and "told_loading" in keys and "attends" not in diagnosis.told and is_device:
        return ("map_location_cpu", "quantized_model", "offload")
    if is_device and not trains(diagnosis):
        if cause in (Cause.ACTIVATIONS, Cause.UNKNOWN) and keys & _OF_ANY_RUN:
            return ("smaller_input", "close_processes_any")
        if cause is Cause.WEIGHTS_TOO_BIG and "weights_fill_card" in keys:
            return ("quantized_model", "offload", "close_processes_any")
    if diagnosis.backend == "mps" and trains(diagnosis):
        return None
    return _by_evidence(keys, diagnosis) or None


def printed_by_message(diagnosis: Diagnosis) -> tuple[str, ...]:
    """The changes that the message itself proposes, whatever the cause."""
    failure = diagnosis.main_failure
    is_marked = failure is not None and failure.backend == "mps" and failure.limit_bytes is not None
    return ("mps_watermark",) if is_marked and diagnosis.cause is not Cause.DRIVER_LEVEL else ()


def trains(diagnosis: Diagnosis) -> bool:
    """Whether the text, or the run described with it, is about training."""
    in_step = diagnosis.phase in ("backward", "loss", "optimizer_step")
    is_trainer = bool(_TRAINERS & set(diagnosis.frameworks)) and "infers" not in diagnosis.told
    told = diagnosis.told - {"training_fits"} if "infers" in diagnosis.told else diagnosis.told  # it came before
    is_told = bool(_TOLD_OF_TRAINING & told or diagnosis.setup_phrases)
    return is_told or in_step or is_trainer


def is_evaluation(diagnosis: Diagnosis) -> bool:
    """Whether an evaluation ran out of memory, by its frames, or else by its author's words."""
    told = diagnosis.phase is None and any(one.key == "told_evaluation" for one in diagnosis.evidence)
    return diagnosis.cause is Cause.ACTIVATIONS and (diagnosis.phase == "evaluation" or told)


def is_named_by_message(diagnosis: Diagnosis) -> bool:
    """Whether the kind of message alone determines the change."""
    return diagnosis.main_failure is not None and diagnosis.main_failure.format in _BY_FORMAT


def code_of(key: str, diagnosis: Diagnosis) -> tuple[str, str] | None:
    """Lines to copy for a change, and their language; None where the sentence is enough."""
    template = _OF_PROGRAMS.get(diagnosis.program, {}).get(key)
    if template is None:
        return _CODE.get(key)
    limits = {**_USUAL_LIMITS, **diagnosis.server_limits}
    less, more = max(limits["share"] - 0.1, 0.1), min(limits["share"] + 0.05, _LARGEST_SHARE)
    length, requests = limits.get("held", limits["length"] // 2), max(limits["requests"] // 2, 1)
    values = {"less": less, "more": more, "length": length, "requests": requests, "devices": 2 * limits["devices"]}
    return template.format(**values), _LANGUAGES.get(diagnosis.program, "bash")


def _by_evidence(keys: set[str], diagnosis: Diagnosis) -> tuple[str, ...]:
    told = [one.key for one in diagnosis.evidence if one.key in keys and one.key in _BY_EVIDENCE]
    return tuple(dict.fromkeys(key for name in told for key in _BY_EVIDENCE[name]))


def _against_host(diagnosis: Diagnosis, keys: set[str]) -> tuple[str, ...]:
    """Remedies when the host's memory ran out: while loading, with offloading, with pinned memory."""
    found = list(_by_evidence(keys, diagnosis))
    if "in_pod" in diagnosis.told:
        found.append("pod_memory")
    if diagnosis.is_loading:
        found += ["load_low_ram", "swap"]
    if diagnosis.offloads_to_host:
        found += _HOST_OFFLOAD
    if "free_above_request" in keys:
        found += ["page_file", "more_ram"]
    failure = diagnosis.main_failure
    if failure is not None and (failure.requested_bytes or 0) >= _LARGE_ARRAY:
        return tuple(dict.fromkeys((*found, "smaller_array", "stream_data")))
    if "grows" in diagnosis.told and not {"trains", "uses_torch"} & diagnosis.told:
        found.append("restart_program")
    usual = ("fewer_workers", "stream_data", "more_ram")
    return tuple(dict.fromkeys((*found, *(() if found else usual))))
