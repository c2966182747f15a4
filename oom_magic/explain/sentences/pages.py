"""What frames a diagnosis when it is shown: titles, the three lines on top, headings, labels, first advice.

The same form as ``catalogue``: English and Simplified Chinese, with the same fields.
"""

from __future__ import annotations

PAGE_CATALOGUE: dict[str, tuple[str, str]] = {
    "title_requested": ("Out of memory: {requested_bytes} did not fit", "显存不足：{requested_bytes} 放不下"),
    "title_device": ("Out of device memory", "显存不足"),
    "title_host": ("Out of memory on the host", "主机内存不足"),
    "title_open": ("An error that may be about memory", "可能与内存有关的报错"),
    "title_not_oom": ("Not a lack of memory", "不是内存不足"),
    "title_nothing": ("No error about memory found", "没有找到与内存有关的报错"),
    # The three lines on top.
    "line_what": ("What happened: {text}", "发生了什么：{text}"),
    "line_why": ("Why: {text} (Confidence: {confidence}.)", "为什么：{text}（可信度：{confidence}。）"),
    "line_why_open": ("Why: {text}", "为什么：{text}"),
    "why_possible": (
        "The text leaves it open. The likeliest: {cause} To tell: {check}",
        "仅凭这段文字还不能确定。最有可能：{cause} 如何确认：{check}",
    ),
    "heading_possible": ("What else it may be, and how to tell", "其他可能的原因，以及如何确认"),
    "possible_first": ("To make sure: {check}", "如何确认：{check}"),
    "possible_also": ("{cause} ({confidence}) To tell: {check}", "{cause}（可信度：{confidence}）如何确认：{check}"),
    "line_best": ("What to change: {text}", "怎么改：{text}"),
    "what_full": (
        "{requested_bytes} were asked for on {device} of {total_bytes}; PyTorch held {held_bytes} and"
        " {free_bytes} were free.",
        "在 {device}（共 {total_bytes}）上申请 {requested_bytes}；PyTorch 已占用 {held_bytes}，空闲 {free_bytes}。",
    ),
    "what_capacity": (
        "{requested_bytes} were asked for on {device} of {total_bytes}.",
        "在 {device}（共 {total_bytes}）上申请 {requested_bytes}。",
    ),
    "what_requested": (
        "{requested_bytes} were asked for and not granted.",
        "申请 {requested_bytes} 失败。",
    ),
    "device_numbered": ("GPU {index}", "GPU {index}"),
    "device_any": ("a device", "一块设备"),
    "tensor_seen": ("The failing call made it: {formula}.", "由失败的调用产生：{formula}。"),
    "best_makes_room": ("{text} Then it fits.", "{text} 这样就放得下。"),
    "best_does_not_fit": (
        "nothing tried makes it fit alone; the most is saved by: {text} ({saving_bytes}).",
        "试过的办法单独都不够；节省最多的是：{text}（{saving_bytes}）。",
    ),
    # First advice by cause, where nothing is priced.
    "advice_fragmentation": (
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts; where it is not"
        " supported, pad batches to a few fixed lengths.",
        "在启动 Python 之前设置 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True；若不支持，"
        "把批次填充到少数几种固定长度。",
    ),
    "advice_other_process": (
        "Close the other processes on this device ({tool} lists them; other notebooks' kernels count)"
        " or use another one.",
        "关闭这块设备上的其他进程（用 {tool} 查看；其他 Notebook 的内核也算），或换一块设备。",
    ),
    "advice_request_alone_too_big": (
        "Find the shape behind this one tensor on the failing line; split it, or reduce batch or length.",
        "检查出错那一行中这个张量的形状；把它拆开，或减小批大小或长度。",
    ),
    "advice_weights_too_big": (
        "Load the weights in bf16 or 4 bits, or spread them with device_map; make sure that no earlier copy"
        " of the model is still loaded.",
        "用 bf16 或 4 比特加载权重，或用 device_map 分散放置；并确认没有旧的模型副本仍留在显存里。",
    ),
    "advice_activations": (
        "Take a smaller microbatch with gradient accumulation, then activation checkpointing, then shorter sequences.",
        "先减小微批并用梯度累积补足，再开启激活检查点（gradient checkpointing），然后缩短序列。",
    ),
    "advice_evaluation": (
        "Evaluate under torch.no_grad() (or torch.inference_mode()), and move what is collected off the GPU.",
        "评估时使用 torch.no_grad()（或 torch.inference_mode()），并把收集的结果移出 GPU。",
    ),
    "advice_saving": (
        "Copy the state to the host before it is kept or saved: {code}",
        "先把状态复制到内存，再保留或保存：{code}",
    ),
    "advice_logits_or_loss": (
        "Do not make float32 logits for the whole vocabulary at once: use a chunked or fused loss, or a"
        " smaller microbatch.",
        "不要一次生成整个词表的 float32 logits：使用分块或融合的损失函数，或减小微批。",
    ),
    "advice_attention_scores": (
        "Use an attention kernel that never stores the scores (attn_implementation='sdpa' or flash"
        " attention), else shorter sequences.",
        "使用不保存注意力分数的内核（attn_implementation='sdpa' 或 flash attention），否则缩短序列。",
    ),
    "advice_optimizer_state": (
        "Use an optimizer with less state (8-bit AdamW, Adafactor) or train fewer parameters (LoRA).",
        "换用状态更小的优化器（8 比特 AdamW、Adafactor），或只训练少量参数（LoRA）。",
    ),
    "advice_leak_or_retained_reference": (
        "Keep numbers, not tensors: loss.item() or .detach() for what is collected over steps; free what"
        " failed cells still hold with %oom_free; del an older copy.",
        "保存数字而不是张量：跨步收集的内容用 loss.item() 或 .detach()；用 %oom_free 释放失败单元格仍持有的显存；"
        "用 del 删除旧的副本。",
    ),
    "advice_memory_fraction_limit": (
        "Raise the limit (set_per_process_memory_fraction, gpu_memory_utilization) or ask for less below it.",
        "提高上限（set_per_process_memory_fraction、gpu_memory_utilization），或在上限之内减少用量。",
    ),
    "advice_sysmem_fallback": (
        "Treat the card's own memory as the limit (the driver's fallback only makes it slow): smaller"
        " microbatch, bf16, activation checkpointing.",
        "以显卡自身的显存为准（驱动的回退只会变慢）：减小微批，使用 bf16，开启激活检查点。",
    ),
    "advice_host_ram": (
        "Use less of the computer's RAM: fewer data loading workers, lazy or memory-mapped data, or ask the"
        " scheduler for more.",
        "减少主机内存的占用：减少数据加载进程，惰性或内存映射读取数据，或向调度器申请更多内存。",
    ),
    "advice_shared_memory": (
        "Enlarge /dev/shm (docker run --shm-size=8g) or set num_workers=0.",
        "增大 /dev/shm（docker run --shm-size=8g），或设置 num_workers=0。",
    ),
    "advice_driver_level": (
        "Check with {tool} whether the device is full; leave some memory free for what does not go through PyTorch.",
        "用 {tool} 查看显存是否已满；给不经过 PyTorch 的部分留一些显存。",
    ),
    "advice_not_oom": (
        "Look at the error named above; less memory will not cure it.",
        "请检查上面所说的错误；减少显存用量无济于事。",
    ),
    "advice_unknown": (
        "Give the traceback above the message, or the model and its sizes, and more can be said.",
        "补上报错之前的调用栈，或给出模型及其大小，就能给出更具体的判断。",
    ),
    "how_to_price": (
        "Not priced. In a notebook %oom_explain rehearses the failed cell; for a message from elsewhere"
        " describe the run: %%oom_explain --model roberta-base --batch 4 --seq 512.",
        "以上尚未估算。在 Notebook 中 %oom_explain 会试运行失败的单元格；对别处的报错请描述训练："
        "%%oom_explain --model roberta-base --batch 4 --seq 512。",
    ),
    # Headings of the details.
    "heading_budget": ("Who held the device", "显存被谁占用"),
    "heading_tensor": ("Which tensor asked", "是哪个张量在申请"),
    "heading_evidence": ("Why we think so", "判断的依据"),
    "heading_numbers": ("How to read the message", "如何解读这条报错"),
    "heading_holders": ("What else holds memory", "还有谁占着显存"),
    "heading_remedies": ("What to change, and what it saves", "怎么改，各能省多少"),
    "heading_code": ("Code: {text}", "代码：{text}"),
    "heading_message": ("The message", "报错原文"),
    # Columns and other labels.
    "column_tensor": ("tensor", "张量"),
    "column_formula": ("shape and size", "形状与大小"),
    "column_holder": ("holder", "占用者"),
    "column_bytes": ("memory", "显存"),
    "column_remedy": ("change", "改动"),
    "column_saving": ("saves", "节省"),
    "column_speed": ("speed", "速度"),
    "column_batch": ("global batch", "全局批大小"),
    "fits_open": ("?", "?"),
    "rounding_note": (
        "Each printed size is rounded; together by up to {rounding_bytes}.",
        "打印的每个大小都经过舍入；合计误差最多 {rounding_bytes}。",
    ),
    "fit_exact": ("Exact: seen in the run itself.", "精确：来自运行本身。"),
    "fit_likely": (
        "The first fits best; the sizes of the model are known.",
        "第一个最吻合；模型的大小是已知的。",
    ),
    "fit_supposed": (
        "Candidates only: some of their dimensions are supposed, as the message does not tell the model.",
        "仅为候选：报错没有说明模型，其中有些维度是假设的。",
    ),
    "frameworks_seen": ("Seen in the text: {names}.", "文中出现：{names}。"),
    "confidence_why": ("Confidence: {confidence}.", "可信度：{confidence}。"),
    # Tensors read from a live exception or from a report.
    "tensor_name_result": ("the result of the failing line", "出错那一行的结果"),
    "tensor_name_copy": ("a copy in another type", "转换类型得到的副本"),
    "tensor_name_gradient": ("a gradient", "某个梯度"),
    "tensor_name_optimizer_state": ("state of the optimizer", "优化器的某个状态张量"),
    "tensor_name_concatenation": ("tensors put together", "拼接得到的张量"),
    "tensor_name_kv_cache": ("the cache of keys and values", "键值缓存（KV cache）"),
    "tensor_name_embeddings": ("embeddings", "嵌入向量"),
    "tensor_name_probabilities": ("log-probabilities of the loss", "损失中的对数概率"),
    "tensor_name_parameter": ("a parameter of the model", "模型的参数"),
    "tensor_name_logits_gradient": ("the gradient of the logits", "logits 的梯度"),
    # Who else holds memory.
    "held_by_name": ("variable {name} ({what})", "变量 {name}（{what}）"),
    "held_by_output": ("result kept by the notebook: {name} ({what})", "Notebook 保留的结果：{name}（{what}）"),
    "held_by_frames": ("frames that an earlier failure keeps: {what}", "之前的失败保留的调用帧：{what}"),
    "held_by_own_frames": ("what was alive in the failed call: {what}", "失败的调用中仍存活的：{what}"),
    "held_by_error": ("{kind} in {place}", "{place} 处的 {kind}"),
    "held_as": ("{kind}", "{kind}"),
    "held_as_module": ("module {kind}", "模块 {kind}"),
    "held_as_optimizer": ("optimizer {kind}, its state", "优化器 {kind} 的状态"),
    "held_as_gradients": ("gradients", "参数的梯度"),
    "held_as_graph": ("autograd graph", "计算图"),
    "held_as_shown": ("shown result", "显示过的结果"),
    "held_as_cache": ("functools cache", "functools 缓存"),
    "held_by_process": ("process {name}", "进程 {name}"),
    "held_by_category": ("all of kind {name}", "类别：{name}"),
    "held_by_line": ("made at {name}", "产生于 {name}"),
    "category_parameter": ("parameter", "参数"),
    "category_gradient": ("gradient", "梯度"),
    "category_optimizer_state": ("optimizer state", "优化器状态"),
    "category_activation": ("activation", "激活值"),
    "category_input": ("input", "输入数据"),
    "category_temporary": ("temporary", "临时"),
    "category_workspace": ("workspace", "工作区"),
    "category_before": ("there before", "之前已有"),
    # Effects on speed, short; the remedies' own sentences give the sources.
    "pace_same": ("same", "不变"),
    "pace_faster": ("faster", "更快"),
    "pace_accumulation": ("a bit slower", "略慢"),
    "pace_checkpointing": ("1/3 slower", "慢 1/3"),
    "pace_optimizer_loop": ("slower step", "优化器步变慢"),
    "pace_qlora": ("slower", "较慢"),
    "pace_int8": ("slower layers", "各层变慢"),
    "pace_offload": ("much slower", "明显更慢"),
    "pace_fsdp": ("depends", "视情况"),
    "pace_combination": ("sum", "叠加"),
    "speed_heading": ("Speed: {text}.", "速度：{text}。"),
    "same_model_twice": (
        "{names} are models of the same shape, both on the GPU: {twin_bytes} could be freed.",
        "{names} 是形状相同的模型，都在 GPU 上：可以释放 {twin_bytes}。",
    ),
    "name_grows": (
        "{name} grows in the loop, {growing_code} ({place}): it keeps {kept_bytes} in {count} tensor(s).",
        "{name} 在循环中不断增长，{growing_code}（{place}）：它在 {count} 个张量里保留了 {kept_bytes}。",
    ),
    "name_grows_with_graphs": (
        "{name} grows in the loop, {growing_code} ({place}): it keeps {count} tensor(s) with their graphs, and so"
        " {kept_bytes} that forwards saved.",
        "{name} 在循环中不断增长，{growing_code}（{place}）：它保留了 {count} 个带计算图的张量，"
        "也就保留了前向传播保存的 {kept_bytes}。",
    ),
    "pieces_are_not_it": (
        "Rehearsed in segments that grow it does not fit either: pieces in the cache are not the reason.",
        "用可扩展段试运行同样放不下：缓存碎片不是原因。",
    ),
    "growth_by_the_turn": (
        "Each tensor more adds about {turn_bytes}: with {count} of them the card was full.",
        "每多一个张量约增加 {turn_bytes}：累积到 {count} 个时显存用满。",
    ),
    "name_is_joined": (
        "{name} is made anew from itself in the loop, {growing_code} ({place}), and has {kept_bytes} now; while that"
        " happens the old and the new one are both there.",
        "{name} 在循环中由自身重新拼接而成，{growing_code}（{place}），现在有 {kept_bytes}；拼接时新旧两份同时存在。",
    ),
    "model_loaded_before": (
        "{names} holds a {model} already on the GPU while another one is loaded: {twin_bytes} could be freed.",
        "加载新模型时，{names} 已经在 GPU 上持有一个 {model}：可以释放 {twin_bytes}。",
    ),
    "chart_title": (
        "What is needed, against the {usable_bytes} that PyTorch can have (lines: tight, danger, full)",
        "所需显存，与 PyTorch 可用的 {usable_bytes} 相比（竖线：偏紧、危险、用满）",
    ),
    "row_as_it_is": ("the run as it is", "现在的运行"),
    "column_needed": ("needs", "需要"),
    "column_verdict": ("on the card", "是否够用"),
    "verdict_safe": ("safe", "充裕"),
    "verdict_tight": ("tight", "偏紧"),
    "verdict_danger": ("danger", "危险"),
    "verdict_fits": ("fits", "放得下"),
    "verdict_no": ("does not fit", "放不下"),
    "best_rehearsed": (
        "{text} Rehearsed: it needs {needed_bytes} of the card, {saving_bytes} less, and is {verdict}.",
        "{text} 试运行的结果：需要显卡提供 {needed_bytes}，减少 {saving_bytes}，结论：{verdict}。",
    ),
    "held_for_nothing": (
        "{names} held {freed_bytes} from earlier cells, of no use to the failed one: without it the cell fits.",
        "{names} 持有之前单元格留下的 {freed_bytes}，而失败的单元格并不需要它：没有它就放得下。",
    ),
    "pieces_in_rehearsal": (
        "Rehearsed in segments that grow, the same cell needs {saving_bytes} less and fits: the cache is in pieces.",
        "用可扩展段试运行同一单元格，所需减少 {saving_bytes}，可以放下：缓存已碎片化。",
    ),
    "earlier_failures": (
        "Cells that failed earlier still hold {held_bytes}; %oom_free releases them.",
        "之前失败的单元格仍持有 {held_bytes}；%oom_free 可以释放。",
    ),
    "free_what_is_held": (
        "del a name and run %oom_free to get its memory back.",
        "用 del 删除变量并运行 %oom_free，即可收回显存。",
    ),
    "category_fills": (
        "Of the {allocated_bytes} allocated when it failed, {category_bytes} were {category}.",
        "失败时已分配的 {allocated_bytes} 中，{category_bytes} 属于 {category}。",
    ),
    "rehearses": (
        "The cell will now be run again on a pretend GPU, some times, without its side effects: nothing is written or"
        " sent. %oom_explain --fast leaves this out.",
        "下面会在模拟 GPU 上再试运行这个单元几次，没有副作用：不写文件，不发送内容。用 %oom_explain --fast 可跳过。",
    ),
    "priced": (
        "{count} remedies rehearsed in {seconds} s; they are in the table below.",
        "已试运行 {count} 种办法，用时 {seconds} 秒；结果见下表。",
    ),
    "usage_no_paste": (
        "%%oom_explain explains the text below it; paste an error message there.",
        "%%oom_explain 解释它下面的文字；请把报错信息粘贴在那里。",
    ),
    "usage_no_file": (
        "%oom_explain: there is no file '{path}'; to explain pasted text use %%oom_explain.",
        "%oom_explain：没有文件 '{path}'；要解释粘贴的文字，请用 %%oom_explain。",
    ),
    "usage_nothing_failed": (
        "No error happened here yet; %oom_explain FILE and %%oom_explain read others' errors.",
        "这里还没有出过错；%oom_explain 文件名 和 %%oom_explain 可以读取别处的报错。",
    ),
    "usage_no_model": ("Options that describe a run need --model.", "描述训练的选项需要同时给出 --model。"),
    "setup_said": ("Taken for the run: {setup}.", "所依据的训练设置：{setup}。"),
    "interrupted_dry_run": (
        "interrupted at {where}. It was a dry run: nothing of yours was changed.",
        "在 {where} 处中断。这是试运行：您的数据没有任何改动。",
    ),
    "interrupted_cell": ("interrupted at {where}.", "在 {where} 处中断。"),
    "interrupted_explanation": (
        "interrupted before the explanation was complete; %oom_explain --fast rehearses nothing.",
        "解释尚未完成即被中断；%oom_explain --fast 不做任何试运行。",
    ),
    "interrupted_rehearsals": (
        "Interrupted: {count} remedies had been rehearsed by then; %oom_explain --fast rehearses none.",
        "已中断：此前已试运行 {count} 种办法；%oom_explain --fast 不做任何试运行。",
    ),
    "interrupted_sliders": (
        "interrupted at {where}, while the function was dry-run; nothing of yours was changed.",
        "试运行该函数时在 {where} 处中断；您的数据没有任何改动。",
    ),
    "decided_names": (
        "This machine has no GPU, so earlier cells decided {was}; the dry run follows them with {now}.",
        "本机没有 GPU，之前的单元格因此得到 {was}；试运行按 {now} 执行。",
    ),
    "stayed_on_cpu": (
        "Nothing was put on the GPU: {was} was decided before the dry run.",
        "没有任何内容放到 GPU 上：{was} 在试运行之前就已确定。",
    ),
    "stayed_on_cpu_peak": (
        "Nothing was put on the GPU: {was} was decided before the dry run; with 'cuda' it would take {peak_bytes}.",
        "没有任何内容放到 GPU 上：{was} 在试运行之前就已确定；改为 'cuda' 将占用 {peak_bytes}。",
    ),
}
