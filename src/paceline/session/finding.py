"""Finding: the checkpoint from which a run continues.  The first worker chooses it, and says so to all."""

from __future__ import annotations

import json

from torch.distributed import Store

from paceline.checkpoint import BrokenCheckpoint, Checkpoint, Checkpoints, Folder
from paceline.checkpoint.cadence import awaited

FROM = "checkpoint/from"  # The key in the store.


def found(
    settings: Checkpoints, folder: Folder, store: Store | None, *, is_first: bool, timeout_s: float
) -> Checkpoint | None:
    """The checkpoint to continue from; None if there is none."""
    if not is_first:
        assert store is not None
        said = json.loads(awaited(store, FROM, timeout_s))
        if said["error"] is not None:
            raise BrokenCheckpoint(said["error"])
        return None if said["path"] is None else Checkpoint(folder.path / said["path"])
    chosen: Checkpoint | None = None
    failure: Exception | None = None
    try:
        chosen = _chosen(settings, folder)
    except (ValueError, OSError) as error:
        failure = error
    if store is not None:
        path = None if chosen is None else chosen.path.name
        store.set(FROM, json.dumps({"path": path, "error": None if failure is None else str(failure)}))
    if failure is not None:
        folder.release()
        raise failure
    return chosen


def found_before(
    settings: Checkpoints, folder: Folder, store: Store, *, is_first: bool, timeout_s: float
) -> Checkpoint | None:
    """The same, for a worker that replaces a dead one: the dead one may have chosen."""
    if not is_first or not store.check([FROM]):
        return found(settings, folder, store, is_first=is_first, timeout_s=timeout_s)
    folder.claim()
    path = json.loads(store.get(FROM))["path"]
    return None if path is None else Checkpoint(folder.path / path)


def _chosen(settings: Checkpoints, folder: Folder) -> Checkpoint | None:
    folder.claim()
    if settings.resume:
        return folder.newest_sound()
    if complete := folder.complete():
        raise ValueError(
            f"Checkpoints({str(folder.path)!r}, resume=False): the folder has checkpoints already, the last is "
            f"{complete[-1].name}; leave out resume=False to continue from it, or give another folder"
        )
    return None
