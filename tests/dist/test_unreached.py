"""Parameters that backward does not reach, or that are frozen, unfrozen, moved or added while a session is open."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from tests.dist import forked

pytestmark = pytest.mark.dist

HEADS = 8  # The last one is never used.
OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.3),
}


class Heads(nn.Module):
    """A trunk, and several heads of which each sample uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(HEADS))
        self.double()

    def forward(self, x: Tensor, head: Tensor) -> Tensor:
        hidden = self.trunk(x).tanh()
        used = [int(h) for h in head.unique()]
        return torch.cat([self.heads[h](hidden[head == h]).square().reshape(-1) for h in used])


def task(optimizer: str, steps: int = 12) -> pl.Task:
    """Each minibatch uses at most 4 of the heads, and each worker's part of it fewer."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4 * steps, 3, generator=generator, dtype=torch.float64)
    head = torch.randint(0, HEADS - 1, (4 * steps,), generator=generator)
    return pl.Task(
        Heads,
        lambda model, batch: model(*batch).mean(),
        [x, head],
        4,
        OPTIMIZERS[optimizer],
        steps=steps,
        bucket_bytes=64,
    )


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def minibatches(job: pl.Task) -> list[tuple[Tensor, ...]]:
    return [job.part(step, 0, 1) for step in range(job.total_steps)]


def alone(job: pl.Task) -> Tensor:
    """The loop of one process."""
    model = job.build()
    optimizer = job.optimizer(model.parameters())
    for batch in minibatches(job):
        optimizer.zero_grad()
        job.loss(model, batch).backward()
        optimizer.step()
    return vector(model)


def attached(job: pl.Task, strategy: pl.Strategy) -> Tensor:
    model = job.build()
    with pl.attach(model, job.optimizer(model.parameters()), strategy, bucket_bytes=64) as session:
        for batch in session.shard(minibatches(job)):
            session.optimizer.zero_grad()
            job.loss(model, batch).backward()
            session.step()
    return vector(model)


@pytest.mark.filterwarnings("ignore::paceline.families.adam.CodecWithAdam")  # This one sends all values.
@pytest.mark.parametrize("codec", [None, pl.codecs.Fp32(), pl.codecs.TopK(ratio=1.0)], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_parameter_that_no_worker_reaches_in_a_step_stays_as_in_one_process(optimizer, codec):
    job = task(optimizer)
    expected = alone(job)
    start = vector(job.build())
    for workers in (2, 3):
        found = pl.simulate(job, pl.AllReduceSGD(codec=codec), pl.Cluster(workers=workers)).params
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if codec else 1e-13)
    assert torch.equal(expected[-5:], start[-5:])
    assert torch.equal(found[-5:], start[-5:])  # The head that is never used.


def test_unreached_parameters_end_with_the_same_bits_in_all_drivers(tmp_path):
    job = task("adamw")
    simulated = pl.simulate(job, pl.AllReduceSGD(), pl.Cluster(workers=2)).params
    assert torch.equal(pl.train(job, pl.AllReduceSGD(), 2).params, simulated)
    for found in forked.run(2, lambda rank: attached(job, pl.AllReduceSGD()).tolist(), tmp_path):
        assert found == simulated.tolist()


def test_what_a_codec_delivers_for_an_unreached_parameter_is_saved():
    job = task("adamw")
    strategy = pl.AllReduceSGD(codec=pl.codecs.Fp32())  # Of float64 gradients: it leaves a residual.
    unbroken = pl.simulate(job, strategy, pl.Cluster(workers=2))
    stopped = pl.simulate(job, strategy, pl.Cluster(workers=2), stop_at=5)
    assert stopped.states[0]["slots"]["model"]["values"]["late"]
    resumed = pl.simulate(job, strategy, pl.Cluster(workers=2), resume=stopped.states)
    assert torch.equal(resumed.params, unbroken.params)


def loop(strategy: pl.Strategy, happens: Callable[[nn.Module], object], *, frozen: bool = False) -> list[float]:
    """A user's loop, with something that happens before step 3."""
    job = task("momentum", steps=6)
    model = job.build()
    model.heads[1].requires_grad_(not frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    with pl.attach(model, job.optimizer(trained), strategy) as session:
        for i, batch in enumerate(session.shard(minibatches(job))):
            if i == 3:
                happens(model)
            session.optimizer.zero_grad()
            job.loss(model, batch).backward()
            session.step()
    return vector(model).tolist()


def test_a_layer_that_is_frozen_inside_the_block_stays_as_it_is(tmp_path):
    def freeze(model: nn.Module) -> None:
        model.trunk.requires_grad_(False)

    alone = loop(pl.AllReduceSGD(), freeze)
    for found in forked.run(2, lambda rank: loop(pl.AllReduceSGD(), freeze), tmp_path):
        assert found == pytest.approx(alone, abs=1e-13)


def move(model: nn.Module) -> None:
    model.trunk.weight.data = model.trunk.weight.data.clone()


CHANGES = {
    "unfrozen": (lambda model: model.heads[1].requires_grad_(), "parameter 'heads.1.weight' was frozen at attach"),
    "moved": (move, "parameter 'trunk.weight' has other memory than at attach"),
    "cast": (lambda model: model.heads[0].float(), "parameter 'heads.0.weight' has other memory than at attach"),
    "added": (lambda model: model.heads.append(nn.Linear(4, 1)), "parameter 'heads.8.weight' was not in the model"),
}


@pytest.mark.parametrize("strategy", [pl.AllReduceSGD(), pl.PeriodicAveraging(4)], ids=lambda s: type(s).__name__)
def test_changes_that_a_session_cannot_follow_are_named(strategy, tmp_path):
    def work(rank: int) -> list[str]:
        texts: list[str] = []
        for name, (happens, _) in CHANGES.items():
            with pytest.raises(RuntimeError) as error:
                loop(strategy, happens, frozen=name == "unfrozen")
            texts.append(str(error.value))
        return texts

    for texts in forked.run(2, work, tmp_path):
        for text, (_, expected) in zip(texts, CHANGES.values(), strict=True):
            assert text.startswith(expected)
