"""The memory of the pretend GPU: the card of each storage, and its allocation.

There may be several cards, each with a recorder and an allocator of its own. A tensor on one is a ``meta`` tensor whose
storage is listed here; and so is a host tensor that is too large to be kept. Small host tensors stay real, so that
masks, lengths and labels keep their values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction  # type: ignore[attr-defined]

from oom_magic.language import _, ngettext
from oom_magic.memory.allocator.caching_allocator import AllocatorOutOfMemory
from oom_magic.memory.allocator.segments import MIN_LARGE_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES, round_up
from oom_magic.memory.categories import Category
from oom_magic.memory.timeline import Phase
from oom_magic.memory.workspaces import KeptWorkspace, Owner, PrivatePool
from oom_magic.predict.fake_cuda.places import Location, Place, Storage, identity, tensors_in
from oom_magic.predict.fake_cuda.streams import Streams
from oom_magic.predict.instrumentation.attribution import Attribution
from oom_magic.predict.instrumentation.recorder import Recorder, SizeExpression
from oom_magic.predict.operators.fallbacks import storage_under
from oom_magic.predict.operators.gradients import RunningNode

if TYPE_CHECKING:
    from oom_magic.predict.operators.known_values.values import Values

_CARD_BITS = 48  # an address on a card has its number above them; no address of a process is as high


class OverwrittenError(RuntimeError):
    """Code reads a tensor whose memory others have: PyTorch's own error, which a real run raises, too."""


