"""What a message's numbers show about the cause and about PyTorch's own tip, and how they are often misread."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from oom_magic.explain.evidence.causes import Cause, Evidence, Support
from oom_magic.explain.evidence.clues.environment import ONE_MEMORY
from oom_magic.explain.evidence.clues.traceback import Clues
from oom_magic.explain.messages.failure import Failure, rounding_bytes
from oom_magic.units import GIB, MIB

# Memory stuck in the cache is called the cause if it is at least this share of what PyTorch holds: with less, freeing
# it all would only have delayed the failure.
MIN_STUCK_SHARE = 0.04
# With at least this share of what PyTorch holds, stuck memory is unlikely to be a coincidence.
_MUCH_STUCK_SHARE = 0.1
# From this share it is likely the cause; of the twelve public reports between the two none established fragmentation.
_MOSTLY_STUCK_SHARE = 1 / 3
# PyTorch releases unused segments before it fails, so this much memory that was not released is fragmented.
_UNRELEASABLE_SHARE = 0.25
# Every run leaves a few segments of 20 MiB partly unused.
_SMALL_REMAINDER = 160 * MIB
# Others on the card are called the cause from this share of its capacity; at a fifth two reports of tests/data have
# another established cause (what the message does not count of a process is sometimes more than its context).
MIN_OTHERS_SHARE = 0.25
# From this share of the capacity, other processes or an unexplained rest are worth mentioning.
_NOTEWORTHY_SHARE = 0.05
# A step's or a model's own tensors fill the device from this share of its capacity.
_NEARLY_ALL = 0.9
_ALMOST_NOTHING = 0.1
OWN_SHARE = 0.6
_HALF = 0.5
# CUDA context and libraries of one process, where the message does not tell them apart from others.
_OWN_OUTSIDE_BYTES = 3 * GIB // 4
# The CUDA context takes the rest even of an empty card.
_MOST_USABLE_SHARE = 0.97
# The largest block of Level Zero without UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1.
_XPU_BLOCK_BYTES = 4 * GIB
# Segment sizes that the allocator requests for any small tensor.
_CARVE_OUT_BYTES = 4 * GIB
NAMELESS_REQUESTS = (2 * MIB, 20 * MIB)
_OF_PICTURES = ("comfyui", "webui", "diffusers", "diffusion")  # programs that make them
# A request of this many times the device's capacity is not an intended tensor.
_ABSURD_TIMES = 20
# Beyond any computer's memory: such a size is a mistake, and a power of two an overflowed product.
_NO_MEMORY_HOLDS = 2**50
_NO_DEVICE_HOLDS = 2**44
_LIGHT_PART = 4  # weights that fit the card so many times are not what fills it

# Causes that are held by PyTorch when a request is refused.
OF_WHAT_IT_HOLDS = frozenset({
    Cause.ACTIVATIONS, Cause.LEAK_OR_RETAINED_REFERENCE, Cause.OPTIMIZER_STATE, Cause.FRAGMENTATION,
})  # fmt: skip

TENSOR_CAUSES = {
    "attention_scores": Cause.ATTENTION_SCORES,
    "logits_or_loss": Cause.LOGITS_OR_LOSS,
    "kv_cache": Cause.ACTIVATIONS,  # a forward's, which grows with batch and length
}


def number_rules(failure: Failure, clues: Clues) -> Iterator[Support]:
    """The results of all rules on numbers, the most decisive first."""
    yield from _sysmem_fallback(failure, clues)
    yield from _limit(failure)
    yield from _private_pools(failure)
    yield from _too_big_request(failure, clues)
    yield from _above_block_limit(failure)
    yield from [*_within(failure, clues)] or _others(failure)
    yield from _little_of_its_own(failure, clues)
    yield from _mps(failure, clues)
    yield from _fragmentation(failure, clues)
    yield from _refused_with_room(failure, clues)
    if holds_nothing(failure):
        yield from (Support(cause, -0.9) for cause in OF_WHAT_IT_HOLDS)


def _sysmem_fallback(failure: Failure, clues: Clues) -> Iterator[Support]:
    held, total, weight = failure.pytorch_bytes, failure.total_bytes, 0.97
    if total is None and {"Windows", "WSL"} & set(clues.systems):
        total, weight = clues.card_bytes, 0.85
    if held is None or not total or failure.backend != "cuda" or held <= total + 2 * rounding_bytes(total):
        return
    if (failure.requested_bytes or 0) > held:
        return  # more than the driver ever provides, so a fallback would not have helped
    if (failure.requested_bytes or 0) > total:
        weight = min(weight, 0.5)  # one tensor that no such card can hold comes first
    evidence = Evidence("allocated_above_capacity", {"held_bytes": held, "total_bytes": total})
    yield Support(Cause.SYSMEM_FALLBACK, weight, evidence)


_WHOLE = 0.995  # of a device: a limit that takes nothing from it


def _limit(failure: Failure) -> Iterator[Support]:
    limit, held, requested = failure.limit_bytes, failure.pytorch_bytes, failure.requested_bytes
    if limit is None or requested is None or failure.backend == "mps":
        return
    total = failure.total_bytes
    if total is not None and (requested > total or limit >= total * _WHOLE):
        return
    is_binding = held is not None and held + requested > limit
    has_room = failure.free_bytes is not None and failure.free_bytes >= requested
    if not (is_binding or has_room):
        return
    values = {"limit_bytes": limit, "held_bytes": held or 0, "requested_bytes": requested}
    yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.97, Evidence("limit_binds", values))
    if has_room:
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.1, _free_above_request(failure))


def _private_pools(failure: Failure) -> Iterator[Support]:
    pool, allocated = failure.private_pool_bytes, failure.allocated_bytes
    if pool is not None and allocated and pool >= allocated // 2:
        values = {"private_pool_bytes": pool, "allocated_bytes": allocated}
        yield Support(Cause.ACTIVATIONS, 0.8, Evidence("private_pools_hold", values))


def _too_big_request(failure: Failure, clues: Clues) -> Iterator[Support]:
    """A request that no emptier device could serve; the traceback may name the tensor."""
    requested = failure.requested_bytes
    capacity = failure.total_bytes or (failure.limit_bytes if failure.backend == "mps" else None)
    if requested is None or capacity is None or requested <= capacity * _MOST_USABLE_SHARE:
        return
    values = {"requested_bytes": requested, "total_bytes": capacity}
    # what is over all pairs of an input's elements or a picture's points grows to any size, and is meant so
    of_pairs = {"dense_pairs", "of_latents", "diffuses", "makes_pictures", "sees_pictures"}
    is_of_pairs = not of_pairs.isdisjoint(clues.run.told) or (
        clues.program is not None and clues.program.program.key in _OF_PICTURES
    )
    if requested > _ABSURD_TIMES * capacity and clues.tensor is None and not (is_of_pairs and not is_overflow(failure)):
        yield Support(Cause.REQUEST_ALONE_TOO_BIG, 0.97, Evidence("request_absurd", values))
        yield from overflow_rules(failure, clues)
        return
    evidence = Evidence("request_above_capacity", values)
    if clues.inputs:
        words = ", ".join(one.words for one in clues.inputs[:3])
        yield Support(Cause.REQUEST_ALONE_TOO_BIG, 0.1, Evidence("input_named", {"what": words}))
    if clues.tensor:
        yield Support(TENSOR_CAUSES[clues.tensor], 0.6, evidence)
    else:
        yield Support(Cause.REQUEST_ALONE_TOO_BIG, 0.97 if requested > capacity else 0.7, evidence)


def is_overflow(failure: Failure) -> bool:
    """Whether the size asked for is a mistake of numbers: no memory of that kind has so much."""
    return (failure.requested_bytes or 0) >= (_NO_MEMORY_HOLDS if failure.backend == "cpu" else _NO_DEVICE_HOLDS)


def overflow_rules(failure: Failure, clues: Clues) -> Iterator[Support]:
    """A product that overflowed to a size which no device has: the power of two, and the line."""
    requested = failure.requested_bytes or 0
    if requested >= _NO_MEMORY_HOLDS and requested & (requested - 1) == 0:
        power = Evidence("request_is_power", {"requested_bytes": requested, "exponent": requested.bit_length() - 1})
        yield Support(Cause.REQUEST_ALONE_TOO_BIG, 0.1, power)
    if clues.code:
        yield Support(Cause.REQUEST_ALONE_TOO_BIG, 0.09, Evidence("request_of_line", {"code": clues.code}))


def _above_block_limit(failure: Failure) -> Iterator[Support]:
    """Intel's driver refuses single blocks of 4 GiB or more unless configured, however much is free."""
    requested, total, free = failure.requested_bytes, failure.total_bytes, failure.free_bytes
    if failure.backend != "xpu" or not requested or requested < _XPU_BLOCK_BYTES:
        return
    if free is None and total is not None:
        free = total - (failure.pytorch_bytes or 0)
    if free is not None and free >= requested:
        values = {"requested_bytes": requested, "free_bytes": free, "limit_bytes": _XPU_BLOCK_BYTES}
        yield Support(Cause.REQUEST_ALONE_TOO_BIG, 0.85, Evidence("above_block_limit", values))


