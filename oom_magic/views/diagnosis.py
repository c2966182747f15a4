"""The view of a Diagnosis: three lines on top (what, why, what to change), then the details; in its own language."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from oom_magic.explain.diagnosis import Diagnosis
from oom_magic.explain.evidence.budget import Budget
from oom_magic.explain.evidence.causes import HOST_CAUSES, INPUT_CAUSES, Cause, Confidence, Evidence, PossibleCause
from oom_magic.explain.evidence.checks import device_tool
from oom_magic.explain.evidence.checks import is_settled as is_seen_already
from oom_magic.explain.evidence.clues.programs import PROGRAMS_BY_KEY
from oom_magic.explain.evidence.grounds import speaks_for_another
from oom_magic.explain.evidence.meanings import meaning_of
from oom_magic.explain.live.holders import Holder
from oom_magic.explain.messages.failure import Failure
from oom_magic.explain.messages.told import says_only_killed, says_only_trouble
from oom_magic.explain.remedies.remedy import Remedy
from oom_magic.explain.sentences.catalogue import SENTENCES, render_evidence, translate
from oom_magic.explain.sentences.causes import cause_in_words, causes_in_brief
from oom_magic.explain.sentences.first_step import RELEASING, has_more, is_checked_first, is_tried, told_changes
from oom_magic.language import Language
from oom_magic.predict.setups.setup import in_words
from oom_magic.views.blocks import Block, Code, Description, Details, Part, Parts, Sentence, Table, register
from oom_magic.views.remedies import Unpriced, Wording, best_remedy, remedies_chart, remedies_details
from oom_magic.views.words import code_in

_HUES = {
    "budget_allocated": "parameter",
    "budget_private_pools": "workspace",
    "budget_stuck": "cached",
    "budget_reserved": "parameter",
    "budget_own_process": "parameter",
    "budget_other_processes": "other",
    "budget_listed_process": "other",
    "budget_mps_other": "other",
    "budget_unexplained": "other",
    "budget_free": "free",
    "budget_rounding": "free",
    "budget_in_system_memory": "free",
}
# Saved for the backward: an author who writes "activations" may mean these, too.
_ACTIVATION_CAUSES = (Cause.LOGITS_OR_LOSS, Cause.ATTENTION_SCORES)
_WITH_USUAL_STEPS = (
    Cause.ACTIVATIONS, Cause.LOGITS_OR_LOSS, Cause.ATTENTION_SCORES, Cause.OPTIMIZER_STATE, Cause.WEIGHTS_TOO_BIG,
    Cause.UNKNOWN,
)  # fmt: skip
_WITHOUT_EFFECT = ("workers", "clearing", "clipping")
# The remedies that an author's proposal stands for, if it is not the key of one.
_REMEDIES_OF_PROPOSAL = {
    "mixed_precision": ("mixed_precision", "half_weights"),
    "quantized": ("qlora", "loaded_4bit", "loaded_8bit", "quantized_model"),
    "offload": ("offload", "offload_optimizer", "diffusers_offload", "diffusers_sequential"),
}
# Proposals that are not among the remedies: the sentence about their saving in general.
_GENERAL_SAVINGS: dict[str, tuple[str, dict[str, str | int]]] = {
    "smaller_batch": ("remedy_smaller_batch_any", {}),
    "shorter_sequences": ("remedy_shorter_sequences_any", {}),
    "checkpointing": ("remedy_checkpointing", {}),
    "mixed_precision": ("remedy_mixed_precision", {"dtype": "bf16"}),
    "quantized": ("remedy_loaded_4bit", {}),
    "offload": ("remedy_offload", {}),
    "fsdp": ("remedy_fsdp_any", {}),
    "sdpa": ("remedy_sdpa", {}),
    "optimizer_8bit": ("remedy_optimizer_8bit", {}),
    "smaller_model": ("remedy_smaller_model", {}),
}
# The same, if the text shows no code, which could have them already.
_CONDITIONAL_REMEDIES = {"checkpointing": "checkpointing_setting", "mixed_precision": "half_setting", "fsdp": "fsdp_if"}
_MOST_MISSING = 2
_UNINFORMATIVE_NOTES = ("tensor_not_printed", "tensor_unknown_model")
# Of the likeliest cause's degree. In 227 reports read blind, less than that was the established cause in 7 of 17, and
# the likeliest was wrong there in 2.
_LEAST_OF_BEST = 0.65
_MOST_OTHERS = 1
_MOST_NAMED = 3  # of the causes that a text leaves open
# Evidence that is as true of any run with such numbers.
_OF_ANY_SUCH_RUN = "own_tensors_fill"
# Changes that show by themselves whether the inputs were the cause.
_LESS_INPUT = (
    "smaller_batch_any", "smaller_batch_plain", "smaller_input", "smaller_items", "smaller_image", "smaller_graph",
    "shorter_sequences_any", "shorter_context", "fewer_pixels", "vllm_pixels", "ctranslate2_less",
)  # fmt: skip
# Checks that are worth making though the cause is certain: they say how much was missing.
_SAYS_HOW_MUCH = ("check_host_ram_slurm", "check_host_ram_pod", "check_host_ram_windows")
_CONDITIONAL: dict[Language, tuple[str, ...]] = {"en": ("If ", "Where "), "zh": ("若", "如果")}
_DEVICES = {"npu": "NPU", "mlu": "MLU"}
_LONGEST_MESSAGE = 1200
_MOST_HOLDERS = 12
# What there is to do about failures that are not about memory, where more can be said than of any.
_ADVICE_BY_FORMAT = {"tensorflow_goes_on": "advice_goes_on", "device_lost": "advice_device_lost"}
_SIZE_ERRORS = ("request_absurd", "request_overflowed", "meaning_cuda_absurd_size")
_LIKELY_FIT = 0.7
_STATE_ON_HOST = "{name: value.cpu() for name, value in model.state_dict().items()}"


@register
def describe_diagnosis(diagnosis: Diagnosis) -> Description:
    """What happened, why and what to change, each in a line; below them everything that is known."""
    lang = diagnosis.lang
    if diagnosis.main_failure is None and "asks_need" in diagnosis.told and diagnosis.confidence is Confidence.OPEN:
        return _answer(diagnosis)
    blocks: list[Block] = []
    first = ""
    if diagnosis.main_failure is not None or diagnosis.cause is not Cause.UNKNOWN:
        first = best_remedy(diagnosis.remedies, diagnosis.as_is, lang) or _advice(diagnosis, lang)
        blocks += [*_what(diagnosis), _why(diagnosis), _change(diagnosis, first), *_lines(diagnosis, first)]
    blocks += remedies_chart(diagnosis.remedies, diagnosis.as_is, lang)
    heading = (
        "heading_if_so" if is_checked_first(diagnosis) else "heading_try" if is_tried(diagnosis) else "heading_changes"
    )
    unpriced = Unpriced(diagnosis.run, first, translate(heading, lang))
    told = told_changes(diagnosis)
    blocks += [*_budget(diagnosis), *remedies_details(told, lang, diagnosis.as_is, unpriced)]
    blocks += [*_tensors(diagnosis), *_evidence(diagnosis), *_possible(diagnosis)]
    blocks += [*_numbers(diagnosis), *_story(diagnosis), *_holders(diagnosis), *_message(diagnosis)]
    return Description(_title(diagnosis), tuple(blocks))


def _answer(diagnosis: Diagnosis) -> Description:
    """Of a text that only asks how much memory a run needs: how to find out, and what its model's weights take."""
    lang = diagnosis.lang
    lines = (Sentence(translate("line_asked", lang)), Sentence(translate("line_answer", lang), "good"))
    return Description(translate("title_asked", lang), (*lines, *_evidence(diagnosis)))


