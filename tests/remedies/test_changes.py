"""Changes to a run: each does to the pretended run what the pasted code would do to the real one."""

from __future__ import annotations

import collections
import json

import pytest
import torch
from torch import nn

from oom_magic.explain.remedies.code import code_for
from oom_magic.predict.session import DrySession
from oom_magic.predict.setups.model_source import resolve_model
from oom_magic.predict.what_if import loop_changes as habits
from oom_magic.predict.what_if import model_changes as models
from oom_magic.predict.what_if import optimizer_changes as optimizers
from oom_magic.predict.what_if.change import Change, ExpectedInputs, InapplicableError, inputs_of
from oom_magic.predict.what_if.survey import Survey
from tests.support.changed_loops import Loop, gpt2, run
from tests.support.versions import bitsandbytes_or_skip

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(("compares", "how"), [(True, "views"), (True, "pairs"), (False, "weights")])
def test_a_loss_that_compares_the_samples_of_a_batch_is_seen(compares, how):
    def loop():
        net, classes = nn.Linear(16, 8).cuda(), nn.Linear(8, 24, bias=False).cuda()
        optimizer = torch.optim.SGD([*net.parameters(), *classes.parameters()], lr=0.1)
        for _ in range(2):
            one, other = net(torch.randn(24, 16, device="cuda")), net(torch.randn(24, 16, device="cuda"))
            both = torch.cat([one, other])
            products = {"views": (both, both.T), "pairs": (one, other.T), "weights": (one, classes.weight.T)}
            torch.matmul(*products[how]).logsumexp(1).mean().backward()
            optimizer.step()

    survey = Survey([])
    run(loop, survey)
    assert survey.compares_samples is compares


def test_gradients_scaled_by_accelerate_are_accumulated(fresh_accelerate):
    def loop():
        accelerator = fresh_accelerate.Accelerator(mixed_precision="fp16")
        net = nn.Linear(64, 64)
        net, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters()))
        for _ in range(4):
            accelerator.backward(net(torch.randn(32, 64, device="cuda")).square().mean())
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    assert run(loop, habits.AccumulatedGradients()).peak_allocated_bytes


@pytest.mark.parametrize("is_lightnings", [True, False])
def test_batches_that_lightning_gives_to_a_step_are_accumulated(is_lightnings):
    """Its optimizers compute the gradients by a closure, within the step: a step of others may do so several times."""

    def loop():
        net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def closure():
            loss = net(torch.zeros(8192, 1024, device="cuda")).square().mean()
            optimizer.zero_grad()
            loss.backward()
            return loss.detach()

        closure.__module__ = "pytorch_lightning.loops" if is_lightnings else "users"
        for _ in range(4):
            optimizer.step(closure)

    gradients = 4 * (1024 * 1024 + 1024) * 4
    alone, changed = run(loop).peak_allocated_bytes, run(loop, habits.AccumulatedGradients()).peak_allocated_bytes
    assert (changed - alone >= gradients / 2) == is_lightnings