def _within(failure: Failure, clues: Clues) -> Iterator[Support]:
    """Memory that this process holds outside PyTorch: by the message, or as no other runs there."""
    total, held, own = failure.total_bytes or 0, failure.pytorch_bytes, failure.own_process_bytes
    if own is None and "alone" in clues.run.told:
        own = (held or 0) + (others_bytes(failure) or 0)
    outside = (own or 0) - (held or 0)
    if held is not None and outside >= max(_MOST_OF_A_CONTEXT, total * MIN_OTHERS_SHARE) and outside > held:
        values = {"other_bytes": outside, "held_bytes": held}
        yield Support(Cause.OTHER_PROCESS, 0.6, Evidence("held_within", values))


def _others(failure: Failure) -> Iterator[Support]:
    """Other processes hold a good part of the device, and enough that without them the request fits."""
    total, requested = failure.total_bytes, failure.requested_bytes
    others = others_bytes(failure)
    if total and others is None and (failure.pytorch_bytes or 0) >= total * _NEARLY_ALL:
        yield Support(Cause.OTHER_PROCESS, -0.8)
    if not total or others is None:
        return
    if others < total * MIN_OTHERS_SHARE:
        if failure.own_process_bytes is not None:
            yield Support(Cause.OTHER_PROCESS, -0.8)  # this process is nearly all that is there
        return
    if is_held_by_others(failure):  # what this process keeps, or its weights, are less than that
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, -0.7)
        yield Support(Cause.WEIGHTS_TOO_BIG, -0.5)
    if requested is not None and others < requested - (failure.free_bytes or 0):
        return
    if failure.listed_other_bytes >= total * MIN_OTHERS_SHARE:
        yield Support(Cause.OTHER_PROCESS, 0.97, others_listed(failure))
        return
    values = {"other_bytes": others, "total_bytes": total, "held_bytes": failure.pytorch_bytes or 0}
    weight = 0.85 if failure.backend in ("cuda", "npu") else 0.4
    if requested is not None and requested > others:
        weight = min(weight, 0.55)  # what was asked for in one piece is more than all that they hold
    yield Support(Cause.OTHER_PROCESS, weight, Evidence("others_unlisted", values))


