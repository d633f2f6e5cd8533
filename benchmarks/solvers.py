"""Six asynchronous solvers on one host: time to an accuracy on Fashion-MNIST, on 4 simulated GPUs and 4 real processes.

The comparison of the EA-wild paper: EA-wild, Hogwild!, a parameter server, asynchronous momentum, EAMSGD, and
round-robin EASGD (with the lock that the paper criticises). The simulated GPUs take 1 ms for a gradient of 32 images
and reach their host's memory over one bus of 12 GB/s, as on a PCIe switch. Real processes really compute, four on the
available cores, and one run at a time. Every solver runs at its own best of six learning rates, tried in the simulator
on held-out images. Runs that are already in the --json file do not run again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import paceline as pl
from benchmarks._frame import accuracy_of, arguments, markdown, read_runs, show, spread, table, worked, write_runs
from benchmarks._solvers_chart import chart, mean_of
from benchmarks.accuracy import loss, perceptron, pixels
from paceline.data import fashion_mnist

WORKERS, MINIBATCH, EPOCHS = 4, 32, 5
TARGET = 86.0  # Percent of the test images.
RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
SWEEP_SEED = 100
IN_TURNS = "EASGD in turns"
SOLVERS = {  # `lr` stands for the rate. Where shards step, they have it; otherwise the workers' optimizer has it.
    "EA-wild": "EAWild()",
    "Hogwild!": "Hogwild()",
    "parameter server": "ParameterServer(rule=Sgd(lr=lr), servers=1)",
    "asynchronous momentum": "AsyncMomentum(lr=lr, unit_gain=True, servers=1)",
    "EAMSGD": "EAMSGD(period=1, momentum=0.5, servers=1)",
    IN_TURNS: "RoundRobinEASGD(period=1, servers=1)",
}
KINDS = {"simulated": f"{WORKERS} simulated GPUs", "real": f"{WORKERS} real processes"}
CLUSTER = pl.Cluster(
    workers=WORKERS, compute=pl.LogNormal("1ms", sigma=0.2), latency="20us", bus="12GB/s", memory_bandwidth="20GB/s"
)
SETTINGS = {"epochs": EPOCHS, "minibatch": MINIBATCH, "workers": WORKERS}
HEAD = ["solver", "rate"] + [
    f"{kind}: {what}"
    for kind in KINDS
    for what in ("1000 samples/s", f"times {IN_TURNS}", f"s to {TARGET:g} %", "final, %")
]
AT_AN_END = "* The best of the rates tried is at an end of them."
Key = tuple[str, str, float, int]  # Solver, kind, rate, seed.
Runs = dict[Key, dict[str, Any]]


def strategy_of(solver: str, rate: float) -> pl.Strategy:
    return eval(SOLVERS[solver], dict(vars(pl)) | {"lr": rate})


def task_of(rate: float, seed: int, data: fashion_mnist.FashionMnist, *, held_out: bool = False) -> pl.Task:
    images, labels = pixels(data.images), data.labels.long()
    test_images, test_labels = pixels(data.test_images), data.test_labels.long()
    if held_out:
        (images, test_images), (labels, test_labels) = images.split(50_000), labels.split(50_000)
    batch = WORKERS * MINIBATCH
    return pl.Task(
        model=perceptron,
        loss=loss,
        data=(images, labels),
        batch=batch,
        optimizer=partial(torch.optim.SGD, lr=rate),
        epochs=EPOCHS,
        evaluate=accuracy_of(test_images, test_labels),
        evaluate_every=len(labels) // batch // 5,
        seed=seed,
    )


def result_of(solver: str, kind: str, rate: float, seed: int, folder: Path | None) -> dict[str, Any]:
    """One run: its speed, and its accuracy after some seconds and samples.

    Time starts with the first gradient: the start of a real server process takes as long as thousands of gradients.
    """
    task, strategy = (
        task_of(rate, seed, fashion_mnist.load(folder), held_out=kind == "held out"),
        strategy_of(solver, rate),
    )
    run = (
        pl.train(task, strategy, workers=WORKERS)
        if kind == "real"
        else pl.simulate(task, strategy, CLUSTER, strict=False)
    )
    spans = [span for span in run.trace.spans if span.kind == "gradient"]
    begin, end = min(span.start for span in spans), max(span.stop for span in spans)
    return {
        "solver": solver,
        "kind": kind,
        "rate": rate,
        "seed": seed,
        "samples_per_s": round(task.total_steps * task.batch / (end - begin), 1),
        "accuracy": round(run.final["accuracy"], 2),
        "curve": [(round(e.time - begin, 4), e.samples, round(e.values["accuracy"], 2)) for e in run.trace.evaluations],
    }


def key(run: dict[str, Any]) -> Key:
    return run["solver"], run["kind"], run["rate"], run["seed"]


def own_rate(solver: str, runs: Runs) -> float | None:
    """The rate with the best accuracy on held-out images; None if not all of them have run."""
    tried = [runs.get((solver, "held out", rate, SWEEP_SEED)) for rate in RATES]
    found = {run["rate"]: run["accuracy"] for run in tried if run is not None}
    return max(found, key=found.__getitem__) if len(found) == len(RATES) else None


def own_runs(solver: str, kind: str, runs: Runs) -> dict[int, dict[str, Any]]:
    """The runs of a solver at its own rate, by their seeds."""
    rate = own_rate(solver, runs)
    return {
        run["seed"]: run
        for _, run in sorted(runs.items())
        if (run["solver"], run["kind"], run["rate"]) == (solver, kind, rate)
    }


def reached(run: dict[str, Any]) -> float | None:
    """The seconds until it first had the accuracy; None if it never had."""
    return next((seconds for seconds, _, accuracy in run["curve"] if accuracy >= TARGET), None)


def cells(solver: str, kind: str, runs: Runs) -> list[str]:
    own, in_turns = own_runs(solver, kind, runs), own_runs(IN_TURNS, kind, runs)
    if not own:
        return [""] * 4
    times = [seconds for run in own.values() if (seconds := reached(run)) is not None]
    # Within a seed, whose runs follow each other.
    ratios = [run["samples_per_s"] / in_turns[seed]["samples_per_s"] for seed, run in own.items() if seed in in_turns]
    return [
        spread([run["samples_per_s"] / 1e3 for run in own.values()], "{:.1f}"),
        spread(ratios, "{:.2f}") if ratios and solver != IN_TURNS else "",
        spread(times, "{:.2f}") if len(times) == len(own) else f"{len(times)} of {len(own)} runs",
        spread([run["accuracy"] for run in own.values()], "{:.2f}"),
    ]


def lines(runs: Runs) -> list[list[str]]:
    return [
        [solver, told_rate(own_rate(solver, runs)), *(cell for kind in KINDS for cell in cells(solver, kind, runs))]
        for solver in SOLVERS
    ]


def told_rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:g}" + ("*" if rate in (RATES[0], RATES[-1]) else "")


def main() -> None:
    args = arguments(__doc__, "solvers.json", runs_of="solver").parse_args()
    runs: Runs = {} if args.fresh else {key(run): run for run in read_runs(args.json, **SETTINGS)}

    def keep(found: Iterable[dict[str, Any]]) -> None:
        for run in found:
            runs[key(run)] = run
            told = f"{run['kind']}, rate {run['rate']:g}, seed {run['seed']}, {run['solver']}"
            print(
                f"{run['accuracy']:.2f} %, {run['samples_per_s']:,.0f} samples/s: {told}", file=sys.stderr, flush=True
            )
            write_runs(args.json, (runs[k] for k in sorted(runs)), **SETTINGS)

    def missing(keys: Iterable[Key]) -> list[tuple[str, str, float, int, Path | None]]:
        return [(*k, args.data) for k in keys if k not in runs]

    if args.processes:
        fashion_mnist.load(args.data)  # If the data are missing, only one process says so.
        keep(
            worked(
                result_of,
                missing((solver, "held out", rate, SWEEP_SEED) for rate in RATES for solver in SOLVERS),
                args.processes,
            )
        )
        # The solvers take turns, so that a disturbance of the machine affects all of them.
        own = [(solver, own_rate(solver, runs), seed) for seed in range(args.seeds) for solver in SOLVERS]
        of_kind = {
            kind: missing((solver, kind, rate, seed) for solver, rate, seed in own if rate is not None)
            for kind in KINDS
        }
        keep(worked(result_of, of_kind["simulated"], args.processes))
        keep(result_of(*job) for job in of_kind["real"])  # They are timed, so nothing else runs at the same time.
    told = lines(runs)
    show(markdown(HEAD, told) if args.markdown else table(HEAD, told, right=1), width=160)
    if any("*" in rate for _, rate, *_ in told):
        print(f"\n{AT_AN_END}")
    panels = {
        title: {
            solver: mean_of([run["curve"] for run in own.values()])
            for solver in SOLVERS
            if (own := own_runs(solver, kind, runs))
        }
        for kind, title in KINDS.items()
    }
    if all(panels.values()):
        args.json.with_suffix(".svg").write_text(chart(panels, TARGET))


if __name__ == "__main__":
    main()
