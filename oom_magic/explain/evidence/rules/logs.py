"""Causes by what runtimes with an allocator of their own log: servers, pools, XLA."""

from __future__ import annotations

import re
from collections.abc import Iterator

from oom_magic.explain.evidence.causes import Cause, Evidence, Support
from oom_magic.explain.evidence.checks import RESERVING
from oom_magic.explain.evidence.clues.traceback import Clues
from oom_magic.explain.evidence.stated_shapes import stated_shape
from oom_magic.explain.messages.failure import Failure
from oom_magic.explain.messages.pytorch import parse_size
from oom_magic.units import GIB, MIB

FULL_SHARE = 0.88  # of a device or a pool: nothing of use is left
SMALL_FIRST_REQUEST = 256 * MIB

_FREE_AT_START = re.compile(
    r"[Tt]otal ?[Mm]emory:? ?(\d+(?:\.\d+)?) ?GiB[\s,]{0,4}[Ff]ree ?[Mm]emory:? ?(\d+(?:\.\d+)?) ?([GM])iB"
)
_OLLAMA_PARTS = re.compile(
    r"memory\.required\.kv=\"?(\d+(?:\.\d+)?) GiB\"?.{0,80}memory\.weights\.total=\"?(\d+(?:\.\d+)?) GiB"
)
_BUFFER_STATISTICS = re.compile(
    r"(parameter|maybe_live_out|preallocated temp) allocation:\s{1,20}(\d[\d.]{0,12})\s?([KMGT]iB|B)"
)
_NO_PARAMETERS = re.compile(r"parameter allocation:\s{1,20}0\s?B\b")
# TensorFlow asks for its share of the device at its start, then for nine tenths of it, until some is granted.
SHRINKING = re.compile(r"(?:failed to allocate [\d.]{1,8}[GMT][^\n]{0,120}from device[^\n]{0,160}\n[^\n]{0,160}){2}")
_SHARE_OF_PADDLE = re.compile(r"FLAGS_fraction_of_gpu_memory_to_use is (0?\.\d{1,3}|1\.0) now")
_LARGEST_SHARE = 0.9
_POOL_IN_USE = re.compile(r"Limit: {1,40}([1-9]\d{8,14})\s{1,4}InUse: {1,40}(\d{9,15})\b")  # bfc_allocator.cc
_FULL_POOL = re.compile(r"Maximum pool size exceeded|allocated so far: [\d,]{1,20} bytes, limit set to", re.I)
_WEIGHTS_LOADED = re.compile(r"[Mm]odel (?:weights|loading) (?:took|takes?) (\d{1,4}(?:\.\d{1,4})?) ?Gi?B")
_MOST_OF_A_DEVICE = 0.85
# What servers log once the weights are loaded and the rest of their share is known.
_CACHE_MADE = re.compile(
    r"Available KV cache memory: \d|GPU KV cache size: \d|# GPU blocks: [1-9]|KV Cache is allocated"
    r"|max_total_num_tokens=\d"
)
_SLOTS = re.compile(r"n_ctx_per_seq \((\d{2,9})\)[\s\S]{0,2000}?kv_size = (\d{2,12})")
# What XLA counts for a whole program before it runs, beside the memory of a core.
_PROGRAM_SIZE = re.compile(r"Used (\d[\d.]{0,8})([GM]) of (\d[\d.]{0,8})([GM]) hbm")
_BUFFER_SHAPE = re.compile(r"Shape: [a-z]{1,4}\d{1,2}\[[\d,]+\]")
_BUFFER_LIMIT = re.compile(
    r"exceeds (?:the )?(?:device|max\w*)[^.\n]{0,30}(?:buffer size|allocation) limit"
    r"|\b(?:beyond|exceed\w*|above|larger than|over) (?:the )?max(?:imum)? (?:allowed )?buffer size", re.I,
)  # fmt: skip
# Marian reserves its workspace at its start, in one piece (marian-dev, src/tensors/device.h).
_WORKSPACE_REFUSED = re.compile(
    r"\[memory\] (?:Extending reserved space to|Reserving) (\d{2,6}) MB[^\n]{0,80}\n[^\n]{0,80}Error: CUDA"
)
# Isaac Gym, Isaac Sim and Isaac Lab: the sizes of PhysX' buffers on the GPU are settings (PxgDynamicsMemoryConfig).
_PHYSX = re.compile(
    r"GPU PhysX|PxgDynamicsMemoryConfig|omni\.physx|gpu_(?:max_rigid|found_lost|collision_stack|heap)\w+"
)
# TensorRT-LLM's builder and what converts for it read the weights into RAM, each rank all of them or its part.
_BUILDS_ENGINE = re.compile(
    r"\btrtllm-build\b|\bconvert_checkpoint\.py(?=[^\n]{0,300}--(?:tp_size|output_dir))"
    r"|\bbuild\.py [^\n]{0,300}--(?:use_gpt_attention|tp_size|world)"
)
# Compilers at work: make, ninja and PyTorch's extensions run several at once, each in the computer's RAM.
_COMPILES = re.compile(
    r"Building (?:CUDA|CXX|C|HIP) object|\bcc1plus\b|Error compiling objects for extension|\bninja: build stopped"
    r"|\bnvcc\b[^\n]{0,80} -(?:c|forward-unknown)"
    r"|\b(?:docker build|Dockerfile)\b[\s\S]{0,600}\b(?:compiling|compilation|compilers?|csrc|make -j)"
)
_RESERVES_ADDRESSES = re.compile(r"cuMemAddressReserve\(")


