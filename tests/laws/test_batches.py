"""Minibatches: the parts of all workers are together the minibatch, whatever it is made of."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from paceline.session.batches import Cutter, digest, part_of, samples_in

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    names: list[str]
    scale: float = 1.0


@dataclasses.dataclass(slots=True)
class Slotted:
    x: np.ndarray


class Encoded(UserDict):
    """As Hugging Face's BatchEncoding: items, and beside them one object for each sample."""

    def __init__(self, data: dict[str, Any], encodings: list[Any]) -> None:
        super().__init__(data)
        self._encodings = encodings


N = 7
X = torch.arange(3.0 * N).view(N, 3)
Y = torch.arange(N)
NAMES = list("abcdefg")
BATCHES = {
    "tensor": X,
    "pair of tensors": (X, Y),
    "numpy arrays": (X.numpy(), Y.numpy()),
    "numpy objects": np.array(NAMES, dtype=object),
    "list": [X, Y],
    "dict": {"x": X, "y": Y},
    "ordered dict": OrderedDict(x=X, y=Y),
    "default dict": defaultdict(list, x=X),
    "read-only dict": MappingProxyType({"x": X, "y": Y}),
    "named tuple": Pair(X, Y),
    "frozen dataclass": Frozen(X, NAMES),
    "dataclass with slots": Slotted(X.numpy()),
    "nested": {"in": (X, {"mask": Y > 2, "empty": {}, "none": None}), "out": [Pair(X, Y)]},
    "texts": (X, NAMES),
    "numbers": [3, 1, 4, 1, 5, 9, 2],
    "0-d tensors of each sample": (X, list(Y)),
    "objects": (X, [object() for _ in range(N)]),
    "scalars": (X, 3, 0.5, "train", torch.tensor(2.0), np.float32(1.0), np.array(4), None, torch.float16),
    "encoded": Encoded({"ids": X, "mask": Y}, [f"encoding {i}" for i in range(N)]),
}


