"""Which remedies for a cause are left for a run: none that it has, that was tried, or that nothing speaks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from oom_magic.explain.evidence.causes import INPUT_CAUSES, Cause, Confidence
from oom_magic.explain.evidence.checks import SERVERS
from oom_magic.explain.remedies.from_text.kind_of_run import (
    CUDA_IN_CODE,
    facts_of,
    names_tokens,
    trains,
    trains_in_pytorch,
)
from oom_magic.explain.remedies.from_text.needs import founded
from oom_magic.explain.remedies.from_text.program_settings import is_limited

if TYPE_CHECKING:
    from oom_magic.explain.diagnosis import Diagnosis

# Remedies that take other weights, and remedies for language models.
_QUANTIZING = ("quantized_model", "comfy_fp8", "qlora", "loaded_4bit", "loaded_8bit")
# Evidence that shows others on the device.
_SHOWS_OTHERS = {
    "others_listed", "others_unlisted", "told_shared", "told_left_over", "device_seen_full", "device_is_open",
    "no_context", "little_free_at_start", "told_frees_at_end", "meaning_vllm_startup", "weights_light",
}  # fmt: skip
_AT_START = {
    "little_free_at_start",
    "meaning_vllm_startup",
    "no_context",
    "start_refused",
    "stage_loading",
    "weights_light",
}
_OF_TOKENS = ("vllm", "sglang", "tgi", "server", "quantizing")
_OWN_ATTENTION = ("vllm", "sglang", "tgi", "exllama")  # it is not for their users to choose
_OF_SPLATS = (*INPUT_CAUSES, Cause.WEIGHTS_TOO_BIG, Cause.OPTIMIZER_STATE, Cause.SYSMEM_FALLBACK)
# Said where nothing better is known.
_UNSPECIFIC = {
    "smaller_input", "smaller_items", "more_ram", "hold_less",
}  # fmt: skip
# Settings that any training may have off, in one sentence.
_OF_ANY_TRAINING = ("half_setting", "checkpointing_setting")
_TILES_ALREADY = {"tiles", "tried_tiles", "tried_size"}  # by themselves, or in vain
_OF_LENGTH = {"shorter_sequences_any", "shorter_sequences"}
_TILING = ("diffusers_vae", "comfy_tiled", "webui_tiled")
_OF_A_CACHE = (Cause.LEAK_OR_RETAINED_REFERENCE, Cause.HOST_RAM, Cause.FRAGMENTATION)
_MOST = 2
_SURE = (Confidence.CERTAIN, Confidence.LIKELY)
_OF_ITS_OWN = {"learns", "trains", "infers", "in_container"}  # what fills RAM there is not only what is read
_ON_A_MAC = {"raise_limit": "mps_watermark", "webui_attention": "webui_attention_mac"}


def applicable(diagnosis: Diagnosis, keys: tuple[str, ...], *, is_text: bool) -> Iterator[str]:
    """The remedies that are left for this text: one that it has already is replaced by the next step."""
    facts = facts_of(diagnosis, is_text=is_text)
    if is_text and "broke_by_update" in diagnosis.told and diagnosis.confidence is not Confidence.CERTAIN:
        keys = ("older_version", *keys)  # the same run fitted before
    if is_text and "one_graph" in diagnosis.told and diagnosis.cause in INPUT_CAUSES:
        keys = ("sample_graph", *(key for key in keys if key not in ("smaller_input", "smaller_batch_any")))
    elif is_text and "splats" in diagnosis.told and trains(diagnosis) and diagnosis.cause in _OF_SPLATS:
        of_pictures = any(one.key == "input_named" for one in diagnosis.evidence)  # each step takes one
        keys = ("data_on_host", "smaller_items") if of_pictures else ("fewer_gaussians", "data_on_host")
    elif "of_graphs" in facts and diagnosis.cause in INPUT_CAUSES:
        keys = tuple("smaller_graph" if key == "smaller_input" else key for key in keys)
    if "may_evaluate" in facts and diagnosis.cause in INPUT_CAUSES:
        keys = tuple("smaller_input" if key == "smaller_batch_any" else key for key in keys)
    if is_text and "clearing_helps" in facts and diagnosis.cause in _OF_A_CACHE:
        keys = ("clear_each",)
    if "smaller_image" in keys:
        keys = tuple(key for key in keys if key != "smaller_input")
    if diagnosis.backend == "mps":
        keys = tuple(dict.fromkeys(_ON_A_MAC.get(key, key) for key in keys))
    for key in keys:
        told = founded(key, facts)
        if key == "stream_data" and not told and is_text and (len(keys) == 1 or not facts & _OF_ITS_OWN):
            told = founded("hold_less", facts)
            yield from (told,) if told else ()
        elif key in _TILING and not told and "known_tiles" in diagnosis.told and not _TILES_ALREADY & diagnosis.told:
            yield "smaller_tiles"
        elif told and not _is_unfounded(told, diagnosis):
            fitting = _fitting(told, diagnosis)
            left = fitting if fitting == told else founded(fitting, facts)
            is_said = left == "smaller_items" and _OF_LENGTH & {*keys} and names_tokens(diagnosis)  # a text's one size
            if left and not is_said:
                yield left


def told_shortly(keys: tuple[str, ...], diagnosis: Diagnosis) -> tuple[str, ...]:
    """The few remedies that are worth telling without a price: what is unspecific only where nothing else is left.

    All but the first need a cause that is likely or a training in PyTorch; a program's settings, or that the text names
    them or their stage.
    """
    together = [key for key in keys if key in _OF_ANY_TRAINING]
    if len(together) > 1:
        keys = tuple("training_settings" if key == together[0] else key for key in keys if key != together[1])
    known = {one.key for one in diagnosis.evidence}
    compares_sizes = "told_contrast" in known or ("input_named" in known and {*keys[:1]} <= _UNSPECIFIC)
    is_one_tensor = diagnosis.cause is Cause.REQUEST_ALONE_TOO_BIG  # which it is comes before what makes it smaller
    is_first = compares_sizes or is_one_tensor
    specific = keys[:1] if is_first else tuple(key for key in keys if key not in _UNSPECIFIC)
    if not specific:
        return keys[:1]
    if diagnosis.confidence in _SURE or trains_in_pytorch(diagnosis, facts_of(diagnosis, is_text=True)):
        return specific[:_MOST]
    return (specific[0], *(key for key in specific[1:] if diagnosis.program and _is_spoken_of(key, diagnosis)))[:_MOST]


def _is_spoken_of(key: str, diagnosis: Diagnosis) -> bool:
    """Whether a text shows more for a program's setting than the program's name."""
    shows_stage = any(one.key.startswith("stage_") for one in diagnosis.evidence)
    return shows_stage or is_limited(key, diagnosis.program, diagnosis.limits)


def _fitting(key: str, diagnosis: Diagnosis) -> str:
    """The remedy, or the next step where the run has this one."""
    if key == "detach" and "pasted_code" in diagnosis.told and not _shows_kept(diagnosis):
        return "detach_own"
    if key in _QUANTIZING and ("is_quantized" in diagnosis.told or _is_of_any_model(key, diagnosis)):
        return "smaller_model"
    if key == "close_processes_any" and diagnosis.program in SERVERS and not _starts(diagnosis):
        return "whose_process"
    if key == "close_processes_any" and not _shows_others(diagnosis):
        return "check_processes"
    if key == "newer_version" and "broke_by_update" in diagnosis.told:
        return "older_version"
    if key == "diffusers_offload" and "moves_before_offload" in diagnosis.told:
        return "diffusers_not_moved"
    if key == "diffusers_offload" and "offloads_parts" in diagnosis.told:
        return "diffusers_sequential"
    if key == "sdpa" and diagnosis.program in _OWN_ATTENTION:
        return "smaller_input"
    if key == "sdpa" and "scaled_dot_product_attention" in diagnosis.code:
        return "flash_kernel" if diagnosis.backend in CUDA_IN_CODE else "smaller_input"
    return key


def _shows_kept(diagnosis: Diagnosis) -> bool:
    """Whether the pasted code has a line that keeps results with their graphs, or the author says that one does."""
    return any(one.key.startswith(("code_", "told_graph")) for one in diagnosis.evidence)


def _starts(diagnosis: Diagnosis) -> bool:
    """Whether a server found the device taken when it started: it had no other process of its own yet."""
    return any(one.key in _AT_START for one in diagnosis.evidence)


def _shows_others(diagnosis: Diagnosis) -> bool:
    """Whether something shows that others use the device."""
    return diagnosis.confidence is not Confidence.OPEN and any(one.key in _SHOWS_OTHERS for one in diagnosis.evidence)


def _is_unfounded(key: str, diagnosis: Diagnosis) -> bool:
    """Whether nothing speaks for other programs on the device, or for less input where they are told of."""
    if key in ("close_processes_any", "unlisted_processes"):
        may_be = {one.cause for one in diagnosis.possible if one.confidence is not Confidence.OPEN}
        is_likely = diagnosis.cause is Cause.OTHER_PROCESS or Cause.OTHER_PROCESS in may_be
        return "models_beside" in diagnosis.told or not is_likely
    return key == "smaller_input" and diagnosis.cause is Cause.OTHER_PROCESS and "shares_device" in diagnosis.told


def _is_of_any_model(key: str, diagnosis: Diagnosis) -> bool:
    """Whether formats of language models' weights would be told to a model that nothing shows to be one."""
    of_tokens = diagnosis.program in _OF_TOKENS or (not diagnosis.program and names_tokens(diagnosis))
    return key == "quantized_model" and (not of_tokens or diagnosis.backend == "mps")
