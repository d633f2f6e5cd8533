"""Shard: one slice of the parameters, held by one rank, so that its updates are serial by construction.

Workers may join, leave and die at any time.  An update is applied once or not at all, however often it is sent; what makes no sense
is refused by name, and the shard serves on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.endpoint import Endpoint
from paceline.errors import ClusterError
from paceline.protocol.messages import Away, Message, Numbered, PeerDied, PeerSuspected, Reply, Request, Wait, reply_to
from paceline.protocol.requests import Deduplicator, Refusal, Refusals, UnknownRequest, Verdict
from paceline.protocol.roster import State
from paceline.server.dispatcher import Dispatcher
from paceline.server.gates import Free, Gate
from paceline.server.membership import NOT_A_MEMBER, Membership
from paceline.server.messages import (
    Arrived,
    Bring,
    Bye,
    DrawNow,
    DrawWork,
    Exchange,
    Idle,
    Join,
    Leave,
    Probe,
    ProbePush,
    Pull,
    Push,
    RunEnded,
    SendAgain,
    Start,
    Update,
    Value,
    Wake,
    WorkerLost,
)
from paceline.server.queues import Event, Queues
from paceline.server.rules import Rule
from paceline.server.shard_state import ShardState, Wanted, check_value

LINGER_S = 10.0  # A shard that all workers have left waits so long for the next of them to have the final value,
LINGERS = 12  # and so many times that at most, whatever is sent meanwhile.


class Shard:
    """What a server role works with.  It serves once a worker has sent the first value, and until the last one has left.

    It refuses updates with NaN or infinity, unless it `takes_nonfinite`.  The first shard also dispatches work.
    """

    def __init__(self, endpoint: Endpoint, *, grace_s: float = 0.0, takes_nonfinite: bool = False) -> None:
        self.endpoint, self.grace_s = endpoint, grace_s
        self.held = ShardState(endpoint, takes_nonfinite=takes_nonfinite)
        self.dispatcher = Dispatcher(endpoint)
        self.members = Membership(endpoint.layout.worker_ranks, grace_s)
        self.refusals = Refusals()
        self._queues = Queues()
        self._updates = Deduplicator()

    async def serve(
        self,
        rule: Rule,
        gate: Gate = Free(),  # noqa: B008 (frozen)
        *,
        codec: Codec | None = None,
        pulls: Codec | None = None,
    ) -> None:
        """Apply what is pushed and answer what is asked for, each as soon as the gate lets it pass, until the last worker has left."""
        queues = self._queues
        while self.is_needed:
            event = await self.event(rule)
            if event is not None:
                queues.add(event)
            elif await self.held.tick(rule, len(self.clocks)):
                queues.release()
            while True:  # A worker that has pushed is answered before the next update: no answer depends on which others wait.
                while (wanted := queues.next_wanted(gate, self.clocks)) is not None:
                    await self.reply(wanted, rule, codec=pulls)
                if (update := queues.next_update(gate, self.clocks)) is None:
                    break
                await self._apply_and_queue(rule, update, codec)
        await self.held.flush(rule)
        await self._say_goodbye()

    @property
    def clocks(self) -> Mapping[int, int]:
        """How many updates each active worker has pushed."""
        return self.members.clocks

    @property
    def is_needed(self) -> bool:
        return self.members.is_needed

    async def request(self) -> Event | None:
        """The next update or wish for the value; None when no worker is left that could ask."""
        while self.is_needed:
            if (event := await self.event()) is not None:
                return event
        await self._say_goodbye()
        return None

    async def event(self, rule: Rule | None = None) -> Event | None:
        """The next request, once there is a value; None if a rule's time has come first, or the members have changed."""
        while True:
            if self._queues.early and self.held.is_there:
                return self._queues.early.pop(0)
            due = min((t for t in (self.held.due(rule), self.members.waits_until()) if t is not None), default=None)
            try:
                message = await self.endpoint.recv(timeout=None if due is None else max(0.0, due - self.endpoint.now()))
            except TimeoutError:
                self.members.stop_waiting(self.endpoint.now())
                return None
            try:
                if isinstance(message, (Join, Wake)) and not await self._admit(message, rule):
                    continue
                if isinstance(message, (Pull, Join, Update)):
                    event = await self._receive(message)
                    if event is not None and self.held.is_there:
                        return event
                    if event is not None:
                        self._queues.early.append(event)
                        await self._ask_for_value()
                elif await self._handle(message, rule):
                    return None
            except Refusal as error:
                await self.refuse(message, error)

    async def _handle(self, message: Message, rule: Rule | None) -> bool:
        """Handle what is neither an update nor a wish for the value; whether a request that waits may pass now."""
        src = message.src
        match message:
            case Start():
                self._check_start(message)
                self.held.begin(message.value)
            case Probe():
                return await self._answer_probe(message)
            case DrawWork():
                self.members.check_member(message)
                await self.dispatcher.draw(message, len(self.clocks))
            case DrawNow():
                self.members.check_member(message)
                await self.dispatcher.draw_now(message, len(self.clocks))
            case Wake():
                return True
            case Idle():
                self.members.check_member(message)
                self.members.idle(src)
                return True
            case Leave():
                return await self._leave(message, rule)
            case Bye():
                pass
            case PeerDied() | PeerSuspected():
                incarnation = self.members.roster.incarnation(src)
                return await self._lose(src, incarnation, rule, is_dead=isinstance(message, PeerDied))
            case WorkerLost() if src in self.endpoint.layout.server_ranks:
                return await self._lose(message.worker, message.incarnation, rule, is_news=False)
            case _:
                raise UnknownRequest(message)
        return False

    # Members.

    async def _admit(self, request: Join | Wake, rule: Rule | None) -> bool:
        """A worker joins, or comes back; False if that was long ago."""
        src, data_shards = request.src, self.endpoint.layout.workers
        if src in self.endpoint.layout.server_ranks:
            raise Refusal("only workers join")
        if isinstance(request, Join) and request.data_shard >= data_shards:
            raise Refusal(f"there is no data shard {request.data_shard}: each minibatch is cut into {data_shards} parts")
        if not self.members.check_admission(request):
            return False
        if request.incarnation > (incarnation := self.members.roster.incarnation(src)):
            # Another shard was the first to declare it dead.
            await self._lose(src, incarnation, rule, is_news=False)
        self.members.admit(request)
        return True

    async def _leave(self, request: Leave, rule: Rule | None) -> bool:
        if self.members.roster.state(request.src) is State.DEAD:
            return False
        if request.src in self.members.leaving:
            await self._reply(request, Wait())
            return False
        self.members.leave(request)
        self._drop(request.src, rule)
        await self.dispatcher.hand_on(request.src)
        return True

    def _drop(self, worker: int, rule: Rule | None) -> None:
        """A worker has left or died: forget what it has asked for."""
        self._queues.drop(worker)
        self.dispatcher.leave(worker)
        self.held.forget(worker, rule)

    async def _lose(
        self, worker: int, incarnation: int, rule: Rule | None, *, is_dead: bool = False, is_news: bool = True
    ) -> bool:
        """A worker is dead, or this incarnation of it is; whether it was a member.  If it `is_news`, tell the other shards, which may
        be too far away to notice."""
        loss = self.members.lose(worker, incarnation, is_dead=is_dead, now=self.endpoint.now())
        if loss is None:
            return False
        if is_news:
            for other in self.endpoint.layout.server_ranks:
                if other != self.endpoint.rank:
                    await self.endpoint.send(other, WorkerLost(worker, incarnation))
        held = [*self._queues.held(worker), *(draw for draw in self.dispatcher.drawing if draw.src == worker)]
        self._drop(worker, rule)
        for request in held:  # It may be alive after all.
            await self._tell_away(request)
        await self.dispatcher.hand_on(worker)
        await self._ask_for_value()
        return True

    async def _ask_for_value(self) -> None:
        """The first worker should have brought the first value before it asked for it; if it is dead, another one brings it."""
        early = self._queues.early
        bringer = 0 if 0 in self.clocks else early[0].src if early else None
        if not self.held.is_there and any(event.src == bringer for event in early):
            assert bringer is not None
            await self.endpoint.send(bringer, Bring())

    async def _say_goodbye(self) -> None:
        """All workers have left: send them the final value, until all have it."""
        leaving = self.members.leaving
        for request in leaving.values():
            await self._send_final(request)
        end = self.endpoint.now() + LINGERS * LINGER_S
        while leaving and self.endpoint.now() < end:
            try:
                message = await self.endpoint.recv(timeout=LINGER_S)
            except TimeoutError:
                return
            if isinstance(message, (Bye, PeerDied)):
                leaving.pop(message.src, None)
            elif isinstance(message, Leave):
                await self._send_final(message)
            elif message.src not in leaving and message.src not in self.endpoint.layout.server_ranks:
                await self.endpoint.send(message.src, RunEnded())

    async def _send_final(self, request: Leave) -> None:
        await self._is_taken(request.src, reply_to(request, Value(self.held.value, self.held.version)))

    # Updates and answers.

    async def _receive(self, request: Pull | Join | Update) -> Event | None:
        """Check an update or a wish for the value; None if it has come before."""
        src = request.src
        if not isinstance(request, Update) and self._queues.holds(request):
            await self._reply(request, Wait())
            return None
        self.members.check_member(request)
        self.members.wake(src)
        if isinstance(request, Update):
            is_new = self._updates.accept(request) is Verdict.NEW
            if is_new:
                self._queues.check_room(src)
            else:
                name = self.endpoint.layout.name(src)
                self.refusals.add("duplicate", f"a '{request.tag}' of {name}: it has come before")
            if isinstance(request, Push):
                await self._reply(request, Arrived())
            return request if is_new else None
        self._queues.check_room(src)
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
        """A worker, which has waited for long, asks whether its update has arrived; whether it is to be answered again."""
        self.members.check_member(probe)
        if self._updates.judge(probe) is Verdict.NEW:
            await self._reply(probe, SendAgain())
        elif isinstance(probe, ProbePush):
            await self._reply(probe, Arrived())
        elif self._queues.holds(probe) or not self.held.is_there:
            await self._reply(probe, Wait())
        else:  # Its answer was lost.
            self._queues.check_room(probe.src)
            self.members.wake(probe.src)
            self._queues.add(Wanted.by(probe))
            return True
        return False

    async def _apply_and_queue(self, rule: Rule, update: Update, codec: Codec | None) -> None:
        """Apply an update, and note that its sender wants the value, if it does."""
        refused = self.refused
        was_applied = await self.apply(rule, update, codec=codec)
        if was_applied:
            self._queues.release()
        was_refused = self.refused > refused  # Then its sender has had its answer.
        if isinstance(update, Exchange) and not was_refused and self.members.roster.is_member(update.src):
            waits = rule.holds_answers and update.samples and not was_applied
            (self._queues.waiting if waits else self._queues.wanted).append(Wanted.by(update))

    async def apply(self, rule: Rule, update: Update, *, codec: Codec | None = None) -> bool:
        """Let a rule do what an update asks for; whether it made a new version.  One without samples changes nothing."""
        if update.src in self.clocks:
            self.members.clocks[update.src] += 1
        try:
            self.dispatcher.check(update)
            applied = await self.held.apply(rule, update, codec, len(self.clocks))
        except Refusal as error:
            await self.refuse(update, error)
            return False
        finally:
            update.update = torch.empty(0)  # It may lie in its sender's memory, which the sender wants to write to again.
        await self.dispatcher.note(update)
        return applied

    async def reply(self, request: Event, rule: Rule | None = None, *, codec: Codec | None = None) -> None:
        """Send the value as it is now, with its version."""
        wanted = Wanted.by(request) if isinstance(request, Update) else request
        if not await self._is_taken(request.src, self.held.answer(wanted, rule, codec)):
            await self._lose(request.src, self.members.roster.incarnation(request.src), rule)

    async def _is_taken(self, src: int, answer: Reply) -> bool:
        """Send what may be large; False if its receiver has not taken it in time: then no other worker waits for it any longer."""
        try:
            await self.endpoint.send(src, answer)
        except ClusterError:
            return False
        return True

    async def _reply(self, request: Numbered, reply: Reply) -> None:
        await self.endpoint.send(request.src, reply_to(request, reply))

    # Refusals.

    async def refuse(self, message: Message, why: Refusal) -> None:
        """Do nothing of what a message asks for, and tell its sender if it is a request."""
        self.refusals.add(why.reason, f"a '{message.tag}' of {self.endpoint.layout.name(message.src)}: {why}")
        if isinstance(message, Numbered):
            await self._reply(message, why.reply())

    async def _tell_away(self, request: Request | Wanted) -> None:
        """The sender of a request was declared dead before it was answered."""
        text = "it was declared dead; it may join"
        self.refusals.add("older incarnation", f"a request of {self.endpoint.layout.name(request.src)}: {text}")
        away = Away(reason=text, request_id=request.request_id, incarnation=request.incarnation)
        await self.endpoint.send(request.src, away)

    @property
    def refused(self) -> int:
        """How many messages were refused; duplicates do not count."""
        return self.refusals.answered

    @property
    def last_refusal(self) -> str | None:
        return self.refusals.last

    @property
    def value(self) -> Tensor:
        return self.held.value

    @property
    def version(self) -> int:
        """How many times the value has changed."""
        return self.held.version
