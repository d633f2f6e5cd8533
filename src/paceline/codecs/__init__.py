"""Wire formats, one a file."""

# Written by `python -m tools.exports`, which `make format` runs.  Do not edit.

from paceline.codecs.codec import Codec, CodecState, ErrorFeedback, Unencodable
from paceline.codecs.combine import Chunked, PerTensor
from paceline.codecs.dgc import DGC
from paceline.codecs.entropy import Entropy
from paceline.codecs.floats import BFloat16, Fp8, Fp16, Fp32
from paceline.codecs.n_bit import NBit
from paceline.codecs.one_bit import OneBit
from paceline.codecs.power_sgd import PowerSGD
from paceline.codecs.qsgd import QSGD, TernGrad
from paceline.codecs.threshold import AdaptiveThreshold, Threshold
from paceline.codecs.top_k import TopK

CODECS: tuple[type[Codec], ...] = (
    PerTensor,
    Chunked,
    DGC,
    Entropy,
    Fp32,
    Fp16,
    BFloat16,
    Fp8,
    NBit,
    OneBit,
    PowerSGD,
    QSGD,
    TernGrad,
    Threshold,
    AdaptiveThreshold,
    TopK,
)

__all__ = [
    "CODECS",
    "DGC",
    "QSGD",
    "AdaptiveThreshold",
    "BFloat16",
    "Chunked",
    "Codec",
    "CodecState",
    "Entropy",
    "ErrorFeedback",
    "Fp8",
    "Fp16",
    "Fp32",
    "NBit",
    "OneBit",
    "PerTensor",
    "PowerSGD",
    "TernGrad",
    "Threshold",
    "TopK",
    "Unencodable",
]
