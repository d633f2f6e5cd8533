"""The wire format: a message is a header in MessagePack and then its tensors, each in a frame or at a location in
shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, get_args

import msgspec
import torch
import zmq
from torch import Tensor

from paceline.protocol.messages import Message, encode
from paceline.transport.segments import Location

Name = Literal["float32", "float16", "bfloat16", "float64", "uint8", "int8", "int16", "int32", "int64", "bool"]
Shape = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=2**62)], ...], msgspec.Meta(max_length=64)]
DTYPES: dict[Name, torch.dtype] = {name: getattr(torch, name) for name in get_args(Name)}
NAMES: dict[torch.dtype, Name] = {dtype: name for name, dtype in DTYPES.items()}


Form = tuple[Name, Shape, Location | None]


class Header(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The first frame of a message: the form of each tensor, and the message without its tensors.

    Each tensor follows in a frame of its own, unless its form has a location in its sender's memory.
    """

    tensors: tuple[Form, ...]
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()


def flat_bytes(tensor: Tensor) -> Tensor:
    """The tensor's own memory as bytes; a copy's if it is not contiguous or not on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def in_frame(frame: zmq.Frame, name: Name, shape: tuple[int, ...]) -> Tensor:
    """The frame's memory as a tensor, which keeps the frame alive."""
    check_form(name, shape, len(frame))
    if len(frame) == 0:
        return torch.empty(shape, dtype=DTYPES[name])
    return typed(torch.frombuffer(frame.buffer, dtype=torch.uint8), name, shape)


def check_form(name: Name, shape: tuple[int, ...], nbytes: int) -> None:
    if math.prod(shape) * DTYPES[name].itemsize != nbytes:
        raise ValueError(f"a {name} tensor of shape {shape} came with {nbytes} bytes")
    # torch computes the strides of an empty tensor too, and they must not overflow.
    if math.prod(max(1, n) for n in shape) >= 2**63:
        raise ValueError(f"an empty tensor of shape {shape} has no strides")


def typed(raw: Tensor, name: Name, shape: tuple[int, ...]) -> Tensor:
    if name == "bool" and raw.max() > 1:
        raise ValueError("a bool tensor came with bytes other than 0 and 1")
    # ZeroMQ packs small frames into one buffer, wherever they fall.
    straight = raw if raw.data_ptr() % DTYPES[name].itemsize == 0 else raw.clone()
    return straight.view(DTYPES[name]).view(shape)


def header_of(message: Message, locations: Sequence[Location | None]) -> bytes:
    """The first frame of a message whose tensors are at these locations, or follow in frames."""
    if not locations:
        return _encoder.encode(Header((), msgspec.Raw(encode(message))))
    forms = tuple[Form, ...](
        (NAMES[tensor.dtype], tuple(tensor.shape), location)
        for tensor, location in zip(message.tensors(), locations, strict=True)
    )
    return _encoder.encode(Header(forms, msgspec.Raw(encode(message))))
