"""What a person sees of a running training: records, files of metrics, and the progress bar."""

from __future__ import annotations

import io
import json
import math
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from paceline import (
    AllReduceSGD,
    AutoAdjust,
    Cluster,
    Monitor,
    ParameterServer,
    PeriodicAveraging,
    ProgressBar,
    Recorder,
    Statistics,
    Task,
    simulate,
    train,
)
from paceline.monitor import Facts, Record
from paceline.monitor.progress import CLEAR, Above
from tests.laws.tasks import Point, instant, numbers, quadratic, squared_distance

FACTS = Facts("AllReduceSGD()", workers=4, steps=500)


class Kept(Monitor):
    """Keeps what it was told."""

    def __init__(self, every: int | None = 1) -> None:
        self.every = every
        self.records: list[Record] = []
        self.said: list[str] = []

    def begin(self, facts: Facts) -> None:
        self.said.append(f"begin {facts.workers}")

    def show(self, record: Record) -> None:
        self.records.append(record)

    def end(self, *, failed: bool) -> None:
        self.said.append("failed" if failed else "end")

    def steps(self) -> list[Record]:
        return [record for record in self.records if record["kind"] == "step"]


def watched(*, every: int | None = 1, cluster: Cluster | None = None, **settings: Any) -> tuple[Kept, Any]:
    kept = Kept(every)
    strategy = settings.pop("strategy", AllReduceSGD())
    task = quadratic(**{"steps": 6, "batch": 12} | settings)
    return kept, simulate(task, strategy, cluster or Cluster(workers=3), monitor=kept)


def norm(model: Any) -> dict[str, float]:
    return {"norm": model.w.norm().item()}


# Records.


def test_a_record_has_the_loss_the_speed_and_the_share_of_communication_since_the_last_one():
    """Steps of 1, 2 and 4 seconds on an instant network: the first worker waits for 3 seconds of 4."""
    kept, run = watched(cluster=instant(3, compute=[1.0, 2.0, 4.0]), every=2, schedule=lambda step: 0.5**step)
    losses = [[p.loss for p in run.trace.points if p.step == k] for k in range(6)]
    for i, record in enumerate(kept.steps(), start=1):
        assert (record["step"], record["steps"], record["samples"], record["epoch"]) == (2 * i, 6, 24 * i, i / 2)
        assert (record["time"], record["steps_per_s"], record["samples_per_s"]) == (8.0 * i, 0.25, 3.0)
        assert record["communication"] == 0.75 and record["staleness"] is None
        assert record["loss"] == pytest.approx(sum(losses[2 * i - 2] + losses[2 * i - 1]) / 6)
        assert record["lr"] == 0.05 * 0.5 ** (2 * i - 1)
    assert len(kept.steps()) == 3 and kept.said == ["begin 3", "end"]


def test_a_record_of_a_method_with_servers_has_the_staleness_and_no_learning_rate():
    kept, run = watched(strategy=ParameterServer(), every=3)
    updates = [record["staleness"] for record in kept.steps()]
    assert None not in updates and kept.steps()[0]["lr"] is None
    assert min(updates) <= run.trace.mean_staleness() <= max(updates)


def test_the_last_record_is_of_the_end_whatever_the_interval():
    for every in (None, 4):
        kept, _ = watched(every=every)
        assert kept.steps()[-1]["step"] == 6
    kept = Kept(every=5)
    simulate(quadratic(steps=6, batch=4), AllReduceSGD(), Cluster(workers=2), monitor=kept, stop_at=3)
    assert [record["step"] for record in kept.steps()] == [3]


def test_a_resumed_run_counts_from_where_it_stopped():
    task, cluster = quadratic(steps=6, batch=4), Cluster(workers=2)
    states = simulate(task, PeriodicAveraging(period=2), cluster, stop_at=3).states
    kept = Kept()
    simulate(task, PeriodicAveraging(period=2), cluster, resume=states, monitor=kept)
    assert [record["step"] for record in kept.steps()] == [4, 5, 6]
    assert [record["samples"] for record in kept.steps()] == [16, 20, 24]


def test_evaluations_and_decisions_are_records_of_their_own():
    kept, run = watched(evaluate=norm, evaluate_every=2)
    found = [record for record in kept.records if record["kind"] == "evaluation"]
    assert [(e["step"], e["time"], e["values"]) for e in found] == [
        (step, e.time, e.values) for step, e in zip((2, 4, 6), run.trace.evaluations, strict=True)
    ]
    assert [e["seconds"] for e in found] == pytest.approx([found[0]["time"]] * 3)
    kept, run = watched(steps=8, adjust=AutoAdjust())
    found = [record for record in kept.records if record["kind"] == "decision"]
    assert [(d["step"], d["decision"]) for d in found] == [(d.step, d.kind) for d in run.trace.decisions]
    assert found and found[0]["values"]["epoch"] == 1


