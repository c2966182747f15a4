"""What others' texts are advised stays with their programs: no tool or setting of another."""

from __future__ import annotations

import re

import pytest

from oom_magic.explain.explainer import explain

_LARGE = (
    "Tried to allocate 6.74 GiB. GPU 2 has a total capacity of 44.53 GiB of which 3.90 GiB is free. Of the allocated memory"
    " 33.87 GiB is allocated by PyTorch, and 5.73 GiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("text", "said", "not_said"),
    [
        pytest.param(
            "Whisper: CUDA out of memory. I also tried different model sizes and a smaller model, still the same.", [],
            ["smaller model"], id="other models were tried",
        ),
        pytest.param(
            "koboldcpp runs out of memory: CUDA out of memory. Can the context use less, other than reducing the context size or the"
            " layer count?", [], ["n_gpu_layers", "fewer layers", "shorter context"], id="what an author excludes, in his words",
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
            "JAX remat uses lots of memory on a colab TPU when compiled with JIT", [], ["PREALLOCATE", "reserves its share"],
            id="nothing is taken of a TPU in advance",
        ),
        pytest.param(
            'Getting OOM when trying to train a flux lora on a 4060: "ae": "/home/o/ComfyUI/models/vae/ae.sft"', ["fewer bits"],
            ["ComfyUI", "VAE", "picture"], id="a folder of models",
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
            "Level Zero cannot create an NPU command queue (ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY) on Windows 11", ["not GPU memory"],
            ["xpu-smi", "inputs"], id="a driver's own memory",
        ),
        pytest.param(
            "llama-3.1-8b\nfinetuning_type: lora\ncutoff_len: 15000\nper_device_train_batch_size: 1\nbf16: true\n"
            f"CUDA out of memory. {_LARGE}", ["Shorter sequences"], ["recompute", "fewer", "No common tensor"],
            id="a program that recomputes by itself",
        ),
        pytest.param(
            "GRPO of Qwen2.5-3B: the device for vllm goes OOM when loading weights. I used two GPUs with 32GB\nuse_vllm: true\n"
            "vllm_gpu_memory_utilization: 0.8\nload_in_4bit: true\nbf16: true", ["vllm_gpu_memory"],
            ["do not fit on the device\\. \\(Conf", "device_map", "bf16"], id="weights that fit many times",
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
            "vllm serve openai/gpt-oss-120b --max-model-len 131072 --gpu-memory-utilization 0.95\nRuntimeError: CUDA out of memory"
            " occurred when warming up sampler with 1024 dummy requests. Please try lowering `max_num_seqs`",
            ["--max-num-seqs 512"], ["max-model-len"], id="the sampler's trial",
        ),
        pytest.param(
            "Jul 24 vega ollama[114917]: llm_load_tensors: offloaded 29/33 layers to GPU\nJul 24 vega ollama[114917]: llama runner"
            " started in 6.54 seconds\nJul 24 vega ollama[114917]: CUDA error: out of memory\n  ggml_cuda_device_malloc(&ptr,"
            " look_ahead_size, device)", ["num_gpu", "at its first computation"], ["llama-server", "while it loaded"], id="Ollama's own lines",
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
            "Standalone Faster-Whisper running on: CUDA, --model=large-v2\nFile \"faster_whisper\\transcribe.py\", line 125, in init\n"
            "RuntimeError: CUDA failed with error out of memory", ["int8"], ["numel"], id="no code to count parameters in",
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
            "./llama-server -m Qwen2.5-Coder-32B-Instruct-Q4_K_M.gguf -ngl 99 -c 32768\nggml_cuda.cu:70: ROCm error: out of memory\n"
            "  hipMalloc(&ptr, look_ahead_size)", ["at its first computation"], ["quotes no message"], id="ROCm's message",
        ),
        pytest.param(
            "#SBATCH --mem=16000\nslurmstepd: error: Detected 1 oom-kill event(s) in StepId=938.batch cgroup.",
            [r"--mem=31G   # now 15\.625"], ["less at once"], id="Slurm counts in MiB",
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
            "keras: predict on large datasets throws OOM on the GPU, it seems all the predictions are kept in GPU memory. In chunks it works",
            ["collect\\s+them\\s+in\\s+RAM"], ["process of its own", "clear_session"], id="one model in TensorFlow",
        ),
        pytest.param(
            "My video workflow in ComfyUI gives OOM on a 4070TI 12GB", ["most\\soften"], ["If so", "tiles", "lowvram"],
            id="a guess has no advice",
        ),
        pytest.param(
            'llama.cpp: ggml_backend_cuda_buffer_type_alloc_buffer: allocating 8432.00 MiB on device 0: cudaMalloc failed: out of memory\ngraph_reserve: failed to allocate compute buffers',
            [], ['training'],
            id='compute buffers',
        ),
    ],
)  # fmt: skip
def test_advice_is_of_the_program(text, said, not_said):
    shown = str(explain(text, fast=True, lang="en"))
    assert [word for word in said if not re.search(word, shown)] == []
    assert [word for word in not_said if re.search(word, shown)] == []
