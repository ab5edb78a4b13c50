"""The stepper: AdamW with its schedule, and the rule that what is not finite is skipped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from turnwise.learn.schedules import Schedule


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW and what surrounds it."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip_norm: float = 1.0


class Stepper:
    """Applies gradients to parameters, one optimizer step a call."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], settings: OptimizerSettings, schedule: Schedule
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.settings = settings
        self.schedule = schedule
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.num_updates = 0
        """Optimizer steps taken or skipped: what the schedule counts."""
        self.num_skipped_in_a_row = 0

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, finite: bool, idle: bool) -> dict[str, float]:
        """Clip and apply the gradient, unless it or the loss is not finite, or nothing had a weight."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip_norm))
        rate = self.settings.learning_rate * self.schedule(self.num_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.num_updates += 1
        skipped = not (finite and math.isfinite(norm))
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if skipped else 0
        if not skipped and not idle:
            self.optimizer.step()
        return {"gradient_norm": norm, "learning_rate": rate, "skipped": float(skipped), "idle": float(idle)}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "num_updates": self.num_updates,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_updates = state["num_updates"]
        self.num_skipped_in_a_row = state["num_skipped_in_a_row"]
