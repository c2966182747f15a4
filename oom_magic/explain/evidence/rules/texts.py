"""Causes by the text around a message: frames, pasted code, the program, the run, the author's words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from oom_magic.explain.evidence.causes import Cause, Evidence, Support
from oom_magic.explain.evidence.clues.author_setting import words
from oom_magic.explain.evidence.clues.magnitudes import picture_positions
from oom_magic.explain.evidence.clues.traceback import Clues
from oom_magic.explain.evidence.rules.logs import FULL_SHARE, SMALL_FIRST_REQUEST, log_rules
from oom_magic.explain.evidence.rules.numbers import NAMELESS_REQUESTS, OWN_SHARE, TENSOR_CAUSES
from oom_magic.explain.evidence.rules.set_up import set_up_rules
from oom_magic.explain.messages.failure import Failure, rounding_bytes
from oom_magic.units import GIB, MIB

_BY_PHASE = {
    "optimizer_step": (Cause.OPTIMIZER_STATE, 0.75),
    "loading": (Cause.WEIGHTS_TOO_BIG, 0.72),
    "saving": (Cause.WEIGHTS_TOO_BIG, 0.65),
    "evaluation": (Cause.ACTIVATIONS, 0.4),
}
# Faults of pasted code, and the weight of each alone.
_BY_FAULT = {
    "appends_tensors": (Cause.LEAK_OR_RETAINED_REFERENCE, 0.8),
    "sums_tensors": (Cause.LEAK_OR_RETAINED_REFERENCE, 0.7),
    "carries_state": (Cause.LEAK_OR_RETAINED_REFERENCE, 0.65),
    "collects_tensors": (Cause.LEAK_OR_RETAINED_REFERENCE, 0.6),
    "collects_outputs": (Cause.LEAK_OR_RETAINED_REFERENCE, 0.6),
    "stores_tensors": (Cause.LEAK_OR_RETAINED_REFERENCE, 0.55),
    "averages_tensors": (Cause.LEAK_OR_RETAINED_REFERENCE, 0.5),
    "retains_graph": (Cause.LEAK_OR_RETAINED_REFERENCE, 0.5),
    "infers_with_gradients": (Cause.ACTIVATIONS, 0.5),
}
_GATHERS = re.compile(
    r"nested_concat|torch_pad_and_concatenate|pad_across_processes|gather_for_metrics|preds_host|\bpreds = logits"
    r"|all_preds"
    r"|_maybe_log_save_evaluate(?![\s\S]{0,400}_save_checkpoint)|all_gather_object|\.gather\(.*logits"
)
_OF_AN_EVALUATION = words(r"\beval\w*|\bvalid\w*|\btest(?:s|ing)?\b|\bpredict\w*|验证|评估|测试|预测")
_OF_DATA = ("rapids", "thrust", "cupy", "numba")
_SETTLED_SO = re.compile(
    r"\b(?:turning|turned|switching|switched) (?:it |this )?off\b[^.]{0,80}\b(?:fixed|solved)\b", re.I
)
_SERVING = ("vllm", "sglang", "server")
_LARGE_OF_A_SERVER = 0.2
_OF_LATENTS = {"of_latents", "diffuses", "makes_pictures"}
# What a run was said to do without, and what that takes.
_WITHOUT = (
    (Cause.HOST_RAM, words(r"\bcach\w*|\bmemoi[sz]\w*|pre-?load\w*|num_workers|\bworkers\b|persistent_workers")),
    (
        Cause.WEIGHTS_TOO_BIG,
        words(r"(?<!gradient )(?<!gradient_)(?<!activation )checkpoint\w*|\bsav(?:e|ing)\b|\bema\b"),
    ),
    (
        Cause.LEAK_OR_RETAINED_REFERENCE,
        words(r"\blogg\w*|\bmetrics?\b|\bcallbacks?\b|\bhooks?\b|retain_graph|\bhistory\b"),
    ),
)
_OF_ITS_ALLOCATOR = re.compile(r"cumem_allocator")  # vLLM's, which wakes up beside a training
_IN_GENERATION = re.compile(r"[/\\](?:vllm|sglang)[/\\]")
_HEADS_TIMES_BYTES = frozenset(heads * count for heads in (1, 5, 8, 10, 16, 20, 24) for count in (2, 4, 8, 16))
_LAST_STRAW_SHARE = 0.01  # of the device: a request so small says little of what had filled it
# A request this small on a full device says nothing about what filled it.
_SMALL_REQUEST = 200 * MIB
# Texts, recordings, the objects in a picture and graphs differ from batch to batch.
_OF_MANY_SIZES = {"varies_in_length", "attends", "hears", "detects", "of_graphs"}
_TRANSCRIBER_LOADS = re.compile(r"transcribe\.py\"?, line \d+, in (?:__)?init|load_model")
# Today's models were not made for such cards.
_SMALL_CARD = 4 * GIB
_OWN_SHARE_OF_SMALL = 0.5  # the CUDA context takes a good part of the rest
_ONE_PIECE = 8 * GIB
_OF_LATER = {"after_while", "rises_once", "loads", "saves", "merges"}  # which says more of what failed
# Programs that keep a part of the weights in page-locked RAM, and say so.
_OFFLOADS = re.compile(r"loaded partially|MB offloaded|Attempting to release mmap|pin_shared_memory.{1,4}True")
# Where data are made ready, before a step runs.
_DATA_FILE = re.compile(
    r"(?:data_?(?:set|loader|module)?s?|cameras?|camera_utils|scene|load_\w+|\w+_(?:dataset|loader))(?:\.py|[/\\]__init__\.py)$"
)


def text_rules(failure: Failure | None, clues: Clues, text: str) -> Iterator[Support]:
    """The results of all rules on the text."""
    yield from named_tensor(failure, clues, text)
    yield from _phase(failure, clues)
    yield from _gathering(clues)
    yield from _code(clues)
    yield from _program(failure, clues)
    if "generates_beside" in clues.run.told and (_IN_GENERATION.search(clues.trace) or _OF_ITS_ALLOCATOR.search(text)):
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.6, Evidence("told_generation"))
        yield Support(Cause.ACTIVATIONS, -0.5)
    elif "generates_beside" in clues.run.told and not (clues.phase or _OF_LATER & clues.run.told or clues.run.is_late):
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.3, Evidence("told_generation"))
    yield from _one_input(failure, clues)
    yield from _offloaded(failure, clues, text)
    yield from _data_on_device(failure, clues)
    fills = bool({"loads", "after_while"} & clues.run.told) or clues.run.is_late
    yield from log_rules(failure, text, fills=fills)
    yield from _run(failure, clues)
    yield from _differences(failure, clues)
    yield from set_up_rules(failure, clues, text)
    yield from _filled(failure, clues)


def _where(clues: Clues) -> dict[str, int | str]:
    """The line of code that a sentence of evidence shows, or where it stands."""
    frame = clues.frames[-1] if clues.frames else None
    return {"code": clues.code or (f"{Path(frame.path).name}:{frame.line}" if frame is not None else "")}


def named_tensor(failure: Failure | None, clues: Clues, text: str) -> Iterator[Support]:
    """The innermost lines of the traceback name the tensor, or the size asked for is that of a picture's scores."""
    is_large = failure is not None and (failure.requested_bytes or 0) >= SMALL_FIRST_REQUEST
    makes = _OF_LATENTS & clues.run.told or not (clues.is_training or clues.tells_of_training)  # not: reads pictures
    has_room = failure is not None and (failure.free_bytes or 0) >= (failure.requested_bytes or 0)
    if failure is not None and is_large and clues.tensor is None and makes and not has_room:
        # Of several sizes that fit the smallest failed, too.
        for sides, positions in sorted(picture_positions(text).items(), key=lambda one: one[1]):
            if _are_scores(failure.requested_bytes or 0, positions):
                evidence = Evidence("scores_of_picture", {"sides": sides, "positions": positions})
                yield Support(Cause.ATTENTION_SCORES, 0.75, evidence)
                yield Support(Cause.ACTIVATIONS, -0.5)
                return
    if clues.tensor is None or (failure is not None and failure.requested_bytes in NAMELESS_REQUESTS):
        return
    requested, total = (None, None) if failure is None else (failure.requested_bytes, failure.total_bytes)
    is_last_straw = (requested or GIB) < max(64 * MIB, (total or 0) * _LAST_STRAW_SHARE)
    weight = 0.5 if is_last_straw else 0.82
    evidence = Evidence(f"tensor_{clues.tensor}", _where(clues))
    if not evidence.values["code"]:  # the phase was found in code that the author quotes
        weight, evidence = 0.5, Evidence("quoted_tensor")
    yield Support(TENSOR_CAUSES[clues.tensor], weight, evidence)


