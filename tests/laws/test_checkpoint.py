"""Checkpoints on the disk: what is read is what was saved, and what was not written as a whole is no checkpoint."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import HashStore

import paceline
from paceline import AllReduceSGD, Checkpoints, Cluster, simulate
from paceline.checkpoint import BrokenCheckpoint, Checkpoint, Folder
from paceline.checkpoint.cadence import Cadence
from paceline.checkpoint.files import replacing, write_tensors
from paceline.checkpoint.folder import LOCK, TakenFolder, UnusableCheckpoint
from paceline.checkpoint.manifest import FORMAT, NAME, Manifest, Model
from paceline.checkpoint.part import Part
from paceline.checkpoint.plain import DTYPES, flattened, restored
from paceline.checkpoint.saver import Saver
from paceline.state import resized
from paceline.worker.plan import Plan
from tests.dist import forked
from tests.laws.every import RESUMABLE, Case
from tests.laws.tasks import regression, same

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.sampled_from([torch.ones(3), torch.zeros(0, 2), torch.tensor(1.5, dtype=torch.bfloat16), torch.arange(4)])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


def equal(a: Any, b: Any) -> bool:
    """Whether two values have the same types and the same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and same(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def written(folder: Path, states: list[dict[str, Any]], *, step: int = 3, number: int = 1) -> Path:
    """A checkpoint of these states, written as a run's workers write it."""
    store = Folder(folder)
    folder.mkdir(exist_ok=True)
    path = store.open(step)
    parts = [
        Part(rank, {"state": state, "more": {}, "published": None, "frozen": {}, "trained": [], "buffers": []})
        for rank, state in enumerate(states)
    ]
    files: dict[str, Any] = {}
    for part in parts:
        files |= part.write(path, {} if part is parts[0] else parts[0].places)
    manifest = Manifest(FORMAT, number, "now", "0", "2", "AllReduceSGD", step, len(states), Model())
    replace(manifest, files=files).write(path)
    return path


@given(values)
def test_a_value_comes_back_as_it_was(value: Any):
    tree, tensors = flattened(value)
    assert equal(restored(json.loads(json.dumps(tree)), tensors.__getitem__), value)


def test_numbers_that_are_not_finite_come_back():
    back = restored(flattened([math.inf, -math.inf, math.nan])[0], {}.__getitem__)
    assert back[:2] == [math.inf, -math.inf]
    assert math.isnan(back[2])


def test_what_a_checkpoint_cannot_hold_is_refused_with_its_path():
    with pytest.raises(ValueError, match="cannot hold slots/mine, of type object"):
        flattened({"slots": {"mine": object()}})


def test_the_safetensors_library_reads_the_files(tmp_path: Path):
    tensors = {dtype_name: torch.arange(6).to(dtype) for dtype_name, dtype in DTYPES.items() if "F8" not in dtype_name}
    write_tensors(tmp_path / "t.safetensors", tensors | {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)})
    found = load_file(tmp_path / "t.safetensors")
    assert all(equal(found[name], value) for name, value in tensors.items())
    assert found["empty"].shape == (0, 3)
    assert found["scalar"].item() == 2.5


@pytest.mark.parametrize("case", RESUMABLE.values(), ids=RESUMABLE)
def test_a_state_of_every_method_comes_back_from_the_disk(case: Case, tmp_path: Path):
    states = simulate(regression(steps=9, batch=8), case.strategy, Cluster(workers=3), stop_at=5).states[:3]
    found = Checkpoint(written(tmp_path / "run", states))
    found.verify()
    assert equal(found.states(), states)
    assert equal(found.state(1, 2), resized(states, 2)[1])


def test_equal_tensors_of_several_workers_are_written_once(tmp_path: Path):
    big = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    path = written(tmp_path / "run", [{"p": big}, {"p": big.clone()}, {"p": big + 1}])
    sizes = [(path / f"worker-{rank}.safetensors").stat().st_size for rank in range(3)]
    assert sizes[0] > 40_000 > 1000 > sizes[1]
    assert sizes[2] > 40_000
    assert equal([s["p"] for s in Checkpoint(path).states()], [big, big, big + 1])


