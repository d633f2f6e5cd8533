"""SyncVote: what every rank sends beside its values in a mean; the same exchange sums it over the group."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from paceline.codecs.codec import Codec, Unencodable
from paceline.endpoint import Endpoint, Retry
from paceline.op import Op

VOTE_NBYTES = 32  # A vote on the wire: four float64 numbers.
TRAILER_NBYTES = 40  # What follows an encoded message: the vote, and the message's length without its padding.
COMPLETE = 2.0**26  # More than there are ranks: one number on the wire holds two counts.


@dataclass(slots=True)
class SyncVote:
    """A rank's weight, whether it has more data, and whether it has a NaN; or the sums of these over the group.

    `complete` is 1 if a rank's backward pass, with at least one sample, reached all parameters of the bucket.  It
    travels in the same number as `going_on`.
    """

    weight: float
    going_on: float = 0.0
    bad: float = 0.0
    bad_rank: float = 0.0
    # These stay on the rank: its number, its value that cannot be encoded, and which parameters were reached.
    rank: float = 0.0
    complaint: Unencodable | None = None
    reached: Sequence[float] = ()
    complete: float = 0.0

    def __post_init__(self) -> None:
        if self.going_on >= COMPLETE:  # It was read from the wire.
            self.complete, self.going_on = divmod(self.going_on, COMPLETE)

    def take(self, other: SyncVote) -> None:
        """Take all values of another vote."""
        for field in fields(self):
            setattr(self, field.name, getattr(other, field.name))

    def tensor(self) -> Tensor:
        going_on = self.going_on + COMPLETE * self.complete
        return torch.tensor([self.weight, going_on, self.bad, self.bad_rank], dtype=torch.float64)

    def pack(self, data: Tensor, message: Tensor | None) -> Tensor:
        """`data` followed by the vote, in `message` if given, which may already hold the data."""
        nbytes = data.numel()
        if message is None:
            message = torch.empty(packed_nbytes(nbytes), dtype=torch.uint8, device=data.device)
        if message.data_ptr() != data.data_ptr():
            message[:nbytes] = data
        message[nbytes:-TRAILER_NBYTES] = 0
        message[-TRAILER_NBYTES:] = (
            torch.cat([self.tensor(), torch.tensor([nbytes], dtype=torch.float64)]).view(torch.uint8).to(data.device)
        )
        return message

    @staticmethod
    def unpack(messages: Sequence[Tensor]) -> tuple[list[Tensor], list[float], SyncVote]:
        """The encoded bytes of packed messages, each one's weight, and the sum of their votes."""
        votes = torch.stack([m[-TRAILER_NBYTES:] for m in messages]).cpu().view(torch.float64)
        encoded = [m[: int(nbytes)] for m, nbytes in zip(messages, votes[:, 4].tolist(), strict=True)]
        return encoded, votes[:, 0].tolist(), SyncVote(*votes[:, :4].sum(0).tolist())

    def refuse(self, codec: Codec, x: Tensor, why: str) -> None:
        """Vote that `x` is not finite, or cannot be encoded because of `why`; keep the index of the value."""
        self.bad = 1.0
        self.bad_rank = self.rank
        try:
            codec.refuse(x, why)
        except Unencodable as complaint:
            self.complaint = complaint

    def culprit(self) -> str:
        return f"rank {self.bad_rank:.0f}" if self.bad == 1 else f"{self.bad:.0f} ranks"


def packed_nbytes(nbytes: int) -> int:
    """The size of a message with `nbytes` encoded bytes: padded to a multiple of 8, and with the trailer."""
    return -(-nbytes // 8) * 8 + TRAILER_NBYTES


def retried(vote: SyncVote, x: Tensor, routine: Callable[[Endpoint], Coroutine[Op[Any], Any, Any]]) -> Retry:
    """How an exchange of `x` runs again by another routine, with the vote as it is now."""
    given = replace(vote)

    def again(endpoint: Endpoint) -> Coroutine[Op[Any], Any, Any]:
        vote.take(given)
        return routine(endpoint)

    return Retry(again, changes=[x])
