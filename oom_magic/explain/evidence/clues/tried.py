"""What a text's author has tried in vain, by what was changed: nobody wants to be told to do it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from oom_magic.explain.evidence.clues.author_setting import words
from oom_magic.explain.evidence.clues.author_words import TIP

_LONGEST_READ = 10_000  # from each end; longer texts are logs
_LONGEST_SENTENCE = 400
_ITEM = (
    r"(?:images?|pictures?|photos?|samples?|sequences?|files?|items?|examples?|sentences?|rows?|requests?|documents?"
    r"|frames?|instances?|inputs?|prompts?|clips?|videos?|audios?|recordings?|pages?)"
)
_SMALL = r"small(?:er|est)?|tiny|tiniest|short(?:er|est)?|low(?:er|est)?|lighter|less"
# What was changed, by its key in ``needs.NEEDS``.
_CHANGES: Mapping[str, re.Pattern[str]] = {
    "tried_batch": words(
        r"batch(?:[ _-]?(?:sizes?|counts?)|es)\b|\bbatch ?="
        r"|(?:mini|micro)-?batch|smaller batch|batch(?![a-z])[^\n]{0,4}\d|\bbs\d{0,4}\b"
        rf"|\b(?:one|single) {_ITEM}s?\b(?! of| in| from)",
        r"批(?:次|大小|量|处理)",
    ),
    "tried_size": words(
        r"\b(?:shr[aiu]nk|resiz\w+|downscal\w+) (?:the |my |all )?(?:videos?|images?|pictures?|inputs?|data)\b"
        r"|\b(?:image|img|crop|patch|input|picture|frame|video|window|tile)s?[ _-]?(?:sizes?|dim\w*|resolutions?)"
        r"|\bsizes? of (?:the |my |each )?(?:images?|inputs?|pictures?|frames?|crops?)\b"
        r"|resolutions?\b|\bimgsz\b|\bcrop(?:s|ped)?\b|\b(?:fewer|number of) frames\b|\bdowns(?:ampl|iz)\w+"
        rf"|\b(?:{_SMALL})(?: [a-z]+)? (?:{_ITEM}|patch|chunk|piece|slice|region|volume|scene|graph"
        rf"|data ?set)\w{{0,2}}\b"
        r"|\b(?:resiz|shr[aiu]nk|downscal|crop|cut|split)\w* (?:them|it|these|those|everything)\b"
        r"|\bresiz\w+ to \d|\b(?:chunk|slice|segment|piece|step)s?[ _-]?sizes?\b",
        r"分辨率|(?:图片?|图像|输入|裁剪|切割)(?:的)?(?:大小|尺寸)",
    ),
    "tried_length": words(
        r"\bmax[-_ ](?:\w{1,9}[-_ ])?len\w*|\bcontext[-_ ]?(?:length|size|window)|\bnum_ctx|\bn_ctx|\bctx[-_]size"
        r"|\bsequence[-_ ]len\w*|\bcutoff_len|\bblock_size\b"
        r"|\bshorter (?:wavs?|audios?|videos?|clips?|texts?|files?|recordings?|sequences?|prompts?|contexts?|inputs?)\b"
        r"|\b(?:input|text|token|prompt|audio)[-_ ]length",
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
    "tried_layers": words(r"\blayer (?:count|number)s?\b|\b(?:number of|fewer|less) layers\b"
        r"|\bn?[-_]?gpu[-_]?layers|\bngl\b|\bnum_gpu\b"),
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
    "tried_quantized": words(r"\b[48][- ]?bits?\b|\bquant(?:s|i[sz]\w+)?\b|\bnf4\b|\bfp8\b|\bgguf\b", r"量化"),
    "tried_restart": words(r"\b(?:restart|reboot)\w*", r"重启"),
    "tried_attention": words(r"\bxformers\b|\bflash[- _]?att\w*|\bsdpa?\b|\battention slicing"),
    "tried_stream": words(r"\bmmap\w*|\bmemory[- ]mapp\w*|\blazy\b|\bstreaming\b"),
    "tried_detach": words(r"\bdetach\w*|\.item\(\)"),
    "tried_no_grad": words(r"\bno_grad\b|\binference_mode\b"),
    "tried_ram": words(r"\bswap\b|\bpag(?:e|ing) ?file", r"虚拟内存"),
    "tried_model": words(
        rf"\b(?:{_SMALL}|different|other|another|any|every|all) (?:[\w.-]+ ){{0,2}}(?:models?|networks?"
        rf"|backbones?|checkpoints?"
        r"|variants?)\b|\b(?:models?|networks?) (?:of )?(?:\w+ )?sizes?\b", r"(?:更?小|其[他它]|别的|所有)的?模型",
    ),
    "tried_shards": words(
        r"\bfsdp|\bzero[- _]?(?:stage[- _]?)?[123]\b|\bdeepspeed\b|\b(?:tensor|model|pipeline)[-_ ]parallel\w*"
        r"|\bmulti(?:ple)?[- ]?gpus?\b|\bmore (?:gpus|cards)\b",
        r"多卡",
    ),
    "tried_lora": words(r"\bq?lora\b"),
    "tried_optimizer": words(r"\badafactor\b|\b8[- ]?bit[- _]?adam|\badamw?_?8bit|\bpaged_adam"),
    "tried_growth": words(
        r"\b(?:allow|memory)_growth|\bmemory growth\b|\bpreallocat\w*|per_process_gpu_memory_fraction"
    ),
    "tried_more_ram": words(
        r"\b(?:more|add(?:ed|ing)?|upgrad\w*|bigger|larger|increas\w+|(?:1[2-9]\d|[2-9]\d\d"
        r"|\d{4}) ?gi?b(?: of)?) (?:\w+ )?(?<!gpu )ram\b"
        r"|\b(?:large|big|high)[- ]memory (?:node|machine|instance|server)", r"加了?内存",
    ),
    "tried_unload": words(r"\bunload\w*"),
    "tried_densify": words(r"densif\w*|grad_threshold"),
    "tried_limit": words(r"\b(?:max(?:imum)?|more|larger|higher|increas\w+) (?:the )?(?:memory|mem|ram)\b|--mem\b"
        r"|\bto (?:our |a |an |the )?\d[\d.,]{0,6} ?[gt]i?b\b|\b(?:entire|whole|full) node\b"),
}  # fmt: skip
# What is on or off: who names one has it, or knows of it and asks for more. Not where it is named as absent.
_SWITCHES = (
    "tried_half", "tried_checkpointing", "tried_vram", "tried_tiles", "tried_attention", "tried_stream",
    "tried_no_grad",
)  # fmt: skip
# What a sentence shows to be so already, whether or not it is said to have been tried.
_STANDING: Mapping[str, re.Pattern[str]] = {
    "tried_version": words(
        r"\b(?:on|use|using|with|have|having|running|in|from|is|am on|to|tried|same) (?:\w+ ){0,3}(?:latest|newest"
        r"|most recent|up[- ]to[- ]date|nightly|current (?:main|master|version))\b(?! (?:update|windows|driver"
        r"|commits? by))"
        r"|\b(?:latest|newest|most recent|current) (?:\w+ )?(?:versions?|releases?|commit|main|master|code|build"
        r"|nightly)\b"
        r"|\b(?:updated|upgraded) (?:everything|all|and reinstalled)\b|\breinstall(?:ed|ing)\b"
        r"|\b(?:on|from|of) (?:the )?(?:main|master)(?: branch)?\b",
        r"最新(?:的)?(?:版|代码|分支)|更新到(?:最新|今天)",
    ),
    "tried_processes": words(
        r"\b(?:kill|clos|stopp|terminat)\w* (?:\w+ ){0,4}(?:process(?:es)?|programs?|apps?|applications?"
        r"|everything|browsers?"
        r"|tabs|jobs?|notebooks?|(?<!the )kernels?)\b"
        r"|\b(?:no|without any|not any|aren't any) (?:other )?(?:\w+ )?(?:process(?:es)?|programs?|apps?"
        r"|applications?|users?)\b"
        r"[^.\n]{0,30}\b(?:us(?:es|ing)|running|on the|gpu|found|else|opened?)\b|\bno running processes found\b"
        r"|\bnothing else (?:is |was )?(?:\w+ )?(?:us|run|load|open|on)\w*"
        r"|\b(?:the )?only (?:process|program|thing|app)\b[^.\n]{0,20}\b(?:gpu|running|using|card)"
        r"|\bgpu (?:is|was) (?:not (?:being )?used|empty|unused|idle)\b|\botherwise (?:empty|idle|free|unused)\b",
        r"没有?(?:其[他它]|别的|任何)(?:进程|程序)|(?:杀|kill|关)[^\n，。]{0,10}(?:进程|程序)",
    ),
    "tried_growth": words(
        r"\ballow_growth\W{0,4}true|set_memory_growth\(|_allow_growth\W{1,3}true|preallocate\W{1,4}(?:false|0)\b"
        r"|\bset (?:the )?(?:memory|allow)[_ ]growth"
    ),
    "tried_map_location": words(r"map_location[\"']? ?[=:] ?(?:lambda|torch\.device\()?[^,\n)]{0,20}[\"']cpu"
        r"|map_location=lambda"),
    "tried_numbers": words(r"\.item\(\)|\.detach\(\)"),
}  # fmt: skip
_ASKED = words(
    r"\b(?:how (?:to|do|can)|can (?:i|we|you)|should|could|would|please|make sure|need to|have to|want|without"
    r"|wish|solutions?|(?:quick )?fix is|suggest\w*|recommend\w*|try)\b|\?",
    r"如何|怎么|吗|能否|是否|请",
    r"^[-* ]{0,4}\[ ?\]",
)
_ABSENT = words(
    r"\b(?:without|not?|never|disabl\w*|lack\w*|missing|miss|false|off|none|absence|unsupported)\b|n't\b|=\s?[\"']?0\b"
    r"|\b(?:how (?:to|do|can)|can (?:i|we|you)|is there|are there|could|would|should|need|support for|wish|hope)\b|\?",
    r"不|没|未|无|如何|怎么|吗|能否|是否",
)
# Changes that help only one way.
_OF_SIZES = ("tried_batch", "tried_samples", "tried_size", "tried_length", "tried_layers", "tried_workers")
_LESS = words(
    r"reduc\w*|\blow\w*|decreas\w*|small\w*|\btin(?:y|iest)\b|\bshort\w*|(?:single|\bone)\b(?! (?:gpu|card|node"
    r"|machine|device|of))"
    r"|downs\w+|cut\b|split\w*|halv\w*|shrink\w*|shrank|shrunk|minim\w*|down to|less|fewer|crop\w*"
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
    r"\bdespite\b|\beven (?:on|a|one|with|if|when|after|by|for|at|though|using|setting|reducing|lowering)\b"
    r"|\bno mat+er\b|\bregardless of\b",
    r"没有?(?:用|效|作用|解决)|无效|不行|不起作用|无济于事|不能解决|解决不了|还是|仍|依然|依旧|无论|不管"
    r"|(?:也|都)(?:还)?(?:会|不|没|报|爆|是|一样|无)",
)
_TRIED = words(
    r"\b(?:i|we)(?:'ve| have)?(?: also| even| then)? (?:increased|raised|doubled|upgraded|moved|switched) (?:it )?to\b"
    r"|\btried(?! to (?:run|train|load|bring|start|generat|execut|enlarg|increas|infer|test|launch|fine"
    r"|debug|find|see|understand|reproduce|figure))\b"
    r"|\btry(?:ing)? (?:and|to) (?:lower|reduc|decreas)\w*"
    r"|\balready (?:set|reduced|lowered|decreased|enabled|using|used|changed|increased|raised)\b"
    r"|\b(?:except|besides|other than(?! \d)|apart from|instead of (?:chang|reduc|lower|decreas|us)"
    r"|without (?:changing|reducing|lowering|using))\b",
    r"试过|(?:调|改|减|降)[小低少]?过",
)
_GOES_ON_IN_VAIN = words(
    r"^\W{0,4}(?:but|however|yet|though|it|this|that|they|and|nothing|none|neither|still|same|no)\b",
    r"^\W{0,4}(?:但|可是?|然而|都|还|仍|也|结果|(?:调整?|改|修改|试|设置?)[了过完])",
)
_HELPED = words(
    r"\b(?:help(?:s|ed)|work(?:s|ed|ing)|solve[sd]|fixe[sd]|resolved|succe\w+|runs? (?:fine|ok|well)|(?:is|are"
    r"|was) (?:fine|ok)|go(?:es)? away|went away|disappears?)\b",
    r"(?:可以了|解决了|就好了?|成功)",
)
_NOT = words(r"(?:\b(?:not?|none|never|nothing|neither|cannot)\b|n't\b|不|没|未)[^.\n]{0,30}$")
# The author cannot or will not make the change.
_NOT_MADE = words(
    r"\b(?:do|did|does|have|has)(?:n'?t| not) (?:want|know|understand|chang\w*|touch\w*|modif\w*)"
    r"|\b(?:where|how) (?:to|can i) (?:type|set|put|turn|enable)|\bshould (?:still|even)\b"
    r"|\bwhen i (?:try to )?(?:enlarg|increas|rais)\w*",
    r"不知道|怎么(?:设置|改)",
)
# Said of a change that is out of the question: no cause is ruled out by that, but nobody wants to be told it.
_BARRED = words(
    r"\b(?:is|are|was|it'?s) (?:not an|no) option\b|\bout of the question\b"
    r"|\b(?:solutions?|options?|ways?|it|this|that|these|those)(?: \w+)? (?:(?:is|are)(?: not|n't)|not) (?:\w+ )?"
    r"(?:suitable|acceptable|feasible|desirable|possible|viable|what i want)\b|\b(?:do(?:n'?t| not) like"
    r"|rather not|hate to)\b"
    r"|\b(?:can(?:'?t|not| not)|could(?:n'?t| not)|unable to|(?:do(?:n'?t| not)|not) want to|without having to)"
    r" (?:\w+ ){0,2}(?:reduc|decreas|lower|cut|split|downscal|resiz|shrink|chang|crop|shorten)\w*",
    r"(?:不能|不想|无法|没法)[^\n，。]{0,4}[减降调改缩]",
)
_PROPOSED = re.compile(rf"(?:try setting \S{{1,60}} )?{TIP}")
_LOG_LINE = re.compile(r"\b(?:WARNING|INFO|DEBUG) \d|\[(?:WARNING|INFO|DEBUG)\]")
_END = re.compile(r"(?:[!?;]|(?<!\bi\.e)(?<!\be\.g)\.(?![\w/]))[\s\"')]{0,4}|[。！？；\n]{1,4}")


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


def standing_in(text: str) -> dict[str, str]:
    """What a cleaned text shows to be so already, as keys and the sentence that shows each."""
    found: dict[str, str] = {}
    for one in _END.split(text[:_LONGEST_READ]):
        keys = [key for key, pattern in _STANDING.items() if key not in found and pattern.search(one)]
        if keys and not (_ASKED.search(one) or _helped(one)):
            found |= {key: one.strip()[:_LONGEST_SENTENCE] for key in keys}
    return found


def _tried(sentences: list[str]) -> Iterator[tuple[str, str]]:
    for one, following in zip(sentences, [*sentences[1:], ""], strict=False):
        if _helped(one) or _NOT_MADE.search(one) or _LOG_LINE.search(one):
            continue
        goes_on = _GOES_ON_IN_VAIN.match(following) and _IN_VAIN.search(following)
        if _IN_VAIN.search(one) or _TRIED.search(one) or goes_on:
            is_less = bool(_LESS.search(one))
            found = (key for key, pattern in _CHANGES.items() if pattern.search(one))
            yield from ((key, one.strip()) for key in found if is_less or key not in _OF_SIZES)


def _helped(sentence: str) -> bool:
    helped = _HELPED.search(sentence)
    return helped is not None and not _NOT.search(sentence[: helped.start()])
