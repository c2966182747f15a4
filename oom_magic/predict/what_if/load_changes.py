"""Changes to how a model is loaded: its weights in fewer bits from the start."""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from oom_magic.predict.isolation.patching import patched
from oom_magic.predict.what_if.change import Change, InapplicableError, library
from oom_magic.predict.what_if.model_changes import DTYPES, plain_linears, quantized
from oom_magic.units import MIB

_MOVES = ("to", "cuda")
_MANY = 4  # GiB, from which on whole ones are fine enough
ALL_OF_RAM = "999GiB"  # accelerate asks for a number


class LoadChange(Change, ABC):
    """The base: ``from_pretrained`` loads the weights so, on the GPU at once; other models are converted in host
    memory before they are moved there.

    ``is_frozen`` says that weights loaded in this way cannot be trained.
    """

    is_frozen = False

    def __init__(self) -> None:
        self._is_busy = False  # moves that the change itself makes are not changed again
        self._loaded: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    @abstractmethod
    def convert(self, model: torch.nn.Module) -> None:
        """Change the weights of a model in host memory."""

    @abstractmethod
    def loading(self) -> dict[str, Any]:
        """The arguments of ``from_pretrained`` that load the weights this way."""

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """Load models this way, or convert them when they are moved to a GPU."""
        module = torch.nn.Module
        loader = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
        with ExitStack() as stack:
            stack.enter_context(patched(module, {name: self._placing(vars(module)[name]) for name in _MOVES}))
            if loader is not None:
                load = self._loading(vars(loader)["from_pretrained"].__func__)
                moves = {name: self._staying(getattr(loader, name)) for name in _MOVES}
                stack.enter_context(patched(loader, {"from_pretrained": classmethod(load), **moves}))
            yield

    def _placing(self, move: Callable[..., Any]) -> Callable[..., Any]:
        def run(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_move = move.__name__ == "cuda" or any(map(_is_gpu, (*args, *kwargs.values())))
            if is_move and not self._is_busy:
                self.variant = "" if hasattr(model, "config") else "own"
                with self._busy():
                    self.convert(model)
            return move(model, *args, **kwargs)

        return run

    def _staying(self, move: Callable[..., Any]) -> Callable[..., Any]:
        """Ignores ``.to("cuda")`` after ``from_pretrained``, which the code for this change leaves out."""

        def run(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return model if model in self._loaded else move(model, *args, **kwargs)

        return run

    def _loading(self, load: Callable[..., Any]) -> Any:
        def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("quantization_config") is not None:
                return load(cls, *args, **kwargs)
            changed = self.loading()
            is_cast = _dtype_name() in changed
            given = {key: value for key, value in kwargs.items() if not (is_cast and key in ("dtype", "torch_dtype"))}
            given["device_map"] = given.get("device_map") or "cuda"
            with self._busy():
                model = load(cls, *args, **{**given, **changed})
            for name in _MOVES:  # dispatch_model (accelerate) gives a model its own, which refuse
                vars(model).pop(name, None)
            self._loaded.add(model)
            return model

        return from_pretrained

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False


def _is_gpu(value: Any) -> bool:
    """Whether an argument of ``Module.to`` names a GPU."""
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


class LoadedInHalf(LoadChange):
    """Weights in a 16-bit type, "bf16" or "fp16"."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.dtype = DTYPES[dtype]

    def convert(self, model: torch.nn.Module) -> None:
        """Cast the weights."""
        model.to(self.dtype)

    def loading(self) -> dict[str, Any]:
        """``dtype``."""
        return {_dtype_name(): self.dtype}


class LoadedQuantized(LoadChange):
    """Linear layers in 8 or 4 ``bits`` (bitsandbytes), all other weights in 16."""

    is_frozen = True

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self._layers = library("bitsandbytes").nn

    def convert(self, model: torch.nn.Module) -> None:
        """Quantize the linear layers. Raises InapplicableError for a model that is not Hugging Face's."""
        if not hasattr(model, "config"):
            raise InapplicableError("no_quantized_loading")
        model.to(self._dtype)
        for owner, name, layer in plain_linears(model):
            setattr(owner, name, quantized(layer, self.bits))

    def loading(self) -> dict[str, Any]:
        """``quantization_config`` and ``dtype``."""
        from transformers import BitsAndBytesConfig

        four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        options = {**four, "bnb_4bit_compute_dtype": self._dtype} if self.bits == 4 else {"load_in_8bit": True}
        return {"quantization_config": BitsAndBytesConfig(**options), _dtype_name(): self._dtype}

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bits == 4 else torch.float16


class LoadedInPart(LoadChange):
    """At most ``limit_bytes`` of the weights on the card, whole layers of them; the rest in RAM.

    A layer in RAM is copied to the card for each of its forwards (accelerate's ``device_map="auto"``).
    """

    is_frozen = True

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        mebibytes = limit_bytes // MIB
        self.values = {"limit": f"{mebibytes // 1024}GiB" if mebibytes >= _MANY * 1024 else f"{mebibytes}MiB"}

    def convert(self, model: torch.nn.Module) -> None:
        """Raises InapplicableError: this model's weights are in RAM as a whole, and are moved as a whole."""
        raise InapplicableError("no_partial_loading")

    def loading(self) -> dict[str, Any]:
        """``device_map`` and ``max_memory``."""
        return {"device_map": "auto", "max_memory": {0: self.values["limit"], "cpu": ALL_OF_RAM}}


def _dtype_name() -> str:
    """transformers' name of the type argument; ``dtype`` from 4.56."""
    from transformers import __version__

    return "dtype" if tuple(map(int, __version__.split(".")[:2])) >= (4, 56) else "torch_dtype"
