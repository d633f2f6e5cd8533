"""Network: when a message arrives, if at all, and how late a collective ends, with the faults of the network."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from paceline.sim.faults import Cut, Faults, SlowLink


class Network:
    """Applies the faults of the network to messages, heartbeats and collectives."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self.faults = faults
        self._is_random = bool(faults.lost or faults.doubled or faults.delayed)
        self._has_places = bool(faults.cuts or faults.slow_links)
        self._is_perfect = not (self._is_random or self._has_places)
        self._chance = Random(f"{seed}/faults")

    def arrivals(self, src: int, dst: int, sent: float, latency: float) -> Sequence[float]:
        """The times at which a message, whose last byte leaves at `sent`, arrives: one, none, or two."""
        usual = sent + latency
        if self._is_perfect:
            return (usual,)
        copies = self._copies() if self._is_random else 1
        arrivals = [usual + self._delay() for _ in range(copies)]
        if not self._has_places:
            return arrivals
        late = sum(link.delay for link in self.faults.slow_links if _is_between(link, src, dst, sent))
        return [time for arrival in arrivals if (time := self._past_cuts(src, dst, sent, arrival + late)) is not None]

    def collective_end(self, ranks: Sequence[int], start: float, seconds: float) -> float:
        """When a collective ends that takes so many seconds on a perfect network."""
        if self._is_perfect:
            return start + seconds
        pairs = [(a, b) for a in ranks for b in ranks if a != b] if self._has_places else []
        for cut in sorted(self.faults.cuts, key=lambda cut: cut.start):
            if any(_is_between(cut, a, b, start) for a, b in pairs):
                start = cut.start + cut.seconds
        late = max(
            (k.delay for k in self.faults.slow_links if any(_is_between(k, *pair, start) for pair in pairs)), default=0
        )
        return start + seconds + late + self._delay()

    def _copies(self) -> int:
        if self.faults.lost or self.faults.doubled:
            if self._chance.random() < self.faults.lost:
                return 0
            return 2 if self._chance.random() < self.faults.doubled else 1
        return 1

    def _delay(self) -> float:
        if self.faults.delayed and self._chance.random() < self.faults.delayed:
            return self._chance.uniform(0.0, self.faults.delay_s)
        return 0.0

    def _past_cuts(self, src: int, dst: int, sent: float, arrival: float) -> float | None:
        """When a message arrives in spite of the cuts; None if it is lost."""
        for cut in self.faults.cuts:
            if _is_between(cut, src, dst, sent):
                if not cut.holds:
                    return None
                arrival = max(arrival, cut.start + cut.seconds + (arrival - sent))
        return arrival


def _is_between(fault: Cut | SlowLink, src: int, dst: int, time: float) -> bool:
    """Whether a fault concerns what `src` sends to `dst` at that time."""
    return fault.start <= time < fault.start + fault.seconds and src in fault.senders and dst in fault.receivers
