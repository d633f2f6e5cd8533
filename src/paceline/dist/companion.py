"""Companions: the processes that hold a parameter server's shards.

Worker 0 starts them, so that four launched workers are four workers and nobody counts servers.  A companion lives as long as
its standard input is open: it cannot outlive the worker that started it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist

from paceline import registry
from paceline.dist.endpoint import Clock, ProcessEndpoint
from paceline.endpoint import Layout
from paceline.op import drive
from paceline.server.shard import Shard
from paceline.strategy import Strategy

FAILED = 70  # A worker's exit code when its companion failed (sysexits: internal software error).


class Companions:
    """The servers of a job, as worker 0 keeps them."""

    def __init__(
        self, strategy: Strategy, layout: Layout, store: dist.Store, prefix: str, *, epoch: float, bind: str, timeout_s: float
    ) -> None:
        self._closing = False
        self._layout = layout
        plain: dict[str, Any] = {
            "strategy": registry.to_plain(strategy),
            "layout": [layout.workers, layout.servers],
            "path": sys.path,
            "store": _address(store),
            "prefix": prefix,
            "epoch": epoch,
            "bind": bind,
            "timeout_s": timeout_s,
        }
        self._processes = {rank: self._start({**plain, "rank": rank}) for rank in layout.server_ranks}
        for rank, process in self._processes.items():
            threading.Thread(target=self._watch, args=(rank, process), name=f"companion-{rank}", daemon=True).start()

    def _start(self, plain: dict[str, Any]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # In a session of its own: a signal to the worker's group (Ctrl-C, a launcher's SIGTERM) is the worker's to answer, and a
        # server that ended before it would look like the cause.
        command = [sys.executable, "-m", "paceline.dist.companion"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
        assert process.stdin is not None
        process.stdin.write(json.dumps(plain).encode() + b"\n")
        process.stdin.flush()
        return process

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if code and not self._closing:
            # The workers are waiting for an answer that will not come, perhaps deep in C: there is no gentler way out.
            print(f"paceline: {self._layout.name(rank)} failed with exit code {code}; its job ends here", file=sys.stderr, flush=True)
            os._exit(FAILED)

    def wait(self) -> None:
        """Until the last worker has left its servers, and these have ended."""
        for process in self._processes.values():
            process.wait()

    def close(self) -> None:
        """Whatever they do, end them."""
        self._closing = True
        for process in self._processes.values():
            assert process.stdin is not None
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
    from paceline.dist.mailbox import Mailbox

    sys.path[:] = plain["path"]  # A strategy may lie beside the user's script.
    address = plain["store"]
    base = dist.FileStore(address["file"]) if "file" in address else dist.TCPStore(*address["tcp"], is_master=False)
    rank, layout = plain["rank"], Layout(*plain["layout"])
    strategy: Strategy = registry.from_plain(plain["strategy"])
    store = dist.PrefixStore(plain["prefix"], base)
    with closing(Mailbox(store, rank, layout.size, bind=plain["bind"], timeout_s=plain["timeout_s"])) as mailbox:
        endpoint = ProcessEndpoint(rank, layout, Clock(plain["epoch"]), open_mailbox=lambda: mailbox)
        drive(strategy.server(Shard(endpoint)))
        store.set(f"trace/{rank}", endpoint.trace.dumps())


def _die_with_parent() -> None:
    # Not through sys.stdin, whose lock a thread must not hold when the interpreter shuts down.
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        plain = json.loads(stdin.readline())
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        _serve(plain)
    except Exception as error:
        print(f"paceline: {Layout(*plain['layout']).name(plain['rank'])}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
