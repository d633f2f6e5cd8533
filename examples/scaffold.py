"""SCAFFOLD (Karimireddy et al., ICML 2020) as a strategy of your own, on workers with different data.

Where workers have different data, their local steps drift towards their own optimum.  SCAFFOLD corrects every
gradient by the difference of two control variates: the direction in which all workers move, less the one in which
this worker moves.  Without control variates it is PeriodicAveraging.

Run it: `python examples/scaffold.py`.  It is written by docs/writing-a-strategy.md alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import paceline as pl
from paceline.state import per_worker


@dataclass(frozen=True)
class Scaffold(pl.Strategy):
    """Train alone with corrected gradients, average models and control variates every `period` steps.

    It is the paper's option II.  The workers' optimizer is plain SGD: its learning rate is the paper's local rate.
    """

    period: int = 8

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"Scaffold(period={self.period}): it counts steps between syncs and must be at least 1")

    async def worker(self, w: pl.Replica) -> None:
        zeros = torch.zeros_like(w.params)
        server = w.state("server", model=w.params, control=zeros)  # The paper's x and c, equal on all workers.
        own = w.state("own", rule=per_worker, control=zeros, steps=0)  # c_i, and the local steps since the last sync.
        for k in w.steps():
            g = await w.gradient()
            await w.step(g.add_(server.control - own.control))
            own.steps += w.batch.samples > 0
            if (k + 1) % self.period == 0:
                await self.sync(w, server, own)
        await w.mean_of_buffers()

    async def sync(self, w: pl.Replica, server: pl.Slot, own: pl.Slot) -> None:
        delta = w.params - server.model
        change = torch.zeros_like(delta)
        if own.steps and w.lr:  # c_i becomes c_i - c + (x - y_i) / (K * lr).
            change = -server.control - delta / (own.steps * w.lr)
            own.control.add_(change)
        server.model.add_(await w.mean(delta))
        server.control.add_(await w.mean(change))
        w.params.copy_(server.model)
        own.steps = 0


def main() -> None:
    """Four workers, each with its own half of the digits' classes: SCAFFOLD beside PeriodicAveraging."""
    from paceline.data import digits

    x, y, test_x, test_y = digits()

    def data(rank: int, workers: int) -> list[torch.Tensor]:
        """Worker `rank` holds the digits 0 to 4 or 5 to 9: nothing that the next worker holds."""
        mine = (y < 5) == (rank % 2 == 0)
        return [x[mine][rank // 2 :: 2], y[mine][rank // 2 :: 2]]

    task = pl.Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        data=data,
        batch=64,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        steps=256,
        evaluate=lambda model: {"accuracy": (model(test_x).argmax(1) == test_y).float().mean().item()},
    )
    for strategy in (pl.PeriodicAveraging(period=16), Scaffold(period=16)):
        run = pl.simulate(task, strategy, pl.Cluster(workers=4))
        print(f"{type(strategy).__name__:18} accuracy {run.final['accuracy']:.1%}")


if __name__ == "__main__":
    main()
