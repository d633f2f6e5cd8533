"""Any codec for DistributedDataParallel: a communication hook that encodes its buckets.

DDP hands over its buckets during backward; a thread exchanges them one after the other, in the order in which every rank's DDP
hands them over, and DDP waits for them at the end of backward.  Nothing is chained from callbacks, so that several buckets may
be under way on gloo too.
"""

# No postponed annotations here: DDP inspects its hooks' signatures, and takes text for a wrong type.

import json
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.codecs.codec import Codec, CodecState
from paceline.codecs.power_sgd import FactorState
from paceline.collectives import SyncVote, mean, mean_encoded
from paceline.engines.job import Job
from paceline.needs import Needs
from paceline.op import drive
from paceline.state import Memory
from paceline.stripes import stripe_of
from paceline.trace import Trace
from paceline.transport.comm_thread import CommThread

KEY = "paceline."  # Before the names of what a hook adds to a model's state.
COMMON = ("factors", "count", "adapted", "steps")  # What any rank may take from another's state.
OTHER_RANK = (
    "the state of this ddp_hook was saved by rank {0}, and this is rank {1}: what rank {1} had not yet sent is lost, and it "
    "starts with nothing to add.  Save and load on every rank to keep it"
)
NO_MODEL = "{0} knows no parameters' names: make it with the model, ddp_hook(codec, ddp)"

Adapted = dict[str, dict[str, Any]]


def ddp_hook(
    codec: Codec, model: DistributedDataParallel | None = None, *, start: int = 0, timeout_s: float = 1800.0
) -> "DdpHook":
    """A communication hook that lets DistributedDataParallel exchange its gradients in this format: `ddp_hook(OneBit(), ddp)`.

    Given the model, it registers itself there, which all ranks must do together, and what it has not yet sent is part of
    `model.state_dict()` and comes back with `model.load_state_dict()`.  Without, it is a hook as any other, for
    `register_comm_hook(None, hook)`.  The first `start` steps are exchanged as they are: coarse codecs do best where a model has
    left its first, steep part behind.  A peer that is silent for `timeout_s` seconds is an error.
    """
    hook = DdpHook(codec, start=start, timeout_s=timeout_s)
    if model is not None:
        hook.register(model)
    return hook


