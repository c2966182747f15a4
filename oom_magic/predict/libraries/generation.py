"""Generation runs to its greatest length: which token ends a sequence is unknown, and the longest takes the most."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch._C import DisableTorchFunction  # type: ignore[attr-defined]

from oom_magic.language import _
from oom_magic.predict.isolation.patching import Patches
from oom_magic.predict.libraries.adapters import Adapter, Run


def _criteria(module: ModuleType, run: Run) -> Patches:
    """A stopping criterion that looks at tokens never says that a sequence is done."""
    return [
        (found, {"__call__": _not_done(found.__call__, run)})
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, module.StoppingCriteria) and "__call__" in vars(found)
    ]


def _not_done(criterion: Callable[..., Any], run: Run) -> Callable[..., Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        done = criterion(self, *args, **kwargs)
        with DisableTorchFunction():
            values = run.gpu.values
            if isinstance(done, torch.Tensor) and (values.get(done) is None or values.assumption_about([done])):
                run.assume(_("generation: no sequence ends before the greatest length"))
                values.put(done, torch.zeros(done.shape, dtype=done.dtype))
        return done

    return __call__


def _beams(module: ModuleType, run: Run) -> Patches:
    """Beams are improved on until all of them have the greatest length."""
    name = "_beam_search_has_unfinished_sequences"
    if not hasattr(module.GenerationMixin, name):  # older versions score beams on the host
        return []
    usual = getattr(module.GenerationMixin, name)

    def has_unfinished(improvable: Any, finished: Any, at_their_end: Any, *args: Any, **kwargs: Any) -> Any:
        goes_on = usual(improvable, finished, at_their_end, *args, **kwargs)
        with DisableTorchFunction():
            ends = run.gpu.values.get(at_their_end)
            if ends is not None:
                run.gpu.values.put(goes_on, ~ends.all())
        return goes_on

    return [(module.GenerationMixin, {name: staticmethod(has_unfinished)})]


ADAPTERS: dict[str, Adapter] = {
    "transformers.generation.stopping_criteria": _criteria,
    "transformers.generation.utils": _beams,
}
