"""Places: processes that any known launcher has started become the workers of one job."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.engines.job import Job
from paceline.engines.place import detect
from paceline.engines.processes import launcher_of
from paceline.needs import Needs
from tests.dist.test_attach import task

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

WORKERS = 4
Variables = Callable[[int], dict[str, object]]


def torchrun(rank: int) -> dict[str, object]:
    return {"RANK": rank, "WORLD_SIZE": WORKERS, "MASTER_ADDR": "127.0.0.1"}


def open_mpi(rank: int) -> dict[str, object]:
    own = {"RANK": rank, "SIZE": WORKERS, "LOCAL_RANK": rank, "LOCAL_SIZE": WORKERS}
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in own.items()} | {
        "PMIX_RANK": rank,
        "PMIX_NAMESPACE": f"test-{os.getppid()}",
    }


def mpich(rank: int) -> dict[str, object]:
    return {"PMI_RANK": rank, "PMI_SIZE": WORKERS, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": WORKERS}


def slurm(rank: int) -> dict[str, object]:
    return {
        "SLURM_JOB_ID": os.getppid(),
        "SLURM_STEP_ID": 0,
        "SLURM_PROCID": rank,
        "SLURM_STEP_NUM_TASKS": WORKERS,
        "SLURM_NTASKS": WORKERS,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": 0,
        "SLURM_STEP_TASKS_PER_NODE": str(WORKERS),
    }


def slurm_with_pmix(rank: int) -> dict[str, object]:
    return slurm(rank) | {"PMIX_RANK": rank, "PMIX_NAMESPACE": f"slurm.pmix.{os.getppid()}.0"}


def slurm_with_pmi2(rank: int) -> dict[str, object]:
    return slurm(rank) | {"PMI_RANK": rank, "PMI_SIZE": WORKERS}


ENGINES: dict[str, Variables] = {
    "torchrun": torchrun,
    "Open MPI": open_mpi,
    "MPICH": mpich,
    "Slurm": slurm,
    "Slurm with PMIx": slurm_with_pmix,
    "Slurm with PMI-2": slurm_with_pmi2,
}


def start(variables: Variables, work: Callable[[], Any], folder: Path) -> list[Any]:
    """What `work` returns in each of four processes that have exactly these launcher variables."""

    def child(rank: int) -> None:
        torch.set_num_threads(1)
        for name in list(os.environ):
            if name.startswith(("RANK", "WORLD", "MASTER", "OMPI", "PMI", "MPI", "SLURM", "TORCHELASTIC")):
                del os.environ[name]
        os.environ.update({name: str(value) for name, value in variables(rank).items()})
        try:
            result = work()
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        (folder / f"{rank}.json").write_text(json.dumps(result))
        os._exit(0)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=child, args=(rank,)) for rank in range(WORKERS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60.0)
        if process.is_alive():
            process.kill()
            process.join()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORKERS)]


def sockets() -> set[str]:
    """The abstract sockets through which ranks connect."""
    return {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@paceline-meet-" in line}


def assert_no_socket_is_left() -> None:
    """Those of a job of another program on this machine go away."""
    deadline = time.monotonic() + 5.0
    while sockets() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not sockets()


@pytest.mark.parametrize("engine", ENGINES)
def test_four_processes_with_a_launchers_variables_are_one_job(engine, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def variables(rank: int) -> dict[str, object]:
        return ENGINES[engine](rank) | ({"MASTER_PORT": port} if engine == "torchrun" else {})

    def work() -> list[Any]:
        place = detect()
        assert place is not None
        sums: list[float] = []
        for _ in range(2):  # A second job of the same processes uses the same store.
            with Job(Needs(), device=torch.device("cpu")) as job:
                sums.append(float(job.endpoint.all_reduce(torch.tensor([float(job.rank)])).wait()))
        return [place.engine.split()[0] in engine or "PMI" in engine, place.rank, place.world, sums]

    assert start(variables, work, tmp_path) == [[True, rank, WORKERS, [6.0, 6.0]] for rank in range(WORKERS)]
    assert_no_socket_is_left()


def test_train_without_a_number_of_workers_uses_all_that_mpiexec_started(tmp_path):
    expected = pl.simulate(task(), pl.AllReduceSGD(), pl.Cluster(workers=WORKERS)).params.tolist()
    assert start(mpich, lambda: pl.train(task(), pl.AllReduceSGD()).params.tolist(), tmp_path) == [expected] * WORKERS


def test_several_hosts_without_a_master_address_say_what_to_set(tmp_path):
    def two_hosts(rank: int) -> dict[str, object]:
        return mpich(rank) | {"MPI_LOCALNRANKS": 2, "MPI_LOCALRANKID": rank % 2}

    def work() -> None:
        with Job(Needs(), device=torch.device("cpu")):
            pass

    for said in start(two_hosts, work, tmp_path):
        assert said.startswith("ValueError: MPICH started 4 processes, 2 of them on this host")
        assert "set MASTER_ADDR" in said and "MASTER_PORT" in said


def found(**variables: object) -> tuple[str, int, int] | None:
    place = detect({name: str(value) for name, value in variables.items()})
    return None if place is None else (place.engine, place.rank, place.world)


def test_a_process_without_a_launcher_has_no_place():
    assert found() is None
    assert found(RANK=0) is None
    # A batch script that is run without srun, and an interactive shell.
    assert found(SLURM_JOB_ID=7, SLURM_PROCID=0, SLURM_NTASKS=4) is None
    assert found(SLURM_JOB_ID=7, SLURM_STEP_ID=4294967290, SLURM_PROCID=0, SLURM_NTASKS=4) is None


def test_one_process_under_mpiexec_is_one_worker():
    assert found(PMI_RANK=0, PMI_SIZE=1) == ("MPICH", 0, 1)
    assert found(OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=1) == ("Open MPI", 0, 1)


def test_launchers_that_agree_give_one_place():
    assert found(RANK=2, WORLD_SIZE=4, PMI_RANK=2, PMI_SIZE=4) == ("MPICH", 2, 4)
    assert found(RANK=2, WORLD_SIZE=4, SLURM_STEP_ID=0, SLURM_PROCID=2, SLURM_NTASKS=4) == ("Slurm", 2, 4)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": 1, "WORLD_SIZE": 4, "PMI_RANK": 2, "PMI_SIZE": 4}, "RANK=1 and PMI_RANK=2 contradict"),
        ({"RANK": 1, "WORLD_SIZE": 4, "PMI_RANK": 1, "PMI_SIZE": 2}, "WORLD_SIZE=4 and PMI_SIZE=2 contradict"),
        (
            {"RANK": 0, "WORLD_SIZE": 2, "SLURM_STEP_ID": 0, "SLURM_PROCID": 1, "SLURM_NTASKS": 2},
            "RANK=0 and SLURM_PROCID=1 contradict",
        ),
    ],
)
def test_an_error_names_launchers_that_contradict_each_other(variables: Mapping[str, object], said: str):
    with pytest.raises(ValueError, match=said) as raised:
        found(**variables)
    assert "unset RANK and WORLD_SIZE" in str(raised.value)


def test_the_innermost_of_nested_launchers_counts():
    agent = {"RANK": 5, "WORLD_SIZE": 8, "TORCHELASTIC_RUN_ID": "x"}
    step = {"SLURM_STEP_ID": 0, "SLURM_PROCID": 1, "SLURM_NTASKS": 2}
    daemon = {"OMPI_COMM_WORLD_RANK": 1, "OMPI_COMM_WORLD_SIZE": 2, "PMIX_RANK": 1}
    assert found(**agent, **step) == ("torchrun", 5, 8)
    assert found(**agent, **daemon) == ("torchrun", 5, 8)
    assert found(**{**daemon, "OMPI_COMM_WORLD_SIZE": 4}, **{**step, "SLURM_PROCID": 0}) == ("Open MPI", 1, 4)


def test_an_error_names_variables_with_impossible_values():
    with pytest.raises(ValueError, match="PMI_SIZE is 'four'"):
        found(PMI_RANK=0, PMI_SIZE="four")
    with pytest.raises(ValueError, match="PMI_RANK=4 and PMI_SIZE=4: a rank must be below"):
        found(PMI_RANK=4, PMI_SIZE=4)
    with pytest.raises(
        ValueError, match="PMIX_RANK=1 says that MPICH started this process, but no variable says how many"
    ):
        found(PMIX_RANK=1)


def test_slurm_gives_the_number_of_tasks_of_each_node():
    step = {"SLURM_STEP_ID": 0, "SLURM_PROCID": 6, "SLURM_NTASKS": 7, "SLURM_TASKS_PER_NODE": "2(x3),1"}
    places = [detect({n: str(v) for n, v in step.items()} | {"SLURM_NODEID": str(node)}) for node in range(4)]
    assert [place and place.local_world for place in places] == [2, 2, 2, 1]


def test_shells_between_the_launcher_and_the_script_do_not_hide_the_launcher(tmp_path):
    code = "from paceline.engines.processes import launcher_of; print(launcher_of('PMI_RANK'))"
    command = ["sh", "-c", f'{sys.executable} -c "{code}"; true']
    environment = {**os.environ, "PMI_RANK": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    own = launcher_of("NO_SUCH_VARIABLE")
    assert own is not None and done.stdout.split()[0] == str(os.getpid())


SCRIPT = """
import sys
import torch
from tests.dist.hosts import say
import paceline as pl
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
with pl.attach(model, None, pl.ParameterServer(servers=1)) as session:
    for step in range(3):
        model(torch.ones(3, 4)).sum().backward()
        session.step()
    say([session.rank, session.workers])
"""


def mpiexec(flavour: str) -> list[str]:
    """The command of an installed MPI; skips the test if there is none."""
    names = {"Open MPI": ("mpiexec.openmpi", "mpirun.openmpi", "mpiexec"), "MPICH": ("mpiexec.hydra", "mpiexec")}
    folders = f"{os.environ.get('PATH', '')}:{Path(sys.executable).parent}"
    signs = {"Open MPI": ("Open MPI", "OpenRTE", "PRRTE"), "MPICH": ("HYDRA",)}
    for name in names[flavour]:
        path = shutil.which(name, path=folders)
        if path is not None:
            version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
            if any(sign in version for sign in signs[flavour]):
                return [path, *(["--allow-run-as-root", "--oversubscribe"] if flavour == "Open MPI" else [])]
    pytest.skip(f"{flavour} is not installed: there is no {' or '.join(names[flavour])} of it")


@pytest.mark.parametrize("flavour", ["Open MPI", "MPICH"])
def test_mpiexec_makes_one_job_of_four_workers(flavour, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    command = [*mpiexec(flavour), "-n", str(WORKERS), sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(line) for line in done.stdout.splitlines()) == [[rank, WORKERS] for rank in range(WORKERS)]
    assert_no_socket_is_left()