def _title(diagnosis: Diagnosis) -> str:
    failure, lang = diagnosis.main_failure, diagnosis.lang
    if failure is None:
        return translate("title_nothing" if diagnosis.cause is Cause.UNKNOWN else "title_told", lang)
    if failure.words:  # no more is known than its author says
        is_killed, is_trouble = says_only_killed(failure.text), says_only_trouble(failure.text)
        said = "title_told" if is_trouble else "title_told_killed" if is_killed else "title_told_full"
        return translate(said, lang)
    is_sure = failure.backend is None or diagnosis.confidence in (Confidence.LIKELY, Confidence.CERTAIN)
    if diagnosis.cause in HOST_CAUSES and failure.is_oom is not None and is_sure:
        return translate("title_host", lang)
    if diagnosis.is_oom and failure.backend == "cpu":
        return translate("title_host", lang)
    if diagnosis.is_oom and failure.requested_bytes:
        return translate("title_requested", lang, requested_bytes=failure.requested_bytes)
    if diagnosis.is_oom and failure.backend is None:
        return translate("title_memory", lang)  # whose memory is not said
    verdicts = {True: "title_device", False: "title_not_oom", None: "title_open"}
    return translate(verdicts[diagnosis.is_oom], lang)


def _what(diagnosis: Diagnosis) -> Iterator[Block]:
    failure, lang = diagnosis.main_failure, diagnosis.lang
    if failure is None:
        return
    said = _said_first(diagnosis)
    text = _asked(failure, lang) if said is None else render_evidence(said, lang)
    yield Sentence(translate("line_what", lang, text=text), "warning" if diagnosis.is_oom is None else "bad")


