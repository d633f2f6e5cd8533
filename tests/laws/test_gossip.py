"""Gossip: what pairwise averages keep, whoever asks whom and when, and what a topology must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from paceline import (
    AllReduceSGD,
    Cluster,
    Exponential,
    Faults,
    Gossip,
    Link,
    LogNormal,
    RandomPairs,
    Replica,
    Ring,
    Strategy,
    Task,
    simulate,
)
from paceline.families.topology import Topology, check_connected, peer_of
from paceline.needs import Needs
from paceline.strategies.gossip import Pairing
from tests.laws.tasks import OPTIMIZERS, close, instant, params, quadratic, regression, same, trained_alone, values

PAIRED: dict[str, Topology] = {"ring": Ring(), "exponential": Exponential(), "random": RandomPairs(seed=3)}
# Whoever asks is not asked in return: what a user's own topology may look like at its worst.
ONE_SIDED: dict[str, Topology] = {
    "everybody asks the next": lambda rank, size, step: (rank + 1) % size,
    "everybody asks the first": lambda rank, size, step: 0 if rank else None,
    "the first asks everybody": lambda rank, size, step: None if rank else 1 + step % (size - 1),
    "anybody asks anybody": lambda rank, size, step: Random(f"{rank}/{step}").choice(
        [r for r in range(size) if r != rank]
    ),
}
every_topology = pytest.mark.parametrize("topology", [*PAIRED.values(), *ONE_SIDED.values()], ids=[*PAIRED, *ONE_SIDED])


@dataclass(frozen=True)
class Mixing(Strategy):
    """Gossip without gradients, from models that `start` with other values on each worker, and no agreement in the end."""

    topology: Topology
    start: Callable[[int], Tensor]
    rounds: int
    waits: bool = True
    needs: ClassVar[Needs] = Needs(collectives=False, messages=True)

    async def worker(self, w: Replica) -> None:
        w.params.copy_(self.start(w.rank))
        pair = Pairing(w)
        for i in range(self.rounds):
            await pair.ask(peer_of(self.topology, w.rank, w.cursor.shards, i))
            await w.gradient()  # Time passes, a different one for each worker.
            await pair.take_all()
            if self.waits:
                await pair.until_free()
        await pair.until_free()
        await pair.finish()


def mixed(topology: Topology, cluster: Cluster, start: Callable[[int], Tensor], rounds: int, **more: Any) -> Tensor:
    """The models of all workers after so many rounds, a row each."""
    waits = more.pop("waits", True)
    task = quadratic(steps=rounds, batch=cluster.workers, numel=len(start(0)))
    return torch.stack(params(simulate(task, Mixing(topology, start, rounds, waits), cluster, **more)))


def uneven(workers: int, seed: int) -> Cluster:
    """Workers of other speeds, one of them at the end of a slow line."""
    return Cluster(workers, compute=LogNormal("10ms", 1.0), links={(0, workers - 1): Link("1MB/s", "7ms")}, seed=seed)


# Topologies.


@pytest.mark.parametrize("topology", PAIRED.values(), ids=PAIRED)
@pytest.mark.parametrize("size", range(2, 18))
def test_our_topologies_pair_workers_up_and_connect_all(topology: Topology, size: int):
    check_connected(topology, size)
    for step in range(40):
        for rank in range(size):
            peer = peer_of(topology, rank, size, step)
            assert peer is None or peer_of(topology, peer, size, step) == rank
        alone = [rank for rank in range(size) if peer_of(topology, rank, size, step) is None]
        assert len(alone) <= (size % 2 if not isinstance(topology, Exponential) else size - 2)


@dataclass(frozen=True)
class Halves:
    """Each half of the workers keeps to itself."""

    def __call__(self, rank: int, size: int, step: int) -> int | None:
        half = size // 2
        return (rank + 1) % half if rank < half else half + (rank - half + 1) % (size - half)


WRONG: dict[str, Topology] = {
    r"Halves\(\) on 5 workers is not connected: it consists of the parts \[0, 1\], \[2, 3, 4\], which never average with each other": Halves(),
    r"not connected: it consists of the parts \[0\], \[1\], \[2\], \[3\], \[4\]": lambda rank, size, step: None,
    r"in round 0 worker 0 of 5 would average with itself; return None for no peer": lambda rank, size, step: rank,
    r"in round 0 worker 4 would average with 5, but workers are 0 to 4": lambda rank, size, step: rank + 1,
    r"would average with -1, but workers are 0 to 4": lambda rank, size, step: -1,
}


@pytest.mark.parametrize(("said", "topology"), WRONG.items())
def test_a_topology_that_cannot_be_is_refused(said: str, topology: Topology):
    with pytest.raises(ValueError, match=said):
        simulate(quadratic(steps=3, batch=5), Gossip(topology), Cluster(workers=5))


def test_a_rank_that_is_wrong_later_on_is_refused_when_it_comes_up():
    def astray(rank: int, size: int, step: int) -> int:
        return (rank + 1) % size if step < 4 else size

    with pytest.raises(ValueError, match=r"in round 4 worker [0-3] would average with 4, but workers are 0 to 3"):
        simulate(quadratic(steps=9, batch=4), Gossip(astray), Cluster(workers=4))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"period": 0}, "period=0"),
        ({"rounds": 0, "overlap": False}, "rounds=0"),
        ({"rounds": 2}, r"Gossip\(rounds=2\): one average is under way while the next gradient is; give overlap=False"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        Gossip(**settings)


# Averages.


@every_topology
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_averages_keep_the_sum_of_all_models_exactly(topology: Topology, waits: bool, seed: int):
    """F2.1: of numbers with few bits, halves of halves are exact in float64; whoever asks whom, and whatever is lost or doubled."""
    faults = Faults(lost=0.1, doubled=0.1, retransmit_s=0.05) if seed % 2 else Faults()
    start = {
        rank: torch.randint(-99, 99, (5,), generator=torch.Generator().manual_seed(rank)).double() for rank in range(5)
    }
    models = mixed(topology, uneven(5, seed), start.__getitem__, rounds=8, waits=waits, faults=faults)
    assert torch.equal(models.sum(0), sum(start.values(), torch.zeros(5, dtype=torch.float64)))
    assert not same(models[0], start[0]), "something was averaged"


@every_topology
@pytest.mark.parametrize("seed", range(4))
def test_averages_are_doubly_stochastic(topology: Topology, seed: int):
    """F2.2: from unit vectors on, row i says what worker i has of everybody, and column j who has what of worker j."""
    matrix = mixed(topology, uneven(4, seed), lambda rank: torch.eye(4, dtype=torch.float64)[rank], rounds=7)
    assert matrix.sum(0).tolist() == [1.0] * 4 and matrix.sum(1).tolist() == [1.0] * 4
    assert (matrix >= 0).all()
    assert (matrix.diag() < 1).any()


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_as_many_rounds_as_the_logarithm_of_the_workers_make_all_equal(workers: int):
    rounds = workers.bit_length() - 1
    matrix = mixed(
        Exponential(), instant(workers), lambda rank: torch.eye(workers, dtype=torch.float64)[rank], rounds=rounds
    )
    assert torch.equal(matrix, torch.full((workers, workers), 1 / workers, dtype=torch.float64))


@every_topology
def test_without_gradients_models_come_together_geometrically(topology: Topology):
    """F2.3: every so many rounds take at least as large a part of the spread; on a ring of 6 in step it is known how large."""
    start = torch.arange(6.0, dtype=torch.float64)[:, None].expand(6, 2).clone()

    def spread(rounds: int) -> float:
        models = mixed(topology, instant(6), start.__getitem__, rounds=rounds)
        return float((models - models.mean(0)).norm())

    spreads = [spread(rounds) for rounds in (0, 12, 24, 36)]
    assert all(after < 0.6 * before + 1e-12 for before, after in pairwise(spreads)), spreads
    if isinstance(
        topology, Ring
    ):  # Two rounds average pairs and then the pairs between: the slowest mode keeps cos(pi / 3)**2 of itself.
        assert abs(spread(26) / spread(24) - 0.25) < 1e-6


# Simultaneous requests.


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_no_requests_however_they_cross_hold_anybody_up(waits: bool, seed: int):
    """F2.5: the simulator names a deadlock.  In step, and not; asked by whom chance will."""
    chance = Random(seed)
    workers = chance.randrange(2, 7)
    asked = {
        (r, i): chance.choice([None, *(p for p in range(workers) if p != r)]) for r in range(workers) for i in range(8)
    }
    cluster = chance.choice([instant(workers), Cluster(workers), uneven(workers, seed)])
    start = torch.eye(workers, dtype=torch.float64)
    models = mixed(lambda rank, size, step: asked[rank, step], cluster, start.__getitem__, rounds=8, waits=waits)
    assert torch.equal(models.sum(0), start.sum(0))


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_of_workers_that_ask_each_other_in_a_circle_at_once_some_average(workers: int):
    """Were all of them to refuse, or all to wait, nothing would ever be averaged."""
    start = torch.eye(workers, dtype=torch.float64)
    models = mixed(lambda rank, size, step: (rank + 1) % size, instant(workers), start.__getitem__, rounds=1)
    assert not torch.equal(models, start)
    assert torch.equal(models.sum(0), start.sum(0)) and (models >= 0).all()


def test_nobody_waits_for_a_slow_peer():
    """One worker is 20 times slower than the others, which gossip with it: they are done when their own gradients are."""
    cluster = Cluster(workers=4, compute=["10ms", "10ms", "10ms", "200ms"])
    run = simulate(regression(steps=30, batch=8), Gossip(), cluster)
    ends = {rank: max(s.stop for s in run.trace.spans if s.rank == rank and s.kind == "gradient") for rank in range(4)}
    assert all(ends[rank] < 0.31 for rank in range(3)) and ends[3] > 5.9


# Training.


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_complete_averages_after_each_step_equal_all_reduce_sgd(optimizer: str, workers: int):
    """In step, with equal parts of each minibatch: an average of two counts both alike."""
    task = regression(steps=20, batch=2 * workers, optimizer=OPTIMIZERS[optimizer])
    gossip = Gossip(Exponential(), rounds=workers.bit_length() - 1, overlap=False)
    run = simulate(task, gossip, Cluster(workers))
    assert close(run.params, simulate(task, AllReduceSGD(), Cluster(workers)).params)


@every_topology
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_all_models_moves_by_gradients_alone(topology: Topology, seed: int):
    """On a slope, whose gradients depend on the data alone, it ends where all gradients lead: exactly, as all numbers have few bits."""

    def slope(model: nn.Module, batch: Any) -> Tensor:
        return (model.w * batch[0]).sum(1).mean()

    data = [torch.randint(-8, 8, (32, 6), generator=torch.Generator().manual_seed(1)).double()]
    quarter = quadratic(steps=1, batch=1, numel=5)

    def model() -> nn.Module:
        point = quarter.model()
        point.w = nn.Parameter(torch.arange(6.0, dtype=torch.float64))
        return point

    task = Task(model, slope, data, 8, lambda p: torch.optim.SGD(p, lr=0.25), steps=8)
    faults = Faults(lost=0.1, doubled=0.1, retransmit_s=0.05) if seed else Faults()
    run = simulate(task, Gossip(topology), uneven(4, seed), faults=faults)
    assert torch.equal(run.params, trained_alone(task))


def test_a_peer_that_vanishes_in_mid_exchange_leaves_the_other_with_its_own_model():
    """It dies with the first copy of the other's model in its hands: that one trains on as if it had been alone with its data."""
    task = regression(steps=12, batch=8)
    run = simulate(task, Gossip(), Cluster(workers=2, compute=["10ms", "30ms"]), faults=Faults({1: 0.029}))
    asks = [s for s in run.trace.spans if s.kind == "send" and s.rank == 0 and s.stop < 0.029]
    assert asks, "the copy was out"
    model = task.build()
    optimizer = task.optimizer(model.parameters())
    for k in range(12):
        optimizer.zero_grad()
        task.loss(model, task.part(k, 0, 2)).backward()
        optimizer.step()
    assert same(run.params, torch.cat([p.detach().view(-1) for p in model.parameters()]))
    assert run.seconds < 0.13


