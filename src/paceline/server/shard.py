"""Shard: one slice of the parameters, held by one rank, so that its updates are serial by construction.

Workers may join, leave and die at any time.  An update is applied once or not at all, however often it is sent; what makes no sense
is refused by name, and the shard serves on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.codec import Codec
from paceline.endpoint import Endpoint, Message
from paceline.flat import is_finite
from paceline.memory import Memory
from paceline.rows import positions, refusal, union
from paceline.server.gates import Free, Gate
from paceline.server.rules import Push, Rule
from paceline.server.tickets import Ticket, Tickets

PUSHES = ("push", "exchange")  # What brings an update,
ASKS = ("pull", "exchange")  # and what wants the value.
LINGER_S = 10.0  # How long a shard that all have left waits until they have heard how it ended.


class Refused(ValueError):
    """What a shard will not do, and why."""


class Shard:
    """What a server role works with.  It serves once a worker has sent the first value, and until the last one has left.

    `clocks` counts the updates of each worker that is there; one who joins begins with the slowest.  For another in the place of one
    that died the shard waits up to `grace_s` seconds before it ends, if there is work left.  The first shard also says who works on what.
    """

    def __init__(self, endpoint: Endpoint, *, grace_s: float = 0.0) -> None:
        self.endpoint, self.grace_s = endpoint, grace_s
        self.value = torch.empty(0)
        self.has_value = False
        self.version = 0
        self.clocks = dict.fromkeys(endpoint.layout.worker_ranks, 0)
        self.resting: set[int] = set()  # Workers that are there, and for whom there is nothing to do at the moment.
        self.refused = 0
        self.last_refusal: str | None = None
        self._memories: dict[Rule, Memory] = {}
        self._told: dict[int, Tensor] = {}  # What each worker has been told that the value is, where that is told by a codec.
        self._heard: dict[int, int] = {}  # The serial of the last update of each.
        self._changes: deque[tuple[int, Tensor | None]] = deque(maxlen=1024)  # The last versions, and what each has changed.
        self._early: list[Message] = []  # What overtook the first value.
        self._pushed: list[Message] = []  # What the gate has not let pass yet,
        self._waiting: list[Message] = []  # whose update was not applied yet, though a rule has it,
        self._asked: list[Message] = []  # and who wants an answer.
        self._leaving: dict[int, Message] = {}  # Who has said goodbye and wants to know how it ends.
        self._tickets: Tickets | None = None
        self._drawn: dict[int, tuple[int, list[Ticket]]] = {}  # What each was given last, and for which request.
        self._drawing: list[Message] = []  # Who wants a ticket, and there was none.
        self._seats: dict[int, int] = {}  # Whose part of the data those work on who have taken a dead one's place,
        self._done: dict[int, int] = {}  # and how many minibatches were done of each part.
        self._awaited: list[float] = []  # Until when it waits for others in the place of those that died.
        self._is_over = False  # Whether all work is done.

    async def serve(self, rule: Rule, gate: Gate = Free(), *, codec: Codec | None = None, pulls: Codec | None = None) -> None:  # noqa: B008 (frozen)
        """Apply what is pushed and answer what is asked for, each as soon as the gate lets it pass, until the last worker has left."""
        while self.is_needed:
            event = await self.event(rule)
            if event is None:
                if await self._tick(rule):
                    self._release()
            elif event.kind in PUSHES:
                self._pushed.append(event)
            else:
                self._asked.append(event)
            while True:  # Who has pushed is answered before the next push is looked at: the answer must not depend on who waits.
                while (request := self._first(self._asked, gate.may_go_on)) is not None:
                    await self.reply(request, rule, codec=pulls)
                if (push := self._first(self._pushed, gate.may_push)) is None:
                    break
                was_applied = await self.apply(rule, push, codec=codec)
                if was_applied:
                    self._release()
                if push.kind in ASKS and push.src in self.clocks:
                    (self._asked if was_applied or not rule.holds_answers or not push.samples else self._waiting).append(push)
        await self.flush(rule)
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
            if self._early and self.has_value:
                return self._early.pop(0)
            due = rule.due(self._memory(rule)) if rule is not None and self.has_value else None
            if self._awaited and not self.clocks and not self.resting:
                due = min(t for t in (due, self._awaited[-1]) if t is not None)
            try:
                message = await self.endpoint.recv(timeout=None if due is None else max(0.0, due - self.endpoint.now()))
            except TimeoutError:
                self._awaited = [t for t in self._awaited if t > self.endpoint.now()]
                return None
            try:
                if message.kind in ("join", "wake"):
                    self._admit(message.src)
                if message.kind in ("pull", "join", *PUSHES):
                    if message.serial and message.kind not in PUSHES and self._holds(message):
                        await self.endpoint.send(message.src, Message("wait", serial=message.serial))
                        continue
                    new = self._checked(message)
                    if message.kind == "push" and message.serial:
                        await self.endpoint.send(message.src, Message("heard", serial=message.serial))
                    if new is not None and self.has_value:
                        return new
                    if new is not None:
                        self._early.append(new)
                        await self._ask_for_value()
                elif await self._hear(message, rule):
                    return None
            except Refused as error:
                await self.refuse(message, str(error))

    async def _hear(self, message: Message, rule: Rule | None) -> bool:
        """What is neither a push nor a pull; whether somebody may pass now who could not before."""
        kind, src = message.kind, message.src
        if kind == "start":
            if not self.has_value:
                self.value, self.has_value = self.endpoint.room(message.tensors[0]).copy_(message.tensors[0]), True
        elif kind in ("ask push", "ask exchange"):
            return await self._find(message)
        elif kind == "draw":
            await self._draw(message)
        elif kind == "wake":
            return True
        elif kind == "rest":
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
            return True
        elif kind == "bye":
            pass
        elif kind == "gone" or (kind == "lost" and src in self.endpoint.layout.server_ranks):
            return await self._bury(src if kind == "gone" else message.samples, is_news=kind == "gone", rule=rule)
        else:
            raise Refused(f"there is no request of the kind '{kind}'")
        return False

    # Who is there.

    def _admit(self, src: int) -> None:
        if src in self.endpoint.layout.server_ranks:
            raise Refused("only workers join")
        if self._awaited and src not in self.clocks and src not in self.resting:
            self._awaited.pop(0)
        self.resting.discard(src)
        self.clocks.setdefault(src, min(self.clocks.values(), default=0))

    def _drop(self, src: int, rule: Rule | None) -> None:
        """A worker has left, or died."""
        self.clocks.pop(src, None)
        self.resting.discard(src)
        self._told.pop(src, None)
        for held in (self._early, self._pushed, self._waiting, self._asked, self._drawing):
            held[:] = [m for m in held if m.src != src]
        if rule is not None and self.has_value:
            rule.forget(self._memory(rule), src)

    async def _bury(self, dead: int, *, is_news: bool, rule: Rule | None) -> bool:
        """A worker is dead; whether it was still among us.  Other shards may be too far away from it to notice."""
        if dead not in self.clocks and dead not in self.resting:
            return False
        if is_news:
            for other in self.endpoint.layout.server_ranks:
                if other != self.endpoint.rank:
                    await self.endpoint.send(other, Message("lost", samples=dead))
        self._drop(dead, rule)
        if self.grace_s:
            self._awaited.append(self.endpoint.now() + self.grace_s)
        await self._hand_on(dead)
        await self._ask_for_value()
        return True

    async def _ask_for_value(self) -> None:
        """The first worker should have brought the first value before it asked for it; if it is gone, let another do it."""
        bringer = 0 if 0 in self.clocks else self._early[0].src if self._early else None
        if not self.has_value and any(m.src == bringer for m in self._early):
            assert bringer is not None
            await self.endpoint.send(bringer, Message("bring"))

    async def _say_goodbye(self) -> None:
        """All have left: let them know what has become of the value, until all have heard it."""
        for src, message in self._leaving.items():
            await self._tell_the_end(src, message)
        while self._leaving:
            try:
                message = await self.endpoint.recv(timeout=LINGER_S)
            except TimeoutError:
                return
            if message.kind in ("bye", "gone"):
                self._leaving.pop(message.src, None)
            elif message.kind == "leave":
                await self._tell_the_end(message.src, message)
            elif message.kind == "join":
                await self.endpoint.send(message.src, Message("ended", serial=message.serial))

    async def _tell_the_end(self, src: int, message: Message) -> None:
        await self.endpoint.send(src, Message("value", (self.value,), version=self.version, serial=message.serial))

    # Who works on what.

    async def _draw(self, message: Message) -> None:
        src, serial = message.src, message.serial
        if self._drawn.get(src, (0, []))[0] == serial:  # Its answer was lost.
            return await self._give(src, *self._drawn[src])
        if any(m.src == src and m.serial == serial for m in self._drawing):
            return await self.endpoint.send(src, Message("idle", serial=serial))
        first, last, seats = (int(n) for n in message.tensors[0])
        if self._tickets is None:
            try:
                self._tickets = Tickets(first, last, seats)
            except ValueError as error:
                raise Refused(str(error)) from error
        # Few at the end, so that all end at the same time.
        fair = max(1, self._tickets.left // (2 * max(1, len(self.clocks))))
        if taken := self._tickets.take(src, min(message.samples, fair)):
            await self._give(src, serial, taken)
        elif self._tickets.is_over:
            await self.endpoint.send(src, Message("over", serial=serial))
        else:
            self._drawing.append(message)
            await self.endpoint.send(src, Message("idle", serial=serial))

    async def _give(self, src: int, serial: int, tickets: list[Ticket]) -> None:
        self._drawn[src] = serial, tickets
        await self.endpoint.send(src, Message("tickets", (torch.tensor(tickets, dtype=torch.int64),), serial=serial))

    async def _hand_on(self, dead: int) -> None:
        """What a dead worker has not done is for those who have nothing to do."""
        if self._tickets is not None:
            self._tickets.lose(dead)
            self._drawn.pop(dead, None)
            while self._drawing and self._tickets.left:
                message = self._drawing.pop(0)
                await self._give(message.src, message.serial, self._tickets.take(message.src))
            await self._say_if_over()

    async def _say_if_over(self) -> None:
        if self._tickets is not None and self._tickets.is_over:
            while self._drawing:
                message = self._drawing.pop(0)
                await self.endpoint.send(message.src, Message("over", serial=message.serial))

    # Updates and answers.

    def _checked(self, message: Message) -> Message | None:
        """A push or a pull that makes sense; None if it was heard before."""
        src, kind = message.src, message.kind
        if src not in self.clocks:
            if src not in self.resting:
                raise Refused("it is not, or no longer, among the workers; it may join")
            self._admit(src)
        if kind in PUSHES:
            if message.serial and message.serial <= self._heard.get(src, 0):
                return None
            self._heard[src] = message.serial
            if self._tickets is not None and message.steps > self._tickets.held(src):
                raise Refused(f"it says that it has done {message.steps} parts, and was given {self._tickets.held(src)}")
            if not 1 <= len(message.tensors) <= 2:
                raise Refused(f"an update is one tensor, or one and its runs, not {len(message.tensors)} tensors")
            if message.version < 0 or message.samples < 0 or message.steps < 0:
                raise Refused(f"version {message.version}, {message.samples} samples and {message.steps} steps: none can be negative")
        if kind != "join":
            return message
        self._seats[src] = message.samples
        return Message("pull", serial=message.serial, steps=self._done.get(message.samples, 0), src=src)

    async def _find(self, message: Message) -> bool:
        """A worker, who has waited for long, wants to know whether its update has been heard; whether it is to be answered anew."""
        src, serial = message.src, message.serial
        if self._heard.get(src, 0) < serial:
            await self.endpoint.send(src, Message("again", serial=serial))
        elif message.kind == "ask push":
            await self.endpoint.send(src, Message("heard", serial=serial))
        elif self._holds(message):
            await self.endpoint.send(src, Message("wait", serial=serial))
        else:  # Its answer was lost.
            self._asked.append(Message("pull", serial=serial, src=src))
            return True
        return False

    def _holds(self, message: Message) -> bool:
        """Whether a worker waits with good reason."""
        held = (*self._early, *self._pushed, *self._waiting, *self._asked)
        return any(m.src == message.src and m.serial == message.serial for m in held)

    async def refuse(self, message: Message, why: str) -> None:
        """Do nothing of what a worker asks for, and tell it."""
        self.refused += 1
        self.last_refusal = f"a '{message.kind}' of {self.endpoint.layout.name(message.src)}: {why}"
        said = torch.frombuffer(bytearray(why.encode()), dtype=torch.uint8)
        await self.endpoint.send(message.src, Message("refused", (said,), serial=message.serial))

    def _first(self, held: list[Message], may: Callable[[int, Mapping[int, int]], bool]) -> Message | None:
        """Take out the first that may pass."""
        for i, message in enumerate(held):
            if may(message.src, self.clocks):
                return held.pop(i)
        return None

    def _release(self) -> None:
        """Let those have an answer whose updates a rule has held back until now."""
        self._asked += self._waiting
        self._waiting = []

    async def apply(self, rule: Rule, push: Message, *, codec: Codec | None = None) -> bool:
        """Let a rule do what an update asks for; whether it made a new version.  One without samples changes nothing."""
        try:
            applied = bool(push.samples) and await self._apply(rule, push, codec)
        except Refused as error:
            push.kind = "push"  # It gets no other answer.
            await self.refuse(push, str(error))
            applied = False
        if push.src in self.clocks:
            self.clocks[push.src] += 1
        if self._tickets is not None and push.steps:
            self._tickets.do(push.src, push.steps)
            await self._say_if_over()
        elif push.steps:
            seat = self._seats.get(push.src, push.src)
            self._done[seat] = self._done.get(seat, 0) + push.steps
        return applied

    async def _apply(self, rule: Rule, push: Message, codec: Codec | None) -> bool:
        update = self._update(push, codec)
        told = Push(push.src, push.samples, self.version - push.version, len(self.clocks), self.endpoint.now())
        m, runs = self._memory(rule), push.tensors[1] if len(push.tensors) > 1 else None
        if runs is None:
            work = lambda: rule.apply(self._own_value(), update, m, told)  # noqa: E731
        else:
            work = lambda: self._apply_to_some(rule, update, positions(runs), m, told)  # noqa: E731
        applied = await self.endpoint.compute(work, kind="apply", nbytes=push.nbytes)
        self._changes.append((self.version + 1, runs))
        self.endpoint.trace.point(self.endpoint.now(), self.endpoint.rank, self.version, push.samples, None, told.staleness)
        self.version += applied
        return applied

    def _apply_to_some(self, rule: Rule, update: Tensor, where: Tensor, m: Memory, push: Push) -> bool:
        """Let a rule do its work on some values, and on what it remembers of them."""
        value = self._own_value()
        some, part = value[where], _part(m, where, value.shape)
        applied = rule.apply(some, update, part, push)
        value[where] = some
        _put_back(m, part, where, value.shape)
        return applied

    async def _tick(self, rule: Rule) -> bool:
        if not self.has_value:
            return False
        m, now = self._memory(rule), self.endpoint.now()
        applied = await self.endpoint.compute(lambda: rule.tick(self._own_value(), m, now, len(self.clocks)), kind="apply", nbytes=0)
        self.version += applied
        return applied

    async def flush(self, rule: Rule) -> None:
        """Let a rule apply what it still holds back."""
        m = self._memory(rule)
        self.version += await self.endpoint.compute(lambda: rule.flush(self._own_value(), m), kind="apply", nbytes=0)

    async def reply(self, request: Message, rule: Rule | None = None, *, codec: Codec | None = None) -> None:
        """Send the value as it is now, with its version."""
        if rule is not None:
            rule.pulled(self.value, self._memory(rule), request.src)
        if len(request.tensors) > 1 and (changed := self._changed_since(request.version)) is not None:
            tensors = self.value[positions(changed)], changed
        else:
            tensors = (self.value if codec is None else self._news(request.src, codec),)
        await self.endpoint.send(request.src, Message("value", tensors, self.version, serial=request.serial, steps=request.steps))

    def _changed_since(self, version: int) -> Tensor | None:
        """What has changed after a version; None if that is everything, or too long ago."""
        if self.version - version > len(self._changes):
            return None
        runs = [runs for made, runs in self._changes if made > version]
        return None if any(r is None for r in runs) else union([r for r in runs if r is not None] or [torch.empty(0, 2, dtype=torch.int64)])

    def _news(self, src: int, codec: Codec) -> Tensor:
        """What has changed since a worker was last told, encoded; what that leaves out has not changed for it yet."""
        if src not in self._told:
            self._told[src] = self.value.clone()
            return self.value
        told = self._told[src]
        data = kernels.encode(codec, self.value - told, None, None)
        kernels.add(codec, data, told, 1.0, False)
        return data

    def _update(self, push: Message, codec: Codec | None) -> Tensor:
        """What is pushed, if it can be applied."""
        update = push.tensors[0]
        if push.version > self.version:
            raise Refused(f"it was computed from version {push.version}, but this shard has made only {self.version}")
        if codec is not None and update.dtype == torch.uint8:
            try:
                return codec.decode(update, self.value.numel())
            except ValueError as error:
                raise Refused(str(error)) from error
        if len(push.tensors) > 1:
            runs = push.tensors[1]
            if (why := refusal(runs, self.value.numel())) is not None:
                raise Refused(why)
            if update.shape != (int(runs[:, 1].sum()),) or update.dtype != self.value.dtype:
                raise Refused(f"{update.dtype} values of shape {tuple(update.shape)} for runs of {int(runs[:, 1].sum())} values")
        elif update.shape != self.value.shape or update.dtype != self.value.dtype:
            raise Refused(
                f"{update.dtype} values of shape {tuple(update.shape)} for a shard of {self.value.dtype} and {tuple(self.value.shape)}"
            )
        if not is_finite(update):
            raise Refused("it holds NaN or infinity")
        return update

    def _own_value(self) -> Tensor:
        """The value, to be written to; another copy of it if somebody is still reading this one."""
        if self.endpoint.is_read(self.value):
            self.value = self.endpoint.room(self.value).copy_(self.value)
        return self.value

    def _memory(self, rule: Rule) -> Memory:
        if rule not in self._memories:
            self._memories[rule] = Memory(**rule.memory(self.value))
        return self._memories[rule]


def _part(m: Memory, where: Tensor, shape: torch.Size) -> Memory:
    """What a rule remembers of some values; what is not of each value stays as it is."""
    parts = {}
    for name, value in vars(m).items():
        if isinstance(value, Memory):
            parts[name] = _part(value, where, shape)
        else:
            parts[name] = value[where] if isinstance(value, Tensor) and value.shape == shape else value
    return Memory(**parts)


def _put_back(m: Memory, part: Memory, where: Tensor, shape: torch.Size) -> None:
    for name, value in vars(m).items():
        if isinstance(value, Memory):
            _put_back(value, getattr(part, name), where, shape)
        elif isinstance(value, Tensor) and value.shape == shape:
            value[where] = getattr(part, name)
        else:
            setattr(m, name, getattr(part, name))
