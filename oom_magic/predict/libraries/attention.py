"""Attention of other packages: a stand-in for flash_attn where it is not installed, and flex_attention uncompiled.

flash_attn's kernels are those that PyTorch took over as ``aten::_flash_attention_forward``, with the same outputs and
scratch (flash-attention, csrc/flash_attn/flash_api.cpp).

``flex_attention`` outside of compiled code is PyTorch's own dense implementation, which makes the whole score matrix.
On CUDA it is traced first and then run operator by operator (the compiler's backend "eager"); here it is run without
the tracing. Inside ``torch.compile`` the compiler follows it. Source: torch/_higher_order_ops/flex_attention.py.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from oom_magic.language import _
from oom_magic.predict import torch_private
from oom_magic.predict.fake_cuda.device_view import view_hidden
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import META
from oom_magic.predict.isolation.patching import Patches, all_patched, patched
from oom_magic.predict.libraries.adapters import Adapter, Run
from oom_magic.predict.operators.attention import flash_attend

_VERSION = "2.8.3"
_CHECKS = ("_flash_attn_can_dispatch", "_flash_attn_2_can_dispatch", "_check_and_enable_flash_attn_2")


def _flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
) -> Any:  # fmt: skip
    """(batch, length, heads, head size) in and out."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return flash_attend(query, key, value, dropout_p, causal, softmax_scale).transpose(1, 2)


def _flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    block_table: Any = None,
) -> Any:  # fmt: skip
    """(tokens of all sequences, heads, head size) in and out."""
    return _flash_attn_func(q[None], k[None], v[None], dropout_p, softmax_scale, causal)[0]


def _flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(_("flash_attn_with_kvcache is for generation only; a dry run has no substitute for it."))


def _index_first_axis(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, *tensor.shape[2:])[indices] if tensor.dim() > 2 else tensor[indices]


def _unpad_input(hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: Any = None) -> Any:
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(attention_mask.flatten(), as_tuple=False).flatten()
    bounds = pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, bounds, int(lengths.max().item()), lengths


def _pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    padded[indices] = hidden_states
    return padded.view(batch, seqlen, *hidden_states.shape[1:])


def _stand_ins() -> dict[str, ModuleType]:
    contents: dict[str, dict[str, Any]] = {
        "flash_attn": {
            "__version__": _VERSION,
            "flash_attn_func": _flash_attn_func,
            "flash_attn_varlen_func": _flash_attn_varlen_func,
            "flash_attn_with_kvcache": _flash_attn_with_kvcache,
        },
        "flash_attn.bert_padding": {
            "index_first_axis": _index_first_axis,
            "pad_input": _pad_input,
            "unpad_input": _unpad_input,
        },
    }
    modules = {}
    for name, names in contents.items():
        module = modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=name == "flash_attn")
        vars(module).update(names)
    return modules


@contextmanager
def _installed() -> Iterator[None]:
    """Makes the package visible to imports and ``importlib.metadata``."""
    version, distributions = importlib.metadata.version, importlib.metadata.packages_distributions

    def version_of(name: str) -> str:
        return _VERSION if name in ("flash_attn", "flash-attn") else version(name)

    def packages() -> Any:
        return {**distributions(), "flash_attn": ["flash-attn"]}

    modules = _stand_ins()
    sys.modules.update(modules)
    try:
        with patched(importlib.metadata, {"version": version_of, "packages_distributions": packages}):
            yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


@contextmanager
def _at_request(module: ModuleType, run: Run) -> Iterator[None]:
    """Stand in from the moment that flash attention is requested for a model."""
    owner = module.PreTrainedModel
    utils = sys.modules["transformers.utils.import_utils"]
    flash = sys.modules["transformers.modeling_flash_attention_utils"]
    with ExitStack() as stack:

        def checked(check: Callable[..., Any]) -> Callable[..., Any]:
            def dispatch(*args: Any, **kwargs: Any) -> Any:
                if importlib.util.find_spec("flash_attn") is None:
                    stack.enter_context(_installed())
                    known = getattr(utils, "PACKAGE_DISTRIBUTION_MAPPING", {})  # before 5.21: asked once, at import
                    stack.enter_context(_restored(known))
                    known["flash_attn"] = ["flash-attn"]
                    _forget_answers(utils)
                    if not hasattr(flash, "lazy_import_flash_attention"):  # it is then looked up on import only
                        with _a_cuda_build():
                            importlib.reload(flash)
                    run.assume(_("flash_attn is not installed here; PyTorch's flash attention is used instead"))
                for name, missing in _models_without(flash):
                    stack.enter_context(_restored(vars(sys.modules[name])))
                    vars(sys.modules[name]).update(missing)
                with _a_cuda_build():
                    return check(*args, **kwargs)

            return dispatch

        stack.enter_context(_restored(vars(flash)))  # the module keeps the functions that it finds
        checks = {name: owner.__dict__[name] for name in _CHECKS if name in owner.__dict__}
        stack.enter_context(patched(owner, {name: _like(check, checked) for name, check in checks.items()}))
        yield
    _forget_answers(utils)