def test_who_joins_begins_with_a_living_peers_model_at_its_step():
    faults = Faults(deaths={1: 0.1}, joins=[0.15])
    task = quadratic(steps=60, batch=6)
    far = Task(task.model, task.loss, [task.data[0] + 10], 6, task.optimizer, steps=60)
    run = simulate(far, Gossip(), Cluster(workers=3, compute="10ms"), faults=faults)
    mine = sorted((p for p in run.trace.points if p.rank == 3), key=lambda p: p.step)
    assert 13 <= mine[0].step <= 16 and mine[-1].step == 59, "what the dead one would have done until then is lost"
    first = min(p.loss for p in run.trace.points if p.step == 0 and p.loss is not None)
    assert mine[0].loss is not None and mine[0].loss < 0.5 * first
    assert all(same(values(run.states[rank], "model")["params"], run.params) for rank in (0, 2, 3))


def test_who_joins_waits_until_there_is_a_place():
    run = simulate(
        quadratic(steps=40, batch=6),
        Gossip(),
        Cluster(workers=3, compute="10ms"),
        faults=Faults(deaths={2: 0.2}, joins=[0.01, 0.01]),
    )
    begun = {p.rank: p.time for p in reversed(run.trace.points)}
    assert begun[3] > 0.2 and 4 not in begun
