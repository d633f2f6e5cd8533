"""RandomNumbers: where a worker's random numbers stand, for dropout and the like.

A worker has its own; while all workers do the same work, as in a warm start, they share theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.state import Resize, StateStore, resize_rule


class RandomNumbers:
    """The state of torch's generator, which this process uses for other things too."""

    def __init__(self, seed: int, rank: int, workers: int, stage: int) -> None:
        self._now = _seeded((seed + 1) * 1_000_003 + stage * workers + rank)
        self._others = _seeded((seed + 1) * 1_000_003 - 1 - stage)  # Shared ones, while `_now` are this worker's own.

    def swap(self) -> None:
        """Change from a worker's own ones to those that all share, or back."""
        self._now, self._others = self._others, self._now

    @contextmanager
    def used(self) -> Generator[None]:
        """In this block torch draws these."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self._now)
        try:
            yield
        finally:
            self._now = torch.get_rng_state()
            torch.set_rng_state(outside)

    def bind_state(self, states: StateStore) -> None:
        states.bind("random numbers", rule=resize_random_numbers, save=self._save, load=self._load)

    def _save(self) -> dict[str, Any]:
        return {"own": self._now.clone(), "shared": self._others.clone()}

    def _load(self, values: dict[str, Any]) -> None:
        self._now = values["own"]
        self._others = values["shared"]


def _seeded(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


@resize_rule("random numbers", sees_all=True)
def resize_random_numbers(values: Sequence[dict[str, Any]], resize: Resize) -> Sequence[dict[str, Any]]:
    """A worker that stays continues its random numbers; one that joins starts new ones."""
    new: list[dict[str, Any]] = []
    for rank in range(resize.count):
        kept = copy.deepcopy(values[min(rank, len(values) - 1)])
        if rank >= len(values):
            kept["own"] = _seeded((resize.step + 1) * 1_000_003 + rank)
        new.append(kept)
    return new
