"""CUDA graphs of compiled code (``mode="reduce-overhead"``): what warms up, is recorded and replayed, and their pool.

The rules are those of torch/_inductor/cudagraph_trees.py (``CUDAGraphTreeManager``). A function's first call warms it
up and its second is recorded, both with memory of a private pool that all graphs share, and that stays reserved.
What is recorded copies its inputs into the pool, apart from those that stay in their place (weights) or that another
graph left there. A replay takes no memory, and its results, gradients among them, are places in the pool that
``memory_allocated`` does not count. Not followed: weights that change their place, which real code records anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch._dynamo.mutation_guard import GenerationTracker
from torch._inductor import cudagraph_trees

from oom_magic.memory.timeline import Phase
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import META, Place, Storage
from oom_magic.predict.isolation.patching import Patches

Position = tuple[int, int]  # of a result on a path: the depth of its node, and which of its results


class _State(Enum):
    NONE = auto()
    WARMUP = auto()
    RECORDING = auto()
    EXECUTION = auto()


@dataclass(frozen=True, eq=False)
class _Function:
    """A compiled graph; ``static`` are the positions of inputs that stay where they are."""

    model: Callable[[list[Any]], Any]
    static: frozenset[int]
    changed: frozenset[int]
    is_forward: bool
    is_backward: bool
    lines: Sequence[str | None] | None  # of the user's code, for each result


class _Result(NamedTuple):
    """A recorded result: a view of its own memory, or of that of the result at ``memory``."""

    memory: Position
    num_bytes: int
    dtype: torch.dtype
    view: tuple[int, torch.Size, tuple[int, ...]]  # offset, size, stride


@dataclass(eq=False)
class _Node:
    """A call of a function, after those that ``parent`` stands for."""

    function: _Function
    parent: _Node | None
    live: list[Storage | None] = field(default_factory=list)  # its results' memory, as long as that is referred to
    results: list[Any] = field(default_factory=list)
    dead_before: list[Position] = field(default_factory=list)
    from_path: dict[int, Position] = field(default_factory=dict)  # inputs that graphs before it left
    children: list[_Node] = field(default_factory=list)

    def path(self) -> list[_Node]:
        """The nodes from the first to this one."""
        return [*(self.parent.path() if self.parent else ()), self]

    def storages(self) -> Iterator[tuple[Position, Storage]]:
        """The memory of the path's results that is still referred to."""
        for depth, node in enumerate(self.path()):
            for number, storage in enumerate(node.live):
                if storage is not None and storage() is not None:
                    yield (depth, number), storage


