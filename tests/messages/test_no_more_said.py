"""No more is said of a text than it says: no cause, phase, setting or change that its words do not carry."""

from __future__ import annotations

import re

import pytest

from tests.support.told import as_shown


@pytest.mark.parametrize(
    ("text", "said", "not_said"),
    [
        (
            "CUDA out of memory at full resolution, it is okay at half resolution.\nmy config\nmax_disp: 320\n"
            "train_iters: 22\nnum_steps: 200000",
            "Give it less at once",
            "microbatch",
        ),
        ("The GPU runs out of memory with my model", "The author reports that memory ran out", "Out of device memory"),
        ("My job gets killed after an hour", "The author reports that a process was killed", "Out of"),
        (
            "slurmstepd: error: Detected 1 oom-kill event(s) in step 8.batch cgroup.\nI had this on a 750gb node and so i"
            " increased to our 3TB node and specified the entire node.",
            "Compare what it used with what the job was given",
            "--mem=MORE",
        ),
        (
            "The job is cancelled by the scheduler due to over-consumption of memory on the 180GB node (previously I did"
            " get a `MemoryError` within Python).",
            "RAM",
            "Python could not allocate",
        ),
        (
            "RuntimeError: CUDA out of memory. Tried to allocate 256.00 MiB (GPU 0; 10.76 GiB total capacity; 0 bytes"
            " already allocated; 9.44 GiB free; 0 bytes reserved in total by PyTorch)\nI train on volumes of 512x512x300",
            "The device had free memory",
            "ragmentation",
        ),
        (
            "koboldcpp.exe --model 13B.bin --usecublas --gpulayers 100\nllama_model_load_internal: n_ctx      = 2048\n"
            "After offloading the layers the ram usage goes up by the same amount.",
            "smaller model",
            "shorter context",
        ),
        (
            "Job 3410940 exceeded memory limit (15912452 > 15728640), being killed. I tried twice, with 15Gb allocated.",
            "SLURM ended the job",
            "from time to time",
        ),
        (
            "I observe a memory leak (the GPU consumption raises by around 52 MiB at each new inference). I need a lot of inferences without exiting"
            " the program. Is there a way to avoid these memory issues?",
            "keeps memory alive",
            "from time to time|Is there a way",
        ),
        (
            "A large picture: it runs, and then suddenly the GPU usage spikes and I get an OOM error. empty_cache() does not"
            " free up GPU memory post crash.",
            "suddenly the GPU usage spikes",
            "keeps memory alive",
        ),
        ("Potential GPU memory leak for TensorFlow models?\nThe card is full after one request", "", "Potential GPU"),
        ("VRAM increasing slightly every step until I run out.", "memory ran out", "without a message that"),
        (
            "CUDA OOM error when validating\nTraining takes ~6G of my V100. The batchsize I tried includes 4096 and 8192.",
            "evaluation",
            "smaller batch",
        ),
        (
            "tritonserver: after inference requests stop, the GPU memory is not released, and with each start of the client"
            " the memory usage continues to increase until inference fails.",
            "keeps memory alive",
            "Another process",
        ),
        (
            "[Tiled VAE]: split to 4x3 = 12 tiles. Optimal tile size 224x224\n[Tiled VAE]: Executing Decoder Task Queue: 9%"
            "\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 13.64 GiB.",
            "Make the tiles smaller",
            "Decode the image in tiles",
        ),
        (
            "The evaluation runs out of cuda memory. I know that reducing the size of the images or batch size will help,"
            " but these solutions are not suitable.",
            "memory",
            "smaller inputs|smaller batch",
        ),
        (
            "Failed to allocate 16.00 GB GPU memory, CUDA out of memory\n"
            "| N/A   44C    P0    44W / 300W |      0MiB / 32480MiB |      0%      Default |",
            "what fills it",
            "other programs",
        ),
        (
            "任务管理器中看到,在退出之前,显存的占用率没有占满,但 CUDA_ERROR_OUT_OF_MEMORY",
            "memory",
            "Another process",
        ),
        (
            "The app crashes with a CUDA OOM error regardless of --tile size argument used: the upsampler loads the whole"
            " image to the GPU.",
            "memory",
            "Make the tiles smaller|parts of the model",
        ),
        (
            "AWQ: model.quantize runs out of memory. The failure occurs with any number of calibration samples.",
            "memory",
            "Calibrate with fewer",
        ),
        (
            "With small epochs, this error did not occur, even after 50 epochs. With a long one the GPU memory increases until"
            " an out-of-memory error.",
            "keeps memory alive",
            "come to epoch",
        ),
        (
            "Precision reaches 29% in validation. The training was cut off halfway through, indicating CUDA out of memory.",
            "memory",
            "evaluat(?:es|ion may)",
        ),
        (
            "OOM at optimizer.step() even with batch_size=1: the training crashes with CUDA OOM during the first"
            " optimizer.step(). It looks like the optimizer state allocation itself runs out of memory.",
            "The optimizer state does not fit",
            "activations of a step",
        ),
        (
            "i have 8 A100 (80GB) GPUs and want to do Full parameter fine-tuning with deepspeed zero2: it leads to OOM.",
            "optimizer's first step, where its state is created. If so:",
            "LoRA of rank",
        ),
        (
            'File "scene/gaussian_model.py", line 441, in cat_tensors_to_optimizer\n    stored_state["exp_avg"] ='
            ' torch.cat((stored_state["exp_avg"], torch.zeros_like(extension_tensor)), dim=0)\nCUDA out of memory. Tried to'
            " allocate 2.79 GiB (GPU 0; 23.65 GiB total capacity; 15.47 GiB already allocated; 2.07 GiB free; 20.24 GiB"
            " reserved in total by PyTorch)",
            "memory",
            "optimizer state does not fit",
        ),
        (
            "I run qwen-vl-72b on 4 A100 40G: OOM in torch.compile but success with eager mode.",
            "memory",
            "weights do not fit|divided among",
        ),
        (
            "docker run -p 2700:2700 model:latest: it starts but then stops with `Killed` message, out of memory.",
            "RAM",
            "limit of the container",
        ),
        (
            "ComfyUI prints Loading checkpoint shards, and then: torch.OutOfMemoryError: CUDA out of memory",
            "no room for the model's weights when they were loaded",
            "weights do not fit on",
        ),
    ],
)  # fmt: skip
def test_no_more_is_said_than_the_text_does(text, said, not_said):
    answer = as_shown(text)
    assert said in answer
    assert not re.search(not_said, answer)
