"""The time of a gradient that goes through pipeline stages, and the bytes between them.

The first of m microbatches takes the time of all k stages and links together.  Every other one takes the time of the
slowest of them.  With equal stages and free links, that is the (m + k - 1) / m of GPipe (2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from paceline import units
from paceline.costs import Link
from paceline.pipeline.stand_in import model_input, split_for, usual_microbatches
from paceline.task import Task

if TYPE_CHECKING:
    from paceline.sim.cluster import Cluster


@dataclass(frozen=True)
class Pipeline:
    """The stages of a replica: the share of the work of each stage, and the bytes of a sample at each cut.

    >>> link = Link("10Gbit/s", 0.0)
    >>> Pipeline((0.5, 0.5), (0,), microbatches=4, link=link, forward_share=0.25).seconds(8.0, samples=40)
    5.0
    """

    shares: Sequence[float]
    cuts: Sequence[int]
    microbatches: int
    link: Link
    forward_share: float

    def seconds(self, whole: float, samples: int) -> float:
        """The time of a gradient that takes `whole` seconds on one machine."""
        passes = min(self.microbatches, samples)
        links = [self.link.latency + nbytes * samples / passes / self.link.bandwidth for nbytes in self.cuts]

        def one_way(share: float) -> float:
            times = [*(whole * share * s / passes for s in self.shares), *links]
            return sum(times) + (passes - 1) * max(times)

        return one_way(self.forward_share) + one_way(1 - self.forward_share)

    def nbytes(self, samples: int) -> int:
        """The bytes that all stages of a replica send for a gradient: activations forward, their gradients backward."""
        return 2 * samples * sum(self.cuts)


def pipelined(task: Task, model: nn.Module, cluster: Cluster) -> tuple[Pipeline, Cluster]:
    """The task's model in the cluster's stages, and the cluster as it is for communication between replicas.

    Each stage has its own network card and processor, so an exchange takes as long as that of the largest stage.
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
