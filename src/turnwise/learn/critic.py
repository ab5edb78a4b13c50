"""The critic: what is still to come, before every action token, learned on the policy's own plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwise.credit.scope import PerTurn
from turnwise.learn.policy import Policy
from turnwise.learn.schedules import Schedule
from turnwise.learn.snapshot import names_in, read_snapshot
from turnwise.learn.stepper import OptimizerSettings, Reduce, Stepper, alone
from turnwise.learn.terms import drop_unweighted, weighted_means
from turnwise.plan.blocks import Index
from turnwise.plan.plan import Plan, Stretch
from turnwise.pretrained import CausalLM

FOLDER = "critic"


class ValueModel(Policy):
    """A model whose passes yield values in place of logprobs: of the state that each action token was sampled in."""

    def __init__(self, model: CausalLM, head: torch.nn.Linear | None = None, **how: Any) -> None:
        """The head begins as nothing; one that is spread over ranks is given."""
        super().__init__(model, **how)
        first = next(model.parameters())
        self.head = head or value_head(model, first.device, first.dtype)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def predict(self, plan: Plan, stretch: Stretch, states: Tensor) -> tuple[Index, Tensor, Tensor]:
        """(which action tokens, the value before each, nothing)."""
        values = self.head(states.to(self.head.weight.dtype))[:, 0]
        place = self.tensor(stretch.inverse)
        return stretch.picked, values[place], torch.zeros_like(values)[place]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.named_parameters.values())

    @property
    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Of the trunk and of the value head; the language model's own head is not used."""
        of_head = {f"value_head.{name}": parameter for name, parameter in self.head.named_parameters()}
        return {**dict(self.model.base_model.named_parameters()), **of_head}


def value_head(model: CausalLM, device: torch.device | str, dtype: torch.dtype) -> torch.nn.Linear:
    return torch.nn.Linear(model.config.get_text_config().hidden_size, 1, device=device, dtype=dtype)


class Critic:
    """A value model with an optimizer."""

    def __init__(
        self, model: ValueModel, settings: OptimizerSettings, schedule: Schedule, *, clip: float = 0.2
    ) -> None:
        if clip <= 0.0:
            raise ValueError(f"critic.clip must be over 0 (got {clip:g})")
        self.model = model
        self.stepper = Stepper(model.named_parameters.items(), settings, schedule)
        self.clip = clip

    def update(
        self, plans: Sequence[Plan], targets: PerTurn, token_weights: PerTurn, old: PerTurn, reduce: Reduce = alone
    ) -> dict[str, float]:
        """One optimizer step on weight times the squared error, summed over the plans.

        A value that has moved further than `clip` from what it was before the step counts as if it had moved that far,
        where that makes the error larger.
        """
        self.stepper.clear()
        sums = {"critic/loss": 0.0, "critic/clipped": 0.0, "critic/error": 0.0, "weight": 0.0}
        for plan in plans:
            left = len(plan.stretches)
            loss_inputs = {
                "target": plan.gather(targets),
                "weight": plan.gather(token_weights),
                "old": plan.gather(old),
            }
            for picked, *outputs in self.model.passes(plan):
                inputs, (values, _) = drop_unweighted(self.model, loss_inputs, picked, outputs)
                terms, clipped = squared_error(values, inputs["target"], inputs["old"], self.clip)
                total = (terms * inputs["weight"]).sum()
                left -= 1
                self.model.backward(total, is_last=plan is plans[-1] and not left)
                sums["critic/loss"] += float(total.detach())
                sums["weight"] += float(loss_inputs["weight"][picked].sum())
                sums["critic/clipped"] += float((clipped * inputs["weight"]).sum())
                sums["critic/error"] += float(((values - inputs["target"]).detach().abs() * inputs["weight"]).sum())
        sums = reduce(sums)
        stepped = self.stepper.step(math.isfinite(sums["critic/loss"]), idle=not sums["weight"])
        return {
            **weighted_means(sums, "critic/loss"),
            **{f"critic/{name}": value for name, value in stepped.items() if name != "idle"},
        }

    def state(self) -> dict[str, Tensor]:
        """Weights and optimizer, for a folder of a checkpoint."""
        return {**self.weights(), **self.stepper.state()}

    def restore(self, folder: Path) -> None:
        weights = self.weights()
        state = self.stepper.blank(names_in(folder / FOLDER) - weights.keys())
        read_snapshot(folder / FOLDER, {**weights, **state})
        self.stepper.restore(state)

    def weights(self) -> dict[str, Tensor]:
        """The parameters themselves, named apart from what the optimizer keeps of them."""
        return {f"weight/{name}": parameter for name, parameter in self.model.named_parameters.items()}


def squared_error(values: Tensor, targets: Tensor, old: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """(terms, 1 where the bound on movement decides)."""
    plain = 0.5 * (values - targets).square()
    bounded = 0.5 * (old + (values - old).clamp(-clip, clip) - targets).square()
    return torch.maximum(plain, bounded), (bounded > plain).to(values.dtype)