def _said_first(diagnosis: Diagnosis) -> Evidence | None:
    """What a message that prints no request means, as the first line says it; None without such a message."""
    failure = diagnosis.main_failure
    if failure is None or _asked(failure, diagnosis.lang):
        return None
    return meaning_of(failure, PROGRAMS_BY_KEY.get(diagnosis.program))


def _asked(failure: Failure, lang: Language) -> str:
    """The request and what it met, as far as the message says; empty where it prints no request."""
    if not failure.requested_bytes:
        return ""
    sizes: dict[str, Any] = {
        "requested_bytes": failure.requested_bytes,
        "total_bytes": failure.total_bytes,
        "held_bytes": failure.pytorch_bytes,
        "free_bytes": failure.free_bytes,
    }
    values = {**sizes, "device": _device(failure, lang)}
    if None not in sizes.values():
        return translate("what_full", lang, **values)
    if failure.total_bytes is not None:
        return translate("what_capacity", lang, **values)
    if failure.limit_bytes is not None and failure.pytorch_bytes is not None:
        return translate("what_limited", lang, limit_bytes=failure.limit_bytes, **values)
    return translate("what_requested", lang, **values)


def _device(failure: Failure, lang: Language) -> str:
    if failure.device_index is None:
        return translate("device_any", lang)
    return translate(
        "device_numbered", lang, device=_DEVICES.get(failure.backend or "", "GPU"), index=failure.device_index
    )


def _why(diagnosis: Diagnosis) -> Block:
    lang = diagnosis.lang
    cause = cause_in_words(diagnosis.cause, diagnosis)
    if diagnosis.confidence is Confidence.OPEN:
        if diagnosis.possible and diagnosis.possible[0].check.key == "check_when_full_late":
            cause = translate("cause_leak_or_retained_reference_late", lang)
        elif diagnosis.main_failure is None:
            cause = translate("cause_unknown", lang)
        elif diagnosis.possible:
            first = diagnosis.possible[0]
            is_usual = not any(map(_is_of_this_run, first.evidence))
            is_usual = is_usual and (bool(first.evidence) or first.cause is Cause.ACTIVATIONS)
            cause = _open_in_words(diagnosis, is_usual)
        return Sentence(translate("line_why_open", lang, text=cause), "strong")
    if diagnosis.confidence is Confidence.POSSIBLE:
        others = [one.cause for one in diagnosis.possible[:_MOST_NAMED] if one.cause is not diagnosis.cause]
        if others and not any(one.needed_bytes is not None for one in diagnosis.remedies):
            cause = translate("why_also", lang, text=cause, others=causes_in_brief(others, diagnosis))
        return Sentence(translate("line_why_possible", lang, text=cause), "strong")
    confidence = translate(f"confidence_{diagnosis.confidence.value}", lang)
    return Sentence(translate("line_why", lang, text=cause, confidence=confidence), "strong")


