"""The user's optimizer with another class or option: where code makes it, or as it is there when a cell has failed."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from typing import Any, TypeGuard

from oom_magic.explain.live.called import object_of
from oom_magic.explain.remedies.code import RUN_ONCE, placed_after
from oom_magic.explain.remedies.own_code.loops import Code, copied
from oom_magic.explain.remedies.own_code.models import held_by
from oom_magic.explain.syntax import bound_in, expression, names_in

# The class that replaces the optimizer's, by remedy; "" where that stays.
OPTIMIZERS = {
    "foreach": "",
    "optimizer_8bit": "bnb.optim.AdamW8bit",
    "adafactor": "torch.optim.Adafactor",
    "sgd": "torch.optim.SGD",
    "offload_optimizer": "CPUOffloadOptimizer",
}
_OF_ADAM = {"optimizer_8bit": "bnb.optim.Adam8bit"}  # whose weight decay is another than AdamW's
_IMPORTS = {
    "optimizer_8bit": "import bitsandbytes as bnb\n",
    "offload_optimizer": "from torchao.optim import CPUOffloadOptimizer   # pip install torchao\n",
}
_OPTIMIZER = ("torch.optim.optimizer", "Optimizer")
_NAMES = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "SGD")
_ADAMS = ("Adam", "AdamW")
_OF_ADAMS = ("lr", "betas", "eps", "weight_decay")  # that bitsandbytes' classes take, too
_OF_ALL = ("lr", "weight_decay")


def with_optimizer(tree: Code, names: Mapping[str, Any], key: str) -> str:
    """The assignments of optimizers, each with the class or option of a remedy; else the function that returns one."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _makes_optimizer(node.value, names):
            target = " = ".join(map(ast.unparse, node.targets))
            lines.append(f"{target} = {_other_optimizer(node.value, names, key)}")
    if not lines and isinstance(tree, ast.FunctionDef):
        changed = copied(tree)
        for returned in [one for one in ast.walk(changed) if isinstance(one, ast.Return)]:
            if _makes_optimizer(returned.value, names):
                returned.value = ast.Name(_other_optimizer(returned.value, names, key))  # to be written out
                lines = [ast.unparse(changed)]
    return _IMPORTS.get(key, "") + "\n".join(lines) if lines else ""


def _makes_optimizer(value: ast.expr | None, names: Mapping[str, Any]) -> TypeGuard[ast.Call]:
    """Whether it calls the class of an optimizer, which a function may import itself, with what that is to train."""
    if not isinstance(value, ast.Call) or not value.args:
        return False
    is_known = _last_name(ast.unparse(value.func)) in _NAMES
    return is_known or is_optimizer_class(object_of(value.func, names))


def is_optimizer_class(kind: Any) -> bool:
    """Whether it is a class of PyTorch's optimizers, or one that derives from it."""
    return inspect.isclass(kind) and any((one.__module__, one.__name__) == _OPTIMIZER for one in kind.__mro__)


def _other_optimizer(call: ast.Call, names: Mapping[str, Any], key: str) -> str:
    """The call of an optimizer's class, with the class or option of a remedy."""
    own = ast.unparse(call.func)
    weights, *options = [ast.unparse(one) for one in call.args]
    named = {one.arg or "": ast.unparse(one.value) for one in call.keywords}
    if key == "foreach":
        options += [*map(ast.unparse, call.keywords), "foreach=False"]
    elif key == "offload_optimizer":
        options = [own, *(f"{name}={value}" for name, value in _in_order(call, names).items())]
        options += map(ast.unparse, call.keywords)
    else:
        given = {**_in_order(call, names), **named}
        options = [f"{name}={given[name]}" for name in _kept_options(own, key) if name in given]
    return f"{_class_of(own, key)}({', '.join([weights, *options])})"


def _in_order(call: ast.Call, names: Mapping[str, Any]) -> dict[str, str]:
    """What a call gives an optimizer behind its parameters by their order, as far as that is known."""
    kind = object_of(call.func, names)
    known = list(inspect.signature(kind).parameters) if is_optimizer_class(kind) else ["params", "lr"]
    return dict(zip(known[1:], map(ast.unparse, call.args[1:]), strict=False))


def _kept_options(own: str, key: str) -> tuple[str, ...]:
    """The options of a class that mean the same in that of a remedy."""
    return _OF_ADAMS if key == "optimizer_8bit" and _last_name(own) in _ADAMS else _OF_ALL


def _class_of(own: str, key: str) -> str:
    """The class that a remedy puts in place of ``own``."""
    other = _OF_ADAM.get(key) if _last_name(own) == "Adam" else None
    return other or OPTIMIZERS.get(key) or own


def _last_name(path: str) -> str:
    return path.rpartition(".")[2]


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
    of_model = object_of(expression(model), names)
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
    name = f"torch.optim.{type(optimizer).__name__}"
    usual = inspect.signature(type(optimizer)).parameters
    kept = [one for one in _kept_options(name, key) if one in usual and one in group]
    changed = {one: group[one] for one in kept if one != "lr" and group[one] != usual[one].default}
    options = [f"lr={float(group['lr'])!r}", *(f"{one}={value!r}" for one, value in changed.items())]
    if key == "offload_optimizer":
        options.insert(0, name)
    return f"{_IMPORTS.get(key, '')}{path} = {_class_of(name, key)}({', '.join([weights, *options])})"
