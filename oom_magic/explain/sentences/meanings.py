"""What a message without numbers means, by its format (``meaning_<format>``), in English."""

from __future__ import annotations

from oom_magic.language import Sentences

MEANINGS: Sentences = {
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
    "meaning_size_overflow": (
        "A tensor was to be made with a size that overflowed or is negative: a wrong number in the program, not a full"
        " device."
    ),
    "meaning_cuda_malloc_async": "The driver's own allocator (cudaMallocAsync) ran out of memory.",
    "meaning_cuda_thc_pre0.4.1": (
        "PyTorch 0.4.0 or older (or Torch for Lua) ran out of device memory; it prints no sizes."
    ),
    "meaning_cuda_error_oom": (
        "The driver found no free memory. Where PyTorch's own allocator fails, it prints sizes, except in old versions:"
        " elsewhere the request came from outside it."
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
        "A CUDA library (cuBLAS or one like it) could not start or run a call, most often because the device is full;"
        " an index out of range can look the same."
    ),
    "meaning_cudnn": "A cuDNN call failed, most often because the device is full.",
    "meaning_cuda_library_misuse": "A CUDA library was called with arguments it does not support.",
    "meaning_nccl": (
        "NCCL, the communication between GPUs, hit a CUDA error; its buffers are outside PyTorch's allocator."
    ),
    "meaning_ctranslate2": (
        "CTranslate2 (faster-whisper, whisperX) could not allocate more GPU memory; its message has no sizes."
    ),
    "meaning_third_party_cuda_oom": "Memory was requested from the CUDA driver itself, which had none left.",
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
    "meaning_fork_enomem": "The system refused more RAM (errno 12).",
    "meaning_windows_paging_file": "Windows' page file is too small for the requested memory.",
    "meaning_heap_damaged": (
        "The C library found its records of memory damaged: a bug in native code, not a lack of memory."
    ),
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
    "meaning_dask_worker": "Dask restarted a worker that had nearly used up the RAM it was given (memory_limit).",
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
    "meaning_sglang_retracts": "SGLang's KV cache was full: it set a request back, and goes on.",
    "meaning_sglang": "SGLang's share of the device (--mem-fraction-static) leaves nothing for its KV cache.",
    "meaning_paddle": "PaddlePaddle ran out of device memory.",
    "meaning_mps_command_buffer": "The Mac had too little memory left to run the work submitted to the GPU.",
    "meaning_vllm_startup": "At start, less of the device is free than vLLM was configured to take.",
    "meaning_hf_offload": "The weights do not fit on the GPU, so some were placed on the CPU or the disk.",
    "meaning_hf_auto_batch": "Every batch size failed, down to 1: a single sample is too much.",
    "meaning_jax": "JAX ran out of device memory.",
    "meaning_xla_hbm": "XLA found that the compiled program needs more of the TPU's memory (HBM) than a core has.",
    "meaning_jax_launch": (
        "The driver could not launch a kernel: what JAX reserves of the device at its start leaves the driver too"
        " little."
    ),
    "meaning_tensorflow": "TensorFlow ran out of memory.",
    "meaning_mps": "The Mac's GPU reached its memory limit.",
    "meaning_mps_invalid_buffer": "A single buffer is larger than Metal allows, however much memory is free.",
    "meaning_opencl_buffer_limit": (
        "OpenCL refused a buffer that is larger than its driver allows in one piece (CL_DEVICE_MAX_MEM_ALLOC_SIZE)."
    ),
    "meaning_context_full": (
        "The text did not fit the context that was set: its KV cache has a fixed size. That is no lack of memory."
    ),
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
    "meaning_tensorflow_goes_on": (
        "TensorFlow's allocator says that this is no failure: a faster way of computing had no room, and it took"
        " another. What ended the run, if anything did, is written behind these lines."
    ),
    "meaning_device_lost": (
        "The driver lost the device: it crashed, was reset, or took too long. That says nothing of memory."
    ),
    "meaning_physx_overflow": (
        "A buffer of PhysX on the GPU is smaller than the scene needs; the message names its setting. This is not a"
        " lack of memory."
    ),
    "meaning_catboost": "CatBoost could not allocate memory on the GPU.",
    "meaning_told": "The text says: “{words}”.",
    "meaning_sd_webui": "The web UI's attention does not fit at this image size.",
    "meaning_opencv": "OpenCV could not allocate RAM for an image.",
}
