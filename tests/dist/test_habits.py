"""What users do in loops of their own: it equals one process, or is refused by a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo  # torch imports it with the first optimizer; once here is faster than in every rank.
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.session.minibatch import NothingTrained
from tests.dist import forked
from tests.dist.test_attach import vector

pytestmark = pytest.mark.dist

# 7 samples each: the workers' parts have 4 and 3.
BATCHES = list(torch.randn(6, 7, 3, generator=torch.Generator().manual_seed(1)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def attached(strategy: pl.Strategy | None = None, **settings: Any) -> tuple[nn.Module, pl.Session]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, pl.attach(model, optimizer, strategy or pl.AllReduceSGD(), **settings)


def backward(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()


# Loops that equal one process.


def train_in_eval_mode(shard: Callable[[Any], Any], attach: Callable[..., Any], accumulate: int = 1) -> torch.Tensor:
    """Fine-tuning with dropout and BatchNorm switched off, and evaluations in between that forget no_grad."""
    model = network().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer) as session:
        for i, batch in enumerate(shard(session)(BATCHES)):
            backward(model, batch)
            for held_out in shard(session)(BATCHES[:2]):
                model(held_out)
            if (i + 1) % accumulate == 0:
                (session or optimizer).step()
                optimizer.zero_grad()
    return vector(model)


def train_gan(shard: Callable[[Any], Any], attach: Callable[..., Any], _: int = 1) -> torch.Tensor:
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic)]
    with attach(generator, optimizers[0]) as ours, attach(critic, optimizers[1]) as theirs:
        for batch in shard(ours)(BATCHES):
            fakes = generator(batch[:, :2])
            if theirs is not None:
                theirs.count(len(batch))
            optimizers[1].zero_grad()
            (F.softplus(critic(fakes.detach())).mean() + F.softplus(-critic(batch)).mean()).backward()
            (theirs or optimizers[1]).step()
            optimizers[0].zero_grad()
            with nullcontext() if theirs is None else theirs.no_sync():
                F.softplus(-critic(fakes)).mean().backward()
            (ours or optimizers[0]).step()
    return torch.cat([vector(generator), vector(critic)])


@pytest.mark.parametrize(
    ("train", "strategy", "accumulate"),
    [
        (train_in_eval_mode, pl.AllReduceSGD(), 1),
        (train_in_eval_mode, pl.AllReduceSGD(), 2),
        (train_gan, pl.AllReduceSGD(), 1),
    ],
)
def test_a_loop_on_two_workers_equals_one_process(train, strategy, accumulate, tmp_path):
    alone = train(lambda session: iter, lambda model, optimizer: nullcontext(), accumulate)

    def work(rank: int) -> list[float]:
        def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> pl.Session:
            return pl.attach(model, optimizer, strategy, accumulate=accumulate)

        return train(lambda session: session.shard, attach, accumulate).tolist()

    for found in forked.run(2, work, tmp_path):
        assert torch.allclose(torch.tensor(found), alone, rtol=0.0, atol=1e-6)


def test_a_step_in_which_no_worker_has_samples_changes_nothing(tmp_path):
    def work(rank: int) -> float:
        model, session = attached()
        start = vector(model)
        with session:
            for batch in BATCHES:
                session.count(0)
                backward(model, batch)
                session.step()
        return float((vector(model) - start).abs().max())

    assert forked.run(2, work, tmp_path) == [0.0, 0.0]


def test_buffers_are_equal_after_a_session_whose_last_average_is_empty(tmp_path):
    def work(rank: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
        with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), pl.EASGD(period=4)) as session:
            for batch in session.shard(BATCHES[:5]):  # The meeting after these five steps finds no samples.
                backward(model, batch)
                session.step()
        return model[0].running_mean.tolist()

    first, second = forked.run(2, work, tmp_path)
    assert first == second


def test_a_run_may_be_shorter_than_a_period_of_averaging():
    model, session = attached(pl.PeriodicAveraging(period=12_000))
    with session:
        for batch in session.shard(BATCHES):
            backward(model, batch)
            session.step()


class Stale(torch.optim.Optimizer):
    """It steps the memory that the parameters had when it was built."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.memory = [(p, p.data) for p in model.parameters()]

    def step(self, closure: Any = None) -> None:
        for p, values in self.memory:
            values.sub_(p.grad, alpha=0.1)


def test_a_run_that_changes_no_parameter_gets_a_warning():
    model = network()
    session = pl.attach(model, Stale(model), pl.AllReduceSGD())
    backward(model, BATCHES[0])
    session.step()
    with pytest.warns(NothingTrained, match="no parameter has changed in 1 steps: the gradients may"):
        session.close()


# Refusals.


def unscaled_twice(model: nn.Module, session: pl.Session) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(BATCHES[0]).sum()).backward()
    scaler.unscale_(session.optimizer.inner)
    scaler.step(session.optimizer)


def stepped_too_early(model: nn.Module, session: pl.Session) -> None:
    backward(model, BATCHES[0])
    session.step()


def saved_too_early(model: nn.Module, session: pl.Session) -> None:
    for batch in session.shard(BATCHES):
        backward(model, batch)
        session.state_dict()


