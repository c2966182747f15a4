"""The parts of ``torch.cuda`` that are not simulated: answered without effect, or refused by name.

Otherwise they would use a real card, change settings of the process permanently, or fail in a PyTorch without CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from oom_magic.language import _
from oom_magic.predict.fake_cuda.torch_cuda import answering
from oom_magic.predict.isolation.patching import Patches

_ALLOCATORS = (
    "caching_allocator_alloc caching_allocator_delete caching_allocator_enable change_current_allocator MemPool"
    " use_mem_pool"
)
_NAMES = {
    "torch.cuda": f"{_ALLOCATORS} current_blas_handle current_solver_handle GreenContext",
    "torch.cuda.memory": _ALLOCATORS,
    "torch.cuda.nccl": "all_reduce broadcast all_gather reduce_scatter unique_id init_rank",
    "torch.cuda.jiterator": "_create_jit_fn _create_multi_output_jit_fn",
    "torch.cuda.gds": "gds_register_buffer gds_deregister_buffer GdsFile",
    "torch.cuda.green_contexts": "GreenContext",
}


def refused_by_name() -> Patches:
    """The functions and classes, each of which raises NotImplementedError."""
    table: list[tuple[Any, dict[str, Any]]] = []
    for home, names in _NAMES.items():
        module = sys.modules.get(home)
        known = [name for name in names.split() if hasattr(module, name)]
        table.append((module, {name: _refused(f"{home}.{name}", getattr(module, name)) for name in known}))
    return [(module, names) for module, names in table if names]


def _refused(name: str, original: Any) -> Any:
    """In place of a function a function, and of a class a class: Dynamo asks what is an instance of it."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(_words(name))

    return type(original.__name__, (), {"__new__": refused}) if isinstance(original, type) else refused


def _words(name: str) -> str:
    return _("{name} cannot be dry-run: a pretend GPU has nothing for it to use. Leave it out.", name=name)


def without_effect(assume: Callable[[str], None]) -> Patches:
    """Settings of a real card's libraries."""
    settings = {
        "_set_allocator_settings": _settings_left(assume),
        "_get_memory_metadata": answering(""),
        "_set_memory_metadata": answering(None),
    }
    return [
        (torch.cuda.memory, {name: value for name, value in settings.items() if hasattr(torch.cuda.memory, name)}),
        (torch.cuda.tunable, _tunable_answers()),
        (torch.backends.cuda, {"cufft_plan_cache": _Plans()}),
    ]


class _Plans:
    """``torch.backends.cuda.cufft_plan_cache``: always empty."""

    size, max_size = 0, 4096

    def __getitem__(self, device: Any) -> _Plans:
        return self

    def clear(self) -> None:
        """Nothing is in it."""


def _settings_left(assume: Callable[[str], None]) -> Callable[[str], None]:
    """``torch.cuda.memory._set_allocator_settings``: it would change the allocator of the whole process, real cards
    included."""

    def _set_allocator_settings(settings: str) -> None:
        assume(
            _(
                "torch.cuda.memory._set_allocator_settings({settings!r}): ignored; a dry run follows"
                " PYTORCH_CUDA_ALLOC_CONF from the environment",
                settings=settings,
            )
        )

    return _set_allocator_settings


def _tunable_answers() -> dict[str, Callable[..., Any]]:
    """``torch.cuda.tunable``: settings are stored and returned; nothing is tuned."""
    settings: dict[str, Any] = {
        "enabled": False, "tuning_enabled": True, "record_untuned_enabled": False, "max_tuning_duration": 30,
        "max_tuning_iterations": 100, "filename": "", "rotating_buffer_size": 0, "numerical_check_tolerances": None,
    }  # fmt: skip

    def set_to(name: str) -> Callable[..., None]:
        return lambda value=True, *_unused, **_options: settings.update({name: value})

    def tell(name: str) -> Callable[[], Any]:
        return lambda: settings[name]

    found: dict[str, Callable[..., Any]] = {
        "enable": set_to("enabled"), "is_enabled": tell("enabled"), "tuning_enable": set_to("tuning_enabled"),
        "tuning_is_enabled": tell("tuning_enabled"), "record_untuned_enable": set_to("record_untuned_enabled"),
        "record_untuned_is_enabled": tell("record_untuned_enabled"), "get_results": tuple, "get_validators": tuple,
        "read_file": answering(False), "write_file": answering(True), "write_file_on_exit": answering(None),
        "tune_gemm_in_file": answering(None), "mgpu_tune_gemm_in_file": answering(None),
    }  # fmt: skip
    for name in settings:
        found |= {f"set_{name}": set_to(name), f"get_{name}": tell(name)}
    return {name: answer for name, answer in found.items() if hasattr(torch.cuda.tunable, name)}
