"""CUDA's autocast on the pretend GPU.

Meta tensors have no autocast key, so the rules are registered, while a dry run lasts, where autograd's kernels are
found. Lists and order of the rules: aten/src/ATen/autocast_mode.h and .cpp (``CachedCast``, ``WrapFunction_``).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.predict.fake_cuda.places import FakeDevice, Place, map_tensors, tensors_in
from oom_magic.predict.operators.calls import Kernel, find_overload

aten = torch.ops.aten

# AT_FORALL_LOWER_PRECISION_FP: arguments are cast to float16 or bfloat16
LOWER_PRECISION = """
_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
"""
# AT_FORALL_FP32: arguments are cast to float32
FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa
"""
# AT_FORALL_FP32_SET_OPT_DTYPE: computed in float32 unless the call names a dtype; the input is not cast before
FLOAT32_RESULT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
# AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: the same for overloads that take no dtype
FLOAT32_NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
# AT_FORALL_PROMOTE: arguments are cast to the widest type among them
PROMOTE = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"


class _Thread(threading.local):
    """Whether autocast is on, on each thread; within how many of its blocks the backward that runs was called."""

    def __init__(self) -> None:
        self.is_on = torch.is_autocast_enabled("cuda")
        self.num_outside: int | None = None


class Autocast:
    """The kernels by operator, and the cache of casted weights (``cached_casts``)."""

    def __init__(self, gpu: FakeDevice) -> None:
        self._gpu = gpu
        self._cache: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._set_enabled = torch.set_autocast_enabled
        self._decrement: Callable[[], int] = torch.autocast_decrement_nesting
        self._thread = _Thread()
        self._prepare: Callable[[], None] | None = None

    def prepare_by(self, prepare: Callable[[], None]) -> None:
        """Call ``prepare`` before autocast is on for the first time, at once if it is: few programs use it."""
        self._prepare = prepare
        if self.is_on:
            self._begin()

    def _begin(self) -> None:
        prepare, self._prepare = self._prepare, None
        if prepare is not None:
            prepare()

    @property
    def is_on(self) -> bool:
        """Whether autocast is on for this thread; kept here because below autograd PyTorch returns False."""
        return self._thread.is_on

    @is_on.setter
    def is_on(self, is_on: bool) -> None:
        self._thread.is_on = is_on

    def clear(self) -> None:
        """What leaving the outermost ``autocast`` block does."""
        self._cache.clear()

    def set_enabled(self, *args: Any) -> None:
        """In place of ``torch.set_autocast_enabled([device_type,] enabled)``."""
        self._set_enabled(*args)
        if args[0] == "cuda" or len(args) == 1:
            if args[-1]:
                self._begin()
            self.is_on = bool(args[-1])

    def counting_apart(self, run_backward: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.autograd._engine_run_backward``, in which blocks are counted from 0 as on CUDA's own thread: leaving
        one there, such as that of a checkpoint, empties the cache though the caller is inside another.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            before = self._thread.num_outside
            if before is None:
                torch.autocast_increment_nesting()
                self._thread.num_outside = self._decrement()
            try:
                return run_backward(*args, **kwargs)
            finally:
                self._thread.num_outside = before

        return run

    def decrement(self) -> int:
        """In place of ``torch.autocast_decrement_nesting()``."""
        return self._decrement() - (self._thread.num_outside or 0)

    def rules(self) -> dict[OpOverload, Callable[[Kernel], Kernel]]:
        """For each operator with a rule, how its kernel is wrapped."""
        rules: dict[OpOverload, Callable[[Kernel], Kernel]] = {}
        for names, rule in (
            (LOWER_PRECISION, self._lower_precision),
            (FLOAT32, self._float32),
            (FLOAT32_RESULT, self._float32_result),
            (PROMOTE, self._promote),
        ):
            rules.update((overload, rule) for overload in map(find_overload, names.split()) if overload is not None)
        for name, with_dtype in FLOAT32_NORM.items():
            found, target = find_overload(name), find_overload(with_dtype)
            if found is not None and target is not None:
                rules[found] = self._norm(target)
        return rules

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        return map_tensors(value, lambda tensor: self._cached_cast(tensor, dtype))

    def _cached_cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not self._is_eligible(tensor) or tensor.dtype is dtype:
            return tensor
        is_cached = (
            torch.is_autocast_cache_enabled()
            and dtype is torch.get_autocast_dtype("cuda")
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
        )
        if not is_cached or torch.is_inference_mode_enabled():
            return aten._to_copy.default(tensor, dtype=dtype)  # type: ignore[no-any-return]
        known = self._cache.get(id(tensor))
        if known is None or known[0]() is not tensor:
            with torch.enable_grad():  # the cached weight is used by code with gradients, too
                known = (weakref.ref(tensor), aten._to_copy.default(tensor, dtype=dtype))
            self._cache[id(tensor)] = known
        return known[1]

    def _is_eligible(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dtype is not torch.float64 and self._gpu.place(tensor) is Place.GPU

    def _lower_precision(self, kernel: Kernel) -> Kernel:
        def cast_down(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return kernel(*args, **kwargs)
            return self._on_cast(kernel, args, kwargs, torch.get_autocast_dtype("cuda"))

        return cast_down

    def _float32(self, kernel: Kernel) -> Kernel:
        def cast_up(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return kernel(*args, **kwargs)
            return self._on_cast(kernel, args, kwargs, torch.float32)

        return cast_up

    def lowered(self, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments in autocast's type."""
        return self._casted(args, kwargs, torch.get_autocast_dtype("cuda"))

    def _casted(self, args: Any, kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
        """C++ casts the last argument first, and drops the first one first."""
        named = {key: self._cast(kwargs[key], dtype) for key in reversed(kwargs)}
        reverse = [self._cast(value, dtype) for value in reversed(args)]
        return reverse[::-1], named

    def _on_cast(self, kernel: Kernel, args: Any, kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
        """Run a kernel on casted arguments."""
        return self._off(kernel, *self._casted(args, kwargs, dtype))

    def _float32_result(self, kernel: Kernel) -> Kernel:
        def set_dtype(*args: Any, **kwargs: Any) -> Any:
            if self.is_on:
                names_dtype = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
                if not names_dtype and self._is_eligible(args[0]):
                    kwargs = {**kwargs, "dtype": torch.float32}
                return self._off(kernel, args, kwargs)
            return kernel(*args, **kwargs)

        return set_dtype

    def _norm(self, with_dtype: OpOverload) -> Callable[[Kernel], Kernel]:
        def wrap(kernel: Kernel) -> Kernel:
            def norm(*args: Any, **kwargs: Any) -> Any:
                if not self.is_on or not self._is_eligible(args[0]):
                    return kernel(*args, **kwargs)
                return self._off(with_dtype, args, {**kwargs, "dtype": torch.float32})

            return norm

        return wrap

    def _promote(self, kernel: Kernel) -> Kernel:
        def widen(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return kernel(*args, **kwargs)
            dtype = torch.get_autocast_dtype("cuda")
            if any(self._is_eligible(t) and t.dtype is torch.float32 for t in tensors_in(args, kwargs)):
                dtype = torch.float32
            return self._on_cast(kernel, args, kwargs, dtype)

        return widen

    def _off(self, kernel: Kernel, args: Any, kwargs: Any) -> Any:
        """Operators inside an autocasted one are not casted again."""
        with self.off():
            return kernel(*args, **kwargs)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Nothing is casted inside, whatever PyTorch says of autocast."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before
