"""CUDA streams, events and threads of the pretend GPU: each stream has memory pools of its own.

Work queued on a stream is assumed to be finished at the next request for memory, so a block that another stream used
(``record_stream``) is returned then, as on a GPU that is faster than the code that feeds it.

A dry run has one thread. On CUDA autograd has one for each card, and ``nn.DataParallel`` starts one for each replica
and call. Each takes a handle of cuBLAS from its card's pool when it first needs one, and a thread that ends gives its
handles back for the next (aten/src/ATen/cuda/detail/DeviceThreadHandles.h, ``DeviceThreadHandlePool``). Workspaces
belong to handles.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch

from oom_magic.predict.instrumentation.autograd_order import NO_SEQUENCE, number_when_made
from oom_magic.predict.isolation.patching import StandIn

_MAIN = "main"
_AUTOGRAD = "autograd"


class StreamOwner(Protocol):
    """The interface of a card that has streams."""

    current: int

    def set_current(self, card: int) -> None: ...

    def card_named(self, index: int | None) -> int: ...


_POOL_SIZE = 32  # kStreamsPerPool in c10/cuda/CUDAStream.cpp
_NUM_PRIORITIES = 4  # max_compile_time_stream_priorities there
_EXTERNAL = 1 << 32
_FIRST_ALONE = 1 << 32  # no graph of a run has such a number
_OF_STREAMS = ("query", "record_event", "synchronize", "wait_stream", "wait_event")
_OF_EVENTS = ("record", "wait", "query", "synchronize", "elapsed_time")


class _Event(metaclass=StandIn):
    """Replaces ``torch.Event``: it has already happened."""

    original = torch.Event
    device = torch.device("cuda", 0)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        """Does nothing: the event has happened already."""

    wait = record

    def query(self) -> bool:
        """True: nothing is pending."""
        return True

    def synchronize(self) -> None:
        """Does nothing: there is nothing to wait for."""

    def elapsed_time(self, end: _Event) -> float:
        """1.0 ms: a dry run does not measure time."""
        return 1.0


class FakeEvent(_Event):
    """Replaces ``torch.cuda.Event``."""

    original = torch.cuda.streams.Event


class FakeStream:
    """A CUDA stream: one of 32 for each priority, assigned round-robin (``getStreamFromPool``)."""

    streams: Streams
    device_type = 1

    def __init__(
        self,
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.device_index = self.streams.card_named(device if device_index is None else device_index)
        self.priority = priority
        self.stream_id = self.streams.next(self.device_index, priority) if stream_id is None else stream_id
        self.cuda_stream = self.stream_id
        self._before: list[Selection] = []

    @property
    def device(self) -> torch.device:
        """The card that it is on."""
        return torch.device("cuda", self.device_index)

    def __enter__(self) -> FakeStream:
        self._before.append(self.streams.select(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self.streams.restore(self._before.pop())

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
        """An event that has happened already."""
        return FakeEvent() if event is None else event

    def synchronize(self, other: Any = None) -> None:
        """Does nothing: there is nothing to wait for."""

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


class Selection(NamedTuple):
    """The state before a stream was selected: the card, the new stream's card, its stream, and since when."""

    current_card: int
    card: int
    stream: int
    graph_task: int


