"""Virtual time: whole schedules as literals, and a clear error for every mistake of a strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from paceline import (
    AllReduceSGD,
    Cluster,
    ClusterError,
    Constant,
    Link,
    LogNormal,
    PeriodicAveraging,
    Stragglers,
    Task,
    simulate,
    units,
)
from paceline import costs as network
from paceline.endpoint import Layout
from paceline.sim.endpoint import SimEndpoint
from paceline.sim.simulator import Simulator
from paceline.sim.world import World
from tests.laws.tasks import OPTIMIZERS, instant, quadratic
from tests.messages import Goodbye, Note

Role = Callable[[SimEndpoint], Coroutine[Any, Any, Any]]


def play(cluster: Cluster, roles: Role | Mapping[int, Role], *, strict: bool = True) -> Simulator:
    """Run a coroutine on every rank to its end: the same for all ranks, or one for each."""
    layout = Layout(cluster.workers)
    simulator = Simulator(layout.name)
    world = World(simulator, cluster, layout, strict=strict)
    chosen = roles if isinstance(roles, Mapping) else dict.fromkeys(range(cluster.workers), roles)
    simulator.run({rank: role(SimEndpoint(world, rank)) for rank, role in chosen.items()})
    return simulator


def spans(simulator: Simulator) -> list[tuple[Any, ...]]:
    return [tuple(s) for s in simulator.trace.spans]


def slow(workers: int, **more: Any) -> Cluster:
    """A cluster with 100 bytes a second and a latency of half a second."""
    return Cluster(workers, **{"bandwidth": 100.0, "latency": 0.5} | more)


# Schedules.


def test_two_workers_compute_and_reduce():
    """The faster worker waits.  Then 25 float32 take 2 * 0.5 s of latency, and 2 * 1/2 * 100 bytes take 1 s."""

    async def role(e: SimEndpoint) -> None:
        for _ in range(2):
            await e.busy(1.0 + e.rank)
            await e.all_reduce(torch.ones(25))

    assert spans(play(slow(2), role)) == [
        (0, "compute", 0.0, 1.0, 0),
        (1, "compute", 0.0, 2.0, 0),
        (0, "all_reduce", 1.0, 4.0, 100),
        (1, "all_reduce", 2.0, 4.0, 100),
        (0, "compute", 4.0, 5.0, 0),
        (1, "compute", 4.0, 6.0, 0),
        (0, "all_reduce", 5.0, 8.0, 100),
        (1, "all_reduce", 6.0, 8.0, 100),
    ]


def test_receiver_gets_two_messages_one_after_the_other():
    arrivals: list[tuple[float, int]] = []

    async def sender(e: SimEndpoint) -> None:
        await e.send(2, Note(values=(torch.zeros(25),)))

    async def receiver(e: SimEndpoint) -> None:
        for _ in range(2):
            message = await e.recv()
            arrivals.append((e.now(), message.src))

    simulator = play(slow(3), {0: sender, 1: sender, 2: receiver})
    assert spans(simulator) == [(0, "send", 0.0, 1.0, 100), (1, "send", 1.0, 2.0, 100)]
    assert arrivals == [(1.5, 0), (2.5, 1)]


def test_network_card_sends_and_receives_at_the_same_time():
    async def role(e: SimEndpoint) -> None:
        send = e.send(1 - e.rank, Note(values=(torch.zeros(25),)))
        await e.recv()
        assert e.now() == 1.5
        await send

    assert spans(play(slow(2), role)) == [(0, "send", 0.0, 1.0, 100), (1, "send", 0.0, 1.0, 100)]


def test_slow_link_slows_its_pair_and_every_collective_over_it():
    cluster = slow(3, latency=0.0, links={(0, 2): Link(bandwidth=10.0, latency=1.0)})

    async def role(e: SimEndpoint) -> None:
        if e.rank < 2:
            await e.send(2, Note(values=(torch.zeros(25),)))
        else:
            assert [(await e.recv()).src for _ in range(2)] == [0, 1]
            assert e.now() == 11.0
        await e.all_gather(torch.zeros(5))

    assert spans(play(cluster, role)) == [
        (0, "send", 0.0, 10.0, 100),
        (1, "send", 10.0, 11.0, 100),
        (0, "all_gather", 10.0, 17.0, 40),
        (1, "all_gather", 11.0, 17.0, 40),
        (2, "all_gather", 11.0, 17.0, 40),
    ]


def test_processor_does_one_task_at_a_time():
    async def role(e: SimEndpoint) -> None:
        first, second = e.busy(1.0), e.busy(2.0)
        await second
        assert e.now() == 3.0
        await first

    assert spans(play(slow(1), role)) == [(0, "compute", 0.0, 1.0, 0), (0, "compute", 1.0, 3.0, 0)]


@pytest.mark.parametrize(
    ("collective", "kind", "seconds", "nbytes"),
    [
        ("ring", "all_reduce", 6 * 0.1 + 1.5, [1500, 1500, 1500, 1500]),
        ("tree", "all_reduce", 4 * 1.1, [2000, 2000, 1000, 1000]),
        ("star", "all_reduce", 2 * 0.1 + 6.0, [3000, 1000, 1000, 1000]),
        ("ring", "broadcast", 3 * 0.1 + 1.0, [1000, 1000, 1000, 0]),
        ("tree", "broadcast", 2 * 1.1, [2000, 1000, 0, 0]),
        ("star", "broadcast", 0.1 + 3.0, [3000, 0, 0, 0]),
        ("ring", "all_gather", 3 * 1.1, [3000, 3000, 3000, 3000]),
        ("ring", "all_to_all", 3 * 0.1 + 0.75, [750, 750, 750, 750]),
    ],
)
def test_collectives_cost_what_their_algorithm_says(collective: Any, kind: str, seconds: float, nbytes: list[int]):
    """4 ranks, 1000 bytes each, 1000 bytes a second, 0.1 s of latency (A2 d for the ring)."""

    async def role(e: SimEndpoint) -> None:
        x = torch.ones(250)
        if kind == "broadcast":
            await e.broadcast(x, 0)
        elif kind == "all_to_all":
            await e.all_to_all([torch.zeros(250, dtype=torch.uint8)] * 4)
        else:
            await getattr(e, kind)(x)

    simulator = play(Cluster(4, bandwidth=1000.0, latency=0.1, collective=collective), role)
    assert [s.nbytes for s in simulator.trace.spans] == nbytes
    assert [s.stop for s in simulator.trace.spans] == pytest.approx([seconds] * 4, rel=1e-12)


@pytest.mark.parametrize("src", [0, 2])
def test_source_of_a_broadcast_sends_its_bytes(src: int):
    async def role(e: SimEndpoint) -> None:
        await e.broadcast(torch.ones(250), src)

    simulator = play(Cluster(4, collective="star"), role)
    assert [s.nbytes for s in simulator.trace.spans] == [3000 if rank == src else 0 for rank in range(4)]


def test_ring_of_one_rank_costs_nothing():
    assert [cost("ring", 1, 1000, Link(10.0, 1.0)).seconds for cost in (network.all_reduce, network.all_gather)] == [
        0.0,
        0.0,
    ]


def test_all_workers_wait_for_a_straggler():
    """Forward takes half of a gradient's time.  Worker 1 takes three times as long."""
    cluster = instant(2, compute=Stragglers(Constant(1.0), slow={1: 3.0}), forward_share=0.5)
    run = simulate(quadratic(steps=2, batch=4), AllReduceSGD(), cluster)
    assert [tuple(s) for s in run.trace.spans if s.rank == 0] == [
        (0, "gradient", 0.0, 0.5, 0),
        (0, "gradient", 0.5, 1.0, 0),
        (0, "all_reduce", 1.0, 3.0, 72),
        (0, "gradient", 3.0, 3.5, 0),
        (0, "gradient", 3.5, 4.0, 0),
        (0, "all_reduce", 4.0, 6.0, 72),
    ]
    assert [s.start for s in run.trace.spans if s.rank == 1 and s.kind == "all_reduce"] == [3.0, 6.0]
    assert [p.time for p in run.trace.points] == [1.0, 3.0, 4.0, 6.0]


