"""What differs between ranks is found and named: settings, learning rates, parameters, and where their loops are."""

from __future__ import annotations

import gc
import os
import re
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo  # torch imports it with the first optimizer; once here is faster than in every rank.
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.session.ending import DifferentRanks
from paceline.session.session import UnclosedSession
from tests.dist import forked

pytestmark = pytest.mark.dist

BATCHES = list(torch.randn(8, 6, 3, generator=torch.Generator().manual_seed(1)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def sgd(model: nn.Module, lr: float = 0.1, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, **settings)


def step(session: pl.Session, model: nn.Module, batch: torch.Tensor) -> None:
    session.optimizer.zero_grad()
    model(batch).square().mean().backward()
    session.step()


def vector(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


DIFFERENT = {
    "lr": (
        lambda rank, model: pl.attach(model, sgd(model, lr=0.1 + 0.1 * rank), pl.AllReduceSGD()),
        "the optimizer's lr is 0.1 on rank 0 and 0.2 on rank 1",
    ),
    "optimizer": (
        lambda rank, model: pl.attach(
            model, [sgd(model), torch.optim.Adam(model.parameters())][rank], pl.AllReduceSGD()
        ),
        "optimizer is SGD on rank 0 and Adam on rank 1",
    ),
    "strategy": (
        lambda rank, model: pl.attach(model, sgd(model), [pl.AllReduceSGD(), pl.PeriodicAveraging(4)][rank]),
        "strategy is AllReduceSGD on rank 0 and PeriodicAveraging on rank 1",
    ),
    "period": (
        lambda rank, model: pl.attach(model, sgd(model), pl.PeriodicAveraging(4 + rank)),
        "PeriodicAveraging's period is 4 on rank 0 and 5 on rank 1",
    ),
    "codec": (
        lambda rank, model: pl.attach(model, sgd(model), pl.AllReduceSGD([None, pl.codecs.OneBit()][rank])),
        "AllReduceSGD's codec is None on rank 0 and OneBit on rank 1",
    ),
    "accumulate": (
        lambda rank, model: pl.attach(model, sgd(model), pl.AllReduceSGD(), accumulate=1 + rank),
        "accumulate is 1 on rank 0 and 2 on rank 1",
    ),
}


def test_settings_that_differ_between_ranks_are_named_at_the_start(tmp_path):
    def work(rank: int) -> list[str]:
        texts: list[str] = []
        for attach, _ in DIFFERENT.values():
            with pytest.raises(ValueError) as error:
                attach(rank, network())
            texts.append(str(error.value))
        return texts

    expected = [f"attach: the ranks differ: {text}; give the same on every rank" for _, text in DIFFERENT.values()]
    assert forked.run(2, work, tmp_path) == [expected, expected]


def regression(lr: float = 0.1, **settings: Any) -> pl.Task:
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
    given = {
        "model": network,
        "loss": lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        "data": [x, x[:, :2].sin()],
        "batch": 8,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=lr),
        "steps": 4,
    }
    return pl.Task(**{**given, **settings})


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def halved(step: int) -> float:
    return 0.5 if step == 3 else 1.0


def whole(step: int) -> float:
    return 1.0


OTHER_DATA = [torch.zeros(48, 3), torch.zeros(48, 2)]
DIFFERENT_IN_TRAIN: dict[str, tuple[Any, str]] = {
    "strategy": (
        lambda rank: pl.train(regression(), [pl.AllReduceSGD(), pl.PeriodicAveraging(4)][rank]),
        "strategy is AllReduceSGD on rank 0 and PeriodicAveraging on rank 1",
    ),
    "period": (
        lambda rank: pl.train(regression(), pl.PeriodicAveraging(4 + rank)),
        "PeriodicAveraging's period is 4 on rank 0 and 5 on rank 1",
    ),
    "codec": (
        lambda rank: pl.train(regression(), pl.AllReduceSGD([None, pl.codecs.OneBit()][rank])),
        "AllReduceSGD's codec is None on rank 0 and OneBit on rank 1",
    ),
    "batch": (
        lambda rank: pl.train(regression(batch=8 + rank), pl.AllReduceSGD()),
        "Task's batch is 8 on rank 0 and 9 on rank 1",
    ),
    "seed": (
        lambda rank: pl.train(regression(seed=rank), pl.AllReduceSGD()),
        "Task's seed is 0 on rank 0 and 1 on rank 1",
    ),
    "steps": (
        lambda rank: pl.train(regression(steps=4 + rank), pl.AllReduceSGD()),
        "Task's steps is 4 on rank 0 and 5 on rank 1",
    ),
    "parameters": (
        lambda rank: pl.train(regression(model=[network, lambda: nn.Linear(3, 2)][rank]), pl.AllReduceSGD()),
        "the model's number of trainable parameters is 26 on rank 0 and 8 on rank 1",
    ),
    "schedule": (
        lambda rank: pl.train(
            regression(schedule=lambda step: 1.0 if rank == 0 or step < 3 else 0.5), pl.AllReduceSGD()
        ),
        "Task's schedule(3) is 1 on rank 0 and 0.5 on rank 1",
    ),
    "schedule's name": (
        lambda rank: pl.train(regression(schedule=[whole, halved][rank]), pl.AllReduceSGD()),
        "Task's schedule is whole on rank 0 and halved on rank 1",
    ),
    "data": (
        lambda rank: pl.train(regression(**[{}, {"data": OTHER_DATA}][rank]), pl.AllReduceSGD()),
        "the hash of the first minibatch is ",
    ),
    "nonfinite": (
        lambda rank: pl.train(regression(), pl.AllReduceSGD(), nonfinite=["skip", "stop"][rank]),
        "nonfinite is 'skip' on rank 0 and 'stop' on rank 1",
    ),
    "optimizer": (
        lambda rank: pl.train(regression(**[{}, {"optimizer": adam}][rank]), pl.AllReduceSGD()),
        "optimizer is SGD on rank 0 and Adam on rank 1",
    ),
    "lr": (
        lambda rank: pl.train(regression(lr=0.1 + 0.1 * rank), pl.PeriodicAveraging(4)),
        "the optimizer's lr is 0.1 on rank 0 and 0.2 on rank 1",
    ),
}


def test_settings_that_differ_between_the_ranks_of_a_launched_train_are_named_at_the_start(tmp_path):
    def work(rank: int) -> list[str]:
        texts: list[str] = []
        for train, _ in DIFFERENT_IN_TRAIN.values():
            with pytest.raises(ValueError) as error:
                train(rank)
            texts.append(str(error.value))
        return texts

    for texts in forked.run(2, work, tmp_path):
        for text, (name, (_, expected)) in zip(texts, DIFFERENT_IN_TRAIN.items(), strict=True):
            assert text.startswith(f"train: the ranks differ: {expected}"), name
            assert text.endswith("; give the same on every rank"), name


def test_a_learning_rate_that_one_rank_schedules_alone_is_named_while_the_ranks_train(tmp_path):
    def work(rank: int) -> None:
        model = network()
        with pl.attach(model, sgd(model), pl.AllReduceSGD()) as session:
            for i, batch in enumerate(session.shard(BATCHES)):
                if rank == 1 and i == 2:
                    session.optimizer.param_groups[0]["lr"] *= 0.5
                step(session, model, batch)

    for found in forked.run(2, work, tmp_path):
        assert found["error"].startswith(
            "ClusterError: the optimizer's lr is 0.1 on rank 0 and 0.05 on rank 1, at step 3: their steps would differ"
        )


AVERAGING = {
    "periodic averaging": pl.PeriodicAveraging(4),
    "block momentum": pl.BlockMomentum(period=4),
    "diloco in fragments": pl.DiLoCo(period=8, fragments=2),
    "with a delay": pl.PeriodicAveraging(4, delay=2),
}


def test_a_learning_rate_that_differs_in_a_sync_of_an_averaging_method_is_named_on_every_rank(tmp_path):
    def train(rank: int, strategy: pl.Strategy) -> None:
        model = network()
        with pl.attach(model, sgd(model), strategy) as session:
            for i, batch in enumerate(session.shard(BATCHES)):
                if i == 2:
                    session.optimizer.param_groups[0]["lr"] *= 1.0 - 0.5 * rank
                step(session, model, batch)

    def work(rank: int) -> list[str]:
        texts: list[str] = []
        for strategy in AVERAGING.values():
            with pytest.raises(pl.ClusterError) as error:
                train(rank, strategy)
            texts.append(str(error.value))
        return texts

    for texts in forked.run(2, work, tmp_path):
        for name, text in zip(AVERAGING, texts, strict=True):
            expected = "the optimizer's lr is 0.1 on rank 0 and 0.05 on rank 1, in the sync after step 3: their steps"
            assert text.startswith(expected), name


def test_a_rank_whose_data_has_ended_need_not_follow_the_schedule(tmp_path):
    def work(rank: int) -> list[float]:
        model = network()
        with pl.attach(model, sgd(model), pl.PeriodicAveraging(4)) as session:
            for batch in BATCHES[: 8 - 3 * rank]:
                session.count(len(batch))
                session.optimizer.param_groups[0]["lr"] *= 0.9
                step(session, model, batch)
        return vector(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DifferentRanks)
        one, two = forked.run(2, work, tmp_path)
    assert one == two and len(one) == 26


def test_another_setting_that_differs_between_the_local_steps_of_ranks_is_a_warning_at_the_end(tmp_path):
    def work(rank: int) -> list[Any]:
        model = network()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pl.attach(model, sgd(model), pl.PeriodicAveraging(4)) as session:
                for batch in session.shard(BATCHES):
                    session.optimizer.param_groups[0]["momentum"] = 0.9 - 0.1 * rank
                    step(session, model, batch)
        return [[str(w.message) for w in caught if w.category is DifferentRanks], vector(model)]

    (texts, first), (_, second) = forked.run(2, work, tmp_path)
    assert first == second
    assert texts == [
        "the ranks ended with different settings: the optimizer's momentum is 0.9 on rank 0 and 0.8 on rank 1"
    ]


def test_models_that_differ_at_the_end_are_an_error_that_names_a_parameter(tmp_path):
    def work(rank: int) -> None:
        model = network()
        with pl.attach(model, sgd(model), pl.AllReduceSGD()) as session:
            for batch in session.shard(BATCHES):
                step(session, model, batch)
                if rank == 1:
                    with torch.no_grad():
                        model[2].weight.mul_(1.01)

    for found in forked.run(2, work, tmp_path):
        assert "rank 1 ends with other parameters than rank 0, in '2.weight'" in found["error"]


def test_models_that_differ_by_rounding_are_united_with_a_warning(tmp_path):
    def work(rank: int) -> list[Any]:
        model = network()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pl.attach(model, sgd(model), pl.AllReduceSGD()) as session:
                for batch in session.shard(BATCHES):
                    step(session, model, batch)
                with torch.no_grad():
                    model[2].weight.mul_(1 + 1e-6 * rank)
        return [[str(w.message) for w in caught if w.category is DifferentRanks], vector(model)]

    (texts, first), (_, second) = forked.run(2, work, tmp_path)
    assert first == second
    assert texts == ["the ranks' models differed by rounding: all ranks took that of rank 0"]


def leaves_early(rank: int, session: pl.Session, model: nn.Module) -> None:
    for _ in range(2):
        for i, batch in enumerate(session.shard(BATCHES)):
            if rank == 1 and i == 3:
                break
            step(session, model, batch)


def evaluates_alone(rank: int, session: pl.Session, model: nn.Module) -> None:
    for i, batch in enumerate(session.shard(BATCHES)):
        step(session, model, batch)
        if rank == 1 and i == 2:
            with torch.no_grad():
                for part in session.shard(BATCHES):
                    model(part)


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (leaves_early, "rank 1 was reading session.shard, at step 3 of AllReduceSGD, in pass 2 over session.shard"),
        (
            evaluates_alone,
            "rank 1 was reading session.shard to evaluate, at step 3 of AllReduceSGD, in pass 2 over session.shard",
        ),
    ],
)
def test_loops_that_diverge_are_described_in_the_users_terms(loop, expected, tmp_path):
    def work(rank: int) -> None:
        model = network()
        with pl.attach(model, sgd(model), pl.AllReduceSGD()) as session:
            loop(rank, session, model)

    mine = "rank 0 was in backward(), at step 3 of AllReduceSGD, in pass 1 over session.shard"
    for found in forked.run(2, work, tmp_path):
        assert found["error"].startswith(f"ClusterError: the loops of the ranks have diverged: {mine}; {expected}.")


