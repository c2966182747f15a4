"""How long prices take: the first words, the first prices, the last.

    python tests/benchmarks/bench_prices.py [gpt2] [lora-7b]

A cell runs out of memory on a pretend GPU, then %oom_explain rehearses it. Goals on two idle cores: words within 1 s,
the first price within 5 s, all of the GPT-2 cell within 15 s and of the 7B LoRA cell within 30 s. Measured by the clock on
two idle cores, whose speed varies by 15 % from day to day, for the words, the run as it is with a card that would do, a
first change, and all: GPT-2 0.3, 2.2, 2.6 and 5.3 s; 7B LoRA 0.4, 3.3, 5.6 and 28.8 s. Before a first change stand two
rehearsals, the run as it is and the changed one, of 2.3 to 2.5 s each for the 7B cell: half of that is the forward and the
backward of their steps, operator by operator, a fifth building adapters, of which half are random numbers drawn on the host.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from oom_magic.notebook.cells import explanations

LOOP = """
for step in range(3):
    ids = torch.randint(0, config.vocab_size, (batch_size, seq_len), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CELLS = {
    "gpt2": """%%gpumem --no-plot --gpu "RTX 3060"
import torch
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config()
batch_size, seq_len = 16, 1024
model = GPT2LMHeadModel(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
""",
    "lora-7b": """%%gpumem --no-plot --gpu "RTX 4090"
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM
config = Qwen2Config(vocab_size=151936, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
batch_size, seq_len = 4, 1024
model = get_peft_model(
    Qwen2ForCausalLM(config).to(torch.bfloat16).cuda(), LoraConfig(r=32, target_modules="all-linear"))
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
""",
}


def quietly(shell: InteractiveShell, cell: str) -> Any:
    """The value of a cell whose output is not shown."""
    with contextlib.redirect_stdout(io.StringIO()):
        return shell.run_cell(cell).result


def main(names: list[str]) -> None:
    """Print when the words came, when each price, and what it says."""
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "oom_magic")
    evaluate_remedies = explanations.evaluate_remedies
    for name in names:
        quietly(shell, CELLS[name] + LOOP)
        start = time.perf_counter()
        words: list[float] = []
        prices: list[tuple[float, int]] = []

        def timed(
            *arguments: Any,
            start: float = start,
            words: list[float] = words,
            prices: list[tuple[float, int]] = prices,
        ) -> Iterator[Any]:
            words.append(time.perf_counter() - start)  # asked for once the words are shown
            for diagnosis in evaluate_remedies(*arguments):
                count = sum(one.peak_allocated_bytes is not None for one in diagnosis.remedies)
                prices.append((time.perf_counter() - start, count))
                yield diagnosis

        explanations.evaluate_remedies = timed
        diagnosis = quietly(shell, "%oom_explain")
        fits = [remedy.key for remedy in diagnosis.remedies if remedy.fits]
        unpriced = [remedy.key for remedy in diagnosis.remedies if remedy.needed_bytes is None]
        rehearsed = next(seconds for seconds, count in prices if count)
        print(
            f"{name}: words {words[0]:.1f} s, the run as it is {prices[0][0]:.1f} s, a first change {rehearsed:.1f} s,"
        )
        print(f"  {prices[-1][1]} changes by {prices[-1][0]:.1f} s")
        print(f"  fit: {', '.join(fits) or 'none'}; not priced: {', '.join(unpriced) or 'none'}")


if __name__ == "__main__":
    main(sys.argv[1:] or list(CELLS))
