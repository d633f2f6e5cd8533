"""train: a task by a strategy on real processes.

Under a launcher this process is one of the workers.  Otherwise the workers are forked from this process, so nothing is
pickled and tasks may be made of lambdas; each of them computes with one thread.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from mmap import mmap
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.checked import check_arguments, checked_seconds, instance_of
from paceline.checkpoint import Checkpoints
from paceline.elastic import Members
from paceline.engines.job import Job
from paceline.engines.meeting import loopback_listener, reach_store
from paceline.engines.place import Place, detect
from paceline.engines.processes import die_with_parent
from paceline.engines.store_process import check_store, start_store, stop_store
from paceline.engines.supervisor import ERROR_FILE, Supervisor, Worker, write_report
from paceline.monitor.monitor import INSTEAD, Monitor
from paceline.needs import Offers, check
from paceline.op import drive
from paceline.pipeline.processes import Order, StageLearner, staged
from paceline.pipeline.stand_in import check_stages, split_for
from paceline.run import Run
from paceline.session.enduring import check_device, check_elastic
from paceline.session.process_learner import ProcessLearner
from paceline.session.returned import return_model, take_model
from paceline.session.same_model import check_like_first, check_same_model
from paceline.session.shared_buffers import SharedBuffers
from paceline.session.task_saving import check_checkpoint, saving_of
from paceline.session.terms import Terms
from paceline.session.watching import Watching
from paceline.strategy import Strategy
from paceline.task import Task, Trainee
from paceline.trace import Trace
from paceline.transport.endpoint import SILENT_S
from paceline.transport.job_key import JobKey
from paceline.transport.progress import VARIABLE, hung_s
from paceline.worker.batch import NonFinite
from paceline.worker.flat import untie
from paceline.worker.run import WorkerRun


def train(
    task: Task,
    strategy: Strategy | str,
    workers: int | None = None,
    *,
    nonfinite: NonFinite = "skip",
    ordered: bool = False,
    timeout_s: float | str = 1800.0,
    replacements: int = 3,
    silent_s: float | str = SILENT_S,
    elastic: bool = False,
    stages: int | Sequence[str] = 1,
    microbatches: int | None = None,
    pipeline: Order = "1f1b",
    progress: Callable[[int], None] | None = None,
    monitor: Monitor | Sequence[Monitor] | None = None,
    checkpoint: Checkpoints | None = None,
) -> Run:
    """Train `task` by `strategy`: as this rank of a launched job, or on `workers` forked processes of one thread each.

    Where workers do not wait for each other (on a parameter server) the others go on if one is killed, and up to
    `replacements` killed workers are started again.  A worker that was silent for `silent_s` seconds, because it was
    stopped or is cut off, counts as dead.  With `elastic` the same goes for synchronous methods.

    With several `stages` (see `split`) each worker is that many processes.  Its minibatches pass through them in
    `microbatches`, by default four a stage, in the order of `pipeline`.  `monitor` watches the run while it goes.
    `checkpoint` says where the run is saved; it continues from what it finds there.
    """
    if pipeline not in ("1f1b", "gpipe"):
        raise ValueError(f"train(pipeline={pipeline!r}): microbatches go through the stages by '1f1b' or 'gpipe'")
    check_arguments(train, locals(), INSTEAD)
    strategy = instance_of("train", "strategy", strategy, Strategy)
    timeout_s = checked_seconds("train", "timeout_s", timeout_s)
    silent_s = checked_seconds("train", "silent_s", silent_s)
    terms = Terms(task, strategy, nonfinite, ordered, timeout_s, replacements, silent_s, stages, microbatches, pipeline)
    terms = replace(terms, checkpoint=checkpoint, elastic=elastic)
    _check(terms)
    watching = Watching(monitor, progress)
    place = detect()
    # A shell under srun or mpiexec is a job of one process, which can still fork workers.
    is_alone = place is not None and place.world == 1 and not dist.is_initialized()
    if place is not None and not (is_alone and workers is not None):
        if place.world % terms.depth:
            raise ValueError(
                f"train(stages={stages}) under a launcher that started {place.world}: so many make no whole replicas"
            )
        if workers is not None and workers * terms.depth != place.world:
            raise ValueError(
                f"train(workers={workers}) under a launcher that started {place.world}: leave `workers` out"
            )
        return _work(terms, watching, place).run
    if workers is None or workers < 1:
        raise ValueError(
            f"train(workers={workers}): say how many processes to start, at least 1, or start them by paceline run, "
            "torchrun, mpiexec or srun"
        )
    if terms.depth > 1:
        split_for(task, task.build(), stages, workers)  # A model that cannot be split is refused here, not in a worker.
    return _ForkedWorkers(terms, workers * terms.depth, watching).run()


def _check(terms: Terms) -> None:
    """Raise ValueError for what does not go together; what depends on the hosts is checked in each worker."""
    check(terms.strategy, Offers.of_task("train", terms.task))
    check_checkpoint(terms)
    check_elastic(terms)
    check_stages("train", terms.strategy, terms.stages, terms.microbatches)
    if terms.depth > 1 and terms.task.is_controlled:
        raise ValueError(
            f"train(stages={terms.stages}) with a Task that has AutoAdjust or AutoBatch: a replica in stages cannot go "
            "back; use a Schedule and a GrowingBatch, or one stage"
        )


@dataclass(frozen=True)
class Outcome:
    """One worker's run, and whether it took part until the end."""

    run: Run
    is_complete: bool


