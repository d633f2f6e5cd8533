"""Launchers that paceline recognises, one per file: the files in this folder are found by themselves.

Each file has a function `announced(environ)`, which says what the launcher's environment variables say about this
process, or None if this launcher did not start it.  To add a launcher, add a file.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Variable:
    """An environment variable that holds a number."""

    name: str
    value: int

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


@dataclass(frozen=True)
class Announced:
    """What one launcher's variables say about this process."""

    launcher: str
    rank: Variable
    world: Variable | None  # None: the launcher gives no size; another one's variables must.
    local_rank: int | None = None
    local_world: int | None = None
    job_id: str | None = None  # The same on all ranks of this job, and on no other job of this host.
    # Launchers run inside each other: a batch system starts MPI's daemons, and these start torchrun.  The innermost one
    # (with the highest level) started this process.  None: anything may have set the variables, so they must agree.
    level: int | None = None


BATCH_SYSTEM = 0
MPI = 1
AGENT = 2


def all_announced(environ: Environ) -> list[Announced]:
    """What every known launcher's variables say, those of torchrun first."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    found: list[Announced] = []
    for name in sorted(names, key=lambda name: name != "torchrun"):
        read: Callable[[Environ], Announced | None] = import_module(f"{__name__}.{name}").announced
        one = read(environ)
        if one is not None:
            found.append(one)
    return found


def number(environ: Environ, *names: str) -> Variable | None:
    """The first of these variables that is set, as a number from 0 up."""
    for name in names:
        if name in environ:
            text = environ[name]
            if not text.isdecimal():
                raise ValueError(f"the environment variable {name} is {text!r}: it must be a number, 0 or more")
            return Variable(name, int(text))
    return None


def value(variable: Variable | None) -> int | None:
    return None if variable is None else variable.value
