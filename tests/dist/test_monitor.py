"""Monitors of real processes: forked by train, or in a user's own loop, on one host or on several."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.monitor.ledger import Report
from tests.dist import forked
from tests.dist.test_agreement import network, set_apart, sgd, step
from tests.laws.every import STRATEGIES
from tests.laws.tasks import quadratic
from tests.test_monitor import Kept

NAMES = [
    "all-reduce-sgd",
    "all-reduce-sgd by one-bit",
    "periodic-averaging",
    "easgd",
    "parameter-server",
    "strom, dense",
]
BATCHES = list(torch.randn(23, 6, 3, generator=torch.Generator().manual_seed(1)))


def silent(line: str) -> None:
    """Print nothing."""


def check_shares(reports: list[Report]) -> None:
    """No second counts twice, and only computing makes samples."""
    for report in reports:
        for f in report.workers.values():
            assert min(f.compute, f.encode, f.wait, f.transfer) >= -1e-9
            assert f.compute + f.encode + f.wait + f.transfer <= f.seconds + 1e-9
            assert (f.compute > 0) == (f.samples > 0)


@pytest.mark.parametrize("name", NAMES)
def test_forked_workers_report_the_bytes_and_samples_of_the_simulator_after_the_same_syncs(name: str, tmp_path: Path):
    task = quadratic(steps=12, batch=4, dtype=torch.float32, evaluate=lambda model: {"norm": model.w.norm().item()})
    strategy = STRATEGIES[name].strategy
    real, simulated, kept = pl.Statistics(3, out=silent), pl.Statistics(3, out=silent), Kept(every=4)
    path = tmp_path / "metrics.jsonl"
    run = pl.train(task, strategy, 2, monitor=[real, kept, pl.Recorder(path, every=4)])
    pl.simulate(task, strategy, pl.Cluster(workers=2), monitor=simulated)
    check_shares(real.reports)
    assert real.reports[-1].missing == [] and real.reports[-1].is_total
    assert real.reports[-1].total.nbytes == simulated.reports[-1].total.nbytes
    if strategy.needs.ordered:  # Otherwise what a worker does depends on the speed of all.
        for mine, other in zip(real.reports, simulated.reports, strict=True):
            assert mine.syncs == other.syncs
            for f, g in zip(mine.workers.values(), other.workers.values(), strict=True):
                assert (f.nbytes, f.samples, f.syncs) == (g.nbytes, g.samples, g.syncs)
    assert real.reports[-1].total.samples == 12 * 4
    evaluated = [record for record in kept.records if record["kind"] == "evaluation"]
    assert [e["values"] for e in evaluated] == [e.values for e in run.trace.evaluations]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for name in ("kind", "step", "samples", "loss", "values"):
        assert [line.get(name) for line in lines[1:-1]] == [record.get(name) for record in kept.records]
    # On servers a worker takes as many steps as its speed allows.
    assert kept.steps()[-1]["step"] in (range(1, 13) if strategy.servers else (12,)) and lines[-1]["failed"] is False


def test_a_first_worker_that_is_killed_goes_on_reporting_when_it_was_replaced(tmp_path: Path):
    task, flag = quadratic(steps=40, batch=6, samples=240), tmp_path / "killed"

    def loss(model: Any, batch: Any) -> Any:
        if multiprocessing.current_process().name == "worker-0" and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return task.loss(model, batch)

    kept, statistics = Kept(every=1), pl.Statistics(2, out=silent)
    strategy = pl.ParameterServer(rule=pl.rules.Sgd(lr=0.01), servers=1)
    pl.train(replace(task, loss=loss), strategy, 2, monitor=[kept, statistics], replacements=1)
    assert flag.exists() and kept.said == ["begin 2", "end"]
    check_shares(statistics.reports)
    assert statistics.reports[-1].workers[1].samples > 0


def test_a_failing_worker_ends_the_monitors_of_its_parent(tmp_path: Path):
    def loss(model: Any, batch: Any) -> Any:
        raise OverflowError("a mistake of my own")

    kept = Kept()
    with pytest.raises(pl.ClusterError, match="a mistake of my own"):
        pl.train(replace(quadratic(steps=4, batch=4), loss=loss), pl.AllReduceSGD(), 2, monitor=kept)
    assert kept.said == ["begin 2", "failed"]


def attached(rank: int, strategy: pl.Strategy, **slow: int) -> list[Any]:
    """What the monitors of a loop over 23 minibatches saw, on each rank; worker 1 may have more to compute."""
    model, kept, statistics = network(), Kept(every=5), pl.Statistics(5, out=silent)
    optimizer = sgd(model) if strategy.needs.optimizer else None
    with pl.attach(model, optimizer, strategy, loader=BATCHES, epochs=1, monitor=[kept, statistics]) as session:
        before = session.trace.bytes_sent()  # To find that all ranks have the same model.
        for batch in session.shard(BATCHES):
            loss = model(batch).square().mean()
            loss.backward()
            for _ in range(slow.get("work", 0) * rank):
                torch.randn(300, 300).matmul(torch.randn(300, 300))
            session.step(loss)
            session.optimizer.zero_grad()
        session.evaluated({"loss": float(loss.detach())})
    losses = [p.loss for p in session.trace.points]
    reports = [report.plain() for report in statistics.reports]
    return [kept.said, kept.records, reports, losses, session.trace.bytes_sent() - before]


@pytest.mark.parametrize("strategy", [pl.AllReduceSGD(), pl.PeriodicAveraging(period=2)], ids=str)
def test_a_users_loop_is_watched_on_its_first_rank(strategy: pl.Strategy, tmp_path: Path):
    results = forked.run(2, lambda rank: attached(rank, strategy), tmp_path)
    (said, records, raw, losses, sent), (others_said, others_records, others_reports, _, also_sent) = results
    assert said == ["begin 2", "end"] and not (others_said or others_records or others_reports)
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == [5, 10, 15, 20, 23]
    assert [record["samples"] for record in steps] == [30, 60, 90, 120, 138]
    assert steps[-1]["epoch"] == 1.0 and None not in losses
    assert steps[0]["loss"] == pytest.approx(sum(losses[:5]) / 5)
    [evaluation] = [record for record in records if record["kind"] == "evaluation"]
    assert evaluation["step"] == 23 and evaluation["samples"] == 138
    reports = [Report.of_plain(report) for report in raw]
    check_shares(reports)
    assert [report.syncs for report in reports[:-1]] == ([5, 10, 15, 20] if strategy == pl.AllReduceSGD() else [5, 10])
    assert [f.samples for f in reports[-1].workers.values()] == [69, 69]
    assert [f.nbytes for f in reports[-1].workers.values()] == [sent, also_sent]


@pytest.mark.parametrize("apart", [False, True], ids=["one host", "two hosts"])
def test_the_faster_worker_waits_for_the_slower_one(apart: bool, tmp_path: Path):
    """Between hosts there is no common clock."""

    def work(rank: int) -> list[Any]:
        if apart:
            set_apart(rank)
        return attached(rank, pl.AllReduceSGD(), work=10)

    (_, _, raw, *_), _ = forked.run(2, work, tmp_path)
    total = Report.of_plain(raw[-1])
    check_shares([total])
    assert total.workers[1].compute > 2 * total.workers[0].compute
    assert total.workers[0].wait > total.workers[1].wait


def test_a_session_that_fails_or_resumes_ends_and_restarts_its_monitors(tmp_path: Path):
    def work(rank: int) -> list[Any]:
        model, kept = network(), Kept()
        session = pl.attach(model, sgd(model), pl.PeriodicAveraging(period=2), monitor=kept)
        with pytest.raises(OverflowError), session:
            for batch in BATCHES[:3]:
                session.count(len(batch))
                step(session, model, batch)
            state = session.state_dict()
            raise OverflowError
        again, later = network(), Kept()
        with pl.attach(again, sgd(again), pl.PeriodicAveraging(period=2), monitor=later) as session:
            session.load_state_dict(state)
            for batch in BATCHES[3:6]:
                session.count(len(batch))
                step(session, again, batch)
        return [kept.said, [r["step"] for r in kept.steps()], later.said, [r["step"] for r in later.steps()]]

    [result] = forked.run(1, work, tmp_path)
    assert result == [["begin 1", "failed"], [1, 2, 3], ["begin 1", "end"], [4, 5, 6]]
