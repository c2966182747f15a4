"""What earlier cells hold on the device and the failed run has no use for: an older model, results of a former run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oom_magic.measure.holders.reach import Locate

# What holds less than this share of the card is not worth naming.
_LEAST_SHARE = 0.02


@dataclass(frozen=True)
class InTheWay:
    """Names, the bytes that only they hold, and the objects that only they lead to, by identity."""

    names: tuple[str, ...]
    num_bytes: int
    objects: frozenset[int] = frozenset()


def find_in_the_way(
    names: Mapping[str, Any], needed: Collection[str], locate: Locate, total_bytes: int
) -> InTheWay | None:
    """What of ``names`` could go, none that is ``needed``.

    ``locate`` finds device memory that was taken before the run. What other names hold as well would stay.
    """
    from oom_magic.measure.holders.inventory import named_values  # these load torch
    from oom_magic.measure.holders.reach import namespaces_of_modules, reach

    around = {id(names), *namespaces_of_modules()}
    reached = {
        name: reach([value], locate, around) for name, value in named_values(names) if not name.startswith("Out[")
    }
    going = {
        name
        for name, one in reached.items()
        if name not in needed and sum(one.everything().values()) >= _LEAST_SHARE * total_bytes
    }
    staying: dict[int, int] = {}
    known: set[int] = set()
    for name, one in reached.items():
        if name not in going:
            staying |= one.everything()
            known |= one.objects
    storages: dict[int, int] = {}
    objects: set[int] = set()
    for name in going:
        storages |= reached[name].everything()
        objects |= reached[name].objects
    num_bytes = sum(size for address, size in storages.items() if address not in staying)
    if num_bytes < _LEAST_SHARE * total_bytes:
        return None
    return InTheWay(tuple(sorted(going)), num_bytes, frozenset(objects - known))
