"""How CUDA's kernels take memory: the rules of operators that do more than make their outputs in order."""

from __future__ import annotations

from functools import cache

from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.operator_table import Rule
from oom_magic.predict.kernels import (
    convolutions,
    copies,
    fused_attention,
    indexing,
    losses,
    normalization,
    recurrent,
    reductions,
)
from oom_magic.predict.kernels.matrix_products import product_rules
from oom_magic.predict.operators.calls import find_overload
from oom_magic.predict.setups.gpus import GPU


def kernel_rules(gpu: GPU) -> dict[OpOverload, Rule]:
    """The rule of each operator that has one, on this card; variants that write into given outputs have the same."""
    rules = {
        **copies.RULES,
        **losses.RULES,
        **normalization.RULES,
        **convolutions.RULES,
        **recurrent.RULES,
        **product_rules(gpu),
        **reductions.RULES,
        **indexing.RULES,
        **fused_attention.RULES,
    }
    return {**_into_given(rules), **rules}


def _into_given(rules: dict[OpOverload, Rule]) -> dict[OpOverload, Rule]:
    """The variants with ``out=``, and those that write into their first argument."""
    return {variant: rule for operator, rule in rules.items() for variant in _variants(operator)}


@cache
def _variants(operator: OpOverload) -> list[OpOverload]:
    """Those that take the same arguments beside what they write their results into, and ``relu_`` of ``relu``."""
    packet = operator.overloadpacket
    found = [getattr(packet, name) for name in packet.overloads()]
    found = [one for one in found if one is not operator and _taken(one) == _taken(operator)]
    in_place = find_overload(f"{packet.__name__}_") if operator._overloadname == "default" else None
    return found if in_place is None else [*found, in_place]


def _taken(operator: OpOverload) -> list[tuple[str, str]]:
    """The names and types of an operator's arguments, without those that it writes its results into."""
    return [(one.name, str(one.type)) for one in operator._schema.arguments if not one.is_out]
