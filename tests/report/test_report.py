"""The report shows the values of its rows, escapes the user's text, and loads nothing."""

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from paceline import AllReduceSGD, Cluster, ParameterServer, simulate
from paceline.report import Row, axes, formats, html, text
from paceline.report.charts import find_charts, staleness
from paceline.report.columns import best as best_cells
from paceline.report.columns import columns
from paceline.report.metric import Metric
from paceline.report.swatch import COLOURS, swatch
from paceline.report.verdict import verdict
from paceline.study import demo
from tests.laws.tasks import quadratic

NAN = float("nan")
SVG = "{http://www.w3.org/2000/svg}"


def rising(
    seconds: float, nbytes: float, points: int = 20, name: str = "accuracy"
) -> list[tuple[float, float, dict[str, float]]]:
    return [(seconds * i / points, nbytes * i / points, {name: 0.1 + 0.8 * i / points}) for i in range(points + 1)]


def best(rows: list[Row]) -> set[tuple[int, int]]:
    return best_cells(rows, columns(rows))


ALLREDUCE = Row("AllReduceSGD", "AllReduceSGD", {"accuracy": 0.97}, 180.0, 69e6, 1.0, rising(180.0, 69e6))
BLOCK = Row("block momentum", "BlockMomentum(period=64)", {"accuracy": 0.96}, 14.0, 1.1e6, 12.9, rising(14.0, 1.1e6))
STALE = Row(
    "server",
    "ParameterServer(servers=2)",
    {"accuracy": 0.96},
    60.0,
    20e6,
    3.0,
    rising(60.0, 20e6),
    staleness={0: 1, 3: 8, 7: 1},
)
REAL = Row(
    "block momentum", "BlockMomentum(period=64)", {"accuracy": 0.95}, 2.5, 1.1e6, None, rising(2.5, 1.1e6), real=True
)


class Page(HTMLParser):
    """A parsed page: its tags with their attributes, the text of each table cell, and the tags that are still open."""

    VOID = frozenset({"meta", "path", "line"})

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.table_rows: list[list[str]] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.table_rows.append([])
        if tag in ("td", "th"):
            self.table_rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.table_rows and ("td" in self.open or "th" in self.open):
            self.table_rows[-1][-1] += data.strip()

    @property
    def drawings(self) -> list[ElementTree.Element]:
        return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg xmlns=.*?</svg>", self.source, re.DOTALL)]


def page(
    rows: list[Row], title: str = "A comparison", facts: dict[str, str] | None = None, notes: list[str] | None = None
) -> Page:
    parsed = Page(html.render(title, rows, facts or {}, notes or []))
    assert parsed.open == []
    return parsed


def printed(rows: list[Row]) -> str:
    out = StringIO()
    Console(width=120, file=out).print(text.table(rows))
    return out.getvalue()


def lines_in(drawing: ElementTree.Element) -> list[str]:
    return [
        path.attrib["d"]
        for group in drawing.iter(f"{SVG}g")
        if "mark-line" in group.get("class", "")
        for path in group.iter(f"{SVG}path")
    ]


def bars_in(drawing: ElementTree.Element) -> list[ElementTree.Element]:
    return [
        path
        for group in drawing.iter(f"{SVG}g")
        if "mark-rect" in group.get("class", "")
        for path in group.iter(f"{SVG}path")
    ]


def words_in(drawing: ElementTree.Element) -> set[str]:
    return {"".join(word.itertext()) for word in drawing.iter(f"{SVG}text")}


def test_page_and_terminal_show_the_same_values():
    rows = page([ALLREDUCE, BLOCK]).table_rows
    assert rows[1:] == [
        ["AllReduceSGD", "97.0%", "3 min 00 s", "69.0 MB", "1.00x"],
        ["block momentumBlockMomentum(period=64)", "96.0%", "14.0 s", "1.10 MB", "12.9x"],
    ]
    terminal = printed([ALLREDUCE, BLOCK])
    assert all(figure in terminal for row in rows[1:] for figure in row[1:])


def test_page_draws_one_line_per_method_against_time_and_against_bytes():
    over_time, over_bytes = page([ALLREDUCE, BLOCK]).drawings
    assert "virtual time (s), logarithmic" in words_in(over_time)
    assert {"bytes sent per worker, logarithmic", "300 kB", "1 MB", "3 MB", "10 MB", "30 MB"} <= words_in(over_bytes)
    assert len(lines_in(over_time)) == len(lines_in(over_bytes)) == 2


