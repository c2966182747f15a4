"""Reading a pasted text: every failure message in it, as numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from oom_magic.explain.messages.failure import Failure
from oom_magic.explain.messages.normalization import Squeezed, clause_around, clean
from oom_magic.explain.messages.others import (
    MOST_OF_A_KIND,
    MessageKind,
    line_messages,
    other_messages,
)
from oom_magic.explain.messages.pytorch import Draft, drafts, parse_size
from oom_magic.explain.messages.told import named_backend, told_messages

_CLASS = r"(?:[A-Za-z_]\w{0,60}\.){0,6}(?:[A-Z_]\w{0,60}(?:Error|Exception)|OutOfResources)"
# RayTaskError(OutOfMemoryError) is a wrapper, "except RuntimeError" a line of code.
_EXCEPTION = re.compile(rf"(?<![\w.(])(?<!except )(?<!raise )({_CLASS})(?![\w.])(?!\([A-Z])")
_LATER_EXCEPTION = re.compile(rf"(?:^|[\s:])({_CLASS}):", re.M)
# The classes that wrapping may have broken; found squeezed, right before the message.
_WRAPPED_EXCEPTION = re.compile(
    r"(torch\.cuda\.OutOfMemoryError|torch\.OutOfMemoryError|torch\.AcceleratorError|OutOfMemoryError"
    r"|RuntimeError|ValueError|OSError|MemoryError)[:(]*$"
)
# PyTorch 2.3 prints device 0 as a NUL byte, where the message then ends.
_NUL_CUT = re.compile(r"\.\s{0,8}G\s?P\s?U[ \t\xa0]*(?:$|\n|\\n|['\"`)|…])")
# Logged by the allocator that TensorFlow and JAX share: where JAX runs it.
_OF_JAX = re.compile(r"external/xla/|pjrt_stream_executor|\bjax|XLA_PYTHON_CLIENT")
_OF_TENSORFLOW = re.compile(r"tensorflow[/\\.](?:python|core)|\bimport tensorflow|\bkeras\b")
# ROCm builds of PyTorch print CUDA's words for what HIP returned.
_OF_HIP = re.compile(r"\bhipError\w|\bHIP (?:error|version|runtime)\b|\bROCm version\b|\+rocm\d|pytorch/rocm")
# Of the message that follows in the same statement: it came before what the text is about.
_EARLIER = re.compile(
    r"\b(?:(?:previously|earlier|formerly|at first|in the past),? (?:i|we)|used to (?:get|see|have))\b[^.!?\n]{0,40}$",
    re.I,
)
_SEPARATORS = re.compile(r"[\s*`'\"|]+")
# The device is named elsewhere in the text, if anywhere.
_OF_ANY_DEVICE = (
    "told", "told_device", "graphics_api", "opencl_buffer_limit",
    "vllm", "vllm_context", "vllm_startup", "sglang", "tgi", "hf_offload",
    "hf_auto_batch", "sd_webui", "sglang_retracts", "onnxruntime",
)  # fmt: skip
_MAX_BEFORE = 300
_MAX_TEXT = 2000
_VERSION_WINDOW = 700


@dataclass(frozen=True, slots=True)
class _Found:
    """A message without its context yet; offsets are in the cleaned text.

    ``values`` are Failure's fields as printed; ``squeezed_span`` is where they stand in the squeezed text.
    """

    values: dict[str, Any]
    num_sizes: int
    is_faint: bool
    start: int
    end: int
    squeezed_span: tuple[int, int] = (0, 0)


def read(text: str) -> tuple[Failure, ...]:
    """Every out-of-memory message (or look-alike) in a text, in order of appearance; never raises.

    Any version's wording, prefix, wrapping and truncation is understood; see ``Failure`` for the fields.
    """
    cleaned = clean(text)
    squeezed = Squeezed(cleaned)
    found = _located(_clearest(_squeezed_messages(squeezed.text)), squeezed)
    if all(item.is_faint for item in found):
        found = _clearest(found + [_found_of(kind, match) for kind, match in line_messages(cleaned)])
    if all(_is_mentioned(item, squeezed.text) or _is_earlier(item, cleaned) for item in found):
        told = [_found_of(kind, match) for kind, match in told_messages(cleaned)]
        found = [item for item in told if item.values["is_oom"]] or found or told
    elif all(item.values["format"] == "kernel_died" for item in found):  # of what, only the author can tell
        told = [_found_of(kind, match) for kind, match in told_messages(cleaned) if kind.backend == "cpu"]
        found = told or found
    around = _Around(cleaned, squeezed.text)
    ends = [0, *(item.end for item in found)]
    starts = [*(item.start for item in found[1:]), len(cleaned)]
    return tuple(_placed(item, (end, start), around) for item, end, start in zip(found, ends, starts, strict=False))


def _is_mentioned(item: _Found, text: str) -> bool:
    """Whether an illegal access is named in prose, beside which the author may tell of memory that ran out."""
    start, end = item.squeezed_span
    is_access = item.values["format"] == "illegal_memory_access"
    return is_access and not text.startswith("was", end) and not text.endswith("cudaerror:", 0, start)


def _is_earlier(item: _Found, cleaned: str) -> bool:
    """Whether an author names a message that was printed before what the text is about."""
    return not item.num_sizes and _EARLIER.search(cleaned[max(0, item.start - 80) : item.start]) is not None


def _squeezed_messages(text: str) -> list[_Found]:
    """The messages recognised by wording alone, however the text was wrapped; offsets are squeezed."""
    return [
        *(_found_from(draft, text) for draft in islice(drafts(text), MOST_OF_A_KIND)),
        *(_found_of(kind, match) for kind, match in other_messages(text)),
    ]


def _located(found: list[_Found], squeezed: Squeezed) -> list[_Found]:
    """The messages with offsets in the cleaned text."""
    edges = [(item.start, item.end - 1) for item in found]
    offsets = sorted({offset for edge in edges for offset in edge})
    origins = dict(zip(offsets, squeezed.origins(offsets), strict=True))
    return [
        replace(item, start=origins[first], end=origins[last] + 1, squeezed_span=(first, last + 1))
        for item, (first, last) in zip(found, edges, strict=True)
    ]


def _clearest(found: list[_Found]) -> list[_Found]:
    """The messages without overlaps and, if there are clear ones, without faint ones."""
    has_clear = any(not item.is_faint for item in found)
    fullest: dict[str, _Found] = {}
    for item in found:
        best = fullest.setdefault(item.values["format"], item)
        if item.num_sizes > best.num_sizes:
            fullest[item.values["format"]] = item
    chosen: list[_Found] = []
    for item in sorted(found, key=lambda item: (item.start, item.end)):
        is_dropped = item.is_faint and (has_clear or item is not fullest[item.values["format"]])
        if not is_dropped and not (chosen and item.start < chosen[-1].end):
            chosen.append(item)
    return chosen


def _found_from(draft: Draft, squeezed: str) -> _Found:
    """The message of a draft's clauses."""
    backend = draft.backend or ("mps" if "mps_allocated" in draft.clauses else "cuda")
    values = {
        "format": _format_of(draft, backend, squeezed),
        "backend": backend,
        "device_index": draft.device_index,
        "other_processes": tuple(draft.processes),
        **draft.sizes,
    }
    num_sizes = len(draft.sizes) + len(draft.processes)
    is_clear = num_sizes or draft.is_refused_as_absurd or draft.is_block_limited
    is_faint = not is_clear or draft.clauses <= {"head", "isalloc"}
    return _Found(values, num_sizes, is_faint, draft.start, draft.end)


