"""What each remedy presupposes of a run: it is told, and its lines are shown, only where the text shows that.

One table. Its words are those of ``kind_of_run.facts_of``: what the author tells (keys of ``author_words`` and
``author_setting``), the program, the libraries, the device, and whose loop it is. A remedy without a row is true of
every run for which its cause chooses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Whose code trains: written by the author, or called through an object of settings.
_OWN = "own_loop trainer accelerator"
# That batches of a network go forward and backward through PyTorch.
_SHOWS_A_LOOP = f"{_OWN} may_have_batch shows_code shows_settings trains_by_settings"


@dataclass(frozen=True)
class Needs:
    """What a remedy presupposes; of each field's facts one is enough, and an empty field presupposes nothing.

    ``shown``: one must be there for the remedy to be told; else ``instead`` is told, worded with its condition, or
    nothing. ``absent``: where one is there, the run has the remedy, its author tried it, or it does nothing there.
    ``code``: one must be there for its lines to be shown.
    """

    shown: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    code: frozenset[str] = frozenset()
    instead: str = ""


def _row(shown: str = "", absent: str = "", code: str = "", instead: str = "") -> Needs:
    return Needs(frozenset(shown.split()), frozenset(absent.split()), frozenset(code.split()), instead)


NEEDS: Mapping[str, Needs] = {
    # Training.
    "smaller_batch_any": _row(
        f"{_OWN} may_have_batch",
        "batch_of_one has_batch_of_one tried_batch of_weights by_boosting",
        code=_OWN,
        instead="smaller_input",
    ),
    "smaller_batch_plain": _row(shown="trains", absent="batch_of_one has_batch_of_one tried_batch"),
    "smaller_input": _row(
        absent="batch_of_one has_batch_of_one tried_batch tried_size tried_length of_weights", instead="smaller_items"
    ),
    "smaller_items": _row(absent="tried_size tried_length of_weights", instead="fewer_items"),
    "fewer_items": _row(absent="batch_of_one has_batch_of_one tried_batch of_weights"),
    "shorter_sequences_any": _row(absent="tried_length"),
    "smaller_evaluation_any": _row(absent="batch_of_one has_batch_of_one evaluates_one tried_batch"),
    "mixed_precision": _row(_OWN, absent="has_half tried_half", code=_OWN, instead="half_setting"),
    "half_setting": _row(_SHOWS_A_LOOP, absent="has_half tried_half by_boosting of_graphs splats may_evaluate"),
    "half_weights": _row(
        f"{_OWN} names_float32",
        absent="has_half weights_in_half tried_half",
        code="own_loop",
        instead="half_weights_if",
    ),
    "half_weights_if": _row("of_tokens", absent="has_half weights_in_half tried_half"),
    "checkpointing": _row(
        _OWN, absent="has_checkpointing tried_checkpointing", code=_OWN, instead="checkpointing_setting"
    ),
    "checkpointing_setting": _row(
        _SHOWS_A_LOOP,
        absent="has_checkpointing tried_checkpointing lacks_checkpointing by_boosting of_graphs splats may_evaluate",
    ),
    "sdpa": _row(absent="has_flash tried_attention of_weights", code="own_loop trainer"),
    "chunked_loss": _row(absent="of_weights", code="own_loop trainer"),
    "lora": _row("fine_tunes names_lora", absent="has_lora tried_lora pretrains trains_whole", code="own_loop trainer"),
    "qlora": _row(
        "fine_tunes names_lora",
        absent="tried_lora tried_quantized on_mps on_npu pretrains trains_whole",
        code="own_loop trainer",
    ),
    "no_grad": _row("infers_with_graphs", absent="tried_no_grad", code="own_loop", instead="no_grad_own"),
    "no_grad_own": _row("may_keep_graphs", absent="tried_no_grad by_a_program"),
    "foreach": _row(_OWN, absent="deepspeed made_of_each_tensor", code="own_loop trainer"),
    "optimizer_8bit": _row(
        "names_adam", absent="on_mps on_tpu on_npu on_hpu has_8bit_optimizer tried_optimizer", code="own_loop trainer"
    ),
    "adafactor": _row("names_adam", absent="tried_optimizer", code="own_loop trainer"),
    "zero_offload": _row("deepspeed shards", absent="fsdp offloads_to_host tried_offload"),
    "detach": _row("own_loop", absent="tried_detach", instead="detach_own"),
    "detach_own": _row(absent="tried_detach tried_numbers in_another_language", instead="newer_version"),
    "collect_on_host": _row(code="own_loop"),
    "map_location_cpu": _row("names_checkpoint", absent="in_another_language tried_map_location", code="own_loop"),
    "gather_on_host": _row("transformers_trainer keeps_predictions predicts_all", code="trainer"),
    "fsdp_any": _row(
        "many_ranks has_ranks",
        absent="shards tried_shards on_mps one_device",
        code="own_loop trainer",
        instead="fsdp_if_any",
    ),
    "fsdp_if_any": _row(absent="shards tried_shards on_mps of_latents one_device"),
    "expandable_segments": _row(absent="on_mps tried_segments"),
    "max_split_size": _row(absent="tried_split"),
    "free_held_any": _row("in_notebook kernel_dies", absent="tried_restart"),
    # Loading, and where weights are.
    "offload": _row(
        "by_a_program of_tokens diffuses",
        "maps_devices on_mps has_ranks trains tried_offload tried_vram",
        code="own_loop",
    ),
    "fewer_bits": _row("latents_by_lora", absent="tried_quantized", instead="fewer_bits_if_frozen"),
    "fewer_bits_if_frozen": _row("of_latents", absent="tried_quantized trains_whole"),
    "more_swapped": _row("swaps_blocks"),
    "swap_blocks": _row("may_swap_blocks", absent="swaps_blocks", instead="swap_blocks_if_offered"),
    "swap_blocks_if_offered": _row("of_latents", absent="offloads_all swaps_blocks tried_offload"),
    "tensor_parallel": _row("many_ranks", absent="shards tried_shards"),
    "tgi_shards": _row(absent="shards tried_shards"),
    "quantized_model": _row("by_a_program of_tokens diffuses not_its_input", absent="tried_quantized"),
    "load_low_ram": _row("uses_transformers", absent="is_quantized", code="own_loop"),
    "unpin": _row(code="own_loader"),
    "smaller_model": _row(absent="tried_model barred_quantized"),
    "lighter_weights": _row(absent="tried_quantized tried_model"),
    "unload_models": _row(absent="tried_unload"),
    "close_processes_any": _row(absent="tried_processes", instead="unlisted_processes"),
    "check_processes": _row(absent="tried_processes alone"),
    "unlisted_processes": _row("on_cuda", absent="alone"),
    # The host.
    "fewer_workers": _row("workers other_workers by_dataloader", absent="one_worker tried_workers", code="own_loader"),
    "fewer_waiting": _row("workers by_dataloader", absent="tried_workers", code="own_loader"),
    "shared_memory": _row(absent="tried_shared"),
    "stream_data": _row("loads_data handles_files", absent="tried_stream reads_in_parts"),
    "drop_each": _row(absent="trains_by_settings clearing_helps"),
    "hold_less": _row(absent="tried_length tried_size", instead="more_ram"),
    "arrays_for_lists": _row("workers", absent="trains_by_settings"),
    "keep_less": _row(absent="has_one_memory in_another_language", instead="drop_each"),
    "more_ram": _row(absent="hosted in_container tried_more_ram"),
    "scheduler_memory": _row(absent="tried_limit"),
    "pod_memory": _row("has_limit in_pod", absent="tried_limit"),
    "merge_on_host": _row("merges"),
    "state_on_host": _row("has_ranks many_ranks shards", code="fsdp"),
    "swap": _row(absent="tried_ram hosted in_container", instead="hold_less"),
    "page_file": _row(absent="tried_ram"),
    "less_offload": _row("deepspeed", instead="less_offload_any"),
    # Programs.
    "vllm_pictures": _row("sees_pictures"),
    "vllm_pixels": _row("sees_pictures"),
    "fewer_pixels": _row("reads_pictures", absent="tried_size limits_pixels"),
    "server_share": _row(absent="tried_share before_loading"),
    "raise_limit": _row("of_pytorch", instead="smaller_share"),
    "larger_share": _row(absent="tried_share has_largest_share"),
    "sglang_no_compile": _row("compiles_server"),
    "shorter_context_any": _row(absent="has_short_context"),
    "shorter_context": _row(absent="tried_length has_short_context"),
    "llama_context": _row(absent="tried_length by_whisper has_short_context"),
    "ollama_context": _row(absent="tried_length has_short_context"),
    "exllama_context": _row(absent="tried_length has_short_context"),
    "llama_layers": _row(absent="tried_layers by_whisper uses_mlx", instead="smaller_model"),
    "llama_batch": _row(absent="by_whisper"),
    "ollama_layers": _row(absent="tried_layers"),
    "vllm_max_num_seqs": _row(absent="tried_requests"),
    "vllm_eager": _row(absent="tried_graphs"),
    "sglang_prefill": _row(absent="tried_requests tried_graphs"),
    "diffusers_vae": _row("names_vae", absent="tiles tried_tiles"),
    "comfy_tiled": _row(absent="tried_tiles tiles"),
    "webui_tiled": _row(absent="tried_tiles tiles"),
    "webui_attention": _row(absent="tried_attention"),
    "attention_slices": _row(absent="tried_attention"),
    "comfy_attention": _row(absent="tried_attention"),
    "smaller_image": _row(absent="tried_size"),
    "diffusers_offload": _row(absent="offloads_all tried_offload"),
    "pictures_offload": _row("diffuses", absent="offloads_all keeps_in_ram tried_offload tried_vram"),
    "comfy_lowvram": _row(absent="offloads_all keeps_in_ram on_mps tried_vram swaps_blocks"),
    "comfy_fp8": _row(absent="on_mps tried_quantized", code="loads_by_comfyui", instead="smaller_model"),
    "webui_medvram": _row(absent="offloads_all keeps_in_ram tried_vram"),
    "newer_version": _row(absent="trains tried_version", instead="drop_each"),
    "ollama_parallel": _row(absent="caches_in_8_bits"),
    "llama_cache_type": _row(absent="caches_in_8_bits by_whisper"),
    "data_on_host": _row(absent="data_is_on_host gaussians_grow", code="own_loop"),
    "fewer_gaussians": _row(absent="tried_densify", instead="cap_gaussians"),
    "fewer_calibration_samples": _row(absent="tried_samples"),
    "trt_workspace": _row(absent="has_workspace"),
    "mps_watermark": _row(absent="tried_watermark"),
    "jax_init": _row("creates_weights"),
    "jax_preallocate": _row(absent="full_of_its_own tried_growth on_tpu"),
    "tf_own_process": _row("repeats_models repeated_use"),
    "tf_call": _row("repeats_models repeated_use"),
    "rapids_chunks": _row("calls_rapids", instead="smaller_arrays"),
    "rapids_managed": _row("calls_rapids"),
    "rapids_pool": _row("calls_rapids"),
    "tf_growth": _row(absent="full_of_its_own tried_growth"),
    "paddle_fraction": _row(absent="has_small_share tried_growth"),
}  # fmt: skip
_NOTHING = Needs()
# Changes of PyTorch code, each with what is told where nothing shows PyTorch.
_OF_PYTORCH: Mapping[str, str] = {
    "detach": "detach_own", "no_grad": "smaller_input", "no_grad_own": "smaller_input",
    "smaller_batch_any": "smaller_input", "detach_state": "", "no_retain_graph": "", "half_setting": "",
    "checkpointing_setting": "", "mixed_precision": "", "checkpointing": "", "sdpa": "", "expandable_segments": "",
    "own_device": "", "unpin": "", "gather_on_host": "", "foreach": "",
}  # fmt: skip


def needs_of(key: str) -> Needs:
    """What a remedy presupposes; nothing where the table has no row for it."""
    return NEEDS.get(key, _NOTHING)


def founded(key: str, facts: frozenset[str]) -> str:
    """The remedy that these facts found: the one asked for, what is told instead of it, or ""."""
    if key in _OF_PYTORCH and "of_pytorch" not in facts:
        return founded(_OF_PYTORCH[key], facts) if _OF_PYTORCH[key] else ""
    needs = needs_of(key)
    if needs.shown and not needs.shown & facts:
        return founded(needs.instead, facts) if needs.instead else ""
    if needs.absent & facts:
        may_be_told = needs.instead and not needs.shown
        return founded(needs.instead, facts) if may_be_told else ""
    return key


def may_show_code(key: str, facts: frozenset[str]) -> bool:
    """Whether lines for a remedy have their place in what the author wrote."""
    code = needs_of(key).code
    return not code or bool(code & facts)
