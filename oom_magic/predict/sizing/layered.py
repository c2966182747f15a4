"""Runs of a model with many equal layers, made from runs with few: a fraction of the time, the same to the byte."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

from oom_magic.predict.sizing.pieces import Trace
from oom_magic.predict.sizing.repetition import IrregularError, LayeredRun, Repetition

_FEWEST = (4, 5, 6)  # numbers of layers, tried as the fewest with which a model repeats as it does with more
_NUM_RUNS = 3  # with one layer more each: two that teach, one that checks
_LEAST_GAIN = 2  # layers that a model has beyond those
_MOST_KNOWN = 64

_Where = TypeVar("_Where")


@dataclass(frozen=True)
class Layers:
    """The number of layers of a model; inside ``only(n)`` it is built with ``n``."""

    count: int
    only: Callable[[int], AbstractContextManager[None]]


@dataclass
class _Known:
    """How layers repeat in one structure, if they do; ``unchecked`` is the place where that was learned, until it was
    confirmed elsewhere."""

    repetition: Repetition | None
    unchecked: object


# By the structure with the fewest layers, for all that is sized.
known_repetitions: OrderedDict[bytes, _Known] = OrderedDict()


class LayeredRuns(Generic[_Where]):
    """Traces of one function at any place. ``run`` makes one, with as many layers as it is told or (None) with all;
    ``ahead`` is told of runs that it will be asked for.

    How layers repeat is learned where a structure is first met, and checked where it is met next.
    """

    def __init__(
        self,
        run: Callable[[_Where, int | None], Trace],
        ahead: Callable[[Iterable[tuple[_Where, int | None]]], None],
        layers: Layers | None,
    ) -> None:
        self._run = run
        self._ahead = ahead
        self._layers = layers
        most = 0 if layers is None else layers.count - _NUM_RUNS - _LEAST_GAIN
        self._fewest = tuple(fewest for fewest in _FEWEST if fewest <= most)
        self._here: dict[tuple[_Where, int], Trace] = {}  # at the present place, by the number of layers

    def expect(self, places: Iterable[_Where]) -> None:
        """Begin to trace these places; from the first one it is learned how layers repeat."""
        places = list(places)
        fewest = self._fewest[0] if self._fewest else None
        if fewest is not None and len(self._fewest) > 1:
            self._ahead((where, fewest + more) for where in places[:1] for more in reversed(range(_NUM_RUNS)))
        self._ahead((where, fewest) for where in places)

    def trace(self, where: _Where) -> Trace:
        """The trace at a place, with all layers."""
        self._here = {known: trace for known, trace in self._here.items() if known[0] == where}
        for fewest in self._fewest:
            few = self._with_layers(where, fewest)
            repetition = self._repetition(where, few, fewest)
            if repetition is not None and self._layers is not None:
                self._fewest = (fewest,)
                structure, numbers = repetition.lengthened(self._layered(where, fewest), self._layers.count)
                return Trace(structure, numbers, few.dims, few.assumptions)
        self._fewest = ()
        return self._run(where, None)

    def _repetition(self, where: _Where, few: Trace, fewest: int) -> Repetition | None:
        key = few.structure.key
        known = known_repetitions.get(key)
        if known is None:
            known = known_repetitions[key] = _Known(self._learned(where, fewest), where)
            while len(known_repetitions) > _MOST_KNOWN:
                known_repetitions.popitem(last=False)
        elif known.repetition is not None and known.unchecked not in (None, where):
            known.unchecked = None
            self._check(where, fewest, known)
        return known.repetition

    def _learned(self, where: _Where, fewest: int) -> Repetition | None:
        self._ahead((where, fewest + more) for more in range(1, _NUM_RUNS))
        try:
            return Repetition.learn([self._layered(where, fewest + more) for more in range(_NUM_RUNS)])
        except IrregularError:
            return None

    def _check(self, where: _Where, fewest: int, known: _Known) -> None:
        """Drop a repetition that was learned at another place and does not hold at this one."""
        assert known.repetition is not None
        try:
            known.repetition.check(self._layered(where, fewest), self._layered(where, fewest + _NUM_RUNS - 1))
        except IrregularError:
            known.repetition = None

    def _layered(self, where: _Where, num_layers: int) -> LayeredRun:
        trace = self._with_layers(where, num_layers)
        return LayeredRun(num_layers, trace.structure, trace.numbers)

    def _with_layers(self, where: _Where, num_layers: int) -> Trace:
        key = where, num_layers
        if key not in self._here:
            self._here[key] = self._run(where, num_layers)
        return self._here[key]
