"""Shares: how much of a mean each value of a sender's residual stands for.

A mean weights the message of a worker by its share of all samples, and shares change: the last minibatch of an epoch is
smaller, a worker has no data left.  So a residual r alone does not say what is still to be delivered.  With its unit u
it does: u * r, in units of the mean.  A unit is the share of an earlier mean, or a little less; see `settled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

Piece = list[float]
"""The first index of a part of the vector, the index after its last, and the unit of its residual: plain data."""

# A unit follows a smaller share by at most this factor a mean.  If it followed at once, a worker that has 1 sample for
# once would divide its residual by that share, and its next full minibatch would send the quotient as a huge gradient.
FALL = 0.9


class Shares:
    """The unit of each value of a residual, constant by parts.

    A part that is not listed has no unit yet: its residual counts for the worker's share of the next mean, whatever
    that is.

    >>> shares = Shares([])
    >>> shares.put(0, 6, 0.5)
    >>> shares.put(4, 8, 0.25)
    >>> shares.over(2, 9)
    [(2, 4, 0.5), (4, 8, 0.25), (8, 9, None)]
    >>> shares.pieces
    [[0, 4, 0.5], [4, 8, 0.25]]
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces  # The list itself is in a checkpoint's slot, so it is changed in place.

    def over(self, start: int, stop: int) -> list[tuple[int, int, float | None]]:
        """The parts of `start` to `stop`, each with its unit or None."""
        parts: list[tuple[int, int, float | None]] = []
        at = start
        for first, last, unit in self.pieces:
            a = max(int(first), start)
            b = min(int(last), stop)
            if a < b:
                if at < a:
                    parts.append((at, a, None))
                parts.append((a, b, unit))
                at = b
        if at < stop:
            parts.append((at, stop, None))
        return parts

    def put(self, start: int, stop: int, unit: float) -> None:
        """Set the unit of the values from `start` to `stop`."""
        if start >= stop:
            return
        kept: list[Piece] = [[start, stop, unit]]
        for first, last, other in self.pieces:
            kept += [[a, b, other] for a, b in ((first, min(last, start)), (max(first, stop), last)) if a < b]
        self.pieces[:] = _joined(sorted(kept))


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """With adjacent parts of one unit made one."""
    joined: list[Piece] = []
    for start, stop, unit in pieces:
        if joined and joined[-1][1] == start and joined[-1][2] == unit:
            joined[-1][1] = stop
        else:
            joined.append([start, stop, unit])
    return joined


def followed(unit: float | None, share: float) -> float:
    """The unit after a mean with this share, which is not 0."""
    return share if unit is None else max(share, FALL * unit)


def settled(after: Tensor, before: Tensor, unit: float, share: float) -> float:
    """Turn `after` into what a mean with this share has not delivered; the result's unit.

    The sender encoded x + `before`, and `after` is what its message left out of that.  Of `share * x + unit * before`
    the mean delivered `share * (x + before - after)`, so `share * after + (unit - share) * before` is left.

    >>> residual = torch.tensor([3.0])
    >>> settled(residual, before=torch.tensor([8.0]), unit=0.25, share=0.5), residual
    (0.5, tensor([-1.]))
    """
    new = followed(unit, share)
    after.mul_(share / new).add_(before, alpha=(unit - share) / new)
    return new


def undelivered(residuals: Sequence[Tensor], pieces: Sequence[list[Piece]]) -> Tensor:
    """What all senders together still have to deliver, in units of the mean; in double precision.

    In a part in which no sender has a unit, no mean has settled the residuals yet, and each counts for an equal share.
    Where some have a unit, the others did not take part in a mean, and their residuals are not used.
    """
    total = torch.zeros_like(residuals[0], dtype=torch.float64)
    numel = total.numel()
    ends = {0, numel, *(int(end) for own in pieces for piece in own for end in piece[:2])}
    for start, stop in pairwise(sorted(ends)):
        units = [Shares(own).over(start, stop)[0][2] for own in pieces]
        known = [unit for unit in units if unit is not None]
        for residual, unit in zip(residuals, units, strict=True):
            share = 1 / len(residuals) if not known else unit
            if share:
                total[start:stop].add_(residual[start:stop].to(total), alpha=share)
    return total