@pytest.mark.parametrize("clears", ["first", "before the backward", "at the end"])
def test_a_run_of_one_step_accumulates_too(clears):
    """Its step is the first, so the second of its batches was priced without the gradients of the first."""

    def step(parts):
        net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda()
        optimizer = torch.optim.Adam(net.parameters())
        if clears == "first" or parts > 1:
            optimizer.zero_grad()
        for part in torch.zeros(parts, 4096, 512, device="cuda"):
            loss = net(part).square().mean() / parts
            if clears == "before the backward" and parts == 1:
                optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if clears == "at the end":
            optimizer.zero_grad()

    data_bytes = 4096 * 512 * 4  # of the second part
    written, alone, changed = (
        run(lambda: step(2)), run(lambda: step(1)), run(lambda: step(1), habits.AccumulatedGradients(is_one_step=True))
    )  # fmt: skip
    expected = written.peak_allocated_bytes - data_bytes
    assert abs(changed.peak_allocated_bytes - expected) <= 1024  # losses that are still alive
    assert alone.peak_allocated_bytes < 0.9 * expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        (models.ActivationCheckpointing, {}, {"checkpointing": True}),
        (lambda: models.MixedPrecision("bf16"), {}, {"autocast": True}),
        (lambda: models.AttentionKernel("sdpa"), {"settings": {"attn_implementation": "eager"}}, {}),
        (lambda: optimizers.OptimizerOptions(foreach=False), {}, {"options": {"foreach": False}}),
        (optimizers.sgd, {}, {"optimizer": torch.optim.SGD}),
        (optimizers.adafactor, {}, {"optimizer": torch.optim.Adafactor}),
        (habits.DroppedOutputs, {}, {"drops": True}),
        (habits.ReleasedGradients, {"set_to_none": False}, {"set_to_none": True}),
    ],
)
def test_a_change_is_what_its_code_does(change, before, after):
    plain, changed, written = run(Loop(**before)), run(Loop(**before), change()), run(Loop(**after))
    assert changed.steps[-1].peak_allocated_bytes == written.steps[-1].peak_allocated_bytes
    assert changed.steps[-1].peak_allocated_bytes <= plain.steps[-1].peak_allocated_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "how", "key"),
    [
        (models.ActivationCheckpointing, {"checkpointing": True}, "checkpointing_already"),
        (lambda: models.MixedPrecision("fp16"), {"autocast": True}, "autocast_already"),
        (lambda: models.AttentionKernel("sdpa"), {}, "attention_already"),
        (
            lambda: models.AttentionKernel("sdpa"),
            {"settings": {"attn_implementation": "eager", "output_attentions": True}},
            "attention_maps_wanted",
        ),
        (optimizers.sgd, {"optimizer": torch.optim.SGD}, "optimizer_already"),
        (lambda: optimizers.OptimizerOptions(fused=True), {"optimizer": torch.optim.Rprop}, "no_such_option"),
        (habits.ReleasedGradients, {}, "gradients_released_already"),
        (habits.DroppedOutputs, {"drops": True}, "outputs_dropped_already"),
    ],
)
def test_a_survey_tells_what_does_not_apply(change, how, key):
    one = change()
    survey = Survey([one])
    surveyed = run(Loop(**how), survey)
    assert survey.error(one).key == key
    assert surveyed.peak_allocated_bytes == run(Loop(**how)).peak_allocated_bytes


def test_a_run_that_wants_attention_maps_keeps_the_kernel_that_makes_them():
    with pytest.raises(InapplicableError, match="attention_maps_wanted"):
        run(Loop(settings={"attn_implementation": "eager"}, maps=True), models.AttentionKernel("sdpa"))


@pytest.mark.parametrize(("length", "after"), [(8, 2), (6, 2), (1, 1)])
def test_calls_of_other_lengths_are_cut_alike(length, after):
    inputs, mask, weights = torch.zeros(length, 3), torch.zeros(length), torch.zeros(5)
    args, kwargs = habits.ShorterInputs(0, 8, 2).arguments((inputs, weights), {"mask": mask, "returns": True})
    assert [len(one) for one in (*args, kwargs["mask"])] == [after, 5, after] and kwargs["returns"]


def test_inputs_in_dictionaries_are_seen_and_cut():
    """Of a batch as its tokenizer gives it, of the two texts of a pair, of pictures in a list not."""
    ids, pictures = torch.zeros(8, 5, dtype=torch.long), [torch.zeros(3, 9, 9), torch.zeros(3, 7, 7)]
    batch = collections.UserDict(input_ids=ids, length=5)
    args = (batch, [{"input_ids": ids[:, :4]}, {"input_ids": ids}], pictures)
    assert inputs_of(args, {}) == (((8, 5), True), ((8, 4), True), ((8, 5), True))
    (first, pair, left), _ = habits.ShorterInputs(0, 8, 2).arguments(args, {})
    assert [len(one["input_ids"]) for one in (first, *pair)] == [2, 2, 2] and left is pictures
    assert len(batch["input_ids"]) == 8 and type(first) is collections.UserDict and first["length"] == 5


