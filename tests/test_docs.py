"""The pages that users read: their examples run, their commands exist, and their figures are those of a run.

A ```python block runs in its page's namespace, after the blocks above it. A block that begins with `# name.py` is a
script: it is written to that file, and the page's ```console blocks that start it are run. A ```toml block that begins
with `# name.toml` is a settings file: its first step is tried, with the modules that are scripts of the page.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
import tomllib
import types
from collections.abc import Iterator
from contextlib import chdir
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from torch import nn

import paceline as pl
from paceline import cli
from paceline.checked import settings_of, spelled
from paceline.report import formats
from paceline.settings import Recipe, Settings, load
from paceline.settings.decode import dashed, options_of
from paceline.settings.first_step import check_first_step
from paceline.settings.schema import settings_schema
from paceline.study.demo import CLUSTER, STRATEGIES, Demo, row
from tests.dist import forked

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPT = re.compile(r"# (\w+\.(?:py|toml))\n")

SCHEMA = settings_schema()


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """The page's blocks of a language, each with the number of its first line."""
    written = page.read_text()
    for found in FENCE.finditer(written):
        if found["language"] == language:
            yield written[: found.start("body")].count("\n"), found["body"]


def commands(page: Path) -> Iterator[list[str]]:
    """The commands of the page, as lists of words. Lines of output have no `$` before them."""
    for _, body in blocks(page, "console"):
        for line in body.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                yield shlex.split(line[2:], comments=True)


def test_there_are_pages():
    assert len(PAGES) > 6


@pytest.mark.dist
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    module = types.ModuleType(
        f"page_{page.stem.replace('-', '_')}"
    )  # Dataclasses look up the module in which they are defined.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    scripts: set[str] = set()
    with chdir(tmp_path):
        for line, body in blocks(page, "python"):
            if script := SCRIPT.match(body):
                Path(script[1]).write_text(body)
                scripts.add(script[1])
            else:
                # With this, tracebacks show the page's own line.
                exec(compile("\n" * line + body, str(page), "exec"), vars(module))
        for _, body in blocks(page, "toml"):
            if file := SCRIPT.match(body):
                Path(file[1]).write_text(body)
                recipe = Recipe(load(file[1]), 2, Path.cwd())
                check_first_step(recipe, recipe.task())
                scripts -= {f"{name}.py" for name in re.findall(r'"(\w+):', body)}
        started = [words for words in commands(page) if words[:2] == ["paceline", "run"] and scripts & set(words)]
        for words in started:
            words = ["2" if before == "-n" else word for before, word in pairwise(words)]  # Two workers are enough.
            done = forked.paceline(*words, folder=tmp_path, timeout_s=100)
            assert done.returncode == 0, f"{words}: {done.stderr}"
    unstarted = scripts - {word for words in started for word in words}
    assert not unstarted, f"{name_of(page)} shows {unstarted} and no `paceline run` of it"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_commands_of_a_page_exist(page):
    from torch.distributed.run import get_args_parser

    ours = typer.main.get_command(cli.app).commands
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(page):
        match words:
            case ["paceline", command, *rest]:
                flags = {flag for parameter in ours[command].params for flag in parameter.opts}
                own = rest[: next((i for i, word in enumerate(rest) if word.endswith(".py")), len(rest))]
                others = {word for word in own if word.startswith("-")} - flags
                if command in ("train", "simulate", "tune"):
                    others = {flag for flag in others if not is_key(flag.removeprefix("--").partition("=")[0])}
                assert not others, words
            case ["make", target]:
                assert target in targets, words
            case ["torchrun", *rest]:
                get_args_parser().parse_args(rest)
            case ["mpiexec" | "srun", "-n" | "--ntasks", _, "python", *_]:
                pass
            case ["git" | "pip" | "cd", *_]:
                pass
            case _:
                pytest.fail(f"{name_of(page)} shows {words}, which this test does not know how to check")


def is_key(path: str) -> bool:
    """Whether a settings file can have that key, under one of the strategies, codecs and so on."""
    found = [SCHEMA]
    for key in path.split("."):
        options = [option for schema in found for option in objects(schema)]
        found = [o["properties"][key] for o in options if key in o["properties"]]
        if not found and any(o["additionalProperties"] for o in options):  # Arguments of a function.
            return True
    return bool(found)


def objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas of tables among its options."""
    if "$ref" in schema:
        yield from objects(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
    for option in schema.get("anyOf", ()):
        yield from objects(option)
    if "properties" in schema:
        yield schema


def test_flags_are_checked_against_the_keys_of_a_settings_file():
    for key in (
        "workers",
        "strategy.period",
        "strategy.codec.codec",
        "model.width",
        "strategy.rule.lr",
        "warm-start.length",
    ):
        assert is_key(key), key
    for key in ("worker", "strategy.peirod", "workers.x", "schedule.lr", "strategy.codec.nothing"):
        assert not is_key(key), key


def test_the_page_of_settings_has_every_key_with_its_default():
    tables: dict[str, Any] = {"data.grow": pl.GrowingBatch, "data.auto": pl.AutoBatch}
    alone: list[str] = []
    for name, kind in settings_of(Settings).items():
        classes = [option for option in options_of(kind) if dataclasses.is_dataclass(option)]
        if classes:
            tables[f"`[{dashed(name)}]`"] = classes[0]
        elif kind is not pl.Strategy:  # Its keys are those of the strategies.
            alone.append(dashed(name))
    written = dict(_keys(ROOT / "docs" / "settings.md"))
    expected = {name.strip("`"): _defaults(cls) for name, cls in tables.items()}
    every = _defaults(Settings)
    assert written == expected | {"The file": {name: every[name] for name in alone}}


def _defaults(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.name != "arguments":
            default = "required" if f.default is f.default_factory else f.default
            default = list(default) if isinstance(default, tuple) else default
            found[dashed(f.name)] = spelled(type(default)) if isinstance(default, pl.Strategy) else default
    return found


def _keys(page: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """For each heading with a table of keys, the default of each key."""
    for part in re.split(r"^#+ ", page.read_text(), flags=re.MULTILINE):
        heading, _, rest = part.partition("\n")
        rows = re.findall(r"^\| `([\w-]+)` \| (.+?) \|", rest, re.MULTILINE)
        if "\n| key | default |" in rest:
            special = {"-": None, "*required*": "required"}
            parsed = {
                key: special[text] if text in special else tomllib.loads(f"x = {text.strip('`')}")["x"]
                for key, text in rows
            }
            yield heading.strip("`"), parsed


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_have_targets(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", FENCE.sub("", page.read_text())):
        assert (page.parent / target).exists(), target


def test_every_strategy_codec_and_public_name_is_documented():
    written = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in pl.__all__ if not re.search(rf"\b{name}\b", written)] == []


@pytest.mark.slow
def test_the_readmes_times_and_bytes_are_those_of_the_demo():
    """Neither depends on the values. So a model with the same tensors that learns nothing has the same times and
    bytes."""
    demo = Demo().task()
    shapes = [p.shape for p in demo.build().parameters()]

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    job = pl.Task(
        Idle,
        lambda model, batch: sum(w.view(-1)[0] for w in model.all) * 0,
        demo.data,
        demo.batch,
        demo.optimizer,
        steps=demo.total_steps,
    )
    runs = {name: pl.simulate(job, strategy, CLUSTER, strict=False) for name, strategy in STRATEGIES.items()}
    for run in runs.values():
        run.trace.evaluation(run.seconds, 0, {"accuracy": 0.0})
    reference = runs["AllReduceSGD"].seconds
    rows = [row(name, STRATEGIES[name], run, CLUSTER.workers, reference / run.seconds) for name, run in runs.items()]
    readme = {cells[0]: cells[2:5] for cells in _table(ROOT / "README.md", "speed-up") if len(cells) == 5}
    assert {
        r.name: [formats.seconds(r.seconds), formats.nbytes(r.bytes_per_worker), formats.factor(r.speedup)]
        for r in rows
    }.items() <= readme.items()


def _table(page: Path, heading: str) -> list[list[str]]:
    """The cells of the page's first table whose heading contains a word."""
    lines = iter(page.read_text().splitlines())
    for line in lines:
        if line.startswith("|") and heading in line:
            break
    rows = []
    for line in lines:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
