"""ddp_hook: a communication hook that lets DistributedDataParallel exchange its gradients by any codec.

DDP hands over its buckets during backward.  A thread exchanges them one after the other, in the order in which DDP
hands them over, which is the same on every rank.  DDP waits for them at the end of backward.  No collective is started
from a callback, so several buckets may be in flight, on gloo too.
"""

# No postponed annotations here: DDP inspects the signatures of its hooks, and takes text for a wrong type.

import threading
import warnings
import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.checked import check_arguments, checked_seconds, instance_of
from paceline.codecs.codec import Codec, CodecState
from paceline.collectives import SyncVote, mean, mean_encoded
from paceline.engines.job import Job
from paceline.needs import Needs
from paceline.op import drive
from paceline.session.bucket_state import BucketStates
from paceline.trace import Trace
from paceline.transport.comm_thread import CommThread

PREFIX = "paceline."  # Of the names that a hook adds to a model's state.
INSTEAD = {"model": (nn.Module, "model is the DistributedDataParallel; without one, use paceline.attach")}
COMMON = ("factors", "count", "adapted", "steps")  # The parts of the state that a rank may take from another rank.


def ddp_hook(
    codec: Codec | str, model: DistributedDataParallel | None = None, *, start: int = 0, timeout_s: float | str = 1800.0
) -> "DdpHook":
    """A communication hook for DistributedDataParallel that exchanges gradients by a codec: `ddp_hook(OneBit(), ddp)`.

    With a model, the hook registers itself there; all ranks must do this together.  What the hook has not yet sent is
    then a part of `model.state_dict()`, and `model.load_state_dict()` restores it.  Without a model, register the hook
    by `register_comm_hook(None, hook)`.  The first `start` steps are exchanged without the codec: coarse codecs work
    best after a model's first, steep phase.  A peer that is silent for `timeout_s` seconds is an error.
    """
    check_arguments(ddp_hook, locals(), INSTEAD)
    codec = instance_of("ddp_hook", "codec", codec, Codec)
    hook = DdpHook(codec, start=start, timeout_s=checked_seconds("ddp_hook", "timeout_s", timeout_s))
    if model is not None:
        hook.register(model)
    return hook


