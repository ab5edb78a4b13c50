"""The learner: scores recorded tokens and takes optimizer steps on plans."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.learn.losses import Loss
from turnwise.learn.policy import Policy, no_progress_bars
from turnwise.learn.schedules import Schedule
from turnwise.plan.plan import Plan

PerTurn = Sequence[NDArray[Any]]


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW and what surrounds it."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip_norm: float = 1.0


class Learner:
    """A policy with an optimizer. One call to `update` is one optimizer step, whatever the number of plans."""

    def __init__(self, policy: Policy, settings: OptimizerSettings, schedule: Schedule) -> None:
        self.policy = policy
        self.settings = settings
        self.schedule = schedule
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in policy.model.parameters() if parameter.requires_grad],
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.num_updates = 0
        """Optimizer steps taken or skipped: what the schedule counts."""
        self.num_skipped_in_a_row = 0
        self.seconds = {"score": 0.0, "forward_backward": 0.0, "optimizer": 0.0}

    @torch.no_grad()
    def score(self, plans: Sequence[Plan], num_turns: int) -> list[NDArray[np.float32]]:
        """Logprobs of every action token under the present weights, one array per turn."""
        before = time.perf_counter()
        scores = [np.zeros(0, np.float32)] * num_turns
        for plan in plans:
            logprobs, _ = self.policy.logprobs(plan)
            parts = np.split(logprobs.float().cpu().numpy(), plan.offsets[1:-1])
            for turn, part in zip(plan.turns, parts, strict=True):
                scores[turn] = part
        self.seconds["score"] += time.perf_counter() - before
        return scores

    def update(
        self, plans: Sequence[Plan], credit: PerTurn, weights: PerTurn, old: PerTurn | None, loss: Loss
    ) -> tuple[dict[str, float], list[NDArray[np.float32]]]:
        """One optimizer step on weight times loss term, summed over the plans; metrics, and each token's logprob as it
        was before the step.

        `old` is one array per turn; without it the policy is its own old policy, as in the only update of a step.
        A non-finite loss or gradient skips the step.
        """
        before = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, float] = {"loss": 0.0, "entropy": 0.0}
        logprobs_now = [np.zeros(0, np.float32)] * len(credit)
        for plan in plans:
            logprobs, entropies = self.policy.logprobs(plan)
            weight, advantages = (self.policy.tensor(plan.gather(x), logprobs.dtype) for x in (weights, credit))
            anchor = logprobs.detach() if old is None else self.policy.tensor(plan.gather(old), logprobs.dtype)
            terms, measured = loss(logprobs, anchor, advantages)
            total = (terms * weight).sum()
            total.backward()
            sums["loss"] += float(total.detach())
            for name, values in {"entropy": entropies.detach(), **measured}.items():
                sums[name] = sums.get(name, 0.0) + float((values * weight).sum())
            parts = np.split(logprobs.detach().float().cpu().numpy(), plan.offsets[1:-1])
            for turn, part in zip(plan.turns, parts, strict=True):
                logprobs_now[turn] = part
        between = time.perf_counter()
        metrics = {**sums, **self.step(math.isfinite(sums["loss"]))}
        self.seconds["forward_backward"] += between - before
        self.seconds["optimizer"] += time.perf_counter() - between
        return metrics, logprobs_now

    def step(self, finite: bool) -> dict[str, float]:
        """Clip and apply the gradient, unless it or the loss is not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), self.settings.clip_norm))
        rate = self.settings.learning_rate * self.schedule(self.num_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.num_updates += 1
        if finite and math.isfinite(norm):
            self.optimizer.step()
            self.num_skipped_in_a_row = 0
        else:
            self.num_skipped_in_a_row += 1
        return {"gradient_norm": norm, "learning_rate": rate, "skipped": float(self.num_skipped_in_a_row > 0)}

    def publish(self) -> Mapping[str, torch.Tensor]:
        """The present weights by name; valid until the next update."""
        weights: Mapping[str, torch.Tensor] = self.policy.model.state_dict()
        return weights

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Weights and tokenizer as transformers reads them, and the optimizer beside them."""
        save_policy(self.policy.model, tokenizer, folder)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "num_updates": self.num_updates,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
            "random": torch.get_rng_state(),
        }
        torch.save(state, folder / "optimizer.pt")

    def restore(self, folder: Path) -> None:
        """Continue from what `save` wrote; the weights were loaded with the model."""
        state = torch.load(folder / "optimizer.pt", weights_only=True, map_location=self.policy.device)
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_updates = state["num_updates"]
        self.num_skipped_in_a_row = state["num_skipped_in_a_row"]
        torch.set_rng_state(state["random"].cpu())


def save_policy(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a folder that `from_pretrained` loads."""
    with no_progress_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
