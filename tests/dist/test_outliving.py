"""Synchronous training outlives the death of workers, on real processes: the others go on and end with one model."""

from __future__ import annotations

import hashlib
import importlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.codecs import OneBit
from tests.dist import forked
from tests.dist.test_decentralised import mortal

WORKERS, BATCH = 4, 12
SOURCES = {"PYTHONPATH": str(Path(pl.__file__).parents[1])}
METHODS: list[pl.Strategy] = [
    pl.AllReduceSGD(),
    pl.AllReduceSGD(codec=OneBit()),
    pl.PeriodicAveraging(period=4),
    pl.BlockMomentum(period=4, codec=OneBit()),
    pl.DiLoCo(period=4, delay=1, fragments=2),
    pl.EASGD(period=4),
]


def counting(steps: int, *, slow_s: float = 0.0) -> pl.Task:
    """Every sample has its own parameter, to which a step adds one part in so many samples."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = nn.Parameter(torch.zeros(steps * BATCH))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        assert isinstance(model, Sum)
        time.sleep(slow_s)
        return -(batch[0] @ model.total).mean()

    return pl.Task(
        model=Sum,
        loss=loss,
        data=[torch.eye(steps * BATCH)],
        batch=BATCH,
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        steps=steps,
    )


def regression(steps: int) -> pl.Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(480, 6, generator=generator)
    targets = inputs @ torch.randn(6, 2, generator=generator)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return pl.Task(
        model=lambda: nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)),
        loss=loss,
        data=[inputs, targets],
        batch=32,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.5),
        steps=steps,
        evaluate=lambda model: {"loss": float(loss(model, (inputs, targets)))},
    )


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The digest of the model of each worker that took part in the end of the last run."""
    digests: list[str] = []
    training = importlib.import_module("paceline.session.train")  # `paceline.session.train` is the function.
    take = training.take_model

    def taking(model: nn.Module, folder: Path, *, silent_s: float) -> None:
        digests[:] = [hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in sorted(folder.glob("model-*"))]
        take(model, folder, silent_s=silent_s)

    monkeypatch.setattr(training, "take_model", taking)
    yield digests


def died(run: pl.Run) -> list[dict[str, Any]]:
    return [d.values for d in run.trace.decisions if d.kind == "lost"]


def test_others_end_with_one_model_when_a_worker_is_killed(tmp_path: Path, models: list[str]):
    for i, strategy in enumerate(METHODS):
        task = regression(steps=24)
        pl.simulate(
            task, strategy, pl.Cluster(workers=WORKERS)
        )  # It compiles the kernels, here and not in each worker.
        deadly = mortal(task, tmp_path / f"{i}", lambda done: done == 9, signal.SIGKILL)
        run = pl.train(deadly, strategy, WORKERS, elastic=True, replacements=0)
        assert (tmp_path / f"{i}").exists(), strategy
        assert len(models) == WORKERS - 1 and len(set(models)) == 1, strategy
        assert [values["workers"] for values in died(run)] == [WORKERS - 1], strategy
        assert max(p.step for p in run.trace.points) == 23, strategy
        assert run.final["loss"] < 0.9 * task.evaluated(task.build())["loss"], strategy


def test_only_the_dead_workers_part_of_one_step_is_lost(tmp_path: Path, models: list[str]):
    """In the step of the death the others' samples make up the mean; after it each minibatch is cut into three."""
    task = counting(steps=20)
    run = pl.train(
        mortal(task, tmp_path / "flag", lambda done: done == 7, signal.SIGKILL),
        pl.AllReduceSGD(),
        WORKERS,
        elastic=True,
        replacements=0,
    )
    parts = [[run.params[task.part(k, r, WORKERS)[0].argmax(1)] for r in range(WORKERS)] for k in range(20)]
    for k, part in enumerate(parts):
        share = 1 / 9 if k == 7 else 1 / 12
        expected = [torch.full((3,), 0.0 if k == 7 and r == 1 else share) for r in range(WORKERS)]
        torch.testing.assert_close(torch.stack(part), torch.stack(expected), rtol=1e-6, atol=0)
    assert len(set(models)) == 1


def test_a_replacement_joins_with_the_current_state(tmp_path: Path, models: list[str]):
    task = counting(steps=150, slow_s=0.01)
    for strategy in (pl.AllReduceSGD(), pl.PeriodicAveraging(period=3)):
        flag = tmp_path / type(strategy).__name__
        deadly = mortal(task, flag, lambda done: done == 5, signal.SIGKILL)
        run = pl.train(deadly, strategy, WORKERS, elastic=True, replacements=1)
        assert len(models) == WORKERS and len(set(models)) == 1, strategy
        joined = [d.values for d in run.trace.decisions if d.kind == "workers"]
        assert joined[-1]["workers"] == WORKERS, strategy


LOOP = """
import os, signal, sys, time
import torch
import paceline as pl
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
data = torch.utils.data.TensorDataset(torch.randn(240, 6, generator=torch.Generator().manual_seed(1)))
loader = torch.utils.data.DataLoader(data, 24, shuffle=True)
saved = pl.Checkpoints("saved", every="10 steps", keep=None, also={"schedule": schedule})
with pl.attach(model, optimizer, pl.AllReduceSGD(), elastic=True, checkpoint=saved) as session:
    begun = len(list(session.epochs(8)))
    for epoch in session.epochs(8):
        for i, (x,) in enumerate(session.shard(loader)):
            if epoch == 1 and i == 4 and os.environ["RANK"] == "0" and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            session.step()
            schedule.step()
    rank, workers = session.rank, session.workers
values = torch.cat([t.reshape(-1).double() for t in model.state_dict().values()])
with open(f"end-{os.getpid()}", "w") as file:
    print(rank, workers, begun, schedule.last_epoch, values.tolist(), file=file)
"""


def test_a_killed_worker_of_a_users_loop_is_replaced_and_its_run_is_saved(tmp_path: Path):
    (tmp_path / "loop.py").write_text(LOOP)
    done = forked.paceline("run", "-n", "3", "--replacements", "1", "loop.py", folder=tmp_path, environment=SOURCES)
    assert done.returncode == 0, done.stderr
    assert "another takes its place" in done.stderr
    ends = sorted(path.read_text().split(maxsplit=4) for path in tmp_path.glob("end-*"))
    assert [(rank, workers) for rank, workers, *_ in ends] == [("0", "3"), ("1", "3"), ("2", "3")]
    assert len({values for *_, values in ends}) == 1
    assert [steps for *_, steps, _ in ends] == 3 * ["80"]
    assert int(ends[2][2]) < 8, "the newcomer begins in the epoch of the others"
    manifests = [pl.checkpoint.Checkpoint(path).manifest for path in sorted((tmp_path / "saved").glob("step-*"))]
    counts = [manifest.workers for manifest in manifests]
    assert counts[0] == 3 and 2 in counts[1:] and counts[-1] == 3, counts
