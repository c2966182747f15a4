"""The order in which a backward runs nodes that another backward created (``create_graph``).

The engine runs the node created last first, by a number that each thread counts for itself (ATen/SequenceNumber.cpp).
On CUDA a backward runs in a thread of its own, so what it makes has low numbers; here it runs in the user's thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any

import torch

Node = Any  # torch.autograd.graph.Node, with its private methods
_FIRST = 1 << 40  # above what this thread counts, below AccumulateGrad's
NO_SEQUENCE = 1 << 63  # AccumulateGrad's is UINT64_MAX
_NUMBER = "oom_magic_sequence_nr"


class AutogradOrder:
    """Gives nodes the sequence numbers that they have where CUDA's autograd thread counts for itself, in one dry run.

    Only once a backward created nodes that may run: until then this thread's own numbers have the same order.
    """

    def __init__(self) -> None:
        self._begins_at = _next_number()
        self._begun, self._ended = [self._begins_at], [self._begins_at]  # the backwards that made nodes, by number
        self._made_before = [0]  # nodes made in backwards before each of them
        self._creates_graphs = False

    def around(self, run_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``torch.autograd._engine_run_backward``, which renumbers the nodes that it will run."""

        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:  # inside another, in its thread
                return self._run_inside(run_backward, outputs, *args, **kwargs)
            if self._creates_graphs:
                self._renumber(outputs)
            self._begin(_next_number() + (len(outputs) > 1))  # several have a common root, made by the caller's thread
            try:
                return run_backward(outputs, *args, **kwargs)
            finally:
                self._end(_next_number())
                self._creates_graphs |= len(args) > 2 and bool(args[2])  # create_graph

        return run

    def _run_inside(self, run_backward: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """A checkpoint's backward runs what it made again, and of what was made before a weight that autocast cast."""
        began = self._begun[-1]
        if all(node._sequence_nr() >= began for node in _reachable(outputs, self._has_own_number)):
            return run_backward(outputs, *args, **kwargs)
        renumbered = self._renumber(outputs)
        try:
            return run_backward(outputs, *args, **kwargs)
        finally:  # the backward outside may have to run some of them
            for node in renumbered:
                node._set_sequence_nr(node.metadata.pop(_NUMBER))

    def _begin(self, number: int) -> None:
        self._made_before.append(self._num_made(-1))
        self._begun.append(number)
        self._ended.append(_FIRST)

    def _end(self, number: int) -> None:
        if number > self._begun[-1]:
            self._ended[-1] = number
        else:
            del self._made_before[-1], self._begun[-1], self._ended[-1]

    def _has_own_number(self, node: Node) -> bool:
        return self._begins_at <= node._sequence_nr() < _FIRST

    def _num_made(self, position: int) -> int:
        """The number of nodes made in backwards after the one at ``position``."""
        return self._made_before[position] + self._ended[position] - self._begun[position]

    def _renumber(self, outputs: Iterable[Any]) -> list[Node]:
        """The nodes that were given their numbers: those that will run, where PyTorch lets them be numbered."""
        found = [node for node in _reachable(outputs, self._has_own_number) if hasattr(node, "_set_sequence_nr")]
        for node in found:
            number = node._sequence_nr()
            node.metadata[_NUMBER] = number
            node._set_sequence_nr(_FIRST + self._counted(number))
        return found

    def _counted(self, number: int) -> int:
        """The sequence number that the node's own thread would have given it."""
        position = bisect_right(self._begun, number) - 1
        if number < self._ended[position]:
            return self._made_before[position] + number - self._begun[position]
        return number - self._begins_at - self._num_made(position)


def number_when_made(node: Node) -> int:
    """The node's sequence number in the order of creation in this process."""
    number: int = node._sequence_nr()
    return node.metadata.get(_NUMBER, number) if _FIRST <= number < NO_SEQUENCE else number


def _next_number() -> int:
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def _reachable(tensors: Iterable[Any], is_wanted: Callable[[Node], bool]) -> list[Node]:
    """The nodes that can be reached from the tensors through wanted nodes, each once."""
    found: dict[Node, None] = {}
    nodes = [getattr(tensor, "grad_fn", getattr(tensor, "node", None)) for tensor in tensors]  # or GradientEdges
    waiting = [node for node in nodes if node is not None and is_wanted(node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += [one for one, _ in node.next_functions if one is not None and is_wanted(one)]
    return list(found)
