"""Averaging methods and warm starts, on real processes and in a user's own loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.session.attach import _plan
from tests.dist import forked
from tests.dist.test_attach import attached, minibatches, task, vector

pytestmark = pytest.mark.dist

METHODS = {
    "averaging, delayed": pl.PeriodicAveraging(period=4, optimizer_state="average", delay=2),
    "averaging by samples and one-bit": pl.PeriodicAveraging(samples=30, codec=pl.codecs.OneBit()),
    "adaptive": pl.AdaptiveAveraging(period=2, warmup=3, sampling=9),
    "block momentum by one-bit, delayed": pl.BlockMomentum(period=5, codec=pl.codecs.OneBit(), delay=3),
    "diloco, streaming": pl.DiLoCo(period=6, fragments=3, delay=1),
    "slow momentum": pl.SlowMo(period=5),
    "then": pl.Then(pl.AllReduceSGD(), pl.AdaptiveAveraging(period=2, warmup=0, sampling=14, delay=1), steps=7),
    "then, replicated": pl.Then(pl.Replicated(), pl.PeriodicAveraging(period=4), steps=6),
    "then, from averaging": pl.Then(
        pl.PeriodicAveraging(period=4, delay=1), pl.AllReduceSGD(codec=pl.codecs.OneBit()), steps=6
    ),
    "all-reduce by groups": pl.AllReduceSGD(group=2, codec=pl.codecs.OneBit()),
}


@pytest.mark.parametrize("name", METHODS)
def test_simulator_processes_and_attached_loop_end_with_the_same_bits(name, tmp_path):
    simulated = pl.simulate(task(), METHODS[name], pl.Cluster(workers=4)).params
    trained = pl.train(task(), METHODS[name], 4, ordered=True).params
    in_a_loop = forked.run(4, lambda rank: attached(task(), METHODS[name]).tolist(), tmp_path)
    assert torch.equal(simulated, trained)
    for vector_of_rank in in_a_loop:
        assert simulated.tolist() == vector_of_rank


@pytest.mark.parametrize(
    "name",
    ["averaging, delayed", "block momentum by one-bit, delayed", "diloco, streaming", "then", "then, from averaging"],
)
@pytest.mark.parametrize("at", [5, 9])
def test_a_resumed_session_equals_an_unbroken_one(name, at, tmp_path):
    """This includes an exchange in flight."""

    def work(rank):
        def session_on(model):
            return pl.attach(model, job.optimizer(model.parameters()), METHODS[name], ordered=True)

        def train(session, model, batches):
            for x, y in session.shard(batches):
                session.optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                session.step()

        job = task()
        model = job.build()
        with session_on(model) as session:
            train(session, model, minibatches(job)[:at])
            state = session.state_dict()
            train(session, model, minibatches(job)[at:])
        again = job.build()
        with session_on(again) as session:
            session.load_state_dict(state)
            train(session, again, minibatches(job)[at:])
        return [vector(model).tolist(), vector(again).tolist()]

    for unbroken, resumed in forked.run(2, work, tmp_path):
        assert unbroken == resumed


def test_a_loader_gives_the_length_of_the_run(tmp_path):
    """An epoch of 5 minibatches at period 1, then 4, while they are sampled until half of 4 epochs."""

    def work(rank):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        loader = DataLoader(TensorDataset(torch.randn(50, 3)), batch_size=10, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = pl.AdaptiveAveraging(sampling=0.5)
        with pl.attach(model, optimizer, strategy, loader=loader, epochs=4, initial="broadcast") as session:
            for _ in range(4):
                for (x,) in session.shard(loader):
                    session.optimizer.zero_grad()
                    loss = model(x).square().mean()
                    loss.backward()
                    session.step(loss)
        plan = session.loop.replica.plan
        points = [p.loss is not None for p in session.trace.points if p.samples]
        return [
            [s.step for s in session.trace.syncs][:6],
            [plan.steps, plan.steps_per_epoch, plan.samples, plan.batch],
            all(points),
        ]

    for steps, plan, has_losses in forked.run(2, work, tmp_path):
        assert steps == [0, 1, 2, 3, 4, 8] and plan == [20, 5, 50, 10] and has_losses


def test_a_strategy_that_needs_the_length_says_how_to_give_it():
    model = nn.Linear(3, 1)
    with pytest.raises(
        ValueError,
        match=r"AdaptiveAveraging with sampling as a fraction .* must know the steps .*loader=loader, epochs=",
    ):
        pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), pl.AdaptiveAveraging())
    with pytest.raises(ValueError, match=r"attach\(epochs=3\): .* give attach\(loader=\.\.\., epochs=3\)"):
        pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), pl.PeriodicAveraging(), epochs=3)


def test_ada_comm_follows_the_loss_of_the_session(tmp_path):
    def work(rank):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with pl.attach(model, optimizer, pl.AdaComm(period=8, steps=1), initial="broadcast") as session:
            for step in range(40):
                model(torch.ones(1, 1)).sum().backward()
                session.step(4.0 if step < 16 else 1.0)
        return [s.period for s in session.trace.syncs]

    for periods in forked.run(2, work, tmp_path):
        assert periods[:4] == [8, 8, 4, 2]  # The period halves if the loss does not ask for a shorter one.


def test_ada_comm_without_a_loss_raises_an_error(tmp_path):
    def work(rank):
        model = nn.Linear(1, 1)
        with pl.attach(
            model, torch.optim.SGD(model.parameters(), lr=0.1), pl.AdaComm(period=2), initial="broadcast"
        ) as session:
            for _ in range(4):
                model(torch.ones(1, 1)).sum().backward()
                session.step()

    assert all("call session.step(loss)" in result["error"] for result in forked.run(2, work, tmp_path))


def test_a_period_in_samples_needs_counted_samples():
    model = nn.Linear(1, 1)
    with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.0), pl.PeriodicAveraging(samples=64)) as session:
        model(torch.ones(1, 1)).sum().backward()
        with pytest.raises(
            ValueError, match=r"PeriodicAveraging\(samples=64\): the samples are not counted; .*session.count\(n\)"
        ):
            session.step()


def test_an_epoch_left_before_a_step_does_not_count_its_samples(tmp_path):
    def work(rank):
        model = nn.Linear(1, 1)
        with pl.attach(
            model, torch.optim.SGD(model.parameters(), lr=0.0), pl.PeriodicAveraging(period=1), initial="broadcast"
        ) as session:
            for stops in (True, False):
                for _ in session.shard([torch.ones(10, 1)]):
                    if stops:
                        break
                    model(torch.ones(5, 1)).sum().backward()
                    session.step()
        return [p.samples for p in session.trace.points]

    assert forked.run(2, work, tmp_path) == [[5], [5]]


def test_the_loss_can_be_given_when_other_code_takes_the_step(tmp_path):
    """The session forgets it after the step."""

    def work(rank):
        model = nn.Linear(1, 1)
        with pl.attach(
            model, torch.optim.SGD(model.parameters(), lr=0.0), pl.PeriodicAveraging(), initial="broadcast"
        ) as session:
            for loss in (2.0, None, torch.tensor(3.0, requires_grad=True)):
                model(torch.ones(1, 1)).sum().backward()
                if loss is not None:
                    session.tell(loss)
                session.optimizer.step()
        return [p.loss for p in session.trace.points]

    assert forked.run(1, work, tmp_path) == [[2.0, None, 3.0]]


def test_one_rank_can_save_its_state_while_a_mean_is_in_flight(tmp_path):
    def work(rank):
        job = task()
        model = job.build()
        with pl.attach(model, job.optimizer(model.parameters()), pl.PeriodicAveraging(period=5, delay=4)) as session:
            for _ in range(3):
                for x, y in session.shard(minibatches(job)[:7]):
                    session.optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    session.step()
                if session.rank == 0:
                    session.state_dict()
        return vector(model).tolist()

    first, second = forked.run(2, work, tmp_path)
    assert first == second


def test_the_loader_decides_how_many_samples_an_epoch_has():
    data = TensorDataset(torch.zeros(105, 1))
    drawn = torch.utils.data.WeightedRandomSampler([1.0] * 105, 1000)
    assert _plan(DataLoader(data, batch_size=10), None, 1).steps_for(samples=206) == 22
    assert _plan(DataLoader(data, batch_size=10, drop_last=True), None, 1).steps_for(samples=205) == 21
    assert _plan(DataLoader(data, batch_size=10, sampler=drawn), None, 1).steps_for(samples=500) == 50
    assert _plan([1, 2, 3, 4], 2.0, 2) == pl.Plan(4, 2)
    with pytest.raises(ValueError, match=r"Then must know the samples before the run.*a batch_size"):
        _plan([1, 2, 3], None, 1).steps_for(samples=9, by="Then")


@pytest.mark.parametrize("workers_of_loader", [0, 2])
def test_whole_minibatches_become_parts_at_the_switch(workers_of_loader, tmp_path):
    """This includes minibatches that the loader has prefetched."""

    def work(rank):
        model = nn.Linear(1, 1)
        loader = DataLoader(
            TensorDataset(torch.arange(60.0).unsqueeze(1)), batch_size=10, num_workers=workers_of_loader
        )
        strategy = pl.Then(pl.Replicated(), pl.PeriodicAveraging(period=2), steps=2)
        seen = []
        with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.0), strategy, initial="broadcast") as session:
            for (x,) in session.shard(loader):
                model(x).sum().backward()
                session.step()
                seen.append(x.view(-1).tolist())
        return seen

    first, second = forked.run(2, work, tmp_path)
    assert first[:2] == second[:2] == [list(map(float, range(10))), list(map(float, range(10, 20)))]
    assert [len(part) for part in first[2:]] == [len(part) for part in second[2:]] == [5, 5, 5, 5]
    assert sorted(x for rank in (first, second) for part in rank[2:] for x in part) == list(map(float, range(20, 60)))


def test_another_number_of_workers_resumes_from_the_states_of_all(tmp_path):
    job, strategy = task(), pl.BlockMomentum(period=4, codec=pl.codecs.OneBit(), optimizer_state="average", delay=1)

    def train(rank, batches, state=None):
        model = job.build()
        with pl.attach(model, job.optimizer(model.parameters()), strategy) as session:
            if state is not None:
                session.load_state_dict(state)
            for x, y in session.shard(batches):
                session.optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                session.step()
            saved = session.state_dict()
        torch.save(saved, tmp_path / f"state-{rank}")
        return vector(model).tolist()

    forked.run(3, lambda rank: train(rank, minibatches(job)[:9]), tmp_path)
    states = [torch.load(tmp_path / f"state-{rank}") for rank in range(3)]
    fewer = pl.resized(states, 2)
    assert all(state["step"] == 9 for state in fewer)
    (tmp_path / "fewer").mkdir()
    first, second = forked.run(2, lambda rank: train(rank, minibatches(job)[9:], fewer[rank]), tmp_path / "fewer")
    assert first == second and torch.tensor(first).isfinite().all()
