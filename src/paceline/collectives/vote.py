"""SyncVote: what every rank says beside its values in a mean; the group learns the sum in the same exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.codecs.codec import Codec, Unencodable

VOTE_NBYTES = 32  # A vote on the wire: four float64 numbers.
TRAILER_NBYTES = 40  # What follows an encoded message: the vote, and the message's length without its padding.


@dataclass(slots=True)
class SyncVote:
    """What every rank says beside its values, summed over the group: the weight, who goes on, who found a NaN."""

    weight: float
    going_on: float = 0.0
    bad: float = 0.0
    bad_rank: float = 0.0
    rank: float = 0.0  # Whose vote it is, and what it had that cannot be encoded: these do not travel.
    complaint: Unencodable | None = None

    def tensor(self) -> Tensor:
        return torch.tensor([self.weight, self.going_on, self.bad, self.bad_rank], dtype=torch.float64)

    def pack(self, data: Tensor, message: Tensor | None) -> Tensor:
        """`data` with the vote behind it, in `message` if given, where the data may already lie."""
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
        """The bytes of sealed messages without their ballots, each one's weight, and the ballots' sum."""
        votes = torch.stack([m[-TRAILER_NBYTES:] for m in messages]).cpu().view(torch.float64)
        said = [m[: int(nbytes)] for m, nbytes in zip(messages, votes[:, 4].tolist(), strict=True)]
        return said, votes[:, 0].tolist(), SyncVote(*votes[:, :4].sum(0).tolist())

    def refuse(self, codec: Codec, x: Tensor, why: str) -> None:
        """Say that `x` is not finite, or cannot be encoded for `why`, and remember where the first such value is."""
        self.bad, self.bad_rank = 1.0, self.rank
        try:
            codec.refuse(x, why)
        except Unencodable as complaint:
            self.complaint = complaint

    def culprit(self) -> str:
        return f"rank {self.bad_rank:.0f}" if self.bad == 1 else f"{self.bad:.0f} ranks"


def packed_nbytes(nbytes: int) -> int:
    """The size of a message of so many encoded bytes: filled up to a multiple of 8, and sealed."""
    return -(-nbytes // 8) * 8 + TRAILER_NBYTES
