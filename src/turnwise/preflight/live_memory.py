"""Live memory: how many bytes of tensors exist at each moment, by what they are for, and when there are most."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

OTHER = "activations"
"""What nobody has said anything else of."""


@dataclass(slots=True)
class TakenMemory:
    """A piece of memory from when it was taken to when it was given back, in ticks: numbers of such events."""

    num_bytes: int
    born: int
    died: int | None
    category: str
    made_by: str
    """The operation that took it."""


class LiveMemory:
    """The storages that exist. What they are for may be said at any time before they are gone, for instance of a
    gradient once it belongs to its parameter."""

    def __init__(self) -> None:
        self.segments: list[TakenMemory] = []
        self.now: Counter[str] = Counter()
        """Bytes by category, by what is known of them."""
        self.living: dict[int, TakenMemory] = {}
        self.tick = 0
        self.num_bytes = 0
        self.peak = 0
        self.peak_tick = 0

    def see(self, tensor: Tensor, category: str = OTHER, made_by: str = "") -> None:
        """Count the storage of a tensor, unless it is counted already."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.living:
            return
        self.born(storage._cdata, storage.nbytes(), category, made_by)
        weakref.finalize(storage, self.gone, storage._cdata)

    def mark(self, tensor: Tensor, category: str) -> None:
        """Say what a tensor is for."""
        self.see(tensor, category)
        self.assign(self.living[tensor.untyped_storage()._cdata], category)

    def assign(self, segment: TakenMemory, category: str) -> None:
        self.now[segment.category] -= segment.num_bytes
        segment.category = category
        self.now[category] += segment.num_bytes

    def mark_if_other(self, tensors: Iterable[Tensor], category: str) -> None:
        """Say what tensors are for that nobody has said anything else of."""
        for tensor in tensors:
            segment = self.living.get(tensor.untyped_storage()._cdata)
            if segment is not None and segment.category in (OTHER, "head"):
                self.assign(segment, category)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage that is counted has another size now."""
        if (segment := self.living.get(storage._cdata)) is not None:
            self.gone(storage._cdata)
            self.born(storage._cdata, storage.nbytes(), segment.category, segment.made_by)

    def born(self, key: int, num_bytes: int, category: str, made_by: str) -> None:
        self.tick += 1
        segment = self.living[key] = TakenMemory(num_bytes, self.tick, None, category, made_by)
        self.segments.append(segment)
        self.num_bytes += num_bytes
        self.now[category] += num_bytes
        if self.num_bytes > self.peak:
            self.peak, self.peak_tick = self.num_bytes, self.tick

    def gone(self, key: int) -> None:
        self.tick += 1
        segment = self.living.pop(key)
        segment.died = self.tick
        self.num_bytes -= segment.num_bytes
        self.now[segment.category] -= segment.num_bytes

    def begin(self) -> None:
        """Forget what was before, except what exists."""
        self.segments = list(self.living.values())
        self.peak, self.peak_tick = self.num_bytes, self.tick

    def at(self, tick: int) -> Counter[str]:
        """Bytes by category at a moment."""
        found: Counter[str] = Counter()
        for segment in self.alive(tick):
            found[segment.category] += segment.num_bytes
        return found

    def alive(self, tick: int) -> list[TakenMemory]:
        """The pieces of memory at a moment."""
        return [
            segment
            for segment in self.segments
            if segment.born <= tick and (segment.died is None or tick < segment.died)
        ]

    def events(self) -> list[tuple[int, str, int]]:
        """(tick, category, change of bytes), in order."""
        events = [(segment.born, segment.category, segment.num_bytes) for segment in self.segments]
        events += [
            (segment.died, segment.category, -segment.num_bytes)
            for segment in self.segments
            if segment.died is not None
        ]
        return sorted(events)

    @property
    def most(self) -> Counter[str]:
        """The most bytes of each category at any moment."""
        now: Counter[str] = Counter()
        most: Counter[str] = Counter()
        for _, category, change in self.events():
            now[category] += change
            most[category] = max(most[category], now[category])
        return most

    def peak_without(self, elsewhere: Collection[str]) -> tuple[int, int]:
        """(the most bytes, the moment when there were as many), leaving out categories that are somewhere else."""
        now, peak, moment = 0, 0, self.peak_tick
        for tick, category, change in self.events():
            now += 0 if category in elsewhere else change
            if now > peak:
                peak, moment = now, tick
        return peak, moment
