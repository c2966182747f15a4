"""Causes, what speaks for them, and how sure a judgement is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Cause(str, Enum):
    """Why memory did not suffice; the names that %oom_explain and its data use."""

    FRAGMENTATION = "fragmentation"
    OTHER_PROCESS = "other_process"
    REQUEST_ALONE_TOO_BIG = "request_alone_too_big"
    WEIGHTS_TOO_BIG = "weights_too_big"
    ACTIVATIONS = "activations"
    LOGITS_OR_LOSS = "logits_or_loss"
    ATTENTION_SCORES = "attention_scores"
    OPTIMIZER_STATE = "optimizer_state"
    LEAK_OR_RETAINED_REFERENCE = "leak_or_retained_reference"
    MEMORY_FRACTION_LIMIT = "memory_fraction_limit"
    SYSMEM_FALLBACK = "sysmem_fallback"
    HOST_RAM = "host_ram"
    SHARED_MEMORY = "shared_memory"
    DRIVER_LEVEL = "driver_level"
    NOT_OOM = "not_oom"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


class Confidence(str, Enum):
    """How sure a judgement is, in words that the catalogue spells out."""

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"
    OPEN = "open"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Evidence:
    """One fact that a judgement rests on: a key of the catalogue and the values its sentence names."""

    key: str
    values: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Support:
    """One reason for a cause: how far it alone convinces (0 to 1; below 0 it speaks against), and its sentence."""

    cause: Cause
    weight: float
    evidence: Evidence | None = None


@dataclass(frozen=True)
class PossibleCause:
    """A cause with its degree (0 to 1), what speaks for it and the one check that would settle it."""

    cause: Cause
    degree: float
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    check: Evidence


@dataclass(frozen=True)
class Judgement:
    """A cause with the evidence for it; iterable as ``cause, evidence, confidence``.

    ``possible`` holds all causes that a text leaves possible, the likeliest first, where it was judged by its text.
    """

    cause: Cause
    evidence: tuple[Evidence, ...]
    confidence: Confidence
    possible: tuple[PossibleCause, ...] = ()

    @property
    def without_doubts(self) -> tuple[Evidence, ...]:
        """The evidence but for what it says is not known."""
        return tuple(one for one in self.evidence if one.key not in DOUBTS)

    def __iter__(self) -> Iterator[Cause | tuple[Evidence, ...] | Confidence]:
        return iter((self.cause, self.evidence, self.confidence))


# Evidence that only says what is open; a cause that is found makes it void.
<<<<<<< HEAD
DOUBTS = ("whose_not_said", "why_not_granted")
# Memory stuck in the cache is called the cause from this share of what PyTorch holds: below it,
# freeing it all would only have delayed the failure.
MIN_STUCK_SHARE = 0.04
# Others on the card are called the cause from this share of its capacity.
_MIN_OTHERS_SHARE = 0.25
# From this share of the capacity others, or a rest that nobody listed, are worth a look.
_NOTEWORTHY_SHARE = 0.05
# A training step's own tensors are called the cause from this share of the capacity.
_MIN_OWN_SHARE = 0.6
# CUDA context and libraries of one process, where the message does not tell them apart from others.
_OWN_OUTSIDE_BYTES = 3 * GIB // 4
# The CUDA context takes the rest even of an empty card.
_MOST_USABLE_SHARE = 0.97
# The largest block of Level Zero without UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1.
_XPU_BLOCK_BYTES = 4 * GIB
# Sizes that the allocator asks for whatever small tensor needs room.
_NAMELESS_REQUESTS = (2 * 2**20, 20 * 2**20)

_OF_TENSORS = {
    "attention_scores": Cause.ATTENTION_SCORES,
    "logits_or_loss": Cause.LOGITS_OR_LOSS,
    "kv_cache": Cause.ACTIVATIONS,  # a forward's, which grows with batch and length
}
_FIXED: dict[str, tuple[Cause, Confidence]] = {
    "cuda_preempted": (Cause.MEMORY_FRACTION_LIMIT, Confidence.CERTAIN),
    "cuda_absurd_size": (Cause.REQUEST_ALONE_TOO_BIG, Confidence.CERTAIN),
    "cuda_driver_error": (Cause.DRIVER_LEVEL, Confidence.CERTAIN),
    "jetson_nvmap": (Cause.DRIVER_LEVEL, Confidence.CERTAIN),
    "cuda_va_exhausted": (Cause.DRIVER_LEVEL, Confidence.CERTAIN),
    "nccl": (Cause.DRIVER_LEVEL, Confidence.LIKELY),
    "third_party_cuda_oom": (Cause.DRIVER_LEVEL, Confidence.LIKELY),
    "bitsandbytes": (Cause.DRIVER_LEVEL, Confidence.LIKELY),
    "cpu_allocator": (Cause.HOST_RAM, Confidence.CERTAIN),
    "numpy": (Cause.HOST_RAM, Confidence.CERTAIN),
    "memory_error": (Cause.HOST_RAM, Confidence.CERTAIN),
    "bad_alloc": (Cause.HOST_RAM, Confidence.CERTAIN),
    "fork_enomem": (Cause.HOST_RAM, Confidence.CERTAIN),
    "windows_paging_file": (Cause.HOST_RAM, Confidence.CERTAIN),
    "dataloader": (Cause.SHARED_MEMORY, Confidence.LIKELY),
    "shared_memory_full": (Cause.SHARED_MEMORY, Confidence.CERTAIN),
    "dataloader_killed": (Cause.HOST_RAM, Confidence.LIKELY),
    "slurm_oom_kill": (Cause.HOST_RAM, Confidence.CERTAIN),
    "scheduler_oom_kill": (Cause.HOST_RAM, Confidence.CERTAIN),
    "ray_oom_kill": (Cause.HOST_RAM, Confidence.CERTAIN),
    "sglang": (Cause.MEMORY_FRACTION_LIMIT, Confidence.CERTAIN),
    "kernel_oom_killer": (Cause.HOST_RAM, Confidence.CERTAIN),
    "sigkill": (Cause.HOST_RAM, Confidence.LIKELY),
    "notebook_host": (Cause.HOST_RAM, Confidence.LIKELY),
    "vllm": (Cause.MEMORY_FRACTION_LIMIT, Confidence.CERTAIN),
    "vllm_startup": (Cause.OTHER_PROCESS, Confidence.LIKELY),
    "hf_offload": (Cause.WEIGHTS_TOO_BIG, Confidence.CERTAIN),
    "hf_auto_batch": (Cause.ACTIVATIONS, Confidence.POSSIBLE),
    "mps_invalid_buffer": (Cause.REQUEST_ALONE_TOO_BIG, Confidence.CERTAIN),
    "ipex_4gb": (Cause.REQUEST_ALONE_TOO_BIG, Confidence.CERTAIN),
}


def judge(failures: Sequence[Failure], text: str, clues: Clues | None = None) -> Judgement:
    """The cause of the failures that ``read`` found in a text, with evidence and confidence.

    Where the text does not establish a cause the answer is ``unknown``, never a guess. ``clues`` saves
    looking at the text again.
    """
    failure = main_failure(failures)
    if clues is None:
        clues = find_clues(text, failure.start if failure else None)
    if failure is None:
        return _judge_traceback(clues)
    if failure.is_oom is False:
        return Judgement(Cause.NOT_OOM, (_meaning(failure),), Confidence.CERTAIN)
    if failure.format in _FIXED and failure.is_oom:
        cause, confidence = _FIXED[failure.format]
        return Judgement(cause, (_meaning(failure),), confidence)
    unknown = Judgement(Cause.UNKNOWN, tuple(_observations(failure)), Confidence.OPEN)
    return next((verdict for verdict in _verdicts(failure, clues) if verdict is not None), unknown)


def main_failure(failures: Sequence[Failure]) -> Failure | None:
    """The failure that explains a text best: surely about memory, then the fullest, then the first."""
    certainty = {True: 2, None: 1, False: 0}
    return max(failures, key=lambda failure: (certainty[failure.is_oom], failure.num_sizes), default=None)


def _judge_traceback(clues: Clues) -> Judgement:
    """A paste that lost its last line still shows an optimizer at work."""
    if clues.phase == "optimizer_step":
        evidence = (Evidence("no_message"), Evidence("phase_optimizer_step", _where(clues)))
        return Judgement(Cause.OPTIMIZER_STATE, evidence, Confidence.POSSIBLE)
    return Judgement(Cause.UNKNOWN, (Evidence("no_message"),), Confidence.OPEN)


def _where(clues: Clues) -> dict[str, int | str]:
    """The line of code that a sentence of evidence shows."""
    return {"code": clues.code or "..."}


def _meaning(failure: Failure) -> Evidence:
    """What a message without numbers means, by its format."""
    return Evidence(f"meaning_{failure.format}")


def _free_above_request(failure: Failure) -> Evidence:
    values = {"free_bytes": failure.free_bytes or 0, "requested_bytes": failure.requested_bytes or 0}
    return Evidence("free_above_request", values)


def _sysmem_fallback(failure: Failure, clues: Clues) -> Judgement | None:
    held, total = failure.pytorch_bytes, failure.total_bytes
    confidence = Confidence.CERTAIN
    if total is None and {"Windows", "WSL"} & set(clues.systems):
        total, confidence = clues.stated_total_bytes, Confidence.LIKELY
    if held is None or not total or failure.backend != "cuda" or held <= total + 2 * rounding_bytes(total):
        return None
    evidence = Evidence("allocated_above_capacity", {"held_bytes": held, "total_bytes": total})
    return Judgement(Cause.SYSMEM_FALLBACK, (evidence,), confidence)


def _limit(failure: Failure) -> Judgement | None:
    limit, held, requested = failure.limit_bytes, failure.pytorch_bytes, failure.requested_bytes
    if limit is None or requested is None or failure.backend == "mps":
        return None
    total = failure.total_bytes
    if total is not None and requested > total:
        return None
    is_binding = held is not None and held + requested > limit
    has_room = failure.free_bytes is not None and failure.free_bytes >= requested
    if not (is_binding or has_room):
        return None
    values = {"limit_bytes": limit, "held_bytes": held or 0, "requested_bytes": requested}
    evidence = [Evidence("limit_binds", values)]
    if has_room:
        evidence.append(_free_above_request(failure))
    return Judgement(Cause.MEMORY_FRACTION_LIMIT, tuple(evidence), Confidence.CERTAIN)


def _private_pools(failure: Failure) -> Judgement | None:
    pool, allocated = failure.private_pool_bytes, failure.allocated_bytes
    if pool is None or not allocated or pool < allocated // 2:
        return None
    evidence = Evidence("private_pools_hold", {"private_pool_bytes": pool, "allocated_bytes": allocated})
    return Judgement(Cause.ACTIVATIONS, (evidence,), Confidence.LIKELY)


def _too_big_tensor(failure: Failure, clues: Clues) -> Judgement | None:
    """A request that no emptier card could serve; the traceback may name the tensor."""
    requested = failure.requested_bytes
    capacity = failure.total_bytes or (failure.limit_bytes if failure.backend == "mps" else None)
    if requested is None or capacity is None or requested <= capacity * _MOST_USABLE_SHARE:
        return None
    evidence = [Evidence("request_above_capacity", {"requested_bytes": requested, "total_bytes": capacity})]
    if clues.tensor:
        evidence.append(Evidence(f"tensor_{clues.tensor}", _where(clues)))
        return Judgement(_OF_TENSORS[clues.tensor], tuple(evidence), Confidence.LIKELY)
    return Judgement(Cause.REQUEST_ALONE_TOO_BIG, tuple(evidence), Confidence.CERTAIN)


def _above_block_limit(failure: Failure) -> Judgement | None:
    """Intel's driver gives no block of 4 GiB or more unless told to, whatever is free."""
    requested, total = failure.requested_bytes, failure.total_bytes
    free = failure.free_bytes
    if free is None and total is not None and failure.pytorch_bytes is not None:
        free = total - failure.pytorch_bytes
    if failure.backend != "xpu" or not requested or requested < _XPU_BLOCK_BYTES or free is None or free < requested:
        return None
    values = {"requested_bytes": requested, "free_bytes": free, "limit_bytes": _XPU_BLOCK_BYTES}
    return Judgement(Cause.REQUEST_ALONE_TOO_BIG, (Evidence("above_block_limit", values),), Confidence.LIKELY)


