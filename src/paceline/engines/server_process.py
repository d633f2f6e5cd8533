"""A server process: it holds one shard of a parameter server, or coordinates them, until the workers have left it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from paceline.endpoint import Endpoint, Layout
from paceline.engines.processes import set_name
from paceline.engines.shard_saver import ShardSaver
from paceline.errors import ClusterError
from paceline.op import drive
from paceline.server.logged_endpoint import LoggedEndpoint
from paceline.server.shard import Shard
from paceline.server.shard_log import FileArea, ShardLog
from paceline.strategy import Strategy
from paceline.trace import Trace
from paceline.transport.endpoint import SPANS_KEPT, Clock, ProcessEndpoint
from paceline.transport.job_key import JobKey, SignedStore
from paceline.transport.stage_view import StageMailbox, StageView

if TYPE_CHECKING:
    from paceline.transport.mailbox import Mailbox

NAME = "paceline-server"
GIVEN_UP = "given up"  # The file that is not empty once the others could not be written.
LOG_FILES = ("snapshot-0", "snapshot-1", "log-0", "log-1", GIVEN_UP)
GRACE_S = 60.0  # How long shards wait for the replacement of a dead worker.


@dataclass(frozen=True)
class ServerSettings:
    """What the servers of one host must know besides their strategy: plain data, to be written as JSON."""

    layout: tuple[int, int]
    store: Mapping[str, Any]
    prefix: str
    key: JobKey | None
    epoch: float
    bind: str
    timeout_s: float
    silent_s: float
    workers: Sequence[tuple[int, int]]  # Ranks and process ids of this host's workers.
    is_elastic: bool
    grace_s: float
    takes_nonfinite: bool
    stages: int

    @staticmethod
    def of(
        layout: Layout,
        store: dist.Store,
        prefix: str,
        *,
        key: JobKey | None,
        epoch: float,
        bind: str,
        timeout_s: float,
        silent_s: float,
        workers: Mapping[int, int],
        is_elastic: bool,
        may_lose_starter: bool,
        takes_nonfinite: bool,
        stages: int,
    ) -> ServerSettings:
        return ServerSettings(
            layout=(layout.workers, layout.servers),
            store=_address(store),
            prefix=prefix,
            key=key,
            epoch=epoch,
            bind=bind,
            timeout_s=timeout_s,
            silent_s=silent_s,
            workers=tuple(workers.items()),
            is_elastic=is_elastic,
            grace_s=GRACE_S if may_lose_starter else 0.0,
            takes_nonfinite=takes_nonfinite,
            stages=stages,
        )


@dataclass(frozen=True)
class Life:
    """Which process of a server this is: its number from 0, its keeper, and the files of its log, if it has one."""

    number: int
    keeper: int
    log: Mapping[str, int] | None


def _address(store: dist.Store) -> dict[str, Any]:
    if isinstance(store, dist.TCPStore):
        return {"tcp": [store.host, store.port]}
    if isinstance(store, dist.FileStore):
        return {"file": store.path}  # pyright: ignore
    raise ValueError(
        f"servers cannot reach a {type(store).__name__}: start the job by torchrun or paceline run, or with a TCPStore "
        "or FileStore"
    )


def run(strategy: Strategy, rank: int, settings: ServerSettings, life: Life) -> int:
    """Serve until the end; the exit code."""
    torch.set_num_threads(1)
    set_name(NAME)
    # A scheduler may send SIGTERM to every process of a job: the workers save it first, and servers end with them.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_die_with_pipe, daemon=True).start()
    try:
        _serve(strategy, rank, settings, life)
    except Exception as error:
        name = Layout(*settings.layout).name(rank)
        print(f"paceline: {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def store_of(settings: ServerSettings) -> dist.Store:
    """The job's part of its store."""
    address = settings.store
    base = dist.FileStore(address["file"]) if "file" in address else dist.TCPStore(*address["tcp"], is_master=False)
    store = dist.PrefixStore(settings.prefix, base)
    return store if settings.key is None else SignedStore(store, settings.key, settings.prefix)


