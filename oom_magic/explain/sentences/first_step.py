"""What an answer says to do first: a change, or the check that decides whether it is the right one.

A change is told plainly where its cause is likely. Where that is only possible, what would settle it comes first, and
the change with the condition that it is so: of 76 answers to reports read blind with something in them that was wrong,
34 had a change that was told without one.
"""

from __future__ import annotations

from collections.abc import Sequence

from oom_magic.explain.diagnosis import Diagnosis
from oom_magic.explain.evidence.causes import Cause, Confidence
from oom_magic.explain.evidence.checks import is_settled as is_seen_already
from oom_magic.explain.evidence.measured.contradicted import is_proven
from oom_magic.explain.remedies.from_text.choice import printed_by_message
from oom_magic.explain.remedies.from_text.telling import is_founded, is_shown, is_told_plainly
from oom_magic.explain.remedies.remedy import Remedy
from oom_magic.explain.sentences.causes import is_any_load, may_be_cache

# What the check for a cause of inputs says, or a check of its own.
_AS_CHECKED = ("smaller_input", "smaller_items", "smaller_batch_plain", "check_processes")
_OF_NO_CAUSE = ("check_before_update",)  # checks after which no change of the run follows
# Changes that show in the same way whether what they release was the cause.
RELEASING = ("map_location_cpu", "own_device", "no_grad", "no_retain_graph", "driver_limit")
# Changes that are easier to make than any check, and show as much.
_EASY = (
    "no_grad_own", "evaluation_inputs", "rarer_work", "use_all_devices", "tf_growth", "jax_preallocate",
    "collect_on_host", "gather_on_host", "older_version",
)  # fmt: skip
_WITHOUT_CHECK = (Cause.DRIVER_LEVEL, Cause.FRAGMENTATION)  # one asks what fills it, the other's change is a variable


def is_checked_first(diagnosis: Diagnosis) -> bool:
    """Whether the check that settles the likeliest cause comes before any change."""
    has_change = bool(diagnosis.remedies) and diagnosis.confidence is not Confidence.OPEN
    is_check = (is_tried(diagnosis) and _settles(diagnosis)) or is_any_load(diagnosis) or _needs_check(diagnosis)
    return bool(diagnosis.possible) and not _is_settled(diagnosis) and (is_check or not has_change)


def has_more(diagnosis: Diagnosis) -> bool:
    """Whether a change is told with the check that comes first."""
    is_same = bool(diagnosis.remedies) and diagnosis.remedies[0].key in _AS_CHECKED
    is_more = bool(diagnosis.remedies) and not is_same and not may_be_cache(diagnosis)
    return is_more and diagnosis.possible[0].check.key not in _OF_NO_CAUSE


def told_changes(diagnosis: Diagnosis) -> Sequence[Remedy]:
    """The changes that are told: behind a check the first, settings of the program, and what is shown or proven."""
    if diagnosis.program or not is_checked_first(diagnosis):
        return diagnosis.remedies
    first, others = diagnosis.remedies[:1], diagnosis.remedies[1:]
    return [*first, *(one for one in others if is_proven(one.key) or is_shown(one.key, diagnosis))]


def is_tried(diagnosis: Diagnosis) -> bool:
    """Whether a change is one to try: its cause is only possible, and nobody has seen or computed what it does."""
    return diagnosis.confidence is Confidence.POSSIBLE and not _is_settled(diagnosis)


def _settles(diagnosis: Diagnosis) -> bool:
    """Whether the check says more than trying the first change does."""
    first = {one.key for one in diagnosis.remedies[:1]} & {*RELEASING, *_EASY}
    return diagnosis.cause not in _WITHOUT_CHECK and not any(is_founded(key, diagnosis) for key in first)


def _needs_check(diagnosis: Diagnosis) -> bool:
    """Whether the first change is told only behind the check for its cause, though that is likely."""
    first = [one.key for one in diagnosis.remedies[:1] if diagnosis.confidence is Confidence.LIKELY]
    return diagnosis.cause not in _WITHOUT_CHECK and not all(is_told_plainly(key, diagnosis) for key in first)


def _is_settled(diagnosis: Diagnosis) -> bool:
    """Whether a change comes first whatever the text leaves open: evaluated, printed, or seen to help."""
    is_evaluated = any(one.needed_bytes is not None for one in diagnosis.remedies)
    is_printed = bool(printed_by_message(diagnosis))
    is_plain = all(is_told_plainly(one.key, diagnosis) for one in diagnosis.remedies[:1])
    return is_evaluated or is_printed or (is_plain and is_seen_already(diagnosis.cause, diagnosis.told))
