"""Remedies for a diagnosis: with prices where the run can be rehearsed, by name where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oom_magic.explain.evidence.causes import HOST_CAUSES, Cause, Confidence, Evidence
from oom_magic.explain.evidence.clues.pasted_code import without_graph
from oom_magic.explain.evidence.judging import IN_ANY_MESSAGE, device_tool
from oom_magic.explain.evidence.number_rules import unlisted_bytes
from oom_magic.explain.evidence.tensors import NO_LANGUAGE_MODEL
from oom_magic.explain.live.holders import earlier_bytes
from oom_magic.explain.live.refinement import refine_with_remedy, without_fragmentation
from oom_magic.explain.remedies.code import code_for, for_backend
from oom_magic.explain.remedies.evaluation import RemedyEvaluator
from oom_magic.explain.remedies.from_text.choice import (
    AGAINST_IN_ANY_RUN,
    is_evaluation,
    printed_by_message,
    text_remedies,
    trains,
)
from oom_magic.explain.remedies.from_text.lines import OF_SETTINGS, code_of, setting_of
from oom_magic.explain.remedies.rehearsal import NotEvaluatedError, Rehearsal, SetupRehearsal
from oom_magic.explain.remedies.remedy import AsItIs, Remedy, Situation, ranked
from oom_magic.inputs import parse_bytes
from oom_magic.units import GIB

if TYPE_CHECKING:
    from oom_magic.explain.diagnosis import Diagnosis
    from oom_magic.memory.report import Device, MemoryReport
    from oom_magic.predict.setups.gpus import GPU
    from oom_magic.predict.setups.setup import TrainingSetup

_STYLES = {"transformers Trainer": "trainer", "accelerate": "accelerate", "deepspeed": "accelerate"}

# What helps against each cause, the first step first. Keys of the catalogue (``remedy_<key>``).
AGAINST: Mapping[Cause, tuple[str, ...]] = {
    Cause.ACTIVATIONS: (
        "smaller_batch_any",
        "mixed_precision",
        "sdpa",
        "checkpointing",
        "shorter_sequences_any",
        "lora",
    ),
    Cause.LOGITS_OR_LOSS: ("chunked_loss", "smaller_batch_any", "shorter_sequences_any", "checkpointing"),
    Cause.ATTENTION_SCORES: ("sdpa", "smaller_batch_any", "shorter_sequences_any", "checkpointing"),
    Cause.OPTIMIZER_STATE: ("optimizer_8bit", "foreach", "adafactor", "lora", "half_weights"),
    Cause.WEIGHTS_TOO_BIG: ("half_weights", "qlora", "offload", "fsdp_any"),
    Cause.FRAGMENTATION: ("expandable_segments", "smaller_batch_any", "checkpointing"),
    Cause.OTHER_PROCESS: ("close_processes_any", "smaller_batch_any"),
    Cause.LEAK_OR_RETAINED_REFERENCE: ("detach", "no_grad", "free_held_any"),
    Cause.MEMORY_FRACTION_LIMIT: ("raise_limit", "smaller_batch_any"),
    Cause.REQUEST_ALONE_TOO_BIG: ("find_tensor", "sdpa", "chunked_loss", "smaller_batch_any"),
    Cause.SYSMEM_FALLBACK: ("fallback_policy", "half_weights", "qlora", "smaller_batch_any"),
    Cause.HOST_RAM: ("fewer_workers", "stream_data"),
    Cause.SHARED_MEMORY: ("shared_memory", "fewer_waiting"),
    Cause.DRIVER_LEVEL: ("smaller_batch_any",),
    Cause.UNKNOWN: ("smaller_batch_any", "mixed_precision", "checkpointing"),
}
# Evidence that quotes the line which keeps tensors alive.
_KEEPING_LINES = ("code_appends_tensors", "code_sums_tensors", "code_averages_tensors")
_OF_LANGUAGE_MODELS = ("sdpa", "shorter_sequences_any", "lora", "qlora", "chunked_loss")
_OF_INPUTS = (Cause.ACTIVATIONS, Cause.ATTENTION_SCORES, Cause.LOGITS_OR_LOSS, Cause.UNKNOWN)
_OF_EACH_TENSOR = "exp_avg_sq.sqrt()"  # torch/optim/adam.py, _single_tensor_adam: without foreach
_AT_EVALUATION = ("no_grad", "smaller_evaluation_any")
# Remedies that apply to training only.
_OF_TRAINING = {
    "half_weights", "mixed_precision", "checkpointing", "smaller_batch_any", "optimizer_8bit", "foreach", "adafactor",
    "lora", "fsdp_any",
}  # fmt: skip
_VALUES: Mapping[str, Mapping[str, Any]] = {
    "detach": {"fixed": "losses.append(loss.item())", "code": "losses.append(loss)"},
    "mixed_precision": {"dtype": "bf16"},
    "half_weights": {"dtype": "bf16"},
    "lora": {"rank": 16},
    "qlora": {"rank": 16},
}
_ALONE = ("offload",)  # for one process with all cards
_OF_RANKS = {"deepspeed", "FSDP"}
_IN_HALF = ("mixed_precision", "half_weights")
# Whether a run described by its settings has a remedy's change already.
_IS_SO: Mapping[str, Callable[[TrainingSetup], bool]] = {
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
# Remedies that take other weights, and remedies for language models.
_QUANTIZING = ("quantized_model", "comfy_fp8", "qlora", "loaded_4bit", "loaded_8bit")
# The fact about a run that makes a remedy needless.
_HAD_BY = {
    "lora": "has_lora", "mixed_precision": "has_half", "half_weights": "has_half", "checkpointing": "has_checkpointing",
    "smaller_batch_any": "has_batch_of_one",
}  # fmt: skip
# Remedies whose code belongs into the author's own loop or model.
_OF_A_LOOP = {
    "smaller_batch_any",
    "mixed_precision",
    "checkpointing",
    "sdpa",
    "no_grad",
    "chunked_loss",
    "half_weights",
}
_DESCRIBED = {"trains", "infers", "evaluates"}
# Evidence that shows others on the device.
_SHOWS_OTHERS = {
    "others_listed", "others_unlisted", "told_shared", "told_left_over", "device_seen_full", "device_is_open",
    "no_context", "little_free_at_start", "told_frees_at_end", "meaning_vllm_startup",
}  # fmt: skip
_TRIED = {
    "server_share": "tried_share", "larger_share": "tried_share",
    "shorter_context": "tried_length", "fewer_waiting": "tried_workers", "mps_watermark": "tried_watermark",
    "smaller_batch_any": "tried_batch",
}  # fmt: skip
_HOSTED = {"Kaggle", "Colab"}
_OF_TOKENS = ("vllm", "sglang", "tgi", "server", "quantizing")
# Remedies that need something the text speaks of.
_OF_WHAT_IS_TOLD = {
    "vllm_pictures": {"sees_pictures"},
    "stream_data": {"trains", "infers", "attends", "loads", "loads_data", "handles_files", "saves", "merges"},
    "free_held_any": {"in_notebook", "kernel_dies"},
    "no_grad": {"evaluates", "infers", "lacks_no_grad", "keeps_predictions"},
}
_OF_DIFFUSION = ("diffusers_vae", "pictures_offload", "quantized_model")
_LARGEST_SHARE = 0.95  # of a server's; the rest is the driver's and the context's
_SHARES = ("tf_growth", "jax_preallocate")
_OF_TRANSFORMERS = ("transformers Trainer", "PEFT", "vLLM", "bitsandbytes", "deepspeed", "FSDP")
_LARGE_INPUT = {"input_named", "larger_input_fails"}
_ON_A_MAC = {"raise_limit": "mps_watermark", "webui_attention": "webui_attention_mac"}
# On a Mac: the allocator has no expandable segments, the GPU shares the RAM, and bitsandbytes does not support it.
_NOT_ON_A_MAC = {"expandable_segments", "offload", "fsdp_any", "qlora", "optimizer_8bit"}
_REHEARSED = ("cuda", "hip")  # both are "cuda" in code
_OF_PICTURES = {"makes_pictures", "diffuses", "of_no_tokens", "of_latents"}
_MOST_CHECKED = 3  # remedies that are rehearsed to the run's end
_HUGE_BYTES = 24 * GIB  # of one tensor: more than most cards have
_NOTICEABLY = 1.01  # times what the steps need
_SAME_SIZE = 0.02  # cards of one model differ by less
_NO_RUN = Evidence("reason_no_run")
_FITS = Evidence("reason_fits_as_it_is")
NOT_ASKED = Evidence("reason_fast")
_NOT_YET = Evidence("reason_not_yet")
_NO_CODE = Evidence("reason_no_code")
_NO_CODE_OR_RUN = Evidence("reason_no_code_or_run")
_NOT_PYTORCH = Evidence("reason_not_pytorch")
_ELSEWHERE = Evidence("reason_other_program")
_OF_HOST = Evidence("reason_host")
_NOTHING_SAVES = Evidence("reason_nothing_saves")


def before_evaluation(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis as it is shown until the first remedy is evaluated."""
    return replace(diagnosis, remedies=unpriced_remedies(diagnosis, _NOT_YET))


