"""Remedies for a diagnosis: evaluated if the run can be rehearsed, else only named."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from oom_magic.explain.evidence.causes import Cause, Evidence
from oom_magic.explain.live.holders import earlier_bytes
from oom_magic.explain.live.refinement import (
    refine_with_remedy,
    refine_with_request,
    refine_with_turns,
    settled,
    without_activations,
    without_fragmentation,
    without_held,
)
from oom_magic.explain.remedies.code import RELEASE, in_the_cell, is_placed
from oom_magic.explain.remedies.evaluation import RemedyEvaluator
from oom_magic.explain.remedies.from_text.choice import AGAINST
from oom_magic.explain.remedies.from_text.kind_of_run import style_of
from oom_magic.explain.remedies.from_text.naming import unpriced_remedies
from oom_magic.explain.remedies.rehearsal import NotEvaluatedError, Rehearsal, SetupRehearsal
from oom_magic.explain.remedies.remedy import NOT_YET, AsItIs, Remedy, Situation, ranked
from oom_magic.explain.syntax import read_before_bound
from oom_magic.inputs import parse_bytes

if TYPE_CHECKING:
    from oom_magic.explain.diagnosis import Diagnosis
    from oom_magic.memory.report import Device, MemoryReport
    from oom_magic.predict.setups.gpus import GPU
    from oom_magic.predict.setups.setup import TrainingSetup

# Whether a setup has a remedy's change already.
_HAS_ALREADY: Mapping[str, Callable[[TrainingSetup], bool]] = {
    "sdpa": lambda setup: setup.attention == "sdpa",
    "chunked_loss": lambda setup: setup.loss == "chunked",
    "checkpointing": lambda setup: setup.activation_checkpointing,
    "mixed_precision": lambda setup: setup.precision != "fp32",
    "half_weights": lambda setup: setup.precision in ("bf16", "fp16"),
    "foreach": lambda setup: setup.optimizer != "adamw",
    "optimizer_8bit": lambda setup: "8bit" in setup.optimizer,
    "adafactor": lambda setup: setup.optimizer == "adafactor",
    "lora": lambda setup: setup.method != "full",
    "qlora": lambda setup: setup.method == "qlora",
    "smaller_batch_any": lambda setup: setup.microbatch_size == 1,
}
_MOST_CHECKED = 3  # remedies that are rehearsed to the run's end
_NOTICEABLY = 1.01  # times what the steps need
_SAME_SIZE = 0.02  # cards of one model differ by less
_OF_ERRORS = ("frames", "own_frames")
_LEAST_SHARE = 0.01  # of what PyTorch can have: errors that hold more are released before code is run
_FITS = Evidence("reason_fits_as_it_is")
NOT_ASKED = Evidence("reason_fast")
_NOTHING_SAVES = Evidence("reason_nothing_saves")
_NOT_REWRITTEN = Evidence("reason_not_rewritten")


def before_evaluation(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis as it is shown until the first remedy is evaluated."""
    return replace(diagnosis, remedies=unpriced_remedies(diagnosis, NOT_YET))


def advise(
    diagnosis: Diagnosis,
    rehearsal: Rehearsal,
    gpu: GPU,
    report: MemoryReport | None = None,
    memory: int | None = None,
    device: Device | None = None,
    names_left: Callable[[], Collection[str]] = tuple,
    emptied: str = "",
) -> Iterator[Diagnosis]:
    """The diagnosis with a ranked list of remedies, yielded again as each rehearsal adds one.

    ``report``: the MemoryReport of the run that failed, if there is one.
    ``memory``: the card's bytes, if it is not certain that the message is about this card.
    ``device``: the real card that the run failed on.
    ``names_left``: finds the variables with which the failed run still holds memory; no rehearsal begins with it.
    ``emptied``: the lines that take what grew in the loop back to what it was, or "".
    If the run cannot be rehearsed, the remedies are only named, with the reason.
    """
    situation = situation_of(diagnosis, gpu, report, memory, device)
    in_errors = () if device is None else (one.num_bytes for one in diagnosis.holders if one.kind in _OF_ERRORS)
    is_room_taken = sum(in_errors) >= _LEAST_SHARE * situation.usable_bytes
    for advised in _advised(diagnosis, rehearsal, situation):
        left = names_left()
        if is_room_taken or left or emptied:
            released = (_released_first(one, left, emptied) for one in advised.remedies)
            advised = replace(advised, remedies=tuple(released))
        yield advised


