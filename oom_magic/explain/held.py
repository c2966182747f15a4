"""Held: one holder of device memory besides what failed, as a name and a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oom_magic.explain.causes import Evidence

Kind = Literal["name", "output", "frames", "own_frames", "process", "category", "line"]


@dataclass(frozen=True)
class Held:
    """A variable, a kept result, a process, a category or a line of code, and the bytes it holds; ``what`` it is."""

    kind: Kind
    name: str
    num_bytes: int
    what: Evidence | None = None
