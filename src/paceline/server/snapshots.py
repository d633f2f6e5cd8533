"""Messages as plain values, for the snapshots of servers."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any, TypeVar

from paceline.protocol.messages import Message, decode, encode

M = TypeVar("M", bound=Message)


def plain_message(message: Message) -> list[Any]:
    """A message with its sender.  Its tensors are not copied."""
    return [message.src, b64encode(encode(message)).decode(), message.tensors()]


def message_of(plain: list[Any], kind: type[M]) -> M:
    src, body, tensors = plain
    message = decode(b64decode(body), [t.clone() for t in tensors], src)
    assert isinstance(message, kind)
    return message
