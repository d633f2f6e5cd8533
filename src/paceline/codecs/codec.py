"""Codec: a wire format for vectors, and the links that senders use it through.

A codec is frozen and stateless: it turns a vector into the very bytes that travel and back, defined in plain torch.  What it
loses is none of its business: `ErrorFeedback` remembers what was not sent and adds it the next time, whatever the codec.  Links
run the codec's fused kernels where there are any (`codecs/kernels`), which agree with the definition bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.noise import seed_of
from paceline.state import Resize, ResizeRule, resize_rule

Reduction = Literal["stripes", "gather", "factors"]


class Unencodable(ValueError):
    """A value that a codec has no code for: NaN, infinity, or beyond its range; `at` is where the first NaN or infinity is."""

    def __init__(self, message: str, at: int | None = None) -> None:
        super().__init__(message)
        self.at = at


class Codec(ABC):
    """A frozen dataclass of settings with three functions; see `codecs/one_bit.py` for a whole one."""

    feedback: ClassVar[bool] = True  # Whether a sender should remember what was left out.
    is_random: ClassVar[bool] = False  # Whether encoding draws random numbers.
    wire: ClassVar[torch.dtype | None] = (
        None  # The type in which encoded vectors may be summed as they are; None: they may not.
    )
    reduction: ClassVar[Reduction] = "stripes"  # How a group of ranks comes to the mean of vectors in this format.

    @property
    def unit(self) -> int:
        """How many values are encoded as one: a vector is best cut at multiples of it."""
        return 512

    @abstractmethod
    def nbytes(self, numel: int) -> int | None:
        """The exact size of `numel` encoded values; None if it depends on the values."""

    @abstractmethod
    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """A 1-D uint8 tensor: the bytes that travel.  Raises Unencodable with the place of what has no code."""

    @abstractmethod
    def decode(self, data: Tensor, numel: int) -> Tensor:
        """The float32 values that the bytes mean, possibly as a view of them.  Raises ValueError for bytes that mean none."""

    def most_nbytes(self, numel: int) -> int:
        """The size that no message of `numel` values exceeds."""
        nbytes = self.nbytes(numel)
        assert nbytes is not None, f"{self} is of variable size and must say how large it can become"
        return nbytes

    def part(self, where: slice) -> Codec:
        """The codec for a part of the vector; another one only if values are treated by their place."""
        return self

    def fitted(self, shapes: Sequence[torch.Size]) -> Codec:
        """The codec for a vector that these tensors make up; another one only if their shapes matter to it."""
        return self

    def adapted(self, data: Tensor, numel: int) -> Codec:
        """The codec for a sender's next message, after `data`; another one only if its settings follow what was sent."""
        return self

    def settings(self) -> dict[str, Any]:
        """All settings as plain data."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}  # pyright: ignore[reportArgumentType]

    def restored(self, settings: dict[str, Any]) -> Codec:
        """This codec with other `settings()`; what kind of codec it is, and is made of, does not come from there."""
        values = {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}
        inner = {n: getattr(self, n).restored(v) if isinstance(v, dict) else v for n, v in values.items()}
        return replace(self, **inner)  # pyright: ignore

    def codec_state(self, remember: Remember, like: Tensor, key: int = 0) -> CodecState:
        """The state of one sender that sends vectors like `like` in this format.

        `remember` makes a checkpointed slot, see `Remember`.  Senders with different keys draw different random numbers.
        """
        return ErrorFeedback.remembered(self, remember, like, key)

    def check(self, data: Tensor, numel: int) -> None:
        """Refuse bytes that cannot be `numel` encoded values."""
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise ValueError(
                f"{self} decodes a 1-D uint8 tensor, but was given {data.dtype} of shape {tuple(data.shape)}"
            )
        if data.numel() != (wanted := self.nbytes(numel)) and wanted is not None:
            raise ValueError(
                f"{self} encodes {numel} values in {wanted} bytes, but was given {data.numel()} bytes to decode"
            )

    def refuse(self, x: Tensor, why: str) -> None:
        """Raise Unencodable, naming the first value of `x` that is not finite, or for `why` if all are."""
        finite = x.isfinite()
        if finite.all():
            raise Unencodable(f"{self} cannot encode {x.numel()} values up to {x.abs().max().item():g}: {why}")
        at = int(finite.logical_not().nonzero()[0])
        raise Unencodable(f"{self} cannot encode {x[at].item():g} at index {at}: it is not finite", at)


class Remember(Protocol):
    """Makes a slot of a checkpoint: an object whose attributes are `initial`, or what a resumed run has saved of them.

    Each slot of a codec has a name of its own.  `rule` says which values all workers start with if their number changes;
    `version` increases when the meaning of the values changes.
    """

    def __call__(self, name: str, /, *, rule: ResizeRule, version: int = 1, **initial: Any) -> Any: ...


@resize_rule("codec residuals")
def resize_residuals(values: Sequence[dict[str, Any]], resize: Resize) -> dict[str, Any]:
    """Keep what the next mean delivers: the mean of all residuals, and the sum of the owners' residuals.

    Stripes have new owners now.  So every worker takes all owners' residuals into its own residual, which counts for its
    share of the mean, and each owner's starts at zero.
    """
    result = resize_by_mean(values, resize)
    if "owner_residual" in result:
        result["residual"] = result["residual"] + sum(v["owner_residual"] for v in values)
        result["owner_residual"] = torch.zeros_like(result["owner_residual"])
    return result


@resize_rule("codec mean")
def resize_by_mean(values: Sequence[dict[str, Any]], resize: Resize) -> dict[str, Any]:
    """The mean of each floating-point tensor."""
    return {name: _mean([v[name] for v in values]) for name in values[0]}


@resize_rule("codec message count")
def resize_counts(values: Sequence[dict[str, Any]], resize: Resize) -> dict[str, Any]:
    """The largest count: no worker draws the random numbers of an earlier message again."""
    return {name: torch.stack([v[name] for v in values]).amax(0) for name in values[0]}


@resize_rule("codec settings")
def drop_settings(values: Sequence[dict[str, Any]], resize: Resize) -> dict[str, Any]:
    """No settings: they had adapted to stripes that no longer exist."""
    return {name: {} for name in values[0]}


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """In double precision; equal tensors keep their bits."""
    stacked = torch.stack([t.to(tensors[0]) for t in tensors])
    if all(torch.equal(t, stacked[0]) for t in stacked[1:]):
        return tensors[0].clone()
    shares = torch.ones(len(tensors), dtype=torch.float64, device=stacked.device) / len(tensors)
    return torch.tensordot(shares, stacked.double(), 1).to(stacked.dtype)


class CodecState(Protocol):
    """A codec as one sender uses it.  Slicing gives the same memory for a part of the vector."""

    codec: Codec

    def __getitem__(self, where: slice) -> CodecState: ...

    def owned(self, where: slice) -> CodecState:
        """The second level: how this rank sends the sum over all of the stripe that it owns."""
        ...

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The bytes to send for `x`, in `out` if given; what they leave out is now remembered."""
        ...

    def encode_zero(self, numel: int, device: torch.device) -> Tensor:
        """A message that says nothing, for a sender whose values do not count; nothing that it remembers is lost by it."""
        ...

    def undo(self, x: Tensor, data: Tensor) -> None:
        """What `encode` said for `x` was not heard: remember again, up to rounding, what was remembered before."""
        ...

    def add(self, data: Tensor, into: Tensor, weight: float = 1.0, *, fresh: bool = False) -> None:
        """Add what the bytes say, times `weight`, to `into`; put it there instead if `fresh`."""
        ...


