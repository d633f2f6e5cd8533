"""State: whatever outlives a step, in named and versioned slots.

A strategy, a worker, a learner and a server shard each declare their slots where they use them: a name, a version,
initial values, and a resize rule that says what becomes of the slot with another number of workers or shards.
`StateStore` holds the slots of one rank, writes them into a plain dict and reads them back.  `resized` and
`resharded` apply the rules.  They know no slot by name: a new strategy resumes and resizes without a change here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.resize import (
    RESIZE_RULES,
    SEES_ALL,
    Resize,
    ResizeRule,
    Values,
    name_of,
    own_position,
    per_worker,
    residual,
    resize_rule,
    same,
    shard,
)
from paceline.slot_values import Copies, copied

__all__ = [
    "Resize",
    "ResizeRule",
    "Slot",
    "StateStore",
    "Values",
    "check_header",
    "copied",
    "own_position",
    "per_worker",
    "resharded",
    "residual",
    "resize_rule",
    "resized",
    "resized_for",
    "same",
    "shard",
]

SHARD = "Shard"  # In the header of a shard's state.
FORMAT = 1  # The layout of `state_dict`; a state with another format is refused.


class Slot:
    """The values of one slot, as attributes."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def __getattr__(
        self, name: str
    ) -> Any:  # Called only for a missing name; it tells type checkers that others exist.
        raise AttributeError(f"this slot holds {sorted(vars(self))}, not '{name}'")


@dataclass
class _Entry:
    """A declared slot: its rule, its version, and how its values are read and written."""

    rule: str  # Its name.
    version: int
    save: Callable[[], Values]
    load: Callable[[Values], None] | None = None  # None: the slot was filled when it was declared.
    check: Callable[[Values], None] | None = None  # Raises if the values do not fit.
    before_save: Callable[[], Awaitable[None]] | None = None
    is_live: bool = True  # Whether the values that are read go on to change.


class StateStore:
    """The slots of one rank.

    >>> import torch
    >>> states = StateStore()
    >>> momentum = states.slot("momentum", velocity=torch.zeros(2))
    >>> momentum.velocity += 1
    >>> saved = states.state_dict(strategy="Example", step=3)
    >>> again = StateStore()
    >>> again.load_state_dict(saved, strategy="Example")
    >>> again.slot("momentum", velocity=torch.zeros(2)).velocity
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._saved: dict[str, Any] = {}  # Slots of a loaded state that have not been declared yet.
        self._exchanged: dict[str, Slot] = {}
        self._has_loaded = False
        self._prefix = ""
        self.settle: Callable[[], Awaitable[None]] | None = None  # Awaited before the slots are.

    def slot(
        self,
        name: str,
        /,
        *,
        rule: ResizeRule = same,
        version: int = 1,
        before_save: Callable[[], Awaitable[None]] | None = None,
        is_exchanged: bool = False,
        **initial: Any,
    ) -> Slot:
        """Declare a slot and get its values: those of the loaded state, otherwise the initial ones.

        Declare slots before the first step.  `before_save` is awaited before the state is saved: it brings what is
        still in flight into the slot.  `is_exchanged`: an exchange between workers changes it.
        """
        full = self._new_name(name)
        if self._has_loaded:
            slot = Slot(**_restored(full, self._take(full, version), initial))
        else:
            slot = Slot(**{key: copied(value) for key, value in initial.items()})
        self._entries[full] = _Entry(name_of(rule), version, lambda: vars(slot), before_save=before_save)
        if is_exchanged:
            self._exchanged[full] = slot
        return slot

    def bind(
        self,
        name: str,
        /,
        *,
        save: Callable[[], Values],
        load: Callable[[Values], None],
        check: Callable[[Values], None] | None = None,
        rule: ResizeRule = same,
        version: int = 1,
        is_live: bool = False,
    ) -> None:
        """Declare a slot whose values live elsewhere: in a model, an optimizer, a generator of random numbers.

        `save` gives a copy of them; or, if it `is_live`, the values themselves, of which a copy is saved.  `check`
        raises ValueError for values that do not fit.  All slots are checked before the first is loaded.
        """
        full = self._new_name(name)
        entry = _Entry(name_of(rule), version, save, load, check, is_live=is_live)
        if self._has_loaded:
            _check_fits(full, self._saved, entry)
            load(copied(self._saved.pop(full)["values"]))
        self._entries[full] = entry

    @property
    def exchanged(self) -> list[Slot]:
        """The slots that an exchange between workers changes."""
        return [slot for name, slot in self._exchanged.items() if name in self._entries]

    @contextmanager
    def scope(self, prefix: str, *, keep: bool = False) -> Generator[None]:
        """Within this block, slot names start with `prefix/`.

        Unless told to keep them, the end of the block drops them.
        """
        outer = self._prefix
        self._prefix = f"{outer}{prefix}/"
        inner = self._prefix
        try:
            yield
        finally:
            self._prefix = outer
        if not keep:
            self._entries = {name: entry for name, entry in self._entries.items() if not name.startswith(inner)}

    async def before_save(self) -> None:
        """Await what is still in flight, so that the slots hold all of the state.  All workers do so."""
        if self.settle is not None:
            await self.settle()
        await self.end_exchanges()

    async def end_exchanges(self) -> None:
        """Await this worker's own exchanges in flight."""
        for entry in self._entries.values():
            if entry.before_save is not None:
                await entry.before_save()

    def state_dict(self, *, strategy: str, step: int, copies: Copies | None = None, **header: Any) -> dict[str, Any]:
        """All slots, as plain dicts, lists, numbers, text and tensors.

        They are copies: of their own, or those that `copies` keeps, which last until it makes new ones.
        """
        kept = Copies() if copies is None else copies
        slots = {
            name: {
                "version": entry.version,
                "rule": entry.rule,
                "values": kept.of(entry.save(), name) if entry.is_live else entry.save(),
            }
            for name, entry in self._entries.items()
        }
        return {"format": FORMAT, "strategy": strategy, "step": step, **header, "slots": slots}

    def load_state_dict(self, state: Mapping[str, Any], *, strategy: str) -> None:
        """Load what `state_dict` gave, before the strategy starts.

        A bound slot is loaded now.  Other slots are filled when they are declared.  Nothing is loaded unless all
        bound slots fit.
        """
        check_header(state, strategy)
        slots = dict(state["slots"])
        bound = {name: entry for name, entry in self._entries.items() if entry.load is not None}
        for name, entry in bound.items():
            _check_fits(name, slots, entry)
        for name, entry in bound.items():
            assert entry.load is not None
            entry.load(copied(slots.pop(name)["values"]))
        self._entries = bound
        self._saved = slots
        self._has_loaded = True

    def check_complete(self) -> None:
        """Raise if the loaded state has a slot that has not been declared: it would be lost."""
        if self._saved:
            names = sorted(self._saved)
            raise ValueError(
                f"the saved state has the slots {names}, which the strategy does not declare before its first step: "
                "another strategy saved it, or one with other settings"
            )
        self._has_loaded = False

    def _new_name(self, name: str) -> str:
        full = self._prefix + name
        if full in self._entries:
            raise ValueError(f"the slot '{full}' is declared twice: give each slot a name of its own")
        return full

    def _take(self, name: str, version: int) -> Values:
        values = _check_slot(name, self._saved, version)
        del self._saved[name]
        return values


