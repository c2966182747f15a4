"""What a text tells of a run beside its traceback: how far it came, what it was doing, what its author saw."""

from __future__ import annotations

import re
from dataclasses import dataclass

_BAR = re.compile(r"(\d{1,3})%\|[^|\n]{0,200}\|\s{0,3}(\d{1,9})/(\d{1,9})")
_DONE = re.compile(
    r"(?:after|at|until|经过|训练到|跑到|第)\s?(?:about|around|approximately|executing|only)?\s?~?(\d[\d,]{0,8}\s?[kKwW万]?)\s?"
    r"(?:th |st |nd |rd )?(?:training |successful )?(?:steps?|iterations?|iters?|batches|步|次迭代|个?batch|iteration)",
    re.I,
)
_EPOCHS = re.compile(
    r"(?:after|at|until|to|in|during)\s(?:the\s)?(?:end of\s)?(?:about\s|~)?(?:epoch\s(\d{1,4})|(\d{1,4})(?:st|nd|rd"
    r"|th)?\sepochs?)"
    r"|第\s?(\d{1,4})\s?个?(?:epoch|轮)|\[?Epoch[: ]\s{0,3}(\d{1,4})[/\]: ]",
    re.I,
)
_LATE_STEPS = 50


def _words(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.I)


# What the author says, by key. The rules of ``text_rules`` say what each is worth.
_TOLD: dict[str, re.Pattern[str]] = {
    "grows": _words(
        r"memory[^.\n]{0,60}(?:keeps?|kept|is|was|slowly|steadily|continu\w+|constantly|tends to)\s?(?:on )?"
        r"(?:increas|grow|accumulat|climb|rising|leak)\w*",
        r"memory (?:usage )?(?:grow(?:s|ed)?|grew|increases?|accumulates?|leaks?)\b",
        r"memory[- ]leak", r"accumulates? memory",
        r"(?:usage|ram|memory|consumption)[^.\n]{0,60}(?:increases? with|grows? with|keeps? (?:increas|grow)\w+"
        r"|ceaselessly|unlimit\w+)",
        r"increasing GPU-?memory", r"keep increasing until",
        r"(?:显存|内存)(?:占用)?(?:一直|不断|持续|逐渐|越来越|慢慢)(?:在)?(?:增加|增长|上升|升高|涨|变大|多)",
        r"(?:显存|内存)泄[漏露]",
    ),
    "evaluates": _words(
        r"(?:during|in|at|while|when|on|after)\s(?:the\s)?(?:evaluat\w+|validation|testing|eval|test)\b",
        r"evaluation (?:step|loop|phase)", r"(?:trainer|model)\.evaluate\(",
        r"验证(?:阶段|时|集)|评估时|测试(?:阶段|时)",
    ),
    "trains": _words(
        r"\btrain(?:ing|er|_\w+)?\b(?![- ]free)", r"\bfine-?tun", r"train\w*\.(?:py|sh)", r"\bepochs?\b",
        r"\.backward\(", r"训练|微调",
    ),
    "host_fills": _words(
        r"(?:system|cpu|host)[- ](?:ram|memory)\b[^.\n]{0,60}(?:increas|grow|used up|max|full|leak|accumul)",
        r"\bRAM\b[^.\n]{0,60}(?:increas|decreas|grow|full|accumul|leak|used up)", r"\(?NOT (?:on )?GPU",
        r"(?:主机|系统|CPU)\s?内存[^\n]{0,20}(?:增|涨|满|耗尽|不足)",
    ),
    "infers": _words(r"\binference\b", r"\binferr?ing\b", r"transcri(?:b|pt)", r"\bwhisper\w*", r"推理"),
    "resumes": _words(r"\bresum(?:e|es|ed|ing)\b", r"from (?:a |the |old )?checkpoint",
    r"恢复训练|断点续训|继续训练"),
    "smaller_batch_helps": _words(
        r"(?:reduc|decreas|lower|smaller|small)\w*\s(?:the\s|my\s)?batch[ _-]?size\w*[^.\n]{0,50}(?:help|work|solve"
        r"|fix|disappear|resolve|ok)",
        r"batch[ _-]?size[^.\n]{0,40}(?:too (?:large|big|high)|is the (?:problem|cause))",
        r"have to reduce the batch", r"works? (?:fine |well )?(?:with|for) (?:a )?(?:smaller )?batch[ _-]?size",
        r"(?:batch[ _-]?size|it)\s(?:\w+\s)?to \d{1,4}(?:(?!n't|not)[^.\n]){0,30}\b(?:solve|works|run it|fits)",
        r"batch[ _-]?size?.{0,12}(?:对于|太大|过大)", r"(?:please )?decrease the batch size of your model",
        r"减[小少](?:了)?\s?batch[ _-]?size?.{0,16}(?:可以|解决|就好|正常)",
    ),
    "larger_input_fails": _words(
        r"(?:images?|inputs?|sequences?|samples?|videos?|resolution|crops?|tiles?)\s(?:is|are|was|were)?\s?(?:so|too"
        r"|very|quite)\s(?:big|large|long|high)",
        r"only (?:fails|crashes|happens) (?:with|for|on) (?:large|long|big)", r"(?:longer|larger) (?:sequences?"
        r"|inputs?|images?|context)\b",
        r"(?:as|when|after) the context grows", r"1920\s?[x\u00d7]\s?1080|\b4k\b|6300, 6304",
        r"(?:序列|图像|图片|上下文)(?:太|过)(?:长|大)",
        r"\blong(?:er)? (?:audio|wav|videos?|files?|inputs?|texts?|documents?)",
        r"(?:audio|video|file|text)\w*\s(?:\w+\s)?(?:longer|larger|bigger) than", r"长达|长音频|长视频|长文本",
        r"ground[- ]truths? per im|(?:gt|ground[- ]truth)[_ ](?:b?box(?:es)?)\b|bbox_overlaps",
    ),
    "shares_device": _words(
        r"(?:other|another|several|two|multiple|\d{1,3} other) (?:process|program|job|user|notebook|kernel|model"
        r"|app\w*|instance)\w*"
        r"[^.\n]{0,60}(?:us(?:e|es|ing)|tak(?:e|es|ing)|occup|runn|host|load|hold)",
        r"\b\d{1,2} (?:processes|kernels)\b[^.\n]{0,30}(?:are|were)?\s?(?:using|running|on)", r"zombie process",
        r"(?:others?|someone) (?:is|are|was) using", r"(?:其他|别的|另一个|多个)(?:进程|程序|用户|任务|Notebook)",
        r"\b\d{1,3} other models\b", r"started two python processes",
    ),
    "device_idle": _words(
        r"(?:plenty|enough|sufficient|lots?) (?:of )?(?:free |available )?(?:gpu |video )?(?:memory|vram)",
        r"(?:memory|vram) is (?:available|free)", r"free gpu oom", r"although memory is available",
        r"显存(?:还有|足够|充足)|显存.{0,6}够",
    ),
    "many_ranks": _words(r"(?:four|eight|two|multi(?:ple)?|[2-9]|1[0-6])[- ]?(?:x\s?)?gpus?\b", r"multi-?gpu",
    r"DataParallel|torchrun|distributed\.launch|--nproc"),
    "pins": _words(r"pin_memory\s?=\s?True", r"\bpin_memory\b", r"pinned (?:host )?memory", r"cudaHostAlloc",
    r"cudaHostRegister"),
    "offloads_to_host": _words(
        r"cpu[-_ ]offload", r"offload_(?:optimizer|param|opt)\w*", r"zero[-_ ]?(?:3|stage[-_ ]?3|infinity)",
        r"ds_z[23]_offload",
    ),
    "indexes": _words(
        r"IndexError", r"index(?: is)? out of (?:range|bounds)", r"with \d+ ind(?:ex|ic)es",
        r"(?:num_labels|vocab_size|num_embeddings)[^.\n]{0,40}(?:wrong|mismatch|smaller)",
        r"Assertion [`'\"]?(?:index|t >= 0|srcIndex|input_val|-sizes)",
    ),
    "varies_in_length": _words(
        r"variable[- ](?:length|size)", r"(?:different|varying|irregular|dynamic) (?:length|size|shape)s?",
        r"irregular size", r"dynamic padding|pad(?:ding)? to longest|变长|长度不一",
    ),
    "fragments": _words(r"fragment(?:s|ed|ation)\b(?! ?loss)(?![^\n]{0,12}See doc)", r"碎片"),
    "keeps_predictions": _words(r"compute_metrics", r"eval_accumulation_steps", r"preprocess_logits_for_metrics",
    r"metrics?\b[^.\n]{0,40}commented out"),
    "first_try_only": _words(r"first (?:run|time|attempt|inference)[^.\n]{0,40}(?:work|fine|ok)[^.\n]{0,60}(?:second"
        r"|next|subsequent|again)", r"子?第二次"),
    "shuts_down": _words(r"(?:system|computer|machine|pc) (?:shuts? ?down|reboots?|powers? off|restarts?)",
    r"(?:系统|电脑|机器|服务器)(?:自动|突然|会|直接)?(?:关机|重启|死机)"),
}  # fmt: skip
_TIP = re.compile(r"to avoid fragmentation[^\n]{0,200}|try setting (?:max_split_size_mb|PYTORCH_\w+)[^\n]{0,120}", re.I)
_NOT_SAID = re.compile(
    r"1\. If yes, please stop them[^\n]*|Please check whether there is any other process[^\n]*"
    r"|2\. If no, please (?:decrease|try)[^\n]*"
)


