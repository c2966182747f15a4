"""Every sentence that %oom_explain says, in English.

Keys are ``group_name``; the fields in braces are the same in both languages, and those that end in
``_bytes`` are filled with sizes.
"""

from __future__ import annotations

from oom_magic.errors import REFUSALS
from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.sentences.evidence import EVIDENCE
from oom_magic.explain.sentences.meanings import MEANINGS
from oom_magic.explain.sentences.pages import PAGE_CATALOGUE
from oom_magic.explain.sentences.program_remedies import PROGRAM_REMEDIES
from oom_magic.explain.sentences.remedies import REASONS, REMEDIES
from oom_magic.language import Language, Plural, Sentences, render

CATALOGUE: Sentences = {
    # Causes: what happened, in one line.
    "cause_fragmentation": (
        "Fragmentation: PyTorch's cache has enough memory, but in pieces too small for the request."
    ),
    "cause_fragmentation_free": "Fragmentation: what is free is in pieces too small for the request.",
    "cause_other_process": "Another process holds a large part of this device's memory.",
    "cause_other_process_within": (
        "Something outside PyTorch holds a large part of this device's memory: another library in the same process, or"
        " another process."
    ),
    "cause_other_process_models": "Other models hold a large part of this device's memory.",
    "cause_request_alone_too_big": "A single tensor is larger than the device allows, however empty it is.",
    "cause_weights_too_big": "The model's weights do not fit on the device.",
    "cause_weights_too_big_trained": "The model's weights and their gradients do not fit together on the device.",
    "cause_weights_too_big_loading": (
        "There was no room for the model's weights when they were loaded: they are too large, or something else was"
        " there."
    ),
    "cause_weights_too_big_running": "The model's weights leave no room on the device for what a computation takes.",
    "cause_weights_too_big_twice": ("A checkpoint is loaded onto the GPU, and does not fit beside what is there."),
    "cause_weights_too_big_copied": "One more copy of the weights does not fit beside them.",
    "cause_weights_too_big_saving": (
        "The extra copy of the weights while they are saved, merged or gathered does not fit beside them."
    ),
    "cause_weights_too_big_crowded": (
        "What is gathered, loaded or started on one GPU does not fit there beside its share."
    ),
    "cause_activations": (
        "The activations of a step do not fit: what the forward pass saves grows with the batch size and the"
        " input size."
    ),
    "cause_activations_together": (
        "The graphs of all parts of a step are alive together: no backward pass runs before the last part is computed."
    ),
    "cause_activations_inference": (
        "The working memory of one pass does not fit: it grows with the input (length, image size, requests or"
        " rows at a time)."
    ),
    "cause_activations_cache": (
        "The KV cache does not fit beside the rest: it grows with each token and with the batch."
    ),
    "cause_activations_cache_by_turn": (
        "The KV cache does not fit: it grows by {turn_bytes} with each token, to {grown_bytes} with all {count}."
    ),
    "cause_activations_by_turn": (
        "What the loop keeps of each iteration does not fit: {turn_bytes} more with every one, {grown_bytes} with all"
        " {count}. A KV cache grows so with each token."
    ),
    "cause_activations_trial": (
        "The server's trial run does not fit: before it allocates its KV cache, it computes the largest batch"
        " that it is configured for."
    ),
    "cause_activations_between": (
        "A step of the first epoch fits; what comes after it (an evaluation, samples, saving, larger inputs) does not."
    ),
    "cause_activations_waiting": (
        "The data are on the GPU as a whole, where a step needs one batch of them: beside them, it does not fit."
    ),
    "cause_activations_data": "The data moved to the GPU as a whole does not fit; no step has run yet.",
    "cause_logits_or_loss": "The logits or the loss over the whole vocabulary do not fit.",
    "cause_logits_or_loss_outputs": "The model's outputs, or the loss computed from them, do not fit.",
    "cause_attention_scores": "The attention scores do not fit: they grow with the square of the sequence length.",
    "cause_optimizer_state": "The optimizer state does not fit; it is created in the first step and stays.",
    "cause_optimizer_state_resumed": "The optimizer state loaded from the checkpoint does not fit beside the rest.",
    "cause_optimizer_state_set_up": "The weights and the optimizer state do not fit together; no step has run yet.",
    "cause_leak_or_retained_reference": (
        "Something keeps memory alive that is no longer needed: tensors of earlier steps or failures, or an older copy."
    ),
    "cause_leak_or_retained_reference_late": (
        "If earlier steps or requests went well: either something is kept from one to the next, or what came then was"
        " larger."
    ),
    "cause_leak_or_retained_reference_or_cache": (
        "Either the framework's cache keeps this memory for later use, or the program still holds it: only what is held"
        " rises with every use."
    ),
    "cause_memory_fraction_limit": "A limit set for this process was reached, not the capacity of the device.",
    "cause_memory_fraction_limit_server": (
        "The server's memory budget is full: beside the weights and the KV cache, there is no room for the rest"
        " (CUDA graphs, the activations of requests)."
    ),
    "cause_memory_fraction_limit_cache": (
        "The weights and activations fill the server's share of the device: nothing is left of it for the KV cache."
    ),
    "cause_memory_fraction_limit_requests": "The KV cache has no room for all requests that run at once.",
    "cause_memory_fraction_limit_context": (
        "The KV cache gets what the weights leave of the server's share, which is too little for one sequence of"
        " the allowed length."
    ),
    "cause_memory_fraction_limit_reserved": "The program reserves its share of the device when it starts.",
    "cause_sysmem_fallback": (
        "The driver had moved GPU memory to host memory (Windows or WSL), and that ran out, too."
    ),
    "cause_leak_or_retained_reference_replay": "What is kept of past steps (a replay buffer) fills the memory.",
    "cause_host_ram": "Host memory (RAM) ran out, not GPU memory.",
    "cause_host_ram_limited": (
        "The system refused the process more RAM (not GPU memory), though RAM is said to be free: a limit was reached."
    ),
    "cause_host_ram_given": "It used up the RAM that it was given; GPU memory is not counted there.",
    "cause_host_ram_told": "It is about host memory (RAM), not GPU memory.",
    "cause_host_ram_board": "The memory that the CPU and the GPU share on this machine ran out.",
    "cause_host_ram_commit": "What Windows can commit of RAM and page file together ran out, not GPU memory.",
    "cause_shared_memory": (
        "Shared memory (/dev/shm), through which processes such as DataLoader workers pass data, ran out, not GPU"
        " memory."
    ),
    "cause_driver_level": (
        "The driver, or a library that requests memory directly from it, could not get memory, outside PyTorch's"
        " own allocator."
    ),
    "cause_driver_level_elsewhere": (
        "The driver, or a library that requests memory directly from it, could not get memory."
    ),
    "cause_not_oom": "This is not about running out of device memory.",
    "cause_unknown": "The text alone does not establish the cause.",
    # The same in a few words, where a text leaves several open.
    "brief_fragmentation": "free memory that lies in pieces",
    "brief_other_process": "other programs on the device",
    "brief_request_alone_too_big": "a single tensor that is too large",
    "brief_weights_too_big": "the model's weights",
    "brief_activations": "what one step computes and keeps for its backward pass",
    "brief_activations_inference": "what one pass computes",
    "brief_logits_or_loss": "the logits or the loss over the vocabulary",
    "brief_attention_scores": "scores of attention",
    "brief_optimizer_state": "the optimizer state",
    "brief_leak_or_retained_reference": "something that is kept though it is no longer needed",
    "brief_memory_fraction_limit": "a share of the device that is reserved or limited by a setting",
    "brief_sysmem_fallback": "GPU memory that the driver moved to RAM",
    "brief_host_ram": "RAM, not GPU memory",
    "brief_shared_memory": "shared memory (/dev/shm)",
    "brief_driver_level": "the driver, or a library that asks it for memory directly",
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
    "phase_optimizer_step": "It failed in the optimizer step: {code}",
    "phase_evaluation": "It failed during evaluation or inference: {code}",
    "phase_saving": "It failed while saving a checkpoint: {code}",
    # Evidence: the numbers and lines that a judgement rests on.
    "allocated_above_capacity": (
        "PyTorch held {held_bytes} on a device of {total_bytes}. That is possible: the driver had put the rest"
        " into host memory."
    ),
    "limit_binds": "{held_bytes} held and {requested_bytes} requested, under a limit of {limit_bytes}.",
    "free_above_request": "{free_bytes} were free, yet a request of {requested_bytes} was refused.",
    "private_pools_hold": (
        "{private_pool_bytes} of the {allocated_bytes} allocated are in private pools of CUDA graphs."
    ),
    "request_above_capacity": "{requested_bytes} were requested in one piece; the device has {total_bytes} in all.",
    "above_block_limit": (
        "{requested_bytes} were requested in one block with {free_bytes} free: Intel's driver refuses blocks of"
        " {limit_bytes} or more unless UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1 is set."
    ),
    "tensor_attention_scores": "The failing line computes attention scores: {code}",
    "tensor_logits_or_loss": "The failing line computes logits or a loss: {code}",
    "tensor_matches": "The requested size is that of one tensor of this model: {formula}.",
    "alive_in_call": (
        "Of the {allocated_bytes} allocated, {own_bytes} were alive only in the failed call: what its forward"
        " pass saves."
    ),
    "tensor_kv_cache": (
        "The failing line extends the KV cache: {code} It grows with batch size, length and layers at each token,"
        " and concatenation briefly holds both the old and the new one. A static, quantized or offloaded cache"
        ' takes less (cache_implementation="static", "quantized" or "offloaded" in model.generate).'
    ),
    "others_listed": "Process {pids} held {other_bytes} of {total_bytes}.",
    "others_unlisted": (
        "PyTorch held only {held_bytes}; about {other_bytes} of {total_bytes} belong to no listed process."
    ),
    "mps_others": (
        "Other allocations took {other_bytes} of the {limit_bytes} allowed, PyTorch {held_bytes}. They belong to"
        " this program, too: what Metal holds for it beside PyTorch's tensors (temporaries and caches of graphs,"
        " other libraries)."
    ),
    "stuck_above_request": "{stuck_bytes} were reserved but unallocated, more than the {requested_bytes} requested.",
    "room_in_pieces": (
        "{free_bytes} were free and {stuck_bytes} unused in the cache, yet {requested_bytes} could not be allocated."
    ),
    "own_tensors_fill": "PyTorch itself held {held_bytes} of {total_bytes}.",
    "little_of_its_own": "PyTorch itself held only {held_bytes} of {total_bytes}: its tensors did not fill the device.",
    "whose_not_said": (
        "The message does not say whether that was weights, activations or optimizer state; in training it is"
        " most often activations, which grow with batch size and length."
    ),
    "rest_unlisted": (
        "{other_bytes} of {total_bytes} belong neither to PyTorch nor to a listed process: CUDA libraries, NCCL,"
        " or programs that the message does not show."
    ),
    "why_not_granted": (
        "Memory that is free but refused: another program held it at that moment, a driver sets a limit (Windows,"
        " WSL, Jetson), or its address space is fragmented."
    ),
    "calls_alive": Plural(
        "The model was called {count} time since the last optimizer step, and what the call saved for a backward"
        " pass is still alive ({kept_bytes}): some list, sum or variable holds its output or loss.",
        (
            "The model was called {count} times since the last optimizer step, and what the calls saved for a"
            " backward pass is still alive ({kept_bytes}): some list, sum or variable holds their outputs or losses."
        ),
    ),
    "earlier_steps_alive": (
        "{kept_bytes} allocated in earlier steps are still alive, and are neither weights nor gradients nor"
        " optimizer state: something holds on to them."
    ),
    "of_rank": "It ran out of memory in rank {rank} of a job of {size} processes, each on its own card.",
    "start_supposed": (
        "oom_magic was loaded after the failure: what the cell found on the card is inferred from what is there now."
    ),
    "rehearsal_fits": (
        "Rehearsed as it is, the run needs {needed_bytes} of the {usable_bytes} available: it would fit. What"
        " failed was larger, or something else held memory then."
    ),
    "grows_later": Plural(
        "Rehearsed as it is for {num_steps} optimizer step, the run needs {needed_bytes} of the {usable_bytes} that"
        " can be had: what grows fills them later.",
        "Rehearsed as it is for {num_steps} optimizer steps, the run needs {needed_bytes} of the {usable_bytes} that"
        " can be had: what grows fills them later.",
        "num_steps",
    ),
    "first_steps_fit": Plural(
        "Rehearsed as it is for {num_steps} optimizer step, the run needs {needed_bytes} of the {usable_bytes}"
        " available: it would fit. What failed came later or was larger, or something else held memory then.",
        (
            "Rehearsed as it is for {num_steps} optimizer steps, the run needs {needed_bytes} of the {usable_bytes}"
            " available: they would fit. What failed came later or was larger, or something else held memory then."
        ),
        "num_steps",
    ),
    "steps_differ": (
        "The steps of the loop have batches of different sizes: the estimates are for its first {num_steps}"
        " steps; a later one can take more."
    ),
    "backward_in_later_cell": (
        "The cell has no backward. A later cell is expected to begin one from {name}: earlier cells, the model's mode,"
        " an optimizer or a name speak for it. The estimates include it, but no operators between {name} and the"
        " loss; if none is to follow, run the cell under torch.no_grad()."
    ),
    "catches_out_of_memory": (
        "The code goes on where memory runs out ({handler}). So do the rehearsals, with what PyTorch can use of this"
        " card: the estimates begin after the last try that failed, with what the code then chose, such as a batch"
        " size; with another change it may choose another. Tries that fail still fill the card."
    ),
    "largest_sample": (
        "The samples of the data have different sizes: most rehearsed batches have the largest of the {count} in them,"
        " as one batch of each epoch has. Blocks of many sizes leave the cache in more pieces with time: the first"
        " change was followed through more batches for that, and in another order they can take a few percent more."
    ),
    "calls_followed": (
        "The cell runs no optimizer step: the estimates are for its first {num_calls} calls of a model; later"
        " ones can take more."
    ),
    "calls_continued": (
        "The cell runs no optimizer step: its first {num_calls} calls of a model were followed, and the iterations that"
        " are left of its loop were taken to go on like the last ones, with sizes that grow on as theirs did. What"
        " comes after the loop, such as joining what it collected, was not followed and can take more."
    ),
    "turns_keep": (
        "Each iteration of the loop keeps {turn_bytes} more than the one before: {grown_bytes} with all {count} of"
        " them."
    ),
    "later_takes_more": (
        "The steps fit with the first of these changes, but what follows them, such as an evaluation, takes more:"
        " {needed_bytes} by the end."
    ),
    "no_message": "No message about memory that is known here was found in the text.",
    # Assessments of PyTorch's own tip.
    "tip_delays": (
        "PyTorch's tip would only have delayed it: {stuck_bytes} stuck in its cache would have covered these"
        " {requested_bytes}, but are little compared with the {held_bytes} held."
    ),
    "tip_delays_with_free": (
        "PyTorch's tip would only have delayed it: {stuck_bytes} stuck in its cache, with the {free_bytes} free,"
        " would have covered these {requested_bytes}, but are little compared with the {held_bytes} held."
    ),
    "tip_applies": (
        "PyTorch's tip applies: {stuck_bytes} stuck in its cache would have covered the {requested_bytes}."
    ),
    "tip_applies_with_free": (
        "PyTorch's tip may help: {stuck_bytes} stuck in its cache and {free_bytes} free would together have"
        " covered the {requested_bytes}."
    ),
    "tip_does_not_apply": (
        "PyTorch's tip does not help: its cache holds only {stuck_bytes}, but {requested_bytes} were requested."
    ),
    "tip_already_followed": (
        "PyTorch's tip is already followed (expandable_segments is on), yet {stuck_bytes} are stuck;"
        " {requested_bytes} were requested."
    ),
    "tip_unsupported": (
        "PyTorch's tip fits the numbers ({stuck_bytes} stuck, {requested_bytes} requested), but"
        " expandable_segments does not work on {system}; max_split_size_mb does."
    ),
    # How to read the numbers.
    "fact_expandable_windows": "expandable_segments has no effect on Windows: PyTorch ignores the setting there.",
    "fact_no_shutdown": (
        "Running out of GPU memory ends a program; it does not shut a machine down. If the machine itself powers"
        " off, check its power supply, temperature and RAM."
    ),
    "fact_own_pid": (
        "Process {pid} ({own_bytes}) is this very process: inside a container, the message shows its process"
        " ID on the host."
    ),
    "fact_binary_gb": "The message's GB and MB are 1024-based: the same numbers as GiB and MiB here.",
    "fact_process_size_unknown": "A size of 17179869184.00 GiB means that the driver does not report it.",
    "fact_accumulation": (
        "Gradient accumulation does not change the memory of a step: microbatches run one after the other, so"
        " only the size of one counts."
    ),
    "fact_private_pools": (
        "{private_pool_bytes} counted as allocated are free, but only for the CUDA graph that owns them."
    ),
    "fact_cached_excludes_allocated": "In this version, cached means the memory reserved beyond what is allocated.",
    "fact_free_above_capacity": "{free_bytes} free is more than the capacity: this driver misreports one of the two.",
    **MEANINGS,
    **REMEDIES,
    **PROGRAM_REMEDIES,
}
SENTENCES: Sentences = {
    **CATALOGUE,
    **EVIDENCE,
    **PAGE_CATALOGUE,
    **REASONS,
    **{f"refusal_{key}": sentence for key, sentence in REFUSALS.items()},
}


def translate(key: str, lang: Language = "en", /, **values: object) -> str:
    """The catalogue's sentence for ``key``; values named ``*_bytes`` are written as sizes."""
    return render(SENTENCES[key], lang, values)


def _is_chinese(name: str) -> bool:
    return "\u4e00" <= name[-1:] <= "\u9fff"


def render_evidence(item: Evidence, lang: Language) -> str:
    """A piece of evidence as a sentence; a value named ``x_key`` is translated and inserted as ``x``."""
    keys = {name.removesuffix("_key"): str(key) for name, key in item.values.items() if name.endswith("_key")}
    said = {name: translate(key, lang, **item.values) for name, key in keys.items()}
    text = translate(item.key, lang, **{**item.values, **said})
    if lang == "zh":  # a Latin name stands beside Chinese with a space, a Chinese name without
        for value in filter(_is_chinese, said.values()):
            text = text.replace(f"{value} ", value).replace(f" {value}", value)
    return text[:1].upper() + text[1:] if text.startswith(tuple(said.values())) else text
