"""PowerSGD as a codec: which parts of a vector are matrices, the arithmetic of factors, and what is read of what was sent."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline import registry
from paceline.codecs import ErrorFeedback, Unencodable, kernels
from paceline.codecs.power_sgd import PowerSGD, multiply, orthonormalise
from tests.laws.slots import Slots
from tests.laws.tasks import numbers, same

SHAPES = [torch.Size(s) for s in [(20, 30), (30,), (12, 3, 4), (3, 5), (0, 4), (7,), (40, 25)]]
NUMEL = sum(s.numel() for s in SHAPES)
STARTS = [sum(s.numel() for s in SHAPES[:i]) for i in range(len(SHAPES) + 1)]
RANK = 2


def test_of_a_matrix_that_is_cut_the_whole_rows_stay_one():
    codec = PowerSGD(rank=1).fitted([torch.Size((20, 30)), torch.Size((8,))])
    assert codec.part(slice(0, 608)) == codec
    assert codec.part(slice(60, 605)).blocks == ((18, 30), (5, 1))
    assert codec.part(slice(65, 590)).blocks == ((25, 1), (16, 30), (20, 1))
    assert codec.part(slice(65, 80)).blocks == ((15, 1),)
    assert codec.part(slice(85, 95)).blocks == ((5, 1), (5, 1))
    assert codec.part(slice(603, None)).blocks == ((5, 1),)


@given(a=st.integers(0, NUMEL), b=st.integers(0, NUMEL), c=st.integers(0, NUMEL), d=st.integers(0, NUMEL))
def test_a_part_of_a_part_is_a_part(a: int, b: int, c: int, d: int):
    (a, b), (c, d) = sorted((a, b)), sorted((c, d))
    c, d = min(c, b - a), min(d, b - a)
    codec = PowerSGD(rank=RANK).fitted(SHAPES)
    twice, once = codec.part(slice(a, b)).part(slice(c, d)), codec.part(slice(a + c, a + d))
    assert twice.plan(d - c).matrices == once.plan(d - c).matrices
    assert twice.nbytes(d - c) == once.nbytes(d - c)
    codec_state = codec.codec_state(Slots(), torch.zeros(NUMEL))
    shared = codec_state[a:b][c:d].factors
    assert [q.data_ptr() for q in shared] == [q.data_ptr() for q in codec_state[a + c : a + d].factors]
    assert all(any(q.data_ptr() == w.data_ptr() for w in codec_state.factors) for q in shared)


@given(rows=st.integers(1, 6), cols=st.integers(1, 40), seed=st.integers(0, 2**20), deficient=st.booleans())
def test_rows_become_orthonormal_or_zero_and_span_what_they_did(rows: int, cols: int, seed: int, deficient: bool):
    a = numbers(rows, cols, seed=seed)
    if deficient:
        a[rows // 2 :] = a[: rows - rows // 2] * 3
    spare = a.clone()
    b, c = a.clone(), a.clone()
    orthonormalise([b])
    gram = b @ b.T
    alive = gram.diagonal() > 0.5
    assert torch.allclose(gram, torch.diag(alive.double()), rtol=0, atol=1e-9)
    assert torch.allclose(a @ b.T @ b, a, rtol=0, atol=1e-4)
    assert int(alive.sum()) == torch.linalg.matrix_rank(a, rtol=1e-5)
    orthonormalise([c], [numbers(rows, cols, seed=seed + 1)])
    assert int((c.square().sum(1) > 0.5).sum()) == min(rows, cols) and same(spare, a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("rank", "rows", "cols"), [(1, 1, 1), (1, 9, 4), (2, 31, 33), (4, 64, 65), (5, 513, 700), (4, 3, 300)]
)
def test_compiled_arithmetic_equals_the_definition_to_the_bit(rank: int, rows: int, cols: int, dtype: torch.dtype):
    def worked_out() -> list[Tensor]:
        p, q = numbers(rank, rows, dtype=dtype), numbers(rank, cols, seed=1, dtype=dtype)
        p[-1] = p[0] * 3  # Dependent on the first, up to rounding.
        out = torch.empty(rows, cols, dtype=dtype)
        multiply(p, q, out)
        spared = p.clone()
        orthonormalise([p, q])
        orthonormalise([spared], [numbers(rank, rows, seed=2, dtype=torch.float32)])
        bad = numbers(rank, rows, seed=3, dtype=dtype)
        bad[0, -1] = math.inf
        orthonormalise([bad])
        return [p, q, out, spared, bad]

    fast = worked_out()
    with kernels.plain():
        assert all(same(a, b) for a, b in zip(fast, worked_out(), strict=True))
    assert fast[-1].isnan().any()


# The codec.


def read(codec: PowerSGD, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), x.numel())


@given(rank=st.integers(1, 4), rows=st.integers(1, 30), cols=st.integers(1, 30), seed=st.integers(0, 2**20))
def test_a_matrix_of_low_rank_is_read_as_it_was(rank: int, rows: int, cols: int, seed: int):
    m = (numbers(rows, rank, seed=seed) @ numbers(rank, cols, seed=seed + 1)).float()
    codec = PowerSGD(rank=rank).fitted([m.shape])
    assert torch.allclose(read(codec, m.view(-1)).view(rows, cols), m, rtol=0, atol=1e-5 * m.abs().max().item())
    assert codec.nbytes(rows * cols) == 4 * min(rank * (rows + cols), rows * cols)


@pytest.mark.parametrize("numel", [0, 1, 8, 64, 1000, 1024, 1055, 1056])
def test_a_vector_of_unknown_shape_is_a_square_and_a_rest(numel: int):
    side = math.isqrt(numel)
    factors = 0 if not numel else 4 * (side + numel // side)
    rest = 0 if not numel else numel % side
    assert PowerSGD().nbytes(numel) == 4 * min(factors + rest, numel)
    assert same(read(PowerSGD(), torch.ones(numel)).round(decimals=5), torch.ones(numel))


def test_what_is_too_small_for_factors_is_read_to_the_bit():
    codec = PowerSGD(rank=RANK).fitted(SHAPES)
    x = numbers(NUMEL, dtype=torch.float32)
    values = read(codec, x)
    for i in (1, 3, 5):
        assert same(values[STARTS[i] : STARTS[i + 1]], x[STARTS[i] : STARTS[i + 1]])
    assert codec.nbytes(NUMEL) == 4 * (RANK * (20 + 30 + 12 + 12 + 40 + 25) + 30 + 15 + 7)


def test_what_is_read_is_the_projection_onto_the_columns_that_are_sent():
    codec = PowerSGD(rank=3).fitted([torch.Size((20, 30))])
    m = numbers(20, 30, dtype=torch.float32)
    p = codec.encode(m.view(-1)).view(torch.float32)[:60].view(3, 20)
    assert torch.allclose(p @ p.T, torch.eye(3), atol=1e-6)
    assert torch.allclose(read(codec, m.view(-1)).view(20, 30), p.T @ p @ m, atol=1e-5)


def test_what_is_left_out_is_heard_later():
    """All that P leaves out of M is orthogonal to the Q it came from, so that the same Q again would never find it."""
    g = numbers(1023)
    codec_state, said = (
        ErrorFeedback(PowerSGD(), torch.zeros(1023, dtype=torch.float64)),
        torch.zeros(1023, dtype=torch.float64),
    )
    for _ in range(200):
        said += PowerSGD().decode(codec_state.encode(g), 1023)
    assert (said / 200 - g).norm() < (read(PowerSGD(), g) - g).norm() / 10


def test_settings_survive_as_plain_data_and_the_shapes_with_them():
    codec = PowerSGD(rank=3).fitted(SHAPES)
    assert registry.from_plain(registry.to_plain(codec)) == codec and repr(codec) == "PowerSGD(rank=3)"


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_below_1_is_refused(rank: int):
    with pytest.raises(ValueError, match=rf"PowerSGD\(rank={rank}\): .*rank 1 or more"):
        PowerSGD(rank=rank)


def test_a_vector_of_another_length_than_the_tensors_is_refused():
    codec = PowerSGD().fitted([torch.Size((20, 30))])
    for wrong in (lambda: codec.encode(torch.zeros(599)), lambda: codec.nbytes(601)):
        with pytest.raises(
            ValueError, match=r"PowerSGD\(rank=4\) was fitted to tensors of 600 values in all, but was given (599|601)"
        ):
            wrong()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_factors_that_are_not_finite_are_refused(bad: float):
    data = PowerSGD().encode(numbers(1023, dtype=torch.float32))
    data[:4] = torch.tensor([bad]).view(torch.uint8)
    with pytest.raises(ValueError, match=rf"PowerSGD\(rank=4\) .* {bad:g} "):
        PowerSGD().decode(data, 1023)


def test_values_whose_products_are_beyond_float32_are_refused():
    with pytest.raises(Unencodable, match=r"PowerSGD\(rank=4\) cannot encode 1024 values up to 3e\+38"):
        PowerSGD().encode(torch.full((1024,), 3e38))
