"""Rules: what an arriving update does to the value that a shard holds.

A rule is a frozen dataclass of settings.  Its memory is kept by the shard, so that many shards can use one rule.  Some
rules wrap another: `Scaled(Every(Momentum(), 4))` scales stale updates down, takes the mean of every four and gives it
to a momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.server.rule import Push, Rule, in_pieces
from paceline.state import Slot, Values


def fused_for(value: Tensor, update: Tensor) -> ModuleType | None:
    """The fused kernels of the rules; None if there are none for such vectors."""
    if (
        value.device.type != "cpu"
        or value.dtype not in (torch.float32, torch.float64)
        or update.dtype != value.dtype
        or not update.is_contiguous()
        or kernels.is_plain()
        or not kernels.kernels_of("cpu")
    ):
        return None
    from paceline.server import kernels as fused  # They need numba, which is optional.

    return fused


@dataclass(frozen=True, kw_only=True)
class OptimizerRule(Rule):
    """The base of rules that do to a shard's value what torch's optimizer of that name does, to the bit.

    The learning rate follows the schedule of the worker that sends the update.  `weight_decay` is added to the gradient
    as torch does: `weight_decay` times the value.
    """

    weight_decay: float = 0.0
    NEEDS: ClassVar[str] = "the learning rate must be positive, and the weight decay at least 0"

    def _check(self, is_right: bool, **given: Any) -> None:
        weight_decay = {"weight_decay": self.weight_decay} if self.weight_decay else {}
        super()._check(is_right and 0 <= self.weight_decay < inf, **given, **weight_decay)

    @property
    def is_elementwise(self) -> bool:
        return not self.weight_decay  # It changes every value at every update.

    def _decayed(self, value: Tensor, update: Tensor) -> Tensor:
        return update.add_(value, alpha=self.weight_decay) if self.weight_decay else update


@dataclass(frozen=True)
class Sgd(OptimizerRule):
    """value -= lr * gradient."""

    lr: float = 0.1

    def __post_init__(self) -> None:
        self._check(0 < self.lr < inf, lr=self.lr)

    def apply(self, value: Tensor, update: Tensor, m: Slot, push: Push) -> bool:
        value.add_(self._decayed(value, update), alpha=-self.lr * push.rate)
        return True


@dataclass(frozen=True)
class Attract(Rule):
    """value += alpha * (pushed parameters - value): elastic averaging pulls the centre towards a worker.

    `alpha` follows the schedule of the worker, as learning rates do.
    """

    alpha: float = 0.1
    NEEDS: ClassVar[str] = "a share of the way is at least 0 and finite"

    def __post_init__(self) -> None:
        self._check(0 <= self.alpha < inf, alpha=self.alpha)

    def apply(self, value: Tensor, update: Tensor, m: Slot, push: Push) -> bool:
        value.lerp_(update, self.alpha * push.rate)
        return True


@dataclass(frozen=True)
class Momentum(OptimizerRule):
    """One velocity for all workers; every push updates it: v = momentum * v + gradient; value -= lr * v.

    With `unit_gain` v = momentum * v + (1 - momentum) * gradient.  Asynchrony alone acts like a momentum of
    1 - 1/workers, so many workers need less of it.
    """

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    unit_gain: bool = False
    NEEDS: ClassVar[str] = "the learning rate must be positive, momentum lies in [0, 1), and weight decay is at least 0"

    def __post_init__(self) -> None:
        self._check(0 < self.lr < inf and 0 <= self.momentum < 1, lr=self.lr, momentum=self.momentum)

    def memory(self, value: Tensor) -> dict[str, Any]:
        return {"velocity": torch.zeros_like(value)}

    def apply(self, value: Tensor, update: Tensor, m: Slot, push: Push) -> bool:
        def step(value: Tensor, update: Tensor, velocity: Tensor) -> None:
            g = self._decayed(value, update)
            if self.unit_gain:
                g.mul_(1 - self.momentum)
            if self.momentum:
                velocity.mul_(self.momentum).add_(g)
                g = g.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
            value.add_(g, alpha=-self.lr * push.rate)

        in_pieces(step, value, update, m.velocity)
        return True


@dataclass(frozen=True)
class Adagrad(OptimizerRule):
    """Downpour's rule: the rate of each value is lr over the root of the sum of its squared gradients."""

    lr: float = 0.01
    eps: float = 1e-10

    def __post_init__(self) -> None:
        self._check(0 < self.lr < inf and self.eps >= 0, lr=self.lr, eps=self.eps)

    def memory(self, value: Tensor) -> dict[str, Any]:
        return {"squares": torch.zeros_like(value)}

    def apply(self, value: Tensor, update: Tensor, m: Slot, push: Push) -> bool:
        def step(value: Tensor, update: Tensor, squares: Tensor) -> None:
            g = self._decayed(value, update)
            squares.addcmul_(g, g)
            value.addcdiv_(g, squares.sqrt().add_(self.eps), value=-self.lr * push.rate)

        in_pieces(step, value, update, m.squares)
        return True


