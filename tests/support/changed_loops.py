"""A loop that can be written with a change or without, for tests of changes."""

from __future__ import annotations

import pytest
import torch

from oom_magic.predict.session import DrySession

transformers = pytest.importorskip("transformers")


def gpt2(**settings):
    small = {"n_layer": 3, "n_embd": 256, "n_head": 4, "vocab_size": 20_000}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**small, **settings}))


class Loop:
    """A training loop that can also be written the way a change would have it."""

    def __init__(self, **how):
        self.how = how

    def __call__(self):
        how = self.how
        model = gpt2(**how.get("settings", {})).to("cuda")
        if how.get("checkpointing"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = how.get("optimizer", torch.optim.AdamW)(model.parameters(), lr=1e-3, **how.get("options", {}))
        outputs = None
        for _ in range(3):
            ids = torch.randint(0, 20_000, (4, 256), device="cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bool(how.get("autocast"))):
                outputs = model(input_ids=ids, labels=ids, output_attentions=how.get("maps", False))
            loss = outputs.loss
            if how.get("drops"):
                del outputs
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=how.get("set_to_none", True))


def run(loop, *changes):
    session = DrySession(stop_after_steps=2, is_lasting=False, is_limited=False, has_bar=False, changes=changes)
    return session.run(loop)
