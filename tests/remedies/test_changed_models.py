"""Models that are loaded, quantized or recomputed otherwise, as the code to paste has it."""

from __future__ import annotations

import ast
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from oom_magic.explain.remedies.code import code_for
from oom_magic.explain.remedies.own_code.checkpointing import checkpointing
from oom_magic.explain.remedies.own_code.drawn_edges import with_edges_drawn
from oom_magic.predict.what_if import load_changes as loading
from oom_magic.predict.what_if import model_changes as models
from oom_magic.predict.what_if import optimizer_changes as optimizers
from oom_magic.predict.what_if.change import InapplicableError
from oom_magic.predict.what_if.loop_changes import DrawnEdges, EdgesGiven, edges_given
from oom_magic.predict.what_if.recomputed_parts import RecomputedParts, recomputed_parts
from oom_magic.predict.what_if.survey import Survey
from oom_magic.units import GIB
from tests.support.changed_loops import Loop, gpt2, run
from tests.support.versions import bitsandbytes_or_skip

transformers = pytest.importorskip("transformers")


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

    code = with_edges_drawn(ast.parse(GRAPH).body[0], {"model": Passing()}, 4, EdgesGiven(1, is_matrix=False))
    assert code.endswith("out = model(x, edge_index[:, drawn], edge_weight=weights[drawn])")
    as_written = GRAPH.replace("out = model(x, edge_index, edge_weight=weights)", code.replace("\n", "\n    "))
    changed, written = run(train, DrawnEdges(4)), run(lambda: train(as_written))
    assert changed.peak_allocated_bytes == written.peak_allocated_bytes < 0.7 * run(train).peak_allocated_bytes


class Spread(nn.Module):
    """Messages along the entries of a sparse matrix."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, h, adj):
        source, target = adj.indices()
        return torch.zeros_like(h).index_add(0, target, self.linear(h)[source] * adj.values()[:, None])


MATRIX = GRAPH.replace("out = model(x, edge_index, edge_weight=weights)", "out = model(x, A)")


def test_a_part_of_the_entries_is_drawn_where_edges_are_a_sparse_matrix():
    """Whatever it is called: only arguments named after edges were seen, and a larger card was advised."""

    def graph():
        model = Spread().cuda()
        pairs = torch.randint(0, 2000, (2, 40_000))
        matrix = torch.sparse_coo_tensor(pairs, torch.ones(40_000), (2000, 2000)).coalesce().cuda()
        found = {"torch": torch, "model": model, "x": torch.rand(2000, 64, device="cuda"), "A": matrix}
        return {**found, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def train(source=MATRIX):
        names = graph()
        exec(source, names)
        for _ in range(2):
            names["train"]()

    code = with_edges_drawn(ast.parse(MATRIX).body[0], {"model": Spread()}, 4, EdgesGiven(1, is_matrix=True))
    as_written = MATRIX.replace("out = model(x, A)", code.replace("\n", "\n    "))
    changed, written = run(train, DrawnEdges(4)), run(lambda: train(as_written))
    assert changed.peak_allocated_bytes == written.peak_allocated_bytes < 0.7 * run(train).peak_allocated_bytes


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"x": torch.rand(9, 4), "pairs": torch.zeros(2, 30, dtype=torch.int64)}, "pairs"),
        ({"input_ids": torch.zeros(2, 30, dtype=torch.int64), "attention_mask": torch.ones(2, 30)}, None),
        ({"input_ids": torch.zeros(2, 30, dtype=torch.int64)}, None),
        ({"ids": torch.zeros(2, 30, dtype=torch.int64), "position_ids": torch.zeros(1, 30)}, None),
        ({"x": torch.rand(9, 4), "adj": torch.eye(9).to_sparse()}, "adj"),
        ({"x": torch.rand(9, 4), "adj": torch.eye(9)}, None),
    ],
)
def test_edges_are_known_by_their_shape_beside_the_nodes(given, place):
    found = edges_given((), given)
    assert (None if found is None else found.place) == place


def test_the_switch_of_a_part_is_used_where_a_model_passes_it_on_without_saying_so():
    """As a SentenceTransformer, a Sequential, does."""

    class Sentences(nn.Sequential):
        def gradient_checkpointing_enable(self, **options):
            for part in self:
                part.gradient_checkpointing_enable(**options)

    pytest.importorskip("transformers")
    sentences = Sentences(gpt2())
    assert models.path_of_switch(sentences) == "0"
    models.ActivationCheckpointing().check(sentences)
