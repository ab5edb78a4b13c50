"""The stepper: an optimizer with its schedule, and the rule that what is not finite is skipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from turnwise.learn.optimizer_state import KEPT, owners, plain_moments, restored_moments, room_for
from turnwise.learn.optimizers import OPTIMIZERS, by_mesh, set_rate
from turnwise.learn.optimizers import OptimizerSettings as OptimizerSettings
from turnwise.learn.schedules import Schedule

Sums = dict[str, float]
Reduce = Callable[[Sums], Sums]
"""Adds numbers up over all ranks that learn together."""


def alone(sums: Sums) -> Sums:
    """The sums of a learner that is the only one."""
    return sums


class Stepper:
    """Applies gradients to parameters, one optimizer step a call."""

    def __init__(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], settings: OptimizerSettings, schedule: Schedule
    ) -> None:
        self.named = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self.parameters = list(self.named.values())
        self.settings = settings
        self.schedule = schedule
        self.optimizers = OPTIMIZERS[settings.name](self.named, settings)
        """One, or several that share the parameters out."""
        self.num_updates = 0
        """Optimizer steps taken or skipped: what the schedule counts."""
        self.num_skipped_in_a_row = 0

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, finite: bool, idle: bool) -> dict[str, float]:
        """Clip and apply the gradient, unless it or the loss is not finite, or nothing had a weight."""
        norm = clipped(self.parameters, self.settings.clip_norm)
        rate = self.settings.learning_rate * self.schedule(self.num_updates)
        set_rate(self.optimizers, rate)
        self.num_updates += 1
        skipped = not (finite and math.isfinite(norm))
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if skipped else 0
        if not skipped and not idle:
            for optimizer in self.optimizers:
                optimizer.step()
        return {"gradient_norm": norm, "learning_rate": rate, "skipped": float(skipped), "idle": float(idle)}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, by name: counts, and the moments of every parameter that was ever updated."""
        kept = {name: torch.tensor(getattr(self, name)) for name in COUNTS}
        owner_of = owners(self.optimizers)
        for name, parameter in self.named.items():
            moments = plain_moments(owner_of[parameter].state.get(parameter, {}))
            kept |= {moment_name(key, name): value for key, value in moments.items()}
        return kept

    def blank(self, names: Collection[str]) -> dict[str, Tensor]:
        """Room for a state of which these names are known."""
        room = {name: torch.zeros((), dtype=torch.int64) for name in COUNTS}
        unknown = []
        for name in set(names) - room.keys():
            key, _, parameter = name.partition("/")
            if key in KEPT and parameter in self.named:
                room[name] = room_for(self.named[parameter], key)
            else:
                unknown.append(name)
        if unknown:
            raise ValueError(
                f"the optimizer in this checkpoint is that of another model: it has {min(unknown)}; "
                "resume with the recipe that wrote it"
            )
        return {name: room[name] for name in sorted(room)}  # in the same order on all ranks

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state."""
        self.num_updates, self.num_skipped_in_a_row = (int(state[name]) for name in COUNTS)
        owner_of = owners(self.optimizers)
        found: dict[str, dict[str, Tensor]] = {}
        for name, value in state.items():
            key, _, named = name.partition("/")
            if named:
                found.setdefault(named, {})[key] = value
        for optimizer in self.optimizers:
            optimizer.state.clear()
        for name, moments in found.items():
            parameter = self.named[name]
            optimizer = owner_of[parameter]
            optimizer.state[parameter] = restored_moments(optimizer, parameter, moments)


COUNTS = ("num_updates", "num_skipped_in_a_row")


def moment_name(key: str, parameter: str) -> str:
    return f"{key}/{parameter}"


def clipped(parameters: Sequence[torch.nn.Parameter], limit: float) -> float:
    """The norm of the gradient, which is then scaled down to the limit; over all ranks where each has a part of it."""
    alike = by_mesh([p for p in parameters if p.grad is not None])
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in alike]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole or [torch.zeros(())]))
    for group in alike:
        torch.nn.utils.clip_grads_with_norm_(group, limit, total)
    return float(total)
