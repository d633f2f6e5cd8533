"""AllReduceSGD on two workers equals one process on their minibatches together, for any optimizer and precision."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.families.optimizer_state import CopiedParameters
from tests.dist import forked
from tests.dist.test_attach import vector

pytestmark = pytest.mark.dist


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023: the sign of an interpolated momentum."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                one, two = group["betas"]
                p.mul_(1 - group["lr"] * group["decay"]).sub_((one * m + (1 - one) * p.grad).sign(), alpha=group["lr"])
                m.lerp_(p.grad, 1 - two)


class ScheduleFree(torch.optim.Optimizer):
    """Defazio et al. 2024, SGD: gradients at an interpolation of the iterate and the average of all iterates."""

    def __init__(self, params: Any, lr: float = 0.5, beta: float = 0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                s = self.state[p] or self.state[p].update(z=p.clone(), x=p.clone(), k=0) or self.state[p]
                s["z"].sub_(p.grad, alpha=group["lr"])
                s["k"] += 1
                s["x"].lerp_(s["z"], 1 / s["k"])
                p.copy_(s["z"].lerp(s["x"], group["beta"]))


class LowRank(nn.Module):
    """A frozen layer with a trainable update of low rank, as LoRA has."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x))))


class Tied(nn.Module):
    """The same matrix at the beginning and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))[:, :4]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def no_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))


def two_groups(model: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": model[0].parameters(), "lr": 0.01, "weight_decay": 0.1},
        {"params": [model[2].weight]},
        {"params": [model[2].bias], "lr": 0.1, "betas": (0.5, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=0.02)


@dataclass(frozen=True)
class Case:
    optimizer: Callable[[Any], torch.optim.Optimizer]
    model: Callable[[], nn.Module] = mlp
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scaled: bool = False
    clip: float | None = None
    accumulate: int = 1
    cosine: bool = False
    tolerance: float = 1e-6
    steps: int = 6


def of(kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda model: kind([p for p in model.parameters() if p.requires_grad], **settings)


adamw = partial(of, torch.optim.AdamW, lr=0.01)
sgd = of(torch.optim.SGD, lr=0.1, momentum=0.9)
# With float64 the sign of a value near zero is the same in both sums.
CASES = {
    "sgd, nesterov": Case(of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "adamw": Case(adamw()),
    "adamw, fused": Case(adamw(fused=True)),
    "adamw, foreach": Case(adamw(foreach=True)),
    "adamw, amsgrad": Case(adamw(amsgrad=True)),
    "nadam": Case(of(torch.optim.NAdam, lr=0.01)),
    "adagrad": Case(of(torch.optim.Adagrad, lr=0.01)),
    "rmsprop": Case(of(torch.optim.RMSprop, lr=0.01, momentum=0.9)),
    "adafactor": Case(of(torch.optim.Adafactor, lr=0.01)),
    "lion": Case(of(Lion), dtype=torch.float64),
    "schedule-free": Case(of(ScheduleFree)),
    **({"muon": Case(of(torch.optim.Muon, lr=0.02), model=no_bias)} if hasattr(torch.optim, "Muon") else {}),
    "rprop": Case(of(torch.optim.Rprop), dtype=torch.float64),
    "lora": Case(adamw(), model=LowRank),
    "tied weights": Case(sgd, model=Tied),
    "parameter groups": Case(two_groups),
    # A gradient in bf16 has 8 bits, and that of each part is rounded before the mean.
    "bf16 model": Case(sgd, dtype=torch.bfloat16, tolerance=2**-7),
    "bf16 autocast": Case(sgd, autocast=torch.bfloat16, tolerance=2**-8),
    "fp16 autocast, scaled": Case(sgd, autocast=torch.float16, scaled=True, tolerance=2**-11),
    "clipping": Case(sgd, clip=0.05),
    "accumulation": Case(sgd, accumulate=3),
    "cosine schedule": Case(sgd, cosine=True),
    "all together": Case(adamw(), clip=0.05, accumulate=2, cosine=True, scaled=True),
}


@dataclass
class Loop:
    """The loop of a user: the same with a session and without."""

    case: Case
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def run(self, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        case = self.case
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=case.scaled)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, case.steps) if case.cosine else None
        for i, (x, y) in enumerate(batches):
            precise = nullcontext() if case.autocast is None else torch.autocast("cpu", dtype=case.autocast)
            with precise:
                loss = F.cross_entropy(self.model(x), y) / case.accumulate
            scaler.scale(loss).backward()
            if i % case.accumulate < case.accumulate - 1:
                continue
            if case.clip is not None:
                scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), case.clip)
            scaler.step(self.optimizer)
            scaler.update()
            self.optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
        return vector(self.model).double()


def built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model().to(case.dtype)


def data(case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Minibatches of 7, of which the workers get 4 and 3, so that weights matter; under accumulation 8."""
    generator = torch.Generator().manual_seed(1)
    size = 7 if case.accumulate == 1 else 8
    return [
        (
            torch.randn(size, 6, generator=generator).to(case.dtype),
            torch.randint(4, (size,), generator=generator),
        )
        for _ in range(case.steps * case.accumulate)
    ]


