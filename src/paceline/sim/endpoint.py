"""A rank's endpoint in the simulator: messages, collectives and computing in virtual time.

A rank has one processor and one full-duplex network card; whatever needs one of them while it is busy waits its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline import costs as network
from paceline.endpoint import Endpoint, SharedVector, check_summable
from paceline.errors import ClusterError
from paceline.op import Op
from paceline.protocol.messages import Message
from paceline.sim.shared_vector import SimSharedVector
from paceline.sim.simulator import SimOp
from paceline.sim.world import Image, Participant, Receiver, Rendezvous, World
from paceline.trace import Trace

T = TypeVar("T")


FEW = 64  # Up to so many values a list is made and compared faster than a tensor.


class SimEndpoint:
    """One rank's hold on the simulated world."""

    def __init__(self, world: World, rank: int, ranks: Sequence[int] | None = None) -> None:
        self.world, self.rank = world, rank
        self.ranks = tuple(world.layout.worker_ranks if ranks is None else ranks)
        self.layout = world.layout
        self.hosts: Sequence[Sequence[int]] | None = None
        self.retransmit_s = world.faults.retransmit_s if world.faults.is_lossy else None
        self._simulator = world.simulator
        self._group = world.group(self.ranks)
        self._channel: int | None = None  # The collectives of a channel are numbered apart.
        self._begun = 0
        self._children: dict[tuple[int, ...], SimEndpoint] = {}

    @property
    def trace(self) -> Trace:
        return self._simulator.trace

    def now(self) -> float:
        return self._simulator.now

    def group(self, ranks: Sequence[int]) -> SimEndpoint:
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} asked for the group {list(ranks)}, of which it is no member")
        chosen = tuple(sorted(ranks))
        if chosen not in self._children:
            self._children[chosen] = SimEndpoint(self.world, self.rank, chosen)
            self._children[chosen]._channel = self._channel
        return self._children[chosen]

    def spawn(self, routine: Coroutine[Op[Any], Any, T], *, kind: str = "routine") -> Op[T]:
        return self._simulator.spawn(self.rank, routine, kind)

    def run_collectives(
        self, routine: Callable[[Endpoint], Coroutine[Op[Any], Any, T]], *, kind: str = "exchange"
    ) -> Op[T]:
        channel = SimEndpoint(self.world, self.rank, self.ranks)
        channel._channel = self._group.channels[self.rank]
        self._group.channels[self.rank] += 1
        return self._simulator.spawn(self.rank, routine(channel), kind)

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

    def move(self, nbytes: int, *, kind: str) -> Op[None]:
        """Let bytes pass between this rank and memory that it has in common with others, by their bus if there is one."""
        world, simulator = self.world, self._simulator
        if world.cluster.bus is None:
            start, stop = simulator.now, simulator.now + world.cluster.work_seconds(kind, nbytes)
        else:
            start, stop = world.take_bus(simulator.now, nbytes)
        simulator.trace.span(self.rank, kind, start, stop)  # Nothing is sent to anybody.
        op = simulator.op(kind, self.rank)
        simulator.at(stop, simulator.finish, op, None)
        return op

    def shared_vector(self, first: Tensor) -> Op[SharedVector]:
        return self.spawn(self._shared_vector(first), kind="common")

    async def _shared_vector(self, first: Tensor) -> SharedVector:
        values = await self._meet("common", (first.shape, first.dtype), (first,), 0)
        return SimSharedVector(self, values)

    def send(self, dst: int, message: Message) -> Op[None]:
        world, simulator, rank = self.world, self._simulator, self.rank
        if not 0 <= dst < len(world.names) or dst == rank:
            raise ValueError(
                f"rank {rank} sent '{message.tag}' to rank {dst}: peers are ranks 0 to {len(world.names) - 1}, not itself"
            )
        link, nbytes = world.link(rank, dst), message.nbytes
        start = max(simulator.now, world.sending_free[rank], world.receiving_free[dst])
        if world.cluster.bus is None:
            stop = start + nbytes / link.bandwidth
        else:
            start, stop = world.take_bus(start, nbytes)
        world.sending_free[rank] = world.receiving_free[dst] = stop
        simulator.trace.span(rank, "send", start, stop, nbytes)
        op = simulator.op("send", rank, " of '", message.tag, "' to ", world.names[dst])
        given = message.tensors()
        snapshot = [t.clone() for t in given]
        sent = message.with_tensors(snapshot)
        sent.src = rank
        simulator.at(stop, self._sent, op, given, snapshot)  # Before the receiver has it, which may write to it.
        for _ in range(world.times()):
            simulator.at(stop + link.latency, self._arrive, dst, sent, stop)
        return op

    def _sent(self, op: SimOp[None], given: Sequence[Tensor], snapshot: Sequence[Tensor]) -> None:
        if self.world.strict:
            _check_untouched(op, given, snapshot)
        self._simulator.finish(op)

    def _arrive(self, dst: int, message: Message, sent: float) -> None:
        """Unless its sender died before all of it was sent, or its receiver is dead."""
        dead = self.world.dead
        if dead.get(self.rank, sent) >= sent and not self.world.return_to_sender(dst, message) and dst not in dead:
            self.world.deliver(dst, message)

    def recv(
        self, *, src: int | None = None, types: tuple[type[Message], ...] | None = None, timeout: float | None = None
    ) -> Op[Message]:
        simulator, inbox = self._simulator, self.world.inboxes[self.rank]
        op = (
            simulator.op("a message", self.rank)
            if src is None
            else simulator.op("a message", self.rank, " from ", self.world.names[src])
        )
        receiver = Receiver(src, types, op)
        for i, message in enumerate(inbox):
            if receiver.wants(message):
                del inbox[i]
                simulator.finish(op, message)
                return op
        self.world.receivers[self.rank].append(receiver)
        if timeout is not None:
            simulator.at(simulator.now + timeout, self._time_out, receiver, timeout)
        return op

    def _time_out(self, receiver: Receiver, timeout: float) -> None:
        if not receiver.op.done and self.rank not in self.world.dead:
            self.world.receivers[self.rank].remove(receiver)
            self._simulator.finish(
                receiver.op, error=TimeoutError(f"rank {self.rank} waited {timeout:g} s for {receiver.op!r}")
            )

    def has_ended(self, rank: int) -> bool:
        return self.world.has_ended(rank)

    def members_ever(self) -> Sequence[int]:
        return self.world.members_ever

    def send_buffer(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def in_use(self, x: Tensor) -> bool:
        return False  # A message is a copy.

    def all_reduce(self, x: Tensor, extras: Tensor | None = None) -> Op[Tensor]:
        check_summable(x)
        if extras is None:
            return self._meet("all_reduce", (x.shape, x.dtype, True), (x,), x.nbytes)
        return self._meet("all_reduce", (x.shape, x.dtype, False), (x, extras), x.nbytes + extras.nbytes)

    def all_gather(self, data: Tensor) -> Op[list[Tensor]]:
        return self._meet("all_gather", (data.shape, data.dtype), (data,), data.nbytes)

    def all_to_all(self, parts: Sequence[Tensor], coming: Sequence[int] | None = None) -> Op[list[Tensor]]:
        if len(parts) != len(self.ranks):
            raise ValueError(f"rank {self.rank} gave all_to_all {len(parts)} parts for {len(self.ranks)} ranks")
        mine = self.ranks.index(self.rank)
        return self._meet("all_to_all", (), list(parts), sum(p.numel() for i, p in enumerate(parts) if i != mine))

    def reduce(self, x: Tensor, dst: int, extras: Tensor | None = None) -> Op[Tensor]:
        check_summable(x)
        given = (x,) if extras is None else (x, extras)
        return self._meet("reduce", (x.shape, x.dtype, dst, extras is None), given, sum(t.nbytes for t in given))

    def broadcast(self, x: Tensor, src: int) -> Op[Tensor]:
        return self._meet("broadcast", (x.shape, x.dtype, src), (x,), x.nbytes)

    def _meet(self, kind: str, signature: tuple[Any, ...], given: Sequence[Tensor], nbytes: int) -> Op[Any]:
        simulator, group, rank = self._simulator, self._group, self.rank
        if self._channel is None:
            number = group.begun[rank]
            group.begun[rank] = number + 1
        else:
            number = f"{self._channel}.{self._begun}"
            self._begun += 1
        op = simulator.op(kind, rank, " #", number, " of ", len(group.ranks), " ranks")
        meeting = group.meetings.get(number)
        if meeting is None:
            meeting = group.meetings[number] = Rendezvous(kind, signature, rank)
        elif meeting.kind != kind or meeting.signature != signature:
            raise ClusterError(
                f"collective #{number} does not match: {simulator.name_of(meeting.first)} called {_call(meeting.kind, meeting.signature)}, "
                f"{simulator.name_of(rank)} called {_call(kind, signature)}"
            )
        snapshot = [_image(t) for t in given] if self.world.strict else ()
        meeting.members[rank] = Participant(given, snapshot, nbytes, simulator.now, op)
        if len(meeting.members) == len(group.ranks):
            del group.meetings[number]
            self._hold(meeting)
        return op

    def _hold(self, meeting: Rendezvous) -> None:
        """All are there: the cards are taken for as long as it lasts, and it ends for everyone at once."""
        world, simulator, ranks = self.world, self._simulator, self.ranks
        sending_free, receiving_free = world.sending_free, world.receiving_free
        start = max(simulator.now, *[sending_free[r] for r in ranks], *[receiving_free[r] for r in ranks])
        nbytes = max(m.nbytes for m in meeting.members.values())
        cost = network.COLLECTIVES[meeting.kind](world.cluster.collective, len(ranks), nbytes, self._group.pace)
        stop = start + cost.seconds
        if world.cluster.bus is not None:
            stop = max(stop, world.take_bus(start, sum(cost.nbytes(i) for i in range(len(ranks))))[1])
        root = ranks.index(meeting.signature[2]) if meeting.kind in ("broadcast", "reduce") else 0
        for i, r in enumerate(ranks):
            sending_free[r] = receiving_free[r] = stop
            member = meeting.members[r]
            # Parts for others may differ in size from rank to rank: the largest paces all, each sends its own.
            sent = member.nbytes if meeting.kind == "all_to_all" else cost.nbytes((i - root) % len(ranks))
            simulator.trace.span(r, meeting.kind, member.since, stop, sent)
        simulator.at(stop, self._close, meeting)

    def _close(self, meeting: Rendezvous) -> None:
        members = [meeting.members[r] for r in self.ranks]
        if self.world.strict:
            for m in members:
                _check_untouched(m.op, m.given, m.snapshot)
        results = _RESULTS[meeting.kind]([m.given for m in members], self.ranks, meeting)
        for m, result in zip(members, results, strict=True):
            self._simulator.finish(m.op, result)


Given = Sequence[Sequence[Tensor]]  # What each member gave, in the order of the ranks.


def _sum(given: Given, ranks: Sequence[int], meeting: Rendezvous) -> list[Tensor]:
    for first, *others in zip(*given, strict=True):
        total = _sum_in_order(first, others)
        torch._foreach_copy_([first, *others], [total] * len(given))  # pyright: ignore[reportPrivateUsage]
    return [parts[0] for parts in given]


def _sum_in_order(first: Tensor, others: Sequence[Tensor]) -> Tensor:
    """In order of ranks: real processes in ordered mode get the same bits."""
    if first.numel() <= FEW and first.dtype in (torch.float32, torch.float64) and first.device.type == "cpu":
        # numpy adds up row by row, and calls torch once for all ranks instead of once for each.
        with np.errstate(all="ignore"):  # Infinity is a result like any other, as it is to torch.
            return torch.from_numpy(np.add.accumulate(torch.stack([first, *others]).numpy(), axis=0)[-1])
    total = first.clone()
    for x in others:
        total.add_(x)
    return total


def _sum_at(given: Given, ranks: Sequence[int], meeting: Rendezvous) -> list[Tensor]:
    for column in zip(*given, strict=True):
        column[ranks.index(meeting.signature[2])].copy_(_sum_in_order(column[0], column[1:]))
    return [parts[0] for parts in given]


def _gather(given: Given, ranks: Sequence[int], meeting: Rendezvous) -> list[list[Tensor]]:
    return [[x.clone() for (x,) in given] for _ in given]


def _exchange(given: Given, ranks: Sequence[int], meeting: Rendezvous) -> list[list[Tensor]]:
    return [[parts[i].clone() for parts in given] for i in range(len(given))]


def _spread(given: Given, ranks: Sequence[int], meeting: Rendezvous) -> list[Tensor]:
    (source,) = given[ranks.index(meeting.signature[2])]
    return [x if x is source else x.copy_(source) for (x,) in given]


def _common(given: Given, ranks: Sequence[int], meeting: Rendezvous) -> list[Tensor]:
    return [given[0][0].clone()] * len(given)


_RESULTS: dict[str, Callable[[Given, Sequence[int], Rendezvous], Sequence[Any]]] = {
    "all_reduce": _sum,
    "all_gather": _gather,
    "all_to_all": _exchange,
    "reduce": _sum_at,
    "broadcast": _spread,
    "common": _common,
}


def _image(x: Tensor) -> Image:
    return x.reshape(-1).tolist() if x.numel() <= FEW else x.clone()


def _check_untouched(op: SimOp[Any], given: Sequence[Tensor], snapshot: Sequence[Image]) -> None:
    for x, was in zip(given, snapshot, strict=True):
        if isinstance(was, list):
            if x.reshape(-1).tolist() == was:
                continue
            was = torch.tensor(was, dtype=x.dtype).view(x.shape)
        if not torch.equal(x, was) and not torch.equal(torch.nan_to_num(x), torch.nan_to_num(was)):
            raise RuntimeError(
                f"rank {op.rank} wrote to a buffer of {x.numel()} values while '{op!r}' was sending it: await it first"
            )


def _call(kind: str, signature: tuple[Any, ...]) -> str:
    return f"{kind}({', '.join(str(tuple(s)) if isinstance(s, torch.Size) else str(s) for s in signature)})"
