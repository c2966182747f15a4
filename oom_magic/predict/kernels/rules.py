"""How CUDA's kernels take memory: the rules of operators that do more than make their outputs in order."""

from __future__ import annotations

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
    found = {}
    for operator, rule in rules.items():
        packet, name = operator.overloadpacket, operator._overloadname
        names = {"out", "values"} if name == "default" else {f"{name}_out"}
        found.update({getattr(packet, one): rule for one in names & set(packet.overloads())})
        if name == "default":
            in_place = find_overload(f"{packet.__name__}_")
            found.update({} if in_place is None else {in_place: rule})
    return found
