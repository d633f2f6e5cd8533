"""The search for a learning rate on real workers."""

from __future__ import annotations

import pytest

from paceline import AllReduceSGD, tune
from tests.laws.tasks import instant, quadratic


def test_real_workers_give_the_choice_of_the_simulator():
    task = quadratic(steps=50, batch=8, samples=64)
    given = {"rates": (0.1, 0.5, 1e200), "budget": "8 steps", "part": 0.5}
    real = tune(task, AllReduceSGD(), workers=2, **given)
    simulated = tune(task, AllReduceSGD(), instant(2), **given)
    assert real.rate == simulated.rate and real.where == "2 real workers"
    for mine, theirs in zip(real.rungs[0].tried, simulated.rungs[0].tried, strict=True):
        assert mine.has_diverged == theirs.has_diverged
        assert mine.values == pytest.approx(theirs.values, rel=1e-9)