class DdpHook:
    """The hook that `ddp_hook` makes: it exchanges DDP's buckets, and saves its state with the model's.

    The state holds by parameter what was not yet sent, and what else the codec remembers of it (the velocity of DGC,
    the factors of PowerSGD).  It also holds the count of random messages, and by bucket the settings that have adapted.
    A bucket's settings are lost if DDP changes its buckets, as it does after the first backward of a process.  What was
    not yet sent is never lost.  But DDP drops what is sent for a parameter that no rank has used in a step.
    """

    def __init__(self, codec: Codec, *, start: int = 0, timeout_s: float = 1800.0) -> None:
        if start < 0:
            raise ValueError(f"ddp_hook(start={start}): the number of steps without the codec must be 0 or more")
        self.codec = codec
        self.start = start
        self.steps = 0
        # DDP reads the one and logs the other.
        self.__name__ = f"ddp_hook({codec})"
        self.__qualname__ = self.__name__
        self._timeout_s = timeout_s
        self._job: Job | None = None
        self._thread = CommThread()
        # The hook must not hold the model: DDP holds its hook where no garbage collector sees it, so neither would be
        # freed.
        self._is_registered = False
        self._buckets = BucketStates(codec, self.__qualname__)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a DDP, such as a mean of its weights, has no hook, so a copy of this hook serves no model.
        return partial(DdpHook, start=self.start, timeout_s=self._timeout_s), (self.codec,)

    @property
    def trace(self) -> Trace:
        """What this rank exchanged, when, and how many bytes it sent."""
        return Trace() if self._job is None else self._job.endpoint.trace

    def __call__(self, state, bucket):  # pyright: ignore
        """DDP calls this for every bucket that backward has filled."""
        x: Tensor = bucket.buffer()
        if x.layout != torch.strided:
            raise ValueError(
                f"{self.__qualname__}: a parameter has a sparse gradient, but codecs encode dense gradients; give "
                "Embedding(sparse=False)"
            )
        job = self._opened(x.device)
        done: Future[Tensor] = Future(devices=[x.device] if x.is_cuda else [])
        codec_state = self._codec_state(job, bucket) if self.steps >= self.start and job.workers > 1 else None
        self.steps += bucket.is_last()
        if job.workers == 1:
            done.set_result(x)
            return done
        ready = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None
        self._thread.submit("mean", partial(_exchange, job, x, codec_state, ready, done))
        # DDP takes an exception that is set on a future for a result.  An exception from a callback is raised.
        return done.then(lambda future: future.value())

    def _codec_state(self, job: Job, bucket: dist.GradBucket) -> CodecState:
        hosts = job.endpoint.hosts or [[rank] for rank in range(job.workers)]
        return self._buckets.codec_state(bucket, job.rank, hosts)

    def _opened(self, device: torch.device) -> Job:
        """Join the other ranks, if not done yet; all ranks do this together."""
        if self._job is None:
            # It needs its own process group: DDP's other collectives may run on the model's at the same time.
            job = Job(Needs(), device=device, apart=True, timeout_s=self._timeout_s)
            self._thread = job.comm_thread or self._thread
            weakref.finalize(self, _close, self._thread, job)
            self._check_same_hook(job)
            self._job = job
        return self._job

    def _check_same_hook(self, job: Job) -> None:
        start = f", start={self.start}" if self.start else ""
        job.store.set(f"hook/{job.rank}", f"ddp_hook({self.codec!r}{start})")
        hooks = [job.store.get(f"hook/{rank}").decode() for rank in range(job.workers)]
        for rank, other in enumerate(hooks):
            if other != hooks[0]:
                raise ValueError(f"rank {rank} has {other}, but rank 0 has {hooks[0]}: all ranks must have the same")

    def register(self, model: DistributedDataParallel) -> None:
        """Exchange the gradients of this model, and save the hook's state with the model's."""
        if self._is_registered:
            raise RuntimeError(f"{self.__qualname__} is registered with another model: make one hook for each model")
        ranks = dist.get_world_size(model.process_group)
        if ranks != dist.get_world_size():
            raise ValueError(
                f"{self.__qualname__}: the model's process group has {ranks} of {dist.get_world_size()} ranks, but the "
                "hook needs all of them"
            )
        named = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
        self._opened(named[0][1].device)  # There is one: DDP refuses a model without trainable parameters.
        model.register_comm_hook(None, self)
        # torch sets an attribute on this hook, which a method would refuse.
        model.register_state_dict_post_hook(partial(self._save))
        model.register_load_state_dict_pre_hook(self._load)
        self._buckets.set_parameters(named)
        self._is_registered = True

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's state between two backward passes: by parameter what was not yet sent, and more."""
        self._check_registered()
        return self._buckets.state_dict() | {
            "rank": torch.tensor(dist.get_rank()),
            "steps": torch.tensor(self.steps),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a `state_dict`; between two backward passes."""
        self._check_registered()
        rank = dist.get_rank()
        saved_by = int(state["rank"])
        if saved_by != rank:
            warnings.warn(
                f"the state of this ddp_hook was saved by rank {saved_by}, but this is rank {rank}: what rank {rank} "
                f"had not yet sent is lost, and rank {rank} starts without a residual.  Save and load the state on "
                "every rank to keep it",
                stacklevel=2,
            )
            state = {name: value for name, value in state.items() if name.partition(".")[0] in COMMON}
        self._buckets.load_state_dict(state)
        self.steps = int(state["steps"])

    def _check_registered(self) -> None:
        if not self._is_registered:
            raise RuntimeError(
                f"{self.__qualname__} does not know the names of the parameters: make it with the model, "
                "ddp_hook(codec, ddp)"
            )

    def _save(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        if self._is_registered:
            state.update({f"{prefix}{PREFIX}{name}": value for name, value in self.state_dict().items()})

    def _load(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        mine = {k: state.pop(k) for k in list(state) if k.startswith(f"{prefix}{PREFIX}")}
        if mine and self._is_registered:
            self.load_state_dict({k.removeprefix(f"{prefix}{PREFIX}"): v for k, v in mine.items()})


# What the thread holds must not hold the hook.  Otherwise the thread itself would have to end it.


def _exchange(
    job: Job, x: Tensor, codec_state: CodecState | None, ready: torch.Event | None, done: "Future[Tensor]"
) -> None:
    try:
        with torch.cuda.stream(torch.cuda.Stream(x.device) if x.is_cuda else None):
            if ready is not None:
                ready.wait()
            # Every rank has the same weight, as in DDP.  A NaN on one rank becomes a NaN on all, as in a sum.
            vote = SyncVote(1.0, rank=job.rank)
            drive(
                mean(job.endpoint, x, vote) if codec_state is None else mean_encoded(job.endpoint, x, vote, codec_state)
            )
            done.set_result(x)
    except Exception as error:
        done.set_exception(error)  # pyright: ignore[reportArgumentType]
    except BaseException as error:  # Without a result DDP would wait forever.
        interrupted = RuntimeError(f"the exchange was interrupted by {error!r}")
        done.set_exception(interrupted)  # pyright: ignore[reportArgumentType]


def _close(thread: CommThread, job: Job) -> None:
    if thread.is_current():  # Any thread may collect garbage, and a thread cannot wait for itself.
        threading.Thread(target=_close, args=(thread, job), daemon=True).start()
        return
    thread.close()
    job.close()
