"""``%oom_sliders``: the sliders of a preset, or of a function in the notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from oom_magic.language import _
from oom_magic.notebook.options import checked
from oom_magic.notebook.sliders.controller import Sliders, sliders
from oom_magic.notebook.sliders.ranges import closest, setup_ranges
from oom_magic.predict.setups.gpus import counted

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_NUMBERS = {"rank": "rank", "batch": "microbatch_size", "seq": "seq_len"}
_FIELDS = ("method", "precision", "optimizer", "attention", "parallelism")


def sliders_from(options: Any, rest: str, shell: InteractiveShell) -> Sliders:
    """The sliders that ``%oom_sliders`` with these options asks for. A UsageError says what is allowed."""
    try:
        if options.model is not None:
            if rest:
                raise UsageError(_("%oom_sliders takes --model or a function, not both: {rest!r}.", rest=rest))
            return _of_preset(options)
        if rest:
            function = _function(rest, shell.user_ns)
            return sliders(function, gpu=options.gpu, memory=options.memory, card=options.card, **_machine(options))
    except (TypeError, ValueError) as error:
        raise UsageError(f"%oom_sliders: {error}") from None
    raise UsageError(
        _(
            "%oom_sliders needs a preset or a function of the notebook: %oom_sliders --model qwen2.5-7b"
            " --method qlora, or %oom_sliders train."
        )
    )


def _of_preset(options: Any) -> Sliders:
    from oom_magic.predict.setups.setup import TrainingSetup

    fields: dict[str, Any] = {name: getattr(options, name) for name in _FIELDS if getattr(options, name)}
    fields |= {name: getattr(options, name) for name in ("gpu", "memory") if getattr(options, name)}
    fields |= _machine(options)
    if options.gpu:
        number, fields["gpu"] = counted(options.gpu, options.num_gpus)
        fields |= {} if number is None else {"num_gpus": number}
    ranges: dict[str, tuple[int, int]] = {}
    for option, name in _NUMBERS.items():
        text = getattr(options, option)
        if text is not None:
            low, high = checked(f"--{option}", _number_or_range, text)
            fields[name] = low
            if high > low:
                ranges[name] = (low, high)
    setup = TrainingSetup(
        options.model,
        gradient_accumulation_steps=options.accumulation,
        activation_checkpointing=options.checkpointing,
        **fields,
    )
    return sliders(setup, **{**setup_ranges(setup), **ranges})


def _machine(options: Any) -> dict[str, int]:
    """How many cards, as far as it is given."""
    names = ("num_gpus", "num_processes")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _number_or_range(text: str) -> tuple[int, int]:
    """``"16"`` or ``"4:128"``."""
    low, _colon, high = text.partition(":")
    if not low.isdecimal() or not (high or low).isdecimal():
        raise ValueError(_("{text!r} is not a whole number or a range; write it like 16 or 4:128.", text=text))
    if high and int(high) <= int(low):
        raise ValueError(_("{text!r} is reversed or empty; write it like 4:128.", text=text))
    return int(low), int(high or low)


def _function(text: str, names: dict[str, Any]) -> Callable[..., Any]:
    """A function of the notebook by name."""
    found = names.get(text)
    if callable(found):
        return found  # type: ignore[no-any-return]
    if found is not None:
        raise UsageError(_("%oom_sliders: {text!r} is {name}, not a function.", text=text, name=type(found).__name__))
    functions = [name for name, value in names.items() if callable(value) and not name.startswith("_")]
    text = _("there is no function {name!r} in this notebook.{offer}", name=text, offer=closest(text, functions))
    raise UsageError(f"%oom_sliders: {text}")
