"""What a run will do, in a few lines: the effective values behind the settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from paceline.settings.recipe import Recipe
from paceline.task import Task, Trainee
from paceline.training import AutoBatch, GrowingBatch, PerSample, Schedule
from paceline.training.length import Length


def header(recipe: Recipe, task: Task) -> dict[str, str]:
    """Names and texts of the lines, for one worker of the run."""
    trainee = Trainee(task, task.build(), 0, recipe.workers)
    trainee.rates.follow(recipe.main)
    lines = {
        "workers": str(recipe.workers),
        "model": f"{recipe.settings.model.name}, {trainee.flat.numel:,} parameters",
        "data": f"{recipe.settings.data.name}, {task.samples:,} samples",
        "minibatch": _minibatch(task, recipe.workers),
        "length": _length(task),
        "optimizer": _optimizer(recipe, task, trainee),
        "schedule": _schedule(recipe.settings.schedule, task),
        "evaluation": _evaluation(recipe),
        "strategy": _shown(recipe.strategy),
    }
    if task.adjust is not None:
        lines["adjust"] = _shown(task.adjust)
    return {name: text for name, text in lines.items() if text}


def _minibatch(task: Task, workers: int) -> str:
    batch = task.batch
    if isinstance(batch, int):
        actual = task.timetable().samples_in(0)
        text = f"{actual:,} samples a step, {_number(actual / workers)} of each worker"
        return text if actual == batch else f"{text}: the data has no more, and {batch:,} were asked for"
    if isinstance(batch, GrowingBatch):
        return f"{batch.start:,} samples a step, growing to {batch.end:,} over {batch.epochs} epochs"
    return f"{batch.start:,} samples a step at first; larger ones are tried before {_every(batch)}"


def _every(auto: AutoBatch) -> str:
    n = auto.every
    return "every epoch" if n == 1 else f"epochs 1 to {n}, and then those whose number is a multiple of {n}"


def _length(task: Task) -> str:
    steps = "at most " if isinstance(task.batch, AutoBatch) and task.steps is None else ""
    epochs = "" if task.epochs is None else f"{Length(task.epochs, 'epochs')}, "
    return f"{epochs}{steps}{task.total_steps:,} steps"


def _optimizer(recipe: Recipe, task: Task, trainee: Trainee) -> str:
    """The rate and momentum as given, as they are in a step, and for each sample."""
    before = dict(trainee.optimizer.param_groups[0])
    rate = trainee.rates.unscheduled(0)[0]  # It also sets the momentum.
    group = trainee.optimizer.param_groups[0]
    if not recipe.strategy.needs.optimizer:
        scaled = "" if task.scaling is None else f", times {_number(rate / before['lr'])} for the size of a step"
        return f"none; the strategy takes the steps, by its own rates{scaled}"
    text = f"{type(trainee.optimizer).__name__}: lr {_number(before['lr'])}"
    momentum = before.get("momentum", 0.0)
    if task.scaling is None:
        return text + (f", momentum {_number(momentum)}" if momentum else "")
    samples = recipe.main.samples_of_step(trainee.timetable.samples_in(0), recipe.workers)
    text += f" for {task.scaling.base:,} samples -> {_number(rate)} for a step of {_number(samples)}"
    if momentum:
        text += f"; momentum {_number(momentum)} -> {_number(group['momentum'])}"
        own = PerSample.of(before["lr"], momentum, task.scaling.base)
        text += f" ({_number(own.lr)} for each sample, time constant {_number(own.time_constant)} samples)"
    if before.get("betas", ()) != group.get("betas", ()):
        text += f"; betas {_numbers(before['betas'])} -> {_numbers(group['betas'])}"
    return text


def _schedule(given: Schedule | str | None, task: Task) -> str:
    if not isinstance(given, Schedule):
        return given or ""
    end = task.position(max(0, task.total_steps - 1), task.timetable())
    is_cut = given.warmup is not None and Length.of("schedule.warmup", given.warmup).done("schedule.warmup", end) < 1
    return _shown(given) + ("; the warm-up lasts to the end of this run" if is_cut and task.total_steps else "")


def _evaluation(recipe: Recipe) -> str:
    given = recipe.settings.evaluation
    _, test = recipe.data
    if given.function is None and not test:
        return "none: the data have no test part"
    what = given.function or f"{' and '.join(recipe.metrics)} on {len(test[0]):,} samples"
    return f"{what}, every {given.every or 'epoch'}"


def _shown(value: Any) -> str:
    """A dataclass with the settings that differ from their defaults.

    >>> from paceline import BlockMomentum
    >>> _shown(BlockMomentum(period=8))
    'BlockMomentum(period=8)'
    """
    given = [
        f"{f.name}={_text(found)}"
        for f in dataclasses.fields(value)
        if f.init and f.repr and (found := getattr(value, f.name)) != f.default and found != ()
    ]
    return f"{type(value).__name__}({', '.join(given)})"


def _text(value: Any) -> str:
    if isinstance(value, Length):
        return repr(str(value))
    if isinstance(value, tuple):
        return f"[{', '.join(_text(v) for v in cast('tuple[Any, ...]', value))}]"
    return _shown(value) if dataclasses.is_dataclass(value) else repr(value)


def _numbers(values: Sequence[float]) -> str:
    return " and ".join(map(_number, values))


def _number(value: float) -> str:
    """
    >>> _number(0.4), _number(64.0), _number(3.5)
    ('0.4', '64', '3.5')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
