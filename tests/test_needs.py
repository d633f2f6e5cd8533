"""One check compares what a strategy needs with what a driver offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from paceline import EAWild, Needs, Sandblaster, Strategy
from paceline.needs import Offers, check
from tests.laws.every import STRATEGIES


@dataclass(frozen=True)
class Method(Strategy):
    """A strategy that only has needs."""

    needs: Needs  # pyright: ignore[reportIncompatibleVariableOverride]

    async def worker(self, w: Any) -> None: ...


NEEDS = {
    "synchronous": Needs(),
    "parameter server": Needs(collectives=False, servers=True, optimizer=False),
    "peers": Needs(collectives=False, messages=True),
    "shared memory": Needs(shared_memory=True),
    "global data": Needs(collectives=False, servers=True, optimizer=False, global_data=True),
    "length": Needs(length=("steps", "steps_per_epoch")),
}

OFFERS = {
    "a task": Offers("train"),
    "a loop of your own": Offers("attach", global_data=False),
    "a loop without an optimizer": Offers("attach", global_data=False, optimizer=False),
    "a loop of unknown length": Offers("attach", global_data=False, length=()),
    "a loop with a loader": Offers("attach", global_data=False, length=("steps_per_epoch", "samples", "batch")),
    "several hosts": Offers("train", one_host=False),
    "one rank's model for all": Offers("attach", global_data=False, equal_start=False),
    "faults": Offers("simulate", fixed_workers=False),
    "stop and resume": Offers("simulate", unbroken=False),
    "two stages": Offers("train", stages=2),
}

NO_GLOBAL_DATA = (
    "it needs global data .*, which a loop of your own does not offer; use train.* or simulate.* with a Task"
)
NO_OPTIMIZER = "it needs an optimizer .*, which optimizer=None does not offer; give the model's optimizer"
NO_LENGTH = "it needs the steps and steps per epoch of the run before it starts, .*; give loader=..., epochs=..."
NO_STEPS = "it needs the steps of the run before it starts, .*; give loader=..., epochs=..."
SEVERAL_HOSTS = "it needs shared memory .*, which a job on several hosts does not offer; start all workers on one host"
UNEQUAL_START = "it needs the same initial parameters on every rank .*, which initial='broadcast' does not offer"
FAULTS = "it needs all workers and all messages .*, which a run with faults does not offer"
STOPPED = "it needs a run without a stop .*, which a run that is stopped or resumed does not offer"
STAGES = "it needs the whole model in each worker .*, which stages=2 does not offer; .* or stages=1"

REFUSED = {
    ("synchronous", "a loop without an optimizer"): NO_OPTIMIZER,
    ("synchronous", "faults"): FAULTS,
    ("parameter server", "stop and resume"): STOPPED,
    ("peers", "a loop without an optimizer"): NO_OPTIMIZER,
    ("peers", "one rank's model for all"): UNEQUAL_START,
    ("peers", "stop and resume"): STOPPED,
    ("peers", "two stages"): STAGES,
    ("shared memory", "a loop without an optimizer"): NO_OPTIMIZER,
    ("shared memory", "several hosts"): SEVERAL_HOSTS,
    ("shared memory", "faults"): FAULTS,
    ("shared memory", "stop and resume"): STOPPED,
    ("shared memory", "two stages"): STAGES,
    ("global data", "a loop of your own"): NO_GLOBAL_DATA,
    ("global data", "a loop without an optimizer"): NO_GLOBAL_DATA,
    ("global data", "a loop of unknown length"): NO_GLOBAL_DATA,
    ("global data", "a loop with a loader"): NO_GLOBAL_DATA,
    ("global data", "one rank's model for all"): NO_GLOBAL_DATA,
    ("global data", "stop and resume"): STOPPED,
    ("length", "a loop without an optimizer"): NO_OPTIMIZER,
    ("length", "a loop of unknown length"): NO_LENGTH,
    ("length", "a loop with a loader"): NO_STEPS,
    ("length", "faults"): FAULTS,
}


@pytest.mark.parametrize("need", NEEDS)
@pytest.mark.parametrize("driver", OFFERS)
def test_a_driver_refuses_exactly_the_strategies_whose_needs_it_does_not_meet(need: str, driver: str):
    strategy, offers = Method(NEEDS[need]), OFFERS[driver]
    reason = REFUSED.get((need, driver))
    if reason is None:
        check(strategy, offers)
    else:
        with pytest.raises(ValueError, match=rf"^{offers.call}\(Method\): {reason}"):
            check(strategy, offers)


@pytest.mark.parametrize("strategy", [Sandblaster(), EAWild(groups="random")], ids=str)
def test_a_users_own_loop_refuses_strategies_whose_workers_read_any_part_of_a_minibatch(strategy: Strategy):
    with pytest.raises(ValueError, match=NO_GLOBAL_DATA):
        check(strategy, OFFERS["a loop of your own"])


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_task_meets_the_needs_of_every_strategy(name: str):
    check(STRATEGIES[name].strategy, Offers("train"))
