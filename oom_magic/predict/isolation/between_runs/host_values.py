"""Values that a dry run wrote to the user's tensors on the host, for the session's next run."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from oom_magic.predict.isolation.exchanged_pair import ExchangedPair
from oom_magic.predict.isolation.tensor_names import is_plain


@dataclass(frozen=True, slots=True)
class Written:
    """What a run left in the copy of a tensor, without a tensor that other runs would find; and what the user's own was
    when that run began."""

    tensor: weakref.ref[torch.Tensor]
    storage: torch.UntypedStorage
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    requires_grad: bool
    users: tuple[int, torch.dtype]

    @classmethod
    def of(cls, pair: ExchangedPair) -> Written:
        """While they are exchanged."""
        now = pair.tensor
        shape, strides, offset = now.shape, now.stride(), int(now.storage_offset())
        place = now.untyped_storage(), now.dtype, shape, strides, offset
        return cls(weakref.ref(now), *place, now.requires_grad, (pair.versions[1], pair.copy.dtype))

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it is of this tensor, and the user has not written to that since."""
        return self.tensor() is tensor and (tensor._version, tensor.dtype) == self.users

    def made(self, storage: torch.UntypedStorage | None = None) -> torch.Tensor:
        """A tensor like the copy, in its memory or another."""
        made: torch.Tensor = torch.empty(0, dtype=self.dtype)
        made = made.set_(storage or self.storage, self.offset, self.shape, self.strides)  # type: ignore[call-overload]
        return made.requires_grad_(self.requires_grad)


def written_in(pairs: list[ExchangedPair], before: dict[int, Written]) -> dict[int, Written]:
    """Of host tensors with values those that the run, or one before it, wrote to, with what shares their memory;
    before they are real again."""
    have_values = [one for one in pairs if not one.tensor.is_meta and is_plain(one.tensor)]
    written = [one for one in have_values if one.is_written or id(one.tensor) in before]
    changed = {one.tensor.untyped_storage()._cdata for one in written}
    return {id(one.tensor): Written.of(one) for one in have_values if one.tensor.untyped_storage()._cdata in changed}
