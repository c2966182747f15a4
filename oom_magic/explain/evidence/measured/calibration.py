"""How sure a text makes of its cause, as measured: by how often such answers were right at first sight.

``calibration.json`` counts answers to public reports that the code had never seen. Told as likely or certain 95 % of
245 were right; told as possible or open, 84 % of 493, and with the causes that were established where they were not,
95 to 97 %. So a ground that was often wrong makes a cause only possible, and what is possible is told with its rivals.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from oom_magic.explain.evidence.causes import HOST_CAUSES, Cause, Confidence, Evidence, Judgement, PossibleCause
from oom_magic.explain.evidence.checks import check_for, is_settled
from oom_magic.explain.evidence.clues.traceback import Clues
from oom_magic.explain.evidence.measured.contradicted import is_sure_of
from oom_magic.explain.messages.failure import Failure

_SURE = (Confidence.LIKELY, Confidence.CERTAIN)
_NOT_SURE = (Confidence.POSSIBLE, Confidence.OPEN)
# Few answers say little: each ground begins as if ten had been as right as all of them were.
_USUAL, _AS_MANY = 0.95, 10
_SELDOM = 0.85  # of 47 answers whose grounds had been seen once or twice, 40 were right
_READ_IN_A_TEXT = ("told_", "phase_", "stage_")  # words, frames, logs: no numbers, and no line that names the tensor
_LIKELY_FROM = 0.9
# Changes that an author made in vain, each of which would have helped had the cause been this.
_WOULD_HAVE_HELPED = {
    Cause.SHARED_MEMORY: {"tried_workers", "tried_shared"},
    Cause.FRAGMENTATION: {"tried_segments"},
    Cause.ACTIVATIONS: {"batch_of_one", "has_batch_of_one"},
}
_MOST_NAMED = 3
_OF_A_RIVAL = 0.1


@dataclass(frozen=True)
class Calibration:
    """The established causes where another was named, the most frequent first; and [right, of] by cause and ground."""

    rivals: Mapping[Cause, tuple[Cause, ...]]
    grounds: Mapping[Cause, Mapping[str, tuple[int, int]]]

    def precision(self, cause: Cause, evidence: Collection[Evidence]) -> float:
        """How often a cause with this evidence was right; of several pieces, the best counts."""
        known = self.grounds.get(cause, {})
        counts = [known[one.key] for one in evidence if one.key in known]
        is_seldom = not counts and evidence and all(one.key.startswith(_READ_IN_A_TEXT) for one in evidence)
        usual = _SELDOM if is_seldom else _USUAL
        return max(((right + _USUAL * _AS_MANY) / (of + _AS_MANY) for right, of in counts), default=usual)


def calibrated(judgement: Judgement, failure: Failure | None, clues: Clues, impossible: Collection[Cause]) -> Judgement:
    """The judgement of a text: not surer than such answers were right, with its rivals where it is not sure."""
    table = calibration()
    is_in_vain = _WOULD_HAVE_HELPED.get(judgement.cause, set()) & clues.run.told
    is_weak = table.precision(judgement.cause, judgement.evidence) < _LIKELY_FROM
    is_weak = is_weak or not _may_be_sure(judgement, clues)
    if judgement.confidence in _SURE and (is_in_vain or is_weak):
        possible = tuple(
            replace(one, confidence=Confidence.POSSIBLE) if one.cause is judgement.cause else one
            for one in judgement.possible
        )
        judgement = replace(judgement, confidence=Confidence.POSSIBLE, possible=possible)
    if judgement.confidence not in _NOT_SURE or not judgement.possible:
        return judgement
    named = {one.cause for one in judgement.possible}
    rivals = [one for one in table.rivals.get(judgement.cause, ()) if one not in named and one not in impossible]
    if failure is None or failure.words:  # nothing but an author's words says whose memory it was
        rivals.sort(key=lambda one: one not in HOST_CAUSES)
    added = (
        PossibleCause(one, _OF_A_RIVAL, Confidence.OPEN, (), check_for(one, failure, clues))
        for one in rivals[: max(0, _MOST_NAMED - len(named))]
    )
    return replace(judgement, possible=(*judgement.possible, *added))


def _may_be_sure(judgement: Judgement, clues: Clues) -> bool:
    """Whether more than words that were often contradicted speaks for a cause, or its author has seen what would."""
    told = clues.run.told
    is_sure = is_sure_of(judgement.cause, judgement.evidence, names_gpu="speaks_of_gpu" in told)
    return is_sure or is_settled(judgement.cause, told)


@cache
def calibration() -> Calibration:
    """The counts of calibration.json."""
    table = json.loads(Path(__file__).with_name("calibration.json").read_text(encoding="utf-8"))
    rivals = {Cause(cause): tuple(Cause(one) for one in others) for cause, others in table["rivals"].items()}
    grounds = {
        Cause(cause): {key: (right, of) for key, (right, of) in known.items()}
        for cause, known in table["grounds"].items()
    }
    return Calibration(rivals, grounds)
