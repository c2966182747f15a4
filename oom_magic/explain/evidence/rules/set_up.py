"""Causes by what comes before a step: checkpoints, optimizer states, pinned memory, the first touch of a device."""

from __future__ import annotations

import re
from collections.abc import Iterator

from oom_magic.explain.evidence.causes import Cause, Evidence, Support
from oom_magic.explain.evidence.checks import RESERVING
from oom_magic.explain.evidence.clues.traceback import Clues
from oom_magic.explain.evidence.rules.numbers import are_light
from oom_magic.explain.messages.failure import Failure

_CHECKPOINT_LOAD = re.compile(
    r"_cuda_deserialize|restore_location|persistent_load|\b(?:torch|th)\.load\(|load_from_checkpoint|load_checkpoint\("
)
_COPIES_WEIGHTS = re.compile(
    r"\.clone\(\)[^\n]{0,20} for \w+ in (?:self\.)?\w*param|\bdeepcopy\((?:self\.)?\w*(?:model|net|policy|actor)\w*\)"
)
# Where a process first touches a device: the driver's context, PyTorch's and Torch's initialization.
_NO_CONTEXT = re.compile(
    r"cuCtxCreate|cuDevicePrimaryCtxRetain|THCGeneral\.c|in _lazy_init\b|_cuda_init\(|cudaSetDevice\("
)
_MOVED = re.compile(r"in _apply\b")
# DeepSpeed makes the states of Adam when it is set up, in 32 bits; programs of Flax before the first step.
_OPTIMIZER_SET_UP = re.compile(
    r"initialize_optimizer_states|_configure_zero_optimizer|_create_fp32_partitions"
    r"|\b(?:init|create)\w*_train_state\(|\bTrainState\.create\("
)
# TensorFlow's operations that give a new weight its first values.
_FIRST_VALUES = re.compile(
    r"\[Op:((?:RandomStandardNormal|TruncatedNormal|RandomUniform\w*|VarHandleOp))\]|[\w/]{1,80}/(Initializer/\w{1,40})"
)
_NO_HANDLE = re.compile(
    r"\bcu(?:solver|blas|dnn|fft|sparse)\w{0,6}Create\w{0,12}\b[^\n]{0,24}\bfail|Failed to create cu\w{3,8}"
)
# A model of a few MB, and the GB that it takes when it is loaded.
_SMALL_MODEL = re.compile(
    r"\bmodel\b[^\n]{0,60}?\b(\d{1,2}(?:\.\d{1,2})? ?MB)\b[^\n]{0,60}\b\d{1,2}(?:\.\d{1,2})? ?GB\b"
)
_RUNTIMES = ("onnxruntime", "tensorrt")
_VULKAN = re.compile(r"\bggml_vulkan\b|\bvk::|[Vv]ulkan\b[^\n]{0,40}\b(?:fail|allocat|OutOf)")
_OPENED = re.compile(r"^(?:/dev/nvidia\d{1,2}:)?[ \t]{1,40}\S{1,40}[ \t]{1,20}\d{1,9} F\.{2,4}m?\s", re.M)  # fuser -v


def set_up_rules(failure: Failure | None, clues: Clues, text: str) -> Iterator[Support]:
    """What a set-up puts on the device or in RAM, and what was there before it."""
    yield from _checkpoint(clues)
    yield from _host(failure, clues)
    yield from _first_values(failure, text)
    yield from _at_start(failure, clues, text)
    yield from _beside_share(clues, text)
    yield from _vulkan(failure, clues, text)


def _beside_share(clues: Clues, text: str) -> Iterator[Support]:
    """What runtimes take for themselves: workspaces, and a share beside which a library of CUDA cannot start."""
    small = _SMALL_MODEL.search(text)
    if small is not None and clues.program is not None and clues.program.program.key in _RUNTIMES:
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.45, Evidence("runtime_takes", {"size": small.group(1)}))
        yield from (Support(one, -0.8) for one in (Cause.WEIGHTS_TOO_BIG, Cause.ACTIVATIONS))
    reserves = clues.program is not None and clues.program.program.key in RESERVING
    if reserves and _NO_HANDLE.search(text):
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.55, Evidence("handle_beside_share"))
        yield Support(Cause.ACTIVATIONS, -0.4)


