"""What a text's author says of the failure, in English or Chinese, as keys; ``evidence.rules`` weighs each."""

from __future__ import annotations

import re

from oom_magic.explain.evidence.clues.author_setting import OF_THE_RUN, WHEN, in_small_letters, said_as, words
from oom_magic.explain.evidence.clues.differences import OBSERVED, contrast_in
from oom_magic.explain.evidence.clues.environment import OTHERS_ON_DEVICE
from oom_magic.explain.messages.normalization import LONGEST_QUOTE, MARKS, clause_around
from oom_magic.explain.messages.told import KILLED

_MEMORY = r"(?:memory|vram|(?<!of )ram|rss|usage|consumption|footprint)"
_HOST = (
    r"(?:(?<!gpu )(?<!video )(?<!nor )(?<!vram/)(?<!gb of )(?<!gb )(?<!g of )(?<!gigs of )(?<!graphics )(?<!graphic )"
    r"(?<!card )\bram\b(?! (?:of|on|in) (?:the |my |our )?(?:gpu|graphics|video|card)s?\b)|\brss\b"
    r"|(?:host|system|cpu|main|physical|computer|pc|server)(?:'s)?(?:[- ]\w+)?[- ](?:memory|ram)|computer'?s memory)"
)
_RISES = (
    r"(?:increas|grow|climb|accumulat|leak|creep)\w*|\brising|\bris(?:e|es|en)\b|grew|(?:goes|going|go|went|build\w*"
    r"|pil\w+) up\b"
)
_NEAR = r"(?:(?!\bnot?\b|n't|\bnever\b)[^.\n])"
_NO_GPU = r"(?:(?!\bnot?\b|n't|\bgpu\b|cuda|vram)[^.;\n])"
_SPENT = (
    r"(?:exceed\w*\b(?! 10 ?%)|surpass\w*|explod\w*|exhaust\w*|\bfull\b|fill\w*|used? up|max\w* out"
    r"|fully (?:used|utili[sz]ed)|saturat\w*|stays? (?:loaded|occupied)|insufficient|oom\b|ran out|runn?s? out"
    r"|running out|unsuffi\w+)"
)

_IN_TIME = re.compile(r" (?:with |after |in |at )?(?:every|each) (?:epoch|step|iteration|batch|request)|\w* over time")
_ASKS = re.compile(r"[^.!?\n。！]{0,200}[?？]")  # what follows ends a question

