"""Ranks that do not belong together are refused at the start, by name; and who learns the job's key."""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, HashStore, TCPStore

import paceline
from paceline.engines import hosts, joining, master
from paceline.engines.job import Job
from paceline.engines.joining import join
from paceline.engines.master import store_at_master
from paceline.engines.place import Place
from paceline.errors import ClusterError
from paceline.needs import Needs
from paceline.transport.job_key import JobKey
from tests.dist import forked
from tools.ports import listeners

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]
GOOD, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture(autouse=True)
def no_key_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(joining.KEY, raising=False)
    monkeypatch.delenv(joining.KEY_FILE, raising=False)


def joined(tmp_path: Path, *prepare) -> list[dict[str, str]]:
    """What ranks get by joining, each after what it prepares."""
    folder = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"

    def work(rank):
        prepare[rank]()
        keys = FileStore(str(folder / "keys"))
        store, key = join(keys, "job", Place("test", rank, len(prepare), lambda _: keys), timeout_s=20)
        store.set(f"word/{rank}", f"of {rank}")
        words = [store.get(f"word/{other}").decode() for other in range(len(prepare))]
        return {"words": words, "key": "" if key is None else key.text(), "signed": type(store).__name__}

    return forked.run(len(prepare), work, folder)


def given(text: str | None):
    return lambda: text is None or os.environ.__setitem__(joining.KEY, text)


def test_ranks_of_one_host_agree_on_a_fresh_key_or_use_the_given_one(tmp_path: Path):
    fresh = joined(tmp_path, *[given(None)] * 3)
    assert all(found["words"] == ["of 0", "of 1", "of 2"] for found in fresh)
    assert len({found["key"] for found in fresh}) == 1 and len(fresh[0]["key"]) == 64
    same = joined(tmp_path, given(GOOD), given(GOOD.upper()))
    assert {found["key"] for found in same} == {GOOD}
    again = joined(tmp_path, given(None), given(None))
    assert again[0]["key"] != fresh[0]["key"]


def test_ranks_with_different_keys_or_versions_are_named_on_every_rank(tmp_path: Path):
    def newer():
        paceline.__version__ = "99.1.2"

    def other_torch():
        torch.__version__ = "2.3.4+cu118"

    for prepare, said in (
        ([given(GOOD), given(None)], "rank 0 has a job key and rank 1 has none: give the same PACELINE_JOB_KEY_FILE"),
        ([given(None), given(GOOD)], "rank 1 has a job key and rank 0 has none"),
        ([given(None), newer], f"rank 0 has paceline {paceline.__version__} and rank 1 has paceline 99.1.2: install"),
        ([other_torch, given(None)], f"rank 0 has torch 2.3.4 and rank 1 has torch {torch.__version__.split('+')[0]}"),
    ):
        began = time.monotonic()
        errors = [found["error"] for found in joined(tmp_path, *prepare)]
        assert all(error.startswith(f"ValueError: {said}") for error in errors), errors
        assert time.monotonic() - began < 10
    errors = [found["error"] for found in joined(tmp_path, given(GOOD), given(OTHER))]
    assert [error.split(":")[1].strip() for error in errors] == [
        "rank 1 has another job key than this rank",
        "rank 0 has another job key than this rank",
    ]
    assert not any(text in error for error in errors for text in (GOOD, OTHER))


def first_job(folder: Path) -> list[Place]:
    """The places of two ranks that have joined a job in the store in this folder."""
    keys = [FileStore(str(folder / "keys")) for _ in range(2)]
    places = [Place("test", rank, 2, lambda _: keys[0]) for rank in (0, 1)]
    other = threading.Thread(target=lambda: join(keys[1], "job", places[1], timeout_s=20))
    other.start()
    join(keys[0], "job", places[0], timeout_s=20)
    other.join(20)
    return places


