"""Every sentence that %oom_explain says, in English.

Keys are ``group_name``; the fields in braces are the same in both languages, and those that end in
``_bytes`` are filled with sizes.
"""

from __future__ import annotations

from oom_magic.explain.sentences.meanings import MEANINGS
from oom_magic.explain.sentences.remedies import REMEDIES
from oom_magic.language import Plural, Sentences

CATALOGUE: Sentences = {
    # Causes: what happened, in one line.
    "cause_fragmentation": (
        "Fragmentation: enough memory lies in PyTorch's cache, but in pieces too small for the request."
    ),
    "cause_other_process": "Another process holds a large part of this device's memory.",
    "cause_request_alone_too_big": "One tensor alone is larger than the device allows, however empty it is.",
    "cause_weights_too_big": "The model's weights do not fit on the device.",
    "cause_activations": (
        "The activations of a step do not fit: what the forward pass keeps grows with batch and length."
    ),
    "cause_logits_or_loss": "The logits or the loss over the whole vocabulary do not fit.",
    "cause_attention_scores": "The attention scores do not fit: they grow with the square of the sequence length.",
    "cause_optimizer_state": "The optimizer's state does not fit; it is created in the first step and stays.",
    "cause_leak_or_retained_reference": (
        "Something keeps alive what is no longer needed: tensors of earlier steps or failures, an older copy."
    ),
    "cause_memory_fraction_limit": "A limit set for this process was reached, not the end of the device's memory.",
    "cause_sysmem_fallback": "The driver had moved memory to the computer's RAM (Windows or WSL); that ran out, too.",
    "cause_host_ram": "The computer's own memory (RAM) ran out, not the GPU's.",
    "cause_shared_memory": "The shared memory (/dev/shm) that data loading workers use ran out, not the GPU's memory.",
    "cause_driver_level": (
        "The driver, or a library that asks it directly, could not get memory, outside PyTorch's own allocator."
    ),
    "cause_not_oom": "This is not about running out of device memory.",
    "cause_unknown": "The text alone does not establish the cause.",
    # How sure a judgement is.
    "confidence_certain": "certain",
    "confidence_likely": "likely",
    "confidence_possible": "possible",
    "confidence_open": "open",
    # Phases of a run.
    "phase_loading": "It failed while loading weights: {code}",
    "phase_forward": "It failed in the forward pass: {code}",
    "phase_loss": "It failed while computing the loss: {code}",
    "phase_backward": "It failed in the backward pass: {code}",
    "phase_optimizer_step": "It failed in the optimizer's step: {code}",
    "phase_evaluation": "It failed during evaluation, and no torch.no_grad() is to be seen: {code}",
    "phase_saving": "It failed while saving a checkpoint: {code}",
    # Evidence: the numbers and lines that a judgement rests on.
    "allocated_above_capacity": (
        "PyTorch held {held_bytes} on a device of {total_bytes}. That is no misprint: the driver had put the"
        " rest into the computer's RAM."
    ),
    "limit_binds": "{held_bytes} held and {requested_bytes} asked for, under a limit of {limit_bytes}.",
    "free_above_request": "{free_bytes} were free, yet a request of {requested_bytes} was refused.",
    "private_pools_hold": (
        "{private_pool_bytes} of the {allocated_bytes} allocated lie in private pools of CUDA graphs."
    ),
    "request_above_capacity": "{requested_bytes} were asked for; the device allows {total_bytes} in all.",
    "above_block_limit": (
        "{requested_bytes} were asked for in one block with {free_bytes} free: Intel's driver gives no block of"
        " {limit_bytes} or more unless UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1 is set."
    ),
    "tensor_attention_scores": "The failing line computes attention scores: {code}",
    "tensor_logits_or_loss": "The failing line computes logits or a loss: {code}",
    "tensor_matches": "The size asked for is that of one tensor of this model: {formula}.",
    "alive_in_call": (
        "Of the {allocated_bytes} allocated, {own_bytes} were alive in the failed call alone: what its forward keeps."
    ),
    "tensor_kv_cache": (
        "The failing line makes the cache of keys and values longer: {code} It grows with batch, length and layers by"
        " each token, and joining it anew holds the old and the new one for a moment. One of fixed size, of fewer bits"
        ' or in RAM takes less (cache_implementation="static", "quantized" or "offloaded" in model.generate).'
    ),
    "others_listed": "Process {pids} held {other_bytes} of {total_bytes}.",
    "others_unlisted": (
        "PyTorch held only {held_bytes}; about {other_bytes} of {total_bytes} belong to no process listed."
    ),
    "mps_others": (
        "Other allocations took {other_bytes} of the {limit_bytes} allowed, PyTorch {held_bytes}. They are this"
        " program's, too: what Metal holds for it beside PyTorch's tensors (temporaries and caches of graphs, other"
        " libraries)."
    ),
    "stuck_above_request": "{stuck_bytes} were reserved but unallocated, more than the {requested_bytes} asked for.",
    "room_in_pieces": "{free_bytes} free and {stuck_bytes} unused in the cache, yet {requested_bytes} found no place.",
    "memory_grows": "The text says that memory keeps growing.",
    "own_tensors_fill": "PyTorch itself held {held_bytes} of {total_bytes}.",
    "whose_not_said": (
        "Whether that were weights, activations or optimizer state, the message does not say; in training it is"
        " most often activations, which grow with batch and length."
    ),
    "rest_unlisted": (
        "{other_bytes} of {total_bytes} belong neither to PyTorch nor to a process listed: CUDA's libraries,"
        " NCCL, or programs that the message does not show."
    ),
    "why_not_granted": (
        "Memory that is free and yet refused: another program held it at that moment, a driver sets a limit"
        " (Windows, WSL, Jetson), or its address space is in pieces."
    ),
    "calls_alive": Plural(
        "The model was called {count} time since the last optimizer step, and what the call kept for a"
        " backward is still alive ({kept_bytes}): some list, sum or variable holds its output or loss.",
        "The model was called {count} times since the last optimizer step, and what the calls kept for a"
        " backward is still alive ({kept_bytes}): some list, sum or variable holds their outputs or losses.",
    ),
    "earlier_steps_alive": (
        "{kept_bytes} made in earlier steps are still alive, and are neither weights nor gradients nor"
        " optimizer state: something keeps them."
    ),
    "start_supposed": (
        "oom_magic was loaded after the failure: what the cell found on the card is worked out from what is there now."
    ),
    "rehearsal_fits": (
        "Rehearsed as it is, the run needs {needed_bytes} of the {usable_bytes} that can be had: it would fit."
        " What failed was larger, or something else held memory then."
    ),
    "first_steps_fit": Plural(
        "Rehearsed as it is for {num_steps} optimizer step, the run needs {needed_bytes} of the {usable_bytes} that"
        " can be had: it would fit. What failed came later or was larger, or something else held memory then.",
        "Rehearsed as it is for {num_steps} optimizer steps, the run needs {needed_bytes} of the {usable_bytes} that"
        " can be had: they would fit. What failed came later or was larger, or something else held memory then.",
        "num_steps",
    ),
    "no_message": "The text holds no error message about memory.",
    # The budget's rows.
    "budget_allocated": "allocated to tensors",
    "budget_private_pools": "private pools of CUDA graphs",
    "budget_stuck": "stuck in PyTorch's cache",
    "budget_reserved": "reserved by PyTorch",
    "budget_own_process": "this process",
    "budget_own_outside": "this process, outside PyTorch",
    "budget_other_processes": "other processes",
    "budget_mps_other": "other allocations on this Mac's GPU",
    "budget_free": "free",
    "budget_rounding": "rounding of the printed sizes",
    "budget_unexplained": "held by nobody listed",
    "budget_outside": "outside PyTorch: CUDA context, libraries, other processes",
    "budget_outside_device": "outside PyTorch: the device's context, libraries, other processes",
    "budget_in_system_memory": "moved to system memory",
    "budget_contradiction": "the printed sizes contradict each other",
    "budget_above_limit": "above PyTorch's own limit",
    "budget_not_said": "not said",
    "budget_capacity": "capacity",
    "budget_limit": "PyTorch's limit",
    # Tensors that could have asked.
    "tensor_name_attention_scores": "the attention scores",
    "tensor_name_logits": "the logits",
    "tensor_name_mlp_activation": "an activation of the feed-forward layer",
    "tensor_name_hidden_states": "hidden states",
    "tensor_name_qkv": "queries, keys and values together",
    "tensor_name_embedding_weight": "the embedding's or output layer's weight",
    "tensor_name_mlp_weight": "a weight of the feed-forward layer",
    "tensor_name_attention_weight": "a weight of the attention layer",
    "tensor_name_all_parameters": "a copy of all parameters",
    "tensor_name_stated": "the array that the message names",
    "tensor_not_printed": "The message prints no request.",
    "tensor_nameless": (
        "2.00 and 20.00 MiB are what PyTorch asks for when any small tensor needs room: they name none."
    ),
    "tensor_none_fits": (
        "No usual tensor of this model has the size that was asked for: its batches may be longer than the text says,"
        " or it is another model."
    ),
    "tensor_unknown_model": "Nothing is known of the model, and no common shape has this size.",
    # PyTorch's own tip, judged.
    "tip_delays": (
        "PyTorch's tip would only have delayed it: {stuck_bytes} stuck in its cache would have served these"
        " {requested_bytes}, but are little beside the {held_bytes} held."
    ),
    "tip_delays_with_free": (
        "PyTorch's tip would only have delayed it: {stuck_bytes} stuck in its cache, with the {free_bytes} free, would"
        " have served these {requested_bytes}, but are little beside the {held_bytes} held."
    ),
    "tip_applies": "PyTorch's tip applies: {stuck_bytes} stuck in its cache would have served the {requested_bytes}.",
    "tip_applies_with_free": (
        "PyTorch's tip may help: {stuck_bytes} stuck in its cache and {free_bytes} free would together have served"
        " the {requested_bytes}, as one growing segment."
    ),
    "tip_does_not_apply": (
        "PyTorch's tip does not help: its cache holds only {stuck_bytes}, {requested_bytes} were asked for."
    ),
    "tip_already_followed": (
        "PyTorch's tip is followed already (expandable_segments is on), yet {stuck_bytes} are stuck;"
        " {requested_bytes} were asked for."
    ),
    "tip_unsupported": (
        "PyTorch's tip fits the numbers ({stuck_bytes} stuck, {requested_bytes} asked for), but"
        " expandable_segments does not work on {system}; max_split_size_mb does."
    ),
    # How to read the numbers.
    "fact_expandable_windows": "expandable_segments does nothing on Windows: PyTorch ignores the setting there.",
    "fact_no_shutdown": (
        "Running out of GPU memory ends a program; it does not shut a machine down. Where the machine itself goes off,"
        " look at its power supply, its heat and its RAM."
    ),
    "fact_own_pid": "Process {pid} ({own_bytes}) is this very process: a container shows its number on the host.",
    "fact_process_size_unknown": "A size of 17179869184.00 GiB means that the driver does not tell.",
    "fact_accumulation": (
        "Gradient accumulation leaves the memory of a step as it is: microbatches run one after the other, so"
        " only the size of one counts."
    ),
    "fact_device_zero": "The text ends at the device's number, which PyTorch 2.3 does for device 0 only.",
    "fact_private_pools": (
        "{private_pool_bytes} counted as allocated are free, but only for the CUDA graph that owns them."
    ),
    "fact_cached_excludes_allocated": "In this version, cached means the memory kept beside what is allocated.",
    "fact_free_above_capacity": "{free_bytes} free is more than the capacity: this driver misreports one of the two.",
    **MEANINGS,
    **REMEDIES,
}
