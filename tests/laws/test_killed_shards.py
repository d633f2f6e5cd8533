"""Shards that are killed and come back from their logs, in the simulator: no update is lost or applied twice, and what
comes back is what was there, to the bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from paceline import (
    AsyncEASGD,
    AsyncMomentum,
    Cluster,
    DelayCompensated,
    EAWild,
    Faults,
    ParameterServer,
    RoundRobinEASGD,
    Sandblaster,
    Strategy,
    simulate,
)
from paceline.server import shard_log
from paceline.server.rules import Sgd
from paceline.server.shard_log import HEAD, Area, MemoryArea, ShardLog
from tests.laws.tasks import regression
from tests.laws.test_membership import BATCH, METHODS, STEPS, WORKERS, cluster, counting, random_faults, visits

SERVED: dict[str, Any] = METHODS | {
    "async easgd": AsyncEASGD(period=2),
    "round robin easgd": RoundRobinEASGD(period=2),
    "ea-wild": EAWild(servers=2),
    "sandblaster": Sandblaster(),
    "delay compensated": DelayCompensated(lr=0.01),
    "async momentum": AsyncMomentum(lr=0.01),
}
SERVED = {name: replace(strategy, durability="process") for name, strategy in SERVED.items()}


@pytest.fixture(autouse=True)
def logs_are_short(monkeypatch: pytest.MonkeyPatch):
    """So that a run of a few steps takes several snapshots."""
    monkeypatch.setattr(shard_log, "LIMIT_NBYTES", 100)
    monkeypatch.setattr(shard_log, "SNAPSHOTS", 1)


def kills(seed: int, servers: int) -> Faults:
    """Up to seven kills of shards, some of them while another is away."""
    chance = Random(f"shards/{seed}")
    deaths = [(WORKERS + chance.randrange(servers), chance.uniform(0, 0.3)) for _ in range(chance.randrange(1, 8))]
    return Faults(server_deaths=deaths, restart_s=chance.choice([0.001, 0.01, 0.05]))


def durable(servers: int) -> ParameterServer:
    return ParameterServer(rule=Sgd(lr=1.0), servers=servers, durability="process")


def test_every_sample_is_applied_once_in_every_shard_when_shards_are_killed():
    for seed in range(12):
        servers = 1 + seed % 3
        run = simulate(counting(), durable(servers), cluster(seed), faults=kills(seed, servers))
        assert visits(run, 1.0) == [1.0] * (STEPS * BATCH), f"seed {seed}"


def test_every_sample_is_applied_once_when_a_shard_and_workers_are_killed():
    for seed in range(24):
        servers = 1 + seed % 3
        killed = kills(seed, servers)
        faults = replace(random_faults(seed, servers), server_deaths=killed.server_deaths, restart_s=killed.restart_s)
        run = simulate(counting(), durable(servers), cluster(seed), faults=faults)
        assert visits(run, 1.0) == [1.0] * (STEPS * BATCH), f"seed {seed}"


@pytest.mark.parametrize("strategy", SERVED.values(), ids=SERVED)
def test_every_method_ends_and_learns_when_shards_are_killed(strategy: Strategy):
    for seed in range(2):
        faults = kills(seed, strategy.servers)
        run = simulate(regression(steps=STEPS, batch=BATCH), strategy, cluster(seed), faults=faults)
        assert run.params.isfinite().all()
        worked = Counter(p.step for p in run.trace.points if p.staleness is None)
        if not isinstance(strategy, Sandblaster):
            assert all(worked[step] >= WORKERS for step in range(STEPS)), "every part of every minibatch was worked on"


def test_with_one_worker_a_run_whose_shards_are_killed_ends_with_the_same_bits():
    """A single worker sees the same values in the same order, whenever the shards are killed."""
    task = regression(steps=STEPS, batch=BATCH)
    for name in ("soft sync", "downpour", "asgd", "async diloco", "async easgd", "delay compensated", "async momentum"):
        whole = simulate(task, SERVED[name], Cluster(workers=1))
        deaths = [(1 + seed % SERVED[name].servers, 0.003 + 0.011 * seed) for seed in range(9)]
        faults = Faults(server_deaths=deaths, restart_s=0.002)
        broken = simulate(task, SERVED[name], Cluster(workers=1), faults=faults)
        assert torch.equal(broken.params, whole.params), name
        assert broken.seconds > whole.seconds, "it waits for the shards"


def test_a_strategy_that_is_not_durable_refuses_kills_of_its_shards():
    with pytest.raises(ValueError, match=r"ParameterServer\(durability='none'\) loses what a killed server held"):
        simulate(counting(), ParameterServer(), cluster(0), faults=Faults(server_deaths=[(4, 0.1)]))
    with pytest.raises(ValueError, match="rank 0 is not a server"):
        simulate(counting(), durable(2), cluster(0), faults=Faults(server_deaths=[(0, 0.1)]))


# The log.


def area_in(areas: dict[str, Area]) -> Any:
    return lambda name: areas.setdefault(name, MemoryArea())


def test_a_log_that_is_cut_anywhere_in_its_last_record_has_all_others():
    areas: dict[str, MemoryArea] = {}
    log = ShardLog(area_in(areas))
    log.append("first", [torch.arange(3.0)])
    first = log.end
    log.append("second", [torch.ones(5, dtype=torch.bfloat16), torch.empty(0, 2, dtype=torch.int64)])
    whole = bytes(areas["log-0"].data[: log.end])
    for cut in range(first + HEAD.size, len(whole)):  # The head is written last.
        areas["log-0"].data = bytearray(whole[:first] + bytes(HEAD.size) + whole[first + HEAD.size : cut] + bytes(64))
        [(text, [values])] = ShardLog(area_in(areas)).records()
        assert text == "first"
        assert torch.equal(values, torch.arange(3.0))


def test_a_log_with_a_flipped_bit_in_a_head_or_a_description_ends_before_it():
    areas: dict[str, MemoryArea] = {}
    log = ShardLog(area_in(areas))
    log.append("first", [])
    first = log.end
    log.append("second", [])
    for at in range(first, first + HEAD.size + len(b"\x92\xa6second\x90")):
        for bit in range(8):
            areas["log-0"].data[at] ^= 1 << bit
            assert [text for text, _ in ShardLog(area_in(areas)).records()] == ["first"], (at, bit)
            areas["log-0"].data[at] ^= 1 << bit


def test_a_snapshot_that_was_being_written_leaves_the_one_before_and_its_log():
    areas: dict[str, MemoryArea] = {}
    log = ShardLog(area_in(areas))
    for count in (1, 2):
        log.save({"value": torch.full((4,), float(count))})
        log.append(f"after {count}", [])
    before = {name: bytes(area.data) for name, area in areas.items()}
    log.save({"value": torch.full((4,), 3.0)})
    after = bytes(areas["snapshot-1"].data)
    for cut in range(0, len(after), 16):
        for name, data in before.items():
            areas[name].data = bytearray(data)
        # The head is emptied first and written last.
        areas["snapshot-1"].data = bytearray(HEAD.size) + bytearray(after[HEAD.size : cut]) + bytes(len(after))
        again = ShardLog(area_in(areas))
        assert torch.equal(again.snapshot["value"], torch.full((4,), 2.0))
        assert [text for text, _ in again.records()] == ["after 2"]


def test_a_log_does_not_grow_without_bound():
    areas: dict[str, MemoryArea] = {}
    log = ShardLog(area_in(areas))
    sizes = []
    for count in range(200):
        log.append(count, [torch.zeros(10)])
        if log.is_long:
            log.save({"value": torch.zeros(30)})
        sizes.append(sum(len(area.data) for area in areas.values()))
    assert sizes[-1] == sizes[40]