def _models_without(flash: ModuleType) -> Iterator[tuple[str, dict[str, Any]]]:
    """Modules of models that asked for flash_attn when they were imported, and what they then did not import.

    transformers before version 5 has such models: GPTBigCode, Jamba, DBRX. Attributes are read from the module's dict:
    getattr on a module that imports lazily fails where the imports are not installed.
    """
    function = getattr(flash, "_flash_attention_forward", None)
    for name, module in list(sys.modules.items()):
        names = vars(module) if name.startswith("transformers.models.") else {}
        asked = "is_flash_attn_2_available" in names
        if asked and function is not None and "_flash_attention_forward" not in names:
            yield name, {"_flash_attention_forward": function}


def _a_cuda_build() -> AbstractContextManager[None]:
    """A CUDA version for transformers before version 5, which asks for it and caches the answer."""
    return patched(torch.version, {"cuda": torch.version.cuda or "12.8"})


@contextmanager
def _restored(names: dict[str, Any]) -> Iterator[None]:
    before = dict(names)
    try:
        yield
    finally:
        for name in names.keys() - before.keys():
            del names[name]
        names.update(before)


def _like(check: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    return classmethod(wrap(check.__func__)) if isinstance(check, classmethod) else wrap(check)


def _forget_answers(module: ModuleType) -> None:
    for value in vars(module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@contextmanager
def _dense(module: ModuleType, run: Run) -> Iterator[None]:
    torch_private.check(torch_private.FLEX_ATTENTION)
    operators = import_module("torch._higher_order_ops.flex_attention")  # the package has an operator of this name
    table: Patches = [
        (module, {"_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True}),
        (operators, {"create_fw_bw_graph": _traced_apart(operators.create_fw_bw_graph)}),
    ]
    with (
        all_patched(table),
        _followed(operators.flex_attention, _traced_at_first(operators.sdpa_dense, run)),
        _followed(operators.flex_attention_backward, operators.sdpa_dense_backward),
    ):
        yield


def _traced_at_first(dense: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """``dense``, of whose first call a real run keeps more: tracing it leaves cycles that refer to its inputs."""
    is_first = iter((True,))

    def attend(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if next(is_first, False):
            for one in (query, key, value):
                run.gpu.note_freed_late(one)
            run.assume(
                _(
                    "flex_attention outside of torch.compile: PyTorch traces its first call, which may hold that call's"
                    " query, key and value until Python's garbage collector runs"
                )
            )
        return dense(query, key, value, *args, **kwargs)

    return attend


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


def _traced_apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """``create_fw_bw_graph``: the gradient of ``score_mod`` is traced with scalars that are on no pretend GPU.

    The tensors that ``score_mod`` captures have no data, so the scalars have none either. Raises NotImplementedError if
    a captured tensor is trained, since only compiled code computes its gradient.
    """
    from torch._guards import TracingContext
    from torch._subclasses import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    def create_fw_bw_graph(score_mod: Any, examples: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
        if any(isinstance(one, (FakeTensor, FunctionalTensor)) for one in examples):  # a compiler's
            return original(score_mod, examples, others)
        with view_hidden(), _disable_current_modes():
            place = META if TracingContext.try_get() is None else "cpu"  # a compiler's constants are on the host
            alike = [
                torch.zeros((), dtype=one.dtype, device=place, requires_grad=one.requires_grad) for one in examples
            ]
            forward, joint = original(score_mod, tuple(alike), others)
        captured = (value for name, value in vars(joint).items() if name.startswith("_tensor_constant"))
        if any(one.requires_grad for one in (*joint.parameters(), *joint.buffers(), *captured)):
            raise NotImplementedError(
                _(
                    "flex_attention: a tensor captured by its score_mod requires gradients, which a dry run"
                    " supports only inside torch.compile."
                )
            )
        return forward, joint

    return create_fw_bw_graph


ADAPTERS: dict[str, Adapter] = {
    "transformers.modeling_utils": _at_request,
    "torch.nn.attention.flex_attention": _dense,
}
