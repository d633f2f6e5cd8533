"""Failures of the cluster.  Mistakes of the caller are ValueErrors; our own mistakes are AssertionErrors."""

from __future__ import annotations


class ClusterError(RuntimeError):
    """A failure outside this process: a peer died, disagreed, or did not answer in time."""


class DifferentCollectives(ClusterError):
    """Two ranks have started different collectives: their programs have diverged."""


class ExchangeFailed(ClusterError):
    """A collective failed, or a peer did not take part in it in time."""


class PeerLost(ClusterError):
    """A peer's process is dead."""

    def __init__(self, rank: int, doing: str) -> None:
        super().__init__(f"rank {rank} is gone (its connection closed) during '{doing}'")
        self.rank = rank
