"""Which live object owns a piece of memory: weights, gradients, optimizer state, inputs.

By identity of storages: the address of a tensor's storage is the address of the allocator's block. No
reference to an object outlives a call, so nothing is kept alive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from oom_magic.garbage_collector import live_objects
from oom_magic.half_built import is_built
from oom_magic.measure.history.frames import AUTOGRAD_SITE, Site
from oom_magic.memory.categories import Category
from oom_magic.memory.timeline import Phase, SourceLine


@dataclass(slots=True)
class Allocation:
    """One allocation while the timeline is built. ``category`` is None until it is known."""

    requested_bytes: int
    block_bytes: int
    stream: int
    site: Site
    line: SourceLine | None
    phase: Phase
    step: int
    category: Category | None = None
    module: str = ""
    is_before: bool = False
    has_tensor: bool = False

    def claim(self, category: Category, module: str) -> None:
        """Record that a live tensor owns it: of a module, of an optimizer, the user's own (input), or a result."""
        self.has_tensor = True
        if category not in GUESSES:
            self.category, self.module = category, module
        elif category is Category.INPUT and self.category is None and self.site.phase is None:
            self.category = category


def classify(
    allocations: Sequence[Allocation],
    order: Sequence[int],
    *,
    has_graph: bool,
    workspace_sizes: frozenset[int],
) -> None:
    """Infer the categories of allocations that no live object owns.

    - workspace: of a size that cuBLAS uses, never freed and no tensor's;
    - input: made where a plain tensor of the user's was made;
    - parameter: made inside ``torch.nn`` while a module was built or moved;
    - activation: made in the forward and alive when it was over (a graph still alive: not over yet);
    - temporary: everything else.
    """
    outlived = _outlived_forward(allocations, order, has_graph)
    freed = {~event for event in order if event < 0}
    input_sites = {id(one.site) for one in allocations if one.category is Category.INPUT}
    for index, one in enumerate(allocations):
        is_size = one.requested_bytes in workspace_sizes
        if is_size and index not in freed and not one.has_tensor and one.category in (None, Category.BEFORE):
            one.category = Category.WORKSPACE
        elif one.category is not None:
            continue
        elif id(one.site) in input_sites:
            one.category = Category.INPUT
        elif one.site.makes_parameters and one.site.phase is None:
            one.category = Category.PARAMETER
        else:
            one.category = Category.ACTIVATION if index in outlived else Category.TEMPORARY


def _outlived_forward(allocations: Sequence[Allocation], order: Sequence[int], has_graph: bool) -> set[int]:
    """The forward's allocations that were alive when the next phase began."""
    alive: set[int] = set()
    outlived: set[int] = set()
    for event in order:
        if event < 0:
            alive.discard(~event)
        elif allocations[event].phase is Phase.FORWARD:
            alive.add(event)
        elif alive:
            outlived |= alive
            alive = set()
    return outlived | alive if has_graph else outlived


def mirrored_operators(allocations: Sequence[Allocation], order: Sequence[int]) -> dict[int, str]:
    """Names for what autograd's threads allocated, by the forward operator that each belongs to.

    A node of the graph allocates its gradients, then releases what the forward saved for it: so the next
    saved tensor to be freed tells the operator and the line that the allocation mirrors.
    """
    names: dict[int, str] = {}
    mirrored = ""
    for event in reversed(order):
        if event < 0:
            one = allocations[~event]
            if one.category is Category.ACTIVATION and (one.line or one.site.operator):
                where = f" ({one.line})" if one.line else ""
                mirrored = f"backward of {one.site.operator or 'operator'}{where}"
        elif allocations[event].phase is not Phase.BACKWARD:
            mirrored = ""
        elif mirrored and allocations[event].site is AUTOGRAD_SITE:
            names[event] = mirrored
    return names


Owner = tuple[Category, str]
"""The category and the path of the module that a parameter, its gradient or its state belongs to.

Input and activation are guesses: a plain tensor without a graph, and one with."""
GUESSES = (Category.INPUT, Category.ACTIVATION)
_NOBODY: Owner = (Category.INPUT, "")


Storage = tuple[int, int]
"""Where bytes lie, and how many. Tensors that share them have one address; no two devices have the same."""

_NO_WRAPPERS = frozenset({torch.Tensor, torch.nn.Parameter})
_ROWS = torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values
_COLUMNS = torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values
_SPARSE_PARTS: dict[torch.layout, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    torch.sparse_coo: (torch.Tensor._indices, torch.Tensor._values),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}


@dataclass
class Owners:
    """Owners by storage address, and whether a tensor with an autograd graph is alive."""

    by_address: dict[int, Owner] = field(default_factory=dict)
    has_graph: bool = False


def storage_of(tensor: torch.Tensor) -> Storage | None:
    """The bytes of a plain tensor; None where there are none. Code of the tensor's own class is not called."""
    try:
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            return (address, storage.nbytes()) if address else None
    except (RuntimeError, NotImplementedError, AttributeError):  # fake, functorch and wrapper tensors
        return None


