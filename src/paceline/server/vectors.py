"""Vectors: a shard's slices of named vectors, and the few operations by which a coordinator works on them (Dean et al.
2012).

The coordinator says by name what is to be done, `axpy -0.5 y3 q`, and hears nothing but inner products.  What workers
push is held back until the coordinator says that it counts, so that an update is taken by all shards or by none.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from paceline.codecs.layout import is_finite
from paceline.endpoint import Endpoint
from paceline.errors import ClusterError
from paceline.protocol.messages import Message, Numbered, PeerDied, PeerSuspected, Reply, reply_to
from paceline.protocol.requests import Deduplicator, Refusal, UnknownRequest, Verdict
from paceline.server.messages import (
    End,
    Ended,
    GetValue,
    Held,
    Products,
    PushSum,
    RunProgram,
    SetValue,
    Value,
    WorkerLost,
)
from paceline.server.shard import Shard
from paceline.server.shard_state import check_value

# What each operation is told: a number, a count, a vector that there is, or one that may be new.
OPERATIONS = {
    "zero": ("new",),  # x = 0
    "copy": ("vector", "new"),  # y = x
    "scale": ("number", "vector"),  # x = a * x
    "axpy": ("number", "vector", "vector"),  # y = y + a * x
    "mul": ("vector", "vector", "new"),  # z = x * y, value by value
    "add": ("vector", "vector", "new"),  # z = x + y
    "dot": ("vector", "vector"),  # this shard's part of the inner product
    "take": (
        "count",
        "count",
        "count",
        "vector",
    ),  # x = x + what a worker has pushed: whose, in which pass, and which of its sums
    "forget": (),  # what was pushed and not taken
}


class Vectors:
    """Nothing until it has the first value, of `w`."""

    def __init__(self, endpoint: Endpoint, *, takes_nonfinite: bool) -> None:
        self.endpoint, self.takes_nonfinite = endpoint, takes_nonfinite
        self._named: dict[str, Tensor] = {}
        self._pushed: dict[
            int, tuple[tuple[int, int], Tensor]
        ] = {}  # The last push of each worker, of which pass and sum.

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._named:
            raise Refusal(f"there is no vector '{name}' here, only {sorted(self._named)}")
        return self._named[name]

    def begin(self, value: Tensor) -> None:
        """Take the first value of `w`, unless there is one."""
        check_value(value)
        if not self._named:
            self._named["w"] = self.endpoint.send_buffer(value).copy_(value)

    def hold(self, push: PushSum) -> None:
        """Keep what a worker has pushed, in the place of what it has pushed before."""
        like, total = self["w"], push.total
        which = push.pass_number, push.sum_number
        if (total.dtype, total.shape) != (like.dtype, like.shape):
            raise Refusal(
                f"a sum of {total.dtype} and shape {tuple(total.shape)} for a shard of {like.dtype} and "
                f"{tuple(like.shape)}"
            )
        if not self.takes_nonfinite and not is_finite(total):
            raise Refusal("it holds NaN or infinity")
        if push.src not in self._pushed or self._pushed[push.src][0] < which:
            self._pushed[push.src] = which, total.clone()

    def run(self, program: str) -> list[float]:
        """Do what each line says, all or nothing; the inner products that are asked for."""
        parsed = self._parsed(program)
        return [found for operation, given in parsed if (found := self._do(operation, given)) is not None]

    @property
    def nbytes(self) -> int:
        """Of one vector."""
        return self["w"].nbytes

    def _parsed(self, program: str) -> list[tuple[str, list[Any]]]:
        known, parsed = set(self._named), list[tuple[str, list[Any]]]()
        for line in program.splitlines():
            operation, *words = line.split() or [""]
            if operation not in OPERATIONS:
                raise Refusal(f"'{line}': there is no operation '{operation}', only {', '.join(OPERATIONS)}")
            if len(words) != len(OPERATIONS[operation]):
                raise Refusal(
                    f"'{line}': {operation} takes {len(OPERATIONS[operation])} words, "
                    f"{', '.join(OPERATIONS[operation])}"
                )
            given = [_read(line, kind, word, known) for kind, word in zip(OPERATIONS[operation], words, strict=True)]
            if operation == "take" and self._pushed.get(given[0], ((-1, -1),))[0] != (given[1], given[2]):
                raise Refusal(f"'{line}': worker {given[0]} has pushed no such sum")
            parsed.append((operation, given))
        self["w"]  # Without the first value nobody knows how long a new vector is.
        return parsed

    def _do(self, operation: str, given: list[Any]) -> float | None:
        named = self._named
        match operation, given:
            case "zero", [x]:
                self._written(x).zero_()
            case "copy", [x, y]:
                self._written(y).copy_(named[x])
            case "scale", [a, x]:
                self._written(x).mul_(a)
            case "axpy", [a, x, y]:
                self._written(y).add_(named[x], alpha=a)
            case "mul", [x, y, z]:
                torch.mul(named[x], named[y], out=self._written(z))
            case "add", [x, y, z]:
                torch.add(named[x], named[y], out=self._written(z))
            case "dot", [x, y]:
                return torch.dot(named[x].double(), named[y].double()).item()
            case "take", [worker, _, _, x]:
                self._written(x).add_(self._pushed.pop(worker)[1])
            case _:
                self._pushed.clear()
        return None

    def _written(self, name: str) -> Tensor:
        """A vector, to be written to; another copy of it if somebody still reads this one."""
        if name not in self._named:
            self._named[name] = torch.zeros_like(self["w"])
        elif self.endpoint.in_use(self._named[name]):
            self._named[name] = self.endpoint.send_buffer(self._named[name]).copy_(self._named[name])
        return self._named[name]


def _read(line: str, kind: str, word: str, known: set[str]) -> Any:
    """A word of a line as what it must be."""
    if kind == "new":
        known.add(word)
    elif kind == "vector" and word not in known:
        raise Refusal(f"'{line}': there is no vector '{word}' here, only {sorted(known)}")
    elif kind == "count":
        if not word.isdecimal():
            raise Refusal(f"'{line}': '{word}' is no count")
        return int(word)
    elif kind == "number":
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise Refusal(f"'{line}': '{word}' is no finite number")
        return number
    return word


async def serve(s: Shard) -> None:
    """What a shard of vectors does until its coordinator says that it is not needed any longer."""
    server = VectorServer(s)
    while not server.is_over:
        try:
            message = await s.endpoint.recv()
        except TimeoutError:  # No rank has sent anything for very long, and the next may all the same.
            continue
        try:
            reply = await server.handle(message)
        except Refusal as error:
            await s.refuse(message, error)
            continue
        if reply is not None:
            assert isinstance(message, Numbered)
            # A rank that has not taken its reply in time must not hold up the others.
            with suppress(ClusterError):
                await s.endpoint.send(message.src, reply_to(message, reply))


class VectorServer:
    """Replies to workers and to the coordinator of a batch method."""

    def __init__(self, s: Shard) -> None:
        self.endpoint = s.endpoint
        self.coordinator = s.endpoint.layout.server_ranks[0]
        self.vectors = Vectors(s.endpoint, takes_nonfinite=s.held.takes_nonfinite)
        self.is_over = False
        self._programs = Deduplicator()

    async def handle(self, message: Message) -> Reply | None:
        """Do what a message asks for; the reply to it."""
        match message:
            case SetValue():
                self.vectors.begin(message.value)
                return Held()
            case GetValue():
                return Value(self.vectors["w"])
            case PushSum():
                self.vectors.hold(message)
                return Held()
            case RunProgram() | End() if message.src != self.coordinator:
                raise Refusal("only the coordinator says what to do")
            case RunProgram():
                return await self._run(message)
            case End():
                self.is_over = True
                return Ended()
            case PeerDied():  # The coordinator may be too far away to notice.
                await self.endpoint.send(self.coordinator, WorkerLost(message.src))
            case PeerSuspected():
                pass
            case _:
                raise UnknownRequest(message)
        return None

    async def _run(self, request: RunProgram) -> Reply | None:
        """Run a program once, however often it comes."""
        verdict = self._programs.judge(request)
        if verdict is Verdict.REPEATED:
            return self._programs.reply_again(request)
        if verdict is not Verdict.NEW:
            return None
        program = _text(request.program)
        nbytes = self.vectors.nbytes * len(program.splitlines())
        found = await self.endpoint.compute(lambda: self.vectors.run(program), kind="apply", nbytes=nbytes)
        self._programs.note(request)
        return self._programs.keep(request.src, Products(torch.tensor(found, dtype=torch.float64)))


def _text(program: Tensor) -> str:
    if program.dtype != torch.uint8:
        raise Refusal(f"a program is text, not {program.dtype}")
    try:
        return bytes(program.tolist()).decode()
    except UnicodeDecodeError as error:
        raise Refusal(f"a program is text: {error}") from error
