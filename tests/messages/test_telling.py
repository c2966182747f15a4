"""What a change needs to be told plainly: a condition of its own, a good record, or that the text shows it."""

from __future__ import annotations

import importlib.util

import pytest

from oom_magic.explain.evidence.causes import Cause, Confidence, Evidence
from oom_magic.explain.evidence.measured.contradicted import is_proven, is_sure_of
from oom_magic.explain.explainer import explain
from oom_magic.explain.remedies.from_text.telling import has_condition
from tests.support.folders import DATA


def _shown(text):
    return " ".join(str(explain(text, fast=True, lang="en")).split())


def test_the_table_is_counted_from_first_sight():
    spec = importlib.util.spec_from_file_location("record_contradicted", DATA / "record_contradicted.py")
    assert spec is not None
    assert spec.loader is not None
    record = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(record)
    assert record.TABLE.read_text(encoding="utf-8") == record.counted()


def test_a_record_needs_more_than_two_answers():
    assert is_proven("find_tensor")  # 5 answers, none contradicted
    assert not is_proven("llama_context")  # 2
    assert not is_proven("never_told")


def test_a_cause_is_likely_by_what_is_seen_or_by_words_for_ram_where_no_gpu_is_named():
    words, line = [Evidence("told_killed"), Evidence("memory_grows")], Evidence("code_collects_tensors")
    assert is_sure_of(Cause.HOST_RAM, words, names_gpu=False)
    assert not is_sure_of(Cause.HOST_RAM, words, names_gpu=True)
    assert not is_sure_of(Cause.LEAK_OR_RETAINED_REFERENCE, words, names_gpu=False)
    assert is_sure_of(Cause.LEAK_OR_RETAINED_REFERENCE, [*words, line], names_gpu=True)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        pytest.param(
            "Each simulator on the GPU takes memory and is killed at the end. My RAM runs full after some hours, 24 GB GPU",
            Cause.HOST_RAM, id="RAM beside a GPU",
        ),
        pytest.param(
            "Qwen3-235B OOMs with sufficient VRAM when it is loaded: the full checkpoint is read by every GPU's process",
            Cause.WEIGHTS_TOO_BIG, id="a size that is read off a name",
        ),
        pytest.param(
            "My agents' GPU memory usage is steadily increasing. I suspect the reset servers are not being fully killed",
            Cause.LEAK_OR_RETAINED_REFERENCE, id="what is not killed",
        ),
        pytest.param(
            "Advice on 256GB Memory for training on 4 V100. I tried to use the whole data, half of it: all leads to OUT OF MEMORY",
            Cause.HOST_RAM, id="more memory than a card has",
        ),
    ],
)  # fmt: skip
def test_words_make_a_cause_only_possible(text, cause):
    diagnosis = explain(text, fast=True, lang="en")
    assert diagnosis.cause is cause
    assert diagnosis.confidence is Confidence.POSSIBLE


def test_what_the_text_says_is_missing_is_told_plainly():
    shown = _shown("The Inferer does not properly use torch.no_grad(), so that inference takes much more GPU memory")
    assert "Evaluate under torch.no_grad()" in shown
    assert "First find out" not in shown


@pytest.mark.parametrize(
    ("text", "not_said"),
    [
        pytest.param("I upgraded to 32gb from 16b RAM. Now I get a VRAM OOM error on a 4070 12gb", "16 billion", id="16b RAM"),
        pytest.param(
            "CUDA out of memory. I tried to solve it with these, but none has worked so far: 1. Decreasing batch_size to 4 -> 2 -> 1"
            " 2. Use torch.cuda.empty_cache() 3. Use gc.collect()", "It proposes", id="tried in vain is not proposed",
        ),
        pytest.param(
            "CuArrays: out of GPU memory. It works if you uncomment the manual gc() line", ".cpu()", id="Julia has no .cpu()",
        ),
    ],
)  # fmt: skip
def test_what_is_no_size_and_no_proposal(text, not_said):
    assert not_said not in _shown(text)


