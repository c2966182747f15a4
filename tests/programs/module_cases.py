"""Small programs for "cuda", one for each kind of module: two training steps and an evaluation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.programs.operator_cases import Case, module

IMAGES, SEQUENCE = (4, 16, 32, 32), (8, 64, 128)
HALF, BRAIN = torch.float16, torch.bfloat16


class First(nn.Module):
    """The first output of a module that is called with its input as every argument."""

    def __init__(self, inner: nn.Module, num_inputs: int = 1, **options: Any) -> None:
        super().__init__()
        self.inner, self.num_inputs, self.options = inner, num_inputs, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(*[x] * self.num_inputs, **self.options)
        return out[0] if isinstance(out, tuple) else out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 512), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(512, 10))


def residual() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(128), mlp_to(128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.fc(self.norm(x))

    return nn.Sequential(Block(), Block())


def mlp_to(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def causal_mask(length: int) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length, device="cuda")


class Masked(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, causal_mask(x.shape[1]))


MODULES: dict[str, Case] = {
    "mlp": module(mlp, (64, 128)),
    "mlp_bf16": module(mlp, (64, 128), dtype=BRAIN),
    "mlp_amp": module(mlp, (64, 128), amp=HALF),
    "residual": module(residual, SEQUENCE),
    "residual_amp": module(residual, SEQUENCE, amp=BRAIN),
    "bilinear_module": module(lambda: First(nn.Bilinear(128, 128, 8), 2), (64, 128)),
    # normalisations
    "batch_norm1d": module(lambda: nn.BatchNorm1d(128), (64, 128)),
    "batch_norm1d_sequence": module(lambda: nn.BatchNorm1d(64), SEQUENCE),
    "batch_norm2d": module(lambda: nn.BatchNorm2d(16), IMAGES),
    "batch_norm2d_bf16": module(lambda: nn.BatchNorm2d(16), IMAGES, dtype=BRAIN),
    "batch_norm2d_half": module(lambda: nn.BatchNorm2d(16), IMAGES, dtype=HALF),
    "batch_norm2d_amp": module(lambda: nn.BatchNorm2d(16), IMAGES, amp=HALF),
    "batch_norm2d_plain": module(lambda: nn.BatchNorm2d(16, affine=False, track_running_stats=False), IMAGES),
    "batch_norm2d_channels_last": module(lambda: nn.BatchNorm2d(16), IMAGES, channels_last=True),
    "batch_norm3d": module(lambda: nn.BatchNorm3d(4), (2, 4, 8, 8, 8)),
    "group_norm": module(lambda: nn.GroupNorm(4, 16), IMAGES),
    "group_norm_amp": module(lambda: nn.GroupNorm(4, 16), IMAGES, amp=HALF),
    "instance_norm2d": module(lambda: nn.InstanceNorm2d(16), IMAGES),
    "instance_norm2d_affine": module(lambda: nn.InstanceNorm2d(16, affine=True), IMAGES),
    "layer_norm": module(lambda: nn.LayerNorm(128), SEQUENCE),
    "layer_norm_amp": module(lambda: nn.LayerNorm(128), SEQUENCE, amp=BRAIN),
    "layer_norm_bf16": module(lambda: nn.LayerNorm(128), SEQUENCE, dtype=BRAIN),
    "rms_norm": module(lambda: nn.RMSNorm(128), SEQUENCE),
    "rms_norm_bf16": module(lambda: nn.RMSNorm(128), SEQUENCE, dtype=BRAIN),
    "local_response_norm": module(lambda: nn.LocalResponseNorm(3), IMAGES),
    # convolutions
    "conv1d": module(lambda: nn.Conv1d(64, 32, 3), SEQUENCE),
    "conv2d": module(lambda: nn.Conv2d(16, 32, 3, padding=1), IMAGES),
    "conv2d_no_bias": module(lambda: nn.Conv2d(16, 32, 3, bias=False), IMAGES),
    "conv2d_same": module(lambda: nn.Conv2d(16, 32, 4, padding="same"), IMAGES),
    "conv2d_reflect": module(lambda: nn.Conv2d(16, 32, 3, padding=1, padding_mode="reflect"), IMAGES),
    "conv2d_pointwise": module(lambda: nn.Conv2d(16, 32, 1), IMAGES),
    "conv2d_strided": module(lambda: nn.Conv2d(16, 32, 3, stride=2), IMAGES),
    "conv2d_grouped": module(lambda: nn.Conv2d(16, 32, 3, groups=4), IMAGES),
    "conv2d_depthwise": module(lambda: nn.Conv2d(16, 16, 3, groups=16), IMAGES),
    "conv2d_depthwise_half": module(lambda: nn.Conv2d(16, 16, 3, groups=16), IMAGES, dtype=HALF),
    "conv2d_half": module(lambda: nn.Conv2d(16, 32, 3), IMAGES, dtype=HALF),
    "conv2d_bf16": module(lambda: nn.Conv2d(16, 32, 3), IMAGES, dtype=BRAIN),
    "conv2d_amp": module(lambda: nn.Conv2d(16, 32, 3), IMAGES, amp=HALF),
    "conv2d_channels_last": module(lambda: nn.Conv2d(16, 32, 3), IMAGES, channels_last=True),
    "conv2d_channels_last_amp": module(lambda: nn.Conv2d(16, 32, 3), IMAGES, channels_last=True, amp=HALF),
    "conv3d": module(lambda: nn.Conv3d(4, 8, 3), (2, 4, 8, 8, 8)),
    "conv_transpose1d": module(lambda: nn.ConvTranspose1d(64, 32, 3), SEQUENCE),
    "conv_transpose2d": module(lambda: nn.ConvTranspose2d(16, 32, 2, stride=2), IMAGES),
    "conv_transpose2d_channels_last": module(
        lambda: nn.ConvTranspose2d(16, 32, 2, stride=2), IMAGES, channels_last=True),
    "conv_stack": module(convolutional, IMAGES),
    "conv_stack_amp": module(convolutional, IMAGES, amp=HALF),
    "conv_stack_channels_last": module(convolutional, IMAGES, channels_last=True),
    # attention and transformers
    "attention_module": module(lambda: First(nn.MultiheadAttention(128, 4, batch_first=True), 3), SEQUENCE),
    "attention_module_weightless": module(
        lambda: First(nn.MultiheadAttention(128, 4, batch_first=True), 3, need_weights=False), SEQUENCE),
    "attention_module_bf16": module(
        lambda: First(nn.MultiheadAttention(128, 4, batch_first=True), 3, need_weights=False), SEQUENCE, dtype=BRAIN),
    "encoder_layer": module(lambda: nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), SEQUENCE),
    "encoder_layer_gelu": module(
        lambda: nn.TransformerEncoderLayer(128, 4, 256, activation="gelu", norm_first=True, batch_first=True),
        SEQUENCE),
    "encoder": module(lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), 2, enable_nested_tensor=False), SEQUENCE),
    "encoder_amp": module(lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), 2, enable_nested_tensor=False), SEQUENCE, amp=BRAIN),
    "encoder_masked": module(lambda: Masked(nn.TransformerEncoder(
        nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), 2, enable_nested_tensor=False)), SEQUENCE),
    "transformer": module(lambda: First(nn.Transformer(128, 4, 2, 2, 256, batch_first=True), 2), SEQUENCE),
    # recurrent
    "rnn": module(lambda: First(nn.RNN(128, 64, batch_first=True)), SEQUENCE),
    "lstm": module(lambda: First(nn.LSTM(128, 64, batch_first=True)), SEQUENCE),
    "lstm_deep": module(
        lambda: First(nn.LSTM(128, 64, 2, dropout=0.1, bidirectional=True, batch_first=True)), SEQUENCE),
    "lstm_amp": module(lambda: First(nn.LSTM(128, 64, 2, batch_first=True)), SEQUENCE, amp=HALF),
    "gru": module(lambda: First(nn.GRU(128, 64, 2)), SEQUENCE),
    "lstm_cell": module(lambda: First(nn.LSTMCell(128, 64)), (8, 128)),
    "gru_cell": module(lambda: First(nn.GRUCell(128, 64)), (8, 128)),
    "rnn_cell": module(lambda: First(nn.RNNCell(128, 64)), (8, 128)),
    # wrappers
    "weight_norm": module(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(128, 64)), (64, 128)),
    "spectral_norm": module(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(128, 64)), (64, 128)),
    "data_parallel": module(lambda: nn.DataParallel(mlp()), (64, 128)),
}  # fmt: skip
