"""What a change needs to be told plainly: a condition of its own, a good record, or that the text shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oom_magic.explain.evidence.causes import Cause, Confidence, Evidence
from oom_magic.explain.evidence.measured import precedents
from oom_magic.explain.evidence.measured.contradicted import is_proven, is_sure_of
from oom_magic.explain.explainer import explain
from oom_magic.explain.remedies.from_text.telling import has_condition
from oom_magic.explain.sentences.catalogue import SENTENCES
from oom_magic.predict.setups.setup import TrainingSetup
from tests.support.told import as_shown


def test_every_cause_that_like_reports_suggest_can_be_told():
    order = json.loads(Path(precedents.__file__).with_suffix(".json").read_text(encoding="utf-8"))["causes"]
    assert all(f"brief_{cause}" in SENTENCES for cause in order)


def test_a_record_needs_more_than_two_answers():
    assert is_proven("smaller_array")  # 9 answers, none contradicted
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
    shown = as_shown("The Inferer does not properly use torch.no_grad(), so that inference takes much more GPU memory")
    assert "Evaluate under torch.no_grad()" in shown
    assert "First find out" not in shown


def test_a_kernel_without_scores_is_told_plainly_where_scores_were_requested():
    """The run was described and the request is its scores to the byte; the first thing to do was to watch nvidia-smi."""
    message = (
        "RuntimeError: CUDA out of memory. Tried to allocate 192.00 MiB (GPU 0; 9.77 GiB total capacity; 8.10 GiB already"
        " allocated; 53.81 MiB free; 8.28 GiB reserved in total by PyTorch)"
    )
    run = {"model": "bert-base", "microbatch_size": 16, "seq_len": 512, "attention": "eager", "precision": "fp32"}
    diagnosis = explain(message, setup=TrainingSetup(**run), fast=True, lang="en")
    assert diagnosis.cause is Cause.ATTENTION_SCORES and diagnosis.remedies[0].key == "sdpa"
    assert "What to change: Use PyTorch's fused attention (sdpa)" in str(diagnosis)


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
    assert not_said not in as_shown(text)


def test_a_limitation_of_cuda_memory_is_a_device_that_is_full():
    assert explain("a large protein: I am encountering a CUDA memory limitation error", fast=True).is_oom


def test_behind_a_check_no_further_changes_are_told_that_nothing_supports():
    shown = as_shown("running into oom finetuning using lora on llama 2 70b on 8*a-100 (80gb)")
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
    assert "What to change:" not in as_shown(text).split("Evidence")[0]


def test_what_the_author_has_seen_help_is_told_plainly():
    shown = as_shown("CUDA out of memory in training with batch_size=13. It works if I reduce batch_size")
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
    assert said in as_shown(text)


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
    shown = as_shown(text)
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
    assert "the card has 16 GB" not in as_shown("CUDA out of memory on 16GB models, wizardlm-13b, RX 7900 XTX 24GB")


def test_no_condition_is_said_twice():
    assert "If so: If " not in as_shown(
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
    assert "1024*1024*1024" not in as_shown(
        "a video is rendered, CUDA out of memory. padded_size = (size_t)1*1024*1024*1024;"
    )


def test_an_evaluation_that_fails_beside_its_training_is_compared_with_it_first():
    shown = as_shown(
        "CUDA out of memory in validation. While I train one model the GPU takes 19 of 24 GB, in validation more"
    )
    assert "What to try: Compare the inputs of the evaluation" in shown


@pytest.mark.parametrize(
    ("message", "kind", "backend"),
    [
        ("ERROR: out of memory in /src/acc/acc_backprojector_impl.h at line 38 (error-code 2)", "cuda_error_oom", "cuda"),
        ("cudaCustomAllocator out of memory\n [requestedSpace:   44135424 B]", "cuda_error_oom", "cuda"),
        ("MemoryError: cuMemAlloc failed: out of memory", "cuda_driver_call", "cuda"),
        ("I was facing this, am new: (os error 1455)", "windows_paging_file", "cpu"),
        ("RayOutOfMemoryError: More than 95% of the memory on node worker-1 is used (1.92 / 2.0 GB).", "ray_oom_kill", "cpu"),
        ("Aborting compilation early because it's unlikely to have enough memory. Requires 1.31T, has 14.71G available",
         "jax", "jax"),
        ("bfc_arena.cc:376 void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool) Failed to alloc", "onnxruntime",
         "cuda"),
    ],
)  # fmt: skip
def test_memory_that_ran_out_is_found_in_the_words_of_more_programs(message, kind, backend):
    failure = explain(message, fast=True).main_failure
    assert (failure.format, failure.backend, failure.is_oom) == (kind, backend, True)


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: cuda runtime error (3) : initialization error at /pytorch/aten/src/THC/generic/THCStorage.c:60",
        "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment",
    ],
)
def test_a_driver_that_does_not_start_is_no_lack_of_memory(message):
    assert explain(message, fast=True).cause is Cause.NOT_OOM


def test_what_grows_with_a_picture_s_points_may_be_of_any_size():
    message = "HIP out of memory. Tried to allocate 333.38 GiB. GPU 0 has a total capacity of 15.92 GiB of which 7.28 GiB is free."
    assert "one of them is wrong" in as_shown(message)
    assert "one of them is wrong" not in as_shown(f"ComfyUI\\main.py --windows-standalone-build\n{message}")


def test_what_is_loaded_goes_through_the_computer_s_memory_where_little_of_it_is_there():
    text = """It is impossible to load a large model with little system memory.
  File "server.py", line 159, in load_model
    model = load_quantized(model_name)"""
    assert explain(text, fast=True).cause is Cause.HOST_RAM


def test_further_processes_on_the_first_gpu_are_the_job_s_ranks():
    shown = as_shown(
        "CUDA out of memory. There are 7 additional processes on GPU 0, batch size 2. What are these used for?"
    )
    assert "What every process of a job starts or loads on the first GPU adds up there" in shown
    assert "Close the other programs" not in shown


def test_a_program_that_can_train_does_not_while_it_quantizes():
    text = """OOM at 46 %: export_model.py --export_quantization_bit 4 --template qwen
