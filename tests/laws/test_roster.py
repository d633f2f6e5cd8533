"""The roster of workers: its invariants hold for any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.protocol.roster import FINAL, MEMBERS, Change, Roster, State

RANKS = 4
events = st.one_of(
    st.tuples(st.sampled_from(["idle", "wake", "leave", "die", "suspect"]), st.integers(0, RANKS)),
    st.tuples(st.sampled_from(["join", "suspect"]), st.integers(0, RANKS), st.integers(0, 4)),
)


@given(st.lists(events, max_size=60))
def test_any_sequence_of_events_keeps_the_invariants(sequence: list[tuple[str, int] | tuple[str, int, int]]):
    roster = Roster(range(RANKS))
    for name, rank, *more in sequence:
        states = {r: roster.state(r) for r in range(RANKS + 1)}
        incarnations = {r: roster.incarnation(r) for r in range(RANKS + 1)}
        changes: list[Change] = getattr(roster, name)(rank, *more)
        last = states[rank]
        for change in changes:  # The changes together are the whole difference.
            assert change.rank == rank and change.before is last and change.after is not last
            last = change.after
        assert roster.state(rank) is last
        for other in range(RANKS + 1):
            now, before = roster.state(other), states[other]
            assert roster.incarnation(other) >= incarnations[other], "an incarnation never comes back"
            if other != rank:
                assert now is before and roster.incarnation(other) == incarnations[other]
            if before is State.DEAD:
                assert now is State.DEAD
            if before is State.LEFT:
                assert now in FINAL
            if before in MEMBERS and now is State.SUSPECTED:
                assert roster.incarnation(other) > incarnations[other], "what it has asked for before is void"
            if before is State.SUSPECTED and now in MEMBERS:
                assert name == "join" and more[0] >= incarnations[other]
            assert roster.is_member(other) == (now in MEMBERS) == (other in roster.members)
        assert set(roster.active) <= set(roster.members)
        assert set(roster.ranks_in(State.IDLE)) == set(roster.members) - set(roster.active)


@given(
    st.lists(events, max_size=30), st.tuples(st.sampled_from(["idle", "wake", "leave", "die"]), st.integers(0, RANKS))
)
def test_a_repeated_event_changes_nothing(
    sequence: list[tuple[str, int] | tuple[str, int, int]], event: tuple[str, int]
):
    roster = Roster(range(RANKS))
    for name, *given_ in [*sequence, event]:
        getattr(roster, name)(*given_)
    assert getattr(roster, event[0])(event[1]) == []


def test_a_suspected_worker_joins_in_its_next_incarnation():
    roster = Roster(range(2))
    assert roster.suspect(1) == [Change(1, State.ACTIVE, State.SUSPECTED, 0)]
    assert roster.members == [0] and roster.incarnation(1) == 1
    assert roster.join(1, 0) == [] and roster.wake(1) == [] and roster.idle(1) == []
    assert roster.join(1, 1) == [Change(1, State.SUSPECTED, State.ACTIVE, 1)]
    assert roster.suspect(1, incarnation=0) == [], "another server suspected what is over"
    assert roster.members == [0, 1]


def test_a_newer_incarnation_ends_the_older_one_first():
    roster = Roster(range(2))
    changes = roster.join(1, 1)
    assert [change.after for change in changes] == [State.SUSPECTED, State.ACTIVE]
    assert [change.is_loss for change in changes] == [True, False] and roster.incarnation(1) == 1


@pytest.mark.parametrize("end", ["leave", "die"])
def test_a_worker_that_has_left_or_is_dead_does_not_join(end: str):
    roster = Roster(range(2))
    getattr(roster, end)(1)
    assert roster.join(1, 7) == [] and not roster.is_member(1) and roster.incarnation(1) == 0


def test_a_worker_that_is_dead_before_it_joins_never_does():
    roster = Roster()
    assert roster.die(5) == [Change(5, None, State.DEAD, 0)]
    assert roster.join(5) == [] and roster.members == []
