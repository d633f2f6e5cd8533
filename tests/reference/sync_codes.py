"""Codes: what a message of each wire format decodes to.  Values travel in single precision.

Sources: CNTK's manual and Seide et al. 2014 (1 bit), CNTK's quantiser (2 to 16 bits), Aji and Heafield 2017 (top-k),
Strom 2015 (thresholds), Alistarh et al. 2017 (QSGD), Wen et al. 2017 (TernGrad), IEEE 754 and the OCP's FP8 formats.
"""

from __future__ import annotations

import numpy as np


def single(u):
    return np.float32(u).astype(np.float64)


def one_bit(u, threshold=None):
    """The mean of the values from the threshold on, which is the mean of all or, in CNTK, 0; and of those below."""
    high = u >= (u.mean() if threshold is None else threshold)
    up = single(u[high].mean()) if high.any() else 0.0
    down = single(u[~high].mean()) if (~high).any() else 0.0
    return np.where(high, up, down)


def by_cuts(code, u, cuts):
    """Each part of the vector between two cuts by itself."""
    return np.concatenate([code(part) for part in np.split(u, cuts)])


def by_buckets(code, u, bucket):
    return by_cuts(code, u, range(bucket, len(u), bucket))


def sum_of(u):
    """In single precision, the upper half added to the lower one: the order matters to the last bit."""
    u = np.pad(u, (0, 2 ** int(np.ceil(np.log2(max(len(u), 32)))) - len(u)))
    while len(u) > 1:
        u = u[: len(u) // 2] + u[len(u) // 2 :]
    return u[0]


def n_bit(u, bits):
    """An odd number of equal slots from -4 to 4 deviations, one of them centred on 0; one more code for the top."""
    u = np.float32(u)
    centre = 2 ** (bits - 1) - 1
    slot = np.sqrt(sum_of(u * u) / np.float32(len(u))) * np.float32(8 / (2 * centre + 1))
    code = np.clip(np.floor(u * (1 / slot) + np.float32(0.5)), -centre, centre + 1)
    return single(np.minimum(code, np.float32(centre + 0.5)) * slot)


def fp8(u, mantissa=3, least=-6, top=448.0):
    """The largest value of the bucket becomes the largest of the format; ties go to even."""
    u = np.float32(u)
    largest = np.abs(u).max()
    scaled = u * (np.float32(top) / largest)
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(scaled), 1e-30))), least)
    step = 2.0 ** (exponent - mantissa)
    code = np.clip(np.round(scaled / step) * step, -top, top)
    return single(np.float32(code) * (largest / np.float32(top)))


def fp16(u):
    return np.float32(u).astype(np.float16).astype(np.float64)


def bfloat16(u):
    """The upper 16 bits of single precision, ties to even."""
    bits = np.float32(u).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def largest_of(u, k):
    return np.argsort(-np.abs(u), kind="stable")[:k]


def only(u, kept):
    sent = np.zeros_like(u)
    sent[kept] = single(u[kept])
    return sent


def top_k(u, ratio):
    return only(u, largest_of(u, max(1, int(ratio * len(u)))))


def threshold(u, tau):
    """Values that reach tau, as +tau or -tau."""
    tau = single(tau)
    return tau * np.sign(u) * (np.abs(u) >= tau)


def qsgd_moments(v, levels, norm):
    """The mean and the variance of what a random rounding to `levels` levels of the norm decodes to."""
    scale = np.abs(v).max() if norm == "max" else np.linalg.norm(v)
    part = levels * np.abs(v) / scale % 1
    return v, (scale / levels) ** 2 * part * (1 - part)


def terngrad_moments(g, clip):
    """Values are -s, 0 or s with the right mean; s is the largest value, after clipping to `clip` deviations from 0."""
    if clip is not None:
        bound = clip * np.sqrt((g**2).mean())
        g = np.clip(g, -bound, bound)
    s = np.abs(g).max()
    return g, s * np.abs(g) - g**2
