"""The user's objects from before the run that its code drops whole: what they take on the card is free then.

After ``del model`` the exchange still holds the model's tensors, and the snapshot its attributes, to give both back
afterwards. So it is found out which of the objects that a dropped one leads to nobody else holds, as CPython's garbage
collector does (``subtract_refs`` and ``move_unreachable`` in Modules/gcmodule.c): from the references to each those are
subtracted that come from the others, from the snapshot, from the exchange, and from names of the user's that the run's
own stand in front of. One that has more stays, with what it leads to.
"""

from __future__ import annotations

import gc
import itertools
import operator
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.isolation.gradients_from_before import num_uses
from oom_magic.predict.isolation.live_objects import LiveObjects, lists_aside
from oom_magic.predict.isolation.objects.let_go import ContainersLetGo
from oom_magic.predict.isolation.snapshot import (
    Changes,
    Snapshot,
    by_identity,
    contents_of,
    identities,
    references_among,
)

_NOT_FOLLOWED = {BuiltinFunctionType, CodeType, FrameType, ModuleType, str, bytes, int, float, bool}
_MOST_OBJECTS = 200_000  # that are looked at
_AT_ONCE = 100  # objects whose references are counted at each allocation; of twice as many at each second one
_OWN_REFERENCES = next(map(sys.getrefcount, [object()]))  # a list's, and the call's


