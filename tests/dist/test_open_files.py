"""A limit of open files that is too low is named at the start; one that may be raised is raised."""

# pyright: basic
from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from paceline import cli
from paceline.engines import open_files
from paceline.errors import ClusterError
from tests.dist import forked

pytestmark = [pytest.mark.dist, pytest.mark.timeout(60)]


def limited(soft: int, hard: int, work, folder: Path):
    """What `work` returns in a process that may have so many files open."""

    def in_process(rank):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return work()

    return forked.run(1, in_process, folder)[0]


def test_a_limit_that_is_too_low_is_named_with_what_is_needed(tmp_path: Path):
    found = limited(30, 30, lambda: open_files.check("rank 0 of 9 workers", 36), tmp_path)
    assert found["error"].startswith("ClusterError: rank 0 of 9 workers needs about ")
    assert (
        "open files at a time, and this process may have 30: raise the limit of open files (`ulimit -n`"
        in found["error"]
    )


def test_a_process_without_a_free_file_is_one_that_needs_more(tmp_path: Path):
    def full():
        kept = []
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                kept.append(os.open("/dev/null", os.O_RDONLY))
        try:
            open_files.check("rank 0", 1)
        except ClusterError as error:
            return str(error)
        finally:
            for file in kept:
                os.close(file)

    assert limited(40, 40, full, tmp_path).startswith("rank 0 needs about 45 open files")


@pytest.mark.parametrize(("soft", "more", "then"), [(200, 36, {200}), (40, 100, range(140, 200)), (200, 10**4, {1000})])
def test_the_soft_limit_is_raised_if_need_be_and_as_far_as_the_hard_one(soft: int, more: int, then, tmp_path: Path):
    def work():
        if more < 1000:
            open_files.check("rank 0", more)
        else:
            with pytest.raises(ClusterError, match="this process may have 1000"):
                open_files.check("rank 0", more)
            open_files.check("rank 0", 900)
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    found, hard = limited(soft, 1000, work, tmp_path)
    assert found in then and hard == 1000


SCRIPT = """
import torch
import paceline as pl
with pl.attach(torch.nn.Linear(3, 2), None, pl.ParameterServer(servers=2)):
    raise AssertionError("it started")
"""


@pytest.mark.parametrize(("limit", "said"), [(24, "the store of 2 workers needs"), (32, "of 2 workers needs about")])
def test_a_job_says_at_its_start_that_it_needs_more_files(limit: int, said: str, tmp_path: Path):
    """With these limits it hung before."""
    (tmp_path / "script.py").write_text(SCRIPT)
    most = 1 + max(map(int, os.listdir("/dev/fd")))

    def program():
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        os.closerange(3, most)  # Those of the tests, also above the limit.
        cli.main()

    out, err = tmp_path / "out", tmp_path / "err"
    words = ["paceline", "run", "-n", "2", str(tmp_path / "script.py")]
    job = forked.start(program, words, folder=tmp_path, out=out, err=err)
    job.join(30)
    job.kill()
    assert job.exitcode == 1
    last = err.read_text().splitlines()[-1] if limit == 24 else err.read_text()
    assert said in last and f"this process may have {limit}" in last and "it started" not in last, last
