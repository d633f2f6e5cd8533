"""Runs one function on several forked processes that share a gloo process group, and collects what each says."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run(workers: int, work: Callable[[int], Any], folder: Path, *, timeout_s: float = 60.0) -> list[Any]:
    """`work(rank)` on each rank; its result must be JSON's.  A rank that raised gives {"error": "Type: message"}."""
    folder.mkdir(exist_ok=True)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_child, args=(rank, workers, work, folder)) for rank in range(workers)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        assert not late, f"ranks {late} were still running after {timeout_s} s"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [_result(folder / f"{rank}.json", process.exitcode) for rank, process in enumerate(processes)]


def _result(path: Path, code: int | None) -> Any:
    return json.loads(path.read_text()) if path.exists() else {"error": f"no result, exit code {code}"}


def _child(rank: int, workers: int, work: Callable[[int], Any], folder: Path) -> None:
    torch.set_num_threads(1)
    try:
        if workers > 1:
            dist.init_process_group(
                "gloo", store=dist.FileStore(str(folder / "store"), workers), rank=rank, world_size=workers
            )
        result = work(rank)
    except BaseException as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    (folder / f"{rank}.json").write_text(json.dumps(result))
    os._exit(0)


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
