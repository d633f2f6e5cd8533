"""Run one coroutine on every rank of any kind of endpoint, and return the result of each rank."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.endpoint import Layout
from paceline.op import drive
from paceline.sim import Cluster
from paceline.sim.endpoint import SimEndpoint
from paceline.sim.simulator import Simulator
from paceline.sim.world import World
from paceline.transport.comm_thread import CommThread
from paceline.transport.endpoint import Backends, Clock, ProcessEndpoint
from paceline.transport.mailbox import Mailbox
from paceline.transport.shared_memory import SharedMemory

DEADLINE_S = 30.0
TIMEOUT_S = 5.0

Law = Callable[[Any], Coroutine[Any, Any, Any]]


@dataclass(frozen=True)
class Ranks:
    """A kind of endpoint. `is_ordered`: it adds in the order of ranks, so sums are equal to the bit."""

    start: Callable[[Path, int, Law, bool], list[Any]]
    is_ordered: bool
    is_real: bool = True

    def __call__(self, path: Path, workers: int, law: Law) -> list[Any]:
        """What `law` returns on each rank: numbers, text, None, tensors, and lists, tuples and dicts of them."""
        return self.start(path, workers, law, self.is_ordered)


def on_simulator(path: Path, workers: int, law: Law, ordered: bool) -> list[Any]:
    layout = Layout(workers)
    simulator = Simulator(layout.name)
    world = World(simulator, Cluster(workers=workers), layout, strict=True)
    results: list[Any] = [None] * workers

    async def role(rank: int) -> None:
        results[rank] = await law(SimEndpoint(world, rank))

    simulator.run({rank: role(rank) for rank in range(workers)})
    return results


def on_shared_memory(path: Path, workers: int, law: Law, ordered: bool) -> list[Any]:
    return _forked(path, workers, law, ordered, shares=True)


def on_gloo(path: Path, workers: int, law: Law, ordered: bool) -> list[Any]:
    return _forked(path, workers, law, ordered, shares=False)


def on_gloo_in_comm_thread(path: Path, workers: int, law: Law, ordered: bool) -> list[Any]:
    return _forked(path, workers, law, ordered, shares=False, has_comm_thread=True)


def _forked(
    path: Path, workers: int, law: Law, ordered: bool, *, shares: bool, has_comm_thread: bool = False
) -> list[Any]:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(workers)]
    processes = [
        context.Process(
            target=_child, args=(path, rank, workers, law, ordered, shares, has_comm_thread, pipes[rank][1])
        )
        for rank in range(workers)
    ]
    results: dict[int, Any] = {}
    try:
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        reading = {ours: rank for rank, (ours, _) in enumerate(pipes)}
        end = time.monotonic() + DEADLINE_S
        while reading and time.monotonic() < end:
            for ready in wait(list(reading), timeout=end - time.monotonic()):
                rank = reading.pop(ready)  # pyright: ignore
                try:
                    results[rank] = ready.recv()  # pyright: ignore
                except EOFError:
                    results[rank] = ("failed", "it ended without a word")
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for ours, _ in pipes:
            ours.close()
    failures = [f"rank {rank}: {what}" for rank, (how, what) in sorted(results.items()) if how == "failed"]
    assert not failures, "\n".join(failures)
    assert not late, f"ranks {late} were still there after {DEADLINE_S:g} s"
    return [_thawed(results[rank][1]) for rank in range(workers)]


def _child(
    path: Path, rank: int, workers: int, law: Law, ordered: bool, shares: bool, has_comm_thread: bool, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    result: tuple[str, Any] = ("failed", "it did not begin")
    try:
        store = dist.FileStore(str(path / "store"), workers)
        limit = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=workers, timeout=limit
        )
        comm_thread = CommThread() if has_comm_thread else None
        clock = Clock(time.time())
        mail = cache(lambda: Mailbox(dist.PrefixStore("mail", store), rank, workers, timeout_s=TIMEOUT_S))

        def endpoint_of(ranks: tuple[int, ...]) -> ProcessEndpoint:
            apart = dist.PrefixStore(f"shared/{ranks}", store)
            whole = len(ranks) == workers
            group = dist.group.WORLD if whole else dist.new_group(list(ranks), use_local_synchronization=True)
            assert not isinstance(group, int)
            return ProcessEndpoint(
                rank,
                Layout(workers),
                clock,
                ranks=ranks,
                backends=Backends(
                    shared=SharedMemory.connect(apart, rank, ranks, timeout_s=TIMEOUT_S)
                    if shares and len(ranks) > 1
                    else None,
                    process_group=group,
                    comm_thread=comm_thread,
                    is_ordered=ordered,
                ),
                open_mailbox=mail,
                open_group=endpoint_of if whole else None,
            )

        endpoint = endpoint_of(tuple(range(workers)))
        result = ("done", _frozen(drive(law(endpoint))))
        # A rank that exits early closes its sockets, and gloo's peers may still be reading from them.
        dist.barrier()
        endpoint.close()
        dist.destroy_process_group()
    except BaseException:
        result = ("failed", traceback.format_exc())
    finally:
        pipe.send(result)
        pipe.close()
        os._exit(0)


def _frozen(value: Any) -> Any:
    """Replace tensors by numpy's bytes. Torch's own transfer through a pipe leaves files in /dev/shm."""
    if isinstance(value, torch.Tensor):
        return (
            "tensor",
            str(value.dtype),
            tuple(value.shape),
            value.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, (list, tuple)):
        return ("list", [_frozen(v) for v in value])
    if isinstance(value, dict):
        return ("dict", {k: _frozen(v) for k, v in value.items()})
    return ("plain", value)


def _thawed(value: Any) -> Any:
    match value:
        case ("tensor", dtype, shape, raw):
            kind = getattr(torch, dtype.removeprefix("torch."))
            return torch.frombuffer(bytearray(raw), dtype=kind).view(shape) if raw else torch.empty(shape, dtype=kind)
        case ("list", values):
            return [_thawed(v) for v in values]
        case ("dict", values):
            return {k: _thawed(v) for k, v in values.items()}
        case _:
            return value[1]