def check_header(state: Any, strategy: str) -> None:
    """Raise if a saved state has another format, or another strategy saved it."""
    if not isinstance(state, Mapping) or "slots" not in state or "format" not in state:
        raise ValueError(
            f"a saved state is a dict with 'format' and 'slots', as state_dict() gives it, not {_kind(state)}"
        )
    if state["format"] != FORMAT:
        raise ValueError(
            f"the state was saved in format {state['format']}, and this version of paceline reads format {FORMAT}"
        )
    if state["strategy"] != strategy:
        raise ValueError(
            f"the state was saved under {state['strategy']}, and this run uses {strategy}: resume it under "
            f"{state['strategy']}, or start anew from its parameters"
        )


def _check_slot(name: str, slots: Mapping[str, Any], version: int) -> Values:
    if name not in slots:
        raise ValueError(
            f"the saved state has no slot '{name}', only {sorted(slots)}: another strategy saved it, or one with other "
            "settings"
        )
    if (saved := slots[name]["version"]) != version:
        raise ValueError(
            f"the slot '{name}' was saved in version {saved}, and this version of paceline reads version {version}"
        )
    return slots[name]["values"]


def _check_fits(name: str, slots: Mapping[str, Any], entry: _Entry) -> None:
    values = _check_slot(name, slots, entry.version)
    if entry.check is not None:
        entry.check(values)


def _restored(name: str, saved: Values, initial: Values) -> Values:
    """The saved values, on the device and in the dtype of the initial ones; refused if they do not fit."""
    if saved.keys() != initial.keys():
        raise ValueError(f"the saved slot '{name}' holds {sorted(saved)}, and the strategy declares {sorted(initial)}")
    for key, value in initial.items():
        if isinstance(value, Tensor) and saved[key].shape != value.shape:
            raise ValueError(
                f"'{key}' in the saved slot '{name}' has the shape {tuple(saved[key].shape)}, and the strategy "
                f"declares {tuple(value.shape)}: it was saved with another model, or with other settings"
            )
    return {
        key: saved[key].to(value, copy=True) if isinstance(value, Tensor) else copied(saved[key])
        for key, value in initial.items()
    }


