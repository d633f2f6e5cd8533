"""Settings files: what they mean, and what is wrong with one, by its path."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from paceline import (
    AllReduceSGD,
    AutoAdjust,
    AutoBatch,
    BlockMomentum,
    Constant,
    GrowingBatch,
    ParameterServer,
    PeriodicAveraging,
    Replicated,
    Scaling,
    Schedule,
    Stragglers,
    Then,
    registry,
    simulate,
)
from paceline.checked import spelled
from paceline.cli import app, main
from paceline.codecs import Entropy, OneBit
from paceline.server.rules import Momentum
from paceline.settings import Recipe, Settings, SettingsError, load
from paceline.settings.first_step import check_first_step
from paceline.settings.header import header
from paceline.settings.optimizers import OPTIMIZERS
from paceline.settings.rate_flags import rate_flags
from paceline.settings.schema import settings_schema
from paceline.settings.sections import ScalingTable
from paceline.settings.template import TEMPLATE
from paceline.strategies import STRATEGIES
from tests.laws.every import STRATEGIES as EVERY

SMALL = """
steps = 6
[model]
name = "perceptron"
hidden = [8]
[data]
name = "digits"
batch = 16
[log]
progress = false
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield


def written(text: str, name: str = "settings.toml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def loaded(*flags: str, text: str = SMALL) -> Settings:
    return load(written(text), flags)


def recipe(*flags: str, workers: int = 2, text: str = SMALL) -> Recipe:
    return Recipe(loaded(*flags, text=text), workers, Path.cwd())


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def refused(*flags: str, text: str = SMALL, workers: int = 2) -> str:
    with pytest.raises(SettingsError) as error:
        made = recipe(*flags, text=text, workers=workers)
        made.task().build()
        made.cluster()
        assert made.strategy
    return str(error.value)


def test_the_file_of_init_trains_and_simulates():
    assert run("init").exit_code == 0
    assert Path("settings.toml").read_text() == TEMPLATE
    done = run("simulate", "settings.toml", "--epochs", "2", "--workers", "3")
    assert done.exit_code == 0, done.output
    assert "accuracy" in done.output and "lr 0.05 for 32 samples" in done.output
    assert Path("model.safetensors").stat().st_size > 4 * 19_210


def test_init_replaces_no_file_unless_forced():
    written("epochs = 1")
    assert run("init").exception is not None and "--force" in str(run("init").exception)
    assert run("init", "--force").exit_code == 0


def test_every_key_can_be_given_as_a_flag():
    given = loaded("--strategy.name", "block-momentum", "--strategy.period=16", "--workers", "8", "--seed=3")
    assert (given.strategy, given.workers, given.seed) == (BlockMomentum(period=16), 8, 3)
    assert loaded("--strategy", "periodic-averaging").strategy == PeriodicAveraging()
    text = SMALL + '[strategy]\nname = "block-momentum"\ntime-constant = 1e5\n'
    assert loaded("--strategy.time_constant", "2e5", text=text).strategy == BlockMomentum(time_constant=2e5)


def test_a_table_in_python_is_the_same_as_in_a_file():
    text = (
        SMALL
        + """
[strategy]
name = "all-reduce-sgd"
codec = { name = "entropy", codec = "one-bit" }
[warm-start]
length = "2 epochs"
[adjust]
interval = 2
[scaling]
momentum = "none"
[schedule]
warmup = "1 epoch"
start = "base"
decay = "multistep"
milestones = ["3 epochs", "5 epochs"]
"""
    )
    made = recipe("--steps", "100", text=text)
    assert made.strategy == Then(Replicated(), AllReduceSGD(codec=Entropy(OneBit())), epochs=2)
    assert made.scaling == Scaling(16, momentum="none")
    task = made.task()
    assert task.adjust == AutoAdjust(interval=2)
    assert repr(task.schedule).count("Length") == 3
    server = SMALL + '[strategy]\nname = "parameter-server"\nservers = 2\nrule = { name = "momentum", lr = 0.05 }\n'
    assert loaded(text=server).strategy == ParameterServer(servers=2, rule=Momentum(lr=0.05))


@pytest.mark.parametrize("name", [name for name, case in EVERY.items() if type(case.strategy) in STRATEGIES])
def test_every_strategy_can_be_written_in_a_file(name: str):
    strategy = EVERY[name].strategy
    text = "strategy = " + toml(plain(strategy)) + "\n" + SMALL
    assert loaded(text=text).strategy == strategy


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {f: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init and f.repr}
        required = {f.name for f in found if f.default is f.default_factory}
        given = {f.name: v for f, v in found.items() if v is not None or f.name in required}
        return {"name": spelled(type(value))} | {k.replace("_", "-"): v for k, v in given.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return '"none"' if value is None else json.dumps(value) if isinstance(value, (str, bool)) else repr(value)


def test_the_minibatch_of_each_worker_grows_with_the_workers():
    assert recipe(workers=4).batch == 64
    assert recipe("--data.batch-of", "all", workers=4).batch == 16
    grown = SMALL.replace("batch = 16", "grow = { start = 4, end = 16, epochs = 2 }")
    assert recipe(text=grown, workers=3).batch == GrowingBatch(12, 48, 2, multiple=3)
    auto = SMALL.replace("batch = 16", "auto = { start = 16, multiple = 8, every = 3 }") + "[scaling]\n"
    assert recipe(text=auto, workers=3).batch == AutoBatch(48, 3 * 1_048_576, every=3, multiple=24)
    assert recipe(text=auto, workers=3).scaling == Scaling(16)


def test_a_rate_for_each_sample_is_that_of_the_minibatch():
    made = recipe("--optimizer.lr-per-sample", "0.0005", "--optimizer.momentum-time-constant", "151.86", workers=4)
    [group] = made.task().optimizer([torch.nn.Parameter(torch.zeros(2))]).param_groups
    assert group["momentum"] == pytest.approx(0.9, abs=1e-5)
    assert group["lr"] == pytest.approx(0.0005 * 16 * 0.1, rel=1e-4)
    assert made.scaling == Scaling(16)


def test_two_stages_of_an_optimizer():
    table = """
[optimizer]
name = "two-stage"
first = { name = "sgd", lr = 0.1 }
second = { name = "adam", lr = 0.001, betas = [0.9, 0.99] }
length = "1 epoch"
"""
    task = recipe(text=SMALL + table).task()
    made = task.optimizer([torch.nn.Parameter(torch.zeros(2))])
    assert type(made).__name__ == "TwoStage"
    assert simulate(task, AllReduceSGD(), recipe(text=SMALL + table).cluster()).params.isfinite().all()


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"two-stage", "muon"}))
def test_every_optimizer_trains_by_name(name: str):
    made = recipe("--optimizer.name", name, "--optimizer.lr", "0.01", "--steps", "1", workers=1)
    assert simulate(made.task(), AllReduceSGD(), made.cluster()).params.isfinite().all()


