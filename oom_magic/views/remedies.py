"""The view of remedies: the best in one sentence, all in a chart and a table, the code of each to paste."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.sentences.catalogue import SENTENCES, render_evidence, translate
from oom_magic.language import Language
from oom_magic.memory.categories import DANGER_SHARE, TIGHT_SHARE
from oom_magic.views.blocks import Bar, Bars, Block, Cell, Code, Details, Part, Sentence, Table
from oom_magic.views.words import code_in, current_shell

if TYPE_CHECKING:
    from oom_magic.explain.remedies.remedy import AsItIs, Remedy

_COLUMNS = ("remedy", "needed", "saving", "verdict", "speed", "batch")
_HUES = {"safe": "parameter", "tight": "optimizer_state", "danger": "activation", None: "before"}
_MOST_BARS = 6
# Notes of remedies that are named without a price, each with the ways to one.
_WAYS = {
    "reason_no_run": ("price_by_settings",),
    "reason_no_code": ("price_by_code",),
    "reason_no_code_or_run": ("price_by_code", "price_by_settings_too"),
    "reason_other_program": (),
    "reason_host": (),
    "reason_not_pytorch": (),
}
_BY_COMMAND = ("price_by_settings", "price_by_settings_too")
_NOT_ASKED = "reason_fast"
_STOPS = ".。"


@dataclass(frozen=True)
class Unpriced:
    """How remedies are shown where none is evaluated: what is known of the ``run``, the ``first`` thing to do, which
    stands on top already, and the ``heading`` over the others."""

    run: Mapping[str, int | str]
    first: str
    heading: str


def best_remedy(remedies: Sequence[Remedy], as_is: AsItIs | None, lang: Language) -> str:
    """The first remedy that fits as a sentence, else what saves most of those evaluated; empty where none is."""
    wording = Wording(remedies, lang, as_is)
    best = remedies[0] if remedies else None
    if best is not None and best.fits:
        if not best.saving_bytes or best.needed_bytes is None:
            return translate("best_makes_room", lang, text=wording.of(best))
        sizes = {"needed_bytes": best.needed_bytes, "saving_bytes": best.saving_bytes}
        verdict = translate("is_in_danger" if best.verdict == "danger" else f"verdict_{best.verdict or 'fits'}", lang)
        return wording.price("best_rehearsed", text=wording.of(best), verdict=verdict, **sizes)
    if best is not None and best.is_lower_bound and best.fits is None:
        sizes = {"needed_bytes": best.needed_bytes or 0, "saving_bytes": best.saving_bytes or 0}
        if not best.saving_bytes:
            return translate("best_room_at_least", lang, text=wording.of(best), **sizes)
        return wording.price("best_rehearsed", text=wording.of(best), **sizes)
    rehearsed = [one for one in remedies if one.fits is not None and not one.is_bought]
    saving = max(rehearsed, key=lambda one: one.saving_bytes or 0, default=None)
    if saving is None or (saving.saving_bytes or 0) <= 0:
        return ""
    key = "best_so_far" if any(one.waits for one in remedies) else "best_does_not_fit"
    return wording.price(key, text=wording.of(saving).rstrip(_STOPS), saving_bytes=saving.saving_bytes)


def remedies_chart(remedies: Sequence[Remedy], as_is: AsItIs | None, lang: Language) -> list[Block]:
    """The memory needed by the run as it is and with the best remedies, against the card's."""
    evaluated = [one for one in remedies if one.needed_bytes is not None and not one.is_bought]
    if as_is is None or not (evaluated or any(one.waits for one in remedies)):
        return []
    wording = Wording(remedies, lang, as_is)

    def bar(label: str, needed: int, verdict: str | None, word: str) -> Bar:
        return Bar(label, (Part(label, needed, _HUES[verdict]),), word)

    words = [(one, _verdict_word(one, wording)) for one in evaluated[:_MOST_BARS]]
    now = _as_it_is_word(as_is, wording)
    bars = (
        bar(translate("row_as_it_is", lang), as_is.needed_bytes, None, now),
        *(bar(wording.of(one).rstrip(_STOPS), one.needed_bytes or 0, one.verdict, word) for one, word in words),
    )
    usable = max(as_is.usable_bytes, 1)
    marks = ((share * as_is.total_bytes - as_is.outside_bytes) / usable for share in (TIGHT_SHARE, DANGER_SHARE, 1.0))
    title = wording.price("chart_title", usable_bytes=as_is.usable_bytes)
    lines = translate("chart_lines", lang)
    notes = [translate("priced_as_eager", lang)] if as_is.is_upper_bound else []
    rooms = [min(one.workspace_bytes, as_is.usable_bytes - (one.needed_bytes or 0)) for one, _ in words]
    if max(rooms, default=0) > 0:
        notes.append(translate("without_workspaces", lang, workspace_bytes=max(rooms)))
    warnings = [Sentence(one, "warning") for one in notes]
    return [*warnings, Bars(bars, title, as_is.usable_bytes, tuple(max(mark, 0.0) for mark in marks), lines)]


