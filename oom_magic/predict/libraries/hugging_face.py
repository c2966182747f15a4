"""``from_pretrained`` without weights and without a network, and answers about devices asked again.

Generation runs to its maximum length: which token ends a sequence is unknown, and the longest takes the most memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from torch._C import DisableTorchFunction  # type: ignore[attr-defined]

from oom_magic.language import _
from oom_magic.predict.isolation.files.saving import unwritten
from oom_magic.predict.isolation.patching import Patches
from oom_magic.predict.libraries.adapters import Adapter, Run, fake_on_host
from oom_magic.predict.setups.models import config_for_hub_id, with_layers_as_asked

# Arguments of a model's from_pretrained that its configuration's must not take.
_LOADING = (
    "dtype", "torch_dtype", "device_map", "max_memory", "quantization_config", "attn_implementation",
    "output_loading_info", "adapter_kwargs",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # a configuration's count
_SMALLEST_VOCABULARY = 128  # transformers 5 makes tokenizers without their files, of a few special tokens


def _offline(module: ModuleType, run: Run) -> Patches:
    """Find only files on this machine."""
    return [(module, {"HF_HUB_OFFLINE": True})]


def _no_bars(module: ModuleType, run: Run) -> Patches:
    """Show no progress bar for weights that are not really loaded."""
    return [(module, {"_tqdm_active": False})]


def _unwatched(module: ModuleType, run: Run) -> Patches:
    """The user's bars start no thread that watches them, which would stay after the run."""
    return [(module.tqdm, {"monitor_interval": 0})]


def _hub(module: ModuleType, run: Run) -> Patches:
    """Upload and download nothing (transformers before version 5 copied huggingface_hub's switch)."""
    known = {"_is_offline_mode": True} if hasattr(module, "_is_offline_mode") else {}
    return [(module, known), *unwritten("PushToHubMixin.push_to_hub")(module, run)]


def _configurations(module: ModuleType, run: Run) -> Patches:
    """Take configurations that are not on this machine from the presets."""
    owner = getattr(module, "PreTrainedConfig", None) or module.PretrainedConfig
    original = owner.__dict__["get_config_dict"].__func__

    def get_config_dict(cls: Any, name: Any, **kwargs: Any) -> Any:
        error: Exception | None = None
        try:
            settings, unused = original(cls, name, **kwargs)
            if settings:
                return with_layers_as_asked(settings), unused
        except OSError as caught:
            error = caught
        preset = config_for_hub_id(str(name))
        if preset is None:
            raise OSError(_unknown(name)) from error
        run.assume(
            _("{name}: the preset's configuration was used, because there is none in the local cache", name=name)
        )
        with run.isolation.scope.outside(), TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(with_layers_as_asked(preset)))
            return original(cls, folder, **kwargs)

    return [(owner, {"get_config_dict": _classmethod(get_config_dict)})]


def _classmethod(function: Any) -> Any:
    return classmethod(function)


def _unknown(name: Any) -> str:
    return _(
        "{name!r} is neither a folder with a config.json, nor in the local Hugging Face cache, nor a"
        " model preset. A dry run needs only a model's configuration and downloads nothing: put its"
        " config.json into a folder and give the folder's path, or load the configuration once outside"
        " the dry run (transformers.AutoConfig.from_pretrained({name!r})).",
        name=str(name),
    )


def _tokenizers(module: ModuleType, run: Run) -> Patches:
    """Load tokenizers from this machine, and say so if one is missing."""
    owner = module.PreTrainedTokenizerBase
    original = owner.__dict__["from_pretrained"].__func__

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        error: Exception | None = None
        try:
            tokenizer = original(cls, name, *args, **kwargs)
            if len(tokenizer) >= _SMALLEST_VOCABULARY or Path(str(name)).is_dir():
                return tokenizer
        except OSError as caught:
            error = caught
        raise OSError(
            _(
                "The tokenizer of {name!r} is not on this machine, and a dry run downloads nothing. Load it"
                " once outside the dry run (a few MB): transformers.AutoTokenizer.from_pretrained({name!r}).",
                name=str(name),
            )
        ) from error

    return [(owner, {"from_pretrained": _classmethod(from_pretrained)})]


