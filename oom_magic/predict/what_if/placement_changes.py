"""Changes of placement: layers balanced between cards of one process, shards in place of replicas."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from oom_magic.predict.isolation.patching import patched
from oom_magic.predict.what_if.change import ByHandError, Change, InapplicableError
from oom_magic.predict.what_if.model_changes import path_of_blocks, repeated_blocks
from oom_magic.predict.what_if.optimizer_changes import optimizers_of


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
        if not hasattr(model, "hf_device_map"):
            self._by_hand += _layers_by_card(model)
            if len(self._by_hand) < 2:
                raise InapplicableError("no_device_map")
            self._note(self._by_hand)
            raise ByHandError("split_by_hand")
        holds = _blocks_by_device(model)
        if not holds or any(device.type != "cuda" for device in holds):  # some are in RAM
            raise InapplicableError("no_device_map")
        if self._has_changed:
            return
        if max(holds.values()) - min(holds[torch.device("cuda", card)] for card in _cards()) < 2:
            raise InapplicableError("layers_balanced_already")
        self._note(holds)
        self.values["map"] = _code(model)

    def _note(self, holds: Counter[torch.device]) -> None:
        card, count = holds.most_common(1)[0]
        self.values.update(card=str(card), held=count, number=holds.total())

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

    def _loaded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(model: torch.nn.Module, device_map: Any, *args: Any, **kwargs: Any) -> Any:
            given = original(model, device_map, *args, **kwargs)
            return given if given is None else self._evened(model, given)

        return run

    def _dispatched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(model: torch.nn.Module, device_map: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            even = self._evened(model, device_map)
            device_map.clear()
            device_map.update(even)
            return original(model, device_map, *args, **kwargs)

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
    """The even device map as code."""
    path, number = path_of_blocks(model), len(repeated_blocks(model))
    others = ", ".join(
        f'"{name}": {card}' for name, card in even_device_map(model).items() if not name.startswith(f"{path}.")
    )
    return f'{{{others},\n    **{{f"{path}.{{i}}": i * {len(_cards())} // {number} for i in range({number})}}}}'


def _cards() -> range:
    return range(torch.cuda.device_count())


def _layers_by_card(model: torch.nn.Module) -> Counter[torch.device]:
    """How many layers each card has: of the sequences that the model is or consists of, else of its repeated blocks."""
    parts = [model, *model.children()] if type(model) is not torch.nn.Sequential else [model]
    found: Counter[torch.device] = Counter()
    for chain in (part for part in parts if type(part) is torch.nn.Sequential):
        weight = next(iter(chain.parameters()), None)
        if weight is not None and weight.device.type == "cuda":
            found[weight.device] += len(chain)
    return found or Counter({card: n for card, n in _blocks_by_device(model).items() if card.type == "cuda"})


def _blocks_by_device(model: torch.nn.Module) -> Counter[torch.device]:
    first = (next(iter(block.parameters()), None) for block in repeated_blocks(model))
    return Counter(weight.device for weight in first if weight is not None)


class FullySharded(Change):
    """FSDP2 where the code says ``DistributedDataParallel(model)``: each repeated block is sharded, then the rest.

    accelerate and Trainer shard by their own settings; ``variant`` is then "accelerate" or "trainer". ``values`` have,
    once a model ran in DDP, the ``path`` to its blocks, None where it repeats none, and those settings as code:
    ``plugin`` and ``config``.
    """

    def __init__(self) -> None:
        self._plugin: dict[str, Any] = {}
        self._config: dict[str, Any] = {}
        self.values: dict[str, Any] = {"path": None}
        self._note(None, [])

    def check(self, model: torch.nn.Module) -> None:
        """Needs a model in DDP, and, where no library makes both, an optimizer made after it was wrapped."""
        if isinstance(model, DistributedDataParallel):
            path, module = path_of_blocks(model.module), model.module
            is_known = path is None or getattr(module, "_no_split_modules", None)
            self._note(path, [] if is_known else [type(block).__name__ for block in repeated_blocks(module)][:1])
        elif not self.variant:
            raise InapplicableError("no_replicas")
        optimizers_of(model)  # one made before the model was wrapped does not have the shards

    def _note(self, path: str | None, blocks: list[str]) -> None:
        """The settings for a model whose blocks are of these classes; none for those that transformers knows."""
        self._plugin, self._config = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}, {"version": 2}
        if blocks:
            self._plugin["transformer_cls_names_to_wrap"] = self._config["transformer_layer_cls_to_wrap"] = blocks
        plugin = ",\n    ".join(f"{name}={json.dumps(value)}" for name, value in self._plugin.items())
        self.values.update(path=path, plugin=plugin, config=json.dumps(self._config))

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """``DistributedDataParallel(model)`` shards the model; accelerate and Trainer are set up to do so."""

        def shard(wrapper: Any, module: torch.nn.Module, *_: Any, **__: Any) -> None:
            from torch.distributed.fsdp import fully_shard

            torch.nn.Module.__init__(wrapper)
            path = path_of_blocks(module)
            for block in () if path is None else module.get_submodule(path).children():
                fully_shard(block)
            wrapper.module = fully_shard(module)

        changed = {"__init__": shard, "forward": _call_module, "no_sync": _without_gradient_sync}
        with ExitStack() as stack:
            stack.enter_context(patched(DistributedDataParallel, changed))
            for owner, name, set_up in self._libraries():
                stack.enter_context(patched(owner, {name: set_up(getattr(owner, name))}))
            yield

    def _libraries(self) -> Iterator[tuple[type, str, Callable[..., Any]]]:
        """The classes that take the settings, if they are loaded."""
        table = (
            ("accelerate.accelerator", "Accelerator", "__init__", self._accelerated),
            ("transformers.training_args", "TrainingArguments", "__post_init__", self._argued),
        )
        for module, owner, name, set_up in table:
            if module in sys.modules:
                yield getattr(sys.modules[module], owner), name, set_up

    def _accelerated(self, make: Callable[..., None]) -> Callable[..., None]:
        def run(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            if not {"fsdp_plugin", "deepspeed_plugin"} & kwargs.keys():  # Trainer gives one, if only None
                make_plugin = import_module("accelerate").FullyShardedDataParallelPlugin
                self.variant, kwargs["fsdp_plugin"] = "accelerate", make_plugin(**self._plugin)
            make(accelerator, *args, **kwargs)

        return run

    def _argued(self, finish: Callable[..., None]) -> Callable[..., None]:
        def run(arguments: Any) -> None:
            if not (arguments.fsdp or arguments.deepspeed):
                self.variant = "trainer"
                arguments.fsdp, arguments.fsdp_config = "full_shard auto_wrap", dict(self._config)
            finish(arguments)

        return run


def _call_module(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    return wrapper.module(*args, **kwargs)


@contextmanager
def _without_gradient_sync(wrapper: Any) -> Iterator[None]:
    wrapper.module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        wrapper.module.set_requires_gradient_sync(True)


class GradientsInBuckets(Change):
    """DDP whose gradients are views of its buckets: ``gradient_as_bucket_view=True``."""

    def __init__(self) -> None:
        self._has_changed = False

    def check(self, model: torch.nn.Module) -> None:
        """Needs a model in DDP that does not have them yet."""
        if not isinstance(model, DistributedDataParallel):
            raise InapplicableError("no_replicas")
        if model.gradient_as_bucket_view and not self._has_changed:
            raise InapplicableError("gradients_in_buckets_already")

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """``DistributedDataParallel`` is made with ``gradient_as_bucket_view=True``."""
        make: Callable[..., None] = DistributedDataParallel.__init__

        def run(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            self._has_changed |= not kwargs.get("gradient_as_bucket_view", False)
            make(wrapper, *args, **{**kwargs, "gradient_as_bucket_view": True})

        with patched(DistributedDataParallel, {"__init__": run}):
            yield


class Resharded(Change):
    """FSDP2 with ``reshard_after_forward``: a block's gathered parameters are freed after its forward."""

    def check(self, model: torch.nn.Module) -> None:
        """Needs shards that keep their gathered parameters."""
        groups = map(_group_of, _shards_within(model))
        if not any(group is not None and not group._reshard_after_forward for group in groups):
            raise InapplicableError("resharded_already")

    def prepare(self, model: torch.nn.Module) -> None:
        """Every shard frees gathered parameters after its forward."""
        for shard in _shards_within(model):
            shard.set_reshard_after_forward(True, recurse=False)


