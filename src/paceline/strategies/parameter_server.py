"""Asynchronous SGD on a sharded parameter server: workers push gradients and pull parameters.

Each shard holds one slice of the model.  Its rule applies updates in the order of their arrival; its gate decides when
a worker gets an answer.  With one worker it equals that rule on one machine.  Other server methods choose a rule and a
gate.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.families.server_strategy import ServerStrategy
from paceline.server.gates import Free, Gate
from paceline.server.rules import Rule, Sgd


@dataclass(frozen=True)
class ParameterServer(ServerStrategy):
    """Push every gradient to the shards and pull the new parameters; workers wait only if the gate says so."""

    rule: Rule = Sgd()  # noqa: RUF009 (frozen)
    gate: Gate = Free()  # noqa: RUF009 (frozen)

    def shard_rule(self, workers: int) -> Rule:
        return self.rule

    def shard_gate(self) -> Gate:
        return self.gate
