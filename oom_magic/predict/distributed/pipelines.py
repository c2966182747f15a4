"""Pipeline parallel: what a stage would learn of its neighbours is what its own code says of them, or is refused.

Source: torch/distributed/pipelining/stage.py. Stages first agree whether all of them were told their shapes, and send
each other descriptions of what they exchange where some were not.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from oom_magic.language import _
from oom_magic.predict.isolation.patching import Patches
from oom_magic.predict.libraries.adapters import Adapter, Run


def _stages_alone(module: ModuleType, run: Run) -> Patches:
    """``PipelineStage`` whose neighbours are told their shapes where it is, and give gradients of what they got."""
    stage = module.PipelineStage
    if not hasattr(stage, "_recv_meta"):  # before PyTorch 2.13 shapes are sent as objects, which is refused
        return []

    votes: dict[int, int] = {}  # by stage; the others vote as this one does
    usual_vote, usual_result = stage._warmup_forward_vote, stage._warmup_backward_result

    def _warmup_forward_vote(self: Any, has_backward: bool, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_dynamic = module.InferenceMode.needs_dynamic(self._user_meta, has_backward)
        votes[self.stage_index] = 0 if is_dynamic else 1
        return usual_vote(self, has_backward, *args, **kwargs).fill_(votes[self.stage_index])

    def _warmup_backward_result(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return usual_result(self, *args, **kwargs).fill_(votes[self.stage_index])

    def _recv_meta(self: Any, src_stage: int) -> Any:
        if src_stage > self.stage_index:
            return module._StageBackwardMeta(backward_metas=module._derive_grad_metas(self._stage_meta.outputs))
        if self._user_meta.inputs is None:
            raise RuntimeError(
                _(
                    "stage {number} of the pipeline: what the stage before it sends is known only in its process; give"
                    " PipelineStage input_args and output_args, or follow the process of stage 0",
                    number=self.stage_index,
                )
            )
        sent = [replace(meta, requires_grad=meta.dtype.is_floating_point) for meta in self._user_meta.inputs]
        return module._StageForwardMeta(forward_metas=tuple(sent))

    changes = {
        "_warmup_forward_vote": _warmup_forward_vote,
        "_warmup_backward_result": _warmup_backward_result,
        "_recv_meta": _recv_meta,
    }
    return [(stage, changes)]


ADAPTERS: dict[str, Adapter] = {"torch.distributed.pipelining.stage": _stages_alone}
