"""The page of other people's words: every name of ours in its tables exists, with the default that it shows."""

from __future__ import annotations

import inspect
import re

import pytest

import paceline as pl
from paceline.strategies import STRATEGIES
from tests.tables import Row, named, read, rows, spans, value_of

PAGE = read("words.md")
ROWS = list(rows(PAGE))
HEADINGS = list(dict.fromkeys(row.heading for row in ROWS))
OF_FILES = re.compile(r"(data|strategy)\.[a-z-]+")
WORDS = {"lr", "period", "steps"}  # Settings, named beside the class that has them.


def ours(row: Row) -> list[str]:
    shown = [span for span in spans(row.cell("here")) if not OF_FILES.fullmatch(span)]
    return [span for span in shown if span not in WORDS and not span.startswith('"')]


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_names_of_a_table_exist_and_have_the_defaults_that_it_shows(heading: str):
    for row in (row for row in ROWS if row.heading == heading):
        found = [named(span) for span in ours(row)]
        said = spans(row.cell("our default")) if "our default" in row.columns else []
        if said:
            value, settings = found[0]
            assert inspect.signature(value).parameters[settings[0]].default == value_of(said[0]), row


def test_every_strategy_is_among_the_words():
    names = [named(span)[0] for row in ROWS for span in ours(row)]
    assert [cls.__name__ for cls in STRATEGIES if not any(value is cls for value in names)] == []


def test_names_in_the_text_are_understood():
    assert pl.registry.strategy("bmuf") == pl.BlockMomentum()
    assert pl.registry.codec("1bit") == pl.codecs.OneBit()