def _vulkan(failure: Failure | None, clues: Clues, text: str) -> Iterator[Support]:
    """Vulkan's refusal though the card has room: its drivers allow only so much in one piece."""
    has_room = "device_idle" in clues.run.told or (clues.weights is not None and are_light(failure, clues))
    stage = None if clues.program is None else clues.program.stage
    is_of_context = stage is not None and stage.key in ("kv_cache", "compute", "context")  # grows with what is set
    if has_room and not is_of_context and _VULKAN.search(text):
        yield Support(Cause.DRIVER_LEVEL, 0.5, Evidence("vulkan_limit"))
        yield from (Support(one, -0.6) for one in (Cause.WEIGHTS_TOO_BIG, Cause.ACTIVATIONS))


def _checkpoint(clues: Clues) -> Iterator[Support]:
    """A checkpoint is loaded to where it was saved: every rank puts it on GPU 0, beside the model."""
    told = clues.run.told
    loads = bool(_CHECKPOINT_LOAD.search(clues.trace))
    if _COPIES_WEIGHTS.search(clues.code):
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.7, Evidence("code_copies_weights"))
        yield Support(Cause.ACTIVATIONS, -0.4)
    if loads:
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.45, Evidence("checkpoint_to_gpu"))
    elif "loads_checkpoint" in told:
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.4, Evidence("told_checkpoint_to_gpu"))
    if _OPTIMIZER_SET_UP.search(clues.trace):
        yield Support(Cause.OPTIMIZER_STATE, 0.7, Evidence("optimizer_set_up"))
        yield Support(Cause.WEIGHTS_TOO_BIG, -0.3)
    infers = clues.program is not None and not clues.program.program.trains
    if {"many_ranks", "crowds_one_device"} <= told and not infers:
        gathers = "gathers_outputs" in told
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.5, Evidence(f"one_device_{'gathers' if gathers else 'holds_more'}"))
        yield Support(Cause.OTHER_PROCESS, -0.5)
    elif "resumes" in told and ("many_ranks" in told or "shares_device" in told):
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.5, Evidence("ranks_load_to_one"))
    elif "resumes" in told and "frees_at_end" not in told and clues.phase not in ("loading",) and not loads:
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.5, Evidence("checkpoint_kept"))


def _first_values(failure: Failure | None, text: str) -> Iterator[Support]:
    """A weight that TensorFlow makes: the operation that failed fills it for the first time."""
    found = None if failure is None or failure.format != "tensorflow" else _FIRST_VALUES.search(text)
    if found is not None:
        made = Evidence("weight_is_made", {"operation": found.group(1) or found.group(2)})
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.6, made)
        yield Support(Cause.ACTIVATIONS, -0.6)


def _host(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """Memory of the host that looks like the GPU's: pinned, or behind WSL."""
    if failure is None or failure.pytorch_bytes is not None or failure.backend not in ("cuda", "cpu"):
        return
    if clues.program is not None and not clues.program.program.is_torch:
        return
    on_wsl, pins = "WSL" in clues.systems, "pins" in clues.run.told
    if failure.format not in ("cuda_error_oom", "cuda_driver_call", "cuda_driver_error", "pinned_memory", "short"):
        return
    if on_wsl and pins:
        yield Support(Cause.HOST_RAM, 0.85, Evidence("pinned_under_wsl"))
    elif pins:
        yield Support(Cause.HOST_RAM, 0.45, Evidence("pinned_memory_used"))
    elif on_wsl:
        yield Support(Cause.HOST_RAM, 0.5, Evidence("wsl_pins_little"))


def _at_start(failure: Failure | None, clues: Clues, text: str) -> Iterator[Support]:
    """A process that cannot create a context has allocated nothing yet, so something else fills the device.

    A model that is moved to it is often the first to touch it: PyTorch's own allocator would have printed sizes.
    """
    if failure is not None and failure.pytorch_bytes is None and failure.backend == "cuda":
        is_moved = failure.format == "cuda_error_oom" and clues.phase == "loading" and _MOVED.search(clues.trace)
        if _NO_CONTEXT.search(text):
            yield Support(Cause.OTHER_PROCESS, 0.6, Evidence("no_context"))
        elif is_moved and clues.program is None and not clues.weights_bytes:
            weight = 0.5 if "device_idle" in clues.run.told else 0.75
            yield Support(Cause.OTHER_PROCESS, weight, Evidence("moved_without_sizes"))
            yield Support(Cause.WEIGHTS_TOO_BIG, -0.6)
    if len(_OPENED.findall(text)) > 1:
        yield Support(Cause.OTHER_PROCESS, 0.6, Evidence("device_is_open"))
