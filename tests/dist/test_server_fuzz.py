"""A hundred thousand messages, most of them invalid, from ranks that have a key: a parameter server continues to serve.

The expected outcome of each message is known: the mailbox drops it, the shard refuses it, replies to it, or needs no
reply. Only a message with a changed bit may have any of these outcomes. The counts must agree, and the value must be
the result of the good worker's updates alone, to the bit.
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf, nan
from random import Random
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor

from paceline.codecs import Fp16, Fp32
from paceline.protocol.messages import Message, Refused, Request
from paceline.server.gates import Bound, Free, RoundRobin
from paceline.server.messages import (
    AllDone,
    Arrived,
    Bring,
    Bye,
    DrawWork,
    Exchange,
    Idle,
    Join,
    Leave,
    ProbeExchange,
    ProbePush,
    Pull,
    Push,
    RunEnded,
    Start,
    Value,
    Wake,
    Work,
    WorkerLost,
)
from paceline.server.rules import (
    Adagrad,
    Compensated,
    Momentum,
    Quorum,
    Scaled,
    Sgd,
)
from paceline.transport.wire import DTYPES, header_of
from tests.dist.served import LAYOUT, NEWCOMER, NUMEL, OTHER, ROGUE, Rogue, Server, kept, resident, serving

MESSAGES, BATCH = 50_000, 1000
MOST_KEPT = 2000  # Objects in a server, of which 600 are its trace's.
# Ids of requests that are sent last. Their replies show that all messages before them have arrived.
LAST = 3 * 10**9
SERVERS: dict[str, dict[str, Any]] = {
    "plain": {"rule": Sgd(lr=0.5)},
    "bounded": {"rule": Scaled(Momentum(lr=0.5)), "gate": Bound(10**6), "is_far": False},
    "gathered": {"rule": Quorum(Compensated(Adagrad(lr=0.5)), least=1), "gate": Free()},
    "encoded": {"rule": Sgd(lr=0.5), "codec": Fp16(), "pulls": Fp32(), "is_far": False},
}
WILD: dict[str, dict[str, Any]] = {
    "in turn": {"rule": Scaled(Adagrad(lr=0.5)), "gate": RoundRobin()},
    "in step": {"rule": Compensated(Momentum(lr=0.5)), "gate": Bound(2), "is_far": False},
}
HUGE = [-(2**63), -1, 2**31 + 1, 2**40, 2**63, 2**64 - 1]
ODD = [None, 1.5, True, b"x", [1], {"a": 1}]
SHARES = {**dict.fromkeys(SERVERS, 8), **dict.fromkeys(WILD, 9)}  # The number of batches of each server.
BAD = torch.full((NUMEL,), nan)
FINE = torch.ones(NUMEL)
DROPPED, REFUSED, NOTHING, ANY = ("dropped",), ("refused",), (), None


class Letter(NamedTuple):
    """Frames, and their outcome: the types of the replies, or that they are dropped. None: any of these."""

    frames: list[bytes]
    outcome: tuple[str, ...] | None


class Fuzz:
    """The messages of one rank."""

    def __init__(self, rogue: Rogue, chance: Random) -> None:
        self.rogue, self.chance = rogue, chance
        self.number, self.parts = 0, 0
        self.last_update = 0  # The id of the last update that has arrived.
        self.has_left = False
        self.kinds: list[tuple[int, Callable[[], list[Letter]]]] = [
            (10, self.noise),
            (10, self.cut),
            (10, self.odd),
            (10, self.miscounted),
            (12, self.lie),
            (8, self.place),
            (6, self.forged),
            (20, self.damaged),
            (6, self.unknown),
            (6, self.no_request),
            (30, self.bad_update),
            (10, self.bad_numbers),
            (8, self.bad_runs),
            (12, self.bad_draw),
            (6, self.bad_start),
            (4, self.bad_join),
            (4, self.twice),
            (6, self.harmless),
            (4, self.draw),
        ]

    def letters(self) -> list[Letter]:
        weights, kinds = zip(*self.kinds, strict=True)
        return self.chance.choices(kinds, weights)[0]()

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def numbered(self, request: Request) -> Request:
        request.request_id = self.next_number()
        return request

    def frames(self, message: Message) -> list[bytes]:
        """The frames that a correct rank would send."""
        tensors = message.tensors()
        raw = [bytes(t.contiguous().view(-1).view(torch.uint8).tolist()) for t in tensors]
        return [header_of(message, [None] * len(tensors)), *raw]

    def answered(self, answers: tuple[str, ...], request: Request) -> list[Letter]:
        """The next request. If the worker has left, every request is refused."""
        return [Letter(self.frames(self.numbered(request)), REFUSED if self.has_left else answers)]

    def body(self, tag: object, forms: Any, **fields: object) -> bytes:
        """A first frame with any content."""
        return msgspec.msgpack.encode([forms, {"type": tag, **fields}])

    # Messages that a mailbox drops.

    def noise(self) -> list[Letter]:
        sizes = [0, 1, 7, 40, 300]
        return [
            Letter(
                [self.chance.randbytes(self.chance.choice(sizes)) for _ in range(self.chance.randint(1, 4))], DROPPED
            )
        ]

    def cut(self) -> list[Letter]:
        head, *rest = self.frames(Push(FINE, samples=1, request_id=1))
        head = (
            head[: self.chance.randrange(len(head))] if self.chance.random() < 0.7 else head + self.chance.randbytes(3)
        )
        return [Letter([head, *rest], DROPPED)]

    def odd(self) -> list[Letter]:
        """A field of another type, or a missing field."""
        numbers = {"version": 0, "samples": 1, "steps": 0, "request_id": 5, "incarnation": 0}
        fields: dict[str, Any] = {"type": "push", "update": 0, **numbers}
        name, forms = self.chance.choice(list(fields)), [("float32", [NUMEL], None)]
        fields[name] = self.chance.choice([*ODD, 7] if name == "type" else [*ODD, "7"])
        head: Any = [forms, fields]
        if self.chance.random() < 0.1:
            sound = {"type": "push", "update": 0, "request_id": 5}
            sound.pop(self.chance.choice(list(sound)))
            head = self.chance.choice([[forms], [forms, fields, 0], {"type": "push"}, "push", 7, [forms, sound]])
        return [Letter([msgspec.msgpack.encode(head), bytes(4 * NUMEL)], DROPPED)]

    def miscounted(self) -> list[Letter]:
        runs = self.chance.choice([None, None, FINE])
        frames = self.frames(Push(FINE, samples=1, runs=runs, request_id=1))
        frames = frames[:-1] if self.chance.random() < 0.5 else frames + [b"x"] * self.chance.randint(1, 20)
        return [Letter(frames, DROPPED)]

    def formed(self, *form: Any, raw: bytes = b"") -> list[Letter]:
        return [Letter([self.body("exchange", [form], update=0, samples=1, request_id=1), raw], DROPPED)]

    def lie(self) -> list[Letter]:
        """The second frame does not match its description."""
        raw, pick = bytes(4 * NUMEL), self.chance.choice
        match self.chance.randrange(6):
            case 0:
                return self.formed("float32", [pick([0, 1, NUMEL - 1, NUMEL + 1, 2**62])], None, raw=raw)
            case 1:
                return self.formed(
                    pick([name for name, t in DTYPES.items() if t.itemsize != 4]), [NUMEL], None, raw=raw
                )
            case 2:
                return self.formed(pick(["complex64", "object", "", "float", "FLOAT32"]), [NUMEL], None, raw=raw)
            case 3:
                return self.formed(
                    "float32", pick([[-NUMEL], [-8, -8], [1] * 65, [2**63], [NUMEL, None], NUMEL]), None, raw=raw
                )
            case 4:
                return self.formed("bool", [4 * NUMEL], None, raw=self.chance.randbytes(4 * NUMEL - 1) + b"\2")
            case _:
                return self.formed("uint8", [0, 2**62, 2**62], None)

    def place(self) -> list[Letter]:
        """A reference to shared memory where there is none."""
        numbers = [0, 1, 63, 64, 65, 4096, 2**20, 2**22, 2**31, 2**63 - 1, *HUGE]
        place = [self.chance.choice([*range(60), *numbers]), *(self.chance.choice(numbers) for _ in range(4))]
        forms = [["float32", [NUMEL], place]]
        return [Letter([self.body("exchange", forms, update=0, samples=1, request_id=1)], DROPPED)]

    def forged(self) -> list[Letter]:
        """A message in another rank's name, about the end of a peer, or of a type with an endless name."""
        long, who = "x" * self.chance.randint(65, 500), self.chance.choice([*range(6), 2**40])
        frame = self.chance.choice(
            [
                self.body("pull", [], src=who, request_id=1),
                self.body("peer died", []),
                self.body("peer suspected", [], src=who),
                self.body(long, [], request_id=1),
            ]
        )
        return [Letter([frame], DROPPED)]

    # Messages with any outcome.

    def damaged(self) -> list[Letter]:
        """A changed bit or byte of a bad update. Its request id does not change, because that decides whether it is a
        duplicate."""
        frames = [bytearray(frame) for frame in self.frames(self.numbered(Exchange(BAD, samples=1)))]
        victim = frames[self.chance.choice([0, 0, 0, 1])]
        value = frames[0].index(b"request_id") + len(b"request_id")
        at = self.chance.choice([i for i in range(len(victim)) if victim is frames[1] or not value <= i < value + 5])
        match self.chance.randrange(4):
            case 0:
                victim[at] ^= 1 << self.chance.randrange(8)
            case 1:
                victim[at] = self.chance.randrange(256)
            case 2:
                victim.insert(at, self.chance.randrange(256))
            case _:
                del victim[at]
        return [Letter([bytes(frame) for frame in frames], ANY)]

    # Messages that a shard refuses.

    def unknown(self) -> list[Letter]:
        names = ["PUSH", "push ", "ask", "drawwork", "", "\0", "é" * 30]
        chosen = self.chance.choice([*names, "".join(chr(self.chance.randrange(33, 999)) for _ in range(9))])
        return [Letter([self.body(chosen, [], request_id=self.next_number())], DROPPED)]

    def no_request(self) -> list[Letter]:
        """A known message type that a shard does not accept."""
        replies = [Value(FINE), Refused("x"), Arrived(), AllDone(), Work(torch.tensor([[0, 1]]))]
        others = [Bring(), RunEnded(), WorkerLost(0)]
        message = self.chance.choice([*replies, *others])
        if message in others:
            return [Letter(self.frames(message), NOTHING)]
        message.request_id = self.next_number()  # pyright: ignore
        return [Letter(self.frames(message), REFUSED)]

    def pushed(self, update: Tensor, **more: Any) -> list[Letter]:
        """An update that is refused when it is applied."""
        cls = self.chance.choice([Push, Exchange])
        letters = self.answered(
            ("arrived", "refused") if cls is Push else REFUSED, cls(update, **{"samples": 1, **more})
        )
        self.last_update = self.number
        return letters

    def bad_update(self) -> list[Letter]:
        hurt = FINE.clone()
        hurt[self.chance.randrange(NUMEL)] = self.chance.choice([nan, inf, -inf])
        shape = self.chance.choice(
            [(), (0,), (1,), (NUMEL - 1,), (NUMEL + 1,), (1, NUMEL), (NUMEL, 1), (8, 8), (0, 2**40), (3000,)]
        )
        dtype = self.chance.choice([t for t in DTYPES.values() if t is not torch.float32])
        form = torch.zeros(self.chance.choice([(NUMEL,), (1,), (NUMEL, 2)]), dtype=dtype)
        match self.chance.randrange(6):
            case 0:
                return [Letter([self.body("push", [], samples=1, request_id=self.next_number())], DROPPED)]
            case 1:
                return self.pushed(torch.zeros(shape), samples=self.chance.randrange(3))
            case 2:
                return self.pushed(form)
            case 3:
                return self.pushed(FINE, version=self.chance.choice([10**6, 2**31, 2**62]))
            case 4:
                return self.pushed(FINE, steps=2**31)
            case _:
                return self.pushed(self.chance.choice([BAD, hurt]))

    def bad_numbers(self) -> list[Letter]:
        """A number out of its range."""
        cls, names = self.chance.choice(
            [
                (Push, ["version", "samples", "steps", "request_id", "incarnation"]),
                (Exchange, ["version", "samples", "steps", "request_id", "incarnation"]),
                *((cls, ["request_id", "incarnation"]) for cls in (Pull, Leave, ProbePush, ProbeExchange, Idle)),
                (Join, ["data_shard", "request_id"]),
                (DrawWork, ["wanted", "request_id"]),
            ]
        )
        known: dict[type[Message], dict[str, Any]] = {
            Push: {"update": FINE},
            Exchange: {"update": FINE},
            Join: {"data_shard": 0},
            DrawWork: {"extent": FINE, "wanted": 1},
        }
        worst = self.chance.choice([-(2**63), -7, -1, 2**63, 2**64 - 1])
        fields = {"request_id": self.next_number(), **known.get(cls, {}), self.chance.choice(names): worst}
        return [Letter(self.frames(cls(**fields)), DROPPED)]

    def bad_runs(self) -> list[Letter]:
        pick, edges = self.chance.choice, [-(2**63), -1, 0, 1, NUMEL - 1, NUMEL, NUMEL + 1, 2**31, 2**63 - 1]
        pairs = torch.tensor(
            [[pick(edges), pick(edges)] for _ in range(self.chance.randrange(4))], dtype=torch.int64
        ).view(-1, 2)
        wrong = [pairs, pairs.float(), pairs.view(-1), pairs.t(), torch.tensor(3), FINE, torch.tensor([[0, 4]])]
        return self.pushed(BAD[: self.chance.choice([1, 3, 4, NUMEL])], runs=pick(wrong))

    def bad_draw(self) -> list[Letter]:
        pick = self.chance.choice
        right = torch.tensor([0, 10, LAYOUT.workers])
        extents = [right.float(), right[:2], torch.tensor(3), right.view(3, 1), BAD, right.int()]
        data_shards = torch.tensor([0, 10, pick([-1, 0, 2, 4, 2**40, 2**63 - 1])])
        if self.chance.random() < 0.2:
            wanted = DrawWork(right, pick([0, 2**31 + 1]), request_id=self.next_number())
            return [Letter(self.frames(wanted), DROPPED)]
        return self.answered(REFUSED, DrawWork(pick([*extents, data_shards]), 1))

    def bad_start(self) -> list[Letter]:
        if self.chance.random() < 0.3:
            return [Letter([self.body("start", [])], DROPPED)]
        value = self.chance.choice([FINE.long(), FINE.view(8, 8), FINE[0], FINE.bool()])
        return [Letter(self.frames(Start(value)), NOTHING)]

    def bad_join(self) -> list[Letter]:
        data_shard = self.chance.choice([LAYOUT.workers, 2**20, *HUGE])
        frames = self.frames(self.numbered(Join(data_shard)))
        return [Letter(frames, REFUSED if 0 <= data_shard <= 2**31 else DROPPED)]

    # Valid messages.

    def twice(self) -> list[Letter]:
        cls = self.chance.choice([Push, Exchange])
        first = self.answered(("arrived", "refused") if cls is Push else REFUSED, cls(BAD, samples=1))
        again = REFUSED if self.has_left else ("arrived",) if cls is Push else NOTHING
        self.last_update = self.number
        return [*first, Letter(first[0].frames, again)]

    def harmless(self) -> list[Letter]:
        match self.chance.randrange(8):
            case 0:
                return self.chance.choice(
                    [
                        self.answered(NOTHING, Idle()),
                        self.answered(NOTHING, Wake()),
                        [Letter(self.frames(Bye()), NOTHING)],
                    ]
                )
            case 1:
                value = self.chance.choice([BAD, FINE, FINE[:3].double()])
                return [Letter(self.frames(Start(value)), NOTHING)]
            case 2:
                probe = self.chance.choice([ProbePush, ProbeExchange])(request_id=10**9)
                return [Letter(self.frames(probe), REFUSED if self.has_left else ("send again",))]
            case 3 | 4 as which if self.last_update:
                probe = (ProbePush if which == 3 else ProbeExchange)(request_id=self.last_update)
                answer = ("arrived",) if which == 3 else ("value",)
                return [Letter(self.frames(probe), REFUSED if self.has_left else answer)]
            case 5:
                return self.answered(("value",), Join(self.chance.randrange(LAYOUT.workers)))
            case 6:
                letters = self.answered(("value",), Exchange(self.chance.choice([BAD, FINE])))
                self.last_update = self.number
                return letters
            case _:
                return self.answered(("value",), Pull())

    def draw(self) -> list[Letter]:
        """Take some work items, or report those that it has as done."""
        if self.parts and self.chance.random() < 0.5:
            parts, self.parts = self.parts, 0
            letters = self.answered(("value",), Exchange(BAD, steps=parts))
            self.last_update = self.number
            return letters
        wanted = self.chance.choice([1, 2, 3])
        self.parts += wanted
        first = self.chance.choice([0, 5, 2**62, -1])  # The first worker has sent the work to do.
        return self.answered(("work",), DrawWork(torch.tensor([first, 2**62, LAYOUT.workers]), wanted))

    def join(self) -> list[Letter]:
        return self.answered(("value",), Join(0))

    def leave(self) -> list[Letter]:
        self.has_left = True
        return [Letter(self.frames(self.numbered(Leave())), NOTHING)]

    def wild(self) -> list[Letter]:
        """A known type with any content, but never a valid update or valid work."""
        pick = self.chance.choice
        wrong = [BAD, BAD[:4], FINE[:3], FINE.long(), torch.tensor(2), torch.tensor([0, 9, 2])]
        wrong += [torch.tensor([[0, 4]]), torch.tensor([[60, 8]])]
        number = pick([1, max(1, self.number), self.next_number()])
        cls: Any = pick(
            [Push, Exchange, Exchange, Pull, Join, ProbePush, ProbeExchange, DrawWork, Start, Idle, Wake, Bye]
        )
        fields: dict[str, Any] = {} if cls in (Start, Bye) else {"request_id": number}
        if cls in (Push, Exchange):
            fields |= {"update": pick(wrong), "version": pick([0, 0, 1, 9]), "samples": pick([0, 1, 2])}
            fields["runs"] = pick([None, None, pick(wrong)])
        elif cls in (ProbePush, ProbeExchange):
            fields["request_id"] = pick([number, 10**9])
        elif cls is Join:
            fields["data_shard"] = pick([0, 1, 2])
        elif cls is DrawWork:
            fields |= {"extent": pick(wrong), "wanted": pick([1, 2])}
        elif cls is Start:
            fields["value"] = pick(wrong)
        if self.chance.random() < 0.1 and (names := [name for name, value in fields.items() if type(value) is int]):
            fields[pick(names)] = pick([-(2**63), -1, 2**63, 2**64 - 1])
        return [Letter(self.frames(cls(**fields)), ANY)]


