"""What is shown of the traceback of an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import paceline as pl
from paceline.errors import shown_traceback


def shown(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as error:
        return shown_traceback(error.with_traceback(error.__traceback__.tb_next)).splitlines()  # Without this frame.
    raise AssertionError


def frames(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("  File ")]


def mistaken(model: Any, batch: Any) -> Any:
    return {}["nothing"]


def job(**more: Any) -> pl.Task:
    given: dict[str, Any] = {"loss": lambda model, batch: model(batch[0]).sum(), "data": [torch.ones(4, 3)]}
    return pl.Task(model=lambda: torch.nn.Linear(3, 1), batch=2, steps=1, optimizer=torch.optim.SGD, **given | more)


CLUSTER = pl.Cluster(workers=2)


def test_an_error_in_code_of_the_callers_has_no_frames_of_ours():
    task = job(loss=mistaken)
    lines = shown(lambda: pl.simulate(task, "all-reduce-sgd", CLUSTER))
    assert [__file__ in frame for frame in frames(lines)] == [True, True]  # The lambda, and the loss.
    assert lines[0] == "Traceback (most recent call last):" and "KeyError: 'nothing'" in lines


def test_what_the_callers_code_calls_is_shown():
    task = job(data=[torch.ones(4, 5)])
    assert "linear.py" in frames(shown(lambda: pl.simulate(task, "all-reduce-sgd", CLUSTER)))[-1]


def test_a_mistake_that_we_have_found_has_no_traceback_and_a_mistake_of_ours_has_the_whole_one():
    assert shown(partial(pl.Cluster, workers=0)) == []
    lines = shown(partial(shown_traceback, 3))
    assert "errors.py" in frames(lines)[-1] and lines[-1].startswith("AttributeError")
