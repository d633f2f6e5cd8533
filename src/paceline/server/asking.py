"""Asking: a request to another rank that is repeated until it is answered."""

from __future__ import annotations

from collections.abc import Collection

from paceline.endpoint import Endpoint, Message
from paceline.errors import ClusterError

SILENCES = 12  # So many times a request is sent again before its receiver is given up.


class HasEnded(ClusterError):
    """Who was asked has come to its end, with all work done."""


async def answered(endpoint: Endpoint, rank: int, asked: Message, kinds: Collection[str]) -> Message:
    """The answer, of one of these kinds, to what `rank` was sent; it is sent again if it, or the answer, may have been lost."""
    silences, name = 0, endpoint.layout.name(rank)
    while True:
        try:
            answer = await endpoint.recv(src=rank, kinds=(*kinds, "wait", "refused", "gone"), timeout=endpoint.patience)
        except TimeoutError:
            silences += 1
            if endpoint.has_ended(rank):
                raise HasEnded(f"{name} has ended") from None
            if silences > SILENCES:
                said = f"{name} has not answered a '{asked.kind}' of {endpoint.layout.name(endpoint.rank)}: it is gone, or stuck"
                raise ClusterError(said) from None
            await endpoint.send(rank, asked)
            continue
        silences = 0
        if answer.kind == "gone" or (answer.serial == asked.serial and answer.kind != "wait"):  # What was asked twice is answered twice.
            check_answer(endpoint, asked, answer)
            return answer


def check_answer(endpoint: Endpoint, asked: Message, answer: Message) -> None:
    """Tell it as an error if the answer is that there is none."""
    name = endpoint.layout.name(answer.src)
    if answer.kind == "gone":
        if endpoint.has_ended(answer.src):
            raise HasEnded(f"{name} has ended")
        raise ClusterError(f"{name} is gone, and with it a part of the run")
    if answer.kind == "refused":
        why = bytes(answer.tensors[0].tolist()).decode(errors="replace")
        raise ClusterError(f"{name} refused a '{asked.kind}' of {endpoint.layout.name(endpoint.rank)}: {why}")