def test_a_record_comes_at_most_five_times_a_second():
    kept, _ = watched(every=None, steps=20)
    assert len(kept.steps()) < 6


# Monitors in general.


class Refusing(Kept):
    def begin(self, facts: Facts) -> None:
        raise ValueError("not now")


class Failing(Kept):
    def show(self, record: Record) -> None:
        raise OSError("the disk is full")


@pytest.mark.parametrize("driver", ["simulate", "train"])
def test_every_monitor_that_began_ends_once_whatever_happens(driver: str):
    def run(task: Task, *monitors: Monitor) -> None:
        if driver == "simulate":
            simulate(task, AllReduceSGD(), Cluster(workers=2), monitor=monitors)
        else:
            train(task, AllReduceSGD(), 1, monitor=monitors)

    def broken(model: Any, batch: Any) -> Any:
        raise OverflowError("a mistake of my own")

    first, second = Kept(), Kept()
    with pytest.raises(ValueError, match="not now"):
        run(quadratic(steps=2, batch=4), first, Refusing(), second)
    assert (first.said, second.said) == ([*first.said[:1], "failed"], [])
    first, second = Kept(), Failing()
    with pytest.raises(OSError, match="the disk is full"):
        run(quadratic(steps=2, batch=4), first, second)
    assert first.said[1:] == second.said[1:] == ["failed"]
    first = Kept()
    with pytest.raises(Exception, match="a mistake of my own"):
        run(Task(lambda: Point(2), broken, [numbers(8, 2)], 4, torch.optim.SGD, steps=2), first)
    assert first.said[1:] == ["failed"]


def test_a_class_or_something_else_in_place_of_a_monitor_is_refused():
    task = quadratic(steps=2, batch=4)
    with pytest.raises(ValueError, match=r"simulate\(monitor=ProgressBar\): monitor is an instance"):
        simulate(task, AllReduceSGD(), Cluster(workers=2), monitor=ProgressBar)  # pyright: ignore
    with pytest.raises(ValueError, match=r"simulate\(monitor=\[.*'bar'\]\).*item 1 is 'bar'"):
        simulate(task, AllReduceSGD(), Cluster(workers=2), monitor=[Kept(), "bar"])  # pyright: ignore
    with pytest.raises(ValueError, match=r"train\(monitor=3\)"):
        train(task, AllReduceSGD(), 2, monitor=3)  # pyright: ignore


# Files.


def recorded(path: Path, *, steps: int = 4, **settings: Any) -> list[dict[str, Any]]:
    task = quadratic(steps=steps, batch=4, **settings)
    simulate(task, AllReduceSGD(), Cluster(workers=2), monitor=Recorder(path, every=2))
    return read(path)


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_every_line_is_json_and_numbers_that_are_not_finite_are_null(tmp_path: Path):
    def evaluate(model: Any) -> dict[str, float]:
        return {"accuracy": math.nan, "margin": math.inf}

    def exploding(model: Any, batch: Any) -> Any:
        return squared_distance(model, batch) * math.inf

    task = Task(lambda: Point(2), exploding, [numbers(16, 2)], 4, torch.optim.SGD, steps=4, evaluate=evaluate)
    path = tmp_path / "metrics.jsonl"
    with pytest.warns(RuntimeWarning, match="NaN or infinity"):
        simulate(task, AllReduceSGD(), Cluster(workers=2), monitor=Recorder(path, every=2))
    begin, *records, end = read(path)
    assert begin == {
        "kind": "begin", "strategy": repr(AllReduceSGD()), "workers": 2, "steps": 4, "simulated": True
    }  # fmt: skip
    assert [record["kind"] for record in records] == ["step", "step", "evaluation"]
    assert records[0]["loss"] is None and records[2]["values"] == {"accuracy": None, "margin": None}
    assert end["kind"] == "end" and end["failed"] is False and end["step"] == 4


