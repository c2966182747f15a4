"""Settling a cause by a run that is known: what filled the memory when it failed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from oom_magic.explain.causes import Cause, Confidence, Evidence, Judgement

if TYPE_CHECKING:
    from oom_magic.explain.diagnosis import Diagnosis
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.setups.setup import TrainingSetup

_CAUSES = {
    "parameter": Cause.WEIGHTS_TOO_BIG,
    "optimizer_state": Cause.OPTIMIZER_STATE,
    "activation": Cause.ACTIVATIONS,
}


def settled(judgement: Judgement, report: MemoryReport) -> Judgement:
    """The judgement, settled where nothing else did by the category that filled most of the memory."""
    if judgement.cause is not Cause.UNKNOWN:
        return judgement
    allocated = report.breakdown.total_bytes
    name, num_bytes = max(report.breakdown.items(), key=lambda item: item[1], default=("", 0))
    if name not in _CAUSES or 2 * num_bytes < allocated:
        return judgement
    evidence = Evidence(
        "category_fills",
        {"category_key": f"category_{name}", "category_bytes": num_bytes, "allocated_bytes": allocated},
    )
    return Judgement(_CAUSES[name], (*judgement.evidence, evidence), Confidence.LIKELY)


def settled_by_setup(diagnosis: Diagnosis, setup: TrainingSetup) -> Diagnosis:
    """The diagnosis, its cause settled by a dry run of the setup if that runs out of memory too."""
    if diagnosis.cause is not Cause.UNKNOWN:
        return diagnosis
    try:
        report = setup.dry_run()
    except Exception:  # a library that is missing; the remedies then say why nothing is priced
        return diagnosis
    if report.out_of_memory is None:
        return diagnosis
    judgement = settled(Judgement(diagnosis.cause, diagnosis.evidence, diagnosis.confidence), report)
    cause, evidence, confidence = judgement.cause, judgement.evidence, judgement.confidence
    return replace(diagnosis, cause=cause, evidence=evidence, confidence=confidence)