def _little_of_its_own(failure: Failure, clues: Clues) -> Iterator[Support]:
    """A message that does not say what was free: this process held too little to have filled the device."""
    total, held = failure.total_bytes, failure.pytorch_bytes
    if not total or held is None or failure.free_bytes is not None or failure.limit_bytes is not None:
        return
    if held + (failure.requested_bytes or 0) > total * _HALF:
        return
    evidence = Evidence("little_of_its_own", {"held_bytes": held, "total_bytes": total})
    yield Support(Cause.OTHER_PROCESS, 0.45, evidence)
    yield Support(Cause.DRIVER_LEVEL, 0.4, evidence)
    for cause in (Cause.ACTIVATIONS, Cause.OPTIMIZER_STATE, Cause.LEAK_OR_RETAINED_REFERENCE):
        yield Support(cause, -0.7)
    if clues.phase != "loading":
        yield Support(Cause.WEIGHTS_TOO_BIG, -0.7)


def holds_nothing(failure: Failure) -> bool:
    """Whether PyTorch says that it held 0 bytes; on a Mac, Metal holds more for it."""
    return failure.pytorch_bytes == 0 and failure.backend in ("cuda", "hip")


def is_held_by_others(failure: Failure | None) -> bool:
    """Whether others hold a good part of the device, and more than PyTorch does in this process."""
    others = None if failure is None else others_bytes(failure)
    if failure is None or others is None or failure.backend not in ("cuda", "npu"):
        return False
    return others >= max((failure.total_bytes or 0) * MIN_OTHERS_SHARE, failure.pytorch_bytes or 0)


def others_listed(failure: Failure) -> Evidence:
    """The other processes that the message lists, and the memory they hold."""
    pids = ", ".join(str(pid) for pid, _ in failure.other_processes if pid != failure.self_listed_as_pid)
    sizes = {"other_bytes": failure.listed_other_bytes, "total_bytes": failure.total_bytes or 0}
    return Evidence("others_listed", {"pids": pids, **sizes})


