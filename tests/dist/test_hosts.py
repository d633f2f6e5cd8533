"""Workers on several hosts: gloo between them, mailboxes, and no shared memory."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch

import paceline as pl
from tests.dist import hosts
from tests.dist.test_attach import ORDERED, task
from tests.dist.test_pipeline import FAR
from tests.dist.test_pipeline import task as in_stages

pytestmark = [pytest.mark.dist, pytest.mark.netns, pytest.mark.timeout(240)]

SCRIPT = """
import json, sys
import torch
import paceline as pl
from tests.dist.test_attach import ORDERED, task
torch.set_num_threads(1)
for name, strategy in {**ORDERED, "server": pl.ParameterServer(rule=pl.rules.Sgd(lr=0.05), servers=2)}.items():
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
    for said in hosts.run_on(two_hosts, script, per_host=1, torchrun=True):
        vectors = dict(json.loads(line) for line in said.splitlines())
        for name, strategy in ORDERED.items():
            assert vectors[name] == pl.simulate(task(), strategy, pl.Cluster(workers=2)).params.tolist(), name
        assert len(vectors["server"]) == len(vectors["all-reduce"])


COUNTED = """
import json, time
from pathlib import Path
from types import SimpleNamespace
import torch
import paceline as pl
from paceline import codecs
from paceline.collectives import SyncVote, mean, mean_encoded
from paceline.engines.job import Job
from tests.laws.slots import Slots
torch.set_num_threads(1)
# The bytes that the interface sent, without the 66 bytes of Ethernet, IPv4 and TCP headers of each packet (also of
# acknowledgements), and without retransmitted segments of at most 1448 bytes.
def on_the_wire():
    [sent] = [line.split()[9:11] for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line]
    lines = Path("/proc/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(sent[0]) - 66 * int(sent[1]) - 1448 * int(values[names.index("RetransSegs")])
numel = 1_000_000
with Job(pl.Needs(), device=torch.device("cpu")) as job:
    e = job.endpoint
    for name in ["none", *json.loads(Path(__file__).with_name("codecs.json").read_text())]:
        # The messages are so large that their headers, about 5 kB for ten of them, do not matter.
        settings = {"threshold": {"tau": 1.5}, "power-sgd": {"rank": 64}}.get(name, {})
        codec = None if name == "none" else pl.registry.codec(name, **settings)
        remember = lambda slot, *, rule, version=1, **initial: SimpleNamespace(**initial)
        link = codec and codec.codec_state(remember, torch.zeros(numel), key=e.rank)
        def once(seed):
            x = torch.randn(numel, generator=torch.Generator().manual_seed(seed + e.rank))
            vote = SyncVote(1.0, rank=e.rank)
            routine = (lambda c: mean(c, x, vote)) if link is None else (lambda c: mean_encoded(c, x, vote, link))
            e.run_collectives(routine).wait()
        once(0)
        e.all_reduce(torch.zeros(1)).wait()
        time.sleep(0.2)  # Until the last of it is acknowledged.
        wire, traced = on_the_wire(), e.trace.bytes_sent(rank=e.rank)
        for seed in range(1, 11):
            once(seed)
        e.all_reduce(torch.zeros(1)).wait()
        time.sleep(0.2)
        print(json.dumps([name, on_the_wire() - wire, e.trace.bytes_sent(rank=e.rank) - traced]), flush=True)
"""


def test_the_bytes_in_the_trace_are_those_that_the_interface_counts(two_hosts, tmp_path):
    """Within 3 %, because the headers of gloo add some bytes.

    The kernel chooses the number of packets and of retransmissions, depending on its load.
    """
    names = ["fp32", "fp16", "one-bit", "n-bit", "qsgd", "threshold", "top-k", "power-sgd"]
    script = tmp_path / "count.py"
    script.write_text(COUNTED)
    (tmp_path / "codecs.json").write_text(json.dumps(names))
    for said in hosts.run_on(two_hosts, script, per_host=1):
        counts = [json.loads(line) for line in said.splitlines()]
        assert [name for name, _, _ in counts] == ["none", *names]
        for name, wire, traced in counts:
            assert abs(traced / wire - 1) < 0.03, f"{name}: {traced} bytes in the trace, {wire} on the interface"


