"""Small tasks with known answers, and the training loops that a reader would write by hand for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline import Cluster, Task
from paceline.task import Batch

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Point(nn.Module):
    """A model that is one vector."""

    def __init__(self, numel: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, numel, dtype=torch.float64).to(dtype))


def squared_distance(model: nn.Module, batch: Batch) -> Tensor:
    return 0.5 * (model.w - batch[0]).square().sum(1).mean()


def quadratic(
    *,
    steps: int,
    batch: int,
    numel: int = 5,
    samples: int | None = None,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Task:
    """The minimum is the mean of the data. The Hessian of every sample is the identity."""
    data = numbers(samples or 4 * batch, numel, seed=1, dtype=dtype)
    optimizer = more.pop("optimizer", OPTIMIZERS["sgd"])
    return Task(lambda: Point(numel, dtype), squared_distance, [data], batch, optimizer, steps=steps, **more)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def regression(
    *, steps: int, batch: int, samples: int | None = None, optimizer: Optimizer = OPTIMIZERS["momentum"], **more: Any
) -> Task:
    """A small float64 network with several parameters, so that small buckets give more than one bucket."""
    samples = samples or 4 * batch
    data = [numbers(samples, 6, seed=2), numbers(samples, 3, seed=3)]
    model = more.pop("model", network)
    return Task(model, squared_error, data, batch, optimizer, steps=steps, **more)


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def trained_alone(task: Task, *, optimizer: Optimizer | None = None, left_out: Sequence[int] = ()) -> Tensor:
    """Plain torch on one machine, with whole minibatches."""
    model = task.build()
    chosen = (optimizer or task.optimizer)(model.parameters())
    for k in range(task.total_steps):
        if k in left_out:
            continue
        chosen.zero_grad()
        task.loss(model, task.part(k, 0, 1)).backward()
        chosen.step()
    return vector(model)


def same(a: Tensor, b: Tensor) -> bool:
    """Require equal bits. Zeros of different sign are not equal; a NaN equals itself."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    )


def close(a: Tensor, b: Tensor, rtol: float = 1e-10) -> bool:
    """Require equal values, up to the rounding of float64 over some hundred steps."""
    return torch.allclose(a.double(), b.double(), rtol=rtol, atol=rtol)


def values(state: Any, slot: str) -> dict[str, Any]:
    """The content of one slot of a saved state."""
    return state["slots"][slot]["values"]


def params(run: Any) -> list[Tensor]:
    return [values(state, "model")["params"] for state in run.states]


def instant(workers: int, **more: Any) -> Cluster:
    """A cluster in which only gradients take time."""
    return Cluster(
        workers,
        **{
            "compute": 1.0,
            "bandwidth": math.inf,
            "latency": 0.0,
            "codec_bandwidth": math.inf,
            "memory_bandwidth": math.inf,
        }
        | more,
    )


class Mixed(nn.Module):
    """A bfloat16 body between float32 layers."""

    def __init__(self, narrow: torch.dtype = torch.bfloat16, wide: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.Linear(6, 6).to(wide)
        self.body = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9)).to(narrow)
        self.head = nn.Linear(9, 3).to(wide)
        self.narrow, self.wide = narrow, wide

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.norm(x).to(self.narrow)).to(self.wide))


def mixed_regression(
    *, narrow: torch.dtype = torch.bfloat16, wide: torch.dtype = torch.float32, samples: int = 33, **more: Any
) -> Task:
    """`regression` with parameters of two dtypes."""
    data = [numbers(samples, 6, seed=2, dtype=wide), numbers(samples, 3, seed=3, dtype=wide)]
    settings = {"batch": 9, "optimizer": OPTIMIZERS["momentum"], "bucket_bytes": 100} | more
    return Task(lambda: Mixed(narrow, wide), squared_error, data, **settings)
