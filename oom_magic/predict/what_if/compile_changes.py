"""Changes to what ``torch.compile`` makes of the models that run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch._functorch.config

from oom_magic.predict.compiled.calls import FIRST_FOLLOWED
from oom_magic.predict.isolation.patching import patched
from oom_magic.predict.operators.calls import TORCH
from oom_magic.predict.what_if.change import Change, InapplicableError, MissingError
from oom_magic.predict.what_if.model_changes import path_of_blocks


class Compiled(Change):
    """The repeated blocks of a model compiled one by one, for which one of them is compiled; else the whole model.

    Raises MissingError where compiled code cannot be followed.
    """

    def __init__(self) -> None:
        if TORCH < FIRST_FOLLOWED:
            raise MissingError("compiler_not_followed", version=torch.__version__)
        if find_spec("triton") is None:
            raise MissingError("library_missing", name="triton")

    def check(self, model: torch.nn.Module) -> None:
        """No part of the model may be compiled yet."""
        if _is_compiled(model):
            raise InapplicableError("compiled_already")

    def prepare(self, model: torch.nn.Module) -> None:
        """``compile()`` of each block, or of the model."""
        path = path_of_blocks(model)
        self.variant = "" if path is None else "blocks"
        for module in [model] if path is None else model.get_submodule(path).children():
            module.compile()


class CompiledInBlocks(Compiled):
    """Compiles only the repeated blocks of a model, one by one, instead of the whole model."""

    def check(self, model: torch.nn.Module) -> None:
        """The whole model must be compiled and have repeated blocks."""
        if not _is_whole(model):
            raise InapplicableError("not_compiled")
        if path_of_blocks(_inside(model)) is None:
            raise InapplicableError("no_equal_blocks")

    def prepare(self, model: torch.nn.Module) -> None:
        """The model itself runs eagerly, its blocks are compiled."""
        inside = _inside(model)
        vars(inside)["_compiled_call_impl"] = None
        if inside is not model:
            vars(model)["forward"] = inside.__call__
        super().prepare(inside)
        self.variant = ""


class ActivationBudget(Change):
    """``activation_memory_budget``: compiled code saves this share of its activations and recomputes the rest."""

    SHARE = 0.5

    def check(self, model: torch.nn.Module) -> None:
        """A part must be compiled, with a larger budget (``torch/_functorch/config.py``)."""
        if not _is_compiled(model):
            raise InapplicableError("not_compiled")

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """Set the budget during the run."""
        budget = min(self.SHARE, torch._functorch.config.activation_memory_budget)
        with torch._functorch.config.patch(activation_memory_budget=budget):
            yield


class WithoutCudaGraphs(Change):
    """Compiled code is launched each time, and not replayed from CUDA graphs, whose pool no other code can use."""

    def check(self, model: torch.nn.Module) -> None:
        """Something of the model must be compiled for CUDA graphs."""
        if not any(map(_takes_cuda_graphs, model.modules())):
            raise InapplicableError("no_cuda_graphs_taken")

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """What Inductor would make graphs of stays as it is."""
        inductor = import_module("torch._inductor.compile_fx")
        with patched(inductor, {"cudagraphify": lambda model, *_, **__: model}):
            yield


def _takes_cuda_graphs(module: torch.nn.Module) -> bool:
    for compiled in (module, getattr(module, "_compiled_call_impl", None)):
        ask = getattr(compiled, "get_compiler_config", None)
        if ask is not None and (ask() or {}).get("triton.cudagraphs"):
            return True
    return False


def _is_compiled(model: torch.nn.Module) -> bool:
    return any(_is_whole(module) for module in model.modules())


def _is_whole(module: torch.nn.Module) -> bool:
    return _inside(module) is not module or getattr(module, "_compiled_call_impl", None) is not None


def _inside(model: torch.nn.Module) -> torch.nn.Module:
    """The module that ``torch.compile(module)`` wraps."""
    inside: Any = vars(model).get("_modules", {}).get("_orig_mod")
    return model if inside is None else inside
