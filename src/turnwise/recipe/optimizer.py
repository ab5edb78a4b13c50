"""Optimizers: of the policy, of the critic, of the warm start."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from turnwise.recipe.section import Section


class AdamwConfig(Section):
    """Constants of AdamW and of gradient clipping. Open it when `gradient_norm` has spikes that a lower learning rate
    does not cure, or to repeat the settings of a paper."""

    in_short_list = ()

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moment estimates."""
    clip_norm: float = Field(1.0, gt=0)
    """Largest global norm of a gradient; a larger gradient is scaled down to it."""


class OptimizerConfig(Section):
    """The optimizer and its learning rate schedule. Open it when the moments of AdamW do not fit, or to try another
    optimizer."""

    in_short_list: ClassVar[tuple[str, ...] | None] = ("learning_rate", "schedule", "warmup", "weight_decay")

    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate. The default is the usual one for all weights of a large model; the recipes have 1e-5 for all
    weights of SmolLM2-135M and 7e-4 for the tiny model."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up; linear and cosine reach zero at the last step."""
    warmup: int = Field(0, ge=0)
    """Updates over which the learning rate rises linearly."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw keeps two float32 moments of each weight. adamw_8bit keeps those of large weights in 8 bits and needs
    torchao. muon steps the matrices of layers along their orthogonalized momentum, and all else by adamw."""
    adamw: AdamwConfig = AdamwConfig()
    """Constants of AdamW and of gradient clipping."""


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW for the critic. Open it when `critic/error` does not fall."""

    in_short_list = ()

    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate."""


class CriticConfig(Section):
    """The critic of credit gae: a copy of the policy at the start, with a value head, trained on the same plans. Open
    it when you use credit gae."""

    in_short_list = ()

    clip: float = Field(0.2, gt=0)
    """Distance from its value before the step beyond which a value that moves further no longer lowers the loss."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """Optimizer of the critic."""


class SftOptimizerConfig(OptimizerConfig):
    """AdamW for the warm start. Open it when the loss of the warm start does not fall."""

    in_short_list = ("learning_rate",)

    learning_rate: float = Field(1e-3, gt=0)
    """Peak learning rate; the recipes have 3e-3 for the tiny model and 1e-4 for SmolLM2-135M."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after the warm-up; linear and cosine reach zero at the last update."""
    warmup: int = Field(20, ge=0)
    """Updates over which the learning rate rises linearly."""
