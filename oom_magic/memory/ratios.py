"""A calculation held against a run: what was worked out by hand, what the run says, and one over the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oom_magic.description import Cell, Describable, Description, Table
from oom_magic.memory.categories import Category


@dataclass(frozen=True, repr=False)
class Ratios(Describable):
    """Bytes by name, twice. Made by ``ratios``; ``result[name]`` is the ratio by hand / in the run."""

    by_hand: Mapping[str, int]
    in_run: Mapping[str, int]

    def __getitem__(self, name: str) -> float:
        return self.by_hand[name] / self.in_run[name] if self.in_run[name] else float("nan")

    def describe(self) -> Description:
        """A row for each name."""
        rows: list[tuple[Cell, ...]] = []
        for name, size in self.by_hand.items():
            ratio = f"{self[name]:.3f}" if self.in_run[name] else ""
            rows.append((_shown(name), round(size), self.in_run[name], ratio))
        table = Table(("", "by hand", "in the run", "ratio"), tuple(rows))
        return Description("By hand against the run", (table,))

    def to_dict(self) -> dict[str, Any]:
        """For each name: bytes by hand, bytes in the run, ratio."""
        return {name: {"by_hand": size, "in_run": self.in_run[name], "ratio": self[name]}
                for name, size in self.by_hand.items()}  # fmt: skip


def ratios(by_hand: Mapping[Any, int], in_run: Mapping[Any, int]) -> Ratios:
    """Bytes worked out by hand beside those of a run, by name: ``ratios({"parameter": 4 * n}, report.highest)``.

    ``in_run``: ``report.breakdown`` (at the peak), ``report.highest``, ``report.modules`` or a dict.
    Raises KeyError, naming what is there, for a name that the run does not have.
    """
    try:
        found = {_label(name): int(in_run[name]) for name in by_hand}
    except KeyError as error:
        raise KeyError(f"{error.args[0]!r} is not in the run, which has: {', '.join(map(str, in_run))}.") from None
    return Ratios({_label(name): size for name, size in by_hand.items()}, found)


def _shown(name: str) -> str:
    return Category(name).label if name in Category._value2member_map_ else name


def _label(name: object) -> str:
    return str(getattr(name, "value", name))