def _open_in_words(diagnosis: Diagnosis, is_usual: bool) -> str:
    """The causes that a text leaves open; ``is_usual``: nothing but how often they are it speaks for the first."""
    lang, causes = diagnosis.lang, [one.cause for one in diagnosis.possible[:_MOST_NAMED]]
    if not is_usual:
        return translate("why_possible", lang, causes=causes_in_brief(causes, diagnosis))
    first = causes_in_brief(causes[:1], diagnosis)
    if len(causes) == 1:
        return translate("why_usual", lang, first=first)
    return translate("why_usual_else", lang, first=first, others=causes_in_brief(causes[1:], diagnosis))


def _change(diagnosis: Diagnosis, first: str) -> Block:
    """What to do first: the change, or the check that decides whether it is the right one."""
    lang = diagnosis.lang
    if not is_checked_first(diagnosis):
        return Sentence(translate("line_try" if is_tried(diagnosis) else "line_best", lang, text=first), "good")
    check = render_evidence(diagnosis.possible[0].check, lang)
    is_more = has_more(diagnosis)
    tells_apart = diagnosis.possible[0].check.key.startswith("check_when_full")
    is_conditional = first.startswith(_CONDITIONAL[lang])  # itself
    key = "line_check_more" if is_conditional else "line_check_last" if tells_apart else "line_check_and"
    key = key if is_more else "line_check"
    return Sentence(translate(key, lang, check=check, text=first), "good")


def _lines(diagnosis: Diagnosis, first: str) -> Iterator[Block]:
    """The lines of the first change, to copy, where it is told."""
    remedy = _first_unpriced(diagnosis)
    if is_checked_first(diagnosis) and not has_more(diagnosis):
        return
    if remedy is not None and remedy.code and first == Wording(diagnosis.remedies, diagnosis.lang).of(remedy):
        yield Code(code_in(diagnosis.lang, remedy.code), remedy.language)


def _advice(diagnosis: Diagnosis, lang: Language) -> str:
    """The first remedy without a price; where none is left, what else there is to say."""
    line = next((one.values["code"] for one in diagnosis.evidence if one.key == "request_of_line"), "")
    if any(one.key in _SIZE_ERRORS for one in diagnosis.evidence):
        return translate("advice_overflow_line" if line else "advice_overflow", lang, code=line)
    first = _first_unpriced(diagnosis)
    if first is not None:
        return render_evidence(Evidence(f"remedy_{first.key}", first.values), lang)
    if diagnosis.phase == "saving" and diagnosis.cause is Cause.WEIGHTS_TOO_BIG:
        return translate("advice_saving", lang, code=_STATE_ON_HOST)
    failure = diagnosis.main_failure
    if failure is not None and failure.format in _ADVICE_BY_FORMAT and diagnosis.cause is Cause.NOT_OOM:
        return translate(_ADVICE_BY_FORMAT[failure.format], lang)
    if diagnosis.cause in _WITH_USUAL_STEPS:  # the run has each of them, or nothing speaks for it
        return translate("advice_unknown", lang)
    return translate(f"advice_{diagnosis.cause.value}", lang, tool=device_tool(diagnosis.backend))


def _first_unpriced(diagnosis: Diagnosis) -> Remedy | None:
    return next((one for one in diagnosis.remedies if one.needed_bytes is None), None)


def _budget(diagnosis: Diagnosis) -> Iterator[Block]:
    is_known = diagnosis.budget is not None and any(row.key != "budget_not_said" for row in diagnosis.budget.rows)
    if diagnosis.budget is not None and is_known:
        whole = "budget_limit" if diagnosis.backend == "mps" else "budget_capacity"
        yield from _budget_blocks(diagnosis.budget, whole, diagnosis.lang)


