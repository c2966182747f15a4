"""Graphs that Inductor compiled before, in this process or another: its part of compiling, the longest, is done once.

PyTorch decides when two graphs are the same (``FxGraphCache.prepare_key``: operators, metadata of inputs, settings,
versions, and what must not be cached). Here the key has the card too, and the lines of the user that the graph is
attributed to: by number, since a notebook's cell is another file in each process. Graphs with symbolic sizes are
compiled anew, since compiling them guards sizes. A kernel is timed again at its first launch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from oom_magic.predict.compiled.generated import Generated, load_again, origin_of
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.instrumentation.attribution import Origin
from oom_magic.predict.isolation.patching import Patches, suspended
from oom_magic.predict.sizing import store

_MOST_KEPT = 256  # graphs


@dataclass(frozen=True)
class _Known:
    """What ``fx_codegen_and_compile`` returned, without its module, and the code in that; files are numbered."""

    graph: Any
    code: Generated


in_memory: dict[str, _Known] = {}
_used: set[str] = set()  # keys, since they were last stored


def graphs_known(gpu: FakeGPU, generated: list[Generated]) -> Patches:
    """Inductor compiles only graphs that are not known yet; the last of ``generated`` is the code that it generates for
    one."""
    from torch._inductor import compile_fx

    usual: Callable[..., Any] = compile_fx.fx_codegen_and_compile

    def fx_codegen_and_compile(module: Any, inputs: Any, inputs_to_check: Any, *args: Any, **kwargs: Any) -> Any:
        origins = list(map(origin_of, module.graph.nodes))
        files = dict.fromkeys(one.line[0] for one in origins if one.line)
        numbers = {file: str(number) for number, file in enumerate(files)}
        key = None if args else _key(gpu, module, inputs, inputs_to_check, kwargs, _in_files(origins, numbers))
        known = _find(key)
        if known is not None:
            made = copy.copy(known.graph)
            files_again = {number: file for file, number in numbers.items()}
            module = load_again(_moved(known.code, files_again), gpu)
            made.current_callable = module.call
            made.recursively_apply_fns = getattr(module, "recursively_apply_fns", None)  # of parts with CUDA graphs
            return made
        generated.clear()
        made = usual(module, inputs, inputs_to_check, *args, **kwargs)
        if key is not None and len(generated) == 1 and not getattr(made, "constants", None):
            compiled = copy.copy(made)
            compiled.prepare_for_serialization()  # without its callables
            in_memory[key] = _Known(compiled, _moved(generated[0], numbers))
            while len(in_memory) > _MOST_KEPT:
                del in_memory[next(iter(in_memory))]
        return made

    return [(compile_fx, {"fx_codegen_and_compile": fx_codegen_and_compile})]


def _find(key: str | None) -> _Known | None:
    """The graph of this key, from memory or from the user's cache folder."""
    if key is None:
        return None
    _used.add(key)
    if key not in in_memory:
        with suspended(None):
            found = store.recall(key)
        if found is not None:
            in_memory[key] = found
    return in_memory.get(key)


def keep() -> None:
    """Store what dry runs compiled in the user's cache folder; none may be running."""
    for key in _used & in_memory.keys():
        store.keep(key, in_memory[key])
    _used.clear()


def _key(
    gpu: FakeGPU, module: torch.fx.GraphModule, inputs: Any, to_check: Any, settings: Any, origins: list[Origin]
) -> str | None:
    """The cache key of a graph; None where it must be compiled again."""
    from torch._inductor.codecache import FxGraphCache

    if any(isinstance(one, torch.SymInt) for one in inputs):
        return None
    key, _info = FxGraphCache.prepare_key(module, inputs, settings, to_check, False)
    return None if key is None else repr((key[0], gpu.card.name, origins))


def _moved(code: Generated, files: Mapping[str, str]) -> Generated:
    """The same code, whose origins are in other files."""
    return Generated(code.source, dict(zip(code.origins, _in_files(list(code.origins.values()), files), strict=True)))


def _in_files(origins: list[Origin], files: Mapping[str, str]) -> list[Origin]:
    return [
        one if one.line is None else one._replace(line=(files.get(one.line[0], one.line[0]), one.line[1]))
        for one in origins
    ]
