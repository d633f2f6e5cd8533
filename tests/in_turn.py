"""Many short cases in one test: pytest takes longer to start a case than many of ours take to run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import product
from typing import Any


def in_turn(**parameters: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test once for all combinations of these values.  A failure shows them as the arguments of the test."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def every(*args: Any, **given: Any) -> None:
            for values in product(*parameters.values()):
                test(*args, **given, **dict(zip(parameters, values, strict=True)))

        signature = inspect.signature(test)
        others = [p for name, p in signature.parameters.items() if name not in parameters]
        every.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return every

    return decorate
