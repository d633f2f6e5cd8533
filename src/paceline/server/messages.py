"""Messages between workers and servers: of a parameter server, and of a batch method with its coordinator.

Lists of integers that travel are int64 tensors, so that traces count their bytes.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from torch import Tensor

from paceline.protocol.messages import Count, Message, Number, Rank, Rate, Reply, Request, Text, Version

# Of workers to shards.


class Start(Message):
    """The first value of a shard.  Worker 0 sends it unasked, another worker if it is asked to `Bring` it."""

    value: Tensor


class Pull(Request):
    """Wants the value."""


class Update(Request):
    """An update, computed from `version` of the shard, from this number of samples and steps.

    With `runs` it is for some values only, and the reply has only the values that have changed since `version`.  `rate`
    is the factor on the learning rate that the sender's schedule gives for these steps.  The sender has passed so many
    save points, `saves`.  `done` counts the work items that its sender was leased and has done, from the first one of
    this incarnation to the last one of this update.  If the receiver `had` the item of this update already, it comes
    without samples.
    """

    update: Tensor
    version: Version = 0
    samples: Count = 0
    steps: Count = 0
    runs: Tensor | None = None
    rate: Rate = 1.0
    saves: Version = 0
    done: Version = 0
    had: bool = False


class Push(Update):
    """Does not want the value; the reply says that the update has arrived."""


class Exchange(Update):
    """Wants the value as it is after the update."""


class Probe(Request):
    """Asks whether an update, with the number of this request, has arrived."""


class ProbePush(Probe):
    """The update was a `Push`."""


class ProbeExchange(Probe):
    """The update was an `Exchange`: its reply may have been lost, and is wanted again."""


class Join(Request):
    """A new worker, which works on a data shard, wants the value."""

    data_shard: Count


class Idle(Request):
    """A worker has nothing to do for now: no worker is to wait for it."""


class Wake(Request):
    """A worker has something to do again, or begins another incarnation."""


class Leave(Request):
    """A worker has finished, perhaps because all work is done; it wants the final value once all workers have left.

    It has the data shard `member`.  `where` is the part of the job's store in which all agree on the last checkpoint;
    empty if there is none.
    """

    all_done: bool = False
    member: Count = 0
    where: Text = ""


class Bye(Message):
    """A worker has the final value."""


class DrawWork(Request):
    """Wants this number of work items, `now` or in advance.  `extent` is the first step, the step after the last, and
    the parts of a step."""

    extent: Tensor
    wanted: Annotated[int, Meta(ge=1, le=2**31)]
    now: bool = False


class DrawNow(Request):
    """Wants now the work that the `DrawWork` of this number wanted in advance."""


class AskToSave(Message):
    """The run is to be saved at the save point of that number.  The first worker there tells the shards, and these tell
    the other workers."""

    number: Number


class SavePoint(Request):
    """The sender stands at the save point of that number: none of its requests is open, and it sends no update before
    the reply.  It has the data shard `member`.  `where` is the part of the job's store in which all agree on it."""

    number: Number
    member: Count = 0
    where: Text = ""


class Restore(Request):
    """A worker of a resumed run: the shard continues from the checkpoint at `path`, in which vectors are cut at
    multiples of `unit`.  Of its leased items the worker has done the first `steps`, and not pushed them yet.  With data
    of its own it has pushed the steps before `position`."""

    path: Text
    steps: Count = 0
    position: Version = 0
    unit: Annotated[int, Meta(ge=1, le=2**31)] = 1


# Of shards to each other, or to the coordinator.


class WorkerLost(Message):
    """A worker is dead, or suspected to be, in this incarnation; the receiver may not have noticed."""

    worker: Rank
    incarnation: Count = 0


class HowFar(Message):
    """How many work items of a worker are in the receiver?  It answers once they are at least so many; or, if the
    worker `is_lost` in this incarnation, when it takes nothing of it any more."""

    worker: Rank
    incarnation: Count
    least: Version = 0
    is_lost: bool = False


