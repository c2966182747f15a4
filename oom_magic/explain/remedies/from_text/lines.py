"""Lines to copy for remedies that a text determines, with its own limits in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from oom_magic.explain.remedies.from_text.program_settings import filled, line_of, names_of
from oom_magic.units import MIB

if TYPE_CHECKING:
    from oom_magic.explain.diagnosis import Diagnosis

_TILING = "pipe.vae.enable_tiling()\npipe.vae.enable_slicing()"
_WITHOUT_ARENA = (
    "options = onnxruntime.SessionOptions()\noptions.enable_cpu_mem_arena = False\n"
    'session = onnxruntime.InferenceSession("model.onnx", options)'
)
_SCALED: Mapping[str, tuple[str, str]] = {
    "ollama_layers": ("/set parameter num_gpu {layers:half}", "bash"),
    "ollama_context": ("OLLAMA_CONTEXT_LENGTH={length:half} ollama serve", "bash"),
    "scheduler_memory": ("#SBATCH --mem={job_gib:gib}", "bash"),
    "fewer_workers": ("loader = DataLoader(dataset, batch_size=batch_size, num_workers={workers:half})", "python"),
}
# Changes whose sentence names the program's settings for them.
OF_SETTINGS = (
    "server_share", "larger_share", "shorter_context", "vllm_max_num_seqs", "sglang_prefill", "tgi_tokens",
    "tgi_shards", "llama_layers", "llama_context", "llama_batch",
)  # fmt: skip
_SMALLEST_SPLIT = 32  # MiB: more than PyTorch's small segments
_CODE: Mapping[str, tuple[str, str]] = {
    "webui_medvram": ("COMMANDLINE_ARGS=--medvram   # in webui-user.sh or webui-user.bat; then --lowvram", "bash"),
    "rapids_pool": (
        "rmm.reinitialize(pool_allocator=True, maximum_pool_size=MORE)   # MORE: a larger number than now",
        "python",
    ),
    "attention_slices": ("pipe.enable_attention_slicing()", "python"),
    "comfy_attention": ("python main.py --use-split-cross-attention", "bash"),
    "comfy_cache_none": ("python main.py --cache-none", "bash"),
    "unpin_weights": ("python main.py --disable-pinned-memory   # ComfyUI", "bash"),
    "one_at_a_time": ("OLLAMA_NUM_PARALLEL=1 ollama serve", "bash"),
    "data_on_host": ('images = images.cpu()            # all of them\nbatch = images[chosen].to("cuda")', "python"),
    "tf_call": ("y = model(x, training=False)      # not model.predict(x)\ntf.keras.backend.clear_session()", "python"),
    "comfy_lowvram": ("python main.py --lowvram   # then --novram", "bash"),
    "comfy_fp8": ("python main.py --fp8_e4m3fn-unet", "bash"),
    "diffusers_offload": ("pipe.enable_model_cpu_offload()   # instead of pipe.to(...)", "python"),
    "zero_offload": ('"zero_optimization": {"offload_optimizer": {"device": "cpu"}}', "json"),
    "diffusers_sequential": ("pipe.enable_sequential_cpu_offload()   # instead of pipe.to(...)", "python"),
    "ollama_parallel": ("OLLAMA_NUM_PARALLEL=1 OLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE=q8_0 ollama serve",
    "bash"),
    "ort_arena": (
        'options = {"arena_extend_strategy": "kSameAsRequested", "cudnn_conv_use_max_workspace": "0"}\n'
        'session = onnxruntime.InferenceSession("model.onnx", providers=[("CUDAExecutionProvider", options)])',
            "python",
    ),
    "jax_preallocate": ("export XLA_PYTHON_CLIENT_PREALLOCATE=false", "bash"),
    "tf_growth": ("export TF_FORCE_GPU_ALLOW_GROWTH=true", "bash"),
    "state_on_host": (
        "options = StateDictOptions(full_state_dict=True, cpu_offload=True)\n"
        "state = get_model_state_dict(model, options=options)  # torch.distributed.checkpoint.state_dict", "python",
    ),
    "rapids_managed": ("rmm.reinitialize(managed_memory=True)", "python"),
    "cupy_limit": ("cupy.get_default_memory_pool().set_limit(size=MORE)   # MORE: a larger number than now", "python"),
    "cupy_free": ("cupy.get_default_memory_pool().free_all_blocks()", "python"),
    "paddle_fraction": (
        "export FLAGS_fraction_of_gpu_memory_to_use=LESS   # LESS: a smaller number than now (0.92 unless set)", "bash",
    ),
    "segments_after_update": ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True   # from PyTorch 2.1", "bash"),
    "pod_memory": ("resources:\n  limits:\n    memory: MORE", "yaml"),
    "unpin": ("loader = DataLoader(dataset, batch_size=batch_size, pin_memory=False)", "python"),
    "gather_on_host": (
        "TrainingArguments(..., eval_accumulation_steps=1)\n"
        "Trainer(..., preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1))", "python",
    ),
    "collect_on_host": ("predictions.append(output.cpu())", "python"),
    "detach_state": ("hidden = hidden.detach()   # at the start of each iteration", "python"),
    "no_retain_graph": (
        "loss.backward()   # without retain_graph=True; first sum the losses that share a graph",
        "python",
    ),
    "map_location_cpu": (
        'checkpoint = torch.load(path, map_location="cpu")\nmodel.load_state_dict(checkpoint["model"])\ndel '
        'checkpoint', "python",
    ),
    "relaxed_limits": ("export UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1", "bash"),
    "mps_watermark": ("export PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0   # the Mac may then swap or freeze", "bash"),
    "load_low_ram": ("model = AutoModel.from_pretrained(name, dtype=torch.bfloat16, low_cpu_mem_usage=True)", "python"),
}  # fmt: skip


def code_of(key: str, diagnosis: Diagnosis) -> tuple[str, str] | None:
    """Lines to copy for a change, and their language; None where the sentence is enough."""
    in_python = "calls_in_python" in diagnosis.told
    if diagnosis.program == "diffusers" and key == "diffusers_vae":
        return _TILING, "python"
    by_command = "calls_by_command" in diagnosis.told
    line = line_of(key, diagnosis.program, diagnosis.limits, in_python=in_python, by_command=by_command)
    if line is not None:
        return (
            ("", "")
            if "has_own_page" in diagnosis.told or _has_other_names(diagnosis)
            else (line, "python" if in_python else "bash")
        )
    if key == "scheduler_memory" and "cpu_gib" in diagnosis.limits:
        return filled("#SBATCH --mem-per-cpu={cpu_gib:gib}", diagnosis.limits), "bash"
    if key in _SCALED:
        template, language = _SCALED[key]
        return filled(template, diagnosis.limits), language
    if key == "ort_arena" and diagnosis.backend == "cpu":
        return _WITHOUT_ARENA, "python"
    if key == "max_split_size":
        return _split_size(diagnosis), "batch"
    if key == "pod_memory" and "in_pod" not in diagnosis.told:
        return "", "bash"
    if key == "shared_memory" and "in_container" not in diagnosis.told:
        return "df -h /dev/shm", "bash"
    return _CODE.get(key)


def _split_size(diagnosis: Diagnosis) -> str:
    """The setting that keeps blocks whole which a request like the failed one can use."""
    failure = diagnosis.main_failure
    asked = 0 if failure is None else (failure.requested_bytes or 0) // MIB
    size = 1 << asked.bit_length() - 1 if asked >= _SMALLEST_SPLIT else 0
    line = "set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:"
    return (
        f"{line}{size}   # below the {asked} MiB requested" if size else f"{line}LESS   # LESS: less than the request"
    )


def _has_other_names(diagnosis: Diagnosis) -> bool:
    """Whether a program around llama.cpp has settings of its own for the same."""
    return diagnosis.program == "llama_cpp" and "around_llama_cpp" in diagnosis.told


def setting_of(key: str, diagnosis: Diagnosis) -> dict[str, str]:
    """The value of the field ``setting`` in a change's sentence: the names of the program's settings for it."""
    in_python = bool({"calls_in_python", "has_own_page"} & diagnosis.told)
    names = names_of(key, diagnosis.program, diagnosis.limits, in_python=in_python)
    if _has_other_names(diagnosis):
        names = ""
    return {"setting": names} if names else {"setting_key": "setting_unnamed"}
