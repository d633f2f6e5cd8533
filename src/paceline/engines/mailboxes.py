"""The mailboxes of a job's workers.  zmq is imported by those that send messages alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.transport.endpoint import BEAT_S

if TYPE_CHECKING:
    from paceline.engines.job import Job
    from paceline.transport.mailbox import Mailbox


def _returning(job: Job) -> Sequence[int]:
    """The servers that come back when they are killed."""
    return job.layout.server_ranks if job.is_durable else ()


def plain_mailbox(job: Job, bind: str) -> Mailbox:
    """A mailbox of a rank that lives as long as the job."""
    from paceline.transport.mailbox import Mailbox

    return Mailbox(job.store, job.rank, job.layout.size, bind=bind, timeout_s=job.timeout_s, returning=_returning(job))


def elastic_mailbox(job: Job, rank: int, bind: str) -> Mailbox:
    """A mailbox with heartbeats: to the servers if there are any, else to and from the other workers."""
    from paceline.transport.mailbox import Mailbox

    silent_s = job.silent_s
    beat_s = min(BEAT_S, silent_s / 4)
    has_servers = job.layout.servers > 0
    mailbox = Mailbox(
        job.store,
        rank,
        job.layout.size,
        bind=bind,
        is_open=True,
        timeout_s=job.timeout_s,
        beat_s=None if has_servers else beat_s,
        silent_s=None if has_servers else silent_s,
        returning=_returning(job),
    )
    if has_servers:
        mailbox.beat(job.layout.server_ranks, every_s=beat_s)
    return mailbox
