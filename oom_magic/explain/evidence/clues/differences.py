"""What an author saw make a difference: sizes that run and sizes that do not, what helped, what it runs without.

``OBSERVED`` has them as keys, as ``author_words`` has the rest; ``contrast_in`` finds two sizes of one setting.
"""

from __future__ import annotations

import re

from oom_magic.explain.evidence.clues.author_setting import said_as, words

_LESS = (
    r"reduc\w*|decreas\w*|lower\w*|small(?:er)?|halv\w*|shrink\w*|shrunk|minimum|down to|chang\w*"
    r"|play\w* (?:around )?with"
)
_IN_VAIN = (
    r"(?:is |was |are )?(?:useless|pointless|in vain|to no avail)|no (?:use|avail|luck|effect|help"
    r"|difference)|still (?:\w+ )?"
    r"(?:happen\w*|fail\w*|get\w*|occur\w*|oom\w*|crash\w*|run\w* out|the same|not|give\w*|have|face\w*|see)"
    r"|(?:same|identical) (?:error|problem|issue|result)|(?:results?|error|problem) (?:is|was|stays?|remains?) the same"
    r"|nothing (?:helps|changes|works)|no success"
)
_OUT = r"disabl\w+|remov\w+|turn\w* (?:it )?off|switch\w* off|delet\w+|comment\w* (?:it )?out|without|skip\w*"
_RUNS = (
    r"(?:went away|goes? away|gone\b|disappear\w*|work(?:s|ed)\b|runs? (?:fine|smooth\w*|well|normal\w*|ok)"
    r"|(?:is|was|are|all) (?:\w+ )?(?:fine|fixed|ok|normal|stable)|no (?:more )?(?:error|problem|oom|issue)s?\b"
    r"|solve[sd]|fixe[sd])"
)
_FOR_A_WHILE = r"(?![^.\n]{0,80}\b(?:first epoch|until|suddenly|then|out of memory|oom)\b)"
_UNDENIED = r"(?:(?!n't|\bnot?\b|\bstill\b|\bbut\b)[^.\n])"