def unlisted_bytes(failure: Failure) -> int:
    """Bytes that belong to no process in the message; 0 where that is little or unknown."""
    rest = (others_bytes(failure) or 0) - failure.listed_other_bytes
    return rest if rest >= (failure.total_bytes or 0) * _NOTEWORTHY_SHARE else 0


def others_bytes(failure: Failure) -> int | None:
    """Bytes held on the device by other processes, listed or not; None where the message does not say."""
    if failure.total_bytes is None or failure.free_bytes is None or failure.free_bytes > failure.total_bytes:
        return None
    if failure.format == "cuda_malloc_async":  # the unused part of its pool is not printed
        return None
    own = failure.own_process_bytes
    if own is None:
        if failure.pytorch_bytes is None:
            return None
        own = failure.pytorch_bytes + _OWN_OUTSIDE_BYTES
    return max(0, failure.total_bytes - failure.free_bytes - own)


def _mps(failure: Failure, clues: Clues) -> Iterator[Support]:
    """On a Mac the limit is PyTorch's own watermark; "other allocations" are Metal's for the same process."""
    other, limit, allocated = failure.mps_other_bytes, failure.limit_bytes, failure.allocated_bytes
    if failure.backend != "mps" or other is None or allocated is None:
        return
    requested = failure.requested_bytes or 0
    if limit is not None and allocated + other + requested < limit * _ALMOST_NOTHING:
        sizes = {"held_bytes": allocated + other, "limit_bytes": limit, "requested_bytes": requested}
        yield Support(Cause.DRIVER_LEVEL, 0.85, Evidence("mps_refused_all", sizes))
        return
    if other >= limit / 2 if limit else other >= 2 * allocated:
        values = {"other_bytes": other, "held_bytes": allocated, "limit_bytes": limit or 0}
        stage = None if clues.program is None else clues.program.stage
        is_limit = limit and (stage is None or stage.cause is not Cause.ACTIVATIONS)  # which a step has reached
        yield Support(
            Cause.MEMORY_FRACTION_LIMIT if is_limit else Cause.ACTIVATIONS, 0.4, Evidence("mps_others", values)
        )
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.25, Evidence("mps_others", values))
        if limit:
            marked = {"held_bytes": allocated + other, "limit_bytes": limit}
            yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.3, Evidence("mps_watermark", marked))
    elif limit and allocated + other >= limit * 0.8:
        own = Evidence("mps_own_fill", {"held_bytes": allocated, "limit_bytes": limit})
        watermark = Evidence("mps_watermark", {"held_bytes": allocated + other, "limit_bytes": limit})
        is_large = requested >= limit * 0.08
        computes = is_large or clues.is_training or clues.tells_of_training or clues.tensor is not None
        cause = Cause.ACTIVATIONS if computes else Cause.WEIGHTS_TOO_BIG
        yield Support(cause, 0.4, own)
        yield Support(cause, 0.01, watermark)
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.2, watermark)


def _fragmentation(failure: Failure, clues: Clues) -> Iterator[Support]:
    """Unused memory, in PyTorch's cache and free, would suffice for the request but is not contiguous."""
    stuck, requested, held = failure.stuck_bytes, failure.requested_bytes, failure.pytorch_bytes
    if stuck is None or requested is None or not held:
        return
    if requested == NAMELESS_REQUESTS[0] or (requested == NAMELESS_REQUESTS[1] and stuck < _SMALL_REMAINDER):
        if stuck >= held * _UNRELEASABLE_SHARE:
            values = {"stuck_bytes": stuck, "requested_bytes": requested}
            yield Support(Cause.FRAGMENTATION, 0.65, Evidence("stuck_unreleasable", values))
        return
    if stuck < held * MIN_STUCK_SHARE or stuck + (failure.free_bytes or 0) < requested or 2 * stuck < requested:
        return
    if clues.accelerator == "hip" and (failure.free_bytes or 0) >= 2 * requested:
        return  # the driver refused what it had free: nothing in PyTorch's cache explains that
    is_much, is_most = stuck >= held * _MUCH_STUCK_SHARE, stuck >= held * _MOSTLY_STUCK_SHARE
    values = {"stuck_bytes": stuck, "requested_bytes": requested}
    if stuck >= requested:
        # A training step that nearly fills a device leaves so little of its cache in pieces by chance.
        weight = 0.18 if clues.program is None else 0.42
        if is_much:
            could_serve_twice = stuck >= 2 * requested >= held * _MUCH_STUCK_SHARE
            weight = 0.7 if is_most else 0.57 if could_serve_twice else 0.27
        yield Support(Cause.FRAGMENTATION, weight, Evidence("stuck_above_request", values))
    elif is_much:
        more = {**values, "free_bytes": failure.free_bytes or 0}
        yield Support(Cause.FRAGMENTATION, 0.5 if is_most else 0.27, Evidence("stuck_and_free_above_request", more))


