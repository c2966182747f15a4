"""Refining a judgement by a recorded run: what filled the memory, and what was kept without need."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from oom_magic.explain.evidence.causes import Cause, Confidence, Evidence, Judgement
from oom_magic.explain.live.location import located_in_rehearsal
from oom_magic.memory.categories import CATEGORIES, Category

if TYPE_CHECKING:
    import numpy as np

    from oom_magic.explain.diagnosis import Diagnosis
    from oom_magic.explain.live.growth import Growth
    from oom_magic.explain.live.holders import Holder
    from oom_magic.explain.messages.failure import Failure
    from oom_magic.explain.remedies.remedy import Remedy
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.setups.setup import TrainingSetup

_WEIGHTS = "parameter"
# Weights alone are called the cause if they are at least this share of what was allocated; a step needs some memory,
# too.
_MOSTLY_WEIGHTS = 0.85
_MANY_TURNS = 3
_HELD = ("earlier_failures", "same_model_twice", "model_loaded_before")
# What a loop collected is called the cause if it is at least this share of what PyTorch had allocated.
LEAST_SHARE = 0.2
# The category that grew beside the weights until memory ran out, and the cause it stands for.
_GROWN = {
    "gradient": Cause.OPTIMIZER_STATE,
    "optimizer_state": Cause.OPTIMIZER_STATE,
    "activation": Cause.ACTIVATIONS,
    "temporary": Cause.ACTIVATIONS,
}
_OF_ONE_STEP = (Category.ACTIVATION, Category.INPUT, Category.TEMPORARY)
_OF_A_STEP = (Cause.ACTIVATIONS, Cause.ATTENTION_SCORES, Cause.LOGITS_OR_LOSS, Cause.UNKNOWN)
_PASSING = [CATEGORIES.index(one) for one in _OF_ONE_STEP]
# A step may have a few forwards at once: both sides of a comparison, a policy and its reference.
_MANY_CALLS = 5
_LEAST_SHARE = 0.2


def refine_with_report(judgement: Judgement, report: MemoryReport, is_one_graph: bool = False) -> Judgement:
    """The judgement, refined by what had filled the memory when it failed, unless there is stronger evidence.

    ``is_one_graph``: a backward was to come for all calls of the step together.
    """
    if judgement.is_certain:
        return judgement

    alive = find_outputs_alive(report, is_one_graph)
    if alive is not None:
        is_evaluation = any(one.key == "phase_evaluation" for one in judgement.evidence)
        cause = judgement.cause if is_evaluation else Cause.LEAK_OR_RETAINED_REFERENCE
        return Judgement(cause, (alive, *judgement.without_doubts), Confidence.LIKELY)
    return _by_category(judgement, report) if judgement.is_open else judgement


def _by_category(judgement: Judgement, report: MemoryReport) -> Judgement:
    """The judgement settled by the category that filled most."""
    parts = report.breakdown
    allocated = parts.total_bytes
    if parts[_WEIGHTS] >= _MOSTLY_WEIGHTS * allocated:
        return _filled(judgement, Cause.WEIGHTS_TOO_BIG, _WEIGHTS, parts[_WEIGHTS], allocated)
    grown = {cause: sum(parts[name] for name in _GROWN if _GROWN[name] is cause) for cause in _GROWN.values()}
    cause = max(grown, key=lambda one: grown[one])
    if 2 * grown[cause] < allocated - parts[_WEIGHTS] or not grown[cause]:
        return judgement
    largest = max((name for name in _GROWN if _GROWN[name] is cause), key=lambda name: parts[name])
    return _filled(judgement, cause, largest, parts[largest], allocated)


def _filled(judgement: Judgement, cause: Cause, category: str, num_bytes: int, allocated: int) -> Judgement:
    values: dict[str, int | str] = {
        "category_key": f"category_{category}",
        "category_bytes": num_bytes,
        "allocated_bytes": allocated,
    }
    return Judgement(cause, (*judgement.without_doubts, Evidence("category_fills", values)), Confidence.LIKELY)


def refine_with_loop(judgement: Judgement, growth: Growth | None, failure: Failure | None) -> Judgement:
    """The judgement with what grew in the loop; the cause, if that is a good part of what PyTorch held, or a queue
    that training reads and that has a multiple of its first rows: what is computed from it has grown as often.

    An evaluation that fails in its first iterations needs too much because of the graph, whatever it collects. Losses
    of parts of a step are no leak, but make the step as large as all parts together.
    """
    held_bytes = 0 if failure is None or failure.pytorch_bytes is None else failure.pytorch_bytes
    if growth is None or not held_bytes or not (growth.num_tensors or growth.is_of_one_step):
        return judgement
    ways = (
        ("comprehension_sums_a_step", growth.is_of_one_step and not growth.num_bytes),
        ("name_sums_a_step", growth.is_of_one_step),
        ("name_is_joined", growth.is_joined),
        ("name_grows_by_entries", growth.are_entries),
        ("name_grows_with_graphs", growth.has_graph),
        ("name_is_put_together", growth.is_put_together),
        ("name_grows", True),
    )
    key = next(name for name, holds in ways if holds)
    values: dict[str, int | str] = {
        "name": growth.name,
        "growing_code": growth.code,
        "place": growth.place,
        "count": growth.num_tensors,
        "kept_bytes": growth.num_bytes,
    }
    evidence = (Evidence(key, values), *_by_the_turn(growth))
    is_evaluation = any(one.key == "phase_evaluation" for one in judgement.evidence)
    is_for_no_grad = is_evaluation and growth.has_graph and growth.num_tensors < _MANY_TURNS
    is_much = growth.num_bytes >= LEAST_SHARE * held_bytes or (growth.is_of_one_step and not growth.num_bytes)
    is_cause = (is_much or growth.is_larger_queue) and not growth.is_inherent and not is_for_no_grad
    if judgement.is_certain or not is_cause:
        return replace(judgement, evidence=(*judgement.evidence, *evidence))
    cause = Cause.ACTIVATIONS if growth.is_of_one_step else Cause.LEAK_OR_RETAINED_REFERENCE
    return Judgement(cause, (*evidence, *judgement.without_doubts), Confidence.LIKELY)


def _by_the_turn(growth: Growth) -> tuple[Evidence, ...]:
    """What an iteration adds, where each adds one tensor or entry, and how many had run when the card was full."""
    if growth.is_joined or growth.is_put_together or growth.is_of_one_step or growth.num_tensors < _MANY_TURNS:
        return ()
    values = {"turn_bytes": growth.num_bytes // growth.num_tensors, "count": growth.num_tensors}
    return (Evidence("growth_by_entry" if growth.are_entries else "growth_by_the_turn", values),)


def refine_with_turns(diagnosis: Diagnosis, num_turns: int, turn_bytes: int, needed_bytes: int) -> Diagnosis:
    """The diagnosis of a run without training whose loop has so many turns, each of which keeps so much more than the
    one before, as a cache of keys and values does: the cause, where all together are most of what the run needs."""
    grown = num_turns * turn_bytes
    if grown < LEAST_SHARE * needed_bytes or diagnosis.cause is Cause.LEAK_OR_RETAINED_REFERENCE:
        return diagnosis  # what is kept is named
    values = {"turn_bytes": turn_bytes, "count": num_turns, "grown_bytes": grown}
    diagnosis = replace(diagnosis, evidence=(Evidence("turns_keep", values), *diagnosis.evidence))
    is_step = diagnosis.cause in _OF_A_STEP and diagnosis.confidence is not Confidence.CERTAIN
    if not is_step or 2 * grown < needed_bytes:
        return diagnosis
    return replace(diagnosis, cause=Cause.ACTIVATIONS, confidence=Confidence.LIKELY)


def refine_with_request(diagnosis: Diagnosis, report: MemoryReport) -> Diagnosis:
    """The diagnosis of a failed backward of a step that is too large, with the tensor that its rehearsal asks for
    there, if that is of the logits."""
    failure = diagnosis.main_failure
    is_open = diagnosis.cause is Cause.ACTIVATIONS and diagnosis.confidence is not Confidence.CERTAIN
    if failure is None or not is_open or diagnosis.phase != "backward" or diagnosis.tensors:
        return diagnosis
    found = located_in_rehearsal(report, failure).candidates
    if not found:
        return diagnosis
    evidence = (*diagnosis.evidence, Evidence("tensor_seen", {"formula": found[0].formula}))
    return replace(diagnosis, cause=Cause.LOGITS_OR_LOSS, evidence=evidence, tensors=found)


def refine_with_call(
    judgement: Judgement, phase: str | None, holders: Sequence[Holder], failure: Failure | None
) -> Judgement:
    """A judgement that names no cause, or none that more than the words speak for, refined by the activations of the
    failed call."""
    allocated = 0 if failure is None else failure.allocated_bytes or 0
    own = sum(one.num_bytes for one in holders if one.kind == "own_frames")
    is_open = judgement.cause is Cause.UNKNOWN or judgement.confidence is Confidence.OPEN
    if not is_open or phase not in ("forward", "loss", "backward") or 2 * own < allocated or not own:
        return judgement
    evidence = Evidence("alive_in_call", {"own_bytes": own, "allocated_bytes": allocated})
    return Judgement(Cause.ACTIVATIONS, (*judgement.without_doubts, evidence), Confidence.LIKELY)


def without_fragmentation(diagnosis: Diagnosis, report: MemoryReport) -> Diagnosis:
    """The diagnosis of a run that does not fit with expandable segments either: the cause is what fills the card."""
    if diagnosis.cause is not Cause.FRAGMENTATION or diagnosis.confidence is Confidence.CERTAIN:
        return diagnosis
    return settled(diagnosis, report, Evidence("pieces_are_not_it"))


def without_activations(diagnosis: Diagnosis, report: MemoryReport, usable_bytes: int) -> Diagnosis:
    """The diagnosis of a run at whose rehearsed peak little is of one step, or the rest alone is more than PyTorch can
    have: the cause is what fills the card."""
    parts = report.breakdown
    passing = sum(parts[name] for name in _OF_ONE_STEP)
    rest = parts.total_bytes - passing
    is_it = passing >= LEAST_SHARE * parts.total_bytes and _most_kept_bytes(report) <= usable_bytes
    trained = {name: parts[name] for name in (_WEIGHTS, "gradient", "optimizer_state")}
    is_trained = 2 * sum(trained.values()) >= rest
    is_certain = diagnosis.confidence is Confidence.CERTAIN
    if diagnosis.cause is not Cause.ACTIVATIONS or is_certain or is_it or not is_trained:
        return diagnosis
    is_state = bool(trained["optimizer_state"]) and 2 * trained[_WEIGHTS] <= sum(trained.values())
    cause = Cause.OPTIMIZER_STATE if is_state else Cause.WEIGHTS_TOO_BIG
    category = "optimizer_state" if is_state else "gradient" if trained["gradient"] else _WEIGHTS
    values: dict[str, int | str] = {
        "category_key": f"category_{category}",
        "category_bytes": trained[category],
        "allocated_bytes": parts.total_bytes,
    }
    evidence = (*diagnosis.evidence, Evidence("category_fills_rehearsed", values))
    return replace(diagnosis, cause=cause, evidence=evidence, confidence=Confidence.LIKELY)


def _most_kept_bytes(report: MemoryReport) -> int:
    """The most bytes at once that are not of one step."""
    import numpy as np  # imported here, since explaining a text does not need it

    timeline = report.timeline
    kept = np.where(np.isin(timeline.category, _PASSING), 0, timeline.requested_bytes)
    order = timeline.order
    return int(np.cumsum(np.where(order >= 0, kept[order], -kept[~order])).max(initial=0))


def without_held(diagnosis: Diagnosis, report: MemoryReport, lacking_bytes: int) -> Diagnosis:
    """The diagnosis of a run that does not fit either without what is held needlessly.

    ``report`` is of that run without what earlier failures held, for which so many bytes are lacking.
    """
    first = next((one for one in diagnosis.evidence if one.key in _HELD), None)
    if diagnosis.cause is not Cause.LEAK_OR_RETAINED_REFERENCE or first is not diagnosis.evidence[0]:
        return diagnosis
    if sum(int(one.values.get("twin_bytes", 0)) for one in diagnosis.evidence if one.key in _HELD) >= lacking_bytes:
        return diagnosis
    return settled(diagnosis, report, Evidence("held_is_not_it"))


def settled(diagnosis: Diagnosis, report: MemoryReport, *not_it: Evidence) -> Diagnosis:
    """The diagnosis of a failure whose numbers and frames leave the cause open, or that is not by the cause named, as
    ``not_it`` says: it is what fills the card in the run as it was rehearsed."""
    if not (not_it or diagnosis.cause is Cause.UNKNOWN or diagnosis.confidence is Confidence.OPEN):
        return diagnosis
    evidence = (*diagnosis.evidence, *not_it)
    judgement = _by_category(Judgement(Cause.UNKNOWN, evidence, Confidence.OPEN), report)
    if judgement.cause is Cause.UNKNOWN:
        return diagnosis
    *before, filled = judgement.evidence
    evidence = (*before, Evidence("category_fills_rehearsed", filled.values))
    return replace(diagnosis, cause=judgement.cause, evidence=evidence, confidence=judgement.confidence)


def refine_with_remedy(diagnosis: Diagnosis, remedy: Remedy) -> Diagnosis:
    """The diagnosis, its cause settled by what a rehearsed remedy that fits has shown, if nothing surer did.

    Memory that earlier cells hold needlessly is the cause if it is a good part of what PyTorch held, and so is what a
    comprehension collects. For an open diagnosis it is fragmentation, if the same run fits with expandable segments;
    so where the numbers had allowed for it.
    """
    failure = diagnosis.main_failure
    judgement = Judgement(diagnosis.cause, diagnosis.evidence, diagnosis.confidence)
    if not remedy.fits or judgement.is_certain or failure is None:
        return diagnosis
    evidence = judgement.without_doubts
    drops = "drop_copy" in (remedy.key, *remedy.values.get("keys", ()))
    if drops and remedy.values["freed_bytes"] >= LEAST_SHARE * (failure.pytorch_bytes or 0):
        if diagnosis.cause is Cause.LEAK_OR_RETAINED_REFERENCE:
            return diagnosis
        found = Evidence("held_for_nothing", remedy.values)
        cause = Cause.LEAK_OR_RETAINED_REFERENCE
    elif _is_by_comprehension(diagnosis.growth, remedy, failure):
        values = {"growing_code": remedy.values["line"], "saving_bytes": remedy.saving_bytes or 0}
        found = Evidence("collected_in_rehearsal", values)
        cause = Cause.LEAK_OR_RETAINED_REFERENCE
    elif remedy.key == "batches_moved" and (remedy.saving_bytes or 0) >= LEAST_SHARE * (failure.pytorch_bytes or 0):
        if diagnosis.cause is Cause.LEAK_OR_RETAINED_REFERENCE:
            return diagnosis
        found = Evidence("data_wait_on_device", {"saving_bytes": remedy.saving_bytes or 0})
        cause = Cause.ACTIVATIONS
    elif remedy.key == "expandable_segments" and _is_in_pieces(diagnosis, remedy, failure):
        found = Evidence("pieces_in_rehearsal", {"saving_bytes": remedy.saving_bytes or 0})
        cause = Cause.FRAGMENTATION
    else:
        return diagnosis
    return replace(diagnosis, cause=cause, evidence=(found, *evidence), confidence=Confidence.LIKELY)


def _is_in_pieces(diagnosis: Diagnosis, remedy: Remedy, failure: Failure) -> bool:
    """Whether pieces of the cache are the cause, as the run is safe without them: where no other is known, or where a
    step's tensors were named though the cache had as much unused as was asked for."""
    had_room = (failure.stuck_bytes or 0) >= (failure.requested_bytes or sys.maxsize)
    is_safe = remedy.verdict == "safe" and had_room and diagnosis.cause in _OF_A_STEP
    return diagnosis.cause is Cause.UNKNOWN or is_safe


