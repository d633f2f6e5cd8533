"""A model's buffers (such as BatchNorm's statistics and counters) as one vector, and their mean over workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def read_buffers(model: nn.Module) -> Tensor:
    """The buffers as one float64 vector."""
    found = [b.detach().reshape(-1).to("cpu", torch.float64) for b in _statistics(model)]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.float64)


def set_buffers(
    model: nn.Module, from_workers: Sequence[Tensor], weights: Sequence[float], since: Tensor | None = None
) -> None:
    """Set the buffers to the weighted mean of several workers' `read_buffers`, and integer ones to the largest value.

    A value that is equal on all workers, such as a mask of infinities, is left as it is.  Values that are not finite
    are left out of the mean.  `since` holds this worker's buffers at the time when they were collected: their change
    since then is added to the mean.
    """
    if not from_workers[0].numel():
        return
    values = torch.stack(list(from_workers))
    shares = torch.tensor(weights, dtype=torch.float64).unsqueeze(1) * values.isfinite()
    mean = values.nan_to_num(0.0, 0.0, 0.0).mul_(shares).sum(0) / shares.sum(0)
    largest = values.amax(0)
    differs = (values != values[0]).any(0) & (shares.sum(0) > 0)
    if since is not None:
        now = read_buffers(model)
        mean = carry_over(mean, now, since)
        largest = largest + (now - since).nan_to_num(0.0, 0.0, 0.0)
        differs |= now != since
    start = 0
    for b in _statistics(model):
        where = slice(start, start + b.numel())
        chosen = (mean if b.dtype.is_floating_point else largest)[where].view(b.shape)
        b.copy_(torch.where(differs[where].view(b.shape).to(b.device), chosen.to(b), b))
        start += b.numel()


def _statistics(model: nn.Module) -> list[Tensor]:
    """The buffers to average: all but boolean ones, complex ones, and those not saved with the model."""
    found = {
        id(b): b
        for module in model.modules()
        for name, b in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        and not b.dtype.is_complex
        and b.dtype != torch.bool
    }
    return list(found.values())


def carry_over(mean: Tensor, now: Tensor, sent: Tensor) -> Tensor:
    """The mean of the values that were sent, plus the change since then, kept between `mean` and `now`.

    Without these limits a value that decays, such as a variance, could become negative.
    """
    return torch.minimum(torch.maximum(mean + (now - sent), torch.minimum(mean, now)), torch.maximum(mean, now))
