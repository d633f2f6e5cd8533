"""Workers killed while a job starts: after every step of the start, in five methods, on real processes.

An undisturbed run gives the steps of a worker's start. Then the first or another worker is killed after each one of
them, or it and its first replacement. A run must end with every sample applied, or with a sentence, and leave nothing
behind; what takes longer than the limit counts as hanging.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # So that forked processes need not.
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from benchmarks._frame import markdown, show, table
from tests.dist.starting import END, Steps, everything, leftovers, mortal

WORKERS, STEPS, BATCH = 3, 12, 6
LIMIT_S = 30.0
PATIENCE_S = 5.0  # A process that is ending is none that was left.
METHODS: dict[str, pl.Strategy] = {
    "ParameterServer": pl.ParameterServer(rule=pl.rules.Sgd(lr=1.0), servers=2),
    "StaleSynchronous": pl.StaleSynchronous(lr=1.0, bound=2, servers=2),
    "AsyncDiLoCo": pl.AsyncDiLoCo(period=2),
    "Gossip": pl.Gossip(),
    "AllReduceSGD": pl.AllReduceSGD(),
}
COUNTED = ("ParameterServer", "StaleSynchronous")  # Their updates add up to the number of times each sample was used.
SENTENCES = ("was killed by SIGKILL", "no worker took part until the end")


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = nn.Parameter(torch.zeros(STEPS * BATCH))


def task_of(steps: Steps) -> pl.Task:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        assert isinstance(model, Sum)
        steps.note(END)
        time.sleep(0.005)
        return -(batch[0] @ model.total).sum()

    return pl.Task(
        model=Sum,
        loss=loss,
        data=[torch.eye(STEPS * BATCH)],
        batch=BATCH,
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        steps=STEPS,
    )


def run(
    way: str, method: str, replacements: int, *, rank: int = -1, step: str = "", times: int = 1
) -> tuple[dict[str, Any], list[list[str]]]:
    """One run, in a process of its own with a folder of its own: what it ended with and left, and each rank's steps."""
    # No TemporaryDirectory: workers that are forked from here would remove it at their exit.
    folder = Path(tempfile.mkdtemp(prefix="startups-"))
    try:
        (folder / "tmp").mkdir()
        steps = Steps(folder, rank=rank, step=step, times=times)
        before, began = everything(folder / "tmp"), time.monotonic()
        child = {"train": trained, "paceline run": launched}[way]
        process = multiprocessing.get_context("fork").Process(target=child, args=(method, steps, replacements))
        process.start()
        process.join(LIMIT_S)
        is_hanging = process.is_alive()
        if is_hanging:
            process.kill()
            process.join()
        seconds = time.monotonic() - began
        left = leftovers(before, folder / "tmp")
        while left and time.monotonic() < began + seconds + PATIENCE_S:
            time.sleep(0.1)
            left = leftovers(before, folder / "tmp")
        text = (folder / "result").read_text() if (folder / "result").exists() else "no result"
        result = {
            "ended": "hangs" if is_hanging else text.partition("\n")[0],
            "seconds": round(seconds, 2),
            "killed": steps.killed,
            "left": [] if is_hanging else left,
        }
        return result, [steps.of(rank) for rank in range(WORKERS)] if rank < 0 else []
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def trained(method: str, steps: Steps, replacements: int) -> None:
    """By pl.train: workers are forked from this process."""
    os.environ["TMPDIR"] = str(steps.folder / "tmp")
    tempfile.tempdir = None
    torch.set_num_threads(1)
    text = "no result"
    try:
        with mortal(steps):
            done = pl.train(
                task_of(steps), METHODS[method], WORKERS, replacements=replacements, silent_s=5.0, timeout_s=20.0
            )
        wrong = int((done.params != 1.0).sum()) if method in COUNTED else 0
        text = "finished" if not wrong else f"finished, {wrong} samples not applied once"
    except pl.ClusterError as error:
        text = f"error: {error}"
    except BaseException:
        text = f"raw: {traceback.format_exc()}".replace("\n", " ")
    (steps.folder / "result").write_text(text)
    os._exit(0)


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
import torch
torch.set_num_threads(1)
import paceline as pl
from benchmarks.startups import METHODS, Sum, data
from tests.dist.starting import END, Steps, mortal
steps = Steps(Path({folder!r}), rank={rank}, step={step!r}, times={times})
with mortal(steps):
    model = Sum()
    strategy = METHODS[{method!r}]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0) if strategy.needs.optimizer else None
    with pl.attach(model, optimizer, strategy, timeout_s=20.0) as session:
        for (batch,) in session.shard(data()):
            model.zero_grad()
            steps.note(END)
            (-(batch @ model.total).sum()).backward()
            session.step()
