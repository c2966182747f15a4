"""Remedies by name: with their code and the values that their sentences name, and the reason why they have no price."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oom_magic.explain.evidence.causes import HOST_CAUSES, Cause, Confidence, Evidence
from oom_magic.explain.evidence.checks import SERVERS, device_tool
from oom_magic.explain.evidence.clues.pasted_code import without_graph
from oom_magic.explain.evidence.clues.whose_code import SHOWN
from oom_magic.explain.evidence.judging import IN_ANY_MESSAGE
from oom_magic.explain.evidence.tensors import NO_LANGUAGE_MODEL
from oom_magic.explain.remedies.code import code_for, for_backend
from oom_magic.explain.remedies.from_text.applicable import applicable, told_shortly
from oom_magic.explain.remedies.from_text.choice import printed_by_message, remedies_of_run, text_remedies
from oom_magic.explain.remedies.from_text.kind_of_run import (
    CUDA_IN_CODE,
    facts_of,
    is_of_pytorch,
    names_tokens,
    shows_transformers,
    style_of,
    trains,
    trains_in_pytorch,
)
from oom_magic.explain.remedies.from_text.lines import OF_SETTINGS, code_of, setting_of
from oom_magic.explain.remedies.from_text.needs import may_show_code
from oom_magic.explain.remedies.remedy import Remedy

if TYPE_CHECKING:
    from oom_magic.explain.diagnosis import Diagnosis

# Evidence that quotes the line which keeps tensors alive.
_KEEPING_LINES = ("code_appends_tensors", "code_sums_tensors", "code_averages_tensors")
_VALUES: Mapping[str, Mapping[str, Any]] = {
    "detach": {
        "fixed": "losses.append(loss.item())",
        "pairs": "losses.append(loss.item())\n# instead of losses.append(loss)",
    },
    "mixed_precision": {"dtype": "bf16"},
    "half_setting": {"dtype": "bf16"},
    "training_settings": {"dtype": "bf16"},
    "half_weights": {"dtype": "bf16"},
    "half_weights_if": {"dtype": "bf16"},
    "lora": {"rank": 16},
    "qlora": {"rank": 16},
}
_IN_HALF = ("mixed_precision", "half_setting", "training_settings", "half_weights", "half_weights_if")
_OF_PICTURES = {"makes_pictures", "diffuses", "of_no_tokens", "of_latents"}
# Programs whose settings bound what they keep for requests, whatever filled the rest.
_WITH_CACHE = (*SERVERS, "exllama", "lmdeploy", "llama_cpp", "ollama")
_CHECKS = ("check_processes",)
_SETTINGS_ONLY = {"trains_by_settings", "shows_settings"}
_OF_PICTURES_MADE = {"makes_pictures", "diffuses"}
# What others hold, or what a run keeps by mistake: no change to the run itself saves it.
_OF_NO_RUN = (
    Cause.OTHER_PROCESS,
    Cause.LEAK_OR_RETAINED_REFERENCE,
    Cause.DRIVER_LEVEL,
    Cause.REQUEST_ALONE_TOO_BIG,
)
_NO_RUN = Evidence("reason_no_run")
_NO_CODE = Evidence("reason_no_code")
_NO_CODE_OR_RUN = Evidence("reason_no_code_or_run")
_NOT_PYTORCH = Evidence("reason_not_pytorch")
_ELSEWHERE = Evidence("reason_other_program")
_OF_HOST = Evidence("reason_host")


def unpriced_remedies(diagnosis: Diagnosis, reason: Evidence = _NO_RUN) -> tuple[Remedy, ...]:
    """The remedies for the cause, not evaluated, each with the given reason."""
    if diagnosis.is_oom is False or (diagnosis.main_failure is None and diagnosis.cause is Cause.UNKNOWN):
        return ()
    elsewhere = text_remedies(diagnosis) if diagnosis.growth is None else None
    is_program = elsewhere is not None and bool(diagnosis.program)
    is_text = reason is _NO_RUN
    facts = facts_of(diagnosis, is_text=is_text)
    keys = elsewhere if is_program and elsewhere is not None else remedies_of_run(diagnosis, elsewhere, is_text=is_text)
    if is_text and diagnosis.confidence is Confidence.OPEN and not _may_be_advised(diagnosis, facts):
        keys = tuple(key for key in keys if key in _CHECKS)  # what they find decides
    printed = tuple(applicable(diagnosis, printed_by_message(diagnosis), is_text=is_text))
    keys = tuple(dict.fromkeys(applicable(diagnosis, keys, is_text=is_text)))
    if is_text and not diagnosis.story.proposals:  # a guide names many, and each is judged
        keys = told_shortly(tuple(key for key in keys if key not in printed), diagnosis)
    keys = tuple(dict.fromkeys((*printed, *keys)))
    style = "plain" if is_program else style_of(diagnosis)
    if is_program:
        reason = _ELSEWHERE
    elif diagnosis.cause in HOST_CAUSES:
        reason = _OF_HOST
    elif is_text:
        style = "generic" if style == "plain" and not shows_transformers(diagnosis) else style
        reason = _way_to_prices(diagnosis)
    return tuple(_named(key, cost, diagnosis, style, reason, facts) for cost, key in enumerate(keys))


def _may_be_advised(diagnosis: Diagnosis, facts: frozenset[str]) -> bool:
    """Whether the usual changes are right though the cause is open: the message's, a guide's, a server's limits, and
    those of a training in PyTorch, whose allocator printed the message."""
    if printed_by_message(diagnosis) or diagnosis.story.proposals:
        return True
    if diagnosis.program in _WITH_CACHE:
        return diagnosis.cause not in HOST_CAUSES
    return trains_in_pytorch(diagnosis, facts)


def _way_to_prices(diagnosis: Diagnosis) -> Evidence:
    """What a rehearsal lacks: settings describe the training of a model of tokens, code any run of PyTorch on a GPU."""
    if diagnosis.cause in _OF_NO_RUN or "reinforces" in diagnosis.told:
        return _ELSEWHERE  # settings describe no training that generates, too
    if trains(diagnosis) and names_tokens(diagnosis):
        return _NO_RUN
    is_in_python = "in_another_language" not in diagnosis.told
    if diagnosis.backend not in CUDA_IN_CODE or not (is_of_pytorch(diagnosis) and is_in_python):
        return _NOT_PYTORCH
    if _SETTINGS_ONLY & diagnosis.told and "shows_code" not in diagnosis.told:
        return _ELSEWHERE
    # A run is described, and nothing shows that it is of tokens.
    is_another = bool(diagnosis.told - IN_ANY_MESSAGE - SHOWN)
    if is_another and "shows_code" not in diagnosis.told and not diagnosis.place:
        return _ELSEWHERE  # whose code it is, and whether there is any to run, is not known
    if diagnosis.told & _OF_PICTURES_MADE and not (trains(diagnosis) or diagnosis.place):
        return _NOT_PYTORCH  # by a page, not by code
    of_pictures = _OF_PICTURES & diagnosis.told or NO_LANGUAGE_MODEL.search(diagnosis.code)
    return _NO_CODE if is_another or of_pictures or SHOWN & diagnosis.told else _NO_CODE_OR_RUN


def _named(key: str, cost: int, diagnosis: Diagnosis, style: str, note: Evidence, facts: frozenset[str]) -> Remedy:
    """A remedy by name, with its code as it is on the device that ran out."""
    values, growth = _values_of(key, diagnosis), diagnosis.growth
    if growth is not None and growth.fixed and key == growth.remedy:
        values = {**values, **growth.lines}
    elif growth is not None and key == "keep_grown":
        values = {"name": growth.name, "code": growth.code}
    code, language = code_of(key, diagnosis) or code_for(key, style, values)
    is_another = language == "python" and "in_another_language" in diagnosis.told
    if is_another or not may_show_code(key, facts):
        code = ""
    return Remedy(key, cost, "same", values, note=note, code=for_backend(code, diagnosis.backend), language=language)


def _values_of(key: str, diagnosis: Diagnosis) -> Mapping[str, Any]:
    """The values that a remedy's sentence names."""
    if key in OF_SETTINGS:
        return setting_of(key, diagnosis)
    if key == "smaller_batch_any" and "batch" in diagnosis.run:
        batch, steps = int(diagnosis.run["batch"]), int(diagnosis.limits.get("accumulation", 1))
        return {"half": max(batch // 2, 1), "twice": 2 * steps, "sizes": f"now {batch}, {steps}"}
    if key == "generation_share":
        of_verl = "actor_rollout_ref.rollout.gpu_memory_utilization"
        return {"setting": of_verl if "by_verl" in diagnosis.told else "vllm_gpu_memory_utilization"}
    if key in ("close_processes_any", "check_processes", "whose_process"):
        return {"tool": device_tool(diagnosis.backend, diagnosis.accelerator)}
    if key == "detach":
        lines = (str(one.values["line"]) for one in diagnosis.evidence if one.key in _KEEPING_LINES)
        mended = next(((line, fixed) for line in lines if (fixed := without_graph(line))), None)
        if mended is not None:
            return {"fixed": mended[1], "pairs": f"{mended[1]}\n# instead of {mended[0]}"}
    if key in _IN_HALF and "predates_bf16" in diagnosis.told:
        return {"dtype": "fp16"}
    return _VALUES.get(key, {})
