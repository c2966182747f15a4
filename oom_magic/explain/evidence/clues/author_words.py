"""What a text's author says about the failure in prose, in English or Chinese, as keys.

``text_rules`` and ``situation_rules`` weigh each key.
"""

from __future__ import annotations

import re

from oom_magic.explain.messages.told import KILLED


def _words(*patterns: str) -> re.Pattern[str]:
    # With ASCII rules a word ends where Chinese begins, without a blank: 使用了vllm后.
    return re.compile("|".join(patterns), re.I | re.A)


_MEMORY = r"(?:memory|vram|(?<!of )ram|rss|usage|consumption|footprint)"
_HOST = (
    r"(?:(?<!gpu )(?<!video )(?<!gb of )(?<!gb )(?<!g of )(?<!gigs of )\bram\b|\brss\b|(?:host|system|cpu|main"
    r"|physical|computer|pc|server)(?:'s)?(?:[- ]\w+)?[- ](?:memory|ram)"
    r"|computer'?s memory)"
)
_RISES = (
    r"(?:increas|grow|climb|accumulat|leak|creep)\w*|\brising|\bris(?:e|es|en)\b|grew|(?:goes|going|go|went|build\w*"
    r"|pil\w+) up\b"
)
# Between two words of one statement that is not negated.
_NEAR = r"(?:(?!\bnot?\b|n't|\bnever\b)[^.\n])"
_NO_GPU = r"(?:(?!\bnot?\b|n't|\bgpu\b|cuda|vram)[^.\n])"
_SPENT = (
    r"(?:exceed\w*|surpass\w*|explod\w*|exhaust\w*|\bfull\b|fill\w*|used? up|max\w* out"
    r"|fully (?:used|utili[sz]ed)|saturat\w*|stays? (?:loaded|occupied)|insufficient|oom\b|ran out|runn?s? out"
    r"|running out)"
)
_WHEN = r"(?:when|while|during|at|after|before|upon|on|in|once)\s(?:i\s|it\s|we\s|the\s|trying to\s|try to\s)?"
_MODEL = r"(?:\w+\s){0,2}(?:models?|weights|checkpoints?|pipeline|llm|unet|network)\b"
_GPU_MEMORY = r"(?:gpu|cuda|video|card'?s?|device|graphics)[- ]?(?:memory|ram)|memory|vram|gpus?"
_STAYS = (
    r"(?:still|remain\w*|stay\w*|keeps?|already|believed?)\s(?:\w+\s){0,3}(?:occup\w*|allocated"
    r"|us(?:e|ed|ing)|held|hold\w*"
    r"|full|taken|running|there|reserved)|orphan\w*|(?:not|never|n't) (?:\w+ )?(?:released|freed|cleaned|cleared)"
    r"|(?:seems? to )?(?:still )?ha(?:ve|s) (?:almost |about |around )?\d{1,6} ?[gm]i?b (?:allocated"
    r"|used|occupied|in use)"
)
_GONE = (
    r"(?:crash\w*|kill\w*|ctrl\W{0,3}c|interrupt\w*|abort\w*|exit(?:s|ed|ing)?|terminat\w*|stopp\w*"
    r"|clos(?:ed|ing)|ended"
    r"|finish\w*|quit|previous (?:run|job|process|script|training)|earlier (?:run|job)|old process"
    r"|stop(?:ped)? the process|(?:program|process|script|training|job) ends)"
)
_LESS = r"reduc\w*|decreas\w*|lower\w*|small(?:er)?|halv\w*|shrink\w*|shrunk|minimum|down to|chang\w*"
_IN_VAIN = (
    r"(?:is |was |are )?(?:useless|pointless|in vain|to no avail)|no (?:use|avail|luck|effect|help"
    r"|difference)|still (?:\w+ )?"
    r"(?:happen\w*|fail\w*|get\w*|occur\w*|oom\w*|crash\w*|run\w* out|the same|not|give\w*|have|face\w*|see)"
    r"|(?:same|identical) (?:error|problem|issue|result)|nothing (?:helps|changes|works)"
)
_NOTHING_RUNS = (
    r"no (?:other |running )?(?:process\w*|programs?|jobs?)(?: \w+){0,2} (?:running|found|using|shown|listed|seem)"
    r"|no running process\w*|nothing (?:else )?(?:is |was )?running|(?:not|n't) (?:run|running|have) (?:any|anything)"
    r"|without (?:any(?:thing)?|a) (?:process |program )?running|(?:not|n't) show (?:any|the) (?:process|pid)"
)