def _as_it_is_word(as_is: AsItIs, wording: Wording) -> str:
    if as_is.needed_bytes > as_is.usable_bytes:
        return wording.price("verdict_no")
    return translate("fits_open" if as_is.is_lower_bound else "verdict_fits", wording.lang)


def _verdict_word(remedy: Remedy, wording: Wording) -> str:
    if remedy.fits is None:
        return translate("fits_open", wording.lang)
    if not remedy.fits:
        return wording.price("verdict_no")
    return translate(f"verdict_{remedy.verdict or 'fits'}", wording.lang)


def remedies_details(
    remedies: Sequence[Remedy], lang: Language, as_is: AsItIs | None, unpriced: Unpriced
) -> list[Block]:
    """Tables of the evaluated and the unevaluated remedies, with reasons and code to paste; empty without remedies."""
    wording = Wording(remedies, lang, as_is)
    evaluated = [one for one in remedies if one.needed_bytes is not None]
    if not evaluated:
        changes, ways = [*_named(remedies, wording, unpriced)], [*_ways_to_prices(remedies, wording, unpriced)]
        heading = unpriced.heading if changes else translate("heading_savings", lang)
        return [Details(heading, (*changes, *ways))] if changes or ways else []
    columns = tuple(
        wording.price(f"column_{name}") if name == "needed" else translate(f"column_{name}", lang) for name in _COLUMNS
    )
    now: tuple[tuple[Cell, ...], ...] = ()
    if as_is is not None:
        now = ((translate("row_as_it_is", lang), as_is.needed_bytes, "", _as_it_is_word(as_is, wording), "", ""),)
    rows = Table(columns, (*now, *(_row(one, wording) for one in evaluated)))
    others = [one for one in remedies if one.needed_bytes is None]
    named = (Sentence(f"• {wording.of(one)}{_note(one, lang)}", "quiet") for one in others)
    codes = (_how(one, wording) for one in remedies if one.code and _is_worthwhile(one))
    return [Details(translate("heading_remedies", lang), (rows, *named, *codes))]


def _named(remedies: Sequence[Remedy], wording: Wording, unpriced: Unpriced) -> Iterator[Block]:
    """Remedies without a price, each with its code below it, but for the one on the first screen."""
    lang = wording.lang
    notes = [_note(one, lang) for one in remedies]
    is_shared = len(notes) > 1 and len(set(notes)) == 1
    for one, note in zip(remedies, notes, strict=True):
        said = f"{wording.of(one)}{'' if is_shared else note}"
        if said == unpriced.first:
            continue
        yield Sentence(f"• {said}")
        if one.code and _is_worthwhile(one):
            yield Code(code_in(lang, one.code), one.language)
    if is_shared and notes[0]:
        yield Sentence(notes[0].strip(" ()（）"), "quiet")


def _ways_to_prices(remedies: Sequence[Remedy], wording: Wording, unpriced: Unpriced) -> Iterator[Block]:
    lang = wording.lang
    ways = dict.fromkeys(way for one in remedies if one.note is not None for way in _WAYS.get(one.note.key, ()))
    yield from (Sentence(translate(way, lang), "quiet") for way in ways)
    if any(way in _BY_COMMAND for way in ways):
        yield Code(_command(unpriced.run), "bash")


