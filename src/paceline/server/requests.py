"""Asking: a request to another rank that is repeated until it is answered."""

from __future__ import annotations

from collections.abc import Collection

from paceline.endpoint import Endpoint, Message
from paceline.errors import ClusterError

SILENCES = 12  # So many times a request is sent again before its receiver is given up.


class HasEnded(ClusterError):
    """Who was asked has come to its end, with all work done."""


async def answered(
    endpoint: Endpoint, rank: int, asked: Message, kinds: Collection[str], *, again: Message | None = None
) -> Message:
    """The answer, of one of these kinds, to what `rank` was sent; or what that rank asks for itself, which has no serial.

    If the request, or the answer, may have been lost, it is sent again, or what is given to be sent `again` instead.
    """
    silences = 0
    while True:
        try:
            answer = await endpoint.recv(
                src=rank, kinds=(*kinds, "wait", "refused", "gone"), timeout=endpoint.retransmit_s
            )
        except TimeoutError:
            silences += 1
            name = endpoint.layout.name(rank)
            if endpoint.has_ended(rank):
                raise HasEnded(f"{name} has ended") from None
            if silences > SILENCES:
                said = f"{name} has not answered a '{asked.kind}' of {endpoint.layout.name(endpoint.rank)}: it is gone, or stuck"
                raise ClusterError(said) from None
            await endpoint.send(rank, asked if again is None else again)
            continue
        silences = 0
        check_answer(endpoint, answer)
        if answer.kind in kinds and answer.serial in (asked.serial, 0):  # What was asked twice may be answered twice.
            return answer


def check_answer(endpoint: Endpoint, answer: Message) -> None:
    """Tell it as an error if there will be no other answer, to whichever request."""
    name = endpoint.layout.name(answer.src)
    if answer.kind == "gone":
        if endpoint.has_ended(answer.src):
            raise HasEnded(f"{name} has ended")
        raise ClusterError(f"{name} is gone, and the run cannot go on without it")
    if answer.kind == "refused" and answer.serial:
        why = bytes(answer.tensors[0].tolist()).decode(errors="replace")
        raise ClusterError(f"{name} refused a request of {endpoint.layout.name(endpoint.rank)}: {why}")
