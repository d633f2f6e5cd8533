"""Torture: plans by seed, bugs planted on purpose are found and made small, and bugs that it has found stay fixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

import paceline as pl
from paceline.codecs import TopK
from paceline.elastic import Proposal, following
from paceline.elastic.undo import Copies
from paceline.protocol.requests import Deduplicator, Verdict
from paceline.protocol.roster import Change, Roster
from paceline.server.gates import Bound, Turns
from paceline.server.rules import Adagrad, Sgd
from paceline.server.shard_log import ShardLog
from paceline.server.shard_state import ShardState
from paceline.server.work_queue import WorkQueue
from paceline.sim.faults import Cut, Faults, Pause, SlowLink
from paceline.study.elastic_plans import is_possible
from paceline.study.fault_plans import KINDS, as_python, drawn_faults, kinds_of
from paceline.study.ordeal import Ordeal
from paceline.study.smaller_plans import smallest
from paceline.study.torture import named, torture

AGREED = {
    "all workers end with the same model",
    "an exchange is committed by all or by none",
    "each minibatch counts once",
}
SERVED = pl.ParameterServer(rule=Sgd(lr=0.05), servers=1)
SHARDED = pl.ParameterServer(rule=Sgd(lr=0.05), servers=2, durability="process")
IN_STEP = pl.StaleSynchronous(lr=0.05, bound=1)


def test_a_seed_gives_the_same_plan_and_the_same_end_every_time():
    first, second = (torture(SERVED, [7, 8]) for _ in range(2))
    assert (first.virtual_s, first.faults, first.failures) == (second.virtual_s, second.faults, second.failures)
    plans = [drawn_faults(seed, SERVED, 4, 0.1, KINDS) for seed in range(300)]
    assert plans[5] == drawn_faults(5, SERVED, 4, 0.1, KINDS) and len({str(plan) for plan in plans}) == 300
    for name in ("deaths", "joins", "suspicions", "pauses", "lost", "doubled", "delayed", "cuts", "slow_links"):
        assert sum(bool(getattr(plan, name)) for plan in plans) > 50, name


def test_only_faults_that_a_method_can_take_are_drawn_and_others_are_refused():
    assert "drop" not in kinds_of(pl.AllReduceSGD())
    for seed in range(60):
        plan = drawn_faults(seed, pl.AllReduceSGD(), 4, 0.1, kinds_of(pl.AllReduceSGD()))
        assert not (plan.lost or plan.doubled) and len(plan.deaths) < 6
        assert any(rank not in plan.deaths for rank in range(4)), "one that knows the state of the run lives"
    with pytest.raises(ValueError, match="it cannot take drop; it can take crash, join"):
        torture("all-reduce-sgd", 1, faults=["drop", "pause"])
    with pytest.raises(ValueError, match="there is no kind 'crush'; the kinds are crash, join"):
        torture(SERVED, 1, faults=["crush"])


@pytest.mark.parametrize("name", ["all-reduce-sgd", "block-momentum", "gossip", "asgd", "hogwild"])
def test_methods_keep_their_promises(name: str):
    tortured = torture(name, 4)
    assert not tortured.failures and tortured.seeds == 4 and tortured.virtual_s > 0


def test_what_torture_checks_is_what_undisturbed_runs_show():
    """Samples are visible in the final model where every sample has the same effect at any time."""
    synchronous, served, gossip = (Ordeal(s).promise for s in (pl.AllReduceSGD(), SERVED, pl.Gossip()))
    assert synchronous.is_exact and synchronous.model is not None and synchronous.agrees
    assert served.samples == 64 and served.model is not None and not served.is_exact
    assert gossip.model is not None and gossip.model.eq(gossip.model[0]).all() and gossip.agrees
    assert Ordeal(pl.AsyncMomentum(lr=0.05)).promise.model is None, "it depends on the order of updates"
    assert Ordeal(pl.Strom(pl.codecs.Threshold(tau=0.01, limit=math.inf), lr=0.05)).promise.mass is not None


# Bugs planted on purpose, one in each layer.  Each is found, and its plan made small.


def applied_again(patch: pytest.MonkeyPatch) -> None:
    """De-duplication: a request that is repeated counts as new."""
    judge = Deduplicator.judge

    def forgetful(self: Deduplicator, request: Any) -> Verdict:
        verdict = judge(self, request)
        return Verdict.NEW if verdict is Verdict.REPEATED else verdict

    patch.setattr(Deduplicator, "judge", forgetful)


def suspected_once(patch: pytest.MonkeyPatch) -> None:
    """Roster: a worker that has come back is never suspected again."""
    suspect = Roster.suspect

    def trusting(self: Roster, rank: int, incarnation: int | None = None) -> list[Change]:
        return [] if self.incarnation(rank) else suspect(self, rank, incarnation)

    patch.setattr(Roster, "suspect", trusting)


def one_too_far(patch: pytest.MonkeyPatch) -> None:
    """Gate: a worker may be one more update ahead than the bound."""
    patch.setattr(Bound, "may_go_on", lambda self, src, clocks: clocks[src] - min(clocks.values()) <= self.bound + 1)


def lost_items(patch: pytest.MonkeyPatch) -> None:
    """Work queue: of the items that a dead worker had leased, the last one is forgotten."""
    lose = WorkQueue.lose

    def careless(self: WorkQueue, worker: int) -> Any:
        if worker in self.leases and self.leases[worker].undone > 1:
            self.leases[worker].items.pop()
        return lose(self, worker)

    patch.setattr(WorkQueue, "lose", careless)


def unapplied(patch: pytest.MonkeyPatch) -> None:
    """Shard state: an update from a version that is 6 older, or more, counts as applied and is not."""
    apply = ShardState.apply

    async def picky(self: ShardState, rule: Any, push: Any, codec: Any, workers: int) -> bool:
        if self.version - push.version >= 6:
            push.update = push.update * 0.0
        return await apply(self, rule, push, codec, workers)

    patch.setattr(ShardState, "apply", picky)


def halves_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Work queue: what the first shard has of a dead worker's updates, all shards have."""
    settle = WorkQueue.settle

    def hasty(self: WorkQueue, which: tuple[int, int], counts: Sequence[int]) -> None:
        settle(self, which, [counts[0]] * len(counts))

    patch.setattr(WorkQueue, "settle", hasty)