def _is_by_comprehension(growth: Growth | None, remedy: Remedy, failure: Failure) -> bool:
    """Whether it is a remedy for what a comprehension collects, which is a good part of what PyTorch held."""
    is_of_it = growth is not None and not growth.num_tensors and remedy.values.get("line") == growth.lines["line"]
    return is_of_it and (remedy.saving_bytes or 0) >= LEAST_SHARE * (failure.pytorch_bytes or 0)


def refine_with_setup(diagnosis: Diagnosis, setup: TrainingSetup) -> Diagnosis:
    """The diagnosis, its cause settled by a dry run of the setup if that runs out of memory too."""
    if diagnosis.cause is not Cause.UNKNOWN:
        return diagnosis
    from oom_magic.predict.silence import silenced  # loads PyTorch, which texts do not need

    try:
        with silenced():
            report = setup.dry_run()
    except Exception:  # a library that is missing; the remedies then say why nothing is evaluated
        return diagnosis
    if report.out_of_memory is None:
        return diagnosis
    judgement = refine_with_report(Judgement(diagnosis.cause, diagnosis.evidence, diagnosis.confidence), report)
    cause, evidence, confidence = judgement.cause, judgement.evidence, judgement.confidence
    return replace(diagnosis, cause=cause, evidence=evidence, confidence=confidence)


