"""The state of servers: saved, loaded and resharded, a shard continues as if it had not stopped."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import Cluster, Sandblaster, simulate
from paceline.endpoint import Layout
from paceline.families.line_search import Point
from paceline.server import Shard, WorkItem, WorkQueue
from paceline.server.coordinator import Coordinator
from paceline.server.dispatcher import Dispatcher
from paceline.server.messages import DrawWork, Exchange, Restore, Work
from paceline.server.rules import (
    Adagrad,
    Adam,
    Compensated,
    Momentum,
    Quorum,
    Rule,
    Sgd,
)
from paceline.server.shard_state import Wanted
from paceline.sim.endpoint import SimEndpoint
from paceline.sim.simulator import Simulator
from paceline.sim.world import World
from paceline.state import StateStore, resharded
from paceline.stripes import stripe_of
from tests.laws.every import RULES
from tests.laws.tasks import close, numbers, quadratic, same

WORKERS = 3
NUMEL = 11
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


class Servers:
    """Shards on a simulator.  The test plays the workers."""

    def __init__(self, shards: int) -> None:
        layout = Layout(workers=WORKERS, servers=shards)
        self.simulator = Simulator(layout.name)
        self.world = World(self.simulator, Cluster(workers=WORKERS), layout, strict=True)
        self.shards = [Shard(SimEndpoint(self.world, rank)) for rank in layout.server_ranks]
        self.slices = [stripe_of(index, NUMEL, shards) for index in range(shards)]

    @classmethod
    def begun(cls, shards: int) -> Servers:
        servers = cls(shards)
        for shard, where in zip(servers.shards, servers.slices, strict=True):
            shard.held.begin(numbers(NUMEL, seed=99)[where])
        return servers

    @classmethod
    def resumed(cls, states: Sequence[Mapping[str, Any]], rule: Rule) -> Servers:
        servers = cls(len(states))
        for shard, state in zip(servers.shards, states, strict=True):
            shard.load_state_dict(state)
            shard.declare(rule)
        return servers

    def exchange(self, rule: Rule, updates: range) -> Servers:
        """Apply updates, and answer every worker one update late, so that updates are stale."""
        for shard, where in zip(self.shards, self.slices, strict=True):
            self.simulator.run({shard.endpoint.rank: _exchange(shard, rule, where, updates)})
        return self

    def saved(self) -> list[dict[str, Any]]:
        return [shard.state_dict() for shard in self.shards]

    def value(self) -> Tensor:
        return torch.cat([shard.value for shard in self.shards])


async def _exchange(shard: Shard, rule: Rule, where: slice, updates: range) -> None:
    for n in updates:
        update = Exchange(numbers(NUMEL, seed=n)[where], version=max(0, shard.version - n % 3), samples=1 + n % 2)
        update.src = n % WORKERS
        await shard.apply(rule, update)
        await shard.reply(Wanted((n + 1) % WORKERS, request_id=n, incarnation=0), rule)


def vectors_in(states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Every vector in the states of all shards, joined, by its path."""
    found: dict[str, list[Tensor]] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                visit(f"{path}/{key}", inner)
        elif isinstance(value, Tensor):
            found.setdefault(path, []).append(value)

    for state in states:
        visit("", state["slots"])
    return {path: torch.cat(slices) for path, slices in found.items()}


def is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(is_equal, a, b))
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


def is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and is_plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or type(value) in (int, float, bool, str, Tensor)


# Shards.


@every_rule
@pytest.mark.parametrize("before", [0, 1, 4, 7])
def test_a_shard_that_is_saved_and_loaded_continues_to_the_bit(rule: Rule, before: int):
    unbroken = Servers.begun(1).exchange(rule, range(12))
    saved = Servers.begun(1)
    saved.shards[0].declare(rule)
    saved.exchange(rule, range(before))
    resumed = Servers.resumed(saved.saved(), rule).exchange(rule, range(before, 12))
    assert torch.equal(resumed.value(), unbroken.value())
    assert resumed.shards[0].version == unbroken.shards[0].version
    assert is_equal(resumed.saved(), unbroken.saved())


