"""`paceline run`: the launcher as a user sees it, in real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import paceline as pl
from paceline import cli
from paceline.engines import entry, supervisor
from paceline.engines import launch as launching
from paceline.engines.job import Job
from paceline.transport.endpoint import ProcessEndpoint
from tests.dist import forked, hosts
from tests.dist.test_attach import ORDERED, task

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
SOURCES = f"{ROOT / 'src'}:{ROOT}"

SCRIPT = """
import json, os, sys
import torch
from tests.dist.test_attach import ORDERED, attached, task
torch.set_num_threads(1)
if sys.argv[2] == "gloo":
    del os.memfd_create  # Without it there is no shared memory to go through.
vectors = {name: attached(task(), strategy).tolist() for name, strategy in ORDERED.items()}
if os.environ["RANK"] == "0":
    open(sys.argv[1], "w").write(json.dumps({"workers": os.environ["WORLD_SIZE"], "vectors": vectors}))
"""

FAILING = """
import os, signal, sys, time
import torch
import paceline as pl
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
strategy = pl.AllReduceSGD() if sys.argv[2] == "all-reduce-sgd" else pl.ParameterServer(servers=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if strategy.needs.optimizer else None
with pl.attach(model, optimizer, strategy) as session:
    open(f"{sys.argv[3]}/pid-{session.rank}", "w").write(str(os.getpid()))
    for step in range(100_000):
        if session.rank == 1 and step == 20:
            if sys.argv[1] == "raise":
                raise ValueError("a mistake of my own")
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(3, 4)).sum().backward()
        session.step()
"""


SLOW_TO_END = """
import atexit, threading
import torch
import torch.distributed as dist
from paceline.errors import ClusterError
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.barrier()
    raise ClusterError("rank 1 is gone")
atexit.register(threading.Event().wait)  # Threads of other libraries can hold a process up.
dist.barrier()
raise ValueError("a mistake of my own")
"""


def launch(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return forked.paceline("run", *arguments, folder=folder, environment=variables(folder))


def variables(folder: Path) -> dict[str, str]:
    """The environment of the processes of a test. PACELINE_TEST marks them, so that they can be found."""
    return {
        "PYTHONPATH": SOURCES,
        "PACELINE_TEST": str(folder),
    }


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("launcher", "through", "workers"), [("paceline", "gloo", 3), ("torchrun", "shared memory", 2)]
)
def test_the_same_script_gives_the_simulators_bits_under_both_launchers(launcher, through, workers, tmp_path):
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    if launcher == "torchrun" and hosts.why_not() is None:
        pytest.skip("torchrun starts two hosts in test_hosts.py")
    if launcher == "paceline":
        done = launch("-n", str(workers), str(script), str(out), through, folder=tmp_path)
    else:
        environment = {**os.environ, **variables(tmp_path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        command += [str(script), str(out), through]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["workers"] == str(workers)
    for name, strategy in ORDERED.items():
        assert result["vectors"][name] == pl.simulate(task(), strategy, pl.Cluster(workers=workers)).params.tolist(), (
            name
        )


@pytest.mark.parametrize(
    ("how", "said", "strategy", "workers"),
    [
        ("raise", "failed: ValueError: a mistake of my own", "parameter-server", 2),
        ("kill", "was killed by SIGKILL", "all-reduce-sgd", 3),
    ],
)
def test_a_failure_names_the_rank_and_leaves_no_process(how, said, strategy, workers, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    done = launch("-n", str(workers), str(script), how, strategy, str(tmp_path), folder=tmp_path)
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("paceline:")]
    assert len(told) == 1 and told[0].startswith("paceline: rank 1 ") and told[0].endswith(said), done.stderr
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(workers)]
    assert not any(map(alive, pids))
    assert not _left_of(tmp_path)


def _left_of(folder: Path) -> list[str]:
    """Processes of this test that still run. Servers may take a moment to notice the end of their worker."""
    deadline = time.monotonic() + 10
    while True:
        found = [
            str(path)
            for path in (Path("/proc", pid, "environ") for pid in os.listdir("/proc") if pid.isdigit())
            if f"PACELINE_TEST={folder}".encode() in _read(path)
        ]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_workers_end_when_their_launcher_is_killed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(FAILING.replace("step == 20", "False"))
    arguments = ["paceline", "run", "-n", "2", str(script), "never", "parameter-server", str(tmp_path)]
    launcher = forked.start(
        cli.main,
        arguments,
        folder=tmp_path,
        out=tmp_path / "out",
        err=tmp_path / "err",
        # A killed launcher cannot remove its folder, so let it be inside pytest's folder.
        environment={**variables(tmp_path), "TMPDIR": str(tmp_path)},
    )
    try:
        deadline = time.monotonic() + 100
        while not all((tmp_path / f"pid-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline and launcher.is_alive(), (tmp_path / "err").read_text()
            time.sleep(0.05)
    finally:
        launcher.kill()
        launcher.join()
    pids = [int((tmp_path / f"pid-{rank}").read_text() or 0) for rank in range(2)]
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))
    assert not _left_of(tmp_path)
    assert list(tmp_path.glob("paceline-run-*"))
    (tmp_path / "quick.py").write_text("")
    done = forked.paceline("run", "quick.py", folder=tmp_path, environment={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0 and not list(tmp_path.glob("paceline-run-*"))  # The next launcher removes the folder.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_stops_all_workers(number, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(FAILING.replace("step == 20", "False"))
    arguments = ["paceline", "run", "-n", "2", str(script), "never", "parameter-server", str(tmp_path)]
    files = {"folder": tmp_path, "out": tmp_path / "out", "err": tmp_path / "err"}
    launcher = forked.start(cli.main, arguments, **files, environment=variables(tmp_path))
    try:
        deadline = time.monotonic() + 100
        while not all((tmp_path / f"pid-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline and launcher.is_alive(), files["err"].read_text()
            time.sleep(0.05)
        assert launcher.pid is not None
        os.kill(launcher.pid, number)
        launcher.join(60)
    finally:
        launcher.kill()
        launcher.join()
    assert launcher.exitcode == 1
    said = files["err"].read_text()
    assert said.strip().endswith(f"paceline: paceline run got {number.name}; all workers were stopped")
    assert not _left_of(tmp_path)


PROBE = """
import atexit, json, multiprocessing, os, random, sys, threading, time
import numpy as np
import torch

