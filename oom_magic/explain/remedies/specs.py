"""Candidate changes: the categories they reduce, their cost and how they are applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.remedies.rehearsal import Variation
from oom_magic.explain.remedies.sizes.kinds import SIZES
from oom_magic.predict.silence import silenced

if TYPE_CHECKING:
    from oom_magic.explain.live.growth import Growth
    from oom_magic.explain.remedies.remedy import Situation
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.what_if.change import Change

# A change that acts on less than this share of the peak is not worth a rehearsal.
_LEAST_SHARE = 0.02
STEP = ("activation", "temporary")  # memory that a step allocates and frees
_LEAST_OF_TRITON = (7, 0)  # torch/_dynamo/device_interface.py, CudaInterface.is_triton_capable
_EVERY = ("parameter", "gradient", "optimizer_state", "activation")
_WEIGHTS = ("parameter",)
_STATE = ("optimizer_state",)
# What a change costs with the library that it comes with, and while that is still to be installed; which library it is
# by the style of the loop ("": of any other).
_COSTS_WITH: Mapping[str, tuple[int, int, Mapping[str, str]]] = {
    "chunked_loss": (25, 46, {"trainer": "liger_kernel"}),
    "offload_optimizer": (50, 66, {"trainer": "deepspeed", "": "torchao"}),
}
_OF_A_GRAPH = frozenset(
    {"no_grad", "released_gradients", "dropped_outputs", "chunked_loss", "checkpointing", "compile", "compile_blocks"}
)


@dataclass(frozen=True)
class RemedySpec:
    """A remedy before it is evaluated.

    ``against`` are the categories that it reduces; a combination has one remedy of each ``slot``. ``variation`` is None
    where nothing can be rehearsed, for the ``reason`` given.
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
    def otherwise(self) -> RemedySpec | None:
        """The lines that grow fixed in another way, where code fails with them as they are fixed: with tensors in place
        of numbers, or only the line that grows most; None where there is no other."""
        growth = None if self.variation is None else self.variation.mended
        other = None if growth is None else growth.as_tensors or growth.alone
        return None if other is None else next(_of_growth(other))

    @property
    def is_last(self) -> bool:
        """Whether it is only looked for where nothing else leaves the card safe."""
        return self.key == SIZES["side"].shrinking.key

    @property
    def needs_graph(self) -> bool:
        """Whether it only changes what is saved for a backward."""
        return self.key in _OF_A_GRAPH

    @property
    def is_of_compiler(self) -> bool:
        """Whether it changes what the compiler makes."""
        return self.slot == "compiler"

    @property
    def compiles(self) -> bool:
        """Whether it alone compiles something: its rehearsal takes longest."""
        return self.key == "compile"

    @property
    def acts_on_step(self) -> bool:
        """Whether it reduces only memory that a step allocates and frees."""
        return set(self.against) <= set(STEP)

    def helps(self, report: MemoryReport) -> bool:
        """Whether it acts on enough of a run's peak."""
        return self.most_saved(report) >= _LEAST_SHARE * report.breakdown.total_bytes

    def most_saved(self, report: MemoryReport) -> int:
        """How many bytes of a run's peak it acts on."""
        parts = report.breakdown
        is_in_step = self.slot == "optimizer" and report.peak_phase.value == "optimizer"
        return sum(parts[name] for name in self.against) + (parts["temporary"] if is_in_step else 0)