def log_rules(failure: Failure | None, text: str, *, fills: bool) -> Iterator[Support]:
    """Causes by the logs of runtimes with their own allocator; ``fills``: a model was loaded, or many steps ran, so the
    program may have filled the device itself."""
    requested = None if failure is None else failure.requested_bytes
    yield from _in_logs(text)
    yield from _at_start(failure, text)
    yield from _weights_in_log(failure, text)
    if failure is None:
        if _BUFFER_SHAPE.search(text):
            yield Support(Cause.ACTIVATIONS, 0.5, Evidence("buffers_listed"))
        return
    if _BUFFER_LIMIT.search(text):
        yield Support(Cause.REQUEST_ALONE_TOO_BIG, 0.9, Evidence("driver_buffer_limit"))
        yield Support(Cause.ACTIVATIONS, -0.4)
    if failure.shape is not None and failure.backend == "tensorflow":
        yield from stated_shape(failure.shape, text)
    if SHRINKING.search(text):
        yield Support(Cause.OTHER_PROCESS, 0.5, Evidence("start_refused"))
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.3, Evidence("start_refused"))
    is_small = failure.shape is None and 0 < (requested or 0) < SMALL_FIRST_REQUEST
    if failure.format == "tensorflow" and is_small and not fills:
        yield Support(Cause.OTHER_PROCESS, 0.4, Evidence("small_request_refused", {"requested_bytes": requested or 0}))
    if failure.backend == "jax":
        yield from _xla(failure, text, fills=fills)


def _xla(failure: Failure, text: str, *, fills: bool) -> Iterator[Support]:
    """What XLA counts of the program, lists of its buffers, and was refused."""
    requested, free = failure.requested_bytes or 0, failure.free_bytes or 0
    if 0 < requested <= free:
        values = {"free_bytes": free, "requested_bytes": requested}
        yield Support(Cause.FRAGMENTATION, 0.6, Evidence("free_in_pieces", values))
    computed, parameters = _of_program(text)
    creates = computed >= SMALL_FIRST_REQUEST and _NO_PARAMETERS.search(text) is not None
    yield from _program_size(text)
    if creates:  # nothing comes in, so it makes values, and large ones
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.75, Evidence("program_without_inputs", {"computed_bytes": computed}))
        yield Support(Cause.ACTIVATIONS, -0.8)
        return
    yield from _buffer_statistics(computed, parameters)
    if _BUFFER_SHAPE.search(text) and requested >= SMALL_FIRST_REQUEST:
        yield Support(Cause.ACTIVATIONS, 0.5, Evidence("buffers_listed"))
    elif requested and requested < SMALL_FIRST_REQUEST and not fills:
        yield Support(Cause.OTHER_PROCESS, 0.4, Evidence("small_request_refused", {"requested_bytes": requested}))


def _in_logs(text: str) -> Iterator[Support]:
    """What servers and pools write of their memory, whatever the message."""
    start = _FREE_AT_START.search(text)
    if start is not None:
        total = float(start.group(1)) * GIB
        free = float(start.group(2)) * (GIB if start.group(3) == "G" else MIB)
        if free < total / 2:
            sizes = {"free_bytes": round(free), "total_bytes": round(total)}
            yield Support(Cause.OTHER_PROCESS, 0.85, Evidence("little_free_at_start", sizes))
    parts = _OLLAMA_PARTS.search(text)
    if parts is not None and float(parts.group(1)) > float(parts.group(2)) / 2:
        values = {
            "cache_bytes": round(float(parts.group(1)) * GIB),
            "weights_bytes": round(float(parts.group(2)) * GIB),
        }
        yield Support(Cause.ACTIVATIONS, 0.7, Evidence("cache_exceeds_weights", values))
    pool = _POOL_IN_USE.search(text)
    if pool is not None and int(pool[2]) >= FULL_SHARE * int(pool[1]):
        values = {"held_bytes": int(pool[2]), "limit_bytes": int(pool[1])}
        yield Support(Cause.ACTIVATIONS, 0.2, Evidence("pool_in_use", values))
        yield Support(Cause.OTHER_PROCESS, -0.8)
    if _CACHE_MADE.search(text):
        yield Support(Cause.WEIGHTS_TOO_BIG, -0.6)  # they were there before it
    share = _SHARE_OF_PADDLE.search(text)
    if share is not None and float(share[1]) < _LARGEST_SHARE:
        percent = {"percent": round(100 * float(share[1]))}
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.6, Evidence("paddle_share", percent))
    if _FULL_POOL.search(text):
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.6, Evidence("pool_is_full"))
    slots = _SLOTS.search(text)
    if slots is not None and int(slots.group(2)) >= 2 * int(slots.group(1)):
        count = int(slots.group(2)) // int(slots.group(1))
        yield Support(Cause.ACTIVATIONS, 0.6, Evidence("parallel_slots", {"count": count, "length": slots.group(1)}))