OBSERVED: dict[str, re.Pattern[str]] = {
    "smaller_input_no_help": said_as(
        rf"\b(?:{_LESS})\b[^.\n]{{0,40}}\b(?:batch\w*|images?|resolution|crops?|inputs?|size|lengths?"
        rf"|samples)\b[^.\n]{{0,40}}\b(?:{_IN_VAIN})",
        r"\b(?:no matter|regardless of)[^.\n]{0,30}\bbatch[ _-]?size",
        r"(?:减小|减少|降低|调小|改小)[^\n，。]{0,16}(?:batch|批)[^\n]{0,16}(?:没用|无效|不行|不能解决|(?:还是|仍然?|依然|也)(?:会|爆|不|报|oom))",
        r"batch[ _-]?sizes?\b[^.\n]{0,40}\b(?:did not|didn'?t|does not|doesn'?t|no) (?:help|work|effect|matter|change)",
        r"(?:small(?:er)?|reduc\w+|lower\w*|decreas\w+|halv\w+|crop\w*)\s(?:\w+\s){0,3}(?:images?|pictures?"
        r"|resolution|inputs?|size|crops?|length|batch[ _-]?size)\s?"
        r"(?:\w+\s){0,3}(?:(?:doesn|didn|don|does|did|do)(?:'?t|\s?not) (?:\w+ )?(?:help|work|change|solve"
        r"|matter)|no (?:help|effect|difference|use)|makes? no)",
    ),
    "smaller_batch_helps": said_as(
        r"(?:reduc|decreas|lower|smaller|small)\w*\s(?:the\s|my\s)?batch[ _-]?size\w*(?:(?!n't|\bnot\b|\bno\b"
        r"|even|still)[^.\n]){0,50}(?:help|work(?!er)|solve|fix(?! it to)|disappear|resolve|ok)",
        r"batch[ _-]?size[^.\n]{0,40}(?:too (?:large|big|high)|is the (?:problem|cause))",
        r"batch[ _-]?size\s?(?:=|of )?\d{1,6}[^.\n]{0,24}\b(?:works?|runs?|fine"
        rf"|ok)\b{_FOR_A_WHILE}", r"\bbatch[ _-]?size\s?(?:of )?\d{1,6} it works",
        r"works? (?:fine |well |ok )?(?:if|when|once|after) (?:i |we )?(?:reduc|lower|decreas)\w* (?:the |my )?batch",
        r"batch[ _-]?size (?:is |was )?(?:set |changed |reduced )?to \d{1,6}\b[^.\n]{0,40}\b(?:runs?|works?|trains?) "
        r"(?:normally|fine|ok|well)\b",
        r"have to reduce the batch", r"works? (?:fine |well )?(?:with|for) (?:a )?(?:smaller )?batch[ _-]?size",
        r"(?:batch[ _-]?size|it)\s(?:\w+\s)?to \d{1,4}(?:(?!n't|not)[^.\n]){0,30}\b(?:solve|works|run it|fits"
        r"|normally)",
        r"can only fit \d{1,6} (?:examples|samples|images)", r"max(?:imum)? batch[ _-]?size[^.\n]{0,30}\d",
        r"batch[ _-]?size?[^\n]{0,40}(?:太大|过大)",
        r"减[小少](?:了)?\s?batch[ _-]?size?.{0,16}(?:可以|解决|就好|正常)",
        r"(?:batch[ _-]?size|批(?:次|量)?(?:大小)?)[^\n，。]{0,6}[调改设减](?:小|少|到|成)[^\n。]{0,12}"
        r"(?:即可|就好|就行|就可以|解决|正常)",
    ),
    "larger_batch_fails": said_as(
        r"(?:enlarg|increas|rais|extend)\w*\s(?:the\s)?(?:context|sequence|max\w*|prompt|input)[ _-]?(?:length|size"
        r"|tokens|len)?",
        r"\b(?:batch(?:[ _-]?size)?|frames?|images?) (?:larger|bigger|greater|higher|more) than \d",
        r"\b(?:set|increas\w*|rais\w*|chang\w*|put)\s(?:the\s|my\s)?(?:max[_ ]tokens|batch[_ ]?size|num[_ ]workers"
        r"|frames?|length)\s?(?:=|to|as)?\s?(?:an? )?(?:big|large|high|\d{3,})",
    ),
    "larger_input_fails": said_as(
        r"(?:images?|inputs?|sequences?|samples?|videos?|resolution|crops?|tiles?|graphs?|data|scenes?"
        r"|point clouds?|files?"
        r"|texts?|prompts?|audios?|clouds?|dataset)\s(?:size\s)?(?:is|are|was|were|get|gets)?\s?(?:so|too|very|quite)\s"
        r"(?:big|large|long|high|huge)",
        r"(?:large|huge|high|big|too many|so many|lots? of|a lot of) (?:number of )?(?:\w+ )?(?:objects|b?boxes"
        r"|instances|targets|ground[- ]truths)\b",
        r"\b(?:very|too|extreme\w*|excessive\w*|unusual\w*|really|quite|much) (?:long|large|big|huge)(?:er)? (?:\w+ )?"
        r"(?:sentences?|sequences?|texts?|images?|videos?|audios?|files?|inputs?|documents?|batches"
        r"|samples?|scenes?|graphs?)\b",
        r"only (?:fails|crashes|happens) (?:with|for|on) (?:large|long|big)",
        r"\bfor \w+ (?:larger|bigger|longer) than \d",
        r"(?:longer|larger|bigger) (?!gpus?\b|cards?\b|memory|vram|ram\b|machines?|instances?|models?"
        r"|than\b|amounts?|and\b|batch|swap|one\b|compared\b|footprint)[a-z]{4,}"
        r"|\b(?:longer|larger|bigger) (?:sequences?|inputs?|images?|context|datasets?|graphs?|resolutions?|files?"
        r"|prompts?|volumes?|videos?)\b",
        r"(?:as|when|after) the context grows", r"\b(?:large|huge|big|high[- ]?res\w*|long) (?:\w+ )?(?:images?|graphs?"
        r"|inputs?|pictures?|volumes?|videos?|context\w*|prompts?|sequences?|point clouds?|scenes?|resolution)\b",
        r"1920\s?[x\u00d7]\s?1080|\b4k\b|6300, 6304", r"high(?:er)? resolution|higher quality",
        r"(?:序列|图像|图片|上下文|文本|视频)(?:长度|分辨率)?(?:太|过|很)(?:长|大|高)",
        r"\blong(?:er)? (?:audio|wav|videos?|files?|inputs?|texts?|documents?)",
        r"(?:audio|video|file|text|image)\w*\s(?:\w+\s)?(?:longer|larger|bigger) than",
        r"长达|长音频|长视频|(?<!无法处理)长文本|高分辨率",
        r"ground[- ]truths? per im|(?:gt|ground[- ]truth)[_ ](?:b?box(?:es)?)\b|bbox_overlaps|label assign\w*"
        r"|pairwise_iou",
    ),
    "smaller_model_works": said_as(
        r"\b\d{1,3}b\b (?:\w+ ){0,3}(?:can be \w+ (?:success\w*|without|fine)|works?\b"
        r"|runs? (?:fine|ok|well)|is (?:fine|ok))(?![^.\n]{0,24}\b(?:but (?:when|if|once)|until|unless))",
        r"\bsmaller models? (?:\w+ ){0,2}(?:works?|runs?|loads?|fits?|is fine|are fine)\b",
        r"小(?:一点的)?模型(?:就|都|则)?(?:可以|没问题|正常)",
    ),
    "fewer_layers_help": said_as(
        r"\b(?:unless|only (?:if|when|with)|not|cannot|can'?t|more than|works?|loads?|fits?|runs?)\b[^.\n]{0,24}"
        r"\b(?:n_?gpu_?layers|ngl|gpu[- ]layers|num_gpu)\b[^.\n\d]{0,12}\d{1,2}\b",
        r"\b(?:n_?gpu_?layers|ngl|gpu[- ]layers|num_gpu)\b[^.\n\d]{0,12}\d{1,2}\b[^.\n]{0,16}"
        r"\b(?:or (?:less|fewer|lower)|works?|is fine|max\w*)\b",
        r"\b(?:can|could) only (?:load|offload|put|fit) \d{1,2} (?:of \d{1,3} )?layers\b",
        r"\bignor\w+ (?:the |my )?[-`]{0,3}(?:ngl|n_?gpu_?layers|num_gpu)\b",
    ),
    "smaller_input_works": said_as(
        r"(?:small(?:er)?|low(?:er)?|short(?:er)?)[- ](?:\w+ )?(?:set|subset|data\w*|images?|quality|resolution|inputs?"
        r"|sequences?|samples?|graphs?|scenes?|files?|size)\b[^\n]{0,40}(?<!the )(?<!my )(?<!this )\b"
        r"(?:works?\b|fine|ok|not a problem|no problem|good|success\w*|runs?\b)",
        r"reduc\w+ (?:the )?(?:image|input|resolution|sequence|patch|crop)\b(?:(?!n't\b|\bnot\b|\bno\b)[^.\n]){0,30}"
        r"(?:works?|solve|help|fix)",
        r"\b(?:works?|runs?|ok|okay|fine) (?:fine |well )?(?:with|for|on|at|up to) (?:a |the )?"
        r"(?:half|quarter|small|low|short)(?! (?:v?ram|memory|gpus?|cards?)\b)",
        r"\b(?:can|could|able to|works?|runs?)\b[^.\n]{0,40}\bby (?:downgrad|downscal|reduc|lower|decreas|shrink)\w* "
        r"(?:the |my )?\w*(?:size|length|resolution|frames|duration)\b",
        r"max(?:imum)? \w+ (?:i can use|that works|without oom)",
        r"\bwith \d{1,3}k (?:\w+ )?(?:loads|works|runs|fits)\b",
    ),
    "adam_costs": said_as(
        r"\badam\w*\b[^.\n]{0,40}\b(?:oom|out of memory|more memory|double|twice|memory error|throws|runs out)",
        r"(?:oom|out of memory|memory)\b[^.\n]{0,30}\b(?:with|using|us(?:e|ing)|for) \badam",
        r"\bsgd\b[^.\n]{0,60}\b(?:works?|fine|ok|fits|runs|no (?:oom|problem))", r"(?:switch"
        r"|chang)\w* (?:\w+ ){0,4}(?:to|from) \b(?:sgd|adam\w*|adafactor)",
        r"\d ?gi?b for (?:the )?optimi[sz]er", r"(?:8[- ]?bit[ -]?adam|adafactor)[^.\n]{0,40}(?:work|fits|help|solv)",
    ),
    "smaller_share_helps": said_as(
        r"(?:lower|reduc|decreas|smaller)\w*\s(?:the\s)?`?(?:--)?(?:gpu[-_ ]?)?(?:memory|mem)[-_ ]?(?:ratio"
        r"|fraction|utili[sz]ation)(?![^\n]{0,160}(?:n't|\bnot?) (?:\w+ )?(?:help|solv|fix|work|change))",
        r"preallocat\w+[^.\n]{0,40}(?:help|fix|solv|works)"
        r"(?![^\n]{0,120}(?:n't|\bnot?) (?:\w+ )?(?:help|solv|fix|work|change))"
        r"(?![^.]{0,80}\b(?:still|same (?:error|problem|issue))\b)",
        r"\b(?:fix\w*|solv\w*|workaround|help\w*|works?)\b[^.\n]{0,60}preallocat",
    ),
    "higher_limit_helps": said_as(
        r"\b(?:higher|larger|bigger|rais\w+|increas\w+)\s(?:\w+\s){0,3}limits?\b[^.\n]{0,40}\b(?:fix\w*|solv\w*|help\w*|works?)\b",
    ),
    "unpinning_helps": said_as(
        r"\bfix(?:e[sd])?\b[^\n]{0,60}disable[-_ ]pinned",
        r"disabl\w+[-_ ]pinned[-_ ]memory\b[^\n]{0,60}\b(?:fix|solv|help|works?\b|runs?\b)",
    ),
    "full_at_any_size": said_as(
        r"\b(?:memory|vram)\b[^.\n]{0,30}\b(?:full\w*|all|occupied|used|taken)\b[^.\n]{0,30}"
        r"\b(?:no mat+er|regardless|whatever|any)\b[^.\n]{0,16}batch",
    ),
    "works_without": said_as(
        rf"\b(?:{_OUT})\b{_UNDENIED}{{0,80}}?\b{_RUNS}",
        rf"\bif (?:i|we|you) (?:do(?:n't| not)|didn't) (?:add|use|set|enable)\b{_UNDENIED}{{0,80}}?"
        r"\b(?:fine(?![- ]?tun)|ok|normal|works?)\b",
        rf"\b(?:works?|runs?)\b{_UNDENIED}{{0,30}}\b(?:without|(?:when|if|after) (?:i |we )?(?:disabl|remov|turn)\w*)\b"
        r"[^.\n]{0,60}",
        r"\booms?\b (?:in|with|when|under|using)\b(?:[^.\n]|\.(?=\w)){1,40}?\bbut"
        r" (?:success\w*|works?|runs?|is (?:fine|ok)) (?:fine |well )?(?:in|with|without|using)\b[^.\n]{0,40}",
        r"(?:去掉|关闭|关掉|不用|禁用|注释掉?)[^\n，。]{0,20}(?:就?(?:可以|正常|好了|没问题))",
    ),
    "broke_by_update": said_as(
        r"\b(?:after|since|with|following) (?:(?:the|this|that|an?|my|your|last|latest|recent|new(?:est)?) ){0,3}"
        r"(?:updat|upgrad)\w*\b(?! to (?:colab|pro\b|plus|an? |more |premium|windows|\d+ ?gb))"
        r"(?![^.\n]{0,24}\b(?:still|the same|same (?:error|issue|problem)|(?:did|does)(?:n't| not))\b)",
        r"\b(?:fine|well|worked|ran|normal\w*) (?:\w+ ){0,3}(?:before|until|prior to) (?:\w+ ){0,3}"
        r"(?:updat|upgrad)\w*",
        r"\b(?:revert|roll|rolled|downgrad)\w*\b(?:[^.\n]|\.\d){0,40}\b(?:ok|works?|worked|fine|fix\w*|solv\w*)\b",
        r"\b(?:i|we)(?:'ve| have)? (?:just |recently )?(?:updated|upgraded)\b[^\n]{0,120}\bnow\b",
        r"\b(?:latest|last|newest|recent|new) (?:updat|upgrad|releas)\w* "
        r"(?:(?:may|might|seems? to|has|have|must) ){0,2}(?:have )?(?:introduc|br(?:oke|ought)|caus)\w*",
        r"\bonly (?:things? )?(?:that )?(?:i|we)(?:'ve| have)? (?:changed|did|done)\b[^.\n]{0,50}"
        r"\b(?:updat|upgrad)\w*",
        r"\buntil (?:this|that|the last|the latest) (?:commit|update|version|release)\b|\bworked (?:in|on|with) v?\d",
        r"\b(?:memory|oom|vram|usage) regression\b|\bregression in (?:the |gpu )?(?:\w+ )?(?:memory|vram|usage)\b",
        r"\bcompared (?:to|with) (?:[\w.]+ ){0,3}versions?\b|\bwhen (?:updat|upgrad)ing (?:it )?(?:from|to)\b",
        r"\boom\w* (?:in|with) (?:the |this )?(?:new\w*|latest) version\b|\bthen i (?:updated|upgraded)\b",
        r"\bprevious (?:commit|version|release)\b[^\n]{0,40}\b(?:not oom|n't oom|not fail|fine|works?|worked)\b",
        r"(?:更新|升级)(?:之|以)?后|回退到?[^\n，。]{0,12}(?:正常|可以|好了)",
    ),
    "flash_helps": said_as(  # what its kernel does not store was too much
        r"\b(?:oom|out of memory)\b[^.\n]{0,24}\bwithout flash[- _]?att\w*",
        r"\b(?:enabl\w+|with|using|add\w*)\W{1,3}(?:-{1,2}fa|flash[- _]?att\w*)\W[^.\n]{0,50}\b(?:runs?|works?"
        r"|fits?|fine)\b",
    ),
    "clearing_helps": said_as(
        r"\b(?:empty_cache|clear_cache|clear_session|free_all_blocks)\b[^\n]{0,80}"
        r"\b(?:stays? flat|fix\w*|solv\w*|helps|helped|went away|drops? back|constant)\b",
        r"\b(?:fixed|solved|helps|helped|resolved)\b[^.]{0,120}\b(?:empty_cache|clear_cache|free_all_blocks)\b",
    ),
    "grows_past_buffer": said_as(
        r"\bbuffer\b[^.\n]{0,60}\b(?:full|filled|capacity)\b[^\n]{0,120}\b(?:continu\w*|still|keeps?)\b",
    ),
    "before_loading": said_as(
        r"\bbefore (?:the |any )?(?:model(?:'s)? )?(?:weights|model|checkpoint)s? (?:\w+ ){0,2}(?:loaded|loading)\b"
        r"|\bbefore (?:\w+ ){1,3}(?:the )?(?:model|weight)[- ]loading\b",
    ),
    "ram_is_free": said_as(
        r"(?<!gpu )(?<!video )\b(?:ram|system memory)\b[^.\n]{0,16}\b(?:(?:is |was )?(?:not|n't)|isn't|wasn't) "
        r"(?:so |that |very )?(?:high|full|used)",
        r"\b(?:plenty|lots|enough) of (?:free )?(?:system )?ram\b|\bram (?:is|was) (?:low|fine|free)\b",
        r"\bram\W{0,3}\d[\d.]{0,6} ?/ ?\d[\d.]{0,6} ?gi?b (?:available|free)\b",
    ),
    "fills_at_import": said_as(
        r"\bimport(?:s|ing|ed)?\b[^.\n]{0,100}\b(?:gpu )?(?:memory|vram)\b[^.\n]{0,30}"
        r"\b(?:fill|tak|us|alloc|occup|full|reserv|consum)\w*",
    ),
    "ran_before": said_as(
        r"\bsame (?:code|script|settings?|parameters?|config\w*|command|batch[ _-]?size|data ?set)\b[^.\n]{0,60}"
        r"\b(?:worked|ran|was running|used to (?:work|run))\b",
        r"\bbefore,? (?:i|we|it) (?:could|was able to|used to) (?:run|train|load|generat)\w*",
        r"\b(?:worked|ran|was running) (?:\w+ ){0,3}(?:before|yesterday|last (?:week|night|month)|previously"
        r"|(?:two|few|\d) days ago|until (?:yesterday|today|now))\b(?! (?:i |we |the )?(?:updat|upgrad|chang))",
        r"(?:之前|以前|昨天|前几天)(?:[^\n，。小少]{0,12})(?:可以|正常|能跑|没问题)"
        r"|전에[^.\n]{0,12}(?:돌아갔|됐|되었|잘 되)|(?:以前|昨日)は?[^\n。]{0,12}(?:動い|でき)",
    ),
}  # fmt: skip

