"""Diagnosis: what a failure means, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from oom_magic.explain.evidence.budget import Budget
from oom_magic.explain.evidence.causes import Cause, Confidence, Evidence, PossibleCause
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
    """What a failure means, as plain data: it keeps no tensor, frame or exception alive.

    ``failures`` are the messages found, ``is_oom`` whether memory ran out (None: not established), ``cause`` with its
    ``evidence`` and ``confidence`` the judgement, ``phase`` where in training it happened (``place`` and ``code``: the
    line), ``tensors`` what may have been requested (``tensor_note``, a key of the catalogue, where nothing did),
    ``budget`` who held the device, ``holders`` what else holds memory, ``growth`` what grew in the loop that failed,
    ``remedies`` what to change, ``as_is`` the rehearsed run without them, ``facts`` how to read the numbers, ``tip``
    what PyTorch's own tip against fragmentation is worth here. ``possible`` are all causes that a text leaves possible,
    each with its degree and the check that would settle it, ``program`` the server, pipeline or runtime that failed
    where no training did, ``told`` what the text's author says of the run (keys of ``run_facts``), ``run`` the run's
    ``model``, ``batch`` and ``seq`` where it names them, ``limits`` other limits that it gives (a share, a context,
    layers, workers), ``story`` the causes and the ways out that it names. ``lang`` is the language that it is shown in.
    """

    failures: tuple[Failure, ...] = ()
    is_oom: bool | None = None
    cause: Cause = Cause.UNKNOWN
    evidence: tuple[Evidence, ...] = ()
    confidence: Confidence = Confidence.OPEN
    phase: str | None = None
    tensors: tuple[TensorCandidate, ...] = ()
    tensor_note: str = ""
    budget: Budget | None = None
    growth: Growth | None = None
    remedies: tuple[Remedy, ...] = ()
    as_is: AsItIs | None = None
    facts: tuple[Evidence, ...] = ()
    tip: Evidence | None = None
    holders: tuple[Holder, ...] = ()
    frameworks: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    expandable_segments: bool = False
    possible: tuple[PossibleCause, ...] = ()
    program: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)
    told: frozenset[str] = frozenset()
    run: Mapping[str, int | str] = field(default_factory=dict)
    accelerator: str | None = None
    story: Story = _NO_STORY
    place: str = ""
    code: str = ""
    setup_phrases: tuple[Phrase, ...] = ()
    lang: Language = "en"

    @property
    def main_failure(self) -> Failure | None:
        """The failure that the judgement is about."""
        return main_failure(self.failures)

    @property
    def backend(self) -> str | None:
        """The library whose memory ran out, as its message says; None where there is no message."""
        failure = self.main_failure
        return None if failure is None else failure.backend

    @property
    def is_loading(self) -> bool:
        """Whether it failed while a model was loaded."""
        return self.phase == "loading" or "loads" in self.told

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
