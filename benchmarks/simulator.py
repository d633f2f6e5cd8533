"""The awaits a second of the simulator, with ranks that compute nothing and exchange a few values.

Three patterns: neighbours in a ring exchange messages, all ranks reduce, workers push to and pull from parameter
servers. `strict` also checks that no buffer in flight is written to. "all three" is the sum of their awaits over the
sum of their seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.endpoint import Layout
from paceline.protocol.messages import Message
from paceline.sim.cluster import Cluster
from paceline.sim.endpoint import SimEndpoint
from paceline.sim.simulator import Simulator
from paceline.sim.world import World

VALUES = 4  # of a tensor that is sent
RANKS_PER_SERVER = 16
SIZES = [8, 64, 512, 1024]


class Values(Message):
    values: torch.Tensor


def compute_s(rank: int) -> float:
    """Ranks are not equally fast, so their events interleave."""
    return 1e-3 * (1 + rank % 7 / 10)


async def ring(endpoint: SimEndpoint, steps: int) -> None:
    x, ranks = torch.ones(VALUES), len(endpoint.ranks)
    left, right = (endpoint.rank - 1) % ranks, (endpoint.rank + 1) % ranks
    for _ in range(steps):
        await endpoint.busy(compute_s(endpoint.rank))
        sending = endpoint.send(right, Values(x))
        await endpoint.recv(src=left)
        await sending


async def reduction(endpoint: SimEndpoint, steps: int) -> None:
    x = torch.ones(VALUES)
    for _ in range(steps):
        await endpoint.busy(compute_s(endpoint.rank))
        await endpoint.all_reduce(x)


async def worker(endpoint: SimEndpoint, steps: int) -> None:
    x, layout = torch.ones(VALUES), endpoint.layout
    server = layout.workers + endpoint.rank % layout.servers
    for _ in range(steps):
        await endpoint.busy(compute_s(endpoint.rank))
        await endpoint.send(server, Values(x))
        await endpoint.recv()


async def server(endpoint: SimEndpoint, steps: int) -> None:
    layout, x = endpoint.layout, torch.zeros(VALUES)
    place = endpoint.rank - layout.workers
    for _ in range(steps * len(range(place, layout.workers, layout.servers))):
        push = await endpoint.recv()
        await endpoint.compute(lambda: None, nbytes=4 * VALUES)
        await endpoint.send(push.src, Values(x))


def play(pattern: str, ranks: int, steps: int, *, strict: bool) -> tuple[int, float, float]:
    """The awaits, seconds and CPU seconds of one run."""
    servers = max(1, ranks // RANKS_PER_SERVER) if pattern == "server" else 0
    layout = Layout(ranks - servers, servers)
    simulator = Simulator(layout.name)
    world = World(simulator, Cluster(workers=layout.workers), layout, strict=strict)
    role: Callable[[SimEndpoint, int], Coroutine[Any, Any, None]] = {
        "ring": ring,
        "reduction": reduction,
        "server": worker,
    }[pattern]
    roles = {rank: role(SimEndpoint(world, rank), steps) for rank in layout.worker_ranks}
    roles |= {rank: server(SimEndpoint(world, rank), steps) for rank in layout.server_ranks}
    gc.collect()
    began, began_cpu = time.perf_counter(), time.process_time()
    simulator.run(roles)
    return simulator.waits, time.perf_counter() - began, time.process_time() - began_cpu


def measure(waits: int, repeats: int) -> list[dict[str, Any]]:
    """About this many awaits for every pattern, size and mode. Rates are medians over the repeats."""
    rows: list[dict[str, Any]] = []
    for strict in (True, False):
        for ranks in SIZES:
            runs: dict[str, list[tuple[int, float, float]]] = {"ring": [], "reduction": [], "server": []}
            for _ in range(repeats):
                for pattern, done in runs.items():
                    done.append(play(pattern, ranks, max(2, waits // (3 * ranks)), strict=strict))
            runs["all three"] = [
                tuple(map(sum, zip(*together, strict=True))) for together in zip(*runs.values(), strict=True)
            ]  # type: ignore
            for pattern, done in runs.items():
                rates = sorted(n / seconds for n, seconds, _ in done)
                cpu = median(n / cpu for n, _, cpu in done)
                row = {"pattern": pattern, "ranks": ranks, "strict": strict, "waits_per_s": median(rates)}
                rows.append(row | {"least": rates[0], "most": rates[-1], "waits_per_cpu_s": cpu})
    return rows


def table(rows: list[dict[str, Any]], *, strict: bool) -> Table:
    made = Table(
        "",
        *(f"{ranks} ranks" for ranks in SIZES),
        title=f"thousand awaits a second (a second of CPU time), strict={strict}",
    )
    for column in made.columns[1:]:
        column.justify = "right"
    for pattern in ("ring", "reduction", "server", "all three"):
        chosen = [row for row in rows if row["pattern"] == pattern and row["strict"] == strict]
        made.add_row(
            pattern, *(f"{row['waits_per_s'] / 1e3:.0f} ({row['waits_per_cpu_s'] / 1e3:.0f})" for row in chosen)
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer awaits and repeats")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(*((20_000, 3) if args.quick else (100_000, 7)))
    for strict in (True, False):
        Console().print(table(rows, strict=strict))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
