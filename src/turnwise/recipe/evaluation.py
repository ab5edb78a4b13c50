"""Held-out attempts."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from turnwise.recipe.section import Section


class EvaluationConfig(Section):
    """Held-out attempts, by the same agent loop."""

    every: int = Field(10, ge=0)
    """Steps between evaluations; 0 evaluates only before and after training."""
    tasks: int = Field(128, ge=1)
    """Held-out tasks per environment for evaluations during training."""
    final_tasks: int = Field(512, ge=1)
    """Held-out tasks per environment before and after training."""
    attempts: int = Field(1, ge=1)
    """Attempts per task."""
    temperature: float = Field(1.0, ge=0, le=1e6)
    """Of the sampled evaluation; a greedy one is always made beside it before and after training."""
    top_p: float = Field(1.0, ge=1e-6, le=1)
    """Nucleus of the sampled evaluation."""
    top_k: int = Field(0, ge=0, lt=1 << 31)
    """Most likely tokens the sampled evaluation may draw from; 0 for all."""
    overlap: bool = False
    """Training goes on beside evaluations, which have an engine and a copy of the weights of their own; those before
    and after training have the machine to themselves."""

    @model_validator(mode="after")
    def something_overlaps(self) -> Self:
        if self.overlap and not self.every:
            raise ValueError("overlap is ignored with every = 0, where nothing is evaluated during training")
        return self
