"""Wire formats, one a file.  A new one joins `CODECS` here and is then listed, parsed and put under the laws."""

from paceline.codecs.codec import Codec, ErrorFeedback
from paceline.codecs.floats import Fp16, Fp32
from paceline.codecs.one_bit import OneBit

CODECS: tuple[type[Codec], ...] = (Fp32, Fp16, OneBit)

__all__ = ["CODECS", "Codec", "ErrorFeedback", "Fp16", "Fp32", "OneBit"]
