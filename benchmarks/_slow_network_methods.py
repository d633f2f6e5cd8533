"""The methods of `benchmarks.slow_network`: ways to train one model on several hosts. `make` builds each on a
worker."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.data import fashion_mnist
from paceline.session.minibatch import UnsharedLoader

BATCH = 64  # Samples of one worker and step.
RATE = 0.02
WIDTHS = (784, 2048, 2048, 1064, 10)
LIMIT, DDP = "no communication", "DDP"

Step = Callable[[], object]


def perceptron() -> nn.Module:
    """7,994,818 parameters."""
    *hidden, last = [nn.Linear(n, m) for n, m in pairwise(WIDTHS)]
    return nn.Sequential(*(layer for linear in hidden for layer in (linear, nn.ReLU())), last)


def data() -> tuple[Tensor, Tensor]:
    """Fashion-MNIST if it is installed, otherwise ten clouds of points. How fast replicas diverge depends on what they
    learn."""
    try:
        found = fashion_mnist.load()
    except fashion_mnist.NoData:
        generator = torch.Generator().manual_seed(1)
        labels = torch.randint(WIDTHS[-1], (10_000,), generator=generator)
        centres = torch.randn(WIDTHS[-1], WIDTHS[0], generator=generator)
        return centres[labels] + 4 * torch.randn(len(labels), WIDTHS[0], generator=generator), labels
    return found.images.view(-1, WIDTHS[0]).float().div_(255).sub_(0.286).div_(0.353), found.labels.long()


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Minibatches of one worker's own."""
    inputs, labels = data()
    generator = torch.Generator().manual_seed(2 + rank)
    while True:
        chosen = torch.randint(len(labels), (BATCH,), generator=generator)
        yield inputs[chosen], labels[chosen]


@dataclass(frozen=True)
class Place:
    """The place of one worker: the address of its host, and that of the host of rank 0."""

    rank: int
    workers: int
    address: str
    master: str

    def from_first(self, make: Callable[[], Any]) -> Any:
        """The object of rank 0, on every rank."""
        made = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(made)
        return made[0]


@dataclass
class Trainee:
    """The module to call, the function that then takes the step, and the session if the method is paceline's."""

    model: nn.Module
    step: Step
    session: Any = None


@dataclass(frozen=True)
class Method:
    """`make` puts a model and its optimizer under the method. A turn has whole periods. It follows `lead` steps that
    are not timed, so that buffers and connections exist and no exchange is in flight."""

    name: str
    make: Callable[[Place, nn.Module, torch.optim.Optimizer], Trainee]
    period: int = 1
    lead: int = 4
    needs: str = "torch"  # The package that must be installed for it.
    apart: bool = False  # It runs in processes without the other methods.


