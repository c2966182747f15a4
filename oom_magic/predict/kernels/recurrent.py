"""Recurrent layers as CUDA runs them: one cuDNN operator for all steps, weights in one flat buffer, fused cells.

Sources: aten/src/ATen/native/cudnn/RNN.cpp (``_cudnn_impl``, ``_cudnn_rnn``, ``_cudnn_rnn_backward``,
``copy_weights_to_flat_buf_views``, ``_cudnn_rnn_cast_reflatten``) and aten/src/ATen/native/RNN.cpp. What cuDNN reserves
for the backward and takes inside (``cudnnGetRNNTempSpaceSizes``) is not documented. It was read from an H200 with
cuDNN 9.19 (``tests/data/device_h200.json``): the reserve follows to a block of the allocator for all 532 tried;
the workspace does to 1 % in the median of LSTMs and GRUs, and is larger in some, so the report calls it estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.language import _
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.fake_cuda.operator_table import Rule
from oom_magic.predict.fake_cuda.places import Handler, Place
from oom_magic.predict.operators.calls import Call
from oom_magic.units import MIB

aten = torch.ops.aten
RELU, TANH, LSTM, GRU = range(4)  # cudnnRNNMode_t
_KEPT = {RELU: 1, TANH: 1, LSTM: 5, GRU: 6}  # values of each step that a layer keeps for its backward
_TAKEN = {RELU: 4, TANH: 4, LSTM: 5, GRU: 4}  # that it computes with
STATE_BYTES = 24  # of each thread that draws random numbers
_LAYER_BYTES = 8 * MIB  # of each layer's products
MODES = {"RNN_RELU": RELU, "RNN_TANH": TANH, "LSTM": LSTM, "GRU": GRU}
Kernel = Callable[..., Any]


def is_acceptable(gpu: FakeGPU, tensor: torch.Tensor) -> bool:
    """``torch.backends.cudnn.is_acceptable``, for the pretend GPU."""
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return torch.backends.cudnn.enabled and gpu.place(tensor) is Place.GPU and tensor.dtype in kinds


def layer_kernels(gpu: FakeGPU, num_multiprocessors: int) -> dict[str, Kernel]:
    """``lstm`` and its like, for input on the pretend GPU, by the name of their overload."""
    layers = _Layers(gpu, num_multiprocessors)
    modes = {"lstm": LSTM, "gru": GRU, "rnn_tanh": TANH, "rnn_relu": RELU}
    on_steps = {f"{name}.input": partial(layers.on_steps, mode) for name, mode in modes.items()}
    return on_steps | {f"{name}.data": partial(layers.on_packed, mode) for name, mode in modes.items()}


class _Layers:
    """Calls of recurrent layers in one run, which share cuDNN's random state, one for each card."""

    def __init__(self, gpu: FakeGPU, num_multiprocessors: int) -> None:
        self._gpu = gpu
        self._num_state_bytes = num_multiprocessors * 2048 * STATE_BYTES  # cudnnDropoutGetStatesSize
        self._dropout_states: dict[int, torch.Tensor] = {}  # by card

    def on_steps(self, mode: int, tensor: Any, hx: Any, weights: Any, has_biases: bool, *options: Any) -> Any:
        """The outputs of ``lstm.input`` and its like."""
        if not is_acceptable(self._gpu, tensor):
            return _by_cells(mode, tensor, hx, weights, *options, [])
        out = self._run(mode, tensor, hx, weights, has_biases, *options, [])
        return out if mode == LSTM else out[:2]

    def on_packed(self, mode: int, tensor: Any, sizes: Any, hx: Any, weights: Any, *options: Any) -> Any:
        """The outputs of ``lstm.data`` and its like, for packed sequences."""
        if not is_acceptable(self._gpu, tensor):
            return _by_cells(mode, tensor, hx, weights, *options[1:], False, sizes.tolist())
        out = self._run(mode, tensor, hx, weights, *options, False, sizes.tolist())
        return out if mode == LSTM else out[:2]

    def _run(
        self, mode: int, tensor: Any, hx: Any, weights: Any, has_biases: bool, *options: Any
    ) -> tuple[Any, Any, Any]:
        num_layers, dropout, train, bidirectional, batch_first, lengths = options
        hidden, cell = hx if mode == LSTM else (hx, None)
        size, projected = hidden.shape[2], 0
        if cell is not None and cell.shape[2] != size:
            size, projected = cell.shape[2], size
        stride = 4 if has_biases else 2
        buffer, weights = _flat_buffer(weights), list(weights)
        if torch.is_autocast_enabled("cuda"):
            buffer, weights = _half_weights(weights)
            cell = None if cell is None else cell.half()  # arguments are cast from the last to the first
            hidden = hidden.half()
            tensor = tensor.half()
        out = aten._cudnn_rnn(
            tensor, weights, stride, buffer, hidden, cell, mode, size, projected, num_layers, batch_first, dropout,
            train, bidirectional, lengths, self._random_state(tensor) if train and dropout else None,
        )  # fmt: skip
        return out[0], out[1], out[2]

    def _random_state(self, tensor: torch.Tensor) -> torch.Tensor:
        """Dropout's random state, made once for the card of ``tensor`` (``dropout_state_cache``)."""
        with self._gpu.on_card_of(tensor):
            card = self._gpu.current
            if card not in self._dropout_states:
                with self._gpu.creating_on(Place.GPU):
                    torch.empty(1, dtype=torch.uint8, device="meta")
                    self._dropout_states[card] = torch.empty(self._num_state_bytes, dtype=torch.uint8, device="meta")
            return self._dropout_states[card]


