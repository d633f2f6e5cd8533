"""Checkpoints: where a run saves its state, how often, and what becomes of old ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol, runtime_checkable

from paceline.checked import check_settings
from paceline.training.length import UNITS, Length
from paceline.units import seconds


@runtime_checkable
class HasState(Protocol):
    """A scheduler, a scaler, or any other object whose state is saved with the run's."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(frozen=True)
class Checkpoints:
    """Save all that a run remembers to `folder`, and continue from the newest checkpoint there when it starts again.

    `every` is a time, such as "10min", or a length, such as "500 steps", "100_000 samples" or "1 epoch".  The last
    `keep` checkpoints stay (None: all).  With `resume=False` a folder that has checkpoints is refused.  On SIGTERM the
    run is saved at the next step and ends, unless `sigterm` is False.  `also` are objects of the user's own loop whose
    states belong to it, by name: `{"scheduler": scheduler}`.

    >>> Checkpoints("run-1", every="90s").seconds, Checkpoints("run-1", every="2 epochs").length
    (90.0, Length(value=2.0, unit='epochs'))
    """

    folder: str | os.PathLike[str]
    every: str | float = "10min"
    keep: int | None = 2
    resume: bool = True
    sigterm: bool = True
    also: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)

    def __post_init__(self) -> None:
        check_settings(self)
        if not os.fspath(self.folder):
            raise ValueError("Checkpoints(folder=''): give the name of a folder")
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"Checkpoints(keep={self.keep}): keep at least 1 checkpoint, or None to keep all")
        if self.length is None and not 0 < self.seconds < inf:
            raise ValueError(f"Checkpoints(every={self.every!r}): the time between checkpoints must be above 0")
        if self.length is not None and self.length.value <= 0:
            raise ValueError(f"Checkpoints(every={self.every!r}): the length between checkpoints must be above 0")
        for name, value in self.also.items():
            if not isinstance(value, HasState) or isinstance(value, type):
                raise ValueError(
                    f"Checkpoints(also={{{name!r}: {type(value).__name__}}}): give an object with state_dict() and "
                    "load_state_dict(), such as a scheduler or a GradScaler"
                )

    @property
    def length(self) -> Length | None:
        """The steps, samples or epochs between checkpoints; None if `every` is a time."""
        words = self.every.split() if isinstance(self.every, str) else ()
        has_unit = len(words) == 2 and words[1] in UNITS
        return Length.of("Checkpoints.every", self.every) if has_unit else None

    @property
    def seconds(self) -> float:
        """The time between checkpoints; infinite if `every` is a length."""
        if self.length is not None:
            return inf
        try:
            return seconds(self.every)
        except ValueError:
            raise ValueError(
                f"Checkpoints(every={self.every!r}): give a time, such as '10min', or a length in steps, samples or "
                "epochs, such as '500 steps'"
            ) from None
