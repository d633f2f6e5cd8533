"""Failures of the cluster.  Mistakes of the caller are ValueErrors; our own mistakes are AssertionErrors."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

PACKAGE = str(Path(__file__).parent)
LIBRARY = sysconfig.get_path("stdlib")
MISTAKES = (ValueError, FloatingPointError)
"""What we raise for a mistake of the caller's, and for numbers that are not finite."""


SAVED_CODE = 143
"""The exit code of a worker that has saved the run after SIGTERM: that of a shell for a process that SIGTERM ended."""


class ClusterError(RuntimeError):
    """A failure outside this process: a peer died, disagreed, or did not answer in time."""


class DifferentCollectives(ClusterError):
    """Two ranks have started different collectives: their programs have diverged."""


class ExchangeFailed(ClusterError):
    """A collective failed, or a peer did not take part in it in time."""


class PeerLost(ClusterError):
    """A peer's process is dead."""

    def __init__(self, rank: int, doing: str, why: str = "") -> None:
        super().__init__(f"{why or f'rank {rank} is gone (its connection closed)'} during '{doing}'")
        self.rank = rank


def shown_traceback(error: BaseException) -> str:
    """The traceback of an error as its reader needs it.

    If it leads through code of the caller's, it is that part.  A mistake that our own checks have found needs none: the
    error says it all.  Otherwise it is the whole one.
    """
    if found := callers_traceback(error):
        return found
    frames = traceback.extract_tb(error.__traceback__)
    if frames and _is_ours(frames[-1].filename) and isinstance(error, (*MISTAKES, ClusterError)):
        return ""
    return "".join(traceback.format_exception(error))


def callers_traceback(error: BaseException) -> str:
    """The traceback from the first frame of the caller's code on, without our frames; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, f in enumerate(frames) if _is_callers(f.filename)), len(frames))
    kept = [f for f in frames[first:] if not _is_ours(f.filename)]
    if not kept and not isinstance(error, SyntaxError):
        return ""
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(kept)] if kept else []
    return "".join([*lines, *traceback.format_exception_only(error)])


def _is_ours(file: str) -> bool:
    return file.startswith(PACKAGE)


def _is_callers(file: str) -> bool:
    # Methods that dataclasses have are in "<string>".
    is_installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return not (_is_ours(file) or is_installed or file.startswith((LIBRARY, "<frozen", "<string>")))
