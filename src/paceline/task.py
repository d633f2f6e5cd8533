"""Task: what is trained, on what, and for how long; everything but how the workers cooperate.

One global order of samples per epoch follows from the seed alone, and every global minibatch is cut into one part a worker,
so that runs with different strategies and numbers of workers see the same data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from paceline.state import Resize, StateStore, per_worker, resize_rule
from paceline.stripes import stripe_of
from paceline.worker.flat import BUCKET_BYTES, FlatModel
from paceline.worker.plan import Plan

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Task:
    """A training job.  `batch` counts the samples of one step over all workers together; give `steps` or `epochs`."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    data: Sequence[Tensor]
    batch: int
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    steps: int | None = None
    epochs: float | None = None
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None
    evaluate_every: int | None = None  # steps; None: once an epoch
    schedule: Callable[[int], float] | None = None  # step: the factor on the optimizer's learning rates
    accumulate: int = 1  # backward passes, each over a part of the worker's samples, that make one gradient
    bucket_bytes: int = BUCKET_BYTES
    seed: int = 0
    _orders: dict[int, Tensor] = field(default_factory=dict[int, Tensor], repr=False, compare=False)

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"Task(steps={self.steps}, epochs={self.epochs}): give one of the two")
        if (self.steps or 0) < 0 or not (self.epochs or 0) >= 0:
            raise ValueError(
                f"Task(steps={self.steps}, epochs={self.epochs}): there is no training for less than nothing"
            )
        if self.accumulate < 1:
            raise ValueError(f"Task(accumulate={self.accumulate}): at least 1 backward pass makes a gradient")
        if self.batch < 1 or len({len(t) for t in self.data}) != 1 or not len(self.data[0]):
            sizes = [len(t) for t in self.data]
            raise ValueError(
                f"Task(batch={self.batch}, data of lengths {sizes}): needs a batch of at least 1 and equally long, non-empty data"
            )

    @property
    def samples(self) -> int:
        return len(self.data[0])

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch)

    @cached_property
    def total_steps(self) -> int:
        return self.steps if self.steps is not None else max(1, round((self.epochs or 0) * self.steps_per_epoch))

    @property
    def plan(self) -> Plan:
        return Plan(self.total_steps, self.steps_per_epoch, self.samples, self.batch)

    @cached_property
    def evaluation_period(self) -> int:
        return self.evaluate_every or self.steps_per_epoch

    def build(self) -> nn.Module:
        """The initial model, the same on every rank."""
        with torch.random.fork_rng(
            devices=list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        ):
            torch.manual_seed(self.seed)
            return self.model()

    def part(self, step: int, rank: int, workers: int) -> Batch:
        """Worker `rank`'s part of the step-th global minibatch; it may be empty."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if epoch not in self._orders:
            self._orders.clear()
            self._orders[epoch] = torch.randperm(
                self.samples, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            )
        indices = self._orders[epoch][within * self.batch : (within + 1) * self.batch]
        mine = indices[stripe_of(rank, len(indices), workers)]
        return tuple(t[mine] for t in self.data)

    def evaluated(self, model: nn.Module) -> dict[str, float]:
        """What the evaluation says of a model."""
        assert self.evaluate is not None
        was_training = model.training
        model.eval()
        with torch.no_grad():
            values = self.evaluate(model)
        model.train(was_training)
        return values


class Trainee:
    """A model being trained on a task by one worker: its optimizer, its place in the data and its own random numbers."""

    def __init__(self, task: Task, model: nn.Module, rank: int, workers: int, stage: int = 0) -> None:
        """`stage` says which part of a split model it is: each has its own random numbers."""
        self.task, self.rank, self.workers = task, rank, workers
        self.flat = FlatModel(model, bucket_bytes=task.bucket_bytes)
        self.optimizer = task.optimizer(self.flat.parameters)
        self.loss: float | None = None
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._is_whole = False  # whether all of every minibatch is drawn
        self._rng = torch.Generator().manual_seed((task.seed + 1) * 1_000_003 + stage * workers + rank).get_state()
        self._rng_of_all = torch.Generator().manual_seed((task.seed + 1) * 1_000_003 - 1 - stage).get_state()

    def has_data(self, step: int) -> bool:
        return step < self.task.total_steps

    def draw(self, step: int, data_shard: int | None = None) -> Batch | None:
        """This worker's part of the step's minibatch, or that of another seat; None if there is none left or it is empty."""
        if not self.has_data(step):
            return None
        if self.task.schedule is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * self.task.schedule(step)
        mine = self.rank if data_shard is None else data_shard
        part = self.task.part(step, 0, 1) if self._is_whole else self.task.part(step, mine, self.workers)
        return part if len(part[0]) else None

    def use_full_batches(self, whole: bool) -> None:
        """Draw whole minibatches from now on, and random numbers that all workers share; or this worker's own again."""
        if whole != self._is_whole:
            self._rng, self._rng_of_all = self._rng_of_all, self._rng
        self._is_whole = whole

    def backward(self, batch: Batch, at_last: Callable[[], None] = lambda: None) -> None:
        """The gradient of the batch's loss, into each parameter's `.grad`; `at_last` is called before the last backward pass."""
        samples, total = len(batch[0]), 0.0
        passes = min(self.task.accumulate, samples)
        with self.passing():
            for i in range(passes):
                where = stripe_of(i, samples, passes)
                loss = self.task.loss(self.flat.model, tuple(t[where] for t in batch) if passes > 1 else batch)
                if passes > 1:
                    loss = loss * ((where.stop - where.start) / samples)
                if i == passes - 1:
                    at_last()
                loss.backward()
                total += loss.item()
        self.loss = total

    @contextmanager
    def passing(self) -> Generator[None]:
        """Within this block a gradient comes to be, from nothing and with this worker's own random numbers."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self._rng)
        for p in self.flat.parameters:
            p.grad = None
        try:
            yield
        finally:
            self._rng = torch.get_rng_state()
            torch.set_rng_state(outside)

    def step(self, g: Tensor) -> None:
        flat = self.flat
        if g.data_ptr() != flat.grads.data_ptr():
            flat.grads.copy_(g)
        for i in range(len(flat.parameters)):
            flat.expose(i)
        self.optimizer.step()

    def evaluate(self, vector: Tensor | None) -> dict[str, float]:
        """What the task's evaluation says of the model, or of another vector put in its place."""
        kept = None
        if vector is not None:
            kept = self.flat.params.clone()
            self.flat.params.copy_(vector)
        values = self.task.evaluated(self.flat.model)
        if kept is not None:
            self.flat.params.copy_(kept)
        return values

    def bind_state(self, states: StateStore) -> None:
        """Declare what outlives a step here: the optimizer's state and the random numbers."""
        optimizer = self.optimizer
        states.bind(
            "optimizer",
            rule=per_worker,
            save=lambda: copy.deepcopy(optimizer.state_dict()),
            load=optimizer.load_state_dict,
        )
        states.bind("random numbers", rule=resize_random_numbers, save=self._save_random, load=self._load_random)

    def _save_random(self) -> dict[str, Any]:
        return {"own": self._rng.clone(), "shared": self._rng_of_all.clone()}

    def _load_random(self, values: dict[str, Any]) -> None:
        self._rng = values["own"]
        self._rng_of_all = values["shared"]


@resize_rule("random numbers", sees_all=True)
def resize_random_numbers(values: Sequence[dict[str, Any]], resize: Resize) -> Sequence[dict[str, Any]]:
    """A worker that stays continues its random numbers; one that joins starts new ones."""
    new: list[dict[str, Any]] = []
    for rank in range(resize.count):
        kept = copy.deepcopy(values[min(rank, len(values) - 1)])
        if rank >= len(values):
            kept["own"] = torch.Generator().manual_seed((resize.step + 1) * 1_000_003 + rank).get_state()
        new.append(kept)
    return new
