"""ddp_hook: any codec under plain DistributedDataParallel, on real processes."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP loads it, which takes its time: before the processes fork, it is done once.
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.codecs import CODECS, Codec
from paceline.codecs.combine import Chunked, PerTensor
from paceline.codecs.dgc import DGC
from paceline.codecs.power_sgd import PowerSGD
from paceline.codecs.threshold import AdaptiveThreshold, Threshold
from paceline.codecs.top_k import TopK
from paceline.collectives import SyncVote, mean_encoded
from paceline.engines.job import Job
from paceline.needs import Needs
from paceline.op import drive
from paceline.session.ddp import BucketState, DdpHook
from paceline.stripes import stripe_of
from tests.dist import forked

pytestmark = pytest.mark.dist

EVERY: dict[str, Codec] = {
    **{codec.__name__: codec() for codec in CODECS if codec.__name__ not in ("Threshold",)},
    "Threshold": Threshold(tau=0.01),
    "PowerSGD": PowerSGD(),
    # Momentum is no gradient: with it what is said is not what was meant.
    "DGC": DGC(ratio=0.1, momentum=0.0),
    "DGC in warm-up": DGC(ratio=0.1, momentum=0.0, warmup=8),
    "TopK": TopK(ratio=0.1),
    "AdaptiveThreshold": AdaptiveThreshold(tau=0.01, low=0.05, high=0.2, decay=0.8),
    "PerTensor": PerTensor(pl.OneBit(bucket=32), raw_below=40),
    "Chunked": Chunked(pl.OneBit(bucket=32), chunk=96),
}


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """Kernels that are loaded here are not loaded by every process again."""
    for codec in (*EVERY.values(), pl.OneBit(bucket=32)):
        codec_state, x = (
            codec.codec_state(lambda **initial: pl.Memory(**initial), torch.zeros(4096)),
            torch.randn(4096) / 100,
        )
        codec_state.add(codec_state.encode(x), x)


class Net(nn.Module):
    """Its layers are not defined in the order in which they run, so that DDP cuts its buckets anew after the first backward."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(24, 5)
        self.conv = nn.Conv2d(2, 6, 3, padding=1)
        self.hidden = nn.Linear(6 * 16, 24)
        self.middle = nn.Linear(24, 24)
        self.norm = nn.BatchNorm2d(6)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        x = torch.tanh(self.middle(torch.tanh(self.hidden(x.flatten(1)))))
        return self.last(x) * self.scale


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().to(
        memory_format=torch.channels_last
    )  # Its convolution's weight lies in memory in another order than row by row.


def ddp(model: nn.Module, **settings: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.00007, **settings)  # 73 bytes


def batches(rank: int, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(n):
        yield torch.randn(8, 2, 4, 4, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def state_of(model: nn.Module) -> list[float]:
    """Parameters alone: buffers are rank 0's at the beginning of a pass, and each rank's own at its end."""
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()]).tolist()


def trained(
    rank: int, codec: Codec | None, steps: int = 6, build: Callable[[], nn.Module] = net, **settings: Any
) -> list[float]:
    model = ddp(build(), **settings)
    if codec is not None:
        pl.ddp_hook(codec, model)
    optimizer = sgd(model)
    for batch in batches(rank, steps):
        step(model, optimizer, batch)
    return state_of(model)


def everyones(x: Tensor) -> Tensor:
    """The sum over the ranks."""
    x = x.clone()
    dist.all_reduce(x)
    return x


def owed(hook: DdpHook, model: DistributedDataParallel) -> Tensor:
    """What all ranks together have not yet said of the mean, by parameter: each its own part, and owners their stripes."""
    state, total = hook.state_dict(), []
    for name, p in model.module.named_parameters():
        zero = torch.zeros_like(p, dtype=torch.float64)
        mine = state.get(f"residual.{name}", zero).double() / dist.get_world_size()
        total.append((mine + state.get(f"owner_residual.{name}", zero).double()).reshape(-1))
    return everyones(torch.cat(total))