def test_an_optimizer_that_steps_from_its_own_copy_is_warned_about_under_averaging(tmp_path):
    def work(rank: int) -> list[str]:
        texts: list[str] = []
        for optimizer in (ScheduleFree, partial(torch.optim.AdamW, lr=0.01), torch.optim.ASGD):
            model = built(CASES["schedule-free"])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with pl.attach(model, optimizer(model.parameters()), pl.PeriodicAveraging(4)) as session:
                    for x, y in session.shard(data(CASES["schedule-free"])):
                        F.cross_entropy(model(x), y).backward()
                        session.step()
            texts.append("; ".join(str(w.message) for w in caught if w.category is CopiedParameters))
        return texts

    for schedule_free, adamw, asgd in forked.run(2, work, tmp_path):
        assert schedule_free.startswith("PeriodicAveraging with ScheduleFree: ['x', 'z'] in the optimizer's state")
        assert adamw == asgd == ""


@pytest.fixture(scope="module")
def of_two_workers(tmp_path_factory):
    """What two workers end with in each case; all cases run one after the other in the same two processes."""

    def work(rank):
        ends = {}
        for name, case in CASES.items():
            model = built(case)
            with pl.attach(model, case.optimizer(model), pl.AllReduceSGD(), accumulate=case.accumulate) as session:
                ends[name] = Loop(case, model, session.optimizer).run(session.shard(data(case))).tolist()
        return ends

    return forked.run(2, work, tmp_path_factory.mktemp("cases"))


@pytest.mark.parametrize("name", CASES)
def test_two_workers_equal_one_process(name, of_two_workers):
    case = CASES[name]
    model = built(case)
    start = vector(model).double()
    alone = Loop(case, model, case.optimizer(model)).run(data(case))
    assert (alone - start).abs().max() > 10 * case.tolerance, "it has learned something"
    assert all(name in ends for ends in of_two_workers), [ends.get("error") for ends in of_two_workers]
    first, second = (torch.tensor(ends[name], dtype=torch.float64) for ends in of_two_workers)
    assert torch.equal(first, second)
    assert (first - alone).abs().max() <= case.tolerance


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> torch.Tensor:
    """A loop in which the optimizer evaluates the loss, as Lightning's and those with L-BFGS do."""
    for x, y in batches:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
    return vector(model)


LBFGS = of(torch.optim.LBFGS, lr=0.5, max_iter=4)


@pytest.mark.parametrize("optimizer", [adamw(), LBFGS], ids=["adamw", "lbfgs"])
@pytest.mark.parametrize(
    "strategy", [pl.AllReduceSGD(), pl.PeriodicAveraging(period=2)], ids=["all-reduce", "averaging"]
)
def test_a_closure_does_with_one_worker_what_it_does_alone(strategy, optimizer):
    model = built(CASES["adamw"])
    alone = plain(model, optimizer(model), data(CASES["adamw"]))
    model = built(CASES["adamw"])
    with pl.attach(model, optimizer(model), strategy) as session:
        attached = plain(model, session.optimizer, session.shard(data(CASES["adamw"])))
    assert torch.equal(alone, attached)


def test_a_closure_runs_under_every_strategy_that_can_evaluate_it(tmp_path):
    def work(rank, strategy, optimizer):
        model = built(CASES["adamw"])
        with pl.attach(model, optimizer(model), strategy) as session:
            plain(model, session.optimizer, session.shard(data(CASES["adamw"])))
        return vector(model).tolist()

    model = built(CASES["adamw"])
    alone = plain(model, adamw()(model), data(CASES["adamw"]))
    for result in forked.run(2, partial(work, strategy=pl.AllReduceSGD(), optimizer=adamw()), tmp_path / "mean"):
        assert torch.allclose(torch.tensor(result), alone, rtol=0.0, atol=1e-6)
    averaging = partial(work, strategy=pl.PeriodicAveraging(period=2), optimizer=LBFGS)
    first, second = forked.run(2, averaging, tmp_path / "averaging")
    assert first == second and torch.tensor(first).isfinite().all()
    for result in forked.run(2, partial(work, strategy=pl.AllReduceSGD(), optimizer=LBFGS), tmp_path / "refused"):
        assert "LBFGS evaluates the loss several times in a step, and AllReduceSGD exchanges one" in result["error"]
        assert "such as PeriodicAveraging, or use Sandblaster" in result["error"]


