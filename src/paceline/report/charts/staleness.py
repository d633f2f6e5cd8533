"""The staleness of updates: a histogram for each method with servers or shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.report import formats
from paceline.report.axes import round_step
from paceline.report.chart import Chart, Figure
from paceline.report.row import Row
from paceline.report.swatch import swatch_of
from paceline.report.vega import svg

BARS = 40
EXPLANATION = (
    "An update's staleness is how many versions of the parameters its server made between the worker's reading them "
    "and the update's arrival; an update that goes to several servers counts at each.  In shared memory, it is how "
    "many times other workers wrote between a worker's reading and its write."
)


def draw(rows: Sequence[Row], clock: str) -> list[Figure]:
    """A histogram for each row that has updates."""
    return [
        Figure(
            label=f"Staleness of the updates of {row.name}, a histogram",
            svg=histogram(row.staleness, swatch_of(row, i).colour),
            caption=f"{row.updates:,} update{'' if row.updates == 1 else 's'}, mean {formats.staleness(row.staleness)}",
            row=i,
        )
        for i, row in enumerate(rows)
        if row.updates
    ]


def histogram(counts: Mapping[int, int], colour: str) -> str:
    """The share of the updates with each staleness, as an SVG."""
    total = sum(counts.values())
    width, updates = bars(counts)
    # The axis starts at 0, the staleness of the first update, and is so long that a single bar does not fill it.
    low = min(0, *updates)
    high = max(max(updates), 7 * width) + width
    tick = round_step(high - low, most=8)
    # The single update of a straggler among thousands is important, so every bar is high enough to see.
    lowest = max(updates.values()) / 100
    spec: dict[str, Any] = {
        "width": 250,
        "height": 120,
        "data": {
            # A bar lies around the whole numbers that it counts: 3 from 2.5 to 3.5.
            "values": [
                {"from": first - 0.5, "to": first + width - 0.5, "share": max(n, lowest) / total}
                for first, n in updates.items()
            ]
        },
        "mark": {"type": "bar", "color": colour, "binSpacing": 1, "aria": False},
        "encoding": {
            "x": {
                "field": "from",
                "type": "quantitative",
                "bin": "binned",
                "scale": {"domain": [low - 0.5, high - 0.5], "nice": False},
                "axis": {
                    "title": "staleness",
                    "values": list(range(-(-low // tick) * tick, high, tick)),
                    "labelExpr": "datum.value == 0 ? '0' : format(datum.value, '~s')",
                    "grid": False,
                },
            },
            "x2": {"field": "to"},
            "y": {
                "field": "share",
                "type": "quantitative",
                "scale": {"nice": 3},
                # As wide as 100%, so that charts below one another are aligned.
                "axis": {"title": "updates", "format": "~%", "tickCount": 3, "minExtent": 38},
            },
        },
    }
    return svg(spec)


def bars(counts: Mapping[int, int]) -> tuple[int, dict[int, int]]:
    """The width of a bar in numbers, and for the first number of each bar how often its numbers occur.  No empty bars.

    >>> bars({0: 5, 1: 2, 7: 1})
    (1, {0: 5, 1: 2, 7: 1})
    >>> bars({0: 5, 3: 2, 99: 1})
    (5, {0: 7, 95: 1})
    """
    numbers = [number for number, n in counts.items() if n]
    width = round_step(max(numbers) - min(0, *numbers) + 1, most=BARS)
    found: dict[int, int] = {}
    for number in sorted(numbers):
        first = number // width * width
        found[first] = found.get(first, 0) + counts[number]
    return width, found


CHART = Chart(draw, order=3, heading="Staleness", explanation=EXPLANATION)