def square(x):
    return x * x

def late():
    time.sleep(0.2)
    say("thread")

def say(text):
    with open(f"{folder}/said-{os.environ['RANK']}", "a") as file:
        file.write(text + " ")

if __name__ == "__main__":
    folder = sys.argv[1]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map(square, [3])
    loader = torch.utils.data.DataLoader(list(range(4)), batch_size=2, num_workers=1)
    probe = {
        "argv": sys.argv[2:],
        "is_main": sys.modules["__main__"].__file__ == __file__,
        "spawned": spawned,
        "loaded": [int(batch.sum()) for batch in loader],
        "process": multiprocessing.current_process().name,
        "threads": [torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"])],
        "place": [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")],
        "torch": torch.rand(1).item(),
        "numpy": np.random.rand(),
        "python": random.random(),
    }
    with open(f"{folder}/probe-{os.environ['RANK']}", "w") as file:
        file.write(json.dumps(probe))
    atexit.register(say, "handler")
    threading.Thread(target=late).start()
"""


def test_a_forked_worker_behaves_like_a_fresh_interpreter(tmp_path):
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    # A fresh interpreter launches it: process names and random state must come from `paceline run` alone.
    command = [sys.executable, "-m", "paceline.cli", "run", "-n", "2", str(script), str(tmp_path), "--flag", "3"]
    environment = {**os.environ, **variables(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    probes = [json.loads((tmp_path / f"probe-{rank}").read_text()) for rank in range(2)]
    share = max(1, (os.cpu_count() or 1) // 2)
    for rank, probe in enumerate(probes):
        assert probe["argv"] == ["--flag", "3"] and probe["is_main"] and probe["process"] == "MainProcess"
        assert probe["spawned"] == [9] and probe["loaded"] == [1, 5]
        assert probe["threads"] == [share, int(os.environ.get("OMP_NUM_THREADS", share))]
        assert probe["place"] == [str(rank), "2", "0", str(rank)]
        # Exit handlers run after the last thread has ended.
        assert (tmp_path / f"said-{rank}").read_text().split() == ["thread", "handler"]
    # torch starts with the same seed in every process; the others start with a random one.
    assert probes[0]["torch"] == probes[1]["torch"]
    assert probes[0]["numpy"] != probes[1]["numpy"] and probes[0]["python"] != probes[1]["python"]
    assert not _left_of(tmp_path)


RESTARTED = """
import os, sys
from pathlib import Path
import torch
import paceline as pl

count = os.environ["TORCHELASTIC_RESTART_COUNT"]
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
with pl.attach(model, torch.optim.SGD(model.parameters(), lr=1.0), pl.AllReduceSGD()) as session:
    for step in range(3):
        if session.rank == 1 and step == 1 and count == "0":
            raise ValueError("only the first time")
        model(torch.ones(1, 1)).sum().backward()
        session.step()
        session.optimizer.zero_grad()
Path(sys.argv[1], f"done-{session.rank}").write_text(f"{count} {model.weight.item()}")
"""


def test_all_workers_restart_after_a_failure(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(RESTARTED)
    done = launch("-n", "2", "--restarts", "1", str(script), str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "all workers are started again (1 of 1 times)" in done.stderr
    assert [(tmp_path / f"done-{rank}").read_text() for rank in range(2)] == ["1 -3.0"] * 2


FRESH = """
import os, sys
import torch
from paceline.engines.job import Job
from paceline.needs import Needs
with Job(Needs(), device=torch.device("cpu")) as job:
    total = job.endpoint.all_reduce(torch.ones(2) / 2).wait()
    if job.rank == 1:
        raise ValueError(f"it is fresh: {'pytest' not in sys.modules}, the sum: {total.tolist()}")
    job.endpoint.all_reduce(torch.ones(2)).wait()
"""


def test_workers_are_fresh_interpreters_where_a_fork_could_break_a_gpu(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(FRESH)
    monkeypatch.setattr(launching, "_can_fork", lambda: False)
    monkeypatch.setenv("PACELINE_TEST", str(tmp_path))
    expected = r"^rank 1 \(process \d+\) failed: ValueError: it is fresh: True, the sum: \[1.0, 1.0\]$"
    with pytest.raises(pl.ClusterError, match=expected):
        launching.launch([str(script), str(tmp_path)], 2)
    assert _left_of(tmp_path) == []


def test_the_rank_that_failed_first_is_named_though_it_ends_last(tmp_path, monkeypatch):
    """Its report is there before the others notice that it is gone; its exit handlers take longer than they do."""
    monkeypatch.setattr(supervisor, "CAUSE_S", 0.3)

    def work(rank: int) -> None:
        if rank == 1:
            supervisor.write_report(tmp_path / "1.json", ValueError("a mistake of my own"))
            signal.pause()
        while not (tmp_path / "1.json").exists():
            os.sched_yield()
        supervisor.write_report(tmp_path / "0.json", pl.ClusterError("rank 1 is gone"))
        os._exit(1)

    def start(rank: int) -> supervisor.Worker:
        process = multiprocessing.get_context("fork").Process(target=work, args=(rank,))
        process.start()
        assert process.pid is not None
        return supervisor.Worker(process.pid, lambda: process.exitcode)

    watch = supervisor.Supervisor(2, start, lambda rank: tmp_path / f"{rank}.json")
    with pytest.raises(pl.ClusterError, match=r"^rank 1 \(process \d+\) failed: ValueError: a mistake of my own$"):
        watch.run()


@pytest.mark.parametrize("opened", ["session", "job"])
def test_an_error_is_reported_before_the_connections_close(opened, tmp_path, monkeypatch):
    """Otherwise a peer can report first that it lost this rank."""
    path = tmp_path / "error.json"
    monkeypatch.setenv(supervisor.ERROR_FILE, str(path))
    told: list[supervisor.Report | None] = []
    close = ProcessEndpoint.close

    def closing(endpoint: ProcessEndpoint) -> None:
        told.append(supervisor.read_report(path))
        close(endpoint)

    monkeypatch.setattr(ProcessEndpoint, "close", closing)
    model = torch.nn.Linear(2, 1)

    def context():
        if opened == "job":
            return Job(pl.AllReduceSGD().needs, device=torch.device("cpu"))
        return pl.attach(model, torch.optim.SGD(model.parameters()), pl.AllReduceSGD())

    with pytest.raises(ValueError), context():
        raise ValueError("a mistake of my own")
    assert told[0] is not None
    assert told[0].error == "ValueError: a mistake of my own" and not told[0].is_consequence
    with context():  # The script has caught the error and goes on: it is not the cause of what comes.
        assert supervisor.read_report(path) is None


def test_a_port_in_use_is_reported_at_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = launch("-n", "2", "--port", str(port), str(script), folder=tmp_path)
    assert done.returncode == 1
    assert (
        done.stderr.strip() == f"paceline: paceline run --port {port}: the port is in use (Address already in use); "
        "choose another or leave it out"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "0", "train.py"], "paceline run -n 0: there must be at least 1 worker"),
        (["-n", "2", "nowhere.py"], "there is no script 'nowhere.py'"),
    ],
)
def test_a_wrong_call_is_reported_in_one_line(arguments, said, tmp_path):
    (tmp_path / "train.py").write_text("")
    done = launch(*arguments, folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("paceline: ") and said in done.stderr and "Traceback" not in done.stderr


def test_train_names_the_worker_whose_task_failed():
    def loss(model, batch):
        raise ZeroDivisionError("nothing to divide by")

    job = task()
    broken = pl.Task(model=job.model, loss=loss, data=job.data, batch=8, optimizer=job.optimizer, steps=3)
    with pytest.raises(
        pl.ClusterError, match=r"rank \d \(process \d+\) failed: ZeroDivisionError: nothing to divide by"
    ):
        pl.train(broken, pl.AllReduceSGD(), 2)


def test_train_returns_the_whole_model_with_its_buffers():
    def model():
        return torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5))

    job = task()
    normed = pl.Task(model=model, loss=job.loss, data=job.data, batch=32, optimizer=job.optimizer, steps=10)
    for strategy in (pl.AllReduceSGD(), pl.PeriodicAveraging(period=4)):
        trained, simulated = pl.train(normed, strategy, 2), pl.simulate(normed, strategy, pl.Cluster(workers=2))
        for (name, ours), theirs in zip(
            trained.model.state_dict().items(), simulated.model.state_dict().values(), strict=True
        ):
            assert torch.equal(ours, theirs), name


def test_servers_import_a_strategy_from_the_scripts_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mystrategy.py").write_text(
        "from dataclasses import dataclass\nimport paceline as pl\n\n"
        "@dataclass(frozen=True)\nclass Mine(pl.ParameterServer):\n    pass\n"
    )
    (tmp_path / "mine" / "train.py").write_text(
        "import torch, paceline as pl\nfrom mystrategy import Mine\ntorch.manual_seed(0)\n"
        "model = torch.nn.Linear(2, 1)\n"
        "with pl.attach(model, None, Mine(servers=1)) as session:\n"
        "    for _ in range(3):\n        model(torch.ones(1, 2)).sum().backward()\n        session.step()\n"
    )
    done = launch("-n", "2", str(tmp_path / "mine" / "train.py"), folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_workers_end_at_once_if_their_launcher_has_ended(tmp_path):
    arguments = ["entry", "1", "script", str(tmp_path / "never.py")]  # Process 1 is not its parent.
    files = {"folder": tmp_path, "out": tmp_path / "out", "err": tmp_path / "err"}
    worker = forked.start(entry.main, arguments, **files)
    worker.join(100)
    assert worker.exitcode == 1 and not files["err"].read_text()


def test_train_without_a_number_of_workers_says_what_to_do():
    with pytest.raises(ValueError, match=r"train\(workers=None\): say how many processes to start"):
        pl.train(task(), pl.AllReduceSGD())


def test_a_server_applies_every_push_once_on_real_processes():
    run = pl.train(task(), pl.ParameterServer(rule=pl.rules.Sgd(lr=0.05), servers=2), 3)
    # Every worker pushes at every step to each of two shards; its first push is stale by at most the others' pushes.
    updates = [p for p in run.trace.points if p.staleness is not None]
    assert len(updates) == 2 * 3 * 22
    for server in (3, 4):
        assert [p.step for p in updates if p.rank == server] == list(range(3 * 22))
    assert torch.isfinite(run.params).all()


REPLACED = """
import os, signal, sys
from pathlib import Path

import torch
from torch import nn

import paceline as pl

folder, victim, samples = Path(sys.argv[1]), int(sys.argv[2]), 48


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.total = nn.Parameter(torch.zeros(samples))


model, loader = Sum(), [torch.eye(samples)[i : i + 6] for i in range(0, samples, 6)]
with pl.attach(model, None, pl.ParameterServer(rule=pl.rules.Sgd(lr=1.0), servers=1)) as session:
    for epoch in range(3):
        for step, batch in enumerate(session.shard(loader)):
            model.zero_grad()
            (-(batch @ model.total).sum()).backward()
            session.step()
            marker = folder / "died"
            if session.rank == victim and epoch == 1 and step == 4 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
if session.rank == (victim + 1) % 3:
    (folder / "total").write_text(" ".join(str(v) for v in model.total.tolist()))
"""


def test_a_killed_worker_is_replaced_and_its_data_shard_is_done_once(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(REPLACED)
    done = launch(
        "-n", "3", "--replacements", "2", str(script), str(tmp_path), "0", folder=tmp_path
    )  # The process that has started the servers.
    assert done.returncode == 0, done.stderr
    assert "rank 0 was killed by SIGKILL; another takes its place" in done.stderr
    assert (tmp_path / "died").exists()
    assert (tmp_path / "total").read_text().split() == ["3.0"] * 48
    assert not _left_of(tmp_path)


def test_the_first_cause_is_named_even_if_its_process_does_not_end(tmp_path):
    (tmp_path / "script.py").write_text(SLOW_TO_END)
    job = launch("-n", "2", str(tmp_path / "script.py"), folder=tmp_path)
    assert job.returncode == 1
    assert re.search(r"paceline: rank 1 \(process \d+\) failed: ValueError: a mistake of my own", job.stderr)
