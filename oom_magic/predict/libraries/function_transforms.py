"""``torch.func``: what its gradients kept is freed by autograd's own thread.

``grad``, ``vjp`` and what is made of them let go of the graph as soon as it has been run. On a GPU the thread that ran
it still holds it then (``Engine::thread_main``, torch/csrc/autograd/engine.cpp), and waits for Python's lock to free
tensors that Python has seen. How long is chance; a dry run frees them at once.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from oom_magic.language import _
from oom_magic.predict import torch_private
from oom_magic.predict.isolation.patching import Patches
from oom_magic.predict.libraries.adapters import Adapter, Run


def _told(module: ModuleType, run: Run) -> Patches:
    torch_private.check(torch_private.FUNCTION_TRANSFORMS)
    usual = module._autograd_grad

    def _autograd_grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(run.gpu.is_on_gpu, outputs)):
            run.assume(
                _(
                    "torch.func: what a gradient kept is freed at once here; on a GPU autograd's own thread frees it,"
                    " which may be during the operators that follow"
                )
            )
        return usual(outputs, *args, **kwargs)

    return [(module, {"_autograd_grad": _autograd_grad})]


ADAPTERS: dict[str, Adapter] = {"torch._functorch.eager_transforms": _told}
