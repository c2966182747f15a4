"""Settings of other programs as lines to copy: spelled as the user calls them, scaled from the values in the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import Formatter

# How a change makes a limit of the present one, and what stands for it where the text does not give that.
_CHANGES: Mapping[str, tuple[Callable[[float], float | str], str]] = {
    "half": (lambda now: max(now // 2, 1), "LESS"),
    "less": (lambda now: max(round(now - 0.1, 2), 0.1), "LESS"),
    "more": (lambda now: min(round(now + 0.05, 2), 0.97), "MORE"),
    "double": (lambda now: 2 * now, "MORE"),
    "gib": (lambda now: f"{2 * now:.0f}G", "MORE"),
}
_WORDS = {"LESS": "a smaller number than now", "MORE": "a larger number than now"}
# What a program takes where nothing is set, by its documentation.
_DEFAULTS = {"vllm": {"share": "0.9"}, "llama_cpp": {"microbatch": "512"}}
# The command that starts a program, and the call from Python.
_STARTS: Mapping[str, tuple[str, str]] = {
    "vllm": ("vllm serve MODEL", "LLM(MODEL, {})"),
    "sglang": ("python -m sglang.launch_server --model-path MODEL", "sgl.Engine(model_path=MODEL, {})"),
    "tgi": ("text-generation-launcher", ""),
    "llama_cpp": ("llama-server -m MODEL.gguf", "Llama(MODEL, {})"),
}
_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "server_share": "--gpu-memory-utilization {share:less}",
        "larger_share": "--gpu-memory-utilization {share:more}",
        "vllm_pictures": "--limit-mm-per-prompt '{{\"image\": 1}}'",
        "shorter_context": "--max-model-len {length:half}",
        "vllm_max_num_seqs": "--max-num-seqs {requests:half} --max-num-batched-tokens {tokens:half}",
        "vllm_eager": "--enforce-eager",
        "tensor_parallel": "--tensor-parallel-size {devices:double}",
    },
    "sglang": {
        "server_share": "--mem-fraction-static {share:less}",
        "larger_share": "--mem-fraction-static {share:more}",
        "sglang_prefill": "--chunked-prefill-size {tokens:half} --cuda-graph-max-bs {graphs:half}",
        "shorter_context": "--context-length {length:half}",
        "tensor_parallel": "--tp {devices:double}",
    },
    "tgi": {
        "tgi_tokens": "--max-batch-prefill-tokens {prefill_tokens:half} --max-batch-total-tokens {total_tokens:half}",
        "tgi_shards": "--num-shard {devices:double}",
    },
    "llama_cpp": {
        "llama_layers": "-ngl {layers:half}",
        "llama_context": "-c {length:half}",
        "llama_cache_type": "-fa on --cache-type-k q8_0 --cache-type-v q8_0",
        "llama_batch": "-ub {microbatch:half}",
        "one_at_a_time": "-np 1",
    },
}  # fmt: skip
_IN_PYTHON = {
    "--tp": "tp_size", "-ngl": "n_gpu_layers", "-c": "n_ctx", "-ub": "n_ubatch", "-fa": "flash_attn",
    "--cache-type-k": "type_k", "--cache-type-v": "type_v", "q8_0": "8", "on": "True",
}  # fmt: skip
_OPTIONS_APART = re.compile(r" (?=-)")
_OPTION = re.compile(r"(?P<name>-[\w-]+)(?: (?P<value>(?!-)(?:'[^']*'|\S+)))?")


@dataclass(frozen=True)
class _Limit:
    """A limit in a template: its format spec is a change of ``_CHANGES``; ``exact`` is what it has to be, if known."""

    now: float | None
    exact: float | None = None

    def __format__(self, change: str) -> str:
        scale, placeholder = _CHANGES[change]
        if self.exact is not None:
            return f"{self.exact:.0f}"
        made = placeholder if self.now is None else scale(self.now)
        return made if isinstance(made, str) else f"{made:.7g}"


def line_of(key: str, program: str, limits: Mapping[str, float], *, in_python: bool, by_command: bool) -> str | None:
    """The line that makes a change in a program, and what it is now; None where the program has no setting for it.

    Empty where it would say no more than the settings' names. It is the whole call only if the text calls the program.
    """
    options = _OPTIONS.get(program, {}).get(key)
    if options is None:
        return None
    defaults = _DEFAULTS.get(program, {})
    parts = _OPTIONS_APART.split(options)
    options = " ".join(one for one in parts if _says_more(one, limits, defaults) and _can_change(one, limits))
    command, call = _STARTS[program]
    if not options:
        return ""
    if not (in_python and call):
        return filled(f"{command} {options}" if by_command else options, limits, defaults)
    code = filled(options, limits, defaults)
    options, mark, note = code.partition("   # ")
    arguments = (f"{_python_name(one['name'])}={_python_value(one['value'])}" for one in _OPTION.finditer(options))
    return call.format(", ".join(arguments)) + mark + note


def _says_more(option: str, limits: Mapping[str, float], defaults: Mapping[str, str]) -> bool:
    """Whether a line with this option says more than its name: a value that is known, or none that is to be known."""
    fields = [name for _, name, _, _ in Formatter().parse(option) if name]
    is_stated = "length" in fields and "held" in limits
    return not fields or is_stated or any(name in limits or name in defaults for name in fields)


def _can_change(option: str, limits: Mapping[str, float]) -> bool:
    """Whether a setting that is to be halved is above 1."""
    return not any(spec == "half" and limits.get(name or "") == 1 for _, name, spec, _ in Formatter().parse(option))


def is_limited(key: str, program: str, limits: Mapping[str, float]) -> bool:
    """Whether the text gives a limit that a change of a program's settings acts on."""
    fields = Formatter().parse(_OPTIONS.get(program, {}).get(key, ""))
    return any(name in limits for _, name, _, _ in fields if name)


def names_of(key: str, program: str, limits: Mapping[str, float], *, in_python: bool) -> str:
    """The names of a change's settings, as a sentence has them; empty where the program has none of its own."""
    parts = _OPTIONS_APART.split(_OPTIONS.get(program, {}).get(key, ""))
    options = " ".join(one for one in parts if _can_change(one, limits))
    names = [one["name"] for one in _OPTION.finditer(options)]
    return ", ".join(map(_python_name, names) if in_python and _STARTS[program][1] else names)


def filled(template: str, limits: Mapping[str, float], defaults: Mapping[str, str] | None = None) -> str:
    """A line with limits scaled as its fields say, and behind it what they are now, or what is left to fill in."""
    fields = [(name, spec or "") for _, name, spec, _ in Formatter().parse(template) if name]
    values = {name: _Limit(limits.get(name), limits.get("held") if name == "length" else None) for name, _ in fields}
    now = [f"{limits[name]:.12g}" for name, _ in fields if name in limits]
    usual = [default for name, _ in fields if (default := (defaults or {}).get(name)) and name not in limits]
    left = dict.fromkeys(word for name, change in fields if (word := format(values[name], change)) in _WORDS)
    notes = [f"now {', '.join(now)}"] if now else []
    notes += [f"{word}: {_WORDS[word]}{f' ({usual[0]} unless set)' if usual else ''}" for word in left]
    return template.format(**values) + (f"   # {'; '.join(notes)}" if notes else "")


def _python_name(option: str) -> str:
    return _IN_PYTHON.get(option, option.lstrip("-").replace("-", "_"))


def _python_value(value: str | None) -> str:
    return "True" if value is None else _IN_PYTHON.get(value, value.strip("'"))
