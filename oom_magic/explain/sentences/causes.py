"""The sentence for a cause: some causes are told in several ways, by the program, the machine and the evidence."""

from __future__ import annotations

from collections.abc import Sequence

from oom_magic.explain.diagnosis import Diagnosis
from oom_magic.explain.evidence.causes import Cause, Evidence
from oom_magic.explain.evidence.checks import SERVERS
from oom_magic.explain.evidence.clues.programs import PROGRAMS, PROGRAMS_BY_KEY
from oom_magic.explain.evidence.grounds import shows_only_loading
from oom_magic.explain.messages.failure import Failure
from oom_magic.explain.remedies.from_text.kind_of_run import (
    facts_of,
    is_evaluation,
    is_of_pytorch,
    is_of_tokens,
    trains,
)
from oom_magic.explain.sentences.catalogue import translate

_INFERENCE = frozenset(program.key for program in PROGRAMS if not program.trains)
_RESERVING_KEYS = (
    "program_reserves",
    "told_generation",
    "told_at_import",
    "meaning_jax_launch",
    "smaller_share_helps",
    "marian_workspace",
    "physx_buffers",
)
_CACHE_SUFFIXES = {"vllm": "_cache", "sglang": "_cache", "sglang_retracts": "_requests", "vllm_context": "_context"}
# Evidence of a second copy of the weights: the suffix of the cause's sentence.
_COPY_SUFFIXES = {
    "checkpoint_to_gpu": "_twice",
    "told_checkpoint_to_gpu": "_twice",
    "code_copies_weights": "_copied",
    "phase_saving": "_saving",
    "told_saving": "_saving",
    "told_without": "_saving",
    "one_device_holds_more": "_crowded",
    "one_device_gathers": "_crowded",
    "ranks_load_to_one": "_crowded",
}
_STATE_SUFFIXES = {"optimizer_set_up": "_set_up", "checkpoint_kept": "_resumed"}
_SUFFIXES_OF_STEPS = {
    "data_on_device": "_data",
    "data_wait_on_device": "_waiting",
    "told_between_epochs": "_between",
    "stage_profiling": "_trial",
}
_GIVEN = ("slurm_oom_kill", "scheduler_oom_kill", "pod_oom_kill", "dask_worker")
_LATE = {"late_steps", "late_epochs", "told_late"}
_CACHES, _BY_TURNS = {"tensor_kv_cache", "told_kv_cache"}, "turns_keep"
_FILLS = ("category_fills", "category_fills_rehearsed")
_GROWTH_WITHIN_STEP = ("name_sums_a_step", "comprehension_sums_a_step")


def cause_in_words(cause: Cause, diagnosis: Diagnosis) -> str:
    """The cause in one sentence; a full share of a server, or a checkpoint beside its model, is told as that."""
    failure, suffix = diagnosis.main_failure, ""
    if cause is Cause.MEMORY_FRACTION_LIMIT and diagnosis.program in SERVERS:
        suffix = "_server" if failure is None or failure.limit_bytes is None else ""
        suffix = _CACHE_SUFFIXES.get("" if failure is None else failure.format, suffix)
    elif cause is Cause.MEMORY_FRACTION_LIMIT and _reserves(diagnosis):
        suffix = "_reserved"
    elif cause is Cause.OTHER_PROCESS and "models_beside" in diagnosis.told:
        suffix = "_models"
    elif cause is Cause.OTHER_PROCESS and any(one.key == "held_within" for one in diagnosis.evidence):
        suffix = "_within"
    elif cause is Cause.DRIVER_LEVEL and not _is_beside_pytorch(diagnosis):
        suffix = "_elsewhere"
    elif cause is Cause.LEAK_OR_RETAINED_REFERENCE:
        suffix = _suffix_of_leak(diagnosis)
    elif cause is Cause.WEIGHTS_TOO_BIG:
        usual = "_loading" if shows_only_loading(cause, diagnosis.evidence) else ""
        usual = "_running" if any(one.key == "stage_running" for one in diagnosis.evidence) else usual
        usual = "_trained" if any(map(_is_of_gradients, diagnosis.evidence)) else usual
        suffix = next((_COPY_SUFFIXES[one.key] for one in diagnosis.evidence if one.key in _COPY_SUFFIXES), usual)
    elif cause is Cause.FRAGMENTATION and failure is not None and _has_no_cache(failure):
        suffix = "_free"
    elif cause is Cause.HOST_RAM:
        suffix = _suffix_of_host(diagnosis)
    elif cause is Cause.OPTIMIZER_STATE:
        suffix = next((_STATE_SUFFIXES[one.key] for one in diagnosis.evidence if one.key in _STATE_SUFFIXES), "")
    elif cause is Cause.LOGITS_OR_LOSS and not is_of_tokens(diagnosis):
        suffix = "_outputs"
    elif cause is Cause.ACTIVATIONS and any(one.key in _SUFFIXES_OF_STEPS for one in diagnosis.evidence):
        suffix = next(_SUFFIXES_OF_STEPS[one.key] for one in diagnosis.evidence if one.key in _SUFFIXES_OF_STEPS)
    elif cause is Cause.ACTIVATIONS and any(one.key in _GROWTH_WITHIN_STEP for one in diagnosis.evidence):
        suffix = "_together"
    elif cause is Cause.ACTIVATIONS and {*_CACHES, _BY_TURNS} & {one.key for one in diagnosis.evidence}:
        return _of_cache_in_words(diagnosis)
    elif cause is Cause.ACTIVATIONS and _infers(diagnosis):
        suffix = "_inference"
    return translate(f"cause_{cause.value}{suffix}", diagnosis.lang)


