"""What is said of a text carries the words it rests on; what the author has seen is not asked again."""

from __future__ import annotations

import re

import pytest

from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.evidence.clues.author_setting import in_small_letters, said_as
from oom_magic.explain.evidence.clues.author_words import TOLD, said_in
from oom_magic.explain.evidence.clues.differences import contrast_in
from oom_magic.explain.evidence.clues.magnitudes import weights_in
from oom_magic.explain.evidence.clues.tried import tried_in
from oom_magic.explain.evidence.grounds import RESTS_ON, grounded
from oom_magic.explain.explainer import explain
from oom_magic.explain.messages.normalization import without_repeats
from oom_magic.explain.sentences.evidence import EVIDENCE

_BY_VALUES = {"quoted_tensor"}  # what it says of the text follows from frames
_OF_THE_TEXT = re.compile(r"\b(?:The text (?!: )\w+|The model in the text)")


def test_no_sentence_tells_the_authors_words_in_others():
    said = {key for key, sentence in EVIDENCE.items() if _OF_THE_TEXT.search(str(sentence))}
    assert said == _BY_VALUES
    keys = {key for key in EVIDENCE if key.startswith("told_")}
    assert keys <= RESTS_ON.keys()
    known = {*TOLD, *tried_in("I reduced the image resolution and it does not help"), "sizes_contrast"}
    assert {one for keys in RESTS_ON.values() for one in keys} <= known


def test_without_its_words_it_is_not_said():
    told, number = Evidence("told_shared"), Evidence("mps_own_fill", {"held_bytes": 1, "limit_bytes": 2})
    assert [*grounded([told, number], {})] == [number]
    (quoted,) = grounded([told], {"shares_device": "my colleague runs another job"})
    assert quoted.values["quote"] == "my colleague runs another job"


def test_the_words_are_those_of_one_sentence():
    text = "It is a U-Net.\nOn two cards another user's process uses the GPU, too. Batch size 4."
    assert said_in(text)["shares_device"] == "On two cards another user's process uses the GPU, too"


def test_wordings_are_found_in_small_letters():
    text = in_small_letters("İ use SFTTrainer, QQ \u4e00")
    assert text.startswith("İ use sfttrainer")
    assert said_as(r"\bSFT\S+, (?P<twice>Q)(?P=twice)\W").search(text) is not None


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("with batch size 64 it is OOM, with 32 it works", True),
        ("batch size를 256으로 하니 에러가 발생하며, 128로 줄이니 오류가 발생되지 않습니다", True),
        ("everything is fine at a depth of 14 - but at a depth of 16 it runs out of memory", True),
        ("max_len=2048 is OOM, 1024 won't, others can run it successfully in 2048", True),
        ("batch size 64 and 32 are both OOM", False),
        ("with batch size 64 it works on 8 GPUs", False),
        ("I have 2 cards of 24 GB; it runs out of memory", False),
    ],
)
def test_two_sizes_of_one_setting(line, is_one):
    assert bool(contrast_in(line)) is is_one


def test_a_log_is_read_without_its_repeats():
    steps = "".join(f"2024-05-01 12:00:{at % 60:02} INFO trainer.py: step {at} loss={at / 7}\n" for at in range(1000))
    read = without_repeats(f"I train a net.\n{steps}It fails.")
    assert read.startswith("I train a net.")
    assert read.endswith("It fails.")
    assert len(read) < 0.1 * len(steps)
    assert "step 0 " in read
    assert "step 999 " in read


