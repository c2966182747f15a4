"""An answer is not surer than such answers were right, and where it is not sure its rivals are told with it."""

from __future__ import annotations

import pytest

from oom_magic.explain.evidence.causes import Cause, Confidence, Evidence
from oom_magic.explain.evidence.measured.calibration import calibration
from oom_magic.explain.explainer import explain
from tests.support.told import as_shown

_BUS = "DataLoader worker (pid 7) is killed by signal: Bus error. Please try to raise your shared memory limit."


def test_the_best_ground_counts_and_words_that_were_seldom_read_say_less():
    table = calibration()
    weak, strong = Evidence("smaller_batch_helps"), Evidence("larger_input_fails")
    assert table.precision(Cause.ACTIVATIONS, [weak]) < 0.9 < table.precision(Cause.ACTIVATIONS, [weak, strong])
    assert table.precision(Cause.ACTIVATIONS, [Evidence("request_of_line")]) == 0.95
    assert table.precision(Cause.ACTIVATIONS, [Evidence("told_seldom")]) < 0.9


@pytest.mark.parametrize(
    ("text", "others"),
    [
        pytest.param("I train a network, suddenly: CUDA out of memory", ["the model's weights", "kept"], id="open"),
        pytest.param(
            "colmap on my laptop with 8GB DDR4: the system is out of memory, 650 images of 6000 x 4000", ["RAM, not GPU"],
            id="whose memory is not said",
        ),
    ],
)  # fmt: skip
def test_what_is_not_sure_is_told_with_its_rivals(text, others):
    diagnosis = explain(text, fast=True, lang="en")
    assert diagnosis.confidence in (Confidence.POSSIBLE, Confidence.OPEN)
    assert [one for one in others if one not in as_shown(text)] == []


def test_a_device_that_its_message_names_is_not_ram():
    said = as_shown("my notebook has 16 GB of RAM. I resize 6000 x 4000 images: RuntimeError: CUDA out of memory")
    assert "RAM, not GPU memory" not in said


def test_what_was_tried_in_vain_makes_a_message_s_guess_only_possible():
    assert explain(_BUS, fast=True).confidence is Confidence.LIKELY
    told = f"I set num_workers to 0 and the shared memory is 64g, still the same error: {_BUS}"
    assert explain(told, fast=True).confidence is Confidence.POSSIBLE
    assert "--shm-size" not in as_shown(told)


@pytest.mark.parametrize(
    ("text", "cause", "words"),
    [
        ("ZeRO-3, OOM: optimizer state (exp_avg) on the GPU", Cause.OPTIMIZER_STATE, "The optimizer state does not fit"),
        (
            "vLLM is on a GPU; a context of 100k causes an out of memory error when allocating space for the KV cache",
            Cause.MEMORY_FRACTION_LIMIT,
            "KV cache",
        ),
    ],
)  # fmt: skip
def test_what_an_author_names_as_being_made_is_the_cause(text, cause, words):
    assert explain(text, fast=True).cause is cause
    assert words in as_shown(text)


def test_a_model_that_was_loaded_did_not_fail_to_load():
    said = as_shown(
        'ollama: msg="llama runner started in 6.54 seconds"\nCUDA error: out of memory\n'
        "  ggml_cuda_device_malloc(&ptr, look_ahead_size, device)"
    )
    assert "leave no room on the device for what a computation takes" in said
    assert "when they were loaded" not in said


def test_a_decoder_in_tiles_is_not_told_to_use_tiles():
    said = as_shown("ComfyUI, node VAEDecodeTiled: torch.OutOfMemoryError: Allocation on device")
    assert "VAE Decode (Tiled)" not in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("my vocab of 32k tokens: CUDA out of memory in training", "“32k", id="a vocabulary is no sequence"),
        pytest.param(
            "OOM error occurred after having 100k+ train steps\n请问挂掉后，再load最后的模型继续训练，是不是依旧从原来的数据训练",
            "checkpoints",
            id="what is asked has not happened",
        ),
        pytest.param(
            "I run the network of this repository in training: RuntimeError: CUDA out of memory. Tried to allocate 26.00 MiB"
            " (GPU 0; 8.00 GiB total capacity; 6.74 GiB already allocated; 0 bytes free; 6.93 GiB reserved in total by"
            " PyTorch)",
            "microbatch",
            id="no batch is named",
        ),
    ],
)  # fmt: skip
def test_what_no_text_says_is_not_read_into_it(text, words):
    assert words not in as_shown(text)


def test_a_size_that_overflowed_is_no_full_device():
    diagnosis = explain("RuntimeError: Storage size calculation overflowed with sizes=[-2139761793]", fast=True)
    assert (diagnosis.cause, diagnosis.is_oom) == (Cause.NOT_OOM, False)
    assert "wrong number in the program" in as_shown("Trying to create tensor with negative dimension -5: [-5]")


