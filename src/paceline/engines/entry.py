"""A worker's way in under `paceline run`: runs the user's script, and writes down what it died of."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ClusterError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

PR_SET_PDEATHSIG = 1
GRACE_S = 3.0


def main() -> None:
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    launcher, kind, name, *_ = sys.argv[1:]
    sys.argv = sys.argv[3:]
    _die_with(int(launcher))
    handler = get_error_handler()
    handler.initialize()
    try:
        if kind == "module":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(name).resolve().parent)
            runpy.run_path(name, run_name="__main__")
    except ClusterError as error:
        _record(handler, error)
        # The launcher blames whoever it sees end first: let that be the rank that failed, not one that heard of it.  Where in
        # this rank's code it heard of it helps nobody, so there is no traceback.
        time.sleep(GRACE_S)
        sys.exit(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}")
    except Exception as error:
        _record(handler, error)
        raise


def _record(handler: ErrorHandler, error: Exception) -> None:
    """Write the error down where the launcher looks, all at once: it may look at any moment, and stumbles over half a file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return handler.record_exception(error)
    os.environ["TORCHELASTIC_ERROR_FILE"] = part = f"{path}.part"
    handler.record_exception(error)
    os.environ["TORCHELASTIC_ERROR_FILE"] = path
    os.replace(part, path)


def _die_with(launcher: int) -> None:
    """If the launcher is killed, nobody is left to stop this worker: ask the kernel to.  It may be gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)


if __name__ == "__main__":
    main()
