"""Which arguments become controls, between which values, and where they start."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from oom_magic.language import _
from oom_magic.memory.timeline import IntArray

if TYPE_CHECKING:
    from oom_magic.predict.setups.setup import TrainingSetup

_T = TypeVar("_T")
_PRECISIONS = ("bf16", "fp16", "fp32", "amp-bf16", "amp-fp16")
_OPTIMIZERS = ("adamw", "adamw8bit", "paged-adamw8bit", "adafactor", "sgd", "sgd-momentum")
_LONGEST = 4096
_TIMES = (1, 2, 4, 8, 16, 32)  # accumulated
_LARGEST_RANK = 128


def setup_ranges(setup: TrainingSetup) -> dict[str, Any]:
    """Batch, sequence length and rank as far as the model allows; a choice for the rest that the model has."""
    source = setup.source
    ranges: dict[str, Any] = {"microbatch_size": (1, max(64, setup.microbatch_size))}
    if source.task != "image-classification":
        longest = min(source.max_seq_len or _LONGEST, max(_LONGEST, setup.seq_len))
        ranges["seq_len"] = (min(128, setup.seq_len, longest), longest)
    is_own = source.task == "own"
    if not is_own:
        narrowest = min(source.linear_layers.values(), default=_LARGEST_RANK)
        ranges["rank"] = (min(4, setup.rank), max(setup.rank, min(_LARGEST_RANK, narrowest)))
        ranges["method"] = _starting_with(setup.method, ("full", "lora", "qlora"))
    ranges["precision"] = _starting_with(setup.precision, _PRECISIONS)
    ranges["optimizer"] = _starting_with(setup.optimizer, _OPTIMIZERS)
    ranges[ACCUMULATION] = sorted({setup.gradient_accumulation_steps, *_TIMES})
    if not is_own:
        ranges["attention"] = _starting_with(setup.attention, ("sdpa", "eager", "flash_attention_2"))
        ranges["activation_checkpointing"] = [setup.activation_checkpointing, not setup.activation_checkpointing]
    if source.task == "causal-lm" and source.model_type != "gemma2":
        ranges["loss"] = _starting_with(setup.loss, ("plain", "chunked"))
    if setup.num_gpus > 1 or setup.num_processes > 1:
        for name in ranges.keys() & {"method", "optimizer", "loss"}:
            ranges[name] = [option for option in ranges[name] if _is_allowed(setup, name, option)]
    return ranges


def _is_allowed(setup: TrainingSetup, name: str, option: str) -> bool:
    """Whether several cards can be used so."""
    try:
        setup.replace(**{name: option})
    except ValueError:
        return False
    return True


def _starting_with(first: _T, options: tuple[_T, ...]) -> list[_T]:
    return [first, *(option for option in options if option != first)]


BATCHES = ("microbatch_size", "batch_size", "micro_batch_size", "per_device_train_batch_size", "batch", "bs")
LENGTHS = ("seq_len", "sequence_length", "max_seq_len", "max_length", "block_size", "context_length", "length", "seq")
RANKS = ("rank", "lora_rank", "lora_r", "r")
ACCUMULATION = "gradient_accumulation_steps"  # of a setup
ACCUMULATIONS = (ACCUMULATION, "accumulation_steps", "grad_accum_steps", "grad_accum", "accumulation")

_USUAL = {**dict.fromkeys(BATCHES, (1, 64)), **dict.fromkeys(LENGTHS, (128, 4096)), **dict.fromkeys(RANKS, (4, 128))}
_STOPS_PER_OCTAVE = 8
_MOST_EVEN_STOPS = 128
_LEAST = 8  # a default below this is taken for a count, such as of layers, and varied by ones


def inferred_ranges(fn: Callable[..., Any]) -> dict[str, Any]:
    """Ranges for the arguments that a function names: usual ones for usual names, else round the defaults.

    A switch becomes a choice; text and the rest keep their defaults.
    """
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(fn).parameters.items():
        default = parameter.default
        if isinstance(default, bool):
            found[name] = [default, not default]
        elif name in _USUAL:
            low, high = _USUAL[name]
            known = default if isinstance(default, int) and default > 0 else low
            found[name] = (min(low, known), max(high, known))
        elif isinstance(default, int) and default > 0:
            found[name] = (1, 4 * default) if default < _LEAST else (default // 4, 4 * default)
    return found


def without_the_stiff(
    fn: Callable[..., Any], ranges: Mapping[str, Any], run: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Inferred ranges without arguments that cannot vary, such as a width that heads must divide, and what to say.

    ``run`` runs ``fn`` with arguments beside its defaults: one more than the default, which is what ranges run over,
    and the next prime, as a divisor of something else divides by some of its neighbours too.
    """
    parameters = inspect.signature(fn).parameters
    tried = {
        name: _beside(parameters[name].default, value[1])
        for name, value in ranges.items()
        if isinstance(value, tuple) and name not in _USUAL
    }
    needed = {name: value[0] for name, value in ranges.items() if parameters[name].default is inspect.Parameter.empty}
    together = [{name: values[at] for name, values in tried.items()} for at in (0, -1)] if tried else []
    if all(_why_not(run, {**needed, **values}) is None for values in together) or _why_not(run, needed) is not None:
        return dict(ranges), ()
    stiff: dict[str, tuple[int, str]] = {}
    for name, values in tried.items():
        reasons = ((value, _why_not(run, {**needed, name: value})) for value in dict.fromkeys(values))
        failing = next(((value, reason) for value, reason in reasons if reason is not None), None)
        stiff |= {} if failing is None else {name: failing}
    said = [
        _(
            "{name} stays {default}: the function fails with {value}: {reason}.",
            name=name,
            default=parameters[name].default,
            value=value,
            reason=reason.rstrip("."),
        )
        for name, (value, reason) in stiff.items()
    ]
    return {name: value for name, value in ranges.items() if name not in stiff}, tuple(said)


