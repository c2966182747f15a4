"""The user's optimizer as it is there when a cell has failed, set anew by a statement: for code to paste."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from typing import Any

from oom_magic.explain.live.called import object_of
from oom_magic.explain.remedies.code import RUN_ONCE, placed_after
from oom_magic.explain.remedies.own_code.loops import IMPORTS, OPTIMIZERS, is_optimizer_class
from oom_magic.explain.remedies.own_code.models import held_by
from oom_magic.explain.syntax import bound_in, names_in


def with_optimizer_exchanged(tree: ast.Module, names: Mapping[str, Any], key: str, model: str) -> str:
    """The statement that sets the one optimizer that the cell's names lead to anew, for the remedy ``key``; "" where
    there is none, or it trains something else than the model of that name, or a scheduler belongs to it."""
    path, optimizer = _optimizer_of(tree, names)
    if optimizer is None or not model or _is_scheduled(optimizer, names):
        return ""
    if key == "foreach":
        code = f'for group in {path}.param_groups:\n    group["foreach"] = False'
    else:
        code = _made_anew(path, optimizer, key, model, names)
    root = path.partition(".")[0]
    if not code:
        return ""
    return placed_after(root, code) if root in bound_in(tree) else f"# {RUN_ONCE}:\n{code}"


def optimizer_of_adapters(tree: ast.Module, names: Mapping[str, Any], model: str) -> str | None:
    """The statement that lets the optimizer that is there train the adapters of a model, which it was made without; ""
    where there is none, or the cell makes it behind the model; None where it cannot be written."""
    path, optimizer = _optimizer_of(tree, names)
    if optimizer is None:
        return ""
    makes_model, makes_optimizer = (_first_binding(tree, one.partition(".")[0]) for one in (model, path))
    if makes_optimizer > makes_model:
        return ""
    return None if _is_scheduled(optimizer, names) else _made_anew(path, optimizer, "", model, names) or None


def _first_binding(tree: ast.Module, name: str) -> int:
    """The place of the first statement of a cell that binds a name; -1 where an earlier cell does."""
    return next((at for at, one in enumerate(tree.body) if name in bound_in(one)), -1)


def _optimizer_of(tree: ast.Module, names: Mapping[str, Any]) -> tuple[str, Any]:
    """The one optimizer that the names of a cell lead to, with its path; ("", None) where it is not one."""
    used = names_in(tree)
    found = {path: one for name in used for path, one in held_by(name, names.get(name), _is_optimizer)}
    if len({id(one) for one in found.values()}) != 1:
        return "", None
    return min(found.items(), key=lambda one: one[0].count("."))


def _is_optimizer(value: Any) -> bool:
    return is_optimizer_class(type(value))


def _is_scheduled(optimizer: Any, names: Mapping[str, Any]) -> bool:
    """Whether a scheduler that a variable, or an attribute of an object of the user's, leads to works on it."""
    found = [one for name, value in list(names.items()) for _, one in held_by(name, value, _is_scheduler)]
    return any(vars(one).get("optimizer") is optimizer for one in found)


def _is_scheduler(value: Any) -> bool:
    return any(kind.__module__ == "torch.optim.lr_scheduler" for kind in type(value).__mro__)


def _made_anew(path: str, optimizer: Any, key: str, model: str, names: Mapping[str, Any]) -> str:
    """An optimizer for the same parameters with the same learning rate and weight decay: of the class of a remedy, or
    ("") of its own for those that have gradients then; "" where it has other parameters than the model."""
    of_model = object_of(ast.parse(model, mode="eval").body, names)
    if not type(optimizer).__module__.startswith("torch.optim"):
        return ""  # a wrapper
    (group, *more), every = optimizer.param_groups, list(getattr(of_model, "parameters", list)())
    own = {id(one) for one in group["params"]}
    is_known = not more and isinstance(group["lr"], (int, float))  # a tensor's value may be on the card
    if not is_known or own not in ({id(one) for one in every}, {id(one) for one in every if one.requires_grad}):
        return ""
    weights = f"{model}.parameters()"
    if not key or own != {id(one) for one in every}:
        weights = f"[one for one in {weights} if one.requires_grad]"
    options = [f"lr={float(group['lr'])!r}"]
    usual = inspect.signature(type(optimizer)).parameters.get("weight_decay")
    if usual is not None and group.get("weight_decay", usual.default) != usual.default:
        options.append(f"weight_decay={group['weight_decay']!r}")
    name = f"torch.optim.{type(optimizer).__name__}"
    if key == "offload_optimizer":
        options.insert(0, name)
    return f"{IMPORTS.get(key, '')}{path} = {OPTIMIZERS.get(key, name)}({', '.join([weights, *options])})"
