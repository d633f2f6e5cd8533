"""What workers of `paceline run` print: whole lines with their worker's number; and the folders of dead launchers."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from paceline.engines.folder import LOCK, PREFIX, remove_abandoned, run_folder
from paceline.engines.output import MOST, STDOUT, LineRelay, _Stream
from tests.dist import forked

SCRIPT = """
import os, sys
rank = os.environ["RANK"]
for i in range(200):
    sys.stdout.write(f"{rank}: the beginning, ")
    sys.stdout.write(f"and the end of line {i}\\n")
for i in range(3):
    sys.stderr.write(f"\\r{rank}: progress {i}")
"""


def printed(folder: Path, *arguments: str) -> tuple[list[str], list[str]]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    done = forked.paceline("run", *arguments, str(script), folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.dist
def test_lines_of_several_workers_are_labelled_and_whole(tmp_path):
    out, err = printed(tmp_path, "-n", "3")
    expected = [f"[worker {r}] {r}: the beginning, and the end of line {i}" for r in range(3) for i in range(200)]
    assert sorted(out) == sorted(expected)
    for rank in range(3):  # In order, for each.
        assert [line for line in out if line.startswith(f"[worker {rank}]")] == expected[200 * rank : 200 * (rank + 1)]
    assert sorted(err) == [f"[worker {r}] {r}: progress 2" for r in range(3)]


@pytest.mark.dist
@pytest.mark.parametrize("arguments", [["-n", "1"], ["-n", "2", "--no-prefix"]], ids=" ".join)
def test_one_worker_or_no_prefix_prints_as_the_script_does(arguments, tmp_path):
    out, _ = printed(tmp_path, *arguments)
    assert not any("[worker" in line for line in out)
    assert "".join(out).count("the beginning") == 200 * int(arguments[1])


def test_a_line_without_an_end_is_held_back_but_not_for_ever():
    stream = _Stream(STDOUT, b"> ")
    assert stream.lines(b"half") == b""
    assert stream.lines(b" and half\nmore") == b"> half and half\n"
    assert stream.lines(b"", is_end=True) == b"> more\n"
    assert stream.lines(b"", is_end=True) == b""
    assert stream.lines(b"a\r\nb\n") == b"> a\n> b\n"
    assert stream.lines(b"x" * (MOST + 1)) == b"> " + b"x" * (MOST + 1) + b"\n"


def test_relay_does_not_wait_for_a_writer_that_stays(capfd):
    relay = LineRelay()
    out, err = relay.open(2)
    os.write(out, b"first\nsecond")
    relay.pump()
    assert capfd.readouterr().out == "[worker 2] first\n"
    os.close(err)
    relay.finish()
    assert capfd.readouterr().out == "[worker 2] second\n"
    assert not relay.files()
    os.close(out)


def test_only_folders_of_dead_launchers_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = tmp_path / f"{PREFIX}dead"
    unknown = tmp_path / f"{PREFIX}unknown"  # Without a lock file: perhaps it was made just now.
    for folder in (dead, unknown):
        folder.mkdir()
    (dead / LOCK).touch()
    (dead / "error-0-0.json").touch()
    with run_folder() as mine:
        assert mine.parent == tmp_path and not dead.exists() and unknown.exists()
        remove_abandoned(tmp_path)
        assert mine.is_dir()
        held = os.open(mine / LOCK, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(held)
    assert not mine.exists()
