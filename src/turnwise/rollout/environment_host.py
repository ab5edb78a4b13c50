"""Where the environments of one dataset run, and how their calls reach them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from turnwise.envs.base import Environment
from turnwise.rollout.batching.microbatch import Lane
from turnwise.rollout.open_limit import EnvironmentMaker


class EnvironmentHost(Protocol):
    """Shared by training and validation. In this process with batched calls it is a `Batches`, in a Ray cluster a
    `RemoteEnvironments`."""

    def wrap(self, make: Callable[[], Environment], lane: Lane) -> EnvironmentMaker:
        """Makes environments like those of `make`, whose calls go through the host."""
        ...

    def report(self) -> dict[str, float]:
        """Metrics since the last report."""
        ...

    def close(self) -> None:
        """End what the host has started."""
        ...
