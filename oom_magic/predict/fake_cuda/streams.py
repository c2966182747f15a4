"""CUDA streams and events of the pretend GPU: on which stream memory is taken, since each has pools of its own.

What was queued on a stream is taken to be done by the next request for memory, so that a block that another stream
used (``record_stream``) returns then, as on a GPU that is faster than the code that feeds it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU

_POOL_SIZE = 32  # kStreamsPerPool in c10/cuda/CUDAStream.cpp
_NUM_PRIORITIES = 4  # max_compile_time_stream_priorities there
_EXTERNAL = 1 << 32


class FakeEvent:
    """A CUDA event that has happened."""

    device = torch.device("cuda", 0)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        """Nothing to note: it has happened."""

    wait = record

    def query(self) -> bool:
        """True: nothing is pending."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end: FakeEvent) -> float:
        """1.0 ms: a dry run knows nothing of time."""
        return 1.0


class FakeStream:
    """A CUDA stream: one of 32 for each priority, handed out in turn (``getStreamFromPool``)."""

    streams: Streams
    device_type = 1

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **kwargs: Any) -> None:
        self.device_index = self.streams.card_named(device)
        self.priority = priority
        self.stream_id = self.streams.next(self.device_index, priority) if stream_id is None else stream_id
        self.cuda_stream = self.stream_id
        self._before: list[tuple[int, int]] = []

    @property
    def device(self) -> torch.device:
        """The card that it is on."""
        return torch.device("cuda", self.device_index)

    def __enter__(self) -> FakeStream:
        self._before.append(self.streams.select(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self.streams.restore(self, *self._before.pop())

    def __eq__(self, other: object) -> bool:
        same = (self.device_index, self.stream_id)
        return isinstance(other, FakeStream) and (other.device_index, other.stream_id) == same

    def __hash__(self) -> int:
        return hash((self.device_index, self.stream_id))

    def query(self) -> bool:
        """True: nothing is pending."""
        return True

    def is_capturing(self) -> bool:
        """False: no graph is recorded."""
        return False

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return FakeEvent() if event is None else event

    def synchronize(self, other: Any = None) -> None:
        """Nothing to wait for."""

    wait_stream = wait_event = synchronize


class _StreamContext:
    """What ``torch.cuda.stream(stream)`` returns; nothing happens for None."""

    def __init__(self, stream: FakeStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *exception: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


class Streams:
    """The streams of the cards, by number; 0 is the default one. Memory is taken on a card's current stream."""

    def __init__(self, gpu: FakeGPU) -> None:
        self._gpu = gpu
        self._num_taken: Counter[tuple[int, int]] = Counter()  # by card and priority
        self.Stream: type[FakeStream] = type("Stream", (FakeStream,), {"streams": self})

    def card_named(self, device: Any) -> int:
        """The card that an argument ``device`` means."""
        device = torch.device(device) if isinstance(device, str) else device
        index = device.index if isinstance(device, torch.device) else device
        return self._gpu.card_named(None if index is not None and index < 0 else index)

    def next(self, card: int, priority: int) -> int:
        """The number of a stream from the card's pool of ``priority`` (0 or negative; lower goes first)."""
        level = min(max(-priority, 0), _NUM_PRIORITIES - 1)
        number = self._num_taken[card, level] % _POOL_SIZE
        self._num_taken[card, level] += 1
        return 1 + level * _POOL_SIZE + number

    def select(self, stream: FakeStream) -> tuple[int, int]:
        """Make a stream, and its card, the current one; the card and that card's stream before."""
        recorder = self._gpu.recorders[stream.device_index]
        before = self._gpu.current, recorder.stream
        recorder.stream = stream.stream_id
        self._gpu.set_current(stream.device_index)
        return before

    def restore(self, stream: FakeStream, card: int, number: int) -> None:
        """Undo ``select``, which returned ``card`` and ``number``."""
        self._gpu.recorders[stream.device_index].stream = number
        self._gpu.set_current(card)

    def current(self, device: Any = None) -> FakeStream:
        """The current stream of a card."""
        card = self.card_named(device)
        return self.Stream(card, stream_id=self._gpu.recorders[card].stream)

    def answers(self) -> dict[str, Any]:
        """Replacements for attributes of ``torch.cuda``."""

        def set_stream(stream: FakeStream | None) -> None:
            if stream is not None:
                self.select(stream)

        def external(pointer: int, device: Any = None) -> FakeStream:
            return self.Stream(device, stream_id=_EXTERNAL + pointer)

        return {
            "Stream": self.Stream,
            "Event": FakeEvent,
            "ExternalStream": external,
            "StreamContext": _StreamContext,
            "stream": _StreamContext,
            "set_stream": set_stream,
            "current_stream": self.current,
            "default_stream": lambda device=None: self.Stream(device, stream_id=0),
        }