def advise(
    diagnosis: Diagnosis,
    rehearsal: Rehearsal,
    gpu: GPU,
    report: MemoryReport | None = None,
    memory: int | None = None,
    device: Device | None = None,
) -> Iterator[Diagnosis]:
    """The diagnosis with a ranked list of remedies, which grows as rehearsals evaluate them.

    ``report`` is the MemoryReport of the run that failed, if there is one, ``device`` the real card that it failed on,
    ``memory`` the card's bytes if it is not certain that the message is of this card. Where the run cannot be
    rehearsed, the remedies are only named, with the reason.
    """
    situation = situation_of(diagnosis, gpu, report, memory, device)
    try:
        keys = [key.removesuffix("_any") for key in AGAINST.get(diagnosis.cause, ())]
        evaluator = RemedyEvaluator(rehearsal, situation, keys)
    except NotEvaluatedError as error:
        yield replace(diagnosis, remedies=unpriced_remedies(diagnosis, error.reason))
        return
    diagnosis = _rehearsed(diagnosis, evaluator, situation)
    if evaluator.fits:
        yield diagnosis
    found: list[Remedy] = []
    for remedy in evaluator.remedies():
        found.append(remedy)
        diagnosis = refine_with_remedy(diagnosis, remedy)
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
    """The diagnosis with the first remedy evaluated to the run's end; if it does not fit then, also the next one."""
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