def _format_of(draft: Draft, backend: str, squeezed: str) -> str:
    """The key of the template, found by clauses that only it has."""
    if draft.style == "async":
        return "cuda_malloc_async"
    if draft.is_preempted:
        return "cuda_preempted"
    if draft.is_block_limited:
        return "ipex_4gb"
    if draft.is_refused_as_absurd:
        return "cuda_absurd_size"
    if backend != "cuda":
        return backend
    if "cached" in draft.clauses:
        return "cuda_cached_0.4.1-1.3"
    if draft.style == "total_capacity" or "reserved" in draft.clauses:
        return "cuda_reserved_1.4-2.0"
    if draft.style == "of_which" or draft.clauses & {"allocated", "pid", "process", "isreserved"}:
        return "cuda_v2.1" if "totalcapactyof" in squeezed[draft.start : draft.end] else "cuda_v2.2+"
    return "short"


def _found_of(kind: MessageKind, match: re.Match[str]) -> _Found:
    """The message of a match in the table."""
    groups = match.groupdict()
    values: dict[str, Any] = {"format": kind.format, "backend": kind.backend, "is_oom": kind.is_oom}
    for name in ("requested", "free", "allocated"):
        if groups.get(f"{name}_bytes"):
            values[f"{name}_bytes"] = int(groups[f"{name}_bytes"].replace(",", "") or 0)
        if groups.get(name):
            values[f"{name}_bytes"] = parse_size(groups[name])
    if groups.get("shape"):
        values["shape"] = tuple(int(size) for size in groups["shape"].split(",") if size)
    if groups.get("dtype"):
        values["dtype"] = groups["dtype"]
    return _Found(values, len(values) - 3, kind.is_faint, match.start(), match.end())


