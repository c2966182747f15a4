"""The state of the user's objects before a run, which a rehearsal restores.

It is recorded before each cell and used only if the cell runs out of memory. It consists of weak references, identities
and plain values, and keeps no object of the user's alive.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from oom_magic.memory.workspaces import KeptWorkspace, PrivatePool, Workspaces, private_pools_in
from oom_magic.predict.isolation.live_objects import LiveObjects, find_live_objects
from oom_magic.predict.isolation.reach import Reach

_DICTS = (dict, OrderedDict, defaultdict)
_LISTS = (list, set, deque)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_NO_INSTANCES = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.Tensor)
# Deeper or longer containers are not recorded but taken to be unchanged, as vocabularies and datasets are.
_DEPTH = 4
_LONGEST = 5_000
_MOST_ENTRIES = 300_000
_ABSENT = object()
_OF_THE_SHELL = ("In", "Out", "exit", "quit", "get_ipython", "open")


@dataclass(frozen=True, slots=True)
class TensorState:
    """A tensor's earlier state: its form, whether it had or required a gradient, whether autograd made it."""

    reference: weakref.ref[torch.Tensor]
    shape: torch.Size
    device: torch.device
    dtype: torch.dtype
    has_grad: bool
    requires_grad: bool
    is_result: bool  # of autograd


@dataclass(frozen=True, slots=True)
class _Contents:
    """What a container held, by identity: the container is at ``path`` in the variables of ``owner``."""

    owner: Callable[[], Any]
    path: tuple[Hashable, ...]
    contents: dict[Hashable, int] | list[int]
    is_namespace: bool