def _are_scores(requested: int, positions: int) -> bool:
    """Whether the size is that of scores between all positions, for a usual number of heads and pictures."""
    times = round(requested / positions**2)
    return times in _HEADS_TIMES_BYTES and abs(requested - times * positions**2) <= rounding_bytes(requested)


def _phase(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """A phase in which one kind of tensor is allocated: moments in the optimizer, weights while loading."""
    if clues.phase in _BY_PHASE and not (
        clues.program is not None and clues.phase == "loading" and clues.program.stage
    ):
        cause, weight = _BY_PHASE[clues.phase]
        if failure is None:
            weight = min(weight, 0.2 if "host_fills" in clues.run.told else 0.55)
        elif failure.pytorch_bytes is None:
            weight = min(weight, 0.62)
        yield Support(cause, weight, Evidence(f"phase_{clues.phase}", _where(clues)))


def _gathering(clues: Clues) -> Iterator[Support]:
    """An evaluation that keeps every batch's logits until its end."""
    match = _GATHERS.search(clues.trace)
    if match is not None:
        weight = 0.8 if match.group() != "_maybe_log_save_evaluate" else 0.45
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, weight, Evidence("gathers_predictions"))
        yield Support(Cause.ACTIVATIONS, -0.5)
    elif {"grows", "evaluates", "trains"} <= clues.run.told and _grows_in_evaluation(clues):
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.5, Evidence("grows_in_evaluation"))
        yield Support(Cause.ACTIVATIONS, -0.3)
    elif "keeps_predictions" in clues.run.told and "evaluates" in clues.run.told:
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.6, Evidence("told_gathers"))


