"""The options of PyTorch's CUDA caching allocator that decide how much memory it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oom_magic.language import Sentences, _, translated
from oom_magic.units import MIB

LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
_NUM_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: 1 MiB, 2 MiB, ... 32 GiB
_NO_EFFECT = frozenset({
    "expandable_segments_handle_type", "graph_capture_record_stream_reuse", "pinned_free_catch_all",
    "pinned_max_cached_size_mb", "pinned_max_round_threshold_mb", "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb", "pinned_use_background_threads", "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc",
})  # fmt: skip


@dataclass(frozen=True)
class AllocatorSettings:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` (``PYTORCH_ALLOC_CONF`` since 2.9) says, and the memory fraction.

    ``roundup_power2_divisions`` has one entry for sizes below 2 MiB, then one for each doubling, the last for
    32 GiB and more; 0 turns the rounding off. ``memory_fraction`` is
    ``torch.cuda.set_per_process_memory_fraction``; without one garbage collection does not run either.
    ``is_by_address``, no option: PyTorch before 2.13 orders free blocks of one size by the driver's addresses.
    Source: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = (0,) * _NUM_INTERVALS
    garbage_collection_threshold: float = 0.0
    memory_fraction: float | None = None
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    is_by_address: bool = False

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """The settings that a ``PYTORCH_CUDA_ALLOC_CONF`` string such as ``"max_split_size_mb:128"`` makes.

        Options about host memory and locking change no device memory and are accepted. Raises ValueError,
        naming the option, its value and the fix, for one that is unknown, wrong or not modelled.
        """
        found: dict[str, Any] = {}
        for option, value in _split_options(text):
            if option in _NO_EFFECT:
                continue
            if option not in _OPTIONS:
                raise ValueError(
                    _(
                        "{option!r} (value {value!r}) is not an option of PyTorch's CUDA allocator;"
                        " use one of {known}.",
                        option=option,
                        value=value,
                        known=", ".join(sorted(_OPTIONS)),
                    )
                )
            name, read = _OPTIONS[option]
            values = {"option": option, "value": value, "fix": translated(_FIXES[option])}
            try:
                setting = read(value)
            except (ValueError, IndexError) as error:
                raise ValueError(_("{value!r} is not a valid value of {option!r}; {fix}.", **values)) from error
            if name:
                found[name] = setting
        segment = found.setdefault("large_segment_bytes", LARGE_SEGMENT_BYTES)
        found.setdefault("max_non_split_rounding_bytes", segment)
        for option in ("max_split_size_mb", "max_non_split_rounding_mb"):
            name = _OPTIONS[option][0]
            if found.get(name, segment) < segment:
                values = {"number": found[name] // MIB, "option": option, "fix": translated(_FIXES[option])}
                raise ValueError(_("{number} is too small for {option!r}; {fix}.", **values))
        return cls(**found)


def _split_options(text: str) -> list[tuple[str, str]]:
    """Pairs of option and value; commas inside brackets belong to the value (``ConfigTokenizer``)."""
    options = []
    depth, start = 0, 0
    text = "".join(text.split()) + ","
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if (character == "," and depth <= 0) or position == len(text) - 1:
            option, _unused, value = text[start:position].partition(":")
            start = position + 1
            if option:
                options.append((option, value))
    return options


def _check(is_valid: bool) -> None:
    if not is_valid:
        raise ValueError


def _read_bool(value: str) -> bool:
    _check(value in ("True", "False"))
    return value == "True"


def _read_size(value: str) -> int:
    _check(int(value) > 10)
    return int(value) * MIB


def _read_threshold(value: str) -> float:
    _check(0 < float(value) < 1)
    return float(value)


def _read_fraction(value: str) -> float:
    _check(0 <= float(value) <= 1)
    return float(value)


def _read_only(expected: str) -> Callable[[str], None]:
    return lambda value: _check(value == expected)


def _is_power_of_2(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _read_divisions(value: str) -> tuple[int, ...]:
    """``"4"`` for all sizes, or ``"[256:1,512:2,>:4]"`` by size in MiB (``parseRoundUpPower2Divisions``)."""
    if not value.startswith("["):
        _check(_is_power_of_2(int(value)))
        return (int(value),) * _NUM_INTERVALS
    _check(value.endswith("]"))
    divisions = [0] * _NUM_INTERVALS
    last, is_first = 0, True
    for pair in filter(None, value[1:-1].split(",")):
        size, number = pair.split(":")
        _check(number == "0" or _is_power_of_2(int(number)))
        if size == ">":
            divisions[last + 1 :] = [int(number)] * (_NUM_INTERVALS - last - 1)
            continue
        _check(_is_power_of_2(int(size)))
        index = min(int(size).bit_length() - 1, _NUM_INTERVALS - 1)
        if is_first:
            divisions[:index] = [int(number)] * index
        divisions[index] = int(number)
        last, is_first = index, False
    return tuple(divisions)


_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {  # field and how to read it
    "backend": ("", _read_only("native")),
    "expandable_segments": ("expandable_segments", _read_bool),
    "garbage_collection_threshold": ("garbage_collection_threshold", _read_threshold),
    "large_segment_size_mb": ("large_segment_bytes", _read_size),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _read_size),
    "max_split_size_mb": ("max_split_size_bytes", _read_size),
    "per_process_memory_fraction": ("memory_fraction", _read_fraction),
    "roundup_power2_divisions": ("roundup_power2_divisions", _read_divisions),
    "throw_on_cudamalloc_oom": ("", _read_only("False")),
}
_FIXES: Sentences = {
    "backend": "only 'native' can be simulated",
    "expandable_segments": "write True or False",
    "garbage_collection_threshold": "write a number between 0 and 1, such as 0.8",
    "large_segment_size_mb": "write a whole number of MiB above 10",
    "max_non_split_rounding_mb": "write a whole number of MiB, at least large_segment_size_mb (20)",
    "max_split_size_mb": "write a whole number of MiB, at least large_segment_size_mb (20)",
    "per_process_memory_fraction": "write a number from 0 to 1, such as 0.9",
    "roundup_power2_divisions": "write a power of 2, or a list such as [256:1,512:2,1024:4,>:8]",
    "throw_on_cudamalloc_oom": "only False can be simulated",
}


DEFAULT_SETTINGS = AllocatorSettings()
