"""A sync of an averaging method: what each worker sends, what is in flight, and what all workers then know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import ClusterError

COMMON_SCHEDULE = "Let all ranks schedule by the same numbers, such as the step or the mean loss of all ranks"


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What all workers know after a sync."""

    step: int  # The step after which it was.
    steps: int  # Since the last sync.
    samples: float  # Of all workers, since the last sync.
    workers: int
    lr: float
    divergence: float  # The mean squared distance of the replicas from their mean.
    loss: float | None  # The mean over workers and steps since the last sync.
    time: float  # On the first worker's clock.


class SyncStats(NamedTuple):
    """The numbers that each worker sends to all others in a sync, as float64."""

    weight: float  # Samples since the last sync; 0 if its parameters do not count.
    loss_sum: float
    loss_steps: float
    time: float
    squared_distance: float  # Of this worker's delta from the mean delta.
    state_vectors: float  # How many vectors of optimizer state it averages.
    lr: float
    has_data: float  # Whether it has data for this step; otherwise it may no longer follow its schedule.

    def packed(self, buffers: Tensor) -> Tensor:
        return torch.cat([torch.tensor(self, dtype=torch.float64), buffers])

    @classmethod
    def unpacked(cls, message: Tensor) -> tuple[SyncStats, Tensor]:
        count = len(cls._fields)
        return cls(*message[:count].tolist()), message[count:]


@dataclass
class PendingSync:
    """A sync in flight: what this worker sent and, once it is complete, what came back."""

    fragment: int
    step: int
    steps: int
    samples: float
    vector: Tensor  # This worker's delta; the exchange replaces it by the mean of all deltas.
    snapshot: Tensor | None = None  # With a delay: the parameters at the start,
    buffers: Tensor | None = None  # and the buffers.
    state_names: Sequence[str] = ()  # With optimizer_state="average": the names of the optimizer's vectors,
    state: Tensor | None = None  # these vectors one behind the other,
    state_mean: Tensor | None = None  # and their mean.
    is_lost: bool = False  # This worker's parameters were not finite and did not count.
    going_on: float = 0.0  # How many workers have more data.
    weight: float = 0.0  # The samples behind the mean, of all workers.
    bad: str = ""  # The rank whose values could not be sent, if any;
    complaint: str = ""  # the reason, if it was this worker's.
    replies: Sequence[Tensor] = ()  # Each worker's packed SyncStats and buffers.

    def result(self) -> SyncResult:
        """Sum what all workers sent, in the order of ranks in plain Python: the same bits on every machine."""
        stats = [SyncStats.unpacked(reply)[0] for reply in self.replies]
        weight = sum(s.weight for s in stats)
        losses = sum(s.loss_sum for s in stats)
        steps = sum(s.loss_steps for s in stats)
        return SyncResult(
            step=self.step,
            steps=self.steps,
            samples=weight,
            workers=len(stats),
            lr=max(s.lr for s in stats if s.weight),  # A worker without data may no longer follow its schedule.
            divergence=sum(s.weight * s.squared_distance for s in stats) / weight,
            loss=losses / steps if steps else None,
            time=stats[0].time,
        )

    def check_rates(self, ranks: Sequence[int]) -> None:
        """Raise the same error on every rank if two of them have trained with different learning rates."""
        stats = [SyncStats.unpacked(reply)[0] for reply in self.replies]
        if len(stats) != len(ranks):  # The sync of a saved run, which had another number of workers.
            ranks = range(len(stats))
        rates = [(rank, s.lr) for rank, s in zip(ranks, stats, strict=True) if s.has_data]
        for rank, lr in rates:
            first, common = rates[0]
            if not isclose(lr, common, rel_tol=1e-9):  # Processors may round a schedule differently.
                raise ClusterError(
                    f"the optimizer's lr is {common:.6g} on rank {first} and {lr:.6g} on rank {rank}, in the sync "
                    f"after step {self.step}: their steps differ, and the mean of their models is that of neither "
                    f"rate.  {COMMON_SCHEDULE}"
                )

    def share(self, workers: int) -> float:
        """This worker's share of the mean; of a resumed sync, which had other workers, an equal part of their share."""
        return 0.0 if self.is_lost else self.samples / self.weight * (len(self.replies) / workers)

    def saved(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def restored(cls, saved: dict[str, Any], device: torch.device) -> PendingSync:
        pending = cls(**saved)
        for name in ("vector", "snapshot", "state", "state_mean"):
            if (value := getattr(pending, name)) is not None:
                setattr(pending, name, value.to(device))
        return pending
