"""What an author says about the run itself in prose, in English or Chinese, as keys: what is done, and with what."""

from __future__ import annotations

import re

from oom_magic.explain.messages.told import A_CARD, NVIDIA

_CAPITALS = re.compile(r"\\.|\(\?P|[A-Z]+")


def words(*patterns: str) -> re.Pattern[str]:
    """A pattern for any of these wordings; with ASCII rules a word ends where Chinese begins, without a blank."""
    return re.compile("|".join(patterns), re.I | re.A)


def said_as(*patterns: str) -> re.Pattern[str]:
    """The same for a text in small letters, in which it is found in two thirds of the time."""
    return re.compile(_CAPITALS.sub(_in_small, "|".join(patterns)), re.A)


def in_small_letters(text: str) -> str:
    """The text in small letters, each at its place."""
    small = text.lower()
    return small if len(small) == len(text) else "".join(one.lower() if one.isascii() else one for one in text)


def _in_small(match: re.Match[str]) -> str:
    found = match.group()
    return found if found[0] in "\\(" else found.lower()


WHEN = r"(?:when|while|during|at|after|before|upon|on|in|once)\s(?:i\s|it\s|we\s|the\s|trying to\s|try to\s)?"
_IS_ON = r"(?:is|was|are|were)? ?(?:already )?(?:on\b|enabled|active|used|turned on|set\b)"
_ON_WITH = r"\b(?:with|using|use|used|enabled|enabling|turned on|switched on|activated)\s(?:\w+\s){0,2}"
_HALF = r"(?:fp16|bf16|bfloat16|mixed[- ]precision|amp|half[- ]precision|autocast)\b"
_MODEL = r"(?:[\w./-]+\s){0,4}(?:models?|weights|checkpoints?|pipeline|llm|unet|network)\b"

