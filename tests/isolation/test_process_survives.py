"""No code in a dry run ends the process: C++ functions that are noexcept meet no exception."""

from __future__ import annotations

import subprocess
import sys

import pytest

_DEADLY = {
    "flex attention": """
        from torch.nn.attention.flex_attention import flex_attention
        q = torch.randn(1, 2, 128, 64, device="cuda", requires_grad=True)
        flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j)).sum().backward()""",
    "a function's backward": """
        class Raises(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x * 2
            @staticmethod
            def backward(ctx, g): raise LookupError("mine")
        Raises.apply(torch.ones(3, device="cuda", requires_grad=True)).sum().backward()""",
    "a hook": """
        def raises(*_): raise LookupError("mine")
        x = torch.ones(3, device="cuda", requires_grad=True)
        x.register_hook(raises)
        (x * 2).sum().backward()""",
    "packing": """
        def raises(*_): raise LookupError("mine")
        with torch.autograd.graph.saved_tensors_hooks(raises, raises):
            torch.ones(3, device="cuda", requires_grad=True).exp().sum().backward()""",
    "unpacking": """
        def raises(*_): raise LookupError("mine")
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, raises):
            y = torch.ones(3, device="cuda", requires_grad=True).exp()
        y.sum().backward()""",
    "fake tensors": """
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.ones(3, requires_grad=True)
            (x + torch.ones(3)).sum().backward()
            torch.linalg.lu_factor(torch.ones(3))""",
    "a subclass": """
        class Odd(torch.Tensor):
            @staticmethod
            def __new__(cls): return torch.Tensor._make_wrapper_subclass(cls, (3,), dispatch_sizes_strides_policy="sizes")
            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None): raise LookupError("mine")
        (Odd() + torch.ones(3, device="cuda")).sum()""",
    "recomputation": """
        from torch.utils.checkpoint import checkpoint
        calls = []
        def part(x):
            calls.append(1)
            if len(calls) > 1: raise LookupError("mine")
            return x.exp()
        checkpoint(part, torch.ones(3, device="cuda", requires_grad=True), use_reentrant=True).sum().backward()""",
    "vmap": """
        def raises(x): raise LookupError("mine")
        torch.func.vmap(torch.func.grad(raises))(torch.ones(3, 2, device="cuda"))""",
    "memory in a backward": """
        x = torch.ones(2**28, device="cuda", requires_grad=True)
        for _ in range(30): y = (x * 2).exp().sin(); y.sum().backward(); x = torch.cat([x.detach()] * 2).requires_grad_()""",
    "an error of C++ in a backward": """
        x = torch.ones(3, device="cuda", requires_grad=True)
        y = x.exp()
        y.mul_(2)
        y.sum().backward()""",
    "deep recursion": """
        def down(x): return down(x + 1)
        down(torch.ones(3, device="cuda", requires_grad=True))""",
    "deep recursion in a backward": """
        class Down(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x.clone()
            @staticmethod
            def backward(ctx, grad):
                with torch.enable_grad():
                    x = torch.ones(3, device="cuda", requires_grad=True)
                    Down.apply(x).sum().backward()
                return grad
        Down.apply(torch.ones(3, device="cuda", requires_grad=True)).sum().backward()""",
    "a long graph": """
        x = torch.ones(1, device="cuda", requires_grad=True)
        for _ in range(20_000): x = x + 1
        x.backward()""",
    "a destructor": """
        class Dies:
            def __del__(self): torch.ones(3, device="cuda").item(); raise LookupError("mine")
        x = torch.ones(3, device="cuda", requires_grad=True)
        y = x.exp(); y.grad_fn.metadata["dies"] = Dies()
        del y""",
}


_SCRIPT = """
import warnings; warnings.simplefilter("ignore")
import textwrap, torch, oom_magic as om

for name, code in {deadly!r}.items():
    print(name, end=": ", flush=True)
    made = dict(torch=torch)
    exec("def run():" + chr(10) + textwrap.indent(textwrap.dedent(code).strip(chr(10)), "    "), made)
    try:
        om.dry_run(made["run"])
        print("followed")
    except BaseException as error:
        print("raised", type(error).__name__)
    assert torch.ones(2).sum() == 2
    assert om.dry_run(lambda: torch.ones(3, device="cuda").cpu()).peak_allocated_bytes == 512
"""


@pytest.mark.slow
def test_nothing_in_a_dry_run_ends_the_process() -> None:
    script = _SCRIPT.format(deadly=_DEADLY)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    said = dict(line.split(": ") for line in done.stdout.splitlines())
    assert done.returncode == 0 and said.keys() == _DEADLY.keys(), done.stdout + done.stderr[-2000:]
    assert "raised NameError" not in said.values(), "what is to be tried was not"
