"""What others' texts are advised stays with their programs and machines: no tool, setting or change from elsewhere."""

from __future__ import annotations

import re

import pytest

from oom_magic.explain.explainer import explain


@pytest.mark.parametrize(
    ("text", "said", "not_said"),
    [
        pytest.param(
            'Getting OOM when trying to train a flux lora on a 4060: "ae": "/home/o/ComfyUI/models/vae/ae.sft"', ["training"],
            ["ComfyUI", "VAE", "picture"], id="a folder of models",
        ),
        pytest.param(
            "When training pv-rcnn out of memory occurs. It happened several times: GPUassert: out of memory iou3d_nms.cpp 103",
            ["does not|do not"], ["keeps alive", "not given back"], id="it happened several times",
        ),
        pytest.param(
            "MemoryError: Unable to allocate 52.0 GiB for an array with shape (83520, 83520) and data type float64\n\nwhen I run"
            " transform(tsData)", ["float64 = 52", "this one array smaller"], ["float32"], id="an array's type",
        ),
        pytest.param(
            "vLLM on a 4060: total_gpu_memory (8.00GiB) x gpu_memory_utilization (0.70) = 5.60GiB\nValueError: No available"
            " memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
            ["0.75   # now 0.7"], ["several devices", "smaller share"], id="one device",
        ),
        pytest.param(
            "vllm, two L40 GPUs, --tensor-parallel-size 2. Also tried --gpu-memory-utilization, did not help.\nValueError: The"
            " model's max seq len (16384) is larger than the maximum number of tokens that can be stored in KV cache (11184).",
            ["11184"], ["parallel-size 4", "larger share"], id="no more devices than there are",
        ),
        pytest.param(
            "I reduced the batch_size and num_workers with no success to train: python3 tacotron2.py validation_datasets=f.json"
            " batch_size=1\nRuntimeError: CUDA out of memory", [], ["atch helps", "evaluation", "no_grad", "Smaller batches"],
            id="settings are no events",
        ),
        pytest.param(
            "Level Zero cannot create an NPU command queue (ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY) on Windows 11", ["not the GPU's"],
            ["xpu-smi", "inputs"], id="a driver's own memory",
        ),
    ],
)  # fmt: skip
def test_advice_is_of_the_text(text, said, not_said):
    shown = str(explain(text, fast=True, lang="en"))
    assert [word for word in said if not re.search(word, shown)] == []
    assert [word for word in not_said if re.search(word, shown)] == []
