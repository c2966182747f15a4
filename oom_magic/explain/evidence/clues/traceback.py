"""Clues in a pasted traceback: the phase of training and the line that failed; and all clues of a text together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from oom_magic.explain.evidence.clues.environment import libraries_in, sets_expandable_segments, systems_in, tip_in
from oom_magic.explain.evidence.clues.magnitudes import (
    Magnitude,
    Weights,
    array_bytes,
    card_bytes,
    large_inputs,
    num_cards,
    num_trained,
    ram_bytes,
    weights_in,
)
from oom_magic.explain.evidence.clues.pasted_code import CodeFault, faults_in
from oom_magic.explain.evidence.clues.programs import ProgramUse, find_program
from oom_magic.explain.evidence.clues.progress import RunFacts, run_facts
from oom_magic.explain.evidence.clues.story import Story, asked_in, story_in
from oom_magic.explain.evidence.clues.whose_code import shown_in
from oom_magic.explain.messages.normalization import clean, without_repeats
from oom_magic.explain.messages.told import named_accelerator

_SKIPPED = re.compile(r"Skipping tactic")
_NO_ENGINE = re.compile(r"could not find any implementation|engine could not be created|failed tensorrt", re.I)
# Libraries that a run does not use: in lists of an environment (transformers-cli env), what is not there, what works.
_ASIDE = re.compile(
    r"(?i:tensorflow|flax|jax(?:lib)?) version[^\n]*|(?m:^[-*\t ]{0,6}jax(?:lib)?[ =:]{1,3}v?\d[\d.]{0,12}[ \t]*$)"
    r"|[^\n]{0,80}\bnot installed\b[^\n]*"
    r"|\bno (?:problem|issue|trouble)s? (?:with|when|in) [^.\n)]{0,60}"
    r"|\b(?:also|the same) [^.\n]{0,60}\b(?:with|in|using|on) (?i:vllm|sglang|tgi)\b"
)
_MAX_LINES = 400
_MAX_LINE = 400
# How many of the innermost lines decide which tensor was being made.
_NUM_INNERMOST = 8

_FRAME = re.compile(
    r'File "?(?P<path>[^"\n]{1,300}?)"?, line (?P<line>\d{1,7})(?:, in (?P<function>[\w<>.]{1,120}))?'
    r"|File (?P<new_path>[^\n]{1,300}?):(?P<new_line>\d{1,7}),? in (?P<new_function>[\w<>.]{1,120})"
    r"|Cell In ?\[(?P<cell>\d{1,6})\], line (?P<cell_line>\d{1,7})"
    r"|(?P<rich_path>[\w:./\\~ -]{1,300}\.py):(?P<rich_line>\d{1,7}) in (?P<rich_function>[\w<>.]{1,120})"
    r"|(?P<old_path>[\w:./\\~-]{1,300}\.py|<ipython-input-[\w-]{1,60}>) in (?P<old_function>[\w<>.]{1,120})"
)
_TRACE_HEAD = re.compile(r"Traceback \(most recent call last\)|Original ATen:|^\s*\u2192 ")
# How many lines of code right before a message are taken for the end of a traceback without frames.
_MAX_BARE_LINES = 3
_FENCE = re.compile(r"^[ \t>]{0,8}```[^\n]{0,40}\n|\n[ \t]{0,8}\n", re.M)  # behind it somebody else speaks
_MAX_HEAD = 30_000
_MAX_AROUND = 15_000
_BLANKS = re.compile(r"[ \t\xa0]{2,}|\xa0")
_ARROW = re.compile(r"^\s*(?:-{2,6}>|❱|->)\s*(?P<line>\d{1,7})\s+(?P<code>.{1,300})")
_NUMBERED = re.compile(r"^\d{1,6} +(?=[a-zA-Z_@(])")  # IPython shows lines around the failing one so
_PLUMBING = re.compile(r"return (?:self\.)?_?(?:call_impl|forward_call|wrapped_call_impl|run_module_as_main)\(")
_RULES = re.compile(r"[\u2500-\u257f]|^\s*\^+\s*$")


def _any(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns))


_PHASES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "optimizer_step",
        _any(
            r"torch[/\\.]optim[/\\.]", r"\boptim(?:izer)?s?\.step\(", r"(?<!stored_state\[.)exp_avg",
            r"_init_group", r"momentum_buffer", r"_multi_tensor_\w+", r"_single_tensor_\w*adam",
            r"bitsandbytes[/\\]optim", r"apex[/\\]optimizers",
        ),
    ),
    (
        "saving",
        _any(
            r"torch\.save\(", r"save_pretrained", r"\bstate_dict\(", r"save_checkpoint", r"save_model",
            r"save_weights", r"save_file\(",
            r"Failed to clone\(\) tensor",
        ),
    ),
    (
        "backward",
        _any(r"\.backward\(", r"run_backward", r"\bin backward\b", r"autograd[/\\]__init__"),
    ),
    (
        "loss",
        _any(
            r"cross_entropy", r"CrossEntropy", r"logits\.(?:float|clone)\(", r"log_softmax", r"log_?probs?\b",
            r"\bloss_fct\(", r"\bcriterion\(", r"\bloss_func(?:tion)?\(", r"nll_loss",
        ),
    ),
    (
        "loading",
        _any(
            r"from_pretrained", r"load_state_dict", r"load_checkpoint", r"load_model", r"load_weights?\b",
            r"load_shard", r"patch_weight",
            r"safetensors[/\\.]|\bsafe_open\b", r"torch[/\\]serialization", r"param_applied = fn\(", r"\bin _apply\b",
            r"return (?:t|tensor)\.to\(", r"\btensor = tensor\.to\(", r"\bmodel\w*\.(?:to\(|cuda\()",
            r"\bmodel ?= ?\w+\.(?:to\(|cuda\()", r"init_empty_weights", r"set_module_tensor_to_device",
            r"dispatch_model", r"\.prepare\(", r"\b(?:pipe|pipeline|module|net)\.(?:to\(|cuda\()",
            r"super\(\)\.to\(", r"\w*variables_initializer\(", r"torch[/\\]File\.lua", r"_init_param_handle"
            r"|\bparam_init_net\b|_sync_module_params",
            r"\bin (?:prepare_model|_prepare_one|accelerator_setup"
            r"|model_to_device)\b",
        ),
    ),
    ("forward", _any(r"\bin forward\b", r"_call_impl", r"\bF\.\w+\(", r"torch\._C\._nn\.", r"_conv_forward",
                     r"Original ATen:")),
)  # fmt: skip
# Statements that contain a forward. "net(x).sum().backward()" has not begun its backward.
_AROUND = (*_PHASES[:2], ("backward", _any(r"\bloss\w*\.backward\(", r"run_backward", r"\bin backward\b",
                                           r"autograd[/\\]__init__")))  # fmt: skip
_CLOSURE = re.compile(r"\bclosure\(\s*\)")
_EVALUATION = re.compile(
    r"\bin (?:_{0,2}(?:evaluat|validat|val(?![a-z]))\w*|eval\w*|test(?!_)\w*|predict\w*|prediction_step|inference"
    r"|log_validation|inference_\w+|(?:sample|generate|save)_(?:images?|samples?)\w*)\b"
)
_TRAINING = _any(
    r"\.backward\(", r"run_backward", r"training_step", r"_inner_training_loop", r"\bin train\w*\b",
    r"trainer\.train\(", r"optimizer\.step", r"torch[/\\.]optim[/\\.]",
    r"_batch_norm_legit_functional", r"CompiledFunctionBackward",  # compiled graphs that train
)  # fmt: skip
_TRAINING_STEP = re.compile(r"backward\(|optimizer|\.step\(|[/\\]optim[/\\]")
_AFTER_FORWARD = re.compile(r"run_backward|\.backward\(|optimizer\.step")
_COMPUTES_LOSS = re.compile(r"\blabels ?=|\)\.loss\b|\bcompute_loss\(|\btraining_step\(")
_NO_GRAD = re.compile(r"no_grad|inference_mode|decorate_context")
_SCORES = r"(?:attn|attention|energy|scores|sim|dots)"
_ATTENTION = _any(
    r"scaled_dot_product_attention",
    r"eager_attention_forward",
    rf"\b{_SCORES}\w* ?= ?[^\n]{{0,80}}(?:matmul|bmm|einsum|softmax|where)",
    rf"(?:softmax|bmm|matmul|einsum|baddbmm)\([^\n]{{0,80}}(?:{_SCORES}|\bq(?:uery)?\b|_query)",
    r"\bq(?:uery)?\w* ?@ ?k(?:ey)?\w*",
    r"\bself\.self_attn\b[^\n]{0,80}softmax",
    r"attn_weights? ?=",
    r"_attn\(q",
    r"qk ?= ?",
)
_LOGITS = _any(
    r"logits\w*\.(?:float|clone|to|exp|log_softmax)\(", r"\blogits\w* ?[-+*/]=? ?\w",
    r"logits\[[^\n]{0,60}\]\.float\(", r"get_log_?probs?_from",
    r"logprobs?_from_logits",
    r"_get_logits", r"compute_logits", r"FusedProjectionPlusCrossEntropy|cross_entropy\.py", r"selective_log_softmax",
    r"ForCausalLMLoss", r"_convert_to_fp32",
    r"cross_entropy", r"CrossEntropy", r"log_softmax", r"compute_log_probs",
    r"lm_head\(", r"prompt_logprobs", r"nll_loss",
)  # fmt: skip
_CACHE = _any(r"transformers[/\\]cache_utils\.py", r"\b(?:key|value|k|v|kv)_cache\b[^\n]{0,80}= ?torch\.cat\(",
              r"\.cat\([^\n]{0,20}(?:past_(?:key|value|k\b|v\b)|(?:key|value|k|v)_cache)")  # fmt: skip
# In words: a setting beside others says nothing of what its author expects of it.
_ACCUMULATION = re.compile(r"gradient accumulation(?! steps)|accumulat\w* gradients|梯度累[积计]", re.I)
# A cell magic's frame quotes the whole cell, so every phase would be found in it.
_WHOLE_CELL = "get_ipython().run_cell_magic("
_SENTENCE = re.compile(r"^[^\"'=(]*(?:\b[A-Za-z]{2,} ){4}")
_RAISED = re.compile(r"[\w.]+(?:Error|Exception|Interrupt)(?::|\s*$)")  # what follows a frame without source
_QUOTED_CODE = re.compile(r"[`\"]([^`\"\n]{3,160}[=(@][^`\"\n]{1,160})[`\"]")
_FEW_PARAMETERS = re.compile(
    r"(?<![a-z])q?lora(?![a-z])|\b(?:peft(?! version)|adapters?|p-?tuning|prefix)\b|\blora_|frozen|bnb-4bit|in_[48]bit",
    re.I,
)
_BATCH_OF_ONE = re.compile(r"batch[-_ ]?size(?:\W{1,4}|\s(?:to|is|of|as)\s)1\b(?!\d)", re.I)
_SMALL_PICTURE = re.compile(
    r"(?:--?img(?:sz|[-_]size)?|ima?ge?[-_ ]size|imgsz)(?:\W{1,4}|\s(?:to|is|of"
    r"|as)\s)(?:[1-5]\d\d|640)\b",
    re.I,
)
_WORDS = re.compile(
    r"(?<![\w./])[A-Za-z]{2,}(?![\w./=(])|[\u4e00-\u9fff]{1,2}|[\u0400-\u04ff\u3040-\u30ff\uac00-\ud7af]{2,}"
)
_WORDS_OF_AN_AUTHOR = 6
_LONGEST_MESSAGE = 700
# Messages that print no sizes end at once.
_BARE_FORMATS = (
    "short", "cuda_error_oom", "class_only", "cuda_thc_pre0.4.1", "third_party_cuda_oom", "cuda_driver_call", "sigkill",
)  # fmt: skip
_BARE_LENGTH = 24
# Words of programs around "out of memory": the class, the request, PyTorch's tip.
_OF_A_MESSAGE = re.compile(
    r"[\w.]{1,60}(?:error|exception)\b:?|tried to allocate [\d.]{1,12} ?\w{1,5}\.?(?: gpu\b)?"
    r"|if reserved (?:but unallocated )?memory is\b[\s\S]{0,160}?fragmentation\.?"
    r"|see documentation for memory management(?:\s{0,4}\(?https?://\S{1,120}|\s{1,4}and pytorch_\w{1,20}conf)?",
    re.I | re.A,
)
_SMI = re.compile(r"(\d{1,7})MiB\s{0,3}/\s{0,3}(\d{1,7})MiB")
_FULL_FROM = 0.9
_NO_FACTS = RunFacts()
_NO_STORY = Story()


@dataclass(frozen=True)
class TracebackFrame:
    """One line of a traceback; ``code`` is empty where the paste shows none."""

    path: str
    line: int
    function: str
    code: str


@dataclass(frozen=True)
class Clues:
    """What the text around a message tells.

    ``phase`` is one of loading, forward, loss, backward, optimizer_step, evaluation, saving, or None;
    ``tensor`` names the kind of tensor being made (attention_scores, logits_or_loss, kv_cache), or None.
    ``code`` is the innermost line shown. ``expandable_segments`` is True where the text sets it.
    ``names_accumulation``: it speaks of gradient accumulation. ``faults`` are those of code pasted with it,
    ``run`` what is told of the run, ``program`` the inference server, pipeline or runtime that failed (None:
    training, or not told). ``trace`` holds the traceback's lines, ``tip`` names the tip of PyTorch's
    against fragmentation that is quoted (see ``tip_in``).
    ``card_bytes`` is the GPU's memory where the author names it ("RTX 3060 12GB"), ``weights`` the model's,
    ``ram_bytes`` the computer's, ``array_bytes`` the largest array that pasted code creates, ``inputs`` what is large.
    ``num_trained`` is a log's count of trained parameters. ``has_prose``: somebody wrote more than a message.
    ``trains_few``: an adapter is trained; ``is_tiny``: one small
    picture a step. ``full_devices`` is what a pasted nvidia-smi shows of a GPU that is full. ``story`` is what the
    author makes of it; ``accelerator`` the device named, unless it is NVIDIA's; ``shown`` what is shown and asked.
    """

    phase: str | None = None
    tensor: str | None = None
    code: str = ""
    frames: tuple[TracebackFrame, ...] = ()
    is_training: bool = False
    faults: tuple[CodeFault, ...] = ()
    run: RunFacts = _NO_FACTS
    program: ProgramUse | None = None
    trace: str = ""
    tip: str = ""
    frameworks: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    expandable_segments: bool = False
    names_accumulation: bool = False
    card_bytes: int | None = None
    array_bytes: int | None = None
    accelerator: str | None = None
    ram_bytes: int | None = None
    inputs: tuple[Magnitude, ...] = ()
    weights: Weights | None = None
    num_trained: int | None = None
    num_cards: int = 1
    trains_few: bool = False
    is_tiny: bool = False
    has_prose: bool = False
    skips_tactics: bool = False
    full_devices: str = ""
    story: Story = _NO_STORY
    shown: frozenset[str] = frozenset()

    @property
    def weights_bytes(self) -> int | None:
        """Bytes of the weights of the model that the author names."""
        return None if self.weights is None else self.weights.num_bytes

    @property
    def is_quantizing(self) -> bool:
        """Whether the program makes quantized weights, by its name or by what its user does."""
        is_named = self.program is not None and self.program.program.key == "quantizing"
        return is_named or (self.program is None and "quantizes" in self.run.told)

    @property
    def tells_of_training(self) -> bool:
        """Whether the author mentions training, in a program that trains or in an unknown one."""
        told = self.run.told
        is_told = "trains" in told and "in_evaluation" not in told
        return is_told and (self.program is None or self.program.program.trains)


def find_clues(text: str, failure_start: int | None = None, message_format: str | None = None) -> Clues:
    """Clues in a text about the failure whose ``start`` is given; nothing found leaves the defaults."""
    cleaned = clean(text)
    lines = _trace_lines(cleaned, failure_start, is_quoted=_is_quoted(failure_start, message_format))
    innermost, all_text, frames = lines[-_NUM_INNERMOST:], "\n".join(lines), _frames(lines)
    head = without_repeats(_context(cleaned, failure_start))
    raw = without_repeats(_raw_context(text))
    program = find_program(_ASIDE.sub("", raw), all_text, message_format)
    # code in a story is not what failed
    phase = _phase_in(lines, program) if frames or _is_quoted(failure_start, message_format) else None
    accelerator = named_accelerator(head)
    return Clues(
        phase=phase,
        tensor=_tensor(innermost, all_text) if lines else _tensor(_QUOTED_CODE.findall(head), ""),
        code=_line_of(phase, innermost) if lines and not frames else _innermost_code(innermost),
        frames=frames,
        is_training=bool(_TRAINING.search(all_text)),
        faults=faults_in(raw) or faults_in(head),
        run=_run_of(head, lines),
        program=program,
        trace=all_text,
        tip=tip_in(head),
        frameworks=libraries_in(head),
        systems=systems_in(head, accelerator),
        expandable_segments=sets_expandable_segments(head),
        names_accumulation=bool(_ACCUMULATION.search(head)),
        card_bytes=card_bytes(head),
        array_bytes=array_bytes(head),
        accelerator=accelerator,
        ram_bytes=ram_bytes(head),
        inputs=large_inputs(head),
        weights=weights_in(head, is_quantizing=program is not None and program.program.key == "quantizing"),
        num_trained=num_trained(head),
        num_cards=num_cards(head),
        trains_few=bool(_FEW_PARAMETERS.search(head)),
        full_devices=_full_device(head),
        story=story_in(head),
        shown=frozenset((*shown_in(head), *asked_in(head))),
        skips_tactics=_skips_tactics(head),
        has_prose=_is_prose(cleaned, failure_start, message_format, all_text),
        is_tiny=_is_tiny(head),
    )


def _is_quoted(failure_start: int | None, message_format: str | None) -> bool:
    """Whether the text quotes a message, not only tells of one."""
    return failure_start is not None and not (message_format or "").startswith("told")


def _run_of(head: str, lines: list[str]) -> RunFacts:
    """The facts of the text's run; ``in_evaluation`` is told by its frames."""
    facts = run_facts(head)
    if "sizes_contrast" in facts.told:  # of the sizes it was run with, one is no more its own than another
        facts = replace(facts, told=facts.told - {"has_batch_of_one"})
    evaluates = any(_EVALUATION.search(line) for line in lines) and not _AFTER_FORWARD.search("\n".join(lines))
    has_no_graph = any(_NO_GRAD.search(line) for line in lines) and not any(map(_TRAINING_STEP.search, lines))
    found = {"in_evaluation": evaluates, "without_graph": has_no_graph}
    return replace(facts, told=facts.told | {key for key, is_so in found.items() if is_so})


