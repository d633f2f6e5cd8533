"""Damaged files of every kind are refused by an error of the caller's kind, or load; `benchmarks.fuzz` does more."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from benchmarks._damaged_files import Loaders
from paceline.engines import joining
from paceline.engines.supervisor import read_report
from paceline.trace import Trace

CASES = 300


def test_damaged_files_are_refused_or_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(joining.KEY_FILE, "")  # So that it is as before after the test.
    monkeypatch.delenv(joining.KEY, raising=False)
    chance = Random(1)
    loaders = Loaders(tmp_path).all
    refused = 0
    for case in range(CASES):
        loader = loaders[case % len(loaders)]
        loader.damage(chance)
        try:
            loader.load()
        except (ValueError, OSError):
            refused += 1
        loader.restore()
    assert CASES / 2 < refused < CASES
    for loader in loaders:
        loader.load()


def test_a_text_that_is_no_trace_is_refused():
    for text in ("", "null", "{}", "[" * 100_000, '{"points": 7}', '{"points": [[1]]}', '{"points": [], "sent": []}'):
        with pytest.raises(ValueError, match="this is not the text of a trace"):
            Trace.loads(text)


def test_a_report_of_a_dead_worker_may_be_anything(tmp_path: Path):
    path = tmp_path / "report.json"
    for text in ("", "null", "7", "[" * 100_000, "{}"):
        path.write_text(text)
        assert read_report(path) is None
    for text in ('{"message": {"extraInfo": "x"}}', '{"message": {"extraInfo": {"timestamp": [1]}}}'):
        path.write_text(text)
        found = read_report(path)
        assert found is not None and found.time == 0.0
