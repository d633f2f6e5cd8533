"""Statistics (H6 of the reference of methods): what is reported when, and where the time of each worker goes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from paceline import (
    AllReduceSGD,
    Cluster,
    Faults,
    LogNormal,
    ParameterServer,
    PeriodicAveraging,
    ProgressBar,
    Recorder,
    Run,
    Statistics,
    Strategy,
    simulate,
)
from paceline.costs import COLLECTIVES as COSTS
from paceline.monitor.accounts import COLLECTIVES, COMMUNICATION, Account, Participation, waits
from paceline.monitor.channel import StoreChannel
from paceline.monitor.ledger import Block, Figures, Ledger, Report
from paceline.trace import Collective, Span, Staleness, Trace
from tests.laws.every import STRATEGIES, Case
from tests.laws.tasks import instant, quadratic, regression

KINDS = {type(case.strategy): case for case in reversed(STRATEGIES.values())}  # The first case of each strategy,
MORE = [
    "all-reduce-sgd by groups and one-bit",
    "periodic-averaging, delayed",
    "diloco, streaming",
    "then, delayed to delayed",
]
CASES = {name: case for name, case in STRATEGIES.items() if case in KINDS.values() or name in MORE}  # and a few more.
SIZED = {name: case for name, case in STRATEGIES.items() if case.nbytes is not None}


def silent(line: str) -> None:
    """Print nothing."""


def reported(strategy: Strategy, cluster: Cluster, every: int = 1, first: int = 0, **task: Any) -> tuple[Run, Any]:
    statistics = Statistics(every, first=first, out=silent)
    run = simulate(quadratic(**{"steps": 6, "batch": 12} | task), strategy, cluster, monitor=statistics)
    return run, statistics.reports


# H6.1: when a report comes.


@pytest.mark.parametrize(
    ("strategy", "steps"), [(AllReduceSGD(), 23), (PeriodicAveraging(period=2), 46), (ParameterServer(), 23)], ids=str
)
@pytest.mark.parametrize(
    ("every", "first", "expected"),
    [(5, 0, [5, 10, 15, 20]), (5, 5, [1, 2, 3, 4, 5, 10, 15, 20]), (0, 2, [1, 2]), (30, 0, [])],
)
def test_reports_come_after_every_fifth_sync_and_after_the_first_ones(
    strategy: Strategy, steps: int, every: int, first: int, expected: list[int]
):
    _, reports = reported(strategy, Cluster(workers=2), every, first, steps=steps)
    assert [report.syncs for report in reports] == [*expected, 23]
    assert [report.is_total for report in reports] == [False] * len(expected) + [True]


def test_steps_of_one_worker_are_no_syncs():
    _, [total] = reported(AllReduceSGD(), Cluster(workers=1), 2)
    assert total.is_total and total.syncs == 0 and total.total.samples == 6 * 12


# H6.2: where the time goes.


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_computing_encoding_waiting_and_transfer_are_all_of_a_simulated_workers_time(case: Case):
    statistics = Statistics(2, out=silent)
    task = regression(steps=max(7, case.least), batch=8, bucket_bytes=200)
    run = simulate(task, case.strategy, Cluster(workers=4, compute=[0.01, 0.02, 0.03, 0.05]), monitor=statistics)
    for report in statistics.reports:
        for f in report.workers.values():
            assert min(f.compute, f.encode, f.wait, f.transfer) >= 0
            assert f.compute + f.encode + f.wait + f.transfer == pytest.approx(f.seconds, rel=1e-9, abs=1e-12)
    total = statistics.reports[-1]
    for rank, f in total.workers.items():
        assert f.seconds <= run.seconds * (1 + 1e-9)
        assert f.compute == pytest.approx(run.trace.seconds_by_kind(rank).get("gradient", 0.0), rel=1e-9)
        assert f.samples == sum(p.samples for p in run.trace.points if p.rank == rank and p.loss is not None)


def test_workers_wait_for_the_last_one_and_not_for_the_network():
    """On an instant network with steps of 1, 2 and 4 seconds."""
    _, reports = reported(AllReduceSGD(), instant(3, compute=[1.0, 2.0, 4.0]), every=2)
    for report in reports[:-1]:
        assert [f.wait for f in report.workers.values()] == [6.0, 4.0, 0.0]
        assert [f.transfer for f in report.workers.values()] == [0.0] * 3
        assert [f.seconds for f in report.workers.values()] == [8.0] * 3


def test_equal_workers_wait_for_the_network_alone():
    cluster = instant(3, bandwidth=1000.0)
    run, reports = reported(AllReduceSGD(), cluster, every=3)
    [once] = {round(s.stop - s.start, 9) for s in run.trace.spans if s.kind == "all_reduce"}
    for report in reports[:-1]:
        assert [f.wait for f in report.workers.values()] == [0.0] * 3
        assert [f.transfer for f in report.workers.values()] == pytest.approx([3 * once] * 3)


def test_what_is_hidden_behind_a_gradient_is_computing():
    """Of two buckets, the first travels while the second one's gradient is computed, and takes half as long."""
    cluster = instant(2, bandwidth=1.0, latency=0.0, forward_share=0.0)
    run, [report, _] = reported(AllReduceSGD(), cluster, numel=2, steps=1, samples=12)
    [seconds] = {s.stop - s.start for s in run.trace.spans if s.kind == "all_reduce"}
    assert report.workers[0] == Figures(1.0 + seconds, 1.0, 0.0, 0.0, seconds, 6, report.workers[0].nbytes, 1)


