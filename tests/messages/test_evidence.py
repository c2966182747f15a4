"""What is read from the text around a message: pasted code, programs, an author's words, sizes that are named."""

from __future__ import annotations

import pytest

from oom_magic.explain.evidence.causes import Cause
from oom_magic.explain.evidence.checks import device_tool
from oom_magic.explain.evidence.clues.author_words import said_in
from oom_magic.explain.evidence.clues.magnitudes import array_bytes, card_bytes, large_inputs, weights_in
from oom_magic.explain.evidence.clues.pasted_code import faults_in
from oom_magic.explain.evidence.clues.programs import find_program
from oom_magic.explain.evidence.clues.traceback import find_clues
from oom_magic.explain.evidence.judging import judge
from oom_magic.explain.evidence.measured.precedents import features_of, precedents
from oom_magic.explain.explainer import explain
from oom_magic.explain.messages.reading import read
from oom_magic.units import GIB

LOOP = "for batch in loader:\n    loss = criterion(model(batch))\n    loss.backward()\n"


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        (LOOP, []),
        (LOOP + "    losses.append(loss)\n", ["appends_tensors"]),
        (LOOP + "    losses.append(loss.item())\n", []),
        (LOOP + "    running_loss += loss\n", ["sums_tensors"]),
        (LOOP + "    running_loss = running_loss + loss\n", ["sums_tensors"]),
        (LOOP + "    running_loss += loss.detach()\n", []),
        (LOOP + "    meter.update(loss, batch.size(0))\n", ["averages_tensors"]),
        (LOOP + "    loss.backward(retain_graph=True)\n", ["retains_graph"]),
        ("for x in data:\n    out, hidden = net(x, hidden)\n", ["carries_state"]),
        ("for x in data:\n    hidden = hidden.detach()\n    out, hidden = net(x, hidden)\n", []),
        ("model.eval()\nfor x in data:\n    out = model(x)\n", ["infers_with_gradients"]),
        ("model.eval()\nwith torch.no_grad():\n    for x in data:\n        out = model(x)\n", []),
        ("with torch.no_grad():\n    for x in data:\n        preds.append(model(x))\n", ["collects_tensors"]),
        ("with torch.no_grad():\n    for x in data:\n        preds.append(model(x).cpu())\n", []),
        ("X = torch.zeros(9, 3).cuda()\nfor i in range(9):\n    X[i] = net(i)\n", ["stores_tensors"]),
        ("X = torch.zeros(9, 3)\nfor i in range(9):\n    X[i] = net(i)\n", []),
        (
            "class M(LightningModule):\n    def training_step(self, b, i):\n        return {\n"
            '            "loss": b,\n        }\n    def training_epoch_end(self, outputs):\n        ...\n',
            ["collects_outputs"],
        ),
        (f"I wrote\n{LOOP}    losses.append(loss)\nand it fails", ["appends_tensors"]),
        ("for x in\n  ][ nothing of this parses", []),
    ],
)
def test_faults_of_pasted_code(code, kinds):
    assert [fault.kind for fault in faults_in(code)] == kinds


@pytest.mark.parametrize(
    ("text", "program", "stage"),
    [
        ('File "vllm/v1/worker/gpu_model_runner.py", line 9, in capture_model', "vllm", "graphs"),
        ("vllm serve MODEL --gpu-memory-utilization 0.95", "vllm", None),
        (
            "vllm worker.py, line 1, in profile_run\nrunner.py, line 2, in execute_model\nsampler.py",
            "vllm",
            "profiling",
        ),
        ("vllm runner.py, line 1, in capture_model\nrunner.py, line 2, in _dummy_run", "vllm", "graphs"),
        ("vllm failed in profile_run\nException in worker while processing method load_model.", "vllm", "loading"),
        ("caffe::ConvolutionLayer<>::Backward_gpu()\nan error in the training step", "caffe", None),
        ("python -m sglang.launch_server --mem-fraction-static 0.85", "sglang", None),
        ('File "comfy/sd.py", line 3, in decode\n    VAEDecode', "comfyui", "vae"),
        ("pipe = StableDiffusionPipeline.from_pretrained(name)", "diffusers", None),
        ("llama_kv_cache_init: failed to allocate buffer for kv cache", "llama_cpp", "kv_cache"),
        ("ollama run llama3:70b", "ollama", None),
        ("trainer.train()\nvllm is installed too", None, None),
        ("a text about nothing", None, None),
    ],
)
def test_programs_and_their_stages(text, program, stage):
    use = find_program(text, text)
    assert (None if use is None else use.program.key) == program
    assert (None if use is None or use.stage is None else use.stage.key) == stage