@pytest.mark.parametrize(
    ("text", "said", "not_said"),
    [
        pytest.param(
            "Fine-tuning a 7B with LoRA on a V100: with model_max_length=2048 it is OOM, with 1024 it won't. Why?",
            ["model_max_length=2048"], ["Try it"], id="a check that was made",
        ),
        pytest.param(
            "With cache=True the RAM goes from 3 to 50 GB until my training is killed, but if I don't add it, it works fine",
            ["cache=True"], ["Watch the"], id="what it runs without",
        ),
        pytest.param(
            "FSDP, CUDA OOM after the first epoch. I disabled model checkpointing and the memory error went away.",
            ["extra copy of the weights", "cpu_offload"], ["Shorter", "Halve", "QLoRA"], id="without saving it runs",
        ),
        pytest.param(
            "import pandas as pd\nGPU: 3 x RTX 2070 8 GB. CatBoostClassifier(task_type='GPU'): depth 14 works"
            " fine, depth 16 runs out of memory",
            ["border_count"], ["no GPU", "RAM", "microbatch", "checkpointing"], id="trees on a GPU",
        ),
        pytest.param(
            "what() -> \"catboost/cuda/memory_pool.h:305: Error: Out of memory. Requested 17476.96; Free 2255.54\"",
            ["CatBoost could not"], ["microbatch", "no known"], id="CatBoost's message",
        ),
        pytest.param(
            "CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; 39.59 GiB total capacity; 98.78 MiB already allocated; 3.19"
            " MiB free; 116.00 MiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting"
            " max_split_size_mb to avoid fragmentation.", ["only have delayed"], ["tip applies"], id="the tip beside others",
        ),
        pytest.param(
            "RuntimeError: CUDA out of memory. Tried to allocate 686.00 MiB (GPU 0; 8.00 GiB total capacity; 436.97 MiB already"
            " allocated; 5.60 GiB free; 17.03 MiB cached)", ["what is free is in pieces"], ["cache has enough"],
            id="pieces that are not the cache's",
        ),
        pytest.param(
            "During training the number of points increased from 30,000 to 239,453, and then I got a CUDA out of memory error.",
            ["once the model is loaded"], ["microbatch", "gradient accumulation", "checkpointing"], id="no batch is named",
        ),
        pytest.param(
            "terminate called after throwing an instance of 'std::bad_alloc'\nRuntimeError: CUDA error: out of memory",
            ["Out of device memory"], ["on the host", "RAM"], id="what C++ raises beside a GPU's failure",
        ),
        pytest.param(
            "OOM while quantizing Qwen2-72B\nI use 4 x 24 GB and get torch.cuda.OutOfMemoryError: CUDA out of memory",
            ["once the model is loaded"], ["microbatch"], id="quantizing in the title",
        ),
        pytest.param(
            "I want to quantize my llama 70b with awq on 8xA100 40GB\nmodel.quantize(tokenizer, quant_config=quant_config)\ntokenizer."
            "save_pretrained(path)\nIt only uses gpu:0 and goes OOM:\nTraceback (most recent call last):\n"
            '  File "/x/q.py", line 13, in <module>\n    model.quantize(tokenizer, quant_config=quant_config)',
            ["fewer or shorter samples"], ["saving", "for its weights", "layer by layer"], id="code before a story is no traceback",
        ),
        pytest.param(
            "PPO of brax: RuntimeError: INTERNAL: Failed to launch CUDA kernel: fusion_29 with block dimensions: 128x1x1 and grid"
            " dimensions: 1x1x1: CUDA_ERROR_OUT_OF_MEMORY: out of memory, even with one environment",
            ["reserves", "PREALLOCATE=false"], ["half as much", "not through PyTorch"], id="what JAX leaves the driver",
        ),
        pytest.param(
            "SAC with MJX fails with a batch of 32, too: xla/service/hlo_rematerialization.cc:2941] Can't reduce memory use below"
            " -30.29GiB by rematerialization; only reduced to 49.62GiB (53280000080 bytes), down from 49.62GiB originally",
            ["JAX ran out"], ["bf16", "jax.checkpoint"], id="a warning of XLA",
        ),
        pytest.param(
            "Pi0 training: bfc_allocator.cc:501] Allocator (GPU_0_bfc) ran out of memory trying to allocate 510.68MiB\n"
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 535486464 bytes\nTraceback (most recent call last):\n"
            '  File "/p/train.py", line 244, in main\n    state, sharding = init_train_state(config, rng, mesh)\njaxlib/x.py',
            ["optimizer\\s+was set up", "no step has run"], ["optimizer.step", "SGD"], id="a training state of Flax",
        ),
        pytest.param(
            "docker compose --profile auto-cpu up\nWarning: Found no NVIDIA driver on your system.\nLoading weights from"
            " v1-5-pruned.ckpt\nwebui-docker-auto-cpu-1 exited with code 137", ["RAM\\) ran out", "limit of the container"],
            ["Not a lack"], id="a warning is not the failure",
        ),
        pytest.param(
            "CUDA out of memory. Tried to allocate 44.00 MiB (GPU 0; 11.76 GiB total capacity; 9.73 GiB already allocated; 83.31 MiB"
            " free; 10.08 GiB reserved in total by PyTorch)", ["most\\soften"], ["Why: Fragmentation"], id="few pieces",
        ),
        pytest.param(
            "SDXL LoRA needs how much of 12 GB?\nlr = 1\nbatch = 2\nrank = 4\nsteps = 9\n```\n    return t.to(device, non_blocking)\n"
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 11.76 GiB total capacity; 10.62 GiB"
            " already allocated; 11.06 MiB free; 10.76 GiB reserved in total by PyTorch)",
            ["loading weights"], ["microbatch"], id="the line before a message in a fence of its own",
        ),
        pytest.param(
            "- Windows\n- 17 images of 1024x1024, SDXL\nCUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 12.00 GiB total"
            " capacity; 1.33 GiB already allocated; 8.57 GiB free; 1.36 GiB reserved in total by PyTorch)",
            ["page file", "8.57 GiB were free"], ["attention scores"], id="no picture's scores where there is room",
        ),
        pytest.param(
            "GRPO, colocated: RuntimeError: CUDA Error: out of memory at cumem_allocator.cpp:62\nswift rlhf --model Qwen3-VL-32B"
            " --use_vllm true --vllm_gpu_memory_utilization 0.3 --max_length 8192",
            ["generation beside the training"], ["Shorter sequences", "--model MODEL"], id="a generator that wakes up",
        ),
        pytest.param(
            "Is there a fix? I fine-tune with GRPO.\nfrom trl import GRPOConfig, GRPOTrainer\nmodel = AutoModel.from_pretrained(x)\n"
            "The memory keeps increasing and it goes out of CUDA memory",
            ["memory keeps increasing"], ["enumerate", "with torch.autocast"], id="a Trainer that is only imported",
        ),
        pytest.param(
            "OOM during saving checkpoint, LoRA\nTraceback (most recent call last):\n"
            '  File "transformers/trainer.py", line 2291, in _maybe_log_save_evaluate\n    self._save_checkpoint(model, trial)',
            ["copy of the weights"], ["StateDictOptions", "logits of every batch"], id="no ranks, no shards",
        ),
        pytest.param(
            "OOM when applying inference on videos with higher resolution", ["The text says: .OOM when"], ["device memory"],
            id="a video is no device",
        ),
        pytest.param(
            "After adding print statements I see that VRAM usage consistently increases in the loop, then OOM", ["usage consistently increases"],
            ["Try it"], id="what was added to watch",
        ),
        pytest.param(
            "Evicted: The node was low on resource: memory. Container egg was using 5053216Ki, which exceeds its request of 0.",
            ["requests.memory"], ["limits.memory"], id="a node without memory",
        ),
        pytest.param(
            "ns-train splatfacto, 1116 4K (3840x2160) images, training goes out of CUDA memory", ["data in RAM"], ["Fewer Gaussians", "frames"],
            id="the pictures of a scene",
        ),
        pytest.param(
            "CUDA out of memory in training with batch_size=13. It works if I reduce batch_size", ["if I reduce batch_size"],
            ["Try it"], id="what works is not asked for",
        ),
        pytest.param(
            "HIP out of memory. Tried to allocate 3.82 GiB. GPU 0 has a total capacity of 11.98 GiB of which 3.26 GiB is free. Of the"
            " allocated memory 4.54 GiB is allocated by PyTorch, and 3.74 GiB is reserved by PyTorch but unallocated. If reserved but"
            " unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation. I set"
            " expandable_segments:True, but a warning says that this isn't supported on my GPU", ["3.82 GiB were requested"],
            ["already followed", "tip may help"], id="a tip that the card does not know",
        ),
        pytest.param(
            "When I try to train a voice it always shows me: torch.cuda.OutOfMemoryError: CUDA out of memory",
            ["others use the device", "it is the weights", "something is kept"], ["What to", "Try it", "less at once"],
            id="what tells the causes apart, where the text does not",
        ),
        pytest.param(
            "CUDA out of memory. Tried to allocate 26.00 MiB (GPU 0; 23.79 GiB total capacity; 20.60 GiB already allocated; 38.38 MiB"
            " free; 20.60 GiB reserved in total by PyTorch). I have my own images", ["First find out: Watch nvidia-smi"],
            [r"(?<!Watch )nvidia-smi"], id="lines belong to what is told",
        ),
        pytest.param(
            "I use a video upscaler and got: MXNetError: cudaMalloc retry failed: out of memory after about ~15000 training steps",
            ["while it runs", "bit by bit"], ["loaded", "round number"], id="late, and of rounded steps",
        ),
        pytest.param(
            "With my GTX950 I got the out of memory in about 100 epochs, on a GTX1080Ti in about 700 epochs, when I train on the GPU",
            ["went\\s+well"], ["Most often"], id="hundreds of epochs went well",
        ),
        pytest.param(
            "llava-13b answers in the web UI, but an API call: ~/envs/txt-webui/lib/transformers/generation/utils.py CUDA out of memory",
            ["weights"], ["image smaller", "frames"], id="a page of texts makes no pictures",
        ),
        pytest.param(
            "python -m sglang.launch_server --model-path llama3-8b, nothing is on this H100 80GB:\nFile"
            ' "sglang/srt/models/llama2.py", line 39, in __init__\nFile "vllm/model_executor/layers/linear.py", line 81, in'
            " create_weights\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 112.00 MiB.",
            ["a small part of 80 GB", "something else held"], ["vLLM", "weights do not fit", "quantized"],
            id="weights that are small beside their card",
        ),
        pytest.param(
            "My agent trains:\nnext_state, reward, done, info = env.step(action)\nepisode_reward += reward\nGPU memory was"
            " increasing until it was out of memory", ["was increasing"], ["sums tensors"], id="the rewards of an environment",
        ),
        pytest.param(
            "CUDA out of memory after several minutes of training:\nLoading model at trained.chkpt with exploration rate 0.1\n"
            "Episode 0 - Step 660 - Mean Reward 2990\nEpisode 20 - Step 5262 - Mean Reward 1311", ["bit by bit"],
            ["weights do not fit"], id="what was loaded before the steps",
        ),
        pytest.param(
            "DataLoader worker (pid 27) is killed by signal: Bus error. Can anyone explain what shared memory refers to and how one"
            " can increase it?", ["shm-size"], ["The text:"], id="more memory is asked for",
        ),
        pytest.param(
            "I train LoRA: everything works until model.train(), but when it runs the optimizer, GPU memory goes from 22 GB to 44 GB"
            " and is out", ["optimizer state"], ["activations of a step"], id="when the optimizer runs",
        ),
        pytest.param(
            "after running train.py, i ran render.py: CUDA out of memory. Tried to allocate 3.78 GiB (GPU 0; 15.74 GiB total"
            " capacity; 8.81 GiB already allocated; 228.75 MiB free; 13.46 GiB reserved in total by PyTorch)", ["one pass|in pieces"],
            ["microbatch", "checkpointing"], id="a training that came before",
        ),
        pytest.param(
            "I train dreambooth with --train_batch_size=1 and reduced the resolution to 256, but still: CUDA out of memory",
            ["it is the weights"], ["is it full"], id="neither batch nor size",
        ),
        pytest.param(
            "Will it run out of memory (OOM) on a long video, such as a clip of 180 s?", ["No message about memory"], ["memory ran out"],
            id="what may come has not failed",
        ),
        pytest.param(
            "Loading the data set consumes around 316GB of RAM. Is there a way to reduce this?",
            ["about host memory"], ["ran out", "GPU memory ran", "used up"], id="much is not all",
        ),
    ],
)  # fmt: skip
def test_the_answer_stays_with_the_words(text, said, not_said):
    shown = " ".join(str(explain(text, fast=True, lang="en")).split())
    assert [word for word in said if not re.search(word, shown)] == []
    assert [word for word in not_said if re.search(word, shown)] == []


