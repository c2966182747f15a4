"""What an author says was being made when memory ran out: the optimizer's state, a KV cache."""

from __future__ import annotations

from collections.abc import Iterator

from oom_magic.explain.evidence.causes import Cause, Evidence, Support
from oom_magic.explain.evidence.checks import SERVERS
from oom_magic.explain.evidence.clues.traceback import Clues
from oom_magic.explain.evidence.rules.numbers import card_of

MOST_OF_A_CARD = 0.85


def what_was_made(clues: Clues) -> Iterator[Support]:
    """The causes for which an author names the thing that did not fit."""
    yield from _of_cache(clues)
    yield from _of_optimizer(clues)


def trains(clues: Clues) -> bool:
    """Whether a text is about training."""
    return clues.is_training or clues.tells_of_training


def _of_cache(clues: Clues) -> Iterator[Support]:
    """A KV cache that an author names as what was allocated."""
    if "fills_cache" in clues.run.told:
        serves = clues.program is not None and clues.program.program.key in SERVERS
        yield Support(Cause.MEMORY_FRACTION_LIMIT if serves else Cause.ACTIVATIONS, 0.6, Evidence("told_kv_cache"))
        yield Support(Cause.WEIGHTS_TOO_BIG, -0.5)


def _of_optimizer(clues: Clues) -> Iterator[Support]:
    """What the author says of the optimizer and its state."""
    told = clues.run.told
    if "at_optimizer" in told:
        yield Support(Cause.OPTIMIZER_STATE, 0.6, Evidence("told_at_optimizer"))
        if "resumes" in told:
            yield Support(Cause.OPTIMIZER_STATE, 0.1, Evidence("checkpoint_kept"))
        yield Support(Cause.ACTIVATIONS, -0.5)
    if "offload_helps" in told:
        cause = Cause.OPTIMIZER_STATE if trains(clues) and not clues.trains_few else Cause.WEIGHTS_TOO_BIG
        yield Support(cause, 0.55, Evidence("told_offload_helps"))
        yield Support(Cause.ACTIVATIONS, -0.4)
    if "trains_whole" in told and _has_whole_state(clues):
        yield Support(Cause.OPTIMIZER_STATE, 0.4, Evidence("told_trains_whole"))
    if "adam_costs" in told:
        yield Support(Cause.OPTIMIZER_STATE, 0.6, Evidence("told_adam"))
        yield Support(Cause.ACTIVATIONS, -0.4)


def _has_whole_state(clues: Clues) -> bool:
    """Whether the run that trains all weights of a language model had not come to a step whose state was there."""
    told, run = clues.run.told, clues.run
    went_well = (
        run.is_late or (run.num_steps or 0) > 1 or {"after_while", "training_fits", "evaluates", "resumes"} & told
    )
    card = card_of(None, clues)
    if card and clues.weights_bytes and clues.weights_bytes > card * MOST_OF_A_CARD:
        return False  # they alone do not fit
    return not went_well and clues.phase in (None, "optimizer_step", "loading") and not clues.trains_few