def causes_in_brief(causes: Sequence[Cause], diagnosis: Diagnosis) -> str:
    """The likeliest causes in a few words each, as alternatives."""
    lang = diagnosis.lang
    names = [f"{one.value}{'_inference' if one is Cause.ACTIVATIONS and _infers(diagnosis) else ''}" for one in causes]
    first, *others = [translate(f"brief_{name}", lang) for name in names]
    for one in others:
        first = translate("causes_or", lang, first=first, second=one)
    return first


def _is_of_gradients(evidence: Evidence) -> bool:
    return evidence.key in _FILLS and evidence.values["category_key"] == "category_gradient"


def is_any_load(diagnosis: Diagnosis) -> bool:
    """Whether weights were being loaded, and neither their size nor a second copy of them is known."""
    keys = [one.key for one in diagnosis.remedies[:1]]
    return shows_only_loading(diagnosis.cause, diagnosis.evidence) and keys != ["map_location_cpu"]


def _reserves(diagnosis: Diagnosis) -> bool:
    """Whether a program takes its share in advance; where nothing failed, that is what an author sees of it."""
    keys = _RESERVING_KEYS if diagnosis.main_failure is not None else (*_RESERVING_KEYS, "told_share")
    return any(one.key in keys for one in diagnosis.evidence)


def _suffix_of_host(diagnosis: Diagnosis) -> str:
    """Which sentence: whose limit it was, if a limit; and whether the RAM is the GPU's, too."""
    failure = diagnosis.main_failure
    if failure is not None and failure.format in _GIVEN:
        return "_given"
    if failure is not None and "ram_is_free" in diagnosis.told:
        return "_limited"
    if failure is None:
        return "_told"
    if diagnosis.has_one_memory:
        return "_board"
    return "_commit" if failure.format == "windows_paging_file" else ""


def _suffix_of_leak(diagnosis: Diagnosis) -> str:
    """Which sentence: both possibilities where nothing but how far the run had come speaks for one that is kept."""
    known = _seen(diagnosis)
    if "replay_buffer" in known:
        return "_replay"
    if known and known <= _LATE:
        return "_late"
    return "_or_cache" if may_be_cache(diagnosis) else ""


def may_be_cache(diagnosis: Diagnosis) -> bool:
    """Whether an author only sees that memory is not given back: nothing failed, and nothing is said to grow."""
    return diagnosis.main_failure is None and _seen(diagnosis) == {"told_repeated"}


def _seen(diagnosis: Diagnosis) -> set[str]:
    """The keys of the evidence, but for that there is no message."""
    return {one.key for one in diagnosis.evidence} - {"no_message"}


def _is_beside_pytorch(diagnosis: Diagnosis) -> bool:
    """Whether PyTorch runs there, whose allocator the request went around."""
    return is_of_pytorch(diagnosis) and not (diagnosis.program and not PROGRAMS_BY_KEY[diagnosis.program].is_torch)


def _of_cache_in_words(diagnosis: Diagnosis) -> str:
    """What a loop keeps of each turn, with its sizes where a rehearsal has told them."""
    known = {one.key: one.values for one in diagnosis.evidence}
    suffix = ("_cache" if _CACHES & known.keys() else "") + ("_by_turn" if _BY_TURNS in known else "")
    return translate(f"cause_activations{suffix}", diagnosis.lang, **known.get(_BY_TURNS, {}))


def _has_no_cache(failure: Failure) -> bool:
    """Whether PyTorch's cache holds less than was requested, or there is none."""
    stuck, requested = failure.stuck_bytes, failure.requested_bytes
    return stuck is None or (requested is not None and stuck < requested)


def _infers(diagnosis: Diagnosis) -> bool:
    """Whether nothing shows that a training ran."""
    if any(one.key == "smaller_batch" and one.needed_bytes is not None for one in diagnosis.remedies):
        return False  # its rehearsal trained
    if "trains_in_rehearsal" in diagnosis.told:
        return False
    if any(one.values.get("category_key") == "category_activation" for one in diagnosis.evidence):
        return False  # autograd kept it for a backward
    if "without_graph" in diagnosis.told and not diagnosis.setup_phrases:
        return True
    if diagnosis.program in _INFERENCE or is_evaluation(diagnosis) or not trains(diagnosis):
        return True
    return "may_evaluate" in facts_of(diagnosis, is_text=True)