def test_a_worker_that_waits_for_a_server_waits():
    _, reports = reported(ParameterServer(servers=1), instant(2, latency=0.25), every=2)
    first = reported(ParameterServer(servers=1), instant(2), every=2)[1][0]
    assert reports[0].workers[0].wait >= 2 * 2 * 0.25 and first.workers[0].wait == 0.0
    assert reports[0].workers[0].compute == first.workers[0].compute == 2.0


# H6.3: it is free when it is off.


@pytest.mark.parametrize("name", ["all-reduce-sgd by one-bit", "parameter-server", "diloco, streaming", "hogwild"])
def test_monitors_change_nothing_and_print_nothing_unless_they_are_asked_to(name: str, tmp_path: Any, capsys: Any):
    task, strategy, cluster = regression(steps=7, batch=8), STRATEGIES[name].strategy, Cluster(workers=2)
    plain = simulate(task, strategy, cluster)
    assert plain.trace.collectives is None
    off = simulate(task, strategy, cluster, monitor=Statistics(0))
    assert off.trace.collectives is None and capsys.readouterr().out == ""
    on = [Statistics(1), Recorder(tmp_path / "metrics.jsonl", every=1), ProgressBar()]
    watched = simulate(task, strategy, cluster, monitor=on)
    assert watched.trace.collectives is not None and capsys.readouterr().out != ""
    assert plain.trace.digest() == off.trace.digest() == watched.trace.digest()
    assert plain.params.equal(watched.params)


# H6.4 and H6.5: bytes and samples.


@pytest.mark.parametrize("case", SIZED.values(), ids=SIZED)
def test_bytes_are_those_of_the_formulas_and_samples_are_those_of_all_workers(case: Case):
    assert case.nbytes is not None
    run, reports = reported(case.strategy, Cluster(workers=2), every=2, steps=7, batch=4, dtype=torch.float32)
    *parts, total = reports
    assert [f.nbytes for f in total.workers.values()] == [case.nbytes(5, 2, 7, rank) for rank in range(2)]
    assert [f.nbytes for f in total.workers.values()] == [run.trace.bytes_sent(rank) for rank in range(2)]
    assert total.total.samples == sum(f.samples for f in total.workers.values()) == 7 * 4
    for rank, f in total.workers.items():
        assert f.samples == sum(p.samples for p in run.trace.points if p.rank == rank and p.staleness is None)
        assert sum(part.workers[rank].samples for part in parts if rank in part.workers) <= f.samples