def _budget_blocks(budget: Budget, whole: str, lang: Language) -> tuple[Block, ...]:
    parts = tuple(Part(translate(row.key, lang), row.num_bytes, _HUES.get(row.key, "outside")) for row in budget.rows)
    bar = Parts(translate("heading_budget", lang), parts, translate(whole, lang), budget.capacity_bytes)
    if not budget.rounding_bytes:
        return (bar,)
    return bar, Sentence(translate("rounding_note", lang, rounding_bytes=budget.rounding_bytes), "quiet")


def _tensors(diagnosis: Diagnosis) -> Iterator[Block]:
    lang = diagnosis.lang
    if not diagnosis.tensors:
        if (
            diagnosis.tensor_note
            and diagnosis.tensor_note not in _UNINFORMATIVE_NOTES
            and diagnosis.cause not in HOST_CAUSES
        ):
            yield Details(translate("heading_tensor", lang), (Sentence(translate(diagnosis.tensor_note, lang)),))
        return
    rows = tuple((translate(f"tensor_name_{one.name}", lang), one.formula) for one in diagnosis.tensors)
    note = [Sentence(translate(diagnosis.tensor_note, lang))] if diagnosis.tensor_note else []
    blocks: list[Block] = [*note, Table((translate("column_tensor", lang), translate("column_formula", lang)), rows)]
    best = diagnosis.tensors[0]
    is_seen = best.fit >= 1 and bool(best.expression)
    supposed = "fit_likely" if best.fit >= _LIKELY_FIT else "fit_supposed"
    if diagnosis.tensors[0].name != "stated":
        blocks.append(Sentence(translate("fit_exact" if is_seen else supposed, lang), "quiet"))
    if best.expression:
        blocks.append(Code(best.expression))
    yield Details(translate("heading_tensor", lang), tuple(blocks))


def _evidence(diagnosis: Diagnosis) -> Iterator[Block]:
    lang = diagnosis.lang
    first = _said_first(diagnosis)
    items = [one for one in _located(diagnosis) if one != first and _says_something(one)]
    top = [] if first is None else [Evidence("", {"quote": str(first.values.get("words", ""))})]
    items = [one for at, one in enumerate(items) if not _is_quoted_before(one, items[:at])]
    items = [one for one in items if one.key in SENTENCES or not _is_quoted_before(one, top)]
    sentences = [_shown(one, lang) for one in items]
    if diagnosis.setup_phrases:
        setup = in_words(diagnosis.setup_phrases, lang)
        sentences.append(translate("setup_said", lang, setup=setup))
    if sentences:
        blocks = tuple(Sentence(f"• {text}") for text in sentences)
        yield Details(translate("heading_evidence", lang), blocks)


def _is_quoted_before(item: Evidence, others: Sequence[Evidence]) -> bool:
    """Whether the author's words have been shown for something else that they say."""
    words = str(item.values.get("quote", "")).strip("… ")
    shown = [str(one.values.get("quote", "")).strip("… ") for one in others]
    is_bare = item.key not in SENTENCES
    return bool(words) and any(words in one or (is_bare and one and one in words) for one in shown)


def _says_something(item: Evidence) -> bool:
    """Whether the evidence has a sentence, or the author's words; the rest is only weighed."""
    return item.key in SENTENCES or "quote" in item.values


def _is_of_this_run(item: Evidence) -> bool:
    return _says_something(item) and item.key != _OF_ANY_SUCH_RUN


def _shown(item: Evidence, lang: Language) -> str:
    """The author's words as they stand, and what is true of any such run."""
    quote = item.values.get("quote")
    words = translate("evidence_quoted", lang, quote=quote) if quote else ""
    sentence = render_evidence(item, lang) if item.key in SENTENCES else ""
    sentence = translate("evidence_told_last", lang, sentence=sentence) if "is_told" in item.values else sentence
    return f"{words}{' ' if words and sentence and lang == 'en' else ''}{sentence}"