_REST_OF_WORD = re.compile(r"(?:(?<=[a-z])[a-z]{1,20})?", re.I)


@dataclass(frozen=True)
class _Around:
    """A text, and what it tells of each of its messages."""

    cleaned: str
    squeezed: str

    @cached_property
    def version(self) -> str | None:
        """The PyTorch version that it names."""
        return stated_version(self.cleaned)

    @cached_property
    def backend(self) -> str | None:
        """The backend of the device that it names."""
        return named_backend(self.cleaned)

    @cached_property
    def is_of_hip(self) -> bool:
        """Whether HIP returned what PyTorch calls an error of CUDA."""
        return bool(_OF_HIP.search(self.cleaned))

    @cached_property
    def is_of_jax(self) -> bool:
        """Whether JAX runs the allocator that TensorFlow has, too."""
        return bool(_OF_JAX.search(self.cleaned)) and not _OF_TENSORFLOW.search(self.cleaned)


def _placed(item: _Found, room: tuple[int, int], around: _Around) -> Failure:
    """The failure with its context: the text between the previous message and the next."""
    values, cleaned, squeezed = dict(item.values), around.cleaned, around.squeezed
    if values["format"] == "short" and _NUL_CUT.match(cleaned, item.end):
        values["format"] = "cuda_v2.3_nul_cut"
    if values["format"] == "tensorflow" and around.is_of_jax:
        values |= {"format": "jax", "backend": "jax"}
    if values["format"] == "cuda_error_oom" and values["backend"] == "cuda" and around.is_of_hip:
        values["backend"] = "hip"
    if values["format"] in _OF_ANY_DEVICE:
        values["backend"] = around.backend or values["backend"]
    values["exception"] = _exception_of(item, room, cleaned)
    end = _REST_OF_WORD.match(cleaned, item.end).end()  # type: ignore[union-attr]  # it may be empty
    values["text"] = cleaned[item.start : min(end, item.start + _MAX_TEXT)]
    if values["format"].startswith("told"):
        values["words"] = clause_around(cleaned, item.start, item.end)
    start, end = item.squeezed_span
    window = squeezed[max(0, start - 120) : end + _VERSION_WINDOW]
    if values["backend"] not in ("jax", "tensorflow"):
        values["torch_version_guess"] = around.version or guess_version(values, window)
    return Failure(start=item.start, **values)