def _work(
    terms: Terms,
    watching: Watching,
    place: Place,
    *,
    is_forked: bool = False,
    launcher_pipe: int | None = None,
    on_joined: Callable[[], None] = lambda: None,
) -> Outcome:
    """This process's part, from joining the other ranks to the end."""
    task = terms.task
    strategy = terms.strategy
    model = task.build()
    device = next(model.parameters()).device
    check_device("train", device, elastic=terms.elastic)
    if is_forked and device.type != "cpu":
        raise ValueError(
            f"train() forks its workers, which cannot share {device}: start a script by paceline run or torchrun for "
            "models there"
        )
    job = Job(
        strategy.needs if terms.depth == 1 else replace(strategy.needs, collectives=True),
        device=device,
        served=strategy,
        stages=terms.depth,
        place=place,
        ordered=terms.ordered,
        timeout_s=terms.timeout_s,
        silent_s=terms.silent_s,
        takes_nonfinite=terms.nonfinite == "pass",
        launcher_pipe=launcher_pipe,
        forks_servers=is_forked,
        elastic=terms.elastic,
        on_met=partial(terms.check_same, model) if not is_forked else lambda store, rank, workers: None,
    )
    with job:
        on_joined()
        check(strategy, replace(Offers.of_task("train", task), one_host=job.is_one_host))
        learner = _learner(terms, job, model)
        if not is_forked:  # Forked workers have their task and strategy from one process.
            terms.check_same_optimizer(learner.optimizer, _store_of_stage(job, learner), job.rank, job.workers)
        trainee = learner.trainee
        run = WorkerRun(
            strategy, learner.endpoint, learner, nonfinite=terms.nonfinite, plan=trainee.plan, trainee=trainee
        )
        members = None
        if job.elastic is not None:
            members = Members(run, job.elastic, on_change=trainee.take_place)
        else:
            run.replica.cursor.shard = None if job.rank == job.endpoint.rank else job.rank
        _train(terms, job, learner, run, watching, members)
        job.endpoint.missed_end = run.missed_end
        model = learner.whole()
        if terms.depth > 1:
            learner.endpoint.trace.move_to(job.rank)
        for trace in job.server_traces(on_first_caller=is_forked):
            learner.endpoint.trace.merge(trace)
    states = [run.state_dict()]
    untie(model.parameters())
    return Outcome(Run(model, _vector(model), learner.endpoint.trace, states), not run.missed_end)


def _learner(terms: Terms, job: Job, model: nn.Module) -> ProcessLearner | StageLearner:
    """This process's learner, once all ranks have found that they train the same model."""
    if terms.depth > 1:
        learner = staged(job, terms.task, terms.strategy, model, terms.stages, terms.microbatches, terms.pipeline)
    else:
        endpoint = job.endpoint if job.elastic is None else job.elastic
        learner = ProcessLearner(Trainee(terms.task, model, endpoint.rank, job.workers), endpoint)
    if terms.strategy.needs.elastic or terms.elastic:
        check_like_first(job.rank, learner.trainee.flat, _store_of_stage(job, learner))
    elif len(learner.endpoint.ranks) > 1:
        check_same_model(learner.endpoint, learner.trainee.flat, job.store)
    return learner


def _store_of_stage(job: Job, learner: ProcessLearner | StageLearner) -> dist.Store:
    """The part of the job's store for the processes with the same stage of a model."""
    return dist.PrefixStore(f"stage/{learner.stage}", job.store)


