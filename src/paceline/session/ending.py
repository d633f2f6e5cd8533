"""The end of a session of a synchronous method: all ranks have the same model, or the first difference is named."""

from __future__ import annotations

import hashlib
import warnings

import torch

from paceline.endpoint import Endpoint
from paceline.errors import ClusterError
from paceline.session.settings import GroupSettings
from paceline.worker.flat import FlatModel
from paceline.worker.tensors import named_tensors

ROUNDING = 1e-4  # Of the norm.  Processors of different kinds round differently, and a long run adds that up.


class DifferentRanks(RuntimeWarning):
    """Ranks ended with different settings, or with models that differ by rounding."""


def end_with_same_model(endpoint: Endpoint, flat: FlatModel, settings: GroupSettings, last_step: int) -> None:
    """Take the model of the ranks with the most steps, which must all have the same one.

    A rank whose data ended first cannot take the steps of the others: their clipping, scaling and schedules ran in
    their own loops.
    """
    # With its rank: the endpoint's may be others afterwards, if one has died.
    mine = torch.tensor([endpoint.rank, last_step, settings.digest(), _fingerprint(flat)], dtype=torch.float64)
    found = {int(rank): values for rank, *values in (t.tolist() for t in endpoint.all_gather(mine).wait())}
    most = max(step for step, _, _ in found.values())
    last = {rank: (digest, print_) for rank, (step, digest, print_) in found.items() if step == most}
    text = settings.difference({rank: digest for rank, (digest, _) in last.items()}, "end")
    if text is not None:
        warnings.warn(DifferentRanks(f"the ranks ended with different settings: {text}"), stacklevel=4)
    source = next(iter(last))
    if len({print_ for _, print_ in last.values()}) > 1:
        _unite(endpoint, flat, source, text, is_last=endpoint.rank in last)
    if len(last) < len(found):
        for _, values in named_tensors(flat.model):
            endpoint.broadcast(values, source).wait()


def _unite(endpoint: Endpoint, flat: FlatModel, source: int, settings: str | None, *, is_last: bool) -> None:
    """Take the parameters of `source` if those of the others differ by rounding alone; raise otherwise."""
    theirs = endpoint.broadcast(flat.params.clone(), source).wait()
    difference = theirs.double() - flat.params.double()
    share = float(difference.norm() / theirs.double().norm()) if is_last else 0.0
    wrong = difference.abs() > ROUNDING * theirs.double().abs()
    at = int(wrong.nonzero()[0]) if is_last and bool(wrong.any()) else 0
    mine = torch.tensor([endpoint.rank, share, at], dtype=torch.float64)
    for values in endpoint.all_gather(mine).wait():
        if not float(values[1]) <= ROUNDING:
            why = f"  The ranks' settings differ: {settings}." if settings else ""
            raise ClusterError(
                f"rank {int(values[0])} ends with other parameters than rank {source}, in "
                f"'{flat.locate(int(values[2]))}' and perhaps others, by {float(values[1]):.2g} of the norm.{why}  The "
                "loops of the ranks changed the model in different ways: compare learning rates, clipping, and changes "
                "to parameters outside session.step()"
            )
    warnings.warn(
        DifferentRanks(f"the ranks' models differed by rounding: all ranks took that of rank {source}"), stacklevel=5
    )
    flat.params.copy_(theirs)
    flat.publish()


def _fingerprint(flat: FlatModel) -> float:
    raw = flat.params.detach().cpu().view(torch.uint8).numpy()
    return float(int.from_bytes(hashlib.blake2b(raw.data, digest_size=6).digest()))
