"""All-reduce of fp32 vectors within one host: shared memory compared with gloo, MPI and a plain copy.

The ranks of each contestant are processes of one thread, started and asleep. Contestants take turns in rounds, so that
noise of the machine affects all of them. A turn lasts from the start of its first rank to the end of its last rank.
Ratios are taken within a round; the table shows their medians and quartiles.

"shared memory" is paceline's all-reduce itself, and "endpoint" is the same through a job's endpoint. The plain copy, by
one rank alone, is the reference: the time to move the bytes once on one core. "no waiting" is the limit of paceline's
all-reduce: every rank reads its values as the all-reduce does, once to add and once to fetch, but without
synchronisation. "OneBit" is the mean of 1-bit SGD, which sends only a thirty-second of the bytes. Compared with an
all-reduce within one host it shows the cost of encoding.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Client, Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from paceline.codecs import OneBit
from paceline.codecs.codec import ErrorFeedback
from paceline.collectives import SyncVote, mean_by_stripes
from paceline.endpoint import Layout
from paceline.op import drive
from paceline.transport.endpoint import Backends, Clock, ProcessEndpoint
from paceline.transport.relay import BLOCK
from paceline.transport.shared_memory import SharedMemory

SHARED, ENDPOINT, GLOO, MPI, COPY, ONE_BIT = "shared memory", "endpoint", "gloo", "MPI", "one-core copy", "OneBit"
ALONE = "no waiting"
MEGABYTE = 1_000_000
SIZES = [1, 25, 100]
RANKS = [2, 4]
TIMEOUT_S = 60.0

Reduce = Callable[[Tensor], object]


class Contestants:
    """One rank of some contestants, which takes its turn on command."""

    def __init__(self, connection: Connection, reduce: dict[str, Reduce], start_together: Callable[[], object]) -> None:
        self.connection, self.reduce, self.start_together = connection, reduce, start_together
        self.buffers: dict[int, Tensor] = {}

    def serve(self) -> None:
        """Run until there are no more commands. The rank sleeps between turns, so that the others have the cores."""
        while order := self.connection.recv():
            self.connection.send(self.advance(*order))

    def advance(self, name: str, megabytes: int, together: bool) -> tuple[float, float, float]:
        """The start and end of this rank, on the clock that all processes of a host share, and its CPU seconds."""
        reduce = self.reduce[name]
        x = self.buffers.setdefault(megabytes, torch.empty(megabytes * MEGABYTE // 4))
        reduce(x.fill_(1.0))  # Arenas, connections and pages exist before the clock starts.
        if together:
            self.start_together()
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(repeats(megabytes)):
            reduce(x)
        return began, time.perf_counter(), time.process_time() - began_cpu


def repeats(megabytes: int) -> int:
    """Calls in a turn: so many that all ranks are awake before it ends."""
    return max(1, 50 // megabytes)


def one_bit(endpoint: ProcessEndpoint) -> Reduce:
    """The mean of 1-bit SGD of a vector, with residuals that it keeps between calls."""
    links: dict[int, ErrorFeedback] = {}

    def reduce(x: Tensor) -> None:
        if x.numel() not in links:
            links[x.numel()] = ErrorFeedback(OneBit(), torch.zeros_like(x), torch.zeros_like(x))
        drive(mean_by_stripes(endpoint, x, SyncVote(1.0), links[x.numel()]))

    return reduce


def copier() -> Reduce:
    targets: dict[int, Tensor] = {}

    def copy(x: Tensor) -> None:
        targets.setdefault(x.numel(), torch.empty_like(x)).copy_(x)

    return copy


def two_passes() -> Reduce:
    """The work of a rank in a relayed sum, without any waiting or signalling."""
    window = torch.zeros(BLOCK // 4)

    def passes(x: Tensor) -> None:
        for block in x.split(window.numel()):
            part = window[: block.numel()]
            block.copy_(part.add_(block))

    return passes


def connected(rank: int, ranks: int, path: str) -> tuple[dict[str, Reduce], ProcessEndpoint]:
    store = dist.FileStore(f"{path}/store", ranks)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=ranks)
    shared = SharedMemory.connect(dist.PrefixStore("shared", store), rank, range(ranks), timeout_s=TIMEOUT_S)
    backends = Backends(shared=shared, process_group=dist.group.WORLD)
    endpoint = ProcessEndpoint(rank, Layout(ranks), Clock(time.time()), backends=backends)
    reduce: dict[str, Reduce] = {
        SHARED: lambda x: shared.all_reduce(x).wait(),
        ENDPOINT: lambda x: endpoint.all_reduce(x).wait(),
        GLOO: dist.all_reduce,
        COPY: copier(),
        ALONE: two_passes(),
        ONE_BIT: one_bit(endpoint),
    }
    return reduce, endpoint


def work(rank: int, ranks: int, path: str) -> None:
    """A rank of all contestants except MPI."""
    torch.set_num_threads(1)
    reduce, endpoint = connected(rank, ranks, path)
    Contestants(Client(f"{path}/orders"), reduce, dist.barrier).serve()
    dist.barrier()
    endpoint.close()
    dist.destroy_process_group()


def work_in_mpi(path: str) -> None:
    """A rank under mpiexec."""
    from mpi4py import MPI as mpi  # pyright: ignore

    torch.set_num_threads(1)
    comm: Any = mpi.COMM_WORLD  # pyright: ignore
    Contestants(
        Client(f"{path}/orders"), {MPI: lambda x: comm.Allreduce(mpi.IN_PLACE, x.numpy())}, comm.Barrier
    ).serve()  # pyright: ignore


def mpiexec() -> str | None:
    """The launcher that belongs to this Python's mpi4py, if there is one."""
    beside = Path(sys.executable).with_name("mpiexec")
    return (str(beside) if beside.exists() else shutil.which("mpiexec")) if find_spec("mpi4py") else None


