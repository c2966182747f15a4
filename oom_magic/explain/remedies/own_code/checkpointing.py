"""The statements that turn on activation checkpointing for parts of the user's models."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise

_WIDTH = 76  # of lines of code


def checkpointing(blocks: Sequence[str], sequences: Sequence[tuple[str, Sequence[int]]]) -> str:
    """Code that recomputes blocks, each as a whole, and sequences of layers in parts between bounds.

    Each is an expression; one that begins with ``*`` stands for several blocks.
    """
    names = [name for name, found in (("checkpoint", blocks), ("checkpoint_sequential", sequences)) if found]
    lines = ["from functools import partial", f"from torch.utils.checkpoint import {', '.join(names)}"]
    if blocks:
        lines.append(f"for block in {_of_all(blocks)}:")
        lines.append("    block.forward = partial(\n        checkpoint, block.forward, use_reentrant=False)")
    for name, bounds in sequences:
        lines.append(f"parts = {_listed('[]', [f'{name}[{start}:{end}]' for start, end in pairwise(bounds)])}")
        lines.append(f"{name}.forward = partial(\n    checkpoint_sequential, parts, len(parts), use_reentrant=False)")
    return "\n".join(lines)


def _of_all(blocks: Sequence[str]) -> str:
    is_one_list = len(blocks) == 1 and blocks[0].startswith("*")
    return blocks[0][1:] if is_one_list else _listed("()", blocks)


def _listed(brackets: str, items: Sequence[str]) -> str:
    """A list of expressions, in several lines where it is long."""
    start, end = brackets
    text = ", ".join(items) + "," * (len(items) == 1)
    if len(text) < _WIDTH - 20:
        return f"{start}{text}{end}"
    return f"{start}\n{textwrap.indent(textwrap.fill(text, _WIDTH), ' ' * 4)}\n{end}"
