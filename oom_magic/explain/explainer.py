"""Explaining a failure: what it means, which tensor was requested, why it did not fit."""

from __future__ import annotations

import ast
import linecache
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oom_magic.explain.diagnosis import Diagnosis
from oom_magic.explain.evidence.budget import budget_of
from oom_magic.explain.evidence.causes import Cause, Confidence, Evidence, Judgement
from oom_magic.explain.evidence.clues.limits import limits_in
from oom_magic.explain.evidence.clues.story import Story
from oom_magic.explain.evidence.clues.traceback import Clues, find_clues
from oom_magic.explain.evidence.judging import judge, main_failure
from oom_magic.explain.evidence.number_rules import facts_about, judge_tip
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
from oom_magic.explain.text_files import is_path, read_text
from oom_magic.language import _, choose_language
from oom_magic.one_line_errors import OneLineErrors
from oom_magic.user_code import is_machinery, is_users_file

if TYPE_CHECKING:
    from oom_magic.explain.live.growth import Growth
    from oom_magic.explain.live.holders import Holder
    from oom_magic.measure.holders.reach import Locate
    from oom_magic.measure.holders.release import Released
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.setups.setup import TrainingSetup

_GRADIENTS_OFF = ("no_grad", "inference_mode", "set_grad_enabled(False)")
# Only candidates without an assumed dimension fit this well.
_TELLING_FIT = 0.75
# A candidate that fits less well than this share of the best is not worth showing.
_WORTH_SHOWING = 0.5
_LEAST_FIT = 0.3
# With an unknown model, many sizes fit by chance.
_LEAST_BLIND_FIT = 0.45
_OF_PICTURES = ("diffusers", "diffusion", "webui", "comfyui")
_CAUSE_OF_TENSOR = {
    "logits": Cause.LOGITS_OR_LOSS,
    "probabilities": Cause.LOGITS_OR_LOSS,
    "logits_gradient": Cause.LOGITS_OR_LOSS,
    "attention_scores": Cause.ATTENTION_SCORES,
    "optimizer_state": Cause.OPTIMIZER_STATE,
}
_NAME_OF_TENSOR = {"attention_scores": "attention_scores", "logits_or_loss": "logits", "kv_cache": "kv_cache"}
_FUSED = ("vllm", "sglang", "tgi", "exllama")  # whose attention stores no scores
_OF_WEIGHTS = ("saving", "loading", "optimizer_step")
_NAMES_ANOTHER = re.compile(r"kv_?cache|cache_(?:shape|size)|\blora_\w+ ?= ?\w*\(?torch\.(?:zeros|empty)", re.I)
_UNKNOWN_TENSOR = TensorAnswer()
_NO_JUDGEMENT = Judgement(Cause.UNKNOWN, (Evidence("no_message"),), Confidence.OPEN)
_KINDS_OF_ACTIVATIONS = (Cause.LOGITS_OR_LOSS, Cause.ATTENTION_SCORES)


def explain(
    problem: BaseException | str | Path | None = None,
    setup: Dims | TrainingSetup | None = None,
    *,
    models: Mapping[str, Dims] | None = None,
    lang: str | None = None,
    report: MemoryReport | None = None,
    fast: bool = False,
) -> Diagnosis:
    """Explains an exception, a pasted text, a log file, or (None) the last failure of this interpreter.

    ``setup``, a TrainingSetup or the model's dimensions (batch, seq, heads, hidden, vocab, intermediate,
    dtype), says what was trained; without it a preset that the text names is used (or one of ``models``).
    ``report`` is the MemoryReport of the run that failed, ``lang`` "en" or "zh" (default: ``OOM_MAGIC_LANG``, then
    the locale). Remedies are evaluated by dry runs of a TrainingSetup (not if ``fast``), else only named. Raises
    ValueError when nothing is given and nothing has failed yet, FileNotFoundError for a Path that is not a file.
    """
    with OneLineErrors("other"):
        from oom_magic.explain.advice import advise_setup, named_remedies

        diagnosis = Explainer(setup, models, lang, report).diagnose(problem)
        if setup is None or isinstance(setup, Mapping) or not diagnosis.is_oom:
            return diagnosis
        if fast:
            return replace(diagnosis, remedies=named_remedies(diagnosis, setup))
        diagnosis = refine_with_setup(diagnosis, setup)
        *_unused, evaluated = diagnosis, *advise_setup(diagnosis, setup)
        return evaluated


