"""Channel: texts from all workers to the first one, which polls and never waits."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import Protocol


class Store(Protocol):
    """What is used of a torch.distributed.Store."""

    def set(self, key: str, value: str) -> object: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, value: int) -> int: ...
    def delete_key(self, key: str) -> bool: ...


class Channel(Protocol):
    def send(self, rank: int, text: str) -> None: ...

    def receive(self, rank: int) -> list[str]:
        """What a worker has sent since the last call."""
        ...

    def of(self, index: int) -> Channel:
        """The channel of the monitor with that number."""
        ...


class LocalChannel:
    """Between the workers of one process."""

    def __init__(self) -> None:
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._others: defaultdict[int, LocalChannel] = defaultdict(LocalChannel)

    def send(self, rank: int, text: str) -> None:
        self._texts[rank].append(text)

    def receive(self, rank: int) -> list[str]:
        return self._texts.pop(rank, [])

    def of(self, index: int) -> LocalChannel:
        return self._others[index]


class StoreChannel:
    """Between processes, through the store of their job, by keys with numbers.

    A worker that replaces a dead one goes on with the dead one's numbers.
    """

    def __init__(self, store: Store, prefix: str = "monitor") -> None:
        self._store = store
        self._prefix = prefix
        self._taken: dict[int, int] = {}

    def send(self, rank: int, text: str) -> None:
        with suppress(RuntimeError):  # The process that serves the store may have ended before.
            number = self._store.add(f"{self._prefix}/{rank}/sent", 1)
            self._store.set(f"{self._prefix}/{rank}/{number}", text)

    def receive(self, rank: int) -> list[str]:
        found: list[str] = []
        taken = f"{self._prefix}/{rank}/taken"
        with suppress(RuntimeError):
            if rank not in self._taken:
                self._taken[rank] = self._store.add(taken, 0)
            while self._store.check([key := f"{self._prefix}/{rank}/{self._taken[rank] + 1}"]):
                found.append(self._store.get(key).decode())
                self._store.delete_key(key)
                self._taken[rank] = self._store.add(taken, 1)
        return found

    def of(self, index: int) -> StoreChannel:
        return StoreChannel(self._store, f"{self._prefix}/{index}")