def _full_device(text: str) -> str:
    """nvidia-smi's row of a nearly full device beside a nearly empty one; empty if there is none."""
    rows = [(int(used), int(total), match) for match in _SMI.finditer(text) for used, total in [match.groups()]]
    full = [match.group() for used, total, match in rows if used >= _FULL_FROM * total]
    has_room = any(used < total / 10 for used, total, _ in rows)
    return full[0] if full and has_room else ""


def _is_prose(cleaned: str, failure_start: int | None, message_format: str | None, trace: str) -> bool:
    """Whether somebody wrote sentences around the message and the traceback."""
    if failure_start is None or not _is_quoted(failure_start, message_format):
        said = cleaned[:_MAX_HEAD]
    else:
        longest = _BARE_LENGTH if message_format in _BARE_FORMATS else _LONGEST_MESSAGE
        blank_line = cleaned.find("\n\n", failure_start, failure_start + longest)  # after it somebody writes
        end = failure_start + longest if blank_line < 0 else blank_line
        said = cleaned[:failure_start][:_MAX_HEAD] + cleaned[end : end + _MAX_AROUND]
    said = _OF_A_MESSAGE.sub(" ", said)
    return len(_WORDS.findall(said)) - len(_WORDS.findall(trace)) >= _WORDS_OF_AN_AUTHOR