def fails(rank: int, session: pl.Session, model: nn.Module) -> None:
    for i, batch in enumerate(session.shard(BATCHES)):
        step(session, model, batch)
        if rank == 1 and i == 2:
            raise OverflowError("a mistake of my own")


def stays_away(rank: int, session: pl.Session, model: nn.Module) -> None:
    for i, batch in enumerate(session.shard(BATCHES)):
        if rank == 1 and i == 2:
            session.job.store.wait(["the other one has given up"])
        try:
            step(session, model, batch)
        except pl.ClusterError:
            session.job.store.set("the other one has given up", "")
            raise


DIVERGED = "the loops of the ranks have diverged"
FAILED = "an exchange failed"
BETWEEN_HOSTS = [
    (leaves_early, pl.AllReduceSGD(), DIVERGED, "in backward(), at step 3", "reading session.shard, at step 3", 2),
    (
        fails,
        pl.AllReduceSGD(),
        FAILED,
        "in backward(), at step 3",
        "gone (OverflowError: a mistake of my own), at step 3",
        1,
    ),
    (
        stays_away,
        pl.AllReduceSGD(),
        FAILED,
        "in backward(), at step 2",
        "in its own code (before that, reading session.shard), at step 2",
        1,
    ),
]


def set_apart(rank: int) -> None:
    """Let this process take itself for one of another host's, where no shared memory joins it to the others."""
    readlink = os.readlink

    def other_network(path: Any, **more: Any) -> str:
        return f"net:[{rank}]" if path == "/proc/self/ns/net" else readlink(path, **more)

    os.readlink = other_network


