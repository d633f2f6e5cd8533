"""FaultSchedule: makes workers die, join and be suspected, and servers die, at the times that `Faults` gives."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from paceline.endpoint import Layout
from paceline.op import Op
from paceline.sim.faults import Faults
from paceline.sim.world import World
from paceline.strategy import Strategy
from paceline.worker.run import WorkerRun


class FaultSchedule:
    """All changes of membership in a simulated run.

    With servers, a new worker joins at once: the servers give it work.  Without servers, each worker has its own shard
    of the data, so a new worker waits until it can take the shard of a dead one, like a replacement by a launcher.
    """

    def __init__(
        self,
        world: World,
        runs: Sequence[WorkerRun],
        role: Callable[[WorkerRun], Coroutine[Op[Any], Any, Any]],
        server: Callable[[int], Coroutine[Op[Any], Any, Any]],
    ) -> None:
        """`runs` are the workers of the beginning and after them those that join; `role` is what each runs, and
        `server` what another process of a killed server runs."""
        self._world = world
        self._simulator = world.simulator
        self._runs = runs
        self._role = role
        self._server = server
        self._shards = {r.rank: r.rank for r in runs}  # The data shard of each worker.
        self._free_shards: list[int] = []  # The shards of dead workers.
        self._spare: list[WorkerRun] = []  # New workers without a shard.

    def start(self) -> None:
        """Schedule every event.  Events at the same time happen in the order of these lines."""
        faults = self._world.faults
        joining = self._runs[self._world.layout.workers :]
        for run, time in zip(joining, faults.joins, strict=True):
            self._simulator.at(time, self._join, run)
        for rank, time in faults.deaths.items():
            self._simulator.at(time, self._die, rank)
        for rank, time in faults.server_deaths:
            self._simulator.at(time, self._kill_server, rank)
        for rank, time in faults.suspicions:
            self._simulator.at(time, self._world.suspect, rank)
        for pause in faults.pauses:
            self._simulator.at(pause.start, self._world.pause, pause)
        for jump in faults.clock_jumps:
            self._simulator.at(jump.time, self._world.jump, jump, is_background=True)

    def _join(self, run: WorkerRun) -> None:
        if not self._world.layout.servers:
            self._spare.append(run)
            self._replace_dead()
        elif self._is_running():
            self._begin(run)

    def _die(self, rank: int) -> None:
        if self._world.kill(rank):
            self._free_shards.append(self._shards[rank])
            self._replace_dead()

    def _kill_server(self, rank: int) -> None:
        if self._world.kill_server(rank):
            self._simulator.at(self._simulator.now + self._world.faults.restart_s, self._bring_back, rank)

    def _bring_back(self, rank: int) -> None:
        self._simulator.begin(rank, self._server(rank), self._simulator.now)
        self._world.bring_back(rank)

    def _replace_dead(self) -> None:
        while self._spare and self._free_shards and self._is_running():
            run = self._spare.pop(0)
            shard = self._free_shards.pop(0)
            run.replica.cursor.shard = shard
            self._shards[run.rank] = shard
            self._world.members_ever.append(run.rank)
            self._begin(run)

    def _begin(self, run: WorkerRun) -> None:
        self._simulator.begin(run.rank, self._role(run), self._simulator.now)
        self._world.started(run.rank)

    def _is_running(self) -> bool:
        """Whether any worker still runs."""
        return any(self._simulator.is_running(r.rank) for r in self._runs)


def check_faults(faults: Faults, strategy: Strategy, workers: int, stages: int, *, elastic: bool = False) -> None:
    """Refuse faults that this strategy cannot survive, and ranks that do not exist."""
    name = type(strategy).__name__
    if stages > 1 and (faults.changes_members or faults.server_deaths or faults.pauses or faults.clock_jumps):
        raise ValueError(
            f"simulate({faults}) with stages={stages}: a replica in stages cannot lose a process or get a new one; "
            "give stages=1, or only faults of messages"
        )
    if faults.suspicions and not (strategy.servers or elastic or (strategy.needs.messages and faults.silent_s)):
        raise ValueError(
            f"simulate({faults}): only servers suspect workers without heartbeats, and {name} has no servers; leave "
            "suspicions out, or use a method with servers, such as ParameterServer, or Gossip or Strom with silent_s"
        )
    layout = Layout(workers, strategy.servers)
    if faults.server_deaths and strategy.durability == "none":
        raise ValueError(
            f"simulate({faults}): {name}(durability='none') loses what a killed server held; give "
            "durability='process', or leave server_deaths out"
        )
    for rank, _ in faults.server_deaths:
        if rank not in layout.server_ranks:
            raise ValueError(f"simulate({faults}): rank {rank} is not a server; they are {list(layout.server_ranks)}")
    ranks = [*layout.worker_ranks, *faults.joining_ranks(layout)]
    for rank in (*faults.deaths, *(rank for rank, _ in faults.suspicions)):
        if rank not in ranks:
            raise ValueError(f"simulate({faults}): rank {rank} is not a worker; the workers are {ranks}")
    size = layout.size + len(faults.joins)
    for rank in faults.ranks():
        if not 0 <= rank < size:
            raise ValueError(f"simulate({faults}): there is no rank {rank}; workers and servers are 0 to {size - 1}")
