"""Sandblaster L-BFGS (Dean et al. 2012): batch optimisation with vectors that no single machine holds.

The parameters and the history are on shards.  A coordinator sends the shards short commands and receives only inner
products.  The data is cut into small portions; each free worker takes the next one, and the last ones are given to two
workers.  With any number of workers and shards the result is that of L-BFGS on one machine.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from math import inf, sqrt
from typing import ClassVar, Literal

from paceline.families.lbfgs import Pair, direction
from paceline.families.line_search import Point, armijo, strong_wolfe
from paceline.needs import Needs
from paceline.server import vectors
from paceline.server.batch_worker import BatchWorker
from paceline.server.coordinator import Coordinator, Deserted, Spent
from paceline.server.shard import Shard
from paceline.strategy import Durability, Strategy
from paceline.worker.replica import Replica

CURVED = 1e-10  # A pair is dropped if the cosine of the angle between s and y is below this: it has no curvature.


@dataclass(frozen=True)
class Sandblaster(Strategy):
    """Minimise the mean loss over all data by L-BFGS, with vectors on `shards` and a `history` of that many steps.

    Each trial of the line `search`, "armijo" or "wolfe", is one pass over the data and uses one epoch of the
    budget.  The number of portions is the number of steps in an epoch times the number of workers.  A worker pushes its
    sum of gradients after every `push` portions.  The last portions are also given to up to `backups` more workers that
    are idle.
    """

    shards: int = 2
    history: int = 10
    search: Literal["armijo", "wolfe"] = "armijo"
    c1: float = 1e-4
    c2: float = 0.9
    push: int = 8
    backups: int = 1
    durability: Durability = "none"
    coordinators: ClassVar[int] = 1
    follows_rate: ClassVar = False
    WITHOUT_CODEC: ClassVar = (
        "its line search compares exact losses and inner products; Downpour(codec=...) sends encoded gradients"
    )
    needs: ClassVar[Needs] = Needs(
        collectives=False, servers=True, optimizer=False, global_data=True, length=("steps", "steps_per_epoch")
    )

    def __post_init__(self) -> None:
        for name, least in (("shards", 1), ("history", 1), ("push", 1), ("backups", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"Sandblaster({name}={getattr(self, name)}): it must be at least {least}")
        if self.search not in ("armijo", "wolfe"):
            raise ValueError(f"Sandblaster(search={self.search!r}): give 'armijo' or 'wolfe'")
        if not 0 < self.c1 < self.c2 < 1:
            raise ValueError(f"Sandblaster(c1={self.c1}, c2={self.c2}): a line search needs 0 < c1 < c2 < 1")

    @property
    def servers(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.shards + 1

    async def worker(self, w: Replica) -> None:
        w.published = w.params  # Evaluate the point that is being tried, not a mean over workers.
        await BatchWorker(w).work()

    async def server(self, s: Shard) -> None:
        if s.endpoint.rank != s.endpoint.layout.server_ranks[0]:
            return await vectors.serve(s)
        c = Coordinator(s, push=self.push, backups=self.backups)
        with suppress(Deserted):
            await self.minimise(c)
        await c.finish()

    async def minimise(self, c: Coordinator) -> None:
        """L-BFGS until the budget is spent or no step lowers the loss."""
        # The loss at the start of the current line search, and the pairs there.
        start = c.slot("start", value=inf, pairs=[])
        await c.begin()
        if start.value < inf:  # A resumed run repeats the line search.
            c.then("copy", "w0", "w")
            c.then("copy", "g0", "g")
            value = start.value
        else:
            value = await c.evaluate()
        if value == inf:
            raise FloatingPointError("Sandblaster: the loss of the initial model is not finite")
        pairs = deque((Pair(*pair) for pair in start.pairs), maxlen=self.history)
        while True:
            c.then("copy", "w", "w0")
            c.then("copy", "g", "g0")
            start.value = value
            start.pairs = [list(pair) for pair in pairs]
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
            pairs.clear()  # They do not describe the curvature here: restart with steepest descent.

    async def find(self, c: Coordinator, start: Point) -> Point | None:
        """Search along d.  Afterwards `w` and `g` are those of the point that is returned."""

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
        """Store the step s = w - w0 and the change y = g - g0 of the gradient.  The oldest pair is dropped."""
        names = ((f"s{i}", f"y{i}") for i in range(self.history + 1))
        s, y = next(pair for pair in names if pair not in [(p.s, p.y) for p in pairs])
        for new, old, difference in (("w", "w0", s), ("g", "g0", y)):
            c.then("copy", new, difference)
            c.then("axpy", -1.0, old, difference)
        sy, yy, ss = await c.dots((s, y), (y, y), (s, s))
        if sy > CURVED * sqrt(ss * yy):
            pairs.append(Pair(s, y, rho=1 / sy, gamma=sy / yy))
