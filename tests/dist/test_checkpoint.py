"""Checkpoints of real processes: a killed run continues as if nothing had happened."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import paceline as pl
from paceline.checkpoint import Folder
from paceline.errors import ClusterError
from paceline.session.saving import ChangedSettings
from tests.dist import forked

pytestmark = pytest.mark.dist


def model() -> nn.Module:
    """A model with all that a checkpoint easily misses: random numbers, buffers, tied and frozen parameters."""
    made = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 6), nn.Linear(6, 1))
    made[3].weight = made[0].weight
    made[4].bias.requires_grad_(False)
    return made


def task(stop_at: int | None = None, *, epochs: int = 4) -> pl.Task:
    """A task whose first worker kills itself when it computes its gradient number `stop_at`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(70, 6, generator=generator)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(70, 1, generator=generator)
    computed = [0]

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        computed[0] += 1
        if computed[0] == stop_at:
            os.kill(os.getpid(), 9)
        return (model(batch[0]) - batch[1]).square().mean()

    return pl.Task(
        model=model,
        loss=loss,
        data=(x, y),
        batch=10,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        epochs=epochs,
        schedule=lambda step: 1 / (1 + step),
    )


def same_model(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


STRATEGIES = [
    pl.AllReduceSGD(),
    pl.AllReduceSGD(codec=pl.codecs.OneBit(bucket=32)),
    pl.PeriodicAveraging(period=4, delay=2),
    pl.AdaptiveAveraging(period=2, warmup=3, sampling=6),
    pl.DiLoCo(period=5),
    pl.Then(pl.Replicated(), pl.BlockMomentum(period=3), epochs=1),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_a_killed_run_continues_from_its_checkpoint_bit_for_bit(strategy: pl.Strategy, tmp_path: Path):
    whole = pl.train(task(), strategy, 2, ordered=True)
    checkpoint = pl.Checkpoints(tmp_path / "run", every="3 steps")
    with pytest.raises(ClusterError):
        pl.train(task(stop_at=14), strategy, 2, ordered=True, checkpoint=checkpoint)
    at = Folder(tmp_path / "run").newest()
    assert at is not None
    assert 0 < at.step < 14
    rest = pl.train(task(), strategy, 2, ordered=True, checkpoint=checkpoint)
    assert same_model(rest.model, whole.model)
    assert [p.name for p in Folder(tmp_path / "run").steps()][-1] == "step-000000000028"
    assert sum(p.rank == 0 for p in rest.trace.points) == 28 - at.step


def test_another_number_of_workers_continues_by_the_rules_of_the_slots(tmp_path: Path):
    """AllReduceSGD's minibatches are the same for any number of workers, so only rounding differs."""
    given = vars_of(task())
    given["data"] = tuple(t.double() for t in given["data"])
    given["model"] = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    whole = pl.train(pl.Task(**given), pl.AllReduceSGD(), 1)
    folder = pl.Checkpoints(tmp_path, every="1 epoch")
    for workers, epochs in ((3, 1), (2, 2), (1, 4)):
        run = pl.train(pl.Task(**(given | {"epochs": epochs})), pl.AllReduceSGD(), workers, checkpoint=folder)
    assert torch.allclose(run.params, whole.params, rtol=1e-9, atol=1e-12)  # pyright: ignore


def test_a_model_in_stages_continues_bit_for_bit_and_is_exported_as_a_whole(tmp_path: Path):
    """Also with another number of workers; another number of stages is refused by name."""
    strategy = pl.PeriodicAveraging(period=4, delay=2)
    whole = pl.train(staged(), strategy, 2, stages=2, ordered=True)
    saved = pl.Checkpoints(tmp_path / "run", every="3 steps")
    with pytest.raises(ClusterError):
        pl.train(staged(stop_at=30), strategy, 2, stages=2, ordered=True, checkpoint=saved)
    rest = pl.train(staged(), strategy, 2, stages=2, ordered=True, checkpoint=saved)
    assert same_model(rest.model, whole.model)
    newest = Folder(tmp_path / "run").newest()
    assert newest is not None
    exported = newest.model()
    assert list(exported) == list(whole.model.state_dict())
    assert all(torch.equal(exported[name], value) for name, value in whole.model.state_dict().items())
    with pytest.raises(ClusterError, match="a model in 2 stages, and this run has 1: give train\\(stages=2\\)"):
        pl.train(staged(), strategy, 2, checkpoint=saved)
    longer = pl.train(staged(epochs=5), strategy, 1, stages=2, checkpoint=saved)
    assert sum(p.rank == 0 for p in longer.trace.points) == 7


def staged(stop_at: int | None = None, *, epochs: int = 4) -> pl.Task:
    """A task with a model that can be cut, and dropout and momentum in both halves."""

    def net() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 1)
        )

    return pl.Task(**(vars_of(task(stop_at, epochs=epochs)) | {"model": net}))


