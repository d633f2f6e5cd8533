"""train: a task by a strategy on real processes.

Under a launcher this process is one of the workers; otherwise the workers are forked here.  Forked workers need nothing
pickled, so tasks may be made of lambdas; they compute with one thread each.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.dist.backward import BucketHooks, Each
from paceline.dist.job import Job, under_launcher
from paceline.dist.same_model import check_same_model, everything
from paceline.endpoint import Endpoint
from paceline.errors import ClusterError
from paceline.flat import FlatModel
from paceline.learner import TaskLearner
from paceline.op import Op, drive
from paceline.replica import NonFinite, Replica
from paceline.run import Run
from paceline.strategy import Strategy
from paceline.task import Task, Trainee
from paceline.trace import Trace

T = TypeVar("T")


class ProcessLearner(TaskLearner):
    """Computes this process's gradients, when they are waited for, and hands out buckets while it does."""

    def __init__(self, trainee: Trainee, endpoint: Endpoint) -> None:
        super().__init__(trainee)
        self.endpoint = endpoint
        self._each: Each | None = None
        self._hooks = BucketHooks(trainee.flat, lambda: self._each, lambda: None)

    def gradient(self, replica: Replica, each: Each | None) -> Op[Tensor]:
        return Computed("gradient", lambda: self._gradient(replica, each))

    def _gradient(self, replica: Replica, each: Each | None) -> Tensor:
        flat = self.flat
        if self._backward(replica, each):
            if each is None:
                flat.collect_all()
                if not replica.counts(flat.first_bad):
                    flat.grads.zero_()
        else:
            flat.hand_out_nothing(each)
        return flat.grads

    def local_step(self, replica: Replica) -> Op[None]:
        return Computed("local step", lambda: self._local_step(replica))

    def _local_step(self, replica: Replica) -> None:
        if self._backward(replica, None) and replica.counts(self.flat.first_bad_grad):
            self.trainee.optimizer.step()

    def _backward(self, replica: Replica, each: Each | None) -> bool:
        """Compute the next minibatch's gradient, handing its buckets to `each`; whether there was one."""
        batch = self.trainee.draw(replica.k)
        replica.begin(0 if batch is None else len(batch[0]))
        if batch is None:
            return False
        start = self.endpoint.now()
        self._each = None
        self.trainee.backward(batch, lambda: setattr(self, "_each", each))
        now = self.endpoint.now()
        self.endpoint.trace.span(replica.rank, "gradient", start, now)
        self.endpoint.trace.point(now, replica.rank, replica.k, len(batch[0]), self.trainee.loss)
        return True


class Computed(Op[T]):
    """Work that is done when it is waited for."""

    __slots__ = ("_work",)

    def __init__(self, kind: str, work: Callable[[], T]) -> None:
        super().__init__(kind)
        self._work = work

    def wait(self) -> T:
        return self._work()


@dataclass(frozen=True)
class Terms:
    """How a task is trained, on every rank alike."""

    task: Task
    strategy: Strategy
    nonfinite: NonFinite
    ordered: bool
    timeout_s: float


