"""Signs that memory ran out in a text that quotes no message we know: its structure, not its sentences.

Words of a few kinds are looked for, in many languages and in haste, and then kinds near each other: a word for memory
near one for its end, an allocation near its refusal and a size, something that does not fit near what it should fit in.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

# Including misspellings: memeory, memroy, menory.
MEMORY = r"(?!(?:m[ao]ney|many|marr?y|moray|memor[iy][zs])\b)m(?:[emnoar]{2,7}|em[emnoart]{1,5})(?:y|ies)"
_NO_STORE = (
    r"(?![-_ ]?(?:bank|replay|module|network|efficien|format|map|access|layout|cell|augment|attention|control|profil"
    r"|address|band))"
)
_SIZE = r"(?<![\w.])\d[\d.,]{0,24} ?(?:[kmgt]i?b|bytes?)(?![a-z])"

# The kinds of words; each match begins at the start of a word, except in languages that do not separate words.
_KINDS = {
    "store": (
        rf"(?<![a-z])(?:{MEMORY}|mem|v-?ram|ram|swap|page ?file|virtual memory|heap|arena|geheugen"
        rf"|minne|m[eé]m(?:oria|ória|oire)"
        rf"|pami[eę]ci?|bellek|hafıza|bộ nhớ)(?![a-z]){_NO_STORE}|speicher(?![a-z])|памят\w{{0,3}}|озу"
        r"|メモリー?|메모리|램|[显顯][存卡]|[内內]存|記憶體|[页頁]面?文件|分[页頁]檔|虚拟内存"
    ),
    "card": r"(?<![a-z])(?:gpus?|(?:graphics? |video )?cards?)(?![a-z])",
    "lacking": (
        r"(?:not|n['’]?t|never)(?: \w+){0,3} (?:enough|sufficient)|(?<![a-z])(?:too little|lack(?:s|ing)?(?: of)?"
        r"|short(?:age)? (?:of|on)|low on|out of(?! bounds| range)|no (?:more(?! than)|free|available)"
        r"|wants? (?:more|of)|sin|sem|senza|falta(?: de)?|poca|pouca|plus (?:assez )?de|pas assez de"
        r"|manque de|court de"
        r"|nicht gen[uü]gend|nicht genug|zu wenig|kein(?:en)?|onvoldoende|niet genoeg|brak|za mało"
        r"|không đủ|hết|tràn|yetersiz)(?![a-z])"
        r"|нехватк\w{1,2}|не хват\w+|не достаточно|недостаточно|[爆炸超撑]了?|耗[尽盡]|[占吃][满滿]了?|没有?足[够夠]的?"
        r"|缺[少乏]足[够夠]的?"
    ),
    "ended": (
        r"(?<![a-z])(?:(?:is|was|are|gets?|got|becomes?|being|goes|almost|completely|ist|läuft|est|está) (?:\w+ )?"
        r"(?:full|voll|plein\w*|llena|chei\w|gone|out)\b|not available|limit (?:is |was )?(?:reached|exceeded|hit)"
        r"|(?:to|at|hits?|reach\w*) (?:(?:the|its) (?:limit|roof|ceiling|max\w*)|100 ?%)|reicht nicht|läuft über"
        r"|yet(?:miyor|ersiz)|doldu|(?:is |was |are )?too (?:small|little|low))|(?:not|n['’]?t"
        r"|never)(?: \w+){0,3} (?:enough|sufficient)"
        r"|закончил\w+|кончил\w+|не хват\w+|недостаточно|不[够夠]|[太过過]小|不足|[爆炸]|超[出过限]|[占佔][满滿]"
        r"|用完|[满滿]了"
        r"|耗[尽盡]|足り|枯渇|溢れ|あふれ|オーバー|いっぱい|切れ|부족|초과|고갈|터[지졌]|모자|오버"
        r"|(?:分配|申请)[^\n]{0,6}(?:失败|失敗)"
    ),
    "spent": (
        r"(?<![a-z])(?:exhaust\w*|exceed\w*|surpass\w*|overflow\w*|explo[ds]\w*|blow(?:s|n|ing)? up|blew up|burst\w*"
        r"|(?:runs?|running|ran) (?:out|dry)|used up|saturat\w*|maxe[ds]\b|maxing|max(?:es)? out|eaten"
        r"|fill(?:s|ed|ing)? up|(?:is|was|are|were|gets?|got|been) filled(?! with)|overload\w*"
        r"|(?:in|un)suffi[cz]ient\w*|insuf\w+|agotad\w+"
        r"|esgotad\w+|esaurit\w+|satur\w+|épuisée|niewystarcz\w+|erschöpft|überl\w+)|переполн\w+|溢出"
    ),
    "crashed": r"(?<![a-z])(?:crash|blow|explod|burst|overload)\w*",
    "chokes": r"(?<![a-z])chok(?:e|es|ed|ing)(?![a-z])",
    "all": r"(?<![a-z])(?:all|whole|entire|every|100 ?%)(?![a-z])",
    "taken": r"(?<![a-z])(?:used|taken|occupied|eaten|consumed|gone)(?![a-z])",
    "asked": (
        r"alloc\w{0,20}|申请|分配|(?<![a-z])(?:reserve|mmap|obtain|acquire|grow|extend|request (?:for|of)"
        r"|create a \w+ buffer)\b"
    ),
    # also as a function's name: vkAllocateMemory, aclrtMalloc
    "allocation": (
        r"alloc(?:ation|ator|ate)?s?\b|malloc\w{0,16}|alloc(?:ate)?_?(?:(?:device|host)_?)?(?:mem|buf)\w{0,8}"
    ),
    "got": r"(?<![a-z])(?:obtain|get|reserve)(?![a-z])",
    "refused": (
        r"(?<![a-z])(?:fail\w*|unable|impossible|refus\w*|denied|reject\w*|can ?not|can['’]?t"
        r"|could ?n[o'’]?t|could not"
        r"|not be (?:satisf|met|fulfil)\w*|return\w* (?:null|nil|nothing|error|-?\d))|失[败敗]"
    ),
    "failed": r"(?<![a-z])(?:fail\w*|refused|denied|errors?)",
    "size": _SIZE,
    "room": r"(?<![a-z])(?:bytes?|(?:\w{2,12} )?buffers?|pools?|cache|tensors?|workspace)(?![a-z])",
    "above": r"(?<![a-z])(?:above|over|beyond|past|more than|higher than|larger than|went over)(?![a-z])",
    "granted": (
        r"(?<![a-z])(?:request(?:ed)?|allow(?:ed|ance)|limit|quota|asked|granted|reserv(?:ed|ation)"
        r"|capacity|assigned)"
        r"(?![a-z])"
    ),
    "more": r"(?<![a-z])(?:more|larger|greater|bigger)(?![a-z])",
    "than_there_is": (
        r"(?<![a-z])than (?:\w+ ){0,4}(?:has|have|had|got|available|exists?|there (?:is|was)|requested|allowed|a"
        r"llocated"
        r"|granted|asked|installed|physical|can)(?![a-z])"
    ),
    "red": r"(?<![a-z])(?:go(?:es|ing)?|went|gone|turn\w*|is|was|all|into|shown) (?:\w+ )?red(?![a-z])",
    "broke": (
        r"(?<![a-z])(?:crash\w*|dies|died|dying|freez\w*|froze|hang(?:s|ing)?|hung|abort\w*|evict\w*|cancell?ed"
        r"|terminated|collapse[sd]|fails|failed|failing|failure)(?![a-z])"
    ),
    "not_fit": (
        r"(?:n['’]?t|\bnot|\bnever|\bcannot|\bhardly|\bunable to) fit\b"
        r"|\btoo (?:big|large|much) (?:\w+ )?(?:for|to fit)\b"
    ),
    "gigabytes": r"(?<![\w.])\d{1,6} ?gi?b(?![a-z])",
    "rises": r"(?<![a-z])(?:increas|grow|ris|climb)\w*",
    "stops": r"(?<![a-z])(?:full|crash\w*|errors?|dies?|died|fail\w*|freez\w*|hangs?|stops?|kill\w*)(?![a-z])",
    # OutOfMemoryError, E_OUTOFMEMORY, VK_ERROR_OUT_OF_DEVICE_MEMORY, _ArrayMemoryError, bad_alloc
    "name": (
        r"(?:out_?of|not_?enough|insufficient)_?(?:(?:device|host|gpu|system|video)_?)?(?:memory|mem|resources)"
        r"(?:_?(?:error|exception|fault))?s?(?![a-z_])"
        r"|resource[_ ]?exhaust(?:ed|ion)?(?:[_ ]?error)?(?![a-z_])|resources (?:is |was |were )?exhausted"
        r"|(?:memory|alloc|allocation)_?(?:error|exception|failure|exhausted|exceeded)s?(?![a-z_])"
        r"|(?<![a-z])(?:enomem\b|bad_(?:alloc|array_new)\w*)"
    ),
    "needs": (
        r"(?<![a-z])(?:requir\w+|needs?|takes?) [^.\n]{0,16}?\d ?gi?b\b[^.\n]{0,40}?\b(?:only|just|has|have|got)"
        r" (?:\w+ )?\d"
    ),
}  # fmt: skip
_PATTERNS = {kind: re.compile(pattern, re.I) for kind, pattern in _KINDS.items()}
_OF_ROOM = ("room", "size", "store")
_HOLDERS = ("store", "card", "gigabytes")
# Kinds in their order, and how far apart at most: (kinds, gap, kinds, gap, kinds).
_SIGNS: tuple[tuple[tuple[tuple[str, ...], ...], tuple[int, ...]], ...] = (
    ((("name",),), ()),
    ((("needs",),), ()),
    ((("lacking", "spent"), ("store",)), (30,)),
    ((("store",), ("ended", "spent")), (36,)),
    ((("card",), ("ended", "spent", "chokes")), (16,)),
    ((("crashed",), ("store",)), (20,)),
    ((("all",), ("store",), ("taken",)), (16, 24)),
    ((("refused",), ("asked",), _OF_ROOM), (24, 40)),
    ((("asked",), _OF_ROOM, ("refused",)), (60, 40)),
    ((("store",), ("refused",), ("asked",)), (30, 24)),
    ((("refused",), ("asked",), ("card",)), (12, 32)),
    ((("failed",), ("asked",), ("store",)), (12, 12)),
    ((("refused",), ("got",), ("store",)), (12, 12)),
    ((("allocation",), ("failed",)), (20,)),
    ((("not_fit",), _HOLDERS), (30,)),
    ((("store",), ("rises",), ("stops", "spent")), (40, 60)),
    ((("store",), ("above",), ("granted",)), (24, 24)),
    ((("size",), ("above",), ("granted",)), (24, 24)),
    ((("more",), ("store",), ("than_there_is",)), (8, 16)),
    ((("store",), ("red",)), (24,)),
    ((("store",), ("broke",)), (24,)),
)
# The start of another sentence, or words for what might have happened or should be prevented.
_BREAK = re.compile(r"\bleaks?\b|\bcores?\b|\bif\b|\bavoid|\bprevent|\breduc|\bwithout\b|\.(?!\d)|[\n。]", re.I)

_DENIED = re.compile(r"(?:\b(?:cannot|can not|never|not)|n['\u2019]t) $")
_LONGEST_DENIAL = 8

OF_DEVICE = re.compile(
    r"gpu\w*|cuda|hip[a-z]*alloc|v-?ram|\b(?:video[- ](?:card|memory|ram)s?|graphics?|device|card|hbm)\b"
    r"|\bvk_?[a-z]|\bnvmap|\w\.cu\b|[显顯][存卡]"
    r"|видео|grafik|graphique|gr[aá]fica|그래픽|グラ|\b(?:[rg]tx|[345]0[6-9]0)|\b[avh]100",
    re.I | re.A,
)
OF_HOST = re.compile(
    r"(?<!v)(?<!v-)(?<!gpu )\bram\b|\b(?:host|cpu|(?<!face )(?<!block )(?<!blocks )swap|page ?file)\b"
    r"|\b(?:system|computer|server|physical|main)"
    r"(?:['’]s)? (?:\w+ )?(?:memory|ram)\b|\b(?:ubuntu|windows|linux|machine|laptop|pc|os|everything)\b[^.\n]{0,16}"
    r"\b(?:freez|hang|crawl|unrespons|stops? resp)\w*|\bdask\b|\bworker exceeded|[内內]存|記憶體|озу|оперативн"
    r"|arbeitsspeicher|(?<!cuda)(?<!hip)malloc\b|arraymemoryerror|\bmemoryerror|\benomem\b|bad_a|\bjulia\b"
    r"|\b(?:computer|laptop|machine|pc)\b[^.\n]{0,12}\bout of\b|\br session|\bkill(?:s|ed|ing)\b|杀(?:死|掉)"
    r"|[页頁]面?文件|分[页頁]檔|虚拟内存",
    re.I | re.A,
)


@dataclass(frozen=True, order=True)
class Sign:
    """Where a sign stands in a text."""

    start: int
    end: int


def first_sign(text: str) -> Sign | None:
    """The first place of a text where kinds of words stand near each other as if memory had run out, or None."""
    found = {kind: [Sign(*match.span()) for match in pattern.finditer(text)] for kind, pattern in _PATTERNS.items()}
    signs = (_first_of(text, found, kinds, gaps) for kinds, gaps in _SIGNS)
    return min((sign for sign in signs if sign is not None), default=None)


def _first_of(
    text: str, found: Mapping[str, list[Sign]], kinds: tuple[tuple[str, ...], ...], gaps: tuple[int, ...]
) -> Sign | None:
    """The first place where words of these kinds follow each other in one statement, no farther apart than the gaps."""
    places = [sorted(chain.from_iterable(found[kind] for kind in alternatives)) for alternatives in kinds]
    if not all(places):
        return None
    for first in places[0]:
        if _DENIED.search(text, max(0, first.start - _LONGEST_DENIAL), first.start):
            continue
        ends = [first.end]
        for gap, candidates in zip(gaps, places[1:], strict=True):
            ends = [end for last in ends for end in islice(_ends_near(text, last, gap, candidates), 1)]
        if ends:
            return Sign(first.start, ends[0])
    return None


def _ends_near(text: str, end: int, gap: int, candidates: list[Sign]) -> Iterator[int]:
    """The ends of the candidates that follow in the same statement."""
    for candidate in candidates[bisect_left(candidates, Sign(end, end)) :]:
        if candidate.start - end > gap:
            return
        if not _BREAK.search(text, end, candidate.start):
            yield candidate.end
