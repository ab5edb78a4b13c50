"""Optimizers: of the policy, of the critic, of the warm start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from turnwise.recipe.section import Section


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the moment estimates."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    clip_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up; linear and cosine end at zero with the last step."""
    warmup: int = Field(0, ge=0)
    """Updates over which the learning rate rises linearly."""


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW for the critic, with a default of its own."""

    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate."""


class CriticConfig(Section):
    """The critic of credit gae: a copy of the policy at the start, with a value head, trained on the same plans."""

    clip: float = Field(0.2, gt=0)
    """How far a value may move from what it was before the step before its error stops shrinking."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """Optimizer of the critic."""


class SftOptimizerConfig(OptimizerConfig):
    """AdamW for the warm start, with defaults of its own."""

    learning_rate: float = Field(1e-3, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup: int = Field(20, ge=0)
    """Updates over which the learning rate rises linearly."""
