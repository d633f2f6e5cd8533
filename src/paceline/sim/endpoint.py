"""A rank's endpoint in the simulator: messages, collectives and computing in virtual time.

A rank has one processor and one full-duplex network card; whatever needs one of them while it is busy waits its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.endpoint import Layout, Message, check_summable
from paceline.errors import ClusterError
from paceline.op import Op
from paceline.sim import network
from paceline.sim.cluster import Cluster
from paceline.sim.simulator import SimOp, Simulator
from paceline.trace import Trace

T = TypeVar("T")


@dataclass(slots=True)
class Meeting:
    """A collective while its members arrive."""

    kind: str
    signature: tuple[Any, ...]
    first: int
    members: dict[int, tuple[Any, SimOp[Any]]] = field(default_factory=dict[int, tuple[Any, SimOp[Any]]])


class World:
    """What all simulated ranks share: the simulator, the cluster, who is busy until when, and who meets whom."""

    def __init__(self, simulator: Simulator, cluster: Cluster, layout: Layout, *, strict: bool) -> None:
        self.simulator, self.cluster, self.layout, self.strict = simulator, cluster, layout, strict
        self.processor_free = [0.0] * layout.size
        self.sending_free = [0.0] * layout.size
        self.receiving_free = [0.0] * layout.size
        self.inboxes: list[deque[Message]] = [deque() for _ in range(layout.size)]
        self.receivers: list[list[tuple[int | None, SimOp[Message]]]] = [[] for _ in range(layout.size)]
        self.meetings: dict[tuple[tuple[int, ...], int], Meeting] = {}
        self.sequence: dict[tuple[tuple[int, ...], int], int] = {}
        self.paces = {(tuple(layout.worker_ranks)): cluster.slowest(layout.worker_ranks)}


class SimEndpoint:
    """One rank's hold on the simulated world."""

    def __init__(self, world: World, rank: int, ranks: Sequence[int] | None = None) -> None:
        self.world, self.rank = world, rank
        self.ranks = tuple(world.layout.worker_ranks if ranks is None else ranks)
        self.layout = world.layout
        self._simulator = world.simulator

    @property
    def trace(self) -> Trace:
        return self._simulator.trace

    def now(self) -> float:
        return self._simulator.now

    def group(self, ranks: Sequence[int]) -> SimEndpoint:
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} asked for the group {list(ranks)}, of which it is no member")
        return SimEndpoint(self.world, self.rank, ranks)

    def spawn(self, routine: Coroutine[Op[Any], Any, T], *, kind: str = "routine") -> Op[T]:
        return self._simulator.spawn(self.rank, routine, kind)

    def compute(self, work: Callable[[], T], *, kind: str = "compute", nbytes: int = 0) -> Op[T]:
        return self.busy(self.world.cluster.work_seconds(kind, nbytes), work(), kind=kind)

    def busy(self, seconds: float, value: T = None, *, kind: str = "compute") -> Op[T]:
        """Keep the processor for a time, after what it is already busy with."""
        simulator, free = self._simulator, self.world.processor_free
        start = max(simulator.now, free[self.rank])
        stop = free[self.rank] = start + seconds
        simulator.trace.span(self.rank, kind, start, stop)
        op = simulator.op(kind, self.rank)
        simulator.at(stop, simulator.finish, op, value)
        return op

    def send(self, dst: int, message: Message) -> Op[None]:
        world, simulator = self.world, self._simulator
        if not 0 <= dst < world.layout.size or dst == self.rank:
            raise ValueError(
                f"rank {self.rank} sent '{message.kind}' to rank {dst}: peers are ranks 0 to {world.layout.size - 1}, not itself"
            )
        link = world.cluster.link(self.rank, dst)
        start = max(simulator.now, world.sending_free[self.rank], world.receiving_free[dst])
        stop = start + message.nbytes / link.bandwidth
        world.sending_free[self.rank] = world.receiving_free[dst] = stop
        simulator.trace.span(self.rank, "send", start, stop, message.nbytes)
        op = simulator.op(f"send of '{message.kind}'", self.rank, f" to {simulator.name_of(dst)}")
        sent = replace(message, tensors=tuple(t.clone() for t in message.tensors), src=self.rank)
        simulator.at(stop + link.latency, self._deliver, dst, sent)
        guards = [(t, s) for t, s in zip(message.tensors, sent.tensors, strict=True)] if world.strict else []
        simulator.at(stop, self._sent, op, guards)
        return op

    def _sent(self, op: SimOp[None], guards: list[tuple[Tensor, Tensor]]) -> None:
        for given, snapshot in guards:
            _check_untouched(op, given, snapshot)
        self._simulator.finish(op)

    def _deliver(self, dst: int, message: Message) -> None:
        for i, (src, op) in enumerate(self.world.receivers[dst]):
            if src is None or src == message.src:
                del self.world.receivers[dst][i]
                self._simulator.finish(op, message)
                return
        self.world.inboxes[dst].append(message)

    def recv(self, *, src: int | None = None, timeout: float | None = None) -> Op[Message]:
        simulator, inbox = self._simulator, self.world.inboxes[self.rank]
        op = simulator.op("a message", self.rank, "" if src is None else f" from {simulator.name_of(src)}")
        for i, message in enumerate(inbox):
            if src is None or src == message.src:
                del inbox[i]
                simulator.finish(op, message)
                return op
        self.world.receivers[self.rank].append((src, op))
        if timeout is not None:
            simulator.at(simulator.now + timeout, self._time_out, op, src, timeout)
        return op

    def _time_out(self, op: SimOp[Message], src: int | None, timeout: float) -> None:
        if not op.done:
            self.world.receivers[self.rank].remove((src, op))
            self._simulator.finish(op, error=TimeoutError(f"rank {self.rank} waited {timeout:g} s for {op!r}"))

    def all_reduce(self, x: Tensor, tail: Tensor | None = None) -> Op[Tensor]:
        check_summable(x)
        nbytes = x.numel() * x.element_size() + (0 if tail is None else 8 * tail.numel())
        return self._meet("all_reduce", (tuple(x.shape), x.dtype, tail is None), (x, tail), nbytes)

    def all_gather(self, data: Tensor) -> Op[list[Tensor]]:
        return self._meet("all_gather", (tuple(data.shape), data.dtype), data, data.numel() * data.element_size())

    def all_to_all(self, parts: Sequence[Tensor]) -> Op[list[Tensor]]:
        if len(parts) != len(self.ranks):
            raise ValueError(f"rank {self.rank} gave all_to_all {len(parts)} parts for {len(self.ranks)} ranks")
        mine = self.ranks.index(self.rank)
        return self._meet("all_to_all", (), list(parts), sum(p.numel() for i, p in enumerate(parts) if i != mine))

    def broadcast(self, x: Tensor, src: int) -> Op[Tensor]:
        return self._meet("broadcast", (tuple(x.shape), x.dtype, src), x, x.numel() * x.element_size())

    def _meet(self, kind: str, signature: tuple[Any, ...], given: Any, nbytes: int) -> Op[Any]:
        world, simulator = self.world, self._simulator
        number = world.sequence.get((self.ranks, self.rank), 0)
        world.sequence[self.ranks, self.rank] = number + 1
        op = simulator.op(kind, self.rank, f" #{number} of {len(self.ranks)} ranks")
        meeting = world.meetings.get((self.ranks, number))
        if meeting is None:
            meeting = world.meetings[self.ranks, number] = Meeting(kind, signature, self.rank)
        elif (meeting.kind, meeting.signature) != (kind, signature):
            raise ClusterError(
                f"collective #{number} does not match: {simulator.name_of(meeting.first)} called {_call(meeting.kind, meeting.signature)}, "
                f"{simulator.name_of(self.rank)} called {_call(kind, signature)}"
            )
        guard = _snapshot(given) if world.strict else None
        meeting.members[self.rank] = ((given, guard, nbytes, simulator.now), op)
        if len(meeting.members) == len(self.ranks):
            del world.meetings[self.ranks, number]
            self._hold(meeting)
        return op

    def _hold(self, meeting: Meeting) -> None:
        """All are there: the cards are taken for as long as it lasts, and it ends for everyone at once."""
        world, simulator = self.world, self._simulator
        pace = world.paces.get(self.ranks)
        if pace is None:
            pace = world.paces[self.ranks] = world.cluster.slowest(self.ranks)
        start = simulator.now
        for r in self.ranks:
            start = max(start, world.sending_free[r], world.receiving_free[r])
        nbytes = max(m[0][2] for m in meeting.members.values())
        cost = network.COLLECTIVES[meeting.kind](world.cluster.collective, len(self.ranks), nbytes, pace)
        stop = start + cost.seconds
        for i, r in enumerate(self.ranks):
            world.sending_free[r] = world.receiving_free[r] = stop
            _, _, own, since = meeting.members[r][0]
            # Parts for others may differ in size from rank to rank: the largest paces all, each sends its own.
            simulator.trace.span(r, meeting.kind, since, stop, own if meeting.kind == "all_to_all" else cost.nbytes(i))
        simulator.at(stop, self._close, meeting)

    def _close(self, meeting: Meeting) -> None:
        members = [meeting.members[r] for r in self.ranks]
        if self.world.strict:
            for (given, guard, _, _), op in members:
                for x, snapshot in zip(_tensors(given), guard, strict=True):
                    _check_untouched(op, x, snapshot)
        results = _RESULTS[meeting.kind]([m[0][0] for m in members], self.ranks, meeting)
        for (_, op), result in zip(members, results, strict=True):
            self._simulator.finish(op, result)


