"""Files of tensors: a dry run writes none, and reads them without their size in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from oom_magic.predict.isolation.patching import patched
from oom_magic.predict.libraries.adapters import Adapter, Run, pretend_on_host

_READ_BYTES = 1 << 26  # a larger file is taken for its shapes


def unwritten(*names: str) -> Adapter:
    """An adapter for a module: calls of ``names`` ("function" or "Class.method") write nothing."""

    @contextmanager
    def adapt(module: ModuleType, run: Run) -> Iterator[None]:
        with ExitStack() as stack:
            for name in names:
                owner_name, _, attribute = name.rpartition(".")
                owner = getattr(module, owner_name, None) if owner_name else module
                if hasattr(owner, attribute):
                    stack.enter_context(patched(owner, {attribute: skipped(name, run)}))
            yield

    return adapt


def skipped(name: str, run: Run) -> Callable[..., None]:
    """A function in place of one that writes files; the report says that it wrote none."""

    def skip(*args: Any, **kwargs: Any) -> None:
        run.assume(f"{name} wrote nothing: a dry run leaves no files")

    return skip


@contextmanager
def _torch_files(module: ModuleType, run: Run) -> Iterator[None]:
    """``torch.save`` and ``torch.load``."""
    load_file = torch.load

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_large = isinstance(f, (str, Path)) and Path(f).stat().st_size > _READ_BYTES
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            loaded = load_file(f, "meta" if is_large else "cpu", *args, **kwargs)
        if is_large:
            run.assume(f"torch.load({Path(f).name!r}) read shapes, not values")
        return _placed(loaded, map_location, run, {})

    save = skipped("torch.save", run)
    changes = {"save": save, "load": load}
    with patched(torch, changes), patched(torch.serialization, changes):
        yield


@contextmanager
def _safetensors(module: ModuleType, run: Run) -> Iterator[None]:
    """``load_file`` to the GPU, by way of the host; nothing is saved."""
    load_file = module.load_file

    def load(filename: Any, device: Any = "cpu", **kwargs: Any) -> Any:
        return _placed(load_file(filename, device="cpu", **kwargs), device, run, {})

    with patched(module, {"load_file": load}), unwritten("save_file", "save_model")(module, run):
        yield


def _placed(loaded: Any, map_location: Any, run: Run, seen: dict[int, Any]) -> Any:
    """What a file held, with its tensors where ``map_location`` wants them; shared storages stay shared."""
    if isinstance(loaded, torch.Tensor):
        return _tensor_placed(loaded, map_location, run, seen)
    if isinstance(loaded, dict):
        for key, value in loaded.items():
            loaded[key] = _placed(value, map_location, run, seen)
        return loaded
    if type(loaded) in (list, tuple):
        return type(loaded)(_placed(item, map_location, run, seen) for item in loaded)
    return loaded


def _tensor_placed(tensor: torch.Tensor, map_location: Any, run: Run, seen: dict[int, Any]) -> Any:
    device = map_location if isinstance(map_location, (str, int, torch.device)) else "cpu"
    with torch._C.DisableTorchFunction():
        storage = tensor.untyped_storage()
        is_meta = tensor.is_meta
    if storage._cdata not in seen:
        flat = torch.empty(0, dtype=torch.uint8).set_(storage) if not is_meta else None
        whole = pretend_on_host(run.gpu, (storage.nbytes(),), torch.uint8) if flat is None else flat
        seen[storage._cdata] = (storage, whole.to(device))
    bytes_there = seen[storage._cdata][1]
    made = bytes_there.view(tensor.dtype) if bytes_there.numel() else bytes_there.to(tensor.dtype)
    made = made.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return made.requires_grad_() if tensor.requires_grad else made


_SAVE = "save_pretrained"
ADAPTERS: dict[str, Adapter] = {
    "torch.serialization": _torch_files,
    "safetensors.torch": _safetensors,
    "transformers.generation.configuration_utils": unwritten(f"GenerationConfig.{_SAVE}"),
    "transformers.processing_utils": unwritten(f"ProcessorMixin.{_SAVE}"),
    "accelerate.accelerator": unwritten(*(f"Accelerator.{name}" for name in ("save", "save_state", "save_model"))),
    "peft.peft_model": unwritten(f"PeftModel.{_SAVE}"),
    "lightning.pytorch.trainer.trainer": unwritten("Trainer.save_checkpoint"),
    "pytorch_lightning.trainer.trainer": unwritten("Trainer.save_checkpoint"),
}
