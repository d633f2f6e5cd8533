"""Checks that all ranks start from the same model; an error names the first parameter that differs."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor
from torch.distributed import Store

from paceline.endpoint import Endpoint
from paceline.worker.flat import FlatModel
from paceline.worker.tensors import named_tensors

REMEDY = "build the model after the same torch.manual_seed on every rank, or give attach(initial='broadcast')"


def check_same_model(endpoint: Endpoint, flat: FlatModel, store: Store) -> None:
    """Raise the same ValueError on every rank if parameters or buffers differ in name, shape, dtype or value."""
    named = named_tensors(flat.model)
    shapes: list[list[object]] = [[n, list(t.shape), str(t.dtype)] for n, t in named]
    store.set(f"model/{endpoint.rank}", json.dumps(shapes))
    _compare_shapes(endpoint, shapes, store)
    fingerprints = endpoint.all_gather(torch.stack([_fingerprint(t) for _, t in named])).wait()
    first = endpoint.ranks[0]
    for rank, theirs in zip(endpoint.ranks, fingerprints, strict=True):
        different = (theirs != fingerprints[0]).nonzero()
        if len(different):
            name = named[int(different[0])][0]
            raise ValueError(
                f"rank {rank} starts from other values of '{name}' than rank {first} ({len(different)} of {len(named)} "
                f"tensors differ): {REMEDY}"
            )


def check_like_first(rank: int, flat: FlatModel, store: Store, *, values: bool = True) -> None:
    """The same check for ranks that may join later: each compares its model with the first one, from the store."""
    mine: list[list[object]] = [
        [n, list(t.shape), str(t.dtype), int(_fingerprint(t)) if values else 0] for n, t in named_tensors(flat.model)
    ]
    first, theirs = json.loads(store.compare_set("model", "", json.dumps([rank, mine])))
    for own, other in zip(mine, theirs, strict=False):
        if own[:3] != other[:3]:
            raise ValueError(
                f"the models differ: rank {first} has {_described(other[:3])}, rank {rank} has {_described(own[:3])}"
            )
    if len(mine) != len(theirs):
        raise ValueError(
            f"the models differ: rank {first} has {len(theirs)} parameters and buffers, rank {rank} has {len(mine)}"
        )
    for own, other in zip(mine, theirs, strict=True):
        if own != other:
            raise ValueError(f"rank {rank} starts from other values of '{own[0]}' than rank {first}: {REMEDY}")


def _compare_shapes(endpoint: Endpoint, mine: list[list[object]], store: Store) -> None:
    digest = torch.frombuffer(bytearray(hashlib.sha256(json.dumps(mine).encode()).digest()), dtype=torch.uint8)
    digests = endpoint.all_gather(digest).wait()
    first = endpoint.ranks[0]
    for rank, theirs in zip(endpoint.ranks, digests, strict=True):
        if torch.equal(theirs, digests[0]):
            continue
        of_first, of_rank = (json.loads(store.get(f"model/{r}")) for r in (first, rank))
        for one, other in zip(of_first, of_rank, strict=False):
            if one != other:
                raise ValueError(
                    f"the models differ: rank {first} has {_described(one)}, rank {rank} has {_described(other)}"
                )
        raise ValueError(
            f"the models differ: rank {first} has {len(of_first)} parameters and buffers, rank {rank} has "
            f"{len(of_rank)}"
        )


def _described(shape: list[object]) -> str:
    name, sizes, dtype = shape
    return f"'{name}' of shape {sizes} and {dtype}"


def _fingerprint(p: Tensor) -> Tensor:
    """64 bits of a hash of the values."""
    raw = p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return torch.frombuffer(bytearray(hashlib.blake2b(raw.data, digest_size=8).digest()), dtype=torch.int64)[0]
