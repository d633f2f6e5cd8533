"""Means and sums over a group of ranks."""

from paceline.collectives.low_rank import mean_by_factors
from paceline.collectives.means import (
    Groups,
    barrier,
    groups_of,
    is_single,
    mean,
    mean_by_gather,
    mean_by_groups,
    mean_by_stripes,
    mean_encoded,
    ring_sum,
    sum_by_groups,
)
from paceline.collectives.reductions import REDUCTIONS, reduction
from paceline.collectives.summed import mean_by_sum
from paceline.collectives.vote import TRAILER_NBYTES, VOTE_NBYTES, SyncVote, packed_nbytes, retried

__all__ = [
    "REDUCTIONS",
    "TRAILER_NBYTES",
    "VOTE_NBYTES",
    "Groups",
    "SyncVote",
    "barrier",
    "groups_of",
    "is_single",
    "mean",
    "mean_by_factors",
    "mean_by_gather",
    "mean_by_groups",
    "mean_by_stripes",
    "mean_by_sum",
    "mean_encoded",
    "packed_nbytes",
    "reduction",
    "retried",
    "ring_sum",
    "sum_by_groups",
]