@dataclass(frozen=True)
class Adam(OptimizerRule):
    """torch's Adam on the shard; with `decoupled` its AdamW, whose weight decay is a share of the value."""

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled: bool = False
    NEEDS: ClassVar[str] = (
        "the learning rate must be positive, both betas lie in [0, 1), and weight decay is at least 0"
    )

    def __post_init__(self) -> None:
        self._check(0 < self.lr < inf and all(0 <= beta < 1 for beta in self.betas), lr=self.lr, betas=self.betas)

    def memory(self, value: Tensor) -> dict[str, Any]:
        return {"mean": torch.zeros_like(value), "square": torch.zeros_like(value), "steps": 0}

    def apply(self, value: Tensor, update: Tensor, m: Slot, push: Push) -> bool:
        first, second = self.betas
        m.steps += 1
        lr = self.lr * push.rate
        size = lr / (1 - first**m.steps)
        root_correction = (1 - second**m.steps) ** 0.5

        def step(value: Tensor, update: Tensor, mean: Tensor, square: Tensor) -> None:
            if self.decoupled and self.weight_decay:
                value.mul_(1 - lr * self.weight_decay)
            g = update if self.decoupled else self._decayed(value, update)
            mean.lerp_(g, 1 - first)
            square.mul_(second).addcmul_(g, g, value=1 - second)
            value.addcdiv_(mean, square.sqrt().div_(root_correction).add_(self.eps), value=-size)

        in_pieces(step, value, update, m.mean, m.square)
        return True


@dataclass(frozen=True)
class Wrapper(Rule):
    """The base of rules that change an update and give it to another rule."""

    rule: Rule = Sgd()

    def memory(self, value: Tensor) -> dict[str, Any]:
        return {"inner": Slot(**self.rule.memory(value))}

    works_elementwise: ClassVar[bool] = False  # Whether this class, without its rule, works on some values only.

    @property
    def is_elementwise(self) -> bool:
        return self.works_elementwise and self.rule.is_elementwise

    @property
    def weighs_samples(self) -> bool:
        return self.rule.weighs_samples

    def updates_in_step(self, workers: int) -> int:
        return self.rule.updates_in_step(workers)

    def flush(self, value: Tensor, m: Slot) -> bool:
        return self.rule.flush(value, m.inner)

    def pulled(self, value: Tensor, m: Slot, src: int) -> None:
        self.rule.pulled(value, m.inner, src)

    def forget(self, m: Slot, src: int) -> None:
        self.rule.forget(m.inner, src)

    def saved(self, m: Slot) -> Values:
        return super().saved(m) | {"inner": self.rule.saved(m.inner)}


SCALES: dict[str, Callable[[int], float]] = {
    "1/tau": lambda tau: 1 / max(1, tau),
    "1/(tau+1)": lambda tau: 1 / (tau + 1),
}


@dataclass(frozen=True)
class Scaled(Wrapper):
    """Stale updates are scaled down: by 1/staleness, from a staleness of 1 on (Zhang et al. 2016), or by
    1/(staleness + 1)."""

    by: Literal["1/tau", "1/(tau+1)"] = "1/tau"
    works_elementwise: ClassVar[bool] = True
    NEEDS: ClassVar[str] = f"the scale is one of {', '.join(map(repr, SCALES))}"

    def __post_init__(self) -> None:
        self._check(self.by in SCALES, by=self.by)

    def apply(self, value: Tensor, update: Tensor, m: Slot, push: Push) -> bool:
        scale = SCALES[self.by](push.staleness)
        return self.rule.apply(value, update if scale == 1 else update.mul_(scale), m.inner, push)


@dataclass(frozen=True)
class Every(Wrapper):
    """Only the mean of every `n` updates, of any workers, is applied: softsync.  At the end, the mean of the rest.

    The factor on its learning rate is the mean of the factors of these updates.
    """

    n: int = 1
    NEEDS: ClassVar[str] = "at least 1 update makes a new value"

    def __post_init__(self) -> None:
        self._check(self.n >= 1, n=self.n)

    def memory(self, value: Tensor) -> dict[str, Any]:
        return {**super().memory(value), "sum": torch.zeros_like(value), "count": 0, "rate": 0.0}

    def apply(self, value: Tensor, update: Tensor, m: Slot, push: Push) -> bool:
        if self.n == 1:
            return self.rule.apply(value, update, m.inner, push)
        m.sum.add_(update)
        m.count += 1
        m.rate += (push.rate - m.rate) / m.count  # A mean that is exact for equal factors.
        return m.count >= self.n and self._apply_mean(value, m, push)

    def flush(self, value: Tensor, m: Slot) -> bool:
        applied = bool(m.count) and self._apply_mean(value, m, Push())
        return super().flush(value, m) or applied

    def updates_in_step(self, workers: int) -> int:
        return self.n * self.rule.updates_in_step(workers)

    def _apply_mean(self, value: Tensor, m: Slot, push: Push) -> bool:
        applied = self.rule.apply(value, m.sum.div_(m.count), m.inner, replace(push, rate=m.rate))
        m.sum.zero_()
        m.count = 0
        m.rate = 0.0
        return applied


