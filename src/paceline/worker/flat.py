"""FlatModel: a model's trainable parameters as one vector, cut into buckets in the order in which backward fills them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paceline.codecs.layout import is_finite
from paceline.worker.rows import rows

BUCKET_BYTES = 8 << 20
FIRST_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Bucket:
    """A stretch of the gradient that is exchanged as one: `grad` is `grads[where]`."""

    index: int
    where: slice
    grad: Tensor
    parameters: tuple[int, ...]


class FlatModel:
    """The vector view of a model.

    After construction every trainable parameter is a view into `params`; `grads` has the same layout.  Gradients reach
    `grads` by `collect`, which copies only those that backward did not already put there.
    """

    def __init__(self, model: nn.Module, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.model = model
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError(
                f"{type(model).__name__} has no parameter that requires a gradient: there is nothing to train"
            )
        first_name, first = named[0]
        for name, p in named:
            if p.dtype != first.dtype or p.device != first.device:
                raise ValueError(
                    f"parameter '{name}' is {p.dtype} on {p.device}, but '{first_name}' is {first.dtype} on {first.device}: "
                    "all trainable parameters must share one dtype and device (freeze, cast or move the others before)"
                )
            if not p.dtype.is_floating_point:
                raise ValueError(
                    f"parameter '{name}' is {p.dtype}: only real floating-point parameters can be averaged"
                )
        self.names = [n for n, _ in named]
        self.parameters = [p for _, p in named]
        self.offsets = [0]
        for p in self.parameters:
            self.offsets.append(self.offsets[-1] + p.numel())
        self.params = torch.empty(self.numel, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros_like(self.params)
        self._views = [self.grads[self.where(i)].view(p.shape) for i, p in enumerate(self.parameters)]
        with torch.no_grad():
            for i, p in enumerate(self.parameters):
                view = self.params[self.where(i)].view(p.shape)
                view.copy_(p)
                p.data = view
        self.is_shared = False  # Whether others may write to `params`.
        self.sparse_rows = False  # Whether sparse gradients are welcome,
        self._rows: dict[int, Tensor] = {}  # and which rows of them were the last.
        self.buckets = self._cut(bucket_bytes)
        self.bucket_of = {i: b for b in self.buckets for i in b.parameters}

    def rebind(self, vector: Tensor, *, is_shared: bool) -> None:
        """From now on, use this memory for `params`, with the values that are in it; whether others have it in common."""
        self.params, self.is_shared = vector, is_shared
        for i, p in enumerate(self.parameters):
            p.data = vector[self.where(i)].view(p.shape)

    def rebind_grads(self, vector: Tensor) -> None:
        """From the next gradient on, use this memory for `grads`."""
        if vector is self.grads:
            return
        exposed = [i for i, p in enumerate(self.parameters) if p.grad is self._views[i]]
        self.grads = vector
        self._views = [vector[self.where(i)].view(p.shape) for i, p in enumerate(self.parameters)]
        self.buckets = [replace(b, grad=vector[b.where]) for b in self.buckets]
        self.bucket_of = {i: b for b in self.buckets for i in b.parameters}
        self._rows.clear()
        for i in exposed:
            self.expose(i)

    @property
    def numel(self) -> int:
        return self.offsets[-1]

    def where(self, index: int) -> slice:
        return slice(self.offsets[index], self.offsets[index + 1])

    def _cut(self, bucket_bytes: int) -> list[Bucket]:
        """Buckets of at least so many bytes; a smaller one first, so that the exchange begins early."""
        buckets: list[Bucket] = []
        stop = len(self.parameters)
        while stop:
            room = bucket_bytes if buckets else min(bucket_bytes, FIRST_BUCKET_BYTES)
            start = stop - 1
            while start and (self.offsets[stop] - self.offsets[start]) * self.params.element_size() < room:
                start -= 1
            where = slice(self.offsets[start], self.offsets[stop])
            buckets.append(Bucket(len(buckets), where, self.grads[where], tuple(range(start, stop))))
            stop = start
        return buckets

    def emit_zeros(self, each: Callable[[Bucket], None] | None) -> None:
        """A gradient of zeros, bucket by bucket: what a worker without data brings to an exchange."""
        self.grads.zero_()
        if each is not None:
            for bucket in self.buckets:
                each(bucket)

    def collect(self, index: int) -> None:
        """Bring one parameter's gradient into the vector, zeros if it has none."""
        view, grad = self._views[index], self.parameters[index].grad
        if grad is None:
            view.zero_()
        elif grad is not view:
            if grad.is_sparse:
                self._collect_rows(index, view, grad)
            else:
                view.copy_(grad)

    def _collect_rows(self, index: int, view: Tensor, grad: Tensor) -> None:
        if not self.sparse_rows or grad.sparse_dim() != 1:
            raise ValueError(
                f"parameter '{self.names[index]}' has a sparse gradient, which this strategy cannot exchange (sparse=False); a parameter "
                "server with sparse=True can, if it is sparse by rows"
            )
        grad = grad.coalesce()
        if index in self._rows:
            view[self._rows[index]] = 0.0
        else:
            view.zero_()
        self._rows[index] = grad.indices()[0]
        view[self._rows[index]] = grad.values()

    def touched_runs(self) -> Tensor:
        """What of the gradient may not be zero: rows of sparse gradients, and all of the others, as `rows` has it."""
        return torch.cat([self._runs(i, p) for i, p in enumerate(self.parameters) if p.numel()])

    def _runs(self, index: int, p: Tensor) -> Tensor:
        start = self.offsets[index]
        if index not in self._rows:
            return torch.tensor([[start, p.numel()]])
        return rows(start, p.numel() // p.shape[0], self._rows[index].cpu())

    def collect_all(self) -> None:
        """The same for all of them at once."""
        for i in range(len(self.parameters)):
            self.collect(i)

    def expose(self, index: int) -> None:
        """Let the optimizer read a parameter's gradient out of the vector."""
        self.parameters[index].grad = self._views[index]

    def buffers(self) -> Tensor:
        """What the model gathers beside its parameters (BatchNorm's statistics and counters) as one vector of float64."""
        found = [b.detach().reshape(-1).to("cpu", torch.float64) for b in self._statistics()]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.float64)

    def set_buffers(self, everyones: Sequence[Tensor], weights: Sequence[float], since: Tensor | None = None) -> None:
        """The weighted mean of several workers' `buffers()`; of those that count in integers, the largest.

        What all have alike, such as a mask of infinities, is not touched, and what is not finite does not count.  What has changed
        here `since` they were collected stays on top.
        """
        if not everyones[0].numel():
            return
        values = torch.stack(list(everyones))
        shares = torch.tensor(weights, dtype=torch.float64).unsqueeze(1) * values.isfinite()
        mean = values.nan_to_num(0.0, 0.0, 0.0).mul_(shares).sum(0) / shares.sum(0)
        largest = values.amax(0)
        differs = (values != values[0]).any(0) & (shares.sum(0) > 0)
        if since is not None:
            now = self.buffers()
            mean, largest = carry_over(mean, now, since), largest + (now - since).nan_to_num(0.0, 0.0, 0.0)
            differs |= now != since
        start = 0
        for b in self._statistics():
            where = slice(start, start + b.numel())
            chosen = (mean if b.dtype.is_floating_point else largest)[where].view(b.shape)
            b.copy_(torch.where(differs[where].view(b.shape).to(b.device), chosen.to(b), b))
            start += b.numel()

    def _statistics(self) -> list[Tensor]:
        """The buffers that workers share: not masks, nor what is not saved with the model, nor complex ones."""
        found = {
            id(b): b
            for module in self.model.modules()
            for name, b in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set and not b.dtype.is_complex and b.dtype != torch.bool  # pyright: ignore
        }
        return list(found.values())

    def locate(self, position: int) -> str:
        """The name of the parameter that holds a position of the vector."""
        return next(n for n, stop in zip(self.names, self.offsets[1:], strict=True) if position < stop)

    def first_nonfinite(self, where: slice = slice(None)) -> str | None:
        """The parameter with the first NaN or infinity in that stretch of the gradient; None if all is finite."""
        part = self.grads[where]
        if is_finite(part):
            return None
        return self.locate((where.start or 0) + int(part.isfinite().logical_not().nonzero()[0]))

    def first_nonfinite_grad(self) -> str | None:
        """The same, for the gradients where backward has left them."""
        grads = {n: p.grad for n, p in zip(self.names, self.parameters, strict=True) if p.grad is not None}
        # All sums are looked at together: on a GPU every look waits for it.
        if not grads or math.isfinite(torch.stack([g.sum() for g in grads.values()]).sum()):
            return None
        return next((n for n, g in grads.items() if not is_finite(g)), None)


def carry_over(mean: Tensor, now: Tensor, sent: Tensor) -> Tensor:
    """A mean of what was sent, with what has changed since on top, but no further than either: what decays, such as a variance,
    must not be carried below zero."""
    return torch.minimum(torch.maximum(mean + (now - sent), torch.minimum(mean, now)), torch.maximum(mean, now))
