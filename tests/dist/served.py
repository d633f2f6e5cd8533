"""A parameter server of one shard behind a real mailbox, a worker that checks its values, and rogue ranks with a
key."""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

import copy
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from torch import Tensor
from torch.distributed import HashStore
from torch.distributed import Store as Keys

from paceline import Slot
from paceline.codecs import Codec
from paceline.endpoint import Layout
from paceline.op import drive
from paceline.protocol.messages import Message, Numbered
from paceline.protocol.requests import Refusal
from paceline.server import Shard, Store
from paceline.server.gates import Free, Gate
from paceline.server.messages import Arrived, Bye, Leave
from paceline.server.rules import Push, Rule, Sgd
from paceline.session.process_learner import ProcessLearner
from paceline.state import StateStore
from paceline.task import Trainee
from paceline.trace import Trace
from paceline.transport import mailbox
from paceline.transport.endpoint import Clock, ProcessEndpoint
from paceline.transport.mailbox import Mailbox
from paceline.worker.replica import Replica
from tests.laws.tasks import quadratic

LAYOUT = Layout(workers=3, servers=1)
GOOD, ROGUE, OTHER, SERVER, NEWCOMER = range(5)
NUMEL = 64
STEPS = 10**6  # There is always work left.
DEADLINE_S = 20.0
SGD, FREE = Sgd(lr=0.5), Free()


def mailbox_of(rank: int, keys: Keys) -> Mailbox:
    return Mailbox(keys, rank, LAYOUT.size, timeout_s=DEADLINE_S, is_open=True)


def updates(n: int, numel: int = NUMEL) -> Tensor:
    """The good worker's n-th update, of small whole numbers: sums of them are exact."""
    return ((torch.arange(numel) + n) % 7 - 3).float()


class Server:
    """A shard that serves in its own thread."""

    def __init__(
        self, keys: Keys, rule: Rule, gate: Gate = FREE, codec: Codec | None = None, pulls: Codec | None = None
    ) -> None:
        self.rule, self.codec, self.pulls = rule, codec, pulls
        self.box = mailbox_of(SERVER, keys)
        endpoint = ProcessEndpoint(
            SERVER, LAYOUT, Clock(time.time()), open_mailbox=lambda: self.box, trace=Trace(keep=100)
        )
        self.shard = Shard(endpoint)
        self.silent = 0  # Messages that were refused without a reply, because they were not requests.
        self._refuse, self.shard.replies.refuse = self.shard.replies.refuse, self.refuse
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._serve, args=(gate,), daemon=True)
        self.thread.start()

    def _serve(self, gate: Gate) -> None:
        try:
            drive(self.shard.serve(self.rule, gate, codec=self.codec, pulls=self.pulls))
        except BaseException as error:
            self.error = error
        finally:
            self.box.close(linger_s=0.2)

    async def refuse(self, message: Message, why: Refusal) -> None:
        self.silent += not isinstance(message, Numbered)
        await self._refuse(message, why)

    @property
    def refused(self) -> tuple[int, int]:
        """The numbers of messages refused by the mailbox, and by the shard."""
        return self.box.refused, self.shard.refused

    def assert_lives(self) -> None:
        if self.error is not None:
            raise AssertionError("the server is dead") from self.error
        assert self.thread.is_alive(), "the server has ended"

    def join(self) -> None:
        self.thread.join(DEADLINE_S)
        if self.error is not None:
            raise AssertionError("the server is dead") from self.error
        assert not self.thread.is_alive(), "the server does not end"


