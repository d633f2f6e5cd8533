"""Needs: what a strategy needs from the driver that runs it.

A strategy declares its needs once, as data.  A driver says what it offers and calls `check`, which compares the two and
raises one kind of error.  No driver asks a strategy for its class or its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Length = Literal["steps", "steps_per_epoch", "samples", "batch"]
"""What a strategy may have to know about the run before it starts: the fields of `Plan`."""


@dataclass(frozen=True)
class Needs:
    """What a strategy needs.  The defaults are those of a synchronous method.

    >>> Needs().ordered, Needs(collectives=False, servers=True).elastic
    (True, True)
    """

    collectives: bool = True  # All workers take part from the first step to the last.
    servers: bool = False  # Parameter shards hold the model, or a part of the method's state.
    messages: bool = False  # Workers send messages to each other.
    shared_memory: bool = False  # All workers run on one host and map the same memory.
    optimizer: bool = True  # Workers step by their own optimizer; otherwise a server's rule takes the steps.
    global_data: bool = False  # Any worker can read any part of any minibatch; a user's own loop cannot do that.
    length: Sequence[Length] = ()  # What must be known about the run before it starts.

    @property
    def elastic(self) -> bool:
        """Workers may join, leave and die: no collective waits for them."""
        return not self.collectives

    @property
    def ordered(self) -> bool:
        """The result does not depend on timing, so a run can be stopped, saved, resumed and split into stages."""
        return self.collectives and not (self.servers or self.messages or self.shared_memory)

    def followed_by(self, then: Needs) -> Needs:
        """The needs of a method that starts with these and continues with `then`; workers meet in a collective between."""
        return Needs(
            collectives=True,
            servers=self.servers or then.servers,
            messages=self.messages or then.messages,
            shared_memory=self.shared_memory or then.shared_memory,
            optimizer=self.optimizer or then.optimizer,
            global_data=self.global_data or then.global_data,
            length=tuple(dict.fromkeys([*self.length, *then.length])),
        )
