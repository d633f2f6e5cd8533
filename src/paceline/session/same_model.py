"""Do all ranks start from one model?  Found out before the first step, and told by the parameter's name."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor, nn
from torch.distributed import Store

from paceline.endpoint import Endpoint
from paceline.worker.flat import FlatModel


def check_same_model(endpoint: Endpoint, flat: FlatModel, store: Store) -> None:
    """Raise ValueError, on every rank alike, if a rank's parameters or buffers differ in name, shape, dtype or value."""
    named = everything(flat.model)
    shapes: list[list[object]] = [[n, list(t.shape), str(t.dtype)] for n, t in named]
    store.set(f"model/{endpoint.rank}", json.dumps(shapes))
    _compare_shapes(endpoint, shapes, store)
    prints = torch.stack([_fingerprint(t) for _, t in named])
    everyones = endpoint.all_gather(prints).wait()
    for rank, theirs in zip(endpoint.ranks, everyones, strict=True):
        different = (theirs != everyones[0]).nonzero()
        if len(different):
            name = named[int(different[0])][0]
            raise ValueError(
                f"rank {rank} starts from other values of '{name}' than rank {endpoint.ranks[0]} ({len(different)} of {len(named)} tensors "
                "differ): build the model after the same torch.manual_seed on every rank, or give attach(initial='broadcast')"
            )


def check_like_first(rank: int, flat: FlatModel, store: Store, *, values: bool = True) -> None:
    """The same where ranks come and go: each compares itself, before its first step, with what the first to come has left in the store."""
    mine: list[list[object]] = [
        [n, list(t.shape), str(t.dtype), int(_fingerprint(t)) if values else 0] for n, t in everything(flat.model)
    ]
    first, theirs = json.loads(store.compare_set("model", "", json.dumps([rank, mine])))
    for own, other in zip(mine, theirs, strict=False):
        if own[:3] != other[:3]:
            raise ValueError(
                f"the models differ: rank {first} has {_spelled(other[:3])}, rank {rank} has {_spelled(own[:3])}"
            )
    if len(mine) != len(theirs):
        raise ValueError(
            f"the models differ: rank {first} has {len(theirs)} parameters and buffers, rank {rank} has {len(mine)}"
        )
    for own, other in zip(mine, theirs, strict=True):
        if own != other:
            raise ValueError(
                f"rank {rank} starts from other values of '{own[0]}' than rank {first}: build the model after the same "
                "torch.manual_seed on every rank, or give attach(initial='broadcast')"
            )


def everything(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All that a model starts from: parameters, frozen ones too, and buffers."""
    return [(n, t.detach()) for n, t in (*model.named_parameters(), *model.named_buffers())]


def _compare_shapes(endpoint: Endpoint, mine: list[list[object]], store: Store) -> None:
    digest = torch.frombuffer(bytearray(hashlib.sha256(json.dumps(mine).encode()).digest()), dtype=torch.uint8)
    everyones = endpoint.all_gather(digest).wait()
    first = endpoint.ranks[0]
    for rank, theirs in zip(endpoint.ranks, everyones, strict=True):
        if not torch.equal(theirs, everyones[0]):
            here, there = (json.loads(store.get(f"model/{r}")) for r in (first, rank))
            for ours, other in zip(here, there, strict=False):
                if ours != other:
                    raise ValueError(
                        f"the models differ: rank {first} has {_spelled(ours)}, rank {rank} has {_spelled(other)}"
                    )
            raise ValueError(
                f"the models differ: rank {first} has {len(here)} parameters and buffers, rank {rank} has {len(there)}"
            )


def _spelled(shape: list[object]) -> str:
    name, sizes, dtype = shape
    return f"'{name}' of shape {sizes} and {dtype}"


def _fingerprint(p: Tensor) -> Tensor:
    """64 bits of a hash of the values."""
    raw = p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return torch.frombuffer(bytearray(hashlib.blake2b(raw.data, digest_size=8).digest()), dtype=torch.int64)[0]
