"""Vectors: a shard's slices of named vectors, and the few operations by which a coordinator works on them (Dean et al. 2012).

The coordinator says by name what is to be done, `axpy -0.5 y3 q`, and hears nothing but inner products.  What workers push is held back
until the coordinator says that it counts, so that an update is taken by all shards or by none.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.codecs.layout import is_finite
from paceline.endpoint import Endpoint, Message
from paceline.errors import ClusterError
from paceline.server.shard import Shard
from paceline.server.shard_state import Refused, check_value

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
            raise Refused(f"there is no vector '{name}' here, only {sorted(self._named)}")
        return self._named[name]

    def begin(self, message: Message) -> None:
        """Take the first value of `w`, unless there is one."""
        check_value(message)
        if not self._named:
            self._named["w"] = self.endpoint.send_buffer(message.tensors[0]).copy_(message.tensors[0])

    def hold(self, push: Message) -> None:
        """Keep what a worker has pushed, in the place of what it has pushed before."""
        like, which = self["w"], (push.version, push.steps)
        told = [(t.dtype, tuple(t.shape)) for t in push.tensors]
        if told != [(like.dtype, tuple(like.shape))]:
            raise Refused(f"a push of {told} for a shard of {like.dtype} and {tuple(like.shape)}")
        if not self.takes_nonfinite and not is_finite(push.tensors[0]):
            raise Refused("it holds NaN or infinity")
        if push.src not in self._pushed or self._pushed[push.src][0] < which:
            self._pushed[push.src] = which, push.tensors[0].clone()

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
                raise Refused(f"'{line}': there is no operation '{operation}', only {', '.join(OPERATIONS)}")
            if len(words) != len(OPERATIONS[operation]):
                raise Refused(
                    f"'{line}': {operation} takes {len(OPERATIONS[operation])} words, {', '.join(OPERATIONS[operation])}"
                )
            given = [_read(line, kind, word, known) for kind, word in zip(OPERATIONS[operation], words, strict=True)]
            if operation == "take" and self._pushed.get(given[0], ((-1, -1),))[0] != (given[1], given[2]):
                raise Refused(f"'{line}': worker {given[0]} has pushed no such sum")
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
        raise Refused(f"'{line}': there is no vector '{word}' here, only {sorted(known)}")
    elif kind == "count":
        if not word.isdecimal():
            raise Refused(f"'{line}': '{word}' is no count")
        return int(word)
    elif kind == "number":
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise Refused(f"'{line}': '{word}' is no finite number")
        return number
    return word


async def serve(s: Shard) -> None:
    """What a shard of vectors does until its coordinator says that it is not needed any longer."""
    endpoint, coordinator = s.endpoint, s.endpoint.layout.server_ranks[0]
    held = Vectors(endpoint, takes_nonfinite=s.held.takes_nonfinite)
    last = Message("done")  # What the coordinator was answered last.

    async def answer(message: Message) -> Message | None:
        match message.kind:
            case "start":
                held.begin(message)
                return Message("begun")
            case "get":
                return Message("value", (held["w"],))
            case "push":
                held.hold(message)
                return Message("held")
            case "do" | "end" if message.src != coordinator:
                raise Refused("only the coordinator says what to do")
            case "do":
                if message.serial > last.serial:
                    await run(message)
                return last if message.serial == last.serial else None
            case "end":
                return Message("ended")
            case "gone":  # The coordinator may be too far away to notice.
                await endpoint.send(coordinator, Message("lost", samples=message.src))
            case "silent":
                pass
            case kind:
                raise Refused(f"there is no request of the kind '{kind}'")
        return None

    async def run(message: Message) -> None:
        nonlocal last
        program = _text(message)
        work = lambda: held.run(program)  # noqa: E731
        found = await endpoint.compute(work, kind="apply", nbytes=held.nbytes * len(program.splitlines()))
        last = Message("done", (torch.tensor(found, dtype=torch.float64),), serial=message.serial)

    while True:
        try:
            message = await endpoint.recv()
        except TimeoutError:  # Nobody has said anything for very long, and the next may all the same.
            continue
        try:
            said = await answer(message)
        except Refused as error:
            await s.refuse(message, error)
            continue
        if said is not None:
            said.serial = message.serial
            try:
                await endpoint.send(message.src, said)
            except ClusterError:  # It has not taken it in time: nobody else is to wait for it.
                continue
            if said.kind == "ended":
                return


def _text(message: Message) -> str:
    if [t.dtype for t in message.tensors] != [torch.uint8]:
        raise Refused(f"a program is text, not {[str(t.dtype) for t in message.tensors]}")
    try:
        return bytes(message.tensors[0].tolist()).decode()
    except UnicodeDecodeError as error:
        raise Refused(f"a program is text: {error}") from error
