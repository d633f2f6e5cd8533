"""Sandblaster L-BFGS (Dean et al. 2012): batch optimisation whose vectors no single machine holds.

The parameters and the history lie on shards; a coordinator says in a few words what these do with them, and hears inner products alone.
The data is worked on in small portions, each by whichever worker is free, the last ones by two.  Whatever the numbers of workers and
shards, it is L-BFGS on one machine.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from math import inf, sqrt
from typing import ClassVar, Literal, NamedTuple

from paceline.families.line_search import Point, armijo, strong_wolfe
from paceline.needs import Needs
from paceline.server import vectors
from paceline.server.batch_worker import BatchWorker
from paceline.server.coordinator import Coordinator, Deserted, Spent
from paceline.server.shard import Shard
from paceline.strategy import Strategy
from paceline.worker.replica import Replica

CURVED = 1e-10  # A pair tells nothing of the curvature whose s and y are nearer than that to being at right angles.


class Pair(NamedTuple):
    """A step s and the change y of the gradient over it, as the shards name them; rho = 1 / (y.s), gamma = y.s / y.y."""

    s: str
    y: str
    rho: float
    gamma: float


@dataclass(frozen=True)
class Sandblaster(Strategy):
    """Minimise the mean loss over all of the data by L-BFGS, with vectors on `shards` and a `history` of so many steps.

    Each try of the line `search`, "armijo" or "wolfe", is one pass over the data, and takes an epoch of the budget.  The data comes in as
    many portions as there are steps in an epoch, times workers; a worker pushes what it has added up after every `push` of them.  The
    last ones are given to up to `backups` workers more, that have nothing else to do.
    """

    shards: int = 2
    history: int = 10
    search: Literal["armijo", "wolfe"] = "armijo"
    c1: float = 1e-4
    c2: float = 0.9
    push: int = 8
    backups: int = 1
    needs: ClassVar[Needs] = Needs(
        collectives=False, servers=True, optimizer=False, global_data=True, length=("steps", "steps_per_epoch")
    )

    def __post_init__(self) -> None:
        for name, least in (("shards", 1), ("history", 1), ("push", 1), ("backups", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"Sandblaster({name}={getattr(self, name)}): it must be at least {least}")
        if self.search not in ("armijo", "wolfe"):
            raise ValueError(f"Sandblaster(search={self.search!r}): it is 'armijo' or 'wolfe'")
        if not 0 < self.c1 < self.c2 < 1:
            raise ValueError(f"Sandblaster(c1={self.c1}, c2={self.c2}): a line search needs 0 < c1 < c2 < 1")

    @property
    def servers(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.shards + 1

    async def worker(self, w: Replica) -> None:
        w.published = w.params  # What is evaluated is the point that is being tried, not a mean of this and the last.
        await BatchWorker(w).work()

    async def server(self, s: Shard) -> None:
        if s.endpoint.rank != s.endpoint.layout.server_ranks[0]:
            return await vectors.serve(s)
        c = Coordinator(s, push=self.push, backups=self.backups)
        with suppress(Deserted):
            await self.minimise(c)
        await c.finish()

    async def minimise(self, c: Coordinator) -> None:
        """L-BFGS until the budget is spent, or no step leads further down."""
        await c.begin()
        value = await c.evaluate()
        if value == inf:
            raise FloatingPointError("Sandblaster: the loss of the model is not finite as it is at the beginning")
        pairs = deque[Pair](maxlen=self.history)
        while True:
            c.then("copy", "w", "w0")
            c.then("copy", "g", "g0")
            slope = await direction(c, pairs)
            try:
                found = await self.find(c, Point(0.0, value, slope)) if slope < 0 else None
            except Spent:
                return c.then("copy", "w0", "w")
            if found is not None:
                value = found.value
                await self.remember(c, pairs)
                continue
            c.then("copy", "w0", "w")
            c.then("copy", "g0", "g")
            if not pairs:
                return
            pairs.clear()  # What they say of the curvature is wrong here: begin anew.

    async def find(self, c: Coordinator, start: Point) -> Point | None:
        """The next point along d; `w` and `g` are then there."""

        async def value_at(t: float) -> Point:
            c.then("copy", "w0", "w")
            c.then("axpy", t, "d", "w")
            return Point(t, await c.evaluate())

        async def point_at(t: float) -> Point:
            return (await value_at(t))._replace(slope=await c.dot("g", "d"))

        if self.search == "armijo":
            return await armijo(value_at, start, c1=self.c1)
        return await strong_wolfe(point_at, start, c1=self.c1, c2=self.c2)

    async def remember(self, c: Coordinator, pairs: deque[Pair]) -> None:
        """The step s = w - w0 and the change y = g - g0 of the gradient; the oldest pair is dropped for it."""
        names = ((f"s{i}", f"y{i}") for i in range(self.history + 1))
        s, y = next(pair for pair in names if pair not in [(p.s, p.y) for p in pairs])
        for new, old, difference in (("w", "w0", s), ("g", "g0", y)):
            c.then("copy", new, difference)
            c.then("axpy", -1.0, old, difference)
        sy, yy, ss = await c.dots((s, y), (y, y), (s, s))
        if sy > CURVED * sqrt(ss * yy):
            pairs.append(Pair(s, y, rho=1 / sy, gamma=sy / yy))


async def direction(c: Coordinator, pairs: deque[Pair]) -> float:
    """Let d be minus the product of g and of what the pairs say of the inverse Hessian, by two loops; its slope.

    Without pairs it is steepest descent, by a step of length 1.
    """
    c.then("copy", "g", "d")
    if not pairs:
        norm = sqrt(await c.dot("g", "g"))
        if norm:
            c.then("scale", -1 / norm, "d")
        return -norm
    alphas: list[float] = []
    for p in reversed(pairs):
        alphas.append(p.rho * await c.dot(p.s, "d"))
        c.then("axpy", -alphas[-1], p.y, "d")
    c.then("scale", pairs[-1].gamma, "d")
    for p in pairs:
        beta = p.rho * await c.dot(p.y, "d")
        c.then("axpy", alphas.pop() - beta, p.s, "d")
    c.then("scale", -1.0, "d")
    return await c.dot("d", "g")
