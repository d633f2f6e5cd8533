"""attach: train a model by a strategy inside the user's own training loop.

A strategy that exchanges gradients does so during `backward()`, as DistributedDataParallel does, so clipping and
GradScaler see the mean of all ranks.  A strategy that exchanges parameters does so inside `session.step()`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from paceline.checked import check_arguments, checked, checked_seconds, instance_of
from paceline.checkpoint import Checkpoints
from paceline.engines.job import Job
from paceline.monitor.monitor import INSTEAD as NO_CLASS
from paceline.monitor.monitor import Monitor
from paceline.needs import Length, Offers, check
from paceline.session.enduring import check_device, check_elastic_loop
from paceline.session.guard import LoopGuard
from paceline.session.learner import NO_RATE, LoopLearner, first_rates
from paceline.session.loop import Loop
from paceline.session.optimizer import SessionOptimizer
from paceline.session.same_model import check_like_first, check_same_model
from paceline.session.session import Session, refuse_attached
from paceline.session.settings import GroupSettings, check_same_settings, described
from paceline.session.tensor_parallel import TensorParallel, tensor_parallel
from paceline.session.watch import ModelWatch, refuse_wrapped
from paceline.session.watching import LoopWatch
from paceline.session.whereabouts import Whereabouts
from paceline.strategy import Strategy
from paceline.transport.endpoint import SILENT_S, ProcessEndpoint
from paceline.worker.batch import NonFinite
from paceline.worker.flat import BUCKET_BYTES, FlatModel
from paceline.worker.plan import Plan
from paceline.worker.run import WorkerRun
from paceline.worker.tensors import named_tensors

Initial = Literal["equal", "broadcast"]
# The arguments that must be the same on all ranks.
SAME = ("accumulate", "nonfinite", "initial", "ordered", "bucket_bytes", "checkpoint", "elastic")
INSTEAD = {
    "model": (type, "model is a torch.nn.Module; give an instance"),
    "optimizer": (
        type,
        "optimizer is an instance, or None; give one of the model's parameters, SGD(model.parameters(), lr=0.1)",
    ),
    **NO_CLASS,
    "loader": ((int, float), "loader is the loader that session.shard will split; its length is that of an epoch"),
}


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strategy: Strategy | str,
    *,
    accumulate: int = 1,
    nonfinite: NonFinite = "skip",
    initial: Initial = "equal",
    loader: Iterable[Any] | None = None,
    epochs: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    ordered: bool = False,
    timeout_s: float | str = 1800.0,
    mesh: dist.DeviceMesh | None = None,
    monitor: Monitor | Sequence[Monitor] | None = None,
    checkpoint: Checkpoints | None = None,
    elastic: bool = False,
    also: Mapping[str, Any] | None = None,
    silent_s: float | str = SILENT_S,
) -> Session:
    """Train a model and its optimizer by a strategy, together with the other processes of the job.

    Under a launcher (`paceline run`, torchrun, MPI, Slurm) each process is a worker; otherwise there is one.  A
    strategy whose servers take the steps needs no `optimizer`: give None.  `accumulate` backward passes make one
    gradient.  `initial` says whether all ranks must start from equal parameters, or take those of rank 0.  `loader`,
    whose minibatches `shard` will split, and `epochs` give the length of the run to strategies that need it.
    `ordered` makes sums across hosts the same to the last bit in every run, for N times the memory.  `timeout_s` is a
    number of seconds, or text such as "5min".  If the model is tensor-parallel (torch's DTensor), `mesh` is the
    dimension of the device mesh along which there are replicas.  `monitor` watches the run while it goes.  The run is
    saved to the folder of `checkpoint`, and continues from what it finds there.

    With `elastic` a synchronous run goes on when workers die, and takes in those that are started in their place; one
    that was silent for `silent_s` counts as dead.  `also` are objects of the loop, such as schedulers, whose states a
    new worker gets from the others, by name.
    """
    given = dict(locals())
    _check_arguments(given)
    strategy = instance_of("attach", "strategy", strategy, Strategy)
    timeout_s = checked_seconds("attach", "timeout_s", timeout_s)
    silent_s = checked_seconds("attach", "silent_s", silent_s)
    kept = dict(also or {})
    if elastic:
        check_elastic_loop(strategy, mesh=mesh, initial=initial, also=kept)
        kept = kept | dict(checkpoint.also if checkpoint is not None else {})
    elif kept:
        raise ValueError(f"attach(also={sorted(kept)}): it is for elastic=True; give it to Checkpoints(also=...)")
    plan = _plan(loader, epochs, accumulate)
    offers = _checked_offers(strategy, plan, optimizer, initial, mesh, is_saved=checkpoint is not None)
    flat, parts = _flat_model(model, bucket_bytes, mesh)
    check_device("attach", flat.params.device, elastic=elastic)
    inner = _checked_optimizer(optimizer, flat, strategy)
    given |= {"timeout_s": timeout_s, "silent_s": silent_s}
    session = _opened(given, strategy, plan, offers, flat, parts, inner)
    if session.job.elastic is not None:
        session.take_part(session.job.elastic, kept)
    if checkpoint is not None:
        session.begin(checkpoint)
    return session


def _opened(
    given: Mapping[str, Any],
    strategy: Strategy,
    plan: Plan,
    offers: Offers,
    flat: FlatModel,
    parts: TensorParallel | None,
    inner: torch.optim.Optimizer,
) -> Session:
    """A session by the arguments of `attach`, in the job that it joins."""
    elastic: bool = given["elastic"]
    may_join = strategy.needs.elastic or elastic
    settings = described(strategy, given["optimizer"], {n: given[n] for n in SAME} | _length_of(strategy, plan))
    with ExitStack() as on_failure:
        job = Job(
            strategy.needs,
            device=flat.params.device,
            served=strategy,
            ordered=given["ordered"],
            timeout_s=given["timeout_s"],
            silent_s=given["silent_s"],
            takes_nonfinite=given["nonfinite"] == "pass",
            elastic=elastic,
            on_met=partial(check_same_settings, settings=settings, call="attach", is_elastic=may_join),
        )
        on_failure.callback(job.close, failed=True)
        check(strategy, replace(offers, one_host=job.is_one_host))
        endpoint = job.endpoint if parts is None else job.endpoint.group(parts.replicas)
        _start_from_same_model(job, endpoint, flat, given["initial"], may_join=may_join)
        session_optimizer = SessionOptimizer(inner)
        on_failure.callback(session_optimizer.release)
        learner = LoopLearner(flat, session_optimizer, parts)
        run = WorkerRun(strategy, job.elastic or endpoint, learner, nonfinite=given["nonfinite"], plan=plan)
        run.replica.cursor.shard = job.rank if job.elastic is None else None
        guard = _guard(job, run, inner)
        loop = Loop(run, learner, session_optimizer, guard, accumulate=given["accumulate"])
        watch = on_failure.enter_context(LoopWatch(given["monitor"], job, loop))
        if job.elastic is None:
            loop.start()  # An elastic one starts when its worker has joined the others.
        session = Session(job, loop, session_optimizer, strategy, watch)
        on_failure.pop_all()
    return session


def _flat_model(
    model: nn.Module, bucket_bytes: int, mesh: dist.DeviceMesh | None
) -> tuple[FlatModel, TensorParallel | None]:
    parts = tensor_parallel(model, mesh)
    flat = FlatModel(model, bucket_bytes=bucket_bytes, takes_parts=parts is not None)
    if parts is not None:
        parts.mark_repeated(flat)
    return flat, parts


def _length_of(strategy: Strategy, plan: Plan) -> dict[str, Plan]:
    """The length of the run, which must be the same on all ranks if the strategy uses it."""
    return {"plan": plan} if strategy.needs.length else {}


def _guard(job: Job, run: WorkerRun, optimizer: torch.optim.Optimizer) -> LoopGuard:
    endpoint = run.replica.endpoint
    may_join = job.elastic is not None
    name = type(run.strategy).__name__
    cursor = run.replica.cursor
    settings = GroupSettings(endpoint, job.store, optimizer)
    return LoopGuard(
        ModelWatch(run.replica.learner.flat, optimizer),
        settings if (job.workers > 1 or may_join) and run.strategy.needs.ordered else None,
        Whereabouts(
            job.store,
            job.rank,
            [job.rank] if may_join else endpoint.ranks,  # An exchange that fails does not end an elastic run.
            where=lambda: f"at step {cursor.step} of {name}",
            journal=job.endpoint.journal,
            timeout_s=job.timeout_s,
        ),
    )


def _check_arguments(given: Mapping[str, Any]) -> None:
    if given["initial"] not in get_args(Initial):
        raise ValueError(
            f"attach(initial={given['initial']!r}): give 'equal' if all ranks start from equal parameters, or "
            "'broadcast' to send those of rank 0 to all"
        )
    check_arguments(attach, given, INSTEAD)
    refuse_wrapped(given["model"])
    refuse_attached(given["model"])
    if given["bucket_bytes"] < 1:
        raise ValueError(f"attach(bucket_bytes={given['bucket_bytes']}): a bucket has at least 1 byte")
    if given["accumulate"] < 1:
        raise ValueError(f"attach(accumulate={given['accumulate']}): a gradient needs at least 1 backward pass")


def _checked_offers(
    strategy: Strategy,
    plan: Plan,
    optimizer: torch.optim.Optimizer | None,
    initial: Initial,
    mesh: dist.DeviceMesh | None,
    *,
    is_saved: bool,
) -> Offers:
    """What a user's loop offers, if that is what the strategy needs."""
    offers = Offers(
        "attach",
        global_data=False,
        optimizer=optimizer is not None,
        length=[field for field in get_args(Length) if getattr(plan, field) is not None],
        equal_start=initial == "equal",
        whole_tensors=mesh is None,
        unbroken=not is_saved,
    )
    check(strategy, offers)
    return offers


def _plan(loader: Iterable[Any] | None, epochs: float | None, accumulate: int) -> Plan:
    """The length of the run, as far as a loader of whole minibatches shows it; a stream shows nothing."""
    if loader is None:
        if epochs is not None:
            raise ValueError(
                f"attach(epochs={epochs}): the length of an epoch is that of the loader; give "
                f"attach(loader=..., epochs={epochs})"
            )
        return Plan()
    if not isinstance(loader, Iterable) or isinstance(loader, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"attach(loader={loader!r}): give an iterable of minibatches, such as a DataLoader")
    if not 0 < checked("attach", "epochs", 1 if epochs is None else epochs, float) < inf:
        raise ValueError(f"attach(epochs={epochs}): the number of epochs is finite and above 0")
    try:
        steps = -(-len(loader) // accumulate)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return Plan()
    batch = getattr(loader, "batch_size", None)
    samples = _length(getattr(loader, "dataset", None))
    seen = _length(getattr(loader, "sampler", None))
    if seen is None:
        seen = samples
    if seen is not None and batch is not None and getattr(loader, "drop_last", False):
        seen -= seen % batch
    return Plan(
        steps=None if epochs is None else round(epochs * steps),
        steps_per_epoch=steps,
        samples=samples,
        batch=None if batch is None else batch * accumulate,
        epoch_samples=seen,
    )


def _length(data: object) -> int | None:
    return len(data) if hasattr(data, "__len__") else None  # pyright: ignore[reportArgumentType]


def _checked_optimizer(
    optimizer: torch.optim.Optimizer | None, flat: FlatModel, strategy: Strategy
) -> torch.optim.Optimizer:
    """The optimizer, if it holds exactly the model's parameters; if the user gave None, one for schedulers only."""
    if optimizer is None:
        return torch.optim.SGD(flat.parameters, lr=1.0)
    if not strategy.needs.optimizer:
        warnings.warn(
            f"{type(strategy).__name__} steps by a rule and a learning rate of its own: of the optimizer only the "
            "changes of its learning rate have an effect, as factors; give attach(optimizer=None), and build "
            "schedulers on session.optimizer",
            stacklevel=3,
        )
        if not any(first_rates(optimizer)):
            raise ValueError(f"attach({type(strategy).__name__}): {NO_RATE}")
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for name, p in zip(flat.names, flat.parameters, strict=True):
        if id(p) not in held:
            raise ValueError(
                f"the optimizer does not hold the parameter '{name}' of the model: build it from model.parameters(), "
                "or freeze the parameter"
            )
    own = {id(p) for p in flat.parameters}
    for p in held.values():
        if p.requires_grad and id(p) not in own:
            raise ValueError(
                f"the optimizer holds a parameter of shape {list(p.shape)} that the model does not have: workers would "
                "not share it"
            )
    return optimizer


def _start_from_same_model(
    job: Job, endpoint: ProcessEndpoint, flat: FlatModel, initial: Initial, *, may_join: bool
) -> None:
    """Send the model of the first rank to all if the user wants that, and check that all ranks have the same model."""
    if may_join:  # If values may differ, the servers send the parameters of the first worker to all.
        check_like_first(job.rank, flat, job.store, values=initial == "equal")
    elif len(endpoint.ranks) > 1:
        if initial == "broadcast":
            for _, values in named_tensors(flat.model):
                endpoint.broadcast(values, endpoint.ranks[0]).wait()
        check_same_model(endpoint, flat, job.store)