def _flat_buffer(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The buffer that all weights are parts of (``try_get_weight_buf``); None if they are not."""
    storage = weights[0].untyped_storage()
    if any(weight.untyped_storage()._cdata != storage._cdata for weight in weights):
        return None
    count = sum(weight.numel() for weight in weights)
    if count * weights[0].element_size() != storage.nbytes():
        return None
    return weights[0].detach().new_empty(0).set_(storage, 0, (count,), (1,))


def _half_weights(weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The weights cast into one flat buffer, as autocast does; those in half precision as they are."""
    if weights[0].dtype is torch.float16:
        return _flat_buffer(weights), list(weights)
    flat = weights[0].detach().new_zeros(sum(weight.numel() for weight in weights), dtype=torch.float16)
    parts = [part.copy_(weight) for part, weight in zip(_parts(flat, weights), weights, strict=True)]
    return flat, parts


def _parts(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Consecutive parts of ``flat`` with the shapes of ``like``, no views to autograd."""
    parts, offset = [], flat.storage_offset()
    for tensor in like:
        strides = torch._prims_common.make_contiguous_strides_for(tensor.shape)
        parts.append(flat.new_empty(0).set_(flat.untyped_storage(), offset, tensor.shape, strides))
        offset += tensor.numel()
    return parts


# -- below autograd ------------------------------------------------------------------


def _flatten(gpu: FakeGPU, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """``flatten_parameters``: the weights move into one buffer."""
    weights = args[0]
    with gpu:
        flat = weights[0].new_zeros(sum(weight.numel() for weight in weights))
    for weight, part in zip(weights, _parts(flat, weights), strict=True):
        weight.set_(part)
    return flat


def _step_bytes(tensor: torch.Tensor, hidden_size: int, bidirectional: bool) -> int:
    """One value of the hidden state for every step, direction and element of the batch; packed sequences have no steps
    beyond their own."""
    steps = tensor.numel() // max(tensor.shape[-1], 1)
    return int(steps * hidden_size * (1 + bidirectional) * tensor.element_size())


def workspace_bytes(call: Recurrence) -> int:
    """Besides what a layer computes with: the input, the weights, and what two directions or dropout give the next."""
    between = 2 if call.num_directions == 2 else int(call.drops)
    taken = (_TAKEN[call.mode] + between) * call.step_bytes + call.input_bytes + call.weight_bytes
    return taken + call.num_layers * call.num_directions * _LAYER_BYTES


def reserve_bytes(call: Recurrence) -> int:
    """What each layer keeps, the outputs between layers, and a bit for each element and direction that is dropped."""
    kept = call.step_bytes * (_KEPT[call.mode] * call.num_layers + call.num_layers - 1) + 256
    return kept + (call.step_bytes * call.num_directions // (8 * call.item_bytes) if call.drops else 0)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Sizes of one call, from the arguments of ``_cudnn_rnn``."""

    mode: int
    num_layers: int
    num_directions: int
    drops: bool  # between layers
    step_bytes: int  # see _step_bytes
    input_bytes: int
    weight_bytes: int
    item_bytes: int

    @classmethod
    def of(
        cls, tensor: torch.Tensor, weights: Sequence[torch.Tensor], mode: int, size: int, num_layers: int,
        dropout: float, train: bool, bidirectional: bool,
    ) -> Recurrence:  # fmt: skip
        """Of these tensors and options."""
        item_bytes = tensor.element_size()
        step_bytes = _step_bytes(tensor, size, bidirectional)
        weight_bytes = sum(weight.numel() for weight in weights) * item_bytes
        drops = bool(train and dropout and num_layers > 1)
        sizes = (step_bytes, tensor.numel() * item_bytes, weight_bytes, item_bytes)
        return cls(mode, num_layers, 1 + bidirectional, drops, *sizes)


def _time_first(gpu: FakeGPU, tensor: torch.Tensor, batch_first: bool, lengths: Sequence[int]) -> torch.Tensor:
    """The input as cuDNN reads it, a copy if it lies otherwise."""
    tensor = tensor.transpose(0, 1) if batch_first and not lengths else tensor
    if tensor.is_contiguous():
        return tensor
    with gpu:
        return tensor.clone(memory_format=torch.contiguous_format)


def _forward(gpu: FakeGPU, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    (tensor, weights, _stride, buffer, hx, cx, mode, size, projected, num_layers, batch_first, dropout, train,
     bidirectional, lengths, _state) = args  # fmt: skip
    call = Recurrence.of(tensor, weights, mode, size, num_layers, dropout, train, bidirectional)
    gpu.values.assume(_("recurrent layers: the memory that cuDNN reserves between forward and backward is estimated"))
    x = _time_first(gpu, tensor, batch_first, lengths)
    width = (projected or size) * (1 + bidirectional)
    with gpu:
        output = x.new_empty((*x.shape[:-1], width))
        hy = torch.empty_like(hx)
        cy = hx.new_empty(0) if cx is None else torch.empty_like(cx)
        if buffer is None:
            buffer = x.new_empty(sum(weight.numel() for weight in weights))
        workspace = x.new_empty(workspace_bytes(call), dtype=torch.uint8)
        reserve = x.new_empty(reserve_bytes(call) if train else 0, dtype=torch.uint8)
    del workspace, x
    return (output.transpose(0, 1) if batch_first and not lengths else output), hy, cy, reserve, buffer


def _backward(gpu: FakeGPU, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    (tensor, weights, _, buffer, hx, cx, output, grad_output, grad_hy, grad_cy, mode, size, _, num_layers,
     batch_first, dropout, train, bidirectional, lengths, _, _, mask) = args  # fmt: skip
    call = Recurrence.of(tensor, weights, mode, size, num_layers, dropout, train, bidirectional)
    num_bytes = workspace_bytes(call)
    with gpu:
        if grad_output is None:
            grad_output = torch.zeros_like(output, memory_format=torch.contiguous_format)  # so it may be copied below
        given = [
            torch.zeros_like(state) if gradient is None else gradient
            for state, gradient in ((hx, grad_hy), (cx, grad_cy))
            if state is not None
        ]
        x = _time_first(gpu, tensor, batch_first, lengths)
        dy = _time_first(gpu, grad_output, batch_first, lengths)
        dx, dhx = torch.empty_like(x), torch.empty_like(hx)
        dcx = hx.new_empty(0) if cx is None else torch.empty_like(cx)
        workspace = x.new_empty(num_bytes, dtype=torch.uint8)
        del workspace, dy, x
        parts: list[torch.Tensor] = []
        if mask[3]:
            x = _time_first(gpu, tensor, batch_first, lengths)
            flat = torch.zeros_like(buffer)
            workspace = x.new_empty(num_bytes, dtype=torch.uint8)
            del workspace, x
            parts = _parts(flat, weights)
    del given
    return (dx.transpose(0, 1) if batch_first and not lengths else dx), dhx, dcx, parts


HANDLERS: dict[OpOverload, Handler] = {
    aten._cudnn_rnn_flatten_weight.default: _flatten,
    aten._cudnn_rnn.default: _forward,
    aten._cudnn_rnn_backward.default: _backward,
}


# -- cells ----------------------------------------------------------------------------


def lstm_cell(tensor: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """aten/src/ATen/native/RNN.cpp, ``LSTMCell`` on CUDA: two products, then one kernel."""
    hidden, cell = hx
    gates = aten._thnn_fused_lstm_cell(tensor @ w_ih.t(), hidden @ w_hh.t(), cell, b_ih, b_hh)
    return gates[0], gates[1]


def gru_cell(tensor: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """``GRUCell`` on CUDA, likewise."""
    return aten._thnn_fused_gru_cell(tensor @ w_ih.t(), hx @ w_hh.t(), hx, b_ih, b_hh)[0]


def fused_gru_cell(gates: Any, hidden_gates: Any, hx: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """aten/src/ATen/native/cuda/RNN.cu: the gates are kept for the backward."""
    workspace = hx.new_empty((hx.shape[0], 5 * hx.shape[1]))
    return torch.empty_like(hx), workspace


def fused_gru_cell_backward(gradient: Any, workspace: Any, has_bias: bool) -> Any:
    """Gradients of both gates, of the state, and of the biases."""
    batch, size = workspace.shape[0], 3 * workspace.shape[1] // 5
    gates = [gradient.new_empty((batch, size)) for _ in range(2)]
    biases = [gradient.new_empty(size) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(gradient), *biases)


def _simple_cell(
    nonlinearity: Kernel, tensor: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> Any:
    """``SimpleCell``."""
    return nonlinearity(torch.nn.functional.linear(hx, w_hh, b_hh).add_(torch.nn.functional.linear(tensor, w_ih, b_ih)))


def _lstm_cell(tensor: Any, hx: Any, w_ih: Any, w_hh: Any, *others: Any) -> tuple[Any, Any]:
    """``lstm_cell`` with its projection, where there is one."""
    *biases, projection = others if len(others) % 2 else (*others, None)
    hidden, cell = lstm_cell(tensor, hx, w_ih, w_hh, *biases)
    return hidden if projection is None else hidden @ projection.t(), cell


_CELLS: dict[int, Kernel] = {
    GRU: gru_cell, TANH: partial(_simple_cell, torch.tanh), RELU: partial(_simple_cell, torch.relu),
}  # fmt: skip


# -- layers without cuDNN ---------------------------------------------------------------


def _by_cells(mode: int, tensor: Any, hx: Any, weights: Any, *options: Any) -> Any:
    """aten/src/ATen/native/RNN.cpp, ``apply_layer_stack``: cell by cell, where cuDNN is switched off. ``lengths``:
    how many sequences each step of a packed input has."""
    num_layers, dropout, train, bidirectional, batch_first, lengths = options
    num_stacks = num_layers * (2 if bidirectional else 1)
    per_stack = len(weights) // num_stacks
    parameters = [weights[i : i + per_stack] for i in range(0, len(weights), per_stack)]
    states = list(zip(*(state.unbind(0) for state in (hx if mode == LSTM else (hx,))), strict=True))
    x, finals = tensor.transpose(0, 1) if batch_first else tensor, []
    for layer in range(num_layers):
        directions: list[Any] = []
        steps = () if lengths else x.unbind(0)
        for stack in range(layer * num_stacks // num_layers, (layer + 1) * num_stacks // num_layers):
            order = range(len(lengths or steps))[:: -1 if directions else 1]
            inputs = (x.narrow(0, sum(lengths[:i]), lengths[i]) if lengths else steps[i] for i in order)
            run = _backwards if directions else _forwards
            out, final = run(partial(_step, mode, parameters[stack]), inputs, states[stack], bool(lengths))
            directions.append(out)
            finals.append(final)
        x = torch.cat(directions, -1) if bidirectional else directions[0]
        if dropout and train and layer < num_layers - 1:
            x = torch.nn.functional.dropout(x, dropout)
    stacked = [torch.stack(parts) for parts in zip(*finals, strict=True)]
    return (x.transpose(0, 1) if batch_first else x), *stacked


def _step(mode: int, parameters: Sequence[Any], tensor: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
    """The next state: the hidden one, and an LSTM's cell."""
    if mode == LSTM:
        return _lstm_cell(tensor, state, *parameters)
    return (_CELLS[mode](tensor, state[0], *parameters),)


def _forwards(step: Kernel, inputs: Iterator[Any], state: tuple[Any, ...], is_packed: bool) -> tuple[Any, Any]:
    """``FullLayer`` and ``PackedLayer``, where the states of sequences that have ended are set aside."""
    outputs, ended = [], []
    for one in inputs:
        if len(one) < len(state[0]):
            ended.append(tuple(part[len(one) :] for part in state))
            state = tuple(part[: len(one)] for part in state)
        state = step(one, state)
        outputs.append(state[0])
    if not is_packed:
        return torch.stack(outputs), state
    return torch.cat(outputs), tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))


def _backwards(step: Kernel, inputs: Iterator[Any], first: tuple[Any, ...], is_packed: bool) -> tuple[Any, Any]:
    """The reverse direction, and ``ReversedPackedLayer``, where sequences join."""
    outputs, state = [], first
    for number, one in enumerate(inputs):
        if number == 0:
            state = tuple(part[: len(one)] for part in first)
        if len(one) > len(state[0]):
            joined = [part[len(kept) : len(one)] for part, kept in zip(first, state, strict=True)]
            state = tuple(torch.cat(parts) for parts in zip(state, joined, strict=True))
        state = step(one, state)
        outputs.append(state[0])
    return (torch.cat if is_packed else torch.stack)(outputs[::-1]), state


def _gates_first(call: Call) -> None:
    call.output(len(call.outputs) - 1)


def _pack(call: Call) -> None:
    """aten/src/ATen/native/PackedSequence.cpp, ``_pack_padded_sequence``: the steps that as many sequences have are
    copied together, then joined; the sizes are the host's."""
    tensor, lengths, batch_first = call.args
    steps = tensor.transpose(0, 1) if batch_first else tensor
    done, ends = 0, [] if lengths.is_meta else lengths.tolist()
    while ends:
        if ends[-1] > done:
            part = steps[done : ends[-1], : len(ends)]
            if not part.is_contiguous():
                call.take_like(part)
            done = ends[-1]
        ends.pop()
    call.output(0)
    call.output(1, 0)


RULES: dict[OpOverload, Rule] = {
    aten._pack_padded_sequence.default: _pack,
    aten._thnn_fused_lstm_cell.default: _gates_first,
    aten._thnn_fused_gru_cell.default: _gates_first,
}
KERNELS: dict[OpOverload, Kernel] = {
    aten._thnn_fused_gru_cell.default: fused_gru_cell,
    aten._thnn_fused_gru_cell_backward.default: fused_gru_cell_backward,
}