def _train(
    terms: Terms,
    job: Job,
    learner: ProcessLearner | StageLearner,
    run: WorkerRun,
    watching: Watching,
    members: Members | None,
) -> None:
    """Run the strategy; the first replica evaluates the model at times and at the end."""
    task = terms.task
    timetable = learner.trainee.timetable
    endpoint = learner.endpoint

    def is_first() -> bool:
        """Whether this process is of the first replica: all its stages assemble its model."""
        if terms.elastic:
            return endpoint.rank == endpoint.ranks[0]
        return job.rank < terms.depth

    def evaluate(k: int) -> None:
        values = learner.evaluated(run.replica.published)
        if job.rank == 0 or terms.elastic:
            endpoint.trace.evaluation(endpoint.now(), timetable.samples_before(k), values)

    with (
        watching.worker(job, run, learner.trainee, terms.depth) as watch,
        saving_of(terms, job, run, members) as saving,
    ):

        def on_step(k: int) -> None:
            if watching.progress is not None and (job.rank == 0 or (terms.elastic and is_first())):
                watching.progress(k)
            if is_first() and task.is_evaluation_due(k, timetable):
                evaluate(k)
            if saving is not None:
                saving.step(k)
            watch.step(k)

        if is_first() or terms.elastic or watch.is_on or saving is not None:
            run.on_step = on_step
        buffers = None
        if len(endpoint.ranks) > 1 and terms.strategy.needs.keeps_own_buffers:
            store = _store_of_stage(job, learner)
            buffers = SharedBuffers(store, run.replica, job.rank // terms.depth, job.workers // terms.depth)
        drive(run.run())
        if buffers is not None and not run.missed_end:
            buffers.take_mean()
        if task.evaluate is not None and is_first() and not run.missed_end:
            evaluate(timetable.total_steps)
        if saving is not None:
            saving.finish(timetable.total_steps)
        watch.end()


class _ForkedWorkers:
    """Workers forked from this process, and the folder and memory through which they return what they have done."""

    def __init__(self, terms: Terms, workers: int, watching: Watching) -> None:
        self._terms = terms
        self._workers = workers
        self._watching = watching
        self._is_elastic = terms.is_elastic
        self._context = multiprocessing.get_context("fork")
        self._key = JobKey.fresh()
        self._processes: dict[int, BaseProcess] = {}  # The last one of each rank.
        # Anonymous memory that forked workers share: a flag for each rank that has joined, and rank 0's step.
        self._shared = np.frombuffer(mmap(-1, 8 * (workers + 1)), dtype=np.int64)

    def run(self) -> Run:
        import_module("torch._dynamo")  # torch imports it with the first optimizer; once here is faster.
        if self._terms.depth > 1:
            import_module("torch.distributed.pipelining")
        with loopback_listener() as listener:
            self._port = listener.getsockname()[1]
            self._store = start_store(listener, self._workers)
        self._pipe = os.pipe()  # Servers of elastic workers run as long as it is open, whichever worker started them.
        with tempfile.TemporaryDirectory(prefix="paceline-") as name:
            self._folder = Path(name)
            supervisor = Supervisor(
                self._workers,
                self._start,
                self._report_path,
                replacements=self._terms.replacements if self._is_elastic else None,
                has_joined=lambda rank: bool(self._shared[rank]),
                hung_s=lambda rank, pid: hung_s(self._progress_path(rank), pid),
                every_tick=self._tick,
                with_traceback=True,
            )
            try:
                with self._watching.forked(self._folder, self._terms, self._workers):
                    supervisor.run()
            finally:
                os.close(self._pipe[0])
                os.close(self._pipe[1])
                stop_store(self._store)
                for process in self._processes.values():
                    process.close()
            return self._collect()

    def _tick(self) -> None:
        check_store(self._store)
        self._watching.show(int(self._shared[-1]))

    def _start(self, rank: int) -> Worker:
        if rank in self._processes:
            self._processes[rank].close()
        process = self._context.Process(target=self._child, args=(rank, os.getpid()), name=f"worker-{rank}")
        process.start()
        self._processes[rank] = process
        assert process.pid is not None
        return Worker(process.pid, lambda: process.exitcode)

    def _child(self, rank: int, parent: int) -> None:
        die_with_parent(parent)
        os.close(self._pipe[1])
        os.environ[VARIABLE] = str(self._progress_path(rank))
        os.environ[ERROR_FILE] = str(self._report_path(rank))
        torch.set_num_threads(1)  # The parent's thread pool has no threads in a forked process.
        try:
            self._work(rank)
        except BaseException as error:
            write_report(self._report_path(rank), error)
            os._exit(1)
        os._exit(0)  # The parent's exit handlers must not run here.

    def _work(self, rank: int) -> None:
        def report(k: int) -> None:
            self._shared[-1] = k

        self._watching.leave(report if rank == 0 or self._terms.elastic else None)
        outcome = _work(
            self._terms,
            self._watching,
            Place("train", rank, self._workers, lambda _: reach_store(self._port), rank, self._workers, self._key),
            is_forked=True,
            launcher_pipe=self._pipe[0] if self._is_elastic else None,
            on_joined=lambda: self._shared.__setitem__(rank, 1),
        )
        (self._folder / f"trace-{rank}.json").write_text(outcome.run.trace.dumps())
        # Of elastic workers rank 0 may be killed, and then another rank's model is as good.
        if outcome.is_complete and (rank == 0 or self._is_elastic):
            return_model(outcome.run.model, self._folder, rank)

    def _progress_path(self, rank: int) -> Path:
        return self._folder / f"progress-{rank}"

    def _report_path(self, rank: int) -> Path:
        return self._folder / f"error-{rank}.json"

    def _collect(self) -> Run:
        trace = Trace()
        for path in sorted(self._folder.glob("trace-*.json")):
            trace.merge(Trace.loads(path.read_text()))
        model = self._terms.task.build()
        take_model(model, self._folder, silent_s=self._terms.silent_s)
        return Run(model, _vector(model), trace, [])


def _vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
