"""The cost of encoded gradients in accuracy, bytes and time: DDP on Fashion-MNIST with `paceline.ddp_hook`.

Two gloo processes of one thread each train a small network, for each seed once without a hook and once with each codec.
Initial values, minibatches, their order, the optimizer and its rate are the same. The data are those of Debian's
package dataset-fashion-mnist, or of the folder given by --data.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import socket
import sys
import time
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.codecs import (
    QSGD,
    Codec,
    Fp8,
    OneBit,
    PerTensor,
    PowerSGD,
    TopK,
)
from paceline.data import fashion_mnist

WORKERS = 2
BATCH = 64  # Of one worker.
BUCKET_MB = 0.004  # Small, so that a small model has several buckets.
PLAIN = "fp32, no hook"
AFTER = "OneBit(), after 1 epoch"
METHODS: dict[str, Codec | None] = {
    PLAIN: None,
    "OneBit()": OneBit(),
    "OneBit(512, 'zero')": OneBit(512, "zero"),
    AFTER: OneBit(),
    "PerTensor(OneBit())": PerTensor(OneBit()),
    "PowerSGD(rank=4)": PowerSGD(rank=4),
    "QSGD()": QSGD(),
    "Fp8()": Fp8(),
    "TopK(ratio=0.01)": TopK(ratio=0.01),
}


def perceptron() -> nn.Module:
    """335,114 parameters in four layers."""
    layers = [
        nn.Linear(784, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    ]
    return nn.Sequential(nn.Flatten(), *layers)


def convolutional() -> nn.Module:
    """103,194 parameters, many of them in small tensors."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


MODELS = {"perceptron": perceptron, "convolutional": convolutional}


def pixels(images: Tensor) -> Tensor:
    return images.unsqueeze(1).float().div_(255).sub_(0.286).div_(0.353)  # The mean and deviation of the training set.


class Run:
    """One method with one seed, on one of the ranks."""

    def __init__(self, data: fashion_mnist.FashionMnist, method: str, seed: int, args: argparse.Namespace) -> None:
        self.data, self.epochs, self.seed, self.rate = data, args.epochs, seed, args.rate
        torch.manual_seed(seed)
        self.steps_per_epoch = len(data.labels) // (WORKERS * BATCH)
        self.model = DistributedDataParallel(MODELS[args.model](), bucket_cap_mb=BUCKET_MB)
        codec, start = METHODS[method], self.steps_per_epoch if method == AFTER else 0
        self.hook = None if codec is None else pl.ddp_hook(codec, self.model, start=start)

    def train(self) -> list[float]:
        """The seconds of each step."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate, momentum=0.9, weight_decay=1e-4)
        steps = self.epochs * self.steps_per_epoch
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min((k + 1) / 100, 1 - k / steps))
        order, seconds = torch.Generator().manual_seed(self.seed), list[float]()
        for _ in range(self.epochs):
            shuffled = torch.randperm(len(self.data.labels), generator=order)
            batches = shuffled[: WORKERS * BATCH * self.steps_per_epoch].view(-1, WORKERS, BATCH)[:, dist.get_rank()]
            for batch in batches:
                began = time.perf_counter()
                optimizer.zero_grad()
                loss = F.cross_entropy(self.model(pixels(self.data.images[batch])), self.data.labels[batch].long())
                loss.backward()
                optimizer.step()
                schedule.step()
                seconds.append(time.perf_counter() - began)
        return seconds

    def accuracy(self) -> float:
        """Percent of the test images."""
        self.model.eval()
        with torch.no_grad():
            said = torch.cat([self.model.module(pixels(x)).argmax(1) for x in self.data.test_images.split(500)])
        return 100 * (said == self.data.test_labels).float().mean().item()

    def result(self) -> dict[str, Any]:
        seconds = self.train()
        numel = sum(p.numel() for p in self.model.parameters())
        # Without a hook DDP uses gloo, which sends as much as a ring does.
        sent = 2 * (WORKERS - 1) / WORKERS * 4 * numel
        if self.hook is not None:
            sent = self.hook.trace.bytes_sent(dist.get_rank()) / len(seconds)
        buckets = self.model._get_ddp_logging_data()["rebuilt_bucket_sizes"]  # pyright: ignore
        return {
            "accuracy": self.accuracy(),
            "bytes_per_step": sent,
            "ms_per_step": 1e3 * median(seconds),
            "buckets": len(str(buckets).split(",")),
            "parameters": numel,
        }


def work(rank: int, port: int, args: argparse.Namespace, results: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORKERS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = fashion_mnist.load(args.data)
    for seed in range(args.seeds):
        for name in args.method:
            result = Run(data, name, seed, args).result()
            if rank == 0:
                print(f"seed {seed}, {name}: {result['accuracy']:.2f} %", file=sys.stderr, flush=True)
                results.put({"method": name, "seed": seed, **result})
            dist.barrier()
    dist.destroy_process_group()


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method: the mean over its runs, and the comparison with the runs of the same seed without a
    hook."""
    rows: list[dict[str, Any]] = []
    plain = {run["seed"]: run for run in runs if run["method"] == PLAIN}
    for name in dict.fromkeys(run["method"] for run in runs):
        own = [run for run in runs if run["method"] == name]
        accuracies = [run["accuracy"] for run in own]
        sent, ms = mean(run["bytes_per_step"] for run in own), mean(run["ms_per_step"] for run in own)
        rows.append(
            {
                "method": name,
                "accuracy": mean(accuracies),
                "spread": stdev(accuracies) if len(own) > 1 else math.nan,
                "difference": mean(run["accuracy"] - plain[run["seed"]]["accuracy"] for run in own),
                "bytes_per_step": sent,
                "ratio": mean(run["bytes_per_step"] for run in plain.values()) / sent,
                "ms_per_step": ms,
                "buckets": sorted({run["buckets"] for run in own}),
            }
        )
    return rows


