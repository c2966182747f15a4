"""Where and with what a run runs, as a text tells: its libraries, system and allocator, and the limits it was given.

Limits are found in any of their spellings: the share of a server, contexts, layers, workers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_LONGEST_READ = 200_000
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
    if found.get("layers", 0) >= _ALL_LAYERS:
        del found["layers"]
    return {name: value for name, value in found.items() if value}
