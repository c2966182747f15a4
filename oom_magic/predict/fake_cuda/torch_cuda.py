"""``torch.cuda``'s functions while the pretend GPU stands in for a real one.

``memory_stats`` and ``memory_snapshot`` are those of torch/csrc/cuda/Module.cpp (``THCPModule_memoryStats``,
``THCPModule_memorySnapshot``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from oom_magic.language import _
from oom_magic.memory.allocator.segments import Block
from oom_magic.memory.timeline import MarkKind
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.instrumentation.recorder import Recorder
from oom_magic.predict.isolation.patching import Patches
from oom_magic.predict.setups.gpus import GPU
from oom_magic.units import MIB
from oom_magic.user_code import is_users_file

_POOLS = ("all", "small_pool", "large_pool")
_SMALL_BYTES = MIB  # kSmallSize: blocks up to it come from the small pool


class CudaCounters:
    """``torch.cuda``'s memory counters over the trace."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._allocated_since = self._reserved_since = 0
        self._floor = (0, 0)

    def allocated(self) -> int:
        """``torch.cuda.memory_allocated``."""
        return self._recorder.allocator.allocated_bytes

    def reserved(self) -> int:
        """``torch.cuda.memory_reserved``."""
        return self._recorder.allocator.reserved_bytes

    def max_allocated(self) -> int:
        """``torch.cuda.max_memory_allocated`` since the last reset."""
        return max(self._floor[0], max(self._recorder.allocated[self._allocated_since :], default=0))

    def max_reserved(self) -> int:
        """``torch.cuda.max_memory_reserved`` since the last reset."""
        return max(self._floor[1], max(self._recorder.reserved[self._reserved_since :], default=0))

    def reset(self) -> None:
        """``torch.cuda.reset_peak_memory_stats``."""
        self._allocated_since = self._reserved_since = len(self._recorder.order)
        self._floor = (self.allocated(), self.reserved())
        self._recorder.mark(MarkKind.RESET_PEAK)

    def stats(self) -> dict[str, Any]:
        """``torch.cuda.memory_stats_as_nested_dict``."""
        return memory_statistics(self._recorder, self._allocated_since, self.max_reserved())


def _is_available(is_really: bool) -> Callable[[], bool]:
    """True, except for a library that is being imported: its setup would outlive the dry run."""

    def is_available() -> bool:
        frame = sys._getframe(2)  # past the frame that is in torch.cuda
        while frame.f_code.co_name != "<module>" and frame.f_globals.get("__name__", "").startswith("torch."):
            if frame.f_back is None:
                break
            frame = frame.f_back
        file = frame.f_code.co_filename
        is_library = not file.startswith("<") and not is_users_file(file)  # code that is executed may be the user's
        return is_really if is_library and frame.f_code.co_name == "<module>" else True

    return is_available


# Shared memory of a multiprocessor, and the most that one block can ask for: CUDA C++ Programming Guide, "Compute
# Capabilities". A block leaves 1 KiB to the system from 8.0 on.
_SHARED_KIB = {
    (7, 0): (96, 96), (7, 5): (64, 64), (8, 0): (164, 163), (8, 6): (100, 99), (8, 9): (100, 99), (9, 0): (228, 227),
    (10, 0): (228, 227), (12, 0): (100, 99),
}  # fmt: skip


