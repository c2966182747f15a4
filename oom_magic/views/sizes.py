"""What Sizes say about themselves."""

from __future__ import annotations

from oom_magic.predict.sizing.sizes import Sizes
from oom_magic.units import format_bytes
from oom_magic.views.blocks import Block, Description, Details, Sentence, Table
from oom_magic.views.registry import register


@register
def describe_sizes(sizes: Sizes) -> Description:
    """The ranges, the peak at their ends, where the function changes its ways, and what was assumed."""
    ranges = sizes.ranges
    rows = [(name, f"{axis[0]} to {axis[-1]}") for name, axis in ranges.axes.items()]
    rows += [(name, ", ".join(map(str, options))) for name, options in ranges.choices.items()]
    ends = {
        ", ".join(f"{name}={value}" for name, value in point.items()): sizes.peak_allocated_bytes(**point)
        for point in sizes.ends().values()
    }
    blocks: list[Block] = [
        Table(("argument", "range"), tuple(rows)),
        Table(("at", "peak allocated"), tuple(ends.items())),
    ]
    capacity = format_bytes(sizes.device.total_bytes)
    if not sizes.fits(**sizes.ends()["lowest"]):
        blocks.append(Sentence(f"Even the smallest does not fit on {sizes.device.name} ({capacity}).", "bad"))
    if sizes.borders:
        known = tuple(Sentence(text) for text in sizes.borders)
        blocks.append(Details("Where it changes its ways", known))
    if sizes.assumptions:
        said = (f"{item.line}: {item.text}" if item.line else item.text for item in sizes.assumptions)
        blocks.append(Details("Assumed", tuple(Sentence(text) for text in said)))
    traced = f"From {sizes.num_traces} dry runs on {sizes.device.name} ({capacity})."
    blocks.append(Sentence(traced, "quiet"))
    return Description(f"GPU memory of {sizes.label} as a function of {', '.join(ranges.names)}", tuple(blocks))
