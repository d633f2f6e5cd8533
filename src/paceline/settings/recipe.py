"""Recipe: the task, the strategy and the cluster that a settings file means for a number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.checked import spelled
from paceline.checkpoint import Checkpoints
from paceline.data import digits, fashion_mnist
from paceline.models import MODELS
from paceline.settings.decode import SettingsError, dashed, located
from paceline.settings.imported import arguments, calling, function
from paceline.settings.optimizers import ChosenOptimizer, chosen_optimizer, steps_of
from paceline.settings.sections import Evaluation, Optimizer, Settings, WarmStart
from paceline.sim.cluster import Cluster
from paceline.strategies import Then
from paceline.strategy import Strategy
from paceline.task import Batch, Task
from paceline.training import AutoAdjust, AutoBatch, GrowingBatch, Scaling, Schedule
from paceline.training.length import Length

Tensors = tuple[Tensor, ...]


def _digits() -> Tensors:
    return digits()


def _fashion_mnist(folder: str | None = None) -> Tensors:
    try:
        found = fashion_mnist.load(folder)
    except fashion_mnist.NoData as error:
        raise ValueError(str(error).replace("load(path=...)", "data.folder")) from None
    x, test = (images.float().div_(255).sub_(0.286).div_(0.353) for images in (found.images, found.test_images))
    return x, found.labels.long(), test, found.test_labels.long()


DATA: dict[str, Callable[..., Any]] = {"digits": _digits, "fashion-mnist": _fashion_mnist}


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(batch[0])
    if outputs.shape != batch[1].shape:
        raise ValueError(
            f"loss.name = 'squared-error': the model gives {list(outputs.shape)} for targets of "
            f"{list(batch[1].shape)}; it needs targets of the same shape, and class labels need 'cross-entropy'"
        )
    return F.mse_loss(outputs, batch[1])


LOSSES: dict[str, Callable[..., Any]] = {"cross-entropy": cross_entropy, "squared-error": squared_error}


@dataclass(frozen=True)
class Recipe:
    """Settings for a number of workers; modules of the user's are looked for in `folder`."""

    settings: Settings
    workers: int
    folder: Path

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise SettingsError(f"workers = {self.workers}: there must be at least 1 worker")
        given = {name: getattr(self.settings, name) for name in ("epochs", "steps")}
        if given["epochs"] is given["steps"] is None:
            raise SettingsError("neither epochs nor steps is given: give one of the two, above the first table")
        if None not in given.values():
            raise SettingsError(
                f"epochs = {given['epochs']}, steps = {given['steps']}: give one of the two; the flag --epochs none, "
                "or --steps none, leaves one out"
            )
        for name, value in given.items():
            if value is not None and not 0 <= value < inf:
                raise SettingsError(f"{name} = {value}: it must be finite and at least 0")
        if self.settings.optimizer != Optimizer():
            self._check_optimizer()
        self._check_scaling()

    def _check_optimizer(self) -> None:
        """Refuse an optimizer that has no effect."""
        name = spelled(type(self.main))
        if not self.strategy.needs.optimizer:
            raise SettingsError(
                f"[optimizer] under strategy.name = '{name}', which takes the steps by settings of its own: give its "
                f"rate in [strategy] (`paceline strategies {name}` lists the keys), and leave out [optimizer] "
                "(--optimizer none)"
            )
        clip = [key for key in ("clip_value", "clip_norm") if getattr(self.settings.optimizer, key) is not None]
        if clip and self.main.steps_itself:
            raise SettingsError(
                f"optimizer.{dashed(clip[0])} under strategy.name = '{name}', which takes the steps itself, without "
                "that limit; leave it out"
            )

    def _check_scaling(self) -> None:
        """Refuse a momentum that should follow the size of a step, and cannot."""
        table = self.settings.scaling
        if table is None or table.momentum == "none":
            return
        if not self.main.needs.optimizer or self.main.has_own_momentum:
            raise SettingsError(
                f"scaling.momentum = '{table.momentum}' under strategy.name = '{spelled(type(self.main))}', which "
                "takes the steps itself, with a momentum that does not follow the size of a step: give "
                "scaling.momentum = 'none', so that only the rate follows it, or leave out [scaling] (--scaling none)"
            )

    @property
    def main(self) -> Strategy:
        """The method after a warm start."""
        return self.settings.strategy.methods[-1]

    # Data.

    @cached_property
    def data(self) -> tuple[Tensors, Tensors]:
        """The tensors to train on, and those to test on (none if there are no test data)."""
        table = self.settings.data
        make = function(table.name, "data.name", DATA, "data set", self.folder)
        kept = arguments(make, table.arguments, "data", name=table.name)
        with calling("data.name", table.name):
            given: Any = make(**kept)
        if isinstance(given, dict) and "train" in given:
            parts = cast("dict[str, Any]", given)
            train, test = tuple(parts["train"]), tuple(parts.get("test") or ())
        elif isinstance(given, (tuple, list)) and len(cast("Sequence[Any]", given)) in (2, 4):
            every = tuple(cast("Sequence[Any]", given))
            train, test = every[:2], every[2:]
        else:
            raise SettingsError(
                f"data.name = {table.name!r}: the function returned {_shown(given)}; it must return tensors (inputs, "
                "targets), or (inputs, targets, test inputs, test targets), or a dict of 'train' and 'test' with "
                "tuples of tensors"
            )
        for name, part in (("train", train), ("test", test)):
            for item in part:
                if not isinstance(item, Tensor):
                    raise SettingsError(
                        f"data.name = {table.name!r}: in the {name} data is {_shown(item)}; they must be tensors"
                    )
        if len(train[0]) < self.workers:
            raise SettingsError(
                f"data.name = {table.name!r} has {len(train[0])} samples for workers = {self.workers}: every worker "
                f"needs at least one; give --workers {max(1, len(train[0]))} or fewer"
            )
        return train, test

    @property
    def factor(self) -> int:
        """By how much the samples of a step grow with the workers."""
        return self.workers if self.settings.data.batch_of == "worker" else 1

    @cached_property
    def batch(self) -> int | GrowingBatch | AutoBatch:
        """The samples of a step of all workers."""
        table = self.settings.data
        given = {n: v for n in ("batch", "grow", "auto") if (v := getattr(table, n)) is not None}
        if len(given) != 1:
            names = " and ".join(f"data.{name}" for name in given) or "none of data.batch, data.grow and data.auto"
            raise SettingsError(f"{names} is given: give one of them, the samples of a step")
        if table.grow is not None:
            start, end = table.grow.start * self.factor, table.grow.end * self.factor
            multiple = table.grow.multiple * self.factor
            return replace(table.grow, start=start, end=end, multiple=multiple)
        if table.auto is not None:
            start, multiple = table.auto.start * self.factor, table.auto.multiple * self.factor
            largest = table.auto.largest * self.factor
            return replace(table.auto, start=start, largest=largest, multiple=multiple)
        assert table.batch is not None
        if table.batch < 1:
            raise SettingsError(f"data.batch = {table.batch}: a step needs at least 1 sample")
        return table.batch * self.factor

    @property
    def base(self) -> int:
        """The samples of a step for which rate and momentum are given, if the file does not say."""
        batch = self.batch
        first = batch if isinstance(batch, int) else batch.start
        return first // self.factor

    # What is trained.

    @cached_property
    def optimizer(self) -> ChosenOptimizer:
        return chosen_optimizer(self.settings, self.base, self.folder)

    @property
    def scaling(self) -> Scaling | None:
        table = self.settings.scaling
        if table is None:
            return Scaling(self.base) if self.optimizer.is_per_sample else None
        with located("scaling"):
            return Scaling(self.base if table.base is None else table.base, table.rate, table.momentum)

    @property
    def schedule(self) -> Schedule | Callable[[int], float] | None:
        given = self.settings.schedule
        return function(given, "schedule", {}, "schedule", self.folder) if isinstance(given, str) else given

    def task(self) -> Task:
        """The task: everything but how the workers cooperate."""
        settings = self.settings
        if settings.data.auto is not None and self.scaling is None:
            raise SettingsError(
                "data.auto without [scaling]: a larger minibatch would change what optimizer.lr means; add [scaling], "
                "with data.auto.start as its base, or give optimizer.lr-per-sample"
            )
        schedule = self.schedule
        is_unscaled = self.scaling is None or self.scaling.rate == "none"
        if isinstance(schedule, Schedule) and schedule.needs_gain and is_unscaled:
            raise SettingsError(
                "schedule.start = 'base' where no rate is scaled: the warm-up would change nothing; add [scaling], or "
                "give a share of the rate, as in schedule.start = 0.1"
            )
        train, test = self.data
        loss = function(settings.loss.name, "loss.name", LOSSES, "loss", self.folder)
        extra = arguments(loss, settings.loss.arguments, "loss", given=list(_parameters(loss))[:2])
        with located("data"):
            unfinished = Task(
                model=self._model(),
                loss=partial(loss, **extra) if extra else loss,
                data=train,
                batch=self.batch,
                optimizer=self.optimizer.make,
                steps=settings.steps,
                epochs=settings.epochs,
                evaluate=self._evaluate(test),
                evaluate_every=self._evaluation_period(),
                schedule=schedule,
                scaling=self.scaling,
                adjust=settings.adjust,
                accumulate=settings.data.accumulate,
                seed=settings.seed,
            )
        _check_adjust(settings.adjust, unfinished)
        _check_warm_start(settings.warm_start, unfinished)
        return replace(unfinished, optimizer=partial(self.optimizer.make, plan=unfinished.plan))

    def _model(self) -> Callable[[], nn.Module]:
        table = self.settings.model
        make = function(table.name, "model.name", MODELS, "model", self.folder)
        if table.name in MODELS:
            (x, y, *_), _ = self.data
            classes = int(y.max()) + 1 if not y.dtype.is_floating_point else int(y[0].numel())
            given = arguments(make, table.arguments, "model", given=("shape", "classes"))
            return partial(_built, table.name, partial(make, list(x.shape[1:]), classes, **given))
        return partial(_built, table.name, partial(make, **arguments(make, table.arguments, "model")))

    def _evaluate(self, test: Tensors) -> Callable[[nn.Module], dict[str, float]] | None:
        table = self.settings.evaluation
        if table.function is not None:
            for key in ("metrics", "batch"):
                if getattr(table, key) != getattr(Evaluation, key):
                    raise SettingsError(
                        f"evaluation.{key} with evaluation.function = {table.function!r}: the function reads the test "
                        f"data and returns the metrics itself; leave out {key}"
                    )
            found = function(table.function, "evaluation.function", {}, "function", self.folder)
            return partial(_by_function, table.function, found, test)
        if not test:
            return None
        loss = function(self.settings.loss.name, "loss.name", LOSSES, "loss", self.folder)
        return partial(evaluated, test, self.metrics, loss, table.batch)

    @property
    def metrics(self) -> Sequence[str]:
        """What is measured on the test data; targets that are no class labels have no accuracy."""
        has_labels = not self.data[1][1].dtype.is_floating_point
        return [name for name in self.settings.evaluation.metrics if has_labels or name != "accuracy"]

    def _evaluation_period(self) -> Length | None:
        every = self.settings.evaluation.every
        with located("evaluation"):
            length = None if every is None else Length.of("evaluation.every", every)
            if length is not None and not length.value:
                raise ValueError(f"every = '{length}': it must be above 0")
            return length

    @property
    def strategy(self) -> Strategy:
        warm = self.settings.warm_start
        if warm is None:
            return self.settings.strategy
        length = Length.of("warm-start.length", warm.length)
        value = length.value if length.unit == "epochs" else round(length.value)
        with located("warm-start"):
            return Then(warm.strategy, self.settings.strategy, **{length.unit: value})  # pyright: ignore[reportArgumentType]

    def checkpoints(self) -> Checkpoints | None:
        """Where the run is saved, and from where it continues."""
        if self.settings.checkpoint is None:
            return None
        with located("checkpoint"):
            return Checkpoints(**vars(self.settings.checkpoint))

    def cluster(self) -> Cluster:
        network = self.settings.cluster
        with located("cluster"):
            return Cluster(self.workers, **vars(network))


