"""How remedies are shown: the best in one sentence, all in a table, the code of each to paste."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oom_magic.explain.language import Language, render_evidence, translate
from oom_magic.views.blocks import Block, Cell, Code, Details, Sentence, Table

if TYPE_CHECKING:
    from oom_magic.explain.remedies.remedy import Remedy

_FITS = {True: "fits_yes", False: "fits_no", None: "fits_open"}
_COLUMNS = ("remedy", "peak", "saving", "fits", "speed", "batch")
_NO_RUN = "reason_no_run"  # the note of remedies that are only named
_STOPS = ".。"


def best_remedy(remedies: Sequence[Remedy], lang: Language) -> str:
    """The first remedy that fits as a sentence, else what saves most; empty where nothing is priced."""
    wording = _Wording(remedies, lang)
    best = next((one for one in remedies if one.fits), None)
    if best is not None:
        if not best.saving_bytes or best.peak_allocated_bytes is None:
            return translate("best_makes_room", lang, text=wording.of(best))
        sizes = {"peak_allocated_bytes": best.peak_allocated_bytes, "saving_bytes": best.saving_bytes}
        return translate("best_fits", lang, text=wording.of(best), **sizes)
    rehearsed = [one for one in remedies if one.fits is not None]
    saving = max(rehearsed, key=lambda one: one.saving_bytes or 0, default=None)
    if saving is None or (saving.saving_bytes or 0) <= 0:
        return ""
    return translate("best_does_not_fit", lang, text=wording.of(saving), saving_bytes=saving.saving_bytes)


def remedies_details(remedies: Sequence[Remedy], lang: Language) -> list[Block]:
    """The table of what is priced, what is not and why, and code to paste; nothing where there is nothing."""
    if not remedies:
        return []
    wording = _Wording(remedies, lang)
    priced = [one for one in remedies if one.needed_bytes is not None]
    blocks: list[Block] = []
    if priced:
        columns = tuple(translate(f"column_{name}", lang) for name in _COLUMNS)
        blocks.append(Table(columns, tuple(_row(one, wording) for one in priced)))
    unpriced = [one for one in remedies if one.needed_bytes is None]
    notes = [_note(one, lang) for one in unpriced]
    is_shared = len(notes) > 1 and len(set(notes)) == 1
    for one, note in zip(unpriced, notes, strict=True):
        blocks.append(Sentence(f"• {wording.of(one)}{'' if is_shared else note}", "quiet" if priced else "plain"))
    if is_shared and notes[0]:
        blocks.append(Sentence(notes[0].strip(" ()"), "quiet"))
    if any(_is_only_named(one) for one in remedies):
        blocks.append(Sentence(translate("how_to_price", lang), "quiet"))
    blocks += [_how(one, wording) for one in remedies if one.code and _is_worthwhile(one)]
    return [Details(translate("heading_remedies", lang), tuple(blocks))]


def _is_worthwhile(remedy: Remedy) -> bool:
    """Whether its code is worth showing: it fits, saves, or is named for want of a run to price it with."""
    return bool(remedy.fits) or (remedy.saving_bytes or 0) > 0 or _is_only_named(remedy)


def _is_only_named(remedy: Remedy) -> bool:
    return remedy.note is not None and remedy.note.key == _NO_RUN


def _how(remedy: Remedy, wording: _Wording) -> Details:
    """How to make the change, and what it does to the speed."""
    blocks: list[Block] = [Code(remedy.code, remedy.language)]
    if remedy.needed_bytes is not None:
        text = translate(f"speed_{remedy.speed}", wording.lang)
        blocks.insert(0, Sentence(translate("speed_heading", wording.lang, text=text), "quiet"))
    return Details(translate("heading_code", wording.lang, text=wording.of(remedy).rstrip(_STOPS)), tuple(blocks))


class _Wording:
    """Remedies as sentences; parts of a combination take their values from the remedies that stand alone."""

    def __init__(self, remedies: Sequence[Remedy], lang: Language) -> None:
        self.lang = lang
        self._values: Mapping[str, Mapping[str, Any]] = {one.key: one.values for one in reversed(remedies)}

    def of(self, remedy: Remedy) -> str:
        """What a remedy changes."""
        keys = remedy.values.get("keys")
        if keys is None:
            return translate(f"remedy_{remedy.key}", self.lang, **remedy.values)
        parts = (
            translate(f"remedy_{key}", self.lang, **{**self._values.get(key, {}), **remedy.values}) for key in keys
        )
        return translate(f"remedy_{remedy.key}", self.lang, parts=" + ".join(part.rstrip(_STOPS) for part in parts))


def _row(remedy: Remedy, wording: _Wording) -> tuple[Cell, ...]:
    peak, saving = remedy.peak_allocated_bytes, remedy.saving_bytes
    return (
        wording.of(remedy) + _note(remedy, wording.lang),
        "" if peak is None else peak,
        saving or "",
        translate(_FITS[remedy.fits], wording.lang),
        translate(f"pace_{remedy.speed}", wording.lang),
        _batch(remedy.global_batch_before, remedy.global_batch_after),
    )


def _batch(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return ""
    return str(after) if before == after else f"{before} → {after}"


def _note(remedy: Remedy, lang: Language) -> str:
    """Why a remedy has no price, or one that is not rehearsed; with a blank before it."""
    if remedy.note is None or _is_only_named(remedy):
        return ""
    reason = render_evidence(remedy.note, lang)
    text = translate("remedy_not_priced", lang, reason=reason) if remedy.needed_bytes is None else reason
    return f" ({text.rstrip(_STOPS)})"
