"""The one check that would settle a cause, by what runs and on which device; and the tools that devices have."""

from __future__ import annotations

import re
from collections.abc import Collection

from oom_magic.explain.evidence.causes import INPUT_CAUSES, Cause, Evidence
from oom_magic.explain.evidence.clues.traceback import Clues
from oom_magic.explain.messages.failure import Failure

SERVERS = ("vllm", "sglang", "server")  # they take a share of the device and fill it
# Programs that take their share when they start, so that how full the device is tells nothing.
RESERVING = (*SERVERS, "jax", "tensorflow", "paddle")
_BATCH_IS_NOT_IT = {"batch_of_one", "has_batch_of_one", "tried_batch"}
_SIZE_IS_NOT_IT = {"tried_size", "tried_length"}
_FORMATS_OF_PYTORCH = ("cuda_", "short", "class_only", "mps", "hip", "xpu", "npu", "dataloader", "cpu_allocator")
_OF_PYTORCH = re.compile(r"(?i:cuda)(?: runtime)? error|HIP error")  # its words for what the driver refused
_OF_RAM = {"speaks_of_ram", "host_fills", "workers"}
_SEVERAL = 3  # steps after which all of a run has come once: its state is made by the first
# The check for less at once, by whether the batch and the size of the inputs are out of the question.
_WHAT_IS_LEFT = {(False, False): "", (True, False): "_size", (False, True): "_batch", (True, True): None}
# The checks of ``_check_of_work`` that only use less: a run then fits whatever filled the device.
_WITH_LESS = tuple(f"check_activations{one}" for one in ("", "_size", "_batch", "_training"))
_WITHOUT_MODEL = ("cupy", "rapids", "numba", "thrust", "boosting", "matlab")
# Causes whose tensor has a size that can be compared.
_TENSORS = (Cause.LOGITS_OR_LOSS, Cause.ATTENTION_SCORES)
# The tool that lists who uses a device, by backend.
_TOOLS = {
    "cuda": "nvidia-smi", "hip": "rocm-smi", "xpu": "xpu-smi", "npu": "npu-smi info", "mps": "Activity Monitor",
    "musa": "mthreads-gmi", "mlu": "cnmon", "cpu": "htop", "hpu": "hl-smi", "tpu": "tpu-info",
    "directml": "Task Manager",
}  # fmt: skip
# Where a process may run that has its own way to show its RAM.
_PLACES = {"SLURM": "slurm", "Kaggle": "hosted", "Colab": "hosted", "Windows": "windows", "WSL": "wsl", "in_pod": "pod",
           "Mac": "mac"}  # fmt: skip
# The call that shows how much is allocated, by backend.
_COUNTERS = {
    "cuda": "torch.cuda.memory_allocated()", "mps": "torch.mps.driver_allocated_memory()",
    "xpu": "torch.xpu.memory_allocated()", "npu": "torch.npu.memory_allocated()", "hpu": "torch.hpu.memory_allocated()",
    "cpu": "psutil.Process().memory_info().rss", "jax": "device.memory_stats()",
    "tensorflow": "tf.config.experimental.get_memory_info('GPU:0')",
}  # fmt: skip


# What the author has seen already: the check would show no more.
_SETTLED_BY = {
    Cause.ACTIVATIONS: {"gaussians_grow", "smaller_batch_helps", "smaller_input_works", "sizes_contrast"},
    Cause.HOST_RAM: {"host_fills", "uses_much"},
    Cause.LEAK_OR_RETAINED_REFERENCE: {"grows"},
    Cause.OTHER_PROCESS: {"left_over"},
}


def is_settled(cause: Cause, told: frozenset[str]) -> bool:
    """Whether the author tells what the check for a cause would show; the RAM that fills may be that of a GPU."""
    is_open = cause is Cause.HOST_RAM and "speaks_of_gpu" in told
    return bool(_SETTLED_BY.get(cause, set()) & told) and not is_open


def device_tool(backend: str | None, accelerator: str | None = None) -> str:
    """The program that lists who uses devices of a backend, or of the accelerator where the backend names none."""
    return _TOOLS.get(backend or "") or _TOOLS.get(accelerator or "", "nvidia-smi")


