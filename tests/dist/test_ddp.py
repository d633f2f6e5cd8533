"""ddp_hook: any codec under plain DistributedDataParallel, on real processes."""

from __future__ import annotations

import copy
import gc
import io
import runpy
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP loads it, which is slow: load it once, before the processes fork.
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
from paceline.session.bucket_state import BucketState, BucketStates
from paceline.session.ddp import DdpHook
from paceline.stripes import stripe_of
from tests.dist import forked
from tests.laws.slots import Slots

pytestmark = pytest.mark.dist

EVERY: dict[str, Codec] = {
    **{codec.__name__: codec() for codec in CODECS if codec.__name__ not in ("Threshold",)},
    "Threshold": Threshold(tau=0.01),
    "PowerSGD": PowerSGD(),
    # No momentum: with it, the sum of all messages would not be the sum of the gradients.
    "DGC": DGC(ratio=0.1, momentum=0.0),
    "DGC in warm-up": DGC(ratio=0.1, momentum=0.0, warmup=8),
    "TopK": TopK(ratio=0.1),
    "AdaptiveThreshold": AdaptiveThreshold(tau=0.01, low=0.05, high=0.2, decay=0.8),
    "PerTensor": PerTensor(pl.codecs.OneBit(bucket=32), raw_below=40),
    "Chunked": Chunked(pl.codecs.OneBit(bucket=32), chunk=96),
}


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """Load the kernels once, before the processes fork."""
    for codec in (*EVERY.values(), pl.codecs.OneBit(bucket=32)):
        codec_state, x = (
            codec.codec_state(Slots(), torch.zeros(4096)),
            torch.randn(4096) / 100,
        )
        codec_state.add(codec_state.encode(x), x)


class Net(nn.Module):
    """Its layers run in another order than they are defined, so DDP changes its buckets after the first backward."""

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
    # The weight of the convolution does not lie row by row in memory.
    return Net().to(memory_format=torch.channels_last)


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
    """The parameters without the buffers, which differ between ranks at the end of a pass."""
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


def sum_over_ranks(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def unsent_by_all(hook: DdpHook, model: DistributedDataParallel) -> Tensor:
    """The part of the mean that all ranks together have not yet sent, by parameter."""
    state, total = hook.state_dict(), []
    for name, p in model.module.named_parameters():
        zero = torch.zeros_like(p, dtype=torch.float64)
        mine = state.get(f"residual.{name}", zero).double() / dist.get_world_size()
        total.append((mine + state.get(f"owner_residual.{name}", zero).double()).reshape(-1))
    return sum_over_ranks(torch.cat(total))


def own_gradient(model: DistributedDataParallel, batch: tuple[Tensor, Tensor]) -> Tensor:
    """This rank's own gradient, without DDP."""
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    F.cross_entropy(alone(batch[0]), batch[1]).backward()
    return gradient_of(alone)


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1).double() for p in model.parameters()])


def all_equal(results: list[Any]) -> bool:
    """Whether no rank failed and all have the same bits."""
    assert all(not (isinstance(r, dict) and "error" in r) for r in results), results
    return all(r == results[0] for r in results)


@pytest.mark.parametrize("ranks", [2, 3])
def test_fp32_equals_ddp_without_a_hook(ranks, tmp_path):
    settings = [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}]

    def work(rank):
        return [
            [trained(rank, codec, **s) for codec in (None, pl.codecs.Fp32(), pl.codecs.OneBit(bucket=64))]
            for s in settings
        ]

    results = forked.run(ranks, work, tmp_path)
    assert all_equal(results)
    for plain, fp32, one_bit in results[0]:
        if ranks == 2:
            assert plain == fp32
        else:  # Thirds round, and the sums have another order.
            assert torch.allclose(torch.tensor(plain), torch.tensor(fp32), rtol=1e-5, atol=1e-6)
        assert one_bit != plain