def _rehearsed(diagnosis: Diagnosis, evaluator: RemedyEvaluator, situation: Situation) -> Diagnosis:
    """The diagnosis with the memory that the unchanged run needs, and what its rehearsal shows about the cause."""
    as_is = AsItIs(evaluator.needed_bytes, situation.usable_bytes, situation.outside_bytes)
    diagnosis = replace(diagnosis, as_is=as_is)
    if evaluator.calls_followed:
        followed = Evidence("calls_followed", {"num_calls": evaluator.calls_followed})
        diagnosis = replace(diagnosis, evidence=(*diagnosis.evidence, followed))
    steps = {"num_steps": evaluator.steps_left_after} if evaluator.steps_left_after else {}
    if evaluator.fits:
        sizes = {"needed_bytes": evaluator.needed_bytes, "usable_bytes": situation.usable_bytes}
        fits = Evidence("first_steps_fit" if steps else "rehearsal_fits", {**sizes, **steps})
        evidence = (*diagnosis.evidence, fits)
        return replace(diagnosis, evidence=evidence, remedies=unpriced_remedies(diagnosis, _FITS))
    if not evaluator.is_in_pieces:
        diagnosis = without_fragmentation(diagnosis, evaluator.baseline)
    if evaluator.steps_differ:
        diagnosis = replace(diagnosis, evidence=(*diagnosis.evidence, Evidence("steps_differ", steps)))
    return diagnosis


