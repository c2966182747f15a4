"""``explain``: from an exception or text to a Diagnosis: what failed, which tensor was requested, why it did not fit.

Three steps: the text is read (``messages``, ``evidence.clues``), what a live failure shows is found (``live``), and
the cause is judged (``evidence.judging``) and refined by the findings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oom_magic.explain.diagnosis import Diagnosis
from oom_magic.explain.evidence.budget import budget_of
from oom_magic.explain.evidence.causes import Cause, Confidence, Evidence, Judgement
from oom_magic.explain.evidence.clues.environment import limits_in
from oom_magic.explain.evidence.clues.story import Story
from oom_magic.explain.evidence.clues.traceback import Clues, find_clues
from oom_magic.explain.evidence.excluded import excluded_causes
from oom_magic.explain.evidence.judging import judge, main_failure
from oom_magic.explain.evidence.measured.calibration import calibrated
from oom_magic.explain.evidence.rules.numbers import facts_about, is_held_by_others, judge_tip
from oom_magic.explain.evidence.tensors import (
    NO_LANGUAGE_MODEL,
    Dims,
    TensorAnswer,
    TensorCandidate,
    at_another_length,
    dims_of_run,
    dims_of_setup,
    name_tensor,
    preset_dims,
    run_in_text,
    with_stated_shape,
)
from oom_magic.explain.live.growth import find_growing_containers
from oom_magic.explain.live.holders import data_sets_on_device, earlier_bytes, find_holders
from oom_magic.explain.live.later_backward import calls_are_of_one_graph
from oom_magic.explain.live.location import UNKNOWN_LOCATION, FailureLocation, locate_failure
from oom_magic.explain.live.refinement import (
    refine_with_call,
    refine_with_loop,
    refine_with_report,
    refine_with_setup,
)
from oom_magic.explain.messages.failure import Failure
from oom_magic.explain.messages.reading import read
from oom_magic.explain.problem_text import last_failure, text_of
from oom_magic.language import choose_language
from oom_magic.one_line_errors import OneLineErrors

if TYPE_CHECKING:
    from oom_magic.explain.live.growth import Growth
    from oom_magic.explain.live.holders import Holder
    from oom_magic.measure.device.cards import Card
    from oom_magic.measure.holders.reach import Locate
    from oom_magic.measure.holders.release import Released
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.setups.setup import TrainingSetup

# Only candidates without an assumed dimension fit this well.
_DECISIVE_FIT = 0.75
# A candidate that fits less well than this share of the best is not worth showing.
_LEAST_FIT_OF_BEST = 0.5
_LEAST_FIT = 0.3
# With an unknown model, many sizes fit by chance.
_LEAST_FIT_WITHOUT_MODEL = 0.45
_IMAGE_PROGRAMS = ("diffusers", "diffusion", "webui", "comfyui")
_CAUSE_OF_TENSOR = {
    "logits": Cause.LOGITS_OR_LOSS,
    "probabilities": Cause.LOGITS_OR_LOSS,
    "logits_gradient": Cause.LOGITS_OR_LOSS,
    "attention_scores": Cause.ATTENTION_SCORES,
    "optimizer_state": Cause.OPTIMIZER_STATE,
}
_OTHERS = ("result", "copy", "concatenation", "embeddings")
_NAME_OF_TENSOR = {"attention_scores": "attention_scores", "logits_or_loss": "logits", "kv_cache": "kv_cache"}
_PROGRAMS_WITH_FUSED_ATTENTION = ("vllm", "sglang", "tgi", "exllama")  # whose attention stores no scores
_WEIGHT_PHASES = ("saving", "loading", "optimizer_step")
_OF_WEIGHTS = ("stated", "embedding_weight", "mlp_weight", "attention_weight", "all_parameters")
_OTHER_TENSOR = re.compile(r"kv_?cache|cache_(?:shape|size)|\blora_\w+ ?= ?\w*\(?torch\.(?:zeros|empty)", re.I)
_UNKNOWN_TENSOR = TensorAnswer()
_NO_JUDGEMENT = Judgement(Cause.UNKNOWN, (Evidence("no_message"),), Confidence.OPEN)
_TOLD_BY_FRAMES = {"calls_trainer"}  # of a run at hand, where the user's own class may have such a name
_ACTIVATION_CAUSES = (Cause.LOGITS_OR_LOSS, Cause.ATTENTION_SCORES)


def explain(
    problem: BaseException | str | Path | None = None,
    setup: Dims | TrainingSetup | None = None,
    *,
    lang: str | None = None,
    report: MemoryReport | None = None,
    fast: bool = False,
) -> Diagnosis:
    """Explain an exception, a pasted text, a log file, or (None) the last failure of this interpreter.

    ``setup``: what was trained, as a TrainingSetup or the model's dimensions (batch, seq, heads, hidden, vocab,
    intermediate, dtype); without it, those of a preset that the text names. Remedies are evaluated by dry runs of a
    TrainingSetup, else only named.
    ``lang``: "en" or "zh" (default: ``OOM_MAGIC_LANG``, then the locale).
    ``report``: the MemoryReport of the run that failed.
    ``fast``: remedies are only named.
    Raises ValueError if nothing is given and nothing has failed yet, FileNotFoundError for a Path that is not a file,
    TypeError for a problem of another kind.
    """
    with OneLineErrors("other"):
        diagnosis = Explainer(setup, lang, report).diagnose(problem)
        if setup is None or isinstance(setup, Mapping) or not diagnosis.is_oom:
            return diagnosis
        from oom_magic.explain.advice import advise_setup, named_remedies  # loads what rehearses

        if fast:
            return replace(diagnosis, remedies=named_remedies(diagnosis, setup))
        diagnosis = refine_with_setup(diagnosis, setup)
        *_unused, evaluated = diagnosis, *advise_setup(diagnosis, setup)
        return evaluated


@dataclass(frozen=True)
class _Reading:
    """What was read in a text: its failures, the one that explains it best, and clues."""

    text: str
    failures: tuple[Failure, ...]
    main: Failure | None
    clues: Clues

    @classmethod
    def of(cls, text: str) -> _Reading:
        """Read a text; raises nothing, whatever it contains."""
        failures = read(text)
        main = main_failure(failures)
        return cls(text, failures, main, find_clues(text, main.start if main else None, main.format if main else None))

    def on_card(self, read_card: Callable[[int], Card | None]) -> _Reading:
        """The reading with the card's numbers, where the message has none and others hold more of it than this process:
        so CUDA refuses a context on a card that they have filled."""
        main = self.main
        is_silent = main is not None and main.is_oom and main.backend == "cuda" and main.total_bytes is None
        card = read_card(main.device_index or 0) if main is not None and is_silent else None
        if main is None or card is None:
            return self
        device, own_bytes = card.device, card.device.context_bytes + card.reserved_bytes
        others = tuple((one.pid, one.num_bytes) for one in card.processes if one.pid != os.getpid())
        known = replace(main, total_bytes=device.total_bytes, free_bytes=card.free_bytes)
        known = replace(known, process_bytes=own_bytes, other_processes=others)
        if not is_held_by_others(known):
            return self
        return replace(self, failures=tuple(known if one is main else one for one in self.failures), main=known)


@dataclass(frozen=True)
class _Findings:
    """Where a run failed, which tensor it requested, what grew in its loop, and who holds memory.

    ``run``: sizes and method of the run that the text names; ``is_one_graph``: see ``refine_with_report``.
    """

    run: Mapping[str, int | str] = field(default_factory=dict)
    location: FailureLocation = UNKNOWN_LOCATION
    tensor: TensorAnswer = _UNKNOWN_TENSOR
    growth: Growth | None = None
    holders: tuple[Holder, ...] = ()
    about_holders: tuple[Evidence, ...] = ()
    is_one_graph: bool = False


@dataclass(frozen=True)
class Explainer:
    """Explains failures in a context.

    ``setup``, ``lang``, ``report``: as in ``explain``.
    ``names``: the notebook's variables, as dry-run cells see them; ``locate`` finds the storages of their tensors.
    ``released``: who holds memory, as ``release(dry_run=True)`` returns it.
    ``grown``: what had grown in the loops of a dry run when it failed, since the user's objects are as they were again.
    ``find_rows``: how many rows the tensor of a variable had when the cell began (0: none, or unknown).
    ``read_card``: the card with a number, as its driver sees it; for errors that were raised here.
    """

    setup: Dims | TrainingSetup | None = None
    lang: str | None = None
    report: MemoryReport | None = None
    names: Mapping[str, Any] | None = None
    released: Released | None = None
    locate: Locate | None = None
    grown: tuple[Growth, ...] = ()
    find_rows: Callable[[str], int] = lambda _: 0
    read_card: Callable[[int], Card | None] = lambda _: None

    def diagnose(self, problem: BaseException | str | Path | None) -> Diagnosis:
        """The diagnosis, with remedies that are named but not evaluated. Raises as ``explain``."""
        from oom_magic.explain.remedies.from_text.naming import unpriced_remedies  # loads NumPy
        from oom_magic.explain.remedies.from_text.standing import not_standing

        language = choose_language(self.lang)
        problem = last_failure() if problem is None else problem
        error = problem if isinstance(problem, BaseException) else None
        reading = _Reading.of(text_of(problem))
        reading = reading if error is None else reading.on_card(self.read_card)
        findings = self._findings(reading, error)
        is_other_error = error is not None and reading.main is None  # a traceback contains no words of an author
        judgement = _NO_JUDGEMENT if is_other_error else self._judgement(reading, findings)
        if error is None:
            judgement = calibrated(judgement, reading.main, reading.clues, excluded_causes(reading.main, reading.clues))
        diagnosis = _diagnosis(reading, findings, judgement)
        diagnosis = replace(
            diagnosis,
            story=Story() if error is not None else reading.clues.story,
            told=diagnosis.told if error is None else diagnosis.told - _TOLD_BY_FRAMES,
            setup_phrases=() if self.setup is None or isinstance(self.setup, Mapping) else (*self.setup.phrases(),),
            lang=language,
        )
        remedies = unpriced_remedies(diagnosis)
        return replace(diagnosis, remedies=not_standing(remedies, reading.text) if error is None else remedies)

    def _findings(self, reading: _Reading, error: BaseException | None) -> _Findings:
        main, clues = reading.main, reading.clues
        holders, evidence = find_holders(self.released, self.report, main, error, self.names)
        if main is None or not main.is_oom:
            return _Findings(holders=holders, about_holders=evidence)
        main = with_stated_shape(main, clues.trace)
        growth = find_growing_containers(error, self.names, self.locate, main, self.find_rows, self.grown)
        models = preset_dims()
        run = {**run_in_text(reading.text, models), **_training_method(clues)} if self.setup is None else {}
        location = locate_failure(error, self.report, main, clues.phase, self.names)
        suggested = self._suggested_tensors(main, dims_of_run(run, models))
        tensor = _choose_tensors(main, *suggested, location, clues, error is not None)
        return _Findings(run, location, tensor, growth, holders, evidence, calls_are_of_one_graph(error))

    def _suggested_tensors(self, failure: Failure, dims: Dims) -> tuple[TensorAnswer, bool]:
        """The tensors that the message's sizes and ``dims`` suggest; and whether the model's sizes are known."""
        if self.setup is not None:
            dims = dims_of_setup(self.setup)
            return name_tensor(failure, dims), bool(dims)
        answer = name_tensor(failure, dims)
        has_model = "hidden" in dims
        if answer.note == "tensor_none_fits" and not has_model:
            return TensorAnswer(note="tensor_unknown_model"), False
        is_none_so_long = answer.note == "tensor_none_fits" and "seq" in dims
        return at_another_length(failure, dims) if is_none_so_long else answer, has_model

    def _judgement(self, reading: _Reading, findings: _Findings) -> Judgement:
        """The judgement from the text, refined by the findings."""
        main, location, holders = reading.main, findings.location, findings.holders
        clues = _as_seen(reading.clues, location)
        judgement = _refine_with_tensor(judge(reading.failures, reading.text, clues), findings.tensor)
        if self.report is not None and location.is_exact:
            judgement = refine_with_report(judgement, self.report, findings.is_one_graph)
        judgement = refine_with_loop(judgement, findings.growth, main)
        judgement = _with_needless_memory(judgement, findings.about_holders, earlier_bytes(holders, self.report), main)
        data_sets = data_sets_on_device(self.released, self.names or {}, main)
        judgement = replace(judgement, evidence=(*data_sets, *judgement.evidence))
        return refine_with_call(judgement, reading.clues.phase or location.phase, holders, main)


def _diagnosis(reading: _Reading, findings: _Findings, judgement: Judgement) -> Diagnosis:
    main, clues, location = reading.main, reading.clues, findings.location
    return Diagnosis(
        failures=reading.failures,
        is_oom=_is_oom(reading.failures),
        cause=judgement.cause,
        evidence=judgement.evidence,
        confidence=judgement.confidence,
        possible=judgement.possible,
        phase=clues.phase or location.phase,
        tensors=_tensors_of(judgement, findings, clues.phase),
        tensor_note=findings.tensor.note,
        budget=budget_of(main) if main is not None else None,
        growth=findings.growth,
        facts=facts_about(main, clues) if main is not None else (),
        tip=judge_tip(main, clues) if main is not None else None,
        holders=findings.holders,
        frameworks=clues.frameworks,
        systems=clues.systems,
        expandable_segments=clues.expandable_segments,
        program=clues.program.program.key if clues.program is not None else "",
        limits=limits_in(reading.text),
        told=clues.run.told | clues.shown | ({"in_prose"} if clues.has_prose else set()),
        run=findings.run,
        accelerator=clues.accelerator,
        place=location.place or _innermost_frame(clues),
        code=location.code or clues.code,
    )


def _tensors_of(judgement: Judgement, findings: _Findings, phase: str | None) -> tuple[TensorCandidate, ...]:
    """The requested tensor's candidates; for weights and their state, sizes alone suggest none of a step's."""
    found = findings.tensor.candidates
    is_of_weights = judgement.cause is Cause.WEIGHTS_TOO_BIG or phase in _WEIGHT_PHASES
    if not is_of_weights or findings.location.candidates:
        return found
    return tuple(one for one in found if one.name in _OF_WEIGHTS)


def _training_method(clues: Clues) -> dict[str, int | str]:
    """LoRA or QLoRA, if the text says so."""
    told = clues.run.told
    if "has_lora" not in told:
        return {}
    return {"method": "qlora" if "is_quantized" in told else "lora"}


def _choose_tensors(
    failure: Failure,
    suggested: TensorAnswer,
    has_dims: bool,
    location: FailureLocation,
    clues: Clues,
    is_live: bool,
) -> TensorAnswer:
    """The requested tensor's candidates: from frames or report if possible, else those that the message suggests."""
    if failure.shape is None and not _may_be_of_language_model(failure, clues, has_dims, is_live):
        suggested = TensorAnswer(note="tensor_unknown_model" if failure.requested_bytes else suggested.note)
    best_fit = max((one.fit for one in suggested.candidates), default=0)
    least_fit = max(best_fit * _LEAST_FIT_OF_BEST, _LEAST_FIT if has_dims else _LEAST_FIT_WITHOUT_MODEL)
    likely = tuple(one for one in suggested.candidates if one.fit >= least_fit and _is_plausible(one, clues))
    if not location.candidates:
        if not likely:
            is_silent = suggested.note == "tensor_other_length"
            return TensorAnswer(note="tensor_unknown_model" if is_silent else suggested.note or "tensor_unknown_model")
        return TensorAnswer(likely, suggested.note)
    is_seen = location.is_exact or location.candidates[0].fit >= 1
    others = () if is_seen else likely
    return replace(suggested, candidates=(*location.candidates, *others)[:5], note="")