def test_functions_of_the_user_s_own():
    Path("mine_for_settings.py").write_text(
        "import torch\n"
        "def net(width): return torch.nn.Linear(3, width)\n"
        "def load(count=12): return torch.ones(count, 3), torch.zeros(count, 2)\n"
        "def mean(model, batch, scale=1.0): return model(batch[0]).square().mean() * scale\n"
        "def measure(model, *test): return {'size': float(sum(p.numel() for p in model.parameters()))}\n"
        "def halved(step): return 0.5\n"
    )
    made = recipe(
        *("--model", "mine_for_settings:net", "--model.width", "2", "--data.name", "mine_for_settings:load"),
        *("--data.count", "8", "--loss", "mine_for_settings:mean", "--loss.scale", "0.5"),
        *("--evaluation.function", "mine_for_settings:measure", "--data.batch=2"),
        *("--schedule", "mine_for_settings:halved"),
        text=SMALL.replace("hidden = [8]", ""),
    )
    ended = simulate(made.task(), AllReduceSGD(), made.cluster())
    assert ended.final == {"size": 8.0}
    assert made.task().schedule(0) == 0.5 and header(made, made.task())["schedule"] == "mine_for_settings:halved"


def test_workers_of_a_simulated_cluster_by_their_numbers():
    compute = "{name = 'stragglers', usual = {name = 'constant', each = '2ms'}, slow = {1 = 3.0}}"
    assert recipe("--cluster.compute", compute).cluster().compute == Stragglers(Constant("2ms"), slow={1: 3.0})


USERS = """
import torch
def net(inputs=64, classes=10): return torch.nn.Linear(inputs, classes)
def unmade(): return torch.nn.Linear("a", 2)
def unread(): raise OSError("no such disk")
def lost(model, batch): return model(batch[0]).sum() * float("nan")
def all_of_them(model, batch): return model(batch[0]).sum(1)
def missing(model, batch): return {}["x"]
def three(model, *test): return 3
number = 3
"""
FAILING = [
    (("--model", "users_code:unmade"), "model.name = 'users_code:unmade': the function failed; its error is above", 4),
    (("--data.name", "users_code:unread"), "data.name = 'users_code:unread': the function failed; its error is ab", 5),
    (("--loss", "users_code:missing"), "loss.name = 'users_code:missing' fail on the first minibatch, tensors of", 8),
    (
        ("--model", "users_code:net", "--model.inputs=3"),
        "model.name = 'users_code:net' and loss.name = 'cross-entropy' fail on the first minibatch, tensors of float32 "
        "[16, 64] and int64 [16]: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        None,
    ),
    (("--loss", "users_code:lost"), "the loss of the first minibatch is nan, before anything was trained", None),
    (
        ("--loss", "users_code:all_of_them"),
        "it returned a tensor of shape [16]; it must return a tensor with one",
        None,
    ),
    (("--model", "users_code:number"), "model.name = 'users_code:number': it is of type int, and must be a fu", None),
    (("--model", "users_code:nett"), "has no 'nett'; did you mean 'net'? Known: net, unmade, unread, lost,", None),
]


