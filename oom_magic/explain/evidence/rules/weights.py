"""Causes by the weights of the model that a text names, beside the card that it names."""

from __future__ import annotations

from collections.abc import Iterator

from oom_magic.explain.evidence.causes import Cause, Evidence, Support
from oom_magic.explain.evidence.clues.magnitudes import ADAM_BYTES, Weights
from oom_magic.explain.evidence.clues.traceback import Clues
from oom_magic.explain.evidence.rules.made import MOST_OF_A_CARD, trains
from oom_magic.explain.evidence.rules.numbers import are_light, as_written, card_of
from oom_magic.explain.messages.failure import Failure
from oom_magic.units import GIB

_LARGE_PART = 0.7  # beside which a program's context and work hardly fit
_NOT_WHOLE = {"shards", "swaps_blocks", "keeps_in_ram", "offloads_parts"}  # weights that are not on one card as a whole
_BITS_OF_A_NAME = 16  # where a text says none
_LARGE_WEIGHTS = 12 * GIB  # most cards hold no more


def weights_rules(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """The results of all rules on weights."""
    yield from _trained(failure, clues)
    yield from _light_weights(failure, clues)
    if "smaller_model_works" in clues.run.told and not trains(clues):
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.5, Evidence("told_smaller_model"))
    if clues.weights is not None and _are_whole(clues.weights, clues):
        yield from _beside_ram(clues.weights, failure, clues)
        yield from _beside_card(clues.weights, failure, clues)
        yield from _in_more_bits(clues.weights, failure, clues)
        yield from _with_state(clues.weights, failure, clues)


def _trained(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """The parameters that a log counts as trained, with what Adam keeps of each."""
    card = card_of(failure, clues)
    if clues.num_trained and card and clues.num_trained * ADAM_BYTES > card and not _NOT_WHOLE & clues.run.told:
        state: dict[str, int | str] = {
            "count": f"{clues.num_trained:,}",
            "state_bytes": clues.num_trained * ADAM_BYTES,
            "total_bytes": as_written(card, failure),
        }
        yield Support(Cause.OPTIMIZER_STATE, 0.6, Evidence("trained_fill_card", state))


def _beside_ram(named: Weights, failure: Failure | None, clues: Clues) -> Iterator[Support]:
    if failure is not None and failure.is_of_device:
        return
    if clues.ram_bytes is not None and clues.ram_bytes < named.num_bytes and "loads" in clues.run.told:
        values = {**named.said, "ram_bytes": f"{clues.ram_bytes // GIB} GB"}
        yield Support(Cause.HOST_RAM, 0.55, Evidence("weights_above_ram", values))


def _beside_card(named: Weights, failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """The weights beside the card; each rank that does not shard holds all of them."""
    told, weights, card = clues.run.told, named.num_bytes, card_of(failure, clues)
    if card is None:
        if weights >= _LARGE_WEIGHTS and not trains(clues) and clues.program is None and not clues.inputs:
            weight = 0.5 if weights >= 2 * _LARGE_WEIGHTS else 0.32
            yield Support(Cause.WEIGHTS_TOO_BIG, weight, Evidence("weights_named", named.said))
        return
    values = {**named.said, "total_bytes": as_written(card, failure)}
    fills = "weights_fill_mac" if failure is not None and failure.backend == "mps" else "weights_fill_card"
    if card * MOST_OF_A_CARD < weights < card * clues.num_cards * MOST_OF_A_CARD:
        values["count"] = clues.num_cards
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.35, Evidence("weights_fill_one_card", values))
    elif weights > card * MOST_OF_A_CARD:
        is_split = "many_ranks" in told and not trains(clues)  # as inference does over several cards
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.25 if is_split else 0.6, Evidence(fills, values))
    elif are_light(failure, clues):
        yield Support(Cause.WEIGHTS_TOO_BIG, -0.6)  # they fit, whatever else does not
    elif "many_ranks" not in told and weights > card * _LARGE_PART:
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.25 if clues.program is not None else 0.3, Evidence(fills, values))


def _in_more_bits(named: Weights, failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """Weights of which the text gives no precision: in 32 bits, as transformers before 5 loads them, they do not fit.

    Of the reports that name a model and a card, in most of those in which only that is so the thread found it.
    """
    card, is_open = card_of(failure, clues), named.bits == _BITS_OF_A_NAME and not named.is_in_half
    is_silent = failure is None or failure.pytorch_bytes is None  # else its sizes say more
    is_other = trains(clues) or clues.inputs or {"many_ranks", "lacks_no_grad"} & clues.run.told
    may_be = is_open and is_silent and clues.program is None and not is_other
    if card is not None and may_be and named.num_bytes <= card * _LARGE_PART and 2 * named.num_bytes > card:
        values = {**named.said, "bits": 32, "weights_bytes": 2 * named.num_bytes}
        values |= {"total_bytes": as_written(card, failure)}
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.5, Evidence("weights_in_32_bits", values))


def _with_state(named: Weights, failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """Weights that are all trained: with their gradients and Adam's state they are several times as large."""
    told, card = clues.run.told, card_of(failure, clues)
    is_whole = trains(clues) and not (clues.trains_few or {"is_quantized", "has_8bit_optimizer"} & told)
    went_well = clues.run.is_late or {"after_while", "at_times"} & told  # the first step makes the state
    if card is None or not is_whole or went_well or named.num_bytes > card * _LARGE_PART:
        return
    room = card * (clues.num_cards if "many_ranks" in told else 1)  # which may share it
    is_known = "many_ranks" not in told or clues.num_cards > 1  # else how many share it is not
    if is_known and named.state_bytes > room * MOST_OF_A_CARD:
        values = {**named.said, "total_bytes": as_written(card, failure)}
        yield Support(Cause.OPTIMIZER_STATE, 0.5, Evidence("adam_fills_card", values))


def _are_whole(named: Weights, clues: Clues) -> bool:
    """Whether weights are on the device as a whole, in as many bits as they are read as."""
    told = clues.run.told
    is_in_fewer_bits = "is_quantized" in told and named.bits >= _BITS_OF_A_NAME  # in how many is not said
    return not (_NOT_WHOLE & told or clues.is_quantizing or is_in_fewer_bits)  # quantizers keep one layer at a time


def _light_weights(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """Weights that are a small part of their card and yet could not be loaded: something else holds it."""
    stage = None if clues.program is None else clues.program.stage
    is_unknown = failure is None or failure.pytorch_bytes is None  # whose memory it is
    is_loading = stage is not None and stage.key == "loading"
    if clues.weights is not None and is_loading and is_unknown and are_light(failure, clues):
        values = {**clues.weights.said, "total_bytes": as_written(card_of(failure, clues) or 0, failure)}
        yield from (Support(one, -0.7) for one in (Cause.WEIGHTS_TOO_BIG, Cause.ACTIVATIONS))
        yield Support(Cause.OTHER_PROCESS, 0.5, Evidence("weights_light", values))