def _is_plausible(candidate: TensorCandidate, clues: Clues) -> bool:
    """Whether the text allows for this tensor: its line names no other, and attention scores are not fused away."""
    if clues.tensor is not None and candidate.name != _NAME_OF_TENSOR[clues.tensor]:
        return False
    is_fused = "has_flash" in clues.run.told or (
        clues.program is not None and clues.program.program.key in _PROGRAMS_WITH_FUSED_ATTENTION
    )
    return candidate.name != "attention_scores" or not is_fused or clues.tensor == "attention_scores"


def _may_be_of_language_model(failure: Failure, clues: Clues, has_dims: bool, is_live: bool) -> bool:
    """Whether the requested tensor can be a language model's: one that PyTorch allocates, and no convolution.

    If a run failed here, or an author describes one without sizes, something must show that it is about tokens.
    """
    if is_live and not (has_dims or clues.frameworks or "attends" in clues.run.told):
        return False
    is_described = clues.has_prose or "trains" in clues.run.told
    if is_described and not (is_live or has_dims):
        return False  # with a model that is not known, many sizes fit by chance
    if "of_latents" in clues.run.told:
        return False
    if clues.tensor is None and _OTHER_TENSOR.search(clues.code):
        return False
    if clues.phase in _WEIGHT_PHASES:  # what asks there is a weight or its state, whose sizes are unknown
        return has_dims
    if failure.backend in ("cpu", "jax", "tensorflow") or NO_LANGUAGE_MODEL.search(clues.trace):
        return False
    if clues.program is None:
        return True
    if clues.program.stage is not None and clues.program.stage.key in ("kv_cache", "loading"):
        return False
    return clues.program.program.is_torch and clues.program.program.key not in _IMAGE_PROGRAMS


