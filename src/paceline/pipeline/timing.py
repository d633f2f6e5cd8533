"""How long a gradient takes that goes through stages, and what they send each other.

m microbatches pass k stages like goods through a factory: the first takes as long as all stages and links together, every other
one as long as the slowest of them.  With equal stages and free links that is the (m + k - 1) / m of GPipe (2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from paceline import units
from paceline.costs import Link
from paceline.pipeline.stand_in import model_input, split_for, usual_microbatches
from paceline.sim.cluster import Cluster
from paceline.task import Task


@dataclass(frozen=True)
class Pipeline:
    """A replica's stages: the share of the work that each does, and the bytes of a sample that pass from each to the next.

    >>> Pipeline((0.5, 0.5), (0,), microbatches=4, link=Link("10Gbit/s", 0.0), forward_share=0.25).seconds(8.0, samples=40)
    5.0
    """

    shares: Sequence[float]
    cuts: Sequence[int]
    microbatches: int
    link: Link
    forward_share: float

    def seconds(self, whole: float, samples: int) -> float:
        """The time of a gradient that would take `whole` on one machine."""
        passes = min(self.microbatches, samples)
        links = [self.link.latency + nbytes * samples / passes / self.link.bandwidth for nbytes in self.cuts]

        def through(share: float) -> float:
            stations = [*(whole * share * s / passes for s in self.shares), *links]
            return sum(stations) + (passes - 1) * max(stations)

        return through(self.forward_share) + through(1 - self.forward_share)

    def nbytes(self, samples: int) -> int:
        """What all stages of a replica together send for a gradient: activations forward, their gradients backward."""
        return 2 * samples * sum(self.cuts)


def pipelined(task: Task, model: nn.Module, cluster: Cluster) -> tuple[Pipeline, Cluster]:
    """The task's model in the cluster's stages; and the cluster as replicas of it see each other.

    Stages work side by side, each with a network card and a processor of its own: an exchange takes as long as the largest
    stage's part of it.
    """
    split = split_for(task, model, cluster.stages, cluster.workers)
    part = task.part(0, 0, cluster.workers)
    passed = split.passed(model_input(task, part))[:-1]
    sizes = [sum(p.numel() for p in stage.parameters() if p.requires_grad) for stage in split.stages]
    largest = max(sizes) / sum(sizes)
    link = cluster.stage_link or Link(cluster.bandwidth, cluster.latency)
    pipeline = Pipeline(
        shares=[cost / sum(split.costs) for cost in split.costs],
        cuts=[y.nbytes // len(part[0]) for y in passed],
        microbatches=cluster.microbatches or usual_microbatches(task, len(split.stages)),
        link=link,
        forward_share=cluster.forward_share,
    )
    return pipeline, replace(
        cluster,
        bandwidth=units.bytes_per_second(cluster.bandwidth) / largest,
        links={pair: Link(other.bandwidth / largest, other.latency) for pair, other in cluster.links.items()},
        codec_bandwidth=units.bytes_per_second(cluster.codec_bandwidth) / largest,
        memory_bandwidth=units.bytes_per_second(cluster.memory_bandwidth) / largest,
    )
