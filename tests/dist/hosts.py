"""Several hosts on one machine: network namespaces on a bridge. Needs root and iproute2."""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tests.dist import forked

ROOT = Path(__file__).parents[2]
PORT = 29511
CLONE_NEWNET = 0x40000000
KEY = secrets.token_hex(32)  # Of all jobs between hosts that this process starts.


def why_not() -> str | None:
    """Why this machine cannot run several hosts; None if it can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command (Debian: iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"pl-probe-{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if probe.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=True)
        return None
    return f"`ip netns add` failed: {probe.stderr.strip()}"


@contextmanager
def hosts(count: int) -> Iterator[list[tuple[str, str]]]:
    """(namespace, address) of each host. All namespaces are removed afterwards."""
    tag = os.getpid() % 100_000
    bridge = f"plb{tag}"
    names = [f"pl{tag}-{i}" for i in range(count)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for i, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("link", "add", f"plv{tag}{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"plv{tag}{i}", "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"10.213.7.{i + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield [(name, f"10.213.7.{i + 1}") for i, name in enumerate(names)]
    finally:
        for i, name in enumerate(names):
            subprocess.run(["ip", "link", "del", f"plv{tag}{i}"], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def cut(host: int, seconds: float) -> None:
    """Cut a host's link, and restore it."""
    link = f"plv{os.getpid() % 100_000}{host}"
    _ip("link", "set", link, "down")
    time.sleep(seconds)
    _ip("link", "set", link, "up")


def run_on(
    places: Sequence[tuple[str, str]],
    script: Path,
    *arguments: str,
    per_host: int = 1,
    timeout_s: float = 120,
    torchrun: bool = False,
    killed: int = 0,
) -> list[str]:
    """Run the script on every host. Returns what each host printed, or raises an AssertionError with the failure.
    So many workers end by SIGKILL.

    The workers are forked, each into the network of its host, with the variables that torchrun sets; or torchrun starts
    them.
    """
    # Streams go to files: a full pipe would block the host that writes, and then all others.
    outs = [script.parent / f"out-{i}" for i in range(len(places))]
    errs = [script.parent / f"err-{i}" for i in range(len(places))]
    for path in (*outs, *errs):
        path.touch()
    starting = _by_torchrun if torchrun else _by_fork
    with starting(places, script, arguments, per_host, outs, errs) as waits:
        deadline = time.monotonic() + timeout_s
        codes = [wait(max(0.0, deadline - time.monotonic())) for wait in waits]
    assert sum(code == -signal.SIGKILL for code, _ in codes) == killed, codes
    for code, host in codes:
        assert code in (0, -signal.SIGKILL), f"exit code {code} on host {host}: {errs[host].read_text()}"
    return [out.read_text() for out in outs]


# Waits at most this many seconds for a process. Returns its exit code and its host.
Wait = Callable[[float], tuple[int | None, int]]


@contextmanager
def _by_fork(
    places: Sequence[tuple[str, str]],
    script: Path,
    arguments: Sequence[str],
    per_host: int,
    outs: list[Path],
    errs: list[Path],
) -> Iterator[list[Wait]]:
    workers = per_host * len(places)
    variables = {
        "WORLD_SIZE": workers,
        "LOCAL_WORLD_SIZE": per_host,
        "MASTER_ADDR": places[0][1],
        "MASTER_PORT": PORT,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # As under torchrun, none of the workers has the store.
        "OMP_NUM_THREADS": 1,
        "GLOO_SOCKET_IFNAME": "eth0",
        "PACELINE_JOB_KEY": KEY,
    }

    def started(host: int, program: Callable[[], object], **place: int) -> BaseProcess:
        def on_host() -> None:
            _enter(places[host][0])
            program()

        environment = {name: str(value) for name, value in {**variables, **place}.items()}
        words = [str(script), *arguments]
        files = {"out": outs[host], "err": errs[host], "folder": script.parent}
        return forked.start(on_host, words, environment=environment, **files)

    def serve() -> None:
        store = TCPStore("0.0.0.0", PORT, is_master=True, wait_for_workers=False)
        signal.pause()
        del store

    processes: list[BaseProcess] = []
    hosts_of = [rank // per_host for rank in range(workers)]
    try:
        processes.append(started(0, serve))
        for rank, host in enumerate(hosts_of):
            run = partial(runpy.run_path, str(script), run_name="__main__")
            place = {"RANK": rank, "LOCAL_RANK": rank % per_host, "GROUP_RANK": host}
            processes.append(started(host, run, **place))

        def waiting(process: BaseProcess, host: int) -> Wait:
            def wait(seconds: float) -> tuple[int | None, int]:
                process.join(seconds)
                return process.exitcode, host

            return wait

        yield [waiting(process, host) for process, host in zip(processes[1:], hosts_of, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextmanager
def _by_torchrun(
    places: Sequence[tuple[str, str]],
    script: Path,
    arguments: Sequence[str],
    per_host: int,
    outs: list[Path],
    errs: list[Path],
) -> Iterator[list[Wait]]:
    variables = {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "PACELINE_JOB_KEY": KEY,
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for i, (name, address) in enumerate(places):
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
            command += [f"--nnodes={len(places)}", f"--node-rank={i}", f"--nproc-per-node={per_host}"]
            command += [f"--master-addr={places[0][1]}", f"--master-port={PORT}", f"--local-addr={address}"]
            command += [str(script), *arguments]
            with outs[i].open("w") as out, errs[i].open("w") as err:
                processes.append(subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ, **variables}))

        def waiting(process: subprocess.Popen[bytes], host: int) -> Wait:
            return lambda seconds: (process.wait(seconds), host)

        yield [waiting(process, host) for host, process in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _enter(namespace: str) -> None:
    """Move this thread, and the threads that it starts, into the network namespace (os.setns is new in Python 3.12)."""
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def say(value: object) -> None:
    """Write a line of JSON in one call: the workers of a host share one file, and the parts of two prints may mix."""
    os.write(1, (json.dumps(value) + "\n").encode())


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
