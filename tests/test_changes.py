"""Changes to a run: each does to the pretended run what the pasted code would do to the real one."""

from __future__ import annotations

import ast
import gc
import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from versions import bitsandbytes_or_skip

from oom_magic.explain.remedies.code import code_for
from oom_magic.explain.remedies.own_code.checkpointing import checkpointing
from oom_magic.explain.remedies.own_code.parts import with_edges_drawn
from oom_magic.predict.session import DrySession
from oom_magic.predict.setups.model_source import resolve_model
from oom_magic.predict.what_if import load_changes as loading
from oom_magic.predict.what_if import loop_changes as habits
from oom_magic.predict.what_if import model_changes as models
from oom_magic.predict.what_if import optimizer_changes as optimizers
from oom_magic.predict.what_if.change import Change, InapplicableError
from oom_magic.predict.what_if.recomputed_parts import RecomputedParts, recomputed_parts
from oom_magic.predict.what_if.survey import Survey
from oom_magic.units import GIB

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


def run(loop, *changes):
    session = DrySession(stop_after_steps=2, is_lasting=False, is_limited=False, has_bar=False, changes=changes)
    return session.run(loop)


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


def test_an_offloaded_optimizer_takes_nothing():
    report = run(Loop(), optimizers.offloaded_optimizer())
    assert report.breakdown["optimizer_state"] == 0
    assert report.peak_allocated_bytes < run(Loop(optimizer=torch.optim.Adam)).peak_allocated_bytes


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
def test_what_wraps_the_optimizer_stays(change):
    accelerate = pytest.importorskip("accelerate")

    def train():
        model = gpt2()
        groups = [{"params": [p]} for p in model.parameters()]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0] * len(groups))
        prepared = accelerate.Accelerator().prepare(model, optimizer, scheduler)
        for _ in range(2):
            ids = torch.zeros(2, 64, dtype=torch.long, device="cuda")
            prepared[0](input_ids=ids, labels=ids).loss.backward()
            prepared[1].step()
            prepared[2].step()
            prepared[1].zero_grad()

    assert run(train, change()).peak_allocated_bytes < run(train).peak_allocated_bytes


def load(**how):
    transformers.AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", device_map="cuda", **how)


def load_and_move():
    transformers.AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", dtype=torch.float32).to("cuda")


def build_and_move():
    config = transformers.AutoConfig.from_pretrained("Qwen/Qwen2.5-0.5B")
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(torch.device("cuda", 0))


def quantization(bits):
    double = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return transformers.BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4, **double)


@pytest.mark.slow
@pytest.mark.parametrize("code", [load_and_move, build_and_move, lambda: load(dtype=torch.float32)])
@pytest.mark.parametrize(
    ("change", "written"),
    [
        (lambda: loading.LoadedInHalf("bf16"), lambda: {"dtype": torch.bfloat16}),
        (
            lambda: loading.LoadedQuantized(8),
            lambda: {"quantization_config": quantization(8), "dtype": torch.float16},
        ),
        (
            lambda: loading.LoadedQuantized(4),
            lambda: {"quantization_config": quantization(4), "dtype": torch.bfloat16},
        ),
    ],
)
def test_a_model_loaded_otherwise_is_what_its_code_loads(code, change, written):
    bitsandbytes_or_skip()
    changed, meant, plain = run(code, change()), run(lambda: load(**written())), run(code)
    assert changed.peak_allocated_bytes == pytest.approx(meant.peak_allocated_bytes, rel=0.02)
    assert changed.peak_allocated_bytes < 0.6 * plain.peak_allocated_bytes


def test_weights_that_are_trained_are_not_loaded_quantized_or_in_part():
    bitsandbytes_or_skip()
    quantized, half, part = loading.LoadedQuantized(4), loading.LoadedInHalf("bf16"), loading.LoadedInPart(GIB)
    survey = Survey([quantized, half, part])
    run(Loop(), survey)
    assert survey.error(quantized).key == "weights_are_trained" and survey.error(half) is None
    assert survey.error(part).key == "weights_are_trained"


@pytest.mark.slow
def test_a_model_loaded_in_part_is_what_its_code_loads():
    pytest.importorskip("transformers.modeling_utils")  # as the run without changes, which comes first, leaves it

    def generate(**how):
        model = transformers.AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", dtype=torch.float32, **how)
        ids = torch.zeros(1, 64, dtype=torch.long, device="cuda")
        model = model if how else model.to("cuda")
        model.generate(ids, max_new_tokens=2, do_sample=False)

    changed = run(generate, loading.LoadedInPart(GIB))
    written = run(lambda: generate(device_map="auto", max_memory={0: "1024MiB", "cpu": "999GiB"}))
    assert changed.peak_allocated_bytes == written.peak_allocated_bytes < 0.8 * run(generate).peak_allocated_bytes
    with pytest.raises(InapplicableError):
        run(lambda: nn.Linear(1024, 1024).cuda(), loading.LoadedInPart(GIB))