class FakeMemory:
    """Storages by identity, on a card for each of ``recorders``.

    ``current`` is the card on which memory is taken: the one that the user's code set, or, inside an operator, that of
    its tensors; ``recorder`` and ``workspaces`` are those of the current card.
    """

    values: Values

    def __init__(
        self,
        recorders: Sequence[Recorder],
        attribution: Attribution,
        fail: Callable[[AllocatorOutOfMemory, str, Phase], BaseException | None],
    ) -> None:
        super().__init__()
        self.recorders = tuple(recorders)
        self.current = 0
        self.recorder = self.recorders[0]
        self.attribution = attribution
        self.creating: Place | None = None
        self.creating_card = 0
        self.traces: Callable[[torch.Tensor], bool] | None = None  # says of a compiler's tensor that it is on "cuda"
        self.releases: list[Callable[[], None]] = []  # each lets go of what only the dry run still holds
        self.streams = Streams(self)
        self.running_node = RunningNode()
        self._on_host: set[int] = set()  # keys of fake storages there
        self._cards_in_use: set[int] = set()  # cards on which tensors are or were; a rank of a job uses one of many
        self.uses_current_card_only = True  # whether no tensor is or was on another card than the current
        self.first_card = 0  # on which a tensor was; nodes of autograd numbered below ``alone_until`` are its
        self.alone_until = sys.maxsize
        self.untouchable: dict[int, str] = {}  # ``identity``s of the user's tensors that stayed real, with the reason
        self.fix_for_host: Callable[[torch.Tensor], str] | None = None  # what to do about an operand on the host
        self.used_elsewhere: set[int] = set()  # the subset that another thread uses
        self._fail = fail
        self._storages: dict[int, Storage] = {}
        self._overwritten: dict[int, tuple[Storage, str]] = {}  # by key
        self._dropped: set[int] = set()  # keys of storages from before the trace that were freed early in it
        self._workspaces: list[dict[Owner, int]] = [{} for _unused in self.recorders]  # of libraries, by owner
        self._private: dict[tuple[int, tuple[int, int]], int] = {}  # bytes of pools from before, by card and name

    # -- places ---------------------------------------------------------------

    @property
    def has_fake_on_host(self) -> bool:
        """Whether some host tensor is too large to be real."""
        return bool(self._on_host)

    def storage_of(self, tensor: torch.Tensor) -> Storage | None:
        """The entry of a fake tensor's storage; None for a real tensor."""
        with DisableTorchFunction():
            return self._storages.get(storage_under(tensor)._cdata) if tensor.is_meta else None

    def address(self, storage: torch.UntypedStorage) -> int:
        """Where a fake storage lies: in a block of the card, which others get after it, or at an address of its own."""
        known = self._storages.get(storage._cdata)
        block = None if known is None else self.recorders[known.card].blocks.get(known.allocation)
        return storage._cdata if known is None or block is None else known.card + 1 << _CARD_BITS | block.address

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where a fake tensor is; None for a real one."""
        if self.traces is not None and self.traces(tensor):
            return Place.GPU
        storage = self.storage_of(tensor)
        return None if storage is None else storage.place

    def is_on_gpu(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the pretend GPU."""
        return self.place(tensor) is Place.GPU

    def location(self, tensor: torch.Tensor) -> Location | None:
        """Where a fake tensor is, and on which card; None for a real one."""
        storage = self.storage_of(tensor)
        return None if storage is None else Location(storage.place, storage.card)

    @property
    def workspaces(self) -> dict[Owner, int]:
        """Allocations that libraries keep on the current card between calls, by owner."""
        return self._workspaces[self.current]

    def set_current(self, card: int) -> None:
        """``torch.cuda.set_device``."""
        self.current, self.recorder = card, self.recorders[card]
        self.uses_current_card_only = self._cards_in_use <= {card}

    def card_named(self, index: int | None) -> int:
        """A card's number (None: the current). Raises CUDA's error where there is none of that number."""
        index = self.current if index is None else index
        if not 0 <= index < len(self.recorders):
            number = len(self.recorders)
            fix = ngettext(
                "the pretend machine has one GPU, cuda:0; use num_gpus={more} for more.",
                "the pretend machine has {count} GPUs, cuda:0 to cuda:{last}; use num_gpus={more} for more.",
                number,
                last=number - 1,
                more=index + 1,
            )
            raise RuntimeError(f"CUDA error: invalid device ordinal (cuda:{index}); {fix}")
        return index

    @contextmanager
    def _switched(self, card: int) -> Iterator[None]:
        before = self.current
        self.set_current(card)
        try:
            yield
        finally:
            self.set_current(before)

    def on_card(self, card: int) -> AbstractContextManager[None]:
        """Allocate on ``card`` inside the block, as under CUDA's device guards."""
        return nullcontext() if card == self.current else self._switched(card)

    def on_card_of(self, *tensors: torch.Tensor) -> AbstractContextManager[None]:
        """``on_card`` of the first of ``tensors`` that is on one."""
        if self.uses_current_card_only:
            return nullcontext()
        locations = (self.location(tensor) for tensor in tensors)
        found = next(
            (location.card for location in locations if location is not None and location.place is Place.GPU),
            self.current,
        )
        return self.on_card(found)

    def on_card_among(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """``on_card_of`` the tensors among an operator's arguments."""
        return nullcontext() if self.uses_current_card_only else self.on_card_of(*tensors_in(args, kwargs))

    def live_storages(self) -> Iterator[Storage]:
        """All storages on the pretend GPU that are alive."""
        return (storage for storage in list(self._storages.values()) if storage.allocation >= 0)

    def restart(self) -> None:
        """Begin a new trace; live storages stay."""
        self._dropped.clear()
        self.set_current(0)
        numbers = [recorder.restart() for recorder in self.recorders]
        for storage in self.live_storages():
            storage.allocation = numbers[storage.card][storage.allocation]
        self._workspaces = [
            {owner: numbers[card][number] for owner, number in workspaces.items()}
            for card, workspaces in enumerate(self._workspaces)
        ]

    def clear_workspaces(self) -> None:
        """Free the workspaces that libraries keep between calls; they are allocated again when needed."""
        for recorder, workspaces in zip(self.recorders, self._workspaces, strict=True):
            for number in workspaces.values():
                recorder.free(number)
            workspaces.clear()

    def workspaces_before(self) -> list[KeptWorkspace]:
        """The workspaces that libraries had when the trace began."""
        return [
            KeptWorkspace(card, owner, recorder.columns[number][0])
            for card, (recorder, workspaces) in enumerate(zip(self.recorders, self._workspaces, strict=True))
            for owner, number in workspaces.items()
            if number < recorder.num_before
        ]

    def keep_workspaces(self, workspaces: Iterable[KeptWorkspace]) -> None:
        """Allocate workspaces that exist before the code runs, on the cards that exist."""
        for one in workspaces:
            if one.card < len(self.recorders) and one.owner not in self._workspaces[one.card]:
                with self.on_card(one.card):
                    number = self.take(one.num_bytes, one.owner[0], Phase.OTHER, Category.WORKSPACE)
                    self.workspaces[one.owner] = number

    def keep_private_pools(self, pools: Iterable[PrivatePool]) -> int:
        """Hold what private pools have before the code runs, on the cards that exist; the bytes held so far.

        What is free there is reserved for their owners alone: in segments of the small pool, each of a stream of its
        own, from which a block was taken and freed. What is allocated is taken in pieces of which none is rounded up.
        """
        for one in pools:
            if one.card < len(self.recorders) and one[:2] not in self._private:
                self._private[one[:2]] = one.allocated_bytes + one.free_bytes
                with self.on_card(one.card):
                    with self.streams.alone():
                        for num_bytes in _unrounded(one.allocated_bytes):
                            self.take(num_bytes, "private_pool", Phase.OTHER, Category.WORKSPACE)
                    for _unused in range(round_up(one.free_bytes, SMALL_SEGMENT_BYTES) // SMALL_SEGMENT_BYTES):
                        with self.streams.alone():
                            self.recorder.free(self.take(1, "private_pool", Phase.OTHER, Category.WORKSPACE))
        return sum(self._private.values())

    def was_there_before(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory was allocated before the trace began."""
        storage = self.storage_of(tensor)
        return storage is not None and self._is_from_before(storage)

    def _is_from_before(self, storage: Storage) -> bool:
        is_there = 0 <= storage.allocation < self.recorders[storage.card].num_before
        return is_there or storage.key in self._dropped

    def free_made(self, but: Collection[int]) -> int:
        """Free what tensors took in this trace, apart from the storages with the keys ``but``, and libraries'
        workspaces; the bytes of the tensors.
        """
        freed = 0
        for recorder, workspaces in zip(self.recorders, self._workspaces, strict=True):
            for owner in [owner for owner, number in workspaces.items() if number >= recorder.num_before]:
                recorder.free(workspaces.pop(owner))
        for storage in self.live_storages():
            recorder = self.recorders[storage.card]
            if storage.allocation >= recorder.num_before and storage.key not in but:
                freed += storage.num_bytes
                self.free_early(storage)
        return freed

    def free_early(self, storage: Storage) -> None:
        """Free a storage's memory while tensors still refer to it."""
        if storage.allocation >= 0:
            if self._is_from_before(storage):
                self._dropped.add(storage.key)
            self.recorders[storage.card].free(storage.allocation)
            storage.allocation = -1

    def overwrite(self, storage: Storage, error: str) -> None:
        """Give a storage's memory to others: an operator that takes it raises OverwrittenError with the text
        ``error`` (``set_storage_data_ptr_access_error_msg``)."""
        self.free_early(storage)
        self._overwritten[storage.key] = storage, error

    def check_overwritten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise OverwrittenError if an operator takes memory that others have now."""
        for tensor in tensors_in(args, kwargs):
            storage = self.storage_of(tensor)
            known, error = self._overwritten.get(-1 if storage is None else storage.key, (None, ""))
            if known is not None and known is storage:
                raise OverwrittenError(error)

    @contextmanager
    def creating_on(self, place: Place, card: int | None = None) -> Iterator[None]:
        """New tensors made inside without a tensor argument are at ``place``, on ``card`` (default: the current)."""
        before = self.creating, self.creating_card
        self.creating, self.creating_card = place, self.current if card is None else card
        try:
            yield
        finally:
            self.creating, self.creating_card = before

    def meant_by_meta(self) -> Place:
        """The place of a tensor that C++ code makes on "meta": where no place was named, it took the device from
        another tensor."""
        is_on_host = self.has_fake_on_host and not any(one.allocator.allocated_bytes for one in self.recorders)
        return self.creating or (Place.HOST if is_on_host else Place.GPU)

    def assign(self, tensor: torch.Tensor, category: Category) -> None:
        """Set the category of a tensor's memory."""
        storage = self.storage_of(tensor)
        if storage is not None and storage.allocation >= 0:
            self.recorders[storage.card].assign(storage.allocation, category)

    def note_freed_late(self, tensor: torch.Tensor) -> bool:
        """Note that a real run may free a tensor's memory later than a dry run does; whether it has any on a card."""
        storage = self.storage_of(tensor)
        if storage is None or storage.allocation < 0:
            return False
        self.recorders[storage.card].freed_late.add(storage.allocation)
        return True

    def check_written(self, *tensors: torch.Tensor) -> None:
        """Raise RuntimeError, with the reason and what to do, if one of these tensors must not be changed."""
        for tensor in tensors if self.untouchable else ():
            with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]  # a lazy parameter allows nothing
                reason = None if tensor.is_meta else self.untouchable.get(identity(tensor))
            if reason is not None:
                raise RuntimeError(
                    _(
                        "{reason}: a dry run can neither follow nor change it. Let the run work on a copy"
                        " (copy.deepcopy), or wait until nothing else uses it.",
                        reason=reason,
                    )
                )

    def check_alone(self, tensor: torch.Tensor) -> None:
        """Raise RuntimeError if another thread uses this tensor: its backward may be writing the gradient."""
        if self.used_elsewhere and not tensor.is_meta and identity(tensor) in self.used_elsewhere:
            self.check_written(tensor)

    # -- allocating and freeing -----------------------------------------------

    def adopt(self, tensor: torch.Tensor, place: Place, operator: str, phase: Phase | None = None) -> None:
        """Register a tensor's storage, if it is new, and allocate its memory."""
        if place is Place.GPU:
            self.adopt_on_gpu(tensor, operator, phase or self.attribution.phase(False))
        else:
            self._list(tensor.untyped_storage(), place, -1)

    def adopt_on_gpu(self, tensor: torch.Tensor, operator: str, phase: Phase, num_bytes: int | None = None) -> None:
        """``adopt`` on the GPU, allocating ``num_bytes`` (default: the storage's size)."""
        storage = storage_under(tensor)
        known = self._storages.get(storage._cdata)
        if known is None:
            num_bytes = storage.nbytes() if num_bytes is None else num_bytes
            self.recorder.dims.extend(tensor.shape)
            self._list(storage, Place.GPU, self.take(num_bytes, operator, phase) if num_bytes else -1)
        elif storage.nbytes() > known.num_bytes and known.place is Place.GPU:
            before, known.num_bytes = known.allocation, storage.nbytes()
            with self.on_card(known.card):
                known.allocation = self.take(known.num_bytes, operator, phase)
                if before >= 0:
                    self.recorder.free(before)

    def adopt_all(self, out: Any, place: Place, operator: str, phase: Phase) -> None:
        """``adopt`` every tensor of an operator's result."""
        if isinstance(out, torch.Tensor):
            self.adopt(out, place, operator, phase)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self.adopt(item, place, operator, phase)

    def without_memory(self, out: Any, place: Place) -> Any:
        """An operator's result, which takes no memory at ``place``."""
        for tensor in tensors_in((out,), {}):
            self._list(tensor.untyped_storage(), place, -1)
        return out

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow ``storage.resize_``: allocate the new memory, then free the old (``resize_bytes_cuda``)."""
        known = self._storages.get(storage._cdata)
        if known is None or known.place is not Place.GPU:
            return
        self.values.forget(storage._cdata)  # as FSDP does, code then fills it anew
        before, known.num_bytes = known.allocation, storage.nbytes()
        phase = self.attribution.phase(False)
        with self.on_card(known.card):
            known.allocation = self.take(known.num_bytes, "resize_", phase) if known.num_bytes else -1
            if before >= 0:
                self.recorder.free(before)

    def _list(self, storage: torch.UntypedStorage, place: Place, allocation: int) -> None:
        key = storage._cdata
        if key not in self._storages:
            entry = self._storages[key] = Storage(storage, self._forget)
            entry.key, entry.place, entry.allocation = key, place, allocation
            entry.card = self.current if place is Place.GPU else 0
            entry.num_bytes = storage.nbytes()
            if place is Place.HOST:
                self._on_host.add(key)
            elif place is Place.GPU and entry.card not in self._cards_in_use:
                self._note_card(entry.card)

    def _note_card(self, card: int) -> None:
        """Note that the current card has its first tensor."""
        if not self._cards_in_use:
            self.first_card = card
        elif len(self._cards_in_use) == 1:
            self.alone_until = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._cards_in_use.add(card)
        self.uses_current_card_only = len(self._cards_in_use) == 1

    def take(
        self,
        num_bytes: int,
        operator: str,
        phase: Phase,
        category: Category = Category.TEMPORARY,
        expression: SizeExpression | None = None,
    ) -> int:
        """Take memory on the current card; the number of the allocation. Raises the simulated OutOfMemoryError."""
        self._let_go()
        if torch._C._current_graph_task_id() != -1:
            self.running_node.note(self.current, len(self.recorder.columns))
        line, module = self.attribution.place(phase)
        stream = self.streams.at_work(operator, num_bytes)
        try:
            return self.recorder.allocate(num_bytes, operator, phase, line, module, category, expression, stream)
        except AllocatorOutOfMemory as error:
            failure = self._fail(error, operator, phase)
        if failure is None:  # the card has room now
            return self.recorder.allocate(num_bytes, operator, phase, line, module, category, expression, stream)
        try:
            raise failure  # outside of the except: the allocator's own error shall not be its context
        finally:
            del failure  # a frame that holds its own error keeps the frames above alive

    def _let_go(self) -> None:
        """Apart from ``take``: a frame in the traceback of an error that somebody keeps would hold what it names."""
        for release in self.releases:
            release()

    def _forget(self, entry: Storage) -> None:
        if self._storages.get(entry.key) is entry:
            del self._storages[entry.key]
            self._on_host.discard(entry.key)
            self._overwritten.pop(entry.key, None)
            self._dropped.discard(entry.key)
            self.values.forget(entry.key)
        if entry.allocation >= 0:
            self.recorders[entry.card].free(entry.allocation)


def _unrounded(num_bytes: int) -> Iterator[int]:
    """Sizes that make up ``num_bytes``, none of which gets a larger block than it asks for."""
    whole = num_bytes // SMALL_SEGMENT_BYTES * SMALL_SEGMENT_BYTES
    left = num_bytes
    if whole >= MIN_LARGE_BYTES:
        yield whole
        left -= whole
    while left > 0:
        yield min(left, SMALL_BYTES)
        left -= SMALL_BYTES