def own_gradient(model: DistributedDataParallel, batch: tuple[Tensor, Tensor]) -> Tensor:
    """This rank's gradient, by a model that is no DDP."""
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    F.cross_entropy(alone(batch[0]), batch[1]).backward()
    return gradient_of(alone)


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1).double() for p in model.parameters()])


def alike(results: list[Any]) -> bool:
    """Whether all ranks came to the same bits, and to an end at all."""
    assert all(not (isinstance(r, dict) and "error" in r) for r in results), results
    return all(r == results[0] for r in results)


@pytest.mark.parametrize("ranks", [2, 3])
def test_fp32_equals_ddp_without_a_hook(ranks, tmp_path):
    settings = [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}]

    def work(rank):
        return [[trained(rank, codec, **s) for codec in (None, pl.Fp32(), pl.OneBit(bucket=64))] for s in settings]

    results = forked.run(ranks, work, tmp_path)
    assert alike(results)
    for plain, fp32, one_bit in results[0]:
        if ranks == 2:
            assert plain == fp32
        else:  # Thirds round, and sums are taken in another order.
            assert torch.allclose(torch.tensor(plain), torch.tensor(fp32), rtol=1e-5, atol=1e-6)
        assert one_bit != plain


def of_one_codec(rank: int, codec: Codec) -> dict[str, Any]:
    """Six steps, of which the second cuts the buckets anew; then a new DDP that goes on from what the first one saved."""
    warnings.simplefilter("ignore")  # Thresholds may say that they are too low.
    model = ddp(net())
    hook = pl.ddp_hook(codec, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    meant = said = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    gaps, cuts = [], []
    for k, batch in enumerate(batches(rank, 7)):
        if k == 4:
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            model = ddp(net())
            hook = pl.ddp_hook(codec, model)
            model.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        meant = meant + everyones(own_gradient(model, batch)) / dist.get_world_size()
        step(model, optimizer, batch)
        said = said + gradient_of(model)
        gaps.append(((said + owed(hook, model) - meant).abs().max() / meant.abs().max()).item())
        cuts.append([r.names for r in hook._remains.values()])
    # Back to a state, and again: nothing that matters may be missing from it.
    saved, ends = copy.deepcopy(model.state_dict()), []
    for _ in range(2):
        model.load_state_dict(saved)
        for batch in batches(rank, 3):
            step(model, optimizer, batch)
        ends.append(state_of(model))
    finite = all(v.isfinite().all() for v in hook.state_dict().values())
    return {"gaps": gaps, "cuts": cuts, "state": state_of(model), "replayed": ends[0] == ends[1], "finite": finite}


@pytest.fixture(scope="module")
def of_every_codec(tmp_path_factory):
    """In one run of three processes, since starting them takes most of the time."""

    def work(rank):
        results = {}
        for name, codec in EVERY.items():
            try:
                results[name] = of_one_codec(rank, codec)
            except Exception as error:
                traceback.print_exc()
                results[name] = {"error": f"{type(error).__name__}: {error}"}
        return results

    return forked.run(3, work, tmp_path_factory.mktemp("ddp"), timeout_s=100)


@pytest.mark.parametrize("name", EVERY)
def test_every_codec_keeps_all_ranks_alike_and_what_it_did_not_say(name, of_every_codec):
    results = [r[name] for r in of_every_codec]
    assert all("error" not in r for r in results), results
    assert alike([r["state"] for r in results])
    for result in results:
        assert result["finite"]
        assert result["replayed"]
        cuts = result["cuts"]
        assert len(cuts[2]) >= 4 and cuts[0] != cuts[2] and cuts[4] != cuts[6], "the buckets were to be cut anew, twice"
        if EVERY[name].feedback:
            assert max(result["gaps"]) < 1e-5
        else:
            assert result["gaps"][-1] < 1.0


@pytest.mark.parametrize("codec", [pl.OneBit(bucket=32), pl.Fp16(), PowerSGD(rank=1)], ids=str)
def test_buckets_are_exchanged_as_by_the_collective_itself(codec, tmp_path):
    def work(rank):
        model, given, told = ddp(net()), [], []
        hook = pl.ddp_hook(codec)

        def spy(state, bucket):
            x = bucket.buffer()
            given.append((x.clone(), [p.shape for p in bucket.parameters()], tuple(id(p) for p in bucket.parameters())))
            return hook(state, bucket).then(lambda future: told.append(future.value().clone()) or future.value())

        model.register_comm_hook(None, spy)
        optimizer = sgd(model)
        for batch in batches(rank, 1):  # Cuts the buckets that the next steps have.
            step(model, optimizer, batch)
        hook._remains.clear()
        given.clear()
        told.clear()
        for batch in batches(rank, 3):
            step(model, optimizer, batch)
        links: dict[tuple[int, ...], Any] = {}
        with Job(Needs(), device=torch.device("cpu"), apart=True) as job:
            for x, shapes, key in given:
                if key not in links:
                    fresh = lambda **initial: pl.Memory(**{n: v.clone() for n, v in initial.items()})  # noqa: E731
                    links[key] = codec.fitted(shapes).codec_state(fresh, x, key=rank)
                drive(mean_encoded(job.endpoint, x, SyncVote(1.0, rank=rank), links[key]))
        return [len(links), all(torch.equal(x, y) for (x, _, _), y in zip(given, told, strict=True))]

    for result in forked.run(2, work, tmp_path):
        assert result[0] >= 4
        assert result[1]


def test_the_first_steps_may_go_without_the_codec_and_a_saved_model_knows_how_many_were(tmp_path):
    def work(rank):
        model = nn.Linear(40, 30)
        ddp = DistributedDataParallel(model)
        hook = pl.ddp_hook(pl.OneBit(bucket=32), ddp, start=2)
        distinct = []
        for step in range(4):
            ddp.zero_grad()
            ddp(torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + rank))).square().sum().backward()
            distinct.append(len(model.weight.grad.unique()))
            if step == 0:
                ddp.load_state_dict(ddp.state_dict())
        return [hook.steps, distinct]

    for steps, distinct in forked.run(2, work, tmp_path):
        assert steps == 4
        # A bucket of one bit has two values, and the mean of a stripe two more.
        assert min(distinct[:2]) > 1000 and max(distinct[2:]) < 200