class _Properties(SimpleNamespace):
    """The result of ``get_device_properties``."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            _("get_device_properties().{name} is unknown for the pretend {card}", name=name, card=self.name)
        )


def _properties(gpu: GPU, total_bytes: int) -> SimpleNamespace:
    """What ``get_device_properties`` returns."""
    per_multiprocessor, optin = _SHARED_KIB.get(gpu.capability, (48, 48))
    return _Properties(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        total_memory=total_bytes,
        multi_processor_count=gpu.num_multiprocessors,
        warp_size=32,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
        max_threads_per_multi_processor=gpu.threads_per_multiprocessor,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=optin * 1024,
        shared_memory_per_multiprocessor=per_multiprocessor * 1024,
        max_threads_per_block=1024,
        pci_domain_id=0,
        pci_bus_id=1,
        pci_device_id=0,
        uuid="00000000-0000-0000-0000-000000000000",
        L2_cache_size=gpu.l2_cache_bytes,
    )


class Cards:
    """The pretend machine's cards, all of one model, and their memory.

    ``total_bytes`` is the capacity of one; ``outside_bytes`` of it is taken outside PyTorch.
    """

    def __init__(self, gpu: FakeGPU, total_bytes: int, outside_bytes: int) -> None:
        self.gpu = gpu
        self.total_bytes = total_bytes
        self._outside_bytes = outside_bytes
        self._counters = [CudaCounters(recorder) for recorder in gpu.recorders]

    def named(self, device: Any = None) -> int:
        """The card that an argument of ``torch.cuda`` means: None, a number, a name or a device."""
        if isinstance(device, str):
            device = torch.device(device)
        index = device.index if isinstance(device, torch.device) else device
        return self.gpu.card_named(index)

    def counters(self, device: Any = None) -> CudaCounters:
        """Its memory counters."""
        return self._counters[self.named(device)]

    def memory_info(self, device: Any = None) -> tuple[int, int]:
        """``torch.cuda.mem_get_info``: free and total."""
        reserved = self.gpu.recorders[self.named(device)].allocator.reserved_bytes
        return max(self.total_bytes - self._outside_bytes - reserved, 0), self.total_bytes

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache``: of every card."""
        for recorder in self.gpu.recorders:
            recorder.empty_cache()

    def limit(self, fraction: float, device: Any = None) -> None:
        """``torch.cuda.set_per_process_memory_fraction``."""
        self.gpu.recorders[self.named(device)].allocator.limit(int(fraction * self.total_bytes))

    def fraction(self, device: Any = None) -> float:
        """``torch.cuda.get_per_process_memory_fraction``."""
        limit = self.gpu.recorders[self.named(device)].allocator.limit_bytes
        return 1.0 if limit is None else limit / self.total_bytes

    def snapshot(self) -> list[dict[str, Any]]:
        """``torch.cuda.memory_snapshot``: the segments of every card."""
        return [one for card, recorder in enumerate(self.gpu.recorders) for one in memory_snapshot(recorder, card)]

    def set_device(self, device: Any) -> None:
        """``torch.cuda.set_device``: a negative number changes nothing."""
        if not (isinstance(device, int) and device < 0):
            self.gpu.set_current(self.named(device))

    def exchange(self, device: int) -> int:
        """``torch.cuda._exchange_device``: the card that was current; a negative number changes nothing."""
        before = self.gpu.current
        self.set_device(device)
        return before


def _is_bf16_supported(gpu: GPU) -> Callable[..., bool]:
    """``torch.cuda.is_bf16_supported``: older cards emulate it, which is tried with a tensor on them."""

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        if gpu.capability >= (8, 0):
            return True
        if including_emulation:
            torch.tensor([1.0], dtype=torch.bfloat16, device="cuda")
        return including_emulation

    return is_bf16_supported


def _device_contexts(cards: Cards) -> dict[str, type]:
    """``torch.cuda.device`` and ``device_of``."""

    class device:  # noqa: N801 (torch's own name)
        def __init__(self, device: Any) -> None:
            is_none = device is None or (isinstance(device, int) and device < 0)
            self.idx = -1 if is_none else cards.named(device)
            self.prev_idx = -1

        def __enter__(self) -> None:
            self.prev_idx = cards.exchange(self.idx)

        def __exit__(self, *exception: object) -> None:
            cards.set_device(self.prev_idx)

    class device_of(device):  # noqa: N801
        def __init__(self, obj: Any) -> None:
            super().__init__(obj.get_device() if obj.is_cuda else -1)

    return {"device": device, "device_of": device_of, "_DeviceGuard": device}


