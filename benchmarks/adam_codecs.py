"""Which method and codec to use for a transformer with AdamW: a small GPT on characters, on simulated workers.

Give the path of a text of a megabyte or so, such as tinyshakespeare. All runs of a seed start with the same values and
see the same minibatches. The rate rises for 50 steps and then falls along a cosine. Losses are those of the last tenth
of the text, in nats a character; it is not trained on.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl

CONTEXT, WIDTH, LAYERS, HEADS = 64, 64, 2, 4
BATCH = 32  # Of all workers.
RATE, RISE = 3e-3, 50
NAMES = ("tinyshakespeare.txt", "input.txt", "data/tinyshakespeare.txt")
METHODS = (
    "AllReduceSGD()",
    "AllReduceSGD(OneBit())",
    "AllReduceSGD(TopK(ratio=0.01))",
    "AllReduceSGD(PowerSGD(rank=4))",
    "OneBitAdam()",
    "OneBitAdam(TopK(ratio=0.01))",
    "DiLoCo(period=10)",
)


class Block(nn.Module):
    """A layer of a transformer: attention to what came before, and a perceptron, both beside a direct path."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.before_perceptron = nn.LayerNorm(WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(self.before_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.before_perceptron(x))


class Gpt(nn.Module):
    """A GPT on characters, with about 115,000 parameters."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.character(text) + self.position.weight[: text.shape[1]]
        return self.head(self.last(self.blocks(x)))


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    text = batch[0]
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def windows(path: Path) -> tuple[Tensor, Tensor, int]:
    """Pieces of the text to train on and to test on, and the number of different characters."""
    text = path.read_text(encoding="utf-8")
    characters = {c: i for i, c in enumerate(sorted(set(text)))}
    codes = torch.tensor([characters[c] for c in text])
    pieces = codes[: len(codes) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    if len(pieces) < 1000:
        raise SystemExit(f"{path} has {len(text)} characters: give a text of at least {1000 * (CONTEXT + 1)}")
    train, test = pieces.split([len(pieces) * 9 // 10, len(pieces) - len(pieces) * 9 // 10])
    return train, test[:256], len(characters)


def scheduled(steps: int, step: int) -> float:
    return min(1.0, (step + 1) / RISE) * (0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, step / steps))))


def run_of(
    method: str, text: tuple[Tensor, Tensor, int], workers: int, steps: int, rate: float, beta2: float, seed: int
) -> dict[str, Any]:
    train, test, characters = text
    began = time.perf_counter()

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"loss": loss(model, (test,)).item()}

    task = pl.Task(
        model=partial(Gpt, characters),
        loss=loss,
        data=(train,),
        batch=BATCH,
        optimizer=partial(torch.optim.AdamW, lr=rate, betas=(0.9, beta2), weight_decay=0.1),
        steps=steps,
        evaluate=evaluate,
        evaluate_every=steps,
        schedule=partial(scheduled, steps),
        seed=seed,
    )
    strategy = eval(method, {**vars(pl), **vars(pl.codecs)})
    cluster = pl.Cluster(workers=workers, compute="10ms", bandwidth="1Gbit/s", latency="200us")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Some of these methods are known to be bad, and say so.
        run = pl.simulate(task, strategy, cluster, strict=False)
    return {
        "method": method,
        "workers": workers,
        "steps": steps,
        "rate": rate,
        "beta2": beta2,
        "seed": seed,
        "loss": round(run.final["loss"], 4),
        "bytes": run.trace.bytes_sent(0),
        "wall_s": round(time.perf_counter() - began, 1),
    }


def found(path: Path | None) -> Path:
    """The text: the given one, or one of the usual names here."""
    for candidate in (path,) if path is not None else map(Path, NAMES):
        if candidate.is_file():
            return candidate
    raise SystemExit(
        f"no text at {path}" if path is not None else f"no text: give its path, or put it here as {' or '.join(NAMES)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, nargs="?", help="a text of a megabyte or so, such as tinyshakespeare")
    parser.add_argument("--method", action="append", help="a strategy as Python writes it; can be repeated")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each method")
    parser.add_argument("--json", type=Path, help="add each run to this file, one a line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = windows(found(args.text))
    table = Table(
        "method", "workers", "loss", "MB a worker", "seconds", title=f"{args.steps} steps, rate {args.rate:g}"
    )
    for method in args.method or METHODS:
        runs = [
            run_of(method, text, args.workers, args.steps, args.rate, args.beta2, seed) for seed in range(args.seeds)
        ]
        if args.json:
            with args.json.open("a") as file:
                file.writelines(json.dumps(run) + "\n" for run in runs)
        losses = [run["loss"] for run in runs]
        table.add_row(
            method,
            str(args.workers),
            f"{mean(losses):.3f}" + (f" ({min(losses):.3f} to {max(losses):.3f})" if len(runs) > 1 else ""),
            f"{mean(run['bytes'] for run in runs) / 1e6:.1f}",
            f"{mean(run['wall_s'] for run in runs):.0f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
