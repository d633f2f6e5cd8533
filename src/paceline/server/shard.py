"""Shard: one slice of the parameters, held by one rank, so that its updates are serial by construction.

Workers may join, leave and die at any time.  An update is applied once or not at all, however often it is sent; what makes no sense
is refused by name, and the shard serves on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.endpoint import Endpoint
from paceline.errors import ClusterError
from paceline.protocol.messages import (
    Away,
    Message,
    Numbered,
    PeerDied,
    PeerSuspected,
    Reply,
    Request,
    Wait,
    reply_to,
)
from paceline.protocol.requests import (
    Deduplicator,
    NotAMember,
    OlderIncarnation,
    Refusal,
    Refusals,
    UnknownRequest,
    Verdict,
)
from paceline.server.dispatcher import Dispatcher
from paceline.server.gates import Free, Gate
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
from paceline.server.rules import Rule
from paceline.server.shard_state import ShardState, Wanted, check_value

Event = Update | Wanted
E = TypeVar("E", Update, Wanted)
LINGER_S = 10.0  # How long a shard that all have left waits for the next of them to hear how it ended,
LINGERS = 12  # and so many times that at most, whatever is said meanwhile.
MOST_HELD = 64  # Requests of one worker that a shard keeps until it can answer them.


class Shard:
    """What a server role works with.  It serves once a worker has sent the first value, and until the last one has left.

    `clocks` counts the updates of each worker that is there; one who joins begins with the slowest.  For another in the place of one
    that died the shard waits up to `grace_s` seconds before it ends, if there is work left.  It refuses updates with NaN or infinity,
    unless it `takes_nonfinite`.  The first shard also says who works on what.
    """

    def __init__(self, endpoint: Endpoint, *, grace_s: float = 0.0, takes_nonfinite: bool = False) -> None:
        self.endpoint, self.grace_s = endpoint, grace_s
        self.held = ShardState(endpoint, takes_nonfinite=takes_nonfinite)
        self.desk = Dispatcher(endpoint)
        self.clocks = dict.fromkeys(endpoint.layout.worker_ranks, 0)
        self.resting: set[int] = set()  # Workers that are there, and for whom there is nothing to do at the moment.
        self.refusals = Refusals()
        self._updates = Deduplicator()
        self._incarnations: dict[int, int] = {}  # A worker that was declared dead begins another.
        self._early: list[Event] = []  # What overtook the first value.
        self._pushed: list[Update] = []  # Updates that the gate has not let pass yet,
        self._waiting: list[Wanted] = []  # workers whose update was not applied yet, though a rule has it,
        self._asked: list[Wanted] = []  # and workers that want the value.
        self._leaving: dict[int, Leave] = {}  # Workers that have left, and wait for the final value.
        self._awaited: list[float] = []  # Until when it waits for others in the place of those that died.
        self._is_over = False  # Whether all work is done.

    async def serve(
        self,
        rule: Rule,
        gate: Gate = Free(),  # noqa: B008 (frozen)
        *,
        codec: Codec | None = None,
        pulls: Codec | None = None,
    ) -> None:
        """Apply what is pushed and answer what is asked for, each as soon as the gate lets it pass, until the last worker has left."""
        while self.is_needed:
            event = await self.event(rule)
            if event is None:
                if await self.held.tick(rule, len(self.clocks)):
                    self._release()
            elif isinstance(event, Update):
                self._pushed.append(event)
            else:
                self._asked.append(event)
            while (
                True
            ):  # Who has pushed is answered before the next push is looked at: the answer must not depend on who waits.
                while (request := self._first(self._asked, gate.may_go_on)) is not None:
                    await self.reply(request, rule, codec=pulls)
                if (push := self._first(self._pushed, gate.may_push)) is None:
                    break
                refused = self.refused
                was_applied = await self.apply(rule, push, codec=codec)
                was_refused = self.refused > refused  # Then it gets no other answer.
                if was_applied:
                    self._release()
                if isinstance(push, Exchange) and not was_refused and self._is_there(push.src):
                    waits = rule.holds_answers and push.samples and not was_applied
                    (self._waiting if waits else self._asked).append(Wanted.by(push))
        await self.held.flush(rule)
        await self._say_goodbye()

    @property
    def is_needed(self) -> bool:
        return bool(self.clocks or self.resting or (self._awaited and not self._is_over))

    async def request(self) -> Event | None:
        """The next push or pull; None when nobody is left who could ask."""
        while self.is_needed:
            if (event := await self.event()) is not None:
                return event
        await self._say_goodbye()
        return None

    async def event(self, rule: Rule | None = None) -> Event | None:
        """The next push or pull, once there is a value; None if a rule's time has come first, or other workers are there now."""
        while True:
            if self._early and self.held.is_there:
                return self._early.pop(0)
            due = self.held.due(rule)
            if self._awaited and not self.clocks and not self.resting:
                due = min(t for t in (due, self._awaited[-1]) if t is not None)
            try:
                message = await self.endpoint.recv(timeout=None if due is None else max(0.0, due - self.endpoint.now()))
            except TimeoutError:
                self._awaited = [t for t in self._awaited if t > self.endpoint.now()]
                return None
            try:
                if isinstance(message, (Join, Wake)) and not await self._admit(message, rule):
                    continue
                if isinstance(message, (Pull, Join, Update)):
                    if not isinstance(message, Update) and self._holds(message):
                        await self._reply(message, Wait())
                        continue
                    new = self._checked(message)
                    if isinstance(message, Push):
                        await self._reply(message, Arrived())
                    if new is not None and self.held.is_there:
                        return new
                    if new is not None:
                        self._early.append(new)
                        await self._ask_for_value()
                elif await self._hear(message, rule):
                    return None
            except Refusal as error:
                await self.refuse(message, error)

    async def _hear(self, message: Message, rule: Rule | None) -> bool:
        """Handle what is neither an update nor a pull; whether a request that waits may pass now."""
        src = message.src
        match message:
            case Start():
                self._check_start(message)
                self.held.begin(message.value)
            case Probe():
                return await self._find(message)
            case DrawWork():
                self._check_is_there(message)
                await self.desk.draw(message, len(self.clocks))
            case DrawNow():
                self._check_is_there(message)
                await self.desk.draw_now(message, len(self.clocks))
            case Wake():
                return True
            case Idle():
                self._check_is_there(message)
                self.clocks.pop(src, None)
                self.resting.add(src)
                return True
            case Leave():
                if src in self._leaving:
                    await self._reply(message, Wait())
                    return False
                self._leaving[src] = message
                self._is_over |= message.all_done
                self._drop(src, rule)
                await self.desk.hand_on(src)
                return True
            case Bye():
                pass
            case PeerDied() | PeerSuspected():
                return await self._bury(src, self._incarnations.get(src, 0), is_news=True, rule=rule)
            case WorkerLost() if src in self.endpoint.layout.server_ranks:
                return await self._bury(message.worker, message.incarnation, is_news=False, rule=rule)
            case _:
                raise UnknownRequest(message)
        return False

    # Who is there.

    async def _admit(self, message: Join | Wake, rule: Rule | None) -> bool:
        """A worker joins, or comes back; False if that was long ago."""
        src, incarnation = message.src, self._incarnations.get(message.src, 0)
        data_shards = self.endpoint.layout.workers
        if src in self.endpoint.layout.server_ranks:
            raise Refusal("only workers join")
        if isinstance(message, Join) and message.data_shard >= data_shards:
            raise Refusal(
                f"there is no data shard {message.data_shard}: each minibatch is cut into {data_shards} parts"
            )
        if (left := self._leaving.get(src)) is not None:
            if (message.incarnation, message.request_id) <= (left.incarnation, left.request_id):
                return False
            raise Refusal("it has left, and a worker that has left does not come back")
        if message.incarnation < incarnation:
            raise OlderIncarnation("it was declared dead again; it may join")
        if message.incarnation > incarnation:  # Another shard was the first to declare it dead.
            await self._bury(src, incarnation, is_news=False, rule=rule)
        self._incarnations[src] = message.incarnation
        if self._awaited and not self._is_there(src):
            self._awaited.pop(0)
        self._rouse(src)
        return True

    def _rouse(self, src: int) -> None:
        self.resting.discard(src)
        self.clocks.setdefault(src, min(self.clocks.values(), default=0))

    def _is_there(self, worker: int) -> bool:
        return worker in self.clocks or worker in self.resting

    def _check_is_there(self, message: Request) -> None:
        text = "it is not, or no longer, among the workers; it may join"
        if message.incarnation < self._incarnations.get(message.src, 0):
            raise OlderIncarnation(text)
        if not self._is_there(message.src) or message.incarnation != self._incarnations.get(message.src, 0):
            raise NotAMember(text)

    def _drop(self, src: int, rule: Rule | None) -> None:
        """A worker has left, or died."""
        self.clocks.pop(src, None)
        self.resting.discard(src)
        self._early = [event for event in self._early if event.src != src]
        self._pushed = [push for push in self._pushed if push.src != src]
        self._waiting = [wanted for wanted in self._waiting if wanted.src != src]
        self._asked = [wanted for wanted in self._asked if wanted.src != src]
        self.desk.leave(src)
        self.held.forget(src, rule)

    async def _bury(self, dead: int, incarnation: int, *, is_news: bool, rule: Rule | None) -> bool:
        """A worker is dead, or this incarnation of it is; whether it was a member.  Other shards may be too far away to notice."""
        self._leaving.pop(dead, None)
        if not self._is_there(dead) or incarnation < self._incarnations.get(dead, 0):
            return False
        self._incarnations[dead] = incarnation + 1
        if is_news:
            for other in self.endpoint.layout.server_ranks:
                if other != self.endpoint.rank:
                    await self.endpoint.send(other, WorkerLost(dead, incarnation))
        held = [*self._held(dead), *(request for request in self.desk.drawing if request.src == dead)]
        self._drop(dead, rule)
        for request in held:  # It may be alive after all.
            await self._tell_away(request)
        if self.grace_s:
            self._awaited.append(self.endpoint.now() + self.grace_s)
        await self.desk.hand_on(dead)
        await self._ask_for_value()
        return True

    async def _ask_for_value(self) -> None:
        """The first worker should have brought the first value before it asked for it; if it is gone, let another do it."""
        bringer = 0 if 0 in self.clocks else self._early[0].src if self._early else None
        if not self.held.is_there and any(m.src == bringer for m in self._early):
            assert bringer is not None
            await self.endpoint.send(bringer, Bring())

    async def _say_goodbye(self) -> None:
        """All have left: let them know what has become of the value, until all have heard it."""
        for src, message in self._leaving.items():
            await self._tell_the_end(src, message)
        end = self.endpoint.now() + LINGERS * LINGER_S
        while self._leaving and self.endpoint.now() < end:
            try:
                message = await self.endpoint.recv(timeout=LINGER_S)
            except TimeoutError:
                return
            if isinstance(message, (Bye, PeerDied)):
                self._leaving.pop(message.src, None)
            elif isinstance(message, Leave):
                await self._tell_the_end(message.src, message)
            elif message.src not in self._leaving and message.src not in self.endpoint.layout.server_ranks:
                await self.endpoint.send(message.src, RunEnded())

    async def _tell_the_end(self, src: int, message: Leave) -> None:
        await self._is_taken(src, reply_to(message, Value(self.held.value, self.held.version)))

    # Updates and answers.

    def _checked(self, message: Pull | Join | Update) -> Event | None:
        """A push or a pull that makes sense; None if it has come before."""
        src = message.src
        self._check_is_there(message)
        self._rouse(src)
        if isinstance(message, Update) and self._updates.accept(message) is not Verdict.NEW:
            self.refusals.add("duplicate", f"a '{message.tag}' of {self.endpoint.layout.name(src)}: it has come before")
            return None
        self._check_room(src)
        if isinstance(message, Update):
            return message
        return Wanted.by(message, self.desk.data_shard(src, message.data_shard) if isinstance(message, Join) else 0)

    def _check_room(self, src: int) -> None:
        if len(self._held(src)) >= MOST_HELD:
            raise Refusal(
                f"{MOST_HELD} of its requests wait to be answered, and this shard keeps no more of one worker"
            )

    def _check_start(self, message: Start) -> None:
        if not self._is_there(message.src):
            raise Refusal("it is not, or no longer, among the workers")
        if not self.held.is_there and message.src and self._is_there(0):
            raise Refusal("the first value is worker 0's to bring")
        check_value(message.value)

    async def _find(self, probe: Probe) -> bool:
        """A worker, which has waited for long, asks whether its update has arrived; whether it is to be answered again."""
        self._check_is_there(probe)
        if self._updates.judge(probe) is Verdict.NEW:
            await self._reply(probe, SendAgain())
        elif isinstance(probe, ProbePush):
            await self._reply(probe, Arrived())
        elif self._holds(probe) or not self.held.is_there:
            await self._reply(probe, Wait())
        else:  # Its answer was lost.
            self._check_room(probe.src)
            self._rouse(probe.src)
            self._asked.append(Wanted.by(probe))
            return True
        return False

    def _holds(self, request: Request) -> bool:
        """Whether a worker waits with good reason."""
        return any(held.request_id == request.request_id for held in self._held(request.src))

    def _held(self, worker: int) -> list[Event]:
        """What a worker has asked for and was not answered."""
        return [h for h in (*self._early, *self._pushed, *self._waiting, *self._asked) if h.src == worker]

    async def refuse(self, message: Message, why: Refusal) -> None:
        """Do nothing of what a message asks for, and tell its sender if it is a request."""
        self.refusals.add(why.reason, f"a '{message.tag}' of {self.endpoint.layout.name(message.src)}: {why}")
        if isinstance(message, Numbered):
            await self._reply(message, why.reply())

    @property
    def refused(self) -> int:
        """How many messages were refused; duplicates do not count."""
        return self.refusals.answered

    @property
    def last_refusal(self) -> str | None:
        return self.refusals.last

    async def _tell_away(self, request: Request | Wanted) -> None:
        away = Away(reason="it was declared dead; it may join")
        away.request_id = request.request_id
        away.incarnation = request.incarnation
        self.refusals.add("older incarnation", f"a request of {self.endpoint.layout.name(request.src)}: {away.reason}")
        await self.endpoint.send(request.src, away)

    async def _reply(self, request: Numbered, reply: Reply) -> None:
        await self.endpoint.send(request.src, reply_to(request, reply))

    def _first(self, held: list[E], may: Callable[[int, Mapping[int, int]], bool]) -> E | None:
        """Take out the first that may pass.  No worker waits for an idle one, nor need that wait."""
        for i, event in enumerate(held):
            if event.src not in self.clocks or may(event.src, self.clocks):
                return held.pop(i)
        return None

    def _release(self) -> None:
        """Let those have an answer whose updates a rule has held back until now."""
        self._asked += self._waiting
        self._waiting = []

    async def apply(self, rule: Rule, push: Update, *, codec: Codec | None = None) -> bool:
        """Let a rule do what an update asks for; whether it made a new version.  One without samples changes nothing."""
        if push.src in self.clocks:
            self.clocks[push.src] += 1
        try:
            self.desk.check(push)
            applied = await self.held.apply(rule, push, codec, len(self.clocks))
        except Refusal as error:
            await self.refuse(push, error)
            return False
        finally:
            push.update = torch.empty(0)  # It may lie in its sender's own memory, which that wants to write to again.
        await self.desk.note(push)
        return applied

    async def reply(self, request: Event, rule: Rule | None = None, *, codec: Codec | None = None) -> None:
        """Send the value as it is now, with its version."""
        wanted = Wanted.by(request) if isinstance(request, Update) else request
        if not await self._is_taken(request.src, self.held.answer(wanted, rule, codec)):
            await self._bury(request.src, self._incarnations.get(request.src, 0), is_news=True, rule=rule)

    async def _is_taken(self, src: int, answer: Reply) -> bool:
        """Send what may be large; False if its receiver has not taken it in time: then nobody else is to wait for it any longer."""
        try:
            await self.endpoint.send(src, answer)
        except ClusterError:
            return False
        return True

    @property
    def value(self) -> Tensor:
        return self.held.value

    @property
    def version(self) -> int:
        """How many times the value has changed."""
        return self.held.version