class ErrorFeedback:
    """A codec as one sender uses it: what could not be said is remembered and said later.

    `residual` belongs to what this rank sends of its own, `owner_residual` to the sums it sends on behalf of all (the second
    level of `mean_by_stripes`); with None in their place nothing is remembered.  `count` is the number of messages so far: if it
    is given, message i is encoded with random numbers that follow from `key` and i alone.

    >>> from paceline.codecs import OneBit
    >>> link = ErrorFeedback(OneBit(), torch.zeros(4), torch.zeros(4))
    >>> x = torch.tensor([3.0, 1.0, -2.0, -2.0])
    >>> said = link.codec.decode(link.encode(x), 4)
    >>> said, link.residual
    (tensor([ 2.,  2., -2., -2.]), tensor([ 1., -1.,  0.,  0.]))
    """

    def __init__(
        self,
        codec: Codec,
        residual: Tensor | None,
        owner_residual: Tensor | None = None,
        rng: torch.Generator | None = None,
        *,
        key: int = 0,
        count: Tensor | None = None,
        adapted: dict[str, dict[str, Any]] | None = None,
        place: str = "",
    ) -> None:
        self.codec = codec
        self.residual = residual
        self.owner_residual = owner_residual
        self.rng = torch.Generator() if count is not None and rng is None else rng
        self.key, self.count = key, count
        self._adapted = {} if adapted is None else adapted  # The settings that have changed, by the part that is sent.
        self._place = place

    @classmethod
    def remembered(cls, codec: Codec, remember: Remember, like: Tensor, key: int) -> ErrorFeedback:
        """A sender's state in slots of a checkpoint; see `Codec.codec_state`."""
        residual: Tensor | None = None
        owner_residual: Tensor | None = None
        count: Tensor | None = None
        adapted: dict[str, dict[str, Any]] | None = None
        if codec.feedback:
            # In single precision at least: a residual is smaller than the values that were sent, and 16 bits would lose it.
            wide = torch.zeros(like.numel(), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
            slot = remember("residuals", rule=resize_residuals, residual=wide, owner_residual=wide)
            residual = slot.residual
            owner_residual = slot.owner_residual
        if codec.is_random:
            count = remember("messages", rule=resize_counts, count=torch.zeros(1, dtype=torch.int64)).count
        if type(codec).adapted is not Codec.adapted:
            adapted = remember("settings", rule=drop_settings, adapted={}).adapted
        return cls(codec, residual, owner_residual, key=key, count=count, adapted=adapted)

    def __getitem__(self, where: slice) -> ErrorFeedback:
        return self._part(where, self.residual, self.owner_residual, "")

    def owned(self, where: slice) -> ErrorFeedback:
        """The second level: how this rank sends the sum over all of the stripe that it owns."""
        return self._part(where, self.owner_residual, self.owner_residual, " owned")

    def _part(self, where: slice, residual: Tensor | None, owner_residual: Tensor | None, level: str) -> ErrorFeedback:
        return ErrorFeedback(
            self.codec.part(where),
            None if residual is None else residual[where],
            None if owner_residual is None else owner_residual[where],
            self.rng,
            key=self.key,
            count=self.count,
            adapted=self._adapted,
            place=f"{self._place}{level} {where.start or 0}:{where.stop}",
        )

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The bytes to send for `x`, in `out` if given; the residual now holds what they leave out."""
        codec = self.codec.restored(self._adapted[self._place]) if self._place in self._adapted else self.codec
        data = kernels.encode(codec, x, self.residual, self._drawing(), out)
        if (after := codec.adapted(data, x.numel())) is not codec:
            self._adapted[self._place] = after.settings()
        return data

    def _drawing(self) -> torch.Generator | None:
        if self.count is not None and self.rng is not None and self.codec.is_random:
            self.rng.manual_seed(seed_of(self.key, int(self.count)))
            self.count += 1
        return self.rng

    def encode_zero(self, numel: int, device: torch.device) -> Tensor:
        """A message that says nothing, for a sender whose values do not count; nothing that it remembers is lost by it."""
        return kernels.encode(self.codec, torch.zeros(numel, device=device), None, self.rng)

    def undo(self, x: Tensor, data: Tensor) -> None:
        """What `encode` said for `x` was not heard: remember again, up to rounding, what was remembered before."""
        if self.residual is not None:
            self.add(data, self.residual)
            self.residual.sub_(x)

    def add(self, data: Tensor, into: Tensor, weight: float = 1.0, *, fresh: bool = False) -> None:
        """Add what the bytes say, times `weight`, to `into`; put it there instead if `fresh`."""
        kernels.add(self.codec, data, into, weight, fresh)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value.settings() if isinstance(value, Codec) else value
