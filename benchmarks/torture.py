"""Many seeds of fault simulation for every strategy: python -m benchmarks.torture --seeds 10000 --minutes 20

Results of earlier calls stay: a call adds seeds after those that a strategy has, of the same code.  A strategy whose
seeds break an invariant keeps the list of them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

import paceline as pl
from paceline.codecs import OneBit, Threshold, TopK
from paceline.server.rules import Sgd
from paceline.study.torture import Campaign, Tortured, every

RESULTS = Path(__file__).parents[1] / "docs" / "results"
STEP = 100  # Seeds of a strategy before the next one has its turn.

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
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--fresh", action="store_true", help="forget the results of earlier calls")
    given = parser.parse_args()
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * given.minutes
    path = RESULTS / "torture.json"
    found: dict[str, Any] = {} if given.fresh or not path.exists() else json.loads(path.read_text())
    chosen = {name: CASES[name] for name in given.only or CASES}
    campaigns = {name: Campaign(strategy) for name, strategy in chosen.items()}
    while time.monotonic() < end:
        due = [name for name in campaigns if found.get(name, {}).get("seeds", 0) < given.seeds]
        if not due:
            break
        name = min(due, key=lambda name: found.get(name, {}).get("seeds", 0))
        first = found.get(name, {}).get("seeds", 0)
        found[name] = added(found.get(name), campaigns[name].run(range(first, min(first + STEP, given.seeds))))
        path.write_text(json.dumps(found, indent=1) + "\n")
    path.write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "torture.md").write_text(page(found))


def added(before: dict[str, Any] | None, new: Tortured) -> dict[str, Any]:
    before = before or {"seeds": 0, "faults": 0, "virtual_s": 0.0, "cpu_s": 0.0, "failures": []}
    return {
        "seeds": before["seeds"] + new.seeds,
        "faults": before["faults"] + new.faults.total(),
        "virtual_s": round(before["virtual_s"] + new.virtual_s, 1),
        "cpu_s": round(before["cpu_s"] + new.seconds, 2),
        "failures": before["failures"] + [[f.seed, f.invariant, f.seen] for f in new.failures],
    }


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
            "Four workers, 8 steps, a model of 64 values; CPU seconds of one core, beside other work.",
            "",
            f"{seeds:,} seeds in all, from 0 on for each strategy.",
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
