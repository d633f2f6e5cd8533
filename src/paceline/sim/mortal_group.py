"""Collectives among simulated machines that may die in them.

A result comes to each member at a moment of its own.  If a member dies, or leaves the generation, while results are
under way, some come and others do not.  So a collective may end on some members and fail on others, as on real
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from torch import Tensor

from paceline.errors import PeerLost
from paceline.sim.collectives import Group, Participant, Rendezvous, check_match, results_of
from paceline.sim.simulator import SimOp
from paceline.sim.world import World

IN_PLACE = ("all_reduce", "reduce", "broadcast")


class MortalGroup(Group):
    """Machines of one generation.  `closed` are those that have left it.

    While a machine waits, it asks `look` every `look_s` seconds which of the members is dead, and why.
    """

    def __init__(
        self,
        world: World,
        machines: tuple[int, ...],
        closed: set[int],
        look: Callable[[int, Sequence[int]], str | None],
        *,
        look_s: float,
        chance: Random,
    ) -> None:
        super().__init__(world.simulator, world.machines, world.network, machines, strict=False)
        self._dead = world.dead
        self._closed = closed
        self._may_lose = world.faults.has_any
        self._look = look
        self._look_s = look_s
        self._chance = chance
        self._pending: dict[SimOp[Any], tuple[int, Rendezvous]] = {}  # The machine of each, and its collective.
        self._looking: set[int] = set()

    def join(
        self,
        rank: int,
        number: int | str,
        kind: str,
        signature: tuple[Any, ...],
        tensors: Sequence[Tensor],
        nbytes: int,
    ) -> SimOp[Any]:
        simulator = self._simulator
        op = simulator.op(kind, rank, " #", number, " of ", len(self.ranks), " ranks")
        simulator.forget(op)  # A worker that has lost another one does not await all that it has begun.
        meeting = self._waiting.setdefault(number, Rendezvous(kind, signature, rank))
        check_match(meeting, rank, number, kind, signature, simulator.name_of)
        copies = [t.clone() for t in tensors]
        meeting.participants[rank] = Participant(tensors, copies, nbytes, simulator.now, op)
        self._pending[op] = rank, meeting
        if len(meeting.participants) == len(self.ranks):
            del self._waiting[number]
            self._start(meeting)
        elif any(machine in self._closed and machine not in meeting.participants for machine in self.ranks):
            self._fail_soon(op, "a member has left")
        if rank not in self._looking:
            self._looking.add(rank)
            self._look_later(rank)
        return op

    def _finish(self, meeting: Rendezvous) -> None:
        """The results leave: each comes to its member a little later."""
        there = [meeting.participants[machine] for machine in self.ranks]
        copies = [[c for c in p.before if isinstance(c, Tensor)] for p in there]
        for p, own, result in zip(there, copies, results_of(meeting, copies, self.ranks), strict=True):
            self._simulator.at(self._soon(), self._deliver, meeting, p, own, result)

    def _deliver(self, meeting: Rendezvous, to: Participant, own: Sequence[Tensor], result: Any) -> None:
        """A result comes to a member; by chance it does not, if another one is gone."""
        if to.op not in self._pending:
            return
        has_left = self._may_lose and any(machine in self._closed for machine in self.ranks)
        is_whole = not (has_left or any(machine in self._dead for machine in self.ranks))
        if is_whole or self._chance.random() < 0.5:
            del self._pending[to.op]
            if meeting.kind in IN_PLACE:
                for tensor, copy in zip(to.tensors, own, strict=True):
                    tensor.copy_(copy)
                result = to.tensors[0]
            self._simulator.finish(to.op, result)
        elif has_left:
            self._fail_soon(to.op, "a member has left")

    def _soon(self) -> float:
        return self._simulator.now + self._chance.uniform(0.0, 2 * self._slowest_link.latency)

    # Failures.

    def _look_later(self, machine: int) -> None:
        self._simulator.at(self._simulator.now + self._look_s, self._look_around, machine, is_background=True)

    def _look_around(self, machine: int) -> None:
        mine = [op for op, (m, _) in self._pending.items() if m == machine]
        if not mine:
            self._looking.discard(machine)
        elif not self._simulator.is_paused(machine) and (why := self._look(machine, self.ranks)) is not None:
            self._looking.discard(machine)
            for op in mine:
                self._fail(op, why)
        else:
            self._look_later(machine)

    def leave(self, machine: int) -> None:
        """A member leaves, or has died: nothing comes to it, and what it has not joined fails on the others."""
        for op, (m, meeting) in list(self._pending.items()):
            if m == machine:
                del self._pending[op]
            elif machine in self._closed and machine not in meeting.participants:
                self._fail_soon(op, f"machine {machine} has left")

    def _fail_soon(self, op: SimOp[Any], why: str) -> None:
        self._simulator.at(self._soon(), self._fail, op, why)

    def _fail(self, op: SimOp[Any], why: str) -> None:
        if self._pending.pop(op, None) is not None:
            self._simulator.finish(op, error=PeerLost(-1, op.kind, why))
