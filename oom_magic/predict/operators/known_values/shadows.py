"""The known values of a storage on the pretend GPU: a constant, or a real copy, of all or a part of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True, eq=False)
class Shadow:
    """The known values of a storage of ``num_bytes``.

    ``constant`` is the one element that all equal; else ``copy`` is a storage on the CPU. ``known`` marks with ones the
    bytes of ``copy`` that are known (None: all of them). Values that follow from an assumption have its sentence in
    ``assumption``.
    """

    num_bytes: int
    constant: torch.Tensor | None = None
    copy: torch.UntypedStorage | None = None
    known: torch.UntypedStorage | None = None
    assumption: str = ""

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether all values of ``tensor``, a view of the storage, are known."""
        return self.known is None or bool(self._marks(tensor).all())

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values under a view of the storage; unknown ones are zero."""
        if self.constant is not None and self.constant.dtype is tensor.dtype:
            return self.constant.expand(tensor.size())
        self.expand()
        assert self.copy is not None
        return _view(self.copy, tensor, tensor.dtype)

    def known_mask(self, tensor: torch.Tensor) -> torch.Tensor:
        """Which elements of a view are known, as booleans."""
        if self.known is None:
            return torch.ones((), dtype=torch.bool).expand(tensor.size())
        return self._marks(tensor) != 0

    def write(self, tensor: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Let a view hold these values, known where ``mask`` is set (None: everywhere)."""
        self.expand()
        self.values(tensor).copy_(values.detach())
        if mask is None and (self.known is None or covers(tensor)):
            self.known = None
            return
        self._mark(tensor, True if mask is None else mask)

    def forget(self, tensor: torch.Tensor) -> None:
        """Something unknown was written into a view."""
        self.expand()
        self._mark(tensor, False)

    def expand(self) -> None:
        """Make a real copy of a constant, to write into."""
        if self.copy is not None:
            return
        self.copy = torch.UntypedStorage(self.num_bytes)
        constant, self.constant = self.constant, None
        if constant is None:  # nothing is known yet
            torch.empty(0, dtype=torch.uint8).set_(self.copy).zero_()  # type: ignore[call-overload]
            self.known = torch.UntypedStorage(self.num_bytes)
            torch.empty(0, dtype=torch.uint8).set_(self.known).zero_()  # type: ignore[call-overload]
        else:
            torch.empty(0, dtype=constant.dtype).set_(self.copy).copy_(constant)  # type: ignore[call-overload]

    def grow(self, num_bytes: int) -> None:
        """The storage has become larger: what is new of it is unknown."""
        self.expand()
        if self.known is None:
            self.known = torch.UntypedStorage(self.num_bytes)
            torch.empty(0, dtype=torch.uint8).set_(self.known).fill_(255)  # type: ignore[call-overload]
        self.copy, self.known = _extended(self.copy, num_bytes), _extended(self.known, num_bytes)
        self.num_bytes = num_bytes

    def _mark(self, tensor: torch.Tensor, mask: torch.Tensor | bool) -> None:
        if self.known is None:
            self.known = torch.UntypedStorage(self.num_bytes)
            torch.empty(0, dtype=torch.uint8).set_(self.known).fill_(255)  # type: ignore[call-overload]
        marks = self._marks(tensor)
        if isinstance(mask, bool):
            marks.fill_(255 if mask and marks.dtype is torch.uint8 else -int(mask))
        else:
            marks.copy_(mask.to(marks.dtype).neg_())

    def _marks(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.known is not None
        if tensor.dtype is torch.complex128:
            return _view(self.known, tensor, torch.complex128).real.view(torch.int64)
        return _view(self.known, tensor, _INTEGERS[tensor.element_size()])


def _extended(storage: torch.UntypedStorage | None, num_bytes: int) -> torch.UntypedStorage:
    """A longer copy; zeros follow."""
    assert storage is not None
    longer = torch.UntypedStorage(num_bytes)
    content = torch.empty(0, dtype=torch.uint8).set_(longer).zero_()  # type: ignore[call-overload]
    content[: storage.nbytes()] = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    return longer


def _view(storage: torch.UntypedStorage, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``storage`` seen as ``tensor`` sees its own."""
    empty = torch.empty(0, dtype=dtype, device="cpu")
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]


def covers(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are all that its storage holds."""
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
