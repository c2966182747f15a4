"""The user's own objects hold after a dry run what they held before it: attributes, classes, defaults, arrays."""

from __future__ import annotations

import argparse
import collections
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from oom_magic.predict.session import DrySession


class Meter:
    total: ClassVar[list[int]] = [1]
    count = 0

    def __init__(self) -> None:
        self.values = {"loss": [0.5]}
        self.best = 1.0


@dataclass
class Config:
    device: str = "cpu"
    layers: list[int] = field(default_factory=lambda: [1, 2])


def noted(value: int = 0, kept: list[int] = [7]) -> list[int]:  # noqa: B006
    kept.append(value)
    noted.calls = getattr(noted, "calls", 0) + 1  # type: ignore[attr-defined]
    return kept


def test_what_the_user_holds_is_as_before() -> None:
    names: dict[str, Any] = {
        "meter": Meter(),
        "Meter": Meter,
        "config": Config(),
        "args": argparse.Namespace(device="cpu", seen=[1]),
        "noted": noted,
        "small": np.arange(6.0).reshape(2, 3),
        "strided": np.arange(20.0)[::2],
        "window": collections.deque([1, 2], maxlen=2),
        "counts": collections.Counter(a=1),
        "default": collections.defaultdict(list, a=[1]),
        "nested": {"history": {"loss": [1.0]}},
        "loader": torch.utils.data.DataLoader([1, 2, 3]),
        "nan": np.array([np.nan, 1.0]),
    }

    def values() -> str:
        parts = [vars(Meter)["total"], Meter.count, vars(noted), noted.__defaults__, vars(names["loader"]).keys()]
        return str(
            {key: vars(value) if hasattr(value, "__dict__") else value for key, value in names.items()}
            | {"parts": parts}
        )

    def run() -> None:
        meter, config, args = names["meter"], names["config"], names["args"]
        meter.values["loss"].append(0.1)
        meter.best, meter.new = 0.1, 1
        Meter.total.append(2)
        Meter.count, Meter.added = 5, 1  # type: ignore[attr-defined]
        config.device = "cuda"
        config.layers.clear()
        args.device, args.more = "cuda", True
        args.seen.append(2)
        noted(3)
        names["small"] *= 2
        names["strided"][:] = -1
        names["window"].append(9)
        names["counts"]["a"] += 1
        names["default"]["b"].append(2)
        names["nested"]["history"]["loss"].append(2.0)
        names["loader"].more = 1
        names["nan"][0] = 3
        names["made"] = 1

    before = values()
    DrySession(has_bar=False, is_lasting=False).run(run, [names])
    assert values() == before and not hasattr(Meter, "added") and not hasattr(noted, "calls")


def test_a_large_array_is_not_written_to() -> None:
    names = {"large": np.zeros(1 << 22)}

    def run() -> None:
        assert torch.from_numpy(names["large"]).cuda().is_cuda
        try:
            names["large"][0] = 1
        except ValueError as error:
            said.append(str(error))

    said: list[str] = []
    DrySession(has_bar=False, is_lasting=False).run(run, [names])
    assert not names["large"].any() and said and names["large"].flags.writeable
