"""Wrapper: a codec around another codec, with the other's reduction, feedback and unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.codecs.codec import Codec, check_one_to_one


class Wrapper(Codec):
    """A base for dataclasses with a field `codec`, the inner codec."""

    codec: Codec

    def __post_init__(self) -> None:
        check_one_to_one(self, self.codec)

    @property
    def feedback(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.codec.feedback

    @property
    def is_random(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.codec.is_random

    @property
    def is_coarse(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.codec.is_coarse

    @property
    def has_momentum(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.codec.has_momentum

    @property
    def reduction(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        # What a wrapper makes of 16-bit floats cannot be summed.
        return "stripes" if self.codec.reduction == "sum" else self.codec.reduction

    @property
    def unit(self) -> int:
        return self.codec.unit

    def check_optimizer(self, groups: Iterable[Mapping[str, Any]], *, kind: str = "optimizer") -> None:
        self.codec.check_optimizer(groups, kind=kind)
