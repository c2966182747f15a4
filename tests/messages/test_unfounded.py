"""What is said of a text stays with what the text shows: no cause, number, change or line of code from elsewhere."""

from __future__ import annotations

import re

import pytest

from oom_magic.explain.explainer import explain

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
        pytest.param(_CROPS, ["fp16"], ["loss_function", "logits", "LoRA", "sdpa", "roberta", r"\*\*batch"], id="crops"),
        pytest.param(_SERVED, ["0.75", "len 2048", "now 0.85"], ["n 0.85", "8192", "SGLang", "size 8"], id="limits of a server"),
        pytest.param(_TOO_LONG, ["too little for one sequence", "len 3664"], ["leaves nothing", "CUDA graphs", "lower"], id="too long"),
        pytest.param(_TACTIC, ["only a warning"], ["nvidia-smi"], id="tactic"),
        pytest.param(_NO_METAL, ["virtual machine"], ["weights do not fit", "Lift"], id="no Metal"),
        pytest.param(_LISTED, [], ["TensorFlow", "jax", "JAX"], id="listed libraries"),
        pytest.param(
            "when i start the training it shows CUDA OUT OF MEMORY even with reduced batch size of 1. Any solution?",
            ["once the model is loaded"], ["microbatch; gradient", "It proposes"], id="batch of one",
        ),
        pytest.param(
            "CPU memory. While evaluating, the computer's memory (no cuda memory) keeps increasing, and the program is"
            " killed. GPU : V100S * 2, RAM : 256GB",
            ["RAM"], ["GPU memory ran out", "names no GPU"], id="no CUDA memory",
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
            ["8\\s+bits"], ["without foreach"], id="one tensor at a time",
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
            ["A limit set for this process", "set_limit"], ["quantized"], id="a limit of CuPy's pool",
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
            "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB", [], ["single tensor", "find_tensor"],
            id="20 MiB are no tensor too big for a device",
        ),
        pytest.param(
            "adj = torch_geometric.utils.to_dense_adj(edge_index)  # 400k nodes\nRuntimeError: CUDA out of memory. Tried to"
            " allocate 597.53 GiB (GPU 0; 16.00 GiB total capacity; 1.32 GiB already allocated; 12.78 GiB free)",
            ["every pair"], ["no tensor is meant to be that large", "one of them is wrong"], id="a dense matrix is meant so",
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
        pytest.param("llama-server -m M.gguf\nggml_cuda: CUDA error: out of memory", [], ["Savings not estimated", "--model"],
                     id="another program is not rehearsed"),
        pytest.param(
            'File "vllm/worker.py", line 9, in determine_num_available_blocks\nself.model_runner.profile_run()\nFile "m.py",'
            " line 9, in execute_model\nhidden = self.model(pixel_values)\ntorch.OutOfMemoryError: CUDA out of memory."
            f" {_NUMBERS}",
            ["trial run", "--max-num-seqs", "--max-num-batched-tokens", "--limit-mm-per-prompt"],
            ["answered requests", "CUDA graphs", "enforce-eager", "SGLang"], id="a server's trial run",
        ),
        pytest.param(
            f"Model loading took 11.0 GiB\nin profile_run vllm\nCUDA out of memory. {_NUMBERS}", ["weights do not fit"],
            ["trial run does"], id="a server's weights by its log",
        ),
        pytest.param(
            "CUDA out of memory. Tried to allocate 26.00 MiB (GPU 0; 23.79 GiB total capacity; 20.60 GiB already allocated;"
            " 38.38 MiB free; 20.60 GiB reserved in total by PyTorch)\nEnvironment: a GPU of 24 GB, my own images",
            ["most\\soften"], ["Close the other programs that use this device", "Task Manager", "in pieces too"], id="no sign of others or of Windows",
        ),
        pytest.param(
            "finetuning_type: lora\nmodel: Llama-3.1-8B\ntemplate: llama3\ncutoff_len: 1024\nper_device_train_batch_size: 2\n"
            "evaluation_strategy: steps\neval_steps: 500\ntorch.cuda.OutOfMemoryError: CUDA out of memory",
            ["once the model is loaded"], ["evaluation", "no_grad", "roberta"],
            id="settings of an evaluation are no failure of it",
        ),
        pytest.param(
            "the 66b model is copied whole by deepspeed's engine to the A100 80G, training goes out of GPU memory",
            [r"Shard the\s+model"], ["optimizer state in bf16", "device_map", "weights in bf16"], id="shards of ranks",
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
            "training net.prototxt: Check failed: error == cudaSuccess (2 vs. 0)  out of memory\n@ caffe::Solver<>::Step()",
            ["once the model is loaded"], ["PyTorch", "autocast", "optimizer"], id="Caffe is no PyTorch",
        ),
        pytest.param(
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 26.00 MiB. GPU 0 has a total capacity of 15.92 GiB"
            " of which 13.60 GiB is free. Of the allocated memory 1.72 GiB is allocated by PyTorch, and 28.98 MiB is reserved"
            " by PyTorch but unallocated.\nComfyUI, Windows 11", ["had free memory"], ["lowvram", "smaller", "fp8"],
            id="room that the driver refuses",
        ),
        pytest.param(
            "The GPU's memory is heavily increasing all the time during training until it is out of memory", ["detach"],
            ["oom_free", "kernel", "no_grad"], id="a leak outside a notebook",
        ),
        pytest.param(
            "CUDA out of memory with my GCN: the graph which I build has 276,984 points and 2,703,203 edges", ["NeighborLoader"],
            ["and 2,703", "--model", "microbatch"], id="one graph",
        ),
        pytest.param(
            "pod OOMKilled, limits: memory: 300Mi, args: stress --vm-bytes 250M, image: polinux/stress", ["memory limit"],
            ["load weights"], id="a pod's limit",
        ),
        pytest.param(
            "Having completed train.py, when I generate a video with the scene: CUDA out of memory. Tried to allocate 18.00 MiB"
            " (GPU 0; 15.69 GiB total capacity; 14.63 GiB already allocated; 21.94 MiB free)", ["what\\sone\\spass"],
            ["microbatch", "autocast"], id="after the training",
        ),
        pytest.param(
            "MPS backend out of memory (MPS allocated: 7.23 GB, other allocations: 1.54 GB, max allowed: 9.07 GB). Tried to"
            " allocate 896.00 MB on private pool.\nAny workaround except PYTORCH_MPS_HIGH_WATERMARK_RATIO for this diffusion?",
            ["smaller"], ["WATERMARK_RATIO=0.0; b", "AWQ", "flash attention"], id="what a Mac's user rules out",
        ),
        pytest.param(
            "In the validation of my captioner memory keeps going up: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0;"
            " 23.70 GiB total capacity; 21.71 GiB already allocated; 11.56 MiB free; 21.98 GiB reserved in total by PyTorch)",
            ["RAM", "keeps memory alive"], ["TrainingArguments", "preprocess_logits"], id="an evaluation without a Trainer",
        ),
        pytest.param(
            'File "trainer.py", line 365, in train\nself.__train()\nFile "trainer.py", line 308, in __val\nout = self.net(x)\n'
            'File "oc.py", line 89, in forward\nsim_map = 0.1 * sim_map\nRuntimeError: CUDA out of memory. Tried to allocate'
            " 4.10 GiB (GPU 3; 10.92 GiB total capacity; 5.46 GiB already allocated; 1019.50 MiB free; 3.89 GiB cached)",
            [r"evaluation\sless at once"], ["microbatch", "checkpointing"], id="a validation within the training",
        ),
        pytest.param(
            "from diffusers import FluxPipeline\npipe.enable_model_cpu_offload()\nCUDA out of memory. Tried to allocate 90.00 MiB."
            " GPU 0 has a total capacity of 14.74 GiB of which 12.12 MiB is free. Of the allocated memory 14.60 GiB is"
            " allocated by PyTorch, and 4.05 MiB is reserved by PyTorch but unallocated.",
            ["enable_sequential"], [r"pipe.enable_model_cpu_offload\(\)   #"], id="parts are in RAM already",
        ),
        pytest.param(
            "stable-diffusion, 2048 x 1024, negative_prompt: torch.cuda.OutOfMemoryError: CUDA out of memory", ["smaller"],
            ["pipe", "diffusers", "cpu_offload"], id="a program that shows no diffusers",
        ),
        pytest.param(
            "ollama[402476]: ggml_backend_cuda_buffer_type_alloc_buffer: allocating 81656.95 MiB on device 0: cudaMalloc"
            " failed: out of memory\nllama_model_load: error loading model: unable to allocate CUDA0 buffer",
            ["num_gpu"], ["num_ctx", "flash attention"], id="a context does not load weights",
        ),
        pytest.param(
            "deepspeed.initialize\nFile engine.py, line 1505, in _configure_zero_optimizer\nCUDA out of memory. Tried to allocate"
            " 4.72 GiB (GPU 0; 79.15 GiB total capacity; 73.33 GiB already allocated; 3.98 GiB free; 74.12 GiB reserved in"
            " total by PyTorch)", ["offload_optimizer"], ["foreach", "AdamW8bit"], id="DeepSpeed's states",
        ),
        pytest.param(
            "a 4-second video: I have a ram error, it is likely that you have unsufficient RAM", ["not GPU memory"],
            ["memory is not released", "tiling"], id="RAM by its name",
        ),
        pytest.param(
            "on scenes with 1k+ cameras memory blows up very quickly; I want splats on larger scenes", [], ["RAM"],
            id="splats are of a GPU",
        ),
        pytest.param(
            "merging 100 videos: MemoryError. 10 times the size of the videos", ["work in parts"], ["weights", "swap"],
            id="RAM without models",
        ),
        pytest.param(
            'File "app.py", line 81, in <module>\npipe.to(device)\nFile "diffusers/pipelines/pipeline_utils.py", line 545, in to'
            f"\nmodule.to(device, dtype)\ntorch.OutOfMemoryError: CUDA out of memory. {_NUMBERS}", ["no\\s+room\\s+for\\s+the\\s+model"],
            ["Make the image smaller", "VAE"], id="a pipeline that is moved",
        ),
        pytest.param(
            "I cannot generate music (no problem with stable diffusion): CUDA out of memory. Tried to allocate 24.00 MiB",
            [], ["Make the image", "VAE"], id="what works is not what failed",
        ),
        pytest.param(
            "in render\nimage = rasterizer(x)\nCUDA out of memory. Tried to allocate 131062.02 GiB. GPU 0 has a total capacity"
            " of 44.53 GiB of which 42.40 GiB is free. Memory leak? It fails while testing.", ["131062"],
            ["keeps memory alive", "activations"], id="beside what is certain nothing else may be",
        ),
        pytest.param(
            "E tensorflow/stream_executor/rocm/rocm_driver.cc:600] failed to allocate 890.06M (933298432 bytes) from device:"
            " HIP_ERROR_OutOfMemory\nI get the same error with ROCm 5.6", ["rocm-smi"],
            ["Close the other programs that use this device"], id="others that nobody has seen",
        ),
        pytest.param(
            "llm = LLM(model=path)\nvllm: torch.OutOfMemoryError: CUDA out of memory, in capture_model",
            ["gpu_memory_utilization=LESS", "0.9 unless set"], ["--gpu", r"=0\.\d", r"seqs=\d"],
            id="a limit that the text does not give",
        ),
        pytest.param(
            "Llama(model_path, n_gpu_layers=32, n_ctx=16000)\nllama_kv_cache_init: failed to allocate buffer for kv cache",
            [r"Llama\(MODEL, n_ctx=8000\)   # now 16000"], ["llama-server", "-ngl", "8192"],
            id="llama.cpp from Python",
        ),
        pytest.param(
            "I sort with cupy: MemoryError: out of memory allocating 8000000000 bytes, too large for one array",
            ["half at once"], ["free_all_blocks", "nvidia-smi", "close"], id="a pool's cache is no large array",
        ),
        pytest.param(
            "TensorRT 8, memory leak: GPU memory increases with each context.execute_v2(), 16 MB per call",
            ["newer version"], ["workspace", "Build for smaller"], id="a workspace keeps nothing",
        ),
        pytest.param(
            "diffusers on my Mac, image 1024x1024: RuntimeError: Invalid buffer size: 16.00 GB", ["attention scores", "slices"],
            ["often in such", "Find the shape", "sdpa"], id="a picture's scores on a Mac",
        ),
        pytest.param(
            "\n".join(
                f"rocm_driver.cc:606] failed to allocate {size} from device: HIP_ERROR_OutOfMemory"
                for size in ("127.99TiB (140729850295296 bytes)", "115.19TiB (126656857505792 bytes)", "3 TiB")
            ),
            ["no device has", r"compatible\s+versions"], ["A smaller batch", "ALLOW_GROWTH", "Print"], id="a misreported device",
        ),
        pytest.param(
            "RuntimeError: Invalid buffer size: 4.00 GB on my Mac when it exceeds 1024 image output", ["attention scores"],
            ["which operation"], id="scores of a square picture",
        ),
        pytest.param(
            "In the evaluation, outputs of the model are added to a list and remain on the GPU: CUDA out of memory",
            ["keeps memory alive"], ["activations of a step"], id="outputs in a list",
        ),
        pytest.param(
            "vllm on 8块4090\nRuntimeError: CUDA error: out of memory\nINFO Capturing the model for CUDA graphs. To run the"
            " model in eager mode, set 'enforce_eager=True'", ["The server's memory budget", "enforce"], ["weights do not fit"],
            id="a driver's message while graphs are captured",
        ),
        pytest.param(
            "加载模型：cpm-bee-10b，程序在加载模型中被kill了，是因为显存不够吗？4090，显存24G",
            ["not GPU memory"], ["map_location"], id="asked, not told",
        ),
        pytest.param(
            "onnxruntime BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 2830172160. There"
            " are 7 other models also hosted on the same server", ["Unload models"], ["kill <PID>", "process"],
            id="models beside it",
        ),
        pytest.param(
            f"The training fails for larger meshes: CUDA out of memory. {_NUMBERS}", [], ["--model"],
            id="meshes are no tokens",
        ),
        pytest.param(
            f"dreambooth of stable-diffusion, train_batch_size=1: CUDA out of memory. {_NUMBERS}", [],
            ["logits", "Shorter sequences", "--model", "set_attn"], id="a UNet has no vocabulary",
        ),
        pytest.param(
            "Training a Llama with torchtune's LoRA recipe on a 4090: it goes OOM with 8k context, with 2k it worked fine",
            ["less at once"], ["PEFT", "set_attn", "loss = model", "loader"], id="a recipe is no loop of the author's",
        ),
        pytest.param(
            "RAM usage increases while training the nnet in tensorflow, with GPU out of memory errors. When training is resumed"
            " at the same iteration memory consumption is back to normal", ["keeps memory alive"], ["map_location", "checkpoint"],
            id="resumed and back to normal",
        ),
        pytest.param(
            "./main -m /data/text-generation-webui/models/Marx.gguf\nCUDA error 2 at llama.cpp/ggml-cuda.cu:5509: out of memory",
            [], ["picture", "VAE"], id="a folder's name",
        ),
        pytest.param(
            "ComfyUI KSampler\ncomfy/samplers.py, line 9, in sample\ntorch.OutOfMemoryError: Allocation on device", ["smaller"],
            ["VAE"], id="no VAE while sampling",
        ),
        pytest.param(
            "sglang with llama-3.1-70b-instruct: CUDA memory is constantly increasing and not released after inference",
            ["newer version"], ["weights do not fit"], id="what grows has been loaded",
        ),
        pytest.param(
            "RESOURCE_EXHAUSTED: Failed to allocate request for 176.00MiB (184549376B) on device ordinal 0", ["nvidia-smi"],
            ["Close the other programs that", "kill"], id="nobody else seen",
        ),
        pytest.param(
            f"It works for short audio, with longer files it results in: CUDA out of memory. {_NUMBERS}", [],
            ["--model"], id="audio is no language model",
        ),
        pytest.param(
            "luajit: /nn/WeightNorm.lua:201: cuda runtime error (2) : out of memory at THCStorage.cu:66\nreloading model", [],
            ["torch.load", "--model", "notebook"], id="Lua is no Python",
        ),
        pytest.param(
            '[TRT] Cuda Error in nvinfer1::internal::DefaultAllocator::allocate: 2 (out of memory)\nduring getBestTactic: conv0',
            ["TensorRT could not allocate", "max_workspace_size"], ["quotes no message", "trt.Memory"], id="TensorRT's older message",
        ),
        pytest.param(
            'LM Studio failed to load the model: out of GPU memory. "n_ctx": 1048576, "n_gpu_layers": 81', ["n_ctx"],
            ["p.numel", "llama-server", "smaller batches"], id="a program with a page of its own",
        ),
        pytest.param(
            "OSError: [WinError 1455] The paging file is too small. D:/torch", ["committed memory"], ["dmesg"],
            id="Windows has no dmesg",
        ),
        pytest.param(
            "Jetson Nano 2GB\npython3 onnx_to_tensorrt.py\nBuilding an engine...\nKilled", ["workspace"], ["add some"],
            id="a board has the memory that it has",
        ),
        pytest.param(
            "Torchmetrics leak memory slowly: GPU memory goes up with each epoch of training and validation until it is OOM",
            ["reset"], ["no_grad"], id="metrics",
        ),
        pytest.param(
            "slurmstepd: error: Detected 1 oom-kill event(s). Is there a way to limit memory within the workflow?",
            ["--mem=MORE   #"], ["MOREG", "picture"], id="a workflow of no pictures",
        ),
        pytest.param(
            "ggml_new_tensor_impl: not enough space in the context's memory pool (needed 13340448, available 10485760)",
            ["n_batch"], ["weights do not fit", "smaller model"], id="a buffer of fixed size",
        ),
        pytest.param(
            "KernelRestarter: restarting kernel (1/5) during a join of two pandas data frames", ["likely"], ["certain"],
            id="a restart is no proof",
        ),
        pytest.param(
            "I train a 3D net with batch size = 1: OOM when allocating tensor with shape[1,128,128,128,32] and type float on"
            " /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc", [r"256\.00 MiB"],
            ["floaton", "smaller batch", "Halve the batch"], id="a batch of one has no half",
        ),
        pytest.param(
            "Training: OOM when allocating tensor with shape[1,500,500,512] and type float on"
            " /job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu", ["not GPU memory"], ["activations"],
            id="TensorFlow on the CPU",
        ),
        pytest.param(
            'File "losses.py", line 643, in feature_loss\nloss += torch.mean(x)\nCUDA out of memory. Tried to allocate 20.00'
            " MiB (GPU 0; 31.75 GiB total capacity; 13.57 GiB already allocated; 4.75 MiB free; 14.03 GiB reserved in total"
            " by PyTorch)\nIt worked before. Is it due to memory leak somewhere? I train VITS.", ["Another process"],
            ["keeps growing", "detach"], id="a question is no statement",
        ),
        pytest.param(
            "stable diffusion webui: with hires fix on a batch larger than 1 CUDA out of memory, and it doesn't free the VRAM",
            [r"The\s+working\s+memory"], ["memory_allocated"], id="what an error leaves is no leak",
        ),
        pytest.param(
            "i used 8*A100 to finetune llama-7b, at iteration 3000 it save weights oom", ["copy of the weights", "RAM"],
            ["AWQ", "microbatch"], id="saving",
        ),
        pytest.param(
            "slurmstepd: error: Detected 1 oom-kill event(s)", ["sacct"], ["free -h", "Task Manager", "weights"],
            id="a job's memory is SLURM's",
        ),
        pytest.param(
            "In A1111 Web UI I can use SD-XL with 1024x1024. Here not:\n"
            'File "invokeai/.venv/lib/invokeai/backend/model_cache.py", line 215, in __enter__\n'
            "self.cache.move_model_to_device(self.entry, self.device)\nCUDA out of memory", ["no\\s+room\\s+for\\s+the\\s+model"], ["medvram", "Make the image"],
            id="the program of the frames",
        ),
        pytest.param(
            "ComfyUI Error Report\n- **Node Type:** WanVideoModelLoaderMultiGPU\n- **Exception Message:** Allocation on device",
            ["no\\s+room\\s+for\\s+the\\s+model"], ["picture", "VAE"], id="a node that loads",
        ),
        pytest.param(
            "compute_features of jax arrays: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3199993600 bytes.",
            ["half the input"], ["backward"], id="nothing is trained",
        ),
        pytest.param(
            "I train Yolo. VRAM usage is spiking when validation begins, causing an OOM at the end of the training run", ["maller"],
            ["no_grad\\(\\):", "loss.backward", "forward pass saves"], id="another's evaluation",
        ),
        pytest.param(
            "QLoRA of Mixtral 8x7b with axolotl: in from_pretrained, set_module_quantized_tensor_to_device\ntorch.cuda."
            "OutOfMemoryError: CUDA out of memory", ["smaller model"], ["QLoRA of rank", "enumerate"], id="in 4 bits already",
        ),
        pytest.param(
            "I want to fine-tune Gemma with Unsloth, and get: CUDA out of memory", ["once the model is loaded"], ["sdpa", "enumerate"],
            id="no loop of the author's",
        ),
        pytest.param(
            'I train my own net\nFile "train.py", line 9, in main\nmodel.to(device)\nFile "torch/nn/modules/module.py", line 359,'
            " in _apply\nmodule._apply(fn)\nRuntimeError: CUDA error: out of memory", [r"Another\sprocess"],
            ["optimizer state", "4 bits"], id="what touches a full device first",
        ),
        pytest.param(
            'File "ppo.py", line 166, in ppo_train\nFile "deepspeed/runtime/engine.py", line 1895, in backward\nself.optimizer.'
            "backward(loss)\ntorch.cuda.OutOfMemoryError: CUDA out of memory", ["microbatch"], ["Accelerator", "enumerate"],
            id="DeepSpeed's engine is not accelerate",
        ),
        pytest.param(
            "训练PPO的时候CUDA out of memory, llama-2-13B --output_max_length 64 --batch_size 1 --gradient_accumulation_steps 1",
            ["one\\sstep\\scomputes"], ["picture", "Gradient accumulation", "--seq N"], id="accumulation of one",
        ),
        pytest.param(
            'I fully fine-tune it\nFile "transformers/modeling_utils.py", line 3366, in from_pretrained\ndispatch_model(model,'
            " **device_map_kwargs)\nmodel.to(device)\ntorch.cuda.OutOfMemoryError: CUDA out of memory", ["bf16"],
            ["device_map", "spread"], id="dispatched already",
        ),
        pytest.param(
            "We use 1M images and yolov5m, and while training system RAM is increasing up to its limit. GPU utilization falls",
            ["not GPU memory"], ["torch.cuda", "Task Manager"], id="RAM beside a GPU",
        ),
        pytest.param(
            "With Jax grad() fails for lattices larger than 40x40:\norg_tensorflow/tensorflow/core/bfc_allocator.cc] Allocator"
            " (GPU_0_bfc) ran out of memory trying to allocate 128.0KiB", [r"Why, possibly: The working\smemory"],
            ["TensorFlow", "TF_"], id="JAX on XLA's allocator",
        ),
        pytest.param(
            'RAM was full and the worker was killed by the OS. Use fewer workers\nFile "nnunetv2/inference/predict.py", line 268,'
            " in predict_from_files\nreturn self.predict(x)", ["Fewer worker"], ["no_grad", "DataLoader"],
            id="workers that load no data",
        ),
    ],
)  # fmt: skip
def test_nothing_is_said_beyond_the_text(text, said, not_said):
    shown = str(explain(text, fast=True, lang="en"))
    assert [word for word in said if not re.search(word, shown)] == []
    assert [word for word in not_said if re.search(word, shown)] == []