def _others(failure: Failure) -> Judgement | None:
    """Other processes hold a good part of the card, and enough that without them the request fits."""
    total, requested = failure.total_bytes, failure.requested_bytes
    others = others_bytes(failure)
    if not total or others is None or others < total * _MIN_OTHERS_SHARE:
        return None
    if requested is not None and others < requested - (failure.free_bytes or 0):
        return None
    if failure.listed_other_bytes >= total * _MIN_OTHERS_SHARE:
        return Judgement(Cause.OTHER_PROCESS, (_others_listed(failure),), Confidence.CERTAIN)
    values = {"other_bytes": others, "total_bytes": total, "held_bytes": failure.pytorch_bytes or 0}
    confidence = Confidence.LIKELY if failure.backend == "cuda" else Confidence.POSSIBLE
    return Judgement(Cause.OTHER_PROCESS, (Evidence("others_unlisted", values),), confidence)


def _others_listed(failure: Failure) -> Evidence:
    pids = ", ".join(str(pid) for pid, _ in failure.other_processes if pid != failure.self_listed_as_pid)
    sizes = {"other_bytes": failure.listed_other_bytes, "total_bytes": failure.total_bytes or 0}
    return Evidence("others_listed", {"pids": pids, **sizes})


def unlisted_bytes(failure: Failure) -> int:
    """Bytes that the message's numbers leave to nobody it lists; 0 where that is little or cannot be told."""
    rest = (others_bytes(failure) or 0) - failure.listed_other_bytes
    return rest if rest >= (failure.total_bytes or 0) * _NOTEWORTHY_SHARE else 0