def test_a_programs_own_share_is_read():
    use = find_program("vllm serve MODEL --gpu-memory-utilization 0.95", "")
    assert use is not None and use.budget == 0.95
    default = find_program("vllm serve MODEL", "")
    assert default is not None and default.budget == 0.9


@pytest.mark.parametrize(
    ("text", "key", "is_said"),
    [
        ("the GPU memory keeps growing during training", "grows", True),
        ("the memory does not grow", "grows", False),
        ("显存一直增加", "grows", True),
        ("my RAM fills up after an hour", "host_fills", True),
        ("a card with 24 GB of RAM", "host_fills", False),
        ("check whether another process is using the GPU", "shares_device", False),
        ("another process is using the GPU", "shares_device", True),
        ("it crashes when saving the checkpoint", "saves", True),
        ("the process got killed", "killed", True),
        ("even with a batch size of 1 it fails", "batch_of_one", True),
        ("set the batch size to 1 to save memory", "batch_of_one", False),
        ("to avoid fragmentation try setting max_split_size_mb", "fragments", False),
    ],
)
def test_what_authors_say(text, key, is_said):
    assert (key in said_in(text)) is is_said


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("an image of 8256x5503", ["picture"]),
        ("images of 224x224", []),
        ("a weight of shape (4096, 11008)", []),
        ("cutoff_len: 32768", ["sequence"]),
        ("max_length 512", []),
        ("a graph with 276,984 nodes and 2,703,203 edges", ["nodes", "edges"]),
        ("a 4k video", ["picture"]),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", []),
    ],
)
def test_large_inputs(text, kinds):
    assert [one.kind for one in large_inputs(text)] == kinds


def test_a_table_of_nvidia_smi_tells_of_ranks_on_the_first_device():
    table = "\n".join(
        f"|    {device}   N/A  N/A     {pid}      C   python      1387MiB |"
        for device, pid in ((0, 26598), (0, 26599), (1, 26599))
    )
    text = f"{table}\nWith DistributedDataParallel the first card uses more GPU memory. Why?"
    assert judge(read(text), text).cause is Cause.WEIGHTS_TOO_BIG
    alone = text.replace("    1   N/A  N/A     26599", "    1   N/A  N/A     26600")
    assert "crowds_one_device" not in said_in(alone.partition("With")[0])


def test_models_and_cards_by_their_names():
    assert weights_in("llama-13b in 4bit").num_bytes == round(13e9 * 4.5 / 8)
    assert weights_in("Mistral-7B-Instruct").num_bytes == round(7e9 * 2)
    assert weights_in("512 bytes, 3 epochs") is None
    assert card_bytes("my RTX 3060 12GB") == 12 * GIB and card_bytes("a single RTX 4090") == 24 * GIB
    assert card_bytes("a laptop with 16 GB of RAM") is None


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("CUDA out of memory when I load llama-65b on my RTX 4090", Cause.WEIGHTS_TOO_BIG),
        ("Training a U-Net fails with CUDA out of memory", Cause.ACTIVATIONS),
        ("训练时显存不足", Cause.ACTIVATIONS),
        ("The process was killed: the system memory was full", Cause.HOST_RAM),
        ("the kernel tries to allocate 87000GB", Cause.REQUEST_ALONE_TOO_BIG),
        ("GPU memory keeps increasing every iteration until it is out of memory", Cause.LEAK_OR_RETAINED_REFERENCE),
        ("OOM when using Adam: SGD works with the same batch size.", Cause.OPTIMIZER_STATE),
        ("The chat runs out of CUDA memory after several rounds of the conversation.", Cause.ACTIVATIONS),
        ("Memory error: the notebook crashes when too many images are loaded at the same time.", Cause.HOST_RAM),
        ("70B LoRA fine-tuning on 2 GPUs of 24 GB: CUDA out of memory", Cause.WEIGHTS_TOO_BIG),
        ("训练时显存还是够用的，但是一到eval阶段就爆OOM了", Cause.ACTIVATIONS),
        ("推理时显存会慢慢泄露，最后显存不够。", Cause.LEAK_OR_RETAINED_REFERENCE),
        ("vLLM: KV cache usage keeps increasing to 100% and then nothing is generated.", Cause.MEMORY_FRACTION_LIMIT),
        ("CUDA out of memory: allocations fail due to memory fragmentation.", Cause.FRAGMENTATION),
        (
            "During inference detectron2's GPU memory grows with every frame until OOM.",
            Cause.LEAK_OR_RETAINED_REFERENCE,
        ),
        ("DataLoader: insufficient shared memory (shm)", Cause.SHARED_MEMORY),
        ("My mmdet training keeps increasing its GPU memory, then CUDA out of memory", Cause.ACTIVATIONS),
    ],
)
def test_prose_alone_is_judged(text, cause):
    diagnosis = explain(text, fast=True, lang="en")
    assert diagnosis.cause is cause and diagnosis.possible


