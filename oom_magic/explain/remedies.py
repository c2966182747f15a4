"""What to change, each remedy priced by rehearsing the user's own run with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from oom_magic.explain.rehearsal import NotPricedError, Rehearsal, Variation
from oom_magic.explain.remedy_code import code_for
from oom_magic.memory.allocator import minimum_device_bytes

if TYPE_CHECKING:
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.setups.gpus import GPU


@dataclass(frozen=True)
class Remedy:
    """One change. Sizes in bytes; None where it could not be priced, and ``note`` then says why.

    ``key`` names its sentence in the catalogue (``remedy_<key>``), filled with ``values``; ``speed`` that of its
    effect on speed (``speed_<speed>``). ``peak_allocated_bytes`` and ``needed_bytes`` (the least memory for
    PyTorch) are those of the run with the change, ``saving_bytes`` is what ``needed_bytes`` falls by. ``cost``
    orders remedies of equal effect.
    """

    key: str
    cost: int
    speed: str
    values: Mapping[str, Any] = field(default_factory=dict)
    peak_allocated_bytes: int | None = None
    needed_bytes: int | None = None
    saving_bytes: int | None = None
    fits: bool | None = None
    global_batch_before: int | None = None
    global_batch_after: int | None = None
    note: str = ""
    code: str = ""
    language: str = "python"


@dataclass(frozen=True)
class Situation:
    """What the remedies are judged against. Sizes in bytes.

    ``usable_bytes`` is what PyTorch can have on the card now, ``other_bytes`` what other processes hold,
    ``held_bytes`` what names of earlier cells hold. ``style`` is how the user trains ("plain", "trainer",
    "accelerate").
    """

    usable_bytes: int
    gpu: GPU
    other_bytes: int = 0
    held_bytes: int = 0
    accumulation: int = 1
    style: str = "plain"
    phase: str | None = None
    expandable_segments: bool = False
    is_windows: bool = False


@dataclass(frozen=True)
class _Candidate:
    """A remedy before it is priced: ``vary()`` makes the variation, when first needed."""

    key: str
    cost: int
    speed: str
    vary: Callable[[], Variation]
    values: Mapping[str, Any] = field(default_factory=dict)
    combines: bool = True


def price(rehearsal: Rehearsal, situation: Situation) -> Iterator[Remedy]:
    """Remedies as they are priced, the cheap and likely first; combinations last, if no single one fits."""
    baseline = rehearsal.run(Variation())
    needed = _needed(baseline)
    yield from _without_rehearsal(baseline, needed, situation)
    fitting: list[Remedy] = []
    useful: list[_Candidate] = []
    for candidate in _candidates(baseline, situation):
        remedy = _priced(candidate, candidate.vary, rehearsal, needed, situation)
        yield remedy
        if remedy.fits:
            fitting.append(remedy)
        if candidate.combines and (remedy.saving_bytes or 0) > 0:
            useful.append(candidate)
    for what in ("batch", "seq"):
        for remedy in _smaller(what, Variation(), rehearsal, needed, situation):
            yield remedy
            fitting += [remedy] if remedy.fits else []
    if not fitting:
        yield from _combinations(useful, rehearsal, needed, situation)


def ranked(remedies: list[Remedy]) -> tuple[Remedy, ...]:
    """What fits first, the least cost first; then what saves most; at the end what is not priced."""
    return tuple(
        sorted(
            remedies,
            key=lambda remedy: (
                remedy.fits is not True,
                remedy.fits is None,
                remedy.cost if remedy.fits else -(remedy.saving_bytes or 0),
            ),
        )
    )


def _needed(report: MemoryReport) -> int:
    """The least memory for PyTorch's allocator with which the rehearsed run ends."""
    return minimum_device_bytes(report.timeline, report.settings)


def _priced(
    candidate: _Candidate,
    vary: Callable[[], Variation],
    rehearsal: Rehearsal,
    needed: int,
    situation: Situation,
) -> Remedy:
    batch = rehearsal.sizes.get("batch")
    whole = None if batch is None else batch * situation.accumulation
    code, language = code_for(candidate.key, situation.style, candidate.values)
    remedy = Remedy(
        candidate.key, candidate.cost, candidate.speed, candidate.values, code=code, language=language,
        global_batch_before=whole, global_batch_after=whole,
    )  # fmt: skip
    try:
        report = rehearsal.run(vary())
    except NotPricedError as reason:
        return replace(remedy, note=str(reason))
    return _with_price(remedy, report.peak_allocated_bytes, _needed(report), needed, situation)


def _with_price(remedy: Remedy, peak: int | None, now: int, before: int, situation: Situation) -> Remedy:
    return replace(
        remedy,
        peak_allocated_bytes=peak,
        needed_bytes=now,
        saving_bytes=before - now,
        fits=now <= situation.usable_bytes,
    )


