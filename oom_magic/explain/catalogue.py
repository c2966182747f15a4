"""Every sentence that %oom_explain says, in English and Simplified Chinese.

Keys are ``group_name``; the fields in braces are the same in both languages, and those that end in
``_bytes`` are filled with sizes.
"""

from __future__ import annotations

from oom_magic.explain.remedy_catalogue import REMEDIES

CATALOGUE: dict[str, tuple[str, str]] = {
    # Causes: what happened, in one line.
    "cause_fragmentation": (
        "Fragmentation: enough memory lies in PyTorch's cache, but in pieces too small for the request.",
        "显存碎片化：PyTorch 缓存里的空闲显存总量足够，但都是放不下这次申请的小块。",
    ),
    "cause_other_process": (
        "Another process holds a large part of this device's memory.",
        "这块设备的显存有很大一部分被其他进程占用。",
    ),
    "cause_request_alone_too_big": (
        "One tensor alone is larger than the device allows, however empty it is.",
        "单个张量就超过了设备的上限，再空闲也放不下。",
    ),
    "cause_weights_too_big": (
        "The model's weights do not fit on the device.",
        "模型权重放不进这块设备。",
    ),
    "cause_activations": (
        "The activations of a step do not fit: what the forward pass keeps grows with batch and length.",
        "一个训练步的激活值放不下：前向传播保留的张量随批大小和序列长度增长。",
    ),
    "cause_logits_or_loss": (
        "The logits or the loss over the whole vocabulary do not fit.",
        "覆盖整个词表的 logits 或损失计算放不下。",
    ),
    "cause_attention_scores": (
        "The attention scores do not fit: they grow with the square of the sequence length.",
        "注意力分数放不下：它随序列长度的平方增长。",
    ),
    "cause_optimizer_state": (
        "The optimizer's state does not fit; it is created in the first step and stays.",
        "优化器状态放不下；它在第一步时创建，之后一直占用显存。",
    ),
    "cause_leak_or_retained_reference": (
        "Something keeps alive what is no longer needed: tensors of earlier steps or failures, an older copy.",
        "有对象一直持有不再需要的显存：之前步骤或失败留下的张量，或旧的副本。",
    ),
    "cause_memory_fraction_limit": (
        "A limit set for this process was reached, not the end of the device's memory.",
        "达到的是为本进程设置的显存上限，而不是设备显存用尽。",
    ),
    "cause_sysmem_fallback": (
        "The driver had moved memory to the computer's RAM (Windows or WSL); that ran out, too.",
        "驱动已经把显存转移到系统内存（Windows 或 WSL），连它也用完了。",
    ),
    "cause_host_ram": (
        "The computer's own memory (RAM) ran out, not the GPU's.",
        "用尽的是主机内存（RAM），不是 GPU 显存。",
    ),
    "cause_shared_memory": (
        "The shared memory (/dev/shm) that data loading workers use ran out, not the GPU's memory.",
        "用尽的是数据加载进程使用的共享内存（/dev/shm），不是 GPU 显存。",
    ),
    "cause_driver_level": (
        "The driver or a CUDA library could not get memory, outside PyTorch's own allocator.",
        "驱动或 CUDA 库在 PyTorch 分配器之外申请显存失败。",
    ),
    "cause_not_oom": (
        "This is not about running out of device memory.",
        "这不是显存不足。",
    ),
    "cause_unknown": (
        "The text alone does not establish the cause.",
        "仅凭这段文字无法确定原因。",
    ),
    # How sure a judgement is.
    "confidence_certain": ("certain", "确定"),
    "confidence_likely": ("likely", "很可能"),
    "confidence_possible": ("possible", "有可能"),
    "confidence_open": ("open", "未定"),
    # Phases of a run.
    "phase_loading": ("It failed while loading weights: {code}", "失败发生在加载权重时：{code}"),
    "phase_forward": ("It failed in the forward pass: {code}", "失败发生在前向传播中：{code}"),
    "phase_loss": ("It failed while computing the loss: {code}", "失败发生在计算损失时：{code}"),
    "phase_backward": ("It failed in the backward pass: {code}", "失败发生在反向传播中：{code}"),
    "phase_optimizer_step": ("It failed in the optimizer's step: {code}", "失败发生在优化器更新时：{code}"),
    "phase_evaluation": (
        "It failed during evaluation, and no torch.no_grad() is to be seen: {code}",
        "失败发生在评估阶段，且没有看到 torch.no_grad()：{code}",
    ),
    "phase_saving": ("It failed while saving a checkpoint: {code}", "失败发生在保存检查点时：{code}"),
    # Evidence: the numbers and lines that a judgement rests on.
    "allocated_above_capacity": (
        "PyTorch held {held_bytes} on a device of {total_bytes}. That is no misprint: the driver had put the"
        " rest into the computer's RAM.",
        "PyTorch 占用了 {held_bytes}，而设备只有 {total_bytes}。这不是显示错误：驱动把多出的部分放进了系统内存。",
    ),
    "limit_binds": (
        "{held_bytes} held and {requested_bytes} asked for, under a limit of {limit_bytes}.",
        "已占用 {held_bytes}，又申请 {requested_bytes}，而上限为 {limit_bytes}。",
    ),
    "free_above_request": (
        "{free_bytes} were free, yet a request of {requested_bytes} was refused.",
        "还有 {free_bytes} 空闲，但 {requested_bytes} 的申请被拒绝。",
    ),
    "private_pools_hold": (
        "{private_pool_bytes} of the {allocated_bytes} allocated lie in private pools of CUDA graphs.",
        "已分配的 {allocated_bytes} 中有 {private_pool_bytes} 在 CUDA Graph 的私有内存池里。",
    ),
    "request_above_capacity": (
        "{requested_bytes} were asked for; the device allows {total_bytes} in all.",
        "一次申请了 {requested_bytes}，而设备总共只允许 {total_bytes}。",
    ),
    "tensor_attention_scores": (
        "The failing line computes attention scores: {code}",
        "出错的代码在计算注意力分数：{code}",
    ),
    "tensor_logits_or_loss": (
        "The failing line computes logits or a loss: {code}",
        "出错的代码在计算 logits 或损失：{code}",
    ),
    "tensor_matches": (
        "The size asked for is that of one tensor of this model: {formula}.",
        "申请的大小正好是这个模型的一个张量：{formula}。",
    ),
    "others_listed": (
        "Process {pids} held {other_bytes} of {total_bytes}.",
        "进程 {pids} 占用了 {total_bytes} 中的 {other_bytes}。",
    ),
    "others_unlisted": (
        "PyTorch held only {held_bytes}; about {other_bytes} of {total_bytes} belong to no process listed.",
        "PyTorch 只占用 {held_bytes}；{total_bytes} 中约有 {other_bytes} 不属于列出的任何进程。",
    ),
    "mps_others": (
        "Other allocations took {other_bytes} of the {limit_bytes} allowed, PyTorch {held_bytes}.",
        "允许的 {limit_bytes} 中，其他分配占了 {other_bytes}，PyTorch 占了 {held_bytes}。",
    ),
    "stuck_above_request": (
        "{stuck_bytes} were reserved but unallocated, more than the {requested_bytes} asked for.",
        "已保留但未分配的显存有 {stuck_bytes}，多于申请的 {requested_bytes}。",
    ),
    "room_in_pieces": (
        "{free_bytes} free and {stuck_bytes} unused in the cache, yet {requested_bytes} found no place.",
        "空闲 {free_bytes}，缓存中未用 {stuck_bytes}，{requested_bytes} 却放不下。",
    ),
    "code_keeps_graph": (
        "A loss or output is kept with its graph; add .item() or .detach().",
        "损失或输出连同计算图被保留；请加上 .item() 或 .detach()。",
    ),
    "memory_grows": ("The text says that memory keeps growing.", "文中提到显存持续增长。"),
    "own_tensors_fill": (
        "PyTorch itself held {held_bytes} of {total_bytes}.",
        "PyTorch 自己占用了 {total_bytes} 中的 {held_bytes}。",
    ),
    "whose_not_said": (
        "Whether that were weights, activations or optimizer state, the message does not say; in training it is"
        " most often activations, which grow with batch and length.",
        "那是权重、激活值还是优化器状态，报错信息没有说明；训练时多半是激活值，它随批大小和序列长度增长。",
    ),
    "rest_unlisted": (
        "{other_bytes} of {total_bytes} belong neither to PyTorch nor to a process listed: CUDA's libraries,"
        " NCCL, or programs that the message does not show.",
        "{total_bytes} 中有 {other_bytes} 既不属于 PyTorch，也不属于列出的进程：可能是 CUDA 的库、NCCL，"
        "或报错没有显示的程序。",
    ),
    "why_not_granted": (
        "Memory that is free and yet refused: another program held it at that moment, a driver sets a limit"
        " (Windows, WSL, Jetson), or its address space is in pieces.",
        "有空闲却被拒绝：当时别的程序占着它，驱动设有上限（Windows、WSL、Jetson），或地址空间不连续。",
    ),
    "calls_alive": (
        "The model was called {count} times since the last optimizer step, and what the calls kept for a"
        " backward is still alive ({kept_bytes}): some list, sum or variable holds their outputs or losses.",
        "自上一次优化器更新以来模型被调用了 {count} 次，各次为反向传播保留的内容都还在（{kept_bytes}）："
        "某个列表、累加或变量持有它们的输出或损失。",
    ),
    "earlier_steps_alive": (
        "{kept_bytes} made in earlier steps are still alive, and are neither weights nor gradients nor"
        " optimizer state: something keeps them.",
        "之前步骤产生的 {kept_bytes} 仍未释放，而且不是权重、梯度或优化器状态：有对象持有它们。",
    ),
    "rehearsal_fits": (
        "Rehearsed as it is, the run needs {needed_bytes} of the {usable_bytes} that can be had: it would fit."
        " What failed was larger, or something else held memory then.",
        "原样试运行需要 {needed_bytes}，而可用 {usable_bytes}：应当放得下。"
        "失败的那次规模更大，或当时有别的东西占着显存。",
    ),
    "first_steps_fit": (
        "Rehearsed as it is for {num_steps} optimizer steps, the run needs {needed_bytes} of the {usable_bytes} that"
        " can be had: they would fit. What failed came later or was larger, or something else held memory then.",
        "原样试运行 {num_steps} 个优化器步需要 {needed_bytes}，而可用 {usable_bytes}：这几步应当放得下。"
        "失败发生得更晚，或规模更大，或当时有别的东西占着显存。",
    ),
    "no_message": ("The text holds no error message about memory.", "这段文字里没有关于内存的报错信息。"),
    # What a message without numbers means.
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
        "The size asked for is absurd or overflowed: look at the shapes of the failing line.",
        "申请的大小不合理或已溢出：请检查出错那一行的张量形状。",
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
        "笔记本失去了它的进程，多半是主机内存不足。",
    ),
    "meaning_kernel_died": (
        "The kernel died; nothing of it reached Python. Lack of RAM is the most frequent reason.",
        "内核已终止，Python 没有留下任何信息。最常见的原因是主机内存不足。",
    ),
    "meaning_vllm": (
        "vLLM's share of the device (gpu_memory_utilization) leaves nothing for its cache.",
        "vLLM 分得的显存（gpu_memory_utilization）没有给缓存留下空间。",
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
    # The budget's rows.
    "budget_allocated": ("allocated to tensors", "已分配给张量"),
    "budget_private_pools": ("private pools of CUDA graphs", "CUDA Graph 私有内存池"),
    "budget_stuck": ("stuck in PyTorch's cache", "滞留在 PyTorch 缓存中"),
    "budget_reserved": ("reserved by PyTorch", "PyTorch 已保留"),
    "budget_own_process": ("this process", "本进程"),
    "budget_own_outside": ("this process, outside PyTorch", "本进程中 PyTorch 之外"),
    "budget_other_processes": ("other processes", "其他进程"),
    "budget_mps_other": ("other allocations on this Mac's GPU", "这台 Mac 的 GPU 上的其他分配"),
    "budget_free": ("free", "空闲"),
    "budget_rounding": ("rounding of the printed sizes", "打印时的舍入误差"),
    "budget_unexplained": ("held by nobody listed", "不属于列出的任何进程"),
    "budget_outside": (
        "outside PyTorch: CUDA context, libraries, other processes",
        "PyTorch 之外：CUDA 上下文、库、其他进程",
    ),
    "budget_in_system_memory": ("moved to system memory", "已移到系统内存"),
    "budget_contradiction": ("the printed sizes contradict each other", "打印的数字互相矛盾"),
    "budget_not_said": ("not said", "未说明"),
    "budget_capacity": ("capacity", "总容量"),
    # Tensors that could have asked.
    "tensor_name_attention_scores": ("the attention scores", "注意力分数"),
    "tensor_name_logits": ("the logits", "logits"),
    "tensor_name_mlp_activation": ("an activation of the feed-forward layer", "前馈层的激活值"),
    "tensor_name_hidden_states": ("hidden states", "隐藏状态"),
    "tensor_name_qkv": ("queries, keys and values together", "合并的 Q、K、V"),
    "tensor_name_embedding_weight": ("the embedding's or output layer's weight", "词嵌入或输出层的权重"),
    "tensor_name_mlp_weight": ("a weight of the feed-forward layer", "前馈层的权重"),
    "tensor_name_attention_weight": ("a weight of the attention layer", "注意力层的权重"),
    "tensor_name_all_parameters": ("a copy of all parameters", "全部参数的一份拷贝"),
    "tensor_name_stated": ("the array that the message names", "报错信息中写明的数组"),
    "tensor_not_printed": ("The message prints no request.", "报错信息没有打印申请的大小。"),
    "tensor_nameless": (
        "2.00 and 20.00 MiB are what PyTorch asks for when any small tensor needs room: they name none.",
        "2.00 与 20.00 MiB 是任何小张量需要空间时 PyTorch 申请的固定大小，看不出是哪个张量。",
    ),
    "tensor_none_fits": (
        "No usual tensor of this model has the size that was asked for.",
        "这个模型中没有常见的张量符合申请的大小。",
    ),
    "tensor_unknown_model": (
        "Nothing is known of the model, and no common shape has this size.",
        "对模型一无所知，也没有常见的形状符合这个大小。",
    ),
    # PyTorch's own tip, judged.
    "tip_delays": (
        "PyTorch's tip would only have delayed it: {stuck_bytes} stuck in its cache would have served these"
        " {requested_bytes}, but are little beside the {held_bytes} held.",
        "PyTorch 的提示只能推迟失败：滞留在缓存中的 {stuck_bytes} 够这次的 {requested_bytes}，"
        "但与已占用的 {held_bytes} 相比很少。",
    ),
    "tip_applies": (
        "PyTorch's tip applies: {stuck_bytes} stuck in its cache would have served the {requested_bytes}.",
        "PyTorch 的提示适用：滞留在缓存中的 {stuck_bytes} 本可满足这次 {requested_bytes} 的申请。",
    ),
    "tip_does_not_apply": (
        "PyTorch's tip does not help: its cache holds only {stuck_bytes}, {requested_bytes} were asked for.",
        "PyTorch 的提示帮不上忙：缓存中只滞留了 {stuck_bytes}，而申请的是 {requested_bytes}。",
    ),
    "tip_already_followed": (
        "PyTorch's tip is followed already (expandable_segments is on), yet {stuck_bytes} are stuck;"
        " {requested_bytes} were asked for.",
        "PyTorch 的提示已经照做（expandable_segments 已开启），但仍有 {stuck_bytes} 滞留；申请的是 {requested_bytes}。",
    ),
    "tip_unsupported": (
        "PyTorch's tip fits the numbers ({stuck_bytes} stuck, {requested_bytes} asked for), but"
        " expandable_segments does not work on {system}; max_split_size_mb does.",
        "PyTorch 的提示与数字相符（滞留 {stuck_bytes}，申请 {requested_bytes}），但 expandable_segments 在"
        " {system} 上不可用；可改用 max_split_size_mb。",
    ),
    # How to read the numbers.
    "fact_own_pid": (
        "Process {pid} ({own_bytes}) is this very process: a container shows its number on the host.",
        "进程 {pid}（{own_bytes}）就是本进程：在容器里显示的是它在宿主机上的编号。",
    ),
    "fact_process_size_unknown": (
        "A size of 17179869184.00 GiB means that the driver does not tell.",
        "17179869184.00 GiB 表示驱动没有提供这个数字。",
    ),
    "fact_accumulation": (
        "Gradient accumulation leaves the memory of a step as it is: microbatches run one after the other, so"
        " only the size of one counts.",
        "梯度累积不改变每一步的显存：各个微批先后运行，因此只有单个微批的大小起作用。",
    ),
    "fact_device_zero": (
        "The text ends at the device's number, which PyTorch 2.3 does for device 0 only.",
        "文字在设备编号处中断；PyTorch 2.3 只有在设备 0 上才会这样。",
    ),
    "fact_private_pools": (
        "{private_pool_bytes} counted as allocated are free, but only for the CUDA graph that owns them.",
        "计入已分配的 {private_pool_bytes} 其实空闲，但只有所属的 CUDA Graph 能用。",
    ),
    "fact_cached_excludes_allocated": (
        "In this version, cached means the memory kept beside what is allocated.",
        "在这个版本里，cached 指的是已分配之外另外保留的显存。",
    ),
    "fact_free_above_capacity": (
        "{free_bytes} free is more than the capacity: this driver misreports one of the two.",
        "空闲 {free_bytes} 超过了总容量：驱动报告的两个数字中有一个不对。",
    ),
    **REMEDIES,
}
