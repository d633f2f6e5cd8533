"""The communication thread: one thread, one order, and no wait for work that is never done."""

from __future__ import annotations

import threading

import pytest

from paceline import ClusterError
from paceline.transport.comm_thread import CommThread


def test_work_is_done_in_the_order_of_submission_and_in_one_other_thread():
    thread, done = CommThread(), []
    ops = [thread.submit("work", lambda i=i: done.append((i, thread.is_current())) or i) for i in range(20)]
    assert [op.wait() for op in reversed(ops)] == [*reversed(range(20))]
    assert done == [(i, True) for i in range(20)]
    thread.close()


def test_an_error_is_raised_where_its_own_work_is_awaited_and_nowhere_else():
    thread = CommThread()
    bad = thread.submit("bad", lambda: 1 / 0)
    good = thread.submit("good", lambda: 1)
    assert good.wait() == 1
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            bad.wait()
    thread.close()


@pytest.mark.parametrize("was_used", [False, True])
def test_a_closed_thread_refuses_work_instead_of_never_doing_it(was_used: bool):
    thread, before = CommThread(), threading.active_count()
    if was_used:
        thread.submit("work", lambda: None).wait()
    thread.close()
    thread.close()
    assert threading.active_count() == before
    with pytest.raises(ClusterError, match="'mean' was started after the job was closed"):
        thread.submit("mean", lambda: None)