def test_a_store_with_the_keys_of_an_earlier_job_is_named(tmp_path: Path):
    """All that have joined are killed, and others are started with the same store."""
    for place in first_job(tmp_path):
        said = f"rank {place.rank} has joined this job before: its rendezvous has the keys of an earlier job"
        with pytest.raises(ClusterError, match=said):
            join(place.meet(20), "job", place, timeout_s=20)
        with pytest.raises(ClusterError, match=said):  # Without the key no rank can return.
            join(place.meet(20), "job", place, timeout_s=20, may_return=True)


def test_a_rank_that_may_return_joins_again_with_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(joining.KEY, GOOD)
    place = first_job(tmp_path)[1]
    assert join(place.meet(20), "job", place, timeout_s=20, may_return=True).key is not None


def test_builds_of_one_torch_for_different_processors_are_the_same_version(tmp_path: Path):
    def gpu():
        torch.__version__ = torch.__version__.partition("+")[0] + "+cu999"

    assert "error" not in joined(tmp_path, given(None), gpu)[1]


def test_another_user_does_not_get_the_key():
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    store = HashStore()
    found: list[JobKey] = []
    rank0 = threading.Thread(
        target=lambda: found.append(joining._handed_over(store, 0, 2, time.monotonic() + 20)), daemon=True
    )
    rank0.start()
    name = store.get("key").decode()
    program = (
        "import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        f"s.connect('\\0paceline-key-{name}'); s.sendall(b'1'); print(s.recv(99))"
    )
    stolen = subprocess.run(["/usr/bin/env", "python3", "-c", program], capture_output=True, text=True, timeout=20)
    assert stolen.stdout == "b''\n" or re.search("ConnectionResetError|BrokenPipeError", stolen.stderr), stolen
    assert rank0.is_alive()
    assert joining._handed_over(store, 1, 2, time.monotonic() + 20).text() == _after(rank0, found).text()


def _after(thread: threading.Thread, found: list[JobKey]) -> JobKey:
    thread.join(20)
    return found[0]


# The address of the rendezvous.


def at(monkeypatch: pytest.MonkeyPatch, host: str, port: object) -> None:
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(master, "PATIENCE_S", 0.3)
    monkeypatch.setattr(master, "ANSWER_S", 0.5)


def refused(rank: int, *, timeout_s: float = 60.0) -> str:
    began = time.monotonic()
    with pytest.raises((ClusterError, ValueError)) as caught:
        store_at_master(rank, 2, timeout_s, is_one_host=True)
    assert time.monotonic() - began < 5
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_wrong_rendezvous_is_one_line_within_seconds(monkeypatch: pytest.MonkeyPatch):
    at(monkeypatch, "no-such-host.invalid", 1234)
    for rank in (0, 1):
        assert f"rank {rank}, MASTER_ADDR=no-such-host.invalid MASTER_PORT=1234: the name cannot" in refused(rank)
    for port in ("", "http", "0", "65536", "-1"):
        at(monkeypatch, "127.0.0.1", port)
        assert refused(1) == f"the environment variable MASTER_PORT is {port!r}: it must be a port, 1 to 65535"
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        at(monkeypatch, "127.0.0.1", free.getsockname()[1])
        assert "there is no store: Connection refused" in refused(1, timeout_s=0.3)


@pytest.mark.parametrize(
    "said", [None, b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(64)]
)
def test_a_port_of_another_program_is_named(said: bytes | None, monkeypatch: pytest.MonkeyPatch):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def answer():
            connection = server.accept()[0]
            if said is not None:
                connection.sendall(said)
                connection.close()
            kept.append(connection)

        kept: list[socket.socket] = []
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        at(monkeypatch, "127.0.0.1", server.getsockname()[1])
        assert refused(1).endswith(
            "another program listens there, or a hung one: nothing there answers as torch's store does"
        )
        thread.join(5)
        for connection in kept:
            connection.close()


