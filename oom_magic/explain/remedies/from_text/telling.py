"""How a change is told for a failure known by its text: plainly, or behind the check for its cause.

One place for all changes. Of answers to public reports that the code had never seen, those whose first change was told
plainly were contradicted twice as often as those that began with a check; which change it was decided more than what
spoke for the cause. So each change has its record (``contradicted.json``), and what has a poor one or none needs more.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from oom_magic.explain.evidence.causes import HOST_CAUSES, Cause, Confidence
from oom_magic.explain.evidence.checks import is_settled
from oom_magic.explain.evidence.measured.contradicted import is_doubtful, is_proven
from oom_magic.explain.remedies.from_text.choice import printed_by_message
from oom_magic.explain.remedies.from_text.program_settings import is_limited
from oom_magic.explain.sentences.program_remedies import PROGRAM_REMEDIES
from oom_magic.explain.sentences.remedies import REMEDIES

if TYPE_CHECKING:
    from oom_magic.explain.diagnosis import Diagnosis


# Sentences that have their condition in themselves, or ask to look: nothing in a text contradicts them.
_CONDITIONS = ("If ", "if ", "Where ", "where ", "Check ", "See ", "Find ", "Compare ", "look for ")
# What any program does with less at once, or with more room: true of each run whose cause it is.
_BROAD: Mapping[str, frozenset[str]] = {
    "host": frozenset({"more_ram", "hold_less", "fewer_processes", "swap", "page_file", "scheduler_memory"}),
    "device": frozenset(
        {"smaller_input", "smaller_items", "smaller_batch_any", "smaller_batch_plain", "smaller_evaluation_any"}
    ),
}
# Lines of the author's code that a change is about; and the numbers or words that name what is to be changed.
_OF_CODE = "code_"
_SEES_CHANGE = {
    "checkpoint_to_gpu", "ranks_load_to_one", "one_device_holds_more", "one_device_gathers", "parallel_slots",
    "above_block_limit", "limit_binds", "mps_watermark", "driver_buffer_limit", "told_runs_without", "told_split",
    "smaller_share_helps", "told_unpinned", "data_on_device", "paddle_share", "optimizer_set_up", "marian_workspace",
    "compiles", "told_no_grad",
}  # fmt: skip
_SURE = (Confidence.CERTAIN, Confidence.LIKELY)


def is_told_plainly(key: str, diagnosis: Diagnosis) -> bool:
    """Whether a change needs no check before it: by its own sentence, its record, and what the text shows of it."""
    if diagnosis.story.proposals or key in printed_by_message(diagnosis) or diagnosis.confidence is Confidence.CERTAIN:
        return True
    is_sure = diagnosis.confidence in _SURE or is_settled(diagnosis.cause, diagnosis.told)
    return is_sure and is_founded(key, diagnosis)


def is_founded(key: str, diagnosis: Diagnosis) -> bool:
    """Whether a change is true of the run if its cause is the one that is named; its sentence may say when it is."""
    may_be = not is_doubtful(key) or is_settled(diagnosis.cause, diagnosis.told)
    return (may_be and (has_condition(key) or _is_broad(key, diagnosis))) or is_proven(key) or is_shown(key, diagnosis)


@cache
def has_condition(key: str) -> bool:
    """Whether a change's sentence says itself when it helps."""
    sentence = {**PROGRAM_REMEDIES, **REMEDIES}.get(f"remedy_{key}", "")
    return isinstance(sentence, str) and any(word in sentence for word in _CONDITIONS)


def _is_broad(key: str, diagnosis: Diagnosis) -> bool:
    return key in _BROAD["host" if diagnosis.cause in HOST_CAUSES else "device"]


def is_shown(key: str, diagnosis: Diagnosis) -> bool:
    """Whether the text shows what is to be changed: a line of its code, a number, or the setting's present value."""
    known = {one.key for one in diagnosis.evidence}
    is_set = bool(diagnosis.program) and is_limited(key, diagnosis.program, diagnosis.limits)
    if key == "sdpa" and diagnosis.cause is Cause.ATTENTION_SCORES and "tensor_matches" in known:
        return True  # scores of just these sizes were requested, so they are stored
    return is_set or bool(known & _SEES_CHANGE) or any(one.startswith(_OF_CODE) for one in known)