def test_a_survey_changes_nothing_and_keeps_nothing():
    """A refusal's traceback leads to the frames of the call, and so to the model's outputs."""
    asked = [models.ActivationCheckpointing(), models.HalfWeights("bf16"), models.AttentionKernel("sdpa")]
    survey = Survey(asked)
    assert run(Loop(), survey).peak_allocated_bytes == run(Loop()).peak_allocated_bytes
    assert [survey.error(one) for one in asked[:2]] == [None, None]
    assert survey.keeps_outputs and not survey.keeps_gradients
    assert survey.error(Change()).key == "no_model_ran"


def test_batches_per_step_are_counted():
    def accumulate():
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for _ in range(4):
                model(torch.zeros(2, 8, device="cuda")).sum().backward()
            optimizer.step()

    survey = Survey([])
    run(accumulate, survey)
    assert survey.batches_per_step == 4


def test_two_calls_with_one_backward_are_one_batch():
    def compare():
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            one, other = (model(torch.zeros(2, 8, device="cuda")) for _ in range(2))
            (one - other).sum().backward()
            optimizer.step()

    survey = Survey([])
    run(compare, survey)
    assert survey.batches_per_step == 1


@pytest.mark.parametrize(("is_moved", "number"), [(True, 1), (False, 2)])
def test_a_batch_whose_gradient_is_taken_at_other_weights_is_one(is_moved: bool, number: int) -> None:
    """As in sharpness-aware minimization; without that a batch that is always the same is several."""

    def minimize() -> None:
        model, batch = nn.Linear(8, 8).cuda(), torch.zeros(2, 8, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for _ in range(2):
                model(batch).sum().backward()
                with torch.no_grad():
                    for weight in model.parameters() if is_moved else ():
                        weight.add_(0.1)
            optimizer.step()

    survey = Survey([])
    run(minimize, survey)
    assert survey.batches_per_step == number


def test_an_offloaded_optimizer_takes_nothing():
    report = run(Loop(), optimizers.offloaded_optimizer())
    assert report.breakdown["optimizer_state"] == 0
    assert report.peak_allocated_bytes < run(Loop(optimizer=torch.optim.Adam)).peak_allocated_bytes


@pytest.mark.parametrize("change", [optimizers.offloaded_optimizer, optimizers.adafactor, optimizers.sgd])
def test_a_step_that_takes_a_closure_is_the_other_optimizers(change):
    def loop(has_closure):
        net = nn.Linear(64, 4096).cuda()
        optimizer = torch.optim.AdamW(net.parameters())

        def closure():
            optimizer.zero_grad()
            loss = net(torch.randn(8, 64, device="cuda")).sum()
            loss.backward()
            return loss

        for _ in range(2):
            if has_closure:
                assert optimizer.step(closure).shape == ()
            else:
                closure()
                optimizer.step()

    plain, closed = (run(lambda has=has: loop(has), change()) for has in (False, True))
    assert closed.breakdown["optimizer_state"] == plain.breakdown["optimizer_state"]
    assert closed.peak_allocated_bytes == pytest.approx(plain.peak_allocated_bytes, abs=512)  # the loss, alive longer
    assert closed.timeline.num_steps() == plain.timeline.num_steps() == 2


@pytest.mark.slow
def test_quantized_adapters_are_as_if_loaded_so():
    peft, bitsandbytes = pytest.importorskip("peft"), bitsandbytes_or_skip()
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, vocab_size=1000
    )

    def train(model):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for _ in range(2):
            ids = torch.randint(0, 1000, (2, 64), device="cuda")
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def whole():
        train(transformers.LlamaForCausalLM(config).to(torch.bfloat16).to("cuda"))

    def quantized():
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        for name, layer in list(model.named_modules()):
            if type(layer) is nn.Linear and name != "lm_head":
                made = bitsandbytes.nn.Linear4bit(
                    layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16,
                    compress_statistics=True, quant_type="nf4",
                )  # fmt: skip
                made.weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
                owner = model.get_submodule(name.rpartition(".")[0])
                setattr(owner, name.rpartition(".")[2], made)
        model.is_loaded_in_4bit = True
        model = model.to("cuda")
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        targets = list(resolve_model("qwen2.5-7b").lora_targets)  # as presets of this kind have them
        train(peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets)))

    changed, written = run(whole, models.QuantizedAdapters(4)), run(quantized)
    assert changed.breakdown["parameter"] == pytest.approx(written.breakdown["parameter"], rel=0.01)
    assert changed.peak_allocated_bytes == pytest.approx(written.peak_allocated_bytes, rel=0.01)


