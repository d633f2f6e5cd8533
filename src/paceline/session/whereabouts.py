"""Whereabouts: what each rank was doing when the ranks' loops had diverged, in the user's terms."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import Store

from paceline.errors import ClusterError, DifferentCollectives

PATIENCE = timedelta(seconds=5)  # All ranks find the difference at about the same time.


class Whereabouts:
    """Where this rank is in the user's loop, for the other ranks' errors."""

    def __init__(self, store: Store, rank: int, workers: int, where: Callable[[], str]) -> None:
        """`where` says at which step this rank is."""
        self._store = store
        self._rank = rank
        self._workers = workers
        self._where = where
        self.passes = 0  # Over session.shard.

    @contextmanager
    def during(self, doing: str) -> Generator[None]:
        """If the ranks turn out to run different exchanges in this block, the error says what each rank was doing."""
        try:
            yield
        except DifferentCollectives as error:
            raise ClusterError(f"{self._told(doing)}  ({error})") from error

    def _told(self, doing: str) -> str:
        self._store.set(
            f"whereabouts/{self._rank}", f"{doing}, {self._where()}, in pass {self.passes} over session.shard"
        )
        lines: list[str] = []
        for rank in range(self._workers):
            key = f"whereabouts/{rank}"
            with suppress(RuntimeError):
                self._store.wait([key], PATIENCE)
                lines.append(f"rank {rank} was {self._store.get(key).decode()}")
        return (
            f"the loops of the ranks have diverged: {'; '.join(lines)}.  Every rank must take the same steps and make "
            "the same passes over session.shard, also to evaluate; a rank may leave its loop early only to leave the "
            "`with` block."
        )
