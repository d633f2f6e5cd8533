"""Buckets handed out while backward runs, in one order on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from paceline.worker.flat import Bucket, FlatModel

Each = Callable[[Bucket], None]


class BucketHooks:
    """Watches a model's backward passes and hands out each bucket as soon as it and all before it are full.

    At the start of a pass `opens` says who gets its buckets (None: nobody, the pass only adds to the gradients); `closes` is
    called at the end of one whose buckets were handed out.  Gradients leave `.grad` for the flat vector as they come, and
    `.grad` becomes a view of it.  Under `torch.compile` of a whole model all hooks fire at the end of backward: compile its
    blocks instead to keep the overlap.
    """

    def __init__(self, flat: FlatModel, opens: Callable[[], Each | None], closes: Callable[[], None]) -> None:
        self.flat = flat
        self._opens, self._closes = opens, closes
        self._each: Each | None = None
        self._pass = -1
        self._full = [False] * len(flat.parameters)
        self._missing: list[int] = []
        self._next = 0
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._filled, i)) for i, p in enumerate(flat.parameters)
        ]

    def _filled(self, index: int, _: Tensor) -> None:
        # torch numbers its backward passes; one that raised never came to its end, and the next one must not be taken for it.
        number = torch._C._current_graph_task_id()  # pyright: ignore
        if number != self._pass:
            self._pass = number
            self._begin()
        if self._each is None:
            return
        self.flat.collect(index)
        self.flat.expose(index)
        if not self._full[index]:  # A parameter that is used twice is still filled only once.
            self._full[index] = True
            self._missing[self.flat.bucket_of[index].index] -= 1
            self._hand_out(self._each)

    def _begin(self) -> None:
        self._each = None
        self._each = self._opens()
        # torch offers no public way to be told of backward's end; its own data-parallel wrappers use this one.
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
            if not full:  # Backward did not reach it: zero, or what earlier passes added up.
                self.flat.collect(i)
                self.flat.expose(i)
        self._missing = [0] * len(self._missing)
        self._hand_out(each)
        self._closes()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
