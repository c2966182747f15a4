"""What the arguments of a function may be: ranges of whole numbers, choices, fixed values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral
from typing import Any

import numpy as np

from oom_magic.language import _
from oom_magic.memory.timeline import IntArray
from oom_magic.predict.sizing.regions import Point

_MOST_VALUES = 1_000_000  # of a range: each is a number in memory


@dataclass(frozen=True, eq=False)
class Ranges:
    """``axes`` has the values of each number that varies, ascending; ``choices`` those of each argument that is chosen.

    A setting is one value of each choice, in order; a point one value on each axis, in order.
    """

    axes: Mapping[str, IntArray]
    choices: Mapping[str, tuple[Any, ...]]
    fixed: Mapping[str, Any]

    @classmethod
    def parse(cls, fn: Callable[..., Any], given: Mapping[str, Any]) -> Ranges:
        """From ``(low, high)``, ``(low, high, step)``, ``[choice, ...]`` or a value for each argument.

        Raises ValueError or TypeError, naming argument, value and fix.
        """
        _check_names(fn, given)
        axes = {name: _axis(name, value) for name, value in given.items() if _is_range(value)}
        choices = {name: _choices(name, value) for name, value in given.items() if isinstance(value, list)}
        fixed = {name: value for name, value in given.items() if name not in axes and name not in choices}
        if not axes and not choices:
            raise ValueError(_("Nothing varies in {label}; give a range such as batch_size=(1, 64).", label=label(fn)))
        return cls(axes, choices, fixed)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all arguments that vary."""
        return (*self.axes, *self.choices)

    def locate(self, values: Mapping[str, Any]) -> tuple[tuple[int, ...], Point]:
        """The setting (positions in ``choices``) and the point of named values. Raises for values out of range."""
        self.check_names(values)
        setting = tuple(_position(name, values[name], options) for name, options in self.choices.items())
        return setting, tuple(_on_axis(name, values[name], axis) for name, axis in self.axes.items())

    def arguments(self, setting: tuple[int, ...], point: Point) -> dict[str, Any]:
        """The function's keyword arguments at a setting and point."""
        chosen = {name: options[at] for (name, options), at in zip(self.choices.items(), setting, strict=True)}
        return {**self.fixed, **chosen, **dict(zip(self.axes, point, strict=True))}

    def check_names(self, values: Mapping[str, Any], but: str = "") -> None:
        """Raise TypeError unless exactly the arguments that vary, except ``but``, have values."""
        for name in values:
            if name not in self.names or name == but:
                known = [other for other in self.names if other != but]
                values = {"name": name, "known": ", ".join(known), "offer": _offer(name, known)}
                raise TypeError(_("{name!r} does not vary here; these do: {known}{offer}", **values))
        missing = [name for name in self.names if name not in values and name != but]
        if missing:
            example = ", ".join(f"{name}={self.lowest(name)!r}" for name in missing)
            names = ", ".join(missing)
            raise TypeError(_("{names} must also be given, such as {example}.", names=names, example=example))

    def check_value(self, name: str, value: int) -> None:
        """Raise ValueError unless ``value`` is on the axis ``name``."""
        _on_axis(name, value, self.axes[name])

    def lowest(self, name: str) -> Any:
        """The first value of an argument."""
        return int(self.axes[name][0]) if name in self.axes else self.choices[name][0]


def label(fn: Callable[..., Any]) -> str:
    """The name of a function in messages, such as ``"train()"``."""
    return f"{getattr(fn, '__name__', type(fn).__name__)}()"


def _is_range(value: Any) -> bool:
    return isinstance(value, tuple)