TOLD: dict[str, re.Pattern[str]] = {
    **OF_THE_RUN,
    **OBSERVED,
    **OTHERS_ON_DEVICE,
    "grows": said_as(
        rf"(?<!out of )(?<!out-of-)\b{_MEMORY}\b(?!_growth| growth (?:option|setting|to |is ))(?!_)"
        rf"{_NEAR}{{0,60}}?\b(?:{_RISES})"
        r"(?![^.\n]{0,16}\b(?:batch|resolution|length|limit|fraction|value)\b)",
        # a device that took minutes or hours to fill had room before
        r"after (?:running )?[^.,\n]{0,30}\b(?:minutes?|hours?|days?)\b[^.\n]{0,20}\b(?:memory|vram|ram) "
        r"(?:is|gets|was|becomes|runs) (?:full|exhausted|used up|out)\b",
        rf"(?:increas|grow|accumulat|climb|leak|ris)ing\b[^.\n]{{0,30}}(?<!out of )(?<!out-of-)\b(?:gpu[- ]?)?"
        rf"{_MEMORY}\b"
        r"(?! ?(?:limit|fraction|size|request|available))",
        rf"\b(?:{_RISES}) (?:\S+ ){{1,3}}(?:memory|vram|ram)(?: usage)? over time\b",
        r"\b(?:memory|gpu|vram|ram)[- ]?leak", r"leak\w* (?:of |in |on )?(?:the )?(?:gpu|cuda|vram)\b",
        r"\b(?:tak|us|consum|eat)(?:es|ing|e) more and more (?:gpu |v?ram )?(?:memory|vram|ram)\b",
        r"\d ?[mg]i?b (?:of )?(?:\w+ )?(?:memory|ram|vram)? ?(?:per|each|every|a) "
        r"(?:second|minute|hour|step|iteration|batch|epoch|request|image|frame)\b",
        r"\bwork\w* if (?:you|i|we) (?:uncomment|call|add)[^.\n]{0,24}\bgc\b",
        r"\b(?:each|every) (?:\w+ ){1,3}(?:would |will )?(?:uses?|takes?|allocates?) (?:up )?"
        r"(?:new|more|additional|extra) (?:gpu )?memory\b",
        r"leak(?:s|ing)? (?:of )?(?:gpu )?memory|accumulates? memory|keep increasing until"
        r"|\b(?:longer and longer|slower and slower)\b[^.\n]{0,80}(?:\boom\b|out of memory)"
        r"|(?:memory|vram|ram)(?: usage)? (?:\w+ ){0,2}higher and higher", r"always growing",
        r"\bthe (?:more|longer)\b[^.\n]{0,60}\bthe (?:larger|more|higher|bigger)\b[^.\n]{0,16}\bmemory",
        r"(?:显存|内存)(?:占用|使用)?[率量]?(?:会|在)?(?:一直|不断|持续|逐渐|越来越|慢慢|逐步)(?:地|的|在)?(?:增加|增长|上[升涨]|升高|涨|变大|多|增大)",
        r"(?:显存|内存)[^\n，。]{0,6}泄[漏露]|(?:显存|内存)[^\n，。]{0,6}随着?[^\n，。]{0,16}(?:增加|增长|上升|变大|增大)",
        r"(?:显存|内存)(?:间断|阶段|间歇)性?地?(?:增加|增长|上[升涨])"
        r"|每隔[^\n，。]{0,10}(?:显存|内存)[^\n，。]{0,6}(?:增加|增长|上[升涨])",
        r"(?:メモリ|vram)[^\n。]{0,16}(?:リーク|増え続け|徐々に|少しずつ|どんどん)"
        r"|(?:長く|長時間|ずっと)(?:使|動か|稼働|起動|実行)[^\n。]{0,40}(?:メモリ|vram)"
        r"|메모리[^\n]{0,8}(?:누수|계속 (?:증가|늘)|점점)",
        # full only after some epochs
        r"\b(?:gpu|memory|vram|ram)\b(?: \w+){0,3} (?:fill(?:s|ed)?(?: up)?|full) (?:\w+ )?after\b",
    ),
    "rises_once": said_as(
        rf"\b{_MEMORY}\b[^\n]{{0,40}}?\b(?:{_RISES}|more)\b[^.\n]{{0,30}}\b(?:after|from|in|at|since) (?:the )?"
        r"(?:first|1st|second|2nd|one) (?:iteration|step|batch|iter|update)\b",
        r"\b(?:first|1st) (?:iteration|step|batch) (?:\w+ ){0,3}\d[^\n]{0,60}"
        r"\b(?:second|2nd|other|later|next|following)\b[^.\n]{0,40}\d",
    ),
    "rises_to_a_level": said_as(
        rf"\b{_MEMORY}\b[^\n]{{0,60}}?\b(?:increas\w*|rises?|grows?|goes up|up)\b (?:\w+ ){{0,3}}(?:up )?to "
        r"(?:about |around |~)?\d[\d.,]{0,8}\+?k? ?[mg]i?b?\b[^.\n]{0,40}\b(?:at|after|around|then|and stays?)\b",
    ),
    "grows_with_new": said_as(
        r"\bsame (?:inputs?|images?|cases?|files?|prompts?|samples?|batch)\b[^.\n]{0,40}"
        r"(?:n't|\bnot|\bnever|\bno) (?:\w+ )?(?:increas|grow|ris|chang)\w*",
        r"(?:如果)?重复[^\n，。]{0,12}不(?:会|再)?(?:增加|增长|上升|变)",
    ),
    "training_fits": said_as(
        r"(?:训练|微调)时?显存(?:还是|是)?(?:够|足够|正常)",
        r"train\w*\s(?:\w+[ ]){0,4}(?:works?|runs?|is|was|goes|went|are|worked"
        r"|ran)\s?(?:\w+\s)?(?:totally\s)?(?:fine|ok"
        r"|okay|well|perfect\w*|normal\w*|good|smooth\w*|successful\w*|without)",
        r"can (?:\w+ )?train(?: \w+)? (?:fine|ok|normally|well|without)", r"use the train\w* code, it is ok",
        r"no (?:problem|issue|error)s? (?:during|in|while|with) train",
        r"(?:having|have|had|has|after) (?:completed|finished)\W{1,4}(?:the )?train",
        r"\bafter running train\w*\.(?:py|sh)\b",
        r"got (?:the |my )?training (?:to )?(?:run|work)",
        r"(?:during|in|while) training,? (?:\w+ ){0,4}(?:runs?|works?|is|fits) (?:\w+ )?(?:fine|ok|okay|well)\b",
        r"训练(?:过程|时|阶段)?(?:没有|没)?(?:正常|没问题|可以)",
    ),
    "uses_much": said_as(
        r"\b(?:huge|high|large|excessive|enormous|massive|too much|so much|a lot of"
        r"|lots of)\s(?:\w+\s){0,3}(?:memory|vram|ram)\b",
        r"(?:memory|vram|ram) (?:usage|consumption|footprint|use) (?:is|was|goes|gets|became) (?:\w+ )?(?:huge|high"
        r"|large|too much|(?:nearly )?(?:9\d|100) ?%)",
        r"(?:\u663e\u5b58|\u5185\u5b58)(?:\u5360\u7528)?(?:\u592a|\u5f88|\u8fc7|\u975e\u5e38)(?:\u5927|\u9ad8|\u591a)",
    ),
    "loaded": said_as(
        r"(?:left ?over|left|free|remaining|available)[^.\n]{0,16} after (?:\w+ )?(?:loading|loaded|the model)",
        r"(?:once|after) (?:the |my )?model (?:is|was|has been) (?:fully |completely )?loaded",
        r"models? (?:\w+ )?loads? (?:fine|ok|successfully|without|correctly)", r"(?:load|加载)完(?:成)?(?:了)?模型",
    ),
    "host_fills": said_as(
        r"\bcpu (?:oom|out of memory)\b|\bout[- ]of[- ](?:cpu|host|system)[- ]memory\b",
        r"\b(?:constrained|limited|low|little|insufficient)[- ](?:system|cpu|host|main)"
        r"(?:[/ ](?:system|cpu|host))?[- ](?:ram|memory)\b",
        r"(?:system|machine|computer|server)(?:'s)? (?:does not|doesn't|did not|hasn't) have enough memory",
        r"(?:machine|server|computer)(?:'s)? memory\b[^.\n]{0,20}\boverflow",
        r"(?<!video )(?<!gpu )(?<!card )\bmemory (?:fills?|filled) up\b(?=[^.\n]{0,60}memory ?error)",
        rf"{_HOST}{_NO_GPU}{{0,60}}?\b(?:{_RISES}|{_SPENT}|decreas\w*)", rf"(?:{_SPENT}|increas\w*|grow\w*|out of"
        rf"|enough|all (?:of )?(?:the|my)?){_NO_GPU}{{0,24}}?{_HOST}",
        rf"\b(?:high|large|huge|excessive|too much) (?:{_HOST} (?:usage|use|consumption|load)|amounts? of {_HOST})",
        rf"{_HOST} (?:requirements?|usage|consumption|footprint) (?:is|are) (?:\w+ ){{0,2}}(?:huge|high|large)",
        rf"{_HOST}{_NO_GPU}{{0,12}}\b(?:cost|tak|us|consum)\w* (?:too|so) (?:much|high)",
        r"\b(?:consum|tak|eat|fill)(?:s|es|ing|e)?\b[^.\n]{0,24}\b\d{2,4} ?[gt]i?b of (?:ram|swap)\b",
        r"\barray is too big\b", rf"{_HOST}{_NO_GPU}{{0,24}}\b(?:spik|balloon|sky-?rocket)\w*",
        r"(?:system|machine|computer|server) (?:is |was )?going out of memory", r"\(?NOT (?:on )?GPU",
        r"\bswap\b[^.\n]{0,30}(?:full|fill|exhaust|used)|\b(?:enter\w*|into|start\w*|requir\w*) swap\w*",
        r"\b(?:writ\w+|go(?:es|ing)?|push\w*|spill\w*) (?:in)?to (?:the )?swap\b",
        r"\(cpu memory\)",
        r"(?:memory|usage) (?:usage )?exceeds? \d{2,4} ?gi?b and (?:the process|it)",
        r"\d{1,6} ?gb and \d{1,6} ?gb swap",
        r"(?:主机|系统|CPU|服务器)\s?内存[^\n]{0,20}(?:增|涨|满|耗尽|不足|爆)",
        # in a sentence that names no card
        r"(?:\A|[。！？\n])(?:(?![显顯][存卡])[^。！？\n]){0,160}?内存(?:不足|不够|爆|溢出)",
        r"\bMem usage {1,8}Increment\b",  # memory_profiler's table
    ),
    # what does not fit on the card goes to the computer's memory, as Windows' driver and some programs do
    "spills": said_as(
        r"\b(?:vram|gpu|video memory)\b[^.\n]{0,60}\b(?:spill\w*|overflow\w*|leak\w*) (?:over )?in(?:to)? (?:the )?"
        r"(?:system|shared|normal|regular|cpu)?[ -]?(?:ram|memory)\b",
        r"\bshared gpu memory\b",
    ),
    "page_file": said_as(
        r"\b(?:fix|help|solv|larg|bigg|increas|enlarg|raise)\w*\b[^.\n]{0,40}"
        r"\b(?:page ?file|paging file|virtual memory)\b"
        r"|\b(?:page ?file|paging file)\b[^.\n]{0,40}\b(?:fix|help|solv|larger|bigger|increas|too small)\w*",
    ),
    "killed": KILLED,
    "kernel_dies": said_as(
        r"\b(?:runtime|session|colab) (?:\w+ ){0,2}(?:dies?|died|dying|crash\w*|restart\w*|abort\w*)\b",
        r"\bkernell? (?:\w+ ){0,2}(?:dies|died|dying|dead|restart\w*|crash\w*)|kill(?:s|ed)? the kernell?\b",
        r"(?:内核|kernel)[^\n]{0,8}(?:死|崩溃|重启|挂)",
    ),
    "resumes": said_as(
        r"\bresum(?:e|es|ed|ing)\b(?!\W{1,4}(?:false|none|null|0)\b)",
        r"\b(?:train|start|restart|continu|begin)\w* (?:\w+ ){0,2}from (?:a |the |an? old |old )?checkpoint",
        r"\brestart\w*[^.\n]{0,24}\b(?:stored|saved) (?:model|net\w*|state)\b",
        r"恢复训练|断点续训|继续训练",
    ),
    "saves": said_as(
        rf"{WHEN}(?:model\s|checkpoint\s|ckpt\s)?(?:sav(?:e|es|ing)|checkpointing|merg(?:e|ing)|export(?:s|ing)?"
        r"|convert(?:s|ing)?(?! (?:them|images?|data|to tf|videos?|files?)))\b",
        r"\b(?:export|merge|merging|conversion) (?:process|step|script|stage)\b",
        r"\bsave every \w+ (?:steps?|epochs?|iterations?)\b|\bcreates? (?:a |the )?checkpoint\b",
        r"(?:oom|out of memory|memory)\w* (?:while|when|during|at|after) (?:checkpoint |model )?sav",
        r"\bsav(?:e|es|ing) (?:the |my |its )?(?:model )?(?:weights?|checkpoints?|ckpt)\b[^.\n]{0,20}\b(?:oom|out of)",
        r"保存(?:模型|权重|ckpt|checkpoint|时)",
    ),
    "after_while": said_as(
        r"after (?:running |training )?(?:for )?"
        r"(?:a while|(?:a |some )(?:long )?time|some (?:\w+ )?(?:time|iterations?|steps?|epochs?|batches)"
        r"|(?:around |about |roughly |~){0,2}(?:a few|few|several|many|a couple of|\d[\d,.]{0,14}[kK]?\+?) ?(?:\w+ )?"
        r"(?:hours?|minutes?"
        r"|mins?|days?|iterations?|iters?|(?:time)?steps?|epochs?|batches|requests?|images?|generations?|runs?|rounds?|episodes?"
        r"|files?|samples?|frames?|videos?|messages?|sequences?|sentences?|texts?|documents?|pages?|clips?|songs?|experiences?))",
        r"(?:can|could) run (?:some|a few|several) epochs?"
        r"|\bat (?:a|some) (?:specific|certain|particular) (?:point|step)|(?:middle|midst) of (?:the )?training"
        r"|half-?way|mid-?training",
        r"训练(?:了)?(?:一段时间|几个|一会)|过一(?:会|段时间)|中途|跑着跑着|一段时间[之以]?后",
        r"\d ?[万千]?(?:次|步|轮|条|张|个)\w{0,6}[之以]后",
        r"\b(?:crash|fail|die|stop|break|kill)\w* (?:at|on|in|around|by) (?:\w+ ){0,2}\d{1,6}(?:st|nd|rd|th)"
        r" (?:iteration|request|run|call|image|prompt|step|batch|epoch|round|generation)",
        r"\b(?:gets|got|made it|makes it) to (?:the )?(?:iteration|step|batch|epoch) \d",
        r"\breach(?:es|ed|ing)? (?:the )?(?:\d{1,4}(?:st|nd|rd|th)? |start_?|\w+ )?epoch|\bepoch reach\w* \d{2} ?%",
    ),
    "room_at_start": said_as(
        r"(?:at (?:the )?(?:very )?(?:beginning|start|first)|in the beginning|initially|first (?:few|steps?|iter"
        r"ations?))[^.\n]{0,40}?\b(?:fine|enough|normal\w*|works?|ok|low|only \d|free|stable|constant)\b",
        r"(?:刚?开始|最初|起初)[^\n。]{0,16}(?:正常|空余|足够|够用|没问题|不高|有余)",
    ),
    "at_times": said_as(
        r"\b(?:sometimes|occasionally|randomly|at random|intermittent\w*|from time to time|suddenly|all of a sudden)\b",
        r"有时候?|偶尔|随机|突然",
    ),
    "repeated_use": said_as(
        r"(?<![\d-])(?<!\d )(?:second|2nd|third|subsequent|next|consecutive|another)"
        r" (?:time|run|generation|inference|image|prompt|call|request|attempt|video|batch of)\b(?! (?:step|epoch))",
        r"switch(?:ing|ed)? (?:between )?(?:models?|checkpoints?|loras?)",
        r"(?:not|never|n't|without|refuse\w* to)\s(?:\w+\s){0,2}(?:releas\w*|unload\w*"
        r"|(?<!enough )free(?:d|s|ing)?\b(?! to)"
        r"|clear(?:ed|s|ing)\b|clear (?:the |its |up |any |gpu|v?ram|mem)|clean(?:ed|s|ing|up)?\b|let (?:it )?go)"
        r"(?![^.\n]{0,40}\b(?:post|after)[- ](?:the |a |it )?crash)",
        r"(?:memory|vram)\s(?:\w+\s){0,2}(?:not|never)\s(?:\w+\s)?(?:released|freed|cleared|unloaded|cleaned)",
        r"(?:memory|vram) (?:(?:do|does|did|wo|will|is|was)(?:n\'?t| not)|never) "
        r"(?:get |go )?(?:clear|free|drop|down|fall)",
        r"\bchang(?:e|es|ing|ed) (?:of )?(?:the |my |between )?(?:loras?|models?|checkpoints?)",
        r"\b(?:ran|runs?|work(?:s|ed)|starts?) (?:\w+ ){0,3}(?:the |for the |only the )?(?:first|1st) time\b"
        r"|\b(?:again (?:ran|run|start\w*)|(?:ran|run|start\w*) (?:it |the \w+ |this )?again)\b",
        r"(?<!on )(?:every|each|after each|eighth|several) (?:generation|run|iteration|inference|workflow)\b(?! step)",
        r"\bno (?:memory )?clean-?up\b|\bis still allocated\b|\bstill (?:with)?in scope\b",
        r"\bmore than once\b|\brepeatedly\b|(?<!\btried )\btwice\b(?! as| (?:the )?(?:gpu |model )?(?:memory|size))"
        r"|(?<!to )\b(?:run|ran|running|call\w*|generat\w*) (?:\w+ ){0,4}(?:multiple|several) times\b|\bseveral runs\b"
        r"|\bre-?run(?:s|ning)?\b", r"\b(?:releas|free|unload)\w*(?: up)? (?:the )?(?:gpu|v-?ram|cuda|video)[ -]?"
        r"(?:memory|ram)?(?: immediately)? after\b|\b(?:oom|out of memory) after (?:a few|several) (?:gener|image)",
        r"\b(?:2x|double|twice) the (?:gpu )?memory\b", r"until i (?:close|restart|reopen|kill"
        r"|quit)", r"(?:have|need) to restart",
        r"(?:显存|内存)[^\n，。]{0,8}(?:没有?|不|未|无法)(?:会|能|被|完全)*释放|(?:显存|内存)[^\n，。]{0,6}释放不[了掉]|第二次",
    ),
    "frees_at_end": said_as(  # the action that released memory shows what held it
        r"\b(?:restart|stop|clos|shut)\w*\b[^.\n]{0,60}\b(?:kernel|notebook|container|docker|program|app|server|session)\b"
        r"[^.\n]{0,40}\b(?:clear|free|releas)\w*",
        r"\b(?:resum|restart)\w*\b[^.\n]{0,80}"
        r"\b(?:back to normal|normal again|drops?(?! (?:the|my)\b)|goes down|low again)\b",
    ),
    "keeps_graph": said_as(
        r"\b(?:non-?|un)detached", r"without (?:\w+ )?`?\.?item\b",
        r"\b(?:set\w*|with|because of|due to|using) (?:`|\*\*)?(?:retain|create)_graph",
        r"should be [^.\n]{0,30}\.item\(", r"stor(?:ed|ing|es) (?:the )?gradients",
        r"\bdetach\w*\b[^.\n]{0,40}\b(?:fix|discard|free|releas)|\b(?:fix|solv)\w*[^.\n]{0,20}\bdetach",
 r"without (?:\w+ )?detach",
        r"(?<!to )\b(?:keep|kept|hold|retain|stor|accumul|grow)\w*\b[^.\n]{0,30}(?:comput\w+|dynamic|autograd) graph"
        r"|(?:comput\w+|dynamic|autograd) graph\w*\b[^.\n]{0,40}\b(?:kept|grow|accumul|retain|not (?:freed|released))",
        r"(?:loss|output)\w* ?\+= ?\w*(?:loss|output)\w*(?![\w(.])",
        r"forg[eo]t\w* to (?:detach|zero)", r"(?:did not|didn't"
        r"|not) call(?:ing)? \w*zero_grad",
        r"计算图[^\n，。]{0,8}(?:释放|保留|[累积]积|越来越)", r"保存了?[^\n，。]{0,12}计算图",
    ),
    "lacks_no_grad": said_as(
        r"(?<!memory )\b(?:with|need|add\w*|using|without|missing|forg[eo]t\w*|should|lack\w*|wrap\w*|no|not|never)\b"
        r"[^.\n]{0,24}(?:torch\.)?(?:no_grad|inference_mode)\b(?!\(\)\s?:)",
    ),
    "predicts_all": said_as(r"prediction_loss_only ?= ?False|compute_metrics ?=|include_inputs_for_metrics ?= ?True"),
    "takes_no_share": said_as(r"preallocat\w*[\"'\]]{0,3} ?[=:] ?[\"']?(?:false|0)\b"),
    "collects_results": said_as(
        r"\bdetach\w* (?:the )?\s?(?:embeddings|outputs|predictions|features|logits)\b",
        r"(?:aggregat|accumulat|collect|concatenat|gather)\w* (?:\w+ ){0,2}(?:predictions|outputs|results"
        r"|logits) (?:on|in) (?:the )?(?:gpu|device|memory)",
        r"(?:mov|copy|transfer|offload)(?:e|es|ing)? (?:\S+ ){0,3}\S*(?:predictions?|outputs?|results?|logits"
        r"|labels)(?: \w+)? (?:back )?to (?:the )?cpu",
        r"(?:append|collect|stor|accumulat|keep|kept|cach|concatenat|sav)\w*\s(?:\w+\s){0,4}(?:all|every|each"
        r"|whole|list|entire)\s"
        r"(?:\w+\s){0,2}(?:predict\w*|outputs?|results?|logits?|features?|embeddings?|images?|loss(?:es)?|masks"
        r"|activations|states?|histor\w+|tensors?|variables?)\b",
        r"\b(?:encod|embed)\w*\b(?! (?:file|array|matrix))[^.\n]{0,40}\b(?:million|billion|\d{6,}"
        r"|large (?:corpus|data ?set|collection)|corpus)\b",
        r"\b(?:outputs?|predictions?|logits|labels|results?|features?|embeddings?)\b[^.\n]{0,30}\b(?:are|is|get|were|was)"
        r" (?:\w+ )?(?:added|appended|collected|kept|stored|saved|pushed|concatenated) (?:in|to|into|on|onto|at)"
        r" (?:an? |the )?(?:\w+ )?(?:lists?|arrays?|buffers?|dict\w*|gpu|device|memory)\b",
        r"(?:all|every) (?:the )?(?:predictions|outputs|results|logits|features|embeddings) (?:\w+\s){0,3}(?:in"
        r"|into|on|at once)\b",
    ),
    "counts_metrics": said_as(
        r"\btorchmetrics?\b|\bmetrics?\b[^.\n]{0,60}\b(?:leak|reset|accumulat)",
        r"\b(?:leak|accumulat)\w*[^.\n]{0,60}\bmetrics?\b",
    ),
    "batch_of_one": said_as(
        r"\b(?:even|still|only)\b[^.\n]{0,40}batch[ _-]?size[^.\n\d]{0,12}\b1\b(?!\d)",
        r"batch[ _-]?size\s?(?:=|is|:|of|to)?\s?(?:1|one)\b(?!\d)[^.\n]{0,40}(?:\bstill\b|\bbut\b|\balready\b"
        r"|\bcannot\b|\bfails?\b|依然|还是|仍)",
        r"\bbatch[ _-]?size is (?:1|one)\b(?!\d)",
    ),
    "indexes": said_as(
        r"IndexError", r"index(?: is)? out of (?:range|bounds)", r"with \d{1,6} ind(?:ex|ic)es",
        r"(?:num_labels|vocab_size|num_embeddings)[^.\n]{0,40}(?:wrong|mismatch|smaller)",
        r"Assertion [`'\"]?(?:index|t >= 0|srcIndex|input_val|-sizes|idx_dim)",
    ),
    "fragments": said_as(r"fragment(?:s|ed|ation)\b(?! ?loss)(?![^\n]{0,12}See doc)", r"碎片"),
    "blames_fragments": said_as(
        r"(?:due to|because of|caused by|lead\w* to) (?:\w+ ){0,2}fragmentation", r"碎片(?:导致|引起|造成)",
        r"(?<!if the )\b(?:problem|issue|cause|reason) (?:is|was|seems) (?:\w+ ){0,2}fragmentation"
        r"|\blargest contiguous\b[^.\n]{0,40}\b(?:not enough|too small)",
    ),
    "keeps_predictions": said_as(
        r"compute_metrics", r"eval_accum\w*_steps(?!\W{0,3}(?:=|:|to|is)\W{0,3}\d)",
        r"(?:累积|积累|保存)(?:所有)?(?:preds|logits|预测)",
        r"preprocess_logits_for_metrics",
        r"metrics?\b[^.\n]{0,40}commented out",
    ),
    "shuts_down": said_as(
        r"(?:system|computer|machine|pc) (?:shuts? ?down|reboots?|powers? off|restarts?)",
        r"(?:computer|machine|pc) (?:\w+ ){0,3}(?:physically|hard|completely|fully) (?:crash|reboot|freez|hang)\w*",
        r"(?:系统|电脑|机器|服务器)(?:自动|突然|会|直接)?(?:关机|重启|死机)",
    ),
}  # fmt: skip

