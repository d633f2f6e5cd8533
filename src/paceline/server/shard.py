"""Shard: one rank that holds one slice of the parameters, so that updates are applied one after the other.

Workers may join, leave and die at any time.  An update is applied at most once, even if it is sent again.  A request
that makes no sense is refused with a reason, and the shard goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.endpoint import Endpoint
from paceline.protocol.messages import Message, PeerDied, reply_to
from paceline.protocol.requests import Refusal, Refusals
from paceline.server.gates import Free, Gate
from paceline.server.logged_endpoint import LoggedEndpoint
from paceline.server.messages import Bye, Exchange, Leave, Restore, RunEnded, SavePoint, Update, Value
from paceline.server.pending import Pending
from paceline.server.queues import Event
from paceline.server.reception import Reception
from paceline.server.rule import Rule
from paceline.server.shard_state import ShardState, Wanted, decoded
from paceline.slot_values import Copies
from paceline.state import SHARD, StateStore

LINGER_S = 10.0  # When all workers have left, a shard waits this long for the next one to take the final value,
LINGERS = 12  # and at most this many times as long in all.


class Shard:
    """The interface of a server role.  It serves from the first value until the last worker has left.

    It waits up to `grace_s` seconds for the replacement of a dead worker before it ends, if there is work left.  If all
    workers are silent and none has finished, it waits up to `return_s` seconds, and then fails.  It refuses updates
    with NaN or infinity, unless it `takes_nonfinite`.  The first shard also dispatches work.
    """

    def __init__(
        self, endpoint: Endpoint, *, grace_s: float = 0.0, return_s: float = math.inf, takes_nonfinite: bool = False
    ) -> None:
        self.endpoint = endpoint
        self.grace_s = grace_s
        self.return_s = return_s
        self.states = StateStore()
        self.held = ShardState(endpoint, self.states, takes_nonfinite=takes_nonfinite)
        self._reception = Reception(endpoint, self.held, self.states, grace_s, return_s)
        self.members = self._reception.members
        self.replies = self._reception.replies
        self._queues = self._reception.queues
        self._dispatcher = self._reception.dispatcher
        self.saves = self._reception.saves
        self._pending = Pending(endpoint.layout, self.members, self._queues, self.states)
        self._dispatcher.applied = self._pending.applied
        self._reception.on_restore = self._restore
        self.saves.may_pass = lambda: self._dispatcher.is_settled
        # Of the driver: the state of this shard in a checkpoint.
        self.read: Callable[[Restore], Mapping[str, Any] | None] = lambda request: None
        self._is_restored = False

    async def serve(
        self,
        rule: Rule,
        gate: Gate = Free(),  # noqa: B008 (frozen)
        *,
        codec: Codec | None = None,
        pulls: Codec | None = None,
    ) -> None:
        """Apply updates and answer requests, each as soon as the gate lets it pass, until the last worker has left."""
        self.declare(rule)
        self._pending.decode = lambda update: decoded(update, codec, self.value.numel())
        self._come_back()
        queues = self._queues
        while self.is_needed:
            event = await self._reception.event(rule)
            if event is not None:
                if not (isinstance(event, Update) and self.saves.holds(event)):
                    queues.add(event)
            elif await self.held.tick(rule, len(self.clocks)):
                queues.release()
            await self._work_off(rule, gate, codec, pulls)
            if self.saves.is_asked:
                for wanted in queues.let_go():
                    await self.reply(wanted, rule, codec=pulls, is_early=True)
                queues.updates += await self.saves.pass_if_complete()
                if self.saves.has_ended:
                    return
                await self._work_off(rule, gate, codec, pulls)
        await self.held.flush(rule)
        self.saves.end(self.members.leaving)
        await self._say_goodbye()

    async def _work_off(self, rule: Rule, gate: Gate, codec: Codec | None, pulls: Codec | None) -> None:
        """Answer all requests and apply all updates that the gate lets pass."""
        queues = self._queues
        while True:
            # Answer a worker before the next update: then no answer depends on which other workers wait.
            while (wanted := queues.next_wanted(gate, self.clocks)) is not None:
                await self.reply(wanted, rule, codec=pulls)
            if (update := queues.next_update(gate, self.clocks)) is None:
                return
            await self._apply_and_queue(rule, update, codec)

    # State.

    def declare(self, *rules: Rule) -> None:
        """Name all rules of this shard, before the first update.  If a state was loaded, they get their memory from it.

        `serve` does this itself.  Raises ValueError if the loaded state has no memory of a rule, or one of another
        rule.
        """
        for rule in rules:
            self.held.declare(rule)
        self.states.check_complete()

    def state_dict(self, copies: Copies | None = None) -> dict[str, Any]:
        """All that a resumed run needs from this rank, in slots.

        The members and their requests are not saved: the workers of the resumed run begin with new ones.
        """
        index = list(self.endpoint.layout.server_ranks).index(self.endpoint.rank)
        return self.states.state_dict(strategy=SHARD, step=self.version, copies=copies, rank=index)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; before `serve`.  A state that does not fit is refused, and nothing is loaded.

        The memory of rules is loaded once `serve` or `declare` names them.
        """
        self.states.load_state_dict(state, strategy=SHARD)

    def _restore(self, request: Restore) -> None:
        """A worker of a resumed run says where it continues.  The first one lets this shard load its state."""
        if not self._is_restored:
            self._is_restored = True
            try:
                if (state := self.read(request)) is not None:
                    self.load_state_dict(state)
            except (ValueError, OSError) as error:
                self._is_restored = False
                raise Refusal(str(error)) from error
            self.states.check_complete()
            if isinstance(self.endpoint, LoggedEndpoint):
                self.endpoint.cut_soon()  # The checkpoint may be gone when the log is read.
        self._dispatcher.go_on(request)

    @property
    def clocks(self) -> Mapping[int, int]:
        """How many updates each active worker has pushed."""
        return self.members.clocks

    @property
    def is_needed(self) -> bool:
        return self.members.is_needed

    async def request(self) -> Event | None:
        """The next update or pull; None when no worker is left."""
        while self.is_needed:
            if (event := await self._reception.event(None)) is not None:
                return event
        await self._say_goodbye()
        return None

    def _come_back(self) -> None:
        """Continue from the snapshot of a process that was killed, and let this one be saved in the same way."""
        if isinstance(self.endpoint, LoggedEndpoint):
            if (saved := self.endpoint.snapshot) is not None:
                self._is_restored = saved["is_restored"]
                self._reception.restore(saved)
            self.endpoint.save = lambda: {**self._reception.snapshot(), "is_restored": self._is_restored}

    async def _apply_and_queue(self, rule: Rule, update: Update, codec: Codec | None) -> None:
        """Apply an update, and queue the reply if its sender wants the value."""
        try:
            was_applied = await self._apply(rule, update, codec)
        except Refusal as error:
            return await self.refuse(update, error)
        if was_applied:
            self._queues.release()
        if update.src in self._queues.unapplied:  # Its sender had an early reply, and wants another.
            self._queues.unapplied.discard(update.src)
            if rule.holds_answers and (update.samples or update.had) and not was_applied:
                self._queues.owe(update.src)
        elif isinstance(update, Exchange) and self.members.roster.is_member(update.src):
            waits = rule.holds_answers and (update.samples or update.had) and not was_applied
            (self._queues.waiting if waits else self._queues.wanted).append(Wanted.by(update))

    async def apply(self, rule: Rule, update: Update, *, codec: Codec | None = None) -> bool:
        """Apply an update by a rule; whether it made a new version.  An update without samples changes nothing."""
        try:
            return await self._apply(rule, update, codec)
        except Refusal as error:
            await self.refuse(update, error)
            return False

    async def _apply(self, rule: Rule, update: Update, codec: Codec | None) -> bool:
        if update.src in self.clocks:
            self.members.clocks[update.src] += 1
        try:
            self._dispatcher.check(update)
            applied = await self.held.apply(rule, update, codec, len(self.clocks))
        finally:
            # It may be in its sender's memory, and the sender needs to write there again.
            update.update = torch.empty(0)
        await self._dispatcher.note(update)
        await self._reception.applied.note(update)
        return applied

    async def reply(
        self, request: Event, rule: Rule | None = None, *, codec: Codec | None = None, is_early: bool = False
    ) -> None:
        """Send the value as it is now, with its version."""
        wanted = Wanted.by(request) if isinstance(request, Update) else request
        answer = self.held.answer(wanted, rule, codec)
        answer.saves, answer.is_early = self.saves.number, is_early
        if not await self.replies.is_taken(request.src, answer):
            await self._reception.lose(request.src, self.members.roster.incarnation(request.src), rule)

    async def _say_goodbye(self) -> None:
        """All workers have left: send them the final value, until all have it."""
        leaving = self.members.leaving
        for request in leaving.values():
            await self._send_final(request)
        end = self.endpoint.now() + LINGERS * LINGER_S
        while leaving and self.endpoint.now() < end:
            try:
                message = await self.endpoint.recv(timeout=LINGER_S)
            except TimeoutError:
                return
            if isinstance(message, (Bye, PeerDied)):
                leaving.pop(message.src, None)
            elif isinstance(message, Leave):
                await self._send_final(message)
            elif isinstance(message, SavePoint):
                await self.saves.stand(message, is_over=True)
            elif message.src not in leaving and message.src not in self.endpoint.layout.server_ranks:
                await self.endpoint.send(message.src, RunEnded())

    async def _send_final(self, request: Leave) -> None:
        await self.replies.is_taken(request.src, reply_to(request, Value(self.held.value, self.held.version)))

    # Refusals.

    async def refuse(self, message: Message, why: Refusal) -> None:
        """Refuse a message, and send the reason if it is a request."""
        await self.replies.refuse(message, why)

    @property
    def refusals(self) -> Refusals:
        return self.replies.refusals

    @property
    def refused(self) -> int:
        """How many messages were refused; duplicates do not count."""
        return self.refusals.answered

    @property
    def last_refusal(self) -> str | None:
        return self.refusals.last

    @property
    def value(self) -> Tensor:
        return self.held.value

    @property
    def version(self) -> int:
        """How many times the value has changed."""
        return self.held.version