def test_any_gradient_may_be_slow_by_chance():
    cluster = instant(1, compute=Stragglers(Constant(1.0), chance=0.25, factor=5.0), seed=3)
    run = simulate(quadratic(steps=400, batch=4), PeriodicAveraging(period=1), cluster)
    took = [s.stop - s.start for s in run.trace.spans if s.kind == "gradient"]
    late = sum(t > 2 for t in took)
    assert {round(t, 6) for t in took} == {1.0, 5.0}
    assert abs(late - 100) < 4 * math.sqrt(400 * 0.25 * 0.75)  # 4 standard errors.


def test_straggler_does_not_delay_asynchronous_workers():
    from paceline import ParameterServer

    run = simulate(quadratic(steps=5, batch=4), ParameterServer(servers=1), instant(2, compute=[1.0, 10.0]))
    fast = [p.time for p in run.trace.points if p.rank == 0]
    assert fast == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], "it takes over work of the slow one"
    assert run.seconds == 20.0


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(42))
        self.last = nn.Parameter(torch.zeros(42))


def test_buckets_are_exchanged_during_backward():
    """A gradient takes 4 s: 2 s forward, then 1 s for each bucket.  168 bytes and a vote of 32 bytes take 2 s."""
    task = Task(
        Two,
        lambda model, batch: (model.first.sum() + model.last.sum()) * batch[0].mean(),
        [torch.ones(4)],
        4,
        OPTIMIZERS["sgd"],
        steps=1,
        bucket_bytes=168,
    )
    cluster = Cluster(2, compute=4.0, forward_share=0.5, bandwidth=100.0, latency=0.0)
    run = simulate(task, AllReduceSGD(), cluster)
    assert [tuple(s) for s in run.trace.spans if s.rank == 0] == [
        (0, "gradient", 0.0, 2.0, 0),
        (0, "gradient", 2.0, 3.0, 0),
        (0, "gradient", 3.0, 4.0, 0),
        (0, "all_reduce", 3.0, 5.0, 200),
        (0, "all_reduce", 4.0, 7.0, 200),
    ]