_BLANKS = re.compile(r"[ \t]{2,8}")
TIP = r"to avoid fragmentation[^\n\u4e00-\u9fff]{0,200}"  # PyTorch's own
# One setting compared with another is no growth while a run goes on.
_COMPARED = words(
    r"\b(?:when|after|by|if|once) (?:i |we )?(?:switch|chang|enabl|increas|rais|add|set|us)"
    r"(?:e|es|ed|ing|ting)?\b(?! (?:\w+ )?(?:print|debug|log)\w*)[^.\n]*"
)
# Said by programs and messages, not by the author.
_QUOTED = words(
    TIP, r"try setting (?:max_split_size_mb|PYTORCH_\w+)[^\n]{0,120}",
    r"1\. If yes, please stop them[^\n]*", r"Please check whether there is any other process[^\n]*",
    r"2\. If no, please (?:decrease|try)[^\n]*", r"1\) Decrease the batch size of your model[^\n]*",
    r"Prediction on device was unsuccessful[^\n]*",
    r"TIPS: If the workflow worked before[^\n]*", r"backward through the graph a second time[^\n]*",
)  # fmt: skip
# Misspellings of "didn't".
_NEGATION = re.compile(r"\b(did|does|do|ca|wo|is|was|are|were|could|would|should|has|have|had)nt\b", re.I)
_TRAINS_NOW = re.compile(r"\btrain(?:ing|s|er)?\b|fine[- ]?tun|\bepochs?\b|\.backward\(|微调|训练", re.I)
_IS_LOW = re.compile(
    r"\b(?:ram|memory)\b[^.\n]{0,16}\b(?:(?:is |was )?(?:not|n't)|isn't|wasn't) (?:so |that |very )?(?:high|full|used)",
    re.I,
)
_HAN = re.compile(r"[\u4e00-\u9fff]")
_ADVICE = re.compile(  # with Chinese between the words
    r"(?:\bno-|是否有?|如果|检查(?!点)|防止|避免|whether|(?<!\bi )check|if there (?:is|are)(?: any)?"
    r"|against)[\s\w*]{0,12}$"
    r"|\b(?:prevent\w*|avoid\w*)[\s\w*]{0,22}$|\b(?:no|not|cannot|n't|without)\s(?:a |any |the |be |have )?$"
    r"|\b(?:unable to|not able to|cannot|can't|n't) (?:utili[sz]e|use)\s$",
    re.I,
)
_GUESSED = re.compile(
    r"\b(?:doubt|suspect|guess|wonder|maybe|perhaps|possibly|probably|may|might|could)\w*\b(?: \w+){0,6} ?$",
    re.I,
)
_SUPPOSED = re.compile(r"\b(?:potential|possible)\b(?: \w+){0,3} ?$")
# What would be, what is planned, and what is praised did not fail.
_NOT_SEEN = re.compile(
    r"\b(?:would|could|thank(?:s| you)|want(?:s|ed)? to|plan\w* to|hop(?:e|ing) to|(?:would|'d) like to|in order to"
    r"|in (?:the )?future|able to|support(?:s|ed)?|designed|suitable|is there (?:a|any) way|how (?:to|can|do|should))\b"
    r"(?:(?!\bbut\b|\bhowever\b|\boom\b|out of memory)[^.!?\n]){0,100}$"
    r"|\b(?:only )?if (?:i|we|you) (?:had|were|could)\b[^.!?\n]{0,60}$",
    re.I,
)
_AS_IT_SHOULD = re.compile(r"[^.\n]{0,30}\b(?:as expected|as (?:it|they) should|as usual|to (?:the|its) peak)\b", re.I)
_SAID_BY_OTHERS = re.compile(
    r"\b(?:you|they|people|others|someone|everyone)\b(?: \w+){0,2} (?:think|thought|say|said|says|suggest\w*)\b"
    r"[^.!?\n]{0,80}$", re.I,
)  # fmt: skip
_AND_GOES_ON = re.compile(  # with what was loaded
    r"(?:[^.\n]|\.\d){0,80}\band (?:then )?(?:i |we )?(?:us|run|train|predict|infer|test|generat|evaluat|continu|fine)",
    re.I,
)
# More memory that is asked for has not been used.
_WANTED = re.compile(
    r"\bhow (?:to|(?:one |i |we )?(?:can|do|could|should)(?: one| i| we)?) (?:increas|rais|enlarg)", re.I
)
_OF_WHAT_FAILED = {"larger_input_fails"}
# What is expected or was read somewhere has not been seen to help.
_OF_WHAT_HELPS = {
    "smaller_batch_helps", "smaller_input_works", "smaller_share_helps", "higher_limit_helps", "offload_helps",
    "page_file", "unpinning_helps",
}  # fmt: skip
_EXPECTED = re.compile(
    r"\b(?:might|may|should|would|could) (?:\w+ )?(?:help|solve|fix|resolve|work|be)\b"
    r"|\b(?:cannot|useless|in vain|not(?! a problem))\b|n't\b|无法|不能|没有?用|不行|还是|仍", re.I,
)  # fmt: skip
# Whose run has not shown it yet.
_THOUGHT = re.compile(
    r"\b(?:think|thought|believe|expect|assume|suppose|hope|imagine|guess|so that it|have to|in order to)\b"
    r"[^.!?\n]{0,80}$",
    re.I,
)
# What was looked for and not found, and what would only be done if it had to be.
_NOT_SO = re.compile(
    r"(?:n't|\bnot|\bnever|\bunable to)\b[^.!?\n]{0,24}\b(?:find|found|see|seen)\b"
    r"(?:(?!\b(?:why|reason|cause|what|where|how)\b)[^.!?\n]){0,60}$"
    r"|\bif (?:necessary|needed|required|possible)\b[^.!?\n]{0,40}$", re.I,
)  # fmt: skip
_READ_SOMEWHERE = re.compile(
    r"\b(?:internet|google\w*|online|stack ?overflow|forums?|read that|it seems that|people say)\b", re.I
)
FAILS = re.compile(
    r"(?<![a-z])oom(?![a-z])|memory|\bcrash|\bfail|\berror|\bkill|\bcuda\b|vram|\bram\b|显存|内存|报错|爆|溢出|失败",
    re.I,
)
_ASKED = re.compile(
    r"\s{0,2}(?:(?:so|but|or|and),? )?(?:is|are|was|were|do|does|did|could|can|may|might|should|must|have|has)"
    r" (?:it|this|that|there|i|we|you|they|any\w*|the)\b[^.!?\n]{1,120}\?"
    r"|\s{0,2}(?:is|are) there (?:any|a|some) (?:ways?|options?|possibilit|chance)", re.I,
)  # fmt: skip
_ASKED_AT_END = re.compile(r"[^\n。！.!，,]{0,10}(?:吗|么|呢)?\s?[?？]|[^\n。！.!?？，,]{0,6}吗")
_ASKED_BEFORE = re.compile(r"(?:是不是|是否|难道|请问[^\n。]{0,8}是)[^\n。！？?]{0,16}$|请问[^\n。！？?]{0,40}$")
_LONGEST_STORY = 10_000  # longer texts are logs
# Lines of code and frames: what they do is not what their author says of the run.
CODE_LINE = re.compile(
    r"^[ \t>|]{0,40}(?:(?:import|from|def|class|for|while|with|return|print|elif|except|try|else|del|raise|async"
    r"|await)\b[^\n]*[:(=)][^\n]*|[\w.\[\]'\"*{}]{1,60}(?:, ?\w{1,30}){0,4} ?[-+*/|]?= ?[^\s=][^\n]*"
    r"|[\w.]{1,60}\([^\n]*\)[,;]?[ \t]*|File \"[^\n]*"
    r"|import \w[^\n]*|[\])}]+,?[ \t]*)$",
    re.M,
)
_ONE_RANK = re.compile(r"--(?:num_gpus|nproc[-_]per[-_]node|num_processes)[= ]1\b")
_NO_PROSE = re.compile(rf"{CODE_LINE.pattern}|https?://[^\s)\]>\"']{{1,400}}", re.M)
# Statements that code makes, too.
_IN_CODE = {
    *OF_THE_RUN,
    "keeps_predictions",
    "predicts_all",
    "takes_no_share",
    "keeps_graph",
    "lacks_no_grad",
    "indexes",
    "counts_metrics",
    "smaller_share_helps",
}