def _context(cleaned: str, failure_start: int | None) -> str:
    """The text's beginning, where authors describe their work, and the text around the failure."""
    if len(cleaned) <= _MAX_HEAD + 2 * _MAX_AROUND:
        return cleaned
    start = len(cleaned) if failure_start is None else failure_start
    begin = max(_MAX_HEAD, start - _MAX_AROUND)
    return f"{cleaned[:_MAX_HEAD]}\n{cleaned[begin : start + _MAX_AROUND]}"


def _raw_context(text: str) -> str:
    """The same part of the text as it was pasted: prefixes of log lines name the program."""
    return text if len(text) <= _MAX_HEAD + _MAX_AROUND else f"{text[:_MAX_HEAD]}\n{text[-_MAX_AROUND:]}"


def _trace_lines(cleaned: str, failure_start: int | None, *, is_quoted: bool) -> list[str]:
    """The traceback's lines: from the first frame before the failure, or after it; code pasted elsewhere is none.

    Without a frame, the few lines of code right before the message are the traceback.
    """
    start = len(cleaned) if failure_start is None else failure_start
    before = _code_lines(cleaned[max(0, start - _MAX_LINES * 100) : start])
    traced = _from_first_frame(before)
    if traced:
        return traced[-_MAX_LINES:]
    after = _code_lines(cleaned[start : start + _MAX_LINES * 100])
    traced = _from_first_frame(after)
    if traced:
        head = before[-_MAX_BARE_LINES:] if is_quoted else []  # what stands before a story is not what failed
        return [*head, *traced][:_MAX_LINES]
    if is_quoted:
        before = _code_lines(_FENCE.split(cleaned[max(0, start - _MAX_LINES * 100) : start])[-1])
    bare = [line for line in before[-_MAX_BARE_LINES:] if _looks_like_code(line)]
    return bare if len([line for line in before if _looks_like_code(line)]) <= _MAX_BARE_LINES else []


