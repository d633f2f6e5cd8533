"""Quantities as text: "10Gbit/s", "50us"."""

from __future__ import annotations

import re

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
# Units in a second, because a division makes 50us exactly 5e-05.
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9, "min": 1 / 60, "h": 1 / 3600}


def seconds(text: str | float) -> float:
    """A duration in seconds.

    >>> seconds("50us"), seconds(0.25)
    (5e-05, 0.25)
    """
    if isinstance(text, (int, float)):
        return float(text)
    found = re.fullmatch(r"\s*(\d+\.?\d*(?:e-?\d+)?)\s*([a-zµ]+)\s*", text)
    if not found or found[2] not in _PER_SECOND:
        raise ValueError(
            f"{text!r} is not a duration: write a number and one of {', '.join(_PER_SECOND)}, as in '50us'"
        )
    return float(found[1]) / _PER_SECOND[found[2]]


def bytes_per_second(text: str | float) -> float:
    """A bandwidth in bytes a second.  The text says 'bit' for bits and 'B' for bytes.

    >>> bytes_per_second("10Gbit/s"), bytes_per_second("100MB/s")
    (1250000000.0, 100000000.0)
    """
    if isinstance(text, (int, float)):
        return float(text)
    found = re.fullmatch(r"\s*(\d+\.?\d*(?:e\d+)?)\s*([kKMGT]?)(bit|B)/s\s*", text)
    if not found:
        raise ValueError(
            f"{text!r} is not a bandwidth: write a number and kbit/s, Mbit/s, Gbit/s, MB/s or GB/s, as in '10Gbit/s'"
        )
    return float(found[1]) * _PREFIX[found[2]] / (8 if found[3] == "bit" else 1)