class Books:
    """The messages that were sent, their expected outcomes, and their real outcomes."""

    def __init__(self, server: Server, rogues: list[Rogue]) -> None:
        self.server, self.rogues = server, rogues
        self.sent, self.open, self.due = 0, 0, Counter[str]()
        self.sizes: list[tuple[int, float]] = []

    def send(self, rogue: Rogue, letter: Letter) -> None:
        rogue.throw(letter.frames)
        self.sent += 1
        self.open += letter.outcome is None
        self.due.update(letter.outcome or ())

    def check(self) -> None:
        """After all messages have arrived: no message is missing, none is extra, and every refused request got a
        reply."""
        seen = sum((rogue.answers for rogue in self.rogues), Counter(dropped=self.server.box.refused))
        assert seen["refused"] == self.server.shard.refused - self.server.silent
        assert not self.due - seen, "there is an answer missing"
        assert (seen - self.due).total() == self.open

    def weigh(self) -> None:
        """Neither the server's state nor the memory of this process grows with the number of messages."""
        self.sizes.append((kept(self.server.shard, set()), resident()))
        (_, before), (things, now) = self.sizes[0], self.sizes[-1]
        assert things < MOST_KEPT and now < before + 16, self.sizes


def test_there_are_this_many_messages():
    assert sum(share * BATCH for share in SHARES.values()) == MESSAGES


