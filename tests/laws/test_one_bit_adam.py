"""1-bit Adam: Adam while the variance settles, then momentum SGD with a frozen variance; and who is told to use it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline import AllReduceSGD, Cluster, OneBitAdam, PeriodicAveraging, Task, simulate
from paceline.codecs import DGC, Codec, Entropy, Fp16, Fp32, OneBit, PowerSGD, Threshold, TopK
from paceline.families.adam import CodecWithAdam
from tests.laws.tasks import close, numbers, regression, trained_alone, values, vector

TWO = Cluster(workers=2)
BETAS = (0.9, 0.95)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups, of which one decays and has another rate."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for p in params:
        (matrices if p.dim() > 1 else vectors).append(p)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01, betas=BETAS, eps=1e-6)


def halved(step: int) -> float:
    return 1.0 if step < 10 else 0.5


def task(**more: Any) -> Task:
    return regression(**{"steps": 20, "batch": 8, "optimizer": adamw, "schedule": halved, "bucket_bytes": 200} | more)


def test_with_full_gradients_it_is_adamw():
    run = simulate(task(), OneBitAdam(warmup=1000), TWO)
    assert close(run.params, simulate(task(), AllReduceSGD(), TWO).params)


def test_one_worker_alone_is_adamw():
    """It never freezes the variance, since it sends nothing."""
    run = simulate(task(schedule=None), OneBitAdam(warmup=3), Cluster(workers=1))
    assert close(run.params, trained_alone(task(schedule=None)))


def by_hand(job: Task, warmup: int) -> Tensor:
    """Adam whose variance stays after `warmup` steps, on one machine with whole minibatches."""
    model = job.build()
    optimizer = job.optimizer(model.parameters())
    rates = [group["lr"] for group in optimizer.param_groups]
    mean = {p: torch.zeros_like(p) for p in model.parameters()}
    variance = {p: torch.zeros_like(p) for p in model.parameters()}
    for k in range(job.total_steps):
        model.zero_grad()
        job.loss(model, job.part(k, 0, 1)).backward()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            lr = rate * halved(k)
            for p in group["params"]:
                mean[p] = BETAS[0] * mean[p] + (1 - BETAS[0]) * p.grad
                if k < warmup:
                    variance[p] = BETAS[1] * variance[p] + (1 - BETAS[1]) * p.grad**2
                root = (variance[p] / (1 - BETAS[1] ** min(k + 1, warmup))).sqrt() + group["eps"]
                corrected = mean[p] / (1 - BETAS[0] ** (k + 1))
                p.data = p.data * (1 - lr * group["weight_decay"]) - lr * corrected / root
    return vector(model)


@pytest.mark.parametrize("warmup", [1, 7])
def test_a_lossless_codec_gives_adam_with_a_frozen_variance(warmup: int):
    """The codec rounds momenta to float32."""
    run = simulate(task(), OneBitAdam(Fp32(), warmup=warmup), TWO)
    assert close(run.params, by_hand(task(), warmup), rtol=1e-5)
    assert not close(run.params, by_hand(task(), 20), rtol=1e-3)  # It is another one than Adam.


def frozen_at(strategy: OneBitAdam, job: Task) -> int | None:
    """After how many steps the variance was frozen."""
    for steps in range(1, job.total_steps):
        state = simulate(job, strategy, TWO, stop_at=steps).states[0]
        if values(state, "moments")["is_frozen"]:
            return steps
    return None


class Still(nn.Module):
    """A model whose gradient is always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(40))


def still(steps: int) -> Task:
    optimizer = lambda params: torch.optim.AdamW(params, lr=0.01, betas=(0.9, 0.75))  # noqa: E731
    return Task(
        Still, lambda model, batch: (model.w * batch[0]).sum(1).mean(), [torch.ones(8, 40)], 4, optimizer, steps=steps
    )


def test_the_variance_is_frozen_when_it_has_settled():
    """The variance of equal gradients is settled at the second look; looks are 1 / (1 - 0.75) steps apart."""
    assert frozen_at(OneBitAdam(), still(60)) == 8


def test_the_variance_is_frozen_after_a_fifth_of_the_run_at_the_latest():
    assert frozen_at(OneBitAdam(), still(20)) == 4


def test_warmup_says_when():
    assert frozen_at(OneBitAdam(warmup=6), still(20)) == 6


