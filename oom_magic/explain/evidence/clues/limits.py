"""Limits of a run as a text gives them, in any of their spellings: the share of a server, contexts, layers, workers."""

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
_MIB_IN_GIB = 1024
_SHORTEST_NAME = 3  # of an option whose hyphen does not matter


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
