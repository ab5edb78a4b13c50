"""The critic: what is still to come, before every action token, learned on the policy's own plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.learn.blocks import Relay
from turnwise.learn.policy import Policy
from turnwise.learn.schedules import Schedule
from turnwise.learn.stepper import OptimizerSettings, Stepper
from turnwise.plan.blocks import Index
from turnwise.plan.plan import Plan, Stretch

PerTurn = Sequence[NDArray[Any]]
FILE = "critic.pt"


class ValueModel(Policy):
    """A model whose passes yield values in place of logprobs: of the state that each action token was sampled in."""

    def __init__(self, model: Any, **how: Any) -> None:
        super().__init__(model, **how)
        first = next(model.parameters())
        self.head = torch.nn.Linear(model.config.hidden_size, 1, device=first.device, dtype=first.dtype)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def predict(self, plan: Plan, stretch: Stretch, relay: Relay | None) -> tuple[Index, Tensor, Tensor]:
        """(which action tokens, the value before each, nothing)."""
        hidden = self.hidden(plan, stretch, relay)
        before = self.tensor(plan.parent[stretch.nodes] - stretch.start).long()
        values = self.head(hidden.index_select(0, before).to(self.head.weight.dtype))[:, 0]
        place = self.tensor(stretch.inverse)
        return stretch.picked, values[place], torch.zeros_like(values)[place]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Of the trunk and of the value head; the language model's own head is not used."""
        return [*self.model.base_model.parameters(), *self.head.parameters()]


class Critic:
    """A value model with an optimizer."""

    def __init__(
        self, model: ValueModel, settings: OptimizerSettings, schedule: Schedule, *, clip: float = 0.2
    ) -> None:
        if clip <= 0.0:
            raise ValueError(f"critic.clip must be over 0 (got {clip:g})")
        self.model = model
        self.stepper = Stepper(model.parameters, settings, schedule)
        self.clip = clip

    def update(self, plans: Sequence[Plan], targets: PerTurn, weights: PerTurn, old: PerTurn) -> dict[str, float]:
        """One optimizer step on weight times the squared error, summed over the plans.

        A value that has moved further than `clip` from what it was before the step counts as if it had moved that far,
        where that makes the error larger.
        """
        self.stepper.clear()
        sums = {"critic/loss": 0.0, "critic/clipped": 0.0, "critic/error": 0.0}
        for plan in plans:
            told = {"target": plan.gather(targets), "weight": plan.gather(weights), "old": plan.gather(old)}
            for picked, values, _ in self.model.passes(plan):
                here = {name: self.model.tensor(numbers[picked], values.dtype) for name, numbers in told.items()}
                terms, clipped = squared_error(values, here["target"], here["old"], self.clip)
                total = (terms * here["weight"]).sum()
                total.backward()
                sums["critic/loss"] += float(total.detach())
                sums["critic/clipped"] += float((clipped * here["weight"]).sum())
                sums["critic/error"] += float(((values - here["target"]).detach().abs() * here["weight"]).sum())
        idle = not any(np.any(weight) for weight in weights)
        stepped = self.stepper.step(math.isfinite(sums["critic/loss"]), idle)
        return {**sums, **{f"critic/{name}": value for name, value in stepped.items() if name != "idle"}}

    def save(self, folder: Path) -> None:
        """Weights and optimizer in one file of a checkpoint."""
        state = {"model": self.model.model.state_dict(), "head": self.model.head.state_dict(), **self.stepper.state()}
        torch.save(state, folder / FILE)

    def restore(self, folder: Path) -> None:
        state = torch.load(folder / FILE, weights_only=True, map_location=self.model.device)
        self.model.model.load_state_dict(state["model"])
        self.model.head.load_state_dict(state["head"])
        self.stepper.restore(state)


def squared_error(values: Tensor, targets: Tensor, old: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """(terms, 1 where the bound on movement decides)."""
    plain = 0.5 * (values - targets).square()
    bounded = 0.5 * (old + (values - old).clamp(-clip, clip) - targets).square()
    return torch.maximum(plain, bounded), (bounded > plain).to(values.dtype)
