"""The tensors that a model starts from."""

from __future__ import annotations

from torch import Tensor, nn


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters, frozen ones too, and all buffers, by name."""
    return [(n, t.detach()) for n, t in (*model.named_parameters(), *model.named_buffers())]
