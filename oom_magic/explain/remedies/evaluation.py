"""Evaluating remedies: the user's run is rehearsed with each, the most promising first, while time remains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.remedies.code import is_placed
from oom_magic.explain.remedies.combining import likely_combinations
from oom_magic.explain.remedies.rehearsal import PATIENCE_SECONDS, NotEvaluatedError, Patience, Rehearsal, Variation
from oom_magic.explain.remedies.remedy import Remedy, Situation, identity_of
from oom_magic.explain.remedies.remedy_code import RemedyCode
from oom_magic.explain.remedies.room import (
    DROPPED,
    between_steps_bytes,
    cheapest_with_segments,
    dropping,
    growing_segments,
    making_room,
    needed_bytes,
    other_hardware,
)
from oom_magic.explain.remedies.sizes.fitting import largest_fitting
from oom_magic.explain.remedies.sizes.kinds import SIZES, Shrinking, divisors, shrinking
from oom_magic.explain.remedies.specs import STEP, RemedySpec, mends_growth, remedy_specs
from oom_magic.memory.allocator.segments import GRANULE_BYTES

if TYPE_CHECKING:
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.what_if.change import Change

_LEAST_SAVING = 0.01  # of what the run needs: a remedy that saves less is not worth a line
# Remedies up to this cost leave model, data and training as they are; if one fits, nothing is combined.
_HARMLESS = 50
_MOST_COMBINATIONS = 4
_OF_EVALUATION = ("no_grad", "eval_accumulation", "kept_classes", "smaller_evaluation")  # which change no result
_SEGMENTS = "expandable_segments"
_COMPILED_ANEW = ("compile", "compile_blocks")
_COMBINATION = RemedySpec("combination", 0, "combination", (), None, combines=False)


class RemedyEvaluator:
    """The remedies of one run, evaluated. ``needed_bytes`` is the least memory for PyTorch with which it ends as it is,
    ``baseline`` the report of that run, as far as it was followed.

    ``first`` are the keys of remedies to rehearse first. Raises NotEvaluatedError if the run cannot be rehearsed.
    """

    def __init__(self, rehearsal: Rehearsal, situation: Situation, first: Sequence[str] = ()) -> None:
        self._rehearsal = rehearsal
        self._situation = situation
        self._first = tuple(first)
        self._patience = Patience()
        self._writer = RemedyCode(rehearsal, situation.style, situation.backend)
        self._tried: set[frozenset[str]] = set()  # combinations
        self._released: Remedy | None = None  # what earlier cells hold needlessly: other changes come after it
        self._after = Variation()  # with it
        self._variations: dict[Any, Variation] = {}  # of evaluated remedies
        self._in_pieces: list[tuple[Remedy, MemoryReport]] = []  # that fit but for the allocator's segments
        self._need = partial(needed_bytes, exact_up_to_bytes=situation.usable_bytes)
        self._candidates = remedy_specs(situation)
        made = [change for one in self._candidates if one.variation for change in one.variation.changes]
        self._begin(made)
        if self._has_failed_narrowly:
            self.needed_bytes = situation.usable_bytes + GRANULE_BYTES  # at least
        self._is_evaluation = situation.phase == "evaluation" or rehearsal.is_evaluation

    def _begin(self, made: Sequence[Change]) -> None:
        """Rehearse the run as it is; where its steps fit and an evaluation may follow, that too. As long as that is not
        known, steps that take the same are not followed further."""
        rehearsal, enough = self._rehearsal, self._situation.usable_bytes
        may_follow = rehearsal.may_evaluate and not self._situation.is_leaking
        for is_brief in (True, False) if may_follow else (False,):
            begin = partial(rehearsal.begin, made, enough, is_brief)
            for run in (begin, partial(rehearsal.begin_on, made)) if may_follow else (begin,):
                self.baseline = self._patience.timed(run)
                self.needed_bytes = needed_bytes(self.baseline)
                if not (self.fits and self.steps_left_after):
                    return

    @property
    def _has_failed_narrowly(self) -> bool:
        """Whether what was rehearsed is the run that failed, and would just fit: how the cache happens to be divided
        decides what a run needs, up to what it reserves where there is room, and this one needed more than there is."""
        situation, reserved = self._situation, self.baseline.peak_reserved_bytes
        is_told = situation.is_leaking or situation.is_filled_by_held(self.needed_bytes) or situation.raised is not None
        return self.fits and self._rehearsal.has_failed and not is_told and reserved > situation.safe_bytes

    @property
    def steps_left_after(self) -> int:
        """The number of optimizer steps after which the rehearsal ended the run early; 0: it ran to its end."""
        timeline = self.baseline.timeline
        return timeline.num_steps() if timeline.was_left else 0

    @property
    def is_in_pieces(self) -> bool:
        """Whether the unchanged run fits with expandable segments: its memory is fragmented."""
        is_possible = self.baseline.peak_allocated_bytes <= self._situation.usable_bytes
        return is_possible and any(remedy.fits for remedy in self._segments)

    @cached_property
    def _segments(self) -> list[Remedy]:
        return list(growing_segments(self.baseline, self.needed_bytes, self._situation))

    @property
    def keys(self) -> frozenset[str]:
        """The remedies that a rehearsal can evaluate; others change nothing in this run."""
        sizes = {self._shrinking(what).key for what in SIZES if what in self._rehearsal.sizes}
        return frozenset({one.key for one in self._candidates} | sizes)

    @property
    def fits(self) -> bool:
        """Whether the run is known to fit as it is."""
        return self.needed_bytes <= self._situation.usable_bytes and not self.baseline.is_lower_bound

    def remedies(self) -> Iterator[Remedy]:
        """Remedies in the order of their evaluation: harmless ones, combinations of them if none fits, then others."""
        yield from making_room(self.baseline, self.needed_bytes, self._situation)
        if self.fits and self._situation.is_leaking:
            yield from self._growth_stopped()
        if not self.fits:
            yield from self._changes()

    def bought(self) -> Iterator[Remedy]:
        """Other hardware for the run as it is, which no rehearsal has to price."""
        is_leak = self._situation.is_leaking and bool(self.steps_left_after)  # it fills a larger card, too
        if not (self.fits or is_leak or self._rehearsal.calls_followed):
            is_alone = not self._rehearsal.is_of_job and len(self.baseline.cards) == 1
            for one in other_hardware(self.baseline, self.needed_bytes, self._situation, is_alone):
                yield self._with_code(one, one.key, one.values)

    def to_its_end(self, remedy: Remedy) -> tuple[Remedy, int]:
        """The remedy evaluated with what follows the steps that were followed, and the bytes that this needs.

        Where an evaluation would not fit, its batches are made smaller, too. The remedy itself, and 0, where what
        follows takes no more.
        """
        variation, rehearsal = self._variations.get(identity_of(remedy)), self._rehearsal
        is_evaluated = self.steps_left_after and not self._situation.is_leaking and rehearsal.may_evaluate
        differ = rehearsal.steps_differ or rehearsal.samples_compared  # blocks of many sizes: more pieces in the cache
        if variation is None or not (is_evaluated or differ or rehearsal.calls_followed) or self._patience.is_over:
            return remedy, 0
        try:
            report = self._patience.timed(lambda: rehearsal.run_on(variation.with_(self._after)))
        except NotEvaluatedError:
            return remedy, 0
        now = self._need(report, variation.batches)
        if now <= (remedy.needed_bytes or 0):
            return remedy, 0
        whole = self._with_saving(remedy, report, now)
        if not whole.fits and self._rehearsal.sizes.get("evaluation", 1) > 1:
            with suppress(NotEvaluatedError):
                return self._with_smaller_evaluation(remedy, variation, now) or whole, now
        return whole, now

    def _with_smaller_evaluation(self, remedy: Remedy, variation: Variation, needed: int) -> Remedy | None:
        """A remedy that leaves too little for the evaluation after the training, which takes ``needed`` bytes, with the
        largest evaluation batches that fit; None if none do. Raises NotEvaluatedError."""
        before, steps = self._rehearsal.sizes["evaluation"], remedy.needed_bytes or 0
        reports: dict[int, MemoryReport] = {}

        @cache
        def need(size: int) -> int:
            smaller = variation.with_(Variation(sizes={"evaluation": size}))
            reports[size] = self._patience.timed(lambda: self._rehearsal.run_on(smaller.with_(self._after)))
            return self._need(reports[size], smaller.batches)

        limits = (self._situation.safe_bytes, self._situation.usable_bytes)
        sizes = divisors(before, before)
        fitting = (largest_fitting(need, sizes, (before, needed), steps, limit) for limit in limits if steps <= limit)
        after = next(filter(None, fitting), None)
        if after is None:
            return None
        name = self._rehearsal.label("evaluation")
        both = {"evaluation_before": before, "evaluation_after": after, "evaluation_name": name}
        whole = replace(remedy, values={**remedy.values, **both})
        if remedy.key == "smaller_batch" and self._situation.style != "trainer":  # one statement may set both
            whole = self._with_code(whole, whole.key, whole.values)
        else:
            alone = self._with_code(remedy, "later_evaluation", {"name": name, "after": after})
            whole = replace(whole, code=self._writer.joined([remedy.code, alone.code]))
        return self._with_saving(whole, reports[after], need(after))

    def _growth_stopped(self) -> Iterator[Remedy]:
        """The remedy for the growing line, where the loop is too long to be followed until the card is full."""
        growth = self._situation.growth
        for candidate in self._candidates:
            if growth is None or candidate.variation is None or candidate.variation.mended is None:
                continue
            for remedy in self._evaluated(candidate, is_wanted=True):
                values = {"grown_bytes": growth.num_bytes}
                note = remedy.note or Evidence("reason_loop_is_long", values)
                yield replace(remedy, saving_bytes=growth.num_bytes, note=note)

    def _changes(self) -> Iterator[Remedy]:
        found: list[tuple[RemedySpec, Remedy]] = []
        for candidate, remedy in self._dropped():
            found.append((candidate, remedy))
            yield remedy
            if remedy.fits and candidate.variation is not None:
                self._released, self._after = remedy, candidate.variation
        has_leak = self._situation.is_leaking  # a leak also fills expandable segments
        is_first = _SEGMENTS in self._first
        if is_first and not has_leak:
            yield from self._segments
        for group in self._groups():
            for candidate in group:
                safe = {spec.key for spec, one in found if one.verdict == "safe"}
                if candidate.key in safe or (safe and (candidate.is_last or self._is_too_little(candidate))):
                    continue
                graphs = [one for one in found if one[0].key == "no_grad" and one[1].saving_bytes]
                evaluate = self._left_out if safe and candidate.key in _COMPILED_ANEW else self._evaluated
                if candidate.key == "smaller_evaluation" and graphs and not safe:
                    evaluate = partial(self._smaller_without_graph, graph=graphs[0])
                for remedy in evaluate(candidate):
                    found.append((candidate, remedy))
                    yield self._after_release(remedy)
                is_mended = found and mends_growth(candidate) and not self._situation.has_one_step
                if is_mended and (found[-1][1].verdict == "safe" or found[-1][1].fits is None):
                    return  # all others only delay the moment when a leak fills the card
            if not any(remedy.verdict == "safe" for _, remedy in found):
                for remedy in self._combined(found):
                    found.append((_COMBINATION, remedy))
                    yield remedy
        if not is_first and not has_leak:
            for remedy in self._segments:
                yield from self._if_useful(remedy)
        if not has_leak and not any(remedy.fits for _, remedy in found):
            yield from cheapest_with_segments(self._in_pieces, self.needed_bytes, self._situation)

    def _after_release(self, remedy: Remedy) -> Remedy:
        """The remedy as it is shown where something is to be released first, and it was priced so."""
        if self._released is None or remedy.needed_bytes is None or remedy.note is not None:
            return remedy
        note = Evidence("reason_after_release", {"names": self._released.values["names"]})
        is_code = remedy.code and remedy.language == self._released.language
        gap = "\n\n" if is_placed(remedy.code) else "\n"
        code = f"{self._released.code}{gap}{remedy.code}" if is_code else remedy.code
        return replace(remedy, note=note, code=code)

    def _dropped(self) -> Iterator[tuple[RemedySpec, Remedy]]:
        """The run without memory that earlier cells hold needlessly."""
        try:
            found = self._rehearsal.without_unneeded()
        except NotEvaluatedError:
            return
        if found is not None:
            way, report = found
            remedy = dropping(way, report, self.needed_bytes, self._need(report), self._situation)
            spec = RemedySpec(
                remedy.key, remedy.cost, remedy.speed, ("before",), Variation(dropped=way), slot=remedy.key
            )
            yield from ((spec, one) for one in self._if_useful(remedy))

    def _groups(self) -> list[list[RemedySpec]]:
        """The candidates in groups, each by cost: harmless for the cause, other harmless, costly, what compiles."""
        worth = [one for one in self._candidates if self._is_possible(one) and one.helps(self.baseline)]
        for what, size in SIZES.items():
            if self._rehearsal.sizes.get(what, 1) > 1:
                way, combines = self._shrinking(what), size.is_made_up_for
                smaller = Variation(sizes={what: 0})
                worth.append(RemedySpec(way.key, way.cost, way.speed, STEP, smaller, slot=way.key, combines=combines))
        # If the memory between steps alone does not fit, it has to shrink first.
        is_full = between_steps_bytes(self.baseline) > self._situation.usable_bytes
        worth.sort(key=lambda one: (is_full and one.acts_on_step, one.cost))
        groups: list[list[RemedySpec]] = [[], [], [], []]
        for one in worth:
            is_first = not one.acts_on_step if is_full else one.key in self._first or one.key in _OF_EVALUATION
            is_first = is_first or mends_growth(one)
            groups[3 if one.compiles else 2 if one.cost > _HARMLESS else 0 if is_first else 1].append(one)
        return groups

    def _is_possible(self, candidate: RemedySpec) -> bool:
        """Whether a change applies: without a graph, no change to the graph does, nor one to what the compiler makes
        where that is not followed."""
        if candidate.needs_graph and self._rehearsal.keeps_no_graph:
            return False
        if candidate.is_of_compiler and self.baseline.is_upper_bound:
            return False
        return candidate.key != "no_grad" or self._is_evaluation or self._rehearsal.runs_frozen

    def _is_too_little(self, candidate: RemedySpec) -> bool:
        """Whether the run would not fit even without all that a change acts on."""
        is_sized = candidate.variation is not None and candidate.variation.sizes
        return not is_sized and self.needed_bytes - candidate.most_saved(self.baseline) > self._situation.usable_bytes

    def _shrinking(self, what: str) -> Shrinking:
        return shrinking(what, self._is_evaluation and not self._rehearsal.is_step, self._rehearsal.compares_samples)

    def _evaluated(self, candidate: RemedySpec, is_wanted: bool = False) -> Iterator[Remedy]:
        """The remedy of a candidate; None where it does not apply or saves nothing."""
        remedy = self._unevaluated(candidate)
        if candidate.variation is None:
            yield replace(remedy, note=candidate.reason)
            return
        try:
            self._rehearsal.check(candidate.variation)
            if self._patience.is_over:
                yield replace(remedy, note=Evidence("reason_time", {"seconds": PATIENCE_SECONDS}))
                return
            what = next(iter(candidate.variation.sizes), None)
            if what is not None:
                yield from self._if_useful(self._smaller(what, Variation()))
                return
            report = self._run(candidate.variation)
            if report.is_upper_bound and not self.baseline.is_upper_bound:
                raise NotEvaluatedError(Evidence("reason_followed_as_eager"))
        except NotEvaluatedError as error:
            if candidate.otherwise is not None:
                yield from self._evaluated(candidate.otherwise, is_wanted)
            elif error.applies and (candidate.variation.sizes or not error.is_of_code):  # what raises is no remedy
                yield replace(remedy, note=error.reason)
            return
        if variant := next((change.variant for change in candidate.variation.changes), ""):
            remedy = self._with_code(remedy, f"{candidate.key}_{variant}", candidate.values)
        remedy = self._with_saving(remedy, report, self._need(report))
        self._variations[identity_of(remedy)] = candidate.variation
        if not remedy.fits and report.peak_allocated_bytes <= self._situation.usable_bytes:
            self._in_pieces.append((remedy, report))
        yield from iter((remedy,)) if is_wanted else self._if_useful(remedy)

    def _smaller_without_graph(self, candidate: RemedySpec, graph: tuple[RemedySpec, Remedy]) -> Iterator[Remedy]:
        """Smaller evaluation batches without a graph: with it, they would keep as much in the end."""
        with suppress(NotEvaluatedError):
            both = self._together((graph, (candidate, self._unevaluated(candidate))))
            yield from self._if_useful(self._with_code(both, "no_grad", both.values))

    def _left_out(self, candidate: RemedySpec) -> Iterator[Remedy]:
        """A remedy whose rehearsal compiles, by name: it takes as long as all others together."""
        with suppress(NotEvaluatedError):
            self._rehearsal.check(candidate.variation or Variation())
            note = candidate.reason or Evidence("reason_compiling_is_slow")
            yield replace(self._unevaluated(candidate), note=note)

    def _if_useful(self, remedy: Remedy) -> Iterator[Remedy]:
        if remedy.fits or (remedy.saving_bytes or 0) >= _LEAST_SAVING * self.needed_bytes:
            yield remedy

    def _unevaluated(self, candidate: RemedySpec) -> Remedy:
        is_sized = bool(candidate.variation and candidate.variation.sizes)
        key = f"{candidate.key}_any" if is_sized else candidate.key
        return self._remedy(key, candidate.cost, candidate.speed, candidate.values)

    def _remedy(self, key: str, cost: int, speed: str, values: Mapping[str, Any]) -> Remedy:
        """A remedy that keeps the global batch, with its code."""
        batch = self._global_batch
        remedy = Remedy(key, cost, speed, values, global_batch_before=batch, global_batch_after=batch)
        return self._with_code(remedy, key, values)

    def _with_code(self, remedy: Remedy, key: str, values: Mapping[str, Any]) -> Remedy:
        code, language = self._writer.of(key, values)
        return replace(remedy, code=code, language=language)

    def _with_saving(self, remedy: Remedy, report: MemoryReport, now: int) -> Remedy:
        remedy = replace(
            remedy,
            peak_allocated_bytes=report.peak_allocated_bytes,
            saving_bytes=self.needed_bytes - now,
            workspace_bytes=report.workspace_bytes,
            is_lower_bound=report.is_lower_bound,
        )
        return self._situation.judged(remedy, now)

    def _smaller(self, what: str, base: Variation, needed: int | None = None) -> Remedy:
        """The largest smaller batch (or length) that is safe, else fits, else the smallest. Raises NotEvaluatedError.

        Smaller batches are compensated by accumulating gradients, which is included in the need. Without another change
        the peak is that of the smaller batch alone. ``needed``: with the other change and the batch as it is, if known.
        """
        kind, way, before = SIZES[what], self._shrinking(what), self._rehearsal.sizes[what]
        key, whole = way.key, self._global_batch or before
        sizes = kind.smaller(whole, before)
        reports: dict[int, MemoryReport] = {}
        accumulated = partial(self._accumulated, key, whole)

        @cache
        def need(size: int) -> int:
            smaller = base.with_(accumulated(size)).with_(Variation(sizes={what: size}))
            reports[size] = self._run(smaller)
            return self._need(reports[size], smaller.batches)

        limits = (self._situation.safe_bytes, self._situation.usable_bytes)
        before_need, least = (before, needed or self.needed_bytes), between_steps_bytes(self.baseline)
        fitting = (largest_fitting(need, sizes, before_need, least, limit, kind.power) for limit in limits)
        after = next(filter(None, fitting), None) or min(reports)
        cost = way.cost + kind.cost_of_halving(before, after)
        values = {"before": before, "after": after, "accumulation": whole // after, "name": self._rehearsal.label(what)}
        if key == "smaller_batch" and self._rehearsal.compares_samples:
            values["compared"] = after - 1
        report = reports[after]
        # For combinations, and for runs that do not fit, only the advised run is evaluated.
        if accumulated(after).changes and not base.parts and need(after) <= self._situation.usable_bytes:
            values["accumulated_peak_bytes"] = report.peak_allocated_bytes
            report = self._run(base.with_(Variation(sizes={what: after})))
        remedy = self._with_saving(self._remedy(key, cost, way.speed, values), report, need(after))
        self._variations[identity_of(remedy)] = base.with_(accumulated(after)).with_(Variation(sizes={what: after}))
        return remedy

    def _accumulated(self, key: str, whole: int, size: int) -> Variation:
        """The additional memory for accumulating smaller batches, unless the run accumulates already, and for fetching
        them together."""
        from oom_magic.predict.what_if.loop_changes import AccumulatedGradients, FetchedTogether  # loads torch

        if key != "smaller_batch":
            return Variation()
        more = whole // size // self._rehearsal.accumulation
        parts: list[tuple[Change, Mapping[str, Any]]] = []
        if self._rehearsal.accumulation == 1:
            timeline = self.baseline.timeline
            change = AccumulatedGradients(is_one_step=timeline.num_steps() == 1 and not timeline.was_left)
            parts.append((change, {"gradient_accumulation_steps": 2}))
        if self._situation.style == "trainer" and more > 1:
            parts.append((FetchedTogether(more), {}))
        followed = max(self._rehearsal.accumulation, 2)
        return Variation(tuple(parts), batches=(followed, whole // size - followed))

    def _combined(self, found: Sequence[tuple[RemedySpec, Remedy]]) -> Iterator[Remedy]:
        """The cheapest combination that fits, of those expected to fit; first those expected to leave the card safe.
        Where a change fits alone, one that leaves the card less full, if that is nearly full; else, if it is not safe,
        only with a release of what nobody needs."""
        verdicts = {remedy.verdict for _, remedy in found if remedy.fits}
        is_close = verdicts == {"danger"}
        limit = self._situation.safe_bytes if is_close else self._situation.usable_bytes
        possible = likely_combinations(
            found, self.needed_bytes, between_steps_bytes(self.baseline), self._situation, limit
        )
        if verdicts and not is_close:
            possible = [chosen for chosen in possible if any(one.key == DROPPED for one, _ in chosen)]
        for chosen in possible[:_MOST_COMBINATIONS]:
            keys = frozenset(one.key for one, _ in chosen)
            if self._patience.is_over:
                return
            if keys in self._tried:
                continue
            self._tried.add(keys)
            try:
                together = self._together(chosen)
            except NotEvaluatedError:
                continue
            if together.fits and not (is_close and together.verdict == "danger"):
                yield together
                return

    def _together(self, chosen: Sequence[tuple[RemedySpec, Remedy]]) -> Remedy:
        """Several changes in one run, with the batch as small as then necessary. Raises NotEvaluatedError."""
        cost = sum(one.cost for one, _ in chosen)
        changed = Variation()
        values: dict[str, Any] = {}
        for one, remedy in chosen:
            values |= remedy.values
            if one.variation is not None and not one.variation.sizes:
                changed = changed.with_(one.variation)
        values["keys"] = tuple(one.key for one, _ in chosen)
        codes = [remedy.code for _, remedy in chosen if "accumulation" not in remedy.values]
        joined = self._writer.joined_bare if "fully_sharded" in values["keys"] else self._writer.joined
        remedy = replace(self._remedy("combination", cost, "combination", values), code=joined(codes))
        if not any(one.variation and one.variation.sizes for one, _ in chosen):
            report = self._run(changed)
            self._variations[identity_of(remedy)] = changed
            return self._with_saving(remedy, report, self._need(report))
        known = [one.needed_bytes for spec, one in chosen if one.needed_bytes and not (spec.variation or changed).sizes]
        smaller = self._smaller("batch", changed, min(known, default=None))
        together = replace(
            smaller, key="combination", cost=cost, speed="combination", values={**values, **smaller.values},
            code=joined([remedy.code, smaller.code]),
        )  # fmt: skip
        self._variations[identity_of(together)] = self._variations[identity_of(smaller)]
        return together

    @property
    def _global_batch(self) -> int | None:
        batch = self._rehearsal.sizes.get("batch")
        return None if batch is None else batch * self._rehearsal.accumulation

    def _run(self, variation: Variation) -> MemoryReport:
        """The run with a change. Raises NotEvaluatedError, also where it was left in a loop, which the run as it is was
        followed beyond: what it needs by then cannot be compared."""
        report = self._patience.timed(lambda: self._rehearsal.run(variation.with_(self._after)))
        if report.is_lower_bound and not self.baseline.is_lower_bound:
            raise NotEvaluatedError(Evidence("reason_left_in_loop"))
        return report
