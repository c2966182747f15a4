"""Failures that an author describes without quoting the message, in any wording and language."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from oom_magic.explain.messages.others import MessageKind
from oom_magic.explain.messages.signs import MEMORY, OF_DEVICE, OF_HOST, first_sign

# Authors describe what happened first; logs follow, and end where something failed.
_LONGEST_STORY = 20_000
_LONGEST_END = 6_000

_SPENT = (
    r"(?:oom|out[- ]of[- ]memory|(?:runs?|running|ran|goes|gets?) out|exhaust\w*|overflow\w*|insufficient|not enough"
    r"|(?:hits?|reach\w*) (?:the|its) (?:roof|ceiling|limit))"
)
_NEAR = r"(?:(?!\b(?:ram|cpu|host|system|not|if|avoid\w*|prevent\w*)\b)[^.\n]){0,36}?"
_GPU = (
    r"(?:cuda|v-?ram|ram (?:of|on) (?:the |my )?gpu|(?:gpu|graphics?|card|device)s?'?(?: memory)?"
    r"|video[- ](?:cards?|memory|ram))"
)
_TOO_MUCH = (
    r"(?:tak(?:e|es|ing)|us(?:e|es|ing)|need\w*|requir\w+|consum\w+|occup\w+) (?:up )?(?:too|so"
    r"|way too) (?:much|large) "
)
_TOLD_DEVICE = (
    r"\b(?:gpu memory|v-?ram) (?:usage|consumption|cost) is (?:too|very|so) (?:high|large|big)|"
    r"\b(?:gpu|cuda) memory limit(?:ation)?s? (?:errors?|issues?|problems?)\b|"
    rf"{_TOO_MUCH}(?:(?:gpu|cuda|video|graphics) ?memory|v-?ram)|"
    rf"\b{_GPU}\b{_NEAR}\b{_SPENT}\b|\b{_SPENT}\b{_NEAR}\b{_GPU}\b"
    rf"|\bkilled\b[^.\n]{{0,80}}\b(?:due to|because of) (?:the |my )?{_GPU}\b"
    r"|\b(?:un|in)sufficient v-?ram\b|\b(?:cuda|gpu) out memory\b|\bout of (?:gpu|cuda|video|device|graphics) memory\b"
    r"|(?:cuda|gpu|\u663e\u5361) ?\u5185\u5b58(?:\u4e0d\u8db3|\u4e0d\u591f|\u6ea2\u51fa|\u4f1a?\u7206)"
    r"|\u663e\u5b58(?:\u4e0d\u8db3|\u4e0d\u591f|\u6ea2\u51fa|\u7206|\u70b8|\u8d85)|[\u7206\u70b8]\u4e86?\u663e\u5b58"
)
_RAM = (
    r"(?:(?<!gpu )(?<!video )(?<!nor )(?<!vram/)(?<!before )ram(?!/v)"
    r"(?! (?:of|on|in) (?:the |my )?(?:gpu|graphics|video|card)s?\b)"
    r"|(?:system|host|cpu|main|server)(?: virtual)? (?:memory|ram))"
)
_IS_FREE = r" (?:is |was |usage )?(?:not|isn't|wasn't|low|fine|free)\b"  # said behind its name
_TOLD_HOST = (
    r"\b(?:computer|pc|laptop|machine|system)'?s? memory (?:is|was|gets|has been) (?:completely|fully|entirely|all)"
    r" (?:used|full)|\b(?:computer|pc|laptop) (?:takes|uses|eats|fills) (?:up )?(?:the |its )?(?:entire|whole|full)"
    r" memory\b|"
    rf"\b{_RAM}\b(?:(?!\b(?:not|if|gpu|cuda)\b)[^.\n]){{0,30}}?\b{_SPENT}\b|\b{_SPENT}\b(?:(?!\b(?:gpu"
    rf"|cuda)\b)[^.\n])"
    rf"{{0,16}}?\b{_RAM}\b(?!{_IS_FREE})|\b(?:process"
    rf"|job|script|training|worker|program)\b[^.\n]{{0,24}}\b(?:was|is|got|gets|been)"
    r" (?:\w+ )?killed\b|\bkilled by (?:the |my )?(?:oom|system|kernel|computer|os)\b"
    rf"|\b(?:tak|us|consum|eat|ate|fill)\w* (?:up )?all (?:of )?(?:the |my )?(?:available |free )?{_RAM}\b"
    r"|\bcpu oom\b|\bout[- ]of[- ](?:cpu|host|system)[- ]memory\b"
    r"|(?<!\u663e\u5361)(?<!cuda)(?<!cuda )(?<!gpu)(?<!gpu )\u5185\u5b58(?:\u4e0d\u8db3"
    r"|\u4e0d\u591f|\u6ea2\u51fa)"
)
_TOLD = (
    r"\bmemory (?:errors?|issues?|problems?)\b|(?<![a-z0-9_])oom(?:s|ed|ing)?(?![a-z0-9_])(?![ -]?kill)"
    rf"|\bout[- ]of[- ]{MEMORY}\b"
    r"|\bno (?:more )?(?:memory|ram) (?:is |was )?left\b"
    r"|\b(?:runs?|running|ran) out of memory\b|\b(?:un|in)sufficient (?:v-?ram|memory)\b"
    r"|\bmemory (?:to )?(?:explo[ds]\w+|blows? up|overflow\w*)"
    r"|\bmemory out(?= ?(?:[\n.!?,]|errors?\b|issues?\b|problems?\b|when\b|while\b|during\b))"
)

# A process that was killed, in most cases by the kernel because RAM ran out; not one that the author ended.
_BY_AUTHOR = "".join(
    rf"(?<!\b{word} )"
    for word in (
        "i",
        "we",
        "you",
        "to",
        "have",
        "must",
        "manually",
        "not",
        "never",
        "then",
        "and",
        "can",
        "should",
        "fully",
        "properly",
        "correctly",
        "not being",
        "not be",
    )
)
_ITS_OBJECT = (
    r"(?! ?(?:the|an?|my|all|it|them|those|these|some|that|every|this|other|others|another|both|two|one|off|zombie)\b"
    r"| ?-?\d)"
)
KILLED = re.compile(
    "|".join(
        (
            rf"{_BY_AUTHOR}\bkilled\b{_ITS_OBJECT}",
            r"[\"'`\u2018\u201c*(\uff08]kill(?:ed)?[.,]?[\"'`\u2019\u201d*)\uff09]",
            r"\bbackground workers? (?:are|is) (?:no longer alive|6 feet under)",
            r"\b(?:process|program|script|it) kills? itself\b|\b(?:until|then) killing itself\b"
            r"|\bit kills the process\b",
            r"\bsigkill\b|\bsignal:? ?9\b|(?:exit|return) ?code:? ?-9\b|returncode=-9|\bexitcode:? ?-9\b",
            r"oom[- _]?kill|(?:system|kernel|os) kill(?:ed|s)|terminated abruptly|abruptly died|\bevicted\b",
            r"(?:exit(?:ed)?|code)(?: with)?(?: code| status)?:? ?137\b|exit(?:ed)?(?: code| status):? ?9\b",
            r"(?:died|terminated|ended|exited) (?:with|by|on)[^\n]{0,16}\b(?:signals?[ .:]{0,2}9\b|sigkill)",
            r"被(?:系统)?(?:自动)?(?:杀死|杀掉|杀|kill)|把[^\n，。]{0,4}(?:进程|程序)[^\n，。]{0,3}杀|进程[^\n，。不没]{0,3}杀[了死掉]|kill(?:ed)?掉|总是kill|oom[^\n，。a-z]{0,4}杀(?:死|掉)",
        )
    ),
    re.I,
)
_NAMES_MEMORY = re.compile("mem|ram|oom|[内內]存|記憶", re.I)
_ANYTHING = re.compile(r".*", re.S)
# The first kind that matches counts.
_TOLD_KINDS = (
    MessageKind("told_host", "cpu", True, re.compile(_TOLD_HOST, re.I | re.A), True),
    MessageKind("told_device", "cuda", True, re.compile(_TOLD_DEVICE, re.I | re.A), True),
    MessageKind("told", None, True, re.compile(_TOLD, re.I | re.A), True),
)
_OF_WHOM = {
    (True, False): MessageKind("told_device", "cuda", True, _ANYTHING, True),
    (False, True): MessageKind("told_host", "cpu", True, _ANYTHING, True),
}
_OF_ANYBODY = MessageKind("told", None, True, _ANYTHING, True)
_OF_KILLED = MessageKind("told_host", "cpu", True, KILLED, True)
_MEMORY_OF_DEVICE = re.compile(r"\b(?:gpu|cuda|video|graphics)[- ]?(?:memory|ram)\b|\bv-?ram\b|显存", re.I | re.A)
# Chinese authors call both memories 内存, where they do not say 显存.
_VIDEO_MEMORY = re.compile("[显顯][存卡]")
_DEVICE_IS_FINE = re.compile(
    r"显存(?:占用)?(?:是|都|也|还)?(?:没有?问题|没有?变化|不变|正常|足够|充足|够)(?: ?\([^)\n]{0,24}\))?"
    r"|显存(?:平均)?(?:利用|占用|使用)率?(?:只有|小于|低于|不到|不足|仅|才){1,2} ?[1-7]?\d ?%"
)
_CARD_IS_ENOUGH = re.compile(
    r"\b\d{1,3} ?gb (?:of )?v-?ram\b,? (?:which|that|and that)? ?(?:should|must|is) [^.\n]{0,12}(?:plenty|enough)", re.I
)
# In a list of what the machine has, not of what ran out.
_RAM_BESIDE_VRAM = re.compile(
    r"(?<=ram)(?:,| and| \+| &| /|/)? (?:and )?\d{1,4} ?gi?b (?:of )?(?:\w+ )?ram\b"
    r"|\b\d{1,4} ?gi?b (?:of )?(?:system |ddr\d )?ram\b(?=(?:,| and| \+| &| /|/) ?\d{1,3} ?gi?b (?:of )?v-?ram)",
    re.I,
)
_BEFORE_DEVICE = re.compile(r"(?:载入|加载到?|到|进)gpu之?前|before [^.,\n]{0,20}\bgpus?\b", re.I)
_HOST_IS_FREE = re.compile(rf"\bram\b{_IS_FREE}", re.I)
# Of a training alone, where nothing says which memory it is.
_GROWS_IN_TRAINING = re.compile(r"训练[^\n，。]{0,6}(?<!系统)(?<!服务器)(?<!主机)(?<!cpu)(?<!机器)[内內]存", re.I)
_MEMORY_IN_CHINESE = re.compile("[内內]存|記憶體")
_MEMORY_OF_HOST = re.compile(
    r"\bram\b|(?<!face )(?<!blocks )(?<!block )\bswap\b|\b(?:system|host|main|cpu) memory\b", re.I | re.A
)
_NO_DEVICE = re.compile(
    r"\busing gpu in script\?: ?no\b|\(no (?:cuda|gpu|video) memory\)|\bnot using (?:the |any )?(?:cuda|gpus?)\b"
    r"|\b(?:no|without)(?: \w+)? gpus?\b(?![- ]?(?:memory|ram))|\bnot (?:on |the |of )?(?:gpus?|v-?ram)"
    r"\b(?: memory| ram)?|\bcpu[- ]only\b",
    re.I | re.A,
)
_CARD_SHOULD_DO = re.compile(  # what runs out is compared with the card
    r"\bout of ram\b[^\n]{0,120}\b\d{1,3} ?gb\b[^\n]{0,24}"
    r"\b(?:[1-9]\d00 ?xtx?|[rg]tx|gpu|card|vram|[345]0[6-9]0)\b[^\n]{0,24}"
    r"\b(?:should be|is) (?:more than )?enough"
    r"|\bout of ram\b[^\n]{0,120}\b(?:on|with|of) (?:an? |my |the )?\d{1,3} ?gb (?:of )?(?:gpu|card|vram|graphics)",
    re.I | re.A,
)
# More memory than a card has.
_ABOVE_ANY_CARD = re.compile(r"\b(?:2[5-9]|[3-9]\d|\d{3})\d ?gb (?:of )?memory\b(?! (?:per|on) )", re.I | re.A)
_IN_LISTS = re.compile(r"\(GPU\?\)")  # of an environment (transformers-cli env)
_DENIED = re.compile(
    r"\b(?:no|without(?: any| an)?|never|(?:n't|not) (?:get|have|see|run)(?: any| an| into)?)\s(?:more )?(?:oom|out)\b"
    r"|(?:\b(?:cannot|can not|never|not)|n't) (?:overflow\w*|exhaust\w*|runs? out|running out)\b",
    re.I | re.A,
)
_TROUBLE = re.compile(r"(?:\S+ )?memory (?:issues?|problems?)", re.I | re.A)
_A_QUESTION = re.compile(
    r"是因为|是不是|是否|难道|\b(?:is|was|could) (?:it|this|that) (?:be )?(?:because|due|caused|related)", re.I | re.A
)
_IS_IT_ENOUGH = re.compile(r"[够夠足]不[够夠足]|[够夠]用?[吗嗎]")
_HOW_TO = re.compile(
    r"\b(?:is|are) there (?:a|any) \w+ to\b|\bhow (?:can|do|to|should)\b[^.\n]{0,16}"
    r"\b(?:avoid|prevent|diagnos\w*|debug)\b|\bany (?:way|ideas?|hints?|advice)\b",
    re.I | re.A,
)
_FORESEEN = re.compile(
    r"\b(?:(?:will|would) (?:it|this|that|they|we|i)|when (?:do|does|will|would|can))\b[^.?\n]{0,120}\?",
    re.I | re.A,
)
_END_OF_STATEMENT = re.compile(r"\.(?!\d)|[!?;。！？；\n]")
# The C library's word for its damaged records, whatever an author calls it.
_HEAP_DAMAGED = re.compile(
    r"(?:malloc|free|realloc|munmap_chunk|calloc)\(\): (?:invalid|unaligned|corrupt\w*|unsorted|mismatch\w*|double)"
    r"|double free or corruption|corrupted (?:size vs|double-linked)|heap corruption",
    re.I,
)
_CALLED_SO = re.compile(r"\b(?:malloc|memory|allocation) (?:errors?|issues?|problems?|fail\w*)", re.I)
_LONGEST_STATEMENT = 120
_MOST_STATEMENTS = 4


# Words for the end of memory, or of a process: a text without any says only that much is used.
_RAN_OUT = re.compile(
    r"oom|\bout\b|exhaust|overflow|\b(?:un|in)sufficient|enough|explo[ds]|blow|roof|ceiling|limit|error|kill|\ball\b"
    r"|sig|evict|code|abrupt|longer alive|feet under"
    r"|[不未超爆炸满滿]|溢|耗尽|杀",
    re.I,
)


def says_only_killed(said: str) -> bool:
    """Whether what was found in a text is a process that was killed, without a word about memory."""
    return bool(KILLED.search(said)) and not _NAMES_MEMORY.search(said)


def says_only_trouble(said: str) -> bool:
    """Whether what was found in a text is some trouble with memory, or that much is used, not that it ran out."""
    return _TROUBLE.fullmatch(said.strip(" .…")) is not None or not _RAN_OUT.search(said)


def told_messages(cleaned: str) -> Iterator[tuple[MessageKind, re.Match[str]]]:
    """Failures that the text describes without quoting their message; offsets are in the cleaned text."""
    if _HEAP_DAMAGED.search(cleaned, 0, _LONGEST_STORY):
        cleaned = _CALLED_SO.sub(lambda match: " " * len(match.group()), cleaned)
    cleaned = _RAM_BESIDE_VRAM.sub(lambda match: " " * len(match.group()), cleaned)
    for kind in _TOLD_KINDS:
        match = _first_told(kind.pattern, cleaned)
        if match is not None and not (_is_killed_for_device(kind, cleaned, match) or _is_asked(cleaned, match)):
            is_denied = _NO_DEVICE.search(cleaned, max(0, match.start() - 12), match.end())
            is_open = kind.format == "told" or is_denied or _MEMORY_IN_CHINESE.search(match.group())
            kind = _whose(cleaned, kind.pattern) if is_open else kind
            is_of_card = kind.backend == "cpu" and _CARD_SHOULD_DO.search(cleaned, 0, _LONGEST_STORY)
            yield (_OF_WHOM[True, False] if is_of_card else kind), match
            return
    sign = _sign(cleaned)
    if sign is not None and not (_is_asked(cleaned, sign) or _asks_whether_enough(cleaned, sign)):
        kind = _of_statement(_statement(cleaned, sign)) or _whose_in_all(cleaned[:_LONGEST_STORY])
        says_ram_of_device = kind.backend == "cpu" and _means_device_by_ram(cleaned[:_LONGEST_STORY])
        yield (_OF_WHOM[True, False] if says_ram_of_device else kind), sign
        return
    match = KILLED.search(cleaned, 0, _LONGEST_STORY)
    if match is not None and not OF_DEVICE.search(
        _BEFORE_DEVICE.sub("", _statement(cleaned, match))
    ):  # no failure: memory that it left
        yield _OF_KILLED, match


def _first_told(pattern: re.Pattern[str], cleaned: str) -> re.Match[str] | None:
    """The first place of a story that tells of a failure, rather than that there was none."""
    matches = islice(pattern.finditer(cleaned, 0, _LONGEST_STORY), _MOST_STATEMENTS)
    no_failure = (_is_denied, _is_to_be_avoided, _asks_whether_enough)
    return next((one for one in matches if not any(is_so(cleaned, one) for is_so in no_failure)), None)


def _is_denied(cleaned: str, match: re.Match[str]) -> bool:
    line = cleaned[cleaned.rfind("\n", 0, match.start()) + 1 : match.start()]
    if line.lstrip().startswith("//"):  # a comment of code
        return True
    return _DENIED.search(cleaned[max(0, match.start() - 24) : match.end()]) is not None


def _asks_whether_enough(cleaned: str, match: re.Match[str]) -> bool:
    """Whether what was found is a part of "is it enough or not?", as Chinese asks."""
    around = _IS_IT_ENOUGH.finditer(cleaned, max(0, match.start() - 2), match.end() + 2)
    return any(asked.start() < match.end() and match.start() < asked.end() for asked in around)


def _is_to_be_avoided(cleaned: str, match: re.Match[str]) -> bool:
    """Whether an author only asks how to be rid of some trouble, which was told before."""
    return says_only_trouble(match.group()) and _HOW_TO.search(_statement(cleaned, match)) is not None


def _is_killed_for_device(kind: MessageKind, cleaned: str, match: re.Match[str]) -> bool:
    """Whether a program that was killed is said to have filled the device, rather than the host."""
    rest = _DEVICE_IS_FINE.sub("", _NO_DEVICE.sub("", _statement(cleaned, match)))
    return kind.format == "told_host" and "kill" in match.group().lower() and bool(_MEMORY_OF_DEVICE.search(rest))


def _is_asked(cleaned: str, match: re.Match[str]) -> bool:
    """Whether an author asks whether memory will run out, or, of a program that was killed, whether it was that."""
    if any(asked.start() <= match.start() < asked.end() for asked in _FORESEEN.finditer(cleaned, 0, _LONGEST_STORY)):
        return True
    return bool(_A_QUESTION.search(_statement(cleaned, match)) and KILLED.search(cleaned))


def _means_device_by_ram(text: str) -> bool:
    """Whether an author who speaks of the device's memory again and again wrote RAM for it once."""
    return len(_MEMORY_OF_DEVICE.findall(text)) >= 2 * len(_MEMORY_OF_HOST.findall(text)) > 0


