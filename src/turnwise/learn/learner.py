"""The learner: scores recorded tokens and takes optimizer steps on plans."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.learn.critic import Critic
from turnwise.learn.objective import Objective
from turnwise.learn.policy import Policy, no_progress_bars
from turnwise.learn.schedules import Schedule
from turnwise.learn.stepper import OptimizerSettings, Stepper
from turnwise.plan.plan import Plan

PerTurn = Sequence[NDArray[Any]]


class Learner:
    """A policy with an optimizer, a critic where one is needed, and models that stay as they are beside them. One call
    to `update` is one optimizer step, whatever the number of plans."""

    def __init__(
        self,
        policy: Policy,
        settings: OptimizerSettings,
        schedule: Schedule,
        frozen: Mapping[str, Policy] = MappingProxyType({}),
        critic: Critic | None = None,
    ) -> None:
        self.models: dict[str, Policy] = {**frozen, "old": policy}
        """By the name of what they score: old, reference, teacher, values."""
        self.policy = policy
        self.critic = critic
        self.stepper = Stepper(policy.model.parameters(), settings, schedule)
        self.seconds = {"score": 0.0, "forward_backward": 0.0, "optimizer": 0.0}
        if critic is not None:
            self.models["values"] = critic.model
            self.seconds["critic"] = 0.0

    @torch.no_grad()
    def score(self, plans: Sequence[Plan], num_turns: int, name: str = "old") -> list[NDArray[Any]]:
        """Logprobs of every action token under the present weights, or under those of a frozen model, or the critic's
        values before them, one array per turn."""
        before = time.perf_counter()
        scores: list[NDArray[Any]] = [np.zeros(0, np.float32)] * num_turns
        for plan in plans:
            logprobs = np.zeros(len(plan.action_nodes), np.float32)
            for picked, now, _ in self.models[name].passes(plan):
                logprobs = placed(logprobs, picked, now)
            hand_out(plan, logprobs, scores)
        self.seconds["score"] += time.perf_counter() - before
        return scores

    def update(
        self,
        plans: Sequence[Plan],
        credit: PerTurn,
        weights: PerTurn,
        scores: Mapping[str, PerTurn],
        objective: Objective,
    ) -> tuple[dict[str, float], list[NDArray[Any]]]:
        """One optimizer step on weight times the objective's term, summed over the plans; metrics, and each token's
        logprob as it was before the step.

        Without old scores the policy is its own old policy, as in the only update of a step. A non-finite loss or
        gradient skips the step, and so do weights that are all zero: there is nothing to learn then, while the
        optimizer's momentum would still move the policy.
        """
        before = time.perf_counter()
        self.stepper.clear()
        sums: dict[str, float] = {"loss": 0.0, "entropy": 0.0}
        logprobs_now: list[NDArray[Any]] = [np.zeros(0, np.float32)] * len(credit)
        for plan in plans:
            told = {name: plan.gather(values) for name, values in scores.items()}
            told["credit"], told["weight"] = plan.gather(credit), plan.gather(weights)
            now = np.zeros(len(plan.action_nodes), np.float32)
            for picked, logprobs, entropies in self.policy.passes(plan):
                here = {name: self.policy.tensor(values[picked], logprobs.dtype) for name, values in told.items()}
                old, reference = here.get("old", logprobs.detach()), here.get("reference")
                terms, measured = objective(logprobs, entropies, old, here["credit"], reference)
                total = (terms * here["weight"]).sum()
                total.backward()
                sums["loss"] += float(total.detach())
                for name, values in measured.items():
                    sums[name] = sums.get(name, 0.0) + float((values * here["weight"]).sum())
                now = placed(now, picked, logprobs)
            hand_out(plan, now, logprobs_now)
        between = time.perf_counter()
        idle = not any(weight.any() for weight in weights)
        metrics = {**sums, **self.stepper.step(math.isfinite(sums["loss"]), idle)}
        self.seconds["forward_backward"] += between - before
        self.seconds["optimizer"] += time.perf_counter() - between
        return metrics, logprobs_now

    def update_critic(
        self, plans: Sequence[Plan], targets: PerTurn, weights: PerTurn, old: PerTurn
    ) -> dict[str, float]:
        """One optimizer step of the critic towards the targets; metrics."""
        assert self.critic is not None
        before = time.perf_counter()
        metrics = self.critic.update(plans, targets, weights, old)
        self.seconds["critic"] += time.perf_counter() - before
        return metrics

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the policy, taken or skipped."""
        return self.stepper.num_updates

    @property
    def num_skipped_in_a_row(self) -> int:
        return self.stepper.num_skipped_in_a_row

    def publish(self) -> Mapping[str, torch.Tensor]:
        """The present weights by name; valid until the next update."""
        weights: Mapping[str, torch.Tensor] = self.policy.model.state_dict()
        return weights

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Weights and tokenizer as transformers reads them, and the optimizer beside them."""
        save_policy(self.policy.model, tokenizer, folder)
        torch.save({**self.stepper.state(), "random": torch.get_rng_state()}, folder / "optimizer.pt")
        if self.critic is not None:
            self.critic.save(folder)

    def restore(self, folder: Path) -> None:
        """Continue from what `save` wrote; the weights were loaded with the model."""
        state = torch.load(folder / "optimizer.pt", weights_only=True, map_location=self.policy.device)
        self.stepper.restore(state)
        torch.set_rng_state(state["random"].cpu())
        if self.critic is not None:
            self.critic.restore(folder)


def placed(values: NDArray[Any], picked: NDArray[np.int64], some: torch.Tensor) -> NDArray[Any]:
    """The values, one per action token of a plan, with those of a pass in their places."""
    found = some.detach().cpu().numpy()
    if len(found) == len(values):
        return found
    values = values.astype(found.dtype, copy=False)
    values[picked] = found
    return values


def hand_out(plan: Plan, values: NDArray[Any], per_turn: list[NDArray[Any]]) -> None:
    """Put a plan's values, one per action token, into the places of its turns."""
    for turn, part in zip(plan.turns, np.split(values, plan.offsets[1:])[:-1], strict=True):
        per_turn[turn] = part


def save_policy(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a folder that `from_pretrained` loads."""
    with no_progress_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