class SoFar(Message):
    """So many work items of a worker are in the sender."""

    worker: Rank
    incarnation: Count
    done: Version = 0
    is_lost: bool = False


# Of shards to workers.


class Value(Reply):
    """The value, or with `runs` some values of it.  To a `Join`: how many steps were done of the data shard.

    The shard has applied so many `updates`; `stale` is the sum of their staleness.  The run is to be saved, or was
    saved last, at the save point `saves`.  If `is_early`, the worker would have to wait if the run were not saved now:
    it asks again afterwards.
    """

    value: Tensor
    version: Version = 0
    runs: Tensor | None = None
    steps_done: Version = 0
    updates: Version = 0
    stale: Version = 0
    saves: Version = 0
    is_early: bool = False


class Saved(Reply):
    """All workers were at the save point, and the shard has a copy of its state there; otherwise `why` not."""

    why: Text = ""


class Restored(Reply):
    """The shard holds the state of the checkpoint."""


class Arrived(Reply):
    """The update has arrived."""


class SendAgain(Reply):
    """The update has not arrived."""


class Work(Reply):
    """Work items: pairs of a step and a part of it.  `had`: for each, the shards that have it already, one a bit."""

    items: Tensor
    had: Tensor | None = None


class Deferred(Reply):
    """There is little work left: draw it once it is needed."""


class NoWork(Reply):
    """Other workers have the last work items.  If one of them dies, `Work` follows; otherwise `AllDone`."""


class AllDone(Reply):
    """All work is done."""


class Bring(Message):
    """The receiver is to bring the first value."""


class RunEnded(Message):
    """The run has ended; a worker that joins now has nothing to do."""


# Of workers to the coordinator of a batch method.


class Enlist(Request):
    """A worker wants an order.  `extent` is the first epoch, the one after the last, the minibatches of each and the
    parts of these."""

    extent: Tensor


class Brought(Request):
    """The shards have the first value."""


class Report(Request):
    """A portion was worked on: `which` is the pass and the portion."""

    which: Tensor


class Pushed(Request):
    """A sum is on all shards: `which` is the pass and the number of the sum.  Its loss and its samples."""

    which: Tensor
    loss: Tensor
    samples: Count = 0


class SignOff(Request):
    """The worker has the final value."""


# Of the coordinator to workers.


class Order(Reply):
    """The next order for a worker."""


class BringOrder(Order):
    """Bring the shards the first value."""


class PassOrder(Order):
    """An order within a pass; `numbers` begins with the pass, the worker's sum, and whether its last report counts."""

    numbers: Tensor

    @property
    def pass_number(self) -> int:
        return int(self.numbers[0])

    @property
    def sum_number(self) -> int:
        return int(self.numbers[1])

    @property
    def counts(self) -> bool:
        return bool(self.numbers[2])


class WorkOrder(PassOrder):
    """Work on a portion: the fourth number."""

    @property
    def portion(self) -> int:
        return int(self.numbers[3])


class PushOrder(PassOrder):
    """Push the sum to the shards."""


class OverOrder(Order):
    """All passes are done: take the final value from the shards."""


class SignedOff(Order):
    """The coordinator waits no longer for this worker."""


# Of workers, or the coordinator, to shards of vectors.


class SetValue(Request):
    """The first value of `w`."""

    value: Tensor


class GetValue(Request):
    """Wants `w`."""


class PushSum(Request):
    """A worker's sum, which counts once the coordinator says so."""

    total: Tensor
    pass_number: Count
    sum_number: Count


class RunProgram(Request):
    """Operations on vectors, one a line, as UTF-8 bytes."""

    program: Tensor


class End(Request):
    """The shard is not needed any longer."""


class Held(Reply):
    """The shard has the value or the sum."""


class Products(Reply):
    """The inner products that a program has asked for."""

    products: Tensor


class Ended(Reply):
    """The shard ends now."""