def _sign(cleaned: str) -> re.Match[str] | None:
    """A sign by structure that memory ran out: in the author's story, else in the end of a log."""
    for start in (0, max(_LONGEST_STORY, len(cleaned) - _LONGEST_END)):
        sign = first_sign(cleaned[start : start + _LONGEST_STORY])
        if sign is not None:
            return _ANYTHING.match(cleaned, start + sign.start, start + sign.end)
    return None


def _whose(cleaned: str, told: re.Pattern[str]) -> MessageKind:
    """The kind that the sentences which tell of the failure make it: the device's, the host's, or anybody's."""
    matches = islice(told.finditer(cleaned, 0, _LONGEST_STORY), _MOST_STATEMENTS)
    kinds = (_of_statement(_statement(cleaned, match)) for match in matches)
    return next((kind for kind in kinds if kind is not None), None) or _whose_in_all(cleaned[:_LONGEST_STORY])


def _of_statement(statement: str) -> MessageKind | None:
    """The kind that one sentence makes it; None where it names neither device nor host."""
    rest = _HOST_IS_FREE.sub("", _DEVICE_IS_FINE.sub("", _NO_DEVICE.sub("", statement)))
    is_steady = _DEVICE_IS_FINE.search(statement)
    if not is_steady and (_VIDEO_MEMORY.search(rest) or _GROWS_IN_TRAINING.search(rest)):
        rest = _MEMORY_IN_CHINESE.sub("", rest)
    names = bool(OF_DEVICE.search(rest)), bool(OF_HOST.search(rest))
    return _OF_WHOM.get(names, _OF_ANYBODY) if any(names) else None


