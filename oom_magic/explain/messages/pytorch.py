"""The messages of PyTorch's device allocators, clause by clause: CUDA, HIP, XPU, NPU, MPS, cudaMallocAsync.

Every clause is optional and matched by itself, because pasting loses and splits them. One pass matches the clauses of
all messages, so parsing takes linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_UNITS = {
    "bytes": 1, "byte": 1, "b": 1, "kib": 2**10, "kb": 2**10, "mib": 2**20, "mb": 2**20,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,  # XLA's
    "gib": 2**30, "gb": 2**30, "tib": 2**40, "tb": 2**40, "pib": 2**50, "pb": 2**50, "eib": 2**60, "eb": 2**60,
}  # fmt: skip
# NVML_VALUE_NOT_AVAILABLE printed as a size (2**64 bytes, "17179869184.00 GiB"), and "no limit".
_UNKNOWN_FROM_BYTES = 2**63
# Further apart than this two clauses belong to different messages.
_MAX_CLAUSE_GAP = 700

SIZE = r"\d{1,20}(?:\.\d{0,6})?(?:bytes?|[kmgtpe]i?b)"
_NUMBER = re.compile(r"\d+\.?\d*")
_BACKENDS = {
    "cuda": "cuda", "hip": "hip", "xpu": "xpu", "dpcpp": "xpu", "npu": "npu", "mps": "mps",
    "musa": "musa", "mlu": "mlu",
}  # fmt: skip
_NAME = "|".join(_BACKENDS)
_CLAUSE = re.compile(
    rf"(?P<head>(?:{_NAME})(?:backend)?outofmemory(?!:?killedprocess))"
    r"|(?P<block_limit>cannotallocatememoryblockwithsizelargerthan4gb)"
    rf"|(?<!you)tr(?:ied|ies|ying)toallocate:?(?P<requested>{SIZE}|(?:morethan)?1eb)(?!ofram)"
    rf"|requestedsize:(?P<rejected>{SIZE})"
    rf"|allocationondevice(?P<async_device>\d{{0,3}})wouldexceed"
    rf"|gpu(?P<device>\d{{0,3}})[^a-z\d]{{0,3}}hasa(?=total)"
    rf"|totalcapaci?tyof(?P<capacity>{SIZE})"
    rf"|ofwhich(?P<free>{SIZE})is"
    rf"|(?<!\d)process(?P<pid>\d{{1,10}})has(?P<listed>{SIZE})"
    rf"|thisprocesshas(?P<process>{SIZE})"
    rf"|allocatedmemory(?P<allocated>{SIZE})is"
    rf"|with(?P<private_pool>{SIZE})allocatedinprivate"
    rf"|\(?(?:gpu|npu|xpu|mlu|musa)(?P<old_device>\d{{1,3}})[;,~]+(?P<old_capacity>{SIZE})total"
    rf"|(?<![\d.])(?P<size>\.?{SIZE})"
    r"(?P<what>totalcap|alreadyalloc|free(?=[;,)~\d]|$)|allowed(?=[;,~\d]|of|$)|isreserved|reserved(?!by)|cached|isalloc)"
    rf"|mpsallocated:(?P<mps_allocated>{SIZE})"
    rf"|otherallocations:(?P<mps_other>{SIZE})"
    rf"|maxallowed:(?P<max_allowed>{SIZE})"
    rf"|currentlyallocated:?(?P<async_allocated>{SIZE})"
    rf"|requested:(?P<async_requested>{SIZE})"
    rf"|devicelimit:?(?P<async_total>{SIZE})"
    rf"|accordingtocuda\):?(?P<async_free>{SIZE})"
    rf"|memoryfraction\):?(?P<async_limit>{SIZE})"
)
_FIELDS = {
    "requested": "requested_bytes", "rejected": "requested_bytes", "async_requested": "requested_bytes",
    "capacity": "total_bytes", "old_capacity": "total_bytes", "totalcap": "total_bytes",
    "async_total": "total_bytes",
    "free": "free_bytes", "async_free": "free_bytes",
    "allocated": "allocated_bytes", "alreadyalloc": "allocated_bytes", "mps_allocated": "allocated_bytes",
    "async_allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
    "cached": "reserved_unallocated_bytes", "isreserved": "reserved_unallocated_bytes",
    "isalloc": "allocated_bytes",
    "process": "process_bytes",
    "allowed": "limit_bytes", "max_allowed": "limit_bytes", "async_limit": "limit_bytes",
    "private_pool": "private_pool_bytes",
    "mps_other": "mps_other_bytes",
}  # fmt: skip
# One of these is in each clause that opens a message: what comes before the first of them need not be read.
_IN_OPENINGS = (
    "outofmemory", "blockwithsize", "toallocate", "requestedsize:", "allocationondevice", "hasatotal", "totalcap",
    "mpsallocated:", "isalloc", "btotal", "etotal", "stotal",
)  # fmt: skip
_LONGEST_OPENING = 100
# Clauses with which a message, or the pasted part of one, may begin.
_OPENING = (
    "head", "block_limit", "requested", "rejected", "async_device", "device", "old_device", "capacity", "mps_allocated",
    "isalloc",
)  # fmt: skip


@dataclass
class Draft:
    """A message while its clauses are gathered; ``start`` and ``end`` are offsets in the squeezed text."""

    start: int
    end: int
    backend: str | None = None
    style: str = ""
    device_index: int | None = None
    is_refused_as_absurd: bool = False
    is_preempted: bool = False
    is_block_limited: bool = False
    sizes: dict[str, int | None] = field(default_factory=dict)
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    clauses: set[str] = field(default_factory=set)


def parse_size(squeezed: str) -> int | None:
    """Bytes of a size such as ``"9.77gib"``; None for the prints that mean "not available"."""
    digits = _NUMBER.match(squeezed)
    if digits is None:
        return None
    num_bytes = round(float(digits.group()) * _UNITS[squeezed[digits.end() :]])
    return num_bytes if num_bytes < _UNKNOWN_FROM_BYTES else None


def drafts(squeezed: str) -> Iterator[Draft]:
    """The allocator messages in a squeezed text, in order, with the sizes that each prints."""
    draft: Draft | None = None
    openings = [at for part in _IN_OPENINGS if (at := squeezed.find(part)) >= 0]
    if not openings:
        return
    for match in _CLAUSE.finditer(squeezed, max(0, min(openings) - _LONGEST_OPENING)):
        clause = match.lastgroup or ""
        if clause == "what":
            clause = match.group("what")
        elif clause == "listed":
            clause = "pid"
        elif clause == "old_capacity":
            clause = "old_device"
        if draft is None or _opens_message(clause, match.start(), draft):
            if clause not in _OPENING:
                continue
            if draft is not None:
                yield draft
            draft = Draft(match.start(), match.end())
        _add_clause(draft, clause, match)
    if draft is not None:
        yield draft


def _opens_message(clause: str, start: int, draft: Draft) -> bool:
    """Whether a clause belongs to another message than the one being gathered."""
    if start - draft.end > _MAX_CLAUSE_GAP:
        return True
    if clause in ("head", "async_device", "block_limit"):
        return True
    if clause in ("requested", "device", "old_device", "capacity"):
        later = {"device", "old_device"} & draft.clauses if clause == "requested" else set()
        return clause in draft.clauses or bool(later)
    return False


def _add_clause(draft: Draft, clause: str, match: re.Match[str]) -> None:
    """Add a clause's values to the draft; the first print of a field wins."""
    if clause in draft.clauses and clause != "pid":
        return
    draft.clauses.add(clause)
    draft.end = match.end()
    if clause == "head":
        draft.backend = next(name for key, name in _BACKENDS.items() if match.group("head").startswith(key))
    elif clause == "pid":
        draft.processes.append((int(match.group("pid")), parse_size(match.group("listed"))))
    elif clause in ("device", "old_device", "async_device"):
        index = match.group(clause)
        draft.device_index = int(index) if index else None
        draft.style = {"device": "of_which", "old_device": "total_capacity", "async_device": "async"}[clause]
        if clause == "old_device":
            draft.sizes["total_bytes"] = parse_size(match.group("old_capacity"))
    elif clause == "block_limit":
        draft.backend, draft.is_block_limited = "xpu", True
    elif match.group().endswith("1eb"):
        draft.is_refused_as_absurd = True
    else:
        draft.is_preempted = clause == "rejected"
        if clause == "requested" and parse_size(match.group(clause)) is None:
            draft.is_refused_as_absurd = True  # some 2**64 bytes: a negative size
        printed = match.group("size") if match.group("what") else match.group(clause)
        draft.sizes.setdefault(_FIELDS[clause], parse_size(printed.lstrip(".")))