class GraphTrees:
    """The CUDA graphs of one dry run."""

    _overwritten = staticmethod(cudagraph_trees.CUDAGraphTreeManager.format_dealloc_msg)

    def __init__(self, gpu: FakeGPU) -> None:
        self._gpu = gpu
        self._pool: Any = None
        self._stream: Any = None
        self._state = _State.NONE
        self._node: _Node | None = None  # the call before
        self._roots: list[_Node] = []
        self._warm: set[_Function] = set()
        self._generation = -1
        self._awaits_backward = False

    def patches(self) -> Patches:
        """What is replaced while compiled code is followed."""
        return [
            (cudagraph_trees, {"cudagraphify_impl": self._follow, "get_manager": self._manager}),
            (cudagraph_trees.MarkStepBox, {"mark_step_counter": 0}),  # of this run
        ]

    def _manager(self, device_index: int, create_if_none_exists: bool = True) -> GraphTrees | None:
        """``get_manager``: there is one once something is made a graph of."""
        return self if create_if_none_exists or self._pool is not None else None

    def set_to_running_backward(self) -> None:
        """A backward begins that is no graph itself."""
        self._awaits_backward = False

    def _follow(
        self, model: Any, inputs: Sequence[Any], static_input_idxs: Sequence[int], *, is_backward: bool,
        is_inference: bool, mutated_input_idxs: Sequence[int], stack_traces: Any, **_: Any,
    ) -> Callable[[list[Any]], Any]:  # fmt: skip
        """``cudagraphify_impl``: a graph for each combination of whole numbers among the inputs."""
        functions: dict[tuple[int, ...], _Function] = {}
        static, changed = frozenset(static_input_idxs), frozenset(mutated_input_idxs)

        def run(inputs: list[Any]) -> Any:
            key = tuple(one for one in inputs if isinstance(one, int))
            if key not in functions:
                is_forward = not (is_backward or is_inference)
                functions[key] = _Function(model, static, changed, is_forward, is_backward, stack_traces)
            return self._run(functions[key], inputs)

        return run

    def _run(self, function: _Function, inputs: list[Any]) -> Any:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()
            with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=self._pool, stream=self._stream):
                pass  # which keeps the pool alive
        if self._state in (_State.RECORDING, _State.WARMUP):
            self._end(frees=True)
        if any(i not in function.static and self._position(inputs[i]) is None for i in function.changed):
            return function.model(inputs)
        if function not in self._warm or self._state is _State.WARMUP:
            out = self._warmed_up(function, inputs)
        else:
            out = self._replayed_or_recorded(function, inputs)
        self._generation = _generation()
        if function.is_forward or function.is_backward:
            self._awaits_backward = function.is_forward
        return out

    def _end(self, frees: bool) -> None:
        """End the path if nothing refers to its results, or if a new step has begun: then their memory is free."""
        assert self._node is not None
        is_new = self._generation != _generation()
        path, live = self._node.path(), list(self._node.storages())
        if is_new and (cudagraph_trees.MarkStepBox.mark_step_counter or not self._awaits_backward):
            for (depth, number), storage in live if frees else ():
                function = path[depth].function
                line = function.lines[number] if function.lines else None
                self._gpu.overwrite(storage, self._overwritten(line, is_grad_output=function.is_backward))
        elif live:
            return
        self._node, self._state = None, _State.NONE

    def _warmed_up(self, function: _Function, inputs: list[Any]) -> Any:
        self._reflect_in_pool()
        given = [*filter(None, map(self._storage, inputs))]
        self._warm.add(function)
        with self._without_workspaces(), self._in_pool():
            out = function.model(inputs)
        live = [storage if _place(storage, given) is None else None for storage in map(self._storage, out)]
        self._node, self._state = _Node(function, self._node, live), _State.WARMUP
        return out

    def _replayed_or_recorded(self, function: _Function, inputs: list[Any]) -> Any:
        if self._state is not _State.RECORDING:
            for _attempt in range(2):  # as the next of the path, or as the first of a new one
                for node in self._node.children if self._node else self._roots:
                    if node.function is function and self._is_as_recorded(node, inputs):
                        return self._replayed(node, inputs)
                if self._node is None or all(root.function is not function for root in self._roots):
                    break
                self._end(frees=False)
            if self._node is not None:
                self._end(frees=False)
            self._reflect_in_pool()
        return self._recorded(function, inputs)

    def _is_as_recorded(self, node: _Node, inputs: list[Any]) -> bool:
        same = all(self._position(inputs[i]) == position for i, position in node.from_path.items())
        return same and self._alive().isdisjoint(node.dead_before)

    def _recorded(self, function: _Function, inputs: list[Any]) -> Any:
        node = _Node(function, self._node)
        alive = self._alive()
        for depth, before in enumerate(self._node.path() if self._node else ()):
            numbers = (number for number, storage in enumerate(before.live) if storage is not None)
            node.dead_before += [(depth, number) for number in numbers if (depth, number) not in alive]
        found = {i: self._position(one) for i, one in enumerate(inputs)}
        node.from_path = {i: position for i, position in found.items() if position is not None}
        with self._in_pool():
            kept = [self._placed(one, i in function.static or i in node.from_path) for i, one in enumerate(inputs)]
        inputs.clear()
        stays = [self._storage(kept[i]) for i in function.static - node.from_path.keys()]
        with (
            self._without_workspaces(),
            torch.cuda.graph(torch.cuda.CUDAGraph(), pool=self._pool, stream=self._stream),
        ):
            out = function.model(kept)
        self._note_results(node, out, stays)
        (self._node.children if self._node else self._roots).append(node)
        self._node, self._state = node, _State.RECORDING
        return out

    def _placed(self, one: Any, stays: bool) -> Any:
        """An input where a graph reads it: most are copied into the pool."""
        if stays or not isinstance(one, torch.Tensor) or not self._gpu.is_on_gpu(one):
            return one
        with torch._C._DisableTorchDispatch():
            made = torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device=META)
        self._gpu.adopt(made, Place.GPU, "cuda_graph")
        return made

    def _note_results(self, node: _Node, out: Sequence[Any], stays: list[Storage | None]) -> None:
        """Note what a replay returns: numbers, inputs that stay in their place, and views of memory of the pool."""
        depth = len(node.path()) - 1
        for number, one in enumerate(out):
            storage = self._storage(one)
            if storage is None or _place(storage, stays) is not None:
                node.results.append(one)
                node.live.append(None)
                continue
            first = _place(storage, node.live)
            memory = self._position(one) or (depth, number if first is None else first)
            view = (one.storage_offset(), one.size(), one.stride())
            node.results.append(_Result(memory, storage.num_bytes, one.dtype, view))
            node.live.append(storage)

    def _replayed(self, node: _Node, inputs: list[Any]) -> list[Any]:
        path = node.path()
        node.live = []
        out = []
        for number, result in enumerate(node.results):
            if not isinstance(result, _Result):
                out.append(result)
                node.live.append(None)
                continue
            depth, first = result.memory
            known = path[depth].live[first] if (depth, first) != (len(path) - 1, number) else None
            with torch._C._DisableTorchDispatch():
                memory: Any = None if known is None else known()
                if memory is None:
                    memory = torch.empty(result.num_bytes, dtype=torch.uint8, device=META).untyped_storage()
                made = torch.empty(0, dtype=result.dtype, device=META).set_(memory, *result.view)
            out.append(self._gpu.without_memory(made, Place.GPU))
            node.live.append(self._gpu.storage_of(made))
        inputs.clear()
        self._node, self._state = node, _State.EXECUTION
        return out

    def _reflect_in_pool(self) -> None:
        """Before more is recorded the allocator learns what results of replays lie in the pool."""
        if self._state is _State.EXECUTION and self._node is not None:
            with self._in_pool():
                for storage in [one for _position, one in self._node.storages() if one.allocation < 0]:
                    storage.allocation = self._gpu.take(storage.num_bytes, "cuda_graph", Phase.OTHER)

    def _alive(self) -> set[Position]:
        return {position for position, _storage in self._node.storages()} if self._node else set()

    def _position(self, one: Any) -> Position | None:
        """Where on the path a tensor was left."""
        wanted = self._storage(one)
        if self._node is None or wanted is None:
            return None
        return next((position for position, storage in self._node.storages() if storage is wanted), None)

    def _storage(self, one: Any) -> Storage | None:
        return self._gpu.storage_of(one) if isinstance(one, torch.Tensor) else None

    @contextmanager
    def _in_pool(self) -> Iterator[None]:
        """Memory is taken from the pool inside the block (``_use_cuda_memory_pool_manager``)."""
        self._gpu.streams.captured_in = self._pool[1]
        try:
            yield
        finally:
            self._gpu.streams.captured_in = None

    @contextmanager
    def _without_workspaces(self) -> Iterator[None]:
        """Those of cuBLAS are given back before and after (``clear_cublas_manager``)."""
        self._gpu.clear_workspaces()
        try:
            yield
        finally:
            self._gpu.clear_workspaces()


def _generation() -> int:
    """The number of the step: the user's, or that of the call of compiled code (``get_curr_generation``)."""
    return cudagraph_trees.MarkStepBox.mark_step_counter or GenerationTracker.generation


def _place(storage: Storage | None, among: Sequence[Storage | None]) -> int | None:
    """Where in a list a storage is; weak references that are equal can be of different storages."""
    return next((i for i, one in enumerate(among) if one is storage), None) if storage is not None else None
