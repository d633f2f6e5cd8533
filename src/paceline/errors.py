"""The world's failures, as opposed to the caller's (those are ValueErrors) and our own (those are assertions)."""

from __future__ import annotations


class ClusterError(RuntimeError):
    """Something outside this process went wrong: a peer died, disagreed, or did not answer in time."""


class PeerLost(ClusterError):
    """A peer's process is gone."""

    def __init__(self, rank: int, doing: str) -> None:
        super().__init__(f"rank {rank} is gone (its connection closed) during '{doing}'")
        self.rank = rank
