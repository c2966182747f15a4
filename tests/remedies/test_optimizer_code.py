"""An optimizer, or adapters, for a model and an optimizer that are there: code that does what was priced."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from oom_magic.explain.remedies.code import is_placed, placed_after
from oom_magic.explain.remedies.own_code.optimizers import (
    optimizer_of_adapters,
    with_optimizer,
    with_optimizer_exchanged,
)
from oom_magic.explain.remedies.own_code.writing import CodeWriter
from oom_magic.predict.what_if.optimizer_changes import offloaded_optimizer

_ONCE = "# run this, then the failed cell again:\n"


class Fitter:
    """A class of the user's that has a model and makes its optimizer."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.net = net
        self.opt = torch.optim.AdamW(net.parameters(), lr=3e-4, weight_decay=0.1)


def seen() -> dict[str, Any]:
    net = torch.nn.Linear(4, 4)
    return {"torch": torch, "net": net, "opt": torch.optim.Adam(net.parameters(), lr=1e-4), "fitter": Fitter(net)}


@pytest.mark.parametrize(
    ("cell", "key", "model", "shown"),
    [
        ("train(net, opt)", "sgd", "net", f"{_ONCE}opt = torch.optim.SGD(net.parameters(), lr=0.0001)"),
        ("train(net, opt)", "foreach", "net", f'{_ONCE}for group in opt.param_groups:\n    group["foreach"] = False'),
        (
            "net, opt = build()\ntrain(net, opt)",
            "adafactor",
            "net",
            "# after the line that makes opt:\nopt = torch.optim.Adafactor(net.parameters(), lr=0.0001)",
        ),
        (
            "fitter.fit()",
            "adafactor",
            "fitter.net",
            f"{_ONCE}fitter.opt = torch.optim.Adafactor(fitter.net.parameters(), lr=0.0003, weight_decay=0.1)",
        ),
        ("fitter.fit(opt)", "sgd", "net", ""),  # one of two
        ("train()", "sgd", "", ""),
    ],
)
def test_the_optimizer_that_is_there_is_set_anew(cell: str, key: str, model: str, shown: str) -> None:
    assert with_optimizer_exchanged(ast.parse(cell), seen(), key, model) == shown


def test_an_optimizer_with_a_scheduler_or_other_weights_is_not_set_anew() -> None:
    names = seen()
    names["schedule"] = torch.optim.lr_scheduler.StepLR(names["opt"], 1)
    assert with_optimizer_exchanged(ast.parse("train(net, opt)"), names, "sgd", "net") == ""
    names = {**seen(), "other": torch.nn.Linear(4, 4)}
    assert with_optimizer_exchanged(ast.parse("train(other, opt)"), names, "sgd", "other") == ""


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        (
            "train(net, opt)",
            "opt = torch.optim.Adam([one for one in net.parameters() if one.requires_grad], lr=0.0001)",
        ),
        ("net = make()\nopt = torch.optim.Adam(net.parameters())\ntrain(net, opt)", ""),  # behind the adapters
        ("train(net)", ""),  # it makes one
        ("train(net, opt, fitter)", ""),
    ],
)
def test_adapters_are_trained(cell: str, shown: str) -> None:
    assert optimizer_of_adapters(ast.parse(cell), seen(), "net") == shown


def test_every_optimizer_of_a_cell_is_exchanged() -> None:
    """All were, when it was priced: a class that no list of names has, too."""

    class Own(torch.optim.SGD):
        pass

    names = {"torch": torch, "Own": Own}
    cell = "a = torch.optim.SparseAdam(table, lr=0.1)\nb = Own(head)\nc = torch.optim.Adam(body)\nd = Path(name)"
    lines = with_optimizer(ast.parse(cell), names, "sgd").splitlines()
    assert lines == [f"{one} = torch.optim.SGD({two})" for one, two in
                     (("a", "table, lr=0.1"), ("b", "head"), ("c", "body"))]  # fmt: skip


