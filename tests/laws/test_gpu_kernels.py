"""The GPU kernels agree with the definitions bit for bit: on a GPU if there is one, otherwise in Triton's interpreter.

Triton decides at import whether it compiles or interprets, so the interpreter runs in a separate process, with the same
tests.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.codecs import NBit, OneBit, kernels
from paceline.codecs.codec import Codec, Unencodable
from paceline.codecs.qsgd import QSGD, TernGrad
from paceline.codecs.threshold import AdaptiveThreshold, Threshold
from tests.laws.tasks import same

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_GPU = HAS_TRITON and torch.cuda.is_available()
IS_INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU and not IS_INTERPRETED else "cpu"

here = pytest.mark.skipif(not (HAS_GPU or IS_INTERPRETED), reason="no GPU: runs in a process where Triton interprets")
on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="no GPU with Triton")
# numpy, under the interpreter, warns of divisions by zero and overflows; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

SMALL: dict[str, Codec] = {
    "one-bit of 32": OneBit(32),
    "one-bit of 96": OneBit(96),
    "one-bit of 96, zero": OneBit(96, "zero"),
    "4-bit of 64": NBit(4, 64),
    "qsgd of 64": QSGD(127, 64),
    "qsgd of 64, max": QSGD(7, 64, "max"),
}
WHOLE: dict[str, Codec] = {
    "one-bit": OneBit(),
    "one-bit of 1056": OneBit(1056),  # More than is kept in registers.
    "one-bit of 1056, zero": OneBit(1056, "zero"),
    "2-bit": NBit(2),
    "16-bit of 1056": NBit(16, 1056),
    "qsgd": QSGD(),
    "qsgd of 300": QSGD(300, 96),
    "terngrad": TernGrad(),
    "terngrad, unclipped": TernGrad(clip=None),
    "threshold": Threshold(8.0),
    "threshold, rice": Threshold(5.0, entropy=True),
    "threshold, bitmap": Threshold(0.1, limit=math.inf),
    "adaptive threshold": AdaptiveThreshold(4.0),
    "threshold, nothing": Threshold(1e9),
}


def bucket_of(codec: Codec) -> int:
    return getattr(codec, "bucket", None) or 512


def values(numel: int, seed: int = 0) -> Tensor:
    """Values of all magnitudes and both signs, with zeros and denormals."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=rng) * torch.randn(numel, generator=rng).exp()
    x[torch.rand(numel, generator=rng) < 0.05] = 0.0
    x[torch.rand(numel, generator=rng) < 0.05] = -0.0
    return torch.where(torch.rand(numel, generator=rng) < 0.02, x * 1e-41, x)


def defined(codec: Codec, x: Tensor, residual: Tensor | None, seed: int) -> Tensor:
    with kernels.plain():
        return kernels.encode(codec, x, residual, torch.Generator().manual_seed(seed))


def encoded(
    codec: Codec, x: Tensor, residual: Tensor | None, seed: int, out: Tensor | None = None
) -> tuple[Tensor, bool]:
    """By the kernel; under the interpreter it works on CPU tensors."""
    from paceline.codecs.kernels import gpu

    drawn = kernels.draw(torch.Generator().manual_seed(seed)) if codec.is_random else 0
    return gpu.KERNELS[type(codec)].encode(codec, x, residual, drawn, out)


def add(codec: Codec, data: Tensor, into: Tensor, weight: float, fresh: bool) -> None:
    from paceline.codecs.kernels import gpu

    gpu.KERNELS[type(codec)].add(codec, data, into, weight, fresh)


def check(
    codec: Codec, numel: int, dtype: torch.dtype = torch.float32, *, feedback: bool = True, seed: int = 0
) -> None:
    """One message: the same bytes, the same residual, the same sums, to the bit."""
    x, residual = values(numel, seed).to(dtype), values(numel, seed + 1) if feedback else None
    on_device = None if residual is None else residual.clone().to(DEVICE)
    data, is_good = encoded(codec, x.to(DEVICE), on_device, seed)
    wanted = defined(codec, x, residual, seed)
    assert is_good
    assert torch.equal(data.cpu(), wanted)
    if on_device is not None and residual is not None:
        assert same(on_device.cpu(), residual)
    for weight, fresh in ((0.3, False), (1.0, True)):
        into = values(numel, seed + 2)
        summed = into.clone().to(DEVICE)
        with kernels.plain():
            kernels.add(codec, wanted, into, weight, fresh)
        add(codec, data, summed, weight, fresh)
        # Where nothing is sent nothing is added, and a -0.0 stays one.
        assert same(summed.cpu() + 0.0, into + 0.0) if codec.nbytes(numel) is None else same(summed.cpu(), into)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.skipif(HAS_GPU or IS_INTERPRETED, reason="the tests below run here")