class ObjectsDropped:
    """What the user's names refer to, and models and optimizers, watched for the end of a reference.

    Only what the dry run holds anyway: a tensor made in place of one that is gone has no other owner than its name.
    ``exchanged`` are the tensors that the exchange holds; ``containers`` holds those that it watches, ``changes`` what
    the session's runs before put into others. The code sees the names ``above`` in place of ``namespaces``; ``freed``
    is told of the tensors whose memory is free.
    """

    def __init__(
        self,
        gpu: FakeGPU,
        snapshot: Snapshot,
        live: LiveObjects,
        namespaces: Collection[dict[Any, Any]],
        above: Collection[dict[Any, Any]],
        exchanged: list[torch.Tensor],
        made_by_runs: set[int],
        containers: ContainersLetGo,
        changes: Changes,
        freed: set[int],
    ) -> None:
        self._gpu = gpu
        self._snapshot = snapshot
        self._containers = containers
        self._changes = changes
        self._freed = freed
        self._held = Counter(identities(exchanged))
        self._of_run = made_by_runs.union(self._held)
        self._names = [*namespaces], [one for one in above if one]
        self._namespaces = {id(one) for some in self._names for one in some}
        parts = {id(part) for module in live.modules for part in (vars(module).get("_modules") or {}).values()}
        made = (*live.tools, *(one for one in live.modules if id(one) not in parts))
        named = (value for one in namespaces for value in one.values())
        self._watched = [one for one in by_identity([*made, *named]).values() if _is_followed(one)]
        self._turn = 0  # of as many allocations as are between two looks
        self._least: list[int] = []  # references to each, since the first allocation
        self._num_containers = self._num_replaced = 0
        self._fell = set(identities(list(made)))  # of the watched ones those that lost a reference, and these

    def release(self) -> None:
        """Free what nobody has any more; called before each allocation."""
        self._turn += 1
        if self._turn <= len(self._watched) // _AT_ONCE:
            return
        self._turn = 0
        self._least = self._least or self._at_first()
        if len(self._containers.watched) > self._num_containers:
            self._expect_more()
        if len(self._containers.replaced) > self._num_replaced:
            self._watch_more()
        now = list(map(sys.getrefcount, self._watched))
        fewer = list(map(operator.lt, now, self._least))
        if True not in fewer:
            return
        self._least = list(map(min, now, self._least))
        fell = self._let_go_by_all(list(itertools.compress(self._watched, fewer)))
        if fell and self._leads_to_card(fell):
            self._fell.update(identities(fell))
            del fell
            self._free(self._dropped())

    def _at_first(self) -> list[int]:
        """Watch what the dry run holds alone; more references than there are: any may have been dropped by now."""
        held = self._noted(set(identities(self._watched)))
        self._watched = [one for one in self._watched if held[id(one)] > 1]  # once by this watch
        return [sys.maxsize] * len(self._watched)

    def _expect_more(self) -> None:
        """Count the references of the containers' watch, which begins with some during the run."""
        new = {id(one) for one, _least in self._containers.watched[self._num_containers :]}
        self._num_containers = len(self._containers.watched)
        self._least = [
            least + (number in new) for least, number in zip(self._least, identities(self._watched), strict=True)
        ]

    def _watch_more(self) -> None:
        """Watch what containers have lost, too."""
        known = set(identities(self._watched))
        lost = by_identity(self._containers.replaced[self._num_replaced :])
        self._num_replaced = len(self._containers.replaced)
        self._watched += (one for number, one in lost.items() if number not in known and _is_followed(one))
        self._least += [sys.maxsize] * (len(self._watched) - len(self._least))

    def _let_go_by_all(self, some: list[Any]) -> list[Any]:
        """Those that only the snapshot and the exchange refer to."""
        held_by = self._noted(set(identities(some)))
        spare = [number - held_by[id(one)] for number, one in zip(map(sys.getrefcount, some), some, strict=True)]
        return [one for one, number in zip(some, spare, strict=True) if number <= _OWN_REFERENCES]

    def _noted(self, known: set[int]) -> Counter[int]:
        """How often what the dry run keeps refers to each of the objects with these identities."""
        if not known:
            return Counter()
        watched = identities([*self._watched, *(watched[0] for watched in self._containers.watched)])
        made = ([*one.changed, *contents_of(one.changed)] for one in self._changes.values())
        users, own = self._names
        pairs = ((name, value, above) for names in users for above in own for name, value in names.items())
        hidden = [value for name, value, above in pairs if above.get(name) is not value]
        kept = [*lists_aside(), *made, hidden, self._containers.replaced]
        found = self._snapshot.references_to(known) + references_among(kept, known) + self._held
        found.update(filter(known.__contains__, watched))
        return found

    def _leads_to_card(self, some: Iterable[Any]) -> bool:
        with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
            return any(isinstance(one, torch.Tensor) and self._gpu.is_on_gpu(one) for one in self._reached(some))

    def _reached(self, roots: Iterable[Any]) -> list[Any]:
        """The objects that some lead to, themselves first, but what leads to all others; none if they are too many."""
        found = by_identity(list(roots))
        waiting = list(found.values())
        while waiting and len(found) <= _MOST_OBJECTS:
            new = by_identity(list(_references_of(waiting)))
            fresh = new.keys() - found.keys() - self._namespaces
            waiting = [new[number] for number in fresh if _is_followed(new[number])]
            found |= by_identity(waiting)
        return list(found.values()) if len(found) <= _MOST_OBJECTS else []

    def _dropped(self) -> list[Any]:
        """Those of the objects that what fell leads to which nobody else holds."""
        reached = self._reached(one for one in self._watched if id(one) in self._fell)
        numbers = identities(reached)
        known = set(numbers)
        held_by = self._noted(known)
        held_by.update(filter(known.__contains__, identities(gc.get_referents(*reached))))
        counts = list(map(sys.getrefcount, reached))
        is_held = [count - _OWN_REFERENCES > held_by[number] for number, count in zip(numbers, counts, strict=True)]
        kept = set(identities(self._reached(itertools.compress(reached, is_held))))
        return [one for one in reached if id(one) not in kept]

    def _free(self, dropped: list[Any]) -> None:
        numbers = set(identities(dropped))
        for container, _before in self._snapshot.changed():
            if id(container) in numbers:
                self._snapshot.restore_one(container)
        with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
            tensors = [one for one in dropped if id(one) in self._of_run and _is_pythons(one)]
            sharing = Counter(one.untyped_storage()._cdata for one in tensors)
            for tensor in tensors:
                if num_uses(tensor) == sharing[tensor.untyped_storage()._cdata]:
                    tensor.grad = None
                    storage = self._gpu.storage_of(tensor)
                    if storage is not None:
                        self._gpu.free_early(storage)
                        self._freed.add(id(tensor))


def _is_followed(one: Any) -> bool:
    """Whether an object is one that may be dropped, and leads to some."""
    return one is not None and type(one) not in _NOT_FOLLOWED and not isinstance(one, type)


def _references_of(some: list[Any]) -> Iterator[Any]:
    """What the objects refer to; functions, whose globals lead everywhere, what they hold alone."""
    functions = [one for one in some if type(one) is FunctionType]
    yield from gc.get_referents(*(one for one in some if type(one) is not FunctionType))
    for one in functions:
        yield from (one.__closure__, one.__defaults__, one.__kwdefaults__)


def _is_pythons(tensor: torch.Tensor) -> bool:
    """Whether C++ does not hold a tensor, which has memory."""
    return tensor.layout is torch.strided and tensor._use_count() <= 1  # type: ignore[attr-defined]
