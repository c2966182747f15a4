"""Causes by the shape that a message itself prints, as TensorFlow's does."""

from __future__ import annotations

import re
from collections.abc import Iterator

from oom_magic.explain.evidence.causes import Cause, Evidence, Support
from oom_magic.explain.evidence.tensors import run_in_text

_IMAGE_NODE = re.compile(r"(?:node|Node:)[^\n]{0,200}?(?:[Cc]onv|[Bb]atch_?[Nn]orm|[Pp]ool|[Rr]elu|ImagePatches|bn/)")
# Names below an optimizer's gradients/ belong to the backward pass.
_MOMENT_NODE = re.compile(
    r"[Nn]ode:? ?[^\s=]{0,60}/(?:Adam\w*|RMSprop|RMSProp|Momentum|Adagrad|Ftrl)(?:/(?!gradients)|(?![\w/]))"
)
_VARIABLE = re.compile(
    r"failed at (?:\w*assign_op|resource_variable_ops)|[Nn]ode:? ?[^\s=]{0,80}/(?:Assign|Initializer/)"
)
_OF_TOKENS = re.compile(r"atten|transformer|bert|\bseq|token|gpt|softmax|MatMul|einsum", re.I)
_CONVOLUTION = re.compile(r"(?:node|Node:)[^\n]{0,200}?[Cc]onv[^\n]{0,200}data_format=\"NCHW\"")
_FILTERS = (3, 5)  # sizes of filters, and of hardly any picture
_LARGEST_KERNEL = 11  # height and width of a convolution's kernel, where a batch of pictures has larger ones


def stated_shape(shape: tuple[int, ...], text: str) -> Iterator[Support]:
    """A shape whose last two sizes are equal, with heads and batch, is a score matrix, unless a convolution's node
    requested it.
    """
    sizes = " x ".join(map(str, shape))
    if _MOMENT_NODE.search(text):
        yield Support(Cause.OPTIMIZER_STATE, 0.6, Evidence("node_of_optimizer", {"sizes": sizes}))
        return
    run = run_in_text(text, {})
    batch, length = int(run.get("batch", 0)), int(run.get("seq", 0))
    if len(shape) == 2 and shape[0] == batch * length:
        values = {"rows": shape[0], "batch": batch, "length": length}
        yield Support(Cause.ACTIVATIONS, 0.6, Evidence("rows_are_tokens", values))
        return
    if _VARIABLE.search(text):
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.65, Evidence("shape_of_variable", {"sizes": sizes}))
        return
    if len(shape) == 4 and shape[0] == shape[1] <= _LARGEST_KERNEL and shape[2] * shape[3] > _LARGEST_KERNEL**4:
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.6, Evidence("shape_of_kernel", {"sizes": sizes}))
        yield Support(Cause.ACTIVATIONS, -0.4)
        return
    if len(shape) == 4 and shape[2] == shape[3] in _FILTERS and _CONVOLUTION.search(text):
        return  # cuDNN's order of a filter: small, it says nothing of what had filled the device
    is_square = len(shape) == 4 and shape[2] == shape[3] and shape[2] >= 64 and shape[1] <= 128 and shape[1] != 3
    if is_square and _OF_TOKENS.search(text) and not _IMAGE_NODE.search(text):
        yield Support(Cause.ATTENTION_SCORES, 0.6, Evidence("shape_of_scores", {"sizes": sizes}))
    elif len(shape) > 2:
        key = "shape_of_batch" if shape[0] > 1 else "shape_of_one"
        yield Support(Cause.ACTIVATIONS, 0.45, Evidence(key, {"sizes": sizes}))
    elif len(shape) == 2:
        yield Support(Cause.ACTIVATIONS, 0.3, Evidence("shape_of_matrix", {"sizes": sizes}))
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.28, Evidence("shape_of_matrix", {"sizes": sizes}))