@pytest.mark.parametrize("name", ["parameter-server", "async-easgd", "gossip", "hogwild"])
def test_the_staleness_of_all_reports_is_that_of_the_trace(name: str):
    run, reports = reported(STRATEGIES[name].strategy, Cluster(workers=3, compute=[0.01, 0.02, 0.03]), every=2)
    assert reports[-1].staleness == run.trace.mean_staleness()


# Speed-up.


def test_equal_workers_on_an_instant_network_are_as_many_times_faster_as_they_are():
    _, reports = reported(AllReduceSGD(), instant(4), every=2)
    assert {(r.speedup, r.peak, r.average) for r in reports} == {(4.0, 4.0, 4.0)}


def test_the_peak_is_the_best_block_and_the_average_that_of_the_whole_run():
    cluster = Cluster(workers=2, compute=LogNormal(0.01, 1.0), bandwidth="10kbit/s")
    _, reports = reported(PeriodicAveraging(period=2), cluster, every=1, steps=9)
    *parts, total = reports
    assert total.peak == max(part.speedup for part in parts) > total.average == total.speedup
    one = sum(f.samples / f.compute for f in total.workers.values()) / 2
    assert total.average == pytest.approx(total.samples_per_s / one)


# Dead workers.


def test_a_worker_that_has_died_is_named_and_nobody_waits_for_it():
    statistics = Statistics(2, out=silent)
    faults = Faults(deaths={1: 0.05})
    simulate(quadratic(steps=20, batch=6), ParameterServer(), Cluster(workers=3), faults=faults, monitor=statistics)
    assert statistics.reports[-2].missing == [1] and set(statistics.reports[-2].workers) == {0, 2}


# The parts.


def test_collectives_are_those_that_have_a_cost():
    assert set(COSTS) == COLLECTIVES


times = st.floats(0, 10, allow_nan=False)
spans = st.builds(
    lambda kind, start, length: Span(0, kind, start, start + length),
    st.sampled_from(sorted({*COMMUNICATION, "gradient", "encode", "decode", "step"})),
    times,
    times,
)


@given(st.lists(spans, max_size=12), st.lists(times, min_size=1, max_size=4), st.booleans())
def test_no_second_counts_twice_whatever_overlaps(given_spans: list[Span], stops: list[float], fills: bool):
    account = Account(0.0, fills=fills)
    account.add(given_spans)
    before = 0.0
    for stop in sorted(stops):
        shares = account.close(stop)
        assert min(shares.compute, shares.encode, shares.wait, shares.transfer) >= -1e-9
        total = shares.compute + shares.encode + shares.communication
        assert total <= stop - before + 1e-9
        assert not fills or total == pytest.approx(stop - before, abs=1e-9)
        before = stop


@given(st.lists(st.tuples(times, times), min_size=2, max_size=5), st.data())
def test_durations_tell_who_waited_where_no_common_clock_does(
    given_times: list[tuple[float, float]], data: st.DataObject
):
    """If all have the result at the same time; each clock shows another time."""
    ranks = tuple(range(len(given_times)))
    stop = max(start for start, _ in given_times) + 1.0
    shown = [data.draw(st.floats(0, stop - start)) for start, _ in given_times]
    there = {r: Participation(ranks, 1, start, stop - start, shown[r]) for r, (start, _) in enumerate(given_times)}
    apart = {r: a._replace(start=a.start + given_times[r][1]) for r, a in there.items()}
    one = waits(there, dict.fromkeys(ranks, "here"))
    several = waits(apart, {r: str(r) for r in ranks})
    assert all(math.isclose(one[r], several[r], abs_tol=1e-9) for r in ranks)
    assert all(0 <= one[r] <= shown[r] for r in ranks)


