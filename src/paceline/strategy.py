"""Strategy: a distributed training method as its paper writes it.

A strategy is a frozen dataclass of hyper-parameters with one coroutine per role.  It waits for gradients, steps,
messages and means, and knows nothing of processes, threads or clocks: the same file runs in the simulator, on real
processes and inside a user's own loop.  A strategy is abstract or final, never both.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from paceline.checked import Checked
from paceline.needs import Needs

if TYPE_CHECKING:
    from paceline.server.shard import Shard
    from paceline.worker.replica import Replica


Durability = Literal["none", "process"]
"""What a server's state survives: nothing, or that its process is killed."""


class Strategy(Checked):
    """See `strategies/block_momentum.py` for a whole one."""

    KIND: ClassVar = "strategy"

    servers: int = 0
    durability: Durability = "none"  # What becomes of a server that is killed.
    coordinators: ClassVar[int] = 0  # How many of the servers, the first ones, hold no part of the model.
    needs: ClassVar[Needs] = Needs()  # A property where it depends on the settings.
    steps_itself: ClassVar[bool] = False  # It takes the steps in place of the optimizer, by its rates.
    follows_rate: ClassVar[bool] = True  # Learning rates have an effect.
    WITHOUT_CODEC: ClassVar[str] = (  # Why it takes no codec, and what does; for a method without the setting `codec`.
        "it sends its values as they are; AllReduceSGD, the averaging methods and those on servers take a codec"
    )

    @property
    def needs_unscaled(self) -> str | None:
        """Why its gradients must not be multiplied by a GradScaler, and what to do; None if they may be."""
        return None

    @property
    def methods(self) -> Sequence[Strategy]:
        """The methods that follow one another in a run: itself, or those of a warm start."""
        return (self,)

    @property
    def has_own_momentum(self) -> bool:
        """Whether its steps have a momentum that no optimizer holds, so that it does not follow the size of a step."""
        return self.steps_itself

    @classmethod
    def refused_setting(cls, name: str) -> str:
        if name == "codec":
            return f"{cls.__name__} takes no codec: {cls.WITHOUT_CODEC}"
        return super().refused_setting(name)

    @abstractmethod
    async def worker(self, w: Replica) -> None:
        """What one worker does, from its first step to its last."""

    def samples_of_step(self, samples: float, workers: int) -> float:
        """How many samples stand behind a step of an optimizer, if a minibatch of all workers has `samples`.

        By default a worker steps with its own part.  `Task(scaling=)` sets rate and momentum by this number.
        """
        return samples / workers

    def samples_of_rate(self, samples: float, workers: int) -> float:
        """The same for the learning rate alone.

        It is more where models are averaged as they are: their mean moves by one worker's step in the time in which
        all workers take one.
        """
        return self.samples_of_step(samples, workers)

    async def server(self, s: Shard) -> None:
        """What one parameter shard does until all workers have left; only if `servers` is above 0."""
        raise TypeError(f"{type(self).__name__} has servers={self.servers} but no server role")


class Stopped(Exception):
    """Raised in a strategy to stop its run, which can be resumed later."""


class Ended(Exception):
    """Raised in a strategy when no worker has data left."""


class MissedEnd(Ended):
    """Raised in a strategy when the run has ended without this worker: it joined too late, or was taken for dead."""


def check_durability(strategy: Strategy) -> None:
    """Refuse a durability of servers where there are none."""
    if strategy.durability != "none" and not strategy.servers:
        raise ValueError(
            f"{type(strategy).__name__}(servers=0, durability={strategy.durability!r}): durability is of servers, and "
            "there are none; give servers=1, or leave durability out"
        )
