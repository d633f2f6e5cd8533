"""A settings file on real processes: the simulator's result, under either way to start them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline import simulate
from paceline.cli._training import train_by_settings
from paceline.settings import Recipe, load
from paceline.trace import Trace
from tests.dist import forked

TEXT = """
epochs = 1
workers = 4
[model]
name = "perceptron"
hidden = [8]
[data]
name = "digits"
batch = 40
[optimizer]
lr = 0.1
momentum = 0.9
[scaling]
[schedule]
warmup = "300 samples"
start = "base"
decay = "cosine"
[strategy]
name = "{strategy}"
[processes]
ordered = true
[save]
model = "model.safetensors"
[log]
progress = false
"""


DECIDING = {
    "epochs": "3",
    "strategy.samples": "120",
    "strategy.codec": "one-bit",
    "warm-start.length": "300 samples",
    "data.batch": "none",
    "data.auto": "{start = 20, multiple = 5, every = 2, trial = 0.6, largest = 60}",
    "adjust.interval": "1",
    "optimizer.name": "lars",
    "optimizer.trust": "0.02",
    "evaluation.every": "0.5 epochs",
}


@pytest.mark.parametrize(
    ("strategy", "keys"),
    [("all-reduce-sgd", {}), ("block-momentum", {"strategy.period": "3"}), ("periodic-averaging", DECIDING)],
    ids=["all-reduce-sgd", "block-momentum", "decisions between epochs"],
)
def test_a_file_gives_the_same_result_on_the_simulator_and_on_four_processes(
    strategy: str, keys: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    path = Path("settings.toml")
    path.write_text(TEXT.format(strategy=strategy))
    flags = [part for key, value in keys.items() for part in (f"--{key}", value)]
    recipe = Recipe(load(path, flags), 4, tmp_path)
    simulated = simulate(recipe.task(), recipe.strategy, recipe.cluster())
    train_by_settings(path, [*flags, "--save.trace", "trace.json"])
    saved = load_file("model.safetensors")
    assert torch.equal(
        torch.cat([saved[name].view(-1) for name, _ in simulated.model.named_parameters()]), simulated.params
    )
    trace, expected = Trace.loads(Path("trace.json").read_text()), simulated.trace
    assert trace.evaluations[-1].values == expected.evaluations[-1].values
    assert [(e.samples, len(e.values)) for e in trace.evaluations] == [(e.samples, 2) for e in expected.evaluations]
    assert [d[1:] for d in trace.decisions] == [d[1:] for d in expected.decisions]
    assert {d.kind for d in trace.decisions} == ({"batch", "adjust"} if keys is DECIDING else set())


def test_ranks_of_a_job_train_by_a_file_and_one_of_them_writes_the_model(tmp_path: Path):
    (tmp_path / "settings.toml").write_text(TEXT.format(strategy="all-reduce-sgd").replace("workers = 4", ""))
    done = forked.paceline("run", "-n", "2", "-m", "paceline.cli", "train", "settings.toml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"accuracy \d", done.stdout)) == 1 and "2 workers as ranks of" in done.stdout
    assert (tmp_path / "model.safetensors").exists()