def block(rank: int, *, syncs: int = 1, is_rest: bool = False) -> Block:
    figures = Figures(seconds=1.0, compute=0.5, samples=4, syncs=syncs)
    return Block(rank, "", 1.0, figures, [], Staleness(), Staleness(), is_rest)


def test_a_report_waits_for_nobody_longer_than_one_block():
    ledger = Ledger(3)
    ledger.add(block(0))
    ledger.add(block(2))
    assert list(ledger.reports()) == [], "worker 1 may come yet"
    ledger.add(block(0))
    [report] = ledger.reports()
    assert report.missing == [1] and set(report.workers) == {0, 2} and report.syncs == 1
    for rank in (1, 1, 2):
        ledger.add(block(rank))
    [report] = ledger.reports()
    assert report.missing == [] and report.syncs == 2
    assert report.workers[1].samples == 8, "what came late counts in the next report"


def test_a_report_has_the_same_syncs_of_all_workers_and_what_faster_ones_did_is_not_left_behind():
    ledger = Ledger(3)
    for rank in (0, 1, 1, 2, 2, 2, 2):
        ledger.add(block(rank))
    [report] = ledger.reports()
    assert {rank: f.syncs for rank, f in report.workers.items()} == {0: 1, 1: 1, 2: 3}
    ledger.add(block(0))
    [report] = ledger.reports()
    assert {rank: f.syncs for rank, f in report.workers.items()} == {0: 1, 1: 1, 2: 1}


def test_a_worker_that_has_ended_is_not_waited_for():
    ledger = Ledger(2)
    ledger.add(block(1, is_rest=True))
    ledger.add(block(0))
    [report] = ledger.reports()
    assert set(report.workers) == {0}
    ledger.add(block(0, syncs=0, is_rest=True))
    [total] = ledger.last_reports()
    assert total.is_total and total.missing == [] and total.total.samples == 12


def test_blocks_and_reports_are_the_same_after_writing_and_reading():
    trace = Trace()
    trace.collectives = []
    trace.collective(0, (0, 1), 1.0, 2.5)
    account = Account(0.0)
    account.add([], [Collective(0, (0, 1), 1.0, 2.5)])
    written = Block(0, "a", 3.0, Figures(seconds=3.0), account.close(3.0).participations, Staleness(1, 2), Staleness())
    assert Block.loads(written.dumps()) == written
    _, [report, *_] = reported(ParameterServer(), Cluster(workers=2))
    assert Report.of_plain(report.plain()) == report


def test_mail_goes_on_where_a_dead_worker_left_it():
    store = dist.HashStore()
    channel, other = StoreChannel(store).of(0), StoreChannel(store).of(1)
    channel.send(3, "one")
    other.send(3, "another monitor's")
    assert channel.receive(3) == ["one"] and channel.receive(3) == [] and channel.receive(2) == []
    StoreChannel(store).of(0).send(3, "two")  # Worker 3 was started again,
    assert StoreChannel(store).of(0).receive(3) == ["two"]  # and so was the first one.


@pytest.mark.parametrize("settings", [{"every": -1}, {"every": 1, "first": -1}])
def test_numbers_of_syncs_are_not_negative(settings: dict[str, int]):
    with pytest.raises(ValueError, match=r"Statistics\(every=.*: both count syncs; give at least 0"):
        Statistics(**settings)


def test_lines_go_to_a_file_if_asked(tmp_path: Any, capsys: Any):
    for _ in range(2):
        statistics = Statistics(3, out=tmp_path / "statistics.txt")
        simulate(quadratic(steps=6, batch=12), AllReduceSGD(), Cluster(workers=2), monitor=statistics)
    lines = (tmp_path / "statistics.txt").read_text().splitlines()
    assert capsys.readouterr().out == "" and len(lines) == 2 * 3 * 3
    assert lines[0].startswith("sync 3: ") and lines[6].startswith("all 6 syncs: ")
    assert lines[1].startswith("  worker 0: virtual ")