def _models(module: ModuleType, run: Run) -> Patches:
    """Let transformers' own loader load models from weights without data."""
    owner = module.PreTrainedModel
    original = owner.__dict__["from_pretrained"].__func__

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if name is None or kwargs.get("state_dict") is not None:
            return original(cls, name, *args, **kwargs)
        return _load(cls, original, run, name, args, kwargs)

    return [(owner, {"from_pretrained": _classmethod(from_pretrained)})]


def _load(cls: Any, original: Callable[..., Any], run: Run, name: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    config, kwargs = _configuration_of(cls, name, kwargs)
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None and kwargs.get("quantization_config") is None:
        run.assume(
            _("{name}: weights saved in quantized form are assumed to be quantized while they are loaded", name=name)
        )
        kwargs["quantization_config"] = _as_object(quantized)
        del config.quantization_config
    weights = _weights_of(cls, config, args, run)
    before = _is_quantizing[:]
    _is_quantizing[:] = [str(name)] if kwargs.get("quantization_config") is not None else []
    try:
        loaded = original(cls, None, *args, config=config, state_dict=weights, **kwargs)
    finally:
        _is_quantizing[:] = before
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.config._name_or_path = model.name_or_path = str(name)
    return loaded


def _configuration_of(cls: Any, name: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The configuration of a model to load, and the arguments that are not for it."""
    kwargs = dict(kwargs)
    config = kwargs.pop("config", None)
    if config is not None and not isinstance(config, (str, os.PathLike)):
        return config, kwargs
    options = {key: kwargs.pop(key) for key in _LOADING if key in kwargs}
    config, rest = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **kwargs)
    return config, {**rest, **options}


def _as_object(quantization: Any) -> Any:
    if not isinstance(quantization, dict):
        return quantization
    from transformers.quantizers.auto import AutoQuantizationConfig

    return AutoQuantizationConfig.from_dict(quantization)


def _weights_of(cls: Any, config: Any, args: Any, run: Run) -> dict[str, torch.Tensor]:
    """The content of a weights file: the model's tensors, in the type that the configuration names."""
    with torch.device("meta"):
        model = cls(config, *args)
        model.tie_weights()
    named = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    dtype = getattr(torch, named) if isinstance(named, str) else named
    if dtype is None:
        dtype = torch.float32
    weights = {
        key: fake_on_host(run.gpu, tensor.shape, dtype)
        if tensor.is_floating_point()
        else torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        for key, tensor in _each_once(model.state_dict(keep_vars=True)).items()
    }
    shown = str(dtype).removeprefix("torch.")
    name = cls.__name__
    run.assume(_("{name}: weights are not read; their dtype on disk was assumed to be {dtype}", name=name, dtype=shown))
    if any(getattr(config, name, None) for name in _EXPERTS):
        run.assume(
            _("{name}: experts are assumed to be fused on disk; fusing them while loading takes more", name=name)
        )
    return weights


def _each_once(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with tied weights once, under their first name, as in a file."""
    names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if names[id(tensor)] == name}


def _loaded_ahead(module: ModuleType, run: Run) -> Patches:
    """transformers 5 loads in threads, ahead of processing the weights: here as far ahead as possible. Weights that are
    quantized while loading are then all on the GPU in the type that they have on disk. Version 5.23 loads such weights
    one by one (``has_on_the_fly_quantization``), and asks for no threads.
    """

    class LoadedAhead:
        def __init__(self, *_unused: Any, **_options: Any) -> None:
            if _is_quantizing:
                run.assume(
                    _(
                        "transformers loads weights in threads while others are quantized; the worst case was"
                        " assumed, in which all are on the GPU before the first is quantized"
                        " (HF_DEACTIVATE_ASYNC_LOAD=1 avoids it)"
                    )
                )

        def submit(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(load(*args, **kwargs))
            return future

        def shutdown(self, *_unused: Any, **_options: Any) -> None: ...

    return [(module, {"ThreadPoolExecutor": LoadedAhead} if hasattr(module, "ThreadPoolExecutor") else {})]


_is_quantizing: list[str] = []  # the models that are being loaded so


def _adapters(module: ModuleType, run: Run) -> Patches:
    """Without a file of an adapter's weights, take the shapes from the adapter's own tensors."""
    owner, read = module.PeftModel, module.load_peft_weights
    original = owner.load_adapter
    loading: list[tuple[Any, str]] = []

    def load_adapter(model: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        loading.append((model, adapter_name))
        try:
            return original(model, model_id, adapter_name, *args, **kwargs)
        finally:
            loading.pop()

    def load_peft_weights(model_id: Any, device: Any = None, **kwargs: Any) -> Any:
        try:
            return read(model_id, device=device, **kwargs)
        except (OSError, ValueError):
            if not loading:
                raise
        model, name = loading[-1]
        text = _(
            "{name}: no file of adapter weights was found; their dtype was assumed to be the model's", name=model_id
        )
        run.assume(text)
        state = module.get_peft_model_state_dict(model, adapter_name=name)
        return {key: torch.empty_like(tensor, device=device or "cuda") for key, tensor in state.items()}

    return [(owner, {"load_adapter": load_adapter}), (module, {"load_peft_weights": load_peft_weights})]


@contextmanager
def _answers_forgotten(module: ModuleType, run: Run) -> Iterator[None]:
    """Clear caches such as that of ``is_torch_cuda_available``, in the dry run and after it."""
    with ExitStack() as stack:
        for value in list(vars(module).values()):
            forget = getattr(value, "cache_clear", None)
            if forget is not None:
                forget()
                stack.callback(forget)
        yield


def _criteria(module: ModuleType, run: Run) -> Patches:
    """Stopping criteria that depend on tokens never end a sequence."""
    return [
        (found, {"__call__": _not_done(found.__call__, run)})
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, module.StoppingCriteria) and "__call__" in vars(found)
    ]


def _not_done(criterion: Callable[..., Any], run: Run) -> Callable[..., Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        done = criterion(self, *args, **kwargs)
        tokens = args[0] if args else kwargs.get("input_ids")
        if isinstance(tokens, torch.Tensor) and isinstance(getattr(self, "max_length", None), int):
            run.note_calls_left(self.max_length - tokens.shape[-1])
        with DisableTorchFunction():
            values = run.gpu.values
            if isinstance(done, torch.Tensor) and (values.get(done) is None or values.assumption_about([done])):
                run.assume(_("generation: every sequence is assumed to reach the maximum length"))
                values.put(done, torch.zeros(done.shape, dtype=done.dtype))
        return done

    return __call__


def _beams(module: ModuleType, run: Run) -> Patches:
    """Extend beams until all of them have the maximum length."""
    name = "_beam_search_has_unfinished_sequences"
    if not hasattr(module.GenerationMixin, name):  # older versions score beams on the host
        return []
    original = getattr(module.GenerationMixin, name)

    def has_unfinished(improvable: Any, finished: Any, at_their_end: Any, *args: Any, **kwargs: Any) -> Any:
        goes_on = original(improvable, finished, at_their_end, *args, **kwargs)
        with DisableTorchFunction():
            ends = run.gpu.values.get(at_their_end)
            if ends is not None:
                run.gpu.values.put(goes_on, ~ends.all())
        return goes_on

    return [(module.GenerationMixin, {name: staticmethod(has_unfinished)})]


ADAPTERS: dict[str, Adapter] = {
    "huggingface_hub.constants": _offline,
    "tqdm.std": _unwatched,
    "transformers.utils.logging": _no_bars,
    "transformers.utils.hub": _hub,
    "transformers.configuration_utils": _configurations,
    "transformers.tokenization_utils_base": _tokenizers,
    "transformers.modeling_utils": _models,
    "transformers.core_model_loading": _loaded_ahead,
    "transformers.utils.import_utils": _answers_forgotten,
    "accelerate.utils.imports": _answers_forgotten,
    "peft.peft_model": _adapters,
    "transformers.generation.stopping_criteria": _criteria,
    "transformers.generation.utils": _beams,
}
