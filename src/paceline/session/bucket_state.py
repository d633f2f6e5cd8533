"""The codec state of DDP's buckets, by parameter.

DDP may change its buckets: after the first backward pass of a process, and between a saved run and a resumed one.  So
what a codec remembers of a bucket is saved by parameter, and given to the bucket that holds the parameter next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.codecs.codec import Codec, CodecState
from paceline.codecs.power_sgd import FactorState
from paceline.state import ResizeRule
from paceline.stripes import stripe_of

# The slots of a codec's state that are not simply one value for each value of the bucket.
RESIDUALS = "residuals"  # Fields `residual`, `shares`; `owner_residual` if reduced by stripes; DGC's `velocity`.
MESSAGES = "messages"  # Field `count`, of messages that drew random numbers.
SETTINGS = "settings"  # Field `adapted`, by the part of the bucket.
FACTORS = "factors"  # PowerSGD's, by matrix.

Settings = dict[str, dict[str, Any]]
Hosts = Sequence[Sequence[int]]
"""The ranks of each host."""


class Piece(NamedTuple):
    """What one field of a slot holds for one parameter; a view."""

    field: str
    parameter: str
    values: Tensor

    @property
    def key(self) -> str:
        return f"{self.field}.{self.parameter}"


class BucketState:
    """The codec state of one bucket: its slots, and their pieces by parameter."""

    def __init__(
        self,
        codec: Codec,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        like: Tensor,
        rank: int,
        shared: Mapping[str, SimpleNamespace],
    ) -> None:
        """`shared` are the slots that all buckets have in common."""
        self.names = tuple(names)
        self.slots: dict[str, SimpleNamespace] = {}
        self._shared = shared
        self._numel = like.numel()
        self._shapes = [(p.shape, _strides(p)) for p in parameters]
        sizes = [p.numel() for p in parameters]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        fitted = codec.fitted([p.shape for p in parameters])
        self.codec_state: CodecState = fitted.codec_state(self._remember, like, key=rank)

    def _remember(self, name: str, /, *, rule: ResizeRule, version: int = 1, **initial: Any) -> SimpleNamespace:
        if name in self._shared:
            self.slots[name] = self._shared[name]
        else:
            # A codec may give one tensor for two fields; each field needs its own.
            fields = {field: v.clone() if isinstance(v, Tensor) else v for field, v in initial.items()}
            self.slots[name] = SimpleNamespace(**fields)
        return self.slots[name]

    @property
    def settings(self) -> Settings:
        """The codec's settings that have adapted."""
        return self.slots[SETTINGS].adapted if SETTINGS in self.slots else {}

    def pieces(self) -> Iterator[Piece]:
        """All pieces of all slots."""
        for name, slot in self.slots.items():
            if name == FACTORS and isinstance(self.codec_state, FactorState):
                yield from self._factors(self.codec_state)
                continue
            for field, value in vars(slot).items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel() == self._numel:
                    yield from self._cut(field, value)

    def _factors(self, codec_state: FactorState) -> Iterator[Piece]:
        names = dict(zip(self._starts, self.names, strict=True))
        for matrix, q in zip(codec_state.plan.matrices, codec_state.factors, strict=True):
            yield Piece(FACTORS, names[matrix.where.start], q)

    def _cut(self, field: str, vector: Tensor) -> Iterator[Piece]:
        """The piece of each parameter, with the strides that it has in DDP's bucket."""
        for name, start, (shape, strides) in zip(self.names, self._starts, self._shapes, strict=True):
            yield Piece(field, name, vector.as_strided(shape, strides, vector.storage_offset() + start))

    def restore(self, saved: dict[str, Tensor], rank: int, hosts: Hosts) -> None:
        """Continue with the saved pieces of these parameters, and remove them from `saved`."""
        for piece in self.pieces():
            if piece.field != "owner_residual" and piece.key in saved:
                piece.values.copy_(saved.pop(piece.key))
        if RESIDUALS in self.slots:
            self._restore_owner_residual(saved, rank, hosts)

    def _restore_owner_residual(self, saved: dict[str, Tensor], rank: int, hosts: Hosts) -> None:
        """Restore the residual of the sums that this rank sent as the owner of a stripe.

        The rank keeps what lies in the stripe that it owns now.  The rest goes to its own residual, divided by its
        share of a mean, because the mean multiplies by it.  Owners are the first ranks of hosts.
        """
        slot = self.slots[RESIDUALS]
        owned = torch.zeros_like(slot.residual)
        for piece in self._cut("owner_residual", owned):
            if piece.key in saved:
                piece.values.copy_(saved.pop(piece.key))
        owners = sorted(min(host) for host in hosts)
        codec = self.codec_state.codec
        is_striped = codec.reduction_among(len(owners)) == "stripes"
        if hasattr(slot, "owner_residual") and is_striped and rank in owners:
            stripe = stripe_of(owners.index(rank), self._numel, len(owners), unit=codec.unit)
            slot.owner_residual[stripe] = owned[stripe]
            owned[stripe] = 0.0
        slot.residual.add_(owned, alpha=1 / share_of(rank, hosts))


