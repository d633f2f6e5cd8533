"""Minibatches: how many samples they hold, a worker's part of them, and a digest.

A minibatch is made of tensors and numpy arrays, in lists, tuples, dicts and dataclasses.  All arrays in it have the
same number of samples.  A list of numbers or texts holds one for each sample.  A single number, text or 0-d array
belongs to every sample, so every worker gets it.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Split = Callable[[Any, int, int], tuple[Any, int]]
"""Takes a minibatch, a worker's index and the number of workers; returns the worker's part and its samples."""

SPLIT = (
    "shard(loader, split=function), where function(batch, index, workers) returns the worker's part and the number of "
    "its samples"
)


@dataclasses.dataclass(frozen=True)
class Cutter:
    """How minibatches are cut: along a dimension of their arrays, or by a function of the user's."""

    dim: int = 0
    split: Split | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool) or self.dim < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"session.shard(dim={self.dim!r}): dim is the dimension of the samples, a whole number from 0"
            )
        if self.split is not None and not callable(self.split):
            raise TypeError(f"session.shard(split={self.split!r}): split is a function; give {SPLIT}")
        if self.split is not None and self.dim:
            raise ValueError(f"session.shard(dim={self.dim}, split=...): give dim or split, not both")

    def samples(self, batch: Any) -> int:
        """How many samples a minibatch holds; ValueError if that is not clear."""
        return self.apply(batch, 0, 1)[1] if self.split is not None else samples_in(batch, self.dim)

    def part(self, batch: Any, where: slice) -> Any:
        """Those samples of a minibatch."""
        return part_of(batch, where, self.dim)

    def apply(self, batch: Any, index: int, workers: int) -> tuple[Any, int]:
        """What the user's function makes of a minibatch."""
        assert self.split is not None
        found: Any = self.split(batch, index, workers)
        if _is_sequence(found) and len(found) == 2 and isinstance(found[1], (int, np.integer)) and found[1] >= 0:
            return found[0], int(found[1])
        raise TypeError(
            f"session.shard(split=...): the function returned {_shown(found)} for worker {index} of {workers}; it must "
            "return a pair: the worker's part, and the number of its samples"
        )


def samples_in(batch: Any, dim: int = 0) -> int:
    """The number of samples along `dim`, or along the last dimension of arrays that have fewer.

    >>> samples_in({"x": torch.zeros(8, 3), "names": list("abcdefgh"), "temperature": 0.5})
    8
    """
    lengths: dict[str, tuple[int, str]] = {}
    others: dict[str, tuple[int, str]] = {}  # Lists of objects: their lengths must agree, but prove nothing alone.
    for path, leaf in _leaves(batch, "minibatch"):
        if _is_array(leaf):
            lengths[path] = leaf.shape[_axis(leaf, dim)], f"shape {list(leaf.shape)}"
        elif _is_list_of_samples(leaf):
            found = lengths if all(_is_scalar(v) for v in leaf) else others
            found[path] = len(leaf), f"length {len(leaf)}"
        elif not _is_scalar(leaf):
            raise _cannot_cut(path, _kind(leaf))
    if not lengths:
        raise _cannot_cut("minibatch", f"{_kind(batch)} without an array or a list of numbers or texts")
    if len({length for length, _ in (lengths | others).values()}) > 1:
        shown = ", ".join(f"{path} has {shape}" for path, (_, shape) in list((lengths | others).items())[:6])
        raise ValueError(
            f"session.shard: the parts of a minibatch have different numbers of samples along dimension {dim}: "
            f"{shown}; if the samples lie along another dimension, give shard(loader, dim={0 if dim else 1}), "
            f"otherwise give {SPLIT}"
        )
    return next(iter(lengths.values()))[0]


def part_of(batch: Any, where: slice, dim: int = 0) -> Any:
    """The samples `where` of a minibatch, in containers of the same types."""
    if _is_array(batch):
        return batch[(slice(None),) * _axis(batch, dim) + (where,)]
    if _is_list_of_samples(batch):
        return batch[where] if type(batch) in (list, tuple) else type(batch)(batch[where])
    children = _children(batch)
    if children is None:
        return batch
    return _rebuilt(batch, [part_of(value, where, dim) for _, value in children], where)


def digest(batch: Any) -> bytes:
    """A hash of all values in a minibatch, the same in every process."""
    found = hashlib.sha256()
    _hash(batch, found.update)
    return found.digest()


