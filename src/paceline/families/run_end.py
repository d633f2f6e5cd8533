"""The end of a run without a server: all workers have finished, all have all messages, and all take the same mean."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from paceline.families.broadcast import BroadcastLog
from paceline.families.peers import Peers, Service
from paceline.protocol.messages import Message, Number, Rank
from paceline.strategy import MissedEnd

RETRIES = 12  # Timeouts after which a worker leaves without the last acknowledgements.


class Finished(Message):
    """The sender has no data left.

    It has broadcast `count` messages, and keeps these of others, which some workers may not have: pairs of a sender and
    a number.  It takes nothing more from the `dead`.  `report` is one more for each report that lists something new.
    """

    count: Number = 0
    kept: tuple[tuple[Rank, Number], ...] = ()
    dead: tuple[Rank, ...] = ()
    report: Number = 0


class HasAll(Message):
    """The sender has all messages that the receiver's `Finished` with that number lists.

    `own` is the number of the sender's own report, the present one or the next: by that one, it has nothing that the
    receiver has not.
    """

    report: Number = 0
    own: Number = 0


class FinalModel(Message):
    """The sender's last model, for the mean over all workers."""

    params: Tensor


class FinalMean(Message):
    """The mean of all last models."""

    mean: Tensor


class HasMean(Message):
    """The sender has the mean."""


