"""What a text's author has tried in vain, by what was changed: nobody wants to be told to do it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from oom_magic.explain.evidence.clues.author_setting import words
from oom_magic.explain.evidence.clues.author_words import TIP

_LONGEST_READ = 10_000  # from each end; longer texts are logs
_LONGEST_SENTENCE = 400
# What was changed, by its key in ``needs.NEEDS``.
_CHANGES: Mapping[str, re.Pattern[str]] = {
    "tried_batch": words(
        r"batch(?:[ _-]?(?:sizes?|counts?)|es)\b|\bbatch ?="
        r"|(?:mini|micro)-?batch|smaller batch|batch(?![a-z])[^\n]{0,4}\d|\bbs\d{0,4}\b",
        r"批(?:次|大小|量|处理)",
    ),
    "tried_size": words(
        r"\b(?:shr[aiu]nk|resiz\w+|downscal\w+) (?:the |my |all )?(?:videos?|images?|pictures?|inputs?|data)\b"
        r"|\b(?:image|img|crop|patch|input|picture|frame|video|window|tile)s?[ _-]?(?:sizes?|dim\w*|resolutions?)"
        r"|\bsizes? of (?:the |my |each )?(?:images?|inputs?|pictures?|frames?|crops?)\b"
        r"|resolutions?\b|\bimgsz\b|\bcrop(?:s|ped)?\b|\b(?:fewer|number of) frames\b",
        r"分辨率|(?:图片?|图像|输入|裁剪|切割)(?:的)?(?:大小|尺寸)",
    ),
    "tried_length": words(
        r"\bmax[-_ ](?:\w{1,9}[-_ ])?len\w*|\bcontext[-_ ]?(?:length|size|window)|\bnum_ctx|\bn_ctx|\bctx[-_]size"
        r"|\bsequence[-_ ]len\w*|\bcutoff_len|\bblock_size\b"
        r"|\bshorter (?:wavs?|audios?|videos?|clips?|texts?|files?|recordings?)\b",
        r"序列长度|上下文",
    ),
    "tried_samples": words(r"\b(?:calib\w*|n|num|number of|max)[-_ ](?:calib\w* )?samples\b"),
    "tried_workers": words(r"\b(?:num[-_ ]?)?workers?\b"),
    "tried_shared": words(
        r"\b(?:shared memory|shm(?:[-_ ]size)?)\b[^.\n]{0,60}\d|\b(?:more|larger|increas\w+|rais\w+) (?:the )?(?:shared"
        r" memory|shm)\b|--ipc[= ]host", r"共享内存[^\n。]{0,16}\d",
    ),
    "tried_share": words(r"\bgpu[-_ ]memory[-_ ]utili[sz]ation|\bmem[-_]fraction|\bmemory[-_ ]fraction"),
    "tried_requests": words(r"\bmax[-_]num[-_](?:seqs|batched)|\bmax[-_]running|\bchunked[-_]prefill[-_]size"),
    "tried_graphs": words(r"\bcuda[-_ ]?graph\w*|\benforce[-_ ]eager"),
    "tried_layers": words(r"\bn?[-_]?gpu[-_]?layers|\bngl\b|\bnum_gpu\b"),
    "tried_half": words(
        r"\b(?:fp16|bf16|bfloat16|float16|half[- ]precision|mixed[- ]precision|amp|autocast)\b", r"混合精度|半精度",
    ),
    "tried_checkpointing": words(r"\b(?:gradient|activation)[-_ ]checkpoint\w*", r"梯度检查点"),
    "tried_segments": words(r"\bexpandable_segments"),
    "tried_split": words(r"\bmax_split_size\w*"),
    "tried_watermark": words(r"WATERMARK_RATIO"),
    "tried_vram": words(r"\b(?:low|med|no)[-_]?vram\b"),
    "tried_offload": words(r"\boffload\w*|_offload\b"),
    "tried_tiles": words(
        r"\btil(?:ed|ing|es)\b|\btile[-_ ]?sizes?\b|\b\w{0,24}(?:[dD]e|[eE]n)code_?[tT]iled\b|\btiled_(?:de|en)code\b"
    ),
    "tried_quantized": words(r"\b[48][- ]?bits?\b|\bquanti[sz]\w+|\bfp8\b|\bgguf\b", r"量化"),
    "tried_restart": words(r"\b(?:restart|reboot)\w*", r"重启"),
    "tried_attention": words(r"\bxformers\b|\bflash[- _]?att\w*|\bsdpa?\b|\battention slicing"),
    "tried_stream": words(r"\bmmap\w*|\bmemory[- ]mapp\w*|\blazy\b|\bstreaming\b"),
    "tried_detach": words(r"\bdetach\w*|\.item\(\)"),
    "tried_no_grad": words(r"\bno_grad\b|\binference_mode\b"),
    "tried_ram": words(r"\bswap\b|\bpag(?:e|ing) ?file", r"虚拟内存"),
    "tried_densify": words(r"densif\w*|grad_threshold"),
    "tried_limit": words(r"\b(?:max(?:imum)?|more|larger|higher|increas\w+) (?:the )?(?:memory|mem|ram)\b|--mem\b"
        r"|\bto (?:our |a |an |the )?\d[\d.,]{0,6} ?[gt]i?b\b|\b(?:entire|whole|full) node\b"),
}  # fmt: skip
# What is on or off: who names one has it, or knows of it and asks for more. Not where it is named as absent.
_SWITCHES = (
    "tried_half", "tried_checkpointing", "tried_vram", "tried_tiles", "tried_attention", "tried_stream",
)  # fmt: skip
_ABSENT = words(
    r"\b(?:without|not?|never|disabl\w*|lack\w*|missing|miss|false|off|none|absence|unsupported)\b|n't\b|=\s?[\"']?0\b"
    r"|\b(?:how (?:to|do|can)|can (?:i|we|you)|is there|are there|could|would|should|need|support for|wish|hope)\b|\?",
    r"不|没|未|无|如何|怎么|吗|能否|是否",
)
# Changes that help only one way.
_OF_SIZES = ("tried_batch", "tried_samples", "tried_size", "tried_length", "tried_layers", "tried_workers")
_LESS = words(
    r"reduc\w*|lower\w*|decreas\w*|small\w*|halv\w*|shrink\w*|shrank|shrunk|minim\w*|down to|less|fewer|crop\w*"
    r"|resiz\w*|chang\w*|adjust\w*|modif\w*|play\w*|var(?:y|ied|ious)|differen\w*|any"
    r"|tried includ\w+|no mat+er|regardless|\b[0-4]\b",
    r"[减降调改缩]|设[置为成]?[^\n，。]{0,4}小|无论|不管|最小|[为成到]\s?[0-4](?!\d)",
)
_IN_VAIN = words(
    r"\b(?:useless|pointless|in vain|to no avail|no (?:use|avail|luck|effect|help|success|difference|change)s?)\b",
    r"\b(?:does|do|did|has|have|is|was|will|wo)(?:n'?t| not) (?:\w+ ){0,3}"
    r"(?:help|work|chang|matter|solv|fix|resolv|effect|reduc)\w*",
    r"\bnot? (?:help|work|solv|fix|resolv)\w*|\bunable to (?:solve|fix)|\bcan(?:'t|not) (?:solve|fix)",
    r"\bwith any (?:number|amount|size|value|setting)\b|\bregardless\b",
    r"\bstill\b|\bsame (?:error|problem|issue|result|thing)|\bnone of|\bneither\b"
    r"|\bnothing (?:seem\w* to |really )?(?:help|chang|work|fix|solv)\w*",
    r"\beven (?:with|if|when|after|by|for|at|though|using|setting|reducing|lowering)\b|\bno mat+er\b|\bregardless of\b",
    r"没有?(?:用|效|作用|解决)|无效|不行|不起作用|无济于事|不能解决|解决不了|还是|仍|依然|依旧|无论|不管"
    r"|(?:也|都)(?:还)?(?:会|不|没|报|爆|是|一样|无)",
)
_TRIED = words(
    r"\b(?:i|we)(?:'ve| have)?(?: also| even| then)? (?:increased|raised|doubled|upgraded|moved|switched) (?:it )?to\b"
    r"|\btried(?! to (?:run|train|load|bring|start|generat|execut|enlarg|increas|infer|test|launch|fine"
    r"|debug|find|see|understand|reproduce|figure))\b"
    r"|\btry(?:ing)? (?:and|to) (?:lower|reduc|decreas)\w*"
    r"|\balready (?:set|reduced|lowered|decreased|enabled|using|used|changed|increased|raised)\b"
    r"|\b(?:except|besides|other than(?! \d)|apart from|instead of|without (?:changing|reducing|lowering|using))\b",
    r"试过|(?:调|改|减|降)[小低少]?过",
)
_GOES_ON_IN_VAIN = words(
    r"^\W{0,4}(?:but|however|yet|though|it|this|that|they|and|nothing|none|neither|still|same|no)\b",
    r"^\W{0,4}(?:但|可是?|然而|都|还|仍|也|结果|(?:调整?|改|修改|试|设置?)[了过完])",
)
_HELPED = words(
    r"\b(?:help(?:s|ed)|work(?:s|ed|ing)|solve[sd]|fixe[sd]|resolved|succe\w+|runs? (?:fine|ok|well))\b",
    r"(?:可以了|解决了|就好了?|成功)",
)
_NOT = words(r"(?:\b(?:not?|none|never|nothing|neither|cannot)\b|n't\b|不|没|未)[^.\n]{0,30}$")
# The author cannot or will not make the change.
_NOT_MADE = words(
    r"\b(?:do|did|does|have|has)(?:n'?t| not) (?:want|know|understand|chang\w*|touch\w*|modif\w*)"
    r"|\b(?:where|how) (?:to|can i) (?:type|set|put|turn|enable)"
    r"|\bwhen i (?:try to )?(?:enlarg|increas|rais)\w*",
    r"不知道|怎么(?:设置|改)",
)
# Said of a change that is out of the question: no cause is ruled out by that, but nobody wants to be told it.
_BARRED = words(
    r"\b(?:is|are|was|it'?s) (?:not an|no) option\b|\bout of the question\b"
    r"|\b(?:solutions?|options?|ways?|it|this|that|these|those)(?: \w+)? (?:(?:is|are)(?: not|n't)|not) (?:\w+ )?"
    r"(?:suitable|acceptable|feasible|desirable|possible|viable|what i want)\b"
    r"|\b(?:can(?:'?t|not| not)|could(?:n'?t| not)|unable to|(?:do(?:n'?t| not)|not) want to|without having to)"
    r" (?:\w+ ){0,2}(?:reduc|decreas|lower|cut|split|downscal|resiz|shrink|chang|crop|shorten)\w*",
    r"(?:不能|不想|无法|没法)[^\n，。]{0,4}[减降调改缩]",
)
_PROPOSED = re.compile(rf"(?:try setting \S{{1,60}} )?{TIP}")
_END = re.compile(r"(?:[!?;]|\.(?![\w/]))[\s\"')]{0,4}|[。！？；\n]{1,4}")


def tried_in(text: str) -> dict[str, str]:
    """The changes that a cleaned text's author has made in vain, as keys and the sentence that says each."""
    if len(text) > 2 * _LONGEST_READ:
        text = f"{text[:_LONGEST_READ]}\n{text[-_LONGEST_READ:]}"
    sentences = (one for one in _END.split(_PROPOSED.sub("", text)) if one.strip())
    # a message in the middle of a sentence makes it long
    parts = [one[at : at + _LONGEST_SENTENCE] for one in sentences for at in range(0, len(one), _LONGEST_SENTENCE)]
    return dict(_tried(parts))


