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
    "remedy_optimizer_8bit": "Keep the optimizer state in 8 bits (bitsandbytes).",
    "remedy_offload_optimizer": "Keep the optimizer state in RAM and step there.",
    "remedy_shorter_sequences": "Sequences of {after} tokens instead of {before}.",
    "remedy_smaller_pictures": "Pictures of {after} x {after} pixels instead of {before} x {before}.",
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
    "speed_same": "about the same",
    "speed_batches": "somewhat slower: each batch crosses the bus",
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
    "remedy_smaller_pictures_any": "Smaller pictures.",
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
    "remedy_batches_moved": "Keep the data in RAM, and move each batch to the GPU in its turn.",
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
    "remedy_stream_data": (
        "Hold less at once: where the data are read as a whole, read them in parts (memory-mapped or streamed)."
    ),
    "remedy_shared_memory": (
        "Check how much shared memory there is (df -h /dev/shm); --shm-size starts a container with more."
    ),
    "remedy_fewer_waiting": (
        "Load without worker processes (num_workers=0): slower, but nothing goes through shared memory. If it"
        " then runs, that was the cause, and fewer workers or a smaller prefetch_factor may be enough."
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
    "reason_left_in_loop": "its rehearsal was left in a loop with too many iterations, before the rest of the run",
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
