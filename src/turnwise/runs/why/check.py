"""A check of a run's metrics, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.recipe.schema import Recipe
from turnwise.runs.why.history import MetricHistory

KEYS = {
    "clip": "loss",
    "correction": "correction.importance_sampling",
    "credit": "credit.name",
    "data": "env.data",
    "dtype": "model.dtype",
    "engine": "engine.name",
    "entropy": "entropy",
    "environments": "env",
    "filter": "filter.name",
    "gap_limit": "guards.max_logprob_gap",
    "group_size": "rollout.group_size",
    "groups_per_update": "groups_per_update",
    "learning_rate": "optimizer.learning_rate",
    "max_action_tokens": "rollout.max_action_tokens",
    "max_lag": "max_lag",
    "max_prompt_tokens": "rollout.max_prompt_tokens",
    "max_trajectory_tokens": "rollout.max_trajectory_tokens",
    "max_turns": "rollout.max_turns",
    "model": "model.path",
    "order": "schedule.order",
    "settings": "env.settings",
    "sft": "sft.updates",
    "stale": "schedule.stale",
    "steps": "steps",
    "tasks": "env.tasks",
    "temperature": "sampling.temperature",
    "tools": "rollout.tools",
    "turn_seconds": "rollout.limits.call_seconds",
    "weight": "env.weight",
}
"""Every key of a recipe that a check reads or names. No other place of this package spells one."""


@dataclass(frozen=True, slots=True)
class RecipeValues:
    """The settings of a recipe, by the names of KEYS.

    Example:
        RecipeValues(recipe)["temperature"]
    """

    recipe: Recipe

    def __getitem__(self, name: str) -> Any:
        value: Any = self.recipe
        for part in KEYS[name].split("."):
            value = getattr(value, part)
        return value

    def named(self, name: str) -> str:
        """A setting as a recipe has it: `sampling.temperature = 0.01`."""
        value = self[name]
        return f"{KEYS[name]} = {value:g}" if isinstance(value, float) else f"{KEYS[name]} = {value}"


@dataclass(frozen=True, slots=True)
class Threshold:
    """A number that a check compares with."""

    value: float
    meaning: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a check looks at."""

    history: MetricHistory
    settings: RecipeValues
    limits: Mapping[str, float]
    """The values of the check's thresholds, by name."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a run does not learn.

    Example:
        Finding("token_limit", "Actions end at the token limit", "97 % of ...", "The model ...", "Raise ...", 3)
    """

    name: str
    """Of the check."""
    cause: str
    seen: str
    """A sentence with the numbers."""
    meaning: str
    remedy: str
    """What to try, with the keys of the recipe."""
    step: int
    """The last step that was looked at."""

    @property
    def line(self) -> str:
        """All of it in one line."""
        return f"{self.cause}: {self.seen} {self.remedy}"

    def to_json(self) -> dict[str, Any]:
        names = ("name", "cause", "seen", "meaning")
        return {name: getattr(self, name) for name in names} | {"try": self.remedy, "step": self.step}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that can be wrong with a run, and how its metrics show it.

    Example:
        Check(name="token_limit", cause="Actions end at the token limit", find=token_limit, reads=("stop/length",), ...)
    """

    name: str
    cause: str
    meaning: str
    remedy: str
    """What to try. {name} stands for a key of the recipe, by the names of KEYS."""
    find: Callable[[Evidence], str | None]
    """The sentence that says what was seen, or None. A pure function."""
    reads: tuple[str, ...]
    """The metrics it looks at; one that ends in "/" stands for all that begin so."""
    thresholds: Mapping[str, Threshold] = field(default_factory=dict)
    explains: tuple[str, ...] = ()
    """Checks that would fire for this cause too. They are not reported beside it."""

    def look(self, history: MetricHistory, recipe: Recipe) -> Finding | None:
        """What the check finds in a run so far."""
        limits = {name: threshold.value for name, threshold in self.thresholds.items()}
        seen = self.find(Evidence(history, RecipeValues(recipe), limits))
        if seen is None:
            return None
        return Finding(self.name, self.cause, seen, self.meaning, self.remedy.format(**KEYS), history.step)
