"""What is asked of an operator at each of its calls, looked up once: an OpOverload's hash is Python code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.places import Handler
from oom_magic.predict.operators.calls import Call, find_overload
from oom_magic.predict.operators.gradients import may_be_in_place
from oom_magic.predict.operators.type_checks import check_of

Rule = Callable[[Call], None]

# PyTorch's own operators; those of other namespaces belong to libraries, whose kernels are unknown.
_OF_PYTORCH = frozenset({
    "aten", "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "debugprims", "_dtensor",
    "export", "fsdp", "inductor", "inductor_prims", "mkldnn", "_native", "prim", "prims", "profiler", "quantized",
    "_quantized", "quantized_decomposed", "rngprims", "sparse", "streams", "symm_mem",
})  # fmt: skip
_aten = torch.ops.aten
_UNCOUNTED = frozenset({  # of PyTorch's own those whose kernels take memory that no rule counts
    _aten.linalg_matrix_exp.default, _aten._fft_c2c.default, _aten._fft_c2r.default,
    _aten._fft_r2c.default, _aten._linalg_det.default, _aten._linalg_eigh.default,
    _aten._linalg_slogdet.default, _aten._linalg_solve_ex.default, _aten._linalg_svd.default,
    _aten.linalg_cholesky_ex.default, _aten.linalg_eig.default, _aten.linalg_inv_ex.default,
    _aten.linalg_lu_factor_ex.default, _aten.linalg_qr.default,
})  # fmt: skip
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
# Functions that C++ calls on a subclass (such as a FakeTensor) from noexcept code, where an exception would end the
# process. Source: torch/csrc/autograd/input_metadata.cpp, torch/csrc/PyInterpreter.cpp.
_QUERIES = frozenset(
    {torch.ops.prim.device.default, torch.ops.prim.layout.default}
    | {
        overload
        for name in (
            "dim", "is_contiguous", "is_contiguous.memory_format", "is_non_overlapping_and_dense",
            "is_strides_like_format", "size", "stride", "storage_offset", "sym_is_contiguous", "sym_numel", "sym_size",
            "sym_storage_offset", "sym_stride",
        )
        if (overload := find_overload(name)) is not None
    }
)  # fmt: skip


class Operator:
    """One operator. ``handler`` runs instead of it; ``rule`` says how CUDA's takes memory, ``check`` what it refuses.

    ``is_composite``: autograd decomposes it, so that it arrives here only in inference mode. ``is_view``: its result
    takes no memory.
    """

    __slots__ = (
        "check", "handler", "is_composite", "is_mutable", "is_query", "is_uncounted", "is_view", "may_be_in_place",
        "name", "returns_alias", "rule",
    )  # fmt: skip

    def __init__(self, func: OpOverload, table: OperatorTable) -> None:
        self.is_query = func in _QUERIES  # of which C++ knows no kernels
        has_kernel = not self.is_query and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
        self.name = func.name()
        self.handler = table.handlers.get(func)
        self.rule = table.rules.get(func)
        self.check = check_of(func)
        self.is_composite = has_kernel and func not in table.fused
        self.is_mutable = func._schema.is_mutable
        self.returns_alias = func.is_view
        # a composite one, such as reshape, may copy; the others are not called views, and are
        is_alias = func.overloadpacket in (_aten.set_, _aten._unsafe_view)
        self.is_view = is_alias or (func.is_view and not self.is_composite)
        self.may_be_in_place = may_be_in_place(func)
        self.is_uncounted = func in _UNCOUNTED or (func.namespace not in _OF_PYTORCH and self.rule is None)


class OperatorTable:
    """The operators by PyTorch's object. ``fused``: outputs of what is one kernel on CUDA only."""

    def __init__(self, handlers: Mapping[OpOverload, Handler], rules: Mapping[OpOverload, Rule]) -> None:
        self.handlers = dict(handlers)
        self.rules = dict(rules)
        self.fused: dict[OpOverload, Callable[..., Any]] = {}
        self._known: dict[OpOverload, Operator] = {}

    def of(self, func: OpOverload) -> Operator:
        """What is known of an operator."""
        known = self._known.get(func)
        if known is None:
            known = self._known[func] = Operator(func, self)
        return known

    def fuse(self, fused: Mapping[OpOverload, Callable[..., Any]]) -> None:
        """Add to ``fused``."""
        self.fused.update(fused)
        self._known.clear()

    @contextmanager
    def extended(
        self, handlers: Mapping[OpOverload, Handler], rules: Mapping[OpOverload, Rule] | None = None
    ) -> Iterator[None]:
        """Use these first inside the block."""
        before = self.handlers, self.rules
        self.handlers, self.rules = {**self.handlers, **handlers}, {**self.rules, **(rules or {})}
        self._known.clear()
        try:
            yield
        finally:
            self.handlers, self.rules = before
            self._known.clear()