def said_in(text: str) -> dict[str, str]:
    """The statements that a cleaned text makes about the run, as keys and the words that say it.

    Questions, advice and quotes are none.
    """
    if len(text) > 2 * _LONGEST_STORY:
        text = f"{text[:_LONGEST_STORY]}\n{text[-_LONGEST_STORY:]}"
    said = _NEGATION.sub(r"\1n't", _BLANKS.sub(" ", _QUOTED.sub("", text)))
    small = in_small_letters(said)
    prose = in_small_letters(_NO_PROSE.sub(lambda match: " " * len(match.group()), said))
    sources = ((key, pattern, small if key in _IN_CODE else prose) for key, pattern in TOLD.items())
    matches = {key: match for key, pattern, text in sources if (match := _told(pattern, text, key)) is not None}
    grows = matches.get("grows")
    is_leak = grows is not None and ("leak" in grows.group() or _IN_TIME.match(small, grows.end()) is not None)
    if "grows" in matches and not is_leak and _told(TOLD["grows"], _COMPARED.sub("", small)) is None:
        del matches["grows"]
    has_trained = "training_fits" in matches or not _TRAINS_NOW.search(said)
    if has_trained and _is_titled_training(said):
        has_trained = False  # another training went before it
    if _ONE_RANK.search(said):  # cards that others have are not this run's
        matches = {key: match for key, match in matches.items() if key not in ("many_ranks", "shards")}
    if "spills" in matches and _ASKS.match(said, matches["spills"].end()):
        del matches["spills"]
    if "spills" in matches:  # the card is full first
        matches.pop("host_fills", None)
    if has_trained and "infers" in matches and "evaluates" not in matches:
        matches.pop("trains", None)
    quotes = {key: clause_around(said, match.start(), match.end()) for key, match in matches.items()}
    if "works_without" in matches:  # "if I don't add it": what it is was said before
        match = matches["works_without"]
        start = max(0, match.start() - 2 * LONGEST_QUOTE)
        before = MARKS.sub(" ", said[start : match.start()]).partition(" ")[2]
        quotes["works_without"] = f"… {before}{MARKS.sub(' ', said[match.start() : match.end()])}"
    contrast = contrast_in(said)
    return quotes | ({"sizes_contrast": clause_around(contrast, 0, len(contrast))} if contrast else {})


