"""Checkpoints of methods whose workers do not wait for each other, on real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.checkpoint import Folder
from paceline.errors import ClusterError
from tests.dist import forked

pytestmark = pytest.mark.dist
SAMPLES, BATCH, EPOCHS = 96, 8, 2


class Counted(nn.Module):
    """Its gradient counts how often each sample was used."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return -(self.counts * rows).sum(1)


def task(*, dies_in: Path | None = None) -> pl.Task:
    """With a folder, the first worker kills all when there is a checkpoint in it."""
    computed = [0]

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        computed[0] += 1
        if dies_in is not None and computed[0] == 1:
            (dies_in.parent / f"pid-{os.getpid()}").touch()
        if dies_in is not None and computed[0] == 9 and multiprocessing.current_process().name == "worker-0":
            while not Folder(dies_in).complete():
                os.sched_yield()
            pids = {int(path.name[4:]) for path in dies_in.parent.glob("pid-*")}
            for pid in [*(pids - {os.getpid()}), os.getpid()]:
                os.kill(pid, signal.SIGKILL)
        return model(batch[0]).sum()

    rows = torch.eye(SAMPLES, dtype=torch.float64)
    return pl.Task(Counted, loss, [rows], BATCH, lambda p: torch.optim.SGD(p, lr=1.0), epochs=EPOCHS)


def test_a_killed_job_with_servers_continues_with_another_number_of_workers(tmp_path: Path):
    """All processes are killed, the servers by the end of their workers.  Each sample counts once an epoch."""
    saved = pl.Checkpoints(tmp_path / "run", every="3 steps")
    strategy = pl.ParameterServer(rule=pl.rules.Sgd(lr=1.0), gate=pl.gates.RoundRobin())
    with pytest.raises(ClusterError):
        pl.train(task(dies_in=tmp_path / "run"), strategy, 3, checkpoint=saved, replacements=0)
    newest = Folder(tmp_path / "run").newest()
    assert newest is not None
    assert (newest.manifest.workers, newest.manifest.shards) == (3, 2)
    run = pl.train(task(), strategy, 2, checkpoint=saved)
    assert torch.equal(run.params, torch.full((SAMPLES,), float(EPOCHS), dtype=torch.float64))
    end = Folder(tmp_path / "run").newest()
    assert end is not None
    assert torch.equal(end.model()["counts"], run.params)


def test_sigterm_saves_the_run_and_ends_it_and_the_same_command_continues_it(tmp_path: Path):
    """The signal goes to the process that has started the workers, and that passes it on."""
    folder = tmp_path / "run"

    def train(done: pl.Task) -> None:
        pl.train(done, pl.PeriodicAveraging(period=4, delay=2), 2, checkpoint=pl.Checkpoints(folder))

    def slow() -> pl.Task:
        quick = task()

        def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
            (tmp_path / "begun").touch()
            time.sleep(0.05)
            return quick.loss(model, batch)

        return replace(quick, loss=loss)

    process = forked.start(lambda: train(slow()), folder=tmp_path, out=tmp_path / "out", err=tmp_path / "err")
    try:
        while not (tmp_path / "begun").exists():
            assert process.is_alive(), (tmp_path / "err").read_text()
            time.sleep(0.01)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        process.join(30)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == 143
    newest = Folder(folder).newest()
    assert newest is not None
    assert 0 < newest.step < SAMPLES // BATCH * EPOCHS
    said = f"SIGTERM: the run is saved in {folder} before step {newest.step}; the same command continues it"
    assert said in (tmp_path / "err").read_text()
    train(task())
    end = Folder(folder).newest()
    assert end is not None
    counts = end.model()["counts"]
    assert torch.allclose(counts, torch.full_like(counts, EPOCHS / 2), atol=1e-9)


def test_a_loop_with_servers_continues_to_the_bit(tmp_path: Path):
    """One worker; an error ends it between two checkpoints.  The whole run is plain training."""
    rows = list(torch.randn(6, 2, 6, generator=torch.Generator().manual_seed(0)))

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def train(net: nn.Module, *, fails_at: int | None = None) -> None:
        done = 0
        strategy = pl.ParameterServer(rule=pl.rules.Momentum(lr=0.01), servers=1)
        with pl.attach(net, None, strategy, checkpoint=pl.Checkpoints(tmp_path, every="4 steps")) as session:
            for _ in session.epochs(2):
                for x in session.shard(rows):
                    if done == fails_at:
                        raise KeyError("stop")
                    session.optimizer.zero_grad()
                    net(x).square().mean().backward()
                    session.step()
                    done += 1

    whole = network()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.01, momentum=0.9)
    for x in rows * 2:
        optimizer.zero_grad()
        whole(x).square().mean().backward()
        optimizer.step()
    with pytest.raises(KeyError):
        train(network(), fails_at=10)
    newest = Folder(tmp_path).newest()
    assert newest is not None
    assert newest.step == 8
    rest = network()
    train(rest)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rest.parameters(), strict=True))


@pytest.mark.parametrize("strategy", [pl.Strom(None), pl.Gossip()], ids=lambda s: type(s).__name__)
def test_a_killed_job_without_a_server_continues_with_no_sample_lost_or_doubled(strategy: pl.Strategy, tmp_path: Path):
    """Under Strom each model has every sample once an epoch; under Gossip their mean has a third of it."""
    saved = pl.Checkpoints(tmp_path / "run", every="4 steps", keep=None)
    with pytest.raises(ClusterError):
        pl.train(task(dies_in=tmp_path / "run"), strategy, 3, checkpoint=saved, replacements=0)
    newest = Folder(tmp_path / "run").newest()
    assert newest is not None
    share = 3 if isinstance(strategy, pl.Gossip) else 1
    models = torch.stack([state["slots"]["model"]["values"]["params"] for state in newest.states()])
    total = models.sum(0) if share == 3 else models[0]
    steps = [state["step"] for state in newest.states()]
    assert total.sum() == sum(part(k, rank) for rank in range(3) for k in range(steps[rank]))
    run = pl.train(task(), strategy, 3, checkpoint=saved)
    assert torch.allclose(run.params * share, torch.full((SAMPLES,), float(EPOCHS), dtype=torch.float64), atol=1e-9)
    end = Folder(tmp_path / "run").newest()
    assert end is not None
    assert [state["step"] for state in end.states()] == [SAMPLES // BATCH * EPOCHS] * 3


def part(step: int, rank: int) -> int:
    return len(task().part(step, rank, 3)[0])
