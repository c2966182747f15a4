"""Texts about other errors are not taken for a lack of memory; what fails is told by whose message it is."""

from __future__ import annotations

import pytest

from oom_magic.explain.evidence.causes import Cause, Confidence
from oom_magic.explain.evidence.measured.contradicted import is_doubtful
from oom_magic.explain.explainer import explain
from tests.support.told import as_shown

# Of public threads, by their first lines.
_OTHERS = (
    "encountered while running train.py\n\nRuntimeError: mat1 and mat2 shapes cannot be multiplied (4480x4 "
    "and 2048x1024)",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x18 and 512x1024)\n\nTo fix this I add "
    "transpose on the latent variable before latent_to_image in make_training_data.py",
    "Why are you always reporting errors： RuntimeError: mat1 and mat2 shapes cannot be multiplied (863x1 and "
    "11x5120)",
    "求助\n\nRuntimeError:mat1 and mat2 shapes cannot be multiplied (512x2304 and 256x4)，这个问题怎么解决啊，急救",
    "Q: is it support Memory Bank?",
    "A question about memory bank\n\nThank you for your great work. I have some doubts about the memory "
    "bank. I don't know the specific internal implementation. There seems to be no specific explanation in "
    "the article. Where can I see the relevant content?",
    "Feature request for adding Memformer memory\n\nSo i've checked the memformer repository and this one. I "
    "think it would be good to add the memory from the memformer to this project also since it seems more "
    "general and better than the transformer XL memory.",
    "[Feature]: Proposal on new memory management based on vAttention",
    "add memory efficient attention\n\nPR types New Feature, PR changes OPs. Describe: add memory efficient "
    "attention",
    "GPT-J: Implement Memory Efficient Attention\n\nJust a note that it would be great to add memory "
    "efficient attention for larger models.  It might be nice to add an option to reuse the memory of input "
    "hidden states, too, if the user doesn't need them.",
    "[rank6]:[E429 13:55:49.384372190 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 6] "
    "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued "
    "collectives. This typically indicates a NCCL/CUDA API (e.g., CudaEventDestroy) hang blocking the "
    "watchdog",
    "Model training has ended, but there was an error when releasing resources.\n\nProcessGroupNCCL's "
    "watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.",
    "NCCL Timeout in Distributed Training\n\nDuring multi-GPU training, the process hangs and then fails "
    "with a watchdog timeout. Example logs:\n\n[E ProcessGroupNCCL.cpp:523] Watchdog caught collective "
    "operation timeout:\nWorkNCCL(OpType=ALLREDUCE, SeqNum=458) ran for 1800600 ms before timing out.\n[E "
    "ProcessGroupNCCL.cpp:543] To avoid data inconsistency, the entire process is terminated.",
    "AI/ML training hangs up with no error report from NCCL\n\nReduceScatter failed to be finished within "
    "the timeout (30mins). It is tricky that no error log reported from NCCL.\n[E ProcessGroupNCCL.cpp:481] "
    "[Rank 65] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1559, "
    "OpType=_REDUCE_SCATTER_BASE, NumelIn=3121908768, NumelOut=32519883, Timeout(ms)=1800000)",
    "ImportError: /home/wf/.local/lib/python3.6/site-packages/resample2d_cuda.so: undefined symbol: "
    "__cudaPopCallConfiguration",
    "ImportError in sgutils(undefined symbol: _ZN3c104cuda9SetDeviceEi)\n\nwhen I use it in an other "
    "project. It seems have something wrong.",
    "Bug: ImportError: deep_gemm_cpp.cpython-312-x86_64-linux-gnu.so: undefined symbol: "
    "cudaLibraryGetKernel, version libcudart.so.12",
    "[BUG] ImportError: undefined symbol: cudaMemPoolCreate, version libcudart.so.11.0\n\nThe full error "
    "when importing `cudf` (indirectly) or `rmm` (directly) is:\nImportError: "
    "rmm/_lib/memory_resource.cpython-38-x86_64-linux-gnu.so: undefined symbol: cudaMemPoolCreate, version "
    "libcudart.so.11.0",
    "Segmentation fault (core dumped)\n\nwhen i start to infer, it throw the error: Segmentation fault (core "
    "dumped)",
    "Hello,when i use the test inference code for single image,i put the code into the Fastapi server.\nthe "
    "model start normal,but when receive the post.the holy code occurs Segmentation fault (core dumped). and "
    "no other mistakes.\nplatform: linux . GPU:A800",
    "While running inference error Segmentation fault (core dumped)",
    "报错Segmentation fault (core dumped)\n\ncuda12.1 python 3.10.16\n完成安装后，运行xinference-local --host "
    "127.0.0.1 --port 9997 会显示Segmentation fault (core dumped) 应该怎么解决呢？",
    "About point cloud\n\nRendering results are great on truck dataset, but exported point cloud is messy.I "
    "can't even find where the truck is.\nSo my question is whether the point cloud derived from 3D Gaussian "
    "is suitable for point cloud-based tasks?",
    "Large scene, but generated less point\n\nI captured 3k images on a street around 200m. After training, "
    "my result is relative good but not detailed (blur). The number of generated points: For the first 7k "
    "steps, num of points was 198K+. After 30k steps, number of points was 281,801+ points",
    "Train model with GPU, got InvalidIRError\n\njulia> train_set = ((gpu(cat(train[batch]/255f0..., "
    "dims=4)), gpu(onehotbatch(label[batch], scores))) for batch in partition(randperm(length(train)), "
    "batch_size))",
    "webgpu not used in webgpu-chat\n\nMacos 15.3.2, with Intel UHD Graphics 630 1536 MB\nFirst I changed "
    "@xenova/transformers to @huggingface/transformers in worker.js. Does it mean webgpu is not used somehow?",
    "v3 webgpu crash after upgrade to chromium 129\n\ncrash with ORT error: `Failed to execute 'mapAsync' on "
    "'GPUBuffer': A valid external Instance reference no longer exists.`",
    "Question: Sampler that splits utterances into buckets. Instead of random sampling, we could split "
    "firstly the whole dataset into several buckets depending on the length of the utterance and then "
    "randomly sample from each of the buckets.",
    "Is it possible to run NeighborSampler faster?\n\nI'm using NeighborSampler to get a 3-hop subgraph. But "
    "when the size of target nodes is large or the original whole graph is big, running NeighborSampler to "
    "get a 3-hop subgraph is slow.",
    "Help - Every output complete nonsense\n\nBelow is the workflow I created based on your template. My "
    "problem is, I have tried many prompts and your red panda prompt and all of then get a weird green "
    "booger with minimal relation to the prompt.",
    "A 700 amino acid long protein - How Long to predict?\n\nUsing the AlphaFold2.0 Google Colab Notebook I "
    "am trying to predict the structure of a 700-800 amino acid long protein chain, How long will the "
    "program take to run?",
    "MiniMax Lora not loading: lora key not loaded: diffusion_model.blocks.0.attn.qkv.lora_A.weight",
    "the loss becomes NaN after 200 steps when I train with fp16 on 8 GPUs; with bf16 it works",
    "How to change patch size?\n\nI tried to make the patch size larger. So I just adjusted the .pkl file in "
    "the path of nnUNet_preprocessing, and changed the patch size. However, after changing the patch size, "
    "it will report such a bug.",
    "Patch Size in plan file is different. As per adaptations in the paper: Due to memory constraints, we do "
    "not increase the input patch volume beyond 128^3 voxels",
    "Model Checkpoint NOT saved, Eval Loss \"Inf\". The training finished; however, the eval loss shows to "
    "be inf. And the model checkpoint was not saved, and I did not see any error message either.",
    "RuntimeError: CUDA error: device-side assert triggered. CUDA kernel errors might be asynchronously "
    "reported at some other API call",
    "ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: "
    "/bert-base-uncased/resolve/main/config.json",
    "Please upgrade the KV cache size yes using `--ctx-size`. slot unavailable, retrying with smaller n_batch",
    "Add option in restart policy to limit container restarts. You can only decide to always \"Fail\" the "
    "pod or keep it running forever.",
    "KeyError: 'model.layers.0.self_attn.q_proj.weight' when loading the checkpoint with from_pretrained",
    "training is very slow, GPU utilization is only 10 %, the data loading takes most of the time with 4 "
    "workers",
    "error: command '/usr/bin/nvcc' failed with exit code 1 while building the extension: unsupported gcc "
    "version",
    "tensor size mismatch: The size of tensor a (512) must match the size of tensor b (77) at non-singleton "
    "dimension 1",
)  # fmt: skip


