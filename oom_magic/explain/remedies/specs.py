"""Changes that may help a run, before they are rehearsed: against what, how much they cost, how they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.remedies.rehearsal import Variation
from oom_magic.predict.silence import in_silence

if TYPE_CHECKING:
    from oom_magic.explain.remedies.remedy import Situation
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.what_if.change import Change

# A change that acts on less than this share of the peak is not worth a rehearsal.
_LEAST_SHARE = 0.02
STEP = ("activation", "temporary")  # what a step takes and gives back
_STATE = ("optimizer_state",)
_OF_A_GRAPH = frozenset({"no_grad", "released_gradients", "dropped_outputs", "chunked_loss", "checkpointing"})


@dataclass(frozen=True)
class RemedySpec:
    """A remedy before it is priced.

    ``against`` are the categories that it makes smaller, ``slot`` what it decides: of a slot only one goes into a
    combination. ``variation`` is None where nothing can be rehearsed, for the ``reason`` given.
    """

    key: str
    cost: int
    speed: str
    against: tuple[str, ...]
    variation: Variation | None
    values: Mapping[str, Any] = field(default_factory=dict)
    slot: str = ""
    reason: Evidence | None = None
    combines: bool = True

    @property
    def needs_graph(self) -> bool:
        """Whether it only changes what is kept for a backward."""
        return self.key in _OF_A_GRAPH

    @property
    def acts_on_step(self) -> bool:
        """Whether it makes smaller only what a step takes and gives back."""
        return set(self.against) <= set(STEP)

    def helps(self, report: MemoryReport) -> bool:
        """Whether it acts on enough of a run's peak."""
        parts = report.breakdown
        acted_on = sum(parts[name] for name in self.against)
        if self.slot == "optimizer" and report.peak_phase.value == "optimizer":
            acted_on += parts["temporary"]
        return acted_on >= _LEAST_SHARE * parts.total_bytes


def remedy_specs(situation: Situation) -> list[RemedySpec]:
    """All changes to code that could help some run on this card, the cheapest first."""
    from oom_magic.predict.what_if import load_changes as loading
    from oom_magic.predict.what_if import loop_changes as habits
    from oom_magic.predict.what_if import model_changes as models
    from oom_magic.predict.what_if import optimizer_changes as optimizers
    from oom_magic.predict.what_if import parallel_changes as parallel

    dtype = "bf16" if situation.gpu.capability >= (8, 0) else "fp16"
    half, rank = {"dtype": dtype}, {"rank": 16}
    every = ("parameter", "gradient", "optimizer_state", "activation")
    loop = {"optimizer": "adamw-loop"}
    found = [
        _made("sdpa", 10, "faster", STEP, lambda: models.AttentionKernel("sdpa"), {"attention": "sdpa"}),
        _made("released_gradients", 11, "same", ("gradient",), habits.ReleasedGradients),
        _made("dropped_outputs", 12, "same", STEP, habits.DroppedOutputs, slot="loss"),
        _made("foreach", 15, "optimizer_loop", (), lambda: optimizers.OptimizerOptions(foreach=False), loop,
              slot="optimizer"),
        _made("mixed_precision", 20, "faster", STEP, lambda: models.MixedPrecision(dtype),
              {"precision": f"amp-{dtype}"}, half, "precision"),
        _made("gradients_in_buckets", 13, "same", ("gradient",), parallel.GradientsInBuckets, slot="parallel"),
        _made("resharded", 30, "fsdp", ("temporary", "parameter"), parallel.Resharded, slot="parallel"),
        _made("fully_sharded", 35, "fsdp", every[:3], parallel.FullySharded, slot="parallel"),
        _made("chunked_loss", 25, "same", STEP, models.ChunkedLoss, {"loss": "chunked"}, slot="loss"),
        _made("checkpointing", 40, "checkpointing", ("activation",), models.ActivationCheckpointing,
              {"activation_checkpointing": True}),
        _made("optimizer_8bit", 45, "same", _STATE, optimizers.eight_bit_adamw, {"optimizer": "adamw8bit"},
              slot="optimizer"),
        _made("offload_optimizer", 50, "offload", _STATE, optimizers.offloaded_optimizer, slot="optimizer"),
        _made("half_weights", 60, "faster", every, lambda: models.HalfWeights(dtype), {"precision": dtype}, half,
              "precision"),
        _made("adafactor", 65, "same", _STATE, optimizers.adafactor, {"optimizer": "adafactor"}, slot="optimizer",
              combines=False),
        _made("lora", 70, "faster", every[1:], lambda: models.LowRankAdapters(16), {"method": "lora", **rank}, rank,
              "trained"),
        _made("qlora", 75, "qlora", every[:3], lambda: models.QuantizedAdapters(16), {"method": "qlora", **rank}, rank,
              "trained"),
        _made("sgd", 80, "same", _STATE, optimizers.sgd, {"optimizer": "sgd"}, slot="optimizer", combines=False),
    ]  # fmt: skip
    for bits, cost, speed in ((8, 72, "int8"), (4, 76, "qlora")):
        found.append(
            _made(f"loaded_{bits}bit", cost, speed, every[:1], partial(loading.LoadedQuantized, bits), slot="trained")
        )
    if situation.phase == "loading":
        found = [one for one in found if one.key != "half_weights"]
        found.append(_made("loaded_half", 60, "same", every[:1], lambda: loading.LoadedInHalf(dtype),
                           {"precision": dtype}, half, "precision", combines=False))  # fmt: skip
        reason = Evidence("reason_changes_loading")
        found.append(RemedySpec("offload", 77, "offload", every[:1], None, reason=reason, combines=False))
    growth = situation.growth
    if growth is not None and growth.fixed:
        key = growth.remedy
        values = {"fixed": growth.fixed, "code": growth.code}
        found.insert(0, RemedySpec(key, 0, "same", STEP, Variation(mended=growth), values, key))
    found.insert(0, _made("no_grad", 1, "faster", STEP, models.NoGradients))
    return found


def _made(
    key: str,
    cost: int,
    speed: str,
    against: tuple[str, ...],
    make: Callable[[], Change],
    fields: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    slot: str = "",
    combines: bool = True,
) -> RemedySpec:
    """The candidate of a change, or one with the reason why it cannot be made here."""
    from oom_magic.predict.what_if.change import MissingError

    variation, reason = None, None
    try:
        with in_silence():
            change = make()
        variation = Variation(((change, fields or {}),))
    except MissingError as missing:
        reason = Evidence(f"reason_{missing.key}", missing.values)
    return RemedySpec(key, cost, speed, against, variation, values or {}, slot or key, reason, combines)
