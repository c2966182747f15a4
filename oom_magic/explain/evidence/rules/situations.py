"""Causes by situation, where neither numbers nor frames decide: what ran, on which device, how large it was."""

from __future__ import annotations

import re
from collections.abc import Iterator

from oom_magic.explain.evidence.causes import Cause, Evidence, Support
from oom_magic.explain.evidence.checks import RESERVING
from oom_magic.explain.evidence.clues.environment import ONE_MEMORY
from oom_magic.explain.evidence.clues.programs import ProgramUse
from oom_magic.explain.evidence.clues.traceback import Clues
from oom_magic.explain.evidence.rules.logs import reserved
from oom_magic.explain.evidence.rules.made import MOST_OF_A_CARD, trains, what_was_made
from oom_magic.explain.evidence.rules.numbers import are_light, is_held_by_others
from oom_magic.explain.evidence.rules.texts import computes_plainly, largest_late
from oom_magic.explain.evidence.rules.weights import weights_rules
from oom_magic.explain.messages.failure import Failure
from oom_magic.units import GIB

# Messages without sizes.
_BARE_FORMATS = (
    "told_device", "told_host", "told", "class_only", "short", "cuda_error_oom", "cuda_thc_pre0.4.1", "tensorflow",
    "jax", "paddle",
)  # fmt: skip
_TELLS_MEMORY = ("dataloader", "sigbus")  # they say which memory ran out: no words around them add anything
# A single request of this share is an operation's result: weights of a layer are smaller.
_LARGE_REQUEST_SHARE = 0.05
_LARGE_REQUEST_BYTES = GIB // 2
_LARGEST_DEVICE_BYTES = 512 * GIB  # no GPU has this much: a request for it is a mistake
_AFTER_LOADING = ("kv_cache", "context", "compute", "serving", "logits", "vae")  # stages in which the weights are there
_OF_A_LOG = re.compile(r"\d\d:\d\d:\d\d|\d% ?[|\u2580-\u259f#]")
_AFTER = re.compile(r"\bafter (?:the )?(?:eval|valid|test)", re.I)
_OF_PICTURES = {"of_latents", "diffuses", "makes_pictures"}
_OTHERS = {"left_over", "shares_device", "models_beside"}
# Clues that are enough for a judgement without a message.
_TELLING = {
    "grows", "repeated_use", "dense_pairs", "keeps_graph", "collects_results", "smaller_share_helps",
    "crowds_one_device", "replays", "left_over", "rises_once", "rises_to_a_level", "workers", "full_at_any_size",
    "frees_at_end", "works_without", "sizes_contrast", "lacks_no_grad",
}  # fmt: skip


