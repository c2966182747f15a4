"""Finding the requested tensor by the shapes in failing frames: outputs of the failing call whose sizes agree."""

from __future__ import annotations

from collections.abc import Iterator

from oom_magic.explain.evidence.tensors import TensorCandidate, requested_window
from oom_magic.explain.live.frames import LiveCall, LiveFailure, LiveTensor
from oom_magic.explain.messages.failure import Failure
from oom_magic.predict.shape_inference import Output, TensorShape
from oom_magic.units import MIB, format_bytes

# For a small tensor the driver is asked for a whole segment, of which the tensor is a part.
_POOLS = {2 * MIB: (1, MIB), 20 * MIB: (MIB + 1, 10 * MIB)}
_SMALLEST_VOCABULARY = 16_000
_LARGEST_HEAD = 512
_COMPILED = "empty_strided"  # compiled code takes memory before it is written
_COPIES = ("_to_copy", "clone", "contiguous", "copy_", "to")
_WITH_RELATIVES = ("backward", "optimizer_step")
_LOSSES = ("_log_softmax", "nll_loss_forward", "nll_loss2d_forward", "cross_entropy_loss")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_unsafe_view")
_SOFTMAX = ("_softmax", "_safe_softmax", "softmax")
_POINTWISE = (
    *_SOFTMAX,
    "div",
    "mul",
    "add",
    "masked_fill",
    "where",
    "native_dropout",
    "dropout",
)
_KINDS = {"cat": "concatenation", "stack": "concatenation", "embedding": "embeddings"}
_OTHER_TYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


def live_candidates(
    live: LiveFailure,
    failure: Failure,
    phase: str | None = None,
    exact_bytes: int | None = None,
    operator: str = "",
) -> tuple[TensorCandidate, ...]:
    """The visible tensors whose size matches the failed request, the call's own results first.

    ``exact_bytes`` is the tensor's size and ``operator`` what made it, where a report knows them; else the size
    follows from the message.
    """
    window = (exact_bytes, exact_bytes) if exact_bytes else _window(failure)
    if window is None:
        return ()
    found = list(_results(live, window, phase))
    is_copy = not operator or operator in _COPIES
    if not found and failure.requested_bytes not in _POOLS and (is_copy or phase in _WITH_RELATIVES):
        found = list(_relatives(live, window, phase))
    return tuple({one.formula: one for one in reversed(found)}.values())[::-1][:3]


def formula_over_vocabulary(live: LiveFailure, num_bytes: int) -> str:
    """Shape and size of a tensor of so many bytes with a value for each word of a vocabulary; "" if none is known.

    Its shape is that of logits which a frame holds, else its rows follow from the width of the model's largest layer.
    """
    for tensor in live.tensors:
        for other in _in_other_types(tensor.shape):
            if other.num_bytes == num_bytes and _is_vocabulary(other):
                return _formula(other)
    for one in live.parameters:
        words = one.shape.shape[0] if len(one.shape.shape) == 2 else 0
        rows, rest = divmod(num_bytes, 4 * words) if words >= _SMALLEST_VOCABULARY else (0, 0)
        if rows and not rest:
            return _formula(TensorShape((rows, words), "float32", num_bytes))
    return ""


def _window(failure: Failure) -> tuple[int, int] | None:
    return _POOLS.get(failure.requested_bytes or 0) or requested_window(failure)


def _results(live: LiveFailure, window: tuple[int, int], phase: str | None) -> Iterator[TensorCandidate]:
    """Outputs of the failing calls whose size agrees, the last one first. Autocast may have halved it."""
    seen: set[tuple[str, int]] = set()
    for fit, types in ((1.0, _as_it_is), (0.95, _in_other_types)):
        for call in live.calls:
            for made in reversed(call.made):
                fitting = (one for one in types(made.tensor) if window[0] <= one.num_bytes <= window[1])
                tensor = next(fitting, None)
                if tensor is None:
                    continue
                kind = _kind(made, call, live.tensors)
                kind = "parameter" if (kind, phase) == ("copy", "loading") else kind
                if (kind, tensor.num_bytes) not in seen:  # scores before the softmax are as large as those after it
                    yield _candidate(kind, tensor, fit, call.expression)
                    if fit < 1:
                        return
                seen.add((kind, tensor.num_bytes))


