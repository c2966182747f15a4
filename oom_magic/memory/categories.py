"""What a piece of memory is for, a peak divided by it, and how much of a card it may take."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Literal

Verdict = Literal["safe", "tight", "danger"]
# Below the first a run is safe, up to the second tight, above it in danger.
TIGHT_SHARE, DANGER_SHARE = 0.85, 0.90
_BLOCK_NUMBER = re.compile(r"\.\d+(?=\.|$)")


class Category(str, Enum):
    """What an allocation is for.

    The first six are the names of ``torch.profiler`` (torch/profiler/_memory_profiler.py, ``Category``).
    Order is the order of display: what stays between steps first.
    """

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATION = "activation"  # saved by autograd for the backward
    INPUT = "input"
    TEMPORARY = "temporary"
    WORKSPACE = "workspace"  # scratch memory that libraries keep, such as cuBLAS's
    BEFORE = "before"  # allocated before the observed code began

    @property
    def label(self) -> str:
        """The word shown to people, such as ``"optimizer state"``."""
        return self.value.replace("_", " ")


CATEGORIES = tuple(Category)


class Breakdown(Mapping[str, int]):
    """Bytes by part (a category's or a module's name), largest first for modules, in order for categories.

    A breakdown belongs to one moment and sums (``total_bytes``) to what was allocated then.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: Mapping[str, int]) -> None:
        self._parts = {str(getattr(key, "value", key)): int(value) for key, value in parts.items() if value}

    def __getitem__(self, part: str) -> int:
        """Bytes of a part; 0 for a category without memory. Raises KeyError for other names."""
        key = str(getattr(part, "value", part))
        if key in self._parts:
            return self._parts[key]
        if key in Category._value2member_map_:
            return 0
        raise KeyError(part)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        return f"Breakdown({self._parts!r})"

    def __eq__(self, other: object) -> bool:
        return dict(self) == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._parts.items())))

    @property
    def total_bytes(self) -> int:
        """The sum of all parts, in bytes."""
        return sum(self._parts.values())

    def folded(self) -> Breakdown:
        """Modules of repeated blocks as one part, ``h.3.mlp`` and ``h.4.mlp`` as ``h.*.mlp``; largest first."""
        together: Counter[str] = Counter()
        for name, size in self.items():
            together[_BLOCK_NUMBER.sub(".*", name)] += size
        return Breakdown(dict(together.most_common()))

    def to_dict(self) -> dict[str, int]:
        """The parts as a plain ``dict``."""
        return dict(self._parts)


def verdict_on(used_fraction: float) -> Verdict:
    """Whether it is safe to use that share of a card."""
    if used_fraction < TIGHT_SHARE:
        return "safe"
    return "tight" if used_fraction <= DANGER_SHARE else "danger"
