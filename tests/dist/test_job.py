"""A job's groups: collectives among some of the workers."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.engines.job import Job
from paceline.engines.place import Place
from paceline.errors import ClusterError
from paceline.needs import Needs
from tests.dist import forked

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("through", ["shared memory", "gloo"])
def test_groups_sum_only_over_their_members(through, tmp_path):
    def work(rank):
        if through == "gloo":
            del os.memfd_create
        with Job(Needs(), device=torch.device("cpu")) as job:
            sums = []
            pairs = [(0, 1), (2, 3)] if rank != 0 else [(0, 1)]
            for ranks in [*pairs, (3, 1), (0,)]:
                if rank in ranks:
                    group = job.endpoint.group(ranks)
                    assert group is job.endpoint.group(ranks)
                    x = torch.tensor([float(rank), 1.0])
                    sums.append(group.all_reduce(x).wait().tolist())
                    sums.append([int(t) for t in group.all_gather(torch.tensor([rank])).wait()])
            sums.append(job.endpoint.all_reduce(torch.tensor([float(rank)])).wait().tolist())
            return sums

    one, two, three, four = forked.run(4, work, tmp_path)
    assert one == [[1.0, 2.0], [0, 1], [0.0, 1.0], [0], [6.0]]
    assert two == [[1.0, 2.0], [0, 1], [4.0, 2.0], [1, 3], [6.0]]
    assert three == [[5.0, 2.0], [2, 3], [6.0]]
    assert four == [[5.0, 2.0], [2, 3], [4.0, 2.0], [1, 3], [6.0]]


def test_a_worker_outside_a_group_is_refused(tmp_path):
    def work(rank):
        with Job(Needs(), device=torch.device("cpu")) as job:
            for ranks in ((1 - rank,), (0, 7)):
                with pytest.raises(ValueError, match=f"rank {rank} asked for the group"):
                    job.endpoint.group(ranks)

    assert forked.run(2, work, tmp_path) == [None, None]


def test_an_ended_job_leaves_no_thread_of_its_process_group(tmp_path):
    """A thread that frees a tensor while the interpreter exits is stopped by it, and crashes the process."""

    def gloos():
        return sum("gloo" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir())

    def work(rank):
        del os.memfd_create
        dist.destroy_process_group()
        gc.collect()
        gc.disable()  # Garbage collection would free them at some later time.
        before, store = gloos(), dist.FileStore(str(tmp_path / "own"), 2)
        with Job(Needs(), device=torch.device("cpu"), place=Place("test", rank, 2, lambda _: store)) as job:
            job.endpoint.all_reduce(torch.ones(3)).wait()
            job.endpoint.group([rank])
            during = gloos()
        return [before, during > 0, gloos()]

    assert forked.run(2, work, tmp_path) == [[0, True, 0]] * 2


def test_a_store_whose_process_has_ended_is_an_error_of_the_job():
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = Place("test", 0, 1, lambda _, port=master.port: dist.TCPStore("127.0.0.1", port))
    with Job(Needs(collectives=False, messages=True), device=torch.device("cpu"), place=place) as job:
        del master
        gc.collect()
        with pytest.raises(ClusterError, match="the job's store, in another process, cannot be reached"):
            job.endpoint.has_ended(1)
