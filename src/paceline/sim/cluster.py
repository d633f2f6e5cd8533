"""Cluster: a description of the machines to simulate.

It says how long workers compute, how fast the network is and what encoding costs.  Randomness comes from `seed` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

from paceline import units
from paceline.checked import check_settings, quoting
from paceline.costs import Algorithm, Link

LEAST = 1000  # Bytes a second: in a smaller integer the unit was forgotten.


class Compute(ABC):
    """The time that a worker takes for one gradient."""

    def __post_init__(self) -> None:
        check_settings(self)

    @abstractmethod
    def seconds(self, rank: int, measured: float, rng: Random) -> float:
        """The time of the next gradient.  `measured` is the time that it really took on this machine."""

    def check(self, workers: int) -> None:
        """Raise ValueError if these times are impossible for that many workers; called before the run."""
        if not 0 <= self.seconds(workers - 1, 1.0, Random(0)) < inf:
            raise ValueError(f"{self}: the time of a gradient must be finite and at least 0 s")


@dataclass(frozen=True)
class Constant(Compute):
    """Every gradient takes the same time: one number for all workers, or one for each."""

    each: float | str | Sequence[float | str] = "10ms"

    def seconds(self, rank: int, measured: float, rng: Random) -> float:
        # A worker that joins later is as fast as one of the first workers.
        chosen = self.each if isinstance(self.each, (str, int, float)) else self.each[rank % len(self.each)]
        return units.seconds(chosen)

    def check(self, workers: int) -> None:
        each = [self.each] * workers if isinstance(self.each, (str, int, float)) else list(self.each)
        if len(each) != workers:
            raise ValueError(f"{self} for {workers} workers: give one time, or one for each worker")
        for one in each:
            if not 0 <= units.seconds(one) < inf:
                raise ValueError(f"{self}: the time of a gradient must be finite and at least 0 s, not {one!r}")


@dataclass(frozen=True)
class Measured(Compute):
    """The time that the gradient really took here, times a factor.  Such a run is not repeatable."""

    factor: float = 1.0

    def seconds(self, rank: int, measured: float, rng: Random) -> float:
        return measured * self.factor


@dataclass(frozen=True)
class LogNormal(Compute):
    """Log-normal times around a median, with a long tail: `sigma` 0.1 is a quiet cluster, 0.5 a shared one."""

    median: float | str = "10ms"
    sigma: float = 0.1

    def seconds(self, rank: int, measured: float, rng: Random) -> float:
        return units.seconds(self.median) * rng.lognormvariate(0.0, self.sigma)


@dataclass(frozen=True)
class Stragglers(Compute):
    """The times of another distribution, slower for some workers, and slower by chance for any gradient.

    `slow` gives for a rank how many times slower it always is.  With probability `chance`, a gradient takes `factor`
    times as long.
    """

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
                    f"{self} for {workers} workers: `slow` maps ranks from 0 to {workers - 1} "
                    "to finite factors of at least 0"
                )
        if not 0 <= self.chance <= 1 or not 0 <= self.factor < inf:
            raise ValueError(f"{self}: `chance` must be a probability from 0 to 1, and `factor` finite and at least 0")


def _check_bandwidth(name: str, value: float | str) -> None:
    with quoting("Cluster", name, value):
        found = units.bytes_per_second(value)
        if not found > 0:
            raise ValueError("it must be positive")
        if found < LEAST and isinstance(value, int):
            raise ValueError(f"a number counts bytes a second; write a unit, as in '{value}Gbit/s' or '{value}B/s'")


@dataclass(frozen=True)
class Cluster:
    """The machines to simulate.  Every rank has one network card.

    - `links`: pairs of ranks whose link differs from `bandwidth` and `latency`.
    - `codec_bandwidth`: plain bytes that a codec encodes or decodes in a second, on one core with fused kernels.
    - `memory_bandwidth`: bytes of an update that a server applies in a second.
    - `bus`: bytes a second of a bus that all ranks share, like the GPUs of one host; None: no bus.
    - `forward_share`: the share of a gradient's time before backward fills the first bucket.
    - `stages`: the number of machines of each worker, each with a part of its model, or the names of the modules that
      start a stage; see `split`.
    - `microbatches`: the microbatches of a minibatch that goes through stages; None: the same as in `train`.
    - `stage_link`: the link between the stages of a worker; None: the same as between workers.

    >>> Cluster(workers=2, bandwidth="1Gbit/s", latency="1ms").link(0, 1)
    Link(bandwidth=125000000.0, latency=0.001)
    """

    workers: int
    compute: Compute | float | str | Sequence[float | str] = "10ms"
    bandwidth: float | str = "10Gbit/s"
    latency: float | str = "50us"
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict[tuple[int, int], Link])
    collective: Algorithm = "ring"
    codec_bandwidth: float | str = "5GB/s"
    memory_bandwidth: float | str = "10GB/s"
    bus: float | str | None = None
    forward_share: float = 1 / 3
    stages: int | Sequence[str] = 1
    microbatches: int | None = None
    stage_link: Link | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self)
        if self.workers < 1:
            raise ValueError(f"Cluster(workers={self.workers}): there must be at least 1 worker")
        if self.collective not in ("ring", "tree", "star"):
            raise ValueError(f"Cluster(collective={self.collective!r}): it must be 'ring', 'tree' or 'star'")
        with quoting("Cluster", "compute", self.compute):
            self.computing.check(self.workers)
        for name in ("bandwidth", "codec_bandwidth", "memory_bandwidth", "bus"):
            if getattr(self, name) is not None:
                _check_bandwidth(name, getattr(self, name))
        with quoting("Cluster", "latency", self.latency):
            if not 0 <= units.seconds(self.latency) < inf:
                raise ValueError("it must be finite and not negative")
        if not 0 <= self.forward_share <= 1:
            raise ValueError(f"Cluster(forward_share={self.forward_share}): it must be from 0 to 1")

    @property
    def computing(self) -> Compute:
        return self.compute if isinstance(self.compute, Compute) else Constant(self.compute)

    def link(self, a: int, b: int) -> Link:
        """The link between two ranks."""
        usual = Link(units.bytes_per_second(self.bandwidth), units.seconds(self.latency))
        return self.links.get((a, b)) or self.links.get((b, a)) or usual

    def slowest(self, ranks: Sequence[int]) -> Link:
        """The link that sets the pace of a collective over these ranks: the worst between neighbours."""
        if not self.links:
            return self.link(0, 0)
        links = [self.link(a, b) for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True)]
        return Link(min(k.bandwidth for k in links), max(k.latency for k in links))

    def work_seconds(self, kind: str, nbytes: int) -> float:
        """The time of work other than a gradient: encoding, decoding, applying an update."""
        if kind in ("encode", "decode"):
            return nbytes / units.bytes_per_second(self.codec_bandwidth)
        return nbytes / units.bytes_per_second(self.memory_bandwidth)
