"""The model that forked workers of `train` return to the process that called it, through files of their own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from paceline.errors import ClusterError
from paceline.worker.tensors import named_tensors


def return_model(model: nn.Module, folder: Path, rank: int) -> None:
    """Write parameters and buffers one after the other, as their memory has them."""
    with (folder / f"model-{rank}").open("wb") as file:
        for _, values in named_tensors(model):
            file.write(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def take_model(model: nn.Module, folder: Path, *, silent_s: float) -> None:
    """Take the parameters and buffers of the first rank that took part until the end."""
    returned = sorted(folder.glob("model-*"), key=lambda path: int(path.name.removeprefix("model-")))
    if not returned:
        raise ClusterError(
            f"no worker took part until the end: others declared each of them dead, since it was silent for "
            f"{silent_s:g} s; workers that are stopped or cut off for longer need a larger train(silent_s=...)"
        )
    with returned[0].open("rb") as file:
        for _, values in named_tensors(model):
            values.copy_(torch.frombuffer(bytearray(file.read(values.nbytes)), dtype=values.dtype).view(values.shape))
