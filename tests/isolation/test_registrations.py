"""What the user's code registers with PyTorch and other libraries in a dry run is gone after it."""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import numbers
import ssl
import sys
from typing import Any

import matplotlib.axes
import matplotlib.projections
import pytest
import torch
import torch._dynamo
import transformers
from torch.fx._symbolic_trace import _wrapped_fns_to_patch
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gpt2 import modeling_gpt2

from oom_magic.predict.session import DrySession
from tests.support.put_back import Changes, check_put_back


class Meter:
    """A class of the user's."""


OPERATORS = """
@torch.library.custom_op("registrations_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * factor
double.register_fake(torch.empty_like)
double.register_autograd(lambda ctx, grad: grad * factor)
lib = torch.library.Library("registrations_tests", "FRAGMENT")
lib.define("triple(Tensor x) -> Tensor")
lib.impl("triple", lambda x: x * factor, "CompositeExplicitAutograd")
torch.library.define("registrations_tests::sixfold", "(Tensor x) -> Tensor")
torch.library.impl("registrations_tests::sixfold", "CompositeExplicitAutograd", lambda x: x * factor)
"""
USING = """
net = torch.nn.Linear(4, 4, device="cuda")
double(net(torch.ones(2, 4, device="cuda"))).sum().backward()
torch.ops.registrations_tests.triple(net.weight), torch.ops.registrations_tests.sixfold(net.weight)
"""


@pytest.mark.skipif(
    not hasattr(torch._library.fake_impl.FakeImplHolder, "kernel"),
    reason="this PyTorch takes no second register_fake of an operator",
)
def test_operators_of_a_run_are_gone_and_those_of_before_are_called() -> None:
    def run(lines: str, **names: Any) -> None:
        cell = compile(lines, "<ipython-input-operators>", "exec")
        DrySession(has_bar=False, is_lasting=False).run(lambda: exec(cell, own | names), [own])

    def known() -> set[str]:
        return {name for name in torch.library._defs | torch.library._impls if name.startswith("registrations_tests")}  # type: ignore[attr-defined]

    own: dict[str, Any] = {"torch": torch, "factor": 2, "__name__": "__main__"}
    run(OPERATORS + USING)
    assert not known() and not torch._C._jit_get_schemas_for_operator("registrations_tests::sixfold")
    exec(OPERATORS, own)  # as if nothing had been defined before
    before = known()
    run(OPERATORS + USING, factor=5)  # the very cell again
    run("lib.impl('double', lambda x: x, 'CPU')\ndouble.register_fake(torch.zeros_like)\n" + USING)
    assert known() == before
    ones = torch.ones(2, requires_grad=True)
    for operator in (
        own["double"],
        *(getattr(torch.ops.registrations_tests, name) for name in ("double", "triple", "sixfold")),
    ):
        assert operator(ones).tolist() == [2, 2]
    own["double"](ones).sum().backward()
    assert ones.grad is not None and ones.grad.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match=r"registrations_tests::triple\(Tensor x\) -> Tensor is already defined"):
        run("lib.define('triple(Tensor x, int y) -> Tensor')")


class Positive(torch.distributions.constraints.Constraint): ...


class Polar(matplotlib.axes.Axes):
    name = "users_projection"


@functools.singledispatch
def shown(value: Any) -> str:
    return "anything"


def patch_inside() -> None:
    from transformers.models.gpt2 import modeling_gpt2

    modeling_gpt2.eager_attention_forward = Meter  # type: ignore[assignment]
    modeling_gpt2.GPT2MLP.forward = torch.nn.Linear.forward  # type: ignore[assignment,method-assign]


