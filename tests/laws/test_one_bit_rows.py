"""OneBit with a unit for each output row of a tensor: its units, its bytes, its values, and its kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline import AllReduceSGD, Cluster, ParameterServer, Task, rules, simulate
from paceline.codecs import Entropy, ErrorFeedback, OneBit, PerTensor, Unencodable, kernels
from paceline.codecs.rows import LONGEST, SHORTEST, rows_of, rows_within, units_of
from tests.laws.tasks import numbers, same

MODELS: dict[str, list[tuple[int, ...]]] = {
    "perceptron": [(8, 784), (8,), (64, 128), (64,), (10, 64), (10,)],
    "convolutions": [(16, 3, 3, 3), (16,), (16, 16, 3, 3), (16,), (1,)],
    "long rows": [(3, 1500), (2, 4096), (5, 33), (2000,)],
    "nothing": [(0, 5), (3, 0)],
    "a number": [()],
}
every_model = pytest.mark.parametrize("name", MODELS)


def fitted(name: str) -> tuple[OneBit, int]:
    shapes = [torch.Size(shape) for shape in MODELS[name]]
    return OneBit().fitted(shapes), sum(s.numel() for s in shapes)


def parts(numel: int) -> list[slice]:
    return [slice(0, numel), slice(numel // 3, numel), slice(0, numel // 2), slice(numel // 3, numel // 2), slice(0, 0)]


def bounds(shapes: list[tuple[int, ...]], where: slice) -> list[tuple[int, int]]:
    """The units by their description: rows, of which short ones are joined and long ones split."""
    edges: list[int] = []
    start = 0
    for shape in shapes:
        numel = int(np.prod(shape))
        length = numel // shape[0] if len(shape) > 1 and shape[0] else numel
        step = max(length, 1) if length >= SHORTEST else -(-SHORTEST // max(length, 1)) * length
        for row in range(0, numel, max(step, 1)):
            stop = min(row + step, numel)
            pieces = -(-(stop - row) // LONGEST)
            each = stop - row if pieces == 1 else -(-(stop - row) // (32 * pieces)) * 32
            edges += [start + at for at in range(row, stop, each)]
        start += numel
    edges.append(start)
    return [(a, b) for a, b in pairwise(edges) if a >= where.start and b <= where.stop]


@every_model
def test_units_are_rows(name: str):
    codec, numel = fitted(name)
    units = units_of(codec.rows or ())
    wanted = bounds(MODELS[name], slice(0, numel))
    assert list(zip(units.starts[:-1].tolist(), units.starts[1:].tolist(), strict=True)) == wanted
    assert all(stop - start <= LONGEST for start, stop in wanted)


@every_model
def test_a_part_has_the_units_that_lie_within_it_and_covers_all_its_values(name: str):
    codec, numel = fitted(name)
    for where in parts(numel):
        rows = rows_within(codec.rows or (), where.start, where.stop)
        units = units_of(rows)
        assert units.starts[-1] == sum(n * length for n, length in rows) == where.stop - where.start
        assert (np.diff(units.starts) > 0).all()


def test_a_row_that_a_part_leaves_whole_stays_one_unit():
    rows = rows_of([torch.Size([4, 200]), torch.Size([7])])
    assert units_of(rows_within(rows, 300, 807)).starts.tolist() == [0, 100, 300, 500, 507]


@pytest.mark.parametrize("threshold", ["mean", "zero"])
@every_model
def test_each_value_is_decoded_as_the_mean_of_its_side_of_the_threshold_in_its_unit(name: str, threshold: str):
    """Compared with numpy in double precision, unit by unit; all values of some units are positive."""
    codec, numel = fitted(name)
    codec = replace(codec, threshold=threshold)
    x = numbers(numel, dtype=torch.float32)
    x[: numel // 2].add_(5.0)
    data = codec.encode(x)
    decoded = codec.decode(data, numel).double().numpy()
    values = x.double().numpy()
    for start, stop in bounds(MODELS[name], slice(0, numel)):
        unit = values[start:stop]
        least = 0.0 if threshold == "zero" else unit.mean()
        for side in (unit >= least, unit < least):
            if side.any():
                np.testing.assert_allclose(decoded[start:stop][side], unit[side].mean(), rtol=1e-6)


@every_model
def test_the_size_is_known(name: str):
    codec, numel = fitted(name)
    for where in parts(numel):
        part = codec.part(where)
        n = where.stop - where.start
        assert part.encode(numbers(n)).numel() == part.nbytes(n)
    whole = bounds(MODELS[name], slice(0, numel))
    assert codec.nbytes(numel) == sum(8 + 4 * -(-(stop - start) // 32) for start, stop in whole)


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernels_agree_with_the_definition_to_the_bit(name: str, dtype: torch.dtype):
    whole, numel = fitted(name)
    for where in parts(numel):
        codec = whole.part(where)
        n = where.stop - where.start
        x = numbers(n, dtype=torch.float32).to(dtype)
        for residual in (None, numbers(n, seed=1, dtype=torch.float32)):
            plain_residual = None if residual is None else residual.clone()
            data = kernels.encode(codec, x, residual)
            with kernels.plain():
                assert torch.equal(data, kernels.encode(codec, x, plain_residual))
            assert residual is None or plain_residual is None or same(residual, plain_residual)
            for weight, fresh in ((0.3, False), (1.0, True)):
                into = numbers(n, seed=2, dtype=torch.float32)
                plain_into = into.clone()
                kernels.add(codec, data, into, weight, fresh)
                with kernels.plain():
                    kernels.add(codec, data, plain_into, weight, fresh)
                assert same(into, plain_into)


def test_kernels_write_only_within_their_vector():
    codec = OneBit().fitted([torch.Size([3, 33])])
    around = torch.full((3 * 33 + 64,), 7.0)
    x = numbers(3 * 33, dtype=torch.float32)
    data = kernels.encode(codec, x, around[32:-32])
    kernels.add(codec, data, around[32:-32])
    assert torch.allclose(around[32:-32], x + 7.0)
    assert (around[:32] == 7.0).all()
    assert (around[-32:] == 7.0).all()


@pytest.mark.parametrize("at", [0, 98, 500])
def test_a_nan_is_refused_by_its_index_and_changes_no_residual(at: int):
    codec = OneBit().fitted([torch.Size([8, 99])])
    x = numbers(8 * 99, dtype=torch.float32)
    x[at] = torch.nan
    residual = torch.ones(8 * 99)
    with pytest.raises(Unencodable, match=f"nan at index {at}"):
        kernels.encode(codec, x, residual)
    assert torch.allclose(residual, torch.ones(8 * 99), atol=1e-5)


def test_what_was_sent_and_the_residual_add_up():
    codec, numel = fitted("perceptron")
    state = ErrorFeedback(codec, torch.zeros(numel), torch.zeros(numel))
    given = torch.zeros(numel, dtype=torch.float64)
    sent = torch.zeros(numel, dtype=torch.float64)
    for t in range(20):
        x = numbers(numel, seed=t, dtype=torch.float32)
        given += x
        sent += codec.decode(state.encode(x), numel)
    assert state.residual is not None
    assert torch.allclose(sent + state.residual, given, atol=1e-4)


def test_another_length_than_the_tensors_is_refused():
    codec = OneBit().fitted([torch.Size([3, 100])])
    with pytest.raises(ValueError, match="fitted to tensors of 300 values in all, but was given 299"):
        codec.encode(torch.zeros(299))


def test_settings_survive_the_way_through_plain_data():
    codec, _ = fitted("convolutions")
    assert OneBit().restored(codec.settings()) == codec


def test_a_bucket_that_was_asked_for_stays():
    assert OneBit(bucket=64).fitted([torch.Size([3, 100])]) == OneBit(bucket=64)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 100), nn.Tanh(), nn.Linear(100, 3))


def error(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return (model(batch[0]) - batch[0][:, :3]).square().mean()


def task() -> Task:
    data = [numbers(96, 20, dtype=torch.float32)]
    return Task(wide, error, data, 24, lambda params: torch.optim.SGD(params, lr=0.1), steps=12, bucket_bytes=2000)


@pytest.mark.parametrize("codec", [OneBit(), PerTensor(OneBit(), raw_below=16), Entropy(OneBit())], ids=str)
def test_all_workers_agree_in_buckets_and_stripes_of_rows(codec: OneBit):
    """Kernels and plain torch end with the same bits, so every rank reads the same units."""
    run = simulate(task(), AllReduceSGD(codec=codec), Cluster(workers=3))
    with kernels.plain():
        plain = simulate(task(), AllReduceSGD(codec=codec), Cluster(workers=3))
    assert same(run.params, plain.params)
    finals = [state["slots"]["model"]["values"]["params"] for state in run.states]
    assert all(same(finals[0], final) for final in finals)


@pytest.mark.parametrize("codec", [OneBit(), PerTensor(OneBit(), raw_below=16)], ids=str)
def test_a_server_that_does_not_know_the_tensors_decodes_what_workers_send(codec: OneBit):
    run = simulate(task(), ParameterServer(rule=rules.Sgd(lr=0.05), codec=codec, servers=2), Cluster(workers=2))
    losses = [point.loss for point in run.trace.points if point.loss is not None]
    assert sum(losses[-4:]) < sum(losses[:4])