def advise_setup(diagnosis: Diagnosis, setup: TrainingSetup) -> Iterator[Diagnosis]:
    """``advise`` for a run described by its settings."""
    from oom_magic.predict.setups.gpus import find_gpu

    gpu = find_gpu(setup.gpu)
    memory = gpu.total_bytes if setup.memory is None else parse_bytes(setup.memory)
    yield from advise(diagnosis, SetupRehearsal(setup), gpu, memory=memory)


def named_remedies(diagnosis: Diagnosis, setup: TrainingSetup) -> tuple[Remedy, ...]:
    """The remedies for a run described by its settings, not evaluated, without those that it has already."""
    named = unpriced_remedies(diagnosis, NOT_ASKED)
    return tuple(one for one in named if one.key not in _IS_SO or not _IS_SO[one.key](setup))


def unpriced_remedies(diagnosis: Diagnosis, reason: Evidence = _NO_RUN) -> tuple[Remedy, ...]:
    """The remedies for the cause, not evaluated, each with the given reason."""
    if diagnosis.is_oom is False or (diagnosis.main_failure is None and diagnosis.cause is Cause.UNKNOWN):
        return ()
    elsewhere = text_remedies(diagnosis) if diagnosis.growth is None else None
    is_program = elsewhere is not None and bool(diagnosis.program)
    keys = elsewhere if is_program and elsewhere is not None else _keys(diagnosis, elsewhere, reason)
    keys = (*printed_by_message(diagnosis), *keys)
    keys = tuple(dict.fromkeys(_applicable(diagnosis, keys, is_text=reason is _NO_RUN)))
    style = "plain" if is_program else _style(diagnosis)
    if is_program:
        reason = _ELSEWHERE
    elif diagnosis.cause in HOST_CAUSES:
        reason = _OF_HOST
    elif reason is _NO_RUN:
        style = "generic" if style == "plain" and not _shows_transformers(diagnosis) else style
        reason = _way_to_prices(diagnosis)
    return tuple(_named(key, cost, diagnosis, style, reason) for cost, key in enumerate(keys))


def _applicable(diagnosis: Diagnosis, keys: tuple[str, ...], *, is_text: bool) -> Iterator[str]:
    """The remedies that are left for this text: one that it has already is replaced by the next step."""
    if is_text and "one_graph" in diagnosis.told and diagnosis.cause in _OF_INPUTS:
        keys = ("sample_graph", *(key for key in keys if key not in ("smaller_input", "smaller_batch_any")))
    is_settled = not diagnosis.setup_phrases and not diagnosis.story.proposals  # a guide proposes what it sets
    if diagnosis.backend == "mps":
        keys = tuple(dict.fromkeys(_ON_A_MAC.get(key, key) for key in keys if key not in _NOT_ON_A_MAC))
    for key in keys:
        if key in _ALONE and _OF_RANKS & set(diagnosis.frameworks):
            continue  # each rank holds a model of its own, or a shard
        is_untold = is_text and key in _OF_WHAT_IS_TOLD and not _OF_WHAT_IS_TOLD[key] & diagnosis.told
        if is_untold and key == "stream_data" and not {"in_pod", "grows"} & diagnosis.told:
            yield "hold_less"
            continue
        if len(keys) > 1 and (is_untold or _is_had(key, diagnosis, is_settled) or _is_unfounded(key, diagnosis)):
            continue
        if key in _QUANTIZING and ("is_quantized" in diagnosis.told or _is_of_any_model(key, diagnosis)):
            yield "smaller_model"
        elif key == "close_processes_any" and not _shows_others(diagnosis):
            yield "check_processes"
        elif key == "diffusers_offload" and "offloads_parts" in diagnosis.told:
            yield "diffusers_sequential"
        elif key == "sdpa" and "scaled_dot_product_attention" in diagnosis.code:
            yield "flash_kernel" if diagnosis.backend in _REHEARSED else "smaller_input"
        else:
            yield key


