"""The mean by low-rank factors: against the paper in numpy, what it conserves, and when there is no mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.codecs import ErrorFeedback, OneBit
from paceline.codecs.power_sgd import FactorState, PowerSGD, first_guess
from paceline.collectives import SyncVote
from paceline.collectives.low_rank import mean_by_factors
from tests.laws.ranks import Ranks, on_shared_memory, on_simulator
from tests.laws.slots import Slots
from tests.laws.tasks import numbers, same

SHAPES = [torch.Size(s) for s in [(20, 30), (30,), (12, 3, 4), (3, 5), (0, 4), (7,), (40, 25)]]
NUMEL = sum(s.numel() for s in SHAPES)
WEIGHTS = [3.0, 5.0, 0.0, 8.0]
RANK = 2

SIMULATOR = Ranks(on_simulator, is_ordered=True, is_real=False)
SHARED_MEMORY = Ranks(on_shared_memory, is_ordered=True)
every_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)


def factor_state(dtype: torch.dtype = torch.float64, slots: Slots | None = None) -> FactorState:
    return PowerSGD(rank=RANK).fitted(SHAPES).codec_state(slots or Slots(), torch.zeros(NUMEL, dtype=dtype))


def gradient(rank: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return numbers(NUMEL, seed=100 * step + rank).to(dtype)


async def trained(
    endpoint: Any, steps: Sequence[int], codec_state: FactorState, weights: Sequence[float] = WEIGHTS
) -> list[Tensor]:
    """The means of some steps' gradients."""
    means: list[Tensor] = []
    for t in steps:
        x = gradient(endpoint.rank, t, codec_state.residual.dtype)
        await mean_by_factors(endpoint, x, SyncVote(weights[endpoint.rank], rank=endpoint.rank), codec_state)
        means.append(x)
    return means


def matrices() -> list[tuple[slice, int, int]]:
    """Those of SHAPES that two factors of rank 2 make smaller."""
    return [(slice(0, 600), 20, 30), (slice(630, 774), 12, 12), (slice(796, 1796), 40, 25)]