def _refused_with_room(failure: Failure, clues: Clues) -> Iterator[Support]:
    """More was free than requested: not the device's memory, but a limit, the host or the address space."""
    free, requested, stuck = failure.free_bytes, failure.requested_bytes, failure.stuck_bytes
    if free is None or not requested or free < requested or failure.limit_bytes is not None:
        return
    if failure.total_bytes is None or free > failure.total_bytes or failure.backend not in ("cuda", "hip"):
        return
    if requested in NAMELESS_REQUESTS and free < 64 * requested:
        return  # the driver's own granularity
    is_clear = free >= 2 * requested and free >= failure.total_bytes * _NOTEWORTHY_SHARE
    is_much = (stuck or 0) >= (failure.pytorch_bytes or 0) * MIN_STUCK_SHARE
    if stuck is not None and stuck >= requested and (is_clear or is_much):
        values = {"stuck_bytes": stuck, "free_bytes": free, "requested_bytes": requested}
        yield Support(Cause.FRAGMENTATION, 0.3, Evidence("room_in_pieces", values))
    if not is_clear:
        return
    evidence = _free_above_request(failure)
    for cause in (Cause.WEIGHTS_TOO_BIG, Cause.ACTIVATIONS, Cause.OPTIMIZER_STATE):
        yield Support(cause, -0.7)
    if "hip" in (failure.backend, clues.accelerator):
        if failure.total_bytes <= _CARVE_OUT_BYTES:
            evidence = Evidence("small_carve_out", {"total_bytes": failure.total_bytes})
        yield Support(Cause.DRIVER_LEVEL, 0.45, evidence)
        return
    on_windows = bool({"Windows", "WSL"} & set(clues.systems))
    yield Support(Cause.HOST_RAM if on_windows else Cause.DRIVER_LEVEL, 0.45, evidence)
    yield Support(Cause.FRAGMENTATION, 0.3, Evidence("address_space_in_pieces"))


def _free_above_request(failure: Failure) -> Evidence:
    values = {"free_bytes": failure.free_bytes or 0, "requested_bytes": failure.requested_bytes or 0}
    return Evidence("free_above_request", values)


def observations(failure: Failure) -> Iterator[Evidence]:
    """Facts that are known although the cause is not."""
    held, total, requested = failure.pytorch_bytes, failure.total_bytes, failure.requested_bytes
    if held is not None and total:
        yield Evidence("own_tensors_fill", {"held_bytes": held, "total_bytes": total})
        if held >= total * OWN_SHARE:
            yield Evidence("whose_not_said")
    if total and failure.listed_other_bytes >= total * _NOTEWORTHY_SHARE:
        yield others_listed(failure)
    if unlisted_bytes(failure):
        yield Evidence("rest_unlisted", {"other_bytes": unlisted_bytes(failure), "total_bytes": total or 0})
    if failure.free_bytes is not None and requested is not None and failure.free_bytes >= requested:
        yield _free_above_request(failure)
        yield Evidence("why_not_granted")
    if held is None and requested is None:
        said = {"words": failure.words} if failure.words else {}
        yield Evidence("meaning_told" if said else f"meaning_{failure.format}", said)


_MOST_OF_A_CONTEXT = 2 * GIB  # what CUDA and its libraries take of a device
_GB = re.compile(r"\d ?[GM]B\b")


def facts_about(failure: Failure, clues: Clues) -> tuple[Evidence, ...]:
    """Facts that keep a reader of this message, and of the text around it, from a wrong conclusion."""
    accumulation = (Evidence("fact_accumulation"),) if clues.names_accumulation and failure.is_oom else ()
    return (*_facts(failure), *_facts_around(clues), *accumulation)


