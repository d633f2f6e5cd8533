"""Companions: the processes that hold a parameter server's shards.

The first worker of each host starts those of the host, so that four launched workers are four workers and nobody counts servers.  A
companion lives for as long as its standard input is open, and no longer than there are workers.  That is a pipe of the worker that
started it; or of a launcher that replaces dead workers, and then the job goes on without the one that started it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist

from paceline import registry
from paceline.endpoint import Layout
from paceline.op import drive
from paceline.server.shard import Shard
from paceline.strategy import Strategy
from paceline.trace import Trace
from paceline.transport.endpoint import SPANS_KEPT, Clock, ProcessEndpoint

SETTINGS = "PACELINE_COMPANION"  # The variable that tells a companion what to serve.
GRACE_S = 60.0  # How long shards wait for another worker in the place of one that died.
FAILED = 70  # A worker's exit code when its companion failed (sysexits: internal software error).


class ServerProcesses:
    """The servers on one host, as the worker keeps them that has started them.

    `workers` are the processes of this host's workers, by rank; `life` is a launcher's pipe.
    """

    def __init__(
        self,
        strategy: Strategy,
        layout: Layout,
        ranks: Sequence[int],
        store: dist.Store,
        prefix: str,
        *,
        epoch: float,
        bind: str,
        timeout_s: float,
        workers: Mapping[int, int],
        life: int | None,
        takes_nonfinite: bool,
        silent_s: float,
    ) -> None:
        self._closing = False
        self._layout, self._life = layout, life
        plain: dict[str, Any] = {
            "strategy": registry.to_plain(strategy),
            "layout": [layout.workers, layout.servers],
            "path": sys.path,
            "store": _address(store),
            "prefix": prefix,
            "epoch": epoch,
            "bind": bind,
            "timeout_s": timeout_s,
            "workers": list(workers.items()),
            "is_open": strategy.needs.elastic,
            "grace_s": GRACE_S if life is not None else 0.0,
            "takes_nonfinite": takes_nonfinite,
            "silent_s": silent_s,
        }
        self._processes = {rank: self._start({**plain, "rank": rank}) for rank in ranks}
        for rank, process in self._processes.items():
            threading.Thread(target=self._watch, args=(rank, process), name=f"companion-{rank}", daemon=True).start()

    def _start(self, plain: dict[str, Any]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", SETTINGS: json.dumps(plain)}
        # In a session of its own: a signal to the worker's group (Ctrl-C, a launcher's SIGTERM) is the worker's to answer, and a
        # server that ended before it would look like the cause.
        command = [sys.executable, "-m", "paceline.engines.server_process"]
        stdin = subprocess.PIPE if self._life is None else self._life
        return subprocess.Popen(command, stdin=stdin, env=environment, start_new_session=True)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if code and not self._closing:
            # The workers are waiting for an answer that will not come, perhaps deep in C: there is no gentler way out.
            print(
                f"paceline: {self._layout.name(rank)} failed with exit code {code}; its job ends here",
                file=sys.stderr,
                flush=True,
            )
            os._exit(FAILED)

    def wait(self) -> None:
        """Until the last worker has left its servers, and these have ended."""
        for process in self._processes.values():
            process.wait()

    def close(self) -> None:
        """Whatever they do, end them."""
        self._closing = True
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
            process.kill()
            process.wait()


def _address(store: dist.Store) -> dict[str, Any]:
    if isinstance(store, dist.TCPStore):
        return {"tcp": [store.host, store.port]}
    if isinstance(store, dist.FileStore):
        return {"file": store.path}  # pyright: ignore
    raise ValueError(
        f"servers cannot reach a {type(store).__name__}: start the job by torchrun or paceline run, or with a TCPStore or FileStore"
    )


def _serve(plain: dict[str, Any]) -> None:
    from paceline.transport.mailbox import Mailbox

    sys.path[:] = plain["path"]  # A strategy may lie beside the user's script.
    address = plain["store"]
    base = dist.FileStore(address["file"]) if "file" in address else dist.TCPStore(*address["tcp"], is_master=False)
    rank, layout = plain["rank"], Layout(*plain["layout"])
    strategy: Strategy = registry.from_plain(plain["strategy"])
    store = dist.PrefixStore(plain["prefix"], base)
    is_open = plain["is_open"]
    if is_open and store.compare_set(f"serving/{rank}", "", str(os.getpid())) != str(os.getpid()).encode():
        return  # Whoever has started the one that serves has died since, and its successor could not know of it.
    silent_s = plain["silent_s"] if is_open else None
    with closing(
        Mailbox(
            store,
            rank,
            layout.size,
            bind=plain["bind"],
            timeout_s=plain["timeout_s"],
            is_open=is_open,
            silent_s=silent_s,
        )
    ) as mailbox:
        if is_open:
            for worker, pid in plain["workers"]:
                mailbox.watch(worker, pid)
        endpoint = ProcessEndpoint(
            rank, layout, Clock(plain["epoch"]), open_mailbox=lambda: mailbox, trace=Trace(keep=SPANS_KEPT)
        )
        drive(strategy.server(Shard(endpoint, grace_s=plain["grace_s"], takes_nonfinite=plain["takes_nonfinite"])))
        store.set(f"trace/{rank}", endpoint.trace.dumps())


def _die_with_starter() -> None:
    # Not through sys.stdin, whose lock a thread must not hold when the interpreter shuts down.
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    plain = json.loads(os.environ.pop(SETTINGS))
    threading.Thread(target=_die_with_starter, daemon=True).start()
    try:
        _serve(plain)
    except Exception as error:
        print(
            f"paceline: {Layout(*plain['layout']).name(plain['rank'])}: {type(error).__name__}: {error}",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
