"""A rank's endpoint in the simulator: messages, collectives and computing in virtual time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.endpoint import Endpoint, Retry, SharedVector, WriteCounts, check_summable
from paceline.op import Op
from paceline.protocol.messages import Message
from paceline.sim.buffers import check_unchanged
from paceline.sim.shared_vector import SimSharedVector
from paceline.sim.simulator import SimOp
from paceline.sim.world import Receiver, World
from paceline.trace import Trace

T = TypeVar("T")

SHORTEST_S = 1e-9  # The shortest time above 0 that a rank waits for a message.


class SimEndpoint:
    """One rank's endpoint in a simulated world."""

    def __init__(
        self, world: World, rank: int, ranks: Sequence[int] | None = None, *, channel: int | None = None
    ) -> None:
        self.world = world
        self.rank = rank
        self.ranks = tuple(world.layout.worker_ranks if ranks is None else ranks)
        self.layout = world.layout
        self.hosts: Sequence[Sequence[int]] | None = None
        self.retransmit_s = world.faults.retransmit_s if world.faults.is_lossy else None
        self._simulator = world.simulator
        self._group = world.group(self.ranks)
        self._channel = channel  # The collectives of a channel are numbered separately.
        self._vectors = 0  # Shared vectors so far.
        self._begun = 0  # Collectives of this channel so far.
        self._subgroups: dict[tuple[int, ...], SimEndpoint] = {}

    @property
    def trace(self) -> Trace:
        return self._simulator.trace

    def now(self) -> float:
        return self.world.clock(self.rank)

    def group(self, ranks: Sequence[int]) -> SimEndpoint:
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} asked for the group {list(ranks)}, but it is not a member")
        chosen = tuple(sorted(ranks))
        if chosen not in self._subgroups:
            self._subgroups[chosen] = SimEndpoint(self.world, self.rank, chosen, channel=self._channel)
        return self._subgroups[chosen]

    def spawn(self, routine: Coroutine[Op[Any], Any, T], *, kind: str = "routine") -> Op[T]:
        return self._simulator.spawn(self.rank, routine, kind)

    def run_collectives(
        self,
        routine: Callable[[Endpoint], Coroutine[Op[Any], Any, T]],
        *,
        kind: str = "exchange",
        is_single: bool = False,
        retry: Retry | None = None,
    ) -> Op[T]:
        channel = SimEndpoint(self.world, self.rank, self.ranks, channel=self._group.open_channel(self.rank))
        return self._simulator.spawn(self.rank, routine(channel), kind)

    def compute(self, work: Callable[[], T], *, kind: str = "compute", nbytes: int = 0) -> Op[T]:
        return self.busy(self.world.machines.cluster.work_seconds(kind, nbytes), work(), kind=kind)

    def busy(self, seconds: float, value: T = None, *, kind: str = "compute") -> Op[T]:
        """Use the processor for a time, after the work that it already has."""
        start, stop = self.world.machines.compute(self.rank, self._simulator.now, seconds)
        return self._until(start, stop, kind, value)

    def move(self, nbytes: int, *, kind: str) -> Op[None]:
        """Copy bytes between this rank and memory that it shares with others, over the bus if there is one."""
        start, stop = self.world.machines.move(kind, self._simulator.now, nbytes)
        return self._until(start, stop, kind, None)

    def _until(self, start: float, stop: float, kind: str, value: T) -> Op[T]:
        """An Op of this rank alone, which sends nothing."""
        simulator = self._simulator
        simulator.trace.span(self.rank, kind, start, stop)
        op = simulator.op(kind, self.rank)
        simulator.at(stop, simulator.finish, op, value)
        return op

    def shared_vector(self, first: Tensor, member: int | None = None) -> Op[SharedVector]:
        self._vectors += 1
        key = self.ranks, self._vectors
        if key not in self.world.shared:
            counts, steps = torch.zeros(2, len(self.ranks), dtype=torch.int64)
            self.world.shared[key] = first.clone(), counts, steps
        values, counts, steps = self.world.shared[key]
        mine = self.ranks.index(self.rank) if member is None else member
        op: SimOp[SharedVector] = self._simulator.op("common", self.rank)
        self._simulator.finish(op, SimSharedVector(self, values, WriteCounts(counts, mine), steps.numpy().data))
        return op

    def send(self, dst: int, message: Message) -> Op[None]:
        world = self.world
        simulator = self._simulator
        rank = self.rank
        if not 0 <= dst < len(world.names) or dst == rank:
            raise ValueError(
                f"rank {rank} sent '{message.tag}' to rank {dst}: it must be another rank, "
                f"from 0 to {len(world.names) - 1}"
            )
        nbytes = message.nbytes
        start, stop = world.machines.send(rank, dst, simulator.now, nbytes)
        simulator.trace.span(rank, "send", start, stop, nbytes)
        op = simulator.op("send", rank, " of '", message.tag, "' to ", world.names[dst])
        given = message.tensors()
        snapshot = [t.clone() for t in given]
        sent = message.with_tensors(snapshot)
        sent.src = rank
        # The check comes before the receiver gets the snapshot, because the receiver may write to it.
        simulator.at(stop, self._sent, op, given, snapshot)
        lives = world.lives[rank], world.lives[dst]
        for arrival in world.network.arrivals(rank, dst, stop, world.machines.link(rank, dst).latency):
            simulator.at(arrival, world.arrive, dst, copy.copy(sent), stop, lives)
        return op

    def _sent(self, op: SimOp[None], given: Sequence[Tensor], snapshot: Sequence[Tensor]) -> None:
        if self.world.strict:
            check_unchanged(op, given, snapshot)
        self._simulator.finish(op)

    def recv(
        self, *, src: int | None = None, types: tuple[type[Message], ...] | None = None, timeout: float | None = None
    ) -> Op[Message]:
        simulator = self._simulator
        inbox = self.world.inboxes[self.rank]
        detail = () if src is None else (" from ", self.world.names[src])
        op = simulator.op("a message", self.rank, *detail)
        receiver = Receiver(src, types, op)
        for i, message in enumerate(inbox):
            if receiver.wants(message):
                del inbox[i]
                simulator.finish(op, message)
                return op
        self.world.receivers[self.rank].append(receiver)
        if timeout is not None:
            # Some time passes always, also where a rank's own clock is rounded differently.
            wait_s = max(timeout, SHORTEST_S) if timeout > 0 else 0.0
            simulator.at(simulator.now + wait_s, self._time_out, receiver, timeout)
        return op

    def _time_out(self, receiver: Receiver, timeout: float) -> None:
        receivers = self.world.receivers[self.rank]
        if receiver in receivers:  # Otherwise it has its message, or its rank was killed.
            receivers.remove(receiver)
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

    def _meet(self, kind: str, signature: tuple[Any, ...], tensors: Sequence[Tensor], nbytes: int) -> Op[Any]:
        """Join the group's next collective.  `signature` must be the same on every rank."""
        number: int | str
        if self._channel is None:
            number = self._group.next_number(self.rank)
        else:
            number = f"{self._channel}.{self._begun}"
            self._begun += 1
        return self._group.join(self.rank, number, kind, signature, tensors, nbytes)