def situation_rules(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """The results of all rules on the situation."""
    if failure is not None and (failure.is_oom is False or failure.format in _TELLS_MEMORY):
        return
    if _is_of_host(failure, clues):
        yield from _host(failure, clues)
        return
    if failure is None and not _tells_enough(clues):
        return
    yield from _inputs(failure, clues)
    yield from weights_rules(failure, clues)
    yield from _part_of_the_run(clues)
    yield from _over_time(failure, clues)
    yield from reserved(failure, clues)
    yield from _settings(clues)
    yield from _likeliest_of_all(failure, clues)


def _tells_enough(clues: Clues) -> bool:
    """Whether a text without a message says enough to be judged."""
    told = clues.run.told
    return bool(
        told & _TELLING
        or clues.inputs
        or "uses_much" in told
        or (clues.program is not None and clues.program.program.key in RESERVING and "speaks_of_memory" in told)
        or {"larger_input_fails", "speaks_of_memory", "speaks_of_gpu"} <= told
        or {"saves", "speaks_of_memory"} <= told
    )


def _is_of_host(failure: Failure | None, clues: Clues) -> bool:
    """Whether the text is about the computer's own memory."""
    told = clues.run.told
    is_quoted = failure is not None and not failure.format.startswith("told")
    if {"host_fills", "killed"} <= told and failure is not None and failure.pytorch_bytes is None:
        return failure.format in _BARE_FORMATS
    is_of_device = failure is not None and failure.is_of_device
    if is_of_device and (is_quoted or not {"page_file", "mines"} & told):
        return False
    if {"left_over", "ram_is_free"} & told and "host_fills" not in told:
        return False  # memory left by killed processes is the device's
    if failure is None and _OF_PICTURES & told and not {"killed", "page_file", "loads_data"} & told:
        return False  # who trains or runs such a model calls the card's memory RAM, too
    if (
        {"host_fills", "killed", "page_file", "mines"} & told
        or ("shuts_down" in told and failure is None)
        or ("kernel_dies" in told and "speaks_of_gpu" not in told)
        or (failure is not None and failure.backend == "cpu")
    ):
        return True
    writes_results = failure is None and {"saves", "speaks_of_ram"} <= told and "speaks_of_memory" not in told
    if writes_results or ("has_no_gpu" in told and not is_quoted):
        return True
    if "speaks_of_gpu" in told:
        return False
    if "computes_on_host" in told and not is_of_device:
        return clues.program is None
    return bool(
        {"loads_data", "speaks_of_ram", "handles_files", "workers", "is_given_memory"} & told
    ) or computes_plainly(failure, clues)


def _host(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    told = clues.run.told
    if "has_no_gpu" in told:
        yield Support(Cause.HOST_RAM, 0.3)
    if "killed" in told:
        yield Support(Cause.HOST_RAM, 0.55, Evidence("told_killed"))
    if "kernel_dies" in told:
        yield Support(Cause.HOST_RAM, 0.45, Evidence("told_killed"))
    if "host_fills" in told:
        # what is loaded goes through RAM
        is_shown = failure is None and ("grows" in told or clues.phase == "loading")
        yield Support(Cause.HOST_RAM, 0.9 if is_shown else 0.6, Evidence("host_fills"))
    yield from _pages(told)
    if "shuts_down" in told:
        has_two = not ONE_MEMORY & set(clues.systems)
        yield Support(Cause.HOST_RAM, 0.4, Evidence("told_shutdown") if has_two else None)
    if failure is not None and failure.format == "told_host":
        evidence = None if "killed" in told else Evidence("meaning_told", {"words": failure.words})
        is_warning = "exceeds 10% of system memory" in failure.words  # as TensorFlow's is, also where all goes well
        yield Support(Cause.HOST_RAM, 0.2 if is_warning else 0.5, evidence)
    may_be = failure is None or failure.backend is None or failure.format == "told_host"
    if may_be and {"workers", "speaks_of_memory"} <= told and not {"one_worker", "trains_by_settings"} & told:
        yield Support(Cause.HOST_RAM, 0.5, Evidence("told_workers"))
    if "loads_data" in told:
        yield Support(Cause.HOST_RAM, 0.5, Evidence("told_loads_data"))
    elif "handles_files" in told and failure is not None and not clues.frameworks:
        yield Support(Cause.HOST_RAM, 0.45)
    elif "speaks_of_ram" in told and ("speaks_of_gpu" not in told or "saves" in told):
        yield Support(Cause.HOST_RAM, 0.45, Evidence("told_ram_only"))
    elif failure is not None and failure.format.startswith("told") and _names_no_device(failure, clues):
        yield Support(Cause.HOST_RAM, 0.4, Evidence("told_no_device"))
    if "replays" in told:
        yield Support(Cause.HOST_RAM, 0.4, Evidence("replay_buffer"))
    if "computes_on_host" in told and "loads_data" not in told:
        yield Support(Cause.HOST_RAM, 0.5, Evidence("told_host_library"))
    if "is_given_memory" in told:
        yield Support(Cause.HOST_RAM, 0.5, Evidence("told_given"))
    if "offloads_to_host" in told:
        yield Support(Cause.HOST_RAM, 0.2, Evidence("told_offload"))


def _pages(told: frozenset[str]) -> Iterator[Support]:
    """What the author says of the page file, and programs that fill it."""
    if "page_file" in told:
        yield Support(Cause.HOST_RAM, 0.6, Evidence("told_page_file"))
    if "mines" in told and {"speaks_of_ram", "many_ranks"} & told:
        yield Support(Cause.HOST_RAM, 0.55, Evidence("told_mines"))
        yield Support(Cause.ACTIVATIONS, -0.5)


def _names_no_device(failure: Failure, clues: Clues) -> bool:
    return "speaks_of_gpu" not in clues.run.told and computes_plainly(failure, clues)


def _inputs(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """Large inputs, and tensors over all pairs of their elements."""
    requested = None if failure is None else failure.requested_bytes
    told = clues.run.told
    if failure is not None and requested and requested > _LARGEST_DEVICE_BYTES and failure.total_bytes is None:
        evidence = Evidence("request_above_any_device", {"requested_bytes": requested})
        yield Support(Cause.REQUEST_ALONE_TOO_BIG, 0.9, evidence)
    if {"host_fills", "device_idle"} <= told and failure is not None and failure.backend == "cuda":
        yield Support(Cause.HOST_RAM, 0.55, Evidence("host_fills"))
        yield Support(Cause.WEIGHTS_TOO_BIG, -0.6)
    card = (failure.total_bytes if failure is not None else None) or clues.card_bytes or _LARGEST_DEVICE_BYTES
    if clues.array_bytes is not None and clues.array_bytes >= card * MOST_OF_A_CARD:
        array = Evidence("array_above_card", {"array_bytes": clues.array_bytes})
        yield Support(Cause.REQUEST_ALONE_TOO_BIG, 0.75, array)
    if clues.inputs:
        words = ", ".join(one.words for one in clues.inputs[:3])
        yield Support(Cause.ACTIVATIONS, 0.4, Evidence("input_named", {"what": words}))
        yield Support(Cause.FRAGMENTATION, -0.45)
        if any(one.kind == "gaussians" for one in clues.inputs):
            yield Support(Cause.WEIGHTS_TOO_BIG, 0.3, Evidence("gaussians_are_parameters"))
    yield from _of_whole(failure, clues)


def _of_whole(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """What is computed over all tokens, pairs or rows; and inputs of which smaller ones were tried."""
    told = clues.run.told
    if "scores_all" in told and clues.tensor is None and not trains(clues):
        yield Support(Cause.LOGITS_OR_LOSS, 0.5, Evidence("told_scores_all"))
        yield Support(Cause.ACTIVATIONS, -0.3)
    if "dense_pairs" in told:
        yield Support(Cause.REQUEST_ALONE_TOO_BIG, 0.4, Evidence("dense_pairs"))
        yield Support(Cause.ACTIVATIONS, 0.2, Evidence("dense_pairs"))
    if "embeds_many" in told:
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.45, Evidence("told_embeddings"))
        yield Support(Cause.ACTIVATIONS, -0.3)
    stage = None if clues.program is None else clues.program.stage
    if "loaded" in told or (stage is not None and stage.key in _AFTER_LOADING):
        yield Support(Cause.WEIGHTS_TOO_BIG, -0.6)  # they fit
    if "full_batch" in told:
        yield Support(Cause.ACTIVATIONS, 0.4, Evidence("told_whole"))
    yield from what_was_made(clues)
    is_heavy = clues.weights_bytes is not None and not are_light(failure, clues)
    is_in_vain = "smaller_input_no_help" in told or ("tried_size" in told and is_heavy)
    if is_in_vain and not {"smaller_batch_helps", "after_while", "small_net"} & told:
        is_of_optimizer = trains(clues) and not clues.trains_few
        cause = Cause.OPTIMIZER_STATE if is_of_optimizer else Cause.WEIGHTS_TOO_BIG
        yield Support(cause, 0.35, Evidence("smaller_input_no_help"))
        yield Support(Cause.ACTIVATIONS, -0.4)
    if "smaller_input_works" in told:
        yield Support(Cause.ACTIVATIONS, 0.45, Evidence("smaller_input_works"))
        yield Support(Cause.WEIGHTS_TOO_BIG, -0.5)
        yield Support(Cause.FRAGMENTATION, -0.4)


def _of_what_is_computed(told: frozenset[str]) -> Iterator[Support]:
    """What an author says of the sizes of a pass: what is rendered, and what a kernel does not store."""
    if "gaussians_grow" in told:
        yield Support(Cause.ACTIVATIONS, 0.6, Evidence("told_more_gaussians"))
    if "flash_helps" in told:
        yield Support(Cause.ACTIVATIONS, 0.15)


def _part_of_the_run(clues: Clues) -> Iterator[Support]:
    """Loading, saving, evaluating: by the author's words, where no frame shows it."""
    told = clues.run.told
    yield from _of_what_is_computed(told)
    holds_data = clues.program is not None and clues.program.program.key in ("rapids", "boosting")
    if "leaves_devices_idle" in told and "many_ranks" in told and not trains(clues) and not holds_data:
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.6, Evidence("told_idle_devices"))
        yield Support(Cause.ACTIVATIONS, -0.3)
    elif "gives_split" in told and "many_ranks" in told and not trains(clues):
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.3, Evidence("told_split"))
    if clues.frames and clues.phase is not None:
        return
    if "spills" in told:
        yield Support(Cause.SYSMEM_FALLBACK, 0.3, Evidence("told_spills"))
    if "merges" in told and clues.phase is None and "killed" not in told:
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.5, Evidence("told_merging"))
        yield Support(Cause.ACTIVATIONS, -0.4)
    elif "saves" in told and clues.phase is None and "at_optimizer" not in told:
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.5, Evidence("told_saving"))
    elif {"loads", "generates_beside"} <= told and clues.phase is None:
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.5, Evidence("told_generation"))
        yield Support(Cause.ACTIVATIONS, -0.5)
    elif (
        "loads" in told
        and not ({"resumes", "after_while"} & told or clues.run.is_late)
        and not _OF_A_LOG.search(clues.run.quotes.get("loads", ""))  # which goes on after it
        and not (clues.phase or clues.num_trained or clues.is_training)
        and _may_load(clues.program)
    ):
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.4, Evidence("told_loading"))
    if _is_in_evaluation(clues) and trains(clues):
        if "predicts_all" in told:
            yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.65, Evidence("told_gathers"))
            yield Support(Cause.ACTIVATIONS, -0.5)
            return
        ran = "ran_before" in told  # an evaluation alike went well: its size is not what is new
        weight = 0.4 if "training_fits" in told else 0.1 if ran else 0.3
        yield Support(Cause.ACTIVATIONS, weight, Evidence("told_evaluation"))
        if "keeps_predictions" not in told:
            yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.22, Evidence("told_evaluation_collects"))


