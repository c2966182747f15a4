"""Failures that an author describes without quoting the message, in any wording and language."""

from __future__ import annotations

import re
from collections.abc import Iterator

from oom_magic.explain.messages.others import MessageKind

# Authors describe what happened first; logs follow, and end where something failed.
_LONGEST_STORY = 20_000
_LONGEST_END = 6_000

_SPENT = (
    r"(?:oom|out[- ]of[- ]memory|(?:runs?|running|ran|goes|gets?) out|exhaust\w*|overflow\w*|insufficient|not enough"
    r"|(?:hits?|reach\w*) (?:the|its) (?:roof|ceiling|limit))"
)
_NEAR = r"(?:(?!\b(?:ram|cpu|host|system|not|if|avoid\w*|prevent\w*)\b)[^.\n]){0,36}?"
_GPU = r"(?:cuda|v-?ram|(?:gpu|video|graphics?|card|device)s?'?(?: memory)?)"
_TOO_MUCH = (
    r"(?:tak(?:e|es|ing)|us(?:e|es|ing)|need\w*|requir\w+|consum\w+|occup\w+) (?:up )?(?:too|so"
    r"|way too) (?:much|large) "
)
_TOLD_DEVICE = (
    r"\b(?:gpu memory|v-?ram) (?:usage|consumption|cost) is (?:too|very|so) (?:high|large|big)|"
    rf"{_TOO_MUCH}(?:(?:gpu|cuda|video|graphics) ?memory|v-?ram)|"
    rf"\b{_GPU}\b{_NEAR}\b{_SPENT}\b|\b{_SPENT}\b{_NEAR}\b{_GPU}\b"
    r"|\b(?:un|in)sufficient v-?ram\b|\bout of (?:gpu|cuda|video|device|graphics) memory\b"
    r"|(?:cuda|gpu|\u663e\u5361) ?\u5185\u5b58(?:\u4e0d\u8db3|\u4e0d\u591f|\u6ea2\u51fa|\u4f1a?\u7206)"
    r"|\u663e\u5b58(?:\u4e0d\u8db3|\u4e0d\u591f|\u6ea2\u51fa|\u7206|\u70b8|\u8d85)|[\u7206\u70b8]\u4e86?\u663e\u5b58"
)
_RAM = r"(?:(?<!gpu )(?<!video )ram|(?:system|host|cpu|main|server)(?: virtual)? (?:memory|ram))"
_TOLD_HOST = (
    rf"\b{_RAM}\b(?:(?!\b(?:not|if|gpu|cuda)\b)[^.\n]){{0,30}}?\b{_SPENT}\b|\b{_SPENT}\b(?:(?!\b(?:gpu|cuda)\b)[^.\n])"
    rf"{{0,16}}?\b{_RAM}\b|\b(?:process|job|script|training|worker|program)\b[^.\n]{{0,24}}\b(?:was|is|got|gets|been)"
    r" (?:\w+ )?killed\b|\bkilled by (?:the |my )?(?:oom|system|kernel|computer|os)\b"
    r"|\bcpu oom\b|(?<!\u663e\u5361)(?<!cuda)(?<!cuda )(?<!gpu)(?<!gpu )\u5185\u5b58(?:\u4e0d\u8db3"
    r"|\u4e0d\u591f|\u6ea2\u51fa)"
)
# With common typing errors: memeory, memroy, memmory.
_MEMORY = r"m[eo]m{1,2}[aeo]{0,2}r{0,2}[aeo]{0,2}r?(?:y|ies)"
_TOLD = (
    r"\bmemory (?:errors?|issues?|problems?)\b|(?<![a-z0-9_])oom(?:s|ed|ing)?(?![a-z0-9_])(?! ?killer)"
    rf"|\bout[- ]of[- ]{_MEMORY}\b"
    r"|\b(?:runs?|running|ran) out of memory\b|\b(?:un|in)sufficient (?:v-?ram|memory)\b"
    r"|\bmemory (?:to )?(?:explo[ds]\w+|blows? up|overflow\w*)"
)

