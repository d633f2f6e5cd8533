"""Every CPU kernel equals its codec's definition in plain torch: the same bytes, residuals and sums, bit for bit."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.codecs import QSGD, Codec, Fp8, Fp16, NBit, OneBit, TernGrad, Threshold, TopK, Unencodable, kernels
from tests.laws.every import CODECS
from tests.laws.tasks import numbers

pytest.importorskip("numba")
from paceline.codecs.kernels import cpu_parts

FUSED = {name: codec for name, codec in CODECS.items() if type(codec) in kernels.kernels_of("cpu")}
SIZES = [0, 1, 7, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1023, 1024, 1537, 4000]

every_kernel = pytest.mark.parametrize("codec", FUSED.values(), ids=FUSED)
every_dtype = pytest.mark.parametrize("dtype", kernels.INPUTS, ids=str)
with_residual = pytest.mark.parametrize("has_residual", [False, True], ids=["alone", "with a residual"])


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def bits(x: Tensor) -> Tensor:
    """The bits of float32 values, with the same bits for all NaNs."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def wild(numel: int, seed: int = 0) -> Tensor:
    """Values over many powers of ten, with zeros of both signs and ties, and none beyond fp16's range."""
    x = numbers(numel, seed=seed) * torch.exp2(12 * numbers(numel, seed=seed + 1)).clamp(max=2.0**12)
    x[::7], x[3::11], x[5::13] = 0.0, -0.0, 1.5
    return x.to(torch.float32)


def encoded(codec: Codec, x: Tensor, residual: Tensor | None, seed: int = 3, out: Tensor | None = None) -> Tensor:
    return kernels.encode(codec, x, residual, torch.Generator().manual_seed(seed), out)


def assert_alike(codec: Codec, x: Tensor, residual: Tensor | None) -> Tensor:
    """Encode with the kernel and by the definition, compare all results, and return the bytes."""
    other = None if residual is None else residual.clone()
    given = x.clone()
    data = encoded(codec, x, residual)
    with kernels.plain():
        defined = encoded(codec, x, other)
    assert data.dtype == torch.uint8 and torch.equal(data, defined)
    assert torch.equal(x, given), "a kernel writes to nothing but the residual"
    if residual is not None and other is not None:
        assert torch.equal(bits(residual), bits(other))
    return data


def test_most_codecs_have_kernels():
    assert {"OneBit", "NBit", "QSGD", "TernGrad", "Fp8", "Fp16", "BFloat16"} <= {
        type(codec).__name__ for codec in FUSED.values()
    }


@every_kernel
@every_dtype
@with_residual
def test_a_kernel_encodes_as_defined(codec: Codec, dtype: torch.dtype, has_residual: bool):
    for numel in SIZES:
        for make in (numbers, wild):
            x = make(numel, seed=numel).to(dtype)
            assert_alike(codec, x, make(numel, seed=numel + 1).to(torch.float32) if has_residual else None)
        assert_alike(codec, torch.zeros(numel, dtype=dtype), torch.zeros(numel) if has_residual else None)


@every_kernel
@pytest.mark.parametrize("scale", [1e-45, 1e-42, 1e-38, 1e-36, 1e-30, 1e-22, 1e-19, 1e15])
def test_a_kernel_encodes_very_small_and_very_large_values_as_defined(codec: Codec, scale: float):
    """Where squares, means and reciprocals underflow, or overflow and raise."""
    x = (numbers(700) * scale).to(torch.float32)
    try:
        with kernels.plain():
            encoded(codec, x, None)
    except Unencodable:
        with pytest.raises(Unencodable):
            encoded(codec, x, None)
    else:
        assert_alike(codec, x, torch.zeros(700))


@every_kernel
def test_a_kernel_raises_where_the_definition_raises_near_the_end_of_the_range(codec: Codec):
    top = torch.finfo(torch.float32).max
    for value in (65504.0, 65519.0, 65520.0, 1.3e19, 1e20, 3.38e38, 3.396e38, top * (1 - 2**-20), top):
        for place in (0, 40, 699):
            x = torch.zeros(700)
            x[place] = value
            verdicts = []
            for way in (kernels.plain, torch.no_grad):  # Something else than plain.
                try:
                    with way():
                        verdicts.append(encoded(codec, x, None).tolist())
                except Unencodable as error:
                    verdicts.append(str(error))
            assert verdicts[0] == verdicts[1], value