def in_numpy(steps: int, weights: Sequence[float]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The means and the last residuals by the paper: in float64, with LAPACK's QR instead of Gram-Schmidt."""
    q = [first_guess(RANK, cols, torch.device("cpu")).double().numpy().T for _, _, cols in matrices()]
    total, residuals = sum(weights), [np.zeros(NUMEL) for _ in weights]
    means: list[np.ndarray] = []
    for t in range(steps):
        expected = [gradient(i, t).numpy() + r for i, r in enumerate(residuals)]
        mean = sum(w * m for w, m in zip(weights, expected, strict=True)) / total
        for k, (where, rows, cols) in enumerate(matrices()):
            each = [m[where].reshape(rows, cols) for m in expected]
            p, _ = np.linalg.qr(sum(w * m @ q[k] for w, m in zip(weights, each, strict=True)))
            q[k] = sum(w * m.T @ p for w, m in zip(weights, each, strict=True)) / total
            mean[where] = (p @ q[k].T).reshape(-1)
            for i, w in enumerate(weights):
                if w:
                    residuals[i][where] = (each[i] - p @ p.T @ each[i]).reshape(-1)
        means.append(mean)
    return means, residuals


# The mean over workers.


@pytest.mark.slow
def test_the_mean_equals_the_papers(tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        codec_state = factor_state()
        return await trained(endpoint, range(6), codec_state), codec_state.residual

    means, residuals = in_numpy(6, WEIGHTS)
    for rank, (got, residual) in enumerate(SIMULATOR(tmp_path, 4, law)):
        for x, mean in zip(got, means, strict=True):
            assert np.allclose(x.numpy(), mean, rtol=0, atol=1e-9)
        assert np.allclose(residual.numpy(), residuals[rank], rtol=0, atol=1e-9)


@pytest.mark.dist
@pytest.mark.parametrize("workers", [2, 4])
def test_all_ranks_have_the_same_bits_and_processes_those_of_the_simulator(workers: int, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        codec_state = factor_state(torch.float32)
        return *await trained(endpoint, range(5), codec_state), *codec_state.factors

    simulated, real = SIMULATOR(tmp_path, workers, law), SHARED_MEMORY(tmp_path, workers, law)
    for result in [*simulated, *real]:
        assert all(same(a, b) for a, b in zip(simulated[0], result, strict=True))


@every_dtype
def test_residuals_and_result_add_up_to_the_given_values(dtype: torch.dtype, tmp_path: Path):
    """Up to about ten roundings of values no larger than the norm of a column of at most 40 values."""

    async def law(endpoint: Any) -> Any:
        codec_state, steps = factor_state(dtype), []
        for t in range(6):
            g, before = gradient(endpoint.rank, t, dtype), codec_state.residual.clone()
            x = g.clone()
            await mean_by_factors(endpoint, x, SyncVote(WEIGHTS[endpoint.rank], rank=endpoint.rank), codec_state)
            assert WEIGHTS[endpoint.rank] or same(before, codec_state.residual)
            steps.append((g.double() + before.double(), x.double(), codec_state.residual.clone().double()))
        return steps

    ranks = SIMULATOR(tmp_path, 4, law)
    for steps in zip(*ranks, strict=True):
        mean = sum(w * m for w, (m, _, _) in zip(WEIGHTS, steps, strict=True)) / sum(WEIGHTS)
        left = sum(w * r for w, (_, _, r) in zip(WEIGHTS, steps, strict=True)) / sum(WEIGHTS)
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        assert (steps[0][1] + left - mean).abs().max().item() <= 10 * eps * 40**0.5 * max(
            m.abs().max().item() for m, _, _ in steps
        )


def test_means_of_low_rank_are_exact(tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        codec_state, out = factor_state(), []
        left = [numbers(rows, 1, seed=9) for _, rows, _ in matrices()]
        for t in range(4):
            x = gradient(endpoint.rank, t)
            for (where, rows, cols), p in zip(matrices(), left, strict=True):  # Of rank 1 each, of rank 2 together.
                other = p if endpoint.rank % 2 else numbers(rows, 1, seed=10)
                x[where] = (other @ numbers(1, cols, seed=20 + endpoint.rank)).reshape(-1) / (1 + t)
            given = x.clone()
            await mean_by_factors(endpoint, x, SyncVote(WEIGHTS[endpoint.rank], rank=endpoint.rank), codec_state)
            out.append((given, x))
        return out

    for steps in zip(*SIMULATOR(tmp_path, 4, law), strict=True):
        # No rank's residual is zero, but their mean is.
        mean = sum(w * g for w, (g, _) in zip(WEIGHTS, steps, strict=True)) / sum(WEIGHTS)
        assert torch.allclose(steps[0][1], mean, rtol=0, atol=1e-10)


def test_warm_starts_find_the_best_approximation(tmp_path: Path):
    """Eckart-Young: the r largest singular values give the best approximation of rank r.  Without feedback here."""
    u, _ = torch.linalg.qr(numbers(40, 25, seed=1))
    v, _ = torch.linalg.qr(numbers(25, 25, seed=2))
    values = 2.0 ** -torch.arange(25, dtype=torch.float64)
    m = u * values @ v.T
    best = values[RANK:].norm().item()

    async def law(endpoint: Any) -> Any:
        codec_state, errors = factor_state(), []
        for _ in range(12):
            x = torch.zeros(NUMEL, dtype=torch.float64)
            x[796:1796] = m.reshape(-1)
            codec_state.residual.zero_()
            await mean_by_factors(endpoint, x, SyncVote(1.0, rank=endpoint.rank), codec_state)
            errors.append((x[796:1796].view(40, 25) - m).norm().item())
        return errors

    errors = SIMULATOR(tmp_path, 2, law)[0]
    assert errors[0] > 1.01 * best and errors == sorted(errors, reverse=True)
    assert errors[-1] == pytest.approx(best, rel=1e-6)


def test_the_average_of_means_equals_a_constant_gradient(tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        codec_state, means = factor_state(), []
        for _ in range(300):
            x = gradient(endpoint.rank, 0)
            await mean_by_factors(endpoint, x, SyncVote(1.0, rank=endpoint.rank), codec_state)
            means.append(x)
        expected = (gradient(0, 0) + gradient(1, 0)) / 2
        return (means[0] - expected).norm().item(), (torch.stack(means).mean(0) - expected).norm().item()

    first, last = SIMULATOR(tmp_path, 2, law)[0]
    assert last < first / 10


def test_residuals_stay_bounded_where_ranks_differ_and_weights_change(tmp_path: Path):
    """Differences between ranks must not accumulate, or they would count once another rank has less weight."""

    async def law(endpoint: Any) -> Any:
        codec_state, norms = factor_state(), []
        for t in range(400):
            x = (-1) ** endpoint.rank * gradient(0, 0) + gradient(endpoint.rank, t) / 3
            await mean_by_factors(
                endpoint, x, SyncVote(1.0 if t % 10 else 1.0 - endpoint.rank / 2, rank=endpoint.rank), codec_state
            )
            norms.append(codec_state.residual.norm().item())
        return norms

    for norms in SIMULATOR(tmp_path, 2, law):
        assert max(norms[100:]) < 1.5 * max(norms[:100])


def test_a_matrix_that_was_zero_is_sent_again_later(tmp_path: Path):
    """A Q of zeros would give a P of zeros, which gives a Q of zeros again."""

    async def law(endpoint: Any) -> Any:
        codec_state = factor_state()
        for _ in range(2):
            x = torch.zeros(NUMEL, dtype=torch.float64)
            await mean_by_factors(endpoint, x, SyncVote(1.0, rank=endpoint.rank), codec_state)
            assert not x.count_nonzero() and not codec_state.residual.count_nonzero()
        x = torch.ones(NUMEL, dtype=torch.float64)
        await mean_by_factors(endpoint, x, SyncVote(1.0, rank=endpoint.rank), codec_state)
        return x

    for x in SIMULATOR(tmp_path, 2, law):
        assert torch.allclose(x, torch.ones(NUMEL, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_scale_of_values_does_not_matter(scale: float, tmp_path: Path):
    """Their squares overflow float32, and so does the product of M, M^T and M."""

    async def law(endpoint: Any) -> Any:
        states = factor_state(torch.float32), factor_state(torch.float32)
        for t in range(4):
            xs = gradient(endpoint.rank, t, torch.float32), gradient(endpoint.rank, t, torch.float32) * scale
            for x, codec_state in zip(xs, states, strict=True):
                await mean_by_factors(endpoint, x, SyncVote(1.0, rank=endpoint.rank), codec_state)
            assert torch.allclose(xs[0], xs[1] / scale, rtol=1e-3, atol=1e-3)

    SIMULATOR(tmp_path, 2, law)


class Counting:
    """An endpoint that records the size of each all-reduce."""

    def __init__(self, endpoint: Any) -> None:
        self.endpoint, self.sizes = endpoint, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.endpoint, name)

    def all_reduce(self, x: Tensor, extras: Tensor | None = None) -> Any:
        self.sizes.append(x.numel())
        return self.endpoint.all_reduce(x, extras)


def test_all_factors_travel_in_two_exchanges_and_small_tensors_with_the_first(tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        counting = Counting(endpoint)
        await trained(counting, [0], factor_state())
        small = PowerSGD(rank=RANK).codec_state(Slots(), torch.zeros(9))
        x = torch.full((9,), endpoint.rank + 1.0)
        await mean_by_factors(counting, x, SyncVote(1.0, rank=endpoint.rank), small)
        return counting.sizes, x.tolist()

    raw = NUMEL - sum(rows * cols for _, rows, cols in matrices())
    for sizes, x in SIMULATOR(tmp_path, 2, law):
        assert sizes == [RANK * (20 + 12 + 40) + raw, RANK * (30 + 12 + 25), 9]
        assert x == [1.5] * 9


def test_a_codec_state_without_factors_raises(tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        with pytest.raises(
            TypeError, match=r"ErrorFeedback of OneBit\(bucket=None, threshold='mean'\): only PowerSGD's"
        ):
            await mean_by_factors(endpoint, torch.zeros(9), SyncVote(1.0), ErrorFeedback(OneBit(), torch.zeros(9)))

    SIMULATOR(tmp_path, 2, law)


# Exchanges that come to nothing.


def test_without_any_weight_nothing_changes(tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        codec_state = factor_state(torch.float32)
        await trained(endpoint, range(2), codec_state)
        before = [codec_state.residual.clone(), *(q.clone() for q in codec_state.factors)]
        x = gradient(endpoint.rank, 3, torch.float32)
        half = x.half()
        for vector in (x, half):
            kept = vector.clone()
            total = await mean_by_factors(endpoint, vector, SyncVote(0.0, 1.0, rank=endpoint.rank), codec_state)
            assert same(vector, kept) and (total.weight, total.going_on, total.bad) == (0.0, 2.0, 0.0)
        assert all(same(a, b) for a, b in zip(before, [codec_state.residual, *codec_state.factors], strict=True))

    SIMULATOR(tmp_path, 2, law)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [5, 610, 1795], ids=["in a matrix", "in a vector", "in the last matrix"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_nonfinite_value_voids_the_mean_on_all_ranks(bad: float, at: int, dtype: torch.dtype, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        codec_state = factor_state(torch.float32)
        await trained(endpoint, range(2), codec_state, [1.0] * 3)
        before = [codec_state.residual.clone(), *(q.clone() for q in codec_state.factors)]
        x = gradient(endpoint.rank, 3, dtype)
        if endpoint.rank == 1:
            x[at] = bad
        vote = SyncVote(2.0, rank=endpoint.rank)
        total = await mean_by_factors(endpoint, x, vote, codec_state)
        assert total.culprit() == "rank 1" and total.weight == 6.0 and bool(vote.bad) == (endpoint.rank == 1)
        assert x.isnan().all()
        assert all(same(a, b) for a, b in zip(before, [codec_state.residual, *codec_state.factors], strict=True))
        return await trained(endpoint, range(4, 6), codec_state, [1.0] * 3)

    async def without(endpoint: Any) -> Any:
        codec_state = factor_state(torch.float32)
        await trained(endpoint, range(2), codec_state, [1.0] * 3)
        return await trained(endpoint, range(4, 6), codec_state, [1.0] * 3)

    for a, b in zip(SIMULATOR(tmp_path, 3, law), SIMULATOR(tmp_path, 3, without), strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


def test_a_rank_with_a_bad_vote_sends_zeros(tmp_path: Path):
    """Its values here may be finite: the NaN was found elsewhere in its gradient."""

    async def law(endpoint: Any) -> Any:
        codec_state, x, bad = factor_state(), gradient(endpoint.rank, 0), float(endpoint.rank == 2)
        total = await mean_by_factors(endpoint, x, SyncVote(1.0, 1.0, bad, 2 * bad, endpoint.rank), codec_state)
        assert total.culprit() == "rank 2" and x.isnan().all() and not codec_state.residual.count_nonzero()

    SIMULATOR(tmp_path, 3, law)


@pytest.mark.parametrize("at", [slice(0, 600), slice(600, 630)], ids=["matrix", "vector"])
def test_finite_values_with_nonfinite_sums_void_the_mean_on_all_ranks(at: slice, tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        codec_state, x = factor_state(torch.float32), torch.zeros(NUMEL)
        x[at] = 3e36
        total = await mean_by_factors(endpoint, x, SyncVote(200.0, rank=endpoint.rank), codec_state)
        assert total.bad == 2 and x.isnan().all() and not codec_state.residual.count_nonzero()
        return await trained(endpoint, range(2), codec_state)

    a, b = SIMULATOR(tmp_path, 2, law)
    assert all(same(x, y) and x.isfinite().all() for x, y in zip(a, b, strict=True))


def test_a_mean_beyond_half_precision_is_infinite_and_not_in_the_residual(tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        codec_state, x = factor_state(torch.float16), torch.zeros(NUMEL, dtype=torch.float16)
        codec_state.residual[600] = 60000.0
        x[600] = 60000.0
        await mean_by_factors(endpoint, x, SyncVote(1.0, rank=endpoint.rank), codec_state)
        assert x[600].isinf() and codec_state.residual.isfinite().all()

    SIMULATOR(tmp_path, 2, law)


# Memory.


def test_a_resumed_run_has_the_same_bits(tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        unbroken = await trained(endpoint, range(6), factor_state(torch.float32))
        slots = Slots()
        before = await trained(endpoint, range(3), factor_state(torch.float32, slots))
        resumed = factor_state(torch.float32, Slots(saved=slots.slots))
        return unbroken, before + await trained(endpoint, range(3, 6), resumed)

    for unbroken, resumed in SIMULATOR(tmp_path, 4, law):
        assert all(same(a, b) for a, b in zip(unbroken, resumed, strict=True))


@pytest.mark.parametrize("edges", [[0, 600, 774, NUMEL], [0, 630, NUMEL]])
def test_buckets_cut_between_tensors_give_the_same_mean_as_the_whole(edges: list[int], tmp_path: Path):
    async def law(endpoint: Any) -> Any:
        whole, cut = factor_state(torch.float32), factor_state(torch.float32)
        for t in range(4):
            x, parts = gradient(endpoint.rank, t, torch.float32), gradient(endpoint.rank, t, torch.float32)
            await mean_by_factors(endpoint, x, SyncVote(WEIGHTS[endpoint.rank]), whole)
            for a, b in pairwise(edges):
                assert cut[a:b] is cut[a:b]
                await mean_by_factors(endpoint, parts[a:b], SyncVote(WEIGHTS[endpoint.rank]), cut[a:b])
            assert same(x, parts) and same(whole.residual, cut.residual)
        assert all(same(a, b) for a, b in zip(whole.factors, cut.factors, strict=True))

    SIMULATOR(tmp_path, 4, law)
