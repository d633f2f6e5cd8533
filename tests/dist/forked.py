"""Forked processes: one function on several ranks of a gloo process group, or a program with its own streams.

A fresh interpreter takes seconds to import torch. A forked one has it already.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# The first mean and the first step of an optimizer import numba and dynamo, otherwise in every child anew.
import numba  # noqa: F401
import torch
import torch._dynamo
import torch.distributed as dist


def run(workers: int, work: Callable[[int], Any], folder: Path, *, timeout_s: float = 60.0) -> list[Any]:
    """Run `work(rank)` on each rank. Its result must be valid JSON. A rank that raised gives {"error": "Type:
    message"}."""
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


def start(
    program: Callable[[], object],
    arguments: Sequence[str] = (),
    *,
    folder: Path,
    out: Path,
    err: Path,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Run `program` in its own process, as a fresh interpreter would: with its own exit code, streams, arguments and
    warnings."""
    process = multiprocessing.get_context("fork").Process(
        target=_program, args=(program, arguments, folder, out, err, environment or {})
    )
    process.start()
    return process


def paceline(
    *arguments: str, folder: Path, environment: Mapping[str, str] | None = None, timeout_s: float = 200.0
) -> subprocess.CompletedProcess[str]:
    """Run the command `paceline` with these arguments. The processes that it starts are fresh interpreters."""
    from paceline import cli

    out, err = folder / "paceline.out", folder / "paceline.err"
    process = start(cli.main, ["paceline", *arguments], folder=folder, out=out, err=err, environment=environment)
    try:
        process.join(timeout_s)
        assert not process.is_alive(), f"{arguments} was still running after {timeout_s} s: {err.read_text()}"
    finally:
        process.kill()
        process.join()
    assert process.exitcode is not None
    return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def _program(
    program: Callable[[], object],
    arguments: Sequence[str],
    folder: Path,
    out: Path,
    err: Path,
    environment: Mapping[str, str],
) -> None:
    code = 1
    try:
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = list(arguments)
        warnings.resetwarnings()
        tempfile.tempdir = None  # TMPDIR may be different.
        torch.set_num_threads(1)
        code = _exit_code(program)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _exit_code(program: Callable[[], object]) -> int:
    try:
        program()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
