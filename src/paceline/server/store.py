"""Store: a worker's view of all shards: one vector to pull from and push to, and the work items that they give out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.codec import Codec
from paceline.op import Op
from paceline.protocol.messages import Request
from paceline.server.accumulator import Accumulator
from paceline.server.messages import Arrived, Bye, Exchange, Join, Leave, Pull, Push, Update, Value
from paceline.server.shard_client import ShardClient
from paceline.server.work_source import WorkSource
from paceline.server.worker_saves import WorkerSaves
from paceline.stripes import stripe_of
from paceline.trace import Staleness
from paceline.worker.replica import Replica
from paceline.worker.rows import positions, within


class Store:
    """A worker's view of the parameter server.

    Shards act independently: at one moment they may have seen different numbers of updates.  So `versions` has one
    entry for each shard, and every push names the version of that shard from which it was computed.  `codec` encodes
    the updates, with error feedback; the shards encode by `pulls` what has changed since the last pull.

    `unpushed` counts the steps and samples since the last push, for a strategy that does not push at every step: it
    calls `count_step` after each step, and pushes with `unpushed.take()` samples.

    Where the shards' rules take the steps, `is_scheduled`: each push carries the factor that the worker's schedule puts
    on the learning rate.  Steps of the worker's own optimizer contain it already.

    A worker that was declared dead has lost its work items, and with them what it has learnt since its last push: it
    calls `forget` before its next minibatch, and a push until then is sent without samples, so that no shard applies
    it.

    Where the first shard keeps a lock, `is_locked`: a worker turns to the first shard before the others when it takes
    the lock, and after them when it releases it.

    What the codec has left out of an update is added to the next one.  Where the shards' rule weighs updates by their
    samples, `weighs_samples`, it still counts for the samples of the update that it was left out of.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        codec: Codec | None = None,
        pulls: Codec | None = None,
        is_scheduled: bool = False,
        weighs_samples: bool = False,
        is_locked: bool = False,
    ) -> None:
        self.replica = replica
        self.is_scheduled = is_scheduled
        self.weighs_samples = weighs_samples
        self.is_locked = is_locked
        self.endpoint = replica.endpoint
        self.shards = list(self.endpoint.layout.server_ranks)
        unit = 1 if codec is None else codec.unit
        self.slices = _slices(replica, len(self.shards), unit)
        self.versions = [0] * len(self.shards)
        self.unpushed = Accumulator()
        self._value: Tensor | None = None
        # Shards hold vectors, not tensors.
        self._codec_state = replica.codec_state(codec, knows_tensors=False, is_stepped_here=not is_scheduled)
        self._pulls = pulls
        self.forget: Callable[[], object] = lambda: None  # The strategy drops what it has learnt since its last push.
        self._has_lost_work = False
        self._client = ShardClient(replica, self.slices)
        self._client.drop_work = self._drop_work
        self._work = WorkSource(replica, self._client)
        self.saves = WorkerSaves(replica, self._client, self._work, self.unpushed, self.versions, unit=unit)

    @property
    def value(self) -> Tensor:
        """The last answer of the shards, unless the worker asked for it `into` another vector."""
        if self._value is None:
            self._value = self.replica.params.clone()
        return self._value

    def unsent(self) -> Tensor | None:
        """What the codec has left out of this worker's updates, times their weight; None if it keeps nothing."""
        return None if self._codec_state is None else self._codec_state.undelivered(1.0)

    def pull(self, into: Tensor | None = None) -> Op[Tensor]:
        """The current parameters of the shards; in `value`, or copied `into` another vector."""
        return self.endpoint.spawn(self._pull(into), kind="pull")

    def push(
        self,
        update: Tensor,
        samples: float | None = None,
        *,
        runs: Tensor | None = None,
        rate: float | None = None,
        steps: int | None = None,
    ) -> Op[None]:
        """Send an update to the shards, and do not pull the result.

        `samples` is the number of samples in it; if it is not given, that of the last minibatch.  With `runs` only
        these parts of the update are sent.  `rate` is the factor on the rule's learning rate; if it is not given, that
        of the current minibatch.  `steps` counts the minibatches that are done with it; if it is not given, all that
        were begun.
        """
        return self.endpoint.spawn(self._push(update, samples, runs, rate, steps), kind="push")

    async def _push(
        self, update: Tensor, samples: float | None, runs: Tensor | None, rate: float | None, steps: int | None
    ) -> None:
        pushes = self._updates(Push, update, samples, runs, rate, steps)
        await push_all(self._client, dict(zip(self.shards, pushes, strict=True)), is_locked=self.is_locked)

    def exchange(
        self,
        update: Tensor,
        samples: float | None = None,
        *,
        into: Tensor | None = None,
        runs: Tensor | None = None,
        rate: float | None = None,
    ) -> Op[Tensor]:
        """Push an update and pull the parameters that result from it, in one round trip.

        With `runs` only these parts of the update are sent, and the shards answer only with what has changed since this
        worker's last pull.
        """
        return self.endpoint.spawn(self._exchange(update, samples, into, runs, rate), kind="exchange")

    async def _exchange(
        self, update: Tensor, samples: float | None, into: Tensor | None, runs: Tensor | None, rate: float | None
    ) -> Tensor:
        exchanges = self._updates(Exchange, update, samples, runs, rate)
        return await self._ask(await unlocked(self._client, exchanges) if self.is_locked else exchanges, into)

    async def _pull(self, into: Tensor | None) -> Tensor:
        if self._client.has_joined or self.endpoint.rank in self.endpoint.layout.worker_ranks:
            return await self._ask(self._client.numbered([Pull() for _ in self.shards]), into)
        return await self._ask(self._client.numbered([Join(self.replica.cursor.shard or 0) for _ in self.shards]), into)

    def send_buffer(self, last: Tensor | None = None) -> Tensor:
        """Slot for an update, from which shards on this host read without a copy: the `last` one, unless it is still
        being read."""
        if last is not None and not self.endpoint.in_use(last):
            return last
        return self.endpoint.send_buffer(self.replica.params)

    async def leave(self, into: Tensor | None = None) -> Tensor:
        """Leave the run; the final parameters of the shards, once all workers have left."""
        self.replica.cursor.end()
        self.saves.is_early = False  # The final value is on its way.
        all_done = self.replica.learner.has_global_data
        self.is_locked = False  # A worker that leaves takes no lock, and all shards should know at once.
        where = self.replica.cursor.place_of("end")
        leaves = self._client.numbered([Leave(all_done, self.saves.member, where) for _ in self.shards])
        value = await self._ask(leaves, into)
        self.saves.end()
        for rank in self.shards:
            await self.endpoint.send(rank, Bye())
        return value

    # Work.

    async def next(self, before_waiting: Callable[[], Awaitable[None]] | None = None) -> bool:
        """Turn to the next minibatch; False if all work is done.

        If other workers hold the last work items, this worker waits, and takes their items over if one of them dies.
        What it has not pushed by then it must push in `before_waiting`.
        """
        self._forget_lost()
        has_work = await self._work.next(before_waiting)
        self._forget_lost()
        return has_work

    def count_step(self) -> None:
        """Count the last minibatch as a step that is not pushed yet."""
        self.unpushed.add(self.replica.batch.samples, self._rate())
        self._has_lost_work |= self._work.has_lost_item
        self._forget_lost()

    def _drop_work(self) -> None:
        """This worker was declared dead: others do its work.  A step of it may be running."""
        self._work.drop()
        self._has_lost_work = True

    def _forget_lost(self) -> None:
        if self._has_lost_work:
            self._has_lost_work = False
            self.unpushed.take()
            self.forget()

    # Messages.

    def _updates(
        self,
        of: type[Push | Exchange],
        update: Tensor,
        samples: float | None,
        runs: Tensor | None,
        rate: float | None,
        steps: int | None = None,
    ) -> list[Update]:
        """The message for each shard."""
        seen = int(self.replica.batch.samples if samples is None else samples)
        if self._has_lost_work:
            self._has_lost_work = False
            seen = 0
        steps, had = self._work.take_steps(steps)
        factor = self._rate() if rate is None else rate
        updates: list[Update] = []
        for j, (where, version) in enumerate(zip(self.slices, self.versions, strict=True)):
            is_there = bool(had >> j & 1)
            new = 0 if is_there else seen
            data, mine = self._encoded(update, where, runs, new)
            updates.append(of(data, version, new, steps, mine, factor, self.saves.number, self._work.done, is_there))
        return self._client.numbered(updates)

    def _rate(self) -> float:
        return self.replica.cursor.rate if self.is_scheduled else 1.0

    def _encoded(self, update: Tensor, where: slice, runs: Tensor | None, samples: int) -> tuple[Tensor, Tensor | None]:
        """A shard's part of an update, and with `runs` the positions of its values."""
        if runs is not None:
            mine = within(runs, where)
            return update[where][positions(mine)], mine
        if self._codec_state is None:
            return update[where], None
        state = self._codec_state[where]
        if not samples:  # Shards do not apply it, so it must not take the residual with it.
            return state.encode_zero(where.stop - where.start, update.device), None
        if self.weighs_samples:
            state.weigh(samples)
        return state.encode(update[where]), None

    async def _ask(self, requests: Sequence[Request], into: Tensor | None) -> Tensor:
        by_shard = dict(zip(self.shards, requests, strict=True))
        together = self.shards[:1] if self.is_locked else self.shards
        for j, (rank, where) in enumerate(zip(self.shards, self.slices, strict=True)):
            if j in (0, len(together)):
                await self._client.send({r: by_shard[r] for r in (self.shards[j:] if j else together)})
            answer = await self._client.answer(rank, requests[j], (Value,))
            assert isinstance(answer, Value)
            if isinstance(requests[j], Join):
                self.saves.join(answer.saves)
                if j == 0 and answer.steps_done:
                    self.replica.cursor.resume_at(answer.steps_done)
            self._take(answer, j, where, into)
            del answer  # It may lie in the shard's own memory, which this worker must release.
        return self.value if into is None else into

    def _take(self, answer: Value, shard: int, where: slice, into: Tensor | None) -> None:
        """Copy a shard's answer: all its values, or those that have changed."""
        values, target = answer.value, (self.value if into is None else into)[where]
        if answer.runs is not None:
            target[positions(answer.runs)] = values
        elif self._pulls is not None:  # An encoded answer is the difference to the answer before, which is in `value`.
            if values.dtype == torch.uint8:
                kernels.add(self._pulls, values, self.value[where], 1.0, False)
            else:
                self.value[where] = values
            if into is not None:
                target.copy_(self.value[where])
        else:
            target.copy_(values)
        self.versions[shard] = answer.version
        self.saves.note(answer.saves)
        self.saves.is_early |= answer.is_early
        if answer.updates:
            self.endpoint.trace.servers_staleness[self.shards[shard]] = Staleness(answer.stale, answer.updates)


