"""``release``: free the memory that errors keep alive, and say who holds the rest."""

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
    separate_error,
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
from oom_magic.one_line_errors import OneLineErrors
from oom_magic.results import Result


@dataclass(frozen=True, slots=True)
class DeviceChange:
    """One device before and after. Sizes in bytes."""

    device: str
    before: Levels
    after: Levels


@dataclass(frozen=True, slots=True)
class FreedItem:
    """An error or a name that was released, and the bytes that it alone held.

    ``is_of_error``: it is the error that the caller asked about.
    """

    what: str
    num_bytes: int
    is_of_error: bool = False


@dataclass(frozen=True, repr=False)
class Released(Result):
    """What ``release`` freed, or in a dry run would free, and who holds the rest. Sizes in bytes.

    ``devices`` is empty if none was used yet. ``holders`` count each byte once. Without ``has_gpu`` torch finds no
    accelerator, and the devices are those of the pretend GPU.
    """

    devices: tuple[DeviceChange, ...] = ()
    freed: tuple[FreedItem, ...] = ()
    holders: tuple[MemoryHolder, ...] = ()
    is_dry_run: bool = False
    has_gpu: bool = True

    @property
    def freed_allocated_bytes(self) -> int:
        """The tensors freed, on all devices."""
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
        """Bytes allocated for no tensor that Python can see: rounding, workspaces, buffers of libraries."""
        return max(self.allocated_bytes - sum(holder.num_bytes for holder in self.holders), 0)

    def with_earlier(self, earlier: Sequence[FreedItem]) -> Released:
        """The same, with items found earlier that Python has collected since."""
        names = {item.what for item in self.freed}
        return replace(self, freed=(*self.freed, *(item for item in earlier if item.what not in names)))

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
    """Free what errors keep alive on torch's accelerator and empty its cache.

    Returns what was freed and who holds the rest. Afterwards ``%debug`` finds the frames of earlier errors empty, and
    says so.

    ``namespace``: where names are looked up (default: the notebook's, or the caller's globals).
    ``names``: variables to delete, too.
    ``out``: the results that IPython keeps are dropped, too.
    ``dry_run``: change nothing, and return what would be freed.
    """
    with OneLineErrors("release"):
        found = users_names() if namespace is None else namespace
        return release_from(find_accelerators(), found, names=names, out=out, dry_run=dry_run)


def release_from(
    memories: Sequence[Memory],
    namespace: MutableMapping[str, Any],
    *,
    names: Sequence[str] = (),
    out: bool = False,
    dry_run: bool = False,
    allocated_before: Mapping[str, int] = MappingProxyType({}),
) -> Released:
    """``release`` on the devices of ``memories``; without any, errors are left as they are.

    ``allocated_before``: bytes by device that were allocated before the error, if known.
    """
    _check_names(names, namespace)
    with gc_disabled():
        return _release(memories, namespace, names, out, dry_run, allocated_before)


def _release(
    memories: Sequence[Memory],
    namespace: MutableMapping[str, Any],
    names: Sequence[str],
    out: bool,
    dry_run: bool,
    allocated_before: Mapping[str, int],
) -> Released:
    before = _levels(memories)
    failed = find_error_frames() if before else []
    locate = make_locate(memories)
    by_holder = (
        storages_by_holder(namespace, locate, {id(frame) for one in failed for frame in one.frames})
        if before
        else HolderStorages()
    )
    remaining = by_holder.without({*names, *_kept_results(namespace, out)})
    freed = tuple(_freed_items(failed, by_holder, remaining, locate))
    if not dry_run:
        _delete(namespace, names, out)
        if before:
            forget_last_error(running_shell())
        for one in failed:
            clear(one.frames)
        failed.clear()
        gc.collect()
        for memory in memories:
            memory.return_cached(allocated_before)
    after = _levels(memories)
    changes = tuple(DeviceChange(device, before.get(device, now), now) for device, now in after.items())
    has_gpu = not all(memory.is_fake for memory in memories)
    holders = find_memory_holders(by_holder if dry_run else remaining, locate)
    return Released(changes, freed, holders, dry_run, has_gpu)