def test_a_text_without_a_failure_is_none():
    for text in ("How do I install PyTorch?", "def f(x):\n    return x\n", "memory is a topic of this book"):
        assert not explain(text, fast=True, lang="en").failures


def test_a_pasted_line_that_keeps_a_graph_is_mended_as_it_stands():
    text = "for x in loader:\n    loss = criterion(model(x), y)\n    loss.backward()\n    {line}\nRuntimeError: CUDA error: out of memory"
    for line, fixed in (
        ("loss_hist.append(loss)", "loss_hist.append(loss.item())"),
        ("running_loss += loss", "running_loss += loss.item()"),
        ("buf.append(model(x))", "buf.append(model(x).detach().cpu())"),
    ):
        assert fixed in str(explain(text.format(line=line), lang="en", fast=True))


@pytest.mark.parametrize(
    ("code", "num_bytes"),
    [
        ("arr = cuda.pinned_array((50000, 50000), dtype='float64')", 20_000_000_000),
        ("x = torch.zeros(1024, 1024, device='cuda')", 4 * 2**20),
        ("x = np.empty((1024, 1024), np.uint8)", 2**20),
        ("x = torch.zeros(n, n)", None),
    ],
)
def test_arrays_of_pasted_code(code, num_bytes):
    assert array_bytes(code) == num_bytes


def test_a_pasted_array_above_the_card_is_the_cause():
    diagnosis = explain(
        "GPU: Tesla T4 16GB\narr = cuda.pinned_array((50000, 50000), dtype='float64')\nthe call throws\n"
        "numba.cuda.cudadrv.driver.CudaAPIError: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
        lang="en",
    )
    assert diagnosis.cause is Cause.REQUEST_ALONE_TOO_BIG
    assert "18.63 GiB" in str(diagnosis)


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("DirectML: Resource exhausted: OOM when allocating tensor with shape[8,8]", "Task Manager"),
        ("Our Gaudi2 goes out of memory while another process runs on it", "hl-smi"),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm on my TPU", "tpu-info"),
        ("ValueError: Free memory on device (8.0/64.0 GiB) on startup is less than desired GPU memory utilization on"
         " our Ascend NPU", "npu-smi info"),
    ],
)  # fmt: skip
def test_other_accelerators_have_their_own_tools(text, tool):
    said = str(explain(text, lang="en"))
    assert "nvidia-smi" not in said
    diagnosis = explain(text, lang="en")
    assert device_tool(diagnosis.backend, diagnosis.accelerator) == tool


def test_words_of_similar_reports_tell_whose_memory_is_likely():
    def share(text, cause):
        return precedents().shares(features_of(text, None, find_clues(text)))[cause]

    files, pictures = "the corpus is read from csv files into a list", "larger images and a larger batch on this card"
    assert share(files, Cause.HOST_RAM) > 2 * share(pictures, Cause.HOST_RAM)
    assert share(pictures, Cause.ACTIVATIONS) > 2 * share(files, Cause.ACTIVATIONS)
    assert sum(precedents().shares(()).values()) == pytest.approx(1)


def test_reading_csv_files_fills_the_computers_memory():
    text = "Memory error while reading the csv files of the corpus into a list before training."
    assert explain(text, lang="en").cause is Cause.HOST_RAM


def test_the_macs_mark_is_explained_and_its_code_names_no_other_device():
    diagnosis = explain(
        "diffusers SDXL: MPS backend out of memory (MPS allocated: 15.20 GB, other allocations: 2.30 GB, max allowed:"
        " 18.13 GB). Tried to allocate 1.00 GB on private pool.",
        lang="en",
    )
    said = str(diagnosis)
    assert "PyTorch's own limit for MPS" in said
    assert "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0" in said
    assert "cuda" not in said.casefold()
    assert "PyTorch held 15.20 GiB of the 18.13 GiB it may use" in " ".join(said.split())
    assert "the cache then holds" not in said
    assert "check_memory_fraction_limit_mps" in {one.check.key for one in diagnosis.possible}


