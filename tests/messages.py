"""Message types of the tests.  A tag belongs to one class in a process, so all tests share these."""

from __future__ import annotations

from torch import Tensor

from paceline.protocol.messages import Message, Request


class Note(Message):
    """Any numbers, text and tensors."""

    number: int = 0
    other: int = 0
    text: str = ""
    values: tuple[Tensor, ...] = ()


class Hello(Message):
    pass


class Goodbye(Message):
    pass


class TheEnd(Message):
    """The last message of a sequence."""


class Dance(Request):
    """A request that no server knows."""
