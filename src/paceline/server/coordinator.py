"""Coordinator: the first server of a batch method.

It gives workers portions of the data, and sends programs to shards.

It holds no vector.  It gets inner products from the shards and losses from the workers.  Workers may join, leave and
die at any time; each portion is counted exactly once in every pass.

Slot `coordinator`: passes, extent (the budget), the samples of the first pass, and the operations that were not sent
yet.  The strategy declares what else it needs with `slot`.  A pass is not saved: a resumed run repeats it.  The vectors
are in the shards' own states; save all ranks while no program runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from math import inf, isfinite
from typing import Any

import torch

from paceline.errors import ClusterError
from paceline.protocol.messages import Away, Message, PeerDied, PeerSuspected, Reply, Request
from paceline.protocol.requests import (
    Deduplicator,
    PeerFinished,
    Refusal,
    UnknownRequest,
    Verdict,
)
from paceline.protocol.roster import Roster, State
from paceline.server.messages import (
    BringOrder,
    Brought,
    End,
    Ended,
    Enlist,
    OverOrder,
    Pushed,
    PushOrder,
    Report,
    RunEnded,
    SignedOff,
    SignOff,
    WorkerLost,
    WorkOrder,
)
from paceline.server.portions import Portions
from paceline.server.shard import Shard
from paceline.server.shard_programs import ShardPrograms
from paceline.state import Slot, Values


class Spent(Exception):
    """The budget has no pass left."""


class Deserted(Exception):
    """No worker is left, and the time to wait for another is over."""


class Coordinator:
    """The interface of a batch method's server role: `then` and `dot` on all shards, `evaluate` on all of the data."""

    def __init__(self, s: Shard, *, push: int, backups: int) -> None:
        self.endpoint = s.endpoint
        self._s = s
        self._push = push
        self._backups = backups
        self.shards = list(s.endpoint.layout.server_ranks)[1:]
        self.passes = 0  # Passes over the data so far.
        # The first epoch, the one after the last, the minibatches of each and the parts of these.
        self._extent: list[int] | None = None
        self._roster = Roster(s.endpoint.layout.worker_ranks)
        self._deserted_at = 0.0  # Until when it waits for new workers if there is none.
        self._received = Deduplicator()
        self._programs = ShardPrograms(s.endpoint, self.shards, self._received)
        self._later = self._programs.later
        self._waiting: dict[int, bool] = {}  # Workers that were not answered yet, and whether their last report counts.
        self._bringer: int | None = None  # The worker that was asked for the first value,
        self._is_there = False  # and whether the shards have it.
        self._is_over = False
        self._portions: Portions | None = None
        self._loss = 0.0  # Of this pass.
        self._samples = 0  # Of this pass,
        self._first_samples = 0  # and of the first one.
        s.states.bind("coordinator", save=self._save, load=self._load, check=_check_saved)

    # State.

    def slot(self, name: str, **initial: Any) -> Slot:
        """Declare a slot of the strategy, before `begin`."""
        return self._s.states.slot(name, **initial)

    def state_dict(self) -> dict[str, Any]:
        """The state of the coordinator's rank."""
        return self._s.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; before `begin`, and before the strategy declares its slots."""
        self._s.load_state_dict(state)

    def _save(self) -> Values:
        return {
            "passes": self.passes,
            "extent": None if self._extent is None else list(self._extent),
            "first_samples": self._first_samples,
            "has_value": self._is_there,
            "unsent": list(self._programs.unsent),
        }

    def _load(self, values: Values) -> None:
        self.passes = values["passes"]
        self._extent = values["extent"]
        self._first_samples = values["first_samples"]
        self._is_there = values["has_value"]
        self._programs.unsent = list(values["unsent"])

    # Vectors.

    def then(self, operation: str, *given: str | float) -> None:
        """Queue an operation for the shards.  It is sent with the next program."""
        self._programs.then(operation, *given)

    async def dot(self, x: str, y: str) -> float:
        return (await self.dots((x, y)))[0]

    async def dots(self, *pairs: tuple[str, str]) -> list[float]:
        """Inner products, of all shards together."""
        for x, y in pairs:
            self.then("dot", x, y)
        return await self._programs.run()

    # Passes over the data.

    async def begin(self) -> None:
        """Wait until the shards have the first value."""
        self._s.states.check_complete()
        while not self._is_there:
            await self._hear()

    async def evaluate(self) -> float:
        """The mean loss at `w`, with its gradient in `g`; infinity if fewer samples counted than in the first pass."""
        assert self._extent is not None
        first, last, steps, data_shards = self._extent
        if first + self.passes >= last:
            raise Spent
        self.then("zero", "g")
        self.then("forget")
        await self._programs.run()
        self.passes += 1
        self._loss = 0.0
        self._samples = 0
        self._portions = Portions(steps * data_shards, self._backups)
        await self._rouse()
        while not self._portions.is_done:
            await self._hear()
        self._first_samples = self._first_samples or self._samples
        if not self._samples or self._samples < self._first_samples:
            return inf
        self.then("scale", 1 / self._samples, "g")
        mean = self._loss / self._samples
        return mean if isfinite(mean) else inf

    async def finish(self) -> None:
        """Send all workers the final `w`, and end."""
        await self._programs.run()
        self._is_over = True
        await self._rouse()
        while self._roster.members:
            await self._hear()
        end = self._programs.requests.number(End())
        for rank in self.shards:
            await self.endpoint.send(rank, end)
        for rank in self.shards:
            with suppress(PeerFinished):  # Only the reply may have been lost.
                await self._programs.requests.reply(rank, end, Ended)
        with suppress(TimeoutError):
            while True:  # A worker that joined while the others left has nothing to do.
                message = self._later.popleft() if self._later else await self.endpoint.recv(timeout=0.0)
                if message.src not in self.endpoint.layout.server_ranks:
                    await self.endpoint.send(message.src, RunEnded())

    # Workers.

    async def _hear(self) -> None:
        """Receive and handle the next message."""
        message = await self._next()
        src = message.src
        if src in self.endpoint.layout.server_ranks:
            if isinstance(message, WorkerLost):
                await self._bury(message.worker, is_dead=True)
            return
        if isinstance(message, (PeerDied, PeerSuspected)):
            return await self._bury(src, is_dead=isinstance(message, PeerDied))
        if self._roster.state(src) is State.DEAD:
            return
        try:
            if not isinstance(message, Request):
                raise UnknownRequest(message)
            if (verdict := self._received.judge(message)) is Verdict.REPEATED:
                return await self.endpoint.send(src, self._received.reply_again(message))
            if verdict is not Verdict.NEW:
                return
            _check_request(message, self._extent)
        except Refusal as error:
            return await self._s.refuse(message, error)
        self._received.note(message)
        await self._handle(message)

    async def _next(self) -> Message:
        while not self._later:
            waits = bool(self._roster.members) or self._deserted_at == math.inf
            timeout = None if waits else max(0.0, self._deserted_at - self.endpoint.now())
            try:
                return await self.endpoint.recv(timeout=timeout)
            except TimeoutError:
                if not self._roster.members:
                    raise self._deserted() from None
        return self._later.popleft()

    def _deserted(self) -> Exception:
        if not (silent := self._roster.ranks_in(State.SUSPECTED)):
            return Deserted()
        ranks = ", ".join(map(str, silent))
        return ClusterError(
            f"passes are left, and nothing was heard for {self._s.return_s:g} s of the workers that may be alive "
            f"(ranks {ranks})"
        )

    async def _handle(self, request: Request) -> None:
        src = request.src
        if isinstance(request, SignOff):
            self._roster.leave(src)
            return await self._answer(src, SignedOff())
        if isinstance(request, Enlist):
            self._extent = request.extent.tolist()
            self._roster.join(src, self._roster.incarnation(src))
        elif not self._roster.is_member(src):
            return await self._answer(src, Away(reason="it is not, or no longer, among the workers; it may enlist"))
        counts = False
        if isinstance(request, Brought):
            self._is_there = True
        elif isinstance(request, Report):
            number, portion = request.which.tolist()
            counts = number == self.passes and self._portions is not None and self._portions.report(src, portion)
        elif isinstance(request, Pushed):
            await self._count(request)
        self._waiting[src] = counts
        await self._rouse()

    async def _count(self, request: Pushed) -> None:
        """A worker's sum is on all shards.  It counts, unless another worker has done the same work meanwhile."""
        portions, src = self._portions, request.src
        number, which = request.which.tolist()
        if portions is None or number != self.passes or which != portions.sum_of(src) or not portions.claimed(src):
            return
        self.then("take", str(src), str(number), str(which), "g")
        await self._programs.run()
        portions.settle(src)
        self._loss += request.loss.item()
        self._samples += request.samples

    async def _rouse(self) -> None:
        """Answer the waiting workers for which there is something to do."""
        for src, counts in list(self._waiting.items()):
            if (answer := self._order(src, counts)) is not None:
                del self._waiting[src]
                await self._answer(src, answer)

    def _order(self, src: int, counts: bool) -> Reply | None:
        """The next order for a worker; None if there is no work at the moment."""
        if self._is_over:
            return OverOrder()
        if not self._is_there:
            if self._bringer is not None:
                return None
            self._bringer = src
            return BringOrder()
        portions = self._portions
        if portions is None or portions.is_done:
            return None
        has_enough = portions.claimed(src) >= self._push
        portion = None
        if not has_enough:
            portion = portions.take(src)
        if portion is None and portions.claimed(src):  # Before it works as a backup.
            return PushOrder(torch.tensor([self.passes, portions.sum_of(src), int(counts)]))
        if portion is None and (portion := portions.back_up(src)) is None:
            return None
        return WorkOrder(torch.tensor([self.passes, portions.sum_of(src), int(counts), portion]))

    async def _answer(self, src: int, reply: Reply) -> None:
        await self.endpoint.send(src, self._received.keep(src, reply))

    async def _bury(self, src: int, *, is_dead: bool) -> None:
        """A worker is dead or suspected to be: its portions that do not count yet go to other workers."""
        changes = self._roster.die(src) if is_dead else self._roster.suspect(src)
        if not any(change.is_loss for change in changes):
            return
        may_return = bool(self._roster.ranks_in(State.SUSPECTED))
        self._deserted_at = self.endpoint.now() + (self._s.return_s if may_return else self._s.grace_s)
        if self._bringer == src and not self._is_there:
            self._bringer = None
        if self._portions is not None:
            self._portions.lose(src)
        if self._waiting.pop(src, None) is not None and not is_dead:  # It may be alive after all.
            await self._answer(src, Away(reason="it was declared dead; it may enlist again"))
        await self._rouse()


