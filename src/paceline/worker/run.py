"""WorkerRun: a worker's role from its start to its end, as a driver runs it.

The simulator, a training process and a session in a user's loop each make one.  It owns the worker's state: the
model, the position in the data, what the learner and the strategy declare.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from paceline.codecs.layout import is_finite
from paceline.endpoint import Endpoint
from paceline.slot_values import Copies
from paceline.state import StateStore, own_position, per_worker
from paceline.strategy import Ended, MissedEnd, Stopped, Strategy
from paceline.worker.batch import NonFinite
from paceline.worker.control import Control
from paceline.worker.learner import Learner
from paceline.worker.plan import Plan
from paceline.worker.replica import Replica, take_published

if TYPE_CHECKING:
    from paceline.task import Trainee


class Interruptions(Protocol):
    """What may stop a worker's role between two steps, and start it again from a state."""

    def before(self, step: int) -> None:
        """Called before every step; an exception stops the role there."""
        ...

    async def train(self, role: Callable[[], Awaitable[None]]) -> None:
        """Run the role to the end of the run."""
        ...


class WorkerRun:
    """One worker under one strategy."""

    def __init__(
        self,
        strategy: Strategy,
        endpoint: Endpoint,
        learner: Learner,
        *,
        nonfinite: NonFinite = "skip",
        plan: Plan | None = None,
        trainee: Trainee | None = None,
    ) -> None:
        """`trainee` is given if the run of a task may decide something between epochs."""
        self.strategy = strategy
        learner.flat.method = type(strategy).__name__
        self.states = StateStore()
        self.replica = Replica(endpoint, learner, self.states, nonfinite=nonfinite, plan=plan)
        self.missed_end = False  # Whether the run ended without this worker.
        self.on_step: Callable[[int], None] = lambda step: None  # The driver's hook: called before every step.
        self.replica.cursor.on_step = self._step
        self.states.settle = self._settle
        self._bind_model()
        rule = per_worker if strategy.needs.ordered else own_position
        self.states.bind("position", rule=rule, save=self._save_position, load=self._load_position)
        learner.bind_state(self.states)
        for method in reversed(strategy.methods):  # Each is checked now, and the first one begins.
            learner.follow(method)
        self.interruptions: Interruptions | None = None  # Of the driver: workers may die and join.
        self._control: Control | None = None
        if trainee is not None and trainee.task.is_controlled:
            self._control = Control(
                trainee,
                self.replica,
                self.states,
                role=self._train,
                state=self.state_dict,
                load=self.load_state_dict,
            )

    @property
    def rank(self) -> int:
        return self.replica.rank

    @property
    def published(self) -> Tensor | None:
        """The vector to evaluate in place of the model's parameters."""
        return self.replica.published

    def lr(self) -> float | None:
        """The largest learning rate of the last step; None if servers take the steps."""
        if not self.strategy.needs.optimizer:
            return None
        return max(float(group["lr"]) for group in self.replica.learner.optimizer.param_groups)

    async def run(self) -> bool:
        """The strategy's worker role; False if it was stopped before its end."""
        replica = self.replica
        flat = replica.learner.flat
        try:
            if self.interruptions is not None:
                await self.interruptions.train(self._train)
            else:
                await (self._train() if self._control is None else self._control.train())
        except MissedEnd:
            self.missed_end = True
        except Stopped:
            await self.states.before_save()
            flat.publish()
            return False
        take_published(replica)
        flat.publish()
        flat.refresh()
        return True

    async def _train(self) -> None:
        """The strategy's worker role, to its end."""
        try:
            await self.strategy.worker(self.replica)
        except MissedEnd:
            raise
        except Ended:  # What the strategy does after its last step would come here.
            await self.replica.mean_of_buffers()

    # State.

    async def _settle(self) -> None:
        if self.replica.cursor.rest is not None:
            await self.replica.cursor.rest.reach()

    def state_dict(self, copies: Copies | None = None) -> dict[str, Any]:
        """All that a resumed run needs, in slots.  Await `states.before_save()` first, if the strategy is running.

        With `copies` the large tensors are in the memory that it keeps.
        """
        replica = self.replica
        return self.states.state_dict(
            strategy=type(self.strategy).__name__,
            step=replica.cursor.step,
            copies=copies,
            rank=replica.rank if replica.cursor.rest is None else replica.cursor.rest.member,
            workers=replica.workers,
            weight=replica.batch.unsynced,
            is_finite=is_finite(replica.params),
            **({} if self.strategy.needs.ordered else {"own_step": True}),
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; before `run`."""
        self.states.load_state_dict(state, strategy=type(self.strategy).__name__)
        self.replica.published = None

    def _step(self, step: int) -> None:
        self.states.check_complete()  # By now the strategy has declared all its slots.
        if self.interruptions is not None:
            self.interruptions.before(step)
        if self._control is not None:
            self._control.before(step)
            if self._control.trainee.is_trial:
                return
        self.on_step(step)

    def _bind_model(self) -> None:
        flat = self.replica.learner.flat

        def save() -> dict[str, Any]:
            late = {flat.names[i]: values for i, values in flat.late.items()}
            return {"params": flat.params, "buffers": list(flat.model.buffers()), "late": late}

        def load(values: dict[str, Any]) -> None:
            if values["params"].numel() != flat.params.numel():
                raise ValueError(
                    f"the saved model has {values['params'].numel()} parameters, and this one has {flat.params.numel()}"
                )
            flat.params.copy_(values["params"])
            flat.publish()
            for mine, saved in zip(flat.model.buffers(), values["buffers"], strict=True):
                mine.copy_(saved)
            flat.late = {flat.names.index(name): late.to(flat.grads) for name, late in values.get("late", {}).items()}

        self.states.bind("model", rule=per_worker, save=save, load=load, is_live=True)

    def _save_position(self) -> dict[str, Any]:
        return self.replica.cursor.save() | self.replica.batch.save()

    def _load_position(self, values: dict[str, Any]) -> None:
        self.replica.cursor.load(values)
        self.replica.batch.load(values)