class ShardsOnHost(Change):
    """FSDP2 with each process's shards, gradients and optimizer state in host memory."""

    def __init__(self) -> None:
        self._has_changed = False

    def check(self, model: torch.nn.Module) -> None:
        """Needs shards on the GPU."""
        policies = [group.offload_policy for group in map(_group_of, _shards_within(model)) if group is not None]
        if all(type(policy).__name__ == "CPUOffloadPolicy" for policy in policies) and not self._has_changed:
            raise InapplicableError("shards_on_host_already")

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """Pass ``CPUOffloadPolicy()`` wherever the code shards."""
        from torch.distributed.fsdp import CPUOffloadPolicy
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        make: Callable[..., None] = FSDPParamGroup.__init__

        def run(group: Any, *args: Any, **kwargs: Any) -> None:
            given = signature(make).bind(group, *args, **kwargs)
            self._has_changed |= not isinstance(given.arguments["offload_policy"], CPUOffloadPolicy)
            given.arguments["offload_policy"] = CPUOffloadPolicy()
            make(*given.args, **given.kwargs)

        with patched(FSDPParamGroup, {"__init__": run}):
            yield


def _group_of(shard: Any) -> Any:
    return shard._get_fsdp_state()._fsdp_param_group


def _shards_within(model: torch.nn.Module) -> list[Any]:
    """The modules that FSDP2 gathers one by one; the root's own parameters stay until the backward in any case."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        raise InapplicableError("no_shards")
    return [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