def _serve(strategy: Strategy, rank: int, settings: ServerSettings, life: Life) -> None:
    from paceline.transport.mailbox import Mailbox

    layout = Layout(*settings.layout)
    store = store_of(settings)
    is_elastic = settings.is_elastic
    own = str(life.keeper)
    if is_elastic and store.compare_set(f"serving/{rank}", "", own) != own.encode():
        return  # The worker that started this server's twin died at once, and its replacement could not know of it.
    mailbox = Mailbox(
        store,
        rank,
        layout.size,
        bind=settings.bind,
        timeout_s=settings.timeout_s,
        is_open=is_elastic,
        silent_s=settings.silent_s if is_elastic else None,
        returning=[] if life.log is None else [other for other in layout.server_ranks if other != rank],
        replaces=life.number > 0,
    )
    with closing(mailbox):
        if is_elastic:
            for worker, pid in settings.workers:
                mailbox.watch(worker, pid)
        trace = Trace(keep=SPANS_KEPT)
        view = StageView.of(rank, layout, settings.stages, strategy.coordinators)
        mail = mailbox if settings.stages == 1 else StageMailbox(mailbox, view)
        endpoint: Endpoint = ProcessEndpoint(
            view.rank, view.layout, Clock(settings.epoch), open_mailbox=lambda: mail, trace=trace
        )
        if life.log is not None:
            endpoint = _logged(endpoint, life, store, layout, view)
        shard = Shard(
            endpoint,
            grace_s=settings.grace_s,
            return_s=settings.timeout_s,
            takes_nonfinite=settings.takes_nonfinite,
        )
        saver = ShardSaver(shard, rank - layout.workers, layout.servers, store, timeout_s=settings.timeout_s)
        if life.number and isinstance(endpoint, LoggedEndpoint):
            endpoint.on_back = lambda: _come_back(mailbox, view, shard, saver, is_elastic=is_elastic)
        drive(strategy.server(shard))
        saver.wait()
        trace.move_to(rank)
        store.set(f"trace/{rank}", trace.dumps())


def _logged(endpoint: Endpoint, life: Life, store: dist.Store, layout: Layout, view: StageView) -> Endpoint:
    """The same endpoint with a log.  If an earlier process of this rank was killed, its log comes first."""
    files = life.log
    assert files is not None
    name = view.layout.name(view.rank)

    def give_up(why: str) -> None:
        os.ftruncate(files[GIVEN_UP], 1)
        print(
            f"paceline: {name} cannot write its log ({why}).  The job goes on, and ends if this server is killed",
            file=sys.stderr,
            flush=True,
        )

    if os.fstat(files[GIVEN_UP]).st_size:
        raise ClusterError(f"{name} was killed, and its log could not be written: what it held is lost")
    log = ShardLog(lambda area: FileArea(area, files[area]))
    logged = LoggedEndpoint(endpoint, log, on_failure=give_up, peers=lambda: _peers(store, layout, view))
    return cast("Endpoint", logged)


def _peers(store: dist.Store, layout: Layout, view: StageView) -> list[int]:
    """All ranks that have opened a mailbox, as this server sees them; a rank that is dead takes no message."""
    ranks = dict(enumerate(view.ranks))
    if len(ranks) == layout.size:  # Workers of a model that is not split may have joined.
        ranks |= {rank: rank for rank in range(layout.size, layout.size + store.add("joined", 0))}
    return [i for i, rank in ranks.items() if i != view.rank and store.check([f"mail/{rank}"])]


def _come_back(mailbox: Mailbox, view: StageView, shard: Shard, saver: ShardSaver, *, is_elastic: bool) -> None:
    """The shard knows what it knew when its process before was killed."""
    saver.come_back()
    if is_elastic:
        _expect(mailbox, view, shard)


def _expect(mailbox: Mailbox, view: StageView, shard: Shard) -> None:
    """Watch the members, from which nothing may come any more."""
    for member in shard.members.roster.members:
        mailbox.expect(view.ranks[member] if member < len(view.ranks) else member)


def _die_with_pipe() -> None:
    """End this process when the pipe on its standard input is closed."""
    # Not through sys.stdin: a thread must not hold its lock when the interpreter shuts down.
    while os.read(0, 4096):
        pass
    os._exit(0)
