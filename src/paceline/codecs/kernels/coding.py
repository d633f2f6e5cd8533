"""The entropy coder on the CPU: about a nanosecond per byte, without branches that depend on the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.codec import Unencodable
from paceline.codecs.entropy import LONGEST_TABLE, LOW, PRECISION, STATES, TOTAL, Entropy, frequencies, read, written
from paceline.codecs.kernels import Kernel
from paceline.codecs.kernels.cpu_parts import compiled

if TYPE_CHECKING:
    from paceline.codecs.codec import Codec

U16 = np.uint64(16)
U32 = np.uint64(32 - PRECISION)
U44 = np.uint64(44)
BITS = np.uint64(PRECISION)
MASK = np.uint64(TOTAL - 1)
LOWEST = np.uint64(LOW)
ONE = np.uint64(1)
ZERO = np.uint64(0)
BYTE = np.uint64(255)
WORD = np.uint64(0xFFFF)


@compiled
def counted(data: Any) -> Any:
    """How often each byte value occurs; in four tables, because equal bytes in a row would wait for each other."""
    tables = np.zeros((4, 256), np.int64)
    whole = len(data) // 4 * 4
    for i in range(0, whole, 4):
        tables[0, data[i]] += 1
        tables[1, data[i + 1]] += 1
        tables[2, data[i + 2]] += 1
        tables[3, data[i + 3]] += 1
    for i in range(whole, len(data)):
        tables[0, data[i]] += 1
    return tables.sum(0)


@compiled
def push(state: Any, symbol: Any, codes: Any, words: Any, at: int) -> tuple[Any, int]:
    """Add a byte to a state.  If the state must emit 16 bits, they are stored before `at`.

    The quotient is a product with 2**44 / f, rounded up: exact for all states below f << 20.
    """
    f = codes[symbol, 0]
    start = codes[symbol, 1]
    inverse = codes[symbol, 2]
    words[at - 1] = state & WORD
    full = state >= f << U32
    state = state >> U16 if full else state
    at = at - 1 if full else at
    quotient = (state * inverse) >> U44
    return (quotient << BITS) + (state - quotient * f) + start, at


@compiled
def encode_bytes(data: Any, codes: Any, words: Any, states: Any) -> int:
    """Fill `words` from its end; the index of the first one, or -1 if they do not fit."""
    at = len(words)
    i = len(data)
    while i % STATES:
        i -= 1
        states[i % STATES], at = push(states[i % STATES], data[i], codes, words, at)
    a = states[0]
    b = states[1]
    c = states[2]
    d = states[3]
    while i:
        if at <= STATES:
            return -1
        d, at = push(d, data[i - 1], codes, words, at)
        c, at = push(c, data[i - 2], codes, words, at)
        b, at = push(b, data[i - 3], codes, words, at)
        a, at = push(a, data[i - 4], codes, words, at)
        i -= 4
    states[0] = a
    states[1] = b
    states[2] = c
    states[3] = d
    return at


@compiled
def pop(state: Any, slots: Any, words: Any, at: int) -> tuple[Any, Any, int]:
    """The last byte in a state, the state without it, and the index of the next word."""
    slot = np.uint64(slots[state & MASK])
    state = (((slot >> np.uint64(20)) + ONE) * (state >> BITS)) + ((slot >> np.uint64(8)) & MASK)
    empty = state < LOWEST
    state = (state << U16) | np.uint64(words[at]) if empty else state
    at = at + 1 if empty else at
    return np.uint8(slot & BYTE), state, at


@compiled
def decode_bytes(data: Any, slots: Any, words: Any, states: Any) -> bool:
    """Fill `data`; False if the words, of which the last four are padding, hold more or fewer bytes."""
    at = 0
    end = len(words) - STATES
    i = 0
    a = states[0]
    b = states[1]
    c = states[2]
    d = states[3]
    while i + STATES <= len(data):
        data[i], a, at = pop(a, slots, words, at)
        data[i + 1], b, at = pop(b, slots, words, at)
        data[i + 2], c, at = pop(c, slots, words, at)
        data[i + 3], d, at = pop(d, slots, words, at)
        i += 4
        if at > end:
            return False
    states[0] = a
    states[1] = b
    states[2] = c
    states[3] = d
    while i < len(data):
        data[i], states[i % STATES], at = pop(states[i % STATES], slots, words, at)
        i += 1
    return at == end and states[0] == LOWEST and states[1] == LOWEST and states[2] == LOWEST and states[3] == LOWEST


def compress(data: Tensor) -> Tensor | None:
    """The compressed bytes, without the header; None if they are not fewer."""
    source: Any = data.contiguous().numpy()
    table = np.array(frequencies(counted(source).tolist()), dtype=np.uint64)
    codes = np.zeros((256, 3), np.uint64)
    codes[:, 0] = table
    codes[1:, 1] = np.cumsum(table)[:-1]
    codes[:, 2] = [(1 << 44) // int(f) + 1 if f else 0 for f in table]
    head = written(table.tolist())
    states = np.full(STATES, LOW, np.uint64)
    words = np.empty(len(source) // 2 + 2 * STATES, np.uint16)
    at = encode_bytes(source, codes, words, states)
    coded = head + states.astype("<u4").tobytes()
    if at < 0 or len(coded) + 2 * (len(words) - at) >= len(source):
        return None
    out = torch.empty(len(coded) + 2 * (len(words) - at), dtype=torch.uint8)
    out[: len(coded)] = torch.frombuffer(bytearray(coded), dtype=torch.uint8)
    out.numpy()[len(coded) :] = words[at:].view(np.uint8)
    return out


def expand(coded: Tensor, nbytes: int) -> Tensor:
    """The `nbytes` bytes that `compress` was given.  Raises ValueError if `coded` is not its result."""
    source: Any = coded.contiguous().numpy()
    table, at = read(source[:LONGEST_TABLE].tobytes())
    body = source[at:]
    if (
        len(source) % 2
        or len(body) < 4 * STATES
        or (states := body[: 4 * STATES].copy().view("<u4").astype(np.uint64)).min() < LOW
    ):
        raise ValueError("its states are missing or too small")
    f = np.array(table, dtype=np.uint32)
    symbols = np.repeat(np.arange(256, dtype=np.uint32), f)
    within = np.arange(TOTAL, dtype=np.uint32) - (np.cumsum(f, dtype=np.uint32) - f)[symbols]
    slots = (f[symbols] - np.uint32(1)) << np.uint32(20) | within << np.uint32(8) | symbols
    words = np.zeros(len(body) // 2 - 2 * STATES + STATES, np.uint16)
    words.view(np.uint8)[: -2 * STATES] = body[4 * STATES :]
    data = torch.empty(nbytes, dtype=torch.uint8)
    if not decode_bytes(data.numpy(), slots, words, states):
        raise ValueError("its words hold more or fewer bytes")
    return data


def encode_entropy(
    codec: Codec, x: Tensor, residual: Tensor | None, seed: int, out: Tensor | None
) -> tuple[Tensor, bool]:
    codec = cast(Entropy, codec)
    kernel = kernels.find(codec.codec, x.device) if codec.is_random else None
    try:
        if kernel is None:
            rng = torch.Generator().manual_seed(seed) if codec.is_random else None
            data = kernels.encode(codec.codec, x, residual, rng)
        else:
            data, is_good = kernel.encode(codec.codec, x, residual, seed, None)
            if not is_good:
                kernels._undo(codec.codec, kernel, x, residual, data)  # pyright: ignore[reportPrivateUsage]
    except Unencodable as error:
        raise Unencodable(f"{codec}: {error}", error.at) from error
    data = codec.wrapped(data)
    return (data if out is None else out.copy_(data)), True


def add_entropy(codec: Codec, data: Tensor, into: Tensor, weight: float, fresh: bool) -> None:
    codec = cast(Entropy, codec)
    inner = codec.unwrapped(data, into.numel())
    try:
        kernels.add(codec.codec, inner, into, weight, fresh)
    except ValueError as error:
        codec.malformed(data, into.numel(), str(error))


KERNELS: dict[type[Codec], Kernel] = {Entropy: Kernel(encode_entropy, add_entropy)}
