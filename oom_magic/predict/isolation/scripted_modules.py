"""TorchScript's modules: C++ holds their weights as well, and while it does, none can be exchanged.

So it lets go of them before they are exchanged and before they are put back, and is given what they are then. All other
attributes it holds alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from oom_magic.predict.isolation.live_objects import LiveObjects
from oom_magic.predict.isolation.patching import Journal


def scripted_let_go(journal: Journal, live: LiveObjects) -> Callable[[], None]:
    """Let C++ go of the weights of live modules, and record what gives them back. What is returned gives it those that
    they were exchanged for."""
    scripted = [one for one in live.modules if isinstance(one, torch.jit.ScriptModule) and hasattr(one, "_c")]
    journal.record(functools.partial(_give, [one for module in scripted for one in _other_attributes(module)]))
    held: list[tuple[Any, str, torch.Tensor]] = [
        (module._c, name, tensor)
        for module in scripted
        for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items())
        if tensor is not None
    ]
    known = set(map(id, live.tensors)) if held else set()
    live.tensors += {id(one): one for _module, _name, one in held if id(one) not in known}.values()
    journal.record(functools.partial(_give, held))
    _let_go(held)

    def give() -> None:
        journal.record(functools.partial(_let_go, held))
        _give(held)

    return give


def _other_attributes(module: Any) -> Iterator[tuple[Any, str, Any]]:
    """The attributes of a module that are no tensors, such as ``training``; lists and dicts are copies."""
    kind = getattr(module, "_concrete_type", None)
    for name in ("training",) if kind is None else kind.get_attributes():
        value = module._c.getattr(name) if module._c.hasattr(name) else None
        if value is not None and not isinstance(value, torch.Tensor):
            yield module._c, name, value


def _give(held: list[tuple[Any, str, Any]]) -> None:
    for module, name, value in held:
        module.setattr(name, value)


def _let_go(held: list[tuple[Any, str, torch.Tensor]]) -> None:
    for module, name, _tensor in held:
        module.setattr(name, torch.empty(0))


def moved_in_script(usual: Callable[..., Any]) -> Callable[..., Any]:
    """In place of ``_apply``, by which weights get another device or type: C++ gets the other data, too."""

    def _apply(module: Any, *args: Any, **kwargs: Any) -> Any:
        before = [(name, one, one._cdata) for name, one in module._parameters.items() if one is not None]
        usual(module, *args, **kwargs)
        _give([(module._c, name, one) for name, one, data in before if one._cdata != data])
        return module

    return _apply
