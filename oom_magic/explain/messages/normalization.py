"""Normalizing a pasted text: what terminals, logs, Markdown and wrapping added is removed."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate, groupby

_ANSI = re.compile(r"(?:\x1b|\\x1b|\\u001b|\\033|\\e)\[[0-9;?]{0,20}[A-Za-z]|\[\d{1,3}(?:;\d{1,3}){0,4}m")
_CONTROL = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b-\u200f\u2060\ufeff]|<br */?>|&(?:gt|lt|nbsp|quot|amp|#\d{1,6});"
)
LONGEST_QUOTE = 160
_LONGEST_BESIDE = 60  # on either side of the words that were found
_END_OF_CLAUSE = re.compile(r"[!?;。！？；\n]|\.(?=\s|$)")
MARKS = re.compile(r"(?m:^)[\s>#|]+|[\s`*|]+")  # of Markdown, and blanks
# Chinese keyboards and pages write punctuation, digits and letters twice as wide.
_FULL_WIDTH = {0xFF01 + offset: 0x21 + offset for offset in range(94)} | {0x3000: 0x20, 0x3002: 0x2E}
_RAY = r"\([\w.]{1,40} pid=\d{1,10}[^)\n]{0,60}\)"
_RANK = re.compile(rf"^[ \t>#|]{{0,8}}(\[(?:rank ?|default)?\d{{1,4}}\](?=:| )|{_RAY})", re.M)
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_DATE = r"(?:\d{4}[-/])?\d\d[-/]\d\d"
_LEVEL = r"(?:INFO|WARNING|WARN|ERROR|DEBUG|CRITICAL|FATAL|TRACE|stdout|stderr|root|SUBPROCESS)"
# A logger's name after its level has a point or dash; exceptions and words of messages are none.
_LOGGER = r"(?![\w.]{0,60}(?:Error|Exception|Warning))[\w]{0,40}[._-][\w.-]{0,60}"
_PREFIX = re.compile(
    r"^(?=.)(?:"
    r"[ \t>#│┃|╭╰*•+]"
    r"|//"
    r"|\[(?:rank ?|default)?\d{1,4}\]:?"
    r"|\[[\w./-]{1,60}:\d{1,6}\]"
    r"|\[[A-Za-z]{1,20}-\d{1,4}\]"
    rf"|[A-Z][a-z]{{2}} [ \d]\d {_CLOCK} [\w.-]{{1,60}} [\w./-]{{1,60}}(?:\[\d{{1,10}}\])?: "  # syslog
    r"|\d{1,4}: "  # srun --label
    r"|wandb: "
    rf"|\[?{_DATE}(?:[T ]{_CLOCK})?(?:Z|[+-]\d\d:?\d\d)?[\],]?(?=[\s|:-])"
    rf"|\[?{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?[\],]?(?=[\s|:-])"
    r"|\[[IWEF]\d{4}[^\]\n]{0,60}\]"
    r"|[IWEF]\d{4}[ \t]"
    r"|\d{1,7}[ \t]{1,3}(?=[\w.-]{1,40}:\d{1,6}\])"
    r"|\d{1,7}\.\d{1,4}s\s{1,4}\d{1,7}\s"
    rf"|\[?{_LEVEL}\]?[ \t:|/-]+(?:{_LOGGER}:[ \t])?"
    r"|-[ \t][\w.]{1,40}[ \t]-[ \t]"
    r"|[\w.-]{1,40} ?:\d{1,6}\](?:(?=\s)|$)"
    rf"|{_RAY}"
    r"|-[ \t]"
    r"|[\w.-]{1,40}[ \t]{1,12}\|[ \t]"
    r"){1,40}",
    re.M,
)
# Neither blanks, quotes, markup, comment marks nor the \n of a repr carry meaning in any message.
_DROPPED = re.compile(r"\\[nrt]|[\s*`'\"|\\#>\u2018-\u201f\u2500-\u257f]+")
# "9,77 GiB" and "1900,00 MiB": some locales write the decimal point so.
_DECIMAL_COMMA = re.compile(r"(?<=\d),(?=\d{1,2}[ \t]?[KMGTkmgt]i?[Bb]\b)")
# The pattern begins with the blank, since blanks are rarer than digits.
_DIGIT_GAP = re.compile(r"[ \t](?<=\d.)(?=\d)")
_WIDE_DIGIT_GAP = re.compile(r"[ \t](?<=\d.)[ \t]{1,7}(?=\d)")
_GAP_MARK = "~"
_BLOCK = 4096  # at least, of characters: what is looked through to find one place
_MANY_LINES = 100
_LEAST_OF_A_LOG = 30  # of the characters of a line
_KEPT_REPEATS = 8  # of lines of one shape, from the first and from the last
_DIGITS = re.compile(r"\d+")


@lru_cache(maxsize=1)  # the message and the traceback around it are read from one text
def clean(text: str) -> str:
    """The text without colour codes, control characters and line prefixes, each rank's lines together."""
    text = _DECIMAL_COMMA.sub(".", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = _CONTROL.sub("", _ANSI.sub("", text.translate(_FULL_WIDTH)))
    return _PREFIX.sub("", _untangle(text))


def _untangle(text: str) -> str:
    """Interleaved ranks put in order, rank by rank; a line without a mark continues the one before."""
    if len(set(_RANK.findall(text))) < 2:
        return text
    streams: dict[str, list[str]] = {}
    rank = ""
    for line in text.split("\n"):
        mark = _RANK.match(line)
        if mark:
            rank = mark.group(1)
        streams.setdefault(rank, []).append(line)
    return "\n".join(line for lines in streams.values() for line in lines)


class Squeezed:
    """A cleaned text in lower case without blanks and quotes, so that wrapping cannot split a word.

    ``text`` is matched; ``origins`` leads positions in it back to the cleaned text. Blanks between two
    digits on one line leave a ``~``: there they do separate.
    """

    def __init__(self, cleaned: str) -> None:
        narrow = _DIGIT_GAP.sub(_GAP_MARK, cleaned)  # a table of numbers has half a million of them in a megabyte
        marked = _WIDE_DIGIT_GAP.sub(lambda gap: _GAP_MARK * len(gap.group()), narrow)
        self._blocks = [*_blocks_of(marked)]
        # Of all letters only this one is longer in lower case, which would shift what follows it.
        squeezed = [_DROPPED.sub("", block).replace("\u0130", "i").lower() for block in self._blocks]
        self._ends = [*accumulate(map(len, squeezed))]
        self.text = "".join(squeezed)

    def origins(self, positions: Iterable[int]) -> Iterator[int]:
        """Offsets in the cleaned text of ascending positions in ``text``."""
        starts = [0, *accumulate(map(len, self._blocks))]
        for number, inside in groupby(positions, lambda position: bisect_right(self._ends, position)):
            start = self._ends[number - 1] if number else 0
            gaps = _DROPPED.finditer(self._blocks[number])
            gap, num_dropped = next(gaps, None), 0
            for position in inside:
                while gap is not None and gap.start() - num_dropped <= position - start:
                    num_dropped += gap.end() - gap.start()
                    gap = next(gaps, None)
                yield starts[number] + position - start + num_dropped


def _blocks_of(text: str) -> Iterator[str]:
    """The text in parts of some kilobytes, each with its last line break."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _BLOCK) + 1 or len(text)
        yield text[start:end]
        start = end


def without_repeats(text: str) -> str:
    """A long text without most of the lines that differ in their numbers only, as a log prints one for each step."""
    lines = text.split("\n")
    if len(lines) < _MANY_LINES:
        return text
    shapes = [_DIGITS.sub("0", line) for line in lines]
    left = Counter(shape for shape in shapes if len(shape) >= _LEAST_OF_A_LOG)
    seen = Counter[str]()
    kept = []
    for line, shape in zip(lines, shapes, strict=True):
        seen[shape] += 1
        left[shape] -= 1
        if len(shape) < _LEAST_OF_A_LOG or seen[shape] <= _KEPT_REPEATS or left[shape] < _KEPT_REPEATS:
            kept.append(line)
    return "\n".join(kept)


def clause_around(text: str, start: int, end: int) -> str:
    """The words of a text from ``start`` to ``end`` with those of their sentence around them, short enough to quote."""
    end = min(end, start + LONGEST_QUOTE)
    before = _END_OF_CLAUSE.split(text[max(0, start - _LONGEST_BESIDE) : start])[-1]
    after = _END_OF_CLAUSE.split(text[end : end + _LONGEST_BESIDE], maxsplit=1)[0]
    is_cut = len(before) == _LONGEST_BESIDE, len(after) == _LONGEST_BESIDE
    before = before.partition(" ")[2] if is_cut[0] and " " in before else before
    after = after.rpartition(" ")[0] if is_cut[1] and " " in after else after
    quote = MARKS.sub(" ", f"{before}{text[start:end]}{after}").strip(" -,:;.、，。：；")
    return f"{'… ' if is_cut[0] else ''}{quote}{' …' if is_cut[1] else ''}"
