"""Objects whose constructor failed: modules and optimizers without what their class promises.

A traceback keeps them alive (``AdamW(model.parameters(), lr=-1)`` raises before ``Optimizer.__init__``), and so may the
user's names. They hold nothing that PyTorch would train, and are looked at as any other object.
"""

from __future__ import annotations

from typing import Any


def is_built(value: Any) -> bool:
    """Whether a module can be asked for its parameters, or an optimizer for its groups of them and its state."""
    promised = ("param_groups", "state") if hasattr(type(value), "add_param_group") else ("_modules",)
    return all(_has(value, name) for name in promised)


def _has(value: Any, name: str) -> bool:
    if name in getattr(value, "__dict__", ()):
        return True
    try:
        return hasattr(value, name)  # a wrapper's property
    except Exception:  # a __getattr__ that itself asks for what was not set
        return False
