"""Processes killed and stopped at random, under every strategy, on real processes.

A small perceptron learns handwritten digits on four workers. In disturbed runs a worker or a shard chosen at random is
killed by SIGKILL, or a worker is stopped by SIGSTOP and continued after up to three times the silence after which it
counts as dead. Synchronous methods run with `elastic=True`, shards with `durability="process"`. Runs are added until
each method has had enough kills and stops. A gradient's time is mostly a sleep, so four workers on few cores are as
fast as on four machines.

Each worker notes the time and the samples of every gradient in a file. So pauses, and how much was computed in vain,
are seen on the run itself, also those of workers that were killed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

import torch
import torch._dynamo  # So that forked processes need not.
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from benchmarks._frame import markdown, show, table
from paceline.codecs import OneBit
from paceline.data import digits
from paceline.engines.server_process import NAME as SHARD
from tests.dist.starting import everything, leftovers

WORKERS, BATCH, EPOCHS = 4, 128, 50
RATE = 0.1
GRADIENT_S = 0.02
SILENT_S = 0.6
SETTLED_S = 1.5  # A worker that has run for so long undisturbed has joined the others.
LIMIT_S = 240.0
EVENTS = 20  # At most so many kills and stops in one run: some methods end sooner.
STOPS, SHARDS = 0.4, 0.15  # The shares of stops, and of kills of shards.
BEAT = struct.Struct("dI")


def served(strategy: type[pl.ServerStrategy], **settings: Any) -> pl.Strategy:
    return strategy(servers=2, durability="process", **settings)


METHODS: dict[str, dict[str, pl.Strategy]] = {
    "synchronous": {
        "AllReduceSGD": pl.AllReduceSGD(),
        "AllReduceSGD, 1 bit": pl.AllReduceSGD(codec=OneBit()),
        "OneBitAdam": pl.OneBitAdam(warmup=40),
        "Then": pl.Then(pl.AllReduceSGD(), pl.PeriodicAveraging(period=8), steps=100),
    },
    "averaging": {
        "PeriodicAveraging": pl.PeriodicAveraging(period=8),
        "DecreasingAveraging": pl.DecreasingAveraging((16, 4)),
        "AdaptiveAveraging": pl.AdaptiveAveraging(warmup=20),
        "AdaComm": pl.AdaComm(steps=40),
        "BlockMomentum": pl.BlockMomentum(period=8),
        "SlowMo": pl.SlowMo(period=8),
        "DiLoCo": pl.DiLoCo(period=8),
    },
    "asynchronous": {
        "ParameterServer": served(pl.ParameterServer, rule=pl.rules.Sgd(lr=RATE)),
        "StaleSynchronous": served(pl.StaleSynchronous, lr=RATE, bound=4),
        "SoftSync": served(pl.SoftSync, lr=RATE, updates=2),
        "Downpour": served(pl.Downpour),
        "ASGD": served(pl.ASGD),
        "DelayCompensated": served(pl.DelayCompensated, lr=RATE),
        "AsyncMomentum": served(pl.AsyncMomentum, lr=RATE / 4, momentum=0.5),
        "AsyncDiLoCo": served(pl.AsyncDiLoCo, period=8),
        "Sandblaster": pl.Sandblaster(durability="process"),
    },
    "elastic": {
        "EASGD": pl.EASGD(),
        "AsyncEASGD": served(pl.AsyncEASGD),
        "RoundRobinEASGD": served(pl.RoundRobinEASGD),
        "EAMSGD": served(pl.EAMSGD, momentum=0.5),
        "EAWild": pl.EAWild(),
        "Hogwild": pl.Hogwild(),
    },
    "decentralised": {
        "Gossip": pl.Gossip(),
        "Strom": pl.Strom(None, lr=RATE / WORKERS),
    },
}
STRATEGIES = {name: strategy for family in METHODS.values() for name, strategy in family.items()}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.002)


def task_of(method: str, seed: int, beats: int | None = None, epochs: int = EPOCHS) -> pl.Task:
    """The task; its workers note their gradients in the file `beats`."""
    x, y, _, _ = digits()

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        if beats is not None:
            time.sleep(GRADIENT_S)
            os.write(beats, BEAT.pack(time.monotonic(), len(batch[0])))
        return F.cross_entropy(model(batch[0]), batch[1])

    return pl.Task(
        model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        loss=loss,
        data=(x, y),
        batch=BATCH,
        optimizer=adam if method == "OneBitAdam" else sgd,
        epochs=epochs,
        seed=seed,
    )


class Disturber:
    """Kills and stops processes of a run, one after another, by a seed.

    It leaves one worker that has been running for a while: if all workers that have the model are killed, it is lost.
    """

    def __init__(self, seed: int, strategy: pl.Strategy) -> None:
        self.done = {"kills": 0, "stops": 0, "shard kills": 0}
        self._chance = random.Random(seed)
        self._has_shards = strategy.servers > 0
        self._undisturbed: dict[int, float] = {}  # Since when each worker runs undisturbed.
        self._over = threading.Event()
        self.servers = Servers()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _run(self) -> None:
        self._over.wait(1.0)
        while sum(self.done.values()) < EVENTS and not self._over.wait(self._chance.uniform(0.1, 0.6)):
            self.servers.shards()
            if self._has_shards and self._chance.random() < SHARDS:
                self._kill_shard()
            else:
                self._disturb_worker()

    def _kill_shard(self) -> None:
        if shards := self.servers.shards():
            with suppress(ProcessLookupError):
                os.kill(self._chance.choice(shards), signal.SIGKILL)
                self.done["shard kills"] += 1

    def _disturb_worker(self) -> None:
        now = time.monotonic()
        pids = {p.pid for p in multiprocessing.active_children() if p.name.startswith("worker-") and p.pid}
        self._undisturbed = {pid: self._undisturbed.get(pid, now) for pid in sorted(pids)}
        settled = [pid for pid, since in self._undisturbed.items() if now - since > SETTLED_S]
        struck = [pid for pid in self._undisturbed if settled not in ([], [pid])]
        if not struck:
            return
        pid, is_stop = self._chance.choice(struck), self._chance.random() < STOPS
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if is_stop else signal.SIGKILL)
            self.done["stops" if is_stop else "kills"] += 1
            if is_stop:
                self._over.wait(self._chance.uniform(0.1, 3 * SILENT_S))
                os.kill(pid, signal.SIGCONT)
                self._undisturbed[pid] = time.monotonic()


class Servers:
    """The shards of a run, and the processes that keep them: also those whose parents were killed."""

    def __init__(self) -> None:
        self._known = {os.getpid()}

    def shards(self) -> list[int]:
        found: dict[int, tuple[str, int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                name, rest = stat.read_text().partition("(")[2].rpartition(")")[::2]
                state, parent = rest.split()[:2]
                if state != "Z":
                    found[int(stat.parent.name)] = name, int(parent)
        self._known = {pid for pid in found if self._is_known(pid, found)}
        return sorted(pid for pid in self._known if found[pid][0] == SHARD)

    def _is_known(self, pid: int, found: dict[int, tuple[str, int]]) -> bool:
        while pid in found and pid not in self._known:
            pid = found[pid][1]
        return pid in found


class Job(NamedTuple):
    method: str
    seed: int
    is_disturbed: bool


class Started:
    """One run in a process of its own, with a folder of its own."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._folder = Path(tempfile.mkdtemp(prefix="stops-"))
        self._before, self._began = everything(self._folder), time.monotonic()
        self._result = Path(f"{self._folder}.json")
        self.process = multiprocessing.get_context("fork").Process(target=child, args=(job, self._folder, self._result))
        self.process.start()

    @property
    def left_s(self) -> float:
        return self._began + LIMIT_S - time.monotonic()

    def result(self) -> dict[str, Any]:
        """What the run has found; one that has not ended by now hangs."""
        seconds = time.monotonic() - self._began
        found: dict[str, Any] = {"ended": "no result"}
        if self.process.is_alive():
            found = {"ended": "hangs"}
            self.process.kill()
        self.process.join()
        if self._result.exists():
            found = json.loads(self._result.read_text())
            self._result.unlink()
        left, until = leftovers(self._before, self._folder), time.monotonic() + 5.0
        while left and time.monotonic() < until:
            time.sleep(0.1)
            left = leftovers(self._before, self._folder)
        job = self.job
        told = {"method": job.method, "seed": job.seed, "disturbed": job.is_disturbed, "seconds": round(seconds, 1)}
        return told | {"left": left, **found}


