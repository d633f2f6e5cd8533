"""Codec: a wire format for vectors, and the state of a sender that uses it.

A codec is frozen and stateless.  It turns a vector into the bytes on the wire and back, and is defined in plain torch.
`ErrorFeedback` is a sender's state, for any codec: it keeps what was not sent and adds it to the next message.  It runs
the codec's fused kernels (`codecs/kernels`) where they exist; they agree with the definition bit for bit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from paceline.checked import Checked
from paceline.codecs import kernels
from paceline.codecs.codec_state import CodecState
from paceline.codecs.noise import seed_of
from paceline.codecs.resizing import Remember, drop_settings, resize_counts, resize_residuals
from paceline.codecs.shares import Shares, settled


class Unencodable(ValueError):
    """A value that a codec cannot encode: NaN, infinity, or out of range; `at` is the index of a NaN or infinity."""

    def __init__(self, message: str, at: int | None = None) -> None:
        super().__init__(message)
        self.at = at


class Codec(Checked):
    """A frozen dataclass of settings with three functions; `codecs/one_bit.py` is a complete example."""

    KIND: ClassVar = "codec"

    # Whether a sender keeps a residual.
    feedback: ClassVar[bool] = True
    # Whether encoding draws random numbers.
    is_random: ClassVar[bool] = False
    # The dtype in which encoded vectors can be summed on the wire; None: they cannot be summed.
    wire: ClassVar[torch.dtype | None] = None
    # How a group of ranks computes the mean of vectors in this format: a name in `collectives.REDUCTIONS`, or "auto".
    # For "sum" the codec has a `wire` dtype and no feedback.
    reduction: ClassVar[str] = "stripes"
    # Whether a message has only signs, or few of the values: that spoils the second moments of Adam.
    is_coarse: ClassVar[bool] = False
    # Whether the vectors that are decoded have momentum.
    has_momentum: ClassVar[bool] = False
    # Whether it works only in a mean over a group of ranks, not for a message from one sender to one receiver.
    needs_group: ClassVar[bool] = False

    @property
    def unit(self) -> int:
        """How many values are encoded together: cut a vector at multiples of it."""
        return 512

    @abstractmethod
    def nbytes(self, numel: int) -> int | None:
        """The exact size of `numel` encoded values; None if it depends on the values."""

    @abstractmethod
    def encode(self, x: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """The bytes on the wire, a 1-D uint8 tensor.  Raises Unencodable for a value that has no code."""

    @abstractmethod
    def decode(self, data: Tensor, numel: int) -> Tensor:
        """The float32 values that the bytes encode, possibly a view of them.  Raises ValueError for malformed bytes."""

    def most_nbytes(self, numel: int) -> int:
        """The largest possible size of a message of `numel` values."""
        nbytes = self.nbytes(numel)
        assert nbytes is not None, f"{self} has messages of variable size and must override most_nbytes"
        return nbytes

    def part(self, where: slice) -> Codec:
        """The codec for a part of the vector; a different one only if the encoding depends on the position."""
        return self

    def fitted(self, shapes: Sequence[torch.Size]) -> Codec:
        """The codec for a vector made of tensors of these shapes; a different one only if it uses the shapes."""
        return self

    def check_optimizer(self, groups: Iterable[Mapping[str, Any]], *, kind: str = "optimizer") -> None:
        """Raise ValueError if it does not go together with an optimizer that has these parameter groups.

        Where a server's rule takes the steps, `kind` is "rule".
        """

    def adapted(self, data: Tensor, numel: int) -> Codec:
        """The codec for a sender's next message, after `data`; a different one only if its settings adapt."""
        return self

    def reduction_among(self, ranks: int) -> str:
        """The reduction in a group of this many ranks.

        "auto" is "gather" between two ranks, where it sends no more bytes than "stripes" and encodes once, not twice.
        """
        if self.reduction != "auto":
            return self.reduction
        return "gather" if ranks <= 2 else "stripes"

    def settings(self) -> dict[str, Any]:
        """All settings as plain data."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}  # pyright: ignore[reportArgumentType]

    def restored(self, settings: dict[str, Any]) -> Codec:
        """This codec with other `settings()`; its type and the types of its inner codecs stay."""
        values = {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}
        inner = {n: getattr(self, n).restored(v) if isinstance(v, dict) else v for n, v in values.items()}
        return replace(self, **inner)  # pyright: ignore

    def codec_state(self, remember: Remember, like: Tensor, key: int = 0) -> CodecState:
        """The state of one sender that sends vectors like `like` in this format.

        `remember` makes a checkpointed slot, see `Remember`.  Senders with different keys draw different random
        numbers.
        """
        if self.reduction == "sum":
            return SummedState(self, remember("sums", rule=drop_settings, exponents={}).exponents)
        return ErrorFeedback.remembered(self, remember, like, key)

    def check(self, data: Tensor, numel: int) -> None:
        """Raise ValueError for bytes that cannot be `numel` encoded values."""
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise ValueError(
                f"{self} decodes a 1-D uint8 tensor, but was given {data.dtype} of shape {tuple(data.shape)}"
            )
        if data.numel() != (wanted := self.nbytes(numel)) and wanted is not None:
            raise ValueError(
                f"{self} encodes {numel} values in {wanted} bytes, but was given {data.numel()} bytes to decode"
            )

    def malformed(self, data: Tensor, numel: int, why: str) -> NoReturn:
        """Raise ValueError for bytes that are not a message of `numel` values."""
        raise ValueError(f"{self} cannot decode {numel} values from the given {data.numel()} bytes: {why}")

    def refuse(self, x: Tensor, why: str) -> None:
        """Raise Unencodable with the first value of `x` that is not finite, or with `why` if all are finite."""
        finite = x.isfinite()
        if finite.all():
            raise Unencodable(f"{self} cannot encode {x.numel()} values up to {x.abs().max().item():g}: {why}")
        at = int(finite.logical_not().nonzero()[0])
        raise Unencodable(f"{self} cannot encode {x[at].item():g} at index {at}: it is not finite", at)


def check_one_to_one(owner: object, codec: Codec | None) -> None:
    """Raise ValueError for a codec that works only in a mean over a group; `owner` is the call that was given it."""
    if codec is not None and codec.needs_group:
        raise ValueError(
            f"{owner}: {type(codec).__name__} works only in a mean over all workers; use AllReduceSGD(codec={codec}) "
            "or an averaging method, or a codec that encodes single messages, such as OneBit() or TopK()"
        )


class ErrorFeedback:
    """A codec with error feedback: what a message left out is added to the sender's next message.

    `residual` is for the messages with this rank's own values, `owner_residual` for the means that it sends as the
    owner of a stripe (the second level of `mean_by_stripes`); None: no feedback.  `shares` has the unit of each
    residual that is part of a mean.  `count` is the number of messages so far.  If it is given, message i draws random
    numbers that depend only on `key` and i.

    >>> from paceline.codecs import OneBit
    >>> state = ErrorFeedback(OneBit(), torch.zeros(4), torch.zeros(4))
    >>> x = torch.tensor([3.0, 1.0, -2.0, -2.0])
    >>> sent = state.codec.decode(state.encode(x), 4)
    >>> sent, state.residual
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
        shares: Shares | None = None,
        start: int = 0,
        place: str = "",
    ) -> None:
        self.codec = codec
        self.residual = residual
        self.owner_residual = owner_residual
        self.rng = torch.Generator() if count is not None and rng is None else rng
        self.key = key
        self.count = count
        self.shares = Shares([]) if shares is None else shares
        self.start = start  # The index of this part's first value in the whole vector, which `shares` counts from.
        self._adapted = {} if adapted is None else adapted  # Adapted settings by the part of the vector, `_place`.
        self._place = place

    @classmethod
    def remembered(cls, codec: Codec, remember: Remember, like: Tensor, key: int) -> ErrorFeedback:
        """A sender's state in slots of a checkpoint; see `Codec.codec_state`."""
        residual: Tensor | None = None
        owner_residual: Tensor | None = None
        count: Tensor | None = None
        adapted: dict[str, dict[str, Any]] | None = None
        shares: Shares | None = None
        if codec.feedback:
            # In single precision at least: a residual is smaller than the values that were sent, and 16 bits would
            # lose it.
            wide = torch.zeros(like.numel(), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
            slot = remember(
                "residuals", rule=resize_residuals, version=2, residual=wide, owner_residual=wide, shares=[]
            )
            residual = slot.residual
            owner_residual = slot.owner_residual
            shares = Shares(slot.shares)
        if codec.is_random:
            count = remember("messages", rule=resize_counts, count=torch.zeros(1, dtype=torch.int64)).count
        if type(codec).adapted is not Codec.adapted:
            adapted = remember("settings", rule=drop_settings, adapted={}).adapted
        return cls(codec, residual, owner_residual, key=key, count=count, adapted=adapted, shares=shares)

    def __getitem__(self, where: slice) -> ErrorFeedback:
        return self._part(where, self.residual, self.owner_residual, "")

    def owned(self, where: slice) -> ErrorFeedback:
        """The second level of `mean_by_stripes`: the state for sending the mean of the stripe that this rank owns."""
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
            shares=self.shares,
            start=self.start + (where.start or 0),
            place=self._place_of(where, level),
        )

    def _place_of(self, where: slice, level: str) -> str:
        return f"{self._place}{level} {where.start or 0}:{where.stop}"

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The bytes to send for `x + residual`, in `out` if given; the residual becomes what they leave out."""
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
        """A message of zeros, from a sender whose values do not count; leaves the residual as it is."""
        return kernels.encode(self.codec, torch.zeros(numel, device=device), None, self.rng)

    def undo(self, x: Tensor, data: Tensor) -> None:
        """Restore the residual, up to rounding, from before `encode(x)` gave `data`: the message was not used."""
        if self.residual is not None:
            self._undo_in(self.residual, x, data)

    def _undo_in(self, residual: Tensor, x: Tensor, data: Tensor) -> None:
        self.add(data, residual)
        residual.sub_(x)

    def undelivered(self, share: float) -> Tensor | None:
        """What this rank has still to deliver, in units of the mean; see `CodecState`."""
        if self.residual is None:
            return None
        total = torch.zeros_like(self.residual) if self.owner_residual is None else self.owner_residual.clone()
        for first, stop, unit in self.units():
            part = slice(first - self.start, stop - self.start)
            total[part].add_(self.residual[part], alpha=share if unit is None else unit)
        return total

    def weigh(self, weight: float) -> None:
        """Bring what is kept to the weight that the receiver gives to the next message, which is above 0.

        For a receiver that adds up messages times their weights, where the sender knows the weight beforehand.
        """
        if self.residual is not None:
            self.weigh_all([self.residual], weight)

    def weigh_all(self, vectors: Sequence[Tensor], weight: float) -> None:
        """The same for vectors that have the residual's unit."""
        for first, stop, unit in self.units():
            if unit is not None and unit != weight:
                for vector in vectors:
                    vector[first - self.start : stop - self.start].mul_(unit / weight)
            self.shares.put(first, stop, weight)

    def is_settled(self, share: float) -> bool:
        """Whether `settle` with this share would change nothing."""
        return self.residual is None or all(
            unit == share or (not share and unit is not None) for _, _, unit in self.units()
        )

    def settle(self, x: Tensor, data: Tensor, share: float) -> None:
        """Keep what a mean did not deliver, in which `data`, the message for `x`, had this share of the weights.

        If the share is that of the mean before, this is what `encode` left.
        """
        if self.residual is None or self.is_settled(share):
            return
        self.settle_from([(self.residual, self.before(x, data) if share else self.residual)], share)

    def before(self, x: Tensor, data: Tensor) -> Tensor:
        """The residual from before `encode(x)` gave `data`."""
        assert self.residual is not None
        before = self.residual.clone()
        self._undo_in(before, x, data)
        return before

    def settle_from(self, vectors: Sequence[tuple[Tensor, Tensor]], share: float) -> None:
        """Keep what a mean with this share did not deliver of vectors that have the residual's unit.

        Each is given as `encode` left it, and as the part of it that was there before; see `settled`.
        """
        for first, stop, unit in self.units():
            part = slice(first - self.start, stop - self.start)
            if unit is None:
                if not share:  # The equal vectors of the others make up all of this mean.
                    for after, _ in vectors:
                        after[part] = 0.0
                self.shares.put(first, stop, share)
            elif share and unit != share:
                news = [settled(after[part], before[part], unit, share) for after, before in vectors]
                self.shares.put(first, stop, news[0])

    def units(self) -> list[tuple[int, int, float | None]]:
        """The units of this part's residual, each with the indices in the whole vector where it begins and ends."""
        assert self.residual is not None
        return self.shares.over(self.start, self.start + self.residual.numel())

    def add(self, data: Tensor, into: Tensor, weight: float = 1.0, *, fresh: bool = False) -> None:
        """Add the decoded bytes, times `weight`, to `into`; overwrite it if `fresh`."""
        kernels.add(self.codec, data, into, weight, fresh)


class SummedState(ErrorFeedback):
    """The state of a sender whose encoded values are summed on the wire.

    It remembers, by the part of the vector, the power of two by which the values of the next exchange are divided.  All
    ranks compute it from the result of the last exchange, so it is the same on all.  There is no residual.
    """

    def __init__(self, codec: Codec, exponents: dict[str, int], place: str = "") -> None:
        super().__init__(codec, None, place=place)
        self._exponents = exponents

    @property
    def exponent(self) -> int | None:
        """For the next exchange of this part; None before the first."""
        return self._exponents.get(self._place)

    @exponent.setter
    def exponent(self, exponent: int) -> None:
        self._exponents[self._place] = exponent

    def _part(self, where: slice, residual: Tensor | None, owner_residual: Tensor | None, level: str) -> SummedState:
        return SummedState(self.codec.part(where), self._exponents, self._place_of(where, level))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value.settings() if isinstance(value, Codec) else value
