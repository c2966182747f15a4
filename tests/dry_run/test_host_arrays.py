"""NumPy arrays of pretended tensors give what full ones give, without their memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from oom_magic.predict.fake_cuda.host_arrays import HostArray
from oom_magic.predict.session import DrySession

LABELS = np.arange(6).reshape(2, 3) % 4


def padded(a: Any, b: Any) -> Any:
    """As transformers joins batches of different lengths."""
    result = np.full_like(a, -100, shape=(len(a) + len(b), max(a.shape[1], b.shape[1]), *a.shape[2:]))
    result[: len(a), : a.shape[1]] = a
    result[len(a) :, : b.shape[1]] = b
    return result


FUNCTIONS = [
    lambda x: np.argmax(x, axis=-1) == LABELS,
    lambda x: x.argmin(1, keepdims=True),
    lambda x: x.argmax(),
    lambda x: np.exp(x - x.max(-1, keepdims=True)),
    lambda x: x[LABELS > 1] * np.arange(5),
    lambda x: x[LABELS % 2],
    lambda x: np.concatenate((x, x[:1])),
    lambda x: np.concatenate([x, x], axis=2).sum(),
    lambda x: np.concatenate((x, np.zeros((2, 3, 5))), axis=1),
    lambda x: np.where(x > 0, x, LABELS[..., None]).mean(axis=(0, 1)),
    lambda x: x.reshape(-1, 5)[1:, 2].tolist(),
    lambda x: np.divmod(x, 2)[1],
    lambda x: padded(x, x[:, :2]),
    lambda x: padded(padded(x[:, 1:], x), x[:, :2])[..., 1:] * 2,
    lambda x: np.concatenate((padded(x, x[:, :2]), x)),
    lambda x: np.concatenate((padded(x, x[:, :2]), x)).argmax(-1),
    lambda x: padded(x[..., 0], x[:, :2, 1]),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_they_give_what_full_arrays_give(function: Callable[[Any], Any]) -> None:
    found, true = function(HostArray.of(np.float32(1), (2, 3, 5))), function(np.ones((2, 3, 5), dtype=np.float32))
    assert np.shape(found) == np.shape(true) and np.array_equal(found, true)
    assert getattr(found, "dtype", None) == getattr(true, "dtype", None)


def test_arrays_that_are_joined_are_of_one_type() -> None:
    """transformers refuses others."""
    one = HostArray.of(np.float32(1), (2, 3, 5))
    assert {type(padded(one, one[:, :2])), type(np.concatenate((padded(one, one[:, :2]), one)))} == {HostArray}


@pytest.mark.parametrize("lengths", [(64,), (64, 61, 63)])
def test_metrics_of_an_evaluation_take_no_memory_of_the_host(lengths: tuple[int, ...]) -> None:
    """40 batches of 12 MiB each."""

    def join(collected: Any, batch: Any) -> Any:
        return padded(collected, batch) if len(lengths) > 1 else np.concatenate((collected, batch), axis=0)

    def evaluate() -> None:
        collected = None
        for number in range(40):
            length = lengths[number % len(lengths)]
            batch = torch.zeros(16, length, 3000, device="cuda").cpu().numpy()
            collected = batch if collected is None else join(collected, batch)
        assert collected is not None and collected.shape == (640, 64, 3000)
        assert (collected.argmax(-1) == np.zeros((640, 64))).all()
        assert collected[np.ones((640, 64)) > 0].shape == (640 * 64, 3000)

    tracemalloc.start()
    try:
        DrySession("RTX 3060", is_lasting=False, has_bar=False).run(evaluate)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()