def _slices(replica: Replica, shards: int, unit: int) -> list[slice]:
    """The part of the parameters that each shard holds."""
    numel = replica.params.numel()
    if shards > numel:
        raise ValueError(
            f"{replica.learner.flat.method}(servers={shards}) for {numel} parameters: there must be at least one "
            "parameter for each server; give fewer servers"
        )
    return [stripe_of(j, numel, shards, unit=unit) for j in range(shards)]


async def push_all(client: ShardClient, pushes: Mapping[int, Request], *, is_locked: bool) -> None:
    """Push to all shards, until the pushes have arrived; to the one that keeps the lock after the others."""
    first = list(pushes)[:1] if is_locked else []
    for ranks in ([rank for rank in pushes if rank not in first], first):
        await client.send({rank: pushes[rank] for rank in ranks})
        for rank in ranks:
            await client.answer(rank, pushes[rank], (Arrived,))


async def unlocked(client: ShardClient, exchanges: Sequence[Update]) -> list[Request]:
    """Push to the shards without the lock; what is then to be asked of all, the one with the lock first."""
    first, *others = exchanges
    if not others:
        return [first]
    pushes = client.numbered([_as_push(exchange) for exchange in others])
    await push_all(client, dict(zip(client.shards[1:], pushes, strict=True)), is_locked=False)
    return [first, *client.numbered([Pull() for _ in others])]


def _as_push(x: Update) -> Push:
    return Push(x.update, x.version, x.samples, x.steps, x.runs, x.rate, x.saves, x.done, x.had)
