"""Shard: one slice of the parameters, held by one rank, so that its updates are serial by construction.

Workers may join, leave and die at any time.  An update is applied once or not at all, however often it is sent; what makes no sense
is refused by name, and the shard serves on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.endpoint import Endpoint, Message
from paceline.errors import ClusterError
from paceline.server.dispatcher import Dispatcher
from paceline.server.gates import Free, Gate
from paceline.server.rules import Rule
from paceline.server.shard_state import Away, Refused, ShardState, check_value

PUSHES = ("push", "exchange")  # What brings an update,
ASKS = ("pull", "exchange")  # and what wants the value.
LINGER_S = 10.0  # How long a shard that all have left waits for the next of them to hear how it ended,
LINGERS = 12  # and so many times that at most, whatever is said meanwhile.
MOST = {"version": 2**62, "samples": 2**31, "serial": 2**62, "steps": 2**31}  # What the numbers in a message may be.
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
        self.refused = 0
        self.last_refusal: str | None = None
        self._heard: dict[int, int] = {}  # The serial of the last update of each,
        self._lives: dict[
            int, int
        ] = {}  # and its life: one that was taken for dead begins another, and what it asked for in this is void.
        self._early: list[Message] = []  # What overtook the first value.
        self._pushed: list[Message] = []  # What the gate has not let pass yet,
        self._waiting: list[Message] = []  # whose update was not applied yet, though a rule has it,
        self._asked: list[Message] = []  # and who wants an answer.
        self._leaving: dict[int, Message] = {}  # Who has said goodbye and wants to know how it ends.
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
            elif event.kind in PUSHES:
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
                was_applied = await self.apply(rule, push, codec=codec)
                if was_applied:
                    self._release()
                if push.kind in ASKS and self._is_there(push.src):
                    (
                        self._asked if was_applied or not rule.holds_answers or not push.samples else self._waiting
                    ).append(push)
        await self.held.flush(rule)
        await self._say_goodbye()

    @property
    def is_needed(self) -> bool:
        return bool(self.clocks or self.resting or (self._awaited and not self._is_over))

    async def request(self) -> Message | None:
        """The next push or pull; None when nobody is left who could ask."""
        while self.is_needed:
            if (event := await self.event()) is not None:
                return event
        await self._say_goodbye()
        return None

    async def event(self, rule: Rule | None = None) -> Message | None:
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
                _check_numbers(message)
                if message.kind in ("join", "wake") and not await self._admit(message, rule):
                    continue
                if message.kind in ("pull", "join", *PUSHES):
                    if message.serial and message.kind not in PUSHES and self._holds(message):
                        await self.endpoint.send(message.src, Message("wait", serial=message.serial))
                        continue
                    new = self._checked(message)
                    if message.kind == "push" and message.serial:
                        await self.endpoint.send(message.src, Message("heard", serial=message.serial))
                    if new is not None and self.held.is_there:
                        return new
                    if new is not None:
                        self._early.append(new)
                        await self._ask_for_value()
                elif await self._hear(message, rule):
                    return None
            except Refused as error:
                await self.refuse(message, error)

    async def _hear(self, message: Message, rule: Rule | None) -> bool:
        """What is neither a push nor a pull; whether somebody may pass now who could not before."""
        kind, src = message.kind, message.src
        if kind == "start":
            self._check_start(message)
            self.held.begin(message.tensors[0])
        elif kind in ("ask push", "ask exchange"):
            return await self._find(message)
        elif kind == "draw":
            self._check_is_there(message)
            await self.desk.draw(message, len(self.clocks))
        elif kind == "now":
            self._check_is_there(message)
            await self.desk.hurry(message, len(self.clocks))
        elif kind == "wake":
            return True
        elif kind == "rest":
            self._check_is_there(message)
            self.clocks.pop(src, None)
            self.resting.add(src)
            return True
        elif kind == "leave":
            if src in self._leaving:
                await self.endpoint.send(src, Message("wait", serial=message.serial))
                return False
            self._leaving[src] = message
            self._is_over |= bool(message.steps)
            self._drop(src, rule)
            await self.desk.hand_on(src)
            return True
        elif kind == "bye":
            pass
        elif kind in ("gone", "silent"):
            return await self._bury(src, self._lives.get(src, 0), is_news=True, rule=rule)
        elif kind == "lost" and src in self.endpoint.layout.server_ranks:
            return await self._bury(message.samples, message.version, is_news=False, rule=rule)
        else:
            raise Refused(f"there is no request of the kind '{kind}'")
        return False

    # Who is there.

    async def _admit(self, message: Message, rule: Rule | None) -> bool:
        """A worker comes, or comes back; False if that was long ago."""
        src, life, data_shards = message.src, self._lives.get(message.src, 0), self.endpoint.layout.workers
        if src in self.endpoint.layout.server_ranks:
            raise Refused("only workers join")
        if message.kind == "join" and message.samples >= data_shards:
            raise Refused(f"there is no seat {message.samples}: each minibatch is cut into {data_shards} parts")
        if (left := self._leaving.get(src)) is not None:
            if message.serial <= left.serial:
                return False
            raise Refused("it has left, and who has left does not come back")
        if message.life < life:
            raise Away("it was taken for dead again; it may join")
        if message.life > life:  # Another shard was the first to take it for dead.
            await self._bury(src, life, is_news=False, rule=rule)
        self._lives[src] = message.life
        if self._awaited and not self._is_there(src):
            self._awaited.pop(0)
        self._rouse(src)
        return True

    def _rouse(self, src: int) -> None:
        self.resting.discard(src)
        self.clocks.setdefault(src, min(self.clocks.values(), default=0))

    def _is_there(self, worker: int) -> bool:
        return worker in self.clocks or worker in self.resting

    def _check_is_there(self, message: Message) -> None:
        if not self._is_there(message.src) or message.life != self._lives.get(message.src, 0):
            raise Away("it is not, or no longer, among the workers; it may join")

    def _drop(self, src: int, rule: Rule | None) -> None:
        """A worker has left, or died."""
        self.clocks.pop(src, None)
        self.resting.discard(src)
        for waiting in (self._early, self._pushed, self._waiting, self._asked):
            waiting[:] = [m for m in waiting if m.src != src]
        self.desk.leave(src)
        self.held.forget(src, rule)

    async def _bury(self, dead: int, life: int, *, is_news: bool, rule: Rule | None) -> bool:
        """A worker is dead, or this life of it is over; whether it was still among us.  Other shards may be too far away to notice."""
        self._leaving.pop(dead, None)
        if not self._is_there(dead) or life < self._lives.get(dead, 0):
            return False
        self._lives[dead] = life + 1
        if is_news:
            for other in self.endpoint.layout.server_ranks:
                if other != self.endpoint.rank:
                    await self.endpoint.send(other, Message("lost", samples=dead, version=life))
        held = [*self._held(dead), *(m for m in self.desk.drawing if m.src == dead)]
        self._drop(dead, rule)
        for message in held:  # It may be alive after all.
            await self.refuse(message, Away("it was taken for dead; it may join"))
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
            await self.endpoint.send(bringer, Message("bring"))

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
            if message.kind in ("bye", "gone"):
                self._leaving.pop(message.src, None)
            elif message.kind == "leave":
                await self._tell_the_end(message.src, message)
            elif message.src not in self._leaving and message.src not in self.endpoint.layout.server_ranks:
                await self.endpoint.send(message.src, Message("ended", serial=message.serial))

    async def _tell_the_end(self, src: int, message: Message) -> None:
        await self._is_taken(
            src, Message("value", (self.held.value,), version=self.held.version, serial=message.serial)
        )

    # Updates and answers.

    def _checked(self, message: Message) -> Message | None:
        """A push or a pull that makes sense; None if it was heard before."""
        src, kind = message.src, message.kind
        self._check_is_there(message)
        self._rouse(src)
        if kind in PUSHES:
            if message.serial and message.serial <= self._heard.get(src, 0):
                return None
            self._heard[src] = message.serial
            if not 1 <= len(message.tensors) <= 2:
                raise Refused(f"an update is one tensor, or one and its runs, not {len(message.tensors)} tensors")
        self._check_room(src)
        if kind != "join":
            return message
        return Message("pull", serial=message.serial, steps=self.desk.data_shard(src, message.samples), src=src)

    def _check_room(self, src: int) -> None:
        if len(self._held(src)) >= MOST_HELD:
            raise Refused(
                f"{MOST_HELD} of its requests wait to be answered, and this shard keeps no more of one worker"
            )

    def _check_start(self, message: Message) -> None:
        if not self._is_there(message.src):
            raise Refused("it is not, or no longer, among the workers")
        if not self.held.is_there and message.src and self._is_there(0):
            raise Refused("the first value is worker 0's to bring")
        check_value(message)

    async def _find(self, message: Message) -> bool:
        """A worker, who has waited for long, wants to know whether its update has been heard; whether it is to be answered anew."""
        src, serial = message.src, message.serial
        self._check_is_there(message)
        if self._heard.get(src, 0) < serial:
            await self.endpoint.send(src, Message("again", serial=serial))
        elif message.kind == "ask push":
            await self.endpoint.send(src, Message("heard", serial=serial))
        elif self._holds(message) or not self.held.is_there:
            await self.endpoint.send(src, Message("wait", serial=serial))
        else:  # Its answer was lost.
            self._check_room(src)
            self._rouse(src)
            self._asked.append(Message("pull", serial=serial, src=src))
            return True
        return False

    def _holds(self, message: Message) -> bool:
        """Whether a worker waits with good reason."""
        return any(m.serial == message.serial for m in self._held(message.src))

    def _held(self, worker: int) -> list[Message]:
        """What a worker has asked for and was not answered."""
        return [m for m in (*self._early, *self._pushed, *self._waiting, *self._asked) if m.src == worker]

    async def refuse(self, message: Message, why: Refused) -> None:
        """Do nothing of what a worker asks for, and tell it."""
        self.refused += 1
        self.last_refusal = f"a '{message.kind}' of {self.endpoint.layout.name(message.src)}: {why}"
        said = torch.frombuffer(bytearray(str(why).encode()), dtype=torch.uint8)
        await self.endpoint.send(message.src, Message(why.answer, (said,), serial=message.serial))

    def _first(self, held: list[Message], may: Callable[[int, Mapping[int, int]], bool]) -> Message | None:
        """Take out the first that may pass."""
        for i, message in enumerate(held):
            if message.src not in self.clocks or may(
                message.src, self.clocks
            ):  # Nobody waits for one who rests, nor need it wait.
                return held.pop(i)
        return None

    def _release(self) -> None:
        """Let those have an answer whose updates a rule has held back until now."""
        self._asked += self._waiting
        self._waiting = []

    async def apply(self, rule: Rule, push: Message, *, codec: Codec | None = None) -> bool:
        """Let a rule do what an update asks for; whether it made a new version.  One without samples changes nothing."""
        if push.src in self.clocks:
            self.clocks[push.src] += 1
        try:
            self.desk.check(push)
            applied = await self.held.apply(rule, push, codec, len(self.clocks))
        except Refused as error:
            push.kind = "push"  # It gets no other answer.
            await self.refuse(push, error)
            return False
        finally:
            push.tensors = push.tensors[1:]  # What it lies in may be its sender's own, who wants to write there again.
        await self.desk.note(push)
        return applied

    async def reply(self, request: Message, rule: Rule | None = None, *, codec: Codec | None = None) -> None:
        """Send the value as it is now, with its version."""
        tensors = self.held.answer(request, rule, codec)
        answer = Message("value", tensors, self.held.version, serial=request.serial, steps=request.steps)
        if not await self._is_taken(request.src, answer):
            await self._bury(request.src, self._lives.get(request.src, 0), is_news=True, rule=rule)

    async def _is_taken(self, src: int, answer: Message) -> bool:
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


def _check_numbers(message: Message) -> None:
    for name, most in MOST.items():
        if not 0 <= (given := getattr(message, name)) <= most:
            raise Refused(f"its {name} is {given}, which is not between 0 and {most}")