def test_a_world_of_one_is_left_alone(tmp_path):
    def work(rank):
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "alone"), 1), rank=0, world_size=1)
        model = net()
        optimizer = sgd(model)
        for batch in batches(rank, 6):
            step(model, optimizer, batch)
        return [trained(rank, pl.OneBit()), state_of(model)]

    ((hooked, plain),) = forked.run(1, work, tmp_path)
    assert hooked == plain


def test_gradients_gathered_without_sync_are_exchanged_once(tmp_path):
    def work(rank, codec):
        model = ddp(net())
        hook = pl.ddp_hook(codec, model) if codec is not None else None
        optimizer = sgd(model)
        for i, (x, y) in enumerate(batches(rank, 9)):
            if i % 3 < 2:
                with model.no_sync():
                    F.cross_entropy(model(x), y).backward()
                continue
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [state_of(model.module), 0 if hook is None else hook.trace.bytes_sent(rank)]

    def both(rank):
        return [work(rank, codec) for codec in (None, pl.Fp32(), pl.OneBit())]

    results = forked.run(2, both, tmp_path)
    for plain, fp32, one_bit in results:
        assert plain[0] == fp32[0]
        assert 0 < one_bit[1] < fp32[1]
    assert alike([[p for p, _ in r] for r in results])


class Branches(nn.Module):
    """Which parameters a pass reaches is the caller's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.taken: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.branches[i](x) for i in self.taken]).sum(0)


def test_parameters_that_get_no_gradient(tmp_path):
    def work(rank, codec):
        torch.manual_seed(0)
        model = ddp(Branches(), find_unused_parameters=True)
        if codec is not None:
            pl.ddp_hook(codec, model)
        optimizer, generator = sgd(model), torch.Generator().manual_seed(rank)
        for k in range(8):
            # The first branch is taken by rank 0 alone, the second now and then, the third always and the last never.
            model.module.taken = (*(() if rank else (0,)), *((1,) if k % 2 else ()), 2)
            optimizer.zero_grad()
            model(torch.randn(8, 16, generator=generator)).square().mean().backward()
            optimizer.step()
        return [state_of(model), [p.grad is None for p in model.parameters()]]

    results = forked.run(
        2, lambda rank: [work(rank, codec) for codec in (None, pl.Fp32(), pl.OneBit(), PowerSGD(rank=2))], tmp_path
    )
    assert alike(results)
    plain, fp32, *encoded = results[0]
    assert plain == fp32
    for state, unused in encoded:
        assert unused == [False] * 6 + [True] * 2
        assert torch.tensor(state).isfinite().all()


@pytest.mark.parametrize("codec", [pl.OneBit(), TopK(ratio=0.1), PowerSGD(rank=2), pl.Fp32()], ids=str)
def test_a_nan_of_one_rank_is_everybodys_and_what_was_not_said_survives_it(codec, tmp_path):
    def work(rank):
        model = ddp(net())
        hook = pl.ddp_hook(codec, model)
        x, y = next(batches(rank, 1))
        for _ in range(3):
            F.cross_entropy(model(x), y).backward()
        before = {n: v.clone() for n, v in hook.state_dict().items()}
        loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        (loss + model.module.last.bias.sum() * torch.nan if rank == 1 else loss).backward()
        nans = [n for n, p in model.module.named_parameters() if p.grad.isnan().any()]
        after = hook.state_dict()
        kept = [bool(torch.allclose(before[n], after[n], atol=1e-6)) for n in after if n.partition(".")[2] in nans]
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        return {"nans": nans, "kept": kept, "then": gradient_of(model).tolist()}

    results = forked.run(2, work, tmp_path)
    assert alike([[r["nans"], r["then"]] for r in results])
    for result in results:
        assert "last.bias" in result["nans"] and "conv.weight" not in result["nans"]
        assert result["kept"] and all(result["kept"])
        assert torch.tensor(result["then"]).isfinite().all()


@pytest.mark.parametrize("hosts", [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2], [3]]], ids=str)
def test_what_is_owed_when_buckets_are_cut_anew_is_said_once(hosts):
    """By whoever speaks for a host, whose word counts as much as the host has ranks."""
    numel, speakers = 4096, sorted(min(h) for h in hosts)

    def remains(rank: int) -> BucketState:
        return BucketState(
            pl.OneBit(bucket=32),
            ["w"],
            [torch.zeros(numel)],
            torch.zeros(numel),
            rank,
            torch.zeros(1, dtype=torch.int64),
        )

    owed = torch.zeros(numel)
    for place, rank in enumerate(speakers):
        before, after = remains(rank), remains(rank)
        # One stripe as these buckets are cut, and values of another as former ones were.
        before.memory["owner_residual"][numel // 8 : numel // 4] = 1.0 + place
        after.take({name: piece.clone() for name, piece in before.pieces()}, rank, hosts)
        own = stripe_of(place, numel, len(speakers), unit=32)
        assert (
            not after.memory["owner_residual"][: own.start].any()
            and not after.memory["owner_residual"][own.stop :].any()
        )
        share = next(len(h) for h in hosts if rank in h) / 4
        owed += after.memory["owner_residual"] + share * after.memory["residual"]
    assert torch.allclose(owed[numel // 8 : numel // 4], torch.tensor(float(sum(range(1, len(speakers) + 1)))))
    assert not owed[: numel // 8].any() and not owed[numel // 4 :].any()


def test_a_lost_peer_is_an_error_now_and_later(tmp_path):
    def work(rank):
        model, told = ddp(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), []
        pl.ddp_hook(pl.OneBit(), model)
        for k in range(4):
            if rank == 1 and k == 2:
                forked.kill_myself()
            try:
                model(torch.ones(2, 8)).sum().backward()
            except RuntimeError as error:
                told.append(str(error))
        return told

    told = forked.run(2, work, tmp_path, timeout_s=30)[0]
    assert len(told) == 2
    assert "PeerLost: rank 1 is gone" in told[0]


def test_models_in_bfloat16(tmp_path):
    def work(rank):
        def build():
            return net().to(torch.bfloat16)

        ends, first = [], next(batches(rank, 1))
        for codec in (None, pl.Fp32(), pl.OneBit(), PowerSGD(rank=2)):
            model = ddp(build())
            hook = None if codec is None else pl.ddp_hook(codec, model)
            optimizer = sgd(model)
            for x, y in [first] * 30:
                step(model, optimizer, (x.to(torch.bfloat16), y))
            loss = F.cross_entropy(model(first[0].to(torch.bfloat16)).float(), first[1]).item()
            if hook is not None and codec != pl.Fp32():
                assert hook.state_dict()["residual.last.weight"].dtype == torch.float32
            ends.append([state_of(model.module), loss])
        return ends

    results = forked.run(2, work, tmp_path)
    assert alike([[state for state, _ in r] for r in results])
    for plain, *hooked in results:
        assert plain[0] == hooked[0][0]
        assert all(loss < 0.3 for _, loss in (plain, *hooked))


def test_joined_ranks_of_unequal_data(tmp_path):
    def work(rank):
        ends = []
        for codec in (None, pl.Fp32(), pl.OneBit()):
            model = ddp(net())
            if codec is not None:
                pl.ddp_hook(codec, model)
            optimizer = sgd(model)
            with model.join():
                for batch in batches(rank, 6 + 3 * rank):
                    step(model, optimizer, batch)
            ends.append(state_of(model))
        return ends

    results = forked.run(2, work, tmp_path)
    assert alike(results)
    assert results[0][0] == results[0][1]


def test_what_does_not_fit_a_state_is_named(tmp_path):
    def work(rank):
        model, told = ddp(net()), []
        hook = pl.ddp_hook(PowerSGD(rank=2), model)
        optimizer = sgd(model)
        for batch in batches(rank, 2):
            step(model, optimizer, batch)
        good = model.state_dict()
        before = hook.state_dict()
        bad = {
            "paceline.residual.last.weight": torch.zeros(5, 23),
            "paceline.factors.hidden.weight": torch.zeros(4, 96),
            "paceline.residual.first.weight": torch.zeros(3),
        }
        for name, value in bad.items():
            try:
                model.load_state_dict(good | {name: value})
            except ValueError as error:
                told.append(str(error))
        assert all(torch.equal(value, before[name]) for name, value in hook.state_dict().items())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.load_state_dict(good | {"paceline.rank": torch.tensor(1 - rank)})
        assert "residual.last.weight" not in hook.state_dict()
        assert torch.equal(hook.state_dict()["factors.hidden.weight"], before["factors.hidden.weight"])
        plain = ddp(net())
        pl.ddp_hook(pl.OneBit(), plain)
        plain.load_state_dict(ddp(net()).state_dict())  # A state without a hook's is no mistake.
        return [told, [str(w.message) for w in caught]]

    for rank, (told, warned) in enumerate(forked.run(2, work, tmp_path)):
        assert told == [
            "ddp_hook(PowerSGD(rank=2)): the saved 'residual.last.weight' has the shape (5, 23), "
            "for parameter 'last.weight' of the shape (5, 24) it must have (5, 24)",
            "ddp_hook(PowerSGD(rank=2)): the saved 'factors.hidden.weight' has the shape (4, 96), "
            "for parameter 'hidden.weight' of the shape (24, 96) it must have (2, 96)",
            "ddp_hook(PowerSGD(rank=2)): the saved 'residual.first.weight' belongs to no parameter of this model that is trained",
        ]
        assert len(warned) == 1 and f"saved by rank {1 - rank}, and this is rank {rank}" in warned[0]


def test_mistakes_are_named(tmp_path):
    def work(rank):
        told = []

        def tell(mistake):
            try:
                mistake()
            except (ValueError, RuntimeError) as error:
                told.append(str(error))

        tell(lambda: pl.ddp_hook((pl.OneBit(), pl.OneBit(bucket=64))[rank], ddp(net())))
        tell(lambda: pl.ddp_hook(pl.OneBit(), ddp(net()), start=2 * rank))
        half = dist.new_group([rank], use_local_synchronization=True)
        tell(lambda: pl.ddp_hook(pl.OneBit(), ddp(net(), process_group=half)))
        hook = pl.ddp_hook(pl.OneBit(), ddp(net()))
        tell(lambda: hook.register(ddp(net())))
        tell(pl.ddp_hook(pl.OneBit()).state_dict)
        sparse = ddp(nn.Embedding(9, 4, sparse=True))
        pl.ddp_hook(pl.OneBit(), sparse)
        tell(lambda: sparse(torch.tensor([1, 2])).sum().backward())
        return told

    for told in forked.run(2, work, tmp_path):
        assert told == [
            "rank 1 has ddp_hook(OneBit(bucket=64)), but rank 0 has ddp_hook(OneBit(bucket=512)): all must have the same",
            "rank 1 has ddp_hook(OneBit(bucket=512), start=2), but rank 0 has ddp_hook(OneBit(bucket=512)): all must have the same",
            "ddp_hook(OneBit(bucket=512)): the model's process group has 1 of 2 ranks; the hook works among all of them",
            "ddp_hook(OneBit(bucket=512)) serves another model already: make one for each",
            "ddp_hook(OneBit(bucket=512)) knows no parameters' names: make it with the model, ddp_hook(codec, ddp)",
            "ddp_hook(OneBit(bucket=512)): a parameter has a sparse gradient; codecs encode dense ones (Embedding(sparse=False))",
        ]


def test_a_hooks_group_waits_as_long_as_the_hook(tmp_path):
    """torch gives every new group the same half an hour, whatever the first one has."""

    def work(rank):
        hook = pl.ddp_hook(pl.OneBit(), ddp(net()), timeout_s=77.0)
        return hook._job.endpoint._process_group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    assert forked.run(2, work, tmp_path) == [77.0, 77.0]


def test_a_hook_ends_with_its_model_and_a_copy_of_the_model_has_none(tmp_path):
    def work(rank):
        threads = threading.active_count()
        model = ddp(net())
        hook = pl.ddp_hook(pl.OneBit(), model)
        optimizer = sgd(model)
        for batch in batches(rank, 3):
            step(model, optimizer, batch)
        mean = torch.optim.swa_utils.AveragedModel(model)
        mean.update_parameters(model)
        copied = [key for key in mean.state_dict() if "paceline" in key]
        seen, during = weakref.ref(hook), threading.active_count()
        del model, hook, optimizer, mean
        gc.collect()
        return [copied, during - threads, seen() is None, threading.active_count() - threads]

    assert forked.run(2, work, tmp_path) == [[[], 1, True, 0]] * 2


SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch import nn
import paceline as pl

def main(rank):
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)), bucket_cap_mb=0.001)
    pl.ddp_hook(pl.OneBit(), ddp)
    for _ in range(3):
        ddp(torch.randn(4, 40)).sum().backward()
    if sys.argv[3] == "destroy":
        dist.destroy_process_group()
    return ddp

kept = main(int(sys.argv[1]))
"""


@pytest.mark.parametrize("end", ["destroy", "leave"])
def test_processes_end_by_themselves_and_in_silence(end, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    start = [sys.executable, "-X", "faulthandler", str(script)]
    ranks = [
        subprocess.Popen(
            [*start, str(rank), str(tmp_path / "store"), end],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            said, _ = process.communicate(timeout=60)
            assert (process.returncode, said) == (0, "")
    finally:
        for process in ranks:
            process.kill()