class BucketState:
    """What one bucket's link remembers, cut into its parameters."""

    def __init__(
        self, codec: Codec, names: Sequence[str], parameters: Sequence[Tensor], like: Tensor, rank: int, count: Tensor
    ) -> None:
        self.names = tuple(names)
        self._parameters = [(p.numel(), p.shape, _strides(p)) for p in parameters]
        self._numel = like.numel()
        self._count = count
        self.memory: dict[str, Any] = {}
        self.codec_state: CodecState = codec.fitted([p.shape for p in parameters]).codec_state(
            self._remember, like, key=rank
        )

    def _remember(self, **initial: Any) -> Memory:
        # Vectors that begin alike must not be one and the same.
        own = {name: v.clone() if isinstance(v, Tensor) else v for name, v in initial.items()}
        if "count" in own:
            own["count"] = self._count
        self.memory |= own  # A link may ask for memory twice.
        return Memory(**own)

    @property
    def adapted(self) -> Adapted:
        return self.memory.get("adapted", {})

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """All that is remembered for a parameter, as views: by what it is and the parameter's name."""
        for kind, value in self.memory.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel() == self._numel:
                yield from self._cut(kind, value)
        if isinstance(self.codec_state, FactorState):
            starts = {start: name for name, start in zip(self.names, self._starts(), strict=True)}
            for matrix, q in zip(self.codec_state.plan.matrices, self.codec_state.factors, strict=True):
                yield f"factors.{starts[matrix.where.start]}", q

    def _starts(self) -> list[int]:
        sizes = [size for size, _, _ in self._parameters]
        return [sum(sizes[:i]) for i in range(len(sizes))]

    def _cut(self, kind: str, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's piece as DDP lays it into its buckets: as the parameter itself lies in memory."""
        for name, start, (_, shape, strides) in zip(self.names, self._starts(), self._parameters, strict=True):
            yield f"{kind}.{name}", vector.as_strided(shape, strides, vector.storage_offset() + start)

    def take(self, saved: dict[str, Tensor], rank: int, hosts: Sequence[Sequence[int]]) -> None:
        """Go on with what is saved for these parameters, and take it out of there; the first rank of each host speaks for it."""
        for name, piece in self.pieces():
            if not name.startswith("owner_") and name in saved:
                piece.copy_(saved.pop(name))
        if "residual" in self.memory:
            self._take_owed(saved, rank, hosts)

    def _take_owed(self, saved: dict[str, Tensor], rank: int, hosts: Sequence[Sequence[int]]) -> None:
        """What this rank owes on behalf of all it still does in the stripe that it owns; what lies in another's it has to say
        itself, as many times as its host's share goes into the mean."""
        residual: Tensor = self.memory["residual"]
        owed = torch.zeros_like(residual)
        for name, piece in self._cut("owner_residual", owed):
            if name in saved:
                piece.copy_(saved.pop(name))
        speakers = sorted(min(host) for host in hosts)
        if "owner_residual" in self.memory and self.codec_state.codec.reduction == "stripes" and rank in speakers:
            own = stripe_of(speakers.index(rank), self._numel, len(speakers), unit=self.codec_state.codec.unit)
            self.memory["owner_residual"][own] = owed[own]
            owed[own] = 0.0
        residual.add_(owed, alpha=sum(map(len, hosts)) / len(next(host for host in hosts if rank in host)))


class DdpHook:
    """The hook; see `ddp_hook`.

    Saved with the model are, by parameter, what was not yet sent and what else the codec's link holds for it (DGC's velocity,
    PowerSGD's factors), how many random messages there were, and the settings that have adapted, by bucket: these are lost where
    DDP cuts its buckets otherwise, as it does after the first backward of a process, and where they hold other codecs.  Nothing
    that was not yet sent is lost by either.  But DDP throws away what is sent for a parameter that no rank has used in a step.
    """

    def __init__(self, codec: Codec, *, start: int = 0, timeout_s: float = 1800.0) -> None:
        if start < 0:
            raise ValueError(f"ddp_hook(start={start}): the steps before the codec are 0 or more")
        self.codec, self.start = codec, start
        self.steps = 0
        self.__name__ = self.__qualname__ = f"ddp_hook({codec})"  # DDP looks at the one and logs the other.
        self._timeout_s = timeout_s
        self._job: Job | None = None
        self._lane = CommThread()
        # The model is not held: DDP holds its hook where no garbage collector sees it, and both would stay for ever.
        self._is_registered = False
        self._names: dict[int, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._remains: dict[tuple[int, ...], BucketState] = {}
        # One for all buckets: no two messages may draw the same random numbers.
        self._count = torch.zeros(1, dtype=torch.int64)
        # What a saved state holds, until the bucket that it belongs to is met.
        self._saved: dict[str, Tensor] = {}
        self._saved_settings: dict[tuple[str, ...], Adapted] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a DDP, such as a mean of its weights is kept in, has no hook; what it holds of this one serves no model.
        return partial(DdpHook, start=self.start, timeout_s=self._timeout_s), (self.codec,)

    @property
    def trace(self) -> Trace:
        """What this rank exchanged so far, when, and how many bytes it sent."""
        return Trace() if self._job is None else self._job.endpoint.trace

    def __call__(self, state, bucket):  # pyright: ignore
        """Called by DDP for every bucket that backward has filled."""
        x: Tensor = bucket.buffer()
        if x.layout != torch.strided:
            raise ValueError(
                f"{self.__qualname__}: a parameter has a sparse gradient; codecs encode dense ones (Embedding(sparse=False))"
            )
        job = self._opened(x.device)
        done: Future[Tensor] = Future(devices=[x.device] if x.is_cuda else [])
        codec_state = self._codec_state(job, bucket) if self.steps >= self.start and job.workers > 1 else None
        self.steps += bucket.is_last()
        if job.workers == 1:
            done.set_result(x)
            return done
        ready = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None
        self._lane.ask("mean", partial(_exchange, job, x, codec_state, ready, done), lambda _: None)
        # An error set to a future is a result like any other to DDP; one that a callback raises is an error.
        return done.then(lambda future: future.value())

    def _opened(self, device: torch.device) -> Job:
        """This process's place among the ranks; they all open it together."""
        if self._job is None:
            # A group of its own: DDP's other collectives may run on the model's at the same time.
            job = Job(Needs(), device=device, apart=True, timeout_s=self._timeout_s)
            self._lane = lane = job.lane or self._lane
            weakref.finalize(self, _close, lane, job)
            self._agree(job)
            self._job = job
        return self._job

    def _agree(self, job: Job) -> None:
        job.store.set(f"hook/{job.rank}", f"ddp_hook({self.codec!r}{f', start={self.start}' if self.start else ''})")
        hooks = [job.store.get(f"hook/{rank}").decode() for rank in range(job.workers)]
        for rank, other in enumerate(hooks):
            if other != hooks[0]:
                raise ValueError(f"rank {rank} has {other}, but rank 0 has {hooks[0]}: all must have the same")

    def register(self, model: DistributedDataParallel) -> None:
        """Serve this model, and make what is remembered a part of its state."""
        if self._is_registered:
            raise RuntimeError(f"{self.__qualname__} serves another model already: make one for each")
        ranks = dist.get_world_size(model.process_group)
        if ranks != dist.get_world_size():
            raise ValueError(
                f"{self.__qualname__}: the model's process group has {ranks} of {dist.get_world_size()} ranks; "
                "the hook works among all of them"
            )
        named = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
        self._opened(named[0][1].device)  # DDP takes no model without.
        model.register_comm_hook(None, self)
        model.register_state_dict_post_hook(partial(self._save))  # torch sets an attribute on it, which methods refuse.
        model.register_load_state_dict_pre_hook(self._load)
        self._names = {id(p): n for n, p in named}
        self._shapes = {n: p.shape for n, p in named}
        self._is_registered = True

    def _codec_state(self, job: Job, bucket: dist.GradBucket) -> CodecState:
        parameters = bucket.parameters()
        key = tuple(id(p) for p in parameters)
        if key not in self._remains:
            self._retire(set(key))
            names = [self._names.setdefault(i, str(len(self._names))) for i in key]
            remains = BucketState(self.codec, names, parameters, bucket.buffer(), job.rank, self._count)
            remains.take(self._saved, job.rank, job.endpoint.hosts or [[rank] for rank in range(job.workers)])
            remains.adapted.update(self._saved_settings.pop(remains.names, {}))
            self._remains[key] = remains
        return self._remains[key].codec_state

    def _retire(self, parameters: set[int]) -> None:
        """Buckets that hold one of these are no more: DDP cuts its buckets anew after the first backward."""
        for key in [k for k in self._remains if parameters & set(k)]:
            remains = self._remains.pop(key)
            self._saved |= {name: piece.clone() for name, piece in remains.pieces()}
            self._saved_settings[remains.names] = remains.adapted

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank has not yet sent and what else it goes on with, by parameter; between backward passes."""
        if not self._is_registered:
            raise RuntimeError(NO_MODEL.format(self.__qualname__))
        state = {name: value.clone() for name, value in self._saved.items()}
        settings = dict(self._saved_settings)
        for remains in self._remains.values():
            state |= {name: piece.clone() for name, piece in remains.pieces()}
            settings[remains.names] = remains.adapted
        if written := _written(settings):
            state["adapted"] = torch.tensor(list(written), dtype=torch.uint8)
        if self.codec.is_random:
            state["count"] = self._count.clone()
        return state | {"rank": torch.tensor(dist.get_rank()), "steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from `state_dict`; between backward passes."""
        if not self._is_registered:
            raise RuntimeError(NO_MODEL.format(self.__qualname__))
        if (saved_by := int(state["rank"])) != dist.get_rank():
            warnings.warn(OTHER_RANK.format(saved_by, dist.get_rank()), stacklevel=2)
            state = {name: value for name, value in state.items() if name.partition(".")[0] in COMMON}
        vectors = {name: value for name, value in state.items() if "." in name}
        for name, value in vectors.items():
            self._check(name, value)
        # All is right: nothing has changed before.
        self._remains.clear()
        self._saved = {name: value.clone() for name, value in vectors.items()}
        self._saved_settings = _read(state.get("adapted"))
        self._count.fill_(int(state.get("count", self._count)))
        self.steps = int(state["steps"])

    def _check(self, name: str, value: Tensor) -> None:
        kind, _, parameter = name.partition(".")
        if parameter not in self._shapes:
            raise ValueError(
                f"{self.__qualname__}: the saved '{name}' belongs to no parameter of this model that is trained"
            )
        shape = self._shapes[parameter]
        if kind == "factors":  # Of another rank they serve nobody, and of another codec they wait in vain.
            shape = torch.Size(
                [getattr(self.codec, "rank", len(value)), shape.numel() // shape[0] if len(shape) > 1 else -1]
            )
        if value.shape != shape:
            raise ValueError(
                f"{self.__qualname__}: the saved '{name}' has the shape {tuple(value.shape)}, for parameter '{parameter}' "
                f"of the shape {tuple(self._shapes[parameter])} it must have {tuple(shape)}"
            )

    def _save(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        if self._is_registered:
            state.update({f"{prefix}{KEY}{name}": value for name, value in self.state_dict().items()})

    def _load(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        mine = {k: state.pop(k) for k in list(state) if k.startswith(f"{prefix}{KEY}")}
        if mine and self._is_registered:
            self.load_state_dict({k.removeprefix(f"{prefix}{KEY}"): v for k, v in mine.items()})


# What the lane holds must not hold the hook: it would be the lane's own thread that ends it.


def _exchange(
    job: Job, x: Tensor, codec_state: CodecState | None, ready: torch.Event | None, done: "Future[Tensor]"
) -> None:
    try:
        with torch.cuda.stream(torch.cuda.Stream(x.device) if x.is_cuda else None):
            if ready is not None:
                ready.wait()
            # Every rank counts alike, as in DDP; a NaN anywhere becomes a NaN everywhere, as in a sum.
            vote = SyncVote(1.0, rank=job.rank)
            drive(
                mean(job.endpoint, x, vote) if codec_state is None else mean_encoded(job.endpoint, x, vote, codec_state)
            )
            done.set_result(x)
    except Exception as error:
        done.set_exception(error)  # pyright: ignore[reportArgumentType]
    except BaseException as error:  # DDP would wait for ever.
        done.set_exception(RuntimeError(f"the exchange was broken off by {error!r}"))  # pyright: ignore[reportArgumentType]


def _close(lane: CommThread, job: Job) -> None:
    if lane.is_here():  # Garbage is collected by any thread, and none can wait for itself.
        threading.Thread(target=_close, args=(lane, job), daemon=True).start()
        return
    lane.close()
    job.close()


def _strides(p: Tensor) -> tuple[int, ...]:
    """How DDP lays a parameter into a bucket: as it lies itself, if it has neither gaps nor overlaps, else row by row."""
    like = torch.empty_like(p, device="meta")
    return p.stride() if like.stride() == p.stride() else torch.empty(p.shape, device="meta").stride()


def _written(settings: dict[tuple[str, ...], Adapted]) -> bytes:
    """Settings of buckets as text, those that are plain; nothing if there are none."""
    plain: list[str] = []
    for names, adapted in settings.items():
        try:
            if adapted:
                plain.append(json.dumps([names, adapted]))
        except TypeError:
            continue
    return f"[{','.join(plain)}]".encode() if plain else b""


def _read(written: Tensor | None) -> dict[tuple[str, ...], Adapted]:
    return {} if written is None else {tuple(names): adapted for names, adapted in json.loads(bytes(written.tolist()))}
