"""Part: what one worker adds to a checkpoint: a tree in JSON, and the tensors that no other file has.

Workers of a synchronous method have the same parameters.  A tensor whose hash the first worker has too is written once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint.files import TensorFile, digest_of, write_tensors, write_text
from paceline.checkpoint.manifest import File
from paceline.checkpoint.plain import flattened, restored


class BrokenCheckpoint(ValueError):
    """A file of a checkpoint is missing, cut short, or not what was written."""


@dataclass(frozen=True)
class Place:
    """Where a tensor is: its worker, its name there, and the hash of its bytes."""

    worker: int | str
    name: str
    sha256: str


def shard_part(index: int) -> str:
    """The name of what a server has saved, in the place of a worker's number."""
    return f"shard-{index}"


def tree_file(worker: int | str) -> str:
    return f"{_stem(worker)}.json"


def tensor_file(worker: int | str) -> str:
    return f"{_stem(worker)}.safetensors"


def _stem(part: int | str) -> str:
    if isinstance(part, int):
        return f"worker-{part}"
    if not re.fullmatch(r"shard-[0-9]{1,9}", part):
        raise ValueError(f"there is no part {part!r} of a checkpoint")
    return part


class Part:
    """A worker's values, or those of a server, ready to be written."""

    def __init__(self, worker: int | str, values: Any) -> None:
        self.worker = worker
        self._tree, self._tensors = flattened(values)
        self._digests = {name: digest_of(t) for name, t in self._tensors.items()}

    @property
    def places(self) -> dict[str, Place]:
        """Its tensors by their hash."""
        return {digest: Place(self.worker, name, digest) for name, digest in reversed(self._digests.items())}

    def write(self, folder: Path, known: Mapping[str, Place]) -> dict[str, File]:
        """Write the tree, and the tensors whose hashes are not `known` elsewhere; the files by name."""
        places = {**self.places, **known}
        own = {n: t for n, t in self._tensors.items() if places[self._digests[n]] == self._place(n)}
        path = folder / tensor_file(self.worker)
        write_tensors(path, own)
        where = {name: places[digest] for name, digest in self._digests.items()}
        text = json.dumps({"tree": self._tree, "tensors": {n: [p.worker, p.name, p.sha256] for n, p in where.items()}})
        digest = write_text(folder / tree_file(self.worker), text)
        return {
            tree_file(self.worker): File(len(text.encode()), digest),
            tensor_file(self.worker): File(path.stat().st_size),
        }

    def _place(self, name: str) -> Place:
        return Place(self.worker, name, self._digests[name])


def _place(part: Any, name: Any, sha256: Any) -> Place:
    return Place(part if isinstance(part, str) else int(part), str(name), str(sha256))


class Reader:
    """Reads the parts of a checkpoint's folder."""

    def __init__(self, folder: Path, read_tree: Callable[[str], bytes]) -> None:
        """`read_tree` reads a file whose hash is in the manifest."""
        self._folder = folder
        self._read_tree = read_tree
        self._files: dict[int | str, TensorFile] = {}

    def part(self, worker: int | str) -> Any:
        """The values of a worker, or of a server."""
        name = tree_file(worker)
        try:
            found = json.loads(self._read_tree(name))
            places = {key: _place(*place) for key, place in found["tensors"].items()}
            tree = found["tree"]
            return restored(tree, lambda key: self._tensor(places[key]))
        except BrokenCheckpoint:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BrokenCheckpoint(f"{self._folder / name}: it is not the tree of a state ({error})") from None

    def _tensor(self, place: Place) -> Tensor:
        path = self._folder / tensor_file(place.worker)
        if place.worker not in self._files:
            self._files[place.worker] = TensorFile(path, lambda why: BrokenCheckpoint(f"{path}: {why}"))
        return self._files[place.worker].tensor(place.name, place.sha256)