def on_cuda(index: int) -> Callable[[torch.Tensor], Storage | None]:
    """Finds storages on one CUDA device."""

    def locate(tensor: torch.Tensor) -> Storage | None:
        with torch._C.DisableTorchFunction():
            return storage_of(tensor) if tensor.is_cuda and tensor.device.index == index else None

    return locate


def storage_address(tensor: torch.Tensor) -> int:
    """The device address of a CUDA tensor's storage; 0 for any other tensor and where there is none."""
    try:
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage().data_ptr() if tensor.is_cuda else 0
    except (RuntimeError, NotImplementedError, AttributeError):
        return 0


def inner_tensors(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The plain tensors of a tensor: itself, or the parts of a sparse one or of a wrapper such as a DTensor."""
    with torch._C.DisableTorchFunction():
        if tensor.layout is not torch.strided:
            return [part(tensor) for part in _SPARSE_PARTS.get(tensor.layout, ())]
    if type(tensor) in _NO_WRAPPERS:  # a failed attribute lookup takes a microsecond
        return (tensor,)
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        return (tensor,)
    parts = [getattr(tensor, name) for name in flatten(tensor)[0]]  # a DTensor lists its mesh, too
    return [inner for part in parts if isinstance(part, torch.Tensor) for inner in inner_tensors(part)]


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in nested dicts, lists, queues and tuples."""
    if isinstance(value, torch.Tensor):
        yield from inner_tensors(value)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, (list, tuple, deque)):
        for item in value:
            yield from tensors_in(item, depth - 1)


def find_owners() -> Owners:
    """The owners of all CUDA memory that Python objects hold now. Takes about 0.1 s for 500,000 objects."""
    owners = Owners()
    modules, optimizers, tensors = _live_objects()
    for tensor in tensors:
        with torch._C.DisableTorchFunction():
            is_leaf = tensor.grad_fn is None
            guess = Category.INPUT if is_leaf and not tensor.requires_grad else Category.ACTIVATION
        owners.has_graph |= not is_leaf
        _claim(owners, tensor, guess, "")
    for module in _outermost(modules):
        _claim_module(owners, module)
    for optimizer in optimizers:
        claim_optimizer(owners, optimizer)
    return owners


def claim_optimizer(owners: Owners, optimizer: torch.optim.Optimizer) -> None:
    """Add an optimizer's state, its parameters and their gradients, under the paths already known."""
    for parameter in _parameters(optimizer):
        _, path = owners.by_address.get(storage_address(parameter), (Category.PARAMETER, ""))
        _claim_parameter(owners, parameter, path)
        for tensor in tensors_in(optimizer.state.get(parameter, {})):
            _claim(owners, tensor, Category.OPTIMIZER_STATE, path)


def gradient_owners(optimizer: torch.optim.Optimizer, known: Owners) -> Owners:
    """The gradients of an optimizer's parameters: what is new in each step."""
    owners = Owners()
    for parameter in _parameters(optimizer):
        if parameter.grad is not None:
            _, path = known.by_address.get(storage_address(parameter), (Category.PARAMETER, ""))
            _claim(owners, parameter.grad, Category.GRADIENT, path)
    return owners


def _live_objects() -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer], list[torch.Tensor]]:
    """All modules, optimizers and CUDA tensors; of parameters, their modules are asked."""
    sought = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)
    live = live_objects(lambda kind: issubclass(kind, sought) and kind is not torch.nn.Parameter)
    found: dict[type, list[Any]] = {kind: [] for kind in sought}
    for one in live:
        found[next(kind for kind in sought if issubclass(type(one), kind))].append(one)
    tensors = [tensor for tensor in found[torch.Tensor] if storage_address(tensor)]
    modules, optimizers = filter(is_built, found[torch.nn.Module]), filter(is_built, found[torch.optim.Optimizer])
    return list(modules), list(optimizers), tensors


def _outermost(modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Modules that no other module contains: their names for parameters are the user's."""
    children = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in children]


def _claim_module(owners: Owners, module: torch.nn.Module) -> None:
    for path, part in module.named_modules():
        for parameter in part.parameters(recurse=False):
            _claim_parameter(owners, parameter, path)
        for buffer in part.buffers(recurse=False):
            _claim(owners, buffer, Category.PARAMETER, path)


def _claim_parameter(owners: Owners, parameter: torch.Tensor, path: str) -> None:
    _claim(owners, parameter, Category.PARAMETER, path)
    if parameter.grad is not None:
        _claim(owners, parameter.grad, Category.GRADIENT, path)


def _claim(owners: Owners, tensor: torch.Tensor, category: Category, path: str) -> None:
    """Record an owner; the first certain one stays (for tied weights, the first module)."""
    for part in inner_tensors(tensor):
        address = storage_address(part)
        if address and owners.by_address.get(address, _NOBODY)[0] in GUESSES:
            owners.by_address[address] = (category, path)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