def torch_cuda_answers(cards: Cards) -> Patches:
    """``torch.cuda``, the modules in it and ``torch.accelerator`` answer for the pretend cards.

    Functions that only combine answers of others (``memory_stats``, ``memory_summary``) stay PyTorch's own.
    """
    answers = {**_fixed(cards), **_of_cards(cards), **_of_memory(cards), **cards.gpu.streams.answers()}
    modules = (torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.profiler)
    return [
        *cards.gpu.streams.of_users(),
        (torch, cards.gpu.streams.of_accelerators()),
        (torch.cuda, answers),
        *((module, {name: answer for name, answer in answers.items() if hasattr(module, name)}) for module in modules),
        (torch.cuda.nvtx, {"_nvtx": _Markers()}),
        (torch._C, {"_cuda_clearCublasWorkspaces": cards.gpu.clear_workspaces}),
        (torch.backends.cuda, {"is_built": _is_available(torch.backends.cuda.is_built())}),
        *((module, _accelerator_answers(cards, module)) for module in _accelerators()),
    ]


def _accelerators() -> Iterator[Any]:
    """``torch.accelerator`` and ``torch.accelerator.memory``, if this PyTorch has them."""
    for name in ("torch.accelerator", "torch.accelerator.memory"):
        if name in sys.modules:
            yield sys.modules[name]


def answering(value: Any) -> Callable[..., Any]:
    """A function of any arguments that returns ``value``."""
    return lambda *args, **kwargs: value


def _fixed(cards: Cards) -> dict[str, Any]:
    """Answers that are constants."""
    gpu = cards.gpu.card
    fixed: dict[str, Any] = {
        "is_initialized": True, "device_count": len(cards.gpu.recorders), "init": None,
        "_lazy_init": None, "synchronize": None, "manual_seed": None, "manual_seed_all": None,
        "seed": None, "seed_all": None, "initial_seed": 0, "ipc_collect": None,
        "reset_accumulated_memory_stats": None,
        "is_tf32_supported": gpu.capability >= (8, 0),
        "get_arch_list": [f"sm_{gpu.capability[0]}{gpu.capability[1]}"],
        "utilization": 0, "_sleep": None, "set_rng_state": None, "set_rng_state_all": None,
        "list_gpu_processes": "GPU:0\nno processes are running", "temperature": 0, "power_draw": 0, "clock_rate": 0,
        "memory_usage": 0,
        "_record_memory_history": None, "_save_segment_usage": None, "_save_memory_usage": None,
        "host_memory_stats_as_nested_dict": {}, "reset_accumulated_host_memory_stats": None,
        "reset_peak_host_memory_stats": None, "get_allocator_backend": "native", "check_error": None,
    }  # fmt: skip
    return {name: answering(value) for name, value in fixed.items()}


def _of_cards(cards: Cards) -> dict[str, Any]:
    """Answers about the cards, their capabilities and the current one."""

    def generator_state(*_unused: Any) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    card, properties = cards.gpu.card, _properties(cards.gpu.card, cards.total_bytes)
    synchronization = [0]
    modes = ("default", "warn", "error")
    runtime = SimpleNamespace(
        cudaMemGetInfo=cards.memory_info, cudaProfilerStart=answering(0), cudaProfilerStop=answering(0),
        cudaGetErrorString=str, cudaHostRegister=answering(0), cudaHostUnregister=answering(0),
    )  # fmt: skip
    return {
        **_device_contexts(cards),
        "is_bf16_supported": _is_bf16_supported(cards.gpu.card),
        "current_device": lambda: cards.gpu.current,
        "set_device": cards.set_device,
        "_exchange_device": cards.exchange,
        "_maybe_exchange_device": cards.exchange,
        "can_device_access_peer": lambda device, peer: device != peer,
        "get_device_properties": lambda device=None: cards.named(device) >= 0 and properties,
        "get_device_name": lambda device=None: cards.named(device) >= 0 and card.name,
        "get_device_capability": lambda device=None: cards.named(device) >= 0 and card.capability,
        "get_sync_debug_mode": lambda: synchronization[0],
        "set_sync_debug_mode": lambda mode: synchronization.__setitem__(
            0, modes.index(mode) if mode in modes else mode
        ),
        "is_available": _is_available(torch.cuda.is_available()),
        "get_rng_state": generator_state,
        "get_rng_state_all": lambda *args: [generator_state() for _unused in cards.gpu.recorders],
        "cudart": lambda: runtime,
    }


