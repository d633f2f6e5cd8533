"""BackwardWatch: notices that backward passes have run, also if the strategy takes no part in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class BackwardWatch:
    """Says whether a backward pass has run since the last question.

    It has a hook on every parameter, until `remove`.  After that other hooks must call `note`.
    """

    def __init__(self, parameters: Sequence[Tensor], *, is_paused: Callable[[], bool], counts: bool = False) -> None:
        self.has_completed = False  # Whether any pass has run that was to be followed by a step.
        self.passes = 0  # If they are counted: those since the last step.
        self._counts = counts
        self._pass = -1
        self._is_paused = is_paused
        self._has_run = False
        self._handles = [p.register_post_accumulate_grad_hook(self.note) for p in parameters]

    def note(self, _: Tensor | None = None) -> None:
        """A backward pass is running."""
        self._has_run = True
        if not self.has_completed:
            self.has_completed = not self._is_paused()
        if self._counts and not self._is_paused():
            number = torch._C._current_graph_task_id()  # pyright: ignore  # torch numbers its backward passes.
            self.passes += number != self._pass
            self._pass = number

    @property
    def is_active(self) -> bool:
        """Whether it has hooks of its own."""
        return bool(self._handles)

    def take(self) -> bool:
        """Whether a pass has run since the last call."""
        has_run = self._has_run
        self._has_run = False
        return has_run

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
