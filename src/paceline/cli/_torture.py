"""What `paceline torture` does: one campaign a strategy, a table, and a replay of each failure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from paceline.strategy import Strategy
from paceline.study.fault_plans import kinds_of
from paceline.study.torture import Tortured, every, named, torture


def torture_all(names: Sequence[str], seeds: Sequence[int], kinds: Sequence[str], *, processes: int, path: str) -> bool:
    """Torture these strategies, or all; whether an invariant was broken."""
    chosen = {name: named(name) for name in names} or every()
    if not names:  # Of all strategies, those that can take these kinds.
        chosen = {name: s for name, s in chosen.items() if not kinds or set(kinds) & set(kinds_of(s))}
    console = Console(highlight=False)
    found: dict[str, Tortured] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        for name, strategy in chosen.items():
            shown = bar.add_task(name, total=len(seeds))
            mine = kinds if names else [kind for kind in kinds if kind in kinds_of(strategy)]
            found[name] = torture(
                strategy,
                seeds,
                faults=mine,
                processes=processes,
                progress=lambda done, shown=shown: bar.update(shown, completed=done),
            )
    console.print(table_of(found))
    for name, tortured in found.items():
        _show_failures(console, name, chosen[name], tortured, kinds)
    if path:
        Path(path).write_text(json.dumps({name: as_plain(t) for name, t in found.items()}, indent=2) + "\n")
    return any(tortured.failures for tortured in found.values())


def table_of(found: dict[str, Tortured]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("strategy")
    for heading in ("seeds", "faults", "virtual s", "violations", "s per 1000 seeds"):
        table.add_column(heading, justify="right")
    for name, t in found.items():
        numbers = (t.seeds, t.faults.total(), f"{t.virtual_s:.0f}", len(t.failures), f"{t.seconds_per_thousand:.1f}")
        table.add_row(name, *map(str, numbers))
    return table


def as_plain(t: Tortured) -> dict[str, Any]:
    return {
        "strategy": repr(t.strategy),
        "seeds": t.seeds,
        "faults": dict(sorted(t.faults.items())),
        "virtual_s": round(t.virtual_s, 1),
        "seconds_per_thousand": round(t.seconds_per_thousand, 2),
        "failures": [{"seed": f.seed, "invariant": f.invariant, "seen": f.seen} for f in t.failures],
    }


def _show_failures(console: Console, name: str, chosen: Strategy, tortured: Tortured, kinds: Sequence[str]) -> None:
    shown: set[str] = set()
    for failure in tortured.failures:
        if failure.invariant not in shown:
            shown.add(failure.invariant)
            console.print(f"\n{name}: {failure}", soft_wrap=True, markup=False)
            console.print(f"Repeat it:  {failure.replay(name, kinds)}", soft_wrap=True, markup=False)
            console.print(f"The smallest plan:\n{failure.program(chosen)}", soft_wrap=True, markup=False)