@pytest.mark.parametrize(("flags", "text", "line"), FAILING, ids=[flags[1] for flags, *_ in FAILING])
def test_what_fails_in_code_of_the_users_is_found_before_training(flags: tuple[str, ...], text: str, line: int | None):
    Path("users_code.py").write_text(USERS)
    with pytest.raises(SettingsError) as error:
        made = recipe(*flags, text=SMALL.replace("hidden = [8]", ""))
        check_first_step(made, made.task())
    assert text in str(error.value)
    assert error.value.report.startswith("Traceback" if line else "")
    assert line is None or f'users_code.py", line {line}' in error.value.report
    assert "src/paceline" not in error.value.report


def test_a_loss_that_is_nan_can_be_trained_on_if_asked_for():
    Path("users_code.py").write_text(USERS)
    made = recipe("--loss", "users_code:lost", "--processes.nonfinite", "pass")
    check_first_step(made, made.task())


def test_an_evaluation_must_be_a_dict_of_numbers():
    Path("users_code.py").write_text(USERS)
    made = recipe("--evaluation.function", "users_code:three")
    with pytest.raises(
        SettingsError, match=r"evaluation\.function = 'users_code:three': it returned 3; it must return"
    ):
        simulate(made.task(), AllReduceSGD(), made.cluster())


def test_a_module_that_ends_the_program_is_named():
    Path("ends_for_settings.py").write_text("import sys\nsys.exit(2)\n")
    with pytest.raises(SettingsError, match="'ends_for_settings' ends the program when it is imported; put what"):
        recipe("--model", "ends_for_settings:f", text=SMALL.replace("hidden = [8]", "")).task()


def test_a_module_that_does_not_import_shows_its_own_traceback():
    Path("broken_for_settings.py").write_text("import math\nx = 1 / 0\n")
    with pytest.raises(SettingsError, match="does not import") as error:
        recipe("--model", "broken_for_settings:f", text=SMALL.replace("hidden = [8]", "")).task()
    assert "line 2" in error.value.report and "ZeroDivisionError" in error.value.report
    assert "paceline" not in error.value.report