def test_own_models_are_loaded_in_16_bits_only():
    bitsandbytes_or_skip()
    half = loading.LoadedInHalf("fp16")
    assert run(lambda: nn.Linear(1024, 1024).cuda(), half).peak_allocated_bytes < 3 * 2**20
    assert half.variant == "own"
    with pytest.raises(InapplicableError):
        run(lambda: nn.Linear(1024, 1024).cuda(), loading.LoadedQuantized(4))


def test_the_loss_in_chunks_reaches_the_head_under_adapters():
    peft = pytest.importorskip("peft")

    def train():
        model = peft.get_peft_model(gpt2().to("cuda"), peft.LoraConfig(r=4, target_modules="all-linear"))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        ids = torch.randint(0, 20_000, (16, 256), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    assert run(train, models.ChunkedLoss()).peak_allocated_bytes < run(train).peak_allocated_bytes


def test_the_users_model_is_as_before():
    model = gpt2()
    before = {name: id(value) for name, value in model.named_parameters()}

    def train():
        moved = model.to("cuda")
        optimizer = torch.optim.AdamW(moved.parameters())
        moved(input_ids=torch.zeros(1, 8, dtype=torch.long, device="cuda")).logits.sum().backward()
        optimizer.step()

    for change in (models.ActivationCheckpointing(), models.HalfWeights("bf16"), optimizers.sgd()):
        run(train, change)
    gc.collect()
    assert {name: id(value) for name, value in model.named_parameters()} == before
    assert all(p.dtype == torch.float32 and p.grad is None for p in model.parameters())
    assert not model.is_gradient_checkpointing


def test_a_model_without_blocks_cannot_be_checkpointed():
    with pytest.raises(InapplicableError) as error:
        models.ActivationCheckpointing().check(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    assert error.value.key == "no_blocks"


class Convolved(nn.Module):
    """Blocks that no list holds, as of most graph networks and U-Nets."""

    def __init__(self, is_checkpointed=False):
        super().__init__()
        self.into, self.head = nn.Linear(64, 64), nn.Linear(64, 4)
        self.conv1, self.conv2, self.conv3 = (
            nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in "123"
        )
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        x = self.into(x)
        for conv in (self.conv1, self.conv2, self.conv3):
            x = checkpoint(conv, x, use_reentrant=False) if self.is_checkpointed else conv(x)
        return self.head(x)


def test_blocks_that_stand_in_no_list_are_recomputed():
    def train(is_checkpointed=False):
        model = Convolved(is_checkpointed).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.rand(4096, 64, device="cuda")).sum().backward()
            optimizer.step()

    assert recomputed_parts(Convolved()).blocks == ("conv1", "conv2", "conv3")
    changed, written = run(train, models.ActivationCheckpointing()), run(lambda: train(True))
    assert changed.peak_allocated_bytes == written.peak_allocated_bytes < run(train).peak_allocated_bytes


class Translating(nn.Module):
    """An encoder and a decoder of different blocks, in lists beside each other."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32) for _ in range(3))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(16, 2, 32) for _ in range(2))
        self.bridge = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(9))  # single operators


def test_all_lists_of_blocks_are_recomputed_and_what_has_layers_beside_them():
    assert recomputed_parts(Translating()) == RecomputedParts(("encoder", "decoder"), ("bridge",))
    staged = nn.ModuleList(
        nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(n))) for n in (2, 3)
    )
    assert recomputed_parts(staged).lists == ("0", "1")
    wrapped = nn.ModuleDict({"inner": nn.ModuleDict({"body": Convolved()})})  # one part is the whole model
    assert recomputed_parts(wrapped).blocks == tuple(f"inner.body.conv{number}" for number in "123")


def layers_in_place():
    """Single layers, of which those in place change what the layer before them has made."""
    layers = ((nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(inplace=True)) for _ in range(4))
    return nn.Sequential(nn.Conv2d(3, 8, 1), *(layer for group in layers for layer in group))


def test_long_sequences_of_layers_are_recomputed_in_parts():
    def train(make=layers_in_place):
        net = make().cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            net(torch.rand(8, 3, 64, 64, device="cuda")).sum().backward()
            optimizer.step()

    def as_written():
        net = layers_in_place()
        code = code_for("checkpointing_blocks", "plain", {"recomputed": checkpointing([], [("net", bounds)])})[0]
        exec(code, {"net": net})
        return net

    ((path, bounds),) = recomputed_parts(layers_in_place()).bounds
    assert (path, bounds) == ("", (0, 4, 7, 10, 13))
    changed, written = run(train, models.ActivationCheckpointing()), run(lambda: train(as_written))
    assert changed.peak_allocated_bytes == written.peak_allocated_bytes < run(train).peak_allocated_bytes


class Passing(nn.Module):
    """Messages along edges, weighted."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x, edge_index, edge_weight):
        source, target = edge_index
        messages = self.linear(x)[source] * edge_weight[:, None]
        return torch.zeros_like(x).index_add(0, target, messages)


GRAPH = """
def train():
    optimizer.zero_grad()
    out = model(x, edge_index, edge_weight=weights)
    out.square().sum().backward()
    optimizer.step()
"""


def test_a_graph_network_is_trained_on_a_part_of_the_edges_as_its_code_has_it():
    def graph():
        model = Passing().cuda()
        edges = torch.randint(0, 100, (2, 40_000), device="cuda")
        found = {"torch": torch, "model": model, "x": torch.rand(100, 64, device="cuda"), "edge_index": edges}
        found["weights"] = torch.rand(40_000, device="cuda")
        return {**found, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def train(source=GRAPH):
        names = graph()
        exec(source, names)
        for _ in range(2):
            names["train"]()

    code = with_edges_drawn(ast.parse(GRAPH).body[0], {"model": Passing()}, 4)
    assert code.endswith("out = model(x, edge_index[:, drawn], edge_weight=weights[drawn])")
    as_written = GRAPH.replace("out = model(x, edge_index, edge_weight=weights)", code.replace("\n", "\n    "))
    changed, written = run(train, habits.DrawnEdges(4)), run(lambda: train(as_written))
    assert changed.peak_allocated_bytes == written.peak_allocated_bytes < 0.7 * run(train).peak_allocated_bytes
    with pytest.raises(InapplicableError):
        habits.DrawnEdges(2).check(nn.Linear(2, 2))


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


class _Labelled(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, number):
        return {"x": torch.ones(8), "labels": 0}


class _Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2**18)

    def forward(self, x, labels):
        logits = self.head(x.flatten(1)[:, :8])
        return {"loss": logits.mean(), "logits": logits}


@pytest.mark.parametrize("made", [None, 1])
def test_what_a_trainer_collects_goes_to_the_host_after_each_batch(made, tmp_path):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers.trainer")

    def evaluate():
        options = {"report_to": [], "disable_tqdm": True, "eval_accumulation_steps": made}
        args = transformers.TrainingArguments(str(tmp_path), per_device_eval_batch_size=2, **options)
        trainer = transformers.Trainer(_Wide(), args, eval_dataset=_Labelled(), compute_metrics=lambda _: {})
        trainer.evaluate()

    change = habits.GatheredOnHost()
    survey = Survey([change])
    batch = 2 * 2**18 * 4
    peak = DrySession("RTX 3060", changes=(survey,), has_bar=False).run(evaluate).peak_allocated_bytes
    changed = DrySession("RTX 3060", changes=(change,), has_bar=False).run(evaluate).peak_allocated_bytes
    assert (survey.error(change) is None) == (made is None)
    saved = 0 if made else 15  # each is put to those before it, in new memory; cuBLASLt may have a workspace of its own
    assert (peak - changed) / batch == pytest.approx(saved, abs=0.5)


class _Tokens(_Labelled):
    def __getitem__(self, _):
        return {"x": torch.ones(8), "labels": torch.ones(8, dtype=torch.long)}


class _OfEachToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 16)

    def forward(self, x, labels):
        logits = self.head(x.unsqueeze(-1))
        return {"loss": logits.mean(), "logits": logits}


