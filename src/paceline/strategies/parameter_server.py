"""Asynchronous SGD on a sharded parameter server: workers push gradients and pull parameters.

Each shard holds one slice of the model and applies what arrives, in order of arrival, by its rule; its gate says who may go on.  With
one worker it equals that rule run on one machine.  The named methods of this family are combinations of the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.families.server_strategy import ServerStrategy
from paceline.server.gates import Free, Gate
from paceline.server.rules import Rule, Sgd


@dataclass(frozen=True)
class ParameterServer(ServerStrategy):
    """Push every gradient to the shards, go on from what they hold: no worker waits for another, unless the gate says so."""

    rule: Rule = Sgd()  # noqa: RUF009 (frozen)
    gate: Gate = Free()  # noqa: RUF009 (frozen)

    def shard_rule(self, workers: int) -> Rule:
        return self.rule

    def shard_gate(self) -> Gate:
        return self.gate