def _at_start(failure: Failure | None, text: str) -> Iterator[Support]:
    """What programs reserve at their start, and what they hold before a device has a part in it."""
    refused = _WORKSPACE_REFUSED.search(text)
    if refused is not None:
        workspace = Evidence("marian_workspace", {"requested_bytes": int(refused[1]) * MIB})
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.6, workspace)
        yield Support(Cause.OTHER_PROCESS, 0.2, workspace)
    if _PHYSX.search(text):
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.3, Evidence("physx_buffers"))
    if _RESERVES_ADDRESSES.search(text):
        yield Support(Cause.DRIVER_LEVEL, 0.6, Evidence("addresses_reserved"))
        yield Support(Cause.WEIGHTS_TOO_BIG, -0.6)
    is_of_words = failure is None or failure.words or failure.backend in (None, "cpu")
    if is_of_words and _COMPILES.search(text):
        yield Support(Cause.HOST_RAM, 0.6, Evidence("compiles"))
        yield from (Support(one, -0.8) for one in (Cause.ACTIVATIONS, Cause.WEIGHTS_TOO_BIG))
    if _BUILDS_ENGINE.search(text) and is_of_words:
        yield Support(Cause.HOST_RAM, 0.45, Evidence("builds_engine"))


def _weights_in_log(failure: Failure | None, text: str) -> Iterator[Support]:
    """The weights' size as a server logs it, beside the device's."""
    loaded, total = _WEIGHTS_LOADED.search(text), None if failure is None else failure.total_bytes
    if loaded is None or not total:
        return
    weights = round(float(loaded.group(1)) * GIB)
    if weights >= total * _MOST_OF_A_DEVICE:
        values = {"weights_bytes": weights, "total_bytes": total}
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.75, Evidence("weights_logged", values))
        yield Support(Cause.ACTIVATIONS, -0.4)


def _buffer_statistics(computed: int, parameters: int) -> Iterator[Support]:
    """XLA's own account of a program: its parameters beside its results and temporaries."""
    if not computed + parameters:
        return
    if computed + parameters < SMALL_FIRST_REQUEST:
        yield Support(Cause.OTHER_PROCESS, 0.4, Evidence("program_is_small", {"computed_bytes": computed + parameters}))
        return
    values = {"computed_bytes": computed, "parameter_bytes": parameters}
    cause = Cause.ACTIVATIONS if computed > parameters else Cause.WEIGHTS_TOO_BIG
    yield Support(cause, 0.6, Evidence("buffer_statistics", values))


def _of_program(text: str) -> tuple[int, int]:
    """XLA's bytes of a program's results and temporaries, and of its parameters."""
    sizes = {
        name: parse_size(f"{number}{unit}".lower()) or 0 for name, number, unit in _BUFFER_STATISTICS.findall(text)
    }
    return sizes.get("maybe_live_out", 0) + sizes.get("preallocated temp", 0), sizes.get("parameter", 0)


def _program_size(text: str) -> Iterator[Support]:
    """XLA's count of a program that it could not place: parameters are arguments, the rest is computed."""
    match = _PROGRAM_SIZE.search(text)
    if match is not None:
        needed, total = (round(float(match[at]) * (GIB if match[at + 1] == "G" else MIB)) for at in (1, 3))
        yield Support(Cause.ACTIVATIONS, 0.35, Evidence("program_size", {"needed_bytes": needed, "total_bytes": total}))


def reserved(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """Memory that a program reserves at its start: not a failure, but a configurable share."""
    program, told = clues.program, clues.run.told
    if "fills_at_import" in told and (failure is None or failure.format.startswith("told")):
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.6, Evidence("told_at_import"))
        yield Support(Cause.ACTIVATIONS, -0.8)  # nothing has been computed
    if failure is not None or program is None or program.program.key not in RESERVING or clues.accelerator == "tpu":
        return  # a TPU is nobody else's, and nothing is taken of it in advance
    if {"uses_much", "speaks_of_memory"} & told and not {"grows", "repeated_use", "works_without"} & told:
        evidence = Evidence("program_reserves", program.program.said)
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.5, evidence)