def test_a_port_in_use_is_named_by_rank_0(monkeypatch: pytest.MonkeyPatch):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        at(monkeypatch, "127.0.0.1", server.getsockname()[1])
        assert "the port is in use on rank 0's host: choose another MASTER_PORT" in refused(0)


def test_rank_0_serves_the_store_on_the_named_address_alone(monkeypatch: pytest.MonkeyPatch):
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    at(monkeypatch, "127.0.0.1", port)
    before = listeners(os.getpid())
    found: list[object] = []
    client = threading.Thread(target=lambda: found.append(store_at_master(1, 2, 20, is_one_host=True)), daemon=True)
    client.start()  # Before the server: it waits.
    store = store_at_master(0, 2, 20, is_one_host=True)
    client.join(20)
    assert [one.address for one in listeners(os.getpid()) if one not in before] == [f"127.0.0.1:{port}"]
    store.set("a", "1")
    (other,) = found
    assert isinstance(other, TCPStore) and other.get("a") == b"1"


LOSES_ITS_STORE = """
import os, signal, time
from tools.ports import descendants, listeners
if os.environ["RANK"] == "0":
    [store] = [one.pid for one in listeners(*descendants(os.getppid())) if one.name == "paceline-store"]
    os.kill(store, signal.SIGKILL)
time.sleep(60)
"""


def test_a_job_whose_store_dies_ends_and_says_so(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(LOSES_ITS_STORE)
    done = forked.paceline("run", "-n", "2", str(script), folder=tmp_path, timeout_s=30)
    assert done.returncode == 1
    assert re.search(r"the process of the job's store \(\d+\) ended with exit code -9", done.stderr), done.stderr


# Who sees the key.

SCRIPT = """
import os, subprocess, sys, torch, json
import paceline as pl
from pathlib import Path
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
seen = Path(sys.argv[1], f"seen-{os.environ['RANK']}")
with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), pl.AllReduceSGD()) as session:
    key = session.job._key.text()
    file = Path(os.environ["PACELINE_JOB_KEY_FILE"])
    words = [p.read_bytes().decode(errors="replace") for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    environ = Path("/proc/self/environ").read_text()
    visible = any(key in word for word in words), key in environ
    files = [oct(p.stat().st_mode & 0o777) for p in (file, file.parent)]
    seen.write_text(json.dumps({"key": key, "visible": visible, "files": files, "path": str(file)}))
    os.chmod(seen, 0o600)
    model(torch.ones(3, 4)).sum().backward()
    session.step()
    if session.rank == 1:
        raise ValueError("a mistake of my own")
"""


def test_the_key_of_a_run_is_in_one_file_that_only_this_user_can_read(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = forked.paceline("run", "-n", "2", str(script), str(tmp_path), folder=tmp_path)
    seen = [json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in (0, 1)]
    assert done.returncode == 1 and "a mistake of my own" in done.stderr
    assert seen[0]["key"] == seen[1]["key"] and len(seen[0]["key"]) == 64
    assert all(found["visible"] == [False, False] and found["files"] == ["0o600", "0o700"] for found in seen)
    assert not Path(seen[0]["path"]).exists()
    assert seen[0]["key"] not in done.stdout + done.stderr


def test_messages_between_hosts_without_a_key_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def work(rank):
        monkeypatch.setattr(hosts, "host_name", lambda: f"host {rank}")
        monkeypatch.setattr(joining, "host_name", lambda: f"host {rank}")
        store = FileStore(str(tmp_path / "own"), 2)
        Job(Needs(collectives=False), device=torch.device("cpu"), place=Place("test", rank, 2, lambda _: store))

    said = "ValueError: messages between hosts need a job key, without which any process that reaches the rendezvous"
    assert all(found["error"].startswith(said) for found in alone(2, work, tmp_path / "ranks"))


def alone(workers: int, work, folder: Path):
    def without_torchs_group(rank):
        torch.distributed.destroy_process_group()
        return work(rank)

    return forked.run(workers, without_torchs_group, folder)
