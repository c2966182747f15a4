"""Libraries in a dry run: what they find, what they leave alone, and that they are as before afterwards."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.data import DataLoader, TensorDataset

import oom_magic as om
from oom_magic.predict.libraries import bitsandbytes_ops
from oom_magic.predict.session import DrySession
from oom_magic.units import MIB
from tests.support.put_back import observed
from tests.support.versions import bitsandbytes_or_skip, recorded_with

SMALL = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 512, "torch_dtype": "float16",
         "architectures": ["GPT2LMHeadModel"], "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    return folder


def texts(report: om.MemoryReport) -> str:
    return "\n".join(assumption.text for assumption in report.assumptions)


@pytest.mark.slow
def test_a_library_that_is_not_used_is_not_imported() -> None:
    code = (
        "import sys, torch, oom_magic as om\n"
        "om.dry_run(lambda: torch.nn.Linear(4, 4).to('cuda')(torch.ones(2, 4, device='cuda')))\n"
        "print([name for name in ('transformers', 'accelerate', 'bitsandbytes') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_folder_with_a_configuration_is_enough(model_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    seen: list[Any] = []

    def load() -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, torch_dtype="auto").to("cuda")
        seen.extend([model.dtype, model.name_or_path, model.training, next(model.parameters()).device.type])

    report = observed(load)
    assert seen == [torch.float16, str(model_folder), False, "cuda"]
    assert "weights are not read; their dtype on disk was assumed to be float16" in texts(report)


def test_threads_load_as_far_ahead_as_they_can() -> None:
    """With transformers 5.0.0 a 4-bit Llama took 350195200 bytes at its peak on CUDA, and does here; 5.23 waits."""
    loading = pytest.importorskip("transformers.core_model_loading")

    def load() -> None:
        pool = loading.ThreadPoolExecutor(max_workers=4)
        waiting = [loading.spawn_materialize(pool, torch.empty(1 << 20), "cuda", torch.float32) for _ in range(5)]
        while waiting:
            assert waiting.pop().result().is_cuda
        pool.shutdown(wait=False, cancel_futures=True)

    assert om.dry_run(load).peak_allocated_bytes == 20 * MIB


def test_presets_are_known_by_their_hub_id() -> None:
    transformers = pytest.importorskip("transformers")

    def load() -> None:
        transformers.AutoModelForCausalLM.from_pretrained(
            "Qwen/Qwen2.5-0.5B", torch_dtype=torch.bfloat16, device_map="cuda"
        )

    report = om.dry_run(load)
    assert 2 * 494_032_768 <= report.peak_allocated_bytes < 2 * 494_032_768 + 8 * MIB
    assert "Qwen/Qwen2.5-0.5B: the preset's configuration was used" in texts(report)


@pytest.mark.parametrize("kind", ["AutoModelForCausalLM", "AutoConfig", "AutoTokenizer", "LlamaForCausalLM"])
def test_unknown_names_are_said_and_nothing_is_fetched(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.raises(OSError, match=r"'nobody/nothing-9b'.*downloads nothing"):
        om.dry_run(lambda: getattr(transformers, kind).from_pretrained("nobody/nothing-9b"))
    assert not __import__("huggingface_hub").constants.HF_HUB_OFFLINE


def test_no_files_are_written(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))

    def save() -> None:
        from safetensors.torch import load_file, save_file

        model = transformers.GPT2LMHeadModel.from_pretrained(model_folder)
        torch.save(model.state_dict(), "weights.pt")
        save_file(dict(model.state_dict()), "weights.safetensors")
        model.save_pretrained("saved")
        model.config.save_pretrained("saved")
        assert {file.suffix for file in Path("saved").iterdir()} == {".json", ".safetensors"}
        assert transformers.AutoConfig.from_pretrained("saved").n_layer == model.config.n_layer
        loaded = load_file("weights.safetensors", device="cuda")
        assert {name: one.shape for name, one in loaded.items()} == {
            n: one.shape for n, one in torch.load("weights.pt").items()
        }

    report = om.dry_run(save)
    assert sorted(tmp_path.rglob("*")) == before
    assert "what the dry run writes can be read back" in texts(report)
    torch.save({"kept": torch.ones(3)}, "after.pt")
    assert torch.load("after.pt")["kept"].sum() == 3


@pytest.mark.parametrize("how", [{}, {"do_sample": True, "top_p": 0.9}, {"num_beams": 3}], ids=str)
def test_generation_runs_to_its_length(model_folder: Path, how: dict[str, Any]) -> None:
    generation = pytest.importorskip("transformers.generation")
    if "num_beams" in how and not hasattr(generation.GenerationMixin, "_beam_search_has_unfinished_sequences"):
        pytest.skip("beams of this version of transformers are scored on the host")
    from transformers import AutoModelForCausalLM

    calls: list[int] = []

    def generate() -> None:
        model = AutoModelForCausalLM.from_pretrained(model_folder).to("cuda")
        model.register_forward_hook(lambda *_: calls.append(1))
        prompt = torch.ones(2, 5, dtype=torch.long, device="cuda")
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, **how)

    report = observed(generate)
    assert len(calls) == 12
    assert "every sequence is assumed to reach the maximum length" in texts(report)


def test_files_are_read_to_the_pretend_gpu(tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    torch.save({"weight": weight, "row": weight[1], "nested": [weight, 3]}, tmp_path / "file.pt")
    seen: list[Any] = []

    def load() -> None:
        loaded = torch.load(tmp_path / "file.pt", map_location="cuda")
        seen.extend([loaded["weight"].device.type, loaded["row"].sum().item(), loaded["nested"][1]])

    report = observed(load)
    assert seen == ["cuda", 22.0, 3]
    assert report.peak_allocated_bytes < 2048  # one storage for the three


def test_what_is_read_from_a_file_is_no_view_of_what_nobody_sees(tmp_path: Path) -> None:
    """A rehearsal without a checkpoint kept its memory, as each tensor was a view of another that held it."""
    torch.save(torch.zeros(3, 4), tmp_path / "before.pt")
    seen: list[Any] = []

    def load() -> None:
        torch.save(torch.zeros(3, 4, device="cuda"), tmp_path / "own.pt")
        for name in ("before.pt", "own.pt"):
            loaded = torch.load(tmp_path / name, map_location="cuda")
            seen.append((loaded._is_view(), loaded.is_leaf, loaded.sum().item(), torch.cuda.memory_allocated()))
            del loaded

    observed(load)
    assert seen == [(False, True, 0.0, 512)] * 2


def test_what_is_known_of_values_on_the_pretend_gpu_is_saved(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def save() -> None:
        state = nn.BatchNorm1d(2, device="cuda").state_dict() | {"zeros": torch.zeros(3, 1, device="cuda")}
        torch.save(state | {"even": torch.arange(6, device="cuda")[::2]}, tmp_path / "file.pt")
        seen.update({name: value.tolist() for name, value in torch.load(tmp_path / "file.pt").items()})

    observed(save)
    assert (seen["num_batches_tracked"], seen["zeros"], seen["even"]) == (0, [[0.0]] * 3, [0, 2, 4])
    assert (seen["running_var"], seen["weight"]) == ([1.0, 1.0], [1.0, 1.0])


def test_data_loaders_work_without_processes() -> None:
    loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=8, num_workers=2, pin_memory=True, timeout=5)
    seen: list[int] = []
    observed(lambda: seen.extend(int(batch.to("cuda", non_blocking=True).sum()) for (batch,) in loader))
    assert sum(seen) == sum(range(64))
    assert (loader.num_workers, loader.timeout, loader.pin_memory) == (2, 5, True)


def test_what_libraries_remember_of_devices_is_as_before(fresh_accelerate: ModuleType) -> None:
    accelerate = fresh_accelerate
    utils = pytest.importorskip("transformers.utils")
    before = accelerate.PartialState().device
    finders = list(sys.meta_path)
    had_cuda = utils.is_torch_cuda_available()
    seen: list[Any] = []

    def look() -> None:
        accelerator = accelerate.Accelerator(mixed_precision="bf16")
        seen.extend([accelerator.device.type, utils.is_torch_cuda_available(), utils.is_torch_bf16_gpu_available()])

    observed(look, gpu="A100 80GB")
    assert seen == ["cuda", True, True]
    assert accelerate.PartialState().device == before
    assert not accelerate.state.AcceleratorState._shared_state
    assert utils.is_torch_cuda_available() is had_cuda
    assert sys.meta_path == finders


def test_what_a_run_makes_of_accelerate_is_used_in_the_next(fresh_accelerate: ModuleType) -> None:
    """As a Trainer of one dry cell is by the next: its singletons were empty there, which ended every such cell."""
    accelerate, session = fresh_accelerate, DrySession("A100 80GB", has_bar=False)
    made: list[Any] = []
    session.run(lambda: made.append(accelerate.Accelerator(mixed_precision="bf16")))
    assert not accelerate.state.PartialState._shared_state
    found: list[Any] = []

    def look() -> None:
        found.append([made[0].device.type, made[0].num_processes, made[0].mixed_precision])

    def make_other() -> None:
        found.append(accelerate.Accelerator(mixed_precision="fp16").mixed_precision)

    session.run(look)
    session.run(look)
    session.copy().run(look)
    assert found == [["cuda", 1, "bf16"]] * 3
    assert not accelerate.state.AcceleratorState._shared_state
    first = DrySession("A100 80GB", has_bar=False)
    first.run(make_other)
    first.copy().run(make_other)  # from what was there before the last run: another precision would be an error
    assert found[3:] == ["fp16", "fp16"]


def test_arguments_made_before_the_run_train_on_the_pretend_gpu(tmp_path: Path, model_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=3, report_to="none", disable_tqdm=True, per_device_train_batch_size=2
    )
    tokens = torch.arange(32)
    data = [{"input_ids": tokens, "labels": tokens}] * 16

    def train() -> None:
        model = transformers.GPT2LMHeadModel.from_pretrained(model_folder, torch_dtype=torch.float32)
        transformers.Trainer(model=model, args=arguments, train_dataset=data).train()

    report = om.dry_run(train)
    assert len(report.steps) == 3
    assert report.breakdown["optimizer_state"] > 0
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_loaded_without_its_weights(
    model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    settings = {"peft_type": "LORA", "r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    trained: list[int] = []

    def load() -> None:
        model = transformers.GPT2LMHeadModel.from_pretrained(model_folder).to("cuda")
        model = peft.PeftModel.from_pretrained(model, tmp_path, is_trainable=True)
        model(input_ids=torch.ones(1, 8, dtype=torch.long, device="cuda")).logits.sum().backward()
        trained.extend(parameter.grad.numel() for parameter in model.parameters() if parameter.grad is not None)

    report = observed(load)
    assert trained == [4 * 64, 4 * 3 * 64]
    assert "no file of adapter weights" in texts(report)
    assert "torch.compile" not in texts(report)
    assert "Loading weights" not in capfd.readouterr().err


def test_a_triton_kernel_that_is_defined_in_a_run_asks_for_no_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Triton 3.2 asks, which PyTorch 2.6 has: bitsandbytes and others define kernels when they are imported."""
    for name in [one for one in sys.modules if one.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "triton/runtime").mkdir(parents=True)
    (tmp_path / "triton/__init__.py").touch()
    (tmp_path / "triton/runtime/__init__.py").touch()
    (tmp_path / "triton/runtime/autotuner.py").write_text(
        "class Autotuner:\n"
        "    def __init__(self, function, do_bench=None):\n"
        "        self.do_bench = driver.active.get_benchmarker() if do_bench is None else do_bench\n"
        "    def run(self):\n"
        "        raise RuntimeError('launched')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def load() -> None:
        from triton.runtime.autotuner import Autotuner  # type: ignore[import-not-found,unused-ignore]

        Autotuner(len).run()

    assert "Triton kernel Autotuner: not run" in texts(observed(load))


@pytest.mark.parametrize("batch", ["full", "padded"])
def test_flash_attention_is_stood_in_for(model_folder: Path, batch: str) -> None:
    transformers = pytest.importorskip("transformers", "5")
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash_attn is installed")

    def forward(attention: str) -> None:
        model = transformers.GPT2LMHeadModel.from_pretrained(model_folder, attn_implementation=attention).to("cuda")
        tokens = torch.ones(2, 128, dtype=torch.long, device="cuda")
        mask = torch.ones_like(tokens)
        if batch == "padded":
            mask[0, 64:] = 0
        model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()

    report = om.dry_run(forward, "flash_attention_2", gpu="A100 80GB")
    assert "flash_attn is not installed here" in texts(report)
    assert "flash_attn" not in sys.modules
    assert report.peak_allocated_bytes < om.dry_run(forward, "eager", gpu="A100 80GB").peak_allocated_bytes


@recorded_with("2.13.0")
def test_what_a_score_mod_captures_is_followed_or_refused() -> None:
    def train(is_trained: bool) -> None:
        slopes = torch.zeros(2, device="cuda", requires_grad=is_trained)
        query = torch.randn(1, 2, 64, 32, device="cuda", requires_grad=True)
        flex_attention(query, query, query, lambda score, b, h, i, j: score + slopes[h] * (i - j)).sum().backward()

    assert om.dry_run(train, False).peak_allocated_bytes == 17_425_408  # as the CUDA build counts
    with pytest.raises(
        NotImplementedError, match="flex_attention: a tensor captured by its score_mod requires gradients"
    ):
        om.dry_run(train, True)


@recorded_with("2.13.0")
def test_the_first_call_of_flex_attention_may_keep_its_inputs() -> None:
    """PyTorch traces it, and cycles that tracing leaves held 3 MiB to the end of these two steps."""

    def train() -> None:
        project, out = nn.Linear(256, 768).cuda(), nn.Linear(256, 256).cuda()
        optimizer = torch.optim.AdamW([*project.parameters(), *out.parameters()])
        near = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j <= 64), None, None, 512, 512, device="cuda")
        for _ in range(2):
            x = torch.randn(2, 512, 256, device="cuda")
            query, key, value = (one.view(2, 512, 4, 64).transpose(1, 2) for one in project(x).chunk(3, -1))
            y = flex_attention(query, key, value, lambda score, b, h, i, j: score - (i - j).abs() * 0.1, near)
            out(y.transpose(1, 2).reshape(2, 512, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = om.dry_run(train, gpu="RTX 3060")
    assert report.uncollected_bytes == (97_107_456, 123_731_968)  # as the CUDA build counts
    assert "may hold that call's query, key and value" in texts(report)


def test_gradients_by_torch_func_are_freed_when_a_thread_of_autograd_comes_to_it() -> None:
    """On the CUDA build the activations were there during the update after them, or not: 50.6 or 43.3 MB."""

    def train(how: str) -> None:
        weight = torch.randn(64, 64, device="cuda")
        loss = lambda w, x: (x @ w).tanh().sum()  # noqa: E731
        if how == "plain":
            loss(weight.requires_grad_(), torch.randn(8, 64, device="cuda")).backward()
        else:
            place = "cuda" if how == "on the GPU" else "cpu"
            torch.func.grad(loss)(weight.to(place), torch.randn(8, 64, device=place))

    said = {
        how: "autograd's own thread" in texts(om.dry_run(train, how)) for how in ("plain", "on the host", "on the GPU")
    }
    assert said == {"plain": False, "on the host": False, "on the GPU": True}


def test_models_that_asked_for_flash_attention_at_import_have_it(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTBigCode of transformers 4 ended with a NameError: it imports the function only where flash_attn is.

    A module beside it imports what is not installed when it is asked for a name: Aria, without torchvision.
    """
    transformers = pytest.importorskip("transformers", "5")
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash_attn is installed")
    old = types.ModuleType("transformers.models.old.modeling_old")
    old.is_flash_attn_2_available = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, old.__name__, old)
    lazy = types.ModuleType("transformers.models.lazy")
    lazy.__file__ = transformers.__file__
    lazy.__getattr__ = lambda name: importlib.import_module("no_such_vision_library")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, lazy.__name__, lazy)

    def load() -> None:
        transformers.GPT2LMHeadModel.from_pretrained(model_folder, attn_implementation="flash_attention_2")
        assert callable(old._flash_attention_forward)

    om.dry_run(load)
    assert not hasattr(old, "_flash_attention_forward")


def test_quantized_layers_leave_bitsandbytes_as_it_was() -> None:
    bitsandbytes = bitsandbytes_or_skip()
    library, cached = bitsandbytes.functional.lib, dict(bitsandbytes.functional.name2qmap)

    def train() -> None:
        layer = bitsandbytes.nn.Linear4bit(1024, 4096, bias=False, quant_type="nf4").cuda()
        layer(torch.randn(8, 1024, device="cuda", requires_grad=True)).sum().backward()

    report = om.dry_run(train)
    packed = 1024 * 4096 // 2
    assert packed < report.kept_bytes + report.peak_allocated_bytes
    assert bitsandbytes.functional.lib is library
    assert dict(bitsandbytes.functional.name2qmap).keys() == cached.keys()


def test_quantized_layers_need_no_driver_where_torch_has_a_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    bitsandbytes = bitsandbytes_or_skip()

    def no_driver(_: int) -> int:
        raise RuntimeError("CUDA driver version is insufficient")

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", no_driver, raising=False)

    def train() -> None:
        layer = bitsandbytes.nn.Linear4bit(1024, 4096, bias=False, quant_type="nf4").cuda()
        layer(torch.randn(8, 1024, device="cuda", requires_grad=True)).sum().backward()

    assert om.dry_run(train).error == ""


def test_paged_state_is_outside_the_allocator() -> None:
    bitsandbytes = bitsandbytes_or_skip()

    def train(optimizer: Any) -> None:
        layer = nn.Linear(2048, 2048).to("cuda")
        steps = optimizer(layer.parameters())
        layer(torch.randn(8, 2048, device="cuda")).sum().backward()
        steps.step()

    paged = om.dry_run(train, bitsandbytes.optim.PagedAdamW32bit)
    usual = om.dry_run(train, bitsandbytes.optim.AdamW32bit)
    assert usual.breakdown["optimizer_state"] >= 2 * 4 * 2048 * 2048
    assert paged.breakdown["optimizer_state"] < MIB
    assert "managed memory" in texts(paged)


def test_lightning_trains(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    def train() -> None:
        loader = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=8)
        trainer = lightning.Trainer(max_steps=5, accelerator="gpu", devices=1, precision="bf16-mixed",
                                    default_root_dir=tmp_path, enable_progress_bar=False)  # fmt: skip
        trainer.fit(Model(), loader)

    assert len(om.dry_run(train).steps) == 5  # three of the first epoch, and what max_steps leaves of the second
    assert not list(tmp_path.iterdir())


def test_optimizers_of_an_older_bitsandbytes_run_without_its_kernels() -> None:
    """0.46 keeps its kernels in tables of its own; where its library is compiled for CPUs only, each one raises."""
    functional: Any = ModuleType("bitsandbytes.functional")
    functional.str2optimizer8bit_blockwise = {"adam": (pytest.fail, pytest.fail), "momentum": (pytest.fail,)}
    tables = bitsandbytes_ops.optimizers_kernels(functional)
    kernels = tables["str2optimizer8bit_blockwise"]
    assert [len(kernels[name]) for name in ("adam", "momentum")] == [2, 1]
    assert kernels["adam"][1]() == 0
