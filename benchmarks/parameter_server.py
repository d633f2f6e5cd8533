"""Push and pull of a whole model within one host: a parameter server compared with torch RPC, gloo, Ray and a copy.

All contestants do the same: a worker sends a gradient, the server computes value -= lr * gradient, and the worker gets
the new value in its own tensor. The gradient is where training leaves it: for paceline in memory that shards of the
same host read, for the others in ordinary memory. All contestants are processes of one thread, started and asleep, and
take turns in rounds. Ratios are taken within a round. "copy" moves the bytes of a push and of a pull on one core, once
each. The size "nothing" is the round trip of an empty message.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Client, Connection
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import paceline as pl
from paceline.engines.job import Job
from paceline.engines.place import Place
from paceline.op import drive
from paceline.server import Store
from paceline.server.messages import Arrived, ProbePush, SendAgain

LR = 0.01
SHARDS = (1, 2, 4)
SIZES = {"nothing": 0, "10 kB": 10_000, "1 MB": 1_000_000, "25 MB": 25_000_000, "100 MB": 100_000_000}
RPC, GLOO, RAY, COPY = "torch RPC", "gloo send and recv", "Ray actor", "copy"
TIMEOUT_S = 120.0

# Takes a gradient and a tensor for the new value. If they are empty, it is only a message each way.
Exchange = Callable[[Tensor, Tensor], None]
Room = Callable[[int], Tensor]  # Memory for a gradient with this many values.


def ours(shards: int) -> str:
    return f"paceline, {shards} shard{'s' if shards > 1 else ''}"


class Model:
    """The parts of a replica that a store uses."""

    def __init__(self, endpoint: Any, params: Tensor) -> None:
        self.endpoint = endpoint
        self.params = params
        self.batch = SimpleNamespace(samples=1.0)
        self.cursor = SimpleNamespace(step=0, shard=None)
        self.learner = SimpleNamespace(has_global_data=True, stage=0, stages=1)

    def codec_state(self, codec: Any, *, knows_tensors: bool = True) -> None:
        return None


class Worker:
    """The worker of a contestant, which takes its turn on command."""

    def __init__(self, connection: Connection, exchange: Exchange, room: Room = torch.empty) -> None:
        self.connection, self.exchange, self.send_buffer = connection, exchange, room
        self.vectors: dict[int, tuple[Tensor, Tensor]] = {}

    def serve(self) -> None:
        while order := self.connection.recv():
            self.connection.send(self.advance(*order))

    def advance(self, nbytes: int, repeats: int) -> float:
        """The seconds of one exchange."""
        if nbytes not in self.vectors:
            self.vectors[nbytes] = self.send_buffer(nbytes // 4).fill_(1e-3), torch.zeros(nbytes // 4)
        gradient, value = self.vectors[nbytes]
        self.exchange(gradient, value)
        began = time.perf_counter()
        for _ in range(repeats):
            self.exchange(gradient, value)
        return (time.perf_counter() - began) / repeats


def repeats(nbytes: int) -> int:
    return max(3, min(200, 75_000_000 // max(1, nbytes)))


# The contestants, each as its first process runs it.


def paceline_worker(path: str, shards: int) -> None:
    """A store with its server processes, for every size."""
    jobs: list[Job] = []
    stores: dict[int, Store] = {}

    def send_buffer(numel: int) -> Tensor:
        strategy = pl.ParameterServer(rule=pl.rules.Sgd(lr=LR), servers=shards)
        folder = tempfile.mkdtemp(dir=path)
        place = Place("benchmark", 0, 1, lambda _: dist.FileStore(f"{folder}/store"))
        jobs.append(Job(strategy.needs, device=torch.device("cpu"), served=strategy, place=place))
        stores[numel] = Store(Model(jobs[-1].endpoint, torch.zeros(max(shards, numel))))  # pyright: ignore
        stores[numel].pull().wait()
        return stores[numel].send_buffer() if numel else torch.empty(0)

    def exchange(gradient: Tensor, value: Tensor) -> None:
        store = stores[len(gradient)]
        if len(gradient):
            store.exchange(gradient, into=value).wait()
        else:  # A probe for an update that was never sent.
            store.endpoint.send(store.shards[0], ProbePush(request_id=1)).wait()
            store.endpoint.recv(src=store.shards[0], types=(Arrived, SendAgain)).wait()

    Worker(Client(f"{path}/orders"), exchange, send_buffer).serve()
    for store, job in zip(stores.values(), jobs, strict=True):
        drive(store.leave())
        job.close()


def pair(path: str, worker: Callable[[], None], server: Callable[[], None]) -> None:
    """Two processes; this one is the worker's."""
    other = multiprocessing.get_context("fork").Process(target=server, daemon=True)
    other.start()
    worker()
    other.kill()


VALUES: dict[int, Tensor] = {}  # This one is the server's.


def value_after(gradient: Tensor) -> Tensor:
    return kept(VALUES, gradient.numel()).add_(gradient, alpha=-LR)


def kept(values: dict[int, Tensor], numel: int) -> Tensor:
    """The value with this many elements; zeros at first."""
    if numel not in values:
        values[numel] = torch.zeros(numel)
    return values[numel]


def rpc_worker(path: str) -> None:
    import torch.distributed.rpc as rpc

    def join(name: str, rank: int) -> None:
        torch.set_num_threads(1)
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}/rpc", num_worker_threads=2)
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)

    def serve() -> None:
        join("server", 1)
        time.sleep(1e6)

    def work() -> None:
        join("worker", 0)
        Worker(
            Client(f"{path}/orders"),
            lambda gradient, value: value.copy_(rpc.rpc_sync("server", value_after, (gradient,))),
        ).serve()

    pair(path, work, serve)