@pytest.mark.parametrize(
    ("loop", "strategy", "what", "mine", "theirs", "number"),
    BETWEEN_HOSTS,
    ids=[case[0].__name__ for case in BETWEEN_HOSTS],
)
def test_what_each_rank_did_when_an_exchange_between_hosts_failed_is_described(
    loop, strategy, what, mine, theirs, number, tmp_path
):
    def work(rank: int) -> None:
        set_apart(rank)
        model = network()
        with pl.attach(model, sgd(model), strategy, timeout_s=3.0) as session:
            assert not session.job.is_one_host
            loop(rank, session, model)

    found = forked.run(2, work, tmp_path)
    name = type(strategy).__name__
    expected = (
        f"ClusterError: {what}: rank 0 was {mine} of {name}, in pass 1 over session.shard; "
        f"rank 1 was {theirs} of {name}, in pass {number} over session.shard."
    )
    assert found[0]["error"].startswith(expected)
    if what == DIVERGED:
        assert found[1]["error"].startswith(expected)


def test_a_session_that_is_never_closed_is_a_warning(tmp_path):
    def work(rank: int) -> list[str]:
        model = network()
        session = pl.attach(model, sgd(model), pl.PeriodicAveraging(4))
        for batch in BATCHES[:3]:
            step(session, model, batch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del session
            gc.collect()
        return [str(w.message) for w in caught if w.category is UnclosedSession]

    for [text] in forked.run(2, work, tmp_path):
        assert text.startswith("a session of PeriodicAveraging took 3 steps and was never closed: this rank missed")


def test_a_second_session_of_an_attached_model_is_refused():
    model = network()
    expected = "an open session of AllReduceSGD already trains its parameter '0.weight'"
    with pl.attach(model, sgd(model), pl.AllReduceSGD()), pytest.raises(ValueError, match=re.escape(expected)):
        pl.attach(model[0], sgd(model[0]), pl.PeriodicAveraging(4))
    with pl.attach(model, sgd(model), pl.AllReduceSGD()):
        pass


def test_a_model_in_distributed_data_parallel_is_refused_in_either_order(tmp_path):
    def work(rank: int) -> list[str]:
        texts: list[str] = []
        model = network()
        try:
            pl.attach(DistributedDataParallel(model), sgd(model), pl.AllReduceSGD())
        except ValueError as error:
            texts.append(str(error))
        model = network()
        try:
            with pl.attach(model, sgd(model), pl.AllReduceSGD()) as session:
                step(session, DistributedDataParallel(model), BATCHES[0])
        except RuntimeError as error:
            texts.append(str(error))
        return texts

    for before, after in forked.run(2, work, tmp_path):
        assert before.startswith("attach(DistributedDataParallel): the model is a DistributedDataParallel: both would")
        assert after.startswith("the attached Sequential is wrapped in DistributedDataParallel: both would exchange")


ASYNCHRONOUS = {
    "gossip": pl.Gossip(),
    "asgd": pl.ASGD(period=2, servers=1),
    "sandblaster": pl.Sandblaster(shards=1),
    "warm start": pl.Then(pl.AllReduceSGD(), pl.Downpour(servers=1), steps=2),
    "ends in step": pl.Then(pl.Gossip(), pl.PeriodicAveraging(2), steps=3),
}


def statistics(model: nn.Module) -> dict[str, float]:
    return {"mean": float(model[1].running_mean.sum()), "batches": float(model[1].num_batches_tracked)}


def normalised(**settings: Any) -> pl.Task:
    return regression(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        steps=12,
        evaluate=statistics,
        **settings,
    )


def test_an_asynchronous_train_ends_with_the_same_buffers_on_every_rank_and_in_its_evaluation(tmp_path):
    names = ["gossip", "sandblaster"]

    def work(rank: int) -> list[Any]:
        runs = [pl.train(normalised(), ASYNCHRONOUS[name]) for name in names]
        return [[run.model[1].running_mean.tolist(), statistics(run.model), run.final] for run in runs]

    for name, mine, theirs in zip(names, *forked.run(2, work, tmp_path), strict=True):
        assert mine[:2] == theirs[:2], name
        assert mine[2] == mine[1], name


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_an_asynchronous_simulation_ends_with_the_same_buffers_on_every_worker(name):
    run = pl.simulate(normalised(), ASYNCHRONOUS[name], pl.Cluster(workers=2))
    one, two = (state["slots"]["model"]["values"]["buffers"] for state in run.states)
    assert all(map(torch.equal, one, two))
    assert statistics(run.model) == run.final


@pytest.mark.parametrize("strategy", [pl.Gossip(), pl.ASGD(period=2, servers=1)], ids=lambda s: type(s).__name__)
def test_buffers_are_the_mean_of_all_workers_at_the_end_of_an_asynchronous_method(strategy, tmp_path):
    def work(rank: int) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        own = model[1].running_mean
        with pl.attach(model, sgd(model), strategy) as session:
            for batch in session.shard(BATCHES):
                step(session, model, batch)
            before = own.tolist()
        return [before, own.tolist(), vector(model), int(model[1].num_batches_tracked)]

    found = forked.run(2, work, tmp_path)
    (mine, after, params, batches), (theirs, *same) = found
    assert mine != theirs
    assert [after, params, batches] == same
    assert batches == len(BATCHES)
    assert after == pytest.approx([(a + b) / 2 for a, b in zip(mine, theirs, strict=True)], abs=1e-6)
