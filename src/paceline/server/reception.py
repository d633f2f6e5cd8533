"""Reception: receives the messages of workers to a shard, keeps its members, and gives it one request at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.endpoint import Endpoint
from paceline.protocol.messages import Message, PeerDied, PeerSuspected, Request, Returned, Wait
from paceline.protocol.requests import Deduplicator, Refusal, UnknownRequest, Verdict
from paceline.protocol.roster import State
from paceline.server.dispatcher import Dispatcher
from paceline.server.landings import Applied
from paceline.server.membership import NOT_A_MEMBER, Membership
from paceline.server.messages import (
    Arrived,
    AskToSave,
    Bring,
    Bye,
    DrawNow,
    DrawWork,
    HowFar,
    Idle,
    Join,
    Leave,
    Probe,
    ProbePush,
    Pull,
    Push,
    Restore,
    Restored,
    SavePoint,
    SendAgain,
    SoFar,
    Start,
    Update,
    Wake,
    WorkerLost,
)
from paceline.server.queues import Event, Queues
from paceline.server.replies import Replies
from paceline.server.rule import Rule
from paceline.server.save_points import SavePoints
from paceline.server.shard_state import ShardState, Wanted, check_value
from paceline.state import StateStore


class Reception:
    """Answers itself what needs no value: membership, work, probes and duplicates."""

    def __init__(
        self, endpoint: Endpoint, held: ShardState, states: StateStore, grace_s: float, return_s: float
    ) -> None:
        self.endpoint = endpoint
        self.held = held
        self.dispatcher = Dispatcher(endpoint, states)
        self.members = Membership(endpoint.layout.worker_ranks, grace_s, return_s)
        self.replies = Replies(endpoint)
        self.queues = Queues()
        self.saves = SavePoints(endpoint, self.members, self.replies)
        self.on_restore: Callable[[Restore], None] = lambda request: None  # Continue from a checkpoint.
        self.applied = Applied(endpoint)
        self._updates = Deduplicator()

    def snapshot(self) -> dict[str, Any]:
        """All that is known, as plain values."""
        return {
            "held": self.held.snapshot(),
            "work": self.dispatcher.snapshot(),
            "members": self.members.snapshot(),
            "queues": self.queues.snapshot(),
            "applied": self.applied.snapshot(),
            "updates": self._updates.snapshot(),
            "saves": self.saves.snapshot(),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.held.restore(saved["held"])
        self.dispatcher.restore(saved["work"])
        self.members.restore(saved["members"])
        self.queues.restore(saved["queues"])
        self.applied.restore(saved["applied"])
        self._updates.restore(saved["updates"])
        self.saves.restore(saved["saves"])

    async def event(self, rule: Rule | None) -> Event | None:
        """The next request, once there is a value; None if a rule is due first, or if the members have changed."""
        while True:
            if self.queues.early and self.held.is_there:
                return self.queues.early.pop(0)
            dues = self.held.due(rule), self.members.waits_until(), self.saves.due, self.dispatcher.due
            due = min((time for time in dues if time is not None), default=None)
            try:
                message = await self.endpoint.recv(timeout=None if due is None else max(0.0, due - self.endpoint.now()))
            except TimeoutError:
                self.members.stop_waiting(self.endpoint.now())
                await self.dispatcher.ask_again()
                return None
            try:
                if isinstance(message, Request):
                    await self.saves.remind(message)
                if isinstance(message, (Join, Wake)) and not await self._admit(message, rule):
                    continue
                if isinstance(message, (Pull, Join, Update)):
                    event = await self._receive(message)
                    if event is not None and self.held.is_there:
                        return event
                    if event is not None:
                        self.queues.early.append(event)
                        await self._ask_for_value()
                elif await self._handle(message, rule):
                    return None
            except Refusal as error:
                await self.replies.refuse(message, error)

    async def _handle(self, message: Message, rule: Rule | None) -> bool:
        """Handle a message that is no update and no pull; whether a request that waits may pass now."""
        src = message.src
        match message:
            case Start():
                self._check_start(message)
                self.held.begin(message.value)
            case Probe():
                return await self._answer_probe(message)
            case DrawWork():
                self.members.check_member(message)
                await self.dispatcher.draw(message, len(self.members.clocks))
            case DrawNow():
                self.members.check_member(message)
                await self.dispatcher.draw_now(message, len(self.members.clocks))
            case Wake():
                return True
            case Idle():
                self.members.check_member(message)
                self.members.idle(message)
                return True
            case Returned() if src in self.endpoint.layout.server_ranks:
                await self._retell_losses(src)
                await self.dispatcher.ask_again(at_once=True)
                for worker in self.members.roster.members:  # It may wait for this shard, and not look at others.
                    await self.endpoint.send(worker, Returned())
            case Leave():
                return await self._leave(message, rule)
            case AskToSave():
                await self.saves.ask(message.number)
                return True
            case SavePoint():
                if src not in self.members.leaving:
                    self.members.check_member(message)
                await self.saves.stand(message)
                return True
            case Restore():
                self.on_restore(message)
                await self.replies.send(message, Restored())
                return True
            case Bye():
                pass
            case PeerDied() | PeerSuspected():
                incarnation = self.members.roster.incarnation(src)
                return await self.lose(src, incarnation, rule, is_dead=isinstance(message, PeerDied))
            case WorkerLost() if src in self.endpoint.layout.server_ranks:
                return await self.lose(message.worker, message.incarnation, rule, is_news=False)
            case HowFar() if src in self.endpoint.layout.server_ranks:
                if message.is_lost:
                    was_member = await self.lose(message.worker, message.incarnation, rule, is_news=False)
                    self.members.roster.void(message.worker, message.incarnation)
                    await self.applied.answer(message)
                    return was_member
                await self.applied.answer(message)
            case SoFar() if src in self.endpoint.layout.server_ranks:
                await self.dispatcher.landed(message)
                return self.saves.is_asked
            case _:
                raise UnknownRequest(message)
        return False

    # Members.

    async def _admit(self, request: Join | Wake, rule: Rule | None) -> bool:
        """A worker joins, or comes back; False if the request is old."""
        src, data_shards = request.src, self.endpoint.layout.workers
        if src in self.endpoint.layout.server_ranks:
            raise Refusal("only workers join")
        if isinstance(request, Join) and request.data_shard >= data_shards:
            raise Refusal(
                f"there is no data shard {request.data_shard}: each minibatch is cut into {data_shards} parts"
            )
        if not self.members.check_admission(request):
            return False
        if request.incarnation > (incarnation := self.members.roster.incarnation(src)):
            # Another shard was the first to declare it dead.
            await self.lose(src, incarnation, rule, is_news=False)
        self.members.admit(request)
        if isinstance(request, Join):
            self.saves.join(src)
        return True

    async def _leave(self, request: Leave, rule: Rule | None) -> bool:
        if self.members.roster.state(request.src) is State.DEAD:
            return False
        if request.src in self.members.leaving:
            await self.replies.send(request, Wait())
            return False
        self.members.leave(request)
        self._drop(request.src, rule)
        await self.dispatcher.let_go(request.src)
        return True

    def _drop(self, worker: int, rule: Rule | None) -> None:
        """A worker has left or died: drop its requests."""
        self.queues.drop(worker)
        self.dispatcher.leave(worker)
        self.held.forget(worker, rule)

    async def lose(
        self, worker: int, incarnation: int, rule: Rule | None, *, is_dead: bool = False, is_news: bool = True
    ) -> bool:
        """A worker is dead, or this incarnation of it is; whether it was a member.  If it `is_news`, tell the other
        shards, which may be too far away to notice."""
        loss = self.members.lose(worker, incarnation, is_dead=is_dead, now=self.endpoint.now())
        if loss is None:
            return False
        self.saves.lose(worker)
        if is_news:
            for other in self.endpoint.layout.server_ranks:
                if other != self.endpoint.rank:
                    await self.endpoint.send(other, WorkerLost(worker, incarnation))
        held = [*self.queues.held(worker), *(draw for draw in self.dispatcher.drawing if draw.src == worker)]
        self._drop(worker, rule)
        for request in held:  # It may be alive after all.
            await self.replies.tell_away(request)
        await self.dispatcher.lose(worker)
        await self._ask_for_value()
        return True

    async def _retell_losses(self, shard: int) -> None:
        """A shard that was killed may not have heard of them."""
        roster = self.members.roster
        for state, newer in ((State.DEAD, 0), (State.SUSPECTED, 1)):
            for worker in roster.ranks_in(state):
                await self.endpoint.send(shard, WorkerLost(worker, roster.incarnation(worker) - newer))

    async def _ask_for_value(self) -> None:
        """Ask a worker for the first value: worker 0, or if it is dead another one."""
        early = self.queues.early
        bringer = 0 if 0 in self.members.clocks else early[0].src if early else None
        if not self.held.is_there and any(event.src == bringer for event in early):
            assert bringer is not None
            await self.endpoint.send(bringer, Bring())

    # Updates and pulls.

    async def _receive(self, request: Pull | Join | Update) -> Event | None:
        """Check an update or a pull; None if it has arrived before."""
        src = request.src
        if not isinstance(request, Update) and self.queues.holds(request):
            await self.replies.send(request, Wait())
            await self._ask_for_value()  # The first value, or the request for it, may have been lost.
            return None
        self.members.check_member(request)
        self.members.wake(request)
        if isinstance(request, Update):
            is_new = self._updates.accept(request) is Verdict.NEW
            if is_new:
                self.queues.check_room(src)
            else:
                self.replies.note_duplicate(request)
            if isinstance(request, Push):
                await self.replies.send(request, Arrived())
            return request if is_new else None
        self.queues.check_room(src)
        if isinstance(request, Join):
            return Wanted.by(request, self.dispatcher.data_shard(src, request.data_shard))
        return Wanted.by(request)

    def _check_start(self, message: Start) -> None:
        if not self.members.roster.is_member(message.src):
            raise Refusal(NOT_A_MEMBER)
        if not self.held.is_there and message.src and self.members.roster.is_member(0):
            raise Refusal("the first value is worker 0's to bring")
        check_value(message.value)

    async def _answer_probe(self, probe: Probe) -> bool:
        """A worker asks, after a timeout, whether its update has arrived; whether a request may pass now."""
        self.members.check_member(probe)
        if self._updates.judge(probe) is Verdict.NEW:
            await self.replies.send(probe, SendAgain())
        elif isinstance(probe, ProbePush):
            await self.replies.send(probe, Arrived())
        elif self.queues.holds(probe) or not self.held.is_there:
            await self.replies.send(probe, Wait())
        else:  # Its answer was lost.
            self.queues.check_room(probe.src)
            self.members.wake(probe)
            self.queues.add(Wanted.by(probe))
            return True
        return False
