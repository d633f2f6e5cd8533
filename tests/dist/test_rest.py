"""Checkpoints of methods whose workers do not wait for each other, on real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.checkpoint import Folder
from paceline.errors import ClusterError

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
