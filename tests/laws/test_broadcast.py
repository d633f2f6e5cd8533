"""The broadcast log delivers each message to all workers exactly once; a repeated request gets the same reply."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline import (
    Cluster,
    Faults,
    LogNormal,
    Replica,
    Strategy,
    simulate,
)
from paceline.families.broadcast import BroadcastLog, Numbers
from paceline.families.pairing import PairBusy, PairOffer
from paceline.families.peers import Peers
from paceline.families.run_end import RunEnd
from paceline.needs import Needs
from paceline.protocol.requests import Deduplicator, Verdict
from tests.laws.tasks import quadratic

WORKERS, MESSAGES = 4, 12


@dataclass(frozen=True)
class Broadcasting(Strategy):
    """Each worker broadcasts pairs of its rank and a number.  `delivered` lists what each worker has received."""

    delivered: dict[int, list[tuple[int, int]]] = field(default_factory=dict[int, list[tuple[int, int]]])
    needs: ClassVar[Needs] = Needs(collectives=False, messages=True)

    async def worker(self, w: Replica) -> None:
        mine = self.delivered[w.rank] = []

        async def deliver(data: Tensor, rate: float) -> None:
            sender, number = data.tolist()
            assert rate == rate_of(number)
            mine.append((sender, number))

        peers = Peers(w)
        log = BroadcastLog(peers, deliver)
        end = RunEnd(peers, log)
        await peers.join()
        for number in w.steps_alone():
            await w.gradient()  # Takes a different time on each worker.
            mine.append((w.rank, number))
            await log.broadcast(torch.tensor([w.rank, number]), rate_of(number))
            await peers.handle_all()
        await end.wait_for_all()


def rate_of(number: int) -> float:
    return 1 / (1 + number)


def delivered(seed: int, faults: Faults) -> dict[int, list[tuple[int, int]]]:
    """What each worker has received, with its own messages."""
    strategy = Broadcasting()
    task = quadratic(steps=MESSAGES, batch=WORKERS)
    simulate(task, strategy, Cluster(WORKERS, compute=LogNormal("10ms", 1.0), seed=seed), faults=faults)
    return strategy.delivered


@pytest.mark.parametrize("seed", range(10))
def test_each_message_is_delivered_exactly_once(seed: int):
    found = delivered(seed, Faults(lost=0.2, doubled=0.2, retransmit_s=0.05) if seed % 2 else Faults())
    everything = [(rank, number) for rank in range(WORKERS) for number in range(MESSAGES)]
    assert all(sorted(messages) == everything for messages in found.values())


@pytest.mark.parametrize("seed", range(20))
def test_a_message_of_a_dead_worker_reaches_all_or_none(seed: int):
    chance = Random(seed)
    dead = chance.sample(range(WORKERS), chance.randrange(1, WORKERS))
    deaths = {rank: chance.uniform(0.0, 0.15) for rank in dead}
    faults = Faults(deaths, notice=chance.choice([0.0, 0.05]), lost=0.1, doubled=0.1, retransmit_s=0.05)
    found = delivered(seed, faults)
    living = [sorted(found[rank]) for rank in range(WORKERS) if rank not in dead]
    assert all(messages == living[0] for messages in living)
    assert len(set(living[0])) == len(living[0]), "a message was delivered twice"


@given(st.lists(st.integers(1, 30), unique=True), st.integers(0, 30))
def test_numbers_received_and_missing_are_all_numbers(received: list[int], count: int):
    numbers = Numbers()
    for number in received:
        numbers.add(number)
    assert all((number in numbers) == (number in received) for number in range(1, 40))
    assert numbers.missing(count) == [number for number in range(1, count + 1) if number not in received]
    assert all(number in received for number in range(1, numbers.upto + 1))


def offer(number: int) -> PairOffer:
    return PairOffer(torch.zeros(1), request_id=number, src=1)


def test_a_repeated_request_gets_the_kept_reply_until_it_has_arrived():
    seen = Deduplicator()
    assert seen.accept(offer(3)) is Verdict.NEW and seen.newest(1) == 3
    reply = seen.keep(1, PairBusy())
    assert seen.kept_reply(offer(3)) is reply and seen.kept_reply(offer(2)) is None
    seen.drop_reply(1, 2)
    assert seen.kept_reply(offer(3)) is reply, "another reply has arrived"
    seen.drop_reply(1, 3)
    assert seen.kept_reply(offer(3)) is None and seen.judge(offer(3)) is Verdict.REPEATED


def test_a_skipped_request_is_not_new_when_it_arrives_later():
    seen = Deduplicator()
    seen.skip(1, 5)
    assert seen.judge(offer(5)) is Verdict.REPEATED and seen.judge(offer(6)) is Verdict.NEW
    seen.skip(1, 4)
    assert seen.newest(1) == 5
