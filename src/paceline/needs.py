"""Needs: what a strategy needs from the driver that runs it.

A strategy declares its needs once, as data.  A driver says what it offers and calls `check`, which compares the two and
raises one kind of error.  No driver asks a strategy for its class or its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from paceline.strategy import Strategy
    from paceline.task import Task

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
    rests: bool = False  # Workers without a common order can bring all messages to rest, so that the run is saved.

    @property
    def elastic(self) -> bool:
        """Workers may join, leave and die: no collective waits for them."""
        return not self.collectives

    @property
    def ordered(self) -> bool:
        """The result does not depend on timing."""
        return self.collectives and not (self.servers or self.messages or self.shared_memory)

    @property
    def resumable(self) -> bool:
        """A run can be stopped, saved and resumed."""
        return self.ordered or self.rests

    @property
    def keeps_own_buffers(self) -> bool:
        """Each worker's buffers (BatchNorm's statistics) may be its own until the end, when the driver averages them.

        The other methods average them.
        """
        return self.elastic or self.servers or self.messages

    @property
    def splits(self) -> bool:
        """A replica can be several processes, one for each stage of its model: they exchange means with the same stage
        of other replicas, or updates with the shards of their stage."""
        return self.ordered or (self.servers and not (self.collectives or self.messages or self.shared_memory))

    def followed_by(self, then: Needs) -> Needs:
        """The needs of a method that starts with these and continues with `then`; a collective lies between the two."""
        return Needs(
            collectives=True,
            servers=self.servers or then.servers,
            messages=self.messages or then.messages,
            shared_memory=self.shared_memory or then.shared_memory,
            optimizer=self.optimizer or then.optimizer,
            global_data=self.global_data or then.global_data,
            length=tuple(dict.fromkeys([*self.length, *then.length])),
            rests=self.ordered and then.rests,
        )


@dataclass(frozen=True)
class Offers:
    """What a driver offers to a strategy.  The defaults are those of `train` and `simulate` with a Task."""

    call: str  # The name of the call, for the error text: "attach", "train", "simulate".
    data: str = "a loop of your own"  # Where the data comes from, for the error text.
    global_data: bool = True  # Any worker can read any part of any minibatch.
    optimizer: bool = True  # The caller gave an optimizer.
    length: Sequence[Length] = get_args(Length)  # What is known about the run before it starts.
    one_host: bool = True  # All workers run on one host.
    equal_start: bool = True  # All ranks build the same initial model.
    fixed_workers: bool = True  # No worker joins, leaves or dies, and no message is lost.
    unbroken: bool = True  # The run is neither stopped early nor resumed.
    controlled: bool = False  # The run decides something between epochs, at which all workers stand at one step.
    stages: int = 1  # The number of processes that hold one replica of the model.
    whole_tensors: bool = True  # A rank holds whole tensors, not parts of them (torch's DTensor).

    @classmethod
    def of_task(cls, call: str, task: Task) -> Offers:
        """What a driver offers that trains a Task."""
        known: list[Length] = [field for field in get_args(Length) if getattr(task.plan, field) is not None]
        is_global = not task.has_own_data
        return cls(
            call,
            data="a Task with data of each worker's own",
            global_data=is_global,
            length=known,
            controlled=task.is_controlled,
        )


class Unmet(NamedTuple):
    """A need that a driver does not meet."""

    need: str
    driver: str  # The part of the call that does not offer it.
    remedy: str


def check(strategy: Strategy, offers: Offers) -> None:
    """Raise ValueError if the strategy needs something that the driver does not offer.

    >>> from paceline.strategies import Sandblaster
    >>> check(Sandblaster(), Offers("train"))
    >>> check(Sandblaster(), Offers("attach", global_data=False))
    Traceback (most recent call last):
    ValueError: attach(Sandblaster): it needs global data (any worker can read any part of a minibatch), which \
a loop of your own does not offer; use train() or simulate() with a Task whose data the workers share out
    """
    for unmet in (*_unmet_by_driver(strategy.needs, offers), *_unmet_by_request(strategy.needs, offers)):
        raise ValueError(
            f"{offers.call}({type(strategy).__name__}): it needs {unmet.need}, which {unmet.driver} does not offer; "
            f"{unmet.remedy}"
        )


def _unmet_by_driver(needs: Needs, offers: Offers) -> Iterator[Unmet]:
    """What the strategy needs and the driver, or the place where it runs, does not have."""
    if needs.global_data and not offers.global_data:
        yield Unmet(
            "global data (any worker can read any part of a minibatch)",
            offers.data,
            "use train() or simulate() with a Task whose data the workers share out",
        )
    if needs.optimizer and not offers.optimizer:
        yield Unmet("an optimizer (its workers take their own steps)", "optimizer=None", "give the model's optimizer")
    missing = [field for field in needs.length if field not in offers.length]
    if missing:
        yield Unmet(
            f"the {' and '.join(field.replace('_', ' ') for field in missing)} of the run before it starts",
            "this call",
            "give loader=..., epochs=..., with a loader that has a length, a dataset and a batch_size",
        )
    if needs.shared_memory and not offers.one_host:
        yield Unmet(
            "shared memory (all workers on one host)",
            "a job on several hosts",
            "start all workers on one host, or use a method with servers, such as EAWild(servers=2) or ParameterServer",
        )


def _unmet_by_request(needs: Needs, offers: Offers) -> Iterator[Unmet]:
    """What the strategy needs and the caller asked to do without."""
    if needs.elastic and not (needs.servers or needs.shared_memory) and not offers.equal_start:
        yield Unmet(
            "the same initial parameters on every rank (it has no server that could send them)",
            "initial='broadcast'",
            "build the model after the same torch.manual_seed on every rank",
        )
    if not needs.elastic and not offers.fixed_workers:
        yield Unmet(
            "all workers and all messages in every step (its workers wait for each other)",
            "a run with faults",
            "use a method with servers or peers, such as ParameterServer or Gossip, or run it without faults",
        )
    if not needs.resumable and not offers.unbroken:
        yield Unmet(
            "a run without a stop (messages in flight are in no saved state)",
            "a run that is stopped or resumed",
            "use a synchronous method, such as AllReduceSGD or PeriodicAveraging",
        )
    if not needs.ordered and offers.controlled:
        yield Unmet(
            "a run in which nothing is decided (its workers never stand at the same step)",
            "a Task with AutoAdjust or AutoBatch",
            "use a synchronous method, such as AllReduceSGD or BlockMomentum, or a Schedule and a GrowingBatch",
        )
    if not needs.ordered and not offers.whole_tensors:
        yield Unmet(
            "whole tensors in each worker (its workers do not wait for each other)",
            "a model of DTensors",
            "use a synchronous method, such as AllReduceSGD or PeriodicAveraging",
        )
    if not needs.splits and offers.stages > 1:
        yield Unmet(
            "the whole model in each worker (its workers exchange messages with each other, share memory, or use "
            "both servers and collectives)",
            f"stages={offers.stages}",
            "use a method on servers such as Downpour or ParameterServer, AllReduceSGD or a method that averages, or "
            "stages=1",
        )
