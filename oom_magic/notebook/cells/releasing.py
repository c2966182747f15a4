"""What ``%oom_free`` releases: the GPU's memory or, after dry cells, the pretend GPU's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from oom_magic.language import _
from oom_magic.measure.device.accelerators import Levels, Memory, find_accelerators
from oom_magic.measure.history.attribution import Storage
from oom_magic.measure.holders.reach import Locate
from oom_magic.measure.holders.release import (
    find_all_holders,
    make_locate,
    release_from,
    storages_of_earlier_errors,
)

if TYPE_CHECKING:
    from oom_magic.measure.holders.release import Released
    from oom_magic.notebook.cells.gpumem import CellRunner
    from oom_magic.notebook.cells.names import DryNamespace
    from oom_magic.predict.session import DrySession


class FakeGPUMemory:
    """The memory of a dry session."""

    is_fake = True

    def __init__(self, session: DrySession) -> None:
        self._session = session
        name = _("pretend {name}", name=session.gpu.name)
        numbers = range(len(session.recorders))
        self._devices = [name] if len(numbers) == 1 else [f"{name} cuda:{number}" for number in numbers]

    def allocated(self) -> dict[str, int]:
        """Bytes in tensors now on the pretend GPU, card by card."""
        return {device: levels.allocated_bytes for device, levels in self.levels().items()}

    def levels(self) -> dict[str, Levels]:
        """What is taken now on the pretend GPU, card by card."""
        allocators = (recorder.allocator for recorder in self._session.recorders)
        return {
            device: Levels(allocator.allocated_bytes, allocator.reserved_bytes)
            for device, allocator in zip(self._devices, allocators, strict=True)
        }

    def storage(self, tensor: Any) -> Storage | None:
        """Where a tensor lies there; None if it does not."""
        return self._session.storage_of(tensor)

    def return_cached(self, allocated_before: Mapping[str, int]) -> None:
        """What ``torch.cuda.empty_cache`` does; workspaces if more than ``allocated_before`` is allocated."""
        if any(num_bytes > allocated_before.get(device, 0) for device, num_bytes in self.allocated().items()):
            self._session.fake_gpu.clear_workspaces()
        for recorder in self._session.recorders:
            recorder.empty_cache()


class DryAndUsersNames(MutableMapping[str, Any]):
    """The names that dry cells see: their own above the user's. Deleting one uncovers the user's."""

    def __init__(self, dry: DryNamespace, users: dict[str, Any]) -> None:
        self._dry = dry
        self._users = users

    def __getitem__(self, name: str) -> Any:
        return self._dry.names[name] if name in self._dry.names else self._users[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._users[name] = value

    def __delitem__(self, name: str) -> None:
        """Forget a dry cell's name, else delete the user's."""
        if name in self._dry.names:
            self._dry.forget(name)
        else:
            del self._users[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._users, **self._dry.names})

    def __len__(self) -> int:
        return len({**self._users, **self._dry.names})


def release_in(shell: InteractiveShell, runner: CellRunner, **wishes: Any) -> Released:
    """``release_from`` the GPU and the pretend GPU; names may be those of dry cells."""
    found = DryAndUsersNames(runner.names, shell.user_ns)
    try:
        return release_from(_memories(runner), found, **wishes)
    except ValueError as error:
        raise UsageError(f"%oom_free: {error}") from None


def find_holders(shell: InteractiveShell, runner: CellRunner, error: BaseException | None) -> Released | None:
    """Who holds memory now, ``error`` apart, without changing anything; None where no device was used."""
    memories = [memory for memory in _memories(runner) if memory.allocated()]
    return find_all_holders(memories, DryAndUsersNames(runner.names, shell.user_ns), error) if memories else None


def held_by_earlier_errors(shell: InteractiveShell, runner: CellRunner, error: BaseException | None) -> frozenset[int]:
    """The tensors, by identity, whose memory errors before ``error`` hold, and nothing else."""
    from oom_magic.predict.isolation.live_objects import find_live_objects

    memories = [memory for memory in _memories(runner) if memory.allocated()]
    storages = storages_of_earlier_errors(memories, DryAndUsersNames(runner.names, shell.user_ns), error)
    locate = make_locate(memories)
    places = ((id(one), locate(one)) for one in (find_live_objects().tensors if storages else ()))
    return frozenset(identity for identity, place in places if place is not None and place[0] in storages)


def names_and_places(shell: InteractiveShell, runner: CellRunner) -> tuple[Mapping[str, Any], Locate]:
    """The names that dry cells see, and where their tensors lie, on the GPU or the pretend GPU."""
    return DryAndUsersNames(runner.names, shell.user_ns), make_locate(_memories(runner))


def _memories(runner: CellRunner) -> list[Memory]:
    fake: list[Memory] = [] if runner.session is None else [FakeGPUMemory(runner.session)]
    return [*find_accelerators(), *fake]


def allocated_now(runner: CellRunner) -> dict[str, int]:
    """Bytes in tensors now, by device; the pretend GPU is one."""
    return {device: num_bytes for memory in _memories(runner) for device, num_bytes in memory.allocated().items()}
