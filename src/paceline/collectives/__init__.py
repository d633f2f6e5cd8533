"""Means and sums over a group of ranks."""

from paceline.collectives.means import (
    Groups,
    barrier,
    groups_of,
    mean,
    mean_by_gather,
    mean_by_groups,
    mean_by_stripes,
    mean_encoded,
    ring_sum,
    sum_by_groups,
)
from paceline.collectives.vote import TRAILER_NBYTES, VOTE_NBYTES, SyncVote, packed_nbytes

__all__ = [
    "TRAILER_NBYTES",
    "VOTE_NBYTES",
    "Groups",
    "SyncVote",
    "barrier",
    "groups_of",
    "mean",
    "mean_by_gather",
    "mean_by_groups",
    "mean_by_stripes",
    "mean_encoded",
    "packed_nbytes",
    "ring_sum",
    "sum_by_groups",
]
