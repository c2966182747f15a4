"""A model in 4 bits, read from its folder and tuned, as code for each version of bitsandbytes that pyproject allows.

data/bitsandbytes_truth.json has what PyTorch's CUDA build took (``python -m tests.programs.quantized_loads`` under the
stub driver of ../shared/fakecuda, with each version in front of PYTHONPATH): the peak of each step, and what was
reserved in the end. 0.46.1 has no library for CUDA 13: that for 12.9 was loaded under its name, bound to CUDA 13's.
"""

from __future__ import annotations

from pathlib import Path

import torch


def tune(folder: Path) -> None:
    """Three steps of QLoRA: double quantization, checkpoints, autocast, 8-bit AdamW."""
    from bitsandbytes import optim
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig, Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2, "vocab_size": 8000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).save_pretrained(folder)
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                              bnb_4bit_compute_dtype=torch.float16)  # fmt: skip
    model = Qwen2ForCausalLM.from_pretrained(folder, quantization_config=bits, device_map={"": 0})
    targets = ["q_proj", "v_proj", "down_proj"]
    lora = LoraConfig(r=16, lora_dropout=0.05, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(prepare_model_for_kbit_training(model), lora)
    optimizer = optim.AdamW8bit([one for one in model.parameters() if one.requires_grad], lr=1e-4)
    for _step in range(3):
        tokens = torch.randint(0, 8000, (4, 256), device="cuda")
        with torch.autocast("cuda", torch.float16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Print what the steps take on this machine's card."""
    import tempfile

    import bitsandbytes
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from tests.data.record_libraries import known_values

    peaks = []

    def note(*_unused: object) -> None:
        peaks.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    register_optimizer_step_post_hook(note)
    with tempfile.TemporaryDirectory() as folder, known_values():
        tune(Path(folder))
    print(bitsandbytes.__version__, peaks, torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