def _check_request(request: Request, extent: list[int] | None) -> None:
    """Refuse a request that makes no sense."""
    match request:
        case Enlist():
            _check_form(request.extent, torch.int64, 4)
            numbers: list[int] = request.extent.tolist()
            first, last, steps, data_shards = numbers
            if not (0 <= first < last and steps >= 1 and data_shards >= 1):
                raise Refusal(
                    f"it wants epochs {first} to {last} of {steps} minibatches in {data_shards} parts, and "
                    f"there is none"
                )
            if extent not in (None, numbers):
                raise Refusal(f"it wants epochs, minibatches and parts {numbers}, and they are {extent}")
        case Report():
            _check_form(request.which, torch.int64, 2)
        case Pushed():
            _check_form(request.which, torch.int64, 2)
            _check_form(request.loss, torch.float64, 1)
        case Brought() | SignOff():
            pass
        case _:
            raise UnknownRequest(request)


def _check_saved(values: Any) -> None:
    names = {"passes", "extent", "first_samples", "has_value", "unsent"}
    if not isinstance(values, dict) or values.keys() != names:
        holds = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"the saved slot 'coordinator' holds {holds}, and a coordinator has {sorted(names)}")


def _check_form(numbers: torch.Tensor, dtype: torch.dtype, count: int) -> None:
    if (numbers.dtype, tuple(numbers.shape)) != (dtype, (count,)):
        raise Refusal(f"it must hold {count} numbers of {dtype}, not {numbers.dtype} of shape {tuple(numbers.shape)}")
