"""Agreement: how the processes of an elastic run agree on its next generation, through a store that all of them reach.

The first proposal for a generation is the one that all take.  A process proposes when each of the last generation's has
arrived, has come to the end of the run, or is dead.  What becomes of a process is decided once, by the first that says
it: the process itself, or one that counts it out.

There is no clock, no thread and no connection here: who waits, and how long, is the driver's business.  `train`
waits in real time, the simulator in virtual time.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Protocol

from paceline.elastic.rendezvous import Arrival, LeftOut, Over, Proposal, following
from paceline.errors import ClusterError


class AgreementStore(Protocol):
    """The part of a torch Store that the agreement uses."""

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, value: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(frozen=True)
class Fate:
    """What becomes of a process at the end of a generation: it arrives for the next, has left the run, or is out."""

    arrival: dict[str, Any] | None = None
    left: int | None = None  # How often it has committed.
    is_out: bool = False


class Agreement(ABC):
    """One process's part.  `workers` processes begin the run; others join it later, with the next numbers."""

    def __init__(self, store: AgreementStore, process: int | None, workers: int) -> None:
        """`process` is the number of one of the first processes; None: this one is a newcomer."""
        self.is_newcomer = process is None
        self._store = store
        self._workers = workers
        self._number = 0
        self._now = Proposal.first(workers)
        self._process = self._numbered() if process is None else process

    @abstractmethod
    def _why_dead(self, process: int) -> str | None:
        """Why a process counts as dead, as far as this one knows; None if it does not."""

    def _numbered(self) -> int:
        """A number for this process among all of the job, the first of which have those of their ranks."""
        return self._workers + self._store.add("newcomers", 1) - 1

    def leave(self, committed: int) -> None:
        fate = self._decided(self._number + 1, self._process, Fate(left=committed))
        if fate.is_out:
            self._is_left_out(self._number + 1)

    def _decided(self, number: int, process: int, fate: Fate) -> Fate:
        """What becomes of a process before that generation, by the first who says it: itself, or who counts it out."""
        key = f"generation/{number}/fate/{process}"
        found = self._store.compare_set(key, "", json.dumps(asdict(fate)))
        return Fate(**json.loads(found))

    def _dead_among(self, ranks: Sequence[int]) -> str | None:
        """Which of these ranks of the present generation is dead, and why; None if they are all alive."""
        for rank in ranks:
            process = self._now.processes[self._now.ranks.index(rank)]
            why = self._why_dead(process)
            if why is not None:
                return f"rank {rank} is dead: {why}"
        return None

    def why_lost(self, rank: int) -> str | None:
        """Why a rank of this generation takes no more part in it; None if it may."""
        return self._dead_among([rank])

    def _gone_among(self, ranks: Sequence[int]) -> str | None:
        """Which of these ranks will not connect to the present generation; None if all may.

        One that was declared dead while it connected may be alive, and others that have noticed that may be alive too:
        they take part in the next generation, and this process must not wait for them.
        """
        why = self._dead_among(ranks)
        if why is not None:
            return why
        processes = {self._now.processes[self._now.ranks.index(rank)] for rank in ranks}
        for process in sorted(processes | {self._process}):
            if self._store.check([f"generation/{self._number + 1}/fate/{process}"]):
                return f"process {process} takes part in generation {self._number} no more"
        return None

    # Members.

    def arriving(self, arrival: Arrival) -> Iterator[list[int] | None]:
        """Arrive for the next generation, until it is agreed.

        Each step gives the processes that are missing, or None if this one has nothing to wait for.
        """
        number = self._number + 1
        if self._decided(number, self._process, Fate(arrival=asdict(arrival))).is_out:
            self._is_left_out(number)
        yield None
        while (agreed := self._agreed(number)) is None:
            proposal, missing = self._proposal(number)
            yield None if proposal is not None else missing
            if proposal is not None:
                self._store.compare_set(f"generation/{number}/agreed", "", proposal)
        if self._process not in agreed.processes:
            self._is_left_out(number)
        self._number = number
        self._now = agreed

    def _agreed(self, number: int) -> Proposal | None:
        key = f"generation/{number}/agreed"
        if not self._store.check([key]):
            return None
        return Proposal(**json.loads(self._store.get(key)))

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

    def joining(self) -> Iterator[list[int] | None]:
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
            yield []

    def _has_left(self, process: int) -> bool:
        key = f"generation/{self._number + 1}/fate/{process}"
        return self._store.check([key]) and Fate(**json.loads(self._store.get(key))).left is not None