def test_a_limitation_of_cuda_memory_is_a_device_that_is_full():
    assert explain("a large protein: I am encountering a CUDA memory limitation error", fast=True).is_oom


def test_behind_a_check_no_further_changes_are_told_that_nothing_supports():
    shown = _shown("running into oom finetuning using lora on llama 2 70b on 8*a-100 (80gb)")
    assert "First find out" in shown
    assert "What to change if that is it" not in shown


def test_sentences_with_a_condition_are_found():
    assert has_condition("newer_version")
    assert has_condition("collect_on_host")
    assert not has_condition("quantized_model")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            "the 66b model is copied whole by deepspeed's engine to the A100 80G, training goes out of GPU memory",
            id="a likely cause",
        ),
        pytest.param("I use Ollama on 8 GB, deepseek-r1:14b, CUDA error: out of memory. It cannot load the model", id="possible"),
    ],
)  # fmt: skip
def test_a_change_without_a_record_comes_behind_the_check(text):
    assert "What to change:" not in _shown(text).split("Evidence")[0]


def test_what_the_author_has_seen_help_is_told_plainly():
    shown = _shown("CUDA out of memory in training with batch_size=13. It works if I reduce batch_size")
    assert "First find out" not in shown


@pytest.mark.parametrize(
    ("text", "cause", "said"),
    [
        pytest.param(
            "[2020-05-05 18:48:50] [memory] Extending reserved space to 9088 MB (device gpu0)\n[2020-05-05 18:48:50] Error:"
            " CUDA error 2 'out of memory' - /home/x/marian-dev/src/tensors/gpu/device.cu:38: cudaMalloc(&data_, size)",
            Cause.MEMORY_FRACTION_LIMIT, "Marian reserves its workspace in one piece when it starts: 8.88 GiB", id="Marian",
        ),
        pytest.param(
            "PxgDynamicsMemoryConfig::collisionStackSize buffer overflow detected, please increase its size to at least"
            " 1484688128 in the scene desc!", Cause.NOT_OOM, "the message names its setting", id="a buffer of PhysX",
        ),
        pytest.param(
            "CUDA error: out of memory\n  current device: 0, in function ggml_cuda_pool_malloc_vmm at ggml-cuda.cu:8587\n"
            "  cuMemAddressReserve(&g_cuda_pool_addr[device], CUDA_POOL_VMM_MAX_SIZE, 0, 0, 0)",
            Cause.DRIVER_LEVEL, "that takes no memory of the device yet", id="addresses",
        ),
        pytest.param(
            "LLama 70B build engine OOM\npython build.py --model_dir ./model --use_gpt_attention_plugin float16 --tp_size 4\n"
            "The memory size is 256GB", Cause.HOST_RAM, "read into the computer's RAM", id="an engine is built",
        ),
    ],
)  # fmt: skip
def test_what_programs_reserve_at_their_start(text, cause, said):
    diagnosis = explain(text, fast=True, lang="en")
    assert diagnosis.cause is cause
    assert said in _shown(text)


def test_a_cause_named_first_is_the_answer_even_if_it_is_open():
    diagnosis = explain("MPS backend out of memory\n\nNot sure what is causing this error", fast=True, lang="en")
    assert diagnosis.confidence is Confidence.OPEN
    assert diagnosis.cause is diagnosis.possible[0].cause


