"""What kind of run a text is about: training or not, of a model of tokens or another, in PyTorch or elsewhere."""

from __future__ import annotations

import ast
import contextlib
from typing import TYPE_CHECKING

from oom_magic.explain.evidence.causes import INPUT_CAUSES, Cause
from oom_magic.explain.evidence.checks import shows_pytorch
from oom_magic.explain.evidence.judging import IN_ANY_MESSAGE

if TYPE_CHECKING:
    from oom_magic.explain.diagnosis import Diagnosis

# Statements by authors about runs that train.
_TOLD_OF_TRAINING = {"trains", "training_fits", "adam_costs"}
_TRAINERS = {"transformers Trainer", "deepspeed", "FSDP", "Lightning"}
_OF_TRANSFORMERS = ("transformers Trainer", "PEFT", "vLLM", "bitsandbytes")
_OF_RANKS = {"deepspeed", "FSDP"}
# What a run at hand requested, where that shows nothing of its model.
_OF_ANY_MODEL = ("result", "copy", "gradient", "optimizer_state", "concatenation", "parameter")
CUDA_IN_CODE = ("cuda", "hip")  # ROCm builds of PyTorch say "cuda", too
_WITHOUT_BATCH = {"of_graphs", "of_one_scene", "one_graph", "splats", "by_boosting", "replays"}
_DESCRIBED = {"trains", "infers", "evaluates"}
_STYLES = {"transformers Trainer": "trainer", "accelerate": "accelerate", "deepspeed": "accelerate"}
_HOSTED = {"Kaggle", "Colab"}
_SHORT_CONTEXT = 2048  # tokens; what programs set by themselves where they set little
_LARGEST_SHARE = 0.95  # of a server's; the rest is the driver's and the context's
_MAY_KEEP_GRAPHS = {"evaluates", "infers", "lacks_no_grad", "keeps_predictions"}
_EVALUATING = {"names_evaluation", "evaluates", "infers", "in_evaluation"}
_WITHOUT_NO_GRAD = {"code_infers_with_gradients", "told_no_grad"}
_OF_THE_RUN = ("has_", "tried_")  # what it has, and what was tried in vain
_COUNTED_IN_HALF = {"weights_fill_card", "weights_fill_mac"}
_OF_WEIGHTS = ("loading", "saving", "optimizer_step")  # where no input is computed
# Facts of a run at hand, whose code and data are the user's.
_AT_HAND = {
    "of_pytorch", "fine_tunes", "own_loop", "in_notebook", "trains", "loads_data", "may_keep_graphs",
    "infers_with_graphs", "many_ranks", "names_adam",
}  # fmt: skip
_OF_NEW_STATE = "zeros_like("  # where the state is made; temporary copies come after it
_OF_EACH_TENSOR = "exp_avg_sq.sqrt()"  # torch/optim/adam.py, _single_tensor_adam: without foreach


def trains(diagnosis: Diagnosis) -> bool:
    """Whether the text, or the run described with it, is about training."""
    if "in_evaluation" in diagnosis.told and not diagnosis.setup_phrases:
        return False
    in_step = diagnosis.phase in ("backward", "loss", "optimizer_step")
    trainers = _TRAINERS & set(diagnosis.frameworks) - (set() if diagnosis.place else _OF_RANKS)  # names in prose
    is_trainer = bool(trainers) and "infers" not in diagnosis.told
    told = diagnosis.told - {"training_fits"} if "infers" in diagnosis.told else diagnosis.told  # it came before
    is_told = bool(_TOLD_OF_TRAINING & told or diagnosis.setup_phrases)
    return is_told or in_step or is_trainer


def trains_in_pytorch(diagnosis: Diagnosis, facts: frozenset[str]) -> bool:
    """Whether inputs filled the device in a training, and the message has the numbers of PyTorch's allocator."""
    failure = diagnosis.main_failure
    is_training = trains(diagnosis) and "may_evaluate" not in facts and diagnosis.cause in INPUT_CAUSES
    return is_training and failure is not None and failure.pytorch_bytes is not None


