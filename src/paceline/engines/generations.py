"""Generations: the rendezvous of an elastic job, in its store.

The first proposal for a generation is the one that all take.  A worker proposes when each worker of the last generation
has arrived, has come to the end of the run, or is dead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import torch.distributed as dist

from paceline.elastic import Arrival, ElasticEndpoint, Generation, LeftOut, Over, Proposal, following
from paceline.endpoint import Layout
from paceline.engines.connections import Connections
from paceline.engines.liveness import Heartbeat, Liveness
from paceline.errors import ClusterError
from paceline.op import Begun, Op
from paceline.transport.endpoint import BEAT_S, ProcessEndpoint
from paceline.transport.job_key import JobKey, SignedStore

LOOK_S = 0.02


@dataclass(frozen=True)
class Fate:
    """What becomes of a process at the end of a generation: it arrives for the next, has left the run, or is out."""

    arrival: dict[str, Any] | None = None
    left: int | None = None  # How often it has committed.
    is_out: bool = False


class Generations:
    """One process's part.  It is that of a rank of the launcher, and one of its `incarnation`s."""

    def __init__(
        self,
        store: dist.Store,
        open_store: Callable[[], dist.Store],
        connect: Connections,
        *,
        rank: int,
        incarnation: int,
        workers: int,
        silent_s: float,
    ) -> None:
        """`open_store` makes another connection to the same store."""
        self.is_newcomer = incarnation > 1
        self._store = store
        self._connect = connect
        self._rank = rank
        self._incarnation = incarnation
        self._workers = workers
        self._timeout_s = connect.timeout_s
        self._number = 0
        self._now = Proposal.first(workers)
        self._current: ProcessEndpoint | None = None
        self._liveness = Liveness(store, connect.host, silent_s=silent_s)
        if self.is_newcomer and any(self._liveness.is_closed_to(process) for process in range(workers)):
            raise ClusterError(
                f"rank {rank} was started on another host than the job, which began on one host and listens on its "
                "loopback alone: start it there"
            )
        self._process = self._numbered() if self.is_newcomer else rank
        self._liveness.announce(self._process, rank, incarnation, connect.address)
        self._heartbeat = Heartbeat(open_store, self._process, every_s=min(BEAT_S, silent_s / 4))

    def _numbered(self) -> int:
        """This process's number among all of the job, the first of which have those of their ranks."""
        return self._workers + self._store.add("newcomers", 1) - 1

    def first(self) -> ElasticEndpoint:
        """This process's endpoint for the whole run; a newcomer's is that of one worker until it has joined."""
        endpoint = ElasticEndpoint(self, self._connect("", 0, {0: self._connect.host}, Layout(1), lambda ranks: None))
        if not self.is_newcomer:
            try:
                endpoint.inner = self._endpoint()
            except ClusterError as error:  # One of them has died already.
                endpoint.enter(self._meet(Arrival(0, cause=str(error))))
        return endpoint

    def come_back(self) -> None:
        """The others went on without this process: it joins them again as a newcomer."""
        self.is_newcomer = True
        self._process = self._heartbeat.process = self._numbered()
        self._liveness.announce(self._process, self._rank, self._incarnation, self._connect.address)

    def close(self) -> None:
        self._heartbeat.close()
        self._liveness.close()
        self._close_current()

    def has_newcomers(self) -> bool:
        return self._heartbeat.newcomers > self._now.newcomers

    def meet(self, arrival: Arrival) -> Op[Generation]:
        def met() -> Generation:
            try:
                return self._meet(arrival)
            except dist.DistError as error:
                raise _unreachable(error) from error

        return Begun("meet", met)

    def leave(self, committed: int) -> None:
        try:
            fate = self._decided(self._number + 1, self._process, Fate(left=committed))
        except dist.DistError as error:
            raise _unreachable(error) from error
        if fate.is_out:
            self._is_left_out(self._number + 1)

    def _decided(self, number: int, process: int, fate: Fate) -> Fate:
        """What becomes of a process before that generation, by the first who says it: itself, or who counts it out."""
        key = f"generation/{number}/fate/{process}"
        found = self._store.compare_set(key, "", json.dumps(asdict(fate)))
        return Fate(**json.loads(found))

    def _meet(self, arrival: Arrival) -> Generation:
        self._close_current()
        if self.is_newcomer:
            self._join()
        else:
            self._arrive(arrival)
        while True:
            try:
                endpoint = self._endpoint()
                break
            except ClusterError as error:  # Another one has died meanwhile.
                self._arrive(replace(arrival, cause=str(error)))
        now = self._now
        return Generation(self._number, endpoint, now.committed, now.pause, now.is_new)

    def _endpoint(self) -> ProcessEndpoint:
        now = self._now
        rank = now.ranks[now.processes.index(self._process)]
        hosts = {r: self._host_of(p) for r, p in zip(now.ranks, now.processes, strict=True)}
        self._current = self._connect(f"{self._number}", rank, hosts, Layout(now.workers), self._dead_among)
        return self._current

    def _host_of(self, process: int) -> str:
        """Where a member is; it may not have said so yet."""
        deadline = time.monotonic() + self._timeout_s
        while (host := self._liveness.host_of(process)) is None:
            if (why := self._why_dead(process)) is not None:
                raise ClusterError(f"process {process} is dead: {why}")
            if time.monotonic() > deadline:
                raise ClusterError(f"process {process} has not said where it is within {self._timeout_s:g} s")
            time.sleep(LOOK_S)
        return host

    def _close_current(self) -> None:
        """Leave the last generation; what was sent in it still arrives."""
        if self._current is not None:
            self._current.close()
            self._connect.check_ended()
        self._current = None

    def _dead_among(self, ranks: Sequence[int]) -> str | None:
        """Which of these ranks of the present generation is dead, and why; None if they all take part in it.

        A member that has left the generation may have done so before it could be connected to.
        """
        try:
            return self._missed_among(ranks)
        except dist.DistError as error:
            return f"the job's store cannot be reached: {error}"

    def _missed_among(self, ranks: Sequence[int]) -> str | None:
        # All are looked at: silence is counted from the first look.
        members = zip(self._now.ranks, self._now.processes, strict=True)
        found = {rank: self._why_dead(process) for rank, process in members if process != self._process}
        for rank in ranks:
            if (why := found.get(rank)) is not None:
                return f"rank {rank} is dead: {why}"
        if self._store.check([f"generation/{self._number + 1}/begun"]):
            return f"others have ended generation {self._number} of the run's workers"
        return None

    def why_lost(self, rank: int) -> str | None:
        return self._dead_among([rank])

    def _why_dead(self, process: int) -> str | None:
        return self._liveness.why_dead(process, launched_as=process if process < self._workers else None)

    # Members.

    def _arrive(self, arrival: Arrival) -> None:
        """Arrive for the next generation, and wait until it is agreed."""
        number = self._number + 1
        key = f"generation/{number}"
        if self._decided(number, self._process, Fate(arrival=asdict(arrival))).is_out:
            self._is_left_out(number)
        self._store.set(f"{key}/begun", "")
        deadline = time.monotonic() + self._timeout_s
        while (agreed := self._agreed(number)) is None:
            proposal, missing = self._proposal(number)
            if proposal is not None:
                self._store.compare_set(f"{key}/agreed", "", proposal)
            elif time.monotonic() > deadline:
                raise ClusterError(
                    f"processes {missing} are alive, and have not met the others within {self._timeout_s:g} s after: "
                    f"{arrival.cause or 'a pause for a newcomer'}"
                )
            else:
                time.sleep(LOOK_S)
        self._take(number, agreed)

    def _agreed(self, number: int) -> Proposal | None:
        key = f"generation/{number}/agreed"
        if not self._store.check([key]):
            return None
        return Proposal(**json.loads(self._store.get(key)))

    def _take(self, number: int, agreed: Proposal) -> None:
        if self._process not in agreed.processes:
            self._is_left_out(number)
        self._number = number
        self._now = agreed

    def _is_left_out(self, number: int) -> NoReturn:
        raise LeftOut(
            f"the others went on without this worker (generation {number} of the run's workers): it had been silent "
            "for longer than silent_s, because it was stopped or cut off"
        )

    def _proposal(self, number: int) -> tuple[str | None, list[int]]:
        """The next generation, if everyone has arrived; otherwise those who are missing."""
        key = f"generation/{number}"
        arrived: dict[int, Arrival] = {}
        missing: list[int] = []
        left: list[int] = []
        for process in self._now.processes:
            if not self._store.check([f"{key}/fate/{process}"]) and self._why_dead(process) is None:
                missing.append(process)
        if missing:
            return None, missing
        for process in self._now.processes:
            fate = self._decided(number, process, Fate(is_out=True))
            if fate.left is not None:
                left.append(fate.left)
            elif fate.arrival is not None:
                arrived[process] = Arrival(**fate.arrival)
        seen = self._store.add("newcomers", 0)
        asked = range(self._workers + self._now.newcomers, self._workers + seen)
        proposal = following(
            self._now,
            {p: a for p, a in arrived.items() if p == self._process or self._why_dead(p) is None},
            left,
            lambda: [p for p in asked if self._why_dead(p) is None],
            seen,
        )
        return json.dumps(asdict(proposal)), []

    # Newcomers.

    def _join(self) -> None:
        """Wait until the members take this process in."""
        while True:
            agreed = self._agreed(self._number + 1)
            if agreed is not None:
                self._number += 1
                self._now = agreed
                if self._process in agreed.processes:
                    self.is_newcomer = False
                    return
                if agreed.newcomers > self._process - self._workers:
                    self._is_left_out(self._number)
                continue
            if any(self._has_left(p) for p in self._now.processes):
                raise Over("the run ended before this worker could join it")
            if all(self._why_dead(p) is not None for p in self._now.processes):
                raise ClusterError("all workers that knew the state of the run are dead")
            time.sleep(LOOK_S)

    def _has_left(self, process: int) -> bool:
        key = f"generation/{self._number + 1}/fate/{process}"
        return self._store.check([key]) and Fate(**json.loads(self._store.get(key))).left is not None


def _unreachable(error: Exception) -> ClusterError:
    return ClusterError(f"the job's store, through which its workers meet, cannot be reached: {error}")


def another_connection(base: dist.Store, prefix: str, key: JobKey | None) -> dist.Store:
    """A job's store, this prefix of its base, through a connection of its own, which other threads do not wait for."""
    if isinstance(base, dist.FileStore):
        another: dist.Store = dist.FileStore(base.path)  # pyright: ignore
    elif isinstance(base, dist.TCPStore):
        another = dist.TCPStore(base.host, base.port, is_master=False)
    else:
        raise ValueError(
            f"elastic=True with a {type(base).__name__}: start the job by paceline run, or with a TCPStore or FileStore"
        )
    store = dist.PrefixStore(prefix, another)
    return store if key is None else SignedStore(store, key, prefix)
