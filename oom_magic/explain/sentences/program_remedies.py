"""The sentences about settings of inference programs, other devices and the host; ``CATALOGUE`` includes them."""

from __future__ import annotations

from oom_magic.language import Sentences

PROGRAM_REMEDIES: Sentences = {
    "setting_unnamed": "the program's setting for it",
    "remedy_shorter_context": ("Allow a shorter context ({setting}): it bounds what a single request can take."),
    "remedy_shorter_context_any": "Allow a shorter context or fewer requests: the KV cache grows with each token.",
    "remedy_other_library": (
        "If JAX or TensorFlow runs in the same process, keep it from reserving the device; with several devices, let"
        " the program see only the one that it is to use (CUDA_VISIBLE_DEVICES)."
    ),
    "remedy_generation_share": ("Give the generation beside the training a smaller share of its device ({setting})."),
    "remedy_swap_blocks": "Keep blocks of the model in RAM until they are needed (blocks_to_swap).",
    "remedy_swap_blocks_if_offered": (
        "If the training program can keep blocks of the model in RAM until they are needed (block swap), let it."
    ),
    "remedy_loss_only": "Make the evaluation keep no logits (prediction_loss_only=True), if the loss is enough.",
    "remedy_fewer_bits": "Use frozen weights with fewer bits (fp8, 8 or 4 bits), or a smaller model.",
    "remedy_fewer_bits_if_frozen": (
        "If only an adapter (LoRA) is trained: frozen weights with fewer bits (fp8, 8 or 4 bits)."
    ),
    "remedy_rarer_work": (
        "Check what the program does only then, and make it smaller: an evaluation batch, the samples it draws."
    ),
    "remedy_more_swapped": "Keep more blocks of the model in RAM (blocks_to_swap), up to all of them.",
    "remedy_fewer_swapped": "Keep fewer blocks in RAM (blocks_to_swap), or start fewer processes: each holds its own.",
    "remedy_lmdeploy_cache": ("Make the KV cache smaller: cache_max_entry_count, session_len, max_batch_size."),
    "remedy_exllama_context": (
        "Allow a shorter context (max_seq_len): the cache for all of it is allocated when the model is loaded."
    ),
    "remedy_larger_workers": "Use fewer workers with more RAM each (memory_limit), or smaller partitions.",
    "remedy_fewer_tasks": (
        "Run fewer tasks and actors at once on that machine (Ray: more num_cpus for each), or use one with more RAM."
    ),
    "remedy_vllm_pictures": "Allow fewer images or videos per request (--limit-mm-per-prompt).",
    "remedy_fewer_pixels": "Limit the pixels of each image (max_pixels): a large one takes thousands of tokens.",
    "remedy_vllm_pixels": "Send smaller images, or limit their pixels (--mm-processor-kwargs, max_pixels).",
    "remedy_vllm_loras": "Keep fewer or smaller adapters loaded (--max-loras, --max-lora-rank).",
    "remedy_vllm_max_num_seqs": "Process fewer requests and tokens at once ({setting}).",
    "remedy_vllm_eager": "Disable CUDA graphs (--enforce-eager).",
    "remedy_quantized_model": "Use quantized weights (AWQ, GPTQ, FP8, GGUF Q4) or a smaller model.",
    "remedy_lighter_weights": (
        "If the log shows that the weights take most of the share: quantized weights (AWQ, GPTQ, FP8) or a smaller"
        " model."
    ),
    "remedy_use_all_devices": (
        "See whether the model is divided among all devices: the setting for that (a split, device_map) may not be set,"
        " or have no effect with this model or version."
    ),
    "remedy_smaller_first_share": "Give the device that fills first a smaller part of the split, so that room is left.",
    "remedy_tensor_parallel": "Spread the model over several devices.",
    "remedy_server_share": (
        "Give the server a smaller share of the device ({setting}): its cache shrinks, and activations fit beside it."
    ),
    "remedy_sglang_requests": (
        "If it happens often: run fewer requests at once (--max-running-requests), or give the cache a larger share"
        " (--mem-fraction-static)."
    ),
    "remedy_sglang_prefill": "Use smaller prompt chunks and fewer graphs ({setting}).",
    "remedy_tgi_tokens": "Process fewer tokens at once ({setting}).",
    "remedy_tgi_shards": "Spread the model over several devices ({setting}).",
    "remedy_comfy_lowvram": "Start ComfyUI with --lowvram (then --novram): weights stay in RAM until they are needed.",
    "remedy_comfy_cache_none": "Start ComfyUI with --cache-none: models leave RAM after the node that used them.",
    "remedy_unpin_weights": (
        "Turn off pinning of offloaded weights (ComfyUI: --disable-pinned-memory): they are then kept in ordinary RAM."
    ),
    "remedy_one_at_a_time": "Serve one request at a time: each parallel slot has a cache of its own.",
    "remedy_comfy_tiled": (
        "If it fails while decoding: decode in tiles (the node VAE Decode (Tiled), or such an option of an"
        " extension's own node)."
    ),
    "remedy_comfy_fp8": "Use a model in fp8 or GGUF.",
    "remedy_smaller_image": "Make the image smaller, or generate fewer frames or images at once.",
    "remedy_diffusers_offload": (
        "Keep the parts of the pipeline in RAM until they are needed: enable_model_cpu_offload(), then"
        " enable_sequential_cpu_offload()."
    ),
    "remedy_diffusers_sequential": (
        "Keep each layer in RAM until it is needed: enable_sequential_cpu_offload() (slow)."
    ),
    "remedy_pictures_offload": (
        "If the program has a low-memory setting that is off, turn it on: parts of the model then stay in RAM"
        " until they are needed."
    ),
    "remedy_ollama_layers": "Put fewer layers on the GPU (num_gpu); the others run on the CPU.",
    "remedy_zero_offload": "Keep the optimizer state in RAM (DeepSpeed's offload_optimizer).",
    "remedy_diffusers_vae": "If it fails while decoding: decode the image in tiles (VAE tiling).",
    "remedy_smaller_tiles": (
        "Make the tiles smaller in which it is decoded or encoded, if the program has a setting for that."
    ),
    "remedy_llama_layers": "Put fewer layers on the GPU ({setting}); the others run on the CPU.",
    "remedy_llama_context": (
        "Request a shorter context ({setting}); where none is set, some programs use the model's full length."
    ),
    "remedy_llama_cache_type": "Store the KV cache in 8 bits, with flash attention.",
    "remedy_llama_batch": "Use smaller prompt batches ({setting}).",
    "remedy_smaller_model": "Use a smaller model or one with fewer bits.",
    "remedy_merge_on_host": (
        "Merge on the CPU, in shards or lazily (the tool's settings for little memory), and with the memory of the"
        " training released first: in a fresh process."
    ),
    "remedy_paddle_more": "Raise Paddle's share, as the message says (FLAGS_fraction_of_gpu_memory_to_use).",
    "remedy_cap_gaussians": (
        "Cap the number of Gaussians, if the program has a setting for that, or train a smaller part of the scene at"
        " once."
    ),
    "remedy_fewer_gaussians": "Fewer Gaussians: a higher threshold for densifying, or a cap on their number.",
    "remedy_more_ram": (
        "Keep less in RAM at once, or allow it more: the limit of its job or container if one is too low, or"
        " a larger machine."
    ),
    "remedy_wsl_memory": "Give WSL more of the computer's RAM (memory= in .wslconfig); it takes half of it unless set.",
    "remedy_swap": "Free RAM (close programs) or add swap, which helps while loading.",
    "remedy_hold_less": "Hold less at once: work in parts, and release what is done.",
    "remedy_ollama_context": "Request a shorter context (num_ctx): the KV cache grows with it.",
    "remedy_ollama_parallel": "One request at a time, flash attention, and an 8-bit KV cache.",
    "remedy_fewer_calibration_samples": ("Calibrate with fewer or shorter samples, and with fewer of them at once."),
    "remedy_layerwise_quantizing": (
        "Keep the model on the CPU and quantize layer by layer; only one layer is then on the GPU."
    ),
    "remedy_ort_arena": "Let ONNX Runtime's arena grow only as needed, without the largest workspaces.",
    "remedy_smaller_input": "Give it less at once: fewer, shorter or smaller inputs.",
    "remedy_trt_workspace": "Allow a smaller workspace while building (max_workspace_size; trtexec --memPoolSize).",
    "remedy_trt_shapes": "Build for smaller maximum shapes (the profile's max).",
    "remedy_jax_preallocate": (
        "JAX takes three quarters of the device when it starts: turn that off beside other programs."
    ),
    "remedy_smaller_batch_plain": "A smaller batch.",
    "remedy_tf_growth": "Let TensorFlow take memory as it needs it, not all of it at the start.",
    "remedy_rapids_chunks": "Read the data in parts (byte_range, usecols, dask_cudf) and with narrower types.",
    "remedy_rapids_managed": "Let data spill to RAM (managed memory or cudf's spilling).",
    "remedy_cupy_limit": "Raise the limit of CuPy's pool (set_limit, CUPY_GPU_MEMORY_LIMIT).",
    "remedy_cupy_free": "Free what CuPy's pool keeps.",
    "remedy_smaller_arrays": "Work in smaller pieces.",
    "remedy_paddle_fraction": "Let PaddlePaddle take a smaller share at its start.",
    "remedy_marian_workspace": "Reserve a smaller workspace (--workspace, in MiB), or choose a device with more room.",
    "remedy_physx_smaller": (
        "If the simulation runs on the GPU: make PhysX' buffers smaller (in Isaac Lab the gpu_ settings of PhysxCfg),"
        " or start fewer environments."
    ),
    "remedy_restart_after_loads": (
        "If it fails after several models were loaded: restart the server; a newer version may not have this fault."
    ),
    "remedy_fewer_jobs": "Compile fewer files at once (MAX_JOBS, -j of make and ninja), or where more RAM is free.",
    "remedy_build_in_parts": (
        "Build on a machine with more RAM, or if the ranks are built at once: one after the other."
    ),
    "remedy_page_file": (
        "Enlarge Windows' page file (System > Advanced > Performance > Virtual memory): every process commits"
        " memory for CUDA's libraries."
    ),
    "remedy_scheduler_memory": "Request more memory from the scheduler (--mem); it is the job's RAM, not the GPU's.",
    "remedy_pod_request": (
        "Request the RAM that the pod needs (resources.requests.memory), so that it gets a node with as much."
    ),
    "remedy_pod_memory": "Raise the memory limit of the container, if one is set.",
    "remedy_java_heap": "Give Java a larger heap (-Xmx).",
    "remedy_nccl_buffers": "Leave some memory free for NCCL, whose buffers are outside PyTorch's cache.",
    "remedy_unpin": "Use no pinned memory (pin_memory=False), or pin less.",
    "remedy_gather_on_host": (
        "Keep only what the metric needs of each batch, and move it to RAM (preprocess_logits_for_metrics,"
        " eval_accumulation_steps)."
    ),
    "remedy_data_on_host": (
        "Keep the data in RAM and move only what a step needs to the GPU; some programs have a setting for it"
        " (--data_device cpu)."
    ),
    "remedy_smaller_buffer": (
        "Make the replay buffer smaller (fewer steps, pictures as uint8); if it is on the GPU, keep it in RAM."
    ),
    "remedy_buffer_on_disk": (
        "Store each frame of the replay buffer once and as uint8 (stacks share it), compress it, or keep the buffer in"
        " a memory-mapped file; else make it smaller."
    ),
    "remedy_smaller_array": (
        "Make this one array smaller (fewer entries at once, or a narrower dtype): its size is that of the request."
    ),
    "remedy_fewer_bins": (
        "Shallower trees or fewer bins (depth, border_count; max_depth, max_bin): the histograms grow with features,"
        " bins and leaves."
    ),
    "remedy_rapids_pool": "Give the pool a larger maximum (maximum_pool_size), or let it grow to the whole GPU.",
    "remedy_webui_medvram": "Start the web UI with --medvram, then --lowvram; in Forge lower 'GPU Weights'.",
    "remedy_webui_tiled": ("If it fails while decoding: decode the image in tiles (Tiled VAE, or Never OOM in Forge)."),
    "remedy_webui_attention": "Use an attention that stores no scores: --opt-sdp-attention or --xformers.",
    "remedy_webui_attention_mac": "Compute the attention in parts: --opt-sub-quad-attention.",
    "remedy_attention_slices": "Compute the attention in slices (enable_attention_slicing).",
    "remedy_comfy_attention": "Start ComfyUI with split attention (--use-split-cross-attention).",
    "remedy_keep_less": (
        "If your own code keeps results: move them to RAM (.cpu()) or drop them (del) before the next input."
    ),
    "remedy_newer_version": (
        "Release what your own code keeps of each use; where the program is someone else's, try a newer version."
    ),
    "remedy_older_version": (
        "If it fitted before an update: go back to that version, until a newer one takes no more."
    ),
    "remedy_host_limit": (
        "RAM was free: look for a limit of the process (ulimit -v, a container's or a job's, vm.max_map_count and"
        " overcommit, a 32-bit Python)."
    ),
    "remedy_clear_each": (
        "Empty the library's cache after each use, as the text says helps; what then stays is really held, and a newer"
        " version may not keep it."
    ),
    "remedy_flash_kernel": (
        "The line already calls PyTorch's fused attention, which still stores the scores with some masks, dtypes"
        " and cards: use flash attention, or give it fewer tokens (smaller images, shorter sequences)."
    ),
    "remedy_tf_own_process": (
        "If several models or sessions follow each other: run each in a process of its own. TensorFlow releases a"
        " device's memory only when its process ends."
    ),
    "remedy_tf_call": (
        "If a loop calls model.predict(x): call model(x) instead. If it makes models, call clear_session() between"
        " them."
    ),
    "remedy_fewer_boxes": (
        "Leave out or crop images with very many boxes, or compare the boxes on the CPU where a setting allows it"
        " (mmdetection: gpu_assign_thr)."
    ),
    "remedy_reset_metrics": (
        "Reset metrics at the end of each epoch (metric.reset()), and keep their values, not tensors."
    ),
    "remedy_collect_on_host": "Where results are collected on the GPU: collect them in RAM.",
    "remedy_detach_state": "Detach the state from the graph of the previous iteration.",
    "remedy_no_retain_graph": ("Avoid retain_graph=True: sum the losses of one graph, or detach what is reused."),
    "remedy_map_location_cpu": (
        "Where a checkpoint is loaded to the GPU: load it to the CPU (PyTorch: map_location), and delete it"
        " once it is in the model."
    ),
    "remedy_relaxed_limits": "Allow blocks above 4 GiB (Level Zero).",
    "remedy_mps_watermark": (
        "Lift PyTorch's own limit on this Mac (PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0); beyond it, macOS swaps and"
        " may freeze."
    ),
    "remedy_driver_limit": (
        "The device had free memory: look for a limit or a fault outside the program (driver and runtime"
        " versions, the share of a container or virtual machine)."
    ),
    "remedy_matching_versions": "Install compatible versions of driver, runtime and framework.",
    "remedy_sample_graph": (
        "If a graph network takes the whole graph at once: work on sampled parts of it (in PyG NeighborLoader or"
        " ClusterLoader)."
    ),
    "remedy_bios_memory": "Assign more of the RAM to the integrated GPU (UMA frame buffer size in the BIOS, or GTT).",
    "remedy_close_apps": "Close other programs: on a Mac, the GPU shares the memory with everything else.",
    "remedy_max_split_size": (
        "Set max_split_size_mb against fragmentation: expandable_segments has no effect on Windows."
    ),
    "remedy_segments_after_update": (
        "Update PyTorch to 2.1 or newer and use its expandable segments against fragmentation: the message is of an"
        " older version, which has none."
    ),
    "remedy_ctranslate2_less": (
        'Use int8 weights (compute_type="int8"), a smaller model, or fewer beams and a smaller batch (beam_size,'
        " best_of, batch_size)."
    ),
    "remedy_own_device": (
        "Let each process use its own GPU only: torch.cuda.set_device(local_rank) first, and torch.load(...,"
        ' map_location="cpu"). nn.DataParallel gathers outputs on one GPU, DistributedDataParallel does not.'
    ),
    "remedy_keep_needed": "Keep only what the metric needs of each batch (preprocess_logits_for_metrics).",
    "remedy_load_low_ram": (
        "Load the weights in 16 bits, shard by shard (low_cpu_mem_usage), or directly to the GPU (device_map)."
    ),
    "remedy_sharded_state": (
        "Save shards (fsdp_state_dict_type: SHARDED_STATE_DICT): a full state dict gathers all parameters in one"
        " process's RAM."
    ),
    "remedy_smaller_graph": (
        "Give it less of the graph at once: fewer graphs per batch, or sampled neighbours of one large graph"
        " (NeighborLoader); each edge takes a row of features."
    ),
    "remedy_fewer_items": "Give it fewer inputs at once, if it takes several.",
    "remedy_unlisted_processes": (
        "See which processes hold the device, those that nvidia-smi does not list, too (sudo fuser -v /dev/nvidia*):"
        " children of a run that ended, another user's, another container's."
    ),
    "remedy_smaller_items": "Make each input smaller (its resolution or length).",
    "remedy_drop_each": (
        "Find what keeps growing (collected results, caches, open files), and release each batch before the next one."
    ),
    "remedy_arrays_for_lists": (
        "If the data set holds long Python lists or dicts, make them arrays (NumPy, Arrow): each worker copies what it"
        " touches."
    ),
    "remedy_diffusers_not_moved": (
        'Remove .to("cuda") before enable_model_cpu_offload(): it puts the whole pipeline on the GPU first.'
    ),
    "remedy_less_offload_any": (
        "Keep less in RAM: parameters and optimizer state in 32 bits take 16 bytes per parameter."
    ),
    "remedy_sglang_no_compile": "Start without --enable-torch-compile, or with a smaller --torch-compile-max-bs.",
    "remedy_less_offload": (
        "Offload less to RAM (only the optimizer), or to NVMe: parameters and optimizer state in 32 bits take 16"
        " bytes per parameter."
    ),
}
