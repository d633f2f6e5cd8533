"""What would fail in the first step of a run, found before it: one forward pass of the first minibatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.errors import MISTAKES, callers_traceback, shown_traceback
from paceline.settings.decode import SettingsError
from paceline.settings.recipe import Recipe
from paceline.task import Task


def check_first_step(recipe: Recipe, task: Task) -> None:
    """Refuse a model and a loss that do not take the data, and a loss that is NaN or infinite from the start."""
    settings = recipe.settings
    batch = task.part(0, 0, recipe.workers)
    batch = tuple(t[: -(-len(t) // task.accumulate)] for t in batch)
    if not len(batch[0]):
        return
    given = f"loss.name = '{settings.loss.name}'"
    with torch.random.fork_rng(devices=[]):
        model = task.build()
        try:
            loss: Any = task.loss(model, batch)
        except Exception as error:
            raise _failed(recipe, batch, error) from None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.80}"
        raise SettingsError(f"{given}: it returned {what}; it must return a tensor with one number, the mean loss")
    if not loss.isfinite() and settings.processes.nonfinite != "pass":
        raise SettingsError(
            f"{given}: the loss of the first minibatch is {loss.item()}, before anything was trained; look for NaN in "
            "the data, the model or the loss (processes.nonfinite = 'pass' trains all the same)"
        )


def _failed(recipe: Recipe, batch: tuple[Tensor, ...], error: Exception) -> SettingsError:
    settings = recipe.settings
    if isinstance(error, MISTAKES) and not shown_traceback(error):  # It is of ours.
        return SettingsError(str(error))
    shapes = " and ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in batch)
    failed = SettingsError(
        f"model.name = '{settings.model.name}' and loss.name = '{settings.loss.name}' fail on the first minibatch, "
        f"tensors of {shapes}: {type(error).__name__}: {error}"
    )
    failed.report = callers_traceback(error)
    return failed
