"""What kind of run a text is about: training or not, of a model of tokens or another, in PyTorch or elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oom_magic.explain.evidence.causes import Cause

if TYPE_CHECKING:
    from oom_magic.explain.diagnosis import Diagnosis

# Statements by authors about runs that train.
_TOLD_OF_TRAINING = {"trains", "training_fits", "adam_costs"}
_TRAINERS = {"transformers Trainer", "deepspeed", "FSDP", "Lightning"}
_OF_TRANSFORMERS = ("transformers Trainer", "PEFT", "vLLM", "bitsandbytes", "deepspeed", "FSDP")
_OF_RANKS = {"deepspeed", "FSDP"}
CUDA_IN_CODE = ("cuda", "hip")  # ROCm builds of PyTorch say "cuda", too
_DESCRIBED = {"trains", "infers", "evaluates"}


def trains(diagnosis: Diagnosis) -> bool:
    """Whether the text, or the run described with it, is about training."""
    in_step = diagnosis.phase in ("backward", "loss", "optimizer_step")
    is_trainer = bool(_TRAINERS & set(diagnosis.frameworks)) and "infers" not in diagnosis.told
    told = diagnosis.told - {"training_fits"} if "infers" in diagnosis.told else diagnosis.told  # it came before
    is_told = bool(_TOLD_OF_TRAINING & told or diagnosis.setup_phrases)
    return is_told or in_step or is_trainer


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
    is_set_up = diagnosis.setup_phrases or diagnosis.tensors
    return bool(is_set_up or "attends" in diagnosis.told or set(_OF_TRANSFORMERS) & set(diagnosis.frameworks))


def shows_transformers(diagnosis: Diagnosis) -> bool:
    """Whether code of transformers is the author's, or a bare message leaves it open."""
    return names_tokens(diagnosis) and ("uses_transformers" in diagnosis.told or not diagnosis.told & _DESCRIBED)


def is_of_pytorch(diagnosis: Diagnosis) -> bool:
    """Whether the message, or the text around it, is PyTorch's."""
    failure = diagnosis.main_failure
    is_its_own = failure is not None and failure.pytorch_bytes is not None
    return is_its_own or "uses_torch" in diagnosis.told or bool(diagnosis.frameworks)