def _is_had(key: str, diagnosis: Diagnosis, is_settled: bool) -> bool:
    """Whether the run has it already; a batch of one stays one, whatever a text proposes."""
    if key == "smaller_batch_any" and "batch_of_one" in diagnosis.told:
        return True
    if key == "larger_share" and diagnosis.limits.get("share", 0) >= _LARGEST_SHARE:
        return True
    if key == "foreach" and _OF_EACH_TENSOR in diagnosis.code:
        return True
    if key == "half_weights" and "names_float32" not in diagnosis.told:
        return any(one.key == "weights_fill_card" for one in diagnosis.evidence)  # in half precision already
    return (is_settled and _HAD_BY.get(key) in diagnosis.told) or _TRIED.get(key) in diagnosis.told


def _shows_others(diagnosis: Diagnosis) -> bool:
    """Whether something shows that others use the device."""
    return diagnosis.confidence is not Confidence.OPEN and any(one.key in _SHOWS_OTHERS for one in diagnosis.evidence)


def _is_unfounded(key: str, diagnosis: Diagnosis) -> bool:
    """Whether nothing in the text speaks for it: other programs, data loading workers."""
    if key == "close_processes_any" and "models_beside" in diagnosis.told:
        return True
    if key == "close_processes_any":
        may_be = {one.cause for one in diagnosis.possible if one.confidence is not Confidence.OPEN}
        return diagnosis.cause is not Cause.OTHER_PROCESS and Cause.OTHER_PROCESS not in may_be
    if key == "gather_on_host":  # arguments of a Trainer
        return "transformers Trainer" not in diagnosis.frameworks and "keeps_predictions" not in diagnosis.told
    if key == "foreach" and "deepspeed" in diagnosis.frameworks:
        return True
    if key == "more_ram":
        return bool(_HOSTED & set(diagnosis.systems))
    if key in _SHARES:  # which give a program's own computation no more
        return diagnosis.cause in (*_OF_INPUTS[:3], Cause.WEIGHTS_TOO_BIG, Cause.OPTIMIZER_STATE)
    if diagnosis.program == "pictures" and key in _OF_DIFFUSION:
        return "diffuses" not in diagnosis.told
    if key == "quantized_model" and diagnosis.cause in _OF_INPUTS and not diagnosis.program:
        return not (_names_tokens(diagnosis) or "diffuses" in diagnosis.told)
    if key == "offload":
        return not (diagnosis.program or _names_tokens(diagnosis) or "diffuses" in diagnosis.told)
    failure = diagnosis.main_failure
    loads = "workers" in diagnosis.told or (failure is not None and "dataloader" in failure.format)
    return key in ("fewer_workers", "fewer_waiting") and not loads


def _is_of_any_model(key: str, diagnosis: Diagnosis) -> bool:
    """Whether formats of language models' weights would be told to a model that nothing shows to be one."""
    of_tokens = diagnosis.program in _OF_TOKENS or (not diagnosis.program and _names_tokens(diagnosis))
    return key == "quantized_model" and (not of_tokens or diagnosis.backend == "mps")


def _is_of_tokens(diagnosis: Diagnosis) -> bool:
    """Whether it may be a language model; False where an author describes a run and mentions nothing of the kind."""
    return _names_tokens(diagnosis) or "trains" not in diagnosis.told


def _names_tokens(diagnosis: Diagnosis) -> bool:
    """Whether something shows that the model is one of tokens."""
    if "of_latents" in diagnosis.told:
        return False
    is_set_up = diagnosis.setup_phrases or diagnosis.tensors
    return bool(is_set_up or "attends" in diagnosis.told or set(_OF_TRANSFORMERS) & set(diagnosis.frameworks))