def _whose_in_all(text: str) -> MessageKind:
    """The same for a whole text, in which only memory counts that is named as the device's or the host's."""
    text = _HOST_IS_FREE.sub("", _IN_LISTS.sub("", text))
    rest = _CARD_IS_ENOUGH.sub("", _NO_DEVICE.sub("", text))
    names_host = bool(OF_HOST.search(rest) or _NAMED_HOST.search(rest) or _ABOVE_ANY_CARD.search(rest))
    is_of_device = bool(_MEMORY_OF_DEVICE.search(rest)) or (not names_host and bool(OF_DEVICE.search(rest)))
    is_of_host = bool(rest != text or _ABOVE_ANY_CARD.search(rest)) or (
        bool(_MEMORY_OF_HOST.search(rest) or KILLED.search(rest)) and not (A_CARD.search(rest) or NVIDIA.search(rest))
    )
    return _OF_WHOM.get((is_of_device, is_of_host), _OF_ANYBODY)


def _statement(cleaned: str, match: re.Match[str]) -> str:
    """The sentence that contains a match."""
    before = cleaned[max(0, match.start() - _LONGEST_STATEMENT) : match.start()]
    after = cleaned[match.end() : match.end() + _LONGEST_STATEMENT]
    return _END_OF_STATEMENT.split(before)[-1] + match.group() + _END_OF_STATEMENT.split(after)[0]


