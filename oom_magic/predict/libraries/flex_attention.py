"""``flex_attention`` outside of compiled code: PyTorch's own dense implementation, which makes the whole score matrix.

On CUDA it is traced first and then run operator by operator (the compiler's backend "eager"); here it is run without
the tracing. Inside ``torch.compile`` the compiler follows it. Source: torch/_higher_order_ops/flex_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from oom_magic.predict.fake_cuda.device_view import view_hidden
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.isolation.patching import Patches, all_patched
from oom_magic.predict.libraries.adapters import Adapter, Run


@contextmanager
def _dense(module: ModuleType, run: Run) -> Iterator[None]:
    operators = import_module("torch._higher_order_ops.flex_attention")  # its package names the operator alike
    table: Patches = [
        (module, {"_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True}),
        (operators, {"create_fw_bw_graph": _traced_on_the_host(operators.create_fw_bw_graph)}),
    ]
    with (
        all_patched(table),
        _followed(operators.flex_attention, operators.sdpa_dense),
        _followed(operators.flex_attention_backward, operators.sdpa_dense_backward),
    ):
        yield


@contextmanager
def _followed(operator: Any, dense: Callable[..., Any]) -> Iterator[None]:
    """The operator on the pretend GPU: what it is made of, below autograd."""

    def run(gpu: FakeGPU, *args: Any, **kwargs: Any) -> Any:
        with gpu:
            return dense(*args, **kwargs)

    operator.python_key_table[FakeGPU] = run
    try:
        yield
    finally:
        del operator.python_key_table[FakeGPU]


def _traced_on_the_host(usual: Callable[..., Any]) -> Callable[..., Any]:
    """``create_fw_bw_graph``: the gradient of ``score_mod`` is traced with scalars that are on no pretend GPU."""

    def create_fw_bw_graph(score_mod: Any, examples: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
        if any(isinstance(one, FakeTensor) for one in examples):  # a compiler's
            return usual(score_mod, examples, others)
        with view_hidden(), _disable_current_modes():
            real = [torch.zeros((), dtype=one.dtype, requires_grad=one.requires_grad) for one in examples]
            return usual(score_mod, tuple(real), others)

    return create_fw_bw_graph


ADAPTERS: dict[str, Adapter] = {"torch.nn.attention.flex_attention": _dense}