def _shows_transformers(diagnosis: Diagnosis) -> bool:
    """Whether code of transformers is the author's, or a bare message leaves it open."""
    return _names_tokens(diagnosis) and ("uses_transformers" in diagnosis.told or not diagnosis.told & _DESCRIBED)


def _way_to_prices(diagnosis: Diagnosis) -> Evidence:
    """What a rehearsal lacks: settings describe the training of a model of tokens, code any run of PyTorch on a GPU."""
    if trains(diagnosis) and _names_tokens(diagnosis):
        return _NO_RUN
    is_in_python = "in_another_language" not in diagnosis.told
    if diagnosis.backend not in _REHEARSED or not (_is_of_pytorch(diagnosis) and is_in_python):
        return _NOT_PYTORCH
    is_another = bool(diagnosis.told - IN_ANY_MESSAGE)  # a run is described, and nothing shows that it is of tokens
    of_pictures = _OF_PICTURES & diagnosis.told or NO_LANGUAGE_MODEL.search(diagnosis.code)
    return _NO_CODE if is_another or of_pictures else _NO_CODE_OR_RUN


def _is_of_pytorch(diagnosis: Diagnosis) -> bool:
    """Whether the message, or the text around it, is PyTorch's."""
    failure = diagnosis.main_failure
    is_its_own = failure is not None and failure.pytorch_bytes is not None
    return is_its_own or "uses_torch" in diagnosis.told or bool(diagnosis.frameworks)


def _named(key: str, cost: int, diagnosis: Diagnosis, style: str, note: Evidence) -> Remedy:
    """A remedy by name, with its code as it is on the device that ran out."""
    values, growth = _values_of(key, diagnosis), diagnosis.growth
    if growth is not None and growth.fixed and key == growth.remedy:
        values = {**values, **growth.lines}
    code, language = code_of(key, diagnosis) or code_for(key, style, values)
    is_of_settings = "trains_by_settings" in diagnosis.told and style != "trainer" and key in _OF_A_LOOP
    if is_of_settings or ("in_another_language" in diagnosis.told and language == "python"):
        code = ""
    return Remedy(key, cost, "same", values, note=note, code=for_backend(code, diagnosis.backend), language=language)


def _keys(diagnosis: Diagnosis, elsewhere: tuple[str, ...] | None, reason: Evidence) -> tuple[str, ...]:
    """The remedies for a run in PyTorch, the first step first; ``elsewhere`` are those that its text determines."""
    keys = _against(diagnosis, reason) if elsewhere is None else elsewhere
    if is_evaluation(diagnosis):
        keys = _AT_EVALUATION
    if elsewhere and reason is _NO_RUN and not trains(diagnosis):
        keys = tuple(key for key in keys if key not in _OF_TRAINING) or keys
    if _may_be_shared(diagnosis):
        keys = (*keys, "check_processes")
    if NO_LANGUAGE_MODEL.search(diagnosis.code) or (reason is _NO_RUN and not _is_of_tokens(diagnosis)):
        others = tuple(key for key in keys if key not in _OF_LANGUAGE_MODELS)
        keys = (*others, "smaller_input") if diagnosis.cause in _OF_INPUTS else others or keys
    if "fsdp_any" in keys and _OF_RANKS & set(diagnosis.frameworks):
        keys = ("fsdp_any", *keys)  # which is theirs
    if reason.key == "reason_cuda_graphs":
        keys = ("no_cuda_graphs", *keys)
    growth = diagnosis.growth
    if growth is not None and growth.fixed and growth.remedy != "detach":
        keys = (growth.remedy, *(key for key in keys if key not in ("detach", "no_grad")))
    return keys


