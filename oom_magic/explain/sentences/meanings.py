"""What a message without numbers means, in English and Simplified Chinese; ``catalogue.CATALOGUE`` includes them."""

from __future__ import annotations

MEANINGS: dict[str, tuple[str, str]] = {
    "meaning_short": (
        "PyTorch's allocator ran out; the text lacks the device's numbers.",
        "PyTorch 分配器显存不足；文字中没有设备的数字。",
    ),
    "meaning_cuda_v2.3_nul_cut": (
        "PyTorch 2.3 ran out and cut its own message short.",
        "PyTorch 2.3 显存不足，并截断了自己的报错。",
    ),
    "meaning_cuda_preempted": (
        "PyTorch refused the request in advance: it would exceed the per-process memory fraction.",
        "PyTorch 提前拒绝了申请：它会超过为本进程设置的显存比例。",
    ),
    "meaning_cuda_absurd_size": (
        "The size asked for is a number that overflowed (near 2**64 bytes it is a negative one): sizes multiplied on "
        "the"
        " failing line exceed what its integers hold, or a shape there is wrong.",
        "申请的大小是溢出的数字（接近 2**64 字节说明是负数）：出错那一行相乘的各个维度超出了整数范围，或形状有误。",
    ),
    "meaning_cuda_malloc_async": (
        "The driver's own allocator (cudaMallocAsync) ran out.",
        "驱动自带的分配器（cudaMallocAsync）显存不足。",
    ),
    "meaning_cuda_thc_pre0.4.1": (
        "PyTorch 0.4.0 or older ran out of device memory; it prints no sizes.",
        "PyTorch 0.4.0 或更早版本显存不足；它不打印大小。",
    ),
    "meaning_cuda_error_oom": (
        "A driver call outside PyTorch's allocator found no memory; such calls print no sizes.",
        "PyTorch 分配器之外的驱动调用没有得到显存；这类调用不打印大小。",
    ),
    "meaning_cuda_driver_error": (
        "The driver could not map memory, as expandable_segments asks for; under WSL that fails early.",
        "驱动无法映射 expandable_segments 所需的显存；在 WSL 下很容易失败。",
    ),
    "meaning_jetson_nvmap": (
        "The Jetson's memory manager (NvMap) refused the allocation.",
        "Jetson 的内存管理器（NvMap）拒绝了分配。",
    ),
    "meaning_cuda_va_exhausted": (
        "Virtual address space ran out, not device memory: reserve less for expandable segments.",
        "用尽的是虚拟地址空间而不是显存：请减少 expandable segments 的预留。",
    ),
    "meaning_cublas": (
        "cuBLAS could not start, most often because the device is full; a bad index can look the same.",
        "cuBLAS 无法启动，多半是显存已满；索引越界也可能表现为同样的错误。",
    ),
    "meaning_cudnn": (
        "cuDNN could not start or find an algorithm, most often because the device is full.",
        "cuDNN 无法启动或找不到可用算法，多半是显存已满。",
    ),
    "meaning_cuda_library_misuse": (
        "A CUDA library was called with arguments it does not support.",
        "CUDA 库收到了不支持的参数。",
    ),
    "meaning_nccl": (
        "NCCL, the communication between GPUs, met a CUDA error; its buffers lie outside PyTorch.",
        "GPU 间通信库 NCCL 遇到 CUDA 错误；它的缓冲区在 PyTorch 之外。",
    ),
    "meaning_ctranslate2": (
        "CTranslate2 (faster-whisper, whisperX) got no more memory of the GPU; its message has no sizes.",
        "CTranslate2（faster-whisper、whisperX）申请显存失败；它的报错不带任何大小。",
    ),
    "meaning_third_party_cuda_oom": (
        "An extension asked the driver for memory itself and got none.",
        "某个扩展库直接向驱动申请显存，但没有得到。",
    ),
    "meaning_bitsandbytes": (
        "bitsandbytes' own allocation failed, outside PyTorch's allocator.",
        "bitsandbytes 自己的分配失败，与 PyTorch 分配器无关。",
    ),
    "meaning_nvml_assert": (
        "An out-of-memory error is hidden behind this: PyTorch failed while collecting its numbers. After a"
        " driver update, restart the machine.",
        "背后其实是显存不足：PyTorch 在收集数字时出错。如果刚更新过驱动，请重启机器。",
    ),
    "meaning_allocator_assert": (
        "This is a bug in PyTorch's allocator, not a lack of memory.",
        "这是 PyTorch 分配器的程序错误，不是显存不足。",
    ),
    "meaning_cpu_allocator": ("A tensor on the CPU found no RAM.", "CPU 上的张量没有得到内存。"),
    "meaning_cpu_negative_size": (
        "A tensor of negative size was asked for: a bug in the shapes.",
        "申请了大小为负数的张量：形状计算有误。",
    ),
    "meaning_numpy": ("A NumPy array found no RAM.", "NumPy 数组没有得到内存。"),
    "meaning_memory_error": ("Python found no RAM.", "Python 没有得到内存。"),
    "meaning_bad_alloc": ("C++ code found no RAM.", "C++ 代码没有得到内存。"),
    "meaning_fork_enomem": (
        "The system had too little RAM to start another process.",
        "系统内存不足，无法再启动新进程。",
    ),
    "meaning_windows_paging_file": (
        "Windows' paging file is too small for the memory asked for.",
        "Windows 的页面文件太小，满足不了申请的内存。",
    ),
    "meaning_static_tls": (
        "A library came too late to get its thread-local storage; import it first.",
        "某个库加载得太晚，没有线程本地存储可用；请先导入它。",
    ),
    "meaning_dataloader": (
        "A data loading worker died of a bus error, most often for lack of shared memory.",
        "数据加载进程因总线错误退出，多半是共享内存不足。",
    ),
    "meaning_dataloader_killed": (
        "The system killed a data loading worker, most often for lack of RAM.",
        "系统杀掉了数据加载进程，多半是主机内存不足。",
    ),
    "meaning_dataloader_other_signal": (
        "A data loading worker was ended from outside; the text does not say why.",
        "数据加载进程被外部终止；文中没有说明原因。",
    ),
    "meaning_dataloader_segfault": (
        "A data loading worker crashed; that is a bug, not a lack of memory.",
        "数据加载进程崩溃；这是程序错误，不是内存不足。",
    ),
    "meaning_shared_memory_full": ("/dev/shm is full.", "/dev/shm 已满。"),
    "meaning_slurm_oom_kill": (
        "SLURM ended the job because it used more RAM than it had asked for (--mem).",
        "作业使用的内存超过了申请的 --mem，被 SLURM 终止。",
    ),
    "meaning_scheduler_oom_kill": (
        "The scheduler ended the job because it used more RAM than it had asked for.",
        "作业使用的内存超过了申请的数量，被调度器终止。",
    ),
    "meaning_ray_oom_kill": (
        "Ray ended a worker because the machine's RAM was nearly full; the GPU's memory is another matter.",
        "机器的内存将满，Ray 因此终止了一个工作进程；这与 GPU 显存无关。",
    ),
    "meaning_disk_full": (
        "The disk is full, or a file could not be written whole; memory is not the matter.",
        "磁盘已满，或文件没有写完整；与内存无关。",
    ),
    "meaning_kernel_oom_killer": (
        "The operating system ended the process for lack of RAM.",
        "操作系统因内存不足终止了进程。",
    ),
    "meaning_sigkill": (
        "The process was killed (signal 9), most often by the system for lack of RAM; see dmesg.",
        "进程被强制杀死（信号 9），多半是系统内存不足；请查看 dmesg。",
    ),
    "meaning_notebook_host": (
        "The notebook lost its process, most often for lack of RAM.",
        "Notebook 的内核进程已被终止，多半是主机内存不足。",
    ),
    "meaning_kernel_died": (
        "The kernel died; nothing of it reached Python. Lack of RAM is the most frequent reason.",
        "内核进程已被终止，Python 没有留下任何信息。最常见的原因是主机内存不足。",
    ),
    "meaning_vllm": (
        "vLLM's share of the device (gpu_memory_utilization) leaves nothing for its cache.",
        "vLLM 分得的显存（gpu_memory_utilization）没有给缓存留下空间。",
    ),
    "meaning_sglang": (
        "SGLang's share of the device (--mem-fraction-static) leaves nothing for its cache.",
        "SGLang 分得的显存（--mem-fraction-static）没有给缓存留下空间。",
    ),
    "meaning_paddle": ("PaddlePaddle ran out of device memory.", "PaddlePaddle 显存不足。"),
    "meaning_mps_command_buffer": (
        "The Mac had too little memory left to run what the GPU was given.",
        "Mac 剩余的内存不足以执行 GPU 任务。",
    ),
    "meaning_vllm_startup": (
        "At start less of the device is free than vLLM was told to take.",
        "启动时空闲的显存少于 vLLM 被要求占用的量。",
    ),
    "meaning_hf_offload": (
        "The weights do not fit on the GPU, so some were placed on the CPU or the disk.",
        "权重放不进 GPU，因此一部分被放到了 CPU 或磁盘。",
    ),
    "meaning_hf_auto_batch": (
        "Every batch size failed, down to 1: a single sample is too much.",
        "从大到 1 的每个批大小都失败了：单个样本就放不下。",
    ),
    "meaning_jax": ("JAX ran out of device memory.", "JAX 显存不足。"),
    "meaning_tensorflow": ("TensorFlow ran out of memory.", "TensorFlow 内存不足。"),
    "meaning_mps": ("The Mac's GPU reached its limit of memory.", "Mac 的 GPU 达到了内存上限。"),
    "meaning_mps_invalid_buffer": (
        "One buffer is larger than Metal allows; how much is free does not matter.",
        "单个缓冲区超过了 Metal 的上限，与空闲多少无关。",
    ),
    "meaning_ipex_4gb": (
        "This Intel GPU takes no block above 4 GB.",
        "这款 Intel GPU 不支持超过 4 GB 的单块内存。",
    ),
    "meaning_hip": ("The AMD GPU ran out of memory.", "AMD GPU 显存不足。"),
    "meaning_xpu": ("The Intel GPU ran out of memory.", "Intel GPU 显存不足。"),
    "meaning_npu": ("The Ascend NPU ran out of memory.", "昇腾 NPU 显存不足。"),
    "meaning_musa": ("The Moore Threads GPU ran out of memory.", "摩尔线程 GPU 显存不足。"),
    "meaning_mlu": ("The Cambricon device ran out of memory.", "寒武纪设备显存不足。"),
    "meaning_cuda_cached_0.4.1-1.3": ("PyTorch 0.4.1 to 1.3 ran out.", "PyTorch 0.4.1 至 1.3 显存不足。"),
    "meaning_cuda_reserved_1.4-2.0": ("PyTorch 1.4 to 2.0 ran out.", "PyTorch 1.4 至 2.0 显存不足。"),
    "meaning_cuda_v2.1": ("PyTorch 2.1 ran out.", "PyTorch 2.1 显存不足。"),
    "meaning_cuda_v2.2+": ("PyTorch 2.2 or newer ran out.", "PyTorch 2.2 或更新版本显存不足。"),
    "meaning_triton": (
        "A Triton kernel wants more on-chip shared memory than the GPU has; smaller blocks help.",
        "Triton 内核需要的片上共享内存超过了 GPU 的容量；减小分块可解决。",
    ),
    "meaning_inductor_triton": (
        "torch.compile tried a kernel that does not fit on the chip and goes on with others; harmless.",
        "torch.compile 试了一个片上放不下的内核，会继续尝试其他内核；无害。",
    ),
    "meaning_device_side_assert": (
        "A kernel found a wrong value, most often an index or a label out of range.",
        "GPU 内核发现了错误的值，多半是索引或标签越界。",
    ),
    "meaning_no_gpu": (
        "PyTorch can use no GPU here (%oom_doctor tells why); %%gpumem rehearses the cell on a pretend one.",
        "PyTorch 在这里用不了 GPU（原因见 %oom_doctor）；用 %%gpumem 可在模拟的 GPU 上试运行该单元格。",
    ),
    "meaning_illegal_memory_access": (
        "A kernel touched memory that is not its own: a bug, not a lack of memory.",
        "GPU 内核访问了不属于它的内存：这是程序错误，不是显存不足。",
    ),
    "meaning_cuda_invalid_config": (
        "A kernel was started with a grid or block that the GPU does not allow.",
        "GPU 内核的启动参数超出了 GPU 允许的范围。",
    ),
    "meaning_misaligned_address": (
        "A kernel read from a misaligned address: a bug, not a lack of memory.",
        "GPU 内核读取了未对齐的地址：这是程序错误，不是显存不足。",
    ),
    "meaning_cuda_other_error": (
        "This CUDA error has nothing to do with the amount of memory.",
        "这个 CUDA 错误与显存多少无关。",
    ),
    "meaning_int32_limit": (
        "The tensor has more elements than this operator can count (2**31), whatever memory there is.",
        "张量的元素个数超过了该算子的上限（2**31），与显存多少无关。",
    ),
    "meaning_mps_2e32_elements": (
        "The tensor has more elements than Apple's GPU backend can count (2**32).",
        "张量的元素个数超过了 Apple GPU 后端的上限（2**32）。",
    ),
    "meaning_cuda_driver_call": (
        "A program asked the CUDA driver for memory itself, not through PyTorch, and got none.",
        "某个程序绕过 PyTorch 直接向 CUDA 驱动申请显存，申请失败。",
    ),
    "meaning_class_only": (
        "The device ran out of memory; the text has the error's name but not its message.",
        "显存不足；文中只有错误的名字，没有报错内容。",
    ),
    "meaning_llama_cpp": (
        "llama.cpp found no room on the GPU for one of its buffers.",
        "llama.cpp 在 GPU 上放不下它的某个缓冲区。",
    ),
    "meaning_llama_cpp_host": (
        "llama.cpp found no room in RAM for one of its buffers.",
        "llama.cpp 在内存中放不下它的某个缓冲区。",
    ),
    "meaning_ollama_host": (
        "Ollama expects the model and its context to need more memory (RAM) than is free.",
        "Ollama 估计模型及其上下文需要的内存超过了空闲的内存。",
    ),
    "meaning_pinned_memory": (
        "Page-locked (pinned) memory of the host could not be had; under WSL only a small part can be pinned.",
        "申请主机的锁页内存（pinned memory）失败；WSL 下能锁页的内存很少。",
    ),
    "meaning_onnxruntime": (
        "ONNX Runtime found no room for a buffer of its arena.",
        "ONNX Runtime 的内存池放不下一个缓冲区。",
    ),
    "meaning_tensorrt": (
        "TensorRT found no GPU memory for what it asked for.",
        "TensorRT 申请显存失败。",
    ),
    "meaning_tensorrt_tactic": (
        "TensorRT skipped a way of computing a layer that needs more memory than is free; if the engine is built in"
        " the end, this is only a warning.",
        "TensorRT 跳过了某一层的一种实现，因为它需要的显存超过空闲量；如果引擎最终构建成功，这只是警告。",
    ),
    "meaning_cupy": ("CuPy's memory pool ran out of GPU memory.", "CuPy 的内存池显存不足。"),
    "meaning_rmm": (
        "RAPIDS (RMM) ran out of GPU memory; std::bad_alloc here is not the computer's RAM.",
        "RAPIDS（RMM）显存不足；这里的 std::bad_alloc 指的不是主机内存。",
    ),
    "meaning_thrust": (
        "A Thrust algorithm found no GPU memory; std::bad_alloc here is not the computer's RAM.",
        "Thrust 算法申请显存失败；这里的 std::bad_alloc 指的不是主机内存。",
    ),
    "meaning_numba": ("Numba found no GPU memory for an array.", "Numba 为数组申请显存失败。"),
    "meaning_java_heap": (
        "The Java heap is full (-Xmx); it is neither the GPU's memory nor all of the RAM.",
        "Java 堆已满（-Xmx）；这既不是显存，也不是全部内存。",
    ),
    "meaning_pod_oom_kill": (
        "Kubernetes ended the container because it used more RAM than its limit (resources.limits.memory).",
        "容器使用的内存超过了限额（resources.limits.memory），被 Kubernetes 终止。",
    ),
    "meaning_sigbus": (
        "The process died of a bus error (signal 7), most often because /dev/shm is full.",
        "进程因总线错误（信号 7）退出，多半是 /dev/shm 已满。",
    ),
    "meaning_tgi": (
        "Text Generation Inference found no room for the tokens that it is told to take at once.",
        "Text Generation Inference 放不下设置中要同时处理的词元。",
    ),
    "meaning_npu_runtime": (
        "Ascend's runtime (CANN) found no memory on the NPU.",
        "昇腾运行时（CANN）在 NPU 上申请内存失败。",
    ),
    "meaning_no_kernel_image": (
        "The program was not built for this GPU's architecture: install a build that supports it. It is not about "
        "memory.",
        "程序不支持这块 GPU 的架构：请安装支持它的版本。这与显存多少无关。",
    ),
}