def _from_first_frame(lines: list[str]) -> list[str]:
    first = next(
        (at for at, line in enumerate(lines) if _FRAME.search(line) or _ARROW.match(line) or _TRACE_HEAD.search(line)),
        None,
    )
    return [] if first is None else lines[first:]


def _code_lines(text: str) -> list[str]:
    """The lines of a text that say something, shortened, without the rules that frame a rich traceback."""
    lines = (_BLANKS.sub(" ", _RULES.sub(" ", line[:_MAX_LINE])).rstrip() for line in text.split("\n"))
    return [line for line in lines if line.strip() and _WHOLE_CELL not in line]


def _looks_like_code(line: str) -> bool:
    return bool(re.search(r"File |[\w\])] ?= ?\w|\w\(|\.py\b|Failed to clone", line))


def _skips_tactics(text: str) -> bool:
    """Whether TensorRT only left tactics out that need more memory, and built its engine."""
    return bool(_SKIPPED.search(text)) and not _NO_ENGINE.search(text)


def _is_tiny(text: str) -> bool:
    """Whether each step takes one small picture."""
    return bool(_BATCH_OF_ONE.search(text)) and bool(_SMALL_PICTURE.search(text))


def _phase_in(lines: list[str], program: ProgramUse | None) -> str | None:
    """The phase of a program; where PyTorch computes nothing, no autograd keeps anything in an evaluation."""
    phase = _phase(lines)
    return None if phase == "evaluation" and program is not None and not program.program.is_torch else phase


