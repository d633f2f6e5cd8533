"""OutcomeFile: the outcomes of trials, a line each, so that an interrupted search goes on where it was.

The first line describes what was tuned.  Lines are only appended.
"""

from __future__ import annotations

import json
import os
import warnings
from itertools import zip_longest
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

from paceline.session.settings import Settings
from paceline.study.trials import Key, Outcome

FORMAT = "paceline tune 1"
BEGIN = f'{{"format": "{FORMAT}"'.encode()


class TornLine(RuntimeWarning):
    """The last line of a file was written only in part."""


class OutcomeFile:
    """The outcomes so far: in memory, and in a file if there is a path."""

    def __init__(self, path: Path | None, settings: Settings) -> None:
        self.outcomes: dict[Key, Outcome] = {}
        self._path = path
        if path is None:
            return
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"tune(results={str(path)!r}): give the name of a file, in a folder that exists")
        lines = self._lines(path)
        if not lines:
            self._append({"format": FORMAT, "settings": settings})
            return
        different = _difference(_settings_of(path, lines[0]), settings)
        if different is not None:
            raise ValueError(
                f"tune(results={str(path)!r}): the trials in this file are of other settings: {different}; give "
                "another file, or delete this one"
            )
        for number, line in enumerate(lines[1:], 2):
            self._take(path, number, line)

    def add(self, key: Key, outcome: Outcome, rung: int) -> None:
        """Keep an outcome; `rung` is for readers of the file."""
        self.outcomes[key] = outcome
        if self._path is not None:
            metric = {} if outcome.metric is None else {"metric": outcome.metric if isfinite(outcome.metric) else None}
            loss = outcome.loss if isfinite(outcome.loss) else None
            self._append({"rate": key.rate, "seed": key.seed, "rung": rung, "steps": key.steps, "loss": loss} | metric)

    def _lines(self, path: Path) -> list[str]:
        """The whole lines of the file.  A part of a line at its end is removed."""
        content = path.read_bytes() if path.exists() else b""
        end = content.rfind(b"\n") + 1
        whole, torn = content[:end].decode(errors="replace"), content[end:]
        # Nothing is removed from a file that is not one of tune.
        if not (content.startswith(BEGIN) or BEGIN.startswith(content)):
            raise _foreign(path)
        if torn:
            text = f"{path}: its last line was written only in part; it is removed, and that trial runs again"
            warnings.warn(TornLine(text), stacklevel=5)
            os.truncate(path, end)
        return whole.splitlines()

    def _take(self, path: Path, number: int, line: str) -> None:
        try:
            given: dict[str, Any] = json.loads(line)
            key = Key(float(given["rate"]), int(given["seed"]), int(given["steps"]))
            loss = inf if given["loss"] is None else float(given["loss"])
            metric = None
            if "metric" in given:
                metric = nan if given["metric"] is None else float(given["metric"])
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            raise ValueError(
                f"tune(results={str(path)!r}): line {number} is no outcome of a trial: {line:.60}; delete this line"
            ) from None
        self.outcomes[key] = Outcome(loss, metric)

    def _append(self, content: dict[str, Any]) -> None:
        assert self._path is not None
        with self._path.open("a") as file:
            file.write(json.dumps(content) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _foreign(path: Path) -> ValueError:
    return ValueError(f"tune(results={str(path)!r}): this file is not one of tune; give the name of a new one")


def _settings_of(path: Path, line: str) -> Settings:
    try:
        return [(name, value) for name, value in json.loads(line)["settings"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _foreign(path) from None


def _difference(there: Settings, here: Settings) -> str | None:
    """The first setting that differs, with both values."""
    nothing = ("no further setting", "")
    for (name, theirs), (other, mine) in zip_longest(there, here, fillvalue=nothing):
        if name != other:
            return f"{name} {theirs} there, and {other} {mine} here".replace("  ", " ")
        if theirs != mine:
            return f"{name} is {theirs} there and {mine} here"
    return None
