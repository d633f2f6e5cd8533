"""PerTensor and Chunked: each piece is the inner codec's message, aligned, and encoded by its kernels."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import registry
from paceline.codecs import Codec, ErrorFeedback, Fp16, Fp32, OneBit, Unencodable, kernels
from paceline.codecs.combine import Chunked, PerTensor
from paceline.codecs.dgc import DGC
from paceline.codecs.power_sgd import PowerSGD
from paceline.codecs.qsgd import QSGD, TernGrad
from paceline.codecs.threshold import AdaptiveThreshold, Threshold
from paceline.codecs.top_k import TopK
from tests.in_turn import in_turn
from tests.laws.slots import Slots
from tests.laws.tasks import numbers, same

SHAPES = [torch.Size(s) for s in [(30, 40), (5,), (), (0, 3), (2000,), (9,), (1203,), (1,)]]
SIZES = [s.numel() for s in SHAPES]
NUMEL = sum(SIZES)
BUCKETS = OneBit(bucket=512)  # Without a bucket its units are the rows of tensors.

INNER: dict[str, Codec] = {
    "fp32": Fp32(),
    "fp16": Fp16(),
    "one-bit": OneBit(),
    "tern-grad": TernGrad(),
    "qsgd": QSGD(),
    "top-k": TopK(ratio=0.1),
    "threshold": Threshold(tau=1.0, limit=math.inf),
    "adaptive threshold": AdaptiveThreshold(tau=1.0, limit=math.inf),
}
WHOLE: dict[str, Codec] = {
    **{f"per tensor, {name}": PerTensor(codec, raw_below=7).fitted(SHAPES) for name, codec in INNER.items()},
    "unfitted": PerTensor(OneBit()),
    **{f"chunks, {name}": Chunked(codec, chunk=1001) for name, codec in INNER.items()},
    **{
        f"chunks per tensor, {name}": PerTensor(Chunked(codec, chunk=512), raw_below=7).fitted(SHAPES)
        for name, codec in INNER.items()
    },
}
every_inner = pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
every_one = pytest.mark.parametrize("codec", WHOLE.values(), ids=WHOLE)


def random(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def up(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


# The content of a message.


def test_each_tensor_is_encoded_separately():
    a, b = numbers(1203, dtype=torch.float32), numbers(2000, seed=1, dtype=torch.float32)
    data = PerTensor(BUCKETS).fitted([a.shape, b.shape]).encode(torch.cat([a, b]))
    first, second = BUCKETS.encode(a), BUCKETS.encode(b)
    padding = torch.zeros(up(first.numel()) - first.numel(), dtype=torch.uint8)
    assert padding.numel() == 1 and same(data, torch.cat([first, padding, second]))


def test_small_tensors_are_sent_as_fp32():
    x = numbers(NUMEL, dtype=torch.float32)
    codec = PerTensor(BUCKETS, raw_below=1203).fitted(SHAPES)
    values = codec.decode(codec.encode(x), NUMEL)
    start = 0
    for n in SIZES:
        part = slice(start, start + n)
        assert same(values[part], x[part] if n < 1203 else BUCKETS.decode(BUCKETS.encode(x[part]), n))
        start += n
    sizes = [4 * n if n < 1203 else BUCKETS.nbytes(n) for n in SIZES]
    assert codec.nbytes(NUMEL) == sum(map(up, sizes[:-1])) + sizes[-1]


@every_inner
@pytest.mark.parametrize(("numel", "chunk"), [(20, 1), (51, 7), (NUMEL, 1000), (NUMEL, NUMEL), (NUMEL, 2 * NUMEL)])
def test_each_chunk_is_encoded_separately(inner: Codec, numel: int, chunk: int):
    x = numbers(numel, dtype=torch.float32)
    data = Chunked(inner, chunk=chunk).encode(x, random())
    # A message's one seed is that of a generator, from which each piece takes its own.
    pieces = random(kernels.draw(random())) if inner.is_random else None
    parts = [inner.encode(part, pieces) for part in x.split(chunk)]
    table = (
        torch.tensor([p.numel() for p in parts]).view(torch.uint8)
        if inner.nbytes(1) is None
        else torch.zeros(0, dtype=torch.uint8)
    )
    filled = [torch.nn.functional.pad(p, (0, -p.numel() % 8)) for p in parts[:-1]]
    assert same(data, torch.cat([table, *filled, parts[-1]]))
    values = Chunked(inner, chunk=chunk).decode(data, numel)
    assert same(values, torch.cat([inner.decode(p, len(v)) for p, v in zip(parts, x.split(chunk), strict=True)]))


@every_one
def test_encoded_length_equals_nbytes(codec: Codec):
    for numel in (NUMEL,) if isinstance(codec, PerTensor) and codec.cuts else (0, 1, 9, 1001, NUMEL):
        data = codec.encode(numbers(numel, dtype=torch.float32), random())
        assert codec.nbytes(numel) in (None, data.numel()) and data.numel() <= codec.most_nbytes(numel)
    inner = codec.codec.codec if isinstance(codec.codec, Chunked) else codec.codec  # type: ignore
    assert (codec.nbytes(NUMEL) is None) == (inner.nbytes(NUMEL) is None)


# Kernels.


@every_one
@in_turn(dtype=[torch.float32, torch.float16, torch.bfloat16], with_residual=[True, False])
def test_kernels_equal_the_definition_to_the_bit(codec: Codec, dtype: torch.dtype, with_residual: bool):
    x, residual = numbers(NUMEL, dtype=dtype), numbers(NUMEL, seed=1, dtype=torch.float32)
    rests = [residual.clone() if with_residual else None for _ in range(2)]
    sums = [numbers(NUMEL, seed=2, dtype=torch.float32) for _ in range(2)]
    data = kernels.encode(codec, x, rests[0], random())
    with kernels.plain():
        plain = kernels.encode(codec, x, rests[1], random())
        kernels.add(codec, plain, sums[1], 0.3)
    kernels.add(codec, data, sums[0], 0.3)
    assert same(data, plain) and same(sums[0], sums[1])
    assert not with_residual or same(rests[0], rests[1])
    kernels.add(codec, data, sums[0], fresh=True)
    assert same(sums[0], codec.decode(data, NUMEL))


@every_one
@in_turn(shift=[0, 1, 8])
def test_a_message_is_written_into_the_given_buffer_only(codec: Codec, shift: int):
    x = numbers(NUMEL, dtype=torch.float32)
    data = kernels.encode(codec, x, None, random())
    memory = torch.full((data.numel() + 16,), 77, dtype=torch.uint8)
    out = memory[shift : shift + data.numel()]
    assert same(kernels.encode(codec, x, None, random(), out), data) and same(out, data)
    assert (memory[:shift] == 77).all() and (memory[shift + data.numel() :] == 77).all()
    into = torch.zeros(NUMEL)
    kernels.add(codec, out, into)
    assert same(into, codec.decode(data, NUMEL) + 0.0)


def test_pieces_draw_different_random_numbers():
    x = torch.full((2000,), 0.5)
    x[::1000] = 1.0
    first, second = (
        Chunked(TernGrad(clip=None), chunk=1000)
        .decode(Chunked(TernGrad(clip=None), chunk=1000).encode(x, random()), 2000)
        .chunk(2)
    )
    assert not same(first, second)


# Values that cannot be encoded.


@every_one
@in_turn(plain=[True, False], at=[0, 1200, 1202, 3207, NUMEL - 1])
def test_a_nonfinite_value_raises_an_error_with_its_index_and_is_not_in_the_residual(
    codec: Codec, at: int, plain: bool
):
    x, residual = numbers(NUMEL, dtype=torch.float32), numbers(NUMEL, seed=1, dtype=torch.float32)
    x[at] = math.nan
    rest = residual.clone()
    name = type(codec).__name__
    with pytest.raises(Unencodable, match=rf"^{name}\(.* cannot encode nan at index {at}: it is not finite"):
        if plain:
            codec.encode(x, random())
        else:
            kernels.encode(codec, x, rest, random())
    # The pieces before it were encoded and are taken back, which rounds twice in values below 10.
    assert torch.allclose(rest, residual, rtol=0, atol=4 * 10 * 2**-24)


def test_a_finite_value_beyond_the_inner_format_raises_an_error_with_its_index():
    x = torch.zeros(3000)
    x[2500] = 1e5
    for refused in (
        lambda: Chunked(Fp16(), chunk=1000).encode(x),
        lambda: kernels.encode(Chunked(Fp16(), chunk=1000), x),
    ):
        with pytest.raises(
            Unencodable, match=r"Chunked\(.*from index 2000 on, Fp16\(\) cannot encode 100000 at index 500"
        ):
            refused()


# Invalid bytes.


@every_one
def test_bytes_of_a_wrong_length_raise(codec: Codec):
    data = codec.encode(numbers(NUMEL, dtype=torch.float32), random())
    for wrong in (data[:-1], torch.cat([data, data[:1]]), data[:3], data[:0]):
        for read in (lambda: codec.decode(wrong, NUMEL), lambda: kernels.add(codec, wrong, torch.zeros(NUMEL))):  # noqa: B023
            with pytest.raises(ValueError, match=rf"{type(codec).__name__}\("):
                read()


@pytest.mark.parametrize("lie", [-1, 1, 2**40, -(2**63), 2**63 - 1])
def test_a_wrong_table_of_sizes_raises(lie: int):
    codec = Chunked(Threshold(tau=1.0), chunk=1000)
    data = codec.encode(numbers(3500, dtype=torch.float32))
    data[8:16] = torch.tensor([lie]).view(torch.uint8)
    for read in (lambda: codec.decode(data, 3500), lambda: kernels.add(codec, data, torch.zeros(3500))):
        with pytest.raises(ValueError, match=r"(Chunked|Threshold)\("):
            read()


@given(noise=st.binary(min_size=0, max_size=300), numel=st.integers(0, 300))
def test_random_bytes_raise_or_decode_to_the_right_number_of_values(noise: bytes, numel: int):
    data = torch.frombuffer(bytearray(noise), dtype=torch.uint8) if noise else torch.zeros(0, dtype=torch.uint8)
    for codec in (
        Chunked(Threshold(tau=1.0), chunk=64),
        Chunked(TopK(ratio=0.1), chunk=64),
        PerTensor(OneBit(), raw_below=20),
    ):
        try:
            values = codec.decode(data, numel)
        except ValueError as error:
            assert type(codec).__name__ in str(error) or type(codec.codec).__name__ in str(error)
        else:
            assert values.shape == (numel,)


# Properties of the inner codec.


@every_inner
def test_capabilities_are_those_of_the_inner_codec(inner: Codec):
    for codec in (PerTensor(inner), Chunked(inner), PerTensor(Chunked(inner))):
        reduction = "stripes" if inner.reduction == "sum" else inner.reduction  # Pieces of several formats have no sum.
        assert (codec.feedback, codec.is_random, codec.reduction) == (inner.feedback, inner.is_random, reduction)


def test_the_unit_is_the_chunk():
    assert PerTensor(OneBit(bucket=64)).unit == 64 and Chunked(OneBit(), chunk=1000).unit == 1000


@given(a=st.integers(0, NUMEL), b=st.integers(0, NUMEL))
def test_a_part_has_the_tensors_that_the_slice_has(a: int, b: int):
    a, b = min(a, b), max(a, b)
    codec = PerTensor(BUCKETS, raw_below=7).fitted(SHAPES)
    x = numbers(NUMEL, dtype=torch.float32)
    edges = sorted({a, b, *(e for i in range(len(SIZES)) if a < (e := sum(SIZES[:i])) < b)})
    wanted = [x[s:e] if e - s < 7 else BUCKETS.decode(BUCKETS.encode(x[s:e]), e - s) for s, e in pairwise(edges)]
    part = codec.part(slice(a, b))
    assert same(part.decode(part.encode(x[a:b]), b - a), torch.cat([torch.zeros(0), *wanted]))


@every_one
def test_settings_survive_as_plain_data(codec: Codec):
    after = codec.adapted(codec.encode(numbers(NUMEL, dtype=torch.float32), random()), NUMEL)
    for c in (codec, after):
        assert registry.from_plain(registry.to_plain(c)) == c
    assert "cuts" not in repr(after) and "each" not in repr(after)


def test_each_chunk_adapts_to_its_own_messages():
    codec = Chunked(AdaptiveThreshold(tau=0.5, limit=math.inf), chunk=1000)
    x = torch.cat([torch.zeros(1000), torch.full((1000,), 0.7)])
    codec_state = ErrorFeedback(codec, torch.zeros(2000))
    alone = [ErrorFeedback(codec.codec, torch.zeros(1000)) for _ in range(2)]
    for _ in range(20):
        decoded = codec.decode(codec_state.encode(x), 2000)
        parts = [codec.codec.decode(one.encode(part), 1000) for one, part in zip(alone, x.chunk(2), strict=True)]
        assert same(decoded, torch.cat(parts))
    assert same(codec_state.residual, torch.cat([one.residual for one in alone]))


def test_a_codec_adapted_to_one_length_raises_for_another():
    codec = Chunked(AdaptiveThreshold(tau=0.5, limit=math.inf), chunk=10)
    after = codec.adapted(codec.encode(torch.ones(30)), 30)
    assert after is not codec
    with pytest.raises(ValueError, match=r"Chunked\(.* 3 pieces, but 40 values are 4"):
        after.encode(torch.ones(40))


def test_error_feedback_works_per_tensor():
    x, codec = numbers(NUMEL, dtype=torch.float32), PerTensor(OneBit()).fitted(SHAPES)
    codec_state = codec.codec_state(Slots(), x)
    received = torch.zeros(NUMEL)
    for _ in range(100):
        codec_state.add(codec_state.encode(x), received, 0.01)
    assert (received - x).norm() < x.norm() / 10


# Invalid settings.


@pytest.mark.parametrize(
    "refused",
    [
        lambda: Chunked(chunk=0),
        lambda: Chunked(chunk=-1),
        lambda: PerTensor(raw_below=-1),
        lambda: PerTensor(PowerSGD()),
        lambda: Chunked(PowerSGD()),
        lambda: PerTensor(PerTensor()),
        lambda: Chunked(Chunked()),
        lambda: Chunked(PerTensor()),
        lambda: PerTensor(DGC()),
    ],
)
def test_invalid_settings_raise_an_error_with_the_codecs_name(refused: object):
    with pytest.raises(ValueError, match=r"^(Chunked|PerTensor)\(codec=.*\): "):
        refused()  # type: ignore


def test_a_vector_of_another_length_than_the_tensors_raises():
    codec = PerTensor(OneBit()).fitted([torch.Size((20, 30))])
    for wrong in (lambda: codec.encode(torch.zeros(599)), lambda: codec.nbytes(601)):
        with pytest.raises(
            ValueError, match=r"PerTensor\(.* was fitted to tensors of 600 values in all, but was given (599|601)"
        ):
            wrong()


@every_one
def test_settings_are_plain_data_and_make_the_same_codec_again(codec: Codec):
    """Adapted settings are saved like this, and restored from a file."""
    codec = codec.fitted([torch.Size([40, 30]), torch.Size([7])])
    for _ in range(3):
        codec = codec.adapted(codec.encode(numbers(1207, dtype=torch.float32), random()), 1207)
        assert codec.restored(json.loads(json.dumps(codec.settings()))) == codec
