"""What each allocation of a measured run was for, where no live object said so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oom_magic.measure.frames import AUTOGRAD_SITE, Site
from oom_magic.measure.ownership import GUESSES
from oom_magic.memory.categories import Category
from oom_magic.memory.timeline import Phase, SourceLine


@dataclass(slots=True)
class Allocation:
    """One allocation while the timeline is built. ``category`` is None until it is known."""

    requested_bytes: int
    block_bytes: int
    stream: int
    site: Site
    line: SourceLine | None
    phase: Phase
    step: int
    category: Category | None = None
    module: str = ""
    is_before: bool = False
    has_tensor: bool = False

    def claim(self, category: Category, module: str) -> None:
        """A live tensor has it: a module's or optimizer's, the user's plain one (input), or a result."""
        self.has_tensor = True
        if category not in GUESSES:
            self.category, self.module = category, module
        elif category is Category.INPUT and self.category is None and self.site.phase is None:
            self.category = category


def classify(
    allocations: Sequence[Allocation],
    order: Sequence[int],
    *,
    has_graph: bool,
    workspace_sizes: frozenset[int],
) -> None:
    """Fill in the categories that no live object gave.

    - workspace: of a size that cuBLAS uses, never freed and no tensor's;
    - input: made where a plain tensor of the user's was made;
    - parameter: made inside ``torch.nn`` while a module was built or moved;
    - activation: made in the forward and alive when it was over (a graph still alive: not over yet);
    - temporary: all else.
    """
    outlived = _outlived_forward(allocations, order, has_graph)
    freed = {~event for event in order if event < 0}
    input_sites = {id(one.site) for one in allocations if one.category is Category.INPUT}
    for index, one in enumerate(allocations):
        is_size = one.requested_bytes in workspace_sizes
        if is_size and index not in freed and not one.has_tensor and one.category in (None, Category.BEFORE):
            one.category = Category.WORKSPACE
        elif one.category is not None:
            continue
        elif id(one.site) in input_sites:
            one.category = Category.INPUT
        elif one.site.makes_parameters and one.site.phase is None:
            one.category = Category.PARAMETER
        else:
            one.category = Category.ACTIVATION if index in outlived else Category.TEMPORARY


def _outlived_forward(allocations: Sequence[Allocation], order: Sequence[int], has_graph: bool) -> set[int]:
    """The forward's allocations that were alive when the next phase began."""
    alive: set[int] = set()
    outlived: set[int] = set()
    for event in order:
        if event < 0:
            alive.discard(~event)
        elif allocations[event].phase is Phase.FORWARD:
            alive.add(event)
        elif alive:
            outlived |= alive
            alive = set()
    return outlived | alive if has_graph else outlived


def mirrored_operators(allocations: Sequence[Allocation], order: Sequence[int]) -> dict[int, str]:
    """Names for what autograd's threads allocated, by the forward operator that each belongs to.

    A node of the graph allocates its gradients, then lets go of what the forward saved for it: so the next
    saved tensor to be freed tells the operator and the line that the allocation mirrors.
    """
    names: dict[int, str] = {}
    mirrored = ""
    for event in reversed(order):
        if event < 0:
            one = allocations[~event]
            if one.category is Category.ACTIVATION and (one.line or one.site.operator):
                where = f" ({one.line})" if one.line else ""
                mirrored = f"backward of {one.site.operator or 'operator'}{where}"
        elif allocations[event].phase is not Phase.BACKWARD:
            mirrored = ""
        elif mirrored and allocations[event].site is AUTOGRAD_SITE:
            names[event] = mirrored
    return names
