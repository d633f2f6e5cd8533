"""Kernels for GPUs, compiled by Triton: a codec and its error feedback, while a part of the vector is in registers.

Sums are in the order of `layout.row_sums`, value by value in 32 lanes and then by halves.  Divisions round to
nearest, and there is no fused multiply-add.  So bytes, residuals and sums are those of the definitions in plain
torch, bit for bit.

Encoding waits for one number, which tells whether all values could be encoded.  Adding does not wait, except to check
that the indices of a sparse message are within the vector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.codecs.kernels import Kernel, gpu_one_bit, gpu_quantisers, gpu_threshold
from paceline.codecs.n_bit import NBit
from paceline.codecs.one_bit import OneBit
from paceline.codecs.qsgd import QSGD, TernGrad
from paceline.codecs.threshold import AdaptiveThreshold, Threshold

if TYPE_CHECKING:
    from paceline.codecs.codec import Codec

_quantisers = Kernel(gpu_quantisers.encode, gpu_quantisers.add)
_threshold = Kernel(gpu_threshold.encode, gpu_threshold.add)

KERNELS: dict[type[Codec], Kernel] = {
    OneBit: Kernel(gpu_one_bit.encode, gpu_one_bit.add),
    NBit: _quantisers,
    QSGD: _quantisers,
    TernGrad: _quantisers,
    Threshold: _threshold,
    AdaptiveThreshold: _threshold,
}
