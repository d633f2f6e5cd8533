"""Agreement: how the ranks make sure that they read the same minibatches, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.distributed import Store

from paceline.endpoint import Endpoint

if TYPE_CHECKING:
    from paceline.session.loop_place import Visit


class Agreement(Protocol):
    """How the ranks make sure that they read the same minibatches."""

    def check_same(self, digest: bytes) -> None:
        """Raise ValueError if this rank's first minibatch differs from another rank's."""
        ...

    def seed(self) -> int:
        """A seed for shuffling, the same on every rank."""
        ...


class ByCollectives:
    """Agreement between ranks that all run from the first step to the last."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    def check_same(self, digest: bytes) -> None:
        # With its rank: the endpoint's may be others afterwards, if one has died.
        mine = digest + self.endpoint.rank.to_bytes(8)
        found = [
            bytes(t.numpy())
            for t in self.endpoint.all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8)).wait()
        ]
        first = found[0]
        for other in found:
            if other[:-8] != first[:-8]:
                raise _different_minibatch(int.from_bytes(other[-8:]), int.from_bytes(first[-8:]))

    def seed(self) -> int:
        return int(self.endpoint.broadcast(_random_seed(), self.endpoint.ranks[0]).wait())


class ByStore:
    """Agreement between ranks that may join and leave: the first rank that begins its `number`-th pass decides.

    `resumed` is the seed of a pass that continues; `keep` is called with the seed that was agreed on.
    """

    def __init__(
        self, store: Store, rank: int, number: int, resumed: int | None = None, keep: Callable[[int], object] = id
    ) -> None:
        self.store = store
        self.rank = rank
        self.resumed = resumed
        self.keep = keep
        self.prefix = f"pass/{number}"

    def check_same(self, digest: bytes) -> None:
        mine = f"{digest.hex()} {self.rank}"
        first, rank = self.store.compare_set(f"{self.prefix}/first", "", mine).decode().split()
        if first != digest.hex():
            raise _different_minibatch(self.rank, int(rank))

    def seed(self) -> int:
        seed = int(_random_seed()) if self.resumed is None else self.resumed
        agreed = int(self.store.compare_set(f"{self.prefix}/seed", "", str(seed)).decode())
        self.keep(agreed)
        return agreed


class InPlace:
    """Agreement between ranks that may join later: `known` has what was agreed on before that.

    A pass that evaluates the model knows nothing.  `alone` is a rank that reads what the others read before it came.
    """

    def __init__(self, endpoint: Endpoint, known: Visit | None, *, alone: bool) -> None:
        self._among = ByCollectives(endpoint)
        self._known = known
        self._alone = alone

    def check_same(self, digest: bytes) -> None:
        if self._known is None:
            return None if self._alone else self._among.check_same(digest)
        if self._known.first is None:
            self._among.check_same(digest)
            self._known.first = digest.hex()
        elif self._known.first != digest.hex():
            raise ValueError(UNREPEATED)

    def seed(self) -> int:
        if self._known is None:
            return int(_random_seed()) if self._alone else self._among.seed()
        if self._known.seed is None:
            self._known.seed = self._among.seed()
        return self._known.seed


UNREPEATED = (
    "session.shard: a worker has joined in the middle of a pass, and its loader begins the pass with another minibatch "
    "than the others did: its order cannot be repeated; shuffle by a DataLoader(generator=...), by torch's, numpy's or "
    "Python's random numbers, or read by pl.Partition(session.rank, session.workers).loader(..., seed=...)"
)


def _random_seed() -> Tensor:
    return torch.randint(2**62, (1,), dtype=torch.int64)


def _different_minibatch(rank: int, other: int) -> ValueError:
    """Ranks that read different minibatches would train on some samples twice and on others never."""
    return ValueError(
        f"session.shard: the first minibatch of rank {rank} differs from that of rank {other}; every rank must iterate "
        "over the same global minibatches: shuffle by one seed, and use no DistributedSampler (shard replaces it)"
    )
