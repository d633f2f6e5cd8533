"""Several hosts on one machine: network namespaces on a bridge.  Needs root and iproute2; says so where it cannot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


def why_not() -> str | None:
    """What keeps this machine from playing several; None if nothing does."""
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
    """(namespace, address) of each host; all of it is gone afterwards."""
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


def run_on(
    places: Sequence[tuple[str, str]], script: Path, *arguments: str, per_host: int = 1, timeout_s: float = 120
) -> list[str]:
    """The script under torchrun on every host; what each printed, or an AssertionError with what went wrong."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    folder, processes = script.parent, []
    for i, (name, address) in enumerate(places):
        command = [
            "ip",
            "netns",
            "exec",
            name,
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={len(places)}",
            f"--node-rank={i}",
        ]
        command += [
            f"--nproc-per-node={per_host}",
            f"--master-addr={places[0][1]}",
            "--master-port=29511",
            f"--local-addr={address}",
        ]
        # Into files: a pipe that nobody reads would stop the host that writes, and all others with it.
        with (folder / f"out-{i}").open("w") as out, (folder / f"err-{i}").open("w") as err:
            processes.append(
                subprocess.Popen([*command, str(script), *arguments], stdout=out, stderr=err, env=environment)
            )
    try:
        for process in processes:
            process.wait(timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for i, process in enumerate(processes):
        assert process.returncode == 0, (folder / f"err-{i}").read_text()
    return [(folder / f"out-{i}").read_text() for i in range(len(places))]


def say(value: object) -> None:
    """A line of JSON, written in one piece: the workers of a host share one file, and the parts of two prints may mix."""
    os.write(1, (json.dumps(value) + "\n").encode())


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
