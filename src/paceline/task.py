"""Task: what is trained, on what data, and for how long; everything but how the workers cooperate."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline.checked import check_settings
from paceline.state import StateStore
from paceline.stripes import stripe_of
from paceline.training.adjust import AutoAdjust
from paceline.training.batch_sizes import AutoBatch, BatchPlan, GrowingBatch
from paceline.training.length import Length, Position
from paceline.training.scaling import Scaling
from paceline.training.schedule import Schedule
from paceline.training.timetable import Timetable
from paceline.worker.data import Batch, DataOfWorker, GlobalData, OwnData
from paceline.worker.flat import BUCKET_BYTES, FlatModel
from paceline.worker.learner import bind_optimizer, evaluates_itself
from paceline.worker.plan import Plan
from paceline.worker.random_numbers import RandomNumbers
from paceline.worker.rates import Rates

T = TypeVar("T")

# What is often given for a setting, and what to give instead.
INSTEAD = {
    "model": (nn.Module, "model is a function that builds the model, for each worker its own; give lambda: Net(...)"),
    "loss": (
        (nn.modules.loss._Loss, type),  # pyright: ignore[reportPrivateUsage]
        "loss is a function of the model and a minibatch; give lambda model, batch: f(model(batch[0]), batch[1])",
    ),
    "optimizer": (
        torch.optim.Optimizer,
        "optimizer is a function that makes the optimizer of each worker's model; give "
        "lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
    ),
    "schedule": (
        (torch.optim.lr_scheduler.LRScheduler, type),
        "schedule is a Schedule, or a function from a step to a factor on the learning rate; give "
        "Schedule(decay='cosine') or lambda step: 0.99**step",
    ),
    "data": (
        (Tensor, Dataset, DataLoader),
        "data is a sequence of equally long tensors, one for each part of a sample; give [inputs, targets]",
    ),
}


@dataclass(frozen=True)
class Task:
    """A training job.  `batch` counts the samples of one step over all workers together; give `steps` or `epochs`.

    A `GrowingBatch` or an `AutoBatch` changes that number from epoch to epoch.  `scaling` says for how many samples a
    step the optimizer's rate and momentum were chosen: they then follow the size of a step.  `adjust` goes back to
    the best model when the training loss rises.

    `data` is a sequence of equally long tensors, which the workers share out.  Or it is a function
    `data(rank, workers)` that gives each worker its own tensors, which no other worker reads; then give `steps`.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    data: Sequence[Tensor] | DataOfWorker
    batch: int | BatchPlan
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    steps: int | None = None
    epochs: float | None = None
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None
    evaluate_every: int | str | Length | None = None  # steps, or a length such as "2 epochs"; None: once an epoch
    schedule: Schedule | Callable[[int], float] | None = None  # The factor on all learning rates, on servers too.
    scaling: Scaling | None = None
    adjust: AutoAdjust | None = None
    accumulate: int = 1  # backward passes, each over a part of the worker's samples, that make one gradient
    bucket_bytes: int = BUCKET_BYTES
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.evaluate_every, str):
            object.__setattr__(self, "evaluate_every", Length.of("Task(evaluate_every)", self.evaluate_every))
        check_settings(self, INSTEAD)
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"Task(steps={self.steps}, epochs={self.epochs}): give one of the two")
        if (self.steps or 0) < 0 or not 0 <= (self.epochs or 0) < inf:
            raise ValueError(
                f"Task(steps={self.steps}, epochs={self.epochs}): steps and epochs must be finite and at least 0"
            )
        if self.accumulate < 1:
            raise ValueError(f"Task(accumulate={self.accumulate}): a gradient needs at least 1 backward pass")
        if isinstance(self.batch, int) and self.batch < 1:
            raise ValueError(f"Task(batch={self.batch}): a step needs at least 1 sample")
        every = self.evaluate_every
        if isinstance(every, int) and every < 1:
            raise ValueError(f"Task(evaluate_every={every}): it counts steps and must be at least 1")
        if isinstance(every, Length) and (not every.value or (every.unit == "epochs" and self.has_own_data)):
            raise ValueError(
                f"Task(evaluate_every='{every}'): give a length above 0, and where each worker has data of its own "
                "steps or samples"
            )
        if self.has_own_data and self.steps is None:
            raise ValueError(
                f"Task(epochs={self.epochs}) with data of each worker's own: epochs differ from worker to worker; "
                "give steps"
            )
        self._check_control()
        assert self.source is not None  # It checks the data.

    def _check_control(self) -> None:
        """Refuse what does not go together."""
        needs_epochs = [v for v in (self.adjust, self.batch) if isinstance(v, AutoAdjust | GrowingBatch | AutoBatch)]
        if needs_epochs and self.has_own_data:
            raise ValueError(
                f"Task({type(needs_epochs[0]).__name__}) with data of each worker's own, which has no common epochs: "
                "give data=[...], which the workers share out"
            )
        is_unscaled = self.scaling is None or self.scaling.rate == "none"
        if isinstance(self.schedule, Schedule) and self.schedule.needs_gain and is_unscaled:
            raise ValueError(
                f"Task(scaling={self.scaling}) with a warm-up that starts at the base rate: without a scaled rate it "
                "would change nothing; give scaling=Scaling(base=...), or Schedule(start=0.1)"
            )
        if isinstance(self.batch, AutoBatch) and self.scaling is None:
            raise ValueError(
                f"Task(batch={self.batch}) without scaling: a larger minibatch would change what the learning rate "
                f"means; give scaling=Scaling(base={self.batch.start})"
            )
        if isinstance(self.batch, AutoBatch) and not (self.schedule is None or isinstance(self.schedule, Schedule)):
            raise ValueError(
                "Task(batch=AutoBatch(...), schedule=function): the number of a step does not say how far the run "
                "is; give a Schedule"
            )

    @property
    def is_controlled(self) -> bool:
        """Whether the run decides something between epochs."""
        return self.adjust is not None or isinstance(self.batch, AutoBatch)

    @property
    def has_own_data(self) -> bool:
        """Whether each worker has a data set of its own, which no other worker can read."""
        return callable(self.data)

    @cached_property
    def source(self) -> GlobalData | OwnData:
        if callable(self.data):
            return OwnData(self.data, self.first_batch, self.seed)
        return GlobalData(self.data, self.batch, self.seed)

    @property
    def first_batch(self) -> int:
        """The samples of the first step."""
        if isinstance(self.batch, int):
            return self.batch
        return self.batch.size(0) if isinstance(self.batch, GrowingBatch) else self.batch.start

    @property
    def samples(self) -> int | None:
        """In an epoch; None if each worker has data of its own."""
        return self.source.samples if isinstance(self.source, GlobalData) else None

    @property
    def steps_per_epoch(self) -> int | None:
        """None if each worker has data of its own, or if epochs differ."""
        if self.samples is None or not isinstance(self.batch, int):
            return None
        return -(-self.samples // self.batch)

    def timetable(self, size_of: Callable[[int], int] | None = None) -> Timetable:
        """Which samples each step reads; `size_of` gives the size of minibatches in an epoch, if a run chooses it."""
        if self.samples is None:
            assert self.steps is not None
            return Timetable(max(1, self.steps) * self.first_batch, lambda epoch: self.first_batch, steps=self.steps)
        if size_of is None:
            batch = self.batch
            size_of = batch.size if isinstance(batch, GrowingBatch) else lambda epoch: self.first_batch
        return Timetable(self.samples, size_of, steps=self.steps, epochs=self.epochs)

    @cached_property
    def _timetable(self) -> Timetable:
        return self.timetable()

    @property
    def total_steps(self) -> int:
        """The steps of the run; with AutoBatch the most that it can take."""
        return self._timetable.total_steps

    @property
    def plan(self) -> Plan:
        is_fixed = not isinstance(self.batch, AutoBatch)
        batch = self.batch if isinstance(self.batch, int) else None
        steps = self.total_steps if is_fixed or self.steps is not None else None
        timetable = self._timetable if is_fixed and self.samples is not None else None
        return Plan(steps, self.steps_per_epoch, self.samples, batch, timetable=timetable)

    def is_evaluation_due(self, step: int, timetable: Timetable) -> bool:
        """Whether the model is evaluated before that step, by default at the start of every epoch but the first."""
        if self.evaluate is None or not 0 < step < timetable.total_steps:
            return False
        if isinstance(self.evaluate_every, Length):
            before, now = (self.evaluate_every.count(self.position(k, timetable)) for k in (step - 1, step))
            return now > before
        return step % self.evaluate_every == 0 if isinstance(self.evaluate_every, int) else timetable.is_start(step)

    def build(self) -> nn.Module:
        """The initial model, the same on every rank."""
        with torch.random.fork_rng(
            devices=list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        ):
            torch.manual_seed(self.seed)
            return _made("model", self.model(), nn.Module)

    def part(self, step: int, rank: int, workers: int) -> Batch:
        """Worker `rank`'s part of the minibatch of that step; it may be empty."""
        return self.part_at(step, rank, workers, self._timetable)

    def part_at(self, step: int, rank: int, workers: int, timetable: Timetable) -> Batch:
        if isinstance(self.source, OwnData):
            return self.source.part(step, rank, workers)
        return self.source.part(timetable.place(step), rank, workers)

    def position(self, step: int, timetable: Timetable) -> Position:
        """How far the run is at a step."""
        epochs = None if self.samples is None else timetable.epochs_before(step)
        total = timetable.total_steps
        whole = self.epochs
        if whole is None and not isinstance(self.batch, AutoBatch) and epochs is not None:
            whole = timetable.epochs_before(total)
        return Position(step, timetable.samples_before(step), epochs, total, whole)

    def evaluated(self, model: nn.Module) -> dict[str, float]:
        """The metrics of a model."""
        assert self.evaluate is not None
        was_training = model.training
        model.eval()
        with torch.no_grad():
            values = self.evaluate(model)
        model.train(was_training)
        return values


def _made(setting: str, result: T, kind: type[T]) -> T:
    """What a function of a task has made, if it is of the right type."""
    if not isinstance(result, kind):
        given = f"{result!r:.80}"
        raise ValueError(f"Task({setting}=...): the function must return {kind.__name__}, and it returned {given}")
    return result


class Trainee:
    """A model that one worker trains on a task: its optimizer and its own random numbers."""

    def __init__(self, task: Task, model: nn.Module, rank: int, workers: int, stage: int = 0) -> None:
        """`stage` is the stage of a split model: each has its own random numbers."""
        self.task = task
        self.rank = rank
        self.workers = workers
        self.flat = FlatModel(model, bucket_bytes=task.bucket_bytes)
        self.optimizer = _made("optimizer", task.optimizer(self.flat.parameters), torch.optim.Optimizer)
        if evaluates_itself(self.optimizer):
            raise ValueError(
                f"Task(optimizer={type(self.optimizer).__name__}): it evaluates the loss several times in a step, and "
                "a worker of a Task computes one gradient a step; use SGD with Sandblaster, which is L-BFGS on all "
                "workers, or this optimizer in a loop of your own, by attach with PeriodicAveraging"
            )
        self.loss: float | None = None
        self.batch_size = task.first_batch  # Of the coming epochs, if the run chooses it.
        self.timetable = task.timetable((lambda epoch: self.batch_size) if isinstance(task.batch, AutoBatch) else None)
        self.rates = Rates(
            self.optimizer,
            schedule=task.schedule,
            scaling=task.scaling,
            is_adjusted=task.adjust is not None,
            position=lambda step: task.position(step, self.timetable),
            samples=self.timetable.samples_in,
            workers=workers,
        )
        self.is_trial = False  # Whether the steps are a trial of the run, which no hook and no trace sees.
        # Since the last check: the sum of losses, their samples, and those without a loss.
        self.losses = [0.0, 0.0, 0.0]
        self._reads_full_batches = False
        self._random_numbers = RandomNumbers(task.seed, rank, workers, stage)

    def take_place(self, rank: int, workers: int) -> None:
        """From now on this worker has another rank, among another number of workers."""
        self.rank = rank
        self.workers = self.rates.workers = workers

    @property
    def plan(self) -> Plan:
        """What is known about the run before it starts; its timetable is that of this worker."""
        return self.task.plan if self.task.has_own_data else replace(self.task.plan, timetable=self.timetable)

    def has_data(self, step: int) -> bool:
        return step < self.timetable.total_steps

    def draw(self, step: int, shard: int | None = None, parts: int = 0) -> Batch | None:
        """This worker's part of the step's minibatch, or another part `shard`; None if there is none or it is empty.

        With `parts` the minibatch is cut into so many, and not into one for each worker.
        """
        if not self.has_data(step):
            return None
        self.rates.apply(step)
        mine = self.rank if shard is None else shard
        rank, workers = (0, 1) if self._reads_full_batches else (mine, parts or self.workers)
        if self.task.is_controlled:  # The sizes of its minibatches are decided here.
            part = self.task.part_at(step, rank, workers, self.timetable)
        else:
            part = self.task.part(step, rank, workers)
        return part if len(part[0]) else None

    def use_full_batches(self, whole: bool) -> None:
        """Draw whole minibatches from now on, and random numbers that all workers share; or this worker's own again."""
        if whole and self.task.has_own_data:
            raise ValueError(
                "Replicated, in which every worker trains on whole minibatches, with a Task whose workers have data of "
                "their own: give the Task data=[...], or begin with AllReduceSGD"
            )
        if whole != self._reads_full_batches:
            self._random_numbers.swap()
        self._reads_full_batches = whole

    def backward(self, batch: Batch, at_last: Callable[[], None] = lambda: None) -> None:
        """The gradient of the batch's loss, into each parameter's `.grad`; `at_last` is called before the last pass."""
        samples = len(batch[0])
        total = 0.0
        passes = min(self.task.accumulate, samples)
        with self.passing():
            for i in range(passes):
                where = stripe_of(i, samples, passes)
                part = tuple(t[where] for t in batch) if passes > 1 else batch
                loss = _made("loss", self.task.loss(self.flat.model, part), Tensor)
                if passes > 1:
                    loss = loss * ((where.stop - where.start) / samples)
                if i == passes - 1:
                    at_last()
                loss.backward()
                total += loss.item()
        self.loss = total
        self._count_loss(total, samples)

    def _count_loss(self, loss: float, samples: int) -> None:
        if isfinite(loss):
            self.losses[0] += loss * samples
            self.losses[1] += samples
        else:
            self.losses[2] += samples

    @contextmanager
    def passing(self) -> Generator[None]:
        """Within this block a gradient is computed, from zero and with this worker's own random numbers."""
        self.flat.publish()
        for p in self.flat.parameters:
            p.grad = None
        try:
            with self._random_numbers.used():
                yield
        finally:
            self.flat.refresh()

    def step(self, g: Tensor, by: Callable[[Tensor], None] | None = None) -> None:
        """A step of the optimizer, with `g` as the gradient; or by a function in place of the optimizer."""
        if by is not None:
            by(g)
            return
        self.flat.expose_all(g)
        self.local_step()

    def local_step(self) -> None:
        """A step of the optimizer, with the gradient that is in `.grad`."""
        self.flat.publish()
        self.optimizer.step()
        self.flat.refresh()

    def evaluate(self, vector: Tensor | None) -> dict[str, float]:
        """The task's metrics of the model, or of another vector put in its place."""
        with self.flat.showing(vector):
            return self.task.evaluated(self.flat.model)

    def bind_state(self, states: StateStore) -> None:
        """Declare what outlives a step here: the optimizer's state and the random numbers."""
        bind_optimizer(states, self.optimizer)
        self._random_numbers.bind_state(states)
