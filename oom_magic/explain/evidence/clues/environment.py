"""Where and with what a run runs, as a text tells: libraries, system, allocator, limits, others on the device.

Limits are found in any of their spellings: the share of a server, contexts, layers, workers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from oom_magic.explain.evidence.clues.author_setting import said_as

_LONGEST_READ = 200_000
_TAKEN_FROM = 0.9  # of a job's limit that is set
_ALL_LAYERS = 99  # not a number: "all layers", however many the model has
# The names that commands, code and logs have for a limit, in small letters, without hyphens and underscores.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "share": ("gpumemoryutilization", "vllmgpumemoryutilization", "memfractionstatic"),
    "length": ("maxmodellen", "contextlength", "contextsize", "nctx", "numctx", "ctxsize", "kvsize", "maxseqlen",
               "ollamacontextlength", "-c"),
    "requests": ("maxnumseqs", "maxrunningrequests"),
    "tokens": ("maxnumbatchedtokens", "chunkedprefillsize"),
    "prefill_tokens": ("maxbatchprefilltokens",),
    "total_tokens": ("maxbatchtotaltokens",),
    "graphs": ("cudagraphmaxbs",),
    "devices": ("tensorparallelsize", "tp", "tpsize", "numshard"),
    "layers": ("ngl", "ngpulayers", "gpulayers", "numgpu"),
    "microbatch": ("nubatch", "ubatchsize", "-ub"),
    "workers": ("numworkers", "dataloadernumworkers"),
    "accumulation": ("gradientaccumulationsteps",),
}  # fmt: skip
_LIMITS = {name: limit for limit, names in _NAMES.items() for name in names}
_ASSIGNED = re.compile(
    r"(?<![\w-])([a-z_-][\w-]{1,40})['\"`]?[ \t]{0,12}[=: ][ \t'\"(]{0,3}(\d{1,8}(?:\.\d{1,4})?|\.\d{1,4})(?![\w.]*\w)"
    # not what it would have to be
    r"(?! or (?:less|fewer|lower|below|more|higher|smaller|larger))",
    re.I | re.A,
)
# Said in other words, and then more exact than what was set.
_STATED = {
    "held": re.compile(r"(?:stored in KV cache \(|estimated maximum model length is )(\d{1,8})"),
    "requests": re.compile(r"sampler with (\d{1,6}) dummy requests"),
    "layers": re.compile(r"offloaded (\d{1,3})/\d{1,3} layers", re.I),
    "job_gib": re.compile(r"--mem[= ](\d{1,4})GB?\b", re.I),
    "job_mib": re.compile(r"--mem[= ](\d{4,7})(?:MB?)?\b(?!G)", re.I),  # Slurm's unit where none is given
    "cpu_gib": re.compile(r"--mem-per-cpu[= ](\d{1,4})GB?\b", re.I),
    "job_kib": re.compile(r"exceeded memory limit \(\d{1,12} > (\d{1,12})\)", re.I),
}
_LIBRARIES = {
    "transformers Trainer": re.compile(r"transformers[/\\]trainer\.py|\bTrainer\.train\b|_inner_training_loop", re.A),
    "accelerate": re.compile(r"\baccelerate[/\\]|accelerator\.\w+\(|accelerate launch", re.A),
    "deepspeed": re.compile(r"deepspeed", re.I | re.A),
    "FSDP": re.compile(r"_fsdp_|fully_sharded|\bFSDP\b", re.A),
    "Lightning": re.compile(r"pytorch_lightning|lightning[/\\]", re.A),
    "vLLM": re.compile(r"\bvllm\b|llm_engine", re.I | re.A),
    "ComfyUI": re.compile(r"comfyui(?![/\\](?:\.?venv|models)[/\\])|Exception during processing", re.I | re.A),
    "bitsandbytes": re.compile(r"bitsandbytes", re.A),
    "PEFT": re.compile(r"\bpeft\b(?! version)|LoraConfig|get_peft_model", re.I | re.A),
    "torch.compile": re.compile(r"torchinductor|_inductor|torch[/\\]_dynamo|Topologically Sorted Source Nodes", re.A),
    "Ray": re.compile(r"\bray::|\bray\.exceptions", re.A),
}
_NOT_USED = re.compile(
    r"\b(?:without|not using|(?:do|did)(?:n't| not) use|instead of|rather than|unlike) [^.,;\n]{0,30}", re.I
)
_SYSTEMS = {
    "Windows": re.compile(
        r"\b[A-Za-z]:[/\\](?![/\\])|PS [A-Z]:\\|(?<!`)\bpowershell\b|\$env:"
        r"|\bWindows ?(?:1[01]\b|Server)|\bwin ?1[01]\b"
        r"|\b(?:on|under|for) Windows\b(?!,| and| or|/)|(?m:^)[\s*-]{0,6}Windows[ \t]*(?m:$)",
        re.I | re.A,
    ),
    "WSL": re.compile(r"\bWSL ?2?\b|/mnt/[a-z]/", re.I | re.A),
    "Kaggle": re.compile(r"/kaggle/|\bkaggle\b", re.I | re.A),
    "Colab": re.compile(r"/content/|\bcolab\b", re.I | re.A),
    "Jetson": re.compile(r"\bjetson\b|NvMap|jetpack", re.I | re.A),
    "SLURM": re.compile(r"slurm", re.I | re.A),
}  # fmt: skip
ONE_MEMORY = frozenset({"Mac", "Jetson"})  # systems whose CPU and GPU share it
_APPLE_GPU = re.compile(r"\bmps\b|\bmetal\b|apple silicon|\bm[1-9](?: (?:pro|max|ultra))?\b", re.I | re.A)
_EXPANDABLE = re.compile(
    r"ALLOC_CONF[\"'\]]{0,3}\s?[=:]\s?[\"']?[\w:,.]{0,80}expandable_segments:True|expandable_segments is enabled"
)
_NOT_SUPPORTED = re.compile(
    r"expandable_segments[\s\S]{0,200}?(?:n't|\bnot) (?:\w+ )?support|expandable_segments not supported", re.I
)
# PyTorch's own tip names the setting too; the user need not have set it.
_TIP = re.compile(r"try setting\s+\S{0,20}ALLOC_CONF=expandable_segments:True")
_TIP_OF_SPLITS = re.compile(r"try\s+setting\s+max_split_size_mb|memory is >> allocated")
_QUOTED_TIP = re.compile(
    r"try\s+setting\s+(?:max_split_size_mb|PYTORCH_\w+)|to\s+avoid\s+fragmentation|memory is >> allocated"
)
_MIB_IN_GIB = 1024
_SHORTEST_NAME = 3  # of an option whose hyphen does not matter


def libraries_in(text: str) -> tuple[str, ...]:
    """The libraries around PyTorch that a text shows at work."""
    used = _NOT_USED.sub("", text)
    return tuple(name for name, pattern in _LIBRARIES.items() if pattern.search(used))


def systems_in(text: str, accelerator: str | None) -> tuple[str, ...]:
    """The systems and services that a text names as its own; a Mac by its GPU."""
    found = [name for name, pattern in _SYSTEMS.items() if pattern.search(text)]
    return (*found, *(("Mac",) if accelerator == "mps" and _APPLE_GPU.search(text) else ()))


def sets_expandable_segments(text: str) -> bool:
    """Whether the run has them: not where only PyTorch's tip names them, or where they are not supported."""
    return bool(_EXPANDABLE.search(_TIP.sub("", text))) and not _NOT_SUPPORTED.search(text)