GROUPED = """
import torch
import paceline as pl
from tests.dist.hosts import say
from tests.dist.test_attach import task
torch.set_num_threads(1)
for name, codec in {
    "plain": None, "fp32": pl.codecs.Fp32(), "fp16": pl.codecs.Fp16(), "one-bit": pl.codecs.OneBit()
}.items():
    run = pl.train(task(), pl.AllReduceSGD(codec=codec))
    say([name, run.params.tolist()])
"""


def test_two_hosts_of_two_workers_sum_within_each_host_before_they_sum_between_hosts(two_hosts, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(GROUPED)
    said = [json.loads(line) for out in hosts.run_on(two_hosts, script, per_host=2) for line in out.splitlines()]
    flat = pl.simulate(task(), pl.AllReduceSGD(), pl.Cluster(workers=4))
    assert len(said) == 4 * 4
    for name, params in said:
        if name != "one-bit":
            error = 2e-3 if name == "fp16" else 1e-5
            assert torch.allclose(torch.tensor(params), flat.params, rtol=10 * error, atol=error), name
    assert len({json.dumps(line) for line in said}) == 4, "all four end with the same bits"


TWICE = """
import copy
import torch
import torch.distributed as dist
from torch import nn
import paceline as pl
from tests.dist.hosts import say
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, gaps = dist.get_rank(), []
for _ in range(2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 40), nn.Linear(40, 30))
    alone, ddp = copy.deepcopy(model), nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.008)
    hook = pl.ddp_hook(pl.codecs.OneBit(bucket=32), ddp)
    generator, meant, said = torch.Generator().manual_seed(rank), 0, 0
    for _ in range(4):
        x = torch.randn(8, 40, generator=generator)
        for m in (alone, ddp):
            m.zero_grad()
            m(x).square().mean().backward()
        mine, heard = (torch.cat([p.grad.reshape(-1).double() for p in m.parameters()]) for m in (alone, model))
        dist.all_reduce(mine)
        meant, said, state = meant + mine / 4, said + heard, hook.state_dict()
        # A host's word counts for its two ranks of four.
        parts = [state[f"residual.{n}"] / 2 + state[f"owner_residual.{n}"] for n, _ in model.named_parameters()]
        dist.all_reduce(owed := torch.cat([p.reshape(-1).double() for p in parts]))
        gaps.append(((said + owed - meant).abs().max() / meant.abs().max()).item())
say(gaps)
dist.barrier()
"""


def test_hooks_by_host_lose_nothing_when_buckets_change_and_may_follow_one_another(two_hosts, tmp_path):
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    said = [
        json.loads(line)
        for out in hosts.run_on(two_hosts, script, per_host=2, timeout_s=60)
        for line in out.splitlines()
    ]
    assert len(said) == 4 and all(len(gaps) == 8 and max(gaps) < 1e-5 for gaps in said), said


BESIDE = """
import torch
import torch.distributed as dist
from torch import nn
import paceline as pl
from tests.dist.hosts import say
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, sums = dist.get_rank(), []
for turn in range(2):
    torch.manual_seed(0)
    model = nn.Linear(1000, 1000)  # Large enough that a mean takes longer than the user's own sums.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = pl.attach(model, optimizer, pl.PeriodicAveraging(period=3, delay=2))
    for step in range(10):  # The last mean is still under way when the loop ends.
        model(torch.full((4, 1000), 1.0 + rank)).square().mean().backward()
        session.step()
        mine = torch.full((10,), step + rank)
        dist.all_reduce(mine)
        sums.append(mine[0].item())
    dist.barrier()
    session.close()
    dist.barrier()
say([sums, [sync.step for sync in session.trace.syncs]])
"""


def test_the_users_own_collectives_do_not_mix_with_those_in_flight(two_hosts, tmp_path):
    script = tmp_path / "beside.py"
    script.write_text(BESIDE)
    for said in hosts.run_on(two_hosts, script, per_host=1, timeout_s=60):
        sums, syncs = json.loads(said)
        assert sums == 2 * [2 * step + 1 for step in range(10)]
        assert syncs == [2, 5, 8, 11]  # The last one is when the session ends, after empty steps.


STAGES = """
import torch
import paceline as pl
from tests.dist.hosts import say
from tests.dist.test_pipeline import FAR, task
torch.set_num_threads(1)
for name, strategy in FAR.items():
    say([name, pl.train(task(), strategy, stages=2).params.tolist()])
"""


def test_replicas_in_stages_on_one_host_each_equal_workers_on_one_host_each(two_hosts, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(STAGES)
    for said in hosts.run_on(two_hosts, script, per_host=2, timeout_s=200):
        vectors = [json.loads(line) for line in said.splitlines()]
        assert len(vectors) == 2 * len(FAR)
        for name, params in vectors:
            alike = pl.simulate(in_stages(), FAR[name], pl.Cluster(workers=2)).params
            assert torch.allclose(torch.tensor(params, dtype=alike.dtype), alike, rtol=1e-10), name


ELASTIC = """
import hashlib, os, signal, sys, time
from dataclasses import replace
from pathlib import Path
import torch
import paceline as pl
from paceline.codecs import OneBit
from tests.dist.hosts import say
from tests.dist.test_outliving import regression
torch.set_num_threads(1)
silent_s, steps = map(int, sys.argv[1:3])
dying = dict(pair.split(":") for pair in sys.argv[3:])  # The step at which a rank dies.
rank, done = int(os.environ["RANK"]), 0
task = regression(steps=steps)

def loss(model, batch):
    global done
    done += 1
    if done == 20:
        Path(__file__).with_name("begun").touch()
    time.sleep(0.01)
    if dying.get(f"{rank}") == f"{done}":
        os.kill(os.getpid(), signal.SIGKILL)
    return task.loss(model, batch)

strategy = pl.AllReduceSGD(codec=OneBit()) if dying else pl.DiLoCo(period=4, delay=1, fragments=2)
run = pl.train(replace(task, loss=loss), strategy, elastic=True, silent_s=float(silent_s))
seen = [[d.kind, d.values["workers"], d.values["pause_s"]] for d in run.trace.decisions]
say([rank, hashlib.sha256(run.params.numpy().tobytes()).hexdigest(), seen])
"""


def ended(said: list[str]) -> tuple[set[str], list[list[Any]]]:
    """The models at the end, and how the workers changed."""
    lines = [json.loads(line) for out in said for line in out.splitlines()]
    return {model for _, model, _ in lines}, [change for *_, seen in lines for change in seen]


def test_the_others_go_on_when_a_host_loses_one_of_its_workers_and_then_all(two_hosts, tmp_path):
    """The dead are found by their connections: silence would take longer than the test."""
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    said = hosts.run_on(two_hosts, script, "100", "24", "3:7", "2:14", per_host=2, timeout_s=60, killed=2)
    models, changes = ended(said)
    assert len(models) == 1
    assert [count for kind, count, _ in changes if kind == "workers"] == [3, 2], changes
    assert max(pause_s for *_, pause_s in changes) < 10, changes


def test_a_host_that_was_cut_off_is_left_out_and_comes_back(two_hosts, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)

    def cut() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.05)
        hosts.cut(1, 1.8)

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        said = hosts.run_on(two_hosts, script, "1", "300", per_host=1, timeout_s=60)
    finally:
        (tmp_path / "begun").touch()
        thread.join()
    models, changes = ended(said)
    assert len(models) == 1
    assert [count for kind, count, _ in changes if kind == "workers"] == [1, 2], changes
