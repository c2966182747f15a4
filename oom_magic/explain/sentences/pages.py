"""Sentences around a diagnosis: titles, the three lines on top, headings, labels, first advice.

They have the same form as in ``catalogue``.
"""

from __future__ import annotations

from oom_magic.language import Plural, Sentences

PAGE_CATALOGUE: Sentences = {
    # The budget's rows.
    "budget_allocated": "allocated to tensors",
    "budget_private_pools": "private pools of CUDA graphs",
    "budget_stuck": "stuck in PyTorch's cache",
    "budget_reserved": "reserved by PyTorch",
    "budget_own_process": "this process",
    "budget_own_outside": "this process, outside PyTorch",
    "budget_other_processes": "other processes",
    "budget_listed_process": "the process that the message lists: this one or another",
    "budget_mps_other": "other allocations on this Mac's GPU",
    "budget_free": "free",
    "budget_rounding": "rounding of the printed sizes",
    "budget_unexplained": "held by no listed process",
    "budget_outside": "outside PyTorch: CUDA context, libraries, other processes",
    "budget_outside_device": "outside PyTorch: the device's context, libraries, other processes",
    "budget_in_system_memory": "moved to host memory",
    "budget_contradiction": "the printed sizes contradict each other",
    "budget_above_limit": "above PyTorch's own limit",
    "budget_not_said": "not stated",
    "budget_capacity": "capacity",
    "budget_limit": "PyTorch's limit",
    # Tensors that may have been requested.
    "tensor_name_attention_scores": "the attention scores",
    "tensor_name_logits": "the logits",
    "tensor_name_mlp_activation": "an activation of the feed-forward layer",
    "tensor_name_hidden_states": "hidden states",
    "tensor_name_qkv": "queries, keys and values together",
    "tensor_name_embedding_weight": "the embedding's or output layer's weight",
    "tensor_name_mlp_weight": "a weight of the feed-forward layer",
    "tensor_name_attention_weight": "a weight of the attention layer",
    "tensor_name_all_parameters": "a copy of all parameters",
    "tensor_name_stated": "the array or tensor whose shape is written there",
    "tensor_not_printed": "The message does not state the requested size.",
    "tensor_nameless": (
        "2.00 and 20.00 MiB are what PyTorch requests when any small tensor needs room: they do not identify a tensor."
    ),
    "tensor_none_fits": (
        "No common tensor of this model has the requested size: its batches may be longer than the text says, or"
        " it is another model."
    ),
    "tensor_other_length": (
        "At the length in the text, no common tensor of this model has the requested size; at a shorter length,"
        " these do."
    ),
    "tensor_unknown_model": "Nothing is known about the model, and no common shape has this size.",
    "title_requested": "Out of memory: {requested_bytes} did not fit",
    "title_device": "Out of device memory",
    "title_memory": "Out of memory",
    "title_host": "Out of memory on the host",
    "title_open": "An error that may be about memory",
    "title_not_oom": "Not a lack of memory",
    "title_nothing": "No known memory error found",
    "title_told_full": "The author reports that memory ran out",
    "title_told_killed": "The author reports that a process was killed",
    "title_asked": "A question about how much memory a run needs",
    "title_told": "The text is about memory, without a message that is known here",
    # The three lines on top.
    "line_asked": "The text tells of no failure.",
    "line_answer": (
        "How to find out: Run it on a pretend card, without a GPU: %%gpumem above its cell, or"
        " python -m oom_magic run SCRIPT."
    ),
    "line_what": "What happened: {text}",
    "line_why": "Why: {text} (Confidence: {confidence}.)",
    "line_why_open": "Why: {text}",
    "line_why_possible": "Why, possibly: {text}",
    "why_possible": "The text leaves it open: possibly {causes}.",
    "why_usual": "Nothing recognized in the text shows what took the memory; in such reports it is most often {first}.",
    "why_usual_else": (
        "Nothing recognized in the text shows what took the memory; in such reports it is most often {first}, else"
        " {others}."
    ),
    "why_also": "{text} It may also be {others}.",
    "causes_or": "{first}, or {second}",
    "heading_possible": "What else it may be, and how to check",
    "heading_confirm": "How to confirm it",
    "evidence_quoted": "The text: “{quote}”.",
    "evidence_told_last": "Judging by what the text tells last: {sentence}",
    "possible_first": "To confirm: {check}",
    "possible_also": "{cause} ({confidence}) To check: {check}",
    "line_best": "What to change: {text}",
    "line_try": "What to try: {text}",
    "line_check": "First find out: {check}",
    "line_check_and": "First find out: {check} If so: {text}",
    "line_check_more": "First find out: {check} {text}",
    "line_check_last": "First find out: {check} In the last case: {text}",
    "what_full": (
        "{requested_bytes} were requested on {device} of {total_bytes}; PyTorch held {held_bytes} and"
        " {free_bytes} were free."
    ),
    "what_capacity": "{requested_bytes} were requested on {device} of {total_bytes}.",
    "what_limited": "{requested_bytes} were requested; PyTorch held {held_bytes} of the {limit_bytes} it may use.",
    "what_requested": "{requested_bytes} were requested but could not be allocated.",
    "device_numbered": "{device} {index}",
    "device_any": "a device",
    "tensor_seen": "The failing call creates it: {formula}.",
    "best_makes_room": "{text} Then it fits.",
    "best_does_not_fit": "no single change makes it fit; the largest saving is: {text} ({saving_bytes}).",
    "best_does_not_fit_at_most": (
        "as eager code no single change makes it fit; the largest saving is: {text} ({saving_bytes})."
    ),
    "best_so_far": ("nothing that was rehearsed so far makes it fit; the largest saving is: {text} ({saving_bytes})."),
    # First advice by cause, where nothing is evaluated.
    "advice_fragmentation": (
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts; where it is not"
        " supported, pad batches to a few fixed lengths."
    ),
    "advice_other_process": (
        "Close the other processes on this device ({tool} lists them; the kernels of other notebooks count), or"
        " use another device."
    ),
    "advice_request_alone_too_big": (
        "Find the shape of this one tensor on the failing line; split it, or reduce the batch size or length."
    ),
    "advice_overflow": (
        "Print the sizes that are multiplied on the failing line: one of them is wrong (an index used as a"
        " length, a -1, a product that overflowed); a smaller batch would not help."
    ),
    "advice_overflow_line": (
        "Print the sizes that are multiplied in {code}: one of them is wrong (an index used as a length, a -1, a"
        " product that overflowed); a smaller batch would not help."
    ),
    "advice_saving": "Copy the state to host memory before it is stored or saved: {code}",
    "advice_leak_or_retained_reference": (
        "Find what is kept from one step or request to the next, and release it; of what is collected, keep numbers"
        " instead of tensors."
    ),
    "advice_memory_fraction_limit": (
        "Raise the limit (set_per_process_memory_fraction, gpu_memory_utilization), or use less memory below it."
    ),
    "advice_sysmem_fallback": (
        "Make the run fit the card's own memory: what the driver moves to host memory only makes it slow."
    ),
    "advice_host_ram": "Use less of the computer's RAM, or give the program more.",
    "advice_shared_memory": (
        "Enlarge /dev/shm (in a container: --shm-size), or put less into it: a DataLoader with num_workers=0 does"
        " not use it."
    ),
    "advice_driver_level": (
        "Check with {tool} whether the device is full; leave some memory free for what does not go through PyTorch."
    ),
    "advice_goes_on": "Nothing because of these lines; look behind them for what ended the run.",
    "advice_device_lost": "Look into the driver's log (on Linux: dmesg) for the reason.",
    "advice_not_oom": "Look into the error named above; using less memory will not fix it.",
    "advice_unknown": "With the traceback above the message, or the model and its sizes, more can be said.",
    "price_by_settings": "Savings not estimated. Describe the run, and each change is rehearsed:",
    "price_by_code": (
        "Savings not estimated: that takes the code. Run it in a notebook; after the failed cell, %oom_explain"
        " rehearses that cell with each change."
    ),
    "price_by_settings_too": "To rehearse the training of a language model, its settings are enough, without code:",
    # Headings of the details.
    "heading_budget": "What held the device's memory",
    "heading_tensor": "Which tensor was requested",
    "heading_evidence": "Evidence",
    "heading_numbers": "How to read the message",
    "heading_holders": "What else holds memory",
    "heading_story": "What the text says about it",
    "story_cause_agrees": "It names a cause, and what it shows agrees: {cause}",
    "story_cause_possible": "It names a cause that is possible, too: {cause}",
    "story_cause_unsupported": "It names a cause that nothing in it supports: {cause}",
    "story_helps": "It proposes this, and it helps: {remedy}",
    "story_saves_too": "It proposes this, which saves memory but is not the first thing to change here: {remedy}",
    "story_missing": "It does not mention this, which helps: {remedy}",
    "story_workers": "num_workers and pin_memory affect host memory (RAM), not GPU memory.",
    "story_clearing": (
        "Clearing the cache (empty_cache) makes no room for PyTorch: before an allocation fails, PyTorch already"
        " releases what it can."
    ),
    "story_clipping": "max_grad_norm keeps training stable; it saves no memory.",
    "heading_remedies": "What to change, and what it saves",
    "heading_changes": "What to change",
    "heading_savings": "What a change would save",
    "heading_try": "What to try",
    "heading_if_so": "What to change if that is it",
    "heading_code": "Code: {text}",
    "heading_message": "The message",
    # Columns and other labels.
    "column_tensor": "tensor",
    "column_formula": "shape and size",
    "column_holder": "holder",
    "column_bytes": "memory",
    "column_remedy": "change",
    "column_saving": "saves",
    "column_speed": "speed",
    "column_batch": "global batch",
    "fits_open": "?",
    "rounding_note": "Each printed size is rounded; together by up to {rounding_bytes}.",
    "fit_exact": "Exact: observed in the run itself.",
    "fit_likely": "The first matches best; the sizes of the model are known.",
    "fit_supposed": (
        "Candidates only: some of their dimensions are guesses, as the message does not say which model it is."
    ),
    "confidence_why": "Confidence: {confidence}.",
    # Tensors read from a live exception or from a report.
    "tensor_name_result": "the result of the failing line",
    "tensor_name_copy": "a copy in another dtype",
    "tensor_name_gradient": "a gradient",
    "tensor_name_optimizer_state": "an optimizer state tensor",
    "tensor_name_concatenation": "concatenated tensors",
    "tensor_name_kv_cache": "the KV cache",
    "tensor_name_embeddings": "embeddings",
    "tensor_name_probabilities": "log-probabilities of the loss",
    "tensor_name_parameter": "a parameter of the model",
    "tensor_name_logits_gradient": "the gradient of the logits",
    # Who else holds memory.
    "held_by_name": "variable {name} ({what})",
    "held_by_output": "result kept by the notebook: {name} ({what})",
    "held_by_frames": "frames kept by an earlier failure: {what}",
    "held_by_own_frames": "alive in the failed call: {what}",
    "held_by_error": "{kind} in {place}",
    "held_as": "{kind}",
    "held_as_module": "module {kind}",
    "held_as_optimizer": "optimizer {kind}, its state",
    "held_as_gradients": "gradients",
    "held_as_graph": "autograd graph",
    "held_as_shown": "shown result",
    "held_as_cache": "functools cache",
    "held_by_process": "process {name}",
    "held_by_category": "all {name} tensors",
    "held_by_line": "allocated at {name}",
    "category_parameter": "parameter",
    "category_gradient": "gradient",
    "category_optimizer_state": "optimizer state",
    "category_activation": "activation",
    "category_input": "input",
    "category_temporary": "temporary",
    "category_workspace": "workspace",
    "category_before": "allocated before",
    # Effects on speed, short; the remedies' own sentences give the sources.
    "pace_same": "same",
    "pace_faster": "faster",
    "pace_accumulation": "a bit slower",
    "pace_compiled": "faster, later",
    "pace_recomputed": "recomputes",
    "pace_checkpointing": "1/3 slower",
    "pace_optimizer_loop": "slower step",
    "pace_qlora": "slower",
    "pace_int8": "slower layers",
    "pace_launches": "more launches",
    "pace_batches": "moves batches",
    "pace_offload": "much slower",
    "pace_streamed": "copies weights",
    "pace_fsdp": "depends",
    "pace_combination": "combined",
    "speed_heading": "Speed: {text}.",
    "same_model_twice": "{names} are models of the same shape, both on the GPU: {twin_bytes} could be freed.",
    "name_grows": Plural(
        "{name} grows in the loop, {growing_code} ({place}): it keeps {kept_bytes} in {count} tensor.",
        "{name} grows in the loop, {growing_code} ({place}): it keeps {kept_bytes} in {count} tensors.",
    ),
    "name_grows_with_graphs": Plural(
        "{name} grows in the loop, {growing_code} ({place}): it keeps {count} tensor with its graph, and with it"
        " {kept_bytes} that forward passes saved.",
        (
            "{name} grows in the loop, {growing_code} ({place}): it keeps {count} tensors with their graphs, and with"
            " them {kept_bytes} that forward passes saved."
        ),
    ),
    "data_wait_on_device": (
        "Rehearsed with the data in RAM, and each batch moved in its turn, the run needs {saving_bytes} less."
    ),
    "data_set_on_device": (
        "{name} holds {held_bytes} of the GPU before a step begins: a whole data set. Kept in RAM, with only the"
        " current batch moved to the GPU, it would take almost nothing."
    ),
    "name_sums_a_step": (
        "{name} sums the losses of several parts of a step, {growing_code} ({place}): their graphs keep"
        " {kept_bytes} until the backward pass of the sum."
    ),
    "comprehension_sums_a_step": (
        "{name} combines the losses of several parts of a step, {growing_code} ({place}): the graphs of all parts"
        " are kept until its backward pass."
    ),
    "name_grows_by_entries": (
        "{name} grows in the loop, {growing_code} ({place}): its {count} entries keep {kept_bytes}."
    ),
    "held_is_not_it": "Without what is held needlessly, the run does not fit either: that was not the cause.",
    "pieces_are_not_it": (
        "Rehearsed with expandable segments, it does not fit either: fragmentation is not the cause."
    ),
    "growth_by_the_turn": "Each further tensor adds about {turn_bytes}: with {count} of them the card was full.",
    "growth_by_entry": "Each further entry adds about {turn_bytes}: with {count} of them the card was full.",
    "name_is_joined": (
        "{name} is rebuilt from itself in the loop, {growing_code} ({place}), and now has {kept_bytes}; while"
        " that happens, the old and the new one exist at the same time."
    ),
    "name_is_put_together": Plural(
        "{name} was collected in a loop, {growing_code} ({place}): {kept_bytes} in {count} tensor; one tensor of all"
        " takes as much again.",
        "{name} was collected in a loop, {growing_code} ({place}): {kept_bytes} in {count} tensors; one tensor of all"
        " takes as much again.",
    ),
    "model_loaded_before": (
        "{names} already holds a {model} on the GPU while another one is loaded: {twin_bytes} could be freed."
    ),
    "chart_title": "Memory needed, of the {usable_bytes} that PyTorch can use",
    "chart_title_at_least": "Memory needed at least, of the {usable_bytes} that PyTorch can use",
    "chart_title_at_most": "Memory needed at most, of the {usable_bytes} that PyTorch can use",
    "priced_as_eager": (
        "Compiled code was rehearsed as eager code, which needs more: what is needed is an upper bound, and what is"
        " saved is what eager code saves."
    ),
    "without_workspaces": (
        "cuDNN's workspaces are not in these figures: its convolutions may take up to {workspace_bytes} more for a"
        " moment, where there is room."
    ),
    "chart_lines": "Lines: tight, danger, full.",
    "row_as_it_is": "the run as it is",
    "column_needed": "needs",
    "column_needed_at_least": "needs at least",
    "column_needed_at_most": "needs at most",
    "column_verdict": "on the card",
    "verdict_safe": "safe",
    "verdict_tight": "tight",
    "verdict_danger": "danger",
    "is_in_danger": "close to the limit",
    "verdict_fits": "fits",
    "verdict_no": "does not fit",
    "verdict_no_at_most": "may not fit",
    "best_rehearsed": "{text} Rehearsed: it needs {needed_bytes} of the card, {saving_bytes} less, and is {verdict}.",
    "best_rehearsed_at_least": (
        "{text} Rehearsed for a part of its loop: it needs at least {needed_bytes} of the card, {saving_bytes} less by"
        " then; what later iterations take is not known."
    ),
    "best_room_at_least": (
        "{text} Rehearsed for a part of its loop: it needs at least {needed_bytes} of the card; what later iterations"
        " take is not known."
    ),
    "best_rehearsed_at_most": (
        "{text} Rehearsed as eager code: it needs at most {needed_bytes} of the card, and is {verdict}."
    ),
    "held_for_nothing": (
        "{names} held {freed_bytes} from earlier cells, of no use to the failed one: without it, the cell fits."
    ),
    "collected_in_rehearsal": (
        "The results of all turns were collected on the GPU. Rehearsed with them in RAM, {growing_code}, the same cell"
        " needs {saving_bytes} less and fits."
    ),
    "pieces_in_rehearsal": (
        "Rehearsed with expandable segments, the same cell needs {saving_bytes} less and fits: the cache is fragmented."
    ),
    "earlier_failures": "Cells that failed earlier still hold {held_bytes}; %oom_free releases them.",
    "free_what_is_held": "del a name and run %oom_free to get its memory back.",
    "free_what_failed": "%oom_free gets back what the failed call keeps alive.",
    "category_fills": "Of the {allocated_bytes} allocated when it failed, {category_bytes} were {category}.",
    "category_fills_rehearsed": "Rehearsed, {category_bytes} of {allocated_bytes} at its peak are {category}.",
    "rehearses": (
        "The cell will now be run several times on a pretend GPU, without side effects: nothing is written or"
        " sent. %oom_explain --fast skips this."
    ),
    "priced": Plural(
        "{count} remedy rehearsed in {seconds} s; it is in the table below.",
        "{count} remedies rehearsed in {seconds} s; they are in the table below.",
    ),
    "usage_no_paste": "%%oom_explain explains the text below it; paste an error message there.",
    "usage_no_file": (
        "%oom_explain: '{path}' is neither a file nor a variable that holds a text or an exception; to explain pasted"
        " text use %%oom_explain."
    ),
    "usage_nothing_failed": (
        "No error has ended a cell here yet; %oom_explain NAME explains an exception that your code caught and kept"
        " in a variable, %oom_explain FILE and %%oom_explain read errors from elsewhere."
    ),
    "setup_said": "Assumed run: {setup}.",
    "interrupted_rehearsals": Plural(
        "Interrupted: {count} remedy had been rehearsed by then; %oom_explain --fast skips the rehearsals.",
        "Interrupted: {count} remedies had been rehearsed by then; %oom_explain --fast skips the rehearsals.",
    ),
    "decided_names": "This machine has no GPU, so earlier cells set {was}; the dry run follows them with {now}.",
    "stayed_on_cpu": "Nothing was put on the GPU: {was} was set before the dry run.",
    "stayed_on_cpu_peak": (
        "Nothing was put on the GPU: {was} was set before the dry run; with 'cuda' the run would take {peak_bytes}."
    ),
}