class Good:
    """A correct worker that knows the expected value of the shard: the result of its own updates alone."""

    def __init__(
        self,
        keys: Keys,
        rule: Rule,
        codec: Codec | None = None,
        pulls: Codec | None = None,
        numel: int = NUMEL,
        patience_s: float = 2.0,
    ) -> None:
        self.rule, self.numel = rule, numel
        self.box = mailbox_of(GOOD, keys)
        endpoint = ProcessEndpoint(
            GOOD, LAYOUT, Clock(time.time()), open_mailbox=lambda: self.box, trace=Trace(keep=100)
        )
        endpoint.retransmit_s = patience_s
        task = quadratic(steps=STEPS, batch=3, numel=numel, dtype=torch.float32)
        learner = ProcessLearner(Trainee(task, task.build(), GOOD, LAYOUT.workers), endpoint)
        learner.flat.params.copy_(updates(5, numel))
        self.store = Store(Replica(endpoint, learner, StateStore(), plan=task.plan), codec=codec, pulls=pulls)
        self.expected = learner.flat.params.clone()
        self._memory = Slot(**rule.memory(self.expected))
        self.pushed, self.draws = 0, True

    def exchange(self) -> None:
        """Exchange an update, of the next minibatch if the server gives out work. The shard must hold the expected
        value."""
        if self.draws:
            assert drive(self.store.next())
        self.rule.apply(self.expected, updates(self.pushed, self.numel), self._memory, Push(workers=LAYOUT.workers))
        value = self.store.exchange(updates(self.pushed, self.numel), samples=1).wait()
        self.pushed += 1
        assert torch.equal(value, self.expected)


class Rogue:
    """A rank that has a key, and sends any message."""

    def __init__(self, rank: int, keys: Keys) -> None:
        self.rank = rank
        self.box = mailbox_of(rank, keys)
        self.answers: Counter[str] = Counter()
        self._last_id = 0

    def say(self, message: Message) -> None:
        """Send a message. A request without an id gets the next one."""
        message = copy.copy(message)
        if isinstance(message, Numbered) and not message.request_id:
            self._last_id += 1
            message.request_id = self._last_id
        self.box.send(SERVER, message).wait()

    def ask(self, message: Message) -> Message:
        """The reply to a message, other than the acknowledgement of a push."""
        self.say(message)
        while isinstance(answer := self.hear(), Arrived):
            pass
        return answer

    def hear(self) -> Message:
        return self.box.recv(src=SERVER).wait()

    def throw(self, frames: list[bytes]) -> None:
        """Send any frames."""
        self.box._outbox.socket(SERVER).send_multipart(frames)

    def take(self, until: int) -> None:
        """Count the replies of the server, up to the one to the request with this id."""
        while True:
            assert self.box._inbox.poll(int(1000 * DEADLINE_S), zmq.POLLIN), "no answer"
            _, body = msgspec.msgpack.decode(self.box._inbox.recv_multipart()[0])
            self.answers["refused" if body["type"] == "away" else body["type"]] += 1
            if body.get("request_id") == until:
                return


@contextmanager
def serving(
    rule: Rule = SGD,
    gate: Gate = FREE,
    *,
    codec: Codec | None = None,
    pulls: Codec | None = None,
    rogues: tuple[int, ...] = (ROGUE,),
    numel: int = NUMEL,
    is_far: bool = True,
) -> Iterator[tuple[Server, Good, list[Rogue]]]:
    """A server, the good worker and rogues. In the end the server must be alive, hold the expected value, and exit when
    all ranks have left."""
    keys = HashStore()
    with pytest.MonkeyPatch.context() as patch:
        if is_far:
            patch.setattr(mailbox, "memory_domain", lambda: "")
        server = Server(keys, rule, gate, codec, pulls)
        good, bad = Good(keys, rule, codec, pulls, numel), [Rogue(rank, keys) for rank in rogues]
        absent = [Rogue(rank, keys) for rank in (ROGUE, OTHER) if rank not in rogues]
    try:
        for one in absent:
            one.say(Leave())
        yield server, good, bad
        server.assert_lives()
        good.exchange()
        for one in bad:
            one.say(Leave())
        assert torch.equal(drive(good.store.leave()), good.expected)
        for one in (*absent, *bad):
            one.say(Bye())
        server.join()
        assert torch.equal(server.shard.value, good.expected)
    except Exception:
        server.assert_lives()  # Its own error says more.
        raise
    finally:
        for box in (good.box, *(one.box for one in (*absent, *bad))):
            box.close(linger_s=0)


def kept(thing: Any, seen: set[int]) -> int:
    """The number of objects in a thing, including those in its parts."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if type(thing).__module__.startswith("paceline."):
        return kept(vars(thing), seen) if hasattr(thing, "__dict__") else 0
    if isinstance(thing, dict):
        return len(thing) + sum(kept(value, seen) for value in thing.values())
    return len(thing) + sum(kept(value, seen) for value in thing) if isinstance(thing, (list, set, deque)) else 0


def resident() -> float:
    """The resident memory of this process in megabytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