@every_kernel
@with_residual
def test_the_number_of_threads_does_not_change_the_result(
    codec: Codec, has_residual: bool, threads: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cpu_parts, "SHARED_FROM", 1024)
    numel = 5000
    x = numbers(numel, dtype=torch.float32)
    data = assert_alike(codec, x, numbers(numel, seed=1, dtype=torch.float32) if has_residual else None)
    into = numbers(numel, seed=2, dtype=torch.float32)
    defined = into.clone()
    kernels.add(codec, data, into, 0.3)
    with kernels.plain():
        kernels.add(codec, data, defined, 0.3)
    assert torch.equal(into, defined)


@pytest.mark.parametrize("codec", [OneBit(), QSGD(), TernGrad(), Fp16()], ids=str)
def test_a_kernel_encodes_a_long_vector_as_defined(codec: Codec, threads: int):
    """More than 512 rows of 512, so that their sums are more than a row too."""
    assert_alike(codec, numbers(2**19 + 700, dtype=torch.float32), numbers(2**19 + 700, seed=1, dtype=torch.float32))


@every_kernel
@pytest.mark.parametrize("weight", [1.0, 0.3, -2.0, 0.0])
@pytest.mark.parametrize("fresh", [False, True], ids=["added", "fresh"])
def test_a_kernel_adds_as_defined(codec: Codec, weight: float, fresh: bool):
    """Except for the sign of a zero: a value that is not sent may be added as 0, not as weight times 0."""
    for numel in SIZES:
        data = encoded(codec, wild(numel), None)
        into = numbers(numel, seed=5, dtype=torch.float32)
        defined = into.clone()
        with kernels.plain():
            kernels.add(codec, data, defined, weight, fresh)
        for shift in (0, 1, 8):  # Out of the middle of a longer message.
            message = torch.cat([torch.full((shift,), 255, dtype=torch.uint8), data])
            result = into.clone()
            kernels.add(codec, message[shift:], result, weight, fresh)
            assert torch.equal(result, defined)
            assert torch.equal(message[shift:], data)


@every_kernel
def test_a_kernel_writes_into_the_given_buffer(codec: Codec):
    x = numbers(1300, dtype=torch.float32)
    wanted = encoded(codec, x, None)
    for shift in (0, 1, 4, 8):
        message = torch.full((wanted.numel() + shift + 5,), 255, dtype=torch.uint8)
        out = message[shift : shift + wanted.numel()]
        given = encoded(codec, x, None, out=out)
        assert given.data_ptr() == out.data_ptr() and torch.equal(out, wanted)
        assert (message[:shift] == 255).all() and (message[shift + wanted.numel() :] == 255).all()


@every_kernel
@with_residual
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_nonfinite_value_raises_an_error_at_any_index(codec: Codec, has_residual: bool, bad: float):
    """With the definition's error text; the residual is restored up to rounding."""
    x, before = numbers(1300, dtype=torch.float32), numbers(1300, seed=1, dtype=torch.float32)
    slack = 4 * 2**-23 * (x.abs().max() + before.abs().max()).item()
    for place in [*range(0, 1300, 61), 31, 32, 63, 64, 511, 512, 1279, 1280, 1299]:
        spoilt = x.clone()
        spoilt[place] = bad
        residuals = [before.clone() if has_residual else None for _ in range(2)]
        with pytest.raises(Unencodable, match=f"index {place}:") as defined, kernels.plain():
            encoded(codec, spoilt, residuals[0])
        with pytest.raises(Unencodable) as raised:
            encoded(codec, spoilt, residuals[1])
        assert str(raised.value) == str(defined.value)
        if residuals[0] is not None and residuals[1] is not None:
            assert torch.equal(residuals[0], before)
            assert (residuals[1] - before).abs().max().item() <= slack


