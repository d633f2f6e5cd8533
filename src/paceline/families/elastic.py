"""Elastic averaging, for all its forms: the strength of the force, and the form whose centre lies on shards.

Each worker is tied to a centre by an elastic force.  When they meet, both move towards each other by a share alpha of
their difference, so their sum does not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from paceline.families.server_strategy import ServerStrategy
from paceline.needs import Needs
from paceline.op import Op
from paceline.server.rules import Rule, Sgd
from paceline.server.store import Store
from paceline.worker.replica import Replica


class UnstableElastic(RuntimeWarning):
    """The elastic force is so strong that worker and centre overshoot each other further at every meeting."""


def largest_share(lr: float, together: int | None = None) -> float:
    """The largest stable alpha on a parabola of curvature 1, if workers meet the centre one after another.

    If so many workers meet it `together`, the bound is lower.

    >>> largest_share(0.0), largest_share(1.0), largest_share(0.0, together=4)
    (1.0, 0.6666666666666666, 0.4)
    """
    above = max(0.0, 4 - 2 * lr)
    if not above:
        return 0.0
    return above / (4 - lr if together is None else 2 * (1 + together) - lr * together)


def check_period(strategy: Any, period: int) -> None:
    if period < 1:
        raise ValueError(
            f"{type(strategy).__name__}(period={period}): the period is the number of steps between two meetings with "
            f"the centre, and must be at least 1"
        )


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """The strength of the force: `alpha`, or `rho` times the learning rate, or `beta` over the number of workers.

    Where workers meet the centre in groups, each group counts as one worker.
    """

    beta: float = 0.9
    alpha: float | None = None
    rho: float | None = None
    WITHOUT_CODEC: ClassVar[str] = (
        "all workers must see the same centre; AsyncEASGD(codec=...) sends encoded forces to a centre on shards"
    )

    def check_force(self) -> None:
        name = type(self).__name__
        if self.alpha is not None and self.rho is not None:
            raise ValueError(
                f"{name}(alpha={self.alpha}, rho={self.rho}): alpha is rho times the learning rate; give one of them"
            )
        for what in ("beta", "alpha", "rho"):
            given = getattr(self, what)
            if given is not None and not 0 <= given < float("inf"):
                raise ValueError(f"{name}({what}={given}): the force must be finite and at least 0")

    def share(self, w: Replica, workers: int) -> float:
        """alpha, with so many workers, at the learning rate of the current step."""
        return self._constant_share(workers) if self.rho is None else self.rho * w.lr

    async def coming_share(self, w: Replica, workers: int) -> float:
        """The same, before the gradient of the step."""
        return self._constant_share(workers) if self.rho is None else self.rho * await w.cursor.coming_lr()

    def _constant_share(self, workers: int) -> float:
        return self.beta / workers if self.alpha is None else self.alpha

    def warn_if_unstable(self, w: Replica, workers: int, *, together: bool = False) -> None:
        """Warn, on rank 0, if the force is too strong even for a parabola."""
        alpha = self.share(w, workers)
        bound = largest_share(w.lr, workers if together else None)
        if alpha <= bound or w.rank != 0:
            return
        if self.alpha is not None:
            given = f"alpha={self.alpha}"
        elif self.rho is not None:
            given = f"rho={self.rho}"
        else:
            given = f"beta={self.beta}"
        warnings.warn(
            UnstableElastic(
                f"{type(self).__name__}({given}): alpha={alpha:.4g} with {workers} workers is above {bound:.4g}: "
                f"elastic averaging then diverges even on a parabola of curvature 1, at the learning rate of {w.lr:g}"
            ),
            stacklevel=2,
        )


def groups_of(workers: int, size: int) -> int:
    """How many groups of this size the workers make."""
    if workers % size:
        fitting = [str(n) for n in range(1, workers + 1) if not workers % n]
        raise ValueError(
            f"EAWild(group={size}): {workers} workers make {workers // size} groups and leave {workers % size} over; "
            f"the number of workers must be a multiple of {size}, or the group one of {', '.join(fitting)}"
        )
    return workers // size


@dataclass(frozen=True, kw_only=True)
class ElasticServer(Elastic, ServerStrategy):
    """Before every step whose number is a multiple of `period`, a worker pulls the centre from the shards, and pushes
    the force that moves it.  At the end they meet once more.

    With `takes_turns` a worker that has pulled the centre holds it until it pushes.
    """

    period: int = 4
    needs: ClassVar[Needs] = Needs(collectives=False, servers=True)
    takes_turns: ClassVar[bool] = False
    pushes_gradients: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_force()
        check_period(self, self.period)

    def shard_rule(self, workers: int) -> Rule:
        return Sgd(lr=1.0)  # Shards subtract what is pushed.

    def local_steps(self, w: Replica) -> Callable[[], Awaitable[None]]:
        """The function that takes a worker's next local step."""
        return w.local_step

    async def worker(self, w: Replica) -> None:
        store = self.store(w)
        w.params.copy_(await store.pull())
        w.published = store.value
        workers = w.endpoint.layout.workers
        self.warn_if_unstable(w, workers)
        force = Force(self, w, store)
        local_step = self.local_steps(w)
        if self.takes_turns:
            force.pass_turn()
        while await store.next(before_waiting=force.meet_after_last):
            if store.unpushed.steps >= self.period:
                await force.meet(await self.coming_share(w, workers))
            await local_step()
            force.move_worker()
            store.count_step()
        force.move_worker()
        await force.pushed()
        await store.leave()


class Force:
    """The force between a worker and the centre, from when they meet until the worker moves."""

    def __init__(self, strategy: ElasticServer, w: Replica, store: Store) -> None:
        self.strategy = strategy
        self.w = w
        self.store = store
        self._force = torch.zeros_like(w.params)
        self._update = store.send_buffer().zero_()
        self._in_flight: Op[None] | None = None

    async def meet(self, alpha: float) -> None:
        """Pull the centre, and push the force that moves it.

        The worker moves after its next step: in the paper both the force and the gradient are taken before the move.
        """
        store = self.store
        await self.pushed()
        torch.sub(self.w.params, await store.pull(), out=self._force)
        self._force.mul_(alpha)
        self._update = torch.neg(self._force, out=store.send_buffer(self._update))
        done = store.unpushed.steps  # Not the step that begins now.
        # Shards ignore an update of no samples, but a force acts without samples too.
        self._in_flight = store.push(self._update, max(1.0, store.unpushed.take()), steps=done)

    async def meet_after_last(self) -> None:
        """Meet because there is no more work, at the learning rate of the last step."""
        await self.meet(self.strategy.share(self.w, self.w.endpoint.layout.workers))
        if self.strategy.takes_turns:  # It says next that no worker need wait for it.
            await self.pushed()

    def move_worker(self) -> None:
        """Move the worker by the force of the last meeting, once."""
        self.w.params.sub_(self._force)
        self._force.zero_()

    def pass_turn(self) -> None:
        """After the first pull, let the next worker pull: push nothing."""
        self._in_flight = self.store.push(self._update, 0.0)

    async def pushed(self) -> None:
        """Wait until the last push has arrived."""
        if self._in_flight is not None:
            await self._in_flight