WRONG = [
    (("--workres", "3"), "workres: a settings file has no 'workres'; did you mean 'workers'?"),
    (
        ("--strategy.name=block-momentum", "--strategy.peirod=4"),
        "strategy.peirod: BlockMomentum has no 'peirod'; did you mean 'pe",
    ),
    (("--strategy", "asgdd"), "strategy.name: there is no strategy 'asgdd'; did you mean 'asgd'?"),
    (("--strategy.codec", "one-bitt"), "strategy.name is missing"),
    (("--strategy.name=asgd", "--strategy.period=2", "--strategy.samples=8"), "strategy: ASGD(period=2, samples=8)"),
    (
        ("--strategy.name=periodic-averaging", "--strategy.period=2", "--strategy.samples=8"),
        "give the period in steps or in samples",
    ),
    (("--epochs", "2"), "epochs = 2, steps = 6: give one of the two"),
    (("--data.auto.start", "64"), "data.batch and data.auto is given: give one of them"),
    (("--workers", "two"), "workers = 'two': workers is an integer"),
    (("--data.batch-of", "all2"), "data.batch-of = 'all2': 'all2' is not one of 'worker', 'all'"),
    (("--evaluation.metrics", "['acc']"), "evaluation.metrics = ['acc']: 'acc' is not one of 'accuracy', 'loss'"),
    (("--model.name", "perceptrn"), "there is no model of that name; did you mean 'perceptron'?"),
    (("--model.hiden", "3"), "model.hiden: perceptron has no 'hiden'; did you mean 'hidden'?"),
    (("--data.name", "fashion"), "there is no data set of that name; did you mean 'fashion-mnist'?"),
    (("--optimizer.name", "sdg"), "there is no optimizer of that name; did you mean 'sgd'?"),
    (("--optimizer.momentun", "0.9"), "optimizer.momentun: SGD has no 'momentun'; did you mean 'momentum'?"),
    (("--optimizer.lr", "-1"), "optimizer: Invalid learning rate: -1"),
    (
        ("--optimizer.lr=1", "--optimizer.lr-per-sample=1"),
        "optimizer.lr-per-sample = 1 and optimizer.lr = 1: each",
    ),
    (("--schedule.warmup", "5"), "write a number and a unit, steps, samples or epochs"),
    (
        ("--schedule.warmup=1 step", "--schedule.start=base"),
        "the warm-up would change nothing; add [scaling], or give a",
    ),
    (("--schedule.power", "2"), "power has no effect without decay='polynomial'"),
    (("--evaluation.every", "2 weeks"), "evaluation.every='2 weeks': write a number and a unit"),
    (("--adjust.interval", "0"), "adjust: AutoAdjust(interval=0"),
    (("--cluster.bandwidth", "fast"), "cluster: Cluster(bandwidth='fast'): 'fast' is not a bandwidth"),
    (("--model", "no_such_module:f"), "there is no module 'no_such_module'"),
    (("--model", "json:nothing"), "model.name: the module 'json' has no 'nothing'"),
    (("--warm-start.length", "2 steps", "--warm-start.strategy", "parameter-server"), "warm-start: Then("),
    (("--adjust", "true"), "adjust = True: it is a table, as in [adjust], with the keys interval, load-best"),
    (("--warm-start", "1 epoch"), "warm-start = '1 epoch': it is a table, as in [warm-start], with the keys length"),
    (("--adjust.interval", "1"), "adjust.interval = 1: the run has 0.134 epochs, so nothing would be checked"),
    (("--data.batch", "1.5"), "data.batch = 1.5: batch is an integer"),
    (("--evaluation.function=json:loads", "--evaluation.batch=9"), "the function reads the test data and returns the"),
    (("--evaluation.function=json:loads", "--evaluation.metrics=['loss']"), "evaluation.metrics with evaluation.func"),
    (("--evaluation.batch", "0"), "evaluation: batch = 0: a minibatch of test data needs at least 1 sample"),
    (
        ("--strategy", "parameter-server", "--optimizer.lr", "1"),
        "[optimizer] under strategy.name = 'parameter-server', which takes the steps by settings of its own",
    ),
    (
        ("--strategy", "one-bit-adam", "--optimizer.name", "adamw", "--optimizer.clip-norm", "1"),
        "optimizer.clip-norm under strategy.name = 'one-bit-adam', which takes the steps itself",
    ),
    (("--cluster.links", "3"), "cluster.links: [cluster] has no 'links'. Known: compute, bandwidth"),
    (("--cluster.compute", "{name='stragglers', slow={a=2.0}}"), "cluster.compute.slow.a: its keys are numbers"),
    (("--schedule", "cosine"), "schedule = 'cosine': give a function of your own, as 'module:function'"),
    (("--optimizer.clip-value", "0"), "optimizer.clip-value = 0: it limits gradients and must be positive"),
    (
        ("--optimizer.lr-per-sample", "0.1", "--scaling.rate", "sqrt"),
        "optimizer.lr-per-sample = 0.1 and scaling.rate = 'sqrt': what belongs to a sample follows the size of a step",
    ),
    (
        ("--optimizer.name", "adam", "--optimizer.momentum-time-constant", "99"),
        "optimizer.momentum-time-constant = 99: Adam has no momentum",
    ),
    (
        ("--schedule.decay", "multistep", "--schedule.milestones", "['1 step']", "--schedule.factor", "[0.5, 0.1]"),
        "schedule: Schedule(factor=[0.5, 0.1], milestones=['1 step']): give one factor, or one for each milestone",
    ),
    (("--scaling.base", "0"), "scaling: Scaling(base=0)"),
    (("--workers", "--seed", "3"), "--workers: its value is missing; give --workers VALUE"),
    (("--lr", "0.1"), "lr: a settings file has no 'lr'; did you mean optimizer.lr or strategy.lr?"),
    (("--batch", "64"), "batch: a settings file has no 'batch'; did you mean data.batch or evaluation.batch?"),
    (("--cluster.workers", "4"), "cluster.workers: [cluster] has no 'workers'; 'workers' stands above the first table"),
    (("--optimizer.schedule", "x"), "optimizer.schedule: SGD has no 'schedule'; [schedule] is a table of its own."),
    (
        ("--strategy.name=parameter-server", "--strategy.period=8"),
        "strategy.period: ParameterServer has no 'period'; other strategies have it, and --strategy NAME replaces",
    ),
    (
        ("--strategy.name=gossip", "--strategy.codec=one-bit"),
        "strategy.codec = 'one-bit': Gossip takes no codec: what one model loses the other must get",
    ),
    (("--optimizer.lr", "fast"), "optimizer.lr = 'fast': lr is a number"),
    (("--optimizer.lr", "nan"), "optimizer.lr = nan: it must be finite"),
    (("--optimizer.momentum", "1.5"), "optimizer.momentum = 1.5: momentum lies in [0, 1)"),
    (("--optimizer.nesterov", "yes"), "optimizer.nesterov = 'yes': nesterov is true or false"),
    (("--schedule.decay=polynomial", "--schedule.power=nan"), "schedule.power = nan: it is not a number"),
    (("--steps=none", "--epochs=inf"), "epochs = inf: it must be finite and at least 0"),
    (("--steps", "-1"), "steps = -1: it must be finite and at least 0"),
    (("--steps", "none"), "neither epochs nor steps is given: give one of the two"),
    (("--data.folder", "x"), "data.folder: digits has no 'folder'. Known: none"),
    (("--data.name=fashion-mnist", "--data.folder=none/such"), "or give the folder with the data set's four files, da"),
    (("--log.statistics", "-3"), "log: statistics = -3: it counts syncs, from 1; 0: no statistics"),
    (("--log.progress", "yes"), "log.progress = 'yes': progress is true or false"),
    (("--evaluation.every", "0 epochs"), "evaluation: every = '0 epochs': it must be above 0"),
    (("--evaluation.metrics", "[]"), "evaluation: metrics = []: give at least one of 'accuracy' and 'loss'"),
    (("--evaluation.metrics", "loss"), "evaluation.metrics = 'loss': metrics is a list of 'accuracy' and 'loss'"),
    (("--processes.timeout", "soon"), "processes: 'soon' is not a duration"),
    (("--processes.replacements", "-1"), "processes: replacements = -1: it counts workers, from 0"),
    (("--warm-start.length", "1 epoch"), "warm-start.length = '1 epoch': these are 45 steps, and the whole run has"),
    (("--cluster.compute", "{name='log-normal', sigma='a'}"), "cluster.compute: LogNormal(sigma='a'): sigma is a nu"),
    (
        ("--strategy", "parameter-server", "--scaling.rate", "linear"),
        "scaling.momentum = 'time-constant' under strategy.name = 'parameter-server', which takes the steps itself",
    ),
]