def others_bytes(failure: Failure) -> int | None:
    """Bytes held on the card by other processes, listed or not; None where the message cannot tell."""
    if failure.total_bytes is None or failure.free_bytes is None or failure.free_bytes > failure.total_bytes:
        return None
    if failure.format == "cuda_malloc_async":  # what its pool keeps unused is not printed
        return None
    own = failure.own_process_bytes
    if own is None:
        if failure.pytorch_bytes is None:
            return None
        own = failure.pytorch_bytes + _OWN_OUTSIDE_BYTES
    return max(0, failure.total_bytes - failure.free_bytes - own)


def _mps_others(failure: Failure) -> Judgement | None:
    """On a Mac the GPU shares memory with everything else; only a large share of it is telling."""
    other, limit, allocated = failure.mps_other_bytes, failure.limit_bytes, failure.allocated_bytes
    if other is None or allocated is None or other < 2 * allocated or (limit and other < limit / 2):
        return None
    values = {"other_bytes": other, "held_bytes": allocated, "limit_bytes": limit or 0}
    return Judgement(Cause.OTHER_PROCESS, (Evidence("mps_others", values),), Confidence.LIKELY)


def _fragmentation(failure: Failure) -> Judgement | None:
    """Enough for the request lies in PyTorch's own cache, in pieces that do not join."""
    stuck, requested, held = failure.stuck_bytes, failure.requested_bytes, failure.pytorch_bytes
    if stuck is None or requested is None or not held or stuck < requested:
        return None
    if stuck < held * MIN_STUCK_SHARE or requested == _NAMELESS_REQUESTS[0]:
        return None
    evidence = Evidence("stuck_above_request", {"stuck_bytes": stuck, "requested_bytes": requested})
    return Judgement(Cause.FRAGMENTATION, (evidence,), Confidence.LIKELY)


