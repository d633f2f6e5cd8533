"""Hogwild! (Recht, Re, Wright, Niu 2011): the workers of one host train one and the same vector, and nobody locks it.

Each reads the parameters as they are, finds its gradient and writes its step to them, whatever the others do meanwhile.  Where
gradients are sparse, steps seldom touch the same values; where they are dense, a few are lost.  With one worker it is plain training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.collectives import all_there
from paceline.replica import Replica
from paceline.strategy import Strategy


@dataclass(frozen=True)
class Hogwild(Strategy):
    """Let all workers step on one vector of parameters in their host's memory, each by its own optimizer.

    Sparse gradients (nn.Embedding(sparse=True), with SGD or another optimizer that takes them) touch only their rows.
    """

    is_ordered: ClassVar[bool] = False

    async def worker(self, w: Replica) -> None:
        w.flat.live_in((await w.endpoint.common(w.params)).values, is_common=True)
        await w.train_alone()
        await all_there(w.endpoint)  # The model is ready when the last of them is.
        w.flat.live_in(w.params.clone(), is_common=False)
        await all_there(w.endpoint)  # Nobody changes it before all have it.
        await w.mean_of_buffers()