def train(
    task: Task,
    strategy: Strategy,
    workers: int | None = None,
    *,
    nonfinite: NonFinite = "skip",
    ordered: bool = False,
    timeout_s: float = 1800.0,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Train `task` by `strategy`: as this rank of a launched job, or on `workers` forked processes of one thread each."""
    terms = Terms(task, strategy, nonfinite, ordered, timeout_s)
    if under_launcher():
        if workers is not None and workers != int(os.environ.get("WORLD_SIZE", workers)):
            raise ValueError(f"train(workers={workers}) under a launcher that started {os.environ['WORLD_SIZE']}: leave `workers` out")
        return _work(terms, progress)
    if workers is None or workers < 1:
        raise ValueError(
            f"train(workers={workers}): say how many processes to start, at least 1, or start them by paceline run or torchrun"
        )
    return _fork(terms, workers, progress)


def _work(
    terms: Terms,
    progress: Callable[[int], None] | None,
    store: dist.Store | None = None,
    rank: int | None = None,
    workers: int | None = None,
) -> Run:
    """This process's part, from joining the others to the end."""
    task, strategy = terms.task, terms.strategy
    model = task.build()
    device = next(model.parameters()).device
    if store is not None and device.type != "cpu":
        raise ValueError(
            f"train() forks its workers, which cannot share {device}: start a script by paceline run or torchrun for models there"
        )
    with Job(strategy, device=device, store=store, rank=rank, workers=workers, ordered=terms.ordered, timeout_s=terms.timeout_s) as job:
        trainee = Trainee(task, model, job.rank, job.workers)
        if job.workers > 1:
            check_same_model(job.endpoint, trainee.flat, job.store)
        replica = Replica(job.endpoint, ProcessLearner(trainee, job.endpoint), nonfinite=terms.nonfinite, plan=task.plan)

        def evaluate(k: int) -> None:
            job.endpoint.trace.evaluation(job.endpoint.now(), k * task.batch, trainee.evaluate(replica.deployed))

        def at_step(k: int) -> None:
            if progress is not None:
                progress(k)
            if task.evaluate is not None and 0 < k < task.total_steps and k % task.evaluation_period == 0:
                evaluate(k)

        if job.rank == 0:
            replica.at_step = at_step
        drive(replica.run(strategy))
        if task.evaluate is not None and job.rank == 0:
            evaluate(task.total_steps)
        for trace in job.server_traces():
            job.endpoint.trace.merge(trace)
    states = [{"replica": replica.state_dict(), "trainee": trainee.state_dict()}]
    return Run(model, replica.params.clone(), job.endpoint.trace, states)


def _fork(terms: Terms, workers: int, progress: Callable[[int], None] | None) -> Run:
    context = multiprocessing.get_context("fork")
    steps = np.frombuffer(mmap(-1, 8), dtype=np.int64)  # Anonymous memory that forked workers share: rank 0's step.

    def report(k: int) -> None:
        steps[0] = k

    def child(rank: int, folder: Path) -> None:
        torch.set_num_threads(1)  # A forked process must not enter the thread pool of its parent, which did not come along.
        try:
            store = dist.FileStore(str(folder / "store"))
            run = _work(terms, report if rank == 0 else None, store, rank, workers)
            (folder / f"trace-{rank}.json").write_text(run.trace.dumps())
            if rank == 0:
                _write(run.model, folder / "model")
        except BaseException as error:
            story = {
                "error": f"{type(error).__name__}: {error}",
                "is_peer": isinstance(error, ClusterError),
                "trace": traceback.format_exc(),
            }
            (folder / f"error-{rank}.json").write_text(json.dumps(story))
            os._exit(1)
        os._exit(0)  # The parent's exit handlers are not this process's.

    with tempfile.TemporaryDirectory(prefix="paceline-") as name:
        folder = Path(name)
        processes = [context.Process(target=child, args=(rank, folder), name=f"worker-{rank}") for rank in range(workers)]
        try:
            for process in processes:
                process.start()
            _watch(processes, folder, steps, progress)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()
        trace = Trace()
        for rank in range(workers):
            trace.merge(Trace.loads((folder / f"trace-{rank}.json").read_text()))
        model = terms.task.build()
        flat = FlatModel(model)
        _read(model, folder / "model")
        return Run(model, flat.params.clone(), trace, [])


def _write(model: nn.Module, path: Path) -> None:
    """Parameters and buffers one after the other, as they lie in memory."""
    with path.open("wb") as file:
        for _, values in everything(model):
            file.write(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _read(model: nn.Module, path: Path) -> None:
    with path.open("rb") as file:
        for _, values in everything(model):
            values.copy_(torch.frombuffer(bytearray(file.read(values.nbytes)), dtype=values.dtype).view(values.shape))


def _watch(processes: list[Any], folder: Path, steps: Any, progress: Callable[[int], None] | None) -> None:
    """Wait for all of them; on the first failure say whose it was."""
    alive = {p.sentinel: (rank, p) for rank, p in enumerate(processes)}
    while alive:
        for sentinel in wait(list(alive), timeout=0.1):
            rank, process = alive.pop(sentinel)  # pyright: ignore[reportArgumentType]
            process.join()
            if process.exitcode:
                raise ClusterError(_cause(processes, rank, folder))
        if progress is not None:
            progress(int(steps[0]))


def _cause(processes: list[Any], rank: int, folder: Path) -> str:
    """Whose failure was the first: a rank that only lost its peer is not the one to name."""
    deadline = time.monotonic() + 1.0
    stories: dict[int, dict[str, Any]] = {}
    while time.monotonic() < deadline:
        for r, process in enumerate(processes):
            path = folder / f"error-{r}.json"
            if process.exitcode and path.exists():
                stories[r] = json.loads(path.read_text())
            elif process.exitcode is not None and process.exitcode < 0:
                return f"worker {r} was killed by signal {-process.exitcode}"
        causes = [r for r, s in stories.items() if not s["is_peer"]]
        if causes:
            return f"worker {causes[0]} failed: {stories[causes[0]]['error']}\n\n{stories[causes[0]]['trace']}"
        time.sleep(0.01)
    if rank in stories:
        return f"worker {rank} failed: {stories[rank]['error']}"
    return f"worker {rank} ended with exit code {processes[rank].exitcode}"