@pytest.mark.parametrize(
    ("text", "not_quoted"),
    [
        ("I think 3b model with lora in batchsize 2 can easily run in the 32G GPU, CUDA out of memory", "I think"),
        ("训练过程中提示 GPU 已满,减小 batch size 也无法解决该问题", "无法解决"),
        (
            "CUDA out of memory in training. I haven't been able to find variables that retain the computational graph",
            "retain",
        ),
        ("If necessary, I can crop the entire dataset. CUDA out of memory while I train the network", "entire"),
        ("My script is killed while it trains. I have a 16GB RAM machine", "16GB RAM"),
        ("import pandas as pd\nMemoryError when I join two tables", "import pandas"),
    ],
)
def test_thoughts_denials_and_names_are_no_evidence(text, not_quoted):
    answer = " ".join(str(explain(text, fast=True, lang="en")).split())
    assert not re.search(f"The text: “[^”]*{not_quoted}", answer)


def test_the_weights_of_a_model_are_said_with_the_words_that_name_it_and_their_precision():
    text = "I load the 70B model on an L40S of 48GB: CUDA out of memory while loading the checkpoint"
    answer = " ".join(str(explain(text, fast=True, lang="en")).split())
    assert (
        "“70B” in the text is read as 70 billion parameters: 130.39 GiB with 16 bits each; the card has 48 GB" in answer
    )


