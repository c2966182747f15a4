"""Which line and which module of the user's each line of Inductor's generated code stands for.

Dynamo notes with every operator the user's lines that led to it and the modules that were running; Inductor notes from
which operators it made a buffer (``torch/_inductor/ir.py``, ``origins``); a line of the code that it writes names the
buffer that it makes.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from oom_magic.predict.instrumentation.attribution import Origin
from oom_magic.user_code import is_users_file

_BUFFER = re.compile(r"^\s+(\w+) = |\bout=(\w+)")
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)
_MODULE = re.compile(r"[LG]\['(\w+)'\](.*)")  # torch/_dynamo/source.py: local or global variable, and the way from it


def origins_of(lowering: Any, source: str) -> dict[int, Origin]:
    """Of lines of ``source``, the code that ``lowering`` became: what they stand for, by number from 1."""
    order = {node: number for number, node in enumerate(lowering.graph.nodes)}
    known: dict[str, Origin | None] = {}
    found = {}
    for number, line in enumerate(source.splitlines(), 1):
        match = _BUFFER.search(line)
        if match is None:
            continue
        name = match[1] or match[2]
        if name not in known:
            node = _node(lowering.name_to_buffer.get(name), order)
            known[name] = None if node is None else _origin(node)
        origin = known[name]
        if origin is not None:
            found[number] = origin
    return found


def _node(buffer: Any, order: dict[torch.fx.Node, int]) -> torch.fx.Node | None:
    """The operator that a buffer is the result of: of those fused into it, the last."""
    if buffer is None:
        return None
    node: torch.fx.Node | None = buffer.get_origin_node()
    return node or max(buffer.origins, key=lambda one: order.get(one, -1), default=None)


def _origin(node: torch.fx.Node) -> Origin:
    """The user's innermost line, save in a backward, which runs where the user calls it; and the module."""
    is_backward = node.meta.get("partitioner_tag") == "is_backward"
    frames = [] if is_backward else _FRAME.findall(node.meta.get("stack_trace") or "")
    line = next(((file, int(number)) for file, number in reversed(frames) if is_users_file(file)), None)
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(modules.values()))[0] if modules else ""
    match = _MODULE.fullmatch(path)
    variable, way = (match[1], match[2]) if match else ("", "")
    return Origin(line, "" if variable == "self" else variable, way)
