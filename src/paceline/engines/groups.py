"""Groups: torch's process groups of one job."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.engines.interfaces import gloo_on


class Groups:
    """The process groups that a job has opened: the default one if the user has none, and groups of some ranks.

    Their gloo listens on `interface`; None: torch chooses.
    """

    def __init__(self, device: torch.device, *, timeout_s: float) -> None:
        self.interface: str | None = None
        self._device = device
        self._limit = timedelta(seconds=timeout_s)  # torch gives a new group its own default, not that of the first.
        self._made_default = False
        self._apart: list[dist.ProcessGroup] = []
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def make_default(self, store: dist.Store, rank: int, workers: int) -> None:
        """torch's default group of all ranks, unless the user has made it."""
        if not dist.is_initialized():
            backend = _backend(self._device)
            with gloo_on(self.interface):
                dist.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=self._limit)
            self._made_default = True

    def of_all(self, *, apart: bool) -> dist.ProcessGroup | None:
        """The default group; or, `apart`, another one of all ranks, which can be used at the same time."""
        if not apart:
            return dist.group.WORLD
        with gloo_on(self.interface):
            self._apart.append(_checked(dist.new_group(backend=self._kind(), timeout=self._limit)))
        return self._apart[-1]

    def open_from_all(self, ranks: tuple[int, ...], rank: int) -> None:
        """A group that all ranks open together, members or not.

        torch names a group that its members open alone by how many groups each of them has opened before.
        """
        with gloo_on(self.interface):
            group = dist.new_group(list(ranks), timeout=self._limit)
        if rank in ranks:
            self._by_ranks[ranks] = _checked(group)

    def open(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A group that its members open alone: in the same order, and after as many others."""
        with gloo_on(self.interface):
            group = dist.new_group(
                list(ranks), backend=self._kind(), timeout=self._limit, use_local_synchronization=True
            )
        self._by_ranks[tuple(ranks)] = _checked(group)
        return self._by_ranks[tuple(ranks)]

    def get(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        return self._by_ranks.get(ranks)

    def _kind(self) -> str | None:
        """The backend of a new group; None: the same as the default one's.

        The user's default group is often NCCL's alone, but votes are on the CPU.
        """
        return _backend(self._device) if dist.get_backend() == "nccl" else None

    def close(self, *, failed: bool) -> None:
        self._by_ranks.clear()
        if self._made_default and dist.is_initialized():
            dist.destroy_process_group()
        elif dist.is_initialized() and not failed:  # After a failure they may be in use.
            for group in self._apart:
                with suppress(ValueError):  # The user has destroyed all groups already.
                    dist.destroy_process_group(group)
        self._apart.clear()


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _checked(group: dist.ProcessGroup | int | None) -> dist.ProcessGroup:
    assert group is not None and not isinstance(group, int)  # What torch returns to ranks that are no members.
    return group
