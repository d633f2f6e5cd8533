"""A task's data: one data set that all workers share out, or a data set of each worker's own.

Either way the order of samples follows from the seed alone, so runs with different strategies see the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.stripes import stripe_of
from paceline.training.timetable import Place

Batch = tuple[Tensor, ...]
DataOfWorker = Callable[[int, int], Sequence[Tensor]]
"""`data(rank, workers)` gives the tensors that one of so many workers holds."""


def check_lengths(data: Sequence[Tensor], call: str) -> None:
    """Raise if these are no tensors of one length above 0."""
    if not len(data) or not all(isinstance(t, Tensor) and t.dim() for t in data):  # pyright: ignore
        found = ", ".join(f"{type(t).__name__} of shape {list(getattr(t, 'shape', []))}" for t in data)
        raise ValueError(f"{call}: the data is [{found}]; it needs at least one tensor, and samples along dimension 0")
    sizes = [len(t) for t in data]
    if len(set(sizes)) != 1 or not sizes[0]:
        raise ValueError(f"{call}: the data has the lengths {sizes}; it needs equally long, non-empty tensors")


def shuffled(samples: int, seed: int) -> Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed))


def order_of(samples: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch shows the samples."""
    return shuffled(samples, seed * 1_000_003 + epoch)


class GlobalData:
    """One data set.  Every global minibatch is cut into one part a worker."""

    def __init__(self, data: Sequence[Tensor], batch: object, seed: int) -> None:
        check_lengths(data, f"Task(batch={batch})")
        self.data = data
        self.seed = seed
        self._orders: dict[int, Tensor] = {}  # The order of the samples, of the epoch that was read last.

    @property
    def samples(self) -> int:
        return len(self.data[0])

    def part(self, place: Place, rank: int, workers: int) -> Batch:
        """Worker `rank`'s part of the global minibatch at that place; it may be empty."""
        epoch, first, size = place
        if epoch not in self._orders:
            self._orders.clear()
            self._orders[epoch] = order_of(self.samples, self.seed, epoch)
        indices = self._orders[epoch][first : first + size]
        mine = indices[stripe_of(rank, len(indices), workers)]
        return tuple(t[mine] for t in self.data)


class OwnData:
    """A data set of each worker's own.

    A step takes each worker's share of `batch` from that worker's data, in epochs of its own: a worker with less data
    sees it more often."""

    def __init__(self, data_of: DataOfWorker, batch: int, seed: int) -> None:
        self.data_of = data_of
        self.batch = batch
        self.seed = seed
        self._data: dict[tuple[int, int], Sequence[Tensor]] = {}
        self._orders: dict[tuple[int, int, int], Tensor] = {}  # By rank, workers and epoch.

    def part(self, step: int, rank: int, workers: int) -> Batch:
        """Worker `rank`'s own minibatch for that step; empty if there are more workers than samples in a batch."""
        data = self._own(rank, workers)
        share = stripe_of(rank, self.batch, workers)
        size = share.stop - share.start
        first = step * size
        samples = len(data[0])
        places = torch.arange(first, first + size)
        mine = torch.cat(
            [
                self._order(rank, workers, epoch, samples)[places[places // samples == epoch] % samples]
                for epoch in _epochs(places, samples)
            ]
            or [places]
        )
        return tuple(t[mine] for t in data)

    def _own(self, rank: int, workers: int) -> Sequence[Tensor]:
        if (rank, workers) not in self._data:
            data = self.data_of(rank, workers)
            check_lengths(data, f"Task(data of worker {rank} of {workers})")
            self._data[rank, workers] = data
        return self._data[rank, workers]

    def _order(self, rank: int, workers: int, epoch: int, samples: int) -> Tensor:
        if (rank, workers, epoch) not in self._orders:
            self._orders = {
                key: order
                for key, order in self._orders.items()
                if key[1] == workers and (key[0] != rank or key[2] >= epoch - 1)
            }
            seed = (self.seed * 1_000_003 + epoch) * 1_000_003 + rank + 1
            self._orders[rank, workers, epoch] = shuffled(samples, seed)
        return self._orders[rank, workers, epoch]


def _epochs(places: Tensor, samples: int) -> Sequence[int]:
    """The epochs in which these consecutive places lie."""
    if not len(places):
        return ()
    return range(int(places[0]) // samples, int(places[-1]) // samples + 1)
