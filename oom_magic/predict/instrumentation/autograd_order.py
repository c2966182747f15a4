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


class AutogradOrder:
    """Gives nodes made in a backward the sequence numbers of CUDA's autograd thread, within one dry run."""

    def __init__(self) -> None:
        self._begins_at = _next_number()
        self._num_made = 0  # nodes made in backwards
        # The count that the user's thread would have reached by itself, and how far this thread was ahead from there
        # on.
        self._counted, self._ahead = [0], [self._begins_at]

    def around(self, run_backward: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.autograd._engine_run_backward``; the nodes that it made are renumbered."""

        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:  # inside another, in its thread
                return run_backward(outputs, *args, **kwargs)
            before = _next_number()
            try:
                found = run_backward(outputs, *args, **kwargs)
            finally:
                num_made = _next_number() - before
            if num_made:
                self._note(before, num_made)
                if len(args) > 2 and args[2]:  # create_graph
                    self._renumber([*_nodes_of(found or ()), *_nodes_of(_gradients(outputs))], before, num_made)
                self._num_made += num_made
            return found

        return run

    def _note(self, before: int, num_made: int) -> None:
        self._counted.append(before - self._ahead[-1])
        self._ahead.append(self._ahead[-1] + num_made)

    def _renumber(self, roots: list[Node], before: int, num_made: int) -> None:
        for node in _reachable(roots, lambda node: before <= node._sequence_nr() < before + num_made):
            number = self._num_made + node._sequence_nr() - before
            set_number = getattr(node, "_set_sequence_nr", None)  # older versions of PyTorch have none
            if set_number is not None:
                set_number(number + self._ahead[bisect_right(self._counted, number) - 1])


def _next_number() -> int:
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def _nodes_of(tensors: Iterable[Any]) -> list[Node]:
    return [tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None]


def _gradients(outputs: Iterable[Any]) -> Iterable[torch.Tensor]:
    """The gradients of the leaves that ``outputs`` depend on."""
    for node in _reachable(_nodes_of(outputs), lambda node: True):
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf.grad is not None:
            yield leaf.grad


def _reachable(roots: list[Node], is_wanted: Callable[[Node], bool]) -> list[Node]:
    """The nodes that lead from ``roots`` on through others that are wanted, each once."""
    found: dict[Node, None] = {}
    waiting = [node for node in roots if is_wanted(node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += [one for one, _ in node.next_functions if one is not None and is_wanted(one)]
    return list(found)
