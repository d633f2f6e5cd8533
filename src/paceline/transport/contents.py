"""Contents: what a mailbox can send, and the message in the frames that it has received, or what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import zmq
from torch import Tensor

from paceline.protocol.messages import Message, decode
from paceline.transport.segments import Location, SegmentReader
from paceline.transport.wire import DTYPES, NAMES, Header, Name, check_form, in_frame, typed

_headers = msgspec.msgpack.Decoder(Header)


def sender_of(frame: zmq.Frame) -> tuple[int, int]:
    """The rank and the process of the key with which a message came, which CURVE has verified."""
    rank, process = str(frame.get("User-Id")).split()
    return int(rank), int(process)


def check_tensor(tensor: Tensor, max_nbytes: int | None) -> None:
    """Refuse a tensor that a mailbox with this limit cannot send."""
    if tensor.dtype not in NAMES:
        raise ValueError(f"send of a {tensor.dtype} tensor: a mailbox carries {', '.join(DTYPES)}")
    if max_nbytes is not None and tensor.nbytes > max_nbytes:
        raise ValueError(
            f"send of a tensor of {tensor.nbytes} bytes: this mailbox was made with max_nbytes={max_nbytes}"
        )


def message_in(frames: Sequence[zmq.Frame], reader: SegmentReader | None, max_nbytes: int | None) -> Message:
    """The message in these frames; ValueError or MsgspecError say what is wrong with them.

    `reader` reads the memory of its sender; None: it is on another host.  No tensor may have more than `max_nbytes`.
    """
    header = _headers.decode(frames[0].buffer)
    src, _ = sender_of(frames[0])
    if not header.tensors and len(frames) == 1:
        return decode(header.body, (), src)
    sent = [form for form in header.tensors if form[2] is None]
    if len(sent) != len(frames) - 1:
        raise ValueError(f"its header announces {len(sent)} tensors and {len(frames) - 1} came")
    rest = iter(frames[1:])
    tensors = [
        in_frame(next(rest), name, shape)
        if location is None
        else _in_segment(reader, location, name, shape, max_nbytes)
        for name, shape, location in header.tensors
    ]
    return decode(header.body, tensors, src)


def _in_segment(
    reader: SegmentReader | None, location: Location, name: Name, shape: tuple[int, ...], max_nbytes: int | None
) -> Tensor:
    if reader is None:
        raise ValueError("its tensor is in memory of its sender, which is not on this host")
    if max_nbytes is not None and location.nbytes > max_nbytes:
        raise ValueError(f"its tensor has {location.nbytes} bytes: this mailbox was made with max_nbytes={max_nbytes}")
    check_form(name, shape, location.nbytes)
    return typed(reader.open(location), name, shape)
