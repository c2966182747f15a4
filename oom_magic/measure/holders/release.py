"""``release``: free what failures still hold, and say who holds the rest."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import torch

from oom_magic.garbage_collector import gc_disabled
from oom_magic.language import _
from oom_magic.measure.device.accelerators import Levels, Memory, find_accelerators
from oom_magic.measure.history.attribution import Storage
from oom_magic.measure.holders.failed_frames import (
    ErrorFrames,
    clear,
    drop_name,
    drop_results,
    find_error_frames,
    forget_last_error,
    running_shell,
    told_apart,
    users_names,
)
from oom_magic.measure.holders.inventory import (
    HolderStorages,
    MemoryHolder,
    find_memory_holders,
    named_holders,
    named_values,
    storages_by_holder,
)
from oom_magic.measure.holders.reach import Locate, Storages, namespaces_of_modules, reach, referents, without
from oom_magic.results import Result


@dataclass(frozen=True, slots=True)
class DeviceChange:
    """One device before and after. Sizes in bytes."""

    device: str
    before: Levels
    after: Levels


@dataclass(frozen=True, slots=True)
class Gone:
    """Something that was released, and the bytes that only it held; ``is_own``: it is the error in question."""

    what: str
    num_bytes: int
    is_own: bool = False


@dataclass(frozen=True, repr=False)
class Released(Result):
    """What ``release`` freed, or in a dry run would free, and who holds the rest. Sizes in bytes.

    ``devices`` is empty where there is none, or none was used yet. ``holders`` count each byte once. Without
    ``has_gpu`` torch finds no accelerator: what is told is the pretend GPU's memory, if any.
    """

    devices: tuple[DeviceChange, ...] = ()
    gone: tuple[Gone, ...] = ()
    holders: tuple[MemoryHolder, ...] = ()
    is_dry_run: bool = False
    has_gpu: bool = True

    @property
    def freed_allocated_bytes(self) -> int:
        """What was in tensors, on all devices."""
        return sum(one.before.allocated_bytes - one.after.allocated_bytes for one in self.devices)

    @property
    def allocated_bytes(self) -> int:
        """What is still in tensors."""
        return sum(one.after.allocated_bytes for one in self.devices)

    @property
    def reserved_bytes(self) -> int:
        """What torch still holds from the driver."""
        return sum(one.after.reserved_bytes for one in self.devices)

    @property
    def unnamed_bytes(self) -> int:
        """Bytes allocated outside tensors that Python can see: rounding, workspaces, buffers of libraries."""
        return max(self.allocated_bytes - sum(holder.num_bytes for holder in self.holders), 0)

    def with_earlier(self, gone: Sequence[Gone]) -> Released:
        """The same, and what of ``gone``, found earlier, Python has collected since."""
        here = {one.what for one in self.gone}
        return replace(self, gone=(*self.gone, *(one for one in gone if one.what not in here)))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for JSON."""
        return asdict(self)


def release(
    namespace: MutableMapping[str, Any] | None = None,
    *,
    names: Sequence[str] = (),
    out: bool = False,
    dry_run: bool = False,
) -> Released:
    """Free what errors still hold on torch's accelerator and empty its cache; what went, and who holds the rest.

    Of yours only the variables in ``names`` are deleted and, with ``out``, all results that IPython keeps.
    ``namespace`` is where names are looked up (default: the notebook's, or the caller's globals). ``dry_run`` changes
    nothing and tells what would go. Afterwards ``%debug`` finds the frames of earlier errors empty, and says so.
    """
    found = users_names(1) if namespace is None else namespace
    return release_from(find_accelerators(), found, names=names, out=out, dry_run=dry_run)


def release_from(
    memories: Sequence[Memory],
    namespace: MutableMapping[str, Any],
    *,
    names: Sequence[str] = (),
    out: bool = False,
    dry_run: bool = False,
    usual: Mapping[str, int] = MappingProxyType({}),
) -> Released:
    """``release`` on the devices of ``memories``; without any, errors are left as they are.

    ``usual`` is what was allocated before the error (bytes by device), where that is known.
    """
    _check(names, namespace)
    with gc_disabled():
        return _release(memories, namespace, names, out, dry_run, usual)


