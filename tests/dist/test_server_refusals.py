"""A parameter server refuses invalid messages by name, in any order, counts them, and continues to serve.

Afterwards its value is the result of the good worker's updates alone, to the bit.
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

import multiprocessing
import re
import time
from contextlib import closing
from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore, HashStore

from paceline import ClusterError
from paceline.codecs import Fp16
from paceline.op import drive
from paceline.protocol.messages import Away, Message, Refused, Wait
from paceline.server import dispatcher, queues, shard
from paceline.server.gates import Bound, RoundRobin
from paceline.server.messages import (
    Arrived,
    DrawWork,
    Exchange,
    Idle,
    Join,
    Leave,
    NoWork,
    ProbeExchange,
    Pull,
    Push,
    SendAgain,
    Start,
    Value,
    Wake,
    Work,
    WorkerLost,
)
from paceline.server.rules import Adam, Compensated, Momentum, Quorum, Sgd
from paceline.transport import outbox
from tests.dist.served import (
    LAYOUT,
    NEWCOMER,
    NUMEL,
    OTHER,
    ROGUE,
    SERVER,
    SGD,
    Good,
    Rogue,
    Server,
    kept,
    mailbox_of,
    serving,
)
from tests.messages import Dance

pytestmark = pytest.mark.timeout(60)
FINE = torch.ones(NUMEL)
EXTENT = torch.tensor([0, 10, LAYOUT.workers])


def told(answer: Message) -> str:
    assert isinstance(answer, (Refused, Away)), f"it was answered by '{answer.tag}'"
    return answer.reason


def bad(value: float) -> Tensor:
    update = FINE.clone()
    update[NUMEL // 2] = value
    return update


def runs(*pairs: list[int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)


def push(update: Tensor = FINE, samples: int = 1, **more: Any) -> Push:
    return Push(update, samples=samples, **more)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (push(FINE[1:]), r"torch.float32 values of shape \(63,\) for a shard of torch.float32 and \(64,\)"),
        (push(FINE.view(8, 8)), r"torch.float32 values of shape \(8, 8\)"),
        (push(FINE.sum()), r"torch.float32 values of shape \(\)"),
        (push(torch.ones(1000)), r"torch.float32 values of shape \(1000,\)"),
        (push(FINE.double()), "torch.float64 values"),
        (push(FINE.long()), "torch.int64 values"),
        (push(FINE.bool()), "torch.bool values"),
        (push(FINE[1:], samples=0), r"torch.float32 values of shape \(63,\)"),
        (push(version=2), "it was computed from version 2, but this shard has made only 1"),
        (push(version=2**62), "but this shard has made only 1"),
        (push(steps=1), "it says that it has done 1 parts, and was given 0"),
        (push(bad(nan)), "it holds NaN or infinity"),
        (push(bad(-inf)), "it holds NaN or infinity"),
        (push(rate=inf), "its factor on the learning rate is inf"),
        (push(FINE[:4], runs=runs([NUMEL - 3, 4])), "runs overlap, or end after the last of 64 values"),
        (push(FINE[:4], runs=runs([0, 2], [1, 2])), "runs overlap"),
        (push(FINE[:4], runs=runs([-4, 4])), "runs from -4 to -4"),
        (push(FINE[:4], runs=runs([0, 2**63 - 1], [1, 1])), "of lengths from 1 to 9223372036854775807"),
        (push(FINE[:4], runs=runs([0, 4]).float()), "runs are pairs of int64, not torch.float32"),
        (push(FINE[:4], runs=torch.tensor(4)), r"not torch.int64 of shape \(\)"),
        (push(FINE[:4], runs=runs([0, 5])), r"torch.float32 values of shape \(4,\) for runs of 5 values"),
        (push(bad(nan)[31:35], runs=runs([0, 4])), "it holds NaN or infinity"),
        (DrawWork(EXTENT.float(), 1), r"three int64 numbers, not torch.float32 of shape \(3,\)"),
        (DrawWork(torch.full((3,), nan), 1), r"three int64 numbers, not torch.float32 of shape \(3,\)"),
        (DrawWork(torch.tensor(7), 1), r"three int64 numbers, not torch.int64 of shape \(\)"),
        (DrawWork(EXTENT[:2], 1), r"three int64 numbers, not torch.int64 of shape \(2,\)"),
        (DrawWork(torch.tensor([0, 9, 2**40]), 1), "cut into 1099511627776 parts, and they are cut into 3"),
        (Join(3), "there is no data shard 3: each minibatch is cut into 3 parts"),
        (Value(FINE), "there is no request of the type 'value' here"),
        (Dance(), "there is no request of the type 'dance' here"),
    ],
)
def test_an_invalid_request_is_refused_by_name(message: Message, reason: str):
    with serving() as (server, good, (rogue,)):
        good.exchange()
        answer = rogue.ask(message)
        assert re.search(reason, told(answer)), told(answer)
        assert server.shard.last_refusal == f"a '{message.tag}' of worker {ROGUE}: {told(answer)}"
        assert server.refused == (0, 1)
        good.exchange()
    assert server.refused == (0, 1)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Start(FINE.view(8, 8)), r"a value is one vector of real numbers, not torch.float32 of shape \(8, 8\)"),
        (Start(FINE.long()), "a value is one vector of real numbers"),
        (WorkerLost(0), "there is no request of the type 'worker lost' here"),
    ],
)
def test_an_invalid_message_that_is_no_request_is_refused_by_name_without_a_reply(message: Message, reason: str):
    with serving() as (server, good, (rogue,)):
        good.exchange()
        rogue.say(message)
        assert isinstance(rogue.ask(Pull()), Value)
        assert re.search(f"^a '{message.tag}' of worker {ROGUE}: {reason}", server.shard.last_refusal or "")
        assert server.refused == (0, 1)
        good.exchange()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (push(version=-1), r"Expected `int` >= 0 - at `\$.version`"),
        (push(version=2**64 - 1), r"Expected `int` <= 4611686018427387904 - at `\$.version`"),
        (push(samples=-1), r"Expected `int` >= 0 - at `\$.samples`"),
        (push(samples=2**63), r"Expected `int` <= 2147483648 - at `\$.samples`"),
        (push(request_id=-1), r"Expected `int` >= 0 - at `\$.request_id`"),
        (push(rate=-0.5), r"Expected `float` >= 0.0 - at `\$.rate`"),
        (push(rate=nan), r"Expected `float` >= 0.0 - at `\$.rate`"),
        (push(steps=-1), r"Expected `int` >= 0 - at `\$.steps`"),
        (push(steps=2**63), r"Expected `int` <= 2147483648 - at `\$.steps`"),
        (push(incarnation=-1), r"Expected `int` >= 0 - at `\$.incarnation`"),
        (DrawWork(EXTENT, 0), r"Expected `int` >= 1 - at `\$.wanted`"),
        (DrawWork(EXTENT, 2**62), r"Expected `int` <= 2147483648 - at `\$.wanted`"),
        (ProbeExchange(request_id=-5), r"Expected `int` >= 0 - at `\$.request_id`"),
    ],
)
def test_numbers_out_of_their_range_are_refused_by_the_mailbox(message: Message, reason: str):
    with serving() as (server, good, (rogue,)):
        good.exchange()
        rogue.say(message)
        assert isinstance(rogue.ask(Pull()), Value)
        assert re.search(f"^a message from rank {ROGUE}: {reason}", server.box.last_refusal or ""), (
            server.box.last_refusal
        )
        assert server.refused == (1, 0) and server.box.refusals.counts == {"malformed": 1}
        good.exchange()


# Refusals that are counted by reason.


def test_a_message_of_an_unknown_type_is_counted_and_refused_by_name():
    with serving() as (server, good, (rogue,)):
        good.exchange()
        rogue.throw([msgspec.msgpack.encode([[], {"type": "waltz", "request_id": 1}])])
        assert told(rogue.ask(Dance())) == "there is no request of the type 'dance' here"
        assert server.box.refusals.counts == {"unknown type": 1}
        assert server.box.last_refusal == f"a message from rank {ROGUE}: there is no message type 'waltz'"
        assert server.shard.refusals.counts == {"unknown type": 1}
        good.exchange()


def test_a_message_of_an_older_incarnation_is_counted_refused_by_name_and_not_applied():
    with serving() as (server, good, (rogue,)):
        good.exchange()
        rogue.say(Wake(request_id=1, incarnation=1))
        for message in (push(request_id=2), Exchange(FINE, samples=1, request_id=3), Pull(request_id=4)):
            assert isinstance(answer := rogue.ask(message), Away)
            assert "it is not, or no longer, among the workers" in told(answer)
            assert (answer.request_id, answer.incarnation) == (message.request_id, 0)
        assert server.shard.refusals.counts == {"older incarnation": 3}
        assert server.shard.last_refusal == f"a 'pull' of worker {ROGUE}: {told(answer)}"
        good.exchange()
        assert isinstance(rogue.ask(Pull(request_id=5, incarnation=1)), Value)


def test_a_duplicate_update_is_counted_and_applied_once():
    with serving() as (server, good, (rogue,)):
        good.exchange()
        for message in (push(torch.zeros(NUMEL), request_id=7), Exchange(torch.zeros(NUMEL), samples=1, request_id=8)):
            before = server.shard.version
            for _ in range(3):
                rogue.say(message)
            last = Pull(request_id=100 + message.request_id)
            rogue.say(last)
            while rogue.hear().request_id != last.request_id:
                pass
            assert server.shard.version == before + 1
            assert server.shard.last_refusal == f"a '{message.tag}' of worker {ROGUE}: it has arrived before"
        assert server.shard.refusals.counts == {"duplicate": 4}


def test_a_worker_gets_the_reason_why_its_update_was_refused():
    with serving() as (server, good, _):
        good.exchange()
        for update, reason in (
            (bad(nan), "it holds NaN or infinity"),
            (FINE.double(), "torch.float64 values of shape"),
        ):
            with pytest.raises(ClusterError, match=rf"server 0 \(rank 3\) refused a request of worker 0: {reason}"):
                good.store.exchange(update, samples=1).wait()
            good.exchange()
        assert server.refused == (0, 2)


@pytest.mark.parametrize(
    "data", [torch.full((NUMEL,), nan).half().view(torch.uint8), torch.full((NUMEL,), inf).half().view(torch.uint8)]
)
def test_an_update_that_decodes_to_nan_or_infinity_is_refused(data: Tensor):
    with serving(codec=Fp16()) as (server, good, (rogue,)):
        good.exchange()
        assert told(rogue.ask(push(data))) == "it holds NaN or infinity"
        assert "decodes a 1-D uint8 tensor" in told(rogue.ask(push(data.view(2, -1))))
        assert "to decode" in told(rogue.ask(push(data[1:])))
        assert "torch.uint8 values of shape" in told(rogue.ask(push(data, runs=runs([0, 4]))))
        assert server.refused == (0, 4)


def test_a_partial_update_is_refused_where_the_rule_needs_all_values():
    with serving(Compensated(Sgd(lr=0.5), lam=1.0)) as (server, good, (rogue,)):
        good.exchange()
        rogue.ask(Pull())
        good.exchange()
        assert "it is for some values only" in told(rogue.ask(push(FINE[:4], runs=runs([0, 4]))))
        assert server.refused == (0, 1)


def test_a_number_of_samples_too_large_for_a_mean_is_refused():
    with serving(Quorum(Sgd(lr=0.5), least=1)) as (server, good, (rogue,)):
        good.exchange()
        rogue.say(push(samples=2**64 - 1))
        assert isinstance(rogue.ask(Pull()), Value)
        assert server.refused == (1, 0)


def test_a_number_of_finished_minibatches_too_large_to_send_is_refused():
    with serving() as (server, good, (rogue,)):
        good.draws = False
        good.exchange()
        for _ in range(3):
            rogue.say(push(samples=0, steps=2**63))
        assert isinstance(rogue.ask(Join(1)), Value)
        assert server.refused == (3, 0)


# Before there is a value.


@pytest.mark.parametrize("value", [torch.ones(3), FINE.long(), FINE.view(8, 8)], ids=["short", "whole", "matrix"])
def test_only_the_first_worker_may_send_the_first_value(value: Tensor):
    with serving() as (server, good, (rogue,)):
        rogue.say(Start(value))
        assert isinstance(rogue.ask(ProbeExchange(request_id=1)), SendAgain)
        assert server.shard.last_refusal == f"a 'start' of worker {ROGUE}: the first value is worker 0's to bring"
        good.exchange()
        assert server.refused == (0, 1)


def test_a_probe_for_an_update_does_not_change_the_rules_state():
    with serving(Adam(lr=0.5)) as (server, good, (rogue,)):
        rogue.say(Exchange(torch.zeros(NUMEL), request_id=1))
        assert isinstance(rogue.ask(ProbeExchange(request_id=1)), Wait)
        good.exchange()
        assert isinstance(rogue.hear(), Value)
        assert isinstance(rogue.ask(ProbeExchange(request_id=1)), Value)
        assert server.refused == (0, 0)


# A full shard.


def test_a_shard_keeps_a_limited_number_of_requests_of_one_worker():
    with serving(Momentum(lr=0.5), RoundRobin()) as (server, good, (rogue,)):
        for i in range(queues.MOST_HELD):
            rogue.say(Exchange(FINE, request_id=i + 1))
        assert told(rogue.ask(Exchange(FINE, request_id=100))).startswith("64 of its requests wait to be answered")
        assert server.refused == (0, 1)
        for i in range(3):
            good.exchange()
            answer = rogue.hear()
            assert isinstance(answer, Value) and answer.request_id == i + 1


def test_the_same_limit_holds_before_the_first_value():
    with serving() as (server, good, (rogue,)):
        for i in range(queues.MOST_HELD):
            rogue.say(Pull(request_id=i + 1))
        assert "64 of its requests wait" in told(rogue.ask(Pull(request_id=100)))
        good.exchange()
        assert all(isinstance(rogue.hear(), Value) for _ in range(queues.MOST_HELD))
        assert server.refused == (0, 1)


def test_a_worker_gets_only_a_few_parts_at_a_time():
    with serving() as (_, good, (rogue,)):
        good.exchange()
        given = rogue.ask(DrawWork(torch.tensor([0, 2**62, 3]), 2**31))
        assert isinstance(given, Work) and len(given.items) == dispatcher.MOST_DRAWN


def test_only_the_last_request_for_work_of_a_worker_is_kept():
    with serving() as (server, good, (rogue,)):
        good.draws = False
        good.exchange()
        for i in range(2000):
            rogue.say(DrawWork(torch.tensor([0, 1, 3]), 1, now=True, request_id=i + 1))
        assert [type(rogue.hear()) for _ in range(2000)] == [Work] * 3 + [NoWork] * 1997
        assert kept(server.shard, set()) < 1000


# Workers that join and leave.


def test_a_worker_that_has_left_cannot_rejoin():
    with serving(gate=Bound(1000)) as (server, good, (rogue,)):
        good.exchange()
        rogue.say(Leave(request_id=7))
        for message in (Pull(), push(), ProbeExchange(), DrawWork(EXTENT, 1), Idle()):
            assert "it is not, or no longer, among the workers" in told(rogue.ask(message))
        rogue.say(Start(FINE))
        rogue.say(Wake(request_id=6))
        assert "it has left" in told(rogue.ask(Join(0, request_id=8)))
        assert server.refused == (0, 7)


def test_only_workers_that_have_joined_can_be_idle():
    with serving(gate=Bound(1000), rogues=(ROGUE, NEWCOMER)) as (server, good, (_, newcomer)):
        good.exchange()
        for message in (Idle(), Pull()):
            assert "it may join" in told(newcomer.ask(message))
        assert isinstance(newcomer.ask(Join(0)), Value)
        newcomer.say(Idle())
        assert isinstance(newcomer.ask(Pull()), Value)
        assert server.refused == (0, 2)


@pytest.mark.parametrize("gate", [Bound(0), RoundRobin()], ids=str)
def test_a_worker_that_sends_a_request_and_becomes_idle_gets_a_reply(gate: Any):
    with serving(gate=gate) as (server, good, (rogue,)):
        good.store.pull().wait()
        for number in (1, 2):
            rogue.say(Exchange(FINE, request_id=number))
        rogue.say(Idle())
        assert [rogue.hear().request_id for _ in range(2)] == [1, 2]
        assert server.refused == (0, 0)


def test_a_worker_is_not_idle_after_an_older_message_that_it_is():
    with serving(gate=RoundRobin()) as (server, good, (rogue,)):
        good.exchange()
        rogue.say(push(torch.zeros(NUMEL), request_id=2))
        assert isinstance(rogue.hear(), Arrived)
        for number, is_active in ((1, True), (3, False)):
            rogue.say(Idle(request_id=number))
            # A refused request shows that all messages before it have arrived, and wakes nobody.
            assert isinstance(rogue.ask(Dance()), Refused)
            assert (ROGUE in server.shard.clocks) is is_active
        assert server.refused == (0, 2)


def test_a_part_is_done_once_although_it_is_reported_often():
    with serving(gate=RoundRobin()) as (server, good, (rogue,)):
        good.exchange()
        assert isinstance(rogue.ask(DrawWork(EXTENT, 1)), Work)
        rogue.say(Idle())
        good.exchange()
        for _ in range(2):
            rogue.say(Exchange(FINE, steps=1))
        while ROGUE not in server.shard.clocks:  # If they arrived after the next two, they would wait for a third.
            server.assert_lives()
            time.sleep(0.01)
        good.exchange()
        good.exchange()
        assert [type(rogue.hear()) for _ in range(2)] == [Value, Refused]
        text = "it says that it has done 1 parts, and was given 0"
        assert server.shard.last_refusal == f"a 'exchange' of worker {ROGUE}: {text}"


def test_the_unfinished_parts_of_a_worker_that_leaves_go_to_others():
    with serving(rogues=(ROGUE, OTHER)) as (_, good, (rogue, other)):
        good.draws = False
        good.exchange()
        one_step = torch.tensor([0, 1, 3])
        assert rogue.ask(DrawWork(one_step, 1)).items.tolist() == [[0, 1]]
        assert [type(other.ask(DrawWork(one_step, 1, now=True))) for _ in range(3)] == [Work, Work, NoWork]
        rogue.say(Leave())
        assert other.hear().items.tolist() == [[0, 1]]


def test_a_shard_ends_although_a_rank_keeps_sending(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shard, "LINGER_S", 0.05)
    keys = HashStore()
    server, good, rogues = Server(keys, SGD), Good(keys, SGD), [Rogue(rank, keys) for rank in (ROGUE, OTHER)]
    good.exchange()
    for rogue in rogues:
        rogue.say(Leave())
    assert torch.equal(drive(good.store.leave()), good.expected)
    end = time.monotonic() + 10
    while server.thread.is_alive() and time.monotonic() < end:  # They never acknowledge the end.
        rogues[0].say(Leave(request_id=1))
        time.sleep(0.01)
    assert not server.thread.is_alive()
    for box in (good.box, *(rogue.box for rogue in rogues)):
        box.close(linger_s=0)


def test_a_worker_that_does_not_receive_its_replies_is_declared_dead(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outbox, "UNREAD_NBYTES", 2**20)
    with serving(numel=2**16, is_far=False) as (server, good, (rogue,)):
        server.box.timeout_s = 0.2
        good.exchange()
        for _ in range(10):
            rogue.say(Pull())
        while ROGUE in server.shard.clocks:
            server.assert_lives()
            time.sleep(0.01)
        good.exchange()
        while isinstance(answer := rogue.hear(), Value):
            del answer  # Now it does, too late.
        assert "it is not, or no longer, among the workers" in told(answer)


# A shard that is dead.


def serve_in_a_process(path: str) -> None:
    torch.set_num_threads(1)
    Server(FileStore(path), SGD).thread.join()


@pytest.mark.dist
def test_a_worker_learns_at_once_that_a_shard_is_dead(tmp_path: Path):
    path = str(tmp_path / "keys")
    child = multiprocessing.get_context("fork").Process(target=serve_in_a_process, args=(path,))
    child.start()
    good = Good(FileStore(path), SGD)
    try:
        good.exchange()
        child.kill()
        began = time.monotonic()
        with pytest.raises(ClusterError, match=r"^server 0 \(rank 3\) is dead, and the run cannot go on without it$"):
            good.store.exchange(FINE, samples=1).wait()
        assert time.monotonic() - began < 3
    finally:
        child.kill()
        child.join()
        good.box.close(linger_s=0)


def test_an_error_names_a_shard_that_does_not_reply():
    keys = HashStore()
    silent, good = mailbox_of(SERVER, keys), Good(keys, SGD, patience_s=0.02)
    with closing(silent), closing(good.box):
        with pytest.raises(
            ClusterError,
            match=r"^server 0 \(rank 3\) has not answered 'exchange' of worker 0, sent 13 times: it is dead or stuck$",
        ):
            good.store.exchange(FINE, samples=1).wait()
        good.box.close(linger_s=0)
