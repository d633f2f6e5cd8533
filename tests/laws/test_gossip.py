"""Gossip: invariants of pairwise averages, for any order of offers, and what a topology must be."""

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
    Faults,
    Gossip,
    Link,
    LogNormal,
    Replica,
    Strategy,
    Task,
    simulate,
)
from paceline.families.pairing import Pairing
from paceline.families.peers import Peers
from paceline.families.run_end import RunEnd
from paceline.families.topology import Exponential, RandomPairs, Ring, Topology, check_connected, peer_of
from paceline.needs import Needs
from paceline.strategies.gossip import half_difference
from tests.laws.tasks import OPTIMIZERS, close, instant, params, quadratic, regression, same, trained_alone, values

PAIRED: dict[str, Topology] = {"ring": Ring(), "exponential": Exponential(), "random": RandomPairs(seed=3)}
# Not pairs: the partner of a worker has another partner.  A user's own topology may look like these.
ONE_SIDED: dict[str, Topology] = {
    "each asks the next": lambda rank, size, step: (rank + 1) % size,
    "all ask the first": lambda rank, size, step: 0 if rank else None,
    "the first asks all": lambda rank, size, step: None if rank else 1 + step % (size - 1),
    "random": lambda rank, size, step: Random(f"{rank}/{step}").choice([r for r in range(size) if r != rank]),
}
every_topology = pytest.mark.parametrize("topology", [*PAIRED.values(), *ONE_SIDED.values()], ids=[*PAIRED, *ONE_SIDED])


@dataclass(frozen=True)
class Mixing(Strategy):
    """Gossip without gradients and without the mean at the end.  Each worker starts with its own values."""

    topology: Topology
    start: Callable[[int], Tensor]
    rounds: int
    waits: bool = True
    needs: ClassVar[Needs] = Needs(collectives=False, messages=True)

    async def worker(self, w: Replica) -> None:
        w.params.copy_(self.start(w.rank))
        peers = Peers(w)
        pairing = Pairing(peers, w.params, half_difference)
        end = RunEnd(peers)
        for i in range(self.rounds):
            await pairing.offer(peer_of(self.topology, w.rank, w.cursor.shards, i))
            await w.gradient()  # Takes a different time on each worker.
            await peers.handle_all()
            if self.waits:
                await pairing.wait()
        await pairing.wait()
        await end.wait_for_all()


def mixed(topology: Topology, cluster: Cluster, start: Callable[[int], Tensor], rounds: int, **more: Any) -> Tensor:
    """The models of all workers after these rounds, one row for each worker."""
    waits = more.pop("waits", True)
    task = quadratic(steps=rounds, batch=cluster.workers, numel=len(start(0)))
    return torch.stack(params(simulate(task, Mixing(topology, start, rounds, waits), cluster, **more)))


def uneven(workers: int, seed: int) -> Cluster:
    """Workers of different speeds; one has a slow link."""
    return Cluster(workers, compute=LogNormal("10ms", 1.0), links={(0, workers - 1): Link("1MB/s", "7ms")}, seed=seed)


# Topologies.


@pytest.mark.parametrize("topology", PAIRED.values(), ids=PAIRED)
@pytest.mark.parametrize("size", range(2, 18))
def test_built_in_topologies_form_pairs_and_are_connected(topology: Topology, size: int):
    check_connected(topology, size)
    for step in range(40):
        for rank in range(size):
            peer = peer_of(topology, rank, size, step)
            assert peer is None or peer_of(topology, peer, size, step) == rank
        alone = [rank for rank in range(size) if peer_of(topology, rank, size, step) is None]
        assert len(alone) <= (size % 2 if not isinstance(topology, Exponential) else size - 2)


@dataclass(frozen=True)
class Halves:
    """Each half of the workers averages only within itself."""

    def __call__(self, rank: int, size: int, step: int) -> int | None:
        half = size // 2
        return (rank + 1) % half if rank < half else half + (rank - half + 1) % (size - half)


