"""StrategyDriver: it runs a strategy's coroutine from one request to the next."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from paceline.op import Op
from paceline.session.learner import GradientRequest, LocalStepRequest, RateRequest, Request, StepRequest


class StrategyDriver:
    """Advances a strategy's coroutine.

    The coroutine stops at each request, which only the user's loop can fulfil.  The driver waits for every other
    operation on the way.
    """

    def __init__(self) -> None:
        self.request: Request | None = None  # Where the strategy waits; None if it has ended.
        # Called at each change between the strategy (True) and the user's loop.
        self.on_turn: Callable[[bool], None] | None = None
        self._coroutine: Coroutine[Op[Any], Any, Any] | None = None

    @property
    def waits_for_step(self) -> bool:
        """Whether a gradient was given that the user's loop has not used for a step."""
        return isinstance(self.request, StepRequest)

    def start(self, coroutine: Coroutine[Op[Any], Any, Any]) -> None:
        """Run a coroutine to its first request; a coroutine that was running before is closed."""
        self.close()
        self._coroutine = coroutine
        self.advance(None)

    def advance(self, value: Any) -> None:
        """Fulfil the request with `value`, and run to the next one."""
        if self.on_turn is None:
            return self._advance(value)
        self.on_turn(True)
        try:
            self._advance(value)
        finally:
            self.on_turn(False)

    def _advance(self, value: Any) -> None:
        assert self._coroutine is not None
        self.request = None
        error: Exception | None = None
        while self.request is None:
            try:
                op = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
            except StopIteration:
                return
            if isinstance(op, (GradientRequest, StepRequest, LocalStepRequest, RateRequest)):
                self.request = op
                return
            try:
                value = op.wait()
                error = None
            except Exception as failure:
                error = failure

    def close(self) -> None:
        if self._coroutine is not None:
            self._coroutine.close()