@pytest.mark.parametrize(
    ("text", "said", "not_said"),
    [
        pytest.param(
            "Running out of ram on large 4k images\n\nI run out of ram when using the large model on 4k images when running on"
            " 24GB gpu", "grows with the input", "Host memory", id="RAM of a GPU that is named",
        ),
        pytest.param("mmdet3d/ops/spconv/reordering_cuda.cu 57\ncuda execution failed with error 2", "found no free memory",
                     "no error message", id="error 2"),
        pytest.param(
            "I train with tensorflow. GPU resources not released when session is closed",
            "keeps this memory", "Another process", id="a session that is closed",
        ),
        pytest.param("The model runs out of memory at around 4 batchsize on a P100 16GB GPU", "Nothing recognized", "went well",
                     id="a size of the batch is no step"),
        pytest.param("It seems that when the computer's memory is completely used, Blender shuts down", "Host memory", "no error",
                     id="the computer's memory"),
        pytest.param("Even with batch size 1 training fails\n  File \"t.py\", line 5, in step\n    loss.backward()\nRuntimeError: CUDA out of"
                     " memory. Tried to allocate 5.60 GiB (GPU 0; 23.70 GiB total capacity; 16.99 GiB already allocated; 1.43 GiB"
                     " free; 17.00 GiB reserved in total by PyTorch)", "possibly", "(Confidence: likely", id="a batch of one still fails"),
    ],
)  # fmt: skip
def test_what_the_text_excludes_is_not_said(text, said, not_said):
    shown = _shown(text)
    assert said in shown
    assert not_said not in shown


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        pytest.param(
            "Upscaling a video in ComfyUI: normal RAM spikes an insane amount, then a lot higher, until it runs out of memory. I"
            " have 24GB VRAM which should be plenty", Cause.HOST_RAM, id="RAM that spikes",
        ),
        pytest.param(
            "[18/128] Building CUDA object sliding_window.cu.o\nKilled\nninja: build stopped: subcommand failed.", Cause.HOST_RAM,
            id="compilers",
        ),
        pytest.param(
            "Compiling with Cuda fails due to out of memory error\n[9/11] Building CUDA object builtin.cu.o\nFAILED: [code=9]",
            Cause.HOST_RAM, id="compilers that are not killed",
        ),
        pytest.param(
            "the GPU memory usage was getting higher and higher until it crashed with CUDA out of memory",
            Cause.LEAK_OR_RETAINED_REFERENCE, id="higher and higher",
        ),
        pytest.param(
            "I map my world with a laptop of 13.5 GB Ram with NVIDIA Graphics. Usually the laptop takes the entire memory and then"
            " crashes down", Cause.HOST_RAM, id="a laptop takes its memory",
        ),
        pytest.param("I interpolate 4000 frames and the process kills itself after some time", Cause.HOST_RAM, id="kills itself"),
        pytest.param(
            "When I change to DistMult, the memory increases every epoch and after some epochs I receive a OOM error in training",
            Cause.LEAK_OR_RETAINED_REFERENCE, id="growth by epochs is no comparison",
        ),
    ],
)  # fmt: skip
def test_what_authors_say_of_the_course_of_memory(text, cause):
    assert explain(text, fast=True, lang="en").cause is cause


def test_the_size_of_a_model_s_file_is_not_the_card_s():
    assert "the card has 16 GB" not in _shown("CUDA out of memory on 16GB models, wizardlm-13b, RX 7900 XTX 24GB")


def test_no_condition_is_said_twice():
    assert "If so: If " not in _shown(
        "PyKEEN on a large graph of 85m entities, OOM in training, I reduced the batch size"
    )


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error at /home/code/colmap/src/mvs/gpu_mat.h:167 - out of memory\n*** Error in `colmap': free(): corrupted unsorted"
        " chunks: 0x0000000002754bf0 ***",
        "MemoryBlock.h(257) : cudaSafeCall() Runtime API error : out of memory.",
        "Encountered a CUDA error: cudaDriver().CuDevicePrimaryCtxRetain( &context, dev.get() ) returned (2): Out of memory",
    ],
)  # fmt: skip
def test_a_device_that_is_full_is_found_in_what_programs_print_of_the_driver(message):
    diagnosis = explain(message, fast=True)
    assert diagnosis.is_oom
    assert diagnosis.main_failure.format == "cuda_error_oom"


def test_powers_of_two_are_bytes_and_no_picture():
    assert "1024*1024*1024" not in _shown(
        "a video is rendered, CUDA out of memory. padded_size = (size_t)1*1024*1024*1024;"
    )


def test_an_evaluation_that_fails_beside_its_training_is_compared_with_it_first():
    shown = _shown(
        "CUDA out of memory in validation. While I train one model the GPU takes 19 of 24 GB, in validation more"
    )
    assert "What to try: Compare the inputs of the evaluation" in shown