@pytest.mark.parametrize("text", _OTHERS)
def test_another_error_is_no_lack_of_memory(text):
    assert not explain(text, fast=True, lang="en").is_oom


@pytest.mark.parametrize(
    ("text", "said", "not_said"),
    [
        pytest.param(
            "torch.AcceleratorError: CUDA error: out of memory\nSearch for `hipErrorOutOfMemory' in https://rocm.docs.amd.com\n"
            "HIP version  : 7.2.53211", "rocm-smi", "nvidia-smi", id="CUDA's words for what HIP returned",
        ),
        pytest.param(
            "PIL worked. vkAllocateMemory failed -2\nThe scaled image still comes out.", "A graphics API", "without a message",
            id="a call of Vulkan by its number",
        ),
        pytest.param(
            "[OPENCL]:Creating one big buffer for the DAG\nAllocating single buffer failed with: clCreateBuffer(-61).",
            "allows in one piece", "one pass computes", id="a buffer above what OpenCL allows at once",
        ),
        pytest.param(
            "[Error: could not find a KV slot for the batch (try reducing the size of the batch or increase the context)]",
            "did not fit the context", "RAM", id="a context that is full",
        ),
        pytest.param(
            "ERROR: CUDA runtime error: cudaMalloc failed: unknown error\nError: cudaMemGetInfo fails, unknown error",
            "Not a lack of memory", "ran out", id="an allocation refused for another reason",
        ),
        pytest.param(
            "(0) RESOURCE_EXHAUSTED: Attempting to reserve 10.51G at the bottom of memory. That was not possible."
            " There are 8.97G free, 0B reserved, and 8.97G reservable.", "10.51 GiB", "torch.cuda", id="XLA's memory is not torch's",
        ),
        pytest.param(
            "Could not predict a sequence. Not Enough GPU memory? INTERNAL: CUBLAS_STATUS_EXECUTION_FAILED",
            "run a call", "could not be initialized", id="a library's call that did not run",
        ),
        pytest.param(
            "llama-2-7b-chat-hf-q4f16_1 prints VK_ERROR_OUT_OF_DEVICE_MEMORY on my 2 GB card", "graphics API", "16 bits each",
            id="bits that the name says",
        ),
        pytest.param(
            "OOM after finetune.py. The model of scripts/convert_checkpoint.py from the original works on an A100.",
            "memory ran out", "engine is built", id="a converter of another program",
        ),
    ],
)  # fmt: skip
def test_what_failed_is_told_by_its_own_message(text, said, not_said):
    answer = " ".join(str(explain(text, fast=True, lang="en")).split())
    assert said in answer
    assert not_said not in answer


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        pytest.param("My machine is a 3090 with 24GB VRAM and 64 GB RAM, still OOM after a few generations of ComfyUI.",
                     Cause.LEAK_OR_RETAINED_REFERENCE, id="RAM in a list of what there is"),
        pytest.param("在载入GPU之前 占用了248G内存，然后就把进程杀了。偶尔可以过。", Cause.HOST_RAM, id="killed, in Chinese"),
        pytest.param("docker build crashes my machine. There is some substantial compiling going on, then it runs out of RAM.",
                     Cause.HOST_RAM, id="compilers in a container"),
        pytest.param("Failed to allocate ethash DAG buffer when I mine with 6 GPUs on Windows. Do I not have enough ram?",
                     Cause.HOST_RAM, id="the page file of a miner"),
        pytest.param("每张卡上跑了其他模型，单卡能跑，多卡报RuntimeError: NPU out of memory.", Cause.OTHER_PROCESS,
                     id="others on the cards, in Chinese"),
    ],
)  # fmt: skip
def test_whose_memory_and_why(text, cause):
    assert explain(text, fast=True, lang="en").cause is cause


