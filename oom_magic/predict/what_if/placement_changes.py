"""Changes to which of several cards in one process holds what."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from oom_magic.predict.isolation.patching import patched
from oom_magic.predict.what_if.change import ByHandError, Change, InapplicableError
from oom_magic.predict.what_if.model_changes import path_of_blocks, repeated_blocks


class BalancedLayers(Change):
    """A device map with equally many of a model's blocks on each card, in place of the code's own.

    ``values`` say, once a model ran, which ``card`` ``held`` most of how many (``number``), and the ``map`` as code;
    that stays empty where the cards were filled by hand.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"card": "", "held": 0, "number": 0, "map": ""}
        self._by_hand: Counter[torch.device] = Counter()
        self._has_changed = False

    def check(self, model: torch.nn.Module) -> None:
        """Needs a device map with more blocks on one card than on another; notes what a split by hand has where."""
        holds = _blocks_by_device(model)
        on_cards = Counter({device: number for device, number in holds.items() if device.type == "cuda"})
        if not hasattr(model, "hf_device_map"):
            self._by_hand += on_cards
            if len(self._by_hand) < 2:
                raise InapplicableError("no_device_map")
            self._note(self._by_hand)
            raise ByHandError("split_by_hand")
        if not holds or on_cards != holds:  # some are in RAM
            raise InapplicableError("no_device_map")
        if self._has_changed:
            return
        if max(holds.values()) - min(holds[torch.device("cuda", card)] for card in _cards()) < 2:
            raise InapplicableError("layers_balanced_already")
        self._note(holds)
        self.values["map"] = _code(model)

    def _note(self, holds: Counter[torch.device]) -> None:
        card, held = holds.most_common(1)[0]
        self.values.update(card=str(card), held=held, number=holds.total())

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """Sources: ``from_pretrained`` (transformers/modeling_utils.py), ``dispatch_model`` (accelerate)."""
        hooks = {
            "transformers.modeling_utils": ("_get_device_map", self._loaded),
            "accelerate.big_modeling": ("check_device_map", self._dispatched),
        }
        with ExitStack() as stack:
            for module_name, (name, instead) in hooks.items():
                module: Any = sys.modules.get(module_name)
                if hasattr(module, name):
                    stack.enter_context(patched(module, {name: instead(getattr(module, name))}))
            yield

    def _loaded(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def run(model: torch.nn.Module, device_map: Any, *args: Any, **kwargs: Any) -> Any:
            given = usual(model, device_map, *args, **kwargs)
            return given if given is None else self._evened(model, given)

        return run

    def _dispatched(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def run(model: torch.nn.Module, device_map: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            even = self._evened(model, device_map)
            device_map.clear()
            device_map.update(even)
            return usual(model, device_map, *args, **kwargs)

        return run

    def _evened(self, model: torch.nn.Module, given: dict[str, Any]) -> dict[str, int]:
        even = even_device_map(model)
        self._has_changed |= given != even
        return even


def even_device_map(model: torch.nn.Module) -> dict[str, int]:
    """The card of each part: equally many blocks on each, what comes before them on the first, the rest on the last.

    Parts that share weights are on one card. Raises InapplicableError for a model without repeated blocks.
    """
    blocks, path = repeated_blocks(model), str(path_of_blocks(model))
    found: dict[str, int] = {}
    cards: dict[int, int] = {}  # by parameter

    def place(name: str, part: torch.nn.Module, card: int) -> None:
        found[name] = next((cards[id(weight)] for weight in part.parameters() if id(weight) in cards), card)
        cards.update({id(weight): found[name] for weight in part.parameters()})

    def visit(parent: torch.nn.Module, prefix: str) -> None:
        found.update({prefix + name: 0 for name, _ in parent.named_parameters(recurse=False)})
        for name, part in parent.named_children():
            if prefix + name == path:
                for number, (inner, block) in enumerate(part.named_children()):
                    place(f"{path}.{inner}", block, number * len(_cards()) // len(blocks))
            elif path.startswith(f"{prefix}{name}."):
                visit(part, f"{prefix}{name}.")
            else:
                is_behind = any(known.startswith(f"{path}.") for known in found)
                place(prefix + name, part, _cards()[-1] if is_behind else 0)

    visit(model, "")
    return found


def _code(model: torch.nn.Module) -> str:
    """The even device map as an expression."""
    path, number = path_of_blocks(model), len(repeated_blocks(model))
    others = ", ".join(
        f'"{name}": {card}' for name, card in even_device_map(model).items() if not name.startswith(f"{path}.")
    )
    return f'{{{others},\n    **{{f"{path}.{{i}}": i * {len(_cards())} // {number} for i in range({number})}}}}'


def _cards() -> range:
    return range(torch.cuda.device_count())


def _blocks_by_device(model: torch.nn.Module) -> Counter[torch.device]:
    first = (next(block.parameters(), None) for block in repeated_blocks(model))
    return Counter(weight.device for weight in first if weight is not None)
