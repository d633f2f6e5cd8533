"""Clocks of the day that jump, and that differ between processes, change no result and no deadline."""

# pyright: basic
from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch

import paceline
import paceline as pl
from tests.dist.test_attach import task

pytestmark = [pytest.mark.dist, pytest.mark.timeout(60)]
DAY_S = 86_400.0


def test_runs_on_clocks_that_jump_by_days_end_as_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = time.time
    looks = [0]

    def jumping() -> float:
        """Each look is a day before or after the one before, and each process has days of its own."""
        looks[0] += 1
        return real() + DAY_S * ((-1) ** looks[0] * looks[0] + os.getpid() % 7)

    expected = pl.simulate(task(), pl.PeriodicAveraging(period=2), pl.Cluster(workers=2))
    monkeypatch.setattr(time, "time", jumping)
    saved = pl.Checkpoints(tmp_path, every="2 steps")
    found = pl.train(task(), pl.PeriodicAveraging(period=2), 2, ordered=True, checkpoint=saved, timeout_s=20)
    served = pl.train(task(), pl.ParameterServer(rule=pl.rules.Sgd(lr=0.05)), 2, timeout_s=20)
    assert torch.equal(found.params, expected.params) and torch.isfinite(served.params).all()


def test_the_clock_of_the_day_is_looked_at_for_what_people_read_alone():
    """For the start of a trace, and for the time of an entry in a file."""
    package = Path(paceline.__file__).parent
    wall = re.compile(r"\btime\.(time|localtime|gmtime|strftime|time_ns)\(|datetime\.(now|utcnow)")
    found = {
        str(path.relative_to(package)): sum(bool(wall.search(line)) for line in path.read_text().splitlines())
        for path in package.rglob("*.py")
    }
    assert {name: count for name, count in found.items() if count} == {
        "checkpoint/saver.py": 1,
        "engines/job.py": 1,
        "engines/supervisor.py": 1,
        "monitor/tensorboard.py": 2,
        "transport/endpoint.py": 1,
    }