def test_encoding_takes_time():
    """A codec processes 100 plain bytes a second."""
    from paceline.codecs import OneBit

    cluster = instant(2, codec_bandwidth=100.0)
    run = simulate(quadratic(steps=1, batch=4, dtype=torch.float32), AllReduceSGD(codec=OneBit()), cluster)
    mine = [tuple(s) for s in run.trace.spans if s.rank == 0 and s.kind in ("encode", "decode")]
    assert [(kind, round(stop - start, 9)) for _, kind, start, stop, _ in mine] == [
        ("encode", 0.2),
        ("encode", 0.6),
        ("decode", 0.2),
    ]


def test_awaits_are_counted():
    async def role(e: SimEndpoint) -> None:
        for _ in range(3):
            await e.busy(1.0)
        await e.spawn(part(e))

    async def part(e: SimEndpoint) -> None:
        await e.all_reduce(torch.ones(1))

    assert play(slow(2), role).waits == 2 * (3 + 1 + 1)
    run = simulate(quadratic(steps=3, batch=4), PeriodicAveraging(period=1), Cluster(workers=2))
    # A step awaits a local step with one computation, and a mean with one collective and its routine.
    assert run.waits == 2 * 3 * (2 + 3)


# Errors.


def test_deadlock_error_names_every_waiting_rank_and_its_op():
    async def reduces(e: SimEndpoint) -> None:
        await e.busy(1.5)
        await e.all_reduce(torch.ones(1))

    async def receives(e: SimEndpoint) -> None:
        await e.recv(src=0)

    async def receives_from_any(e: SimEndpoint) -> None:
        await e.recv()

    async def ends(e: SimEndpoint) -> None:
        await e.busy(1.0)

    with pytest.raises(ClusterError) as caught:
        play(slow(4), {0: reduces, 1: receives, 2: receives_from_any, 3: ends})
    assert str(caught.value) == (
        "deadlock at virtual time 1.5 s: nothing more can happen, but\n"
        "  worker 0 waits for all_reduce #0 of 4 ranks\n"
        "  worker 1 waits for a message from worker 0\n"
        "  worker 2 waits for a message"
    )


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda e: e.all_gather(torch.ones(3)), r"all_gather\(\(3,\), torch.float32\)"),
        (lambda e: e.all_reduce(torch.ones(4)), r"all_reduce\(\(4,\), torch.float32, True\)"),
        (lambda e: e.all_reduce(torch.ones(3).double()), r"all_reduce\(\(3,\), torch.float64, True\)"),
        (lambda e: e.all_reduce(torch.ones(3), torch.zeros(1).double()), r"all_reduce\(\(3,\), torch.float32, False\)"),
        (lambda e: e.broadcast(torch.ones(3), 1), r"broadcast\(\(3,\), torch.float32, 1\)"),
    ],
    ids=["kind", "shape", "dtype", "extras", "broadcast"],
)
def test_error_for_collectives_that_do_not_match_names_both_calls(other: Callable[[SimEndpoint], Any], named: str):
    async def role(e: SimEndpoint) -> None:
        await e.all_gather(torch.ones(1))
        await (other(e) if e.rank == 1 else e.all_reduce(torch.ones(3)))

    with pytest.raises(
        ClusterError,
        match=rf"#1 does not match: worker 0 called all_reduce\(\(3,\), torch.float32, True\), worker 1 called {named}",
    ):
        play(slow(2), role)