def test_a_crowded_device_is_told_by_what_the_text_names():
    crowded = "DDP training on 4 GPUs: GPU0 occupied much more memory than the others and runs out of memory"
    ranks, gathered = (
        " ".join(str(explain(text, fast=True, lang="en")).split())
        for text in (crowded, f"nn.DataParallel. {crowded[4:]}")
    )
    assert "which processes nvidia-smi lists" in ranks
    assert "gathers all" not in ranks
    assert "nn.DataParallel gathers all outputs" in gathered


@pytest.mark.parametrize("damage", ["malloc(): invalid size (unsorted)", "double free or corruption (!prev)"])
def test_damage_to_the_heap_is_no_lack_of_memory(damage):
    text = f"Malloc Error: when I train with 512 environments I get `{damage}`. There is more than enough VRAM."
    assert not explain(text, fast=True, lang="en").is_oom


def test_a_question_for_a_fix_proposes_none():
    text = (
        "CUDA out of memory. Tried to allocate 14.9 GiB. I tried ZeRO-2 with CPU offload and reduced batch size (no"
        " effect). Would you recommend ZeRO-3?"
    )
    assert "It proposes" not in str(explain(text, fast=True, lang="en"))


def test_a_training_is_not_restarted_from_time_to_time():
    text = "RAM usage continuously increases when I train the agent; after 8k iterations the OS kills the process."
    assert "restart it from time to time" not in str(explain(text, fast=True, lang="en"))


