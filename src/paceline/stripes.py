"""Stripes: the parts of a vector that several owners hold."""

from __future__ import annotations


def stripe_of(index: int, numel: int, stripes: int, unit: int = 1) -> slice:
    """The part of a vector that owner `index` of `stripes` owners holds: whole units, the first owners one more.

    >>> [stripe_of(i, 10, 4) for i in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None), slice(8, 10, None)]
    """
    units = -(-numel // unit)
    each, more = divmod(units, stripes)
    start = index * each + min(index, more)
    stop = start + each + (index < more)
    return slice(min(start * unit, numel), min(stop * unit, numel))