class Streams:
    """The streams of the cards, by number; 0 is the default one. Memory is taken on a card's current stream.

    Autograd runs a node on the stream on which its forward ran (``Node::stream`` in torch/csrc/autograd/function.h).
    """

    def __init__(self, gpu: StreamOwner) -> None:
        self._gpu = gpu
        self._num_taken: Counter[tuple[int, int]] = Counter()  # by card and priority
        self._current: dict[int, int] = {}  # by card
        self.captured_in: int | None = None  # the private pool of the CUDA graph that is being captured
        self._alone = count(_FIRST_ALONE)
        self._selected_in = -1  # the backward in which user code selected the current stream
        self._gave_gradient: dict[int, int] = {}  # by card: the stream of the last node that is not AccumulateGrad
        self._first_nodes: dict[int, list[int]] = {}  # by card: from this node of autograd on ...
        self._streams_of_nodes: dict[int, list[int]] = {}  # ... it was this stream
        self._AnyStream = StandIn("Stream", (FakeStream,), {"streams": self, "original": torch.Stream})
        self.Stream: type[FakeStream] = StandIn("Stream", (self._AnyStream,), {"original": torch.cuda.streams.Stream})

    def at_work(self, operator: str = "", num_bytes: int = 0) -> int:
        """The current card's stream on which ``operator`` takes memory at the moment, for a result of ``num_bytes``."""
        if self.captured_in is not None:
            return -self.captured_in  # as the allocator's replay has it
        card, graph_task = self._gpu.current, torch._C._current_graph_task_id()
        if card in self._first_nodes and graph_task not in (-1, self._selected_in):
            node = torch._C._current_autograd_node()
            if node is not None:
                is_sum = operator == "aten::add.Tensor"
                if is_sum:
                    return self._of_consumer(card, node, num_bytes)
                return self._of_running(card, number_when_made(node))
        return self._current.get(card, 0)

    def _of_running(self, card: int, number: int) -> int:
        """The stream of the node that runs; AccumulateGrad's is that of what gave it the gradient, in whose forward it
        was made (``grad_accumulator`` in torch/csrc/autograd/variable.cpp).
        """
        if number < NO_SEQUENCE:
            self._gave_gradient[card] = self._of_node(card, number)
        return self._gave_gradient.get(card, 0)

    def _of_consumer(self, card: int, node: Any, num_bytes: int) -> int:
        """The stream of a next node that takes ``num_bytes``; a side stream if any of them has one
        (``InputBuffer::accumulate``)."""
        following = [(after, number) for after, number in node.next_functions if after is not None]
        streams = [self._of_node(card, number_when_made(after)) for after, number in following]
        takes = [_num_bytes(after._input_metadata[number]) == num_bytes for after, number in following]
        return next((stream for stream, is_taken in zip(streams, takes, strict=True) if stream and is_taken), 0)

    def _of_node(self, card: int, number: int) -> int:
        if number >= NO_SEQUENCE:
            return 0  # AccumulateGrad: that of the parameter, made on the default stream
        position = bisect_right(self._first_nodes[card], number)
        return self._streams_of_nodes[card][position - 1] if position else 0

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

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block memory is taken from a private pool that nothing else uses."""
        before, self.captured_in = self.captured_in, next(self._alone)
        try:
            yield
        finally:
            self.captured_in = before

    def select(self, stream: FakeStream) -> Selection:
        """Make a stream and its card current; returns the previous selection."""
        card = stream.device_index
        before = Selection(self._gpu.current, card, self._current.get(card, 0), self._selected_in)
        self._selected_in = torch._C._current_graph_task_id()
        self._set(card, stream.stream_id)
        self._gpu.set_current(card)
        return before

    def restore(self, before: Selection) -> None:
        """Undo ``select``, which returned ``before``."""
        self._selected_in = before.graph_task
        self._set(before.card, before.stream)
        self._gpu.set_current(before.current_card)

    def _set(self, card: int, number: int) -> None:
        if number != self._current.get(card, 0):
            self._current[card] = number
            self._first_nodes.setdefault(card, []).append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            self._streams_of_nodes.setdefault(card, []).append(number)

    def current(self, device: Any = None) -> FakeStream:
        """The current stream of a card."""
        card = self.card_named(device)
        return self.Stream(card, stream_id=self._current.get(card, 0))

    def stand_ins(self) -> dict[type, Callable[[Any], Any]]:
        """What stands for streams and events of any accelerator that exist before the run: their classes are C's, whose
        methods cannot be replaced."""
        return {
            torch.Stream: lambda one: self._AnyStream(one.device_index, stream_id=one.stream_id),
            torch.Event: lambda one: _Event(),
        }

    def of_accelerators(self) -> dict[str, Any]:
        """Replacements for attributes of ``torch``."""
        return {"Stream": self._AnyStream, "Event": _Event}

    def of_users(self) -> list[tuple[Any, dict[str, Any]]]:
        """Replacements for methods of streams and events that exist before the run."""
        entered: list[Selection] = []

        def enter(stream: Any) -> Any:
            entered.append(self.select(stream))
            return stream

        def leave(stream: Any, *exception: object) -> None:
            self.restore(entered.pop())

        own = {name: value for name, value in vars(FakeStream).items() if name in _OF_STREAMS}
        events = {name: value for name, value in vars(_Event).items() if name in _OF_EVENTS}
        streams = {**own, "__enter__": enter, "__exit__": leave}
        return [(torch.cuda.streams.Stream, streams), (torch.cuda.streams.Event, events)]

    def answers(self) -> dict[str, Any]:
        """Replacements for attributes of ``torch.cuda``."""

        def set_stream(stream: FakeStream | None) -> None:
            if stream is not None:
                self.select(stream)

        def set_by_number(stream_id: int, device_index: int, device_type: int) -> None:
            self.select(self.Stream(device_index, stream_id=stream_id))

        def external(pointer: int, device: Any = None) -> FakeStream:
            return self.Stream(device, stream_id=_EXTERNAL + pointer)

        return {
            "Stream": self.Stream,
            "Event": FakeEvent,
            "ExternalStream": external,
            "get_stream_from_external": external,
            "StreamContext": _StreamContext,
            "stream": _StreamContext,
            "set_stream": set_stream,
            "_set_stream_by_id": set_by_number,
            "current_stream": self.current,
            "default_stream": lambda device=None: self.Stream(device, stream_id=0),
        }


def _num_bytes(metadata: Any) -> int:
    """The bytes of the gradient that a node of autograd receives."""
    return math.prod(metadata.shape) * int(metadata.dtype.itemsize)


class Threads:
    """The cuBLAS handles of threads, numbered in the order of creation on each card."""

    def __init__(self) -> None:
        self._running = _MAIN
        self._num_started = 0
        self._handles: dict[tuple[str, int], int] = {}  # by thread and card
        self._unused: dict[int, list[int]] = defaultdict(list)  # by card, the one returned last at the end
        self._num_made: dict[int, int] = defaultdict(int)

    @contextmanager
    def started(self) -> Iterator[None]:
        """Code in the block runs as if in a new thread."""
        before, self._running = self._running, f"worker {self._num_started}"
        self._num_started += 1
        try:
            yield
        finally:
            for thread, card in [key for key in self._handles if key[0] == self._running]:
                self._unused[card].append(self._handles.pop((thread, card)))
            self._running = before

    def handle(self, card: int) -> int:
        """The handle on ``card`` of the thread that would run on a real GPU."""
        is_outside = torch._C._current_graph_task_id() == -1 or _is_compiled_backward()
        thread = self._running if is_outside else _AUTOGRAD
        handle = self._handles.get((thread, card))
        if handle is None:
            handle = self._handles[thread, card] = self._unused[card].pop() if self._unused[card] else self._make(card)
        return handle

    def _make(self, card: int) -> int:
        self._num_made[card] += 1
        return self._num_made[card]


def _is_compiled_backward() -> bool:
    """Whether compiled autograd runs a backward: on the thread that asked for it (autograd/engine.cpp, execute)."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and compiled.in_compiled_autograd_region