def _is_in_evaluation(clues: Clues) -> bool:
    """Whether the author says that an evaluation failed, not what comes between it and the next epoch."""
    told, quotes = clues.run.told, clues.run.quotes
    return "evaluates" in told and not ("between_epochs" in told and _AFTER.search(quotes.get("evaluates", "")))


def _may_load(use: ProgramUse | None) -> bool:
    """Whether an author's words about loading add something: no stage is known, and weights are not its usual cause."""
    usual = None if use is None else use.program.default_cause
    return use is None or (use.stage is None and (usual is None or usual[0] is not Cause.WEIGHTS_TOO_BIG))


def _over_time(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """Memory that is not released, and failures that come late or now and then."""
    told = clues.run.told
    if "rises_once" in told:
        yield Support(Cause.OPTIMIZER_STATE, 0.55, Evidence("told_rises_once"))
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, -0.5)
    elif "rises_to_a_level" in told and failure is None:
        yield Support(Cause.ACTIVATIONS, 0.5, Evidence("told_rises_to_a_level"))
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, -0.4)
    is_repeated = "repeated_use" in told and "left_over" not in told  # memory that an ended process left is no leak
    if is_repeated:
        weight = 0.15 if "grows" in told else 0.45  # the same observation in other words
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, weight, Evidence("told_repeated"))
        if not {"larger_input_fails", "larger_batch_fails", "converses"} & told:
            yield Support(Cause.ACTIVATIONS, -0.3)  # one iteration had fitted the first time
    if "frees_at_end" in told and "left_over" not in told:
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.5, Evidence("told_frees_at_end"))
        yield Support(Cause.OTHER_PROCESS, 0.2, Evidence("told_frees_at_end"))
        yield Support(Cause.ACTIVATIONS, -0.5)
    if "replays" in told and "grows_past_buffer" not in told:
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.4, Evidence("replay_buffer"))
        yield Support(Cause.ACTIVATIONS, -0.4)  # such networks are small
    yield from _kept(clues)
    if "converses" in told and not trains(clues):
        yield Support(Cause.ACTIVATIONS, 0.6, Evidence("told_conversation"))
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, -0.5)
    yield from _growth_that_is_no_leak(clues)
    if (is_repeated or "grows" in told) and not (_OTHERS & told or is_held_by_others(failure)):
        yield Support(Cause.OTHER_PROCESS, -0.5)  # on a Mac such numbers count this process, too
    if "after_while" in told and not clues.run.is_late:
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.22, Evidence("told_late"))
        yield Support(Cause.ACTIVATIONS, 0.25, largest_late(clues))
    if {"after_while", "room_at_start"} <= told and not {"varies_in_length", "detects"} & told:
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.4, Evidence("told_room_at_start"))
        yield Support(Cause.ACTIVATIONS, -0.3)
    if "between_epochs" in told:
        yield from _between_epochs(clues)
    if "at_times" in told:
        yield Support(Cause.ACTIVATIONS, 0.2, largest_late(clues))


