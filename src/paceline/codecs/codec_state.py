"""CodecState: the interface of a codec with the state of one sender."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.codecs.codec import Codec


class CodecState(Protocol):
    """A codec with the state of one sender.  A slice shares the state, for a part of the vector."""

    codec: Codec

    def __getitem__(self, where: slice) -> CodecState: ...

    def owned(self, where: slice) -> CodecState:
        """The second level of `mean_by_stripes`: the state for sending the mean of the stripe that this rank owns."""
        ...

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The bytes to send for `x`, in `out` if given; updates the state."""
        ...

    def encode_zero(self, numel: int, device: torch.device) -> Tensor:
        """A message of zeros, from a sender whose values do not count; leaves the state as it is."""
        ...

    def undo(self, x: Tensor, data: Tensor) -> None:
        """Restore the state, up to rounding, from before `encode(x)` gave `data`: the message was not used."""
        ...

    def undelivered(self, share: float) -> Tensor | None:
        """What this rank has still to deliver, as a sender and as an owner, in units of the mean; None: nothing.

        A residual without a unit counts for this share.
        """
        ...

    def weigh(self, weight: float) -> None:
        """Bring what is kept to the weight that the receiver gives to the next message, which is above 0."""
        ...

    def is_settled(self, share: float) -> bool:
        """Whether `settle` with this share would change nothing."""
        ...

    def settle(self, x: Tensor, data: Tensor, share: float) -> None:
        """Keep what a mean did not deliver, in which `data`, the message for `x`, had this share of the weights.

        With share 0 the sender had no values, and `data` is a message of zeros.
        """
        ...

    def add(self, data: Tensor, into: Tensor, weight: float = 1.0, *, fresh: bool = False) -> None:
        """Add the decoded bytes, times `weight`, to `into`; overwrite it if `fresh`."""
        ...