def _grows_in_evaluation(clues: Clues) -> bool:
    """Whether the author says of an evaluation that memory grows in it, of which no frame tells more."""
    if "host_fills" in clues.run.told:  # in RAM, where results are collected
        return False
    says_when = _OF_AN_EVALUATION.search(clues.run.quotes.get("grows", "")) is not None
    return says_when and clues.phase != "evaluation" and "counts_metrics" not in clues.run.told


def _code(clues: Clues) -> Iterator[Support]:
    if clues.program is not None and not clues.program.program.is_torch and "uses_torch" not in clues.run.told:
        return  # other libraries keep no graphs from one call to the next
    for fault in clues.faults:
        cause, weight = _BY_FAULT[fault.kind]
        if clues.run.is_start and cause is Cause.LEAK_OR_RETAINED_REFERENCE:
            weight /= 2  # a first step has nothing yet to keep
        yield Support(cause, weight, Evidence(f"code_{fault.kind}", {"line": fault.code}))


def _program(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """Causes by the stage that failed, or by the program's own share of the device."""
    use = clues.program
    if use is None:
        return
    said = use.program.said
    if use.stage is not None:
        key = f"stage_{use.stage.key}"
        told = {**said, "is_told": 1} if use.is_told else said
        yield Support(use.stage.cause, use.stage.weight, Evidence(key, told))
    elif use.program.default_cause is not None:
        cause, weight = use.program.default_cause
        if "grows" in clues.run.told and use.program.key not in _OF_DATA:
            weight *= 0.6  # an earlier answer fitted
        yield Support(cause, weight, Evidence("program_seen", said))
    if failure is None or use.budget is None or not failure.total_bytes or failure.pytorch_bytes is None:
        return
    if use.stage is not None and use.stage.key == "profiling":
        return  # its share is allotted after that
    share = failure.pytorch_bytes / failure.total_bytes
    values: dict[str, int | str] = {
        **said,
        "held_bytes": failure.pytorch_bytes,
        "total_bytes": failure.total_bytes,
        "percent": round(100 * use.budget),
    }
    if share > use.budget + 0.02 and (failure.stuck_bytes or 0) < failure.pytorch_bytes * 0.04:
        # Its cache is cut to its share, so weights that are still loading must have gone beyond it.
        is_serving = use.stage is not None and use.stage.key in ("serving", "graphs", "logits")
        cause = Cause.MEMORY_FRACTION_LIMIT if is_serving or use.program.key == "sglang" else Cause.WEIGHTS_TOO_BIG
        yield Support(cause, 0.65, Evidence("above_own_share", values))


def _one_input(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """A server that asks for a good part of the device in one piece while it computes: what came in is large."""
    if clues.program is None or clues.program.program.key not in _SERVING:
        return
    if clues.phase != "forward" and clues.frames:
        return
    requested, total = (None, None) if failure is None else (failure.requested_bytes, failure.total_bytes)
    if requested and total and total * _LARGE_OF_A_SERVER <= requested <= total and clues.tensor is None:
        yield Support(Cause.ACTIVATIONS, 0.65, Evidence("large_request", {"requested_bytes": requested}))
        yield Support(Cause.MEMORY_FRACTION_LIMIT, -0.4)


def _offloaded(failure: Failure | None, clues: Clues, text: str) -> Iterator[Support]:
    """Weights that wait in page-locked RAM: the driver's message, without PyTorch's numbers, can be about that RAM."""
    if failure is None or failure.format != "cuda_error_oom" or clues.program is None or not _OFFLOADS.search(text):
        return
    yield Support(Cause.DRIVER_LEVEL, 0.5, Evidence("offloaded_pinned", clues.program.program.said))
    yield Support(Cause.ACTIVATIONS, -0.4)


def _data_on_device(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """A whole dataset that is moved to the device: the failing line is in the code that prepares the data."""
    if failure is None or failure.backend in ("cpu", None) or not clues.frames:
        return
    frame = clues.frames[-1]
    is_set_up = frame.function in ("__init__", "setup", "prepare_data") or "load" in frame.function.lower()
    if is_set_up and _DATA_FILE.search(frame.path):
        yield Support(Cause.ACTIVATIONS, 0.5, Evidence("data_on_device", _where(clues)))
        yield Support(Cause.WEIGHTS_TOO_BIG, -0.6)


def computes_plainly(failure: Failure | None, clues: Clues) -> bool:
    """Whether memory ran out in a program about which the text mentions neither a device nor machine learning."""
    has_none = not {"learns", "trains", "infers", "makes_pictures", "of_no_tokens"} & clues.run.told
    return failure is not None and has_none and not (clues.program or clues.frames or clues.inputs)


def _growing(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """Memory that grows by its author's words, and memory that is full before a model is there."""
    told = clues.run.told
    if "grows" in told:
        is_of_data = clues.program is not None and clues.program.program.key in _OF_DATA
        in_one_piece = 0 if failure is None or failure.pytorch_bytes is not None else failure.requested_bytes or 0
        weight = (
            0.2 if is_of_data or in_one_piece >= _ONE_PIECE else 0.5
        )  # a single sort or merge grows until it is done
        if in_one_piece >= _ONE_PIECE:  # what is kept bit by bit asks for no such piece
            yield Support(Cause.ACTIVATIONS, 0.4, Evidence("large_request", {"requested_bytes": in_one_piece}))
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, weight, Evidence("memory_grows"))
        yield Support(Cause.WEIGHTS_TOO_BIG, -0.6)  # they are there, and do not grow
    if "before_loading" in told:  # by which nothing of the model's can be there
        yield Support(Cause.DRIVER_LEVEL, 0.4, Evidence("told_before_loading"))
        yield Support(Cause.REQUEST_ALONE_TOO_BIG, -0.4)
        yield from (Support(one, -0.8) for one in (Cause.ACTIVATIONS, Cause.WEIGHTS_TOO_BIG))
        yield Support(Cause.REQUEST_ALONE_TOO_BIG, -0.6)


def _run(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """Causes by the progress of the run and its author's observations."""
    run, told = clues.run, clues.run.told
    yield from _growing(failure, clues)
    if "smaller_batch_helps" in told and "resumes" not in told:  # it was small enough before
        yield Support(Cause.ACTIVATIONS, 0.6, Evidence("smaller_batch_helps"))
        yield Support(Cause.FRAGMENTATION, -0.3)
    if "larger_batch_fails" in told:
        yield Support(Cause.ACTIVATIONS, 0.5, Evidence("larger_batch_fails"))
        yield Support(Cause.FRAGMENTATION, -0.4)
    if "larger_input_fails" in told and not computes_plainly(failure, clues):
        yield Support(Cause.ACTIVATIONS, 0.4, Evidence("larger_input_fails"))
        yield Support(Cause.FRAGMENTATION, -0.3)
    if failure is None or failure.backend != "cpu":
        yield from _others_told(clues)
    if "blames_fragments" in told:
        yield Support(Cause.FRAGMENTATION, 0.5, Evidence("told_pieces"))
        yield Support(Cause.ACTIVATIONS, -0.3)
    elif {"fragments", "varies_in_length"} <= told:
        yield Support(Cause.FRAGMENTATION, 0.4, Evidence("told_fragmented"))
    if run.is_late and clues.phase != "optimizer_step":
        yield Support(Cause.OPTIMIZER_STATE, -0.7)  # which the first step makes
    may_train = clues.program is None or clues.program.program.trains
    if run.is_late and may_train and clues.phase not in ("optimizer_step", "loading"):
        count = run.num_steps or 0
        key, values = ("late_steps", {"count": count}) if count else ("late_epochs", {"count": run.num_epochs or 0})
        if clues.faults or "grows" in told:
            yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.4, Evidence(key, values))
        elif clues.phase != "evaluation":
            had_all = (run.num_epochs or 0) > 2  # each epoch brings the same data
            yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.45 if had_all else 0.2, Evidence(key, values))
            later = Evidence("late_at_round_step") if run.is_round else largest_late(clues)
            yield Support(Cause.ACTIVATIONS, 0.15 if had_all else 0.3, later)
    if run.is_start and clues.phase in ("forward", "backward", "loss"):
        yield Support(Cause.ACTIVATIONS, 0.35, Evidence("first_steps_fail", {"count": run.num_steps or 0}))
    if "indexes" in told and failure is not None and failure.format in ("cublas", "cudnn", "cuda_error_oom"):
        yield Support(Cause.NOT_OOM, 0.65, Evidence("index_error_beside"))
        yield Support(Cause.DRIVER_LEVEL, -0.6)


def _differences(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """What the author saw make a difference: it tells more than what is usual."""
    told, is_of_host = clues.run.told, failure is None or failure.backend in (None, "cpu")
    if "sizes_contrast" in told and not (failure is not None and failure.backend == "cpu"):
        yield Support(Cause.ACTIVATIONS, 0.6, Evidence("told_contrast"))
        yield Support(Cause.FRAGMENTATION, -0.3)
    without = clues.run.quotes.get("works_without", "")
    for cause, pattern in _WITHOUT:
        if without and pattern.search(without) and (is_of_host or cause is not Cause.HOST_RAM):
            yield Support(cause, 0.6, Evidence("told_without"))
            yield Support(Cause.ACTIVATIONS, -0.5)
            break
    else:
        if without and not is_of_host and _SETTLED_SO.search(without):
            yield Support(Cause.ACTIVATIONS, 0.5, Evidence("told_runs_without"))
        if without and "loads" not in told:
            yield Support(Cause.WEIGHTS_TOO_BIG, -0.6)  # they fitted
    if "fewer_layers_help" in told:
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.55, Evidence("told_fewer_layers"))
        yield Support(Cause.ACTIVATIONS, -0.3)
    if "higher_limit_helps" in told:
        yield Support(Cause.MEMORY_FRACTION_LIMIT, 0.6, Evidence("told_higher_limit"))
        yield Support(Cause.ACTIVATIONS, -0.5)
        yield Support(Cause.HOST_RAM, -0.6)
    if "ran_before" in told and not {"grows", "was_updated", "evaluates"} & told and not is_of_host:
        yield Support(Cause.OTHER_PROCESS, 0.4, Evidence("told_ran_before"))


def largest_late(clues: Clues) -> Evidence | None:
    """That a later batch may be the largest, where something shows that batches differ in size."""
    return Evidence("largest_batch_late") if _OF_MANY_SIZES & clues.run.told else None


def _others_told(clues: Clues) -> Iterator[Support]:
    """Other users of the device that the text speaks of."""
    told = clues.run.told
    if "copies_of_model" in told:  # of one server, and no other's
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.5, Evidence("told_copies"))
    elif "shares_device" in told and "alone" not in told:
        yield Support(Cause.OTHER_PROCESS, 0.55, Evidence("told_shared"))
    if "models_beside" in told:
        yield Support(Cause.OTHER_PROCESS, 0.5, Evidence("told_models_beside"))
        yield Support(Cause.ACTIVATIONS, -0.3)
    if "left_over" in told:
        yield Support(Cause.OTHER_PROCESS, 0.5, Evidence("told_left_over"))
        yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, 0.2, Evidence("told_left_over"))
        if not clues.faults:
            yield Support(Cause.LEAK_OR_RETAINED_REFERENCE, -0.4)  # what a process kept ends with it


