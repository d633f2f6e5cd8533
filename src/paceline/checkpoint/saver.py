"""Saver: one worker's part in the checkpoints of a run.

The values are copied while the run stands between two steps.  A thread writes the copies while the run goes on.  The
first worker opens the folder, says which tensors it has, waits until the files of all workers are on the disk, and
writes the manifest.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store

from paceline.checkpoint.background import in_background
from paceline.checkpoint.cadence import Losses, Lost, awaited
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.manifest import File, Manifest
from paceline.checkpoint.part import Part, Place, shard_part

Describe = Callable[[int], Manifest]
"""The manifest of a checkpoint with that number, without its files."""


class CheckpointFailed(RuntimeWarning):
    """A checkpoint could not be written.  The checkpoints before it are as they were."""


class Saver:
    """Writes checkpoints into a folder, one at a time, in a thread."""

    def __init__(
        self,
        folder: Folder,
        keep: int | None,
        *,
        rank: int,
        workers: int,
        store: Store | None,
        timeout_s: float,
        losses: Losses = lambda rank: None,
    ) -> None:
        """`store` is None for one worker alone, without servers.

        `losses` says why a worker will write nothing more.
        """
        self._losses = losses
        self._why_abandoned: str | None = None
        self.folder = folder
        self._keep = keep
        self._rank = rank
        self._workers = workers
        self._store = store
        self._timeout_s = timeout_s
        self._saves = 0
        self._number = folder.next_number() if rank == 0 else 0
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    def save(self, step: int, values: Mapping[str, Any], describe: Describe, key: str | None = None) -> None:
        """Begin to write these values, which must not change any more, once the checkpoint before is written.

        `key` is the name of this checkpoint, the same on all workers; by default it is their number in this process.
        """
        self.wait()
        work = (step, dict(values), describe, self._store_of(key))
        self._thread = in_background(self._run, *work)

    def give_up(self, step: int, why: str, key: str) -> None:
        """This worker cannot take part in a checkpoint: tell the others."""
        self.wait()
        store = self._store_of(key)
        _tell(store, f"files/{self._rank}" if self._rank else "first", {"error": why})
        if self._rank == 0:
            self._failure = self._failed(step, why)
            _tell(store, "done", {})

    def _store_of(self, key: str | None) -> Store | None:
        self._saves += 1
        return None if self._store is None else PrefixStore(place_of(key or str(self._saves)), self._store)

    def _failed(self, step: int, why: str) -> str:
        return f"the checkpoint of step {step} in {self.folder.path} was not written: {why}"

    def wait(self) -> None:
        """Wait until this worker's files are written; on the first worker, until the checkpoint is complete."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def abandon(self, why: str) -> None:
        """Give up what some workers have not written."""
        self._why_abandoned = why
        self.wait()

    def _awaited(self, store: Store, key: str, of: int) -> str:
        def losses(rank: int) -> str | None:
            return self._why_abandoned or self._losses(rank)

        try:
            return awaited(store, key, self._timeout_s, of=of, losses=losses)
        except Lost as why:
            raise CheckpointFailed(f"rank {of} has not written its part: {why}") from None

    def wait_for_all(self, key: str | None) -> None:
        """Wait until the checkpoint of that name is complete, or has failed; the last one if it has no name."""
        self.wait()
        if self._store is not None and self._rank and self._saves:
            with suppress(Exception):  # The process that serves the store may have ended, or the first worker died.
                awaited(PrefixStore(place_of(key or str(self._saves)), self._store), "done", self._timeout_s)

    def failure(self) -> str | None:
        """Why a checkpoint failed since the last call; None if none did."""
        found = self._failure
        self._failure = None
        return found

    # In the thread.

    def _run(self, step: int, values: Mapping[str, Any], describe: Describe, store: Store | None) -> None:
        try:
            if self._rank == 0:
                try:
                    self._lead(store, step, values, describe)
                finally:
                    _tell(store, "done", {})
            else:
                assert store is not None
                self._follow(store, values)
        except Exception as error:  # It is told to the run at its next step.
            self._failure = self._failed(step, _described(error))

    def _lead(self, store: Store | None, step: int, values: Mapping[str, Any], describe: Describe) -> None:
        try:
            part = Part(0, values)
            self.folder.check_owner()
            path = self.folder.open(step)
        except Exception as error:
            _tell(store, "first", {"error": _described(error)})
            raise
        places = {digest: asdict(place) for digest, place in part.places.items()}
        _tell(store, "first", {"step": step, "folder": str(path.resolve()), "places": places})
        try:
            self._complete(store, part, path, describe)
        except Exception:
            self.folder.clear(path)  # On a full disk it would take the room of the next one.
            raise
        self._number += 1
        self.folder.keep(self._keep, path)

    def _complete(self, store: Store | None, part: Part, path: Path, describe: Describe) -> None:
        """Write the first worker's files, wait for those of the others, and write the manifest."""
        failures: list[str] = []
        try:
            files = part.write(path, {})
        except Exception as error:
            files = {}
            failures.append(_described(error))
        manifest = describe(self._number)
        dead = self._files_of_shards(store, manifest.shards, files, failures)
        for rank in range(1, self._workers):
            if rank in dead:
                continue
            assert store is not None
            found = json.loads(self._awaited(store, f"files/{rank}", rank))
            if "error" in found:
                failures.append(f"on rank {rank}: {found['error']}")
            else:
                files |= {name: File(**file) for name, file in found.items()}
        failures += [
            f"{path / name} was written by another worker and is not here: give a folder that all hosts share"
            for name in files
            if not (path / name).exists()
        ]
        if failures:
            raise CheckpointFailed("; ".join(failures))
        self.folder.check_owner()
        replace(manifest, files=files, missing=dead).write(path)

    def _files_of_shards(
        self, store: Store | None, shards: int, files: dict[str, File], failures: list[str]
    ) -> list[int]:
        """Add the files of all servers; the workers that were dead when these were saved."""
        dead: list[list[int]] = []
        for index in range(shards):
            assert store is not None
            found = json.loads(awaited(store, f"files/{shard_part(index)}", self._timeout_s))
            if "error" in found:
                failures.append(f"on server {index}: {found['error']}")
                continue
            files |= {name: File(**file) for name, file in found["files"].items()}
            dead.append(found["dead"])
        if any(ranks != dead[0] for ranks in dead):
            failures.append(f"the servers disagree which workers are dead: {dead}")
        return dead[0] if dead else []

    def _follow(self, store: Store, values: Mapping[str, Any]) -> None:
        try:
            part = Part(self._rank, values)
            first = json.loads(self._awaited(store, "first", 0))
            if "error" in first:
                return  # The first worker says it.
            known = {digest: Place(**place) for digest, place in first["places"].items()}
            files = part.write(self.folder.at(first["step"]), known)  # Its own step may be another one.
        except Exception as error:
            _tell(store, f"files/{self._rank}", {"error": _described(error)})
            raise
        _tell(store, f"files/{self._rank}", {name: asdict(file) for name, file in files.items()})


def place_of(name: str) -> str:
    """The part of a run's store in which the checkpoint of that name is agreed."""
    return f"checkpoint/{name}"


def _tell(store: Store | None, key: str, value: Any) -> None:
    if store is not None:
        store.set(key, json.dumps(value))


def _described(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    return str(error) if isinstance(error, (CheckpointFailed, ValueError)) else f"{type(error).__name__}: {error}"


def now() -> str:
    """The time, as manifests have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
