"""What a worker has learnt and not yet sent, in a method that averages models by a codec with error feedback.

After a sync a worker starts from the common anchor plus its own residual, not from the anchor alone.  If it lost the
residual, it would learn the same once more: the next delta would hold it a second time, beside the residual.  With one
bit per value that is most of a delta, and an outer optimizer with momentum amplifies it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codecs.codec import Codec, CodecState
from paceline.families.deltas import wide
from paceline.state import per_worker
from paceline.worker.replica import Replica


class Unsent:
    """The residual that is part of this worker's parameters since the last sync."""

    def __init__(self, w: Replica, codec: Codec | None) -> None:
        self._offset: Tensor | None = None
        if codec is not None and codec.feedback:
            # The mean of the parameters of workers holds the mean of these, so both follow the same resize rule.
            self._offset = w.state("sync.unsent", rule=per_worker, offset=torch.zeros_like(wide(w.params))).offset

    def take_from(self, delta: Tensor, where: slice) -> None:
        """Subtract it from the slice `where` of this worker's delta: the codec state adds it again."""
        if self._offset is not None:
            delta.sub_(self._offset[where])

    def put_into(self, params: Tensor, where: slice, codec_state: CodecState | None, *, goes_on: bool) -> None:
        """Add the residual to `params`, the slice `where` after a sync; at the end of a run all workers are equal."""
        if self._offset is None:
            return
        residual = None if codec_state is None else codec_state[where].unsent()
        offset = self._offset[where]
        if residual is None or not goes_on:
            offset.zero_()
        else:
            params.add_(offset.copy_(residual))

    def give_up(self, params: Tensor, anchor: Tensor, where: slice) -> None:
        """At the end of a run that did not know its last sync: all workers take the anchor."""
        if self._offset is not None and self._offset[where].count_nonzero():
            params[where] = anchor[where]
            self._offset[where] = 0.0