def _beside(default: int, high: int) -> tuple[int, int]:
    """One more than a default, and the first prime beyond that, if it is not above ``high``."""
    primes = (number for number in range(default + 2, high + 1) if all(number % part for part in range(2, number)))
    return default + 1, next(primes, default + 1)


def _why_not(run: Callable[[dict[str, Any]], None], arguments: dict[str, Any]) -> str | None:
    """What a run fails with, on one line; None: it ends."""
    try:
        run(arguments)
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__
    return None


def as_choices(given: Mapping[str, Any]) -> dict[str, Any]:
    """Ranges in which a switch, ``True`` or ``False``, is a choice that starts there."""
    return {name: [value, not value] if isinstance(value, bool) else value for name, value in given.items()}


def start_of(axis: IntArray, default: Any) -> int:
    """Where a slider starts: the function's own default if it is in range, else the middle in proportion."""
    if isinstance(default, int) and default in axis:
        return int(default)
    stops = stops_of(axis)
    middle = (stops[0] * stops[-1]) ** 0.5
    return max(stop for stop in stops if stop <= max(middle, stops[0]))


def is_even(axis: IntArray) -> bool:
    """Whether an axis is short enough for a slider with all of its values."""
    return len(axis) <= _MOST_EVEN_STOPS


def stops_of(axis: IntArray, *wanted: int) -> list[int]:
    """The values a slider stops at: all of a short axis, else eight per doubling; with both ends and ``wanted``."""
    if is_even(axis):
        return [int(value) for value in axis]
    return sorted({*_per_octave(axis, _STOPS_PER_OCTAVE), *wanted})


def few_stops(axis: IntArray, most: int, wanted: int) -> list[int]:
    """At most ``most`` stops in proportion, and ``wanted``."""
    finer = (_per_octave(axis, count) for count in (_STOPS_PER_OCTAVE, 4, 2))
    return sorted({*next((stops for stops in finer if len(stops) <= most), landmarks(axis, most)), wanted})


def _per_octave(axis: IntArray, count: int) -> set[int]:
    """The ends of an axis, and ``count`` values per doubling."""
    low, high = int(axis[0]), int(axis[-1])
    stops = {low, high}
    step = 1
    while step * count <= high:
        parts = range(count, 2 * count)
        stops.update(_nearest(axis, step * part) for part in parts if low <= step * part <= high)
        step *= 2
    return stops


def landmarks(axis: IntArray, most: int) -> list[int]:
    """At most ``most`` values that span an axis in proportion: powers of two and the ends."""
    low, high = int(axis[0]), int(axis[-1])
    powers = {_nearest(axis, 2**power) for power in range(high.bit_length() + 1) if low <= 2**power <= high}
    marks = sorted({low, high, *powers})
    if len(marks) < min(4, len(axis)):
        marks = sorted({_nearest(axis, round(value)) for value in np.linspace(low, high, min(most, len(axis)))})
    while len(marks) > most:
        del marks[-3:0:-2]
    return marks


def first_of(names: Iterable[str], known: Sequence[str]) -> str | None:
    """The first of the names, by the order of ``known``."""
    present = set(names)
    return next((name for name in known if name in present), None)


def closest(name: str, known: Iterable[str]) -> str:
    """An offer such as ``" Did you mean 'train'?"``, or nothing."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return _(" Did you mean {close!r}?", close=close[0]) if close else ""


def _nearest(axis: IntArray, value: int) -> int:
    return int(axis[np.abs(axis - value).argmin()])
