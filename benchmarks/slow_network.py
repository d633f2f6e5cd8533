"""Seconds a step over a slow network: paceline's methods compared with DDP, torchft and hivemind.

Four hosts, as network namespaces on one bridge, have links with a limited rate in each direction, and one worker of one
thread each. All methods train in the same four processes and take turns. Before and after each turn the workers train
for a while without communication: this is the limit, and a method's speed is shown as a share of it. A turn has whole
periods of its method and lasts until its slowest worker is done. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain, islice, repeat
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn import functional as F

from benchmarks._slow_network_methods import (
    DDP,
    LIMIT,
    METHODS,
    RATE,
    Method,
    Place,
    Trainee,
    alone,
    batches,
    perceptron,
)
from benchmarks._slow_network_report import Turn, draw, merged, summary, table
from tests.dist import hosts

WORKERS = 4
TURN = 8  # The fewest steps of a turn.
LIMIT_TURN = 16
RATES = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
RETRANSMIT_S = 300.0


# On a worker.


class Worker:
    """One worker's copies of the model, one for each method, which take their turns on command."""

    def __init__(self, place: Place) -> None:
        torch.manual_seed(0)
        self.place, self.model = place, perceptron()
        self.data = batches(place.rank)
        self.trainees: dict[str, tuple[Trainee, torch.optim.Optimizer]] = {}

    def serve(self, connection: Connection) -> None:
        while order := connection.recv():
            try:
                reply = self.advance(*order)
            except Exception as error:
                reply = error
            connection.send(reply if not isinstance(reply, Exception) else (type(reply).__name__, str(reply)))

    def advance(self, name: str, steps: int) -> dict[str, float]:
        """The start and end of this worker, on the clock that all processes of a machine share, and its cost."""
        if name not in self.trainees:
            model = copy.deepcopy(self.model)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
            self.trainees[name] = BY_NAME[name].make(self.place, model, optimizer), optimizer
        trainee, optimizer = self.trainees[name]
        dist.barrier()
        sent, cpu, began = sent_bytes(), time.process_time(), time.perf_counter()
        for x, y in islice(self.data, steps):
            optimizer.zero_grad()
            F.cross_entropy(trainee.model(x), y).backward()
            trainee.step()
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        dist.barrier()  # Data that a slower peer has not yet received belongs to the turn.
        turn = {"began": began, "ended": ended, "cpu": cpu, "sent": sent_bytes() - sent, "period": BY_NAME[name].period}
        if trainee.session is not None:
            now = trainee.session.loop.replica.cursor.step
            periods = [sync.period for sync in trainee.session.trace.syncs if sync.step >= now - steps]
            turn["period"] = mean(periods) if periods else BY_NAME[name].period
        return turn


def sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def work(rank: int, address: str, master: str, path: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(WORKERS), MASTER_ADDR=master, MASTER_PORT="29511", GLOO_SOCKET_IFNAME="eth0"
    )
    dist.init_process_group("gloo")
    connection = Client(path)
    connection.send(rank)
    Worker(Place(rank, WORKERS, address, master)).serve(connection)
    os._exit(0)  # Servers and threads of peers would keep the process alive.


# In the controlling process.

BY_NAME = {m.name: m for m in [Method(LIMIT, alone), *METHODS]}


class Lost(Exception):
    """A method that does not run here, and why."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name, self.why = name, why


class Workers:
    """The four processes, as the controlling process sees them."""

    def __init__(self, places: Sequence[tuple[str, str]]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        key = secrets.token_hex(32)
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"{self.folder.name}/orders")
                listener.listen(WORKERS)
                listener.settimeout(RETRANSMIT_S)
                for rank, (namespace, address) in enumerate(places):
                    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "benchmarks.slow_network"]
                    command += ["--worker", str(rank), address, places[0][1], f"{self.folder.name}/orders"]
                    with Path(self.folder.name, f"err-{rank}").open("w") as err:
                        # Its own session, so that everything that a method has started ends with it.
                        self.processes.append(
                            subprocess.Popen(
                                command,
                                stdin=subprocess.DEVNULL,
                                stdout=err,
                                stderr=err,
                                env={**os.environ, "PACELINE_JOB_KEY": key},
                                start_new_session=True,
                            )
                        )
                connections = [Connection(listener.accept()[0].detach()) for _ in places]
            self.connections = [c for _, c in sorted((c.recv(), c) for c in connections)]
        except BaseException:
            self.close()
            raise

    def advance(self, name: str, steps: int) -> dict[str, float]:
        """Seconds and megabytes a step; raises Lost if a worker fails."""
        for connection in self.connections:
            connection.send((name, steps))
        replies: dict[Connection, Any] = {}
        limit = time.monotonic() + RETRANSMIT_S
        while len(replies) < WORKERS:
            ready = wait([c for c in self.connections if c not in replies], timeout=max(0.0, limit - time.monotonic()))
            if not ready:
                raise Lost(name, f"no answer within {RETRANSMIT_S:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    replies[connection] = connection.recv()
                except EOFError:
                    raise Lost(name, self.why_ended(self.connections.index(connection))) from None
            for error in replies.values():
                if isinstance(error, tuple):  # The others may wait for the failed one.
                    raise Lost(name, f"{error[0]}: {error[1]}")
        told = list(replies.values())
        seconds = max(t["ended"] for t in told) - min(t["began"] for t in told)
        return {
            "s": seconds / steps,
            "cpu_s": sum(t["cpu"] for t in told) / steps,
            "MB": mean(t["sent"] for t in told) / steps / 1e6,
            "period": told[0]["period"],
        }

    def why_ended(self, rank: int) -> str:
        """How a worker's process ended, and its last output."""
        code = self.processes[rank].wait(10)
        lines = Path(self.folder.name, f"err-{rank}").read_text().strip().splitlines()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return f"a worker was {how}: {' '.join(lines[-3:])[-300:]}"

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for connection in self.connections:
            connection.close()
        self.folder.cleanup()


