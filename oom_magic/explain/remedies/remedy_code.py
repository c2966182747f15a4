"""The code of remedies: the user's own statements, where the change can be written into them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from oom_magic.explain.remedies.code import ACCELERATOR_SETTINGS, code_for, for_backend, is_python
from oom_magic.explain.remedies.own_code.loops import own_arguments
from oom_magic.explain.remedies.rehearsal import Rehearsal


class RemedyCode:
    """Writes remedies for a run whose loop is of this ``style`` ("plain", "trainer", "accelerate")."""

    def __init__(self, rehearsal: Rehearsal, style: str, backend: str | None) -> None:
        self._rehearsal, self._style, self._backend = rehearsal, style, backend

    def of(self, key: str, values: Mapping[str, Any]) -> tuple[str, str]:
        """The code of a remedy, "" where it has none, and its language."""
        code, language = code_for(key, self._style, {**self._rehearsal.names, **values})
        # Around a teacher in the user's own loss, or in the user's metrics: no argument of the trainer's does it.
        is_users = key == "kept_classes" or (key == "no_grad" and self._rehearsal.runs_frozen)
        if self._style == "trainer" and key == "shorter_sequences":
            code = self._rehearsal.own_code(key, values) or code  # wherever the data is made
        elif self._style == "trainer" and not is_users:
            code = self._rehearsal.own_arguments(code) or code
        else:
            own = self._rehearsal.own_code(key, values)
            is_setting = self._style == "accelerate" and key in ACCELERATOR_SETTINGS
            code = code if own is None or (is_setting and not own) else own
        if language == "python" and not is_python(code):
            code = ""
        return for_backend(code, self._backend), language

    def joined(self, codes: Sequence[str]) -> str:
        """The code of several changes, "" where one lacks it; changes of Trainer's arguments share one call."""
        joined = "\n\n".join(codes) if all(codes) else ""
        if self._style != "trainer" or not is_python(joined):
            return joined
        return self._rehearsal.own_arguments(joined) or own_arguments(ast.parse(joined), joined) or joined

    def joined_bare(self, codes: Sequence[str]) -> str:
        """The same for a model that FSDP2 leaves without DDP's wrapper."""
        names = self._rehearsal.names
        joined = self.joined(codes)
        return joined.replace(names["inner"], names["model"]) if "inner" in names else joined
