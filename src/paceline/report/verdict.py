"""Verdict: which method reached the reference's quality first.  A faster run to a worse model is no speed-up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.report import formats
from paceline.report.metric import Metric, metrics
from paceline.report.row import Row


def verdict(rows: Sequence[Row]) -> str:
    """A few sentences about the time to the reference's last value; nothing without a reference (speed-up 1).

    >>> def row(name, speedup, *curve):
    ...     points = [(seconds, 0.0, {"accuracy": value}) for seconds, value in curve]
    ...     return Row(name, "", points[-1][2], points[-1][0], 0.0, speedup, points)
    >>> sgd = row("sgd", 1.0, (4.0, 0.8), (8.0, 0.9))
    >>> print(verdict([sgd, row("local", 4.0, (2.0, 0.92)), row("short", 8.0, (1.0, 0.5))]))
    sgd ends with an accuracy of 90.0%. local reaches that first, after 2.00 s, 4.00x sooner than sgd after 8.00 s. \
Never: short.
    """
    rows = [row for row in rows if not row.real]  # Wall time is never compared with virtual time.
    reference = next((row for row in rows if row.speedup == 1), None)
    metric = next((metric for metric in metrics(rows) if metric.better is not None), None)
    if reference is None or metric is None or len(rows) < 2:
        return ""
    target = reference.metrics.get(metric.name)
    own = None if target is None or not math.isfinite(target) else time_to(reference, metric, target)
    if target is None or own is None:
        return ""
    shown = formats.percent(target) if metric.is_share else formats.number(target)
    article = "an" if metric.name[0].lower() in "aeiou" else "a"
    times = [(row.name, time_to(row, metric, target)) for row in rows if row is not reference]
    reached = sorted((seconds, name) for name, seconds in times if seconds is not None)
    text = f"{reference.name} ends with {article} {metric.name} of {shown}. "
    if reached and reached[0][0] < own:
        seconds, name = reached[0]
        sooner = formats.factor(own / seconds) if seconds else "much"
        text += f"{name} reaches that first, after {formats.seconds(seconds)}, {sooner} sooner than {reference.name} "
        text += f"after {formats.seconds(own)}"
        reached = reached[1:]
    else:
        text += f"No other method reaches that sooner than {reference.name} itself, after {formats.seconds(own)}"
    text += "."
    if reached:
        text += f" Then: {'; '.join(f'{name} ({formats.seconds(seconds)})' for seconds, name in reached)}."
    never = [name for name, seconds in times if seconds is None]
    return text + (f" Never: {'; '.join(never)}." if never else "")


def time_to(row: Row, metric: Metric, target: float) -> float | None:
    """When a method's evaluations first reach a value; None if they never do."""
    sign = -1 if metric.better == "lower" else 1
    for seconds, _, values in row.curve:
        value = values.get(metric.name)
        if value is not None and sign * value >= sign * target:
            return seconds
    return None
