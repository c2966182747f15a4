"""Files that libraries had open before a dry run, and trackers of experiments: they get nothing from it.

A C library keeps its state of an open file in its own memory, so leaving the disk unchanged is not enough. Files of
HDF5 are exchanged for private copies, which Python's objects lead to meanwhile; writers that cannot be redirected get
nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from oom_magic.predict.isolation.files.saving import skipped, unwritten
from oom_magic.predict.isolation.files.substitution import substituted
from oom_magic.predict.isolation.patching import Patches, all_patched
from oom_magic.predict.libraries.adapters import Adapter, PatchTable, Run

_OF_A_RUN = (
    "log",
    "finish",
    "save",
    "log_artifact",
    "log_code",
    "alert",
    "define_metric",
    "mark_preempting",
    "restore",
)


@contextmanager
def _hdf5(module: ModuleType, run: Run) -> Iterator[None]:
    """Files, groups and data sets look up their object in the library: it is the one of the same name in a copy."""
    opened = module.h5f.get_obj_ids(module.h5f.OBJ_ALL, module.h5f.OBJ_FILE)
    written = {_number(module, file): file for file in opened if file.get_intent() & module.h5f.ACC_RDWR}
    owner = module._hl.base.HLObject
    original, copies = owner.id, _Copies(module, run)

    def identity(one: Any) -> Any:
        own = original.fget(one)
        file = written.get(_number(module, own)) if run.isolation.scope.applies() and own.valid else None
        return own if file is None else copies.of(one, own, file)

    owner.id = property(identity)
    try:
        yield
    finally:
        owner.id = original
        copies.close()


def _number(module: ModuleType, identity: Any) -> int:
    """The number of the file that contains an object."""
    return int(module.h5o.get_info(identity).fileno)


class _Copies:
    """Copies of files that were open, and the objects in them that stand for the user's."""

    def __init__(self, module: ModuleType, run: Run) -> None:
        self._module, self._run = module, run
        self._files: dict[str, Any] = {}
        self._found: dict[int, tuple[Any, Any, Any]] = {}  # the object, its stand-in, what it had read

    def of(self, one: Any, own: Any, file: Any) -> Any:
        """The object in the copy of a file that replaces ``one``, whose identity is ``own``."""
        if id(one) not in self._found:
            with self._run.isolation.scope.outside():
                module, copy = self._module, self._copy(file)
                name = None if isinstance(one, module.File) else module.h5i.get_name(own)
                there = copy if name is None else module.h5o.open(copy, name)
            self._found[id(one)] = one, there, getattr(one, "_cache_props", None)
            if hasattr(one, "_cache_props"):
                one._cache_props = {}
        return self._found[id(one)][1]

    def _copy(self, file: Any) -> Any:
        name = os.fsdecode(file.name)
        if name not in self._files:
            self._module.h5f.flush(file)
            private = self._run.isolation.files.promise(str(Path(name).absolute()))
            self._files[name] = self._module.h5f.open(os.fsencode(private), self._module.h5f.ACC_RDWR)
        return self._files[name]

    def close(self) -> None:
        """Restore the objects."""
        for one, _, read in self._found.values():
            if read is not None:
                one._cache_props = read
        for copy in self._files.values():
            with contextlib.suppress(Exception):  # the run closed it
                copy.close()


def of_new_ones(kind: str, *names: str) -> PatchTable:
    """These methods have no effect for objects that were made before the run."""

    def adapt(module: ModuleType, run: Run) -> Patches:
        owner, made = getattr(module, kind), weakref.WeakSet[Any]()
        start = owner.__init__

        def begin(writer: Any, *args: Any, **kwargs: Any) -> None:
            made.add(writer)
            start(writer, *args, **kwargs)

        def of_run(name: str) -> Callable[..., Any]:
            original, skip = getattr(owner, name), skipped(f"{kind}.{name}", run)
            return lambda writer, *args, **kwargs: (original if writer in made else skip)(writer, *args, **kwargs)

        return [(owner, {"__init__": begin, **{name: of_run(name) for name in names if hasattr(owner, name)}})]

    return adapt


@contextmanager
def _wandb(module: ModuleType, run: Run) -> Iterator[None]:
    """Runs that begin are wandb's own disabled ones: its service is a program, which is not started."""
    original, before = module.init, dict(vars(module))

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        skipped("wandb.init", run)()
        return original(*args, **{**kwargs, "mode": "disabled"})

    names = [f"Run.{name}" for name in _OF_A_RUN]
    exchanged = [(original, init), (module.login, skipped("wandb.login", run))]
    try:
        with substituted(exchanged), all_patched(unwritten(*names)(module.sdk.wandb_run, run)):
            yield
    finally:
        vars(module).update({name: value for name, value in before.items() if vars(module).get(name) is not value})


# TensorBoard's files: one that was open before is written to by a thread of its own.
_of_writers = of_new_ones("FileWriter", "add_event", "flush", "close")


ADAPTERS: dict[str, Adapter] = {
    "h5py": _hdf5,
    "pyarrow.parquet.core": of_new_ones("ParquetWriter", "write", "write_table", "write_batch", "close"),
    "soundfile": of_new_ones("SoundFile", "write", "buffer_write", "truncate", "seek", "flush", "close"),
    "wandb": _wandb,
    "torch.utils.tensorboard.writer": _of_writers,
    "tensorboardX.writer": _of_writers,
}
