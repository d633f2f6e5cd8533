"""Lists of strategies and codecs: a line for each with its settings, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline import registry


def show(kind: str, classes: Sequence[type], name: str | None, as_json: bool) -> None:
    chosen = [registry.find(kind, classes, name)] if name else classes
    rows = [registry.describe(cls) for cls in chosen]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("name", "what it does", "settings", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(row["name"], row["summary"], "\n".join(_setting(s) for s in row["settings"]) or "none")
    Console().print(table)


def _setting(setting: dict[str, Any]) -> str:
    return f"{setting['name']} (required)" if setting["required"] else f"{setting['name']}={setting['default']}"
