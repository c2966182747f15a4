"""What ``torch.cuda`` answers while the pretend GPU stands in for a real one."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from oom_magic.memory.timeline import MarkKind
from oom_magic.predict.instrumentation.attribution import is_users_file
from oom_magic.predict.instrumentation.recorder import Recorder
from oom_magic.predict.setups.gpus import GPU
from oom_magic.units import MIB


class FakeStream:
    """A CUDA stream on which everything has already happened."""

    device = torch.device("cuda", 0)
    device_index = 0
    device_type = 1
    stream_id = cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def query(self) -> bool:
        """True: nothing is pending."""
        return True

    def is_capturing(self) -> bool:
        """False: no graph is recorded."""
        return False

    def synchronize(self) -> None:
        """Nothing to wait for."""

    wait_stream = wait_event = record_event = __init__


class FakeEvent(FakeStream):
    """A CUDA event that has happened."""

    record = wait = FakeStream.synchronize

    def elapsed_time(self, end: FakeEvent) -> float:
        """1.0 ms: a dry run knows nothing of time."""
        return 1.0


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

    def stats(self) -> dict[str, int]:
        """``torch.cuda.memory_stats``: the counters known here; others read as 0."""
        known: dict[str, int] = defaultdict(int)
        made = sum(event >= 0 for event in self._recorder.order)
        for kind, current, peak in (
            ("allocated_bytes", self.allocated(), self.max_allocated()),
            ("active_bytes", self.allocated(), self.max_allocated()),
            ("reserved_bytes", self.reserved(), self.max_reserved()),
        ):
            known[f"{kind}.all.current"], known[f"{kind}.all.peak"] = current, peak
        known["allocation.all.allocated"] = made
        known["allocation.all.current"] = 2 * made - len(self._recorder.order)
        known["num_alloc_retries"] = self._recorder.allocator.num_retries
        return known


def _is_available(is_really: bool) -> Callable[[], bool]:
    """True, save to a library that is being imported: what it sets up then outlives the dry run."""

    def is_available() -> bool:
        frame = sys._getframe(2)  # past the call that stands in torch.cuda
        while frame.f_code.co_name != "<module>" and frame.f_globals.get("__name__", "").startswith("torch."):
            if frame.f_back is None:
                break
            frame = frame.f_back
        is_library = not is_users_file(frame.f_code.co_filename)
        return is_really if is_library and frame.f_code.co_name == "<module>" else True

    return is_available


def _properties(gpu: GPU, total_bytes: int) -> SimpleNamespace:
    """What ``get_device_properties`` returns."""
    return SimpleNamespace(
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
        L2_cache_size=4 * MIB,
    )


def cuda_answers(gpu: GPU, recorder: Recorder, total_bytes: int, outside_bytes: int) -> dict[str, Any]:
    """Replacements for attributes of ``torch.cuda``. ``outside_bytes`` is taken on the card outside PyTorch."""
    counters = CudaCounters(recorder)

    def answer(value: Any) -> Any:
        return lambda *args, **kwargs: value

    def free() -> int:
        return max(total_bytes - outside_bytes - recorder.allocator.reserved_bytes, 0)

    answers: dict[str, Any] = {
        name: answer(value)
        for name, value in {
            "is_initialized": True, "device_count": 1, "current_device": 0, "init": None,
            "_lazy_init": None, "synchronize": None, "set_device": None, "manual_seed": None, "manual_seed_all": None,
            "seed": None, "seed_all": None, "initial_seed": 0, "ipc_collect": None,
            "reset_accumulated_memory_stats": None,
            "get_device_name": gpu.name, "get_device_capability": gpu.capability,
            "is_bf16_supported": gpu.capability >= (8, 0), "is_tf32_supported": gpu.capability >= (8, 0),
            "is_current_stream_capturing": False, "get_arch_list": [f"sm_{gpu.capability[0]}{gpu.capability[1]}"],
            "can_device_access_peer": False, "utilization": 0, "set_rng_state": None, "set_rng_state_all": None,
            "memory_summary": "", "memory_snapshot": [], "list_gpu_processes": "", "set_stream": None,
        }.items()
    }  # fmt: skip
    answers.update(
        get_device_properties=answer(_properties(gpu, total_bytes)),
        is_available=_is_available(torch.cuda.is_available()),
        get_rng_state=lambda *args: torch.zeros(16, dtype=torch.uint8, device="cpu"),
        get_rng_state_all=lambda *args: [torch.zeros(16, dtype=torch.uint8, device="cpu")],
        device=lambda *args, **kwargs: nullcontext(),
        device_of=lambda *args, **kwargs: nullcontext(),
        Stream=FakeStream,
        Event=FakeEvent,
        current_stream=FakeStream,
        default_stream=FakeStream,
        stream=lambda stream: nullcontext(stream),
        memory_allocated=lambda *args, **kwargs: counters.allocated(),
        memory_reserved=lambda *args, **kwargs: counters.reserved(),
        memory_cached=lambda *args, **kwargs: counters.reserved(),
        max_memory_allocated=lambda *args, **kwargs: counters.max_allocated(),
        max_memory_reserved=lambda *args, **kwargs: counters.max_reserved(),
        max_memory_cached=lambda *args, **kwargs: counters.max_reserved(),
        reset_peak_memory_stats=lambda *args, **kwargs: counters.reset(),
        reset_max_memory_allocated=lambda *args, **kwargs: counters.reset(),
        reset_max_memory_cached=lambda *args, **kwargs: counters.reset(),
        memory_stats=lambda *args, **kwargs: counters.stats(),
        memory_stats_as_nested_dict=lambda *args, **kwargs: counters.stats(),
        mem_get_info=lambda *args, **kwargs: (free(), total_bytes),
        empty_cache=lambda *args, **kwargs: recorder.empty_cache(),
        set_per_process_memory_fraction=lambda fraction, *_: recorder.allocator.limit(int(fraction * total_bytes)),
    )
    return answers


def accelerator_answers() -> dict[str, Any]:
    """Replacements for attributes of ``torch.accelerator``, where this PyTorch has them."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "current_accelerator": lambda *args, **kwargs: torch.device("cuda"),
        "current_stream": FakeStream,
        "synchronize": lambda *args, **kwargs: None,
        "empty_cache": lambda: torch.cuda.empty_cache(),
        "memory_allocated": lambda *args: torch.cuda.memory_allocated(),
        "memory_reserved": lambda *args: torch.cuda.memory_reserved(),
        "max_memory_allocated": lambda *args: torch.cuda.max_memory_allocated(),
        "max_memory_reserved": lambda *args: torch.cuda.max_memory_reserved(),
    }
    module = getattr(torch, "accelerator", None)
    return {name: answer for name, answer in answers.items() if hasattr(module, name)}