def of_one_codec(rank: int, codec: Codec) -> dict[str, Any]:
    """Seven steps.  DDP changes its buckets in the second; in the fifth a new DDP resumes from the saved state."""
    warnings.simplefilter("ignore")  # Thresholds may warn that they are too low.
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
        meant = meant + sum_over_ranks(own_gradient(model, batch)) / dist.get_world_size()
        step(model, optimizer, batch)
        said = said + gradient_of(model)
        gaps.append(((said + unsent_by_all(hook, model) - meant).abs().max() / meant.abs().max()).item())
        cuts.append([state.names for state in hook._buckets.states.values()])
    # Resume twice from one state: both runs must be equal, so nothing is missing from the state.
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
    """All codecs in one run of three processes: to start processes takes most of the time."""

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
def test_every_codec_keeps_all_ranks_equal_and_loses_no_residual(name, of_every_codec):
    results = [r[name] for r in of_every_codec]
    assert all("error" not in r for r in results), results
    assert all_equal([r["state"] for r in results])
    for result in results:
        assert result["finite"]
        assert result["replayed"]
        cuts = result["cuts"]
        assert len(cuts[2]) >= 4 and cuts[0] != cuts[2] and cuts[4] != cuts[6], "DDP did not change its buckets twice"
        if EVERY[name].feedback:
            assert max(result["gaps"]) < 1e-5
        else:
            assert result["gaps"][-1] < 1.0


@pytest.mark.parametrize("codec", [pl.codecs.OneBit(bucket=32), pl.codecs.Fp16(), PowerSGD(rank=1)], ids=str)
def test_the_hook_exchanges_buckets_exactly_as_the_collective_does(codec, tmp_path):
    def work(rank):
        model = ddp(net())
        inputs = []
        outputs = []
        hook = pl.ddp_hook(codec)

        def spy(state, bucket):
            x = bucket.buffer()
            inputs.append(
                (x.clone(), [p.shape for p in bucket.parameters()], tuple(id(p) for p in bucket.parameters()))
            )
            return hook(state, bucket).then(lambda future: outputs.append(future.value().clone()) or future.value())

        model.register_comm_hook(None, spy)
        optimizer = sgd(model)
        for batch in batches(rank, 1):  # From here on the buckets stay the same.
            step(model, optimizer, batch)
        hook._buckets.states.clear()
        inputs.clear()
        outputs.clear()
        for batch in batches(rank, 3):
            step(model, optimizer, batch)
        codec_states: dict[tuple[int, ...], Any] = {}
        with Job(Needs(), device=torch.device("cpu"), apart=True) as job:
            for x, shapes, key in inputs:
                if key not in codec_states:
                    codec_states[key] = codec.fitted(shapes).codec_state(Slots(), x, key=rank)
                drive(mean_encoded(job.endpoint, x, SyncVote(1.0, rank=rank), codec_states[key]))
        return [len(codec_states), all(torch.equal(x, y) for (x, _, _), y in zip(inputs, outputs, strict=True))]

    for result in forked.run(2, work, tmp_path):
        assert result[0] >= 4
        assert result[1]


def test_the_first_steps_can_go_without_the_codec_and_a_saved_model_keeps_their_number(tmp_path):
    def work(rank):
        model = nn.Linear(40, 30)
        ddp = DistributedDataParallel(model)
        hook = pl.ddp_hook(pl.codecs.OneBit(bucket=32), ddp, start=2)
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


def test_a_hook_changes_nothing_for_one_rank(tmp_path):
    def work(rank):
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "alone"), 1), rank=0, world_size=1)
        model = net()
        optimizer = sgd(model)
        for batch in batches(rank, 6):
            step(model, optimizer, batch)
        return [trained(rank, pl.codecs.OneBit()), state_of(model)]

    ((hooked, plain),) = forked.run(1, work, tmp_path)
    assert hooked == plain


def test_gradients_accumulated_without_sync_are_exchanged_once(tmp_path):
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
        return [work(rank, codec) for codec in (None, pl.codecs.Fp32(), pl.codecs.OneBit())]

    results = forked.run(2, both, tmp_path)
    for plain, fp32, one_bit in results:
        assert plain[0] == fp32[0]
        assert 0 < one_bit[1] < fp32[1]
    assert all_equal([[p for p, _ in r] for r in results])