def _shown_tensor(failure: Failure, clues: Clues) -> Judgement | None:
    """The innermost line of the traceback names the tensor."""
    if clues.tensor is None or failure.requested_bytes in _NAMELESS_REQUESTS:
        return None
    evidence = Evidence(f"tensor_{clues.tensor}", _where(clues))
    return Judgement(_OF_TENSORS[clues.tensor], (evidence,), Confidence.LIKELY)


_BY_PHASE = {
    "optimizer_step": (Cause.OPTIMIZER_STATE, Confidence.LIKELY),
    "loading": (Cause.WEIGHTS_TOO_BIG, Confidence.LIKELY),
    "saving": (Cause.WEIGHTS_TOO_BIG, Confidence.LIKELY),
    "evaluation": (Cause.ACTIVATIONS, Confidence.POSSIBLE),
}


def _shown_phase(failure: Failure, clues: Clues) -> Judgement | None:
    """A phase that makes one kind of tensor: moments in the optimizer, weights while loading."""
    if clues.phase is None or clues.phase not in _BY_PHASE:
        return None
    cause, confidence = _BY_PHASE[clues.phase]
    if failure.pytorch_bytes is None:
        confidence = Confidence.POSSIBLE
    return Judgement(cause, (Evidence(f"phase_{clues.phase}", _where(clues)),), confidence)