class RunEnd(Service):
    """How this worker and its peers finish.  Create it after the service with the method's own messages.

    With a `log`, the run ends when all workers have all of its messages.
    """

    types: ClassVar = (Finished, HasAll, FinalModel, FinalMean, HasMean)
    needs_model: ClassVar = False

    def __init__(self, peers: Peers, log: BroadcastLog | None = None) -> None:
        self._peers = peers
        self._log = log
        self._finished: dict[int, Finished] = {}  # The newest report of each peer that has finished,
        self._complete: set[int] = set()  # the peers whose reported messages are all here,
        self._confirmed: set[int] = set()  # and the peers that have all messages of this worker's report.
        self._report = Finished()  # What this worker has reported,
        self._due: dict[int, int] = {}  # and the number of the report that each peer has announced.
        self._models: dict[int, Tensor] = {}  # The last models of peers,
        self._asked: int | None = None  # the peer that computes the mean,
        self._mean: Tensor | None = None  # the mean,
        self._have_mean: set[int] = set()  # and the peers that have it.
        self._is_agreeing = False
        self._has_lost_end = False  # Whether a peer has ended before this worker had the mean.
        if log is not None:
            log.on_message_of_dead = self._report_to_all
        peers.add(self)

    def has_finished(self, rank: int) -> bool:
        """Whether a peer has no data left."""
        return rank in self._finished

    # All have finished, and all have all messages.

    async def wait_for_all(self) -> None:
        """Report that this worker has finished.  Return when all peers have finished and all have all messages."""
        peers = self._peers
        peers.replica.cursor.end()
        peers.has_finished = True
        await self._report_to_all()
        await peers.wait_until(lambda: peers.all_in(self._complete))
        await peers.wait_until(lambda: all(map(self._is_done, peers.members)) and not self._has_news, timeouts=RETRIES)

    def _is_done(self, rank: int) -> bool:
        """Whether this worker and a peer have the same, and both know it."""
        return (
            rank in self._complete and rank in self._confirmed and self._finished[rank].report >= self._due.get(rank, 0)
        )

    async def _report_to_all(self) -> None:
        """Report what this worker has now.  If that is something new, no peer has confirmed it."""
        if not self._peers.has_finished:
            return
        if self._has_news:
            self._report = self._next_report()
            self._confirmed.clear()
        for rank in self._peers.members:
            await self._send_report(rank)

    async def _send_report(self, dst: int) -> None:
        if self._peers.has_finished:
            self._confirmed.discard(dst)
            await self._peers.send(dst, self._report)

    def _next_report(self) -> Finished:
        count, kept = (0, ()) if self._log is None else self._log.contents()
        return Finished(count, kept, tuple(sorted(self._peers.dead)), self._report.report + 1)

    @property
    def _has_news(self) -> bool:
        """Whether this worker has something that its last report does not list."""
        old, new = self._report, self._next_report()
        return not old.report or (old.count, old.kept, old.dead) != (new.count, new.kept, new.dead)

    async def _check(self, report: Finished) -> None:
        """Compare a peer's report with this worker's log: request what is missing, or confirm."""
        self._complete.discard(report.src)
        if self._peers.has_model:
            if self._log is not None:
                # What others have sent that are alive, they will send again themselves.
                lost = [
                    pair
                    for pair in self._missing(report)
                    if pair[0] not in self._peers.members or pair[0] == report.src
                ]
                await self._log.request(report.src, lost)
            await self.handled(report.src)

    def _missing(self, report: Finished) -> list[tuple[int, int]]:
        return [] if self._log is None else self._log.missing(report.src, report.count, report.kept)

    async def handled(self, src: int) -> None:
        """Confirm the reports of peers if the message that was handled was the last one that was missing."""
        for rank, report in list(self._finished.items()):
            if rank not in self._complete and not self._missing(report):
                self._complete.add(rank)
                own = self._report.report + self._has_news if self._peers.has_finished else 0
                await self._peers.send(rank, HasAll(report.report, own))
        if self._peers.has_finished and self._peers.all_in(self._complete) and self._has_news:
            await self._report_to_all()

    # All take the mean of their models.

    async def agree(self) -> None:
        """Set the model to the mean of all workers' models.  The member with the lowest rank computes it."""
        self._is_agreeing = True
        if self._has_lost_end and self._mean is None:
            raise MissedEnd
        peers = self._peers
        params = peers.replica.params
        while self._mean is None and not (self._first == peers.rank and peers.all_in(self._models)):
            await self._ask_for_mean(self._first)
        if self._mean is None:
            models = {peers.rank: params, **{rank: self._models[rank] for rank in peers.members}}
            total = torch.zeros_like(params)
            for rank in sorted(models):
                total.add_(models[rank].to(params.device))
            self._mean = total.div_(len(models))
            await self._send_mean()
        # A worker with the mean stays until all have it: the sender may die before it has sent it to all.
        await peers.wait_until(lambda: peers.all_in(self._have_mean), timeouts=RETRIES)
        params.copy_(self._mean)

    @property
    def _first(self) -> int:
        """The worker that computes the mean.  One that is silent does not; when it is back it may."""
        return min((self._peers.rank, *self._peers.members))

    async def _ask_for_mean(self, first: int) -> None:
        """Wait for the mean, or until another worker is to compute it; or if it is this one, until it can."""
        is_first = first == self._peers.rank
        if not is_first:
            self._asked = first
            await self._send_model(first)
        await self._peers.wait_until(
            lambda: self._mean is not None or self._first != first or (is_first and self._peers.all_in(self._models))
        )
        self._asked = None

    async def _send_model(self, dst: int) -> None:
        await self._peers.send(dst, FinalModel(self._peers.replica.params))

    async def _send_mean(self) -> None:
        if self._mean is not None:
            for rank in self._peers.members:
                if rank not in self._have_mean:
                    await self._peers.send(rank, FinalMean(self._mean))

    async def _take_mean(self, src: int, mean: Tensor) -> None:
        self._have_mean.add(src)
        if self._mean is not None:
            return await self._peers.send(src, HasMean())
        self._mean = mean.to(self._peers.replica.params.device, copy=True)  # Its sender may be dead before it is read.
        for rank in self._peers.members:
            await self._peers.send(rank, HasMean())

    # Messages and events.

    async def handle(self, message: Message) -> None:
        src = message.src
        match message:
            case Finished():
                for rank in message.dead:
                    await self._peers.note_death(rank)
                if (last := self._finished.get(src)) is None or message.report >= last.report:
                    self._finished[src] = message
                    await self._check(message)
            case HasAll():
                self._due[src] = max(self._due.get(src, 0), message.own)
                if message.report == self._report.report:  # An older one may not list all that is here.
                    self._confirmed.add(src)
            case FinalModel():
                self._models[src] = message.params
                if self._mean is not None:
                    await self._peers.send(src, FinalMean(self._mean))
            case FinalMean():
                await self._take_mean(src, message.mean)
            case HasMean():
                self._have_mean.add(src)
            case _:
                pass

    async def joined(self) -> None:
        for report in list(self._finished.values()):
            await self._check(report)

    async def peer_joined(self, rank: int) -> None:
        await self._send_report(rank)
        await self._send_mean()

    async def peer_ended(self, rank: int) -> None:
        """It ends when all of its peers have all messages, and the mean: if this worker has not, it is none of them."""
        self._has_lost_end |= self._mean is None
        if rank not in self._complete or (self._is_agreeing and self._has_lost_end):
            raise MissedEnd
        await self.peer_died(rank)

    async def peer_suspected(self, rank: int) -> None:
        """What it has reported holds still when it is back: it may not have noticed, and does not repeat it."""
        if self._peers.has_model:
            await self.joined()
            await self._send_mean()

    async def peer_died(self, rank: int) -> None:
        for known in (self._models, self._finished, self._due):
            known.pop(rank, None)
        self._complete.discard(rank)
        if self._peers.has_model:
            await (
                self.joined()
            )  # Reports may list messages of the dead worker, which can no longer be requested from it.
            await self._send_mean()
            await self._report_to_all()

    async def retransmit(self) -> None:
        for rank in self._peers.members:
            if not self._is_done(rank):
                await self._send_report(rank)
        if self._asked is not None:
            await self._send_model(self._asked)
        await self._send_mean()
