"""What in a text speaks for a cause, and how to check each, in English and Simplified Chinese."""

from __future__ import annotations

EVIDENCE: dict[str, tuple[str, str]] = {
    # Numbers.
    "request_absurd": (
        "{requested_bytes} were asked for on a device of {total_bytes}: nobody meant a tensor of that size, so a shape"
        " on the failing line is wrong (a size that was multiplied in, an index taken for a length).",
        "在 {total_bytes} 的设备上申请 {requested_bytes}：没有人想要这么大的张量，出错那一行的某个形状算错了"
        "（多乘了某个维度，或把索引当成了长度）。",
    ),
    "request_overflowed": (
        "A size of {requested_bytes} is a number that overflowed: sizes multiplied beyond what an integer holds, or a"
        " negative size.",
        "{requested_bytes} 是溢出的数字：若干大小相乘超过了整数范围，或大小为负。",
    ),
    "mps_own_fill": (
        "PyTorch itself held {held_bytes} of the {limit_bytes} that this Mac's GPU is allowed.",
        "PyTorch 自己占用了这台 Mac 的 GPU 允许用量 {limit_bytes} 中的 {held_bytes}。",
    ),
    "mps_watermark": (
        "{limit_bytes} is PyTorch's own mark for MPS (PYTORCH_MPS_HIGH_WATERMARK_RATIO, as a share of what Metal"
        " recommends), not the end of the memory; {held_bytes} came close to it.",
        "{limit_bytes} 是 PyTorch 自己为 MPS 设的水位线（"
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO，按 Metal 建议用量的比例计算），"
        "不是内存的尽头；已用 {held_bytes}，接近水位线。",
    ),
    "stuck_and_free_above_request": (
        "{stuck_bytes} lay unused in PyTorch's cache and {free_bytes} were free: together enough for the"
        " {requested_bytes} asked for, but not in one piece.",
        "PyTorch 缓存中有 {stuck_bytes} 未用，另有 {free_bytes} 空闲：合起来够申请的 {requested_bytes}，但不连续。",
    ),
    "small_carve_out": (
        "A device of {total_bytes} is the part of the RAM that an integrated GPU was given, not all that it could use.",
        "{total_bytes} 的设备是分给核显的那部分内存，不是它能用的全部。",
    ),
    "address_space_in_pieces": (
        "Free memory in pieces can refuse a request that its sum would hold; expandable_segments helps where it works.",
        "空闲显存不连续时，即使总量足够也会申请失败；在支持的系统上 expandable_segments 有帮助。",
    ),
    # Frames and pasted code.
    "gathers_predictions": (
        "The evaluation collects the logits of every batch on the GPU until its end; they grow with the evaluation "
        "set.",
        "评估过程把每个批次的 logits 都留在 GPU 上直到结束；占用随评估集增长。",
    ),
    "code_appends_tensors": (
        "The pasted loop keeps tensors with their graphs: {line}",
        "粘贴的循环把带计算图的张量一直保留着：{line}",
    ),
    "code_sums_tensors": (
        "The pasted code sums tensors, not numbers, and so keeps the graph of every turn: {line}",
        "粘贴的代码累加的是张量而不是数值，每一轮的计算图都被保留：{line}",
    ),
    "code_carries_state": (
        "The pasted loop carries a state from turn to turn without detach(), with all that made it: {line}",
        "粘贴的循环把状态逐轮传下去却没有 detach()，历史计算图都被保留：{line}",
    ),
    "code_collects_tensors": (
        "The pasted loop collects results on the GPU: {line}",
        "粘贴的循环把结果都收集在 GPU 上：{line}",
    ),
    "code_averages_tensors": (
        "A meter is given the tensor instead of its number, and may keep its graph: {line}",
        "统计器收到的是张量而不是数值，可能一直保留计算图：{line}",
    ),
    "code_retains_graph": (
        "retain_graph=True keeps what a backward would free: {line}",
        "retain_graph=True 会保留反向传播本可释放的内容：{line}",
    ),
    "code_infers_with_gradients": (
        "The pasted loop infers without torch.no_grad(), so every call keeps its graph while its result lives: {line}",
        "粘贴的循环做推理却没有 torch.no_grad()，只要结果还在，每次调用的计算图就一直保留：{line}",
    ),
    # Programs and their stages.
    "program_seen": ("This is {program} at work, not a training loop.", "运行的是 {program}，不是训练循环。"),
    "stage_kv_cache": (
        "{program} failed while it made room for the cache of keys and values.",
        "{program} 在为键值缓存（KV cache）分配空间时失败。",
    ),
    "stage_graphs": (
        "{program} failed while it captured CUDA graphs, which need memory beside weights and cache.",
        "{program} 在捕获 CUDA Graph 时失败，它在权重和缓存之外还需要显存。",
    ),
    "stage_logits": (
        "{program} failed while it made logits for the whole vocabulary.",
        "{program} 在生成整个词表的 logits 时失败。",
    ),
    "stage_profiling": (
        "{program} failed in its trial run with the largest batch that it is told to take.",
        "{program} 在用设置允许的最大批次做试跑时失败。",
    ),
    "stage_loading": ("{program} failed while it loaded weights.", "{program} 在加载权重时失败。"),
    "stage_serving": (
        "{program} failed while it answered requests, beside the memory that it keeps for its cache.",
        "{program} 在处理请求时失败，此时缓存已占住预留的显存。",
    ),
    "stage_warmup": (
        "{program} failed in its warmup, with as many tokens as it is told to take at once.",
        "{program} 在预热时失败，预热会用到设置允许的最大词元数。",
    ),
    "stage_vae": (
        "{program} failed in the VAE, whose memory grows with the size of the picture and the number of frames.",
        "{program} 在 VAE 阶段失败，它的占用随图像大小和帧数增长。",
    ),
    "stage_sampling": (
        "{program} failed while it sampled; what that takes grows with the size of the picture.",
        "{program} 在采样时失败；占用随图像大小增长。",
    ),
    "stage_compute": (
        "{program} failed to make its buffers for computing, which grow with context and batch (-c, -ub).",
        "{program} 分配计算缓冲区失败，它随上下文长度和批大小（-c、-ub）增长。",
    ),
    "stage_calibrating": (
        "{program} ran the calibration samples, whose activations grow with their number and length.",
        "{program} 正在处理校准样本，其激活值随样本数和长度增长。",
    ),
    "above_own_share": (
        "{program} keeps itself to {percent} % of the device with its cache, yet PyTorch held {held_bytes} of"
        " {total_bytes}: what lies beyond are weights or work, not cache.",
        "{program} 连同缓存只用设备的 {percent} %，而 PyTorch 占用了 "
        "{total_bytes} 中的 {held_bytes}：超出的是权重或计算，"
        "不是缓存。",
    ),
    "little_free_at_start": (
        "When it started, only {free_bytes} of {total_bytes} were free: something else held the rest.",
        "启动时 {total_bytes} 中只有 {free_bytes} 空闲：其余被别的程序占用。",
    ),
    "cache_exceeds_weights": (
        "The cache of keys and values is to take {cache_bytes}, the weights {weights_bytes} with it: the context asked"
        " for is long.",
        "键值缓存（KV cache）需要 {cache_bytes}，连同权重 {weights_bytes}：设置的上下文很长。",
    ),
    "buffers_listed": (
        "The log lists the largest buffers: results of the computation, which grow with batch and input.",
        "日志列出了最大的缓冲区：都是计算结果，随批大小和输入增长。",
    ),
    "small_request_refused": (
        "A request of only {requested_bytes} was refused: the device, or the share given to this process, was full"
        " before.",
        "仅 {requested_bytes} 的申请也失败：设备或分给本进程的份额此前已满。",
    ),
    "shape_of_scores": (
        "The array {sizes} is a score matrix: batch, heads, and the sequence length twice.",
        "数组 {sizes} 是注意力分数矩阵：批、头，以及两次序列长度。",
    ),
    "shape_of_batch": ("The array {sizes} grows with its first size, the batch.", "数组 {sizes} 随第一维（批）增长。"),
    "small_request_on_full": (
        "A small request on a device that PyTorch had filled before ({held_bytes} of {total_bytes}): what fills it is"
        " the model.",
        "设备此前已被 PyTorch 占满（{total_bytes} 中的 {held_bytes}），很小的申请也失败：占满它的是模型本身。",
    ),
    # The run and its author's words.
    "smaller_batch_helps": ("The text says that a smaller batch helps.", "文中提到减小批大小有用。"),
    "larger_input_fails": (
        "The text speaks of large inputs; activations grow with them.",
        "文中提到输入很大；激活值随输入增长。",
    ),
    "host_fills": (
        "The text speaks of the computer's own memory (RAM) filling up, not of the GPU's.",
        "文中说的是主机内存（RAM）越来越满，而不是显存。",
    ),
    "told_shared": (
        "The text says that other programs use the device.",
        "文中提到还有其他程序在用这块设备。",
    ),
    "told_fragmented": (
        "Sizes that change from step to step leave gaps in the cache.",
        "每一步的大小都不同，会在缓存里留下空隙。",
    ),
    "late_steps": (
        "It failed after {count} steps: what one step takes had fitted before.",
        "运行 {count} 步之后才失败：此前单步所需的显存是够的。",
    ),
    "late_epochs": (
        "It failed in or after epoch {count}: what one step takes had fitted before.",
        "第 {count} 个 epoch 时才失败：此前单步所需的显存是够的。",
    ),
    "largest_batch_late": (
        "Where batches differ in size, the largest one may come late.",
        "如果各批次大小不同，最大的一批可能来得很晚。",
    ),
    "first_steps_fail": (
        "It failed at step {count}: a step as it is does not fit.",
        "第 {count} 步就失败：单步本身就放不下。",
    ),
    "index_error_beside": (
        "The text names an index or label out of range: on the GPU that can look like this, and less memory will not"
        " cure it.",
        "文中提到索引或标签越界：在 GPU 上会表现成这样的错误，减少显存用量无济于事。",
    ),
    "training_told": ("The text is about training.", "文中说的是训练。"),
    "checkpoint_to_gpu": (
        "torch.load() puts a checkpoint back on the GPU that it was saved from, beside the model.",
        "torch.load() 会把检查点放回保存时所在的 GPU，与模型同时占用显存。",
    ),
    "ranks_load_to_one": (
        "Every process loads the checkpoint to the same GPU unless map_location says otherwise.",
        "如果不指定 map_location，每个进程都会把检查点加载到同一块 GPU。",
    ),
    "checkpoint_kept": (
        "It fails only after resuming: the checkpoint that was loaded (optimizer state too) is still held beside the"
        " model.",
        "只在恢复训练后失败：加载的检查点（含优化器状态）仍与模型同时留在显存里。",
    ),
    "pinned_under_wsl": (
        "Pinned memory under WSL: only a small part of the RAM can be pinned there, and what fails then says"
        " 'CUDA error: out of memory' with the GPU half empty.",
        "WSL 下使用了锁页内存：那里只有一小部分内存可以锁页，失败时会报 'CUDA error: "
        "out of memory'，而 GPU 还空着一半。",
    ),
    "pinned_memory_used": (
        "Pinned memory is taken from the computer's RAM, yet its failure is reported as a CUDA error.",
        "锁页内存来自主机内存，但失败时报的是 CUDA 错误。",
    ),
    "wsl_pins_little": (
        "Under WSL a CUDA error about memory is often about pinned memory of the host, of which little can be had.",
        "在 WSL 下，与内存有关的 CUDA 错误常常是主机的锁页内存不够。",
    ),
    # The one check that would settle a cause.
    "check_fragmentation": (
        "print(torch.cuda.memory_summary()) just before: reserved far above allocated, much of it inactive.",
        "在出错前 print(torch.cuda.memory_summary())：已保留远大于已分配，且多为 inactive。",
    ),
    "check_other_process": (
        "Run {tool} while nothing of yours runs: what is used then belongs to others.",
        "在自己的程序没有运行时查看 {tool}：这时占用的就是别人的。",
    ),
    "check_request_alone_too_big": (
        "Print the shapes on the failing line; their product times the element's size is what was asked for.",
        "打印出错那一行的各个形状；它们的乘积乘以元素大小就是申请的量。",
    ),
    "check_weights_too_big": (
        "Count parameters times bytes each: sum(p.numel() * p.element_size() for p in model.parameters()).",
        "计算参数总字节数：sum(p.numel() * p.element_size() for p in model.parameters())。",
    ),
    "check_weights_too_big_inference": (
        "Compare the size of the model's files with the device's memory.",
        "比较模型文件的大小与设备的显存。",
    ),
    "check_activations": (
        "Halve the batch: if memory nearly halves, it is activations.",
        "把批大小减半：如果占用也接近减半，就是激活值。",
    ),
    "check_activations_inference": (
        "Halve the input (context, picture, samples): if it then runs, it was the input's.",
        "把输入减半（上下文、图像、样本）：如果能跑，就是输入占用的。",
    ),
    "check_logits_or_loss": (
        "Compare the request with batch x length x vocabulary x 4 bytes.",
        "把申请的大小与 批 x 长度 x 词表 x 4 字节 相比。",
    ),
    "check_attention_scores": (
        "Compare the request with batch x heads x length x length x element size.",
        "把申请的大小与 批 x 头数 x 长度 x 长度 x 元素大小 相比。",
    ),
    "check_optimizer_state": (
        "See whether the first optimizer.step() fails, and whether plain SGD gets through it.",
        "看是否第一次 optimizer.step() 就失败，而普通 SGD 能通过。",
    ),
    "check_leak_or_retained_reference": (
        "Print torch.cuda.memory_allocated() every 50 steps: it must not rise.",
        "每 50 步打印一次 torch.cuda.memory_allocated()：它不应上升。",
    ),
    "check_memory_fraction_limit": (
        "See what share this process was given, and what it holds.",
        "查看分给本进程的比例，以及它已占用多少。",
    ),
    "check_memory_fraction_limit_inference": (
        "Start with a smaller share or a shorter context: the log says how many tokens the cache then holds.",
        "用更小的比例或更短的上下文启动：日志会写明缓存能容纳多少词元。",
    ),
    "check_sysmem_fallback": (
        "Watch 'Shared GPU memory' in the Task Manager: it grows once the card is full.",
        "在任务管理器中观察“共享 GPU 内存”：显卡用满后它会增长。",
    ),
    "check_host_ram": (
        "Watch the RAM (free -h, the Task Manager) while it runs; on Linux dmesg names what was killed.",
        "运行时观察内存（free -h 或任务管理器）；在 Linux 上 dmesg 会写明谁被终止。",
    ),
    "check_shared_memory": (
        "df -h /dev/shm while the loader works.",
        "在数据加载时执行 df -h /dev/shm。",
    ),
    "check_driver_level": (
        "Look at the device just before it fails: is it full, and who fills it?",
        "在失败前一刻查看设备：是否已满，被谁占满？",
    ),
    "check_not_oom": (
        "Run the same on the CPU: there the true error is named.",
        "在 CPU 上运行同样的代码：会报出真正的错误。",
    ),
}
