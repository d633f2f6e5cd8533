"""attach: a strategy in a user's own loop."""

from __future__ import annotations

import copy
import time
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.session.loading import EmptyShard
from tests.dist import forked

pytestmark = pytest.mark.dist

ORDERED = {
    "all-reduce": pl.AllReduceSGD(),
    "one-bit": pl.AllReduceSGD(codec=pl.codecs.OneBit()),
    "averaging": pl.PeriodicAveraging(period=4),
    "block-momentum": pl.BlockMomentum(period=7),
    "block-momentum, kept": pl.BlockMomentum(period=7, optimizer_state="keep"),
}


def task(steps: int = 22, batch: int = 30) -> pl.Task:
    """30 samples for 4 workers: parts of 8 and 7, so that weights matter."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(200, 12, generator=generator), torch.randint(0, 5, (200,), generator=generator)
    return pl.Task(
        model=lambda: nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 5)),
        loss=lambda model, part: F.cross_entropy(model(part[0]), part[1]),
        data=(x, y),
        batch=batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
        steps=steps,
        bucket_bytes=1024,  # several buckets
    )


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def minibatches(job: pl.Task) -> list[tuple[torch.Tensor, ...]]:
    """The job's global minibatches, as a user's loader would yield them."""
    return [job.part(step, 0, 1) for step in range(job.total_steps)]


def attached(job: pl.Task, strategy: pl.Strategy) -> torch.Tensor:
    """The loop that a user would write."""
    model = job.build()
    optimizer = job.optimizer(model.parameters()) if strategy.needs.optimizer else None
    with pl.attach(model, optimizer, strategy, bucket_bytes=1024, ordered=True) as session:
        for x, y in session.shard(minibatches(job)):
            session.optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            session.step()
    return vector(model)


@pytest.mark.parametrize("name", ORDERED)
def test_simulator_processes_and_attached_loop_end_with_the_same_bits(name, tmp_path):
    simulated = pl.simulate(task(), ORDERED[name], pl.Cluster(workers=4)).params
    trained = pl.train(task(), ORDERED[name], 4).params
    in_a_loop = forked.run(4, lambda rank: attached(task(), ORDERED[name]).tolist(), tmp_path)
    assert torch.equal(simulated, trained)
    for vector_of_rank in in_a_loop:
        assert simulated.tolist() == vector_of_rank


@pytest.mark.parametrize("name", ["all-reduce", "one-bit", "averaging", "block-momentum, kept", "server"])
def test_one_worker_needs_no_launcher_and_equals_the_plain_loop(name):
    strategy = pl.ParameterServer(rule=pl.rules.Sgd(lr=0.2), servers=1) if name == "server" else ORDERED[name]
    job = task()
    model = job.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2) if name == "server" else job.optimizer(model.parameters())
    for x, y in minibatches(job):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    # Block momentum subtracts and adds the same vector, which rounds; the others do not change one worker's bits.
    tolerance = 1e-6 if "block-momentum" in name else 0.0
    assert torch.allclose(attached(job, strategy), vector(model), rtol=tolerance, atol=tolerance)


def test_every_rank_sees_its_part_of_each_minibatch_and_each_sample_once(tmp_path):
    def work(rank):
        torch.manual_seed(rank)  # Ranks with different seeds must still shuffle in the same order.
        model = nn.Linear(1, 1)
        dataset = TensorDataset(torch.arange(103.0).unsqueeze(1))
        loader = DataLoader(dataset, batch_size=20, shuffle=True)
        seen = []
        with pl.attach(
            model, torch.optim.SGD(model.parameters(), lr=0.0), pl.AllReduceSGD(), initial="broadcast"
        ) as session:
            for _ in range(2):
                for (x,) in session.shard(loader):
                    model(x).sum().backward()
                    session.step()
                    seen.append(x.view(-1).tolist())
        return seen

    ranks = forked.run(3, work, tmp_path)
    # The last minibatch of an epoch has 3 samples, one for each; every part differs by at most one in size.
    for step in zip(*ranks, strict=True):
        sizes = [len(part) for part in step]
        assert max(sizes) - min(sizes) <= 1
    epochs = [[sorted(x for r in ranks for part in r[e * 6 : (e + 1) * 6] for x in part)] for e in range(2)]
    assert epochs == [[list(map(float, range(103)))]] * 2
    assert ranks[0][:6] != ranks[0][6:], "every epoch has another order"


def test_ranks_that_read_different_minibatches_get_an_error(tmp_path):
    def work(rank):
        model = nn.Linear(1, 1)
        with pl.attach(
            model, torch.optim.SGD(model.parameters(), lr=0.1), pl.AllReduceSGD(), initial="broadcast"
        ) as session:
            for (x,) in session.shard([(torch.full((4, 1), float(rank)),)]):
                model(x).sum().backward()
                session.step()

    for result in forked.run(2, work, tmp_path):
        assert "the first minibatch of rank 1 differs from that of rank 0" in result["error"]


@pytest.mark.parametrize("name", [*ORDERED, "server"])
def test_unequal_data_ends_cleanly_with_equal_models(name, tmp_path):
    strategy = pl.ParameterServer(rule=pl.rules.Sgd(lr=0.05), servers=1) if name == "server" else ORDERED[name]

    def work(rank):
        job = task()
        model = job.build()
        optimizer = job.optimizer(model.parameters()) if strategy.needs.optimizer else None
        with pl.attach(model, optimizer, strategy) as session:
            for step in range((9, 13, 0)[rank]):  # Rank 2 never has any data.
                x, y = job.part(step, rank, 3)
                session.optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                session.step()
        return vector(model).tolist()

    results = forked.run(3, work, tmp_path)
    assert all(isinstance(r, list) for r in results), results
    if name != "server":
        assert results[0] == results[1] == results[2]


def test_a_worker_that_never_gets_a_sample_gets_a_warning_and_takes_part(tmp_path):
    def work(rank):
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), pl.AllReduceSGD()) as session:
                for (x,) in session.shard(DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)):
                    model(x).sum().backward()
                    session.step()
        return [[str(w.message) for w in caught if w.category is EmptyShard], vector(model).tolist()]

    results = forked.run(3, work, tmp_path)
    assert [len(warned) for warned, _ in results] == [0, 0, 1]
    assert "rank 2 got no sample out of 2 minibatches" in results[2][0][0]
    assert results[0][1] == results[1][1] == results[2][1]


def test_a_loader_without_minibatches_is_refused(tmp_path):
    def work(rank):
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), pl.AllReduceSGD()) as session:
            list(session.shard([]))

    for result in forked.run(2, work, tmp_path):
        assert "the loader yielded no minibatch" in result["error"]


def test_different_shapes_of_models_raise_an_error_at_the_start(tmp_path):
    def work(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5 + (rank == 1)))
        pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), pl.AllReduceSGD())

    for result in forked.run(3, work, tmp_path):
        assert result["error"] == (
            "ValueError: the models differ: rank 0 has '1.weight' of shape [5, 4] and torch.float32, "
            "rank 1 has '1.weight' of shape [6, 4] and torch.float32"
        )


def test_different_initial_values_raise_an_error_or_are_broadcast(tmp_path):
    def work(rank, initial="equal"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
        if rank == 2:
            nn.init.ones_(model[1].bias)
        with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), pl.AllReduceSGD(), initial=initial):
            pass
        return vector(model).tolist()

    for result in forked.run(3, work, tmp_path / "equal"):
        assert "rank 2 starts from other values of '1.bias' than rank 0 (1 of 4 tensors differ)" in result["error"]
    one, two, three = forked.run(3, lambda rank: work(rank, "broadcast"), tmp_path / "broadcast")
    assert one == two == three


def poisoned(policy: str, strategy: pl.Strategy, rank: int) -> dict[str, object]:
    """Rank 1 has a NaN in the gradient of its second layer at step 3."""
    job = task()
    model = job.build()
    optimizer = job.optimizer(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pl.attach(model, optimizer, strategy, nonfinite=policy) as session:
            for step, (x, y) in enumerate(session.shard(minibatches(job)[:8])):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                if step == 3 and rank == 1:
                    loss = loss + model[2].bias.sum() * torch.nan
                loss.backward()
                session.step()
            skipped = session.skipped
    warned = [str(w.message) for w in caught if w.category is pl.NonFiniteGradient]
    return {
        "finite": bool(vector(model).isfinite().all()),
        "warned": warned,
        "skipped": skipped,
        "vector": vector(model).tolist(),
    }


@pytest.mark.parametrize("name", ORDERED)
def test_a_nan_gradient_is_reported_and_skipped(name, tmp_path):
    results = forked.run(2, lambda rank: poisoned("skip", ORDERED[name], rank), tmp_path)
    assert results[1]["warned"] == [
        "rank 1 has NaN or infinity in the gradient of '2.bias' at step 3; the step was skipped"
    ]
    assert results[0]["warned"] == []
    assert results[0]["finite"] and results[1]["finite"]
    assert results[0]["vector"] == results[1]["vector"]
    # If gradients are exchanged, all ranks skip the step; if not, only the rank with the NaN.
    assert [r["skipped"] for r in results] == ([1, 1] if "all-reduce" in name or "one-bit" in name else [0, 1])


@pytest.mark.parametrize("name", ["all-reduce", "averaging"])
def test_a_nan_gradient_stops_the_run_or_passes_on_request(name, tmp_path):
    stopped = forked.run(2, lambda rank: poisoned("stop", ORDERED[name], rank), tmp_path / "stop")
    assert stopped[1]["error"].startswith(
        "FloatingPointError: rank 1 has NaN or infinity in the gradient of '2.bias' at step 3"
    )
    assert "error" in stopped[0], "the other rank hears of it, from the same exchange or because its peer is dead"
    passed = forked.run(2, lambda rank: poisoned("pass", ORDERED[name], rank), tmp_path / "pass")
    assert not passed[0]["finite"] and not passed[0]["warned"]


@pytest.mark.parametrize("name", ["all-reduce", "one-bit", "averaging"])
def test_grad_scaler_sees_the_overflow_of_one_rank_and_all_ranks_stay_in_step(name, tmp_path):
    def work(rank):
        job = task()
        model = job.build()
        optimizer = job.optimizer(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        warnings.simplefilter("ignore", pl.NonFiniteGradient)
        with pl.attach(model, optimizer, ORDERED[name]) as session:
            for step, (x, y) in enumerate(session.shard(minibatches(job))):
                session.optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(x), y)
                if step == 5 and rank == 1:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
                scaler.step(session.optimizer)
                scaler.update()
        return {"scale": scaler.get_scale(), "vector": vector(model).tolist()}

    results = forked.run(2, work, tmp_path)
    scales = [r["scale"] for r in results]
    # An exchanged gradient overflows on all ranks, a local one only on its own.
    assert scales == ([512.0, 512.0] if name != "averaging" else [1024.0, 512.0])
    assert results[0]["vector"] == results[1]["vector"]
    assert all(torch.tensor(r["vector"]).isfinite().all() for r in results)


def test_scaled_gradients_give_the_same_steps_as_unscaled_ones(tmp_path):
    def work(rank, strategy, scaled):
        job = task()
        model = job.build()
        optimizer = job.optimizer(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000, enabled=scaled)
        with pl.attach(model, optimizer, strategy) as session:
            for x, y in session.shard(minibatches(job)):
                optimizer.zero_grad()
                scaler.scale(F.cross_entropy(model(x), y)).backward()
                scaler.unscale_(session.optimizer) if session.loop.replica.cursor.step % 2 else None
                scaler.step(session.optimizer)
                scaler.update()
        return vector(model).tolist()

    for name in ("all-reduce", "averaging"):
        plain = forked.run(2, lambda rank, n=name: work(rank, ORDERED[n], False), tmp_path / f"{name}-plain")
        scaled = forked.run(2, lambda rank, n=name: work(rank, ORDERED[n], True), tmp_path / f"{name}-scaled")
        # A scale of 2^10 changes no bit of a gradient that neither overflows nor underflows.
        assert plain == scaled


@pytest.mark.parametrize("name", ["all-reduce", "averaging"])
@pytest.mark.parametrize("how", ["accumulate", "no_sync"])
def test_accumulated_gradients_equal_the_whole_minibatch(name, how, tmp_path):
    def work(rank):
        job = task(batch=32)
        model = job.build()
        optimizer = job.optimizer(model.parameters())
        with pl.attach(model, optimizer, ORDERED[name], accumulate=2 if how == "accumulate" else 1) as session:
            for x, y in session.shard(minibatches(job)):
                optimizer.zero_grad()
                half = len(x) // 2
                if how == "accumulate":
                    (F.cross_entropy(model(x[:half]), y[:half]) / 2).backward()
                else:
                    with session.no_sync():
                        (F.cross_entropy(model(x[:half]), y[:half]) / 2).backward()
                (F.cross_entropy(model(x[half:]), y[half:]) / 2).backward()
                session.step()
        return vector(model).tolist()

    whole = pl.simulate(task(batch=32), ORDERED[name], pl.Cluster(workers=2)).params
    for result in forked.run(2, work, tmp_path):
        assert torch.allclose(torch.tensor(result), whole, rtol=1e-4, atol=1e-5)


def test_an_unannounced_second_backward_is_refused(tmp_path):
    def work(rank):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), pl.AllReduceSGD()):
            model(torch.ones(3, 2)).sum().backward()
            model(torch.ones(3, 2)).sum().backward()

    for result in forked.run(2, work, tmp_path):
        assert "give attach(accumulate=2) or run all passes but the last `with session.no_sync()`" in result["error"]


def test_clipping_after_backward_sees_the_mean_gradient(tmp_path):
    def work(rank):
        job = task()
        model = job.build()
        optimizer = job.optimizer(model.parameters())
        norms = []
        with pl.attach(model, optimizer, pl.AllReduceSGD()) as session:
            for x, y in session.shard(minibatches(job)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
                session.step()
        return [norms, vector(model).tolist()]

    first, second = forked.run(2, work, tmp_path)
    assert first == second
    job = task()
    model = job.build()
    optimizer = job.optimizer(model.parameters())
    for x, y in minibatches(job):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert torch.allclose(vector(model), torch.tensor(first[1]), rtol=1e-4, atol=1e-5)


def test_the_sessions_optimizer_is_a_torch_optimizer():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    with pl.attach(model, optimizer, pl.PeriodicAveraging(period=2)) as session:
        assert isinstance(session.optimizer, torch.optim.Optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(session.optimizer, step_size=1, gamma=0.5)
        model(torch.ones(3, 2)).sum().backward()
        session.optimizer.step()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert session.optimizer.state_dict() == optimizer.state_dict()
        with pytest.raises(RuntimeError, match=r"would bypass the strategy: call session.step\(\)"):
            optimizer.step()
    optimizer.step()  # After the session the user may step again.


def test_an_optimizer_that_lacks_a_parameter_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"does not hold the parameter '1.weight'"):
        pl.attach(model, torch.optim.SGD(model[0].parameters(), lr=0.1), pl.AllReduceSGD())


@pytest.mark.parametrize("name", ORDERED)
def test_a_resumed_session_equals_an_unbroken_one(name, tmp_path):
    def work(rank):
        job = task()
        batches = minibatches(job)
        unbroken = attached(job, ORDERED[name])
        model = job.build()
        optimizer = job.optimizer(model.parameters())
        with pl.attach(model, optimizer, ORDERED[name], bucket_bytes=1024) as session:
            for i, (x, y) in enumerate(session.shard(batches)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                session.step()
                if i == 8:
                    state = session.state_dict()
        model = job.build()
        optimizer = job.optimizer(model.parameters())
        with pl.attach(model, optimizer, ORDERED[name], bucket_bytes=1024) as session:
            session.load_state_dict(state)
            for x, y in session.shard(batches[9:]):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                session.step()
        return torch.equal(vector(model), unbroken)

    assert forked.run(2, work, tmp_path) == [True, True]


def test_states_that_cannot_be_resumed_are_refused():
    job = task()

    def session(strategy, optimizer=True):
        model = job.build()
        return pl.attach(model, job.optimizer(model.parameters()) if optimizer else None, strategy)

    with session(pl.PeriodicAveraging()) as averaging:
        state = averaging.state_dict()
    with (
        session(pl.BlockMomentum()) as blocks,
        pytest.raises(ValueError, match="saved under PeriodicAveraging, and this run uses BlockMomentum"),
    ):
        blocks.load_state_dict(state)
    server = pl.ParameterServer(servers=1)
    refusal = r"load_state_dict\(\) under ParameterServer: .* give attach\(checkpoint="
    with session(server, optimizer=False) as served, pytest.raises(ValueError, match=refusal):
        served.load_state_dict(state)


def test_an_unused_optimizer_raises_a_warning_and_a_missing_one_an_error():
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="only the changes of its learning rate have an effect"):
        pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), pl.ParameterServer(servers=1)).close()
    with pytest.raises(
        ValueError, match=r"attach\(AllReduceSGD\): it needs an optimizer \(its workers take their own steps\)"
    ):
        pl.attach(model, None, pl.AllReduceSGD())


def test_published_parameters_can_be_evaluated_during_the_run():
    job = task()
    model = job.build()
    optimizer = job.optimizer(model.parameters())
    with pl.attach(model, optimizer, pl.BlockMomentum(period=5, momentum=0.5)) as session:
        for x, y in session.shard(minibatches(job)[:12]):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            session.step()
        trained = vector(model)
        with session.published():
            published = vector(model)
        assert torch.equal(vector(model), trained) and not torch.equal(published, trained)
        assert torch.equal(published, session.loop.replica.published)


def test_samples_counted_by_hand_have_the_same_weight_as_sharded_ones(tmp_path):
    def work(rank):
        job = task()
        model = job.build()
        optimizer = job.optimizer(model.parameters())
        with pl.attach(model, optimizer, pl.AllReduceSGD()) as session:
            for step in range(job.total_steps):
                x, y = job.part(step, rank, 4)  # 8, 8, 7 and 7 samples
                session.count(len(x))
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                session.step()
        return vector(model).tolist()

    simulated = pl.simulate(task(), pl.AllReduceSGD(), pl.Cluster(workers=4)).params.tolist()
    assert forked.run(4, work, tmp_path) == [simulated] * 4


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10.0).unsqueeze(1))


def test_a_loader_without_indices_is_read_whole_and_sliced(tmp_path):
    def work(rank):
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        seen = []
        with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.0), pl.AllReduceSGD()) as session:
            for x in session.shard(DataLoader(Stream(), batch_size=4)):
                seen.append(x.view(-1).tolist())
                model(x).sum().backward()
                session.step()
        return seen

    assert forked.run(2, work, tmp_path) == [[[0.0, 1.0], [4.0, 5.0], [8.0]], [[2.0, 3.0], [6.0, 7.0], [9.0]]]


def test_a_minibatch_without_a_part_for_each_worker_is_refused_under_accumulation(tmp_path):
    def work(rank):
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), pl.AllReduceSGD(), accumulate=2) as session:
            for i, (x,) in enumerate(session.shard(DataLoader(TensorDataset(torch.ones(9, 1)), batch_size=4))):
                model(x).sum().backward()
                if i % 2:
                    session.step()

    for result in forked.run(2, work, tmp_path):
        assert "a minibatch has 1 samples for 2 workers, and 2 minibatches make a step" in result["error"]


@pytest.mark.parametrize("name", ["all-reduce", "averaging"])
def test_buffers_are_broadcast_at_the_start_and_equal_at_the_end(name, tmp_path):
    def work(rank):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model[1].running_mean.fill_(float(rank))
        model[0].requires_grad_(False)
        with pl.attach(
            model, torch.optim.SGD(model[1:].parameters(), lr=0.1), ORDERED[name], initial="broadcast"
        ) as session:
            start = model[1].running_mean.tolist()
            for (x,) in session.shard(DataLoader(TensorDataset(torch.randn(64, 3)), batch_size=16)):
                session.optimizer.zero_grad()
                model(x).square().mean().backward()
                session.step()
        return [start, {k: v.tolist() for k, v in model.state_dict().items()}]

    first, second = forked.run(2, work, tmp_path)
    assert first[0] == second[0] == [0.0] * 4
    assert first[1] == second[1]


@pytest.mark.parametrize("name", ["all-reduce", "one-bit", "averaging", "block-momentum"])
@pytest.mark.parametrize("ends", ["an empty part", "one ends first"])
def test_clipping_scaling_and_schedules_stay_in_step_when_one_rank_has_no_data(name, ends, tmp_path):
    """Every rank runs the code around each step, or takes the model of another rank at the end."""

    def work(rank):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        data = TensorDataset(torch.randn(9, 3, generator=torch.Generator().manual_seed(1)))
        with pl.attach(model, optimizer, ORDERED[name]) as session:
            schedule = torch.optim.lr_scheduler.ExponentialLR(session.optimizer, 0.5)
            loader = DataLoader(data, batch_size=4)  # Minibatches of 4, 4 and 1: rank 1 has no part of the last.
            batches = session.shard(loader) if ends == "an empty part" else list(loader)[: 3 - rank]
            for (x,) in batches:
                optimizer.zero_grad()
                scaler.scale(model(x).square().mean()).backward()
                scaler.unscale_(session.optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(session.optimizer)
                scaler.update()
                schedule.step()
        return [vector(model).tolist(), optimizer.param_groups[0]["lr"]]

    first, second = forked.run(2, work, tmp_path)
    assert first[0] == second[0]
    assert ends == "one ends first" or first[1] == second[1]
    # Three clipped steps of at most lr * 0.1 * (1 + 0.9 + 0.81) each, never the 4096-fold ones of a scaled gradient.
    torch.manual_seed(0)
    assert (torch.tensor(first[0]) - vector(nn.Linear(3, 1))).norm() < 1.0


def test_evaluation_through_shard_counts_no_samples(tmp_path):
    def work(rank):
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        seen = []
        with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), pl.AllReduceSGD()) as session:
            for (x,) in session.shard([(torch.ones(4, 1),)]):
                model(x).sum().backward()
                session.step()
                with torch.no_grad():
                    for (held_out,) in session.shard([(torch.arange(3.0).unsqueeze(1),), (torch.full((1, 1), 9.0),)]):
                        seen += held_out.view(-1).tolist()
                assert session.loop.batch.samples is None
            for (x,) in session.shard([(torch.ones(4, 1),)]):
                with torch.no_grad():
                    for _ in session.shard([(torch.ones(2, 1),)] * 2):
                        break  # It leaves the evaluation, not the training.
                assert session.loop.batch.samples == len(x)
                model(x).sum().backward()
                session.step()
        return seen

    assert forked.run(2, work, tmp_path) == [[0.0, 1.0, 9.0], [2.0]]


def test_a_backward_pass_that_raised_has_no_effect(tmp_path):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise MemoryError("as a GPU would")

    def work(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), pl.AllReduceSGD()) as session:
            with session.no_sync(), pytest.raises(MemoryError):
                model[1](Fails.apply(model[0](torch.ones(3, 2)))).sum().backward()
            session.optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            session.step()
        return vector(model).tolist()

    first, second = forked.run(2, work, tmp_path)
    assert first == second and isinstance(first, list)


def test_the_sessions_optimizer_shares_what_the_users_optimizer_has_loaded():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    saved = copy.deepcopy(optimizer.state_dict())
    with pl.attach(model, optimizer, pl.AllReduceSGD()) as session:
        optimizer.load_state_dict(saved)
        session.optimizer.param_groups[0]["lr"] = 0.25
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert session.optimizer.state is optimizer.state


def test_an_optimizer_with_more_parameters_than_the_model_is_refused():
    model, other = nn.Linear(2, 2), nn.Linear(3, 1)
    with pytest.raises(ValueError, match=r"a parameter of shape \[1, 3\] that the model does not have"):
        pl.attach(model, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1), pl.AllReduceSGD())


def test_averages_of_half_precision_models_do_not_overflow(tmp_path):
    def work(rank):
        torch.manual_seed(0)
        model = nn.Linear(4, 1).half()
        with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.0), pl.PeriodicAveraging(period=64)) as session:
            for _ in range(64):
                session.count(1024)
                model(torch.ones(2, 4).half()).sum().backward()
                session.step()
        return vector(model).tolist()

    torch.manual_seed(0)
    start = vector(nn.Linear(4, 1).half()).tolist()
    assert forked.run(2, work, tmp_path) == [start, start]


def test_a_gradient_beyond_its_codec_is_skipped_like_a_nan(tmp_path):
    def work(rank):
        job = task()
        model = job.build()
        optimizer = job.optimizer(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1000)
        warns = pytest.warns(
            pl.NonFiniteGradient, match=r"beyond its codec: Fp16\(\) cannot encode .* fp16 ends at 65504"
        )
        with warns, pl.attach(model, optimizer, pl.AllReduceSGD(codec=pl.codecs.Fp16())) as session:
            for x, y in session.shard(minibatches(job)):
                optimizer.zero_grad()
                scaler.scale(F.cross_entropy(model(x), y)).backward()
                scaler.step(session.optimizer)
                scaler.update()
            skipped = session.skipped
        return [vector(model).tolist(), scaler.get_scale(), skipped]

    first, second = forked.run(2, work, tmp_path)
    assert first == second
    assert first[2] > 0 and first[1] == 2.0 ** (30 - first[2])
    assert torch.tensor(first[0]).isfinite().all()


def test_the_other_ranks_report_a_killed_worker_at_once(tmp_path):
    def work(rank):
        job = task(steps=10_000)
        model = job.build()
        optimizer = job.optimizer(model.parameters())
        began = time.monotonic()
        try:
            with pl.attach(model, optimizer, pl.AllReduceSGD()) as session:
                for step in range(job.total_steps):
                    x, y = job.part(step, rank, 3)
                    if rank == 1 and step == 50:
                        forked.kill_myself()
                    began = time.monotonic()
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    session.step()
        except pl.PeerLost as error:
            return [error.rank, time.monotonic() - began]

    first, killed, third = forked.run(3, work, tmp_path)
    assert killed == {"error": "no result, exit code -9"}
    # A survivor may also learn of it from another survivor that has already failed.
    assert 1 in (first[0], third[0])
    # It takes a fraction of a second on an idle machine; the timeout is 30 minutes.
    assert first[1] < 3.0 and third[1] < 3.0
