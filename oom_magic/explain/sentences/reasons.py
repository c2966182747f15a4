"""Why a remedy has no price, in English; ``language.SENTENCES`` includes them.

The first are this package's own, the others (``reason_<key>``) those of ``predict.changes``' InapplicableError.
"""

from __future__ import annotations

from oom_magic.language import Sentences

REASONS: Sentences = {
    "reason_no_run": "nothing here to rehearse; give the run (setup= or --model ...)",
    "reason_fits_as_it_is": "what was rehearsed fits as it is",
    "reason_other_program": "a setting of another program",
    "reason_host": "what is rehearsed is the GPU's memory, not the computer's RAM",
    "reason_not_yet": "not rehearsed yet",
    "reason_nothing_saves": "the cell was rehearsed with every change that fits it, and none of them saves much",
    "reason_loop_is_long": (
        "the loop is too long to be followed until the card is full; {grown_bytes} had grown when it failed"
    ),
    "reason_estimate": "an estimate, not rehearsed",
    "reason_time": "the {seconds} seconds for rehearsals were over",
    "reason_failed": "its rehearsal failed: {error}",
    "reason_setup_refused": "these settings do not go together: {error}",
    "reason_so_already": "the run is so already",
    "reason_changes_loading": "how much it saves is decided where the model is loaded",
    "reason_library_missing": "{name} is not installed",
    "reason_checkpointing_already": "activation checkpointing is on already",
    "reason_no_equal_blocks": "the model has no list of equal blocks to recompute",
    "reason_autocast_already": "autocast is on already",
    "reason_weights_16_bits_already": "the weights have 16 bits or fewer already",
    "reason_no_attention_choice": "the model has no choice of attention kernels",
    "reason_attention_already": "the attention is {name} already",
    "reason_no_such_option": "{optimizer} has no option {option}",
    "reason_optimizer_already": "the optimizer is {name} already",
    "reason_no_optimizer": "no optimizer of this model is known before its first step",
    "reason_adapters_already": "the model has adapters already",
    "reason_no_adapters_for_it": "PEFT finds the layers of Hugging Face models only",
    "reason_quantized_already": "the model is quantized already",
    "reason_no_linear_layers": "the model has no linear layers to quantize",
    "reason_gradients_off_already": "gradients are off already",
    "reason_gradients_released_already": "gradients are released already",
    "reason_outputs_dropped_already": "the outputs are dropped already",
    "reason_no_language_head": "the model has no plain language model head",
    "reason_weights_are_trained": "weights so loaded cannot be trained, adapters on top of them can",
    "reason_no_quantized_loading": "only Hugging Face models are loaded quantized",
    "reason_no_model_ran": "no model ran in the rehearsal",
    "reason_no_replicas": "no DistributedDataParallel is made in this code",
    "reason_no_shards": "the model is not sharded by fully_shard",
    "reason_gradients_in_buckets_already": "gradients are views of the buckets already",
    "reason_no_device_map": "the model is not spread over several cards",
    "reason_split_by_hand": "which card gets what is in your own code: move layers from the card that failed",
    "reason_layers_balanced_already": "the cards hold equally many layers already",
    "reason_shards_on_host_already": "the shards are in RAM already",
    "reason_resharded_already": "gathered parameters are given back after the forward already",
    "reason_line_elsewhere": "that line is not in this cell",
    "reason_size_not_set_there": "the size is set elsewhere",
    "reason_fast": "not rehearsed: --fast was given",
}
