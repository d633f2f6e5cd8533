"""Models of DTensors, each rank with a part of every tensor: paceline trains the replicas along the other dimension of
the mesh, as it trains whole models."""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import paceline as pl
from tests.dist import forked
from tests.laws.tasks import numbers

pytestmark = pytest.mark.dist

STRATEGIES: dict[str, pl.Strategy] = {
    "all-reduce-sgd, clipped": pl.AllReduceSGD(clip=0.3),
    "periodic-averaging": pl.PeriodicAveraging(period=3, optimizer_state="average"),
    "adaptive-averaging": pl.AdaptiveAveraging(period=1, warmup=1, sampling=4, low=0.99, high=1.01),
}
STEPS = 8


class ChannelConv(nn.Module):
    """A convolution whose output channels are divided among the ranks.  torch has no parallel style for it."""

    def __init__(self, whole: nn.Conv1d, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh
        assert whole.bias is not None
        self.weight = nn.Parameter(distribute_tensor(whole.weight.detach(), mesh, [Shard(0)]))
        self.bias = nn.Parameter(distribute_tensor(whole.bias.detach(), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        x = DTensor.from_local(x, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        y = F.conv1d(x, self.weight.to_local(), self.bias.to_local())  # pyright: ignore
        return DTensor.from_local(y, self.mesh, [Shard(1)]).redistribute(placements=[Replicate()]).to_local()


class Network(nn.Module):
    """A convolution cut by channels, a layer cut by columns, one cut by rows, and one that every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv: nn.Module = nn.Conv1d(1, 4, 3)
        self.up = nn.Linear(16, 8)
        self.down = nn.Linear(8, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x.unsqueeze(1)).flatten(1))
        return self.norm(self.down(torch.tanh(self.up(x))))


def parts(model: Network, mesh: Any) -> nn.Module:
    assert isinstance(model.conv, nn.Conv1d)
    model.conv = ChannelConv(model.conv, mesh)
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def narrowed(model: Network) -> None:
    """One layer, which is cut, has float32 parameters between float64 ones."""
    model.up.float()
    model.up.register_forward_pre_hook(lambda module, given: (given[0].float(),))
    model.up.register_forward_hook(lambda module, given, y: y.double())


def trained(strategy: pl.Strategy, mesh: Any, *, mixed: bool = False) -> list[Any]:
    """The parameters after some steps on this worker's half of each minibatch, and the divergences in the trace."""
    torch.manual_seed(0)
    model = Network().double()
    if mixed:
        narrowed(model)
    if mesh is not None:
        parts(model, mesh["part"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pl.attach(model, optimizer, strategy, mesh=None if mesh is None else mesh["replica"]) as session:
        for step in range(STEPS):
            mine = slice(5 * session.rank, 5 * session.rank + 5)
            x, y = numbers(10, 6, seed=step)[mine], numbers(10, 5, seed=100 + step)[mine]
            session.optimizer.zero_grad()
            session.count(5)
            (model(x) - y).square().mean().backward()
            session.step()
    assert {p.dtype for p in model.up.parameters()} == {torch.float32 if mixed else torch.float64}
    whole = [p.full_tensor() if mesh is not None and hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().flatten().tolist() for p in whole] + [[s.divergence for s in session.trace.syncs]]


def skipped(strategy: pl.Strategy, mesh: Any) -> int:
    """How many steps this rank skips if rank 3 alone, in one step, has a NaN in the gradient of its part."""
    torch.manual_seed(0)
    model = parts(Network().double(), mesh["part"])
    poison = [1.0]
    model.up.weight.register_hook(lambda g: g * poison[0])  # pyright: ignore
    with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, mesh=mesh["replica"]) as session:
        for step in range(4):
            poison[0] = torch.nan if step == 2 and dist.get_rank() == 3 else 1.0
            session.optimizer.zero_grad()
            model(numbers(5, 6, seed=step + 10 * session.rank)).square().mean().backward()
            session.step()
        assert session.loop.replica.params.isfinite().all()
        return session.skipped


def refusal(strategy: pl.Strategy, mesh: Any, *, of: nn.Module) -> str:
    with pytest.raises(ValueError) as refused:
        pl.attach(of, torch.optim.SGD(of.parameters(), lr=0.1), strategy, mesh=mesh)
    return str(refused.value)


def refusals(mesh: Any) -> list[str]:
    model = parts(Network(), mesh["part"])
    return [
        refusal(pl.AllReduceSGD(), None, of=model),
        refusal(pl.AllReduceSGD(), mesh, of=model),
        refusal(pl.AllReduceSGD(), mesh["part"], of=model),
        refusal(pl.AllReduceSGD(), mesh["replica"], of=Network()),
        refusal(pl.ASGD(), mesh["replica"], of=model),
    ]


REFUSALS = (
    "parameter 'conv.weight' is a DTensor, of which this rank holds a part: give attach(mesh=...)",
    "attach(mesh=...): it is a mesh of 2 dimensions; give the dimension of the replicas",
    "attach(mesh=...): 'conv.weight' is distributed over the ranks [0, 1]",
    "attach(mesh=...): the model has no DTensor parameter",
    "attach(ASGD): it needs whole tensors in each worker",
)


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks found: two replicas of two ranks."""
    import_module("torch._dynamo")  # torch imports it with the first optimizer; once here is faster.

    def work(rank: int) -> dict[str, Any]:
        warnings.simplefilter("ignore", pl.NonFiniteGradient)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "part"))
        return {
            "trained": {name: trained(strategy, mesh) for name, strategy in STRATEGIES.items()},
            "mixed": {name: trained(strategy, mesh, mixed=True) for name, strategy in STRATEGIES.items()},
            "skipped": [skipped(strategy, mesh) for strategy in (pl.AllReduceSGD(), pl.PeriodicAveraging(period=4))],
            "refusals": refusals(mesh),
        }

    return forked.run(4, work, tmp_path_factory.mktemp("ranks"))


def test_two_tensor_parallel_replicas_equal_two_whole_workers(on_four_ranks: list[dict[str, Any]], tmp_path: Path):
    def work(rank: int) -> dict[str, Any]:
        return {name: trained(strategy, None) for name, strategy in STRATEGIES.items()}

    whole = forked.run(2, work, tmp_path)
    for rank, found in enumerate(on_four_ranks):
        for name in STRATEGIES:
            for a, b in zip(found["trained"][name], whole[rank // 2][name], strict=True):
                assert a == pytest.approx(b, rel=1e-9, abs=1e-12), (name, rank)
    assert on_four_ranks[0]["trained"]["adaptive-averaging"][-1], "it has synchronised"


def test_so_do_those_of_several_dtypes(on_four_ranks: list[dict[str, Any]], tmp_path: Path):
    def work(rank: int) -> dict[str, Any]:
        return {name: trained(strategy, None, mixed=True) for name, strategy in STRATEGIES.items()}

    whole = forked.run(2, work, tmp_path)
    for rank, found in enumerate(on_four_ranks):
        for name in STRATEGIES:
            for a, b in zip(found["mixed"][name], whole[rank // 2][name], strict=True):
                assert a == pytest.approx(b, rel=1e-5, abs=1e-6), (name, rank)  # float32 rounds in another order
    assert on_four_ranks[0]["mixed"] != on_four_ranks[0]["trained"]


def test_nan_in_one_part_makes_all_ranks_of_the_replica_skip_the_step(on_four_ranks: list[dict[str, Any]]):
    """By AllReduceSGD all replicas skip the step; with parameters of its own, only the replica with the NaN does."""
    assert [found["skipped"] for found in on_four_ranks] == [[1, 0], [1, 0], [1, 1], [1, 1]]


@pytest.mark.parametrize("i", range(len(REFUSALS)))
def test_what_cannot_be_trained_in_parts_is_refused_by_name(on_four_ranks: list[dict[str, Any]], i: int):
    assert REFUSALS[i] in on_four_ranks[0]["refusals"][i]
