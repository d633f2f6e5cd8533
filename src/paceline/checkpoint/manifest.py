"""Manifest: what a checkpoint is, and which files belong to it.  It is written last: without it there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import nn

from paceline.checkpoint.files import write_text

NAME = "manifest.json"
FORMAT = 1  # The layout of the folder; another one is refused.


@dataclass(frozen=True)
class File:
    """A file of a checkpoint.  Of a tree the hash is that of its bytes; tensors have theirs in the tree."""

    nbytes: int
    sha256: str | None = None


@dataclass(frozen=True)
class Layout:
    """A tensor of the model: its name, its shape, and its type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"'{self.name}' {list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Model:
    """The parameters that are trained, in the order in which states hold them, and the buffers."""

    parameters: Sequence[Layout] = ()
    buffers: Sequence[Layout] = ()
    names: Sequence[tuple[str, str]] = ()  # Of all tensors of a state_dict, and for each the name that it has above.

    @classmethod
    def of(cls, model: nn.Module, trained: Sequence[str]) -> Model:
        """`trained` are the names of the parameters that are trained."""
        every = dict(model.named_parameters()) | dict(model.named_buffers())
        first = {id(tensor): name for name, tensor in reversed(every.items())}
        entries = model.state_dict(keep_vars=True).items()
        return cls(
            tuple(layout_of(name, every[name]) for name in trained),
            tuple(layout_of(name, b) for name, b in model.named_buffers()),
            tuple((name, first[id(tensor)]) for name, tensor in entries if id(tensor) in first),
        )

    def difference(self, other: Model) -> str | None:
        """How another model differs from this one, in words; None if it does not."""
        for kind, mine, theirs in (
            ("parameter", self.parameters, other.parameters),
            ("buffer", self.buffers, other.buffers),
        ):
            for a, b in zip(mine, theirs, strict=False):
                if a != b:
                    return f"it has the {kind} {a}, and this one has {b}"
            if len(mine) != len(theirs):
                return f"it has {len(mine)} {kind}s, and this one has {len(theirs)}"
        return None


def layout_of(name: str, tensor: torch.Tensor) -> Layout:
    return Layout(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint that can be said without reading a tensor."""

    format: int
    number: int  # It counts the checkpoints of a folder.  The newest one has the highest.
    written: str  # The time.
    paceline: str
    torch: str
    strategy: str
    step: int
    workers: int
    model: Model  # The whole of it, also of a model in stages.
    settings: str = ""  # Of the strategy, as a call.
    shards: int = 0  # The servers that have saved a state.
    missing: Sequence[int] = ()  # Workers that were dead, and not replaced.
    stages: int = 1  # The processes of each worker, each of which has a stage of the model.
    files: dict[str, File] = field(default_factory=dict[str, File])

    def write(self, folder: Path) -> None:
        text = msgspec.json.format(msgspec.json.encode(self), indent=1).decode()
        write_text(folder / NAME, text + "\n")


def read(path: Path) -> Manifest:
    """The manifest in a folder.  Raises ValueError with what is wrong with it."""
    data = (path / NAME).read_bytes()
    try:
        found = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        version = msgspec.json.decode(found.get("format", b"null"))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not readable ({error})") from None
    if version != FORMAT:
        raise ValueError(f"it was written in format {version}, and this version of paceline reads format {FORMAT}")
    try:
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not readable ({error})") from None