@pytest.mark.parametrize("name", SERVERS)
def test_each_message_is_dropped_refused_or_answered_and_counted(name: str):
    chance = Random(name)
    with serving(**SERVERS[name], rogues=(ROGUE, OTHER, NEWCOMER)) as (server, good, rogues):
        good.exchange()
        books, fuzzes = Books(server, rogues), [Fuzz(rogue, chance) for rogue in rogues]
        for batch in range(SHARES[name]):
            visitor = fuzzes[2]
            moves = visitor.join() if batch == 0 else visitor.leave() if batch == SHARES[name] // 2 else []
            letters = [(visitor.rogue, letter) for letter in moves]
            while len(letters) < BATCH - len(rogues):
                fuzz = chance.choice(fuzzes)
                letters += [(fuzz.rogue, letter) for letter in fuzz.letters()]
            for i, (rogue, letter) in enumerate(letters[: BATCH - len(rogues)]):
                books.send(rogue, letter)
                if i % 300 == 0:
                    good.exchange()
            for fuzz in fuzzes:
                last = Letter(fuzz.frames(Pull(request_id=LAST + batch)), REFUSED if fuzz.has_left else ("value",))
                books.send(fuzz.rogue, last)
            for rogue in rogues:
                rogue.take(until=LAST + batch)
            books.check()
            books.weigh()
        assert books.sent == SHARES[name] * BATCH