def test_methods_of_similar_cost_have_linear_axes_from_zero():
    twin = Row("twin", "Twin", {"accuracy": 0.9}, 100.0, 60e6, 1.8, rising(100.0, 60e6))
    over_time, over_bytes = page([ALLREDUCE, twin]).drawings
    assert {"virtual time (s)", "0"} <= words_in(over_time)
    assert {"bytes sent per worker", "0", "20 MB"} <= words_in(over_bytes)


def test_wall_time_is_never_compared_with_virtual_time():
    parsed = page([ALLREDUCE, REAL, BLOCK])
    headings = [row for row in parsed.table_rows if row[0] == "method"]
    assert [heading[2] for heading in headings] == ["virtual time", "wall time"]
    assert [len(lines_in(drawing)) for drawing in parsed.drawings] == [2, 2, 1, 1]
    assert "2.50 s wall" in printed([ALLREDUCE, REAL, BLOCK])
    assert best([ALLREDUCE, BLOCK, REAL]) == best([ALLREDUCE, BLOCK])


def test_text_of_the_user_is_escaped_everywhere():
    bad = "<script>alert('1')</script>\"><img src=x onerror=alert(1)>{{ 7 * 7 }}&amp;"
    parsed = page(
        [
            Row(bad, bad + "()()", {"accuracy": NAN}, 1.0, 1.0, 1.0, staleness={0: 1}),
            Row("[bold]x[/]", bad, {"accuracy": 0.9}, 1.0, 1.0, 1.0, rising(1.0, 1.0)),
        ],
        bad,
        {bad: bad},
        [bad],
    )
    assert f"Staleness of the updates of {bad}, a histogram" in [
        attributes.get("aria-label") for _, attributes in parsed.tags
    ]
    assert not {tag for tag, _ in parsed.tags} & {"script", "img"}
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    assert parsed.table_rows[1][0] == bad + bad + "()()"
    assert all("alert" not in ElementTree.tostring(drawing, "unicode") for drawing in parsed.drawings)
    assert "[bold]x[/]" in printed([Row("[bold]x[/]", "", {"accuracy": 0.9}, 1.0, 1.0, 1.0)])


def test_page_loads_nothing_and_runs_no_script():
    parsed = page([ALLREDUCE, BLOCK, STALE, REAL])
    assert not {tag for tag, _ in parsed.tags} & {
        "script",
        "link",
        "img",
        "image",
        "iframe",
        "object",
        "use",
        "foreignobject",
    }
    assert not re.search(r"@import|url\(", parsed.source)
    addresses = re.findall(r'(\S+)="https?://', parsed.source)
    assert set(addresses) == {"xmlns", "xmlns:xlink"}
    assert len(re.findall("https?://", parsed.source)) == len(addresses)


def test_drawings_have_no_ids_that_could_clash():
    assert not [attributes["id"] for _, attributes in page([ALLREDUCE, BLOCK, STALE, REAL]).tags if "id" in attributes]


def test_page_without_rows_says_that_no_method_was_run():
    parsed = page([], notes=["a note"])
    assert "no method was run" in parsed.source and "a note" in parsed.source
    assert parsed.drawings == []
    assert "method" in printed([])


def test_single_point_is_drawn_as_a_mark():
    drawings = page(
        [Row("one", "One", {"accuracy": 0.9}, 3.0, 100.0, None, [(3.0, 100.0, {"accuracy": 0.9})])]
    ).drawings
    assert len(drawings) == 2
    for drawing in drawings:
        (mark,) = [
            p for g in drawing.iter(f"{SVG}g") if "mark-symbol" in g.get("class", "") for p in g.iter(f"{SVG}path")
        ]
        assert mark.get("fill") == COLOURS[0]
        assert "NaN" not in ElementTree.tostring(drawing, "unicode")


def test_diverged_run_is_shown_but_never_best():
    hot = Row(
        "too hot",
        "Hot",
        {"accuracy": NAN},
        0.1,
        0.0,
        999.0,
        [(0.0, 0.0, {"accuracy": 0.1}), (0.1, 0.0, {"accuracy": NAN})],
    )
    unknown = Row("unmeasured", "Unmeasured", {}, float("inf"), NAN, None)
    parsed = page([hot, unknown, ALLREDUCE, BLOCK])
    assert parsed.table_rows[1][1:] == ["nan", "100 ms", "0 B", "999x"]
    assert parsed.table_rows[2][1:] == ["-", "inf", "nan", "-"]
    assert not [winner for winner in best([hot, unknown, ALLREDUCE, BLOCK]) if winner[0] < 2]
    assert "Nothing to draw for too hot, unmeasured." in parsed.source
    assert "NaN" not in "".join(lines_in(parsed.drawings[0]))