def _of_memory(cards: Cards) -> dict[str, Any]:
    """Answers of a card's allocator, and its settings."""
    reserved, max_reserved = _counter(cards, CudaCounters.reserved), _counter(cards, CudaCounters.max_reserved)
    max_allocated, reset = _counter(cards, CudaCounters.max_allocated), _counter(cards, CudaCounters.reset)
    return {
        "memory_allocated": _counter(cards, CudaCounters.allocated),
        "memory_reserved": reserved,
        "memory_cached": reserved,
        "max_memory_allocated": max_allocated,
        "max_memory_reserved": max_reserved,
        "max_memory_cached": max_reserved,
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "reset_max_memory_cached": reset,
        "memory_snapshot": lambda *args, **kwargs: cards.snapshot(),
        "_snapshot": lambda *args, **kwargs: {
            "segments": cards.snapshot(),
            "device_traces": [[] for _unused in cards.gpu.recorders],
        },
        "memory_stats_as_nested_dict": _counter(cards, CudaCounters.stats),
        "mem_get_info": cards.memory_info,
        "device_memory_used": lambda device=None: -int(np.subtract(*cards.memory_info(device))),
        "empty_cache": cards.empty_cache,
        "set_per_process_memory_fraction": cards.limit,
        "get_per_process_memory_fraction": cards.fraction,
    }


def _counter(cards: Cards, read: Callable[[CudaCounters], Any]) -> Callable[..., Any]:
    """A function of ``torch.cuda`` that reads a card's counters."""
    return lambda device=None: read(cards.counters(device))