def find_outputs_alive(report: MemoryReport, is_one_graph: bool) -> Evidence | None:
    """Evidence that something kept memory which should have been freed before; None if there is none.

    ``is_one_graph``: as ``refine_with_report`` has it.
    """
    import numpy as np  # imported here, since explaining a text does not need it

    failure, timeline = report.out_of_memory, report.timeline
    if failure is None or not timeline.num_events:
        return None
    live = timeline.live_at(report.peak_position)
    passing = live[np.isin(timeline.category[live], _PASSING)]
    least = _LEAST_SHARE * report.breakdown.total_bytes
    steps = timeline.step[passing]
    old = passing[(steps >= 1) & (steps < failure.step - 1)]
    old_bytes = int(timeline.requested_bytes[old].sum())
    if old_bytes >= least and len(np.unique(timeline.step[old])) > 1:
        return Evidence("earlier_steps_alive", {"kept_bytes": old_bytes})
    if failure.num_calls < _MANY_CALLS or is_one_graph:
        return None
    kept_bytes = _copied_bytes(report, passing, failure.num_calls // 2)
    return (
        Evidence("calls_alive", {"count": failure.num_calls, "kept_bytes": kept_bytes}) if kept_bytes >= least else None
    )


def _copied_bytes(report: MemoryReport, allocations: np.ndarray, least_copies: int) -> int:
    """Bytes of equal outputs that a module made at least so many times and that are alive at once."""
    timeline = report.timeline
    within = allocations[timeline.module[allocations] > 0]
    columns = (timeline.module, timeline.operator, timeline.requested_bytes)
    kinds = Counter(zip(*(column[within].tolist() for column in columns), strict=True))
    return sum(num_bytes * copies for (_, _, num_bytes), copies in kinds.items() if copies >= least_copies)
