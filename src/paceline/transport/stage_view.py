"""StageView: the ranks with which one process of a split model exchanges messages, numbered as if there were no others.

Each stage has shards of its own, so a process of stage k needs only the same stage of the other replicas and the shards
of that stage (Dean et al., DistBelief, 2012).  In this view replica r is worker r.  The roles of a strategy are the
same as for a whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.endpoint import Layout
from paceline.op import Begun, Op
from paceline.protocol.messages import Message
from paceline.stripes import stripe_of

if TYPE_CHECKING:
    from paceline.transport.mailbox import Mailbox


@dataclass(frozen=True)
class StageView:
    """`rank` and `layout` as the process sees them; `ranks[i]` is the rank in the job of rank i in this view."""

    rank: int
    layout: Layout
    ranks: tuple[int, ...]

    @staticmethod
    def of(rank: int, job: Layout, stages: int, coordinators: int) -> StageView:
        """The view of a rank of the job.

        The first `coordinators` servers hold no parameters.  They exchange messages with the first stage of every
        replica and with all shards.

        >>> job = Layout(workers=4, servers=3)  # 2 replicas of 2 stages, a coordinator and a shard for each stage.
        >>> StageView.of(3, job, 2, 1)
        StageView(rank=1, layout=Layout(workers=2, servers=2), ranks=(1, 3, 4, 6))
        >>> StageView.of(6, job, 2, 1).rank, StageView.of(4, job, 2, 1).ranks
        (3, (0, 2, 4, 5, 6))
        """
        servers = tuple(job.server_ranks)
        shards = servers[coordinators:]
        of_stage = [shards[stripe_of(k, len(shards), stages)] for k in range(stages)]
        stage = rank % stages if rank in job.worker_ranks else 0
        for k, mine in enumerate(of_stage):
            if rank in mine:
                stage = k
        replicas = tuple(range(stage, job.workers, stages))
        reached = servers if rank in servers[:coordinators] else (*servers[:coordinators], *of_stage[stage])
        ranks = (*replicas, *reached)
        return StageView(ranks.index(rank), Layout(len(replicas), len(reached), ranks), ranks)


class StageMailbox:
    """A mailbox of the job with the ranks of a view.  The job closes it."""

    def __init__(self, mailbox: Mailbox | StageMailbox, view: StageView) -> None:
        self._mailbox = mailbox
        self._ranks = view.ranks
        self._numbers = {rank: i for i, rank in enumerate(view.ranks)}

    def send(self, dst: int, message: Message) -> Op[None]:
        return self._mailbox.send(self._ranks[dst], message)

    def recv(
        self, src: int | None = None, timeout: float | None = None, types: tuple[type[Message], ...] | None = None
    ) -> Op[Message]:
        received = self._mailbox.recv(None if src is None else self._ranks[src], timeout, types)
        return Begun("recv", lambda: self._renumbered(received.wait()))

    def _renumbered(self, message: Message) -> Message:
        message.src = self._numbers[message.src]
        return message

    def send_buffer(self, like: Tensor) -> Tensor:
        return self._mailbox.send_buffer(like)

    def in_use(self, x: Tensor) -> bool:
        return self._mailbox.in_use(x)

    def close(self) -> None:
        pass
