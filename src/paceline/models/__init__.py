"""Models by name, for settings files and examples.  Each is a function of the shape of a sample and of the classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import nn

from paceline.checked import checked


def perceptron(shape: Sequence[int], classes: int, *, hidden: Sequence[int] = (128, 64)) -> nn.Module:
    """Fully connected layers with ReLU between them.

    >>> sum(p.numel() for p in perceptron([28, 28], 10).parameters())
    109386
    """
    hidden = checked("perceptron", "hidden", hidden, Sequence[int])
    if any(width < 1 for width in hidden):
        raise ValueError(f"perceptron(hidden={list(hidden)}): a layer has at least 1 unit")
    widths = [prod(shape), *hidden, classes]
    layers: list[nn.Module] = [nn.Flatten()]
    for i in range(len(widths) - 1):
        layers += [nn.ReLU()] * (i > 0) + [nn.Linear(widths[i], widths[i + 1])]
    return nn.Sequential(*layers)


def convnet(shape: Sequence[int], classes: int, *, channels: Sequence[int] = (16, 32)) -> nn.Module:
    """Blocks of a 3x3 convolution, ReLU and 2x2 max pooling, then one linear layer.

    Images without a dimension of channels have one channel.

    >>> sum(p.numel() for p in convnet([28, 28], 10).parameters())
    20490
    """
    channels = checked("convnet", "channels", channels, Sequence[int])
    planes, height, width = (1, *shape) if len(shape) == 2 else shape if len(shape) == 3 else (0, 0, 0)
    for _ in channels:
        height, width = height // 2, width // 2
    if not planes or not height or not width or any(count < 1 for count in channels):
        raise ValueError(
            f"convnet(channels={list(channels)}) for samples of shape {list(shape)}: it takes images of 2 or 3 "
            "dimensions, which every block makes half as high and wide"
        )
    layers: list[nn.Module] = [nn.Unflatten(1, (1, shape[0]))] if len(shape) == 2 else []
    for before, after in zip((planes, *channels), channels, strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * height * width, classes))


MODELS: dict[str, Callable[..., Any]] = {"perceptron": perceptron, "convnet": convnet}