def table(rows: list[dict[str, Any]], runs: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    seeds = len({run["seed"] for run in runs})
    title = (
        f"Fashion-MNIST, {runs[0]['parameters']:,} parameters, {WORKERS} gloo processes of {BATCH} samples a step, "
        f"{args.epochs} epochs, rate {args.rate}, {seeds} seeds, {rows[0]['buckets'][0]} buckets"
    )
    made = Table("method", "test accuracy", "difference", "bytes a step", "ratio", "ms a step", title=title)
    made.caption = (
        "accuracy: mean and standard deviation over seeds; difference: to fp32 in points; "
        "ratio: fp32's bytes over those of the method"
    )
    for column in made.columns[1:]:
        column.justify = "right"
    for row in rows:
        accuracy = f"{row['accuracy']:.2f} % ± {row['spread']:.2f}"
        made.add_row(
            row["method"],
            accuracy,
            f"{row['difference']:+.2f}",
            f"{row['bytes_per_step']:,.0f}",
            f"{row['ratio']:.1f}",
            f"{row['ms_per_step']:.1f}",
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder of Fashion-MNIST's four IDX files")
    parser.add_argument("--model", choices=MODELS, default="perceptron")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.02, help="the largest rate of the optimizer")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each method")
    parser.add_argument("--method", choices=METHODS, action="append", help="only this method and fp32; can be repeated")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    args.method = list(dict.fromkeys([PLAIN, *(args.method or METHODS)]))
    fashion_mnist.load(args.data)  # If the data are missing, only one process says so.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    workers = [context.Process(target=work, args=(rank, port, args, results), daemon=True) for rank in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        if worker.exitcode:
            raise SystemExit(f"a worker ended with exit code {worker.exitcode}")
    runs = [results.get() for _ in range(args.seeds * len(args.method))]
    rows = summary(runs)
    Console().print(table(rows, runs, args))
    if args.json:
        args.json.write_text(
            json.dumps({"epochs": args.epochs, "rate": args.rate, "rows": rows, "runs": runs}, indent=2)
        )


if __name__ == "__main__":
    main()
