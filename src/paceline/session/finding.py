"""Finding: the checkpoint from which a run continues.  The first worker chooses it, and says so to all."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch.distributed import Store

from paceline.checkpoint import BrokenCheckpoint, Checkpoint, Checkpoints, Folder
from paceline.checkpoint.cadence import Losses, Lost, awaited
from paceline.endpoint import Layout
from paceline.errors import ClusterError

FROM = "checkpoint/from"  # The key in the store.


class Finding:
    """One worker's part in it."""

    def __init__(
        self,
        settings: Checkpoints,
        folder: Folder,
        store: Store | None,
        *,
        is_first: bool,
        timeout_s: float,
        losses: Losses = lambda rank: None,
    ) -> None:
        """`store` is None for one worker alone, without servers.  `losses` says why a worker will say nothing more."""
        self._losses = losses
        self._settings = settings
        self._folder = folder
        self._store = store
        self._is_first = is_first
        self._timeout_s = timeout_s

    def found(self) -> Checkpoint | None:
        """The checkpoint to continue from; None if there is none."""
        if not self._is_first:
            assert self._store is not None
            try:
                said = json.loads(awaited(self._store, FROM, self._timeout_s, losses=self._losses))
            except Lost as why:
                raise ClusterError(f"rank 0 has not said which checkpoint to continue from: {why}") from None
            if said["error"] is not None:
                raise BrokenCheckpoint(said["error"])
            return self._named(said["path"])
        chosen: Checkpoint | None = None
        failure: Exception | None = None
        try:
            chosen = self._chosen()
        except (ValueError, OSError) as error:
            failure = error
        if self._store is not None:
            path = None if chosen is None else chosen.path.name
            self._store.set(FROM, json.dumps({"path": path, "error": None if failure is None else str(failure)}))
        if failure is not None:
            self._folder.release()
            raise failure
        return chosen

    def by_replacement(self, layout: Layout) -> Checkpoint | None:
        """The same, for a worker that replaces a dead one, if the run has servers.

        The dead workers may have chosen it, and may have died before they told the servers.
        """
        assert self._store is not None
        if layout.servers and not (self._is_first and self._store.check([FROM])):
            return self.found()
        if self._is_first:
            self._folder.claim()
        return self._named(json.loads(self._store.get(FROM))["path"]) if layout.servers else None

    def _named(self, name: str | None) -> Checkpoint | None:
        return None if name is None else Checkpoint(self._folder.path / name)

    def _chosen(self) -> Checkpoint | None:
        self._folder.claim()
        if self._settings.resume:
            return self._folder.newest_sound()
        if complete := self._folder.complete():
            raise ValueError(
                f"Checkpoints({str(self._folder.path)!r}, resume=False): the folder has checkpoints already, the last "
                f"of which is {complete[-1].name}; leave out resume=False to continue from it, or give another folder"
            )
        return None


def check_stages(checkpoint: Checkpoint, stages: int, stage: int, trained: Sequence[str]) -> None:
    """Raise ValueError if the model was cut into other stages; `trained` are the parameters of this one."""
    if checkpoint.manifest.stages != stages:
        raise ValueError(
            f"it is a checkpoint of a model in {checkpoint.manifest.stages} stages, and this run has {stages}: give "
            f"train(stages={checkpoint.manifest.stages}), or start anew from the export"
        )
    saved = checkpoint.part(0, stage)["trained"]
    if stages > 1 and saved != trained:
        raise ValueError(
            f"stage {stage} of the saved model has the parameters {saved}, and that of this run {trained}: give "
            "train(stages=[...]) with the layers at which the saved stages begin"
        )
