"""A worker's way in under `paceline run`: runs the user's script, and writes down what it died of."""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    kind, name, *_ = sys.argv[1:]
    sys.argv = sys.argv[2:]
    _die_with_parent()
    handler = get_error_handler()
    handler.initialize()
    try:
        if kind == "module":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(__import__("pathlib").Path(name).resolve().parent)
            runpy.run_path(name, run_name="__main__")
    except Exception as error:
        handler.record_exception(error)
        raise


def _die_with_parent() -> None:
    """If the launcher is killed, nobody is left to stop this worker: ask the kernel to."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