NVIDIA = re.compile(
    r"\bcuda(?!\W{1,24}(?:none|n/a|false)\b)|\bcu(?:dnn|blas)|nvidia|geforce|\b[rg]tx(?![a-z])|\btesla\b"
    r"|\bquadro\b|\btitan (?:x|xp|v"
    r"|rtx)\b|\b(?:[1-5]0[5-9]0|16[56]0)(?: ?ti| ?super)?\b|"
    r"\bjetson\b"
    r"|\b(?:[abhlkpv]|gh|gb)(?:10|30|40|80|100|200|800|[24-6]000)[gs]?\b|\bt4\b",
    re.I | re.A,
)
_NAMED_HOST = re.compile(
    r"(?<!gpu )(?<!video )(?<!gb )(?<!gb of )\bram\b(?![^.\n]{0,30}\b(?:nvtop|nvidia-smi)\b)"
    r"|\bcpus?\b|\b(?:system|host) memory\b|killed",
    re.I | re.A,
)
_OTHER_VENDORS = (
    ("mps", re.compile(r"\bmps\b|\bmac(?:book|os|[ -]?mini|[ -]?studio)?\b|\bapple silicon\b", re.I | re.A)),
    ("hip", re.compile(r"\brocm\b|\bradeon\b|\brx ?[5-9]\d{3}|\bamd gpu|\bmi[23]\d\dx?\b", re.I | re.A)),
    ("npu", re.compile(r"\bnpus?\b|\bascend\b|\u6607\u817e", re.I | re.A)),
    ("xpu", re.compile(r"\bxpu\b|\bintel (?:\w+ )?(?:arc|gpus?)\b|\barc (?:pro )?[ab]\d{2,3}\b|\bipex\b", re.I | re.A)),
)


