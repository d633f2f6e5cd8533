"""Checkpoint: one saved state of a run, as it lies in a folder."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.files import refuse_links
from paceline.checkpoint.manifest import NAME, Manifest, read
from paceline.checkpoint.part import BrokenCheckpoint, Reader, shard_part
from paceline.state import resharded, resized, resized_for

__all__ = ["BrokenCheckpoint", "Checkpoint"]


class Checkpoint:
    """A complete checkpoint.  Raises BrokenCheckpoint where a file is not what the manifest and the trees say."""

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_links(path / NAME, lambda why: BrokenCheckpoint(f"{path / NAME}: {why}"))
        try:
            self.manifest: Manifest = read(path)
        except FileNotFoundError:
            raise BrokenCheckpoint(f"{path}: there is no complete checkpoint: it has no {NAME}") from None
        except ValueError as error:
            raise BrokenCheckpoint(f"{path / NAME}: {error}") from None
        for name in self.manifest.files:
            if Path(name).name != name:
                raise BrokenCheckpoint(f"{path / NAME}: it names the file {name!r}, which is not in its folder")

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.manifest.files.values())

    def part(self, worker: int, stage: int = 0) -> dict[str, Any]:
        """What a worker has saved, for a stage of its model: its `state`, and what belongs to its driver."""
        found = self._reader.part(worker * self.manifest.stages + stage)
        if not isinstance(found, dict) or "state" not in found:
            raise BrokenCheckpoint(f"{self.path}: the part of worker {worker} has no state")
        return found

    @property
    def saved(self) -> list[int]:
        """The workers that have saved a state."""
        return [worker for worker in range(self.manifest.workers) if worker not in self.manifest.missing]

    def states(self, stage: int = 0) -> list[dict[str, Any]]:
        """The states of all workers."""
        return [self.part(worker, stage)["state"] for worker in self.saved]

    def state(self, worker: int, workers: int, stage: int = 0) -> dict[str, Any]:
        """The state of one worker of so many; with another number than was saved, by the rules of its slots."""
        if workers == self.manifest.workers and worker in self.saved:
            return self.part(worker, stage)["state"]
        if self.manifest.missing:
            return resized_for(self.states(stage), workers, worker)
        return resized(self.states(stage), workers)[worker]

    def shards(self) -> list[dict[str, Any]]:
        """The states of all servers."""
        found = [self._reader.part(shard_part(index)) for index in range(self.manifest.shards)]
        if any(not isinstance(part, dict) or "state" not in part for part in found):
            raise BrokenCheckpoint(f"{self.path}: the part of a server has no state")
        return [part["state"] for part in found]

    def shard(self, index: int, count: int, *, unit: int) -> dict[str, Any]:
        """The state of one of so many servers, which cut vectors at multiples of `unit`."""
        states = self.shards()
        return states[index] if count == len(states) else resharded(states, count, unit=unit)[index]

    def verify(self) -> None:
        """Read all of it, and compare every tree and tensor with its hash."""
        for name, file in self.manifest.files.items():
            path = self.path / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise BrokenCheckpoint(f"{path}: {error.strerror or error}") from None
            if size != file.nbytes:
                raise BrokenCheckpoint(f"{path}: it has {size:,} bytes, and {file.nbytes:,} were written")
        for worker in self.saved:
            for stage in range(self.manifest.stages):
                self.part(worker, stage)
        self.shards()

    def model(self) -> dict[str, Tensor]:
        """The model's state_dict, with the parameters to evaluate: the mean of the workers', if they differ."""
        found: dict[str, Tensor] = {}
        for stage in range(self.manifest.stages):
            found |= self._model_of(stage)
        return {name: found[of] for name, of in self.manifest.model.names}

    def _model_of(self, stage: int) -> dict[str, Tensor]:
        first = self.part(0, stage)
        states = self.states(stage)
        values = (states[0] if len(states) == 1 else resized_for(states, 1, 0))["slots"]["model"]["values"]
        vector: Tensor = values["params"] if first["published"] is None else first["published"]
        if self.manifest.shards:
            vector = torch.cat([state["slots"]["value"]["values"]["value"] for state in self.shards()])
        layouts = {layout.name: layout for layout in self.manifest.model.parameters}
        trained = [layouts[name] for name in first["trained"]]
        parts = vector.split([torch.Size(layout.shape).numel() for layout in trained])
        found: dict[str, Tensor] = dict(first["frozen"])
        for layout, part in zip(trained, parts, strict=True):
            found[layout.name] = part.reshape(layout.shape).to(getattr(torch, layout.dtype))
        return found | dict(zip(first["buffers"], values["buffers"], strict=True))

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self.path, self._read_tree)

    def _read_tree(self, name: str) -> bytes:
        path = self.path / name
        if name not in self.manifest.files:
            raise BrokenCheckpoint(f"{self.path / NAME}: it does not name {name}")
        refuse_links(path, lambda why: BrokenCheckpoint(f"{path}: {why}"))
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BrokenCheckpoint(f"{path}: {error.strerror or error}") from None
        if hashlib.sha256(data).hexdigest() != self.manifest.files[name].sha256:
            raise BrokenCheckpoint(f"{path}: it is not what was written: its bytes have another hash")
        return data