def test_broadcasts_from_different_sources_do_not_match():
    async def role(e: SimEndpoint) -> None:
        await e.broadcast(torch.ones(3), e.rank)

    with pytest.raises(ClusterError, match=r"worker 0 called broadcast.* 0.* worker 1 called broadcast.* 1"):
        play(slow(2), role)


@pytest.mark.parametrize("how", ["all_reduce", "extras", "all_gather", "all_to_all", "broadcast", "send"])
def test_writing_to_a_buffer_in_flight_is_an_error(how: str):
    def begin(e: SimEndpoint, x: torch.Tensor) -> Any:
        if how == "send":
            return e.send(1 - e.rank, Note(values=(x,)))
        if how == "extras":
            return e.all_reduce(torch.ones(2), x.double() if e.rank else x)
        if how == "all_to_all":
            return e.all_to_all([x.view(torch.uint8)] * 2)
        return e.broadcast(x, 0) if how == "broadcast" else getattr(e, how)(x)

    async def role(e: SimEndpoint) -> None:
        x = torch.ones(3, dtype=torch.float64)
        op = begin(e, x)
        if e.rank == 0:
            x[1] = 7
        await op
        if how == "send":
            await e.recv()

    with pytest.raises(
        RuntimeError, match=r"rank 0 wrote to a buffer of \d+ values while '.*' was sending it: await it first"
    ):
        play(slow(2), role)
    play(slow(2), role, strict=False)


def test_nan_in_a_buffer_is_not_a_write():
    async def role(e: SimEndpoint) -> None:
        await e.all_reduce(torch.tensor([math.nan, math.inf, 1.0]))

    play(slow(2), role)


def test_op_that_is_never_awaited_is_an_error():
    async def role(e: SimEndpoint) -> None:
        e.all_reduce(torch.ones(1))
        if e.rank == 1:
            e.busy(1.0, kind="encode")

    with pytest.raises(RuntimeError) as caught:
        play(slow(2), role)
    expected = ["worker 0: all_reduce #0 of 2 ranks", "worker 1: all_reduce #0 of 2 ranks", "worker 1: encode"]
    assert str(caught.value) == "started but never awaited:\n" + "\n".join(f"  {line}" for line in expected)


def test_op_awaited_twice_at_once_is_an_error():
    async def role(e: SimEndpoint) -> None:
        op = e.busy(1.0)

        async def waits() -> None:
            await op

        a, b = e.spawn(waits()), e.spawn(waits())
        await a
        await b

    with pytest.raises(RuntimeError, match="worker 0: 'compute' is awaited twice at once"):
        play(slow(1), role)


def test_error_for_an_op_of_another_backend_names_it():
    from paceline.op import Op

    async def role(e: SimEndpoint) -> None:
        await Op("surprise")

    with pytest.raises(TypeError, match="<Op surprise>"):
        play(slow(1), role)


def test_recv_times_out_in_virtual_time():
    seen: list[Any] = []

    async def waits(e: SimEndpoint) -> None:
        await e.busy(1.0)
        try:
            await e.recv(src=1, timeout=2.0)
        except TimeoutError as error:
            seen.append((e.now(), str(error)))
        seen.append((await e.recv(src=1, timeout=10.0)).tag)
        seen.append(e.now())

    async def sends(e: SimEndpoint) -> None:
        await e.busy(4.0)
        await e.send(0, Goodbye())

    play(slow(2), {0: waits, 1: sends})
    assert seen == [(3.0, "rank 0 waited 2 s for a message from worker 1"), "goodbye", 4.5]


def test_send_to_itself_or_to_a_missing_rank_is_an_error():
    async def role(e: SimEndpoint) -> None:
        for dst in (0, 2, -1):
            with pytest.raises(ValueError, match=f"rank 0 sent 'note' to rank {dst}"):
                e.send(dst, Note(values=(torch.zeros(25),)))

    async def nothing(e: SimEndpoint) -> None:
        pass

    play(slow(2), {0: role, 1: nothing})


def test_error_in_a_task_names_rank_and_virtual_time():
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if (batch[0] == 5).any():
            raise ArithmeticError("a bad sample")
        return (model.first.sum() + model.last.sum()) * batch[0].mean()

    task = Task(Two, loss, [torch.arange(8.0)], 2, OPTIMIZERS["sgd"], steps=4)
    where = next((k, rank) for k in range(4) for rank in range(2) if 5 in task.part(k, rank, 2)[0])
    with pytest.raises(ArithmeticError, match="a bad sample") as caught:
        simulate(task, PeriodicAveraging(period=10), instant(2))
    assert f"on worker {where[1]} at virtual time {where[0]} s" in caught.value.__notes__
    assert len(caught.value.__notes__) == 1