def in_turn(jobs: list[Job], processes: int, until: float) -> Iterator[dict[str, Any]]:
    """The results of these jobs, so many at a time; those that have not begun by then are left out."""
    waiting, going = jobs[::-1], list[Started]()
    while going or (waiting and time.monotonic() < until):
        while waiting and len(going) < processes and time.monotonic() < until:
            going.append(Started(waiting.pop()))
        wait([started.process.sentinel for started in going], timeout=max(0.1, min(g.left_s for g in going)))
        for started in [g for g in going if not g.process.is_alive() or g.left_s <= 0]:
            going.remove(started)
            yield started.result()


def child(job: Job, folder: Path, result: Path) -> None:
    os.setsid()
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    torch.set_num_threads(1)
    _, _, x, y = digits()
    strategy, found = STRATEGIES[job.method], dict[str, Any]()
    disturber = Disturber(job.seed, strategy)
    options: dict[str, Any] = {"silent_s": SILENT_S, "timeout_s": 120.0, "replacements": 2 * EVENTS}
    if not strategy.needs.elastic:  # Its workers wait for each other.
        options["elastic"] = True
    with tempfile.TemporaryFile() as beats:
        task = task_of(job.method, job.seed, os.dup(beats.fileno()))
        try:
            if job.is_disturbed:
                with disturber.running():
                    ended = pl.train(task, strategy, WORKERS, **options)
            else:
                ended = pl.train(task, strategy, WORKERS, **options)
            found = {"ended": "finished", "accuracy": round(100 * accuracy(ended.model, x, y), 2)}
            if strategy.servers and not strategy.coordinators:  # Sandblaster counts portions, not samples.
                shards = range(WORKERS, WORKERS + strategy.servers)
                found["applied"] = [sum(int(p.samples) for p in ended.trace.points if p.rank == r) for r in shards]
        except BaseException as error:
            found = {"ended": f"{type(error).__name__}: {error}".partition("\n")[0]}
        end = time.monotonic() + 5.0
        while (shards := disturber.servers.shards()) and time.monotonic() < end:
            time.sleep(0.1)
        found["left shards"] = len(shards)
        beats.seek(0)
        noted = sorted(BEAT.iter_unpack(beats.read()))
    found |= {
        "needed": len(task.data[0]) * EPOCHS,
        "computed": sum(samples for _, samples in noted),
        "pause_s": round(max((b - a for (a, _), (b, _) in pairwise(noted)), default=0.0), 2),
    }
    result.write_text(json.dumps(found | disturber.done))
    os._exit(0)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