def _sum(given: list[tuple[Tensor, Tensor | None]], ranks: Sequence[int], meeting: Meeting) -> list[Tensor]:
    for column in zip(*given, strict=True):
        if column[0] is not None:
            total = column[0].clone()
            for x in column[1:]:  # In order of ranks: real processes in ordered mode get the same bits.
                total.add_(x)
            torch._foreach_copy_(list(column), [total] * len(column))
    return [x for x, _ in given]


def _gather(given: list[Tensor], ranks: Sequence[int], meeting: Meeting) -> list[list[Tensor]]:
    return [[x.clone() for x in given] for _ in given]


def _exchange(given: list[list[Tensor]], ranks: Sequence[int], meeting: Meeting) -> list[list[Tensor]]:
    return [[parts[i].clone() for parts in given] for i in range(len(given))]


def _spread(given: list[Tensor], ranks: Sequence[int], meeting: Meeting) -> list[Tensor]:
    source = given[ranks.index(meeting.signature[2])]
    return [x if x is source else x.copy_(source) for x in given]


_RESULTS: dict[str, Callable[..., list[Any]]] = {"all_reduce": _sum, "all_gather": _gather, "all_to_all": _exchange, "broadcast": _spread}


def _tensors(given: Any) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else [t for t in given if t is not None]


def _snapshot(given: Any) -> list[Tensor]:
    return [t.clone() for t in _tensors(given)]


def _check_untouched(op: SimOp[Any], x: Tensor, snapshot: Tensor) -> None:
    if not torch.equal(x, snapshot) and not torch.equal(torch.nan_to_num(x), torch.nan_to_num(snapshot)):
        raise RuntimeError(f"rank {op.rank} wrote to a buffer of {x.numel()} values while '{op!r}' was sending it: await it first")


def _call(kind: str, signature: tuple[Any, ...]) -> str:
    return f"{kind}({', '.join(str(s) for s in signature)})"
