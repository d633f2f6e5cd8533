"""The parameter server: shards that hold slices of a model, rules that update them, and the store that workers see."""

from paceline.server.rules import RULES, Rule, Sgd
from paceline.server.shard import Shard
from paceline.server.store import Store

__all__ = ["RULES", "Rule", "Sgd", "Shard", "Store"]
