"""What a shard saves of its workers: how often each has pushed, and the updates that it holds back.

Slot `workers`, with the resize rule `shard`.  An update that waits for the gate is saved as its sender meant it; the
work behind it counts as done.  A resumed run with another number of workers starts to count anew, and applies these
updates first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from paceline.endpoint import Layout
from paceline.server.membership import Membership
from paceline.server.messages import Update
from paceline.server.queues import Queues
from paceline.state import StateStore, Values, shard

Decode = Callable[[Update], Tensor]
"""The values of an update, without a codec."""

NAMES = ("workers", "clocks", "owed", "held")
NOBODY = -1  # In the place of the rank of a worker of another run.


class Pending:
    """The slot `workers` of one shard."""

    def __init__(self, layout: Layout, members: Membership, queues: Queues, states: StateStore) -> None:
        self.decode: Decode = lambda update: update.update
        self._layout = layout
        self._members = members
        self._queues = queues
        states.bind("workers", rule=shard, save=self._save, load=self._load, check=_check)

    def applied(self) -> Mapping[int, int]:
        """Of each worker: how many work items are behind its updates that are saved here."""
        return {update.src: update.steps for update in self._queues.updates}

    def _save(self) -> Values:
        if len({update.src for update in self._queues.updates}) < len(self._queues.updates):
            raise ValueError("several updates of one worker wait for the gate, and a checkpoint holds one of each")
        return {
            "workers": self._layout.workers,
            "clocks": dict(self._members.clocks),
            "owed": dict.fromkeys(self._queues.owed, 1),
            "held": {update.src: self._plain(update) for update in self._queues.updates},
        }

    def _plain(self, update: Update) -> Values:
        if update.runs is not None:
            raise ValueError("a sparse update waits for the gate, and a checkpoint cannot hold it")
        values = self.decode(update).clone()
        return {"update": values, "version": update.version, "samples": update.samples, "rate": update.rate}

    def _load(self, values: Values) -> None:
        is_same = values["workers"] == self._layout.workers
        clocks = self._members.clocks
        for worker, clock in values["clocks"].items():
            if is_same and worker in clocks:
                clocks[worker] = clock
        self._queues.owed = set(values["owed"]) if is_same else set()
        self._queues.unapplied = set(values["held"]) if is_same else set()
        for worker, held in values["held"].items():
            update = Update(**held)
            update.src = worker if is_same else NOBODY
            self._queues.updates.append(update)


def _check(values: Any) -> None:
    if not isinstance(values, dict) or set(values) != set(NAMES):
        holds = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"the saved slot 'workers' holds {holds}, and a shard has {sorted(NAMES)}")
