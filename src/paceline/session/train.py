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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from mmap import mmap
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.endpoint import Endpoint
from paceline.engines.job import Job, under_launcher
from paceline.errors import ClusterError
from paceline.needs import Offers, check
from paceline.op import Begun, Op, drive
from paceline.pipeline.processes import Order, staged
from paceline.pipeline.stand_in import check_stages, count, split_for
from paceline.run import Run
from paceline.session.backward import BucketHooks, Each
from paceline.session.same_model import check_like_first, check_same_model, everything
from paceline.strategy import Strategy
from paceline.task import Task, Trainee
from paceline.trace import Trace
from paceline.transport.endpoint import SILENT_S
from paceline.worker.batch import NonFinite
from paceline.worker.flat import FlatModel
from paceline.worker.learner import TaskLearner
from paceline.worker.replica import Replica
from paceline.worker.run import WorkerRun


class ProcessLearner(TaskLearner):
    """Computes this process's gradients, when they are waited for, and hands out buckets while it does."""

    def __init__(self, trainee: Trainee, endpoint: Endpoint) -> None:
        super().__init__(trainee)
        self.endpoint = endpoint
        self._each: Each | None = None
        self._hooks = BucketHooks(trainee.flat, lambda: self._each, lambda: None)

    def gradient(self, replica: Replica, each: Each | None) -> Op[Tensor]:
        return Begun("gradient", lambda: self._gradient(replica, each))

    def _gradient(self, replica: Replica, each: Each | None) -> Tensor:
        flat = self.flat
        if self._backward(replica, each):
            if each is None:
                flat.collect_all()
                if not replica.batch.accept(flat.first_nonfinite):
                    flat.grads.zero_()
        else:
            flat.emit_zeros(each)
        return flat.grads

    def local_step(self, replica: Replica) -> Op[None]:
        return Begun("local step", lambda: self._local_step(replica))

    def _local_step(self, replica: Replica) -> None:
        if self._backward(replica, None) and replica.batch.accept(self.flat.first_nonfinite_grad):
            self.trainee.optimizer.step()

    def evaluated(self, vector: Tensor | None) -> dict[str, float]:
        return self.trainee.evaluate(vector)

    def whole(self) -> nn.Module:
        return self.flat.model

    def _backward(self, replica: Replica, each: Each | None) -> bool:
        """Compute the next minibatch's gradient, handing its buckets to `each`; whether there was one."""
        batch = self.trainee.draw(replica.cursor.step, replica.cursor.shard)
        replica.batch.begin(0 if batch is None else len(batch[0]))
        if batch is None:
            return False
        start = self.endpoint.now()
        self._each = None
        self.trainee.backward(batch, lambda: setattr(self, "_each", each))
        now = self.endpoint.now()
        self.endpoint.trace.span(replica.rank, "gradient", start, now)
        self.endpoint.trace.point(now, replica.rank, replica.cursor.step, len(batch[0]), self.trainee.loss)
        return True


@dataclass(frozen=True)
class Terms:
    """How a task is trained, on every rank alike."""

    task: Task
    strategy: Strategy
    nonfinite: NonFinite
    ordered: bool
    timeout_s: float
    replacements: int = 0
    silent_s: float = SILENT_S
    stages: int | Sequence[str] = 1
    microbatches: int | None = None
    pipeline: Order = "1f1b"

    @property
    def depth(self) -> int:
        """How many processes hold a replica."""
        return count(self.stages)


