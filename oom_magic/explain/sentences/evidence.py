"""What in a text speaks for a cause, and how to check each, in English."""

from __future__ import annotations

from oom_magic.language import Plural, Sentences

EVIDENCE: Sentences = {
    # Numbers.
    "request_absurd": (
        "{requested_bytes} were asked for on a device of {total_bytes}: nobody meant a tensor of that size, so a shape"
        " on the failing line is wrong (a size that was multiplied in, an index taken for a length)."
    ),
    "request_is_power": "{requested_bytes} are 2**{exponent} bytes: the product of sizes that overflowed.",
    "quoted_tensor": "The text quotes the code that computes it.",
    "request_of_line": "What was multiplied are the sizes on this line: {code}",
    "request_overflowed": (
        "A size of {requested_bytes} is a number that overflowed: sizes multiplied beyond what an integer holds, or a"
        " negative size."
    ),
    "mps_refused_all": (
        "{held_bytes} of {limit_bytes} were taken, and yet {requested_bytes} were refused: Metal gave nothing at all,"
        " as in a virtual machine without a GPU of its own."
    ),
    "mps_own_fill": "PyTorch itself held {held_bytes} of the {limit_bytes} that this Mac's GPU is allowed.",
    "mps_watermark": (
        "{limit_bytes} is PyTorch's own mark for MPS (PYTORCH_MPS_HIGH_WATERMARK_RATIO, as a share of what Metal"
        " recommends), not the end of the memory; {held_bytes} came close to it."
    ),
    "stuck_and_free_above_request": (
        "{stuck_bytes} lay unused in PyTorch's cache and {free_bytes} were free: together enough for the"
        " {requested_bytes} asked for, but not in one piece."
    ),
    "small_carve_out": (
        "A device of {total_bytes} is the part of the RAM that an integrated GPU was given, not all that it could use."
    ),
    "address_space_in_pieces": (
        "Free memory in pieces can refuse a request that its sum would hold; expandable_segments helps where it works."
    ),
    # Frames and pasted code.
    "gathers_predictions": (
        "The evaluation collects the logits of every batch on the GPU until its end; they grow with the evaluation set."
    ),
    "code_appends_tensors": "The pasted loop keeps tensors with their graphs: {line}",
    "code_sums_tensors": "The pasted code sums tensors, not numbers, and so keeps the graph of every turn: {line}",
    "code_carries_state": (
        "The pasted loop carries a state from turn to turn without detach(), with all that made it: {line}"
    ),
    "code_collects_tensors": "The pasted loop collects results on the GPU: {line}",
    "code_averages_tensors": "A meter is given the tensor instead of its number, and may keep its graph: {line}",
    "code_retains_graph": "retain_graph=True keeps what a backward would free: {line}",
    "code_infers_with_gradients": (
        "The pasted loop infers without torch.no_grad(), so every call keeps its graph while its result lives: {line}"
    ),
    # Programs and their stages.
    "program_pictures": "a program that makes pictures or videos",
    "program_server": "an inference server",
    "program_seen": "This is {program} at work, not a training loop.",
    "stage_kv_cache": "{program} failed while it made room for the cache of keys and values.",
    "stage_graphs": "{program} failed while it captured CUDA graphs, which need memory beside weights and cache.",
    "stage_logits": "{program} failed while it made logits for the whole vocabulary.",
    "stage_profiling": "{program} failed in its trial run with the largest batch that it is told to take.",
    "stage_sampler": "{program} failed when it tried its sampler with as many requests as it may take at once.",
    "stage_adapters": "{program} failed while it made room for adapters (LoRA), which lie beside its weights.",
    "stage_running": "{program} had loaded the model and failed when it first computed with it.",
    "stage_loading": "{program} failed while it loaded weights.",
    "stage_serving": "{program} failed while it answered requests, beside the memory that it keeps for its cache.",
    "stage_warmup": "{program} failed in its warmup, with as many tokens as it is told to take at once.",
    "stage_vae": (
        "{program} failed in the VAE, whose memory grows with the size of the picture and the number of frames."
    ),
    "stage_sampling": "{program} failed while it sampled; what that takes grows with the size of the picture.",
    "stage_compute": (
        "{program} failed to make its buffers for computing, which grow with context and batch (-c, -ub)."
    ),
    "stage_building": "{program} failed while it built an engine: it tries kernels there, each with memory of its own.",
    "stage_calibrating": "{program} ran the calibration samples, whose activations grow with their number and length.",
    "above_own_share": (
        "{program} keeps itself to {percent} % of the device with its cache, yet PyTorch held {held_bytes} of"
        " {total_bytes}: what lies beyond are weights or work, not cache."
    ),
    "little_free_at_start": (
        "When it started, only {free_bytes} of {total_bytes} were free: something else held the rest."
    ),
    "cache_exceeds_weights": (
        "The cache of keys and values is to take {cache_bytes}, the weights {weights_bytes} with it: the context asked"
        " for is long."
    ),
    "buffers_listed": (
        "The log lists the largest buffers: results of the computation, which grow with batch and input."
    ),
    "small_request_refused": (
        "A request of only {requested_bytes} was refused: the device, or the share given to this process, was full"
        " before."
    ),
    "shape_of_scores": "The array {sizes} is a score matrix: batch, heads, and the sequence length twice.",
    "scores_of_picture": (
        "A picture of {sides} is {positions} positions of a latent an eighth as high and wide; attention scores between"
        " all of them have the size asked for."
    ),
    "device_misreported": (
        "TensorFlow asks for what the device is said to have, and {requested_bytes} are no device's: driver, runtime"
        " and TensorFlow do not understand each other."
    ),
    "shape_of_kernel": "The array {sizes} is a layer's kernel, which no smaller batch changes.",
    "shape_of_batch": "The array {sizes} grows with its first size, the batch.",
    "shape_of_matrix": "The matrix {sizes} is a batch of rows, or a layer's weights, which no smaller batch changes.",
    "small_request_on_full": (
        "A small request on a device that PyTorch had filled before ({held_bytes} of {total_bytes}): what fills it is"
        " the model."
    ),
    # The run and its author's words.
    "smaller_batch_helps": "The text says that a smaller batch helps.",
    "larger_input_fails": "The text speaks of large inputs; activations grow with them.",
    "host_fills": "The text speaks of the computer's own memory (RAM) filling up, not of the GPU's.",
    "told_shared": "The text says that other programs use the device.",
    "told_models_beside": "The text speaks of other models that are loaded beside this one.",
    "check_models_beside": "Load it alone: if it runs then, the others had taken its room.",
    "told_models_in_turn": (
        "The text trains one model after the other: TensorFlow keeps the memory of earlier ones until their graphs are"
        " cleared or the process ends."
    ),
    "told_metrics": "The text is about metrics: one that is updated in each step and never reset keeps all of it.",
    "told_pieces": "The text says that what is free lies in pieces.",
    "told_fragmented": "Sizes that change from step to step leave gaps in the cache.",
    "late_steps": Plural(
        "It failed after {count} step: what one step takes had fitted before.",
        "It failed after {count} steps: what one step takes had fitted before.",
    ),
    "late_epochs": "It failed in or after epoch {count}: what one step takes had fitted before.",
    "largest_batch_late": "Where batches differ in size, the largest one may come late.",
    "late_at_round_step": (
        "It failed after a round number of steps: programs evaluate, draw samples or save then, which comes on top."
    ),
    "rows_are_tokens": "{rows} rows are the tokens of a batch: {batch} x {length}.",
    "first_steps_fail": "It failed at step {count}: a step as it is does not fit.",
    "index_error_beside": (
        "The text names an index or label out of range: on the GPU that can look like this, and less memory will not"
        " cure it."
    ),
    "training_told": "The text is about training.",
    "checkpoint_to_gpu": "torch.load() puts a checkpoint back on the GPU that it was saved from, beside the model.",
    "ranks_load_to_one": (
        "Every process puts its context and what it loads on the same GPU, unless torch.cuda.set_device and"
        " map_location say otherwise."
    ),
    "checkpoint_kept": (
        "It fails only after resuming: the checkpoint that was loaded (optimizer state too) is still held beside the"
        " model."
    ),
    "pinned_under_wsl": (
        "Pinned memory under WSL: only a small part of the RAM can be pinned there, and what fails then says"
        " 'CUDA error: out of memory' with the GPU half empty."
    ),
    "pinned_memory_used": (
        "Pinned memory is taken from the computer's RAM, yet its failure is reported as a CUDA error."
    ),
    "wsl_pins_little": (
        "Under WSL a CUDA error about memory is often about pinned memory of the host, of which little can be had."
    ),
    "code_collects_outputs": "What every step returns is kept until the epoch's end, for this hook: {line}",
    "told_page_file": "The size of the page file decides: what fills is RAM, of which Windows counts each reservation.",
    "told_shutdown": "The whole computer stops: a full GPU does not do that, full RAM or the power supply can.",
    "grows_in_evaluation": (
        "Memory grows during the evaluation: results stay on the GPU until its end, or each batch's graph does."
    ),
    "offloaded_pinned": (
        "{program} keeps a part of the weights in pinned (page-locked) RAM, and the message lacks PyTorch's numbers: it"
        " also comes where the system refuses to pin more."
    ),
    "data_on_device": "It failed while the data were made ready, before a step ran: they are put on the GPU: {code}",
    "parallel_slots": (
        "The cache is made for {count} requests at once, each of {length} tokens: that many times one context."
    ),
    "told_frees_at_end": (
        "Memory comes back when the process ends: until then it is held, in this notebook or in another."
    ),
    "device_is_open": "The list shows processes that have the device open.",
    "optimizer_set_up": "It failed while the optimizer was set up: its states in 32 bits are made there.",
    "pool_is_full": "The message names a pool that has reached the largest size it may take.",
    "told_scores_all": (
        "The text is about likelihoods of whole texts: logits for every position and the whole vocabulary are made at"
        " once."
    ),
    "check_growth_by_tool": "Watch {tool} over many uses: what is held after each must not rise.",
    "told_killed": (
        "The text says that the process was killed, or that it died without a message: a lack of RAM looks like that."
    ),
    "told_offload": "Offloading to the CPU keeps parameters or optimizer state in RAM.",
    "request_above_any_device": (
        "{requested_bytes} are more than any GPU has: a size is wrong, or something is made of all pairs (attention"
        " without a fused kernel, distances)."
    ),
    "array_above_card": "The pasted code creates an array of {array_bytes}, more than the device has room for.",
    "input_named": "The text names a large input ({what}); what is computed from it grows with it.",
    "gaussians_are_parameters": (
        "Each Gaussian is a set of parameters with gradients and optimizer state; their number grows in training."
    ),
    "dense_pairs": "An entry for every pair (a dense matrix) grows with the square of the number of nodes or samples.",
    "told_whole": "The whole graph, picture or data set goes through the model at once.",
    "smaller_input_works": "The text says that smaller inputs work.",
    "weights_above_ram": (
        "A model of the size that the text names takes {weights_bytes} for its weights; the computer has {ram_bytes} of"
        " RAM to read it into."
    ),
    "told_no_share": "It failed without memory taken in advance, too.",
    "told_full_at_any_size": (
        "The text says that memory is full whatever the batch: a program that reserves its share at the start looks so."
    ),
    "told_no_grad": "The text speaks of torch.no_grad(): without it an inference keeps what a backward would need.",
    "told_embeddings": (
        "The text is about embeddings of many things: their table is part of the weights, and Adam takes three more of"
        " it."
    ),
    "told_generation": "Beside the training a server (vLLM) generates: it reserves its share of a device at its start.",
    "told_share": "The text is about the share of the device that a program reserves.",
    "weights_fill_card": (
        "A model of the size that the text names takes {weights_bytes} for its weights; the card has {total_bytes}."
    ),
    "adam_fills_card": (
        "Weights of {weights_bytes} need about eight times as much when all are trained with Adam; the card has"
        " {total_bytes}."
    ),
    "told_saving": (
        "The text speaks of saving: a state dict that is gathered, merged or converted is one more copy of the weights."
    ),
    "told_loading": "The text says that it fails while a model is loaded.",
    "told_evaluation": "It fails at the evaluation, whose inputs or batches may be larger than those of training.",
    "told_evaluation_collects": "Evaluations often collect their results on the GPU.",
    "told_repeated": "The text says that memory is not given back from one use to the next.",
    "replay_buffer": "The text speaks of a replay buffer or of reinforcement learning, where past steps are kept.",
    "no_context": (
        "It failed while the process first touched the device, before it had allocated anything: the device was full"
        " already."
    ),
    "moved_without_sizes": (
        "It failed while a model was moved to the device, without the sizes that PyTorch's allocator prints: the driver"
        " had no room for the process itself."
    ),
    "told_files": "The text speaks of files of data that are read or written, and of no GPU.",
    "told_left_over": "The text speaks of memory that stays in use after a run has ended or crashed.",
    "told_room_at_start": "There was room at the start, so a step fits: what fills up later is kept from step to step.",
    "told_late": "It failed only after a while.",
    "large_request": (
        "{requested_bytes} in one piece are more than a layer's weights take: a result of some operation."
    ),
    "tiny_run": "One small picture at a time takes little of a card: something else must fill it.",
    "told_batch_of_one": "Even a batch of 1 does not fit.",
    "inference_told": "The text is about inference, not about training.",
    "buffer_statistics": (
        "XLA counts {computed_bytes} of results and temporaries beside {parameter_bytes} of parameters."
    ),
    "told_graph_kept": "The text speaks of tensors kept with their graphs (sums of losses, no detach()).",
    "smaller_share_helps": "The text says that a smaller share of the device helps.",
    "computing_told": "Nothing in the text speaks clearly for one cause; what a run computes is the likeliest.",
    "program_is_small": "The program itself needs only {computed_bytes}: the device, or its share, was full before.",
    "stuck_unreleasable": (
        "PyTorch gave back what it could before it failed, and {stuck_bytes} of its cache stayed: pieces between"
        " tensors in use. So even {requested_bytes} found no room."
    ),
    "told_collects": "The text says that the results of every step are collected.",
    "device_seen_full": "The pasted nvidia-smi shows a GPU that is full ({used}) beside one that is free.",
    "code_stores_tensors": "The pasted loop writes results with their graphs into a tensor: {line}",
    "told_loads_data": "The text says that the whole data set is loaded at once.",
    "told_ram_only": "The text speaks of RAM and of no GPU.",
    "told_conversation": (
        "Every turn of a conversation goes through the model again with all turns before it: the cache of keys"
        " and values grows with them."
    ),
    "told_cache_fills": (
        "The cache of keys and values fills the share that was reserved for it: by long and many requests, not by a"
        " leak."
    ),
    "told_adam": "The text compares optimizers: Adam keeps two more values for every parameter, plain SGD none.",
    "smaller_input_no_help": (
        "The text says that smaller inputs do not help: what fills the device does not grow with them."
    ),
    "small_card": "A card of {total_bytes} has little room for the activations of what is usually trained today.",
    "larger_batch_fails": "The text says that it fails where more goes through at once.",
    "weights_logged": "The log says that the weights take {weights_bytes} of the {total_bytes}.",
    "weights_named": "The model that the text names has about {weights_bytes} of weights: most cards hold no more.",
    "told_workers": "The text is about workers that load data: each is a process of its own, which fills RAM.",
    "library_beside_share": (
        "TensorFlow takes nearly the whole device at its start; cuDNN and cuBLAS then find too little beside that"
        " share."
    ),
    "told_merging": "The text is about merging: there the whole model is made in full precision.",
    "told_given": "The memory that a job, pod or container is given is the computer's; a GPU's is not shared out so.",
    "told_host_library": "The text names libraries that compute in the computer's memory, not on a GPU.",
    "told_no_device": "The text names no GPU and nothing that one computes: such programs use the computer's memory.",
    "start_refused": (
        "TensorFlow was refused its share of the device at its start, where it has allocated nothing yet: the device"
        " was in use, or the share is set too large."
    ),
    "told_rises_once": (
        "The memory rose once, after the first step: there the optimizer makes its state, and gradients stay from then"
        " on."
    ),
    "told_rises_to_a_level": (
        "The memory rose to a level: where batches differ in size, PyTorch's cache keeps what the largest one needed."
    ),
    "program_reserves": "{program} takes its share of the device when it starts, whatever the model needs of it.",
    "boxes_vary": (
        "A detector compares every box of a picture with every anchor: pictures with many boxes take more memory."
    ),
    "recordings_vary": (
        "Recordings differ in length, and PyTorch keeps what the longest so far has needed: use rises with each that is"
        " longer."
    ),
    "node_of_optimizer": "The node that asked for {sizes} belongs to the optimizer.",
    "precedents": (
        "By the words that it shares with {count} public reports whose cause was found, this one has a share of about"
        " {percent} %."
    ),
    # The one check that would settle a cause.
    "check_fragmentation": (
        "print(torch.{device}.memory_summary()) just before: reserved far above allocated, much of it inactive."
    ),
    "check_other_process": "Run {tool} while nothing of yours runs: what is used then belongs to others.",
    "check_request_alone_too_big": (
        "Print the shapes on the failing line; their product times the element's size is what was asked for."
    ),
    "check_weights_too_big": (
        "Count parameters times bytes each: sum(p.numel() * p.element_size() for p in model.parameters())."
    ),
    "check_weights_too_big_inference": "Compare the size of the model's files with the device's memory.",
    "check_activations": "Halve the batch: if memory nearly halves, it is activations.",
    "check_activations_inference": "Give it half as much at once: if it then runs, it was that.",
    "check_activations_trial": (
        "Start it with much smaller --max-num-seqs and --max-num-batched-tokens: if it gets through, it was the trial's"
        " size."
    ),
    "check_logits_or_loss": "Compare the request with batch x length x vocabulary x 4 bytes.",
    "check_attention_scores": "Compare the request with batch x heads x length x length x element size.",
    "check_optimizer_state": "See whether the first optimizer.step() fails, and whether plain SGD gets through it.",
    "check_leak_or_retained_reference": "Print {call} after each step or request: it must not rise.",
    "check_memory_fraction_limit": "See what share this process was given, and what it holds.",
    "check_memory_fraction_limit_inference": "The log says what weights, computing and cache take of the share.",
    "check_memory_fraction_limit_context": "The log says how many tokens the cache holds: allow no longer sequence.",
    "check_memory_fraction_limit_mps": (
        "Print torch.mps.driver_allocated_memory() and torch.mps.recommended_max_memory() just before it fails."
    ),
    "check_sysmem_fallback": "Watch 'Shared GPU memory' in the Task Manager: it grows once the card is full.",
    "check_host_ram": "Watch the RAM while it runs (on Linux free -h; dmesg names what was killed there).",
    "check_host_ram_slurm": "Compare what it took with what the job was given: sacct -j JOB -o MaxRSS,ReqMem.",
    "check_host_ram_pod": "Compare what it took (kubectl top pod) with its limit (kubectl describe pod).",
    "check_host_ram_hosted": "Watch the notebook's own display of its RAM while it runs.",
    "check_host_ram_windows": "Watch the committed memory (Task Manager, Performance, Memory) while it runs.",
    "check_shared_memory": "df -h /dev/shm while it works.",
    "check_driver_level": "Look at the device just before it fails: is it full, and who fills it?",
    "check_not_oom": "Run the same on the CPU: there the true error is named.",
}