def test_these_tests_pass_in_the_triton_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=root, capture_output=True, text=True, timeout=290
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(IS_INTERPRETED, reason="runs where no Triton is needed")
def test_without_triton_a_gpu_uses_plain_torch_and_warns_once():
    program = """
import sys, warnings
sys.modules["triton"] = None
from paceline.codecs import kernels
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    assert [kernels.kernels_of("cuda") for _ in range(2)] == [{}, {}]
assert [w.category for w in seen] == [kernels.SlowCodec] and "pip install triton" in str(seen[0].message), seen
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


@here
def test_every_kernel_is_tested_here():
    from paceline.codecs.kernels import gpu

    assert {type(c) for c in (SMALL | WHOLE).values()} == set(gpu.KERNELS)


@here
@pytest.mark.parametrize("codec", SMALL.values(), ids=SMALL)
def test_small_buckets_at_every_edge(codec: Codec):
    bucket = bucket_of(codec)
    for i, numel in enumerate([1, bucket - 1, bucket, bucket + 1, 17 * bucket + 9]):
        check(codec, numel, feedback=i % 3 != 1, seed=i)


@here
@pytest.mark.parametrize("codec", WHOLE.values(), ids=WHOLE)
def test_buckets_of_the_usual_sizes(codec: Codec):
    check(codec, (2 if DEVICE == "cuda" else 1) * bucket_of(codec) + 41)
    if DEVICE == "cuda":
        check(codec, 1000 * bucket_of(codec), feedback=False)
        check(codec, 1234567)


@here
@pytest.mark.parametrize("codec", [OneBit(64), NBit(8, 32), QSGD(7, 32)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_with_a_residual_of_float32(codec: Codec, dtype: torch.dtype):
    check(codec, 300, dtype)
    check(codec, 300, dtype, feedback=False)


@here
@pytest.mark.parametrize("codec", [OneBit(32), NBit(4, 32), TernGrad()], ids=repr)
def test_the_alignment_of_vectors_and_messages_does_not_matter(codec: Codec):
    x, residual = values(101).to(DEVICE), values(101, 1).to(DEVICE)
    kept = residual.clone()
    data, _ = encoded(codec, x[1:], residual[1:], 5)
    assert torch.equal(data.cpu(), defined(codec, x[1:].cpu(), kept[1:].clone().cpu(), 5))
    nbytes = data.numel()
    message = torch.full((nbytes + 6,), 255, dtype=torch.uint8, device=DEVICE)
    out = message[3 : 3 + nbytes]
    given, _ = encoded(codec, x[1:], kept[1:].clone(), 5, out)
    assert given.data_ptr() == out.data_ptr() and torch.equal(out, data)
    assert (message[:3] == 255).all() and (message[3 + nbytes :] == 255).all()
    into = [torch.zeros(101, device=DEVICE) for _ in range(2)]
    add(codec, data, into[0][1:], 1.0, False)
    add(codec, out, into[1][1:], 1.0, False)
    assert same(*into) and into[0][0] == 0


@here
@pytest.mark.parametrize("codec", [OneBit(32), NBit(4, 32), TernGrad()], ids=repr)
def test_a_buffer_of_the_wrong_size_raises_and_is_not_overrun(codec: Codec):
    buffer = torch.zeros(16, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"101 values .* buffer of shape \(8,\)"):
        encoded(codec, values(101).to(DEVICE), None, 5, buffer[:8])
    assert not buffer.any()


@here
@pytest.mark.parametrize("codec", [OneBit(32), OneBit(1056), NBit(4, 32), QSGD(7, 32, "max")], ids=repr)
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_bucket_that_cannot_be_encoded_gets_a_nan_scale_and_keeps_its_residual(codec: Codec, bad: float):
    bucket = bucket_of(codec)
    # One that is not kept in registers takes long to interpret.
    is_long = bucket > 32 and DEVICE != "cuda"
    numel = (1 if is_long else 2) * bucket + 7
    for at in (5,) if is_long else (0, bucket + 5, numel - 1):
        x, residual = values(numel), values(numel, 1)
        x[at] = bad
        spoilt = torch.arange(numel) // bucket == at // bucket
        after = residual.clone().to(DEVICE)
        data, is_good = encoded(codec, x.to(DEVICE), after, 3)
        assert not is_good
        decoded = torch.empty(numel, device=DEVICE)
        add(codec, data, decoded, 1.0, True)
        assert torch.equal(decoded.cpu().isnan(), spoilt), "only its scale is NaN"
        assert same(after.cpu()[spoilt], residual[spoilt])
        defined(codec, torch.where(spoilt, 0.0, x), residual, 3)
        assert same(after.cpu()[~spoilt], residual[~spoilt]), "the others are encoded as ever"
        assert encoded(codec, values(numel).to(DEVICE), after, 3)[1], "the next message is none the worse"


ROWS = OneBit().fitted([torch.Size(shape) for shape in [(3, 99), (5,), (4, 3, 3, 3), (1, 1100), (70,)]])


@here
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_units_that_are_rows(dtype: torch.dtype):
    numel = 3 * 99 + 5 + 4 * 27 + 1100 + 70
    check(ROWS, numel, dtype)
    check(ROWS.part(slice(50, 330)), 280, dtype, feedback=False)


@here
@pytest.mark.parametrize("length", [1, 64, 255, 257, 1024], ids=str)
def test_a_vector_may_be_one_row(length: int):
    check(OneBit().fitted([torch.Size([length])]), length)


@here
def test_a_row_that_cannot_be_encoded_gets_a_nan_scale_and_keeps_its_residual():
    codec = ROWS.part(slice(0, 302))
    x = values(302)
    residual = values(302, 1)
    x[120] = math.nan
    after = residual.clone().to(DEVICE)
    data, is_good = encoded(codec, x.to(DEVICE), after, 3)
    assert not is_good
    decoded = torch.empty(302, device=DEVICE)
    add(codec, data, decoded, 1.0, True)
    assert decoded.isnan().nonzero()[:, 0].tolist() == list(range(99, 198))
    assert same(after.cpu()[99:198], residual[99:198])


@here
def test_sums_beyond_float32_are_found():
    assert not encoded(OneBit(32), torch.full((64,), 3e38, device=DEVICE), None, 0)[1]
    assert not encoded(NBit(4, 32), torch.full((64,), 1e30, device=DEVICE), None, 0)[1]
    assert not encoded(QSGD(127, 32), torch.full((64,), 1e30, device=DEVICE), None, 0)[1]


@here
def test_a_vector_without_a_finite_scale_keeps_its_residual():
    x, residual = values(600), values(600, 1)
    x[555] = math.nan
    after = residual.clone().to(DEVICE)
    data, is_good = encoded(TernGrad(), x.to(DEVICE), after, 3)
    assert not is_good and same(after.cpu(), residual)
    assert data[:4].cpu().view(torch.float32).isnan()


@here
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_threshold_raises_for_a_nonfinite_value_and_restores_the_residual(bad: float):
    x, residual = values(300).to(DEVICE), values(300, 1).to(DEVICE)
    x[250] = bad
    before = residual.clone()
    with pytest.raises(Unencodable, match=f"{bad} at index 250"):
        encoded(Threshold(0.5), x, residual, 0)
    assert torch.allclose(residual, before, rtol=0, atol=1e-4) and residual[250] == before[250]


@here
def test_a_threshold_message_with_wrong_indices_raises():
    codec, x = Threshold(8.0), torch.zeros(3000, device=DEVICE)
    x[[5, 2999]] = 9.0
    data, _ = encoded(codec, x, None, 0)
    for wrong in ([2998 * 2, 5 * 2], [5 * 2, 5 * 2], [5 * 2, 3000 * 2], [5 * 2, -1]):
        hostile = data.clone()
        hostile[16:].view(torch.int32).copy_(torch.tensor(wrong))
        with pytest.raises(ValueError, match=r"Threshold.*ascend"):
            add(codec, hostile, torch.zeros(3000, device=DEVICE), 1.0, False)


@here
@pytest.mark.parametrize("codec", [OneBit(), NBit(), QSGD(), TernGrad()], ids=repr)
def test_an_empty_vector_is_an_empty_message(codec: Codec):
    nothing = torch.empty(0, device=DEVICE)
    data, is_good = encoded(codec, nothing, nothing, 0)
    assert is_good and data.numel() == codec.nbytes(0) == 0
    add(codec, data, nothing, 1.0, False)


@on_gpu
@pytest.mark.parametrize("codec", [OneBit(), NBit(), QSGD()], ids=repr)
def test_a_nonfinite_value_raises_an_error_with_its_index(codec: Codec):
    x, residual = values(5121).to(DEVICE), values(5121, 1).to(DEVICE)
    before = residual.clone()
    x[700] = math.inf
    with pytest.raises(Unencodable, match="inf at index 700"):
        kernels.encode(codec, x, residual)
    assert torch.allclose(residual, before, rtol=1e-5, atol=1e-4)


@on_gpu
def test_vectors_beyond_2_31_values():
    if torch.cuda.mem_get_info()[0] < 32 << 30:
        pytest.skip("needs 32 GB of the GPU's memory")
    codec, numel, at = OneBit(), 2**31 + 512 * 1000 + 7, 2**31 - 512 * 77
    x = torch.empty(numel, dtype=torch.bfloat16, device=DEVICE).normal_()
    residual, rest = torch.zeros(numel, device=DEVICE), torch.zeros(numel - at, device=DEVICE)
    data, part = kernels.encode(codec, x, residual), kernels.encode(codec, x[at:], rest)
    assert same(residual[at:], rest)
    into, others = torch.zeros(numel, device=DEVICE), torch.zeros(numel - at, device=DEVICE)
    kernels.add(codec, data, into)
    kernels.add(codec, part, others)
    assert same(into[at:], others)