def _axis(name: str, given: tuple[Any, ...]) -> IntArray:
    whole = all(isinstance(number, Integral) and not isinstance(number, bool) for number in given)
    if len(given) not in (2, 3) or not whole:
        values: dict[str, Any] = {"name": name, "given": given}
        raise TypeError(
            _("{name}={given!r} is not a range; write (low, high) or (low, high, step) in whole numbers.", **values)
        )
    low, high, step = (*map(int, given), 1)[:3]
    if low < 1:
        raise ValueError(_("{name}={given!r} starts at {low}; sizes begin at 1.", name=name, given=given, low=low))
    if step < 1:
        raise ValueError(
            _("{name}={given!r} has step {step}; a step is at least 1.", name=name, given=given, step=step)
        )
    if high < low:
        raise ValueError(
            _("{name}={given!r} is reversed; write ({high}, {low}).", name=name, given=given, high=high, low=low)
        )
    if high - low < step:
        values = {"name": name, "given": given, "low": low}
        raise ValueError(
            _("{name}={given!r} has only one value; give {name}={low} to fix it, or a wider range.", **values)
        )
    if (high - low) // step >= _MOST_VALUES:
        fewer = 10 ** len(str((high - low) // _MOST_VALUES))
        text = _(
            "{name}={given!r} has over {most:,} values; write ({low}, {high}, {step}).",
            name=name,
            given=given,
            most=_MOST_VALUES,
            low=low,
            high=high,
            step=fewer,
        )
        raise ValueError(text)
    return np.arange(low, high + 1, step, dtype=np.int64)


def _choices(name: str, given: list[Any]) -> tuple[Any, ...]:
    if not given:
        raise ValueError(_("{name}=[] has no choices; list at least one.", name=name))
    return tuple(given)


def _position(name: str, value: Any, options: Sequence[Any]) -> int:
    for position, option in enumerate(options):
        if type(option) is type(value) and option == value:
            return position
    offer = _offer(value, [option for option in options if isinstance(option, str)])
    known = ", ".join(map(repr, options))
    raise ValueError(
        _("{name}={value!r} is not one of {known}{offer}", name=name, value=value, known=known, offer=offer)
    )


def _on_axis(name: str, value: Any, axis: IntArray) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(_("{name}={value!r} is not a whole number.", name=name, value=value))
    at = int(np.searchsorted(axis, int(value)))
    if at < len(axis) and axis[at] == value:
        return int(value)
    if not axis[0] <= value <= axis[-1]:
        values = {"name": name, "value": value, "first": axis[0], "last": axis[-1]}
        raise ValueError(_("{name}={value!r} is outside its range, {first} to {last}; trace a wider one.", **values))
    closest = _("{most} and {last}", most=axis[at - 1], last=axis[at])
    values = {"name": name, "value": value, "closest": closest}
    raise ValueError(
        _("{name}={value!r} is between the steps of its range; the closest values are {closest}.", **values)
    )


def _check_names(fn: Callable[..., Any], given: Mapping[str, Any]) -> None:
    if not callable(fn):
        kind = type(fn).__name__
        raise TypeError(_("size needs a function, not {kind} {fn!r}; wrap the code in one.", kind=kind, fn=fn))
    try:
        parameters = inspect.signature(fn).parameters
    except ValueError:  # a builtin without a signature raises its own error
        return
    kinds = {parameter.kind for parameter in parameters.values()}
    known = [name for name, parameter in parameters.items() if parameter.kind not in _UNNAMED]
    for name in given:
        if name not in known and inspect.Parameter.VAR_KEYWORD not in kinds:
            offer = _offer(name, known)
            raise TypeError(_("{label} has no argument {name!r}{offer}", label=label(fn), name=name, offer=offer))
    missing = [name for name in known if name not in given and parameters[name].default is inspect.Parameter.empty]
    if missing:
        what = _("{label} also needs {names}", label=label(fn), names=", ".join(missing))
        text = _(
            "{what}; give a range such as {name}=(1, 64), a list of choices, or a value.", what=what, name=missing[0]
        )
        raise TypeError(text)


_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _offer(name: Any, known: Sequence[str]) -> str:
    """The suggestion of a similar name, to end a sentence; empty without one."""
    close = get_close_matches(str(name), known, n=1, cutoff=0.5)
    return _("; did you mean {close!r}?", close=close[0]) if close else "."