WRONG: dict[str, Topology] = {
    r"Halves\(\) on 5 workers is not connected: no average links the parts \[0, 1\], \[2, 3, 4\]": Halves(),
    r"not connected: no average links the parts \[0\], \[1\], \[2\], \[3\], \[4\]": lambda rank, size, step: None,
    r"in round 0 worker 0 of 5 averages with itself; return None for no partner": lambda rank, size, step: rank,
    r"in round 0 worker 4 averages with 5; workers are 0 to 4": lambda rank, size, step: rank + 1,
    r"averages with -1; workers are 0 to 4": lambda rank, size, step: -1,
}


@pytest.mark.parametrize(("said", "topology"), WRONG.items())
def test_an_invalid_topology_is_refused(said: str, topology: Topology):
    with pytest.raises(ValueError, match=said):
        simulate(quadratic(steps=3, batch=5), Gossip(topology), Cluster(workers=5))


def test_an_invalid_rank_in_a_later_round_is_refused_in_that_round():
    def invalid_later(rank: int, size: int, step: int) -> int:
        return (rank + 1) % size if step < 4 else size

    with pytest.raises(ValueError, match=r"in round 4 worker [0-3] averages with 4; workers are 0 to 3"):
        simulate(quadratic(steps=9, batch=4), Gossip(invalid_later), Cluster(workers=4))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"period": 0}, "period=0"),
        ({"rounds": 0, "overlap": False}, "rounds=0"),
        ({"rounds": 2}, r"Gossip\(rounds=2\): with overlap there is one average for each gradient; give overlap=False"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        Gossip(**settings)


# Averages.


@every_topology
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_averages_keep_the_sum_of_all_models_exactly(topology: Topology, waits: bool, seed: int):
    """F2.1: with numbers of few bits, halves of halves are exact in float64.  Also with messages that are lost and
    doubled."""
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
    """F2.2: started from unit vectors, entry (i, j) is the share of worker j's model that worker i has."""
    matrix = mixed(topology, uneven(4, seed), lambda rank: torch.eye(4, dtype=torch.float64)[rank], rounds=7)
    assert matrix.sum(0).tolist() == [1.0] * 4 and matrix.sum(1).tolist() == [1.0] * 4
    assert (matrix >= 0).all()
    assert (matrix.diag() < 1).any()


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_log2_of_the_workers_rounds_make_all_models_equal(workers: int):
    rounds = workers.bit_length() - 1
    matrix = mixed(
        Exponential(), instant(workers), lambda rank: torch.eye(workers, dtype=torch.float64)[rank], rounds=rounds
    )
    assert torch.equal(matrix, torch.full((workers, workers), 1 / workers, dtype=torch.float64))


@every_topology
def test_without_gradients_models_converge_geometrically(topology: Topology):
    """F2.3: every 12 rounds reduce the spread by a constant factor.  For a synchronous ring of 6 the factor is
    known."""
    start = torch.arange(6.0, dtype=torch.float64)[:, None].expand(6, 2).clone()

    def spread(rounds: int) -> float:
        models = mixed(topology, instant(6), start.__getitem__, rounds=rounds)
        return float((models - models.mean(0)).norm())

    spreads = [spread(rounds) for rounds in (0, 12, 24, 36)]
    assert all(after < 0.6 * before + 1e-12 for before, after in pairwise(spreads)), spreads
    if isinstance(
        topology, Ring
    ):  # Two rounds average all neighbours: the slowest mode is multiplied by cos(pi / 3)**2.
        assert abs(spread(26) / spread(24) - 0.25) < 1e-6


# Simultaneous offers.


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_crossing_offers_never_deadlock(waits: bool, seed: int):
    """F2.5: the simulator raises an error at a deadlock.  Random partners, on synchronous and on uneven workers."""
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
def test_when_all_offer_in_a_circle_at_the_same_time_some_average(workers: int):
    """If all refused or all waited, there would be no average."""
    start = torch.eye(workers, dtype=torch.float64)
    models = mixed(lambda rank, size, step: (rank + 1) % size, instant(workers), start.__getitem__, rounds=1)
    assert not torch.equal(models, start)
    assert torch.equal(models.sum(0), start.sum(0)) and (models >= 0).all()


def test_workers_do_not_wait_for_a_slow_peer():
    """One worker is 20 times slower than the others.  They finish when their own gradients are done."""
    cluster = Cluster(workers=4, compute=["10ms", "10ms", "10ms", "200ms"])
    run = simulate(regression(steps=30, batch=8), Gossip(), cluster)
    ends = {rank: max(s.stop for s in run.trace.spans if s.rank == rank and s.kind == "gradient") for rank in range(4)}
    assert all(ends[rank] < 0.31 for rank in range(3)) and ends[3] > 5.9


# Training.


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_complete_averages_after_each_step_equal_all_reduce_sgd(optimizer: str, workers: int):
    """Synchronous, with equal data shards: an average of two has equal weights."""
    task = regression(steps=20, batch=2 * workers, optimizer=OPTIMIZERS[optimizer])
    gossip = Gossip(Exponential(), rounds=workers.bit_length() - 1, overlap=False)
    run = simulate(task, gossip, Cluster(workers))
    assert close(run.params, simulate(task, AllReduceSGD(), Cluster(workers)).params)


@every_topology
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_all_models_is_moved_by_gradients_only(topology: Topology, seed: int):
    """The loss is linear, so gradients depend on the data only.  Exact, because all numbers have few bits."""

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


def test_when_a_peer_dies_during_an_exchange_the_other_keeps_its_own_model():
    """It dies after it has received the other's first offer.  The other continues as if it were alone with its data
    shard."""
    task = regression(steps=12, batch=8)
    run = simulate(task, Gossip(), Cluster(workers=2, compute=["10ms", "30ms"]), faults=Faults({1: 0.029}))
    asks = [s for s in run.trace.spans if s.kind == "send" and s.rank == 0 and s.stop < 0.029]
    assert asks, "the offer was sent"
    model = task.build()
    optimizer = task.optimizer(model.parameters())
    for k in range(12):
        optimizer.zero_grad()
        task.loss(model, task.part(k, 0, 2)).backward()
        optimizer.step()
    assert same(run.params, torch.cat([p.detach().view(-1) for p in model.parameters()]))
    assert run.seconds < 0.13


def test_a_new_worker_starts_with_the_model_and_step_of_a_peer():
    faults = Faults(deaths={1: 0.1}, joins=[0.15])
    task = quadratic(steps=60, batch=6)
    far = Task(task.model, task.loss, [task.data[0] + 10], 6, task.optimizer, steps=60)
    run = simulate(far, Gossip(), Cluster(workers=3, compute="10ms"), faults=faults)
    mine = sorted((p for p in run.trace.points if p.rank == 3), key=lambda p: p.step)
    assert 13 <= mine[0].step <= 16 and mine[-1].step == 59, "the steps between the death and the join are left out"
    first = min(p.loss for p in run.trace.points if p.step == 0 and p.loss is not None)
    assert mine[0].loss is not None and mine[0].loss < 0.5 * first
    assert all(same(values(run.states[rank], "model")["params"], run.params) for rank in (0, 2, 3))


def test_a_new_worker_waits_until_a_worker_has_died():
    run = simulate(
        quadratic(steps=40, batch=6),
        Gossip(),
        Cluster(workers=3, compute="10ms"),
        faults=Faults(deaths={2: 0.2}, joins=[0.01, 0.01]),
    )
    begun = {p.rank: p.time for p in reversed(run.trace.points)}
    assert begun[3] > 0.2 and 4 not in begun