class StartingPoint:
    """The process as it was: tensors, the containers of modules, optimizers and names, the user's own objects; on the
    cards, what libraries keep between calls.

    The names ``but`` are assumed not to have been there. ``device_of`` tells where a tensor is, which a pretended one
    does not. ``dropped``: the names that the run has assigned since; ``needed``: those of them that a rehearsal reads
    before it assigns them.
    """

    def __init__(
        self,
        namespaces: Sequence[dict[str, Any]],
        but: Collection[str] = (),
        live: LiveObjects | None = None,
        device_of: Callable[[torch.Tensor], torch.device] = lambda tensor: tensor.device,
    ) -> None:
        self._but = but
        self._made_anew: Callable[[TensorState], torch.Tensor] | None = None
        self._original: Callable[[Any], Any] = lambda one: one
        self.dropped: set[str] = set()
        self.needed: set[str] = set()
        self._references: dict[int, weakref.ref[Any]] = {}
        self._plain: dict[int, Any] = {}
        self._contents: list[_Contents] = []
        self._seen: set[int] = set()  # containers
        self._num_entries = 0
        live = find_live_objects() if live is None else live
        owners = (*live.modules, *live.tools)
        with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
            self.workspaces, self.private_pools = kept_on_cards(live.tensors)
            states = ((id(tensor), _state_of(tensor, device_of)) for tensor in live.tensors)
            self._tensors = {identity: was for identity, was in states if was is not None}
        for one in owners:
            self._references[id(one)] = weakref.ref(one)
        for namespace in namespaces:
            self._note(namespace, _DEPTH, lambda namespace=namespace: namespace, (), is_namespace=True)  # type: ignore[misc]
        for one in owners:
            self._note(vars(one), _DEPTH, weakref.ref(one), ())

    @classmethod
    def inferred(cls, namespace: dict[str, Any], made: Collection[str]) -> StartingPoint:
        """The starting point of a failed run that was not recorded: the objects of now without those of the run.

        Objects that only names it ``made`` lead to were absent, as were gradients and results of autograd. Workspaces
        are assumed to be its own.
        """
        stayed = {name: value for name, value in namespace.items() if _is_users(name) and name not in made}
        reached = Reach(seen={id(namespace)})  # functions lead to all names
        reached.walk(stayed.values())
        point = cls([namespace], made)
        point.workspaces, point.private_pools = [], []
        point._references = {one: reference for one, reference in point._references.items() if one in reached.seen}
        point._tensors = {
            one: replace(was, has_grad=False)
            for one, was in point._tensors.items()
            if one in reached.seen and not was.is_result
        }
        return point

    def tensor(self, tensor: torch.Tensor) -> TensorState | None:
        """The tensor's earlier state; None for one that did not exist."""
        was = self._tensors.get(id(tensor))
        return was if was is not None and was.reference() is tensor else None

    def had_grad(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor had a gradient."""
        was = self.tensor(tensor)
        return was is not None and was.has_grad

    def rows_of(self, name: str) -> int:
        """How many rows the tensor of a name had, also if it is gone; 0 where there was none."""
        found = (one.contents.get(name, 0) for one in self._contents if one.is_namespace and type(one.contents) is dict)
        was = self._tensors.get(next(filter(None, found), 0))
        return was.shape[0] if was is not None and was.shape else 0

    def length_of(self, container: Any) -> int | None:
        """How many entries a container had; None if it was not there, or is not followed."""
        return next((len(one.contents) for one in self._contents if _find(one) is container), None)

    def plain_before(self, container: Any, key: str) -> Any:
        """The number, text or the like that a dictionary had under a key; None where it had none, or is not known."""
        found = next((one.contents for one in self._contents if _find(one) is container), None)
        return self._plain.get(found.get(key, 0)) if isinstance(found, dict) else None

    def keep(self, name: str) -> bool:
        """Keep a dropped name: with a tensor like the one that it had, else with the run's value; False if it was not
        dropped."""
        is_dropped = name in self.dropped
        self.needed |= {name} & self.dropped
        return is_dropped

    def restore(
        self,
        noting: Callable[[Any, int], None],
        made_anew: Callable[[TensorState], torch.Tensor] | None = None,
        original: Callable[[Any], Any] = lambda one: one,
    ) -> None:
        """Restore the contents of containers; ``noting(container, depth)`` is called before one is changed.

        ``made_anew`` makes a tensor in place of one that is gone. ``original`` of a copy that stands in place of an
        object is that object.
        """
        self._made_anew, self._original = made_anew, original
        try:
            self._restore(noting)
        finally:  # they hold what the run's copies were made of
            self._made_anew, self._original = None, lambda one: one

    def _restore(self, noting: Callable[[Any, int], None]) -> None:
        self.dropped.clear()
        for one in self._contents:
            container = _find(one)
            if container is None:
                continue
            noting(container, 1)
            if isinstance(one.contents, dict) and isinstance(container, _DICTS):
                self._restore_dict(container, one.contents, one.is_namespace)
            elif isinstance(one.contents, list) and isinstance(container, _LISTS):
                self._restore_list(container, one.contents)

    def _restore_dict(self, container: dict[Any, Any], contents: dict[Hashable, int], is_namespace: bool) -> None:
        for key, value in list(container.items()):
            identity = contents.get(_token(key), 0)
            if is_namespace and (not _is_users(key) or key in self.needed):
                was = self._tensors.get(identity) if _is_users(key) else None
                if was is not None and was.reference() is None and self._made_anew is not None:
                    container[key] = self._made_anew(was)
                continue
            if identity and self._is(value, identity):
                continue
            before = self._resolved(identity)
            if before is not _ABSENT:
                container[key] = before
            elif is_namespace or not identity:
                del container[key]
                if is_namespace:
                    self.dropped.add(key)
        present = {_token(key) for key in container}
        for token, identity in contents.items():
            before = self._resolved(identity) if token not in present else _ABSENT
            if before is not _ABSENT and isinstance(token, str):
                container[token] = before

    def _restore_list(self, container: Any, contents: list[int]) -> None:
        known = {id(self._original(one)): one for one in container}
        found = [known[one] if one in known and self._is(known[one], one) else self._resolved(one) for one in contents]
        if not isinstance(container, set):
            found = [self._in_its_place(one, container, at, contents[at]) for at, one in enumerate(found)]
        left = [one for one in found if one is not _ABSENT]
        container.clear()
        container.update(left) if isinstance(container, set) else container.extend(left)

    def _in_its_place(self, found: Any, container: Any, at: int, identity: int) -> Any:
        """The container that has replaced this one, as ``load_state_dict`` replaces the groups of an optimizer."""
        is_replaced = found is _ABSENT and identity in self._seen and at < len(container)
        return container[at] if is_replaced and isinstance(container[at], (*_DICTS, *_LISTS)) else found

    def _is(self, value: Any, identity: int) -> bool:
        """Whether a value is the object that had this identity, not a later object with the same address."""
        value = self._original(value)
        if id(value) != identity:
            return False
        reference = self._references.get(identity) or getattr(self._tensors.get(identity), "reference", None)
        return reference is None or reference() is value

    def _resolved(self, identity: int) -> Any:
        """The object that had this identity, if it is still there."""
        if identity in self._plain:
            return self._plain[identity]
        reference = self._references.get(identity) or getattr(self._tensors.get(identity), "reference", None)
        found = None if reference is None else reference()
        return _ABSENT if found is None else found

    def _note(
        self,
        container: Any,
        depth: int,
        owner: Callable[[], Any],
        path: tuple[Hashable, ...],
        is_namespace: bool = False,
    ) -> None:
        if id(container) in self._seen or len(container) > _LONGEST or self._num_entries > _MOST_ENTRIES:
            return
        self._seen.add(id(container))
        self._num_entries += len(container)
        is_dict = isinstance(container, _DICTS)
        items = list(container.items() if is_dict else enumerate(container))
        if is_namespace:
            items = [item for item in items if _is_users(item[0]) and item[0] not in self._but]
        identities = {_token(key): id(value) for key, value in items} if is_dict else [id(value) for _, value in items]
        self._contents.append(_Contents(owner, path, identities, is_namespace))
        for key, value in items:
            kind = type(value)
            if kind in _PLAIN:
                self._plain[id(value)] = value
            elif kind in _DICTS or kind in _LISTS:
                if depth > 1:
                    self._note(value, depth - 1, owner, (*path, _token(key)))
            elif id(value) not in self._references and not isinstance(value, torch.Tensor):
                self._note_object(value, depth)

    def _note_object(self, value: Any, depth: int) -> None:
        with suppress(TypeError):
            self._references[id(value)] = weakref.ref(value)
            own = getattr(value, "__dict__", None) if not isinstance(value, _NO_INSTANCES) else None
            if depth > 1 and type(own) is dict:
                self._note(own, depth - 1, weakref.ref(value), ())


def _state_of(tensor: torch.Tensor, device_of: Callable[[torch.Tensor], torch.device]) -> TensorState | None:
    try:
        has_grad = tensor.is_leaf and tensor.grad is not None
        return TensorState(
            weakref.ref(tensor),
            tensor.shape,
            device_of(tensor),
            tensor.dtype,
            has_grad,
            tensor.requires_grad,
            not tensor.is_leaf,
        )
    except (RuntimeError, NotImplementedError, AttributeError):  # wrappers of functorch and others
        return None


def kept_on_cards(tensors: Iterable[torch.Tensor]) -> tuple[list[KeptWorkspace], list[PrivatePool]]:
    """What libraries and private pools keep on the real cards, beside ``tensors``."""
    if not torch.cuda.is_initialized():
        return [], []
    taken: set[int] = set()
    for tensor in tensors:
        with suppress(RuntimeError, NotImplementedError):  # wrappers, and tensors without a storage
            grad = tensor.grad if tensor.is_leaf else None
            taken |= {one.untyped_storage().data_ptr() for one in (tensor, grad) if one is not None and one.is_cuda}
    snapshot = torch.cuda.memory_snapshot
    # A history that the user records can have a hundred thousand entries.
    options = {"include_traces": False} if "include_traces" in inspect.signature(snapshot).parameters else {}
    segments, here = snapshot(**options), Workspaces.here(torch.__version__)
    return here.lasting_in(segments, taken, torch.cuda.get_device_capability), private_pools_in(segments, taken)


def _is_users(name: Any) -> bool:
    """Whether the user gave a name of a namespace; IPython's own lead to the shell, or change with each cell."""
    return isinstance(name, str) and not name.startswith("_") and name not in _OF_THE_SHELL


def _token(key: Any) -> Hashable:
    """A token for a dictionary's key, which does not keep the key alive."""
    return key if type(key) in (str, int) else (id(key),)


def _find(contents: _Contents) -> Any:
    """The container that is now where the noted one was; None without one."""
    owner = contents.owner()
    container = owner if contents.is_namespace or type(owner) is dict else getattr(owner, "__dict__", None)
    for token in contents.path:
        if isinstance(container, _DICTS):
            container = next(_values_at(container, token), None)
        elif isinstance(container, (list, deque)) and isinstance(token, int) and token < len(container):
            container = container[token]
        else:
            return None
    return container


def _values_at(container: dict[Any, Any], token: Hashable) -> Iterator[Any]:
    if not isinstance(token, tuple):
        if token in container:
            yield container[token]
        return
    yield from (value for key, value in container.items() if _token(key) == token)
