"""How many samples a model's inputs have, and how long they are: along which dimensions, as their shapes show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oom_magic.explain.remedies.sizes.pictures import side_of

if TYPE_CHECKING:
    from oom_magic.predict.what_if.change import Inputs


def has_rows(number: int, inputs: Inputs) -> bool:
    """Whether a model was called with a batch of so many."""
    return sizes_of_inputs(inputs).get("batch") == number


def sizes_of_inputs(inputs: Inputs) -> dict[str, int]:
    """Batch and length of what a model was called with: token ids, or hidden states of three dimensions; the side of
    square pictures.

    Empty where inputs of several dimensions have no first one in common, as nodes and edges of a graph.
    """
    if _are_columns(inputs):
        return {"batch": inputs[0][0][1], "seq": max(shape[0] for shape, _ in inputs)}
    inputs = tuple(one for one in inputs if not _is_state_beside(one, inputs))
    firsts = [shape[0] for shape, _ in inputs if len(shape) > 1 and shape[0] > 1]
    if len(set(firsts)) == len(firsts) > 1:
        return {}
    for shape, is_integer in inputs:
        if len(shape) == (2 if is_integer else 3):
            return {"batch": shape[0], "seq": shape[1]}
        if (side := side_of(shape, is_integer)) is not None:
            return {"batch": inputs[0][0][0], "side": side}
    return {"batch": inputs[0][0][0]} if inputs and inputs[0][0] else {}


def _is_state_beside(one: tuple[tuple[int, ...], bool], inputs: Inputs) -> bool:
    """Whether an input is the state (layers, batch, width) of a recurrent layer beside samples (batch, length)."""
    shape, is_integer = one
    samples = {other[0] for other, _ in inputs if len(other) > 1 and other != shape}
    return len(shape) == 3 and not is_integer and shape[0] not in samples and shape[1] in samples


def dimensions_of(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    """Along which dimensions of its inputs a model has samples, of a training and of an evaluation, lengths, and
    sides."""
    batch = int(_are_columns(inputs))
    return {"batch": (batch,), "evaluation": (batch,), "seq": (1 - batch,), "side": (2, 3)}


def _are_columns(inputs: Inputs) -> bool:
    """Whether samples are columns, as of recurrent layers: (length, batch) beside a state (layers, batch, width)."""
    several = [shape for shape, _ in inputs if len(shape) > 1]
    has_state = any(len(shape) == 3 and not is_integer for shape, is_integer in inputs)
    seconds, firsts = {shape[1] for shape in several}, {shape[0] for shape in several}
    return has_state and len(several) == len(inputs) and len(seconds) == 1 < len(firsts)