@settings(max_examples=60)
@given(data=st.data())
def test_a_changed_or_missing_byte_is_found_wherever_it_is(data: Any, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("run")
    states = [{"w": torch.arange(5.0), "k": 3}, {"w": torch.arange(5.0) + 1, "k": 4}]
    path = written(folder, states)
    name = data.draw(st.sampled_from(sorted(p.name for p in path.iterdir())))
    content = bytearray((path / name).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    (path / name).write_bytes(content)
    try:
        found = Checkpoint(path)
        found.verify()
        loaded = found.states()
    except BrokenCheckpoint as error:
        assert str(folder) in str(error)
    else:  # A byte in the manifest that only describes, or in a header's padding.
        assert equal(loaded, states)


def test_a_broken_checkpoint_is_named_and_the_one_before_it_is_taken(tmp_path: Path):
    first = written(tmp_path, [{"w": torch.ones(3)}], step=5, number=1)
    second = written(tmp_path, [{"w": torch.ones(3) * 2}], step=9, number=2)
    with (second / "worker-0.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    with pytest.warns(UnusableCheckpoint, match=r"step-000000000009.*'state/w' is not what was written.*of step 5"):
        found = Folder(tmp_path).newest_sound()
    assert found is not None
    assert found.path == first
    assert second.exists()
    (first / NAME).write_text("{}")
    with pytest.raises(BrokenCheckpoint, match=r"has another hash|format None"):
        Folder(tmp_path).newest_sound()


def test_a_checkpoint_of_another_format_is_refused_by_its_number(tmp_path: Path):
    path = written(tmp_path, [{"w": torch.ones(3)}])
    found = json.loads((path / NAME).read_text())
    (path / NAME).write_text(json.dumps(found | {"format": 99}))
    with pytest.raises(BrokenCheckpoint, match="written in format 99, and this version of paceline reads format 1"):
        Checkpoint(path)


def test_the_newest_checkpoint_is_the_last_written_not_that_of_the_highest_step(tmp_path: Path):
    """A run that goes back to an earlier step saves lower steps later."""
    written(tmp_path, [{}], step=20, number=4)
    written(tmp_path, [{}], step=12, number=5)
    newest = Folder(tmp_path).newest()
    assert newest is not None
    assert newest.step == 12


def test_old_checkpoints_and_half_written_ones_are_removed(tmp_path: Path):
    paths = [written(tmp_path, [{}], step=k, number=k) for k in (1, 2, 3, 4)]
    (tmp_path / "step-000000000099").mkdir()
    (tmp_path / "mine").mkdir()
    Folder(tmp_path).keep(2, paths[-1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "step-000000000003", "step-000000000004"]


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path):
    target = tmp_path / "f"
    target.write_text("before")
    with pytest.raises(OSError, match="no room"), replacing(target) as file:
        file.write(b"half")
        raise OSError("no room")
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert target.read_text() == "before"


def test_two_jobs_cannot_write_to_one_folder(tmp_path: Path):
    first = Folder(tmp_path)
    first.claim()
    with pytest.raises(ValueError, match=rf"another job writes its checkpoints there.*{os.getpid()}"):
        Folder(tmp_path).claim()
    first.release()
    Folder(tmp_path).claim()


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="checkpoints cannot be written there"):
        Folder(tmp_path / "file").claim()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"every": "soon"}, "every='soon'.*give a time, such as '10min', or a length"),
        ({"every": 0}, "every=0.*must be above 0"),
        ({"every": "0 steps"}, "'0 steps'.*must be above 0"),
        ({"keep": 0}, "keep=0.*at least 1"),
        ({"keep": "two"}, "keep='two'.*keep is an integer or None"),
        ({"also": {"scheduler": 3}}, "'scheduler': int.*state_dict"),
        ({"also": {"scheduler": nn.Linear}}, "'scheduler': type.*state_dict"),
        ({"folder": ""}, "give the name of a folder"),
        ({"folder": 7}, "folder=7"),
    ],
)
def test_wrong_settings_are_refused_with_what_would_be_right(given: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        Checkpoints(**{"folder": "run", **given})


@given(st.integers(1, 30), st.integers(0, 200))
def test_a_length_in_steps_is_due_at_its_multiples(every: int, start: int):
    cadence = Cadence(Checkpoints("run", every=f"{every} steps"), Plan(), store=None, is_first=True, timeout_s=1)
    cadence.start(start)
    due = [k for k in range(start, start + 90) if cadence.is_due(k)]
    assert due == [k for k in range(start + 1, start + 90) if k % every == 0]


@given(st.floats(0.3, 4), st.integers(0, 60))
def test_a_length_in_epochs_is_due_at_the_first_step_after_it(epochs: float, start: int):
    plan = Plan(steps=500, steps_per_epoch=7, samples=70, batch=10)
    cadence = Cadence(Checkpoints("run", every=f"{epochs} epochs"), plan, store=None, is_first=True, timeout_s=1)
    cadence.start(start)
    due = [k for k in range(start, 300) if cadence.is_due(k)]
    marks = {math.ceil(round(epochs * 7 * j, 9)) for j in range(1, 500)}
    assert due == [k for k in range(start + 1, 300) if k in marks]


@given(st.floats(0.001, 0.5), st.floats(0.5, 60))
def test_a_time_is_kept_within_a_tenth_and_the_clock_is_hardly_looked_at(step_s: float, every_s: float):
    clock = [0.0]
    looks = [0]

    def now() -> float:
        looks[0] += 1
        return clock[0]

    cadence = Cadence(Checkpoints("run", every=every_s), Plan(), store=None, is_first=True, timeout_s=1, now=now)
    cadence.start(0)
    due: list[float] = []
    steps = int(10 * every_s / step_s)
    for k in range(steps):
        if cadence.is_due(k):
            due.append(clock[0])
        clock[0] += step_s
    gaps = [b - a for a, b in zip([0.0, *due], due, strict=False)]
    assert all(every_s - 1e-9 <= gap <= 1.1 * every_s + 2 * step_s for gap in gaps)
    assert len(due) >= 10 * every_s // (1.1 * every_s + 2 * step_s) - 1
    assert looks[0] <= 10 * 40 + 40


def test_links_and_names_of_other_folders_are_refused(tmp_path: Path):
    path = written(tmp_path / "run", [{"w": torch.ones(3)}])
    for name in ("worker-0.safetensors", "worker-0.json", NAME):
        (path / name).rename(tmp_path / name)
        (path / name).symlink_to(tmp_path / name)
        with pytest.raises(BrokenCheckpoint, match=f"{name}: it is a link"):
            Checkpoint(path).verify()
        (path / name).unlink()
        (tmp_path / name).rename(path / name)
    found = json.loads((path / NAME).read_text())
    found["files"]["../worker-0.json"] = found["files"].pop("worker-0.json")
    (path / NAME).write_text(json.dumps(found))
    with pytest.raises(BrokenCheckpoint, match=r"names the file '\.\./worker-0.json', which is not in its folder"):
        Checkpoint(path)


def test_a_link_to_another_folder_is_never_emptied(tmp_path: Path):
    other = written(tmp_path / "other", [{}])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-000000000003").symlink_to(other)
    store = Folder(tmp_path / "run")
    store.keep(1, tmp_path / "run")
    assert store.complete() == []
    assert (other / NAME).exists()


def test_a_checkpoint_that_is_given_up_waits_for_no_other_worker(tmp_path: Path):
    saver = Saver(Folder(tmp_path), 1, rank=1, workers=2, store=HashStore(), timeout_s=60)
    begun = time.monotonic()
    saver.save(3, {"state": {}, "more": {}}, lambda number: pytest.fail("the first worker writes it"))
    saver.abandon("the run failed")
    assert time.monotonic() - begun < 30
    assert "rank 0 has not written its part: the run failed" in str(saver.failure())


def test_a_job_whose_folder_was_taken_on_another_host_writes_no_more(tmp_path: Path):
    """A lock may not be seen on other hosts; what is in its file is."""
    store = Folder(tmp_path)
    store.claim()
    saver = Saver(store, 1, rank=0, workers=1, store=None, timeout_s=5)
    (tmp_path / LOCK).write_text(json.dumps({"host": "elsewhere", "process": 7}))
    manifest = Manifest(FORMAT, 0, "now", "0", "2", "AllReduceSGD", 3, 1, Model())
    saver.save(3, {"state": {}, "more": {}}, lambda number: manifest)
    saver.wait()
    assert re.search(r"another job writes its checkpoints there now .*elsewhere", str(saver.failure()))
    assert store.steps() == []
    store.release()
    with pytest.warns(TakenFolder, match="a job on elsewhere .process 7. has not released this folder"):
        Folder(tmp_path).claim()


def test_a_folder_that_is_read_only_is_refused_by_name():
    with pytest.raises(ValueError, match="/proc/mine: checkpoints cannot be written there"):
        Folder("/proc/mine").claim()


def test_a_folder_of_another_user_is_refused_by_name():
    """As a user with no rights there; to root no permission is denied."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)

        def work(rank: int) -> None:
            if os.geteuid() == 0:
                os.setuid(65534)
            Folder(name).claim()

        with tempfile.TemporaryDirectory() as results:
            os.chmod(results, 0o777)
            found = forked.run(1, work, Path(results))[0]
    assert found["error"] == f"ValueError: {name}: checkpoints cannot be written there: Permission denied"


def test_a_disk_that_is_full_at_the_start_is_named_and_the_folder_stays_free(tmp_path: Path):
    """A limit on the size of files stands for the full disk."""

    def work(rank: int) -> bool:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
        with pytest.raises(ValueError, match="checkpoints cannot be written there: File too large"):
            Folder(tmp_path / "run").claim()
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        Folder(tmp_path / "run").claim()
        return True

    assert forked.run(1, work, tmp_path / "results") == [True]


def test_no_clock_on_the_wall_decides_anything():
    """Clocks of the day jump: only the time that a manifest shows is of one."""
    package = Path(paceline.__file__).parent / "checkpoint"
    calls = [line.strip() for path in package.glob("*.py") for line in path.read_text().splitlines() if "time." in line]
    wall = [line for line in calls if re.search(r"\btime\.(time|localtime|gmtime|strftime)|datetime\.", line)]
    assert wall == ['return time.strftime("%Y-%m-%dT%H:%M:%S%z")']


@pytest.mark.parametrize("wrong", ["one of four", "twice the same"])
def test_states_that_are_not_those_of_all_workers_are_not_resized(wrong: str):
    states = simulate(regression(steps=6, batch=8), AllReduceSGD(), Cluster(workers=2), stop_at=3).states
    given = states[:1] if wrong == "one of four" else [states[0], states[0]]
    with pytest.raises(ValueError, match="give the states of all workers of one run, each once"):
        resized(given, 4)
