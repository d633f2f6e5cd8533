"""The parameter server: shards that hold slices of a model, rules that update them, gates that say when, and the store
that workers see."""

from paceline.server.gates import GATES, Bound, Free, Gate, RoundRobin, Turns
from paceline.server.rules import (
    RULES,
    Adagrad,
    Adam,
    Attract,
    Compensated,
    Every,
    Momentum,
    Push,
    Quorum,
    Rule,
    Scaled,
    Sgd,
)
from paceline.server.shard import Shard
from paceline.server.store import Store
from paceline.server.work_queue import WorkItem, WorkQueue

__all__ = [
    "GATES",
    "RULES",
    "Adagrad",
    "Adam",
    "Attract",
    "Bound",
    "Compensated",
    "Every",
    "Free",
    "Gate",
    "Momentum",
    "Push",
    "Quorum",
    "RoundRobin",
    "Rule",
    "Scaled",
    "Sgd",
    "Shard",
    "Store",
    "Turns",
    "WorkItem",
    "WorkQueue",
]