# Any other wording: a word for memory near one for its exhaustion. The context says which memory it was.
_STORE = rf"(?:{_MEMORY}|mem|v-?ram|ram|swap|page ?file|\w{{0,20}}alloc\w*|arena)"
_NOT_ENOUGH = r"(?:(?:not|n't|never)(?: \w+){0,3} (?:enough|sufficient)|(?:in|un)sufficient|too little)"
_ENDED = r"(?:exhaust(?:s|ed|ing|ion)|exceed\w*|overflow\w*|(?:runs?|running|ran) out|used up|saturat\w*|max\w* out)"
_FAILED = r"(?:fail\w*|unable|can ?not|can'?t|could ?n[o']?t|could not|impossible|refus\w*)"
_AMOUNT = r"(?:bytes|buffers?|\d ?[kmgt]i?b|pools?|cache|tensors?|workspace|memory|v-?ram|ram)"
_BETWEEN = r"(?:(?!\bleaks?\b|\bif\b|\bavoid|\bprevent)(?:[^.\n]|\.(?=\d)))"
_HOLDER = rf"(?:{_STORE}|gpus?|cards?|\d+ ?gi?b)"
_ANY_WORDING = (
    rf"\b(?:{_NOT_ENOUGH}|{_ENDED}|lack(?:s|ing)?(?: of)?|short(?:age)? of|low on|out of(?! bounds| range))\b"
    rf"{_BETWEEN}{{0,30}}?\b{_STORE}\b",
    rf"n't (?:\w+ ){{0,3}}(?:enough|sufficient)\b{_BETWEEN}{{0,20}}?\b{_STORE}\b",
    rf"\b{_STORE} (?:is|was|gets?|got|goes|went) out\b",
    rf"\bno (?:more |free |available )+{_STORE}\b|\bno {_STORE} (?:left|available)\b",
    rf"\b{_STORE}\b{_BETWEEN}{{0,24}}?(?:\b(?:{_NOT_ENOUGH}|{_ENDED}|fills? up|filled up|not available)\b"
    r"|\b(?:is|was|are|gets?|got|becomes?|being|goes) (?:\w+ )?full\b"
    r"|\blimit (?:is |was )?(?:reached|exceeded|hit)\b)",
    rf"\b{_FAILED}\b{_BETWEEN}{{0,24}}?\b(?:\w{{0,20}}alloc\w*|reserve|mmap|grow|extend)\b"
    rf"{_BETWEEN}{{0,40}}?{_AMOUNT}\b",
    r"\b\w{0,20}alloc(?:ation|ator|ate)?s?\b(?: \w+){0,3} (?:fail\w*|refused|denied|errors?)\b",
    rf"(?:n't|\bnot|\bnever|\bcannot|\bhardly|\bunable to) fit\b{_BETWEEN}{{0,30}}?\b{_HOLDER}\b",
    rf"\btoo (?:big|large|much) (?:\w+ )?(?:for|to fit)\b{_BETWEEN}{{0,24}}?\b{_HOLDER}\b",
    rf"\b(?:requir\w+|needs?|takes?) {_BETWEEN}{{0,16}}?\d ?gi?b\b{_BETWEEN}{{0,40}}?\b(?:only|just) (?:\w+ )?\d+ ?g",
    # Memory that grew until something happened, or that was "blown".
    rf"\b{_STORE}\b{_BETWEEN}{{0,40}}?\b(?:increas|grow|ris|climb)\w*{_BETWEEN}{{0,60}}?"
    r"\b(?:full|crash\w*|errors?|dies?|died|fail\w*|freez\w*|hangs?|stops?)\b",
    rf"\b(?:crash|blow|explod|burst|overload)\w*\b{_BETWEEN}{{0,20}}?\b{_STORE}\b",
    # Spanish, Portuguese, Italian, French
    r"\b(?:sin|sem|senza|falta de|falta|poca|pouca|plus (?:assez )?de|pas assez de|manque de|(?:à )?court de)"
    r" (?:la )?m[eéè]m(?:oria|[oó]ria|oire)\b",
    r"\b(?:m[eé]m(?:[oó]ria|oire)|v-?ram)\b[^.\n]{0,24}?\b(?:insuf\w+|agotad\w+|esgotad\w+|esaurit\w+|satur\w+|pleine|llena"
    r"|cheia|piena|épuisée)",
    # German
    r"\b(?:nicht gen[uü]gend|nicht genug|zu wenig|kein(?:en)?|ungen[uü]gend\w*)\b[^.\n]{0,16}?"
    r"(?:\w{0,20}speicher|v-?ram|ram)\b",
    r"\b\w{0,20}speicher\b[^.\n]{0,16}?\b(?:reicht nicht|(?:ist |läuft )?voll|erschöpft|überl\w+)",
    # Russian
    r"(?:не (?:хвата\w+|хватил\w+|достаточно)|недостаточно|нехватк\w+|закончил\w+|кончил\w+|переполн\w+)[^.\n]{0,16}?"
    r"(?:памят\w*|v-?ram|озу)|(?:памят\w*|озу)[^.\n]{0,16}?(?:не хват\w+|недостаточно|закончил\w+|переполн\w+)",
    # Japanese, Korean
    r"(?:メモリー?|vram)[^。\n]{0,6}?(?:不足|足り|枯渇|溢れ|あふれ|オーバー|いっぱい|切れ)",
    r"(?:메모리|램|vram)[^.\n]{0,6}?(?:부족|초과|고갈|터[지졌]|오버)",
    # Chinese, in both scripts
    r"(?:[显顯][存卡]|[内內]存|記憶體|vram)[^,，。\n]{0,6}?(?:不足|不[够夠]|溢出|爆|炸|超[出过限]|[占佔]满|耗[尽盡]|用完|[满滿]了|OOM)",
    r"(?:爆|炸|撑爆|超|耗[尽盡]|[占吃][满滿])了?(?:[显顯]存|[内內]存|記憶體)|(?:没有?|缺[少乏])足[够夠]的?(?:[显顯]存|[内內]存|記憶體)",
)
_OF_DEVICE = re.compile(
    r"gpus?\b|cuda|v-?ram|\b(?:video|graphics?|device|card|hbm)\b|[显顯][存卡]|видео|grafik|\b(?:[rg]tx|[345]0[6-9]0)"
    r"|\b[avh]100",
    re.I | re.A,
)
_OF_HOST = re.compile(
    r"(?<!v)(?<!v-)\bram\b|\b(?:host|cpu|system|swap|page ?file|computer|server)\b|[内內]存|記憶體|озу|оперативн"
    r"|arbeitsspeicher",
    re.I | re.A,
)

