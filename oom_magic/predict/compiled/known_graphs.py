"""What Inductor made of a graph, kept for the process's next dry runs: compiled once, its code is loaded again.

PyTorch decides when two graphs are the same (``FxGraphCache.prepare_key``: operators, metadata of inputs, settings,
versions, and what must not be cached); the key has the card too, and the user's lines that the graph is attributed to.
Graphs with symbolic sizes are compiled anew, since compiling them guards sizes. A kernel is timed again at its first
launch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from oom_magic.predict.compiled.generated import Generated, load_again, origin_of
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.isolation.patching import Patches

_MOST_KEPT = 256


@dataclass(frozen=True)
class _Known:
    """What ``fx_codegen_and_compile`` returned, without its module, and the code in that."""

    graph: Any
    code: Generated


_known: dict[Hashable, _Known] = {}


def graphs_known(gpu: FakeGPU, generated: list[Generated]) -> Patches:
    """Inductor compiles what is not known yet; the last of ``generated`` is the code that it then made."""
    from torch._inductor import compile_fx

    usual: Callable[..., Any] = compile_fx.fx_codegen_and_compile

    def fx_codegen_and_compile(module: Any, inputs: Any, inputs_to_check: Any, *args: Any, **kwargs: Any) -> Any:
        key = None if args else _key(gpu, module, inputs, inputs_to_check, kwargs)
        known = _known.get(key)
        if known is not None:
            made = copy.copy(known.graph)
            made.current_callable = load_again(known.code, gpu).call
            return made
        generated.clear()
        made = usual(module, inputs, inputs_to_check, *args, **kwargs)
        if key is not None and len(generated) == 1 and not getattr(made, "constants", None):
            graph = copy.copy(made)
            graph.prepare_for_serialization()  # without its callables
            _known[key] = _Known(graph, generated[0])
            while len(_known) > _MOST_KEPT:
                del _known[next(iter(_known))]
        return made

    return [(compile_fx, {"fx_codegen_and_compile": fx_codegen_and_compile})]


def _key(gpu: FakeGPU, module: torch.fx.GraphModule, inputs: Any, to_check: Any, settings: Any) -> Hashable:
    """What tells a graph from others; None where it must be compiled anew."""
    from torch._inductor.codecache import FxGraphCache

    if any(isinstance(one, torch.SymInt) for one in inputs):
        return None
    key, _info = FxGraphCache.prepare_key(module, inputs, settings, to_check, False)
    origins = tuple(map(origin_of, module.graph.nodes))
    return None if key is None else (key[0], gpu.card.name, origins)