def device_name(backend: str | None) -> str:
    """The name of a backend's devices in PyTorch code, such as ``"mps"``; ``"cuda"`` for AMD's as well."""
    return backend if backend in ("mps", "xpu", "npu", "hpu", "musa", "mlu") else "cuda"


def is_pytorchs(failure: Failure) -> bool:
    """Whether a message is one of PyTorch's."""
    if failure.format == "cuda_error_oom":
        return _OF_PYTORCH.search(failure.text) is not None
    if failure.format == "cuda_driver_call":
        return False
    return failure.pytorch_bytes is not None or failure.format.startswith(_FORMATS_OF_PYTORCH)


def shows_pytorch(failure: Failure | None, told: frozenset[str], frameworks: Collection[str]) -> bool:
    """Whether the message, or the text around it, is PyTorch's."""
    return (failure is not None and is_pytorchs(failure)) or "uses_torch" in told or bool(frameworks)


def check_for(cause: Cause, failure: Failure | None, clues: Clues) -> Evidence:
    """The one check that would settle a cause here."""
    backend = "cpu" if "has_no_gpu" in clues.run.told else None
    backend = failure.backend if failure is not None and failure.backend is not None else backend
    if cause is Cause.OTHER_PROCESS and "models_beside" in clues.run.told:
        return Evidence("check_models_beside")
    if cause is Cause.WEIGHTS_TOO_BIG and "copies_of_model" in clues.run.told:
        return Evidence("check_copies")
    may_train = clues.program is None or clues.program.program.trains
    if cause is Cause.WEIGHTS_TOO_BIG and may_train and {"many_ranks", "crowds_one_device"} <= clues.run.told:
        gathers = "gathers_outputs" in clues.run.told
        tool = device_tool(backend, clues.accelerator)
        return Evidence("check_one_device_gathers") if gathers else Evidence("check_one_device", {"tool": tool})
    if cause is Cause.OTHER_PROCESS:
        return Evidence("check_other_process", {"tool": device_tool(backend, clues.accelerator)})
    if cause is Cause.FRAGMENTATION:
        return _check_of_pieces(backend)
    if cause is Cause.LEAK_OR_RETAINED_REFERENCE:
        runtime = "" if clues.program is None else clues.program.program.key
        is_torch = shows_pytorch(failure, clues.run.told, clues.frameworks)
        is_torch = is_torch and not {"in_another_language", "uses_mlx"} & clues.run.told
        is_elsewhere = backend is None and (clues.accelerator or "cuda") not in _COUNTERS
        is_elsewhere = is_elsewhere or runtime not in ("", "diffusers", *_COUNTERS)
        if is_elsewhere or not (is_torch or runtime in _COUNTERS):  # nobody prints there
            suffix = "_training" if clues.tells_of_training else ""
            return Evidence(f"check_growth_by_tool{suffix}", _watched(backend, clues))
        backend = runtime if runtime in _COUNTERS and backend != "cpu" else backend
        told = clues.run.told
        if backend is None and ("host_fills" in told or (_OF_RAM & told and "speaks_of_gpu" not in told)):
            backend = "cpu"
        return Evidence(
            f"check_{cause.value}", {"call": _COUNTERS.get(backend or clues.accelerator or "cuda", _COUNTERS["cuda"])}
        )
    if cause is Cause.HOST_RAM:
        places = (_PLACES[one] for one in (*clues.systems, *clues.run.told) if one in _PLACES)
        return Evidence("_".join(("check_host_ram", *sorted(places)[-1:])))
    if cause is Cause.MEMORY_FRACTION_LIMIT and backend == "mps":
        return Evidence(f"check_{cause.value}_mps")
    if failure is not None and failure.format == "vllm_context":
        return Evidence(f"check_{cause.value}_context")
    return _check_of_work(cause, failure, clues)


def _check_of_pieces(backend: str | None) -> Evidence:
    """The check for free memory in pieces: PyTorch's allocator tells of its own alone."""
    if backend in ("jax", "tensorflow"):
        return Evidence("check_driver_level")
    return Evidence("check_fragmentation", {"device": device_name(backend)})