@dataclass(frozen=True)
class _Reading:
    """What a text contains: its failures, the one that explains it best, and clues."""

    text: str
    failures: tuple[Failure, ...]
    main: Failure | None
    clues: Clues

    @classmethod
    def of(cls, text: str) -> _Reading:
        """The reading of a text; nothing is raised, whatever it holds."""
        failures = read(text)
        main = main_failure(failures)
        return cls(text, failures, main, find_clues(text, main.start if main else None, main.format if main else None))


@dataclass(frozen=True)
class _Findings:
    """What is known beside the text: where it failed, which tensor was requested, what grew, and holders of memory.

    ``run`` is what the text names of the run; ``is_one_graph`` as ``refine_with_report`` has it.
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
    """The context of a failure, beside its text or exception.

    The first four are ``explain``'s. ``names`` are the variables of dry cells, ``locate`` where their tensors lie,
    ``released`` is what ``release(dry_run=True)`` says holds memory.
    """

    setup: Dims | TrainingSetup | None = None
    models: Mapping[str, Dims] | None = None
    lang: str | None = None
    report: MemoryReport | None = None
    names: Mapping[str, Any] | None = None
    released: Released | None = None
    locate: Locate | None = None

    def diagnose(self, problem: BaseException | str | Path | None) -> Diagnosis:
        """What failed and why; remedies are named, not evaluated. Raises as ``explain``."""
        from oom_magic.explain.remedies.from_text.naming import unpriced_remedies  # loads NumPy

        language = choose_language(self.lang)
        problem = _last_failure() if problem is None else problem
        error = problem if isinstance(problem, BaseException) else None
        reading = _Reading.of(_text_of(problem))
        findings = self._findings(reading, error)
        is_another = error is not None and reading.main is None  # an exception's text holds no words of an author
        judgement = _NO_JUDGEMENT if is_another else self._judgement(reading, findings)
        diagnosis = _diagnosis(reading, findings, judgement)
        diagnosis = replace(
            diagnosis,
            story=Story() if error is not None else reading.clues.story,
            setup_phrases=() if self.setup is None or isinstance(self.setup, Mapping) else (*self.setup.phrases(),),
            lang=language,
        )
        return replace(diagnosis, remedies=unpriced_remedies(diagnosis))

    def _findings(self, reading: _Reading, error: BaseException | None) -> _Findings:
        main, clues = reading.main, reading.clues
        holders, evidence = find_holders(self.released, self.report, main, error, self.names)
        if main is None or not main.is_oom:
            return _Findings(holders=holders, about_holders=evidence)
        growth = find_growing_containers(error, self.names, self.locate, main)
        models = preset_dims() if self.models is None else self.models
        run = {**run_in_text(reading.text, models), **_method(clues)} if self.setup is None else {}
        location = locate_failure(error, self.report, main, clues.phase, self.names)
        tensor = _tensors(main, *self._supposed_tensors(main, dims_of_run(run, models)), location, clues)
        return _Findings(run, location, tensor, growth, holders, evidence, calls_are_of_one_graph(error))

    def _supposed_tensors(self, failure: Failure, dims: Dims) -> tuple[TensorAnswer, bool]:
        """The tensors that the message suggests, with the text's ``dims``; whether sizes of the model are known."""
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
        judgement = _refined(judge(reading.failures, reading.text, reading.clues), findings.tensor)
        if self.report is not None and location.is_exact:
            judgement = refine_with_report(judgement, self.report, findings.is_one_graph)
        judgement = refine_with_loop(judgement, findings.growth, main)
        judgement = _alive_needlessly(judgement, findings.about_holders, earlier_bytes(holders, self.report), main)
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
        tensors=findings.tensor.candidates,
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
        told=clues.run.told | clues.shown,
        run=findings.run,
        accelerator=clues.accelerator,
        place=location.place or _place(clues),
        code=location.code or clues.code,
    )


