"""The mean of the workers' buffers (BatchNorm's statistics) at the end of an asynchronous run.

Its workers may join, leave and die, so they cannot meet in a collective.  They all wait for the end of the run, though.
Each writes its buffers to the job's store before that, and reads those of all others after it.
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

PATIENCE = timedelta(seconds=10)  # For the other workers; the store may be a part of this process.


class OwnBuffers(RuntimeWarning):
    """A worker could not read the buffers of the others, and kept its own."""


class SharedBuffers:
    """One worker's part in the mean.  A worker that replaces a dead one has its `rank`, from 0 to `workers` - 1."""

    def __init__(self, store: Store, replica: Replica, rank: int, workers: int) -> None:
        self._store = store
        self._replica = replica
        self._rank = rank
        self._workers = workers
        self._is_published = False
        replica.cursor.on_end = self._publish

    def _publish(self) -> None:
        """Write this worker's buffers and the number of its samples."""
        values = self._replica.learner.flat.buffers()
        text = base64.b64encode(values.numpy().tobytes()).decode()
        self._store.set(f"buffers/{self._rank}", json.dumps([self._replica.batch.total, text]))
        self._is_published = True

    def take_mean(self) -> None:
        """Take the mean of all workers' buffers, weighted by samples; after the end of the run."""
        flat = self._replica.learner.flat
        if not flat.buffers().numel():
            return
        try:
            if not self._is_published:
                self._publish()
            ranks = self._published_ranks()
            found = [_read(self._store, rank) for rank in ranks]
        except RuntimeError as error:  # The process that serves the store has ended.
            text = f"rank {self._rank} kept its own buffers (such as BatchNorm's statistics): {error}"
            warnings.warn(OwnBuffers(text), stacklevel=3)
            return
        if any(weight for weight, _ in found):
            flat.set_buffers([values for _, values in found], [weight for weight, _ in found])
        self._wait_for_readers(ranks)

    def _published_ranks(self) -> list[int]:
        """The ranks whose buffers are there.  Of a worker that died, and was not replaced, they never will be."""
        keys = [f"buffers/{rank}" for rank in range(self._workers)]
        if not self._store.check(keys):
            with suppress(RuntimeError):
                self._store.wait(keys, PATIENCE)
        return [rank for rank, key in enumerate(keys) if self._store.check([key])]

    def _wait_for_readers(self, ranks: Sequence[int]) -> None:
        with suppress(RuntimeError):  # A worker has died meanwhile, or the store has ended.
            self._store.set(f"buffers/read/{self._rank}", "")
            self._store.wait([f"buffers/read/{rank}" for rank in ranks], PATIENCE)


def _read(store: Store, rank: int) -> tuple[float, Tensor]:
    weight, text = json.loads(store.get(f"buffers/{rank}"))
    return weight, torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.float64).copy())