@pytest.mark.parametrize(("flags", "text"), WRONG, ids=[" ".join(flags) for flags, _ in WRONG])
def test_what_is_wrong_is_named_by_its_path(flags: tuple[str, ...], text: str):
    assert text in refused(*flags)


def test_minibatches_of_automatic_size_need_rates_that_follow_it():
    auto = SMALL.replace("batch = 16", "auto = { start = 16, multiple = 8 }")
    assert "data.auto without [scaling]: a larger minibatch would change what optimizer.lr means" in refused(text=auto)


def test_none_leaves_a_table_out():
    text = SMALL + "[optimizer]\nlr = 1.0\n[scaling]\nmomentum = 'time-constant'\n"
    made = loaded("--optimizer", "none", "--scaling.momentum", "none", text=text)
    assert (made.optimizer.arguments, made.scaling) == ({}, ScalingTable(momentum="none"))
    assert loaded("--scaling", "none", "--steps", "none", text=text).scaling is None


def test_none_leaves_a_length_out():
    text = SMALL + "[schedule]\nwarmup = '1 epoch'\ndecay = 'cosine'\n[evaluation]\nevery = '2 epochs'\n"
    made = loaded("--schedule.warmup", "none", "--evaluation.every", "none", text=text)
    assert (made.schedule, made.evaluation.every) == (Schedule(decay="cosine"), None)


def test_no_epochs_and_no_steps_train_nothing():
    for flags in (("--steps", "0"), ("--steps", "none", "--epochs", "0")):
        made = recipe(*flags)
        run = simulate(made.task(), AllReduceSGD(), made.cluster())
        assert torch.equal(run.params, torch.nn.utils.parameters_to_vector(made.task().build().parameters()))


def test_a_rate_for_each_part_of_the_run():
    flags = ("--schedule.decay", "multistep", "--schedule.milestones", "['2 steps', '4 steps']")
    task = recipe(*flags, "--schedule.factor", "[0.5, 0.2]").task()
    assert task.schedule is not None
    factors = [task.schedule.at(task.position(step, task.timetable())) for step in range(6)]
    assert factors == [1.0, 1.0, 0.5, 0.5, 0.1, 0.1]


@pytest.mark.parametrize("name", ["sgd", "lars", "two-stage"])
def test_gradients_are_limited_before_the_step(name: str):
    stages = ["--optimizer.first", "{name='sgd', lr=1.0}", "--optimizer.second", "sgd", "--optimizer.length", "1 step"]
    more = stages if name == "two-stage" else ["--optimizer.lr", "1.0"]
    table = {"clip-value": [0.25, -0.25, 0.0, 0.125], "clip-norm": [0.5 / 5**0.5, -1 / 5**0.5, 0.0, 0.125]}
    for key, clipped in table.items():
        limit = "0.25" if key == "clip-value" else "0.5"
        made = recipe("--optimizer.name", name, f"--optimizer.{key}", limit, *more)
        matrix, bias = (torch.nn.Parameter(torch.zeros(size)) for size in ((1, 3), (1,)))
        optimizer = made.task().optimizer([matrix, bias])
        matrix.grad, bias.grad = torch.tensor([[1.0, -2.0, 0.0]]), torch.tensor([0.125])
        optimizer.step()
        assert torch.allclose(torch.cat([matrix[0], bias]), -torch.tensor(clipped))


