"""Files of tensors: a dry run reads back what it saved, on the same device, with no data in memory or on disk.

A fake tensor is pickled as its shape, its place and the values that are known; tensors that share a storage share
it afterwards. Files written before the run hold real tensors, and are read to where a GPU would have them.
"""

from __future__ import annotations

import json
import os
import weakref
import zipfile
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from oom_magic.language import _
from oom_magic.predict.fake_cuda.places import META, Place, is_large
from oom_magic.predict.isolation.files.substitution import substituted
from oom_magic.predict.isolation.patching import Patches, all_patched
from oom_magic.predict.libraries.adapters import Adapter, PatchTable, Run, fake_on_host

_MAPPED_BYTES = 1 << 26  # larger files are mapped into memory, not read
_current: list[Run] = []


def unwritten(*names: str) -> PatchTable:
    """The table for a module: calls of ``names`` ("function" or "Class.method") have no effect."""

    def table(module: ModuleType, run: Run) -> Patches:
        rows = []
        for name in names:
            owner_name, _unused, attribute = name.rpartition(".")
            owner = getattr(module, owner_name, None) if owner_name else module
            if hasattr(owner, attribute):
                rows.append((owner, {attribute: skipped(name, run)}))
        return rows

    return table


def skipped(name: str, run: Run) -> Callable[..., None]:
    """A replacement for a function that sends data elsewhere; the report says that it was skipped."""

    def skip(*args: Any, **kwargs: Any) -> None:
        run.assume(_("{name} did nothing: a dry run has no effect outside itself", name=name))

    return skip


Values = tuple[torch.dtype, bytes, bool]  # of all elements, or of one if all are equal


class SavedStorage:
    """The storage of fake tensors in a file."""

    def __init__(self, num_bytes: int, location: str, values: Values | None) -> None:
        self.num_bytes, self.location, self.values = num_bytes, location, values
        self._made: dict[torch.device, torch.Tensor] = {}

    def __reduce__(self) -> Any:
        """Pickled as its size, its place and the values that are known."""
        return restored_storage, (self.num_bytes, self.location, self.values)

    def memory(self, run: Run, device: torch.device) -> torch.Tensor:
        """The bytes on ``device``, taken once."""
        if device not in self._made:
            made = self._made[device] = _unknown(run, (self.num_bytes,), torch.uint8, device)
            if self.values is not None:
                dtype, data, is_constant = self.values
                with torch._C.DisableTorchFunction():
                    values, target = torch.frombuffer(bytearray(data), dtype=dtype), made.view(dtype)
                    run.gpu.values.put(target, values.expand(target.shape) if is_constant else values)
        return self._made[device]


def restored_storage(num_bytes: int, location: str, values: Values | None) -> SavedStorage:
    """Called when a pickle is read."""
    return SavedStorage(num_bytes, location, values)


def restored_tensor(
    storage: SavedStorage, dtype: torch.dtype, offset: int, size: Any, stride: Any, requires_grad: bool
) -> torch.Tensor:
    """Called when a pickle is read: the tensor on the device that ``torch.load`` was given, else where it was."""
    if not _current:
        raise RuntimeError(_("This was saved in a dry run: it has no values and can only be read in a dry run."))
    location = storage.location
    device = _Load.current.device(location) if _Load.current is not None else torch.device(location)
    made = _whole(storage.memory(_current[-1], device).view(dtype).as_strided(size, stride, offset))
    return made.requires_grad_() if requires_grad else made


def _unknown(run: Run, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A fake tensor whose values nobody knows."""
    if device.type == "cpu":
        return fake_on_host(run.gpu, shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def _whole(view: torch.Tensor) -> torch.Tensor:
    """The same memory as no view: what is read from a file has no tensor beside it that would keep the memory."""
    return view.detach()


class _Load:
    """One call of ``torch.load``: where it puts the tensors that it reads."""

    current: _Load | None = None

    def __init__(self, run: Run, map_location: Any) -> None:
        self._run = run
        self._map = map_location
        self._devices: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}
        self._moved: dict[int, torch.Tensor] = {}

    def device(self, location: str) -> torch.device:
        """Where a tensor goes that was saved from ``location``, such as "cuda:0"."""
        named = self._map
        if callable(named):
            given = named(_Probe("cpu"), location)
            named = None if given is None else given.device
        elif isinstance(named, dict):
            named = named.get(location)
        return torch.device("cuda", named) if isinstance(named, int) else torch.device(named or location)

    def restore(self, storage: Any, location: str) -> Any:
        """``torch.load``'s map_location: the storage stays on the host for now."""
        self._devices[storage._cdata] = (storage, self.device(location))
        return storage

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that was read, at its place; those that share a storage keep sharing one."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
        device = self._devices[storage._cdata][1] if storage._cdata in self._devices else torch.device("cpu")
        return _at(self._run, tensor, device, self._moved)


class _Probe:
    """Given to a callable ``map_location`` in place of a storage: it records where it is moved to."""

    def __init__(self, device: Any) -> None:
        self.device = torch.device(device)

    def cuda(self, device: Any = None, **_unused: Any) -> _Probe:
        """As a storage's."""
        return _Probe("cuda")

    def cpu(self) -> _Probe:
        """As a storage's."""
        return _Probe("cpu")

    def to(self, *, device: Any, **_unused: Any) -> _Probe:
        """As a storage's."""
        return _Probe(device)


def _at(run: Run, tensor: torch.Tensor, device: torch.device, moved: dict[int, torch.Tensor]) -> torch.Tensor:
    """A real tensor at its place; large ones on the host are fake."""
    if device.type == "cpu" and not is_large(tensor):
        return tensor
    with torch._C.DisableTorchFunction():
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage)  # type: ignore[call-overload]
    if storage._cdata not in moved:
        is_here = device.type == "cpu"
        moved[storage._cdata] = _unknown(run, flat.shape, flat.dtype, device) if is_here else flat.to(device)
    there = moved[storage._cdata]
    there = there if there.dtype is tensor.dtype else there.view(tensor.dtype)
    made = _whole(there.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()))
    return made.requires_grad_() if tensor.requires_grad else made


