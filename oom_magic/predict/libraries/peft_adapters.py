"""``PeftModel.from_pretrained`` without a file of weights."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from oom_magic.language import _
from oom_magic.predict.isolation.patching import Patches
from oom_magic.predict.libraries.adapters import Adapter, Run


def _weights(module: ModuleType, run: Run) -> Patches:
    """Where there is no file, the adapter's own tensors tell the shapes."""
    owner, read = module.PeftModel, module.load_peft_weights
    usual = owner.load_adapter
    loading: list[tuple[Any, str]] = []

    def load_adapter(model: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        loading.append((model, adapter_name))
        try:
            return usual(model, model_id, adapter_name, *args, **kwargs)
        finally:
            loading.pop()

    def load_peft_weights(model_id: Any, device: Any = None, **kwargs: Any) -> Any:
        try:
            return read(model_id, device=device, **kwargs)
        except (OSError, ValueError):
            if not loading:
                raise
        model, name = loading[-1]
        text = _(
            "{name}: no file of the adapter's weights is there; their type was taken to be the model's", name=model_id
        )
        run.assume(text)
        state = module.get_peft_model_state_dict(model, adapter_name=name)
        return {key: torch.empty_like(tensor, device=device or "cuda") for key, tensor in state.items()}

    return [(owner, {"load_adapter": load_adapter}), (module, {"load_peft_weights": load_peft_weights})]


ADAPTERS: dict[str, Adapter] = {"peft.peft_model": _weights}