@every_kernel
def test_random_bytes_decode_equally_or_raise_with_and_without_kernels(codec: Codec):
    rng = torch.Generator().manual_seed(1)
    for numel in (1, 33, 512, 700):
        honest = encoded(codec, numbers(numel, dtype=torch.float32), None)
        for trial in range(40):
            data = honest.clone()
            if trial % 2:
                data = torch.randint(256, (honest.numel(),), dtype=torch.uint8, generator=rng)
            else:
                data[torch.randint(honest.numel(), (3,), generator=rng)] = torch.randint(
                    256, (3,), dtype=torch.uint8, generator=rng
                )
            results: list[Any] = []
            for way in (kernels.plain, torch.no_grad):
                into = torch.ones(numel)
                try:
                    with way():
                        kernels.add(codec, data, into, 0.5)
                    results.append(bits(into).tolist())
                except ValueError as error:
                    assert type(codec).__name__ in str(error)
                    assert torch.equal(into, torch.ones(numel)), "what is refused leaves no trace"
                    results.append(ValueError)
            assert results[0] == results[1]


@every_kernel
def test_read_only_vectors_and_messages_are_accepted(codec: Codec):
    values = numbers(700, dtype=torch.float32).numpy()
    values.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that such a tensor must not be written to.
        x = torch.from_numpy(values)
        data = encoded(codec, x, None)
        message = torch.frombuffer(data.numpy().tobytes(), dtype=torch.uint8)
    into = torch.zeros(700)
    kernels.add(codec, message, into)
    assert torch.equal(into, codec.decode(data, 700) + 0.0)


@pytest.mark.parametrize("codec", [OneBit(), Fp16()], ids=str)
def test_a_buffer_of_the_wrong_size_raises_and_is_not_overrun(codec: Codec):
    x = numbers(700, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"700 values .* buffer of shape \(8,\)"):
        encoded(codec, x, None, out=torch.empty(8, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="size"):
        encoded(codec, x, torch.zeros(699))


@pytest.mark.parametrize("codec", [OneBit(), NBit(), QSGD(), Fp8(), TernGrad()], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_nonfinite_scale_raises_an_error_with_its_index(codec: Codec, bad: float):
    data, place, into = encoded(codec, numbers(1300), None), 0 if isinstance(codec, TernGrad) else 2, torch.ones(1300)
    data[4 * place : 4 * place + 4] = torch.tensor([bad]).view(torch.uint8)
    for read in (lambda: codec.decode(data, 1300), lambda: kernels.add(codec, data, into)):
        with pytest.raises(ValueError, match=f"{type(codec).__name__}.*scale {place} is {bad}"):
            read()
    assert torch.equal(into, torch.ones(1300))


@pytest.mark.parametrize("codec", [OneBit(32), Threshold(0.5), TopK(0.1)], ids=str)
def test_adding_to_a_matrix_raises(codec: Codec):
    data, into = encoded(codec, numbers(1024, dtype=torch.float32), None), torch.zeros(32, 32)
    with pytest.raises(RuntimeError, match="size"):
        kernels.add(codec, data, into)
    assert not into.any()


def test_the_version_of_shared_files_is_part_of_compiled_names():
    """numba would use a cached function although a function that it calls, or a constant, has changed."""
    folder = Path(cpu_parts.__file__).parents[1]
    for path in (folder / "kernels").glob("[!g_]*.py"):
        tree = ast.parse(path.read_text())
        origin = {
            name.asname or name.name: (node.module or "").removeprefix("paceline.codecs.").replace(".", "/") + ".py"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline.codecs.")
            for name in node.names
        }
        for function in tree.body:
            names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)} & origin.keys()
            if isinstance(function, ast.FunctionDef) and "compiled" in names:
                assert {origin[name] for name in names} <= {*cpu_parts.SHARED}, (path.name, function.name)


def test_a_function_that_cannot_be_cached_is_compiled():
    names: dict[str, Any] = {}
    exec("def double(x):\n    return x + x", names)  # There is no file, so there is no place for a cache.
    assert cpu_parts.compiled(names["double"])(np.float32(2)) == 4
