"""Hogwild! (Recht, Re, Wright, Niu 2011): the workers of one host train one and the same vector, and nobody locks it.

Each reads the parameters as they are, finds its gradient and writes its step to them, whatever the others do meanwhile.  Where
gradients are sparse, steps seldom touch the same values; where they are dense, a few are lost.  With one worker it is plain training.
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
    """Let all workers step on one vector of parameters in their host's memory, each by its own optimizer.

    Sparse gradients (nn.Embedding(sparse=True), with SGD or another optimizer that takes them) touch only their rows.
    """

    needs: ClassVar[Needs] = Needs(shared_memory=True)

    async def worker(self, w: Replica) -> None:
        w.learner.flat.rebind((await w.endpoint.shared_vector(w.params)).values, is_shared=True)
        await train_alone(w)
        await barrier(w.endpoint)  # The model is ready when the last of them is.
        w.learner.flat.rebind(w.params.clone(), is_shared=False)
        await barrier(w.endpoint)  # Nobody changes it before all have it.
        await w.mean_of_buffers()
