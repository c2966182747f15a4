"""Which of the known statements a text makes: questions, advice and words quoted from programs are none."""

from __future__ import annotations

import re

from oom_magic.explain.evidence.clues.author_words import TOLD

_BLANKS = re.compile(r"[ \t]{2,8}")
# Said by programs and messages, not by the author.
_QUOTED = re.compile(
    r"to avoid fragmentation[^\n]{0,200}|try setting (?:max_split_size_mb|PYTORCH_\w+)[^\n]{0,120}"
    r"|1\. If yes, please stop them[^\n]*|Please check whether there is any other process[^\n]*"
    r"|2\. If no, please (?:decrease|try)[^\n]*|TIPS: If the workflow worked before[^\n]*",
    re.I,
)
_ADVICE = re.compile(
    r"(?:是否有?|如果|检查|防止|避免|whether|check|if there (?:is|are)(?: any)?|prevent\w*|avoid\w*"
    r"|against)[\s\w*]{0,12}$"
    r"|\b(?:no|not|n't|without)\s(?:a |any |the |be |have )?$",
    re.I,
)


# Longer texts are logs.
_LONGEST_STORY = 10_000


def said_in(text: str) -> frozenset[str]:
    """The keys of all statements that a cleaned text makes about the run."""
    if len(text) > 2 * _LONGEST_STORY:
        text = f"{text[:_LONGEST_STORY]}\n{text[-_LONGEST_STORY:]}"
    said = _BLANKS.sub(" ", _QUOTED.sub("", text))
    keys = frozenset(key for key, pattern in TOLD.items() if _is_told(pattern, said))
    infers_after_training = {"training_fits", "infers"} <= keys and "evaluates" not in keys
    return keys - {"trains"} if infers_after_training else keys


def _is_told(pattern: re.Pattern[str], text: str) -> bool:
    """Whether a match is a statement, not a question or advice: "check whether others use it", "against leaks"."""
    return any(not _ADVICE.search(text, max(0, match.start() - 24), match.start()) for match in pattern.finditer(text))