def test_long_line_is_thinned_to_five_hundred_points_with_both_ends():
    drawing = page(
        [Row("long", "Long", {"accuracy": 0.9}, 10.0, 1e6, None, rising(10.0, 1e6, points=20_000))]
    ).drawings[0]
    (line,) = lines_in(drawing)
    xs = [float(x) for x in re.findall(r"[ML](-?[\d.]+),", line)]
    assert len(xs) == 500 and xs[0] == 0.0 and xs[-1] == 440.0


@pytest.mark.slow
def test_page_of_sixty_methods_is_below_a_megabyte(tmp_path: Path):
    stale = dict.fromkeys(range(3000), 2)
    rows = [
        Row(
            f"method {i}",
            "S",
            {"accuracy": 0.9},
            10.0 + i,
            1e6 + i,
            1.0,
            rising(10.0 + i, 1e6 + i, points=3000),
            staleness=stale,
        )
        for i in range(60)
    ]
    html.write(tmp_path / "report.html", "Sixty methods", rows, {"seed": "0"}, [])
    assert 10_000 < (tmp_path / "report.html").stat().st_size < 1_000_000


def test_page_is_small_and_the_same_every_time(tmp_path: Path):
    for name in ("a.html", "b.html"):
        html.write(tmp_path / name, "Twice \udcff", [ALLREDUCE, BLOCK], {"torch": "2"}, [])
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert (tmp_path / "a.html").stat().st_size < 60_000


def test_rows_with_servers_have_a_staleness_column_and_a_histogram():
    parsed = page([ALLREDUCE, STALE, BLOCK])
    assert [row[5] for row in parsed.table_rows] == ["staleness", "-", "3.1 (max 7)", "-"]
    assert "staleness" in printed([ALLREDUCE, STALE]) and "3.1 (max 7)" in printed([ALLREDUCE, STALE])
    *lines, histogram = parsed.drawings
    assert len(lines) == 2 and not any(bars_in(drawing) for drawing in lines)
    assert [bar.get("fill") for bar in bars_in(histogram)] == [swatch(1).colour] * 3
    assert {"staleness", "updates"} <= words_in(histogram)
    assert "10 updates, mean 3.1 (max 7)" in parsed.source


@pytest.mark.parametrize("stale", [{}, {0: 0}])
def test_rows_without_updates_have_no_staleness_column_or_histogram(stale: dict[int, int]):
    idle = Row("idle", "Idle", {"accuracy": 0.9}, 1.0, 1.0, 1.0, rising(1.0, 1.0), staleness=stale)
    plain = Row("idle", "Idle", {"accuracy": 0.9}, 1.0, 1.0, 1.0, rising(1.0, 1.0))
    assert page([ALLREDUCE, idle]).source == page([ALLREDUCE, plain]).source
    assert printed([ALLREDUCE, idle]) == printed([ALLREDUCE, plain])
    assert "taleness" not in page([ALLREDUCE, idle]).source + printed([ALLREDUCE, idle])
    assert len(page([ALLREDUCE, idle, STALE]).drawings) == 3


def test_staleness_is_explained_once():
    real = Row(
        "server", "ParameterServer", {"accuracy": 0.9}, 1.0, 1.0, None, rising(1.0, 1.0), real=True, staleness={0: 1}
    )
    parsed = page([STALE, real])
    assert parsed.source.count("how many versions") == 1 and len([d for d in parsed.drawings if bars_in(d)]) == 2
    parsed = page([ALLREDUCE, real])
    assert parsed.source.count("how many versions") == 1
    assert [len(row) for row in parsed.table_rows] == [5, 5, 5, 5]  # The real one has staleness, but no speed-up.


@pytest.mark.parametrize(
    "stale", [{0: 500}, {3: 1}, {10**6: 1}, dict.fromkeys(range(5000), 1), {7: 10**6, 900: 1}, {2**53: 1, 0: 1}]
)
def test_histograms_of_one_value_and_of_thousands_are_readable(stale: dict[int, int]):
    drawing = ElementTree.fromstring(staleness.histogram(stale, "#2b9348"))
    assert "NaN" not in ElementTree.tostring(drawing, "unicode")
    corners = [[float(x) for x in re.findall(r"-?[\d.]+(?:e-?\d+)?", bar.attrib["d"])] for bar in bars_in(drawing)]
    assert 1 <= len(corners) <= staleness.BARS
    # M x,y h width v height h -width Z: narrower than a sixth of the chart, large enough to see, and inside it.
    for x, y, width, height, *_ in corners:
        assert 2 <= width <= 250 / 6 and abs(height) >= 0.5
        assert 0 <= x <= x + width <= 250 and 0 <= min(y, y + height) <= max(y, y + height) <= 120
    ticks = words_in(drawing) - {"staleness", "updates"}
    assert 4 <= len(ticks) <= 16


