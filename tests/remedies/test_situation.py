"""Whether a remedy is one in this situation: room on the card, in RAM, on several cards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oom_magic.explain.remedies import specs
from oom_magic.explain.remedies.combining import likely_combinations
from oom_magic.explain.remedies.remedy import Remedy, Situation, ranked
from oom_magic.explain.remedies.room import other_hardware
from oom_magic.explain.remedies.specs import STEP, RemedySpec
from oom_magic.memory.allocator.replay import minimum_device_bytes
from oom_magic.memory.report import MemoryReport
from oom_magic.predict.setups.gpus import find_gpu
from oom_magic.units import GIB, MIB
from tests.support.samples import predicted, training_timeline

GPU = find_gpu("RTX 3060")


@pytest.mark.parametrize(("ram", "fits"), [(None, True), (40 * GIB, True), (20 * GIB, None)])
def test_what_goes_to_ram_must_fit_there(ram: int | None, fits: bool | None) -> None:
    """An evaluation that collects 30 GiB in RAM is killed where 20 are free."""
    situation = Situation(10 * GIB, GPU, ram_bytes=ram)
    collected = Remedy("eval_accumulation", 3, "same", saving_bytes=30 * GIB)
    remedy = situation.judged(collected, 3 * GIB)
    assert (remedy.fits, remedy.note is None) == (fits, fits is not None)
    assert situation.judged(replace(collected, key="no_grad"), 3 * GIB).fits
    kept = Remedy("expandable_segments", 5, "same", saving_bytes=GIB)
    found = [(RemedySpec(one.key, one.cost, one.speed, STEP, None, slot=one.key), one) for one in (remedy, kept)]
    assert bool(likely_combinations(found, 33 * GIB, GIB, situation, situation.usable_bytes)) == (fits is not None)
    smaller = situation.judged(Remedy("smaller_evaluation", 4, "same", saving_bytes=25 * GIB), 8 * GIB)
    assert ranked([remedy, smaller])[0].key == ("eval_accumulation" if fits else "smaller_evaluation")


def test_several_cards_are_named_where_one_is_too_small() -> None:
    """A part of a loop that fits one card as it is would need 0 bytes less on each of two."""
    timeline = training_timeline(num_steps=2, scale=4)
    report, needed = MemoryReport.from_timeline(timeline, predicted().device), minimum_device_bytes(timeline)
    named = [
        [one.key for one in other_hardware(report, needed, Situation(usable, GPU), is_alone=True)]
        for usable in (needed - MIB, needed)
    ]
    assert [("fsdp" in keys) for keys in named] == [True, False]


@pytest.mark.parametrize(("style", "library"), [("plain", "torchao"), ("trainer", "deepspeed")])
def test_a_change_whose_library_is_missing_comes_after_one_that_runs_as_it_stands(
    style: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def order(is_installed: bool) -> bool:
        monkeypatch.setattr(specs, "find_spec", lambda name: object() if is_installed and name == library else None)
        keys = [one.key for one in specs.remedy_specs(Situation(8 * GIB, GPU, style=style))]
        return keys.index("offload_optimizer") < keys.index("adafactor")

    assert order(is_installed=True) and not order(is_installed=False)