def _as_it_is(shape: TensorShape) -> tuple[TensorShape, ...]:
    return (shape,)


def _relatives(live: LiveFailure, window: tuple[int, int], phase: str | None) -> Iterator[TensorCandidate]:
    """In the backward and the optimizer: gradients and states of parameters; else copies of visible tensors."""
    expression = live.calls[0].expression if live.calls else live.code
    if phase in _WITH_RELATIVES:
        kind, tensors = ("gradient" if phase == "backward" else "optimizer_state"), live.parameters
    else:
        kind, tensors = "copy", live.tensors
    for tensor in sorted(tensors, key=lambda one: -one.shape.num_bytes):
        for other in _in_other_types(tensor.shape):
            if window[0] <= other.num_bytes <= window[1]:
                named = "logits" if kind == "copy" and _is_vocabulary(other) else kind
                yield _candidate(named, other, 0.9, expression, tensor)
                break


def _in_other_types(shape: TensorShape) -> Iterator[TensorShape]:
    yield shape
    count = 1
    for size in shape.shape:
        count *= size
    for dtype, item_bytes in _OTHER_TYPES.items():
        if dtype != shape.dtype:
            yield TensorShape(shape.shape, dtype, count * item_bytes)


def _kind(made: Output, call: LiveCall, seen: tuple[LiveTensor, ...]) -> str:
    """The role that an operator's result has in a model; ``seen`` are the tensors of the frames around."""
    if call.is_in_optimizer:
        return "optimizer_state"
    operator = made.operator
    if operator in _LOSSES:
        return "probabilities"
    if call.is_in_cache and operator == "cat" and sum(one.shape.num_bytes > 0 for one in call.inputs) > 1:
        return "kv_cache"  # one that holds nothing yet does not grow: this forward's own keys and values
    if _is_vocabulary(made.tensor) and operator in (*_PRODUCTS, *_COPIES, *_POINTWISE, _COMPILED):
        return "logits"
    if _is_scores(made, call.inputs, seen):
        return "attention_scores"
    return "copy" if operator in _COPIES else _KINDS.get(operator, "result")


def _is_vocabulary(tensor: TensorShape) -> bool:
    return len(tensor.shape) >= 2 and tensor.shape[-1] >= _SMALLEST_VOCABULARY


def _is_scores(made: Output, inputs: tuple[LiveTensor, ...], seen: tuple[LiveTensor, ...]) -> bool:
    """Whether a result is square (query x key): a product over the head dimension, or an operation on scores."""
    shape = made.tensor.shape
    if len(shape) < 3 or shape[-1] <= 1 or shape[-2] <= 1:
        return False
    if made.operator in ("bmm", "matmul", "baddbmm"):
        heads = [one.shape.shape[-1] for one in inputs if len(one.shape.shape) >= 3]
        return bool(heads) and min(heads) <= _LARGEST_HEAD and shape[-1] != min(heads)
    is_of_scores = made.operator in _SOFTMAX or len(shape) == 4  # of three dimensions, a picture may be square, too
    if made.operator not in _POINTWISE or not is_of_scores or shape[-1] != shape[-2]:
        return False
    return any(shape[-1] in one.shape.shape[1:] and not _is_square(one.shape) for one in (*inputs, *seen))


def _is_square(tensor: TensorShape) -> bool:
    return tensor.shape[-1] == tensor.shape[-2] if len(tensor.shape) >= 2 else False


def _candidate(
    name: str, tensor: TensorShape, fit: float, expression: str, source: LiveTensor | None = None
) -> TensorCandidate:
    formula = _formula(tensor)
    if source is not None:
        formula = f"{source.name}: {formula}"
    return TensorCandidate(name, formula, tensor.num_bytes, fit, expression)


def _formula(tensor: TensorShape) -> str:
    sizes = " x ".join(map(str, tensor.shape)) or "1"
    return f"{sizes} x {tensor.dtype} = {format_bytes(tensor.num_bytes)}"
