"""Gossip: workers average in pairs (Lian et al. 2018, AD-PSGD; not AdaptiveAveraging, which is ADPSGD).

There is no server.  A worker sends a copy of its model to a peer and computes its next gradient.  The peer moves by
half of the difference and replies with the other half, which the worker adds to its model, whatever that is by
then.  An average takes as much from one model as it adds to the other, so the mean of all models is moved by gradients
only.

With all pairs averaged after each step (two workers; or 2**n, `Exponential()` and n rounds) and no overlap it is
AllReduceSGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.families.pairing import Pairing
from paceline.families.peers import Peers
from paceline.families.quiet import QuietPoint
from paceline.families.run_end import RunEnd
from paceline.families.topology import Ring, Topology, check_connected, peer_of
from paceline.needs import Needs
from paceline.strategy import Strategy
from paceline.worker.replica import Replica, train_alone


@dataclass(frozen=True)
class Gossip(Strategy):
    """Average with one peer after every `period` steps, chosen by the `topology`, while the next gradient is computed.

    Without `overlap` a worker waits for the average; then there can be several `rounds` of averages after each other.
    """

    topology: Topology = Ring()  # noqa: RUF009 (frozen)
    period: int = 1
    rounds: int = 1
    overlap: bool = True
    needs: ClassVar[Needs] = Needs(collectives=False, messages=True, rests=True)
    WITHOUT_CODEC: ClassVar = (
        "what one model loses the other must get, or their mean would drift; Strom(codec=...) sends encoded updates "
        "to all peers"
    )

    def __post_init__(self) -> None:
        if self.period < 1 or self.rounds < 1:
            raise ValueError(f"Gossip(period={self.period}, rounds={self.rounds}): both must be at least 1")
        if self.overlap and self.rounds > 1:
            raise ValueError(
                f"Gossip(rounds={self.rounds}): with overlap there is one average for each gradient; give overlap=False"
            )

    def samples_of_rate(self, samples: float, workers: int) -> float:
        return samples  # The mean of the models moves by one worker's step.

    async def worker(self, w: Replica) -> None:
        if w.cursor.shards == 1:
            return await train_alone(w)
        check_connected(self.topology, w.cursor.shards)
        peers = Peers(w)
        pairing = Pairing(peers, w.params, half_difference)
        quiet = QuietPoint(peers, settle=pairing.wait)
        end = RunEnd(peers)
        await peers.join()
        for k in w.steps_alone():
            await w.local_step()
            await peers.handle_all()
            if (k + 1) % self.period:
                continue
            for i in range(self.rounds):
                step = k // self.period * self.rounds + i
                await pairing.offer(peer_of(self.topology, peers.data_shard, w.cursor.shards, step))
                if not self.overlap:
                    await pairing.wait()
        await pairing.wait()
        await end.wait_for_all()
        quiet.end()
        await end.agree()


def half_difference(mine: Tensor, theirs: Tensor) -> Tensor:
    """What a worker gives its peer: both then have the mean."""
    return (mine - theirs).div_(2)
