"""Causes, the evidence for them, and the confidence of a judgement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Cause(str, Enum):
    """Why memory ran out; the names that %oom_explain and its data use."""

    FRAGMENTATION = "fragmentation"
    OTHER_PROCESS = "other_process"
    REQUEST_ALONE_TOO_BIG = "request_alone_too_big"
    WEIGHTS_TOO_BIG = "weights_too_big"
    ACTIVATIONS = "activations"
    LOGITS_OR_LOSS = "logits_or_loss"
    ATTENTION_SCORES = "attention_scores"
    OPTIMIZER_STATE = "optimizer_state"
    LEAK_OR_RETAINED_REFERENCE = "leak_or_retained_reference"
    MEMORY_FRACTION_LIMIT = "memory_fraction_limit"
    SYSMEM_FALLBACK = "sysmem_fallback"
    HOST_RAM = "host_ram"
    SHARED_MEMORY = "shared_memory"
    DRIVER_LEVEL = "driver_level"
    NOT_OOM = "not_oom"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        """The key, as JSON and the catalogue have it."""
        return self.value


# What a run's inputs take grows with their size.
INPUT_CAUSES = (Cause.ACTIVATIONS, Cause.ATTENTION_SCORES, Cause.LOGITS_OR_LOSS, Cause.UNKNOWN)
HOST_CAUSES = frozenset({Cause.HOST_RAM, Cause.SHARED_MEMORY})


class Confidence(str, Enum):
    """How sure a judgement is; the catalogue has the words."""

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"
    OPEN = "open"

    def __str__(self) -> str:
        """The key, as JSON and the catalogue have it."""
        return self.value


@dataclass(frozen=True)
class Evidence:
    """One fact behind a judgement: a key of the catalogue, and the values in its sentence."""

    key: str
    values: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Support:
    """One reason for a cause: its weight by itself (0 to 1; negative: against the cause), and its sentence."""

    cause: Cause
    weight: float
    evidence: Evidence | None = None


@dataclass(frozen=True)
class PossibleCause:
    """A cause with its degree (0 to 1), the evidence for it and the one check that would settle it."""

    cause: Cause
    degree: float
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    check: Evidence


@dataclass(frozen=True)
class Judgement:
    """A cause with the evidence for it; iterable as ``cause, evidence, confidence``.

    ``possible`` holds all causes that a text leaves possible, the likeliest first, where it was judged by its text.
    """

    cause: Cause
    evidence: tuple[Evidence, ...]
    confidence: Confidence
    possible: tuple[PossibleCause, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether stronger evidence may name another cause."""
        return self.cause is Cause.UNKNOWN or self.confidence in (Confidence.POSSIBLE, Confidence.OPEN)

    @property
    def is_certain(self) -> bool:
        """Whether nothing else that is found can be the cause. What is kept needlessly fills any limit."""
        return self.confidence is Confidence.CERTAIN and self.cause is not Cause.MEMORY_FRACTION_LIMIT

    @property
    def without_doubts(self) -> tuple[Evidence, ...]:
        """The evidence without the entries that only say what is unknown."""
        return tuple(one for one in self.evidence if one.key not in DOUBTS)

    def __iter__(self) -> Iterator[Cause | tuple[Evidence, ...] | Confidence]:
        """``cause, evidence, confidence``, to be unpacked."""
        return iter((self.cause, self.evidence, self.confidence))


# Evidence that only says what is unknown; it is dropped once a cause is found.
DOUBTS = ("whose_not_said", "why_not_granted")
