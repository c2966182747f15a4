"""What a message without numbers means, in English; ``catalogue.CATALOGUE`` includes them."""

from __future__ import annotations

from oom_magic.language import Sentences

MEANINGS: Sentences = {
    "meaning_short": "PyTorch's allocator ran out; the text lacks the device's numbers.",
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
    "meaning_numpy": "A NumPy array found no RAM.",
    "meaning_memory_error": "Python found no RAM.",
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
    "meaning_told_host": "The text says that the computer's memory (RAM) ran out; it quotes no message.",
    "meaning_told": "The text says that memory ran out; it quotes no message and does not say which memory.",
    "meaning_sd_webui": "The web UI's attention does not fit at this picture size.",
    "meaning_opencv": "OpenCV found no RAM for an image.",
}