_ADVICE = re.compile(
    r"(?:是否有?|如果|检查|防止|避免|whether|check|if there (?:is|are)(?: any)?|prevent\w*|avoid\w*|against|no|not)"
    r"[\s\w*]{0,12}$",
    re.I,
)


@dataclass(frozen=True)
class RunFacts:
    """How far a run came (``num_steps`` done of ``total_steps``, ``num_epochs``) and what is told of it.

    ``told`` are keys of what the author says; all is None or empty where the text says nothing.
    """

    num_steps: int | None = None
    total_steps: int | None = None
    num_epochs: int | None = None
    told: frozenset[str] = frozenset()

    @property
    def is_start(self) -> bool:
        """Whether it failed within the first steps."""
        return self.num_steps is not None and self.num_steps <= 1 and not self.num_epochs

    @property
    def is_late(self) -> bool:
        """Whether many steps had gone well, so that what a step takes had fitted before."""
        return (self.num_steps or 0) >= _LATE_STEPS or (self.num_epochs or 0) >= 1


def run_facts(text: str, trace_start: int | None = None) -> RunFacts:
    """The facts in a cleaned text; ``trace_start`` is where the failure's message stands."""
    before = text[:trace_start] if trace_start is not None else text
    bars = list(_BAR.finditer(text))
    steps = total = None
    if bars:
        _, steps_text, total_text = (bars[-1]).groups()
        steps, total = int(steps_text), int(total_text)
    done = [_count(match.group(1)) for match in _DONE.finditer(text)]
    if done and not bars:
        steps = max(done)
    epochs = [int(next(one for one in match.groups() if one)) for match in _EPOCHS.finditer(text)]
    said = _NOT_SAID.sub("", _TIP.sub("", text))
    told = frozenset(key for key, pattern in _TOLD.items() if _is_told(pattern, said))
    is_loading = bool(bars) and "Loading" in before[max(0, bars[-1].start() - 60) : bars[-1].start()]
    if is_loading or "shard" in text[max(0, bars[-1].start() - 40) : bars[-1].start()] if bars else False:
        steps = total = None
    return RunFacts(steps, total, max(epochs) if epochs else None, told)


def _is_told(pattern: re.Pattern[str], text: str) -> bool:
    """Whether a text says so, rather than asks or advises: "check whether others use it", "against leaks"."""
    return any(not _ADVICE.search(text, max(0, match.start() - 24), match.start()) for match in pattern.finditer(text))


def _count(text: str) -> int:
    """A count as people write it: 12,300, 15K, 3w (ten thousands)."""
    digits = text.replace(",", "").strip()
    unit = digits[-1].lower()
    factor = {"k": 1000, "w": 10_000, "万": 10_000}.get(unit, 1)
    number = digits[:-1] if factor > 1 else digits
    return int(number.strip() or 0) * factor
