"""Generations: the rendezvous of an elastic job, in its store and in real time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist

from paceline.elastic import Agreement, Arrival, ElasticEndpoint, Generation
from paceline.endpoint import Layout
from paceline.engines.connections import Connections
from paceline.engines.liveness import Heartbeat, Liveness
from paceline.errors import ClusterError
from paceline.op import Begun, Op
from paceline.transport.endpoint import BEAT_S, ProcessEndpoint
from paceline.transport.job_key import JobKey, SignedStore

LOOK_S = 0.02


class Generations(Agreement):
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
        self._liveness = Liveness(store, connect.host, silent_s=silent_s)
        if incarnation > 1 and any(self._liveness.is_closed_to(process) for process in range(workers)):
            raise ClusterError(
                f"rank {rank} was started on another host than the job, which began on one host and listens on its "
                "loopback alone: start it there"
            )
        super().__init__(store, None if incarnation > 1 else rank, workers)
        self._connect = connect
        self._rank = rank
        self._incarnation = incarnation
        self._timeout_s = connect.timeout_s
        self._current: ProcessEndpoint | None = None
        self._is_connecting = False
        self._spans_hosts = False  # Whether the members of this generation are on several hosts.
        self._liveness.announce(self._process, rank, incarnation, connect.address)
        self._heartbeat = Heartbeat(open_store, self._process, every_s=min(BEAT_S, silent_s / 4))

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
            super().leave(committed)
        except dist.DistError as error:
            raise _unreachable(error) from error

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
        self._spans_hosts = len(set(hosts.values())) > 1
        self._is_connecting = True
        try:
            self._current = self._connect(f"{self._number}", rank, hosts, Layout(now.workers), self._missing_among)
        finally:
            self._is_connecting = False
        return self._current

    def _missing_among(self, ranks: Sequence[int]) -> str | None:
        """Which of these ranks is dead; also which of them will not connect, or has left, where no connection shows it.

        On one host a connection ends with the generation.  Between hosts one may stay open.
        """
        try:
            return self._gone_among(ranks) if self._is_connecting or self._spans_hosts else self._dead_among(ranks)
        except dist.DistError as error:
            return f"the job's store cannot be reached: {error}"

    def _dead_among(self, ranks: Sequence[int]) -> str | None:
        # All are looked at: silence is counted from the first look.
        members = zip(self._now.ranks, self._now.processes, strict=True)
        found = {rank: self._why_dead(process) for rank, process in members if process != self._process}
        return next((f"rank {rank} is dead: {why}" for rank in ranks if (why := found.get(rank)) is not None), None)

    def why_lost(self, rank: int) -> str | None:
        return self._missing_among([rank])

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

    def _why_dead(self, process: int) -> str | None:
        return self._liveness.why_dead(process, launched_as=process if process < self._workers else None)

    def _arrive(self, arrival: Arrival) -> None:
        """Arrive for the next generation, and wait until it is agreed."""
        deadline = time.monotonic() + self._timeout_s
        for missing in self.arriving(arrival):
            if missing is not None:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"processes {missing} are alive, and have not met the others within {self._timeout_s:g} s "
                        f"after: {arrival.cause or 'a pause for a newcomer'}"
                    )
                time.sleep(LOOK_S)

    def _join(self) -> None:
        """Wait until the members take this process in."""
        for _ in self.joining():
            time.sleep(LOOK_S)


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