def alone(place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainee:
    return Trainee(model, optimizer.step)


def ddp(place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainee:
    return Trainee(DistributedDataParallel(model), optimizer.step)


def ddp_fp16(place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainee:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    return Trainee(wrapped, optimizer.step)


def ddp_with_our_hook(codec: pl.codecs.Codec) -> Callable[[Place, nn.Module, torch.optim.Optimizer], Trainee]:
    def make(place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainee:
        wrapped = DistributedDataParallel(model)
        pl.ddp_hook(codec, wrapped)
        return Trainee(wrapped, optimizer.step)

    return make


def ddp_power_sgd(place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainee:
    """It uses one bucket: with several, its all-reduces mix on gloo, and the process aborts."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1000)
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Trainee(wrapped, optimizer.step)


def ddp_post_local(period: int) -> Callable[[Place, nn.Module, torch.optim.Optimizer], Trainee]:
    def make(place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainee:
        wrapped = DistributedDataParallel(model)
        # By default it finds the ranks of one host by counting GPUs.
        subgroup, _ = dist.new_subgroups(group_size=1)
        state = post_localSGD_hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=0)
        wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        return Trainee(
            wrapped, PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=period, warmup_steps=0)).step
        )

    return make


def ours(strategy: pl.Strategy) -> Callable[[Place, nn.Module, torch.optim.Optimizer], Trainee]:
    def make(place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainee:
        warnings.simplefilter("ignore", UnsharedLoader)  # Only time is measured: all workers may read the same data.
        session = pl.attach(model, optimizer, strategy)
        return Trainee(model, session.step, session)

    return make


def torchft_manager(place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Every worker is its own replica group with its own store. The lighthouse runs at rank 0."""
    from torchft import Manager, ProcessGroupGloo  # pyright: ignore
    from torchft.coordination import LighthouseServer  # pyright: ignore

    logging.getLogger("torchft").setLevel(logging.ERROR)

    def lighthouse() -> str:
        server = LighthouseServer(bind="[::]:0", min_replicas=place.workers, join_timeout_ms=10_000)
        KEPT.append(server)
        return f"http://{place.master}:{server.address().rsplit(':', 1)[1]}"

    store = dist.TCPStore(place.address, 0, is_master=True, wait_for_workers=False)
    KEPT.append(store)
    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=120)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=place.workers,
        use_async_quorum=False,
        init_sync=False,
        timeout=timedelta(seconds=120),
        quorum_timeout=timedelta(seconds=120),
        rank=0,
        world_size=1,
        store_addr=place.address,
        store_port=store.port,
        lighthouse_addr=place.from_first(lighthouse),
        replica_id=f"worker_{place.rank}",
        hostname=place.address,
    )


KEPT: list[Any] = []  # Servers that end when no object refers to them.


def torchft_local_sgd(period: int) -> Callable[[Place, nn.Module, torch.optim.Optimizer], Trainee]:
    def make(place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainee:
        from torchft.local_sgd import LocalSGD  # pyright: ignore

        LocalSGD(torchft_manager(place, model, optimizer), model, optimizer, sync_every=period).__enter__()
        return Trainee(model, optimizer.step)

    return make


def torchft_diloco(period: int) -> Callable[[Place, nn.Module, torch.optim.Optimizer], Trainee]:
    def make(place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainee:
        from torchft.local_sgd import DiLoCo  # pyright: ignore

        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        manager = torchft_manager(place, model, optimizer)
        DiLoCo(
            manager,
            [model],
            optimizer,
            outer,
            sync_every=period,
            pin_memory=False,
            use_bucketization=True,
            bucket_cap_mb=25,
        ).__enter__()
        return Trainee(model, optimizer.step)

    return make


def hivemind_local(period: int) -> Callable[[Place, nn.Module, torch.optim.Optimizer], Trainee]:
    """Local updates. The states are averaged when all workers together have seen the samples of `period` steps."""

    def make(place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainee:
        import hivemind  # pyright: ignore

        def node(peers: Any) -> Any:
            return hivemind.DHT(host_maddrs=[f"/ip4/{place.address}/tcp/0"], initial_peers=peers, start=True)

        first = place.from_first(lambda: [str(a) for a in KEPT.append(node(None)) or KEPT[-1].get_visible_maddrs()])
        dht = KEPT[-1] if place.rank == 0 else node(first)
        wrapped = hivemind.Optimizer(
            dht=dht,
            run_id="slow-network",
            target_batch_size=period * place.workers * BATCH,
            batch_size_per_step=BATCH,
            optimizer=optimizer,
            use_local_updates=True,
            matchmaking_time=2.0,
            averaging_timeout=60.0,
            average_opt_statistics=(),
        )
        return Trainee(model, wrapped.step)

    return make


# For adaptive averaging: the spread is sampled after momentum has built up, and the period may change after 88 steps.
SAMPLED = {"period": 4, "warmup": 24, "sampling": 88}

METHODS = [
    Method(DDP, ddp),
    Method("DDP, fp16 hook", ddp_fp16),
    Method("DDP, PowerSGD hook, rank 4", ddp_power_sgd),
    Method("DDP, post-local SGD, period 8", ddp_post_local(8), period=8, lead=17),
    Method("torchft LocalSGD, period 64", torchft_local_sgd(64), period=64, lead=64, needs="torchft"),
    Method("torchft DiLoCo, period 64", torchft_diloco(64), period=64, lead=64, needs="torchft"),
    Method("hivemind, local updates, period 64", hivemind_local(64), period=64, lead=64, needs="hivemind", apart=True),
    Method("AllReduceSGD()", ours(pl.AllReduceSGD())),
    Method("AllReduceSGD(codec=Fp16())", ours(pl.AllReduceSGD(codec=pl.codecs.Fp16()))),
    Method("ddp_hook(Fp16())", ddp_with_our_hook(pl.codecs.Fp16())),
    Method("AllReduceSGD(codec=OneBit())", ours(pl.AllReduceSGD(codec=pl.codecs.OneBit()))),
    Method("AllReduceSGD(codec=PowerSGD(rank=4))", ours(pl.AllReduceSGD(codec=pl.codecs.PowerSGD(rank=4)))),
    Method("PeriodicAveraging(period=8)", ours(pl.PeriodicAveraging(period=8)), period=8, lead=16),
    Method("PeriodicAveraging(period=8, delay=4)", ours(pl.PeriodicAveraging(period=8, delay=4)), period=8, lead=20),
    # The method chooses its periods, so its turn has as many steps as those of the long ones.
    Method("AdaptiveAveraging()", ours(pl.AdaptiveAveraging(**SAMPLED)), period=64, lead=128),
    Method(
        "AdaptiveAveraging(codec=OneBit())",
        ours(pl.AdaptiveAveraging(**SAMPLED, codec=pl.codecs.OneBit())),
        period=64,
        lead=128,
    ),
    Method(
        "AdaptiveAveraging(codec=OneBit(), delay=2)",
        ours(pl.AdaptiveAveraging(**SAMPLED, codec=pl.codecs.OneBit(), delay=2)),
        period=64,
        lead=128,
    ),
    Method("BlockMomentum(period=64)", ours(pl.BlockMomentum(period=64)), period=64, lead=64),
    Method(
        "BlockMomentum(period=64, codec=OneBit())",
        ours(pl.BlockMomentum(period=64, codec=pl.codecs.OneBit())),
        period=64,
        lead=64,
    ),
    Method("DiLoCo(period=64)", ours(pl.DiLoCo(period=64)), period=64, lead=64),
    Method(
        "DiLoCo(period=64, fragments=4, delay=8)", ours(pl.DiLoCo(period=64, fragments=4, delay=8)), period=64, lead=72
    ),
]