def test_momentum_of_two_stages_cannot_follow_the_size_of_a_step():
    table = "[optimizer]\nname = 'two-stage'\nsecond = 'adam'\nlength = '2 steps'\n[optimizer.first]\nname = 'sgd'\n"
    made = recipe("--scaling.rate", "linear", text=SMALL + table)
    with pytest.raises(ValueError, match=r"two stages: second\.betas does not follow .* Scaling\(momentum='none'\)"):
        header(made, made.task())
    made = recipe("--scaling.momentum", "none", text=SMALL + table)
    assert header(made, made.task())["optimizer"].startswith("TwoStage: lr 0.001 for 16 samples -> 0.002")


def test_class_labels_have_no_squared_error():
    made = recipe("--loss", "squared-error")
    with pytest.raises(ValueError, match=r"the model gives \[16, 10\] for targets of \[16\]"):
        simulate(made.task(), AllReduceSGD(), made.cluster())


def shown(*flags: str, workers: int = 2) -> dict[str, str]:
    made = recipe(*flags, workers=workers)
    return header(made, made.task())


def test_the_header_shows_what_a_step_will_be():
    scaled = ("--scaling.rate", "linear", "--optimizer.lr", "0.1")
    assert shown(*scaled)["optimizer"] == "SGD: lr 0.1 for 16 samples -> 0.2 for a step of 32"
    assert shown(*scaled, "--warm-start.length", "1 step")["optimizer"] == shown(*scaled)["optimizer"]
    assert "betas 0.9 and 0.999 -> 0.81 and 0.998" in shown(*scaled, "--optimizer.name", "adam")["optimizer"]
    assert shown("--data.batch", "1000")["minibatch"] == (
        "1,437 samples a step, 718.5 of each worker: the data has no more, and 2,000 were asked for"
    )
    server = shown("--strategy", "parameter-server", "--scaling.momentum", "none", "--scaling.base", "8")
    assert server["optimizer"] == "none; the strategy takes the steps, by its own rates, times 2 for the size of a step"


SIZES = {
    "all-reduce-sgd": (64, 4),
    "one-bit-adam": (64, 4),
    "replicated": (64, 4),
    "periodic-averaging": (16, 4),
    "adaptive-averaging": (16, 4),
    "block-momentum": (16, 1),
    "slow-mo": (16, 2),
    "di-lo-co": (16, 4 / 7),
    "gossip": (16, 4),
    "asgd": (16, 1),
    "hogwild": (16, 1),
    "easgd": (16, 1),
}
"""With 4 workers of 16 samples: the samples of a step, which set the momentum, and the factor on the rate."""


@pytest.mark.parametrize("name", SIZES)
def test_scaling_knows_what_stands_behind_a_step(name: str):
    made = recipe("--strategy", name, "--scaling.momentum", "none", "--optimizer.name", "adamw", workers=4)
    method = made.main
    gain = Scaling(16, momentum="none").gain(method.samples_of_rate(64, 4))
    assert (method.samples_of_step(64, 4), pytest.approx(gain)) == SIZES[name]


def test_the_header_says_how_the_model_is_evaluated():
    assert shown("--evaluation.every", "2 epochs")["evaluation"] == "accuracy and loss on 360 samples, every 2 epochs"
    Path("untested_for_settings.py").write_text(
        "import torch\n"
        "def load(): return torch.ones(64, 64), torch.zeros(64, dtype=torch.int64)\n"
        "def numbers(): return (torch.ones(64, 64), torch.zeros(64, 10)) * 2\n"
    )
    assert shown("--data.name=untested_for_settings:load")["evaluation"] == "none: the data have no test part"
    assert shown("--data.name=untested_for_settings:numbers")["evaluation"] == "loss on 64 samples, every epoch"


@pytest.mark.parametrize(
    "batch", ["auto = {start = 16, multiple = 8, trial = 0.5}", "grow = {start = 4, end = 16, epochs = 2}"]
)
def test_evaluations_follow_minibatches_that_grow(batch: str):
    text = SMALL.replace("batch = 16", batch).replace("steps = 6", "epochs = 3") + "[scaling]\n"
    made = recipe("--evaluation.every", "1 epoch", text=text)
    run = simulate(made.task(), AllReduceSGD(), made.cluster())
    assert [e.samples for e in run.trace.evaluations] == [1437, 2 * 1437, 3 * 1437]


