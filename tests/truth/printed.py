"""Figures that programs printed on real cards, beside dry runs of the same programs: ``python tests/truth/printed.py FOLDER``.

FOLDER is a checkout of github.com/rasbt/LLMs-from-scratch (commit ``COMMIT``), whose
``ch05/10_llm-training-speed/README.md`` prints reserved memory on an A100 after each change of one program; the
programs are run as they stand, with the change undone or done. With ``qwen3`` instead of a folder: the settings of
TRL's notebook on QLoRA (examples/notebooks/sft_trl_lora_qlora.ipynb at 475c732), which printed its figures on an A100.
Nothing was tuned to the figures: ``RECORDED`` holds what came out at the first try, and README shows it.
"""

from __future__ import annotations

import re
import runpy
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import oom_magic as om
from oom_magic.units import GIB
from tests.support.put_back import observed

COMMIT = "7ca7c47"
_TOKENS = 466_000  # of the book, which gives the 52 steps an epoch that the README prints

Edit = tuple[str, str]
_NO_BUFFER: Edit = (r"        self\.register_buffer\(\"mask\".*\n", "")
_MASK_MADE: Edit = (r"self\.mask\.bool\(\)\[:num_tokens, :num_tokens\]",
                    "torch.ones(num_tokens, num_tokens, device=x.device).triu(1).bool()")  # fmt: skip
_MASK = (_NO_BUFFER, _MASK_MADE)
_BF16 = (*_MASK, (r"weight_decay=settings\[\"weight_decay\"\]\n", 'weight_decay=settings["weight_decay"], fused=True\n'),
         (r"model\.to\(device\)", "model.to(device).to(torch.bfloat16)"))  # fmt: skip
_CLASSES = (*_BF16, (r"( +)GELU\(\),", r'\1nn.GELU(approximate="tanh"),'), (r"= LayerNorm\(", "= nn.LayerNorm("))
_EAGER: Edit = (r" +model = torch\.compile\(model\)\n", "")
_UNPADDED, _BATCH_8 = (r"50304", "50257"), (r"\"batch_size\": 32", '"batch_size": 8')

# What the README calls the state of its program: the file, the edits, GiB that it prints.
PROGRAMS: dict[str, tuple[str, tuple[Edit, ...], float]] = {
    "as the book has it, float32": ("00_orig.py", (), 26.2617),
    "mask made on the fly": ("00_orig.py", _MASK, 26.2422),
    "bfloat16, fused AdamW": ("00_orig.py", _BF16, 13.7871),
    "PyTorch's LayerNorm and GELU": ("00_orig.py", _CLASSES, 11.5645),
    "fused attention": ("01_opt_single_gpu.py", (_EAGER, _UNPADDED, _BATCH_8), 5.9004),
    "compiled": ("01_opt_single_gpu.py", (_UNPADDED, _BATCH_8), 6.1875),
    "vocabulary padded to 50,304": ("01_opt_single_gpu.py", (_BATCH_8,), 5.8906),
    "batch 32 instead of 8": ("01_opt_single_gpu.py", (), 22.5078),
}
QLORA = {"QLoRA: model loaded": 11.959, "QLoRA: peak": 13.615}

# What dry runs said with torch 2.13.0 (and transformers 4.57.1, trl 0.24.0, bitsandbytes 0.48.1 for QLoRA), in GiB.
RECORDED: dict[str, float] = {
    "as the book has it, float32": 26.2617,
    "mask made on the fly": 26.2422,
    "bfloat16, fused AdamW": 13.7734,
    "PyTorch's LayerNorm and GELU": 11.5762,
    "fused attention": 5.8926,
    "compiled": 5.8574,
    "vocabulary padded to 50,304": 5.8809,
    "batch 32 instead of 8": 22.5078,
    "QLoRA: model loaded": 11.957,
    "QLoRA: peak": 13.613,
}


class _Tokens:
    """Stands for tiktoken's encoding: a token a character; only how many there are matters."""

    def encode(self, text: str, **_unused: Any) -> list[int]:
        return [1] * len(text)

    def decode(self, _ids: list[int]) -> str:
        return ""


def run_program(folder: Path, file: str, edits: tuple[Edit, ...]) -> om.MemoryReport:
    """A dry run of one epoch of the program, changed by the edits, on an A100."""
    from contextlib import chdir  # Python 3.11

    source = (folder / "ch05" / "10_llm-training-speed" / file).read_text()
    for pattern, new in edits:
        source, count = re.subn(pattern, new, source)
        assert count, f"{file} has no {pattern}"
    batch = int(re.search(r"\"batch_size\": (\d+)", source)[1])  # type: ignore[index]
    config = {"vocab_size": 50304 if "50304" in source else 50257, "context_length": 1024, "emb_dim": 768,
              "n_heads": 12, "n_layers": 12, "drop_rate": 0.1, "qkv_bias": False}  # fmt: skip
    settings = {"learning_rate": 5e-4, "num_epochs": 1, "batch_size": batch, "weight_decay": 0.1}
    tiktoken: Any = ModuleType("tiktoken")
    tiktoken.get_encoding = lambda _name: _Tokens()
    sys.modules["tiktoken"] = tiktoken
    with tempfile.TemporaryDirectory() as work, chdir(work):
        Path("middlemarch.txt").write_text("a" * _TOKENS)
        Path("program.py").write_text(source)
        main = runpy.run_path("program.py", run_name="program")["main"]
        return om.dry_run(lambda: main(config, settings), gpu="A100 40GB")


def tune_with_qlora(seen: dict[str, float], output: str) -> None:
    """SFTTrainer with a 4-bit Qwen3-8B, as the notebook sets it; examples fill the 1024 tokens that it cuts at."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({"<eos>": 0, "<pad>": 1, "a": 2}, unk_token="a"))
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16,
                                      bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4")  # fmt: skip
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            "Qwen/Qwen3-8B", attn_implementation="sdpa", dtype=torch.float16, quantization_config=quantization
        ),
        args=SFTConfig(
            max_steps=40, per_device_train_batch_size=2, gradient_accumulation_steps=8, optim="adamw_8bit",
            gradient_checkpointing=True, report_to="none", output_dir=output,
        ),
        train_dataset=Dataset.from_dict({"input_ids": [[2] * 1024] * 700}),
        peft_config=LoraConfig(r=32, lora_alpha=32, target_modules=projections),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>"),
    )  # fmt: skip
    seen["QLoRA: model loaded"] = torch.cuda.max_memory_reserved() / GIB
    trainer.train()


def show(name: str, printed: float, predicted: float) -> None:
    print(f"{name:32} {printed:9.4f} {predicted:9.4f} {predicted / printed - 1:+8.2%}", flush=True)


def main(what: str) -> None:
    if what == "qwen3":
        seen: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as output:
            report = observed(lambda: tune_with_qlora(seen, output), gpu="A100 40GB")
        seen["QLoRA: peak"] = report.peak_reserved_bytes / GIB
        for name, printed in QLORA.items():
            show(name, printed, seen[name])
        return
    for name, (file, edits, printed) in PROGRAMS.items():
        show(name, printed, run_program(Path(what), file, edits).peak_reserved_bytes / GIB)


if __name__ == "__main__":
    main(sys.argv[1])
