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
        "Fragmentation: PyTorch's cache has enough memory, but in pieces too small for the request."
    ),
    "cause_fragmentation_free": "Fragmentation: what is free is in pieces too small for the request.",
    "cause_other_process": "Another process holds a large part of this device's memory.",
    "cause_other_process_models": "Other models hold a large part of this device's memory.",
    "cause_request_alone_too_big": "A single tensor is larger than the device allows, however empty it is.",
    "cause_weights_too_big": "The model's weights do not fit on the device.",
    "cause_weights_too_big_twice": (
        "A checkpoint is loaded onto the GPU next to the model, and together they do not fit."
    ),
    "cause_weights_too_big_saving": (
        "The extra copy of the weights while they are saved, merged or gathered does not fit beside them."
    ),
    "cause_weights_too_big_crowded": (
        "What is gathered, loaded or started on one GPU does not fit there beside its share."
    ),
    "cause_activations": (
        "The activations of a step do not fit: what the forward pass saves grows with the batch size and the"
        " input size."
    ),
    "cause_activations_together": (
        "The graphs of all parts of a step are alive together: no backward pass runs before the last part is computed."
    ),
    "cause_activations_inference": (
        "The working memory of one pass does not fit: it grows with the input (length, image size, requests or"
        " rows at a time)."
    ),
    "cause_activations_trial": (
        "The server's trial run does not fit: before it allocates its KV cache, it computes the largest batch"
        " that it is configured for."
    ),
    "cause_activations_data": "The data moved to the GPU as a whole does not fit; no step has run yet.",
    "cause_logits_or_loss": "The logits or the loss over the whole vocabulary do not fit.",
    "cause_attention_scores": "The attention scores do not fit: they grow with the square of the sequence length.",
    "cause_optimizer_state": "The optimizer state does not fit; it is created in the first step and stays.",
    "cause_optimizer_state_set_up": "The weights and the optimizer state do not fit together; no step has run yet.",
    "cause_leak_or_retained_reference": (
        "Something keeps memory alive that is no longer needed: tensors of earlier steps or failures, or an older copy."
    ),
    "cause_memory_fraction_limit": "A limit set for this process was reached, not the capacity of the device.",
    "cause_memory_fraction_limit_server": (
        "The server's memory budget is full: beside the weights and the KV cache, there is no room for the rest"
        " (CUDA graphs, the activations of requests)."
    ),
    "cause_memory_fraction_limit_cache": (
        "The weights and activations fill the server's share of the device: nothing is left of it for the KV cache."
    ),
    "cause_memory_fraction_limit_context": (
        "The KV cache gets what the weights leave of the server's share, which is too little for one sequence of"
        " the allowed length."
    ),
    "cause_memory_fraction_limit_reserved": "The program reserves its share of the device when it starts.",
    "cause_sysmem_fallback": (
        "The driver had moved GPU memory to host memory (Windows or WSL), and that ran out, too."
    ),
    "cause_leak_or_retained_reference_replay": "What is kept of past steps (a replay buffer) fills the memory.",
    "cause_host_ram": "Host memory (RAM) ran out, not GPU memory.",
    "cause_host_ram_told": "It is host memory (RAM) that is used up, not GPU memory.",
    "cause_host_ram_board": "The memory that the CPU and the GPU share on this machine ran out.",
    "cause_host_ram_commit": "What Windows can commit of RAM and page file together ran out, not GPU memory.",
    "cause_shared_memory": (
        "Shared memory (/dev/shm), through which processes such as DataLoader workers pass data, ran out, not GPU"
        " memory."
    ),
    "cause_driver_level": (
        "The driver, or a library that requests memory directly from it, could not get memory, outside PyTorch's"
        " own allocator."
    ),
    "cause_driver_level_elsewhere": (
        "The driver, or a library that requests memory directly from it, could not get memory."
    ),
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
    "phase_optimizer_step": "It failed in the optimizer step: {code}",
    "phase_evaluation": "It failed during evaluation or inference: {code}",
    "phase_saving": "It failed while saving a checkpoint: {code}",
    # Evidence: the numbers and lines that a judgement rests on.
    "allocated_above_capacity": (
        "PyTorch held {held_bytes} on a device of {total_bytes}. That is possible: the driver had put the rest"
        " into host memory."
    ),
    "limit_binds": "{held_bytes} held and {requested_bytes} requested, under a limit of {limit_bytes}.",
    "free_above_request": "{free_bytes} were free, yet a request of {requested_bytes} was refused.",
    "private_pools_hold": (
        "{private_pool_bytes} of the {allocated_bytes} allocated are in private pools of CUDA graphs."
    ),
    "request_above_capacity": "{requested_bytes} were requested in one piece; the device has {total_bytes} in all.",
    "above_block_limit": (
        "{requested_bytes} were requested in one block with {free_bytes} free: Intel's driver refuses blocks of"
        " {limit_bytes} or more unless UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1 is set."
    ),
    "tensor_attention_scores": "The failing line computes attention scores: {code}",
    "tensor_logits_or_loss": "The failing line computes logits or a loss: {code}",
    "tensor_matches": "The requested size is that of one tensor of this model: {formula}.",
    "alive_in_call": (
        "Of the {allocated_bytes} allocated, {own_bytes} were alive only in the failed call: what its forward"
        " pass saves."
    ),
    "tensor_kv_cache": (
        "The failing line extends the KV cache: {code} It grows with batch size, length and layers at each token,"
        " and concatenation briefly holds both the old and the new one. A static, quantized or offloaded cache"
        ' takes less (cache_implementation="static", "quantized" or "offloaded" in model.generate).'
    ),
    "others_listed": "Process {pids} held {other_bytes} of {total_bytes}.",
    "others_unlisted": (
        "PyTorch held only {held_bytes}; about {other_bytes} of {total_bytes} belong to no listed process."
    ),
    "mps_others": (
        "Other allocations took {other_bytes} of the {limit_bytes} allowed, PyTorch {held_bytes}. They belong to"
        " this program, too: what Metal holds for it beside PyTorch's tensors (temporaries and caches of graphs,"
        " other libraries)."
    ),
    "stuck_above_request": "{stuck_bytes} were reserved but unallocated, more than the {requested_bytes} requested.",
    "room_in_pieces": (
        "{free_bytes} were free and {stuck_bytes} unused in the cache, yet {requested_bytes} could not be allocated."
    ),
    "memory_grows": "The text says that memory keeps growing.",
    "own_tensors_fill": "PyTorch itself held {held_bytes} of {total_bytes}.",
    "little_of_its_own": "PyTorch itself held only {held_bytes} of {total_bytes}: its tensors did not fill the device.",
    "whose_not_said": (
        "The message does not say whether that was weights, activations or optimizer state; in training it is"
        " most often activations, which grow with batch size and length."
    ),
    "rest_unlisted": (
        "{other_bytes} of {total_bytes} belong neither to PyTorch nor to a listed process: CUDA libraries, NCCL,"
        " or programs that the message does not show."
    ),
    "why_not_granted": (
        "Memory that is free but refused: another program held it at that moment, a driver sets a limit (Windows,"
        " WSL, Jetson), or its address space is fragmented."
    ),
    "calls_alive": Plural(
        "The model was called {count} time since the last optimizer step, and what the call saved for a backward"
        " pass is still alive ({kept_bytes}): some list, sum or variable holds its output or loss.",
        (
            "The model was called {count} times since the last optimizer step, and what the calls saved for a"
            " backward pass is still alive ({kept_bytes}): some list, sum or variable holds their outputs or losses."
        ),
    ),
    "earlier_steps_alive": (
        "{kept_bytes} allocated in earlier steps are still alive, and are neither weights nor gradients nor"
        " optimizer state: something holds on to them."
    ),
    "of_rank": "It ran out of memory in rank {rank} of a job of {size} processes, each on its own card.",
    "start_supposed": (
        "oom_magic was loaded after the failure: what the cell found on the card is inferred from what is there now."
    ),
    "rehearsal_fits": (
        "Rehearsed as it is, the run needs {needed_bytes} of the {usable_bytes} available: it would fit. What"
        " failed was larger, or something else held memory then."
    ),
    "grows_later": Plural(
        "Rehearsed as it is for {num_steps} optimizer step, the run needs {needed_bytes} of the {usable_bytes} that"
        " can be had: what grows fills them later.",
        "Rehearsed as it is for {num_steps} optimizer steps, the run needs {needed_bytes} of the {usable_bytes} that"
        " can be had: what grows fills them later.",
        "num_steps",
    ),
    "first_steps_fit": Plural(
        "Rehearsed as it is for {num_steps} optimizer step, the run needs {needed_bytes} of the {usable_bytes}"
        " available: it would fit. What failed came later or was larger, or something else held memory then.",
        (
            "Rehearsed as it is for {num_steps} optimizer steps, the run needs {needed_bytes} of the {usable_bytes}"
            " available: they would fit. What failed came later or was larger, or something else held memory then."
        ),
        "num_steps",
    ),
    "steps_differ": (
        "The steps of the loop have batches of different sizes: the estimates are for its first {num_steps}"
        " steps; a later one can take more."
    ),
    "largest_sample": (
        "The samples of the data have different sizes: most rehearsed batches have the largest of the {count} in them,"
        " as one batch of each epoch has. Blocks of many sizes can leave the cache in more pieces, which takes a few"
        " percent more."
    ),
    "calls_followed": (
        "The cell runs no optimizer step: the estimates are for its first {num_calls} calls of a model; later"
        " ones can take more."
    ),
    "calls_continued": (
        "The cell runs no optimizer step: its first {num_calls} calls of a model were followed, and the iterations that"
        " are left of its loop were taken to go on like the last ones, with sizes that grow on as theirs did."
    ),
    "later_takes_more": (
        "The steps fit with the first of these changes, but what follows them, such as an evaluation, takes more:"
        " {needed_bytes} by the end."
    ),
    "no_message": "The text contains no error message about memory.",
    # The budget's rows.
    "budget_allocated": "allocated to tensors",
    "budget_private_pools": "private pools of CUDA graphs",
    "budget_stuck": "stuck in PyTorch's cache",
    "budget_reserved": "reserved by PyTorch",
    "budget_own_process": "this process",
    "budget_own_outside": "this process, outside PyTorch",
    "budget_other_processes": "other processes",
    "budget_listed_process": "the process that the message lists: this one or another",
    "budget_mps_other": "other allocations on this Mac's GPU",
    "budget_free": "free",
    "budget_rounding": "rounding of the printed sizes",
    "budget_unexplained": "held by no listed process",
    "budget_outside": "outside PyTorch: CUDA context, libraries, other processes",
    "budget_outside_device": "outside PyTorch: the device's context, libraries, other processes",
    "budget_in_system_memory": "moved to host memory",
    "budget_contradiction": "the printed sizes contradict each other",
    "budget_above_limit": "above PyTorch's own limit",
    "budget_not_said": "not stated",
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
    "tensor_name_stated": "the array or tensor whose shape is written there",
    "tensor_not_printed": "The message does not state the requested size.",
    "tensor_nameless": (
        "2.00 and 20.00 MiB are what PyTorch requests when any small tensor needs room: they do not identify a tensor."
    ),
    "tensor_none_fits": (
        "No common tensor of this model has the requested size: its batches may be longer than the text says, or"
        " it is another model."
    ),
    "tensor_other_length": (
        "At the length in the text, no common tensor of this model has the requested size; at a shorter length,"
        " these do."
    ),
    "tensor_unknown_model": "Nothing is known about the model, and no common shape has this size.",
    # Assessments of PyTorch's own tip.
    "tip_delays": (
        "PyTorch's tip would only have delayed it: {stuck_bytes} stuck in its cache would have covered these"
        " {requested_bytes}, but are little compared with the {held_bytes} held."
    ),
    "tip_delays_with_free": (
        "PyTorch's tip would only have delayed it: {stuck_bytes} stuck in its cache, with the {free_bytes} free,"
        " would have covered these {requested_bytes}, but are little compared with the {held_bytes} held."
    ),
    "tip_applies": (
        "PyTorch's tip applies: {stuck_bytes} stuck in its cache would have covered the {requested_bytes}."
    ),
    "tip_applies_with_free": (
        "PyTorch's tip may help: {stuck_bytes} stuck in its cache and {free_bytes} free would together have"
        " covered the {requested_bytes}."
    ),
    "tip_does_not_apply": (
        "PyTorch's tip does not help: its cache holds only {stuck_bytes}, but {requested_bytes} were requested."
    ),
    "tip_already_followed": (
        "PyTorch's tip is already followed (expandable_segments is on), yet {stuck_bytes} are stuck;"
        " {requested_bytes} were requested."
    ),
    "tip_unsupported": (
        "PyTorch's tip fits the numbers ({stuck_bytes} stuck, {requested_bytes} requested), but"
        " expandable_segments does not work on {system}; max_split_size_mb does."
    ),
    # How to read the numbers.
    "fact_expandable_windows": "expandable_segments has no effect on Windows: PyTorch ignores the setting there.",
    "fact_no_shutdown": (
        "Running out of GPU memory ends a program; it does not shut a machine down. If the machine itself powers"
        " off, check its power supply, temperature and RAM."
    ),
    "fact_own_pid": (
        "Process {pid} ({own_bytes}) is this very process: inside a container, the message shows its process"
        " ID on the host."
    ),
    "fact_process_size_unknown": "A size of 17179869184.00 GiB means that the driver does not report it.",
    "fact_accumulation": (
        "Gradient accumulation does not change the memory of a step: microbatches run one after the other, so"
        " only the size of one counts."
    ),
    "fact_device_zero": "The text ends at the device's number, as PyTorch 2.3 does for device 0 only.",
    "fact_private_pools": (
        "{private_pool_bytes} counted as allocated are free, but only for the CUDA graph that owns them."
    ),
    "fact_cached_excludes_allocated": "In this version, cached means the memory reserved beyond what is allocated.",
    "fact_free_above_capacity": "{free_bytes} free is more than the capacity: this driver misreports one of the two.",
    # Meanings: what a message without numbers says.
    "meaning_short": "The device's memory ran out; the message prints no sizes.",
    "meaning_cuda_error_oom_elsewhere": "The driver found no free memory.",
    "meaning_cuda_v2.3_nul_cut": "PyTorch 2.3 ran out of memory and truncated its own message.",
    "meaning_cuda_preempted": (
        "PyTorch refused the request in advance: it would exceed the per-process memory fraction."
    ),
    "meaning_cuda_absurd_size": (
        "The requested size is an overflowed number (near 2**64 bytes it is a negative one): sizes multiplied on"
        " the failing line exceed what their integer type holds, or a shape there is wrong."
    ),
    "meaning_cuda_malloc_async": "The driver's own allocator (cudaMallocAsync) ran out of memory.",
    "meaning_cuda_thc_pre0.4.1": "PyTorch 0.4.0 or older ran out of device memory; it prints no sizes.",
    "meaning_cuda_error_oom": (
        "The driver found no free memory. PyTorch's own allocator prints sizes since 0.4.1, so the call may have"
        " come from outside it."
    ),
    "meaning_cuda_driver_error": (
        "The driver could not map memory, as expandable_segments requires; under WSL that fails early."
    ),
    "meaning_xpu_host": "Intel's driver (Level Zero) found no free host memory.",
    "meaning_xpu_driver": "Intel's driver (Level Zero) could not allocate memory.",
    "meaning_jetson_nvmap": "The Jetson's memory manager (NvMap) refused the allocation.",
    "meaning_cuda_va_exhausted": (
        "Virtual address space ran out, not device memory: reserve less for expandable segments."
    ),
    "meaning_cublas": (
        "cuBLAS could not be initialized, most often because the device is full; an index out of range can"
        " look the same."
    ),
    "meaning_cudnn": "cuDNN could not be initialized or find an algorithm, most often because the device is full.",
    "meaning_cuda_library_misuse": "A CUDA library was called with arguments it does not support.",
    "meaning_nccl": (
        "NCCL, the communication between GPUs, hit a CUDA error; its buffers are outside PyTorch's allocator."
    ),
    "meaning_ctranslate2": (
        "CTranslate2 (faster-whisper, whisperX) could not allocate more GPU memory; its message has no sizes."
    ),
    "meaning_third_party_cuda_oom": "An extension requested memory from the driver itself and got none.",
    "meaning_bitsandbytes": "bitsandbytes' own allocation failed, outside PyTorch's allocator.",
    "meaning_nvml_assert": (
        "An out-of-memory error is hidden behind this one: PyTorch failed while collecting its statistics. After"
        " a driver update, restart the machine."
    ),
    "meaning_allocator_assert": "This is a bug in PyTorch's allocator, not a lack of memory.",
    "meaning_cpu_allocator": "A tensor on the CPU could not be allocated in RAM.",
    "meaning_cpu_negative_size": "A tensor of negative size was requested: a bug in the shapes.",
    "meaning_directml": "DirectML could not allocate memory on the GPU; it prints the request and no other size.",
    "meaning_numpy": "A NumPy array could not be allocated in RAM.",
    "meaning_memory_error": "Python could not allocate RAM.",
    "meaning_tensorflow_host": "TensorFlow, which runs on the CPU there, could not allocate RAM.",
    "meaning_bad_alloc": "C++ code could not allocate RAM.",
    "meaning_host_allocation": "A program could not get the RAM that it requested from the system.",
    "meaning_graphics_api": "A graphics API (Vulkan, OpenCL, Direct3D) could not allocate memory on its device.",
    "meaning_fork_enomem": "The system had too little RAM to start another process.",
    "meaning_windows_paging_file": "Windows' page file is too small for the requested memory.",
    "meaning_static_tls": "A library was loaded too late to get its thread-local storage; import it first.",
    "meaning_dataloader": "A DataLoader worker died of a bus error, most often because shared memory is full.",
    "meaning_dataloader_killed": "The system killed a DataLoader worker, most often because RAM ran out.",
    "meaning_dataloader_other_signal": "A DataLoader worker was terminated from outside; the text does not say why.",
    "meaning_dataloader_exited": (
        "A DataLoader worker ended without a message; most often the system killed it because RAM ran out, or"
        " /dev/shm was full."
    ),
    "meaning_dataloader_segfault": "A DataLoader worker crashed; that is a bug, not a lack of memory.",
    "meaning_shared_memory_full": "/dev/shm is full.",
    "meaning_slurm_oom_kill": "SLURM ended the job because it used more RAM than it had requested (--mem).",
    "meaning_scheduler_oom_kill": "The scheduler ended the job because it used more RAM than it had requested.",
    "meaning_ray_oom_kill": (
        "Ray ended a worker because the RAM of the machine was nearly full; this is not about GPU memory."
    ),
    "meaning_disk_full": "The disk is full, or a file could not be written completely; this is not about memory.",
    "meaning_kernel_oom_killer": "The operating system killed the process because RAM ran out.",
    "meaning_sigkill": "The process was killed (signal 9), most often by the system because RAM ran out; see dmesg.",
    "meaning_notebook_host": "The notebook lost its kernel process, most often because RAM ran out.",
    "meaning_kernel_died": "The kernel died without reaching Python. Running out of RAM is the most frequent reason.",
    "meaning_vllm": "vLLM's share of the device (gpu_memory_utilization) leaves nothing for its KV cache.",
    "meaning_vllm_context": (
        "The longest sequence that vLLM should allow (max_model_len) needs more than its KV cache has room for."
    ),
    "meaning_sglang": "SGLang's share of the device (--mem-fraction-static) leaves nothing for its KV cache.",
    "meaning_paddle": "PaddlePaddle ran out of device memory.",
    "meaning_mps_command_buffer": "The Mac had too little memory left to run the work submitted to the GPU.",
    "meaning_vllm_startup": "At start, less of the device is free than vLLM was configured to take.",
    "meaning_hf_offload": "The weights do not fit on the GPU, so some were placed on the CPU or the disk.",
    "meaning_hf_auto_batch": "Every batch size failed, down to 1: a single sample is too much.",
    "meaning_jax": "JAX ran out of device memory.",
    "meaning_jax_launch": (
        "The driver could not launch a kernel: what JAX reserves of the device at its start leaves the driver too"
        " little."
    ),
    "meaning_tensorflow": "TensorFlow ran out of memory.",
    "meaning_mps": "The Mac's GPU reached its memory limit.",
    "meaning_mps_invalid_buffer": "A single buffer is larger than Metal allows, however much memory is free.",
    "meaning_ipex_4gb": "This Intel GPU does not support blocks larger than 4 GB.",
    "meaning_hip": "The AMD GPU ran out of memory.",
    "meaning_xpu": "The Intel GPU ran out of memory.",
    "meaning_npu": "The Ascend NPU ran out of memory.",
    "meaning_musa": "The Moore Threads GPU ran out of memory.",
    "meaning_mlu": "The Cambricon device ran out of memory.",
    "meaning_cuda_cached_0.4.1-1.3": "PyTorch 0.4.1 to 1.3 ran out of memory.",
    "meaning_cuda_reserved_1.4-2.0": "PyTorch 1.4 to 2.0 ran out of memory.",
    "meaning_cuda_v2.1": "PyTorch 2.1 ran out of memory.",
    "meaning_cuda_v2.2+": "PyTorch 2.2 or newer ran out of memory.",
    "meaning_triton": "A Triton kernel needs more on-chip shared memory than the GPU has; smaller blocks help.",
    "meaning_inductor_triton": (
        "torch.compile tried a kernel that does not fit on the chip and continues with others; this is harmless."
    ),
    "meaning_device_side_assert": "A kernel hit an invalid value, most often an index or a label out of range.",
    "meaning_no_gpu": (
        "PyTorch cannot use a GPU here (%oom_doctor says why); %%gpumem dry-runs the cell on a pretend one."
    ),
    "meaning_illegal_memory_access": "A kernel accessed memory that it does not own: a bug, not a lack of memory.",
    "meaning_cuda_invalid_config": "A kernel was launched with a grid or block size that the GPU does not allow.",
    "meaning_misaligned_address": "A kernel read from a misaligned address: a bug, not a lack of memory.",
    "meaning_cuda_other_error": "This CUDA error has nothing to do with the amount of memory.",
    "meaning_int32_limit": (
        "The tensor has more elements than this operator can index (2**31), however much memory there is."
    ),
    "meaning_mps_2e32_elements": "The tensor has more elements than Apple's GPU backend can index (2**32).",
    "meaning_cuda_driver_call": (
        "A program requested memory directly from the CUDA driver, not through PyTorch, and got none."
    ),
    "meaning_class_only": "The device ran out of memory; the text has the name of the error but not its message.",
    "meaning_llama_cpp": "llama.cpp could not allocate one of its buffers on the GPU.",
    "meaning_ggml_pool": (
        "A ggml work buffer of fixed size is too small for a batch of this size: use a smaller n_batch or a newer"
        " version. This is not about the memory of the device."
    ),
    "meaning_llama_cpp_host": "llama.cpp could not allocate one of its buffers in RAM.",
    "meaning_ollama_host": "Ollama expects the model and its context to need more memory (RAM) than is free.",
    "meaning_pinned_memory": (
        "Pinned (page-locked) host memory could not be allocated; under WSL only a small part of the RAM can be pinned."
    ),
    "meaning_onnxruntime": "ONNX Runtime could not allocate a buffer in its arena.",
    "meaning_tensorrt": "TensorRT could not allocate the GPU memory that it requested.",
    "meaning_tensorrt_tactic": (
        "TensorRT skipped an implementation of a layer that needs more memory than is free; if the engine is"
        " still built, this is only a warning."
    ),
    "meaning_cupy": "CuPy's memory pool ran out of GPU memory.",
    "meaning_rmm": "RAPIDS (RMM) ran out of GPU memory; std::bad_alloc does not mean the computer's RAM here.",
    "meaning_thrust": (
        "A Thrust algorithm could not allocate GPU memory; std::bad_alloc does not mean the computer's RAM here."
    ),
    "meaning_numba": "Numba could not allocate GPU memory for an array.",
    "meaning_java_heap": "The Java heap is full (-Xmx); this is neither GPU memory nor all of the RAM.",
    "meaning_pod_oom_kill": (
        "Kubernetes ended the container because it used more RAM than its limit (resources.limits.memory)."
    ),
    "meaning_pod_evicted": "Kubernetes evicted the pod because its node ran low on RAM.",
    "meaning_sigbus": "The process died of a bus error (signal 7), most often because /dev/shm is full.",
    "meaning_tgi": (
        "Text Generation Inference has no room for the number of tokens that it is configured to process at once."
    ),
    "meaning_npu_runtime": "Ascend's runtime (CANN) could not allocate memory on the NPU.",
    "meaning_no_kernel_image": (
        "The program was not built for this GPU's architecture: install a build that supports it. This is not"
        " about memory."
    ),
    "meaning_catboost": "CatBoost could not allocate memory on the GPU.",
    "meaning_told_device": "The text says that device memory ran out; no known message was found in it.",
    "meaning_told_killed": ("The text says that a process was killed, or that it died without a message."),
    "meaning_told_host": "The text says that host memory (RAM) ran out; no known message was found in it.",
    "meaning_told": "The text says that memory ran out; no known message was found in it.",
    "meaning_sd_webui": "The web UI's attention does not fit at this image size.",
    "meaning_opencv": "OpenCV could not allocate RAM for an image.",
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