def test_fewer_samples_than_workers():
    assert "has 1437 samples for workers = 2000: every worker needs at least one" in refused(workers=2000)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "settings.toml: it is empty; `paceline init` writes"),
        (b"epochs = 1\n# \xff", "settings.toml: line 2 is not UTF-8 text (byte 13)"),
        (b"epochs = = 1", "settings.toml: it is not TOML: "),
        (b"[optimizer]\nname = sgd", "Invalid value (at line 2, column 8): name = sgd; text stands in quotes"),
        ("epochs = 1".encode("utf-16"), "line 1 is not UTF-8 text (byte 0); save the file as UTF-8"),
        (b"epochs = 1", "settings.toml: [model] is missing"),
        (b"model = 3", "settings.toml: model = 3: it is a table, as in [model], or a name"),
    ],
)
def test_a_file_that_cannot_be_read(content: bytes, text: str):
    Path("settings.toml").write_bytes(content)
    with pytest.raises(SettingsError) as error:
        load("settings.toml")
    assert text in str(error.value)


def test_a_file_that_is_not_there_or_a_folder():
    with pytest.raises(SettingsError, match=r"there is no such file; `paceline init nope\.toml`"):
        load("nope.toml")
    Path("folder").mkdir()
    with pytest.raises(SettingsError, match="folder: it is a folder; give a settings file"):
        load("folder")


def test_a_file_of_an_editor_on_windows_is_read():
    Path("settings.toml").write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())
    assert load("settings.toml").steps == 6


def test_flags_may_stand_before_the_file():
    written(SMALL)
    done = run("simulate", "--workers", "3", "settings.toml", "--steps=2")
    assert done.exit_code == 0 and "48 samples a step" in done.output, done.output
    alone = run("simulate", "--workers", "3")
    assert "--workers 3: there is no settings file among these words" in str(alone.exception)


def test_none_leaves_out_an_argument():
    text = SMALL + "[optimizer]\nlr = 0.1\n"
    made = loaded("--optimizer.lr", "none", "--optimizer.lr-per-sample", "0.001", "--model.hidden", "none", text=text)
    assert (made.optimizer.arguments, made.optimizer.lr_per_sample, made.model.arguments) == ({}, 0.001, {})


def test_the_header_says_that_a_warm_up_does_not_end():
    assert shown("--schedule.warmup", "1 epoch")["schedule"].endswith("the warm-up lasts to the end of this run")
    assert shown("--schedule.warmup", "5 steps")["schedule"] == "Schedule(warmup='5 steps')"


def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command that fails writes to standard error."""
    monkeypatch.setattr("sys.argv", ["paceline", *words])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 1
    return capsys.readouterr().err


def test_an_error_in_training_is_one_line_below_the_traceback_of_the_users_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    Path("late_for_settings.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    seen = 0\n"
        "    def forward(self, x):\n"
        "        self.seen += 1\n"
        "        if self.seen > 2: raise LookupError('a mistake of my own')\n"
        "        return super().forward(x)\n"
        "def net(): return Net(64, 10)\n"
    )
    written(SMALL.replace("perceptron", "late_for_settings:net").replace("hidden = [8]", ""))
    said = ended(monkeypatch, capsys, "simulate", "settings.toml")
    assert said.startswith("Traceback") and said.count("\n  File ") == 1 and 'late_for_settings.py", line 6' in said
    assert said.endswith("\npaceline: LookupError: a mistake of my own\n")
    assert ended(monkeypatch, capsys, "simulate", "settings.toml", "--workers=0").count("\n") == 1


def test_numbers_that_are_not_finite_end_a_run_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The loss is finite, and its gradient is not."""
    Path("root_for_settings.py").write_text("def root(model, batch): return (model(batch[0]) * 0).sum().sqrt()\n")
    written(SMALL.replace("[data]", '[loss]\nname = "root_for_settings:root"\n[data]'))
    said = ended(monkeypatch, capsys, "simulate", "settings.toml", "--processes.nonfinite", "stop")
    assert said.startswith("paceline: rank 0 has NaN or infinity in the gradient of") and said.count("\n") == 1


@pytest.mark.filterwarnings("ignore:rank 0 has NaN")
def test_a_run_that_diverges_after_its_first_step_ends_in_an_error_and_writes_no_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    written(SMALL)
    said = ended(monkeypatch, capsys, "simulate", "settings.toml", "--optimizer.lr", "1e30", "--save.model", "bad.st")
    assert "paceline: training has diverged: " in said and "bad.st was not written" in said
    assert not Path("bad.st").exists()


def test_a_file_that_cannot_be_written_is_refused_before_training():
    written(SMALL)
    for key in ("save.model", "save.trace", "log.metrics"):
        done = run("train", "settings.toml", f"--{key}", "/no/such/folder/file")
        assert f"{key} = '/no/such/folder/file': there is no folder" in str(done.exception)


def test_the_schema_accepts_the_template_and_knows_every_strategy():
    schema = settings_schema()
    assert json.loads(run("schema").output) == schema
    assert conforms(tomllib.loads(TEMPLATE), schema, schema)
    assert {option["properties"]["name"]["const"] for option in schema["$defs"]["strategy"]["anyOf"][1:]} == {
        spelled(cls) for cls in STRATEGIES
    }
    for also in ({"model": "mine:net"}, {"loss": {"name": "mine:f", "scale": 2.0}}, {"strategy": "asgd"}):
        assert conforms(tomllib.loads(TEMPLATE) | also, schema, schema)
    for wrong in ({"workers": "two"}, {"strategy": {"name": "block-momentum", "peirod": 3}}, {"nothing": 1}):
        assert not conforms(tomllib.loads(TEMPLATE) | wrong, schema, schema)