def _phase(lines: list[str]) -> str | None:
    """The phase of the innermost matching line; evaluation when an outer frame says so."""
    phase = None
    inner = _within_closure(lines)
    for line in reversed(inner):
        phase = next((name for name, pattern in _PHASES if pattern.search(line)), None)
        if phase == "forward":
            outer = (name for other in inner for name, pattern in _AROUND if pattern.search(other))
            phase = next(outer, phase)
        if phase is not None:
            break
    is_evaluation = any(_EVALUATION.search(line) for line in lines)
    if is_evaluation and phase in (None, "forward", "loss"):
        return phase if any(_NO_GRAD.search(line) for line in lines) else "evaluation"
    return phase


def _within_closure(lines: list[str]) -> list[str]:
    """The lines inside a closure that an optimizer's step calls, as Lightning does; else all of them."""
    calls = [at for at, line in enumerate(lines) if _CLOSURE.search(line)]
    return lines[calls[-1] + 1 :] if calls else lines


def _tensor(innermost: Sequence[str], trace: str) -> str | None:
    """The kind of tensor that the innermost lines make.

    Where frames compute a loss, a cache of keys and values does not grow: they are this forward's own.
    """
    inner_text = "\n".join(innermost)
    if _CACHE.search(inner_text) and not _COMPUTES_LOSS.search(trace):
        return "kv_cache"
    if _LOGITS.search(inner_text):
        return "logits_or_loss"
    return "attention_scores" if _ATTENTION.search(inner_text) else None


