"""The model that a forked worker of `train` returns to the process that called it, through a file of their own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from paceline.worker.tensors import named_tensors


def write_model(model: nn.Module, path: Path) -> None:
    """Parameters and buffers one after the other, as their memory has them."""
    with path.open("wb") as file:
        for _, values in named_tensors(model):
            file.write(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def read_model(model: nn.Module, path: Path) -> None:
    """Take the parameters and buffers that `write_model` wrote."""
    with path.open("rb") as file:
        for _, values in named_tensors(model):
            values.copy_(torch.frombuffer(bytearray(file.read(values.nbytes)), dtype=values.dtype).view(values.shape))
