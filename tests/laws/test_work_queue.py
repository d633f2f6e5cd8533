"""The work queue: every part of every minibatch is done once, whatever workers do and whenever they die."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from paceline.server.work_queue import WorkItem, WorkQueue


def all_of(first: int, last: int, data_shards: int) -> list[WorkItem]:
    return [WorkItem(step, data_shard) for step in range(first, last) for data_shard in range(data_shards)]


@pytest.mark.parametrize("seed", range(200))
def test_every_part_is_done_exactly_once_when_workers_die(seed: int):
    chance = Random(seed)
    first, data_shards = chance.randrange(5), chance.randrange(1, 6)
    last = first + chance.randrange(8)
    queue, held, done = WorkQueue(first, last, data_shards), dict[int, list[WorkItem]](), Counter[WorkItem]()
    newest = 4
    workers = list(range(newest))
    while not queue.is_over:
        worker, dice = chance.choice(workers), chance.random()
        mine = held.setdefault(worker, [])
        assert queue.held(worker) == len(mine)
        if dice < 0.5:
            mine += queue.take(worker, chance.randrange(1, 4))
        elif dice < 0.9:
            count = chance.randrange(len(mine) + 1)
            queue.do(worker, count)
            done.update(mine[:count])
            del mine[:count]
        else:  # It dies, and another worker joins.
            queue.lose(worker)
            workers.remove(worker)
            held.pop(worker)
            workers.append(newest)
            newest += 1
    assert done == Counter(all_of(first, last, data_shards))
    assert queue.left == 0 and not queue.take(0)


def test_workers_in_lockstep_keep_their_data_shards():
    queue = WorkQueue(0, 10, data_shards=3)
    for step in range(10):
        assert [queue.take(rank) for rank in range(3)] == [[WorkItem(step, rank)] for rank in range(3)]


def test_each_minibatch_is_started_before_the_next():
    queue = WorkQueue(0, 6, data_shards=4)
    taken = [queue.take(worker)[0] for worker in (3, 3, 3, 1, 0, 2, 2, 9)]
    assert [t.step for t in taken] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert taken[0].data_shard == 3 and taken[4].data_shard == 0 and taken[5].data_shard == 2


def test_the_parts_of_a_dead_worker_are_next():
    queue = WorkQueue(0, 9, data_shards=2)
    for worker in (0, 1, 0, 1, 0):
        queue.take(worker)
    queue.do(0, 1)
    queue.lose(0)
    assert queue.take(5, 3) == [WorkItem(1, 0), WorkItem(2, 0), WorkItem(2, 1)]


@pytest.mark.parametrize(("first", "last", "data_shards"), [(-1, 3, 1), (3, 2, 1), (0, 3, 0)])
def test_impossible_bounds_are_refused(first: int, last: int, data_shards: int):
    with pytest.raises(ValueError, match="counted upwards from 0"):
        WorkQueue(first, last, data_shards)