class BucketStates:
    """The codec states of all buckets of a model, and saved pieces whose bucket was not seen yet."""

    def __init__(self, codec: Codec, label: str) -> None:
        """`label` names the hook in error texts."""
        self.codec = codec
        self.states: dict[tuple[int, ...], BucketState] = {}  # By the ids of the bucket's parameters.
        self._label = label
        self._names: dict[int, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        # All buckets share the count: no two messages may draw the same random numbers.
        self._messages = SimpleNamespace(count=torch.zeros(1, dtype=torch.int64))
        self._saved: dict[str, Tensor] = {}
        # This rank's share of the means in which the residuals were made; another one only after a load.
        self._share: float | None = None
        self._saved_settings: dict[tuple[str, ...], Settings] = {}

    def set_parameters(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Use these names for the model's parameters."""
        self._names = {id(p): name for name, p in named}
        self._shapes = {name: p.shape for name, p in named}

    def codec_state(self, bucket: dist.GradBucket, rank: int, hosts: Hosts) -> CodecState:
        """The codec state of a bucket; a bucket that was not seen before takes over the pieces of its parameters."""
        parameters = bucket.parameters()
        ids = tuple(id(p) for p in parameters)
        if ids not in self.states:
            self._retire(set(ids))
            self._follow_share(share_of(rank, hosts))
            names = [self._names.setdefault(i, str(len(self._names))) for i in ids]
            state = BucketState(self.codec, names, parameters, bucket.buffer(), rank, {MESSAGES: self._messages})
            state.restore(self._saved, rank, hosts)
            state.settings.update(self._saved_settings.pop(state.names, {}))
            self.states[ids] = state
        return self.states[ids].codec_state

    def _retire(self, ids: set[int]) -> None:
        """Save the pieces of all buckets that hold one of these parameters: DDP no longer uses these buckets."""
        for old in [old for old in self.states if ids & set(old)]:
            state = self.states.pop(old)
            self._saved |= {piece.key: piece.values.clone() for piece in state.pieces()}
            self._saved_settings[state.names] = state.settings

    def _follow_share(self, share: float) -> None:
        """Bring residuals and velocities of a run with another number of ranks into units of this rank's share."""
        if self._share not in (None, share):
            for key in [key for key in self._saved if key.startswith(("residual.", "velocity."))]:
                self._saved[key] = self._saved[key] * (self._share / share)
        self._share = share

    def state_dict(self) -> dict[str, Tensor]:
        saved = {key: values.clone() for key, values in self._saved.items()}
        settings = dict(self._saved_settings)
        for state in self.states.values():
            saved |= {piece.key: piece.values.clone() for piece in state.pieces()}
            settings[state.names] = state.settings
        if encoded := _encoded(settings):
            saved["adapted"] = torch.tensor(list(encoded), dtype=torch.uint8)
        if self._share is not None and self.codec.feedback:
            saved["share"] = torch.tensor(self._share, dtype=torch.float64)
        if self.codec.is_random:
            saved["count"] = self._messages.count.clone()
        return saved

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state; if a part of it does not fit, raise ValueError and change nothing."""
        pieces = {key: values for key, values in state.items() if "." in key}
        for key, values in pieces.items():
            self._check(key, values)
        self.states.clear()
        self._saved = {key: values.clone() for key, values in pieces.items()}
        self._share = float(state["share"]) if "share" in state else None
        self._saved_settings = _decoded(state.get("adapted"))
        self._messages.count.fill_(int(state.get("count", self._messages.count)))

    def _check(self, key: str, values: Tensor) -> None:
        field, _, parameter = key.partition(".")
        if parameter not in self._shapes:
            raise ValueError(f"{self._label}: the saved '{key}' belongs to no trainable parameter of this model")
        shape = self._shapes[parameter]
        expected = shape
        if field == FACTORS:  # Factors of another codec, which has no rank, are kept but never used.
            columns = shape.numel() // shape[0] if len(shape) > 1 else -1
            expected = torch.Size([getattr(self.codec, "rank", len(values)), columns])
        if values.shape != expected:
            raise ValueError(
                f"{self._label}: the saved '{key}' has the shape {tuple(values.shape)}; for the parameter "
                f"'{parameter}' of the shape {tuple(shape)} it must be {tuple(expected)}"
            )


def share_of(rank: int, hosts: Hosts) -> float:
    """The share of a mean that this rank sends, if it is the first of its host: each rank has the same weight."""
    return len(next(host for host in hosts if rank in host)) / sum(map(len, hosts))


def _strides(p: Tensor) -> tuple[int, ...]:
    """The strides of a parameter in DDP's bucket: its own if it is dense and does not overlap, else row by row."""
    like = torch.empty_like(p, device="meta")
    return p.stride() if like.stride() == p.stride() else torch.empty(p.shape, device="meta").stride()


def _encoded(settings: Mapping[tuple[str, ...], Settings]) -> bytes:
    """The settings of all buckets as JSON, without those that are not plain data; empty if there are none."""
    plain: list[str] = []
    for names, adapted in settings.items():
        try:
            if adapted:
                plain.append(json.dumps([names, adapted]))
        except TypeError:
            continue
    return f"[{','.join(plain)}]".encode() if plain else b""


def _decoded(encoded: Tensor | None) -> dict[tuple[str, ...], Settings]:
    return {} if encoded is None else {tuple(names): adapted for names, adapted in json.loads(bytes(encoded.tolist()))}