def tip_in(text: str) -> str:
    """Which tip of PyTorch's against fragmentation is quoted: "segments", that of versions before 2.2, "splits", or
    ""."""
    if not _QUOTED_TIP.search(text) or _NOT_SUPPORTED.search(text):
        return ""
    return "splits" if _TIP_OF_SPLITS.search(text) and not _TIP.search(text) else "segments"


def limits_in(text: str) -> dict[str, float]:
    """The limits that a text gives, by their names here; of one given several times the first."""
    head, found = text[:_LONGEST_READ], dict[str, float]()
    for match in _ASSIGNED.finditer(head):
        name = match.group(1).lower()
        limit = _LIMITS.get(name if len(name) <= _SHORTEST_NAME else name.replace("-", "").replace("_", ""))
        if limit is not None:
            found.setdefault(limit, float(match.group(2)))
    stated = {name: pattern.search(head) for name, pattern in _STATED.items()}
    found |= {name: float(match.group(1)) for name, match in stated.items() if match is not None}
    if "job_mib" in found:
        found.setdefault("job_gib", found.pop("job_mib") / _MIB_IN_GIB)
    if found.pop("job_kib", float("inf")) / _MIB_IN_GIB**2 < _TAKEN_FROM * found.get("job_gib", 0):
        del found["job_gib"]  # the scheduler did not take it
    if found.get("layers", 0) >= _ALL_LAYERS:
        del found["layers"]
    return {name: value for name, value in found.items() if value}


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
    r"|(?<!session )(?<!session is )clos(?:ed|ing)|ended|finish\w*|quit|previous (?:run|job|process|script|training)"
    r"|earlier (?:run|job)|old process"
    r"|stop(?:ped)? the process|(?:program|process|script|training|job) ends)"
)
_NOTHING_RUNS = (
    r"no (?:other |running )?(?:process\w*|programs?|jobs?)(?: \w+){0,2} (?:running|found|using|shown|listed|seem)"
    r"|no running process\w*|nothing (?:else )?(?:is |was )?running|(?:not|n't) (?:run|running|have) (?:any|anything)"
    r"|without (?:any(?:thing)?|a) (?:process |program )?running|(?:not|n't) show (?:any|the) (?:process|pid)"
)

