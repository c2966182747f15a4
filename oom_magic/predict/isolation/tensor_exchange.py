"""The user's own objects during a dry run: usable inside it, exactly as before after it.

A real tensor is exchanged for a fake copy while the dry run lasts (``torch._C._swap_tensor_impl``, the mechanism
under ``torch.utils.swap_tensors``), so whoever holds the tensor sees the copy and no data is touched. Other state
that Python code may change (a module's mode, an optimizer's state, global variables) is recorded and restored.

All tensors of the process are exchanged, however the code may come by them, as long as no other thread runs code of the
user's. If one does, only what the dry run can reach is exchanged, except what the other thread may touch: those tensors
stay real, and a dry run that would write to one is refused. The same holds for tensors that PyTorch does not release,
such as weights that compiled code watches.

Nothing can be lost. The tensors themselves show whether they are exchanged (``exchanged_pair``). So the undo is
recorded before the exchange, and can be called any number of times.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from oom_magic.language import _
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import Place, identity
from oom_magic.predict.instrumentation.starting_point import StartingPoint, kept_on_cards
from oom_magic.predict.instrumentation.stop_rule import Finished
from oom_magic.predict.isolation.between_runs.contents_kept import ContentsKept
from oom_magic.predict.isolation.between_runs.context_values import ContextValues
from oom_magic.predict.isolation.between_runs.host_values import Written, written_in
from oom_magic.predict.isolation.between_runs.settings_kept import SettingsKept
from oom_magic.predict.isolation.exchanged_pair import ExchangedPair, tables_of_hooks
from oom_magic.predict.isolation.fake_copies import FakeCopies, made_anew
from oom_magic.predict.isolation.gradients_from_before import GradientsFromBefore, has_own_memory
from oom_magic.predict.isolation.live_objects import LiveObjects, find_live_objects
from oom_magic.predict.isolation.objects.copies import Copies
from oom_magic.predict.isolation.objects.dropped import ObjectsDropped
from oom_magic.predict.isolation.objects.iterators import Iterators
from oom_magic.predict.isolation.objects.let_go import ContainersLetGo
from oom_magic.predict.isolation.objects.users_objects import note_state
from oom_magic.predict.isolation.patching import Journal, patched
from oom_magic.predict.isolation.process.event_loops import keep_event_loops
from oom_magic.predict.isolation.reach import Reach, used_by_other_threads, users_modules
from oom_magic.predict.isolation.run_threads import threads_of_run
from oom_magic.predict.isolation.scripted_modules import scripted_let_go
from oom_magic.predict.isolation.snapshot import Changes, Snapshot
from oom_magic.predict.isolation.tensor_names import (
    find_name,
    has_own_data,
    is_plain,
    is_sparse_on_card,
    kind_of,
    names_of,
    unnamed,
)
from oom_magic.predict.operators.fallbacks import storage_under


class TensorExchange:
    """Exchanges the user's tensors and notes the rest, around each run of a session.

    With ``lasting``, what the code did to the user's objects is there again in the next run of the same session.
    With an ``origin`` the first run starts from what that session's last run found, with a ``start`` from what is noted
    there; both stay as they are. Tensors with the identities ``absent`` take nothing.
    """

    def __init__(
        self,
        gpu: FakeGPU,
        lasting: bool,
        origin: TensorExchange | None = None,
        start: StartingPoint | None = None,
        absent: Collection[int] = frozenset(),
    ) -> None:
        self.gpu = gpu
        self.is_lasting = lasting
        self._origin = origin
        self._start = start
        self._absent = absent
        self._copies: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._written: dict[int, Written] = {}  # host tensors with values that the last run changed
        self._begun: dict[int, Written] = {}  # those that it began with
        self._others: set[int] = set()  # what other threads use during this run
        self._before: dict[int, weakref.ref[torch.Tensor]] = {}  # the last run
        self._exchanged: set[int] = set()  # the identities of what is exchanged now
        self._freed: set[int] = set()  # those of tensors that the run dropped, and whose copies have no memory
        self._run_copies = Copies()  # of iterators and the like, for the run that lasts
        self._iterators = Iterators(())
        self._users_iterators: set[int] = set() if origin is None else origin._users_iterators  # among dry runs' names
        self.context_values: ContextValues = (
            ContextValues() if origin is None else origin.context_values
        )  # among the changes
        self.start_of_run: StartingPoint | None = None  # of the last one, where earlier runs made something
        self.contents: ContentsKept = ContentsKept(None if origin is None else origin.contents)
        self.settings: SettingsKept = SettingsKept(None if origin is None else origin.settings.begun)
        self._made: Changes = {} if origin is None else origin._found
        self._found: Changes = self._made  # by the last run

    @contextmanager
    def exchanged(
        self,
        function: Callable[[], Any],
        namespaces: list[dict[str, Any]],
        assume: Callable[[str], None],
        above: Sequence[dict[str, Any]] = (),
    ) -> Iterator[None]:
        """While a dry run of ``function`` lasts. ``namespaces`` are the variables that its code may change, ``above``
        those of earlier dry runs that it sees in place of them.

        ``assume`` is told of tensors of theirs that could not be exchanged.
        """
        pairs: list[ExchangedPair] = []
        torch.clear_autocast_cache()  # C++ holds weak references to the weights that it has cast
        try:
            with Journal() as journal, patched(torch._C, {"_WeakTensorRef": _Watch}):
                with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]  # it is the user's code
                    real = self._begin(journal, pairs, function, namespaces, assume, above)
                is_whole = False
                try:
                    yield
                    is_whole = True
                except Finished:
                    is_whole = True
                    raise
                finally:
                    if self.is_lasting:
                        self._made = real.changes()
                        ahead = self._iterators.copies_ahead()
                        self.contents.end(real, namespaces, self._run_copies, ahead, assume, is_whole)
                        # Values of host tensors are copied each time: other sessions would copy a copy that stayed.
                        stay = (one for one in pairs if one.tensor.is_meta and id(one.tensor) not in self._freed)
                        self._copies = {id(one.tensor): one.remembered() for one in stay}
                        self._begun, self._written = self._written, written_in(pairs, self._written)
                    del real
        finally:
            self._unguard()
            pairs.clear()  # an exception that somebody keeps holds this frame: each later run would double their number

    def _begin(
        self,
        journal: Journal,
        pairs: list[ExchangedPair],
        function: Callable[[], Any],
        namespaces: list[dict[str, Any]],
        assume: Callable[[str], None],
        above: Sequence[dict[str, Any]],
    ) -> Snapshot:
        """Note everything, then exchange it; what was noted."""
        live, others = _live_objects(function, namespaces)
        self._others = set() if others is None else others.reach.seen  # what stays other threads' during this run
        self._run_copies = self._new_copies()
        give_scripted = scripted_let_go(journal, live)
        keep_event_loops(journal, live.loops, assume)
        if self.is_lasting:
            self._before = {id(tensor): weakref.ref(tensor) for tensor in live.tensors}
        self._iterators = Iterators(namespaces)
        for tell in (self._run_copies.tell, self._iterators.tell):
            journal.record(functools.partial(tell, assume))
        real = Snapshot(self._others)
        for hooks in itertools.chain.from_iterable(map(tables_of_hooks, live.tensors)):
            real.add_plain(hooks, 1)
        journal.record(real.restore)
        own = self._made_by_runs(live.tensors)
        note_state(real, live, namespaces, self._run_copies, assume, above, self._iterators, own)
        self._iterators.watch_copies(self._run_copies)
        set_by_runs = self.context_values.set_by_runs
        real.add(set_by_runs, 1, self.context_values)
        self._found = self._made
        real.apply(self._found)
        self.contents.begin(real, above)
        for start in (self._start, None if self._origin is None else self._origin.start_of_run):
            if start is not None:
                start.restore(real.add, functools.partial(made_anew, self.gpu), self._run_copies.original)
        self._keep_memory(live.tensors, assume)
        self._exchange(journal, pairs, live.tensors, give_scripted)
        self._guard(journal, live.tensors, pairs, others, namespaces, assume)
        self._watch(real, live, [*namespaces, set_by_runs], above, [one.tensor for one in pairs], own)
        self.start_of_run = self._starting_point(live, above) if own or _have_own(above, namespaces) else None
        return real

    def _starting_point(self, live: LiveObjects, above: Sequence[dict[str, Any]]) -> StartingPoint:
        def device_of(tensor: torch.Tensor) -> torch.device:
            location = self.gpu.location(tensor) if tensor.is_meta else None
            return tensor.device if location is None else location.device

        return StartingPoint(above, live=live, device_of=device_of)

    def _watch(
        self,
        real: Snapshot,
        live: LiveObjects,
        names: list[dict[Any, Any]],
        above: Sequence[dict[str, Any]],
        exchanged: list[torch.Tensor],
        own: set[int],
    ) -> None:
        """Before each allocation, free what nobody has any more."""
        containers = ContainersLetGo(real)
        self._freed = set()
        watched = (containers, self._found, self._freed)
        dropped = ObjectsDropped(self.gpu, real, live, names, above, exchanged, own, *watched)
        self.gpu.releases += [containers.release, dropped.release]

    def _new_copies(self) -> Copies:
        return Copies(self._others, self.gpu.streams.stand_ins(), self._users_iterators if self.is_lasting else None)

    def _made_by_runs(self, tensors: list[torch.Tensor]) -> set[int]:
        """The identities of those that this session's earlier runs made: nothing of theirs is to be put back."""
        return {id(one) for one in tensors if one.is_meta and self.gpu.place(one) is not None}

    @property
    def functions_held(self) -> list[tuple[Any, Callable[[Any], object]]]:
        """The functions that the user's objects hold in this run, each with what sets another in its place."""
        return self._run_copies.functions

    def end_copies(self, assume: Callable[[str], None]) -> None:
        """Inside the run, when its code has ended."""
        freed = self._run_copies.end(lambda: sum(one.allocator.allocated_bytes for one in self.gpu.recorders))
        for name, num_bytes in freed.items() if self.is_lasting else ():
            assume(
                _(
                    "`{name}` is a generator of yours from before the dry run: the {num_bytes} that it holds on the"
                    " card now are free at the end of the run, and not kept for the next one",
                    name=name,
                    num_bytes=num_bytes,
                )
            )

    def _exchange(
        self, journal: Journal, pairs: list[ExchangedPair], live: list[torch.Tensor], give_scripted: Callable[[], None]
    ) -> None:
        """Exchange the tensors that can be exchanged; gradients only with their tensors."""
        tensors = sorted(self._exchangeable(live), key=self._address)
        grads = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
        are_grads = {id(grad) for _unused, grad in grads}
        were_grads = {id(grad) for tensor, grad in grads if self._had_grad(tensor, grad)}
        alone = {id(grad) for _unused, grad in grads if has_own_memory(grad)}
        copies = FakeCopies(self.gpu, self._origin, were_grads, self._start, self._absent)
        done: set[int] = set()
        owners = [tensor for tensor, _unused in grads]
        first = {id(tensor) for tensor in owners}
        rest = (tensor for tensor in tensors if id(tensor) not in first and id(tensor) not in are_grads)
        for tensor in itertools.chain(owners, rest):
            self._swap(journal, pairs, tensor, copies, done)
        staying = {id(grad) for tensor, grad in grads if id(tensor) not in done}
        for tensor, grad in grads:
            if id(grad) not in staying and id(grad) not in done and self._exchangeable([grad]):
                self._swap(journal, pairs, grad, copies, done)
            if id(tensor) in done and id(grad) in done and id(grad) in were_grads and id(tensor) not in self._copies:
                tensor.grad = grad
        from_before = [one for one in grads if one[0].grad is one[1] and id(one[1]) in alone & done]
        self.gpu.releases.append(GradientsFromBefore(self.gpu, from_before).release)
        self._exchanged = {id(one.tensor) for one in pairs}
        give_scripted()

    def _keep_memory(self, live: list[torch.Tensor], assume: Callable[[str], None]) -> None:
        """Allocate what libraries and private pools have before the run; without a run before it no workspaces: it
        makes its own."""
        if self._start is not None:
            self.gpu.keep_workspaces(self._start.workspaces)
        elif self._origin is not None:
            self.gpu.keep_workspaces(self._origin.gpu.workspaces_before())
        pools = kept_on_cards(live)[1] if self._start is None else self._start.private_pools
        num_bytes = self.gpu.keep_private_pools(pools)
        if num_bytes:
            assume(
                _(
                    "private pools of CUDA graphs or torch.cuda.MemPool from before keep {num_bytes} of the card",
                    num_bytes=num_bytes,
                )
            )

    def _address(self, tensor: torch.Tensor) -> int:
        """Where a tensor is on its card. Copies are placed in this order: then the cache is in like pieces."""
        if tensor.device.type == "cuda":
            return storage_under(tensor).data_ptr()
        storage = None if self._origin is None else self._origin.gpu.storage_of(self._origin.template(tensor))
        return -1 if storage is None else storage.allocation

    def _had_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> bool:
        """Whether the gradient was there when the run began from whose beginning this one starts."""
        if self._start is not None:
            return self._start.had_grad(tensor)
        origin = None if self._origin is None else self._origin.gpu
        return origin is None or origin.place(grad) is not Place.GPU or origin.was_there_before(grad)

    def _swap(
        self, journal: Journal, pairs: list[ExchangedPair], tensor: torch.Tensor, copies: FakeCopies, done: set[int]
    ) -> None:
        """Exchange one tensor, unless PyTorch refuses to."""
        try:
            # C++ alone may hold it, as a view its base: this hands it to Python; before 2.10 swapping loses the owner
            tensor.requires_grad_(tensor.requires_grad)
            pair = ExchangedPair.of(tensor, _copy_of(self._copies, tensor, functools.partial(self._copied, copies)))
            journal.record(pair.swap_back)
            pair.swap()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError):
            return  # it is told by ``_guard``
        pairs.append(pair)
        done.add(id(tensor))

    def _copied(self, copies: FakeCopies, tensor: torch.Tensor) -> torch.Tensor:
        """A copy for this run, with what the last one wrote, unless the user wrote to the tensor since then."""
        written = self._written.get(id(tensor))
        return copies.make(tensor) if written is None or not written.is_of(tensor) else copies.again(written)

    def _guard(
        self,
        journal: Journal,
        live: list[torch.Tensor],
        pairs: list[ExchangedPair],
        others: Others | None,
        namespaces: list[dict[str, Any]],
        assume: Callable[[str], None],
    ) -> None:
        """Forbid writes to tensors that stayed real, and say which of the user's they are."""
        exchanged = self._exchanged | {id(one.copy) for one in pairs}
        stayed = [tensor for tensor in live if id(tensor) not in exchanged and not tensor.is_meta]
        self.gpu.fix_for_host = functools.partial(_fix_for_host, pairs, namespaces)
        names = names_of(stayed, namespaces)
        for tensor in stayed:
            name = names.get(id(tensor), unnamed(tensor))
            is_others = others is not None and tensor in others.reach
            # A hook on the graph of another thread's tensor would be added while that thread goes through it.
            is_known = others is None or (id(tensor) in names and not is_others)
            if is_known and tensor.grad_fn is not None:
                journal.record(tensor.register_hook(functools.partial(_refuse_backward, name)).remove)
            if not is_plain(tensor):
                kind = kind_of(tensor)
                if id(tensor) in names:
                    assume(_("`{name}` stays real: a dry run cannot fake {kind} tensors", name=name, kind=kind))
                if not has_own_data(tensor):
                    continue
                reason = _("{kind} tensors cannot be faked", kind=kind)
            elif others is not None and is_others:
                reason = _("thread {name} uses it", name=others.named)
                self.gpu.used_elsewhere.add(identity(tensor))
            else:
                reason = _("PyTorch holds a weak reference to it, as compiled code and retain_grad() do")
                assume(_("`{name}` stays real and cannot be faked: {reason}", name=name, reason=reason))
            self.gpu.untouchable[identity(tensor)] = _(
                "{name} is the real tensor, because {reason}", name=name, reason=reason
            )
            if tensor.is_leaf and tensor.requires_grad and not is_others:
                journal.record(functools.partial(_restore_grad, tensor, tensor.grad))

    def _unguard(self) -> None:
        self.gpu.releases.clear()
        self.gpu.untouchable.clear()
        self.gpu.used_elsewhere.clear()
        self.gpu.fix_for_host = None
        self._exchanged.clear()
        self._users_iterators = self._run_copies.taken_back
        self._run_copies = Copies()

    def template(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a tensor at the end of this session's last run, or at its beginning if it has values: its
        copy, or the tensor itself."""
        begun = self._begun.get(id(tensor))
        return _copy_of(
            self._copies, tensor, lambda itself: itself if begun is None or not begun.is_of(itself) else begun.made()
        )

    def is_exchanged(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the user's is now its fake copy, which the run may change."""
        return id(tensor) in self._exchanged

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether this session's last run made a tensor, or a view, on the pretend GPU."""
        was = self._before.get(id(tensor))
        return self.gpu.place(self.template(tensor)) is Place.GPU and (was is None or was() is not tensor)

    def _exchangeable(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        origin = self._origin
        copies = {id(copy) for _unused, copy in self._copies.values()}
        if origin is not None:
            copies |= {id(copy) for _unused, copy in origin._copies.values()}
        return [
            tensor
            for tensor in tensors
            if id(tensor) not in copies
            and (is_plain(tensor) or is_sparse_on_card(tensor))
            and id(tensor) not in self._others
            and (not tensor.is_meta or (origin is not None and origin.gpu.place(tensor) is not None))
        ]


def _have_own(above: Sequence[dict[str, Any]], namespaces: Sequence[dict[str, Any]]) -> bool:
    """Whether earlier dry runs made variables that are not the user's."""
    pairs = zip(above, namespaces, strict=False)
    return any(value is not users.get(name) for names, users in pairs for name, value in names.items())


def _copy_of(
    copies: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]],
    tensor: torch.Tensor,
    otherwise: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    found = copies.get(id(tensor))
    return found[1] if found is not None and found[0]() is tensor else otherwise(tensor)


@dataclass(frozen=True, slots=True)
class Others:
    """What other threads may touch."""

    reach: Reach
    named: str


class _Watch:
    """In place of ``torch._C._WeakTensorRef``: a weak reference of Python's; C++'s would keep a copy in place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)

    def expired(self) -> bool:
        """Whether the tensor is gone."""
        return self._tensor() is None


def _live_objects(function: Callable[[], Any], namespaces: list[dict[str, Any]]) -> tuple[LiveObjects, Others | None]:
    """The objects that the dry run exchanges and records, and those of other threads."""
    live = find_live_objects()
    found = used_by_other_threads(threads_of_run())
    if found is None:
        return live, None
    theirs, names = found
    own = Reach(racing=theirs.seen)
    own.walk([function, *namespaces, *users_modules()])

    def select(objects: list[Any], with_theirs: bool) -> list[Any]:
        return [one for one in objects if one in own and (with_theirs or one not in theirs)]

    mine = LiveObjects(
        select(live.tensors, True), select(live.modules, False), select(live.tools, False), loops=live.loops
    )
    return mine, Others(theirs, " and ".join(names))


def _refuse_backward(name: str, _grad: torch.Tensor) -> None:
    """A hook of a tensor that stayed real: beyond it the backward would be a real one, and use up the graph."""
    raise RuntimeError(
        _(
            "{name} is the real tensor, and so is what it was computed from: a dry run cannot run backward"
            " through it. Compute it in the run, or detach it.",
            name=name,
        )
    )


def _fix_for_host(pairs: list[ExchangedPair], namespaces: list[dict[str, Any]], operand: torch.Tensor) -> str:
    """What to do about an operand on the host, if it is the user's from before the run; else an empty text."""
    with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
        key = operand.untyped_storage()._cdata
        sharing = [one.tensor for one in pairs if storage_under(one.tensor)._cdata == key]
    name = find_name(sharing, namespaces)
    return name and _(
        " `{name}` was created on the CPU before the dry run: move it with .to('cuda'), or create it in the run.",
        name=name,
    )


def _restore_grad(tensor: torch.Tensor, grad: torch.Tensor | None) -> None:
    if tensor.grad is not grad:
        tensor.grad = grad
