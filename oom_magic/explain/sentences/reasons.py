"""Why a remedy has no price, in English and Simplified Chinese; ``language.SENTENCES`` includes them.

The first are this package's own, the others (``reason_<key>``) those of ``predict.changes``' InapplicableError.
"""

from __future__ import annotations

REASONS: dict[str, tuple[str, str]] = {
    "reason_no_run": (
        "nothing here to rehearse; give the run (setup= or --model ...)",
        "这里没有可以试运行的训练；请给出训练设置（setup= 或 --model ...）",
    ),
    "reason_fits_as_it_is": ("what was rehearsed fits as it is", "试运行的这段训练本来就放得下"),
    "reason_other_program": ("a setting of another program", "其他程序的设置"),
    "reason_not_yet": ("not rehearsed yet", "尚未试运行"),
    "reason_nothing_saves": (
        "the cell was rehearsed with every change that fits it, and none of them saves much",
        "已对该单元格试运行所有适用的更改，节省都不明显",
    ),
    "reason_loop_is_long": (
        "the loop is too long to be followed until the card is full; {grown_bytes} had grown when it failed",
        "循环太长，未能一直试运行到显存用满；失败时已增长 {grown_bytes}",
    ),
    "reason_estimate": ("an estimate, not rehearsed", "估算值，未经试运行"),
    "reason_time": (
        "the {seconds} seconds for rehearsals were over",
        "试运行的 {seconds} 秒时间已用完",
    ),
    "reason_failed": ("its rehearsal failed: {error}", "试运行时出错：{error}"),
    "reason_setup_refused": ("these settings do not go together: {error}", "这些设置不能同时使用：{error}"),
    "reason_so_already": ("the run is so already", "训练已是这样设置"),
    "reason_changes_loading": (
        "how much it saves is decided where the model is loaded",
        "省多少取决于加载模型的方式",
    ),
    "reason_library_missing": ("{name} is not installed", "未安装 {name}"),
    "reason_checkpointing_already": ("activation checkpointing is on already", "激活检查点已经开启"),
    "reason_no_equal_blocks": (
        "the model has no list of equal blocks to recompute",
        "模型没有可以重新计算的重复模块",
    ),
    "reason_autocast_already": ("autocast is on already", "autocast 已经开启"),
    "reason_weights_16_bits_already": ("the weights have 16 bits or fewer already", "权重已经是 16 位或更少"),
    "reason_no_attention_choice": ("the model has no choice of attention kernels", "该模型不能选择注意力实现"),
    "reason_attention_already": ("the attention is {name} already", "注意力实现已经是 {name}"),
    "reason_no_such_option": ("{optimizer} has no option {option}", "{optimizer} 没有选项 {option}"),
    "reason_optimizer_already": ("the optimizer is {name} already", "优化器已经是 {name}"),
    "reason_no_optimizer": (
        "no optimizer of this model is known before its first step",
        "在第一步之前还没有这个模型的优化器",
    ),
    "reason_adapters_already": ("the model has adapters already", "模型已经有适配器"),
    "reason_no_adapters_for_it": (
        "PEFT finds the layers of Hugging Face models only",
        "PEFT 只能自动找到 Hugging Face 模型的层",
    ),
    "reason_quantized_already": ("the model is quantized already", "模型已经量化"),
    "reason_no_linear_layers": ("the model has no linear layers to quantize", "模型没有可以量化的线性层"),
    "reason_gradients_off_already": ("gradients are off already", "梯度已经关闭"),
    "reason_gradients_released_already": ("gradients are released already", "梯度已经释放"),
    "reason_outputs_dropped_already": ("the outputs are dropped already", "模型输出已经释放"),
    "reason_no_language_head": ("the model has no plain language model head", "模型没有普通的语言模型输出层"),
    "reason_weights_are_trained": (
        "weights so loaded cannot be trained, adapters on top of them can",
        "这样加载的权重不能训练，只能训练其上的适配器",
    ),
    "reason_no_quantized_loading": (
        "only Hugging Face models are loaded quantized",
        "只有 Hugging Face 模型可以量化加载",
    ),
    "reason_no_model_ran": ("no model ran in the rehearsal", "试运行中没有模型运行"),
    "reason_line_elsewhere": ("that line is not in this cell", "这一行不在这个单元格里"),
    "reason_size_not_set_there": ("the size is set elsewhere", "这个大小在别处设置"),
}