def test_a_small_request_is_never_said_to_be_too_big_by_itself():
    text = (
        'File "a.py", line 3, in validate\n    out = model(x)\nCUDA out of memory. Tried to allocate 500.00 MiB. GPU 1'
        " has a total capacity of 16.00 GiB of which 100.00 MiB is free. Including non-PyTorch memory, this process has"
        " 15.59 GiB memory in use. Of the allocated memory 15.00 GiB is allocated by PyTorch, and 90.00 MiB is reserved"
        " by PyTorch but unallocated."
    )
    named = {one.cause for one in judge(read(text), text).possible}
    assert not named & {Cause.REQUEST_ALONE_TOO_BIG, Cause.FRAGMENTATION}


def test_rounds_of_validation_are_no_conversation():
    text = (
        "验证几轮以后显存就满了：\n```python\nfor batch in val_loader:\n    pred = model(batch.to(device))\n"
        "    all_preds.append(pred)\n```\nRuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB\n"
    )
    assert explain(text).cause is Cause.LEAK_OR_RETAINED_REFERENCE


def test_a_servers_own_process_under_its_host_pid_fills_its_share():
    diagnosis = explain(
        "engine.py :190 Error initializing vLLM engine: CUDA out of memory. Tried to allocate 112.00 MiB. GPU 0 has a total"
        " capacty of 44.35 GiB of which 53.38 MiB is free. Process 3663367 has 44.28 GiB memory in use. Of the allocated"
        " memory 37.38 GiB is allocated by PyTorch, and 275.68 MiB is reserved by PyTorch but unallocated.\n"
        "INFO 02-03 03:43:49 model_runner.py:625] Capturing the model for CUDA graphs.",
        lang="en",
    )
    assert diagnosis.budget is not None and all(row.num_bytes >= 0 for row in diagnosis.budget.rows)
    assert not any(row.key == "budget_other_processes" for row in diagnosis.budget.rows)
    said = " ".join(str(diagnosis).split())
    assert "The server's memory budget is full" in said and "not the capacity of the device" not in said


def test_a_checkpoint_loaded_beside_its_model_goes_to_the_cpu():
    diagnosis = explain(
        'File "utils.py", line 596, in load_opt_state\n    checkpoint = th.load(os.path.join(path, "optimizers.bin"))\n'
        'File "/site-packages/torch/serialization.py", line 1101, in persistent_load\n    load_tensor(dtype, nbytes, key)\n'
        "RuntimeError: CUDA out of memory. Tried to allocate 3.73 GiB (GPU 0; 14.76 GiB total capacity; 11.21 GiB already"
        " allocated; 2.49 GiB free; 11.40 GiB reserved in total by PyTorch)",
        lang="en",
    )
    said = " ".join(str(diagnosis).split())
    assert "load it to the CPU" in said.split("What to change: ")[1][:80].replace("\n", " ")
    assert "A checkpoint is loaded onto the GPU" in said


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "training_args = TrainingArguments(prediction_loss_only=False, evaluation_strategy='steps', eval_steps=25)\n"
            "Training works, but when it evaluates: RuntimeError: CUDA out of memory. Tried to allocate 1.88 GiB (GPU 0;"
            " 15.90 GiB total capacity; 12.29 GiB already allocated; 1.60 GiB free; 13.54 GiB reserved in total by PyTorch)",
            Cause.LEAK_OR_RETAINED_REFERENCE,
        ),
        (
            "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Failed to allocate request for 2.99GiB (3206250496B)\n"
            "I've already tried: XLA_PYTHON_CLIENT_PREALLOCATE=false, and setting XLA_PYTHON_CLIENT_MEM_FRACTION to .50",
            Cause.ACTIVATIONS,
        ),
    ],
)
def test_what_settings_already_rule_out_is_not_the_cause(text, cause):
    assert explain(text).cause is cause


@pytest.mark.parametrize(
    ("text", "unsaid"),
    [
        # What its settings have already.
        (
            "finetuning_type: lora\nper_device_train_batch_size: 1\nbf16: true\nOOM while training my LLM",
            "smaller_batch_any",
        ),
        ("finetuning_type: lora\nper_device_train_batch_size: 1\nbf16: true\nOOM while training my LLM", "lora"),
        ("CUDA out of memory when I sample with the Q4 GGUF in ComfyUI", "comfy_fp8"),
        # Other programs' changes.
        ("A sort with cudf: RuntimeError: parallel_for failed: out of memory", "quantized_model"),
        ("Running a wan 2.2 workflow in comfyui, my RAM is full and it goes into swap", "fewer_workers"),
        ("Training my gaussian model: CUDA out of memory at epoch 3 of the point clouds", "lora"),
    ],
)
def test_a_change_that_cannot_be_made_is_not_proposed(text, unsaid):
    assert unsaid not in [one.key for one in explain(text, fast=True).remedies]


