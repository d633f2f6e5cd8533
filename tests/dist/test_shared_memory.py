"""Shared memory: sums are exact, awaited in any order, and errors are clear when a peer is lost or disagrees."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore, HashStore, PrefixStore, Store

from paceline.errors import ClusterError, PeerLost
from paceline.transport import relay
from paceline.transport.shared_memory import SharedMemory

pytestmark = pytest.mark.dist

DEADLINE_S = 15.0
SIZES = [0, 1, 7, 1000, 100_003]
SUMMED = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]
COPIED = [*SUMMED, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]

Body = Callable[[SharedMemory, Store], Any]


def on_ranks(
    path: Path, ranks: list[int], body: Body, *, timeout_s: float = 10.0, killed: tuple[int, ...] = ()
) -> dict[int, Any]:
    """What `body` returns in one process per rank; fails if any rank fails, or is alive at the deadline."""
    children = {rank: fork(path, rank, ranks, body, timeout_s) for rank in ranks}
    statuses: dict[int, int] = {}
    end = time.monotonic() + DEADLINE_S
    while len(statuses) < len(ranks) and time.monotonic() < end:
        for rank, pid in children.items():
            if rank not in statuses and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.002)
    late = [rank for rank in ranks if rank not in statuses]
    for rank in late:
        os.kill(children[rank], signal.SIGKILL)
        os.waitpid(children[rank], 0)
    assert not late, f"ranks {late} were alive at the deadline"
    assert {rank for rank, status in statuses.items() if status == -signal.SIGKILL} == set(killed)
    results = {rank: pickle.loads((path / str(rank)).read_bytes()) for rank in ranks if rank not in killed}
    for rank, result in results.items():
        assert not isinstance(result, Failure), f"rank {rank}: {result}"
    return results


class Failure(str):
    pass


def fork(path: Path, rank: int, ranks: list[int], body: Body, timeout_s: float) -> int:
    pid = os.fork()
    if pid > 0:
        return pid
    result: object = Failure("it did not start")
    try:
        torch.set_num_threads(1)
        store = FileStore(str(path / "store"), len(ranks))
        group = SharedMemory.connect(PrefixStore("group", store), rank, ranks, timeout_s=timeout_s)
        result = body(group, store)
        group.close()
    except BaseException:
        result = Failure(traceback.format_exc())
    finally:
        (path / str(rank)).write_bytes(pickle.dumps(result))
        os._exit(0)


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(1000 * seed + rank)
    whole = torch.randint(-100, 100, (numel,), generator=source)
    return (
        whole * 1.37
        if dtype.is_floating_point or dtype.is_complex
        else whole.remainder(2 if dtype == torch.bool else 200)
    ).to(dtype)


def in_order(ranks: tuple[int, ...], numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    total = values(ranks[0], numel, dtype, seed)
    for rank in ranks[1:]:
        total = total + values(rank, numel, dtype, seed)
    return total


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def check_sums(group: SharedMemory, sizes: list[int]) -> None:
    for seed, numel in enumerate(sizes):
        for dtype in SUMMED:
            x = values(group.rank, numel, dtype, seed)
            assert group.all_reduce(x).wait() is x
            assert_same_bits(x, in_order(group.ranks, numel, dtype, seed))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sum_is_taken_in_order_of_ranks(tmp_path: Path, size: int) -> None:
    on_ranks(tmp_path, list(range(size)), lambda group, _: check_sums(group, SIZES))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_relayed_sum_is_taken_in_order_of_ranks(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "RELAYED_FROM", 1)
    monkeypatch.setattr(relay, "BLOCK", 1 << 12)
    on_ranks(tmp_path, list(range(size)), lambda group, _: check_sums(group, [1, 7, 1000, 4096 * size // 2, 30_011]))


def test_large_sum_is_taken_in_order_of_ranks(tmp_path: Path) -> None:
    def body(group: SharedMemory, _: Store) -> None:
        x = values(group.rank, 3_000_017, torch.float32)
        extras = torch.tensor([1.0, group.rank], dtype=torch.float64)
        group.all_reduce(x, extras).wait()
        assert_same_bits(x, in_order(group.ranks, 3_000_017, torch.float32))
        assert extras.tolist() == [3.0, 3.0]

    on_ranks(tmp_path, [0, 1, 2], body)


def test_members_are_in_the_order_given(tmp_path: Path) -> None:
    def body(group: SharedMemory, _: Store) -> list[int]:
        x = values(group.rank, 1000, torch.float32)
        group.all_reduce(x).wait()
        assert_same_bits(x, in_order((9, 4, 6), 1000, torch.float32))
        return [int(t) for t in group.all_gather(torch.tensor([group.rank])).wait()]

    assert set(map(tuple, on_ranks(tmp_path, [9, 4, 6], body).values())) == {(9, 4, 6)}


def test_extras_are_summed_in_the_same_collective(tmp_path: Path) -> None:
    def body(group: SharedMemory, _: Store) -> tuple[list[float], list[float]]:
        x = torch.ones(5, dtype=torch.float16)
        extras = torch.tensor([group.rank + 0.5, 1.0], dtype=torch.float64)
        group.all_reduce(x, extras).wait()
        return x.tolist(), extras.tolist()

    assert set(map(str, on_ranks(tmp_path, [0, 1, 2], body).values())) == {"([3.0, 3.0, 3.0, 3.0, 3.0], [4.5, 3.0])"}


def test_nan_and_infinity_are_summed_as_usual(tmp_path: Path) -> None:
    def body(group: SharedMemory, _: Store) -> list[float]:
        x = torch.tensor(
            [float("nan") if group.rank == 1 else 1.0, float("inf"), -float("inf") if group.rank else float("inf")]
        )
        return group.all_reduce(x).wait().tolist()

    assert set(map(str, on_ranks(tmp_path, [0, 1], body).values())) == {"[nan, inf, nan]"}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gathering_and_broadcasting_keep_every_bit(tmp_path: Path, size: int) -> None:
    def body(group: SharedMemory, _: Store) -> None:
        for seed, numel in enumerate(SIZES):
            for dtype in COPIED:
                for rank, row in zip(
                    group.ranks, group.all_gather(values(group.rank, numel, dtype, seed)).wait(), strict=True
                ):
                    assert_same_bits(row, values(rank, numel, dtype, seed))
                x = values(group.rank, numel, dtype, seed)
                src = group.ranks[seed % size]
                assert group.broadcast(x, src).wait() is x
                assert_same_bits(x, values(src, numel, dtype, seed))

    on_ranks(tmp_path, list(range(size)), body)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_to_all_takes_parts_of_any_sizes(tmp_path: Path, size: int) -> None:
    def part(src: int, dst: int, numel: int) -> Tensor:
        return values(10 * src + dst, 0 if src == dst else numel * (1 + src) + dst, torch.uint8)

    def body(group: SharedMemory, _: Store) -> None:
        for numel in SIZES:
            received = group.all_to_all([part(group.rank, dst, numel) for dst in group.ranks]).wait()
            for src, data in zip(group.ranks, received, strict=True):
                assert_same_bits(data, part(src, group.rank, numel))

    on_ranks(tmp_path, list(range(size)), body)


def test_shapes_are_kept_and_inputs_are_not_changed(tmp_path: Path) -> None:
    def body(group: SharedMemory, _: Store) -> None:
        data = torch.arange(6.0).view(2, 3).t()
        rows = group.all_gather(data).wait()
        rows[group.rank].zero_()
        assert rows[1 - group.rank].tolist() == data.tolist() == [[0, 3], [1, 4], [2, 5]]
        scalar = torch.tensor(2.0, requires_grad=True)
        assert group.all_reduce(scalar).wait().item() == 4.0

    on_ranks(tmp_path, [0, 1], body)


@pytest.mark.parametrize("relayed_from", [1, 1 << 40])
def test_ops_in_flight_may_be_waited_for_in_any_order(
    tmp_path: Path, relayed_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "RELAYED_FROM", relayed_from)
    monkeypatch.setattr(relay, "BLOCK", 1 << 12)

    def body(group: SharedMemory, _: Store) -> None:
        xs = [values(group.rank, 50 * seed, torch.float32, seed) for seed in range(300)]
        ops = [group.all_reduce(x) for x in xs]
        gathered = group.all_gather(torch.tensor([group.rank]))
        random.Random(group.rank).shuffle(order := list(range(300)))
        for i in order:
            assert_same_bits(ops[i].wait(), in_order(group.ranks, 50 * i, torch.float32, i))
        assert [int(row) for row in gathered.wait()] == [0, 1, 2]
        assert [int(row) for row in gathered.wait()] == [0, 1, 2]

    on_ranks(tmp_path, [0, 1, 2], body)


def test_arena_grows_while_its_slots_are_being_read(tmp_path: Path) -> None:
    def body(group: SharedMemory, _: Store) -> None:
        sizes = [10, 300_000, 20, 900_000, 5, 2_000_000]
        ops = [group.all_gather(values(group.rank, n, torch.float32, n)) for n in sizes]
        for n, op in zip(sizes, ops, strict=True):
            for rank, row in zip(group.ranks, op.wait(), strict=True):
                assert_same_bits(row, values(rank, n, torch.float32, n))

    on_ranks(tmp_path, [0, 1], body)


def test_slots_are_not_overwritten_before_slow_ranks_have_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "RELAYED_FROM", 60_000)
    monkeypatch.setattr(relay, "BLOCK", 1 << 13)

    def body(group: SharedMemory, _: Store) -> int:
        same, own = random.Random(7), random.Random(group.rank)
        flying: list[tuple[Any, Callable[[Any], None]]] = []
        for i in range(400):
            n, src = same.choice([0, 1, 100, same.randrange(40_000)]), same.choice(group.ranks)
            x = torch.full((n,), float(i + 1000 * group.rank))
            kind = same.choice(["sum", "gather", "exchange", "broadcast"])
            if kind == "sum":
                total = sum(i + 1000 * rank for rank in group.ranks)
                flying.append((group.all_reduce(x), lambda got, t=total: check(got, t)))
            elif kind == "gather":
                flying.append(
                    (group.all_gather(x), lambda got, i=i: [check(row, i + 1000 * r) for r, row in enumerate(got)])
                )
            elif kind == "exchange":
                parts = [torch.full((n + r,), (i + group.rank) % 256, dtype=torch.uint8) for r in group.ranks]
                flying.append(
                    (group.all_to_all(parts), lambda got, i=i: [check(p, (i + r) % 256) for r, p in enumerate(got)])
                )
            else:
                flying.append((group.broadcast(x, src), lambda got, i=i, src=src: check(got, i + 1000 * src)))
            if own.random() < (0.02 if group.rank == 1 else 0.001):
                time.sleep(0.01)
            while len(flying) > own.choice([0, 3, 20]):
                op, verify = flying.pop(0)
                verify(op.wait())
        for op, verify in flying:
            verify(op.wait())
        return group._group._arena.memory.numel()  # pyright: ignore[reportPrivateUsage]

    def check(got: Tensor, expected: float) -> None:
        assert (got == expected).all(), (got, expected)

    arenas = on_ranks(tmp_path, [0, 1, 2], body)
    assert max(arenas.values()) <= 32 << 20  # All 400 would need 50 MB or more, so slots were reused.


def error_of(op: Callable[[], object]) -> ClusterError:
    with pytest.raises(ClusterError) as caught:
        op()
    return caught.value


def test_different_collectives_are_an_error_that_names_both(tmp_path: Path) -> None:
    def body(group: SharedMemory, _: Store) -> str:
        group.all_reduce(torch.zeros(3)).wait()
        x = torch.zeros(100)
        return str(error_of(lambda: (group.all_reduce(x) if group.rank == 0 else group.all_gather(x[:20])).wait()))

    said = on_ranks(tmp_path, [0, 1], body)
    mine, theirs = "all_reduce #2 of 400 bytes of torch.float32", "all_gather #2 of 80 bytes of torch.float32"
    assert said[0].startswith(f"rank 0 started {mine}, but rank 1 started {theirs}")
    assert said[1].startswith(f"rank 1 started {theirs}, but rank 0 started {mine}")


def test_different_sizes_are_an_error_on_every_rank(tmp_path: Path) -> None:
    def body(group: SharedMemory, _: Store) -> str:
        return str(error_of(lambda: group.all_gather(torch.zeros(5 if group.rank == 2 else 4)).wait()))

    for said in on_ranks(tmp_path, [0, 1, 2], body).values():
        assert "#1 of 16 bytes" in said and "#1 of 20 bytes" in said


@pytest.mark.parametrize("leaves_a_child", [False, True])
def test_killed_peer_is_named_at_once(tmp_path: Path, leaves_a_child: bool) -> None:
    def body(group: SharedMemory, _: Store) -> tuple[int, float]:
        x = torch.ones(10)
        group.all_reduce(x).wait()
        if group.rank == 7:
            if leaves_a_child and (pid := os.fork()) == 0:
                time.sleep(30)
                os._exit(0)
            elif leaves_a_child:
                (tmp_path / "child").write_text(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        error = error_of(lambda: group.all_reduce(x).wait())
        assert isinstance(error, PeerLost)
        assert error_of(lambda: group.all_reduce(x)) is error
        return error.rank, time.monotonic() - start

    try:
        results = on_ranks(tmp_path, [3, 5, 7], body, killed=(7,))
    finally:
        if leaves_a_child:
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert all(rank == 7 and seconds < 1.0 for rank, seconds in results.values())


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
@pytest.mark.parametrize("numel", [600_000, 6_000_000])
def test_peer_killed_in_a_relayed_sum_is_named_at_once(tmp_path: Path, victim: int, numel: int) -> None:
    """With few blocks some ranks have done their part and wait for the last one; with many all wait for each other."""

    def body(group: SharedMemory, store: Store) -> tuple[int, float]:
        x = torch.ones(numel)
        group.all_reduce(torch.ones(1)).wait()
        if group.rank == victim:
            group.all_reduce(x)
            os.kill(os.getpid(), signal.SIGKILL)
        # The first sum succeeds if the victim had done all its part in it.
        error = error_of(lambda: (group.all_reduce(x).wait(), group.all_reduce(x).wait()))
        assert isinstance(error, PeerLost)
        return error.rank, time.monotonic()

    named = on_ranks(tmp_path, [0, 1, 2, 3], body, killed=(victim,))
    assert {rank for rank, _ in named.values()} == {victim}
    moments = [moment for _, moment in named.values()]
    assert max(moments) - min(moments) < 1.0


def test_ranks_may_leave_as_soon_as_they_have_their_sum(tmp_path: Path) -> None:
    def body(group: SharedMemory, _: Store) -> float:
        total = group.all_reduce(torch.ones(5_000_000)).wait().mean().item()
        group.close()
        return total

    for i in range(5):
        (tmp_path / str(i)).mkdir()
        assert set(on_ranks(tmp_path / str(i), [0, 1, 2, 3], body).values()) == {4.0}


def test_input_of_a_rank_that_has_left_can_still_be_read(tmp_path: Path) -> None:
    def body(group: SharedMemory, store: Store) -> float:
        op = group.all_reduce(torch.full((2_000_000,), 1.0))
        if group.rank == 0:
            op.wait()
            group.close()
            store.set("left", "")
            return 2.0
        gathered = op.wait()
        store.wait(["left"])
        assert "has closed" not in str(error_of(lambda: group.all_reduce(gathered).wait()))
        return gathered.mean().item()

    assert on_ranks(tmp_path, [0, 1], body) == {0: 2.0, 1: 2.0}


def test_peer_that_does_not_take_part_is_named_in_the_error(tmp_path: Path) -> None:
    def body(group: SharedMemory, store: Store) -> str:
        if group.rank == 1:
            store.wait(["over"])
            return ""
        error = error_of(lambda: group.broadcast(torch.zeros(2), src=1).wait())
        store.set("over", "")
        return str(error)

    said = on_ranks(tmp_path, [0, 1], body, timeout_s=0.4)[0]
    assert said == "rank 0 waited 0.4 s for rank 1 in broadcast #1 of 8 bytes of torch.float32 from rank 1"


def test_rank_that_never_connects_is_named_in_the_error() -> None:
    with pytest.raises(ClusterError, match=r"rank 0 did not connect to ranks \[1\] on this host within 0\.1 s"):
        SharedMemory.connect(HashStore(), 0, [0, 1], timeout_s=0.1)
    with pytest.raises(ClusterError, match=r"rank 1 did not connect to ranks \[0\] on this host within 0\.1 s"):
        SharedMemory.connect(HashStore(), 1, [0, 1], timeout_s=0.1)


def shared_files() -> set[str]:
    """The files in /dev/shm that this process maps."""
    return set(re.findall(r"/dev/shm/\S+", Path("/proc/self/maps").read_text()))


def open_files() -> set[str]:
    found: set[str] = set()
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{file}"))
    return found


def test_killed_ranks_leave_no_socket_and_no_file(tmp_path: Path) -> None:
    inherited = shared_files()  # Tests before this one may have left tensors of loader workers to the collector.
    opened = open_files()

    def body(group: SharedMemory, _: Store) -> list[str]:
        group.all_reduce(torch.zeros(1000)).wait()
        assert "memfd:paceline" in Path("/proc/self/maps").read_text()
        assert not shared_files() - inherited
        sockets = open_files() - opened
        mine = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@paceline-" in line]
        mine = [line for line in mine if f"socket:[{line[6]}]" in sockets]
        listening = [line for line in mine if int(line[3], 16) & 0x10000]
        assert not listening
        if group.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return [line[7] for line in mine]

    names = on_ranks(tmp_path, [0, 1, 2], body, killed=(2,))
    assert names[0] and names[1]
    assert not [name for name in names[0] + names[1] if name in Path("/proc/net/unix").read_text()]


def test_callers_mistakes_are_named() -> None:
    alone = SharedMemory.connect(HashStore(), 3, [3], timeout_s=1.0)
    with pytest.raises(ValueError, match=r"torch\.uint8"):
        alone.all_reduce(torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"extras of torch\.float32: they must be of torch\.float64"):
        alone.all_reduce(torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"broadcast\(src=0\): the ranks of this group are \[3\]"):
        alone.broadcast(torch.zeros(2), src=0)
    with pytest.raises(ValueError, match="contiguous"):
        alone.broadcast(torch.zeros(2, 3).t(), src=3)
    with pytest.raises(ValueError, match=r"one of torch\.uint8 for each of the 1 ranks"):
        alone.all_to_all([])
    with pytest.raises(ValueError, match=r"ranks=\[0, 0\]"):
        SharedMemory.connect(HashStore(), 0, [0, 0], timeout_s=1.0)