# What an author says of others on the device, as keys; ``author_words`` has the rest.
OTHERS_ON_DEVICE: dict[str, re.Pattern[str]] = {
    "shares_device": said_as(
        r"(?:other|another|several|two|multiple|\d{1,3} other|(?<![\dx])\d{1,2})"
        r" (?!rollout|worker|rank|loader|child)(?:\w+ )?(?:process|program|job"
        r"|codes?|training|experiment|user|notebook|kernel|app(?=s?\b|lication)|instance|script|task|vram consumer"
        r"|student|people)\w*"
        r"[^.\n]{0,60}(?:us(?:e|es|ing)|tak(?:e|es|ing)|occup|runn|host|load|hold|detect|consum)",
        r"(?:allocated|used|occupied|taken|held) by (?:someone|somebody|others?|another)\b",
        r"\b\d{1,2} (?:processes|kernels)\b[^.\n]{0,30}(?:are|were)?\s?(?:using|running|on)", r"zombie process",
        r"\b(?:gunicorn|uwsgi|uvicorn|celery)\b[^.\n]{0,60}(?:workers?\b|process)",
        r"(?:ran|run|running|started) (?:\w+ )?too (?:much|many)|\b(?:run|running|ran"
        r"|start\w*) (?:another|other|two|several|multiple) (?:code|programs?"
        r"|scripts?|jobs?|process\w*|training|experiments?)|(?:processes|jobs|programs|trainings) (?:are "
        r"|is |were )?already running",
        r"(?:others?|someone|somebody) (?:is|are|was|were) using", r"(?:gpu|card|device|memory|vram) (?:is|was"
        r"|are) already (?:in use|used|occupied|taken|full)",
        r"\b(?:infer\w*|predict\w*|test(?:s|ing)?)\b[^.\n]{0,60}\bwhile (?:the |my )?training is (?:still )?(?:going on"
        r"|running|in progress)", r"\bworks?\b[^.\n]{0,60}\b(?:gpu|card) is free\b",
        r"(?:其他|别的|另一个|多个|别人)(?:进程|程序|用户|任务|Notebook|在用)",
        r"(?:卡|gpu|npu|服务器)上?(?:还|已|都|也)?经?[跑运有](?:行|着)?了?(?:其他|别的|另外的?)(?:模型|服务|任务|程序)",
        r"\bno (?:free )?(?:gpu|v?ram|video|cuda) ?memory (?:is |was )?available\b",
        r"(?:still|keeps?|kept) (?:hold|occup|us)\w* (?:the |up )?(?:gpu |video )?(?:memory|vram)", r"no such process",
        r"process (?:is )?(?:still )?(?:hold|occupy)ing", r"(?:killed|dead|defunct|ghost|orphan\w*) process",
        r"started two python processes", r"shared (?:gpu|server|cluster)\b(?! ?mem)",
        r"(?:restart|reboot)(?:ing|ed)?\b[^.\n]{0,40}(?:work|fix|solv|help|\bfine|\bok\b)",
        r"重启(?:机器|电脑|服务器|系统)[^\n]{0,12}(?:可以|好了|正常)",
    ),
    "small_net": said_as(r"\b(?:efficient|mobile|shuffle|squeeze|ghost)-?net|\bresnet-?(?:18|34|50)\b"),
    "copies_of_model": said_as(
        r"\binstance[_ -]?(?:group|count)s?\b", r"\binstances of (?:the|a|this) (?:same )?(?:\w+ )?(?:model|engine)\b",
        r"\b(?:models?|llm|pipe(?:line)?|engine) (?:is |are |gets? |was |being )(?:re-?)?"
        r"(?:initiali[sz]|load|creat|instantiat)ed\b[^.\n]{0,16}"
        r"\b(?:every|each) (?:new |single )?(?:request|call|query|message|time|prompt)\b",
        r"\bload(?:s|ed|ing)? (?:the |my |a )?models? (?:\w+ )?(?:twice|(?:\d|two|three|several|multiple) times)\b",
        r"\b(?:multiple|several|two|more|\d{1,2}) (?:copies|replicas) of (?:the|a|this) (?:same )?"
        r"(?:\w+ )?(?:model|engine)\b",
    ),
    "models_beside": said_as(
        r"\b(?:other|another|several|two|multiple|\d{1,3})(?: other| different| more)? models?"
        r" (?:is |are |was |were )?(?:also )?(?:running|using|hosted|served|deployed|loaded)",
        r"\b\d{1,3} other models\b",
        r"\b(?:contain|host|deploy|serv|load)\w* (?:\w+ ){0,2}(?:\d{2,3}|hundreds of|dozens of|many) (?:\w+ )?models\b",
        r"\bnot (?:enough )?(?:memory |load |loading |keep |hold )(?:for )?(?:all |both )(?:the |of the )?"
        r"[^.\n]{0,40}\bmodels?\b",
        r"\b(?:all|both|two) (?:the )?models (?:at the same time|at once|in memory|on the gpu)\b",
    ),
    "left_over": said_as(
        rf"\b(?:{_GONE})\b[^.\n]{{0,90}}\b(?:{_GPU_MEMORY})\b[^.\n]{{0,50}}\b(?:{_STAYS})",
        rf"\b(?:{_GPU_MEMORY})\b(?:(?!\bwhile\b)[^.\n]){{0,50}}\b(?:{_STAYS})[^.\n]{{0,90}}\b(?:{_GONE})\b",
        rf"\b(?:{_NOTHING_RUNS})\b[^\n]{{0,120}}\b(?:{_STAYS})",
        rf"\b(?:{_STAYS})[^\n]{{0,120}}\b(?:{_NOTHING_RUNS})\b",
        r"\b(?:zombies?|orphan(?:ed)?|defunct|ghost|stale|left-?over|lingering|dangling"
        r"|(?:hung|stuck)(?! (?:in|at|on|with|when|while)))\b[^.\n]{0,30}"
        r"\b(?:process\w*|jobs?|python|kernels?|memory|gpus?|contexts?|threads?)\b",
        r"fuser -v ?/dev|kill -9 (?:the |all |<?pid)",
        r"(?:memory|gpu|card|vram) (?:is |was |being )?already (?:being )?(?:in use|used|occupied|taken"
        r"|allocated|full)",
        r"(?:僵尸|残留|孤儿|后台)\S{0,4}进程|进程[^\n]{0,12}(?:残留|没有?(?:结束|退出|杀掉)|仍(?:然)?占)"
        r"|(?:停止|结束|退出|中断|杀掉|杀死|ctrl ?\+?c)[^\n]{0,16}(?:显存|gpu)[^\n没未]{0,8}(?:没有?释放|仍|还(?:在|被)"
        r"|占(?!用率|满))",
    ),
    "alone": said_as(
        r"\botherwise (?:empty|idle|free|unused)\b",
        r"\bnvidia-smi\W{0,3} (?:only |just )(?:lists?|shows?) (?:my|one|this|a single)\b",
        r"\bno other (?:process|program|job)\w*\b[^.\n]{0,30}\b(?:gpus?|cards?|devices?|running)\b",
        r"\bnothing else (?:is |was )?(?:running|using|on the gpu)\b",
        r"(?:\bno|n't (?:have|see|run)|\bnot (?:have|run)(?:ning)?)(?: any)? other (?:process|program|app)\w*"
        r" (?:is |are )?(?:running|open)\b", r"没有其[他它](?:进程|程序)",
    ),
    "device_idle": said_as(
        r"(?<!not )(?<!n't )(?<!never )\b(?:ha(?:ve|s|d|ving)|got|with|despite|is|are|was|be|still)\s"
        r"(?:(?!not\b|no\b)\w+\s){0,3}"
        r"(?:plenty of|(?<!not )enough|sufficient|lots of)\s(?:free |available )?(?:gpu |video )?(?:memory|vram)\b",
        r"\|\s+0mib / +\d{4,6}mib \|",
        r"(?:memory|vram) is (?:available|free)",
        r"(?:not|n't) (?:using|use|taking|take) (?:too |that |so )?much (?:(?:system|cpu) or )?"
        r"(?:gpu |video )(?:memory|ram)", r"free gpu oom", r"although memory is available",
        r"\bgpus?\b[^.\n]{0,40}\b(?:are|is|was|were) (?:\w+ )?(?:empty|idle|not (?:in use|used))\b",
        r"显存(?:还有|足够|充足)|显存(?:(?!不|没|未)[^\n，。]){0,6}够(?!吗|么|[^\n，。]{0,4}[?？])",
        r"显存[^\n。]{0,16}占用(?:却|也|都)?(?:很|特别|非常)?(?:低|少|小)",
        r"显存(?:很|几乎|基本)(?:空|没(?:有)?(?:被)?占用)",
    ),
}  # fmt: skip