def test_no_cause_is_named_of_whose_subject_a_text_shows_nothing():
    """However often reports of like words came to it: no limit without a share, no weights without a model."""
    possible = {one.cause for one in explain("After an hour the GPU memory was full, help please", fast=True).possible}
    assert not {Cause.MEMORY_FRACTION_LIMIT, Cause.WEIGHTS_TOO_BIG, Cause.REQUEST_ALONE_TOO_BIG} & possible


def test_memory_that_comes_back_with_a_restart_was_held():
    text = "My notebook fills the GPU memory. Restarting the kernel clears it, though my dataset is very small."
    assert explain(text, fast=True).cause is Cause.LEAK_OR_RETAINED_REFERENCE


def test_a_memory_error_of_the_gpu_is_not_the_computers():
    text = "kmcuda.cc:152 -> out of memory\nMemoryError: Failed to allocate memory on GPU"
    assert explain(text, fast=True).cause is not Cause.HOST_RAM


def test_this_very_process_is_known_where_the_message_is_cut():
    text = (
        "CUDA out of memory. Tried to allocate 42.00 MiB. GPU 0 has a total capacty of 39.39 GiB of which 31.94 MiB is"
        " free. Process 7529 has 39.23 GiB memory in use. Of the allocated memory 37.21 GiB is allo"
    )
    diagnosis = explain(text, fast=True)
    assert diagnosis.main_failure.self_listed_as_pid == 7529
    assert diagnosis.cause is not Cause.OTHER_PROCESS


def test_a_kind_of_program_is_said_in_the_language_of_the_page():
    text = "python -m fastchat.serve.model_worker\nFile load_model\nCUDA out of memory. Tried to allocate 100.00 MiB"
    assert "An inference server failed while it loaded" in str(explain(text, fast=True, lang="en"))
    assert "an inference server" not in str(explain(text, fast=True, lang="zh")).casefold()
    assert "推理服务" in str(explain(text, fast=True, lang="zh"))


@pytest.mark.parametrize(
    ("text", "said", "not_said"),
    [
        ("CUDA out of memory. It fails at:\n    optimizer.update(loss_func, *in_arrays)", "", "A meter receives"),
        (
            "Multiple instances of the same model load their own copies: CUDA out of memory with instance count 2.",
            "Start fewer instances",
            "Another process holds",
        ),
        (
            "I doubled the batchsize from batchsize=1 on: the test is OK when batchsize = 8 and failed when"
            " batchsize = 16 due to CUDA out of memory.",
            "fewer, shorter or smaller",
            "rather than their number",
        ),
        ("image = load_image(path).resize((1024,1024))\nout = vae(image)\nCUDA out of memory", "", "dense matrix"),
        ("I train on an Intel ARC GPU: out of device memory. CUDA     None", "xpu-smi", "nvidia-smi"),
        (
            "ggml_vulkan: Device memory allocation of size 4757131264 failed.\nggml_vulkan: Requested buffer size exceeds"
            " device memory allocation limit: ErrorOutOfDeviceMemory",
            "in one buffer",
            "-ngl",
        ),
        (
            "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate"
            " 3743729664 bytes.",
            "peak_bytes_in_use",
            "far less memory is then used",
        ),
        (
            "I keep running into a CUDA out of memory issue/ illegal memory access issue when I train it for long.",
            "The text says: “I keep running into",
            "Not a lack of memory",
        ),
        ("openvino/src/core.cpp:117: Failed to allocate 74784858112 bytes of memory", "RAM", "nvidia-smi"),
        ("res.setPinnedMemory(1024*1024)\nCUDA out of memory", "", "1024*1024"),
        ("The data set was 10000*512. CUDA out of memory", "", "10000*512"),
        (
            "CUDA out of memory. Is there any way we can cut it into shorter samples and run it on those",
            "",
            "cut it into",
        ),
        ("can not allocate 200 G memory for the array (28800, 3) of float64; my GPU has 5 G", "RAM", "nvidia-smi"),
    ],
)
def test_what_a_text_names_is_not_taken_for_something_else(text, said, not_said):
    answer = " ".join(str(explain(text, fast=True, lang="en")).split())
    assert said in answer
    assert not_said not in answer


def test_bits_in_the_name_of_a_quantized_model_count():
    assert weights_in("Llama-3.1-Nemotron-70B-Instruct-HF-exl2-3.0").num_bytes == 70e9 * 3 / 8