def _method(clues: Clues) -> dict[str, int | str]:
    """How the text says that the run trains, where that is not all weights."""
    told = clues.run.told
    if "has_lora" not in told:
        return {}
    return {"method": "qlora" if "is_quantized" in told else "lora"}


def _tensors(
    failure: Failure, supposed: TensorAnswer, has_dims: bool, location: FailureLocation, clues: Clues
) -> TensorAnswer:
    """Candidates for the tensor: from frames and report if possible, else those ``supposed`` by the message."""
    if failure.shape is None and not _is_guessable(failure, clues, has_dims):
        supposed = TensorAnswer(note="tensor_unknown_model" if failure.requested_bytes else supposed.note)
    best_fit = max((one.fit for one in supposed.candidates), default=0)
    least_fit = max(best_fit * _WORTH_SHOWING, _LEAST_FIT if has_dims else _LEAST_BLIND_FIT)
    likely = tuple(one for one in supposed.candidates if one.fit >= least_fit and _may_be(one, clues))
    if not location.candidates:
        if not likely:
            is_silent = supposed.note == "tensor_other_length"
            return TensorAnswer(note="tensor_unknown_model" if is_silent else supposed.note or "tensor_unknown_model")
        return TensorAnswer(likely, supposed.note)
    is_seen = location.is_exact or location.candidates[0].fit >= 1
    others = () if is_seen else likely
    return replace(supposed, candidates=(*location.candidates, *others)[:5], note="")


def _may_be(candidate: TensorCandidate, clues: Clues) -> bool:
    """Whether the text leaves room for such a tensor: its line names another, or a kernel stores no scores."""
    if clues.tensor is not None and candidate.name != _NAME_OF_TENSOR[clues.tensor]:
        return False
    is_fused = "has_flash" in clues.run.told or (clues.program is not None and clues.program.program.key in _FUSED)
    return candidate.name != "attention_scores" or not is_fused or clues.tensor == "attention_scores"


def _is_guessable(failure: Failure, clues: Clues, has_dims: bool) -> bool:
    """Whether the tensor can be one of a language model's: one that PyTorch allocates, and no convolution.

    Where an author describes a run whose sizes are unknown, something must show that it is about tokens.
    """
    is_described = clues.has_prose or "trains" in clues.run.told
    if is_described and not (has_dims or clues.frameworks or "attends" in clues.run.told):
        return False
    if "of_latents" in clues.run.told:
        return False
    if clues.tensor is None and _NAMES_ANOTHER.search(clues.code):
        return False
    if clues.phase in _OF_WEIGHTS:  # what asks there is a weight or its state, whose sizes are unknown
        return has_dims
    if failure.backend in ("cpu", "jax", "tensorflow") or NO_LANGUAGE_MODEL.search(clues.trace):
        return False
    if clues.program is None:
        return True
    if clues.program.stage is not None and clues.program.stage.key in ("kv_cache", "loading"):
        return False
    return clues.program.program.is_torch and clues.program.program.key not in _OF_PICTURES


def _place(clues: Clues) -> str:
    """The innermost frame that a pasted traceback shows, briefly."""
    if not clues.frames:
        return ""
    frame = clues.frames[-1]
    return f"{Path(frame.path).name}:{frame.line}" if frame.line else Path(frame.path).name


def _refined(judgement: Judgement, answer: TensorAnswer) -> Judgement:
    """The judgement, refined by the requested tensor, where it is known and there is no stronger evidence."""
    best = answer.candidates[0] if answer.candidates else None
    if best is not None and best.name == "kv_cache":
        return _with_cache(judgement, best)
    if best is None or best.fit < _TELLING_FIT or best.name not in _CAUSE_OF_TENSOR:
        return judgement
    is_seen = best.fit >= 1 and bool(best.expression)
    is_named_closer = judgement.cause is Cause.ACTIVATIONS and judgement.confidence is Confidence.LIKELY
    if not (judgement.is_open or (is_named_closer and _CAUSE_OF_TENSOR[best.name] in _KINDS_OF_ACTIVATIONS)):
        return judgement
    key = "tensor_seen" if is_seen else "tensor_matches"
    known = (
        judgement.without_doubts if judgement.cause in (Cause.UNKNOWN, _CAUSE_OF_TENSOR[best.name]) or is_seen else ()
    )
    evidence = (*known, Evidence(key, {"formula": best.formula}))
    return Judgement(_CAUSE_OF_TENSOR[best.name], evidence, Confidence.LIKELY, judgement.possible)