def _is_filled_by_own(failure: Failure) -> bool:
    """Whether PyTorch itself holds most of the device."""
    allocated, total = failure.pytorch_bytes, failure.total_bytes
    if allocated is None or not total:
        return False
    return allocated >= total * (_OWN_SHARE_OF_SMALL if total <= _SMALL_CARD else OWN_SHARE)


def _transcriber(clues: Clues) -> Iterator[Support]:
    """CTranslate2's message, which has no numbers."""
    yield Support(Cause.ACTIVATIONS, 0.3, Evidence("meaning_ctranslate2"))
    yield Support(Cause.WEIGHTS_TOO_BIG, 0.25, Evidence("meaning_ctranslate2"))
    if _TRANSCRIBER_LOADS.search(clues.trace):
        yield Support(Cause.WEIGHTS_TOO_BIG, 0.5, Evidence("phase_loading", _where(clues)))


def _loads_for_inference(clues: Clues) -> bool:
    """Whether weights that stay while pictures or tokens are made are most of what fills the device."""
    if clues.program is None:
        return "generates_tokens" in clues.run.told
    return clues.program.program.key in ("diffusers", "diffusion", "webui", "comfyui")


def _filled(failure: Failure | None, clues: Clues) -> Iterator[Support]:
    """The likely category of tensors on a device that PyTorch has filled."""
    told, program = clues.run.told, clues.program
    trains = clues.is_training or clues.tells_of_training
    in_step = clues.phase in ("forward", "backward", "loss")
    if failure is None or failure.backend == "cpu":
        if failure is None and trains and clues.phase == "backward":
            yield Support(Cause.ACTIVATIONS, 0.4, Evidence("phase_backward", _where(clues)))
        return
    held, total = failure.pytorch_bytes, failure.total_bytes
    is_full = _is_filled_by_own(failure)
    if held is not None and total and not is_full:
        return
    if failure.format == "ctranslate2":
        yield from _transcriber(clues)
    values: dict[str, int | str] = {"held_bytes": held or 0, "total_bytes": total or 0}
    if trains and clues.is_training and in_step and is_full:
        yield Support(Cause.ACTIVATIONS, 0.45, Evidence("own_tensors_fill", values))
        yield Support(Cause.ACTIVATIONS, 0.2, Evidence(f"phase_{clues.phase}", _where(clues)))
    elif clues.is_training and in_step:
        yield Support(Cause.ACTIVATIONS, 0.4, Evidence(f"phase_{clues.phase}", _where(clues)))
    elif (
        trains and (program is None or program.program.trains) and clues.phase not in _BY_PHASE and "saves" not in told
    ):
        evidence = Evidence("own_tensors_fill", values) if is_full else Evidence("training_told")
        yield Support(Cause.ACTIVATIONS, 0.32, evidence)
    elif is_full and _loads_for_inference(clues):
        is_packed = held is not None and total and held >= total * FULL_SHARE
        if is_packed and (failure.requested_bytes or GIB) <= _SMALL_REQUEST:
            yield Support(Cause.WEIGHTS_TOO_BIG, 0.5, Evidence("small_request_on_full", values))
    elif in_step and program is None and not clues.is_training:
        yield Support(Cause.ACTIVATIONS, 0.35, Evidence(f"phase_{clues.phase}", _where(clues)))
    elif is_full and program is None:
        has_weights = "evaluates" in told  # a model that is evaluated has been loaded
        yield Support(Cause.ACTIVATIONS, 0.32 if has_weights else 0.2, Evidence("own_tensors_fill", values))
        if not has_weights:
            yield Support(Cause.WEIGHTS_TOO_BIG, 0.12, Evidence("own_tensors_fill", values))
    if is_full and (total or 0) <= _SMALL_CARD and clues.phase not in _BY_PHASE:
        yield Support(Cause.ACTIVATIONS, 0.25, Evidence("small_card", {"total_bytes": total or 0}))
