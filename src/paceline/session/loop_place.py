"""LoopPlace: where the user's own loop is in its data, so that a resumed run continues with the next minibatch.

It counts the passes over the loader that is trained on, and the minibatches of the current pass that have been used.
To shuffle a pass again as it was, it keeps the random numbers with which the pass began.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.session.loop import Loop
from paceline.session.reading import PartLoader

SEVERAL = (
    "attach(elastic=True): a pass over session.shard begins before the last one has ended, so the run has no one place "
    "in its data, which a worker that joins later would need: read one loader to its end, or leave it, before the next"
)


@dataclass(eq=False)
class Visit:
    """A pass over a loader that is trained on."""

    loader: Any
    began: dict[str, Any]  # The random numbers of the process, and those of the loader's generator, before it began.
    skip: int  # The minibatches that were used before the run was resumed.
    used: int  # The minibatches of this pass that have been yielded,
    step: int  # and the run's step when the last one was.
    random: dict[str, Any] | None = None  # To be set before the first minibatch of a resumed pass.
    number: int = 0  # How many passes of any kind had begun before it.
    seed: int | None = None  # By which it is shuffled, if the ranks agreed on one.
    first: str | None = None  # The digest of its first minibatch, if the ranks have compared it.
    after: dict[str, Any] | None = None  # The position of a PartLoader after the last minibatch,
    before: dict[str, Any] | None = None  # and before it.


class LoopPlace:
    """Follows the passes of one session."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.passes = 0  # Those that have ended.
        self.begun = 0  # Those that have begun, and those that evaluate.
        self._visits: list[Visit] = []  # Those that have begun.
        self._saved: Mapping[str, Any] | None = None  # The place at which the coming pass is resumed.
        self.has_epochs = False  # Whether the user's loop has asked for its epochs.
        self.is_alone = False  # Whether a pass must end before another begins.

    def begin(self, loader: Iterable[Any]) -> Visit:
        """A pass begins; a resumed one begins as it did before."""
        saved = self._saved
        self._saved = None
        step = self._loop.replica.cursor.step
        if self.is_alone and self._visits:
            raise ValueError(SEVERAL)
        if saved is None or saved["began"] is None:
            visit = Visit(loader, _random_numbers(loader), 0, 0, step)
        else:
            _set_random_numbers(saved["began"], loader)
            skip = int(saved["minibatch"])
            visit = Visit(loader, saved["began"], skip, skip, step, saved["random"], seed=saved["seed"])
            visit.first = saved.get("first")
        visit.number = self.begun
        if isinstance(loader, PartLoader):
            visit.skip = 0
            if saved is not None and saved["loader"] is not None:
                loader.load_state_dict(saved["loader"])
            visit.after = visit.before = loader.state_dict()
        self._visits.append(visit)
        return visit

    def take(self, visit: Visit) -> None:
        """A minibatch is about to be yielded."""
        if visit.random is not None:
            _set_random_numbers(visit.random, None)
            visit.random = None
        visit.used += 1
        visit.step = self._loop.replica.cursor.step
        if isinstance(visit.loader, PartLoader):
            visit.before = visit.after
            visit.after = visit.loader.state_dict()

    def end(self, visit: Visit | None) -> None:
        if visit in self._visits:
            self._visits.remove(visit)
            self.passes += 1

    def remaining(self, count: int) -> Iterator[int]:
        """The numbers of the passes up to `count` that have not ended."""
        if isinstance(count, bool) or not hasattr(count, "__index__") or index(count) < 0:
            raise ValueError(f"session.epochs({count!r}): it is the number of epochs of the whole run, from 0")
        self.has_epochs = True
        return iter(range(self.passes, index(count)))

    # State.

    def save(self, *, before_next: bool) -> dict[str, Any]:
        """The place between two steps; `before_next`: a minibatch was fetched, but not yielded yet."""
        if len(self._visits) > 1:
            raise ValueError(
                "a run that reads several loaders at once, by several session.shard(...), has no one place in its "
                "data: save it between two passes"
            )
        place: dict[str, Any] = {
            "passes": self.passes,
            "minibatch": 0,
            "began": None,
            "random": _random_numbers(None),
            "loader": None,
            "begun": self.begun,
            "seed": None,
            "first": None,
        }
        for visit in self._visits:
            # In the loop's body, the last minibatch is used once the step with it was taken.
            is_used = before_next or self._loop.replica.cursor.step > visit.step
            place["minibatch"] = visit.used if is_used else visit.used - 1
            place |= {"began": visit.began, "begun": visit.number, "seed": visit.seed, "first": visit.first}
            place["loader"] = visit.after if is_used else visit.before
        return place

    def load(self, saved: Mapping[str, Any]) -> None:
        """The next pass continues there."""
        self.passes = int(saved["passes"])
        self.begun = int(saved["begun"])
        self._saved = saved
        if saved["began"] is None:
            _set_random_numbers(saved["random"], None)


def _random_numbers(loader: Iterable[Any] | None) -> dict[str, Any]:
    """The states of the generators that a training loop uses: Python's, numpy's, torch's, and the loader's own."""
    kind, keys, *numbers = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *numbers],
        "torch": torch.get_rng_state(),
        "loader": None,
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }
    generator = getattr(loader, "generator", None)
    if isinstance(generator, torch.Generator):
        found["loader"] = generator.get_state()
    return found


def _set_random_numbers(saved: Mapping[str, Any], loader: Iterable[Any] | None) -> None:
    random.setstate(saved["python"])
    kind, keys, *numbers = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *numbers))
    torch.set_rng_state(saved["torch"])
    states: list[Tensor] = saved["cuda"]
    if torch.cuda.is_available() and len(states) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states)
    generator = getattr(loader, "generator", None)
    if isinstance(generator, torch.Generator) and saved["loader"] is not None:
        generator.set_state(saved["loader"])
