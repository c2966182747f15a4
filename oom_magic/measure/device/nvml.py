"""The state of a card and its processes according to the driver (NVML), as far as it reports them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from oom_magic.language import _


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process on the card; ``num_bytes`` is None if the driver does not report it (WSL, Windows)."""

    pid: int
    name: str
    num_bytes: int | None


@dataclass(frozen=True, slots=True)
class CardReading:
    """A card as its driver reports it, in bytes. ``problem``: why the rest is None or empty."""

    total_bytes: int | None = None
    used_bytes: int | None = None
    processes: tuple[DeviceProcess, ...] = ()
    driver_version: str = ""
    temperature: int | None = None  # degrees Celsius
    power_limit_watts: int | None = None
    has_ecc: bool | None = None
    is_instance: bool = False  # of a card that is divided (MIG): memory and processes are those of one part
    number: int | None = None  # in the driver's order, which is that of nvidia-smi
    problem: str = ""


def read_card(uuid: str = "", pci_bus_id: str = "") -> CardReading:
    """The card with this UUID (a MIG instance has its own) or at this PCI address. Never raises.

    torch's numbering depends on ``CUDA_VISIBLE_DEVICES``, NVML's does not: so no index.
    """
    try:
        with _library() as nvml:
            handle = _find(nvml, uuid, pci_bus_id)
            card = _query(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle) or handle
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            return CardReading(
                int(memory.total),
                int(memory.used),
                _processes(nvml, handle),
                _decoded(nvml.nvmlSystemGetDriverVersion()),
                _query(nvml.nvmlDeviceGetTemperature, card, 0),
                _power_limit(nvml, card),
                _is_enabled(nvml.nvmlDeviceGetEccMode, card),
                card is not handle,
                _query(nvml.nvmlDeviceGetIndex, card),
            )
    except Exception as error:  # NVML's own exception type can only be named once it is imported
        return CardReading(problem=_problem(error))


@contextmanager
def open_card(uuid: str = "", pci_bus_id: str = "") -> Iterator[Callable[[], CardReading]]:
    """A function that reads memory and processes of a card; the library stays open in the block.

    It never raises: a GPU may fall off the bus between two calls.
    """
    with ExitStack() as stack:
        try:
            nvml = stack.enter_context(_library())
            handle = _find(nvml, uuid, pci_bus_id)
        except Exception as error:  # as in read_card
            problem = CardReading(problem=_problem(error))
            yield lambda: problem
        else:
            yield lambda: _read_memory(nvml, handle)


def _read_memory(nvml: Any, handle: Any) -> CardReading:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return CardReading(int(memory.total), int(memory.used), _processes(nvml, handle))
    except Exception as error:  # as in read_card
        return CardReading(problem=_problem(error))


def name_cards() -> tuple[str, ...]:
    """Names of the NVIDIA cards that the driver knows, in its order; none if it cannot be asked."""
    try:
        with _library() as nvml:
            handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
            return tuple(_decoded(nvml.nvmlDeviceGetName(handle)) for handle in handles)
    except Exception:  # as in read_card
        return ()


@contextmanager
def _library() -> Iterator[Any]:
    import pynvml  # type: ignore[import-untyped]

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _find(nvml: Any, uuid: str, pci_bus_id: str) -> Any:
    for prefix in ("GPU-", "MIG-") if uuid else ():
        with suppress(nvml.NVMLError):
            return _mig_instance(nvml, nvml.nvmlDeviceGetHandleByUUID((prefix + uuid).encode()))
    return _mig_instance(nvml, nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode()))


def _mig_instance(nvml: Any, card: Any) -> Any:
    """Of a divided card (MIG) the instance that this process uses, as CUDA chooses it: the one named, or the first."""
    if not _is_enabled(nvml.nvmlDeviceGetMigMode, card):
        return card
    places = range(_query(nvml.nvmlDeviceGetMaxMigDeviceCount, card) or 0)
    found = [_query(nvml.nvmlDeviceGetMigDeviceHandleByIndex, card, place) for place in places]
    instances = [one for one in found if one is not None]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    named = [
        one for one in instances if wanted and _decoded(_query(nvml.nvmlDeviceGetUUID, one) or "").startswith(wanted)
    ]
    return (named or instances or [card])[0]


def _processes(nvml: Any, handle: Any) -> tuple[DeviceProcess, ...]:
    found: dict[int, DeviceProcess] = {}
    for kind in ("Compute", "Graphics"):
        running: list[Any] = []
        with suppress(nvml.NVMLError):
            running = getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses")(handle)
        for process in running:
            if process.pid in found:
                continue
            used = process.usedGpuMemory
            name = _decoded(_query(nvml.nvmlSystemGetProcessName, process.pid) or "")  # another user's, or ended
            found[process.pid] = DeviceProcess(process.pid, name, None if used is None else int(used))
    return tuple(found.values())


def _problem(error: Exception) -> str:
    if isinstance(error, ImportError):
        return _("nvidia-ml-py is not installed (pip install nvidia-ml-py)")
    return _("the driver does not respond: {error}", error=error)


def _query(function: Any, *args: Any) -> Any:
    """The driver's answer, or None: cards differ in what they support."""
    try:
        return function(*args)
    except Exception:  # as in read_card
        return None


def _is_enabled(function: Any, handle: Any) -> bool | None:
    current_and_pending = _query(function, handle)
    return None if current_and_pending is None else bool(current_and_pending[0])


def _power_limit(nvml: Any, handle: Any) -> int | None:
    milliwatts = _query(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return None if milliwatts is None else int(milliwatts) // 1000


def _decoded(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