def _with_cache(judgement: Judgement, cache: TensorCandidate) -> Judgement:
    """The judgement for a request by a growing key-value cache, unless stronger evidence exists."""
    if any(one.key == "tensor_kv_cache" for one in judgement.evidence):
        return judgement
    evidence = (Evidence("tensor_kv_cache", {"code": cache.expression}), *judgement.without_doubts)
    if judgement.cause is Cause.UNKNOWN:
        return Judgement(Cause.ACTIVATIONS, evidence, Confidence.LIKELY)
    return replace(judgement, evidence=evidence)


def _alive_needlessly(
    judgement: Judgement, twins: tuple[Evidence, ...], earlier: int, failure: Failure | None
) -> Judgement:
    """The judgement with memory that is held needlessly: the cause if the request would fit without it."""
    found = [*twins]
    if earlier:
        found.insert(0, Evidence("earlier_failures", {"held_bytes": earlier}))
    if not found or failure is None or not failure.requested_bytes:
        return judgement
    freed = earlier + sum(int(one.values["twin_bytes"]) for one in twins)
    is_enough = freed >= failure.requested_bytes - (failure.free_bytes or 0)
    if judgement.confidence is Confidence.CERTAIN or not is_enough:
        return replace(judgement, evidence=(*judgement.evidence, *found))
    evidence = (*found, *judgement.without_doubts)
    return Judgement(Cause.LEAK_OR_RETAINED_REFERENCE, evidence, Confidence.LIKELY)


def _is_oom(failures: Sequence[Failure]) -> bool | None:
    """Whether memory ran out: True if any message says so, False if every message says otherwise."""
    verdicts = {failure.is_oom for failure in failures}
    if True in verdicts:
        return True
    return False if verdicts == {False} else None


def _last_failure() -> BaseException:
    """What failed last in this interpreter, as ``%debug`` would have it."""
    last = getattr(sys, "last_value", None)
    if not isinstance(last, BaseException):
        raise ValueError(_("Nothing has failed in this session yet; pass an exception, a text or a path."))
    return last


def _text_of(problem: BaseException | str | Path) -> str:
    """The text to read; for an exception, its formatted traceback only."""
    if isinstance(problem, BaseException):
        return _formatted(problem)
    if isinstance(problem, Path) or is_path(problem):
        return read_text(Path(problem))
    return problem


def _formatted(error: BaseException) -> str:
    """The traceback as Python prints it, without the frames of this package's dry run, and with the lines that
    switched gradients off."""
    whole = traceback.TracebackException(type(error), error, error.__traceback__)
    for part in _chain(whole):
        users = [
            one
            for frame in part.stack
            if not is_machinery(frame.filename)
            for one in (*_without_gradients(frame), frame)
        ]
        part.stack = traceback.StackSummary.from_list(users)
    return "".join(whole.format())


def _without_gradients(frame: traceback.FrameSummary) -> Iterator[traceback.FrameSummary]:
    """The lines that switch gradients off for a line of the user's: a block's around it, its function's decorator."""
    if not is_users_file(frame.filename) or frame.lineno is None:
        return
    try:
        tree = ast.parse("".join(linecache.getlines(frame.filename)))
    except (SyntaxError, ValueError):  # a cell with magics in it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and node.lineno < frame.lineno <= (node.end_lineno or 0):
            switches: list[ast.expr] = [item.context_expr for item in node.items]
        elif isinstance(node, ast.FunctionDef) and node.lineno <= frame.lineno <= (node.end_lineno or 0):
            switches = node.decorator_list
        else:
            continue
        for one in switches:
            if any(word in ast.unparse(one) for word in _GRADIENTS_OFF):
                yield traceback.FrameSummary(frame.filename, one.lineno, frame.name)


def _chain(part: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    yield part
    for origin in (part.__cause__, part.__context__):
        if origin is not None:
            yield from _chain(origin)
