"""Every sentence that %oom_explain says, in English and Simplified Chinese.

Keys are ``group_name``; the fields in braces are the same in both languages, and those that end in
``_bytes`` are filled with sizes.
"""

from __future__ import annotations

from oom_magic.explain.sentences.meanings import MEANINGS
from oom_magic.explain.sentences.remedies import REMEDIES

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
    "confidence_certain": ("certain", "很高"),
    "confidence_likely": ("likely", "较高"),
    "confidence_possible": ("possible", "一般"),
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
    "above_block_limit": (
        "{requested_bytes} were asked for in one block with {free_bytes} free: Intel's driver gives no block of"
        " {limit_bytes} or more unless UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1 is set.",
        "一次申请 {requested_bytes}，而空闲 {free_bytes}：除非设置 UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1，"
        "英特尔驱动不提供 {limit_bytes} 及以上的单块内存。",
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
    "alive_in_call": (
        "Of the {allocated_bytes} allocated, {own_bytes} were alive in the failed call alone: what its forward keeps.",
        "已分配的 {allocated_bytes} 中，有 {own_bytes} 只在失败的这次调用中存活：即前向传播保留的张量。",
    ),
    "tensor_kv_cache": (
        "The failing line makes the cache of keys and values longer: {code} It grows with batch, length and layers by"
        " each token, and joining it anew holds the old and the new one for a moment. One of fixed size, of fewer bits"
        ' or in RAM takes less (cache_implementation="static", "quantized" or "offloaded" in model.generate).',
        "出错的代码在加长键值缓存（KV cache）：{code} 它随批大小、长度和层数变大，每生成一个 "
        "token 都会增长，每次拼接时新旧两份会短暂并存。"
        '固定大小、低位数或放在内存中的缓存占用更少（model.generate 的 cache_implementation="static"、"quantized"'
        ' 或 "offloaded"）。',
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
    "tip_applies_with_free": (
        "PyTorch's tip may help: {stuck_bytes} stuck in its cache and {free_bytes} free would together have served"
        " the {requested_bytes}, as one growing segment.",
        "PyTorch 的提示可能有用：滞留在缓存中的 {stuck_bytes} 加上空闲的 {free_bytes}，合成一个可扩展的段就够这次的"
        " {requested_bytes}。",
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
    "fact_expandable_windows": (
        "expandable_segments does nothing on Windows: PyTorch ignores the setting there.",
        "expandable_segments 在 Windows 上不起作用：PyTorch 会忽略这个设置。",
    ),
    "fact_no_shutdown": (
        "Running out of GPU memory ends a program; it does not shut a machine down. Where the machine itself goes off,"
        " look at its power supply, its heat and its RAM.",
        "显存不足只会让程序出错退出，不会让机器关机；如果机器自己关机，请检查电源、散热和内存。",
    ),
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
    **MEANINGS,
    **REMEDIES,
}
