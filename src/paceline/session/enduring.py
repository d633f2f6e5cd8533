"""What does not go together with elastic=True, by which synchronous runs outlive the death of a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.session.loop_members import check_also
from paceline.session.terms import Terms
from paceline.strategy import Strategy


def check_elastic(terms: Terms) -> None:
    """Raise ValueError if workers of a run by these terms cannot be lost or join."""
    if not terms.elastic:
        return
    check_outlives("train(elastic=True)", terms.strategy)
    if terms.depth > 1:
        raise ValueError(
            f"train(stages={terms.stages}, elastic=True): a replica in stages cannot lose a process; leave one of them "
            "out"
        )
    if terms.task.is_controlled:
        raise ValueError(
            "train(elastic=True) with a Task that has AutoAdjust or AutoBatch: what they decide is about the workers "
            "of the beginning; use a Schedule and a GrowingBatch, or leave elastic out"
        )
    if terms.task.has_own_data:
        raise ValueError(
            "train(elastic=True) with data of each worker's own: with a worker its data would be lost; give the Task "
            "data=[...], or leave elastic out"
        )


def check_elastic_loop(strategy: Strategy, *, mesh: object, initial: str, also: Mapping[str, Any]) -> None:
    """The same for a user's own loop."""
    check_outlives("attach(elastic=True)", strategy)
    check_also("attach", also)
    if mesh is not None:
        raise ValueError(
            "attach(mesh=..., elastic=True): a replica of several ranks cannot lose one of them; leave one of them out"
        )
    if initial != "equal":
        raise ValueError(
            f"attach(initial={initial!r}, elastic=True): a worker that joins later builds its model by itself, and "
            "what is not trained in it must be the same; give every process the same torch.manual_seed, and "
            "initial='equal'"
        )


def check_device(call: str, device: torch.device, *, elastic: bool) -> None:
    """The same for the model's device."""
    if elastic and device.type != "cpu":
        raise ValueError(
            f"{call}(elastic=True) with a model on {device}: workers meet again through shared memory and gloo, on the "
            "CPU; leave elastic out there"
        )


def check_outlives(call: str, strategy: Strategy) -> None:
    """Raise ValueError if the strategy's collectives cannot be repeated without a worker."""
    name = type(strategy).__name__
    if strategy.needs.elastic:
        raise ValueError(
            f"{call} with {name}: its workers do not wait for each other, so the others go on anyway if one of them "
            "dies; leave elastic out"
        )
    if not strategy.needs.ordered:
        raise ValueError(
            f"{call} with {name}: what its workers share beside collectives is lost with a worker; use a synchronous "
            "method, such as AllReduceSGD or PeriodicAveraging"
        )
