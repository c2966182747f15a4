"""Every sentence that %oom_explain says, in English.

Keys are ``group_name``; the fields in braces are the same in both languages, and those that end in
``_bytes`` are filled with sizes.
"""

from __future__ import annotations

from oom_magic.errors import REFUSALS
from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.sentences.evidence import EVIDENCE
from oom_magic.explain.sentences.pages import PAGE_CATALOGUE
from oom_magic.explain.sentences.remedies import REASONS, REMEDIES
from oom_magic.language import Language, Plural, Sentences, render

CATALOGUE: Sentences = {
    # Causes: what happened, in one line.
    "cause_fragmentation": (
        "Fragmentation: enough memory lies in PyTorch's cache, but in pieces too small for the request."
    ),
    "cause_other_process": "Another process holds a large part of this device's memory.",
    "cause_other_process_models": "Other models hold a large part of this device's memory.",
    "cause_request_alone_too_big": "One tensor alone is larger than the device allows, however empty it is.",
    "cause_weights_too_big": "The model's weights do not fit on the device.",
    "cause_weights_too_big_twice": (
        "A checkpoint that is loaded onto the GPU lies there beside the model, and together they do not fit."
    ),
    "cause_weights_too_big_saving": (
        "What is copied of the weights while they are saved, merged or gathered does not fit beside them."
    ),
    "cause_activations": (
        "The activations of a step do not fit: what the forward pass keeps grows with the batch and the inputs' size."
    ),
    "cause_activations_together": (
        "The graphs of all parts of a step are alive together: nothing is walked back before the last part is computed."
    ),
    "cause_activations_inference": (
        "What it computes at once does not fit: that grows with the input (length, picture, requests or rows at once)."
    ),
    "cause_activations_trial": (
        "The server's trial run does not fit: before it allots its cache it computes as much at once as it is told to"
        " take."
    ),
    "cause_activations_data": "The data that are put on the GPU as a whole do not fit; no step has run yet.",
    "cause_logits_or_loss": "The logits or the loss over the whole vocabulary do not fit.",
    "cause_attention_scores": "The attention scores do not fit: they grow with the square of the sequence length.",
    "cause_optimizer_state": "The optimizer's state does not fit; it is created in the first step and stays.",
    "cause_leak_or_retained_reference": (
        "Something keeps alive what is no longer needed: tensors of earlier steps or failures, an older copy."
    ),
    "cause_memory_fraction_limit": "A limit set for this process was reached, not the end of the device's memory.",
    "cause_memory_fraction_limit_server": (
        "What the server may take is full: beside its weights and its cache of keys and values, what comes on top"
        " (CUDA graphs, the activations of requests) finds no room."
    ),
    "cause_memory_fraction_limit_cache": (
        "The server's share of the device is full with its weights and what it computes at once: nothing is left of it"
        " for the cache of keys and values."
    ),
    "cause_memory_fraction_limit_context": (
        "The cache of keys and values gets what the server's share leaves beside the weights, and that holds no"
        " sequence of the length that is allowed."
    ),
    "cause_memory_fraction_limit_reserved": "The program takes its share of the device at its start.",
    "cause_sysmem_fallback": "The driver had moved memory to the computer's RAM (Windows or WSL); that ran out, too.",
    "cause_host_ram": "The computer's own memory (RAM) ran out, not the GPU's.",
    "cause_host_ram_board": "The memory that CPU and GPU share on this board ran out.",
    "cause_host_ram_commit": "What Windows can promise of RAM and paging file together ran out, not the GPU's memory.",
    "cause_shared_memory": (
        "The shared memory (/dev/shm), through which processes such as data loading workers pass data, ran out, not the"
        " GPU's memory."
    ),
    "cause_driver_level": (
        "The driver, or a library that asks it directly, could not get memory, outside PyTorch's own allocator."
    ),
    "cause_driver_level_elsewhere": "The driver, or a library that asks it directly, could not get memory.",
    "cause_not_oom": "This is not about running out of device memory.",
    "cause_unknown": "The text alone does not establish the cause.",
    # How sure a judgement is.
    "confidence_certain": "certain",
    "confidence_likely": "likely",
    "confidence_possible": "possible",
    "confidence_open": "open",
    # Phases of a run.
    "phase_loading": "It failed while loading weights: {code}",
    "phase_forward": "It failed in the forward pass: {code}",
    "phase_loss": "It failed while computing the loss: {code}",
    "phase_backward": "It failed in the backward pass: {code}",
    "phase_optimizer_step": "It failed in the optimizer's step: {code}",
    "phase_evaluation": "It failed during evaluation, and no torch.no_grad() is to be seen: {code}",
    "phase_saving": "It failed while saving a checkpoint: {code}",
    # Evidence: the numbers and lines that a judgement rests on.
    "allocated_above_capacity": (
        "PyTorch held {held_bytes} on a device of {total_bytes}. That is no misprint: the driver had put the"
        " rest into the computer's RAM."
    ),
    "limit_binds": "{held_bytes} held and {requested_bytes} asked for, under a limit of {limit_bytes}.",
    "free_above_request": "{free_bytes} were free, yet a request of {requested_bytes} was refused.",
    "private_pools_hold": (
        "{private_pool_bytes} of the {allocated_bytes} allocated lie in private pools of CUDA graphs."
    ),
    "request_above_capacity": "{requested_bytes} were asked for; the device allows {total_bytes} in all.",
    "above_block_limit": (
        "{requested_bytes} were asked for in one block with {free_bytes} free: Intel's driver gives no block of"
        " {limit_bytes} or more unless UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1 is set."
    ),
    "tensor_attention_scores": "The failing line computes attention scores: {code}",
    "tensor_logits_or_loss": "The failing line computes logits or a loss: {code}",
    "tensor_matches": "The size asked for is that of one tensor of this model: {formula}.",
    "alive_in_call": (
        "Of the {allocated_bytes} allocated, {own_bytes} were alive in the failed call alone: what its forward keeps."
    ),
    "tensor_kv_cache": (
        "The failing line makes the cache of keys and values longer: {code} It grows with batch, length and layers by"
        " each token, and joining it anew holds the old and the new one for a moment. One of fixed size, of fewer bits"
        ' or in RAM takes less (cache_implementation="static", "quantized" or "offloaded" in model.generate).'
    ),
    "others_listed": "Process {pids} held {other_bytes} of {total_bytes}.",
    "others_unlisted": (
        "PyTorch held only {held_bytes}; about {other_bytes} of {total_bytes} belong to no process listed."
    ),
    "mps_others": (
        "Other allocations took {other_bytes} of the {limit_bytes} allowed, PyTorch {held_bytes}. They are this"
        " program's, too: what Metal holds for it beside PyTorch's tensors (temporaries and caches of graphs, other"
        " libraries)."
    ),
    "stuck_above_request": "{stuck_bytes} were reserved but unallocated, more than the {requested_bytes} asked for.",
    "room_in_pieces": "{free_bytes} free and {stuck_bytes} unused in the cache, yet {requested_bytes} found no place.",
    "memory_grows": "The text says that memory keeps growing.",
    "own_tensors_fill": "PyTorch itself held {held_bytes} of {total_bytes}.",
    "whose_not_said": (
        "Whether that were weights, activations or optimizer state, the message does not say; in training it is"
        " most often activations, which grow with batch and length."
    ),
    "rest_unlisted": (
        "{other_bytes} of {total_bytes} belong neither to PyTorch nor to a process listed: CUDA's libraries,"
        " NCCL, or programs that the message does not show."
    ),
    "why_not_granted": (
        "Memory that is free and yet refused: another program held it at that moment, a driver sets a limit"
        " (Windows, WSL, Jetson), or its address space is in pieces."
    ),
    "calls_alive": Plural(
        "The model was called {count} time since the last optimizer step, and what the call kept for a"
        " backward is still alive ({kept_bytes}): some list, sum or variable holds its output or loss.",
        "The model was called {count} times since the last optimizer step, and what the calls kept for a"
        " backward is still alive ({kept_bytes}): some list, sum or variable holds their outputs or losses.",
    ),
    "earlier_steps_alive": (
        "{kept_bytes} made in earlier steps are still alive, and are neither weights nor gradients nor"
        " optimizer state: something keeps them."
    ),
    "of_rank": "It ran out in rank {rank} of a job of {size} processes, each on a card of its own.",
    "start_supposed": (
        "oom_magic was loaded after the failure: what the cell found on the card is worked out from what is there now."
    ),
    "rehearsal_fits": (
        "Rehearsed as it is, the run needs {needed_bytes} of the {usable_bytes} that can be had: it would fit."
        " What failed was larger, or something else held memory then."
    ),
    "first_steps_fit": Plural(
        "Rehearsed as it is for {num_steps} optimizer step, the run needs {needed_bytes} of the {usable_bytes} that"
        " can be had: it would fit. What failed came later or was larger, or something else held memory then.",
        "Rehearsed as it is for {num_steps} optimizer steps, the run needs {needed_bytes} of the {usable_bytes} that"
        " can be had: they would fit. What failed came later or was larger, or something else held memory then.",
        "num_steps",
    ),
    "steps_differ": (
        "The loop's steps bring batches of different sizes: prices are those of its first {num_steps} steps; a later"
        " one can take more."
    ),
    "calls_followed": (
        "No optimizer steps while the cell runs: prices are those of its first {num_calls} calls of a model; later ones"
        " can take more."
    ),
    "later_takes_more": (
        "The steps fit with the change that was to be made first, but what follows them, such as an evaluation, takes"
        " more: {needed_bytes} to the end."
    ),
    "no_message": "The text holds no error message about memory.",
    # The budget's rows.
    "budget_allocated": "allocated to tensors",
    "budget_private_pools": "private pools of CUDA graphs",
    "budget_stuck": "stuck in PyTorch's cache",
    "budget_reserved": "reserved by PyTorch",
    "budget_own_process": "this process",
    "budget_own_outside": "this process, outside PyTorch",
    "budget_other_processes": "other processes",
    "budget_mps_other": "other allocations on this Mac's GPU",
    "budget_free": "free",
    "budget_rounding": "rounding of the printed sizes",
    "budget_unexplained": "held by nobody listed",
    "budget_outside": "outside PyTorch: CUDA context, libraries, other processes",
    "budget_outside_device": "outside PyTorch: the device's context, libraries, other processes",
    "budget_in_system_memory": "moved to system memory",
    "budget_contradiction": "the printed sizes contradict each other",
    "budget_above_limit": "above PyTorch's own limit",
    "budget_not_said": "not said",
    "budget_capacity": "capacity",
    "budget_limit": "PyTorch's limit",
    # Tensors that may have been requested.
    "tensor_name_attention_scores": "the attention scores",
    "tensor_name_logits": "the logits",
    "tensor_name_mlp_activation": "an activation of the feed-forward layer",
    "tensor_name_hidden_states": "hidden states",
    "tensor_name_qkv": "queries, keys and values together",
    "tensor_name_embedding_weight": "the embedding's or output layer's weight",
    "tensor_name_mlp_weight": "a weight of the feed-forward layer",
    "tensor_name_attention_weight": "a weight of the attention layer",
    "tensor_name_all_parameters": "a copy of all parameters",
    "tensor_name_stated": "the array that the message names",
    "tensor_not_printed": "The message prints no request.",
    "tensor_nameless": (
        "2.00 and 20.00 MiB are what PyTorch asks for when any small tensor needs room: they name none."
    ),
    "tensor_none_fits": (
        "No usual tensor of this model has the size that was asked for: its batches may be longer than the text says,"
        " or it is another model."
    ),
    "tensor_other_length": (
        "At the length that the text names no usual tensor of this model has the size that was asked for; at a"
        " shorter one these have."
    ),
    "tensor_unknown_model": "Nothing is known of the model, and no common shape has this size.",
    # Assessments of PyTorch's own tip.
    "tip_delays": (
        "PyTorch's tip would only have delayed it: {stuck_bytes} stuck in its cache would have served these"
        " {requested_bytes}, but are little beside the {held_bytes} held."
    ),
    "tip_delays_with_free": (
        "PyTorch's tip would only have delayed it: {stuck_bytes} stuck in its cache, with the {free_bytes} free, would"
        " have served these {requested_bytes}, but are little beside the {held_bytes} held."
    ),
    "tip_applies": "PyTorch's tip applies: {stuck_bytes} stuck in its cache would have served the {requested_bytes}.",
    "tip_applies_with_free": (
        "PyTorch's tip may help: {stuck_bytes} stuck in its cache and {free_bytes} free would together have served"
        " the {requested_bytes}, as one growing segment."
    ),
    "tip_does_not_apply": (
        "PyTorch's tip does not help: its cache holds only {stuck_bytes}, {requested_bytes} were asked for."
    ),
    "tip_already_followed": (
        "PyTorch's tip is followed already (expandable_segments is on), yet {stuck_bytes} are stuck;"
        " {requested_bytes} were asked for."
    ),
    "tip_unsupported": (
        "PyTorch's tip fits the numbers ({stuck_bytes} stuck, {requested_bytes} asked for), but"
        " expandable_segments does not work on {system}; max_split_size_mb does."
    ),
    # How to read the numbers.
    "fact_expandable_windows": "expandable_segments does nothing on Windows: PyTorch ignores the setting there.",
    "fact_no_shutdown": (
        "Running out of GPU memory ends a program; it does not shut a machine down. Where the machine itself goes off,"
        " look at its power supply, its heat and its RAM."
    ),
    "fact_own_pid": "Process {pid} ({own_bytes}) is this very process: a container shows its number on the host.",
    "fact_process_size_unknown": "A size of 17179869184.00 GiB means that the driver does not tell.",
    "fact_accumulation": (
        "Gradient accumulation leaves the memory of a step as it is: microbatches run one after the other, so"
        " only the size of one counts."
    ),
    "fact_device_zero": "The text ends at the device's number, which PyTorch 2.3 does for device 0 only.",
    "fact_private_pools": (
        "{private_pool_bytes} counted as allocated are free, but only for the CUDA graph that owns them."
    ),
    "fact_cached_excludes_allocated": "In this version, cached means the memory kept beside what is allocated.",
    "fact_free_above_capacity": "{free_bytes} free is more than the capacity: this driver misreports one of the two.",
    # Meanings: what a message without numbers says.
    "meaning_short": "PyTorch's allocator ran out; the text lacks the device's numbers.",
    "meaning_cuda_error_oom_elsewhere": "The driver found no memory.",
    "meaning_cuda_v2.3_nul_cut": "PyTorch 2.3 ran out and cut its own message short.",
    "meaning_cuda_preempted": (
        "PyTorch refused the request in advance: it would exceed the per-process memory fraction."
    ),
    "meaning_cuda_absurd_size": (
        "The size asked for is a number that overflowed (near 2**64 bytes it is a negative one): sizes multiplied on "
        "the"
        " failing line exceed what its integers hold, or a shape there is wrong."
    ),
    "meaning_cuda_malloc_async": "The driver's own allocator (cudaMallocAsync) ran out.",
    "meaning_cuda_thc_pre0.4.1": "PyTorch 0.4.0 or older ran out of device memory; it prints no sizes.",
    "meaning_cuda_error_oom": (
        "The driver found no memory. PyTorch's own allocator prints sizes since 0.4.1, so the call may have come from"
        " outside it."
    ),
    "meaning_cuda_driver_error": (
        "The driver could not map memory, as expandable_segments asks for; under WSL that fails early."
    ),
    "meaning_xpu_host": "Intel's driver (Level Zero) found none of the computer's own memory.",
    "meaning_xpu_driver": "Intel's driver (Level Zero) gave no memory.",
    "meaning_jetson_nvmap": "The Jetson's memory manager (NvMap) refused the allocation.",
    "meaning_cuda_va_exhausted": (
        "Virtual address space ran out, not device memory: reserve less for expandable segments."
    ),
    "meaning_cublas": "cuBLAS could not start, most often because the device is full; a bad index can look the same.",
    "meaning_cudnn": "cuDNN could not start or find an algorithm, most often because the device is full.",
    "meaning_cuda_library_misuse": "A CUDA library was called with arguments it does not support.",
    "meaning_nccl": "NCCL, the communication between GPUs, met a CUDA error; its buffers lie outside PyTorch.",
    "meaning_ctranslate2": (
        "CTranslate2 (faster-whisper, whisperX) got no more memory of the GPU; its message has no sizes."
    ),
    "meaning_third_party_cuda_oom": "An extension asked the driver for memory itself and got none.",
    "meaning_bitsandbytes": "bitsandbytes' own allocation failed, outside PyTorch's allocator.",
    "meaning_nvml_assert": (
        "An out-of-memory error is hidden behind this: PyTorch failed while collecting its numbers. After a"
        " driver update, restart the machine."
    ),
    "meaning_allocator_assert": "This is a bug in PyTorch's allocator, not a lack of memory.",
    "meaning_cpu_allocator": "A tensor on the CPU found no RAM.",
    "meaning_cpu_negative_size": "A tensor of negative size was asked for: a bug in the shapes.",
    "meaning_directml": "DirectML found no room on the GPU; it prints the request and no other size.",
    "meaning_numpy": "A NumPy array found no RAM.",
    "meaning_memory_error": "Python found no RAM.",
    "meaning_tensorflow_host": "TensorFlow, which computes on the CPU there, found no RAM.",
    "meaning_bad_alloc": "C++ code found no RAM.",
    "meaning_host_allocation": "A program found no RAM for what it asked of the system.",
    "meaning_graphics_api": "A graphics API (Vulkan, OpenCL, Direct3D) found no room on its device.",
    "meaning_fork_enomem": "The system had too little RAM to start another process.",
    "meaning_windows_paging_file": "Windows' paging file is too small for the memory asked for.",
    "meaning_static_tls": "A library came too late to get its thread-local storage; import it first.",
    "meaning_dataloader": "A data loading worker died of a bus error, most often for lack of shared memory.",
    "meaning_dataloader_killed": "The system killed a data loading worker, most often for lack of RAM.",
    "meaning_dataloader_other_signal": "A data loading worker was ended from outside; the text does not say why.",
    "meaning_dataloader_exited": (
        "A data loading worker ended without a word; most often the system killed it for lack of RAM, or /dev/shm was"
        " full."
    ),
    "meaning_dataloader_segfault": "A data loading worker crashed; that is a bug, not a lack of memory.",
    "meaning_shared_memory_full": "/dev/shm is full.",
    "meaning_slurm_oom_kill": "SLURM ended the job because it used more RAM than it had asked for (--mem).",
    "meaning_scheduler_oom_kill": "The scheduler ended the job because it used more RAM than it had asked for.",
    "meaning_ray_oom_kill": (
        "Ray ended a worker because the machine's RAM was nearly full; the GPU's memory is another matter."
    ),
    "meaning_disk_full": "The disk is full, or a file could not be written whole; memory is not the matter.",
    "meaning_kernel_oom_killer": "The operating system ended the process for lack of RAM.",
    "meaning_sigkill": "The process was killed (signal 9), most often by the system for lack of RAM; see dmesg.",
    "meaning_notebook_host": "The notebook lost its process, most often for lack of RAM.",
    "meaning_kernel_died": "The kernel died; nothing of it reached Python. Lack of RAM is the most frequent reason.",
    "meaning_vllm": "vLLM's share of the device (gpu_memory_utilization) leaves nothing for its cache.",
    "meaning_vllm_context": (
        "The longest sequence that vLLM is to allow (max_model_len) takes more than its cache has room for."
    ),
    "meaning_sglang": "SGLang's share of the device (--mem-fraction-static) leaves nothing for its cache.",
    "meaning_paddle": "PaddlePaddle ran out of device memory.",
    "meaning_mps_command_buffer": "The Mac had too little memory left to run what the GPU was given.",
    "meaning_vllm_startup": "At start less of the device is free than vLLM was told to take.",
    "meaning_hf_offload": "The weights do not fit on the GPU, so some were placed on the CPU or the disk.",
    "meaning_hf_auto_batch": "Every batch size failed, down to 1: a single sample is too much.",
    "meaning_jax": "JAX ran out of device memory.",
    "meaning_tensorflow": "TensorFlow ran out of memory.",
    "meaning_mps": "The Mac's GPU reached its limit of memory.",
    "meaning_mps_invalid_buffer": "One buffer is larger than Metal allows; how much is free does not matter.",
    "meaning_ipex_4gb": "This Intel GPU takes no block above 4 GB.",
    "meaning_hip": "The AMD GPU ran out of memory.",
    "meaning_xpu": "The Intel GPU ran out of memory.",
    "meaning_npu": "The Ascend NPU ran out of memory.",
    "meaning_musa": "The Moore Threads GPU ran out of memory.",
    "meaning_mlu": "The Cambricon device ran out of memory.",
    "meaning_cuda_cached_0.4.1-1.3": "PyTorch 0.4.1 to 1.3 ran out.",
    "meaning_cuda_reserved_1.4-2.0": "PyTorch 1.4 to 2.0 ran out.",
    "meaning_cuda_v2.1": "PyTorch 2.1 ran out.",
    "meaning_cuda_v2.2+": "PyTorch 2.2 or newer ran out.",
    "meaning_triton": "A Triton kernel wants more on-chip shared memory than the GPU has; smaller blocks help.",
    "meaning_inductor_triton": (
        "torch.compile tried a kernel that does not fit on the chip and goes on with others; harmless."
    ),
    "meaning_device_side_assert": "A kernel found a wrong value, most often an index or a label out of range.",
    "meaning_no_gpu": (
        "PyTorch can use no GPU here (%oom_doctor tells why); %%gpumem rehearses the cell on a pretend one."
    ),
    "meaning_illegal_memory_access": "A kernel touched memory that is not its own: a bug, not a lack of memory.",
    "meaning_cuda_invalid_config": "A kernel was started with a grid or block that the GPU does not allow.",
    "meaning_misaligned_address": "A kernel read from a misaligned address: a bug, not a lack of memory.",
    "meaning_cuda_other_error": "This CUDA error has nothing to do with the amount of memory.",
    "meaning_int32_limit": (
        "The tensor has more elements than this operator can count (2**31), whatever memory there is."
    ),
    "meaning_mps_2e32_elements": "The tensor has more elements than Apple's GPU backend can count (2**32).",
    "meaning_cuda_driver_call": (
        "A program asked the CUDA driver for memory itself, not through PyTorch, and got none."
    ),
    "meaning_class_only": "The device ran out of memory; the text has the error's name but not its message.",
    "meaning_llama_cpp": "llama.cpp found no room on the GPU for one of its buffers.",
    "meaning_ggml_pool": (
        "A work buffer of ggml, whose size is fixed, is too small for a batch of this size: take a smaller n_batch or a"
        " newer version. The device's memory is another matter."
    ),
    "meaning_llama_cpp_host": "llama.cpp found no room in RAM for one of its buffers.",
    "meaning_ollama_host": "Ollama expects the model and its context to need more memory (RAM) than is free.",
    "meaning_pinned_memory": (
        "Page-locked (pinned) memory of the host could not be had; under WSL only a small part can be pinned."
    ),
    "meaning_onnxruntime": "ONNX Runtime found no room for a buffer of its arena.",
    "meaning_tensorrt": "TensorRT found no GPU memory for what it asked for.",
    "meaning_tensorrt_tactic": (
        "TensorRT skipped a way of computing a layer that needs more memory than is free; if the engine is built in"
        " the end, this is only a warning."
    ),
    "meaning_cupy": "CuPy's memory pool ran out of GPU memory.",
    "meaning_rmm": "RAPIDS (RMM) ran out of GPU memory; std::bad_alloc here is not the computer's RAM.",
    "meaning_thrust": "A Thrust algorithm found no GPU memory; std::bad_alloc here is not the computer's RAM.",
    "meaning_numba": "Numba found no GPU memory for an array.",
    "meaning_java_heap": "The Java heap is full (-Xmx); it is neither the GPU's memory nor all of the RAM.",
    "meaning_pod_oom_kill": (
        "Kubernetes ended the container because it used more RAM than its limit (resources.limits.memory)."
    ),
    "meaning_sigbus": "The process died of a bus error (signal 7), most often because /dev/shm is full.",
    "meaning_tgi": "Text Generation Inference found no room for the tokens that it is told to take at once.",
    "meaning_npu_runtime": "Ascend's runtime (CANN) found no memory on the NPU.",
    "meaning_no_kernel_image": (
        "The program was not built for this GPU's architecture: install a build that supports it. It is not about "
        "memory."
    ),
    "meaning_told_device": "The text says that the GPU's memory ran out; it quotes no message.",
    "meaning_told_killed": ("The text says that a process was killed, or that it died without a message."),
    "meaning_told_host": "The text says that the computer's memory (RAM) ran out; it quotes no message.",
    "meaning_told": "The text says that memory ran out; it quotes no message and does not say which memory.",
    "meaning_sd_webui": "The web UI's attention does not fit at this picture size.",
    "meaning_opencv": "OpenCV found no RAM for an image.",
    **REMEDIES,
}
SENTENCES: Sentences = {
    **CATALOGUE,
    **EVIDENCE,
    **PAGE_CATALOGUE,
    **REASONS,
    **{f"refusal_{key}": sentence for key, sentence in REFUSALS.items()},
}


def translate(key: str, lang: Language = "en", /, **values: object) -> str:
    """The catalogue's sentence for ``key``; values named ``*_bytes`` are written as sizes."""
    return render(SENTENCES[key], lang, values)


def _is_chinese(name: str) -> bool:
    return "\u4e00" <= name[-1:] <= "\u9fff"


def render_evidence(item: Evidence, lang: Language) -> str:
    """A piece of evidence as a sentence; a value named ``x_key`` is translated and inserted as ``x``."""
    keys = {name.removesuffix("_key"): str(key) for name, key in item.values.items() if name.endswith("_key")}
    said = {name: translate(key, lang, **item.values) for name, key in keys.items()}
    text = translate(item.key, lang, **{**item.values, **said})
    if lang == "zh":  # a Latin name stands beside Chinese with a space, a Chinese name without
        for value in filter(_is_chinese, said.values()):
            text = text.replace(f"{value} ", value).replace(f" {value}", value)
    return text[:1].upper() + text[1:] if text.startswith(tuple(said.values())) else text
