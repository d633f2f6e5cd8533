"""The lane: one thread, one order, and nobody who waits for what is never done."""

from __future__ import annotations

import threading

import pytest

from paceline import ClusterError
from paceline.transport.comm_thread import CommThread


def test_all_is_done_in_the_order_of_asking_and_in_one_other_thread():
    lane, done = CommThread(), []
    ops = [
        lane.ask("work", lambda i=i: done.append((i, lane.is_here())), lambda _, i=i: (i, lane.is_here()))
        for i in range(20)
    ]
    assert [op.wait() for op in reversed(ops)] == [(i, False) for i in reversed(range(20))]
    assert done == [(i, True) for i in range(20)]
    lane.close()


def test_an_error_is_told_to_whoever_waits_and_to_nobody_else():
    lane = CommThread()
    bad, good = lane.ask("bad", lambda: 1 / 0, str), lane.ask("good", lambda: 1, str)
    assert good.wait() == "1"
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            bad.wait()
    lane.close()


@pytest.mark.parametrize("was_used", [False, True])
def test_a_closed_lane_refuses_work_instead_of_never_doing_it(was_used: bool):
    lane, before = CommThread(), threading.active_count()
    if was_used:
        lane.ask("work", lambda: None, lambda _: None).wait()
    lane.close()
    lane.close()
    assert threading.active_count() == before
    with pytest.raises(ClusterError, match="'mean' was begun after the job was closed"):
        lane.ask("mean", lambda: None, lambda _: None)
