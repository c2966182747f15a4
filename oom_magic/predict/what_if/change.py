"""The base of changes, and changes to the model's inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from oom_magic.predict.isolation.context import is_dry_run
from oom_magic.predict.isolation.process.process_state import process_state_restored


class InapplicableError(Exception):
    """A change that this model does not allow or already has: a key (``reason_<key>`` of the catalogue), its values."""

    def __init__(self, key: str, **values: Any) -> None:
        super().__init__(key)
        self.key = key
        self.values = values


class MissingError(InapplicableError):
    """A change that needs a library that is not installed."""


def library(name: str) -> ModuleType:
    """An optional library. Raises MissingError where it is not installed.

    What it sets when it is imported is put back: bitsandbytes compiles, for which PyTorch ends the checks of all
    distributions. To look through all settings takes a tenth of a second: not for one that is there, or is not.
    """
    top = name.partition(".")[0]
    is_unchanging = is_dry_run() or name in sys.modules or (top not in sys.modules and find_spec(top) is None)
    try:
        with nullcontext() if is_unchanging else process_state_restored():
            return import_module(name)
    except ImportError:
        raise MissingError("library_missing", name=top) from None


class ByHandError(InapplicableError):
    """A change that would help, but in code that must be changed by hand."""


class Change:
    """The base of all changes: nothing is changed.

    ``applies_at_load`` says that the model would be loaded with the change from the start, so its memory before the
    change does not count; ``written_as`` that the user's own statements may have it instead, by which key. ``variant``
    tells apart ways of making one change, where models differ in the code for it. ``values`` fill its sentence and its
    code, for the model that was checked.
    """

    applies_at_load = False
    written_as = ""
    variant = ""
    values: Mapping[str, Any] = MappingProxyType({})

    def check(self, model: torch.nn.Module) -> None:
        """Raise InapplicableError where the change cannot be made to this model. Changes nothing."""

    def prepare(self, model: torch.nn.Module) -> None:
        """Change the outermost module before its first call, if ``check`` passed."""

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments to pass to the outermost module."""
        return args, kwargs

    def result(self, result: Any) -> Any:
        """The result to return from the outermost module."""
        return result

    def around_call(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A context manager around each call of the outermost module, ``model``."""
        return nullcontext()

    def around_run(self) -> AbstractContextManager[Any]:
        """A context manager around the whole run."""
        return nullcontext()


Inputs = tuple[tuple[tuple[int, ...], bool], ...]  # of a call's tensors: shape, whether integer


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """The tensors that a model is called with."""
    return tuple((tuple(tensor.shape), not tensor.is_floating_point()) for tensor in tensors_given(args, kwargs))


def tensors_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among arguments, and in the dictionaries among them or in a list, as of the texts of a pair.

    In a list alone they may be pictures of many sizes.
    """
    given = [*args, *kwargs.values()]
    given += [one for value in given if isinstance(value, (list, tuple)) for one in value if isinstance(one, Mapping)]
    inside = [value for one in given if isinstance(one, Mapping) for value in one.values()]
    return [value for value in (*given, *inside) if isinstance(value, torch.Tensor)]


class ExpectedInputs(Change):
    """No change; ends a run if call ``number`` (from 0) of an outermost module has other inputs, or never comes."""

    def __init__(self, number: int, are_expected: Callable[[Inputs], bool]) -> None:
        self._number = number
        self._are_expected = are_expected

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unchanged. Raises InapplicableError at the call whose inputs are not the expected ones."""
        self._number -= 1
        if self._number == -1 and not self._are_expected(inputs_of(args, kwargs)):
            raise InapplicableError("size_not_set_there")
        return args, kwargs

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """Raises InapplicableError if the code ends, and is not left, before that call: it set how many there are."""
        yield
        if self._number >= 0:
            raise InapplicableError("size_not_set_there")
