"""What others' texts are advised stays with their code, sizes and machines: no setting or change from elsewhere."""

from __future__ import annotations

import re

import pytest

from oom_magic.explain.explainer import explain

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
            "GPU memory increases with every request until it is full, I am on the latest version of the server", [],
            ["newer version"], id="the newest version",
        ),
        pytest.param(
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 11.17 GiB total capacity; 506.00"
            " MiB already allocated; 12.50 MiB free; 530.00 MiB reserved in total by PyTorch). I already killed all python"
            " processes.", ["fuser"], ["Close the other programs"], id="others that were closed",
        ),
        pytest.param(
            "The resnet leaks memory:\n```python\nwith torch.no_grad():\n    for i in range(100):\n        out = net(img)\n```\nGPU"
            " memory increases with each iteration while I train", [], ["losses.append"], id="a line that the code does not have",
        ),
        pytest.param(
            "CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc((void**) &deviceBufferPtr, n)\nRuntimeError: CUDA failure 2:"
            " out of memory", [], ["NCCL", "Not a lack"], id="a failure of CUDA without NCCL",
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
            "When training pv-rcnn out of memory occurs. It happened several times: GPUassert: out of memory iou3d_nms.cpp 103",
            ["Nothing\\s+recognized"], ["keeps memory alive", "memory is not released"], id="it happened several times",
        ),
        pytest.param(
            "I reduced the batch_size and num_workers with no success to train: python3 tacotron2.py validation_datasets=f.json"
            " batch_size=1\nRuntimeError: CUDA out of memory", [], ["atch helps", "evaluation", "no_grad", "Smaller batches"],
            id="settings are no events",
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
            "tabbyAPI, RTX 3090 with 24 GB VRAM: --model-name QwQ-32B-exl2_4.65bpw, OOM when I load the model",
            ["max_seq_len"], ["59", "share", "AWQ"], id="bits per weight",
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
            ["exp_avg_sq", "8\\s+bits"], ["foreach"], id="state that is being made",
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
            "nnUNetv2_train validation: predicting case_196_0031\nRuntimeError: Some background workers are no longer alive",
            ["no\\slonger alive", "Fewer worker"], ["RAM\\) ran out; it"], id="killed is not a word about RAM",
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
            "训练时内存逐渐变大，最后被kill掉了 RuntimeError: DataLoader worker (pid 3979007) is killed by signal: Killed.\n"
            "在多卡训练时内存会持续增大，无论num_worker和batchsize设为多少都不行", ["内存"], ["Fewer worker"],
            id="workers that were tried in vain",
        ),
        pytest.param(
            'pipe = DiffusionPipeline.from_pretrained(\n    "Qwen-Image", torch_dtype=torch.bfloat16\n).to(\'cuda\')\n'
            "pipe.enable_model_cpu_offload()\nOutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has a total"
            " capacity of 15.89 GiB of which 137.12 MiB is free.", ["Remove .to"], ["sequential"], id="moved before it is offloaded",
        ),
        pytest.param(
            "RAM usage increases every epoch until the process is killed. num_workers=0\nfor batch in loader:\n    pass\n"
            "[EPOCH 0] Allocated: 0.00 MB, CPU: 955.15 MB\n[EPOCH 1] Allocated: 0.00 MB, CPU: 1264.15 MB", ["usage\\s+increases"],
            ["Free RAM", "about DataLoader workers"], id="RAM that grows without workers",
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
            "Device: 2*A100 40GB\ntrainer = GRPOTrainer(model=model, args=training_args, train_dataset=dataset)\ntrainer.train()\n"
            '  File "/opt/x/site-packages/accelerate/utils/operations.py", line 794, in _convert_to_fp32\n    return tensor.float()\n'
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 5.41 GiB. GPU 0 has a total capacity of 39.39 GiB of"
            " which 3.02 GiB is free.", ["TrainingArguments"], ["optimizer.step", "chunk_loss"], id="a Trainer that the author calls",
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
            "model.init fails: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 34359738368 bytes.\nBufferAssignment stats:\n"
            "   parameter allocation:         0B\n   maybe_live_out allocation:    4.00GiB\n   preallocated temp allocation:   28.00GiB",
            ["out_shardings"], ["less at once", "results of the computation"], id="JAX makes weights",
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
            "OOM in the middle of training an inception net, batch size is 256\nI bfc_allocator.cc:702] Stats:\nLimit:   12049707828\nInUse:"
            "   11984328960\nW Ran out of memory trying to allocate 39.81MiB.\nResource exhausted: OOM when allocating tensor with"
            " shape[256,832,7,7]", ["11.16 GiB of the 11.22 GiB"], ["Another process", "come late"], id="TensorFlow's own statistics",
        ),
        pytest.param(
            "Training is fine from scratch, but when I resume from the checkpoint, cuda is out of memory. deeplabv3_plus.yaml",
            ["map_location"], ["must not increase", "fewer bits", "weights do not fit"], id="a checkpoint beside the model",
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
    ],
)  # fmt: skip
def test_advice_is_of_the_text(text, said, not_said):
    shown = str(explain(text, fast=True, lang="en"))
    assert [word for word in said if not re.search(word, shown)] == []
    assert [word for word in not_said if re.search(word, shown)] == []
