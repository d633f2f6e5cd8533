"""The command line, without worker processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

import paceline as pl
from paceline import cli, registry
from paceline.codecs import CODECS
from paceline.strategies import STRATEGIES

runner = CliRunner()


def test_commands_and_flags_are_exactly_these():
    """A flag is a promise to users, so each one is listed here."""
    group = typer.main.get_command(cli.app)
    found = {name: sorted(flag for p in command.params for flag in p.opts) for name, command in group.commands.items()}
    assert found == {
        "run": ["--module", "--port", "--prefix", "--replacements", "--restarts", "--workers", "-m", "-n", "script"],
        "train": ["settings"],  # Other flags of this and the next two are keys of the file.
        "simulate": ["settings"],
        "tune": ["--budget", "--part", "--rates", "--real", "--results", "--seeds", "settings"],
        "torture": ["--faults", "--json", "--processes", "--seed", "--seeds", "--strategy"],
        "init": ["--force", "path"],
        "checkpoint": ["action", "folder", "output"],
        "schema": [],
        "demo": ["--epochs", "--report"],
        "strategies": ["--json", "name"],
        "codecs": ["--json", "name"],
    }


def test_version_is_printed():
    shown = runner.invoke(cli.app, ["--version"])
    assert shown.exit_code == 0 and shown.stdout == f"paceline {pl.__version__}\n"


@pytest.mark.parametrize(
    ("path", "said"), [("missing/report.html", "there is no folder"), (".", "it is a folder; give the name of a file")]
)
def test_demo_refuses_a_path_it_cannot_write_at_once(path, said, tmp_path):
    with pytest.raises(ValueError, match=rf"paceline demo --report .*: {said}"):
        runner.invoke(cli.app, ["demo", "--report", str(tmp_path / path)], catch_exceptions=False)


def test_every_file_of_the_folder_is_a_command():
    names = {path.stem for path in Path(cli.__file__).parent.glob("*.py") if not path.stem.startswith("_")}
    assert set(typer.main.get_command(cli.app).commands) == names


@pytest.mark.parametrize(("command", "classes"), [("strategies", STRATEGIES), ("codecs", CODECS)])
def test_lists_have_a_line_and_settings_for_every_class(command, classes):
    shown = runner.invoke(cli.app, [command])
    listed = json.loads(runner.invoke(cli.app, [command, "--json"]).stdout)
    assert [row["class"] for row in listed] == [cls.__name__ for cls in classes]
    for row in listed:
        assert row["name"] in shown.stdout
        assert row["summary"].endswith(".") and len(row["summary"]) < 140


def test_list_of_one_strategy_shows_only_that_one():
    listed = json.loads(runner.invoke(cli.app, ["strategies", "block-momentum", "--json"]).stdout)
    assert [row["name"] for row in listed] == ["block-momentum"]
    assert {"name": "rate", "type": "float", "default": 1.0, "required": False} in listed[0]["settings"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: registry.strategy("blok-momentum"),
            "there is no strategy 'blok-momentum'; did you mean 'block-momentum'?",
        ),
        (
            lambda: registry.strategy("AllReducSGD"),
            "there is no strategy 'AllReducSGD'; did you mean 'all-reduce-sgd'?",
        ),
        (lambda: registry.codec("onbit"), "there is no codec 'onbit'; did you mean 'one-bit'?"),
        (
            lambda: registry.strategy("block-momentum", perod=3),
            "BlockMomentum has no setting 'perod'; did you mean 'period'?",
        ),
        (lambda: registry.codec("fp16", bucket=3), "Fp16 has no setting 'bucket'; it has no settings"),
        (lambda: registry.strategy("strom"), "Strom needs codec: there is no default"),
        (
            lambda: registry.strategy("periodic-averaging", period=0),
            "PeriodicAveraging(period=0): it counts steps between syncs",
        ),
        (
            lambda: registry.strategy("block-momentum", period=-1),
            "BlockMomentum(period=-1): it counts steps between syncs",
        ),
        (
            lambda: registry.strategy("block-momentum", momentum=1.0),
            "BlockMomentum(momentum=1.0): block momentum lies in [0, 1)",
        ),
        (lambda: registry.strategy("parameter-server", servers=0), "ParameterServer(servers=0): at least 1 shard"),
        (
            lambda: registry.codec("one-bit", bucket=12),
            "OneBit(bucket=12, threshold='mean'): the bucket size is a multiple of 32",
        ),
        (lambda: registry.rule("sgd", lr=0), "Sgd(lr=0): the learning rate must be positive"),
    ],
)
def test_error_for_a_wrong_name_or_value_says_what_is_right(call, said):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value).startswith(said)


def test_settings_are_the_same_after_serialisation():
    for strategy in (
        registry.strategy("block-momentum", period=3),
        registry.strategy("parameter-server", rule=registry.rule("sgd", lr=0.5)),
        registry.strategy("parameter-server", rule=registry.rule("adam", betas=(0.8, 0.99))),
        registry.strategy("decreasing-averaging", periods=[8, 4]),
        registry.strategy("decreasing-averaging", periods=(8, 4)),
    ):
        plain = json.loads(json.dumps(registry.to_plain(strategy)))
        assert registry.from_plain(plain) == strategy


def test_a_rule_with_a_tuple_can_be_hashed_after_serialisation():
    rule = registry.rule("adam", betas=(0.8, 0.99))
    plain = json.loads(json.dumps(registry.to_plain(rule)))
    assert hash(registry.from_plain(plain)) == hash(rule)


def test_setting_that_cannot_be_serialised_is_refused():
    strategy = registry.strategy("gossip", topology=lambda rank, size, step: None)
    with pytest.raises(TypeError, match="of type function cannot be serialised for another process"):
        registry.to_plain(strategy)


@pytest.mark.slow
def test_demo_writes_a_report_and_prints_a_table(tmp_path):
    report = tmp_path / "report.html"
    shown = runner.invoke(cli.app, ["demo", "--epochs", "1", "--report", str(report)])
    assert shown.exit_code == 0, shown.output
    for name in ("AllReduceSGD", "PeriodicAveraging", "BlockMomentum", "ParameterServer"):
        assert name in shown.stdout
    assert report.read_text().count("<svg") >= 2
