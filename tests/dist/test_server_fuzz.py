"""A hundred thousand messages, most of them nonsense, from ranks that have a key: a parameter server serves on.

Of each message it is known what must become of it: the mailbox drops it, the shard refuses it or answers, or it says nothing that wants
an answer.  Only of a message in which a bit was changed it is not known which of these, but it is one.  The counts must agree, and the
value must be what the good worker's updates alone have made of it, to the bit.
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

from paceline import Adagrad, Bound, Compensated, Fp16, Fp32, Free, Momentum, Quorum, RoundRobin, Scaled, Sgd
from paceline.transport.wire import DTYPES, NAMES
from tests.dist.served import LAYOUT, NEWCOMER, NUMEL, OTHER, ROGUE, Rogue, Server, kept, resident, serving

MESSAGES, BATCH = 100_000, 1000
MOST_KEPT = 2000  # Things in a server, of which 600 are its trace's.
LAST = 3 * 10**9  # The serials of requests after which all before them has been heard.
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
SHARES = {**dict.fromkeys(SERVERS, 20), **dict.fromkeys(WILD, 10)}  # So many batches each.
BAD = torch.full((NUMEL,), nan)
FINE = torch.ones(NUMEL)
DROPPED, REFUSED, NOTHING, ANY = ("dropped",), ("refused",), (), None


class Letter(NamedTuple):
    """Frames, and what becomes of them: how they are answered, or that they are dropped; None: one of these."""

    frames: list[bytes]
    outcome: tuple[str, ...] | None


class Fuzz:
    """What one rank says."""

    def __init__(self, rogue: Rogue, chance: Random) -> None:
        self.rogue, self.chance = rogue, chance
        self.serial, self.parts = 0, 0
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
            (10, self.unknown),
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

    def next_serial(self) -> int:
        self.serial += 1
        return self.serial

    def frames(self, kind: str, *tensors: Tensor, **numbers: int) -> list[bytes]:
        """As an honest rank would send it."""
        values = {"version": 0, "samples": 0, "serial": 0, "steps": 0, **numbers}
        forms = [(NAMES[t.dtype], tuple(t.shape), None) for t in tensors]
        raw = [bytes(t.contiguous().view(-1).view(torch.uint8).tolist()) for t in tensors]
        return [msgspec.msgpack.encode([kind, self.rogue.rank, *values.values(), forms]), *raw]

    def answered(self, answers: tuple[str, ...], kind: str, *tensors: Tensor, **numbers: int) -> list[Letter]:
        """Of one who has left, all is refused."""
        return [Letter(self.frames(kind, *tensors, **numbers), REFUSED if self.has_left else answers)]

    # What a mailbox drops.

    def noise(self) -> list[Letter]:
        sizes = [0, 1, 7, 40, 300]
        return [
            Letter(
                [self.chance.randbytes(self.chance.choice(sizes)) for _ in range(self.chance.randint(1, 4))], DROPPED
            )
        ]

    def cut(self) -> list[Letter]:
        head, *rest = self.frames("push", FINE, samples=1)
        head = (
            head[: self.chance.randrange(len(head))] if self.chance.random() < 0.7 else head + self.chance.randbytes(3)
        )
        return [Letter([head, *rest], DROPPED)]

    def odd(self) -> list[Letter]:
        """A field of another type."""
        fields: Any = ["push", self.rogue.rank, 0, 1, 0, 0, []]
        at = self.chance.randrange(7)
        fields[at] = self.chance.choice([*ODD, 7] if at == 0 else ODD if at == 6 else [*ODD, "7"])
        if self.chance.random() < 0.1:
            fields = self.chance.choice([fields[:-1], [*fields, 0], {"kind": "push"}, "push", 7])
        return [Letter([msgspec.msgpack.encode(fields)], DROPPED)]

    def miscounted(self) -> list[Letter]:
        frames = self.frames("push", *[FINE] * self.chance.choice([1, 1, 2]), samples=1)
        frames = frames[:-1] if self.chance.random() < 0.5 else frames + [b"x"] * self.chance.randint(1, 20)
        return [Letter(frames, DROPPED)]

    def formed(self, *form: Any, raw: bytes = b"") -> list[Letter]:
        return [Letter([msgspec.msgpack.encode(["exchange", self.rogue.rank, 0, 1, 0, 0, [form]]), raw], DROPPED)]

    def lie(self) -> list[Letter]:
        """Of what the second frame holds."""
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
        """A parcel where there is none."""
        numbers = [0, 1, 63, 64, 65, 4096, 2**20, 2**22, 2**31, 2**63 - 1, *HUGE]
        place = [self.chance.choice([*range(60), *numbers]), *(self.chance.choice(numbers) for _ in range(4))]
        return [
            Letter(
                [msgspec.msgpack.encode(["exchange", self.rogue.rank, 0, 1, 0, 0, [["float32", [NUMEL], place]]])],
                DROPPED,
            )
        ]

    def forged(self) -> list[Letter]:
        """In another's name, or of somebody's end, or of a kind of endless length."""
        rank, kind = self.rogue.rank, "x" * self.chance.randint(65, 500)
        who = self.chance.choice([r for r in (*range(6), -1, 2**40) if r != rank])
        fields = self.chance.choice(
            [["exchange", who, 0, 1, 0, 0, []], ["gone", rank, 0, 0, 0, 0, []], [kind, rank, 0, 0, 0, 0, []]]
        )
        return [Letter([msgspec.msgpack.encode(fields)], DROPPED)]

    # What may be this or that.

    def damaged(self) -> list[Letter]:
        """A bit, or a byte, of a bad update; but for its serial, which says whether it was heard before."""
        frames = [bytearray(frame) for frame in self.frames("exchange", BAD, samples=1)]
        victim = frames[self.chance.choice([0, 0, 0, 1])]
        at = self.chance.choice(
            [i for i in range(len(victim)) if victim is frames[1] or i != len(b"\x97\xa8exchange") + 3]
        )
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

    # What a shard refuses.

    def unknown(self) -> list[Letter]:
        known = [
            "lost",
            "value",
            "refused",
            "bring",
            "heard",
            "PUSH",
            "push ",
            "ask",
            "ask pull",
            "tickets",
            "ended",
            "",
            "\0",
            "é" * 40,
        ]
        kind = self.chance.choice(
            [*known, "".join(chr(self.chance.randrange(33, 999)) for _ in range(self.chance.randrange(1, 20)))]
        )
        return [
            Letter(self.frames(kind, *[FINE] * self.chance.randrange(3), samples=self.chance.randrange(5)), REFUSED)
        ]

    def pushed(self, *tensors: Tensor, missed_end: bool = True, **numbers: int) -> list[Letter]:
        """An update that is refused: at once, or `late`, when it is to be applied."""
        kind, serial = self.chance.choice(["push", "exchange"]), self.chance.choice([0, self.next_serial()])
        is_heard = missed_end and kind == "push" and serial
        return self.answered(
            ("heard", "refused") if is_heard else REFUSED, kind, *tensors, **{"samples": 1, "serial": serial, **numbers}
        )

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
                return self.pushed(*[FINE] * self.chance.choice([0, 3, 9]), missed_end=False)
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
        name, least = self.chance.choice([("version", -(2**63)), ("samples", -1), ("serial", -7), ("steps", -1)])
        worst = self.chance.choice([least, 2**63, 2**64 - 1])
        kind = self.chance.choice(
            ["push", "exchange", "pull", "join", "draw", "leave", "start", "ask push", "ask exchange", "bye", "rest"]
        )
        return [Letter(self.frames(kind, FINE, **{"samples": 1, name: worst}), REFUSED)]

    def bad_runs(self) -> list[Letter]:
        pick, edges = self.chance.choice, [-(2**63), -1, 0, 1, NUMEL - 1, NUMEL, NUMEL + 1, 2**31, 2**63 - 1]
        pairs = torch.tensor(
            [[pick(edges), pick(edges)] for _ in range(self.chance.randrange(4))], dtype=torch.int64
        ).view(-1, 2)
        wrong = [pairs, pairs.float(), pairs.view(-1), pairs.t(), torch.tensor(3), FINE, torch.tensor([[0, 4]])]
        return self.pushed(BAD[: self.chance.choice([1, 3, 4, NUMEL])], pick(wrong))

    def bad_draw(self) -> list[Letter]:
        pick = self.chance.choice
        right = torch.tensor([0, 10, LAYOUT.workers])
        extents = [
            (),
            (right, right),
            (right.float(),),
            (right[:2],),
            (torch.tensor(3),),
            (right.view(3, 1),),
            (BAD,),
            (right.int(),),
        ]
        data_shards = torch.tensor([0, 10, pick([-1, 0, 2, 4, 2**40, 2**63 - 1])])
        tensors, wanted = pick(
            [*((extent, 1) for extent in extents), ((data_shards,), 1), ((right,), 0), ((right,), 2**31 + 1)]
        )
        return self.answered(REFUSED, "draw", *tensors, samples=wanted, serial=self.next_serial())

    def bad_start(self) -> list[Letter]:
        tensors = self.chance.choice([(), (FINE, FINE), (FINE.long(),), (FINE.view(8, 8),), (FINE[0],), (FINE.bool(),)])
        return [Letter(self.frames("start", *tensors), REFUSED)]

    def bad_join(self) -> list[Letter]:
        return [
            Letter(
                self.frames(
                    "join", samples=self.chance.choice([LAYOUT.workers, 2**20, *HUGE]), serial=self.next_serial()
                ),
                REFUSED,
            )
        ]

    # What makes sense.

    def twice(self) -> list[Letter]:
        serial, kind = self.next_serial(), self.chance.choice(["push", "exchange"])
        first = self.answered(("heard", "refused") if kind == "push" else REFUSED, kind, BAD, samples=1, serial=serial)
        again = self.answered(("heard",) if kind == "push" else NOTHING, kind, BAD, samples=1, serial=serial)
        return first + again

    def harmless(self) -> list[Letter]:
        serial = self.next_serial()
        match self.chance.randrange(8):
            case 0:
                kind = self.chance.choice(["rest", "wake", "bye"])
                outcome = REFUSED if self.has_left and kind == "rest" else NOTHING
                return [Letter(self.frames(kind, *[BAD] * self.chance.randrange(3)), outcome)]
            case 1:
                return self.answered(NOTHING, "start", self.chance.choice([BAD, FINE, FINE[:3].double()]))
            case 2:
                return self.answered(("again",), self.chance.choice(["ask push", "ask exchange"]), serial=10**9)
            case 3:
                return self.answered(("heard",), "ask push")
            case 4:
                return self.answered(("value",), "ask exchange")
            case 5:
                return self.answered(("value",), "join", samples=self.chance.randrange(LAYOUT.workers), serial=serial)
            case 6:
                return self.answered(("value",), "exchange", self.chance.choice([BAD, FINE]), serial=serial)
            case _:
                version = self.chance.choice([0, 5, 2**62])
                return self.answered(
                    ("value",), "pull", *[BAD] * self.chance.randrange(4), version=version, serial=serial
                )

    def draw(self) -> list[Letter]:
        """Take some parts, or say that those it has are done."""
        if self.parts and self.chance.random() < 0.5:
            parts, self.parts = self.parts, 0
            return self.answered(("value",), "exchange", BAD, steps=parts, serial=self.next_serial())
        wanted = self.chance.choice([1, 2, 3])
        self.parts += wanted
        first = self.chance.choice([0, 5, 2**62, -1])  # Whoever was first has said what there is to do.
        return self.answered(
            ("tickets",),
            "draw",
            torch.tensor([first, 2**62, LAYOUT.workers]),
            samples=wanted,
            serial=self.next_serial(),
        )

    def join(self) -> list[Letter]:
        return self.answered(("value",), "join", serial=self.next_serial())

    def leave(self) -> list[Letter]:
        self.has_left = True
        return [Letter(self.frames("leave", serial=self.next_serial()), NOTHING)]

    def wild(self) -> list[Letter]:
        """A kind that there is, with anything; but never an update, or work, that makes sense."""
        pick = self.chance.choice
        kinds = [
            "push",
            "exchange",
            "exchange",
            "pull",
            "join",
            "ask push",
            "ask exchange",
            "draw",
            "start",
            "rest",
            "wake",
            "bye",
        ]
        wrong = [BAD, BAD[:4], FINE[:3], FINE.long(), torch.tensor(2), torch.tensor([0, 9, 2])]
        wrong += [torch.tensor([[0, 4]]), torch.tensor([[60, 8]])]
        numbers = {
            "version": pick([0, 0, 1, 9]),
            "samples": pick([0, 1, 2]),
            "serial": pick([0, self.serial, self.next_serial(), 10**9]),
        }
        if self.chance.random() < 0.2:
            name = pick(["version", "samples", "serial", "steps"])
            # A serial of 2**40 would begin another life, and all that it says in this would be void.
            numbers[name] = pick([n for n in HUGE if name != "serial" or n != 2**40])
        return [
            Letter(self.frames(pick(kinds), *(pick(wrong) for _ in range(pick([0, 1, 1, 2, 2, 3]))), **numbers), ANY)
        ]


class Books:
    """What was sent, what must have become of it, and what has."""

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
        """Once all was heard: nothing is missing, nothing is too much, and who was refused was told."""
        seen = sum((rogue.answers for rogue in self.rogues), Counter(dropped=self.server.box.refused))
        assert seen["refused"] == self.server.shard.refused
        assert not self.due - seen, "there is an answer missing"
        assert (seen - self.due).total() == self.open

    def weigh(self) -> None:
        """Neither what the server keeps nor the memory of this process grows with what is said."""
        self.sizes.append((kept(self.server.shard, set()), resident()))
        (_, before), (things, now) = self.sizes[0], self.sizes[-1]
        assert things < MOST_KEPT and now < before + 16, self.sizes


def test_there_are_so_many_messages():
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
                books.send(fuzz.rogue, *fuzz.answered(("value",), "pull", serial=LAST + batch))
            for rogue in rogues:
                rogue.take(until=LAST + batch)
            books.check()
            books.weigh()
        assert books.sent == SHARES[name] * BATCH


@pytest.mark.parametrize("name", WILD)
def test_whatever_waits_at_a_gate_the_server_serves_on(name: str):
    """Even before there is a value.  What a rogue asks for may wait until its turn comes, and more than so much is refused."""
    chance = Random(name)
    with serving(**WILD[name], rogues=(ROGUE, OTHER)) as (server, good, rogues):
        books, fuzzes = Books(server, rogues), [Fuzz(rogue, chance) for rogue in rogues]
        for batch in range(SHARES[name]):
            for _ in range(BATCH // 2 - 3):
                for fuzz in fuzzes:
                    books.send(fuzz.rogue, *fuzz.wild())
            for fuzz in fuzzes:  # Nobody waits for one who rests.
                for kind, serial in (("rest", 0), ("pull", LAST + batch), ("rest", 0)):
                    books.send(fuzz.rogue, Letter(fuzz.frames(kind, serial=serial), ANY))
            good.exchange()
            for rogue in rogues:
                rogue.take(until=LAST + batch)
            good.exchange()
            books.weigh()
        assert sum(rogue.answers["refused"] for rogue in rogues) == server.shard.refused > BATCH
        assert books.sent == SHARES[name] * BATCH
