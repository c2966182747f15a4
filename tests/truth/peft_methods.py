"""Memory that PEFT's authors measured on an L40S, beside dry runs of their program: ``python tests/truth/peft_methods.py FOLDER [NAME...]``.

FOLDER is a checkout of github.com/huggingface/peft (commit ``COMMIT``), whose ``method_comparison/MetaMathQA`` trains
Llama-3.2-3B by 62 methods and keeps what ``max_memory_reserved`` said, less 2 MiB. Its own ``run.train`` is run dry, with
torch 2.13.0 as theirs; transformers 5.13.1 and FOLDER's ``src`` have to be installed. Its data is not at hand: how long
the longest batch is was chosen on one result (``lora--llama-3.2-3B-rank32``), and the others were predicted blind with
it. ``data/peft_methods.json`` holds the results drawn (a fixed shuffle's first ones) and what came out at the first try.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import oom_magic as om
from tests.support.folders import DATA

COMMIT = "cea8213"
RECORDED: dict[str, dict[str, int]] = json.loads((DATA / "peft_methods.json").read_text("utf-8"))
_LONGEST = 613  # tokens of the longest batch; with 612 LoRA comes out 1.1 % too low, with 616 1.6 % too high
_THEN = 570  # the batch after it: batches of a bucket are sorted, and after it the cache's blocks are as they will be
_BATCH = 4


class _Rows:
    """Tokenized examples of given lengths, as a slice of ``datasets.Dataset`` gives them."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, at: slice) -> dict[str, Any]:
        lengths = self.lengths[at]
        return {
            "input_ids": [[7] * length for length in lengths],
            "attention_mask": [[1] * length for length in lengths],
            "response": ["1"] * len(lengths),
        }


class _Batch(dict[str, torch.Tensor]):
    def to(self, device: Any) -> _Batch:
        return _Batch({name: tensor.to(device) for name, tensor in self.items()})


class _Tokenizer:
    """Pads, which is all that training asks of a tokenizer."""

    pad_token_id = eos_token_id = 128001
    model_max_length = 768

    def pad(self, rows: dict[str, Any], **_unused: Any) -> _Batch:
        longest = max(map(len, rows["input_ids"]))
        fill = {"input_ids": self.pad_token_id, "attention_mask": 0}
        return _Batch(
            {name: torch.tensor([row + [fill[name]] * (longest - len(row)) for row in rows[name]]) for name in fill}
        )

    def __call__(self, text: str, **_unused: Any) -> dict[str, Any]:
        return {"input_ids": [7] * 20, "attention_mask": [1] * 20}


def _benchmark(folder: Path) -> tuple[Any, Any]:
    """The benchmark's modules ``run`` and ``utils``, without data and without evaluation; they want a GPU to be there."""
    lengths = [longest - 5 * row for longest in (306, 285, _LONGEST, _THEN) for row in range(_BATCH)]
    data: Any = ModuleType("data")
    data.get_train_valid_test_datasets = lambda **_unused: (_Rows(lengths), _Rows([100]), _Rows([100]))
    data.get_wiki_small = list
    datasets: Any = ModuleType("datasets")
    datasets.__spec__ = ModuleSpec("datasets", None)
    sys.modules.update(data=data, datasets=datasets)
    sys.path.insert(0, str(folder / "method_comparison" / "MetaMathQA"))
    run, utils = importlib.import_module("run"), importlib.import_module("utils")
    run.print_verbose = lambda *_unused, **_more: None
    run.calculate_mean_per_token_loss = lambda **_unused: 1.5
    run.evaluate = lambda **_unused: ([""], [""])
    run.get_accuracy = lambda **_unused: 0.0
    run.BUCKET_FACTOR = run.ACCELERATOR_EMPTY_CACHE_SCHEDULE = 2
    return run, utils


def _train(folder: Path, settings: dict[str, Any]) -> None:
    """Four steps of the benchmark's training, as its ``main`` begins it."""
    run, utils = _benchmark(folder)
    from peft import AdaLoraConfig, AdamssConfig, PeftConfig
    from transformers import set_seed

    config, peft_config = utils.TrainConfig(**settings["train_config"]), None
    if settings["peft_config"]:
        peft_config = PeftConfig.from_peft_type(
            **{name: value for name, value in settings["peft_config"].items() if name != "peft_version"}
        )
    set_seed(config.seed)
    init = utils.init_accelerator()
    of_model = ("model_id", "dtype", "compile", "use_gc", "attn_implementation", "autocast_adapter_dtype")
    of_training = ("batch_size", "batch_size_eval", "eval_steps", "generation_kwargs", "grad_norm_clip",
                   "optimizer_type", "optimizer_kwargs", "query_template", "use_amp", "init_kv_cache_prefix")  # fmt: skip
    result = run.train(
        model=utils.get_model(peft_config=peft_config, **{name: getattr(config, name) for name in of_model}),
        max_steps=4, tokenizer=_Tokenizer(), accelerator_memory_init=init, lr_scheduler_arg=config.lr_scheduler,
        is_adalora=isinstance(peft_config, AdaLoraConfig), is_adamss=isinstance(peft_config, AdamssConfig),
        **{name: getattr(config, name) for name in of_training},
    )  # fmt: skip
    if result.error_msg:
        raise RuntimeError(result.error_msg)


def main(folder: Path, names: list[str]) -> None:
    for name in names or RECORDED:
        result = json.loads((folder / "method_comparison" / "MetaMathQA" / "results" / f"{name}.json").read_text())
        report = om.dry_run(lambda: _train(folder, result["run_info"]), gpu="L40S", stop_after_steps=None)  # noqa: B023
        measured = result["train_info"]["accelerator_memory_max"]
        predicted = report.peak_reserved_bytes - (2 << 20)
        print(f"{name:56} {measured:14,} {predicted:14,} {predicted / measured - 1:+8.2%}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
