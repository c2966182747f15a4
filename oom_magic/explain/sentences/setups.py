"""A TrainingSetup's settings, and why some do not go together, in Simplified Chinese beside their English.

``language.SENTENCES`` includes them; the English is that of ``predict.setups.wording`` and ``refusals``.
"""

from __future__ import annotations

from oom_magic.errors import REFUSALS
from oom_magic.predict.setups.setup import PHRASES

_PHRASES = {
    "setting": "{value}",
    "full": "全参数微调",
    "lora": "秩为 {rank} 的 LoRA",
    "qlora": "秩为 {rank} 的 QLoRA",
    "batch": "批大小 {batch}",
    "batch_of_tokens": "批大小 {batch} x {seq} 个词元",
    "accumulation": "梯度累积 {times} 次",
    "checkpointing": "激活检查点",
    "attention": "{name} 注意力",
    "chunked_loss": "分块损失",
    "card": "在 {gpu}（{total}）上",
}
_REFUSALS = {
    "qlora_of_no_file": "method 'qlora' 需要可以量化的权重：请用预设模型或文件夹，而不是配置或函数。",
    "qlora_in_32_bits": "method 'qlora' 以 16 位计算：precision 必须是 bf16、fp16、amp-bf16 或 amp-fp16。",
    "frozen_and_adapters": "frozen {frozen} 只能与 method 'full' 一起使用；适配器本来就会冻结其余参数：去掉它即可。",
    "chunked_loss_without_logits": "loss 'chunked' 用于 GPT-2、Llama 这类解码器，不能用于 {model}：请用 'plain'。",
    "chunked_loss_and_soft_cap": "loss 'chunked' 会漏掉这个模型对 logits 的软上限：请用 'plain'。",
    "checkpointing_of_own_model": "activation_checkpointing 需要 transformers 模型；函数返回的模型要自己实现。",
    "padded_without_mask": "data 'padded' 需要 transformers 语言模型，不能用于图像或函数。",
    "no_target_modules": "模型由函数返回时必须给出 target_modules。",
    "flash_in_32_bits": "attention 'flash_attention_2' 只支持 16 位：precision 'fp32' 时请用 'sdpa'。",
    "flash_on_old_card": "attention 'flash_attention_2' 需要计算能力 8.0，{gpu} 不具备：请用 'sdpa'。",
    "flash_of_t5": "attention 'flash_attention_2'：transformers 没有为 {model} 实现；请用 'sdpa' 或 'eager'。",
    "longer_than_positions": "seq_len {seq} 超过了 {model} 的 {positions} 个位置：最多只能用这么多。",
    "no_such_layer": "target_modules '{name}' 不是 {model} 的层：{known}。",
    "rank_above_layer": "秩 {rank} 大于它要适配的层：{model} 的 {layer} 只有 {width}：最多只能用这么多。",
    "no_field": "TrainingSetup 没有字段 '{name}'。",
    "not_one_of": "{name} '{value}' 不在可选值之中：{allowed}。",
    "not_a_count": "{name} {value} 不是正整数。",
    "no_such_rank": "rank {rank} 不是该作业的进程：请给 0 到 {last}。",
    "not_a_fraction": "{name} {value} 不在 0 和 1 之间。",
    "not_positive": "{name} {value} 不是正数；None 表示不裁剪。",
    "unknown_card": "显卡目录中没有 '{name}'。其他显卡请给出显存大小：'12GiB'。",
    "unknown_model": "'{name}' 不是预设模型。也可以给出含 config.json 的文件夹或 transformers 配置。",
    "no_model": (
        "model {model} 不是预设模型的名字、含 config.json 的文件夹、transformers 配置，"
        "也不是返回 nn.Module 的具名函数。"
    ),
    "no_configuration": "model '{name}'：{file} 不是 transformers 模型的配置。",
    "no_size": "'{text}' 不是大小；请写成 '12GiB' 或 '500MB' 这样。",
    "size_without_unit": "'{text}' 没有单位；您是不是想写 '{number}GiB'？",
    "unknown_unit": "'{text}' 中的 '{unit}' 不是单位；请用 GiB、MiB、KiB、GB、MB、KB 或 B。",
    "size_not_positive": "'{text}' 不是正的大小；请写成 '12GiB' 这样。",
    "did_you_mean": "您是不是想写 {names}？",
}
SETUPS: dict[str, tuple[str, str]] = {
    **{f"setup_{key}": (english, _PHRASES[key]) for key, english in PHRASES.items()},
    **{f"refusal_{key}": (english, _REFUSALS[key]) for key, english in REFUSALS.items()},
}
