"""How CUDA's kernels take memory: the rules of operators that do more than make their outputs in order."""

from __future__ import annotations

from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.fake_gpu import Rule
from oom_magic.predict.kernels import (
    convolutions,
    copies,
    fused_attention,
    indexing,
    losses,
    normalization,
    recurrent,
    reductions,
    sorting,
)
from oom_magic.predict.kernels.matrix_products import product_rules
from oom_magic.predict.setups.gpus import GPU


def kernel_rules(gpu: GPU) -> dict[OpOverload, Rule]:
    """The rule of each operator that has one, on this card; a variant that writes into given outputs has the same."""
    rules = {
        **copies.RULES,
        **losses.RULES,
        **normalization.RULES,
        **convolutions.RULES,
        **recurrent.RULES,
        **product_rules(gpu),
        **reductions.RULES,
        **indexing.RULES,
        **sorting.RULES,
        **fused_attention.RULES,
    }
    return {**_into_given(rules), **rules}


def _into_given(rules: dict[OpOverload, Rule]) -> dict[OpOverload, Rule]:
    found = {}
    for operator, rule in rules.items():
        if operator._overloadname == "default":
            names = {"out", "values"} & set(operator.overloadpacket.overloads())
            found.update({getattr(operator.overloadpacket, name): rule for name in names})
    return found