@every_rule
def test_a_saved_state_is_plain_and_a_copy(rule: Rule):
    servers = Servers.begun(1).exchange(rule, range(5))
    states = servers.saved()
    before = copy.deepcopy(states)
    assert is_plain(states)
    servers.exchange(rule, range(5, 9))
    assert is_equal(states, before)
    Servers.resumed(states, rule).exchange(rule, range(5, 9))
    assert is_equal(states, before)


@every_rule
@pytest.mark.parametrize("shards", [1, 3])
def test_resharded_shards_hold_the_same_vectors_and_continue(rule: Rule, shards: int):
    servers = Servers.begun(2).exchange(rule, range(7))
    states = servers.saved()
    resumed = Servers.resumed(resharded(states, shards), rule)
    old, new = vectors_in(states), vectors_in(resumed.saved())
    assert old.keys() == new.keys() and all(torch.equal(old[path], new[path]) for path in old)
    assert [shard.value.numel() for shard in resumed.shards] == [s.stop - s.start for s in resumed.slices]
    assert {shard.version for shard in resumed.shards} == {servers.shards[0].version}
    assert close(resumed.exchange(rule, range(7, 12)).value(), servers.exchange(rule, range(7, 12)).value())


def test_of_different_versions_and_counters_the_largest_counts():
    servers = Servers.begun(2)
    rule = Adam(lr=0.1)
    for shard, where, count in zip(servers.shards, servers.slices, (3, 5), strict=True):
        servers.simulator.run({shard.endpoint.rank: _exchange(shard, rule, where, range(count))})
    (one,) = resharded(servers.saved(), 1)
    assert one["slots"]["value"]["values"]["version"] == 5
    assert one["slots"]["rule.Adam"]["values"]["steps"] == 5


def test_of_the_copies_that_workers_have_read_those_remain_that_every_shard_has():
    servers = Servers.begun(2)
    rule = Compensated(Sgd(lr=0.1), lam=1.0)
    for shard, where, count in zip(servers.shards, servers.slices, (1, 5), strict=True):
        servers.simulator.run({shard.endpoint.rank: _exchange(shard, rule, where, range(count))})
    (one,) = resharded(servers.saved(), 1)
    assert list(one["slots"]["rule.Compensated"]["values"]["read"]) == [1]


def test_the_updates_that_a_quorum_holds_back_are_kept_and_its_grace_period_starts_again():
    rule = Quorum(Sgd(lr=0.5), least=2, grace=5.0)
    servers = Servers.begun(1).exchange(rule, range(2))
    assert servers.shards[0].version == 0
    values = servers.saved()[0]["slots"]["rule.Quorum"]["values"]
    assert values["srcs"] == [0, 1] and values["until"] is None
    resumed = Servers.resumed(servers.saved(), rule).exchange(rule, range(2, 3))
    assert same(resumed.value(), servers.exchange(rule, range(2, 3)).value())
    assert resumed.shards[0].version == 1  # All three workers have pushed.


def test_a_shard_without_a_value_is_saved_too():
    empty = Servers(1)
    resumed = Servers(1)
    empty.shards[0].declare(Adagrad())
    resumed.shards[0].load_state_dict(empty.shards[0].state_dict())
    resumed.shards[0].declare(Adagrad())
    assert not resumed.shards[0].held.is_there
    resumed.shards[0].held.begin(numbers(NUMEL, seed=99))
    expected = Servers.begun(1).exchange(Adagrad(), range(3))
    assert same(resumed.exchange(Adagrad(), range(3)).value(), expected.value())


def test_two_rules_of_one_class_have_a_slot_each():
    rules = Momentum(lr=0.1), Momentum(lr=0.2)
    servers = Servers.begun(1)
    servers.shards[0].declare(*rules)
    assert [name for name in servers.saved()[0]["slots"] if name.startswith("rule")] == [
        "rule.Momentum",
        "rule.Momentum.2",
    ]


