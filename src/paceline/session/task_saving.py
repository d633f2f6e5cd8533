"""The checkpoints of `train`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from paceline.elastic import Members
from paceline.engines.job import Job
from paceline.needs import Offers, check
from paceline.session.saving import Saving
from paceline.session.terms import Terms
from paceline.worker.run import WorkerRun


def check_checkpoint(terms: Terms) -> None:
    """Raise ValueError if a run by these terms cannot be saved."""
    if terms.checkpoint is None:
        return
    check(terms.strategy, Offers("train(checkpoint=...)", unbroken=False))
    if terms.strategy.needs.servers and terms.depth > 1:
        raise ValueError(
            f"train(checkpoint=..., stages={terms.depth}, {type(terms.strategy).__name__}): the servers of a model in "
            "stages cannot be saved; use one stage, or a method without servers, such as PeriodicAveraging"
        )
    if terms.checkpoint.also:
        raise ValueError(
            f"train(checkpoint=Checkpoints(also={sorted(terms.checkpoint.also)})): a Task has no schedulers of the "
            "user's; `also` is for attach"
        )


@contextmanager
def saving_of(terms: Terms, job: Job, run: WorkerRun, members: Members | None) -> Generator[Saving | None]:
    """The checkpoints of a run, which continues from the newest of them; None if there are to be none."""
    if terms.checkpoint is None:
        yield None
        return
    saving = Saving(
        terms.checkpoint,
        run,
        rank=job.rank if job.elastic is None else job.elastic.rank,
        workers=job.workers if job.elastic is None else job.elastic.layout.workers,
        store=job.store,
        timeout_s=terms.timeout_s,
        whole=run.replica.learner.split_model,
        stages=terms.depth,
        elastic=job.elastic,
    )
    if members is not None:
        members.on_changed = saving.change
    run.replica.cursor.on_rest = saving.rest
    saving.begin()
    failed = True
    try:
        saving.resume(run.load_state_dict)
        yield saving
        failed = False
    finally:
        saving.close(failed=failed)
