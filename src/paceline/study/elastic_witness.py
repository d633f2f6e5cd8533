"""ElasticWitness: watches the commits of an elastic run, whose workers may die in collectives and join."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.elastic import ElasticEndpoint
from paceline.sim.elastic_run import ElasticSimulation
from paceline.study.witness import Violation

SHARED = ("all_reduce", "broadcast")  # Exchanges after which all workers have the same values.


@dataclass
class History:
    """What one worker has committed since it has joined the run."""

    digests: dict[int, str] = field(default_factory=dict[int, str])  # By the number of the commit.
    steps: list[int] = field(default_factory=list[int])
    times_out: int = 0  # How often the others went on without this worker.


class ElasticWitness:
    """Watches every worker of a run, also those that join later."""

    def __init__(self, simulation: ElasticSimulation) -> None:
        self._simulation = simulation
        self.histories: dict[int, History] = {}
        for machine, endpoint in simulation.endpoints.items():
            self._watch(machine, endpoint)
        simulation.on_worker = self._watch

    def _watch(self, machine: int, endpoint: ElasticEndpoint) -> None:
        history = self.histories[machine] = History()

        def committed(number: int, exchanged: list[tuple[str, Any]]) -> None:
            history.digests[number] = _digest(exchanged)
            history.steps.append(endpoint.step())

        def left_out() -> None:
            history.digests.clear()
            history.times_out += 1

        endpoint.on_commit = committed
        endpoint.rendezvous.come_back = _after(left_out, endpoint.rendezvous.come_back)

    @property
    def times_out(self) -> int:
        return sum(history.times_out for history in self.histories.values())

    def longest_period(self) -> int:
        """The largest number of steps between two commits of a worker."""
        gaps = [b - a for h in self.histories.values() for a, b in zip([0, *h.steps], h.steps, strict=False)]
        return max(gaps, default=0) + 1

    def check_end(self, finished: list[int]) -> None:
        """No exchange was committed by some of these workers, and undone and repeated by others."""
        seen: dict[int, tuple[int, str]] = {}
        for machine in finished:
            for number, digest in self.histories[machine].digests.items():
                first, its = seen.setdefault(number, (machine, digest))
                if its != digest:
                    raise Violation(
                        "an exchange is committed by all or by none",
                        f"commit {number} is not the same on workers {first} and {machine}",
                        self._simulation.simulator.now,
                    )


def _after(what: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        what()
        then()

    return both


def _digest(exchanged: list[tuple[str, Any]]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for kind, value in exchanged:
        found.update(kind.encode())
        if kind in SHARED and isinstance(value, Tensor):
            found.update(value.detach().contiguous().view(-1).numpy().tobytes())
    return found.hexdigest()
