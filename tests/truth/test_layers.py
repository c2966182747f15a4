"""Models of many equal layers, sized from runs with few of them, to the byte."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from oom_magic.predict.session import DrySession
from oom_magic.predict.setups.models import only_layers, with_layers_as_asked
from oom_magic.predict.setups.setup import TrainingSetup
from oom_magic.predict.sizing import layered
from oom_magic.predict.sizing.repetition import IrregularError, Repetition
from oom_magic.predict.sizing.sizes import Sizes
from tests.sizing.test_sizes import same

pytest.importorskip("transformers")


def agrees(setup: TrainingSetup, sizes: Sizes, **point: Any) -> bool:
    return same(sizes.report(**point), setup.replace(**point).dry_run())


ALL = 99  # asked for inside a run, and answered with the number that it is to build


@pytest.fixture
def num_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the number of layers of each dry run from here on."""
    found: list[int] = []
    usual = DrySession.run

    def run(*args: Any, **kwargs: Any) -> Any:
        found.append(with_layers_as_asked({"num_layers": ALL})["num_layers"])
        return usual(*args, **kwargs)

    monkeypatch.setattr(DrySession, "run", run)
    return found


def assert_shortened(num_layers: list[int]) -> None:
    assert num_layers and ALL not in num_layers


@pytest.mark.slow
def test_gpt2_of_twelve_layers_from_runs_with_few(num_layers: list[int]) -> None:
    setup = TrainingSetup("gpt2", precision="amp-fp16", activation_checkpointing=True, gpu="A100 80GB")
    sizes = setup.sizes(microbatch_size=(2, 64))
    assert_shortened(num_layers)
    assert agrees(setup, sizes, microbatch_size=13)
    modules = dict(sizes.report(microbatch_size=13).modules)
    assert any(".h.11" in path for path in modules)


@pytest.mark.slow
def test_what_does_not_repeat_is_run_with_all_layers(num_layers: list[int]) -> None:
    """The sizes of all norms make one size, in more numbers with each layer."""
    setup = TrainingSetup("gpt2", max_grad_norm=1.0, gpu="A100 80GB")
    sizes = setup.sizes(microbatch_size=(2, 8))
    assert ALL in num_layers
    assert agrees(setup, sizes, microbatch_size=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("gpt2", {"method": "lora"}),
        ("bert-base-uncased", {"precision": "amp-fp16"}),
        ("bert-base-uncased", {"method": "lora"}),
        ("t5-base", {}),
        ("t5-base", {"method": "lora", "activation_checkpointing": True}),
        ("llama-3.2-1b", {"activation_checkpointing": True, "gradient_accumulation_steps": 2}),
        ("llama-3.2-1b", {"method": "lora", "optimizer": "adamw8bit"}),
        ("llama-3.2-1b", {"loss": "chunked", "optimizer": "adafactor"}),
        ("qwen2.5-1.5b", {"method": "lora", "data": "padded", "activation_checkpointing": True}),
        ("qwen2.5-7b", {"method": "qlora"}),
        ("qwen3-0.6b", {"attention": "eager"}),
        ("gemma-2-2b", {"method": "lora"}),
        ("gemma-2-2b", {"activation_checkpointing": True}),
        ("phi-3-mini", {"method": "qlora", "activation_checkpointing": True}),
        ("vit-base", {"method": "lora"}),
    ],
)
def test_presets_of_many_layers_from_runs_with_few(model: str, fields: dict[str, Any], num_layers: list[int]) -> None:
    setup = TrainingSetup(model, gpu="A100 80GB", **fields)
    sizes = setup.sizes(microbatch_size=(2, 64))
    assert_shortened(num_layers)
    assert agrees(setup, sizes, microbatch_size=7)


@pytest.mark.slow
def test_what_was_learned_at_one_point_and_does_not_hold_at_another_is_not_used(
    monkeypatch: pytest.MonkeyPatch, num_layers: list[int]
) -> None:
    def differs(*_: Any) -> None:
        raise IrregularError

    monkeypatch.setattr(layered, "known_repetitions", OrderedDict())
    monkeypatch.setattr(Repetition, "check", differs)
    setup = TrainingSetup("gpt2", gpu="A100 80GB")
    sizes = setup.sizes(microbatch_size=(2, 8))
    assert ALL in num_layers
    assert agrees(setup, sizes, microbatch_size=5)


def test_configurations_with_fewer_layers() -> None:
    plain = {"num_layers": 12, "num_decoder_layers": 12, "d_model": 8}
    nested = {"text_config": {"num_hidden_layers": 34, "layer_types": ["a", "b"] * 17}, "vision_config": {"n": 1}}
    with only_layers(3):
        assert with_layers_as_asked(plain) == {"num_layers": 3, "num_decoder_layers": 3, "d_model": 8}
        text = with_layers_as_asked(nested)["text_config"]
        assert text == {"num_hidden_layers": 3, "layer_types": ["a", "b", "a"]}
    assert with_layers_as_asked(plain) is plain
