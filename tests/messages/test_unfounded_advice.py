"""What others' texts are advised stays with their programs and machines: no tool, setting or change from elsewhere."""

from __future__ import annotations

import re

import pytest

from oom_magic.explain.explainer import explain

_LARGE = (
    "Tried to allocate 6.74 GiB. GPU 2 has a total capacity of 44.53 GiB of which 3.90 GiB is free. Of the allocated memory"
    " 33.87 GiB is allocated by PyTorch, and 5.73 GiB is reserved by PyTorch but unallocated."
)
_OF_SCORES = (
    "Tried to allocate 1.50 GiB. GPU 3 has a total capacity of 23.53 GiB of which 1.02 GiB is free. Of the allocated memory"
    " 20.95 GiB is allocated by PyTorch, and 1.05 GiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("text", "said", "not_said"),
    [
        pytest.param(
            "CUDA out of memory while predicting. Resizing the images to 100x100 didn't help.", [], ["smaller inputs"],
            id="sizes that were made smaller in vain",
        ),
        pytest.param(
            "Whisper: CUDA out of memory. I also tried different model sizes and a smaller model, still the same.", [],
            ["smaller model"], id="other models were tried",
        ),
        pytest.param(
            "GPU memory increases with every request until it is full, I am on the latest version of the server", [],
            ["newer version"], id="the newest version",
        ),
        pytest.param(
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 11.17 GiB total capacity; 506.00"
            " MiB already allocated; 12.50 MiB free; 530.00 MiB reserved in total by PyTorch). I already killed all python"
            " processes.", ["fuser"], ["Close the other programs"], id="others that were closed",
        ),
        pytest.param(
            "koboldcpp runs out of memory: CUDA out of memory. Can the context use less, other than reducing the context size or the"
            " layer count?", [], ["n_gpu_layers", "fewer layers", "shorter context"], id="what an author excludes, in his words",
        ),
        pytest.param(
            "The resnet leaks memory:\n```python\nwith torch.no_grad():\n    for i in range(100):\n        out = net(img)\n```\nGPU"
            " memory increases with each iteration while I train", [], ["losses.append"], id="a line that the code does not have",
        ),
        pytest.param(
            "I upgraded to colab pro to have more RAM. After an upgrade to colab pro+ the runtime still crashes, out of RAM", [],
            ["from before the update"], id="a larger machine is no update",
        ),
        pytest.param(
            "I don't get OOM with Q8 Flux in ComfyUI. CUDA out of memory on my 3060 when the image is decoded", [], ["ComfyUI"],
            id="the program that works",
        ),
        pytest.param(
            "CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc((void**) &deviceBufferPtr, n)\nRuntimeError: CUDA failure 2:"
            " out of memory", [], ["NCCL", "Not a lack"], id="a failure of CUDA without NCCL",
        ),
        pytest.param(
            "JAX remat uses lots of memory on a colab TPU when compiled with JIT", [], ["PREALLOCATE", "reserves its share"],
            id="nothing is taken of a TPU in advance",
        ),
        pytest.param(
            "It throws an error after a few minutes, when it exhausts the available RAM of GPU", [], ["not GPU memory"],
            id="RAM of the GPU",
        ),
        pytest.param(
            "GPU out of memory: sess.run(tf.global_variables_initializer())\nResourceExhaustedError: OOM when allocating tensor"
            " with shape[25088,4096]", ["model's\\s+weights|no\\s+room"], ["ctivations"], id="TensorFlow makes its variables",
        ),
        pytest.param(
            'Getting OOM when trying to train a flux lora on a 4060: "ae": "/home/o/ComfyUI/models/vae/ae.sft"', ["fewer bits"],
            ["ComfyUI", "VAE", "picture"], id="a folder of models",
        ),
        pytest.param(
            "When training pv-rcnn out of memory occurs. It happened several times: GPUassert: out of memory iou3d_nms.cpp 103",
            ["Nothing\\s+recognized"], ["keeps memory alive", "memory is not released"], id="it happened several times",
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
            "Level Zero cannot create an NPU command queue (ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY) on Windows 11", ["not GPU memory"],
            ["xpu-smi", "inputs"], id="a driver's own memory",
        ),
        pytest.param(
            "llama-3.1-8b\nfinetuning_type: lora\ncutoff_len: 15000\nper_device_train_batch_size: 1\nbf16: true\n"
            f"CUDA out of memory. {_LARGE}", ["Shorter sequences"], ["recompute", "fewer", "No common tensor"],
            id="a program that recomputes by itself",
        ),
        pytest.param(
            "I fine-tune qwen2.5-1.5b with flash_attn: fa2, cutoff_len: 16384, per_device_train_batch_size: 4\n"
            f"CUDA out of memory. {_OF_SCORES}", ["Shorter sequences"], ["attention scores", "seq 65536"],
            id="a kernel that stores no scores",
        ),
        pytest.param(
            "tune run lora_finetune_distributed: training goes OOM after 15%\ndtype: bf16\nenable_activation_checkpointing: True",
            [], ["autocast", "recompute"], id="settings of a recipe",
        ),
        pytest.param(
            "I try to transcribe a 3-hour audio with NeMo: CUDA out of memory. Tried to allocate 91.71 GiB. GPU 0 has a total"
            " capacity of 79.11 GiB of which 73.15 GiB is free.", ["3-hour audio"], ["larger than intended"], id="it is so long",
        ),
        pytest.param(
            "(raylet) node_manager.cc:3069: 1 Workers (tasks / actors) killed due to memory pressure (OOM) while computing log"
            " probs of a llama", ["num_cpus"], ["memory-mapped", "streamed"], id="no data is read",
        ),
        pytest.param(
            "GRPO of Qwen2.5-3B: the device for vllm goes OOM when loading weights. I used two GPUs with 32GB\nuse_vllm: true\n"
            "vllm_gpu_memory_utilization: 0.8\nload_in_4bit: true\nbf16: true", ["vllm_gpu_memory"],
            ["do not fit on the device\\. \\(Conf", "device_map", "bf16"], id="weights that fit many times",
        ),
        pytest.param(
            "tabbyAPI, RTX 3090 with 24 GB VRAM: --model-name QwQ-32B-exl2_4.65bpw, OOM when I load the model",
            ["max_seq_len"], ["59", "share", "AWQ"], id="bits per weight",
        ),
        pytest.param(
            "python -m sglang.launch_server\nPrefill batch. #new-seq: 17, #new-token: 13938\nmanagers/tp_worker.py, line 258, in"
            " forward_prefill_batch\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 764.00 MiB. GPU 0 has a total"
            " capacity of 22.19 GiB of which 391.50 MiB is free. Of the allocated memory 20.92 GiB is allocated by PyTorch, and"
            " 581.11 MiB is reserved by PyTorch but unallocated.", ["mem-fraction-static"],
            ["88 %", "weights do not fit", "context-length"], id="a server that answers has its weights",
        ),
        pytest.param(
            "我采用FSDP在4 x A100 40G上对Qwen2-7B进行全参数微调，从检查点继续训练就出现OOM的问题\n--finetuning_type full --cutoff_len 1024",
            ["heckpoint"], ["Shorter", "torch.load\\(path"], id="a checkpoint is no advice to check",
        ),
        pytest.param(
            "I train llama-7b with accelerate on NVIDIA L40S\nfsdp_offload_params: true\nfsdp_sharding_strategy: FULL_SHARD\n"
            "num_processes: 8\nmixed_precision: bf16\n"
            '  File "torch/distributed/fsdp/_init_utils.py", line 594, in _init_param_handle_from_module\n'
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 25.10 GiB. GPU 3 has a total capacity of 44.32 GiB of"
            " which 18.40 GiB is free. Of the allocated memory 25.10 GiB is allocated by PyTorch, and 12.05 MiB is reserved by"
            " PyTorch but unallocated.", ["no\\s+room\\s+for\\s+the\\s+model"], ["8-bit", "Shard the model"], id="sharded already",
        ),
        pytest.param(
            "I fine-tune unsloth/llama-3-8b-bnb-4bit, max context length of 18000\nBatch size per device = 2\nTotal batch size = 8\n"
            "accelerate/utils/operations.py in _convert_to_fp32(tensor)\n    780     def _convert_to_fp32(tensor):\n"
            "--> 781         return tensor.float()\n    782 \n    783     def _is_fp16_bf16_tensor(tensor):\n"
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 9.47 GiB", ["return tensor.float", "logits", "--batch 2"],
            ["def _is_fp16", "bf16 \\(autocast", "optimizer state does not fit"], id="the line that the arrow marks",
        ),
        pytest.param(
            "Training works, validation fails with a CUDA out of memory error (unsloth, Colab). It sets"
            " per_device_eval_batch_size to 1 and eval_accumulation_steps=1", ["prediction_loss_only"],
            ["eval_accumulation_steps=1\n", "collects the logits", "Smaller batches", "no_grad"], id="settings of an evaluation",
        ),
        pytest.param(
            "flux lora with diffusion-pipe, blocks_to_swap = 20: RAM fills to 100% and it is killed\nexits with return code = -9",
            ["fewer blocks"], ["work in parts"], id="blocks in RAM",
        ),
        pytest.param(
            "DataLoader(test_ds, batch_size=1, num_workers=1)\nRuntimeError: DefaultCPUAllocator: can't allocate memory: you tried"
            " to allocate 29491200000 bytes. Error code 12", ["this one array smaller"], ["Fewer worker"], id="one worker",
        ),
        pytest.param(
            "BERT run_classifier.py --max_seq_length=128 --train_batch_size=32\nOOM when allocating tensor with shape[4096,1024] and"
            " type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc", ["32 x 128"],
            ["layer's weights", "weights do not fit"], id="a row for each token",
        ),
        pytest.param(
            "python train.py --conf configs/gan.yaml: it fails after 2000 iterations. I tried empty_cache()\nRuntimeError:"
            " CUDA out of memory. Tried to allocate 200.00 MiB (GPU 0; 23.70 GiB total capacity; 18.17 GiB already allocated;"
            " 120.56 MiB free; 22.21 GiB reserved in total by PyTorch)", ["round number of steps"],
            ["enumerate", "does not mention this", "differ in size"], id="a round number of steps",
        ),
        pytest.param(
            'File "sdxl_train.py", line 628, in train\n    optimizer.step()\nFile "torch/optim/adamw.py", line 125, in _init_group\n'
            '    state["exp_avg_sq"] = torch.zeros_like(\ntorch.cuda.OutOfMemoryError: CUDA out of memory.',
            ["exp_avg_sq", "8-bit"], ["foreach"], id="state that is being made",
        ),
        pytest.param(
            "xgboost with gpu_hist, the kernel died: what():  /workspace/src/predictor/../common/device_helpers.cuh(523): out of"
            " memory", ["GPU memory"], ["Host memory", "Free RAM"], id="XGBoost's message",
        ),
        pytest.param(
            "lmdeploy turbomind在3090上跑internlm-7b，load完模型还有9个GB，并发8就CUDA runtime error: out of memory",
            ["cache_max_entry_count"], ["AWQ", "smaller share"], id="a cache of its own",
        ),
        pytest.param(
            "text-generation-launcher --quantize, 16 GB of RAM: loading all shards to CPU memory first occupies 40GB, Killed",
            ["not GPU memory"], ["AWQ", "whole data set"], id="shards are no data set",
        ),
        pytest.param(
            "GPU 0 is fully used by another user's job. CUDA error 2: cudaErrorMemoryAllocation - out of memory", ["Another process"],
            ["ended or", "fewer, shorter"], id="another's job",
        ),
        pytest.param(
            "I can train the sdxl with a 3090 but not on 2 GPUs: CUDA out of memory\nnetwork_train_unet_only = true\n"
            'train_batch_size = 1\nmixed_precision = "bf16"\ngradient_checkpointing = true', ["one\\sstep\\scomputes"],
            ["not a training", "VAE", "smaller microbatch"], id="training of what makes pictures",
        ),
        pytest.param(
            "ollama run qwen2.5-coder:32b with a 128k context on my 24GB card. OLLAMA_KV_CACHE_TYPE=q8_0. With 32k it loads.\n"
            "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 17716740096", ["num_ctx"],
            ["8-bit KV cache"], id="a cache in 8 bits",
        ),
        pytest.param(
            'CogVideoX-5b on a 3080 10GB\npipe.enable_model_cpu_offload()\npipe.vae.enable_tiling()\n  File "diffusers/models/'
            'autoencoders/autoencoder_kl_cogvideox.py", line 1216, in decode\n    decoded = self._decode(z).sample\n'
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.30 GiB. GPU 0 has a total capacity of 9.77 GiB of"
            " which 1.11 GiB is free.", ["VAE", "fewer frames"], ["tiles", "Keep each layer"], id="tiles already",
        ),
        pytest.param(
            "vllm: To serve at least one request with the models's max seq len (40960), (6.25 GiB KV cache is needed, which is"
            " larger than the available KV cache memory (5.12 GiB). Based on the available memory, the estimated maximum model"
            " length is 33536.", ["--max-model-len 33536"], ["LESS"], id="the length that vLLM estimates",
        ),
        pytest.param(
            'GRPO of a 7b model with accelerate launch: OOM when init self.vllm\n[rank0]:   File "/opt/x/site-packages/vllm/worker/'
            'cache_engine.py", line 72, in _allocate_kv_cache\n[rank0]:     layer_kv_cache = torch.zeros(kv_cache_shape,\n[rank0]:'
            " torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. GPU 7 has a total capacity of 79.33 GiB of"
            " which 1.28 GiB is free. Of the allocated memory 77.30 GiB is allocated by PyTorch, and 61.52 MiB is reserved by"
            " PyTorch but unallocated.\nuse_vllm: true\nvllm_gpu_memory_utilization: 0.9\nbf16: true",
            ["\\(vllm_gpu_mem"], ["logits", "verl"], id="a line that names the cache",
        ),
        pytest.param(
            "nnUNetv2_train validation: predicting case_196_0031\nRuntimeError: Some background workers are no longer alive",
            ["no\\slonger alive", "Fewer worker"], ["RAM\\) ran out; it"], id="killed is not a word about RAM",
        ),
        pytest.param(
            "MAC MINI M4, ComfyUI, sd3.5_large\n- **Node Type:** KSampler\nMPS backend out of memory (MPS allocated: 16.91 GB, other"
            " allocations: 2.77 MB, max allowed: 18.13 GB). Tried to allocate 1.28 GB on private pool.", ["smaller model"],
            ["fp8", "lowvram"], id="what does nothing on a Mac",
        ),
        pytest.param(
            "axolotl crashes at the end of training, checkpoints work: failed (exitcode: -9) local_rank: 0\nfsdp_config:\n"
            "  fsdp_offload_params: true\n  fsdp_state_dict_type: FULL_STATE_DICT\n", ["SHARDED_STATE_DICT"], ["NVMe"],
            id="DeepSpeed's words for FSDP",
        ),
        pytest.param(
            "python -m sglang.launch_server --tp 8 --mem-fraction-static 0.85 --enable-torch-compile. I have tried modifying"
            " cuda-graph-max-bs and mem-fraction-static, but none worked.\nException: Capture cuda graph failed: CUDA out of memory."
            " Tried to allocate 13.50 GiB. GPU 3 has a total capacity of 139.81 GiB of which 9.12 GiB is free. Process 2911 has"
            " 130.66 GiB memory in use. Of the allocated memory 127.90 GiB is allocated by PyTorch, and 402.11 MiB is reserved by"
            " PyTorch but unallocated.", ["Start without\\s+--enable-torch-compile"],
            ["Another process", "smaller share"], id="all of the device is this process",
        ),
        pytest.param(
            "GRPO训练一段时间后显存不足，请问是显存泄漏吗？\nswift rlhf --rlhf_type grpo --train_type full --torch_dtype bfloat16"
            " --per_device_train_batch_size 1 --deepspeed zero3\nCUDA out of memory. Tried to allocate 3.47 GiB. GPU 1 has a total"
            " capacity of 79.15 GiB of which 2.60 GiB is free. Of the allocated memory 71.85 GiB is allocated by PyTorch, and 3.30"
            " GiB is reserved by PyTorch but unallocated.", ["went\\s+well"], ["keeps growing", "losses"],
            id="a leak that is only asked about",
        ),
        pytest.param(
            "Flux Dreambooth/finetune 在4090 24GVRAM上爆显存，底模使用的flux.1-dev，kohya_ss，batch_size为1\nCUDA out of memory. Tried to"
            " allocate 90.00 MiB. GPU 0 has a total capacity of 23.64 GiB of which 41.75 MiB is free. Of the allocated memory"
            " 23.19 GiB is allocated by PyTorch, and 5.97 MiB is reserved by PyTorch but unallocated.", ["blocks_to_swap"],
            ["autocast", "device_map", "Run it in"], id="the settings of a program that trains",
        ),
        pytest.param(
            "[/usr/local/lib/python3.10/dist-packages/torch_geometric/nn/conv/gat_conv.py] in message(self, x_j, alpha)\n    308 \n"
            "    309     def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:\n--> 310         return alpha.unsqueeze(-1) * x_j\n"
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 10.44 GiB (GPU 0; 14.75 GiB total capacity; 11.02 GiB already"
            " allocated; 2.79 GiB free; 11.06 GiB reserved in total by PyTorch)", ["NeighborLoader"], ["weights do not fit"],
            id="the edges of a graph",
        ),
        pytest.param(
            "ResourceExhausted at the last fold of a K-fold cross-validation, whatever K is\nmodel = build_model(NUM_CLASSES)\n"
            "history = model.fit_generator(train_generator, epochs=NUM_EPOCHS)\nResourceExhaustedError:  OOM when allocating tensor"
            " with shape[3,3,2048,2048] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
            ["process of its own"], ["smaller model"], id="one model after the other",
        ),
        pytest.param(
            "I train a U-Net on medical images, CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 11.91 GiB total capacity;"
            " 10.96 GiB already allocated; 212.00 MiB free; 11.04 GiB reserved in total by PyTorch)",
            ["still\\soff"], ["loader", "with torch.autocast"], id="no code is shown to prose",
        ),
        pytest.param(
            "TXT2IMG with Hires.fix, stable-diffusion-webui: CUDA out of memory. Tried to allocate 426.00 MiB (GPU 0; 23.99 GiB total"
            " capacity; 4.43 GiB already allocated; 17.81 GiB free; 4.56 GiB reserved in total by PyTorch) If reserved memory is >>"
            " allocated memory try setting max_split_size_mb to avoid fragmentation.", ["device had free memory"], ["tip"],
            id="a tip where enough is free",
        ),
        pytest.param(
            "PaddleOCR tools/train.py，batch_size设置为1时，也无法启动训练\nOut of memory error on GPU 0. Cannot allocate 128.000000MB memory on"
            " GPU 0, 7.995605GB memory has been allocated and available memory is only 0.000000B.", ["half\\s+as\\s+long"],
            ["batch: fewer", "fewer, shorter"], id="a batch of one in Chinese",
        ),
        pytest.param(
            "训练时内存逐渐变大，最后被kill掉了 RuntimeError: DataLoader worker (pid 3979007) is killed by signal: Killed.\n"
            "在多卡训练时内存会持续增大，无论num_worker和batchsize设为多少都不行", ["内存"], ["Fewer worker"],
            id="workers that were tried in vain",
        ),
        pytest.param(
            "vllm serve openai/gpt-oss-120b --max-model-len 131072 --gpu-memory-utilization 0.95\nRuntimeError: CUDA out of memory"
            " occurred when warming up sampler with 1024 dummy requests. Please try lowering `max_num_seqs`",
            ["--max-num-seqs 512"], ["max-model-len"], id="the sampler's trial",
        ),
        pytest.param(
            'pipe = DiffusionPipeline.from_pretrained(\n    "Qwen-Image", torch_dtype=torch.bfloat16\n).to(\'cuda\')\n'
            "pipe.enable_model_cpu_offload()\nOutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has a total"
            " capacity of 15.89 GiB of which 137.12 MiB is free.", ["Remove .to"], ["sequential"], id="moved before it is offloaded",
        ),
        pytest.param(
            "Jul 24 vega ollama[114917]: llm_load_tensors: offloaded 29/33 layers to GPU\nJul 24 vega ollama[114917]: llama runner"
            " started in 6.54 seconds\nJul 24 vega ollama[114917]: CUDA error: out of memory\n  ggml_cuda_device_malloc(&ptr,"
            " look_ahead_size, device)", ["num_gpu", "at its first computation"], ["llama-server", "while it loaded"], id="Ollama's own lines",
        ),
        pytest.param(
            "RAM usage increases every epoch until the process is killed. num_workers=0\nfor batch in loader:\n    pass\n"
            "[EPOCH 0] Allocated: 0.00 MB, CPU: 955.15 MB\n[EPOCH 1] Allocated: 0.00 MB, CPU: 1264.15 MB", ["usage\\s+increases"],
            ["Free RAM", "about DataLoader workers"], id="RAM that grows without workers",
        ),
        pytest.param(
            "I ran the inference with vjepa2 on igpu, about 15GB memory was still in use after the termination. torch.OutOfMemoryError:"
            " XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 13.74 GiB. Of the allocated memory 10.10"
            " GiB is allocated by PyTorch, and 3.47 GiB is reserved by PyTorch but unallocated.\n    with torch.no_grad():\n        out ="
            " model(x)", ["working memory of one pass"], ["without it, inference", "lists them"], id="gradients are off",
        ),
        pytest.param(
            "deepspeed, pretrain_codegeex.py of a 10B model on 4 A100\n"
            '  File "/opt/conda/lib/python3.8/site-packages/deepspeed/runtime/engine.py", line 1082, in _configure_optimizer\n'
            "    self.optimizer = self._configure_zero_optimizer(basic_optimizer)\nRuntimeError: CUDA out of memory. Tried to allocate"
            " 9.60 GiB (GPU 1; 79.35 GiB total capacity; 57.61 GiB already allocated; 8.03 GiB free; 69.15 GiB reserved in total by"
            " PyTorch)\nwith cpu offload the process exits with return code = -9", ["ZeRO-3"], ["LoRA", "offload_optimizer"],
            id="a pretraining",
        ),
        pytest.param(
            "I could usually generate 2048x2048 images, now not even 1024x1024: CUDA out of memory. Tried to allocate 16.00 GiB (GPU"
            " 0; 47.99 GiB total capacity; 18.36 GiB already allocated; 10.48 GiB free; 34.29 GiB reserved in total by PyTorch)\n"
            "Time taken: 5.53s Torch active/reserved: 35120/35224 MiB, Sys VRAM: 38455/49140 MiB", ["1024x1024 has 16384", "xformers"],
            ["65536"], id="the smaller picture failed",
        ),
        pytest.param(
            "it fails when I generate an image: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 6.00 GiB total capacity;"
            " 5.26 GiB already allocated; 0 bytes free; 5.33 GiB reserved in total by PyTorch)\nlaunch.py with args --xformers"
            " --opt-split-attention --precision full --no-half", ["medvram"], ["AWQ", "device_map"], id="a web UI by its options",
        ),
        pytest.param(
            "Standalone Faster-Whisper running on: CUDA, --model=large-v2\nFile \"faster_whisper\\transcribe.py\", line 125, in init\n"
            "RuntimeError: CUDA failed with error out of memory", ["int8"], ["numel"], id="no code to count parameters in",
        ),
        pytest.param(
            "my training pod is OOMKilled after 2 epochs (exit code 137). resources.limits.memory: 32Gi\nclass MyData(Dataset):\n"
            "    pass\nloader = DataLoader(MyData(), batch_size=32, num_workers=8)", ["Fewer worker", "num_workers=4"], [],
            id="workers in a pod",
        ),
        pytest.param(
            "ResourceExhaustedError after several iterations in a grid search with talos\nOOM when allocating tensor with"
            " shape[64,64,240,240] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
            ["process of its own"], ["score"], id="a feature map",
        ),
        pytest.param(
            "vllm serve meta-llama/Llama-3.3-70B-Instruct --tensor-parallel-size 4 --enable-lora --max-loras 8\n"
            'File "/x/dist-packages/vllm/lora/layers/base_linear.py", line 71, in create_lora_weights\n'
            "    self.lora_b_stacked = tuple(torch.zeros(\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB."
            " GPU 0 has a total capacity of 79.25 GiB of which 150.94 MiB is free.", ["max-loras"], ["130", "feed-forward"],
            id="adapters of a server",
        ),
        pytest.param(
            "用 vllm-ascend 部署 Qwen2.5-VL-7B，发一张 4096x4096 的图就挂：NPU out of memory. Tried to allocate 31.64 GiB (NPU 0; 60.97 GiB total"
            ' capacity; 52.21 GiB already allocated; 6.92 GiB free; 53.02 GiB reserved in total by PyTorch)\n  File "/x/site-packages/'
            'vllm/model_executor/models/qwen2_5_vl.py", line 652, in forward\n    x = attn(x)\nvllm serve Qwen2.5-VL --max-model-len'
            " 32768", ["Send smaller"], ["quantized"], id="one large picture",
        ),
        pytest.param(
            "Device: 2*A100 40GB\ntrainer = GRPOTrainer(model=model, args=training_args, train_dataset=dataset)\ntrainer.train()\n"
            '  File "/opt/x/site-packages/accelerate/utils/operations.py", line 794, in _convert_to_fp32\n    return tensor.float()\n'
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 5.41 GiB. GPU 0 has a total capacity of 39.39 GiB of"
            " which 3.02 GiB is free.", ["TrainingArguments"], ["optimizer.step", "chunk_loss"], id="a Trainer that the author calls",
        ),
        pytest.param(
            "./llama-server -m Qwen2.5-Coder-32B-Instruct-Q4_K_M.gguf -ngl 99 -c 32768\nggml_cuda.cu:70: ROCm error: out of memory\n"
            "  hipMalloc(&ptr, look_ahead_size)", ["at its first computation"], ["quotes no message"], id="ROCm's message",
        ),
        pytest.param(
            "Resource exhausted when training in loop: five TFBert models one after the other, the third fails\nOOM when allocating"
            " tensor with shape[16,12,512,512] and type float on /job:localhost/device:GPU:0 by allocator GPU_0_bfc [Op:Softmax]",
            ["process of its own"], ["A smaller batch"], id="models in a loop",
        ),
        pytest.param(
            "RTX 4060 8GB, WSL2, yolo train model=yolo11x.pt imgsz=1280 batch=8\nCUDA out of memory. Tried to allocate 400.00 MiB. GPU"
            " 0 has a total capacity of 8.00 GiB of which 0 bytes is free. Of the allocated memory 18.02 GiB is allocated by"
            " PyTorch, and 612.00 MiB is reserved by PyTorch but unallocated.", ["smaller microbatch|smaller inputs"], ["optimizer state in bf16"],
            id="weights of a program's own",
        ),
        pytest.param(
            "#SBATCH --mem=16000\nslurmstepd: error: Detected 1 oom-kill event(s) in StepId=938.batch cgroup.",
            [r"--mem=31G   # now 15\.625"], ["less at once"], id="Slurm counts in MiB",
        ),
        pytest.param(
            "model.init fails: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 34359738368 bytes.\nBufferAssignment stats:\n"
            "   parameter allocation:         0B\n   maybe_live_out allocation:    4.00GiB\n   preallocated temp allocation:   28.00GiB",
            ["out_shardings"], ["less at once", "results of the computation"], id="JAX makes weights",
        ),
        pytest.param(
            "vllm serve Qwen/Qwen3-32B --gpu-memory-utilization 0.72\nError in request: CUDA out of memory. Tried to allocate 3.74 GiB."
            " GPU 0 has a total capacity of 139.81 GiB of which 3.68 GiB is free. Including non-PyTorch memory, this process has"
            " 11.35 GiB memory in use. Process 174 has 124.75 GiB memory in use. Of the allocated memory 7.01 GiB is allocated by"
            " PyTorch, and 3.98 GiB is reserved by PyTorch but unallocated.", ["whose the other process", "0.62"], ["kill <PID>"],
            id="a server's own processes",
        ),
        pytest.param(
            "4090 爆显存\nload StableDiffusion checkpoint: F:/sd-webui-aki-v4.4/models/Stable-diffusion/sd_xl_base_1.0.safetensors\n"
            "number of trainable parameters: 2567463684\nuse 8-bit AdamW optimizer", ["38.26 GiB"], ["medvram", "tiles", "SGD none"],
            id="a folder's name is no program",
        ),
        pytest.param(
            "I use Open WebUI with ollama run dolphin-mixtral\nCUDA error: out of memory current device: 0, in function alloc\n"
            "cudaMalloc((void **) &ptr, look_ahead_size)", ["num_gpu"], ["image", "tiles"], id="Open WebUI makes no pictures",
        ),
        pytest.param(
            "It runs out of memory on my GPU after an update. I did not change resolution or frame count. --disable-pinned-memory fixes it,"
            " ComfyUI", ["disable-pinned-memory"], ["lowvram", "smaller inputs do not help"], id="what did not change was not tried",
        ),
        pytest.param(
            "cuda out of memory when I train my data with batch_size==1.", ["once\\s+the\\s+model\\s+is\\s+loaded"], ["batch: if", "microbatch"],
            id="a batch of one at the sentence's end",
        ),
        pytest.param(
            "I always get this error when running the demo code multiple times with a tiny image\nRuntimeError: CUDA out of memory. Tried"
            " to allocate 60.00 MiB (GPU 0; 3.95 GiB total capacity; 708.35 MiB already allocated; 111.00 MiB free; 742.00 MiB reserved in"
            " total by PyTorch)", ["Another process holds"], ["losses.append", "keeps memory alive"], id="others hold most of it",
        ),
        pytest.param(
            "transcribe fails now and then on a card of 24 GB\n  File \"/x/faster_whisper/transcribe.py\", line 584, in inference\n    result ="
            " self.model.generate(\nRuntimeError: CUDA failed with error out of memory", ["int8"], ["no_grad", "torch.cuda"],
            id="no PyTorch computes there",
        ),
        pytest.param(
            "GPU memory usage is 62GB with DDP. When switching to deepspeed stage_2, the memory usage increases significantly and it runs out"
            " of memory. I train a LoRA on 720p videos.", ["one\\s(?:pass|step)\\scomputes"], ["keeps memory alive", "Shorter sequences", "--model"],
            id="two settings compared are no growth",
        ),
        pytest.param(
            "OOM in the middle of training an inception net, batch size is 256\nI bfc_allocator.cc:702] Stats:\nLimit:   12049707828\nInUse:"
            "   11984328960\nW Ran out of memory trying to allocate 39.81MiB.\nResource exhausted: OOM when allocating tensor with"
            " shape[256,832,7,7]", ["11.16 GiB of the 11.22 GiB"], ["Another process", "come late"], id="TensorFlow's own statistics",
        ),
        pytest.param(
            "Training is fine from scratch, but when I resume from the checkpoint, cuda is out of memory. deeplabv3_plus.yaml",
            ["map_location"], ["must not increase", "fewer bits", "weights do not fit"], id="a checkpoint beside the model",
        ),
        pytest.param(
            "keras: predict on large datasets throws OOM on the GPU, it seems all the predictions are kept in GPU memory. In chunks it works",
            ["collect\\s+them\\s+in\\s+RAM"], ["process of its own", "clear_session"], id="one model in TensorFlow",
        ),
        pytest.param(
            "I played a lot with the batch size, nothing seemed to fix it.\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to"
            " allocate 50.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 0 bytes is free. Of the allocated memory 14.21 GiB is"
            " allocated by PyTorch, and 419.64 MiB is reserved by PyTorch but unallocated.", ["each input smaller"],
            ["batch", "bf16", "fewer bits"], id="a cause's own sentence repeats nothing tried",
        ),
        pytest.param(
            "Flux full fine-tuning on a 4090 24 GB: CUDA out of memory with flux.1-dev, batch size 1", ["block swap"],
            ["fewer bits", "LoRA"], id="weights that are trained are not frozen",
        ),
        pytest.param(
            "Training a LoRA of flux.1-dev on a 3090 24 GB, batch size 1: CUDA out of memory", ["frozen weights with\\s+fewer bits"],
            ["If only an adapter"], id="weights beside an adapter are frozen",
        ),
        pytest.param(
            "fine tuning 7b - CUDA out of memory\nThanks for the amazing implementation of long text inference. I can train the small"
            " stage fine, but the supervised fine tuning fails with per_device_train_batch_size=1.", ["once\\s+the\\s+model\\s+is\\s+loaded"],
            ["long text"], id="a title that names a training",
        ),
        pytest.param(
            "CUDA out of memory, I would like to support long videos in the future.\nThe demo fails on a 3090.", ["most\\soften"],
            ["mentions large inputs"], id="what is planned has not failed",
        ),
        pytest.param(
            "微调时总是显示 CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.67 GiB total capacity; 23.15 GiB already"
            " allocated; 10.25 MiB free; 23.27 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting"
            " max_split_size_mb to avoid fragmentation.，而且无论怎么调低分辨率都会爆显存", ["most\\soften"],
            ["resolution", "smaller inputs"], id="tried in the same sentence as the message",
        ),
        pytest.param(
            "It trains on a smaller dataset with 1000 images, but with 100k images (same size as before) it goes out of memory: the GPU"
            " memory increases until then.", ["memory\\s+increases"], ["which size runs"], id="a larger dataset is no larger step",
        ),
        pytest.param(
            "My video workflow in ComfyUI gives OOM on a 4070TI 12GB", ["most\\soften"], ["If so", "tiles", "lowvram"],
            id="a guess has no advice",
        ),
        pytest.param(
            '训练时显卡显示内存溢出，batch_size=8',
            ['author reports'], ['host memory', 'RAM ran out'],
            id="the card's memory in Chinese",
        ),
        pytest.param(
            'I get continuous out of memory errors, GPU 16GB, even for a single image in the forward pass. Is there a memory leak somewhere?',
            ['one\\spass'], ['keeps growing'],
            id='a leak is asked about',
        ),
        pytest.param(
            'updater_gpu_hist.cu:784: Exception in gpu_hist: Memory allocation error on worker 0: std::bad_alloc: cudaErrorMemoryAllocation: out of memory\n- Free memory: 8126464\n- Requested memory: 33554432\nxgboost/lib/libxgboost.so',
            ['32.00 MiB'], ['single tensor is larger', 'shapes on the failing line'],
            id='XGBoost prints sizes',
        ),
        pytest.param(
            '在训练一定次数后进行验证时，模型突然爆出 out of memory，之前验证都是正常的，显存暴增',
            ['possibl'], ['likely', 'Another\\sprocess'],
            id='earlier evaluations went well',
        ),
        pytest.param(
            'Fine-tune mistral with the Trainer on nyu_epochs-v2 weights: the GPU is out of memory when loading: CUDA out of memory',
            [], ['epochs'],
            id="a model's name",
        ),
        pytest.param(
            'llama.cpp: ggml_backend_cuda_buffer_type_alloc_buffer: allocating 8432.00 MiB on device 0: cudaMalloc failed: out of memory\ngraph_reserve: failed to allocate compute buffers',
            [], ['training'],
            id='compute buffers',
        ),
    ],
)  # fmt: skip
def test_advice_is_of_the_text(text, said, not_said):
    shown = str(explain(text, fast=True, lang="en"))
    assert [word for word in said if not re.search(word, shown)] == []
    assert [word for word in not_said if re.search(word, shown)] == []