@pytest.mark.parametrize(
    ("text", "said", "not_said"),
    [
        (
            "Running Stable Diffusion in FastAPI: after several calls the memory of the GPU becomes full, it is not"
            " released.\n```py\nfrom diffusers import StableDiffusionPipeline\npipe = StableDiffusionPipeline."
            "from_pretrained(path)\npipe = pipe.to('cuda')\n```",
            "newer version",
            "while it loaded weights",
        ),
        (
            "INFO:tensorflow:Error recorded from training_loop: Compilation failure: Ran out of memory in memory space"
            " hbm. Used 8.83G of 8.00G hbm.",
            "XLA found that the compiled program",
            "JAX",
        ),
        (
            "slurmstepd: error: Job 4 exceeded memory limit (10889240 > 4194304), being killed\nslurmstepd: error: Exceeded"
            " job memory limit\n#SBATCH --mem=16G",
            "--mem=MORE",
            "now 16",
        ),
        ("With shorter sequences and no GPU, I get no OOM. With the GPU (4GB VRAM) tensorflow throws an OOM-Exception",
         "OOM", "get no OOM …"),
        (
            "PROMPTS = ['box', 'bus', 'train', 'person']\nfor text in PROMPTS:\n    results = model.predict([image], [text])\n"
            "CUDA out of memory. Tried to allocate 334.00 MiB. GPU 0 has a total capacity of 7.75 GiB of which 273.31 MiB is"
            " free. Of the allocated memory 7.00 GiB is allocated by PyTorch, and 289.29 MiB is reserved by PyTorch but"
            " unallocated.",
            "what one pass computes",
            "microbatch",
        ),
        (
            "TorchSharp memory issue: when using GPU inference there is a GPU memory leak, tensors are not disposed.",
            "The text says: “TorchSharp memory issue",
            ".cpu()",
        ),
        ("The drive gets filled with 10-20GB of pagefile by ollama, see https://x.co/a-128k-context-long-videos", "No message about",
         "long-videos"),
        ("GPU memory is increasing with every request to the server of a mask r-cnn model", "keeps memory alive", "anchor"),
        ("It fails with images on my AMD 6700: CUDA out of memory", "memory ran out", "“image"),
        ("I trained on the scene and the number of 3d gaussian starts to increase: CUDA out of memory", "Fewer Gaussians",
         "shorter or smaller inputs"),
    ],
)  # fmt: skip
def test_what_is_mentioned_is_not_taken_for_what_failed(text, said, not_said):
    answer = " ".join(str(explain(text, fast=True, lang="en")).split())
    assert said in answer
    assert not_said not in answer


def test_the_model_is_the_one_that_is_loaded():
    text = "LLaVA-13B takes 20 hours on 8 cards.\npython train.py --model_name_or_path /models/vicuna-7b-v1.5 --bf16"
    assert weights_in(text).billions == 7