def _hash(value: Any, update: Callable[[bytes], None]) -> None:
    if isinstance(value, Tensor) and value.is_nested:
        _hash(list(value.unbind()), update)
    elif isinstance(value, Tensor) and value.layout != torch.strided:
        found = value.to_sparse_coo().coalesce()
        _hash([found.indices(), found.values(), *value.shape], update)
    elif isinstance(value, Tensor):
        update(f"{value.dtype}{list(value.shape)}".encode())
        update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif _is_numpy(value):
        update(f"{value.dtype}{list(value.shape)}".encode())
        if value.dtype.hasobject:  # Its bytes are addresses.
            _hash(value.tolist(), update)
        else:
            update(value.tobytes())
    elif (children := _children(value)) is not None:
        update(f"{len(children)} values".encode())
        for name, child in children:
            update(name.encode())
            _hash(child, update)
    else:  # The text of an unknown object may hold its address.
        update((repr(value) if _is_scalar(value) else type(value).__name__).encode())


def is_plain(batch: Any) -> bool:
    """Whether the digest of a minibatch shows every value in it: there are no objects of other types."""
    if _is_numpy(batch):
        return not batch.dtype.hasobject
    if isinstance(batch, Tensor) or _is_scalar(batch):
        return True
    children = _children(batch)
    return children is not None and all(is_plain(child) for _, child in children)


# What a minibatch is made of.  Types of values are unknown here, so these tests do not narrow them.


def _is_numpy(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def _axis(array: Any, dim: int) -> int:
    return min(dim, array.ndim - 1)


def _is_scalar(value: Any) -> bool:
    """Whether a value has no samples, so that it belongs to all of them."""
    if isinstance(value, (Tensor, np.ndarray)):
        return not value.ndim
    return value is None or isinstance(value, (Number, str, bytes, Enum, np.generic, torch.dtype, torch.device))


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")  # pyright: ignore[reportUnknownArgumentType]


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_container(value: Any) -> bool:
    return _is_mapping(value) or _is_sequence(value) or _is_dataclass(value)


def _is_list_of_samples(value: Any) -> bool:
    """Whether a list has one element for each sample: it holds neither arrays nor containers."""
    if not _is_sequence(value) or _is_namedtuple(value) or not value:
        return False
    return not any(_is_array(v) or _is_container(v) for v in value)


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """What a container holds, with the names of its fields; None if the value is no container."""
    if _is_mapping(value):
        return [(f"[{k!r}]", v) for k, v in value.items()]
    if _is_dataclass(value):
        return [(f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    if _is_namedtuple(value):
        return [(f".{name}", v) for name, v in zip(value._fields, value, strict=True)]
    if _is_sequence(value):
        return [(f"[{i}]", v) for i, v in enumerate(value)]
    return None


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Arrays, lists of samples, and all that is no container, each with the way to it."""
    if isinstance(value, PackedSequence):
        raise _cannot_cut(path, "a PackedSequence")
    if isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided):
        raise _cannot_cut(path, "a nested tensor" if value.is_nested else f"a {value.layout} tensor")
    children = None if _is_list_of_samples(value) else _children(value)
    if children is None:
        yield path, value
        return
    if type(value) in (list, tuple) and _looks_like_samples([child for _, child in children]):
        raise _cannot_cut(path, f"a {type(value).__name__} of single samples, or of fields of equal form")
    for name, child in children:
        yield from _leaves(child, path + name)


def _looks_like_samples(values: list[Any]) -> bool:
    """Whether these are containers of equal form with a number or text in each, as samples that were not collated."""
    if len(values) < 2 or not all(_is_container(v) and not _is_list_of_samples(v) for v in values):
        return False
    forms = [[(path, getattr(leaf, "shape", ())) for path, leaf in _leaves(v, "")] for v in values]
    return forms[1:] == forms[:-1] and any(_is_scalar(leaf) for _, leaf in _leaves(values[0], ""))


def _rebuilt(value: Any, parts: list[Any], where: slice) -> Any:
    """A container like `value` that holds the parts."""
    if _is_namedtuple(value):
        return type(value)(*parts)
    if _is_sequence(value):
        return type(value)(parts)
    if _is_mapping(value) and not hasattr(value, "__setitem__"):
        return type(value)(dict(zip(value, parts, strict=True)))
    found = copy.copy(value)
    if not _is_mapping(value):
        for field, part in zip(dataclasses.fields(value), parts, strict=True):
            object.__setattr__(found, field.name, part)  # The dataclass may be frozen.
        return found
    for key, part in zip(list(value), parts, strict=True):
        found[key] = part
    # Hugging Face's BatchEncoding keeps what its fast tokenizers know about each sample beside its items.
    if _is_sequence(getattr(found, "_encodings", None)):
        found._encodings = found._encodings[where]
    return found


def _shown(value: Any) -> str:
    """A value with the kinds of what it holds."""
    held = f" of {', '.join(map(_kind, value))}" if _is_sequence(value) and 0 < len(value) <= 4 else ""
    return f"{_kind(value)}{held}"


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _cannot_cut(path: str, what: str) -> ValueError:
    return ValueError(
        f"session.shard: {path} is {what}, which cannot be cut into the samples of each worker; use tensors and numpy "
        f"arrays, in lists, tuples, dicts and dataclasses, or give {SPLIT}"
    )
