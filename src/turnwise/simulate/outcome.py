"""What a simulation found: steps per hour, what each part did meanwhile, and how old the tokens were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Figures of the steps after the first ones, in which the pipeline fills.

    Example:
        outcome.steps_per_hour, outcome.engines_busy, outcome.lags[0]
    """

    seconds_per_step: float
    engines_busy: float
    """Share of the time in which a replica computes, on average."""
    learner_busy: float
    driver_busy: float
    """Share of the time in which the process that runs the agent loop computes."""
    sampling: float
    """Share of an attempt's time in which an engine has its call, queued or running, until it ends."""
    in_environment: float
    """Share in which its environment computes an answer."""
    engine_tokens: float
    """Tokens that a replica decodes in a second in which it computes."""
    tokens_per_step: float
    """Unique tokens."""
    lags: Mapping[int, float]
    """Share of the trained tokens of each lag."""
    dropped: float
    """Share of the groups that were sampled in vain."""
    fair_turns: float
    """Mean turns of trained attempts over those of sampled ones."""

    @property
    def steps_per_hour(self) -> float:
        return 3600 / self.seconds_per_step

    @property
    def mean_lag(self) -> float:
        return sum(lag * share for lag, share in self.lags.items())

    @property
    def limit(self) -> str:
        """The part that the others wait for: the one that idles least, or, if none is busy, the attempts themselves."""
        busy = {"learner": self.learner_busy, "engines": self.engines_busy, "agent loop": self.driver_busy}
        part = max(busy, key=lambda name: busy[name])
        if busy[part] >= 0.9:
            return part
        if self.in_environment > 0.5:
            return "environments"
        return f"{part}, and waiting for the longest attempts"