def _innermost_code(lines: list[str]) -> str:
    """The innermost line of code shown, as the paste has it; lines around one that an arrow marks are not it."""
    is_marked = any(_ARROW.match(line) for line in lines)
    sentence = ""
    for line in reversed(lines):
        if _PLUMBING.search(line):
            continue
        arrow = _ARROW.match(line)
        if arrow:
            return arrow.group("code").strip()
        is_another = _FRAME.search(line) or _RAISED.match(line) or (is_marked and _NUMBERED.match(line.strip()))
        if not is_another and re.search(r"[\w\]] ?= ?\S|\w\(.*[),]|\)$", line):
            if not _SENTENCE.search(line):
                return _NUMBERED.sub("", line.strip())
            sentence = sentence or _NUMBERED.sub("", line.strip())
    return sentence


def _line_of(phase: str | None, lines: list[str]) -> str:
    """The last line that shows the phase, where no frame says which line failed; else the innermost line of code."""
    pattern = dict(_PHASES).get(phase or "")
    shown = [line for line in lines if pattern is not None and pattern.search(line)]
    return _innermost_code(shown) or _innermost_code(lines)


def _frames(lines: list[str]) -> tuple[TracebackFrame, ...]:
    """The traceback's frames, outermost first."""
    frames = []
    for index, line in enumerate(lines):
        match = _FRAME.search(line)
        if match is None:
            continue
        groups = {name.split("_")[-1]: value for name, value in match.groupdict().items() if value}
        following = lines[index + 1] if index + 1 < len(lines) else ""
        code = "" if _FRAME.search(following) or _RAISED.match(following) else following.strip()
        path = groups.get("path", f"cell {groups.get('cell', '')}".strip())
        frames.append(TracebackFrame(path, int(groups.get("line", 0)), groups.get("function", ""), code))
    return tuple(frames)
