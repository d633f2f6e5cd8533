"""The link of a host is cut for some seconds: three hosts in network namespaces, one worker on each. Needs root.

A small perceptron learns handwritten digits. After three seconds the third host's link goes down, and later up again.
Each worker notes the time and the samples of every gradient, so pauses are seen on the run itself: of the workers that
could still reach each other, of the one that was cut off, and how long after the link came back that one goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from benchmarks._frame import markdown, show, table
from paceline.data import digits
from tests.dist.hosts import hosts, run_on, why_not

HOSTS, BATCH, GRADIENT_S, RATE = 3, 96, 0.02, 0.1
SILENT_S = 2.0
CUT_AFTER_S = 3.0
LIMIT_S = 300.0
SECONDS = (0, 5, 60)  # How long the link is cut.
METHODS: dict[str, pl.Strategy] = {
    "AllReduceSGD": pl.AllReduceSGD(),
    "PeriodicAveraging": pl.PeriodicAveraging(period=8),
    "DiLoCo": pl.DiLoCo(period=8),
    "EASGD": pl.EASGD(),
    "ParameterServer": pl.ParameterServer(rule=pl.rules.Sgd(lr=RATE)),
    "StaleSynchronous": pl.StaleSynchronous(lr=RATE, bound=4),
    "AsyncEASGD": pl.AsyncEASGD(),
    "Gossip": pl.Gossip(),
    "Strom": pl.Strom(None, lr=RATE / HOSTS),
}


def work(method: str, epochs: int, folder: Path) -> None:
    """What a worker does."""
    torch.set_num_threads(1)
    x, y, x_test, y_test = digits()
    with (folder / f"beats-{os.environ['RANK']}").open("a") as beats:

        def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
            time.sleep(GRADIENT_S)
            print(time.monotonic(), len(batch[0]), file=beats, flush=True)
            return F.cross_entropy(model(batch[0]), batch[1])

        task = pl.Task(
            model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
            loss=loss,
            data=(x, y),
            batch=BATCH,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
            epochs=epochs,
        )
        strategy = METHODS[method]
        options: dict[str, Any] = {} if strategy.needs.elastic else {"elastic": True}
        ended = pl.train(task, strategy, silent_s=SILENT_S, timeout_s=120.0, **options)
    with torch.no_grad():
        accuracy = (ended.model(x_test).argmax(1) == y_test).float().mean().item()
    print(json.dumps({"accuracy": round(100 * accuracy, 2), "needed": len(x) * epochs}), flush=True)


def run(method: str, cut_s: float, epochs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, hosts(HOSTS) as places:
        folder = Path(name)
        script = folder / "worker.py"
        call = f"work({method!r}, {epochs}, Path({name!r}))"
        script.write_text(f"from pathlib import Path\nfrom benchmarks.cut_links import work\n{call}\n")
        down, up, over = [0.0], [0.0], threading.Event()
        link = f"plv{os.getpid() % 100_000}{HOSTS - 1}"

        def cut() -> None:
            while not all(beats_of(folder / f"beats-{rank}") for rank in range(HOSTS)):  # All are at work.
                if over.wait(0.05):
                    return
            if not cut_s or over.wait(CUT_AFTER_S):
                return
            subprocess.run(["ip", "link", "set", link, "down"], check=True)
            down[0] = time.monotonic()
            over.wait(cut_s)
            subprocess.run(["ip", "link", "set", link, "up"], check=True)
            up[0] = time.monotonic()

        thread = threading.Thread(target=cut)
        thread.start()
        began = time.monotonic()
        found: dict[str, Any] = {"ended": "finished"}
        try:
            said = run_on(places, script, timeout_s=LIMIT_S)
            found |= json.loads(said[0].splitlines()[-1])
        except AssertionError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            found["ended"] = f"{lines[0][:60]} ... {lines[-1][:200]}"
        finally:
            over.set()
            thread.join()
        noted = [beats_of(folder / f"beats-{rank}") for rank in range(HOSTS)]
    others = sorted(t for beats in noted[:-1] for t, _ in beats)
    back = [t - up[0] for t, _ in noted[-1] if t > up[0]] if up[0] else []
    return {
        "method": method,
        "cut_s": cut_s,
        "seconds": round(time.monotonic() - began, 1),
        **found,
        "computed": sum(samples for beats in noted for _, samples in beats),
        "pause_s": round(max((b - a for a, b in pairwise(others)), default=0.0), 2),
        "back_s": round(back[0], 2) if back else None,
    }


def beats_of(path: Path) -> list[tuple[float, int]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(line.split()[0]), int(line.split()[1])) for line in lines]


HEAD = [
    "method",
    "link cut for",
    "runs",
    "finished",
    "seconds a run",
    "longest pause of the others",
    "back at work after the link",
    "accuracy",
    "gradients computed, of those needed",
]


def lines_of(runs: list[dict[str, Any]]) -> list[list[str]]:
    lines: list[list[str]] = []
    for method in METHODS:
        for cut_s in sorted({r["cut_s"] for r in runs}):
            own = [r for r in runs if (r["method"], r["cut_s"]) == (method, cut_s)]
            good = [r for r in own if r["ended"] == "finished"]
            back = [r["back_s"] for r in good if r["back_s"] is not None]
            if own:
                lines.append(
                    [
                        method,
                        f"{cut_s:g} s" if cut_s else "never",
                        str(len(own)),
                        str(len(good)),
                        f"{mean(r['seconds'] for r in own):.1f}",
                        f"{max(r['pause_s'] for r in good):.1f} s" if good else "-",
                        f"{median(back):.1f} s" if back else "-",
                        f"{mean(r['accuracy'] for r in good):.2f} %" if good else "-",
                        f"{mean(r['computed'] / r['needed'] for r in good):.2f}" if good else "-",
                    ]
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--cut", type=float, nargs="+", default=list(SECONDS), help="seconds")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--runs", type=int, default=1, help="runs of each kind")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path, help="where to keep the runs; those in it are not run again")
    args = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"hosts in network namespaces: {reason}")
    runs: list[dict[str, Any]] = json.loads(args.json.read_text())["runs"] if args.json and args.json.exists() else []
    for method in args.methods:
        for cut_s in args.cut:
            while sum((r["method"], r["cut_s"]) == (method, cut_s) for r in runs) < args.runs:
                runs.append(run(method, cut_s, args.epochs))
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
                if args.json:
                    lines = ",\n".join(map(json.dumps, runs))
                    args.json.write_text(f'{{"runs": [\n{lines}\n]}}\n')
    show(markdown(HEAD, lines_of(runs)) if args.markdown else table(HEAD, lines_of(runs), right=2), width=200)


if __name__ == "__main__":
    main()
