"""FlatModel: a model's trainable parameters as one vector, in buckets in the order in which backward fills them."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paceline.codecs.layout import is_finite
from paceline.worker.buffers import read_buffers, set_buffers
from paceline.worker.narrow import Narrow, common_dtype
from paceline.worker.rows import rows
from paceline.worker.tensors import (
    distributed_like,
    is_distributed,
    local,
    local_grad,
    refuse_shared_memory,
    refuse_without_values,
)

BUCKET_BYTES = 8 << 20
FIRST_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Bucket:
    """A part of the gradient that is exchanged in one piece: `grad` is `grads[where]`."""

    index: int
    where: slice
    grad: Tensor
    parameters: tuple[int, ...]


def cut(grads: Tensor, offsets: Sequence[int], bucket_bytes: int) -> list[Bucket]:
    """Cut a gradient into buckets of at least `bucket_bytes`; the first is smaller, to start the exchange early.

    The values of parameter i are at `offsets[i]` to `offsets[i + 1]`.
    """
    buckets: list[Bucket] = []
    stop = len(offsets) - 1
    while stop:
        room = bucket_bytes if buckets else min(bucket_bytes, FIRST_BUCKET_BYTES)
        start = stop - 1
        while start and (offsets[stop] - offsets[start]) * grads.element_size() < room:
            start -= 1
        where = slice(offsets[start], offsets[stop])
        buckets.append(Bucket(len(buckets), where, grads[where], tuple(range(start, stop))))
        stop = start
    return buckets


class FlatModel:
    """The vector view of a model.

    After construction every trainable parameter is a view into `params`; `grads` has the same layout.  `collect` copies
    a gradient into `grads`, unless backward has already written it there.  Of a DTensor, which is refused unless
    `takes_parts`, the vector has the local part.

    If parameters have several dtypes, the vector has the one that holds all values, and narrower parameters are no
    views: see `Narrow`.
    """

    def __init__(self, model: nn.Module, *, bucket_bytes: int = BUCKET_BYTES, takes_parts: bool = False) -> None:
        self.model = model
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError(
                f"{type(model).__name__} has no parameter that requires a gradient: there is nothing to train"
            )
        _check_together(named, takes_parts=takes_parts)
        refuse_shared_memory(model)
        self.names = [n for n, _ in named]
        self.parameters = [p for _, p in named]
        self.offsets = [0]
        for p in self.parameters:
            self.offsets.append(self.offsets[-1] + local(p).numel())
        dtype = common_dtype(named)
        self.params = torch.empty(self.numel, dtype=dtype, device=named[0][1].device)
        self.grads = torch.zeros_like(self.params)
        self._views: list[Tensor] = []  # Of `grads`, as gradients of the parameters.
        self._set_views()
        self.narrow = Narrow({i: p for i, p in enumerate(self.parameters) if p.dtype != dtype})
        with torch.no_grad():
            for part, p in zip(self.parts(self.params), self.parameters, strict=True):
                part.copy_(local(p))
        self.rebind(self.params, is_shared=False)
        self.repeated: list[slice] = []  # Parts of the vector that another rank of this replica counts.
        self.reached = [True] * len(named)  # Whether a backward pass reached each parameter; see `expose_all`.
        self.late: dict[int, Tensor] = {}  # By parameter: what a codec delivered while no backward pass reached it.
        self.method = "this strategy"  # The name of what trains the model, for errors.
        self.sparse_rows = False  # Whether the strategy can exchange sparse gradients.
        self._rows: dict[int, Tensor] = {}  # By parameter: the rows of the last sparse gradient.
        self.buckets = cut(self.grads, self.offsets, bucket_bytes)
        self.bucket_of = {i: b for b in self.buckets for i in b.parameters}

    def rebind(self, vector: Tensor, *, is_shared: bool) -> None:
        """Use this memory for `params` from now on, with the values it holds; if shared, others may write to it."""
        assert not (is_shared and self.narrow), "narrower parameters cannot be views of the shared memory"
        self.params = vector
        self.is_shared = is_shared
        parts = self.parts(vector)
        for i, p in enumerate(self.parameters):
            if i not in self.narrow:
                local(p).data = parts[i]
        self.narrow.bind(parts)
        self.publish()

    def parts(self, vector: Tensor) -> list[Tensor]:
        """The part of each parameter in a vector, with its shape."""
        return [vector[self.where(i)].view(shape) for i, shape in enumerate(self.shapes)]

    def publish(self) -> None:
        """The model may run now: let parameters that are no views take the vector's values, rounded to their dtype."""
        self.narrow.publish()

    def refresh(self) -> None:
        """The model has run: let the vector take the values of parameters that are no views."""
        self.narrow.refresh()

    def round(self, vector: Tensor) -> Tensor:
        """Round a vector in place to values that the parameters can hold."""
        if self.narrow:
            self.narrow.round(self.parts(vector))
        return vector

    @contextmanager
    def in_vector(self) -> Generator[None]:
        """In this block a strategy runs, and the vector counts; outside of it the parameters do."""
        self.refresh()
        try:
            yield
        finally:
            self.publish()

    @contextmanager
    def showing(self, vector: Tensor | None) -> Generator[None]:
        """In this block the model may run, with the parameters of another vector, if one is given."""
        before = None if vector is None else self.params.clone()
        if vector is not None:
            self.params.copy_(vector)
        self.publish()
        try:
            yield
        finally:
            if before is not None:
                self.params.copy_(before)
                self.publish()

    def rebind_grads(self, vector: Tensor) -> None:
        """Use this memory for `grads`, from the next gradient on."""
        if vector is self.grads:
            return
        exposed = [i for i, p in enumerate(self.parameters) if p.grad is self._views[i]]
        self.grads = vector
        self._set_views()
        self.buckets = [replace(b, grad=vector[b.where]) for b in self.buckets]
        self.bucket_of = {i: b for b in self.buckets for i in b.parameters}
        self._rows.clear()
        for i in exposed:
            self.expose(i)

    def _set_views(self) -> None:
        parts = self.parts(self.grads)
        self._views = [distributed_like(part, p) for part, p in zip(parts, self.parameters, strict=True)]

    @property
    def shapes(self) -> list[torch.Size]:
        """The shape of each parameter, as far as this rank holds it."""
        return [local(p).shape for p in self.parameters]

    def counted_once(self, measure: Callable[[slice], float], where: slice) -> float:
        """A measure of a part of the vector, such as a squared norm, to be summed over the ranks of this replica."""
        parts = (slice(max(part.start, where.start), min(part.stop, where.stop)) for part in self.repeated)
        return measure(where) - sum(measure(part) for part in parts if part.start < part.stop)

    @property
    def numel(self) -> int:
        return self.offsets[-1]

    def where(self, index: int) -> slice:
        return slice(self.offsets[index], self.offsets[index + 1])

    def emit_zeros(self, each: Callable[[Bucket], None] | None) -> None:
        """Set the gradient to zero and emit every bucket: so a worker without data takes part in an exchange."""
        self.grads.zero_()
        self.reached = [False] * len(self.parameters)
        if each is not None:
            for bucket in self.buckets:
                each(bucket)

    def collect(self, index: int) -> None:
        """Copy one parameter's gradient into the vector, or zeros if it has none."""
        parameter = self.parameters[index]
        self.reached[index] = parameter.grad is not None
        if parameter.grad is self._views[index]:
            return
        view, grad = local(self._views[index]), local_grad(parameter)
        if grad is None:
            view.zero_()
        elif grad.is_sparse:
            self._collect_rows(index, view, grad)
        else:
            view.copy_(grad)

    def _collect_rows(self, index: int, view: Tensor, grad: Tensor) -> None:
        if not self.sparse_rows or grad.sparse_dim() != 1:
            raise ValueError(
                f"parameter '{self.names[index]}' has a sparse gradient, which {self.method} cannot exchange: let the "
                "layer make dense gradients (nn.Embedding(sparse=False)), or use a strategy that exchanges sparse rows "
                "(ParameterServer(sparse=True)) or whose workers step alone (PeriodicAveraging, Hogwild)"
            )
        grad = grad.coalesce()
        if index in self._rows:
            view[self._rows[index]] = 0.0
        else:
            view.zero_()
        self._rows[index] = grad.indices()[0]
        view[self._rows[index]] = grad.values().to(view.dtype)

    def touched_runs(self) -> Tensor:
        """The runs (see `rows`) that may hold nonzero values: touched rows of sparse gradients, and all dense ones."""
        return torch.cat([self._runs(i, p) for i, p in enumerate(self.parameters) if p.numel()])

    def _runs(self, index: int, p: Tensor) -> Tensor:
        start = self.offsets[index]
        if index not in self._rows:
            return torch.tensor([[start, p.numel()]])
        return rows(start, p.numel() // p.shape[0], self._rows[index].cpu())

    def collect_all(self) -> None:
        """Copy the gradients of all parameters into the vector."""
        for i in range(len(self.parameters)):
            self.collect(i)

    def expose(self, index: int) -> None:
        """Let the optimizer read a parameter's gradient from the vector; a narrower one gets a rounded copy."""
        view = self._views[index]
        self.parameters[index].grad = self.narrow.gradient(index, view) if index in self.narrow else view

    def expose_all(self, g: Tensor) -> None:
        """Let the optimizer read `g` from the parameters' `.grad`.

        A parameter that no backward pass reached has `.grad = None`, so that no optimizer changes it, not even by
        weight decay.  If `g` has values for it all the same, the strategy put them there.
        """
        if g.data_ptr() != self.grads.data_ptr():
            self.grads.copy_(g)
            self.reached = [True] * len(self.parameters)
        for i, p in enumerate(self.parameters):
            if self.reached[i] or self._views[i].any():
                self.expose(i)
            else:
                p.grad = None

    def take_changed(self) -> None:
        """Let the vector have what the user's code has changed in `.grad` since `expose_all`."""
        self.narrow.take_changed(self._views)

    def keep_late(self, parameters: Iterable[int]) -> None:
        """Keep what a codec delivers for parameters that no backward pass reached, until one reaches them.

        It is the rest of earlier gradients.  A step with it alone would decay the weights and move them by momentum.
        """
        for i in parameters:
            view = self._views[i]
            if self.reached[i]:
                if i in self.late:
                    view.add_(self.late.pop(i))
            elif view.any():
                self.late[i] = view + self.late[i] if i in self.late else view.clone()
                view.zero_()

    def buffers(self) -> Tensor:
        """The model's buffers (such as BatchNorm's statistics and counters) as one float64 vector."""
        return read_buffers(self.model)

    def set_buffers(
        self, from_workers: Sequence[Tensor], weights: Sequence[float], since: Tensor | None = None
    ) -> None:
        """Set the buffers to the weighted mean of several workers' `buffers()`; see `paceline.worker.buffers`."""
        set_buffers(self.model, from_workers, weights, since)

    def locate(self, position: int) -> str:
        """The name of the parameter that holds a position of the vector."""
        return next(n for n, stop in zip(self.names, self.offsets[1:], strict=True) if position < stop)

    def first_nonfinite(self, where: slice = slice(None)) -> str | None:
        """The name of the first parameter with NaN or infinity in that part of the gradient; None if all is finite."""
        part = self.grads[where]
        if is_finite(part):
            return None
        return self.locate((where.start or 0) + int(part.isfinite().logical_not().nonzero()[0]))

    def first_nonfinite_grad(self) -> str | None:
        """The same for the parameters' own `.grad`, before they are copied into the vector."""
        every = {n: local_grad(p) for n, p in zip(self.names, self.parameters, strict=True)}
        grads = {n: g for n, g in every.items() if g is not None}
        # One test for all sums: on a GPU every test waits for the device.
        if not grads or math.isfinite(torch.stack([g.sum() for g in grads.values()]).sum()):
            return None
        return next((n for n, g in grads.items() if not is_finite(g)), None)


def _check_together(named: Sequence[tuple[str, nn.Parameter]], *, takes_parts: bool) -> None:
    """Raise ValueError if these parameters cannot be parts of one vector."""
    first_name, first = named[0]
    for name, p in named:
        refuse_without_values(name, p)
        if is_distributed(p) and not takes_parts:
            raise ValueError(
                f"parameter '{name}' is a DTensor, of which this rank holds a part: give attach(mesh=...) the mesh "
                "of the replicas, such as mesh['replica'], or a model without tensor parallelism"
            )
        if p.device != first.device:
            raise ValueError(
                f"parameter '{name}' is on {p.device}, but '{first_name}' is on {first.device}: all trainable "
                "parameters must be on one device.  Move the model (model.to(device)), or freeze the others"
            )
        if not p.dtype.is_floating_point:
            raise ValueError(f"parameter '{name}' is {p.dtype}: only real floating-point parameters can be averaged")


def untie(parameters: Iterable[nn.Parameter]) -> None:
    """Give every parameter and its gradient memory of its own again.

    torch.save writes the whole memory behind a view, and safetensors refuses tensors that share memory.
    """
    for p in parameters:
        if _is_part(p):
            p.data = p.data.clone()
        if p.grad is not None and p.grad.layout is torch.strided and _is_part(p.grad):
            p.grad = p.grad.clone()


def _is_part(x: Tensor) -> bool:
    return x.untyped_storage().nbytes() > x.nbytes
