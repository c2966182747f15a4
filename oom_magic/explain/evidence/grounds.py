"""What evidence from a text rests on: the author's words, which are shown as they stand, or it is not shown.

One table for all that is read in what authors write. The words are not told in others: where the evidence has a
sentence, it says what is true of any run. Numbers, frames and lines of code are in the values of their own sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from oom_magic.explain.evidence.causes import Cause, Evidence

# The author's statements (keys of ``author_words`` and ``author_setting``) of which one must be there.
RESTS_ON: Mapping[str, tuple[str, ...]] = {
    "smaller_batch_helps": ("smaller_batch_helps",),
    "larger_batch_fails": ("larger_batch_fails",),
    "larger_input_fails": ("larger_input_fails",),
    "smaller_input_works": ("smaller_input_works",),
    "smaller_input_no_help": ("smaller_input_no_help", "tried_size"),
    "smaller_share_helps": ("smaller_share_helps",),
    "host_fills": ("host_fills",),
    "memory_grows": ("grows",),
    "grows_in_evaluation": ("grows",),
    "told_shared": ("shares_device",),
    "told_models_beside": ("models_beside",),
    "told_copies": ("copies_of_model",),
    "told_models_in_turn": ("repeats_models",),
    "told_metrics": ("counts_metrics",),
    "told_pieces": ("blames_fragments",),
    "told_unpinned": ("unpinning_helps",),
    "told_scores_all": ("scores_all",),
    "told_killed": ("killed", "kernel_dies"),
    "told_whole": ("full_batch",),
    "told_full_at_any_size": ("full_at_any_size",),
    "told_no_grad": ("lacks_no_grad",),
    "told_embeddings": ("embeds_many",),
    "told_share": ("names_share",),
    "told_before_loading": ("before_loading",),
    "told_at_import": ("fills_at_import",),
    "told_higher_limit": ("higher_limit_helps",),
    "told_smaller_model": ("smaller_model_works",),
    "told_fewer_layers": ("fewer_layers_help",),
    "told_saving": ("saves",),
    "told_loading": ("loads",),
    "told_more_gaussians": ("gaussians_grow",),
    "told_idle_devices": ("leaves_devices_idle",),
    "told_split": ("gives_split",),
    "told_evaluation": ("evaluates",),
    "told_repeated": ("repeated_use",),
    "replay_buffer": ("replays",),
    "told_left_over": ("left_over",),
    "told_room_at_start": ("room_at_start",),
    "told_late": ("after_while",),
    "told_between_epochs": ("between_epochs",),
    "told_graph_kept": ("keeps_graph",),
    "told_at_optimizer": ("at_optimizer",),
    "told_kv_cache": ("fills_cache",),
    "told_offload_helps": ("offload_helps",),
    "told_spills": ("spills",),
    "told_mines": ("mines",),
    "told_collects": ("collects_results",),
    "told_loads_data": ("loads_data",),
    "told_ram_only": ("speaks_of_ram",),
    "told_conversation": ("converses",),
    "told_adam": ("adam_costs",),
    "told_trains_whole": ("trains_whole",),
    "told_workers": ("workers",),
    "told_merging": ("merges",),
    "told_given": ("is_given_memory",),
    "told_host_library": ("computes_on_host",),
    "told_frees_at_end": ("frees_at_end",),
    "told_new_only": ("grows_with_new",),
    "told_page_file": ("page_file",),
    "told_shutdown": ("shuts_down",),
    "told_rises_once": ("rises_once",),
    "told_rises_to_a_level": ("rises_to_a_level",),
    "told_batch_of_one": ("batch_of_one",),
    "dense_pairs": ("dense_pairs",),
    "index_error_beside": ("indexes",),
    "told_runs_without": ("works_without",),
    "told_without": ("works_without",),
    "told_contrast": ("sizes_contrast",),
    "told_ran_before": ("ran_before",),
    "told_gathers": ("keeps_predictions", "predicts_all"),
    "told_evaluation_collects": ("evaluates",),
    "told_generation": ("generates_beside",),
    "told_cache_fills": ("grows",),
    "told_fragmented": ("varies_in_length", "fragments"),
    "told_offload": ("offloads_to_host",),
    "one_device_holds_more": ("crowds_one_device",),
    "one_device_gathers": ("crowds_one_device",),
    "ranks_load_to_one": ("resumes",),
    "checkpoint_kept": ("resumes",),
    "told_checkpoint_to_gpu": ("loads_checkpoint",),
    "boxes_vary": ("detects",),
    "recordings_vary": ("hears",),
    "pinned_memory_used": ("pins",),
    "pinned_under_wsl": ("pins",),
}


# What a quote has to say besides the thing that it names: a computer's size and a library's import are no evidence.
_HAS_TO_SAY: Mapping[str, re.Pattern[str]] = {
    "told_ram_only": re.compile(
        r"\bus(?:e|age|ing)|consum|tak(?:e|ing)|took|eat|fill|full|\br[au]n\b|\brunning|out\b|exceed|exhaust|crash|kill|limit"
        r"|spike|grow|increas|high|\btoo\b|\ball\b|load|need|requir|enough|hold|memory error|leak|store|free|releas"
        r"|[爆满占涨]|不[足够]|溢出|释放",
        re.I,
    ),
    "told_host_library": re.compile(r"^(?!(?:import|from) )", re.I),
}  # fmt: skip


# Statements about a run; lines of code and options make none.
_OF_PROSE = {
    "told_loading", "told_saving", "told_repeated", "told_killed", "told_late", "told_evaluation", "told_shared",
    "told_ram_only", "told_loads_data", "host_fills", "memory_grows", "larger_input_fails", "told_evaluation_collects",
}  # fmt: skip
_CODE = re.compile(r"^(?:… )?(?:print\(|import \w+$|from [\w.]+ import |[\w.]{1,40} ?= ?[\w\"'\[({]|--?\w+[= ])")


# What says where it failed, and nothing of how large the weights are or what else the device held.
_WHERE_IT_LOADED = {"stage_loading", "phase_loading", "told_loading", "program_seen", "no_message"}


def shows_only_loading(cause: Cause, evidence: Iterable[Evidence]) -> bool:
    """Whether weights are the cause only because they were being loaded when memory ran out."""
    known = {one.key for one in evidence}
    return cause is Cause.WEIGHTS_TOO_BIG and bool(known & _WHERE_IT_LOADED) and known <= _WHERE_IT_LOADED


# What is told of a run and not of its memory, or what a message means; and what speaks for a cause only where no other
# has anything: of 229 reports read blind eight were told a second cause, and five of these their threads contradicted,
# none of which the message, a frame or a line of code had shown.
_FOR_NO_SECOND = {
    "checkpoint_kept", "large_request", "weights_fill_card", "weights_fill_mac", "weights_fill_one_card",
    "weights_named", "adam_fills_card", "late_steps", "late_epochs", "program_reserves", "meaning_ctranslate2",
    "meaning_cuda_error_oom", "meaning_cuda_error_oom_elsewhere", "meaning_third_party_cuda_oom",
    "meaning_cuda_driver_call", "physx_buffers",
}  # fmt: skip
_OF_A_SETTING = re.compile(r"[A-Za-z]{2}[\w-]*[\"']?(?: ?[=:] ?| )[\"']?\d")


def speaks_for_another(item: Evidence) -> bool:
    """Whether a piece of evidence is enough for one more cause beside a likelier one: seen, and not the author's words.

    A size of which the text does not say what it is the size of is not.
    """
    is_bare = item.key == "input_named" and _OF_A_SETTING.search(str(item.values["what"])) is None
    return "quote" not in item.values and item.key not in _FOR_NO_SECOND and not is_bare


def grounded(items: Iterable[Evidence], quotes: Mapping[str, str]) -> Iterator[Evidence]:
    """The pieces of evidence, each with the words it rests on (``quote``); without such words it is left out."""
    for item in items:
        grounds = RESTS_ON.get(item.key)
        quote = next((quotes[key] for key in grounds or () if quotes.get(key)), "")
        if quote and item.key in _HAS_TO_SAY and not _HAS_TO_SAY[item.key].search(quote):
            continue
        if quote and item.key in _OF_PROSE and _CODE.search(quote):
            continue
        if quote:
            yield Evidence(item.key, {**item.values, "quote": quote})
        elif grounds is None:
            yield item