def find_all_holders(
    memories: Sequence[Memory], namespace: MutableMapping[str, Any], error: BaseException | None = None
) -> Released:
    """What ``release`` would free, and which names hold the rest; nothing is changed.

    What ``error`` holds is separate from what other errors hold. Holders without a name are not searched for.
    """
    with gc_disabled():
        failed, locate = separate_error(find_error_frames(), error), make_locate(memories)
        by_holder = storages_by_holder(namespace, locate, {id(frame) for one in failed for frame in one.frames})
        return Released(
            (), tuple(_freed_items(failed, by_holder, by_holder, locate)), named_holders(by_holder), is_dry_run=True
        )


def storages_of_earlier_errors(
    memories: Sequence[Memory], namespace: MutableMapping[str, Any], error: BaseException | None
) -> Storages:
    """Bytes by address of the storages that only errors before ``error`` hold."""
    with gc_disabled():
        failed, locate = separate_error(find_error_frames(), error), make_locate(memories)
        if all(one.is_of_error for one in failed):
            return {}
        by_holder = storages_by_holder(namespace, locate, {id(frame) for one in failed for frame in one.frames})
        parts = _exclusive_parts(_reached_by_errors(failed, locate), by_holder.storages())
        earlier = [part for (_title, is_of_error), part in parts if not is_of_error]
        return {address: num_bytes for part in earlier for address, num_bytes in part.items()}


def _delete(namespace: MutableMapping[str, Any], names: Sequence[str], out: bool) -> None:
    shell = running_shell()
    for name in names:
        drop_name(name, namespace, shell)
    if out:
        drop_results(namespace, shell)


def _levels(memories: Sequence[Memory]) -> dict[str, Levels]:
    return {device: levels for memory in memories for device, levels in memory.levels().items()}


def make_locate(memories: Sequence[Memory]) -> Locate:
    """A function that finds a tensor's storage on any of these devices."""
    if len(memories) == 1:
        return memories[0].storage

    def locate(tensor: torch.Tensor) -> Storage | None:
        for memory in memories:
            place = memory.storage(tensor)
            if place is not None:
                return place
        return None

    return locate


def _check_names(names: Sequence[str], namespace: MutableMapping[str, Any]) -> None:
    """Raise for a name that does not exist, before anything is deleted."""
    for name in names:
        if name not in namespace:
            close = get_close_matches(name, [one for one in namespace if not one.startswith("_")], n=1)
            offer = _("; did you mean {close!r}?", close=close[0]) if close else "."
            raise ValueError(_("names: there is no variable {name!r}{offer}", name=name, offer=offer))


def _kept_results(namespace: Mapping[str, Any], out: bool) -> list[str]:
    return [name for name, _unused in named_values(namespace) if name.startswith("Out[")] if out else []


def _freed_items(
    failed: Sequence[ErrorFrames], by_holder: HolderStorages, remaining: HolderStorages, locate: Locate
) -> Iterator[FreedItem]:
    """Errors, then deleted names, each with what neither ``remaining`` holders nor an earlier item hold."""
    known = remaining.storages()
    of_names = [((key[0], False), storages) for key, storages in by_holder.rows.items() if key not in remaining.rows]
    for parts in _reached_by_errors(failed, locate), of_names:
        sizes: Counter[_Key] = Counter()
        for key, storages in _exclusive_parts(parts, known):
            sizes[key] += sum(storages.values())
        for (what, is_of_error), num_bytes in sizes.most_common():
            if num_bytes:
                yield FreedItem(what, num_bytes, is_of_error)


_Key = tuple[str, bool]  # the title, and whether it is the error that the caller asked about


def _reached_by_errors(failed: Sequence[ErrorFrames], locate: Locate) -> list[tuple[_Key, Storages]]:
    """The storages that the frames of each error reach."""
    borders = {*namespaces_of_modules(), *(id(frame) for error in failed for frame in error.frames)}
    found = []
    for error in failed:
        roots = [value for frame in error.frames for value in referents(frame)]
        found.append(((error.title, error.is_of_error), reach(roots, locate, borders).everything()))
    return found


def _exclusive_parts(parts: Iterable[tuple[_Key, Storages]], known: Storages) -> Iterator[tuple[_Key, Storages]]:
    """Each part without the storages in ``known``, to which they are added."""
    for key, storages in parts:
        exclusive = without(storages, known)
        known |= exclusive
        yield key, exclusive
