"""Fashion-MNIST (Xiao, Rasul, Vollgraf 2017, MIT licence): 70,000 grey images of 28x28 pixels, in ten classes.

It is not part of the package.  `load` reads its four IDX files, compressed or not, from a folder.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

PACKAGE = "dataset-fashion-mnist"
FOLDER = Path("/usr/share/datasets/fashion-mnist")  # Where Debian's package puts the files.
CLASSES = 10


class NoData(FileNotFoundError, ValueError):
    """The folder does not contain the data set."""


@dataclass(frozen=True, slots=True)
class FashionMnist:
    """Images (n, 28, 28) and labels (n,), all uint8."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(path: str | os.PathLike[str] | None = None) -> FashionMnist:
    """Read the data set from the folder `path`, by default that of Debian's package `dataset-fashion-mnist`."""
    folder = FOLDER if path is None else Path(path)
    return FashionMnist(*_part(folder, "train"), *_part(folder, "t10k"))


def _part(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    image_file = _found(folder, f"{name}-images-idx3-ubyte")
    label_file = _found(folder, f"{name}-labels-idx1-ubyte")
    images = read_idx(image_file, dimensions=3)
    labels = read_idx(label_file, dimensions=1)
    if len(images) != len(labels):
        raise ValueError(f"{image_file} holds {len(images)} images, but {label_file} holds {len(labels)} labels")
    if len(labels) and (largest := int(labels.max())) >= CLASSES:
        raise ValueError(f"{label_file} holds the label {largest}; labels are 0 to {CLASSES - 1}")
    return images, labels


def _found(folder: Path, name: str) -> Path:
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    raise NoData(
        f"no {name}.gz or {name} in {folder}: install the Debian package {PACKAGE} (apt-get install {PACKAGE}), "
        "or give the folder with the data set's four files, load(path=...)"
    )


def read_idx(path: Path, *, dimensions: int) -> Tensor:
    """The unsigned bytes of an IDX file: a magic number, a 4-byte size of each dimension, then the values."""
    data = _bytes(path)
    begin = 4 + 4 * dimensions
    if len(data) < begin:
        raise ValueError(
            f"{path} holds {len(data)} bytes: the header of an IDX file of {dimensions} dimensions takes {begin}"
        )
    magic = int.from_bytes(data[:4], "big")
    if magic != (wanted := 0x0800 + dimensions):
        raise ValueError(
            f"{path} begins with {magic:#010x}: an IDX file of unsigned bytes in {dimensions} dimensions "
            f"begins with {wanted:#010x}"
        )
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, begin, 4)]
    if len(data) - begin != math.prod(shape):
        fault = "is truncated" if len(data) - begin < math.prod(shape) else "is too long"
        raise ValueError(
            f"{path} {fault}: its header says {math.prod(shape)} values of shape {shape}, "
            f"but it has {len(data) - begin}"
        )
    try:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)[begin:].view(shape)
    except RuntimeError:
        raise ValueError(f"{path}: its header says values of shape {shape}, which no tensor can have") from None


def _bytes(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except EOFError as error:
        raise ValueError(f"{path} is truncated: its compressed data ends too soon") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a valid gzip file: {error}") from error
