"""Learning rates and momentum that do not depend on the size of a step.

A learning rate belongs to a number of samples in a step, and so does a momentum.  CNTK therefore gives the rate for
each sample and momentum as a time constant: the number of samples after which a gradient's effect has decayed to 1/e.
`PerSample` converts both ways.  `Scaling` applies it during a run: whatever the number of workers and the size of
minibatches, a sample moves the model as far as it did at the size for which rate and momentum were chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, log, sqrt
from typing import Any, Literal

from paceline.checked import check_settings


def momentum_of(time_constant: float, samples: float) -> float:
    """The momentum of steps of `samples` samples.

    >>> round(momentum_of(2429.75, 256), 4), momentum_of(0, 256)
    (0.9, 0.0)
    """
    return exp(-samples / time_constant) if time_constant > 0 else 0.0


def time_constant_of(momentum: float, samples: float) -> float:
    """The samples after which a gradient's effect has decayed to 1/e.

    >>> round(time_constant_of(0.9, 256), 2)
    2429.75
    """
    return -samples / log(momentum) if momentum > 0 else 0.0


@dataclass(frozen=True)
class PerSample:
    """CNTK's conventions: a learning rate for each sample, and momentum as a time constant in samples.

    >>> {name: round(value, 6) for name, value in PerSample(lr=0.0005, time_constant=2429.75).settings(256).items()}
    {'lr': 0.0128, 'momentum': 0.9}
    """

    lr: float
    time_constant: float = 0.0

    def __post_init__(self) -> None:
        check_settings(self)
        if not (0 <= self.lr < inf and 0 <= self.time_constant < inf):
            raise ValueError(
                f"PerSample(lr={self.lr}, time_constant={self.time_constant}): both must be finite and at least 0"
            )

    def settings(self, samples: float) -> dict[str, float]:
        """`lr` and `momentum` of torch.optim.SGD for steps of `samples` samples.

        torch's momentum adds up the mean gradients, CNTK's averages their sums: so torch's rate has a factor of 1 -
        momentum.
        """
        momentum = momentum_of(self.time_constant, samples)
        return {"lr": self.lr * samples * (1 - momentum), "momentum": momentum}

    @classmethod
    def of(cls, lr: float, momentum: float, samples: float) -> PerSample:
        """From torch's `lr` and `momentum` for steps of `samples` samples.

        >>> back = PerSample.of(0.0128, 0.9, 256)
        >>> round(back.lr, 6), round(back.time_constant, 2)
        (0.0005, 2429.75)
        """
        if not 0 <= momentum < 1:
            raise ValueError(f"PerSample.of(momentum={momentum}): momentum lies in [0, 1)")
        return cls(lr / samples / (1 - momentum), time_constant_of(momentum, samples))


@dataclass(frozen=True)
class Scaling:
    """Rate and momentum were chosen for steps of `base` samples: what becomes of them in steps of another size.

    `rate` is "linear" (a sample moves the model by the same amount in the end), "sqrt" (usual with Adam) or "none".
    `momentum` is "time-constant" (its effect decays over the same number of samples) or "none".  It applies to the
    `momentum` and the `betas` of an optimizer.  The size of a step is what the strategy makes of it: all samples of
    the minibatch where gradients are averaged, and the worker's own where each worker steps alone.
    """

    base: int
    rate: Literal["linear", "sqrt", "none"] = "linear"
    momentum: Literal["time-constant", "none"] = "time-constant"

    def __post_init__(self) -> None:
        check_settings(self)
        if self.base < 1:
            raise ValueError(f"Scaling(base={self.base}): it counts the samples of a step, at least 1")
        if self.rate == self.momentum == "none":
            raise ValueError(
                f"Scaling(base={self.base}, rate='none', momentum='none'): this scales nothing; leave it out"
            )

    def gain(self, samples: float) -> float:
        """The factor on the learning rate by the size of a step alone.

        >>> Scaling(base=256).gain(8192), Scaling(base=256, rate="sqrt").gain(1024)
        (32.0, 2.0)
        """
        ratio = samples / self.base
        return {"linear": ratio, "sqrt": sqrt(ratio), "none": 1.0}[self.rate]

    def apply(self, group: dict[str, Any], initial: dict[str, Any], samples: float) -> float:
        """Set a parameter group's momentum for steps of `samples`; returns the factor that this puts on its rate."""
        if self.momentum == "none":
            return 1.0
        power = samples / self.base
        if "betas" in initial:  # Adam's moments are means: their rate does not depend on the momentum.
            group["betas"] = tuple(float(beta) ** power for beta in initial["betas"])
            return 1.0
        before = float(initial.get("momentum", 0.0))
        if not before:
            return 1.0
        group["momentum"] = before**power
        return (1 - group["momentum"]) / (1 - before)