def is_evaluation(diagnosis: Diagnosis) -> bool:
    """Whether an evaluation ran out of memory, by its frames, or else by its author's words."""
    told = diagnosis.phase is None and any(one.key == "told_evaluation" for one in diagnosis.evidence)
    return diagnosis.cause is Cause.ACTIVATIONS and (diagnosis.phase == "evaluation" or told)


def has_ranks(diagnosis: Diagnosis) -> bool:
    """Whether each process holds a model of its own, or a shard."""
    return bool(_OF_RANKS & set(diagnosis.frameworks))


def is_of_tokens(diagnosis: Diagnosis) -> bool:
    """Whether it may be a language model; False where an author describes a run and mentions nothing of the kind."""
    return names_tokens(diagnosis) or "trains" not in diagnosis.told


def names_tokens(diagnosis: Diagnosis) -> bool:
    """Whether something shows that the model is one of tokens."""
    if "of_latents" in diagnosis.told:
        return False
    is_set_up = diagnosis.setup_phrases or any(one.name not in _OF_ANY_MODEL for one in diagnosis.tensors)
    may_be = set(_OF_TRANSFORMERS) & set(diagnosis.frameworks) and "sees_pictures" not in diagnosis.told
    return bool(is_set_up or "of_text" in diagnosis.told or may_be)


def shows_transformers(diagnosis: Diagnosis) -> bool:
    """Whether code of transformers is the author's, or a bare message leaves it open."""
    return names_tokens(diagnosis) and ("uses_transformers" in diagnosis.told or not diagnosis.told & _DESCRIBED)


def is_of_pytorch(diagnosis: Diagnosis) -> bool:
    """Whether the message, or the text around it, is PyTorch's."""
    return shows_pytorch(diagnosis.main_failure, diagnosis.told, diagnosis.frameworks)


def style_of(diagnosis: Diagnosis) -> str:
    """The way of the run's training loop: "trainer", "accelerate" or "plain", for code to paste."""
    if "calls_trainer" in diagnosis.told:
        return "trainer"
    return next((_STYLES[name] for name in diagnosis.frameworks if name in _STYLES), "plain")