def remedy_specs(situation: Situation) -> list[RemedySpec]:
    """All changes to code that can help a run on this card, the cheapest first."""
    dtype = "bf16" if situation.gpu.capability >= (8, 0) else "fp16"
    is_loading = situation.phase == "loading"
    found = [
        *_of_growth(situation.growth),
        *_of_model(dtype, situation.style),
        *(_of_compiler() if situation.gpu.capability >= _LEAST_OF_TRITON else ()),
        *_of_training_loop(),
        *_of_optimizer(situation.style),
        *_of_weights(dtype, is_loading, situation.usable_bytes // 2),
        *_of_processes(),
        *_of_cards(),
    ]
    return sorted(found, key=lambda one: one.cost)


def _of_growth(growth: Growth | None) -> Iterator[RemedySpec]:
    """The line that collects tensors, rewritten so that it does not."""
    if growth is not None and growth.fixed:
        of_entries = (*_WEIGHTS, *_STATE) if growth.are_entries else ()  # which may be models
        against = (*STEP, "input", *of_entries)  # a replay buffer has what comes from an environment
        yield RemedySpec(growth.remedy, 0, "same", against, Variation(mended=growth), growth.lines, growth.remedy)


def _of_model(dtype: str, style: str) -> Iterator[RemedySpec]:
    """Changes to what a forward computes and saves."""
    from oom_magic.predict.what_if import model_changes as models

    yield _made("no_grad", 1, "faster", STEP, models.NoGradients)
    yield _made("sdpa", 10, "faster", STEP, lambda: models.AttentionKernel("sdpa"), {"attention": "sdpa"})
    precision = {"precision": f"amp-{dtype}"}
    mixed = partial(models.MixedPrecision, dtype, with_loss=style == "plain")  # as the code to paste has it
    yield _made("mixed_precision", 20, "faster", STEP, mixed, precision, {"dtype": dtype}, "precision")
    yield _made(
        "chunked_loss", _cost("chunked_loss", style), "same", STEP, models.ChunkedLoss, {"loss": "chunked"}, slot="loss"
    )
    fields = {"activation_checkpointing": True}
    yield _made("checkpointing", 40, "checkpointing", ("activation",), models.ActivationCheckpointing, fields)


def _of_compiler() -> Iterator[RemedySpec]:
    """What is compiled, and how."""
    from oom_magic.predict.what_if import compile_changes as compiling

    of_compiler = partial(_made, against=STEP, slot="compiler", combines=False)
    yield of_compiler("compile", 42, "compiled", make=compiling.Compiled)
    yield of_compiler("no_cuda_graphs", 41, "launches", make=compiling.WithoutCudaGraphs)
    yield of_compiler("activation_budget", 43, "recomputed", make=compiling.ActivationBudget)
    yield of_compiler("compile_blocks", 44, "same", make=compiling.CompiledInBlocks)


def _of_training_loop() -> Iterator[RemedySpec]:
    from oom_magic.predict.what_if import loop_changes as loop
    from oom_magic.predict.what_if.kept_classes import KeptClasses

    yield _made("released_gradients", 11, "same", ("gradient",), loop.ReleasedGradients)
    yield _made("batches_moved", 8, "batches", (*_EVERY, "input", "before"), loop.BatchesMoved, combines=False)
    yield _made("eval_accumulation", 3, "same", STEP, loop.GatheredOnHost)
    yield _made("kept_classes", 4, "same", STEP, KeptClasses)
    for parts in (2, 4, 8):
        yield _made("drawn_edges", 56 + parts, "faster", STEP, partial(loop.DrawnEdges, parts), slot="edges")
    yield _made("dropped_outputs", 12, "same", STEP, loop.DroppedOutputs, slot="loss")


def _of_optimizer(style: str) -> Iterator[RemedySpec]:
    """Changes to an optimizer's states and to the memory of its step."""
    from oom_magic.predict.what_if import optimizer_changes as optimizers

    slow, eight_bit = {"optimizer": "adamw-loop"}, {"optimizer": "adamw8bit"}
    foreach = partial(optimizers.OptimizerOptions, foreach=False)
    of_optimizer = partial(_made, slot="optimizer")
    alone = partial(of_optimizer, combines=False)
    yield of_optimizer("foreach", 15, "optimizer_loop", (), foreach, slow)
    yield of_optimizer("optimizer_8bit", 45, "same", _STATE, optimizers.eight_bit_adamw, eight_bit)
    yield of_optimizer(
        "offload_optimizer", _cost("offload_optimizer", style), "offload", _STATE, optimizers.offloaded_optimizer
    )
    yield alone("adafactor", 65, "same", _STATE, optimizers.adafactor, {"optimizer": "adafactor"})
    yield alone("sgd", 80, "same", _STATE, optimizers.sgd, {"optimizer": "sgd"})


def _of_weights(dtype: str, is_loading: bool, part_bytes: int) -> Iterator[RemedySpec]:
    """Changes to the weights' precision and device, and to which of them are trained."""
    from oom_magic.predict.what_if import load_changes as loading
    from oom_magic.predict.what_if import model_changes as models

    rank, half, precision = {"rank": 16}, {"dtype": dtype}, {"precision": dtype}
    if is_loading:
        loaded = partial(loading.LoadedInHalf, dtype)
        yield _made("loaded_half", 60, "same", _WEIGHTS, loaded, precision, half, "precision", combines=False)
    else:
        yield _made(
            "half_weights", 60, "faster", _EVERY, partial(models.HalfWeights, dtype), precision, half, "precision"
        )
        yield _made("single_weights", 9, "faster", _EVERY, models.SingleWeights, slot="precision")
    lora, qlora = {"method": "lora", **rank}, {"method": "qlora", **rank}
    yield _made("lora", 70, "faster", _EVERY[1:], lambda: models.LowRankAdapters(16), lora, rank, "trained")
    yield _made("qlora", 75, "qlora", _EVERY[:3], lambda: models.QuantizedAdapters(16), qlora, rank, "trained")
    for bits, cost, speed in ((8, 72, "int8"), (4, 76, "qlora")):
        yield _made(f"loaded_{bits}bit", cost, speed, _WEIGHTS, partial(loading.LoadedQuantized, bits), slot="trained")
    yield _made("offload", 77, "streamed", _WEIGHTS, partial(loading.LoadedInPart, part_bytes), combines=False)


def _of_processes() -> Iterator[RemedySpec]:
    """Sharding of parameters, gradients and states over the processes of a job."""
    from oom_magic.predict.what_if import placement_changes as parallel

    of_processes = partial(_made, slot="parallel")
    yield of_processes("gradients_in_buckets", 13, "same", ("gradient",), parallel.GradientsInBuckets)
    yield of_processes("resharded", 30, "fsdp", ("temporary", "parameter"), parallel.Resharded)
    yield of_processes("fully_sharded", 35, "fsdp", _EVERY[:3], parallel.FullySharded)
    yield of_processes("shards_on_host", 50, "offload", _EVERY[:3], parallel.ShardsOnHost)


def _of_cards() -> Iterator[RemedySpec]:
    """Placement over several cards of one process."""
    from oom_magic.predict.what_if.placement_changes import BalancedLayers

    yield _made("balanced_layers", 14, "same", _EVERY, BalancedLayers)


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
    """The candidate for a change, or one with the reason why it does not apply here."""
    from oom_magic.predict.what_if.change import MissingError

    variation, reason = None, None
    try:
        with silenced():
            change = make()
        variation, values = Variation(((change, fields or {}),)), change.values or values
    except MissingError as missing:
        reason = Evidence(f"reason_{missing.key}", missing.values)
    return RemedySpec(key, cost, speed, against, variation, values or {}, slot or key, reason, combines)


def _cost(key: str, style: str) -> int:
    """The cost of a change that may come with a library: where that is still to be installed, what runs as it stands
    is advised first."""
    installed, missing, libraries = _COSTS_WITH[key]
    library = libraries.get(style, libraries.get(""))
    return missing if library is not None and find_spec(library) is None else installed


def mends_growth(candidate: RemedySpec) -> bool:
    """Whether it is the remedy for the line that grows."""
    return candidate.variation is not None and candidate.variation.mended is not None