def test_words_alone_are_never_certain():
    text = "The OS kills child processes that tokenize. Pass fewer --num_workers: they need so much RAM that it OOMs."
    assert explain(text, fast=True, lang="en").confidence is not Confidence.CERTAIN


def test_a_change_with_a_poor_record_comes_behind_the_check():
    assert is_doubtful("newer_version")  # 5 of 27, though its sentence says when it helps
    text = "docker run: the program exits with code 137, there is no problem in the logs"
    assert "First find out" in str(explain(text, fast=True, lang="en"))


def test_compilers_are_told_of_their_jobs_alone():
    text = "c++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated."
    assert [one.key for one in explain(text, fast=True, lang="en").remedies] == ["fewer_jobs"]


def test_text_models_have_lengths_not_resolutions():
    text = "BERT, sequence length 1024 tokens, trained with batch 4: CUDA out of memory. Tried to allocate 192.00 MiB"
    assert "smaller_items" not in [one.key for one in explain(text, fast=True, lang="en").remedies]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.05GiB with freed_by_count=0. The caller indicates"
            " that this is not a failure, but may mean that there could be performance gains",
            "look behind them for what ended the run",
        ),
        ("server aborts: vk::Queue::submit: ErrorDeviceLost", "the driver's log"),
        ("vLLM fails with UR_RESULT_ERROR_DEVICE_LOST on two Arc cards", "the driver's log"),
    ],
)
def test_what_is_no_lack_of_memory_is_told_as_what_it_is(text, said):
    answer = as_shown(text)
    assert said in answer
    assert "ran out." not in answer


