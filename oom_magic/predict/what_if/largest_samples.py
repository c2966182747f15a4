"""Batches with the largest sample of their data: a shuffled epoch has one somewhere, the batches followed may not."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from oom_magic.computing_time import computing_seconds
from oom_magic.predict.isolation.patching import all_patched
from oom_magic.predict.what_if.change import Change

_NUM_PROBES = 8  # samples that are looked at to tell whether sizes differ
_MOST_SECONDS = 1.0  # of computing, for all
_EVERY = 3  # batches: one as it is drawn, then two, which may be accumulated, with the largest sample


class LargestSamples(Change):
    """The largest sample of a data set is in most of the batches, where their order does not depend on sizes.

    ``num_samples``: so many were compared in the last run; 0 where all have one size.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[int | None, int]] = {}
        self.num_samples = 0
        self._are_all = True

    @property
    def are_known(self) -> bool:
        """Whether samples differ, and none is larger than those that were in the last run."""
        return self._are_all and self.num_samples > 0

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """``BatchSampler`` gives such batches."""
        self.num_samples, self._are_all = 0, True
        with all_patched([(BatchSampler, {"__iter__": self._with_largest(BatchSampler.__iter__)})]):
            yield

    def _with_largest(self, original: Callable[..., Iterator[list[int]]]) -> Callable[..., Iterator[list[int]]]:
        def __iter__(batches: BatchSampler) -> Iterator[list[int]]:  # noqa: N807
            sampler = batches.sampler
            largest = None
            if type(batches) is BatchSampler and isinstance(sampler, (RandomSampler, SequentialSampler)):
                largest = self._largest(sampler.data_source)
            for number, batch in enumerate(original(batches)):
                yield batch if largest is None or number % _EVERY == 0 else [largest, *batch[1:]]

        return __iter__

    def _largest(self, data: Any) -> int | None:
        """The number of the largest sample; None where all have one size, or none can be looked at."""
        with suppress(Exception):  # of the user's code for a sample
            number = len(data)
            probes = [_size_of(data[at]) for at in range(0, number, -(-number // _NUM_PROBES))]
            if len(set(probes)) < 2:
                return None
            key = type(data), number, tuple(probes)
            if key not in self._known:
                self._known[key] = self._compared(data, number)
            found, compared = self._known[key]
            self.num_samples, self._are_all = max(self.num_samples, compared), self._are_all and compared == number
            return found
        return None

    def _compared(self, data: Any, number: int) -> tuple[int | None, int]:
        """The largest of the samples for which there is time, and how many those are."""
        end, largest = computing_seconds() + _MOST_SECONDS, (-1, 0)
        for at in range(number):
            if computing_seconds() > end:
                return largest[1], at
            largest = max(largest, (_size_of(data[at]), at))
        return largest[1], number


def _size_of(sample: Any) -> int:
    """How many numbers or characters a sample has."""
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(sample, np.ndarray):
        return sample.size
    if isinstance(sample, (str, bytes)):
        return len(sample)
    parts = sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, (list, tuple)) else ()
    return sum(map(_size_of, parts)) if parts else 1
