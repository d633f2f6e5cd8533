"""Many seeds of fault simulation for every strategy: python -m benchmarks.torture --seeds 10000 --minutes 20

It can be stopped at any time, and called again: results of earlier calls stay in torture.json, with the seeds that they
are of, and a call runs seeds that no call has run.  `--fresh` forgets them: after a change of plans or strategies they
are of other runs.  A strategy whose seeds break an invariant keeps the list of them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import paceline as pl
from paceline.codecs import OneBit, Threshold, TopK
from paceline.server.rules import Sgd
from paceline.study.torture import Campaign, Tortured, every

RESULTS = Path(__file__).parents[1] / "docs" / "results"
STEP = 50  # Seeds of a strategy before the next one has its turn.

CASES: dict[str, pl.Strategy] = every() | {
    "then": pl.Then(pl.AllReduceSGD(), pl.PeriodicAveraging(period=3), steps=3),
    "all-reduce-sgd by one-bit": pl.AllReduceSGD(codec=OneBit()),
    "all-reduce-sgd by top-k": pl.AllReduceSGD(codec=TopK(ratio=0.1)),
    "periodic-averaging by one-bit, delayed": pl.PeriodicAveraging(period=3, codec=OneBit(), delay=1),
    "parameter-server of 1": pl.ParameterServer(rule=Sgd(lr=0.05), servers=1),
    "parameter-server by one-bit": pl.ParameterServer(rule=Sgd(lr=0.05), codec=OneBit(), pulls=OneBit()),
    "stale-synchronous, bound 1": pl.StaleSynchronous(lr=0.05, bound=1),
    "downpour, seldom": pl.Downpour(push=3, fetch=2),
    "asgd, pipelined": pl.ASGD(period=2, pipeline=True),
    "async-diloco, delayed": pl.AsyncDiLoCo(period=4, delay=1),
    "ea-wild on shards": pl.EAWild(period=2, servers=2),
    "strom by thresholds": pl.Strom(Threshold(tau=0.01, limit=math.inf), lr=0.05),
    "gossip, without overlap": pl.Gossip(overlap=False),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10_000, help="of each case in the end")
    parser.add_argument("--minutes", type=float, default=10.0, help="start nothing after so long")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--fresh", action="store_true", help="forget the results of earlier calls")
    given = parser.parse_args()
    path = RESULTS / "torture.json"
    found: dict[str, Any] = {} if given.fresh or not path.exists() else json.loads(path.read_text())
    names = given.only or list(CASES)
    end = time.monotonic() + 60 * given.minutes
    running: dict[Future[Tortured], tuple[str, range]] = {}
    with ProcessPoolExecutor(given.processes, mp_context=get_context("fork"), initializer=start) as pool:
        while True:
            while len(running) < given.processes and time.monotonic() < end:
                part = next_part(found, names, given.seeds, list(running.values()))
                if part is None:
                    break
                running[pool.submit(run, *part)] = part
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name, seeds = running.pop(future)
                found[name] = added(found.get(name), seeds, future.result())
                write(path, json.dumps(found, indent=1) + "\n")
    write(RESULTS / "torture.md", page({name: found[name] for name in CASES if name in found}))


def start() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # The models and the data are tiny, and some methods say so.


@cache
def campaign(name: str) -> Campaign:
    """One for each process: what a strategy promises is measured once."""
    return Campaign(CASES[name])


def run(name: str, seeds: range) -> Tortured:
    return campaign(name).run(seeds)


def next_part(
    found: dict[str, Any], names: Sequence[str], seeds: int, running: Sequence[tuple[str, range]]
) -> tuple[str, range] | None:
    """The case with the fewest seeds, and the first of its seeds that no call has run."""
    done = {name: set[int]() for name in names}
    for name in names:
        for first, stop in found.get(name, {}).get("ranges", []):
            done[name] |= set(range(first, stop))
    for name, its in running:
        done[name] |= set(its)
    name = min(names, key=lambda name: len(done[name]))
    first = next((seed for seed in range(seeds) if seed not in done[name]), None)
    if first is None:
        return None
    stop = next((seed for seed in range(first, first + STEP) if seed in done[name]), first + STEP)
    return name, range(first, min(stop, seeds))


def write(path: Path, text: str) -> None:
    """All of it or nothing: the process may be stopped."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def added(before: dict[str, Any] | None, seeds: range, new: Tortured) -> dict[str, Any]:
    before = before or {"ranges": [], "seeds": 0, "faults": 0, "virtual_s": 0.0, "cpu_s": 0.0, "failures": []}
    return {
        "ranges": merged([*before["ranges"], [seeds.start, seeds.stop]]),
        "seeds": before["seeds"] + new.seeds,
        "faults": before["faults"] + new.faults.total(),
        "virtual_s": round(before["virtual_s"] + new.virtual_s, 1),
        "cpu_s": round(before["cpu_s"] + new.seconds, 2),
        "failures": before["failures"] + [[f.seed, f.invariant, f.seen] for f in new.failures],
    }


def merged(ranges: list[list[int]]) -> list[list[int]]:
    """The same seeds in the fewest ranges.

    >>> merged([[100, 200], [0, 100], [300, 400]])
    [[0, 200], [300, 400]]
    """
    joined: list[list[int]] = []
    for first, stop in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1][1] = max(stop, joined[-1][1])
        else:
            joined.append([first, stop])
    return joined


def page(found: dict[str, Any]) -> str:
    rows = [
        f"| {name} | {f['seeds']:,} | {f['faults']:,} | {f['virtual_s']:,.0f} | {len(f['failures'])} | "
        f"{1000 * f['cpu_s'] / f['seeds']:.1f} |"
        for name, f in found.items()
    ]
    broken = [
        f"- {name}, seed {seed}: {invariant}: {' '.join(seen.split())[:200]}"
        for name, f in found.items()
        for seed, invariant, seen in f["failures"][:3]
    ]
    seeds = sum(f["seeds"] for f in found.values())
    return "\n".join(
        [
            "# Torture: strategies under random faults",
            "",
            "Written by `python -m benchmarks.torture`; the figures are in torture.json.",
            "[faults.md](../faults.md#torture) says what a seed is and what is checked.",
            "Four workers, 8 steps, a model of 64 values; where workers die in collectives 12 steps and 96 values.",
            "CPU seconds of one core, beside other work.",
            "",
            f"{seeds:,} seeds in all; torture.json says which ones of each strategy.",
            "",
            "| strategy | seeds | faults | virtual s | violations | s per 1000 seeds |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            *(
                ["## Violations", "", "Up to three of each strategy.  They are open.", "", *broken, ""]
                if broken
                else []
            ),
        ]
    )


if __name__ == "__main__":
    main()
