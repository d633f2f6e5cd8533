"""Delay compensation beside plain asynchronous SGD: a residual network on CIFAR-10, with the paper's schedule.

DC-ASGD's paper (Zheng et al., ICML 2017) trains ResNet-20 for 160 epochs with minibatches of 128 on every worker, at a
rate of 0.5 that falls to a tenth after half and after three quarters of the run. This script does the same in the
simulator, with 4 and 8 workers whose gradients take unequal times. But the rate rises during the first epochs: with 0.5
from the start, runs with 8 workers learnt nothing in two epochs. Rates on shards follow the schedule.

On a GPU give `--device cuda`; a replica's passes are CUDA graphs there. `--half` computes in bfloat16, with parameters
in float32. A smaller network, fewer images and fewer epochs make it possible on a CPU; the table says what ran.

The images are an .npz file of encoded images with the arrays data (all bytes), offsets, labels and split (0: train, 1:
test). Decoding needs Pillow. Runs that are already in the --json file do not run again.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from benchmarks._frame import as_code, markdown, read_runs, show, spread, table, worked, write_runs

MINIBATCH = 128  # Samples of one gradient.
DECAY = 1e-4  # Of the weights, as for He et al.'s networks.
METHODS: dict[str, Callable[[float], pl.Strategy]] = {
    "ParameterServer(rule=Sgd(lr=RATE))": lambda rate: pl.ParameterServer(
        rule=pl.rules.Sgd(lr=rate, weight_decay=DECAY)
    ),
    "DelayCompensated(lr=RATE)": lambda rate: pl.DelayCompensated(lr=rate, weight_decay=DECAY),
    "DelayCompensated(lr=RATE, adaptive=True)": lambda rate: pl.DelayCompensated(
        lr=rate, adaptive=True, weight_decay=DECAY
    ),
}
SHORT = dict(zip(("plain", "constant", "adaptive"), METHODS, strict=True))  # The names for --methods.
GRAPHED: WeakSet[nn.Module] = WeakSet()


class Block(nn.Module):
    """Two convolutions and a shortcut. A change of size pads the shortcut with zeros, so it has no parameters."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.convolve1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.convolve2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.stride = stride
        self.added = outer - inner

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.convolve1(x)))
        y = self.norm2(self.convolve2(y))
        return F.relu(y + F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added)))


class Network(nn.Sequential):
    """Layers that compute in bfloat16 if `half`; what they return is float32."""

    half = False

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False):
            return super().forward(input).float()


def residual_network(depth: int, width: int, device: str, half: bool) -> nn.Module:
    """He et al.'s network for CIFAR-10, with 6n + 2 layers; ResNet-20 has depth 20 and width 16."""
    blocks: list[nn.Module] = []
    inner = width
    for i, outer in enumerate((width, 2 * width, 4 * width)):
        for j in range((depth - 2) // 6):
            blocks.append(Block(inner, outer, 2 if i and not j else 1))
            inner = outer
    first = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    model = Network(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 10))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    model.half = half
    return model.to(device)


def augmented(images: Tensor) -> Tensor:
    """Each image moved by up to 4 pixels, and about half of them mirrored."""
    samples, size = len(images), images.shape[-1]
    top, left = torch.randint(9, (2, samples, 1))
    step = torch.where(torch.rand(samples, 1) < 0.5, -1, 1)
    at = torch.arange(size)
    rows = top + at
    columns = left + torch.where(step > 0, at, size - 1 - at)
    index = torch.stack([rows, columns]).to(images.device)
    padded = F.pad(images, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    chosen = torch.arange(samples, device=images.device)[:, None, None]
    return padded[chosen, index[0, :, :, None], index[1, :, None, :]].permute(0, 3, 1, 2)


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    images, labels = batch
    images = augmented(images)
    if images.is_cuda and model not in GRAPHED:
        capture(model, images)
    return F.cross_entropy(model(images), labels)


def capture(model: nn.Module, images: Tensor) -> None:
    """Make CUDA graphs of the model's passes over minibatches of this size, while it trains."""
    before = [b.clone() for b in model.buffers()]
    torch.cuda.make_graphed_callables(model, (images,))  # It warms up, which changes the statistics.
    for b, value in zip(model.buffers(), before, strict=True):
        b.copy_(value)
    GRAPHED.add(model)


def read_images(path: Path, limit: int | None, device: str) -> dict[str, tuple[Tensor, Tensor]]:
    """The images of both parts, normalised, and their labels; at most `limit` for training."""
    try:
        from PIL import Image  # pyright: ignore
    except ImportError:
        raise SystemExit("decoding the images needs Pillow: pip install pillow") from None
    with np.load(path) as file:
        data, offsets, labels, split = (file[name] for name in ("data", "offsets", "labels", "split"))
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for part, name in enumerate(("train", "test")):
        chosen = np.flatnonzero(split == part)[: limit if name == "train" else None]
        pixels = np.stack(
            [np.asarray(Image.open(io.BytesIO(data[offsets[i] : offsets[i + 1]].tobytes()))) for i in chosen]
        )
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(255).sub_(0.47).div_(0.25)
        found[name] = images.contiguous().to(device), torch.from_numpy(labels[chosen]).long().to(device)
    return found


def error_of(images: Tensor, labels: Tensor, name: str, model: nn.Module) -> dict[str, float]:
    parts = zip(images.split(500), labels.split(500), strict=True)
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in parts)
    error = 100 * (1 - right / len(labels))
    print(f"{name}: {error:.2f} %", file=sys.stderr, flush=True)
    return {"error": error}


