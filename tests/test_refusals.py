"""Every combination that paceline refuses: its error names the two things that do not go together, and what works.

The way is taken: what the error suggests is built, and run where that is cheap.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline import codecs, rules
from paceline.families.adam import CodecWithAdam
from tests.dist import forked
from tests.dist.test_agreement import set_apart

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
Call = Callable[[], Any]


@dataclass(frozen=True)
class Refused:
    """A call that is refused, what its error must say, and the call that the error suggests."""

    call: Call
    said: tuple[str, ...]  # The two things, and the suggestion.
    instead: Call
    error: type[Exception] = ValueError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def embedding(*, sparse: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 3, sparse=sparse), nn.Linear(3, 2))


def task(**settings: Any) -> pl.Task:
    given: dict[str, Any] = {
        "model": network,
        "loss": lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        "data": [X, X[:, :2].sin()],
        "batch": 8,
        "optimizer": by(torch.optim.SGD),
        "steps": 6,
    }
    return pl.Task(**{**given, **settings})


def by(optimizer: Any, **settings: Any) -> Any:
    return lambda parameters: optimizer(parameters, **{"lr": 0.1, **settings})


def words(*, sparse: bool = True) -> pl.Task:
    indices = torch.randint(0, 9, (48,), generator=torch.Generator().manual_seed(2))
    return task(model=lambda: embedding(sparse=sparse), data=[indices, X[:, :2].sin()])


def of_each(rank: int, workers: int) -> list[torch.Tensor]:
    return [X[rank::workers], X[rank::workers, :2].sin()]


OWN = {"data": of_each}
MOMENTUM = {"optimizer": by(torch.optim.SGD, momentum=0.9)}


def simulate(
    strategy: pl.Strategy, given: pl.Task | None = None, *, workers: int = 2, stages: int = 1, **settings: Any
) -> pl.Run:
    return pl.simulate(given or task(), strategy, pl.Cluster(workers=workers, stages=stages), **settings)


def attach(strategy: pl.Strategy, *, with_optimizer: bool = True, **settings: Any) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if with_optimizer else None
    with pl.attach(model, optimizer, strategy, **settings):
        pass


def stopped(strategy: pl.Strategy, workers: int = 2) -> list[dict[str, Any]]:
    return simulate(strategy, workers=workers, stop_at=4).states


def load_after_attach(strategy: pl.Strategy) -> None:
    model = network()
    with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy) as session:
        session.load_state_dict(session.state_dict())


def attach_saved(strategy: pl.Strategy) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        tempfile.TemporaryDirectory() as folder,
        pl.attach(model, optimizer, strategy, checkpoint=pl.Checkpoints(folder)) as session,
    ):
        for x in session.shard(LOADER):
            model(x).sum().backward()
            session.step()


def of_the_first_worker() -> Any:
    """Of two groups of parameters, with different betas."""
    return lambda p: torch.optim.Adam([{"params": list(p)[:1]}, {"params": list(p)[1:], "betas": (0.5, 0.9)}])


ONE_BIT, LOW_RANK, DGC = codecs.OneBit(), codecs.PowerSGD(), codecs.DGC()
LENGTH = "epochs=...) with a loader that has a length"
LOADER = list(torch.randn(4, 6, 3))


REFUSED: dict[str, Refused] = {
    # Codecs.
    "gossip with a codec": Refused(
        lambda: pl.Gossip(codec=ONE_BIT),
        ("Gossip", "codec=OneBit", "Strom(codec=...)"),
        lambda: simulate(pl.Strom(codec=codecs.Threshold(0.1))),
        TypeError,
    ),
    "easgd with a codec": Refused(
        lambda: pl.EASGD(codec=ONE_BIT),
        ("EASGD", "codec=OneBit", "AsyncEASGD(codec=...)"),
        lambda: simulate(pl.AsyncEASGD(codec=ONE_BIT)),
        TypeError,
    ),
    "ea-wild without servers, durable": Refused(
        lambda: pl.EAWild(durability="process"),
        ("EAWild", "durability='process'", "servers=1"),
        lambda: pl.EAWild(servers=1, durability="process"),
    ),
    "ea-wild with a codec": Refused(
        lambda: pl.EAWild(codec=ONE_BIT),
        ("EAWild", "codec=OneBit", "AsyncEASGD(codec=...)"),
        lambda: simulate(pl.AsyncEASGD(codec=ONE_BIT)),
        TypeError,
    ),
    "hogwild with a codec": Refused(
        lambda: pl.Hogwild(codec=ONE_BIT),
        ("Hogwild", "codec=OneBit", "ParameterServer(codec=...)"),
        lambda: simulate(pl.ParameterServer(codec=ONE_BIT)),
        TypeError,
    ),
    "sandblaster with a codec": Refused(
        lambda: pl.Sandblaster(codec=ONE_BIT),
        ("Sandblaster", "codec=OneBit", "Downpour(codec=...)"),
        lambda: simulate(pl.Downpour(codec=ONE_BIT)),
        TypeError,
    ),
    "replicated with a codec": Refused(
        lambda: pl.Replicated(codec=ONE_BIT),
        ("Replicated", "codec=OneBit", "AllReduceSGD"),
        lambda: simulate(pl.AllReduceSGD(codec=ONE_BIT)),
        TypeError,
    ),
    "a warm start with a codec": Refused(
        lambda: pl.Then(pl.AllReduceSGD(), pl.BlockMomentum(period=2), steps=2, codec=ONE_BIT),
        ("Then", "codec=OneBit", "Then(AllReduceSGD(codec=...), ...)"),
        lambda: simulate(pl.Then(pl.AllReduceSGD(codec=ONE_BIT), pl.BlockMomentum(period=2), steps=2)),
        TypeError,
    ),
    "a codec by name, for a method without one": Refused(
        lambda: pl.registry.strategy("gossip", codec="one-bit"),
        ("Gossip", "codec", "Strom(codec=...)"),
        lambda: pl.registry.strategy("strom", codec="top-k"),
    ),
    "power-sgd to a server": Refused(
        lambda: pl.ParameterServer(codec=LOW_RANK),
        ("ParameterServer", "PowerSGD", "AllReduceSGD(codec=PowerSGD(rank=4))"),
        lambda: simulate(pl.AllReduceSGD(codec=LOW_RANK)),
    ),
    "power-sgd from a server": Refused(
        lambda: pl.ParameterServer(pulls=LOW_RANK),
        ("ParameterServer", "PowerSGD", "OneBit()"),
        lambda: simulate(pl.ParameterServer(pulls=ONE_BIT)),
    ),
    "power-sgd between peers": Refused(
        lambda: pl.Strom(codec=LOW_RANK),
        ("Strom", "PowerSGD", "TopK()"),
        lambda: simulate(pl.Strom(codec=codecs.TopK())),
    ),
    "power-sgd in chunks": Refused(
        lambda: codecs.Chunked(LOW_RANK),
        ("Chunked", "PowerSGD", "AllReduceSGD(codec=PowerSGD(rank=4))"),
        lambda: pl.AllReduceSGD(codec=LOW_RANK),
    ),
    "chunks of codecs by tensor": Refused(
        lambda: codecs.Chunked(codecs.PerTensor(codecs.TernGrad())),
        ("Chunked", "PerTensor", "use PerTensor(codec=Chunked(codec=TernGrad("),
        lambda: codecs.PerTensor(codecs.Chunked(codecs.TernGrad())),
    ),
    "compression of what is compressed": Refused(
        lambda: codecs.Entropy(codecs.Entropy(codecs.QSGD())),
        ("Entropy(codec=Entropy(", "use Entropy(codec=QSGD("),
        lambda: codecs.Entropy(codecs.QSGD()),
    ),
    "dgc with an optimizer's momentum": Refused(
        lambda: simulate(pl.AllReduceSGD(codec=DGC), task(**MOMENTUM)),
        ("DGC", "momentum 0.9", "DGC(momentum=0)"),
        lambda: simulate(pl.AllReduceSGD(codec=codecs.DGC(momentum=0)), task(**MOMENTUM)),
    ),
    "dgc with a rule's momentum": Refused(
        lambda: pl.ParameterServer(codec=DGC, rule=rules.Momentum(lr=0.1, momentum=0.9)),
        ("DGC", "a rule of momentum 0.9", "DGC(momentum=0)"),
        lambda: pl.ParameterServer(codec=codecs.DGC(momentum=0), rule=rules.Momentum(lr=0.1, momentum=0.9)),
    ),
    "1-bit adam with dgc": Refused(
        lambda: pl.OneBitAdam(codec=DGC),
        ("OneBitAdam", "DGC", "use TopK"),
        lambda: simulate(pl.OneBitAdam(codec=codecs.TopK(), betas=(0.9, 0.999))),
    ),
    # Optimizers.
    "1-bit adam with sgd": Refused(
        lambda: simulate(pl.OneBitAdam()),
        ("OneBitAdam", "SGD", "OneBitAdam(betas=(0.9, 0.999))"),
        lambda: simulate(pl.OneBitAdam(betas=(0.9, 0.999))),
    ),
    "1-bit adam with a decay in the gradient": Refused(
        lambda: simulate(pl.OneBitAdam(), task(optimizer=by(torch.optim.Adam, weight_decay=0.1))),
        ("OneBitAdam", "Adam(weight_decay=0.1)", "use AdamW"),
        lambda: simulate(pl.OneBitAdam(), task(optimizer=by(torch.optim.AdamW, weight_decay=0.1))),
    ),
    "1-bit adam with amsgrad": Refused(
        lambda: simulate(pl.OneBitAdam(), task(optimizer=by(torch.optim.Adam, amsgrad=True))),
        ("OneBitAdam", "amsgrad=True", "leave it out"),
        lambda: simulate(pl.OneBitAdam(), task(optimizer=by(torch.optim.Adam))),
    ),
    "1-bit adam with two pairs of betas": Refused(
        lambda: simulate(pl.OneBitAdam(), task(optimizer=of_the_first_worker())),
        ("(0.5, 0.9)", "(0.9, 0.999)", "give all the same"),
        lambda: simulate(pl.OneBitAdam(), task(optimizer=by(torch.optim.Adam))),
    ),
    "1-bit adam with half of its settings": Refused(
        lambda: pl.OneBitAdam(eps=1e-3),
        ("eps=0.001", "without betas", "give betas=(0.9, 0.999) too"),
        lambda: simulate(pl.OneBitAdam(eps=1e-3, betas=(0.9, 0.999))),
    ),
    "l-bfgs in a task": Refused(
        lambda: simulate(pl.AllReduceSGD(), task(optimizer=by(torch.optim.LBFGS))),
        ("LBFGS", "Task", "SGD with Sandblaster"),
        lambda: simulate(pl.Sandblaster(), task()),
    ),
    "local steps without an optimizer": Refused(
        lambda: attach(pl.Gossip(), with_optimizer=False),
        ("Gossip", "optimizer=None", "give the model's optimizer"),
        lambda: attach(pl.Gossip()),
    ),
    # Stages.
    "gossip in stages": Refused(
        lambda: simulate(pl.Gossip(), stages=2),
        ("Gossip", "stages=2", "Downpour"),
        lambda: simulate(pl.Downpour(), stages=2),
    ),
    "hogwild in stages": Refused(
        lambda: pl.train(task(), pl.Hogwild(), 2, stages=2),
        ("Hogwild", "stages=2", "AllReduceSGD"),
        lambda: simulate(pl.AllReduceSGD(), stages=2),
    ),
    "ea-wild on servers in stages": Refused(
        lambda: simulate(pl.EAWild(servers=2), stages=2),
        ("EAWild", "stages=2", "ParameterServer"),
        lambda: simulate(pl.ParameterServer(), stages=2),
    ),
    "a warm start with servers in stages": Refused(
        lambda: simulate(pl.Then(pl.AllReduceSGD(), pl.Downpour(), steps=2), stages=2),
        ("Then", "stages=2", "a method that averages"),
        lambda: simulate(pl.PeriodicAveraging(2), stages=2),
    ),
    "more stages than layers": Refused(
        lambda: pl.train(task(), pl.AllReduceSGD(), 2, stages=3),
        ("Sequential, 3", "only 2 of the layers", "'0', '2'"),
        lambda: simulate(pl.AllReduceSGD(), stages=2),
    ),
    "workers that die in stages": Refused(
        lambda: simulate(pl.Downpour(), stages=2, faults=pl.Faults(deaths={1: 0.1})),
        ("deaths={1: 0.1}", "stages=2", "give stages=1"),
        lambda: simulate(pl.Downpour(), faults=pl.Faults(deaths={1: 0.1})),
    ),
    # Tensor parallelism.
    "asynchronous methods on a mesh": Refused(
        lambda: attach(pl.Gossip(), mesh=DeviceMesh.__new__(DeviceMesh)),  # A real one needs a group of processes.
        ("Gossip", "a model of DTensors", "AllReduceSGD"),
        lambda: attach(pl.AllReduceSGD()),
    ),
    # Sparse gradients.
    "all-reduce of sparse gradients": Refused(
        lambda: simulate(pl.AllReduceSGD(), words()),
        ("sparse gradient", "AllReduceSGD", "ParameterServer(sparse=True)"),
        lambda: simulate(pl.ParameterServer(sparse=True), words()),
    ),
    "1-bit adam of sparse gradients": Refused(
        lambda: simulate(pl.OneBitAdam(betas=(0.9, 0.999)), words()),
        ("sparse gradient", "OneBitAdam", "nn.Embedding(sparse=False)"),
        lambda: simulate(pl.OneBitAdam(betas=(0.9, 0.999)), words(sparse=False)),
    ),
    "sparse gradients to a server that expects dense ones": Refused(
        lambda: simulate(pl.Downpour(), words()),
        ("sparse gradient", "Downpour", "PeriodicAveraging"),
        lambda: simulate(pl.PeriodicAveraging(2), words()),
    ),
    "sparse rows with a codec": Refused(
        lambda: pl.ParameterServer(sparse=True, codec=ONE_BIT),
        ("sparse=True", "codec=OneBit", "leave out codec and pulls, or sparse"),
        lambda: simulate(pl.ParameterServer(codec=ONE_BIT)),
    ),
    "sparse rows with a rule for all": Refused(
        lambda: pl.ParameterServer(sparse=True, rule=rules.Sgd(lr=0.1, weight_decay=0.1)),
        ("sparse=True", "weight_decay=0.1", "leave out sparse, or the rule's weight_decay"),
        lambda: pl.ParameterServer(sparse=True, rule=rules.Sgd(lr=0.1)),
    ),
    **{
        f"sparse rows of {strategy.__name__}": Refused(
            partial(strategy, sparse=True),
            (strategy.__name__, "sparse=True", "ParameterServer(sparse=True)"),
            lambda: pl.ParameterServer(sparse=True),
        )
        for strategy in (pl.ASGD, pl.Downpour, pl.AsyncDiLoCo, pl.AsyncEASGD)
    },
    # One method after another.
    "replicated at the end": Refused(
        lambda: pl.Then(pl.AllReduceSGD(), pl.Replicated(), steps=2),
        ("AllReduceSGD", "then=Replicated()", "Replicated can only be the first method"),
        lambda: simulate(pl.Then(pl.Replicated(), pl.AllReduceSGD(), steps=2)),
    ),
    "servers at the beginning": Refused(
        lambda: pl.Then(pl.Downpour(), pl.AllReduceSGD(), steps=2),
        ("Downpour", "AllReduceSGD", "use it as the second method"),
        lambda: simulate(pl.Then(pl.AllReduceSGD(), pl.Downpour(), steps=2)),
    ),
    "a warm start longer than the run": Refused(
        lambda: simulate(pl.Then(pl.AllReduceSGD(), pl.PeriodicAveraging(2), steps=20)),
        ("20 steps", "only 6", "give it fewer"),
        lambda: simulate(pl.Then(pl.AllReduceSGD(), pl.PeriodicAveraging(2), steps=2)),
    ),
    "two lengths of a warm start": Refused(
        lambda: pl.Then(pl.AllReduceSGD(), pl.PeriodicAveraging(2), steps=2, epochs=1),
        ("steps=2", "epochs=1", "once"),
        lambda: pl.Then(pl.AllReduceSGD(), pl.PeriodicAveraging(2), epochs=1),
    ),
    "a warm start by samples in a loop of unknown length": Refused(
        lambda: attach(pl.Then(pl.AllReduceSGD(), pl.PeriodicAveraging(2), samples=8)),
        ("Then(samples=...)", "the samples", "loader=loader"),
        lambda: attach(
            pl.Then(pl.AllReduceSGD(), pl.PeriodicAveraging(2), samples=8),
            loader=DataLoader(TensorDataset(X), batch_size=8),
        ),
    ),
    # Data of each worker's own.
    "replicated on own data": Refused(
        lambda: simulate(pl.Then(pl.Replicated(), pl.AllReduceSGD(), steps=2), task(**OWN)),
        ("Replicated", "data of their own", "begin with AllReduceSGD"),
        lambda: simulate(pl.Then(pl.AllReduceSGD(), pl.BlockMomentum(period=2), steps=2), task(**OWN)),
    ),
    "a warm start by epochs on own data": Refused(
        lambda: simulate(pl.Then(pl.AllReduceSGD(), pl.PeriodicAveraging(2), epochs=1), task(**OWN)),
        ("Then(epochs=...)", "steps per epoch", "give a Task data=[...]"),
        lambda: simulate(pl.Then(pl.AllReduceSGD(), pl.PeriodicAveraging(2), epochs=1), task(steps=12)),
    ),
    "epochs on own data": Refused(
        lambda: task(**OWN, steps=None, epochs=1),
        ("epochs=1", "data of each worker's own", "give steps"),
        lambda: task(**OWN, steps=4),
    ),
    "sandblaster on own data": Refused(
        lambda: simulate(pl.Sandblaster(), task(**OWN)),
        ("Sandblaster", "data of each worker's own", "a Task whose data the workers share out"),
        lambda: simulate(pl.Sandblaster(), task()),
    ),
    "random groups on own data": Refused(
        lambda: simulate(pl.EAWild(groups="random"), task(**OWN)),
        ("EAWild", "data of each worker's own", "a Task whose data the workers share out"),
        lambda: simulate(pl.EAWild(groups="random"), task()),
    ),
    "sandblaster in a loop": Refused(
        lambda: attach(pl.Sandblaster(), with_optimizer=False),
        ("attach(Sandblaster)", "a loop of your own", "simulate() with a Task"),
        lambda: simulate(pl.Sandblaster(), task()),
    ),
    "adaptive averaging in a loop of unknown length": Refused(
        lambda: attach(pl.AdaptiveAveraging()),
        ("AdaptiveAveraging", "the steps", LENGTH),
        lambda: attach(
            pl.AdaptiveAveraging(),
            loader=DataLoader(TensorDataset(X), batch_size=8),
            epochs=20,
        ),
    ),
    "epochs without a loader": Refused(
        lambda: attach(pl.AllReduceSGD(), epochs=2),
        ("epochs=2", "loader", "attach(loader=..., epochs=2)"),
        lambda: attach(pl.AllReduceSGD(), loader=LOADER, epochs=2),
    ),
    # Stop, resume, faults.
    "a stop with servers": Refused(
        lambda: simulate(pl.Sandblaster(), stop_at=2),
        ("Sandblaster", "stopped or resumed", "AllReduceSGD"),
        lambda: stopped(pl.AllReduceSGD()),
    ),
    "states with servers": Refused(
        lambda: load_after_attach(pl.ASGD(servers=1)),
        ("session.load_state_dict()", "ASGD", "attach(checkpoint="),
        lambda: attach_saved(pl.ASGD(servers=1)),
    ),
    "a state of another strategy": Refused(
        lambda: simulate(pl.PeriodicAveraging(2), resume=stopped(pl.AllReduceSGD())),
        ("AllReduceSGD", "PeriodicAveraging", "resume it under AllReduceSGD"),
        lambda: simulate(pl.AllReduceSGD(), resume=stopped(pl.AllReduceSGD())),
    ),
    "a state with another codec": Refused(
        lambda: simulate(pl.AllReduceSGD(codec=ONE_BIT), resume=stopped(pl.AllReduceSGD())),
        ("no slot 'codec.residuals'", "another strategy saved it", "one with other settings"),
        lambda: simulate(pl.AllReduceSGD(codec=ONE_BIT), resume=stopped(pl.AllReduceSGD(codec=ONE_BIT))),
    ),
    "states of fewer workers": Refused(
        lambda: simulate(pl.AllReduceSGD(), workers=3, resume=stopped(pl.AllReduceSGD())),
        ("2 workers' states", "3 workers", "resized(states, 3)"),
        lambda: simulate(pl.AllReduceSGD(), workers=3, resume=pl.resized(stopped(pl.AllReduceSGD()), 3)),
    ),
    "deaths in step": Refused(
        lambda: simulate(pl.AllReduceSGD(), faults=pl.Faults(deaths={1: 0.1})),
        ("AllReduceSGD", "a run with faults", "Gossip"),
        lambda: simulate(pl.Gossip(), faults=pl.Faults(deaths={1: 0.1})),
    ),
    "suspicions without servers": Refused(
        lambda: simulate(pl.Gossip(), faults=pl.Faults(suspicions=[(1, 0.1)])),
        ("suspicions", "Gossip has no servers", "ParameterServer"),
        lambda: simulate(pl.ParameterServer(), faults=pl.Faults(suspicions=[(1, 0.1)])),
    ),
    # Sizes and times that do not fit.
    "groups that do not divide the workers": Refused(
        lambda: simulate(pl.EAWild(group=2), workers=3),
        ("group=2", "3 workers", "one of 1, 3"),
        lambda: simulate(pl.EAWild(group=3), workers=3),
    ),
    "more servers than parameters": Refused(
        lambda: simulate(pl.ParameterServer(servers=50)),
        ("ParameterServer(servers=50)", "26 parameters", "give fewer servers"),
        lambda: simulate(pl.ParameterServer(servers=26)),
    ),
    "more shards than parameters": Refused(
        lambda: simulate(pl.Sandblaster(shards=50)),
        ("Sandblaster(shards=50)", "26 parameters", "give fewer shards"),
        lambda: simulate(pl.Sandblaster(shards=3)),
    ),
    "more fragments than parameters": Refused(
        lambda: simulate(pl.DiLoCo(period=100, fragments=50)),
        ("fragments=50", "26 parameters", "give at most that many"),
        lambda: simulate(pl.DiLoCo(period=104, fragments=26)),
    ),
    "fragments that do not divide the period": Refused(
        lambda: pl.DiLoCo(period=4, fragments=3),
        ("period=4", "fragments=3", "must divide the period"),
        lambda: simulate(pl.DiLoCo(period=4, fragments=2)),
    ),
    "a delay as long as the time between fragments": Refused(
        lambda: pl.DiLoCo(period=4, fragments=2, delay=2),
        ("fragments=2", "delay=2", "give a shorter delay"),
        lambda: simulate(pl.DiLoCo(period=4, fragments=2, delay=1)),
    ),
    "fragments that reset the optimizer": Refused(
        lambda: pl.DiLoCo(period=4, fragments=2, optimizer_state="reset"),
        ("fragments=2", "optimizer_state='reset'", "use 'keep' or 'average'"),
        lambda: simulate(pl.DiLoCo(period=4, fragments=2, optimizer_state="average")),
    ),
    "a delay as long as the period": Refused(
        lambda: pl.PeriodicAveraging(4, delay=4),
        ("period=4", "delay=4", "give a delay of at most 3"),
        lambda: simulate(pl.PeriodicAveraging(4, delay=3)),
    ),
    "two periods": Refused(
        lambda: pl.PeriodicAveraging(4, samples=16),
        ("period=4", "samples=16", "not in both"),
        lambda: simulate(pl.PeriodicAveraging(samples=16)),
    ),
    "two times between exchanges": Refused(
        lambda: pl.ASGD(period=2, samples=16),
        ("period=2", "samples=16", "not in both"),
        lambda: simulate(pl.ASGD(samples=16)),
    ),
    "two times between choices": Refused(
        lambda: pl.AdaComm(seconds=1, steps=2),
        ("seconds=1", "steps=2", "not in both"),
        lambda: simulate(pl.AdaComm(period=2, steps=2)),
    ),
    "two momenta of blocks": Refused(
        lambda: pl.BlockMomentum(period=4, momentum=0.5, time_constant=8),
        ("momentum=0.5", "time_constant=8", "give only one"),
        lambda: simulate(pl.BlockMomentum(period=4, momentum=0.5)),
    ),
    "two forces": Refused(
        lambda: pl.EASGD(alpha=0.1, rho=0.1),
        ("alpha=0.1", "rho=0.1", "give one of them"),
        lambda: simulate(pl.EASGD(alpha=0.1)),
    ),
    "two averages under one gradient": Refused(
        lambda: pl.Gossip(rounds=2),
        ("rounds=2", "overlap", "give overlap=False"),
        lambda: simulate(pl.Gossip(rounds=2, overlap=False)),
    ),
    "a clock and a bound": Refused(
        lambda: pl.StaleSynchronous(bound=2, visible="clock"),
        ("bound=2", "visible='clock'", "visible='at once'"),
        lambda: simulate(pl.StaleSynchronous(bound=2, visible="at once")),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_combination_names_both_things_and_a_way_that_works(name: str):
    refused = REFUSED[name]
    with pytest.raises(refused.error) as error:
        refused.call()
    for said in refused.said:
        assert said in str(error.value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused.instead()


def test_a_coarse_codec_with_adam_is_a_warning_that_names_both_and_a_way_that_works():
    adam = task(optimizer=by(torch.optim.Adam))
    with pytest.warns(CodecWithAdam, match=r"codec=OneBit.* with the optimizer Adam.* use OneBitAdam\(OneBit"):
        simulate(pl.AllReduceSGD(codec=ONE_BIT), adam)
    simulate(pl.OneBitAdam(ONE_BIT), adam)


# In a loop of the user's own, on two ranks.

Step = Callable[[pl.Session, nn.Module, torch.Tensor], Any]
BATCHES = list(torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(1)))
INDICES = list(torch.randint(0, 9, (4, 6), generator=torch.Generator().manual_seed(1)))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def plain(session: pl.Session, model: nn.Module, batch: torch.Tensor) -> None:
    loss = loss_of(model, batch)
    loss.backward()
    session.step(loss)


def without_loss(session: pl.Session, model: nn.Module, batch: torch.Tensor) -> None:
    loss_of(model, batch).backward()
    session.step()


def by_closure(session: pl.Session, model: nn.Module, batch: torch.Tensor) -> None:
    def closure() -> torch.Tensor:
        session.optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    session.optimizer.step(closure)


def twice(session: pl.Session, model: nn.Module, batch: torch.Tensor) -> None:
    loss_of(model, batch[:2]).backward()
    loss_of(model, batch[2:]).backward()
    session.step()


def by_itself(session: pl.Session, model: nn.Module, batch: torch.Tensor) -> None:
    loss_of(model, batch).backward()
    session.optimizer.inner.step()


def checkpointed(session: pl.Session, model: nn.Module, batch: torch.Tensor, *, use_reentrant: bool) -> None:
    hidden = checkpoint(model[:2], batch.requires_grad_(), use_reentrant=use_reentrant)
    (hidden.sum() + model(batch).sum()).backward()
    session.step()


def wrapped(session: pl.Session, model: nn.Module, batch: torch.Tensor) -> None:
    plain(session, DistributedDataParallel(model), batch)


class Scaled:
    """Steps with a GradScaler."""

    def __init__(self, *, clip: float | None = None) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.clip = clip

    def __call__(self, session: pl.Session, model: nn.Module, batch: torch.Tensor) -> None:
        self.scaler.scale(loss_of(model, batch)).backward()
        self.scaler.unscale_(session.optimizer)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        self.scaler.step(session.optimizer)
        self.scaler.update()


def loop(
    strategy: pl.Strategy,
    step: Step = plain,
    *,
    optimizer: Any = torch.optim.SGD,
    model: Callable[[], nn.Module] = network,
    data: Sequence[torch.Tensor] = BATCHES,
    **settings: Any,
) -> None:
    built = model()
    with pl.attach(built, optimizer(built.parameters()), strategy, **settings) as session:
        for batch in session.shard(data):
            session.optimizer.zero_grad()
            step(session, built, batch)


def with_hook() -> None:
    model = DistributedDataParallel(network())
    pl.ddp_hook(ONE_BIT, model)
    loss_of(model, BATCHES[0]).backward()


LBFGS = by(torch.optim.LBFGS, max_iter=2)
REFUSED_IN_LOOPS: dict[str, Refused] = {
    "l-bfgs under all-reduce": Refused(
        lambda: loop(pl.AllReduceSGD(), by_closure, optimizer=LBFGS),
        ("LBFGS", "AllReduceSGD", "PeriodicAveraging"),
        lambda: loop(pl.PeriodicAveraging(2), by_closure, optimizer=LBFGS),
    ),
    "l-bfgs without a closure": Refused(
        lambda: loop(pl.PeriodicAveraging(2), optimizer=LBFGS),
        ("session.step()", "LBFGS", "session.optimizer.step(closure)"),
        lambda: loop(pl.PeriodicAveraging(2), by_closure, optimizer=LBFGS),
    ),
    "a scaler under 1-bit adam": Refused(
        lambda: loop(pl.OneBitAdam(betas=(0.9, 0.999)), Scaled()),
        ("OneBitAdam", "GradScaler", "bfloat16"),
        lambda: loop(pl.OneBitAdam(betas=(0.9, 0.999))),
        RuntimeError,
    ),
    "a scaler and a clip": Refused(
        lambda: loop(pl.AllReduceSGD(clip=0.1), Scaled()),
        ("clip=0.1", "GradScaler", "clip in the loop after scaler.unscale_(session.optimizer)"),
        lambda: loop(pl.AllReduceSGD(), Scaled(clip=0.1)),
        RuntimeError,
    ),
    "sparse gradients under all-reduce": Refused(
        lambda: loop(pl.AllReduceSGD(), model=embedding, data=INDICES),
        ("sparse gradient", "AllReduceSGD", "PeriodicAveraging"),
        lambda: loop(pl.PeriodicAveraging(2), model=embedding, data=INDICES),
    ),
    "two passes": Refused(
        lambda: loop(pl.AllReduceSGD(), twice),
        ("backward() ran again", "session.step()", "attach(accumulate=2)"),
        lambda: loop(pl.AllReduceSGD(), twice, accumulate=2),
        RuntimeError,
    ),
    "small minibatches that are accumulated": Refused(
        lambda: loop(pl.AllReduceSGD(), data=[batch[:1] for batch in BATCHES], accumulate=2),
        ("1 samples for 2 workers", "2 minibatches make a step", "at least one sample"),
        lambda: loop(pl.AllReduceSGD(), data=[batch[:1] for batch in BATCHES]),
    ),
    "a step of the optimizer alone": Refused(
        lambda: loop(pl.AllReduceSGD(), by_itself),
        ("optimizer.step()", "bypass the strategy", "session.step()"),
        lambda: loop(pl.AllReduceSGD()),
        RuntimeError,
    ),
    "reentrant checkpoints": Refused(
        lambda: loop(pl.AllReduceSGD(), partial(checkpointed, use_reentrant=True)),
        ("backward() ran inside backward()", "use_reentrant=True", "use_reentrant=False"),
        lambda: loop(pl.AllReduceSGD(), partial(checkpointed, use_reentrant=False)),
        RuntimeError,
    ),
    "a model in distributed data parallel": Refused(
        lambda: loop(pl.AllReduceSGD(), model=lambda: DistributedDataParallel(network())),
        ("attach", "DistributedDataParallel", "paceline.ddp_hook"),
        with_hook,
    ),
    "an attached model in distributed data parallel": Refused(
        lambda: loop(pl.AllReduceSGD(), wrapped),
        ("attached Sequential", "DistributedDataParallel", "leave DistributedDataParallel out"),
        lambda: loop(pl.AllReduceSGD()),
        RuntimeError,
    ),
    "hogwild on two hosts": Refused(
        lambda: on_two_hosts(pl.Hogwild()),
        ("Hogwild", "several hosts", "EAWild(servers=2)"),
        lambda: loop(pl.Hogwild()),
    ),
    "ea-wild on two hosts": Refused(
        lambda: on_two_hosts(pl.EAWild()),
        ("EAWild", "several hosts", "start all workers on one host"),
        lambda: loop(pl.EAWild()),
    ),
    "groups that do not divide the workers": Refused(
        lambda: loop(pl.EAWild(group=3)),
        ("group=3", "2 workers", "one of 1, 2"),
        lambda: loop(pl.EAWild(group=2)),
    ),
    "the model of one rank for peers": Refused(
        lambda: loop(pl.Gossip(), initial="broadcast"),
        ("Gossip", "initial='broadcast'", "the same torch.manual_seed"),
        lambda: loop(pl.Gossip()),
    ),
    "a period by the loss without the loss": Refused(
        lambda: loop(pl.AdaComm(period=2, steps=2), without_loss),
        ("AdaComm", "not reported", "session.step(loss)"),
        lambda: loop(pl.AdaComm(period=2, steps=2)),
    ),
}


def on_two_hosts(strategy: pl.Strategy) -> None:
    readlink = os.readlink
    set_apart(dist.get_rank())
    try:
        loop(strategy)
    finally:
        os.readlink = readlink


@pytest.mark.dist
def test_what_is_refused_in_a_loop_names_both_things_and_a_way_that_works(tmp_path):
    def work(rank: int) -> dict[str, str]:
        texts: dict[str, str] = {}
        for name, refused in REFUSED_IN_LOOPS.items():
            with pytest.raises(refused.error) as error:
                refused.call()
            texts[name] = str(error.value)
            refused.instead()
        return texts

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = forked.run(2, work, tmp_path)
    for texts in found:
        assert "error" not in texts, texts
        for name, refused in REFUSED_IN_LOOPS.items():
            for said in refused.said:
                assert said in texts[name], name