def _leak(clues: Clues) -> Judgement | None:
    if not (clues.keeps_graph or clues.grows):
        return None
    key = "code_keeps_graph" if clues.keeps_graph else "memory_grows"
    return Judgement(Cause.LEAK_OR_RETAINED_REFERENCE, (Evidence(key),), Confidence.POSSIBLE)


def _training_step(failure: Failure, clues: Clues) -> Judgement | None:
    """A training step on a card full of its own tensors: those that grow with the batch are activations."""
    held, total = failure.pytorch_bytes, failure.total_bytes
    if not clues.is_training or clues.phase not in ("forward", "backward", "loss"):
        return None
    if held is None or not total or held < total * _MIN_OWN_SHARE:
        return None
    values: dict[str, int | str] = {"held_bytes": held, "total_bytes": total}
    evidence = (Evidence("own_tensors_fill", values), Evidence(f"phase_{clues.phase}", _where(clues)))
    return Judgement(Cause.ACTIVATIONS, evidence, Confidence.POSSIBLE)


def _driver(failure: Failure, clues: Clues) -> Judgement | None:
    """Messages raised outside PyTorch's allocator, where nothing clearer is known."""
    text = failure.text.lower()
    is_driver = (
        (failure.format == "cuda_error_oom" and (failure.torch_version_guess or not (clues.frames or clues.phase)))
        or (failure.format == "cuda_thc_pre0.4.1" and "random" in text)
        or (failure.format == "cublas" and "alloc" in text)
        or (failure.format == "cudnn" and "cudnn_status" in text)
        or (failure.format == "nvml_assert" and "nvmlinit" in text)
    )
    if not is_driver or not failure.is_oom:
        return None
    return Judgement(Cause.DRIVER_LEVEL, (_meaning(failure),), Confidence.LIKELY)


def _refused_with_room(failure: Failure) -> Judgement | None:
    """Free memory would do, and so would the cache: address space is in pieces (2.00 MiB fits anywhere)."""
    stuck, free, requested = failure.stuck_bytes, failure.free_bytes, failure.requested_bytes
    if stuck is None or free is None or requested is None or requested == _NAMELESS_REQUESTS[0]:
        return None
    if failure.backend != "cuda" or not (stuck >= requested and free >= requested):
        return None
    values = {"stuck_bytes": stuck, "free_bytes": free, "requested_bytes": requested}
    return Judgement(Cause.FRAGMENTATION, (Evidence("room_in_pieces", values),), Confidence.POSSIBLE)


def _verdicts(failure: Failure, clues: Clues) -> Iterator[Judgement | None]:
    """What each rule says: numbers first, then what the traceback shows. The first to speak decides."""
    yield _sysmem_fallback(failure, clues)
    yield _limit(failure)
    yield _private_pools(failure)
    yield _too_big_tensor(failure, clues)
    yield _above_block_limit(failure)
    yield _others(failure)
    yield _mps_others(failure)
    yield _fragmentation(failure)
    yield _shown_tensor(failure, clues)
    yield _shown_phase(failure, clues)
    yield _leak(clues)
    yield _training_step(failure, clues)
    yield _driver(failure, clues)
    yield _refused_with_room(failure)


def _observations(failure: Failure) -> Iterator[Evidence]:
    """What is known although the cause is not."""
    held, total, requested = failure.pytorch_bytes, failure.total_bytes, failure.requested_bytes
    if held is not None and total:
        yield Evidence("own_tensors_fill", {"held_bytes": held, "total_bytes": total})
        if held >= total * _MIN_OWN_SHARE:
            yield Evidence("whose_not_said")
    if total and failure.listed_other_bytes >= total * _NOTEWORTHY_SHARE:
        yield _others_listed(failure)
    if unlisted_bytes(failure):
        yield Evidence("rest_unlisted", {"other_bytes": unlisted_bytes(failure), "total_bytes": total or 0})
    if failure.free_bytes is not None and requested is not None and failure.free_bytes >= requested:
        yield _free_above_request(failure)
        yield Evidence("why_not_granted")
    if held is None:
        yield _meaning(failure)
=======
_DOUBTS = ("whose_not_said", "why_not_granted")
>>>>>>> 7aad4bb (Reports of other people are read as evidence for ranked causes: programs, progress, pasted code, whose memory; 180 public reports with their established causes)