def _against(diagnosis: Diagnosis, reason: Evidence) -> tuple[str, ...]:
    """The first remedies for the cause; for a text that mentions no training, those for any run."""
    any_run = AGAINST_IN_ANY_RUN.get(diagnosis.cause)
    is_open = diagnosis.cause is Cause.OTHER_PROCESS or not trains(diagnosis)
    if diagnosis.cause is Cause.LEAK_OR_RETAINED_REFERENCE and any_run is not None:
        any_run = any_run if "uses_torch" not in diagnosis.told else any_run[::-1]
        is_open = is_open and not diagnosis.place and not any(one.key.startswith("code_") for one in diagnosis.evidence)
    if any_run is not None and reason is _NO_RUN and is_open:
        return any_run
    keys = AGAINST.get(diagnosis.cause, ())
    if diagnosis.cause is not Cause.ACTIVATIONS or reason is not _NO_RUN:
        return keys
    # LoRA leaves most activations as they are, and sdpa has been the default of transformers since 4.36.
    keys = (*(key for key in keys if key not in ("lora", "sdpa")), "sdpa")
    failure = diagnosis.main_failure
    if failure is not None and (failure.requested_bytes or 0) >= _HUGE_BYTES:
        return ("find_tensor", *keys)
    names_input = any(one.key in _LARGE_INPUT for one in diagnosis.evidence)
    return ("smaller_input", *keys) if names_input else keys


def _values_of(key: str, diagnosis: Diagnosis) -> Mapping[str, Any]:
    """The values that a remedy's sentence names."""
    if key in OF_SETTINGS:
        return setting_of(key, diagnosis)
    if key == "smaller_batch_any" and "batch" in diagnosis.run:
        batch, steps = int(diagnosis.run["batch"]), int(diagnosis.limits.get("accumulation", 1))
        return {"half": max(batch // 2, 1), "twice": 2 * steps, "sizes": f"now {batch}, {steps}"}
    if key in ("close_processes_any", "check_processes"):
        return {"tool": device_tool(diagnosis.backend, diagnosis.accelerator)}
    if key == "detach":
        lines = (str(one.values["line"]) for one in diagnosis.evidence if one.key in _KEEPING_LINES)
        mended = next(((line, fixed) for line in lines if (fixed := without_graph(line))), None)
        if mended is not None:
            return {"code": mended[0], "fixed": mended[1]}
    if key in _IN_HALF and "predates_bf16" in diagnosis.told:
        return {"dtype": "fp16"}
    return _VALUES.get(key, {})


def _may_be_shared(diagnosis: Diagnosis) -> bool:
    """Whether numbers that do not add up, or that the driver does not give, leave room for other programs."""
    if diagnosis.cause is Cause.DRIVER_LEVEL:
        return not any(one.key == "free_above_request" for one in diagnosis.evidence)
    failure = diagnosis.main_failure
    return diagnosis.cause is Cause.UNKNOWN and failure is not None and unlisted_bytes(failure) > 0


def situation_of(
    diagnosis: Diagnosis,
    gpu: GPU,
    report: MemoryReport | None = None,
    memory: int | None = None,
    device: Device | None = None,
) -> Situation:
    """The card as the failed run found it: from its message if that is about a card of this size, else an empty
    card."""
    failure = diagnosis.main_failure
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
    if failure is not None and failure.limit_bytes is not None:
        usable = min(usable, failure.limit_bytes)
    return Situation(
        usable_bytes=usable,
        gpu=gpu,
        total_bytes=total if device is None else device.total_bytes,
        held_bytes=earlier_bytes(diagnosis.holders, report),
        growth=diagnosis.growth,
        other_bytes=others,
        style=_style(diagnosis),
        phase=diagnosis.phase,
        backend=diagnosis.backend,
        expandable_segments=diagnosis.expandable_segments,
        is_windows=bool({"Windows", "WSL"} & set(diagnosis.systems)),
    )


def _style(diagnosis: Diagnosis) -> str:
    return next((_STYLES[name] for name in diagnosis.frameworks if name in _STYLES), "plain")
