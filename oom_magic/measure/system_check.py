"""The check of the whole system: what decides how much memory a training run can have here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from oom_magic.errors import describe_error
from oom_magic.language import _
from oom_magic.measure.device.cards import Card, driver_reading, read_cards
from oom_magic.measure.probes import (
    Finding,
    ProbeResult,
    probe_card,
    probe_disk,
    probe_fallback,
    probe_kills,
    probe_memory,
    probe_order,
    probe_packages,
    probe_platform,
    probe_settings,
    probe_shared_memory,
    probe_torch,
    torch_build,
)
from oom_magic.results import Result

_Probe = tuple[str, Callable[[], ProbeResult]]


@dataclass(frozen=True, repr=False)
class SystemCheck(Result):
    """Facts as rows of label and value, cards, findings (worst first), and ``failed`` probes with their errors."""

    facts: tuple[tuple[str, str], ...]
    cards: tuple[Card, ...]
    findings: tuple[Finding, ...]
    failed: tuple[tuple[str, str], ...]
    torch_version: str
    torch_build: str

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for JSON."""
        return asdict(self)


def check_system() -> SystemCheck:
    """Check the machine, the GPUs, the driver, torch and its settings; takes well under a second."""
    failed: list[tuple[str, str]] = []
    cards: tuple[Card, ...] = ()
    try:
        cards = read_cards()
    except Exception as error:  # a GPU may fall off the bus at any moment
        failed.append((_("the cards"), describe_error(error)))
    results = [_run_probe(name, probe, failed) for name, probe in _probes(cards)]
    findings = [finding for result in results for finding in result.findings]
    return SystemCheck(
        facts=tuple(row for result in results for row in result.rows),
        cards=cards,
        findings=tuple(sorted(findings, key=lambda finding: finding.tone)),
        failed=tuple(failed),
        torch_version=str(torch.__version__),
        torch_build=torch_build(),
    )


def _probes(cards: tuple[Card, ...]) -> Iterable[_Probe]:
    yield _("the platform"), probe_platform
    yield "torch", probe_torch
    for card in cards:
        yield f"GPU {card.index}", partial(_probe_card, card)
    yield _("the numbering of the cards"), partial(probe_order, cards)
    yield _("the driver's sysmem fallback"), probe_fallback
    yield _("host memory"), probe_memory
    yield _("killed processes"), probe_kills
    yield _("shared memory"), probe_shared_memory
    yield _("the disk"), probe_disk
    yield _("settings"), probe_settings
    yield _("packages"), probe_packages


def _probe_card(card: Card) -> ProbeResult:
    return probe_card(card, driver_reading(card.index))


def _run_probe(name: str, probe: Callable[[], ProbeResult], failed: list[tuple[str, str]]) -> ProbeResult:
    """A probe's result. If it raises, the error is added to ``failed``, so that the other probes still run."""
    try:
        return probe()
    except Exception as error:
        failed.append((name, describe_error(error)))
        return ProbeResult()
