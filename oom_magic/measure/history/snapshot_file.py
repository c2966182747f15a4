"""``load_snapshot``: a memory snapshot that somebody recorded, as a MemoryReport."""

from __future__ import annotations

import io
import itertools
import pickle
from pathlib import Path
from typing import Any

from oom_magic.inputs import parse_bytes
from oom_magic.language import _
from oom_magic.measure.history.assembly import Assembler, FailedRequest, state_before
from oom_magic.measure.history.recording import (
    Action,
    AllocatorState,
    Batch,
    HistoryEntry,
    read_state,
    read_trace,
    settings_in,
)
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.memory.report import Assumption, Device, MemoryReport, OutOfMemory
from oom_magic.units import format_bytes

_TRUSTED = {("collections", "OrderedDict"), ("collections", "defaultdict"), ("builtins", "dict"), ("builtins", "list")}


def load_snapshot(path: str | Path, *, memory: str | int | None = None, device: int | None = None) -> MemoryReport:
    """What a snapshot of ``torch.cuda.memory._dump_snapshot`` shows, as the report of a measured run; sizes in bytes.

    ``memory`` is the card's ("24GiB"): a snapshot says it only where a request failed in it, or where ``save_snapshot``
    wrote it. ``device``: which card's trace to read (default: the longest). Without a live process nobody knows which
    tensor was a weight and which a gradient: categories follow from where and when each was allocated. Raises
    FileNotFoundError, and ValueError with the fix for a file that is no snapshot, holds no trace, or does not say how
    large its card is.
    """
    snapshot = _read(Path(path))
    traces = snapshot["device_traces"]
    index = _device(traces, device)
    entries = read_trace(traces[index])
    state = read_state(snapshot["segments"], index)
    allocated = sum(block.num_bytes for block in state.blocks)
    batch = Batch(entries, 0, state, allocated, state.reserved_bytes, has_retries=False)
    segments, blocks = state_before(batch)
    settings = settings_in(snapshot)
    before = AllocatorState(tuple(segments.items()), tuple(blocks.values()))
    assembler = Assembler(before, 0, settings)
    assembler.feed(batch)
    timeline = assembler.timeline(has_graph=False, workspace_sizes=frozenset())
    free = _free_at_failure(traces[index])
    said = snapshot.get("card", {})
    memory = said.get("total_bytes") if memory is None else memory
    if memory is None and free is None:
        raise ValueError(
            _('The snapshot does not record the memory of its card; pass it: load_snapshot(path, memory="24GiB").')
        )
    total = parse_bytes(memory) if memory is not None else state.reserved_bytes + (free or 0)
    card = f"GPU {index} has a total capacity of {format_bytes(total)} of which {format_bytes(free or 0)}"
    return MemoryReport.from_timeline(
        timeline,
        Device(said.get("name") or _("CUDA device {index}", index=index), total),
        source="measured",
        settings=settings,
        replayed=assembler.replayed(0),
        out_of_memory=_ended_by(assembler.failed, entries, settings, card),
        kept_bytes=allocated - sum(block.num_bytes for block in before.blocks),
        assumptions=(
            Assumption(
                _(
                    "Read from a snapshot: categories are inferred from where and when memory was allocated;"
                    " memory outside PyTorch is not included."
                )
            ),
        ),
    )


class _PlainUnpickler(pickle.Unpickler):
    """Reads containers, numbers and strings only: a snapshot from elsewhere must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, if it is a container. Raises UnpicklingError for anything else."""
        if (module, name) not in _TRUSTED:
            raise pickle.UnpicklingError(_("a snapshot contains no {kind}", kind=f"{module}.{name}"))
        return super().find_class(module, name)


def _read(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    try:
        snapshot = _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:
        text = _(
            "{path} is not a snapshot from torch.cuda.memory._dump_snapshot: {error}.",
            path=path,
            error=f"{error}".rstrip("."),
        )
        raise ValueError(text) from None
    if not isinstance(snapshot, dict) or not {"segments", "device_traces"} <= snapshot.keys():
        raise ValueError(
            _("{path} is not a snapshot from torch.cuda.memory._dump_snapshot: it has no traces.", path=path)
        )
    if not any(snapshot["device_traces"]):
        raise ValueError(
            _(
                "{path} has no trace of allocations; call torch.cuda.memory._record_memory_history() before the run.",
                path=path,
            )
        )
    return snapshot


def _device(traces: list[list[dict[str, Any]]], device: int | None) -> int:
    if device is None:
        return max(range(len(traces)), key=lambda index: len(traces[index]))
    if not 0 <= device < len(traces) or not traces[device]:
        used = ", ".join(str(index) for index, trace in enumerate(traces) if trace)
        text = _(
            "device={device} has no trace in this snapshot; devices with traces: {used}.", device=device, used=used
        )
        raise ValueError(text)
    return device


def _free_at_failure(trace: list[dict[str, Any]]) -> int | None:
    """What was free when the last request failed: with what PyTorch held then, the least that the card has."""
    failed = [entry for entry in trace if entry["action"] == "oom"]
    return int(failed[-1].get("device_free", failed[-1].get("addr", 0))) if failed else None


def _ended_by(
    failed: FailedRequest | None, entries: list[HistoryEntry], settings: AllocatorSettings, card: str
) -> OutOfMemory | None:
    """The failure after which nothing was allocated any more; None where the program went on, or did not fail."""
    after = itertools.takewhile(lambda entry: entry.action != Action.OOM, reversed(entries))
    if failed is None or any(entry.action == Action.ALLOC for entry in after):
        return None
    asked = failed.segment_bytes(settings)
    message = f"CUDA out of memory. Tried to allocate {format_bytes(asked)}. {card} is free."
    return failed.out_of_memory(message, asked)
