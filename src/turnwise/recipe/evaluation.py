"""Held-out attempts."""

from __future__ import annotations

from pydantic import Field

from turnwise.recipe.section import Section


class EvaluationSamplingConfig(Section):
    """How the sampled evaluation samples. Open it to evaluate with the settings that the model is served with."""

    in_short_list = ()

    temperature: float = Field(1.0, ge=0, le=1e6)
    """Temperature; before and after training a greedy evaluation is made besides."""
    top_p: float = Field(1.0, ge=1e-6, le=1)
    """Probability mass of the nucleus; 1 for all tokens."""
    top_k: int = Field(0, ge=0, lt=1 << 31)
    """How many of the likeliest tokens may be sampled; 0 for all."""


class EvaluationConfig(Section):
    """Held-out attempts, by the agent loop of training."""

    every: int = Field(10, ge=0)
    """Steps between evaluations; 0 evaluates only before and after training."""
    tasks: int = Field(128, ge=1)
    """Held-out tasks per environment for evaluations during training."""
    final_tasks: int = Field(512, ge=1)
    """Held-out tasks per environment before and after training."""
    attempts: int = Field(1, ge=1)
    """Attempts per task."""
    greedy: bool = False
    """Whether evaluations during training are made greedily too; those before and after training always are."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()
    """How the sampled evaluation samples."""

    @property
    def most_tasks(self) -> int:
        """Held-out tasks per environment of the largest evaluation."""
        return max(self.tasks, self.final_tasks)
