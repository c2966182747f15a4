"""What the run's objects would do when they go after its end, when files and the user's names are real again."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from oom_magic.predict.session import DrySession

seen: list[str] = []


class Goes:
    """Writes and tells when it goes."""

    kept: Any = None

    def __init__(self, name: str) -> None:
        self.name = name

    def __del__(self) -> None:
        seen.append(self.name)
        Path(self.name).write_text("gone")


def in_a_cycle() -> None:
    one: Any = Goes("cycle")
    one.itself = one


def in_frames() -> None:
    one = Goes("frame")
    raise ValueError(one.name)


def where_the_card_is_full() -> None:
    one = Goes("full")
    torch.empty((1 << 45) + len(one.name), device="cuda")


def where_steps_are_enough() -> None:
    one = Goes("steps")
    model = torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(9 if one else 0):
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        optimizer.step()


def by_name() -> None:
    globals()["new_name"] = Goes("name")


def in_an_attribute() -> None:
    Goes.kept = Goes("attribute")


def in_a_generator() -> None:
    def made() -> Iterator[Any]:
        try:
            yield held
        finally:
            seen.append("generator")
            os.environ["SET_BY_A_GENERATOR"] = "1"

    held: list[Any] = []
    generator = made()
    next(generator)
    held.append(generator)


WAYS = [in_a_cycle, in_frames, where_the_card_is_full, where_steps_are_enough, by_name, in_an_attribute, in_a_generator]


@pytest.mark.parametrize("is_lasting", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_lives_on_after_the_run_does_nothing_when_it_goes(
    way: Callable[[], None], is_lasting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_lasting and way is in_a_generator:
        pytest.skip("it may go on in the next run")
    monkeypatch.chdir(tmp_path)
    mine = Goes("mine")
    session: Any = DrySession("RTX 3060", has_bar=False, is_lasting=is_lasting, stop_after_steps=3)
    with contextlib.suppress(ValueError):
        session.run(way, [globals()])
    del session
    gc.collect()
    assert seen == [] and list(tmp_path.iterdir()) == [] and "SET_BY_A_GENERATOR" not in os.environ
    del mine
    assert seen == ["mine"] and Path("mine").exists()  # the user's own goes as always
    seen.clear()


def test_what_goes_in_the_run_does_so_there() -> None:
    noted: list[int] = []

    def run() -> None:
        class Counted:
            def __del__(self) -> None:
                noted.append(torch.cuda.memory_allocated())

        one = Counted()
        block = torch.empty(512, device="cuda")
        del one
        assert noted == [block.untyped_storage().nbytes()]

    DrySession(has_bar=False, is_lasting=False).run(run, [{}])
    assert noted == [2048]  # once, in the run
