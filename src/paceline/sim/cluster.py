"""Cluster: machines nobody has rented yet.

How long each worker computes, how fast bytes travel, what encoding costs.  All randomness follows from `seed`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

from paceline import units
from paceline.costs import Algorithm, Link


class Compute(ABC):
    """How long a worker takes for one gradient."""

    @abstractmethod
    def seconds(self, rank: int, measured: float, rng: Random) -> float:
        """For the next gradient; `measured` is what it took on this machine."""

    def check(self, workers: int) -> None:
        """Refuse what cannot be, for that many workers, before anything runs."""
        if not 0 <= self.seconds(workers - 1, 1.0, Random(0)) < inf:
            raise ValueError(f"{self}: a gradient takes a finite time of at least 0 s")


@dataclass(frozen=True)
class Constant(Compute):
    """Every gradient takes as long; one number, or one for each worker."""

    each: float | str | Sequence[float | str] = "10ms"

    def seconds(self, rank: int, measured: float, rng: Random) -> float:
        # Who joins later is like those who were there before.
        chosen = self.each if isinstance(self.each, (str, int, float)) else self.each[rank % len(self.each)]
        return units.seconds(chosen)

    def check(self, workers: int) -> None:
        each = [self.each] * workers if isinstance(self.each, (str, int, float)) else list(self.each)
        if len(each) != workers:
            raise ValueError(f"{self} for {workers} workers: give one time, or one for each worker")
        for one in each:
            if not 0 <= units.seconds(one) < inf:
                raise ValueError(f"{self}: a gradient takes a finite time of at least 0 s, not {one!r}")


@dataclass(frozen=True)
class Measured(Compute):
    """As long as it really took here, times a factor: a run like that is not repeatable."""

    factor: float = 1.0

    def seconds(self, rank: int, measured: float, rng: Random) -> float:
        return measured * self.factor


@dataclass(frozen=True)
class LogNormal(Compute):
    """Around a median, with a long tail: `sigma` 0.1 is a quiet cluster, 0.5 a shared one."""

    median: float | str = "10ms"
    sigma: float = 0.1

    def seconds(self, rank: int, measured: float, rng: Random) -> float:
        return units.seconds(self.median) * rng.lognormvariate(0.0, self.sigma)


@dataclass(frozen=True)
class Stragglers(Compute):
    """Another distribution in which some workers are always slower, and any gradient may by chance be."""

    usual: Compute = Constant()
    slow: Mapping[int, float] = field(default_factory=dict[int, float])
    chance: float = 0.0
    factor: float = 10.0

    def seconds(self, rank: int, measured: float, rng: Random) -> float:
        usual = self.usual.seconds(rank, measured, rng) * self.slow.get(rank, 1.0)
        return usual * self.factor if rng.random() < self.chance else usual

    def check(self, workers: int) -> None:
        self.usual.check(workers)
        for rank, factor in self.slow.items():
            if not 0 <= rank < workers or not 0 <= factor < inf:
                raise ValueError(
                    f"{self} for {workers} workers: `slow` maps ranks 0 to {workers - 1} to how many times slower they are"
                )
        if not 0 <= self.chance <= 1 or not 0 <= self.factor < inf:
            raise ValueError(
                f"{self}: `chance` is a probability, and `factor` says how many times slower a gradient then is"
            )


@dataclass(frozen=True)
class Cluster:
    """What to simulate.  Every rank has one network card; `links` says which pairs are joined by something slower.

    >>> Cluster(workers=2, bandwidth="1Gbit/s", latency="1ms").link(0, 1)
    Link(bandwidth=125000000.0, latency=0.001)
    """

    workers: int
    compute: Compute | float | str | Sequence[float | str] = "10ms"
    bandwidth: float | str = "10Gbit/s"
    latency: float | str = "50us"
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict[tuple[int, int], Link])
    collective: Algorithm = "ring"
    codec_bandwidth: float | str = "5GB/s"  # plain values in or out of a codec, as fused kernels do on one core
    memory_bandwidth: float | str = "10GB/s"  # a server applying an update
    bus: float | str | None = (
        None  # what all ranks' bytes have to pass, one after the other, like GPUs of one host; None: there is none
    )
    forward_share: float = 1 / 3  # of a gradient's time, before backward fills the first bucket
    stages: int | Sequence[str] = 1  # Machines of each worker, which hold a part of its model each; see `split`.
    microbatches: int | None = None  # that a minibatch goes through them in; None: as `train` does
    stage_link: Link | None = None  # between the stages of a worker; None: as between workers
    seed: int = 0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"Cluster(workers={self.workers}): there must be at least 1 worker")
        if self.collective not in ("ring", "tree", "star"):
            raise ValueError(f"Cluster(collective={self.collective!r}): collectives run by 'ring', 'tree' or 'star'")
        self.computing.check(self.workers)
        for name in ("bandwidth", "codec_bandwidth", "memory_bandwidth", "bus"):
            if getattr(self, name) is not None and not units.bytes_per_second(getattr(self, name)) > 0:
                raise ValueError(f"Cluster({name}={getattr(self, name)!r}): it must be positive")
        if not 0 <= units.seconds(self.latency) < inf:
            raise ValueError(f"Cluster(latency={self.latency!r}): it must be finite and not negative")
        if not 0 <= self.forward_share <= 1:
            raise ValueError(f"Cluster(forward_share={self.forward_share}): a share lies between 0 and 1")

    @property
    def computing(self) -> Compute:
        return self.compute if isinstance(self.compute, Compute) else Constant(self.compute)

    def link(self, a: int, b: int) -> Link:
        own = Link(units.bytes_per_second(self.bandwidth), units.seconds(self.latency))
        return self.links.get((a, b)) or self.links.get((b, a)) or own

    def slowest(self, ranks: Sequence[int]) -> Link:
        """What paces a collective over these ranks: the worst of the links between neighbours."""
        links = (
            [self.link(a, b) for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True)]
            if self.links
            else [self.link(0, 0)]
        )
        return Link(min(k.bandwidth for k in links), max(k.latency for k in links))

    def work_seconds(self, kind: str, nbytes: int) -> float:
        """What other work than a gradient takes: encoding, decoding, applying an update."""
        if kind in ("encode", "decode"):
            return nbytes / units.bytes_per_second(self.codec_bandwidth)
        return nbytes / units.bytes_per_second(self.memory_bandwidth)
