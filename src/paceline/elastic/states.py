"""States between workers: each gets the states of all, from which the resize rules make its own.

A tensor that all of them have does not travel, and one that several have travels once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.plain import DTYPES, NAMES, flattened, restored
from paceline.endpoint import Endpoint
from paceline.errors import ClusterError

State = dict[str, Any]


async def gathered(endpoint: Endpoint, state: State | None) -> list[State]:
    """The states of the workers that have one, in the order of ranks; a newcomer has None."""
    if len(endpoint.ranks) == 1:
        return [] if state is None else [state]
    tree, tensors = flattened(state)
    own = {name: _digest(t) for name, t in tensors.items()}
    header = {
        "tree": tree,
        "tensors": {n: [own[n], NAMES[t.dtype], list(t.shape)] for n, t in tensors.items()},
    }
    headers = [json.loads(text) for text in await _all_texts(endpoint, json.dumps(header))]
    if all(h["tree"] is None for h in headers):
        raise ClusterError("no worker that knew the state of the run is left: only newcomers are")
    known = {own[name]: t for name, t in tensors.items()}
    kinds: dict[str, tuple[torch.dtype, list[int]]] = {}
    owners: dict[str, list[int]] = {}
    for rank, h in zip(endpoint.ranks, headers, strict=True):
        for digest, dtype, shape in h["tensors"].values():
            kinds[digest] = (DTYPES[dtype], shape)
            if rank not in owners.setdefault(digest, []):
                owners[digest].append(rank)
    for rank in endpoint.ranks:
        travelling = [d for d, ranks in owners.items() if ranks[0] == rank and len(ranks) < len(endpoint.ranks)]
        known |= await _from(endpoint, rank, {d: kinds[d] for d in travelling}, known)
    return [_state(h, known) for h in headers if h["tree"] is not None]


async def _from(
    endpoint: Endpoint, src: int, kinds: Mapping[str, tuple[torch.dtype, list[int]]], known: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of these digests, which rank `src` has."""
    sizes = {d: dtype.itemsize * torch.Size(shape).numel() for d, (dtype, shape) in kinds.items()}
    data = torch.empty(sum(sizes.values()), dtype=torch.uint8)
    if not data.numel():
        return {d: torch.empty(shape, dtype=dtype) for d, (dtype, shape) in kinds.items()}
    parts = dict(zip(kinds, data.split(list(sizes.values())), strict=True))
    if endpoint.rank == src:
        for digest, part in parts.items():
            part.copy_(_bytes(known[digest]))
    await endpoint.broadcast(data, src)
    # Copies: a part need not begin where its dtype must.
    return {d: parts[d].clone().view(dtype).view(shape) for d, (dtype, shape) in kinds.items()}


async def _all_texts(endpoint: Endpoint, text: str) -> list[str]:
    """Every rank's text."""
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = [int(n) for n in await endpoint.all_gather(torch.tensor([len(mine)]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(mine)] = mine
    everyones = await endpoint.all_gather(padded)
    return [bytes(t[:n].numpy()).decode() for t, n in zip(everyones, sizes, strict=True)]


def _state(header: Mapping[str, Any], known: Mapping[str, Tensor]) -> State:
    return restored(header["tree"], lambda name: known[header["tensors"][name][0]])


def _bytes(t: Tensor) -> Tensor:
    return t.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _digest(t: Tensor) -> str:
    values = hashlib.blake2b(_bytes(t).numpy().data, digest_size=16)
    values.update(f"{t.dtype} {list(t.shape)}".encode())
    return values.hexdigest()