"""


def launched(method: str, steps: Steps, replacements: int) -> None:
    """By `paceline run`: workers run a script, and servers are fresh interpreters."""
    from paceline.engines.launch import launch

    os.environ["TMPDIR"] = str(steps.folder / "tmp")
    tempfile.tempdir = None
    script = steps.folder / "script.py"
    root = str(Path(__file__).resolve().parents[1])
    victim = steps.victim._asdict()
    script.write_text(SCRIPT.format(root=root, folder=str(steps.folder), method=method, **victim))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(steps.folder / "said", os.O_WRONLY | os.O_CREAT), 2)
    text = "finished"
    is_elastic = METHODS[method].needs.elastic
    try:
        launch([str(script)], WORKERS, replacements=replacements if is_elastic else None)
    except pl.ClusterError as error:
        text = f"error: {error}"
    except BaseException:
        text = f"raw: {traceback.format_exc()}".replace("\n", " ")
    (steps.folder / "result").write_text(text)
    os._exit(0)


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.eye(STEPS * BATCH)), batch_size=BATCH)


def steps_of(way: str, method: str, replacements: int) -> list[list[str]]:
    """The steps of each rank in an undisturbed run."""
    result, steps = run(way, method, replacements)
    if result["ended"] != "finished":
        raise RuntimeError(f"{method}, undisturbed: {result}")
    return steps


def is_good(result: dict[str, Any]) -> bool:
    ended = result["ended"]
    is_sentence = ended.startswith("error: ") and any(text in ended for text in SENTENCES)
    return (ended == "finished" or is_sentence) and not result["left"]


def summary(results: list[dict[str, Any]]) -> list[list[str]]:
    lines: list[list[str]] = []
    groups: dict[tuple[str, str, int, int], list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        groups[result["way"], result["method"], result["rank"], result["times"]].append(result)
    for (way, method, rank, times), own in groups.items():
        lines.append(
            [
                method,
                way,
                f"{rank}, {'once' if times == 1 else 'twice'}",
                str(len(own)),
                str(sum(r["ended"] == "finished" for r in own)),
                str(sum(r["ended"].startswith("error: ") and is_good(r) for r in own)),
                str(sum(r["ended"] == "hangs" for r in own)),
                str(sum(not is_good(r) and r["ended"] != "hangs" for r in own)),
                f"{max(r['seconds'] for r in own):.1f} s",
            ]
        )
    return lines


HEAD = [
    "method",
    "started by",
    "killed",
    "steps",
    "finished",
    "ended with a sentence",
    "hang",
    "otherwise",
    "longest run",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=("train", "paceline run"), default=["train"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[0, 1], help="the workers that are killed")
    parser.add_argument("--times", nargs="+", type=int, default=[1], help="with 2, the first replacement is killed too")
    parser.add_argument("--replacements", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="kill after every such step only")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for way, method in product(args.ways, args.methods):
        steps = steps_of(way, method, args.replacements)
        for rank, times in product(args.ranks, args.times):
            for step in steps[rank][:: args.every]:
                result, _ = run(way, method, args.replacements, rank=rank, step=step, times=times)
                results.append({"way": way, "method": method, "rank": rank, "step": step, "times": times, **result})
                if not is_good(result):
                    print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    lines = summary(results)
    show(markdown(HEAD, lines) if args.markdown else table(HEAD, lines, right=3), width=140)
    if args.json:
        with suppress(FileExistsError):
            args.json.parent.mkdir(parents=True)
        told = ",\n".join(map(json.dumps, results))
        args.json.write_text(f'{{"runs": [\n{told}\n]}}\n')


if __name__ == "__main__":
    main()