@given(
    st.dictionaries(st.integers(0, 50) | st.integers(0, 2**53), st.integers(0, 10**9)).filter(
        lambda counts: any(counts.values())
    )
)
def test_bars_count_every_update_once(counts: dict[int, int]):
    width, found = staleness.bars(counts)
    assert sum(found.values()) == sum(counts.values())
    assert all(
        n == sum(counts.get(number, 0) for number in counts if first <= number < first + width)
        for first, n in found.items()
    )
    assert max(found) // width < staleness.BARS and all(first % width == 0 for first in found)


@pytest.mark.parametrize("real", [False, True])
def test_row_of_a_run_with_servers_has_the_staleness_counts_of_its_trace(real: bool):
    task = quadratic(steps=5, batch=4, evaluate=lambda model: {"accuracy": 0.5}, evaluate_every=5)
    strategy = ParameterServer(servers=2)
    run = simulate(task, strategy, Cluster(workers=2))
    row = demo.row("server", strategy, run, 2, None, real=real)
    assert row.staleness == run.trace.staleness_counts and row.updates == len(run.trace.staleness()) == 2 * 2 * 5
    row = demo.row("plain", AllReduceSGD(), simulate(task, AllReduceSGD(), Cluster(workers=2)), 2, None, real=real)
    assert row.updates == 0


def test_any_metric_of_an_evaluation_has_a_column_and_charts():
    task = quadratic(steps=4, batch=4, evaluate=lambda model: {"test loss": 0.5, "radius": 12.0}, evaluate_every=2)
    row = demo.row("plain", AllReduceSGD(), simulate(task, AllReduceSGD(), Cluster(workers=2)), 2, None)
    assert row.metrics == {"test loss": 0.5, "radius": 12.0}
    parsed = page([row])
    assert parsed.table_rows[0][1:3] == ["test loss", "radius"] and parsed.table_rows[1][1:3] == ["0.5", "12"]
    assert [bool(words_in(drawing) & {name}) for drawing in parsed.drawings for name in ("test loss", "radius")] == [
        True,
        False,
        False,
        True,
    ] * 2
    assert "Test loss against virtual time; further down and to the left is better." in parsed.source
    assert "Radius against virtual time; further to the left is better." in parsed.source


def test_task_without_evaluation_has_neither_metrics_nor_charts():
    run = simulate(quadratic(steps=4, batch=4), AllReduceSGD(), Cluster(workers=2))
    row = demo.row("plain", AllReduceSGD(), run, 2, None)
    slower = replace(row, seconds=2 * row.seconds)
    assert page([row, slower]).drawings == []
    assert columns([row])[0].heading == "virtual time"
    assert best([row, slower]) == {(0, 0)}


@pytest.mark.parametrize(
    ("name", "winner"), [("accuracy", {(1, 0)}), ("val_loss", {(0, 0)}), ("radius", set[tuple[int, int]]())]
)
def test_best_value_of_a_metric_is_the_highest_or_the_lowest_as_its_name_says(name: str, winner: set[tuple[int, int]]):
    rows = [Row("a", "A", {name: 0.25}, 1.0, 1.0, None), Row("b", "B", {name: 0.75}, 1.0, 1.0, None)]
    assert best(rows) == winner
    assert Metric(name).is_share == (name == "accuracy")


def test_rows_with_different_metrics_share_a_table():
    rows = [Row("a", "A", {"accuracy": 0.5}, 1.0, 1.0, None), Row("b", "B", {"loss": 0.75}, 1.0, 1.0, None)]
    assert [row[:3] for row in page(rows).table_rows] == [
        ["method", "accuracy", "loss"],
        ["aA", "50.0%", "-"],
        ["bB", "-", "0.75"],
    ]


def test_name_of_a_metric_is_escaped_in_the_drawings():
    bad = "<script>alert('1')</script>&amp;"
    parsed = page([Row("a", "A", {bad: 0.5}, 1.0, 1.0, None, rising(1.0, 1.0, name=bad))])
    assert not {tag for tag, _ in parsed.tags} & {"script", "img"}
    assert all(bad in words_in(drawing) for drawing in parsed.drawings)


