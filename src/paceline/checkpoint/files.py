"""Files: written in whole or not at all, and safely on the disk before anything refers to them.

`write_tensors` writes the format of safetensors (a header in JSON, then all bytes) one piece at a time: the
library would copy the whole state first.  `TensorFile` compares each tensor with its hash: a disk can change what it
keeps.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from paceline.checkpoint.plain import NAMES, dtype_of

PIECE = 1 << 22  # Bytes that are written at once.
HEADER_LIMIT = 100_000_000  # As safetensors has it.


@contextmanager
def replacing(path: Path) -> Generator[BufferedWriter]:
    """A file that takes the place of `path` at the end of the block; after an error nothing has changed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> str:
    """Write a file; the hash of its bytes."""
    data = text.encode()
    with replacing(path) as file:
        file.write(data)
    return hashlib.sha256(data).hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's values, in its memory if they are there in order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(cast("Any", flat.view(torch.uint8).numpy())) if flat.numel() else memoryview(b"")


def digest_of(tensor: Tensor) -> str:
    """The hash of a tensor's bytes."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ValueError(f"a checkpoint cannot hold {name}, of {tensor.dtype}: safetensors has no such type")
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            data = bytes_of(tensor)
            for start in range(0, len(data), PIECE):
                file.write(data[start : start + PIECE])


def refuse_links(path: Path, broken: Callable[[str], Exception]) -> None:
    """Raise the error that `broken` makes if this is a link, a pipe, or another thing that is no file of its own."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # Reading says so.
    if not stat.S_ISREG(mode):
        raise broken("it is no file of its own" if not stat.S_ISLNK(mode) else "it is a link, and no file of its own")


class TensorFile:
    """Reads the tensors of a safetensors file one by one."""

    def __init__(self, path: Path, broken: Callable[[str], Exception]) -> None:
        """`broken` makes an error from what is wrong with the file."""
        self._path = path
        self._broken = broken
        refuse_links(path, broken)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 0 < length <= min(HEADER_LIMIT, size - 8):
                    raise broken("its header is cut short, or it is no safetensors file")
                self._header = json.loads(file.read(length))
        except FileNotFoundError:
            raise broken("the file is missing") from None
        except (ValueError, RecursionError):
            raise broken("its header is not readable") from None
        if not isinstance(self._header, dict):
            raise broken("its header is not readable")
        self._start = 8 + length
        self._size = size

    def tensor(self, name: str, digest: str) -> Tensor:
        """A tensor, whose bytes must have that hash."""
        try:
            entry = self._header[name]
            dtype, shape = dtype_of(entry["dtype"]), [int(n) for n in entry["shape"]]
            first, last = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise self._broken(f"its header has no tensor {name!r}, or not its type and place") from None
        nbytes = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or last - first != nbytes or not 0 <= first <= last <= self._size - self._start:
            raise self._broken(f"it ends before the tensor {name!r}, or its header is wrong")
        data = bytearray(nbytes)
        with self._path.open("rb") as file:
            file.seek(self._start + first)
            if file.readinto(data) != nbytes:
                raise self._broken(f"it ends before the tensor {name!r}")
        if hashlib.sha256(data).hexdigest() != digest:
            raise self._broken(f"the tensor {name!r} is not what was written: its bytes have another hash")
        return torch.frombuffer(data, dtype=dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)
