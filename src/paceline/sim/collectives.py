"""Collectives in the simulator: ranks arrive one by one; when the last has arrived, the collective runs for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline import costs
from paceline.errors import DifferentCollectives
from paceline.sim.buffers import FEW, Snapshot, check_unchanged, snapshot
from paceline.sim.machines import Machines
from paceline.sim.network import Network
from paceline.sim.simulator import SimOp, Simulator


class Participant(NamedTuple):
    """A rank in a collective: its tensors, their snapshot in strict mode, its bytes, and when it arrived."""

    tensors: Sequence[Tensor]
    before: Sequence[Snapshot]
    nbytes: int
    since: float
    op: SimOp[Any]


@dataclass(slots=True)
class Rendezvous:
    """A collective while its participants arrive.  All must give the same kind and signature as the first rank."""

    kind: str
    signature: tuple[Any, ...]
    first: int
    participants: dict[int, Participant] = field(default_factory=dict[int, Participant])


class Group:
    """Ranks that run collectives with each other."""

    def __init__(
        self, simulator: Simulator, machines: Machines, network: Network, ranks: tuple[int, ...], *, strict: bool
    ) -> None:
        self.ranks = ranks
        self._simulator = simulator
        self._machines = machines
        self._network = network
        self._strict = strict
        self._slowest_link = machines.cluster.slowest(ranks)
        self._begun = dict.fromkeys(ranks, 0)
        self._channels = dict.fromkeys(ranks, 0)
        self._waiting: dict[int | str, Rendezvous] = {}

    def next_number(self, rank: int) -> int:
        """The number of a rank's next collective; equal numbers of different ranks meet."""
        number = self._begun[rank]
        self._begun[rank] = number + 1
        return number

    def open_channel(self, rank: int) -> int:
        """A new sequence of collectives, which is numbered separately."""
        channel = self._channels[rank]
        self._channels[rank] = channel + 1
        return channel

    def join(
        self,
        rank: int,
        number: int | str,
        kind: str,
        signature: tuple[Any, ...],
        tensors: Sequence[Tensor],
        nbytes: int,
    ) -> SimOp[Any]:
        """Let a rank arrive at a collective, which starts when all have."""
        simulator = self._simulator
        op = simulator.op(kind, rank, " #", number, " of ", len(self.ranks), " ranks")
        meeting = self._waiting.get(number)
        if meeting is None:
            meeting = self._waiting[number] = Rendezvous(kind, signature, rank)
        check_match(meeting, rank, number, kind, signature, simulator.name_of)
        before = [snapshot(t) for t in tensors] if self._strict else ()
        meeting.participants[rank] = Participant(tensors, before, nbytes, simulator.now, op)
        if len(meeting.participants) == len(self.ranks):
            del self._waiting[number]
            self._start(meeting)
        return op

    def _start(self, meeting: Rendezvous) -> None:
        """Take the network cards of all ranks.  The collective ends for all of them at the same time."""
        simulator = self._simulator
        ranks = self.ranks
        nbytes = max(p.nbytes for p in meeting.participants.values())
        algorithm = self._machines.cluster.collective
        cost = costs.COLLECTIVES[meeting.kind](algorithm, len(ranks), nbytes, self._slowest_link)
        total = sum(cost.nbytes(i) for i in range(len(ranks))) if self._machines.has_bus else 0
        seconds = self._network.collective_end(ranks, simulator.now, cost.seconds) - simulator.now
        stop = self._machines.meet(ranks, simulator.now, seconds, total)
        root = ranks.index(meeting.signature[2]) if meeting.kind in ("broadcast", "reduce") else 0
        for i, r in enumerate(ranks):
            participant = meeting.participants[r]
            # In an all_to_all, ranks may send different sizes: the largest sets the time, each sends its own bytes.
            sent = participant.nbytes if meeting.kind == "all_to_all" else cost.nbytes((i - root) % len(ranks))
            simulator.trace.span(r, meeting.kind, participant.since, stop, sent)
            simulator.trace.collective(r, ranks, participant.since, stop)
        simulator.at(stop, self._finish, meeting)

    def _finish(self, meeting: Rendezvous) -> None:
        participants = [meeting.participants[r] for r in self.ranks]
        if self._strict:
            for p in participants:
                check_unchanged(p.op, p.tensors, p.before)
        results = results_of(meeting, [p.tensors for p in participants], self.ranks)
        for p, result in zip(participants, results, strict=True):
            self._simulator.finish(p.op, result)


def check_match(
    meeting: Rendezvous,
    rank: int,
    number: int | str,
    kind: str,
    signature: tuple[Any, ...],
    name_of: Callable[[int], str],
) -> None:
    """Raise an error if a rank calls another collective than the first one did."""
    if meeting.kind != kind or meeting.signature != signature:
        raise DifferentCollectives(
            f"collective #{number} does not match: "
            f"{name_of(meeting.first)} called {_call(meeting.kind, meeting.signature)}, "
            f"{name_of(rank)} called {_call(kind, signature)}"
        )


Given = Sequence[Sequence[Tensor]]  # The tensors of each participant, in the order of the ranks.


def _all_reduce(given: Given, ranks: Sequence[int], meeting: Rendezvous) -> list[Tensor]:
    for first, *others in zip(*given, strict=True):
        total = _sum_in_order(first, others)
        torch._foreach_copy_([first, *others], [total] * len(given))  # pyright: ignore[reportPrivateUsage]
    return [tensors[0] for tensors in given]


def _sum_in_order(first: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Sum in the order of the ranks: real processes in ordered mode get the same bits."""
    if first.numel() <= FEW and first.dtype in (torch.float32, torch.float64) and first.device.type == "cpu":
        # numpy adds row by row, with one call for all ranks; torch needs one call for each rank.
        with np.errstate(all="ignore"):  # Infinity is a valid result, as in torch.
            return torch.from_numpy(np.add.accumulate(torch.stack([first, *others]).numpy(), axis=0)[-1])
    total = first.clone()
    for x in others:
        total.add_(x)
    return total


def _reduce(given: Given, ranks: Sequence[int], meeting: Rendezvous) -> list[Tensor]:
    for column in zip(*given, strict=True):
        column[ranks.index(meeting.signature[2])].copy_(_sum_in_order(column[0], column[1:]))
    return [tensors[0] for tensors in given]


def _all_gather(given: Given, ranks: Sequence[int], meeting: Rendezvous) -> list[list[Tensor]]:
    return [[x.clone() for (x,) in given] for _ in given]


def _all_to_all(given: Given, ranks: Sequence[int], meeting: Rendezvous) -> list[list[Tensor]]:
    return [[parts[i].clone() for parts in given] for i in range(len(given))]


def _broadcast(given: Given, ranks: Sequence[int], meeting: Rendezvous) -> list[Tensor]:
    (source,) = given[ranks.index(meeting.signature[2])]
    return [x if x is source else x.copy_(source) for (x,) in given]


_RESULTS: dict[str, Callable[[Given, Sequence[int], Rendezvous], Sequence[Any]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "reduce": _reduce,
    "broadcast": _broadcast,
}


def results_of(meeting: Rendezvous, given: Given, ranks: Sequence[int]) -> Sequence[Any]:
    """What each participant gets, in the order of the ranks."""
    return _RESULTS[meeting.kind](given, ranks, meeting)


def _call(kind: str, signature: tuple[Any, ...]) -> str:
    return f"{kind}({', '.join(str(tuple(s)) if isinstance(s, torch.Size) else str(s) for s in signature)})"