@pytest.mark.parametrize("name", WILD)
def test_the_server_continues_with_any_requests_waiting_at_a_gate(name: str):
    """This holds even before there is a value. A rogue's request may wait for its turn, and requests beyond a limit are
    refused."""
    chance = Random(name)
    with serving(**WILD[name], rogues=(ROGUE, OTHER)) as (server, good, rogues):
        books, fuzzes = Books(server, rogues), [Fuzz(rogue, chance) for rogue in rogues]
        for _ in range(SHARES[name]):
            for _ in range(BATCH // 2 - 3):
                for fuzz in fuzzes:
                    books.send(fuzz.rogue, *fuzz.wild())
            last: list[Request] = []
            for fuzz in fuzzes:  # No worker waits for an idle one. An old Idle has no effect, so this is new.
                idle, pull, idle_again = (fuzz.numbered(request) for request in (Idle(), Pull(), Idle()))
                for request in (idle, pull, idle_again):
                    books.send(fuzz.rogue, Letter(fuzz.frames(request), ANY))
                last.append(pull)
            good.exchange()
            for rogue, pull in zip(rogues, last, strict=True):
                rogue.take(until=pull.request_id)
            good.exchange()
            books.weigh()
        refused = server.shard.refused - server.silent
        assert sum(rogue.answers["refused"] for rogue in rogues) == refused > BATCH
        assert books.sent == SHARES[name] * BATCH