DISTRIBUTED: Any = torch.distributed
BIJECTIONS = torch.distributions.constraint_registry.biject_to
CONTEXT = ssl.create_default_context()
LIBRARIES: Changes = {
    "a name": (lambda: hasattr(torch, "users_flag"), lambda: setattr(torch, "users_flag", 1)),
    "an entry": (lambda: "users_gelu" in ACT2FN, lambda: ACT2FN.__setitem__("users_gelu", torch.nn.ReLU)),
    "another entry": (lambda: dict.get(ACT2FN, "gelu"), lambda: ACT2FN.__setitem__("gelu", torch.nn.ReLU)),
    "a model": (lambda: (modeling_gpt2.eager_attention_forward, modeling_gpt2.GPT2MLP.forward), patch_inside),
    "a configuration": (
        lambda: "users_type" in CONFIG_MAPPING,
        lambda: CONFIG_MAPPING.register("users_type", type("Users", (transformers.PretrainedConfig,), {})),
    ),
    "a bijection": (lambda: Positive in BIJECTIONS._registry, lambda: BIJECTIONS.register(Positive, id)),  # type: ignore
    "a projection": (
        matplotlib.projections.get_projection_names,
        lambda: matplotlib.projections.register_projection(Polar),
    ),
    "colours": (
        lambda: len(matplotlib.colormaps),
        lambda: matplotlib.colormaps.register(matplotlib.colormaps["gray"], name="users_gray"),
    ),
    "wrapped": (lambda: len(_wrapped_fns_to_patch), lambda: _wrapped_fns_to_patch.update({(1, "shown"): globals()})),
    "a decomposition": (
        lambda: torch._decomp.decomposition_table[torch.ops.aten.silu.default],
        lambda: torch._decomp.decomposition_table.update({torch.ops.aten.silu.default: shown}),
    ),
    "a tensor": (lambda: len(vars(torch.fft)), lambda: setattr(torch.fft, "_cached", torch.ones(3, device="cuda"))),
    "a backend": (
        lambda: torch.distributed.Backend.backend_list[:],
        lambda: torch.distributed.Backend.register_backend("users_backend", id, devices="cpu"),
    ),
    "compiled": (
        lambda: id(shown) in torch._dynamo.trace_rules._allowed_callable_ids,
        lambda: torch.compiler.allow_in_graph(shown),  # type: ignore[no-untyped-call]
    ),
    "a function": (lambda: shown(3), lambda: (shown.register(int, lambda value: "number"), shown(3))),
    "a class": (lambda: issubclass(Meter, numbers.Number), lambda: numbers.Number.register(Meter)),
    "options": (lambda: dict(sys._xoptions), lambda: sys._xoptions.update(mine="1")),
    "errors of C": (ctypes.get_errno, lambda: ctypes.set_errno(5)),
    "connections": (lambda: CONTEXT.check_hostname, lambda: setattr(CONTEXT, "check_hostname", False)),
    "debugging": (
        DISTRIBUTED.get_debug_level,
        lambda: DISTRIBUTED.set_debug_level(DISTRIBUTED.DebugLevel.DETAIL),
    ),
}  # fmt: skip


def test_what_is_registered_with_libraries_is_taken_out() -> None:
    DrySession(has_bar=False).run(lambda: torch.ones(1, device="cuda").sum())  # what is imported then stays
    shown(3)
    check_put_back(LIBRARIES, globals())


def test_what_is_registered_with_pandas_is_taken_out() -> None:
    pandas = pytest.importorskip("pandas")
    dtypes = pandas.core.dtypes.base._registry.dtypes

    def register_dtype() -> None:
        named = type("Dtype", (pandas.api.extensions.ExtensionDtype,), {"name": "users_dtype"})
        pandas.api.extensions.register_extension_dtype(named)

    registrations: Changes = {
        "an accessor": (
            lambda: hasattr(pandas.DataFrame, "users_accessor"),
            lambda: pandas.api.extensions.register_dataframe_accessor("users_accessor")(Meter),
        ),
        "a dtype": (lambda: len(dtypes), register_dtype),
    }
    check_put_back(registrations, {**globals(), "pandas": pandas})


def test_what_a_run_that_imports_a_library_registers_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that the library's code names may be its own."""
    import cycler

    before = {one: set(vars(one)) for one in (torch, torch.Tensor, json, json.JSONEncoder)}
    monkeypatch.delitem(sys.modules, "cycler")

    def run() -> None:
        importlib.import_module("cycler")
        for owner in before:
            owner.users_plain, owner.users_function, owner.by_key = 1, functools.partial(print), 1  # type: ignore

    assert hasattr(cycler.Cycler, "by_key")
    DrySession(has_bar=False, is_lasting=False).run(run, [globals()])
    assert all(set(vars(one)) - names == {"by_key"} for one, names in before.items())
    for owner in before:
        del owner.by_key


def test_the_users_own_step_of_an_optimizer_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the run puts PyTorch's back, which the first optimizer that is made wraps for all."""
    usual = torch.optim.Rprop.step

    def own(self: Any, *args: Any) -> Any:
        return usual(self, *args)

    def run() -> None:
        torch.optim.Rprop.step = usual  # type: ignore[method-assign]
        torch.optim.Rprop([torch.ones(1, device="cuda", requires_grad=True)])

    monkeypatch.setattr(torch.optim.Rprop, "step", own)
    DrySession(has_bar=False).run(run)
    assert torch.optim.Rprop.step is own


def test_operators_that_are_first_found_in_a_run_stay_where_pytorchs_core_refers_to_them(tmp_path, monkeypatch) -> None:
    """A module of the user's that names ``torch.ops.aten`` made them its own: freed, they ended a later run's process."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "names_operators.py").write_text("import torch\naten = torch.ops.aten\n", "utf-8")
    importlib.import_module("names_operators")

    def first() -> None:
        with torch.inference_mode():
            torch.ones(4, 4, device="cuda").fliplr()

    DrySession(has_bar=False).run(first)
    assert "default" in vars(vars(torch.ops.aten)["fliplr"])
    monkeypatch.delitem(sys.modules, "names_operators")
