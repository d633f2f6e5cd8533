"""Methods without a server that are stopped, saved and resumed: nothing that was in flight is lost or counted twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from random import Random

import pytest
import torch
from torch import Tensor

from paceline import Cluster, Faults, Gossip, Link, LogNormal, Replica, Strategy, Strom, Task, simulate
from paceline.families.topology import Exponential, RandomPairs
from tests.laws.tasks import OPTIMIZERS, Point, numbers, params

STEPS, BATCH = 24, 8


def constant_gradients() -> Task:
    """The gradient of a sample is the sample, wherever the model is, so the order of steps does not matter."""
    data = numbers(STEPS * BATCH, 5, seed=3)
    return Task(
        lambda: Point(5),
        lambda model, batch: (model.w * batch[0]).sum(1).mean(),
        [data],
        BATCH,
        OPTIMIZERS["sgd"],
        steps=STEPS,
    )


def moved_by(task: Task, worker: int, steps: int, workers: int = 4) -> Tensor:
    """The sum of the updates of a worker's first steps."""
    total = torch.zeros(5, dtype=torch.float64)
    for k in range(steps):
        [part] = task.part(k, worker, workers)
        total -= 0.05 * part.mean(0)
    return total


def moved(task: Task, workers: int, steps: int) -> Tensor:
    return torch.stack([moved_by(task, worker, steps, workers) for worker in range(workers)]).sum(0)


GOSSIPS: list[Strategy] = [
    Gossip(),
    Gossip(RandomPairs(), period=2),
    Gossip(Exponential(), rounds=2, overlap=False),
    Gossip(lambda rank, size, step: (rank + 1) % size),
]
STROMS: list[Strategy] = [Strom(None), Strom(None, lr=0.05)]


def uneven(seed: int) -> Cluster:
    """Workers of very different speeds; one has a slow link."""
    return Cluster(4, compute=LogNormal("10ms", 1.0), links={(0, 3): Link("1MB/s", "7ms")}, seed=seed)


def check_models(strategy: Strategy, models: Tensor, updates: Tensor) -> None:
    """Under Gossip the mean of the models has moved by the mean of all updates, under Strom each model by their sum."""
    is_mean = isinstance(strategy, Gossip)
    expected = Point(5).w.detach() + updates / (len(models) if is_mean else 1)
    assert torch.allclose(models.mean(0) if is_mean else models, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", [*GOSSIPS, *STROMS], ids=lambda s: type(s).__name__)
def test_a_stopped_run_holds_every_update_once_and_goes_on_to_the_end(strategy: Strategy):
    task = constant_gradients()
    chance = Random(0)
    for trial in range(2):
        stop = chance.randrange(1, STEPS)
        first = simulate(task, strategy, uneven(trial), stop_at=stop)
        models = torch.stack([state["slots"]["model"]["values"]["params"] for state in first.states])
        check_models(strategy, models, moved(task, 4, stop))
        rest = simulate(task, strategy, uneven(trial + 50), resume=first.states)
        check_models(strategy, torch.stack(params(rest)), moved(task, 4, STEPS))
        trained = Counter((p.rank, p.step) for run in (first, rest) for p in run.trace.points)
        assert trained == Counter({(r, k): 1 for r in range(4) for k in range(STEPS)})


@dataclass
class Moments:
    """The models of all workers at each quiet point."""

    models: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    steps: dict[int, dict[int, int]] = field(default_factory=dict)


def resting(strategy: Strategy, moments: Moments, due: dict[int, int]) -> Strategy:
    """The same strategy, which saves itself: worker 0 decides when, and the others follow at their next step."""

    class Resting(type(strategy)):
        async def worker(self, w: Replica) -> None:
            name = "local_step" if getattr(strategy, "lr", None) is None else "gradient"
            inner = getattr(w, name)
            count = [0]

            def record() -> None:
                moments.models.setdefault(count[0], {})[w.rank] = w.params.clone()
                moments.steps.setdefault(count[0], {})[w.rank] = w.cursor.step
                count[0] += 1

            async def step() -> object:
                if (w.rank == 0 and w.cursor.step in due) or (w.cursor.rest is not None and w.cursor.rest.is_asked):
                    await w._states.before_save()
                    record()
                return await inner()

            setattr(w, name, step)
            await super().worker(w)

    return Resting(**{f.name: getattr(strategy, f.name) for f in fields(strategy)})


@pytest.mark.parametrize("strategy", [GOSSIPS[0], GOSSIPS[2], *STROMS], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("lost", [0.0, 0.2])
def test_a_running_job_is_saved_at_a_moment_between_the_steps_of_all(strategy: Strategy, lost: float):
    """Workers stand at different steps, messages are lost and doubled, and nobody waits for more than a step."""
    task = constant_gradients()
    for trial in range(2):
        moments = Moments()
        faults = Faults(lost=lost, doubled=lost, retransmit_s=0.05) if lost else Faults()
        run = simulate(task, resting(strategy, moments, {3, 9, 10}), uneven(trial), faults=faults)
        check_models(strategy, torch.stack(params(run)), moved(task, 4, STEPS))
        for number, steps in moments.steps.items():
            if len(steps) < 4:  # A worker had finished.
                continue
            updates = sum(moved_by(task, rank, steps[rank]) for rank in range(4))
            models = torch.stack([moments.models[number][rank] for rank in range(4)])
            check_models(strategy, models, updates)
        assert any(len(set(steps.values())) > 1 for steps in moments.steps.values())
