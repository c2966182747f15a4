"""Out-of-memory messages rendered as each PyTorch prints them, and what pasting does to them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from oom_magic.units import format_bytes as sized

MIB, GIB = 2**20, 2**30
HINT_T3 = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
    "  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
HINT_T4 = HINT_T3.replace("reserved memory is >> allocated memory", "reserved but unallocated memory is large")
HINT_T5 = (
    " If reserved but unallocated memory is large try setting {variable}=expandable_segments:True to avoid"
    " fragmentation.  See documentation for Memory Management  ({url})"
)
OLD_URL = "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables"
NEW_URL = "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"


@dataclass(frozen=True)
class Numbers:
    """What a message is rendered from; bytes."""

    device: int = 1
    requested: int = 94 * MIB
    total: int = 8 * GIB + 12 * MIB
    free: int = 71 * MIB + 300 * 1024
    allocated: int = 6 * GIB + 130 * MIB
    stuck: int = 210 * MIB + 5000
    process: int | None = 7 * GIB
    others: tuple[tuple[int, int], ...] = ((4312, 512 * MIB), (98765, 88 * MIB))
    limit: int | None = None
    pool: int | None = None


def printed(num_bytes: int) -> int:
    """The bytes that a printed size reads as: rounded to 0.01 of its unit."""
    number, unit = sized(num_bytes).split(" ")
    return round(float(number) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit])


def render(version: str, numbers: Numbers) -> tuple[str, dict[str, object]]:
    """The message of a version ("T1" to "T8", "hip", "xpu", "npu", "mps", "async") and its true fields."""
    if version in ("T1", "T2", "T3", "npu"):
        return _render_old(version, numbers)
    if version == "mps":
        return _render_mps(numbers)
    if version == "async":
        return _render_async(numbers)
    return _render_new(version, numbers)


VERSIONS = ("T1", "T2", "T3", "T4", "T5", "T6", "T7", "T8", "hip", "xpu", "npu", "mps", "async")


def _render_old(version: str, n: Numbers) -> tuple[str, dict[str, object]]:
    name, device = ("NPU", "NPU") if version == "npu" else ("CUDA", "GPU")
    cls = "torch.cuda.OutOfMemoryError" if version == "T3" else "RuntimeError"
    reserved = n.allocated + n.stuck
    active = f"{sized(n.allocated)} current active; " if version == "npu" else ""
    limit = f"{sized(n.limit)} allowed; " if n.limit and version != "T1" else ""
    tail = f"{sized(n.stuck)} cached)" if version == "T1" else f"{sized(reserved)} reserved in total by PyTorch)"
    text = (
        f"{cls}: {name} out of memory. Tried to allocate {sized(n.requested)} ({device} {n.device};"
        f" {sized(n.total)} total capacity; {sized(n.allocated)} already allocated; {active}"
        f"{sized(n.free)} free; {limit}{tail}{HINT_T3 if version == 'T3' else ''}"
    )
    truth = _truth(n, name.lower(), cls) | {"process_bytes": None, "other_processes": ()}
    truth["private_pool_bytes"] = None
    if version == "T1":
        return text, truth | {"reserved_bytes": None, "limit_bytes": None}
    return text, truth | {"reserved_unallocated_bytes": None, "reserved_bytes": printed(reserved)}


def _render_new(version: str, n: Numbers) -> tuple[str, dict[str, object]]:
    backend = version if version in ("hip", "xpu") else "cuda"
    has_processes = backend == "cuda"
    cls = "torch.cuda.OutOfMemoryError" if version in ("T4", "T5") else "torch.OutOfMemoryError"
    sentences = [f"Process {pid} has {sized(size)} memory in use. " for pid, size in n.others]
    if n.process is not None:
        sentences.insert(1, f"Including non-PyTorch memory, this process has {sized(n.process)} memory in use. ")
    has_pool = n.pool is not None and version not in ("T4", "T5", "xpu")
    pool = f", with {sized(n.pool or 0)} allocated in private pools (e.g., CUDA Graphs), and" if has_pool else ", and"
    limit = f"{sized(n.limit)} allowed; " if n.limit else ""
    hint = {
        "T4": HINT_T4,
        "T7": HINT_T5.format(variable="PYTORCH_ALLOC_CONF", url=OLD_URL),
        "T8": HINT_T5.format(variable="PYTORCH_CUDA_ALLOC_CONF", url=NEW_URL),
        "hip": HINT_T5.format(variable="PYTORCH_HIP_ALLOC_CONF", url=OLD_URL),
        "xpu": " Please use `empty_cache` to release all unoccupied cached memory.",
    }.get(version, HINT_T5.format(variable="PYTORCH_CUDA_ALLOC_CONF", url=OLD_URL))
    text = (
        f"{cls}: {backend.upper()} out of memory. Tried to allocate {sized(n.requested)}. GPU {n.device} has"
        f" a total {'capacty' if version == 'T4' else 'capacity'} of {sized(n.total)} of which"
        f" {sized(n.free)} is free. {''.join(sentences) if has_processes else ''}{limit}Of the allocated"
        f" memory {sized(n.allocated)} is allocated by PyTorch,{pool} and {sized(n.stuck)} is reserved by"
        f" PyTorch but unallocated.{hint}"
    )
    truth = _truth(n, backend, cls)
    if not has_pool:
        truth["private_pool_bytes"] = None
    if not has_processes:
        truth |= {"process_bytes": None, "other_processes": ()}
    return text, truth


def _render_mps(n: Numbers) -> tuple[str, dict[str, object]]:
    limit = n.limit or n.total
    text = (
        f"RuntimeError: MPS backend out of memory (MPS allocated: {sized(n.allocated)}, other allocations:"
        f" {sized(n.stuck)}, max allowed: {sized(limit)}). Tried to allocate {sized(n.requested)} on"
        " private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory"
        " allocations (may cause system failure)."
    )
    return text, {
        "backend": "mps", "exception": "RuntimeError", "device_index": None, "is_oom": True,
        "requested_bytes": printed(n.requested), "allocated_bytes": printed(n.allocated),
        "mps_other_bytes": printed(n.stuck), "limit_bytes": printed(limit),
        "total_bytes": None, "free_bytes": None,
    }  # fmt: skip


def _render_async(n: Numbers) -> tuple[str, dict[str, object]]:
    limit = sized(n.limit) if n.limit else "17179869184.00 GiB"
    text = (
        f"torch.OutOfMemoryError: Allocation on device {n.device} would exceed allowed memory."
        " (out of memory)\n"
        f"Currently allocated     : {sized(n.allocated)}\n"
        f"Requested               : {sized(n.requested)}\n"
        f"Device limit            : {sized(n.total)}\n"
        f"Free (according to CUDA): {sized(n.free)}\n"
        f"PyTorch limit (set by user-supplied memory fraction)\n                        : {limit}"
    )
    return text, {
        "backend": "cuda", "exception": "torch.OutOfMemoryError", "device_index": n.device, "is_oom": True,
        "requested_bytes": printed(n.requested), "allocated_bytes": printed(n.allocated),
        "total_bytes": printed(n.total), "free_bytes": printed(n.free),
        "limit_bytes": printed(n.limit) if n.limit else None,
    }  # fmt: skip


def _truth(n: Numbers, backend: str, exception: str) -> dict[str, object]:
    return {
        "backend": backend, "exception": exception, "device_index": n.device, "is_oom": True,
        "requested_bytes": printed(n.requested), "total_bytes": printed(n.total),
        "free_bytes": printed(n.free), "allocated_bytes": printed(n.allocated), "reserved_bytes": None,
        "reserved_unallocated_bytes": printed(n.stuck),
        "process_bytes": printed(n.process) if n.process is not None else None,
        "other_processes": tuple((pid, printed(size)) for pid, size in n.others),
        "limit_bytes": printed(n.limit) if n.limit else None,
        "private_pool_bytes": printed(n.pool) if n.pool is not None else None,
    }  # fmt: skip


def wrap(text: str, width: int) -> str:
    """Hard-wrapped like a console, inside words and numbers."""
    return "\n".join(line[i : i + width] for line in text.split("\n") for i in range(0, max(1, len(line)), width))


def prefix(text: str, mark: str) -> str:
    return "\n".join(mark + line for line in text.split("\n"))


def _wrap_words(text: str) -> str:
    return re.sub(r"(.{40,60}) ", r"\1\n", text)


PREFIXES = (
    "[rank0]: ", "> ", "# ", "| ", ">> > ", "    ", "SUBPROCESS: ",
    "vllm-1  | ERROR 11-18 18:07:28 engine.py:366] ",
    "2024-06-17T13:18:29.371622Z ERROR shard-manager: ", "14446.4s\t511\t", "[2024-05-01 10:00:00,123] ",
    "2024-09-16 01:38:13,877 - root - ERROR - ", "(RayTrainWorker pid=1234) ", "(EngineCore_DP0 pid=77) ",
    "[16:10:33] ", "E0321 ", "app_1    | ", "// ", "* ", "\u2502 ",
    "2024-09-16 01:38:13,877 - train - ERROR - ", "ERROR:root:",
    "E0321 10:00:00.123456 1234 worker.py:12] ",
)  # fmt: skip

MUTATIONS: dict[str, Callable[[str], str]] = {
    "plain": lambda text: text,
    **{f"wrapped at {width}": (lambda text, width=width: wrap(text, width)) for width in (72, 80, 120)},
    "wrapped at 13 inside everything": lambda text: wrap(text, 13),
    "wrapped between words": _wrap_words,
    **{f"prefix {mark!r}": (lambda text, mark=mark: prefix(_wrap_words(text), mark)) for mark in PREFIXES},
    "prefix on the first line only": lambda text: "[rank3]: " + wrap(text, 80),
    "colour codes": lambda text: re.sub(r"(\w+Error|\d+\.\d+)", "\x1b[1;31m\\1\x1b[0m", text),
    "escaped colour codes": lambda text: re.sub(r"(\d+\.\d+)", r"\\u001b[31m\1\\u001b[0m", text),
    "bold": lambda text: text.replace("out of memory.", "**out of memory.**").replace("GiB", "`GiB`"),
    "repr": lambda text: repr(text),
    "string literals": lambda text: "\n".join(f'    "{line} "' for line in _wrap_words(text).split("\n")),
    "lost newlines": lambda text: text.replace("\n", ""),
    "windows newlines": lambda text: _wrap_words(text).replace("\n", "\r\n"),
    "double blanks": lambda text: text.replace(" ", "  "),
    "non-breaking blanks": lambda text: text.replace(" ", "\u00a0"),
    "table cell": lambda text: f"| run 3 | failed | {text} |",
    "progress bar before": lambda text: f"steps:   0%|      | 0/160 [00:05<?, ?it/s]{text}",
    "traceback before": lambda text: (
        'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    loss.backward()\n' + text
    ),
    "traceback after": lambda text: text + '\nTraceback (most recent call last):\n  File "a.py", line 3, in f\n',
    "ellipsis after": lambda text: text + "…",
}


def shuffled_numbers(seed: int) -> Numbers:
    """Numbers drawn at random, of every magnitude the printer knows."""
    draw = random.Random(seed)

    def drawn(most: int = 80 * GIB) -> int:
        return int(2 ** draw.uniform(0, most.bit_length() - 1)) if draw.random() > 0.1 else draw.choice([0, MIB, GIB])

    return Numbers(
        device=draw.randrange(16),
        requested=drawn(),
        total=drawn(200 * GIB),
        free=drawn(),
        allocated=drawn(),
        stuck=drawn(),
        process=drawn() if draw.random() > 0.3 else None,
        others=tuple((draw.randrange(1, 4_000_000), drawn()) for _ in range(draw.randrange(4))),
        limit=drawn() or 1 if draw.random() > 0.5 else None,
        pool=drawn() if draw.random() > 0.5 else None,
    )