@contextmanager
def _torch_files(module: ModuleType, run: Run) -> Iterator[None]:
    """``torch.save``, ``torch.load`` and pickles of tensors."""
    files = _save_and_load(run)
    table: Patches = [
        (torch, files),
        (torch.serialization, files),
        (torch._utils, {"_rebuild_tensor": _rebuilt_at_its_place(torch._utils._rebuild_tensor)}),
        (torch.Tensor, {"_reduce_ex_internal": _reduced_without_data(run, torch.Tensor._reduce_ex_internal)}),
    ]
    _current.append(run)
    try:
        with all_patched(table), torch.serialization.safe_globals([restored_tensor, restored_storage]):
            yield
    finally:
        _current.pop()


def _save_and_load(run: Run) -> dict[str, Callable[..., Any]]:
    """``torch.save`` and ``torch.load``, by names."""
    save_file, load_file = torch.save, torch.load

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, (str, os.PathLike)):
            save_file(obj, f, *args, **kwargs)
            return
        if not Path(f).parent.is_dir():
            raise RuntimeError(f"Parent directory {Path(f).parent} does not exist.")  # as PyTorch's own writer
        with Path(f).open("wb") as file:  # PyTorch's writer is C++ and would bypass the layer
            save_file(obj, file, *args, **kwargs)

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        before, _Load.current = _Load.current, _Load(run, map_location)
        try:
            if isinstance(f, (str, os.PathLike)):
                f = run.isolation.files.real_path(os.fspath(f))
                kwargs = {"mmap": _is_mapped(f), **kwargs}
            return load_file(f, _Load.current.restore, *args, **kwargs)
        finally:
            _Load.current = before

    return {"save": save, "load": load}