def _possible(diagnosis: Diagnosis) -> Iterator[Block]:
    """The check that settles the cause, where that is worth making, and the other causes that something speaks for."""
    lang, first = diagnosis.lang, next(iter(diagnosis.possible), None)
    others = [one for one in diagnosis.possible[1:] if one.cause is not diagnosis.cause and _may_be(one, diagnosis)]
    blocks: list[Block] = []
    if first is not None and _is_worth_confirming(first, diagnosis):
        check = render_evidence(first.check, lang)
        blocks.append(Sentence(f"• {translate('possible_first', lang, check=check) if others else check}"))
    for one in others[:_MOST_OTHERS]:
        cause, degree = cause_in_words(one.cause, replace(diagnosis, evidence=one.evidence)), _degree(one, lang)
        text = translate("possible_also", lang, cause=cause, confidence=degree, check=render_evidence(one.check, lang))
        blocks.append(Sentence(f"• {text}", "quiet"))
    if blocks:
        yield Details(translate("heading_possible" if others else "heading_confirm", lang), tuple(blocks))


def _degree(one: PossibleCause, lang: Language) -> str:
    """How sure a cause is, and what speaks for it."""
    degree = translate(f"confidence_{one.confidence.value}", lang)
    said = next((_shown(item, lang) for item in one.evidence if _says_something(item)), "")
    return f"{degree}{'；' if lang == 'zh' else '; '}{said.rstrip('.。')}" if said else degree


def _is_worth_confirming(one: PossibleCause, diagnosis: Diagnosis) -> bool:
    """Whether the cause may be another, and its check is neither on top already nor the change itself."""
    if one.cause is not diagnosis.cause or is_checked_first(diagnosis):
        return False
    if is_seen_already(one.cause, diagnosis.told) and one.check.key not in _SAYS_HOW_MUCH:
        return False
    failure = diagnosis.main_failure
    if failure is not None and failure.format == "told_host" and not says_only_killed(failure.text):
        return False  # it is what the text says
    first = diagnosis.remedies[0].key if diagnosis.remedies else ""
    is_tried_by_it = first in RELEASING or (first in _LESS_INPUT and one.cause in INPUT_CAUSES)
    is_evaluated = any(remedy.needed_bytes is not None for remedy in diagnosis.remedies)
    is_open = one.confidence is Confidence.POSSIBLE and not (is_tried_by_it or is_evaluated)
    return is_open or one.check.key in _SAYS_HOW_MUCH


def _may_be(one: PossibleCause, diagnosis: Diagnosis) -> bool:
    """Whether the message, a frame or a line of code speaks for another cause, and not much more for the likeliest."""
    if not any(speaks_for_another(item) for item in one.evidence if _is_of_this_run(item)):
        return False
    is_near = one.degree >= _LEAST_OF_BEST * diagnosis.possible[0].degree
    return is_near and (one.confidence is not Confidence.OPEN or diagnosis.confidence is Confidence.OPEN)


def _located(diagnosis: Diagnosis) -> Iterator[Evidence]:
    """The evidence and the phase. The user's line is quoted once, with its location; after that only the location."""
    items = list(diagnosis.evidence)
    is_told = any(item.key.startswith("phase_") for item in items)
    of_device = diagnosis.cause not in HOST_CAUSES and diagnosis.main_failure is not None
    if diagnosis.phase and diagnosis.code and of_device and not is_told:
        items.append(Evidence(f"phase_{diagnosis.phase}", {"code": diagnosis.code}))
    is_quoted = False
    for item in items:
        code = item.values.get("code")
        if code is not None and diagnosis.place and diagnosis.code:
            is_innermost = not item.key.startswith("phase_") and code != diagnosis.code
            quoted = code if is_innermost else diagnosis.code
            text = diagnosis.place if is_quoted and not is_innermost else f"{quoted} ({diagnosis.place})"
            item = Evidence(item.key, {**item.values, "code": text})
            is_quoted |= not is_innermost
        yield item


def _numbers(diagnosis: Diagnosis) -> Iterator[Block]:
    lang = diagnosis.lang
    items = [*diagnosis.facts, *([diagnosis.tip] if diagnosis.tip else [])]
    if items:
        sentences = tuple(Sentence(f"• {render_evidence(item, lang)}") for item in items)
        yield Details(translate("heading_numbers", lang), sentences)


