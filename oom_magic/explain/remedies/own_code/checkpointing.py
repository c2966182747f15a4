"""The statements that turn on activation checkpointing for parts of the user's models."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise

_WIDTH = 66  # of lines of code
_MOST_BESIDE = 52  # characters, in the same line


def checkpointing(blocks: Sequence[str], sequences: Sequence[tuple[str, Sequence[int]]]) -> str:
    """Statements that recompute blocks, each as a whole, and sequences of layers in parts between bounds.

    Each is an expression; one that begins with ``*`` stands for several blocks. Imports are left to the template.
    """
    lines = []
    if blocks:
        is_one_list = len(blocks) == 1 and blocks[0].startswith("*")
        lines.append(f"for block in {blocks[0][1:] if is_one_list else f'({_listed(blocks)})'}:")
        lines.append("    block.forward = partial(\n        checkpoint, block.forward, use_reentrant=False)")
    for name, bounds in sequences:
        lines.append(f"parts = [{_listed([f'{name}[{start}:{end}]' for start, end in pairwise(bounds)])}]")
        lines.append(f"{name}.forward = partial(\n    checkpoint_sequential, parts, len(parts), use_reentrant=False)")
    return "\n".join(lines)


def _listed(items: Sequence[str]) -> str:
    """Expressions in a list or tuple, in lines of their own where they are long."""
    text = ", ".join(items) + "," * (len(items) == 1)
    if len(text) < _MOST_BESIDE:
        return text
    return f"\n{textwrap.indent(textwrap.fill(text, _WIDTH), ' ' * 4)}\n"
