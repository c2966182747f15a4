"""explain(): texts, files and exceptions in; plain data out."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oom_templates import GIB, Numbers, render

from oom_magic.explain.evidence.causes import Cause
from oom_magic.explain.explainer import explain

CASES = Path(__file__).parents[2] / "shared" / "cases"
MESSAGE = render("T6", Numbers(requested=2 * GIB, allocated=4 * GIB, stuck=3 * GIB))[0]


def test_text_path_and_exception_agree(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(f"step 1\nstep 2\n{MESSAGE}\n")
    diagnoses = [explain(MESSAGE), explain(log), explain(str(log)), explain(RuntimeError(MESSAGE))]
    assert {diagnosis.cause for diagnosis in diagnoses} == {Cause.FRAGMENTATION}
    assert {diagnosis.main_failure.requested_bytes for diagnosis in diagnoses} == {2 * GIB}
    assert all(diagnosis.is_oom for diagnosis in diagnoses)


def test_only_the_end_of_a_long_log_is_read(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("x" * 5_000_000 + "\n" + MESSAGE)
    assert explain(log).cause == Cause.FRAGMENTATION


def test_missing_file_is_an_error_and_missing_text_is_not(tmp_path):
    with pytest.raises(FileNotFoundError):
        explain(tmp_path / "absent.log")
    assert explain("absent.log").is_oom is None


def test_last_failure_of_the_session(monkeypatch):
    monkeypatch.setattr(sys, "last_value", RuntimeError(MESSAGE), raising=False)
    assert explain().cause == Cause.FRAGMENTATION
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    with pytest.raises(ValueError, match="Nothing has failed"):
        explain()


def test_no_exception_or_frame_is_kept():
    class Tensor:
        pass

    def fail():
        tensor = Tensor()
        references.append(weakref.ref(tensor))
        raise RuntimeError(MESSAGE)

    references = []
    try:
        fail()
    except RuntimeError as error:
        diagnosis = explain(error)
    gc.collect()
    assert references[0]() is None
    assert diagnosis.cause == Cause.FRAGMENTATION


def test_the_traceback_of_an_exception_tells_the_phase():
    class Optimizer:
        def step(self):
            raise RuntimeError(MESSAGE.replace("3.00 GiB is reserved", "1.00 MiB is reserved"))

    optimizer = Optimizer()
    try:
        optimizer.step()
    except RuntimeError as error:
        diagnosis = explain(error)
    assert (diagnosis.phase, diagnosis.cause) == ("optimizer_step", Cause.OPTIMIZER_STATE)


def test_an_evaluation_whose_gradients_are_off_is_not_told_to_switch_them_off():
    def fail():
        raise RuntimeError(MESSAGE.replace("3.00 GiB is reserved", "1.00 MiB is reserved"))

    def evaluate():
        fail()

    @torch.no_grad()
    def evaluate_decorated():
        fail()

    def evaluate_in_a_block():
        with torch.no_grad():
            fail()

    phases = []
    for function in (evaluate, evaluate_decorated, evaluate_in_a_block):
        with pytest.raises(RuntimeError) as caught:
            function()
        phases.append(explain(caught.value).phase)
    assert phases == ["evaluation", None, None]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (MESSAGE, "tip_applies"),
        (MESSAGE.replace("3.00 GiB is reserved", "1.00 GiB is reserved"), "tip_does_not_apply"),
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n" + MESSAGE, "tip_already_followed"),
        ("PS C:\\train> python train.py\n" + MESSAGE, "tip_unsupported"),
        ("On Windows 11 I set ALLOC_CONF=expandable_segments:True, yet:\n" + MESSAGE, "tip_unsupported"),
        ("CUDA error: out of memory", None),
    ],
)
def test_the_tip_is_judged(text, key):
    tip = explain(text + "\n").tip
    assert (tip.key if tip else None) == key


@pytest.mark.parametrize(
    ("before", "first"),
    [
        ("", "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n", "A smaller microbatch"),
        ("On Windows 11 I set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, in vain:\n", "Set max_split_size_mb"),
    ],
)
def test_what_is_set_already_is_not_proposed_against_fragmentation(before, first):
    sizes = "8.00 GiB is allocated by PyTorch, and 3.00 GiB is reserved by PyTorch but unallocated"
    message = (
        "CUDA out of memory. Tried to allocate 900.00 MiB. GPU 0 has a total capacity of 12.00 GiB of which 0 bytes"
        f" is free. Of the allocated memory {sizes}."
    )
    diagnosis = explain(f"{before}Training stops:\ntorch.OutOfMemoryError: {message}\n")
    assert diagnosis.cause is Cause.FRAGMENTATION
    assert f"What to change: {first}" in " ".join(str(diagnosis).split())


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (render("T6", Numbers(process=None, others=((77, 7 * GIB),)))[0], "fact_own_pid"),
        (render("T6", Numbers(process=2**64, others=((77, 2**64),)))[0], "fact_process_size_unknown"),
        (render("T6", Numbers(pool=GIB))[0], "fact_private_pools"),
        (render("T1", Numbers())[0], "fact_cached_excludes_allocated"),
        (render("hip", Numbers(free=99 * GIB))[0], "fact_free_above_capacity"),
        (f"gradient_accumulation_steps: 2\n{MESSAGE}", "fact_accumulation"),
        (f"batch 32, 梯度累积 4 步\n{MESSAGE}", "fact_accumulation"),
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU \n",
            "fact_device_zero",
        ),
    ],
)
def test_facts_about_the_numbers(text, key):
    assert [fact.key for fact in explain(text).facts] == [key]


def test_setup_names_the_tensor():
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB."
    diagnosis = explain(text, {"batch": 2, "seq": 2048, "vocab": 151936})
    assert diagnosis.tensors[0].name == "logits"
    models = {"Qwen1.5-7B": {"vocab": 151936}}
    assert explain(f"Qwen1.5-7B batch_size=2 max_length=2048 {text}", models=models).tensors[0].fit > 0.7


ROBERTA_BASE = {"heads": 12, "hidden": 768, "vocab": 50265, "intermediate": 3072, "batch": 4, "seq": 1024}
QWEN_7B = {"heads": 32, "hidden": 4096, "vocab": 151936, "intermediate": 11008, "batch": 2, "seq": 2048}


@pytest.mark.parametrize(
    ("name", "setup", "cause", "tensor"),
    [
        ("1-vulberta-rtx3080.md", ROBERTA_BASE, "attention_scores", "attention_scores"),
        ("2-t5-small-3x20gb.md", None, "activations", None),
        ("3-qwen1.5-7b-qlora-16gb.md", QWEN_7B, "logits_or_loss", "logits"),
        ("4-classification-small-machines.md", None, "activations", None),
        ("5-rtx3060-12gb.md", None, "sysmem_fallback", None),
    ],
)
def test_the_reported_cases(name, setup, cause, tensor):
    path = CASES / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    diagnosis = explain(path, setup)
    assert diagnosis.is_oom
    assert diagnosis.cause == cause
    assert tensor is None or diagnosis.tensors[0].name == tensor


def test_not_oom():
    diagnosis = explain("RuntimeError: CUDA error: device-side assert triggered")
    assert (diagnosis.is_oom, diagnosis.cause) == (False, Cause.NOT_OOM)


@given(st.text(max_size=300))
def test_any_text_becomes_json(text):
    diagnosis = explain(text + "\n")
    assert json.loads(json.dumps(diagnosis.to_dict()))["cause"] == diagnosis.cause


def test_full_message_becomes_json():
    plain = json.loads(json.dumps(explain(MESSAGE).to_dict()))
    assert plain["cause"] == "fragmentation"
    assert plain["failures"][0]["requested_bytes"] == 2 * GIB


def test_nothing_heavy_is_imported():
    code = (
        "import sys, oom_magic.explain.explainer\n"
        "print([name for name in ('torch', 'IPython', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 4294967296.00 GiB (GPU 0; 79.15 GiB total capacity; 1.00 GiB already"
        " allocated; 77.00 GiB free; 1.10 GiB reserved in total by PyTorch)",
        "CUDA out of memory. Tried to allocate 17179869183.98 GiB. GPU 0 has a total capacity of 79.15 GiB.",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 18446744065119617024 bytes.",
        "Unable to allocate 3.73 EiB for an array with shape (536870912, 1000000000) and data type int64",
    ],
)
def test_a_size_that_overflowed_asks_for_what_was_multiplied(text):
    diagnosis = explain(text, lang="en")
    assert diagnosis.cause == Cause.REQUEST_ALONE_TOO_BIG
    assert "Print the sizes that are multiplied" in str(diagnosis)
    assert "smaller batches" not in str(diagnosis)


def test_a_batch_of_none_is_explained():
    text = "CUDA out of memory. Tried to allocate 40.00 MiB, batch_size=0"
    assert explain(text).is_oom
    assert explain(text, {"batch": 0}).is_oom


def test_a_library_that_finds_no_room_beside_tensorflow():
    text = (
        "tensorflow.python.framework.errors_impl.UnknownError: Could not create cudnn handle: CUDNN_STATUS_ALLOC_FAILED"
    )
    assert explain(text).cause == Cause.MEMORY_FRACTION_LIMIT


@pytest.mark.parametrize(
    ("version", "backend", "variable"),
    [
        ("mps", "mps", ""),
        ("npu", "npu", "PYTORCH_NPU_ALLOC_CONF"),
        ("hip", "cuda", "PYTORCH_HIP_ALLOC_CONF"),
        ("xpu", "xpu", "PYTORCH_ALLOC_CONF"),
        ("T6", "cuda", "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_code_is_that_of_the_device_that_ran_out(version, backend, variable):
    in_pieces = render(version, Numbers(requested=2 * GIB, allocated=4 * GIB, stuck=3 * GIB))[0]
    limit = 21 * GIB if version == "mps" else None
    sizes = {"allocated": 20 * GIB, "stuck": GIB // 8, "total": 22 * GIB, "process": 21 * GIB, "others": ()}
    full = render(version, Numbers(requested=2 * GIB, limit=limit, **sizes))[0]
    texts = (
        in_pieces,
        f"Training with batch 8 fails. {full}",
        f"Memory grows in training. {full}",
        f"Loading it: {full}",
    )
    whole = "\n".join(remedy.code for text in texts for remedy in explain(text, fast=True).remedies if remedy.code)
    devices = {"cuda", "mps", "npu", "xpu"} - {backend}
    assert not [device for device in devices if f'"{device}"' in whole or f"torch.{device}." in whole]
    assert f'torch.autocast("{backend}"' in whole
    if variable:
        assert f"export {variable}=expandable_segments:True" in whole
    else:
        assert "expandable_segments" not in whole


def test_what_a_macs_message_proposes_is_said_first():
    for text in ("", "Generating pictures with diffusers. ", "Training with batch 8 fails. "):
        message = render("mps", Numbers(requested=GIB, allocated=15 * GIB, stuck=2 * GIB))[0]
        diagnosis = explain(text + message, fast=True, lang="en")
        assert diagnosis.remedies[0].key == "mps_watermark"
        assert "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0" in str(diagnosis).split("What to change")[1][:160]
        assert "stall" in str(diagnosis).split("What to change")[1][:200]


_FIXED_SIZES = (
    "CUDA out of memory. Tried to allocate 1.86 GiB (GPU 0; 4.00 GiB total capacity; 1.48 GiB already allocated;"
)
_CROPS = (
    f"I train a detector on a 1080ti and get RuntimeError: {_FIXED_SIZES} 319.91 MiB free; 1.88 GiB reserved in total by"
    " PyTorch). I am able to train it with a smaller crop_size, but the loss does not get smaller."
)
_SERVED = (
    "vllm serve Qwen --tensor-parallel-size 4 --max-model-len 4096 --gpu-memory-utilization 0.85\nError: torch.cuda."
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 60.96 GiB total capacity; 55.91 GiB already"
    " allocated; 1.80 GiB free; 58.73 GiB reserved in total by PyTorch)"
)
_TOO_LONG = (
    "ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be stored in KV"
    " cache (3664). Try increasing gpu_memory_utilization or decreasing max_model_len when initializing the engine."
)
_TACTIC = (
    "[TRT] [W] Requested amount of GPU memory (17179869184 bytes) could not be allocated.\n[TRT] [W] Skipping tactic 8"
    " due to insufficient memory on requested size of 17179869184 detected for tactic 0x3c."
)
_NO_METAL = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 0 bytes, other allocations: 0 bytes, max allowed: 7.93 GB)."
    " Tried to allocate 256 bytes on shared pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit."
)
_LISTED = (
    "- Tensorflow version (GPU?): not installed (NA)\n- Jax version: 0.4\nI get an OOM when I evaluate: it fails at 94% of"
    " the 600 000 data points, with a batch size of one, too, after training with a batch size of 64."
)

_NUMBERS = (
    "Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 11.76 GiB of which 1.02 GiB is free. Including non-PyTorch"
    " memory, this process has 10.73 GiB memory in use. Of the allocated memory 9.80 GiB is allocated by PyTorch, and"
    " 500.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("text", "said", "not_said"),
    [
        pytest.param(_CROPS, ["loss_function", "fp16"], ["logits", "LoRA", "sdpa", "roberta", r"\*\*batch"], id="crops"),
        pytest.param(_SERVED, ["0.75", "len 2048", "size 8"], ["0.85\n", "8192", "SGLang: "], id="limits of a server"),
        pytest.param(_TOO_LONG, ["no sequence", "len 3664"], ["leaves nothing", "CUDA graphs", "lower"], id="too long"),
        pytest.param(_TACTIC, ["only a warning"], ["nvidia-smi"], id="tactic"),
        pytest.param(_NO_METAL, ["virtual machine"], ["weights do not fit", "Lift"], id="no Metal"),
        pytest.param(_LISTED, [], ["TensorFlow", "jax", "JAX"], id="listed libraries"),
        pytest.param(
            "when i start the training it shows CUDA OUT OF MEMORY even with reduced batch size of 1. Any solution?",
            ["bf16"], ["microbatch; gradient", "It proposes"], id="batch of one",
        ),
        pytest.param(
            "CPU memory. While evaluating, the computer's memory (no cuda memory) keeps increasing, and the program is"
            " killed. GPU : V100S * 2, RAM : 256GB",
            ["RAM"], ["GPU's memory ran out", "names no GPU"], id="no CUDA memory",
        ),
        pytest.param(
            "DataLoader worker (pid 256) is killed by signal: Bus error. It is possible that dataloader's workers are out"
            " of shared memory. I reduce the batch size to fix this problem.",
            ["shm", "prefetch_factor"], ["activations", "copy of what"], id="shared memory",
        ),
        pytest.param(
            "USM device allocation fails with UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY on 2 Arc A770 since the last driver",
            ["Level Zero"], ["expandable_segments", "WSL"], id="Intel's driver",
        ),
        pytest.param(
            "Killed\nI get this when i run the model: Special tokens have been added in the vocabulary\nKilled",
            ["RAM"], ["workers", "scheduler"], id="killed",
        ),
        pytest.param(
            "exits with return code = -9\ndeepspeed train.py --deepspeed ds_config_zero3.json --train_file_path /data.csv",
            ["RAM"], ["Offloading to the CPU keeps", "no GPU"], id="ZeRO-3 is no offload",
        ),
        pytest.param(
            "denom = (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)\ntorch.cuda.OutOfMemoryError: CUDA out of memory."
            " Tried to allocate 3.14 GiB (GPU 5; 31.75 GiB total capacity; 28.28 GiB already allocated; 1.95 GiB free;"
            " 28.28 GiB reserved in total by PyTorch)",
            ["8-bit"], ["without foreach"], id="one tensor at a time",
        ),
        pytest.param(
            "torch/distributed/fsdp/fully_sharded_data_parallel.py:2224: UserWarning: Failed to clone() tensor with name"
            " lm_head.weight. This may mean that this state_dict entry could point to invalid memory regions after"
            " returning from state_dict(). Error: CUDA out of memory. Tried to allocate 502.00 MiB (GPU 1; 39.59 GiB total"
            " capacity; 35.54 GiB already allocated; 276.19 MiB free; 37.22 GiB reserved in total by PyTorch)",
            ["Gather the state in RAM"], ["logits", "microbatch"], id="a checkpoint is saved",
        ),
        pytest.param(
            "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 805,306,368 bytes (allocated so far: 536,870,912"
            " bytes, limit set to: 1,073,741,824 bytes).",
            ["A limit set for this process", "free_all_blocks"], ["quantized"], id="a limit of CuPy's pool",
        ),
        pytest.param(
            "OOM when allocating tensor with shape[7,7,512,4096] even though I train with one picture on fcn8",
            ["a layer's kernel"], ["logits"], id="a layer's kernel",
        ),
        pytest.param(
            "When I run eval.py of nerf to generate 1008 * 756 pictures: CUDA out of memory. Tried to allocate 1.69 GiB (GPU"
            " 0; 7.79 GiB total capacity; 1.62 GiB already allocated; 704.56 MiB free; 5.88 GiB reserved in total by PyTorch)",
            [], ["diffusers", "GGUF"], id="pictures without diffusion",
        ),
        pytest.param(
            "Avoid out of GPU memory issue when loading checkpoints", ["map_location"], ["GGUF", "device_map"],
            id="loading a checkpoint",
        ),
        pytest.param(
            "Missing torch.no_grad() in the inference of this detector: CUDA out of memory at some picture",
            ["torch.no_grad()"], ["loss.item", "GGUF"], id="inference without no_grad",
        ),
        pytest.param(
            "vllm serve M runs out of GPU memory. I tried gpu_memory_utilization=0.8 but it did not work", ["--max-num-seqs"],
            ["--gpu-memory-utilization 0"], id="tried in vain",
        ),
        pytest.param(
            "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB", [], ["One tensor alone", "find_tensor"],
            id="20 MiB are no tensor too big for a device",
        ),
        pytest.param(
            "adj = torch_geometric.utils.to_dense_adj(edge_index)  # 400k nodes\nRuntimeError: CUDA out of memory. Tried to"
            " allocate 597.53 GiB (GPU 0; 16.00 GiB total capacity; 1.32 GiB already allocated; 12.78 GiB free)",
            ["every pair"], ["nobody meant", "one of them is wrong"], id="a dense matrix is meant so",
        ),
        pytest.param(
            f"CUDA out of memory. {_NUMBERS}", ["that takes the code", "--model MODEL --batch N --seq N"], ["roberta"],
            id="the way to prices of a bare message",
        ),
        pytest.param(
            f"trainer.train()\nOutOfMemoryError: CUDA out of memory. {_NUMBERS}\nI fine-tune meta-llama/Llama-3.2-1B"
            " with Trainer, batch_size=2, max_length=2048", ["--model llama-3.2-1b --batch 2 --seq 2048"],
            ["takes the code", "roberta"], id="the run that the text names",
        ),
        pytest.param(
            f"return F.conv2d(input, weight, bias)\nRuntimeError: CUDA out of memory. {_NUMBERS}",
            ["that takes the code"], ["--model"], id="no settings describe a convolution",
        ),
        pytest.param("llama-server -m M.gguf\nggml_cuda: CUDA error: out of memory", [], ["Not priced", "--model"],
                     id="another program is not rehearsed"),
        pytest.param(
            "vllm/worker/worker.py, in determine_num_available_blocks\nself.model_runner.profile_run()\nmllama.py, in forward\n"
            f"hidden = self.execute_model(pixel_values)\ntorch.OutOfMemoryError: CUDA out of memory. {_NUMBERS}",
            ["trial run", "--max-num-seqs", "--max-num-batched-tokens", "--limit-mm-per-prompt", "--max-model-len"],
            ["answered requests", "CUDA graphs", "enforce-eager", "SGLang"], id="a server's trial run",
        ),
        pytest.param(
            f"Model loading took 11.0 GiB\nin profile_run vllm\nCUDA out of memory. {_NUMBERS}", ["weights do not fit"],
            ["trial run does"], id="a server's weights by its log",
        ),
        pytest.param(
            "CUDA out of memory. Tried to allocate 26.00 MiB (GPU 0; 23.79 GiB total capacity; 20.60 GiB already allocated;"
            " 38.38 MiB free; 20.60 GiB reserved in total by PyTorch)\nEnvironment: a GPU of 24 GB, my own images",
            ["leaves it open"], ["Close what else", "Task Manager", "in pieces too"], id="no sign of others or of Windows",
        ),
        pytest.param(
            "finetuning_type: lora\nmodel: Llama-3.1-8B\ntemplate: llama3\ncutoff_len: 1024\nper_device_train_batch_size: 2\n"
            "evaluation_strategy: steps\neval_steps: 500\ntorch.cuda.OutOfMemoryError: CUDA out of memory",
            ["--model llama-3.1-8b --batch 2 --seq 1024 --method lora"], ["evaluation", "no_grad", "roberta"],
            id="settings of an evaluation are no failure of it",
        ),
        pytest.param(
            "the 66b model is copied whole by deepspeed's engine to the A100 80G, training goes out of GPU memory",
            ["ZeRO-3"], ["optimizer state in bf16", "device_map", "weights in bf16"], id="shards of ranks",
        ),
        pytest.param(
            "The k3s agent's memory increases all the time while the API server is away, until it is OOM killed",
            ["newer version"], ["read data", "load weights", "Which tensor"], id="a server that holds no data",
        ),
        pytest.param(
            "OSError: [Errno 28] No space left on device: '/dev/shm' when NCCL creates its segment", ["--shm-size"],
            ["prefetch_factor"], id="shared memory without a loader",
        ),
        pytest.param(
            "KernelRestarter: restarting kernel (1/5) during a join of two pandas data frames", ["likely"], ["certain"],
            id="a restart is no proof",
        ),
    ],
)  # fmt: skip
def test_nothing_is_said_beyond_the_text(text, said, not_said):
    shown = str(explain(text, fast=True, lang="en"))
    assert [word for word in said if not re.search(word, shown)] == []
    assert [word for word in not_said if re.search(word, shown)] == []
