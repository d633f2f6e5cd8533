"""BucketHooks: hands out the buckets of a gradient while backward runs, in the same order on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from paceline.worker.flat import Bucket, FlatModel

Each = Callable[[Bucket], None]
"""Receives one bucket after the other."""


class BucketHooks:
    """Watches a model's backward passes and hands out each bucket as soon as it and all buckets before it are full.

    At the start of a pass `opens` returns the receiver of the buckets, or None for a pass that only adds to the
    gradients.  `closes` is called at the end of a pass whose buckets were handed out.  Each gradient moves from `.grad`
    to the flat vector, and `.grad` becomes a view of that vector.  If a whole model is compiled by `torch.compile`, all
    hooks run at the end of backward; compile its blocks instead to keep the overlap.  The `.grad` of a narrower
    parameter than the vector stays in its own memory.
    """

    def __init__(self, flat: FlatModel, opens: Callable[[], Each | None], closes: Callable[[], None]) -> None:
        self.flat = flat
        self._opens = opens
        self._closes = closes
        self._each: Each | None = None
        self._pass = -1
        self._full = [False] * len(flat.parameters)
        self._missing: list[int] = []  # Of each bucket, how many of its parameters have no gradient yet.
        self._next = 0
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._fill, i)) for i, p in enumerate(flat.parameters)
        ]

    def _fill(self, index: int, _: Tensor) -> None:
        # torch numbers its backward passes.  A pass that raised an error has no end, so a new number begins a new pass.
        number = torch._C._current_graph_task_id()  # pyright: ignore
        if number != self._pass:
            self._pass = number
            self._begin()
        if self._each is None:
            return
        self.flat.collect(index)
        if index not in self.flat.narrow:
            self.flat.expose(index)
        if not self._full[index]:  # A parameter that is used twice is filled only once.
            self._full[index] = True
            self._missing[self.flat.bucket_of[index].index] -= 1
            self._hand_out(self._each)

    def _begin(self) -> None:
        self._each = None
        self._each = self._opens()
        # torch has no public callback for the end of backward; its own data-parallel wrappers use this one.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)  # pyright: ignore
        self._full = [False] * len(self._full)
        self._missing = [len(b.parameters) for b in self.flat.buckets]
        self._next = 0

    def _hand_out(self, each: Each) -> None:
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._next += 1
            each(self.flat.buckets[self._next - 1])

    def _end(self) -> None:
        each, self._each = self._each, None
        if each is None:
            return
        for i, full in enumerate(self._full):
            if not full:  # Backward did not reach it: its gradient is zero, or the sum of earlier passes.
                self.flat.collect(i)
                if self.flat.reached[i] and i not in self.flat.narrow:
                    self.flat.expose(i)
        self._missing = [0] * len(self._missing)
        self._hand_out(each)
        self._closes()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