OF_THE_RUN: dict[str, re.Pattern[str]] = {
    "evaluates": said_as(
        r"(?:during|in|at|while|when|on|after|only)\s(?:the\s|my\s|it\s|i\s|we\s|in\s|at\s|do\s|doing\s|during\s|computing\s|running\s){0,2}(?:evaluat(?:e|es|ing|ion)"
        r"|validat(?:e|es|ing|ion)|(?<!after )(?:testing|test)(?! (?:\S+ ){0,4}train)|eval)\b",
        r"evaluation (?:step|loop|phase)", r"(?:evaluation|validation) (?:fails|crashes|ooms?\b)",
        r"(?:进入|到|在)\s?(?:eval|验证|评估)|进行(?:评估|验证)|eval(?:阶段|时)",
        r"(?:trainer|model)\.evaluate\b", r"\b(?:validate|evaluate)\w*\(?\)?`?"
        r" function", r"\beval_(?:period|steps|interval)(?!\W{1,3}\d)",
        r"验证(?:阶段|时|集)|评估时|测试(?:阶段|时)",
    ),
    "names_evaluation": said_as(r"\bvalidat\w+|\beval(?:uat\w+)?\b|\btest(?:ing| set| data| phase)\b|验证|评估|测试"),
    "sees_pictures": said_as(
        r"pixel_values|multi-?modal|\bmm[-_]|\.(?:png|jpe?g)\b|\b(?:vision|images?|photos?|pictures?|videos?)\b|[-_]vl\b|llava|mllama",
    ),
    "reads_pictures": said_as(r"[-_]vl\b|\bqwen[\w.-]{0,6}vl\b|llava|mllama|internvl|minicpm-?v|multi-?modal|多模态"),
    "names_checkpoint": said_as(
        r"check-?points?\b|\bckpt|\.pth?\b|torch\.load|load_state|\bresum|cuda_deserialize|persistent_load"
        r"|检查点|断点|恢复训练|继续训练"
    ),
    "loads_checkpoint": said_as(r"\b(?:when|while|during|at|by|in|on)\s(?:\w+\s){0,2}[`'\"]?torch\.load\b"),
    "loads_by_comfyui": said_as(r"\bcomfy[/\\]\w+\.py|\b(?:checkpoint|unet)loader|load_checkpoint_guess"
        r"|\bload_models?_gpu"),
    "names_adam": said_as(r"\b\w{0,8}adam\w{0,2}\b|exp_avg"),
    "between_epochs": said_as(  # a first epoch went well, and nothing went wrong in it
        r"\bafter (?:the )?(?:first|1st|one|1) epoch\b"
        r"|\b(?:first|1st) epoch\b[^.\n]{0,24}\b(?:fine|ok|normal\w*|success\w*|finish\w*|complet\w*|without)\b"
        r"|\bsuccessfully for the first epoch|\bfrom epoch \d to \d\b"
        r"|\b(?:begin\w*|start|to|into) (?:of )?(?:the )?(?:second|2nd) epoch\b",
        r"(?:第一|首|1)个?(?:epoch|轮)[^\n，。]{0,6}(?:正常|没问题|结束|完|之?后)|第二个?(?:epoch|轮)",
    ),
    "names_vae": said_as(r"\bvae\b|\bautoencoder|\bdecod(?:e|er|ing)\b"),
    "limits_pixels": said_as(r"max_pixels\W{1,3}\d"),
    "reinforces": said_as(r"\b(?:grpo|ppo|rloo|rlhf|verl|openrlhf)(?:_?trainer|_?config)?\b"),
    "maps_devices": said_as(r"\bdevice_map\b|\bdispatch_model\("),
    "offloads_parts": said_as(r"enable_model_cpu_offload\("),
    "moves_before_offload": said_as(r"\.to\( ?['\"]cuda(?::0)?['\"] ?\)[\s\S]{0,400}?\benable_\w+_cpu_offload\("),
    "keeps_in_ram": said_as(r"\blow_?vram\W{1,4}true|--(?:low|med|no)vram\b"),
    "has_limit": said_as(  # of a container, or what shows one
        r"--memory[= ]\W{0,2}\d|(?<![\w-])-m[= ]\d+[gmk]?b?\b|\bmem(?:ory)?[-_ ]?limit\w*|\blimits:\s|cgroup"
        r"|oom-?killed|\b137\b|\blimited to \d|限制",
    ),
    "in_pod": said_as(r"\bpods?\b|kubernetes|\bk[38]s\b|kubelet|oomkilled"),
    "in_container": said_as(
        r"docker|container|memory cgroup|\bpods?\b|kubernetes|\bk[38]s\b|shm[-_]size|singularity|apptainer|podman"
        r"|\bexecutor failed running\b",
    ),
    "calls_in_python": said_as(
        r"\b(?:LLM|Llama|LlamaCpp|(?:Async)?EngineArgs|sgl\.Engine)\(|llama[-_]cpp[-_]python"
        r"|\bfrom (?:vllm|llama_cpp|sglang)\b"
    ),
    "calls_by_command": said_as(  # programs of program_settings.py
        r"\bvllm (?:serve|bench)\b|\bvllm\.entrypoints|\bsglang (?:serve|bench)|\blaunch_server\b"
        r"|text-generation-launcher|\bllama-?(?:server|cli|bench|run|perplexity)\b|(?<![\w/-])\./?(?:main|server)\b"
        r"|(?<!\w)-{1,2}n?gpu-layers\b|(?<!\w)-ngl\b|--(?:gpu-memory-utilization|max-model-len|mem-fraction-static"
        r"|max-batch-prefill-tokens|tensor-parallel-size|tp)\b",
    ),
    "uses_transformers": said_as(r"\btransformers\b|from_pretrained|\bAutoModel|hugging ?face|\bpeft\b|\btrl\b"),
    "trains_by_settings": said_as(  # a loop that is not the author's
        r"\b(?:ludwig|torchtune|axolotl|llama[-_]?factory|kohya\w*|ms-swift|lit-?gpt|nemo|fairseq|espnet\w*|mmdet\w*|mmseg\w*"
        r"|detectron2?|ultralytics|yolo\w*|openrlhf|verl|xtuner|fastchat|onmt|opennmt|rasa|unsloth)\b",
        r"(?m:^)(?:model_name_or_path|base_model|finetuning_type): ?\S|--finetuning_type\b|\bsd-scripts\b",
        r"\bcfg\.(?:SOLVER|MODEL|DATALOADER)\b",
        r"--(?:conf|config|cfg)[\w-]*[= ]\S+\.(?:ya?ml|json|toml|py)\b|\btrain\w*\.ya?ml\b",
    ),
    # Training that generates with a server of its own, as reinforcement learning does.
    "generates_beside": said_as(
        r"max_completion_length(?:(?!use_vllm)[\s\S]){0,400}gpu_memory_utilization",
        r"use_vllm\W{1,4}true|(?:vllm_|rollout\.)gpu_memory_utilization|\bvllm_mode\b"
        r"|trl[/\\]trainer[/\\][^\n]*\n[^\n]*\bllm ?= ?llm\("
        r"|\b(?:grpo|ppo|rloo|rlhf)\b[^.\n]{0,60}\bvllm\b"),
    "of_latents": said_as(
        r"stable[- _]?diffusion|\bunet\b|\bvae\b|dreambooth|controlnet|\bsdxl\b|\bflux[-_. ]?[12d]|\bcogvideo"
        r"|\bltx[-_ ]?v|\bwan[-_ ]?2\.|\bhunyuan(?:[-_ ]?video)?\b(?![-_ ]?a\d)|\bmusubi\b|diffusion-pipe"
        r"|\bsd-scripts\b",
    ),
    "in_another_language": said_as(
        r"\bdarknet\b|\b(?:chang|edit|modif|compil)\w* (?:the )?[\w/.-]{1,40}\.c(?:pp)?\b",
        r"luajit|\.lua\b|luarocks|`lua\b|\bcutorch\b|\btorch7\b"
        r"|\brequire ?['\"]c?u?nn?['\"]|\.java:\d|\bgoroutine\b|\.rs:\d|\btch::|libtorch|torch::",
        r"\bcuarrays?\b|\bcudadrv\b|\bcudart\.jl|\bcuda\.jl|\.jl:\d",
        r"torchsharp|diffsharp|\bfsharp\b|\bcsharp\b|\b[cf]#|\bnuget\b|system\.runtime\.interopservices",
    ),
    "reads_in_parts": said_as(r"\bdd\.read_|\bdask\.dataframe\b|\bchunksize ?=|\bstreaming ?= ?true\b"),
    "uses_mlx": said_as(r"\bmlx\b|\bmx\.(?:array|eval|random)\b"),
    "has_own_page": said_as(r"lm[- ]?studio|kobold|oobabooga|text-generation-webui|gpt4all|localai"),
    "in_notebook": said_as(r"jupyter|notebook|i?pykernel|ipython|\bcolab\b|\bkaggle\b"),
    # One graph that goes through whole; many small ones are batches like any other.
    "one_graph": said_as(
        r"\b(?:big|large|huge|whole|full|entire|single|giant) graph\b|\bthe graph which\b"
        r"|\d (?:nodes|vertices|points)\b[^.\n]{0,24}\d (?:\w+ )?edges\b|\bnum_edges\b|\bedge_index=\[",
    ),
    "of_no_tokens": said_as(
        r"\b(?:gnn|gcn|gat|dgl|ogb)s?\b|geometric|edge_index|\b(?:nodes|points)\b[^.\n]{0,24}\bedges\b"
        r"|point ?clouds?|splat|\bnerfs?\b|gaussians|\b(?:yolo|resnet|u-?net|r-?cnn|mmdet|detectron)\w*",
    ),
    "names_float32": said_as(r"\bfp32\b|float32"),
    "loads_data": said_as(
        r"(?<!off)(?:load|read|stor|keep|kept|hold|cach)\w*\s(?!(?:\w+\s){0,3}(?:shards|weights|models?)\b)"
        r"(?:\w+\s){0,3}(?:all|every\w*|entire|whole|too many|full)\s"
        r"(?:\w+\s){0,4}?(?:in|into|to|at once)\b[^.\n]{0,16}(?:memory|ram)",
        r"\bloading (?:of )?(?:the |my )?(?:entire |whole |full )?(?:data ?sets?|database|data)\b[^.\n]{0,24}"
        r"\b(?:consum|tak|us|need|requir)(?:es|e|ing)\b",
        r"\bcache(?!_path|_dir)\w*\b[^.\n]{0,24}\b(?:data ?set|train_?data|training data|validation_?data|images)\b",
        r"too many (?:images|files|samples|pictures|records) (?:are|were|is) (?:loaded|read)",
        r"\b(?:data|data ?sets?|arrays?|corpus|csv)\b[^.\n]{0,24}(?:too (?:large|big) (?:for|to fit)"
        r"|(?:not|n't|cannot) fit)[^.\n]{0,8}(?<!gpu )\bmemory\b",
        r"\bload\w* (?:\w+ ){0,2}(?:big|large|huge|massive) data ?sets?\b|加载数据[^\n，。]{0,12}(?:kill|杀|内存)",
        r"(?:enough|cannot|can't|unable|impossible) (?:memory )?(?:to )?(?:load|hold|store|read) (?:all|the (?:w"
        r"hole|entire|full))\b",
        r"\bload\w* (?:\w+ ){0,3}(?:arrays?|data ?sets?|data|files)\b[^.\n]{0,24}\b(?:(?:in|into|to) memory"
        r"|takes? (?:up )?too much memory|before training)\b",
        r"(?:entire|whole|full|complete|all (?:of )?the) (?:training )?(?:data ?set|data|images|files|corpus|csv)\s"
        r"(?:is|are|was|were|gets?) (?:\w+\s)?(?:loaded|read|kept|held|stored)",
        r"(?:数据集?|图片|图像)[^\n]{0,8}(?:全部|一次性)[^\n]{0,8}(?:加载|读)|(?:全部|一次性)(?:加载|读入?)[^\n]{0,8}(?:数据|内存)",
    ),
    "speaks_of_ram": said_as(
        r"(?<!gpu )(?<!video )(?<!gb of )(?<!gb )\bRAM\b", r"\bRAM (?:memory|usage)", r"\d{1,6} ?gb (?:of )?ram\b",
        r"\d{1,4} ?gb (?:machine|computer|laptop|server|pc|instance)\b",
        r"\b(?:machine|server|computer|laptop|workstation|cluster|node|pc)\b[^.\n]{0,24}"
        r"\b\d{2,5} ?[gt]b? (?:of )?(?:memor(?:y|ies)|mem)\b",
    ),
    "handles_files": said_as(
        r"\bpickl\w*|\b(?:np|numpy|joblib|pd|pandas)\.(?:load|save|dump|read)\w*|\.(?:npy|npz|csv|tsv|h5"
        r"|hdf5|parquet|pkl)\b|\btokeni[sz](?:ing|ation) (?:keeps|takes|uses|fails|needs|of|the)\b"
        r"|\bhdf5\b|\b(?:csv|tsv|json|parquet|pickle) files?\b|\bdata ?frames?\b|\bpandas\b",
        r"\b(?:pre-?process|unzip|extract|tokeni[sz]|convert|download)\w*\s(?:\S+\s){0,4}(?:data\w*"
        r"|files?|corpus|images)\b",
    ),
    "speaks_of_gpu": said_as(r"\bdevice memory\b|显[存卡]", NVIDIA.pattern, A_CARD.pattern),
    "detects": said_as(r"(?:mask|faster|cascade)[-_ ]?r-?cnn|retinanet|detectron2?|instance segmentation"
        r"|gt_?b?boxe?s|\bmmdet(?:ection)?\b|bbox_overlaps|iou_assigner"
        r"|two_stage\.py|anchor_head|roi_heads|efficientdet|object detection api|feature_pyramid"),
    "caches_keys": said_as(r"\bkv[- _]?cache (?:usage|utili[sz]ation|memory)", r"kv ?cache[^\n]{0,12}(?:占用|使用率)"),
    "hears": said_as(
        r"\b(?:asr|utterances?|speech recogni\w+|wav2vec\w*|librispeech|aishell|speech[- ]to[- ]text|max[-_]dura"
        r"tion)\b",
        r"语音识别",
    ),
    "shards": said_as(
        r"tensor[-_ ]parallel|zero[-_ ]?(?:stage[-_ ]?)?3|stage3|\bfsdp(?![a-z])|device_map\W{1,4}auto"
        r"|pipeline[-_ ]parallel|\btp[-_=]|(?<!\w)-{1,2}tp[ =]{1,3}(?:[2-9]|\d\d)\b",
    ),
    "mines": said_as(r"\b(?:ethash|ethminer|teamredminer|lolminer|phoenixminer|nicehash|nanominer)\w*"),
    "has_no_gpu": said_as(
        r"\b(?:without|no) (?:a |any )?gpus?\b(?![- ](?:memory|ram|oom|error|issue|problem|process))",
        r"\bcpu[- ]only (?:mode|machine|setup|run|server|environment)\b|\busing only cpus?\b",
    ),
    "speaks_of_memory": said_as(  # not of models' own memories, nor of others' names for what saves it
        r"(?<![a-z])(?:(?<!former )memory(?![-_ ](?:banks?|modules?|networks?|cells?|tokens?|replay|augment\w*"
        r"|efficient|layers?|resource|format|management based)\b|[/\\]_)|vram|oom)(?![a-z])|[显内]存"
    ),
    "converses": said_as(
        r"multi-?(?:turn|round)", r"(?:conversation|chat|dialog\w*)(?:'s)? (?:history|context|goes on|continues"
        r"|gets? long|grow)",
        r"(?:several|few|many|more|\d{1,6}) (?:\w+ )?(?:turns?|rounds?|messages|dialog\w*|questions|conversations)\b",
        r"\bhistory (?:gets?|grows?|is) (?:too )?long|\blines? of text back and forth\b",
        r"多轮(?:对话|交互|聊天)?|不断(?:交互|对话|提问)|随着(?:对话|交互|聊天|提问)"
        r"|历史(?:对话|记录|消息)|(?<!训练)(?<!验证)(?<!测试)(?<!评估)(?<!迭代)几轮(?!训练|验证|迭代)|轮对话",
    ),
    "makes_pictures": said_as(
        r"\b(?:wan|hunyuan|ltx|mochi|cogvideo|animatediff|infinitetalk|sdxl?|flux|kandinsky|pixart|sora"
        r"|svd)[-_ ]?(?:\d\.\d|video|gp)?\b"
        r"[^\n]{0,80}\b(?:generat|frames?|prompts?|video|workflow|720p|480p|t2v|i2v|image|resolution)",
        r"\b(?:text|image)[- ]?(?:to|2)[- ]?(?:video|image)\b|\b[ti]2[vi]\b|\bi2v|t2v\b",
        r"(?<!-)\bforge\b|(?<![.\w/])workflow\b[^\n]{0,80}\b(?:images?|videos?|loras?|upscal\w*|flux|wan|nodes?)\b",
        r"(?:generat|render)\w* (?:(?!for\b|from\b|of\b|with\b|on\b)\w+ ){0,3}(?:frames|videos?"
        r"|pictures?|images?)\b", r"\b(?:number of|more) frames\b"
        r"|(?<![\n\d])\b\d{1,6} frames\b", r"positive prompts?|negative prompts?",
        r"(?:text|video|image)\s?encode\b|TextEncode|\bvae\b[^.\n]{0,12}\bdecod",
    ),
    "trains": said_as(
        # not in a list of things to be seen: "bus", "train"
        r"(?<!, ')(?<!, \")(?<!,')(?<!,\")(?<!pre-)(?<!pre )(?<!not even )(?<!not )(?<!model i have )(?<!model i )"
        r"(?<!model we )\btrain(?:ing|er"
        # a number among settings ("train_iters: 22") trains nothing
        r"|ed|s|_(?!\w+ ?[:=] ?\d)\w+)?\b(?![- ]free| and inference|\?(?<=and training\?))"
        r"(?<!trained(?= model))(?<!trained(?= weights))(?<!trained(?= network))",
        r"\bfine[- ]?tun(?!ed (?:[\w.-]+ ){0,2}(?:models?|weights|checkpoints?|version)\b)",
        r"\btrain\w*\.(?:py|sh)", r"(?<!-)\bepochs?\b", r"(?<![-_])\b(?:grpo|rlhf|dpo|sft|reinforce\+\+)\b",
        r"\.backward\(", r"dreambooth|(?:mak|creat|train)\w*\s(?:\w+\s){0,3}loras?\b",
        r"训练|訓練|微调(?!后?的?(?:模型|权重))|学習|학습|훈련|обуч(?:а|ен)|\b(?:entrena|entra[iî]n|treina|treino|trainier)\w*",
    ),
    "computes_on_host": said_as(
        r"\b(?:umap|hdbscan|scikit|sklearn|scikit-learn|pandas|gensim|countvectorizer|tf-?idf|xgboost|lightgbm|pyspark"
        r"|k-?means|random forest|statsmodels|scanpy|anndata)\b"
        r"|\bnumpy (?:array )?memory|\bmemory ?error\b[^.\n]{0,60}\bnp\.\w{1,20}\(",
    ),
    "infers": said_as(
        r"\binferenc\w*", r"\binferr?ing\b", r"\b(?:voice conversion|text[- ]to[- ]speech|synthesi[sz]ing)\b",
        r"transcri(?:b|pt)", r"\bwhisper\w*",
        r"\b(?:predict|test|demo|infer\w*|generate|sample|eval\w*|super_resolve|render)\w*\.(?:py|sh|ipynb)\b",
        r"run(?:ning)? (?:the |just run the )?(?:test|demo|predict\w*|inference"
        r"|sampling)", r"\bupscal", r"txt2img|img2img",
        r"generat(?:e|es|ing) (?:an? |the |\d{1,6} )?(?:\w+ )?(?:images?|pictures?|videos?|audio|text|samples?"
        r"|tokens?)",
        r"推理|预测|生成(?:图片|图像|视频)",
    ),
    "attends": said_as(  # models of tokens: attention, adapters, sequences
        r"transformers?\b|attention|attn|\b\w{0,12}bert\w*|\bgpt|llm|llama|qwen|mistral|gemma|deepseek|\bvit\b|\bt5\b",
        r"\btokeni?[sz]?e?|\bsequences?\b|\bseq_?len|\bprompts?\b|\bloras?\b|\bpeft\b|\bsft\b|language model"
        r"|translat\w+",
    ),
    "may_not_restart": said_as(
        r"\bwithout (?:exiting|restarting|stopping|closing|leaving)\b|\bdivid\w+ the (?:task|job|run)\b"
        r"|\b(?:should|must|can|may)(?:n't| not) be (?:left|restarted|stopped|exited|closed)\b",
    ),
    "names_lora": said_as(r"\b(?:q|do)?loras?\b|\badapters?\b"),
    "trains_whole": said_as(
        r"\bfull[- ](?:\w+[- ])?(?:fine[- ]?tun\w*|training)\b|\b(?:finetuning|model)_type\W{1,3}full\b"
        r"|\bdreambooth ?/ ?fine-?tun",
        r"全(?:量|参数?)\s?(?:微调|训练)",
    ),
    # What a run does already, by its settings.
    "has_lora": said_as(
        r"\b(?:lora_(?:r|rank|alpha)|q?lora[_ ]?config|get_peft_model)\b", r"(?:_type|tuning)\W{1,3}lora\b",
    ),
    "has_half": said_as(r"\b(?:bf16|fp16|bfloat16|float16)\W{0,4}(?:true|auto|1\b)"
        r"|--(?:bf|fp)16\b|\bunsloth\b|(?:dtype|precision)\W{1,4}(?:torch\.)?(?:b?float16|(?:bf|fp)?16\b)",
        rf"{_HALF} {_IS_ON}|{_ON_WITH}{_HALF}"),
    "lacks_checkpointing": said_as(
        r"(?<!disable_)gradient_checkpointing\W{1,4}(?:false|0\b|off)|disable_gradient_checkpointing\W{1,4}true",
    ),
    "has_checkpointing": said_as(
        rf"(?:gradient|activation)[- ]checkpointing {_IS_ON}|{_ON_WITH}(?:gradient|activation)[- ]checkpointing\b",
        r"(?<!disable_)(?:gradient|activation)_checkpointing\W{1,4}(?:true|enable|unsloth|1\b)"
        r"|gradient_checkpointing_enable\(|--grad(?:ient)?[-_]checkpoint(?:ing)?\b(?!\W{1,3}(?:false|0))",
        # programs that recompute unless they are told not to
        r"(?:(?m:^)finetuning_type: ?\S|llama-?factory-cli train|--finetuning_type\b|\bswift (?:sft|pt|rlhf)\b"
        r"|\bxtuner train\b|\bunsloth\b)"
        r"(?![\s\S]{0,4000}(?:disable_gradient_checkpointing\W{1,3}true|gradient_checkpointing\W{1,3}false))",
    ),
    "has_flash": said_as(
        r"flash_?att(?:n|ention)\W{1,4}(?:true|fa[23]|1\b)|--(?:use_)?flash_?attn\b(?!\W{1,3}(?:false|auto|disabled|0))"
        r"|attn_impl\w*\W{1,4}flash_",
    ),
    "evaluates_one": said_as(r"eval_batch_size\W{1,4}(?:to |of )?1\b"),
    "evaluates_by_trainer": said_as(
        r"per_device_eval_batch_size|eval_accumulation_steps|fp16_full_eval|transformers[/\\]trainer\.py",
    ),
    "one_worker": said_as(r"num[-_ ]workers['\"`]?(?: (?:is|was|are)(?: set)?(?: to)?| to)?\W{1,4}[01]\b"),
    "has_batch_of_one": said_as(
        r"(?<!eval_)(?<!val_)(?<!test_)batch[ _-]?size(?: per (?:device|gpu|card))?(?: is| of| to)?\W{1,4}1\b(?!\.?\d)"
        r"|batch[ _-]?size ?(?:已经?)?(?:设置?[成为]|[为是成]|改[成为]|[调降][到至成为])(?:了|最低)? ?1(?![\d.])"
        r"|(?:\bbs ?= ?|--bs )1\b(?![\d.])"
        r"|\b(?:ims_per_batch|(?:imgs|samples)_per_gpu)\W{1,4}(?:equal to )?1\b(?![\d.])"),
    "has_8bit_optimizer": said_as(r"8[- ]?bit[- _]?adam|adamw?(?:_bnb)?_?8bit"),
    "has_workspace": said_as(r"\bmax_workspace_size\W|--workspace[= ]|--memPoolSize"),
    "tiles": said_as(r"enable_(?:vae_)?tiling\(|\b(?:decode|encode)_tiled\w{0,4}\(|\bretrying with tiled\b"),
    "caches_in_8_bits": said_as(r"KV_CACHE_TYPE\W{1,3}q[48]_|cache-type-k q[48]_"),
    "diffuses": said_as(
        r"diffus|\bvae\b|\bprompts?\b|\bpipe(?:line)?\b|\bflux\b|\bsd(?:xl|3)?\b|\bunet\b|\bloras?\b|(?<!up)sampler"
        r"|hunyuan|\bwan\b|\bltx\b|\b[ti]2[vi]\b|提示词",
    ),
    "predates_bf16": said_as(  # cards before Ampere
        r"\b(?:[vp]100|[pkm]40m?|k20[mx]?|k80m?|m60|gtx|titan|t4|quadro)\b|\b(?:geforce|rtx)[ -]?20[678]0"
        r"|\b(?:10[5-8]0|16[56]0|20[678]0)[ -]?(?:ti|super)\b",
    ),
    "retains_graph": said_as(r"\bretain_graph\b"),
    "scores_all": said_as(r"log-?_?likelihood|log_?probs?\b|\bperplexity\b"),
    "uses_torch": said_as(r"torch|\.cuda\(|\.detach\(|no_grad|\.backward\(|\btensors?\b|\bnn\.Module"),
    "is_quantized": said_as(
        r"gguf|\bfp8\b|\b(?:nv|mx)?fp4\b|\bnf4\b|\bint[48]\b|\b[a-z]?awq\b|\bgptq|[-_. ]q[2-8](?:_[0k]\w{0,3})?\b"
        r"|\b[2-8][- ]?bits?\b|load_in_[48]bit|\beetq\b|\bqlora\b|set_module_quantized|(?<![a-z])woq(?![a-z])"
        r"|\d ?bpw\b|\bq_lora\W{1,3}true|--quantize\b|\bexl[23]\b|\bquantize\w*\W{1,3}true|quantization_bit\W{1,3}[48]",
        r"量化",
    ),
    # Models of text: of what is attended to otherwise, an image or a video, there may be no tokens to cut.
    "of_text": said_as(
        r"\b\w{0,12}bert\w*|\bgpt|\bllms?\b|llama|qwen|mistral|gemma|deepseek|\bt5\b|\btokeni[sz]er?s?\b"
        r"|language model"
        r"|\btransformers[/\\.]|\bAutoModel|CausalLM|\bseq(?:uence)?[-_ ]?len|\bmax[-_]length\b|\bsft\b"
        r"|translat\w+|\bsentences?\b",
    ),
    "names_batch": said_as(r"batch|\bmicro_?bs\b|\bbs ?=|批(?:次|大小|量|处理)|배치|バッチ"),
    "was_updated": said_as(r"\b(?:updat|upgrad|reinstall)\w*|升级|更新|업데이트|アップデート"),
    "of_one_scene": said_as(r"\bcolmap\b|\bpoint[- ]?clouds?|\bnerfs?\b|\bvoxels?\b|\bmesh(?:es)?\b"),
    "by_boosting": said_as(r"\b(?:cat|xg)boost\w*|\blightgbm\b|\bgradient[- ]boost\w*"),
    "around_llama_cpp": said_as(r"koboldcpp|\blm ?studio\b|\bgpt4all\b|\bllamafile\b|\blocalai\b"),
    "by_whisper": said_as(r"whisper[._-]?cpp|\bwhisper_(?:init|model)_"),
    "generates_tokens": said_as(r"\btok(?:en)?s?/s(?:ec)?\b|tokens? per second"),
    "workers": said_as(
        r"num_workers", r"\bwith (?:only )?\d{1,3} workers\b",
        r"\bdata ?loader\w* (?:\w+ )?work\w*", r"\bworkers? process\w*"),
    "other_workers": said_as(r"\b(?:fewer|background) workers?\b"),
    "merges": said_as(
        r"\bmerg(?:e|es|ing|er)\b[^.\n]{0,60}\b(?:loras?|adapters?|weights?|base|models?)\b",
        r"\b(?:loras?|adapters?|weights)\b[^.\n]{0,24}\bmerg(?:e|es|ing|er)\b", r"merge_and_unload",
        r"合并[^\n]{0,12}(?:模型|权重|lora)(?! ?[后時时之])|(?:模型|权重|lora)[^\n]{0,16}合并",
    ),
    "learns": said_as(
        r"\b(?:models?|tensors?|batch\w*|loss|tokens?|embed\w*|networks?|neural|attention|(?:py)?torch|oom|checkpoints?"
        r"|gradients?|layers?|weights|lora|llm|predict\w*|encod\w*|qwen|llama|mistral|gpt|bert|yolo|resnet|images?\b|tiled?\b)",
        r"模型|权重|张量|网络|推理|预测",
    ),
    "loads": said_as(
        rf"{WHEN}(?:model\s)?(?:load(?:s|ing|ed)?|initiali[sz](?:e|es|ing|ation))\s(?:of\s)?{_MODEL}",
        rf"(?:cannot|can't|unable to|fail\w* to|try\w* to|tried to|want to|not able to|able to|could not) load\s"
        r"(?:\(\w+\)\s)?"
        rf"(?:any\s(?:of\s)?(?:the\s)?)?{_MODEL}",
        r"loading checkpoint shards|loading weights|loading pipeline components", r"(?:oom"
        r"|memory)\w* (?:error )?on load(?:ing)?\b",
        rf"\bloading\s{_MODEL}", r"\b(?:during|in|at) (?:the )?(?:model|weights?|checkpoint) loading\b",
        r"(?:加载|载入)(?:大)?(?:模型|权重)(?:时|失败|过程|的时候|就|中|[^\n，。]{0,4}(?:out of memory|oom|爆))",
        r"\bto load (?:larger|bigger) models?\b[^\n]{0,80}\b(?:out of memory|oom)\b",
    ),
    "many_ranks": said_as(
        r"(?:four|eight|two|multi(?:ple)?|[2-9]|1[0-6])[- ]?(?:x\s?)?gpus?\b", r"multi-?gpu", r"\b[2-9] (?:x )?("
        r"?:graphics |video )?cards\b",
        r"(?:[2-9]|1[0-6]|两|多|四|八)\s?[块张]\s?(?:显卡|gpu|卡|[a-z]{0,8} ?\d{2,4})"
        r"|(?:双|多|两|[二四八]|[2-9])显?卡",
        r"data[- ]?parallel|\bDDP\b|torchrun|distributed\.launch|--nproc|\bnum_processes\W{1,3}(?:[2-9]|\d\d)\b"
        r"|full_shard|\bdistributed training\b|\b(?:across|to|on) (?:the |all )?other gpus\b",
        r"\b(?:[1-9]|1[0-5]) (?:additional|extra|more) (?:\w+ )?process(?:es)? (?:\w+ ){0,2}on gpu ?0\b",
        r"\b[2-9] ?[x\u00d7*] ?(?:nvidia |geforce )?(?:rtx|[ahv]\d{2,4}|[2-5]0\d0)\b|found [2-9] \w+ devices",
    ),
    "one_device": said_as(
        r"\b(?:on|with|using|have|only) (?:just |only )?(?:1|one|a single|single)(?: ?x)? (?:\d{1,3} ?gb )?(?:\w+ )?"
        r"(?:gpu|card)\b(?! per)",
        r"\b1 ?[x\u00d7] (?:\d{1,3} ?gb )?(?:gpu\b|[ahv]\d{2,3}\b|rtx)|单卡|单张",
    ),
    "leaves_devices_idle": said_as(  # though more than one is there
        r"\b(?:not|n't|doesn't|ignor\w*) (?:\w+ )?(?:respect|accept|follow|obey)?\w* ?(?:the |my )?gpu[-_ ]split",
        r"\b(?:none|nothing)\b[^.\n]{0,24}\bother (?:\d )?(?:gpus?|cards?)\b",
        r"\b(?:other|second|2nd)(?: (?:one|gpu|card)s?)? (?:is|are|was|were) (?:sitting )?(?:not used|unused|idle|empty"
        r"|never used)\b|\bgpu ?:?\d (?:is|was) (?:not|never) used\b",
        r"\b(?:only|just) (?:ever )?us(?:es|ing) (?:1|one|a single|the first)(?: (?:gpu|card|one))?\b"
        r"(?! (?:at|per|for|of))",
        r"(?:其余|其他|其它|另一?|第二)[块张个]?(?:显?卡|gpu)[^\n。]{0,12}(?:没有?用|空闲|不用|极少|很少|没有?占用|闲置)"
        r"|只(?:用|占用|使用)了?(?:一|1|其中一)[块张个](?:显?卡|gpu)|全都?在第?一[块张个](?:显?卡|gpu)"
        r"|总是在?(?:第一|0号?)[块张个]?(?:显?卡|gpu)",
    ),
    "gives_split": said_as(r"(?:gpu|tensor)[-_]split\b\W{1,4}\d"),
    "gathers_outputs": said_as(
        r"(?<!distributed)(?<!distributed[-_ .])\bdata[-_ ]?parallel\b(?! ?(?:rank|size|group))",
    ),
    "crowds_one_device": said_as(
        # nvidia-smi lists a process on two devices
        r"(?m:^)(?P<device>\d{1,2})\s+(?:N/A\s+N/A\s+)?(?P<pid>\d{2,7})\s+[CG+]{1,3}\s[^\n]*\n(?:[^\n]*\n){0,24}?"
        r"(?!(?P=device)\s)\d{1,2}\s+(?:N/A\s+N/A\s+)?(?P=pid)\s",
        r"\b(?:all|every|each|others?|additional|more|many|higher|extra|\d)\b[^.\n]{0,60}\b(?:gpu|cuda"
        r"|device)[ :#-]{0,2}0\b",
        r"\b(?:gpu|cuda|device)[ :#-]{0,2}0\b[^.\n]{0,40}\b(?:more|higher|additional|extra|all|every|each"
        r"|than (?:the )?others?)\b",
        r"\b(?:im-?|un)balanced? (?:gpu )?memory|memory (?:usage )?(?:is )?(?:im-?|un)balance|\buneven (?:gpu )?memory"
        r"|\bmain device\b[^.\n]{0,40}\b(?:more|runs? out|full)\b",
        r"\b(?:the )?(?:0|first|1st|master|main) (?:gpu|card)\b[^.\n]{0,40}\b(?:more|higher|overflow\w*|full|extra)\b"
        r"|\bone (?:gpu|card)\b[^.\n]{0,40}\b(?:another|others?)\b[^.\n]{0,24}\bonly\b",
        r"(?:\u6240\u6709|\u5168\u90e8|\u6bcf\u4e2a)[^\n]{0,16}(?:gpu|cuda|\u5361)[ :]?0\b|(?:gpu|cuda"
        r"|\u5361)[ :]?0[^\n]{0,12}(?:\u5f88\u9ad8|\u66f4\u9ad8|\u66f4\u591a|\u591a)",
    ),
    "pins": said_as(
        r"pin_memory\s?=\s?True", r"\bpin_memory\b(?!\s?=\s?False)", r"pinned (?:host )?memory", r"cudaHostAlloc",
        r"cudaHostRegister",
    ),
    "offloads_to_host": said_as(
        r"cpu[-_ ]offload", r"offload_(?:optimizer|param|opt)\w*", r"--offload\b(?![= ](?:none|false))",
        r"zero[-_ ]?infinity", r"ds_z[23]_offload",
    ),
    "offloads_all": said_as(
        r"\b(?:all|full|every|everything|any)\b(?: \w+){0,4} offload\w*"
        r"|\boffload(?:ed|s|ing)? (?:options?|everything|all)\b",
    ),
    "may_swap_blocks": said_as(r"\bkohya\w*|\bsd-scripts\b|\bmusubi\b|diffusion-pipe|\bflux_train\w*"),
    "fine_tunes": said_as(r"\bfine[-_ ]?tun|\bsft\b|\bdpo\b|微调"),
    "pretrains": said_as(
        r"\bpre-?train(?:ing|s)?\b(?!ed|_model|_weights| (?:model|weight|checkpoint))|\bpretrain_\w+\.py",
        r"预训练(?!模型|权重)",
    ),
    "by_verl": said_as(r"actor_rollout_ref|\bverl\b"),
    "swaps_blocks": said_as(
        r"\bblocks?[-_ ]?(?:to[-_ ])?swap",
    ),
    "repeats_models": said_as(  # one after the other, in one process
        r"\bk-?folds?\b|\bcross[- ]?validation\b|\b(?:each|every|last|next|second) fold\b",
        r"\b(?:grid|hyper-?parameter)[ -]?search",
        r"\bmodels?\b[^.\n]{0,60}\bone after (?:the other|another)\b",
        r"\btrain\w* (?:\w+ ){0,3}in (?:a |the )?(?:for )?loop\b",
        r"\b(?:several|many|multiple|different|\d{1,3}) models in (?:a |the )?(?:for )?loop\b|交叉验证",
    ),
    "gathers_state": said_as(
        r"\bFULL_STATE_DICT\b|gather_(?:16bit|fp16)_weights_on_model_save\W{1,4}true|StateDictType\.FULL",
    ),
    "calls_jax": said_as(r"\bjax\.(?:jit|grad|value_and_grad|vmap|pmap)\b|\boptax\b"),
    "calls_rapids": said_as(r"\b(?:cudf|cuml|cugraph|dask[-_]cuda)\b|\brmm\.reinitialize|\bimport rmm\b"),
    "at_optimizer": said_as(  # where its state is made
        r"\b(?:during|in|at|while|when)\s(?:\w+ ){0,2}optimi[sz]er(?:'s)?(?: state\w*)?"
        r"[ .](?:initiali[sz]\w*|init\b|set-?up|step)"
        r"|initiali[sz]\w* (?:of )?(?:the )?optimi[sz]er|\bfirst optimi[sz]er step\b"
        r"|\b(?:when|once|as soon as) (?:it |the )?(?:runs? |calls? |reach\w* )?(?:the )?optimi[sz]er\b"
        r"|\b(?:oom|out of memory)\b[^.\n]{0,24}\boptimi[sz]er states?\b"
        r"|\boptimi[sz]er states?\b(?:(?!\bnot\b|n't)[^.\n]){0,24}\b(?:oom|out of memory)\b",
        r"(?:更新参数|参数更新|优化器)[^\n，。]{0,8}(?:爆|溢出|不足|oom)",
    ),
    "quantizes": said_as(
        r"\bquanti[sz](?:e|ing)\b|\bcan'?t quant\b|\bfp8 quantization\b|\bquantization (?:goes|script|run|fails)\b",
        r"量化(?:时|过程|脚本)",
    ),
    "fills_cache": said_as(  # what was asked for when it failed
        r"\b(?:oom|out of memory|memory(?:error)?)\b[^.\n]{0,40}\b(?:alloc|creat|initiali|reserv|mak|build)\w*"
        r"[^.\n]{0,24}\bkv[- _]?cache\b"
        r"|\b(?:alloc|creat|initiali|reserv)\w*[^.\n]{0,24}\bkv[- _]?cache\b"
        r"(?:(?!\bnot\b|n't)[^.\n]){0,24}\b(?:oom|out of memory)\b",
    ),
    "offload_helps": said_as(
        r"offload\w*(?:(?!\bno\b|\bnot\b|n't)[^.\n，。]){0,24}\b(?:works|fits|runs (?:fine|ok)|solve[sd]|fixe[sd])\b"
        r"|offload\w*[^\n，。]{0,12}(?:就?可以|就能|能)跑",
    ),
    "calls_trainer": said_as(r"\b\w*Trainer\(|\bfrom trl import [^\n]*Trainer\b"),
    "compiles_server": said_as(r"launch_server\b[^\n]{0,800}--enable-torch-compile"),
    "data_is_on_host": said_as(r"--data_device[= ]['\"]?cpu"),
    "splats": said_as(r"gaussian[-_ ]?splat\w*|splatfacto|\b3dgs\b|\b2dgs\b|\bgsplat\b|\bgaussians\b|\b3d gaussian"
        r"|\bgaussian_model\b"),
    "gaussians_grow": said_as(
        r"(?:increas|grow)\w* (?:the )?number of (?:\w+ )?gaussian",
        r"\bnumber of (?:\w+ )?gaussians? (?:\w+ ){0,4}(?:increas|grow)|\bin (?:densif\w+|cat_tensors_to_optimizer)\b"
    ),
    "of_graphs": said_as(
        r"\btorch_geometric\b|\w*graph_?sage\b|\bedge_index\b|\bPyG\b|\bdgl\b|\bgnns?\b|graph neural|图神经网络"
    ),
    "varies_in_length": said_as(
        r"variable[- ](?:length|size)", r"\bfrom \d{1,5} (?:tokens )?to \d{3,6} tokens\b",
        r"(?:different|varying|irregular|dynamic|various) (?:image )?(?:length"
        r"|size|shape)s?",
        r"irregular size", r"dynamic padding|pad(?:ding)? to longest|变长|长度不一",
    ),
    "computes": said_as(
        r"(?<![a-z])batch|\b(?:datasets?|images?|resolutions?|videos?|samples?|sequences?|tokens?|frames?|pixels?"
        r"|point clouds?|(?<!cuda )graphs?)\b",
        r"数据集|图片|图像|视频|批",
    ),
    "replays": said_as(
        r"replay[_ ]?buffer|experience replay|rollout buffer", r"\b(?:dqn(?:agent)?|ddpg|td3|sac)\b",
    ),
    "full_batch": said_as(
        r"full[- _]?(?:batch|graph|image|size|volume|slide)", r"(?:whole|entire) (?:graph|image|dataset|volume"
        r"|slide|sequence|point cloud)", r"single big graph", r"整(?:张)?图|全图",
    ),
    "dense_pairs": said_as(
        r"to_dense\w*",
        r"pairwise[_ ]?(?:dist|sim)\w*", r"\b(?P<rows>\w+)(?:\.dot\(|\s?@\s?)(?P=rows)\.t\b",
        r"dist(?:ance)?_?matri\w*", r"(?<!size)(?<!size\()(?<!linear)\(\s?(?P<side>\d{4,}),\s?(?P=side)\s?\)",
        r"dense (?:adj\w*|matri\w*|graph)", r"adjacency matrix", r"\bcdist\b", r"(?:distance|similarity"
        r"|affinity|gram|kernel|covariance) matrix", r"pairwise (?:dist|simil)\w*", r"\b[nN] ?[x*\u00d7] ?[nN]\b",
    ),
    "embeds_many": said_as(
        r"\bembeddings?'? ?(?:tables?|layers?|matri\w+|vocabular\w+|look-?ups?)\b",
        r"\b(?:millions?|number) of (?:users|items)\b",
    ),
    "is_given_memory": said_as(
        r"\b(?:increase|bump|raise|adjust|double)s? (?:the )?(?:memory|mem) (?:of|for|limits?|requests?|allocati"
        r"on|quota"
        r"|to \d)", r"--mem(?:ory)?(?:-per-(?:cpu|gpu|node))?[= ]\d", r"(?<!gpu )\bmem(?:ory)? (?:limit|request|"
        r"quota)s? (?:is|was|of|too|for|in|set)\b",
        r"(?:memory|limits?|requests?)[\"']?: ?[\"']?\d{1,6}[MG]i\b",
    ),
    "names_share": said_as(
        r"(?:setting|set(?! by)|lower\w*|reduc\w*|increas\w*|rais\w*|overrid\w*|chang\w*)\b[^.\n]{0,40}"
        r"(?:mem(?:ory)?[-_ ]fraction|memory[-_ ]utili[sz]ation|preallocat\w*|mem_fraction_static|allow_growth"
        r"|memory_growth)", r"setting the fraction to \d",
    ),
}  # fmt: skip
