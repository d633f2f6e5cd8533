"""The mean of the workers' buffers (BatchNorm's statistics) at the end of a session without collectives.

Workers that may join, leave and die cannot meet in a collective.  They all wait for the end of the run, though.  Each
writes its buffers to the job's store before that, and reads those of all others after it.
"""

from __future__ import annotations

import base64
import json
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store

from paceline.worker.replica import Replica

PATIENCE = timedelta(seconds=10)  # For the other workers' reading; the store may be a part of this process.


class OwnBuffers(RuntimeWarning):
    """A worker could not read the buffers of the others, and kept its own."""


class SharedBuffers:
    """One worker's part in the mean."""

    def __init__(self, store: Store, replica: Replica) -> None:
        self._store = store
        self._replica = replica
        self._rank = replica.endpoint.rank

    def publish(self) -> None:
        """Write this worker's buffers and the number of its samples; before the end of the run."""
        values = self._replica.learner.flat.buffers()
        text = base64.b64encode(values.numpy().tobytes()).decode()
        self._store.set(f"buffers/{self._rank}", json.dumps([self._replica.batch.total, text]))

    def take_mean(self) -> None:
        """Take the mean of all workers' buffers, weighted by samples; after the end of the run."""
        flat = self._replica.learner.flat
        if not flat.buffers().numel():
            return
        try:
            ranks = [r for r in self._replica.endpoint.members_ever() if self._store.check([f"buffers/{r}"])]
            found = [_read(self._store, rank) for rank in ranks]
        except RuntimeError as error:  # The process that serves the store has ended.
            text = f"rank {self._rank} kept its own buffers (such as BatchNorm's statistics): {error}"
            warnings.warn(OwnBuffers(text), stacklevel=3)
            return
        if any(weight for weight, _ in found):
            flat.set_buffers([values for _, values in found], [weight for weight, _ in found])
        self._wait_for_readers(ranks)

    def _wait_for_readers(self, ranks: Sequence[int]) -> None:
        with suppress(RuntimeError):  # A worker has died meanwhile, or the store has ended.
            self._store.set(f"buffers/read/{self._rank}", "")
            self._store.wait([f"buffers/read/{rank}" for rank in ranks], PATIENCE)


def _read(store: Store, rank: int) -> tuple[float, Tensor]:
    weight, text = json.loads(store.get(f"buffers/{rank}"))
    return weight, torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.float64).copy())
