"""The GPUs of gpus.toml, with the total memory that CUDA reports, which is less than the advertised size.

A "12 GB" RTX 3060 has 12,288 MiB; page tables, ECC and firmware leave 11.76 GiB. Totals are those of
``torch.cuda.get_device_properties(0).total_memory``, the "total capacity" of an out-of-memory message, on
Linux. They move by up to 1 % with the driver; under Windows a consumer card reports its whole memory.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from oom_magic.errors import InvalidSettingError
from oom_magic.language import _
from oom_magic.units import MIB

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_GPU = "RTX 3060"
_FEWEST_READINGS = 2  # so many readings of a generation make a range


@cache
def read_table(name: str) -> dict[str, Any]:
    """The TOML file of this name as plain data, cached: do not modify it."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class GPU:
    """A card as CUDA describes it. Sizes in bytes."""

    name: str
    total_bytes: int
    capability: tuple[int, int]
    num_multiprocessors: int
    context_bytes: int  # typical memory of a training process outside PyTorch: CUDA context, kernels, libraries
    is_read: bool  # PyTorch printed this total on such a card; else it is that of a similar card of the same size
    context_range: tuple[int, int] | None = None  # least and most measured context; None: it was measured here

    @property
    def threads_per_multiprocessor(self) -> int:
        """The most threads that can be resident."""
        return int(self._by_capability("threads_per_multiprocessor"))

    @property
    def l2_cache_bytes(self) -> int:
        """The size of the L2 cache; that of its generation if the card is not listed."""
        listed = read_table("gpus.toml")["l2_cache_mib"]["cards"]
        found = (size for name, size in listed.items() if name in self.name)
        return int(next(found, self._by_capability("l2_cache_mib"))) * MIB

    def _by_capability(self, what: str) -> int:
        sizes = read_table("gpus.toml")[what]
        major, minor = self.capability
        number: int = sizes["capabilities"].get(f"{major}.{minor}", sizes["other"])
        return number


_GIGABYTES = re.compile(r"(\d)g\b")
_NOISE = re.compile(r"nvidia|geforce|tesla|quadro|generation|edition|\bgpu\b|[^a-z0-9]")


def find_gpu(name: str) -> GPU:
    """The card meant by ``name``, however it is spelled: "rtx3060", "NVIDIA GeForce RTX 3060", "a100-80gb".

    Raises ValueError with the closest names of the catalogue.
    """
    known = _cards_by_key()
    key = _key(str(name))
    if key in known:
        return known[key]
    spellings = {spelling: card.name for spelling, card in known.items()}
    close = dict.fromkeys(
        spellings[match]
        for match in [*_swapped(key, spellings), *_numbered(key, spellings), *get_close_matches(key, spellings, 6, 0.5)]
    )
    raise InvalidSettingError("unknown_card", name=name, offer=list(close)[:3])


def is_card(name: str) -> bool:
    """Whether ``find_gpu`` knows this name; ``"2x T4"`` is one, too."""
    return _key(counted(name)[1]) in _cards_by_key()


def checked_num_gpus(num_gpus: Any) -> int:
    """``num_gpus``, if it is a count of 1 or more. Raises ValueError with the fix."""
    if isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or num_gpus < 1:
        values = {"name": "num_gpus", "number": num_gpus}
        raise ValueError(
            _("{name}={number!r} is not a valid count; give a whole number of 1 or more, such as {name}=2.", **values)
        )
    return num_gpus


def counted(name: str, num_gpus: int | None = None) -> tuple[int | None, str]:
    """The number and the name of the cards: ``"2x T4"`` is two T4s; for other names the number is ``num_gpus``.

    Raises ValueError if both give a number and they differ.
    """
    found = re.fullmatch(r"\s*(\d+)\s*[xX×*]\s*(\D.*)", name)
    if found is None:
        return num_gpus, name
    number = int(found[1])
    if num_gpus not in (None, 1, number):
        values = {"asked": num_gpus, "gpu": name, "number": number}
        raise ValueError(_("num_gpus={asked}, but {gpu!r} names {number}; give only one of them.", **values))
    return number, found[2]


def _swapped(key: str, spellings: Iterable[str]) -> list[str]:
    """The spellings of the same characters in another order: digits are easily swapped ("RTX 3600")."""
    return [spelling for spelling in spellings if sorted(spelling) == sorted(key)]


def _numbered(key: str, spellings: Iterable[str]) -> list[str]:
    """The spellings with the same number of a card ("4090 Ti")."""
    numbers = set(re.findall(r"\d{3,}", key))
    return sorted((spelling for spelling in spellings if numbers & set(re.findall(r"\d{3,}", spelling))), key=len)


def closest_gpu(name: str, capability: tuple[int, int]) -> GPU:
    """The card of this name; else, as for an instance of a divided card (MIG), one of its generation or an older one.

    It has the kernels of the card here, but not its memory.
    """
    try:
        return find_gpu(name)
    except ValueError:
        older = [card for card in list_gpus() if card.capability <= capability]
        return max(older or list_gpus()[:1], key=lambda card: (card.capability, _num_alike(card.name, name)))


def _num_alike(name: str, other: str) -> int:
    """The length of the common prefix of both names."""
    pairs = zip(_key(name), _key(other), strict=False)
    return sum(1 for _unused in takewhile(lambda pair: pair[0] == pair[1], pairs))


@cache
def list_gpus() -> tuple[GPU, ...]:
    """Every card of gpus.toml, oldest generation first."""
    return tuple(card for card, _unused in _cards())


@cache
def _cards() -> tuple[tuple[GPU, tuple[str, ...]], ...]:
    """The cards and the other names of each."""
    found = []
    for generation in read_table("gpus.toml")["generation"]:
        capability, typical = tuple(generation["capability"]), generation["context_mib"] * MIB
        least, most = context_range(capability, typical)
        context_bytes = max(typical, least)
        for name, total_mib, is_read, num_multiprocessors, aliases in generation["cards"]:
            card = GPU(name, total_mib * MIB, capability, num_multiprocessors, context_bytes, is_read, (least, most))
            found.append((card, tuple(aliases)))
    return tuple(found)


@cache
def _cards_by_key() -> dict[str, GPU]:
    known: dict[str, GPU] = {}
    for card, aliases in _cards():
        names = [card.name, *aliases]
        if "GeForce" in card.name:
            names += [name.split("TX ", 1)[-1] for name in names]
        for name in names:
            known.setdefault(_key(name), card)
    return known


def _key(name: str) -> str:
    return _NOISE.sub("", _GIGABYTES.sub(r"\1gb", name.lower()))


def context_range(
    capability: tuple[int, int], typical_bytes: int, environment: Mapping[str, str] = os.environ
) -> tuple[int, int]:
    """The least and the most bytes that were read on cards of this generation, or on any where few were read.

    ``typical_bytes`` is among them. With ``CUDA_MODULE_LOADING=EAGER`` they are those of all kernels at once.
    """
    is_eager = environment.get("CUDA_MODULE_LOADING", "").upper() == "EAGER"
    least, most = _range(capability, "eager" if is_eager else "lazy")
    return (least, most) if is_eager else (min(least, typical_bytes), max(most, typical_bytes))


@cache
def _range(capability: tuple[int, int], loading: str) -> tuple[int, int]:
    readings = [reading for reading in read_table("contexts.toml")["reading"] if reading["loading"] == loading]
    own = [mib for reading in readings if reading.get("capability") == [*capability] for mib in reading["mib"]]
    found = own if len(own) >= _FEWEST_READINGS else [mib for reading in readings for mib in reading["mib"]]
    return min(found) * MIB, max(found) * MIB