def _check_adjust(adjust: AutoAdjust | None, task: Task) -> None:
    epochs = task.epochs if task.epochs is not None else task.timetable().epochs_before(task.total_steps)
    if adjust is not None and round(epochs) < adjust.interval:
        raise SettingsError(
            f"adjust.interval = {adjust.interval}: the run has {epochs:.3g} epochs, so nothing would be checked; "
            "train longer, or leave out [adjust] (--adjust none)"
        )


def _check_warm_start(warm: WarmStart | None, task: Task) -> None:
    if warm is not None and task.plan.steps is not None and not isinstance(task.batch, AutoBatch):
        length = Length.of("warm-start.length", warm.length)
        steps = steps_of(length, task.plan, "warm-start.length")
        if steps > task.plan.steps:
            raise SettingsError(
                f"warm-start.length = '{length}': these are {steps} steps, and the whole run has only "
                f"{task.plan.steps}; give fewer, or train longer"
            )


def _built(name: str, make: Callable[[], nn.Module]) -> nn.Module:
    with calling("model.name", name):
        return make()


def _by_function(name: str, evaluate: Callable[..., Any], test: Tensors, model: nn.Module) -> dict[str, float]:
    found = evaluate(model, *test)
    try:
        return {str(key): float(value) for key, value in found.items()}
    except (AttributeError, TypeError, ValueError):
        raise SettingsError(
            f"evaluation.function = {name!r}: it returned {found!r:.80}; it must return a dict of numbers, as in "
            "{'accuracy': 0.9}"
        ) from None


def evaluated(
    test: Tensors, metrics: Sequence[str], loss: Callable[..., Tensor], batch: int, model: nn.Module
) -> dict[str, float]:
    """Metrics of a model on the test data, over minibatches of that size."""
    right = 0
    total = 0.0
    for start in range(0, len(test[0]), batch):
        part = tuple(t[start : start + batch] for t in test)
        total += float(loss(model, part)) * len(part[0])
        if "accuracy" in metrics:
            right += int((model(part[0]).argmax(1) == part[1]).sum())
    found = {"accuracy": right / len(test[0]), "loss": total / len(test[0])}
    return {name: found[name] for name in metrics}


def _parameters(call: Callable[..., Any]) -> Sequence[str]:
    import inspect

    return list(inspect.signature(call).parameters)


def _shown(value: object) -> str:
    """
    >>> _shown((1, 2)), _shown("text")
    ('a tuple of 2', 'a str')
    """
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(cast('Sequence[Any]', value))}"
    return f"a {type(value).__name__}"
