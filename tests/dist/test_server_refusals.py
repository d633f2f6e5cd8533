"""Whatever a rank says, in any order: a parameter server refuses by name what makes no sense, counts it, and serves on.

Its value is afterwards what the good worker's updates alone have made of it, to the bit.
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

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore, HashStore

from paceline import Adam, Bound, ClusterError, Compensated, Fp16, Momentum, Quorum, RoundRobin, Sgd
from paceline.endpoint import Message
from paceline.op import drive
from paceline.server import dispatcher as desk
from paceline.server import shard
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

pytestmark = pytest.mark.timeout(60)
FINE = torch.ones(NUMEL)
EXTENT = torch.tensor([0, 10, LAYOUT.workers])


def told(answer: Message) -> str:
    assert answer.kind in ("refused", "away"), f"it was answered by '{answer.kind}'"
    return bytes(answer.tensors[0].tolist()).decode()


def bad(value: float) -> Tensor:
    update = FINE.clone()
    update[NUMEL // 2] = value
    return update


def runs(*pairs: list[int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)


@pytest.mark.parametrize(
    ("kind", "tensors", "numbers", "reason"),
    [
        ("push", (FINE[1:],), {}, r"torch.float32 values of shape \(63,\) for a shard of torch.float32 and \(64,\)"),
        ("push", (FINE.view(8, 8),), {}, r"torch.float32 values of shape \(8, 8\)"),
        ("push", (FINE.sum(),), {}, r"torch.float32 values of shape \(\)"),
        ("push", (torch.ones(1000),), {}, r"torch.float32 values of shape \(1000,\)"),
        ("push", (FINE.double(),), {}, "torch.float64 values"),
        ("push", (FINE.long(),), {}, "torch.int64 values"),
        ("push", (FINE.bool(),), {}, "torch.bool values"),
        ("push", (FINE[1:],), {"samples": 0}, r"torch.float32 values of shape \(63,\)"),
        ("push", (), {}, "an update is one tensor, or one and its runs, not 0 tensors"),
        ("push", (FINE, runs([0, NUMEL]), FINE), {}, "not 3 tensors"),
        ("push", (FINE,), {"version": 2}, "it was computed from version 2, but this shard has made only 1"),
        ("push", (FINE,), {"version": 2**62}, "but this shard has made only 1"),
        ("push", (FINE,), {"version": -1}, "its version is -1, which is not between 0 and"),
        ("push", (FINE,), {"version": 2**64 - 1}, "its version is 18446744073709551615"),
        ("push", (FINE,), {"samples": -1}, "its samples is -1"),
        ("push", (FINE,), {"samples": 2**63}, "its samples is 9223372036854775808"),
        ("push", (FINE,), {"serial": -1}, "its serial is -1"),
        ("push", (FINE,), {"steps": -1}, "its steps is -1"),
        ("push", (FINE,), {"steps": 1}, "it says that it has done 1 parts, and was given 0"),
        ("push", (bad(nan),), {}, "it holds NaN or infinity"),
        ("push", (bad(-inf),), {}, "it holds NaN or infinity"),
        ("push", (FINE[:4], runs([NUMEL - 3, 4])), {}, "runs overlap, or end after the last of 64 values"),
        ("push", (FINE[:4], runs([0, 2], [1, 2])), {}, "runs overlap"),
        ("push", (FINE[:4], runs([-4, 4])), {}, "runs from -4 to -4"),
        ("push", (FINE[:4], runs([0, 2**63 - 1], [1, 1])), {}, "of lengths from 1 to 9223372036854775807"),
        ("push", (FINE[:4], runs([0, 4]).float()), {}, "runs are pairs of int64, not torch.float32"),
        ("push", (FINE[:4], torch.tensor(4)), {}, r"not torch.int64 of shape \(\)"),
        ("push", (FINE[:4], runs([0, 5])), {}, r"torch.float32 values of shape \(4,\) for runs of 5 values"),
        ("push", (bad(nan)[31:35], runs([0, 4])), {}, "it holds NaN or infinity"),
        ("draw", (), {}, "it gave nothing"),
        ("draw", (EXTENT, EXTENT), {}, "it gave torch.int64 of shape"),
        ("draw", (EXTENT.float(),), {}, r"it gave torch.float32 of shape \(3,\)"),
        ("draw", (torch.full((3,), nan),), {}, r"it gave torch.float32 of shape \(3,\)"),
        ("draw", (torch.tensor(7),), {}, r"it gave torch.int64 of shape \(\)"),
        ("draw", (EXTENT[:2],), {}, r"it gave torch.int64 of shape \(2,\)"),
        ("draw", (EXTENT,), {"samples": 0}, "it wants 0 parts"),
        ("draw", (EXTENT,), {"samples": 2**62}, "its samples is 4611686018427387904"),
        ("draw", (torch.tensor([0, 9, 2**40]),), {}, "cut into 1099511627776 parts, and they are cut into 3"),
        ("start", (), {}, r"a value is one vector of real numbers, not \[\]"),
        (
            "start",
            (FINE.view(8, 8),),
            {},
            r"a value is one vector of real numbers, not \[\(torch.float32, \(8, 8\)\)\]",
        ),
        ("start", (FINE.long(),), {}, "a value is one vector of real numbers"),
        ("join", (), {"samples": 3}, "there is no seat 3: each minibatch is cut into 3 parts"),
        ("ask exchange", (), {"serial": -5}, "its serial is -5"),
        ("lost", (), {"samples": 0}, "there is no request of the kind 'lost'"),
        ("value", (FINE,), {}, "there is no request of the kind 'value'"),
        ("", (), {}, "there is no request of the kind ''"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    kind: str, tensors: tuple[Tensor, ...], numbers: dict[str, int], reason: str
):
    with serving() as (server, good, (rogue,)):
        good.exchange()
        answer = rogue.ask(kind, *tensors, **{"samples": 1, **numbers})
        assert re.search(reason, told(answer)), told(answer)
        assert server.shard.last_refusal == f"a '{kind}' of worker {ROGUE}: {told(answer)}"
        assert server.refused == (0, 1)
        good.exchange()
    assert server.refused == (0, 1)


def test_a_worker_is_told_what_was_wrong_with_its_update():
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
def test_what_decodes_to_nan_or_infinity_is_refused(data: Tensor):
    with serving(codec=Fp16()) as (server, good, (rogue,)):
        good.exchange()
        assert told(rogue.ask("push", data, samples=1)) == "it holds NaN or infinity"
        assert "decodes a 1-D uint8 tensor" in told(rogue.ask("push", data.view(2, -1), samples=1))
        assert "to decode" in told(rogue.ask("push", data[1:], samples=1))
        assert "torch.uint8 values of shape" in told(rogue.ask("push", data, runs([0, 4]), samples=1))
        assert server.refused == (0, 4)


def test_an_update_of_some_values_is_refused_where_the_rule_needs_all():
    with serving(Compensated(Sgd(lr=0.5), lam=1.0)) as (server, good, (rogue,)):
        good.exchange()
        rogue.ask("pull")
        good.exchange()
        assert "it is of some values alone" in told(rogue.ask("push", FINE[:4], runs([0, 4]), samples=1))
        assert server.refused == (0, 1)


def test_a_number_of_samples_that_no_mean_can_bear_is_refused():
    with serving(Quorum(Sgd(lr=0.5), least=1)) as (server, good, (rogue,)):
        good.exchange()
        assert "its samples is" in told(rogue.ask("push", FINE, samples=2**64 - 1))
        assert server.refused == (0, 1)


def test_minibatches_done_cannot_be_so_many_that_nobody_can_be_told():
    with serving() as (server, good, (rogue,)):
        good.draws = False
        good.exchange()
        for _ in range(3):
            assert "its steps is" in told(rogue.ask("push", FINE, samples=0, steps=2**63))
        assert rogue.ask("join", samples=1, serial=1).kind == "value"
        assert server.refused == (0, 3)


# Before there is a value.


@pytest.mark.parametrize(
    "tensors", [(), (torch.ones(3),), (FINE.long(),), (FINE.view(8, 8),)], ids=["none", "short", "whole", "matrix"]
)
def test_the_first_value_is_the_first_workers_to_bring(tensors: tuple[Tensor, ...]):
    with serving() as (server, good, (rogue,)):
        assert told(rogue.ask("start", *tensors)) == "the first value is worker 0's to bring"
        good.exchange()
        assert server.refused == (0, 1)


def test_asking_again_for_what_was_never_asked_spoils_no_memory():
    with serving(Adam(lr=0.5)) as (server, good, (rogue,)):
        assert rogue.ask("ask exchange").kind == "wait"
        good.exchange()
        assert rogue.ask("ask exchange").kind == "value"
        assert server.refused == (0, 0)


# A shard that is full.


def test_of_one_worker_only_so_many_requests_are_kept():
    with serving(Momentum(lr=0.5), RoundRobin()) as (server, good, (rogue,)):
        for i in range(shard.MOST_HELD):
            rogue.say("exchange", FINE, serial=i + 1)
        assert told(rogue.ask("exchange", FINE, serial=100)).startswith("64 of its requests wait to be answered")
        assert server.refused == (0, 1)
        for i in range(3):
            good.exchange()
            answer = rogue.hear()
            assert (answer.kind, answer.serial) == ("value", i + 1)


def test_before_the_first_value_no_more_are_kept_either():
    with serving() as (server, good, (rogue,)):
        for i in range(shard.MOST_HELD):
            rogue.say("pull", serial=i + 1)
        assert "64 of its requests wait" in told(rogue.ask("pull", serial=100))
        good.exchange()
        assert [rogue.hear().kind for _ in range(shard.MOST_HELD)] == ["value"] * shard.MOST_HELD
        assert server.refused == (0, 1)


def test_parts_are_given_out_few_at_a_time():
    with serving() as (_, good, (rogue,)):
        good.exchange()
        given = rogue.ask("draw", torch.tensor([0, 2**62, 3]), samples=2**31, serial=0)
        assert given.kind == "tickets" and len(given.tensors[0]) == desk.MOST_DRAWN


def test_of_one_who_wants_work_only_the_last_wish_is_kept():
    with serving() as (server, good, (rogue,)):
        good.draws = False
        good.exchange()
        for i in range(2000):
            rogue.say("draw", torch.tensor([0, 1, 3]), samples=1, serial=i + 1, steps=1)
        assert [rogue.hear().kind for _ in range(2000)] == ["tickets"] * 3 + ["idle"] * 1997
        assert kept(server.shard, set()) < 1000


# Who comes and goes.


def test_nobody_comes_back_who_has_left():
    with serving(gate=Bound(1000)) as (server, good, (rogue,)):
        good.exchange()
        rogue.say("leave", serial=7)
        for kind in ("pull", "push", "ask exchange", "draw", "start", "rest"):
            assert "it is not, or no longer, among the workers" in told(rogue.ask(kind, FINE, samples=1))
        rogue.say("wake")
        assert "it has left" in told(rogue.ask("join", serial=8))
        assert server.refused == (0, 7)


def test_only_those_who_are_there_can_rest():
    with serving(gate=Bound(1000), rogues=(ROGUE, NEWCOMER)) as (server, good, (_, newcomer)):
        good.exchange()
        for kind in ("rest", "pull"):
            assert "it may join" in told(newcomer.ask(kind))
        assert newcomer.ask("join").kind == "value"
        newcomer.say("rest")
        assert newcomer.ask("pull").kind == "value"
        assert server.refused == (0, 2)


@pytest.mark.parametrize("gate", [Bound(0), RoundRobin()], ids=str)
def test_who_asks_and_rests_is_answered(gate: Any):
    with serving(gate=gate) as (server, good, (rogue,)):
        good.store.pull().wait()
        for serial in (1, 2):
            rogue.say("exchange", FINE, serial=serial)
        rogue.say("rest")
        assert [rogue.hear().serial for _ in range(2)] == [1, 2]
        assert server.refused == (0, 0)


def test_a_part_is_done_once_however_often_that_is_said():
    with serving(gate=RoundRobin()) as (server, good, (rogue,)):
        good.exchange()
        assert rogue.ask("draw", EXTENT, samples=1, serial=1).kind == "tickets"
        rogue.say("rest")
        good.exchange()
        for serial in (2, 3):
            rogue.say("exchange", FINE, serial=serial, steps=1)
        good.exchange()
        good.exchange()
        assert [rogue.hear().kind for _ in range(2)] == ["value", "refused"]
        assert (
            server.shard.last_refusal
            == f"a 'push' of worker {ROGUE}: it says that it has done 1 parts, and was given 0"
        )


def test_what_one_who_leaves_has_not_done_is_for_others():
    with serving(rogues=(ROGUE, OTHER)) as (_, good, (rogue, other)):
        good.draws = False
        good.exchange()
        assert rogue.ask("draw", torch.tensor([0, 1, 3]), samples=1, serial=1).tensors[0].tolist() == [[0, 1]]
        assert [other.ask("draw", EXTENT, samples=1, serial=i, steps=1).kind for i in (1, 2, 3)] == [
            "tickets",
            "tickets",
            "idle",
        ]
        rogue.say("leave")
        assert other.hear().tensors[0].tolist() == [[0, 1]]


def test_a_shard_ends_though_somebody_goes_on_talking(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shard, "LINGER_S", 0.05)
    keys = HashStore()
    server, good, rogues = Server(keys, SGD), Good(keys, SGD), [Rogue(rank, keys) for rank in (ROGUE, OTHER)]
    good.exchange()
    for rogue in rogues:
        rogue.say("leave")
    assert torch.equal(drive(good.store.leave()), good.expected)
    end = time.monotonic() + 10
    while server.thread.is_alive() and time.monotonic() < end:  # They never say that they have heard how it ended.
        rogues[0].say("leave")
        time.sleep(0.01)
    assert not server.thread.is_alive()
    for box in (good.box, *(rogue.box for rogue in rogues)):
        box.close(linger_s=0)


def test_who_does_not_take_its_answers_is_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outbox, "UNREAD_NBYTES", 2**20)
    with serving(numel=2**16, is_far=False) as (server, good, (rogue,)):
        server.box.timeout_s = 0.2
        good.exchange()
        for serial in range(10):
            rogue.say("pull", serial=serial + 1)
        while ROGUE in server.shard.clocks:
            server.assert_lives()
            time.sleep(0.01)
        good.exchange()
        while (answer := rogue.hear()).kind == "value":
            del answer  # Now it does, too late.
        assert "it is not, or no longer, among the workers" in told(answer)


# A shard that is gone.


def serve_in_a_process(path: str) -> None:
    torch.set_num_threads(1)
    Server(FileStore(path), SGD).thread.join()


@pytest.mark.dist
def test_a_worker_is_told_at_once_that_a_shard_is_gone(tmp_path: Path):
    path = str(tmp_path / "keys")
    child = multiprocessing.get_context("fork").Process(target=serve_in_a_process, args=(path,))
    child.start()
    good = Good(FileStore(path), SGD)
    try:
        good.exchange()
        child.kill()
        began = time.monotonic()
        with pytest.raises(ClusterError, match=r"^server 0 \(rank 3\) is gone, and the run cannot go on without it$"):
            good.store.exchange(FINE, samples=1).wait()
        assert time.monotonic() - began < 3
    finally:
        child.kill()
        child.join()
        good.box.close(linger_s=0)


def test_a_shard_that_says_nothing_is_named():
    keys = HashStore()
    silent, good = mailbox_of(SERVER, keys), Good(keys, SGD, patience_s=0.02)
    with closing(silent), closing(good.box):
        with pytest.raises(
            ClusterError, match=r"^server 0 \(rank 3\) has not answered a 'exchange' of worker 0: it is gone, or stuck$"
        ):
            good.store.exchange(FINE, samples=1).wait()
        good.box.close(linger_s=0)