def gloo_worker(path: str) -> None:
    def join(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(f"{path}/gloo", 2), rank=rank, world_size=2)

    def serve() -> None:
        join(1)
        while True:
            dist.recv(numel := torch.zeros(1, dtype=torch.int64), 0)
            dist.recv(gradient := torch.empty(int(numel)), 0)
            dist.send(value_after(gradient), 0)

    def exchange(gradient: Tensor, value: Tensor) -> None:
        dist.send(torch.tensor([gradient.numel()]), 1)
        dist.send(gradient, 1)
        dist.recv(value, 1)

    def work() -> None:
        join(0)
        Worker(Client(f"{path}/orders"), exchange).serve()

    pair(path, work, serve)


def ray_worker(path: str) -> None:
    import ray  # pyright: ignore

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)

    @ray.remote
    class Server:  # pyright: ignore
        def __init__(self) -> None:
            torch.set_num_threads(1)
            self.values: dict[int, Tensor] = {}

        def exchange(self, gradient: Any) -> Any:
            with warnings.catch_warnings(
                action="ignore"
            ):  # torch does not know that it only reads this read-only memory.
                return kept(self.values, len(gradient)).sub_(torch.from_numpy(gradient), alpha=LR).numpy()

    server: Any = Server.remote()  # pyright: ignore

    def exchange(gradient: Tensor, value: Tensor) -> None:
        with warnings.catch_warnings(action="ignore"):
            value.copy_(torch.from_numpy(ray.get(server.exchange.remote(gradient.numpy()))))  # pyright: ignore

    Worker(Client(f"{path}/orders"), exchange).serve()
    ray.shutdown()  # pyright: ignore


def copy_worker(path: str) -> None:
    there: dict[int, Tensor] = {}

    def exchange(gradient: Tensor, value: Tensor) -> None:
        value.copy_(kept(there, len(gradient)).copy_(gradient))

    Worker(Client(f"{path}/orders"), exchange).serve()


class Contestant:
    """A contestant, as the controlling process sees it."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        self.folder = tempfile.TemporaryDirectory()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{self.folder.name}/orders")
            listener.listen(1)
            listener.settimeout(TIMEOUT_S)

            def run() -> None:
                torch.set_num_threads(1)
                work(self.folder.name, *args)
                os._exit(0)

            self.process = multiprocessing.get_context("fork").Process(target=run)
            self.process.start()
            self.connection = Connection(listener.accept()[0].detach())

    def advance(self, nbytes: int) -> float:
        self.connection.send((nbytes, repeats(nbytes)))
        return self.connection.recv()

    def close(self) -> None:
        self.connection.send(None)
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
        self.folder.cleanup()


def contestants() -> dict[str, Contestant]:
    found = {ours(shards): Contestant(paceline_worker, shards) for shards in SHARDS}
    found |= {RPC: Contestant(rpc_worker), GLOO: Contestant(gloo_worker), COPY: Contestant(copy_worker)}
    if find_spec("ray"):
        found[RAY] = Contestant(ray_worker)
    return found


def measure(players: dict[str, Contestant], nbytes: int, rounds: int) -> dict[str, list[float]]:
    names = list(players)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for r in range(-1, rounds):
        first = r % len(names)
        for name in names[first:] + names[:first]:
            took = players[name].advance(nbytes)
            if r >= 0:
                taken[name].append(took)
    return taken


def summary(size: str, taken: dict[str, list[float]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, own in taken.items():
        ratios = {
            other: quantiles((b / a for a, b in zip(own, taken[other], strict=True)), n=4)
            for other in taken
            if other != name
        }
        rows[name] = {
            "ms": 1e3 * median(own),
            "updates_per_s": 1 / median(own),
            "speed over": {other: {"median": q[1], "quartiles": [q[0], q[2]]} for other, q in ratios.items()},
        }
    return {"size": size, "rounds": len(next(iter(taken.values()))), "cores": os.cpu_count(), "rows": rows}


def table(result: dict[str, Any]) -> Table:
    others = [name for name in (RPC, GLOO, RAY, COPY) if name in result["rows"]]
    title = "push and pull of {size} on {cores} cores, {rounds} rounds".format(**result)
    made = Table("", "ms", "updates/s", *(f"x {name}" for name in others), title=title)
    for column in made.columns[1:]:
        column.justify = "right"
    for name, row in result["rows"].items():
        cells = [f"{row['ms']:.2f}", f"{row['updates_per_s']:,.0f}"]
        for other in others:
            q = row["speed over"].get(other)
            cells.append("{:.2f} ({:.2f}-{:.2f})".format(q["median"], *q["quartiles"]) if q else "1")
        made.add_row(name, *cells)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--size", choices=SIZES, action="append", help="only this one; can be repeated")
    parser.add_argument("--rounds", type=int, help="turns of each contestant")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(arguments)
    players = contestants()
    if RAY not in players:
        print("Ray is not installed: `pip install ray` to include it.")
    rounds = args.rounds or (5 if args.quick else 25)
    results = [summary(size, measure(players, SIZES[size], rounds)) for size in args.size or SIZES]
    for player in players.values():
        player.close()
    for result in results:
        Console(width=140).print(table(result))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
