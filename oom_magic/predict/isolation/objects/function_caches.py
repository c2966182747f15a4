"""The caches of functions (``functools.lru_cache``): the run's results are removed, the user's stay.

CPython keeps them in a dict, or, if there is a limit, in links (``lru_cache_object`` in Modules/_functoolsmodule.c),
which it uses again for other results. So such a cache is emptied and filled again by calls.
"""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from oom_magic.predict.isolation.objects.members import PLAIN

CACHED_FUNCTION = type(functools.lru_cache(len))
_OF_A_LINK = 3  # what the collector is shown of one: its key, its result, and its type
_WORD = ctypes.sizeof(ctypes.c_void_p)


def cache_noted(one: Any) -> tuple[Callable[[], object], list[Any]]:
    """What puts a function's cache back, and the objects that it holds."""
    (links, table, function), info = _parts(one), one.cache_info()
    if info.maxsize is None:  # its dict is put back as all others are
        return functools.partial(_set_counts, one, function, info), gc.get_referents(one)
    results = list(zip(links[::_OF_A_LINK], links[1::_OF_A_LINK], strict=True))
    undo = functools.partial(_restore, one, table, dict(table), info, results, function)
    return undo, [*links, function, vars(one)]


def results_of(one: Any) -> list[Any]:
    """What a function's cache holds, but numbers, words and the like, which are computed again alike."""
    links, table, _function = _parts(one)
    results = table.values() if one.cache_info().maxsize is None else links[1::_OF_A_LINK]
    return [result for result in results if type(result) not in PLAIN]


def _parts(one: Any) -> tuple[list[Any], dict[Any, Any], Any]:
    """A cache's links, its dict and its function."""
    referents, at = gc.get_referents(one), 1  # after its type
    while getattr(referents[at + 2], "__name__", "") == "_lru_list_elem":
        at += _OF_A_LINK
    return referents[1:at], referents[at], referents[at + 1]


def _restore(
    one: Any, table: dict[Any, Any], before: dict[Any, Any], info: Any, results: list[tuple[Any, Any]], function: Any
) -> None:
    is_same = len(table) == len(before) and all(table.get(key) is link for key, link in before.items())
    if not is_same or one.cache_info().misses != info.misses:
        one.cache_clear()
        for key, result in results:
            with _returning(one, function, result):
                arguments, keywords = _arguments(key, one)
                one(*arguments, **keywords)
    _set_counts(one, function, info)


def _set_counts(one: Any, function: Any, before: Any) -> None:
    """The counts lie before the function, and behind it and the limit (``lru_cache_object``)."""
    at, now = _place_of(one, function), one.cache_info()
    hits, misses = (ctypes.c_ssize_t.from_address(at + words * _WORD) for words in (-1, 2))
    if (hits.value, misses.value) == (now.hits, now.misses):
        hits.value, misses.value = before.hits, before.misses


def _place_of(one: Any, function: Any) -> int:
    """The address at which a cache refers to its function."""
    words = range(id(one) + object.__basicsize__, id(one) + type(one).__basicsize__, _WORD)
    return next(word for word in words if ctypes.c_void_p.from_address(word).value == id(function))


@contextmanager
def _returning(one: Any, function: Any, result: Any) -> Iterator[None]:
    """The cached function returns ``result`` where it would be called."""
    place = ctypes.c_void_p.from_address(_place_of(one, function))

    def returned(*_arguments: Any, **_keywords: Any) -> Any:
        return result

    place.value = id(returned)
    try:
        yield
    finally:
        place.value = id(function)


def _arguments(key: Any, one: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of the call that a key stands for (``lru_cache_make_key``): one plain argument, or all, a mark and those with
    names, and where types count the types of all."""
    if type(key) is not tuple:
        return (key,), {}
    at = next((at for at, each in enumerate(key) if type(each) is object), None)
    is_typed = one.cache_parameters()["typed"]
    if at is None:
        return key[: len(key) // 2] if is_typed else key, {}
    named = key[at + 1 :]
    named = named[: (len(named) - at) // 3 * 2] if is_typed else named
    return key[:at], dict(zip(named[::2], named[1::2], strict=True))