def train(
    task: Task,
    strategy: Strategy,
    workers: int | None = None,
    *,
    nonfinite: NonFinite = "skip",
    ordered: bool = False,
    timeout_s: float = 1800.0,
    replacements: int = 3,
    silent_s: float = SILENT_S,
    stages: int | Sequence[str] = 1,
    microbatches: int | None = None,
    pipeline: Order = "1f1b",
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Train `task` by `strategy`: as this rank of a launched job, or on `workers` forked processes of one thread each.

    Where workers run free (on a parameter server) the others go on if one is killed, and up to `replacements` are started anew;
    and they no longer wait for one that has been silent for `silent_s` seconds, as it was stopped or is cut off.

    With several `stages` (see `split`) each worker is so many processes, through which its minibatches go in `microbatches`, by
    default four a stage, in the order of `pipeline`.
    """
    if silent_s <= 0:
        raise ValueError(
            f"train(silent_s={silent_s}): a worker that is silent for so many seconds is given up; it must be above 0"
        )
    terms = Terms(task, strategy, nonfinite, ordered, timeout_s, replacements, silent_s, stages, microbatches, pipeline)
    check_stages("train", strategy, stages, microbatches)
    if pipeline not in ("1f1b", "gpipe"):
        raise ValueError(f"train(pipeline={pipeline!r}): microbatches go through the stages by '1f1b' or 'gpipe'")
    if under_launcher():
        started = int(os.environ.get("WORLD_SIZE", 0)) or dist.get_world_size()
        if started % terms.depth:
            raise ValueError(
                f"train(stages={stages}) under a launcher that started {started}: so many make no whole replicas"
            )
        if workers is not None and workers * terms.depth != started:
            raise ValueError(f"train(workers={workers}) under a launcher that started {started}: leave `workers` out")
        return _work(terms, progress)[0]
    if workers is None or workers < 1:
        raise ValueError(
            f"train(workers={workers}): say how many processes to start, at least 1, or start them by paceline run or torchrun"
        )
    if terms.depth > 1:
        split_for(task, task.build(), stages, workers)  # What cannot be split is said here, and not by a process.
    return _fork(terms, workers * terms.depth, progress)


def _work(
    terms: Terms,
    progress: Callable[[int], None] | None,
    store: dist.Store | None = None,
    rank: int | None = None,
    workers: int | None = None,
    life: int | None = None,
    begun: Callable[[], None] = lambda: None,
) -> tuple[Run, bool]:
    """This process's part, from joining the others, which is then `begun`, to the end; and whether it was there at the end."""
    task, strategy = terms.task, terms.strategy
    model = task.build()
    device = next(model.parameters()).device
    if store is not None and device.type != "cpu":
        raise ValueError(
            f"train() forks its workers, which cannot share {device}: start a script by paceline run or torchrun for models there"
        )
    place: dict[str, Any] = {"device": device, "store": store, "rank": rank, "workers": workers, "life": life}
    limits: dict[str, Any] = {"timeout_s": terms.timeout_s, "silent_s": terms.silent_s}
    with Job(strategy, **place, **limits, ordered=terms.ordered, takes_nonfinite=terms.nonfinite == "pass") as job:
        begun()
        check(strategy, replace(Offers.of_task("train", task), one_host=job.is_one_host))
        if terms.depth > 1:
            learner = staged(job, task, model, terms.stages, terms.microbatches, terms.pipeline)
        else:
            learner = ProcessLearner(Trainee(task, model, job.endpoint.rank, job.workers), job.endpoint)
        endpoint, trainee = learner.endpoint, learner.trainee
        if strategy.needs.elastic:
            check_like_first(job.rank, trainee.flat, job.store)
        elif len(endpoint.ranks) > 1:
            check_same_model(endpoint, trainee.flat, job.store)
        run = WorkerRun(strategy, endpoint, learner, nonfinite=terms.nonfinite, plan=task.plan)
        replica = run.replica
        replica.cursor.shard = None if job.rank == job.endpoint.rank else job.rank

        def evaluate(k: int) -> None:
            values = learner.evaluated(replica.published)
            if job.rank == 0:
                endpoint.trace.evaluation(endpoint.now(), k * task.batch, values)

        def on_step(k: int) -> None:
            if progress is not None and job.rank == 0:
                progress(k)
            if task.evaluate is not None and 0 < k < task.total_steps and k % task.evaluation_period == 0:
                evaluate(k)

        is_first = job.rank < terms.depth  # All stages of the first replica bring its model together.
        if is_first:
            run.on_step = on_step
        drive(run.run())
        if task.evaluate is not None and is_first and not run.missed_end:
            evaluate(task.total_steps)
        model = learner.whole()
        for trace in job.server_traces(first_come=store is not None):
            endpoint.trace.merge(trace)
    states = [run.state_dict()]
    params = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
    return Run(model, params, endpoint.trace, states), not run.missed_end


def _fork(terms: Terms, workers: int, progress: Callable[[int], None] | None) -> Run:
    context = multiprocessing.get_context("fork")
    import_module(
        "torch._dynamo"
    )  # torch does it with the first optimizer: once here takes less time than in every worker.
    if terms.depth > 1:
        import_module("torch.distributed.pipelining")
    # Anonymous memory that forked workers share: who has joined the others, and rank 0's step.
    shared = np.frombuffer(mmap(-1, 8 * (workers + 1)), dtype=np.int64)
    life, hold = os.pipe()  # Servers live for as long as it is open, whichever worker has started them.

    def report(k: int) -> None:
        shared[-1] = k

    def child(rank: int, folder: Path) -> None:
        torch.set_num_threads(
            1
        )  # A forked process must not enter the thread pool of its parent, which did not come along.
        try:
            store = dist.FileStore(str(folder / "store"))
            pipe = life if terms.strategy.needs.elastic else None
            run, is_complete = _work(
                terms, report if rank == 0 else None, store, rank, workers, pipe, lambda: shared.__setitem__(rank, 1)
            )
            (folder / f"trace-{rank}.json").write_text(run.trace.dumps())
            if is_complete and (
                rank == 0 or terms.strategy.needs.elastic
            ):  # The first may be killed, and then another's is as good.
                _write(run.model, folder / f"model-{rank}")
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
        processes: dict[int, Any] = {}  # The last one of each rank.

        def start(rank: int) -> None:
            processes[rank] = context.Process(target=child, args=(rank, folder), name=f"worker-{rank}")
            processes[rank].start()

        try:
            for rank in range(workers):
                start(rank)
            replacements = terms.replacements if terms.strategy.needs.elastic else None
            _watch(processes, start, folder, replacements, shared, progress)
        finally:
            os.close(life)
            os.close(hold)
            for process in processes.values():
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()
        trace = Trace()
        for path in sorted(folder.glob("trace-*.json")):
            trace.merge(Trace.loads(path.read_text()))
        model = terms.task.build()
        flat = FlatModel(model)
        _read(model, min(folder.glob("model-*"), key=lambda path: int(path.name.removeprefix("model-"))))
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


def _watch(
    processes: dict[int, Any],
    start: Callable[[int], None],
    folder: Path,
    replacements: int | None,
    shared: Any,
    progress: Callable[[int], None] | None,
) -> None:
    """Wait for all of them; on the first failure say whose it was.

    With a number of `replacements`, who is killed is no failure: so many are started anew, unless others are already done, and after
    that the rest goes on without them, if all had joined by then.
    """
    alive, ended, lost = {p.sentinel: rank for rank, p in processes.items()}, 0, set[int]()
    while alive:
        for sentinel in wait(list(alive), timeout=0.1):
            rank = alive.pop(sentinel)  # pyright: ignore[reportArgumentType]
            process = processes[rank]
            process.join()
            if not process.exitcode:
                ended += 1
            elif (
                process.exitcode > 0
                or replacements is None
                or (not replacements and not (shared[rank] and (alive or ended)))
            ):
                raise ClusterError(_cause({r: p for r, p in processes.items() if r not in lost}, rank, folder))
            elif not replacements or ended:
                lost.add(rank)
            else:
                replacements -= 1
                process.close()
                start(rank)
                alive[processes[rank].sentinel] = rank
        if progress is not None:
            progress(int(shared[-1]))


def _cause(processes: dict[int, Any], rank: int, folder: Path) -> str:
    """Whose failure was the first: a rank that only lost its peer is not the one to name."""
    deadline = time.monotonic() + 1.0
    stories: dict[int, dict[str, Any]] = {}
    while time.monotonic() < deadline:
        for r, process in processes.items():
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
