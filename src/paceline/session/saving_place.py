"""SavingPlace: which of the workers that save a run this one is, and what it saves with."""

from __future__ import annotations

import itertools

from torch.distributed import PrefixStore, Store

from paceline.checkpoint import Checkpoint, Checkpoints, Folder
from paceline.checkpoint.cadence import Cadence, Losses
from paceline.checkpoint.saver import Saver
from paceline.elastic import ElasticEndpoint
from paceline.session.finding import Finding
from paceline.session.stopping import Stopping
from paceline.worker.run import WorkerRun

# How long workers that do not wait for each other wait for a file of another one, which may be dead.
PATIENCE_S = 120.0
_opened = itertools.count()  # All ranks count the same, so it names the keys of each.


class SavingPlace:
    """This process among those that save a run.  In an elastic run they may change."""

    def __init__(
        self,
        settings: Checkpoints,
        run: WorkerRun,
        *,
        rank: int,
        workers: int,
        stages: int,
        store: Store,
        timeout_s: float,
        elastic: ElasticEndpoint | None,
    ) -> None:
        """`rank` and `workers` count processes, `stages` of which are one worker."""
        self.stages = stages
        self.elastic = elastic
        self._settings = settings
        self._run = run
        self._store = store
        self._timeout_s = timeout_s
        self._losses: Losses = elastic.rendezvous.why_lost if elastic is not None else lambda rank: None
        self._name = "" if elastic is not None else f"{next(_opened)}"
        self._take(rank, workers)

    def _take(self, rank: int, workers: int) -> None:
        self.rank = rank
        self._processes = workers
        self.workers = workers // self.stages
        self.worker, self.stage = divmod(rank, self.stages)

    def move(self) -> None:
        """The workers have changed."""
        assert self.elastic is not None
        self._take(self.elastic.rank, self.elastic.layout.workers)

    @property
    def key(self) -> str:
        """Where in the store these workers save."""
        return f"saving/{self._name if self.elastic is None else f'of generation {self.elastic.number}'}"

    def _shared(self, place: str) -> Store | None:
        """That part of the store; None for one worker alone, without servers."""
        is_alone = self._processes == 1 and not self._run.replica.endpoint.layout.servers
        return None if is_alone else PrefixStore(place, self._store)

    def found(self, folder: Folder) -> tuple[bool, Checkpoint | None]:
        """Whether this worker replaces a dead one, and the checkpoint from which the run continues.

        One that replaces a dead one has its state from another worker, and not from the disk.
        """
        endpoint = self._run.replica.endpoint
        if self.elastic is not None and self.elastic.has_joined_late:
            return True, None
        shared = self._shared(self.key if self.elastic is None else "saving/begin")
        where = Finding(
            self._settings,
            folder,
            shared,
            is_first=self.rank == 0,
            timeout_s=self._timeout_s,
            losses=self._losses,
        )
        if endpoint.rank not in endpoint.layout.worker_ranks:
            return True, where.by_replacement(endpoint.layout)
        return False, where.found()

    def opened(self, folder: Folder, saved: float | None) -> tuple[Stopping, Saver, Cadence]:
        """What these workers save with; `saved` is the time of the last checkpoint."""
        shared, needs = self._shared(self.key), self._run.strategy.needs
        is_first, losses = self.rank == 0, self._losses
        timeout_s = self._timeout_s
        saver = Saver(
            folder,
            self._settings.keep,
            rank=self.rank,
            workers=self._processes,
            store=shared,
            timeout_s=timeout_s if needs.ordered else min(timeout_s, PATIENCE_S),
            losses=losses,
        )
        # Where workers stand at no common step, only the first one looks at its clock.
        told = shared if needs.collectives and self._processes > 1 else None
        cadence = Cadence(
            self._settings,
            self._run.replica.plan,
            store=told,
            is_first=is_first or told is None,
            timeout_s=timeout_s,
            saved=saved,
            losses=losses,
        )
        return Stopping(shared, is_first=is_first, timeout_s=timeout_s, losses=losses), saver, cadence
