"""The sentences about remedies, in English and Simplified Chinese; ``catalogue.CATALOGUE`` includes them."""

from __future__ import annotations

REMEDIES: dict[str, tuple[str, str]] = {
    "remedy_free_held": (
        "Release what earlier cells still hold ({freed_bytes}).",
        "释放之前的单元格仍然占用的显存（{freed_bytes}）。",
    ),
    "remedy_drop_copy": (
        "Delete the copy loaded before: {names} ({freed_bytes}).",
        "删除之前加载的副本：{names}（{freed_bytes}）。",
    ),
    "remedy_close_processes": (
        "Close the other processes on this card ({freed_bytes}).",
        "关闭这块显卡上的其他进程（{freed_bytes}）。",
    ),
    "remedy_expandable_segments": (
        "Let PyTorch's segments grow (expandable_segments), against fragmentation.",
        "启用可扩展段（expandable_segments），减少碎片。",
    ),
    "remedy_no_grad": (
        "Evaluate under torch.no_grad(): nothing is kept for a backward.",
        "评估时使用 torch.no_grad()：不再为反向传播保留张量。",
    ),
    "remedy_sdpa": (
        "Use PyTorch's fused attention (sdpa): the score matrix is never stored.",
        "使用 PyTorch 的融合注意力（sdpa）：不再保存注意力分数矩阵。",
    ),
    "remedy_foreach": (
        "Run the optimizer without foreach: no temporary copies of all parameters.",
        "关闭优化器的 foreach：不再产生与全部参数等大的临时张量。",
    ),
    "remedy_released_gradients": (
        "Release gradients between steps: zero_grad() without set_to_none=False.",
        "在两步之间释放梯度：调用 zero_grad() 时不要用 set_to_none=False。",
    ),
    "remedy_dropped_outputs": (
        "Drop the model's outputs before the backward: the logits live no longer than the loss needs.",
        "在反向传播之前丢弃模型输出：logits 不再多占显存。",
    ),
    "remedy_mixed_precision": (
        "Compute the forward in {dtype} (autocast): most activations take half.",
        "前向传播使用 {dtype}（autocast）：大部分激活值减半。",
    ),
    "remedy_chunked_loss": (
        "Compute the loss in chunks: the logits of all tokens are never there at once.",
        "分块计算损失：不再同时保存所有词元的 logits。",
    ),
    "remedy_smaller_batch": (
        "Microbatch {after} instead of {before}, accumulated {accumulation} times.",
        "微批大小由 {before} 减为 {after}，梯度累积 {accumulation} 次。",
    ),
    "remedy_smaller_evaluation": (
        "Batches of {after} instead of {before}.",
        "批大小由 {before} 减为 {after}。",
    ),
    "remedy_smaller_evaluation_any": ("Smaller batches.", "减小批大小。"),
    "remedy_checkpointing": (
        "Activation checkpointing: recompute activations in the backward.",
        "激活检查点（梯度检查点）：反向传播时重新计算激活值。",
    ),
    "remedy_optimizer_8bit": (
        "AdamW with 8-bit state (bitsandbytes).",
        "使用 8 位状态的 AdamW（bitsandbytes）。",
    ),
    "remedy_offload_optimizer": (
        "Keep the optimizer's state in RAM and step there.",
        "把优化器状态放在内存中，并在 CPU 上更新。",
    ),
    "remedy_shorter_sequences": (
        "Sequences of {after} tokens instead of {before}.",
        "序列长度由 {before} 减为 {after} 个词元。",
    ),
    "remedy_half_weights": (
        "Weights, gradients and optimizer state in {dtype}; training may become less stable.",
        "权重、梯度和优化器状态使用 {dtype}；训练可能不够稳定。",
    ),
    "remedy_adafactor": (
        "Adafactor instead of Adam: almost no optimizer state.",
        "用 Adafactor 代替 Adam：几乎没有优化器状态。",
    ),
    "remedy_sgd": ("Plain SGD: no optimizer state.", "普通 SGD：没有优化器状态。"),
    "remedy_lora": (
        "LoRA of rank {rank}: train small adapters, freeze the weights.",
        "秩为 {rank} 的 LoRA：只训练小的适配器，冻结原权重。",
    ),
    "remedy_qlora": (
        "QLoRA of rank {rank}: frozen weights in 4 bits.",
        "秩为 {rank} 的 QLoRA：冻结的权重以 4 位存储。",
    ),
    "remedy_loaded_half": (
        "Load the weights in {dtype} from the start.",
        "一开始就以 {dtype} 加载权重。",
    ),
    "remedy_loaded_8bit": (
        "Load the weights in 8 bits (bitsandbytes); to train, add adapters (LoRA).",
        "以 8 位加载权重（bitsandbytes）；要训练就加上适配器（LoRA）。",
    ),
    "remedy_loaded_4bit": (
        "Load the weights in 4 bits (bitsandbytes, nf4); to train, add adapters (QLoRA).",
        "以 4 位加载权重（bitsandbytes，nf4）；要训练就加上适配器（QLoRA）。",
    ),
    "remedy_larger_card": (
        "A larger card: {gpu} ({total_bytes}) is the smallest that would do.",
        "换用更大的显卡：满足要求的最小型号是 {gpu}（{total_bytes}）。",
    ),
    "remedy_fsdp": (
        "Shard parameters, gradients and optimizer state over {gpus} GPUs (FSDP or ZeRO-3): about "
        "{saving_bytes} less each.",
        "用 FSDP 或 ZeRO-3 把参数、梯度和优化器状态分到 {gpus} 块 GPU：每块约少 {saving_bytes}。",
    ),
    "remedy_combination": ("Together: {parts}", "组合使用：{parts}"),
    "speed_same": ("about the same speed", "速度基本不变"),
    "speed_faster": ("usually faster", "通常更快"),
    "speed_accumulation": ("somewhat slower: smaller matrices", "略慢：矩阵变小"),
    "speed_checkpointing": (
        "about a third slower: one more forward (Chen et al. 2016)",
        "约慢三分之一：多做一次前向（Chen 等，2016）",
    ),
    "speed_optimizer_loop": (
        "a slower optimizer step: one kernel per tensor (torch.optim documentation)",
        "优化器步变慢：每个张量一个核函数（torch.optim 文档）",
    ),
    "speed_qlora": (
        "slower: weights are dequantized in each layer (Dettmers et al. 2023)",
        "更慢：每层都要反量化权重（Dettmers 等，2023）",
    ),
    "speed_int8": (
        "slower: columns with outliers are computed apart (Dettmers et al. 2022)",
        "更慢：含离群值的列单独计算（Dettmers 等，2022）",
    ),
    "speed_offload": (
        "slower: gradients and weights cross the bus in each step (Ren et al. 2021)",
        "更慢：每步都要在总线上传输梯度和权重（Ren 等，2021）",
    ),
    "speed_fsdp": ("depends on the link between the GPUs", "取决于 GPU 之间的互连"),
    "speed_combination": ("the sum of its parts", "各项影响之和"),
    "remedy_not_priced": ("not priced: {reason}", "未能定价：{reason}"),
    "remedy_smaller_batch_any": (
        "A smaller microbatch; gradient accumulation keeps the global batch.",
        "减小微批，用梯度累积保持全局批大小。",
    ),
    "remedy_shorter_sequences_any": ("Shorter sequences.", "缩短序列。"),
    "remedy_fsdp_any": (
        "Shard the model over several GPUs (FSDP or ZeRO-3).",
        "用 FSDP 或 ZeRO-3 把模型分到多块 GPU。",
    ),
    "remedy_offload": (
        "Keep a part of the weights in RAM (device_map).",
        "把一部分权重放在内存中（device_map）。",
    ),
    "remedy_close_processes_any": (
        "Close what else uses this card; nvidia-smi lists it.",
        "关闭占用这块显卡的其他程序；nvidia-smi 会列出它们。",
    ),
    "remedy_check_processes": (
        "Check with nvidia-smi whether other programs use this card.",
        "用 nvidia-smi 检查是否有其他程序在用这块显卡。",
    ),
    "remedy_free_held_any": (
        "Release what earlier cells still hold, or restart the kernel.",
        "释放之前的单元格仍然占用的显存，或重启内核。",
    ),
    "remedy_detach": (
        "Keep results between steps without their graphs: {fixed}",
        "步与步之间保留结果，但不保留计算图：{fixed}",
    ),
    "remedy_backward_each": (
        "Walk back each loss, not their sum: gradients add up, and each graph is released: {fixed}",
        "对每个损失分别反向传播，而不是对它们的和：梯度会累加，各个计算图随即释放：{fixed}",
    ),
    "remedy_keep_on_host": (
        "Collect on the host, not on the GPU: {fixed}",
        "把收集的张量放在内存里，而不是显存里：{fixed}",
    ),
    "remedy_raise_limit": (
        "Raise the limit set for this process.",
        "提高为本进程设置的显存上限。",
    ),
    "remedy_find_tensor": (
        "See which operation asks for so much; a shape there is larger than meant.",
        "检查是哪个操作申请了这么多：那里的某个形状比预期的大。",
    ),
    "remedy_fallback_policy": (
        "Set the driver's CUDA sysmem fallback policy to 'prefer no sysmem fallback': it then "
        "fails instead of crawling.",
        "在驱动中把 CUDA 系统内存回退策略设为“不回退”：这样会直接报错，而不是变得极慢。",
    ),
    "remedy_fewer_workers": (
        "Fewer data loading workers: each holds a copy of what it touches.",
        "减少数据加载进程：每个进程都会复制它用到的数据。",
    ),
    "remedy_stream_data": (
        "Read data as it is needed (memory-mapped or streamed) instead of holding it all.",
        "按需读取数据（内存映射或流式），不要一次全部载入。",
    ),
    "remedy_shared_memory": (
        "Give the container more shared memory, or load data in the main process.",
        "给容器更多共享内存，或在主进程中加载数据。",
    ),
}