def _released_first(remedy: Remedy, left: Collection[str], emptied: str) -> Remedy:
    """The remedy with a line that first releases what errors, the names ``left`` and what grew still hold.

    The failed cell makes those names anew: code that reads them belongs into it.
    """
    if remedy.needed_bytes is None or remedy.language != "python" or not remedy.code:
        return remedy
    release = f"{RELEASE} --names {' '.join(left)}" if left else RELEASE
    release = f"{emptied}\n{release}" if emptied else release
    before, is_there, code = f"{remedy.code}\n".rpartition(f"{RELEASE}\n")
    code = code.strip("\n")
    if is_there and not code:
        return replace(remedy, code=f"{before}{release}")
    # a line in place of another, or behind it, for the cell to be run as a whole
    is_of_cell = "fixed" in remedy.values or is_placed(code) or code.startswith("# ")
    read = read_before_bound(ast.parse("\n".join(one for one in code.splitlines() if not one.startswith("%"))))
    if not is_of_cell and not read.isdisjoint(left):
        is_of_cell, code = True, in_the_cell(code)
    gap = "\n\n" if is_of_cell else "\n"  # what is run once stands apart from what belongs elsewhere
    return replace(remedy, code=f"{before}{release}{gap}{code}")


def _advised(diagnosis: Diagnosis, rehearsal: Rehearsal, situation: Situation) -> Iterator[Diagnosis]:
    try:
        keys = [key.removesuffix("_any") for key in AGAINST.get(diagnosis.cause, ())]
        evaluator = RemedyEvaluator(rehearsal, situation, keys)
    except NotEvaluatedError as error:
        yield replace(diagnosis, remedies=unpriced_remedies(diagnosis, error.reason))
        return
    diagnosis = _rehearsed(diagnosis, rehearsal, evaluator, situation)
    if rehearsal.is_step and not rehearsal.is_evaluation and situation.phase != "evaluation":
        diagnosis = replace(diagnosis, told=diagnosis.told | {"trains_in_rehearsal"})
    growth = diagnosis.growth
    is_of_graph = growth is not None and growth.has_graph and rehearsal.is_evaluation  # which no_grad leaves out
    is_leak = diagnosis.cause is Cause.LEAK_OR_RETAINED_REFERENCE and not is_of_graph
    if growth is not None and not growth.fixed and is_leak:
        yield replace(diagnosis, remedies=unpriced_remedies(diagnosis, _NOT_REWRITTEN))  # others only delay it
        return
    waiting = [one for one in diagnosis.remedies if one.waits]
    found = [*evaluator.bought()]
    yield diagnosis if evaluator.fits else replace(diagnosis, remedies=ranked([*found, *waiting]))
    for remedy in evaluator.remedies():
        found.append(remedy)
        waiting = [one for one in waiting if one.key.removesuffix("_any") != remedy.key.removesuffix("_any")]
        diagnosis = refine_with_remedy(diagnosis, remedy)
        yield replace(diagnosis, remedies=ranked([*found, *waiting]))
    if waiting:
        yield replace(diagnosis, remedies=ranked(found))
    yield from _to_its_end(diagnosis, evaluator, found)
    if not found and not evaluator.fits:
        left = [
            one
            for one in unpriced_remedies(diagnosis, _NOTHING_SAVES)
            if one.key.removesuffix("_any") not in evaluator.keys
        ]
        yield replace(diagnosis, remedies=tuple(left))


def _to_its_end(diagnosis: Diagnosis, evaluator: RemedyEvaluator, found: list[Remedy]) -> Iterator[Diagnosis]:
    """The diagnosis with the first remedy rehearsed to the run's end; if it then does not fit, also the next one."""
    for _unused in range(_MOST_CHECKED if found else 0):
        first = ranked(found)[0]
        whole, needed = evaluator.to_its_end(first) if first.fits else (first, 0)
        if whole is first:
            return
        found[found.index(first)] = whole
        if needed > _NOTICEABLY * (first.needed_bytes or 0):
            needs = Evidence("later_takes_more", {"needed_bytes": needed})
            diagnosis = replace(diagnosis, evidence=(*diagnosis.evidence, needs))
        yield replace(diagnosis, remedies=ranked(found))
        if whole.fits:
            return


