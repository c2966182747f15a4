"""The views of Sizes and TrainingSetup."""

from __future__ import annotations

from collections.abc import Iterator

from oom_magic.language import _, ngettext
from oom_magic.memory.report import are_upper_bounds
from oom_magic.predict.setups.setup import TrainingSetup
from oom_magic.predict.sizing.sizes import Sizes
from oom_magic.units import format_bytes
from oom_magic.views.blocks import Block, Description, Details, Sentence, Table, register
from oom_magic.views.words import at_most, upper_bound_sentence


@register
def describe_sizes(sizes: Sizes) -> Description:
    """The ranges, the peaks at their ends, the points where allocations change, and assumptions."""
    ranges = sizes.ranges
    rows = [(name, _("{first} to {last}", first=axis[0], last=axis[-1])) for name, axis in ranges.axes.items()]
    rows += [(name, ", ".join(map(str, options))) for name, options in ranges.choices.items()]
    fits = sizes.fits(**sizes.ends()["lowest"])
    blocks: list[Block] = [Table((_("argument"), _("range")), tuple(rows)), *_peaks(sizes, fits)]
    capacity = format_bytes(sizes.device.total_bytes)
    if not fits:
        blocks.append(
            Sentence(
                _(
                    "Even the smallest values do not fit on {name} ({capacity}).",
                    name=sizes.device.name,
                    capacity=capacity,
                ),
                "bad",
            )
        )
    if sizes.borders:
        known = tuple(Sentence(text) for text in sizes.borders)
        blocks.append(Details(_("Where the allocations change"), known))
    if sizes.assumptions:
        said = (f"{item.line}: {item.text}" if item.line else item.text for item in sizes.assumptions)
        blocks.append(Details(_("Assumptions"), tuple(Sentence(text) for text in said)))
    traced = ngettext(
        "From {count} dry run on {name} ({capacity}).",
        "From {count} dry runs on {name} ({capacity}).",
        sizes.num_traces,
        name=sizes.device.name,
        capacity=capacity,
    )
    blocks.append(Sentence(traced, "quiet"))
    return Description(
        _("GPU memory of {label} as a function of {names}", label=sizes.label, names=", ".join(ranges.names)),
        tuple(blocks),
    )


def _peaks(sizes: Sizes, fits: bool) -> Iterator[Block]:
    """The peak at the ends of the ranges, and what it means where it is an upper bound."""
    is_bound = are_upper_bounds(sizes.assumptions)
    ends = {
        ", ".join(f"{name}={value}" for name, value in point.items()): sizes.peak_allocated_bytes(**point)
        for point in sizes.ends().values()
    }
    yield Table((_("at"), at_most(_("peak allocated"), is_bound)), tuple(ends.items()))
    if is_bound:
        yield upper_bound_sentence(is_failure=not fits)


@register
def describe_setup(setup: TrainingSetup) -> Description:
    """The settings in one line."""
    return Description(setup.summary)
