"""LoopGuard: finds, while the user's loop runs, what would leave the ranks with different models."""

from __future__ import annotations

from contextlib import AbstractContextManager

from paceline.session.settings import GroupSettings
from paceline.session.watch import ModelWatch
from paceline.session.whereabouts import Whereabouts

MOST_STEPS = 1024  # Between two comparisons of the optimizer's settings.


class LoopGuard:
    """The checks of one session: of its model, of the ranks' optimizer settings, and of what the ranks are doing."""

    def __init__(self, watch: ModelWatch, settings: GroupSettings | None, whereabouts: Whereabouts) -> None:
        """`settings` is None if the ranks need not step with the same settings."""
        self.watch = watch
        self.whereabouts = whereabouts
        self._settings = settings
        self._is_changed = False  # The workers have changed since the last step.

    def compare_next(self) -> None:
        """Compare the optimizer's settings at the next step too: the workers are others."""
        self._is_changed = True

    def check_model(self) -> None:
        self.watch.check()

    def check_step(self, step: int, *, has_ended: bool) -> None:
        """Before the step by a gradient that all ranks have: at steps 1, 2, 4, ... and then every `MOST_STEPS`."""
        number = step + 1
        is_changed, self._is_changed = self._is_changed, False
        if self._settings is not None and (is_changed or number & (number - 1) == 0 or number % MOST_STEPS == 0):
            self._settings.check(step, has_ended=has_ended)

    def close(self) -> None:
        self.watch.close()
        self.whereabouts.close()

    def during(self, doing: str) -> AbstractContextManager[None]:
        return self.whereabouts.during(doing)
