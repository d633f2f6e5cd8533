"""attach: a strategy inside the user's own training loop.

A strategy that exchanges gradients has done so by the end of `backward()`, as DistributedDataParallel has, so that clipping
and GradScaler see what all ranks see; one that exchanges parameters does so inside `session.step()`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from paceline import registry
from paceline.engines.job import Job
from paceline.op import drive
from paceline.session.loading import ByCollectives, ByStore, Parts, samples_in
from paceline.session.loop import Loop
from paceline.session.optimizer import SessionOptimizer
from paceline.session.same_model import check_like_first, check_same_model, everything
from paceline.strategy import Strategy
from paceline.trace import Trace
from paceline.worker.flat import BUCKET_BYTES, FlatModel
from paceline.worker.plan import Plan
from paceline.worker.replica import NonFinite

B = TypeVar("B")


class Session:
    """A model under a strategy, for as long as the `with` block lasts.  Made by `attach`."""

    def __init__(self, job: Job, loop: Loop, optimizer: SessionOptimizer, strategy: Strategy) -> None:
        self.job, self.loop, self.strategy = job, loop, strategy
        self.optimizer = optimizer
        self._is_open = True
        self._passes = 0
        self._done = (
            loop.replica.step_index * loop.accumulate
        )  # Minibatches of which a worker that died has done this one's part.

    @property
    def rank(self) -> int:
        return self.job.rank

    @property
    def workers(self) -> int:
        return self.job.workers

    @property
    def trace(self) -> Trace:
        """What this rank did, and when."""
        return self.job.endpoint.trace

    @property
    def skipped(self) -> int:
        """Steps left out because a gradient held NaN or infinity."""
        return self.loop.replica.skipped

    def step(self, loss: float | Tensor | None = None) -> None:
        """Take this minibatch's step; a worker's turn in whatever the strategy exchanges.

        `loss`, if you have it, is kept in the trace, and told to strategies that follow it.
        """
        if loss is not None:
            self.tell(loss)
        self.optimizer.step()

    def tell(self, loss: float | Tensor) -> None:
        """The loss of the coming step, where something else than this session's `step` takes it."""
        self.loop.loss = float(loss.detach()) if isinstance(loss, Tensor) else loss

    def shard(self, loader: Iterable[B]) -> Iterator[B]:
        """This worker's part of every minibatch of `loader`, which is the same on every rank; a pass over it is an epoch.

        What is read to evaluate the model (in eval mode, or without gradients) is shared out alike and counts for nothing.
        """
        model = self.loop.flat.model

        def trains() -> bool:
            return model.training and torch.is_grad_enabled()

        def is_whole() -> bool:
            return self.loop.is_whole and trains()

        if self.workers == 1:
            for batch in loader:
                self.count(_samples_or_one(batch))
                yield batch
            return
        drive(
            self.loop.replica.drain()
        )  # Or it would meet the exchanges below, where only some ranks have just saved their state.
        agreement = (
            ByStore(self.job.store, self.rank, self._passes)
            if self.strategy.needs.elastic
            else ByCollectives(self.job.endpoint)
        )
        self._passes += 1
        parts = Parts(loader, self.rank, self.workers, agreement, accumulate=self.loop.accumulate, is_whole=is_whole)
        if trains():
            self._done = parts.skip(self._done)
        try:
            for part, samples in parts:
                if trains():
                    self.count(samples)
                    yield part
                elif samples:
                    yield part
        except GeneratorExit:  # The pass was left, perhaps before the step of its last minibatch.
            self.loop.samples = None
            raise

    def count(self, samples: int) -> None:
        """Without `shard`: how many samples the coming backward pass stands for; means are weighted by them."""
        self.loop.samples = (self.loop.samples or 0) + samples

    @contextmanager
    def published(self) -> Generator[None]:
        """Within this block the model is the one to evaluate and save, where the strategy trains at another point."""
        vector, params = self.loop.replica.published, self.loop.flat.params
        kept = params.clone()
        if vector is not None:
            params.copy_(vector)
        try:
            yield
        finally:
            params.copy_(kept)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Backward passes in this block only add to the gradient; the next one outside of it completes it."""
        self.loop.is_paused = True
        try:
            yield
        finally:
            self.loop.is_paused = False

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on later: parameters, optimizer state, the strategy's memory.  Between two steps.

        It waits for an exchange that is under way, so other ranks must not have stopped training.
        For another number of workers, give all ranks' states to `resized`.
        """
        drive(self.loop.replica.drain())
        return {
            "strategy": type(self.strategy).__name__,
            "replica": self.loop.replica.state_dict(),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; before the first step."""
        if self.strategy.servers:
            raise ValueError(
                f"{type(self.strategy).__name__} holds its parameters on servers, which a worker's saved state does not reach"
            )
        if not self.strategy.needs.ordered:
            raise ValueError(
                f"workers of {type(self.strategy).__name__} never wait for each other: what is under way is in no saved state"
            )
        if state["strategy"] != type(self.strategy).__name__:
            raise ValueError(
                f"the state was saved under {state['strategy']}, this session runs {type(self.strategy).__name__}"
            )
        self.loop.replica.load_state_dict(state["replica"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loop.start(self.strategy)

    def close(self) -> None:
        """This worker has no more data: take part until nobody has any, then give everything back."""
        if self._is_open:
            try:
                self.loop.end()
                self._agree()
            except BaseException:
                self._give_back(failed=True)
                raise
            self._give_back(failed=False)

    def _agree(self) -> None:
        """A worker whose data ended first cannot take the others' steps (their clipping, scaling and schedules are theirs): at
        the end it takes their model."""
        if self.workers == 1 or not self.strategy.needs.ordered:
            return
        endpoint = self.job.endpoint
        lasts = [int(t) for t in endpoint.all_gather(torch.tensor(self.loop.last_own_step)).wait()]
        if len(set(lasts)) > 1:
            for _, values in everything(self.loop.flat.model):
                endpoint.broadcast(values, endpoint.ranks[lasts.index(max(lasts))]).wait()

    def _give_back(self, *, failed: bool) -> None:
        self._is_open = False
        self.loop.close()
        self.optimizer.release()
        self.job.close(failed=failed)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._is_open:
            self._give_back(failed=True)


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strategy: Strategy | str,
    *,
    accumulate: int = 1,
    nonfinite: NonFinite = "skip",
    initial: Literal["equal", "broadcast"] = "equal",
    loader: Iterable[Any] | None = None,
    epochs: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    ordered: bool = False,
    timeout_s: float = 1800.0,
) -> Session:
    """Put a model and its optimizer under a strategy, among the workers that this process was launched with.

    Under `paceline run` or torchrun there are as many workers as processes; without a launcher there is one.  `accumulate`
    backward passes make one gradient.  `loader`, whose minibatches `shard` will share out, and `epochs` say how long the run will
    be, to those strategies that must know it beforehand.  `initial` says whether all ranks must start from equal parameters or
    take rank 0's.  A strategy whose servers take the steps needs no `optimizer`: give None.  `ordered` makes sums across hosts the
    same to the last bit in every run, at N times the memory.
    """
    if accumulate < 1:
        raise ValueError(f"attach(accumulate={accumulate}): at least 1 backward pass makes a gradient")
    if initial not in ("equal", "broadcast"):
        raise ValueError(
            f"attach(initial={initial!r}): ranks start from 'equal' parameters, or rank 0's are sent to all by 'broadcast'"
        )
    if isinstance(strategy, str):
        strategy = registry.strategy(strategy)
    plan = _plan(loader, epochs, accumulate)
    flat = FlatModel(model, bucket_bytes=bucket_bytes)
    optimizer = _checked_optimizer(optimizer, flat, strategy)
    job = Job(
        strategy.needs,
        device=flat.params.device,
        served=strategy,
        ordered=ordered,
        timeout_s=timeout_s,
        takes_nonfinite=nonfinite == "pass",
    )
    wrapped: SessionOptimizer | None = None
    try:
        if strategy.needs.elastic:  # Its parameters come from the servers, which have the first one's.
            if initial == "broadcast" and not strategy.servers:
                raise ValueError(
                    f"attach(initial='broadcast'): workers of {type(strategy).__name__} have no server to take parameters from; build the "
                    "model after the same torch.manual_seed on every rank"
                )
            check_like_first(job.rank, flat, job.store, values=initial == "equal")
        elif job.workers > 1:
            if initial == "broadcast":
                for _, values in everything(model):
                    job.endpoint.broadcast(values, 0).wait()
            check_same_model(job.endpoint, flat, job.store)

        def take(scale: Tensor | None, found_inf: Tensor | None) -> None:
            loop.take(scale, found_inf is not None and bool(found_inf))

        wrapped = SessionOptimizer(optimizer, take)
        loop = Loop(flat, job.endpoint, wrapped, nonfinite=nonfinite, accumulate=accumulate, plan=plan)
        loop.replica.data_shard = job.rank
        loop.start(strategy)
    except BaseException:
        if wrapped is not None:
            wrapped.release()
        job.close(failed=True)
        raise
    return Session(job, loop, wrapped, strategy)


def _plan(loader: Iterable[Any] | None, epochs: float | None, accumulate: int) -> Plan:
    """What a loader of whole minibatches tells of the run; a stream tells nothing."""
    if loader is None:
        if epochs is not None:
            raise ValueError(
                f"attach(epochs={epochs}): how long that is follows from the loader; give attach(loader=..., epochs={epochs})"
            )
        return Plan()
    try:
        steps = -(-len(loader) // accumulate)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return Plan()
    dataset, batch = getattr(loader, "dataset", None), getattr(loader, "batch_size", None)
    samples = len(dataset) if hasattr(dataset, "__len__") else None  # pyright: ignore[reportArgumentType]
    sampler = getattr(loader, "sampler", None)
    seen = len(sampler) if hasattr(sampler, "__len__") else samples  # pyright: ignore[reportArgumentType]
    if seen is not None and batch is not None and getattr(loader, "drop_last", False):
        seen -= seen % batch
    total = None if epochs is None else round(epochs * steps)
    return Plan(total, steps, samples, None if batch is None else batch * accumulate, seen)


def _checked_optimizer(
    optimizer: torch.optim.Optimizer | None, flat: FlatModel, strategy: Strategy
) -> torch.optim.Optimizer:
    name = type(strategy).__name__
    if optimizer is None:
        if strategy.needs.optimizer:
            raise ValueError(f"attach(optimizer=None): workers take their own steps under {name} and need an optimizer")
        return torch.optim.SGD(flat.parameters, lr=0.0)
    if not strategy.needs.optimizer:
        warnings.warn(
            f"{name} steps by its servers' rule: the optimizer's own settings have no effect; give attach(optimizer=None)",
            stacklevel=3,
        )
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for name, p in zip(flat.names, flat.parameters, strict=True):
        if id(p) not in held:
            raise ValueError(
                f"the optimizer does not hold the parameter '{name}' of the model: build it from model.parameters(), or freeze it"
            )
    own = {id(p) for p in flat.parameters}
    for p in held.values():
        if p.requires_grad and id(p) not in own:
            raise ValueError(
                f"the optimizer holds a parameter of shape {list(p.shape)} that is none of the model's: workers would not share it"
            )
    return optimizer


def _samples_or_one(batch: object) -> int:
    """One worker's weights weigh against nobody's, so what has no length may count as anything."""
    try:
        return samples_in(batch)
    except ValueError:
        return 1