HEAD = [
    "method",
    "runs",
    "workers killed",
    "stopped",
    "shards killed",
    "finished",
    "left behind",
    "accuracy, undisturbed",
    "disturbed",
    "longest pause: undisturbed",
    "disturbed, median",
    "most",
    "gradients computed, of those needed",
    "samples applied too often or not at all",
]


def line_of(method: str, runs: list[dict[str, Any]]) -> list[str]:
    calm, wild = ([r for r in runs if r["disturbed"] is is_wild] for is_wild in (False, True))
    off = [abs(n - r["needed"]) for r in wild for n in r.get("applied", [])]
    pauses = [r["pause_s"] for r in wild if r["ended"] == "finished"]
    in_vain = [r["computed"] / r["needed"] for r in wild if r["ended"] == "finished"]
    return [
        method,
        str(len(wild)),
        *(str(sum(r.get(kind, 0) for r in wild)) for kind in ("kills", "stops", "shard kills")),
        str(sum(r["ended"] == "finished" for r in wild)),
        str(sum(len(r["left"]) + r.get("left shards", 0) for r in wild)),
        spread([r["accuracy"] for r in calm if "accuracy" in r]),
        spread([r["accuracy"] for r in wild if "accuracy" in r]),
        f"{max((r['pause_s'] for r in calm), default=0.0):.2f} s",
        f"{median(pauses):.2f} s" if pauses else "-",
        f"{max(pauses):.2f} s" if pauses else "-",
        f"{mean(in_vain):.3f}" if in_vain else "-",
        str(sum(off)) if off else "-",
    ]


def spread(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{mean(values):.2f} %" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def events_of(runs: list[dict[str, Any]], method: str) -> int:
    return sum(r.get(k, 0) for r in runs if r["method"] == method for k in ("kills", "stops", "shard kills"))


def jobs_of(methods: list[str], runs: list[dict[str, Any]], events: int, seeds: int) -> list[Job]:
    """The undisturbed runs that are left, and for each method that has not had enough events one disturbed run more."""
    jobs: list[Job] = []
    for method in methods:
        own = [r for r in runs if r["method"] == method]
        calm = {r["seed"] for r in own if not r["disturbed"]}
        jobs += [Job(method, seed, False) for seed in range(seeds) if seed not in calm]
        if events_of(runs, method) < events:
            jobs.append(Job(method, sum(r["disturbed"] for r in own), True))
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--events", type=int, default=60, help="kills and stops of each method, at least")
    parser.add_argument("--seeds", type=int, default=2, help="undisturbed runs of each method")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run after so long")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--json", type=Path, help="where to keep the runs; those in it are not run again")
    args = parser.parse_args()
    runs: list[dict[str, Any]] = json.loads(args.json.read_text())["runs"] if args.json and args.json.exists() else []
    until = time.monotonic() + 60 * args.minutes
    for method in args.methods:  # It compiles the kernels, here and not in each worker.
        pl.simulate(task_of(method, 0, epochs=10), STRATEGIES[method], pl.Cluster(workers=WORKERS))
    while (jobs := jobs_of(args.methods, runs, args.events, args.seeds)) and time.monotonic() < until:
        for result in in_turn(jobs, args.processes, until):
            runs.append(result)
            print(json.dumps(result), file=sys.stderr, flush=True)
            if args.json:
                lines = ",\n".join(map(json.dumps, runs))
                args.json.write_text(f'{{"runs": [\n{lines}\n]}}\n')
    for family, methods in METHODS.items():
        own = {m: [r for r in runs if r["method"] == m] for m in methods}
        if lines := [line_of(m, found) for m, found in own.items() if found]:
            print(f"\n{family}\n")
            show(markdown(HEAD, lines) if args.markdown else table(HEAD, lines, right=1), width=240)


if __name__ == "__main__":
    main()