@dataclass(frozen=True)
class Quorum(Wrapper):
    """Updates are held back until there are `least` (by default a majority of the workers) and `grace` more seconds
    have passed, or until all workers have sent one.  Then their mean, weighted by samples, is applied, and their
    senders get their replies.

    The factor on its learning rate is the mean of their factors, weighted in the same way.
    """

    least: int | None = None
    grace: float = 0.0
    holds_answers: ClassVar[bool] = True
    NEEDS: ClassVar[str] = "at least 1 update makes a quorum, and the grace is no less than 0 s"

    def __post_init__(self) -> None:
        self._check(
            (self.least is None or self.least >= 1) and 0 <= self.grace < inf, least=self.least, grace=self.grace
        )

    def memory(self, value: Tensor) -> dict[str, Any]:
        empty = {"sum": torch.zeros_like(value), "weight": 0.0, "rate": 0.0, "srcs": [], "until": None}
        return {**super().memory(value), **empty}

    def apply(self, value: Tensor, update: Tensor, m: Slot, push: Push) -> bool:
        m.sum.add_(update, alpha=push.samples)
        m.weight += push.samples
        m.rate += (push.rate - m.rate) * (push.samples / (m.weight or 1))
        m.srcs.append(push.src)
        return self.tick(value, m, push.time, push.workers)

    @property
    def weighs_samples(self) -> bool:
        return True

    def due(self, m: Slot) -> float | None:
        return m.until

    def tick(self, value: Tensor, m: Slot, now: float, workers: int) -> bool:
        if m.until is None and m.srcs and len(m.srcs) >= self._needed(workers):
            m.until = now + self.grace
        if m.until is None or (now < m.until and len(set(m.srcs)) < workers):
            return False
        return self._apply_mean(value, m)

    def _needed(self, workers: int) -> int:
        return min(self.least or workers // 2 + 1, workers)

    def updates_in_step(self, workers: int) -> int:
        return self._needed(workers) * self.rule.updates_in_step(workers)

    def flush(self, value: Tensor, m: Slot) -> bool:
        applied = bool(m.srcs) and self._apply_mean(value, m)
        return super().flush(value, m) or applied

    def saved(self, m: Slot) -> Values:
        return super().saved(m) | {"until": None}  # Another run has another clock: the grace period starts again.

    def _apply_mean(self, value: Tensor, m: Slot) -> bool:
        applied = not m.weight or self.rule.apply(value, m.sum.div_(m.weight), m.inner, Push(rate=m.rate))
        m.sum.zero_()
        m.weight = 0.0
        m.rate = 0.0
        m.srcs = []
        m.until = None
        return applied


@dataclass(frozen=True)
class Compensated(Wrapper):
    """DC-ASGD (Zheng et al. 2017): a late gradient, corrected for how far the value has moved since its sender read it.

    g + lam * g * g * (value - value read).  With `adaptive`, lam is divided by the root of a moving mean of g * g,
    value by value.
    """

    lam: float = 0.04
    adaptive: bool = False
    decay: float = 0.95
    eps: float = 1e-7
    NEEDS: ClassVar[str] = "lam is at least 0, and the decay of the mean square lies in [0, 1)"

    def __post_init__(self) -> None:
        self._check(0 <= self.lam < inf and 0 <= self.decay < 1, lam=self.lam, decay=self.decay)

    def memory(self, value: Tensor) -> dict[str, Any]:
        squares = {"squares": torch.zeros_like(value)} if self.adaptive else {}
        return {**super().memory(value), **squares, "read": {}}

    def pulled(self, value: Tensor, m: Slot, src: int) -> None:
        super().pulled(value, m, src)
        if src in m.read:
            m.read[src].copy_(value)
        else:
            m.read[src] = value.clone()

    def forget(self, m: Slot, src: int) -> None:
        super().forget(m, src)
        m.read.pop(src, None)

    def apply(self, value: Tensor, update: Tensor, m: Slot, push: Push) -> bool:
        if self.adaptive:
            m.squares.mul_(self.decay).addcmul_(update, update, value=1 - self.decay)
        if self.lam and push.staleness and push.src in m.read:
            if (fused := fused_for(value, update)) is not None:
                fused.compensate(
                    update, value, m.read[push.src], self.lam, m.squares if self.adaptive else None, self.eps
                )
                return self.rule.apply(value, update, m.inner, push)
            lam = self.lam / (m.squares + self.eps).sqrt_() if self.adaptive else self.lam
            update = update + update.square().mul_(value - m.read[push.src]).mul_(lam)
        return self.rule.apply(value, update, m.inner, push)


RULES: tuple[type[Rule], ...] = (Sgd, Attract, Momentum, Adagrad, Adam, Scaled, Every, Quorum, Compensated)
