"""The tables of a settings file.  Keys are the fields, with hyphens for underscores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from paceline.sim.cluster import Compute
from paceline.strategies import AllReduceSGD, Replicated
from paceline.strategy import Strategy
from paceline.training import AutoAdjust, AutoBatch, GrowingBatch, Schedule
from paceline.training.length import Length
from paceline.units import seconds
from paceline.worker.batch import NonFinite

Metric = Literal["accuracy", "loss"]


@dataclass(frozen=True)
class Function:
    """A function by its name, and its arguments from the other keys of the table."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Data:
    """`[data]`: what the model learns from, and the samples of a step.

    `batch_of` says whether `batch` counts the samples of each worker or of all.  `batch`, `grow` and `auto` are three
    ways to give it.
    """

    name: str
    batch: int | None = None
    grow: GrowingBatch | None = None
    auto: AutoBatch | None = None
    batch_of: Literal["worker", "all"] = "worker"
    accumulate: int = 1
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Optimizer:
    """`[optimizer]`: an optimizer by its name, and its settings.

    The rate is `lr`, or `lr_per_sample`; momentum is `momentum`, or `momentum_time_constant` in samples.  Before a step
    `clip_value` limits the gradient's elements, and `clip_norm` the norm of each of its tensors.
    """

    name: str = "sgd"
    lr_per_sample: float | None = None
    momentum_time_constant: float | None = None
    clip_value: float | None = None
    clip_norm: float | None = None
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class ScalingTable:
    """`[scaling]`: rate and momentum were chosen for steps of `base` samples, by default a worker's `batch`."""

    base: int | None = None
    rate: Literal["linear", "sqrt", "none"] = "linear"
    momentum: Literal["time-constant", "none"] = "time-constant"


@dataclass(frozen=True)
class WarmStart:
    """`[warm-start]`: another method for the first steps, samples or epochs; by default all workers do the same
    work."""

    length: str | Length
    strategy: Strategy = field(default=Replicated())


@dataclass(frozen=True)
class Evaluation:
    """`[evaluation]`: metrics on the test data, by names, or a function `function(model, *test)` that returns a
    dict."""

    every: str | Length | None = None
    metrics: Sequence[Metric] = ("accuracy", "loss")
    function: str | None = None
    batch: int = 1000

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch = {self.batch}: a minibatch of test data needs at least 1 sample")
        if not self.metrics:
            raise ValueError("metrics = []: give at least one of 'accuracy' and 'loss'")


@dataclass(frozen=True)
class Log:
    """`[log]`: what a run shows and writes."""

    progress: bool = True
    metrics: str | None = None
    tensorboard: str | None = None
    statistics: int = 0

    def __post_init__(self) -> None:
        if self.statistics < 0:
            raise ValueError(f"statistics = {self.statistics}: it counts syncs, from 1; 0: no statistics")


@dataclass(frozen=True)
class Save:
    """`[save]`: files that one worker writes when training has ended."""

    model: str | None = None
    trace: str | None = None


@dataclass(frozen=True)
class CheckpointTable:
    """`[checkpoint]`: a folder in which `paceline train` saves the run, and from which it continues."""

    folder: str
    every: str = "10min"
    keep: int | None = 2
    resume: bool = True
    sigterm: bool = True


@dataclass(frozen=True)
class Processes:
    """`[processes]`: how `paceline train` runs."""

    ordered: bool = False
    nonfinite: NonFinite = "skip"
    timeout: float | str = "30min"
    replacements: int = 3
    elastic: bool = False

    def __post_init__(self) -> None:
        if not 0 < seconds(self.timeout) < inf:
            raise ValueError(f"timeout = {self.timeout!r}: a duration must be above 0 and finite")
        if self.replacements < 0:
            raise ValueError(f"replacements = {self.replacements}: it counts workers, from 0")


@dataclass(frozen=True)
class Network:
    """`[cluster]`: the machines that `paceline simulate` plays."""

    compute: Compute | float | str | Sequence[float | str] = "10ms"
    bandwidth: float | str = "10Gbit/s"
    latency: float | str = "50us"
    collective: Literal["ring", "tree", "star"] = "ring"
    codec_bandwidth: float | str = "5GB/s"
    memory_bandwidth: float | str = "10GB/s"
    bus: float | str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Settings:
    """A settings file."""

    model: Function
    data: Data
    epochs: float | None = None
    steps: int | None = None
    workers: int = 1
    seed: int = 0
    loss: Function = Function("cross-entropy")
    optimizer: Optimizer = Optimizer()
    scaling: ScalingTable | None = None
    schedule: Schedule | str | None = None  # Text: a function from a step to a factor on the rate.
    strategy: Strategy = field(default=AllReduceSGD())
    warm_start: WarmStart | None = None
    adjust: AutoAdjust | None = None
    evaluation: Evaluation = Evaluation()
    log: Log = Log()
    save: Save = Save()
    checkpoint: CheckpointTable | None = None
    processes: Processes = Processes()
    cluster: Network = Network()
