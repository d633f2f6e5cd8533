"""Vectors: a shard's slices of named vectors, and the operations of a coordinator on them (Dean et al. 2012).

The coordinator sends operations by name, such as `axpy -0.5 y3 q`, and gets only inner products back.  A shard holds
the sums that workers push until the coordinator takes them, so that all shards take a sum or none does.

Slot `vectors`: all vectors by name, with the resize rule `shard`.
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
from paceline.protocol.messages import Message, Numbered, PeerDied, PeerSuspected, Reply, Returned, reply_to
from paceline.protocol.requests import Deduplicator, Refusal, UnknownRequest, Verdict
from paceline.server.logged_endpoint import LoggedEndpoint
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
from paceline.server.snapshots import message_of, plain_message
from paceline.state import Values, shard

# The arguments of each operation: a number, a count, an existing vector, or one that may be new.
OPERATIONS = {
    "zero": ("new",),  # x = 0
    "copy": ("vector", "new"),  # y = x
    "scale": ("number", "vector"),  # x = a * x
    "axpy": ("number", "vector", "vector"),  # y = y + a * x
    "mul": ("vector", "vector", "new"),  # z = x * y, value by value
    "add": ("vector", "vector", "new"),  # z = x + y
    "dot": ("vector", "vector"),  # this shard's part of the inner product
    "take": ("count", "count", "count", "vector"),  # x = x + the sum of a worker: its rank, the pass, the sum's number
    "forget": (),  # drop the sums that were not taken
}


class Vectors:
    """The vectors of one shard.  There are none until `w` has its first value."""

    def __init__(self, endpoint: Endpoint, *, takes_nonfinite: bool) -> None:
        self.endpoint = endpoint
        self.takes_nonfinite = takes_nonfinite
        self._named: dict[str, Tensor] = {}
        # The last sum of each worker, with the numbers of its pass and of the sum.
        self._pushed: dict[int, tuple[tuple[int, int], Tensor]] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._named:
            raise Refusal(f"there is no vector '{name}' here, only {sorted(self._named)}")
        return self._named[name]

    def begin(self, value: Tensor) -> None:
        """Take the first value of `w`, unless there is one."""
        check_value(value)
        if not self._named:
            self._named["w"] = self.endpoint.send_buffer(value).copy_(value)

    def save(self) -> Values:
        """All vectors.  What workers have pushed is not saved: a resumed run repeats the pass."""
        return {"named": {name: vector.clone() for name, vector in self._named.items()}}

    def load(self, values: Values) -> None:
        self._named = {name: self.endpoint.send_buffer(v).copy_(v) for name, v in values["named"].items()}
        self._pushed.clear()

    def snapshot(self) -> Values:
        """The vectors, and the sums that were not taken."""
        return {"named": dict(self._named), "pushed": {src: list(held) for src, held in self._pushed.items()}}

    def restore(self, saved: Values) -> None:
        self.load(saved)
        self._pushed = {src: (which, total) for src, (which, total) in saved["pushed"].items()}

    def hold(self, push: PushSum) -> None:
        """Hold the sum of a worker, in the place of its last one."""
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
        """Run all lines, or none if one is wrong; the inner products."""
        parsed = self._parsed(program)
        return [found for operation, given in parsed if (found := self._do(operation, given)) is not None]

    @property
    def nbytes(self) -> int:
        """The bytes of one vector."""
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
        self["w"]  # Without the first value the length of a new vector is unknown.
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
        """A vector, to be written to; a copy of it while a receiver still reads this one."""
        if name not in self._named:
            self._named[name] = torch.zeros_like(self["w"])
        elif self.endpoint.in_use(self._named[name]):
            self._named[name] = self.endpoint.send_buffer(self._named[name]).copy_(self._named[name])
        return self._named[name]


def _read(line: str, kind: str, word: str, known: set[str]) -> Any:
    """A word of a line, converted to its kind."""
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
    """Serve vectors until the coordinator ends the run."""
    server = VectorServer(s)
    while not server.is_over:
        try:
            message = await s.endpoint.recv()
        except TimeoutError:  # No message for a long time; go on.
            continue
        try:
            reply = await server.handle(message)
        except Refusal as error:
            await s.refuse(message, error)
            continue
        if reply is not None:
            assert isinstance(message, Numbered)
            # A rank that does not take its reply in time must not block the others.
            with suppress(ClusterError):
                await s.endpoint.send(message.src, reply_to(message, reply))


class VectorServer:
    """Replies to workers and to the coordinator of a batch method."""

    def __init__(self, s: Shard) -> None:
        self.endpoint = s.endpoint
        self.coordinator = s.endpoint.layout.server_ranks[0]
        self.vectors = Vectors(s.endpoint, takes_nonfinite=s.held.takes_nonfinite)
        s.states.bind("vectors", rule=shard, save=self.vectors.save, load=self.vectors.load, check=_check_saved)
        s.states.check_complete()
        self.is_over = False
        self._programs = Deduplicator()
        if isinstance(s.endpoint, LoggedEndpoint):
            if s.endpoint.snapshot is not None:
                self._restore(s.endpoint.snapshot)
            s.endpoint.save = self._snapshot

    def _snapshot(self) -> dict[str, Any]:
        """All of it, as plain values that share memory with it."""
        reply = self._programs.last_reply(self.coordinator)
        return {
            "vectors": self.vectors.snapshot(),
            "programs": self._programs.snapshot(),
            "reply": None if reply is None else plain_message(reply),
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        self.vectors.restore(saved["vectors"])
        self._programs.restore(saved["programs"])
        if saved["reply"] is not None:
            self._programs.keep(self.coordinator, message_of(saved["reply"], Products))

    async def handle(self, message: Message) -> Reply | None:
        """Handle a message; the reply to it."""
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
            case PeerSuspected() | Returned():
                pass
            case _:
                raise UnknownRequest(message)
        return None

    async def _run(self, request: RunProgram) -> Reply | None:
        """Run a program once, even if it is sent again."""
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


def _check_saved(values: Any) -> None:
    named = values.get("named") if isinstance(values, dict) else None
    if not isinstance(named, dict) or not all(isinstance(v, Tensor) and v.dim() == 1 for v in named.values()):
        raise ValueError("the saved slot 'vectors' has no dict 'named' of 1-D tensors")
    if named and ("w" not in named or len({v.shape for v in named.values()}) > 1):
        lengths = {name: v.numel() for name, v in named.items()}
        raise ValueError(f"the saved slot 'vectors' must have 'w' and vectors of one length, not {lengths}")


def _text(program: Tensor) -> str:
    if program.dtype != torch.uint8:
        raise Refusal(f"a program is text, not {program.dtype}")
    try:
        return bytes(program.tolist()).decode()
    except UnicodeDecodeError as error:
        raise Refusal(f"a program is text: {error}") from error
