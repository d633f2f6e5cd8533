"""A replica in stages, on real processes: it trains as the whole model does, alone and with others, and sends only what
crosses a cut."""

from __future__ import annotations

import gc
import json
import os
import signal
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

import paceline as pl
from tests.laws.tasks import OPTIMIZERS, close, instant, numbers, regression, same, squared_error

pytestmark = pytest.mark.dist

WIDTHS = (6, 9, 8, 7, 3)


def network() -> nn.Module:
    layers = [layer for a, b in pairwise(WIDTHS) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def task(**more: Any) -> pl.Task:
    """Minibatches of 10 samples, and of 7 at the end of every epoch. Two replicas have 4 and 3 of those, and 8
    microbatches have unequal sizes."""
    return regression(**{"steps": 8, "batch": 10, "samples": 27, "model": network} | more)


def whole(job: pl.Task, strategy: pl.Strategy, workers: int, **more: Any) -> pl.Run:
    """The same run without stages. The simulator's bits are those of real processes."""
    return pl.simulate(job, strategy, instant(workers), **more)


METHODS: dict[str, pl.Strategy] = {
    "all-reduce-sgd": pl.AllReduceSGD(),
    "all-reduce-sgd, clipped": pl.AllReduceSGD(clip=0.1),
    "periodic-averaging": pl.PeriodicAveraging(period=3),
    "periodic-averaging, optimizer averaged, delayed": pl.PeriodicAveraging(
        period=3, optimizer_state="average", delay=1
    ),
    "adaptive-averaging": pl.AdaptiveAveraging(period=1, warmup=1, sampling=4, low=0.99, high=1.01),
    "ada-comm": pl.AdaComm(period=4, steps=2),
    "all-reduce-sgd by groups": pl.AllReduceSGD(group=1),
    "diloco": pl.DiLoCo(period=3),
    "then": pl.Then(pl.Replicated(), pl.PeriodicAveraging(period=2), steps=3),
}


# Between hosts, an exchange runs in its own thread while stages communicate.
FAR = {name: METHODS[name] for name in ("all-reduce-sgd", "periodic-averaging, optimizer averaged, delayed")}


@pytest.mark.parametrize("name", METHODS)
def test_two_replicas_of_two_stages_equal_two_workers(name: str):
    job = task(evaluate=lambda model: {"loss": float(squared_error(model, task().data))}, evaluate_every=3)
    split, other = pl.train(job, METHODS[name], 2, stages=2), whole(job, METHODS[name], 2)
    assert close(split.params, other.params)
    assert split.final == pytest.approx(other.final)
    assert [(s.step, s.period) for s in split.trace.syncs if s.rank == 3] == [
        (s.step, s.period) for s in other.trace.syncs if s.rank == 1
    ]


@pytest.mark.parametrize(
    ("stages", "pipeline"), [(2, "1f1b"), (4, "1f1b"), (["1", "4"], "1f1b"), (4, "gpipe")], ids=str
)
def test_a_single_replica_in_stages_equals_the_whole_model(stages: int | list[str], pipeline: Any):
    job = task(optimizer=OPTIMIZERS["adam"])
    run = pl.train(job, pl.PeriodicAveraging(period=3), 1, stages=stages, pipeline=pipeline)
    assert close(run.params, whole(job, pl.PeriodicAveraging(period=3), 1).params)
    assert same(run.params, torch.cat([p.detach().view(-1) for p in run.model.parameters()]))


def test_two_replicas_of_four_stages_equal_two_workers():
    strategy = pl.PeriodicAveraging(period=3)
    assert close(pl.train(task(), strategy, 2, stages=4).params, whole(task(), strategy, 2).params)


def test_one_step_equals_that_of_the_whole_model():
    """With plain SGD and a rate of 1 the step is the gradient. The loss is that of the output."""
    job = task(steps=1, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
    run, model = pl.train(job, pl.AllReduceSGD(), 1, stages=3), job.build()
    loss = job.loss(model, job.part(0, 0, 1))
    loss.backward()
    assert close(run.params, torch.cat([(p - p.grad).detach().view(-1) for p in model.parameters()]))
    assert [p.loss for p in run.trace.points] == [pytest.approx(loss.item())]


class Mixed(nn.Module):
    """Word indices, a layer that is not contiguous in memory, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.each = nn.Linear(4, 5)
        self.across = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(15)
        self.last = nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.each(self.words(x)).transpose(1, 2)
        x = self.across(x).transpose(1, 2)
        return self.last(self.norm(x.flatten(1)))


@pytest.mark.parametrize(
    ("stages", "equal"), [(2, close), (["across"], close), (["each", "norm"], same)], ids=["2", "across", "each, norm"]
)
def test_microbatches_equal_the_passes_of_accumulation(
    stages: int | list[str], equal: Callable[[Tensor, Tensor], bool]
):
    """To the bit where the sent tensors were contiguous. This includes statistics, which are those of microbatches."""
    words = torch.randint(0, 10, (27, 3), generator=torch.Generator().manual_seed(4))
    job = replace(task(model=lambda: Mixed().double(), accumulate=3), data=[words, numbers(27, 3, seed=3)])
    run, other = pl.train(job, pl.AllReduceSGD(), 1, stages=stages, microbatches=3), whole(job, pl.AllReduceSGD(), 1)
    assert equal(run.params, other.params)
    assert all(equal(a, b) for a, b in zip(run.model.buffers(), other.model.buffers(), strict=True))


def test_only_what_crosses_a_cut_is_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Each sample's activations at the cut forward, and their gradients backward. Nothing else enters or leaves a
    stage.

    In addition, torch exchanges one number with each neighbour, once for every size of microbatch.
    """
    sent: list[list[int]] = []
    isend = dist.isend

    def noted(tensor: Tensor, *args: Any, **more: Any) -> Any:
        sent.append([*tensor.shape, tensor.element_size()])
        (tmp_path / str(dist.get_rank())).write_text(json.dumps(sent))
        return isend(tensor, *args, **more)

    monkeypatch.setattr(dist, "isend", noted)
    monkeypatch.setattr(distributed_c10d, "isend", noted)
    job = task(steps=3)  # The three minibatches of an epoch: each sample once.
    run = pl.train(job, pl.PeriodicAveraging(period=3), 2, stages=["2", "4"])
    seen = {rank: json.loads((tmp_path / str(rank)).read_text()) for rank in range(6)}
    for replica in range(2):
        samples = sum(len(job.part(k, replica, 2)[0]) for k in range(3))
        before, after = 8 * 9 * samples, 8 * 8 * samples
        wanted = {3 * replica: before, 3 * replica + 1: before + after, 3 * replica + 2: after}
        for rank, nbytes in wanted.items():
            tensors = [(rows * width * size, width) for rows, width, size in (s for s in seen[rank] if len(s) == 3)]
            assert all(s[0] == 1 for s in seen[rank] if len(s) != 3)
            assert sum(n for n, _ in tensors) == nbytes
            assert sum(s.nbytes for s in run.trace.spans if s.rank == rank and s.kind == "gradient") == nbytes
            assert {width for _, width in tensors} == [{9}, {9, 8}, {8}][rank % 3]


class Cursed(torch.autograd.Function):
    """x * w. The gradient for w is multiplied by `curse`; the one for x is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, curse: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, curse)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w, curse = ctx.saved_tensors
        return grads[0] * w, (grads[0] * x * curse).sum(0), None


class Stumbling(nn.Module):
    def __init__(self, numel: int, over: float) -> None:
        super().__init__()
        self.w, self.over = nn.Parameter(torch.ones(numel)), over

    def forward(self, x: Tensor) -> Tensor:
        return Cursed.apply(x, self.w, torch.where((x.detach() > 6.5).any(1, keepdim=True), self.over, 1.0))


def stumbling(over: float = torch.nan) -> pl.Task:
    """One sample in 27 gives NaN, or a factor, in the gradient of the first layer, and only there."""
    data = [numbers(27, 6, seed=2).clamp(-2, 2), numbers(27, 3, seed=3)]
    data[0][11, 3] = 7.0
    return replace(task(model=lambda: nn.Sequential(Stumbling(6, over), nn.Linear(6, 3)).double()), data=data)


@pytest.mark.filterwarnings("ignore::paceline.NonFiniteGradient")
@pytest.mark.parametrize("name", ["all-reduce-sgd", "periodic-averaging"])
def test_nan_in_one_stage_makes_all_stages_skip_the_step(name: str):
    run, other = pl.train(stumbling(), METHODS[name], 2, stages=2), whole(stumbling(), METHODS[name], 2)
    assert run.params.isfinite().all() and close(run.params, other.params)
    assert not close(run.params, whole(stumbling(over=1.0), METHODS[name], 2).params, rtol=1e-3), (
        "there was something to skip"
    )


@pytest.mark.filterwarnings("ignore::paceline.NonFiniteGradient", "ignore::paceline.NonFiniteReplica")
@pytest.mark.parametrize(
    "method", [pl.AllReduceSGD, partial(pl.PeriodicAveraging, period=1)], ids=["gradients", "parameters"]
)
def test_a_gradient_that_one_stage_cannot_encode_is_skipped_by_all_stages(method: Callable[..., pl.Strategy]):
    """The largest value in half precision is 65504. A worker with the whole model skips a gradient beyond that too."""
    run, other = (
        train(stumbling(over=1e9), method(codec=pl.codecs.Fp16()), 2) for train in (partial(pl.train, stages=2), whole)
    )
    assert close(run.params, other.params, rtol=1e-6)
    assert not close(run.params, whole(stumbling(over=1.0), method(codec=pl.codecs.Fp16()), 2).params, rtol=1e-3), (
        "there was something to skip"
    )


class Poisoned(torch.optim.SGD):
    """After four steps of one rank its first parameter is NaN."""

    def __init__(self, params: Any, rank: int) -> None:
        super().__init__(params, lr=0.05)
        self.rank, self.left = rank, 4

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.left -= 1
        if not self.left and dist.get_rank() == self.rank:
            self.param_groups[0]["params"][0].data.view(-1)[0] = torch.nan


@pytest.mark.filterwarnings("ignore::paceline.NonFiniteGradient", "ignore::paceline.NonFiniteReplica")
def test_a_replica_with_nan_in_one_stage_has_no_weight_in_any_stage():
    strategy = METHODS["periodic-averaging"]
    split = pl.train(task(optimizer=lambda params: Poisoned(params, rank=2)), strategy, 2, stages=2)
    other = pl.train(task(optimizer=lambda params: Poisoned(params, rank=1)), strategy, 2)
    assert split.params.isfinite().all() and close(split.params, other.params)
    assert not close(split.params, whole(task(optimizer=OPTIMIZERS["sgd"]), strategy, 2).params, rtol=1e-6), (
        "it did not count"
    )


def test_a_process_holds_only_its_stage(tmp_path: Path):
    """This counts the parameters of all models that the process has built, while it trains, and the optimizer's state
    for them."""
    built: list[weakref.ref[nn.Parameter]] = []

    def model() -> nn.Module:
        whole = network()
        built.extend(map(weakref.ref, whole.parameters()))
        return whole

    class Telling(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            gc.collect()
            held = [p for p in (ref() for ref in built) if p is not None and not p.is_meta]
            kept = [state["momentum_buffer"] for state in self.state.values()]
            (tmp_path / str(dist.get_rank())).write_text(
                json.dumps([[list(t.shape) for t in tensors] for tensors in (held, kept)])
            )

    optimizer = partial(Telling, lr=0.05, momentum=0.9)
    pl.train(task(steps=1, model=model, optimizer=optimizer), pl.AllReduceSGD(), 2, stages=["2", "4"])
    shapes = [[[b, a], [b]] for a, b in pairwise(WIDTHS)]
    parts = [shapes[0], shapes[1], [*shapes[2], *shapes[3]]]
    assert [json.loads((tmp_path / str(r)).read_text()) for r in range(6)] == [[part, part] for part in 2 * parts]


def test_the_simulators_bytes_at_the_cuts_are_those_of_real_processes():
    strategy, stages = pl.PeriodicAveraging(period=3), ["2", "4"]
    modelled = pl.simulate(task(), strategy, replace(instant(2), stages=stages)).trace.spans
    real = pl.train(task(), strategy, 2, stages=stages).trace.spans
    for replica in range(2):
        sent = sum(s.nbytes for s in real if s.kind == "gradient" and s.rank // 3 == replica)
        assert sent == sum(s.nbytes for s in modelled if s.kind == "stages" and s.rank == replica)


def test_nan_in_one_stage_can_stop_all_stages():
    with pytest.raises(pl.ClusterError, match=r"NaN or infinity in the gradient of '0.w' at step"):
        pl.train(stumbling(), METHODS["periodic-averaging"], 2, stages=2, nonfinite="stop")


def test_an_error_names_a_killed_stage():
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return squared_error(model, batch)

    with pytest.raises(pl.ClusterError, match=r"rank 2 \(process \d+\) was killed by SIGKILL"):
        pl.train(replace(task(), loss=loss), pl.AllReduceSGD(), 2, stages=2)


def asking(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return squared_error(model, batch) + model.get_parameter("0.weight").square().sum()


def calling_twice(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return squared_error(model, batch) + squared_error(model, batch)


REFUSED: dict[str, tuple[Callable[[], pl.Run], str]] = {
    "peers": (
        lambda: pl.train(task(), pl.Gossip(), 2, stages=2),
        r"train\(Gossip\): it needs the whole model in each worker .*, which stages=2 does not offer",
    ),
    "no such layer": (
        lambda: pl.train(task(), pl.AllReduceSGD(), 2, stages=["3", "9"]),
        "there is no layer '9'; did you mean",
    ),
    "too many": (
        lambda: pl.train(task(), pl.AllReduceSGD(), 1, stages=5),
        r"split\(Sequential, 5\): only 4 of the layers",
    ),
    "none": (lambda: pl.train(task(), pl.AllReduceSGD(), 1, stages=0), r"train\(stages=0,"),
    "no microbatch": (lambda: pl.train(task(), pl.AllReduceSGD(), 1, stages=2, microbatches=0), r"microbatches=0"),
    "no order": (lambda: pl.train(task(), pl.AllReduceSGD(), 1, stages=2, pipeline="zigzag"), "by '1f1b' or 'gpipe'"),  # pyright: ignore
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_stages_are_refused_before_a_process_starts(name: str):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


def casting(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return squared_error(model, batch)


def penalising(model: Any, batch: Any) -> Tensor:
    return squared_error(model, batch) + sum(p.square().sum() for p in model.parameters())


def masking(model: Any, batch: Any) -> Tensor:
    return squared_error(model, (batch[0] * (torch.rand_like(batch[0]) < 0.5), batch[1]))


ODD: dict[Any, str] = {
    penalising: "reads 'parameters' of its model",
    masking: "draws random numbers before it calls its model",
    asking: "reads '0' of its model",
    calling_twice: "calls its model more than once",
    casting: "under autocast, which other stages do not enter",
}


@pytest.mark.parametrize(("loss", "message"), ODD.items(), ids=[loss.__name__ for loss in ODD])
def test_a_loss_that_does_more_than_call_its_model_is_refused(loss: Any, message: str):
    with pytest.raises((ValueError, pl.ClusterError), match=message):
        pl.train(replace(task(), loss=loss), pl.AllReduceSGD(), 1, stages=2)
