"""ShardSaver: a server's part in the checkpoints of a run.

The shard copies its state at a save point; a thread writes the copy into the folder that the first worker names.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store

from paceline.checkpoint.background import in_background
from paceline.checkpoint.cadence import awaited
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.part import Part, shard_part
from paceline.server.logged_endpoint import LoggedEndpoint
from paceline.server.messages import Restore, SavePoint
from paceline.server.shard import Shard
from paceline.slot_values import Copies

AT_MOST_S = 5.0  # How long a shard waits for the checkpoint before, and lets workers wait.
PATIENCE_S = 120.0  # How long a server waits for the first worker, which may be dead.


class ShardSaver:
    """Saves one shard, the one with that `index`."""

    def __init__(self, shard: Shard, index: int, count: int, store: Store, *, timeout_s: float) -> None:
        self._shard = shard
        self._index, self._count = index, count
        self._store = store
        self._timeout_s = min(timeout_s, PATIENCE_S)
        self._copies = Copies()
        self._thread: threading.Thread | None = None
        self._repeated = ""  # Where a process of this server that was killed has begun to save.
        shard.saves.copy = self._copy
        shard.saves.on_loss = self._note_loss
        shard.read = self._read

    def wait(self) -> None:
        """Wait until what was copied is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def _is_repeating(self) -> bool:
        """Whether the shard does again what an earlier process of it has done."""
        return isinstance(self._shard.endpoint, LoggedEndpoint) and self._shard.endpoint.is_repeating

    def come_back(self) -> None:
        """This process goes on where another one was killed: what that one was writing will not be complete."""
        if self._repeated:
            store, key = PrefixStore(self._repeated, self._store), f"files/{shard_part(self._index)}"
            if not store.check([key]):
                store.set(key, json.dumps({"error": "it was killed while the run was saved"}))

    def _read(self, request: Restore) -> dict[str, Any]:
        return Checkpoint(Path(request.path)).shard(self._index, self._count, unit=request.unit)

    def _copy(self, request: SavePoint, dead: list[int]) -> None:
        if not request.where:
            raise ValueError("this worker's driver saves no servers")
        if self._is_repeating:
            self._repeated = request.where
            return
        if self._thread is not None:  # The memory of its copies is used again.
            self._thread.join(AT_MOST_S)
            if self._thread.is_alive():
                raise ValueError("the checkpoint before is still being written")
        state = self._shard.state_dict(self._copies)
        self._thread = in_background(self._write, PrefixStore(request.where, self._store), state, dead)

    def _note_loss(self, request: SavePoint) -> None:
        """Tell those that wait for a dead worker's files, unless they are there."""
        if self._is_repeating:
            return
        store = PrefixStore(request.where, self._store)
        said = json.dumps({"error": "the worker died while the run was saved"})
        for key in (f"files/{request.member}", *(["first"] if request.member == 0 else [])):
            if not store.check([key]):
                store.set(key, said)

    def _write(self, store: Store, state: dict[str, Any], dead: list[int]) -> None:
        key = f"files/{shard_part(self._index)}"
        try:
            first = json.loads(awaited(store, "first", self._timeout_s))
            if "error" in first:
                return  # The first worker says it.
            files = Part(shard_part(self._index), {"state": state}).write(Path(first["folder"]), {})
            answer = {"files": {name: asdict(file) for name, file in files.items()}, "dead": dead}
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        store.set(key, json.dumps(answer))
