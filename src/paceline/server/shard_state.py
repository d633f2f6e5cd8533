"""ShardState: the slice of the parameters that a shard holds, its version, and the memory of the shard's rules.

Slots: `value` is the slice and its version.  `rule.<class>` is the memory of a rule.  Both follow the resize rule
`shard`: vectors are joined and cut again, and of a number the largest counts (no worker knows a later version).  Of the
copies that `Compensated` keeps of what each worker has read, those remain that every shard has; without its copy, an
update is applied as it is.  What `Every` and `Quorum` hold back is saved, because the work behind it counts as done;
the grace period of a `Quorum` starts again.  What each worker knows by a pull codec, and what the last versions have
changed, is not saved: a resumed worker gets the whole value first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.codec import Codec
from paceline.codecs.layout import is_finite
from paceline.endpoint import Endpoint
from paceline.protocol.messages import Request
from paceline.protocol.requests import Refusal
from paceline.server.messages import Update, Value
from paceline.server.rule import Push, Rule
from paceline.server.rule_memory import loaded_memory, memory_at, write_back
from paceline.state import Slot, StateStore, Values, shard
from paceline.worker.rows import positions, refusal, union

CHANGES = 1024  # The number of versions of which the shard knows what each has changed.


def check_value(value: Tensor) -> None:
    """Refuse a tensor that cannot be a shard's value."""
    if not value.dtype.is_floating_point or value.dim() != 1:
        raise Refusal(f"a value is one vector of real numbers, not {value.dtype} of shape {tuple(value.shape)}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A worker that wants the value; with `since`, only what has changed after that version.

    `steps_done` counts the steps that are done of its data shard.
    """

    src: int
    request_id: int
    incarnation: int
    since: int | None = None
    steps_done: int = 0

    @classmethod
    def by(cls, request: Request, steps_done: int = 0) -> Wanted:
        since = request.version if isinstance(request, Update) and request.runs is not None else None
        return cls(request.src, request.request_id, request.incarnation, since, steps_done)


class ShardState:
    """The value of a shard.  It is empty until it gets its first value."""

    def __init__(self, endpoint: Endpoint, states: StateStore, *, takes_nonfinite: bool) -> None:
        self.endpoint = endpoint
        self.takes_nonfinite = takes_nonfinite
        self.value = torch.empty(0)
        self.is_there = False
        self.version = 0
        self._memories: dict[Rule, Slot] = {}
        self._known: dict[int, Tensor] = {}  # With a pull codec: the value as each worker knows it.
        # The last versions, and the runs that each has changed; None is all of the value.
        self._changes: deque[tuple[int, Tensor | None]] = deque(maxlen=CHANGES)
        self.updates = 0
        self._stale = 0  # The sum of their staleness.
        self.on_applied: Callable[[Update], None] | None = None  # Called after an update, also without samples,
        self.on_answer: Callable[[Value, int], None] | None = None  # and with each answer and the worker that gets it.
        self._states = states
        self._slots: dict[Rule, str] = {}  # The slot of each rule that was declared.
        states.bind("value", rule=shard, save=self._save, load=self._load, check=_check_saved, is_live=True)

    def begin(self, first: Tensor) -> None:
        """Take the first value, unless there is one."""
        if not self.is_there:
            self.value = self.endpoint.send_buffer(first).copy_(first)
            self.is_there = True

    # State.

    def declare(self, rule: Rule) -> None:
        """Give a rule its slot, and load its memory if a state was loaded."""
        if rule in self._slots:
            return
        name = f"rule.{type(rule).__name__}"
        others = sum(type(other) is type(rule) for other in self._slots)
        slot = f"{name}.{others + 1}" if others else name
        self._states.bind(
            slot,
            rule=shard,
            save=lambda: rule.saved(self._memory(rule)) if self.is_there else {},
            load=lambda values: self._load_memory(rule, slot, values),
        )
        self._slots[rule] = slot

    def _save(self) -> Values:
        return {"value": self.value if self.is_there else None, "version": self.version}

    def _load(self, values: Values) -> None:
        """Take a saved value in the place of the one that is here.  No worker knows it yet."""
        self.value = torch.empty(0)
        self.is_there = False
        if values["value"] is not None:
            self.begin(values["value"])
        self.version = values["version"]
        self._memories.clear()
        self._known.clear()
        self._changes.clear()

    def _load_memory(self, rule: Rule, slot: str, values: Values) -> None:
        if self.is_there:
            self._memories[rule] = loaded_memory(slot, Slot(**rule.memory(self.value)), values)

    def snapshot(self) -> Values:
        """All of it, as plain values that share memory with it."""
        return {
            "value": self.value if self.is_there else None,
            "version": self.version,
            "memories": {self._slots[rule]: _shared(m) for rule, m in self._memories.items()},
            "known": dict(self._known),
            "changes": [list(change) for change in self._changes],
            "updates": self.updates,
            "stale": self._stale,
        }

    def restore(self, saved: Values) -> None:
        """Continue from a snapshot; the rules were declared."""
        self._load(saved)
        for rule, slot in self._slots.items():
            if slot in saved["memories"]:
                self._memories[rule] = loaded_memory(slot, Slot(**rule.memory(self.value)), saved["memories"][slot])
        self._known = dict(saved["known"])
        self._changes.extend((version, runs) for version, runs in saved["changes"])
        self.updates = saved["updates"]
        self._stale = saved["stale"]

    # Workers and updates.

    def forget(self, worker: int, rule: Rule | None) -> None:
        """Drop what is kept for a worker that has left or died."""
        self._known.pop(worker, None)
        if rule is not None and self.is_there:
            rule.forget(self._memory(rule), worker)

    async def apply(self, rule: Rule, push: Update, codec: Codec | None, workers: int) -> bool:
        """Apply an update by a rule; whether it made a new version.  An update without samples changes nothing."""
        update = self._update(rule, push, codec)
        if not push.samples:
            self._report(push)
            return push.had and rule.holds_answers and await self._attend(rule, push, workers)
        staleness = self.version - push.version
        described = Push(push.src, push.samples, staleness, workers, self.endpoint.now(), push.rate)
        m = self._memory(rule)
        runs = None if push.runs is None else push.runs.clone()
        if runs is None:
            work = lambda: rule.apply(self._own_value(), update, m, described)  # noqa: E731
        else:
            work = lambda: self._apply_to_some(rule, update, positions(runs), m, described)  # noqa: E731
        applied = await self.endpoint.compute(work, kind="apply", nbytes=push.nbytes)
        self._changes.append((self.version + 1, runs))
        self.updates += 1
        self._stale += staleness
        self.endpoint.trace.point(
            self.endpoint.now(), self.endpoint.rank, self.version, push.samples, None, described.staleness
        )
        self.version += applied
        self._report(push)
        return applied

    async def _attend(self, rule: Rule, push: Update, workers: int) -> bool:
        """The value has the samples of an update already.  A rule that holds updates back still waits for its sender:
        other shards do, and workers of which one waits for each shard would wait for each other."""
        m, described = self._memory(rule), Push(push.src, 0, 0, workers, self.endpoint.now(), push.rate)
        applied = await self.endpoint.compute(
            lambda: rule.apply(self._own_value(), torch.zeros_like(self.value), m, described), kind="apply"
        )
        if applied:
            self.version += 1
            self._changes.append((self.version, None))
        return applied

    def _report(self, push: Update) -> None:
        if self.on_applied is not None:
            self.on_applied(push)

    def _apply_to_some(self, rule: Rule, update: Tensor, where: Tensor, m: Slot, push: Push) -> bool:
        """Apply an update to some elements of the value, and to the rule's memory of them."""
        value = self._own_value()
        some, part = value[where], memory_at(m, where, value.shape)
        applied = rule.apply(some, update, part, push)
        value[where] = some
        write_back(m, part, where, value.shape)
        return applied

    def due(self, rule: Rule | None) -> float | None:
        """When a rule wants its `tick`."""
        return rule.due(self._memory(rule)) if rule is not None and self.is_there else None

    async def tick(self, rule: Rule, workers: int) -> bool:
        """Call the rule's `tick`; whether that made a new version."""
        if not self.is_there:
            return False
        m, now = self._memory(rule), self.endpoint.now()
        applied = await self.endpoint.compute(
            lambda: rule.tick(self._own_value(), m, now, workers), kind="apply", nbytes=0
        )
        self.version += applied
        return applied

    async def flush(self, rule: Rule) -> None:
        """Apply the updates that a rule still holds back."""
        m = self._memory(rule)
        self.version += await self.endpoint.compute(lambda: rule.flush(self._own_value(), m), kind="apply", nbytes=0)

    def answer(self, wanted: Wanted, rule: Rule | None, codec: Codec | None) -> Value:
        """The reply to a worker: the value, or what has changed and where, if the worker has asked for that."""
        if rule is not None:
            rule.pulled(self.value, self._memory(rule), wanted.src)
        reply = Value(
            self.value,
            self.version,
            steps_done=wanted.steps_done,
            request_id=wanted.request_id,
            incarnation=wanted.incarnation,
            updates=self.updates,
            stale=self._stale,
        )
        if wanted.since is not None and (changed := self._changed_since(wanted.since)) is not None:
            reply.value = self.value[positions(changed)]
            reply.runs = changed
        elif codec is not None:
            reply.value = self._news(wanted.src, codec)
        if self.on_answer is not None:
            self.on_answer(reply, wanted.src)
        return reply

    def _changed_since(self, version: int) -> Tensor | None:
        """The runs that have changed after a version; None for all of the value, or if that is not known any more."""
        if self.version - version > len(self._changes):
            return None
        runs = [runs for made, runs in self._changes if made > version]
        known = [r for r in runs if r is not None]
        return union(known or [torch.empty(0, 2, dtype=torch.int64)]) if len(known) == len(runs) else None

    def _news(self, src: int, codec: Codec) -> Tensor:
        """The encoded difference to the value that a worker knows.  What the codec leaves out is in the next one."""
        if src not in self._known:
            self._known[src] = self.value.clone()
            return self.value
        known = self._known[src]
        data = kernels.encode(codec, self.value - known, None, None)
        kernels.add(codec, data, known, 1.0, False)
        return data

    def _update(self, rule: Rule, push: Update, codec: Codec | None) -> Tensor:
        """The decoded update, if it can be applied; without samples, only its form is checked."""
        update, runs = push.update, push.runs
        if push.version > self.version:
            raise Refusal(f"it was computed from version {push.version}, but this shard has made only {self.version}")
        if runs is not None:
            if not rule.is_elementwise:
                raise Refusal(f"it is for some values only, and {rule} works on all of them at once")
            if (why := refusal(runs, self.value.numel())) is not None:
                raise Refusal(why)
            if update.shape != (int(runs[:, 1].sum()),) or update.dtype != self.value.dtype:
                raise Refusal(
                    f"{update.dtype} values of shape {tuple(update.shape)} for runs of {int(runs[:, 1].sum())} values"
                )
        elif codec is not None and update.dtype == torch.uint8:
            if push.samples:
                try:
                    update = decoded(push, codec, self.value.numel())
                except ValueError as error:
                    raise Refusal(str(error)) from error
        elif update.shape != self.value.shape or update.dtype != self.value.dtype:
            raise Refusal(
                f"{update.dtype} values of shape {tuple(update.shape)} for a shard of {self.value.dtype} and "
                f"{tuple(self.value.shape)}"
            )
        if not push.rate < inf:
            raise Refusal(f"its factor on the learning rate is {push.rate}")
        if push.samples and not self.takes_nonfinite and not is_finite(update):
            raise Refusal("it holds NaN or infinity")
        return update

    def _own_value(self) -> Tensor:
        """The value, to be written to; a copy of it while a receiver still reads this one."""
        if self.endpoint.in_use(self.value):
            self.value = self.endpoint.send_buffer(self.value).copy_(self.value)
        return self.value

    def _memory(self, rule: Rule) -> Slot:
        if (memory := self._memories.get(rule)) is not None:
            return memory
        self.declare(rule)
        if rule not in self._memories:
            self._memories[rule] = Slot(**rule.memory(self.value))
        return self._memories[rule]


def decoded(push: Update, codec: Codec | None, numel: int) -> Tensor:
    """The values of an update for so many parameters."""
    return push.update if codec is None or push.update.dtype != torch.uint8 else codec.decode(push.update, numel)


def _shared(m: Slot) -> Values:
    return {name: _shared(value) if isinstance(value, Slot) else value for name, value in vars(m).items()}


def _check_saved(values: Any) -> None:
    if not isinstance(values, dict) or values.keys() != {"value", "version"}:
        holds = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"the saved slot 'value' holds {holds}, and a shard has 'value' and 'version'")
    value = values["value"]
    if value is not None and not (isinstance(value, Tensor) and value.dim() == 1 and value.dtype.is_floating_point):
        found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the saved slot 'value' holds {found}, and a shard has one vector of real numbers")
