"""Objects of libraries with values of their own, such as tables, images and tokenizers, and how each is put back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from json import dumps, loads  # the run may have put others into the module
from typing import Any

import numpy as np

from oom_magic.predict.isolation.snapshot import fill

COPIED_BYTES = 1 << 24  # of one object
_OF_TOKENIZERS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


@dataclass(frozen=True, slots=True)
class Restoration:
    """How an object is restored: ``undo``, the copied bytes, inner objects, and what to do when the run begins.

    ``differs`` tells whether there is something to undo, where that matters to a later run.
    """

    undo: Callable[[], object]
    num_bytes: int = 0
    inner: list[Any] = field(default_factory=list)
    begin: Callable[[], object] | None = None
    differs: Callable[[], bool] | None = None


def nothing() -> None:
    """Nothing to restore."""


def library_restoration_of(one: Any, room: int) -> Restoration | None:
    """Of objects of libraries that are loaded."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(one, pandas.api.extensions.ExtensionArray):
        return Restoration(functools.partial(_restore_values, one, one.copy()))
    if pandas is not None and isinstance(one, (pandas.DataFrame, pandas.Series)):
        return _of_table(one, room)
    polars = sys.modules.get("polars")
    if polars is not None and isinstance(one, (polars.DataFrame, polars.Series)):
        name = "_df" if isinstance(one, polars.DataFrame) else "_s"  # Rust's object; its columns are copied on write
        return Restoration(functools.partial(setattr, one, name, getattr(one.clone(), name)))
    tokenizers = sys.modules.get("tokenizers")
    if tokenizers is not None and isinstance(one, tokenizers.Tokenizer):
        return _of_tokenizer(one)
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(one, pillow.Image):
        return _of_image(one, room)
    widgets = sys.modules.get("ipywidgets")
    if widgets is not None and isinstance(one, widgets.Widget):
        return _of_widget(one)
    return None


def _restore_values(one: Any, before: Any) -> None:
    if not one.equals(before):
        one[:] = before


def _of_table(one: Any, room: int) -> Restoration:
    """pandas': what it holds is in a manager of blocks, which is exchanged (``NDFrame._mgr``); a cell can be a list."""
    size = int(np.sum(one.memory_usage()))
    is_copied = size <= min(COPIED_BYTES, room)  # of others the columns: those that are set or dropped
    undo = functools.partial(_restore_table, one, one._mgr, one.copy(deep=is_copied))
    are_objects = [kind.kind == "O" and isinstance(kind, np.dtype) for kind in np.atleast_1d(one.dtypes)]
    columns = [one.iloc[:, at] if one.ndim > 1 else one for at in np.flatnonzero(are_objects)] if is_copied else []
    cells = [column.to_numpy() for column in columns]
    differs = functools.partial(_table_differs, one, one._mgr, undo.args[2])
    return Restoration(undo, size if is_copied else 0, [vars(one), *cells], differs=differs)


def _table_differs(one: Any, manager: Any, before: Any) -> bool:
    return one._mgr is not manager or not one.equals(before)


def _restore_table(one: Any, manager: Any, before: Any) -> None:
    if _table_differs(one, manager, before):
        object.__setattr__(one, "_mgr", before._mgr)
        getattr(one, "_item_cache", {}).clear()


def _of_image(one: Any, room: int) -> Restoration:
    """Pillow's: the pixels are C's, which things that draw hold, too. One that was not read from its file has none."""
    pixels, attributes = vars(one).get("_im", vars(one).get("im")), [vars(one)]
    size = 4 * one.width * one.height
    if not hasattr(pixels, "paste") or size > min(COPIED_BYTES, room):
        return Restoration(nothing, inner=attributes)
    undo = functools.partial(pixels.paste, pixels.copy(), (0, 0, *pixels.size))
    return Restoration(undo, size, attributes)


def _of_widget(one: Any) -> Restoration:
    """What has changed is sent again to the notebook, which shows it."""
    before, own = dict(one._trait_values), dict(vars(one))
    inner = [value for name, value in own.items() if name != "_trait_values"]
    return Restoration(functools.partial(_restore_widget, one, before, own), inner=[*inner, *before.values()])


def _restore_widget(one: Any, before: dict[str, Any], own: dict[str, Any]) -> None:
    now = one._trait_values
    changed = {name for name in before.keys() & now.keys() if now[name] is not before[name]}
    fill(now, before)
    fill(vars(one), own)
    one.send_state(changed.intersection(one.keys))


def _of_tokenizer(one: Any) -> Restoration:
    """Hugging Face's, which Rust holds. All but the tokens that were added can be set."""
    parts = [(name, getattr(one, name)) for name in _OF_TOKENIZERS]
    before = parts, one.padding, one.truncation, one.get_added_tokens_decoder().keys()
    return Restoration(functools.partial(_restore_tokenizer, one, *before))


def _restore_tokenizer(
    one: Any, parts: list[tuple[str, Any]], padding: Any, truncation: Any, added: Collection[int]
) -> None:
    for name, part in parts:
        if part is not None or getattr(one, name) is not None:
            setattr(one, name, part)
    if one.padding != padding:
        one.no_padding() if padding is None else one.enable_padding(**padding)
    if one.truncation != truncation:
        one.no_truncation() if truncation is None else one.enable_truncation(**truncation)
    if one.get_added_tokens_decoder().keys() != added:
        state = loads(one.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] in added]
        one.__setstate__(dumps(state).encode())
