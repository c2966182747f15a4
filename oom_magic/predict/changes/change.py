"""Changes to a training run, made to the pretended objects while it is rehearsed: what would this remedy save?

A change never touches the user's code: it acts on the model before its first step, or around each of its calls. The
user's objects are put back after the run like anything else a dry run does to them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class InapplicableError(Exception):
    """A change that this model does not allow or already has: a key (``reason_<key>`` of the catalogue), its values."""

    def __init__(self, key: str, **values: Any) -> None:
        super().__init__(key)
        self.key = key
        self.values = values


class MissingError(InapplicableError):
    """A change that would be possible with a library that is not installed."""


class Change:
    """The base of all changes: nothing is changed.

    ``is_placed_so`` says that the model would be loaded so in the first place: what it took before the change does
    not count. ``way`` tells apart ways of making one change, where models differ in the code for it.
    """

    is_placed_so = False
    way = ""

    def check(self, model: torch.nn.Module) -> None:
        """Raise InapplicableError where the change cannot be made to this model. Changes nothing."""

    def prepare(self, model: torch.nn.Module) -> None:
        """Act on the outermost module before it runs first, if ``check`` lets it."""

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the outermost module is called with instead."""
        return args, kwargs

    def result(self, result: Any) -> Any:
        """What the outermost module returns instead."""
        return result

    def around_call(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A context for each call of the outermost module, ``model``."""
        return nullcontext()

    def around_run(self) -> AbstractContextManager[Any]:
        """A context for the whole run."""
        return nullcontext()
