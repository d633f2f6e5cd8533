"""What a worker has learnt and not yet sent, in a method that averages models by a codec with error feedback.

After a sync a worker does not start from the common anchor alone, but also from what its residual will do to the anchor
once it is sent.  So the mean of the workers' models is the anchor of a run without a codec, as long as gradients change
linearly with the model.  If a worker lost its residual, it would learn the same once more, and both would be sent.

What the owner of a stripe has left out of a mean counts as unsent by this worker.  An outer optimizer is linear: of all
that was learnt it makes what it has made of the delivered part, plus what it would make of the unsent part.  The latter
is `effect`.  Each worker computes its own part of it, with a memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.codecs.codec import Codec, CodecState
from paceline.codecs.shares import Shares, followed
from paceline.families.deltas import wide
from paceline.families.sync import SyncResult
from paceline.state import Resize, Slot, per_worker, resize_rule
from paceline.worker.replica import Replica

Outer = Callable[[Slot, Tensor, Tensor, slice, SyncResult], None]
"""`outer(m, anchor, mean, where, sync)` moves `anchor`, the slice `where` of the common start, by the mean delta.

`m` is its memory.  It is linear: for a sum of means it moves by the sum of what it does for each.
"""


@resize_rule("part of a sum", sees_all=True)
def shared_out(values: Sequence[dict[str, Any]], resize: Resize) -> dict[str, Any]:
    """Each new worker gets an equal part of the sum of every tensor.  Its weight follows from its next share."""
    parts: dict[str, Any] = {}
    for name, first in values[0].items():
        parts[name] = []
        if isinstance(first, Tensor):
            parts[name] = (torch.stack([v[name].double() for v in values]).sum(0) / resize.count).to(first)
    return parts


class Unsent:
    """What is in this worker's parameters since the last sync, beside the anchor."""

    def __init__(self, w: Replica, codec: Codec | None, outer: Outer | None, memory: dict[str, Any]) -> None:
        self._offset: Tensor | None = None
        self._outer = outer
        if codec is None or not codec.feedback:
            return
        zero = torch.zeros_like(wide(w.params))
        # The mean of the parameters of workers holds the mean of these, so both follow the same resize rule.
        self._offset = w.state("sync.unsent", rule=per_worker, offset=zero).offset
        # All in units of the mean.  The weight of a part is this worker's share of the mean of the models.
        history: dict[str, Any] = {} if outer is None else {"effect": zero.clone(), "before": zero.clone()}
        self._m = w.state("sync.effect", rule=shared_out, weights=[], **history)
        self._memory = Slot()
        if outer is not None and memory:
            zeros: dict[str, Any] = {name: torch.zeros_like(value) for name, value in memory.items()}
            self._memory = w.state("sync.effect.outer", rule=shared_out, **zeros)

    def take_from(self, delta: Tensor, where: slice) -> None:
        """Subtract it from the slice `where` of this worker's delta: the codec state adds it again."""
        if self._offset is not None:
            delta.sub_(self._offset[where])

    def start(self, anchor: Tensor, where: slice) -> Tensor:
        """Where this worker has started since the last sync; how far it has gone is measured from there."""
        return anchor if self._offset is None else anchor + self._offset[where]

    def is_held(self, where: slice) -> bool:
        """Whether there is anything in the slice `where`."""
        return self._offset is not None and bool(self._offset[where].count_nonzero())

    def put_into(
        self, params: Tensor, where: slice, codec_state: CodecState | None, share: float, sync: SyncResult
    ) -> None:
        """Add it to `params`, the slice `where` after a sync in which this worker had this share of the weights."""
        if self._offset is None:
            return
        offset = self._offset[where]
        unsent = None if codec_state is None else codec_state[where].undelivered(share)
        if unsent is None:  # It is alone, and keeps what it had not sent before the others left.
            if not self.is_held(where):
                return
            if self._outer is None:
                params.add_(offset)
                return
            unsent = self._m.before[where].clone()
        if self._outer is not None:
            change = unsent - self._m.before[where]
            self._m.before[where] = unsent
            unsent = self._m.effect[where]
            self._outer(self._memory, unsent, change, where, sync)
        weights = Shares(self._m.weights)
        offset.zero_()
        for first, stop, weight in weights.over(where.start, where.stop):
            if share:
                weight = followed(weight, share)
                weights.put(first, stop, weight)
            if weight:
                part = slice(first - where.start, stop - where.start)
                torch.div(unsent[part], weight, out=offset[part])
        params.add_(offset)

    def forget(self, where: slice) -> bool:
        """At the end of a run all workers have the anchor; whether this one had anything beside it."""
        if self._offset is None:
            return False
        had_any = self.is_held(where)
        kept = [self._offset, *(v for slot in (self._m, self._memory) for v in vars(slot).values())]
        for vector in kept:
            if isinstance(vector, Tensor):
                vector[where] = 0.0
        return had_any
