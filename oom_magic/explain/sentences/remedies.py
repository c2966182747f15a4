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
        "Close what else uses this device; {tool} lists it.",
        "关闭占用这块设备的其他程序；用 {tool} 查看。",
    ),
    "remedy_check_processes": (
        "Check with {tool} whether other programs use this device.",
        "用 {tool} 检查是否有其他程序在用这块设备。",
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
    # Programs that infer, other devices, the host: their own settings.
    "remedy_vllm_utilization": (
        "vLLM: lower --gpu-memory-utilization if it fails at start or beside other programs; raise it if only the cache"
        " lacks room.",
        "vLLM：启动时失败或与其他程序共用显卡时，调低 --gpu-memory-utilization；只是缓存不够时则调高。",
    ),
    "remedy_shorter_context": (
        "Allow a shorter context (vLLM --max-model-len, SGLang --context-length): the cache of keys and values shrinks"
        " with it.",
        "缩短允许的上下文（vLLM 用 --max-model-len，SGLang 用 --context-length）：键值缓存随之变小。",
    ),
    "remedy_vllm_max_num_seqs": (
        "Take fewer requests and tokens at once (--max-num-seqs, --max-num-batched-tokens).",
        "减少同时处理的请求数和词元数（--max-num-seqs、--max-num-batched-tokens）。",
    ),
    "remedy_vllm_eager": ("Do without CUDA graphs (--enforce-eager).", "不使用 CUDA Graph（--enforce-eager）。"),
    "remedy_quantized_model": (
        "Take quantized weights (AWQ, GPTQ, FP8, GGUF Q4) or a smaller model.",
        "改用量化权重（AWQ、GPTQ、FP8、GGUF Q4）或更小的模型。",
    ),
    "remedy_tensor_parallel": ("Spread the model over several devices.", "把模型分到多块设备上。"),
    "remedy_server_share": (
        "Give the server a smaller share of the device for its cache, so that weights and work fit beside it.",
        "减小服务器用于缓存的显存比例，给权重和计算留出空间。",
    ),
    "remedy_sglang_fraction": (
        "SGLang: lower --mem-fraction-static if it fails while serving or capturing graphs; raise it if it says that "
        "the"
        " cache has no room.",
        "SGLang：处理请求或捕获 CUDA Graph 时失败，就调低 --mem-fraction-static；提示缓存没有空间时则调高。",
    ),
    "remedy_sglang_prefill": (
        "SGLang: smaller chunks of the prompt and fewer graphs (--chunked-prefill-size, --cuda-graph-max-bs).",
        "SGLang：减小提示分块和 CUDA Graph 的批大小（--chunked-prefill-size、--cuda-graph-max-bs）。",
    ),
    "remedy_tgi_tokens": (
        "Lower --max-batch-prefill-tokens and --max-batch-total-tokens, as the message says.",
        "按报错提示调低 --max-batch-prefill-tokens 和 --max-batch-total-tokens。",
    ),
    "remedy_comfy_lowvram": (
        "Start ComfyUI with --lowvram (then --novram): weights stay in RAM until they are needed.",
        "用 --lowvram（再不行用 --novram）启动 ComfyUI：权重留在内存中，用到时才上 GPU。",
    ),
    "remedy_comfy_tiled": (
        "Decode in tiles: the node VAE Decode (Tiled).",
        "分块解码：使用 VAE Decode (Tiled) 节点。",
    ),
    "remedy_comfy_fp8": (
        "Take a model in fp8 or GGUF.",
        "改用 fp8 或 GGUF 格式的模型。",
    ),
    "remedy_smaller_image": (
        "Make the picture smaller, or fewer frames or pictures at once.",
        "减小图像尺寸，或减少一次生成的帧数或张数。",
    ),
    "remedy_diffusers_offload": (
        "Keep the parts of the pipeline in RAM until they work: enable_model_cpu_offload(), then"
        " enable_sequential_cpu_offload().",
        "让流水线的各部分平时留在内存中：enable_model_cpu_offload()，再不行用 enable_sequential_cpu_offload()。",
    ),
    "remedy_diffusers_vae": ("Decode the picture in tiles (VAE tiling).", "分块解码图像（VAE tiling）。"),
    "remedy_llama_layers": ("Put fewer layers on the GPU (-ngl).", "减少放到 GPU 上的层数（-ngl）。"),
    "remedy_llama_context": (
        "Ask for a shorter context (-c); without -c some programs take the model's full length.",
        "缩短上下文（-c）；不写 -c 时有的程序会用模型的最大长度。",
    ),
    "remedy_llama_cache_type": (
        "Store keys and values in 8 bits, with flash attention.",
        "用 8 位存储键和值，并开启 flash attention。",
    ),
    "remedy_llama_batch": ("Smaller batches of the prompt (-ub, -b).", "减小提示处理的批大小（-ub、-b）。"),
    "remedy_smaller_model": ("Take a smaller model or one of fewer bits.", "换更小的模型，或位数更少的量化版本。"),
    "remedy_more_ram": (
        "Free RAM (close programs) or add some; swap helps while loading.",
        "释放内存（关闭其他程序）或增加内存；加载时交换空间也有帮助。",
    ),
    "remedy_ollama_context": (
        "Ask for a shorter context (num_ctx): memory for keys and values grows with it.",
        "缩短上下文（num_ctx）：键值缓存随它增长。",
    ),
    "remedy_ollama_parallel": (
        "One request at a time, flash attention, and a cache of 8 bits.",
        "一次只处理一个请求，开启 flash attention，缓存用 8 位。",
    ),
    "remedy_fewer_calibration_samples": (
        "Calibrate with fewer or shorter samples (max_calib_samples, n_samples, max_calib_seq_len).",
        "减少校准样本的数量或长度（max_calib_samples、n_samples、max_calib_seq_len）。",
    ),
    "remedy_layerwise_quantizing": (
        "Keep the model on the CPU and quantize layer by layer; only one layer is on the GPU then.",
        "把模型放在 CPU 上逐层量化：GPU 上每次只有一层。",
    ),
    "remedy_no_cache": (
        "Switch the cache of keys and values off while calibrating.",
        "校准时关闭键值缓存。",
    ),
    "remedy_ort_arena": (
        "Let ONNX Runtime's arena grow only as needed, without the largest workspaces.",
        "让 ONNX Runtime 的内存池按需增长，并不使用最大的工作区。",
    ),
    "remedy_smaller_input": (
        "Give it less at once: smaller batches, shorter or smaller inputs.",
        "一次少给一些：更小的批，更短或更小的输入。",
    ),
    "remedy_trt_workspace": ("Allow a smaller workspace while building.", "构建时把工作区设小。"),
    "remedy_trt_shapes": (
        "Build for smaller largest shapes (the profile's max).",
        "构建时减小最大形状（profile 的 max）。",
    ),
    "remedy_jax_preallocate": (
        "JAX takes three quarters of the device at its start: switch that off beside other programs, or raise the "
        "share.",
        "JAX 启动时会占用设备的四分之三：与其他程序共用时关闭预分配，否则可提高比例。",
    ),
    "remedy_jax_remat": (
        "Recompute in the backward what need not be kept (jax.checkpoint).",
        "反向传播时重新计算不必保留的部分（jax.checkpoint）。",
    ),
    "remedy_smaller_batch_plain": ("A smaller batch.", "减小批大小（batch size）。"),
    "remedy_tf_growth": (
        "Let TensorFlow take memory as it needs it, not all at its start.",
        "让 TensorFlow 按需占用显存，而不是启动时全部占用。",
    ),
    "remedy_rapids_chunks": (
        "Read the data in parts (byte_range, usecols, dask_cudf) and with narrower types.",
        "分块读取数据（byte_range、usecols、dask_cudf），并使用更窄的类型。",
    ),
    "remedy_rapids_managed": (
        "Let data spill to RAM (managed memory or cudf's spilling).",
        "允许数据溢出到内存（managed memory 或 cudf 的 spilling）。",
    ),
    "remedy_cupy_free": ("Free what CuPy's pool keeps.", "释放 CuPy 内存池保留的显存。"),
    "remedy_smaller_arrays": ("Work in smaller pieces.", "分成更小的块处理。"),
    "remedy_paddle_fraction": (
        "Let PaddlePaddle take a smaller share at its start.",
        "让 PaddlePaddle 启动时少占一些显存。",
    ),
    "remedy_page_file": (
        "Enlarge Windows' paging file (System > Advanced > Performance > Virtual memory): every process commits memory"
        " for CUDA's libraries.",
        "增大 Windows 的页面文件（系统 > 高级 > 性能 > 虚拟内存）：每个进程都要为 CUDA 的库提交内存。",
    ),
    "remedy_scheduler_memory": (
        "Ask the scheduler for more memory (--mem); it is the job's RAM, not the GPU's.",
        "向调度器申请更多内存（--mem）；指的是作业的内存，不是显存。",
    ),
    "remedy_pod_memory": ("Raise the container's limit of memory.", "提高容器的内存限额。"),
    "remedy_java_heap": ("Give Java a larger heap (-Xmx).", "增大 Java 堆（-Xmx）。"),
    "remedy_nccl_buffers": (
        "Leave some memory free for NCCL, whose buffers lie outside PyTorch's cache.",
        "给 NCCL 留一些显存，它的缓冲区在 PyTorch 缓存之外。",
    ),
    "remedy_unpin": (
        "Do without pinned memory (pin_memory=False), or pin less.",
        "不使用锁页内存（pin_memory=False），或减少锁页的量。",
    ),
    "remedy_gather_on_host": (
        "Keep of each batch only what the metric needs, and move it to the RAM (preprocess_logits_for_metrics,"
        " eval_accumulation_steps).",
        "每个批次只保留指标需要的部分，并移到内存中（preprocess_logits_for_metrics、eval_accumulation_steps）。",
    ),
    "remedy_collect_on_host": ("Collect results in RAM, not on the GPU.", "把结果收集在内存里，而不是显存里。"),
    "remedy_detach_state": (
        "Cut the state off from the graph of the turn before.",
        "每一轮开始时切断状态与上一轮计算图的联系。",
    ),
    "remedy_no_retain_graph": (
        "Do without retain_graph=True: sum the losses of one graph, or detach what is used again.",
        "不要使用 retain_graph=True：把同一计算图的损失相加，或对重复使用的部分 detach。",
    ),
    "remedy_map_location_cpu": (
        "Load checkpoints to the CPU and let go of them once they are in the model.",
        "先把检查点加载到 CPU，载入模型后立即释放。",
    ),
    "remedy_relaxed_limits": (
        "Allow blocks above 4 GiB (Level Zero).",
        "允许超过 4 GiB 的单块内存（Level Zero）。",
    ),
    "remedy_mps_watermark": (
        "Lift PyTorch's own limit on this Mac; beyond it macOS swaps and may stall.",
        "取消 PyTorch 在这台 Mac 上的上限；超过之后 macOS 会使用交换空间，可能卡死。",
    ),
    "remedy_bios_memory": (
        "Give the integrated GPU more of the RAM (UMA frame buffer size in the BIOS, or GTT).",
        "给核显分配更多内存（BIOS 中的 UMA 显存大小，或 GTT）。",
    ),
    "remedy_close_apps": (
        "Close other programs: on a Mac the GPU shares the memory with everything else.",
        "关闭其他程序：Mac 的 GPU 与所有程序共用内存。",
    ),
    "remedy_max_split_size": (
        "Set max_split_size_mb against fragmentation: expandable_segments does nothing on Windows.",
        "用 max_split_size_mb 减少碎片：expandable_segments 在 Windows 上不起作用。",
    ),
    "remedy_load_low_ram": (
        "Load the weights in 16 bits, shard by shard (low_cpu_mem_usage), or straight to the GPU (device_map).",
        "以 16 位逐个分片加载权重（low_cpu_mem_usage），或直接加载到 GPU（device_map）。",
    ),
    "remedy_less_offload": (
        "Offload less to the RAM (only the optimizer), or to NVMe: parameters and optimizer state in 32 bits take 16"
        " bytes for each parameter.",
        "减少卸载到内存的内容（只卸载优化器），或卸载到 NVMe：32 位的参数和优化器状态每个参数要 16 字节。",
    ),
}
