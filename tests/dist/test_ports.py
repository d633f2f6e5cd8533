"""What a running job listens on: on one host loopback alone, between hosts the one address of each host."""

# pyright: basic
from __future__ import annotations

import ctypes
import json
import socket
import subprocess
from pathlib import Path

import pytest

from paceline import cli
from paceline.engines.interfaces import interface_of
from tests.dist import forked, hosts

pytestmark = [pytest.mark.dist, pytest.mark.netns, pytest.mark.timeout(120)]

OWN_NAME_AND_NETWORK = 0x04000000 | 0x40000000  # CLONE_NEWUTS and CLONE_NEWNET.
ADDRESS = "10.213.8.1"
ONE_STEP = """
import json, os, sys, time
from pathlib import Path
import torch
import paceline as pl
from tools.ports import descendants, listeners
torch.set_num_threads(1)
os.environ.pop("GLOO_SOCKET_IFNAME", None)
own = os.getppid() if sys.argv[2] == "one host" else os.getpid()
if sys.argv[2] == "hosts":  # Rank 0 serves the store, at another port than that of the test.
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
for name, strategy in {"gloo": pl.AllReduceSGD(), "servers": pl.ParameterServer(servers=2)}.items():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy) as session:
        model(torch.ones(2, 3)).sum().backward()
        session.step()
        place = Path(sys.argv[1], f"{name}-{session.rank}")
        found = [[one.name, one.address] for one in listeners(*descendants(own)) if one.kind == "tcp"]
        place.with_suffix(".new").write_text(json.dumps(found))
        place.with_suffix(".new").rename(place)
        while not all(Path(sys.argv[1], f"{name}-{rank}").exists() for rank in range(session.workers)):
            time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def can_have_a_network_of_its_own():
    reason = hosts.why_not()
    if reason:
        pytest.skip(reason)


def on_a_host_of_its_own(program):
    """A program on a host that has an address of a network, to which also its name leads."""

    def run():
        if ctypes.CDLL(None, use_errno=True).unshare(OWN_NAME_AND_NETWORK):
            raise OSError(ctypes.get_errno(), "no namespace")
        socket.sethostname(ADDRESS)
        for words in (
            "link set lo up",
            "link add eth0 type veth peer name eth1",
            f"addr add {ADDRESS}/24 dev eth0",
            "link set eth0 up",
            "link set eth1 up",
        ):
            subprocess.run(["ip", *words.split()], check=True)
        assert interface_of(ADDRESS) == "eth0" and interface_of("::1") == "lo" and interface_of("10.9.9.9") is None
        program()

    return run


def test_a_job_on_one_host_listens_on_loopback_alone(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(ONE_STEP)
    words = ["paceline", "run", "-n", "2", str(script), str(tmp_path), "one host"]
    environment = {"PYTHONPATH": f"{hosts.ROOT / 'src'}:{hosts.ROOT}"}
    out, err = tmp_path / "out", tmp_path / "err"
    job = forked.start(
        on_a_host_of_its_own(cli.main), words, environment=environment, folder=tmp_path, out=out, err=err
    )
    job.join(60)
    job.kill()
    assert job.exitcode == 0, err.read_text()
    for name, listening in (("gloo", 3), ("servers", 5)):
        found = seen(tmp_path, name, 0)
        assert len(found) == listening and all(one.startswith("127.0.0.1:") for _, one in found), (name, found)


def seen(folder: Path, name: str, rank: int) -> list[list[str]]:
    return json.loads((folder / f"{name}-{rank}").read_text())


def test_each_host_of_a_job_listens_on_its_own_address_alone(tmp_path: Path):
    """The name of these hosts leads to loopback, where gloo would listen by itself, and would not find the other."""
    script = tmp_path / "script.py"
    script.write_text(ONE_STEP)
    with hosts.hosts(2) as places:
        hosts.run_on(places, script, str(tmp_path), "hosts")
    for name in ("gloo", "servers"):
        for rank, (_, address) in enumerate(places):
            found = seen(tmp_path, name, rank)
            assert found and all(one.startswith(f"{address}:") for _, one in found), (name, found)
