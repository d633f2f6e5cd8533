"""The trace: its totals, its digest and its file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import AllReduceSGD, Cluster, ParameterServer, Trace, simulate
from paceline.trace import Evaluation, Point, Span, time_to_loss
from tests.laws.tasks import quadratic

seconds = st.floats(0, 1e9)
counts = st.integers(0, 2**53)
spans = st.builds(Span, counts, st.text(), seconds, seconds, counts)
points = st.builds(
    Point,
    seconds,
    counts,
    counts,
    counts,
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
    st.none() | counts,
)
evaluations = st.builds(
    Evaluation, seconds, counts, st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False))
)


def trace_of(spans: list[Span], points: list[Point], evaluations: list[Evaluation]) -> Trace:
    trace = Trace(points)
    trace.spans, trace.evaluations = spans, evaluations
    return trace


@given(st.builds(trace_of, st.lists(spans), st.lists(points), st.lists(evaluations)))
def test_trace_is_the_same_after_writing_and_reading(trace: Trace):
    again = Trace.loads(trace.dumps())
    assert (again.spans, again.points, again.evaluations) == (trace.spans, trace.points, trace.evaluations)
    assert again.dumps() == trace.dumps() and again.digest() == trace.digest()


def test_trace_of_a_run_is_the_same_after_saving_and_loading(tmp_path: Path):
    task = quadratic(steps=7, batch=4, evaluate=lambda model: {"norm": model.w.norm().item()}, evaluate_every=3)
    trace = simulate(task, ParameterServer(), Cluster(workers=2)).trace
    trace.save(tmp_path / "trace.json")
    again = Trace.loads((tmp_path / "trace.json").read_text())
    assert again.digest() == trace.digest() and again.seconds == trace.seconds > 0
    assert again.staleness() == trace.staleness() and len(again.evaluations) == 3
    assert again.staleness_counts == trace.staleness_counts


def trace_of_updates(stale: list[int | None], keep: int | None = None, rank: int = 2) -> Trace:
    trace = Trace(keep=keep)
    for version, staleness in enumerate(stale):
        trace.point(float(version), rank, version, 8, None, staleness)
    return trace


staleness = st.lists(st.none() | st.integers(0, 9) | counts)


@given(staleness, st.none() | st.integers(1, 5))
def test_every_update_is_counted_once_whether_its_point_is_kept_or_not(stale: list[int | None], keep: int | None):
    trace, updates = trace_of_updates(stale, keep), [s for s in stale if s is not None]
    assert trace.staleness_counts == Counter(updates) and trace.staleness_counts.total() == len(updates)
    assert trace.mean_staleness() == (sum(updates) / len(updates) if updates else None)
    assert trace.staleness() == updates[len(updates) - len(trace.staleness()) :]


@given(staleness, staleness, st.none() | st.integers(1, 5))
def test_staleness_counts_are_saved_and_are_added_when_traces_are_merged(
    stale: list[int | None], others: list[int | None], keep: int | None
):
    trace, other = trace_of_updates(stale, keep), Trace.loads(trace_of_updates(others, keep, rank=3).dumps())
    assert other.staleness_counts == Counter(s for s in others if s is not None)
    trace.merge(other)
    assert trace.staleness_counts == Counter(s for s in stale + others if s is not None)
    again = Trace.loads(trace.dumps())
    assert again.staleness_counts == trace.staleness_counts and again.digest() == trace.digest()


def test_digest_includes_updates_whose_points_are_not_kept():
    fresh, stale = trace_of_updates([0, 0, 1], keep=1), trace_of_updates([5, 0, 1], keep=1)
    assert fresh.points == stale.points and fresh.digest() != stale.digest()


def test_file_without_staleness_counts_gets_them_from_its_points():
    raw = json.loads(trace_of_updates([0, None, 3, 3]).dumps())
    del raw["staleness"]
    assert Trace.loads(json.dumps(raw)).staleness_counts == {0: 1, 3: 2}


@pytest.mark.parametrize("servers", [1, 2])
def test_each_shard_counts_each_update_and_a_run_without_servers_counts_none(servers: int):
    task, cluster = quadratic(steps=5, batch=4), Cluster(workers=2)
    trace = simulate(task, ParameterServer(servers=servers), cluster).trace
    assert trace.staleness_counts.total() == sum(p.rank >= 2 for p in trace.points) == servers * 2 * 5
    assert trace.mean_staleness() == sum(trace.staleness()) / len(trace.staleness())
    trace = simulate(task, AllReduceSGD(), cluster).trace
    assert trace.staleness_counts == {} and trace.mean_staleness() is None


def test_infinite_and_nan_losses_are_saved():
    trace = Trace()
    trace.point(0.0, 0, 0, 1, float("inf"))
    trace.point(0.0, 0, 1, 1, float("nan"))
    again = Trace.loads(trace.dumps())
    assert again.points[0].loss == float("inf") and again.points[1].loss != again.points[1].loss


def test_sums_are_over_the_given_rank_or_kind():
    trace = Trace()
    trace.span(0, "gradient", 0.0, 1.0)
    trace.span(0, "all_reduce", 1.0, 1.5, nbytes=40)
    trace.span(0, "gradient", 1.5, 3.0)
    trace.span(1, "all_reduce", 0.5, 1.5, nbytes=2)
    assert trace.seconds == 3.0
    assert (trace.bytes_sent(), trace.bytes_sent(rank=0), trace.bytes_sent(rank=1)) == (42, 40, 2)
    assert trace.starts("all_reduce") == [0.5, 1.0]
    assert trace.seconds_by_kind(0) == {"gradient": 2.5, "all_reduce": 0.5}
    assert Trace().seconds == 0.0


def test_merged_traces_are_in_the_order_of_time():
    a, b = Trace(), Trace()
    a.span(0, "gradient", 0.0, 2.0)
    a.point(2.0, 0, 0, 4, 1.0)
    b.span(1, "gradient", 0.0, 1.0)
    b.span(1, "gradient", 1.0, 2.0)
    b.point(1.0, 1, 0, 4, 2.0)
    b.evaluation(0.5, 8, {"accuracy": 0.5})
    a.merge(b)
    assert [(s.rank, s.stop) for s in a.spans] == [(1, 1.0), (0, 2.0), (1, 2.0)]
    assert [p.rank for p in a.points] == [1, 0]
    assert a.evaluations == [Evaluation(0.5, 8, {"accuracy": 0.5})]


def test_time_to_loss_is_the_first_time_or_none():
    trace = Trace(
        [Point(1.0, 0, 0, 1, 3.0), Point(2.0, 0, 0, 1, None, 4), Point(3.0, 0, 1, 1, 0.5), Point(4.0, 0, 2, 1, 0.4)]
    )
    assert (time_to_loss(trace, 0.5), time_to_loss(trace, 0.45), time_to_loss(trace, 0.1)) == (3.0, 4.0, None)
