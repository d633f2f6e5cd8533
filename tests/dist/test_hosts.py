"""Workers on several hosts: gloo between them, mailboxes across, no shared memory."""

from __future__ import annotations

import json

import pytest
from tests.dist import hosts
from tests.dist.test_attach import ORDERED, task

import paceline as pl

pytestmark = [pytest.mark.dist, pytest.mark.netns, pytest.mark.timeout(240)]

SCRIPT = """
import json, sys
import torch
import paceline as pl
from tests.dist.test_attach import ORDERED, task
torch.set_num_threads(1)
for name, strategy in {**ORDERED, "server": pl.ParameterServer(rule=pl.Sgd(lr=0.05), servers=2)}.items():
    run = pl.train(task(), strategy, ordered=True)
    print(json.dumps([name, run.params.tolist()]), flush=True)
"""


@pytest.fixture(scope="module")
def two_hosts():
    reason = hosts.why_not()
    if reason:
        pytest.skip(reason)
    with hosts.hosts(2) as places:
        yield places


def test_ordered_sums_across_hosts_give_the_simulators_bits(two_hosts, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for said in hosts.run_on(two_hosts, script, per_host=1):
        vectors = dict(json.loads(line) for line in said.splitlines())
        for name, strategy in ORDERED.items():
            assert vectors[name] == pl.simulate(task(), strategy, pl.Cluster(workers=2)).params.tolist(), name
        assert len(vectors["server"]) == len(vectors["all-reduce"])
