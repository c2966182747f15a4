"""The user's iterators, coroutines and futures: what a run takes from one that cannot be copied is told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import itertools
import operator
import types
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

from oom_magic.language import _
from oom_magic.predict.isolation.objects.copies import Copies, state_of
from oom_magic.predict.isolation.reach import variables_of

_ITERATORS_DEEP = 4  # an iterator over another one's values over ...
_FRAMES = {
    types.GeneratorType: "gi_frame",
    types.CoroutineType: "cr_frame",
    types.AsyncGeneratorType: "ag_frame",
}
_AWAITED = (types.CoroutineType, types.AsyncGeneratorType, asyncio.Future, futures.Future)


class Iterators:
    """The user's iterators, coroutines and futures, to tell of those from which a run took something."""

    def __init__(self, namespaces: Sequence[dict[str, Any]]) -> None:
        self._before: dict[int, tuple[str, Any, tuple[Any, ...]]] = {}
        self._copies: list[tuple[Any, tuple[Any, ...]]] = []
        for names in namespaces:
            for name, one in list(names.items()):
                if not name.startswith("_") and is_iterator(one):
                    self.watch(one, name)

    def watch(self, one: Any, name: str = "") -> None:
        """From now on. One that no name leads to is called as what made it is."""
        if id(one) not in self._before:
            self._before[id(one)] = name or getattr(one, "__qualname__", type(one).__name__), one, _place(one)

    def watch_copies(self, copies: Copies) -> None:
        """From now on, those that the run has in place of the user's."""
        self._copies = [(made, _place(made)) for one, made in copies.pairs() if is_iterator(one)]

    def copies_ahead(self) -> list[Any]:
        """The copies from which the run took something: the user's own are where they were."""
        return [made for made, place in self._copies if _place(made) != place]

    def tell(self, assume: Callable[[str], None]) -> None:
        """To be called when everything else is restored."""
        for name, one, place in self._before.values():
            if _place(one) == place:
                continue
            if isinstance(one, _AWAITED):
                assume(
                    _(
                        "`{name}` is a coroutine or future of yours: what the dry run did with it is not undone",
                        name=name,
                    )
                )
            else:
                assume(
                    _(
                        "`{name}` is an iterator of yours: the items that the dry run took from it are consumed",
                        name=name,
                    )
                )
        self._before.clear()
        self._copies.clear()


def is_iterator(one: Any) -> bool:
    """Whether it gives items, or is awaited."""
    return (hasattr(type(one), "__next__") or isinstance(one, _AWAITED)) and not isinstance(one, io.IOBase)


def _place(one: Any, depth: int = _ITERATORS_DEEP) -> tuple[Any, ...]:
    """A state that changes when an item is taken: a counter for loaders, references and remaining length for others."""
    if isinstance(one, (asyncio.Future, futures.Future)):
        return one.done(), getattr(one, "_num_cancels_requested", 0)
    if type(one) in _FRAMES and state_of(one) == "CREATED":
        return ()
    if type(one) is itertools.count:
        return (repr(one),)
    number = vars(one).get("_num_yielded") if hasattr(one, "__dict__") else None
    if number is not None:
        return (number,)
    frame = getattr(one, _FRAMES[type(one)]) if type(one) in _FRAMES else None  # created on first use
    if frame is not None:
        variables_of(frame)  # what holds a copy of them is created, too
    referents = gc.get_referents(one)
    if any(each is frame for each in referents if frame is not None):  # before Python 3.11
        referents += gc.get_referents(frame)
    own = (frame is not None and frame.f_lasti, *map(id, referents)) if type(one) in _FRAMES else ()
    inner = [
        _place(each, depth - 1) for each in referents if hasattr(type(each), "__next__") or type(each) is tuple if depth
    ]
    left = -1
    with contextlib.suppress(Exception):  # of the user's class
        left = operator.length_hint(one, -1)
    return (left, own, inner)
