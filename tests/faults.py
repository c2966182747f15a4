"""Errors that are raised at a chosen call of a function, for tests of what then stays as it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest


class InjectedError(Exception):
    pass


@dataclass
class Faults:
    """How often a function was called, and at which call it fails (0: never)."""

    calls: int = 0
    at: int = 0

    def begin(self, at: int) -> None:
        """Counts anew; the call number ``at`` fails."""
        self.calls, self.at = 0, at


def inject(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: type[BaseException]) -> Faults:
    """Lets ``owner.name`` count its calls and raise ``error`` at one of them."""
    usual, faults = getattr(owner, name), Faults()

    def faulty(*args: Any, **kwargs: Any) -> Any:
        faults.calls += 1
        if faults.calls == faults.at:
            raise error("injected")
        return usual(*args, **kwargs)

    monkeypatch.setattr(owner, name, faulty)
    return faults