def unlogged(patch: pytest.MonkeyPatch) -> None:
    """Log: every 20th record is not written."""
    append = ShardLog.append
    records = count(1)

    def forgetful(self: ShardLog, description: Any, tensors: Any) -> None:
        if next(records) % 20:
            append(self, description, tensors)

    patch.setattr(ShardLog, "append", forgetful)


def forgotten_commits(patch: pytest.MonkeyPatch) -> None:
    """Elastic collectives: after a death all go back to the commit that the slowest of them has."""

    def backwards(now: Any, arrived: Any, left: Any, *more: Any) -> Proposal:
        least = min([*left, *(arrival.committed for arrival in arrived.values())])
        return replace(following(now, arrived, left, *more), committed=least)

    patch.setattr("paceline.elastic.agreement.following", backwards)


def not_undone(patch: pytest.MonkeyPatch) -> None:
    """Elastic collectives: what a failed exchange has changed is not undone before it is repeated."""
    patch.setattr(Copies, "restore", lambda self: None)


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], pl.Strategy, range, set[str]]] = {
    "de-duplication": (applied_again, SERVED, range(40), {"no update is applied twice"}),
    "roster": (suspected_once, SERVED, range(90, 130), {"every run ends"}),
    "gate": (one_too_far, IN_STEP, range(40), {"the staleness bound holds"}),
    "work queue": (lost_items, SERVED, range(60), {"each sample is counted once"}),
    "shard state": (unapplied, SERVED, range(40), {"each sample is counted once"}),
    "landings": (halves_forgotten, SHARDED, range(40), {"each sample is counted once"}),
    "shard log": (unlogged, SHARDED, range(40), {"a shard comes back as it was"}),
    "commits": (forgotten_commits, pl.AllReduceSGD(), range(40), AGREED),
    "undoing": (not_undone, pl.AllReduceSGD(), range(40), AGREED),
}


@pytest.mark.parametrize("layer", PLANTED)
def test_a_bug_planted_on_purpose_is_found_and_made_small(layer: str, monkeypatch: pytest.MonkeyPatch):
    plant, strategy, seeds, invariants = PLANTED[layer]
    ordeal = Ordeal(strategy)  # Its promise is that of the code without the bug,
    if strategy.needs.ordered:
        assert ordeal.elastic.promise.totals is not None  # and so is that of elastic runs.
    plant(monkeypatch)
    for seed in seeds:
        faults = drawn_faults(seed, strategy, 4, ordeal.promise.seconds, kinds_of(strategy))
        if (found := ordeal.violation(seed, faults)) is not None:
            break
    else:
        pytest.fail(f"no seed of {seeds} has found it")
    assert not invariants or found.invariant in invariants

    def fails(smaller: Faults) -> bool:
        if not is_possible(smaller, strategy, 4):
            return False
        again = ordeal.violation(seed, smaller)
        return again is not None and again.invariant == found.invariant

    small = smallest(faults, fails, most_runs=25)
    assert fails(small)
    assert len(as_python(small)) <= len(as_python(faults))


# Plans that torture has found, with what they have broken.