def test_a_loaded_value_is_not_replaced_by_the_first_value_of_a_worker():
    states = Servers.begun(1).exchange(Sgd(), range(3)).saved()
    resumed = Servers.resumed(states, Sgd())
    resumed.shards[0].held.begin(torch.zeros(NUMEL, dtype=torch.float64))
    assert torch.equal(resumed.value(), states[0]["slots"]["value"]["values"]["value"])


# Refusals.


def of_another_version(state: dict[str, Any]) -> None:
    state["slots"]["work"]["version"] = 7


def without_work(state: dict[str, Any]) -> None:
    del state["slots"]["work"]


def without_a_value(state: dict[str, Any]) -> None:
    del state["slots"]["value"]


def of_another_format(state: dict[str, Any]) -> None:
    state["format"] = 99


def of_a_worker(state: dict[str, Any]) -> None:
    state["strategy"] = "AllReduceSGD"


def of_integers(state: dict[str, Any]) -> None:
    state["slots"]["value"]["values"]["value"] = torch.arange(NUMEL)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (of_another_version, "the slot 'work' was saved in version 7"),
        (without_work, "no slot 'work'"),
        (without_a_value, "no slot 'value'"),
        (of_another_format, "format 99"),
        (of_a_worker, "saved under AllReduceSGD"),
        (of_integers, "the saved slot 'value' holds torch.int64"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name_and_nothing_is_loaded(spoil: Any, match: str):
    state = Servers.begun(1).exchange(Sgd(), range(3)).saved()[0]
    spoil(state)
    shard = Servers.begun(1).shards[0]
    before = shard.state_dict()
    with pytest.raises(ValueError, match=match):
        shard.load_state_dict(state)
    assert is_equal(shard.state_dict(), before)


@pytest.mark.parametrize(
    ("saved", "loaded", "match"),
    [
        (Momentum(), Adagrad(), "no slot 'rule.Adagrad', only .*rule.Momentum"),
        (Compensated(Sgd()), Compensated(Sgd(), adaptive=True), "'rule.Compensated' holds .* remembers .*squares"),
        (Compensated(Sgd()), Compensated(Momentum()), r"'rule.Compensated.inner' holds \[\]"),
    ],
)
def test_a_shard_does_not_serve_with_the_memory_of_another_rule(saved: Rule, loaded: Rule, match: str):
    states = Servers.begun(1).exchange(saved, range(3)).saved()
    with pytest.raises(ValueError, match=match):
        Servers.resumed(states, loaded)


def test_a_superfluous_slot_is_refused_by_name():
    servers = Servers.begun(1)
    servers.shards[0].declare(Sgd(), Momentum())
    with pytest.raises(ValueError, match=r"slots \['rule.Momentum'\]"):
        Servers.resumed(servers.saved(), Sgd())


def test_shards_that_were_not_saved_at_the_same_moment_are_refused():
    begun, empty = Servers.begun(2), Servers(2)
    with pytest.raises(ValueError, match="'value' differs in its kind"):
        resharded([begun.saved()[0], empty.saved()[1]], 1)


# Work.


@pytest.mark.parametrize("seed", range(50))
def test_a_loaded_work_queue_hands_out_every_remaining_item_exactly_once(seed: int):
    chance = Random(seed)
    parts, last = chance.randrange(1, 5), chance.randrange(1, 8)
    queue, done = WorkQueue(0, last, parts), Counter[WorkItem]()
    leased: dict[int, list[WorkItem]] = {worker: [] for worker in range(4)}
    for _ in range(chance.randrange(30)):
        worker = chance.randrange(4)
        if chance.random() < 0.1:
            queue.lose(worker)
            leased[worker].clear()
        elif chance.random() < 0.6:
            leased[worker] += queue.take(worker, chance.randrange(1, 4))
        elif leased[worker]:
            queue.do(worker, 1)
            done[leased[worker].pop(0)] += 1
    state = queue.save()
    assert is_plain(state)
    loaded = WorkQueue.load(state)
    for worker in range(4):  # Each has done some of its items, and pushes them later.
        kept = chance.randrange(len(leased[worker]) + 1)
        loaded.keep(worker, kept)
        done.update(leased[worker][:kept])
        loaded.do(worker, kept)
    longer = last + chance.randrange(3)
    loaded.extend(longer)
    finish(loaded, done, chance)
    assert done == Counter(WorkItem(step, part) for step in range(longer) for part in range(parts))


def finish(queue: WorkQueue, done: Counter[WorkItem], chance: Random) -> None:
    while not queue.is_over:
        worker = chance.randrange(4)
        items = queue.take(worker, chance.randrange(1, 4))
        queue.do(worker, len(items))
        done.update(items)


@pytest.mark.parametrize("seed", range(50))
def test_with_another_number_of_workers_every_sample_of_a_minibatch_is_in_one_item(seed: int):
    """What was begun is finished in the old parts, also if the number changes twice."""
    chance = Random(seed)
    last, numbers_of_workers = chance.randrange(1, 6), [chance.randrange(1, 5) for _ in range(3)]
    queue, done = WorkQueue(0, last, numbers_of_workers[0]), Counter[WorkItem]()
    for workers in numbers_of_workers[1:]:
        for _ in range(chance.randrange(5)):
            worker = chance.randrange(4)
            queue.keep(worker, 0)  # What it had before goes to others.
            items = queue.take(worker, chance.randrange(1, 4))
            finished = chance.randrange(len(items) + 1)
            queue.do(worker, finished)
            done.update(item if item.parts else item._replace(parts=queue.data_shards) for item in items[:finished])
            if chance.random() < 0.3:
                queue.lose(worker)
        for worker in range(4):
            queue.keep(worker, 0)
        queue = WorkQueue.load(queue.save())
        queue.recut(workers)
    rest = Counter[WorkItem]()
    finish(queue, rest, chance)
    for item, times in rest.items():
        done[item if item.parts else item._replace(parts=queue.data_shards)] += times
    assert set(done.values()) <= {1}
    for step in range(last):
        assert sum(1 / item.parts for item in done if item.step == step) == pytest.approx(1)


class Dispatch:
    """A dispatcher; the test plays the workers."""

    def __init__(self) -> None:
        self.servers = Servers(1)
        self.endpoint = self.servers.shards[0].endpoint
        self.states = StateStore()
        self.dispatcher = Dispatcher(self.endpoint, self.states)
        self.requests = 0

    def draw(self, worker: int, wanted: int) -> list[WorkItem]:
        self.requests += 1
        request = DrawWork(torch.tensor([0, 6, WORKERS]), wanted, now=True, request_id=self.requests)
        request.src = worker
        self.servers.simulator.run({self.endpoint.rank: self.dispatcher.draw(request, WORKERS)})
        reply = self.servers.world.inboxes[worker].pop()
        return [WorkItem(*item) for item in reply.items.tolist()] if isinstance(reply, Work) else []

    def done(self, worker: int, steps: int) -> None:
        push = Exchange(torch.empty(0), steps=steps)
        push.src = worker
        self.dispatcher.check(push)
        self.servers.simulator.run({self.endpoint.rank: self.dispatcher.note(push)})


def test_a_loaded_dispatcher_gives_leased_items_to_other_workers():
    first, second = Dispatch(), Dispatch()
    done = Counter(first.draw(0, 3)[:2])
    first.draw(1, 2)
    first.done(0, 2)
    second.states.load_state_dict(first.states.state_dict(strategy="Test", step=0), strategy="Test")
    for worker in (0, 1):  # They have no work of before.
        request = Restore("")
        request.src = worker
        second.dispatcher.go_on(request)
    while items := second.draw(2, 5):
        second.done(2, len(items))
        done.update(items)
    assert done == Counter(WorkItem(step, part) for step in range(6) for part in range(WORKERS))


def test_the_work_of_a_replacement_is_that_of_the_worker_which_it_has_replaced():
    """Here rank 0 has taken the place of worker 1."""
    first, second = Dispatch(), Dispatch()
    first.dispatcher.data_shard(0, 1)
    taken = first.draw(0, 2)
    second.states.load_state_dict(first.states.state_dict(strategy="Test", step=0), strategy="Test")
    for worker, steps in ((0, 0), (1, 1)):  # Of two items one was done, and not pushed.
        request = Restore("", steps=steps)
        request.src = worker
        second.dispatcher.go_on(request)
    done = Counter(taken[:1])
    second.done(1, 1)
    while items := second.draw(2, 5):
        second.done(2, len(items))
        done.update(items)
    assert done == Counter(WorkItem(step, part) for step in range(6) for part in range(WORKERS))


def test_only_the_first_of_resharded_shards_has_the_work_queue():
    servers = Servers.begun(2)
    states = servers.saved()
    states[0]["slots"]["work"]["values"] = {"queue": WorkQueue(0, 3, WORKERS).save(), "done": {1: 4}}
    queues = [state["slots"]["work"]["values"]["queue"] for state in resharded(states, 3)]
    assert queues == [WorkQueue(0, 3, WORKERS).save(), None, None]


# A batch method.


@dataclass(frozen=True)
class Watched(Sandblaster):
    """Sandblaster that saves all servers after each step, and may begin with saved ones."""

    begins_with: Sequence[Mapping[str, Any]] | None = None
    ranks: list[Shard] = field(default_factory=list[Shard])
    saved: list[list[dict[str, Any]]] = field(default_factory=list[list[dict[str, Any]]])
    starts: list[float] = field(default_factory=list[float])  # The loss at the start of each line search.

    async def server(self, s: Shard) -> None:
        if self.begins_with is not None:
            s.load_state_dict(self.begins_with[len(self.ranks)])
        self.ranks.append(s)
        await super().server(s)

    async def find(self, c: Coordinator, start: Point) -> Point | None:
        self.starts.append(start.value)
        self.saved.append([s.state_dict() for s in self.ranks])
        return await super().find(c, start)


def run_watched(begins_with: Sequence[Mapping[str, Any]] | None = None, shards: int = 2) -> tuple[Watched, Tensor]:
    strategy = Watched(shards=shards, begins_with=begins_with)
    task = quadratic(steps=4 * 9, batch=4, numel=7, samples=16)
    return strategy, simulate(task, strategy, Cluster(workers=1)).params


@pytest.mark.parametrize("at", [0, 1])
def test_a_batch_method_continues_from_its_saved_servers(at: int):
    unbroken, params = run_watched()
    state = unbroken.saved[at]
    assert is_plain(state)
    assert state[0]["slots"]["coordinator"]["values"]["passes"] >= at + 1
    assert len(unbroken.starts) > at + 1
    resumed, again = run_watched(state)
    assert resumed.starts == unbroken.starts[at:]
    assert torch.equal(again, params)
    coordinator, *vectors = state
    on_three, third = run_watched([coordinator, *resharded(vectors, 3)], shards=3)
    assert on_three.starts == pytest.approx(unbroken.starts[at:])
    assert close(third, params, rtol=1e-9)


def test_a_coordinator_keeps_its_passes_its_budget_and_the_operations_that_it_has_not_sent():
    first, second = (Coordinator(Servers(2).shards[0], push=1, backups=0) for _ in range(2))
    first.passes = 3
    first._extent = [0, 9, 4, WORKERS]
    first.then("axpy", -0.5, "d", "w")
    second.load_state_dict(first.state_dict())
    assert second.passes == 3
    assert second._extent == [0, 9, 4, WORKERS]
    assert second._programs.unsent == ["axpy -0.5 d w"]


def test_a_vector_that_not_all_shards_have_is_refused():
    strategy, _ = run_watched()
    _, *vectors = strategy.saved[0]
    del vectors[1]["slots"]["vectors"]["values"]["named"]["g"]
    with pytest.raises(ValueError, match=r"not all shards have \['g'\]"):
        resharded(vectors, 1)