def _candidates(baseline: MemoryReport, situation: Situation) -> list[_Candidate]:
    """The changes to code that are worth a rehearsal here."""
    from oom_magic.predict import changes as make

    dtype = "bf16" if situation.gpu.capability >= (8, 0) else "fp16"

    def change(make_one: Callable[[], Any], **fields: Any) -> Callable[[], Variation]:
        return lambda: Variation(changes=(make_one(),), fields=fields)

    amp = change(lambda: make.MixedPrecision(dtype), precision=f"amp-{dtype}")
    half = change(lambda: make.HalfWeights(dtype), precision=dtype)
    checkpointing = change(make.ActivationCheckpointing, activation_checkpointing=True)
    lora = change(lambda: make.LowRankAdapters(16), method="lora", rank=16)
    sdpa = change(lambda: make.AttentionKernel("sdpa"), attention="sdpa")
    quantized = Variation(fields={"method": "qlora", "rank": 16})
    candidates = [
        _Candidate("sdpa", 10, "faster", sdpa),
        _Candidate("mixed_precision", 20, "faster", amp, {"dtype": dtype}),
        _Candidate("chunked_loss", 25, "same", change(make.ChunkedLoss, loss="chunked")),
        _Candidate("checkpointing", 40, "checkpointing", checkpointing),
        _Candidate("optimizer_8bit", 45, "same", change(make.eight_bit_adamw, optimizer="adamw8bit")),
        _Candidate("half_weights", 60, "faster", half, {"dtype": dtype}),
        _Candidate("adafactor", 65, "same", change(make.adafactor, optimizer="adafactor"), combines=False),
        _Candidate("lora", 70, "faster", lora, {"rank": 16}),
        _Candidate("qlora", 75, "qlora", lambda: quantized, {"rank": 16}, combines=False),
        _Candidate("sgd", 80, "same", change(make.sgd, optimizer="sgd"), combines=False),
    ]
    if baseline.peak_phase.value == "optimizer":
        loop = change(lambda: make.OptimizerOptions(foreach=False), optimizer="adamw-loop")
        candidates.insert(0, _Candidate("foreach", 15, "optimizer_loop", loop))
    if situation.phase == "evaluation":
        candidates.insert(0, _Candidate("no_grad", 1, "faster", change(make.NoGradients), combines=False))
    return candidates


_COSTS = {"batch": 30, "seq": 55}