def _between_epochs(clues: Clues) -> Iterator[Support]:
    """A first epoch that went well: what comes between it and the next, where the author says no more of it."""
    told = clues.run.told
    if not {"grows", "keeps_graph", "repeated_use"} & told and not _is_in_evaluation(clues):
        yield Support(Cause.ACTIVATIONS, 0.27, Evidence("told_between_epochs"))
    yield Support(Cause.OPTIMIZER_STATE, -0.7)
    if not {"saves", "works_without"} & told:  # which copies them
        yield Support(Cause.WEIGHTS_TOO_BIG, -0.7)


def _kept(clues: Clues) -> Iterator[Support]:
    """What the author says is kept: models before this one, graphs, results, the state of metrics."""
    told = clues.run.told
    if "repeats_models" in told and clues.program is not None and clues.program.program.key == "tensorflow":
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.7, Evidence("told_models_in_turn"))
        yield Support(Cause.WEIGHTS_TOO_BIG, -0.7)
        yield Support(Cause.ACTIVATIONS, -0.6)
        yield Support(Cause.ATTENTION_SCORES, -0.6)
    if "keeps_graph" in told and "lacks_no_grad" not in told:
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.5, Evidence("told_graph_kept"))
    if "collects_results" in told:
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.5, Evidence("told_collects"))
    if {"counts_metrics", "grows"} <= told:
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.55, Evidence("told_metrics"))


