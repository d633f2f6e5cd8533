"""Control: what a run decides between epochs, the same on all workers: to go back (AutoAdjust), or to grow (AutoBatch).

A decision needs a moment at which all workers stand at the same step with nothing in flight.  So the strategy's role is
stopped there as for a saved state, and started again from that state: without a change the run goes on as if it had
never stopped.  A trial of a larger minibatch is a short run to its end from that state, which is then restored.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any

import torch

from paceline.resize import Resize
from paceline.state import StateStore, resize_rule, resized, same
from paceline.strategy import Stopped
from paceline.training.adjust import AutoAdjust
from paceline.training.batch_sizes import AutoBatch
from paceline.worker.replica import Replica

if TYPE_CHECKING:
    from paceline.task import Trainee

State = dict[str, Any]


class Paused(Stopped):
    """Raised in a strategy before a step at which the run decides something."""


class Control:
    """A worker's part in the decisions of its run.

    `role` runs the strategy to its end; `state` and `load` save and restore all that outlives a step.
    """

    def __init__(
        self,
        trainee: Trainee,
        replica: Replica,
        states: StateStore,
        *,
        role: Callable[[], Awaitable[None]],
        state: Callable[[], State],
        load: Callable[[State], None],
    ) -> None:
        self.trainee = trainee
        self._replica = replica
        self._states = states
        self._role = role
        self._state = state
        self._restart = load
        self._adjust = trainee.task.adjust
        self._auto: AutoBatch | None = None
        if isinstance(batch := trainee.task.batch, AutoBatch):
            self._auto = batch.limited(trainee.timetable.samples)
            if replica.rank == 0:
                batch.check_trials(trainee.timetable.samples)
        self._decided = -1  # The last step before which something was decided.
        self._checked = 0  # The epoch of the last accepted check,
        self._criterion = inf  # its criterion,
        self._best: State | None = None  # and the state then.
        self._returns = 0  # In a row.
        self._has_chosen = False  # Whether there was a search for a size of minibatches.
        self._ended_at: int | None = None  # The step at which AutoAdjust has ended the run.
        states.bind("control", rule=same, save=self._save, load=self._load)
        states.bind("losses", rule=resize_losses, save=lambda: {"losses": list(trainee.losses)}, load=self._load_losses)
        if self._adjust is not None:
            states.bind("best", rule=resize_best, save=lambda: {"state": self._best}, load=self._load_best)

    def before(self, step: int) -> None:
        """Called before every step; it stops the role where something is to be decided."""
        trainee = self.trainee
        if trainee.is_trial or step == self._decided or not trainee.has_data(step):
            return
        if not trainee.timetable.is_start(step):
            return
        epoch = trainee.timetable.place(step).epoch
        if self._is_check_due(epoch) or self._is_search_due(epoch) or (step == 0 and self._adjust is not None):
            raise Paused

    async def train(self) -> None:
        """Run the strategy to the end of the run, with all decisions on the way."""
        goes_on = True
        while goes_on:
            is_paused = False
            try:
                await self._role()
            except Paused:  # An error in a decision is not one "during handling" of this.
                is_paused = True
            if is_paused:
                await self._states.before_save()
                goes_on = await self._decide()
            else:
                goes_on = self._adjust is not None and await self._is_sent_back(self._adjust)

    async def _decide(self) -> bool:
        """Everything that is decided at a pause; False if training has ended."""
        step = self._replica.cursor.step
        epoch = self.trainee.timetable.place(step).epoch
        state: State | None = self._state()
        self._decided = step
        if self._adjust is not None and step == 0:
            state = self._best = self._remembering(state)
        elif self._adjust is not None and self._is_check_due(epoch):
            state = await self._judged(self._adjust, state, epoch)
        if state is None:
            return False
        await self._go_on_from(state)
        return True

    async def _go_on_from(self, state: State) -> None:
        """Restart from this state, with the size of minibatches that is to be chosen there."""
        self._restart(self._remembering(state))
        epoch = self.trainee.timetable.place(self._replica.cursor.step).epoch
        if self._auto is not None and self._is_search_due(epoch):
            await self._search(self._auto, self._remembering(state), epoch)

    def _is_check_due(self, epoch: int) -> bool:
        return self._adjust is not None and epoch - self._checked >= self._adjust.interval

    def _is_search_due(self, epoch: int) -> bool:
        return self._auto is not None and self._auto.is_due(epoch, has_chosen=self._has_chosen)

    # AutoAdjust.

    async def _judged(self, adjust: AutoAdjust, state: State, epoch: int) -> State | None:
        """The state to go on from: this one, or that of the last accepted check; None if training has ended."""
        before = self._criterion
        criterion = await mean_loss(self.trainee, self._replica)
        verdict = adjust.judge(criterion, before)
        self._note("adjust", epoch, loss=criterion, before=before, goes_back=verdict.goes_back, factor=verdict.factor)
        if not isfinite(criterion) and before == inf:
            raise FloatingPointError(
                f"AutoAdjust(interval={adjust.interval}): the training loss was {criterion} up to the first check, "
                "so there is no better model to go back to; lower the learning rate, or look for NaN in the data"
            )
        returns = self._returns + 1 if verdict.goes_back else 0
        if verdict.goes_back:
            assert self._best is not None
            self._load(self._best["slots"]["control"]["values"])
            state = self._best
        else:
            self._checked = epoch
            self._criterion = criterion
        self._returns = returns
        self.trainee.rates.factor *= verdict.factor
        state = self._best = self._remembering(state)
        if self.trainee.rates.factor >= adjust.minimum and returns <= adjust.rollbacks:
            return state
        is_low = returns <= adjust.rollbacks
        why = "the learning rate is below the minimum" if is_low else f"{returns - 1} returns in a row"
        self._note("stop", epoch, factor=self.trainee.rates.factor, reason=why)
        self._restart(state)
        end = self._replica.cursor.step
        await self._hidden(until=end)  # A last sync makes all workers equal.
        self._end_at(end)
        return None

    async def _is_sent_back(self, adjust: AutoAdjust) -> bool:
        """At the end of the run: whether the last epochs are repeated."""
        step = self.trainee.timetable.total_steps
        epoch = round(self.trainee.timetable.epochs_before(step))
        if self._replica.cursor.step < step or not self._is_check_due(epoch):
            return False
        state = self._state()
        going_on = await self._judged(adjust, state, epoch)
        if going_on is None or going_on["step"] >= step:
            return False
        await self._go_on_from(going_on)
        return True

    # AutoBatch.

    async def _search(self, auto: AutoBatch, state: State, epoch: int) -> None:
        """Try larger minibatches from this state, and choose one."""
        trainee = self.trainee
        current = trainee.batch_size if self._has_chosen else None
        step = self._replica.cursor.step
        most = -(-trainee.timetable.samples // auto.multiple) * auto.multiple  # Steps of a whole epoch.
        sizes = list(dict.fromkeys(min(size, most) for size in auto.sizes(current, trainee.rates.change(step))))
        losses: list[float] = []
        chosen = sizes[0] if len(sizes) == 1 else None
        for size in sizes if len(sizes) > 1 else ():
            self._restart(state)
            losses.append(await self._trial(auto, epoch, size))
            if not auto.accepts(losses[-1], losses[0]):
                break
            chosen = size
        self._restart(state)
        if chosen is None and not self._has_chosen:
            raise FloatingPointError(
                f"{trainee.task.batch}: the trial with {sizes[0]} samples a step had a training loss of {losses[0]}, "
                "so nothing can be chosen; lower the learning rate, or look for NaN in the data"
            )
        self._resize(epoch, trainee.batch_size if chosen is None else chosen)
        self._has_chosen = True
        self._note("batch", epoch, chosen=trainee.batch_size, before=current, sizes=sizes[: len(losses)], losses=losses)
        self._restart(self._remembering(state))

    async def _trial(self, auto: AutoBatch, epoch: int, size: int) -> float:
        """The mean training loss of a short run with minibatches of that size."""
        timetable = self.trainee.timetable
        self._resize(epoch, size)
        self.trainee.losses = [0.0, 0.0, 0.0]
        steps = min(timetable.steps_in(epoch), max(1, round(auto.trial * timetable.samples / size)))
        await self._hidden(until=timetable.start(epoch) + steps)
        return await mean_loss(self.trainee, self._replica)

    def _resize(self, epoch: int, size: int) -> None:
        self.trainee.batch_size = size
        self.trainee.timetable.forget_from(epoch)

    async def _hidden(self, until: int) -> None:
        """Run the strategy to an earlier end.  NaN is a result there, which stops no run."""
        batch = self._replica.batch
        policy = batch.nonfinite
        batch.nonfinite = "pass" if policy == "stop" else policy
        self.trainee.is_trial = True
        self.trainee.timetable.end_at(until)
        try:
            await self._role()
        finally:
            batch.nonfinite = policy
            self.trainee.is_trial = False
            self.trainee.timetable.end_at(None)

    def _note(self, kind: str, epoch: int, **values: Any) -> None:
        endpoint = self._replica.endpoint
        if endpoint.rank == endpoint.ranks[0]:
            step = self.trainee.timetable.start(epoch)
            endpoint.trace.decision(endpoint.now(), step, kind, {"epoch": epoch, **values})

    # State.

    def _remembering(self, state: State) -> State:
        """The state, with what this object knows now."""
        slots = dict(state["slots"])
        known = {"control": self._save(), "losses": {"losses": list(self.trainee.losses)}, "best": {"state": None}}
        for name, values in known.items():
            if name in slots:
                slots[name] = slots[name] | {"values": values}
        return state | {"slots": slots}

    def _save(self) -> State:
        return {
            "factor": self.trainee.rates.factor,
            "decided": self._decided,
            "checked": self._checked,
            "criterion": self._criterion,
            "returns": self._returns,
            "has_chosen": self._has_chosen,
            "batch_size": self.trainee.batch_size,
            "sizes": list(self.trainee.timetable.sizes),
            "ended_at": self._ended_at,
        }

    def _load(self, values: State) -> None:
        self.trainee.rates.factor = values["factor"]
        self._decided = values["decided"]
        self._checked = values["checked"]
        self._criterion = values["criterion"]
        self._returns = values["returns"]
        self._has_chosen = values["has_chosen"]
        self.trainee.batch_size = values["batch_size"]
        self.trainee.timetable.set_sizes(values["sizes"])
        if values["ended_at"] is not None:
            self._end_at(values["ended_at"])

    def _end_at(self, step: int) -> None:
        self._ended_at = step
        self.trainee.timetable.end_at(step)

    def _load_losses(self, values: State) -> None:
        self.trainee.losses = list(values["losses"])

    def _load_best(self, values: State) -> None:
        if values["state"] is not None:  # Otherwise the state is one of this run, whose best one is known.
            self._best = values["state"]


async def mean_loss(trainee: Trainee, replica: Replica) -> float:
    """The mean training loss of all workers since the last call, the same on all of them.

    Steps that were skipped because of a NaN do not count, unless they are most of them.
    """
    mine = torch.tensor(trainee.losses, dtype=torch.float64)
    endpoint = replica.endpoint
    everyones = [mine] if len(endpoint.ranks) == 1 else await endpoint.all_gather(mine)
    trainee.losses = [0.0, 0.0, 0.0]
    total, samples, bad = (sum(float(t[i]) for t in everyones) for i in range(3))
    is_lost = bad > (samples if replica.batch.nonfinite == "skip" else 0)
    return nan if is_lost or not samples else total / samples


@resize_rule("losses")
def resize_losses(values: Sequence[State], resize: Resize) -> Sequence[State]:
    """The first worker takes the sums of all."""
    sums = [sum(column) for column in zip(*(v["losses"] for v in values), strict=True)]
    return [{"losses": sums if rank == 0 else [0.0] * len(sums)} for rank in range(resize.count)]


@resize_rule("best", sees_all=True)
def resize_best(values: Sequence[State], resize: Resize) -> Sequence[State]:
    """The best state changes its number of workers as any other does."""
    states = [v["state"] for v in values]
    if any(state is None for state in states):
        return [{"state": None}] * resize.count
    return [{"state": state} for state in resized(states, resize.count)]