def _command(run: Mapping[str, int | str]) -> str:
    """The command that prices the remedies of a run; what the text does not name is left to be filled in."""
    start = "%%oom_explain" if current_shell() is not None else "python -m oom_magic explain FILE"
    filled = {"model": "MODEL", "batch": "N", "seq": "N", **run}
    return " ".join((start, *(f"--{name} {value}" for name, value in filled.items())))


def _is_worthwhile(remedy: Remedy) -> bool:
    """Whether its code is worth showing: it fits, saves memory, no run could price it, or it mends the loop."""
    is_mended = "line" in remedy.values
    return bool(remedy.fits) or (remedy.saving_bytes or 0) > 0 or _is_only_named(remedy) or is_mended


def _is_only_named(remedy: Remedy) -> bool:
    return remedy.note is not None and remedy.note.key in (_NOT_ASKED, *_WAYS)


def _how(remedy: Remedy, wording: Wording) -> Details:
    """How to make the change, and what it does to the speed."""
    blocks: list[Block] = [Code(code_in(wording.lang, remedy.code), remedy.language)]
    if remedy.needed_bytes is not None:
        text = translate(f"speed_{remedy.speed}", wording.lang)
        blocks.insert(0, Sentence(translate("speed_heading", wording.lang, text=text), "quiet"))
    return Details(translate("heading_code", wording.lang, text=wording.of(remedy).rstrip(_STOPS)), tuple(blocks))


class Wording:
    """Remedies as sentences; parts of a combination take their values from the remedies that stand alone.

    ``as_is`` tells whether their prices are upper bounds; where one is a lower bound, so are all.
    """

    def __init__(self, remedies: Sequence[Remedy], lang: Language, as_is: AsItIs | None = None) -> None:
        self.lang = lang
        is_part = any(one.is_lower_bound for one in remedies) or (as_is is not None and as_is.is_lower_bound)
        is_upper_bound = as_is is not None and as_is.is_upper_bound
        self._bound = "_at_least" if is_part else "_at_most" if is_upper_bound else ""
        self._values: Mapping[str, Mapping[str, Any]] = {one.key: one.values for one in reversed(remedies)}

    def of(self, remedy: Remedy) -> str:
        """What a remedy changes."""
        text = self._alone(remedy)
        for value, key in (("evaluation_after", "remedy_and_evaluation"), ("compared", "remedy_of_compared")):
            if value in remedy.values:
                text = translate(key, self.lang, text=text.rstrip(_STOPS), **remedy.values)
        return text

    def price(self, key: str, **values: Any) -> str:
        """A sentence about prices, marked where these are bounds and the sentence would be another."""
        bound = f"{key}{self._bound}"
        return translate(bound if bound in SENTENCES else key, self.lang, **values)

    def _alone(self, remedy: Remedy) -> str:
        keys = remedy.values.get("keys")
        if keys is None:
            return render_evidence(Evidence(f"remedy_{remedy.key}", remedy.values), self.lang)
        parts = (
            translate(f"remedy_{key}", self.lang, **{**self._values.get(key, {}), **remedy.values}) for key in keys
        )
        return translate(f"remedy_{remedy.key}", self.lang, parts=" + ".join(part.rstrip(_STOPS) for part in parts))


def _row(remedy: Remedy, wording: Wording) -> tuple[Cell, ...]:
    return (
        wording.of(remedy) + _note(remedy, wording.lang),
        remedy.needed_bytes or "",
        remedy.saving_bytes or "",
        _verdict_word(remedy, wording),
        translate(f"pace_{remedy.speed}", wording.lang),
        _batch(remedy.global_batch_before, remedy.global_batch_after),
    )


def _batch(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return ""
    return str(after) if before == after else f"{before} → {after}"


def _note(remedy: Remedy, lang: Language) -> str:
    """Why a remedy has no price, or one that was not rehearsed, in brackets; in English after a space."""
    if remedy.note is None or (_is_only_named(remedy) and remedy.note.key != _NOT_ASKED):
        return ""
    reason = render_evidence(remedy.note, lang)
    text = translate("remedy_not_priced", lang, reason=reason) if remedy.needed_bytes is None else reason
    return f"（{text.rstrip(_STOPS)}）" if lang == "zh" else f" ({text.rstrip(_STOPS)})"