def _growth_that_is_no_leak(clues: Clues) -> Iterator[Support]:
    """Memory that grows with what comes in: with the requests served, the boxes of a picture, a recording's length."""
    told = clues.run.told
    if {"grows", "caches_keys"} <= told:
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.4, Evidence("told_cache_fills"))
        yield Support(Cause.ACTIVATIONS, 0.2, Evidence("told_cache_fills"))
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, -0.6)
    if {"grows", "grows_with_new"} <= told:
        yield Support(Cause.ACTIVATIONS, 0.55, Evidence("told_new_only"))
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, -0.5)
    if {"grows", "varies_in_length"} <= told and not clues.faults:
        yield Support(Cause.ACTIVATIONS, 0.45, largest_late(clues))
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, -0.4)
    if {"grows", "detects"} <= told and trains(clues) and "infers" not in told:
        yield Support(Cause.ACTIVATIONS, 0.45, Evidence("boxes_vary"))
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, -0.4)
    if {"grows", "hears"} <= told and trains(clues) and not clues.faults:
        yield Support(Cause.ACTIVATIONS, 0.45, Evidence("recordings_vary"))
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, -0.5)
    elif "hears" in told and trains(clues) and not clues.faults:
        yield Support(Cause.ACTIVATIONS, 0.3, Evidence("recordings_vary"))


