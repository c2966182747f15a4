"""What in a text speaks for a cause, and how to check each, in English."""

from __future__ import annotations

from oom_magic.language import Plural, Sentences

EVIDENCE: Sentences = {
    # Numbers.
    "request_absurd": (
        "{requested_bytes} were requested on a device of {total_bytes}: no tensor is meant to be that large, so a"
        " shape on the failing line is wrong (an extra size multiplied in, an index used as a length)."
    ),
    "request_is_power": "{requested_bytes} are 2**{exponent} bytes: the product of sizes that overflowed.",
    "quoted_tensor": "The text quotes the code that computes it.",
    "request_of_line": "The sizes multiplied are on this line: {code}",
    "request_overflowed": (
        "A size of {requested_bytes} is an overflowed number: sizes multiplied beyond what an integer holds, or a"
        " negative size."
    ),
    "mps_refused_all": (
        "{held_bytes} of {limit_bytes} were in use, and yet {requested_bytes} were refused: Metal allocated"
        " nothing at all, as in a virtual machine without a GPU of its own."
    ),
    "mps_own_fill": "PyTorch itself held {held_bytes} of the {limit_bytes} that this Mac's GPU is allowed.",
    "mps_watermark": (
        "{limit_bytes} is PyTorch's own limit for MPS (PYTORCH_MPS_HIGH_WATERMARK_RATIO, as a share of what Metal"
        " recommends), not the capacity of the memory; {held_bytes} came close to it."
    ),
    "stuck_and_free_above_request": (
        "{stuck_bytes} were unused in PyTorch's cache and {free_bytes} were free: together enough for the"
        " {requested_bytes} requested, but not in one piece."
    ),
    "small_carve_out": (
        "A device of {total_bytes} is the part of the RAM assigned to an integrated GPU, not all that it could use."
    ),
    "address_space_in_pieces": (
        "Fragmented free memory can refuse a request smaller than its sum; expandable_segments helps where it is"
        " supported."
    ),
    # Frames and pasted code.
    "gathers_predictions": (
        "The evaluation collects the logits of every batch until its end; they grow with the evaluation set."
    ),
    "code_appends_tensors": "The pasted loop keeps tensors with their graphs: {line}",
    "code_sums_tensors": (
        "The pasted code sums tensors, not numbers, and so keeps the graph of every iteration: {line}"
    ),
    "code_carries_state": (
        "The pasted loop carries a state from iteration to iteration without detach(), with the whole graph"
        " behind it: {line}"
    ),
    "code_collects_tensors": "The pasted loop collects results on the GPU: {line}",
    "code_averages_tensors": "A meter receives the tensor instead of its value, and may keep its graph: {line}",
    "code_retains_graph": "retain_graph=True keeps what a backward pass would free: {line}",
    "code_infers_with_gradients": (
        "The pasted loop runs inference without torch.no_grad(), so every call keeps its graph as long as its"
        " result lives: {line}"
    ),
    # Programs and their stages.
    "program_pictures": "a program that generates images or videos",
    "program_server": "an inference server",
    "program_boosting": "gradient boosting of trees",
    "stage_kv_cache": "{program} failed while it allocated the KV cache.",
    "stage_graphs": (
        "{program} failed while it captured CUDA graphs, which need memory in addition to weights and cache."
    ),
    "stage_logits": "{program} failed while it computed logits for the whole vocabulary.",
    "stage_profiling": "{program} failed in its trial run with the largest batch that it is configured for.",
    "stage_sampler": (
        "{program} failed in the trial run of its sampler with as many requests as it may process at once."
    ),
    "stage_adapters": (
        "{program} failed while it allocated memory for adapters (LoRA), which are kept in addition to its weights."
    ),
    "stage_running": "{program} had loaded the model and failed at its first computation.",
    "stage_loading": "{program} failed while it loaded weights.",
    "stage_serving": "{program} failed while it answered requests, with memory in use beyond its cache.",
    "stage_warmup": "{program} failed in its warmup, with as many tokens as it is configured to process at once.",
    "stage_vae": ("{program} failed in the VAE, whose memory grows with the image size and the number of frames."),
    "stage_sampling": "{program} failed while sampling; the memory for that grows with the image size.",
    "stage_context": "{program} failed to set up the context: its KV cache and compute buffers.",
    "stage_compute": "{program} failed to allocate its compute buffers, which grow with context and batch.",
    "stage_building": (
        "{program} failed while it built an engine: it tries kernels there, each with its own workspace."
    ),
    "stage_calibrating": "{program} ran the calibration samples, whose activations grow with their number and length.",
    "above_own_share": (
        "{program} limits itself to {percent} % of the device including its cache, yet PyTorch held {held_bytes}"
        " of {total_bytes}: what exceeds the limit is weights or activations, not cache."
    ),
    "little_free_at_start": (
        "When it started, only {free_bytes} of {total_bytes} were free: something else held the rest."
    ),
    "cache_exceeds_weights": (
        "The KV cache is to take {cache_bytes}, together with the weights {weights_bytes}: the requested context"
        " is long."
    ),
    "buffers_listed": (
        "The log lists the largest buffers: results of the computation, which grow with batch and input."
    ),
    "small_request_refused": (
        "A request of only {requested_bytes} was refused: the device, or the share given to this process, was"
        " already full."
    ),
    "shape_of_scores": "The array {sizes} is a score matrix: batch, heads, and the sequence length twice.",
    "scores_of_picture": (
        "An image of {sides} has {positions} positions in a latent of an eighth of its height and width;"
        " attention scores between all of them have the requested size."
    ),
    "device_misreported": (
        "TensorFlow requests what the device is said to have, and no device has {requested_bytes}: driver,"
        " runtime and TensorFlow are incompatible."
    ),
    "shape_of_kernel": "The array {sizes} is a layer's kernel, which a smaller batch does not change.",
    "shape_of_batch": "The array {sizes} grows with what goes through at once.",
    "shape_of_one": "The array {sizes} is of one input: it grows with that input's size.",
    "shape_of_variable": "The array {sizes} is a variable of the model: its weights, or a table of its vocabulary.",
    "shape_of_matrix": (
        "The matrix {sizes} is a batch of rows, or a layer's weights, which a smaller batch does not change."
    ),
    "small_request_on_full": (
        "A small request on a device that PyTorch had already filled ({held_bytes} of {total_bytes}): what was there"
        " before it fills it."
    ),
    # The run and its author's words.
    "check_models_beside": "Load it alone: if it then runs, the others had taken its memory.",
    "told_models_in_turn": (
        "TensorFlow keeps the memory of earlier models until their graphs are cleared or the process ends."
    ),
    "told_metrics": "A metric that is updated in each step and never reset keeps all its data.",
    "told_fragmented": "Sizes that change from step to step leave gaps in the cache.",
    "late_steps": Plural(
        "It had run {count} step before: a single step fits.",
        "It had run {count} steps before: a single step fits.",
    ),
    "late_epochs": "It had come to epoch {count}: a single step fits.",
    "largest_batch_late": "Where batches differ in size, the largest one may come late.",
    "late_at_round_step": (
        "It failed after a round number of steps: programs often evaluate, draw samples or save then, which needs"
        " additional memory."
    ),
    "rows_are_tokens": "{rows} rows are the tokens of a batch: {batch} x {length}.",
    "first_steps_fail": "It failed at step {count}: a single step does not fit.",
    "index_error_beside": (
        "An index or label out of range can look like this on the GPU; using less memory will not fix it."
    ),
    "checkpoint_to_gpu": (
        "torch.load() puts a checkpoint where map_location says, and without it on the GPU from which it was saved."
    ),
    "held_within": (
        "{other_bytes} are held outside PyTorch, which itself held {held_bytes}. JAX and TensorFlow reserve most of a"
        " device when they start."
    ),
    "weight_is_made": "The operation that failed, {operation}, gives a new weight its first values.",
    "told_checkpoint_to_gpu": "Without map_location, torch.load() puts a checkpoint on the GPU that it was saved from.",
    "one_device_holds_more": ("What every process of a job starts or loads on the first GPU adds up there."),
    "one_device_gathers": "nn.DataParallel gathers all outputs on one GPU.",
    "check_one_device": (
        "See which processes {tool} lists for each device: one that is listed for two of them put something on a device"
        " that is not its own."
    ),
    "check_one_device_gathers": (
        "Try nn.parallel.DistributedDataParallel, one process for each device: none of them then gathers the others'"
        " outputs."
    ),
    "ranks_load_to_one": (
        "torch.load() puts a checkpoint back where it was saved, for every process, unless map_location says otherwise."
    ),
    "checkpoint_kept": "What is loaded to resume (weights, optimizer state) comes beside the model.",
    "pinned_under_wsl": (
        "Under WSL only a small part of the RAM can be pinned, and a failure to pin says 'CUDA error: out of"
        " memory' even with the GPU half empty."
    ),
    "pinned_memory_used": ("Pinned memory comes from host memory (RAM), yet its failure is reported as a CUDA error."),
    "wsl_pins_little": (
        "Under WSL, a CUDA error about memory is often about pinned host memory, of which only little is available."
    ),
    "code_collects_outputs": "What every step returns is kept until the end of the epoch, for this hook: {line}",
    "told_page_file": "Windows counts each reservation against RAM and page file together.",
    "told_shutdown": "A full GPU does not crash a computer; full RAM or the power supply can.",
    "grows_in_evaluation": (
        "What grows in an evaluation: results that stay on the GPU until its end, or the graph of each batch."
    ),
    "offloaded_pinned": (
        "{program} keeps a part of the weights in pinned (page-locked) RAM, and the message lacks PyTorch's"
        " numbers: this error also occurs where the system refuses to pin more."
    ),
    "data_on_device": "It failed while the data was prepared, before a step ran: it is put on the GPU: {code}",
    "parallel_slots": (
        "The cache is allocated for {count} requests at once, each of {length} tokens: as many times the memory"
        " of one context."
    ),
    "device_is_open": "The list shows processes that have the device open.",
    "optimizer_set_up": "It failed while the optimizer was set up: its 32-bit states are allocated there.",
    "marian_workspace": "Marian reserves its workspace in one piece when it starts: {requested_bytes} here.",
    "physx_buffers": (
        "PhysX on the GPU reserves buffers whose sizes are settings, however few environments there are."
    ),
    "addresses_reserved": (
        "The driver refused to reserve addresses (cuMemAddressReserve): that takes no memory of the device yet."
    ),
    "told_mines": "Miners need the page file for the data set of each GPU, too.",
    "compiles": "Compilers were at work, which take the computer's RAM, not the GPU's; several run at once.",
    "builds_engine": "Before an engine is built, its weights are read into the computer's RAM, by each rank anew.",
    "pool_is_full": "The message names a memory pool that has reached its maximum size.",
    "told_new_only": "PyTorch's cache keeps what each new size has needed, up to the largest.",
    "told_unpinned": "Pinned (page-locked) memory is the computer's RAM, not the GPU's.",
    "told_scores_all": "Likelihoods of whole texts take logits for every position and the whole vocabulary.",
    "check_growth_by_tool": "See in {tool} over many uses whether the memory held after each increases.",
    "check_growth_by_tool_training": "See in {tool} over many steps whether the memory held after each increases.",
    "told_offload": "Offloading to the CPU keeps parameters or optimizer state in RAM.",
    "request_above_any_device": (
        "{requested_bytes} are more than any GPU has: a size is wrong, or something is computed for all pairs"
        " (attention without a fused kernel, distances)."
    ),
    "array_above_card": "The pasted code creates an array of {array_bytes}, more than the device has room for.",
    "input_named": "The text: “{what}”. What is computed from an input grows with it.",
    "gaussians_are_parameters": (
        "Each Gaussian is a set of parameters with gradients and optimizer state; their number grows during training."
    ),
    "dense_pairs": "An entry for every pair (a dense matrix) grows with the square of the number of nodes or samples.",
    "weights_above_ram": (
        "“{model}” in the text is read as {billions} billion parameters: {weights_bytes} with {bits} bits each; the"
        " computer has {ram_bytes} of RAM to load them into."
    ),
    "told_full_at_any_size": "A program that reserves its share at the start fills the device at any batch size.",
    "told_no_grad": "Without torch.no_grad(), inference keeps what a backward pass would need.",
    "told_embeddings": "A table of embeddings is part of the weights, and Adam takes three more copies of it.",
    "told_at_import": (
        "An import computes nothing: JAX and TensorFlow reserve most of a device as soon as they first use it, whatever"
        " the program needs."
    ),
    "told_generation": "A server that generates beside the training reserves its share of a device when it starts.",
    "weights_fill_one_card": (
        "“{model}” in the text is read as {billions} billion parameters: {weights_bytes} with {bits} bits each, more"
        " than one card of {total_bytes} has room for, less than {count}."
    ),
    "weights_fill_card": (
        "“{model}” in the text is read as {billions} billion parameters: {weights_bytes} with {bits} bits each; the"
        " card has {total_bytes}."
    ),
    "weights_in_32_bits": (
        "“{model}” in the text is read as {billions} billion parameters: {weights_bytes} with {bits} bits each, as many"
        " programs load them where no dtype is given; the card has {total_bytes}."
    ),
    "weights_fill_mac": (
        "“{model}” in the text is read as {billions} billion parameters: {weights_bytes} with {bits} bits each;"
        " PyTorch may use {total_bytes} of this Mac's memory."
    ),
    "weights_light": (
        "“{model}” in the text is read as {billions} billion parameters: {weights_bytes} with {bits} bits each, a small"
        " part of {total_bytes}: something else held the device, or it is not the one that was meant."
    ),
    "trained_fill_card": (
        "{count} parameters are trained: with gradients and Adam's state, all in 32 bits, they take {state_bytes}; the"
        " card has {total_bytes}."
    ),
    "adam_fills_card": (
        "Weights of {weights_bytes} need about eight times as much when all of them are trained with Adam; the"
        " card has {total_bytes}."
    ),
    "told_more_gaussians": "What a step takes grows with their number.",
    "told_idle_devices": "The model was not divided among the devices.",
    "told_split": "Such a split may count the weights only; the cache and what is computed come beside them.",
    "code_copies_weights": "The failing line makes one more copy of the weights.",
    "told_saving": "A state dict that is gathered, merged or converted is one more copy of the weights.",
    "told_evaluation": "The inputs or batches of an evaluation may be larger than those of training.",
    "told_evaluation_collects": "Evaluations often collect their results until their end.",
    "no_context": (
        "It failed when the process first accessed the device, before it had allocated anything: the device was"
        " already full."
    ),
    "moved_without_sizes": (
        "It failed while a model was moved to the device, without the sizes that PyTorch's allocator prints: the"
        " driver had no memory for the process itself."
    ),
    "large_request": (
        "{requested_bytes} in one piece: few layers have weights so large; it is rather the result of an operation."
    ),
    "buffer_statistics": (
        "XLA counts {computed_bytes} of results and temporaries in addition to {parameter_bytes} of parameters."
    ),
    "program_without_inputs": (
        "XLA's program has no parameters and computes {computed_bytes}: it creates values, as the initialization of"
        " weights does, and no batch changes that."
    ),
    "told_graph_kept": "A loss or output that is kept without detach() keeps its whole graph.",
    "pool_in_use": "The program itself held {held_bytes} of the {limit_bytes} that it may take.",
    "program_is_small": "The program itself needs only {computed_bytes}: the device, or its share, was already full.",
    "paddle_share": "The message says that Paddle may take {percent} % of the device.",
    "program_size": "XLA counts {needed_bytes} for the whole program; a core of the device has {total_bytes}.",
    "stuck_unreleasable": (
        "PyTorch released what it could before it failed, and {stuck_bytes} of its cache stayed: pieces between"
        " tensors in use. So even {requested_bytes} could not be allocated."
    ),
    "device_seen_full": "The pasted nvidia-smi output shows a GPU that is full ({used}) beside one that is free.",
    "code_stores_tensors": "The pasted loop writes results with their graphs into a tensor: {line}",
    "told_conversation": (
        "Every turn of a conversation goes through the model again with all turns before it: the KV cache grows"
        " with them."
    ),
    "told_cache_fills": "A KV cache fills the share that was reserved for it as requests come, which is no leak.",
    "told_trains_whole": ("Where all weights are trained, a gradient is kept for each, and with Adam two more values."),
    "told_adam": "Adam keeps two more values for every parameter, plain SGD none.",
    "free_in_pieces": ("{free_bytes} were free, more than the {requested_bytes} requested, but not in one piece."),
    "small_card": ("The device has only {total_bytes}, and its driver's context alone takes some hundred MiB of that."),
    "weights_logged": "The log says that the weights take {weights_bytes} of the {total_bytes}.",
    "weights_asked": (
        "“{model}” in the text is read as {billions} billion parameters: {weights_bytes} with {bits} bits each;"
        " {state_bytes} with gradients and Adam's state where all are trained in 32 bits. What is computed comes on"
        " top."
    ),
    "weights_named": (
        "“{model}” in the text is read as {billions} billion parameters: {weights_bytes} with {bits} bits each, more"
        " than most cards hold beside what is computed."
    ),
    "told_between_epochs": (
        "A step fits, then; an evaluation, samples or saving between epochs take memory of their own."
    ),
    "told_workers": "Each DataLoader worker is a process of its own, which uses RAM.",
    "library_beside_share": (
        "TensorFlow takes nearly the whole device at its start; cuDNN and cuBLAS then find too little memory"
        " beside that share."
    ),
    "handle_beside_share": (
        "The program takes most of the device at its start; a library of CUDA that is set up later finds too little"
        " beside that share."
    ),
    "runtime_takes": (
        "A model of {size} takes little itself: the rest is what its runtime sets up (CUDA's context and libraries, the"
        " workspace of TensorRT)."
    ),
    "vulkan_limit": (
        "Vulkan's drivers allow only so much in one piece (maxMemoryAllocationSize), however much is free."
    ),
    "told_fewer_layers": "Each layer that stays in RAM leaves its weights, and its part of the cache, off the device.",
    "told_merging": "Merging takes the whole model, not only what was trained.",
    "told_given": "The memory assigned to a job, pod or container is RAM; GPU memory is not divided like that.",
    "start_refused": (
        "TensorFlow was refused its share of the device at its start, before it had allocated anything: the"
        " device was in use, or the share is too large."
    ),
    "told_rises_once": "The optimizer creates its state after the first step, and gradients stay from then on.",
    "told_rises_to_a_level": "Where batches differ in size, PyTorch's cache keeps what the largest one needed.",
    "program_reserves": "{program} takes its share of the device when it starts, whatever the model needs of it.",
    "boxes_vary": (
        "A detector compares every box in an image with every anchor: images with many boxes take more memory."
    ),
    "recordings_vary": "Where recordings differ in length, PyTorch keeps what the longest so far has needed.",
    "node_of_optimizer": "The node that requested {sizes} belongs to the optimizer.",
    # The one check that would settle a cause.
    "check_fragmentation": (
        "print(torch.{device}.memory_summary()) just before the failure, and see whether reserved is far above"
        " allocated, and much of it inactive."
    ),
    "check_other_process": "Run {tool} while none of your programs runs: what is used then belongs to others.",
    "check_request_alone_too_big": (
        "Print the shapes on the failing line; their product times the element size is what was requested."
    ),
    "check_weights_too_big": "See whether the weights are larger than the device's memory.",
    "check_before_loading": (
        "Look at {tool} just before the model is loaded: where the device is nearly empty, the weights are too large."
    ),
    "check_activations": (
        "Try it with half at once (fewer, shorter or smaller inputs): if far less memory is then used, that was the"
        " cause."
    ),
    "check_before_update": (
        "Run the same with the version from before the update: if it then fits, the update takes more or keeps more,"
        " not what you run."
    ),
    "check_activations_between": (
        "Leave out what the program does between epochs (an evaluation, samples, saving): if it then goes on, that was"
        " the cause."
    ),
    "tool_of_any": "the device's memory",
    # Where the cause is open: when memory fills tells the causes apart.
    "check_when_full": (
        "Watch {tool} from before the start: full by then, others use the device (close them); full once the model is"
        " loaded, it is the weights (a smaller or quantized model); fuller with every input, something is kept (drop"
        " it); else it is what one pass computes."
    ),
    "check_when_full_training": (
        "Watch {tool} from before the start: full by then, others use the device (close them); full once the model is"
        " loaded, it is the weights (a smaller or quantized model); fuller with every step, something is kept (keep"
        " numbers, not tensors); else it is what one step computes."
    ),
    "check_when_full_late": (
        "Watch {tool} while it runs: if memory fills bit by bit, something is kept; if at once, what comes then is"
        " larger (a batch, an input, an evaluation)."
    ),
    "check_activations_training": "Halve the batch: if memory nearly halves, it is activations.",
    "check_activations_jax": (
        "Read jax.local_devices()[0].memory_stats()['peak_bytes_in_use'] with half the input: if it is far less, that"
        " was the cause; the device's tool shows only what JAX reserves."
    ),
    "told_copies": "Each instance of a served model has weights and working memory of its own.",
    "check_copies": "Start it with one instance: if that runs, the instances together are too large.",
    "driver_buffer_limit": (
        "The driver does not allocate so much in one buffer, however much memory is free: the text says so."
    ),
    "check_activations_size": (
        "Try it with inputs half as long or as large: if far less memory is then used, that was the cause."
    ),
    "check_activations_batch": (
        "Try it with half as many inputs at once: if far less memory is then used, that was the cause."
    ),
    "check_gaussians": "Watch the number of Gaussians: if memory grows with it, it is that; else it is the images.",
    "check_activations_trial": (
        "Start it with a much smaller --max-num-seqs and --max-num-batched-tokens: if it gets through, the size"
        " of the trial run was the cause."
    ),
    "check_logits_or_loss": "Compare the request with batch x length x vocabulary x 4 bytes.",
    "check_attention_scores": "Compare the request with batch x heads x length x length x element size.",
    "check_optimizer_state": "See whether it fails at the optimizer's first step, where its state is created.",
    "check_leak_or_retained_reference": "Print {call} after each step or request, and see whether it increases.",
    "check_memory_fraction_limit": "See which share this process was given, and whether it holds all of it.",
    "check_memory_fraction_limit_inference": (
        "The log says how much of the share weights, activations and cache take."
    ),
    "check_memory_fraction_limit_context": "The log says how many tokens the cache holds: allow no longer sequences.",
    "check_memory_fraction_limit_mps": (
        "Print torch.mps.driver_allocated_memory() and torch.mps.recommended_max_memory() just before it fails."
    ),
    "check_sysmem_fallback": "Watch 'Shared GPU memory' in the Task Manager: it grows once the card is full.",
    "check_host_ram": "See whether the RAM is full when it fails (on Linux with free -h; dmesg names what was killed).",
    "check_host_ram_slurm": "Compare what it used with what the job was given: sacct -j JOB -o MaxRSS,ReqMem.",
    "check_host_ram_pod": "Compare what it used (kubectl top pod) with its limit (kubectl describe pod).",
    "check_host_ram_hosted": "Watch the notebook's own RAM display while it runs.",
    "check_host_ram_wsl": "Run free -h inside WSL while it works: that is what WSL was given, not the computer's RAM.",
    "check_host_ram_windows": "Watch the committed memory (Task Manager, Performance, Memory) while it runs.",
    "check_host_ram_mac": "Watch the memory pressure in Activity Monitor while it runs.",
    "check_shared_memory": "Run df -h /dev/shm while it works.",
    "check_driver_level": "Look at the device just before it fails: is it full, and what fills it?",
    "check_not_oom": "Run the same on the CPU: the true error is reported there.",
}