def _exception_of(item: _Found, room: tuple[int, int], cleaned: str) -> str | None:
    """The exception class nearest before the message, else the next one after it."""
    before = cleaned[max(room[0], item.start - _MAX_BEFORE) : item.start]
    before = before.replace("\\n", "\n")
    names: list[str] = _EXCEPTION.findall(before) if before else []
    wrapped = _WRAPPED_EXCEPTION.search(_SEPARATORS.sub("", before[-80:])) if before else None
    if wrapped and not (names and names[-1].endswith(wrapped.group(1))):
        names.append(wrapped.group(1))
    if not names:
        later = _LATER_EXCEPTION.search(cleaned, item.start, min(room[1], item.start + _MAX_TEXT))
        names = [later.group(1)] if later else []
    if not names:
        return None
    return "MemoryError" if "numpy" in names[-1] else names[-1]


_STATED = re.compile(
    r"(?:py)?torch(?: version)?[ =:_-]{1,3}v?(\d\.\d{1,2}(?:\.\d{1,2}(?:a0|\.dev\d{0,8})?)?)(?!\d)", re.I
)
_CPU_LINES = (
    ("cpuallocator.cpp:56", "1.1"),
    ("cpuallocator.cpp:64", "1.2-1.6"),
    ("cpuallocator.cpp:65", "1.7"),
    ("cpuallocator.cpp:", "1.7-1.10"),
    ("alloc_cpu.cpp", "1.11+"),
)


def stated_version(text: str) -> str | None:
    """The PyTorch version that the text itself names (``torch==2.4.1``, a build path), or None."""
    match = _STATED.search(text)
    return match.group(1) if match else None


def guess_version(values: Mapping[str, Any], window: str) -> str | None:
    """Range of versions such as ``"2.4+"`` from a message's fields and the squeezed text around it."""
    template, exception = values["format"], values["exception"] or ""
    if template in _BY_FORMAT:
        return _BY_FORMAT[template]
    if template == "mps":
        return "2.8+" if "ib" in window.split("maxallowed")[0].split("mpsallocated")[-1] else "1.12-2.7"
    if template == "cpu_allocator":
        return next((version for mark, version in _CPU_LINES if mark in window), None)
    if template == "cuda_malloc_async":
        return None if values.get("total_bytes") is not None else "2.3-2.9"
    if template in ("cuda_v2.2+", "hip", "xpu", "short"):
        return _guess_modern(values, exception, window)
    if template == "cuda_reserved_1.4-2.0":
        return _guess_reserved(values, exception, window)
    if template == "cuda_error_oom":
        if "AcceleratorError" in exception:
            return "2.9+" if "searchforcudaerror" in window else "2.8+"
        return "2.0-2.7" if "torch_use_cuda_dsa" in window else None
    return None


_BY_FORMAT = {
    "cuda_cached_0.4.1-1.3": "0.4.1-1.3",
    "cuda_v2.1": "2.1",
    "cuda_v2.3_nul_cut": "2.3",
    "cuda_thc_pre0.4.1": "0.1-0.4",
    "cuda_preempted": "2.12+",
}


def _guess_modern(values: Mapping[str, Any], exception: str, window: str) -> str | None:
    if values["format"] == "short" or values["backend"] == "xpu":
        return _by_exception(exception) if values["backend"] == "cuda" else None
    if "pytorch_alloc_conf" in window:
        return "2.10"
    if "docs.pytorch.org" in window and values["format"] == "cuda_v2.2+":
        return "2.11+"
    if values["device_index"] is None and values.get("total_bytes") is not None:
        return "2.3"
    if values.get("private_pool_bytes") is not None or exception == "torch.OutOfMemoryError":
        return "2.4+"
    return "2.2-2.3" if exception == "torch.cuda.OutOfMemoryError" else "2.2+"


def _by_exception(exception: str) -> str | None:
    """The version range by the exception's class alone: its name and module changed with 1.13 and 2.4."""
    return {"torch.OutOfMemoryError": "2.4+", "torch.cuda.OutOfMemoryError": "1.13-2.3"}.get(exception)


def _guess_reserved(values: Mapping[str, Any], exception: str, window: str) -> str:
    if exception.endswith("OutOfMemoryError"):
        return "1.13-2.0"
    if "ifreservedmemoryis" in window:
        return "1.10-1.12" if exception == "RuntimeError" else "1.10-2.0"
    return "1.8-1.9" if values.get("limit_bytes") is not None else "1.4-1.9"
