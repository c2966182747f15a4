"""Which remedies for a cause are left for a run: none that it has, that was tried, or that nothing speaks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from oom_magic.explain.evidence.causes import INPUT_CAUSES, Cause, Confidence
from oom_magic.explain.remedies.from_text.kind_of_run import CUDA_IN_CODE, has_ranks, names_tokens

if TYPE_CHECKING:
    from oom_magic.explain.diagnosis import Diagnosis

_ALONE = ("offload",)  # for one process with all cards
# Remedies that take other weights, and remedies for language models.
_QUANTIZING = ("quantized_model", "comfy_fp8", "qlora", "loaded_4bit", "loaded_8bit")
# The fact about a run that makes a remedy needless.
_HAD_BY = {
    "lora": "has_lora", "mixed_precision": "has_half", "half_weights": "has_half", "checkpointing": "has_checkpointing",
    "offload": "maps_devices", "tensor_parallel": "shards", "tgi_shards": "shards", "sdpa": "has_flash",
    "fsdp_any": "shards", "diffusers_vae": "tiles", "ollama_parallel": "caches_in_8_bits",
    "llama_cache_type": "caches_in_8_bits",
    "pictures_offload": "keeps_in_ram", "comfy_lowvram": "keeps_in_ram", "webui_medvram": "keeps_in_ram",
}  # fmt: skip
# Evidence that shows others on the device.
_SHOWS_OTHERS = {
    "others_listed", "others_unlisted", "told_shared", "told_left_over", "device_seen_full", "device_is_open",
    "no_context", "little_free_at_start", "told_frees_at_end", "meaning_vllm_startup",
}  # fmt: skip
_OF_BATCHES = ("smaller_batch_any", "smaller_batch_plain", "smaller_evaluation_any")
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
    "stream_data": {"loads_data", "handles_files"},
    "free_held_any": {"in_notebook", "kernel_dies"},
    "no_grad": {"evaluates", "infers", "lacks_no_grad", "keeps_predictions"},
    "jax_remat": {"trains"},
    "tensor_parallel": {"many_ranks"},
    "smaller_batch_plain": {"trains"},
}
_OF_ITS_OWN = {"learns", "trains", "infers", "in_container"}  # what fills RAM there is not only what is read
_OF_DIFFUSION = ("diffusers_vae", "pictures_offload", "quantized_model")
_LARGEST_SHARE = 0.95  # of a server's; the rest is the driver's and the context's
_SHARES = ("tf_growth", "jax_preallocate")
_ON_A_MAC = {"raise_limit": "mps_watermark", "webui_attention": "webui_attention_mac"}
# On a Mac: the allocator has no expandable segments, the GPU shares the RAM, and bitsandbytes does not support it.
_NOT_ON_A_MAC = {"expandable_segments", "offload", "fsdp_any", "qlora", "optimizer_8bit"}
_OF_NEW_STATE = "zeros_like("  # where the state is made; temporary copies come after it
_OF_EACH_TENSOR = "exp_avg_sq.sqrt()"  # torch/optim/adam.py, _single_tensor_adam: without foreach


def applicable(diagnosis: Diagnosis, keys: tuple[str, ...], *, is_text: bool) -> Iterator[str]:
    """The remedies that are left for this text: one that it has already is replaced by the next step."""
    if is_text and "one_graph" in diagnosis.told and diagnosis.cause in INPUT_CAUSES:
        keys = ("sample_graph", *(key for key in keys if key not in ("smaller_input", "smaller_batch_any")))
    is_settled = not diagnosis.setup_phrases and not diagnosis.story.proposals  # a guide proposes what it sets
    if diagnosis.backend == "mps":
        keys = tuple(dict.fromkeys(_ON_A_MAC.get(key, key) for key in keys if key not in _NOT_ON_A_MAC))
    for key in keys:
        if key in _ALONE and has_ranks(diagnosis):
            continue  # each rank holds a model of its own, or a shard
        is_untold = is_text and key in _OF_WHAT_IS_TOLD and not _OF_WHAT_IS_TOLD[key] & diagnosis.told
        if is_untold and key == "stream_data" and (len(keys) == 1 or not diagnosis.told & _OF_ITS_OWN):
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
            yield "flash_kernel" if diagnosis.backend in CUDA_IN_CODE else "smaller_input"
        else:
            yield key


def _is_had(key: str, diagnosis: Diagnosis, is_settled: bool) -> bool:
    """Whether the run has it already; a batch of one stays one, whatever a text proposes."""
    if key in _OF_BATCHES and {"batch_of_one", "has_batch_of_one"} & diagnosis.told:
        return True
    if key == "smaller_evaluation_any" and "evaluates_one" in diagnosis.told:
        return True
    if key == "fewer_workers" and "one_worker" in diagnosis.told:
        return True
    if key == "larger_share" and diagnosis.limits.get("share", 0) >= _LARGEST_SHARE:
        return True
    if key == "foreach" and any(line in diagnosis.code for line in (_OF_EACH_TENSOR, _OF_NEW_STATE)):
        return True
    may_be_half = key == "half_weights" and "names_float32" not in diagnosis.told
    if may_be_half and any(one.key == "weights_fill_card" for one in diagnosis.evidence):
        return True  # it is counted so
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
    if key == "no_grad":  # programs with a loop of their own evaluate so
        return "trains_by_settings" in diagnosis.told and "lacks_no_grad" not in diagnosis.told
    if key == "gather_on_host":  # arguments of a Trainer
        return "transformers Trainer" not in diagnosis.frameworks and "keeps_predictions" not in diagnosis.told
    if key == "foreach" and "deepspeed" in diagnosis.frameworks:
        return True
    if key == "smaller_input" and diagnosis.cause is Cause.OTHER_PROCESS:
        return "shares_device" in diagnosis.told
    if key == "more_ram":
        return bool(_HOSTED & set(diagnosis.systems))
    if key in _SHARES:  # which give a program's own computation no more
        return diagnosis.cause in (*INPUT_CAUSES[:3], Cause.WEIGHTS_TOO_BIG, Cause.OPTIMIZER_STATE)
    if diagnosis.program == "pictures" and key in _OF_DIFFUSION:
        return "diffuses" not in diagnosis.told
    if key == "quantized_model" and diagnosis.cause in INPUT_CAUSES and not diagnosis.program:
        return not (names_tokens(diagnosis) or "diffuses" in diagnosis.told)
    if key == "offload":
        return not (diagnosis.program or names_tokens(diagnosis) or "diffuses" in diagnosis.told)
    failure = diagnosis.main_failure
    if key == "fewer_workers" and "other_workers" in diagnosis.told:
        return False
    loads = "workers" in diagnosis.told or (failure is not None and "dataloader" in failure.format)
    return key in ("fewer_workers", "fewer_waiting") and not loads


def _is_of_any_model(key: str, diagnosis: Diagnosis) -> bool:
    """Whether formats of language models' weights would be told to a model that nothing shows to be one."""
    of_tokens = diagnosis.program in _OF_TOKENS or (not diagnosis.program and names_tokens(diagnosis))
    return key == "quantized_model" and (not of_tokens or diagnosis.backend == "mps")