def _innermost_frame(clues: Clues) -> str:
    """File name and line of the frame whose line is quoted, else of the innermost frame of a pasted traceback."""
    if not clues.frames:
        return ""
    frame = next((one for one in reversed(clues.frames) if one.code and one.code == clues.code), clues.frames[-1])
    return f"{Path(frame.path).name}:{frame.line}" if frame.line else Path(frame.path).name


def _as_seen(clues: Clues, location: FailureLocation) -> Clues:
    """The clues without what words of the code say about the requested tensor, where frames show that it is another."""
    best = location.candidates[0] if location.candidates else None
    if best is None or best.fit < _DECISIVE_FIT or not best.expression or best.name not in _OTHERS:
        return clues
    return replace(clues, tensor=None, run=replace(clues.run, told=clues.run.told - {"scores_all"}))


def _refine_with_tensor(judgement: Judgement, answer: TensorAnswer) -> Judgement:
    """The judgement, refined by the requested tensor if it is known and there is no stronger evidence."""
    best = answer.candidates[0] if answer.candidates else None
    if best is not None and best.name == "kv_cache":
        return _refine_with_cache(judgement, best)
    if best is None or best.fit < _DECISIVE_FIT or best.name not in _CAUSE_OF_TENSOR:
        return judgement
    is_seen = best.fit >= 1 and bool(best.expression)
    is_named_closer = judgement.cause is Cause.ACTIVATIONS and judgement.confidence is Confidence.LIKELY
    if not (judgement.is_open or (is_named_closer and _CAUSE_OF_TENSOR[best.name] in _ACTIVATION_CAUSES)):
        return judgement
    key = "tensor_seen" if is_seen else "tensor_matches"
    known = (
        judgement.without_doubts if judgement.cause in (Cause.UNKNOWN, _CAUSE_OF_TENSOR[best.name]) or is_seen else ()
    )
    evidence = (*known, Evidence(key, {"formula": best.formula}))
    return Judgement(_CAUSE_OF_TENSOR[best.name], evidence, Confidence.LIKELY, judgement.possible)