# A process that was killed: in most cases by the kernel, when RAM ran out.
KILLED = re.compile(
    "|".join(
        (
            r"\bbackground workers? (?:are|is) (?:no longer alive|6 feet under)",
            r"(?:automatically|suddenly|just|gets?|got|getting|always|still|will be|why|being) killed\b",
            r"\bkilled (?:error|again)\b",
            r"(?:leads? to|results? in|ends? (?:up )?(?:with|in)|shows?|says?|prints?) (?:a |an |the )?\W?killed\b",
            r"\b(?:process|job|script|program|training|workers?|pod|container|python|kernel|server|app\w*"
            r"|it)\b(?:(?!\bnot?\b|n't|\bnever\b)[^.\n]){0,30}"
            r"\b(?:was|is|were|are|got|gets?|be|been|being|just)\s(?:\w+\s)?killed",
            r"\b(?:process|job|script|training|program|python|run|worker) killed\b|\bkilled by itself\b",
            r"\bsigkill\b|\bsignal:? ?9\b|(?:exit|return) ?code:? ?-9\b|returncode=-9|\bexitcode:? ?-9\b",
            r"\bkilled by (?:the |my |a )?(?:oom|system|kernel|computer|os\b|linux|slurm|docker|scheduler)",
            r"^\W{0,6}killed (?:when|while|during|at|after|on)\b|notice the killed",
            r"[\"'`\u2018\u201c]kill(?:ed)?[.,]?[\"'`\u2019\u201d]",
            r"oom[- _]?kill",
            r"\bkilled\b[^.\n]{0,12}\(?oom\b",
            r"(?:system|kernel|os) kill(?:ed|s)",
            r"exit(?:ed)?(?: with)?(?: code)?:? ?137",
            r"被(?:系统)?(?:杀死|杀掉|杀|kill)",
        )
    ),
    re.I,
)

