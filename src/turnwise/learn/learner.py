"""The learner: scores recorded tokens and takes optimizer steps on plans."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.credit.scope import PerTurn
from turnwise.learn.critic import Critic
from turnwise.learn.lora import Adapters, WithoutAdapters
from turnwise.learn.objective import Objective
from turnwise.learn.perturbation import Change, Disturbance
from turnwise.learn.policy import Policy, no_progress_bars
from turnwise.learn.schedules import Schedule
from turnwise.learn.snapshot import names_in, read_snapshot, write_snapshot
from turnwise.learn.stepper import OptimizerSettings, Reduce, Stepper, alone
from turnwise.learn.teacher import Teacher, compare_with_teacher
from turnwise.learn.terms import drop_unweighted, weighted_means
from turnwise.plan.blocks import Index
from turnwise.plan.plan import Plan
from turnwise.pretrained import CausalLM, ChatTokenizer

Beside = Policy | Teacher | WithoutAdapters
"""What scores: its passes yield which action tokens, and what it says of them."""
FOLDER = "optimizer"


class Learner:
    """A policy with an optimizer, a critic where one is needed, and models that stay as they are beside them. One call
    to `update` is one optimizer step, whatever the number of plans."""

    def __init__(
        self,
        policy: Policy,
        settings: OptimizerSettings,
        schedule: Schedule,
        frozen: Mapping[str, Beside] = MappingProxyType({}),
        critic: Critic | None = None,
        reduce: Reduce = alone,
        adapters: Adapters | None = None,
    ) -> None:
        self.models: dict[str, Beside] = {**frozen, "old": policy}
        """By the name of what they score: old, reference, teacher, buckets, values."""
        self.policy = policy
        self.critic = critic
        self.adapters = adapters
        """Of the policy; None where all its weights are trained."""
        self.reduce = reduce
        """What sums of this learner's plans are, added up over all ranks."""
        self.stepper = Stepper(policy.model.named_parameters(), settings, schedule)
        self.seconds = {"score": 0.0, "forward_backward": 0.0, "optimizer": 0.0}
        if critic is not None:
            self.models["values"] = critic.model
            self.seconds["critic"] = 0.0
        self.disturbance: Disturbance | None = None

    @torch.no_grad()
    def score(self, plans: Sequence[Plan], num_turns: int, name: str = "old") -> list[NDArray[Any]]:
        """Logprobs of every action token under the present weights, or under those of a frozen model, or a teacher's
        buckets, or the critic's values before them, one array per turn."""
        before = time.perf_counter()
        scores: list[NDArray[Any]] = [np.zeros(0, np.float32)] * num_turns
        for plan in plans:
            passes: Iterator[tuple[Any, ...]] = self.models[name].passes(plan)
            hand_out(plan, [(picked, array_of(now)) for picked, now, *_ in passes], scores)
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

        Without old scores the policy is its own old policy, as in the only update of a step; without buckets it has no
        teacher. A non-finite loss or gradient skips the step, and so do weights that are all zero: there is nothing to
        learn then, while the optimizer's momentum would still move the policy.
        """
        before = time.perf_counter()
        self.stepper.clear()
        sums: dict[str, float] = {"loss": 0.0, "weight": 0.0}
        logprobs_now: list[NDArray[Any]] = [np.zeros(0, np.float32)] * len(credit)
        for plan in plans:
            told = {name: plan.gather(values) for name, values in scores.items()}
            told["credit"], told["weight"] = plan.gather(credit), plan.gather(weights)
            passes: Iterator[tuple[Any, ...]] = self.policy.passes(plan)
            if (buckets := told.pop("buckets", None)) is not None:
                passes = compare_with_teacher(self.policy, plan, buckets, objective.direction)
            now: list[tuple[Index, NDArray[Any]]] = []
            for picked, *found in passes:
                now.append((picked, array_of(found[0])))
                here, (logprobs, entropies, *apart) = drop_unweighted(self.policy, told, picked, found)
                old, reference = here.get("old", logprobs.detach()), here.get("reference")
                terms, measured = objective(logprobs, entropies, old, here["credit"], reference, *apart)
                total = (terms * here["weight"]).sum()
                total.backward()
                sums["loss"] += float(total.detach())
                sums["weight"] += float(told["weight"][picked].sum())
                for name, values in measured.items():
                    sums[name] = sums.get(name, 0.0) + float((values * here["weight"]).sum())
            hand_out(plan, now, logprobs_now)
        sums = self.reduce(sums)
        between = time.perf_counter()
        stepped = self.stepper.step(math.isfinite(sums["loss"]), idle=not sums["weight"])
        metrics = {**weighted_means(sums, "loss"), **stepped}
        self.seconds["forward_backward"] += between - before
        self.seconds["optimizer"] += time.perf_counter() - between
        return metrics, logprobs_now

    def update_critic(
        self, plans: Sequence[Plan], targets: PerTurn, weights: PerTurn, old: PerTurn
    ) -> dict[str, float]:
        """One optimizer step of the critic towards the targets; metrics."""
        assert self.critic is not None
        before = time.perf_counter()
        metrics = self.critic.update(plans, targets, weights, old, self.reduce)
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
        """The present weights by name, adapters added to them; valid until the next update."""
        return self.plain(self.policy.model.state_dict())

    def plain(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """All of the policy's weights as a model without adapters has them."""
        return weights if self.adapters is None else self.adapters.merged(weights)

    def disturb(self, change: Change) -> int:
        assert self.disturbance is None, "a learner is disturbed once and then set right"
        self.disturbance = Disturbance(self.policy.model, change)
        return self.disturbance.num_new

    def undisturb(self) -> None:
        assert self.disturbance is not None
        self.disturbance.undo()
        self.disturbance = None

    def save(self, folder: Path, tokenizer: ChatTokenizer) -> None:
        """Weights and tokenizer as transformers reads them, and the optimizer beside them."""
        self.save_weights(folder, tokenizer, self.policy.model.state_dict())
        self.save_state(folder)

    def save_weights(self, folder: Path, tokenizer: ChatTokenizer, weights: Mapping[str, torch.Tensor]) -> None:
        """The policy's weights, these being all of them, or only its adapters; and the tokenizer."""
        if self.adapters is None:
            save_policy(self.policy.model, tokenizer, folder, weights)
        else:
            self.adapters.save(folder, weights)
            tokenizer.save_pretrained(folder)

    def save_state(self, folder: Path) -> None:
        """All but the policy's weights."""
        random = {"random": torch.get_rng_state()}
        write_snapshot(folder / FOLDER, {**self.stepper.state(), **random, **self.adapter_weights()})
        if self.critic is not None:
            self.critic.save(folder)

    def restore(self, folder: Path) -> None:
        """Continue from what `save` wrote; all weights but adapters were loaded with the model."""
        others = {"random": torch.get_rng_state(), **self.adapter_weights()}
        state = self.stepper.blank(names_in(folder / FOLDER) - others.keys())
        read_snapshot(folder / FOLDER, {**state, **others})
        self.stepper.restore(state)
        torch.set_rng_state(others["random"])
        if self.critic is not None:
            self.critic.restore(folder)

    def adapter_weights(self) -> dict[str, torch.Tensor]:
        """The adapters themselves, named apart from what the optimizer keeps of them; a model is loaded without."""
        found = {} if self.adapters is None else self.adapters.parameters
        return {f"adapter/{name}": parameter for name, parameter in found.items()}

    def close(self) -> None:
        """Nothing ends with it: it has no process of its own."""


def array_of(found: torch.Tensor | NDArray[Any]) -> NDArray[Any]:
    return found if isinstance(found, np.ndarray) else found.detach().cpu().numpy()


def hand_out(plan: Plan, found: Sequence[tuple[Index, NDArray[Any]]], per_turn: list[NDArray[Any]]) -> None:
    """Put what the passes of a plan found, one value or row per action token, into the places of its turns."""
    if not found:
        return
    values = found[0][1]
    if len(found) > 1:
        values = np.empty((len(plan.action_nodes), *values.shape[1:]), values.dtype)
        for picked, some in found:
            values[picked] = some
    for turn, part in zip(plan.turns, np.split(values, plan.offsets[1:])[:-1], strict=True):
        per_turn[turn] = part


def save_policy(
    model: CausalLM, tokenizer: ChatTokenizer, folder: Path, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write a folder that `from_pretrained` loads, with the model's weights or with these."""
    with no_progress_bars():
        model.save_pretrained(folder, **({} if weights is None else {"state_dict": dict(weights)}))
        tokenizer.save_pretrained(folder)
