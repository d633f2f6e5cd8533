"""Error feedback of pushes to a parameter server: what a rule gets and what workers keep add up to what they meant."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import ASGD, Cluster, Downpour, ParameterServer, SoftSync, StaleSynchronous, simulate
from paceline.codecs import DGC, Codec, ErrorFeedback, OneBit
from paceline.server.rules import Every, Push, Quorum, Rule, Scaled, Sgd
from paceline.server.store import Store
from paceline.state import Slot
from tests.laws.every import CODECS
from tests.laws.slots import Slots, in_units
from tests.laws.tasks import close, numbers, quadratic

NUMEL = 600
ONE_TO_ONE = {name: codec for name, codec in CODECS.items() if codec.feedback and not codec.needs_group}


def vector(t: int) -> Tensor:
    return numbers(NUMEL, seed=t)


@pytest.mark.parametrize("codec", ONE_TO_ONE.values(), ids=ONE_TO_ONE)
def test_what_was_left_out_keeps_the_weight_of_its_update(codec: Codec):
    """Messages times their samples, and what is kept times its unit, add up to the updates times their samples."""
    slots = Slots()
    state = codec.codec_state(slots, torch.zeros(NUMEL, dtype=torch.float64))
    received, meant = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    slot = vars(slots.slots["residuals"])
    for t, samples in enumerate([32, 32, 1, 5, 32, 7]):
        x = vector(t)
        momentum = 0.9 * in_units(slot, "velocity") if isinstance(codec, DGC) else 0.0
        meant += samples * x + momentum
        state.weigh(samples)
        state.add(state.encode(x), received, samples)
    assert close(received + in_units(slot), meant, rtol=1e-11)


# Rules.


def applied(rule: Rule, pushes: list[tuple[Tensor, Push]]) -> Tensor:
    """What a rule around Sgd(1.0) gives to it, in all."""
    value = torch.zeros(NUMEL, dtype=torch.float64)
    m = Slot(**rule.memory(value))
    for message, push in pushes:
        rule.apply(value, message.clone(), m, push)
    rule.flush(value, m)
    return -value


@pytest.mark.parametrize(
    ("rule", "coefficients"),
    [
        (Scaled(Sgd(1.0)), [1.0, 1 / 3, 1.0, 1 / 2, 1 / 5]),
        (Every(Sgd(1.0), 2), [1 / 2, 1 / 2, 1 / 2, 1 / 2, 1.0]),  # The last mean is of one update.
        (Scaled(Every(Sgd(1.0), 2)), [1 / 2, 1 / 6, 1 / 2, 1 / 4, 1 / 5]),
        (Quorum(Sgd(1.0), least=1), [1.0] * 5),
    ],
    ids=str,
)
def test_what_was_left_out_of_an_update_has_the_coefficient_of_the_next(rule: Rule, coefficients: list[float]):
    """So it is not conserved where coefficients change, by exactly the changes times the residuals."""
    state = ErrorFeedback(OneBit(), torch.zeros(NUMEL, dtype=torch.float64))
    pushes: list[tuple[Tensor, Push]] = []
    residuals = [torch.zeros(NUMEL, dtype=torch.float64)]
    for t, staleness in enumerate([0, 3, 1, 2, 5]):
        message = state.codec.decode(state.encode(vector(t)), NUMEL).double()
        pushes.append((message, Push(src=0, samples=8.0, staleness=staleness, workers=2)))
        residuals.append(state.residual.clone())
    assert close(sum(m for m, _ in pushes) + residuals[-1], sum(vector(t) for t in range(5)), rtol=1e-11)
    meant = sum(c * vector(t) for t, c in enumerate(coefficients))
    changes = sum((b - a) * r for (a, b), r in zip(pairwise(coefficients), residuals[1:], strict=False))
    total = applied(rule, pushes)
    assert close(total, meant + changes - coefficients[-1] * residuals[-1], rtol=1e-11)
    assert close(total, sum(c * m for c, (m, _) in zip(coefficients, pushes, strict=True)), rtol=1e-11)


# Whole runs.

KEPT: list[Store] = []


class Keeping:
    """A method whose workers' stores can be seen after the run."""

    def store(self: Any, w: Any) -> Store:
        KEPT.append(super().store(w))  # type: ignore[misc]
        return KEPT[-1]


def slope(model: Any, batch: Any) -> Tensor:
    return (model.w * batch[0]).sum(1).mean()


class KeptASGD(Keeping, ASGD): ...


class KeptDownpour(Keeping, Downpour): ...


class KeptParameterServer(Keeping, ParameterServer): ...


class KeptSoftSync(Keeping, SoftSync): ...


class KeptStaleSynchronous(Keeping, StaleSynchronous): ...


@pytest.mark.parametrize(
    ("strategy", "settings", "rate"),
    [
        (KeptASGD, {"period": 3}, 1.0),
        (KeptDownpour, {"push": 2, "fetch": 2, "rule": Sgd(0.1)}, 0.1),
        (KeptParameterServer, {"rule": Sgd(0.1)}, 0.1),
        (KeptSoftSync, {"lr": 0.1, "updates": 2, "scale": None}, 0.05),
        (KeptStaleSynchronous, {"lr": 0.1, "bound": 2}, 0.1),
        (KeptParameterServer, {"rule": Quorum(Sgd(0.1))}, 0.1 / 9),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else "",
)
def test_a_run_without_a_codec_has_moved_as_far_as_one_with_a_codec_and_what_it_has_not_sent(
    strategy: Any, settings: dict[str, Any], rate: float
):
    """On slopes.  The last minibatch of an epoch has a single sample, so one worker pushes a gradient without samples.

    For a quorum all minibatches have 9 samples: a worker has 5 of them, or 4.
    """
    samples = 27 if settings.get("rule") == Quorum(Sgd(0.1)) else 28
    task = replace(quadratic(batch=9, numel=600, samples=samples, steps=8), loss=slope)
    ends = []
    for codec in (None, OneBit()):
        KEPT.clear()
        ends.append(simulate(task, strategy(codec=codec, **settings), Cluster(workers=2, compute=[1.0, 2.7])).params)
    unsent = sum(store.unsent() for store in KEPT)
    assert unsent.count_nonzero()
    assert close(ends[1] - rate * unsent, ends[0], rtol=1e-9)
