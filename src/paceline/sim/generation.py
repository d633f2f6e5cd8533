"""A simulated machine's endpoint in one generation of an elastic run: it has the rank of that generation."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any, TypeVar

from torch import Tensor

from paceline.elastic import Proposal
from paceline.endpoint import Endpoint, Layout, Retry, check_summable
from paceline.op import Op
from paceline.sim.endpoint import SimEndpoint
from paceline.sim.mortal_group import MortalGroup
from paceline.sim.simulator import SimOp
from paceline.sim.world import World

T = TypeVar("T")


class SimGeneration:
    """The machines of one generation, and what has begun in it.

    `look` is asked by a machine which of some ranks is dead.
    """

    def __init__(self, world: World, proposal: Proposal, machines: Sequence[int], *, look_s: float, seed: str) -> None:
        self.world = world
        self.proposal = proposal
        self.machine_of = dict(zip(proposal.ranks, machines, strict=True))
        self.connected: set[int] = set()
        self.closed: set[int] = set()
        self.look: dict[int, Callable[[Sequence[int]], str | None]] = {}  # By machine; its ranks are this generation's.
        self._look_s = look_s
        self._chance = Random(seed)
        self._groups: dict[tuple[int, ...], MortalGroup] = {}
        self._routines: dict[int, list[SimOp[Any]]] = {}

    @property
    def is_connected(self) -> bool:
        """Whether all of its machines have connected to each other."""
        return self.connected.issuperset(self.machine_of.values())

    def group(self, ranks: tuple[int, ...]) -> MortalGroup:
        if ranks not in self._groups:
            machines = tuple(self.machine_of[rank] for rank in ranks)
            self._groups[ranks] = MortalGroup(
                self.world,
                machines,
                self.closed,
                lambda machine, _: self.look[machine](ranks),
                look_s=self._look_s,
                chance=self._chance,
            )
        return self._groups[ranks]

    def began(self, machine: int, routine: SimOp[Any]) -> None:
        self._routines.setdefault(machine, []).append(routine)

    def close(self, machine: int) -> None:
        """A machine leaves this generation: nothing that it has begun goes on."""
        self.closed.add(machine)
        for routine in self._routines.pop(machine, []):
            self.world.simulator.cancel(routine)
        self.leave(machine)

    def leave(self, machine: int) -> None:
        """A machine takes part in nothing more."""
        for group in self._groups.values():
            group.leave(machine)


class GenerationEndpoint(SimEndpoint):
    """`machine` is the endpoint of the simulated machine, which has its processor and its trace."""

    def __init__(
        self,
        machine: SimEndpoint,
        generation: SimGeneration,
        rank: int,
        ranks: tuple[int, ...],
        *,
        channel: int | None = None,
    ) -> None:
        # Everything but collectives is done by the machine; `rank` and `ranks` are those of the generation.
        self._machine = machine
        self._generation = generation
        self.world = machine.world
        self.rank = rank
        self.ranks = ranks
        self.layout = Layout(generation.proposal.workers)
        self.hosts = None
        self.retransmit_s = None
        self._simulator = machine.world.simulator
        self._group = generation.group(ranks)
        self._channel = channel
        self._begun = 0

    def now(self) -> float:
        return self._machine.now()

    def busy(self, seconds: float, value: T = None, *, kind: str = "compute") -> Op[T]:
        return self._machine.busy(seconds, value, kind=kind)

    def compute(self, work: Callable[[], T], *, kind: str = "compute", nbytes: int = 0) -> Op[T]:
        return self._machine.compute(work, kind=kind, nbytes=nbytes)

    def spawn(self, routine: Coroutine[Op[Any], Any, T], *, kind: str = "routine") -> Op[T]:
        return self._machine.spawn(routine, kind=kind)

    def group(self, ranks: Sequence[int]) -> SimEndpoint:
        return GenerationEndpoint(
            self._machine, self._generation, self.rank, tuple(sorted(ranks)), channel=self._channel
        )

    def run_collectives(
        self,
        routine: Callable[[Endpoint], Coroutine[Op[Any], Any, T]],
        *,
        kind: str = "exchange",
        is_single: bool = False,
        retry: Retry | None = None,
    ) -> Op[T]:
        number = self._group.open_channel(self._machine.rank)
        channel = GenerationEndpoint(self._machine, self._generation, self.rank, self.ranks, channel=number)
        op = self._simulator.spawn(self._machine.rank, routine(channel), kind)
        self._simulator.forget(op)
        self._generation.began(self._machine.rank, op)
        return op

    def reduce(self, x: Tensor, dst: int, extras: Tensor | None = None) -> Op[Tensor]:
        check_summable(x)
        given = (x,) if extras is None else (x, extras)
        signature = (x.shape, x.dtype, self._generation.machine_of[dst], extras is None)
        return self._meet("reduce", signature, given, sum(t.nbytes for t in given))

    def broadcast(self, x: Tensor, src: int) -> Op[Tensor]:
        return self._meet("broadcast", (x.shape, x.dtype, self._generation.machine_of[src]), (x,), x.nbytes)

    def _meet(self, kind: str, signature: tuple[Any, ...], tensors: Sequence[Tensor], nbytes: int) -> Op[Any]:
        number: int | str
        if self._channel is None:
            number = self._group.next_number(self._machine.rank)
        else:
            number = f"{self._channel}.{self._begun}"
            self._begun += 1
        return self._group.join(self._machine.rank, number, kind, signature, tensors, nbytes)
