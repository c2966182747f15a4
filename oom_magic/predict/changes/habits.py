"""Changes to what a training loop does between its calls: what it keeps, and how it clears gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from oom_magic.predict.changes.change import Change
from oom_magic.predict.following.patches import replaced


class ReleasedGradients(Change):
    """``zero_grad(set_to_none=True)``, whatever the loop asks for."""

    @contextmanager
    def around_run(self) -> Iterator[None]:
        with (
            replaced(torch.optim.Optimizer, {"zero_grad": _releasing(torch.optim.Optimizer.zero_grad)}),
            replaced(torch.nn.Module, {"zero_grad": _releasing(torch.nn.Module.zero_grad)}),
        ):
            yield


def _releasing(zero_grad: Callable[..., None]) -> Callable[..., None]:
    def run(owner: Any, set_to_none: bool = True) -> None:
        zero_grad(owner, True)

    return run


class DroppedOutputs(Change):
    """Of what a Hugging Face model returns only the loss is kept: the logits go before the backward."""

    def result(self, result: Any) -> Any:
        return type(result)(loss=result["loss"]) if has_outputs(result) else result


def has_outputs(result: Any) -> bool:
    """Whether a model returned a loss together with the logits it was computed from."""
    return isinstance(result, dict) and result.get("loss") is not None and result.get("logits") is not None