# The first kind that matches counts.
_TOLD_KINDS = (
    MessageKind("told_host", "cpu", True, re.compile(_TOLD_HOST, re.I | re.A), True),
    MessageKind("told_device", "cuda", True, re.compile(_TOLD_DEVICE, re.I | re.A), True),
    MessageKind("told", None, True, re.compile(_TOLD, re.I | re.A), True),
)
_IN_ANY_WORDS = re.compile("|".join(_ANY_WORDING), re.I)
_OF_WHOM = {
    (True, False): MessageKind("told_device", "cuda", True, _IN_ANY_WORDS, True),
    (False, True): MessageKind("told_host", "cpu", True, _IN_ANY_WORDS, True),
}
_OF_ANYBODY = MessageKind("told", None, True, _IN_ANY_WORDS, True)
_OF_KILLED = MessageKind("told_host", "cpu", True, KILLED, True)
_END_OF_STATEMENT = re.compile(r"\.(?!\d)|[!?;。！？；\n]")
_LONGEST_STATEMENT = 120


def told_messages(cleaned: str) -> Iterator[tuple[MessageKind, re.Match[str]]]:
    """Failures that the text describes without quoting their message; offsets are in the cleaned text."""
    for kind in _TOLD_KINDS:
        match = kind.pattern.search(cleaned, 0, _LONGEST_STORY)
        if match is not None:
            yield kind, match
            return
    match = _IN_ANY_WORDS.search(cleaned, 0, _LONGEST_STORY)
    if match is None and len(cleaned) > _LONGEST_STORY:
        match = _IN_ANY_WORDS.search(cleaned, max(_LONGEST_STORY, len(cleaned) - _LONGEST_END))
    if match is not None:
        statement = _statement(cleaned, match)
        of_whom = (bool(_OF_DEVICE.search(statement)), bool(_OF_HOST.search(statement)))
        yield _OF_WHOM.get(of_whom, _OF_ANYBODY), match
        return
    match = KILLED.search(cleaned, 0, _LONGEST_STORY)
    if match is not None and not _OF_DEVICE.search(_statement(cleaned, match)):  # what it left there is no failure
        yield _OF_KILLED, match


def _statement(cleaned: str, match: re.Match[str]) -> str:
    """The sentence in which something was found."""
    before = cleaned[max(0, match.start() - _LONGEST_STATEMENT) : match.start()]
    after = cleaned[match.end() : match.end() + _LONGEST_STATEMENT]
    return _END_OF_STATEMENT.split(before)[-1] + match.group() + _END_OF_STATEMENT.split(after)[0]


_NVIDIA = re.compile(
    r"\bcuda\b|nvidia|geforce|\b[rg]tx\b|\btesla\b|\btitan (?:x|xp|v|rtx)\b|\b[avh]100\b|\b[345]0[6-9]0\b", re.I | re.A
)
_NAMED_HOST = re.compile(
    r"(?<!gpu )(?<!video )(?<!gb )(?<!gb of )\bram\b|\bcpus?\b|\b(?:system|host) memory\b|killed", re.I | re.A
)
_OTHER_VENDORS = (
    ("mps", re.compile(r"\bmps\b|\bmac(?:book|os|[ -]?mini|[ -]?studio)?\b|\bapple silicon\b", re.I | re.A)),
    ("hip", re.compile(r"\brocm\b|\bradeon\b|\brx ?[5-9]\d{3}|\bamd gpu|\bmi[23]\d\dx?\b", re.I | re.A)),
    ("npu", re.compile(r"\bnpus?\b|\bascend\b|\u6607\u817e", re.I | re.A)),
    ("xpu", re.compile(r"\bxpu\b|\bintel arc\b|\barc [ab]\d{3}\b|\bipex\b", re.I | re.A)),
)


_A_CARD = re.compile(r"\b(?:gpus?|cuda|vram|graphics|rocm|hip|mps|xpu|npu|tpu)\b", re.I | re.A)
_RUNS_ON_CPU = re.compile(r"\bdevice\W{1,4}cpu\b|\b(?:on|using) (?:the |my |a )?cpu\b|\bcpu[- ]only\b", re.I | re.A)


def named_backend(cleaned: str) -> str | None:
    """The backend of the device that a text names; None for none, for several, or for the host beside an NVIDIA
    card."""
    head = cleaned[:_LONGEST_STORY]
    if _NVIDIA.search(head):
        return None if _NAMED_HOST.search(head) else "cuda"
    named = [backend for backend, pattern in _OTHER_VENDORS if pattern.search(head)]
    if not named and _RUNS_ON_CPU.search(head) and not _A_CARD.search(head):
        return "cpu"
    return named[0] if len(named) == 1 else None
