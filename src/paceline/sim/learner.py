"""The gradients and steps of a simulated worker: real numbers, virtual time."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from torch import Tensor

from paceline.op import Op
from paceline.pipeline.timing import Pipeline
from paceline.sim.cluster import Cluster
from paceline.sim.endpoint import SimEndpoint
from paceline.sim.shared_vector import change
from paceline.task import Batch, Trainee
from paceline.worker.flat import Bucket
from paceline.worker.learner import TaskLearner
from paceline.worker.replica import Replica


class SimLearner(TaskLearner):
    """Computes a worker's real gradients, and lets the virtual time of its machine pass."""

    def __init__(
        self,
        trainee: Trainee,
        endpoint: SimEndpoint,
        cluster: Cluster,
        pipeline: Pipeline | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        super().__init__(trainee)
        self.endpoint = endpoint
        self.cluster = cluster
        self.pipeline = pipeline
        self.progress = progress
        self._rng = Random(f"{cluster.seed}/{trainee.rank}")

    def gradient(self, replica: Replica, each: Callable[[Bucket], None] | None) -> Op[Tensor]:
        return self.endpoint.spawn(self._gradient(replica, each), kind="gradient")

    async def _gradient(self, replica: Replica, each: Callable[[Bucket], None] | None) -> Tensor:
        flat = self.flat
        batch = self._begin(replica)
        if batch is None:
            flat.emit_zeros(each)
            return flat.grads
        seconds = self._backward(batch)
        flat.collect_all()
        if each is None:
            await self.endpoint.busy(seconds, kind="gradient")
            if not replica.batch.accept(flat.first_nonfinite):
                flat.grads.zero_()
        elif self.pipeline is not None:  # A stage's gradient is complete only after the last microbatch.
            await self.endpoint.busy(seconds, kind="gradient")
            for bucket in flat.buckets:
                each(bucket)
        else:
            await self.endpoint.busy(seconds * self.cluster.forward_share, kind="gradient")
            for bucket in flat.buckets:
                share = (1 - self.cluster.forward_share) * bucket.grad.numel() / flat.numel
                await self.endpoint.busy(seconds * share, kind="gradient")
                each(bucket)
        self._note(replica, batch)
        return flat.grads

    def local_step(self, replica: Replica) -> Op[None]:
        return self.endpoint.spawn(self._local_step(replica), kind="local step")

    async def _local_step(self, replica: Replica) -> None:
        batch = self._begin(replica)
        if batch is not None:
            await self.endpoint.busy(self._backward(batch), kind="gradient")
            if replica.batch.accept(self.flat.first_nonfinite_grad):
                await self._step()
            self._note(replica, batch)

    async def _step(self) -> None:
        if self.flat.is_shared:
            await change(self.endpoint, self.flat.params, self.trainee.local_step)
        else:
            self.trainee.local_step()

    def _begin(self, replica: Replica) -> Batch | None:
        batch = self.trainee.draw(replica.cursor.step, replica.cursor.shard, replica.cursor.parts)
        replica.batch.begin(0 if batch is None else len(batch[0]))
        return batch

    def _backward(self, batch: Batch) -> float:
        """Compute the gradient.  Returns the seconds that it takes on this worker's machine."""
        began = time.perf_counter()
        self.trainee.backward(batch)
        seconds = self.cluster.computing.seconds(self.trainee.rank, time.perf_counter() - began, self._rng)
        if self.pipeline is None:
            return seconds
        samples = len(batch[0])
        now = self.endpoint.now()
        self.endpoint.trace.span(self.trainee.rank, "stages", now, now, self.pipeline.nbytes(samples))
        return self.pipeline.seconds(seconds, samples)

    def _note(self, replica: Replica, batch: Batch) -> None:
        if self.trainee.is_trial:
            return
        self.endpoint.trace.point(
            self.endpoint.now(), replica.rank, replica.cursor.step, len(batch[0]), self.trainee.loss
        )
        if replica.rank == 0 and self.progress:
            self.progress(replica.cursor.step)