Quantizing model.layers blocks :  46%|   | 37/80 [38:12<44:24, 61.96s/it]
  File "src/llmtuner/train/tuner.py", line 57, in export_model
    model = load_model(tokenizer, model_args)"""
    diagnosis = explain(text, fast=True, lang="en")
    assert diagnosis.program == "quantizing"
    assert "backward pass" not in str(diagnosis)


def test_sizes_without_a_model_suggest_no_tensor_beside_a_chinese_sentence():
    message = (
        "RuntimeError: CUDA out of memory. Tried to allocate 48.00 MiB (GPU 0; 6.00 GiB total capacity; 4.58 GiB already"
        " allocated; 37.63 MiB free; 51.94 MiB cached)\n\n\u8bf7\u95ee\u51fa\u73b0\u8fd9\u4e2a\u600e\u4e48\u89e3\u51b3\u5462"
    )
    assert "vocab" not in as_shown(message)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("Error 1455", Cause.HOST_RAM),
        ("numpy array memory error: a raster of 50,000 by 50,000 that np.where() works on", Cause.HOST_RAM),
        ("[E:onnxruntime] Non-zero status code returned while running Conv node. Name:'347_nchwc' Status Message: bfc_arena.cc:330"
         " onnxruntime::BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 285081600",
         Cause.HOST_RAM),
        ("单个GPU加载模型out of memory,如何用另一块一起加载？", Cause.WEIGHTS_TOO_BIG),
        ("I want to use memory pooling to load larger models. I have 2 RTX 2070 super but keep running out of memory", Cause.WEIGHTS_TOO_BIG),
        ("out of memory: with the steps of a fine-tuning, each takes longer and longer, until it is out of memory",
         Cause.LEAK_OR_RETAINED_REFERENCE),
    ],
)  # fmt: skip
def test_whose_memory_it_was_by_a_word_or_two(text, cause):
    assert explain(text, fast=True, lang="en").cause is cause


def test_more_memory_for_a_job_is_no_growth_and_a_size_in_bytes_no_input():
    assert "memory_grows" not in {one.key for one in explain(
        "Resource exhausted: Failed to allocate request for 321.75MiB. Only increasing the amount of memory available to my job helps",
        fast=True,
    ).evidence}  # fmt: skip
    message = "XPU out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 16.50 GiB."
    assert "128*1024*1024" not in as_shown(f"x = torch.ones(128*1024*1024, device='xpu')\n{message}")


def test_a_mac_s_memory_is_its_gpu_s_and_no_layers_are_moved_in_it():
    failed = (
        "[METAL] Command buffer execution failed: Insufficient Memory (kIOGPUCommandBufferCallbackErrorOutOfMemory)"
    )
    text = f"Running Qwen-27B-8bit-MLX on my mac studio with 256GB ram. {failed}"
    assert explain(text, fast=True).cause is not Cause.WEIGHTS_TOO_BIG
    assert "fewer layers on the GPU" not in as_shown(
        f"mlx-omni-server, three models at once; it works in LMStudio. {failed}"
    )


def test_a_build_of_a_container_that_is_killed_needs_a_higher_limit():
    text = "#11 212.9 Solving environment: ...working... Killed\n executor failed running [/bin/sh -c conda install]: exit code: 137"
    assert "Raise the memory limit of the container" in as_shown(text)


def test_an_author_who_says_that_memory_ran_out_is_believed_where_a_kernel_died():
    text = "Kernel dies on import from out-of-memory condition. A dataset of 2.2GB on a system with 4GB ram."
    assert explain(text, fast=True).is_oom
