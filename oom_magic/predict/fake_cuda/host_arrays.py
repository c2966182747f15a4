"""NumPy arrays of pretended tensors: of any shape in the memory of one number, also after what metrics do with them.

Predictions that an evaluation collects would fill the host: 600 x 256 x 30,000 of them are 18 GiB, which a copy takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class HostArray(np.ndarray[Any, Any]):
    """An array with equal numbers along the axes that have a stride of 0, stored once."""

    _stored: np.ndarray[Any, Any] | None = None  # of one that was filled
    __array_priority__ = 1.0  # joined to others it stays one: code compares the types of what it joins

    @classmethod
    def of(cls, value: Any, shape: Sequence[int]) -> HostArray:
        """``value``, an array or number, broadcast."""
        return np.broadcast_to(value, tuple(shape)).view(cls)

    def _short(self, first_axis: int = 0) -> np.ndarray[Any, Any]:
        """The same with one number of each such axis, from ``first_axis`` on."""
        cut = [slice(1) if stride == 0 else slice(None) for stride in self.strides[first_axis:]]
        return self.view(np.ndarray)[(*[slice(None)] * first_axis, *cut)]

    def _is_equal_along(self, axes: Sequence[bool]) -> bool:
        return len(axes) == self.ndim and not any(
            one and stride for one, stride in zip(axes, self.strides, strict=True)
        )

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Compute elementwise functions once for each stored number."""
        if method != "__call__" or "out" in options or ufunc.nout > 1 or ufunc.signature is not None:
            plain = [one.view(np.ndarray) if isinstance(one, HostArray) else one for one in inputs]
            return getattr(ufunc, method)(*plain, **options)
        result = ufunc(*[one._short() if isinstance(one, HostArray) else one for one in inputs], **options)
        return HostArray.of(result, np.broadcast_shapes(*map(np.shape, inputs)))

    def __array_function__(self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        """Concatenate, stack and pad such arrays without copying equal numbers."""
        if func is np.concatenate and not kwargs.keys() - {"axis"}:
            arrays, axis = args[0], kwargs.get("axis", args[1] if len(args) > 1 else 0)
            if axis is not None and all(isinstance(one, HostArray) for one in arrays):
                return _concatenated(arrays, axis)
        if func is np.full_like and len(args) == 2 and not kwargs.keys() - {"shape"}:
            return self._filled(args[1], kwargs.get("shape", self.shape))
        return super().__array_function__(func, types, args, kwargs)

    def _filled(self, number: Any, shape: Sequence[int]) -> HostArray:
        """An array of ``number``, to be set in parts: rows and columns are stored, since padding differs there."""
        is_short = [at > 1 and self.strides[at : at + 1] == (0,) for at in range(len(shape))]
        lengths = [1 if short else length for short, length in zip(is_short, shape, strict=True)]
        stored = np.full(lengths, number, dtype=self.dtype)
        made = HostArray.of(stored, shape)
        made._stored = stored
        return made

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set rows and columns of an array that was filled, to numbers that are equal where it has one."""
        stored, keys = self._stored, key if isinstance(key, tuple) else (key,)
        is_short = [] if stored is None else [one < all_ for one, all_ in zip(stored.shape, self.shape, strict=True)]
        are_parts = len(keys) < 3 and all(isinstance(one, slice) for one in keys)
        if stored is None or not are_parts or not isinstance(value, HostArray) or not value._is_equal_along(is_short):
            super().__setitem__(key, value)  # which NumPy refuses where it is read-only
            return
        stored[key] = value.view(np.ndarray)[tuple(slice(1) if short else slice(None) for short in is_short)]

    def __getitem__(self, key: Any) -> Any:
        """The rows that a mask or numbers select."""
        if not isinstance(key, np.ndarray) or not key.ndim:
            return super().__getitem__(key)
        chosen = self._short(key.ndim if key.dtype == bool else 1)[key]
        num_chosen = 1 if key.dtype == bool else key.ndim
        rest = self.shape[key.ndim if key.dtype == bool else 1 :]
        return HostArray.of(chosen, (*chosen.shape[:num_chosen], *rest))

    def argmax(self, axis: Any = None, out: Any = None, **options: Any) -> Any:
        """0 where all are alike."""
        return self._first(super().argmax, axis, out, options)

    def argmin(self, axis: Any = None, out: Any = None, **options: Any) -> Any:
        """0 where all are alike."""
        return self._first(super().argmin, axis, out, options)

    def _first(self, original: Callable[..., Any], axis: Any, out: Any, options: dict[str, Any]) -> Any:
        if axis is None or out is not None or self.strides[axis] != 0:
            return original(axis, out, **options)
        shape = [1 if at == axis % self.ndim else length for at, length in enumerate(self.shape)]
        zeros = HostArray.of(np.zeros((), dtype=np.intp), shape)
        return zeros if options.get("keepdims") else zeros[_along(axis, self.ndim, 0)]


def _concatenated(arrays: Sequence[HostArray], axis: int) -> HostArray:
    """One array, whose axes have one number where all of them do."""
    alike = [not any(strides) for strides in zip(*(one.strides for one in arrays), strict=True)]
    cut = tuple(slice(1) if is_alike else slice(None) for is_alike in alike)
    short = np.concatenate([one.view(np.ndarray)[cut] for one in arrays], axis)
    shape = list(arrays[0].shape)
    shape[axis] = sum(one.shape[axis] for one in arrays)
    return HostArray.of(short[_along(axis, short.ndim, slice(1))] if alike[axis] else short, shape)


def _along(axis: int, num_axes: int, part: Any) -> tuple[Any, ...]:
    """The index that selects ``part`` of an axis."""
    return tuple(part if at == axis % num_axes else slice(None) for at in range(num_axes))