@pytest.mark.parametrize(
    ("made", "key", "shown"),
    [
        ("torch.optim.Adam(net.parameters(), 3e-4)", "optimizer_8bit", "bnb.optim.Adam8bit(net.parameters(), lr=0.0003)"),
        (
            "optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)",
            "optimizer_8bit",
            "bnb.optim.AdamW8bit(groups, lr=rate, betas=(0.9, 0.95))",
        ),
        (
            "torch.optim.RMSprop(net.parameters(), 1e-2, eps=1e-6)",
            "optimizer_8bit",
            "bnb.optim.AdamW8bit(net.parameters(), lr=0.01)",
        ),
        ("torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=wd)", "sgd", "SGD(net.parameters(), lr=0.1, weight_decay=wd)"),
        (
            "torch.optim.Adam(net.parameters(), 3e-4, eps=1e-6)",
            "offload_optimizer",
            "CPUOffloadOptimizer(net.parameters(), torch.optim.Adam, lr=0.0003, eps=1e-06)",
        ),
        ("torch.optim.Adam(net.parameters(), 3e-4)", "foreach", "torch.optim.Adam(net.parameters(), 0.0003, foreach=False)"),
    ],
)  # fmt: skip
def test_what_the_user_set_stays_where_the_other_class_takes_it(made: str, key: str, shown: str) -> None:
    names = {"torch": torch, "optim": torch.optim}
    code = with_optimizer(ast.parse(f"opt = {made}"), names, key)
    assert code.endswith(shown.removeprefix("bnb.")) and code.splitlines()[-1].startswith("opt = ")


def test_adam_that_is_there_stays_adam_in_8_bits() -> None:
    """AdamW would decay its weights by 1 % of the learning rate, unasked."""
    code = with_optimizer_exchanged(ast.parse("train(net, opt)"), seen(), "optimizer_8bit", "net")
    assert code.endswith("opt = bnb.optim.Adam8bit(net.parameters(), lr=0.0001)")


class Lit:
    """What a trainer is given: it calls the methods."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", ["lit", "Lit()"])
def test_the_optimizer_that_a_method_returns_to_a_trainer(given: str) -> None:
    names = {"lit": Lit(), "Lit": Lit, "trainer": object()}
    code = CodeWriter(ast.parse(f"trainer.fit({given}, data)"), names, []).beside("sgd", {}, {})
    assert code is not None and code.splitlines()[0] == "# in Lit.configure_optimizers:"
    assert code.endswith("    return torch.optim.SGD(self.parameters(), lr=0.0001)")


def test_code_for_a_model_that_the_cell_makes_tells_its_place() -> None:
    values = {"rank": 8, "targets": ["q"]}
    tree, names = ast.parse("fitter = Fitter(make())\nfitter.fit()"), seen()
    code = CodeWriter(tree, names, []).beside("lora", values, {"model": "fitter.net"})
    assert code is not None and code.startswith(placed_after("fitter", "from peft"))
    assert code.endswith("lr=0.0003, weight_decay=0.1)") and is_placed(f"del old\n%oom_free\n\n{code}")


def test_what_has_sparse_gradients_is_not_trained_on_the_host() -> None:
    """torchao's CPUOffloadOptimizer copies gradients into dense tensors, which fails for these."""
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.tensor([1])).sum().backward()
    change = offloaded_optimizer()
    with change.around_run(), pytest.raises(TypeError):
        change.prepare(table)
        optimizer.step()
    assert type(optimizer) is torch.optim.SparseAdam


def test_the_place_of_code_for_a_model_that_a_function_makes_is_told_once() -> None:
    tree = ast.parse("def train():\n    net = make()\n    fit(net)\ntrain()")
    seen_inside = {"model": "net", "made": "net", "function": "train"}
    code = CodeWriter(tree, {}, []).beside("half_weights", {"dtype": "bf16"}, seen_inside)
    assert code is not None and code.splitlines()[:2] == [
        "# in train, after the line that makes net:",
        "net = net.to(torch.bfloat16)   # before the optimizer is created",
    ]
