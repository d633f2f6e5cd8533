"""Elastic averaging (Zhang, Choromanska, LeCun 2015): workers explore on their own, tied to a centre by an elastic force.

At an exchange worker and centre move towards each other by a share alpha of the way between them: their sum does not change by it.
The centre is the model; what is worth evaluating is not a worker.  alpha is beta/N for N workers unless given, or rho times the
learning rate as the paper has it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from paceline.families.server_strategy import ServerStrategy
from paceline.needs import Needs
from paceline.op import Op
from paceline.server.gates import Gate, Turns
from paceline.server.rules import Rule, Sgd
from paceline.strategy import Strategy
from paceline.worker.replica import Replica


class UnstableElastic(RuntimeWarning):
    """An elastic force so strong that worker and centre overshoot each other further every time."""


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """How strong the force is: `alpha`, or `rho` times the learning rate, or `beta` over the number of workers."""

    beta: float = 0.9
    alpha: float | None = None
    rho: float | None = None

    def check_force(self) -> None:
        name = type(self).__name__
        if self.alpha is not None and self.rho is not None:
            raise ValueError(
                f"{name}(alpha={self.alpha}, rho={self.rho}): alpha is rho times the learning rate; give one of them"
            )
        for what in ("beta", "alpha", "rho"):
            if (given := getattr(self, what)) is not None and not 0 <= given < float("inf"):
                raise ValueError(
                    f"{name}({what}={given}): worker and centre pull each other with a force of at least 0"
                )

    def share(self, w: Replica, pullers: int) -> float:
        """alpha, where so many pull at the centre."""
        return self.constant_share(pullers) if self.rho is None else self.rho * w.lr

    def constant_share(self, pullers: int) -> float:
        """The same, if it does not depend on the learning rate."""
        return self.beta / pullers if self.alpha is None else self.alpha

    def warn_if_unstable(self, w: Replica, pullers: int, *, together: bool = False) -> None:
        """Tell, once, of a force that is too strong even for the simplest of losses."""
        alpha, bound = self.share(w, pullers), largest_share(w.lr, pullers if together else None)
        if alpha > bound and w.rank == 0:
            given = (
                f"alpha={self.alpha}"
                if self.alpha is not None
                else f"beta={self.beta}"
                if self.rho is None
                else f"rho={self.rho}"
            )
            warnings.warn(
                UnstableElastic(
                    f"{type(self).__name__}({given}): alpha={alpha:.4g} with {pullers} workers is above {bound:.4g}, from where on elastic "
                    f"averaging diverges even on a parabola of curvature 1 at the learning rate of {w.lr:g}"
                ),
                stacklevel=2,
            )


def largest_share(lr: float, together: int | None = None) -> float:
    """The largest stable alpha on a parabola of curvature 1: for any number of workers one after the other, or so many `together`.

    >>> largest_share(0.0), largest_share(1.0), largest_share(0.0, together=4)
    (1.0, 0.6666666666666666, 0.4)
    """
    above = max(0.0, 4 - 2 * lr)
    return above / (4 - lr if together is None else 2 * (1 + together) - lr * together) if above else 0.0


@dataclass(frozen=True, kw_only=True)
class EASGD(Elastic, Strategy):
    """The synchronous form: every `period` steps all workers and the centre meet, by one all-reduce; there is no server.

    The centre becomes (1 - beta) * centre + beta * mean of the workers, and every worker moves alpha = beta/N of its way to where
    the centre was.
    """

    period: int = 4

    def __post_init__(self) -> None:
        self.check_force()
        check_period(self, self.period)

    async def worker(self, w: Replica) -> None:
        m = w.state("centre", centre=w.params)
        w.published = m.centre
        self.warn_if_unstable(w, w.workers, together=True)
        w.batch.track_syncs()
        before, delta = torch.empty_like(w.params), torch.empty_like(w.params)
        for k in w.steps():
            meets = (k + 1) % self.period == 0
            if meets:
                torch.sub(before.copy_(w.params), m.centre, out=delta)
            await w.local_step()
            if not meets:
                continue
            beta, mean = self.share(w, w.workers) * w.workers, await w.mean(before)
            own, total = w.batch.mark_sync(), w.batch.update_samples
            if total:  # Where all workers have seen as many samples, each moves by alpha.
                w.params.sub_(delta, alpha=beta * own / total)
                m.centre.lerp_(mean, beta)
        await w.mean_of_buffers()


def check_period(strategy: Any, period: int) -> None:
    if period < 1:
        raise ValueError(
            f"{type(strategy).__name__}(period={period}): workers meet the centre every so many steps, at least 1"
        )


@dataclass(frozen=True, kw_only=True)
class ElasticServer(Elastic, ServerStrategy):
    """Every `period` steps a worker fetches the centre from the shards, and pushes how far it pulls that."""

    period: int = 4
    needs: ClassVar[Needs] = Needs(collectives=False, servers=True)
    is_in_turn: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_force()
        check_period(self, self.period)
        if self.sparse:
            raise ValueError(
                f"{type(self).__name__}(sparse=True): a force is as long as the model; nothing of it is sparse"
            )

    def shard_rule(self, workers: int) -> Rule:
        return Sgd(lr=1.0)  # Shards take away what is pushed.

    @property
    def mu(self) -> float:
        """The momentum of a worker's own steps."""
        return 0.0

    async def worker(self, w: Replica) -> None:
        store, pullers = self.store(w), w.endpoint.layout.workers
        w.params.copy_(await store.pull())
        w.published = store.value
        self.warn_if_unstable(w, pullers)
        force, velocity = torch.zeros_like(w.params), torch.zeros_like(w.params)
        before = torch.empty_like(w.params) if self.mu else w.params
        said = store.send_buffer().zero_()
        count, seen = 0, 0.0
        pushed: Op[None] | None = (
            store.push(said, 0.0) if self.is_in_turn else None
        )  # And with it, the turn is the next one's.

        async def meet() -> None:
            """Pull the centre; how far that pulls this worker is to be done with its next step, whose gradient is taken before."""
            nonlocal pushed, said, count, seen
            if pushed is not None:
                await pushed
            torch.sub(w.params, await store.pull(), out=force).mul_(self.share(w, pullers))
            said = torch.neg(force, out=store.send_buffer(said))
            pushed = store.push(said, max(1.0, seen))  # What no samples are behind would change nothing.
            count, seen = 0, 0.0

        while await store.next(before_waiting=meet):
            if self.mu:
                before.copy_(w.params)
                w.params.add_(velocity, alpha=self.mu)
            await w.local_step()
            if self.mu:
                torch.sub(w.params, before, out=velocity)
            w.params.sub_(force)
            force.zero_()
            count, seen = count + 1, seen + w.batch.samples
            if count >= self.period:
                await meet()
        w.params.sub_(force)
        if pushed is not None:
            await pushed
        await store.leave()


@dataclass(frozen=True, kw_only=True)
class AsyncEASGD(ElasticServer):
    """Meet the centre on shards every `period` steps, each worker on its own clock: nobody waits for another."""


@dataclass(frozen=True, kw_only=True)
class RoundRobinEASGD(ElasticServer):
    """Meet the centre in the order of ranks: who has fetched it holds it until its force has arrived, as if by a lock.

    It is there to be compared with: the others wait meanwhile, and for the slowest among them all the time.
    """

    is_in_turn: ClassVar[bool] = True

    def shard_gate(self) -> Gate:
        return Turns()


@dataclass(frozen=True, kw_only=True)
class EAMSGD(ElasticServer):
    """`AsyncEASGD` with Nesterov's momentum in every worker, its gradient taken where the momentum leads; the centre has none.

    The task's optimizer is best plain SGD, as a momentum of its own would come on top.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"EAMSGD(momentum={self.momentum}): it lies in [0, 1)")

    @property
    def mu(self) -> float:
        return self.momentum
