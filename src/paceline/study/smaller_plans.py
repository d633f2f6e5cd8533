"""Smaller plans: the fewest faults, at the roundest times, that still break the same invariant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from paceline.sim.faults import ClockJump, Cut, Faults, Pause, SlowLink

SHARES = ("lost", "doubled", "delayed", "silent_s")
EVENTS = ("deaths", "server_deaths", "joins", "suspicions", "pauses", "cuts", "slow_links", "clock_jumps")


def smallest(faults: Faults, fails: Callable[[Faults], bool], most_runs: int = 300) -> Faults:
    """The smallest plan found for which `fails` is true still, as it is for `faults`.

    Faults are removed as long as possible, a kind, half of a kind or one at a time; then times are rounded.

    >>> small = smallest(Faults({0: 0.123, 1: 0.2, 2: 0.3}, lost=0.1), lambda faults: 0 in faults.deaths)
    >>> small.deaths, small.lost
    ({0: 0.1}, 0.0)
    """
    runs = 0
    for candidates in (without_parts, with_coarser_times):
        is_smaller = True
        while is_smaller:
            is_smaller = False
            for smaller in candidates(faults):
                runs += 1
                if runs > most_runs:
                    return faults
                if fails(smaller):
                    faults = smaller
                    is_smaller = True
                    break
    return faults


def without_parts(faults: Faults) -> Iterator[Faults]:
    """Plans with fewer faults: without a kind, without half of a kind, without a single one."""
    plain = Faults()
    for name in (*EVENTS, *SHARES):
        if getattr(faults, name):
            yield from _changed(faults, **{name: getattr(plain, name)})
    for name in EVENTS:
        items = _items(getattr(faults, name))
        half = len(items) // 2
        if half > 1:
            yield from _changed(faults, **_events(name, items[:half]))
            yield from _changed(faults, **_events(name, items[half:]))
        if len(items) > 1:
            for i in range(len(items)):
                yield from _changed(faults, **_events(name, items[:i] + items[i + 1 :]))


def with_coarser_times(faults: Faults) -> Iterator[Faults]:
    """Plans with the same faults at rounder times."""
    for digits in (1, 2, 3):
        rounded: dict[str, Any] = {name: _rounded(getattr(faults, name), digits) for name in EVENTS}
        yield from _changed(faults, **rounded, delay_s=round(faults.delay_s, digits))
        for name, values in rounded.items():
            yield from _changed(faults, **{name: values})


def _items(events: Any) -> list[Any]:
    return list(events.items()) if isinstance(events, dict) else list(events)


def _events(name: str, items: list[Any]) -> dict[str, Any]:
    return {name: dict(items) if name == "deaths" else items}


def _changed(faults: Faults, **changes: Any) -> Iterator[Faults]:
    """The plan with these changes, if it differs and is valid."""
    try:
        changed = replace(faults, **changes)
    except ValueError:
        return
    if any(_plain(getattr(changed, f.name)) != _plain(getattr(faults, f.name)) for f in fields(faults)):
        yield changed


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _rounded(value: Any, digits: int) -> Any:
    """The same value with all times rounded."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, dict):
        return {key: _rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_rounded(item, digits) for item in value)
    if isinstance(value, (Pause, Cut, SlowLink, ClockJump)):
        return replace(value, **{f.name: _rounded(getattr(value, f.name), digits) for f in fields(value)})
    return value