def _refine_with_cache(judgement: Judgement, cache: TensorCandidate) -> Judgement:
    """The judgement for a request by a growing key-value cache, unless stronger evidence exists."""
    if any(one.key == "tensor_kv_cache" for one in judgement.evidence):
        return judgement
    evidence = (Evidence("tensor_kv_cache", {"code": cache.expression}), *judgement.without_doubts)
    if judgement.cause is Cause.UNKNOWN:
        return Judgement(Cause.ACTIVATIONS, evidence, Confidence.LIKELY)
    return replace(judgement, evidence=evidence)


def _with_needless_memory(
    judgement: Judgement, twins: tuple[Evidence, ...], earlier: int, failure: Failure | None
) -> Judgement:
    """The judgement with memory that is kept alive needlessly: the cause, if the request would fit without it."""
    found = [*twins]
    if earlier:
        found.insert(0, Evidence("earlier_failures", {"held_bytes": earlier}))
    if not found or failure is None or not failure.requested_bytes:
        return judgement
    freed = earlier + sum(int(one.values["twin_bytes"]) for one in twins)
    is_enough = freed >= failure.requested_bytes - (failure.free_bytes or 0)
    if judgement.is_certain or not is_enough:
        return replace(judgement, evidence=(*judgement.evidence, *found))
    evidence = (*found, *judgement.without_doubts)
    return Judgement(Cause.LEAK_OR_RETAINED_REFERENCE, evidence, Confidence.LIKELY)


def _is_oom(failures: Sequence[Failure]) -> bool | None:
    """Whether memory ran out: True if any message says so, False if every message says otherwise."""
    verdicts = {failure.is_oom for failure in failures}
    if True in verdicts:
        return True
    return False if verdicts == {False} else None