def _rebuilt_at_its_place(rebuild: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def _rebuild_tensor(*args: Any) -> torch.Tensor:
        made = rebuild(*args)
        return made if _Load.current is None or made.is_meta else _Load.current.tensor(made)

    return _rebuild_tensor


def _reduced_without_data(run: Run, reduce: Callable[..., Any]) -> Callable[..., Any]:
    saved: weakref.WeakValueDictionary[Hashable, SavedStorage] = weakref.WeakValueDictionary()

    def _reduce_ex_internal(tensor: torch.Tensor, protocol: Any) -> Any:
        entry = run.gpu.storage_of(tensor)
        if entry is None or entry.place is Place.META:
            return reduce(tensor, protocol)
        with torch._C.DisableTorchFunction():
            storage = _saved(run, tensor, saved)
            layout = (tensor.dtype, tensor.storage_offset(), tuple(tensor.size()), tensor.stride())
        return restored_tensor, (storage, *layout, tensor.requires_grad)

    return _reduce_ex_internal


def _is_mapped(path: str) -> bool:
    file = Path(path)
    return file.is_file() and file.stat().st_size > _MAPPED_BYTES and zipfile.is_zipfile(file)


def _saved(run: Run, tensor: torch.Tensor, saved: Any) -> SavedStorage:
    """The representation of a tensor's storage: the same object for all tensors that share it in one pickle."""
    entry = run.gpu.storage_of(tensor)
    assert entry is not None
    location = f"cuda:{entry.card}" if entry.place is Place.GPU else "cpu"
    whole = torch.empty(0, dtype=tensor.dtype, device=META).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    known, values = run.gpu.values.get(whole), None
    if known is not None and known.numel():
        is_constant = not any(known.stride())
        data = known[:1] if is_constant else known
        values = (tensor.dtype, _bytes_of(data), is_constant)
    return saved.setdefault((entry.key, entry.num_bytes), SavedStorage(entry.num_bytes, location, values))


def _bytes_of(values: torch.Tensor) -> bytes:
    """A tensor's bytes in order; a tensor of one element counts as contiguous whatever its stride."""
    return values.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def _scripted(module: ModuleType, run: Run) -> Patches:
    """``torch.jit.save`` of functions that ``torch.jit.script`` left as written."""
    save_file, load_file = module.save, module.load

    def save(m: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        torch.save(m, f) if not isinstance(m, torch.jit.ScriptModule) else save_file(m, f, *args, **kwargs)

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            made = load_file(f, map_location and "cpu", *args, **kwargs)
        except RuntimeError:
            if hasattr(f, "seek"):
                f.seek(0)
            return torch.load(f, map_location, weights_only=False)
        return made if map_location is None else made.to(map_location)

    return [(torch.jit, {"save": save, "load": load})]


@contextmanager
def _safetensors(module: ModuleType, run: Run) -> Iterator[None]:
    """Files of safetensors, whose own code is Rust: fake tensors are holes in them."""
    holes: dict[str, frozenset[str]] = {}  # by the real file, the names whose values nobody knows
    usual_open, files = module.safe_open, run.isolation.files

    def safe_open(filename: Any, framework: str = "pt", device: Any = "cpu", **kwargs: Any) -> Any:
        path = files.real_path(os.fspath(filename))
        handle = usual_open(path, framework=framework, device="cpu", **kwargs)
        return _OpenFile(handle, holes.get(path, frozenset()), device, run, module._TYPES)

    def load_file(filename: Any, device: Any = "cpu", **kwargs: Any) -> dict[str, Any]:
        with safe_open(filename, device=device) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)

    def save_file(tensors: dict[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
        unknown = _write(tensors, Path(filename), metadata, {dtype: name for name, dtype in module._TYPES.items()})
        holes[files.real_path(os.fspath(filename))] = unknown

    functions = {"load_file": load_file, "save_file": save_file, "safe_open": safe_open}
    with substituted([(getattr(module, name), stand_in) for name, stand_in in functions.items()]):
        yield


@contextmanager
def _safetensors_of_arrays(module: ModuleType, run: Run) -> Iterator[None]:
    """Arrays of NumPy and others: Python writes what Rust would write beside the file, and rename."""

    def serialize_file(tensor_dict: Any, filename: Any, metadata: Any = None) -> None:
        Path(filename).write_bytes(module.serialize(tensor_dict, metadata))

    with substituted([(module.serialize_file, serialize_file)]):
        yield


def _write(
    tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None, names: dict[Any, str]
) -> frozenset[str]:
    """Write a file of safetensors (its format: the README of huggingface/safetensors); the names left as holes."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unknown = set()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in ordered:
            with torch._C.DisableTorchFunction():
                if tensor.is_meta:
                    unknown.add(name)
                    continue
                file.seek(8 + len(text) + header[name]["data_offsets"][0])
                file.write(_bytes_of(tensor.detach()))
        file.truncate(8 + len(text) + end)
    return frozenset(unknown)


class _OpenFile:
    """A file of safetensors that gives tensors where they are asked for; in all else the library's own object."""

    def __init__(
        self, handle: Any, holes: frozenset[str], device: Any, run: Run, types: dict[str, torch.dtype]
    ) -> None:
        self._handle, self._holes, self._run, self._types = handle, holes, run, types
        self._device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def __enter__(self) -> _OpenFile:
        self._handle.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._handle.__exit__(*exception)

    def get_tensor(self, name: str) -> Any:
        """As ``safe_open`` gives it."""
        if name not in self._holes:
            return self._placed(self._handle.get_tensor(name))
        part = self._handle.get_slice(name)
        return _unknown(self._run, part.get_shape(), self._types[part.get_dtype()], self._device)

    def get_tensors(self) -> dict[str, Any]:
        """All of them."""
        return {name: self.get_tensor(name) for name in self._handle.keys()}  # noqa: SIM118

    def get_slice(self, name: str) -> _Slice:
        """A part of a tensor is read when it is indexed."""
        return _Slice(self, name, self._handle.get_slice(name))

    def _placed(self, value: Any) -> Any:
        is_here = not isinstance(value, torch.Tensor) or value.numel() == 0
        return value if is_here else _at(self._run, value, self._device, {})


class _Slice:
    def __init__(self, file: _OpenFile, name: str, part: Any) -> None:
        self._file, self._name, self._part = file, name, part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> Any:
        return self._file.get_tensor(self._name)[index]


ADAPTERS: dict[str, Adapter] = {
    "torch.serialization": _torch_files,
    "torch.jit": _scripted,
    "safetensors": _safetensors_of_arrays,
    "safetensors.torch": _safetensors,
}
