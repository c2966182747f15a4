"""Which thread of the process would be running, and the library handles that threads hold on each card.

A dry run has one thread. On CUDA autograd has one for each card, and ``nn.DataParallel`` starts one for each replica
and call. Each takes a handle of cuBLAS from its card's pool when it first needs one, and a thread that ends gives its
handles back for the next (aten/src/ATen/cuda/detail/DeviceThreadHandles.h, ``DeviceThreadHandlePool``). Workspaces
belong to handles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MAIN = "main"
_AUTOGRAD = "autograd"


class Threads:
    """The threads' handles, numbered as they are made on each card."""

    def __init__(self) -> None:
        self._running = _MAIN
        self._num_started = 0
        self._held: dict[tuple[str, int], int] = {}  # by thread and card
        self._unused: dict[int, list[int]] = defaultdict(list)  # by card, the last given back at the end
        self._num_made: dict[int, int] = defaultdict(int)

    @contextmanager
    def started(self) -> Iterator[None]:
        """What runs inside would run in a new thread."""
        before, self._running = self._running, f"worker {self._num_started}"
        self._num_started += 1
        try:
            yield
        finally:
            for thread, card in [key for key in self._held if key[0] == self._running]:
                self._unused[card].append(self._held.pop((thread, card)))
            self._running = before

    def handle(self, card: int) -> int:
        """The handle on ``card`` of the thread that would be running."""
        thread = self._running if torch._C._current_graph_task_id() == -1 else _AUTOGRAD
        held = self._held.get((thread, card))
        if held is None:
            held = self._held[thread, card] = self._unused[card].pop() if self._unused[card] else self._make(card)
        return held

    def _make(self, card: int) -> int:
        self._num_made[card] += 1
        return self._num_made[card]