@pytest.mark.parametrize(("model_type", "targets"), [("gpt2", '["c_attn"]'), ("bert", '"all-linear"')])
def test_adapters_that_are_advised_go_where_setups_put_them(model_type, targets):
    peft = pytest.importorskip("peft")
    change = models.LowRankAdapters(4)

    def loop(adapted=None):
        model = gpt2().to("cuda")
        model.config.model_type = model_type  # "bert": layers by names that this model does not have
        if adapted:
            config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=json.loads(adapted))
            model = peft.get_peft_model(model, config)
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.zeros(2, 64, dtype=torch.long, device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    changed, written = run(loop, change), run(lambda: loop(targets))
    assert changed.breakdown["optimizer_state"] == written.breakdown["optimizer_state"]
    assert f"LoraConfig(r=4, lora_alpha=8, target_modules={targets})" in code_for("lora", "plain", change.values)[0]


@pytest.mark.parametrize("change", [optimizers.sgd, lambda: models.LowRankAdapters(4)])
def test_what_wraps_the_optimizer_stays(change, fresh_accelerate):
    def train():
        model = gpt2()
        groups = [{"params": [p]} for p in model.parameters()]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0] * len(groups))
        prepared = fresh_accelerate.Accelerator().prepare(model, optimizer, scheduler)
        for _ in range(2):
            ids = torch.zeros(2, 64, dtype=torch.long, device="cuda")
            prepared[0](input_ids=ids, labels=ids).loss.backward()
            prepared[1].step()
            prepared[2].step()
            prepared[1].zero_grad()

    assert run(train, change()).peak_allocated_bytes < run(train).peak_allocated_bytes


def test_only_what_trains_is_under_autocast_where_a_run_trains():
    """As the code to paste has it, which stands around the loss: features made before the loop stay in float32."""

    def train():
        model = nn.Linear(64, 1024).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            target = model(torch.rand(64, 64, device="cuda"))
        seen.append(target.dtype)
        for _ in range(2):
            output = model(torch.rand(64, 64, device="cuda"))
            seen.append(output.dtype)
            nn.functional.mse_loss(output, target).backward()
            optimizer.step()

    seen = []
    change = models.MixedPrecision("bf16", with_loss=True)
    run(train, Survey([change]))
    run(train, change)
    assert seen[3:] == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_a_model_of_one_size_cannot_be_given_less():
    def train():
        model = nn.Linear(64, 8).cuda()
        model(torch.rand(8, 64, device="cuda")).sum().backward()

    with pytest.raises(InapplicableError) as error:
        run(train, habits.ShorterInputs(1, 64, 32))
    assert error.value.key == "one_size"


def test_a_loss_module_is_no_forward_of_the_model():
    def train():
        model, criterion = nn.Linear(8, 8).cuda(), nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            criterion(model(torch.zeros(4, 8, device="cuda")), torch.zeros(4, 8, device="cuda")).backward()
            optimizer.step()

    survey = Survey([])
    run(train, survey)
    assert survey.batches_per_step == 1


def test_a_number_of_turns_is_no_size_of_the_call_that_then_never_comes():
    """``iters=10`` was taken for the batch of 1000 pictures that a function attacks, ten times a hundred of them."""

    def attack(turns: int) -> None:
        net = nn.Linear(8, 1).cuda()
        for _ in range(turns):
            net(torch.ones(4, 8, device="cuda"))

    def run_with(turns: int) -> None:
        expected = ExpectedInputs(1, lambda inputs: inputs[0][0] == (4, 8))
        DrySession(has_bar=False, changes=(expected,)).run(lambda: attack(turns))

    run_with(2)
    with pytest.raises(InapplicableError, match="size_not_set_there"):
        run_with(1)