def parts(batch: Any, workers: int, dim: int = 0) -> list[Any]:
    bounds = [N * i // workers for i in range(workers + 1)]
    return [part_of(batch, slice(a, b), dim) for a, b in pairwise(bounds)]


def joined(values: list[Any], whole: Any) -> Any:
    """The opposite of cutting, written for these tests: it follows the form of `whole`."""
    first = values[0]
    assert type(first) is type(whole)
    if isinstance(first, torch.Tensor):
        return torch.cat(values).tolist() if first.dim() else first.tolist()
    if isinstance(first, np.ndarray):
        return np.concatenate(values).tolist() if first.ndim else first.tolist()
    if isinstance(first, (dict, OrderedDict, UserDict, MappingProxyType)):
        return {k: joined([v[k] for v in values], whole[k]) for k in whole}
    if dataclasses.is_dataclass(first):
        names = [f.name for f in dataclasses.fields(first)]
        return [joined([getattr(v, n) for v in values], getattr(whole, n)) for n in names]
    if isinstance(first, (list, tuple)) and len(whole) == N and not isinstance(whole[0], tuple):
        return [element for v in values for element in v]
    if isinstance(first, (list, tuple)):
        return [joined([v[i] for v in values], whole[i]) for i in range(len(whole))]
    return first


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_parts_of_all_workers_are_the_minibatch(name: str, workers: int):
    batch = BATCHES[name]
    assert samples_in(batch) == N
    assert joined(parts(batch, workers), batch) == joined([batch], batch)


def test_what_a_tokenizer_knows_about_each_sample_is_cut_too():
    first, second = parts(BATCHES["encoded"], 2)
    assert first._encodings + second._encodings == [f"encoding {i}" for i in range(N)]
    assert len(first._encodings) == len(first["ids"])
    assert len(BATCHES["encoded"]["ids"]) == N, "the minibatch itself is unchanged"


def test_time_first_batches_are_cut_along_the_dimension_of_the_samples():
    batch = (torch.randn(50, N, 4), Y, torch.randn(50, N))  # Inputs, one label for each sample, one for each time.
    assert samples_in(batch, dim=1) == N
    first, second = parts(batch, 2, dim=1)
    assert [list(t.shape) for t in first] == [[50, 3, 4], [3], [50, 3]]
    assert torch.equal(torch.cat([first[0], second[0]], dim=1), batch[0])
    assert torch.equal(torch.cat([first[1], second[1]]), Y)


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ((torch.zeros(50, 7, 4), Y), "minibatch[0] has shape [50, 7, 4], minibatch[1] has shape [7]; if the samples"),
        ({"x": X, "words": ["a", "b"]}, "minibatch['x'] has shape [7, 3], minibatch['words'] has length 2"),
        (Pair(X, (224, 224)), "minibatch.x has shape [7, 3], minibatch.y has length 2"),
        ((X, [object(), object()]), "minibatch[1] has length 2"),
        ((X, object()), "minibatch[1] is an object, which cannot be cut"),
        (object(), "minibatch is an object, which cannot be cut"),
        ([object(), object()], "minibatch is a list without an array or a list of numbers or texts"),
        (3.0, "minibatch is a float without an array"),
        ({"x": 3.0}, "minibatch is a dict without an array"),
        ({1, 2, 3}, "minibatch is a set, which cannot be cut"),
        ((X, {1, 2}), "minibatch[1] is a set"),
        ((pack_sequence([torch.ones(2), torch.ones(1)]), Y), "minibatch[0] is a PackedSequence"),
        ((X.to_sparse(), Y), "minibatch[0] is a torch.sparse_coo tensor"),
        ([(torch.ones(3), 0), (torch.ones(3), 1)], "minibatch is a list of single samples"),
        ([{"x": torch.ones(3), "y": torch.tensor(i)} for i in range(4)], "minibatch is a list of single samples"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_its_shapes_and_a_way_out(batch: Any, error: str):
    with pytest.raises(ValueError, match=re.escape(error)) as caught:
        samples_in(batch)
    assert "shard(loader, split=function)" in str(caught.value)
    if "have different numbers of samples" in str(caught.value):
        assert "shard(loader, dim=1)" in str(caught.value)


def test_a_function_of_the_users_cuts_what_nothing_else_can():
    cutter = Cutter(split=lambda batch, index, workers: (batch[index::workers], len(batch[index::workers])))
    assert cutter.apply("abcde", 1, 2) == ("bd", 2)
    assert cutter.samples("abcde") == 5
    with pytest.raises(TypeError, match=r"the function returned a str for worker 1 of 2; it must return a pair"):
        Cutter(split=lambda batch, index, workers: batch[index::workers]).apply("abcde", 1, 2)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"dim": -1}, r"session.shard\(dim=-1\)"),
        ({"dim": "1"}, r"session.shard\(dim='1'\)"),
        ({"split": 3}, r"session.shard\(split=3\): split is a function"),
        ({"dim": 1, "split": print}, "give dim or split, not both"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], error: str):
    with pytest.raises((ValueError, TypeError), match=error):
        Cutter(**settings)


def changed(batch: Any) -> Any:
    """The same minibatch with another last value of its first array."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        other = batch.clone() if isinstance(batch, torch.Tensor) else batch.copy()
        other.reshape(-1)[-1] = other.reshape(-1)[0]
        return other
    if isinstance(batch, (list, tuple)) and isinstance(batch[0], (torch.Tensor, np.ndarray)):
        values = [changed(batch[0]), *batch[1:]]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if isinstance(batch, (dict, UserDict)):
        first = next(iter(batch))
        return {**batch, first: changed(batch[first])}
    if dataclasses.is_dataclass(batch):
        return dataclasses.replace(batch, x=changed(batch.x))
    return None


@pytest.mark.parametrize("name", BATCHES)
def test_the_digest_depends_on_every_value_and_on_nothing_else(name: str):
    batch = BATCHES[name]
    again = joined_copy(batch)
    assert digest(batch) == digest(again)
    other = changed(batch)
    assert other is None or digest(batch) != digest(other)


def joined_copy(batch: Any) -> Any:
    """Equal values in other objects, as another process would have them."""
    return part_of(batch, slice(0, N))


def test_objects_without_a_text_of_their_own_do_not_change_the_digest():
    assert digest([object()]) == digest([object()])
    assert digest(np.array([object()], dtype=object)) == digest(np.array([object()], dtype=object))
    assert digest((X, Y)) != digest((X.double(), Y))
    assert digest({"a": X}) != digest({"b": X})