def test_error_in_a_coroutine_is_raised_where_it_is_awaited():
    async def fails(e: SimEndpoint) -> None:
        await e.busy(1.0)
        raise KeyError("x")

    async def role(e: SimEndpoint) -> None:
        with pytest.raises(KeyError):
            await e.spawn(fails(e))
        assert e.now() == 1.0

    play(slow(1), role)


def test_group_is_only_for_its_members():
    async def role(e: SimEndpoint) -> None:
        if e.rank < 2:
            x = torch.ones(1)
            await e.group([0, 1]).all_reduce(x)
            assert x.item() == 2
        with pytest.raises(ValueError, match="but it is not a member"):
            e.group([1 - e.rank] if e.rank < 2 else [0, 1])

    play(slow(3), role)


# Quantities and settings.


@pytest.mark.parametrize(
    ("text", "value"),
    [("50us", 5e-5), ("1.5 ms", 1.5e-3), ("2min", 120.0), ("1e-3s", 1e-3), (" 3 s ", 3.0), (0.25, 0.25), (1, 1.0)],
)
def test_durations_are_parsed(text: Any, value: float):
    assert units.seconds(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("text", ["", "5", "us", "5 parsecs", "-5s", "five s", "1.2.3s"])
def test_error_for_a_wrong_duration_has_an_example(text: str):
    with pytest.raises(ValueError, match=f"{text!r} is not a duration.*50us"):
        units.seconds(text)


@pytest.mark.parametrize(
    ("text", "value"), [("10Gbit/s", 1.25e9), ("100MB/s", 1e8), ("1.5 kB/s", 1500.0), ("8bit/s", 1.0), (7, 7.0)]
)
def test_bandwidths_distinguish_bits_and_bytes(text: Any, value: float):
    assert units.bytes_per_second(text) == value


@pytest.mark.parametrize("text", ["", "10", "10G", "10Gb/s", "10Gbps", "-1MB/s", "1.2.3MB/s"])
def test_error_for_a_wrong_bandwidth_has_an_example(text: str):
    with pytest.raises(ValueError, match=f"{text!r} is not a bandwidth.*10Gbit/s"):
        units.bytes_per_second(text)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"workers": 0}, r"workers=0"),
        ({"collective": "mesh"}, r"collective='mesh'.*'ring', 'tree' or 'star'"),
        ({"compute": [1.0]}, r"1\.0.* 2 workers"),
        ({"compute": Constant([1.0, 1.0, 1.0])}, r"1\.0, 1\.0, 1\.0.* 2 workers"),
        ({"bandwidth": 0.0}, r"bandwidth=0.0"),
        ({"bandwidth": "fast"}, r"'fast' is not a bandwidth"),
        ({"latency": -1.0}, r"latency=-1.0"),
        ({"latency": "soon"}, r"'soon' is not a duration"),
    ],
)
def test_error_for_an_impossible_cluster_names_the_setting(settings: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=named):
        Cluster(**{"workers": 2} | settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"compute": -1.0},
        {"compute": "5 parsecs"},
        {"compute": ["1ms", "-1ms"]},
        {"compute": Stragglers(Constant([1.0]))},
        {"bandwidth": math.nan},
        {"latency": math.inf},
        {"forward_share": 1.5},
        {"codec_bandwidth": 0.0},
        {"memory_bandwidth": "slow"},
    ],
    ids=str,
)
def test_cluster_is_checked_when_it_is_created(settings: dict[str, Any]):
    with pytest.raises(ValueError):
        Cluster(**{"workers": 2} | settings)


def test_log_normal_times_have_the_given_median():
    """The bound is 4 standard errors of a median: 1.2533 sigma / sqrt(n) in the logarithm."""
    run = simulate(quadratic(steps=999, batch=4), PeriodicAveraging(period=1), instant(1, compute=LogNormal(2.0, 0.4)))
    took = sorted(s.stop - s.start for s in run.trace.spans if s.kind == "gradient")
    assert abs(math.log(took[499] / 2.0)) < 4 * 1.2533 * 0.4 / math.sqrt(999)


def test_layout_names_its_ranks():
    layout = Layout(workers=2, servers=2)
    assert [layout.name(r) for r in range(4)] == ["worker 0", "worker 1", "server 0 (rank 2)", "server 1 (rank 3)"]
    assert list(layout.worker_ranks) == [0, 1] and list(layout.server_ranks) == [2, 3] and layout.size == 4
    for wrong in ({"workers": 0}, {"workers": 1, "servers": -1}):
        with pytest.raises(ValueError, match="at least 1 worker"):
            Layout(**wrong)
