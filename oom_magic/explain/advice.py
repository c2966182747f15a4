"""From a diagnosis to remedies: priced where there is a run to rehearse, named where there is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oom_magic.explain.causes import Cause
from oom_magic.explain.rehearsal import NotPricedError, Rehearsal, SetupRehearsal
from oom_magic.explain.remedies import Remedy, Situation, price, ranked
from oom_magic.explain.remedy_code import code_for

if TYPE_CHECKING:
    from oom_magic.explain.diagnosis import Diagnosis
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.setups.gpus import GPU
    from oom_magic.predict.setups.setup import TrainingSetup

_STYLES = {"transformers Trainer": "trainer", "accelerate": "accelerate", "deepspeed": "accelerate"}

# What helps against each cause, the first step first. Keys of the catalogue (``remedy_<key>``).
_AGAINST: Mapping[Cause, tuple[str, ...]] = {
    Cause.ACTIVATIONS: (
        "smaller_batch_any",
        "mixed_precision",
        "sdpa",
        "checkpointing",
        "shorter_any",
        "lora",
    ),
    Cause.LOGITS_OR_LOSS: ("chunked_loss", "smaller_batch_any", "shorter_any"),
    Cause.ATTENTION_SCORES: ("sdpa", "smaller_batch_any", "shorter_any", "checkpointing"),
    Cause.OPTIMIZER_STATE: ("optimizer_8bit", "foreach", "adafactor", "lora", "half_weights"),
    Cause.WEIGHTS_TOO_BIG: ("half_weights", "qlora", "offload", "fsdp_any"),
    Cause.FRAGMENTATION: ("expandable_segments", "smaller_batch_any", "checkpointing"),
    Cause.OTHER_PROCESS: ("close_processes_any", "smaller_batch_any"),
    Cause.LEAK_OR_RETAINED_REFERENCE: ("detach", "no_grad", "free_held_any"),
    Cause.MEMORY_FRACTION_LIMIT: ("raise_limit", "smaller_batch_any"),
    Cause.REQUEST_ALONE_TOO_BIG: ("find_tensor", "sdpa", "chunked_loss", "smaller_batch_any"),
    Cause.SYSMEM_FALLBACK: ("fallback_policy", "half_weights", "qlora", "smaller_batch_any"),
    Cause.HOST_RAM: ("fewer_workers", "stream_data"),
    Cause.SHARED_MEMORY: ("shared_memory", "fewer_workers"),
    Cause.DRIVER_LEVEL: ("close_processes_any", "smaller_batch_any"),
    Cause.UNKNOWN: ("smaller_batch_any", "mixed_precision", "checkpointing", "close_processes_any"),
}
_VALUES: Mapping[str, Mapping[str, Any]] = {
    "mixed_precision": {"dtype": "bf16"},
    "half_weights": {"dtype": "bf16"},
    "lora": {"rank": 16},
    "qlora": {"rank": 16},
}
_UNPRICED = "no_run"


def advise(
    diagnosis: Diagnosis, rehearsal: Rehearsal, gpu: GPU, report: MemoryReport | None = None
) -> Iterator[Diagnosis]:
    """The diagnosis with more and more remedies, ranked, as they are priced by rehearsing the run.

    ``report`` is the MemoryReport of the run that failed, if there is one. Where the run cannot be rehearsed
    the remedies come named, not priced, with the reason.
    """
    found: list[Remedy] = []
    try:
        for remedy in price(rehearsal, situation_of(diagnosis, gpu, report)):
            found.append(remedy)
            yield replace(diagnosis, remedies=ranked(found))
    except NotPricedError as reason:
        yield replace(diagnosis, remedies=(*ranked(found), *named(diagnosis, str(reason))))


def advise_setup(diagnosis: Diagnosis, setup: TrainingSetup) -> Iterator[Diagnosis]:
    """``advise`` for a run described by its settings."""
    from oom_magic.predict.setups.gpus import find_gpu

    yield from advise(diagnosis, SetupRehearsal(setup), find_gpu(setup.gpu))


def named(diagnosis: Diagnosis, reason: str = _UNPRICED) -> tuple[Remedy, ...]:
    """What helps against the cause, without prices; ``note`` says why (a key of the catalogue, or words)."""
    if diagnosis.is_oom is False:
        return ()
    style = _style(diagnosis)
    remedies = []
    for cost, key in enumerate(_AGAINST.get(diagnosis.cause, ())):
        values = _VALUES.get(key, {})
        code, language = code_for(key, style, values)
        remedies.append(Remedy(key, cost, "same", values, note=reason, code=code, language=language))
    return tuple(remedies)


def situation_of(diagnosis: Diagnosis, gpu: GPU, report: MemoryReport | None = None) -> Situation:
    """The card as the failed run found it: from its message where that says it, else as the catalogue has it."""
    failure = diagnosis.main_failure
    usable, others = max(gpu.total_bytes - gpu.context_bytes, 0), 0
    if report is not None:
        usable, others = report.device.usable_bytes, report.device.other_bytes
    elif failure is not None and failure.free_bytes is not None and failure.pytorch_bytes is not None:
        usable = failure.pytorch_bytes + failure.free_bytes
        others = failure.listed_other_bytes or 0
    if failure is not None and failure.limit_bytes is not None:
        usable = min(usable, failure.limit_bytes)
    return Situation(
        usable_bytes=usable,
        gpu=gpu,
        other_bytes=others,
        style=_style(diagnosis),
        phase=diagnosis.phase,
        expandable_segments=diagnosis.expandable_segments,
        is_windows=bool({"Windows", "WSL"} & set(diagnosis.systems)),
    )


def _style(diagnosis: Diagnosis) -> str:
    return next((_STYLES[name] for name in diagnosis.frameworks if name in _STYLES), "plain")