def test_metrics_compare_what_shorter_inputs_give_with_as_many_labels(tmp_path):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers.trainer")
    shapes = []

    def compute_metrics(prediction):
        shapes.append((prediction.predictions.shape[1:], prediction.label_ids.shape[1:]))
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    def evaluate():
        args = transformers.TrainingArguments(str(tmp_path), report_to=[], disable_tqdm=True)
        data = _Tokens()
        transformers.Trainer(_OfEachToken(), args, eval_dataset=data, compute_metrics=compute_metrics).evaluate()

    DrySession("RTX 3060", changes=(habits.ShorterInputs(1, 8, 2),), has_bar=False).run(evaluate)
    assert shapes == [((2, 16), (2,))]


def test_a_trainer_fetches_the_batches_of_a_step_together(tmp_path):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers.trainer")

    def train(accumulation):
        def loop():
            options = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "max_steps": 2}
            options |= {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 2}
            args = transformers.TrainingArguments(str(tmp_path), **options)
            transformers.Trainer(_Wide(), args, train_dataset=_Pictures()).train()

        return loop

    once, changed = (
        run(train(1), habits.AccumulatedGradients()),
        (habits.AccumulatedGradients(), habits.FetchedTogether(6)),
    )
    together, true = run(train(1), *changed), run(train(6))
    assert together.peak_allocated_bytes == pytest.approx(true.peak_allocated_bytes, rel=0.001)
    assert together.peak_allocated_bytes > 1.5 * once.peak_allocated_bytes


class _Pictures(_Labelled):
    def __len__(self):
        return 40

    def __getitem__(self, _):
        return {"x": torch.ones(3, 1024, 1024), "labels": torch.tensor(1)}
