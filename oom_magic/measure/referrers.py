"""What kinds of objects refer to some objects that no name leads to."""

from __future__ import annotations

import gc
import types
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from oom_magic.measure.reach import module_of, namespaces_of_modules


def referrers(objects: Sequence[Any]) -> dict[int, set[str]]:
    """For each object, by identity, words for what refers to it; one pass over all objects of the process."""
    modules = namespaces_of_modules()
    found = _looked_up({id(one) for one in objects}, skipped=objects)
    dicts = {id(one): one for holders in found.values() for one in holders if type(one) is dict}
    owners = _looked_up(set(dicts) - set(modules), skipped=list(dicts.values())) if dicts else {}
    words: dict[int, set[str]] = {}
    for identity, holders in found.items():
        words[identity] = set()
        for holder in holders:
            if id(holder) in modules:
                words[identity].add(f"module {modules[id(holder)]}")
            else:
                words[identity] |= {_word(owner) for owner in owners.get(id(holder), ())} or {_word(holder)}
    return words


def _looked_up(sought: set[int], skipped: Any) -> dict[int, list[Any]]:
    """What refers to the objects of these identities, but for what this package does itself."""
    found: dict[int, list[Any]] = defaultdict(list)
    for one in gc.get_objects():
        if one is skipped or (type(one) is types.FrameType and _is_ours(one)):
            continue
        for identity in sought.intersection(map(id, gc.get_referents(one))):
            found[identity].append(one)
    return found


def _is_ours(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("oom_magic.")


def _word(holder: Any) -> str:
    kind = type(holder)
    if kind is types.FrameType:
        return f"{holder.f_code.co_name}()"
    if kind is types.CellType:
        return "closure"
    module = module_of(kind)
    return kind.__name__ if module in ("builtins", "__main__", "") else f"{module}.{kind.__name__}"
