"""Nothing is claimed that a text does not show: whose memory it is, what filled it, and what would help."""

from __future__ import annotations

import re

import pytest

from oom_magic.explain.explainer import explain


@pytest.mark.parametrize(
    ("text", "said", "not_said"),
    [
        pytest.param(
            "logits = logits / self.temperature\nRuntimeError: MPS backend out of memory (MPS allocated: 12.74 GB, other"
            " allocations: 4.39 GB, max allowed: 18.13 GB). Tried to allocate 1.02 GB on private pool.", ["logits"],
            ["weights do not fit", "enumerate", r"12\.74\s+GiB\s+came"], id="logits are divided by a temperature",
        ),
        pytest.param(
            "CUDA out of memory. Tried to allocate 8.67 GiB (GPU 0; 23.70 GiB total capacity; 9.21 GiB already allocated; 4.45"
            " GiB free; 17.61 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting"
            " max_split_size_mb to avoid fragmentation.", ["tip may help"], ["tip applies"], id="the cache alone was too small",
        ),
        pytest.param(
            "RESOURCE_EXHAUSTED: Attempting to reserve 11.35G at the bottom of memory. That was not possible. There are 12.18G"
            " free, 0B reserved, and 10.52G reservable. I train with jax", [r"12\.18 GiB were free", "in pieces"],
            ["PyTorch", "activations"], id="XLA's free memory is in pieces",
        ),
        pytest.param(
            "I am not able to load the Flax GPT-Neo 2.7B model: RuntimeError: Resource exhausted: Failed to allocate request"
            " for 100.00MiB (104857600B) on device ordinal 0", ["no\\s+room\\s+for\\s+the\\s+model"], ["nother process"],
            id="what is loaded fills the device itself",
        ),
        pytest.param(
            "OOM When Resuming From Checkpoint. I use FSDP. The OOM always happens during the optimizer step. TPU v3-8",
            ["from\\s+the\\s+checkpoint"], ["Adafactor", "8-bit"], id="whose optimizer it is, is not said",
        ),
        pytest.param(
            "Cuda Out of Memory Error after restarting a previous stored model. I can train with batch size 68 and it works"
            " fine, then I load it from disk:\n```lua\nmodel = torch.load(path)\n```", [], ["batch", "bf16", "checkpointing"],
            id="the batch fitted before",
        ),
        pytest.param(
            "训练时内存持续增长到OOM，batch_size=128，2000 step时出现OOM", ["The text says: .训练时内存"], ["RAM"],
            id="memory of a training is not said to be the host's",
        ),
        pytest.param(
            "windows 11 wsl2, ollama: each model is less than 10 GB\nllama_new_context_with_model: n_ctx = 4096\nCUDA error: out"
            " of memory", [], ["pin_memory", "RAM\\) ran out"], id="pinned memory of PyTorch in WSL",
        ),
        pytest.param(
            "ollama run deepseek: unable to allocate CUDA0 buffer\nggml_cuda_host_malloc: failed to allocate 335445.83 MiB of"
            " pinned memory: out of memory\nggml_backend_cuda_buffer_type_alloc_buffer: allocating 28426.68 MiB on device 0:"
            " cudaMalloc failed: out of memory", ["no\\s+room\\s+for\\s+the\\s+model"], ["RAM\\) ran out"], id="llama.cpp goes on unpinned",
        ),
        pytest.param(
            'unsloth/Qwen-Image-2512 on kaggle:\npipe = DiffusionPipeline.from_pretrained("a").to("cuda")\nCUDA out of memory.'
            " Tried to allocate 1.02 GiB. GPU 0 has a total capacity of 15.89 GiB of which 137.12 MiB is free.", [],
            ["2512”"], id="a number in a name",
        ),
        pytest.param(
            "I load a saved model (3.8MB) and then use model.predict on a numpy array of size `(45000, 32, 32, 3)` and get an OOM"
            " memory error. GPU: GTX 1660 Ti. I have set the memory growth option in tensorflow", [],
            ["RAM", "swap", "growth", "weights"], id="arrays are no sign of the host",
        ),
        pytest.param(
            "I train with only batch size 1, and it runs successfully for the first epoch, and suddenly it gets cuda out of memory"
            " at the start of the second epoch", ["only then"], ["activations of a step", "optimizer"], id="after an epoch that ran",
        ),
        pytest.param(
            "After the validation of the first epoch, memory suddenly increases and there is an error out of memory when I proceed"
            " to the second epoch of training on a 3080", [], ["Collect results", "keeps memory alive"], id="a jump is no leak",
        ),
        pytest.param(
            "OOM during saving step. I train with deepspeed --deepspeed ds_config_zero3.json on 8 GPUs, each of them has 16GB VRAM",
            ["saved"], ["StateDictOptions"], id="FSDP's calls for DeepSpeed",
        ),
        pytest.param(
            "保存checkpoint时报错，每次训练到1000steps时都会报错：\n[launch.py:315:sigkill_handler] Killing subprocess 44150",
            ["No known memory error found"], ["weights", "about memory$"], id="no word about memory",
        ),
        pytest.param(
            "PPO: run atari OOM after running 71680 timesteps\nW tensorflow/core/common_runtime/bfc_allocator.cc:273] Allocator"
            " (GPU_0_bfc) ran out of memory trying to allocate 27.56MiB.", [], ["replay buffer", "nother process"],
            id="a policy without a buffer, late",
        ),
        pytest.param(
            "faiss: alloc fail type FlatData dev 0 size 42466784256 bytes (cudaMalloc error out of memory [2]), an A100 with 80GB",
            [r"39\.55 GiB"], ["PyTorch's own allocator"], id="a library without PyTorch",
        ),
        pytest.param(
            "I train on 1920x1080 images with colmap format on a 3090 and get CUDA out of memory errors", ["half\\s+at\\s+once"],
            ["microbatch", "bf16"], id="a scene has no batch",
        ),
        pytest.param(
            'saving checkpoint: a.safetensors\nMemoryError\nFile "lora.py", line 1115, in save_weights\nmodel_hash ='
            " precalculate_safetensors_hashes(state_dict)", ["Keep less in RAM"], ["while\\s+loading"], id="saving is not loading",
        ),
        pytest.param(
            "Could not allocate tensor with 377487360 bytes. There is not enough GPU video memory available! All of you think that"
            " the image size is too large. The webui does not free the GPU memory", ["does not free"], ["All of you", "smaller"],
            id="what others think",
        ),
        pytest.param(
            "After one video generation it already used all available RAM and doesn't free it, so the next generation crashes",
            ["about|ran out"], ["notebook"], id="no word about a notebook",
        ),
        pytest.param(
            "Training OOMs on 2 GPUs with torch.distributed.launch, even if I reduce the bs from 4 to 1 it still goes over 8GB",
            [], ["fewer, shorter"], id="a batch under its short name",
        ),
        pytest.param(
            "The program does not respect gpu_split with my 4 GPUs: it fills the first GPU and OOMs. None of the other 3 GPUs gets"
            " anything. I only load the model.",
            [r"not\s+divided", r"divided\s+among\s+all"], [], id="devices that stay idle",
        ),
        pytest.param(
            "I read on the internet and it seems that reducing the batch size might resolve this issue.\n"
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 MiB",
            [], ["it seems that reducing"], id="what was read somewhere",
        ),
        pytest.param(
            "内存占用率一直在上涨，显存没有变化，训练到一半报内存不足的错", ["Host memory"], ["Out of device memory"],
            id="the device is steady",
        ),
        pytest.param(
            "训练时显存随着epoch的增加而增加，直到显存溢出", ["no longer needed"], [], id="growth with epochs in Chinese",
        ),
        pytest.param(
            "vllm serve Qwen/Qwen3-14B\nLoading model weights took 27.5376 GB\n"
            "Available KV cache memory: -0.87 GiB\nthen it crashes, not enough memory",
            [r"nothing\s+for\s+its\s+KV\s+cache"], ["trial run"], id="less than nothing is left",
        ),
        pytest.param(
            "vllm-mlx grows wired/Metal memory over time and aborts with kIOGPUCommandBufferCallbackErrorOutOfMemory",
            [r"no longer\s+needed"], ["gpu-memory-utilization", "torch.mps"], id="a program named after another",
        ),
        pytest.param(
            "GPU memory keeps growing with the requests, and for another model Triton raises a CUDA_OUT_OF_MEMORY error",
            [], ["directly from the CUDA driver"], id="the name of an error only",
        ),
        pytest.param(
            "I run tritonserver without GPU. After I stop sending requests, the memory is not released", ["RAM"],
            ["nvidia-smi", "KV cache"], id="no device at all",
        ),
        pytest.param(
            "I quantize my fine-tuned Qwen2-VL model with AWQ. With more than 8 samples it throws OOM", [], ["forward pass saves"],
            id="what was trained once",
        ),
        pytest.param(
            "CUDA out of memory: I can't run the 65B model in int8 with 4 x RTX A5000 (24GB)", [r"less\s+than\s+4"],
            ["smaller model"], id="a model for several cards",
        ),
        pytest.param(
            "It needs A100, 2x3090, 2x4090, A40 or A6000. With a 3060 the 13B model OOMs", [], ["80.00 GiB", "48.00 GiB"],
            id="cards to choose from",
        ),
        pytest.param(
            'the program crashes due to "OSError: [Errno 12] Cannot allocate memory" after the first evaluation, the validation'
            " process doesn't release the memory", ["errno 12"], ["another process"], id="no process is started",
        ),
        pytest.param(
            'File "ema.py", line 69, in store\n    self.collected_params = [param.clone() for param in parameters]\n'
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 MiB", [r"copy\s+of\s+the\s+weights"],
            ["working memory"], id="a copy of the weights",
        ),
        pytest.param(
            "我使用 4 张 24G 显存的 3090，加载 InternVL2-26B，0卡总是显存溢出，其余卡显存占用极少", [r"not\s+divided"],
            ["KV cache"], id="idle cards in Chinese",
        ),
        pytest.param(
            "The training is OK but when I do evaluation it reports out of memory. I decrease bs16 -> bs8, still out of memory",
            [r"those\s+of\s+training"], ["fewer"], id="a batch and its number in one word",
        ),
        pytest.param(
            "when i change detector.c so that it trains in a loop, the next time my train will be prompted out of memory", [],
            [r"loss\.item", "less at once"], id="a program in C",
        ),
        pytest.param(
            "Training a 70B Reward Model on a single node with 8 H100 96GB OOMs. I'd expect (2+2)*70/8=35 GB per device",
            [r"less\s+than\s+8"], ["likely"], id="a training on several cards",
        ),
        pytest.param(
            "OOMs after training for 120 steps. I lower max_completion_length, but I have to run it multiple times", [],
            ["nvidia-smi over many uses"], id="a run that is started again",
        ),
        pytest.param(
            "[2025-03-07 21:49:33 TP13] Decode out of memory happened. #retracted_reqs: 1, #new_token_ratio: 0.1474 -> 0.1845",
            ["set a request back"], ["working memory"], id="a request that waits",
        ),
        pytest.param(
            "Changing the reference image in the face swap workflow makes OOM, seems there is no cleanup after generation. 16GB VRAM",
            [], ["on the host"], id="a swap of faces",
        ),
        pytest.param(
            "Training Gaussian splatting: out of memory error due to increasing number of gaussian after sometime. I have tried runs by"
            " increasing densification_interval", ["Cap the number"], ["threshold for densifying"], id="a threshold that was tried",
        ),
        pytest.param(
            "Possible memory leak in DQNAgent: my memory balloons quickly and after 30m maxes my system RAM and crashes the script",
            ["RAM"], ["nvidia-smi"], id="RAM is not seen by nvidia-smi",
        ),
        pytest.param(
            'I tried to run "train.lua" but it failed when it tried to load the model: cuda runtime error (2) : out of memory', [],
            ["map_location"], id="a checkpoint in Lua",
        ),
        pytest.param(
            "I test the result on youtube-vos and get CUDA out of memory, 12GB is not enough. Can you tell how much is needed for"
            " test? And training?", [], ["forward pass saves"], id="a question about training",
        ),
        pytest.param(
            "CUDA out of memory with 3.1.1 even at 512x512. In 3.1.0 I could generate 3 images at 1024x1024 without running into"
            " problems", [], ["1024x1024"], id="a size that ran",
        ),
        pytest.param(
            "ComfyUI: out of memory on my 8 GB GPU in the sampler with SDXL. Turning off the preview method suddenly fixed all those problems",
            ["Leave off"], [], id="what the author found",
        ),
        pytest.param(
            "Training LoRAs works, but the dreambooth script runs out of RAM on the first step. I feel like 24GB (7900 XTX) should be"
            " more than enough", ["author reports"], ["on the host"], id="RAM that is the card's",
        ),
        pytest.param(
            "After training some epochs I get CUDA out of memory, 5 epochs were trained successfully",
            ["went\\s+well", "fills bit\\sby bit"], ["Most often"], id="epochs that fitted",
        ),
        pytest.param(
            "LoRA training of SDXL runs out of memory when it generates even one sample: CUDA out of memory\n"
            '  File "train_network.py", line 885, in train\n    self.sample_images(accelerator, args, epoch, vae, unet)\n'
            '  File "library/train_util.py", line 4758, in sample_images_common\n    image = pipeline.latents_to_image(latents)[0]',
            ["one pass does not fit"], ["activations of a step", "A smaller batch for"], id="a sample within the training",
        ),
        pytest.param(
            "swift sft --model_type glm4v-9b-chat --dtype bf16 --gradient_accumulation_steps 1 --eval_steps 50000\nOOM\n"
            'File "swift/trainers.py", line 50, in train res = super().train() File "transformers/trainer.py", line 1938',
            [], ["TrainingArguments"], id="a command has no arguments object",
        ),
        pytest.param(
            "OOM error when loading checkpoint with map_location: if it is saved with 'cuda:0', it is first loaded to cuda:0."
            " During ddp-training all ranks load it to cuda:0, which could cause an OOM error.", ["CPU"], ["smaller model", "do not choose"], id="a checkpoint is no model that is too large",
        ),
        pytest.param(
            "api server 在推理10万次以后报 CUDA runtime error: out of memory，然后服务重启，推理速度恢复正常",
            ["went\\s+well"], ["Another process"], id="a service that restarts",
        ),
        pytest.param(
            "CUDA out of memory when making LoRA\nfound directory 100_A contains 22 image files\n2200 train images with repeating.",
            [], ["image files"], id="pictures on two lines",
        ),
        pytest.param(
            "why does the code not release memory after validation?\nIt allocates about 2GB GPU memory at the first validation,"
            " but does not release them.", ["what is\\sheld rises", "First find out"], ["no longer\\sneeded"], id="a cache or a leak",
        ),
        pytest.param(
            "BatchInference Use too much GPU memory\nWith a batch size of 80 it takes 19GB for Faster Whisper versus 11GB", [],
            ["reports that memory ran out"], id="much that is used has not run out",
        ),
        pytest.param(
            "CUDA out of memory in the viewer\nTrainer.train_iteration: 5.0188\n"
            '  File "viewer_utils.py", line 154, in run\n    outputs = self.graph.get_outputs_for_camera_ray_bundle(bundle)\n'
            '  File "torch/autograd/grad_mode.py", line 27, in decorate_context\n    return func(*args, **kwargs)\n'
            '  File "base_model.py", line 177, in get_outputs_for_camera_ray_bundle\n    outputs = self.forward(ray_bundle=ray_bundle)',
            ["one\\spass"], ["activations of a step"], id="nothing is kept for a backward",
        ),
        pytest.param(
            "Block swap not working: after the update I can't generate 540p, error OOM, i check ram not high as before", ["such\\sreports"],
            ["likely", "possible"], id="RAM that is not full",
        ),
        pytest.param(
            "Fix the JAX quickstart notebook by setting the GPU memory preallocation to false: the trainer runs out of GPU memory",
            ["reserve less"], ["per_process_memory", "Raise the limit"], id="a share that was too large",
        ),
        pytest.param(
            "With 2 GPUs I am only getting OOM with ZeRO 3\nprint(f\"Loading model {model_name}\")\nimport deepspeed", [],
            ["Loading model"], id="code is no statement",
        ),
        pytest.param(
            "Error: vector memory exhausted (limit reached?) when I run IntegrateData in Seurat", ["RAM"], ["nvidia-smi"],
            id="R runs out of RAM",
        ),
        pytest.param(
            "When I train with 2160*3840 images I get CUDA out of memory, how can I tweak the parameters?", [],
            ["microbatch"], id="the size that is named comes first",
        ),
        pytest.param(
            "ComfyUI runs fine the first time, then HIP error: out of memory\n  File \"comfy/sd.py\", line 641, in encode\n"
            '    out = self.first_stage_model.encode(pixels_in)\n  File "comfy/ldm/wan/vae.py", line 325, in forward\n    x = layer(x)',
            ["in the VAE"], ["while sampling"], id="an encoder is no sampler",
        ),
        pytest.param(
            "CUDA out of memory. Tried to allocate 30.52 GiB. GPU 2 has a total capacity of 79.10 GiB of which 14.37 GiB is free."
            " Process 33 has 64.72 GiB memory in use. 79.10 GiB allowed; Of the allocated memory 62.19 GiB is allocated by PyTorch,"
            " and 1.00 GiB is reserved by PyTorch but unallocated.", [], ["limit set for this", "per_process_memory"],
            id="a limit that is all of the device",
        ),
        pytest.param(
            "*** Error in R: malloc(): memory corruption: 0x00000011858a4660 *** at a peak of 200GB of 478", ["not a lack"],
            ["ran out", "nvidia-smi"], id="a damaged heap",
        ),
        pytest.param(
            "Cuda memory usage increases over time. My training process will be killed around 800 epochs due to cuda memory usage",
            [], ["host memory"], id="killed for the device's memory",
        ),
        pytest.param(
            "CUDA out of memory: everything goes fine until the 3rd training epoch", ["went\\s+well"], ["Most often"],
            id="two epochs that fitted",
        ),
        pytest.param(
            "client = Client(cluster)\ndf = dd.read_parquet('*.parquet')\nit fails with 'Worker exceeded 95% memory budget' of 256 GB",
            ["RAM that it was given", "Dask restarted"], ["without a message that", "RAM\\) ran out"], id="a worker's share of the RAM",
        ),
        pytest.param(
            "Out of memory error when using ESM2 for protein embeddings. I saw examples/esm2_infer_fairscale_fsdp_offloading.py, or do"
            " you recommend distributing over multiple GPUs or a bigger GPU?",
            ["one\\spass"], ["activations of a step"], id="a library in a file's name",
        ),
        pytest.param(
            "Our experiments meet CUDA out of memory every 10，000 iterations or even more, on 32g v100",
            ["went\\s+well"], ["Most often", "round number"], id="iterations that fitted",
        ),
        pytest.param(
            "GPU memory usage became near 100% after running one TensorFlow savedmodel in trtserver. I have set"
            " --tf-gpu-memory-fraction=0.1 but it didn't help", ["reserves its share", "as it needs it"], ["Raise the limit"],
            id="a share that is taken in advance",
        ),
        pytest.param(
            "Visual instruction tuning OOM\ndeepspeed --num_gpus=1 train_mem.py --deepspeed zero3.json --bf16 True"
            " --model_name_or_path vicuna-7b-v1.5 on an A100 (80G), per_device_train_batch_size 16", ["optimizer state does not fit"],
            ["Most often"], id="weights fit, and Adam's state does not",
        ),
        pytest.param(
            "When importing craftax functions, my GPU memory immediately fills up for a large part. 60GB are taken on a H100",
            ["reserves its share", "import computes nothing"], ["one pass", "Halve"], id="an import computes nothing",
        ),
        pytest.param(
            "Block swap not working, after update i can't generate 540p error OOM, i check ram not high as before",
            ["from before the update", "Nothing\\s+recognized"], ["memory \\(RAM\\) ran out", "not fit"], id="an update, and RAM that is free",
        ),
        pytest.param(
            "The Whisper model is not GCed, so there is just not enough memory for both the Whisper and the alignment model."
            " A quick solution is to not load all models at the same time.", ["Other models", "Unload"], ["half at once"],
            id="two models at once",
        ),
        pytest.param(
            "I get an OOM error with llama.cpp (Vulkan) and a context of 65000: ggml_gallocr_reserve_n tries to allocate beyond max"
            " buffer size", ["in one buffer", "-ub"], ["-ngl"], id="a buffer beyond the driver's limit",
        ),
        pytest.param(
            "Atari replay buffer won't fit into memory even with LazyFrames", ["uint8", "memory-mapped"], ["keep it in RAM"],
            id="a replay buffer in RAM",
        ),
        pytest.param(
            "vLLM fails before model weights are loaded: the torch environment takes 23 GiB.\ntorch.cuda.OutOfMemoryError: CUDA out of"
            " memory. Tried to allocate 23.04 GiB (GPU 0; 23.52 GiB total; 0 bytes free)", ["before model"],
            ["smaller share", "half at once"], id="before weights are loaded",
        ),
        pytest.param(
            "It works on jax==0.4.13 but fails with an OOM on jax==0.5.3:\nfor ii in range(num_blocks):\n    carry, _ ="
            " jax.remat(lambda c: lax.scan(step_fn, c, indices))(carry)", ["Nothing\\s+recognized"], ["detach"], id="no state of autograd's",
        ),
        pytest.param(
            "predict_system.py with PaddleOCR\nResourceExhaustedError: Fail to alloc memory of 564023296 size, error code is 12. (at"
            " paddle/fluid/memory/detail/system_allocator.cc:66)", ["memory \\(RAM\\) ran out"], ["TensorFlow"], id="Paddle on the CPU",
        ),
        pytest.param(
            "I feed files to the API one by one, but there is a memory leak after 5,000 loops (on a CPU machine with 32G ram):"
            " onnxruntime::BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 14304160000",
            ["one array smaller"], ["CUDAExecution", "keeps memory alive"], id="no leak asks for so much at once",
        ),
        pytest.param(
            "llama-server with gemma3 on an RTX 3060 (12GB): an image causes a CUDA OOM crash, as the vision stack is loaded lazily and"
            " cannot overflow to system ram; because the fit algorithm has otherwise filled vram already, it crashes", [],
            ["RAM\\) ran out"], id="what cannot go to RAM has not filled it",
        ),
        pytest.param(
            "llava: CUDA error: out of memory when providing an image\nllama_new_context_with_model: n_ctx = 2048\nllm_load_tensors: offloaded 6/33 layers to GPU\nmsg=\"Starting"
            " llama main loop\"\n[GIN] 2024/02/23 - 10:01:27 | 200 |    4.0520283s |       127.0.0.1 | POST     \"/api/chat\"",
            ["num_gpu"], ["loaded weights", "-ngl"], id="a server that answered has its weights",
        ),
        pytest.param(
            "my RAM: 421.5/503.5GB available. cv2.error: OpenCV(4.6.0) alloc.cpp:73: error: (-4:Insufficient memory) Failed to allocate"
            " 4672512 bytes in function 'OutOfMemoryError'", ["a limit was reached", "ulimit"], ["array smaller"], id="RAM that was free",
        ),
        pytest.param(
            "Out of memory at v0.1.17 of the ollama docker image, revert to v0.1.14 OK\nllama_new_context_with_model: total VRAM used:"
            " 5207.27 MiB", ["from before the update"], ["-ngl"], id="an older version ran",
        ),
        pytest.param(
            "The warmup is successful: text_generation_router: Setting max batch total tokens to 42768\nWhen sending larger requests"
            " the prefill crashes:\nText_generation_launcher: torch.cuda.OutOfMemoryError: CUDA out of memory.",
            ["grows with the\\s+input"], ["in its warmup"], id="a warmup that went well",
        ),
        pytest.param(
            "In MLX, however, if I delete a reference to an mx.array, there's no way to get the memory back. In pytorch I call"
            " torch.mps.empty_cache() and it will be freed.", ["Activity Monitor"], ["torch.mps"], id="MLX is not PyTorch",
        ),
        pytest.param(
            "On macOS (MPS), memory grows until the kernel kills the process. The shell reports `killed`.\nWith `empty_cache()` called"
            " after each sentence, driver memory stays flat at 6.0 GB", ["Empty the library"], ["collected results"],
            id="a cache that was emptied",
        ),
        pytest.param(
            "t2v OOM full offload on a 12 gb 4070 ti, all model offload. Hunyuan work without problem.", ["Nothing\\s+recognized"],
            ["read as", "low-memory setting"], id="a model that works",
        ),
        pytest.param(
            "Memory usage increases linearly when using DQN, this can cause OOM. I would have expected the plot to plateau once the"
            " replay buffer was full (at 2500 steps), but the memory use continues to increase past this point.",
            ["no longer\\s+needed"], ["replay buffer\\) fills", "buffer smaller"], id="growth past a full buffer",
        ),
        pytest.param(
            "Out of memory while aligning wavs longer than 7 minutes. I am using CPU with 60 GB ram, but that's not enough (cutting"
            " wavs into shorter audios is not an option)", ["a larger\\s+machine"], ["work in parts"], id="a change that is ruled out",
        ),
        pytest.param(
            "GAT with DGL: training is good, the validation would meet out of memory. In validation, each forward would use new memory.",
            ["no longer\\s+needed"], ["smaller batch"], id="new memory in each forward",
        ),
        pytest.param(
            "While training the synthesizer I get an error after 30 steps on average, my GPU ran out of memory. I tried reducing the"
            " batch size to 32 but I'm still getting an error.", ["went\\s+well"], ["optimizer"], id="thirty steps had Adam's state",
        ),
        pytest.param(
            "python3 -m vllm.entrypoints.openai.api_server --model=/fine_tunes/internvl2_76b_finetune --max-model-len=8192\nFirst few"
            " inferences work with no issue. After like 10 calls the server crashes: CUDA out of memory.", ["one pass"],
            ["a reward", "batch size"], id="a server of a model that was trained",
        ),
        pytest.param(
            "pjit uses too much memory: 18b parameters in half-precision give me 36b bytes. My instance has 8 GPUs of 16 GiB and goes out"
            " of memory.", [], ["36 billion"], id="36b bytes are no model",
        ),
        pytest.param(
            "Sharding unable to utilize all RAM/HBM on 8 TPU devices with jax: each shard is limited to half of the memory.", [],
            ["host memory"], id="RAM that cannot be used is not full",
        ),
        pytest.param(
            "import dask.dataframe as dd\ndf = dd.read_table('trainSearchStream.tsv').merge(df_ai).compute()\nMemoryError on 15 GB of RAM",
            ["RAM\\) ran out"], ["memory-mapped"], id="data that are read in parts",
        ),
        pytest.param(
            "CUDA out of memory. Tried to allocate 2.00 GiB on my JAX and torch run, with os.environ['XLA_PYTHON_CLIENT_PREALLOCATE']"
            " = 'false'; JAX still takes 75 % of the memory", [], ["PREALLOCATE"], id="a line that stands there is not proposed",
        ),
    ],
)  # fmt: skip
def test_a_claim_has_its_evidence_in_the_text(text, said, not_said):
    shown = str(explain(text, fast=True, lang="en"))
    assert [word for word in said if not re.search(word, shown)] == []
    assert [word for word in not_said if re.search(word, shown)] == []
