"""Diagnosis: what a failure means, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from oom_magic.explain.evidence.budget import Budget
from oom_magic.explain.evidence.causes import Cause, Confidence, Evidence, PossibleCause
from oom_magic.explain.evidence.clues.environment import ONE_MEMORY
from oom_magic.explain.evidence.clues.story import Story
from oom_magic.explain.evidence.judging import main_failure
from oom_magic.explain.evidence.tensors import TensorCandidate
from oom_magic.explain.live.holders import Holder
from oom_magic.explain.messages.failure import Failure
from oom_magic.language import Language
from oom_magic.results import Result

if TYPE_CHECKING:
    from oom_magic.explain.live.growth import Growth
    from oom_magic.explain.remedies.remedy import AsItIs, Remedy
    from oom_magic.predict.setups.setup import Phrase


_NO_STORY = Story()


@dataclass(frozen=True, repr=False)
class Diagnosis(Result):
    """What a failure means, as plain data: it keeps no tensor, frame or exception alive."""

    failures: tuple[Failure, ...] = ()  # the messages found
    is_oom: bool | None = None  # whether memory ran out; None: not established

    # The judgement
    cause: Cause = Cause.UNKNOWN
    evidence: tuple[Evidence, ...] = ()
    confidence: Confidence = Confidence.OPEN

    # Where it failed, and what was requested
    phase: str | None = None  # of training
    tensors: tuple[TensorCandidate, ...] = ()
    tensor_note: str = ""  # why there are no candidates: a key of the catalogue
    budget: Budget | None = None  # who held the device
    growth: Growth | None = None  # what grew in the loop that failed

    remedies: tuple[Remedy, ...] = ()
    as_is: AsItIs | None = None  # the rehearsed run without a remedy
    facts: tuple[Evidence, ...] = ()  # how to read the message's numbers
    tip: Evidence | None = None  # what PyTorch's own tip against fragmentation is worth here
    holders: tuple[Holder, ...] = ()  # what else holds memory

    # What the text says of the run and its environment
    frameworks: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    expandable_segments: bool = False
    possible: tuple[PossibleCause, ...] = ()  # all causes that it leaves possible, with the check that would decide
    program: str = ""  # the server, pipeline or runtime that failed, if no training did
    limits: Mapping[str, float] = field(default_factory=dict)  # of the run: a share, a context, layers, workers
    told: frozenset[str] = frozenset()  # facts about the run: keys of ``author_words`` and ``author_setting``
    run: Mapping[str, int | str] = field(default_factory=dict)  # its model, batch, seq and method
    accelerator: str | None = None
    story: Story = _NO_STORY  # the causes and fixes that its author names

    place: str = ""  # the file and line that failed
    code: str = ""  # the text of that line
    setup_phrases: tuple[Phrase, ...] = ()  # the TrainingSetup in words, if one was given
    lang: Language = "en"

    @property
    def main_failure(self) -> Failure | None:
        """The failure that the judgement is about."""
        return main_failure(self.failures)

    @property
    def backend(self) -> str | None:
        """The library whose memory ran out, according to its message; None without a message."""
        failure = self.main_failure
        return None if failure is None else failure.backend

    @property
    def is_loading(self) -> bool:
        """Whether it failed while a model was loaded."""
        return self.phase == "loading" or (self.phase is None and "loads" in self.told)

    @property
    def has_one_memory(self) -> bool:
        """Whether the machine's CPU and GPU share one memory."""
        return bool(ONE_MEMORY & set(self.systems))

    @property
    def offloads_to_host(self) -> bool:
        """Whether the run keeps parameters or optimizer state in the host's memory."""
        return "offloads_to_host" in self.told

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        plain = asdict(self)
        plain["failures"] = [failure.to_dict() for failure in self.failures]
        plain["told"] = sorted(self.told)
        return plain | {"cause": self.cause.value, "confidence": self.confidence.value}
