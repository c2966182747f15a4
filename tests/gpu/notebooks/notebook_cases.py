"""How a notebook that runs out of memory is written down: cells with values, and how a remedy changes them.

In a cell ``{NAME}`` stands for a value. ``apply`` gives the values with a remedy applied, by its key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Values = dict[str, Any]

Apply = Callable[[Values, Mapping[str, Any]], Values]

CARD_MIB = 2048
CONTEXT_MIB = 380  # of it, as the catalogue has it


@dataclass(frozen=True)
class Notebook:
    """Cells with their values; ``causes`` and ``first`` are those that are right, ``others_mib`` what others hold.

    ``num_cards`` are visible. ``reads_values``: what it takes depends on values of small tensors, which the stub does not compute by itself.
    """

    cells: tuple[str, ...]
    values: Values
    causes: frozenset[str]
    first: frozenset[str]
    apply: Mapping[str, Apply] = field(default_factory=dict)
    others_mib: int = 0
    files: Mapping[str, str] = field(default_factory=dict)
    reads_values: bool = False
    num_cards: int = 1
    num_writing: int = 0  # of the first cells: on a pretend card they run plainly, since dry runs leave no files
    copied_kib: int = 0  # the stub copies so much for real: for code that looks at what came back to the host


def put(**values: Any) -> Apply:
    """Other values, whatever the remedy."""
    return lambda before, _: {**before, **values}


def after(name: str) -> Apply:
    """The remedy's new size as a value."""
    return lambda before, remedy: {**before, name: remedy["after"]}


def names(*names: str) -> frozenset[str]:
    return frozenset(names)


HEAD = """import torch, torch.nn as nn, torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
"""

SMALL = HEAD + "config = GPT2Config(n_embd=256, n_layer=6, n_head=4, vocab_size=8192, n_positions=512)\n"

STEP = names("smaller_batch", "checkpointing", "mixed_precision", "combination", "chunked_loss")

FILLED = names("activations", "logits_or_loss")


def too_large_a_batch(cells: tuple[str, ...], values: Values, **known: Any) -> Notebook:
    """Cells whose steps fill the card: what a step takes is the cause, and a smaller batch ``{B}`` a remedy."""
    return Notebook(cells, values, FILLED, STEP, {"smaller_batch": after("B")}, **known)