@pytest.mark.parametrize("rest", ["", '{"kind": "end"}', '{"kind": "st', '{"kind": "step", "loss": 0.2', '{"k'])
def test_a_file_goes_on_after_its_last_whole_line(rest: str, tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    before = recorded(path)
    path.write_text(path.read_text() + rest)
    whole = [json.loads(rest)] if rest.endswith("}") else []
    after = recorded(path)
    assert after[: len(before) + len(whole)] == before + whole
    assert [r["kind"] for r in after[len(before) + len(whole) :]] == [r["kind"] for r in before]


def test_files_that_cannot_be_written_are_refused_before_anything_is_trained(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("my notes")
    (tmp_path / "table.json").write_text("[1, 2]\n")

    def never(model: Any, batch: Any) -> Any:
        pytest.fail("a step was taken")

    task = Task(lambda: Point(2), never, [numbers(8, 2)], 4, torch.optim.SGD, steps=2)
    for path, expected in {
        tmp_path: "it is a folder; give the name of a file",
        tmp_path / "none" / "metrics.jsonl": "there is no folder",
        tmp_path / "notes.txt": "the file is there and holds no records; give another name",
        tmp_path / "table.json": "the file is there and holds no records; give another name",
    }.items():
        with pytest.raises(ValueError, match=rf"Recorder\(path='.*'\): {expected}"):
            simulate(task, AllReduceSGD(), Cluster(workers=2), monitor=Recorder(path))
    with pytest.raises(ValueError, match=r"Recorder\(tensorboard='.*notes.txt'\): it cannot be written"):
        simulate(task, AllReduceSGD(), Cluster(workers=2), monitor=Recorder(tensorboard=tmp_path / "notes.txt"))
    with pytest.raises(ValueError, match=r"Statistics\(out='.*'\): it is a folder"):
        train(task, AllReduceSGD(), 2, monitor=Statistics(1, out=tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "my notes"
    assert (tmp_path / "table.json").read_text() == "[1, 2]\n"


def test_a_file_has_one_monitor_at_a_time(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    task = quadratic(steps=2, batch=4)
    with pytest.raises(ValueError, match=r"Recorder\(path='.*'\): another monitor writes to this file"):
        simulate(task, AllReduceSGD(), Cluster(workers=2), monitor=[Recorder(path), Recorder(path)])
    read_end, write_end = os.pipe()
    recorder = Recorder(path)
    recorder.begin(FACTS)
    child = os.fork()
    if not child:  # As those of a DataLoader: it has the file too, and does not close it.
        os.read(read_end, 1)
        os._exit(0)
    try:
        recorder.end(failed=False)
        assert recorded(path)[-1]["kind"] == "end"
    finally:
        os.write(write_end, b"x")
        os.waitpid(child, 0)
        os.close(read_end)
        os.close(write_end)


def test_a_monitor_that_is_given_twice_is_refused():
    kept = Kept()
    with pytest.raises(ValueError, match=r"monitor=\[Kept, ProgressBar, Kept\]: give each only once"):
        simulate(quadratic(steps=2, batch=4), AllReduceSGD(), Cluster(workers=2), monitor=[kept, ProgressBar(), kept])
    assert kept.said == []


def test_a_full_disk_is_an_error_with_the_name_of_the_file_and_no_line_is_cut(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # A disk with so much room for each file.
    try:
        with pytest.raises(OSError, match=r"too large: '.*metrics.jsonl'|No space left on device: '.*metrics.jsonl'"):
            simulate(quadratic(steps=20, batch=4), AllReduceSGD(), Cluster(workers=2), monitor=Recorder(path, every=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    lines = read(path)
    assert [line["kind"] for line in lines] == ["begin", "step", "step", "step"] and path.stat().st_size > 800


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, r"Recorder\(\): give the path of a file"),
        ({"path": "a", "every": 0}, r"Recorder\(every=0\): every counts steps and must be at least 1"),
        ({"path": 3}, r"Recorder\(path=3\): path is text or a Path"),
        ({"path": "a", "every": "often"}, r"Recorder\(every='often'\): every is an integer"),
    ],
)
def test_settings_of_a_recorder_that_make_no_sense_are_refused(settings: dict[str, Any], expected: str):
    with pytest.raises(ValueError, match=expected):
        Recorder(**settings)


def test_tensorboard_reads_the_same_numbers(tmp_path: Path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    path, folder = tmp_path / "metrics.jsonl", tmp_path / "board" / "run"
    task = quadratic(steps=4, batch=4, evaluate=norm)
    monitor = Recorder(path, every=1, tensorboard=folder)
    for _ in range(2):  # A second run has a file of its own.
        simulate(task, AllReduceSGD(), Cluster(workers=2), monitor=monitor)
    events = [
        (value.tag, event.step, value.tensor.float_val[0])
        for file in sorted(folder.iterdir())
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]
    lines = read(path)
    for tag, name in {"training/loss": "loss", "training/communication": "communication", "training/lr": "lr"}.items():
        expected = [(r["step"], pytest.approx(r[name])) for r in lines if r["kind"] == "step"]
        assert [(step, value) for t, step, value in events if t == tag] == expected
    expected = [(r["step"], pytest.approx(r["values"]["norm"])) for r in lines if r["kind"] == "evaluation"]
    assert [(step, value) for t, step, value in events if t == "evaluation/norm"] == expected
    assert len(list(folder.iterdir())) == 2


def test_a_missing_tensorboard_is_named_with_the_command_that_installs_it(tmp_path: Path, monkeypatch: Any):
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monitor = Recorder(tmp_path / "metrics.jsonl", tensorboard=tmp_path / "board")
    with pytest.raises(ValueError, match=r"needs the package tensorboard .*: pip install 'paceline\[tensorboard\]'"):
        simulate(quadratic(steps=2, batch=4), AllReduceSGD(), Cluster(workers=2), monitor=monitor)
    assert not (tmp_path / "board").exists()


# The progress bar.


def step_record(**other: Any) -> Record:
    known = {"kind": "step", "time": 1.0, "step": 120, "epoch": 2.4, "samples": 1200, "steps": 500, "loss": 0.41234}
    rates = {"steps_per_s": 10.0, "samples_per_s": 12345.6, "communication": 0.314, "staleness": 1.25, "lr": 0.1}
    return known | rates | other


EVALUATION: Record = {
    "kind": "evaluation", "time": 1.0, "step": 120, "epoch": 2.0, "seconds": 12.3, "values": {"accuracy": 0.881}
}  # fmt: skip


def line(width: int, record: Record, facts: Facts = FACTS) -> str:
    """The live line in a terminal of that width."""
    bar = ProgressBar()
    bar.begin(facts)
    bar.show(EVALUATION)
    bar.show(step_record(step=record["step"] - 20))
    bar.show(record)
    out = io.StringIO()
    Console(file=out, width=width).print(bar)
    return out.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 81, 100, 160, 300])
def test_the_live_line_is_one_line_in_every_terminal(width: int, capsys: Any):
    text = line(width, step_record())
    assert text.count("\n") == 1 and len(text.rstrip()) <= width and text.startswith("120/500")


def test_the_live_line_says_everything_where_there_is_room_and_the_most_important_things_elsewhere(capsys: Any):
    text = line(160, step_record())
    for part in (
        "epoch 2.4",
        "loss 0.4123",
        "accuracy 88.1%",
        "12,346 samples/s",
        "communication 31%",
        "staleness 1.2",
    ):
        assert f"  {part}  " in text
    assert " left" in text
    assert all(part in line(80, step_record()) for part in (" loss 0.412 ", " accuracy 88.1% ", " comm 31% ", " left"))
    assert "loss 0.412" in line(40, step_record()) and "accuracy" not in line(40, step_record())


def test_a_run_of_unknown_length_shows_its_steps_and_no_time_left(capsys: Any):
    text = line(160, step_record(steps=None, samples_per_s=None), Facts("AllReduceSGD()", workers=1, steps=None))
    assert text.startswith("120 ") and "10 steps/s" in text
    assert "left" not in text and "communication" not in text


def test_where_there_is_no_terminal_lines_are_printed(capsys: Any):
    task = quadratic(steps=6, batch=4, evaluate=norm)
    simulate(task, AllReduceSGD(), Cluster(workers=2), monitor=ProgressBar(lines_s="1h"))
    out = capsys.readouterr().out
    assert "\x1b" not in out and out.startswith("epoch 1: norm ")
    assert (
        "step 6/6, epoch 1.5, loss " in out and "virtual time" in out and out.splitlines()[-1].startswith("6 steps in")
    )


class Stopped(Monitor):
    def show(self, record: Record) -> None:
        raise KeyboardInterrupt


def test_a_terminal_is_as_it_was_after_an_interrupt(capsys: Any, monkeypatch: Any):
    """The cursor was hidden and is shown again, and printing goes where it went before."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    stdout = sys.stdout
    with pytest.raises(KeyboardInterrupt):
        simulate(quadratic(steps=3, batch=4), AllReduceSGD(), Cluster(workers=2), monitor=[ProgressBar(), Stopped()])
    out = capsys.readouterr().out
    assert "\x1b[?25l" in out and out.endswith("\n\x1b[?25h")
    assert sys.stdout is stdout


def test_what_others_print_appears_above_the_live_line(capsys: Any, monkeypatch: Any):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    task = quadratic(steps=6, batch=4, evaluate=norm)
    simulate(task, AllReduceSGD(), Cluster(workers=2), monitor=[ProgressBar(), Statistics(3)])
    written = capsys.readouterr().out
    assert "\nsync 3: " in written.replace("\x1b[2K", "\n") and "epoch 1: norm" in written
    assert written.splitlines()[-1].startswith("\x1b[?25h6 steps in ")


def test_what_a_forked_worker_prints_replaces_the_live_line():
    """Another process draws that line again below."""
    screen = io.StringIO()
    stream: Any = Above(screen)  # pyright: ignore
    print("worker", 1, "warns", file=stream)
    print("and again", file=stream)
    assert screen.getvalue() == f"{CLEAR}worker 1 warns\n{CLEAR}and again\n"
    assert not stream.isatty() and stream.closed is False


def test_a_duration_between_lines_is_above_zero():
    with pytest.raises(ValueError, match=r"ProgressBar\(lines_s=0\): a duration must be above 0"):
        ProgressBar(lines_s=0)