def trained_while_published(model: nn.Module, session: pl.Session) -> None:
    with session.published():
        backward(model, BATCHES[0])
        session.step()


def set_gradients(model: nn.Module, session: pl.Session) -> None:
    for p, g in zip(
        model.parameters(), torch.autograd.grad(model(BATCHES[0]).sum(), [*model.parameters()]), strict=True
    ):
        p.grad = g
    session.step()


REFUSED: dict[str, tuple[dict[str, Any], Callable[[nn.Module, pl.Session], Any], str]] = {
    "unscaled twice": ({}, unscaled_twice, "divided by the scale twice; give session.optimizer to both"),
    "a step before the last pass": ({"accumulate": 3}, stepped_too_early, "1 of 3 backward passes ran"),
    "a state before the step": ({}, saved_too_early, r"session.state_dict\(\) between backward\(\) and session.step"),
    "a step of published parameters": ({}, trained_while_published, r"session.step\(\) inside session.published\(\)"),
    "a negative count": ({}, lambda m, s: s.count(-4), r"session.count\(-4\): it is the number of samples"),
    "a count that is text": ({}, lambda m, s: s.count("8"), r"session.count\('8'\): it is the number of samples"),
    "a loss that is text": ({}, lambda m, s: s.step("0.3"), "loss is '0.3', and must be one number"),
    "a loss of each sample": ({}, lambda m, s: s.step(torch.zeros(4)), r"loss is a tensor of shape \[4\]"),
}


@pytest.mark.parametrize("strategy", [pl.PeriodicAveraging(4), pl.EASGD()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_in_a_loop_is_named(case, strategy):
    settings, wrong, text = REFUSED[case]
    model, session = attached(strategy, **settings)
    with pytest.raises((RuntimeError, ValueError), match=text), session:
        wrong(model, session)


def test_gradients_that_backward_did_not_compute_are_refused_where_backward_exchanges_them(tmp_path):
    def work(rank: int) -> str:
        with pytest.raises(RuntimeError) as error:
            model, session = attached()
            with session:
                set_gradients(model, session)
        return str(error.value)

    for text in forked.run(2, work, tmp_path):
        assert "AllReduceSGD exchanges gradients during backward()" in text and "PeriodicAveraging" in text


def test_a_minibatch_of_a_layout_that_cannot_be_cut_is_named(tmp_path):
    def work(rank: int) -> list[str]:
        texts: list[str] = []
        for batch in (BATCHES[0].to_sparse(), torch.nested.nested_tensor([*BATCHES[0]], layout=torch.jagged)):
            with pytest.raises(ValueError) as error:
                _, session = attached()
                with session:
                    next(iter(session.shard([batch])))
            texts.append(str(error.value))
        return texts

    for sparse, nested in forked.run(2, work, tmp_path):
        assert "minibatch is a torch.sparse_coo tensor, which cannot be cut" in sparse
        assert "minibatch is a nested tensor, which cannot be cut" in nested


AFTER: dict[str, tuple[Callable[[pl.Session], Any], str]] = {
    "step": (lambda s: s.step(), "session.step.* after the end of the session"),
    "shard": (lambda s: list(s.shard(BATCHES)), "session.shard after the end of the session"),
    "with": (lambda s: s.__enter__(), "this session has ended, and its `with` block cannot run again"),
}


@pytest.mark.parametrize("call", AFTER)
def test_a_session_that_has_ended_says_so(call):
    act, text = AFTER[call]
    _, session = attached()
    session.close()
    with pytest.raises(RuntimeError, match=text):
        act(session)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"timeout_s": float("inf")}, r"attach\(timeout_s=inf\): a duration must be above 0 and finite"),
        ({"bucket_bytes": 0}, r"attach\(bucket_bytes=0\): a bucket has at least 1 byte"),
        ({"ordered": "yes"}, r"attach\(ordered='yes'\): ordered is True or False"),
        ({"loader": "train"}, r"attach\(loader='train'\): give an iterable of minibatches"),
        ({"loader": 100}, r"attach\(loader=100\): loader is the loader"),
        ({"loader": range(3), "epochs": "2"}, r"attach\(epochs='2'\): epochs is a number"),
        ({"loader": range(3), "epochs": -1}, r"attach\(epochs=-1\): the number of epochs is finite and above 0"),
    ],
    ids=str,
)
def test_an_argument_of_the_wrong_kind_is_quoted(settings, text):
    with pytest.raises(ValueError, match=text):
        attached(**settings)


def test_an_optimizer_in_the_place_of_the_strategy_is_named():
    model = network()
    with pytest.raises(ValueError, match=r"in another order; give attach\(model, optimizer, strategy\)"):
        pl.attach(model, pl.AllReduceSGD(), torch.optim.SGD(model.parameters(), lr=0.1))  # pyright: ignore


def test_a_communication_hook_for_a_model_without_ddp_is_refused():
    with pytest.raises(ValueError, match=r"ddp_hook\(model=<Sequential>\): model is the DistributedDataParallel"):
        pl.ddp_hook("one-bit", network())  # pyright: ignore[reportArgumentType]