def check_of_open(cause: Cause, usual: Evidence, failure: Failure | None, clues: Clues) -> Evidence:
    """The check where a text leaves open whether the inputs were the cause: when memory fills tells it from others.

    ``usual``: the check for the likeliest ``cause``; it stays where it asks for more than less input.
    """
    if "broke_by_update" in clues.run.told:
        return Evidence("check_before_update")
    program = "" if clues.program is None else clues.program.program.key
    is_of_less = usual.key in _WITH_LESS or (usual.key == "check_driver_level" and "device_idle" not in clues.run.told)
    if cause not in INPUT_CAUSES or not is_of_less or program in (*RESERVING, *_WITHOUT_MODEL):
        return usual
    backend = None if failure is None else failure.backend
    went_well = (clues.run.num_steps or 0) >= _SEVERAL or clues.run.is_late or "after_while" in clues.run.told
    trains = clues.is_training or clues.tells_of_training
    suffix = "_late" if went_well else "_training" if trains else ""
    return Evidence(f"check_when_full{suffix}", _watched(backend, clues))


def check_of_loading(failure: Failure | None, clues: Clues) -> Evidence:
    """The check that tells weights which are too large from a device that was full before them."""
    return Evidence("check_before_loading", _watched(None if failure is None else failure.backend, clues))


def _watched(backend: str | None, clues: Clues) -> dict[str, int | str]:
    """What to watch in the sentence of a check: the device's tool, or its memory where the text names no device."""
    is_known = (backend or clues.accelerator) in _TOOLS
    return {"tool": device_tool(backend, clues.accelerator)} if is_known else {"tool_key": "tool_of_any"}


def _check_of_work(cause: Cause, failure: Failure | None, clues: Clues) -> Evidence:
    """The check for a cause that depends on what runs: a server, an inference, a training, its inputs."""
    told, stage = clues.run.told, None if clues.program is None else clues.program.stage
    serves = clues.program is not None and clues.program.program.key in SERVERS
    if cause is Cause.MEMORY_FRACTION_LIMIT and serves:
        return Evidence(f"check_{cause.value}_inference")
    if cause is Cause.OPTIMIZER_STATE and clues.program is not None and not clues.program.program.is_torch:
        return Evidence("check_weights_too_big")
    trains = clues.is_training or clues.tells_of_training
    if "splats" in told and trains and cause in (Cause.ACTIVATIONS, Cause.WEIGHTS_TOO_BIG):
        return Evidence("check_gaussians")
    has_size = failure is not None and failure.requested_bytes is not None
    if cause in _TENSORS and has_size:
        return Evidence(f"check_{cause.value}")
    if cause is not Cause.ACTIVATIONS and cause not in _TENSORS:
        return Evidence(f"check_{cause.value}")
    is_trial = stage is not None and stage.key == "profiling" and "sees_pictures" not in told
    if is_trial:  # with pictures, the trial's size is theirs
        return Evidence(f"check_{Cause.ACTIVATIONS.value}_trial")
    if "device_idle" in told:  # it may be another device that is full, or nothing is
        return Evidence("check_driver_level")
    if trains and clues.frames and not clues.has_prose and clues.phase != "evaluation":
        return Evidence(f"check_{Cause.ACTIVATIONS.value}_training")
    if "between_epochs" in told and cause is Cause.ACTIVATIONS:
        return Evidence("check_activations_between")
    if _is_of_jax(failure, clues):  # it reserves its share at once, which the device's tool shows instead
        return Evidence(f"check_{Cause.ACTIVATIONS.value}_jax")
    left = _WHAT_IS_LEFT[_tried(told, serves, clues)]
    return Evidence("check_driver_level" if left is None else f"check_{Cause.ACTIVATIONS.value}{left}")


def _is_of_jax(failure: Failure | None, clues: Clues) -> bool:
    """Whether JAX's own allocator holds the device's memory."""
    runtime = "" if clues.program is None else clues.program.program.key
    is_elsewhere = clues.accelerator == "tpu" or (failure is not None and failure.backend in ("cpu", "tpu"))
    return runtime == "jax" and not is_elsewhere


def _tried(told: frozenset[str], serves: bool, clues: Clues) -> tuple[bool, bool]:
    """Whether the batch, and the size of the inputs, cannot be made smaller or were in vain."""
    of_batch = {"batch_of_one", "has_batch_of_one"} if clues.story.proposals else _BATCH_IS_NOT_IT
    return bool(of_batch & told) and not serves, bool(_SIZE_IS_NOT_IT & told)