# Accelerators whose programs print other frameworks' messages, or whose messages name no device.
_ACCELERATORS = (
    *_OTHER_VENDORS,
    ("hpu", re.compile(r"\bgaudi\d?\b|\bhabana\w*|\bhpus?\b", re.I | re.A)),
    ("tpu", re.compile(r"\btpus?\b|\bspace hbm\b", re.I | re.A)),
    ("directml", re.compile(r"directml|\bdml\b|dmlallocator", re.I | re.A)),
)


def named_accelerator(cleaned: str) -> str | None:
    """The kind of accelerator that a text names where it names no NVIDIA card; None for none."""
    head = cleaned[:_LONGEST_STORY]
    named = [name for name, pattern in _ACCELERATORS if pattern.search(head)]
    return named[-1] if named and not NVIDIA.search(head) else None


A_CARD = re.compile(r"\b(?:gpus?|cuda|vram|graphics|rocm|hip|mps|xpu|npu|tpu)\b", re.I | re.A)
_RUNS_ON_CPU = re.compile(r"\bdevice\W{1,4}cpu\b|\b(?:on|using) (?:the |my |a )?cpu\b|\bcpu[- ]only\b", re.I | re.A)


def named_backend(cleaned: str) -> str | None:
    """The backend of the device that a text names; None for none, for several, or for the host beside an NVIDIA
    card."""
    head = cleaned[:_LONGEST_STORY]
    if NVIDIA.search(head):
        return None if _NAMED_HOST.search(head) else "cuda"
    named = [backend for backend, pattern in _OTHER_VENDORS if pattern.search(head)]
    if not named and _RUNS_ON_CPU.search(head) and not A_CARD.search(head):
        return "cpu"
    return named[0] if len(named) == 1 else None
