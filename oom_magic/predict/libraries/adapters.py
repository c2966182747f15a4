"""Modules changed for a while, whenever they are imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.places import META, Place
from oom_magic.predict.isolation.files.effects import Isolation
from oom_magic.predict.isolation.patching import Patches, all_patched


@dataclass(frozen=True)
class Run:
    """What adapters need of the dry run: its GPU, its assumptions, its files, and whom to tell how many more times a
    library's loop will call its model."""

    gpu: FakeGPU
    assume: Callable[[str], None]
    isolation: Isolation
    note_calls_left: Callable[[int], None]


def fake_on_host(gpu: FakeGPU, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A fake host tensor: no memory, unknown values."""
    with gpu.creating_on(Place.HOST), torch._C.DisableTorchFunction():
        return torch.empty(tuple(shape), dtype=dtype, device=META)


PatchTable = Callable[[ModuleType, Run], Patches]  # what is replaced in a module
Adapter = PatchTable | Callable[[ModuleType, Run], AbstractContextManager[None]]  # the latter does more than replace


def _take_out(finder: Any) -> None:
    if finder in sys.meta_path:  # unless the user's code removed it
        sys.meta_path.remove(finder)


@contextmanager
def adapted(tables: Sequence[Mapping[str, Adapter]], run: Run) -> Iterator[None]:
    """Apply each adapter to the module it is listed under: now if it is imported, else on import."""
    names = {name for table in tables for name in table}
    with ExitStack() as stack:

        def adapt(module: ModuleType) -> None:
            for table in tables:
                if module.__name__ in table:
                    made = table[module.__name__](module, run)
                    stack.enter_context(made if isinstance(made, AbstractContextManager) else all_patched(made))

        for name in sorted(names & sys.modules.keys()):
            adapt(sys.modules[name])
        with imports_followed(lambda name, _path: name in names, adapt):
            yield


@contextmanager
def imports_followed(is_wanted: Callable[[str, Any], bool], loaded: Callable[[ModuleType], None]) -> Iterator[None]:
    """``loaded`` is called with each module that is imported meanwhile, and wanted by its name and search path."""
    finder = _Finder(is_wanted, loaded)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        _take_out(finder)


class _Finder(MetaPathFinder):
    """A finder for modules that have an adapter; it asks the finders after it."""

    def __init__(self, is_wanted: Callable[[str, Any], bool], loaded: Callable[[ModuleType], None]) -> None:
        self._is_wanted = is_wanted
        self._loaded = loaded
        self._searching: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's own spec, with a loader that applies the adapter."""
        if name in self._searching or not self._is_wanted(name, path):
            return None
        self._searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._loaded)
        return spec


class _Loader(Loader):
    """Wraps a module's loader, and removes itself from the module afterwards."""

    def __init__(self, loader: Loader, loaded: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._loaded = loaded

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load the module, then adapt it."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._loaded(module)