def _settings(clues: Clues) -> Iterator[Support]:
    """Shares of the device, and gradients, that the author has set or left."""
    told = clues.run.told
    if "full_at_any_size" in told:
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.5, Evidence("told_full_at_any_size"))
        yield Support(Cause.ACTIVATIONS, -0.4)
    evaluates = not trains(clues) or {"infers", "evaluates", "names_evaluation"} & told
    if "lacks_no_grad" in told and evaluates and "grows" not in told:
        yield Support(Cause.ACTIVATIONS, 0.5, Evidence("told_no_grad"))
    if "takes_no_share" in told and "smaller_share_helps" not in told:
        yield Support(Cause.ACTIVATIONS, 0.35, Evidence("told_no_share"))
    elif "names_share" in told and not {"smaller_share_helps", "grows"} & told:
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.45, Evidence("told_share"))
    if "unpinning_helps" in told:
        yield Support(Cause.HOST_RAM, 0.75, Evidence("told_unpinned"))
        yield Support(Cause.WEIGHTS_TOO_BIG, -0.6)
        yield Support(Cause.ACTIVATIONS, -0.6)
    if "smaller_share_helps" in told:
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.65, Evidence("smaller_share_helps"))


def _likeliest_of_all(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """The prior for a full GPU without other evidence: activations, then weights."""
    if failure is None:
        if "uses_much" in clues.run.told and trains(clues):
            yield Support(Cause.ACTIVATIONS, 0.3, Evidence("training_told"))
        return
    if failure.backend == "cpu" or clues.phase in ("loading", "saving", "optimizer_step"):
        return
    is_bare = failure.format in _BARE_FORMATS and failure.pytorch_bytes is None
    if _is_large_request(failure, clues):
        yield Support(
            Cause.ACTIVATIONS, 0.3, Evidence("large_request", {"requested_bytes": failure.requested_bytes or 0})
        )
        yield Support(Cause.WEIGHTS_TOO_BIG, -0.4)
    if not is_bare or (clues.program is not None and clues.program.program.default_cause is not None):
        return
    if clues.is_tiny:
        yield Support(Cause.OTHER_PROCESS, 0.4, Evidence("tiny_run"))
        yield Support(Cause.ACTIVATIONS, -0.5)
    if clues.full_devices:
        yield Support(Cause.OTHER_PROCESS, 0.5, Evidence("device_seen_full", {"used": clues.full_devices}))
    if trains(clues):
        if "batch_of_one" in clues.run.told and not clues.run.is_late:
            yield Support(Cause.WEIGHTS_TOO_BIG, 0.15, Evidence("told_batch_of_one"))
    elif "infers" in clues.run.told:
        yield Support(Cause.ACTIVATIONS, 0.28, Evidence("inference_told"))
    elif "computes" in clues.run.told or clues.has_prose:
        yield Support(Cause.ACTIVATIONS, 0.26, Evidence("computing_told"))


def _is_large_request(failure: Failure, clues: Clues) -> bool:
    """Whether one request is larger than a layer's weights, in a program that allocates each tensor separately."""
    if clues.program is not None and (not clues.program.program.trains or clues.program.program.key == "jax"):
        return False  # XLA asks for all that a program computes in one piece
    requested, total = failure.requested_bytes or 0, failure.total_bytes
    if total is None:
        return 8 * _LARGE_REQUEST_BYTES <= requested <= _LARGEST_DEVICE_BYTES
    return max(total * _LARGE_REQUEST_SHARE, _LARGE_REQUEST_BYTES) <= requested <= total
