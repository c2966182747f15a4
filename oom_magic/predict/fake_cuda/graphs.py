"""CUDA graphs captured by hand: a capture allocates from a private pool, which the graph keeps.

Sources: aten/src/ATen/cuda/CUDAGraph.cpp (``capture_begin``), CUDAGeneratorImpl.cpp (``register_graph``) and
c10/cuda/CUDACachingAllocator.cpp (``beginAllocateToPool``).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.cuda.graphs

from oom_magic.memory.timeline import Phase
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.isolation.patching import Patches, StandIn
from oom_magic.predict.operators.calls import TORCH

_SEED_BYTES = 8  # of the generator's seed, and of its offset


class _FakeGraph:
    """Replaces ``torch.cuda.CUDAGraph``; a replay allocates nothing."""

    captures: Captures

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: tuple[int, int] | None = None

    def capture_begin(self, pool: tuple[int, int] | None = None, **_: Any) -> None:
        """Allocate from ``pool`` from now on (default: a new one of this graph)."""
        self._pool = pool or self.captures.new_pool()
        self.captures.begin(self._pool)

    def capture_end(self) -> None:
        """Allocate from the usual pools again; the graph's pool keeps its memory."""
        self.captures.end()

    def pool(self) -> tuple[int, int] | None:
        """The pool that the graph was captured in, to share with others."""
        return self._pool

    def replay(self, *_unused: Any) -> None:
        """Does nothing: a replay writes into existing memory."""

    instantiate = reset = enable_debug_mode = replay

    def debug_dump(self, path: str) -> None:
        """Nothing is written."""


class Captures:
    """The graphs of one dry run."""

    def __init__(self, gpu: FakeGPU) -> None:
        self._gpu = gpu
        self._numbers = count(1)

    def new_pool(self) -> tuple[int, int]:
        """A handle, as ``graph_pool_handle`` returns it."""
        return (0, next(self._numbers))

    def begin(self, pool: tuple[int, int]) -> None:
        """A capture begins. The state of its random numbers is on the GPU: with PyTorch 2.11 on the stream that is
        captured, with 2.13 on the default stream (both observed)."""
        streams = self._gpu.streams
        before = streams.select(streams.Stream(stream_id=0)) if TORCH >= (2, 12) else None
        for _ in ("seed", "offset"):
            self._gpu.take(_SEED_BYTES, "cuda_graph", Phase.OTHER)
        if before is not None:
            streams.restore(before)
        streams.captured_in = pool[1]

    def end(self) -> None:
        """The capture ends."""
        self._gpu.streams.captured_in = None

    def of_users(self, graph: Callable[[], _FakeGraph]) -> dict[str, Any]:
        """Replacements for methods of graphs that were captured before the run: each calls a ``graph`` of the run's."""
        made: dict[int, _FakeGraph] = {}

        def standing(name: str) -> Callable[..., Any]:
            return lambda one, *args, **kwargs: getattr(made.setdefault(id(one), graph()), name)(*args, **kwargs)

        return {name: standing(name) for name in vars(_FakeGraph) if not name.startswith("_") and name != "captures"}


def graphs_followed(gpu: FakeGPU) -> Patches:
    """``torch.cuda.graph`` and ``make_graphed_callables`` capture on the pretend GPU."""
    captures = Captures(gpu)
    original = torch.cuda.graphs.CUDAGraph
    graph = StandIn("CUDAGraph", (_FakeGraph,), {"captures": captures, "original": original})
    answers = {
        "CUDAGraph": graph,
        "graph_pool_handle": captures.new_pool,
        "is_current_stream_capturing": lambda: gpu.streams.captured_in is not None,
    }
    return [
        (original, captures.of_users(graph)),
        (torch.cuda, answers),
        (torch.cuda.graphs, answers),
        (torch.cuda.graphs.graph, {"default_capture_stream": None}),
        (torch._C, {"_host_emptyCache": lambda: None}),
    ]