class Ranks:
    """The processes of some contestants, as the controlling process sees them."""

    def __init__(self, ranks: int, start: Callable[[str], Any]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{self.folder.name}/orders")
            listener.listen(ranks)
            listener.settimeout(TIMEOUT_S)
            self.processes = start(self.folder.name)
            self.connections = [Connection(listener.accept()[0].detach()) for _ in range(ranks)]

    def advance(self, name: str, megabytes: int, *, alone: bool) -> tuple[float, float]:
        """The seconds of a call, and the CPU seconds of all ranks together."""
        chosen = self.connections[:1] if alone else self.connections
        for connection in chosen:
            connection.send((name, megabytes, not alone))
        began, ended, cpu = zip(*(connection.recv() for connection in chosen), strict=True)
        return (max(ended) - min(began)) / repeats(megabytes), sum(cpu) / repeats(megabytes)

    def close(self) -> None:
        for connection in self.connections:
            connection.send(None)
        for process in self.processes:
            process.wait() if isinstance(process, subprocess.Popen) else process.join()  # pyright: ignore
        self.folder.cleanup()


def forked(ranks: int, target: Callable[[int, int, str], None] = work) -> Ranks:
    def start(path: str) -> list[Any]:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=target, args=(rank, ranks, path), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        return processes

    return Ranks(ranks, start)


def under_mpi(ranks: int, launcher: str) -> Ranks:
    command = [launcher, "-n", str(ranks), sys.executable, "-m", "benchmarks.collectives", "--mpi-rank"]
    return Ranks(ranks, lambda path: [subprocess.Popen([*command, path], stdin=subprocess.DEVNULL)])


Taken = dict[str, list[tuple[float, float]]]


def measure(players: dict[str, Ranks], megabytes: int, rounds: int) -> Taken:
    """The seconds and the CPU seconds of every contestant in each round."""
    names, taken = list(players), {name: [] for name in players}
    for r in range(-1, rounds):
        first = r % len(names)
        for name in names[first:] + names[:first]:
            took = players[name].advance(name, megabytes, alone=name == COPY)
            if r >= 0:  # The first round warms up.
                taken[name].append(took)
    return taken


def summary(ranks: int, megabytes: int, taken: Taken) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, own in taken.items():
        low, middle, high = quantiles((s for s, _ in own), n=4)
        rows[name] = {
            "ms": 1e3 * middle,
            "ms_quartiles": [1e3 * low, 1e3 * high],
            "cpu_ms": 1e3 * median(cpu for _, cpu in own),
        }
        for other in (GLOO, COPY):
            low, middle, high = quantiles(
                (theirs / ours for (theirs, _), (ours, _) in zip(taken[other], own, strict=True)), n=4
            )
            rows[name][f"speed over {other}"] = {"median": middle, "quartiles": [low, high]}
    return {"ranks": ranks, "megabytes": megabytes, "rounds": len(taken[GLOO]), "cores": os.cpu_count(), "rows": rows}


def table(result: dict[str, Any]) -> Table:
    title = "{megabytes} MB between {ranks} ranks on {cores} cores, {rounds} rounds".format(**result)
    made = Table("", "ms", "CPU ms", f"x {GLOO}", "x copy", title=title)
    made.caption = "x: its speed over that of the other; in brackets the quartiles"
    for column in made.columns[1:]:
        column.justify = "right"
    for name, row in result["rows"].items():
        cells = ["{:.2f} ({:.2f}-{:.2f})".format(row["ms"], *row["ms_quartiles"]), f"{row['cpu_ms']:.2f}"]
        for other in (GLOO, COPY):
            ratio = row[f"speed over {other}"]
            cells.append("{:.2f} ({:.2f}-{:.2f})".format(ratio["median"], *ratio["quartiles"]))
        made.add_row(name, *cells)
    return made


def run(ranks: int, sizes: Sequence[int], rounds: int, launcher: str | None) -> list[dict[str, Any]]:
    groups = [forked(ranks)]
    players: dict[str, Ranks] = dict.fromkeys([SHARED, ENDPOINT, GLOO, COPY, ALONE, ONE_BIT], groups[0])
    if launcher:
        groups.append(under_mpi(ranks, launcher))
        players[MPI] = groups[1]
    results = [summary(ranks, megabytes, measure(players, megabytes, rounds)) for megabytes in sizes]
    for group in groups:
        group.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--ranks", type=int, action="append", help="only this many ranks; can be repeated")
    parser.add_argument("--megabytes", type=int, action="append", help="only this size; can be repeated")
    parser.add_argument("--rounds", type=int, help="turns of each contestant")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--mpi-rank", help=argparse.SUPPRESS)  # Started by mpiexec.
    args = parser.parse_args()
    if args.mpi_rank:
        return work_in_mpi(args.mpi_rank)
    launcher = mpiexec()
    if launcher is None:
        print("MPI is not installed: `pip install mpi4py mpich` to include it.")
    results: list[dict[str, Any]] = []
    for ranks in args.ranks or RANKS:
        results += run(ranks, args.megabytes or SIZES, args.rounds or (5 if args.quick else 25), launcher)
    for result in results:
        Console(width=100).print(table(result))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
