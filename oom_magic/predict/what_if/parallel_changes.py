"""Changes to how a model is trained by several processes: shards in place of replicas, fewer copies between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from oom_magic.predict.isolation.patching import patched
from oom_magic.predict.what_if.change import Change, InapplicableError
from oom_magic.predict.what_if.model_changes import path_of_blocks
from oom_magic.predict.what_if.optimizer_changes import optimizers_of


class FullySharded(Change):
    """FSDP2 where the code says ``DistributedDataParallel(model)``: each repeated block is sharded, then the rest."""

    def check(self, model: torch.nn.Module) -> None:
        """Needs a model in DDP, and an optimizer made after it was wrapped."""
        if not isinstance(model, DistributedDataParallel):
            raise InapplicableError("no_replicas")
        optimizers_of(model)  # one made before the model was wrapped has none of the shards

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """``DistributedDataParallel(model)`` shards the model."""

        def shard(wrapper: Any, module: torch.nn.Module, *_: Any, **__: Any) -> None:
            from torch.distributed.fsdp import fully_shard

            torch.nn.Module.__init__(wrapper)
            path = path_of_blocks(module)
            for block in () if path is None else module.get_submodule(path).children():
                fully_shard(block)
            wrapper.module = fully_shard(module)

        changed = {"__init__": shard, "forward": _call_module, "no_sync": _without_gradient_sync}
        with patched(DistributedDataParallel, changed):
            yield


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
    """DDP whose gradients are views of what it sends: ``gradient_as_bucket_view=True``."""

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
    """FSDP2 that gives a block's gathered parameters back after its forward, and gathers them again to go back."""

    def check(self, model: torch.nn.Module) -> None:
        """Needs shards that keep their gathered parameters."""
        groups = map(_group_of, _shards_within(model))
        if not any(group is not None and not group._reshard_after_forward for group in groups):
            raise InapplicableError("resharded_already")

    def prepare(self, model: torch.nn.Module) -> None:
        """Every shard gives them back after its forward."""
        for shard in _shards_within(model):
            shard.set_reshard_after_forward(True, recurse=False)


class ShardsOnHost(Change):
    """FSDP2 that keeps each process's shards, and with them gradients and optimizer state, in RAM."""

    def __init__(self) -> None:
        self._has_changed = False

    def check(self, model: torch.nn.Module) -> None:
        """Needs shards that are on the GPU."""
        policies = [group.offload_policy for group in map(_group_of, _shards_within(model)) if group is not None]
        if all(type(policy).__name__ == "CPUOffloadPolicy" for policy in policies) and not self._has_changed:
            raise InapplicableError("shards_on_host_already")

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """Whatever is sharded is sharded with ``CPUOffloadPolicy()``."""
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