class Branches(nn.Module):
    """The caller chooses which parameters a pass reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.taken: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.branches[i](x) for i in self.taken]).sum(0)


def test_unused_parameters_work_as_without_a_hook(tmp_path):
    def work(rank, codec):
        torch.manual_seed(0)
        model = ddp(Branches(), find_unused_parameters=True)
        if codec is not None:
            pl.ddp_hook(codec, model)
        optimizer, generator = sgd(model), torch.Generator().manual_seed(rank)
        for k in range(8):
            # Only rank 0 takes the first branch; every other step takes the second; no step takes the last.
            model.module.taken = (*(() if rank else (0,)), *((1,) if k % 2 else ()), 2)
            optimizer.zero_grad()
            model(torch.randn(8, 16, generator=generator)).square().mean().backward()
            optimizer.step()
        return [state_of(model), [p.grad is None for p in model.parameters()]]

    results = forked.run(
        2,
        lambda rank: [work(rank, codec) for codec in (None, pl.codecs.Fp32(), pl.codecs.OneBit(), PowerSGD(rank=2))],
        tmp_path,
    )
    assert all_equal(results)
    plain, fp32, *encoded = results[0]
    assert plain == fp32
    for state, unused in encoded:
        assert unused == [False] * 6 + [True] * 2
        assert torch.tensor(state).isfinite().all()


@pytest.mark.parametrize("codec", [pl.codecs.OneBit(), TopK(ratio=0.1), PowerSGD(rank=2), pl.codecs.Fp32()], ids=str)
def test_a_nan_of_one_rank_reaches_all_ranks_and_leaves_the_residuals(codec, tmp_path):
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
    assert all_equal([[r["nans"], r["then"]] for r in results])
    for result in results:
        assert "last.bias" in result["nans"] and "conv.weight" not in result["nans"]
        assert result["kept"] and all(result["kept"])
        assert torch.tensor(result["then"]).isfinite().all()


@pytest.mark.parametrize("hosts", [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2], [3]]], ids=str)
def test_owner_residuals_are_sent_once_when_buckets_change(hosts):
    """The first rank of each host sends it, with the weight of all ranks of the host."""
    numel, owners = 4096, sorted(min(h) for h in hosts)

    def bucket(rank: int) -> BucketState:
        return BucketState(pl.codecs.OneBit(bucket=32), ["w"], [torch.zeros(numel)], torch.zeros(numel), rank, {})

    unsent = torch.zeros(numel)
    for place, rank in enumerate(owners):
        before, after = bucket(rank), bucket(rank)
        # Values that lie in one stripe of the new bucket, and that had other owners in the old buckets.
        before.slots["residuals"].owner_residual[numel // 8 : numel // 4] = 1.0 + place
        after.restore({piece.key: piece.values.clone() for piece in before.pieces()}, rank, hosts)
        own = stripe_of(place, numel, len(owners), unit=32)
        residuals = after.slots["residuals"]
        assert not residuals.owner_residual[: own.start].any() and not residuals.owner_residual[own.stop :].any()
        share = next(len(h) for h in hosts if rank in h) / 4
        unsent += residuals.owner_residual + share * residuals.residual
    assert torch.allclose(unsent[numel // 8 : numel // 4], torch.tensor(float(sum(range(1, len(owners) + 1)))))
    assert not unsent[: numel // 8].any() and not unsent[numel // 4 :].any()


def test_residuals_count_as_much_with_another_number_of_ranks():
    """A rank that had a half of every mean, and now has a quarter, must send twice as much, once."""
    weight = torch.nn.Parameter(torch.zeros(64))
    bucket: Any = SimpleNamespace(parameters=lambda: [weight], buffer=lambda: torch.zeros(64))

    def states() -> BucketStates:
        made = BucketStates(pl.codecs.OneBit(bucket=32), "hook")
        made.set_parameters([("w", weight)])
        return made

    def residual(of: BucketStates) -> Any:
        return next(iter(of.states.values())).slots["residuals"]

    two, four = states(), states()
    two.codec_state(bucket, 0, [[0], [1]])
    residual(two).residual[:] = 3.0
    four.load_state_dict(two.state_dict())
    assert four.state_dict()["share"] == 0.5  # Saved again before the first mean, it is the same state.
    four.codec_state(bucket, 0, [[0], [1], [2], [3]])
    assert (residual(four).residual == 6.0).all() and four.state_dict()["share"] == 0.25


def test_a_dead_peer_is_an_error_in_this_and_later_steps(tmp_path):
    def work(rank):
        model, errors = ddp(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), []
        pl.ddp_hook(pl.codecs.OneBit(), model)
        for k in range(4):
            if rank == 1 and k == 2:
                forked.kill_myself()
            try:
                model(torch.ones(2, 8)).sum().backward()
            except RuntimeError as error:
                errors.append(str(error))
        return errors

    errors = forked.run(2, work, tmp_path, timeout_s=30)[0]
    assert len(errors) == 2
    assert "PeerLost: rank 1 is gone" in errors[0]


def test_the_hook_works_for_models_in_bfloat16(tmp_path):
    def work(rank):
        def build():
            return net().to(torch.bfloat16)

        ends, first = [], next(batches(rank, 1))
        for codec in (None, pl.codecs.Fp32(), pl.codecs.OneBit(), PowerSGD(rank=2)):
            model = ddp(build())
            hook = None if codec is None else pl.ddp_hook(codec, model)
            optimizer = sgd(model)
            for x, y in [first] * 30:
                step(model, optimizer, (x.to(torch.bfloat16), y))
            loss = F.cross_entropy(model(first[0].to(torch.bfloat16)).float(), first[1]).item()
            if hook is not None and codec != pl.codecs.Fp32():
                assert hook.state_dict()["residual.last.weight"].dtype == torch.float32
            ends.append([state_of(model.module), loss])
        return ends

    results = forked.run(2, work, tmp_path)
    assert all_equal([[state for state, _ in r] for r in results])
    for plain, *hooked in results:
        assert plain[0] == hooked[0][0]
        assert all(loss < 0.3 for _, loss in (plain, *hooked))


def test_the_hook_works_with_join_for_unequal_data(tmp_path):
    def work(rank):
        ends = []
        for codec in (None, pl.codecs.Fp32(), pl.codecs.OneBit()):
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
    assert all_equal(results)
    assert results[0][0] == results[0][1]


def test_a_state_that_does_not_fit_raises_an_error_and_changes_nothing(tmp_path):
    def work(rank):
        model, errors = ddp(net()), []
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
                errors.append(str(error))
        assert all(torch.equal(value, before[name]) for name, value in hook.state_dict().items())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.load_state_dict(good | {"paceline.rank": torch.tensor(1 - rank)})
        assert "residual.last.weight" not in hook.state_dict()
        assert torch.equal(hook.state_dict()["factors.hidden.weight"], before["factors.hidden.weight"])
        plain = ddp(net())
        pl.ddp_hook(pl.codecs.OneBit(), plain)
        plain.load_state_dict(ddp(net()).state_dict())  # A state of a model without a hook can be loaded.
        return [errors, [str(w.message) for w in caught]]

    for rank, (errors, warned) in enumerate(forked.run(2, work, tmp_path)):
        assert errors == [
            "ddp_hook(PowerSGD(rank=2)): the saved 'residual.last.weight' has the shape (5, 23); "
            "for the parameter 'last.weight' of the shape (5, 24) it must be (5, 24)",
            "ddp_hook(PowerSGD(rank=2)): the saved 'factors.hidden.weight' has the shape (4, 96); "
            "for the parameter 'hidden.weight' of the shape (24, 96) it must be (2, 96)",
            "ddp_hook(PowerSGD(rank=2)): the saved 'residual.first.weight' belongs to no trainable parameter of this "
            "model",
        ]
        assert len(warned) == 1 and f"saved by rank {1 - rank}, but this is rank {rank}" in warned[0]


def test_mistakes_raise_errors_that_name_them(tmp_path):
    def work(rank):
        errors = []

        def expect_error(mistake):
            try:
                mistake()
            except (ValueError, RuntimeError) as error:
                errors.append(str(error))

        expect_error(lambda: pl.ddp_hook((pl.codecs.OneBit(), pl.codecs.OneBit(bucket=64))[rank], ddp(net())))
        expect_error(lambda: pl.ddp_hook(pl.codecs.OneBit(), ddp(net()), start=2 * rank))
        half = dist.new_group([rank], use_local_synchronization=True)
        expect_error(lambda: pl.ddp_hook(pl.codecs.OneBit(), ddp(net(), process_group=half)))
        hook = pl.ddp_hook(pl.codecs.OneBit(), ddp(net()))
        expect_error(lambda: hook.register(ddp(net())))
        expect_error(pl.ddp_hook(pl.codecs.OneBit()).state_dict)
        sparse = ddp(nn.Embedding(9, 4, sparse=True))
        pl.ddp_hook(pl.codecs.OneBit(), sparse)
        expect_error(lambda: sparse(torch.tensor([1, 2])).sum().backward())
        return errors

    hook = "ddp_hook(OneBit(bucket=None, threshold='mean'))"
    for errors in forked.run(2, work, tmp_path):
        assert errors == [
            f"rank 1 has {hook.replace('None', '64')}, but rank 0 has {hook}: all ranks must have the same",
            f"rank 1 has {hook[:-1]}, start=2), but rank 0 has {hook}: all ranks must have the same",
            f"{hook}: the model's process group has 1 of 2 ranks, but the hook needs all of them",
            f"{hook} is registered with another model: make one hook for each model",
            f"{hook} does not know the names of the parameters: make it with the model, ddp_hook(codec, ddp)",
            f"{hook}: a parameter has a sparse gradient, but codecs encode dense gradients; "
            "give Embedding(sparse=False)",
        ]


def test_the_hooks_process_group_has_the_timeout_of_the_hook(tmp_path):
    """torch gives every new group 30 minutes, whatever timeout the default group has."""

    def work(rank):
        hook = pl.ddp_hook(pl.codecs.OneBit(), ddp(net()), timeout_s=77.0)
        return hook._job.endpoint._torch.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    assert forked.run(2, work, tmp_path) == [77.0, 77.0]


def test_a_hook_is_freed_with_its_model_and_a_copy_of_the_model_has_no_hook(tmp_path):
    def work(rank):
        threads = threading.active_count()
        model = ddp(net())
        hook = pl.ddp_hook(pl.codecs.OneBit(), model)
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
    pl.ddp_hook(pl.codecs.OneBit(), ddp)
    for _ in range(3):
        ddp(torch.randn(4, 40)).sum().backward()
    if sys.argv[3] == "destroy":
        dist.destroy_process_group()
    return ddp

kept = main(int(sys.argv[1]))
"""


@pytest.mark.parametrize("end", ["destroy", "leave"])
def test_processes_end_without_output(end, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    start = [sys.executable, "-X", "faulthandler", str(script)]
    arguments, outs = [str(tmp_path / "store"), end], [tmp_path / f"out-{rank}" for rank in range(2)]
    # How an interpreter ends is seen in a fresh one.  Its peer is forked, which takes a tenth of the time.
    with outs[0].open("w") as out:
        fresh = subprocess.Popen([*start, "0", *arguments], stdout=out, stderr=out)
    peer = forked.start(
        lambda: runpy.run_path(str(script), run_name="__main__"),
        [str(script), "1", *arguments],
        folder=tmp_path,
        out=outs[1],
        err=outs[1],
    )
    try:
        code = fresh.wait(60)
        peer.join(60)
        assert [(code, outs[0].read_text()), (peer.exitcode, outs[1].read_text())] == [(0, "")] * 2
    finally:
        fresh.kill()
        fresh.wait()
        peer.kill()
        peer.join()
