"""Deep gradient compression (Lin et al., ICLR 2018): top-k of gradients with momentum.

The sender computes the momentum, so values that are not sent yet have it too (momentum correction).  A value that was
sent loses its momentum, which would otherwise carry a stale direction on (masking).  Train with an optimizer without
momentum.  The first messages send more values, a quarter at first (warm-up).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.codecs.codec import Codec, CodecState, ErrorFeedback, Remember
from paceline.codecs.layout import aligned
from paceline.codecs.top_k import TopK
from paceline.state import ResizeRule

# Ratios during warm-up: 75 %, 93.75 %, 98.4375 % and 99.6 % of the values are not sent.
STAGES = (0.25, 0.0625, 0.015625, 0.004)


@dataclass(frozen=True)
class DGC(TopK):
    """Top-k with momentum at the sender, 8 bytes per value sent: at 0.1 % of the values 500 times smaller than fp32."""

    ratio: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    # Whether a value that was sent loses its momentum; not if all values are sent, because none would keep any.
    masking: bool = True
    # The largest norm of the mean gradient: each worker clips its own to clip / sqrt(workers).
    clip: float | None = None
    workers: int = 1
    # After this many messages, in four equal stages, `ratio` is reached.
    warmup: int = 0
    # How many messages the sender has sent.
    sent: int = field(default=0, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"{self}: momentum is from 0 to below 1")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"{self}: clip is a positive norm, or None")
        if self.workers < 1 or self.warmup < 0 or self.sent < 0:
            raise ValueError(f"{self}: workers is at least 1, and warmup at least 0")

    @property
    def has_momentum(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.momentum > 0

    def check_optimizer(self, groups: Iterable[Mapping[str, Any]], *, kind: str = "optimizer") -> None:
        settings = [(name.rpartition(".")[2], value) for group in groups for name, value in group.items()]
        given = next((value for name, value in settings if name == "momentum" and value), 0)
        if self.momentum and given:
            article = "an" if kind == "optimizer" else "a"
            raise ValueError(
                f"{self} with {article} {kind} of momentum {given}: DGC adds the momentum at the sender, and "
                f"the {kind} would add it again; give the {kind} momentum=0, or use DGC(momentum=0)"
            )

    def ratio_at(self, message: int) -> float:
        """The ratio of values sent in a message, counted from 0.

        >>> [DGC(warmup=8).ratio_at(i) for i in (0, 1, 2, 5, 7, 8)]
        [0.25, 0.25, 0.0625, 0.015625, 0.004, 0.001]
        """
        return self.ratio if message >= self.warmup else max(self.ratio, STAGES[len(STAGES) * message // self.warmup])

    def kept(self, numel: int) -> int:
        return min(numel, max(1, int(self.ratio_at(self.sent) * numel)))

    def nbytes(self, numel: int) -> int | None:
        # Messages of other stages are decoded too, so with warm-up the size is not fixed.
        return None if self.warmup else super().nbytes(numel)

    def most_nbytes(self, numel: int) -> int:
        return 8 * min(numel, max(1, int(self.ratio_at(0) * numel)))

    def check(self, data: Tensor, numel: int) -> None:
        super().check(data, numel)
        if data.numel() % 8 or not min(numel, 1) <= data.numel() // 8 <= self.most_nbytes(numel) // 8:
            self.malformed(data, numel, f"it has 8 bytes for each of at most {self.most_nbytes(numel) // 8} values")

    def adapted(self, data: Tensor, numel: int) -> Codec:
        return dataclasses.replace(self, sent=self.sent + 1) if self.sent < self.warmup else self

    def codec_state(self, remember: Remember, like: Tensor, key: int = 0) -> CodecState:
        slots: dict[str, Any] = {}

        def with_velocity(name: str, /, *, rule: ResizeRule, version: int = 1, **initial: Any) -> Any:
            """The slot with the residual also has the velocity, which has the same unit."""
            if "residual" in initial:
                initial["velocity"] = torch.zeros_like(initial["residual"])
            slots[name] = remember(name, rule=rule, version=version, **initial)
            return slots[name]

        errors = ErrorFeedback.remembered(self, with_velocity, like, key)
        return MomentumCorrection(self, errors, slots["residuals"].velocity)


class MomentumCorrection:
    """DGC with the state of one sender: it encodes the velocity, not the gradient."""

    def __init__(
        self,
        codec: DGC,
        errors: ErrorFeedback,
        velocity: Tensor,
        masked: dict[str, Tensor] | None = None,
        place: str = "",
    ) -> None:
        self.codec: Codec = codec
        self.settings = codec
        self.errors = errors
        self.velocity = velocity
        # The velocities that the last message of each part has set to zero, for `undo`.
        self._masked: dict[str, Tensor] = {} if masked is None else masked
        self._place = place

    def __getitem__(self, where: slice) -> MomentumCorrection:
        place = f"{self._place} {where.start or 0}:{where.stop}"
        return MomentumCorrection(self.settings, self.errors[where], self.velocity[where], self._masked, place)

    def owned(self, where: slice) -> CodecState:
        """The mean of velocities, which has momentum already."""
        return self.errors.owned(where)

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The bytes to send for the gradient `x`, in `out` if given; updates the velocity and the residual."""
        g = self._clipped(x)
        momentum = self.settings.momentum
        v = (self.velocity + g) * momentum if self.settings.nesterov else self.velocity * momentum + g
        data = self.errors.encode(v + g if self.settings.nesterov else v, out)  # If it raises, nothing has changed.
        self.velocity.copy_(v)
        self._masked.pop(self._place, None)
        if self.settings.masking and data.numel() < 8 * x.numel():
            indices = self._indices(data)
            self._masked[self._place] = v[indices]
            self.velocity[indices] = 0.0
        return data

    def encode_zero(self, numel: int, device: torch.device) -> Tensor:
        """A message of zeros; leaves the state as it is."""
        return self.errors.encode_zero(numel, device)

    def undo(self, x: Tensor, data: Tensor) -> None:
        """Restore the state, up to rounding, from before `encode(x)` gave `data`: the message was not used."""
        g = self._clipped(x)
        v = self.velocity
        if (masked := self._masked.pop(self._place, None)) is not None:
            v[self._indices(data)] = masked
        self.errors.undo(v + g if self.settings.nesterov else v, data)
        if self.settings.momentum == 0:  # Then the velocity lasts one step only.
            v.zero_()
        elif self.settings.nesterov:
            v.div_(self.settings.momentum).sub_(g)
        else:
            v.sub_(g).div_(self.settings.momentum)

    def undelivered(self, share: float) -> Tensor | None:
        """What this rank has still to deliver, in units of the mean; see `CodecState`."""
        return self.errors.undelivered(share)

    def weigh(self, weight: float) -> None:
        """Bring what is kept to the weight that the receiver gives to the next message, which is above 0."""
        assert self.errors.residual is not None
        self.errors.weigh_all([self.errors.residual, self.velocity], weight)

    def is_settled(self, share: float) -> bool:
        """Whether `settle` with this share would change nothing."""
        return self.errors.is_settled(share)

    def settle(self, x: Tensor, data: Tensor, share: float) -> None:
        """Keep what a mean did not deliver, in which `data`, the message for `x`, had this share of the weights.

        The velocity has the unit of the residual.  Of a message only the gradient counts for the share of this mean.
        The momentum of earlier gradients counts, as the residual does, for the unit that it had.
        """
        r, v = self.errors.residual, self.velocity
        assert r is not None
        if self.is_settled(share):
            return
        if not share:
            self.errors.settle_from([(r, r), (v, v)], share)
            return
        g = self._clipped(x)
        masked = self._masked.get(self._place)
        if masked is not None:
            v[self._indices(data)] = masked
        before = self.errors.before(v + g if self.settings.nesterov else v, data)
        carried = v.sub(g, alpha=self.settings.momentum if self.settings.nesterov else 1)  # Momentum of the past.
        self.errors.settle_from([(r, before.add_(carried)), (v, carried)], share)
        if masked is not None:
            v[self._indices(data)] = 0.0

    def add(self, data: Tensor, into: Tensor, weight: float = 1.0, *, fresh: bool = False) -> None:
        """Add the decoded bytes, times `weight`, to `into`; overwrite it if `fresh`."""
        self.errors.add(data, into, weight, fresh=fresh)

    def _clipped(self, x: Tensor) -> Tensor:
        g = x.detach().reshape(-1).to(self.velocity.dtype)
        if self.settings.clip is None:
            return g
        # In double precision, where no square of a float32 overflows.  A vector with a NaN stays, for `encode` to
        # refuse it.
        norm = torch.linalg.vector_norm(g, dtype=torch.float64).item()
        most = self.settings.clip * self.settings.workers**-0.5
        return g * (most / norm) if most < norm < math.inf else g

    @staticmethod
    def _indices(data: Tensor) -> Tensor:
        return aligned(data)[: data.numel() // 2].view(torch.int32).to(torch.int64)