class _Markers:
    """``torch.cuda.nvtx``'s markers, without effect: each call returns the depth 0."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args: 0


def _accelerator_answers(cards: Cards, module: Any) -> dict[str, Any]:
    """Replacements for attributes of ``torch.accelerator`` or its module of memory."""
    answers: dict[str, Any] = {
        **_of_memory(cards),
        "is_available": lambda: True,
        "device_count": lambda: len(cards.gpu.recorders),
        "current_device_index": lambda: cards.gpu.current,
        "current_device_idx": lambda: cards.gpu.current,
        "set_device_index": cards.set_device,
        "set_device_idx": cards.set_device,
        "device_index": _device_contexts(cards)["device"],
        "current_accelerator": lambda *args, **kwargs: torch.device("cuda"),
        "current_stream": lambda device=None: torch.cuda.current_stream(device),
        "set_stream": lambda stream: torch.cuda.set_stream(stream),
        "synchronize": answering(None),
        "empty_host_cache": answering(None),
        "reset_accumulated_memory_stats": answering(None),
        "get_memory_info": cards.memory_info,
        "memory_stats": lambda device=None: torch.cuda.memory_stats(device),
    }
    return {name: answer for name, answer in answers.items() if hasattr(module, name)}


def memory_statistics(recorder: Recorder, since: int, peak_reserved_bytes: int) -> dict[str, Any]:
    """The nested statistics; peaks are those since the event numbered ``since``.

    Segments and the rests of split blocks are counted as they are now; of these only reserved bytes have a peak of
    their own.
    """
    found: dict[str, Any] = {}
    for name, weights in _weights(recorder).items():
        found[name] = {pool: _over_time(recorder, weights, pool, since) for pool in _POOLS}
    found["active"], found["active_bytes"] = found["allocation"], found["allocated_bytes"]
    for name, now in _segments_now(recorder).items():
        found[name] = {
            pool: {"current": now[pool], "peak": now[pool], "allocated": now[pool], "freed": 0} for pool in _POOLS
        }
    allocator = recorder.allocator
    found["reserved_bytes"]["all"]["peak"] = peak_reserved_bytes
    found["segment"]["all"].update(allocated=allocator.num_device_allocs, freed=allocator.num_device_frees)
    nothing = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    return {
        **found,
        "num_alloc_retries": allocator.num_retries,
        "num_ooms": 0,
        "num_oom_rejections": 0,
        "num_sync_all_streams": allocator.num_retries,
        "num_device_alloc": allocator.num_device_allocs,
        "num_device_free": allocator.num_device_frees,
        "max_split_size": allocator.settings.max_split_size_bytes or -1,
        "oversize_allocations": nothing,
        "oversize_segments": nothing,
    }


def _weights(recorder: Recorder) -> dict[str, np.ndarray]:
    """The weight of each allocation in the statistics."""
    requested = np.array([column[0] for column in recorder.columns], dtype=np.int64)
    blocks = np.array(recorder.block_bytes, dtype=np.int64)
    return {"allocation": np.ones_like(blocks), "allocated_bytes": blocks, "requested_bytes": requested}


def _over_time(recorder: Recorder, weights: np.ndarray, pool: str, since: int) -> dict[str, int]:
    if pool != "all":
        is_small = np.array(recorder.block_bytes, dtype=np.int64) <= _SMALL_BYTES
        weights = weights * (is_small if pool == "small_pool" else ~is_small)
    order = np.array(recorder.order, dtype=np.int64)
    changes = np.where(order >= 0, 1, -1) * weights[np.where(order >= 0, order, ~order)]
    levels = np.concatenate([[0], np.cumsum(changes)])
    return {
        "current": int(levels[-1]),
        "peak": int(levels[since:].max()),
        "allocated": int(changes[changes > 0].sum()),
        "freed": int(-changes[changes < 0].sum()),
    }


def _segments_now(recorder: Recorder) -> dict[str, dict[str, int]]:
    names = ("segment", "reserved_bytes", "inactive_split", "inactive_split_bytes")
    found = {name: dict.fromkeys(_POOLS, 0) for name in names}
    for segment in _segments(recorder):
        splits = [block for block in segment if block.is_free and block.is_split]
        counts = (1, sum(block.size_bytes for block in segment), len(splits), sum(one.size_bytes for one in splits))
        for pool in ("all", _pool(segment)):
            for name, count in zip(names, counts, strict=True):
                found[name][pool] += count
    return found


def _pool(segment: list[Block]) -> str:
    pool = next((block.pool for block in segment if block.pool is not None), None)
    return "small_pool" if pool is not None and pool.is_small else "large_pool"


def _segments(recorder: Recorder) -> Iterator[list[Block]]:
    """The blocks of each segment, by address."""
    blocks = [block for block in recorder.blocks.values() if block.size_bytes]
    for head in {id(one): one for one in map(_head, [*blocks, *recorder.allocator.free_blocks()])}.values():
        segment, block = [], head
        while block is not None:
            segment.append(block)
            block = block.next  # type: ignore[assignment]
        yield segment


def _head(block: Block) -> Block:
    while block.previous is not None:
        block = block.previous
    return block


def memory_snapshot(recorder: Recorder, card: int) -> list[dict[str, Any]]:
    """The segments, as ``torch.cuda.memory_snapshot`` lists them; without frames."""
    requested = {id(block): recorder.columns[number][0] for number, block in recorder.blocks.items()}
    return [_segment(segment, requested, card) for segment in sorted(_segments(recorder), key=lambda s: s[0].address)]


def _segment(segment: list[Block], requested: dict[int, int], card: int) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = [
        {
            "address": block.address,
            "size": block.size_bytes,
            "requested_size": requested.get(id(block), 0),
            "state": "inactive" if block.is_free else "active_allocated",
            "frames": [],
        }
        for block in segment
    ]
    allocated = sum(block.size_bytes for block in segment if not block.is_free)
    return {
        "device": card,
        "address": segment[0].address,
        "total_size": sum(block.size_bytes for block in segment),
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(requested.get(id(block), 0) for block in segment),
        "stream": 0,
        "segment_type": "small" if _pool(segment) == "small_pool" else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