def _smaller(what: str, base: Variation, rehearsal: Rehearsal, needed: int, situation: Situation) -> Iterator[Remedy]:
    """The largest smaller batch (or length) that fits; where none does, the smallest."""
    before = rehearsal.sizes.get(what, 1)
    grain = 1 if what == "batch" else max(before // 16, 1)
    key, cost = {"batch": "smaller_batch", "seq": "shorter_sequences"}[what], _COSTS[what]
    if before // grain < 2:
        return
    reports: dict[int, MemoryReport] = {}

    def need(number: int) -> int:
        reports[number] = rehearsal.run(base.with_(Variation(sizes={what: number * grain})))
        return _needed(reports[number])

    try:
        largest = _largest(need, before // grain, needed, situation.usable_bytes)
        number = _divisor(before * situation.accumulation, largest) if what == "batch" else largest
        if number not in reports:
            need(number)
    except NotPricedError as reason:
        yield Remedy(key, cost, "same", {"before": before}, note=str(reason))
        return
    yield _resized(key, cost, what, before, number * grain, reports[number], rehearsal, needed, situation)


def _largest(need: Callable[[int], int], high: int, need_high: int, usable: int) -> int:
    """The largest number below ``high`` whose need fits, 1 if none does. Need grows almost in proportion."""
    low, need_low = 1, need(1)
    if need_low > usable:
        return 1
    while high - low > 1:
        share = (usable - need_low) / max(need_high - need_low, 1)
        guess = min(max(low + int(share * (high - low)), low + 1), high - 1)
        need_guess = need(guess)
        if need_guess <= usable:
            low, need_low = guess, need_guess
        else:
            high, need_high = guess, need_guess
    return low


def _divisor(whole: int, largest: int) -> int:
    """The largest divisor of ``whole`` up to ``largest``: microbatches of it make up the same batch."""
    return next(number for number in range(largest, 0, -1) if whole % number == 0)


def _resized(
    key: str, cost: int, what: str, before: int, value: int, report: MemoryReport,
    rehearsal: Rehearsal, needed: int, situation: Situation,
) -> Remedy:  # fmt: skip
    batch = rehearsal.sizes.get("batch", 1)
    whole = batch * situation.accumulation
    accumulation = whole // value if what == "batch" else situation.accumulation
    values = {"before": before, "after": value, "accumulation": accumulation, "name": _label(rehearsal, what)}
    code, language = code_for(key, situation.style, values)
    remedy = Remedy(
        key, cost, "accumulation" if what == "batch" else "faster", values, code=code, language=language,
        global_batch_before=whole, global_batch_after=whole,
    )  # fmt: skip
    return _with_price(remedy, report.peak_allocated_bytes, _needed(report), needed, situation)


def _label(rehearsal: Rehearsal, what: str) -> str:
    label: Callable[[str], str] | None = getattr(rehearsal, "label", None)
    return label(what) if label is not None else {"batch": "microbatch_size", "seq": "seq_len"}[what]


def _combinations(
    useful: list[_Candidate], rehearsal: Rehearsal, needed: int, situation: Situation
) -> Iterator[Remedy]:
    """Add the useful changes one by one, the cheapest first, then a smaller batch, until the run fits."""
    ordered = sorted(useful, key=lambda candidate: candidate.cost)
    for together in (tuple(ordered[:number]) for number in range(2, len(ordered) + 1)):

        def vary(together: tuple[_Candidate, ...] = together) -> Variation:
            variation = Variation()
            for candidate in together:
                variation = variation.with_(candidate.vary())
            return variation

        cost = sum(candidate.cost for candidate in together)
        keys = tuple(candidate.key for candidate in together)
        both = _Candidate("combination", cost, "combination", vary, {"keys": keys})
        remedy = _priced(both, vary, rehearsal, needed, situation)
        if remedy.fits:
            yield remedy
            return
        now = remedy.needed_bytes or needed
        for smaller in _smaller("batch", vary(), rehearsal, now, situation):
            if smaller.fits:
                values = {**smaller.values, "keys": (*keys, smaller.key)}
                saving = needed - (smaller.needed_bytes or needed)
                yield replace(smaller, key="combination", cost=cost + smaller.cost, values=values, saving_bytes=saving)
                return


def _without_rehearsal(baseline: MemoryReport, needed: int, situation: Situation) -> Iterator[Remedy]:
    """Remedies whose effect follows from the run as it is."""
    usable = situation.usable_bytes
    if situation.held_bytes:
        yield _freeing("free_held", 2, situation.held_bytes, needed, usable)
    if situation.other_bytes:
        yield _freeing("close_processes", 3, situation.other_bytes, needed, usable)
    if not situation.expandable_segments and not situation.is_windows:
        settings = replace(baseline.settings, expandable_segments=True)
        code, language = code_for("expandable_segments", situation.style, {})
        remedy = Remedy("expandable_segments", 5, "same", code=code, language=language)
        now = minimum_device_bytes(baseline.timeline, settings)
        yield _with_price(remedy, baseline.peak_allocated_bytes, now, needed, situation)
    yield from _other_cards(baseline, needed, situation)


def _freeing(key: str, cost: int, freed: int, needed: int, usable: int) -> Remedy:
    """A remedy that leaves the run as it is and makes room on the card."""
    code, language = code_for(key, "plain", {})
    return Remedy(
        key, cost, "same", {"freed_bytes": freed}, needed_bytes=needed, saving_bytes=0,
        fits=needed <= usable + freed, code=code, language=language,
    )  # fmt: skip


def _other_cards(baseline: MemoryReport, needed: int, situation: Situation) -> Iterator[Remedy]:
    """The smallest card that would do, and sharding over several of this one (arithmetic, not rehearsed)."""
    from oom_magic.predict.setups.gpus import list_gpus

    present = situation.gpu
    larger = [gpu for gpu in list_gpus() if gpu.total_bytes - gpu.context_bytes >= needed]
    if larger and present.total_bytes - present.context_bytes < needed:
        gpu = min(larger, key=lambda card: (card.total_bytes, -card.capability[0]))
        values = {"gpu": gpu.name, "total_bytes": gpu.total_bytes}
        yield Remedy("larger_card", 90, "same", values, needed_bytes=needed, saving_bytes=0, fits=True)
    parts = baseline.breakdown
    sharded = parts["parameter"] + parts["gradient"] + parts["optimizer_state"]
    for number in (2, 4, 8):
        saving = sharded - sharded // number
        if needed - saving <= situation.usable_bytes:
            code, language = code_for("fsdp", situation.style, {"gpus": number})
            yield Remedy(
                "fsdp", 95, "fsdp", {"gpus": number, "saving_bytes": saving}, needed_bytes=needed - saving,
                saving_bytes=saving, fits=None, note="estimate", code=code, language=language,
            )  # fmt: skip
            return
