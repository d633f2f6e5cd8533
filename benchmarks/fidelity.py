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

from tests.reference.table import TABLE, Row

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("sync", "codecs", "async")  # tests/test_reference_*.py, in the order of the page.
HEAD = """# Fidelity: every algorithm against a reference

Written by `python -m benchmarks.fidelity`.  Each row is a run in the simulator, in float64, and a program of few lines
in numpy on the same minibatches (`tests/reference/`), which is written from the source and imports nothing of paceline.
The difference is the largest one of any value, over the largest way that any value has gone; the limit is 1e-7 unless a
reason is given.  A reason may also say what the reference does as paceline does it, and not as the source says.

Every strategy, codec, rule and gate has a row, and so has every choice between names in their settings;
`tests/test_reference_table.py` checks that.  In the asynchronous rows workers have different speeds, 1, 1.37 and 2.11
seconds a step, so that every update but the first ones is stale.

| algorithm | setting | source | difference | limit | reason |
|---|---|---|---|---|---|
"""


def rows() -> list[Row]:
    """All rows of the reference tests."""
    modules = [f"tests.test_reference_{name}" for name in MODULES]
    for module in modules:
        importlib.import_module(module)  # It adds its rows to the table.
    return sorted(TABLE, key=lambda row: modules.index(row.compare.__module__))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/fidelity.md")
    out: Path = parser.parse_args().out
    lines: list[str] = []
    wrong: list[str] = []
    for row in rows():
        difference = row.difference()
        shown = f"{difference:.1f} standard errors" if row.limit > 1 else f"{difference:.1e}"
        cells = (row.algorithm, row.setting, row.source, shown, row.shown_limit, row.reason)
        lines.append(f"| {' | '.join(cells)} |\n")
        if not difference <= row.limit:
            wrong.append(str(row))
    out.write_text(HEAD + "".join(lines))
    Console().print(f"{len(lines)} rows in {out}")
    if wrong:
        sys.exit(f"above the limit: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