def conforms(value: Any, schema: Any, root: Any) -> bool:
    """A check of the parts of JSON schema that ours uses."""
    if "$ref" in schema:
        return conforms(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(conforms(value, option, root) for option in schema["anyOf"])
    if "const" in schema:
        return value == schema["const"]
    if "enum" in schema:
        return value in schema["enum"]
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
    }
    kind = schema.get("type")
    if kind is None:
        return True
    if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return False
    if kind == "array":
        return all(conforms(item, schema.get("items", {}), root) for item in value)
    if kind != "object":
        return True
    known = schema.get("properties", {})
    return (
        all(name in value for name in schema.get("required", []))
        and (schema.get("additionalProperties", True) or set(value) <= set(known))
        and all(conforms(v, known[name], root) for name, v in value.items() if name in known)
    )


def test_registry_and_files_spell_alike():
    assert (
        registry.strategy("block-momentum", period=4)
        == loaded("--strategy.name", "block-momentum", "--strategy.period", "4").strategy
    )


def test_tune_finds_a_rate_and_says_how_to_train_with_it():
    written(SMALL.replace("steps = 6", "epochs = 1") + "[optimizer]\nlr = 0.1\n")
    flags = ["--rates", "0.001,0.1", "--budget", "8 steps", "--part", "0.5", "--results", "trials.jsonl"]
    done = run("tune", "settings.toml", *flags, "--workers", "2")
    assert done.exit_code == 0, done.output
    assert "Train with it:  paceline train settings.toml --workers 2 --optimizer.lr 0.1" in done.output
    assert len(Path("trials.jsonl").read_text().splitlines()) >= 4
    assert "give a number of rates, or rates with commas" in str(run("tune", "settings.toml", "--rates", "x").exception)


RATES: dict[str, tuple[list[str], str, list[float]]] = {
    "parameter-server": ([], "strategy.rule.lr", [0.1]),
    "soft-sync": (["--strategy.lr", "0.3"], "strategy.lr", [0.3]),
    "downpour": (["--strategy.rule", "{name='scaled', rule='sgd'}"], "strategy.rule.rule.lr", [0.1, 0.01]),
    "then": (
        ["--strategy.first=replicated", "--strategy.then", "{name='parameter-server', rule='momentum'}"],
        "strategy.then.rule.lr",
        [0.1],
    ),
}


@pytest.mark.parametrize("name", RATES)
def test_the_flags_of_a_rate_reach_the_rule_that_takes_the_steps(name: str):
    more, key, rates = RATES[name]
    given = ["--strategy.name", name, *more, *(["--strategy.steps=2"] if name == "then" else [])]
    flags = rate_flags(recipe(*given), 0.5)
    assert flags is not None and f"--{key}" in flags
    found = repr(recipe(*given, *flags).strategy)
    assert all(f"lr={rate / 2:g}" in found for rate in rates), found


def test_the_flags_of_a_rate_reach_both_stages_of_an_optimizer_and_what_no_flag_reaches_has_none():
    stages = ("--optimizer.first", "{name='sgd', lr=0.2}", "--optimizer.second", "adam", "--optimizer.length=2 steps")
    given = ("--optimizer.name=two-stage", *stages)
    assert rate_flags(recipe(*given), 0.5) == ["--optimizer.first.lr", "0.1", "--optimizer.second.lr", "0.0005"]
    assert rate_flags(recipe("--optimizer.lr-per-sample=0.1"), 0.5) == ["--optimizer.lr-per-sample", "0.05"]
    Path("fixed_for_settings.py").write_text(
        "import torch\ndef sgd(parameters): return torch.optim.SGD(parameters, lr=0.1)\n"
    )
    assert rate_flags(recipe("--optimizer.name=fixed_for_settings:sgd"), 0.5) is None


def test_a_run_writes_the_metrics_and_statistics_that_the_file_asks_for():
    written(SMALL)
    done = run("simulate", "settings.toml", "--workers=2", "--log.metrics=m.jsonl", "--log.statistics=2")
    assert done.exit_code == 0, done.output
    kinds = [json.loads(line)["kind"] for line in Path("m.jsonl").read_text().splitlines()]
    assert kinds[0] == "begin" and kinds[-1] == "end" and "evaluation" in kinds
    assert done.output.count("worker 1:") == 4  # After 2, 4 and 6 syncs, and of all.
    refused_path = run("simulate", "settings.toml", "--log.metrics", "/no/such/folder/m.jsonl")
    assert "/no/such/folder" in str(refused_path.exception)