def vars_of(t: pl.Task) -> dict[str, Any]:
    names = ("model", "loss", "data", "batch", "optimizer", "epochs", "schedule")
    return {name: getattr(t, name) for name in names}


def test_a_finished_run_is_not_trained_again(tmp_path: Path):
    first = pl.train(task(), pl.BlockMomentum(period=3), 2, checkpoint=pl.Checkpoints(tmp_path))
    again = pl.train(task(), pl.BlockMomentum(period=3), 2, checkpoint=pl.Checkpoints(tmp_path))
    assert not again.trace.points
    assert same_model(first.model, again.model)


@pytest.mark.parametrize(
    ("strategy", "given", "said"),
    [
        (pl.Sandblaster(), {}, "messages in flight are in no saved state"),
        (pl.EAWild(group=2), {}, "messages in flight are in no saved state"),
        (pl.ParameterServer(), {"stages": 2}, "the servers of a model in stages cannot be saved"),
        (pl.AllReduceSGD(), {"checkpoint": pl.Checkpoints("x", also={"s": nn.Linear(1, 1)})}, "also"),
    ],
)
def test_what_cannot_be_saved_is_refused(strategy: pl.Strategy, given: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        pl.train(task(), strategy, 2, **{"checkpoint": pl.Checkpoints("x"), **given})


def test_checkpoints_of_another_model_or_method_are_refused_by_name(tmp_path: Path):
    pl.train(task(epochs=1), pl.AllReduceSGD(), 1, checkpoint=pl.Checkpoints(tmp_path))
    with pytest.raises(ClusterError, match=r"saved under AllReduceSGD, and this run uses BlockMomentum"):
        pl.train(task(epochs=1), pl.BlockMomentum(period=2), 1, checkpoint=pl.Checkpoints(tmp_path))
    other = pl.Task(**(vars_of(task(epochs=1)) | {"model": lambda: nn.Linear(6, 1)}))
    with pytest.raises(ClusterError, match=r"of another model: it has the parameter '0.weight' \[6, 6\] float32"):
        pl.train(other, pl.AllReduceSGD(), 1, checkpoint=pl.Checkpoints(tmp_path))
    with pytest.raises(ClusterError, match=r"resume=False\): the folder has checkpoints already"):
        pl.train(task(epochs=1), pl.AllReduceSGD(), 2, checkpoint=pl.Checkpoints(tmp_path, resume=False))


@pytest.mark.filterwarnings("default::paceline.checkpoint.saver.CheckpointFailed")
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """A limit on the size of files stands for the full disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = task(epochs=2)
    inner = full.loss
    steps = [0]

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        steps[0] += 1
        if steps[0] in (8, 13):  # In the forked worker alone.
            for writer in [thread for thread in threading.enumerate() if thread.name == "checkpoint"]:
                writer.join()  # What is being written has the limit that it began with.
            warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr, flush=True)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (600, limit[1]) if steps[0] == 8 else limit)
        return inner(model, batch)

    pl.train(
        pl.Task(**(vars_of(full) | {"loss": loss})),
        pl.AllReduceSGD(),
        1,
        checkpoint=pl.Checkpoints(tmp_path, every="5 steps", keep=None),
    )
    assert [path.name[-2:] for path in Folder(tmp_path).steps()] == ["05", "14"]
    assert re.search(r"the checkpoint of step 10 in .* was not written: .*; training goes on", capfd.readouterr().err)


SCRIPT = """
import os, sys, torch
import paceline as pl
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)  # Threads of a pool do not survive a fork.
folder, kill_at, accumulate, has_generator, out = sys.argv[1:]
kill_at, accumulate = int(kill_at), int(accumulate)
generator = torch.Generator().manual_seed(5)
x = torch.randn(64, 6, generator=generator)
y = x.sum(1, keepdim=True)
own = {"generator": torch.Generator().manual_seed(3)} if has_generator == "yes" else {}
torch.manual_seed(0)
nn = torch.nn
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, **own)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
checkpoint = pl.Checkpoints(folder, every="3 steps", also={"scheduler": scheduler}) if folder != "-" else None
done = 0
method = pl.PeriodicAveraging(period=2, delay=1)
with pl.attach(model, optimizer, method, ordered=True, accumulate=accumulate, checkpoint=checkpoint) as session:
    for epoch in session.epochs(3):
        for i, (a, b) in enumerate(session.shard(loader)):
            (nn.functional.mse_loss(model(a), b) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                session.step()
                optimizer.zero_grad()
                scheduler.step()
            done += 1
            if done == kill_at and session.rank == 0:
                os.kill(os.getpid(), 9)
if session.rank == 0:
    torch.save(model.state_dict(), out)
    print("resumed from", session.resumed)
"""


@pytest.mark.parametrize(("workers", "accumulate", "generator"), [(2, 1, "yes"), (2, 2, "no"), (1, 1, "no")])
def test_a_loop_of_the_users_continues_with_the_next_minibatch(
    workers: int, accumulate: int, generator: str, tmp_path: Path
):
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(folder: str, kill_at: int, out: str) -> Any:
        words = ["run", "-n", str(workers), "script.py", folder, str(kill_at), str(accumulate), generator, out]
        return forked.paceline(*words, folder=tmp_path, timeout_s=100)

    assert run("-", 0, "whole.pt").returncode == 0
    assert run("ckpt", 15, "none.pt").returncode != 0
    rest = run("ckpt", 0, "rest.pt")
    assert rest.returncode == 0, rest.stderr
    assert not (tmp_path / "none.pt").exists()
    assert int(re.search(r"resumed from (\d+)", rest.stdout)[1]) > 0  # pyright: ignore
    whole, again = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "rest.pt"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_session_saves_and_resumes_when_the_user_says_so(tmp_path: Path):
    def trained(steps: int, folder: Path | None = None) -> tuple[nn.Module, bool]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        with pl.attach(net, optimizer, pl.AllReduceSGD()) as session:
            has_resumed = folder is not None and session.resume(folder)
            for _ in range(steps):
                optimizer.zero_grad()
                net(torch.ones(2, 6)).square().mean().backward()
                session.step()
            if folder is not None and not has_resumed:
                session.save(folder, wait=True)
        return net, has_resumed

    whole, _ = trained(5)
    assert not trained(3, tmp_path)[1]
    rest, has_resumed = trained(2, tmp_path)
    assert has_resumed
    assert same_model(whole, rest)


def test_a_refused_checkpoint_leaves_the_session_as_it_was(tmp_path: Path):
    def attached(strategy: pl.Strategy, width: int = 4) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(6, width)
        return net, pl.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), strategy)

    def refused(strategy: pl.Strategy, said: str, width: int = 4) -> None:
        net, session = attached(strategy, width)
        with session:
            before = [p.detach().clone() for p in net.parameters()]
            with pytest.raises(ValueError, match=said):
                session.resume(tmp_path / "run")
            assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))

    net, session = attached(pl.PeriodicAveraging(period=4))
    with session:
        net(torch.ones(2, 6)).sum().backward()
        session.step()
        session.save(tmp_path / "run", wait=True)
    refused(pl.AllReduceSGD(), "saved under PeriodicAveraging, and this run uses AllReduceSGD")
    refused(pl.PeriodicAveraging(period=4, codec=pl.codecs.OneBit()), "has no slot")
    refused(pl.PeriodicAveraging(period=4), "of another model", width=5)
    net, session = attached(pl.PeriodicAveraging(period=8))
    with session, pytest.warns(ChangedSettings, match=r"saved under .*period=4.* and continues under .*period=8"):
        assert session.resume(tmp_path / "run")
    [path] = Folder(tmp_path / "run").complete()
    content = bytearray((path / "worker-0.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "worker-0.safetensors").write_bytes(content)
    refused(pl.PeriodicAveraging(period=4), "is not what was written")


def test_the_exported_model_is_a_plain_state_dict(tmp_path: Path):
    run = pl.train(task(epochs=1), pl.PeriodicAveraging(period=3), 2, checkpoint=pl.Checkpoints(tmp_path / "run"))
    done = forked.paceline("checkpoint", "export", "run", "model.safetensors", folder=tmp_path, timeout_s=60)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "model.safetensors")
    expected = run.model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    shown = forked.paceline("checkpoint", "show", "run", folder=tmp_path, timeout_s=60)
    assert "PeriodicAveraging" in shown.stdout
    (Folder(tmp_path / "run").complete()[0] / "worker-1.safetensors").write_bytes(b"")
    broken = forked.paceline("checkpoint", "verify", "run", folder=tmp_path, timeout_s=60)
    assert broken.returncode == 1
    assert "worker-1.safetensors: it has 0 bytes" in broken.stderr