def test_a_step_without_the_closure_that_the_optimizer_needs_is_refused():
    model = mlp()
    refusal = pytest.raises(ValueError, match=r"call session.optimizer.step\(closure\) with a function")
    with pl.attach(model, LBFGS(model), pl.AllReduceSGD()) as session, refusal:
        session.step()


def test_a_nan_of_a_closure_is_skipped():
    model = mlp()
    start = vector(model)
    warns = pytest.warns(pl.NonFiniteGradient, match="the step was skipped")
    with warns, pl.attach(model, LBFGS(model), pl.PeriodicAveraging(period=2)) as session:
        batches = data(CASES["adamw"])
        plain(model, session.optimizer, session.shard(batches[:1]))
        changed = vector(model)
        session.optimizer.step(lambda: ((model(batches[1][0]) * torch.nan).sum().backward(), torch.ones(()))[1])
        assert torch.equal(vector(model), changed) and session.skipped == 1
    assert not torch.equal(start, changed)


def test_sparse_gradients_are_exchanged_or_the_ways_out_are_named(tmp_path):
    def work(rank, strategy, sparse=True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 3, sparse=sparse), nn.Flatten(), nn.Linear(12, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        words = torch.randint(50, (6, 8, 4), generator=torch.Generator().manual_seed(1))
        with pl.attach(model, optimizer, strategy) as session:
            for x in session.shard(list(words)):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                session.step()
        return vector(model).tolist()

    for result in forked.run(2, partial(work, strategy=pl.AllReduceSGD()), tmp_path / "refused"):
        assert "parameter '0.weight' has a sparse gradient" in result["error"]
        assert "nn.Embedding(sparse=False)" in result["error"] and "ParameterServer(sparse=True)" in result["error"]
    averaging = partial(work, strategy=pl.PeriodicAveraging(period=2))
    sparse = forked.run(2, averaging, tmp_path / "sparse")
    dense = forked.run(2, partial(averaging, sparse=False), tmp_path / "dense")
    assert torch.allclose(torch.tensor(sparse), torch.tensor(dense), rtol=0.0, atol=1e-6)


def test_a_parameter_server_in_a_users_loop_sends_only_the_touched_rows():
    def train(model, zero_grad, batches, step):
        for x in batches:
            zero_grad()
            model(x).square().mean().backward()
            step()
        return vector(model)

    def bag():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(2000, 3, sparse=True), nn.Flatten(), nn.Linear(12, 2))

    words = list(torch.randint(2000, (3, 8, 4), generator=torch.Generator().manual_seed(1)))
    model = bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    alone = train(model, optimizer.zero_grad, words, optimizer.step)
    model = bag()
    with pl.attach(model, None, pl.ParameterServer(rule=pl.rules.Sgd(lr=0.5), servers=1, sparse=True)) as session:
        served = train(model, session.optimizer.zero_grad, session.shard(words), session.step)
    assert torch.allclose(served, alone, rtol=0.0, atol=1e-6)
    # The whole model at the start, and then a few rows; dense pushes and pulls would send the model six times more.
    assert sum(span.nbytes for span in session.trace.spans) < 1.5 * 4 * len(alone)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Two blocks, and one matrix for the words at both ends."""

    def __init__(self, words: int = 32, width: int = 16, length: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width, 2), Block(width, 2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.words(x) + self.places.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(hidden)))


def test_a_small_gpt_equals_distributed_data_parallel(tmp_path):
    """AdamW, bf16 autocast, accumulation, clipping and a cosine schedule."""

    def taken(optimizer):  # A scheduler replaces the optimizer's step, so it is looked up late.
        optimizer.step()

    def train(model, called, optimizer, batches, adding, step):
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for i, text in enumerate(batches):
            with adding() if i % 2 == 0 else nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    logits = called(text[:, :-1])
                (F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten()) / 2).backward()
            if i % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                step()
                optimizer.zero_grad()
                schedule.step()
        return vector(model)

    def work(rank):
        generator = torch.Generator().manual_seed(1)
        texts = torch.randint(32, (20, 8, 12), generator=generator)
        ends = []
        for how in ("ddp", "paceline"):
            torch.manual_seed(0)
            model = Gpt()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
            start = vector(model)
            if how == "ddp":
                called = DistributedDataParallel(model)
                mine = [text[4 * rank : 4 * rank + 4] for text in texts]
                ends.append(train(model, called, optimizer, mine, called.no_sync, partial(taken, optimizer)))
            else:
                with pl.attach(model, optimizer, pl.AllReduceSGD()) as session:
                    batches = session.shard(list(texts))
                    ends.append(train(model, model, session.optimizer, batches, session.no_sync, session.step))
        return [(ends[0] - ends[1]).abs().max().item(), (ends[0] - start).abs().max().item()]

    for difference, learned in forked.run(2, work, tmp_path):
        assert difference <= 1e-6 and learned > 0.01