def _rehearsed(
    diagnosis: Diagnosis, rehearsal: Rehearsal, evaluator: RemedyEvaluator, situation: Situation
) -> Diagnosis:
    """The diagnosis with the memory that the unchanged run needs, and what its rehearsal shows about the cause."""
    held_only = situation.held_bytes if situation.is_filled_by_held(evaluator.needed_bytes) else 0
    needed, baseline = evaluator.needed_bytes + held_only, evaluator.baseline
    bounds = baseline.is_upper_bound, baseline.is_lower_bound
    diagnosis = replace(diagnosis, as_is=AsItIs(needed, situation.usable_bytes, situation.outside_bytes, *bounds))
    if rehearsal.calls_followed:
        key = "calls_continued" if baseline.timeline.was_continued else "calls_followed"
        followed = Evidence(key, {"num_calls": rehearsal.calls_followed})
        diagnosis = replace(diagnosis, evidence=(*diagnosis.evidence, followed))
        diagnosis = refine_with_turns(diagnosis, *rehearsal.kept_by_turns, needed)
    steps = {"num_steps": evaluator.steps_left_after} if evaluator.steps_left_after else {}
    if evaluator.fits:
        sizes = {"needed_bytes": evaluator.needed_bytes, "usable_bytes": situation.usable_bytes}
        key = "grows_later" if situation.is_leaking else "first_steps_fit"
        fits = Evidence(key if steps else "rehearsal_fits", {**sizes, **steps})
        # What held memory when the run failed is known: also what grew in it, where not all turns were followed.
        is_told = held_only > 0 or (situation.is_leaking and rehearsal.calls_followed > 0)
        evidence = diagnosis.evidence if is_told else (*diagnosis.evidence, fits)
        return replace(diagnosis, evidence=evidence, remedies=unpriced_remedies(diagnosis, _FITS))
    diagnosis = refine_with_request(diagnosis, evaluator.baseline)
    diagnosis = without_held(diagnosis, evaluator.baseline, evaluator.needed_bytes - situation.usable_bytes)
    if not evaluator.is_in_pieces:
        diagnosis = settled(without_fragmentation(diagnosis, evaluator.baseline), evaluator.baseline)
    diagnosis = without_activations(diagnosis, evaluator.baseline, situation.usable_bytes)
    if rehearsal.steps_differ:
        diagnosis = replace(diagnosis, evidence=(*diagnosis.evidence, Evidence("steps_differ", steps)))
    if rehearsal.samples_compared:
        largest = Evidence("largest_sample", {"count": rehearsal.samples_compared})
        diagnosis = replace(diagnosis, evidence=(*diagnosis.evidence, largest))
    return diagnosis


def advise_setup(diagnosis: Diagnosis, setup: TrainingSetup) -> Iterator[Diagnosis]:
    """``advise`` for a run described by its settings."""
    from oom_magic.predict.setups.gpus import find_gpu

    gpu = find_gpu(setup.gpu)
    memory = gpu.total_bytes if setup.memory is None else parse_bytes(setup.memory)
    yield from advise(diagnosis, SetupRehearsal(setup), gpu, memory=memory)


def named_remedies(diagnosis: Diagnosis, setup: TrainingSetup) -> tuple[Remedy, ...]:
    """The remedies for a setup, not evaluated, without those that it has already."""
    named = unpriced_remedies(diagnosis, NOT_ASKED)
    return tuple(one for one in named if one.key not in _HAS_ALREADY or not _HAS_ALREADY[one.key](setup))


def situation_of(
    diagnosis: Diagnosis,
    gpu: GPU,
    report: MemoryReport | None = None,
    memory: int | None = None,
    device: Device | None = None,
) -> Situation:
    """The card as the failed run found it: from its message if that is about a card of this size, else empty."""
    from oom_magic.measure.device.host import host_memory

    failure = diagnosis.main_failure
    ram = None if device is None else host_memory()[1]
    total = memory or gpu.total_bytes
    usable, others = max(total - gpu.context_bytes, 0), 0
    if device is None and report is not None:
        device = report.device
    if device is not None:
        usable, others = device.usable_bytes, device.other_bytes
    elif failure is not None and failure.free_bytes is not None and failure.pytorch_bytes is not None:
        is_this_card = memory is None or abs((failure.total_bytes or 0) - total) <= _SAME_SIZE * total
        if is_this_card:
            usable = failure.pytorch_bytes + failure.free_bytes
            others = failure.listed_other_bytes or 0
    situation = Situation(
        usable_bytes=usable,
        gpu=gpu,
        total_bytes=total if device is None else device.total_bytes,
        held_bytes=earlier_bytes(diagnosis.holders, report),
        growth=diagnosis.growth,
        other_bytes=others,
        style=style_of(diagnosis),
        phase=diagnosis.phase,
        backend=diagnosis.backend,
        expandable_segments=diagnosis.expandable_segments,
        is_windows=bool({"Windows", "WSL"} & set(diagnosis.systems)),
        ram_bytes=ram,
    )
    limit = None if failure is None else failure.limit_bytes
    return situation if limit is None else situation.limited_to(limit)