class Embedded(nn.Module):
    """Of its embedding the second half is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x)).squeeze(-1)


@pytest.mark.parametrize("codec", [OneBit(), OneBit(bucket=512)], ids=str)
def test_values_without_a_gradient_do_not_move(codec: Codec):
    """A bucket of 512 values holds used and unused ones, and decodes all as +a or -b.  Divided by eps they explode."""
    used = torch.randint(4, (64,), generator=torch.Generator().manual_seed(0))
    job = Task(
        Embedded,
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        [used, numbers(64, dtype=torch.float32)],
        16,
        lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.0),
        steps=12,
    )
    run = simulate(job, OneBitAdam(codec, warmup=4), TWO)
    before = vector(job.build())
    unused = slice(4 * 16, 8 * 16)
    assert torch.equal(run.params[unused], before[unused])
    assert not torch.equal(run.params[:64], before[:64])


def plain_adam(**settings: Any) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return lambda params: torch.optim.Adam(params, lr=0.01, **settings)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1), r"OneBitAdam with the optimizer SGD: .*betas=\(0.9, 0.999\)"),
        (lambda params: torch.optim.NAdam(params), "OneBitAdam with the optimizer NAdam: "),
        (plain_adam(weight_decay=0.1), r"OneBitAdam with Adam\(weight_decay=0.1\): .*use AdamW"),
        (plain_adam(amsgrad=True), r"OneBitAdam with Adam\(amsgrad=True\)"),
        (plain_adam(maximize=True), r"OneBitAdam with Adam\(maximize=True\)"),
        (
            lambda params: torch.optim.Adam([{"params": [p], "betas": (0.9, p.dim() / 10)} for p in params]),
            "in two parameter groups",
        ),
    ],
    ids=["sgd", "nadam", "decay", "amsgrad", "maximize", "two betas"],
)
def test_an_optimizer_whose_steps_it_does_not_take_is_refused(optimizer: Any, message: str):
    with pytest.raises(ValueError, match=message):
        simulate(task(optimizer=optimizer), OneBitAdam(), TWO)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OneBitAdam(warmup=0), r"OneBitAdam\(warmup=0\)"),
        (lambda: OneBitAdam(betas=(0.9, 1.0)), r"OneBitAdam\(betas=\(0.9, 1.0\)\)"),
        (lambda: OneBitAdam(weight_decay=0.1), "without betas"),
        (lambda: OneBitAdam(DGC()), "DGC has its own momentum"),
        (lambda: OneBitAdam(Entropy(DGC())), "DGC has its own momentum"),
    ],
    ids=["warm-up", "betas", "decay", "dgc", "dgc inside"],
)
def test_wrong_settings_are_refused(make: Callable[[], OneBitAdam], message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_gradient_scaler_is_refused():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    message = r"OneBitAdam with a GradScaler: .*bfloat16"
    with pytest.raises(RuntimeError, match=message), pl.attach(model, optimizer, OneBitAdam()) as session:
        scaler.scale(model(torch.ones(2, 3)).mean()).backward()
        scaler.step(session.optimizer)


ADAPTIVE: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("optimizer", ADAPTIVE)
@pytest.mark.parametrize("codec", [OneBit(), TopK(), DGC(), Threshold(0.1), Entropy(OneBit())], ids=str)
def test_a_coarse_codec_with_second_moments_is_warned_of_once(codec: Codec, optimizer: str):
    job = task(optimizer=ADAPTIVE[optimizer], steps=1, schedule=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        simulate(job, AllReduceSGD(codec=codec), TWO)
    told = [w for w in caught if issubclass(w.category, CodecWithAdam)]
    assert len(told) == 1
    assert "OneBitAdam(" in str(told[0].message)
    assert optimizer in str(told[0].message).lower()


@pytest.mark.parametrize(
    "strategy",
    [
        AllReduceSGD(),
        AllReduceSGD(codec=Fp16()),
        AllReduceSGD(codec=PowerSGD()),
        OneBitAdam(betas=BETAS),
        PeriodicAveraging(period=1, codec=OneBit()),
    ],
    ids=str,
)
def test_other_codecs_and_methods_are_not_warned_of(strategy: pl.Strategy):
    with warnings.catch_warnings():
        warnings.simplefilter("error", CodecWithAdam)
        simulate(task(steps=1), strategy, TWO)
        simulate(task(steps=1), AllReduceSGD(codec=OneBit()), Cluster(workers=1))
        simulate(task(steps=1, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), AllReduceSGD(codec=OneBit()), TWO)
