"""The parts of a model that activation checkpointing recomputes, each as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

_FEWEST_LAYERS = 4  # of a sequence that is worth parts


@dataclass(frozen=True)
class RecomputedParts:
    """Parts of a model, by path: all those in each of the ``lists``, single ``blocks``, and parts of sequences of
    layers: ``bounds`` tells where each part begins, and where the last ends."""

    lists: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    bounds: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.lists or self.blocks or self.bounds)

    def blocks_of(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """The blocks, those in lists first."""
        for path in self.lists:
            yield from model.get_submodule(path).children()
        yield from map(model.get_submodule, self.blocks)


def recomputed_parts(model: torch.nn.Module) -> RecomputedParts:
    """What to recompute: blocks that stand in lists, what has layers beside them, and parts of long sequences.

    A single part would be all of the model, whose recomputation saves nothing: then its own parts are taken.
    """
    lists = _lists_of_blocks(model)
    taken = {_joined(path, name) for path in lists for name, _ in model.get_submodule(path).named_children()}
    top = ""
    while True:
        blocks = list(_blocks_beside(model.get_submodule(top), top, taken))
        if taken or len(blocks) != 1:
            break
        top = blocks[0]
    if not taken and not blocks:
        blocks = [top]
    number = len(taken) + len(blocks)
    bounds = {path: _bounds(model.get_submodule(path), number) for path in blocks}
    whole = tuple(path for path in blocks if not bounds[path] and number > 1)
    return RecomputedParts(tuple(lists), whole, tuple((path, each) for path, each in bounds.items() if each))


def _lists_of_blocks(model: torch.nn.Module) -> list[str]:
    """The paths of the lists of blocks of one class, the longest of those that one is inside another, as they stand."""
    sizes: dict[str, tuple[int, int]] = {}
    for path, module in model.named_modules():
        blocks = list(module.children()) if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) else []
        if len(blocks) > 1 and len({type(block) for block in blocks}) == 1 and _is_block(blocks[0]):
            sizes[path] = len(blocks), sum(1 for block in blocks for _ in block.modules())
    chosen: list[str] = []
    for path in sorted(sizes, key=lambda one: sizes[one], reverse=True):
        if not any(_is_inside(path, other) or _is_inside(other, path) for other in chosen):
            chosen.append(path)
    return [path for path in sizes if path in chosen]


def _is_inside(path: str, other: str) -> bool:
    return not other or path.startswith(f"{other}.")


def _blocks_beside(module: torch.nn.Module, path: str, taken: set[str]) -> Iterator[str]:
    """The paths of the largest parts of a module that hold none of the blocks ``taken``, of several layers each; the
    result of a single operator would be kept all the same."""
    for name, part in module.named_children():
        inside = _joined(path, name)
        if inside in taken:
            continue
        is_list = not _is_called(part) or (isinstance(part, torch.nn.Sequential) and any(map(_has_parts, part)))
        if is_list or any(_is_inside(one, inside) for one in taken):
            yield from _blocks_beside(part, inside, taken)
        elif _has_parts(part):
            yield inside


def _bounds(sequence: torch.nn.Module, number: int) -> tuple[int, ...]:
    """Where the parts of a sequence begin, each with a layer that has a matrix of weights, and where the last ends;
    () of what is not long, beside ``number`` parts of the model.

    About as many as the root of the number of layers (Chen et al. 2016). A part that began with an activation in place
    would change what it is recomputed from.
    """
    layers = list(sequence.children()) if type(sequence) is torch.nn.Sequential else []
    if len(layers) < max(_FEWEST_LAYERS, 2 * number + 1):
        return ()
    starts = [at for at, layer in enumerate(layers) if any(weight.ndim > 1 for weight in layer.parameters(False))]
    parts = min(round(len(layers) ** 0.5), len(starts))
    evenly = [len(layers) * at / parts for at in range(1, parts)] if parts > 1 else []
    bounds = {0, *(min(starts, key=lambda start: abs(start - at)) for at in evenly)}
    return (*sorted(bounds), len(layers)) if len(bounds) > 1 else ()


def parts_of(sequence: torch.nn.Sequential, bounds: Sequence[int]) -> list[torch.nn.Module]:
    """The parts of a sequence of layers."""
    return [sequence[start:end] for start, end in pairwise(bounds)]


def _is_block(module: torch.nn.Module) -> bool:
    """Whether it may keep more than its inputs: PyTorch's layers without parts do not, but for recurrent ones."""
    is_layer = type(module).__module__.startswith("torch.nn.") and not isinstance(module, torch.nn.RNNBase)
    return _is_called(module) and (_has_parts(module) or not is_layer)


def _has_parts(module: torch.nn.Module) -> bool:
    return any(True for _ in module.children())


def _is_called(module: torch.nn.Module) -> bool:
    """Whether it can be called, as a list cannot."""
    return type(module).forward is not torch.nn.Module.forward


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