def facts_of(diagnosis: Diagnosis, *, is_text: bool) -> frozenset[str]:
    """What is known of the run, in the words of ``needs.NEEDS``; of a run at hand (not ``is_text``) more is."""
    told, failure = _without_what_is_missing(diagnosis.told), diagnosis.main_failure
    is_settled = not diagnosis.setup_phrases and not diagnosis.story.proposals  # a guide proposes what it sets
    found = {one for one in told if is_settled or not one.startswith(_OF_THE_RUN) or one == "has_batch_of_one"}
    found |= {one.replace("barred_", "tried_") for one in told if one.startswith("barred_")}
    found |= {one.replace("known_", "tried_") for one in told if is_settled and one.startswith("known_")}
    found |= {name.replace(" ", "_").lower() for name in diagnosis.frameworks}
    found |= _AT_HAND if not is_text else _whose_loop(diagnosis)
    loads = "workers" in told or "pins" in told or (failure is not None and "dataloader" in failure.format)
    is_by_settings = {"trains_by_settings", "shows_settings"} & told and "lacks_no_grad" not in told
    evidence = {one.key for one in diagnosis.evidence}
    may_be = {
        f"on_{diagnosis.backend}": True,
        f"on_{diagnosis.accelerator}": True,
        "may_have_batch": _may_have_batch(diagnosis),
        "by_a_program": diagnosis.program and (diagnosis.program != "pictures" or "diffuses" in told),
        "of_pytorch": is_of_pytorch(diagnosis) and not {"in_another_language", "uses_mlx"} & told,
        "has_batch_of_one": "shape_of_one" in evidence,
        "diffuses": diagnosis.program in ("diffusers", "webui", "comfyui"),
        "of_tokens": names_tokens(diagnosis),
        "has_ranks": has_ranks(diagnosis),
        "has_one_memory": diagnosis.has_one_memory,
        "hosted": _HOSTED & set(diagnosis.systems),
        "not_its_input": diagnosis.cause not in (*INPUT_CAUSES, Cause.SYSMEM_FALLBACK),
        "full_of_its_own": diagnosis.cause in (*INPUT_CAUSES[:3], Cause.WEIGHTS_TOO_BIG, Cause.OPTIMIZER_STATE),
        # a with-statement shows in no traceback, so frames without it say nothing
        "infers_with_graphs": "lacks_no_grad" in told or _WITHOUT_NO_GRAD & evidence,
        "may_keep_graphs": _MAY_KEEP_GRAPHS & told and not is_by_settings,
        "own_loader": "own_loop" in found and loads and "other_workers" not in told,
        "by_dataloader": failure is not None and "dataloader" in failure.format,
        "has_largest_share": diagnosis.limits.get("share", 0) >= _LARGEST_SHARE,
        "has_short_context": 0 < diagnosis.limits.get("length", 0) <= _SHORT_CONTEXT,
        "made_of_each_tensor": _OF_EACH_TENSOR in diagnosis.code or _OF_NEW_STATE in diagnosis.code,
        "has_small_share": "paddle_share" in evidence,
        "creates_weights": "program_without_inputs" in evidence,
        "of_weights": diagnosis.phase in _OF_WEIGHTS,
        "latents_by_lora": {"of_latents", "names_lora"} <= told and "trains_whole" not in told,
        "may_evaluate": is_text and _EVALUATING & told and diagnosis.phase not in ("backward", "optimizer_step"),
        "weights_in_half": _COUNTED_IN_HALF & evidence and "names_float32" not in told,
    }
    return frozenset(found | {name for name, is_so in may_be.items() if is_so})


def _without_what_is_missing(told: frozenset[str]) -> frozenset[str]:
    """The same, but for a switch that the text names as missing."""
    return told - {"known_no_grad"} if "lacks_no_grad" in told else told


def _may_have_batch(diagnosis: Diagnosis) -> bool:
    """Whether a batch is named, or a message stands alone: of 33 answers read blind that told of a microbatch 6 were
    about a run without one, of 60 that told of less input one was wrong."""
    is_bare = "in_prose" not in diagnosis.told and not _WITHOUT_BATCH & diagnosis.told
    return "names_batch" in diagnosis.told or (is_bare and is_of_pytorch(diagnosis))


def _whose_loop(diagnosis: Diagnosis) -> set[str]:
    """Whose code trains: the author's, a Trainer's or Accelerator's that the author calls, or another's."""
    told, style = diagnosis.told, style_of(diagnosis)
    shows, is_by_settings = "pasted_code" in told, bool({"trains_by_settings", "shows_settings"} & told)
    if style == "trainer":
        return {"trainer"} if shows or not is_by_settings else set()
    if "deepspeed" in diagnosis.frameworks and "accelerate" not in diagnosis.frameworks:
        return set()  # an engine's, by its settings
    is_bare = told <= IN_ANY_MESSAGE and _shows_only_a_line(diagnosis)  # nothing shows anybody else's
    if is_bare or (shows and not is_by_settings):
        return {"own_loop", *(("accelerator",) if style == "accelerate" else ())}
    return set()


def _shows_only_a_line(diagnosis: Diagnosis) -> bool:
    """Whether a message stands alone or with the failing statement, without frames and sentences around it."""
    if not diagnosis.code:
        return True
    if diagnosis.place or "in_prose" in diagnosis.told or "self." in diagnosis.code:
        return False
    with contextlib.suppress(SyntaxError, ValueError):
        return bool(ast.parse(diagnosis.code))
    return False
