"""How many files the processes of a job have open at a time, and whether they may.

A process that runs out of them hangs, or fails far from the cause: so each looks first.  The numbers are those of
jobs on one host, measured; each connection is a file, and a socket of ZeroMQ two.
"""

from __future__ import annotations

import errno
import os
import resource

from paceline.errors import ClusterError

USUAL = 10  # Files that are open before a job starts, where the system does not say it.
SPARE = 4  # For files that are open for a moment.


def of_launcher(workers: int) -> int:
    """A launcher opens pipes for what its workers print, and one that tells of their end."""
    return 3 * workers


def of_store(workers: int) -> int:
    """Each worker has a connection to the store, each server and each heartbeat another."""
    return 11 + 4 * workers


def of_worker(workers: int, servers: int, *, takes_part: bool) -> int:
    """In collectives a worker `takes_part` with a connection to each other one and a file of its process.

    Without them, or with servers, it has a mailbox, and sends to all servers or to at least two other workers.
    """
    mailbox = 10 + (7 * servers or 7) if servers or not takes_part else 0
    return mailbox + (4 * workers if takes_part else 0)


def of_server(workers: int) -> int:
    """A server has a mailbox, connections from and to each worker, and a file of each worker's process."""
    return 5 + 5 * workers


def check(what: str, more: int) -> None:
    """This process, or one that it starts, will open so many files: raise its limit if need be, or say what is wrong.

    The limit that can be raised is the soft one, up to the hard one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _now_open(soft) + more + SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ClusterError(
            f"{what} needs about {needed} open files at a time, and this process may have {hard}: raise the limit of "
            "open files (`ulimit -n`, in systemd LimitNOFILE), or start fewer workers on this host"
        )
    wanted = soft + needed
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _now_open(limit: int) -> int:
    try:
        return len(os.listdir("/dev/fd")) - 1  # Without the one of this listing.
    except OSError as error:
        return limit if error.errno == errno.EMFILE else USUAL
