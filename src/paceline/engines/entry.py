"""A worker of `paceline run`: it runs the user's script and reports the error that ended it.

A worker is forked from the launcher, which has imported torch and paceline; or it is a fresh interpreter.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import io
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from paceline.elastic.rendezvous import LeftOut, Over
from paceline.engines.processes import die_with_parent, fresh_random_state
from paceline.engines.supervisor import LEFT_OUT, print_notice, write_report
from paceline.errors import ClusterError

SET_BLAS_THREADS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def main() -> None:
    """A fresh interpreter: its arguments are the launcher's process id, "module" or "script", and the command."""
    launcher, kind, *command = sys.argv[1:]
    die_with_parent(int(launcher))
    run(command, is_module=kind == "module")


def run(command: Sequence[str], *, is_module: bool) -> None:
    """Run a script or module with its arguments as `__main__`."""
    name = command[0]
    sys.argv = list(command)
    faulthandler.enable(all_threads=True)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if is_module else str(Path(name).resolve().parent)
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except Over as end:  # This process came to take a place, and there was nothing left to do.
        print_notice(f"rank {os.environ['RANK']}: {end}")
    except LeftOut as error:
        _report(error)
        print_notice(f"rank {os.environ['RANK']}: {error}")
        sys.exit(LEFT_OUT)
    except ClusterError as error:
        _report(error)
        # The traceback of a rank that lost a peer shows only where it noticed that: one line is enough.
        sys.exit(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}")
    except Exception as error:
        _report(error)
        raise


def _report(error: Exception) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        write_report(Path(path), error)


def run_forked(
    command: Sequence[str], *, is_module: bool, environment: Mapping[str, str], launcher: int, threads: int | None
) -> NoReturn:
    """Make a fork of the launcher what a fresh interpreter would be, run the script in it, and exit.

    Signals are blocked when it is called.  `threads` is how many each worker computes with; None: as the user has set.
    """
    code = 1
    try:
        os.setsid()
        die_with_parent(launcher)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
        sys.excepthook = sys.__excepthook__  # The command line has its own.
        os.environ.update(environment)
        _unbuffer()
        fresh_random_state()
        if threads is not None:
            _set_threads(threads)
        code = _exit_code(command, is_module=is_module)
    finally:
        os._exit(code)  # The launcher's own clean-up must not run here.


def _exit_code(command: Sequence[str], *, is_module: bool) -> int:
    """Run the script and end as an interpreter does: print the error, wait for threads, call exit handlers."""
    code = 0
    try:
        run(command, is_module=is_module)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # pyright: ignore
    atexit._run_exitfuncs()  # pyright: ignore
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:  # As an interpreter does, so that the launcher sees what ended it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF


def _unbuffer() -> None:
    """Standard output and error as under `python -u`, so that what workers print appears in order and at once."""
    for name, file in (("stdout", 1), ("stderr", 2)):
        old: Any = getattr(sys, name)
        raw = io.FileIO(file, "wb", closefd=False)
        new = io.TextIOWrapper(raw, encoding=old.encoding, errors=old.errors, write_through=True)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _set_threads(count: int) -> None:
    """What OMP_NUM_THREADS does when libraries are loaded: they are loaded already."""
    torch.set_num_threads(count)
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line}
    for path in paths:
        library = ctypes.CDLL(path)
        for name in SET_BLAS_THREADS:
            if hasattr(library, name):
                getattr(library, name)(count)


if __name__ == "__main__":
    main()
