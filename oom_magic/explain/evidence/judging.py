"""From a text to causes: the evidence for each is combined, and the likeliest cause is named.

Where a text says little, similar public reports tell how often each cause was the established one (``precedents``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from oom_magic.explain.evidence.causes import (
    HOST_CAUSES,
    INPUT_CAUSES,
    Cause,
    Confidence,
    Evidence,
    Judgement,
    PossibleCause,
    Support,
)
from oom_magic.explain.evidence.checks import check_for, check_of_loading, check_of_open
from oom_magic.explain.evidence.clues.environment import ONE_MEMORY
from oom_magic.explain.evidence.clues.traceback import Clues, find_clues
from oom_magic.explain.evidence.excluded import OF_HOST, is_of_device, seen_not_to_be, unshown
from oom_magic.explain.evidence.grounds import grounded, shows_only_loading
from oom_magic.explain.evidence.meanings import meaning_of
from oom_magic.explain.evidence.measured.likeness import likeness
from oom_magic.explain.evidence.measured.precedents import features_of, precedents
from oom_magic.explain.evidence.rules.logs import SHRINKING
from oom_magic.explain.evidence.rules.numbers import (
    is_overflow,
    number_rules,
    observations,
    overflow_rules,
)
from oom_magic.explain.evidence.rules.situations import situation_rules
from oom_magic.explain.evidence.rules.texts import named_tensor, text_rules
from oom_magic.explain.messages.failure import Failure

# A cause is named if its degree is at least this; below it the answer is "unknown".
_NAMED_FROM = 0.25
_LIKELY_FROM = 0.6
_CERTAIN_FROM = 0.95
_WEIGHTS = {Confidence.CERTAIN: 0.97, Confidence.LIKELY: 0.7, Confidence.POSSIBLE: 0.35}
# A message of a library that called the driver itself says who asked, not why memory was full: where an author adds
# more, it weighs little (of the reports with such a message and words around it none had the driver as its established
# cause).
_WHO_ASKED = 0.25
_REFUSED_WITH_ROOM = 0.55
_GROWTH_OF_RAM = {"memory_grows", "code_sums_tensors"}
_LIBRARIES_ASK = ("third_party_cuda_oom", "cuda_driver_call")
_MOST_POSSIBLE = 4
# Below this degree, similar public reports are consulted; they alone never make a cause likely.
_CLEAR_FROM = 0.3
_MOST_BY_PRECEDENT = 0.55
# How much the causes of similar reports count beside a text's own evidence.
_WEIGHT_OF_PRECEDENTS = 0.2
_LEAST_SHARE = 0.01
_USUAL_FROM = 0.4  # of similar reports: a cause of fewer comes before none that was weighed
_NEVER_USUAL = frozenset({Cause.DRIVER_LEVEL, Cause.MEMORY_FRACTION_LIMIT})  # who asked; what a setting would show
_BEYOND_PRECEDENT = 0.8
IN_ANY_MESSAGE = {"speaks_of_memory", "speaks_of_gpu", "speaks_of_ram", "fragments", "learns", "uses_torch", "in_prose",
                  "names_adam"}  # fmt: skip
_OF_MEMORY = {
    "speaks_of_memory", "speaks_of_ram", "uses_much", "killed", "grows", "host_fills", "pins", "kernel_dies",
}  # fmt: skip
# Statements that are about memory; of a text with neither one of them nor a message no cause is told.
_ABOUT_MEMORY = _OF_MEMORY | {
    "repeated_use", "left_over", "collects_results", "rises_once", "rises_to_a_level", "frees_at_end",
    "full_at_any_size", "smaller_share_helps", "shuts_down", "page_file", "spills", "keeps_graph", "takes_no_share",
    "adam_costs", "offload_helps", "counts_metrics", "crowds_one_device", "dense_pairs",
}  # fmt: skip
_WORTH_NAMING = 0.12
_OF_THIS_RUN = 0.6  # what a text says of its own run counts more than what is usual
# Evidence that says how likely a cause is of runs in general, not of this one.
_OF_ALL_RUNS = {
    "precedents", "computing_told", "inference_told", "own_tensors_fill", "program_seen", "small_card",
}  # fmt: skip
_OF_ANY_TRAINING = frozenset({"training_told"})

# What each step takes alike, and what shows that a later one took more.
_OF_ANY_STEP = (*INPUT_CAUSES, Cause.WEIGHTS_TOO_BIG, Cause.OPTIMIZER_STATE)
_OF_LATER_STEPS = {"larger_input_fails", "input_named", "told_contrast", "smaller_batch_helps", "told_conversation"}

_FIXED: dict[str, tuple[Cause, Confidence]] = {
    "jax_launch": (Cause.MEMORY_FRACTION_LIMIT, Confidence.LIKELY),
    "cuda_preempted": (Cause.MEMORY_FRACTION_LIMIT, Confidence.CERTAIN),
    "cuda_absurd_size": (Cause.REQUEST_ALONE_TOO_BIG, Confidence.CERTAIN),
    "cuda_driver_error": (Cause.DRIVER_LEVEL, Confidence.CERTAIN),
    "xpu_driver": (Cause.DRIVER_LEVEL, Confidence.LIKELY),
    "jetson_nvmap": (Cause.DRIVER_LEVEL, Confidence.CERTAIN),
    "cuda_va_exhausted": (Cause.DRIVER_LEVEL, Confidence.CERTAIN),
    "nccl": (Cause.DRIVER_LEVEL, Confidence.LIKELY),
    "third_party_cuda_oom": (Cause.DRIVER_LEVEL, Confidence.LIKELY),
    "bitsandbytes": (Cause.DRIVER_LEVEL, Confidence.LIKELY),
    "cuda_driver_call": (Cause.DRIVER_LEVEL, Confidence.POSSIBLE),
    "npu_runtime": (Cause.DRIVER_LEVEL, Confidence.POSSIBLE),
    "cpu_allocator": (Cause.HOST_RAM, Confidence.CERTAIN),
    "numpy": (Cause.HOST_RAM, Confidence.CERTAIN),
    "memory_error": (Cause.HOST_RAM, Confidence.CERTAIN),
    "tensorflow_host": (Cause.HOST_RAM, Confidence.CERTAIN),
    "xpu_host": (Cause.HOST_RAM, Confidence.CERTAIN),
    "bad_alloc": (Cause.HOST_RAM, Confidence.CERTAIN),
    "host_allocation": (Cause.HOST_RAM, Confidence.CERTAIN),
    "opencv": (Cause.HOST_RAM, Confidence.CERTAIN),
    "java_heap": (Cause.HOST_RAM, Confidence.CERTAIN),
    "llama_cpp_host": (Cause.HOST_RAM, Confidence.CERTAIN),
    "ollama_host": (Cause.HOST_RAM, Confidence.CERTAIN),
    "pinned_memory": (Cause.HOST_RAM, Confidence.CERTAIN),
    "fork_enomem": (Cause.HOST_RAM, Confidence.CERTAIN),
    "windows_paging_file": (Cause.HOST_RAM, Confidence.CERTAIN),
    "dataloader": (Cause.SHARED_MEMORY, Confidence.LIKELY),
    "sigbus": (Cause.SHARED_MEMORY, Confidence.LIKELY),
    "shared_memory_full": (Cause.SHARED_MEMORY, Confidence.CERTAIN),
    "dataloader_killed": (Cause.HOST_RAM, Confidence.LIKELY),
    "dataloader_exited": (Cause.HOST_RAM, Confidence.POSSIBLE),
    "slurm_oom_kill": (Cause.HOST_RAM, Confidence.CERTAIN),
    "scheduler_oom_kill": (Cause.HOST_RAM, Confidence.CERTAIN),
    "pod_oom_kill": (Cause.HOST_RAM, Confidence.CERTAIN),
    "pod_evicted": (Cause.HOST_RAM, Confidence.CERTAIN),
    "dask_worker": (Cause.HOST_RAM, Confidence.CERTAIN),
    "ray_oom_kill": (Cause.HOST_RAM, Confidence.CERTAIN),
    "sglang_retracts": (Cause.MEMORY_FRACTION_LIMIT, Confidence.CERTAIN),
    "sglang": (Cause.MEMORY_FRACTION_LIMIT, Confidence.CERTAIN),
    "sd_webui": (Cause.ACTIVATIONS, Confidence.LIKELY),
    "tgi": (Cause.ACTIVATIONS, Confidence.LIKELY),
    "kernel_oom_killer": (Cause.HOST_RAM, Confidence.CERTAIN),
    "sigkill": (Cause.HOST_RAM, Confidence.LIKELY),
    "notebook_host": (Cause.HOST_RAM, Confidence.LIKELY),
    "kernel_died": (Cause.HOST_RAM, Confidence.POSSIBLE),
    "vllm": (Cause.MEMORY_FRACTION_LIMIT, Confidence.CERTAIN),
    "vllm_context": (Cause.MEMORY_FRACTION_LIMIT, Confidence.CERTAIN),
    "vllm_startup": (Cause.OTHER_PROCESS, Confidence.LIKELY),
    "hf_offload": (Cause.WEIGHTS_TOO_BIG, Confidence.CERTAIN),
    "hf_auto_batch": (Cause.ACTIVATIONS, Confidence.POSSIBLE),
    "mps_invalid_buffer": (Cause.REQUEST_ALONE_TOO_BIG, Confidence.CERTAIN),
    "opencl_buffer_limit": (Cause.REQUEST_ALONE_TOO_BIG, Confidence.CERTAIN),
    "ipex_4gb": (Cause.REQUEST_ALONE_TOO_BIG, Confidence.CERTAIN),
}
_OF_ANY_CPP = "bad_alloc"  # what operator new raises, and allocators with its interface
_VRAM = {"speaks_of_gpu", "speaks_of_memory"}
_OPEN = (Cause.UNKNOWN, Confidence.OPEN)
# What fills a device; a message that is about the host's memory by its kind has none of these causes.
_OF_DEVICE = frozenset({
    Cause.ACTIVATIONS, Cause.LOGITS_OR_LOSS, Cause.ATTENTION_SCORES, Cause.OPTIMIZER_STATE, Cause.WEIGHTS_TOO_BIG,
    Cause.OTHER_PROCESS, Cause.FRAGMENTATION, Cause.MEMORY_FRACTION_LIMIT,
})  # fmt: skip


def judge(failures: Sequence[Failure], text: str, clues: Clues | None = None) -> Judgement:
    """The causes of the failures that ``read`` found in a text, weighed, with evidence and confidence.

    Without clear evidence the answer is ``unknown``, with the possible causes and how to tell them apart.
    ``clues``, if given, are not looked for again. What a statement about the text rests on is quoted with it.
    """
    failure = main_failure(failures)
    if clues is None:
        clues = find_clues(text, failure.start if failure else None, failure.format if failure else None)
    judged, quotes = _judged(failure, text, clues), clues.run.quotes
    possible = tuple(replace(one, evidence=(*grounded(one.evidence, quotes),)) for one in judged.possible)
    possible = tuple(one if one.evidence else replace(one, confidence=Confidence.OPEN) for one in possible)
    if judged.confidence is Confidence.OPEN and possible:
        first = possible[0]
        check = check_of_open(first.cause, first.check, failure, clues)
        possible = (replace(first, check=check), *possible[1:])
    if possible and shows_only_loading(possible[0].cause, possible[0].evidence):
        possible = (replace(possible[0], check=check_of_loading(failure, clues)), *possible[1:])
    evidence = (*grounded(judged.evidence, quotes),)
    is_open = judged.confidence is Confidence.POSSIBLE and not evidence
    confidence = Confidence.OPEN if is_open else judged.confidence
    return replace(judged, evidence=evidence, possible=possible, confidence=confidence)


def _judged(failure: Failure | None, text: str, clues: Clues) -> Judgement:
    if failure is not None and failure.is_oom is False:
        evidence = [_meaning(failure, clues)]
        if "indexes" in clues.run.told and failure.format == "device_side_assert":
            evidence.append(Evidence("index_error_beside"))
        return Judgement(Cause.NOT_OOM, tuple(evidence), Confidence.CERTAIN)
    if failure is None and not (_ABOUT_MEMORY & clues.run.told or clues.faults or (clues.frames and clues.phase)):
        return Judgement(Cause.UNKNOWN, tuple(_of_no_message(clues)), Confidence.OPEN)
    supports = list(_supports(failure, clues, text))
    # Words alone are never certain, and some messages leave it open themselves.
    is_guess = failure is None or failure.is_oom is None or bool(failure.words)
    possible = _weighed(supports, failure, clues, _CERTAIN_FROM - 0.01 if is_guess else 1.0)
    if _resembles_reports(failure, clues):
        features = features_of(text, failure, clues)
        shares = precedents().shares(features)
        if not (possible and possible[0].degree >= _CLEAR_FROM):
            likely = _by_precedent(failure, clues, shares)
            possible = _weighed([*supports, *likely], failure, clues, _LIKELY_FROM - 0.01)
        possible = _tempered(possible, shares)
        is_open = not possible or possible[0].confidence is Confidence.OPEN
        if is_open and not _only_asks(failure):
            possible = _as_usual(possible, failure, clues, likeness().shares(features))
    possible = (*sorted(_as_late(possible, clues), key=lambda one: -one.degree),)
    possible = _with_growth_of_ram(possible)
    best = possible[0] if possible else None
    if best is None or best.degree < _NAMED_FROM:  # left open; what is told of the run names one first
        known = tuple(_of_no_message(clues) if failure is None else observations(failure))
        is_named = best is not None and (clues.has_prose or clues.program is not None)
        return Judgement(best.cause if best and is_named else Cause.UNKNOWN, known, Confidence.OPEN, possible)
    evidence = list(best.evidence) or [Evidence("computing_told")]
    if failure is None:
        evidence[:0] = _of_no_message(clues)
    return Judgement(best.cause, tuple(evidence), best.confidence, possible)


def _of_no_message(clues: Clues) -> Iterator[Evidence]:
    """That no message is known; and what the model that is asked about takes."""
    yield Evidence("no_message")
    if "asks_need" in clues.shown and clues.weights is not None:
        yield Evidence("weights_asked", {**clues.weights.said, "state_bytes": clues.weights.state_bytes})


def _with_growth_of_ram(possible: tuple[PossibleCause, ...]) -> tuple[PossibleCause, ...]:
    """The same where RAM is not the likeliest; there what grows is RAM, which is no cause of its own."""
    if not possible or possible[0].cause not in HOST_CAUSES:
        return possible
    grows = (one for one in possible if one.cause is Cause.LEAK_OR_RETAINED_REFERENCE)
    known = possible[0].evidence
    told = (item for one in grows for item in one.evidence if item.key in _GROWTH_OF_RAM)
    best = replace(possible[0], evidence=(*known, *(item for item in told if item not in known)))
    return (best, *(one for one in possible[1:] if one.cause is not Cause.LEAK_OR_RETAINED_REFERENCE))


def _resembles_reports(failure: Failure | None, clues: Clues) -> bool:
    """Whether the text can be compared with public reports: it is about memory and has more than a bare message."""
    if failure is None:
        return bool(_OF_MEMORY & clues.run.told)
    return bool(clues.has_prose or clues.frames or clues.program or clues.run.told - IN_ANY_MESSAGE)


def _by_precedent(failure: Failure | None, clues: Clues, shares: Mapping[Cause, float]) -> Iterator[Support]:
    """The causes of similar public reports, where there is no clearer evidence."""
    told = clues.run.told
    speaks_of_device = not OF_HOST & told and told >= _VRAM and not ONE_MEMORY & set(clues.systems)
    of_device = is_of_device(failure, told) or (failure is None and speaks_of_device)
    impossible = seen_not_to_be(failure, told, of_device=of_device) | unshown(failure, clues)
    impossible |= {Cause.OPTIMIZER_STATE} if clues.trains_few and "at_optimizer" not in told else frozenset()
    likely = ((cause, share) for cause, share in shares.items() if cause not in impossible)
    for cause, share in islice(likely, _MOST_POSSIBLE):
        yield Support(cause, _MOST_BY_PRECEDENT * math.sqrt(share), Evidence("precedents"))


def _tempered(possible: Sequence[PossibleCause], shares: Mapping[Cause, float]) -> tuple[PossibleCause, ...]:
    """The causes ranked again: a cause that was rarely established in similar reports needs more evidence of its own.

    Each keeps its degree, but none has a higher one than those before it.
    """

    def rank(one: PossibleCause) -> float:
        rarity = max(shares.get(one.cause, 0.0), _LEAST_SHARE) ** _WEIGHT_OF_PRECEDENTS
        degree = one.degree if one.degree >= _BEYOND_PRECEDENT else one.degree * rarity
        only_asked = one.cause is Cause.DRIVER_LEVEL and one.degree <= _WHO_ASKED  # the message says no more of why
        return degree * _OF_THIS_RUN if only_asked or _is_of_all_runs(one.evidence, _OF_ANY_TRAINING) else degree

    found: list[PossibleCause] = []
    for one in sorted(possible, key=lambda one: -rank(one)):
        degree = min(one.degree, found[-1].degree) if found else one.degree
        found.append(replace(one, degree=degree, confidence=_confidence(degree, one.evidence)))
    return tuple(found)


def _only_asks(failure: Failure | None) -> bool:
    return failure is not None and failure.format in _LIBRARIES_ASK


def _as_usual(
    possible: Sequence[PossibleCause], failure: Failure | None, clues: Clues, shares: Mapping[Cause, float]
) -> tuple[PossibleCause, ...]:
    """The causes of an answer that stays open: the one first that reports like the text had most often."""
    is_of_device = "speaks_of_gpu" in clues.run.told and not OF_HOST & clues.run.told
    excluded = _NEVER_USUAL | (HOST_CAUSES if is_of_device else frozenset())
    likely = {cause: share for cause, share in shares.items() if share >= _USUAL_FROM and cause not in excluded}
    usual = next(iter(_by_precedent(failure, clues, likely)), None)
    if usual is None:
        asked = [one for one in possible if one.cause is Cause.DRIVER_LEVEL]
        others = [one for one in possible if one not in asked]
        least = min((one.degree for one in others), default=1.0)
        return (*others, *(replace(one, degree=min(one.degree, least)) for one in asked))
    made = _possible(usual.cause, [usual], failure, clues, _LIKELY_FROM - 0.01)
    first = next((one for one in possible if one.cause is usual.cause), made)
    highest = max(one.degree for one in (first, *possible))
    first = replace(first, degree=highest, confidence=Confidence.OPEN)
    return (first, *(one for one in possible if one.cause is not usual.cause))[:_MOST_POSSIBLE]


def _as_late(possible: Sequence[PossibleCause], clues: Clues) -> Iterator[PossibleCause]:
    """The causes; one that the first steps would have shown is not likely where many went well."""
    went_well = (clues.run.is_late or "after_while" in clues.run.told) and clues.phase not in ("evaluation", "saving")
    for one in possible:
        is_of_later = any(item.key in _OF_LATER_STEPS for item in one.evidence)
        is_usual = one.cause in _OF_ANY_STEP and _is_of_all_runs(one.evidence, _OF_ANY_TRAINING)
        if went_well and one.cause in _OF_ANY_STEP and one.confidence is Confidence.LIKELY and not is_of_later:
            yield replace(one, degree=_LIKELY_FROM - 0.01, confidence=Confidence.POSSIBLE)
        elif went_well and is_usual:
            yield replace(one, degree=one.degree * _OF_THIS_RUN)
        else:
            yield one


def main_failure(failures: Sequence[Failure]) -> Failure | None:
    """The failure that explains a text best: surely about memory, of a size that cannot be, the fullest, the first.

    ``std::bad_alloc`` beside a device's failure is what its C++ code raises then; llama.cpp goes on
    without pinned memory.
    """
    certainty = {True: 2, None: 1, False: 0}
    is_of_llama = any(one.format.startswith("llama_cpp") for one in failures)
    beside_others = (_OF_ANY_CPP, "pinned_memory") if is_of_llama else (_OF_ANY_CPP,)

    def rank(failure: Failure) -> tuple[int, bool, bool, int]:
        is_impossible = failure.total_bytes is None and is_overflow(failure)
        return certainty[failure.is_oom], is_impossible, failure.format not in beside_others, failure.num_sizes

    return max(failures, key=rank, default=None)


def _supports(failure: Failure | None, clues: Clues, text: str) -> Iterator[Support]:
    """All evidence for causes; if the kind of message settles the cause, only that."""
    if failure is not None and failure.total_bytes is None and is_overflow(failure):
        values = {"requested_bytes": failure.requested_bytes or 0}
        if SHRINKING.search(text):  # no operation asks so: it is what the device was said to have
            yield Support(Cause.DRIVER_LEVEL, 0.97, Evidence("device_misreported", values))
            return
        yield Support(Cause.REQUEST_ALONE_TOO_BIG, 0.97, Evidence("request_overflowed", values))
        yield from overflow_rules(failure, clues)
        return
    if failure is not None and failure.format in _FIXED:
        cause, confidence = _FIXED[failure.format]
        if failure.format == _OF_ANY_CPP and "speaks_of_gpu" in clues.run.told and not OF_HOST & clues.run.told:
            confidence = Confidence.LIKELY  # a library's allocator for a device raises it, too
        named = [*named_tensor(failure, clues, text)] if failure.format == "mps_invalid_buffer" else []
        if named:  # what is too large for one buffer is known
            yield from named
            return
        if cause is not Cause.DRIVER_LEVEL or not _allocates_itself(clues):
            is_open = failure.format in _LIBRARIES_ASK and clues.has_prose
            weight = _WHO_ASKED if is_open else _WEIGHTS[confidence]
            is_refused = is_open and "device_idle" in clues.run.told  # where others saw room
            yield Support(cause, _REFUSED_WITH_ROOM if is_refused else weight, _meaning(failure, clues))
        if failure.format == "cuda_absurd_size":
            yield from overflow_rules(failure, clues)
        if confidence is Confidence.CERTAIN:
            return
    if failure is not None:
        yield from number_rules(failure, clues)
        yield from _driver(failure, clues)
    yield from text_rules(failure, clues, text)
    yield from situation_rules(failure, clues)


# Programs that allocate weights and buffers from the driver: this is their usual message.
_OWN_ALLOCATORS = ("llama_cpp", "ollama", "numba", "thrust", "cupy", "tensorrt")


def _allocates_itself(clues: Clues) -> bool:
    return clues.program is not None and clues.program.program.key in _OWN_ALLOCATORS


def _driver(failure: Failure, clues: Clues) -> Iterator[Support]:
    """Messages raised outside PyTorch's allocator."""
    if _allocates_itself(clues):
        return
    if (
        failure.format in ("cudnn", "cublas")
        and clues.program is not None
        and clues.program.program.key == "tensorflow"
    ):
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.55, Evidence("library_beside_share"))
        return
    text = failure.text.lower()
    is_bare = not (clues.frames or clues.phase)
    is_driver = (
        (failure.format == "cuda_error_oom" and (failure.torch_version_guess or is_bare))
        or (failure.format == "cuda_thc_pre0.4.1" and "random" in text)
        or (failure.format == "cublas" and ("alloc" in text or "create" in text))
        or (failure.format == "cudnn" and "cudnn_status" in text)
        or (failure.format == "nvml_assert" and "nvmlinit" in text)
    )
    if is_driver and failure.is_oom and not {"smaller_batch_helps", "larger_input_fails", "grows"} & clues.run.told:
        has_stage = clues.program is not None and clues.program.stage is not None  # whose memory it was, is known
        weight = 0.25 if has_stage else 0.45 if clues.tells_of_training or clues.full_devices else 0.62
        if failure.format == "cuda_error_oom" and not failure.torch_version_guess:
            weight = _WHO_ASKED if clues.has_prose else 0.5
        if failure.format == "cuda_error_oom" and clues.phase in ("forward", "backward", "loss"):
            weight = 0.3  # PyTorch up to 0.4.1 says no more when its own tensors fill the device
        yield Support(Cause.DRIVER_LEVEL, weight, _meaning(failure, clues))