def _release(
    memories: Sequence[Memory],
    namespace: MutableMapping[str, Any],
    names: Sequence[str],
    out: bool,
    dry_run: bool,
    usual: Mapping[str, int],
) -> Released:
    before = _levels(memories)
    failed = find_error_frames() if before else []
    locate = locating(memories)
    by_holder = (
        storages_by_holder(namespace, locate, {id(frame) for one in failed for frame in one.frames})
        if before
        else HolderStorages()
    )
    leaving = {*names, *_results(namespace, out)}
    staying = by_holder.without(leaving)
    gone = tuple(_going(failed, by_holder, staying, locate))
    if not dry_run:
        _delete(namespace, names, out)
        if before:
            forget_last_error(running_shell())
        for one in failed:
            clear(one.frames)
        failed.clear()
        gc.collect()
        for memory in memories:
            memory.give_back(usual)
    after = _levels(memories)
    changes = tuple(DeviceChange(device, before.get(device, now), now) for device, now in after.items())
    has_gpu = not all(memory.is_fake for memory in memories)
    return Released(changes, gone, find_memory_holders(by_holder if dry_run else staying, locate), dry_run, has_gpu)


def find_all_holders(
    memories: Sequence[Memory], namespace: MutableMapping[str, Any], error: BaseException | None = None
) -> Released:
    """What ``release`` would free and which names hold the rest, without unnamed holders; nothing is changed.

    What ``error`` itself holds is told apart from what others do.
    """
    with gc_disabled():
        failed, locate = told_apart(find_error_frames(), error), locating(memories)
        by_holder = storages_by_holder(namespace, locate, {id(frame) for one in failed for frame in one.frames})
        return Released(
            (), tuple(_going(failed, by_holder, by_holder, locate)), named_holders(by_holder), is_dry_run=True
        )


def storages_of_earlier_errors(
    memories: Sequence[Memory], namespace: MutableMapping[str, Any], error: BaseException | None
) -> Storages:
    """Bytes by address that errors before ``error`` hold, and nothing else."""
    with gc_disabled():
        failed, locate = told_apart(find_error_frames(), error), locating(memories)
        by_holder = storages_by_holder(namespace, locate, {id(frame) for one in failed for frame in one.frames})
        parts = _alone(_held_by(failed, locate), by_holder.storages())
        earlier = [part for (_title, is_own), part in parts if not is_own]
        return {address: num_bytes for part in earlier for address, num_bytes in part.items()}


def _delete(namespace: MutableMapping[str, Any], names: Sequence[str], out: bool) -> None:
    shell = running_shell()
    for name in names:
        drop_name(name, namespace, shell)
    if out:
        drop_results(namespace, shell)


def _levels(memories: Sequence[Memory]) -> dict[str, Levels]:
    return {device: levels for memory in memories for device, levels in memory.levels().items()}


def locating(memories: Sequence[Memory]) -> Locate:
    """Finds storages on any of these memories."""
    if len(memories) == 1:
        return memories[0].storage

    def locate(tensor: torch.Tensor) -> Storage | None:
        for memory in memories:
            place = memory.storage(tensor)
            if place is not None:
                return place
        return None

    return locate


def _check(names: Sequence[str], namespace: MutableMapping[str, Any]) -> None:
    """Raise for a name that does not exist, before anything is deleted."""
    for name in names:
        if name not in namespace:
            close = get_close_matches(name, [one for one in namespace if not one.startswith("_")], n=1)
            offer = _("; did you mean {close!r}?", close=close[0]) if close else "."
            raise ValueError(_("names: there is no variable {name!r}{offer}", name=name, offer=offer))


def _results(namespace: Mapping[str, Any], out: bool) -> list[str]:
    return [name for name, _unused in named_values(namespace) if name.startswith("Out[")] if out else []


def _going(
    failed: Sequence[ErrorFrames], by_holder: HolderStorages, staying: HolderStorages, locate: Locate
) -> Iterator[Gone]:
    """What errors hold, then names to delete, without what stays or was already counted; largest first."""
    known = staying.storages()
    of_names = [((key[0], False), storages) for key, storages in by_holder.rows.items() if key not in staying.rows]
    for parts in _held_by(failed, locate), of_names:
        sizes: Counter[_What] = Counter()
        for what, going in _alone(parts, known):
            sizes[what] += sum(going.values())
        yield from (Gone(what, num_bytes, is_own) for (what, is_own), num_bytes in sizes.most_common() if num_bytes)


_What = tuple[str, bool]  # its title, and whether it is the error in question


def _held_by(failed: Sequence[ErrorFrames], locate: Locate) -> list[tuple[_What, Storages]]:
    """What the frames of each error lead to."""
    borders = {*namespaces_of_modules(), *(id(frame) for one in failed for frame in one.frames)}
    found = [((one.title, one.is_own), [value for frame in one.frames for value in referents(frame)]) for one in failed]
    return [(what, reach(roots, locate, borders).everything()) for what, roots in found]


def _alone(parts: Iterable[tuple[_What, Storages]], known: Storages) -> Iterator[tuple[_What, Storages]]:
    """Each part without what is ``known``, to which it is added."""
    for what, storages in parts:
        going = without(storages, known)
        known |= going
        yield what, going