TOLD: dict[str, re.Pattern[str]] = {
    "grows": _words(
        rf"\b{_MEMORY}\b{_NEAR}{{0,60}}?\b(?:{_RISES})(?![^.\n]{{0,16}}\b(?:batch|resolution|length|limit|fraction)\b)",
        rf"(?:increas|grow|accumulat|climb|leak|ris)ing\b[^.\n]{{0,30}}\b(?:gpu[- ]?)?{_MEMORY}\b"
        r"(?! ?(?:limit|fraction|size|request))",
        r"\b(?:memory|gpu|vram|ram)[- ]?leak", r"leak\w* (?:of |in |on )?(?:the )?(?:gpu|cuda|vram)\b",
        r"leak(?:s|ing)? (?:of )?(?:gpu )?memory", r"accumulates? memory", r"keep increasing until",
        r"always growing",
        r"\bthe (?:more|longer)\b[^.\n]{0,60}\bthe (?:larger|more|higher|bigger)\b[^.\n]{0,16}\bmemory",
        r"(?:显存|内存)(?:占用)?(?:会|在)?(?:一直|不断|持续|逐渐|越来越|慢慢|逐步)(?:地|的|在)?(?:增加|增长|上升|升高|涨|变大|多|增大)",
        r"(?:显存|内存)泄[漏露]",
    ),
    "rises_once": _words(
        rf"\b{_MEMORY}\b[^\n]{{0,40}}?\b(?:{_RISES}|more)\b[^.\n]{{0,30}}\b(?:after|from|in|at|since) (?:the )?"
        r"(?:first|1st|second|2nd|one) (?:iteration|step|batch|iter|update)\b",
        r"\b(?:first|1st) (?:iteration|step|batch) (?:\w+ ){0,3}\d[^\n]{0,60}"
        r"\b(?:second|2nd|other|later|next|following)\b[^.\n]{0,40}\d",
    ),
    "rises_to_a_level": _words(
        rf"\b{_MEMORY}\b[^\n]{{0,60}}?\b(?:increas\w*|rises?|grows?|goes up|up)\b (?:\w+ ){{0,3}}(?:up )?to "
        r"(?:about |around |~)?\d[\d.,]{0,8}\+?k? ?[mg]i?b?\b[^.\n]{0,40}\b(?:at|after|around|then|and stays?)\b",
    ),
    "evaluates": _words(
        r"(?:during|in|at|while|when|on|after|only)\s(?:the\s|in\s|at\s|during\s)?(?:evaluat\w+|validat\w+|testing|eval"
        r"|test)\b",
        r"evaluation (?:step|loop|phase)", r"(?:进入|到|在)\s?(?:eval|验证|评估)|进行(?:评估|验证)|eval(?:阶段|时)",
        r"(?:trainer|model)\.evaluate\(", r"\b(?:validate|evaluate)\w*\(?\)?`?"
        r" function", r"\beval_(?:period|steps|interval)",
        r"验证(?:阶段|时|集)|评估时|测试(?:阶段|时)",
    ),
    "training_fits": _words(
        r"训练时?显存(?:还是|是)?(?:够|足够|正常)",
        r"train\w*\s(?:\w+[ ]){0,4}(?:works?|runs?|is|was|goes|went|are|worked"
        r"|ran)\s?(?:\w+\s)?(?:totally\s)?(?:fine|ok"
        r"|okay|well|perfect\w*|normal\w*|good|smooth\w*|successful\w*|without)",
        r"can (?:\w+ )?train(?: \w+)? (?:fine|ok|normally|well|without)", r"use the train\w* code, it is ok",
        r"no (?:problem|issue|error)s? (?:during|in|while|with) train",
        r"训练(?:过程|时|阶段)?(?:没有|没)?(?:正常|没问题|可以)",
    ),
    "loads_data": _words(
        r"(?:load|read|stor|keep|kept|hold|cach)\w*\s(?:\w+\s){0,3}(?:all|every\w*|entire|whole|too many|full)\s"
        r"(?:\w+\s){0,4}?(?:in|into|to|at once)\b[^.\n]{0,16}(?:memory|ram)",
        r"too many (?:images|files|samples|pictures|records) (?:are|were|is) (?:loaded|read)",
        r"\b(?:data|data ?sets?|arrays?|corpus|csv)\b[^.\n]{0,24}(?:too (?:large|big) (?:for|to fit)"
        r"|(?:not|n't|cannot) fit)[^.\n]{0,8}(?<!gpu )\bmemory\b",
        r"\bload\w* (?:\w+ ){0,2}(?:big|large|huge|massive) data ?sets?\b",
        r"\bload\w* (?:\w+ ){0,3}(?:arrays?|data ?sets?|data|files)\b[^.\n]{0,24}\b(?:(?:in|into|to) memory"
        r"|takes? (?:up )?too much memory|before training)\b",
        r"(?:entire|whole|full|complete|all (?:of )?the) (?:training )?(?:data ?set|data|images|files|corpus|csv)\s"
        r"(?:is|are|was|were|gets?) (?:\w+\s)?(?:loaded|read|kept|held|stored)",
        r"(?:数据集?|图片|图像)[^\n]{0,8}(?:全部|一次性)[^\n]{0,8}(?:加载|读)|(?:全部|一次性)(?:加载|读入?)[^\n]{0,8}(?:数据|内存)",
    ),
    "speaks_of_ram": _words(
        r"(?<!gpu )(?<!video )(?<!gb of )(?<!gb )\bRAM\b", r"\bRAM (?:memory|usage)", r"\d{1,6} ?gb (?:of )?ram\b",
        r"\d{1,4} ?gb (?:machine|computer|laptop|server|pc|instance)\b",
        r"\b(?:machine|server|computer|laptop|workstation|cluster|node|pc)\b[^.\n]{0,24}"
        r"\b\d{2,5} ?[gt]b? (?:of )?(?:memory|mem)\b",
    ),
    "handles_files": _words(
        r"\bpickl\w*|\b(?:np|numpy|joblib|pd|pandas)\.(?:load|save|dump|read)\w*|\.(?:npy|npz|csv|tsv|h5"
        r"|hdf5|parquet|pkl)\b"
        r"|\bdata ?frames?\b|\bpandas\b",
        r"\b(?:pre-?process|unzip|extract|tokeni[sz]|convert|download)\w*\s(?:\S+\s){0,4}(?:data\w*"
        r"|files?|corpus|images)\b",
    ),
    "speaks_of_gpu": _words(
        r"\b(?:gpus?|cuda|vram|nvidia|rtx|gtx|geforce|tesla|quadro|[ahv]100|cudnn|t4|p100|device memory)\b",
        r"显[存卡]",
    ),
    "uses_much": _words(
        r"\b(?:huge|high|large|excessive|enormous|massive|too much|so much|a lot of"
        r"|lots of)\s(?:\w+\s){0,3}(?:memory|vram|ram)\b",
        r"(?:memory|vram|ram) (?:usage|consumption|footprint|use) (?:is|goes|gets) (?:\w+ )?(?:huge|high|large"
        r"|too much)",
        r"(?:\u663e\u5b58|\u5185\u5b58)(?:\u5360\u7528)?(?:\u592a|\u5f88|\u8fc7|\u975e\u5e38)(?:\u5927|\u9ad8|\u591a)",
    ),
    "detects": _words(r"(?:mask|faster|cascade)[-_ ]?r-?cnn|retinanet|detectron2?|instance segmentation"
        r"|gt_?b?boxe?s|\bmmdet(?:ection)?\b|bbox_overlaps|iou_assigner"
        r"|two_stage\.py|anchor_head|roi_heads"),
    "shards": _words(
        r"tensor[-_ ]parallel|zero[-_ ]?(?:stage[-_ ]?)?3|stage3|\bfsdp\b|device_map\W{1,4}auto"
        r"|pipeline[-_ ]parallel|\btp[-_=]",
    ),
    "speaks_of_memory": _words(r"(?<![a-z])(?:memory|vram|oom)(?![a-z])|[显内]存"),
    "converses": _words(
        r"multi-?(?:turn|round)", r"(?:conversation|chat|dialog\w*)(?:'s)? (?:history|context|goes on|continues"
        r"|gets? long|grow)",
        r"(?:several|few|many|more|\d{1,6}) (?:\w+ )?(?:turns?|rounds?|messages|dialog\w*|questions|conversations)\b",
        r"\bhistory (?:gets?|grows?|is) (?:too )?long",
        r"多轮(?:对话|交互|聊天)?|不断(?:交互|对话|提问)|随着(?:对话|交互|聊天|提问)"
        r"|历史(?:对话|记录|消息)|几轮|轮对话",
    ),
    "makes_pictures": _words(
        r"\b(?:wan|hunyuan|ltx|mochi|cogvideo|animatediff|infinitetalk|sdxl?|flux|kandinsky|pixart|sora"
        r"|svd)[-_ ]?(?:\d\.\d|video|gp)?\b"
        r"[^\n]{0,80}\b(?:generat|frames?|prompts?|video|workflow|720p|480p|t2v|i2v|image|resolution)",
        r"\b(?:text|image)[- ]?(?:to|2)[- ]?(?:video|image)\b|\b[ti]2[vi]\b|\bi2v|t2v\b", r"\bforge\b|\bworkflow\b",
        r"(?:generat|render)\w* (?:\w+ ){0,3}(?:frames|videos?|pictures?|images?)\b", r"\b(?:number of|more"
        r"|\d{1,6}) frames\b", r"positive prompts?|negative prompts?",
        r"(?:text|video|image)\s?encode\b|TextEncode|\bvae\b[^.\n]{0,12}\bdecod",
    ),
    "adam_costs": _words(
        r"\badam\w*\b[^.\n]{0,40}\b(?:oom|out of memory|more memory|double|twice|memory error|throws|runs out)",
        r"(?:oom|out of memory|memory)\b[^.\n]{0,30}\b(?:with|using|us(?:e|ing)|for) \badam",
        r"\bsgd\b[^.\n]{0,60}\b(?:works?|fine|ok|fits|runs|no (?:oom|problem))", r"(?:switch"
        r"|chang)\w* (?:\w+ ){0,4}(?:to|from) \b(?:sgd|adam\w*|adafactor)",
        r"8[- ]?bit[ -]?adam|adafactor[^.\n]{0,40}(?:work|fits|help|solv)",
    ),
    "smaller_input_no_help": _words(
        rf"\b(?:{_LESS})\b[^.\n]{{0,40}}\b(?:batch\w*|images?|resolution|crops?|inputs?|size|lengths?"
        rf"|samples)\b[^.\n]{{0,40}}"
        rf"\b(?:{_IN_VAIN})",
        r"\b(?:no matter|regardless of)[^.\n]{0,30}\bbatch[ _-]?size",
        r"(?:减小|减少|降低|调小|改小)[^\n，。]{0,16}(?:batch|批)[^\n]{0,16}(?:没用|无效|不行|不能解决|(?:还是|仍然?|依然|也)(?:会|爆|不|报|oom))",
        r"batch[ _-]?sizes?\b[^.\n]{0,40}\b(?:did not|didn'?t|does not|doesn'?t|no) (?:help|work|effect|matter|change)",
        r"(?:small(?:er)?|reduc\w+|lower\w*|decreas\w+|halv\w+|crop\w*)\s(?:\w+\s){0,3}(?:images?|pictures?"
        r"|resolution|inputs?|size|crops?|length|batch[ _-]?size)\s?"
        r"(?:\w+\s){0,3}(?:(?:doesn|didn|don|does|did|do)(?:'?t|\s?not) (?:\w+ )?(?:help|work|change|solve"
        r"|matter)|no (?:help|effect|difference|use)|makes? no)",
    ),
    "trains": _words(
        r"(?<!pre-)(?<!pre )(?<!not even )(?<!not )\btrain(?:ing|er|ed|s|_\w+)?\b(?![- ]free)"
        r"(?<!trained(?= model))(?<!trained(?= weights))(?<!trained(?= network))", r"\bfine-?tun",
        r"\btrain\w*\.(?:py|sh)", r"\bepochs?\b",
        r"\.backward\(", r"dreambooth|(?:mak|creat|train)\w*\s(?:\w+\s){0,3}loras?\b",
        r"训练|訓練|微调|学習|학습|훈련|обуч(?:а|ен)|\b(?:entrena|entra[iî]n|treina|treino|trainier)\w*",
    ),
    "host_fills": _words(
        r"\bcpu (?:oom|out of memory)\b",
        r"(?:system|machine|computer|server)(?:'s)? (?:does not|doesn't|did not|hasn't) have enough"
        r" memory",
        r"(?:machine|server|computer)(?:'s)? memory\b[^.\n]{0,20}\boverflow",
        r"(?<!video )(?<!gpu )(?<!card )\bmemory (?:fills?"
        r"|filled) up\b(?=[^.\n]{0,60}memory ?error)",
        rf"{_HOST}{_NO_GPU}{{0,60}}?\b(?:{_RISES}|{_SPENT}|decreas\w*)", rf"(?:{_SPENT}|increas\w*|grow\w*|out of"
        rf"|enough|all (?:of )?(?:the|my)?){_NO_GPU}{{0,24}}?{_HOST}",
        rf"\bhigh {_HOST} (?:usage|use|consumption|load|pressure)",
        r"\barray is too big\b",
        r"(?:system|machine|computer|server) (?:is |was )?going out of memory",
        r"\(?NOT (?:on )?GPU",
        r"\bswap\b[^.\n]{0,30}(?:full|fill|exhaust|used)|\b(?:enter\w*|into|start\w*) swap\w*",
        r"\(cpu memory\)",
        r"(?:memory|usage) (?:usage )?exceeds? \d{2,4} ?gi?b and (?:the process|it)",
        r"\d{1,6} ?gb and \d{1,6} ?gb swap",
        r"(?:主机|系统|CPU|服务器)\s?内存[^\n]{0,20}(?:增|涨|满|耗尽|不足|爆)", r"内存(?:不足|不够|爆|溢出)",
    ),
    "killed": KILLED,
    "kernel_dies": _words(
        r"\b(?:runtime|session|colab) (?:\w+ ){0,2}(?:dies?|died|dying|crash\w*|restart\w*)\b",
        r"\bkernell? (?:\w+ ){0,2}(?:dies|died|dying|dead|restart\w*|crash\w*)|kill(?:s|ed)? the kernell?\b",
        r"(?:内核|kernel)[^\n]{0,8}(?:死|崩溃|重启|挂)",
    ),
    "infers": _words(
        r"\binferenc\w*", r"\binferr?ing\b", r"\b(?:voice conversion|text[- ]to[- ]speech|synthesi[sz]ing)\b",
        r"transcri(?:b|pt)", r"\bwhisper\w*",
        r"\b(?:predict|test|demo|infer\w*|generate|sample|eval\w*|super_resolve)\w*\.(?:py|sh|ipynb)\b",
        r"run(?:ning)? (?:the |just run the )?(?:test|demo|predict\w*|inference"
        r"|sampling)", r"\bupscal", r"txt2img|img2img",
        r"generat(?:e|es|ing) (?:an? |the |\d{1,6} )?(?:\w+ )?(?:images?|pictures?|videos?|audio|text|samples?"
        r"|tokens?)",
        r"推理|生成(?:图片|图像|视频)",
    ),
    "resumes": _words(r"\bresum(?:e|es|ed|ing)\b", r"from (?:a |the |old )?checkpoint", r"恢复训练|断点续训|继续训练"),
    "saves": _words(
        rf"{_WHEN}(?:model\s|checkpoint\s|ckpt\s)?(?:sav(?:e|es|ing)|checkpointing|merg(?:e|ing)|export(?:s|ing)?"
        r"|convert(?:s|ing)?)\b",
        r"\b(?:export|merge|merging|conversion|quantization) (?:process|step|script|stage)\b",
        r"save_pretrained|\bstate_dict\(|save_checkpoint|save_model|save_ckpt|merge_and_unload",
        r"(?:oom|out of memory|memory)\w* (?:while|when|during|at|after) (?:checkpoint |model )?sav",
        r"保存(?:模型|权重|ckpt"
        r"|checkpoint|时)",
    ),
    "workers": _words(r"num_workers", r"\bdata ?loader\w* (?:\w+ )?work\w*", r"\bworkers? process\w*"),
    "merges": _words(
        r"\bmerg(?:e|es|ing|er)\b[^.\n]{0,60}\b(?:loras?|adapters?|weights?|base|models?)\b",
        r"\b(?:loras?|adapters?|weights)\b[^.\n]{0,24}\bmerg(?:e|es|ing|er)\b", r"merge_and_unload",
        r"合并[^\n]{0,12}(?:模型|权重|lora)(?! ?[后時时之])|(?:模型|权重|lora)[^\n]{0,16}合并",
    ),
    "learns": _words(
        r"\b(?:models?|tensors?|batch\w*|loss|tokens?|embed\w*|networks?|neural|attention|(?:py)?torch|oom|checkpoints?"
        r"|gradients?|layers?|weights|lora|llm|predict\w*|encod\w*|qwen|llama|mistral|gpt|bert|yolo|resnet)",
        r"模型|权重|张量|网络|推理|预测",
    ),
    "loads": _words(
        rf"{_WHEN}(?:model\s)?(?:load(?:s|ing|ed)?|initiali[sz](?:e|es|ing|ation))\s(?:of\s)?{_MODEL}",
        rf"(?:cannot|can't|unable to|fail\w* to|try\w* to|tried to|want to|able to|could not) load\s{_MODEL}",
        r"loading checkpoint shards|loading weights|loading pipeline components", r"(?:oom"
        r"|memory)\w* on load(?:ing)?\b",
        rf"loading\s{_MODEL}", r"(?:加载|载入)(?:大)?(?:模型|权重)(?:时|失败|过程|的时候|就)",
    ),
    "smaller_batch_helps": _words(
        r"(?:reduc|decreas|lower|smaller|small)\w*\s(?:the\s|my\s)?batch[ _-]?size\w*(?:(?!n't|\bnot\b|\bno\b"
        r"|even|still"
        r")[^.\n]){0,50}(?:help|work|solve|fix|disappear|resolve|ok)",
        r"batch[ _-]?size[^.\n]{0,40}(?:too (?:large|big|high)|is the (?:problem|cause))",
        r"batch[ _-]?size\s?(?:=|of )?\d{1,6}[^.\n]{0,24}\b(?:works?|runs?|fine"
        r"|ok)\b", r"\bbatch[ _-]?size\s?(?:of )?\d{1,6} it works",
        r"have to reduce the batch", r"works? (?:fine |well )?(?:with|for) (?:a )?(?:smaller )?batch[ _-]?size",
        r"(?:batch[ _-]?size|it)\s(?:\w+\s)?to \d{1,4}(?:(?!n't|not)[^.\n]){0,30}\b(?:solve|works|run it|fits"
        r"|normally)",
        r"can only fit \d{1,6} (?:examples|samples|images)", r"max(?:imum)? batch[ _-]?size[^.\n]{0,30}\d",
        r"batch[ _-]?size?[^\n]{0,40}(?:太大|过大)", r"(?:please )?decrease the batch size of your model",
        r"减[小少](?:了)?\s?batch[ _-]?size?.{0,16}(?:可以|解决|就好|正常)",
    ),
    "larger_batch_fails": _words(
        r"(?:enlarg|increas|rais|extend)\w*\s(?:the\s)?(?:context|sequence|max\w*|prompt|input)[ _-]?(?:length|size"
        r"|tokens|len)?",
        r"\b(?:set|increas\w*|rais\w*|chang\w*|put)\s(?:the\s|my\s)?(?:max[_ ]tokens|batch[_ ]?size|num[_ ]workers"
        r"|frames?|length)\s?"
        r"(?:=|to|as)?\s?(?:an? )?(?:big|large|high|\d{3,})",
    ),
    "larger_input_fails": _words(
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
        r"(?:longer|larger|bigger) (?!gpus?\b|cards?\b|memory|vram|ram\b|machines?|instances?|models?"
        r"|than\b|amounts?|and\b|batch|swap|one\b)[a-z]{4,}|\b(?:longer|larger|bigger) (?:sequences?"
        r"|inputs?|images?|context|datasets?|graphs?|resolutions?|files?|prompts?|volumes?|videos?)\b",
        r"(?:as|when|after) the context grows", r"\b(?:large|huge|big|high[- ]?res\w*|long) (?:\w+ )?(?:images?|graphs?"
        r"|inputs?|pictures?|volumes?|videos?|context\w*|prompts?|sequences?|point clouds?|scenes?|resolution)\b",
        r"1920\s?[x\u00d7]\s?1080|\b4k\b|6300, 6304", r"high(?:er)? (?:resolution|quality)",
        r"(?:序列|图像|图片|上下文|文本|视频)(?:长度|分辨率)?(?:太|过|很)(?:长|大|高)",
        r"\blong(?:er)? (?:audio|wav|videos?|files?|inputs?|texts?|documents?)",
        r"(?:audio|video|file|text|image)\w*\s(?:\w+\s)?(?:longer|larger|bigger) than",
        r"长达|长音频|长视频|(?<!无法处理)长文本|高分辨率",
        r"ground[- ]truths? per im|(?:gt|ground[- ]truth)[_ ](?:b?box(?:es)?)\b|bbox_overlaps|label assign\w*"
        r"|pairwise_iou",
    ),
    "smaller_input_works": _words(
        r"(?:small(?:er)?|low(?:er)?|short(?:er)?)[- ](?:\w+ )?(?:set|subset|data\w*|images?|quality|resolution|inputs?"
        r"|sequences?|samples?|graphs?|scenes?|files?|size)\b[^\n]{0,40}\b(?:works?|fine|ok|not a problem"
        r"|no problem|good"
        r"|success\w*|runs?)",
        r"reduc\w+ (?:the )?(?:image|input|resolution|sequence|patch|crop)\b[^.\n]{0,30}(?:works?|solve|help|fix)",
        r"works? (?:fine |well )?(?:with|for|on|at|up to) (?:small|low|short)",
        r"max(?:imum)? \w+ (?:i can use|that works|without oom)",
    ),
    "full_batch": _words(
        r"full[- _]?(?:batch|graph|image|size|volume|slide)", r"(?:whole|entire) (?:graph|image|dataset|volume"
        r"|slide|scene"
        r"|sequence|point cloud)", r"single big graph", r"整(?:张)?图|全图",
    ),
    "dense_pairs": _words(
        r"to_dense\w*",
        r"pairwise[_ ]?(?:dist|sim)\w*",
        r"dist(?:ance)?_?matri\w*", r"\(\s?(?:\d{1,6},\s?)?(?P<side>\d{4,}),\s?(?P=side)\s?\)",
        r"dense (?:adj\w*|matri\w*|graph)", r"adjacency matrix", r"\bcdist\b", r"(?:distance|similarity"
        r"|affinity|gram|kernel|covariance) matrix", r"pairwise (?:dist|simil)\w*", r"\b[nN] ?[x*\u00d7] ?[nN]\b",
    ),
    "after_while": _words(
        r"after (?:a while|(?:a |some )(?:long )?time|some (?:\w+ )?(?:time|iterations?|steps?|epochs?|batches)"
        r"|(?:a few|few|several|many|a couple of|around|about|~|\d[\d,.]{0,14}[kK]?\+?) ?(?:\w+ )?(?:hours?|minutes?"
        r"|mins?|days?"
        r"|iterations?|iters?|steps?|epochs?|batches|requests?|images?|generations?|runs?|rounds?|episodes?"
        r"|files?|samples?"
        r"|frames?|videos?|messages?))",
        r"(?:can|could) run (?:some|a few|several) epochs?", r"(?:middle|midst) of (?:the )?training|half-?way"
        r"|mid-?training",
        r"训练(?:了)?(?:一段时间|几个|一会)|过一(?:会|段时间)|中途|跑着跑着",
    ),
    "at_times": _words(
        r"\b(?:sometimes|occasionally|randomly|at random|intermittent\w*|from time to time|suddenly|all of a sudden)\b",
        r"有时候?|偶尔|随机|突然",
    ),
    "repeated_use": _words(
        r"(?:second|2nd|third|subsequent|next|consecutive|another) (?:time|run|generation|inference|image|prompt"
        r"|call|request"
        r"|attempt|video|batch of)\b(?! (?:step|epoch))",
        r"switch(?:ing|ed)? (?:between )?(?:models?|checkpoints?|loras?)",
        r"(?:not|never|n't|without|refuse\w* to)\s(?:\w+\s){0,2}(?:releas\w*|free(?:d|s|ing)?\b(?! to)|unload\w*"
        r"|clear(?:ed|s|ing)\b|clear (?:the |its |up |any |gpu|v?ram|mem)|clean(?:ed|s|ing|up)?\b|let (?:it )?go)",
        r"(?:memory|vram)\s(?:\w+\s){0,2}(?:not|never)\s(?:\w+\s)?(?:released|freed|cleared|unloaded|cleaned)",
        r"\bchang(?:e|es|ing|ed) (?:of )?(?:the |my |between )?(?:loras?|models?|checkpoints?)",
        r"(?:every|each|after each|eighth|several) (?:generation|run|iteration|inference|workflow)\b(?! step)",
        r"\bmore than once\b|\brepeatedly\b|\btwice\b(?! as| (?:the )?(?:gpu )?memory)"
        r"|\b(?:multiple|several|repeated) (?:times|runs)\b"
        r"|\bre-?run(?:s|ning)?\b",
        r"\b(?:2x|double|twice) the (?:gpu )?memory\b", r"until i (?:close|restart|reopen|kill"
        r"|quit)", r"(?:have|need) to restart", r"each time i (?:run|call"
        r"|generate)",
        r"(?:显存|内存)(?:没有|不|未|没)(?:被)?释放|第二次",
    ),
    "keeps_graph": _words(
        r"(?:non|un|not)[- ]?detached", r"without (?:\w+ )?`?\.?item\b", r"loss\w*[^.\n]{0,40}\+=",
        r"should be [^.\n]{0,30}\.item\(", r"stor(?:ed|ing|es) (?:the )?gradients",
        r"\bdetach\w*\b[^.\n]{0,40}\b(?:fix|discard|free|releas)|\b(?:fix|solv)\w*[^.\n]{0,20}\bdetach",
 r"without (?:\w+ )?detach", r"(?:comput\w+|dynamic|autograd) graph",
        r"(?:loss|output)\w* ?\+= ?\w+", r"forg[eo]t\w* to (?:detach|zero)", r"(?:did not|didn't"
        r"|not) call(?:ing)? \w*zero_grad",
        r"计算图(?:没有|未)?(?:释放|保留)",
    ),
    "smaller_share_helps": _words(
        r"(?:lower|reduc|decreas|smaller)\w*\s(?:the\s)?`?(?:--)?(?:gpu[-_ ]?)?(?:memory|mem)[-_ ]?(?:ratio"
        r"|fraction|utili[sz]ation)"
        r"(?![^\n]{0,160}(?:n't|\bnot?) (?:\w+ )?(?:help|solv|fix|work|change))",
        r"preallocat\w+[^.\n]{0,40}(?:help|fix|solv|works|false)"
        r"(?![^\n]{0,120}(?:n't|\bnot?) (?:\w+ )?(?:help|solv|fix|work|change))"
        r"(?![^.]{0,80}\b(?:still|same (?:error|problem|issue))\b)",
    ),
    "collects_results": _words(
        r"(?:aggregat|accumulat|collect|concatenat|gather)\w* (?:\w+ ){0,2}(?:predictions|outputs|results"
        r"|logits) (?:on|in)"
        r" (?:the )?(?:gpu|device|memory)",
        r"(?:mov|copy|transfer|offload)(?:e|es|ing)? (?:\S+ ){0,3}\S*(?:predictions?|outputs?|results?|logits"
        r"|labels)(?: \w+)? (?:back )?to (?:the )?cpu",
        r"(?:append|collect|stor|accumulat|keep|kept|cach|concatenat|sav)\w*\s(?:\w+\s){0,4}(?:all|every|each"
        r"|whole|list|entire)\s"
        r"(?:\w+\s){0,2}(?:predict\w*|outputs?|results?|logits?|features?|embeddings?|images?|loss(?:es)?|masks"
        r"|activations|states?|histor\w+|tensors?|variables?)\b",
        r"\b(?:encod|embed)\w*\b[^.\n]{0,40}\b(?:million|billion|\d{6,}"
        r"|large (?:corpus|data ?set|collection)|corpus)\b",
        r"(?:all|every) (?:the )?(?:predictions|outputs|results|logits|features|embeddings) (?:\w+\s){0,3}(?:in"
        r"|into|on|at once)\b",
    ),
    "shares_device": _words(
        r"(?:other|another|several|two|multiple|\d{1,3} other|\d{1,2}) (?:\w+ )?(?:process|program|job"
        r"|codes?|training|experiment|user|notebook|kernel|model"
        r"|app\w*|instance|script|task|vram consumer|student|people)\w*"
        r"[^.\n]{0,60}(?:us(?:e|es|ing)|tak(?:e|es|ing)|occup|runn|host|load|hold|detect|consum)",
        r"\b\d{1,2} (?:processes|kernels)\b[^.\n]{0,30}(?:are|were)?\s?(?:using|running|on)", r"zombie process",
        r"\b(?:gunicorn|uwsgi|uvicorn|celery)\b[^.\n]{0,60}(?:workers?\b|process)",
        r"(?:ran|run|running|started) (?:\w+ )?too (?:much|many)|\b(?:run|running|ran"
        r"|start\w*) (?:another|other) (?:code|programs?"
        r"|scripts?|jobs?|process\w*|training|experiments?)|(?:processes|jobs|programs|trainings) (?:are "
        r"|is |were )?already running",
        r"(?:others?|someone|somebody) (?:is|are|was|were) using", r"(?:gpu|card|device|memory|vram) (?:is|was"
        r"|are) already"
        r" (?:in use|used|occupied|taken|full)",
        r"\b(?:infer\w*|predict\w*|test(?:s|ing)?)\b[^.\n]{0,60}\bwhile (?:the |my )?training is (?:still )?(?:going on"
        r"|running|in progress)", r"\bworks?\b[^.\n]{0,60}\b(?:gpu|card) is free\b",
        r"(?:其他|别的|另一个|多个|别人)(?:进程|程序|用户|任务|Notebook|在用)",
        r"(?:still|keeps?|kept) (?:hold|occup|us)\w* (?:the |up )?(?:gpu |video )?(?:memory|vram)", r"no such process",
        r"process (?:is )?(?:still )?(?:hold|occupy)ing", r"(?:killed|dead|defunct|ghost|orphan\w*) process",
        r"\b\d{1,3} other models\b", r"started two python processes", r"shared (?:gpu|server|cluster)\b",
        r"(?:restart|reboot)(?:ing|ed)?\b[^.\n]{0,40}(?:work|fix|solv|help|fine|ok\b)",
        r"重启[^\n]{0,12}(?:可以|好了|正常)",
    ),
    "left_over": _words(
        rf"\b(?:{_GONE})\b[^.\n]{{0,90}}\b(?:{_GPU_MEMORY})\b[^.\n]{{0,50}}\b(?:{_STAYS})",
        rf"\b(?:{_GPU_MEMORY})\b[^.\n]{{0,50}}\b(?:{_STAYS})[^.\n]{{0,90}}\b(?:{_GONE})\b",
        rf"\b(?:{_NOTHING_RUNS})\b[^\n]{{0,120}}\b(?:{_STAYS})",
        rf"\b(?:{_STAYS})[^\n]{{0,120}}\b(?:{_NOTHING_RUNS})\b",
        r"\b(?:zombies?|orphan(?:ed)?|defunct|ghost|stale|left-?over|lingering|dangling"
        r"|(?:hung|stuck)(?! (?:in|at|on|with|when|while)))\b[^.\n]{0,30}"
        r"\b(?:process\w*|jobs?|python|kernels?|memory|gpus?|contexts?|threads?)\b",
        r"fuser -v ?/dev|kill -9 (?:the |all |<?pid)", r"(?:allocated|used|occupied|taken|held) by (?:someone|somebody"
        r"|others?|another)\b",
        r"(?:memory|gpu|card|vram) (?:is |was |being )?already (?:being )?(?:in use|used|occupied|taken"
        r"|allocated|full)",
        r"(?:僵尸|残留|孤儿|后台)\S{0,4}进程|进程[^\n]{0,12}(?:残留|没有?(?:结束|退出|杀掉)|仍(?:然)?占)"
        r"|(?:停止|结束|退出|中断|杀掉|杀死|ctrl ?\+?c)[^\n]{0,16}(?:显存|gpu)[^\n]{0,8}(?:没有?释放|仍|还(?:在|被)"
        r"|占)",
    ),
    "device_idle": _words(
        r"(?:plenty|enough|sufficient|lots?) (?:of )?(?:free |available )?(?:gpu |video )?(?:memory|vram)",
        r"(?:memory|vram) is (?:available|free)", r"free gpu oom", r"although memory is available",
        r"显存(?:还有|足够|充足)|显存.{0,6}够",
    ),
    "batch_of_one": _words(
        r"\b(?:even|still|only)\b[^.\n]{0,40}batch[ _-]?size[^.\n\d]{0,12}\b1\b(?!\d)",
        r"batch[ _-]?size\s?(?:=|is|:|of|to)?\s?(?:1|one)\b(?!\d)[^.\n]{0,40}(?:\bstill\b|\bbut\b|\balready\b"
        r"|\bcannot\b"
        r"|\bfails?\b|依然|还是|仍)",
        r"\bbatch[ _-]?size is (?:1|one)\b(?!\d)",
    ),
    "many_ranks": _words(
        r"(?:four|eight|two|multi(?:ple)?|[2-9]|1[0-6])[- ]?(?:x\s?)?gpus?\b", r"multi-?gpu",
        r"DataParallel|\bDDP\b|torchrun|distributed\.launch|--nproc",
    ),
    "crowds_one_device": _words(
        r"\b(?:all|every|each|others?|additional|more|many|higher|extra|\d)\b[^.\n]{0,60}\b(?:gpu|cuda"
        r"|device)[ :#-]{0,2}0\b",
        r"\b(?:gpu|cuda|device)[ :#-]{0,2}0\b[^.\n]{0,40}\b(?:more|higher|additional|extra|all|every|each)\b",
        r"(?:\u6240\u6709|\u5168\u90e8|\u6bcf\u4e2a)[^\n]{0,16}(?:gpu|cuda|\u5361)[ :]?0\b|(?:gpu|cuda"
        r"|\u5361)[ :]?0[^\n]{0,12}(?:\u5f88\u9ad8|\u66f4\u9ad8|\u66f4\u591a|\u591a)",
    ),
    "pins": _words(
        r"pin_memory\s?=\s?True", r"\bpin_memory\b(?!\s?=\s?False)", r"pinned (?:host )?memory", r"cudaHostAlloc",
        r"cudaHostRegister",
    ),
    "offloads_to_host": _words(
        r"cpu[-_ ]offload", r"offload_(?:optimizer|param|opt)\w*", r"zero[-_ ]?(?:3|stage[-_ ]?3|infinity)",
        r"ds_z[23]_offload",
    ),
    "indexes": _words(
        r"IndexError", r"index(?: is)? out of (?:range|bounds)", r"with \d{1,6} ind(?:ex|ic)es",
        r"(?:num_labels|vocab_size|num_embeddings)[^.\n]{0,40}(?:wrong|mismatch|smaller)",
        r"Assertion [`'\"]?(?:index|t >= 0|srcIndex|input_val|-sizes|idx_dim)",
    ),
    "varies_in_length": _words(
        r"variable[- ](?:length|size)", r"(?:different|varying|irregular|dynamic|various) (?:image )?(?:length"
        r"|size|shape)s?",
        r"irregular size", r"dynamic padding|pad(?:ding)? to longest|变长|长度不一",
    ),
    "fragments": _words(r"fragment(?:s|ed|ation)\b(?! ?loss)(?![^\n]{0,12}See doc)", r"碎片"),
    "keeps_predictions": _words(
        r"compute_metrics", r"eval_accum\w*_steps", r"(?:累积|积累|保存)(?:所有)?(?:preds|logits|预测)",
        r"preprocess_logits_for_metrics",
        r"metrics?\b[^.\n]{0,40}commented out",
    ),
    "computes": _words(
        r"(?<![a-z])batch|\b(?:datasets?|images?|resolutions?|videos?|samples?|sequences?|tokens?|frames?|pixels?"
        r"|point clouds?|graphs?)\b",
        r"数据集|图片|图像|视频|批",
    ),
    "replays": _words(
        r"replay[_ ]?buffer|experience replay|rollout buffer", r"\b(?:dqn|atari|breakout)\b",
    ),
    "shuts_down": _words(
        r"(?:system|computer|machine|pc) (?:shuts? ?down|reboots?|powers? off|restarts?)",
        r"(?:系统|电脑|机器|服务器)(?:自动|突然|会|直接)?(?:关机|重启|死机)",
    ),
}  # fmt: skip
