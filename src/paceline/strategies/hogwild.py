"""Hogwild! (Recht, Re, Wright, Niu 2011): the workers of one host train one shared vector without a lock.

Each worker reads the parameters, computes its gradient and writes its step, while others do the same.  Steps with
sparse gradients rarely touch the same values; of steps with dense gradients a few are lost.  With one worker it is
plain training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.collectives import barrier
from paceline.needs import Needs
from paceline.strategy import Strategy
from paceline.worker.replica import Replica, train_alone


@dataclass(frozen=True)
class Hogwild(Strategy):
    """All workers update one parameter vector in their host's shared memory, each with its own optimizer.

    Sparse gradients (nn.Embedding(sparse=True), with SGD or another optimizer that supports them) touch only their
    rows.
    """

    needs: ClassVar[Needs] = Needs(shared_memory=True)

    async def worker(self, w: Replica) -> None:
        w.learner.flat.rebind((await w.endpoint.shared_vector(w.params)).values, is_shared=True)
        await train_alone(w)
        await barrier(w.endpoint)  # Training ends when the last worker has finished.
        w.learner.flat.rebind(w.params.clone(), is_shared=False)
        await barrier(w.endpoint)  # All workers have copied the model before one of them changes it.
        await w.mean_of_buffers()
