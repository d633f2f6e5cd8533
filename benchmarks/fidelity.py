"""How closely the methods follow their sources: the largest difference from a reference in numpy, for each.

`python -m benchmarks.fidelity` runs every row of the reference tests (`tests/test_reference_*.py`) and writes the table
to docs/results/fidelity.md.  Exit code 1 means that a difference is above its limit.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from rich.console import Console

from tests.reference.table import LIMIT, TABLE

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Fidelity: every algorithm against a reference

Written by `python -m benchmarks.fidelity`.  Each row is a run in the simulator, in float64, and a program of few lines
in numpy on the same minibatches (`tests/reference/`), which is written from the source and imports nothing of paceline.
The difference is the largest one of any value, over the largest value; the limit is 1e-7 unless a reason is given.

| algorithm | setting | source | difference | limit | reason |
|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/fidelity.md")
    out: Path = parser.parse_args().out
    for path in sorted((ROOT / "tests").glob("test_reference_*.py")):
        importlib.import_module(f"tests.{path.stem}")  # It adds its rows to the table.
    lines: list[str] = []
    wrong: list[str] = []
    for row in TABLE:
        difference = row.difference()
        is_random = row.limit > 1
        shown = f"{difference:.1f} standard errors" if is_random else f"{difference:.1e}"
        limit = f"{row.limit:g}" if row.limit != LIMIT else "1e-7"
        lines.append(f"| {row.algorithm} | {row.setting} | {row.source} | {shown} | {limit} | {row.reason} |\n")
        if not difference <= row.limit:
            wrong.append(f"{row.algorithm}, {row.setting}")
    out.write_text(HEAD + "".join(lines))
    Console().print(f"{len(lines)} rows in {out}")
    if wrong:
        sys.exit(f"above the limit: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
