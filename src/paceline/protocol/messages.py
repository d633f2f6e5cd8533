"""Messages: one class for each message that ranks send each other, with fields named by meaning.

A subclass of `Message` is a message type of its own: its name is its tag on the wire.  A strategy may define message
types in its own file. Tensors are ordinary fields; on the wire a field holds the tensor's number, and the tensors
follow in frames of their own.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import count
from typing import Annotated, Any, Self, get_args

import msgspec
from msgspec import Meta
from torch import Tensor

Rank = Annotated[int, Meta(ge=0, le=2**31)]
Count = Annotated[int, Meta(ge=0, le=2**31)]
Version = Annotated[int, Meta(ge=0, le=2**62)]
Number = Annotated[int, Meta(ge=0, le=2**62)]
Rate = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=2000)]

UNSET_SRC = -1


class UnknownType(ValueError):
    """A message has a tag that no message type has."""


def tag_of(name: str) -> str:
    """A message type's tag, from the name of its class.

    >>> tag_of("DrawWork"), tag_of("Strategy.<locals>.Hello")
    ('draw work', 'hello')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name.rpartition(".")[2]).lower()


class Message(msgspec.Struct, kw_only=True, tag=tag_of, omit_defaults=True, forbid_unknown_fields=True, eq=False):
    """What one rank sends another.  `src` is the sender's rank: the receiver sets it, and it does not travel."""

    src: int = UNSET_SRC

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        tag, known = tag_of(cls.__qualname__), TYPES.get(tag_of(cls.__qualname__))
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"message type {cls.__module__}.{cls.__qualname__}: {known.__module__}.{known.__qualname__} has "
                f"the tag {tag!r}; "
                "give the class another name"
            )
        TYPES[tag] = cls

    @property
    def tag(self) -> str:
        """The message type's name on the wire and in error texts."""
        return str(self.__struct_config__.tag)

    def tensors(self) -> list[Tensor]:
        """All tensors of this message, in the order of its fields."""
        found: list[Tensor] = []
        for name in _tensor_fields(type(self)):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                found.append(value)
            elif value is not None:
                found.extend(value)
        return found

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def with_tensors(self, tensors: Iterable[Tensor]) -> Self:
        """A copy with other tensors, given in the order of `tensors()`."""
        new, given = copy.copy(self), iter(tensors)
        for name in _tensor_fields(type(self)):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                setattr(new, name, next(given))
            elif value is not None:
                setattr(new, name, tuple(next(given) for _ in value))
        return new


TYPES: dict[str, type[Message]] = {}


class Numbered(Message, kw_only=True):
    """A message with the number of a request.  `incarnation` counts how often the worker that asked was declared dead
    before."""

    request_id: Number = 0
    incarnation: Count = 0


class Request(Numbered):
    """A message that wants a reply.  Its sender numbers its requests from 1 on."""


class Reply(Numbered):
    """The reply to a request: it has the request's number and incarnation."""


class Wait(Reply):
    """The receiver has the request; its reply comes later."""


class Refused(Reply):
    """The receiver does not do what was asked for, and why."""

    reason: Text


class Away(Reply):
    """The receiver does not count the sender as a member (any longer), and why.  The sender may join again."""

    reason: Text


class Beat(Message):
    """A heartbeat: its sender is alive.  Mailboxes send and take these by themselves."""


class Returned(Message):
    """A server that was killed is back, as it was: what it has not answered is to be sent again."""


class Event(Message):
    """Something that a rank finds out by itself.  It never travels."""


class PeerDied(Event):
    """The process of rank `src` has ended."""


class PeerSuspected(Event):
    """Rank `src` has sent no heartbeat for too long.  It may be alive."""


class PeerReturned(Event):
    """Rank `src` was suspected, and has sent a heartbeat."""


def reply_to(request: Numbered, reply: Reply) -> Reply:
    """Give a reply the number and the incarnation of the request."""
    reply.request_id = request.request_id
    reply.incarnation = request.incarnation
    return reply


def encode(message: Message) -> bytes:
    """The message without its tensors, which are to be sent after it in the order of `tensors()`."""
    if message.src != UNSET_SRC:
        message = copy.copy(message)
        message.src = UNSET_SRC
    if not _tensor_fields(type(message)):
        return _encoder.encode(message)
    numbers = count()
    return msgspec.msgpack.encode(message, enc_hook=lambda _: next(numbers))


class _Tagged(msgspec.Struct):
    type: Annotated[str, Meta(max_length=64)]


_tagged = msgspec.msgpack.Decoder(_Tagged)
# For messages without tensors, which need no hook: most messages are such, and a codec is made only once.
_encoder = msgspec.msgpack.Encoder()


def decode(body: bytes | msgspec.Raw, tensors: Sequence[Tensor], src: int) -> Message:
    """The message that `encode` has written, with these tensors; ValueError or MsgspecError say what is wrong with
    it."""
    tag = _tagged.decode(body).type
    cls = TYPES.get(tag)
    if cls is None:
        raise UnknownType(f"there is no message type {tag!r}")
    if issubclass(cls, Event):
        raise ValueError(f"{tag!r} is an event, which each rank finds out by itself")
    message = _filled(body, cls, tensors) if _tensor_fields(cls) else _decoder(cls).decode(body)
    if tensors and not _tensor_fields(cls):
        raise ValueError(f"its fields hold 0 tensors and {len(tensors)} came")
    if message.src != UNSET_SRC:
        raise ValueError(f"it says itself that it is from rank {message.src}")
    if isinstance(message, Numbered) and message.request_id < 1:
        raise ValueError(f"a {tag!r} must have a request_id of at least 1")
    message.src = src
    return message


def _filled(body: bytes | msgspec.Raw, cls: type[Message], tensors: Sequence[Tensor]) -> Message:
    """The message in `body`, with these tensors in its fields."""
    numbers = count()

    def tensor(_: type, given: object) -> Tensor:
        number = next(numbers)
        if type(given) is not int or given != number or number >= len(tensors):
            raise ValueError(f"a tensor field holds {given!r} and should hold {number}, of {len(tensors)} tensors")
        return tensors[number]

    message = msgspec.msgpack.decode(body, type=cls, dec_hook=tensor)
    if (used := next(numbers)) != len(tensors):
        raise ValueError(f"its fields hold {used} tensors and {len(tensors)} came")
    return message


@cache
def _decoder(cls: type[Message]) -> msgspec.msgpack.Decoder[Message]:
    return msgspec.msgpack.Decoder(cls)


@cache
def _tensor_fields(cls: type[Message]) -> tuple[str, ...]:
    """The fields that hold a tensor, a tensor or None, or a tuple of tensors."""
    return tuple(f.name for f in msgspec.structs.fields(cls) if f.type is Tensor or Tensor in get_args(f.type))