def _meaning(failure: Failure, clues: Clues) -> Evidence:
    return meaning_of(failure, None if clues.program is None else clues.program.program)


def _weighed(
    supports: Sequence[Support], failure: Failure | None, clues: Clues, most: float = 1.0
) -> tuple[PossibleCause, ...]:
    """The ``most`` likeliest causes: reasons combine as independent ones, reasons against reduce the degree."""
    order = list(dict.fromkeys(one.cause for one in supports if one.weight > 0))
    is_told = failure is not None and failure.format == "told_host" and "speaks_of_gpu" not in clues.run.told
    is_told = is_told and not ONE_MEMORY & set(clues.systems)
    if failure is not None and (is_told or _FIXED.get(failure.format, _OPEN)[0] in HOST_CAUSES):
        order = [cause for cause in order if cause not in _OF_DEVICE]
    found = [_possible(cause, [one for one in supports if one.cause is cause], failure, clues, most) for cause in order]
    is_certain = any(one.confidence is Confidence.CERTAIN for one in found)
    worth = [one for one in found if one.degree >= (_LIKELY_FROM if is_certain else _WORTH_NAMING)]
    return tuple(sorted(worth, key=lambda one: -one.degree)[:_MOST_POSSIBLE])


def _possible(
    cause: Cause, reasons: Sequence[Support], failure: Failure | None, clues: Clues, most: float
) -> PossibleCause:
    doubt, unrefuted = 1.0, 1.0
    for one in reasons:
        if one.weight > 0:
            doubt *= 1 - one.weight
        else:
            unrefuted *= 1 + one.weight
    degree = min(round((1 - doubt) * unrefuted, 3), most)
    told = sorted((one for one in reasons if one.weight > 0 and one.evidence is not None), key=lambda one: -one.weight)
    evidence = _distinct(told)
    return PossibleCause(cause, degree, _confidence(degree, evidence), evidence, check_for(cause, failure, clues))


def _distinct(reasons: Sequence[Support]) -> tuple[Evidence, ...]:
    """Each piece of evidence once."""
    found = [one.evidence for one in reasons if one.evidence is not None]
    return tuple(one for number, one in enumerate(found) if one not in found[:number])


def _is_of_all_runs(evidence: Sequence[Evidence], others: frozenset[str] = frozenset()) -> bool:
    return all(one.key in _OF_ALL_RUNS or one.key in others for one in evidence)


def _confidence(degree: float, evidence: Sequence[Evidence]) -> Confidence:
    """How sure a cause is; what is only likely of runs in general is left open."""
    if _is_of_all_runs(evidence, _OF_ANY_TRAINING):
        return Confidence.OPEN
    if degree >= _CERTAIN_FROM:
        return Confidence.CERTAIN
    if degree >= _LIKELY_FROM:
        return Confidence.LIKELY
    return Confidence.POSSIBLE if degree >= _NAMED_FROM else Confidence.OPEN
