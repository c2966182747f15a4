"""What a run grows with: its batch, the length of its sequences, the side of its pictures; how each is made smaller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from oom_magic.explain.remedies.sizes.pictures import smaller_sides

_OF_HALVING = 10
_ANOTHER_BATCH = 58  # it changes what is learnt
_AT_EVALUATION = 4  # the results are the same, and nothing is accumulated


@dataclass(frozen=True)
class Shrinking:
    """The remedy of making a size smaller, its cost to the user, and its effect on speed."""

    key: str
    cost: int
    speed: str


@dataclass(frozen=True)
class Size:
    """A size that memory grows with, as ``size**power``.

    ``usual_name`` is that of code whose own is not known; ``smaller`` gives the sizes below ``before``, ascending, that
    may be advised, for a global batch of ``whole`` samples. ``is_made_up_for``: nothing is lost, since gradients are
    accumulated.
    """

    usual_name: str
    shrinking: Shrinking
    smaller: Callable[[int, int], list[int]]
    power: int = 1
    is_made_up_for: bool = False

    def cost_of_halving(self, before: int, after: int) -> int:
        """What is added where more than half is cut off: the more it is, the less is learnt from the rest."""
        halvings = (before**self.power // after**self.power).bit_length() - 2
        return 0 if self.is_made_up_for else _OF_HALVING * max(halvings, 0)


def divisors(whole: int, before: int) -> list[int]:
    """The divisors of a global batch below ``before``, ascending: microbatches of one make up the same batch."""
    return [number for number in range(1, before) if whole % number == 0]


def parts(length: int) -> list[int]:
    """Shorter lengths, ascending, in sixteenths."""
    grain = max(length // 16, 1)
    return list(range(grain, length, grain))


SIZES: Mapping[str, Size] = {
    "batch": Size("batch_size", Shrinking("smaller_batch", 30, "accumulation"), divisors, is_made_up_for=True),
    "seq": Size("seq_len", Shrinking("shorter_sequences", 55, "faster"), lambda _, before: parts(before)),
    "side": Size("image_size", Shrinking("smaller_pictures", 59, "faster"), lambda _, before: smaller_sides(before), 2),
}


def shrinking(what: str, is_evaluation: bool, compares_samples: bool) -> Shrinking:
    """Making a size smaller: of a batch, in an evaluation too, or where its samples are compared with each other."""
    if what == "batch" and is_evaluation:
        return Shrinking("smaller_evaluation", _AT_EVALUATION, "same")
    usual = SIZES[what].shrinking
    return Shrinking(usual.key, _ANOTHER_BATCH, usual.speed) if what == "batch" and compares_samples else usual