def test_new_chart_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from paceline.report import charts

    (tmp_path / "names.py").write_text(
        "from paceline.report.chart import Chart, Figure\n"
        "def draw(rows, clock): return [Figure('names', '<svg/>', f'{len(rows)} rows')]\n"
        "CHART = Chart(draw, order=9, heading='Names')\n"
    )
    monkeypatch.setattr(charts, "__path__", [*charts.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "paceline.report.charts.names", raising=False)
    assert len(find_charts()) == 4
    source = page([ALLREDUCE, BLOCK]).source
    assert "<h3>Names</h3>" in source and "2 rows" in source
    monkeypatch.delitem(sys.modules, "paceline.report.charts.names")
    (tmp_path / "names.py").write_text("TITLE = 'no chart'\n")
    with pytest.raises(TypeError, match="names: a file in this folder must define CHART"):
        find_charts()


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("paper", ["#ffffff", "#15171a"])
def test_every_colour_has_enough_contrast_on_light_and_dark_pages(colour: str, paper: str):
    def luminance(hex_colour: str) -> float:
        channels = [int(hex_colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted([luminance(colour), luminance(paper)])
    # WCAG 2.1, 1.4.11: graphical objects need 3:1.
    assert (light + 0.05) / (dark + 0.05) >= 3.0


def test_first_twenty_four_lines_look_different():
    assert len({swatch(i) for i in range(24)}) == 24


@given(st.floats(min_value=0, max_value=1e9), st.floats(min_value=0, max_value=1e9))
def test_formatted_values_have_at_most_three_digits_before_a_unit(seconds: float, sent: float):
    for words in (formats.seconds(seconds), formats.nbytes(sent)):
        assert re.fullmatch(r"\d+(\.\d+)? [a-zA-Z]+( \d\d [a-z]+)?", words), words
        assert "min 60" not in words and "h 60" not in words and "d 24" not in words
    assert len(formats.nbytes(sent).split()[0]) <= 4


@given(st.floats(min_value=1e-6, max_value=1e12), st.floats(min_value=10.0, max_value=1e12))
@settings(deadline=None)
def test_logarithmic_axes_have_one_to_nine_labels(low: float, ratio: float):
    ticks = axes.log_ticks(low, low * ratio)
    assert 1 <= len(ticks) <= 9
    assert all(low <= a < b <= low * ratio for a, b in pairwise(ticks))


def test_method_has_the_same_colour_in_both_sections():
    parsed = page([ALLREDUCE, BLOCK, REAL])
    strokes = [
        path.get("stroke")
        for drawing in parsed.drawings
        for group in drawing.iter(f"{SVG}g")
        if "mark-line" in group.get("class", "")
        for path in group.iter(f"{SVG}path")
    ]
    assert strokes == [COLOURS[0], COLOURS[1]] * 2 + [COLOURS[1]] * 2
    twins = page([BLOCK, BLOCK, REAL])  # Two rows of one section never share a colour.
    assert COLOURS[0] in twins.source and COLOURS[1] in twins.source and COLOURS[2] not in twins.source


def test_section_without_a_speedup_has_no_column_for_it():
    assert [row for row in page([REAL]).table_rows if row[0] == "method"] == [
        ["method", "accuracy", "wall time", "bytes per worker"]
    ]
    assert "ends with" not in page([REAL]).source


def test_verdict_is_about_the_time_to_the_same_quality():
    assert verdict([ALLREDUCE, BLOCK, REAL]) == ""  # The reference's own curve ends at 0.9, not at its 0.97.
    reference = replace(ALLREDUCE, metrics={"accuracy": 0.9})
    said = "AllReduceSGD ends with an accuracy of 90.0%. block momentum reaches that first, after 14.0 s, 12.9x sooner"
    assert verdict([reference, BLOCK, REAL]) == f"{said} than AllReduceSGD after 3 min 00 s."
    assert said in page([reference, BLOCK, REAL]).source
    falling = [(1.0, 0.0, {"val_loss": 2.0}), (2.0, 0.0, {"val_loss": 1.0})]
    slow = Row("slow", "", {"val_loss": 1.5}, 9.0, 0.0, 0.2, [(9.0, 0.0, {"val_loss": 1.5})])
    quick = Row("quick", "", {"val_loss": 1.0}, 2.0, 0.0, 1.0, falling)
    said = "quick ends with a val_loss of 1. No other method reaches that sooner than quick itself, after 2.00 s"
    assert verdict([quick, slow]) == f"{said}. Never: slow."


def test_metrics_may_have_any_name():
    rows = [
        replace(row, metrics={"BLEU": 31.5}, curve=rising(9.0, 1e6, name="BLEU")) for row in (ALLREDUCE, BLOCK, REAL)
    ]
    assert "31.5" in page(rows).source and "31.5" in printed(rows)
    assert verdict(rows) == ""  # Nothing says whether more is better.
