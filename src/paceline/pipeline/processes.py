"""A replica whose stages are processes; torch.distributed.pipelining moves microbatches through them.

With m microbatches, the gradient is that of `Task(accumulate=m)` for the whole model.  Stage k of replica r is rank
r * stages + k.  It runs its strategy with stage k of the other replicas, or with the shards of stage k.  All stages of
a replica decide together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.engines.job import Job
from paceline.errors import ClusterError
from paceline.op import Begun, Op
from paceline.pipeline.split import Split
from paceline.pipeline.stand_in import StandIn, count, model_input, split_for, usual_microbatches
from paceline.strategy import Strategy
from paceline.task import Batch, Task, Trainee
from paceline.transport.endpoint import ProcessEndpoint
from paceline.transport.stage_view import StageMailbox, StageView
from paceline.transport.torch_collectives import Work
from paceline.worker.learner import TaskLearner
from paceline.worker.replica import Replica
from paceline.worker.tensors import named_tensors

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    from paceline.session.backward import Each

Order = Literal["1f1b", "gpipe"]


class Stages:
    """The ranks of one replica, in the order of their stages, and their process group."""

    def __init__(self, endpoint: ProcessEndpoint, stage: int, ranks: Sequence[int], group: dist.ProcessGroup) -> None:
        self.endpoint = endpoint
        self.stage = stage
        self.ranks = tuple(ranks)
        self.group = group

    def all_gather(self, numbers: Sequence[float]) -> Op[list[list[float]]]:
        """The numbers of every stage."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        gathered = [torch.empty_like(mine) for _ in self.ranks]
        self._count((len(self.ranks) - 1) * mine.nbytes)
        work = dist.all_gather(gathered, mine, group=self.group, async_op=True)
        return Work("stages", [work], lambda: [t.tolist() for t in gathered])

    def assemble(self, split: Split, whole: nn.Module) -> None:
        """Copy the tensors of every stage into a `whole` model, on every rank."""
        for k, stage in enumerate(split.stages):
            for name, values in named_tensors(stage):
                into = _tensor(whole, name)
                if k == self.stage:
                    into.copy_(values)
                    self._count(into.nbytes)
                work = dist.broadcast(into, self.ranks[k], group=self.group, async_op=True)
                Work("assemble", [work], lambda: None).wait()

    def _count(self, nbytes: int) -> None:
        now = self.endpoint.now()
        self.endpoint.trace.span(self.endpoint.rank, "stages", now, now, nbytes)


