"""The sentences about remedies and why one was not evaluated, in English; ``catalogue.CATALOGUE`` includes them."""

from __future__ import annotations

from oom_magic.language import Sentences

REMEDIES: Sentences = {
    "remedy_free_held": "Release what earlier cells still hold ({freed_bytes}).",
    "remedy_drop_copy": "Delete the copy loaded before: {names} ({freed_bytes}).",
    "remedy_close_processes": "Close the other processes on this card ({freed_bytes}).",
    "remedy_expandable_segments": "Use expandable segments (expandable_segments) against fragmentation.",
    "remedy_no_grad": (
        "Evaluate under torch.no_grad() (or torch.inference_mode()): nothing is kept for a backward pass."
    ),
    "remedy_no_grad_own": (
        "If your own code evaluates: do it under torch.no_grad(), and move what it collects to RAM."
    ),
    "remedy_evaluation_inputs": (
        "Compare the inputs of the evaluation with those of training (whole images, longer texts, more at once), and"
        " make them smaller."
    ),
    "remedy_checkpointing_on": "Switch gradient checkpointing on; it is off here.",
    "remedy_eval_accumulation": (
        "Move what the evaluation collects to RAM after each batch (eval_accumulation_steps)."
    ),
    "remedy_kept_classes": (
        "Keep which class has the largest logit, not the logits (preprocess_logits_for_metrics): the metrics read only"
        " that."
    ),
    "remedy_sdpa": "Use PyTorch's fused attention (sdpa): the score matrix is never stored.",
    "remedy_foreach": "Run the optimizer without foreach: no temporary copies of all parameters.",
    "remedy_released_gradients": "Release gradients between steps: zero_grad() without set_to_none=False.",
    "remedy_dropped_outputs": (
        "Drop the model's outputs before the backward pass: the logits then live no longer than the loss needs them."
    ),
    "remedy_drawn_edges": (
        "Draw one edge in {parts} anew for each step (DropEdge, Rong et al. 2020): fewer messages are kept;"
        " it changes what is learnt."
    ),
    "remedy_mixed_precision": (
        "Compute the forward pass in {dtype} (autocast): most activations take half the memory."
    ),
    "remedy_half_setting": (
        "Compute in {dtype}, if it does not yet: with autocast in your own code, or with the program's setting."
    ),
    "remedy_checkpointing_setting": (
        "Recompute activations in the backward pass, if it does not yet: torch.utils.checkpoint in your own code,"
        " or the program's setting (gradient checkpointing)."
    ),
    "remedy_chunked_loss": "Compute the loss in chunks: the logits of all tokens never exist at once.",
    "remedy_training_settings": (
        "Turn on what saves memory in training, where it is still off: {dtype}, and gradient (activation)"
        " checkpointing."
    ),
    "remedy_smaller_batch": "Microbatch {after} instead of {before}, accumulated {accumulation} times.",
    "remedy_smaller_evaluation": "Batches of {after} instead of {before}.",
    "remedy_smaller_evaluation_any": "Give the evaluation less at once: a smaller batch or smaller inputs.",
    "remedy_of_compared": (
        "{text}. The loss compares the samples of a batch: each then meets {compared} others, however many"
        " batches are accumulated; GradCache keeps those of the whole batch."
    ),
    "remedy_and_evaluation": ("{text}; evaluation in batches of {evaluation_after} instead of {evaluation_before}."),
    "remedy_checkpointing": "Activation checkpointing: recompute activations in the backward pass.",
    "remedy_compile": "Compile the model (torch.compile): fused kernels keep less for the backward pass.",
    "remedy_compile_blocks": "Compile the repeated blocks one by one, not the whole model.",
    "remedy_activation_budget": (
        "Let compiled code keep half of its activations and recompute the rest (activation_memory_budget)."
    ),
    "remedy_no_cuda_graphs": "Compile without CUDA graphs: no other code can use the memory of their pool.",
    "remedy_optimizer_8bit": "AdamW with 8-bit state (bitsandbytes).",
    "remedy_offload_optimizer": "Keep the optimizer state in RAM and step there.",
    "remedy_shorter_sequences": "Sequences of {after} tokens instead of {before}.",
    "remedy_half_weights": "Weights, gradients and optimizer state in {dtype}; training may become less stable.",
    "remedy_half_weights_if": (
        "Weights in {dtype}, where they are still in float32: half the memory; training may become less stable."
    ),
    "remedy_single_weights": "float32 instead of float64: everything takes half the memory, and is much faster.",
    "remedy_adafactor": "Adafactor instead of Adam: almost no optimizer state.",
    "remedy_sgd": "Plain SGD: no optimizer state.",
    "remedy_gradients_in_buckets": "Gradients as views of DDP's buckets: no second copy of them.",
    "remedy_resharded": "Free gathered parameters after each block's forward pass (reshard_after_forward).",
    "remedy_fully_sharded": "FSDP2 instead of DDP: parameters, gradients and optimizer state are sharded.",
    "remedy_balanced_layers": "Balance the layers: {card} holds {held} of {number}.",
    "remedy_shards_on_host": "Keep the shards in RAM (CPUOffloadPolicy): the optimizer steps there.",
    "remedy_lora": "LoRA of rank {rank}: train small adapters, freeze the weights.",
    "remedy_qlora": "QLoRA of rank {rank}: frozen weights in 4 bits.",
    "remedy_loaded_half": "Load the weights in {dtype} from the start.",
    "remedy_loaded_8bit": "Load the weights in 8 bits (bitsandbytes); to train, add adapters (LoRA).",
    "remedy_loaded_4bit": "Load the weights in 4 bits (bitsandbytes, nf4); to train, add adapters (QLoRA).",
    "remedy_larger_card": "A larger card: {gpu} ({total_bytes}) is the smallest that is sufficient.",
    "remedy_fsdp": (
        "Shard parameters, gradients and optimizer state over {gpus} GPUs (FSDP or ZeRO-3): about "
        "{saving_bytes} less each."
    ),
    "remedy_combination": "Together: {parts}.",
    "speed_same": "about the same speed",
    "speed_faster": "usually faster",
    "speed_compiled": "usually faster, after a minute or so of compiling",
    "speed_launches": "somewhat slower where kernels are short: each is launched by itself",
    "speed_recomputed": "somewhat slower: cheap operations are computed twice",
    "speed_accumulation": "somewhat slower: smaller matrices",
    "speed_checkpointing": "about a third slower: one more forward pass (Chen et al. 2016)",
    "speed_optimizer_loop": "a slower optimizer step: one kernel per tensor (torch.optim documentation)",
    "speed_qlora": "slower: weights are dequantized in each layer (Dettmers et al. 2023)",
    "speed_int8": "slower: columns with outliers are computed separately (Dettmers et al. 2022)",
    "speed_streamed": "much slower: what is in RAM is copied to the card in each forward pass",
    "speed_offload": "slower: gradients and weights cross the bus in each step (Ren et al. 2021)",
    "speed_fsdp": "depends on the link between the GPUs",
    "speed_combination": "the sum of its parts",
    "remedy_not_priced": "not estimated: {reason}",
    "remedy_smaller_batch_any": "A smaller microbatch; gradient accumulation keeps the global batch.",
    "remedy_shorter_sequences_any": "Shorter sequences.",
    "remedy_fsdp_any": "Shard the model over several GPUs (FSDP or ZeRO-3).",
    "remedy_fsdp_if_any": "With more than one GPU, shard the model over them (FSDP or ZeRO-3).",
    "remedy_detach_own": (
        "If your own code (a loss, a reward, a metric, a callback) keeps results of steps: keep numbers, not"
        " tensors (PyTorch: loss.item(), .detach())."
    ),
    "remedy_offload": "Keep part of the weights in RAM (device_map).",
    "remedy_close_processes_any": (
        "Close the other programs that use this device; {tool} lists them, and the kernels of other notebooks count."
    ),
    "remedy_fewer_instances": "Start fewer instances of the model on this device, or spread them over more devices.",
    "remedy_unload_models": "Unload models that are not needed now, or put this one on another device.",
    "remedy_whose_process": (
        "See in {tool} whose the other process is: of another program (close it), or of this server itself (then only"
        " a smaller share for its cache leaves more)."
    ),
    "remedy_jax_init": (
        "Create the weights on the CPU, or sharded over the devices: jax.jit(init, out_shardings=...), with"
        " jax_threefry_partitionable on."
    ),
    "remedy_check_processes": "Check with {tool} whether other programs use this device.",
    "remedy_free_held_any": "Release what earlier cells still hold, or restart the kernel.",
    "remedy_detach": "Keep results between steps without their graphs: {fixed}",
    "remedy_backward_each": (
        "Call backward() on each loss, not on their sum: gradients add up, and each graph is freed: {line}"
    ),
    "remedy_keep_on_host": "Collect in RAM, not on the GPU: {fixed}",
    "remedy_keep_newest": "Keep the newest rows only: {fixed}",
    "remedy_keep_grown": (
        "Keep less in {name}, {code}: numbers (.item()), tensors in RAM (.detach().cpu()), or only the newest."
    ),
    "remedy_smaller_share": "Let each program reserve less of the device when it starts, or nothing in advance.",
    "remedy_raise_limit": "Raise the limit set for this process.",
    "remedy_find_tensor": (
        "Check which operation requests so much, and whether a shape there is larger than intended."
    ),
    "remedy_fewer_workers": "Fewer worker processes: each holds a copy of what it touches.",
    "remedy_fewer_processes": "Start fewer processes at once (workers, jobs): each commits memory of its own.",
    "remedy_leave_off": "Leave off what the text says it runs without.",
    "remedy_copy_on_host": "Keep that copy in host memory (.cpu()), or do without it.",
    "remedy_state_on_host": (
        "Gather the state in RAM, not on the GPU, before saving it; or save each process's shard."
    ),
    "remedy_use_cpu": "Run it on the CPU there, or on a machine with a GPU of its own.",
    "remedy_larger_share": "Give the server a larger share ({setting}), if nothing else needs the device.",
    "remedy_stream_data": "Hold less at once: read the data in parts (memory-mapped or streamed), not as a whole.",
    "remedy_shared_memory": (
        "Check how much shared memory there is (df -h /dev/shm); --shm-size starts a container with more."
    ),
    "remedy_fewer_waiting": (
        "Load without worker processes (num_workers=0): slower, but nothing goes through shared memory. If it"
        " then runs, that was the cause, and fewer workers or a smaller prefetch_factor may be enough."
    ),
    # Settings of inference programs, other devices and the host.
    "setting_unnamed": "the program's setting for it",
    "remedy_shorter_context": ("Allow a shorter context ({setting}): it bounds what a single request can take."),
    "remedy_shorter_context_any": "Allow a shorter context or fewer requests: the KV cache grows with each token.",
    "remedy_other_library": "If JAX or TensorFlow runs in the same process, keep it from reserving the device.",
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
    "remedy_comfy_tiled": "Decode in tiles: the node VAE Decode (Tiled), or such an option of an extension's own node.",
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
        "Use the program's low-memory setting: parts of the model then stay in RAM until they are needed."
    ),
    "remedy_ollama_layers": "Put fewer layers on the GPU (num_gpu); the others run on the CPU.",
    "remedy_zero_offload": "Keep the optimizer state in RAM (DeepSpeed's offload_optimizer).",
    "remedy_diffusers_vae": "Decode the image in tiles (VAE tiling).",
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
    "remedy_more_ram": "Keep less in RAM at once, or run it where more RAM is free.",
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
    "remedy_page_file": (
        "Enlarge Windows' page file (System > Advanced > Performance > Virtual memory): every process commits"
        " memory for CUDA's libraries."
    ),
    "remedy_scheduler_memory": "Request more memory from the scheduler (--mem); it is the job's RAM, not the GPU's.",
    "remedy_pod_request": (
        "Request the RAM that the pod needs (resources.requests.memory), so that it gets a node with as much."
    ),
    "remedy_pod_memory": "Raise the memory limit of the container.",
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
    "remedy_webui_tiled": "Decode the image in tiles (Tiled VAE, or Never OOM in Forge).",
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
        "Go back to the version from before the update, until a newer one takes no more than that."
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
        "Run each model in a process of its own: TensorFlow releases a device's memory only when its process ends."
    ),
    "remedy_tf_call": "In a loop, call model(x), not model.predict(x); call clear_session() between models.",
    "remedy_fewer_boxes": (
        "Leave out or crop images with very many boxes, or compare the boxes on the CPU where a setting allows it"
        " (mmdetection: gpu_assign_thr)."
    ),
    "remedy_reset_metrics": (
        "Reset metrics at the end of each epoch (metric.reset()), and keep their values, not tensors."
    ),
    "remedy_collect_on_host": "Collect results in RAM, not on the GPU.",
    "remedy_detach_state": "Detach the state from the graph of the previous iteration.",
    "remedy_no_retain_graph": ("Avoid retain_graph=True: sum the losses of one graph, or detach what is reused."),
    "remedy_map_location_cpu": (
        "Load checkpoints to the CPU (PyTorch: map_location) and delete them once they are in the model."
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
        "Work on sampled parts of the graph (in PyG NeighborLoader or ClusterLoader), not on all of it."
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
    "remedy_smaller_items": "Make each input smaller (its resolution or length), rather than their number.",
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


REASONS: Sentences = {
    "reason_no_run": "nothing to rehearse here; describe the run (setup= or --model ...)",
    "reason_no_code": "nothing to rehearse here; run the code in a notebook",
    "reason_no_code_or_run": (
        "nothing to rehearse here; run the code in a notebook, or describe the run (setup= or --model ...)"
    ),
    "reason_fits_as_it_is": "the rehearsed run fits as it is",
    "reason_other_program": "a setting of another program",
    "reason_not_pytorch": "only PyTorch code is rehearsed",
    "reason_host": "only GPU memory is rehearsed, not the computer's RAM",
    "reason_not_yet": "not rehearsed yet",
    "reason_nothing_saves": "the cell was rehearsed with every applicable change, and none of them saves much",
    "reason_not_rewritten": "how best to change that line is not known here",
    "reason_loop_is_long": (
        "the loop is too long to be followed until the card is full; it had grown by {grown_bytes} when it failed"
    ),
    "reason_ram": "about {moved_bytes} go to RAM instead, where {ram_bytes} are free",
    "reason_estimate": "an estimate, not rehearsed",
    "reason_after_release": "with {names} released",
    "reason_compiling_is_slow": (
        "a change above is already safe, and compiling takes a minute or more; to price it, run the cell with this"
        " change under %%gpumem --dry-run"
    ),
    "reason_time": "the {seconds} seconds for rehearsals were used up",
    "reason_failed": "its rehearsal failed: {error}",
    "reason_setup_refused": "these settings do not work together: {error}",
    "reason_so_already": "the run already does this",
    "reason_nothing_gathered": "no Trainer evaluation collects its outputs on the GPU",
    "reason_library_missing": "{name} is not installed",
    "reason_checkpointing_already": "activation checkpointing is already on",
    "reason_compiled_already": "the model is already compiled",
    "reason_not_compiled": "the model is not compiled",
    "reason_compiler_not_followed": "what PyTorch {version} compiles is not supported (2.13 and newer is)",
    "reason_followed_as_eager": "the compiled code could not be followed",
    "reason_no_cuda_graphs_taken": "the model is not compiled for CUDA graphs",
    "reason_no_equal_blocks": "the model has no list of equal blocks",
    "reason_no_edges": "the model takes no edges",
    "reason_one_size": "the model takes inputs of one size only",
    "reason_no_blocks": "the model has no blocks of several layers to recompute",
    "reason_autocast_already": "autocast is already on",
    "reason_weights_16_bits_already": "the weights already have 16 bits or fewer",
    "reason_no_weights_in_float64": "no weights are in float64",
    "reason_no_attention_choice": "the model has no choice of attention kernels",
    "reason_attention_maps_wanted": "the run needs the attention maps, which fused kernels do not compute",
    "reason_attention_already": "the attention is already {name}",
    "reason_no_such_option": "{optimizer} has no option {option}",
    "reason_optimizer_already": "the optimizer is already {name}",
    "reason_optimizer_evaluates": "the optimizer evaluates the loss several times in each step",
    "reason_no_optimizer": "this model has no known optimizer before its first step",
    "reason_adapters_already": "the model already has adapters",
    "reason_no_adapters_for_it": "PEFT finds the layers only in Hugging Face models",
    "reason_quantized_already": "the model is already quantized",
    "reason_no_linear_layers": "the model has no linear layers to quantize",
    "reason_gradients_off_already": "gradients are already off",
    "reason_gradients_released_already": "gradients are already released",
    "reason_outputs_dropped_already": "the outputs are already dropped",
    "reason_no_language_head": "the model has no plain language model head",
    "reason_weights_are_trained": "weights loaded like this cannot be trained, but adapters on top of them can",
    "reason_no_quantized_loading": "only Hugging Face models can be loaded quantized",
    "reason_no_partial_loading": "only what from_pretrained loads can stay partly in RAM",
    "reason_no_model_ran": "no model ran in the rehearsal",
    "reason_no_replicas": "this code creates no DistributedDataParallel",
    "reason_no_shards": "the model is not sharded by fully_shard",
    "reason_gradients_in_buckets_already": "gradients are already views of the buckets",
    "reason_no_device_map": "the model is not spread over several cards",
    "reason_split_by_hand": "your own code decides which card gets what: move layers from the card that failed",
    "reason_layers_balanced_already": "the cards already hold equally many layers",
    "reason_shards_on_host_already": "the shards are already in RAM",
    "reason_resharded_already": "gathered parameters are already freed after the forward pass",
    "reason_line_elsewhere": "that line is not in this cell",
    "reason_size_not_set_there": "the size is set elsewhere",
    "reason_fast": "not rehearsed: --fast was given",
}