def limit_links(places: Sequence[tuple[str, str]], rate: str) -> None:
    """Both ends of each host's link: what the host sends, and what the bridge sends to it."""
    shaped = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
    links = json.loads(subprocess.run(["ip", "-j", "link"], check=True, capture_output=True, text=True).stdout)
    for namespace, _ in places:
        inside = subprocess.run(
            ["ip", "-n", namespace, "-j", "link", "show", "eth0"], check=True, capture_output=True, text=True
        )
        outside = next(
            link["ifname"] for link in links if link["ifindex"] == json.loads(inside.stdout)[0]["link_index"]
        )
        subprocess.run(["tc", "-n", namespace, "qdisc", "replace", "dev", "eth0", *shaped], check=True)
        subprocess.run(["tc", "qdisc", "replace", "dev", outside, *shaped], check=True)


class Benchmark:
    """The turns of all methods that run here, and why the others do not."""

    def __init__(self, places: Sequence[tuple[str, str]], methods: Sequence[Method]) -> None:
        self.places, self.methods = places, list(methods)
        self.failed: dict[str, str] = {}
        self.workers = self.prepared()

    def prepared(self) -> Workers:
        """Workers with which every method has had a first turn. They restart after a method that fails for good."""
        while True:
            workers = Workers(self.places)
            try:
                workers.advance(LIMIT, LIMIT_TURN)
                for method in list(self.methods):
                    say(f"trying {method.name}")
                    workers.advance(method.name, method.lead)
                return workers
            except Lost as lost:
                workers.close()
                if lost.name == LIMIT:
                    raise SystemExit(str(lost)) from None
                self.drop(lost)
            except BaseException:
                workers.close()
                raise

    def drop(self, lost: Lost) -> None:
        say(str(lost))
        self.failed[lost.name] = lost.why
        self.methods = [m for m in self.methods if m.name != lost.name]

    def measure(self, rounds: int) -> dict[str, list[Turn]]:
        """This many turns of every method, in another order each round."""
        taken: dict[str, list[Turn]] = {m.name: [] for m in self.methods}
        done = 0
        while done < rounds:
            say(f"round {done + 1} of {rounds}")
            first = done * 5 % len(self.methods)
            try:
                one = self.round(self.methods[first:] + self.methods[:first])
            except Lost as lost:
                self.drop(lost)
                self.workers.close()
                self.workers = self.prepared()
                continue
            for name, turn in one.items():
                taken[name].append(turn)
            done += 1
        return {name: turns for name, turns in taken.items() if name not in self.failed}

    def round(self, methods: Sequence[Method]) -> dict[str, Turn]:
        turns: dict[str, Turn] = {}
        before = self.workers.advance(LIMIT, LIMIT_TURN)
        for method in methods:
            own = self.workers.advance(method.name, -(-TURN // method.period) * method.period)
            after = self.workers.advance(LIMIT, LIMIT_TURN)
            turns[method.name] = Turn(own["s"], (before["s"] + after["s"]) / 2, own["MB"], own["cpu_s"], own["period"])
            before = after
        return turns


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measured(
    places: Sequence[tuple[str, str]], methods: Sequence[Method], rates: Sequence[str], rounds: Sequence[int]
) -> list[dict[str, Any]]:
    """The times at each rate of methods that share their processes."""
    limit_links(places, rates[0])
    benchmark = Benchmark(places, methods)
    results: list[dict[str, Any]] = []
    try:
        for rate, count in zip(rates, chain(rounds, repeat(rounds[-1])), strict=False):
            limit_links(places, rate)
            results.append(summary(RATES.get(rate, rate), WORKERS, benchmark.measure(count), dict(benchmark.failed)))
            Console(width=130, stderr=True).print(table(results[-1]))
    finally:
        benchmark.workers.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="of the links, as `tc` writes them")
    parser.add_argument("--rounds", type=int, nargs="+", help="turns of each method, for each rate")
    parser.add_argument(
        "--method", action="append", help="only DDP and methods whose name contains this; can be repeated"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--plot", type=Path, help="where to write a chart, .svg or .png")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)  # Started in the namespaces.
    args = parser.parse_args()
    if args.worker:
        return work(int(args.worker[0]), *args.worker[1:])
    if reason := hosts.why_not():
        raise SystemExit(f"This machine cannot play several hosts: {reason}")
    methods = [m for m in METHODS if m.name == DDP or not args.method or any(part in m.name for part in args.method)]
    given: list[int] = args.rounds or [2 if args.quick else 6]
    results: list[dict[str, Any]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the hosts are removed.
    with hosts.hosts(WORKERS) as places:
        # A peer with processes that never sleep would slow down all others.
        here = [m for m in methods if find_spec(m.needs)]
        parties = [[m for m in here if not m.apart], *([BY_NAME[DDP], m] for m in here if m.apart)]
        for party in parties:
            part = measured(places, party, args.rates, given)
            results = merged(results, part) if results else part
            for result in results:
                result["failed"] |= {m.name: f"{m.needs} is not installed" for m in methods if m not in here}
            if args.json:  # After each group of methods: one may take an hour.
                args.json.write_text(json.dumps(results, indent=2))
    for result in results:
        Console(width=130).print(table(result))
    if args.plot:
        draw(results, args.plot)


if __name__ == "__main__":
    main()