class Pipeline:
    """The forward and backward passes of this process's stage."""

    def __init__(self, task: Task, split: Split, stages: Stages, *, microbatches: int | None, order: Order) -> None:
        self.task = task
        self.split = split
        self.stages = stages
        self.microbatches = microbatches or usual_microbatches(task, len(split.stages))
        self._order: Order = order
        self._schedules: dict[tuple[Any, ...], tuple[PipelineScheduleSingle, int]] = {}
        self._batch: Batch = ()
        self._samples = 0

    def backward(self, batch: Batch) -> tuple[float, int]:
        """Add the gradient of the loss to each `.grad`.  Returns the loss (on the last stage) and the bytes sent."""
        samples = len(batch[0])
        nbytes = 0
        losses: list[Tensor] = []
        passes = min(self.microbatches, samples)
        # A schedule of torch has microbatches of one size only.  The first microbatches may have one sample more.
        larger = samples % passes
        start = larger * (samples // passes + 1)
        for part, microbatches in ((slice(0, start), larger), (slice(start, samples), passes - larger)):
            if microbatches:
                nbytes += self._pass(tuple(t[part] for t in batch), microbatches, samples, losses)
        return float(torch.stack(losses).sum()) if losses else 0.0, nbytes

    def _pass(self, batch: Batch, passes: int, samples: int, losses: list[Tensor]) -> int:
        self._batch, self._samples = batch, samples
        x = model_input(self.task, batch)
        schedule, nbytes = self._schedule(passes, x)
        try:
            if self.stages.stage == 0:
                schedule.step(x)
            elif self.stages.stage < len(self.stages.ranks) - 1:
                schedule.step()
            else:
                own: list[Tensor] = []
                schedule.step(target=torch.arange(len(batch[0])), losses=own)
                losses += [loss.detach() for loss in own]
        except RuntimeError as error:  # Only the text says whether a peer or the model failed.
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise ClusterError(f"another stage of this replica is dead: {error}") from error
            raise
        return nbytes

    def _loss(self, output: Tensor, where: Tensor) -> Tensor:
        """A microbatch's share of the minibatch's mean loss."""
        stand_in = StandIn(output)
        loss = self.task.loss(stand_in, tuple(t[where] for t in self._batch))
        return loss if len(where) == self._samples else loss * (len(where) / self._samples)

    def _schedule(self, passes: int, x: Tensor) -> tuple[PipelineScheduleSingle, int]:
        """A schedule for this number of microbatches of this shape, and the bytes that it sends."""
        size = len(x) // passes
        key = (passes, size, x.shape[1:], x.dtype)
        if key not in self._schedules:
            from torch.distributed import pipelining  # The import takes a second, and few users need it.

            stage = self.stages.stage
            stages = len(self.stages.ranks)
            passed = self.split.passed(x[:size])
            shapes = [
                x[:size].to("meta"),
                *(torch.empty(y.shape, dtype=y.dtype, device="meta", requires_grad=True) for y in passed),
            ]
            # With all shapes given, torch does not send them from stage to stage; it would use pickle.
            place = pipelining.PipelineStage(
                self.split.stages[stage],
                stage,
                stages,
                x.device,
                input_args=shapes[stage],
                output_args=shapes[stage + 1],
                group=self.stages.group,
            )
            sent = (shapes[stage].nbytes if stage else 0) + (shapes[stage + 1].nbytes if stage < stages - 1 else 0)
            # With fewer microbatches than stages both orders are the same, and torch supports only one of them.
            is_plain = self._order == "gpipe" or passes < stages
            schedule = pipelining.ScheduleGPipe if is_plain else pipelining.Schedule1F1B
            self._schedules[key] = (schedule(place, passes, loss_fn=self._loss, scale_grads=False), passes * sent)
        return self._schedules[key]


class StageLearner(TaskLearner):
    """Computes this stage's gradients together with the other stages of its replica, when they are awaited."""

    def __init__(self, trainee: Trainee, endpoint: ProcessEndpoint, pipeline: Pipeline) -> None:
        super().__init__(trainee)
        self.endpoint = endpoint
        self.pipeline = pipeline
        self._group = pipeline.stages
        self.stage = pipeline.stages.stage
        self.stages = len(pipeline.stages.ranks)
        self._names = [n for n, _ in pipeline.split.model.named_parameters(remove_duplicate=False)]
        self._bad: str | None = None

    @property
    def split_model(self) -> nn.Module | None:
        """The whole model, of which this process has the values of one stage."""
        return self.pipeline.split.model

    def gradient(self, replica: Replica, each: Each | None) -> Op[Tensor]:
        return Begun("gradient", lambda: self._gradient(replica, each))

    def _gradient(self, replica: Replica, each: Each | None) -> Tensor:
        flat = self.flat
        if not self._backward(replica):
            flat.emit_zeros(each)
            return flat.grads
        flat.collect_all()
        if each is not None:
            for bucket in flat.buckets:
                each(bucket)
        elif not replica.batch.accept(lambda: self._bad):
            flat.grads.zero_()
        return flat.grads

    def local_step(self, replica: Replica) -> Op[None]:
        return Begun("local step", lambda: self._local_step(replica))

    def _local_step(self, replica: Replica) -> None:
        if self._backward(replica) and replica.batch.accept(lambda: self._bad):
            self.trainee.local_step()

    def step(self, replica: Replica, g: Tensor, by: Callable[[Tensor], None] | None = None) -> Op[None]:
        return Begun("step", partial(self._step, replica, g, by))

    def _step(self, replica: Replica, g: Tensor, by: Callable[[Tensor], None] | None) -> None:
        if any(refused for [refused] in self._group.all_gather([0.0]).wait()):
            replica.batch.skipped += 1
        else:
            self.trainee.step(g, by)

    def skip(self, replica: Replica) -> Op[None]:
        """Skip an update with NaN.  The other stages of the replica must skip it too."""
        return Begun("skip", self._skip)

    def _skip(self) -> None:
        self._group.all_gather([1.0]).wait()

    async def sum_over_stages(self, numbers: Sequence[float]) -> Sequence[float]:
        return [sum(column) for column in zip(*await self._group.all_gather(numbers), strict=True)]

    async def of_first_stage(self, numbers: Sequence[float]) -> Sequence[float]:
        return (await self._group.all_gather(numbers))[0]

    def _backward(self, replica: Replica) -> bool:
        """Compute the gradient of the next minibatch; False if there is none."""
        trainee = self.trainee
        endpoint = self.endpoint
        batch = trainee.draw(replica.cursor.step, replica.cursor.shard)
        replica.batch.begin(0 if batch is None else len(batch[0]))
        if batch is None:
            return False
        start = endpoint.now()
        with trainee.passing():
            loss, nbytes = self.pipeline.backward(batch)
        endpoint.trace.span(replica.rank, "gradient", start, endpoint.now(), nbytes)
        self._agree(loss)
        if self.stage == 0:  # One point for the whole replica.
            endpoint.trace.point(endpoint.now(), replica.rank, replica.cursor.step, len(batch[0]), trainee.loss)
        return True

    def _agree(self, loss: float) -> None:
        """Give all stages the loss, and the first parameter of the whole model with NaN or infinity in its gradient."""
        name = self.flat.first_nonfinite_grad()
        none = len(self._names)
        mine = none if name is None else self._names.index(name)
        gathered = self._group.all_gather([loss, float(mine)]).wait()
        self.trainee.loss = gathered[-1][0]
        first = int(min(bad for _, bad in gathered))
        self._bad = None if first == none else self._names[first]

    def evaluated(self, vector: Tensor | None) -> dict[str, float]:
        """The task's evaluation of the whole model, on the first stage; empty on the others."""
        model = self.whole(vector)
        return self.trainee.task.evaluated(model) if self.stage == 0 else {}

    def whole(self, vector: Tensor | None = None) -> nn.Module:
        """The whole trained model, on every stage; with `vector`, this stage has these parameters, not its own."""
        model = self.trainee.task.build()
        with self.flat.showing(vector):
            self._group.assemble(self.pipeline.split, model)
        return model


def _tensor(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its name; a shared one has several names."""
    owner, _, last = name.rpartition(".")
    return getattr(model.get_submodule(owner), last).detach()


def staged(
    job: Job,
    task: Task,
    strategy: Strategy,
    model: nn.Module,
    stages: int | Sequence[str],
    microbatches: int | None,
    order: Order,
) -> StageLearner:
    """The learner of this process's stage: within its replica, and with the same stage of the other replicas."""
    depth = count(stages)
    workers = job.workers // depth
    replica, stage = divmod(job.rank, depth)
    parts = split_for(task, model, stages, workers)
    for k, other in enumerate(parts.stages):
        if k != stage:
            other.to("meta")  # Another process has it.
    if strategy.needs.servers:
        endpoint = _among_shards(job, StageView.of(job.rank, job.layout, depth, strategy.coordinators))
    else:
        endpoint = job.endpoint.group([r * depth + stage for r in range(workers)])
    ranks = [replica * depth + k for k in range(depth)]
    pipeline = Pipeline(
        task, parts, Stages(endpoint, stage, ranks, job.open(ranks)), microbatches=microbatches, order=order
    )
    return StageLearner(Trainee(task, parts.stages[stage], replica, workers, stage), endpoint, pipeline)


def _among_shards(job: Job, view: StageView) -> ProcessEndpoint:
    """An endpoint for messages to the shards of this stage."""
    return ProcessEndpoint(
        view.rank,
        view.layout,
        job.endpoint.clock,
        open_mailbox=lambda: StageMailbox(job.endpoint.mailbox, view),
        trace=job.endpoint.trace,
    )