def _facts_around(clues: Clues) -> Iterator[Evidence]:
    """Corrections of what the text around a message assumes about the machine."""
    if clues.expandable_segments and "Windows" in clues.systems:
        yield Evidence("fact_expandable_windows")
    if "shuts_down" in clues.run.told and not ONE_MEMORY & set(clues.systems):
        yield Evidence("fact_no_shutdown")
    if clues.skips_tactics:
        yield Evidence("meaning_tensorrt_tactic")


def _facts(failure: Failure) -> Iterator[Evidence]:
    own = failure.self_listed_as_pid
    if own is not None:
        yield Evidence("fact_own_pid", {"pid": own, "own_bytes": failure.own_process_bytes or 0})
    if any(size is None for _, size in failure.other_processes):
        yield Evidence("fact_process_size_unknown")
    if failure.private_pool_bytes:
        yield Evidence("fact_private_pools", {"private_pool_bytes": failure.private_pool_bytes})
    if failure.backend == "mps" and _GB.search(failure.text):
        yield Evidence("fact_binary_gb")  # aten/src/ATen/mps/MPSAllocator.mm, format_size
    if failure.format == "cuda_cached_0.4.1-1.3":
        yield Evidence("fact_cached_excludes_allocated")
    is_misreported = (failure.free_bytes or 0) > (failure.total_bytes or failure.free_bytes or 0)
    if is_misreported and failure.free_bytes is not None:
        yield Evidence("fact_free_above_capacity", {"free_bytes": failure.free_bytes})


# expandable_segments needs driver support that these lack; there it fails or is ignored.
_UNSUPPORTED_SYSTEMS = ("Windows", "WSL", "Jetson")


def judge_tip(failure: Failure, clues: Clues) -> Evidence | None:
    """Whether a tip against fragmentation applies to this failure; None without a tip, or where it is unknown."""
    stuck, requested, free = failure.stuck_bytes, failure.requested_bytes, failure.free_bytes or 0
    if stuck is None or requested is None or not clues.tip:
        return None
    values = {"stuck_bytes": stuck, "requested_bytes": requested}
    with_free = {"free_bytes": free} if stuck < requested else {}
    if stuck + free < requested or not stuck:
        return Evidence("tip_does_not_apply", values)
    has_room = free >= 2 * requested and free >= (failure.total_bytes or 0) * _NOTEWORTHY_SHARE
    if free >= requested and (with_free or has_room):
        return None  # what was free would have done: the refusal is not about pieces
    held = failure.pytorch_bytes or 0
    if is_held_by_others(failure):  # the cache is little beside what they hold
        held = (failure.total_bytes or 0) - free
    if stuck < held * MIN_STUCK_SHARE:
        values |= {"held_bytes": held}
        return Evidence("tip_delays_with_free", values | with_free) if with_free else Evidence("tip_delays", values)
    if clues.tip == "splits":
        return _tip_helps(values, with_free)
    unsupported = [system for system in clues.systems if system in _UNSUPPORTED_SYSTEMS]
    if unsupported:
        return Evidence("tip_unsupported", values | {"system": unsupported[0]})
    if clues.expandable_segments:
        return Evidence("tip_already_followed", values)
    return _tip_helps(values, with_free)


def _tip_helps(values: Mapping[str, int], with_free: Mapping[str, int]) -> Evidence:
    """That the tip applies, or may help where the cache alone would not have been enough."""
    return Evidence(f"tip_applies{'_with_free' if with_free else ''}", {**values, **with_free})


def are_light(failure: Failure | None, clues: Clues) -> bool:
    """Whether the weights that the text names are a small part of the card that it names, and are not copied."""
    if clues.phase == "saving" or {"saves", "merges"} & clues.run.told:
        return False
    card = card_of(failure, clues)
    return bool(card and clues.weights_bytes and clues.weights_bytes * _LIGHT_PART < card)


def card_of(failure: Failure | None, clues: Clues) -> int | None:
    """What a device, or PyTorch on a Mac, may hold: by the message, else the card that the text names."""
    said = None if failure is None else failure.total_bytes
    if said is None and failure is not None and failure.backend == "mps":
        said = failure.limit_bytes or clues.ram_bytes  # which is the GPU's, too
    return said or clues.card_bytes


def as_written(card: int, failure: Failure | None) -> int | str:
    """A card's memory as the text has it: bytes that a message printed, or the GB of prose."""
    is_printed = failure is not None and (failure.total_bytes or failure.limit_bytes)
    return card if is_printed else f"{card // GIB} GB"
