"""Slice: the part of the parameters that a shard holds, the versions made of it, and what rules remember of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.codec import Codec
from paceline.codecs.layout import is_finite
from paceline.endpoint import Endpoint
from paceline.protocol.messages import Request
from paceline.protocol.requests import Refusal
from paceline.server.messages import Update, Value
from paceline.server.rules import Push, Rule
from paceline.state import Memory
from paceline.worker.rows import positions, refusal, union

CHANGES = 1024  # So many versions ago it is known what has changed since.


def check_value(value: Tensor) -> None:
    """Refuse what cannot be a shard's first value."""
    if not value.dtype.is_floating_point or value.dim() != 1:
        raise Refusal(f"a value is one vector of real numbers, not {value.dtype} of shape {tuple(value.shape)}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A worker that wants the value; with `since` only what has changed after that version.  `steps_done` is of its
    data shard."""

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
    """Nothing until it has its first value."""

    def __init__(self, endpoint: Endpoint, *, takes_nonfinite: bool) -> None:
        self.endpoint, self.takes_nonfinite = endpoint, takes_nonfinite
        self.value = torch.empty(0)
        self.is_there = False
        self.version = 0
        self._memories: dict[Rule, Memory] = {}
        self._told: dict[
            int, Tensor
        ] = {}  # What each worker has been told that the value is, where that is told by a codec.
        self._changes: deque[tuple[int, Tensor | None]] = deque(
            maxlen=CHANGES
        )  # The last versions, and what each has changed.

    def begin(self, first: Tensor) -> None:
        """Take the first value, unless there is one."""
        if not self.is_there:
            self.value, self.is_there = self.endpoint.send_buffer(first).copy_(first), True

    def forget(self, worker: int, rule: Rule | None) -> None:
        """A worker is gone for good."""
        self._told.pop(worker, None)
        if rule is not None and self.is_there:
            rule.forget(self._memory(rule), worker)

    async def apply(self, rule: Rule, push: Update, codec: Codec | None, workers: int) -> bool:
        """Let a rule do what an update asks for; whether it made a new version.  One without samples changes
        nothing."""
        update = self._update(rule, push, codec)
        if not push.samples:
            return False
        told = Push(push.src, push.samples, self.version - push.version, workers, self.endpoint.now())
        m, runs = self._memory(rule), None if push.runs is None else push.runs.clone()
        if runs is None:
            work = lambda: rule.apply(self._own_value(), update, m, told)  # noqa: E731
        else:
            work = lambda: self._apply_to_some(rule, update, positions(runs), m, told)  # noqa: E731
        applied = await self.endpoint.compute(work, kind="apply", nbytes=push.nbytes)
        self._changes.append((self.version + 1, runs))
        self.endpoint.trace.point(
            self.endpoint.now(), self.endpoint.rank, self.version, push.samples, None, told.staleness
        )
        self.version += applied
        return applied

    def _apply_to_some(self, rule: Rule, update: Tensor, where: Tensor, m: Memory, push: Push) -> bool:
        """Let a rule do its work on some values, and on what it remembers of them."""
        value = self._own_value()
        some, part = value[where], _part(m, where, value.shape)
        applied = rule.apply(some, update, part, push)
        value[where] = some
        _put_back(m, part, where, value.shape)
        return applied

    def due(self, rule: Rule | None) -> float | None:
        """When a rule wants its `tick`."""
        return rule.due(self._memory(rule)) if rule is not None and self.is_there else None

    async def tick(self, rule: Rule, workers: int) -> bool:
        """A rule's time may have come; whether that made a new version."""
        if not self.is_there:
            return False
        m, now = self._memory(rule), self.endpoint.now()
        applied = await self.endpoint.compute(
            lambda: rule.tick(self._own_value(), m, now, workers), kind="apply", nbytes=0
        )
        self.version += applied
        return applied

    async def flush(self, rule: Rule) -> None:
        """Let a rule apply what it still holds back."""
        m = self._memory(rule)
        self.version += await self.endpoint.compute(lambda: rule.flush(self._own_value(), m), kind="apply", nbytes=0)

    def answer(self, wanted: Wanted, rule: Rule | None, codec: Codec | None) -> Value:
        """The reply to a worker: the value; or only what has changed and where, if it knows the rest and wants it
        so."""
        if rule is not None:
            rule.pulled(self.value, self._memory(rule), wanted.src)
        reply = Value(
            self.value,
            self.version,
            steps_done=wanted.steps_done,
            request_id=wanted.request_id,
            incarnation=wanted.incarnation,
        )
        if wanted.since is not None and (changed := self._changed_since(wanted.since)) is not None:
            reply.value = self.value[positions(changed)]
            reply.runs = changed
        elif codec is not None:
            reply.value = self._news(wanted.src, codec)
        return reply

    def _changed_since(self, version: int) -> Tensor | None:
        """What has changed after a version; None if that is everything, or too long ago."""
        if self.version - version > len(self._changes):
            return None
        runs = [runs for made, runs in self._changes if made > version]
        return (
            None
            if any(r is None for r in runs)
            else union([r for r in runs if r is not None] or [torch.empty(0, 2, dtype=torch.int64)])
        )

    def _news(self, src: int, codec: Codec) -> Tensor:
        """What has changed since a worker was last told, encoded; what that leaves out has not changed for it yet."""
        if src not in self._told:
            self._told[src] = self.value.clone()
            return self.value
        told = self._told[src]
        data = kernels.encode(codec, self.value - told, None, None)
        kernels.add(codec, data, told, 1.0, False)
        return data

    def _update(self, rule: Rule, push: Update, codec: Codec | None) -> Tensor:
        """What is pushed, if it can be applied; where no samples are behind it, only its form counts."""
        update, runs = push.update, push.runs
        if push.version > self.version:
            raise Refusal(f"it was computed from version {push.version}, but this shard has made only {self.version}")
        if runs is not None:
            if not rule.is_elementwise:
                raise Refusal(f"it is of some values alone, to which {rule} cannot be applied")
            if (why := refusal(runs, self.value.numel())) is not None:
                raise Refusal(why)
            if update.shape != (int(runs[:, 1].sum()),) or update.dtype != self.value.dtype:
                raise Refusal(
                    f"{update.dtype} values of shape {tuple(update.shape)} for runs of {int(runs[:, 1].sum())} values"
                )
        elif codec is not None and update.dtype == torch.uint8:
            if push.samples:
                try:
                    update = codec.decode(update, self.value.numel())
                except ValueError as error:
                    raise Refusal(str(error)) from error
        elif update.shape != self.value.shape or update.dtype != self.value.dtype:
            raise Refusal(
                f"{update.dtype} values of shape {tuple(update.shape)} for a shard of {self.value.dtype} and "
                f"{tuple(self.value.shape)}"
            )
        if push.samples and not self.takes_nonfinite and not is_finite(update):
            raise Refusal("it holds NaN or infinity")
        return update

    def _own_value(self) -> Tensor:
        """The value, to be written to; another copy of it if somebody is still reading this one."""
        if self.endpoint.in_use(self.value):
            self.value = self.endpoint.send_buffer(self.value).copy_(self.value)
        return self.value

    def _memory(self, rule: Rule) -> Memory:
        if rule not in self._memories:
            self._memories[rule] = Memory(**rule.memory(self.value))
        return self._memories[rule]


def _part(m: Memory, where: Tensor, shape: torch.Size) -> Memory:
    """What a rule remembers of some values; what is not of each value stays as it is."""
    parts = {}
    for name, value in vars(m).items():
        if isinstance(value, Memory):
            parts[name] = _part(value, where, shape)
        else:
            parts[name] = value[where] if isinstance(value, Tensor) and value.shape == shape else value
    return Memory(**parts)


def _put_back(m: Memory, part: Memory, where: Tensor, shape: torch.Size) -> None:
    for name, value in vars(m).items():
        if isinstance(value, Memory):
            _put_back(value, getattr(part, name), where, shape)
        elif isinstance(value, Tensor) and value.shape == shape:
            value[where] = getattr(part, name)
        else:
            setattr(m, name, getattr(part, name))
