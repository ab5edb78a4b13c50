"""The stepper: AdamW with its schedule, and the rule that what is not finite is skipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.learn.schedules import Schedule

Sums = dict[str, float]
Reduce = Callable[[Sums], Sums]
"""Adds numbers up over all ranks that learn together."""


def alone(sums: Sums) -> Sums:
    """The sums of a learner that is the only one."""
    return sums


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
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], settings: OptimizerSettings, schedule: Schedule
    ) -> None:
        self.named = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self.parameters = list(self.named.values())
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
        norm = clipped(self.parameters, self.settings.clip_norm)
        rate = self.settings.learning_rate * self.schedule(self.num_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.num_updates += 1
        skipped = not (finite and math.isfinite(norm))
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if skipped else 0
        if not skipped and not idle:
            self.optimizer.step()
        return {"gradient_norm": norm, "learning_rate": rate, "skipped": float(skipped), "idle": float(idle)}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, by name: counts, and the moments of every parameter that was ever updated."""
        kept = {name: torch.tensor(getattr(self, name)) for name in COUNTS}
        for name, parameter in self.named.items():
            moments = self.optimizer.state.get(parameter, {})
            kept |= {moment_name(key, name): value for key, value in moments.items()}
        return kept

    def blank(self, names: Collection[str]) -> dict[str, Tensor]:
        """Room for a state of which these names are known."""
        room = {name: torch.zeros((), dtype=torch.int64) for name in COUNTS}
        for name, parameter in self.named.items():
            if moment_name("step", name) in names:
                room[moment_name("step", name)] = torch.zeros((), device=parameter.device)
                room |= {moment_name(key, name): torch.zeros_like(parameter) for key in MOMENTS}
        if unknown := set(names) - room.keys():
            raise ValueError(
                f"the optimizer in this checkpoint is that of another model: it has {min(unknown)}; "
                "resume with the recipe that wrote it"
            )
        return room

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state."""
        self.num_updates, self.num_skipped_in_a_row = (int(state[name]) for name in COUNTS)
        self.optimizer.state.clear()
        for name, parameter in self.named.items():
            if moment_name("step", name) in state:
                keys = ("step", *MOMENTS)
                self.optimizer.state[parameter] = {key: state[moment_name(key, name)].detach() for key in keys}


COUNTS = ("num_updates", "num_skipped_in_a_row")
MOMENTS = ("exp_avg", "exp_avg_sq")


def moment_name(key: str, parameter: str) -> str:
    return f"{key}/{parameter}"


def clipped(parameters: Sequence[torch.nn.Parameter], limit: float) -> float:
    """The norm of the gradient, which is then scaled down to the limit; over all ranks where each has a part of it."""
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if hasattr(total, "full_tensor"):
        total = total.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, total)
    return float(total)