_SIZE = words(
    r"batch|lengths?\b|_len\w*|sizes?\b|resolution|depth|frames?\b|\btokens?|context|\bctx\b|points\b|images?\b"
    r"|\bseq\w*|\blayers?\b|배치|해상도|길이|バッチ|解像度|размер|长度|大小|分辨率|批",
)
_PARTS = re.compile(
    r"[,;!?，。；、]|\.(?=\s|$)|\s[-–—]+\s|\b(?:but|while|whereas|however|and|yet)\b|(?:但是?|而)", re.I
)
_NUMBER = re.compile(r"(?<![\w.])\d{1,6}(?![\d.]*\d)")
_OF_DATA_SETS = words(r"\bsame size\b|\b(?:small|larg|bigg)\w* data ?sets?\b")  # of which a step takes no more
_DOES_NOT_RUN = words(r"(?:n't|\bnot) (?:\w+ )?(?:work|run|fit|enough)\w*|\bunable\b|\bcannot\b|不行|不能|跑不")
_DOES_RUN = words(
    r"\bwon't\b|(?:n't|\bnot) (?:\w+ )?(?:fail|crash|oom|happen|occur|get)\w*"
    r"|\bno (?:\w+ )?(?:oom|error|problem|issue)s?\b"
    r"|\b(?:works?|worked|fine(?![- ]?tun)|runs?(?! out)|ok(?:ay)?|success\w*|normal\w*|fits?)\b",
    r"可以|正常|没问题|能跑|(?:발생되지|발생하지) 않|정상|문제 ?없|잘 돌|動[きいく]|問題な|работает|нормально",
)
_FAILS = words(
    r"\boom\b|out of memory|\bmemory error|\bfail\w*|\bcrash\w*|\berrors?\b|爆|报错|不够|오류|에러|부족|エラー|落ち"
    r"|ошибк\w*|не хват",
)
_LONGEST_READ = 10_000
_LONGEST_LINE = 600
# Where others, or the same model, run: no program that failed.
WHERE_IT_RUNS = re.compile(
    r"\b(?:do|does|did)(?:n't| not) (?:get|have|see|hit) (?:any )?(?:ooms?|out of memory|this|errors?)\b[^.\n]{0,80}"
    r"|\bunlike (?:with |in )?[^.,\n]{0,40}"
    r"|\b(?:with|in|on|using) [\w.+/ -]{2,30} (?:it |everything |that |this )?(?:works?|runs?) (?:just )?(?:fine"
    r"|ok|well|perfectly)\b",
    re.I,
)


def contrast_in(text: str) -> str:
    """The line in which a cleaned text says of one setting which size runs and which fails; empty if there is none."""
    for line in text[:_LONGEST_READ].split("\n"):
        is_of_sizes = len(line) <= _LONGEST_LINE and _SIZE.search(line) and not _OF_DATA_SETS.search(line)
        if is_of_sizes and len(_NUMBER.findall(line)) > 1:
            outcomes: dict[str, bool | None] = {}  # what is said first of a number: others may have more memory
            for part in _PARTS.split(line):
                outcomes = {number: _outcome(part) for number in _NUMBER.findall(part)} | outcomes
            if {True, False} <= {*outcomes.values()}:
                return line.strip()
    return ""


def _outcome(part: str) -> bool | None:
    """Whether a part of a sentence says that something runs; None where it says neither."""
    if _DOES_NOT_RUN.search(part):
        return False
    if _DOES_RUN.search(part):
        return True
    return False if _FAILS.search(part) else None
