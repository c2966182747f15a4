"""The causes and fixes that a text's author names, and whether all that is asked is how much memory a run needs.

They are read in texts about a fix only (a guide, a report of a repair): a log that lists settings proposes none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from oom_magic.explain.evidence.causes import Cause
from oom_magic.explain.evidence.clues.author_setting import words
from oom_magic.explain.evidence.clues.author_words import TIP

_LOOKS_FOR_A_WAY_OUT = re.compile(
    r"解决方[案法]|修复|优化(?:指南|技巧|建议)|推荐(?:的)?(?:配置|参数|设置)"
    r"|\bsolutions?\b|how to (?:fix|solve|avoid)|\bworkarounds?\b|\brecommend\w*",
    re.I,
)
# What is asked for is no proposal.
_QUESTION = re.compile(r"[^.!?\n。！？]{0,400}(?:[?？]|\bwould be (?:\w+ )?(?:appreciated|nice|great|helpful)\b)")
_MEMORY = r"(?:gpus?(?: memory)?|v-?ram|(?:video|graphics|cuda)[- ]?(?:memory|ram|cards?)|memory|hardware)"
_NEEDED = r"(?:need\w*|requir(?:e[sd]?|ing)|tak(?:e|es|ing)|use[sd]?|using|cost\w*|enough|sufficient|recommended)"
_ASKS_NEED = words(
    rf"\b(?:how (?:much|many|large|big)|what (?:amount|size|kind|sort) of|what|which)"
    rf" (?:(?:is|are|the|minimum|minimal|recommended|free|of|total|an?) ){{0,4}}{_MEMORY}\b"
    rf"[^.?!\n]{{0,60}}\b{_NEEDED}\b",
    rf"\b{_MEMORY}(?: \w+)? (?:requirements?|needed|needs)\b[^.!\n]{{0,60}}\?",
    rf"\bminim(?:um|al)\b[^.?!\n]{{0,16}}\b{_MEMORY}\b[^.!\n]{{0,60}}\?",
    r"(?:^|[.?!,\n] ?)(?:is|are|will|would|can) [^.?!\n]{0,24}\b\d{1,3} ?gi?b?\b[^.?!\n]{0,40}"
    r"\b(?:enough|sufficient)\b[^.!\n]{0,60}\?",
    r"(?:需要|要|用|占)[^\n，。？?]{0,6}(?:多[大少]|几个?g)[^\n，。？?]{0,8}(?:显存|vram|gpu)",
    r"(?:显存|vram|gpu)[^\n，。？?]{0,12}(?:多[大少]|要求是|需求是)|(?:显存|vram|\dg|\dgb)[^\n，。]{0,6}[够夠](?:用)?(?:不[够夠]|[吗嗎么])",
)
_FAILED = words(
    r"\b(?:fail|crash|error|kill|oom|trace ?back|exception)|\bran out|\bnot (?:\w+ ){0,3}(?:enou?gh|suffic\w*)"
    r"|报错|失败|崩|爆|溢出"
)
_LONGEST_READ = 10_000
_LEAST_NAMED = 2  # of causes and fixes: who names one asks about it
_NOT_CLAIMED = words(TIP, r"If reserved[^\n]{0,160}")
_CAUSES = (
    (
        Cause.ACTIVATIONS,
        words(
            r"batch[ _-]?size\S{0,12}[^.\n。]{0,40}(?:too (?:large|big)|太大|过大)",
            r"批次(?:大小)?(?:太大|过大)|激活值|\bactivations\b",
        ),
    ),
    (Cause.LOGITS_OR_LOSS, words(r"logits[^\n]{0,30}(?:float32|fp32)")),
    (Cause.FRAGMENTATION, words(r"碎片", r"\bfragment(?:ed|ation)\b")),
    (Cause.WEIGHTS_TOO_BIG, words(r"模型(?:太大|过大)", r"\bmodel (?:is )?too (?:big|large)\b")),
    (Cause.OTHER_PROCESS, words(r"(?:其他|多个)进程", r"\b(?:an)?other process")),
)
# Keys of remedies without their "_any", and of proposals that do not affect GPU memory.
_PROPOSALS = (
    (
        "smaller_batch",
        words(
            r"(?:减小|降低|减少|调小)\s?(?:了)?\s?(?:batch|批|单次)|batch[ _-]?size[^\n]{0,24}(?:→|->|降到"
            r"|减小到|从 ?\d)",
            r"(?:reduc|decreas|lower|smaller)\w*\s(?:the\s|your\s)?(?:micro)?batch",
        ),
    ),
    (
        "shorter_sequences",
        words(
            r"(?:减小|减少|降低|缩短)[^\n]{0,6}(?:序列|`?max_?(?:seq|len))",
            r"max_(?:seq_)?len\w*[^\n]{0,16}(?:→|->|从 ?\d)",
            r"(?:shorter|reduc\w+|decreas\w+) (?:the )?(?:max\w*[ _])?(?:seq|context|length)",
        ),
    ),
    ("checkpointing", words(r"gradient[ _]checkpointing|activation checkpointing|梯度检查点|激活检查点")),
    ("mixed_precision", words(r"混合精度|mixed[ -]precision|\bautocast\b|--use_amp")),
    ("quantized", words(r"\b[48][- ]?bits?\b[^\n]{0,8}(?:量化|quantiz|load)|量化|load_in_[48]bit")),
    ("offload", words(r"\boffload")),
    ("fsdp", words(r"ZeRO-?\d|\bFSDP\b")),
    ("sdpa", words(r"\bsdpa\b|flash[ _-]?attention")),
    ("optimizer_8bit", words(r"adamw?_?8-?bit|8-?bit adam")),
    ("expandable_segments", words(r"expandable_segments:True")),
    ("smaller_model", words(r"更小的模型|smaller model")),
    ("workers", words(r"(?:dataloader_)?num_workers|pin_memory")),
    (
        "clearing",
        words(
            r"empty_cache|(?:清理|清空)\s?(?:GPU ?)?(?:内存|显存|缓存)|(?:内存|显存)清理", r"clear\w*[ _](?:the )?gpu"
        ),
    ),
    ("clipping", words(r"max_grad_norm")),
)


_ALL_IN_VAIN = re.compile(
    r"\b(?:none|nothing|neither)(?: of (?:them|these|those|it))?(?: \w+){0,2} (?:work\w*|help\w*)\b", re.I
)


@dataclass(frozen=True)
class Story:
    """The ``causes`` that an author names and the ``proposals`` for a fix, in the order of their tables."""

    causes: tuple[Cause, ...] = ()
    proposals: tuple[str, ...] = ()


def asked_in(text: str) -> Iterator[str]:
    """``asks_need`` for a cleaned text that asks how much memory a run needs, and tells of nothing that failed."""
    head = text[:_LONGEST_READ]
    if _ASKS_NEED.search(head) and not _FAILED.search(head):
        yield "asks_need"


def story_in(text: str) -> Story:
    """The story in a cleaned text; empty if the text is not about a fix."""
    if not _LOOKS_FOR_A_WAY_OUT.search(text) or _ALL_IN_VAIN.search(text):
        return Story()
    said = _QUESTION.sub("", _NOT_CLAIMED.sub("", text))
    if not _LOOKS_FOR_A_WAY_OUT.search(said):  # it asks for one
        return Story()
    causes = tuple(cause for cause, pattern in _CAUSES if pattern.search(said))
    proposals = tuple(key for key, pattern in _PROPOSALS if pattern.search(said))
    return Story(causes, proposals) if len(causes) + len(proposals) >= _LEAST_NAMED else Story()
