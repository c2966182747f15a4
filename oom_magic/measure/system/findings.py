"""What a probe of the system sees: facts, and findings with what to do about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """Something worth changing: what it is, why it matters for memory, what to do. ``bad``: training cannot work."""

    what: str
    why: str
    fix: str
    tone: Literal["warning", "bad"] = "warning"


@dataclass(slots=True)
class Seen:
    """What one probe saw: rows of what and value, and findings."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
