"""The failure detector, driven by made-up times: which ranks it suspects, and which it declares dead."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.transport.failure_detector import DRAIN_S, FailureDetector


def suspected(detector: FailureDetector, times: range, heartbeats: dict[int, int]) -> list[tuple[int, list[int]]]:
    """Check at each time, with a heartbeat of a rank at some of them; the times at which ranks became suspected."""
    found: list[tuple[int, list[int]]] = []
    for now in times:
        if now in heartbeats:
            detector.heartbeat(heartbeats[now], now)
        if ranks := detector.check(now):
            found.append((now, ranks))
    return found


def test_a_rank_that_never_sent_a_heartbeat_is_not_suspected():
    assert suspected(FailureDetector(0.0, silent_s=4.0), range(20), {}) == []


def test_a_rank_is_suspected_once_and_again_after_another_heartbeat():
    detector = FailureDetector(0.0, silent_s=4.0)
    assert suspected(detector, range(20), {0: 7, 10: 7}) == [(5, [7]), (15, [7])]


def test_a_rank_with_regular_heartbeats_is_not_suspected():
    detector = FailureDetector(0.0, silent_s=4.0)
    assert suspected(detector, range(20), {now: 7 for now in range(0, 20, 4)}) == []


def test_a_process_that_was_stopped_itself_does_not_suspect_the_others():
    detector = FailureDetector(0.0, silent_s=4.0)
    detector.heartbeat(7, 0.0)
    assert suspected(detector, range(100, 106), {}) == [(105, [7])], "the silence is counted from 100 on"


def test_checks_are_due_four_times_within_the_limit():
    detector = FailureDetector(0.0, silent_s=4.0)
    assert detector.check_s == 1.0
    assert not detector.is_due(0.9) and detector.is_due(1.0)
    detector.check(1.0)
    assert not detector.is_due(1.9) and detector.is_due(2.0)


def test_without_a_limit_no_rank_is_suspected_and_no_check_is_due():
    detector = FailureDetector(0.0)
    detector.heartbeat(7, 0.0)
    assert detector.check_s is None and not detector.is_due(1e9) and detector.check(1e9) == []


def test_an_ended_process_is_dead_as_soon_as_nothing_is_in_flight():
    detector = FailureDetector(0.0)
    detector.process_ended(3, 10.0)
    assert not detector.confirm_death(3, 10.0, is_drained=False) and detector.dead == set()
    assert detector.confirm_death(3, 10.1, is_drained=True) and detector.dead == {3}


def test_an_ended_process_is_dead_after_a_time_without_its_messages():
    """Messages of others may be in flight forever."""
    detector = FailureDetector(0.0)
    detector.process_ended(3, 10.0)
    detector.message(5, 10.9)
    assert not detector.confirm_death(3, 10.0 + 0.9 * DRAIN_S, is_drained=False)
    assert detector.confirm_death(3, 10.0 + DRAIN_S, is_drained=False)


def test_each_last_message_of_an_ended_process_extends_the_time():
    detector = FailureDetector(0.0)
    detector.process_ended(3, 10.0)
    detector.message(3, 10.0 + 0.9 * DRAIN_S)
    assert not detector.confirm_death(3, 10.0 + 1.8 * DRAIN_S, is_drained=False)
    assert detector.confirm_death(3, 10.0 + 1.9 * DRAIN_S, is_drained=False)


def test_a_dead_rank_is_not_suspected():
    detector = FailureDetector(0.0, silent_s=4.0)
    detector.heartbeat(3, 0.0)
    detector.process_ended(3, 1.0)
    assert detector.confirm_death(3, 1.0, is_drained=True)
    detector.heartbeat(3, 1.0)
    assert suspected(detector, range(1, 20), {}) == []


def test_a_death_is_confirmed_only_after_the_end_of_the_process():
    with pytest.raises(KeyError):
        FailureDetector(0.0).confirm_death(3, 1.0, is_drained=True)


events = st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from([None, 0, 1, 2])), max_size=60)


@given(events=events)
@settings(deadline=None)
def test_a_suspected_rank_was_silent_and_every_silent_rank_is_found(events: list[tuple[float, int | None]]):
    """Three ranks, a limit of 4 s, and a check at every event; the checking process is never stopped for long."""
    detector = FailureDetector(0.0, silent_s=4.0)
    last: dict[int, float] = {}
    now = 0.0
    for pause, rank in events:
        steps = max(1, round(pause))
        for _ in range(steps):
            now += pause / steps
            for found in detector.check(now):
                assert now - last.pop(found) > 4.0
        if rank is not None:
            detector.heartbeat(rank, now)
            last[rank] = now
    assert all(now - heartbeat <= 4.0 + 1.5 for heartbeat in last.values())