def _story(diagnosis: Diagnosis) -> Iterator[Block]:
    """The author's own causes and fixes, judged: confirmed or not; helpful, useless or missing."""
    lang, story = diagnosis.lang, diagnosis.story
    if not story.proposals and not story.causes:
        return
    sentences = [*_causes_named(diagnosis), *_proposals_judged(diagnosis)]
    yield Details(translate("heading_story", lang), tuple(Sentence(f"• {text}") for text in sentences))


def _causes_named(diagnosis: Diagnosis) -> Iterator[str]:
    possible = {one.cause for one in diagnosis.possible if one.confidence is not Confidence.OPEN}
    for cause in diagnosis.story.causes:
        is_part = cause is Cause.ACTIVATIONS and diagnosis.cause in _ACTIVATION_CAUSES
        agrees = "agrees" if cause is diagnosis.cause or is_part else "possible" if cause in possible else "unsupported"
        text = cause_in_words(cause, diagnosis)
        yield translate(f"story_cause_{agrees}", diagnosis.lang, cause=text)


def _proposals_judged(diagnosis: Diagnosis) -> Iterator[str]:
    lang, wording = diagnosis.lang, Wording(diagnosis.remedies, diagnosis.lang)
    against = {one.key.removesuffix("_any"): one for one in diagnosis.remedies if (one.saving_bytes or 1) > 0}
    named: set[str] = set()
    for key in diagnosis.story.proposals:
        if key == "smaller_batch" and "batch_of_one" in diagnosis.told:
            continue  # tried to its end
        if key in _WITHOUT_EFFECT:
            yield translate(f"story_{key}", lang)
            continue
        meant = [one for one in _REMEDIES_OF_PROPOSAL.get(key, (key,)) if one in against]
        named.update([*meant, _CONDITIONAL_REMEDIES.get(key, key)])
        if meant:
            yield translate("story_helps", lang, remedy=wording.of(against[meant[0]]))
        elif key in _GENERAL_SAVINGS:
            how = "story_helps" if _CONDITIONAL_REMEDIES.get(key) in against else "story_saves_too"
            yield translate(how, lang, remedy=_in_general(key, lang))
    if diagnosis.confidence not in (Confidence.CERTAIN, Confidence.LIKELY):
        return
    for missing in [one for key, one in against.items() if key not in named][:_MOST_MISSING]:
        yield translate("story_missing", lang, remedy=wording.of(missing))


def _in_general(proposal: str, lang: Language) -> str:
    key, values = _GENERAL_SAVINGS[proposal]
    return translate(key, lang, **values)


def _holders(diagnosis: Diagnosis) -> Iterator[Block]:
    lang, holders = diagnosis.lang, diagnosis.holders
    if not holders:
        return
    rows = tuple((_holder(one, lang), one.num_bytes) for one in holders[:_MOST_HOLDERS])
    blocks: list[Block] = [Table((translate("column_holder", lang), translate("column_bytes", lang)), rows)]
    kinds = {one.kind for one in holders[:_MOST_HOLDERS]}
    if kinds & {"name", "output"}:
        blocks.append(Sentence(translate("free_what_is_held", lang), "quiet"))
    elif kinds & {"frames", "own_frames"}:
        blocks.append(Sentence(translate("free_what_failed", lang), "quiet"))
    yield Details(translate("heading_holders", lang), tuple(blocks))


def _holder(holder: Holder, lang: Language) -> str:
    name = translate(f"category_{holder.name}", lang) if holder.kind == "category" else holder.name
    what = "" if holder.what is None else render_evidence(holder.what, lang)
    return translate(f"held_by_{holder.kind}", lang, name=name, what=what)


def _message(diagnosis: Diagnosis) -> Iterator[Block]:
    failure, lang = diagnosis.main_failure, diagnosis.lang
    if failure is not None and failure.text and not failure.words:
        text = failure.text[:_LONGEST_MESSAGE].strip()
        text += "" if text.endswith((".", ")")) else " …"
        yield Details(translate("heading_message", lang), (Sentence(text, "quiet"),))