def barred_in(text: str) -> dict[str, str]:
    """The changes that an author rules out, as keys (``barred_size`` of ``tried_size``) and the sentence that does."""
    found: dict[str, str] = {}
    for one in _END.split(text[:_LONGEST_READ]):
        if _BARRED.search(one):
            keys = (key for key, pattern in _CHANGES.items() if pattern.search(one))
            found |= {key.replace("tried_", "barred_"): one.strip()[:_LONGEST_SENTENCE] for key in keys}
    return found


def switches_in(text: str) -> dict[str, str]:
    """The switches that a cleaned text names, not as absent, as keys (``known_tiles`` of ``tried_tiles``) and where."""
    found: dict[str, str] = {}
    for one in _END.split(_PROPOSED.sub("", text[:_LONGEST_READ])):
        keys = [key for key in _SWITCHES if _CHANGES[key].search(one)]
        if keys and not _ABSENT.search(one):
            found |= {key.replace("tried_", "known_"): one.strip()[:_LONGEST_SENTENCE] for key in keys}
    return found


def _tried(sentences: list[str]) -> Iterator[tuple[str, str]]:
    for one, following in zip(sentences, [*sentences[1:], ""], strict=False):
        helped = _HELPED.search(one)
        if (helped and not _NOT.search(one[: helped.start()])) or _NOT_MADE.search(one):
            continue
        goes_on = _GOES_ON_IN_VAIN.match(following) and _IN_VAIN.search(following)
        if _IN_VAIN.search(one) or _TRIED.search(one) or goes_on:
            is_less = bool(_LESS.search(one))
            found = (key for key, pattern in _CHANGES.items() if pattern.search(one))
            yield from ((key, one.strip()) for key in found if is_less or key not in _OF_SIZES)
