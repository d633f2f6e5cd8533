"""The files of Fashion-MNIST are read correctly, and a damaged file is an error that says what is wrong."""

from __future__ import annotations

import gzip
import re

import pytest
import torch

from paceline.data import fashion_mnist
from paceline.data.fashion_mnist import NoData, load

SIZES = {"train": 7, "t10k": 3}


def idx(values: torch.Tensor) -> bytes:
    header = (0x0800 + values.dim()).to_bytes(4, "big") + b"".join(n.to_bytes(4, "big") for n in values.shape)
    return header + bytes(values.flatten().tolist())


@pytest.fixture
def folder(tmp_path):
    """A data set of ten images; its images are compressed, its labels are not."""
    generator = torch.Generator().manual_seed(0)
    for part, n in SIZES.items():
        images = torch.randint(0, 256, (n, 28, 28), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, 10, (n,), dtype=torch.uint8, generator=generator)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    return tmp_path


def test_values_read_are_the_values_written(folder):
    generator = torch.Generator().manual_seed(0)
    data = load(folder)
    for images, labels, n in ((data.images, data.labels, 7), (data.test_images, data.test_labels, 3)):
        assert torch.equal(images, torch.randint(0, 256, (n, 28, 28), dtype=torch.uint8, generator=generator))
        assert torch.equal(labels, torch.randint(0, 10, (n,), dtype=torch.uint8, generator=generator))


def test_compressed_and_plain_files_give_the_same_values(folder):
    before = load(str(folder))
    for part in SIZES:
        images, labels = folder / f"{part}-images-idx3-ubyte.gz", folder / f"{part}-labels-idx1-ubyte"
        (folder / f"{part}-images-idx3-ubyte").write_bytes(gzip.decompress(images.read_bytes()))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels.read_bytes()))
        images.unlink()
        labels.unlink()
    after = load(folder)
    assert torch.equal(before.images, after.images) and torch.equal(before.test_labels, after.test_labels)


def test_error_for_a_missing_data_set_names_the_package_and_the_argument(tmp_path, monkeypatch):
    with pytest.raises(
        NoData, match=rf"no train-images-idx3-ubyte.gz .* in {tmp_path}: .*dataset-fashion-mnist.*load\(path=\.\.\.\)"
    ):
        load(tmp_path)
    monkeypatch.setattr(fashion_mnist, "FOLDER", tmp_path / "usr")
    with pytest.raises(FileNotFoundError, match=f"in {tmp_path / 'usr'}"):
        load()


def damage(folder, name, change):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte"
FAULTS = {
    "another magic number": (
        LABELS,
        lambda b: b"\x00\x00\x08\x03" + b[4:],
        "begins with 0x00000803.*begins with 0x00000801",
    ),
    "a last byte less": (
        LABELS,
        lambda b: b[:-1],
        r"is truncated: its header says 3 values of shape \[3\], but it has 2",
    ),
    "a byte more": (
        LABELS,
        lambda b: b + b"\x00",
        r"is too long: its header says 3 values of shape \[3\], but it has 4",
    ),
    "no whole header": (LABELS, lambda b: b[:6], "holds 6 bytes: the header .* takes 8"),
    "nothing": (LABELS, lambda b: b"", "holds 0 bytes"),
    "an eleventh class": (LABELS, lambda b: b[:-1] + b"\x0a", "holds the label 10; labels are 0 to 9"),
    "fewer labels than images": (LABELS, lambda b: b[:7] + b"\x02" + b[8:-1], "holds 3 images, but .* holds 2 labels"),
    "half a compressed file": (IMAGES, lambda b: b[: len(b) // 2], "is truncated: its compressed data ends too soon"),
    "no compressed file": (IMAGES, lambda b: b"hello, world", "is not a valid gzip file"),
    "a broken compressed file": (IMAGES, lambda b: b[:100] + bytes(50) + b[150:], "is not a valid gzip file"),
    "compressed, of other values": (
        IMAGES,
        lambda b: gzip.compress(gzip.decompress(b)[:-5]),
        "5488 values of shape .* it has 5483",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_error_for_a_damaged_file_names_the_file_and_the_damage(fault, folder):
    name, change, told = FAULTS[fault]
    damage(folder, name, change)
    with pytest.raises(ValueError, match=f"{re.escape(name)}.*{told}" if "images, but" not in told else told):
        load(folder)
