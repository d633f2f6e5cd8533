"""Digests of every strategy's run in the simulator, here and in another checkout: has a change changed results?

`python -m benchmarks.digests` prints a table.  `--against FOLDER` runs the same list in another checkout (say, of the
commit before) and compares.  Each run's digest covers its whole trace (every span, byte, loss and time) and the bits
of every worker's parameters.  Exit code 1 means that an ordered strategy, whose result must not depend on timing, has
changed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

# Runs in either checkout, so it uses only what both have: the list of the laws, `simulate` and the trace.
PROGRAM = """
import hashlib, json, sys, warnings
import torch
warnings.simplefilter("ignore")
torch.set_num_threads(1)
from paceline import Cluster, LogNormal, simulate
from tests.laws.every import ORDERED, STRATEGIES
from tests.laws.tasks import params, regression
found = {}
for name, case in STRATEGIES.items():
    task = regression(steps=23, batch=12, samples=57, bucket_bytes=200)
    cluster = Cluster(workers=4, compute=LogNormal("5ms", 0.4), bandwidth="10MB/s", latency="1ms", seed=3)
    run = simulate(task, case.strategy, cluster)
    bits = hashlib.sha256(b"".join(p.contiguous().numpy().tobytes() for p in params(run)))
    found[name] = [name in ORDERED, run.trace.digest(), bits.hexdigest()]
json.dump(found, sys.stdout)
"""

Digests = dict[str, tuple[bool, str, str]]


def digests(checkout: Path) -> Digests:
    """By the name of each case: whether it is ordered, its trace's digest, and that of all parameters."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout / "src"), str(checkout)])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=checkout, env=environment, stdout=subprocess.PIPE, check=True
    )
    return {name: tuple(found) for name, found in json.loads(done.stdout).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", type=Path, help="another checkout of the project")
    arguments = parser.parse_args()
    here = digests(Path(__file__).resolve().parents[1])
    there = digests(arguments.against.resolve()) if arguments.against else {}
    table = Table("strategy", "ordered", "trace", "parameters", *(["trace there", "same"] if there else []))
    changed: list[str] = []
    for name, (is_ordered, trace, bits) in here.items():
        row = [name, "yes" if is_ordered else "no", trace[:12], bits[:12]]
        if there:
            other = there.get(name)
            is_same = other is not None and other[1:] == (trace, bits)
            row += [other[1][:12] if other else "-", "yes" if is_same else "new" if other is None else "NO"]
            if is_ordered and other is not None and not is_same:
                changed.append(name)
        table.add_row(*row)
    Console(width=140).print(table)
    if there:
        same = sum(name in there and there[name] == found for name, found in here.items())
        print(f"{same} of {len(here)} runs are the same; missing here: {sorted(set(there) - set(here)) or 'none'}")
    if changed:
        raise SystemExit(f"ordered strategies with another result: {', '.join(changed)}")


if __name__ == "__main__":
    main()