def _is_titled_training(text: str) -> bool:
    """Whether the first line names a training, and nothing that comes after one."""
    title = in_small_letters(text.lstrip()[:LONGEST_QUOTE].split("\n", 1)[0])
    others = (TOLD[key].search(title) for key in ("infers", "evaluates", "saves"))
    return bool(_TRAINS_NOW.search(title) and not any(others))


def _told(pattern: re.Pattern[str], text: str, key: str = "") -> re.Match[str] | None:
    """The first match that is a statement, not a question or advice: "check whether others use it", "is it a leak?"."""
    for match in pattern.finditer(text):
        start = match.start()
        sentence = max(text.rfind(end, 0, start) for end in (". ", "! ", "? ", "\n")) + 1
        if _ADVICE.search(text, max(0, start - 40), start) or _ASKED.match(text, sentence):
            continue
        if _GUESSED.search(text, max(sentence, start - 48), start):
            continue
        is_no_growth = _AS_IT_SHOULD.match(text, match.end()) or _WANTED.search(match.group())
        is_no_growth = is_no_growth or _SUPPOSED.search(text, max(sentence, start - 48), start)
        if key == "grows" and (is_no_growth or "sudden" in match.group()):
            continue
        if _SAID_BY_OTHERS.search(text, sentence, start):
            continue
        if key == "loads" and _AND_GOES_ON.match(text, match.end()):
            continue
        if _NOT_SO.search(text, max(sentence, start - 120), start):
            continue
        if key == "host_fills" and _IS_LOW.search(text, start, match.end() + 24):
            continue
        is_thought = _READ_SOMEWHERE.search(text, sentence, start) or _THOUGHT.search(text, sentence, start)
        if key in _OF_WHAT_HELPS and (is_thought or _EXPECTED.search(match.group())):
            continue
        if key in _OF_WHAT_FAILED and _is_not_seen(text, sentence, start, match.end()):
            continue
        if not _is_asked_in_chinese(text, start, match.end()):
            return match
    return None


def _is_not_seen(text: str, sentence: int, start: int, end: int) -> bool:
    """Whether the words are of a wish, or of a title that names no failure."""
    if _NOT_SEEN.search(text, max(sentence, start - 120), start):
        return True
    line = text[: text.find("\n", end) if "\n" in text[end:] else len(text)].lstrip()
    return "\n" not in line and "\n" in text.strip() and len(line) <= LONGEST_QUOTE and not FAILS.search(line)


def _is_asked_in_chinese(text: str, start: int, end: int) -> bool:
    """Whether a question mark of its own, or a word that asks, ends the clause; code and English have neither."""
    if not _HAN.search(text, start, end):
        return False
    return bool(_ASKED_AT_END.match(text, end) or _ASKED_BEFORE.search(text, max(0, start - 28), start))
