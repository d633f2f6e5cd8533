"""`paceline checkpoint`, and the table [checkpoint] of a settings file."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline import Checkpoints, cli
from paceline.settings import Recipe, SettingsError, load

runner = CliRunner()
FILE = """
epochs = 1
model = "perceptron"
[data]
name = "digits"
batch = 8
[checkpoint]
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "nowhere"], "nowhere: there is no such folder"),
        (["show", "."], "there is no complete checkpoint, which has a manifest.json"),
        (["verify", ".", "m.safetensors"], "only export writes a file"),
        (["export", "."], "name the file to write, as in: paceline checkpoint export . model.safetensors"),
        (["export", ".", "missing/m.safetensors"], "give the name of a file, in a folder that exists"),
        (["export", ".", "m.safetensors"], "there is no complete checkpoint"),
    ],
)
def test_what_is_not_there_is_named(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        runner.invoke(cli.app, ["checkpoint", *words], catch_exceptions=False)


def test_the_table_of_a_settings_file_says_where_and_when_to_save(tmp_path: Path):
    path = tmp_path / "settings.toml"
    path.write_text(FILE + 'folder = "run"\nevery = "1 epoch"\nkeep = 3\n')
    assert Recipe(load(path), 1, tmp_path).checkpoints() == Checkpoints("run", every="1 epoch", keep=3)
    assert Recipe(load(path, ["--checkpoint", "none"]), 1, tmp_path).checkpoints() is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ('every = "1 epoch"', "checkpoint.folder is missing"),
        ('folder = "run"\nalso = 1', r"checkpoint.also: \[checkpoint\] has no 'also'"),
        ('folder = "run"\nevry = 1', "did you mean 'every'"),
        ('folder = "run"\nevery = "soon"', "checkpoint: .*every='soon'.*give a time"),
        ('folder = "run"\nkeep = 0', "checkpoint: .*keep=0.*at least 1"),
    ],
)
def test_wrong_keys_of_the_table_are_named_by_their_path(keys: str, said: str, tmp_path: Path):
    path = tmp_path / "settings.toml"
    path.write_text(FILE + keys)
    with pytest.raises(SettingsError, match=said):
        Recipe(load(path), 1, tmp_path).checkpoints()
