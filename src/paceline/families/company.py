"""The workers that train in one memory: any of them may die, and a replacement continues in its place.

Memory outlives a worker that has mapped it, and no worker locks it, so the others go on.  What a dead worker has
written stays.  Beside the values the memory holds each worker's next step: a replacement begins with it, so the
minibatch at which the worker died is computed again, and no other.
"""

from __future__ import annotations

from torch import Tensor

from paceline.endpoint import SharedVector
from paceline.families.pause import Pause
from paceline.families.peers import Peers
from paceline.families.run_end import RunEnd
from paceline.worker.replica import Replica


class Company:
    """One worker's place among those with whom it shares the `vector`."""

    def __init__(
        self,
        w: Replica,
        vector: SharedVector,
        peers: Peers | None = None,
        end: RunEnd | None = None,
        pause: Pause | None = None,
    ) -> None:
        self.vector = vector
        self._pause = pause
        self._w = w
        self._peers = peers
        self._end = end
        self._member = 0 if peers is None else peers.data_shard

    @classmethod
    async def of(cls, w: Replica, first: Tensor | None = None) -> Company:
        """Map the memory, and join the others.

        The memory begins with the parameters of one of the first workers, or with the values `first`.
        """
        first = w.params if first is None else first
        if w.cursor.shards == 1:
            return cls(w, await w.endpoint.shared_vector(first))
        peers = Peers(w)
        is_first = peers.has_model
        end = RunEnd(peers)
        pause = Pause(peers)
        vector = await w.endpoint.shared_vector(first, peers.data_shard)
        await peers.join(takes_model=False)
        company = cls(w, vector, peers, end, pause)
        if is_first:
            vector.steps[company._member] = w.cursor.step
        else:
            w.params.copy_(vector.values)
            w.cursor.resume_at(vector.steps[company._member])
        return company

    async def look_around(self) -> None:
        """Take note of workers that have died or joined, before a step."""
        if self._peers is not None:
            self.vector.steps[self._member] = self._w.cursor.step
            await self._peers.handle_all()

    async def wait_for_all(self) -> None:
        """This worker has no data left: wait until that is true of all that are alive."""
        if self._end is not None:
            self.vector.steps[self._member] = self._w.cursor.step
            await self._end.wait_for_all()
        if self._pause is not None:
            self._pause.end()
