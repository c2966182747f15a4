"""Iterators of the user's cannot be put back: what a dry run took from them is gone, and that is said."""

from __future__ import annotations

import contextlib
import gc
import io
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from oom_magic.language import _

_DEPTH = 4  # an iterator over another one's values over ...


def iterators_watched(namespaces: Sequence[dict[str, Any]], assume: Callable[[str], None]) -> Callable[[], None]:
    """To be called after a run: ``assume`` is told the names of iterators from which something was taken since now."""
    before = [(name, one, _place(one)) for names in namespaces for name, one in _iterators(names)]

    def tell() -> None:
        for name, one, place in before:
            if _place(one) != place:
                assume(_("`{name}` is an iterator of yours: what the dry run took from it is gone", name=name))

    return tell


def _iterators(names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, one in list(names.items()):
        if hasattr(type(one), "__next__") and not isinstance(one, io.IOBase) and not name.startswith("_"):
            yield name, one


def _place(one: Any, depth: int = _DEPTH) -> tuple[Any, ...]:
    """What differs once something was taken: of a loader's a number, of others what they refer to and have left."""
    number = vars(one).get("_num_yielded") if hasattr(one, "__dict__") else None
    if number is not None:
        return (number,)
    held = gc.get_referents(one)
    own = (
        (one.gi_frame is not None and one.gi_frame.f_lasti, *map(id, held)) if type(one) is types.GeneratorType else ()
    )
    inner = [
        _place(each, depth - 1) for each in held if hasattr(type(each), "__next__") or type(each) is tuple if depth
    ]
    left = -1
    with contextlib.suppress(Exception):  # of the user's class
        left = operator.length_hint(one, -1)
    return (left, own, inner)