def _kind(value: object) -> str:
    return f"a dict with {sorted(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__


def resized(states: Sequence[Mapping[str, Any]], workers: int) -> list[dict[str, Any]]:
    """The saved states of all workers, turned into those of another number of workers.

    Every slot follows its own rule.  A worker with NaN or infinity in its parameters does not count.  No minibatch is
    lost: each is cut into as many parts as there are workers.
    """
    if workers < 1 or not states:
        raise ValueError(f"resized({len(states)} states, workers={workers}): there must be at least one of each")
    if shards := [copied(dict(state)) for state in states if state.get("strategy") == SHARD]:  # They adapt when loaded.
        return resized([state for state in states if state["strategy"] != SHARD], workers) + shards
    _check_states(states)
    _check_complete(states)
    if workers == len(states):
        return [copied(dict(state)) for state in states]
    return _resized(states, workers, range(workers))


def resized_for(states: Sequence[Mapping[str, Any]], workers: int, rank: int) -> dict[str, Any]:
    """The state of one of so many workers, by the rules of the slots, from the states of all that are left.

    The rules apply also to an equal number of workers: they may be others, or other workers may have been lost.
    """
    _check_states(states)
    return _resized(states, workers, [rank])[0]


def _check_states(states: Sequence[Mapping[str, Any]]) -> None:
    for state in states:
        check_header(state, states[0]["strategy"])
    steps = [state["step"] for state in states]
    if len(set(steps)) > 1 and not all(state.get("own_step", False) for state in states):
        raise ValueError(f"resized: the states were saved at different steps, {steps}")
    _check_same_slots(states)


def _check_complete(states: Sequence[Mapping[str, Any]]) -> None:
    of = {state.get("workers", len(states)) for state in states}
    ranks = [state.get("rank", i) for i, state in enumerate(states)]
    if of != {len(states)} or len(set(ranks)) != len(ranks):
        raise ValueError(
            f"resized: these are {len(states)} states, of the ranks {ranks} of {' and '.join(map(str, sorted(of)))} "
            "workers: give the states of all workers of one run, each once"
        )


def _resized(states: Sequence[Mapping[str, Any]], workers: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """The new states of these ranks."""
    steps = [state["step"] for state in states]
    counted = [state for state in states if state["is_finite"]] or list(states)
    resize = Resize(workers, [state["weight"] for state in counted], min(steps))
    weight = sum(resize.weights) / workers
    head = {**states[0], "step": min(steps), "workers": workers, "weight": weight}
    new = {rank: {**head, "rank": rank, "slots": {}} for rank in ranks}
    for name in states[0]["slots"]:
        rule = states[0]["slots"][name]["rule"]
        _resize_slot(name, states if rule in SEES_ALL else counted, resize, new)
    return list(new.values())


def resharded(states: Sequence[Mapping[str, Any]], shards: int, *, unit: int = 1) -> list[dict[str, Any]]:
    """The saved states of all server shards, turned into those of another number of shards."""
    if shards < 1 or not states:
        raise ValueError(f"resharded({len(states)} states, shards={shards}): there must be at least one of each")
    for state in states:
        check_header(state, states[0]["strategy"])
    _check_same_slots(states)
    resize = Resize(shards, [1.0] * len(states), states[0]["step"], unit)
    new = {rank: {**states[0], "rank": rank, "slots": {}} for rank in range(shards)}
    for name in states[0]["slots"]:
        _resize_slot(name, states, resize, new)
    return list(new.values())


def _resize_slot(
    name: str, states: Sequence[Mapping[str, Any]], resize: Resize, new: Mapping[int, dict[str, Any]]
) -> None:
    slots = [state["slots"][name] for state in states]
    rule = slots[0]["rule"]
    if rule not in RESIZE_RULES:
        raise ValueError(
            f"the slot '{name}' follows the resize rule '{rule}': import the module that declares it first"
        )
    values = RESIZE_RULES[rule]([slot["values"] for slot in slots], resize)
    for rank, state in new.items():
        own = values if isinstance(values, dict) else values[rank]
        state["slots"][name] = {"version": slots[0]["version"], "rule": rule, "values": copied(own)}


def _check_same_slots(states: Sequence[Mapping[str, Any]]) -> None:
    def layout(state: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
        return {name: (slot["version"], slot["rule"]) for name, slot in state["slots"].items()}

    for rank, state in enumerate(states):
        if layout(state) != layout(states[0]):
            different = sorted(set(layout(state).items()) ^ set(layout(states[0]).items()))
            names = sorted({name for name, _ in different})
            raise ValueError(
                f"resized: state {rank} and state 0 differ in the slots {names}: one strategy saved all states"
            )
