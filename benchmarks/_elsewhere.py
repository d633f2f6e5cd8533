"""Faults of `benchmarks.kills_synchronous` beyond one call of train: in users' own loops, and between hosts."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
LOOP_FAULTS = {  # How many workers are struck at once, by which signal, and how many are replaced.
    "none": (0, signal.SIGKILL, 0),
    "one killed": (1, signal.SIGKILL, 0),
    "one killed and replaced": (1, signal.SIGKILL, 1),
    "two killed at once, one replaced": (2, signal.SIGKILL, 1),
    "one stopped": (1, signal.SIGSTOP, 1),
}
HOST_FAULTS = {  # Seconds for which the link of the second host is cut, or how many of its two workers are killed.
    "none": (0, 0),
    "one of four killed": (0, 1),
    "a host's two killed": (0, 2),
    "link cut for 5 s": (5, 0),
    "link cut for 60 s": (60, 0),
}
HOST_SILENT_S = 10.0
STEPS_WHILE_CUT = 60  # A second, at most: the run must not be over when the link is back.
WORKERS = 4


def loop_result(method: str, fault: str, seed: int, steps: int, *, silent_s: float, stopped_s: float) -> dict[str, Any]:
    """Four workers of a user's own loop, under `paceline run`."""
    count, by, replacements = LOOP_FAULTS[fault]
    chance = random.Random(f"attach {method} {fault} {seed}")
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "paceline.cli", "run", "-n", str(WORKERS)]
        command += ["--replacements", str(replacements), "-m", "benchmarks._loop", "attach", method, str(seed)]
        command += [str(steps), str(silent_s), name]
        environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        begun = _waited(lambda: sorted(Path(name).glob("pid-*")), WORKERS, process)
        time.sleep(chance.uniform(0.2, 1.2))
        struck = [int(path.name.removeprefix("pid-")) for path in chance.sample(begun, count)]
        for pid in struck:
            os.kill(pid, by)
        if by == signal.SIGSTOP:
            time.sleep(stopped_s)
            for pid in struck:
                os.kill(pid, signal.SIGCONT)
        _, errors = process.communicate(timeout=120)
        return _result(Path(name), method, fault, seed, count, process.returncode, errors)


def host_result(method: str, fault: str, seed: int, steps: int) -> dict[str, Any]:
    """Two workers on each of two hosts, which are network namespaces."""
    from tests.dist import hosts

    cut_s, kills = HOST_FAULTS[fault]
    chance = random.Random(f"hosts {method} {fault} {seed}")
    steps += 2 * STEPS_WHILE_CUT * cut_s if cut_s > HOST_SILENT_S else 0
    errors: list[str] = []
    with hosts.hosts(2) as places, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "script.py"
        script.write_text("from benchmarks import _loop\n_loop.main()\n")
        given = ["train", method, str(seed), str(steps), str(HOST_SILENT_S), name]

        def run() -> None:
            try:
                hosts.run_on(places, script, *given, per_host=2, timeout_s=300, killed=kills)
            except AssertionError as error:
                errors.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        begun = _waited(lambda: sorted(folder.glob("pid-*")), WORKERS, thread)
        time.sleep(chance.uniform(0.2, 1.0))
        if cut_s:
            hosts.cut(1, cut_s)
        on_second = [
            pid for pid in (int(path.name.removeprefix("pid-")) for path in begun) if _is_in(pid, places[1][0])
        ]
        for pid in on_second[:kills]:
            os.kill(pid, signal.SIGKILL)
        thread.join()
        return _result(folder, method, fault, seed, kills, len(errors), "\n".join(errors))


def _is_in(pid: int, namespace: str) -> bool:
    return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(f"/var/run/netns/{namespace}").st_ino


def _waited(find: Callable[[], list[Path]], count: int, process: Any) -> list[Path]:
    deadline = time.monotonic() + 90
    while len(found := find()) < count:
        is_over = process.poll() is not None if isinstance(process, subprocess.Popen) else not process.is_alive()
        if is_over or time.monotonic() > deadline:
            raise RuntimeError(f"only {len(found)} of {count} workers began")
        time.sleep(0.02)
    return found


def _result(folder: Path, method: str, fault: str, seed: int, struck: int, code: int, errors: str) -> dict[str, Any]:
    said = [json.loads(path.read_text()) for path in folder.glob("end-*.json")]
    whole = [one for one in said if one["steps"] and one["steps"][0] == 0]  # Those that were there from the beginning.
    return {
        "method": method,
        "fault": fault,
        "seed": seed,
        "struck": struck,
        "ended": len(said),
        "models": len({one["model"] for one in said}),
        "accuracy": round(mean(one["accuracy"] for one in said), 2) if said else 0.0,
        "gap_s": round(min((one["gap_s"] for one in whole), default=0.0), 3),
        "meet_s": [round(s, 3) for one in said for s in one["lost"]],
        "workers": [n for one in said for n in one["workers"]],
        "steps": max((one["steps"][1] + 1 for one in whole), default=0),
        **({"error": errors[-500:]} if code else {}),
    }