def run(args: argparse.Namespace, method: str, workers: int, seed: int) -> dict[str, Any]:
    torch.backends.cudnn.benchmark = True
    parts = read_images(args.images, args.limit, args.device)
    images, labels = parts["train"]
    batch = MINIBATCH * workers
    kept = len(labels) // batch * batch  # Every gradient is of a whole minibatch.
    steps = round(args.epochs * kept / batch)
    rise = round(args.warmup * kept / batch)

    def rate_of(step: int) -> float:
        return min(1.0, (step + 1) / (rise + 1)) * 0.1 ** ((step >= steps / 2) + (step >= 3 * steps / 4))

    task = pl.Task(
        model=partial(residual_network, args.depth, args.width, args.device, args.half),
        loss=loss,
        data=(images[:kept], labels[:kept]),
        batch=batch,
        optimizer=partial(torch.optim.SGD, lr=args.rate),
        steps=steps,
        schedule=rate_of,
        evaluate=partial(error_of, *parts["test"], f"{method}, {workers} workers, seed {seed}"),
        evaluate_every=max(1, steps // 16),
        seed=seed,
    )
    cluster = pl.Cluster(workers=workers, compute=pl.LogNormal("50ms", sigma=0.3), seed=seed)
    began = time.perf_counter()
    result = pl.simulate(task, METHODS[method](args.rate), cluster)
    stale = [p.staleness for p in result.trace.points if p.staleness is not None]
    return {
        "method": method,
        "workers": workers,
        "seed": seed,
        "error": round(result.final["error"], 2),
        "errors": [round(e.values["error"], 2) for e in result.trace.evaluations],
        "staleness": sum(stale) / max(1, len(stale)),
        "seconds": round(time.perf_counter() - began),
    }


def lines(runs: Sequence[dict[str, Any]], rate: float) -> list[list[str]]:
    made: list[list[str]] = []
    for workers in sorted({r["workers"] for r in runs}):
        for method in METHODS:
            own = [r for r in runs if r["method"] == method and r["workers"] == workers]
            if own:
                error = spread([r["error"] for r in own], "{:.2f}")
                stale = spread([r["staleness"] for r in own], "{:.1f}")
                made.append([method.replace("RATE", f"{rate:g}"), str(workers), str(len(own)), error, stale])
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=Path, required=True, help="the .npz file of encoded images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--depth", type=int, default=20, help="layers: 8, 14, 20, ...")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layers")
    parser.add_argument("--limit", type=int, help="use only this many images for training")
    parser.add_argument("--epochs", type=float, default=160)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--warmup", type=float, default=5, help="epochs in which the rate rises")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--half", action="store_true", help="compute in bfloat16")
    parser.add_argument("--methods", choices=SHORT, nargs="+", default=list(SHORT))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path, default=Path("docs/results/dc-asgd.json"), help="where to keep the runs")
    args = parser.parse_args(arguments)
    settings = {name: getattr(args, name) for name in ("depth", "width", "limit", "epochs", "rate", "warmup", "half")}
    runs = read_runs(args.json, **settings)
    have = {(r["method"], r["workers"], r["seed"]) for r in runs}
    chosen = [SHORT[name] for name in args.methods]
    cases = [
        (args, method, workers, seed)
        for seed in args.seeds
        for workers in args.workers
        for method in (chosen if workers > 1 else chosen[:1])  # One worker is never stale: all methods are the same.
        if (method, workers, seed) not in have
    ]
    for result in worked(run, cases, args.processes):
        print(result, flush=True)
        runs.append(result)
        write_runs(args.json, runs, **settings)
    head = ("method", "workers", "seeds", "test error, %", "mean staleness")
    shown = lines(runs, args.rate)
    show(markdown(head, as_code(shown)) if args.markdown else table(head, shown, right=1), width=110)


if __name__ == "__main__":
    main()