FIXED: dict[str, tuple[pl.Strategy, int, Faults]] = {
    "a late request for work took an item that no worker did": (
        SERVED,
        2,
        Faults(delayed=0.1, delay_s=0.1094, pauses=[Pause(1, 0.0046, 0.1057)], retransmit_s=0.05),
    ),
    "items were done in another order than they were leased": (
        SERVED,
        15,
        Faults(delayed=0.3, delay_s=0.088, silent_s=0.08, retransmit_s=0.05),
    ),
    "a late request for deferred work ended its sender": (
        pl.ParameterServer(rule=Sgd(lr=0.05)),
        3,
        Faults(joins=[0.08], doubled=0.1, delayed=0.1, delay_s=0.02, silent_s=0.08, retransmit_s=0.05),
    ),
    "the first value and the request for it were lost, and it was not asked for again": (
        SERVED,
        77,
        Faults(lost=0.1, delayed=0.02, delay_s=0.0, retransmit_s=0.05),
    ),
    "two requests under way at once took each other's replies": (
        pl.ASGD(period=2, pipeline=True),
        13,
        Faults(lost=0.15, pauses=[Pause(1, 0.0403, 0.0378)], retransmit_s=0.05),
    ),
    "shards disagreed about whose turn it was, after suspicions": (
        named("round-robin-easgd"),
        2,
        Faults(
            lost=0.05,
            doubled=0.02,
            delayed=0.3,
            delay_s=0.0537,
            pauses=[Pause(rank=5, start=0.06, seconds=0.1)],
            cuts=[
                Cut(senders=[0, 1, 2, 3, 5], receivers=[4], start=0.06, seconds=0.147, holds=True),
                Cut(senders=[4], receivers=[0, 1, 2, 3, 5], start=0.06, seconds=0.147, holds=True),
            ],
            silent_s=0.08,
            retransmit_s=0.05,
        ),
    ),
    "shards disagreed about whose turn it was, after a newcomer": (
        named("round-robin-easgd"),
        44,
        Faults(joins=[0.04], lost=0.01, silent_s=0.08, retransmit_s=0.05),
    ),
    "a shard waited for a newcomer that had come too late for the others": (
        named("round-robin-easgd"),
        30,
        Faults(deaths={2: 0.071}, joins=[0.1104, 0.1276], notice=0.03, retransmit_s=0.05),
    ),
    "an old confirmation counted for a newer report, and its sender left": (
        named("strom"),
        82,
        Faults(deaths={0: 0.1}, notice=0.0, lost=0.15, delay_s=0.1, retransmit_s=0.05),
    ),
    "a newcomer's model had a message that it could not relay": (
        named("strom"),
        130,
        Faults(
            deaths={3: 0.0043, 1: 0.0447, 0: 0.1393},
            joins=[0.0096, 0.1477],
            notice=0.0,
            doubled=0.1,
            delayed=0.3,
            delay_s=0.0879,
            retransmit_s=0.05,
        ),
    ),
    "workers that had suspected others waited for different ones to compute the mean": (
        named("gossip"),
        167,
        Faults(
            pauses=[Pause(rank=0, start=0.1, seconds=0.1), Pause(rank=2, start=0.1, seconds=0.1)],
            slow_links=[SlowLink(senders=[1, 3], receivers=[0, 3], start=0.11, seconds=0.18, delay=0.05)],
            silent_s=0.08,
            retransmit_s=0.05,
        ),
    ),
    "a worker that came back pushed what others had done": (
        pl.Downpour(push=3, fetch=2, rule=Adagrad()),
        0,
        Faults(cuts=[Cut([0, 1, 3, 5], [2, 4], 0.03, 0.16, holds=True)], silent_s=0.08, retransmit_s=0.05),
    ),
    "an update that a shard had asked for again was lost with the shard": (
        pl.AsyncDiLoCo(period=4, codec=TopK(0.25), servers=2, durability="process"),
        1,
        Faults(server_deaths=[(5, 0.063), (5, 0.016)], restart_s=0.04),
    ),
    "workers of which some waited for one shard and some for the other waited for each other": (
        pl.AsyncDiLoCo(period=4, servers=2),
        37,
        Faults(
            pauses=[Pause(0, 0.016, 0.089)],
            slow_links=[SlowLink([0, 2, 5], [0, 1, 2, 3, 4], 0.04, 0.07, 0.07)],
            silent_s=0.08,
            retransmit_s=0.05,
        ),
    ),
    "a worker that came back and ended before its next heartbeat was a member for ever": (
        pl.AsyncDiLoCo(period=4, servers=2),
        47,
        Faults(
            joins=[0.029, 0.104],
            delayed=0.1,
            delay_s=0.041,
            pauses=[Pause(0, 0.114, 0.151)],
            silent_s=0.08,
            retransmit_s=0.05,
        ),
    ),
}


@pytest.mark.parametrize("servers", [1, 2])
def test_a_lock_on_shards_is_held_by_one_worker_at_a_time_under_faults(servers: int):
    locked = pl.ParameterServer(rule=Sgd(lr=0.05), gate=Turns(), servers=servers)
    assert not torture(locked, 12).failures


@pytest.mark.parametrize("what", FIXED)
def test_what_torture_has_found_stays_fixed(what: str):
    strategy, seed, faults = FIXED[what]
    assert Ordeal(strategy).violation(seed, faults) is None