def test_the_gigabytes_of_a_mac_are_told_as_what_they_are():
    message = (
        "RuntimeError: MPS backend out of memory (MPS allocated: 5.56 GB, other allocations: 1.10 GB, max allowed: 6.80"
        " GB). Tried to allocate 768.00 MB on private pool."
    )
    assert "the same numbers as GiB and MiB here" in as_shown(message)


@pytest.mark.parametrize(
    ("text", "said", "not_said"),
    [
        pytest.param(
            "trying to quantize the 13B model, 12GB VRAM is not enough: out of memory in the evaluation",
            "what one pass computes",
            "read as 13 billion",
            id="a quantizer holds a layer at a time",
        ),
        pytest.param(
            "On an otherwise empty server (nvidia-smi only lists my process): RuntimeError: CUDA out of memory. Tried to"
            " allocate 750.00 MiB (GPU 1; 15.78 GiB total capacity; 178.27 MiB already allocated; 262.50 MiB free; 434.00"
            " MiB reserved in total by PyTorch)",
            "another library in the same process",
            "Close the other programs",
            id="no other process is there",
        ),
        pytest.param(
            "CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 31.36 GiB of which 462.06 MiB"
            " is free. Including non-PyTorch memory, this process has 30.88 GiB memory in use. Of the allocated memory 5.94"
            " GiB is allocated by PyTorch, and 673.03 MiB is reserved by PyTorch but unallocated.",
            "24.28 GiB are held outside PyTorch",
            "establish the cause",
            id="the process holds it outside PyTorch",
        ),
        pytest.param(
            "ComfyUI VAEDecode goes OOM in the decoding: Allocation on device. I reduced the tile size to 8. No luck.",
            "VAE",
            "Decode in tiles",
            id="tiles were tried",
        ),
        pytest.param(
            "GPU memory increases by 3 GB compared to llama.cpp version a few weeks ago: out of memory",
            "go back to that version",
            "try a newer version",
            id="the newer version is the cause",
        ),
        pytest.param(
            "./ds4-server -m ./ds4flash.gguf --ctx 500000: CUDA OOM while loading model tensors",
            "",
            "-ngl",
            id="another program reads the same files",
        ),
        pytest.param(
            "Running from Colab, it takes all the 12 GB RAM and then crashes, doesn't get to loading the model",
            "RAM",
            "swap",
            id="nobody adds swap to Colab",
        ),
        pytest.param(
            "tts长文本生成: Out of memory error on GPU，在本地电脑也可以",
            "",
            "RAM, not GPU",
            id="the GPU is named",
        ),
        pytest.param(
            "OOM. I quantized it before with the old version. A workaround by offloading to CPU would be appreciated",
            "",
            "It proposes",
            id="what is asked for is not proposed",
        ),
        pytest.param(
            "CPU RAM usage keeps growing during evaluation. I am training the model using the gpu, everything is fine",
            "host memory (RAM)",
            "Collect results in RAM",
            id="results fill RAM already",
        ),
        pytest.param(
            "If I set create_graph=True, graphics ram increased rapidly: far from enough for this U-Net",
            "",
            "host memory",
            id="the RAM of a graphics card",
        ),
        pytest.param(
            "Memory leak. I cannot generate more than 2 videos: out of memory CUDA errors. The only things I have changed"
            " is updating the program",
            "go back to that version",
            "newer version",
            id="the update is the only change",
        ),
        pytest.param(
            "I train a retinanet detector: memory grows for some hundred iterations, in max_iou_assigner.py, until"
            " RuntimeError: CUDA out of memory",
            "images with very many boxes",
            "",
            id="boxes are compared, whatever the batch",
        ),
        pytest.param(
            "Epoch 1 (106/251):\n  0%|          | 0/874 [00:01<?, ?it/s]\ntrain.py fails: CUDA out of memory",
            "",
            "What came before it fitted",
            id="the first step of the first epoch",
        ),
        pytest.param(
            "ComfyUI on a Mac, sd3.5_large.safetensors: MPS backend out of memory (MPS allocated: 16.91 GB, other allocations: 2.77"
            " MB, max allowed: 18.13 GB). Tried to allocate 1.28 GB on private pool.",
            "PyTorch may use 18.13 GiB of this Mac's memory",
            "the card has",
            id="a Mac has no card",
        ),
    ],
)  # fmt: skip
def test_the_author_s_own_account_is_not_contradicted(text, said, not_said):
    shown = as_shown(text)
    assert said in shown
    assert not not_said or not_said not in shown