@pytest.mark.parametrize(
    ("text", "backend", "cause"),
    [
        ('C++ exception with description "std::bad_alloc: hipErrorOutOfMemory: out of memory"', "hip", None),
        ('Finetuning on two A40: "failed to allocate CPU buffer" in llama.cpp', "cpu", Cause.HOST_RAM),
        ("When I diarize 5 hours it is consuming much cpu memory until killing itself. --device cuda", "cpu", Cause.HOST_RAM),
        ("colabfold: jaxlib/cusolver_kernels.cc:44: operation cusolverDnCreate(&handle) failed. Not Enough GPU memory?",
         "cuda", Cause.MEMORY_FRACTION_LIMIT),
        ("fit in tf.keras consumes a high amount of system memory: twice the arrays. V100 32 GB", None, Cause.HOST_RAM),
    ],
)  # fmt: skip
def test_whose_memory_a_message_is_about(text, backend, cause):
    diagnosis = explain(text, fast=True, lang="en")
    assert diagnosis.backend == backend
    assert cause is None or diagnosis.cause is cause


def test_a_filter_does_not_grow_with_the_batch():
    text = (
        "OOM when allocating tensor with shape[64,32,3,3] and type float on /device:GPU:0 by allocator GPU_0_bfc\n"
        '[[node conv_2/convolution = Conv2D[T=DT_FLOAT, data_format="NCHW"]]]'
    )
    assert "grows with what goes through" not in as_shown(text)


def test_a_request_over_all_points_of_a_picture_has_no_wrong_shape():
    text = (
        "Skip 2018.png due to an error: CUDA out of memory. Tried to allocate 171.24 GiB (GPU 0; 8.00 GiB total capacity;"
        " 1.94 GiB already allocated; 4.00 GiB free; 2.94 GiB reserved in total by PyTorch)"
    )
    assert "is wrong" not in as_shown(text)
